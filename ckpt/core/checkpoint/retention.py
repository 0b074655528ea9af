"""Decides which checkpoints stay, and deletes the others.

`why_kept` has the rules, and is pure. `retire` applies them: it lists the files, reads the log, appends a PLAN as the
next record after that state, and deletes only files in the PLAN. A run with a damaged log record is never cleaned up.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ckpt.core.checkpoint.read import data_files_of
from ckpt.core.format.manifest import STEPS, CheckpointId, in_deletion_order, index_key, manifest_key
from ckpt.core.log.records import BY_HAND, LONGEST, MARK, Acquire, Commit, Record, RunState, live_files, words_of
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, CorruptError, InvalidArgumentError, NoCheckpointError, StoreError
from ckpt.events import log as logger
from ckpt.failpoints import point
from ckpt.store import Store
from ckpt.units import count_of

ALWAYS = 2  # number of checkpoints that always stay, so that one damaged file is never fatal
READER_GRACE_S = 600.0  # from a PLAN to its deletions in a remote store, because readers may still use the files


@dataclass(frozen=True, slots=True)
class Keep:
    """The rules that choose the checkpoints that stay. A checkpoint stays if any of these rules keeps it.

    last: keep this number of the newest checkpoints, default 3
    every: keep each step that is a multiple of this number; 1 keeps all
    hours: keep all checkpoints that were committed at most this many hours before the newest checkpoint
    daily, weekly: keep the newest checkpoint of each day or week, for this number of the newest days or weeks with a
    checkpoint. Days are in UTC, and a week begins on Monday. Steps whose loss was not finite do not count

    The two newest checkpoints and the two newest full checkpoints always stay.
    """

    last: int = 3
    every: int | None = None
    hours: float | None = None
    daily: int = 0
    weekly: int = 0

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 1), ("daily", 0), ("weekly", 0)):
            number = getattr(self, name)
            if not (type(number) is int and number >= least) and (name, number) != ("every", None):
                raise InvalidArgumentError(f"Keep({name}={number!r}): {name} must be a whole number from {least}")
        if self.hours is not None and not (type(self.hours) in (int, float) and 0 < self.hours < math.inf):
            raise InvalidArgumentError(f"Keep(hours={self.hours!r}): hours must be a number above 0")

    @property
    def all(self) -> bool:
        return self.every == 1


def default_grace_s(store: Store) -> float:
    return READER_GRACE_S if store.remote else 0.0


def as_keep(keep: object) -> Keep:
    """Convert "all" or a number of checkpoints to a `Keep`. Raise InvalidArgumentError for any other value."""
    if isinstance(keep, Keep):
        return keep
    if keep == "all":
        return Keep(every=1)
    if type(keep) is int:
        return Keep(last=keep)
    raise InvalidArgumentError(f'keep must be "all", a number of checkpoints, or a Keep, not {keep!r}')


def why_kept(state: RunState, keep: Keep, verified: Iterable[CheckpointId]) -> dict[CheckpointId, str]:
    """Return a dict from every checkpoint that stays to the reason. Pure.

    Whatever `keep` is, these stay: checkpoints with a KEEP record, the newest two, the newest verified one, the newest
    finite one, and the newest two full ones, because many increments may depend on one of their chunks.
    """
    history, checked = state.lineage(), set(verified)
    rest = sorted((c for c in state.commits.values() if c not in history), key=lambda c: c.checkpoint, reverse=True)
    ordered: list[Commit] = [*history, *rest]
    newest, due = ordered[:ALWAYS], [c for c in ordered if c.reason == "due"]
    full = [c for c in ordered if c.full][:ALWAYS]
    rules: list[tuple[str, list[Commit]]] = [
        *(
            (f"kept: {note}", [c for c in ordered if c.checkpoint == checkpoint])
            for checkpoint, note in state.kept.items()
        ),
        ("the newest two stay", newest),
        ("one of the newest two full ones", [c for c in full if c not in newest]),
        ("the newest finite one", [c for c in ordered if c.finite is not False][:1]),
        (f"of the last {keep.last}", [] if keep.all else due[: keep.last]),
        (
            "all stay" if keep.all else f"every {keep.every}",
            [c for c in ordered if keep.every and not c.step % keep.every],
        ),
        (f"committed within {count_of(keep.hours or 0, 'hour')} of the newest", _within(due, keep.hours)),
        ("the newest of its day", _newest_of_each(due, keep.daily, lambda day: day)),
        ("the newest of its week", _newest_of_each(due, keep.weekly, lambda day: (day + 3) // 7)),  # day 0: Thursday
    ]
    found: dict[CheckpointId, list[str]] = {}
    for reason, commits in rules:
        for commit in commits:
            found.setdefault(commit.checkpoint, []).append(reason)
    # An emergency save does not replace a scheduled one. It is retired when a newer scheduled one exists, or when a
    # series of restarts has made enough emergency saves.
    ring = history[: history.index(due[0]) if due and due[0] in history else None]
    for commit in [c for c in ordered if c.checkpoint in checked][:1]:
        found.setdefault(commit.checkpoint, ["the one that was read back"])
    for commit in ring[: max(keep.last, ALWAYS)]:
        found.setdefault(commit.checkpoint, ["an emergency save after the scheduled ones"])
    return {checkpoint: "; ".join(reasons) for checkpoint, reasons in found.items()}


def _within(commits: Sequence[Commit], hours: float | None) -> list[Commit]:
    """Return the commits at most `hours` before the newest one, so that a run that paused for a month loses nothing."""
    newest = max((c.time for c in commits), default=0.0)
    return [] if hours is None else [c for c in commits if newest - c.time <= hours * 3600]


def _newest_of_each(commits: Sequence[Commit], count: int, period: Callable[[int], int]) -> list[Commit]:
    """Return the newest finite commit of each of the `count` latest periods. `period`: maps a day to its period."""
    first: dict[int, Commit] = {}
    for commit in commits:
        if commit.finite is not False:
            first.setdefault(period(int(commit.time // 86400)), commit)
    return [first[number] for number in sorted(first, reverse=True)[:count]]


def choose(state: RunState, keep: Keep, verified: Iterable[CheckpointId]) -> set[CheckpointId]:
    """Return the checkpoints to retire, for which `why_kept` has no reason. Pure."""
    return state.commits.keys() - why_kept(state, keep, verified).keys()


@dataclass(frozen=True, slots=True)
class Sweep:
    """The contents of a PLAN record: checkpoints to retire, and files to delete."""

    retire: Set[CheckpointId] = frozenset()
    delete: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.retire or self.delete)


async def land(log: RunLog, owner: Acquire | None, decide: Callable[[RunState], Sweep | None]) -> Sweep | None:
    """Call `decide` with the newest state, append a PLAN with its result if that is not empty, and return the result.

    This deletes nothing. `owner`: None skips the ownership check.
    """
    request = f"plan:{owner.nonce if owner else secrets.token_hex(4)}"
    decided: list[Sweep | None] = []

    def make(state: RunState) -> Record | None:
        decided[:] = [found := decide(state)]
        if not found:
            return None
        body = {"retire": sorted(map(str, found.retire)), "delete": list(found.delete)}
        return Record("PLAN", body, f"{request}:{state.next_seq}")

    await log.append(make, owner=owner)
    if decided[0]:
        point("plan.landed")
    return decided[0]


async def retire(
    log: RunLog,
    owner: Acquire | None,
    keep: Keep,
    verified: Iterable[CheckpointId],
    *,
    pinned: Callable[[RunState], Set[CheckpointId]] = lambda state: frozenset(),
    orphans: bool = True,
    spared: Set[str] = frozenset(),
    delete: Callable[[Sequence[str]], Awaitable[None]] | None = None,
) -> set[CheckpointId]:
    """Retire the checkpoints that `keep` does not protect, and delete unneeded files. Return the retired checkpoints.

    Nothing happens unless `verified` contains a checkpoint that stays.

    `owner`: None skips the ownership check. `pinned`: returns further checkpoints of a state that must stay.
    `orphans`: if False, delete only files of retired checkpoints, without listing the store. `spared`: files that the
    caller will delete. `delete`: function that deletes the files of an appended PLAN; default: delete immediately.
    """
    checked = set(verified)
    listed: list[str] = []
    if orphans:  # list first, because a file that appears later may belong to an unknown checkpoint
        listed = [info.key async for info in log.store.list(STEPS)]
        await log.refresh()
    used = await files_of(log, log.state.commits.values())

    def decide(state: RunState) -> Sweep | None:
        retiring = choose(state, keep, checked) - pinned(state)
        found = plan_deletion(state, retiring, checked, used, listed if orphans else None)
        return None if found is None else Sweep(retiring, tuple(key for key in found if key not in spared))

    landed = await land(log, owner, decide)
    if not landed:
        return set()
    if delete is None:
        await delete_in_order(log.store, landed.delete)
    else:
        await delete(landed.delete)
    point("sweep.deleted")
    return set(landed.retire)


def plan_deletion(
    state: RunState,
    retiring: Set[CheckpointId],
    verified: Set[CheckpointId],
    used: Mapping[CheckpointId, Set[str]],
    listed: Sequence[str] | None,
) -> list[str] | None:
    """Return the files to delete when these checkpoints are retired, or None if nothing may be deleted. Pure.

    used: the files of each live checkpoint that can be read
    listed: all existing files; if None, only files of retired checkpoints are deleted
    """
    staying = state.commits.keys() - retiring
    if state.damaged or not staying & verified or not staying <= used.keys():
        return None
    if listed is None:
        if not retiring <= used.keys():
            return None
        listed = sorted({key for checkpoint in retiring for key in used[checkpoint]})
    later = replace(state, retired=state.retired | retiring)
    live = live_files(later, listed, {key for a in staying for key in used[a]})
    return [key for key in listed if key not in live]


def remember_files(log: RunLog, checkpoint: CheckpointId, files: Iterable[str]) -> None:
    """Remember the data files of a checkpoint, so that `files_of` need not read them."""
    _cache[(log.store.url, checkpoint)] = frozenset(files)


async def delete_unused(log: RunLog, keys: Iterable[str]) -> None:
    """Delete files of an aborted checkpoint, except files that a live checkpoint uses after a copy from another tier.
    Delete nothing if the files of a live checkpoint cannot be read."""
    used = await files_of(log, log.state.commits.values())
    if log.state.commits.keys() <= used.keys():
        needed = set[str]().union(*used.values())
        await delete_in_order(log.store, [key for key in keys if key not in needed])


async def delete_in_order(store: Store, keys: Iterable[str]) -> None:
    """Delete files of checkpoints in this order: indexes, manifests, data files."""
    for group in in_deletion_order(keys):
        await store.delete_many(group)


async def files_of(
    log: RunLog, commits: Iterable[Commit], unread: dict[CheckpointId, CheckpointError] | None = None
) -> dict[CheckpointId, set[str]]:
    """Return the files that each live checkpoint needs, including files of older ones. Leave out unreadable
    checkpoints, which protects all files, and add their errors to `unread`."""
    found: dict[CheckpointId, set[str]] = {}
    for commit in list(commits):
        keys = {index_key(commit.checkpoint), *(manifest_key(commit.checkpoint, rank) for rank, _ in commit.manifests)}
        files = _cache.get((log.store.url, commit.checkpoint))
        if files is None:
            try:
                files = await data_files_of(log.store, commit)
            except (CorruptError, StoreError) as error:
                if unread is None:
                    logger.warning("step %d cannot be read, so clean-up stops: %s", commit.step, error)
                else:
                    unread[commit.checkpoint] = error
                continue
            _cache[(log.store.url, commit.checkpoint)] = files
        found[commit.checkpoint] = keys | files
    return found


_cache: dict[tuple[str, CheckpointId], frozenset[str]] = {}


# -- checkpoints that stay regardless of the rules --


async def set_keep(log: RunLog, checkpoint: CheckpointId, note: str | None, *, owner: Acquire | None = None) -> None:
    """Pin a checkpoint for the reason in `note`, or unpin it (None). Raise NoCheckpointError if it is already retired.
    `owner`: the job attempt that pins it, which leaves a user's note unchanged. If `owner` is None, a user pins it,
    without an ownership check: pinning leaves the note of a training unchanged, and unpinning removes it."""
    token = secrets.token_hex(4)

    def make(state: RunState) -> Record | None:
        if checkpoint not in state.commits and note is not None:
            raise NoCheckpointError(f"step {checkpoint.step} of {log.store.url} was retired, so it cannot be pinned")
        before = state.kept.get(checkpoint, "")
        ours, by_hand = words_of(before)
        if owner is not None:
            ours = note or ""
        else:
            ours, by_hand = ours if note is not None else "", note or ""
        text = BY_HAND.join(one for one in (ours and MARK + ours, by_hand) if one)[:LONGEST]
        if text == before:
            return None
        body = {"checkpoint": str(checkpoint), "note": text, "keep": bool(text)}
        return Record("KEEP", body, f"keep:{checkpoint}:{token}")

    await log.append(make, owner=owner)


async def keep_steps(log: RunLog, owner: Acquire, notes: Mapping[int, str]) -> None:
    """Pin the existing checkpoints of these steps. Unpin other checkpoints that a training pinned before, unless a user
    has pinned them too."""
    state = await log.refresh()
    newest = {commit.step: commit.checkpoint for commit in reversed(state.lineage())}
    wanted = {newest[step]: note for step, note in notes.items() if step in newest}
    before = {checkpoint: ours for checkpoint, note in state.kept.items() if (ours := words_of(note)[0])}
    for checkpoint in [*wanted, *(before.keys() - wanted.keys())]:
        if before.get(checkpoint) != wanted.get(checkpoint):
            await set_keep(log, checkpoint, wanted.get(checkpoint), owner=owner)
