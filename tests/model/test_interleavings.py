"""No order of requests, and none of their faults, breaks a run in an object store: see `interleave`.

CKPT_SCHEDULES=1000000 CKPT_SEED=0 pytest -m long tests/model/test_interleavings.py
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest

import interleave
from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import manifests, retention
from ckpt.core.checkpoint.commits import Recovery, Role
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest
from ckpt.core.format.manifest import CheckpointId, data_key, is_manifest, owner
from ckpt.core.log import run_log
from ckpt.core.log import run_log as log_files
from ckpt.core.log.run_log import Acquire, Commit, Listed, RunLog, RunState
from ckpt.core.writer import parts as settling
from ckpt.errors import FullError, OutcomeUnknownError, StoreError
from ckpt.store import Store
from interleave import Failure, Rank, Sim, SimStore, schedule
from run_files import INDEX, kind_of

QUICK = 200  # schedules that are always tried, and half as many others that are drawn anew each time
LONG = int(os.environ.get("CKPT_SCHEDULES", "1000000"))
FIRST = int(os.environ.get("CKPT_SEED", "0"))


def first_failure(seeds: range) -> Failure | None:
    return next((failure for seed in seeds if (failure := schedule(seed)) is not None), None)


def check(seeds: range) -> None:
    failure = first_failure(seeds)
    if failure is not None:
        pytest.fail(f"of schedules {seeds.start} to {seeds.stop - 1}, {failure}", pytrace=False)
    print(f"schedules {seeds.start} to {seeds.stop - 1}: {len(seeds)} without a violation")


def test_no_interleaving_breaks_a_run() -> None:
    """Whatever jobs, cleaners and readers do at once, and whatever becomes of their requests, every rule of the oracle
    holds after each of them, and the run can be gone on with afterwards.

    The schedules are not vacuous: jobs take over and are fenced, checkpoints are committed, retired and read, processes
    die, replies are lost, requests land late, and attempts are given up and rolled forward.
    """
    sims = [Sim(seed) for seed in range(FIRST, FIRST + QUICK)]
    assert [failure for sim in sims if (failure := interleave.play(sim)) is not None] == []
    seen = "\n".join(sim.told() for sim in sims)
    for what in (
        "lost, done", "lost, not done", "lost, lands later", "lands now", "409", "412 on our own", "killed, done",
        "killed, not done", "dies", "restored", "FencedError", "COMMIT", "ABORT", "PLAN",
    ):  # fmt: skip
        assert what in seen, f"nothing was ever {what}"
    assert sum(len(sim.oracle.acknowledged) for sim in sims) > len(sims)
    assert sum(sim.oracle.increments > 2 for sim in sims) > len(sims) // 5  # the last two are of the end
    assert any("retired" in sim.oracle.ended.values() for sim in sims)
    assert sum("stopped after MAX_TURNS turns" in sim.told() for sim in sims) < len(sims) // 20


def test_no_drawn_interleaving_breaks_a_run() -> None:
    """A failure names its seed."""
    start = random.randrange(QUICK, 10**9)
    check(range(start, start + QUICK // 2))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_interleaving_breaks_a_run_long() -> None:
    """The same, CKPT_SCHEDULES times from CKPT_SEED on."""
    check(range(FIRST, FIRST + LONG))


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same requests in the same order with the same outcomes: a failure can be looked at."""
    told = []
    for _ in range(2):
        told.append([])
        for seed in range(6):
            sim = Sim(seed)
            assert interleave.play(sim) is None
            told[-1].append(sim.told())
    assert told[0] == told[1]
    assert len(set(told[0])) == 6


# -- negative controls: a rule is left out, and somebody must notice --


def records_overwrite(patch: pytest.MonkeyPatch) -> None:
    """Log records are put, rather than created only if nobody else has."""
    put = SimStore.put

    async def plain(self: SimStore, key: str, data: Any, *, create: bool = False) -> None:
        await put(self, key, data, create=create and not key.startswith("log/"))

    patch.setattr(SimStore, "put", plain)


def manifests_overwrite(patch: pytest.MonkeyPatch) -> None:
    """A writer puts its manifest in place of one that is there."""
    put = SimStore.put

    async def plain(self: SimStore, key: str, data: Any, *, create: bool = False) -> None:
        await put(self, key, data, create=create and not is_manifest(key))

    patch.setattr(SimStore, "put", plain)


def nobody_is_fenced(patch: pytest.MonkeyPatch) -> None:
    """Who owns the run is not looked at."""
    patch.setattr(RunLog, "check_owner", lambda self, owner: None)


def a_timeout_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    """No answer to a commit is taken for a refusal, and what was written for it is thrown away."""
    put, settle = SimStore.put, settling.settle

    async def sure(self: SimStore, key: str, data: Any, *, create: bool = False) -> None:
        try:
            await put(self, key, data, create=create)
        except StoreError as error:
            if key.startswith("log/") and error.retryable:
                raise FullError("it did not work") from error
            raise

    async def tidy(log: RunLog, owner: Any, own: WrittenManifest, role: Role, **details: Any) -> None:
        try:
            await settle(log, owner, own, role, **details)
        except FullError:
            for file in own.manifest.files:
                await log.store.delete(file.key)
            raise

    patch.setattr(SimStore, "put", sure)
    patch.setattr(settling, "settle", tidy)


def hope_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    """No answer to a commit is taken for success."""
    commit, append = commits.commit, RunLog.append

    async def impatient(self: RunLog, make: Any, *, owner: Any, deadline_s: float = 60.0) -> RunState:
        return await append(self, make, owner=owner, deadline_s=-1.0)

    async def hopeful(
        log: RunLog, mine: Acquire, parts: list[WrittenManifest], *, kind: str = "COMMIT", fitting: bool = False
    ) -> Any:
        try:
            return await commit(log, mine, parts, kind=kind, fitting=fitting)
        except OutcomeUnknownError:
            checkpoint = CheckpointId.parse(parts[0].manifest.checkpoint)
            told = tuple((one.manifest.rank, one.digest) for one in parts)
            log.state.commits[checkpoint] = Commit(checkpoint, len(parts), told, "0" * 64)

    patch.setattr(RunLog, "append", impatient)
    patch.setattr(commits, "commit", hopeful)


def success_is_not_found_again(patch: pytest.MonkeyPatch) -> None:
    """Whether a record of ours is in the log already is not looked at."""

    class Nothing(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            return False

    refresh = RunLog._refresh

    async def forgetful(self: RunLog, *own: Any) -> RunState:
        state = await refresh(self, *own)
        state.requests = Nothing(state.requests)
        return state

    patch.setattr(RunLog, "_refresh", forgetful)


class Stale:
    """A log that shows `make` what it knew before, and remembers what that came to."""

    def __init__(self, log: RunLog, *, locally: bool) -> None:
        self.log, self.known, self.locally = log, copy.deepcopy(log.state), locally

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)

    async def append(self, make: Callable[[RunState], Any], *, owner: Any) -> RunState:
        def of_before(state: RunState) -> Any:
            self.known.next_seq = state.next_seq  # only so that it has a name of its own
            return make(self.known)

        state = await self.log.append(make if self.locally else of_before, owner=owner)
        if self.locally:
            make(self.known)
        return state


def the_log_is_read_before_the_files(patch: pytest.MonkeyPatch) -> None:
    """What a PLAN deletes is decided by what the log said before the files were listed."""
    retire = retention.retire
    patch.setattr(
        retention, "retire", lambda log, *details, **named: retire(Stale(log, locally=False), *details, **named)
    )


def the_plan_need_not_land(patch: pytest.MonkeyPatch) -> None:
    """Files are deleted by what one's own reading of the log came to, whatever becomes of the PLAN."""
    retire = retention.retire

    class Early(Stale):
        async def append(self, make: Callable[[RunState], Any], *, owner: Any) -> RunState:
            record = make(self.log.state)
            for key in record.body["delete"] if record is not None else ():
                await self.log.store.delete(key)
            return await self.log.append(make, owner=owner)

    patch.setattr(
        retention, "retire", lambda log, *details, **named: retire(Early(log, locally=True), *details, **named)
    )


def open_attempts_are_fair_game(patch: pytest.MonkeyPatch) -> None:
    """Files that no live checkpoint uses go, also those of attempts that may still become one."""
    patch.setattr(retention, "live_files", lambda state, files, used: set(used))


def what_is_open_stays_open(patch: pytest.MonkeyPatch) -> None:
    """Recovery rolls forward what is whole, and leaves the rest."""
    recover, abort, recovering = commits.recover, commits.abort, ContextVar("recovering", default=False)

    async def half(*args: Any, **details: Any) -> Recovery:
        token = recovering.set(True)
        try:
            return await recover(*args, **details)
        finally:
            recovering.reset(token)

    async def elsewhere_only(*args: Any, **details: Any) -> None:
        if not recovering.get():
            await abort(*args, **details)

    patch.setattr(commits, "recover", half)
    patch.setattr(commits, "abort", elsewhere_only)


def whoever_is_there_will_do(patch: pytest.MonkeyPatch) -> None:
    """The parts of other ranks are not waited for."""

    async def present(
        store: Store, checkpoint: CheckpointId, own: WrittenManifest, role: Role
    ) -> list[WrittenManifest]:
        keys = [info.key async for info in store.list() if owner(info.key) == checkpoint]
        return list((await manifests.intact_manifests(store, checkpoint, keys, own)).values())

    patch.setattr(settling, "_present", present)


def the_index_comes_last(patch: pytest.MonkeyPatch) -> None:
    """A COMMIT is appended before all of what it names is there."""
    commit = commits.commit

    async def hasty(
        log: RunLog, mine: Acquire, parts: list[WrittenManifest], *, kind: str = "COMMIT", fitting: bool = False
    ) -> Any:
        kept: dict[str, Any] = {}

        class Later:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            async def put(self, key: str, data: Any, *, create: bool = False) -> None:
                if kind_of(key) == INDEX:
                    kept[key] = data
                else:
                    await store.put(key, data, create=create)

        store = log.store
        log.store = Later()  # type: ignore[assignment]
        try:
            found = await commit(log, mine, parts, kind=kind)
        finally:
            log.store = store
        for key, data in kept.items():
            await store.put(key, data)
        return found

    patch.setattr(commits, "commit", hasty)


def aborting_needs_no_log(patch: pytest.MonkeyPatch) -> None:
    """Whoever gives an attempt up deletes its files, though others may have committed it."""
    give_up = Rank.give_up

    async def rude(self: Rank, checkpoint: CheckpointId, written: WrittenManifest | None = None) -> None:
        if written is not None:
            with contextlib.suppress(StoreError):
                for file in written.manifest.files:
                    await self.log.store.delete(file.key)
        await give_up(self, checkpoint, written)

    patch.setattr(Rank, "give_up", rude)


def the_pack_goes_though_its_part_may_be_there(patch: pytest.MonkeyPatch) -> None:
    """Whoever does not hear that his part is stored deletes the data file, though another rank may have found both."""
    write_part = interleave.write_part

    async def rash(store: Store, snapshot: RankSnapshot, *, numbers: Iterator[int] | None = None) -> WrittenManifest:
        number = 0 if numbers is None else next(numbers)
        try:
            return await write_part(store, snapshot, numbers=iter([number]))
        except StoreError:
            with contextlib.suppress(StoreError):
                await store.delete(data_key(snapshot.checkpoint, snapshot.layout.rank, number))
            raise

    patch.setattr(interleave, "write_part", rash)


def a_snapshot_forgets_what_ended(patch: pytest.MonkeyPatch) -> None:
    """Who begins to read at a SNAPSHOT does not know of attempts that were aborted before it."""
    expand = log_files.expand

    def forgetful(body: dict[str, Any], *seq: int) -> RunState:
        state = expand(body, *seq)
        state.aborted.clear()
        return state

    patch.setattr(log_files, "expand", forgetful)


def what_was_in_use_is_in_use(patch: pytest.MonkeyPatch) -> None:
    """Whether a checkpoint uses the files of an increment is looked at before its COMMIT, not in the record that
    lands."""
    check = commits.check_files

    def before(state: RunState, checkpoint: CheckpointId, files: Any, used: Any, **named: Any) -> None:
        check(replace(state, commits=dict.fromkeys(used)), checkpoint, files, used, **named)

    patch.setattr(commits, "check_files", before)


def the_files_need_not_be_in_use(patch: pytest.MonkeyPatch) -> None:
    """An increment is committed whatever has become of the checkpoints that use its files."""
    patch.setattr(commits, "check_files", lambda *details, **named: None)


def a_writer_expires_its_own_sources(patch: pytest.MonkeyPatch) -> None:
    """What a writer's own increments in flight are built on is given up all the same."""
    retire = retention.retire

    async def careless(*details: Any, **named: Any) -> set[CheckpointId]:
        return await retire(*details, **{**named, "pinned": lambda state: frozenset()})

    patch.setattr(retention, "retire", careless)


def an_increment_is_as_good_as_a_full_one(patch: pytest.MonkeyPatch) -> None:
    """The newest full ones may go, as long as something newer stays."""
    choose = retention.choose

    def careless(state: RunState, *details: Any) -> set[CheckpointId]:
        alike = {checkpoint: replace(found, needs=()) for checkpoint, found in state.commits.items()}
        return choose(replace(state, commits=alike), *details)

    patch.setattr(retention, "choose", careless)


def a_pack_belongs_to_who_wrote_it(patch: pytest.MonkeyPatch) -> None:
    """Of what a checkpoint uses, only what it has written itself is left alone."""
    files_of = retention.files_of

    async def own(*args: Any) -> dict[CheckpointId, set[str]]:
        return {of: {key for key in keys if owner(key) == of} for of, keys in (await files_of(*args)).items()}

    patch.setattr(retention, "files_of", own)


def giving_up_takes_what_was_borrowed(patch: pytest.MonkeyPatch) -> None:
    """With an attempt that was aborted go all data files that its part names, also those of older ones."""
    given_up = interleave.given_up
    patch.setattr(
        interleave, "given_up", lambda of, own: [*given_up(of, own), *(file.key for file in own.manifest.files)]
    )


def who_puts_a_record_need_not_look_again(patch: pytest.MonkeyPatch) -> None:
    """A number that was free is taken for the end of the log, though what had it may be deleted."""

    async def sure(self: RunLog, record: Any, seq: int, raw: bytes, end: float) -> bool:
        self._apply(seq, raw)
        return True

    patch.setattr(RunLog, "_confirm", sure)


def what_lies_below_the_floor_counts(patch: pytest.MonkeyPatch) -> None:
    """A record counts whatever its number, if there is a file of it."""
    look_on = RunLog._list_known

    async def blind(self: RunLog, *own: Any) -> Listed:
        seen = await look_on(self, *own)
        return replace(seen, sizes=seen.sizes | dict.fromkeys(seen.below, 0), snapshots=seen.snapshots[:1])

    patch.setattr(RunLog, "_list_known", blind)


def what_is_missing_once_is_missing(patch: pytest.MonkeyPatch) -> None:
    """A record that is listed, and gone when it is read, is called damaged without another look."""
    read_all = RunLog._read_all

    async def harsh(self: RunLog, *details: Any) -> dict[int, bytes | None]:
        raws = await read_all(self, *details)
        return {seq: b"" if raw is None else raw for seq, raw in raws.items()}

    patch.setattr(RunLog, "_read_all", harsh)


def what_was_read_need_not_be_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    """What was listed is believed, though it may have been deleted and put anew before it was read."""
    look_on, refresh = RunLog._list_known, RunLog._refresh

    async def once(self: RunLog, *own: Any) -> RunState:
        seen: list[Listed] = []

        async def look(*own: Any) -> Listed:
            seen[:] = seen or [await look_on(self, *own)]
            return seen[0]

        self._list_known = look  # type: ignore[method-assign]
        return await refresh(self, *own)

    patch.setattr(RunLog, "_refresh", once)


def one_snapshot_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Records go as soon as the newest SNAPSHOT has them, with the one before."""
    delete = run_log._delete

    async def more(log: RunLog, seen: Listed) -> None:
        await delete(log, replace(seen, below=[*seen.below, *(n for n in seen.sizes if n < seen.snapshots[0])]))

    patch.setattr(run_log, "_delete", more)


def who_comes_back_late_tries_again(patch: pytest.MonkeyPatch) -> None:
    """A request that the log no longer names is recorded once more."""
    append = RunLog.append

    async def bold(self: RunLog, *args: Any, **named: Any) -> RunState:
        self._tried = Forgetful()
        return await append(self, *args, **named)

    class Forgetful(dict[str, int]):
        def get(self, key: Any, default: Any = None) -> Any:
            return default

    patch.setattr(RunLog, "append", bold)


BROKEN = [
    who_puts_a_record_need_not_look_again,
    what_lies_below_the_floor_counts,
    what_is_missing_once_is_missing,
    what_was_read_need_not_be_looked_at_again,
    one_snapshot_is_enough,
    who_comes_back_late_tries_again,
    records_overwrite,
    manifests_overwrite,
    nobody_is_fenced,
    a_timeout_is_a_failure,
    hope_is_acknowledged,
    success_is_not_found_again,
    the_log_is_read_before_the_files,
    the_plan_need_not_land,
    open_attempts_are_fair_game,
    what_is_open_stays_open,
    whoever_is_there_will_do,
    the_index_comes_last,
    aborting_needs_no_log,
    the_pack_goes_though_its_part_may_be_there,
    a_snapshot_forgets_what_ended,
    what_was_in_use_is_in_use,
    the_files_need_not_be_in_use,
    a_writer_expires_its_own_sources,
    an_increment_is_as_good_as_a_full_one,
    a_pack_belongs_to_who_wrote_it,
    giving_up_takes_what_was_borrowed,
]


# Few schedules come to these: where the search begins.
RARE = {
    what_was_in_use_is_in_use: 250,
    a_writer_expires_its_own_sources: 1090,
    the_pack_goes_though_its_part_may_be_there: 2050,
    what_is_missing_once_is_missing: 170,
    what_was_read_need_not_be_looked_at_again: 30,
    who_puts_a_record_need_not_look_again: 25,
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: str(broken.__name__))
def test_negative_control_a_rule_that_is_left_out_is_missed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each broken variant is found out within two thousand schedules. Without the check of borrowed data files before a
    COMMIT, which most often hides that a rule about bases is left out."""

    async def unseen(*details: Any) -> None:
        pass

    monkeypatch.setattr(commits, "check_there", unseen)
    broken(monkeypatch)
    first = RARE.get(broken, 0)
    failure = first_failure(range(first, first + 2000))
    assert failure is not None, f"nobody noticed: {broken.__doc__}"
    print(f"{broken.__name__}: found at schedule {failure.seed}: {failure.problem}")
