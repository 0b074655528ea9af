"""A chain of a redo log, redone: from a checkpoint, or a frame that stands alone, to a later step.

    chains (`redo_logs`) -> (ranks agree on a step) -> load the base -> redo frame by frame -> a snapshot in memory

What comes of it is like any snapshot in memory: any number of ranks can restore it. Every step's digests are compared;
the first that does not match ends it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from ckpt.checkpoint import read, read_repair
from ckpt.checkpoint.parts import load_part
from ckpt.errors import CheckpointError, CorruptError, FormatError, NotFoundError, StoreError, is_unreadable
from ckpt.events import log as logger
from ckpt.format import codec
from ckpt.format.digest import blob_digest
from ckpt.format.layout import Layout
from ckpt.format.manifest import Attempt
from ckpt.format.regular_file import reading
from ckpt.format.values import Json
from ckpt.ipc.arena import SEALED, Arena, Label
from ckpt.redo import adam
from ckpt.redo.encode_frame import foresee
from ckpt.redo.frame import DELTA, DERIVED, PREDICTED, RAW, SAME, units
from ckpt.redo.frame_file import StoredFrame, values_of
from ckpt.restore.redo_logs import Logs, RedoChain
from ckpt.restore.sources import HeldSnapshot, MemorySource
from ckpt.runlog.log import Commit

THREADS = max(1, len(os.sched_getaffinity(0)))


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
        self.tier = logs.url
        self._logs, self._commits, self._mine, self._initializer = logs, commits, list(mine), initializer
        self._others = others
        self._made: list[HeldSnapshot] = []

    def describe(self) -> Json:
        self._redo()
        return super().describe()

    def open(self, described: Sequence[Json], known: Layout | None = None) -> None:
        self._redo()
        super().open(described, known)

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
                if failure is None or (is_unreadable(error) and not is_unreadable(failure)):
                    failure = error.with_traceback(None)  # whose frames hold the memory of what was begun
                continue
            self.redone = max(self.redone, chain.redone)
            self.base_step = chain.base if self.base_step is None else min(self.base_step, chain.base)
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
        what = f"{path} cannot be read: {error.strerror or error}"
        if error.errno in (errno.ENOENT, errno.ENOTSUP):  # gone, or not a regular file
            raise NotFoundError(what) from error
        raise StoreError(what, retryable=True) from error


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
