"""Tests of retention: no cleanup may delete the last checkpoint that can be restored."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.core.checkpoint import commits, read, retention
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.retention import ALWAYS, Keep, choose
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest, write_part
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, data_key, new_nonce, owner
from ckpt.core.ipc.messages import Note, ProblemNote
from ckpt.core.log.run_log import Acquire, Commit, Record, RunLog, RunState
from ckpt.core.writer.parts import settle
from ckpt.errors import FencedError, SaveError, StoreError, UsageError
from ckpt.tools.maintain import prune
from ckpt_backends.memory import MemoryStore
from interleave import write_increment
from run_files import DATA_FOLDER, INDEX, MANIFEST, kind_of, manifest_key, select

DAY_S = 86_400
LAYOUT = Layout((TensorSpec("w", "F32", (4,)),), {}, [])


# -- choose --


@st.composite
def states(draw: st.DrawFn) -> tuple[RunState, Keep, set[CheckpointId]]:
    """Draw a run with rollbacks, emergency commits, NaN checkpoints, increments, KEEPs and open checkpoints, a policy,
    and the verified checkpoints."""
    state = RunState()
    for term in range(1, draw(st.integers(1, 4)) + 1):
        present = [c.checkpoint for c in state.lineage()]
        back = draw(st.sampled_from([None, *present]))
        state.acquires.append(Acquire(term, f"{term:08x}", back))
        for step in draw(st.sets(st.integers(0, 30), max_size=5)):
            checkpoint = CheckpointId(term, step, f"{term:08x}")
            finite, reason = draw(st.sampled_from([None, True, False])), draw(st.sampled_from(["due", "ring"]))
            needs = draw(st.sampled_from([(), *((one,) for one in state.commits if one < checkpoint)]))
            at = draw(st.floats(0, 40)) * DAY_S
            state.commits[checkpoint] = Commit(checkpoint, 1, (), "", finite, reason, needs, at)
    known = sorted(state.commits)
    some = st.sets(st.sampled_from(known)) if known else st.just(set[CheckpointId]())
    state.kept = dict.fromkeys(draw(some), "")
    if known and draw(st.booleans()):
        state.held = dict(holding(draw(st.sampled_from(known)), step=step) for step in range(2))
    keep = Keep(
        last=draw(st.integers(1, 4)),
        every=draw(st.sampled_from([None, 1, 5])),
        hours=draw(st.sampled_from([None, 0.5, 48, 480])),
        daily=draw(st.integers(0, 3)),
        weekly=draw(st.integers(0, 3)),
    )
    return state, keep, draw(some)


def ordered(state: RunState) -> list[Commit]:
    """Return checkpoints newest first: the current history, then those that a rollback undid."""
    history = state.lineage()
    undone = sorted((c for c in state.commits.values() if c not in history), key=lambda c: c.checkpoint, reverse=True)
    return [*history, *undone]


def wrongly_given_up(
    state: RunState, keep: Keep, verified: Iterable[CheckpointId], gone: set[CheckpointId]
) -> list[str]:
    """Return every promise that deleting these checkpoints would break (the oracle)."""
    every, problems = ordered(state), []
    alive = set(verified)

    def lost(what: str, found: Iterable[Commit]) -> None:
        problems.extend(f"{what}: {c.checkpoint}" for c in found if c.checkpoint in gone)

    lost("the newest two", every[:ALWAYS])
    lost("the newest two full ones", [c for c in every if not c.needs][:ALWAYS])
    lost("what is built on", [c for c in every if any(c.checkpoint in held.needs for held in state.held.values())])
    lost("the newest verified one", [c for c in every if c.checkpoint in alive][:1])
    lost("the last finite one", [c for c in every if c.finite is not False][:1])
    lost("a KEEP", [c for c in every if c.checkpoint in state.kept])
    lost("one of the last", [c for c in every if c.reason == "due"][: keep.last])
    lost("one of every", [c for c in every if keep.every and c.step % keep.every == 0])
    scheduled = [c for c in every if c.reason == "due"]
    if keep.hours is not None:
        since = max((c.time for c in scheduled), default=0) - keep.hours * 3600
        lost("one of the last hours", [c for c in scheduled if c.time >= since])
    for name, count, form in (("day", keep.daily, "%Y-%m-%d"), ("week", keep.weekly, "%G-%V")):
        newest: dict[str, Commit] = {}
        for one in reversed([c for c in scheduled if c.finite is not False]):
            newest[datetime.fromtimestamp(one.time, UTC).strftime(form)] = one
        lost(
            f"the newest of a {name}",
            [newest[period] for period in sorted(newest)[len(newest) - min(count, len(newest)) :]],
        )
    due = [c.checkpoint for c in state.lineage() if c.reason == "due"]
    newer = [c for c in state.lineage() if c.reason == "ring" and (not due or c.checkpoint > due[0])]
    lost("one of the last that a death persisted after the newest regular one", newer[: max(keep.last, ALWAYS)])
    if gone - state.commits.keys():
        problems.append("what is not there")
    return problems


@given(states())
@settings(max_examples=500, deadline=None)
def test_choose_keeps_all_required_checkpoints(drawn: tuple[RunState, Keep, set[CheckpointId]]) -> None:
    """Kept are the newest verified one, the newest two, the newest two full ones, the last finite one, KEEPs, bases of
    open ones, those of the policy, and those saved after a crash."""
    state, keep, verified = drawn
    assert wrongly_given_up(state, keep, verified, choose(state, keep, verified)) == []


@given(states())
@settings(max_examples=200, deadline=None)
def test_choose_deletes_everything_else(drawn: tuple[RunState, Keep, set[CheckpointId]]) -> None:
    """Each checkpoint that stays has one of these reasons."""
    state, keep, verified = drawn
    gone = choose(state, keep, verified)
    for checkpoint in state.commits.keys() - gone:
        assert wrongly_given_up(state, keep, verified, gone | {checkpoint}), f"{checkpoint} stays without a reason"


def test_negative_control_greedy_policy_is_detected() -> None:
    """The oracle rejects the deletion of the newest, or of the only verified one."""
    checkpoints = [CheckpointId(1, step, "0" * 8) for step in (1, 2, 3)]
    state = RunState(acquires=[Acquire(1, "0" * 8, None)])
    state.commits = {a: Commit(a, 1, (), "") for a in checkpoints}
    assert wrongly_given_up(state, Keep(1), set(), {checkpoints[2]})
    assert wrongly_given_up(state, Keep(1), {checkpoints[0]}, {checkpoints[0]})
    assert wrongly_given_up(state, Keep(1), set(), {checkpoints[0]}) == []


def increments(full: Iterable[int], steps: int, *, undone: Iterable[int] = ()) -> RunState:
    """Make steps 0 to `steps`: those in `full` are full, the others are built on the previous one. Some may belong to
    an undone history."""
    back = CheckpointId(1, min(undone) - 1, "0" * 8) if undone else None
    state = RunState(acquires=[Acquire(1, "0" * 8, None), Acquire(2, "1" * 8, back)])
    before: tuple[CheckpointId, ...] = ()
    for step in range(steps + 1):
        checkpoint = CheckpointId(1, step, "0" * 8)
        state.commits[checkpoint] = Commit(checkpoint, 1, (), "", needs=() if step in full else before)
        before = (checkpoint,)
    return state


def left_by(state: RunState, keep: Keep) -> list[int]:
    """Return the steps that stay if all checkpoints are verified."""
    gone = choose(state, keep, state.commits)
    return sorted(a.step for a in state.commits if a not in gone)


def test_newest_two_full_checkpoints_stay() -> None:
    """However old they are, and before those that a rollback undid. Without increments nothing changes."""
    assert left_by(increments({0, 3, 6, 9}, 20), Keep(2)) == [6, 9, 19, 20]
    assert left_by(increments({0}, 20), Keep(2)) == [0, 19, 20]
    assert left_by(increments({0, 19, 20}, 20), Keep(2)) == [19, 20]
    assert left_by(increments(range(21), 20), Keep(3)) == [18, 19, 20]
    assert left_by(increments({0, 3, 6, 18}, 20, undone=[11]), Keep(2)) == [3, 6, 9, 10]


def holding(*needs: CheckpointId, step: int = 21) -> tuple[CheckpointId, Commit]:
    """Return an increment that one node holds."""
    checkpoint = CheckpointId(9, step, "9" * 8)
    return checkpoint, Commit(checkpoint, 2, (), "", needs=needs)


def test_negative_control_deleted_bases_are_detected() -> None:
    """The oracle rejects the deletion of the newest full ones, and of bases."""
    state = increments({0, 3, 6, 9}, 20)
    assert wrongly_given_up(state, Keep(1), set(), {CheckpointId(1, 6, "0" * 8)})
    assert wrongly_given_up(state, Keep(1), set(), {CheckpointId(1, 3, "0" * 8)}) == []
    state.held = dict([holding(CheckpointId(1, 3, "0" * 8))])
    assert wrongly_given_up(state, Keep(1), set(), {CheckpointId(1, 3, "0" * 8)})


def test_days_weeks_and_hours_keep_old_checkpoints() -> None:
    """A run of 30 days commits every 6 hours, starting on a Thursday: the last two days, 4 days and 3 weeks stay."""
    state = RunState(acquires=[Acquire(1, "0" * 8, None)])
    for step in range(120):
        checkpoint = CheckpointId(1, step, "0" * 8)
        state.commits[checkpoint] = Commit(checkpoint, 1, (), "", time=step * DAY_S / 4)
    hours = list(range(111, 120))  # 48 hours before the newest, at 18:00 of day 29
    assert left_by(state, Keep(1, hours=48)) == hours
    assert left_by(state, Keep(1, daily=4)) == [107, 111, 115, 118, 119]
    assert left_by(state, Keep(1, weekly=3)) == [71, 99, 118, 119]  # Sundays at 18:00, day 17 and 24, and the newest
    bad = CheckpointId(1, 99, "0" * 8)
    state.commits[bad] = replace(state.commits[bad], finite=False)
    assert left_by(state, Keep(1, weekly=3)) == [71, 98, 118, 119], "a diverged step does not represent a week"


@pytest.mark.parametrize(
    "numbers",
    [{"last": 0}, {"last": -1}, {"every": 0}, {"hours": 0}, {"hours": math.nan}, {"daily": -1}, {"weekly": 1.5}],
)
def test_keep_raises_naming_the_wrong_argument(numbers: dict[str, Any]) -> None:
    ((name, number),) = numbers.items()
    with pytest.raises(UsageError, match=rf"Keep\({name}={number}\): {name} must be"):
        Keep(**numbers)


# -- retire --


class Dying(MemoryStore):
    """Fails permanently from the n-th deletion on, as if the process had been killed there."""

    left = 10**9

    async def delete(self, key: str) -> None:
        if self.left <= 0:
            raise StoreError("killed")
        self.left -= 1
        await super().delete(key)


async def opened(store: MemoryStore) -> tuple[RunLog, Acquire]:
    await commits.create_run(store)
    log = RunLog(store)
    await log.open()
    return log, await commits.acquire(log, new_nonce())


def on_a_run(work: Callable[[MemoryStore, RunLog, Acquire], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Turn `work` into a test that starts with a new run and its owner."""

    def test() -> None:
        async def scenario() -> None:
            store = MemoryStore()
            await work(store, *await opened(store))

        asyncio.run(scenario())

    test.__doc__ = work.__doc__
    return test


def snapshot(mine: Acquire, step: int) -> RankSnapshot:
    return RankSnapshot(CheckpointId(mine.term, step, mine.nonce), LAYOUT, memoryview(f"{step:016d}".encode()), [])


async def save(log: RunLog, mine: Acquire, *steps: int) -> list[CheckpointId]:
    for step in steps:
        await commits.commit(log, mine, [await write_part(log.store, snapshot(mine, step))])
    return [CheckpointId(mine.term, step, mine.nonce) for step in steps]


async def files(store: MemoryStore) -> dict[int, int]:
    """Return the number of files of each step."""
    found: dict[int, int] = {}
    for key in store.objects:
        if (checkpoint := owner(key)) is not None:
            found[checkpoint.step] = found.get(checkpoint.step, 0) + 1
    return found


async def sound(store: MemoryStore) -> list[int]:
    """Return the live steps, newest first, after checking that each is complete."""
    log = await read.open_run(store.url, store)
    for found in log.state.commits.values():
        assert await read.verify(store, found) == []
    return [c.step for c in log.state.lineage()]


WHOLE = 3  # files of a checkpoint: data file, manifest, index


@on_a_run
async def test_retire_deletes_only_files_of_retired(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """All files of retired checkpoints are deleted, and the others stay readable. A second call does nothing."""
    checkpoints = await save(log, mine, 1, 2, 3, 4, 5)
    store.objects["notes/mine.txt"] = b"the user's"
    store.objects[f"{DATA_FOLDER}/notes.txt"] = b"the user's"
    gone = await retention.retire(log, mine, Keep(2), {checkpoints[-1]})
    assert gone == set(checkpoints[:3])
    assert await files(store) == {4: WHOLE, 5: WHOLE}
    assert await sound(store) == [5, 4]
    assert {"notes/mine.txt", f"{DATA_FOLDER}/notes.txt"} <= store.objects.keys()
    records = log.state.next_seq
    assert await retention.retire(log, mine, Keep(2), {checkpoints[-1]}) == set()
    assert log.state.next_seq == records


def test_concurrent_retirement_is_not_reported_as_damage() -> None:
    """Another writer deleted checkpoints that are still in our view of the log: no repair is suggested.
    Missing files of a live checkpoint are reported once."""

    async def scenario() -> None:
        store, told = MemoryStore(), list[Note]()
        log, mine = await opened(store)
        checkpoints = await save(log, mine, 1, 2, 3)
        ours = RunLog(store)
        await ours.open()
        place = OpenTier(store.url, Keep(2), ours)
        await retention.retire(log, mine, Keep(2), {checkpoints[-1]})
        retention._cache.clear()  # as in another process
        await place._warn(told.append)
        assert checkpoints[0] not in ours.state.commits and told == []
        await store.delete_many([key for key in store.objects if owner(key) == checkpoints[1]])
        retention._cache.clear()
        for _ in range(2):
            await place._warn(told.append)
        (said,) = told
        assert isinstance(said, ProblemNote) and f"step 2 of {store.url} cannot be read" in said.text
        assert manifest_key(checkpoints[1]) in said.text  # the name of the file, with its damage

    asyncio.run(scenario())


def test_concurrent_commit_is_not_reported_as_damage() -> None:
    """Another rank commits a checkpoint while older ones are checked: no repair is suggested."""

    class Busy(MemoryStore):
        meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None

        async def get(self, key: str, **where: Any) -> memoryview:
            if kind_of(key) == INDEX and self.meanwhile is not None:
                work, self.meanwhile = self.meanwhile, None
                await work()
            return await super().get(key, **where)

    async def scenario() -> None:
        store, told = Busy(), list[Note]()
        log, mine = await opened(store)
        await save(log, mine, 1, 2, 3)
        ours = RunLog(store)
        await ours.open()

        async def meanwhile() -> None:
            await save(log, mine, 4)
            await ours.refresh()

        store.meanwhile = meanwhile
        retention._cache.clear()  # as in another process
        await OpenTier(store.url, Keep(2), ours)._warn(told.append)
        assert len(ours.state.commits) == 4 and told == []

    asyncio.run(scenario())


@on_a_run
async def test_retire_waits_for_a_verified_checkpoint(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """Cleanup waits if nothing is verified, or only checkpoints that are no longer live."""
    await save(log, mine, 1, 2, 3, 4)
    for verified in (set[CheckpointId](), {CheckpointId(1, 99, "0" * 8)}):
        assert await retention.retire(log, mine, Keep(1), verified) == set()
    assert await sound(store) == [4, 3, 2, 1]


@on_a_run
async def test_retire_sweeps_files_of_ended_checkpoints(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """The next cleanup deletes unused files of ended checkpoints, and never those of open ones."""
    store.objects[data_key(CheckpointId(mine.term, 2, mine.nonce), 0)] = b"half"  # its writer died before the manifest
    await save(log, mine, 1)
    written = await write_part(store, snapshot(mine, 2), numbers=itertools.count(1))
    await commits.commit(log, mine, [written])
    await write_part(store, snapshot(mine, 3))
    await commits.abort(log, mine, CheckpointId(mine.term, 3, mine.nonce), "for the test")
    await write_part(store, snapshot(mine, 4))  # open
    assert await retention.retire(log, mine, Keep(5), {CheckpointId(mine.term, 2, mine.nonce)}) == set()
    assert await files(store) == {1: WHOLE, 2: WHOLE, 4: WHOLE - 1}
    assert data_key(CheckpointId(mine.term, 2, mine.nonce), 0) not in store.objects
    assert await sound(store) == [2, 1]


@pytest.mark.parametrize("end", ["COMMIT", "ABORT"])
def test_base_of_held_checkpoint_stays(end: str) -> None:
    """The base outlives the policy until the held checkpoint has ended. Then it is deleted, except used data files."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        checkpoints = await save(log, mine, 1, 2, 3)
        of = CheckpointId(mine.term, 4, mine.nonce)
        written = await increment(log, mine, 4, await commits.load_manifest(store, checkpoints[0], 0))
        await commits.commit(log, mine, [written], kind="HELD")
        assert await retention.retire(log, mine, Keep(1), {checkpoints[-1]}) == set()
        assert await files(store) == {1: WHOLE, 2: WHOLE, 3: WHOLE, 4: WHOLE}
        if end == "COMMIT":
            await commits.complete(log, mine, of)
        else:
            await commits.abort(log, mine, of, "for the test", held=True)
        assert checkpoints[0] in await retention.retire(log, mine, Keep(1), {checkpoints[-1]})
        assert (await files(store)).get(1, 0) == (1 if end == "COMMIT" else 0)

    asyncio.run(scenario())


@on_a_run
async def test_retract_removes_base_of_an_increment(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """`retract` removes a wrong checkpoint even if others build on it. Those are aborted and deleted."""
    checkpoints = await save(log, mine, 1, 2, 3)
    written = await increment(log, mine, 4, await commits.load_manifest(store, checkpoints[0], 0))
    await commits.retract(log, mine, checkpoints[0], "it mixes two moments")
    with pytest.raises(SaveError, match="which no live checkpoint uses"):
        await settle(log, lambda: mine, written, commits.Role(), deadline_s=1000)
    await retention.retire(log, mine, Keep(1), {checkpoints[-1]})
    assert await files(store) == {2: WHOLE, 3: WHOLE}
    assert await sound(store) == [3, 2]


async def increment(log: RunLog, mine: Acquire, step: int, base: WrittenManifest) -> WrittenManifest:
    """Write a manifest that takes all chunks from an older checkpoint, with an empty data file."""
    at = int(base.table.offset[0])
    data = await log.store.get(base.table.files[int(base.table.file[0])], start=at, length=16)
    return await write_increment(log.store, replace(snapshot(mine, step), data=data), base, ["w"])


async def chain(log: RunLog, mine: Acquire, *steps: int) -> list[CheckpointId]:
    """Save a full checkpoint and increments, each built on the previous one. All refer to the first data file."""
    checkpoints = await save(log, mine, steps[0])
    base = await commits.load_manifest(log.store, checkpoints[0], 0)
    for step in steps[1:]:
        checkpoints.append(CheckpointId(mine.term, step, mine.nonce))
        base = await increment(log, mine, step, base)
        await commits.commit(log, mine, [base])
    return checkpoints


def check_shared_files(*, orphans: bool = True, remembered: bool = False) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        checkpoints = await chain(log, mine, 1, 2, 3, 4)
        later = await save(log, mine, 5, 6)
        retention._cache.clear()
        if remembered:  # as in the process that has just written it
            found = await commits.load_manifest(store, checkpoints[3], 0)
            retention.remember_files(log, checkpoints[3], found.table.files)
        await retention.retire(log, mine, Keep(3), {later[-1]}, orphans=orphans)
        assert await files(store) == {1: 1, 4: WHOLE, 5: WHOLE, 6: WHOLE}
        assert data_key(checkpoints[0], 0) in store.objects
        assert await sound(store) == [6, 5, 4]
        await retention.retire(log, mine, Keep(2), {later[-1]}, orphans=orphans)
        assert await files(store) == {5: WHOLE, 6: WHOLE}
        assert await sound(store) == [6, 5]

    asyncio.run(scenario())


@pytest.mark.parametrize("orphans", [False, True])
@pytest.mark.parametrize("remembered", [False, True])
def test_shared_data_file_stays_while_used(orphans: bool, remembered: bool) -> None:
    """Other files are deleted immediately. The data file is deleted with the last checkpoint that uses it."""
    check_shared_files(orphans=orphans, remembered=remembered)


def test_negative_control_missing_shared_file_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails if cleanup assigns a data file only to the checkpoint that wrote it."""
    files_of = retention.files_of

    async def own(*args: Any) -> dict[CheckpointId, set[str]]:
        return {of: {key for key in keys if owner(key) == of} for of, keys in (await files_of(*args)).items()}

    monkeypatch.setattr(retention, "files_of", own)
    with pytest.raises(AssertionError):
        check_shared_files()


# -- the commands --


async def swept(store: MemoryStore, *, abort_open: bool = False) -> tuple[prune.GcPlan, RunLog]:
    """Run the steps of `ckpt gc --yes`."""
    log = await read.open_run(store.url, store)
    stock = await prune.take_stock(log)
    plan = prune.plan_gc(store.url, log.state, stock, [], abort_open)
    landed, _ = await prune.gc(log, stock, plan.ending)
    assert set(landed.delete) == {key for key, _ in plan.delete}
    await prune.delete(store, plan.delete, grace_s=0.0)
    return plan, log


@on_a_run
async def test_gc_counts_shared_files_as_live(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """A file that a live increment uses is not deleted, though nothing else of its owner exists."""
    checkpoints = await chain(log, mine, 1, 2, 3)
    await commits.retract(log, mine, checkpoints[0], "for the test")
    await commits.retract(log, mine, checkpoints[1], "for the test")
    plan, _ = await swept(store)
    # Their manifests and indexes were deleted immediately.
    assert {item.checkpoint: item.files for item in plan.doomed} == {checkpoints[1]: 1}
    kept = {key for key in store.objects if owner(key) is not None}
    assert plan.live.files == len(kept) == WHOLE + 1
    assert plan.live.size == sum(len(store.objects[key]) for key in kept)
    assert await sound(store) == [3]
    assert not (await swept(store))[0].delete


@on_a_run
async def test_prune_keeps_data_files_of_increments(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """`ckpt prune` deletes the base of increments, but not its data file."""
    await chain(log, mine, 1, 2, 3)
    await save(log, mine, 4, 5)
    await chain(log, mine, 6, 7)
    stock = await prune.take_stock(log)
    plan = prune.plan_prune(log, stock, Keep(5))
    assert [item.checkpoint.step for item in plan.give_up] == [2, 1]
    assert [item.files for item in plan.give_up] == [WHOLE, WHOLE - 1]
    landed = await prune.prune(log, stock, Keep(5), plan.check.checkpoint)
    await prune.delete(store, stock.files(landed.delete), grace_s=0.0)
    assert await sound(store) == [7, 6, 5, 4, 3]


def test_crash_during_deletions_leaves_live_checkpoints_complete() -> None:
    """After PLAN and any number of deletions, every live checkpoint is complete, and the next cleanup finishes."""

    async def scenario() -> None:
        for survived in range(3 * WHOLE):
            store = Dying()
            log, mine = await opened(store)
            checkpoints = await save(log, mine, 1, 2, 3, 4, 5)
            store.left = survived
            with pytest.raises(StoreError):
                await retention.retire(log, mine, Keep(2), {checkpoints[-1]})
            assert await sound(store) == [5, 4]
            store.left = 10**9
            log, mine = await opened(store)  # a new job
            await commits.recover(log, mine)
            await retention.retire(log, mine, Keep(2), {checkpoints[-1]})
            assert await files(store) == {4: WHOLE, 5: WHOLE}

    asyncio.run(scenario())


@on_a_run
async def test_negative_control_missing_live_file_is_detected(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """The check above detects a live record whose file is missing."""
    checkpoints = await save(log, mine, 1, 2)
    await store.delete(data_key(checkpoints[0], 0))
    with pytest.raises(AssertionError):
        await sound(store)


@on_a_run
async def test_fenced_job_deletes_nothing(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """The cleanup of a fenced job fails at its PLAN."""
    checkpoints = await save(log, mine, 1, 2, 3, 4)
    await opened(store)
    with pytest.raises(FencedError):
        await retention.retire(log, mine, Keep(1), {checkpoints[-1]})
    assert await files(store) == dict.fromkeys((1, 2, 3, 4), WHOLE)


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_retire_with_damaged_log_deletes_nothing(damage: bytes | None) -> None:
    """The lost record might be a KEEP: `retire` does nothing, however often it is called."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await opened(store)
        await save(log, mine, 1, 2)
        key = f"log/{log.state.next_seq:012d}.json"
        keep = Record("KEEP", {"checkpoint": f"000000001.1-{mine.nonce}", "note": ""}, "keep")
        await log.append(lambda state: keep, owner=mine)
        checkpoints = await save(log, mine, 3, 4, 5)
        if damage is None:
            del store.objects[key]
        else:
            store.objects[key] = damage
        again, mine = await opened(store)
        before = dict(store.objects)
        for _ in range(3):
            assert await retention.retire(again, mine, Keep(1), {checkpoints[-1]}) == set()
        assert store.objects == before

    asyncio.run(scenario())


@on_a_run
async def test_unreadable_checkpoint_prevents_all_deletions(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    """If index and manifest are damaged, the files it needs are unknown, so none is deleted until it is retired."""
    checkpoints = await save(log, mine, 1, 2, 3, 4)
    keys = [key for kind in (INDEX, MANIFEST) for key in select(store.objects, kind, of=checkpoints[2])]
    whole = {key: store.objects[key] for key in keys}
    store.objects |= dict.fromkeys(keys, b"damaged")
    retention._cache.clear()  # as after a restart
    assert await retention.retire(log, mine, Keep(1), {checkpoints[-1]}) == set()
    assert await files(store) == dict.fromkeys((1, 2, 3, 4), WHOLE)
    store.objects |= whole
    assert {a.step for a in await retention.retire(log, mine, Keep(1), {checkpoints[-1]})} == {1, 2}
    more = await save(log, mine, 5, 6)
    store.objects |= dict.fromkeys(keys, b"damaged")
    assert {a.step for a in await retention.retire(log, mine, Keep(1), {more[-1]})} == {3, 4}


def test_commit_before_plan_protects_its_files() -> None:
    """PLAN is appended only as the very next record. Files of a checkpoint that it did not know are never deleted."""

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
        checkpoints = await save(log, mine, 1, 2, 3, 4)
        other = await read.open_run(store.url, store)

        async def meanwhile() -> None:
            await save(other, mine, 5)

        store.then = meanwhile
        await retention.retire(log, mine, Keep(1), {checkpoints[-1]})
        assert (await sound(store))[0] == 5
        assert (await files(store))[5] == WHOLE

    asyncio.run(scenario())
