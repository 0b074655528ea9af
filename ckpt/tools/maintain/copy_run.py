"""Copy checkpoints of a run to another location: a new run, or an existing one.

A plan is made first and can be shown; functions without I/O decide. A copy takes ownership of the target only with
`take_over`. It may be interrupted at any moment and repeated, because it finds the files that are copied already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ckpt.core.checkpoint.commits import acquire, check_empty
from ckpt.core.checkpoint.commits import commit as append_commit
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.checkpoint.manifests import MANY, load_manifest
from ckpt.core.checkpoint.read import elsewhere
from ckpt.core.checkpoint.retention import files_of
from ckpt.core.checkpoint.write import WrittenManifest
from ckpt.core.format.manifest import CheckpointId, folder_of, new_nonce
from ckpt.core.log.records import Acquire, Commit, RunState, in_history
from ckpt.core.log.run_log import RunLog
from ckpt.core.writer import promotion
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    FormatError,
    NoCheckpointError,
    NotFoundError,
    SaveError,
    UsageError,
)
from ckpt.store import Store, exists
from ckpt.tools.maintain.prune import Item, some

PARTS = 4  # number of ranks whose files are copied at the same time
COPIED = "copy:"  # prefix of the nonce if a copy writes an ACQUIRE record: no job trains in that term

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What to copy, newest first. A file that several checkpoints share counts for the first of them.

    `lead`: the target's history will continue from the newest of these. `fences`: True if a job that trains in the
        target is fenced. `after`: newest ACQUIRE record of the target at the time of this decision.
    """

    copy: tuple[Item, ...]
    there: tuple[Item, ...]
    left_out: tuple[Item, ...]
    new: bool
    lead: bool
    take_over: bool
    fences: bool
    after: Acquire | None


async def open_target(store: Store) -> RunLog | None:
    """Open the run in a location. Return None if it is empty. Raise FormatError for files of another program."""
    log = RunLog(store)
    try:
        await log.open()
    except (FormatError, NoCheckpointError):
        if await exists(store, "FORMAT.json"):
            raise
        await check_empty(store)
        return None
    return log


async def plan_copy(source: RunLog, target: RunLog | None, wanted: Sequence[Commit], take_over: bool) -> CopyPlan:
    """Plan how to copy checkpoints to another location. `target`: None if it has no run yet. Checkpoints that are
    damaged or cannot be copied are skipped, with the reason. Raise UsageError if the copy needs `take_over` or the
    target is a different run, and CorruptError if the target's log is damaged."""
    far = RunState() if target is None else target.state
    if target is not None and far.damaged:
        raise CorruptError(
            f"log records {some(far.damaged)} of {target.store.url} are damaged or missing, so it is unknown which "
            "checkpoints were "
            "deleted there. Copy to another location"
        )
    if target is not None and far.commits and starts(source.state).isdisjoint(starts(far)):
        raise UsageError(
            f"{target.store.url} is a different run: it has no job in common with {source.store.url}, and the "
            "checkpoints of both would be mixed. Copy to another location"
        )
    copy, there, left_out = list[Item](), list[Item](), list[Item]()
    counted: set[str] = set()
    for commit in wanted:
        if target is not None and commit.checkpoint in far.commits:
            problem = await _missing(target, far.commits[commit.checkpoint])
            (left_out if problem else there).append(Item(commit.checkpoint, why=problem))
        elif why := why_not(source.state, far, commit) or await _being_written(target, commit.checkpoint, take_over):
            left_out.append(Item(commit.checkpoint, why=why))
        else:
            try:
                size = await promotion.measure(source, commit, counted)
                copy.append(Item(commit.checkpoint, size.nbytes, size.files))
            except (NotFoundError, CorruptError) as error:
                left_out.append(Item(commit.checkpoint, why=str(await _blame(source, commit.checkpoint, error))))
    newest = _newest(copy[0], there) if copy else None
    lead = newest is not None and leads(far, newest, take_over)
    fences = lead and not nobodys(far)
    if newest is not None and fences and not take_over:
        raise UsageError(
            f"step {newest.step} is from a later job attempt than all in the target, and would hide later saves there. "
            "With --take-over the target continues from it, and a job that trains there can no longer save"
        )
    after = far.acquires[-1] if far.acquires else None
    return CopyPlan(tuple(copy), tuple(there), tuple(left_out), target is None, lead, take_over, fences, after)


def _newest(first: Item, there: Sequence[Item]) -> CheckpointId:
    """Return the newest of the source's checkpoints that the target will have once the first one is copied."""
    return max(item.checkpoint for item in (first, *there))


def why_not(near: RunState, far: RunState, commit: Commit) -> str:
    """Return why a checkpoint cannot be copied to another location, or "". Does no I/O."""
    checkpoint = commit.checkpoint
    if not commit.whole:
        return elsewhere(commit)
    if far.ended(checkpoint) and checkpoint not in far.commits:
        reason = far.reasons.get(checkpoint, "retired")
        return f"it was deleted in the target ({reason}) and cannot return there: copy it to another location"
    undone = checkpoint not in in_history(near.acquires, near.commits)
    if undone and far.commits and checkpoint in in_history(far.acquires, {*far.commits, checkpoint}):
        why = "a rollback undid it in the source, but it would count in the target"
        return f"{why}: copy it to a new location"
    return ""


def starts(state: RunState) -> set[str]:
    """Return the nonces of all jobs that trained a run. They identify the run, because a copy has its own root id. The
    jobs of copied checkpoints are included."""
    checkpoints = (*state.commits, *state.retired, *state.aborted)
    return {checkpoint.nonce for checkpoint in (*state.acquires, *checkpoints)}


def nobodys(state: RunState) -> bool:
    """Return True if no job has ever owned the run, or if a copy was the last owner."""
    return not state.acquires or state.acquires[-1].nonce.startswith(COPIED)


def leads(far: RunState, newest: CheckpointId, take_over: bool) -> bool:
    """Return True if the target must record that its history continues from this checkpoint. Does no I/O. A job in the
    target saves under its term, and a checkpoint with a higher term would hide these saves forever. After an earlier
    copy, the target's history continues from a recorded checkpoint, so later ones would count as undone."""
    history = in_history(far.acquires, {*far.commits, newest})
    if newest.term > far.term and newest not in far.commits:
        return True
    if take_over:
        return history[:1] != [newest]
    return nobodys(far) and newest not in history and all(newest > checkpoint for checkpoint in far.commits)


async def _missing(log: RunLog, commit: Commit) -> str:
    """Return what is wrong with a checkpoint in the target, according to its metadata, or ""."""
    try:
        await promotion.measure(log, commit)
    except (CorruptError, NotFoundError) as error:
        return f"it is in the target, but damaged there: {error}"
    return ""


async def _being_written(target: RunLog | None, checkpoint: CheckpointId, take_over: bool) -> str:
    """Return a warning if a job may be copying this checkpoint to the folder, because two writers would corrupt it."""
    if target is None or target.store.remote or take_over or nobodys(target.state):
        return ""
    if checkpoint.term < target.state.term or not [info async for info in target.store.list(folder_of(checkpoint))]:
        return ""
    return "a job may be writing it there right now: repeat this later, or with --take-over if no job trains there"


async def copy(
    source: RunLog, target: RunLog, plan: CopyPlan, *, go_on: bool = False, on_bytes: OnBytes = None
) -> list[Item]:
    """Copy the checkpoints, newest first. A job in the target is fenced only once the files are complete. Raise
    CorruptError if the source is damaged, NoCheckpointError if a checkpoint was deleted during the copy. With `go_on`,
    such checkpoints are skipped, and returned with the reason. Raise FencedError if a job has taken ownership of the
    target since the plan."""
    left_out, leading, after = list[Item](), plan.lead, plan.after
    for item in plan.copy:
        commit = source.state.commits.get(item.checkpoint)
        own: Acquire | None = None
        try:
            if commit is None:
                raise NotFoundError(f"step {item.checkpoint.step} is gone")
            files = await files_of(target, target.state.commits.values())
            used = {key for keys in files.values() for key in keys}
            written = await _copy_files(source.store, target.store, commit, used, _at_most(item.size, on_bytes))
            # The first checkpoint that is really copied leads, because newer ones were skipped as damaged.
            newest = _newest(item, plan.there)
            if leading and leads(target.state, newest, plan.take_over):
                own = after = await _lead(target, after, newest)
            await append_commit(target, own, written, used=files, at=commit.time)
            leading = False
        except (NotFoundError, CorruptError) as error:
            blamed = await _blame(source, item.checkpoint, error, target)
            if not go_on:
                raise blamed from None
            left_out.append(Item(item.checkpoint, why=str(blamed)))
        except SaveError as error:
            raise SaveError(f"{target.store.url}: {error}. Copy to another location") from None
    return left_out


def _at_most(most: int, on_bytes: OnBytes) -> OnBytes:
    """Limit reported bytes to `most`, because files that an earlier checkpoint shares were reported with it."""
    if on_bytes is None:
        return None
    left = most

    def report(count: int) -> None:
        nonlocal left
        count = min(count, left)
        left -= count
        on_bytes(count)

    return report


async def _blame(
    source: RunLog, checkpoint: CheckpointId, error: CheckpointError, target: RunLog | None = None
) -> CheckpointError:
    """Convert a read error to its cause: damage in the source or target, or a deletion during the copy."""
    if target is not None and str(error).startswith(target.store.url):
        return CorruptError(f"step {checkpoint.step} cannot be copied: {error}")
    if checkpoint in (await source.refresh()).commits:
        url = source.store.url
        return CorruptError(f"step {checkpoint.step} of {url} is damaged: {error}. `ckpt repair {url}` may repair it")
    return NoCheckpointError(
        f"step {checkpoint.step} of {source.store.url} was deleted during the copy. Copy a newer one, or `ckpt pin` "
        "it first"
    )


async def _copy_files(
    source: Store, target: Store, commit: Commit, used: Set[str], on_bytes: OnBytes
) -> list[WrittenManifest]:
    many = len(commit.manifests) > MANY

    async def copy_rank(manifest: tuple[int, str]) -> WrittenManifest:
        rank, digest = manifest
        await promotion.copy_part(
            source, target, commit.checkpoint, rank, expected=digest, used=used, on_bytes=on_bytes
        )
        # read again, because the manifest has the sizes of its files
        return await load_manifest(target, commit.checkpoint, rank, expected=digest, compact=many)

    return await of_each(commit.manifests, copy_rank, PARTS)


async def _lead(log: RunLog, after: Acquire | None, checkpoint: CheckpointId) -> Acquire:
    """Record that the history continues from this checkpoint. Raise FencedError if `after` is not the last owner."""

    def check(state: RunState) -> None:
        if (state.acquires[-1] if state.acquires else None) != after:
            raise FencedError(
                f"a job took ownership of {log.store.url} while files were copied there: check it and repeat the copy"
            )

    return await acquire(log, f"{COPIED}{new_nonce()}", restored=checkpoint, floor=checkpoint.term, check=check)
