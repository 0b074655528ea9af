"""Tests of retention: no cleanup may delete the last checkpoint that can be restored."""

from __future__ import annotations

import asyncio
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
from ckpt.core.log.run_log import Acquire, Commit, RunLog, RunState
from ckpt.errors import UsageError
from ckpt_backends.memory import MemoryStore
from interleave import write_increment
from run_files import manifest_key

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
            at = float(draw(st.integers(0, 40 * DAY_S)))
            state.commits[checkpoint] = Commit(checkpoint, 1, (), "", finite, reason, needs, at)
    known = sorted(state.commits)
    some = st.sets(st.sampled_from(known)) if known else st.just(set[CheckpointId]())
    state.kept = dict.fromkeys(draw(some), "")
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


def test_negative_control_deleted_bases_are_detected() -> None:
    """The oracle rejects the deletion of the newest full ones."""
    state = increments({0, 3, 6, 9}, 20)
    assert wrongly_given_up(state, Keep(1), set(), {CheckpointId(1, 6, "0" * 8)})
    assert wrongly_given_up(state, Keep(1), set(), {CheckpointId(1, 3, "0" * 8)}) == []


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


@on_a_run
async def test_retire_waits_for_a_verified_checkpoint(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    await save(log, mine, 1, 2, 3, 4)
    for verified in (set[CheckpointId](), {CheckpointId(1, 99, "0" * 8)}):
        assert await retention.retire(log, mine, Keep(1), verified) == set()
    assert await sound(store) == [4, 3, 2, 1]


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


@on_a_run
async def test_negative_control_missing_live_file_is_detected(store: MemoryStore, log: RunLog, mine: Acquire) -> None:
    checkpoints = await save(log, mine, 1, 2)
    await store.delete(data_key(checkpoints[0], 0))
    with pytest.raises(AssertionError):
        await sound(store)
