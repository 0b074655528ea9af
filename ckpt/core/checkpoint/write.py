"""Writes a snapshot from memory to a store: first its data files, then its manifest.

    write_part       one raw data file, digested during the write -> finish_manifest
    DataFileWriter   encoded chunks -> data files; then `table_of` -> finish_manifest

The data files are durable before the manifest is stored. This module does not create a checkpoint, because only a
record in the log does that (`ckpt.core.checkpoint.commits`).

A data file of encoded chunks has one entry for each chunk, or for a whole tensor if all its chunks are raw. A data file
is closed at a size that is small compared to the state, so its length is known before its first byte is sent, it needs
little memory, and unneeded data can be deleted in small units.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import mmap
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.core.checkpoint.incremental import ChunkPlan, Digests
from ckpt.core.checkpoint.incremental import WrittenManifest as WrittenManifest
from ckpt.core.checkpoint.manifests import load_manifest
from ckpt.core.format.codec import RAW
from ckpt.core.format.columns import Replicas, distinct
from ckpt.core.format.digest import DIGEST_SIZE, chunk_digest, file_digest
from ckpt.core.format.layout import METADATA, NATIVE, Layout, TensorSpec, pages
from ckpt.core.format.manifest import (
    MAX_JSON,
    CheckpointId,
    DataFile,
    Manifest,
    data_key,
    manifest_key,
    metadata_of,
    owner,
)
from ckpt.core.format.table import SavedShards, Table, empty
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    ExistsError,
    FormatError,
    FullError,
    NotFoundError,
    SaveError,
    StoreError,
    TruncatedError,
)
from ckpt.failpoints import point
from ckpt.store import PAGE, Store

CHUNK = 8 << 20  # bytes of a write; large enough for full speed, small enough for several in flight
IN_FLIGHT = 4
PARTS_IN_FLIGHT = 8  # maximum parts in flight in a store with multipart uploads; the store may allow fewer


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's frozen state. `data`: bytes in the order of `layout.arrangement`. `values`: tagged plain values.

    `info`, `parents`: see `ckpt.core.format.manifest.Manifest`.
    """

    checkpoint: CheckpointId
    layout: Layout
    data: memoryview
    values: list[Any]
    finite: bool | None = None
    replicas: Replicas = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()


async def write_part(
    store: Store,
    snapshot: RankSnapshot,
    *,
    numbers: Iterator[int] | None = None,
    reason: str = "due",
    on_bytes: Callable[[int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> WrittenManifest:
    """Store one rank's files of a checkpoint, with raw data. After an error, none of the files counts.

    numbers: numbers for data files that are unused for this rank and checkpoint
    check: raises an error if the snapshot has changed. It is called before the manifest is stored
    """
    layout, rank = snapshot.layout, snapshot.layout.rank
    key = data_key(snapshot.checkpoint, rank, 0 if numbers is None else next(numbers))
    header, data = layout.arrangement.header(metadata_of(key)), snapshot.data

    async def piece(offset: int, length: int) -> memoryview:
        start = offset - len(header)
        if start >= 0:
            return data[start : start + length]
        copy = page_aligned(length)
        copy[:] = header[offset : offset + length] + data[: max(0, start + length)]
        return copy

    digesting = asyncio.ensure_future(asyncio.to_thread(digest_chunks, layout, data))  # in the background
    digesting.add_done_callback(lambda done: done.cancelled() or done.exception())  # always fetch its error
    try:
        await upload_from(store, key, len(header) + len(data), piece, on_bytes, first=len(header))
    except BaseException:
        await asyncio.wait((digesting,))  # the thread reads memory that the caller may change afterwards
        raise
    try:
        digests = await digesting
    except BaseException:
        await drop(store, [key])
        raise
    file = DataFile(key, len(header) + len(data), len(header), file_digest(header))
    table = build_table(layout, key, digests)
    return await finish_manifest(store, snapshot, table, [file], reason=reason, check=check)


async def finish_manifest(
    store: Store,
    snapshot: RankSnapshot,
    table: Table,
    files: list[DataFile],
    *,
    reason: str,
    base: WrittenManifest | None = None,
    check: Callable[[], None] = lambda: None,
) -> WrittenManifest:
    """Store the manifest, after the data files. If this fails before another process can have seen the manifest, delete
    the data files that were written for it.

    A rank's manifest is created only once. If it already exists, a dead writer stored it, or a request was repeated. In
    that case, the existing manifest is used if it has the same content. Otherwise this checkpoint fails.

    files: all data files in the table, including files of older checkpoints
    base: the checkpoint that this one was built on
    """
    checkpoint, rank = snapshot.checkpoint, snapshot.layout.rank
    own = [file.key for file in files if owner(file.key) == checkpoint]
    try:
        check()
        manifest = Manifest(
            checkpoint=str(checkpoint),
            rank=rank,
            world=snapshot.layout.world,
            layout=snapshot.layout.shared,
            values=snapshot.values,
            table=table.to_bytes(),
            files=files,
            reason=reason,
            finite=snapshot.finite,
            replicas=snapshot.replicas,
            info=snapshot.info,
            parents=list(snapshot.parents),
            needs=[] if base is None else [base.manifest.checkpoint],
            chain=0 if base is None else base.manifest.chain + 1,
            full="" if base is None else str(base.full),
        )
        raw = manifest.to_bytes()
        if len(raw) > MAX_JSON:
            raise SaveError(f"step {checkpoint.step}: the manifest of rank {rank} has more than {MAX_JSON} bytes")
    except BaseException:
        await drop(store, own)
        raise
    try:
        await store.put(manifest_key(checkpoint, rank), raw, create=True)
    except FullError:
        await drop(store, own)
        raise
    except ExistsError:
        there = await _stored_before(store, manifest, table)
        if there.digest != file_digest(raw):
            await drop(store, [key for key in own if key not in there.files])
        return there
    # After other errors, the manifest may exist, and other ranks may have found it. So only the log can abort it, and
    # clean-up deletes its files.
    point("manifest.stored")
    return WrittenManifest(manifest, file_digest(raw), table)


async def _stored_before(store: Store, manifest: Manifest, table: Table) -> WrittenManifest:
    """Return this rank's manifest from the store. Raise SaveError if it does not have the same content."""
    checkpoint = CheckpointId.parse(manifest.checkpoint)
    name = f"step {checkpoint.step}: {manifest_key(checkpoint, manifest.rank)} in {store.url}"
    try:
        there = await load_manifest(store, checkpoint, manifest.rank)
    except (CorruptError, FormatError, NotFoundError, TruncatedError) as error:
        raise SaveError(f"{name} was stored by an earlier writer and is damaged: {error}") from None
    same = (there.manifest.layout, there.manifest.values) == (manifest.layout, manifest.values)
    same = same and there.table.columns.same(table.columns)
    if not same or not np.array_equal(there.table.digest[: there.table.owned], table.digest[: table.owned]):
        raise SaveError(f"{name} was stored by an earlier writer, with other values")
    return there


async def drop(store: Store, files: Iterable[str]) -> None:
    """Delete data files without a manifest, because no record can name them, and the disk may be full."""
    for file in files:
        with contextlib.suppress(StoreError):
            await store.delete(file)


async def upload_from(
    store: Store,
    key: str,
    size: int,
    piece: Callable[[int, int], Awaitable[memoryview]],
    on_bytes: Callable[[int], None] | None = None,
    *,
    first: int = 0,
) -> None:
    """Store `size` bytes under a new key. `piece(offset, length)` returns a range. Several calls run at a time.

    first: length of the header, which gets its own range, so that data is not copied. Multipart uploads ignore it

    An error of a piece or of the store aborts the upload, which leaves no file.
    """
    upload = await store.upload(key, size=size)
    point("data_file.opened")
    try:
        length = upload.part or CHUNK
        if upload.part:
            first = 0
        starts = [*([0] if first else ()), *range(first, size, length), size]
        room = getattr(store, "in_flight", PARTS_IN_FLIGHT * length) // length  # the store's limit, if it has one
        window = asyncio.Semaphore(max(1, min(PARTS_IN_FLIGHT, room)) if upload.part else IN_FLIGHT)

        async def write(offset: int, end: int) -> None:
            try:
                view = await piece(offset, end - offset)
                await upload.write_at(offset, view)
            finally:
                window.release()
            if on_bytes is not None:
                on_bytes(len(view))

        async with asyncio.TaskGroup() as group:
            for offset, end in itertools.pairwise(starts):
                await window.acquire()  # start the ranges in order
                group.create_task(write(offset, end))
        await upload.finish()
    except BaseException as error:
        await upload.abort()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise


def page_aligned(size: int) -> memoryview:
    """Return memory at a page-aligned address, which direct I/O needs."""
    return memoryview(mmap.mmap(-1, max(PAGE, pages(size))))[:size]


def digest_chunks(layout: Layout, data: memoryview) -> bytes:
    """Return the digests of all chunks in file order, as one byte string."""
    return b"".join(chunk_digest(data[b.offset : b.offset + b.length]) for b in layout.arrangement.chunks)


def build_table(layout: Layout, file: str, digests: bytes | None, begin: int | None = None) -> Table:
    """Return one rank's chunk table for a raw data file. `digests`: None if they are unknown, which gives zeros.
    `begin`: offset of the data in the file; default: after the header."""
    arrangement = layout.arrangement
    if begin is None:
        begin = len(arrangement.header(metadata_of(file)))
    offset, length = arrangement.chunk_columns
    raw = bytes(len(length) * DIGEST_SIZE) if digests is None else digests[: len(length) * DIGEST_SIZE]
    return Table(
        shards=SavedShards.of_layout(layout),
        starts=np.array(arrangement.chunk_starts, np.int64),
        file=np.zeros(len(length), np.int64),
        offset=offset + begin,
        stored=length,
        length=length,
        codec=np.zeros(len(length), np.int64),
        base=np.full(len(length), -1, np.int64),
        digest=np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_SIZE),
        stored_digest=np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_SIZE),
        files=(file,),
    )


# -- data files of encoded chunks --


FILE = (16 << 20, 64 << 20)  # minimum and maximum size of a data file, in bytes
FILES = 64  # maximum number of data files of a manifest, if the sizes allow it
UPLOADS = 2  # number of concurrent uploads of data files


def file_size(total: int) -> int:
    """Return the size at which data files are closed, given `total` bytes to store."""
    return min(max(total // FILES, FILE[0]), FILE[1])


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk in its stored form. `base`: the row of its base in the previous table, -1 if it is not a delta."""

    chunk: int
    codec: int
    data: bytes | memoryview
    base: int = -1


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """The location of a stored chunk in a data file, and its encoding."""

    file: int
    offset: int
    stored: int
    codec: int
    base: int
    digest: bytes


class DataFileWriter:
    """Puts encoded chunks into data files, and uploads each file when it is full."""

    def __init__(
        self,
        store: Store,
        snapshot: RankSnapshot,
        numbers: Iterator[int],
        size: int,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Prepare to write chunks of `snapshot` to `store`.

        numbers: unused numbers for data files
        size: number of bytes at which a data file is closed
        on_bytes: called with the number of plain bytes that were stored
        """
        self.store, self.snapshot, self.numbers, self.size = store, snapshot, numbers, size
        self.on_bytes = on_bytes
        self.files: list[DataFile] = []
        self.places: dict[int, ChunkLocation] = {}
        self.nbytes, self.busy_s = 0, 0.0
        self._items: list[Encoded] = []
        self._held = 0
        self._room = asyncio.Semaphore(UPLOADS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = 0.0
        self._failed: list[BaseException] = []

    async def add(self, encoded: Encoded) -> None:
        self._items.append(encoded)
        self._held += len(encoded.data)
        if self._held >= self.size:
            await self._send()

    async def finish(self) -> None:
        """Send the remaining chunks, and wait until all chunks are stored."""
        if self._items:
            await self._send()
        await asyncio.gather(*self._tasks)
        self._raise()
        point("data_files.stored")

    async def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await drop(self.store, [file.key for file in self.files])

    def _raise(self) -> None:
        if self._failed:
            raise self._failed[0]

    async def _send(self) -> None:
        await self._room.acquire()
        self._raise()
        items, self._items, self._held = self._items, [], 0
        number = next(self.numbers) or next(self.numbers)  # number 0 is for a raw data file
        key, file = data_key(self.snapshot.checkpoint, self.snapshot.layout.rank, number), len(self.files)
        header = data_file_header(self.snapshot.layout, items, metadata_of(key))
        data = await asyncio.to_thread(_joined, header, items)
        offset = len(header)
        for item in items:
            digest = chunk_digest(item.data) if item.codec != RAW else b""
            self.places[item.chunk] = ChunkLocation(file, offset, len(item.data), item.codec, item.base, digest)
            offset += len(item.data)
        self.files.append(DataFile(key, len(data), len(header), file_digest(header)))
        self.nbytes += len(data)
        if not self._tasks:
            self._began = time.monotonic()
        chunks = self.snapshot.layout.arrangement.chunks
        task = asyncio.ensure_future(self._upload(key, data, sum(chunks[item.chunk].length for item in items)))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _upload(self, key: str, data: memoryview, plain: int) -> None:
        async def piece(offset: int, length: int) -> memoryview:
            return data[offset : offset + length]

        def arrived(nbytes: int) -> None:
            self.on_bytes(nbytes * plain // len(data))

        try:
            await upload_from(self.store, key, len(data), piece, arrived)
        except CheckpointError as error:
            self._failed.append(error)
        finally:
            self._room.release()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.busy_s += time.monotonic() - self._began
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(error)


def data_file_header(layout: Layout, items: Sequence[Encoded], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a data file. Each chunk is an entry, but a tensor whose chunks are all in this file and raw
    is a single entry with the tensor's dtype."""
    entries, at = dict[str, Any]({METADATA: metadata}), 0
    groups = _grouped(layout, items)
    for tensor, numbers, group in groups:
        nbytes = sum(len(item.data) for item in group)
        if numbers is None and tensor.dtype in NATIVE:
            name = _unused(tensor.key, entries)
            entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
            continue
        for i, item in enumerate(group):
            name = _unused(f"{tensor.key}[{i if numbers is None else numbers[i]}]", entries)
            size = len(item.data)
            entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // 64) * 64
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def _unused(name: str, entries: dict[str, Any]) -> str:
    """Return a unique entry name, because a tensor may have the name of another tensor's chunk."""
    while name in entries:
        name += "'"
    return name


def _grouped(layout: Layout, items: Sequence[Encoded]) -> Iterator[tuple[TensorSpec, list[int] | None, list[Encoded]]]:
    """Yield each tensor, its chunk numbers (None if `items` has all its chunks raw), and the items of these chunks."""
    chunks, first = layout.arrangement.chunks, layout.arrangement.first_chunk
    at = 0
    while at < len(items):
        tensor = chunks[items[at].chunk].tensor
        end = at
        while end < len(items) and chunks[items[end].chunk].tensor == tensor:
            end += 1
        group = list(items[at:end])
        spec = layout.tensors[tensor]
        whole = all(item.codec == RAW for item in group) and sum(len(item.data) for item in group) == spec.nbytes
        yield spec, None if whole else [item.chunk - first[tensor] for item in group], group
        at = end


def _joined(header: bytes, items: Sequence[Encoded]) -> memoryview:
    view = page_aligned(len(header) + sum(len(item.data) for item in items))
    view[: len(header)] = header
    at = len(header)
    for item in items:
        view[at : at + len(item.data)] = item.data
        at += len(item.data)
    return view


def table_of(
    layout: Layout, plan: ChunkPlan, digests: Digests, previous: WrittenManifest | None, writer: DataFileWriter
) -> tuple[Table, list[DataFile]]:
    """Return the chunk table of a manifest, and its data files. `writer` has the locations of new chunks.

    Rows of the previous table that are needed as bases are added after the rows of the layout.
    """
    count, old = len(digests), empty() if previous is None else previous.table
    columns: dict[str, Any] = {name: np.zeros(count, np.int64) for name in ("file", "offset", "stored", "codec")}
    columns["length"] = np.array([chunk.length for chunk in layout.arrangement.chunks], np.int64)
    columns["digest"], columns["stored_digest"] = digests, digests.copy()
    bases = np.full(count, -1, np.int64)  # rows of the previous table
    taken = np.flatnonzero(plan.taken >= 0)
    rows = plan.taken[taken]
    bases[taken] = old.base[rows]
    for name in ("offset", "stored", "codec", "stored_digest"):
        columns[name][taken] = getattr(old, name)[rows]
    for chunk in np.flatnonzero(plan.taken < 0).tolist():
        place = writer.places.get(chunk) or writer.places[int(plan.same[chunk])]
        for name in ("file", "offset", "stored", "codec"):
            columns[name][chunk] = getattr(place, name)
        if place.codec != RAW:
            columns["stored_digest"][chunk] = np.frombuffer(place.digest, np.uint8)
        bases[chunk] = place.base
    based = distinct(bases[bases >= 0])
    columns["base"] = np.where(bases >= 0, count + np.searchsorted(based, bases), -1)
    files = {file.key: file for file in writer.files}
    numbers = np.zeros(len(old.files), np.int64)  # maps numbers of data files in the previous table to the new table
    for number in distinct(old.file[np.concatenate([rows, based])]).tolist():
        assert previous is not None
        numbers[number] = len(files)
        files[old.files[number]] = previous.files[old.files[number]]
    columns["file"][taken] = numbers[old.file[rows]]
    for name, column in columns.items():
        more = numbers[old.file[based]] if name == "file" else getattr(old, name)[based]
        columns[name] = np.concatenate([column, more])
    starts = np.array(layout.arrangement.chunk_starts, np.int64)
    return Table(SavedShards.of_layout(layout), starts, files=tuple(files), **columns), list(files.values())
