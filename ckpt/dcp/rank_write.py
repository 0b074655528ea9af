"""Write one rank's share of a checkpoint of torch's DCP: the items of its plan become a data file, a chunk table and
a manifest.

The data file is never in memory as a whole. It is produced range by range, with the tensors in file order, and each
chunk is digested while it is written. Tensors on an accelerator are copied to the host one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt.core.checkpoint import read
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest, build_table, finish_manifest, upload_from
from ckpt.core.format.digest import chunk_hasher, file_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, DataFile, data_key, metadata_of
from ckpt.core.format.values import is_text
from ckpt.core.state.tensors import DTYPE_NAME, as_bytes, check, check_memory
from ckpt.dcp.objects import warn_once
from ckpt.errors import SaveError, StateError
from ckpt.store import PAGE, Store

KIND = "dcp"  # kind of component; a DCP checkpoint consists of one component of this kind
PATH = ["dcp"]


@dataclass(frozen=True, slots=True)
class RankShare:
    """The coordinator's request to one rank. `tiers`: URLs to write to, nearest first. `read_back`: URLs of the tiers
    to read back afterwards. `names`: tensors that other ranks write. `token`: id of this save. `job`: nonce of the job.
    """

    token: str
    checkpoint: str
    rank: int
    world: int
    tiers: tuple[str, ...]
    read_back: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    job: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A rank's reply to the coordinator. `parts`: digest of its manifest in each tier, by URL. `errors`: by URL, the
    error (as `errors.to_wire`) of each tier without a manifest. `read_back`: tiers read back without error."""

    checkpoint: str
    rank: int
    parts: dict[str, str]
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    read_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """A rank's share: its layout, and the source of the bytes of each tensor."""

    layout: Layout
    sources: list[WriteItem | memoryview]
    planner: SavePlanner

    def bytes_of(self, number: int) -> memoryview:
        """Return all bytes of one tensor in host memory. Raise StateError if the tensor differs from the plan."""
        source = self.sources[number]
        if isinstance(source, memoryview):
            return source
        found, spec = self.planner.resolve_data(source), self.layout.tensors[number]
        if not isinstance(found, Tensor):
            raise StateError(f"{spec.name}: the planner returned a {type(found).__name__}, but had planned a tensor")
        tensor = dense(found.detach(), spec.name)
        if DTYPE_NAME[tensor.dtype] != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise StateError(
                f"{spec.name}: the planner returned {tensor.dtype} of shape {list(tensor.shape)}, but had planned "
                f"{spec.dtype} of {list(spec.shape)}"
            )
        return as_bytes(tensor).numpy().data


def dense(tensor: Tensor, name: str) -> Tensor:
    """Return contiguous values in host memory. Raise StateError if the bytes of the tensor do not define its values."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        check(tensor, (name,))
    check_memory(tensor, (name,))  # accepts expanded tensors
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)  # a stream of another thread may still be writing the tensor
    return check(tensor.to("cpu").resolve_conj().resolve_neg().contiguous(), (name,))


def content_of(plan: SavePlan, planner: SavePlanner, share: RankShare) -> Content:
    """Return the contents for the items of a plan. The planner pickles other objects than tensors here, only once."""
    pieces: list[tuple[TensorSpec, WriteItem | memoryview]] = []
    names, objects = dict[str, None](), list[str]()
    for item in plan.items:
        name = item.index.fqn
        if name == "__metadata__" or not is_text(name):
            raise StateError(f"{name!a} is not allowed as the name of an entry")
        names[name] = None
        if item.type == WriteItemType.BYTE_IO:
            data = planner.resolve_data(item)
            if not isinstance(data, io.BytesIO):
                raise StateError(f"{name}: the planner returned a {type(data).__name__}, but had planned bytes")
            raw = memoryview(data.getvalue())
            pieces.append((TensorSpec(name, "U8", (len(raw),)), raw))
            objects.append(name)
            warn_once(name, raw)
        elif (spec := _spec(item)) is not None:
            pieces.append((spec, item))
    mappings = _mappings(plan.planner_data, names)
    order = [name for name in plan.planner_data if name in share.names or name in names] if mappings else list(names)
    # the order of the entries in the state, because optimizers number their parameters
    facts = {"objects": objects, "mappings": mappings, "order": order}
    known = sorted({*names, *share.names})
    component = {"path": PATH, "kind": KIND, "facts": facts, "names": known}
    layout = Layout(tuple(spec for spec, _ in pieces), {}, [component], share.rank, share.world)
    return Content(layout, [source for _, source in pieces], planner)


def _spec(item: WriteItem) -> TensorSpec | None:
    """Return the tensor spec of an item. Return None if the item has no elements although its tensor has some."""
    data, name = item.tensor_data, item.index.fqn
    if data is None:
        raise StateError(f"{name}: the plan has no data for this tensor")
    dtype = DTYPE_NAME.get(data.properties.dtype)
    if dtype is None:
        raise StateError(f"{name}: has dtype {data.properties.dtype}, which cannot be stored")
    full, sizes, offsets = tuple(data.size), tuple(data.chunk.sizes), tuple(data.chunk.offsets)
    if 0 in sizes and 0 not in full:
        return None
    if sizes == full:
        return TensorSpec(name, dtype, full)
    return TensorSpec(name, dtype, sizes, whole=full, offsets=offsets)


def _mappings(data: Any, names: Iterable[str]) -> dict[str, list[str | int]] | None:
    """Return the nested path of each flat name, as the default planner recorded it."""
    if data is None:
        return None
    if not isinstance(data, dict) or not all(isinstance(path, tuple) for path in data.values()):
        raise StateError(f"planners with their own kind of planner_data ({type(data).__name__}) are not supported")
    found = {name: list(data[name]) for name in names if name in data}
    if not all(type(part) in (str, int) for path in found.values() for part in path):
        raise StateError("planner_data has paths with parts other than names and numbers")
    return found


class Stream:
    """The bytes of a data file, requested range by range in order. `digests`: the digests of all chunks, joined."""

    def __init__(self, content: Content, header: bytes) -> None:
        self._content = content
        self._arrangement = content.layout.arrangement
        self._chunks = iter(self._arrangement.chunks)
        self._rest = memoryview(header)
        self._number, self._bytes = -1, memoryview(b"")
        self._position = 0
        self._hash = chunk_hasher()  # digest of the current chunk so far
        self._lock = asyncio.Lock()
        self.digests = bytearray()

    async def piece(self, offset: int, length: int) -> memoryview:
        async with self._lock:
            assert offset == self._position, "ranges must be requested in order"
            return await asyncio.to_thread(self._read, length)

    def _read(self, length: int) -> memoryview:
        room, filled = _room(length), 0
        while filled < length:
            if not self._rest:
                self._rest = self._next()
            size = min(len(self._rest), length - filled)
            copied = room[filled : filled + size]
            copied[:] = self._rest[:size]
            self._hash.update(copied)  # hash the copy that is stored, because the source may change
            filled, self._rest = filled + size, self._rest[size:]
            if not self._rest and self._number >= 0:
                self.digests += self._hash.digest()
        self._position += length
        return room

    def _next(self) -> memoryview:
        chunk = next(self._chunks)
        if chunk.tensor != self._number:
            self._bytes = memoryview(b"")  # free the previous tensor first
            self._number, self._bytes = chunk.tensor, self._content.bytes_of(chunk.tensor)
        start = chunk.offset - self._arrangement.offsets[chunk.tensor]
        self._hash = chunk_hasher()
        return self._bytes[start : start + chunk.length]


def _room(length: int) -> memoryview:
    """Return page-aligned memory for one range, because direct I/O requires it."""
    made = mmap.mmap(-1, max(PAGE, length), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(made)[:length]


async def write(store: Store, checkpoint: CheckpointId, content: Content, *, read_back: bool) -> WrittenManifest:
    """Store a share, and read it back if requested. Raise CorruptError if the bytes read back differ."""
    layout = content.layout
    key = data_key(checkpoint, layout.rank)
    header = layout.arrangement.header(metadata_of(key))
    size = len(header) + layout.arrangement.data_size
    stream = Stream(content, header)
    await upload_from(store, key, size, stream.piece, first=len(header))
    file = DataFile(key, size, len(header), file_digest(header))
    table = build_table(layout, key, bytes(stream.digests))
    snapshot = RankSnapshot(
        checkpoint, layout, memoryview(b""), [None]
    )  # manifest without plain values; the bytes are in the data file already
    written = await finish_manifest(store, snapshot, table, [file], reason="due")
    if read_back:
        await read.fetch(store, table, read.plan_reads(table, range(table.owned), far=store.remote), None)
    return written


def check_alike(written: Sequence[WrittenManifest]) -> None:
    """Raise SaveError unless the bytes written to all tiers are equal. If they differ, the state has changed."""
    digests = {one.table.digest.tobytes() for one in written}
    if len(digests) > 1:
        raise SaveError(
            "the state changed while it was written. With dcp.async_save wait for the last save before the next one, "
            "and do not train during dcp.save"
        )
