"""A snapshot in memory becomes files in a store: pack, table, part, in this order, each durable before the next.

Nothing here makes a checkpoint exist; that is one record in the log (`ckpt.commit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.codec import DIGEST_SIZE, blob_digest, file_digest
from ckpt.errors import FullError, StoreError
from ckpt.events import point
from ckpt.manifest import Attempt, PackInfo, Part, pack_key, part_key, table_key
from ckpt.plan import BLOB, Layout, pages
from ckpt.store import Store
from ckpt.table import Shard, Table

CHUNK = 8 << 20  # one write; large enough for full speed, small enough for several in flight
IN_FLIGHT = 4
PARTS_IN_FLIGHT = 8  # handed to a store that takes parts, which sends as many at once as it finds right


@dataclass(frozen=True)
class Snapshot:
    """One rank's frozen state. `data` lies in the order of `layout.arrangement`; `values` are tagged plain values."""

    attempt: Attempt
    layout: Layout
    data: memoryview
    values: list[Any]
    finite: bool | None = None


@dataclass(frozen=True)
class Written:
    """What the committer needs to know of a stored part."""

    part: Part
    digest: str
    table: Table


async def write_part(
    store: Store,
    snapshot: Snapshot,
    *,
    number: int = 0,
    reason: str = "due",
    on_bytes: Callable[[int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Written:
    """Store one rank's share of an attempt. After an error nothing of it counts; write again with a higher `number`.

    `check` raises if the snapshot has changed meanwhile; it is called before anything counts.
    """
    layout, rank = snapshot.layout, snapshot.layout.rank
    key = pack_key(snapshot.attempt, rank, number)
    header = layout.arrangement.header
    digesting = asyncio.ensure_future(asyncio.to_thread(digest_blobs, layout, snapshot.data))  # meanwhile
    try:
        await _write_pack(store, key, header, snapshot.data, on_bytes)
    except BaseException:
        await asyncio.wait((digesting,))  # it reads memory that is somebody else's from then on
        raise
    try:
        digests = await digesting
        check()
        table = build_table(layout, key, digests)
        raw_table = table.to_bytes()
        await store.put(table_key(snapshot.attempt, rank, number), raw_table, create=True)
        point("table.stored")
    except BaseException:
        await _drop(store, key)
        raise
    part = Part(
        attempt=str(snapshot.attempt),
        rank=rank,
        number=number,
        world=layout.world,
        layout=layout.to_json(),
        layout_digest=layout.digest,
        values=snapshot.values,
        table=file_digest(raw_table),
        packs=[PackInfo(key, len(header) + len(snapshot.data), len(header), file_digest(header))],
        created=time.time(),
        reason=reason,
        finite=snapshot.finite,
    )
    raw_part = part.to_bytes()
    try:
        await store.put(part_key(snapshot.attempt, rank, number), raw_part, create=True)
    except FullError:
        await _drop(store, key)
        raise
    # After any other error here the part may be there all the same, and others may have found it and the pack: only
    # the log can say that they do not count, and the clean-up takes them.
    point("part.stored")
    return Written(part, file_digest(raw_part), table)


async def _drop(store: Store, pack: str) -> None:
    """Without its part no record can ever name the pack; do not leave gigabytes on a disk that may be full."""
    with contextlib.suppress(StoreError):
        await store.delete(pack)


async def _write_pack(
    store: Store, key: str, header: bytes, data: memoryview, on_bytes: Callable[[int], None] | None
) -> None:
    """Header and data as one object, in ranges as the store wants them."""

    async def piece(offset: int, length: int) -> memoryview:
        start = offset - len(header)
        if start >= 0:
            return data[start : start + length]
        return _page_aligned(header[offset:] + data[: max(0, start + length)])

    await upload_from(store, key, len(header) + len(data), piece, on_bytes)


async def upload_from(
    store: Store,
    key: str,
    size: int,
    piece: Callable[[int, int], Awaitable[memoryview]],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Store `size` bytes under a new key: `piece(offset, length)` gives them, range by range, several at a time.

    What a piece raises, and what the store raises, ends the upload; nothing of it is left then.
    """
    upload = await store.upload(key, size=size)
    point("pack.opened")
    try:
        length = upload.part or CHUNK
        room = getattr(store, "in_flight", PARTS_IN_FLIGHT * length) // length  # as far as it is limited
        window = asyncio.Semaphore(max(1, min(PARTS_IN_FLIGHT, room)) if upload.part else IN_FLIGHT)

        async def write(offset: int) -> None:
            try:
                view = await piece(offset, min(length, size - offset))
                await upload.write_at(offset, view)
            finally:
                window.release()
            if on_bytes is not None:
                on_bytes(len(view))

        async with asyncio.TaskGroup() as group:
            for offset in range(0, size, length):
                await window.acquire()  # the ranges are begun in their order
                group.create_task(write(offset))
        await upload.finish()
    except BaseException as error:
        await upload.abort()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise


def _page_aligned(data: bytes) -> memoryview:
    """A copy whose address suits direct I/O."""
    view = memoryview(mmap.mmap(-1, pages(len(data))))[: len(data)]
    view[:] = data
    return view


def digest_blobs(layout: Layout, data: memoryview) -> bytes:
    """The digests of all blobs, joined, in pack order."""
    return b"".join(blob_digest(data[b.offset : b.offset + b.length]) for b in layout.arrangement.blobs)


def build_table(layout: Layout, pack: str, digests: bytes | None) -> Table:
    """The table of one rank's pieces in one raw pack. `digests`: None if nobody has digested them, then zeros."""
    arrangement = layout.arrangement
    pieces = [layout.tensors[i] for i in arrangement.order]
    blobs = arrangement.blobs
    length = np.array([b.length for b in blobs], np.int64)
    raw = bytes(len(blobs) * DIGEST_SIZE) if digests is None else digests[: len(blobs) * DIGEST_SIZE]
    return Table(
        shards=tuple(Shard(t.name, t.dtype, t.full, t.at, t.shape, layout.rank, t.instance) for t in pieces),
        starts=np.cumsum([0, *(-(-t.nbytes // BLOB) for t in pieces)], dtype=np.int64),
        pack=np.zeros(len(blobs), np.int64),
        offset=np.array([b.offset for b in blobs], np.int64) + len(arrangement.header),
        stored=length,
        length=length,
        codec=np.zeros(len(blobs), np.int64),
        base=np.full(len(blobs), -1, np.int64),
        digest=np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_SIZE),
        packs=(pack,),
    )
