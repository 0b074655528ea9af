"""Back from a store: which checkpoints there are, what one consists of, and its bytes, each verified before use.

    open_run -> choose a commit -> load_manifest -> plan_reads -> fetch

Reading needs no torch: bytes are handed to a sink, which the caller gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt.checkpoint.commit import load_table, read_part
from ckpt.errors import AccessError, CorruptError, NoCheckpointError, NotFoundError, StoreError
from ckpt.events import log as logger
from ckpt.format.codec import BF16, RAW, decode
from ckpt.format.digest import blob_digest, file_digest
from ckpt.format.layout import Layout, pages
from ckpt.format.manifest import Attempt, Part, index_key, owner, table_key
from ckpt.format.merged import SavedState
from ckpt.format.rank_index import MAX_DIRECTORY, Directory, is_directory
from ckpt.format.table import MAX_TABLE, Table, merge
from ckpt.runlog.log import RunLog
from ckpt.runlog.records import Commit
from ckpt.store import PAGE, Store, get_small, open_store

S = TypeVar("S")
T = TypeVar("T")
AT_ONCE = 64  # parts or tables
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


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from plain code, also where an event loop is already running (notebooks)."""
    with ThreadPoolExecutor(1, "ckpt-run") as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without reading tensors. `parts` are in rank order."""

    commit: Commit
    parts: tuple[Part, ...]
    table: Table

    @property
    def attempt(self) -> Attempt:
        return self.commit.attempt

    def layout(self, rank: int = 0) -> Layout:
        part = next(part for part in self.parts if part.rank == rank)
        layout = Layout.from_json(part.layout)
        if layout.digest != part.layout_digest:
            raise CorruptError(f"the layout of rank {rank} at step {self.commit.step} does not match its digest")
        if len(layout.components) != len(part.values):
            raise CorruptError(f"the plain values of rank {rank} at step {self.commit.step} are not of its layout")
        return layout

    def saved(self) -> SavedState:
        """The checkpoint as one state. CorruptError if only some of the ranks' parts are in this place."""
        if len(self.parts) != self.commit.world:
            raise CorruptError(
                f"this tier holds {len(self.parts)} of the {self.commit.world} parts of step {self.commit.step}: the "
                "others are on the disks of other nodes"
            )
        return SavedState(
            [self.layout(part.rank) for part in self.parts], [part.values for part in self.parts], self.table
        )


async def open_run(url: str, store: Store | None = None) -> RunLog:
    """The log of an existing run. FormatError if there is none."""
    log = RunLog(store if store is not None else open_store(url))
    try:
        await log.open()
    except BaseException:
        await log.store.aclose()
        raise
    return log


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """The store of a run whose log has been read already."""
    store = open_store(url)
    try:
        yield store
    finally:
        await store.aclose()


def choose(log: RunLog, step: int | None = None) -> Commit:
    """The newest checkpoint that nobody called broken, or that of a step. NoCheckpointError names what there is."""
    history = log.state.lineage()
    sound = [commit for commit in history if commit.finite is not False]
    if step is None and sound:
        return sound[0]
    for commit in [*history, *sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)]:
        if commit.step == step:
            return commit
    steps = ", ".join(str(c.step) for c in history[:20]) or "none"
    wanted = "a checkpoint" if step is None else f"step {step}"
    raise NoCheckpointError(f"{log.store.url} does not hold {wanted} (steps there: {steps})")


async def _some_at_a_time(items: Sequence[S], work: Callable[[S], Coroutine[Any, Any, T]]) -> list[T]:
    """There may be as many parts as a record says, and none of them there."""
    found: list[T] = []
    for start in range(0, len(items), AT_ONCE):
        found += await asyncio.gather(*(work(item) for item in items[start : start + AT_ONCE]))
    return found


async def load_index(store: Store, commit: Commit) -> Table | Directory:
    """All tables as one, or the directory of them. CorruptError or NotFoundError if it is damaged or gone."""
    key = index_key(commit.attempt, commit.index)
    raw = await get_small(store, key, max(MAX_TABLE, MAX_DIRECTORY))
    if file_digest(raw) != commit.index:
        raise CorruptError(f"{key} is damaged: its digest does not match")
    if is_directory(raw):
        return Directory.from_bytes(raw, key, commit.world)
    return Table.from_bytes(raw, key)


async def load_tables(store: Store, commit: Commit, directory: Directory, ranks: Sequence[int]) -> dict[int, Table]:
    """The tables of some ranks, verified by what the directory says of them."""
    numbers = {rank: number for rank, number, _ in commit.parts}
    keys = [(table_key(commit.attempt, rank, numbers[rank]), directory.table_digest(rank)) for rank in ranks]
    return dict(zip(ranks, await _some_at_a_time(keys, lambda key: load_table(store, *key)), strict=True))


async def load_values(store: Store, commit: Commit, directory: Directory, ranks: Sequence[int]) -> dict[int, list[Any]]:
    """The plain values of some ranks, out of their parts."""
    known = {rank: (number, digest) for rank, number, digest in commit.parts}

    async def values(rank: int) -> list[Any]:
        part, _ = await read_part(store, commit.attempt, rank, known[rank][0], expected=known[rank][1])
        if part.world != commit.world or part.table != directory.table_digest(rank):
            raise CorruptError(f"the part of rank {rank} at step {commit.step} is not what its index says")
        return part.values

    return dict(zip(ranks, await _some_at_a_time(ranks, values), strict=True))


async def load_saved(
    store: Store, commit: Commit, others: Sequence[str] = (), note: Callable[[str], None] = lambda text: None
) -> SavedState:
    """A checkpoint as one state. What a directory leaves to further files is read when it is wanted.

    `others`: URLs of places that have the same checkpoint, for such files that are lost here; `note` is told then.
    """
    try:
        index = await load_index(store, commit)
    except (CorruptError, NotFoundError):
        index = None  # the parts and their tables make up for it
    if not isinstance(index, Directory):
        return (await load_manifest(store, commit, index)).saved()
    directory, urls = index, (store.url, *others)

    def values(ranks: Sequence[int]) -> dict[int, list[Any]]:
        return run(_from_any(urls, lambda place: load_values(place, commit, directory, ranks), note)) if ranks else {}

    def tables(ranks: Sequence[int]) -> dict[int, Table]:
        return run(_from_any(urls, lambda place: load_tables(place, commit, directory, ranks), note)) if ranks else {}

    return SavedState.listed(directory, values, tables)


async def _from_any(
    urls: Sequence[str], load: Callable[[Store], Coroutine[Any, Any, T]], note: Callable[[str], None]
) -> T:
    """Small files, from the first place that has them all: their digests are known."""
    failure: CorruptError | StoreError | None = None
    for url in urls:
        try:
            async with opened(url) as store:
                found = await load(store)
        except (CorruptError, StoreError) as error:
            failure = failure or error
            continue
        if failure is not None:
            logger.warning("%s; %s has what is needed", failure, url)
            note(f"parts or tables came from {url}")
        return found
    assert failure is not None
    raise failure


async def load_manifest(store: Store, commit: Commit, index: Table | Directory | None = None) -> Manifest:
    """Parts and tables of a checkpoint, all verified. CorruptError or NotFoundError if one is damaged or gone.

    An index of all tables says again what the parts' tables say, so a damaged one is made up for by them. `index`: if
    it has been read already.
    """
    attempt = commit.attempt
    read = await _some_at_a_time(
        commit.parts, lambda part: read_part(store, attempt, part[0], part[1], expected=part[2])
    )
    parts = tuple(part for part, _ in read)
    if any(part.world != commit.world for part in parts):
        raise CorruptError(f"the parts of step {commit.step} are of another number of ranks than its record says")
    try:
        table = await load_index(store, commit) if index is None else index
    except (CorruptError, NotFoundError) as error:
        logger.warning("%s; the tables of the parts are used instead", error)
        table = None
    if not isinstance(table, Table):
        keys = [(table_key(attempt, part.rank, part.number), part.table) for part in parts]
        table = merge(await _some_at_a_time(keys, lambda key: load_table(store, *key)))
    packs = {pack.key: pack.size for part in parts for pack in part.packs}
    ends = np.zeros(len(table.packs), np.int64)
    np.maximum.at(ends, table.pack, table.offset + table.stored)
    for key, end in zip(table.packs, ends.tolist(), strict=True):
        if end > packs.get(key, -1):
            raise CorruptError(f"{index_key(commit.attempt, commit.index)} points behind the end of {key}")
    return Manifest(commit, parts, table)


async def packs_of(store: Store, commit: Commit) -> frozenset[str]:
    """The packs that a checkpoint uses, also those of older ones. CorruptError or StoreError if nobody can say."""
    try:
        index = await load_index(store, commit)
    except (CorruptError, NotFoundError):
        index = None
    if isinstance(index, Directory):
        return frozenset(index.packs)
    return frozenset((await load_manifest(store, commit, index)).table.packs)


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
    """Batches that cover the given blobs, in the order they lie on disk. `far`: in a remote place.

    What is derived goes with what it is derived from, so that this is not read twice.
    """
    most = FAR_READ if far else READ
    wanted = np.unique(np.fromiter(blobs, np.int64))
    derived = table.codec[wanted] == BF16
    at = np.where(derived, table.base[wanted], wanted)  # where it lies, or what it is derived from
    pack, offset = table.pack[at], table.offset[at]
    ends = offset + table.stored[at]
    order = np.lexsort((wanted, derived, ends, offset, pack))
    nbytes = table.length[wanted] * np.where(table.base[wanted] >= table.owned, 2, 1)
    rows = zip(*(column[order].tolist() for column in (pack, offset, ends, nbytes, wanted)), strict=True)
    batch = _batch if (table.base[wanted] >= 0).any() else _raw_batch
    batches: list[Batch] = []
    group: list[int] = []
    now = start = end = plain = 0
    for p, low, high, size, blob in rows:
        far_off = p != now or low > end + GAP
        if group and (far_off or max(high, end) - start > most or plain + size > most):
            batches.append(batch(table, group, most, Read(table.packs[now], start, end - start, tuple(group))))
            group = []
        if not group:
            now, start, end, plain = p, low, high, 0
        group.append(blob)
        end, plain = max(end, high), plain + size
    if group:
        batches.append(batch(table, group, most, Read(table.packs[now], start, end - start, tuple(group))))
    return batches


def _raw_batch(table: Table, group: list[int], most: int, read: Read) -> Batch:
    """Of blobs that need no others: what they span is one range."""
    return Batch((read,) if read.length else (), read.blobs)


def closure(table: Table, blobs: Iterable[int]) -> list[int]:
    """These blobs and all that they need, each behind what it needs itself."""
    found: dict[int, None] = {}
    for blob in blobs:
        for needed in table.needed(blob):
            found.update(dict.fromkeys(table.needed(needed)))
            found[needed] = None
    direct = [blob for blob in dict.fromkeys(blobs) if blob not in found]
    return [*found, *direct]


def _batch(table: Table, group: list[int], most: int, _: Read) -> Batch:
    """The ranges of a group and its bases, near ones joined."""
    rows = sorted((int(table.pack[b]), int(table.offset[b]), b) for b in closure(table, group) if table.stored[b])
    reads: list[Read] = []
    inside: list[int] = []
    pack = start = end = 0
    for p, offset, blob in rows:
        last = offset + int(table.stored[blob])
        if inside and (p != pack or offset > end + GAP or max(last, end) - start > most):
            reads.append(Read(table.packs[pack], start, end - start, tuple(inside)))
            inside = []
        if not inside:
            pack, start, end = p, offset, last
        inside.append(blob)
        end = max(end, last)
    if inside:
        reads.append(Read(table.packs[pack], start, end - start, tuple(inside)))
    return Batch(tuple(reads), tuple(group))


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
    queue = iter(batches)
    failed = False

    async def worker(pool: ThreadPoolExecutor) -> None:
        nonlocal failed
        loop = asyncio.get_running_loop()
        scratch = Scratch()
        for batch in queue:
            if failed:
                return
            room = scratch.take(batch)
            results = await asyncio.gather(
                *(
                    store.get(read.pack, start=read.start, length=read.length, into=view)
                    for read, view in zip(batch.reads, room, strict=True)
                ),
                return_exceptions=True,
            )
            try:
                got = [_got(result) for result in results]
                if on_damage is None and (errors := [e for e in got if isinstance(e, StoreError)]):
                    raise errors[0]
                await loop.run_in_executor(pool, _deliver, table, batch, got, scratch, sink, on_damage)
            except (StoreError, CorruptError):
                failed = True
                raise
            if on_bytes is not None:
                on_bytes(batch.nbytes)

    with ThreadPoolExecutor(PARALLEL, "ckpt-verify") as pool:
        results = await asyncio.gather(
            *(worker(pool) for _ in range(min(PARALLEL, len(batches)))), return_exceptions=True
        )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _got(result: memoryview | BaseException) -> memoryview | StoreError:
    """What a store gave, or that it could not."""
    if isinstance(result, (memoryview, StoreError)):
        return result
    raise result


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
                gone = next((lost[b] for b in (blob, *table.needed(blob)) if b in lost), None)
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


def _plain_of(
    table: Table, blob: int, stored: memoryview, plain: Mapping[int, memoryview], room: memoryview | None
) -> memoryview:
    """The plain bytes of one blob. CorruptError unless both its digests are right."""
    if stored and blob_digest(stored) != table.stored_digest[blob].tobytes():
        where = f"{len(stored)} bytes at {int(table.offset[blob])} of {table.packs[int(table.pack[blob])]}"
        raise CorruptError(f"{name_of(table, blob)} is damaged: {where} do not match their digest")
    if room is None:
        return stored
    needed = [plain[b] for b in table.needed(blob)]
    base = needed[0] if len(needed) == 1 else b"".join(needed) if needed else None
    try:
        decode(int(table.codec[blob]), stored, len(room), base, room)
    except CorruptError as error:
        raise CorruptError(f"{name_of(table, blob)} is damaged: {error}") from None
    if blob_digest(room) != table.digest[blob].tobytes():
        raise CorruptError(f"{name_of(table, blob)} is damaged: what is decoded does not match its digest")
    return room


def name_of(table: Table, blob: int) -> str:
    """The tensor that a blob belongs to."""
    if blob >= table.owned:
        users = np.flatnonzero(table.base[: table.owned] == blob)
        return f"what {name_of(table, int(users[0]))} is based on" if users.size else "a base of nothing"
    return table.shards[int(np.searchsorted(table.starts, blob, "right")) - 1].name


def _problem(store: Store, error: CorruptError | StoreError) -> str:
    """What is wrong with stored bytes. An error that is only about reaching them is raised instead."""
    if store.remote and (isinstance(error, AccessError) or error.retryable):
        raise error
    return str(error)


def _distinct(table: Table, blobs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of blobs that say the same of the same few bytes, which become very many, one: to say it again costs nothing."""
    swelling = (table.codec[blobs] != RAW) & (table.stored[blobs] * 256 < table.length[blobs])
    some = blobs[swelling]
    columns = (table.pack, table.offset, table.stored, table.codec, table.base, table.length)
    numbers = np.stack([column[some] for column in columns], 1).astype(np.int64).view(np.uint8)
    rows = np.concatenate([numbers, table.digest[some], table.stored_digest[some]], 1)
    return np.sort(np.concatenate([blobs[~swelling], some[np.unique(rows, axis=0, return_index=True)[1]]]))


async def verify(
    store: Store,
    commit: Commit,
    *,
    data: bool = True,
    new: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    on_lost: Callable[[str, int], None] = lambda pack, offset: None,
) -> list[str]:
    """Read every byte of a checkpoint; the problems found, none if it is sound. `on_lost`: told where damage may lie.

    `data` False: everything but the tensors' bytes. `new`: of these, only what it did not take from older checkpoints.
    StoreError if the place does not let itself be read now: that says nothing about what is in it.
    """
    try:
        manifest = await load_manifest(store, commit)
    except (CorruptError, StoreError) as error:
        return [_problem(store, error)]
    attempt, damaged = commit.attempt, list[str]()
    tables = [(table_key(attempt, part.rank, part.number), part.table) for part in manifest.parts]
    checks: list[Callable[[], Coroutine[Any, Any, Table | Directory]]] = [
        partial(load_index, store, commit),
        *(partial(load_table, store, *one) for one in tables),
    ]
    for check in checks:
        try:
            await check()
        except (CorruptError, StoreError) as error:
            damaged.append(_problem(store, error))
    for part in manifest.parts:
        for pack in part.packs:
            if new and owner(pack.key) != attempt:
                continue
            try:
                head = await store.get(pack.key, start=0, length=pack.header_size)
            except StoreError as error:
                damaged.append(_problem(store, error))
                continue
            if file_digest(head) != pack.header:
                damaged.append(f"{pack.key} is damaged: its header does not match its digest")
    table = manifest.table
    own = np.array([not new or owner(key) == attempt for key in table.packs], np.bool_)
    blobs = _distinct(table, np.flatnonzero(own[table.pack[: table.owned]]))
    batches = plan_reads(table, blobs.tolist(), far=store.remote)

    def note(blobs: Sequence[int], error: CorruptError | StoreError) -> None:
        damaged.append(_problem(store, error))
        for blob in closure(table, blobs):
            if table.stored[blob]:
                on_lost(table.packs[int(table.pack[blob])], int(table.offset[blob]))

    await fetch(
        store,
        table,
        batches if data else (),
        None,
        on_bytes=on_bytes,
        on_damage=note,
    )
    return damaged


async def manifest_of(log: RunLog, step: int | None) -> Manifest:
    commit = choose(log, step)
    try:
        manifest = await load_manifest(log.store, commit)
    except (CorruptError, NotFoundError) as error:
        what = f"is damaged ({error})" if await still_live(log, commit) else "was retired while it was read"
        raise CorruptError(f"step {commit.step} {what}: choose another, see `ckpt ls`") from None
    return manifest


async def still_live(log: RunLog, commit: Commit) -> bool:
    """Whether what could not be read ought to be there; a running job may have retired it."""
    return commit.attempt in (await log.refresh()).commits
