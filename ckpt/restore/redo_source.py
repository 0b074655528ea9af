"""The redo log of one folder, read: from a checkpoint, or a frame that stands alone, to a later step.

    scan the files -> chains -> (ranks agree on a step) -> load the base -> redo frame by frame -> a snapshot in memory

What comes of it is like any snapshot in memory: any number of ranks can restore it. Every step's digests are compared;
the first that does not match ends it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from ckpt.checkpoint import read, read_repair
from ckpt.checkpoint.agree import all_finite
from ckpt.checkpoint.losses import SHOWN, Loss, of_each
from ckpt.checkpoint.parts import load_part
from ckpt.errors import CheckpointError, CorruptError, FormatError, NotFoundError, StoreError
from ckpt.events import log as logger
from ckpt.format import codec
from ckpt.format.digest import blob_digest
from ckpt.format.layout import Layout
from ckpt.format.manifest import REDO, Attempt, parse_redo
from ckpt.format.regular_file import reading
from ckpt.format.values import Json
from ckpt.ipc.arena import SEALED, Arena, Label
from ckpt.redo import adam
from ckpt.redo.append import TAKEN_BACK
from ckpt.redo.encode_frame import foresee
from ckpt.redo.frame import DELTA, DERIVED, PREDICTED, RAW, SAME, units
from ckpt.redo.frame_file import Hole, StoredFrame, back, matches, scan, values_of
from ckpt.restore.sources import HeldSnapshot, MemorySource
from ckpt.runlog.log import Acquire, Commit, RunLog, in_history
from ckpt.store import folder_of

NEWEST = 16  # steps of a rank that others are told of: ranks are no farther apart, but for damage
MOST = 4096  # where there is some
THREADS = max(1, len(os.sched_getaffinity(0)))

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
    except OSError:
        return False


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
    is no folder of this machine. Nothing is changed."""
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


class RedoSource(MemorySource):
    """A step that is redone when the ranks have chosen it, each of them some of the ranks that saved."""

    def __init__(
        self,
        attempt: Attempt,
        logs: Logs,
        commits: dict[Attempt, Commit],
        mine: Sequence[int],
        *,
        alone: bool,
        undone: bool,
        initializer: Callable[[], None],
        others: Sequence[str] = (),
    ) -> None:
        """`mine`: those that saved whose share this rank redoes; `initializer`: called in each thread that computes;
        `others`: URLs of places that may have what is damaged of the checkpoint that is loaded."""
        super().__init__(attempt, [], alone=alone, undone=undone)
        self.tier, self.redone, self.base_step = logs.url, 0, -1
        self._logs, self._commits, self._mine, self._initializer = logs, commits, list(mine), initializer
        self._others = others
        self._made: list[HeldSnapshot] = []

    def describe(self) -> Json:
        self._redo()
        return super().describe()

    def open(self, described: Sequence[Json]) -> None:
        self._redo()
        super().open(described)

    def _redo(self) -> None:
        for rank in self._mine:
            if rank not in self._here:
                snapshot = self._rank(rank)
                self._made.append(snapshot)
                self._here[rank] = snapshot

    def _rank(self, rank: int) -> HeldSnapshot:
        failure: CheckpointError | None = None
        for chain in self._logs.chains(rank, self.attempt, self._commits):
            try:
                found = redo(self._logs.url, chain, self._initializer, self._others, self.repaired)
            except (CorruptError, FormatError, StoreError) as error:
                logger.warning("redo log of rank %d in %s, from step %d: %s", rank, self.tier, chain.base, error)
                failure = failure or error.with_traceback(None)  # whose frames hold the memory of what was begun
                continue
            self.redone = max(self.redone, chain.redone)
            self.base_step = chain.base if self.base_step < 0 else min(self.base_step, chain.base)
            return found
        raise failure or CorruptError(f"the redo log of rank {rank} does not lead to step {self.attempt.step} any more")

    def close(self) -> None:
        super().close()
        self._here = {}
        for snapshot in self._made:
            snapshot.arena.close()
        self._made = []


def redo(
    url: str,
    chain: RedoChain,
    initializer: Callable[[], None] = lambda: None,
    others: Sequence[str] = (),
    repaired: list[str] | None = None,
) -> HeldSnapshot:
    """The snapshot of one rank at the end of a chain, in an arena of its own. CorruptError at the first step whose
    digests do not match, StoreError if something cannot be read; `initializer`: called in each thread that computes.
    What of the checkpoint is damaged comes from `others`, which is added to `repaired` in words."""
    last = chain.frames[-1]
    layout = last.frame.layout
    if any(one.frame.layout.digest != layout.digest for one in chain.frames):
        raise CorruptError("a chain of frames of several layouts")
    values = _values(last)
    size = layout.arrangement.data_size
    arena = Arena.create(1, size + len(values) + (1 << 16))
    try:
        data = arena.data(0, size)
        with ThreadPoolExecutor(THREADS, "ckpt-redo", initializer) as pool:
            if chain.commit is not None:
                found = read.run(_load_part(url, chain.commit, layout, data, others))
                (repaired if repaired is not None else []).extend(found)
            for one in chain.frames:
                _Redo(one, data).run(pool)
        digests = last.frame.columns.digest.tobytes() + blob_digest(values)
        label = Label(
            SEALED, 1, last.frame.attempt, layout.digest, size, len(values), last.frame.time, last.frame.finite
        )
        arena.set_label(0, label)
        arena.values(0, label)[:] = values
        return HeldSnapshot(arena, 0, label, layout, digests)
    except BaseException:
        arena.close()
        raise


def _values(stored: StoredFrame) -> bytes:
    begin, size = stored.payload
    with _opened(stored.path) as fd:
        found = values_of(stored, os.pread(fd, stored.values, begin + size - stored.values))
    try:
        if not isinstance(json.loads(found), list):
            raise CorruptError("plain values that are none")
    except (ValueError, RecursionError):
        raise CorruptError("the plain values of a frame are damaged") from None
    return found


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """StoreError for whatever goes wrong in reading it: it may have been deleted meanwhile."""
    try:
        with reading(path) as file:
            yield file.fileno()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


async def _load_part(url: str, commit: Commit, layout: Layout, data: memoryview, others: Sequence[str]) -> list[str]:
    """The share of a rank in a checkpoint, as it lay in that rank's memory; what was repaired for that."""
    number = next(((n, digest) for rank, n, digest in commit.parts if rank == layout.rank), None)
    if number is None:
        raise NotFoundError(f"step {commit.step} has no part of rank {layout.rank}")
    async with read.opened(url) as store:
        written = await load_part(store, commit.attempt, layout.rank, number[0], expected=number[1])
        if written.part.layout_digest != layout.digest:
            raise CorruptError(f"step {commit.step} is of another layout than the frames after it")
        table, blobs = written.table, layout.arrangement.blobs
        lengths = [blob.length for blob in blobs]
        if table.length[: len(blobs)].tolist() != lengths:
            raise CorruptError(f"the blobs of step {commit.step} are not those of its layout")

        def sink(blob: int, found: memoryview) -> None:
            one = blobs[blob]
            data[one.offset : one.offset + one.length] = found

        return (await read_repair.fetch(store, commit.attempt, table, list(range(len(blobs))), sink, others)).repaired


class _Redo:
    """One frame, applied to the bytes of the step before, in place."""

    def __init__(self, stored: StoredFrame, data: memoryview) -> None:
        self.stored, self.frame, self.data = stored, stored.frame, data
        self.blobs = self.frame.layout.arrangement.blobs
        self.units = units(self.frame.layout, self.frame.recipes)

    def run(self, pool: ThreadPoolExecutor) -> None:
        order = [blob for unit in self.units for blob in unit[:3]]
        sizes = self.frame.columns.stored[order]
        begin, _ = self.stored.payload
        places = dict(zip(order, (begin + np.cumsum(sizes) - sizes).tolist(), strict=True))
        with _opened(self.stored.path) as fd:

            def fetch(blob: int) -> bytes:
                return os.pread(fd, int(self.frame.columns.stored[blob]), places[blob])

            list(pool.map(lambda unit: self._unit(unit, fetch), self.units))
        derived = np.flatnonzero(self.frame.columns.form == DERIVED).tolist()
        list(pool.map(self._derive, derived))

    def _at(self, blob: int) -> memoryview:
        one = self.blobs[blob]
        return self.data[one.offset : one.offset + one.length]

    def _unit(self, unit: tuple[int, ...], fetch: Callable[[int], bytes]) -> None:
        """In the order mean, square, weight: the later ones need what the earlier ones were and are."""
        columns = self.frame.columns
        predicted = [blob for blob in unit[1:3] if columns.form[blob] == PREDICTED] if len(unit) > 1 else []
        old = {blob: bytes(self._at(blob)) for blob in unit[:3]} if predicted else {}
        if predicted and not adam.is_exact():
            raise CorruptError("this thread flushes denormals to zero, and predictions were made with them")
        for blob in unit[:3]:
            form = int(columns.form[blob])
            if form in (SAME, DERIVED):
                if form == SAME:
                    self._check(blob)
                continue
            base: memoryview | bytes | None = None
            if form == PREDICTED:
                mean, square, weight, _ = unit
                coefficients = self.frame.coefficients[int(columns.row[blob])]
                before = {number: memoryview(found) for number, found in old.items()}
                base = foresee(blob == square, before.get, self._at, mean, square, weight, coefficients)
            elif form == DELTA:
                base = bytes(self._at(blob))
            self._decode(blob, form, fetch(blob), base)
            self._check(blob)

    def _decode(self, blob: int, form: int, stored: bytes, base: memoryview | bytes | None) -> None:
        dtype = self.frame.layout.tensors[self.blobs[blob].tensor].dtype
        if form == RAW:
            which = codec.RAW
        elif form == PREDICTED:
            which = codec.DELTA
        else:
            which = codec.delta_codec(dtype) if form == DELTA else codec.whole_codec(dtype)
        codec.decode(which, stored, self.blobs[blob].length, base, self._at(blob))

    def _derive(self, blob: int) -> None:
        begin, length = self.blobs[int(self.frame.columns.master[blob])].offset, self.blobs[blob].length
        codec.decode(codec.BF16, b"", length, self.data[begin : begin + 2 * length], self._at(blob))
        self._check(blob)

    def _check(self, blob: int) -> None:
        if blob_digest(self._at(blob)) != self.frame.columns.digest[blob].tobytes():
            name = self.frame.layout.tensors[self.blobs[blob].tensor].name
            raise CorruptError(f"step {self.frame.attempt.step} could not be redone: {name} is not what it was")


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
