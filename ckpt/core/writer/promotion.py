"""Background work of the writer: its pace, copies of checkpoints from store to store, and the queues of tiers.

`Throttle` slows down background work, because low priority alone is not enough: two sides that share a core also share
its cache and memory bandwidth, and if all cores are busy, even the lowest priority gets some time. The kernel counts
for how long each thread was ready but did not run (`schedstat`). While the trainer waits too long, `Throttle` sleeps.

A copy transfers a checkpoint's files byte for byte, and verifies each chunk: `pending`, `copy_part` for every rank,
commit. Names are the same in all tiers, so files copied before a crash are found and not copied again. The target has
the checkpoint only when its log records it. `Turns` is the queue of a slow tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import psutil

from ckpt.core.checkpoint import chunks, commits
from ckpt.core.checkpoint.manifests import load_manifest
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.write import CHUNK, WrittenManifest, upload_from
from ckpt.core.format.digest import chunk_digest, file_digest
from ckpt.core.format.manifest import (
    MAX_JSON,
    CheckpointId,
    DataFile,
    manifest_key,
)
from ckpt.core.format.table import Table
from ckpt.core.log.run_log import Commit, RunLog, RunState
from ckpt.errors import CorruptError, ExistsError, NotFoundError, SkippedError
from ckpt.store import PAGE, Store, get_small
from ckpt.units import duration

if TYPE_CHECKING:
    import numpy.typing as npt


LOOK_S = 0.1  # pause between two checks
STARVED = 0.05  # seconds per second that threads of the trainer may wait for a core
REST = 3.0  # seconds of sleep per second of work while the trainer waits too long
MOST_S = 0.5
LEAST_S = 0.5  # minimum sample, in core-seconds, to estimate how idle the cores are
MAX_THREADS = 4  # maximum number of background threads per rank


def threads() -> int:
    """Return the number of background threads for each rank, from the number of cores and ranks of this node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))


class IdleCores:
    """Estimates the number of cores that were idle since the last call."""

    def __init__(self) -> None:
        self._times, self._share = psutil.cpu_times(), 1.0

    def __call__(self) -> float:
        now = psutil.cpu_times()
        idle, total = now.idle - self._times.idle, sum(now) - sum(self._times)
        if total > LEAST_S:  # if less time has passed, keep the last estimate
            self._times, self._share = now, max(idle / total, 0.0)
        return self._share * len(os.sched_getaffinity(0))


class Throttle:
    """Slows down background threads. `pid`: returns the id of the process that must not wait for a core. If this id is
    0 or the process has ended, nothing is throttled."""

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid, self._lock = pid, threading.Lock()
        self._looked, self._waited, self.starved = 0.0, 0.0, False
        self._hurried = 0

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Throttle nothing inside the block, because an urgent request waits for the work."""
        self._hurried += 1
        try:
            yield
        finally:
            self._hurried -= 1

    def __call__(self, seconds: float) -> None:
        """Sleep if the trainer waits for cores. A thread calls this after `seconds` of work."""
        if self._hurried:
            return
        self._look()
        if self.starved:
            time.sleep(min(REST * seconds, MOST_S))

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._looked < LOOK_S:
                return
            waited = waiting_s(self._pid())
            grown, passed = waited - self._waited, now - self._looked
            # After a long pause, or if the process has changed, the two values are not comparable.
            self.starved = 0 < grown > STARVED * passed and passed < 10 * LOOK_S
            self._looked, self._waited = now, waited


def waiting_s(pid: int) -> float:
    """Return the total time for which the threads of a process were ready but did not run; 0 if it is unknown."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/task/{task}/schedstat") as f:
                total += int(f.read().split()[1])
    return total / 1e9


# -- copies from store to store --


BACKLOG = 3  # maximum number of checkpoints that wait for a copy to a tier, and of older ones to copy after a restart

OnBytes = Callable[[int], None] | None


def pending(near: RunState, far: RunState, every: int, *, before: int) -> list[Commit]:
    """Return the checkpoints that are scheduled for another tier and are missing in it, newest first. Pure.

    Only checkpoints of earlier terms count, because all ranks see the same ones. Of these, only the last few that are
    newer than everything in the other tier are returned, so that after a long outage of a bucket, a run does not copy
    everything that the bucket missed.
    """
    history = [c for c in near.lineage() if c.checkpoint.term < before]
    there = [a for a in far.commits if a.term < before and a in {c.checkpoint for c in history}]
    newest = max(there, default=None)
    due = [c for c in history if c.step % every == 0 and (newest is None or c.checkpoint > newest)]
    return [c for c in due[:BACKLOG] if not far.ended(c.checkpoint)]


async def copy_part(
    source: Store,
    target: Store,
    checkpoint: CheckpointId,
    rank: int,
    *,
    expected: str | None = None,
    used: Set[str] = frozenset(),
    on_bytes: OnBytes = None,
) -> WrittenManifest:
    """Copy one rank's manifest and the data files that it uses, including data files of older checkpoints.

    Complete files in the target are not copied again. Raise CorruptError if the source is damaged, or if a data file
    that the target uses has other bytes.

    expected: the digest of the manifest, if known
    used: keys of data files that checkpoints in the target use
    """
    written = await load_manifest(source, checkpoint, rank, expected=expected)
    key = manifest_key(checkpoint, rank)
    if await _holds(target, key, written.digest):
        if on_bytes is not None:
            on_bytes(sum(file.size for file in written.manifest.files))
        return written  # the manifest is copied last, so all data files are complete
    for file in written.manifest.files:
        await _copy_file(source, target, file, written.table, file.key in used, on_bytes)
    await _put_once(target, key, await chunks.get(source, key, limit=MAX_JSON))
    return written


async def _holds(store: Store, key: str, digest: str) -> bool:
    try:
        return file_digest(await get_small(store, key, MAX_JSON)) == digest
    except (NotFoundError, CorruptError):
        return False


async def _put_once(target: Store, key: str, data: memoryview) -> None:
    try:
        await target.put(key, data, create=True)
    except ExistsError:
        if not await _holds(target, key, file_digest(data)):
            raise


async def _copy_file(source: Store, target: Store, file: DataFile, table: Table, used: bool, on_bytes: OnBytes) -> None:
    try:
        there = (await target.head(file.key)).size
    except NotFoundError:
        there = -1
    if used and there >= 0 and (there != file.size or not await _same(target, file, table)):
        raise CorruptError(
            f"{target.url} has a damaged or different {file.key} in use: repair it with `ckpt repair`, or copy "
            "to a new location"
        )
    if there == file.size and (target.remote or used):
        if on_bytes is not None:
            on_bytes(file.size)
        return  # an object appears only as a whole, but a file has its full size before its bytes
    if there >= 0:
        await target.delete(file.key)
    await upload_from(target, file.key, file.size, VerifiedRanges(source, file, table).read, on_bytes)


async def _same(store: Store, file: DataFile, table: Table) -> bool:
    """Return True if the chunks of a data file match their digests in a chunk table."""
    sound = VerifiedRanges(store, file, table)
    try:
        for offset in range(0, file.size, CHUNK):
            await sound.read(offset, min(CHUNK, file.size - offset))
    except CorruptError:
        return False
    return True


class VerifiedRanges:
    """Reads ranges of a data file, and verifies every chunk that a range touches."""

    def __init__(self, source: Store, file: DataFile, table: Table) -> None:
        self._source, self._pack = source, file
        in_file = table.file == table.files.index(file.key) if file.key in table.files else np.zeros(0, np.bool_)
        order = np.argsort(table.offset[in_file], kind="stable")
        self._starts: npt.NDArray[np.int64] = table.offset[in_file][order]
        self._stops: npt.NDArray[np.int64] = self._starts + table.stored[in_file][order]
        self._digests: list[bytes] = [bytes(digest) for digest in table.stored_digest[in_file][order]]

    async def read(self, offset: int, length: int) -> memoryview:
        """Read a range. Raise CorruptError if the header or a chunk in it is damaged."""
        first = int(np.searchsorted(self._stops, offset, "right"))
        last = int(np.searchsorted(self._starts, offset + length, "left"))
        start, stop = offset, offset + length
        if last > first:
            start, stop = min(start, int(self._starts[first])), max(stop, int(self._stops[last - 1]))
        head = self._pack.header_size if offset < self._pack.header_size else 0
        if head:
            start, stop = 0, max(stop, head)
        room = memoryview(mmap.mmap(-1, stop - start + 2 * PAGE))
        data = await chunks.get(self._source, self._pack.key, start=start, length=stop - start, into=room)
        await asyncio.to_thread(self._check, data, start, first, last, head)
        return data[offset - start : offset - start + length]

    def _check(self, data: memoryview, start: int, first: int, last: int, head: int) -> None:
        if head and file_digest(data[:head]) != self._pack.header:
            raise CorruptError(f"{self._pack.key} is damaged: its header does not match its digest")
        for i in range(first, last):
            low, high = int(self._starts[i]), int(self._stops[i])
            if chunk_digest(data[low - start : high - start]) != self._digests[i]:
                raise CorruptError(
                    f"{self._pack.key} is damaged: {high - low} bytes at {low} do not match their digest"
                )


@dataclass(frozen=True, slots=True)
class Size:
    """The number of files of a checkpoint, and their bytes."""

    files: int
    nbytes: int


async def measure(log: RunLog, commit: Commit, counted: set[str] | None = None) -> Size:
    """Return the number of files to copy and their size. Raise CorruptError or NotFoundError if files are missing.

    `counted`: data files already counted for other checkpoints. The data files of this checkpoint are added.
    """
    files: dict[str, int] = {}
    for rank, digest in commit.manifests:  # one after the other, because there may be thousands
        written = await load_manifest(log.store, commit.checkpoint, rank, expected=digest)
        files |= {file.key: file.size for file in written.manifest.files}
    if counted is not None:
        files = {key: size for key, size in files.items() if key not in counted}
        counted.update(files)
    return Size(len(files) + len(commit.manifests) + 1, sum(files.values()))


# -- promotion --


STILL_S = 30.0  # time without a byte after which a tier counts as unresponsive rather than slow


@dataclass(eq=False)
class Turns:
    """The queue of a tier that is slower than its save interval. If the queue is too long, its oldest step is skipped,
    so that the last step of a run is never skipped."""

    taken: bool = False
    since: float = 0.0  # monotonic time when the present step got its turn
    line: list[tuple[CheckpointId, asyncio.Future[None]]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def turn(self, tier: OpenTier, checkpoint: CheckpointId, most: int) -> AsyncIterator[None]:
        """Wait for the turn of a step. If more than `most` steps wait, the oldest of them gets SkippedError."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.line.append((checkpoint, mine))
        self._call()
        if len(self.line) > most:
            oldest, waits = self._leave()
            if not waits.done():
                waits.set_exception(left_out(tier, oldest, self._why(tier)))
        try:
            await mine
            yield
        finally:
            if (checkpoint, mine) in self.line:  # cancelled
                self.line.remove((checkpoint, mine))
            elif not mine.cancelled() and mine.exception() is None:
                self.taken = False
                self._call()

    def _why(self, tier: OpenTier) -> str:
        """Return why steps are skipped. Saving less often does not help if the tier is down or hangs."""
        still_s = time.monotonic() - max(self.since, tier.flow.moved)
        if still_s > STILL_S:
            return f"has accepted no data for {duration(still_s)}: check that it responds; it then gets the newest step"
        return "is slower than its save interval: raise its every=, or max_mib_s if it is throttled"

    def _call(self) -> None:
        while self.line and not self.taken:
            _, waits = self._leave()
            if not waits.done():  # otherwise it was cancelled, and its task has not run since
                waits.set_result(None)
                self.taken, self.since = True, time.monotonic()

    def _leave(self) -> tuple[CheckpointId, asyncio.Future[None]]:
        oldest = min(self.line, key=lambda one: one[0])
        self.line.remove(oldest)
        return oldest


def left_out(tier: OpenTier, checkpoint: CheckpointId, why: str) -> SkippedError:
    return SkippedError(f"step {checkpoint.step} {commits.LEFT_OUT} {tier.url}, which {why}")
