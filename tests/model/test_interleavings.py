"""Tests that no order of requests to an object store, and no failed request, breaks a run: see `interleave`.

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

QUICK = 200  # fixed schedules; half as many random ones are added each time
LONG = int(os.environ.get("CKPT_SCHEDULES", "1000000"))
FIRST = int(os.environ.get("CKPT_SEED", "0"))


def first_failure(seeds: range) -> Failure | None:
    return next((failure for seed in seeds if (failure := schedule(seed)) is not None), None)


def check(seeds: range) -> None:
    failure = first_failure(seeds)
    if failure is not None:
        pytest.fail(f"schedules {seeds.start} to {seeds.stop - 1}, {failure}", pytrace=False)
    print(f"schedules {seeds.start} to {seeds.stop - 1}: {len(seeds)} without a violation")


def test_no_interleaving_breaks_a_run() -> None:
    """After each concurrent request of jobs, cleaners and readers, every rule of the oracle holds, despite failures.
    The run can be continued afterwards.

    The schedules are not vacuous: jobs take ownership and are fenced, checkpoints are committed, retired and read,
    processes die, replies are lost, requests land late, and checkpoints are aborted and rolled forward.
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
    assert sum(sim.oracle.increments > 2 for sim in sims) > len(sims) // 5  # the last two are written at the end
    assert any("retired" in sim.oracle.ended.values() for sim in sims)
    assert sum("stopped after MAX_TURNS turns" in sim.told() for sim in sims) < len(sims) // 20


def test_no_random_interleaving_breaks_a_run() -> None:
    """The same for random schedules; a failure prints its seed."""
    start = random.randrange(QUICK, 10**9)
    check(range(start, start + QUICK // 2))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_interleaving_breaks_a_run_long() -> None:
    """The same for CKPT_SCHEDULES schedules, starting at CKPT_SEED."""
    check(range(FIRST, FIRST + LONG))


def test_same_seed_gives_same_schedule() -> None:
    """The same seed gives the same requests in the same order with the same results, so failures can be reproduced."""
    told = []
    for _ in range(2):
        told.append([])
        for seed in range(6):
            sim = Sim(seed)
            assert interleave.play(sim) is None
            told[-1].append(sim.told())
    assert told[0] == told[1]
    assert len(set(told[0])) == 6


# -- negative controls: each breaks a rule, and the oracle must detect it --


def records_overwrite(patch: pytest.MonkeyPatch) -> None:
    """Log records overwrite existing ones instead of being created exclusively."""
    put = SimStore.put

    async def plain(self: SimStore, key: str, data: Any, *, create: bool = False) -> None:
        await put(self, key, data, create=create and not key.startswith("log/"))

    patch.setattr(SimStore, "put", plain)


def manifests_overwrite(patch: pytest.MonkeyPatch) -> None:
    """A writer overwrites a manifest that exists."""
    put = SimStore.put

    async def plain(self: SimStore, key: str, data: Any, *, create: bool = False) -> None:
        await put(self, key, data, create=create and not is_manifest(key))

    patch.setattr(SimStore, "put", plain)


def owner_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The owner of the run is not checked."""
    patch.setattr(RunLog, "check_owner", lambda self, owner: None)


def timeout_counts_as_failure(patch: pytest.MonkeyPatch) -> None:
    """A commit without a reply counts as failed, and its files are deleted."""
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


def timeout_counts_as_success(patch: pytest.MonkeyPatch) -> None:
    """A commit without a reply counts as successful."""
    commit, append = commits.commit, RunLog.append

    async def impatient(self: RunLog, make: Any, *, owner: Any, deadline_s: float = 60.0) -> RunState:
        return await append(self, make, owner=owner, deadline_s=-1.0)

    async def hopeful(log: RunLog, mine: Acquire, parts: list[WrittenManifest]) -> Any:
        try:
            return await commit(log, mine, parts)
        except OutcomeUnknownError:
            checkpoint = CheckpointId.parse(parts[0].manifest.checkpoint)
            told = tuple((one.manifest.rank, one.digest) for one in parts)
            log.state.commits[checkpoint] = Commit(checkpoint, len(parts), told, "0" * 64)

    patch.setattr(RunLog, "append", impatient)
    patch.setattr(commits, "commit", hopeful)


def own_record_is_not_found(patch: pytest.MonkeyPatch) -> None:
    """The log is not checked for our own record before a retry."""

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
    """Wraps a log so that `make` gets an outdated state, and remembers the result."""

    def __init__(self, log: RunLog, *, locally: bool) -> None:
        self.log, self.known, self.locally = log, copy.deepcopy(log.state), locally

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)

    async def append(self, make: Callable[[RunState], Any], *, owner: Any) -> RunState:
        def of_before(state: RunState) -> Any:
            self.known.next_seq = state.next_seq  # only so that the record gets its own name
            return make(self.known)

        state = await self.log.append(make if self.locally else of_before, owner=owner)
        if self.locally:
            make(self.known)
        return state


def plan_uses_outdated_log(patch: pytest.MonkeyPatch) -> None:
    """A PLAN is based on a state of the log from before the files were listed."""
    retire = retention.retire
    patch.setattr(
        retention, "retire", lambda log, *details, **named: retire(Stale(log, locally=False), *details, **named)
    )


def files_deleted_without_plan(patch: pytest.MonkeyPatch) -> None:
    """Files are deleted by one process's view of the log, even if the PLAN is not appended."""
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


def files_of_open_checkpoints_deleted(patch: pytest.MonkeyPatch) -> None:
    """Files that no live checkpoint uses are deleted, also those of open checkpoints."""
    patch.setattr(retention, "live_files", lambda state, files, used: set(used))


def recovery_leaves_incomplete_open(patch: pytest.MonkeyPatch) -> None:
    """Recovery rolls forward complete checkpoints, and leaves the others open."""
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


def commit_without_all_ranks(patch: pytest.MonkeyPatch) -> None:
    """A commit does not wait for the manifests of other ranks."""

    async def present(
        store: Store, checkpoint: CheckpointId, own: WrittenManifest, role: Role
    ) -> list[WrittenManifest]:
        keys = [info.key async for info in store.list() if owner(info.key) == checkpoint]
        return list((await manifests.intact_manifests(store, checkpoint, keys, own)).values())

    patch.setattr(settling, "_present", present)


def commit_before_index(patch: pytest.MonkeyPatch) -> None:
    """A COMMIT is appended before all its files exist."""
    commit = commits.commit

    async def hasty(log: RunLog, mine: Acquire, parts: list[WrittenManifest]) -> Any:
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
            found = await commit(log, mine, parts)
        finally:
            log.store = store
        for key, data in kept.items():
            await store.put(key, data)
        return found

    patch.setattr(commits, "commit", hasty)


def abort_deletes_before_log(patch: pytest.MonkeyPatch) -> None:
    """An aborting rank deletes its files, even if others may have committed the checkpoint."""
    give_up = Rank.give_up

    async def rude(self: Rank, checkpoint: CheckpointId, written: WrittenManifest | None = None) -> None:
        if written is not None:
            with contextlib.suppress(StoreError):
                for file in written.manifest.files:
                    await self.log.store.delete(file.key)
        await give_up(self, checkpoint, written)

    patch.setattr(Rank, "give_up", rude)


def failed_manifest_deletes_data_file(patch: pytest.MonkeyPatch) -> None:
    """A rank without a reply for its manifest deletes the data file, though another rank may have found both."""
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


def snapshot_forgets_aborted(patch: pytest.MonkeyPatch) -> None:
    """A reader that starts at a SNAPSHOT does not know earlier aborted checkpoints."""
    expand = log_files.expand

    def forgetful(body: dict[str, Any], *seq: int) -> RunState:
        state = expand(body, *seq)
        state.aborted.clear()
        return state

    patch.setattr(log_files, "expand", forgetful)


def bases_checked_only_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The files of an increment are checked before its COMMIT, not at the position where the record lands."""
    check = commits.check_files

    def before(state: RunState, checkpoint: CheckpointId, files: Any, used: Any, **named: Any) -> None:
        check(replace(state, commits=dict.fromkeys(used)), checkpoint, files, used, **named)

    patch.setattr(commits, "check_files", before)


def bases_are_never_checked(patch: pytest.MonkeyPatch) -> None:
    """An increment is committed even if the checkpoints that use its files are gone."""
    patch.setattr(commits, "check_files", lambda *details, **named: None)


def retention_ignores_pinned_bases(patch: pytest.MonkeyPatch) -> None:
    """Retention deletes the bases of a writer's own increments in flight."""
    retire = retention.retire

    async def careless(*details: Any, **named: Any) -> set[CheckpointId]:
        return await retire(*details, **{**named, "pinned": lambda state: frozenset()})

    patch.setattr(retention, "retire", careless)


def retention_ignores_full_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """Retention may delete the newest full checkpoints if something newer stays."""
    choose = retention.choose

    def careless(state: RunState, *details: Any) -> set[CheckpointId]:
        alike = {checkpoint: replace(found, needs=()) for checkpoint, found in state.commits.items()}
        return choose(replace(state, commits=alike), *details)

    patch.setattr(retention, "choose", careless)


def retention_keeps_only_own_files(patch: pytest.MonkeyPatch) -> None:
    """Retention protects only the files that a checkpoint wrote itself."""
    files_of = retention.files_of

    async def own(*args: Any) -> dict[CheckpointId, set[str]]:
        return {of: {key for key in keys if owner(key) == of} for of, keys in (await files_of(*args)).items()}

    patch.setattr(retention, "files_of", own)


def abort_deletes_borrowed_files(patch: pytest.MonkeyPatch) -> None:
    """An abort deletes all data files that the manifest names, also those of older checkpoints."""
    given_up = interleave.given_up
    patch.setattr(
        interleave, "given_up", lambda of, own: [*given_up(of, own), *(file.key for file in own.manifest.files)]
    )


def append_is_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    """A free record number counts as the end of the log, though its record may have been deleted."""

    async def sure(self: RunLog, record: Any, seq: int, raw: bytes, end: float) -> bool:
        self._apply(seq, raw)
        return True

    patch.setattr(RunLog, "_confirm", sure)


def records_below_floor_count(patch: pytest.MonkeyPatch) -> None:
    """A record below the floor counts if its file exists."""
    look_on = RunLog._list_known

    async def blind(self: RunLog, *own: Any) -> Listed:
        seen = await look_on(self, *own)
        return replace(seen, sizes=seen.sizes | dict.fromkeys(seen.below, 0), snapshots=seen.snapshots[:1])

    patch.setattr(RunLog, "_list_known", blind)


def missing_record_is_not_rechecked(patch: pytest.MonkeyPatch) -> None:
    """A record that is listed, but missing when read, counts as damaged without a second check."""
    read_all = RunLog._read_all

    async def harsh(self: RunLog, *details: Any) -> dict[int, bytes | None]:
        raws = await read_all(self, *details)
        return {seq: b"" if raw is None else raw for seq, raw in raws.items()}

    patch.setattr(RunLog, "_read_all", harsh)


def listing_is_not_rechecked(patch: pytest.MonkeyPatch) -> None:
    """A listing is trusted, though a file may have been deleted and created again before it was read."""
    look_on, refresh = RunLog._list_known, RunLog._refresh

    async def once(self: RunLog, *own: Any) -> RunState:
        seen: list[Listed] = []

        async def look(*own: Any) -> Listed:
            seen[:] = seen or [await look_on(self, *own)]
            return seen[0]

        self._list_known = look  # type: ignore[method-assign]
        return await refresh(self, *own)

    patch.setattr(RunLog, "_refresh", once)


def records_deleted_after_one_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Records are deleted as soon as the newest SNAPSHOT contains them, as is the previous SNAPSHOT."""
    delete = run_log._delete

    async def more(log: RunLog, seen: Listed) -> None:
        await delete(log, replace(seen, below=[*seen.below, *(n for n in seen.sizes if n < seen.snapshots[0])]))

    patch.setattr(run_log, "_delete", more)


def forgotten_request_is_repeated(patch: pytest.MonkeyPatch) -> None:
    """A request that the log no longer names is recorded again."""
    append = RunLog.append

    async def bold(self: RunLog, *args: Any, **named: Any) -> RunState:
        self._tried = Forgetful()
        return await append(self, *args, **named)

    class Forgetful(dict[str, int]):
        def get(self, key: Any, default: Any = None) -> Any:
            return default

    patch.setattr(RunLog, "append", bold)


BROKEN = [
    append_is_not_confirmed,
    records_below_floor_count,
    missing_record_is_not_rechecked,
    listing_is_not_rechecked,
    records_deleted_after_one_snapshot,
    forgotten_request_is_repeated,
    records_overwrite,
    manifests_overwrite,
    owner_is_not_checked,
    timeout_counts_as_failure,
    timeout_counts_as_success,
    own_record_is_not_found,
    plan_uses_outdated_log,
    files_deleted_without_plan,
    files_of_open_checkpoints_deleted,
    recovery_leaves_incomplete_open,
    commit_without_all_ranks,
    commit_before_index,
    abort_deletes_before_log,
    failed_manifest_deletes_data_file,
    snapshot_forgets_aborted,
    bases_checked_only_before_commit,
    bases_are_never_checked,
    retention_ignores_pinned_bases,
    retention_ignores_full_checkpoints,
    retention_keeps_only_own_files,
    abort_deletes_borrowed_files,
]


# Few schedules detect these: the seed at which the search starts.
RARE = {
    bases_checked_only_before_commit: 250,
    retention_ignores_pinned_bases: 1090,
    failed_manifest_deletes_data_file: 2050,
    missing_record_is_not_rechecked: 170,
    listing_is_not_rechecked: 30,
    append_is_not_confirmed: 25,
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: str(broken.__name__))
def test_negative_control_broken_rule_is_detected(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each broken variant is detected within two thousand schedules.
    The check of borrowed data files before a COMMIT is off: it would mostly hide a broken rule about bases."""

    async def unseen(*details: Any) -> None:
        pass

    monkeypatch.setattr(commits, "check_there", unseen)
    broken(monkeypatch)
    first = RARE.get(broken, 0)
    failure = first_failure(range(first, first + 2000))
    assert failure is not None, f"not detected: {broken.__doc__}"
    print(f"{broken.__name__}: found at schedule {failure.seed}: {failure.problem}")
