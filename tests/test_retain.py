"""What goes and what stays: no clean-up may take what could be the last thing that can be restored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import commit, read, retain
from ckpt.errors import CheckpointError, FencedError, StoreError, UsageError
from ckpt.log import Acquire, Commit, Record, RunLog, RunState
from ckpt.manifest import Attempt, new_nonce, owner, pack_key
from ckpt.plan import Layout, TensorSpec
from ckpt.retain import ALWAYS, Keep, choose
from ckpt.write import Snapshot, write_part
from ckpt_backends.memory import MemoryStore

LAYOUT = Layout((TensorSpec("w", "F32", (4,)),), {}, [])


# -- choose --


@st.composite
def states(draw: st.DrawFn) -> tuple[RunState, Keep, set[Attempt]]:
    """A run with rollbacks, ring commits, NaN checkpoints and KEEPs; how much to keep; what has been verified."""
    state = RunState()
    for epoch in range(1, draw(st.integers(1, 4)) + 1):
        present = [c.attempt for c in state.lineage()]
        back = draw(st.sampled_from([None, *present]))
        state.acquires.append(Acquire(epoch, f"{epoch:08x}", back))
        for step in draw(st.sets(st.integers(0, 30), max_size=5)):
            attempt = Attempt(epoch, step, f"{epoch:08x}")
            finite, reason = draw(st.sampled_from([None, True, False])), draw(st.sampled_from(["due", "ring"]))
            state.commits[attempt] = Commit(attempt, 1, (), "", finite, reason)
    known = sorted(state.commits)
    some = st.sets(st.sampled_from(known)) if known else st.just(set[Attempt]())
    state.kept = dict.fromkeys(draw(some), "")
    keep = Keep(last=draw(st.integers(1, 4)), every=draw(st.sampled_from([None, 1, 5])))
    return state, keep, draw(some)


def ordered(state: RunState) -> list[Commit]:
    """Newest first: the present history, then what a rollback undid."""
    history = state.lineage()
    undone = sorted((c for c in state.commits.values() if c not in history), key=lambda c: c.attempt, reverse=True)
    return [*history, *undone]


def wrongly_given_up(state: RunState, keep: Keep, verified: Iterable[Attempt], gone: set[Attempt]) -> list[str]:
    """The oracle: every promise that giving these up would break."""
    every, problems = ordered(state), []
    alive = set(verified)

    def lost(what: str, found: Iterable[Commit]) -> None:
        problems.extend(f"{what}: {c.attempt}" for c in found if c.attempt in gone)

    lost("the newest two", every[:ALWAYS])
    lost("the newest verified one", [c for c in every if c.attempt in alive][:1])
    lost("the last finite one", [c for c in every if c.finite is not False][:1])
    lost("a KEEP", [c for c in every if c.attempt in state.kept])
    lost("one of the last", [c for c in every if c.reason == "due"][: keep.last])
    lost("one of every", [c for c in every if keep.every and c.step % keep.every == 0])
    due = [c.attempt for c in state.lineage() if c.reason == "due"]
    newer = [c for c in state.lineage() if c.reason == "ring" and (not due or c.attempt > due[0])]
    lost("one of the last that a death persisted after the newest regular one", newer[: max(keep.last, ALWAYS)])
    if gone - state.commits.keys():
        problems.append("what is not there")
    return problems


@given(states())
@settings(max_examples=500, deadline=None)
def test_choose_never_gives_up_what_must_stay(drawn: tuple[RunState, Keep, set[Attempt]]) -> None:
    """The newest verified, newest two, last finite one, KEEPs, what the policy names, what a death persisted."""
    state, keep, verified = drawn
    assert wrongly_given_up(state, keep, verified, choose(state, keep, verified)) == []


@given(states())
@settings(max_examples=200, deadline=None)
def test_choose_gives_up_everything_else(drawn: tuple[RunState, Keep, set[Attempt]]) -> None:
    """Clean-up is not shy: each checkpoint that stays has one of those reasons."""
    state, keep, verified = drawn
    gone = choose(state, keep, verified)
    for attempt in state.commits.keys() - gone:
        assert wrongly_given_up(state, keep, verified, gone | {attempt}), f"{attempt} stays without a reason"


def test_choose_settles() -> None:
    """Giving up what was chosen makes nothing else due: a second clean-up right after the first has nothing to do."""
    state = RunState(acquires=[Acquire(1, "0" * 8, None)])
    for step in range(20):
        attempt = Attempt(1, step, "0" * 8)
        state.commits[attempt] = Commit(attempt, 1, (), "", None, "ring" if step % 3 else "due")
    verified = {max(state.commits)}
    for attempt in choose(state, Keep(2, every=7), verified):
        del state.commits[attempt]
    assert sorted(a.step for a in state.commits) == [0, 7, 14, 15, 18, 19]
    assert choose(state, Keep(2, every=7), verified) == set()


def test_negative_control_a_greedy_policy_is_seen() -> None:
    """The oracle objects to giving up the newest, or everything."""
    attempts = [Attempt(1, step, "0" * 8) for step in (1, 2, 3)]
    state = RunState(acquires=[Acquire(1, "0" * 8, None)])
    state.commits = {a: Commit(a, 1, (), "") for a in attempts}
    assert wrongly_given_up(state, Keep(1), set(), {attempts[2]})
    assert wrongly_given_up(state, Keep(1), {attempts[0]}, {attempts[0]})
    assert wrongly_given_up(state, Keep(1), set(), {attempts[0]}) == []


@pytest.mark.parametrize("numbers", [{"last": 0}, {"last": -1}, {"every": 0}])
def test_a_senseless_policy_is_refused(numbers: dict[str, int]) -> None:
    """Keeping nothing is not a policy."""
    with pytest.raises(UsageError):
        Keep(**numbers)


# -- retire --


class Dying(MemoryStore):
    """Fails for ever from the n-th deletion on, as if the process had been killed there."""

    left = 10**9

    async def delete(self, key: str) -> None:
        if self.left <= 0:
            raise StoreError("killed")
        self.left -= 1
        await super().delete(key)


async def opened(store: MemoryStore) -> tuple[RunLog, Acquire]:
    await commit.create_run(store)
    log = RunLog(store)
    await log.open()
    return log, await commit.acquire(log, new_nonce())


def snapshot(mine: Acquire, step: int) -> Snapshot:
    return Snapshot(Attempt(mine.epoch, step, mine.nonce), LAYOUT, memoryview(f"{step:016d}".encode()), [])


async def save(log: RunLog, mine: Acquire, *steps: int) -> list[Attempt]:
    for step in steps:
        await commit.commit(log, mine, [await write_part(log.store, snapshot(mine, step))])
    return [Attempt(mine.epoch, step, mine.nonce) for step in steps]


async def files(store: MemoryStore) -> dict[int, int]:
    """By step, how many files of it there are."""
    found: dict[int, int] = {}
    for key in store.objects:
        if (attempt := owner(key)) is not None:
            found[attempt.step] = found.get(attempt.step, 0) + 1
    return found


async def sound(store: MemoryStore) -> list[int]:
    """The steps that are live, newest first; every one of them is whole."""
    log = await read.open_run(store.url, store)
    for found in log.state.commits.values():
        assert await read.verify(store, found) == []
    return [c.step for c in log.state.lineage()]


WHOLE = 4  # files of a checkpoint: pack, part, table, index


def test_retire_deletes_the_files_of_what_it_gives_up_and_no_others() -> None:
    """All four files of each goes; the rest can still be read; a second call finds nothing to do."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3, 4, 5)
        store.objects["notes/mine.txt"] = b"the user's"
        store.objects["packs/notes.txt"] = b"the user's"
        gone = await retain.retire(log, mine, Keep(2), {attempts[-1]})
        assert gone == set(attempts[:3])
        assert await files(store) == {4: WHOLE, 5: WHOLE}
        assert await sound(store) == [5, 4]
        assert {"notes/mine.txt", "packs/notes.txt"} <= store.objects.keys()
        records = log.state.next_seq
        assert await retain.retire(log, mine, Keep(2), {attempts[-1]}) == set()
        assert log.state.next_seq == records

    asyncio.run(scenario())


def test_nothing_goes_before_something_that_stays_was_verified() -> None:
    """With nothing verified, or only what is not live any more, clean-up waits."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        await save(log, mine, 1, 2, 3, 4)
        for verified in (set[Attempt](), {Attempt(1, 99, "0" * 8)}):
            assert await retain.retire(log, mine, Keep(1), verified) == set()
        assert await sound(store) == [4, 3, 2, 1]

    asyncio.run(scenario())


def test_leftovers_of_aborted_attempts_and_other_tries_are_swept() -> None:
    """Files of an ended attempt that no checkpoint uses go with the next clean-up; those of an open attempt never."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        await write_part(store, snapshot(mine, 2), number=0)  # a first try, written again below
        await save(log, mine, 1)
        written = await write_part(store, snapshot(mine, 2), number=1)
        await commit.commit(log, mine, [written])
        await write_part(store, snapshot(mine, 3))
        await commit.abort(log, mine, Attempt(mine.epoch, 3, mine.nonce), "for the test")
        await write_part(store, snapshot(mine, 4))  # open
        assert await retain.retire(log, mine, Keep(5), {Attempt(mine.epoch, 2, mine.nonce)}) == set()
        assert await files(store) == {1: WHOLE, 2: WHOLE, 4: WHOLE - 1}
        assert pack_key(Attempt(mine.epoch, 2, mine.nonce), 0, 0) not in store.objects
        assert await sound(store) == [2, 1]

    asyncio.run(scenario())


def test_what_an_open_attempt_pins_stays() -> None:
    """A pack that BEGIN names outlives the checkpoint it came from."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3)
        pinned = pack_key(attempts[0], 0, 0)
        body = {"attempt": str(Attempt(mine.epoch, 4, mine.nonce)), "pins": [pinned]}
        await log.append(lambda state: Record("BEGIN", body, "begin"), owner=mine)
        assert await retain.retire(log, mine, Keep(1), {attempts[-1]}) == {attempts[0]}
        assert await files(store) == {1: 1, 2: WHOLE, 3: WHOLE}
        assert pinned in store.objects

    asyncio.run(scenario())


def test_keep_protects_for_ever() -> None:
    """A KEEP outlives every policy."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3, 4, 5)
        kept = Record("KEEP", {"attempt": str(attempts[1]), "note": "the good one"}, "keep")
        await log.append(lambda state: kept, owner=mine)
        await retain.retire(log, mine, Keep(1), {attempts[-1]})
        assert await sound(store) == [5, 4, 2]

    asyncio.run(scenario())


def test_a_crash_at_any_moment_of_the_deletions_leaves_no_live_record_without_its_files() -> None:
    """After PLAN and any number of deletions everything live is whole, and the next clean-up finishes the job."""

    async def scenario() -> None:
        for survived in range(3 * WHOLE):
            store = Dying()
            log, mine = await opened(store)
            attempts = await save(log, mine, 1, 2, 3, 4, 5)
            store.left = survived
            with pytest.raises(StoreError):
                await retain.retire(log, mine, Keep(2), {attempts[-1]})
            assert await sound(store) == [5, 4]
            store.left = 10**9
            log, mine = await opened(store)  # a new job
            await commit.recover(log, mine)
            await retain.retire(log, mine, Keep(2), {attempts[-1]})
            assert await files(store) == {4: WHOLE, 5: WHOLE}

    asyncio.run(scenario())


def test_negative_control_deleting_without_a_plan_is_seen() -> None:
    """The check above does notice a live record whose file is gone."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2)
        await store.delete(pack_key(attempts[0], 0, 0))
        with pytest.raises(AssertionError):
            await sound(store)

    asyncio.run(scenario())


def test_an_older_incarnation_deletes_nothing() -> None:
    """A fenced job's clean-up ends at its PLAN."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3, 4)
        await opened(store)
        with pytest.raises(FencedError):
            await retain.retire(log, mine, Keep(1), {attempts[-1]})
        assert await files(store) == dict.fromkeys((1, 2, 3, 4), WHOLE)

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_damaged_log_deletes_nothing(damage: bytes | None) -> None:
    """The lost record might have been a KEEP: `retire` does nothing, however often it is called."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        await save(log, mine, 1, 2)
        key = f"log/{log.state.next_seq:012d}.json"
        await log.append(lambda state: Record("KEEP", {"attempt": f"1.{mine.nonce}-1", "note": ""}, "keep"), owner=mine)
        attempts = await save(log, mine, 3, 4, 5)
        if damage is None:
            del store.objects[key]
        else:
            store.objects[key] = damage
        again, mine = await opened(store)
        before = dict(store.objects)
        for _ in range(3):
            assert await retain.retire(again, mine, Keep(1), {attempts[-1]}) == set()
        assert store.objects == before

    asyncio.run(scenario())


def test_a_checkpoint_that_cannot_be_read_keeps_everything_while_it_stays() -> None:
    """Which packs it needs is unknown, so none is deleted; once it is given up itself, clean-up goes on."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3, 4)
        part = next(k for k in store.objects if k.startswith("parts/") and str(attempts[2]) in k and k.endswith("json"))
        whole, store.objects[part] = store.objects[part], b"damaged"
        assert await retain.retire(log, mine, Keep(1), {attempts[-1]}) == set()
        assert await files(store) == dict.fromkeys((1, 2, 3, 4), WHOLE)
        store.objects[part] = whole
        assert {a.step for a in await retain.retire(log, mine, Keep(1), {attempts[-1]})} == {1, 2}
        more = await save(log, mine, 5, 6)
        store.objects[part] = b"damaged"
        assert {a.step for a in await retain.retire(log, mine, Keep(1), {more[-1]})} == {3, 4}

    asyncio.run(scenario())


def test_a_commit_that_comes_in_between_makes_clean_up_think_again() -> None:
    """PLAN lands at exactly the next record; files of a checkpoint that it did not know are never deleted."""

    class Late(MemoryStore):
        then: Any = None

        async def put(self, key: str, data: Any, *, create: bool = False) -> None:
            if self.then is not None and key.startswith("log/"):
                work, self.then = self.then, None
                await work()
            await super().put(key, data, create=create)

    async def scenario() -> None:
        store = Late()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3, 4)
        other = await read.open_run(store.url, store)

        async def meanwhile() -> None:
            await save(other, mine, 5)

        store.then = meanwhile
        await retain.retire(log, mine, Keep(1), {attempts[-1]})
        assert (await sound(store))[0] == 5
        assert (await files(store))[5] == WHOLE

    asyncio.run(scenario())


def test_errors_of_clean_up_are_ours() -> None:
    """Whatever a store answers while cleaning up, the error is a CheckpointError."""

    class Odd(MemoryStore):
        async def delete(self, key: str) -> None:
            raise StoreError("no")

    async def scenario() -> None:
        store = Odd()
        log, mine = await opened(store)
        attempts = await save(log, mine, 1, 2, 3)
        with pytest.raises(CheckpointError):
            await retain.retire(log, mine, Keep(1), {attempts[-1]})
        assert await sound(store) == [3, 2]

    asyncio.run(scenario())
