"""Reads files of checkpoints, and decides if a file that cannot be read is lost; reads chunks of data files.

All reads of indexes, manifests and data files use `get`, `head` or `listing`, which raise one of these errors:

    TruncatedError   the file is shorter than it must be, which is damage
    NotFoundError    the file is lost: it stayed absent for WINDOW_S, while its run and its folder could be listed
    UnreadableError  nothing is known about the bytes (`is_unreadable`), so the caller must not treat them as lost

A mount that is away for a moment, a stale NFS handle, a process without free descriptors or a proxy that returns 400 or
404 looks like loss to a single request, so each failure is retried for WINDOW_S. All reads of a store share this time,
because otherwise a store that is down would cost it once for every file.

Chunks are read, verified, decoded and delivered, a few batches at a time:

    plan_reads   table, chunks -> batches, which join neighbouring ranges, and have each chunk together with its base
    fetch        batches -> bytes, each verified before delivery
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ckpt.core.checkpoint.concurrent import all_of
from ckpt.core.format.codec import RAW, decode
from ckpt.core.format.columns import I64, distinct, starts_of
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import pages
from ckpt.core.format.regular_file import LOST
from ckpt.core.format.table import Table
from ckpt.errors import CorruptError, NotFoundError, StoreError, UnreadableError, is_unreadable
from ckpt.store import PAGE, ObjectInfo, Store

T = TypeVar("T")

WINDOW_S = 4.0  # time for which failures are retried
QUIET_S = 60.0  # time without a failure, after which the next failure gets a new window
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


async def get(
    store: Store,
    key: str,
    *,
    start: int = 0,
    length: int | None = None,
    into: memoryview | None = None,
    limit: int | None = None,
) -> memoryview:
    """Read bytes of a file; see `Store.get`."""
    return await _steadily(store, key, partial(store.get, key, start=start, length=length, into=into, limit=limit))


async def head(store: Store, key: str) -> ObjectInfo:
    """Read the size of a file; see `Store.head`."""
    return await _steadily(store, key, partial(store.head, key))


async def listing(store: Store, prefix: str) -> list[ObjectInfo]:
    """List files; see `Store.list`."""

    async def read() -> list[ObjectInfo]:
        return [info async for info in store.list(prefix)]

    return await _steadily(store, prefix, read)


async def _steadily(store: Store, key: str, read: Callable[[], Awaitable[T]]) -> T:
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await read()
        except StoreError as error:
            missing = isinstance(error, NotFoundError)
            if not missing and not is_unreadable(error):
                raise
            # A remote store has already retried this error, for longer than this window.
            left = 0.0 if store.remote and error.retryable else _faults(store).left()
            if left <= 0:
                if missing:
                    await _check_lost(store, key, error)
                    raise
                raise _unreadable(store, key, error) from error
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def files(read: Callable[..., T], *arguments: Any) -> T:
    """Call a function that reads files outside any store, in a thread. While the files cannot be read, retry for
    WINDOW_S, then raise UnreadableError. The OSError of an absent file is raised unchanged."""
    while True:
        try:
            return await asyncio.to_thread(read, *arguments)
        except (OSError, UnreadableError) as error:
            if isinstance(error, OSError) and error.errno in LOST:
                raise
            if (left := _others.left()) <= 0:
                if isinstance(error, UnreadableError):
                    raise
                raise UnreadableError(f"{error.filename or 'a file'} cannot be read now: {error.strerror}") from None
        await asyncio.sleep(min(FIRST_PAUSE_S, left))


class _Faults:
    """Tracks the failures of a store, and limits retries."""

    def __init__(self) -> None:
        self._last = self._until = float("-inf")

    def left(self) -> float:
        """Return the seconds for which a new failure may be retried."""
        now = time.monotonic()
        if now - self._last > QUIET_S:
            self._until = now + WINDOW_S
        self._last = now
        return self._until - now


_known: WeakKeyDictionary[Any, _Faults] = WeakKeyDictionary()
_others = _Faults()  # for `files`, and for stores that cannot be weakly referenced or hashed


def _faults(store: Store) -> _Faults:
    try:
        return _known.setdefault(store, _Faults())
    except TypeError:
        return _others


async def _check_lost(store: Store, key: str, error: StoreError) -> None:
    """Raise UnreadableError unless the store can list the folder of a file, and the file is not in the folder."""
    try:
        folder = key[: key.rfind("/") + 1]
        if key in {info.key async for info in store.list(folder)}:
            raise _unreadable(store, key, f"it is listed, but reading it fails ({error})") from error
        if not await _is_there(store, key):
            raise _unreadable(store, key, f"its folder cannot be found now either ({error})") from error
    except StoreError as failure:
        if isinstance(failure, UnreadableError):
            raise
        raise _unreadable(store, key, failure) from failure


def _unreadable(store: Store, key: str, why: object) -> UnreadableError:
    return UnreadableError(f"cannot read {key} in {store.url} now: {why}")


async def _is_there(store: Store, key: str) -> bool:
    """Return True if the run can be listed and has the file's top folder. The checkpoint's folder may be deleted."""
    folder, has_folder = key.rpartition("/")[0].partition("/")[0], getattr(store, "has_folder", None)
    for prefix in ("log/", ""):
        async for _ in store.list(prefix):
            return not folder or has_folder is None or bool(await has_folder(folder))
    return False


# -- chunks --


READ, FAR_READ = 8 << 20, 16 << 20  # maximum bytes of a read (local, remote); a larger chunk is read whole
GAP = 64 << 10  # bytes; ranges with a smaller gap are joined, because reading the gap is cheaper than another read
PARALLEL = 8
SCRATCH = 10 << 20  # minimum bytes of memory for a batch; most batches need no more, and untouched memory costs nothing
ALIGNED = 64

Sink = Callable[[int, memoryview], None]
"""Function `sink(chunk, data)`, which gets the verified bytes of a chunk, by its number in the table. It is called from
several threads, and the memory is reused after it returns."""

OnDamage = Callable[[Sequence[int], CorruptError | StoreError], None]
"""Function `on_damage(chunks, error)`, which gets the error of unreadable chunks. It is called from several threads."""


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a data file, and the numbers of the chunks in it."""

    file: str
    start: int
    length: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks that are read and decoded together. `chunks`: the requested ones. `reads`: also include their bases."""

    reads: tuple[Read, ...]
    chunks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(read.length for read in self.reads)


def plan_reads(table: Table, chunks: Iterable[int], *, far: bool = False) -> list[Batch]:
    """Return batches that cover the given chunks, in their order on disk. `far`: True for a remote store."""
    most = FAR_READ if far else READ
    wanted = distinct(np.fromiter(chunks, np.int64))
    file, offset, based = table.file[wanted], table.offset[wanted], table.base[wanted] >= 0
    ends = offset + table.stored[wanted]
    order = np.lexsort((wanted, ends, offset, file))
    nbytes = table.length[wanted] * np.where(based, 2, 1)
    columns = [column[order] for column in (file, offset, ends, nbytes, wanted)]
    if not based.any() and (columns[1][1:] >= columns[2][:-1])[np.diff(columns[0]) == 0].all():
        return list(_apart(table, columns, most))
    groups = near(zip(*(column.tolist() for column in columns), strict=True), most)
    if based.any():
        return [Batch(tuple(_with_bases(table, group, most)), tuple(group)) for _, _, _, group in groups]
    return [_batch(table, file, start, end, tuple(group)) for file, start, end, group in groups]


def _batch(table: Table, file: int, start: int, end: int, chunks: tuple[int, ...]) -> Batch:
    return Batch((Read(table.files[file], start, end - start, chunks),) if end > start else (), chunks)


def _apart(table: Table, columns: Sequence[I64], most: int) -> Iterator[Batch]:
    """Yield the same groups as `near`, for ranges that do not overlap, without a loop over the ranges."""
    file, low, high, nbytes, chunks = columns
    total = starts_of(np.cumsum(nbytes))
    breaks = np.flatnonzero((np.diff(file) != 0) | (low[1:] > high[:-1] + GAP)) + 1
    for begin, end in itertools.pairwise([0, *breaks.tolist(), len(file)]):
        while begin < end:
            far = begin + int(np.searchsorted(high[begin:end], low[begin] + most, "right"))
            stop = max(begin + 1, min(far, int(np.searchsorted(total, total[begin] + most, "right")) - 1))
            group = tuple(chunks[begin:stop].tolist())
            yield _batch(table, int(file[begin]), int(low[begin]), int(high[stop - 1]), group)
            begin = stop


def near(rows: Iterable[tuple[int, int, int, int, T]], most: int) -> Iterator[tuple[int, int, int, list[T]]]:
    """Join ranges of data files that have small gaps. Yield (data file, start, end, items).

    `rows`: (data file, start, end, decoded bytes, item), ascending. A joined range has at most `most` stored bytes and
        at most `most` decoded bytes.
    """
    group: list[T] = []
    now = start = end = plain = 0
    for file, low, high, size, item in rows:
        if group and (file != now or low > end + GAP or max(high, end) - start > most or plain + size > most):
            yield now, start, end, group
            group = []
        if not group:
            now, start, end, plain = file, low, high, 0
        group.append(item)
        end, plain = max(end, high), plain + size
    if group:
        yield now, start, end, group


def closure(table: Table, chunks: Iterable[int]) -> list[int]:
    """Return the bases of these chunks, followed by the chunks."""
    wanted = dict.fromkeys(chunks)
    bases = {base: None for base in table.base[list(wanted)].tolist() if base >= 0}
    return [*bases, *(chunk for chunk in wanted if chunk not in bases)]


def _with_bases(table: Table, group: list[int], most: int) -> Iterator[Read]:
    """Yield the ranges of a group of chunks and their bases."""
    rows = sorted((int(table.file[b]), int(table.offset[b]), b) for b in closure(table, group) if table.stored[b])
    ranges = ((file, offset, offset + int(table.stored[chunk]), 0, chunk) for file, offset, chunk in rows)
    for file, start, end, chunks in near(ranges, most):
        yield Read(table.files[file], start, end - start, tuple(chunks))


async def fetch(
    store: Store,
    table: Table,
    batches: Sequence[Batch],
    sink: Sink | None,
    *,
    on_bytes: Callable[[int], None] | None = None,
    on_damage: OnDamage | None = None,
) -> None:
    """Read, verify, decode and deliver chunks. The first damaged chunk raises CorruptError before its bytes are
    delivered. With `on_damage`, call it for each chunk that cannot be read, and continue. PARALLEL batches are in
    memory at a time."""
    queue, failed = iter(batches), False

    async def worker(pool: ThreadPoolExecutor) -> None:
        nonlocal failed
        scratch, loop = Scratch(), asyncio.get_running_loop()
        try:
            for batch in queue:
                if failed:
                    return
                got = await _read(store, batch, scratch)
                if on_damage is None and (errors := [one for one in got if isinstance(one, StoreError)]):
                    raise errors[0]
                await loop.run_in_executor(pool, _deliver, table, batch, got, scratch, sink, on_damage)
                if on_bytes is not None:
                    on_bytes(batch.nbytes)
        except (StoreError, CorruptError):
            failed = True
            raise

    with ThreadPoolExecutor(PARALLEL, "ckpt-verify") as pool:
        await all_of(worker(pool) for _ in range(min(PARALLEL, len(batches))))


async def _read(store: Store, batch: Batch, scratch: Scratch) -> list[memoryview | StoreError]:
    """Return the bytes of each read, or its StoreError."""
    room = zip(batch.reads, scratch.take(batch), strict=True)
    works = [get(store, read.file, start=read.start, length=read.length, into=view) for read, view in room]
    found: list[memoryview | StoreError] = []
    for result in await asyncio.gather(*works, return_exceptions=True):
        if not isinstance(result, (memoryview, StoreError)):
            raise result
        found.append(result)
    return found


class Scratch:
    """The memory of one worker. Each batch reuses it, because fresh pages cost more than the work on them."""

    def __init__(self) -> None:
        self._stored = self._plain = memoryview(b"")

    def take(self, batch: Batch) -> list[memoryview]:
        """Return memory for each read, of the size that `Store.get` needs."""
        sizes = [pages(read.length) + 2 * PAGE for read in batch.reads]
        self._stored = _at_least(self._stored, sum(sizes))
        ends = list(itertools.accumulate(sizes))
        return [self._stored[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def decoded(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory for decoded chunks, each at an aligned address."""
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        self._plain = _at_least(self._plain, sum(room))
        starts = [end - size for size, end in zip(room, itertools.accumulate(room), strict=True)]
        return [self._plain[start : start + size] for size, start in zip(sizes, starts, strict=True)]


def _at_least(memory: memoryview, size: int) -> memoryview:
    if len(memory) >= size:
        return memory
    made = mmap.mmap(-1, max(size, SCRATCH), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, and longer requests to the disk
    return memoryview(made)


def _deliver(
    table: Table,
    batch: Batch,
    got: Sequence[memoryview | StoreError],
    scratch: Scratch,
    sink: Sink | None,
    on_damage: OnDamage | None,
) -> None:
    """Verify, decode and deliver the chunks of one batch."""
    stored: dict[int, memoryview] = {}
    lost: dict[int, CorruptError | StoreError] = {}
    for read, data in zip(batch.reads, got, strict=True):
        for chunk in read.chunks:
            if isinstance(data, StoreError):
                lost[chunk] = data
                continue
            at = int(table.offset[chunk]) - read.start
            stored[chunk] = data[at : at + int(table.stored[chunk])]
    deliver(table, batch.chunks, stored, lost, scratch, sink, on_damage, {})


def deliver(
    table: Table,
    chunks: Sequence[int],
    stored: Mapping[int, memoryview],
    lost: dict[int, CorruptError | StoreError],
    scratch: Scratch,
    sink: Sink | None,
    on_damage: OnDamage | None,
    places: Mapping[int, memoryview],
) -> None:
    """Verify, decode and deliver chunks. `stored`: bytes of the chunks and of their bases. `lost`: errors of chunks
    that could not be read. `places`: final memory of some chunks. These chunks are decoded into it, or are in it
    already, and are not passed to the sink. `on_damage`: if None, the first damage raises CorruptError."""
    wanted = set(chunks)
    rows = closure(table, chunks)
    codecs = dict(zip(rows, table.codec[rows].tolist(), strict=True))
    room = {chunk: places[chunk] for chunk in rows if codecs[chunk] != RAW and chunk in places}
    encoded = [chunk for chunk in rows if codecs[chunk] != RAW and chunk not in places]
    room.update(zip(encoded, scratch.decoded(table.length[encoded].tolist()), strict=True))
    plain: dict[int, memoryview] = {}
    for chunk in rows:
        try:
            if lost:
                gone = lost.get(chunk) or lost.get(int(table.base[chunk]))
                if gone is not None:
                    raise gone
            plain[chunk] = _plain_of(table, chunk, stored.get(chunk, memoryview(b"")), plain, room.get(chunk))
        except (CorruptError, StoreError) as error:
            if on_damage is None:
                raise
            lost[chunk] = error
            if chunk in wanted:
                on_damage((chunk,), error)
            continue
        if sink is not None and chunk in wanted and chunk not in places:
            sink(chunk, plain[chunk])


def not_its_digest(table: Table, chunk: int) -> CorruptError:
    """Return the error for a chunk whose stored bytes do not match their digest."""
    file, offset = table.place(chunk)
    where = f"{int(table.stored[chunk])} bytes at {offset} of {file}"
    return CorruptError(f"{table.name_of(chunk)} is damaged: {where} do not match their digest")


def _plain_of(
    table: Table, chunk: int, stored: memoryview, plain: Mapping[int, memoryview], room: memoryview | None
) -> memoryview:
    """Return the plain bytes of a chunk. Raise CorruptError if a digest does not match."""
    if stored and chunk_digest(stored) != table.stored_digest[chunk].tobytes():
        raise not_its_digest(table, chunk)
    if room is None:
        return stored
    try:
        decode(int(table.codec[chunk]), stored, len(room), plain.get(int(table.base[chunk])), room)
    except CorruptError as error:
        raise CorruptError(f"{table.name_of(chunk)} is damaged: {error}") from None
    if chunk_digest(room) != table.digest[chunk].tobytes():
        raise CorruptError(f"{table.name_of(chunk)} is damaged: its decoded bytes do not match their digest")
    return room
