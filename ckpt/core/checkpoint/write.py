"""Writes a snapshot from memory to a store: first its data files, then its manifest. The data files are durable before
the manifest.

This module does not create a checkpoint. Only a record in the log does (`ckpt.core.checkpoint.commit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.core.checkpoint.incremental import Previous
from ckpt.core.checkpoint.incremental import WrittenPart as WrittenPart
from ckpt.core.checkpoint.parts import load_part
from ckpt.core.format.digest import DIGEST_SIZE, blob_digest, file_digest
from ckpt.core.format.layout import Layout, pages
from ckpt.core.format.manifest import MAX_JSON, Attempt, PackInfo, Part, data_key, manifest_key, metadata_of, owner
from ckpt.core.format.replicas import Replicas
from ckpt.core.format.shards import SavedShards
from ckpt.core.format.table import Table
from ckpt.errors import (
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

CHUNK = 8 << 20  # bytes of one write: large enough for full speed, small enough for several in flight
IN_FLIGHT = 4
PARTS_IN_FLIGHT = 8  # for a store with multipart uploads, which limits parallel requests itself


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's frozen state. `data`: bytes in the order of `layout.arrangement`. `values`: tagged plain values.

    `info`, `parents`: see `ckpt.core.format.manifest.Part`.
    """

    attempt: Attempt
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
) -> WrittenPart:
    """Store one rank's share as raw bytes. After an error, none of it counts.

    numbers: of data files; none was used before for this checkpoint and rank.
    check: raises if the snapshot has changed. It is called before anything counts.
    """
    layout, rank = snapshot.layout, snapshot.layout.rank
    key = data_key(snapshot.attempt, rank, 0 if numbers is None else next(numbers))
    header = layout.arrangement.header(metadata_of(key))
    digesting = asyncio.ensure_future(asyncio.to_thread(digest_blobs, layout, snapshot.data))  # in the background
    digesting.add_done_callback(lambda done: done.cancelled() or done.exception())  # the write may fail first
    try:
        await _write_pack(store, key, header, snapshot.data, on_bytes)
    except BaseException:
        await asyncio.wait((digesting,))  # it reads memory that the caller may change afterwards
        raise
    try:
        digests = await digesting
    except BaseException:
        await drop(store, [key])
        raise
    pack = PackInfo(key, len(header) + len(snapshot.data), len(header), file_digest(header))
    table = build_table(layout, key, digests)
    return await finish_part(store, snapshot, table, [pack], reason=reason, check=check)


async def finish_part(
    store: Store,
    snapshot: RankSnapshot,
    table: Table,
    packs: list[PackInfo],
    *,
    reason: str,
    base: Previous | None = None,
    check: Callable[[], None] = lambda: None,
) -> WrittenPart:
    """Store the manifest, after the data files. If this fails before the manifest can have been seen, delete the data
    files that were written for it.

    The manifest of a rank is created once. If it exists, a dead writer stored it, or a request was repeated. Then the
    existing manifest counts if it has the same content. Otherwise this checkpoint fails.

    packs: all data files that the table names, including those of older checkpoints.
    base: the checkpoint that it was built on.
    """
    attempt, rank = snapshot.attempt, snapshot.layout.rank
    own = [pack.key for pack in packs if owner(pack.key) == attempt]
    try:
        check()
        part = _part(snapshot, table.to_bytes(), packs, reason, base)
        raw_part = part.to_bytes()
        if len(raw_part) > MAX_JSON:
            raise SaveError(f"step {attempt.step}: the manifest of rank {rank} has {len(raw_part)} bytes, too many")
    except BaseException:
        await drop(store, own)
        raise
    try:
        await store.put(manifest_key(attempt, rank), raw_part, create=True)
    except FullError:
        await drop(store, own)
        raise
    except ExistsError:
        there = await _stored_before(store, part, table)
        if there.digest != file_digest(raw_part):
            await drop(store, [key for key in own if key not in there.packs])
        return there
    # After other errors the manifest may exist, and other ranks may have found it. Only the log can abort it, and the
    # clean-up deletes its files.
    point("part.stored")
    return WrittenPart(part, file_digest(raw_part), table)


async def _stored_before(store: Store, part: Part, table: Table) -> WrittenPart:
    """Return the manifest of this rank from the store. Raise SaveError unless it has the same content."""
    attempt = Attempt.parse(part.attempt)
    name = f"step {attempt.step}: {manifest_key(attempt, part.rank)} in {store.url}"
    try:
        there = await load_part(store, attempt, part.rank)
    except (CorruptError, FormatError, NotFoundError, TruncatedError) as error:
        raise SaveError(f"{name} is from an earlier writer and damaged: {error}") from None
    same = (there.part.layout, there.part.values) == (part.layout, part.values)
    same = same and there.table.columns.same(table.columns)
    if not same or not np.array_equal(there.table.digest[: there.table.owned], table.digest[: table.owned]):
        raise SaveError(f"{name} is from an earlier writer, which saved other values")
    return there


def _part(snapshot: RankSnapshot, table: bytes, packs: list[PackInfo], reason: str, base: Previous | None) -> Part:
    layout = snapshot.layout
    return Part(
        attempt=str(snapshot.attempt),
        rank=layout.rank,
        world=layout.world,
        layout=layout.shared,
        values=snapshot.values,
        table=table,
        packs=packs,
        reason=reason,
        finite=snapshot.finite,
        replicas=snapshot.replicas,
        info=snapshot.info,
        parents=list(snapshot.parents),
        needs=[] if base is None else [base.part.attempt],
        chain=0 if base is None else base.part.chain + 1,
        full="" if base is None else str(base.full),
    )


async def drop(store: Store, packs: Iterable[str]) -> None:
    """Delete data files without a manifest. No record can name them, and the disk may be full."""
    for pack in packs:
        with contextlib.suppress(StoreError):
            await store.delete(pack)


async def _write_pack(
    store: Store, key: str, header: bytes, data: memoryview, on_bytes: Callable[[int], None] | None
) -> None:
    """Write header and data as one object, in ranges that suit the store."""

    async def piece(offset: int, length: int) -> memoryview:
        start = offset - len(header)
        if start >= 0:
            return data[start : start + length]
        return _page_aligned(header[offset : offset + length] + data[: max(0, start + length)])

    await upload_from(store, key, len(header) + len(data), piece, on_bytes, first=len(header))


async def upload_from(
    store: Store,
    key: str,
    size: int,
    piece: Callable[[int, int], Awaitable[memoryview]],
    on_bytes: Callable[[int], None] | None = None,
    *,
    first: int = 0,
) -> None:
    """Store `size` bytes under a new key. `piece(offset, length)` returns them, range by range, several at a time.

    first: length of the first range, if the store takes any, so that the data after the header need not be copied.

    An error of a piece or of the store aborts the upload, which then leaves nothing.
    """
    upload = await store.upload(key, size=size)
    point("pack.opened")
    try:
        length = upload.part or CHUNK
        room = getattr(store, "in_flight", PARTS_IN_FLIGHT * length) // length  # if it is limited
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
            for offset, end in _ranges(size, length, 0 if upload.part else first):
                await window.acquire()  # ranges start in order
                group.create_task(write(offset, end))
        await upload.finish()
    except BaseException as error:
        await upload.abort()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise


def _ranges(size: int, length: int, first: int) -> list[tuple[int, int]]:
    """Return (start, end) of the ranges of an object: one of `first` bytes, if not 0, then of `length` each."""
    starts = [*([0] if first else ()), *range(first, size, length)]
    return list(zip(starts, [*starts[1:], size], strict=False))


def page_aligned(size: int) -> memoryview:
    """Return memory at an address that suits direct I/O."""
    return memoryview(mmap.mmap(-1, max(PAGE, pages(size))))[:size]


def _page_aligned(data: bytes) -> memoryview:
    """Return a copy at an address that suits direct I/O."""
    view = page_aligned(len(data))
    view[:] = data
    return view


def digest_blobs(layout: Layout, data: memoryview) -> bytes:
    """Return the digests of all chunks, joined, in file order."""
    return b"".join(blob_digest(data[b.offset : b.offset + b.length]) for b in layout.arrangement.blobs)


def build_table(layout: Layout, pack: str, digests: bytes | None, begin: int | None = None) -> Table:
    """Return one rank's chunk table for a raw data file. `digests`: None if unknown, then zeros. `begin`: where
    the data begins, default: after the header."""
    arrangement = layout.arrangement
    if begin is None:
        begin = len(arrangement.header(metadata_of(pack)))
    offset, length = arrangement.blob_columns
    raw = bytes(len(length) * DIGEST_SIZE) if digests is None else digests[: len(length) * DIGEST_SIZE]
    return Table(
        shards=SavedShards.of_layout(layout),
        starts=np.array(arrangement.blob_starts, np.int64),
        pack=np.zeros(len(length), np.int64),
        offset=offset + begin,
        stored=length,
        length=length,
        codec=np.zeros(len(length), np.int64),
        base=np.full(len(length), -1, np.int64),
        digest=np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_SIZE),
        stored_digest=np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_SIZE),
        packs=(pack,),
    )
