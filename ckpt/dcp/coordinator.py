"""The coordinator of torch's DCP on a run: it takes ownership, commits the files of the ranks, and cleans up.

No file stays open between two saves. `ckpt.dcp.incarnation` has the identity of the job and its state for each tier.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from ckpt.core.checkpoint import commits, retention
from ckpt.core.checkpoint.lease import check_free
from ckpt.core.checkpoint.manifests import load_manifests
from ckpt.core.checkpoint.open_tier import LIST_EVERY, READ_BACK_EVERY, OpenTier
from ckpt.core.checkpoint.write import WrittenManifest
from ckpt.core.format.manifest import STEPS, CheckpointId
from ckpt.core.format.manifest import owner as owner_of
from ckpt.core.log.run_log import Acquire, Commit, RunLog, RunState, live_files
from ckpt.dcp import rank_write
from ckpt.dcp.incarnation import Incarnation, Known, forget, known, note_owner, owner_known
from ckpt.dcp.rank_write import Content, RankShare, Receipt
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    FormatError,
    FullError,
    NoCheckpointError,
    NotFoundError,
    RunGoneError,
    SaveError,
    StoreError,
    UsageError,
    from_wire,
    to_wire,
)
from ckpt.events import log as logger
from ckpt.store import Store, open_store, remember_options
from ckpt.tiers import Tier

PATIENCE_S = 60.0  # seconds for each request to a remote store, because all ranks wait for it


# -- stores --


def store_of(tier: Tier) -> Store:
    """Open the store of a tier for writing."""
    remember_options(tier.url, tier.storage_options)
    limits = {"bytes_per_s": tier.max_mib_s and tier.max_mib_s * 2**20, "in_flight": tier.max_inflight_mib * 2**20}
    return open_store(tier.url, writable=True, limits=limits, patience_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def opened(tier: Tier, *, create: bool = False) -> AsyncIterator[RunLog]:
    """Open the log of a run. Raise RunGoneError if the tier contains another run than the one that this process opened
    before. If the run is gone, delete the files that saves of this process left, because they would block a new run."""
    store, place = store_of(tier), known(tier.url)
    try:
        log = RunLog(store)
        if create and not place.trusted:
            await _remove_rest(tier, log, place)  # since the last removal, other ranks may have written more files
            await commits.create_run(store)
            place.trusted = True
        try:
            await log.open()
            if place.root not in ("", log.root):
                raise RunGoneError.of(tier.url)
        except RunGoneError:
            await _remove_rest(tier, log, place)
            raise
        except (FormatError, NoCheckpointError):  # the run was deleted: the next save creates it again
            gone = await _is_gone(log, place.root)
            if gone:
                await _remove_rest(tier, log, place)
            forget(tier.url, open=place.open if gone else None)
            raise
        place.root = log.root
        yield log
    finally:
        await store.aclose()


async def _is_gone(log: RunLog, root: str) -> bool:
    """Return True if the run certainly no longer exists. If its state cannot be read, return False."""
    log.root = root
    try:
        return not await log.same()
    except CheckpointError:
        return False


async def _remove_rest(tier: Tier, log: RunLog, place: Known) -> None:
    for checkpoint in sorted(place.open):
        await OpenTier(tier.url, tier.keeping, log).remove_rest(checkpoint)


def cadence(tiers: Sequence[Tier], step: int) -> list[Tier]:
    """Return the tiers that have scheduled this step, nearest first. If none has, return the nearest tier, because the
    user requested a save."""
    return [tier for tier in tiers if step % tier.steps == 0] or list(tiers[:1])


# -- begin --


@dataclass
class Saving:
    """One save, from its plan to its commit. `errors`: for each tier that cannot be written to now, its error by
    URL."""

    checkpoint: CheckpointId
    owner: Acquire
    world: int
    tiers: list[Tier]
    read_back: tuple[str, ...] = ()
    errors: dict[str, CheckpointError] = field(default_factory=dict)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(tier.url for tier in self.tiers if tier.url not in self.errors)


async def begin(tiers: Sequence[Tier], job: Incarnation, step: int, world: int) -> Saving:
    """Name the checkpoint. Raise FencedError if another job owns the run, UsageError if the step cannot be saved."""
    urls = tuple(tier.url for tier in tiers)
    owner = owner_known(urls, job)
    try:
        if owner is None:
            raise FencedError("not known yet")
        saving = await _begin(tiers, owner, step, world)
    except (FencedError, NoCheckpointError):  # another process of this job opened a newer term, or no run exists yet
        owner = await _take_over(tiers, job, again=False)
        saving = await _begin(tiers, owner, step, world)
    if saving is None:  # this term has tried to save the step before, and aborted it
        owner = await _take_over(tiers, job, again=True)
        saving = await _begin(tiers, owner, step, world)
        assert saving is not None, "no save was attempted in a new term"
    if not any(isinstance(error, NoCheckpointError) for error in saving.errors.values()):
        note_owner(urls, job, owner)
    for url in saving.urls:
        known(url).open.add(saving.checkpoint)
    return saving


async def _take_over(tiers: Sequence[Tier], job: Incarnation, *, again: bool) -> Acquire:
    """Take ownership of the run in all tiers, with the same term. `again`: open a new term even if this job has one."""
    async with contextlib.AsyncExitStack() as stack:
        logs = [await stack.enter_async_context(opened(tier, create=True)) for tier in tiers]
        found = [{a.nonce: a for a in log.state.acquires} for log in logs]
        names = {job.name(turn): turn for turn in range(sum(map(len, found)) + 1)}
        turn = max((names[nonce] for each in found for nonce in each if nonce in names), default=-1)
        if turn >= 0:
            nonce = job.name(turn)
            there = [each[nonce] for each in found if nonce in each]
            for log, each in zip(logs, found, strict=True):
                log.check_owner(each.get(nonce))
            if not again and len(there) == len(logs) and len({a.term for a in there}) == 1:
                return there[0]
        for log in logs:  # raises InUseError if a Checkpointer trains the run
            await check_free(log, lambda text: logger.warning("%s", text))
        floor = max(log.state.term for log in logs)
        while True:
            turn += 1
            acquires = [
                await commits.acquire(
                    log, job.name(turn), restored=None if job.nonce in each else job.restored, floor=floor
                )
                for log, each in zip(logs, found, strict=True)
            ]
            found = [{**each, a.nonce: a} for each, a in zip(found, acquires, strict=True)]
            if len({a.term for a in acquires}) == 1:
                break
            floor = max(a.term for a in acquires)  # another job opened a term in between: use one term for all tiers
        for log, acquire in zip(logs, acquires, strict=True):
            await commits.recover(log, acquire)
        return acquires[0]


async def _begin(tiers: Sequence[Tier], owner: Acquire, step: int, world: int) -> Saving | None:
    """Begin a save. Return None if this term has already aborted the step."""
    saving = Saving(CheckpointId(owner.term, step, owner.nonce), owner, world, cadence(tiers, step))
    read_back = []
    for tier in saving.tiers:
        try:
            async with opened(tier) as log:
                log.check_owner(owner)
                for left in sorted(known(tier.url).open):
                    await commits.abort(log, owner, left, "another save began before this one ended")
                known(tier.url).open.clear()
                if saving.checkpoint in log.state.aborted:
                    return None
                _check_step(log, saving.checkpoint)
                await _clear(log, owner, known(tier.url))
                if _wants_read_back(log, tier, saving.checkpoint, world):
                    read_back.append(tier.url)
        except (StoreError, CorruptError, FormatError, NoCheckpointError) as error:
            saving.errors[tier.url] = _with_help(error, tier.url)
    if not saving.urls:
        raise next(iter(saving.errors.values()))
    saving.read_back = tuple(read_back)
    return saving


def _with_help(error: CheckpointError, url: str) -> CheckpointError:
    return FullError(f"{error}. `ckpt gc {url}` deletes unused files") if isinstance(error, FullError) else error


async def _clear(log: RunLog, owner: Acquire, place: Known) -> None:
    """Delete the files of aborted checkpoints now. Retention would delete them only after the next checkpoint, which
    may need their space."""
    if log.state.aborted <= place.cleared:
        return
    listed = [info.key async for info in log.store.list(STEPS)]
    used = await retention.files_of(log, log.state.commits.values())
    aborted = set(log.state.aborted)

    def decide(state: RunState) -> retention.Sweep | None:
        if state.damaged or not state.commits.keys() <= used.keys():
            return None  # unreadable checkpoints may use files of aborted ones
        live = live_files(state, listed, set[str]().union(*used.values()))
        return retention.Sweep(delete=tuple(key for key in listed if key not in live and owner_of(key) in aborted))

    landed = await retention.land(log, owner, decide)
    if landed:
        await retention.delete_in_order(log.store, landed.delete)
    place.cleared |= aborted


def _check_step(log: RunLog, checkpoint: CheckpointId) -> None:
    state = log.state
    if state.ended(checkpoint):
        raise UsageError(f"this job has already saved step {checkpoint.step} to {log.store.url}")
    done = [a for a in (*state.commits, *state.retired) if (a.term, a.nonce) == (checkpoint.term, checkpoint.nonce)]
    newest = max(done, default=None)
    if newest is not None and newest > checkpoint:
        raise UsageError(
            f"step {checkpoint.step} cannot follow step {newest.step}, which this job has saved: steps must increase. "
            "Use dcp.load to go back"
        )


def _wants_read_back(log: RunLog, tier: Tier, checkpoint: CheckpointId, world: int) -> bool:
    """Return True if older checkpoints would expire after this save, but no recent checkpoint was read back."""
    fake = Commit(checkpoint, world, (), "")
    state = replace(log.state, commits={**log.state.commits, checkpoint: fake})
    recent = {c.checkpoint for c in state.lineage()[: READ_BACK_EVERY if log.store.remote else 1]}
    return bool(retention.choose(state, tier.keeping, {checkpoint})) and known(tier.url).read_back not in recent


async def renewed(share: RankShare, tiers: Sequence[Tier], step: int, restored: CheckpointId | None) -> RankShare:
    """Return this save's data from the coordinator for a rank whose planner cached the data of an older save.
    `restored`: the checkpoint that this process has loaded since that save; a load changes the name of the job, which
    only the coordinator knows. Raise FencedError if another job owns the run."""
    due, job = cadence(tiers, step), Incarnation(share.job, None, 0)
    owner: Acquire | None = None
    read_back = []
    for tier in due:
        try:
            async with opened(tier) as log:
                newest = owner or _own(log, job, restored)
                checkpoint = CheckpointId(newest.term, step, newest.nonce)
                if _wants_read_back(log, tier, checkpoint, share.world):
                    read_back.append(tier.url)
                owner = newest
        except StoreError:
            continue  # writing to this tier fails as well, and that error is reported
    if owner is None:
        raise SaveError(f"cannot read the owner of the run from {', '.join(tier.url for tier in due)}")
    checkpoint = CheckpointId(owner.term, step, owner.nonce)
    urls = tuple(tier.url for tier in due)
    return replace(share, checkpoint=str(checkpoint), tiers=urls, read_back=tuple(read_back))


def _own(log: RunLog, job: Incarnation, restored: CheckpointId | None) -> Acquire:
    """Return the newest term if it belongs to this job. Raise FencedError if it belongs to another."""
    acquires = log.state.acquires
    if not acquires:
        raise SaveError(f"{log.store.url} has no owner")
    newest = acquires[-1]
    names = {job.name(turn) for turn in range(len(acquires) + 1)}
    if newest.nonce not in names and (restored is None or newest.restored != restored):
        raise FencedError(f"another job took ownership of {log.store.url}, so this one can no longer save there")
    return newest


# -- write, on every rank --


async def write(tiers: Sequence[Tier], share: RankShare, content: Content) -> Receipt:
    """Write a rank's share to all its tiers. If one tier fails, the others are still written. If all tiers fail, or the
    state cannot be saved, abort the checkpoint and raise the error."""
    checkpoint = CheckpointId.parse(share.checkpoint)
    written: dict[str, WrittenManifest] = {}
    errors: dict[str, CheckpointError] = {}
    try:
        for tier in tiers:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    store = store_of(tier)
                    stack.push_async_callback(store.aclose)
                    back = tier.url in share.read_back
                    written[tier.url] = await rank_write.write(store, checkpoint, content, read_back=back)
                    if back:
                        known(tier.url).read_back = checkpoint
            except (StoreError, CorruptError) as error:
                errors[tier.url] = _with_help(error, tier.url)
        rank_write.check_alike(list(written.values()))
        if errors and not written:
            raise next(iter(errors.values()))
    except BaseException as error:
        await give_up_share(tiers, share, error)
        raise
    return Receipt(
        share.checkpoint,
        share.rank,
        {url: one.digest for url, one in written.items()},
        {url: to_wire(error) for url, error in errors.items()},
        tuple(url for url in share.read_back if url in written),
    )


# -- end --


async def give_up(tier: Tier, owner: Acquire, checkpoint: CheckpointId, reason: str) -> None:
    """Try to abort a checkpoint in one tier. If that fails, the next save or job aborts it."""
    try:
        async with opened(tier) as log:
            await commits.abort(log, owner, checkpoint, reason)
        known(tier.url).open.discard(checkpoint)
    except CheckpointError as error:
        logger.warning("could not abort checkpoint %s in %s: %s", checkpoint, tier.url, error)


async def give_up_share(tiers: Sequence[Tier], share: RankShare, error: BaseException) -> None:
    """Abort the checkpoint in all tiers, because this rank cannot write its share."""
    checkpoint, reason = (
        CheckpointId.parse(share.checkpoint),
        f"rank {share.rank}: {str(error) or type(error).__name__}",
    )
    for tier in tiers:
        await give_up(tier, Acquire(checkpoint.term, checkpoint.nonce, None), checkpoint, reason)


async def end(saving: Saving, receipts: Sequence[Receipt]) -> None:
    """Commit the checkpoint in each tier to which all ranks have written. Raise SaveError or FencedError if a tier
    lacks files of a rank."""
    errors: dict[str, Exception] = dict(saving.errors)
    checkpoint = saving.checkpoint
    for tier in saving.tiers:
        if tier.url in errors:
            continue
        try:
            await _commit(tier, saving, receipts)
        except Exception as error:
            errors[tier.url] = error
            if not isinstance(error, FencedError):
                await give_up(tier, saving.owner, checkpoint, str(error))
    fenced = [error for error in errors.values() if isinstance(error, FencedError)]
    if fenced:
        raise fenced[0]
    if errors:
        what = "; ".join(f"{url}: {error}" for url, error in errors.items())
        there = " and ".join(tier.url for tier in saving.tiers if tier.url not in errors)
        where = f"It is in {there}" if there else "It is in no tier"
        raise SaveError(f"step {checkpoint.step} was not written to {what}. {where}") from next(iter(errors.values()))


async def _commit(tier: Tier, saving: Saving, receipts: Sequence[Receipt]) -> None:
    url, checkpoint = tier.url, saving.checkpoint
    for receipt in receipts:
        if receipt.checkpoint != str(checkpoint):
            raise SaveError(f"rank {receipt.rank} wrote checkpoint {receipt.checkpoint}, but this save is {checkpoint}")
        if url in receipt.errors:
            raise SaveError(f"rank {receipt.rank}: {from_wire(receipt.errors[url])}")
    if sorted(r.rank for r in receipts) != list(range(saving.world)):
        raise SaveError(f"only {len(receipts)} of {saving.world} ranks sent a receipt")
    async with opened(tier) as log:
        try:
            parts = await load_manifests(log.store, checkpoint, [(r.rank, r.parts[url]) for r in receipts])
        except NotFoundError as error:
            raise SaveError(
                f"{error}: files that a rank wrote to {url} are not visible here. DCP needs a folder or bucket that "
                "all ranks "
                "share, not a disk of each node"
            ) from None
        await commits.commit(log, saving.owner, parts)
        place = known(url)
        place.open.discard(checkpoint)
        if all(url in receipt.read_back for receipt in receipts):
            place.verified = {checkpoint}
        try:
            await _tidy(log, saving.owner, tier, place)
        # the checkpoint is committed; if a newer job took ownership, the next save reports it
        except Exception as error:
            logger.warning("postponed the clean-up of %s: %s", url, error)


async def _tidy(log: RunLog, owner: Acquire, tier: Tier, place: Known) -> None:
    """Apply retention like the writer of a `Checkpointer`. Files that are being read are deleted at a later save."""
    await place.trimmer.step(log, owner)
    now = time.monotonic()
    expired = [key for when, keys in place.leaving if when <= now for key in keys]
    place.leaving = [(when, keys) for when, keys in place.leaving if when > now]
    await retention.delete_in_order(log.store, expired)
    doomed = retention.choose(log.state, tier.keeping, place.verified)
    full = not log.store.remote or place.sweeps % LIST_EVERY == 0
    if not doomed and not (log.state.aborted and full):
        return
    grace_s = retention.default_grace_s(log.store) if tier.reader_grace_s is None else tier.reader_grace_s

    async def later(keys: Sequence[str]) -> None:
        place.leaving.append((time.monotonic() + grace_s, list(keys)))

    spared = frozenset(key for _, keys in place.leaving for key in keys)
    place.sweeps += 1
    await retention.retire(
        log, owner, tier.keeping, place.verified, orphans=full, spared=spared, delete=later if grace_s else None
    )
