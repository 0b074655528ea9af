"""Taking a run over, making checkpoints exist, and tidying up after a crash: everything that changes the log.

A checkpoint exists from the moment its COMMIT record is durable. Before that, W verified parts of one attempt already
*are* a consistent checkpoint, since attempts are named alike on all ranks; so recovery rolls a whole attempt forward
and aborts the rest. Only an attempt that the store cannot read at that moment stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt.core.checkpoint import commit_checks
from ckpt.core.checkpoint.concurrent import AT_ONCE, of_each
from ckpt.core.checkpoint.losses import UNCLEAR, records
from ckpt.core.checkpoint.parts import load_part as load_part
from ckpt.core.checkpoint.parts import sound_parts
from ckpt.core.checkpoint.parts import stored_part as stored_part
from ckpt.core.checkpoint.retention import delete_in_order, files_of, remember_packs
from ckpt.core.checkpoint.store_trial import check_empty, check_ranges, created_twice, try_out
from ckpt.core.checkpoint.write import WrittenPart
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import (
    MAX_FORMAT,
    STEPS,
    Attempt,
    by_owner,
    folder_of,
    index_key,
    is_data,
    new_format,
    owner,
    seal,
)
from ckpt.core.log.log import RunLog, infer_root
from ckpt.core.log.records import Acquire, Commit, Record, RunState, commit_body
from ckpt.errors import (
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
from ckpt.store import Store, get_small, open_store

PROBES = 3  # whoever repeats a request whose answer was lost finds these bytes, and may take them for his own
LEFT_OUT = "was left out in"  # so says a reason for an ABORT that is no failure: the place cannot keep up


async def create_run(store: Store) -> None:
    """Make sure that FORMAT.json is there, and that the store really creates only what is absent, and knows ranges.

    FormatError if the place holds somebody else's files, StoreError if it cannot hold a run: nothing is written then.
    """
    try:
        await get_small(store, "FORMAT.json", MAX_FORMAT)  # not just a look: what it is refused for, only this says
    except NotFoundError:
        if (root := await infer_root(store)) is None:  # else it was lost, and the log still knows whose it is
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
            await store.put("FORMAT.json", there, create=True)  # the same bytes: no harm, should it replace them
        except ExistsError:
            break
    else:
        raise created_twice(store)
    if store.remote:
        await check_ranges(store, "FORMAT.json", there)


@contextlib.asynccontextmanager
async def written_run(url: str | Path) -> AsyncIterator[RunLog]:
    """The log of a run that is written to; it is created if it is not there."""
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
    restored: Attempt | None = None,
    floor: int = 0,
    check: Callable[[RunState], None] = lambda state: None,
) -> Acquire:
    """Become the owner of the run: from here on older incarnations are fenced.

    The epoch exceeds every epoch in this log and `floor`. With `restored`, the history continues from that attempt.
    `check` raises if the newest state forbids it.
    """

    def make(state: RunState) -> Record:
        check(state)
        # A damaged record may have been an ACQUIRE that came after the newest we know: leave room for its epoch.
        newest = state.requests.get(f"acquire:{state.acquires[-1].nonce}", -1) if state.acquires else -1
        epoch = max(state.epoch + sum(seq > newest for seq in state.damaged), floor) + 1
        body = {"term": epoch, "nonce": nonce, "restored": None if restored is None else str(restored)}
        return Record("ACQUIRE", body, f"acquire:{nonce}")

    state = await log.append(make, owner=None)
    point("acquire.done")
    mine = [a for a in state.acquires if a.nonce == nonce]
    if not mine:
        raise FormatError(f"the log of {log.store.url} has used up its terms: go on in another location")
    return mine[-1]


@dataclass(frozen=True, slots=True)
class Role:
    """Whose parts belong into one place, and how soon a writer may commit them: the first at once, others later."""

    ranks: tuple[int, ...] = (0,)
    place: int = 0
    world: int = 1

    @property
    def partial(self) -> bool:
        """A disk that only some of the ranks see."""
        return len(self.ranks) < self.world


async def commit(
    log: RunLog,
    mine: Acquire | None,
    parts: list[WrittenPart],
    *,
    kind: str = "COMMIT",
    used: Mapping[Attempt, Set[str]] | None = None,
    at: float | None = None,
    fitting: bool = False,
) -> Commit:
    """Make a checkpoint of the parts of one attempt, one a rank. Doing it twice is harmless. `mine` None: fence nobody.

    SaveError if the attempt was aborted meanwhile, or borrows packs that are gone, or that none of its sources uses any
    more; FencedError if a newer job has taken over.

    used: which files each checkpoint here uses, for a copy. It has brought along all that it refers to, so its sources
        need not be here.
    at: the time of the commit, default: now.
    fitting: raise SaveError also if tensors differ that ranks should hold alike.
    """
    parts = sorted(parts, key=lambda w: w.part.rank)
    packs, said = {key for w in parts for key in w.packs}, _said_by(parts)
    commit_checks.check_needs(said.attempt, said.needs)
    index = await asyncio.to_thread(commit_checks.index_of, parts)
    if fitting and len(parts) > 1:  # after the index: a tensor of another shape differs, too
        await asyncio.to_thread(commit_checks.check_replicas, parts)
    when = time.time() if at is None else at
    found, attempt = replace(said, index=file_digest(index), time=when), said.attempt
    log.check_owner(mine)
    copied = used is not None
    if used is None and not log.state.ended(attempt):
        used = await _used_by(log, said)
        await check_there(log.store, attempt, packs)
    await _put_index(log.store, attempt, index)
    point("index.stored")

    def make(state: RunState) -> Record | None:
        if state.ended(attempt) or (kind == "HELD" and attempt in state.held):
            return None
        # A pack may be of an attempt that is retired by now, if a live checkpoint that was built on it uses it too.
        commit_checks.check_files(state, attempt, packs, used or {}, copied=copied)
        if kind == "HELD":
            commit_checks.check_live(state, attempt, found.needs)  # as its COMMIT will
        return Record(kind, commit_body(found), f"{kind.lower()}:{attempt}")

    state = await log.append(make, owner=mine)
    landed = state.commits.get(attempt) or (state.held.get(attempt) if kind == "HELD" else None)
    if landed is None:
        log.check_owner(mine)  # a newer job ended it
        if attempt in state.retired and attempt not in state.reasons:
            return found  # another rank committed it, and retention has retired it since
        why = state.reasons.get(attempt, "the reason is no longer recorded")
        raise SaveError(f"step {attempt.step} was aborted before it was committed: {why}")
    if landed.parts == found.parts:
        remember_packs(log, attempt, packs)
    await _note_latest(log)
    return landed


async def _put_index(store: Store, attempt: Attempt, index: bytes) -> None:
    """Create the index. It is a function of the manifests: another committer writes the same. SaveError if not."""
    key = index_key(attempt)
    try:
        await store.put(key, index, create=True)
    except ExistsError:
        there = b""
        with contextlib.suppress(CorruptError):  # a longer file is another index, too
            there = bytes(await get_small(store, key, len(index)))
        if there != index:
            raise SaveError(
                f"step {attempt.step}: {key} in {store.url} exists already and has other content, so this checkpoint "
                "fails. The next one is not affected"
            ) from None


async def _note_latest(log: RunLog) -> None:
    """Write the newest checkpoint to latest.json, for people and scripts. Nothing reads it, so no error matters."""
    newest = next((one for one in log.state.lineage() if one.finite is not False), None)
    if newest is not None:
        with contextlib.suppress(CheckpointError):
            await log.store.put("latest.json", seal({"checkpoint": str(newest.attempt), "step": newest.step}))


async def _used_by(log: RunLog, said: Commit) -> dict[Attempt, set[str]]:
    """Read which files the checkpoints use that an attempt was built on.

    One that is not live any more, or is damaged, is left out. Raises StoreError if one cannot be read now.
    """
    if not log.state.commits.keys() >= set(said.needs):
        await log.refresh()  # another rank may have seen a COMMIT that we have not
    unread: dict[Attempt, CheckpointError] = {}
    live = [log.state.commits[need] for need in said.needs if need in log.state.commits]
    used = await files_of(log, live, unread)
    if away := [error for error in unread.values() if is_unreadable(error)]:
        raise away[0]
    return used


async def check_there(store: Store, attempt: Attempt, packs: Iterable[str]) -> None:
    """Raise SaveError unless every pack that an attempt borrows from older checkpoints is there.

    Somebody may have deleted files of the run, or put an earlier copy of the run in its place, since they were written.
    """
    borrowed = {key for key in packs if owner(key) != attempt}
    if len(borrowed) > AT_ONCE:  # a few listings take fewer requests
        borrowed -= {info.key async for info in store.list(STEPS)}

    async def check(key: str) -> None:
        try:
            await store.head(key)
        except NotFoundError:
            raise SaveError(
                f"step {attempt.step} builds on {key}, which is gone from {store.url}: the files of the run were "
                f"deleted, or replaced by an earlier copy of it: {commit_checks.WHOLE_NEXT}"
            ) from None

    await of_each(sorted(borrowed), check)


def _said_by(parts: Sequence[WrittenPart]) -> Commit:
    """What the record will say, but for the index. `parts`: in the order of ranks."""
    return Commit(
        Attempt.parse(parts[0].part.attempt),
        parts[0].part.world,
        tuple((w.part.rank, w.digest) for w in parts),
        "",
        commit_checks.all_finite([w.part.finite for w in parts]),
        next((w.part.reason for w in parts if w.part.reason != "due"), "due"),
        tuple(sorted({Attempt.parse(need) for w in parts for need in w.part.needs})),
    )


async def complete(log: RunLog, mine: Acquire, attempt: Attempt) -> None:
    """All other places hold their parts too: what is HELD here is a checkpoint.

    SaveError, and the attempt is ended here, if it builds on a checkpoint that was retired meanwhile.
    """

    def make(state: RunState) -> Record | None:
        held = state.held.get(attempt)
        if held is None or state.ended(attempt):
            return None
        commit_checks.check_live(state, attempt, held.needs)
        return Record("COMMIT", commit_body(replace(held, time=time.time())), f"commit:{attempt}")

    try:
        await log.append(make, owner=mine)
    except SaveError as error:
        await abort(log, mine, attempt, str(error), held=True)
        raise


def given_up(state: RunState, attempt: Attempt) -> SaveError:
    """Why an attempt that has ended is no checkpoint."""
    why = state.reasons.get(attempt, "its reason is not known any more")
    kind = SkippedError if LEFT_OUT in why else SaveError
    return kind(f"step {attempt.step} was given up: {why}")


async def commit_fitting(
    log: RunLog, mine: Acquire | None, parts: list[WrittenPart], *, kind: str = "COMMIT"
) -> Commit:
    """`commit`, of parts that are checked first. SaveError also if they cannot be a checkpoint."""
    return await commit(log, mine, parts, kind=kind, fitting=True)


async def commit_or_end(
    log: RunLog, mine: Acquire, parts: list[WrittenPart], *, kind: str, distrusted: Attempt | None = None
) -> None:
    """SaveError, and the attempt is ended, if these parts cannot be a checkpoint. `distrusted`: see `Encoder`."""
    try:
        commit_checks.check_trusted(parts, distrusted)
        await commit_fitting(log, mine, parts, kind=kind)
    except SaveError as error:
        await abort(log, mine, Attempt.parse(parts[0].part.attempt), str(error))
        raise


async def abort(log: RunLog, mine: Acquire, attempt: Attempt, reason: str, *, held: bool = False) -> None:
    """End an attempt that will never be a checkpoint, so that its files can be cleaned up.

    One that is HELD here may be a checkpoint in other places by now: it is ended only with `held`.
    """

    def make(state: RunState) -> Record | None:
        body = {"checkpoint": str(attempt), "reason": reason[:500]}
        kept = state.ended(attempt) or (attempt in state.held and not held)
        return None if kept else Record("ABORT", body, f"abort:{attempt}")

    await log.append(make, owner=mine)


async def retract(log: RunLog, mine: Acquire, attempt: Attempt, reason: str) -> None:
    """Give one attempt up, committed or not, whatever the retention says: it is known not to be what it claims.

    Its index and its manifests are deleted at once, so that a record that is damaged later does not bring it back.
    """

    def make(state: RunState) -> Record | None:
        body = {"retire": [str(attempt)], "delete": [], "reason": reason[:500]}
        return Record("PLAN", body, f"retract:{attempt}") if attempt in state.commits else None

    await abort(log, mine, attempt, reason, held=True)  # from here on it cannot be committed any more
    await log.append(make, owner=mine)
    with contextlib.suppress(StoreError):
        keys = [info.key async for info in log.store.list(folder_of(attempt))]
        await delete_in_order(log.store, [key for key in keys if owner(key) == attempt and not is_data(key)])


@dataclass
class Recovery:
    """What recovery did with attempts that a crash had left open."""

    rolled_forward: list[Attempt] = field(default_factory=list)
    aborted: list[Attempt] = field(default_factory=list)


async def recover(
    log: RunLog, mine: Acquire, in_flight: frozenset[Attempt] = frozenset(), *, partial: bool = False
) -> Recovery:
    """End every open attempt: commit it if it is whole, else abort it. `in_flight`: being written by us right now.

    `partial`: this tier holds the parts of some ranks only. There an attempt is left HELD with what is sound of it,
    since the disks of other nodes may have the rest.

    Where a record that is damaged may have ended an attempt, all of it being there does not say that it was not taken
    back. Only its index does, which is stored in order to commit it: without, it is left out.
    """
    found = by_owner([info.key async for info in log.store.list(STEPS)])
    state = await log.refresh()
    done = Recovery()
    for attempt in sorted(found):
        if state.ended(attempt) or attempt in in_flight or attempt in state.held:
            continue
        try:
            parts = list((await sound_parts(log.store, attempt, found[attempt])).values())
            forward, reason = await _is_to_land(log, attempt, parts, partial)
            if forward:
                await commit_or_end(log, mine, parts, kind=_kind(parts))
                done.rolled_forward.append(attempt)
                logger.info("rolled step %d forward: all of it had been written before the crash", attempt.step)
                continue
        except SaveError as error:
            reason = str(error)
            logger.warning("%s", error)
        except StoreError as error:
            logger.warning("checkpoint %s stays open, because it cannot be read now: %s", attempt, error)
            continue
        await abort(log, mine, attempt, reason)
        done.aborted.append(attempt)
    point("recover.done")
    return done


def _kind(parts: list[WrittenPart]) -> str:
    return "COMMIT" if commit_checks.is_whole(parts) else "HELD"


async def _is_to_land(log: RunLog, attempt: Attempt, parts: list[WrittenPart], partial: bool) -> tuple[bool, str]:
    """Return True if an attempt is to be rolled forward, else the reason."""
    state = log.state
    if not parts or not (commit_checks.is_whole(parts) or partial):
        return False, "not whole when the run was opened"
    if not _may_have_ended(state, attempt):
        return True, ""
    index = commit_checks.index_of(parts)
    with contextlib.suppress(NotFoundError, CorruptError):
        if bytes(await get_small(log.store, index_key(attempt), len(index))) == index:
            return True, ""
    reason = f"it {UNCLEAR}: {records(state.damaged)}"
    logger.warning("step %d is left out, though all of it is there: %s", attempt.step, reason)
    return False, reason


def _may_have_ended(state: RunState, attempt: Attempt) -> bool:
    """Whether a damaged record may have said so: one that came after its incarnation had taken the run over."""
    since = state.requests.get(f"acquire:{attempt.nonce}", -1)
    return any(seq > since for seq in state.damaged)
