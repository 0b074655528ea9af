"""Reads checkpoints from a store: the list of checkpoints, the contents of each, and their bytes.

    open_run -> choose a commit -> load_all, or saved_of -> plan_reads -> fetch, or fetch_repaired

Reading needs no torch, because bytes go to a sink that the caller provides. Readers of a run need only this module.
`chunks` reads chunks, and `manifests` reads manifests and indexes.

A restore from a folder reads nearly all bytes of a few large files (`fetch_local`). Each thread reads one contiguous
stretch, so that the kernel reads ahead. Whole pieces of a tensor are read or decoded directly into the tensor, and
verified while the bytes are still in the processor's cache, so nothing is copied twice. The page cache measured
fastest, even when cold. On Linux 6.18 with a virtual disk, two such streams read 4.6 GB/s and used 0.05 CPU seconds a
GB. Ten variants with O_DIRECT read 2.1 to 3.8 GB/s. Cached bytes are read at up to 20 GB/s. Checks of the disk itself
(`verify`) use `fetch`, which bypasses the cache.

`fetch_repaired` replaces damaged chunks by equal bytes that it finds by digest: first in other checkpoints of the same
run, which may have stored the same bytes in another file, then in other tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ckpt.core.checkpoint.chunks import Batch, OnDamage, Read, Scratch, deliver, not_its_digest
from ckpt.core.checkpoint.chunks import Sink as Sink
from ckpt.core.checkpoint.chunks import fetch as fetch
from ckpt.core.checkpoint.chunks import fetch as fetch_chunks
from ckpt.core.checkpoint.chunks import plan_reads as plan_reads
from ckpt.core.checkpoint.concurrent import all_of, of_each
from ckpt.core.checkpoint.concurrent import run as run
from ckpt.core.checkpoint.manifests import (
    MANY,
    check_sizes,
    layout_of,
    load_index,
    load_ranks,
    read_header,
    read_manifest,
    sizes_of_many,
    table_of,
)
from ckpt.core.checkpoint.reference import BEST, Which, number
from ckpt.core.format.codec import RAW
from ckpt.core.format.index import Index
from ckpt.core.format.kernels import Room, memory_at, put
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId, Manifest, owner
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import Content, Table, merge
from ckpt.core.log.records import MARK, THE_BEST, Commit, RunState
from ckpt.core.log.run_log import RunLog
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    NoCheckpointError,
    NotFoundError,
    StoreError,
    TruncatedError,
    UnreadableError,
    is_unreadable,
)
from ckpt.events import log as logger
from ckpt.store import Store, open_store

if TYPE_CHECKING:
    import numpy.typing as npt


T = TypeVar("T")
Note = Callable[[str], None]
MOST_PROBLEMS = 100  # verification stops after this many problems in a checkpoint
CHECK_HERE = "`ckpt verify RUN` checks the files that are here. A restore on all nodes reads the whole checkpoint."
FEW = 8  # up to this many ranks, all manifests are read; with more ranks, only the index and the needed manifests


@dataclass(frozen=True)
class Manifests:
    """The manifests of some or all ranks, in rank order, with their chunk tables."""

    commit: Commit
    manifests: tuple[Manifest, ...]
    tables: tuple[Table, ...]

    @property
    def checkpoint(self) -> CheckpointId:
        return self.commit.checkpoint

    @cached_property
    def table(self) -> Table:
        """Return all tables joined into one."""
        return merge(self.tables)

    def layout(self, rank: int = 0, known: Layout | None = None) -> Layout:
        """Return the layout of a rank. `known`: a layout to return instead of a new one if both are equal."""
        manifest, table = next(one for one in zip(self.manifests, self.tables, strict=True) if one[0].rank == rank)
        layout = layout_of(manifest, table, known)
        if len(layout.components) != len(manifest.values):
            raise CorruptError(f"the plain values of rank {rank} at step {self.commit.step} do not fit its layout")
        return layout

    def saved(self, known: Layout | None = None) -> SavedState:
        """Return the checkpoint as one state. Raise CorruptError if this tier has only some ranks' manifests."""
        if len(self.manifests) != self.commit.world:
            raise CorruptError(elsewhere(self.commit))
        layouts = [self.layout(manifest.rank, known) for manifest in self.manifests]
        return SavedState(layouts, [manifest.values for manifest in self.manifests], self.tables)


async def open_run(url: str, store: Store | None = None) -> RunLog:
    """Open the log of an existing run. Raise NoCheckpointError if there is no run."""
    log = RunLog(store if store is not None else open_store(url))
    try:
        await log.open()
    except BaseException:
        await log.store.aclose()
        raise
    return log


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """Open the store of a run whose log was read already."""
    store = open_store(url)
    try:
        yield store
    finally:
        await store.aclose()


def choose(log: RunLog, step: Which = None) -> Commit:
    """Return the checkpoint that `step` selects, default: the newest finite one. Raise NoCheckpointError if missing."""
    if step == BEST:
        return _best(log)
    history = log.state.lineage()
    sound = [commit for commit in history if commit.finite is not False]
    if number(step) is None and sound:
        return sound[0]
    for commit in [*history, *sorted(log.state.commits.values(), key=lambda c: c.checkpoint, reverse=True)]:
        if commit.step == step:
            return commit
    steps = ", ".join(str(c.step) for c in history[:20]) or "none"
    wanted = "a checkpoint" if number(step) is None else f"step {step}"
    raise NoCheckpointError(f"{log.store.url} does not have {wanted} (steps there: {steps})")


def _best(log: RunLog) -> Commit:
    state = log.state
    scored = [a for a, note in state.kept.items() if note.startswith(MARK + THE_BEST) and a in state.commits]
    if not scored:
        raise NoCheckpointError(
            f"{log.store.url} has no best checkpoint: score checkpoints with `ckpt.Best` or a callback"
        )
    return state.commits[max(scored)]


async def consists_of(store: Store, commit: Commit) -> Manifests | Index:
    """Read and verify the contents of a checkpoint: for up to `FEW` ranks all manifests, otherwise the index.

    Raise CorruptError if they are damaged, and NotFoundError if they are missing. Manifests replace a damaged index.
    """
    index = await index_or_none(store, commit) if FEW < commit.world == len(commit.manifests) else None
    return index if index is not None else await load_all(store, commit)


async def load_saved(
    store: Store, commit: Commit, others: Sequence[str] = (), note: Note = lambda text: None
) -> SavedState:
    """Return a checkpoint as one state; see `saved_by`."""
    return saved_by(await consists_of(store, commit), commit, (store.url, *others), note)


def saved_by(
    found: Manifests | Index,
    commit: Commit,
    urls: Sequence[str],
    note: Note = lambda text: None,
    known: Layout | None = None,
) -> SavedState:
    """Return a checkpoint as one state. If only the index was read, manifests are read when they are needed.

    `urls`: the checkpoint's tier, then other tiers from which lost manifests are read; `note` is called with a message
    if this happens. `known`: a layout that is reused if it is equal.
    """
    if isinstance(found, Manifests):
        return found.saved(known)

    def load(ranks: Sequence[int]) -> dict[int, tuple[list[Any], Table]]:
        return run(_from_any(urls, lambda place: load_ranks(place, commit, ranks), note))

    return SavedState.listed(found, load)


async def _from_any(
    urls: Sequence[str], load: Callable[[Store], Coroutine[Any, Any, T]], note: Callable[[str], None]
) -> T:
    """Load small files from the first tier that has all of them. `load` verifies their digests."""
    failure: CorruptError | StoreError | None = None
    for url in urls:
        try:
            async with opened(url) as store:
                found = await load(store)
        except (CorruptError, StoreError) as error:
            if failure is None or (is_unreadable(error) and not is_unreadable(failure)):
                failure = error
            continue
        if failure is not None:
            logger.warning("%s; the files were read from %s instead", failure, url)
            note(f"manifests of ranks came from {url}")
        return found
    assert failure is not None
    raise failure


def elsewhere(commit: Commit) -> str:
    """Describe how much of a checkpoint is in this location, if the rest is on the disks of other nodes."""
    return (
        f"this location has the files of only {len(commit.manifests)} of the {commit.world} ranks of step "
        f"{commit.step}: the rest is on the disks of other nodes"
    )


async def load_all(store: Store, commit: Commit) -> Manifests:
    """Read and verify every rank's manifest. Raise CorruptError if one is damaged, NotFoundError if one is missing."""
    sizes = await sizes_of_many(store, commit.checkpoint, len(commit.manifests))
    return await _manifest(store, commit, commit.manifests, sizes)


async def in_turn(store: Store, commit: Commit) -> AsyncIterator[Coroutine[Any, Any, Manifests]]:
    """Yield `load_all` for a few ranks at a time. The caller awaits each one before the next."""
    sizes = await sizes_of_many(store, commit.checkpoint, len(commit.manifests))
    for start in range(0, len(commit.manifests), MANY):
        yield _manifest(store, commit, commit.manifests[start : start + MANY], sizes)


async def _manifest(
    store: Store, commit: Commit, wanted: Sequence[tuple[int, str]], sizes: Mapping[str, int]
) -> Manifests:
    async def load(row: tuple[int, str]) -> Manifest:
        manifest, _ = await read_manifest(store, commit.checkpoint, row[0], expected=row[1])
        await check_sizes(store, manifest, sizes)
        return manifest

    manifests = tuple(await of_each(wanted, load))
    if any(manifest.world != commit.world for manifest in manifests):
        raise CorruptError(f"the manifests of step {commit.step} name another number of ranks than its log record")
    return Manifests(commit, manifests, tuple(map(table_of, manifests)))


async def index_or_none(store: Store, commit: Commit) -> Index | None:
    """Return the index, or None if it is damaged or missing. The caller then uses the manifests of the ranks."""
    try:
        return await load_index(store, commit)
    except (CorruptError, NotFoundError) as error:
        logger.warning("%s; the manifests of the ranks are used instead", error)
        return None


async def tables_of(store: Store, commit: Commit, names: Set[str] = frozenset()) -> AsyncIterator[Table]:
    """Yield every rank's table, one after the other. Raise CorruptError or StoreError if a table is unreadable.

    names: tensor names. With many ranks, the ranks that have pieces of these tensors come first.
    """
    likely = list[int]()
    if names and len(commit.manifests) > MANY and (index := await index_or_none(store, commit)) is not None:
        likely = [rank for i, (name, _) in enumerate(index.keys) if name in names for rank in index.holders(i).tolist()]
    async for table in tables_in_turn(store, commit, [*likely, *(rank for rank, _ in commit.manifests)]):
        yield table


async def tables_in_turn(store: Store, commit: Commit, ranks: Iterable[int]) -> AsyncIterator[Table]:
    """Yield the tables of these ranks. Only some of the tables are in memory at a time."""
    wanted = list(dict.fromkeys(ranks))
    for start in range(0, len(wanted), MANY):
        for _, table in (await load_ranks(store, commit, wanted[start : start + MANY])).values():
            yield table


async def data_files_of(store: Store, commit: Commit) -> frozenset[str]:
    """Return the data files that a checkpoint uses, including files of older ones. Raise CorruptError or StoreError."""
    index = await index_or_none(store, commit)
    if index is not None:
        return frozenset(index.files)
    return frozenset({key async for table in tables_of(store, commit) for key in table.files})


async def saved_of(
    log: RunLog, step: Which, others: Sequence[str] = (), note: Callable[[str], None] = lambda text: None
) -> tuple[Commit, SavedState]:
    """Choose a checkpoint, and return it as one state; see `load_saved`."""
    commit = choose(log, step)
    async with there(log, commit):
        return commit, await load_saved(log.store, commit, others, note)


@contextlib.asynccontextmanager
async def there(log: RunLog, commit: Commit) -> AsyncIterator[None]:
    """Replace read errors by a CorruptError that distinguishes damage from retirement. Raise UnreadableError if the
    files of some ranks are on the disks of other nodes."""
    if not commit.whole:
        raise UnreadableError(elsewhere(commit), advice=CHECK_HERE)
    try:
        yield
    except (CorruptError, NotFoundError, TruncatedError) as error:
        cause = f"is damaged ({error})" if await still_live(log, commit) else "was retired while it was read"
        raise CorruptError(f"step {commit.step} {cause}: choose another step, see `ckpt ls`") from None


async def still_live(log: RunLog, commit: Commit) -> bool:
    """Return True if an unreadable checkpoint should exist. False if a running job has retired it."""
    return commit.checkpoint in (await log.refresh()).commits


# -- verification --


async def verify(
    store: Store,
    commit: Commit,
    *,
    data: bool = True,
    new: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    on_unreadable: Callable[[StoreError], None] | None = None,
) -> list[str]:
    """Read every byte of a checkpoint. Return the problems, [] if it is intact.

    data: if False, read everything except the bytes of tensors
    new: read only bytes of tensors that this checkpoint has stored itself
    on_unreadable: called with each error that does not prove damage. Without it, the first such error is raised
    """
    problems: list[str] = []

    def note(error: CorruptError | StoreError) -> None:
        if not is_unreadable(error):
            problems.append(str(error))
        elif on_unreadable is None:
            raise error
        else:
            on_unreadable(cast(StoreError, error))

    async def check(work: Awaitable[T]) -> T | None:
        try:
            return await work
        except (CorruptError, StoreError) as error:
            note(error)
        return None

    index = await check(load_index(store, commit))
    async for share in in_turn(store, commit):
        if len(problems) >= MOST_PROBLEMS:
            problems.append(f"verification stopped after {len(problems)} problems")
            share.close()
            break
        manifest = await check(share)
        if manifest is None:
            continue
        for one in manifest.manifests:
            for file in one.files:
                if not new or owner(file.key) == commit.checkpoint:
                    await check(read_header(store, file))
        await check(asyncio.to_thread(_check_parses, manifest, index))
        if data:
            await _verify_chunks(store, commit, manifest.table, new, on_bytes, note)
    return problems


def _check_parses(manifest: Manifests, index: Index | None) -> None:
    """Raise CorruptError if a restore could not read the layouts, names and plain values of these manifests."""
    values = {manifest.rank: manifest.values for manifest in manifest.manifests}
    if len(values) == manifest.commit.world:
        manifest.saved().check_values(values)
    elif index is not None and index.world == manifest.commit.world:
        SavedState.listed(index, lambda ranks: {}).check_values(values)
    else:  # other manifests are on the disks of other nodes, or the index is lost
        for rank in values:
            manifest.layout(rank)


async def _verify_chunks(
    store: Store,
    commit: Commit,
    table: Table,
    new: bool,
    on_bytes: Callable[[int], None] | None,
    note: Callable[[CorruptError | StoreError], None],
) -> None:
    own = np.array([not new or owner(key) == commit.checkpoint for key in table.files], np.bool_)
    chunks = _distinct(table, np.flatnonzero(own[table.file[: table.owned]]))

    def on_damage(chunks: Sequence[int], error: CorruptError | StoreError) -> None:
        note(error)

    batches = plan_reads(table, chunks.tolist(), far=store.remote)
    await fetch(store, table, batches, None, on_bytes=on_bytes, on_damage=on_damage)


def _distinct(table: Table, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Drop duplicates of chunks that decode few bytes to many, as a forged file could make verification very long."""
    swelling = (table.codec[chunks] != RAW) & (table.stored[chunks] * 256 < table.length[chunks])
    some = chunks[swelling]
    columns = (table.file, table.offset, table.stored, table.codec, table.base, table.length)
    numbers = np.stack([column[some] for column in columns], 1).astype(np.int64).view(np.uint8)
    rows = np.concatenate([numbers, table.digest[some], table.stored_digest[some]], 1)
    return np.sort(np.concatenate([chunks[~swelling], some[np.unique(rows, axis=0, return_index=True)[1]]]))


# -- files of a folder, into their final memory --


STREAMS = max(2, min(8, len(os.sched_getaffinity(0))))
LEAST = 64 << 10  # minimum bytes of a piece that is read directly to its address


async def fetch_local(
    store: Store, table: Table, batches: Sequence[Batch], sink: Sink, on_damage: OnDamage, room: Room | None = None
) -> None:
    """Like `fetch`, for a local store. A chunk with an address in `room` is read to this address and verified, and is
    not passed to `sink`. If it is damaged, `on_damage` is called, and the bytes at the address must not be used. If a
    read fails, all of its chunks fail, and the caller reads them again."""
    stretches = _stretches(batches, STREAMS)
    if not stretches:
        return
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(stretches), "ckpt-read") as pool:
        work = [loop.run_in_executor(pool, _run, store, table, part, sink, on_damage, room) for part in stretches]
        await all_of(work)


def _stretches(batches: Sequence[Batch], count: int) -> list[Sequence[Batch]]:
    """Divide the batches into consecutive groups with about the same number of bytes."""
    total, seen = sum(batch.nbytes for batch in batches), 0
    found: list[list[Batch]] = [[] for _ in range(count)]
    for batch in batches:
        found[min(count - 1, seen * count // max(1, total))].append(batch)
        seen += batch.nbytes
    return [part for part in found if part]


def _run(
    store: Store,
    table: Table,
    batches: Sequence[Batch],
    sink: Sink,
    on_damage: OnDamage,
    room: Room | None,
) -> None:
    scratch = Scratch()
    near: Any = store  # all local stores have `scatter`
    for batch in batches:
        places, small = _places(table, batch, room)
        stored: dict[int, memoryview] = {}
        lost: dict[int, CorruptError | StoreError] = {}
        for read, spare in zip(batch.reads, scratch.take(batch), strict=True):
            views, found = _views(table, read, spare, places, small)
            try:
                near.scatter(read.file, read.start, views)
            except StoreError as error:  # the file is missing or partly unreadable
                small.clear()
                lost.update(dict.fromkeys(read.chunks, error))
                continue
            stored.update(found)
            numbers = np.fromiter(small, np.int64, len(small))
            addresses = np.fromiter(small.values(), np.int64, len(small))
            starts = table.offset[numbers] - read.start
            for i in put(spare, starts, table.stored[numbers], table.stored_digest[numbers], addresses):
                on_damage((int(numbers[i]),), not_its_digest(table, int(numbers[i])))
        chunks = [chunk for chunk in batch.chunks if chunk not in small] if small else batch.chunks
        deliver(table, chunks, stored, lost, scratch, sink, on_damage, places)


def _places(table: Table, batch: Batch, room: Room | None) -> tuple[dict[int, memoryview], dict[int, int]]:
    """Return the memory of large chunks, into which they are read or decoded, and the addresses of small chunks, to
    which they are copied from one long read."""
    if room is None:
        return {}, {}
    chunks = np.array(batch.chunks, np.int64)
    found, length = room(chunks), table.length[chunks]
    large, alone = length >= LEAST, len(batch.reads) == 1 and bool((table.base[chunks] < 0).all())
    big = (found > 0) & large
    small = (found > 0) & ~large & (table.codec[chunks] == RAW) & alone
    places = zip(chunks[big].tolist(), found[big].tolist(), length[big].tolist(), strict=True)
    return (
        {chunk: memory_at(address, size) for chunk, address, size in places},
        dict(zip(chunks[small].tolist(), found[small].tolist(), strict=True)),
    )


def _views(
    table: Table, read: Read, spare: memoryview, places: dict[int, memoryview], small: Container[int]
) -> tuple[list[memoryview], dict[int, memoryview]]:
    """Return the destinations of the bytes of a read, in order, and the memory of each chunk that is not small.

    Raw chunks go to their addresses. The bytes between them go to spare memory, at the same offset as in the read.
    Stored bytes that several chunks share (equal pieces are stored once) go to spare memory too, and the addresses of
    these chunks are removed.
    """
    views: list[memoryview] = []
    found: dict[int, memoryview] = {}
    done = 0
    chunks = list(read.chunks)
    starts = table.offset[chunks]
    ends = starts + table.stored[chunks]
    shared = np.zeros(len(chunks), np.bool_)
    meets = np.maximum.accumulate(ends)[:-1] > starts[1:]  # chunks are in ascending order of their starts
    shared[1:] |= meets
    shared[:-1] |= ends[:-1] > starts[1:]
    sizes = table.stored[chunks].tolist()
    raw = (table.codec[chunks] == RAW).tolist()
    for chunk, offset, size, plain, several in zip(chunks, starts.tolist(), sizes, raw, shared.tolist(), strict=True):
        if chunk in small:
            continue
        at = offset - read.start
        if plain and several:
            places.pop(chunk, None)  # the chunk is passed to the sink instead
        if plain and chunk in places:
            if at > done:
                views.append(spare[done:at])
            views.append(places[chunk])
            found[chunk] = places[chunk]
            done = at + size
        else:
            found[chunk] = spare[at : at + size]
    if done < read.length:
        views.append(spare[done : read.length])
    return views, found


# -- repair while reading --


NEARBY = 8  # maximum number of other checkpoints to search in a tier

Lost = dict[int, CorruptError | StoreError]


async def fetch_repaired(
    store: Store,
    checkpoint: CheckpointId,
    table: Table,
    chunks: Sequence[int],
    sink: Sink,
    others: Sequence[str] = (),
    room: Room | None = None,
) -> list[str]:
    """Pass all of these chunks to `sink`, each verified. Return a description of the chunks that were repaired.

    Raise CorruptError or StoreError if the bytes of a chunk cannot be found. If a tier that may have the missing bytes
    cannot be read now, its error is raised instead (`is_unreadable`).

    others: URLs of tiers with the same checkpoint
    room: addresses to which chunks may be read instead. Repaired chunks still go to `sink`
    """
    missing: Lost = {}

    def note(chunks: Sequence[int], error: CorruptError | StoreError) -> None:
        missing.update(dict.fromkeys(chunks, error))

    batches = plan_reads(table, chunks, far=True)  # long reads, even from a folder
    if store.remote or not hasattr(store, "scatter"):
        await fetch_chunks(store, table, batches, sink, on_damage=note)
    else:
        await fetch_local(store, table, batches, sink, note, room)
        # `scatter` reads only once, and several chunks together. `fetch_chunks` retries transient errors.
        failed = {chunk: error for chunk, error in missing.items() if isinstance(error, StoreError)}
        lost = [chunk for chunk, error in failed.items() if isinstance(error, NotFoundError)]
        again = plan_reads(table, lost, far=True)
        again += [one for chunk in failed.keys() - set(lost) for one in plan_reads(table, [chunk])]
        for chunk in failed:
            del missing[chunk]
        await fetch_chunks(store, table, again, sink, on_damage=note)
    if not missing:
        return []
    repaired, unreadable = list[str](), list[StoreError]()  # errors of other tiers that do not prove damage
    first = next(iter(missing.values()))

    def skip(error: CheckpointError) -> None:
        if isinstance(error, StoreError) and is_unreadable(error):
            unreadable.append(error)

    for url in (store.url, *others):
        try:
            async with opened(url) as other:
                state = (await open_run(url, other)).state
                for commit in _candidates(state, checkpoint, url == store.url):
                    before = set(missing)
                    try:
                        async for theirs in tables_of(other, commit, {table.name_of(chunk) for chunk in missing}):
                            await _take(other, theirs, table, missing, sink, skip)
                            if not missing:
                                break
                    except (CorruptError, FormatError, StoreError) as error:
                        skip(error)
                        logger.warning("cannot repair from step %d of %s: %s", commit.step, url, error)
                    if found := sorted(before - missing.keys()):
                        names = list(dict.fromkeys(map(table.name_of, found)))
                        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                        pieces = "1 damaged piece" if len(found) == 1 else f"{len(found)} damaged pieces"
                        where = url if commit.checkpoint == checkpoint else f"{url}, step {commit.step}"
                        repaired.append(f"{pieces} ({', '.join(names[:3])}{more}) came from {where}")
                    if not missing:
                        break
        except (CorruptError, FormatError, NoCheckpointError, StoreError) as error:
            skip(error)
            logger.warning("step %d cannot be repaired from %s: %s", checkpoint.step, url, error)
        if not missing:
            break
    for text in repaired:
        logger.warning("step %d in %s: %s; the first error: %s", checkpoint.step, store.url, text, first)
    if missing:
        errors = [*missing.values(), *unreadable]
        raise next((error for error in errors if is_unreadable(error)), errors[0])
    return repaired


def _candidates(state: RunState, checkpoint: CheckpointId, here: bool) -> list[Commit]:
    same = state.commits.get(checkpoint)
    others = [c for c in state.lineage() if c.checkpoint != checkpoint]
    others.sort(key=lambda c: abs(c.step - checkpoint.step))  # nearby steps have the most bytes in common
    return [*([same] if same is not None and not here else []), *others[:NEARBY]]


async def _take(
    other: Store, theirs: Table, table: Table, missing: Lost, sink: Sink, skip: Callable[[CheckpointError], None]
) -> None:
    """Read missing chunks through another table, by digest. Remove the chunks that were found from `missing`."""
    wanted: dict[Content, list[int]] = {}
    for chunk in missing:
        wanted.setdefault(table.content(chunk), []).append(chunk)
    keys = zip(map(bytes, theirs.digest), theirs.length.tolist(), strict=True)
    alike = {chunk: wanted[key] for chunk, key in enumerate(keys) if key in wanted and chunk < theirs.owned}
    done: set[int] = set()

    def take(chunk: int, data: memoryview) -> None:
        for same in alike[chunk]:
            if same not in done:
                sink(same, data)
                done.add(same)

    reads = plan_reads(theirs, alike, far=other.remote)
    await fetch_chunks(other, theirs, reads, take, on_damage=lambda chunks, error: skip(error))
    for chunk in done:
        del missing[chunk]
