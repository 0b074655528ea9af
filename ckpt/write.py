"""A snapshot in memory becomes files in a store: pack, table, part, in this order, each durable before the next.

Nothing here makes a checkpoint exist; that is one record in the log (`ckpt.commit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.codec import DIGEST_SIZE, blob_digest, file_digest
from ckpt.errors import StoreError
from ckpt.events import point
from ckpt.manifest import Attempt, PackInfo, Part, pack_key, part_key, table_key
from ckpt.plan import Layout, pages
from ckpt.store import Store
from ckpt.table import Shard, Table

CHUNK = 8 << 20  # one write; large enough for full speed, small enough for several in flight
IN_FLIGHT = 4


@dataclass(frozen=True)
class Snapshot:
    """One rank's frozen state. `data` lies in the order of `layout.arrangement`; `values` are tagged plain values."""

    attempt: Attempt
    layout: Layout
    data: memoryview
    values: list[Any]


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
    rank: int = 0,
    number: int = 0,
    world: int = 1,
    reason: str = "due",
    on_bytes: Callable[[int], None] | None = None,
) -> Written:
    """Store one rank's share of an attempt. After an error nothing of it counts; write again with a higher `number`."""
    key = pack_key(snapshot.attempt, rank, number)
    header = snapshot.layout.arrangement.header
    await _write_pack(store, key, header, snapshot.data, on_bytes)
    try:
        return await _write_part(store, snapshot, key, rank, number, world, reason)
    except BaseException:
        # Without its part no record can ever name the pack; do not leave gigabytes on a disk that may be full.
        with contextlib.suppress(StoreError):
            await store.delete(key)
        raise


async def _write_part(
    store: Store, snapshot: Snapshot, key: str, rank: int, number: int, world: int, reason: str
) -> Written:
    header = snapshot.layout.arrangement.header
    digests = await asyncio.to_thread(digest_blobs, snapshot.layout, snapshot.data)
    table = build_table(snapshot.layout, key, digests, rank)
    raw_table = table.to_bytes()
    await store.put(table_key(snapshot.attempt, rank, number), raw_table, create=True)
    point("table.stored")
    part = Part(
        attempt=str(snapshot.attempt),
        rank=rank,
        number=number,
        world=world,
        layout=snapshot.layout.to_json(),
        layout_digest=snapshot.layout.digest,
        values=snapshot.values,
        table=file_digest(raw_table),
        packs=[PackInfo(key, len(header) + len(snapshot.data), len(header), file_digest(header))],
        created=time.time(),
        reason=reason,
    )
    raw_part = part.to_bytes()
    await store.put(part_key(snapshot.attempt, rank, number), raw_part, create=True)
    point("part.stored")
    return Written(part, file_digest(raw_part), table)


async def _write_pack(
    store: Store, key: str, header: bytes, data: memoryview, on_bytes: Callable[[int], None] | None
) -> None:
    upload = await store.upload(key, size=len(header) + len(data))
    point("pack.opened")
    try:
        window = asyncio.Semaphore(IN_FLIGHT)

        async def write(offset: int, view: memoryview) -> None:
            async with window:
                await upload.write_at(offset, view)
            if on_bytes is not None:
                on_bytes(len(view))

        async with asyncio.TaskGroup() as group:
            group.create_task(write(0, _page_aligned(header)))
            for start in range(0, len(data), CHUNK):
                group.create_task(write(len(header) + start, data[start : start + CHUNK]))
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


def build_table(layout: Layout, pack: str, digests: bytes, rank: int = 0) -> Table:
    """The table of a part that holds whole tensors in one raw pack."""
    arrangement = layout.arrangement
    blobs = arrangement.blobs
    shards = [layout.tensors[i] for i in arrangement.order]
    counts = np.zeros(len(layout.tensors), np.int64)
    owners = np.array([b.tensor for b in blobs], np.int64)
    np.add.at(counts, owners, 1)
    length = np.array([b.length for b in blobs], np.int64)
    return Table(
        shards=tuple(Shard(t.name, t.dtype, t.shape, (0,) * len(t.shape), t.shape, rank) for t in shards),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[list(arrangement.order)], dtype=np.int64)]),
        pack=np.zeros(len(blobs), np.int64),
        offset=np.array([b.offset for b in blobs], np.int64) + len(arrangement.header),
        stored=length,
        length=length,
        codec=np.zeros(len(blobs), np.int64),
        base=np.full(len(blobs), -1, np.int64),
        digest=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_SIZE),
        packs=(pack,),
    )
