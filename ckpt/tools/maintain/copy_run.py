"""Copy checkpoints of a run to another location from outside: a new run, or one that is there.

It begins with a plan that can be shown; what decides is pure. Nothing here owns a run, and only where it is told to
does a copy take one over. It may be stopped at any moment and called again: what was copied is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ckpt.core.checkpoint import promote
from ckpt.core.checkpoint.commit import acquire
from ckpt.core.checkpoint.commit import commit as append_commit
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.checkpoint.parts import MANY, load_part
from ckpt.core.checkpoint.retention import files_of
from ckpt.core.checkpoint.store_trial import check_empty
from ckpt.core.checkpoint.write import WrittenPart
from ckpt.core.format.manifest import Attempt, folder_of, new_nonce
from ckpt.core.format.slim import Slim
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import Acquire, Commit, RunState, in_history
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

PARTS = 4  # ranks' parts copied at once
COPIED = "copy:"  # so begins the nonce of an ACQUIRE that a copy has made: no job trains under it

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Newest first. A file that several of `copy` share counts with the first of them.

    `lead`: the target's history is to go on from the newest of these; `fences`: whoever trains there. `after`: the
    ACQUIRE that was the target's newest when this was decided.
    """

    copy: tuple[Item, ...]
    there: tuple[Item, ...]
    left_out: tuple[Item, ...]
    new: bool
    lead: bool
    take_over: bool
    fences: bool
    after: Acquire | None


async def look(store: Store) -> RunLog | None:
    """The run in a place, None if it is empty. FormatError if it holds somebody else's files."""
    log = RunLog(store)
    try:
        await log.open()
    except FormatError:
        if await exists(store, "FORMAT.json"):
            raise
        await check_empty(store)
        return None
    return log


async def plan_copy(source: RunLog, target: RunLog | None, wanted: Sequence[Commit], take_over: bool) -> CopyPlan:
    """What to do to have these in another location. `target`: None if there is no run yet.

    What cannot be copied, because it is damaged or for another reason, is left out with the reason. UsageError if it
    needs `take_over`, or the target is a different run; CorruptError if the target's log is damaged.
    """
    far = RunState() if target is None else target.state
    if target is not None and far.damaged:
        raise CorruptError(
            f"log records {some(far.damaged)} of {target.store.url} are damaged or missing: nobody can say what was "
            "given up there. Copy to another location"
        )
    if target is not None and far.commits and starts(source.state).isdisjoint(starts(far)):
        raise UsageError(
            f"{target.store.url} is a different run: it has no job in common with {source.store.url}, and the "
            "checkpoints of both would become one history. Copy to another location"
        )
    copy, there, left_out = list[Item](), list[Item](), list[Item]()
    counted: set[str] = set()
    for commit in wanted:
        if target is not None and commit.attempt in far.commits:
            problem = await _missing(target, far.commits[commit.attempt])
            (left_out if problem else there).append(Item(commit.attempt, why=problem))
        elif why := why_not(source.state, far, commit) or await _being_written(target, commit.attempt, take_over):
            left_out.append(Item(commit.attempt, why=why))
        else:
            try:
                size = await promote.measure(source, commit, counted)
                copy.append(Item(commit.attempt, size.nbytes, size.files))
            except (NotFoundError, CorruptError) as error:
                left_out.append(Item(commit.attempt, why=str(await _blame(source, commit.attempt, error))))
    newest = _newest(copy[0], there) if copy else None
    lead = newest is not None and leads(far, newest, take_over)
    fences = lead and not nobodys(far)
    if newest is not None and fences and not take_over:
        raise UsageError(
            f"step {newest.step} is of a later start than any in the target, and would hide what a job saves there. "
            "With --take-over the target goes on from it, and a job that trains there can save no more"
        )
    after = far.acquires[-1] if far.acquires else None
    return CopyPlan(tuple(copy), tuple(there), tuple(left_out), target is None, lead, take_over, fences, after)


def _newest(first: Item, there: Sequence[Item]) -> Attempt:
    """Of those of the source that the target will have once the first is copied."""
    return max(item.attempt for item in (first, *there))


def why_not(near: RunState, far: RunState, commit: Commit) -> str:
    """Why a checkpoint cannot be brought to another location; empty if it can. Pure."""
    attempt = commit.attempt
    if not commit.whole:
        have = f"only {len(commit.parts)} of its {commit.world} parts"
        return f"{have} are in the source: the others are on the disks of other nodes"
    if far.ended(attempt) and attempt not in far.commits:
        said = far.reasons.get(attempt, "retired")
        return f"it was given up in the target ({said}) and cannot come back there: copy it to another location"
    undone = attempt not in in_history(near.acquires, near.commits)
    if undone and far.commits and attempt in in_history(far.acquires, {*far.commits, attempt}):
        why = "a rollback has undone it in the source, and the target would take it for history"
        return f"{why}: copy it to a new location"
    return ""


def starts(state: RunState) -> set[str]:
    """The nonces of the jobs that have trained a run, or what was copied into it. A copy has a root id of its own."""
    attempts = (*state.commits, *state.held, *state.retired, *state.aborted)
    return {one.nonce for one in (*state.acquires, *attempts)}


def nobodys(state: RunState) -> bool:
    """Whether no job has ever taken the run over, or only a copy has since."""
    return not state.acquires or state.acquires[-1].nonce.startswith(COPIED)


def leads(far: RunState, newest: Attempt, take_over: bool) -> bool:
    """Whether the target must be told that its history goes on from this one. Pure.

    A job there saves under its epoch: what has a higher one would hide all of that for ever. And a copy has said from
    where the history goes on, so what came later in the source would count as undone.
    """
    history = in_history(far.acquires, {*far.commits, newest})
    if newest.epoch > far.epoch and newest not in far.commits:
        return True
    if take_over:
        return history[:1] != [newest]
    return nobodys(far) and newest not in history and all(newest > attempt for attempt in far.commits)


async def _missing(log: RunLog, commit: Commit) -> str:
    """What is wrong with a checkpoint at the first look; empty if nothing."""
    try:
        await promote.measure(log, commit)
    except (CorruptError, NotFoundError) as error:
        return f"it is in the target, but damaged there: {error}"
    return ""


async def _being_written(target: RunLog | None, attempt: Attempt, take_over: bool) -> str:
    """Whether a job may be bringing an attempt to this folder right now: two who write one file spoil it."""
    if target is None or target.store.remote or take_over or nobodys(target.state):
        return ""
    if attempt.epoch < target.state.epoch or not [info async for info in target.store.list(folder_of(attempt))]:
        return ""
    return "a job may be writing it there right now: repeat this later, or with --take-over if no job trains there"


async def copy(
    source: RunLog, target: RunLog, plan: CopyPlan, *, go_on: bool = False, on_bytes: OnBytes = None
) -> list[Item]:
    """Do it, the newest first. Whoever trains in the target is fenced only once the files are there.

    CorruptError if the source is damaged, NoCheckpointError if it has retired a checkpoint meanwhile; but with `go_on`
    such a one is left out, the others are copied, and what was left out is returned with the reason. FencedError if a
    job took the target over meanwhile.
    """
    left_out, leading, after = list[Item](), plan.lead, plan.after
    for item in plan.copy:
        commit = source.state.commits.get(item.attempt)
        mine: Acquire | None = None
        try:
            if commit is None:
                raise NotFoundError(f"step {item.attempt.step} is gone")
            files = await files_of(target, target.state.commits.values())
            used = {key for keys in files.values() for key in keys}
            written = await _copy_files(source.store, target.store, commit, used, _at_most(item.size, on_bytes))
            # Which one leads is decided by the first that is really here: those before it have turned out damaged.
            newest = _newest(item, plan.there)
            if leading and leads(target.state, newest, plan.take_over):
                mine = after = await _lead(target, after, newest)
            await append_commit(target, mine, written, used=files, at=commit.time)
            leading = False
        except (NotFoundError, CorruptError) as error:
            blamed = await _blame(source, item.attempt, error, target)
            if not go_on:
                raise blamed from None
            left_out.append(Item(item.attempt, why=str(blamed)))
        except SaveError as error:
            raise SaveError(f"{target.store.url}: {error}. Copy to another location") from None
    return left_out


def _at_most(most: int, on_bytes: OnBytes) -> OnBytes:
    """Tells of so many bytes only: files that came with another checkpoint have been told of."""
    if on_bytes is None:
        return None
    left = most

    def tell(count: int) -> None:
        nonlocal left
        count = min(count, left)
        left -= count
        on_bytes(count)

    return tell


async def _blame(
    source: RunLog, attempt: Attempt, error: CheckpointError, target: RunLog | None = None
) -> CheckpointError:
    """Whether what cannot be read is damaged, and where, or was retired while we looked."""
    if target is not None and str(error).startswith(target.store.url):
        return CorruptError(f"step {attempt.step} cannot be copied: {error}")
    if attempt in (await source.refresh()).commits:
        url = source.store.url
        return CorruptError(f"step {attempt.step} of {url} is damaged: {error}. `ckpt repair {url}` may mend it")
    return NoCheckpointError(
        f"step {attempt.step} of {source.store.url} was given up while it was copied. Copy a newer one, or `ckpt keep` "
        "it first"
    )


async def _copy_files(
    source: Store, target: Store, commit: Commit, used: Set[str], on_bytes: OnBytes
) -> list[WrittenPart]:
    slim = Slim() if len(commit.parts) > MANY else None

    async def one(part: tuple[int, str]) -> WrittenPart:
        rank, digest = part
        await promote.copy_part(source, target, commit.attempt, rank, expected=digest, used=used, on_bytes=on_bytes)
        # With data files of their size.
        return await load_part(target, commit.attempt, rank, expected=digest, slim=slim)

    return await of_each(commit.parts, one, PARTS)


async def _lead(log: RunLog, after: Acquire | None, attempt: Attempt) -> Acquire:
    """Make the history of a run go on from an attempt. FencedError if somebody came after `after`."""

    def check(state: RunState) -> None:
        if (state.acquires[-1] if state.acquires else None) != after:
            raise FencedError(f"a job took {log.store.url} over while files were copied there: look again, and repeat")

    return await acquire(log, f"{COPIED}{new_nonce()}", restored=attempt, floor=attempt.epoch, check=check)
