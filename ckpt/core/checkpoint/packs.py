"""Collects encoded chunks into data files, and builds the table of their locations.

A data file has one entry for each chunk, or for a whole tensor if all its chunks are raw. A file is closed at a size
that is small compared to the state. So its length is known before its first byte is sent, it needs little memory, and
unneeded data can be deleted in small units.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.core.checkpoint.incremental import BlobPlan, Digests, Previous
from ckpt.core.checkpoint.write import RankSnapshot, drop, page_aligned, upload_from
from ckpt.core.format.codec import RAW
from ckpt.core.format.digest import blob_digest, file_digest
from ckpt.core.format.layout import METADATA, NATIVE, Layout, TensorSpec
from ckpt.core.format.manifest import PackInfo, data_key, metadata_of
from ckpt.core.format.shards import SavedShards
from ckpt.core.format.table import Table
from ckpt.errors import CheckpointError
from ckpt.failpoints import point
from ckpt.store import Store

PACK = (16 << 20, 64 << 20)  # minimum and maximum bytes of a data file
PACKS = 64  # maximum data files of a part, if the sizes allow it
UPLOADS = 2  # concurrent uploads of data files


def pack_size(total: int) -> int:
    """Return the size at which data files are closed, for `total` bytes."""
    return min(max(total // PACKS, PACK[0]), PACK[1])


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk in its stored form. `base`: the row of the previous table that it is a delta against, or -1."""

    blob: int
    codec: int
    data: bytes | memoryview
    base: int = -1


@dataclass(frozen=True, slots=True)
class BlobLocation:
    """Location of a stored chunk."""

    pack: int
    offset: int
    stored: int
    codec: int
    base: int
    digest: bytes


class Packer:
    """Puts encoded chunks into data files, and uploads each file when it is full."""

    def __init__(
        self,
        store: Store,
        snapshot: RankSnapshot,
        numbers: Iterator[int],
        size: int,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Prepare to send chunks of `snapshot` to `store`.

        numbers: unused numbers for data files.
        size: bytes at which a data file is closed.
        on_bytes: called with the number of plain bytes that were stored.
        """
        self.store, self.snapshot, self.numbers, self.size = store, snapshot, numbers, size
        self.on_bytes = on_bytes
        self.packs: list[PackInfo] = []
        self.places: dict[int, BlobLocation] = {}
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
        """Send the remaining chunks, and wait until all are stored."""
        if self._items:
            await self._send()
        await asyncio.gather(*self._tasks)
        self._raise()
        point("packs.stored")

    async def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await drop(self.store, [pack.key for pack in self.packs])

    def _raise(self) -> None:
        if self._failed:
            raise self._failed[0]

    async def _send(self) -> None:
        await self._room.acquire()
        self._raise()
        items, self._items, self._held = self._items, [], 0
        number = next(self.numbers) or next(self.numbers)  # 0 is for raw data
        key, pack = data_key(self.snapshot.attempt, self.snapshot.layout.rank, number), len(self.packs)
        header = pack_header(self.snapshot.layout, items, metadata_of(key))
        data = await asyncio.to_thread(_joined, header, items)
        offset = len(header)
        for item in items:
            digest = blob_digest(item.data) if item.codec != RAW else b""
            self.places[item.blob] = BlobLocation(pack, offset, len(item.data), item.codec, item.base, digest)
            offset += len(item.data)
        self.packs.append(PackInfo(key, len(data), len(header), file_digest(header)))
        self.nbytes += len(data)
        if not self._tasks:
            self._began = time.monotonic()
        blobs = self.snapshot.layout.arrangement.blobs
        task = asyncio.ensure_future(self._upload(key, data, sum(blobs[item.blob].length for item in items)))
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


def pack_header(layout: Layout, items: Sequence[Encoded], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a data file. Each chunk is an entry. A tensor whose chunks are all in this file and raw is
    one entry with its own dtype."""
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
    """Return a unique entry name: a tensor may have the name of another tensor's chunk."""
    while name in entries:
        name += "'"
    return name


def _grouped(layout: Layout, items: Sequence[Encoded]) -> Iterator[tuple[TensorSpec, list[int] | None, list[Encoded]]]:
    """Yield the items of each tensor, with their chunk numbers in it, or None if they are all its chunks and raw."""
    blobs, first = layout.arrangement.blobs, layout.arrangement.first_blob
    at = 0
    while at < len(items):
        tensor = blobs[items[at].blob].tensor
        end = at
        while end < len(items) and blobs[items[end].blob].tensor == tensor:
            end += 1
        group = list(items[at:end])
        spec = layout.tensors[tensor]
        whole = all(item.codec == RAW for item in group) and sum(len(item.data) for item in group) == spec.nbytes
        yield spec, None if whole else [item.blob - first[tensor] for item in group], group
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
    layout: Layout, plan: BlobPlan, digests: Digests, previous: Previous | None, packer: Packer
) -> tuple[Table, list[PackInfo]]:
    """Return the table of a part and its data files. `packer` has the locations of new chunks."""
    rows = _Rows(layout, digests, previous, packer)
    for blob in range(len(digests)):
        if plan.taken[blob] >= 0:
            rows.take(blob, int(plan.taken[blob]))
        else:
            rows.put(blob, packer.places.get(blob) or packer.places[int(plan.same[blob])])
    return rows.table()


class _Rows:
    """A table under construction. Rows of the previous table that are needed as bases follow the new rows."""

    def __init__(self, layout: Layout, digests: Digests, previous: Previous | None, packer: Packer) -> None:
        self.layout, self.previous, self.packer = layout, previous, packer
        self.old = previous.table if previous is not None else None
        self.packs = {info.key: i for i, info in enumerate(packer.packs)}
        self.bases: dict[int, int] = {}
        count = len(digests)
        self.columns: dict[str, Any] = {
            name: np.zeros(count, np.int64) for name in ("pack", "offset", "stored", "codec")
        }
        self.columns["length"] = np.array([blob.length for blob in layout.arrangement.blobs], np.int64)
        self.columns["base"] = np.full(count, -1, np.int64)
        self.columns["digest"], self.columns["stored_digest"] = digests, digests.copy()

    def take(self, blob: int, row: int) -> None:
        """Add a chunk that is equal to a row of the previous table."""
        assert self.old is not None
        for name in ("offset", "stored", "codec", "stored_digest"):
            self.columns[name][blob] = getattr(self.old, name)[row]
        self.columns["pack"][blob] = self._pack_of(row)
        if self.old.base[row] >= 0:
            self.columns["base"][blob] = self._based_on(int(self.old.base[row]))

    def put(self, blob: int, lies: BlobLocation) -> None:
        """Add a chunk that was stored by this checkpoint."""
        for name in ("pack", "offset", "stored", "codec"):
            self.columns[name][blob] = getattr(lies, name)
        if lies.codec != RAW:
            self.columns["stored_digest"][blob] = np.frombuffer(lies.digest, np.uint8)
        if lies.base >= 0:
            self.columns["base"][blob] = self._based_on(lies.base)

    def _pack_of(self, row: int) -> int:
        assert self.old is not None
        return self.packs.setdefault(self.old.packs[int(self.old.pack[row])], len(self.packs))

    def _based_on(self, row: int) -> int:
        return len(self.columns["pack"]) + self.bases.setdefault(row, len(self.bases))

    def table(self) -> tuple[Table, list[PackInfo]]:
        if self.old is not None and self.bases:
            rows = list(self.bases)
            packs = np.array([self._pack_of(row) for row in rows], np.int64)
            for name, column in self.columns.items():
                self.columns[name] = np.concatenate(
                    [column, packs if name == "pack" else getattr(self.old, name)[rows]]
                )
        layout = self.layout
        table = Table(
            shards=SavedShards.of_layout(layout),
            starts=np.array(layout.arrangement.blob_starts, np.int64),
            packs=tuple(self.packs),
            **self.columns,
        )
        infos = {info.key: info for info in self.packer.packs}
        if self.previous is not None:
            infos = {**self.previous.packs, **infos}
        return table, [infos[key] for key in self.packs]
