"""Ranges of packs become blobs again: read, verified, decoded and handed over, a few batches at a time.

plan_reads   table, blobs -> batches: near ranges together, and with each blob what it is based on
fetch        batches -> bytes, each verified before anybody gets it
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ckpt.core.checkpoint import steady
from ckpt.core.checkpoint.concurrent import all_of
from ckpt.core.format.codec import RAW, decode
from ckpt.core.format.columns import I64, distinct, starts_of
from ckpt.core.format.digest import blob_digest
from ckpt.core.format.layout import pages
from ckpt.core.format.table import Table
from ckpt.errors import CorruptError, StoreError
from ckpt.store import PAGE, Store

T = TypeVar("T")
READ, FAR_READ = 8 << 20, 16 << 20  # bytes of one read, at most (a blob is never split); and where each is a request
GAP = 64 << 10  # reading over a gap this small is cheaper than another read
PARALLEL = 8
SCRATCH = 10 << 20  # bytes of memory for a batch, at least: most need no more, and what is not touched costs nothing
ALIGNED = 64

Sink = Callable[[int, memoryview], None]
"""`sink(blob, data)`: verified bytes of a blob, by its number in the table. Called from several threads; the memory is
reused after it returns."""

OnDamage = Callable[[Sequence[int], CorruptError | StoreError], None]
"""`on_damage(blobs, error)`: why these cannot be had from here. Called from several threads."""


@dataclass(frozen=True, slots=True)
class Read:
    """One range of one pack, and the numbers of the blobs in it."""

    pack: str
    start: int
    length: int
    blobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What is read and decoded together. `blobs` are those that are wanted; `reads` have their bases as well."""

    reads: tuple[Read, ...]
    blobs: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(read.length for read in self.reads)


def plan_reads(table: Table, blobs: Iterable[int], *, far: bool = False) -> list[Batch]:
    """Batches that cover the given blobs, in the order they lie on disk. `far`: in a remote place."""
    most = FAR_READ if far else READ
    wanted = distinct(np.fromiter(blobs, np.int64))
    pack, offset, based = table.pack[wanted], table.offset[wanted], table.base[wanted] >= 0
    ends = offset + table.stored[wanted]
    order = np.lexsort((wanted, ends, offset, pack))
    nbytes = table.length[wanted] * np.where(based, 2, 1)
    columns = [column[order] for column in (pack, offset, ends, nbytes, wanted)]
    if not based.any() and (columns[1][1:] >= columns[2][:-1])[np.diff(columns[0]) == 0].all():
        return list(_apart(table, columns, most))
    groups = near(zip(*(column.tolist() for column in columns), strict=True), most)
    if based.any():
        return [Batch(tuple(_with_bases(table, group, most)), tuple(group)) for _, _, _, group in groups]
    return [_batch(table, pack, start, end, tuple(group)) for pack, start, end, group in groups]


def _batch(table: Table, pack: int, start: int, end: int, blobs: tuple[int, ...]) -> Batch:
    return Batch((Read(table.packs[pack], start, end - start, blobs),) if end > start else (), blobs)


def _apart(table: Table, columns: Sequence[I64], most: int) -> Iterator[Batch]:
    """Of ranges that do not overlap what `near` says, without looking at each of them."""
    pack, low, high, nbytes, blobs = columns
    total = starts_of(np.cumsum(nbytes))
    breaks = np.flatnonzero((np.diff(pack) != 0) | (low[1:] > high[:-1] + GAP)) + 1
    for begin, end in itertools.pairwise([0, *breaks.tolist(), len(pack)]):
        while begin < end:
            far = begin + int(np.searchsorted(high[begin:end], low[begin] + most, "right"))
            stop = max(begin + 1, min(far, int(np.searchsorted(total, total[begin] + most, "right")) - 1))
            group = tuple(blobs[begin:stop].tolist())
            yield _batch(table, int(pack[begin]), int(low[begin]), int(high[stop - 1]), group)
            begin = stop


def near(rows: Iterable[tuple[int, int, int, int, T]], most: int) -> Iterator[tuple[int, int, int, list[T]]]:
    """Ranges of packs, joined where little lies between them: (pack, start, end, items).

    `rows`: (pack, start, end, bytes of what it becomes, item), ascending. What is joined has at most `most` bytes, and
    becomes as many.
    """
    group: list[T] = []
    now = start = end = plain = 0
    for pack, low, high, size, item in rows:
        if group and (pack != now or low > end + GAP or max(high, end) - start > most or plain + size > most):
            yield now, start, end, group
            group = []
        if not group:
            now, start, end, plain = pack, low, high, 0
        group.append(item)
        end, plain = max(end, high), plain + size
    if group:
        yield now, start, end, group


def closure(table: Table, blobs: Iterable[int]) -> list[int]:
    """These blobs behind the bases of all of them."""
    wanted = dict.fromkeys(blobs)
    bases = {base: None for base in table.base[list(wanted)].tolist() if base >= 0}
    return [*bases, *(blob for blob in wanted if blob not in bases)]


def _with_bases(table: Table, group: list[int], most: int) -> Iterator[Read]:
    """The ranges of a group and its bases."""
    rows = sorted((int(table.pack[b]), int(table.offset[b]), b) for b in closure(table, group) if table.stored[b])
    ranges = ((pack, offset, offset + int(table.stored[blob]), 0, blob) for pack, offset, blob in rows)
    for pack, start, end, blobs in near(ranges, most):
        yield Read(table.packs[pack], start, end - start, tuple(blobs))


async def fetch(
    store: Store,
    table: Table,
    batches: Sequence[Batch],
    sink: Sink | None,
    *,
    on_bytes: Callable[[int], None] | None = None,
    on_damage: OnDamage | None = None,
) -> None:
    """Read, verify, decode and hand over. The first damaged blob raises CorruptError before any byte of it is handed
    over.

    With `on_damage`, that is told what cannot be had instead, and reading goes on. Memory in use: PARALLEL batches.
    """
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
    """What the store gives for each read, or that it cannot."""
    room = zip(batch.reads, scratch.take(batch), strict=True)
    works = [steady.get(store, read.pack, start=read.start, length=read.length, into=view) for read, view in room]
    found: list[memoryview | StoreError] = []
    for result in await asyncio.gather(*works, return_exceptions=True):
        if not isinstance(result, (memoryview, StoreError)):
            raise result
        found.append(result)
    return found


class Scratch:
    """Memory of one worker, used again for each batch: fresh pages cost more than what is done with them."""

    def __init__(self) -> None:
        self._stored = self._plain = memoryview(b"")

    def take(self, batch: Batch) -> list[memoryview]:
        """Room for each read, as `Store.get` wants it."""
        sizes = [pages(read.length) + 2 * PAGE for read in batch.reads]
        self._stored = _at_least(self._stored, sum(sizes))
        ends = list(itertools.accumulate(sizes))
        return [self._stored[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def decoded(self, sizes: Sequence[int]) -> list[memoryview]:
        """Room for what is decoded, each piece at an address that suits any word."""
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        self._plain = _at_least(self._plain, sum(room))
        starts = [end - size for size, end in zip(room, itertools.accumulate(room), strict=True)]
        return [self._plain[start : start + size] for size, start in zip(sizes, starts, strict=True)]


def _at_least(memory: memoryview, size: int) -> memoryview:
    if len(memory) >= size:
        return memory
    made = mmap.mmap(-1, max(size, SCRATCH), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)  # a few faults instead of thousands, and longer requests to the disk
    return memoryview(made)


def _deliver(
    table: Table,
    batch: Batch,
    got: Sequence[memoryview | StoreError],
    scratch: Scratch,
    sink: Sink | None,
    on_damage: OnDamage | None,
) -> None:
    """Verify, decode and hand over what one batch has read."""
    stored: dict[int, memoryview] = {}
    lost: dict[int, CorruptError | StoreError] = {}
    for read, data in zip(batch.reads, got, strict=True):
        for blob in read.blobs:
            if isinstance(data, StoreError):
                lost[blob] = data
                continue
            at = int(table.offset[blob]) - read.start
            stored[blob] = data[at : at + int(table.stored[blob])]
    deliver(table, batch.blobs, stored, lost, scratch, sink, on_damage, {})


def deliver(
    table: Table,
    blobs: Sequence[int],
    stored: Mapping[int, memoryview],
    lost: dict[int, CorruptError | StoreError],
    scratch: Scratch,
    sink: Sink | None,
    on_damage: OnDamage | None,
    places: Mapping[int, memoryview],
) -> None:
    """Verify, decode and hand over blobs. `stored`: their bytes, and those of their bases; `lost`: why some are not.

    `places`: where the plain bytes of some of them belong. They are decoded to there, or are there already, and the
    sink is not told. `on_damage` None: CorruptError for the first damage.
    """
    wanted = set(blobs)
    rows = closure(table, blobs)
    codecs = dict(zip(rows, table.codec[rows].tolist(), strict=True))
    room = {blob: places[blob] for blob in rows if codecs[blob] != RAW and blob in places}
    encoded = [blob for blob in rows if codecs[blob] != RAW and blob not in places]
    room.update(zip(encoded, scratch.decoded(table.length[encoded].tolist()), strict=True))
    plain: dict[int, memoryview] = {}
    for blob in rows:
        try:
            if lost:
                gone = lost.get(blob) or lost.get(int(table.base[blob]))
                if gone is not None:
                    raise gone
            plain[blob] = _plain_of(table, blob, stored.get(blob, memoryview(b"")), plain, room.get(blob))
        except (CorruptError, StoreError) as error:
            if on_damage is None:
                raise
            lost[blob] = error
            if blob in wanted:
                on_damage((blob,), error)
            continue
        if sink is not None and blob in wanted and blob not in places:
            sink(blob, plain[blob])


def not_its_digest(table: Table, blob: int) -> CorruptError:
    """What is stored of a blob is not what was."""
    pack, offset = table.place(blob)
    where = f"{int(table.stored[blob])} bytes at {offset} of {pack}"
    return CorruptError(f"{table.name_of(blob)} is damaged: {where} do not match their digest")


def _plain_of(
    table: Table, blob: int, stored: memoryview, plain: Mapping[int, memoryview], room: memoryview | None
) -> memoryview:
    """The plain bytes of one blob. CorruptError unless both its digests are right."""
    if stored and blob_digest(stored) != table.stored_digest[blob].tobytes():
        raise not_its_digest(table, blob)
    if room is None:
        return stored
    try:
        decode(int(table.codec[blob]), stored, len(room), plain.get(int(table.base[blob])), room)
    except CorruptError as error:
        raise CorruptError(f"{table.name_of(blob)} is damaged: {error}") from None
    if blob_digest(room) != table.digest[blob].tobytes():
        raise CorruptError(f"{table.name_of(blob)} is damaged: what is decoded does not match its digest")
    return room
