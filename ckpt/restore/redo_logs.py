"""The redo logs of one folder: which steps they lead to, from a checkpoint or a frame that stands alone.

    scan the files -> frames, by rank and attempt -> chains, shortest first

Nothing is changed, and no step is redone here. What is damaged is said, with the steps that are lost by it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from ckpt.checkpoint import steady
from ckpt.checkpoint.commit_checks import all_finite
from ckpt.checkpoint.losses import SHOWN, Loss, of_each
from ckpt.errors import StoreError
from ckpt.format.manifest import REDO, Attempt, parse_redo
from ckpt.redo.append import TAKEN_BACK
from ckpt.redo.frame_file import Hole, StoredFrame, back, matches, scan
from ckpt.runlog.log import Acquire, Commit, RunLog, in_history
from ckpt.store import folder_of

NEWEST = 16  # steps of a rank that others are told of: ranks are no farther apart, but for damage
MOST = 4096  # where there is some

Frames = dict[int, dict[Attempt, StoredFrame]]
"""Whole frames, by rank and attempt."""


@dataclass(frozen=True)
class RedoChain:
    """How one rank gets to a step. `commit`: the checkpoint that it begins with; None if the first frame stands alone.
    `frames`: to be redone, in their order."""

    rank: int
    commit: Commit | None
    frames: tuple[StoredFrame, ...]

    @property
    def base(self) -> int:
        """The step that it begins with."""
        return self.commit.step if self.commit is not None else self.frames[0].frame.attempt.step

    @property
    def redone(self) -> int:
        return len(self.frames) - (self.commit is None)


@dataclass
class Logs:
    """What the redo logs of a folder hold. `damage`: by rank, in words and with the steps that were there. The torn end
    that a killed writer leaves is no damage."""

    url: str
    frames: Frames = field(default_factory=dict)
    taken_back: set[Attempt] = field(default_factory=set)
    damage: dict[int, list[tuple[str, list[Attempt]]]] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """All that is damaged, in words."""
        return [text for found in self.damage.values() for text, _ in found]

    def losses(self, commits: dict[Attempt, Commit], acquires: Iterable[Acquire]) -> list[Loss]:
        """By rank: what is newer than all that it can be brought to, and is damaged, or applied to what is."""
        known, found = sorted(acquires, key=lambda acquire: acquire.epoch), list[Loss]()
        for rank in sorted(self.frames.keys() | self.damage.keys()):
            frames, damage = self.frames.get(rank, {}), self.damage.get(rank, [])
            there = _reachable(frames, commits)
            top = next(iter(in_history(known, there - self.taken_back)), None)
            cut_off = {a for a in frames.keys() - there if frames[a].frame.finite is not False}
            lost = (cut_off | {a for _, attempts in damage for a in attempts}) - self.taken_back - there
            newer = [a for a in in_history(known, lost) if top is None or a > top]
            why = [text for text, _ in damage]
            if behind := sorted(cut_off & set(newer)):
                steps = f"step {behind[0].step}" if len(behind) == 1 else f"steps {behind[0].step} to {behind[-1].step}"
                why.append(f"what leads to {steps} is {'damaged' if damage else 'gone'}")
            if why:
                shown = why if len(why) <= SHOWN else [*why[: SHOWN - 1], f"{len(why) - SHOWN + 1} more"]
                found.append(Loss(self.url, f"redo log of rank {rank}: {'; '.join(shown)}", of_each(newer)))
        return found

    def chains(self, rank: int, newest: Attempt, commits: dict[Attempt, Commit]) -> list[RedoChain]:
        """The ways to a step, shortest first: from the last checkpoint before it, from older ones, or from a frame that
        stands alone. A checkpoint that is kept damages none of them."""
        found: list[RedoChain] = []
        trail: list[StoredFrame] = []
        for one in back(self.frames.get(rank, {}), newest):
            if trail and (commit := commits.get(one.frame.attempt)) is not None:
                found.append(RedoChain(rank, commit, tuple(reversed(trail))))
            trail.append(one)
            base = one.frame.base
            if base is None:
                found.append(RedoChain(rank, None, tuple(reversed(trail))))
            elif base not in self.frames[rank] and base in commits:
                found.append(RedoChain(rank, commits[base], tuple(reversed(trail))))
        return found

    def reach(
        self, commits: dict[Attempt, Commit], acquires: Iterable[Acquire] = (), step: int | None = None
    ) -> dict[Attempt, tuple[int, list[int]]]:
        """By attempt: how many ranks saved, and which of them can be brought there from here. The newest of each rank
        in the history that `acquires` tells, or those of a step."""
        found: dict[Attempt, tuple[int, list[int]]] = {}
        most = MOST if self.damage else NEWEST
        for rank, frames in self.frames.items():
            there = [attempt for attempt in _reachable(frames, commits) if attempt not in self.taken_back]
            if step is None:
                there = in_history(acquires, [a for a in there if frames[a].frame.finite is not False])[:most]
            for attempt in there:
                if step in (None, attempt.step):
                    found.setdefault(attempt, (frames[attempt].frame.layout.world, []))[1].append(rank)
        return found

    def finite(self, attempt: Attempt, ranks: Iterable[int]) -> bool | None:
        """What these ranks said of it, as one."""
        return all_finite([self.frames[rank][attempt].frame.finite for rank in ranks])

    def verify(
        self, commits: dict[Attempt, Commit], acquires: Collection[Acquire] = (), step: int | None = None
    ) -> None:
        """Compare with their digests the frames that a restore would read, and forget those that do not match: only
        these, since logs may be large and most of them lies before the last checkpoint."""
        sound: set[tuple[int, Attempt]] = set()
        while True:
            newest: dict[int, Attempt] = {}
            for attempt, (_, ranks) in self.reach(commits, acquires, step).items():
                for rank in ranks:
                    newest[rank] = max(attempt, newest.get(rank, attempt))
            wanted = [
                (rank, one)
                for rank, attempt in newest.items()
                for one in self.chains(rank, attempt, commits)[0].frames
                if (rank, one.frame.attempt) not in sound
            ]
            if not wanted:
                return
            for rank, one in wanted:
                if _sound(one):
                    sound.add((rank, one.frame.attempt))
                else:
                    del self.frames[rank][one.frame.attempt]
                    where = f"{os.path.basename(one.path)}, byte {one.offset}"
                    problem = f"{where}: step {one.frame.attempt.step} does not match its digest"
                    self.damage.setdefault(rank, []).append((problem, [one.frame.attempt]))
                    break


def _sound(one: StoredFrame) -> bool:
    try:
        return matches(one)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(one.path, error) from error


def _unreadable(path: str, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be read now: {error.strerror or error}", retryable=True)


def _reachable(frames: dict[Attempt, StoredFrame], commits: dict[Attempt, Commit]) -> set[Attempt]:
    """Those of one rank that have a chain."""
    found: set[Attempt] = set()
    for attempt in sorted(frames):
        base = frames[attempt].frame.base
        if base is None or base in commits or base in found:
            found.add(attempt)
    return found


def look(url: str, *, verify: bool = True) -> Logs:
    """All redo logs of a place, read and compared with their digests unless they are only to be listed; none where it
    is no folder of this machine. Nothing is changed. StoreError if one cannot be read for `steady.WINDOW_S`."""
    until = time.monotonic() + steady.WINDOW_S
    while True:
        try:
            return _look(url, verify)
        except OSError as error:
            if time.monotonic() >= until:
                raise _unreadable(str(error.filename or url), error) from error
        time.sleep(steady.FIRST_PAUSE_S)


def _look(url: str, verify: bool) -> Logs:
    found = Logs(url)
    root = folder_of(url)
    if root is None or not (root / REDO).is_dir():
        return found
    folder = str(root / REDO)
    names = os.listdir(folder)
    voids = [parse_redo(name.removesuffix(TAKEN_BACK)) for name in names if name.endswith(TAKEN_BACK)]
    found.taken_back = {void[0] for void in voids if void is not None}
    paths = sorted((parsed, os.path.join(folder, name)) for name in names if (parsed := parse_redo(name)))
    for (first, rank), path in paths:
        try:
            frames, holes = scan(path, verify=verify)
        except FileNotFoundError:
            continue  # a writer that lives has no use for it any more
        except OSError as error:
            if error.errno != errno.ENOTSUP:  # it is a regular file, and may be intact
                raise
            problem = f"{os.path.basename(path)}: {error.strerror or error}"
            found.damage.setdefault(rank, []).append((problem, [first]))
            continue
        damage = [(str(hole), _missed(hole, first)) for hole in holes if not hole.torn]
        if damage:
            found.damage.setdefault(rank, []).extend(damage)
        for one in frames:
            if one.frame.rank == rank:
                found.frames.setdefault(rank, {})[one.frame.attempt] = one
    return found


def _missed(hole: Hole, first: Attempt) -> list[Attempt]:
    """The steps that lie in it; if nothing says which, the one that comes next at the least. `first`: of the file."""
    named = [attempt for attempt in hole.named if (attempt.epoch, attempt.nonce) == (first.epoch, first.nonce)]
    if named:
        return named
    return [first if hole.after is None else replace(hole.after, step=hole.after.step + 1)]


@dataclass(frozen=True)
class Redoable:
    """A step that a redo log leads to, with all ranks. `base`: the step that is loaded first, a checkpoint or not."""

    step: int
    attempt: str
    base: int
    from_checkpoint: bool
    redone: int
    stored: int


def redoable(logs: Logs, log: RunLog) -> list[Redoable]:
    """For those who look: the steps of the present history that are no checkpoints here, in their order."""
    known = {**log.state.held, **log.state.commits}
    attempts = {attempt for frames in logs.frames.values() for attempt in frames} - logs.taken_back
    newest = max((commit.attempt for commit in log.state.lineage()), default=None)
    found: list[Redoable] = []
    for attempt in sorted(in_history(log.state.acquires, attempts)):
        ranks = {rank: logs.chains(rank, attempt, known) for rank, frames in logs.frames.items() if attempt in frames}
        one = logs.frames[next(iter(ranks))][attempt]
        whole = len(ranks) == one.frame.layout.world and all(ranks.values())
        if whole and attempt not in known and (newest is None or attempt > newest):
            first = next(iter(ranks.values()))[0]
            size = sum(logs.frames[rank][attempt].size for rank in ranks)
            on_checkpoint = first.commit is not None
            found.append(Redoable(attempt.step, str(attempt), first.base, on_checkpoint, first.redone, size))
    return found
