"""Takes ownership of a run, commits and aborts checkpoints, and recovers unfinished ones after a crash.

    create_run -> acquire -> recover -> for each checkpoint: commit_or_end, or abort

A checkpoint exists once its COMMIT record is durable. Before that, the verified manifests of all ranks already form a
consistent checkpoint, because all ranks use the same checkpoint id. So recovery commits complete checkpoints, and
aborts incomplete ones. On a disk that only one node sees, a checkpoint has the manifests of that node's ranks, and the
trainers acknowledge it once every node has committed it. A checkpoint that cannot be read at that moment stays open.

`commit` checks that the manifests fit together, that they cover all elements, and that all files exist. Then it stores
the index. The record is appended only if, in the state before it, each file either belongs to this checkpoint or is
used by a live checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.core.checkpoint.concurrent import AT_ONCE, of_each
from ckpt.core.checkpoint.losses import UNCLEAR, records
from ckpt.core.checkpoint.manifests import intact_manifests
from ckpt.core.checkpoint.manifests import load_manifest as load_manifest
from ckpt.core.checkpoint.manifests import stored_manifest as stored_manifest
from ckpt.core.checkpoint.retention import delete_in_order, files_of, remember_files
from ckpt.core.checkpoint.write import WrittenManifest
from ckpt.core.format import columns
from ckpt.core.format.digest import file_digest
from ckpt.core.format.index import Share, build
from ckpt.core.format.manifest import (
    MAX_FORMAT,
    MAX_NEEDS,
    STEPS,
    CheckpointId,
    by_owner,
    folder_of,
    index_key,
    is_data,
    new_format,
    owner,
    seal,
)
from ckpt.core.log.records import Acquire, Commit, Record, RunState, commit_body
from ckpt.core.log.run_log import RunLog, infer_root
from ckpt.errors import (
    AccessError,
    CheckpointError,
    CorruptError,
    ExistsError,
    FormatError,
    NotFoundError,
    SaveError,
    SkippedError,
    StoreError,
    is_unreadable,
)
from ckpt.events import log as logger
from ckpt.failpoints import point
from ckpt.store import Store, exists, get_small, open_store

WHOLE_NEXT = "the next save will be whole"  # part of the reason in an ABORT, where the writers of all ranks find it
LEFT_OUT = "was left out in"  # part of the reason in an ABORT for a tier that was too slow, which is not a failure


def cannot_build_on(checkpoint: CheckpointId, base: str) -> SaveError:
    """Return the error for a checkpoint whose base cannot be used. The next checkpoint must then be full."""
    return failed_by(f"step {checkpoint.step} builds on {base}: {WHOLE_NEXT}")


def failed_by(reason: str) -> SaveError:
    """Return the error for a checkpoint that was aborted for this reason."""
    error = (SkippedError if LEFT_OUT in reason else SaveError)(reason)
    error.next_is_full = WHOLE_NEXT in reason
    return error


# -- sources of an increment --


def check_files(
    state: RunState,
    checkpoint: CheckpointId,
    files: Iterable[str],
    used: Mapping[CheckpointId, Set[str]],
    *,
    copied: bool = False,
) -> None:
    """Raise SaveError unless each data file was written by this checkpoint or is used by a live checkpoint.

    No PLAN deletes a data file that a live checkpoint uses. The COMMIT that follows this state then protects the file.

    used: the files of live checkpoints, as far as they could be read
    copied: True if the data files were copied to this store with the checkpoint. In that case, it may also use files of
        checkpoints that have not ended in this store, because clean-up does not delete these
    """
    safe = set[str]().union(*(used[a] for a in used.keys() & state.commits.keys()))
    for key in sorted(files):
        of = owner(key)
        if of != checkpoint and key not in safe and not (copied and of is not None and not state.ended(of)):
            if copied:
                raise SaveError(f"step {checkpoint.step} builds on {key}, which no live checkpoint uses")
            raise cannot_build_on(checkpoint, f"{key}, which no live checkpoint uses")


def check_trusted(manifests: Sequence[WrittenManifest], distrusted: CheckpointId | None) -> None:
    """Raise SaveError if a rank built on a checkpoint that the committing writer had already found damaged.

    Checkpoints that were in flight at that time are not above `distrusted`, and pass. Emergency saves pass too, because
    no later save could replace them, and the damage may be repaired.
    """
    if any(one.manifest.reason != "due" for one in manifests):
        return
    checkpoint = manifests[0].checkpoint
    needs = sorted({CheckpointId.parse(need) for one in manifests for need in one.manifest.needs})
    if distrusted is not None and checkpoint > distrusted and needs and needs[0] <= distrusted:
        raise cannot_build_on(checkpoint, f"step {needs[0].step}, which is damaged")


def vouches(state: RunState, base: WrittenManifest) -> bool:
    """Return True if a checkpoint may build on this manifest, because it belongs to a live checkpoint."""
    found = state.commits.get(base.checkpoint)
    return found is not None and (base.manifest.rank, base.digest) in found.manifests


def check_needs(checkpoint: CheckpointId, needs: Collection[CheckpointId]) -> None:
    """Raise SaveError if the log could not record the checkpoints that this one builds on."""
    if len(needs) > MAX_NEEDS:
        raise SaveError(
            f"step {checkpoint.step} builds on {len(needs)} older checkpoints, which is too many: it must be full"
        )
    if needs and max(needs) >= checkpoint:
        raise SaveError(f"step {checkpoint.step} builds on step {max(needs).step}, which is not older: it must be full")


# -- the manifests of the ranks --


def index_of(manifests: Sequence[WrittenManifest]) -> bytes:
    """Return the index of these manifests. Raise SaveError if the ranks disagree about the saved state, or if
    replicated tensors differ between ranks.

    On a disk that only some nodes see, only some ranks have manifests, so tensors may be incomplete.
    """
    ordered = sorted(manifests, key=lambda w: w.manifest.rank)
    shares = [Share(w.manifest.rank, w.manifest.world, w.manifest.layout, w.manifest.values, w.table) for w in ordered]
    try:
        index = build(shares, partial=not is_whole(manifests)).to_bytes()
        # After building the index, because tensors of different shapes differ too.
        differing = columns.differing((w.manifest.rank, w.manifest.replicas) for w in manifests)
    except CorruptError as error:
        raise SaveError(str(error)) from error
    if differing:
        raise SaveError(columns.in_words(differing))
    return index


def is_whole(manifests: Sequence[WrittenManifest]) -> bool:
    worlds = {w.manifest.world for w in manifests}
    return len(worlds) == 1 and {w.manifest.rank for w in manifests} == set(range(worlds.pop()))


# -- the guarantees of a store --


PREFIX = "doctor-"  # name prefix of all test objects
CREATE, READ, RANGES = "create if absent", "read after write", "ranges"
START, LENGTH = 7, 13  # a range without the beginning and the end of the object


async def check_empty(store: Store) -> None:
    """Raise FormatError if the store has files other than a run or test objects. Files that the writer of a deleted
    run may have written last do not count."""
    async for info in store.list():
        if info.key in ("lease.json", "latest.json"):
            continue
        if info.key == "FORMAT.json":
            return  # another rank or job created the run first
        if not info.key.startswith(PREFIX):  # `ckpt doctor` or another start is testing the store
            if await exists(store, "FORMAT.json"):
                return
            raise FormatError(
                f"{store.url} is not empty and not a run: it has {info.key}, but no FORMAT.json. Choose another "
                "location"
            )


async def try_out(store: Store) -> None:
    """Test the guarantees of a store. Raise StoreError with the store, the missing guarantee, and what was observed."""
    folder = f"{PREFIX}{int(time.time())}-{secrets.token_hex(4)}/"
    key = f"{folder}probe"
    first, second = secrets.token_hex(32).encode(), secrets.token_hex(32).encode()
    try:
        await store.put(key, first, create=True)
        try:
            await store.put(key, second, create=True)
        except ExistsError:
            pass
        else:
            raise created_twice(store)
        try:
            found = bytes(await store.get(key))
        except NotFoundError:
            raise refused(store, READ, "an object that was just stored cannot be found") from None
        if found != first:
            raise refused(store, CREATE, "it reports that an object exists, but overwrites it")
        if key not in [info.key async for info in store.list(folder)]:
            raise refused(store, READ, "an object that was just stored is not listed")
        await check_ranges(store, key, first)
    finally:
        with contextlib.suppress(CheckpointError):
            await store.delete(key)


async def check_ranges(store: Store, key: str, whole: bytes) -> None:
    """Raise StoreError if a range of an object is not read correctly."""
    request = f"a request for {LENGTH} bytes of an object from byte {START}"
    try:
        got = bytes(await store.get(key, start=START, length=LENGTH))
    except (AccessError, NotFoundError):
        raise
    except StoreError as error:
        if error.retryable:
            raise
        raise refused(store, RANGES, f"{request} fails ({error})") from None
    if got != whole[START : START + LENGTH]:
        raise refused(store, RANGES, f"{request} returns other bytes")


def created_twice(store: Store) -> StoreError:
    return refused(store, CREATE, "an object can be created twice, so two jobs could overwrite each other's commits")


def refused(store: Store, guarantee: str, did: str) -> StoreError:
    inner: Any = store
    while hasattr(inner, "store"):
        inner = inner.store
    endpoint = getattr(inner, "endpoint", "")
    return StoreError(
        f"{store.url}{endpoint and f' at {endpoint}'} cannot store a run, because it does not guarantee {guarantee}: "
        f"{did}. Nothing was saved there. Use a folder, S3, gs:// or az://, or another store that guarantees {CREATE}, "
        f"{READ} and {RANGES}"
    )


# -- own a run, commit, abort, recover --


PROBES = 3  # number of attempts; a retry after a lost reply finds the same bytes and may report success


async def create_run(store: Store) -> None:
    """Create FORMAT.json if it is missing, and check that the store supports create-if-absent and range reads.

    Raise FormatError if the location has other files, and StoreError if it cannot store a run. Then write nothing.
    """
    try:
        await get_small(store, "FORMAT.json", MAX_FORMAT)  # not `exists`, because a read raises the reason of a refusal
    except NotFoundError:
        if (root := await infer_root(store)) is None:  # otherwise FORMAT.json was lost, and the log has the run id
            await check_empty(store)
        if store.remote:
            await try_out(store)
        try:
            await store.put("FORMAT.json", new_format(root), create=True)
        except ExistsError:
            pass  # another rank or job was quicker
    there = bytes(await get_small(store, "FORMAT.json", MAX_FORMAT))
    for _ in range(PROBES):
        try:
            await store.put("FORMAT.json", there, create=True)  # with the same bytes, so replacing them does no harm
        except ExistsError:
            break
    else:
        raise created_twice(store)
    if store.remote:
        await check_ranges(store, "FORMAT.json", there)


@contextlib.asynccontextmanager
async def written_run(url: str | Path) -> AsyncIterator[RunLog]:
    """Open the log of a run for writing. Create the run if it is missing."""
    store = open_store(url, writable=True)
    try:
        await create_run(store)
        log = RunLog(store)
        await log.open()
        yield log
    finally:
        await store.aclose()


async def acquire(
    log: RunLog,
    nonce: str,
    *,
    restored: CheckpointId | None = None,
    floor: int = 0,
    check: Callable[[RunState], None] = lambda state: None,
) -> Acquire:
    """Take ownership of the run. This fences all earlier owners.

    The new term is higher than every term in this log and than `floor`. With `restored`, the history continues from
    that checkpoint. `check` raises an error if the newest state of the log forbids the change.
    """

    def make(state: RunState) -> Record:
        check(state)
        # Damaged records may have been ACQUIREs after the newest known one, so leave a gap for their terms.
        newest = state.requests.get(f"acquire:{state.acquires[-1].nonce}", -1) if state.acquires else -1
        term = max(state.term + sum(seq > newest for seq in state.damaged), floor) + 1
        body = {"term": term, "nonce": nonce, "restored": None if restored is None else str(restored)}
        return Record("ACQUIRE", body, f"acquire:{nonce}")

    state = await log.append(make, owner=None)
    point("acquire.done")
    mine = [a for a in state.acquires if a.nonce == nonce]
    if not mine:
        raise FormatError(f"the log of {log.store.url} has used up its terms: continue in another location")
    return mine[-1]


@dataclass(frozen=True, slots=True)
class Role:
    """The ranks whose manifests a tier stores. `place`: this writer's position in the commit order; 0 never waits."""

    ranks: tuple[int, ...] = (0,)
    place: int = 0
    world: int = 1

    @property
    def partial(self) -> bool:
        """Return True if this disk is seen by only some of the ranks."""
        return len(self.ranks) < self.world


async def commit(
    log: RunLog,
    mine: Acquire | None,
    manifests: list[WrittenManifest],
    *,
    used: Mapping[CheckpointId, Set[str]] | None = None,
    at: float | None = None,
) -> Commit:
    """Commit a checkpoint, given one manifest for each rank that sees this store. Repeated calls are harmless.

    Raise SaveError if the checkpoint was aborted before, or if it uses older data files that are missing or that none
    of the checkpoints it builds on uses now. Raise FencedError if a newer job owns the run.

    mine: the owner that commits; None skips ownership checks
    used: for a copied checkpoint, the files that each checkpoint in this store uses. All files of a copy were copied
        with it, so the checkpoints that it builds on need not be in this store
    at: the time of the commit; default: now
    """
    manifests = sorted(manifests, key=lambda w: w.manifest.rank)
    checkpoint, files = manifests[0].checkpoint, {key for w in manifests for key in w.table.files}
    needs = sorted({CheckpointId.parse(need) for w in manifests for need in w.manifest.needs})
    check_needs(checkpoint, needs)
    index = await asyncio.to_thread(index_of, manifests)
    finite = {w.manifest.finite for w in manifests}
    found = Commit(
        checkpoint,
        manifests[0].manifest.world,
        tuple((w.manifest.rank, w.digest) for w in manifests),
        file_digest(index),
        False if False in finite else None if None in finite else True,
        next((w.manifest.reason for w in manifests if w.manifest.reason != "due"), "due"),
        tuple(needs),
        time.time() if at is None else at,
    )
    log.check_owner(mine)
    copied = used is not None
    if used is None and not log.state.ended(checkpoint):
        used = await _used_by(log, needs)
        await check_there(log.store, checkpoint, files)
    await _put_index(log.store, checkpoint, index)
    point("index.stored")

    def make(state: RunState) -> Record | None:
        if state.ended(checkpoint):
            return None
        # A data file of a retired checkpoint is allowed if a live checkpoint that was built on it still uses the file.
        check_files(state, checkpoint, files, used or {}, copied=copied)
        return Record("COMMIT", commit_body(found), f"commit:{checkpoint}")

    state = await log.append(make, owner=mine)
    landed = state.commits.get(checkpoint)
    if landed is None:
        log.check_owner(mine)  # raises if a newer job ended the checkpoint
        if checkpoint in state.retired and checkpoint not in state.reasons:
            return found  # another rank committed it, and retention has retired it meanwhile
        why = state.reasons.get(checkpoint, "the reason is no longer recorded")
        raise failed_by(f"step {checkpoint.step} was aborted before it was committed: {why}")
    if landed.manifests == found.manifests:
        remember_files(log, checkpoint, files)
    await _note_latest(log)
    return landed


async def _put_index(store: Store, checkpoint: CheckpointId, index: bytes) -> None:
    """Create the index. All committers derive the same bytes, so raise SaveError if a different index exists."""
    key = index_key(checkpoint)
    try:
        await store.put(key, index, create=True)
    except ExistsError:
        there = b""
        with contextlib.suppress(CorruptError):  # a longer file has other content
            there = bytes(await get_small(store, key, len(index)))
        if there != index:
            raise SaveError(
                f"step {checkpoint.step}: {key} in {store.url} exists and has other content, so this checkpoint "
                "fails. The next one is not affected"
            ) from None


async def _note_latest(log: RunLog) -> None:
    """Write the newest checkpoint to latest.json, for people and scripts. Ignore errors, because no code reads it."""
    newest = next((one for one in log.state.lineage() if one.finite is not False), None)
    if newest is not None:
        with contextlib.suppress(CheckpointError):
            await log.store.put("latest.json", seal({"checkpoint": str(newest.checkpoint), "step": newest.step}))


async def _used_by(log: RunLog, needs: Collection[CheckpointId]) -> dict[CheckpointId, set[str]]:
    """Return the files that each live checkpoint in `needs` uses.

    Retired or damaged checkpoints are skipped. Raise StoreError if a checkpoint cannot be read now.
    """
    if not log.state.commits.keys() >= set(needs):
        await log.refresh()  # another rank may have read a newer COMMIT
    unread: dict[CheckpointId, CheckpointError] = {}
    live = [log.state.commits[need] for need in needs if need in log.state.commits]
    used = await files_of(log, live, unread)
    if away := [error for error in unread.values() if is_unreadable(error)]:
        raise away[0]
    return used


async def check_there(store: Store, checkpoint: CheckpointId, files: Iterable[str]) -> None:
    """Raise SaveError unless all data files that a checkpoint uses from older checkpoints exist.

    A user may have deleted files of the run, or replaced the run by an earlier copy.
    """
    borrowed = {key for key in files if owner(key) != checkpoint}
    if len(borrowed) > AT_ONCE:  # a few listings need fewer requests
        borrowed -= {info.key async for info in store.list(STEPS)}

    async def check(key: str) -> None:
        try:
            await store.head(key)
        except NotFoundError:
            raise cannot_build_on(
                checkpoint,
                f"{key}, which is gone from {store.url}: the files of the run were deleted, or replaced by an earlier "
                "copy of it",
            ) from None

    await of_each(sorted(borrowed), check)


def given_up(state: RunState, checkpoint: CheckpointId) -> SaveError:
    """Return the error that explains why a checkpoint was aborted or skipped."""
    why = state.reasons.get(checkpoint, "the reason is no longer known")
    return failed_by(f"step {checkpoint.step} was aborted: {why}")


async def commit_or_end(
    log: RunLog, mine: Acquire, manifests: list[WrittenManifest], *, distrusted: CheckpointId | None = None
) -> None:
    """Commit these manifests. If they cannot form a checkpoint, abort it and raise. `distrusted`: see `Encoder`."""
    try:
        check_trusted(manifests, distrusted)
        await commit(log, mine, manifests)
    except SaveError as error:
        await abort(log, mine, manifests[0].checkpoint, str(error))
        raise


async def abort(log: RunLog, mine: Acquire, checkpoint: CheckpointId, reason: str) -> None:
    """Abort a checkpoint that must not be committed any more, so that its files can be cleaned up."""

    def make(state: RunState) -> Record | None:
        body = {"checkpoint": str(checkpoint), "reason": reason[:500]}
        return None if state.ended(checkpoint) else Record("ABORT", body, f"abort:{checkpoint}")

    await log.append(make, owner=mine)


async def retract(log: RunLog, mine: Acquire, checkpoint: CheckpointId, reason: str) -> None:
    """Abort or retire a checkpoint that is known to be wrong, regardless of the retention rules.

    Its index and manifests are deleted immediately, so that later damage to a log record cannot bring it back.
    """

    def make(state: RunState) -> Record | None:
        body = {"retire": [str(checkpoint)], "delete": [], "reason": reason[:500]}
        return Record("PLAN", body, f"retract:{checkpoint}") if checkpoint in state.commits else None

    await abort(log, mine, checkpoint, reason)  # after this it can no longer be committed
    await log.append(make, owner=mine)
    with contextlib.suppress(StoreError):
        keys = [info.key async for info in log.store.list(folder_of(checkpoint))]
        await delete_in_order(log.store, [key for key in keys if owner(key) == checkpoint and not is_data(key)])


@dataclass
class Recovery:
    """The unfinished checkpoints that recovery committed (`rolled_forward`) or aborted after a crash."""

    rolled_forward: list[CheckpointId] = field(default_factory=list)
    aborted: list[CheckpointId] = field(default_factory=list)


async def recover(
    log: RunLog, mine: Acquire, in_flight: frozenset[CheckpointId] = frozenset(), *, partial: bool = False
) -> Recovery:
    """Commit every unfinished checkpoint that is complete, and abort the others. Skip those `in_flight` in this job.

    `partial`: True if only some ranks see this tier. In that case, every checkpoint with intact manifests is committed,
    because the disks of other nodes may have the rest. A restore needs all of it.

    A damaged log record may have aborted a checkpoint even if all its manifests exist. So if there is one, a checkpoint
    is committed only if its index exists, which is stored just before a commit. Otherwise it is aborted.
    """
    found = by_owner([info.key async for info in log.store.list(STEPS)])
    state = await log.refresh()
    done = Recovery()
    for checkpoint in sorted(found):
        if state.ended(checkpoint) or checkpoint in in_flight:
            continue
        try:
            manifests = list((await intact_manifests(log.store, checkpoint, found[checkpoint])).values())
            forward, reason = await _is_to_land(log, checkpoint, manifests, partial)
            if forward:
                await commit_or_end(log, mine, manifests)
                done.rolled_forward.append(checkpoint)
                logger.info("rolled step %d forward: all of it had been written before the crash", checkpoint.step)
                continue
        except SaveError as error:
            reason = str(error)
            logger.warning("%s", error)
        except StoreError as error:
            logger.warning("did not commit checkpoint %s, which cannot be read now: %s", checkpoint, error)
            continue
        await abort(log, mine, checkpoint, reason)
        done.aborted.append(checkpoint)
    point("recover.done")
    return done


async def _is_to_land(
    log: RunLog, checkpoint: CheckpointId, manifests: list[WrittenManifest], partial: bool
) -> tuple[bool, str]:
    """Return (True, "") if a checkpoint must be committed, otherwise (False, reason)."""
    state = log.state
    if not manifests or not (is_whole(manifests) or partial):
        return False, "incomplete when the run was opened"
    since = state.requests.get(f"acquire:{checkpoint.nonce}", -1)
    if all(seq <= since for seq in state.damaged):  # no later damaged record can have ended it
        return True, ""
    index = index_of(manifests)
    with contextlib.suppress(NotFoundError, CorruptError):
        if bytes(await get_small(log.store, index_key(checkpoint), len(index))) == index:
            return True, ""
    reason = f"it {UNCLEAR}: {records(state.damaged)}"
    logger.warning("skipped step %d, although all its files exist: %s", checkpoint.step, reason)
    return False, reason
