"""One rank's share of a checkpoint that torch's DCP saves: the items of its plan become a pack, a table and a part.

Nothing is copied as a whole: the pack is made range by range while it is written, tensors in the order of the file, and
each blob is digested on its way. What is on an accelerator comes to the host one tensor at a time.
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
from ckpt.core.checkpoint.write import RankSnapshot, WrittenPart, build_table, finish_part, upload_from
from ckpt.core.format.digest import blob_hasher, file_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import Attempt, PackInfo, data_key, metadata_of
from ckpt.core.format.values import is_text
from ckpt.core.state.tensors import DTYPE_NAME, as_bytes, check, check_memory
from ckpt.dcp.objects import warn_once
from ckpt.errors import SaveError, StateError
from ckpt.store import PAGE, Store

KIND = "dcp"  # of the one component of such a checkpoint
PATH = ["dcp"]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What the coordinator tells a rank. `tiers`: URLs to write to, nearest first; `read_back`: those of them where
    this is to be read again; `names`: of tensors that other ranks write; `token`: of this save and no other; `job`: the
    nonce of the incarnation that saves."""

    token: str
    attempt: str
    rank: int
    world: int
    tiers: tuple[str, ...]
    read_back: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    job: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a rank tells the coordinator. `parts`: by URL, the digest of the part there; `errors`: by URL, why there is
    none, as `errors.to_wire` says it; `read_back`: where all of it was read again and is sound."""

    attempt: str
    rank: int
    parts: dict[str, str]
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    read_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """A rank's share as a layout, and for each of its tensors where the bytes come from."""

    layout: Layout
    sources: list[WriteItem | memoryview]
    planner: SavePlanner

    def bytes_of(self, number: int) -> memoryview:
        """All bytes of one tensor, in host memory. StateError if it is not what the plan says."""
        source = self.sources[number]
        if isinstance(source, memoryview):
            return source
        found, spec = self.planner.resolve_data(source), self.layout.tensors[number]
        if not isinstance(found, Tensor):
            raise StateError(f"{spec.name}: the planner gives a {type(found).__name__} where it had planned a tensor")
        tensor = dense(found.detach(), spec.name)
        if DTYPE_NAME[tensor.dtype] != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise StateError(
                f"{spec.name}: the planner gives {tensor.dtype} of shape {list(tensor.shape)} where it had planned "
                f"{spec.dtype} of {list(spec.shape)}"
            )
        return as_bytes(tensor).numpy().data


def dense(tensor: Tensor, name: str) -> Tensor:
    """The same values in host memory, contiguous. StateError if their bytes would not be the whole truth."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        check(tensor, (name,))
    check_memory(tensor, (name,))  # an expanded one is fine
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)  # another stream than this thread's may be writing it
    return check(tensor.to("cpu").resolve_conj().resolve_neg().contiguous(), (name,))


def content_of(plan: SavePlan, planner: SavePlanner, share: RankShare) -> Content:
    """What the items of a plan come to. Objects that are no tensors are encoded by the planner, here and once."""
    pieces: list[tuple[TensorSpec, WriteItem | memoryview]] = []
    names, objects = dict[str, None](), list[str]()
    for item in plan.items:
        name = item.index.fqn
        if name == "__metadata__" or not is_text(name):
            raise StateError(f"{name!a}: nothing that is saved can have this name")
        names[name] = None
        if item.type == WriteItemType.BYTE_IO:
            data = planner.resolve_data(item)
            if not isinstance(data, io.BytesIO):
                raise StateError(f"{name}: the planner gives a {type(data).__name__} where it had planned bytes")
            raw = memoryview(data.getvalue())
            pieces.append((TensorSpec(name, "U8", (len(raw),)), raw))
            objects.append(name)
            warn_once(name, raw)
        elif (spec := _spec(item)) is not None:
            pieces.append((spec, item))
    mappings = _mappings(plan.planner_data, names)
    order = [name for name in plan.planner_data if name in share.names or name in names] if mappings else list(names)
    facts = {"objects": objects, "mappings": mappings, "order": order}  # as in the state: optimizers count parameters
    known = sorted({*names, *share.names})
    component = {"path": PATH, "kind": KIND, "facts": facts, "names": known}
    layout = Layout(tuple(spec for spec, _ in pieces), {}, [component], share.rank, share.world)
    return Content(layout, [source for _, source in pieces], planner)


def _spec(item: WriteItem) -> TensorSpec | None:
    """The piece that an item stands for; None if there is nothing in it, while there is something in its tensor."""
    data, name = item.tensor_data, item.index.fqn
    if data is None:
        raise StateError(f"{name}: the plan does not say what tensor this is")
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
    """How flat names came from nested ones, as the default planner says it: of these names."""
    if data is None:
        return None
    if not isinstance(data, dict) or not all(isinstance(path, tuple) for path in data.values()):
        raise StateError(f"a planner with planner_data of its own kind ({type(data).__name__}) cannot be used here")
    found = {name: list(data[name]) for name in names if name in data}
    if not all(type(part) in (str, int) for path in found.values() for part in path):
        raise StateError("planner_data has paths that are made of other things than names and numbers")
    return found


class Stream:
    """The bytes of a pack, in ranges that are asked for in their order. `digests`: of the blobs, joined."""

    def __init__(self, content: Content, header: bytes) -> None:
        self._content = content
        self._arrangement = content.layout.arrangement
        self._blobs = iter(self._arrangement.blobs)
        self._rest = memoryview(header)
        self._number, self._bytes = -1, memoryview(b"")
        self._position = 0
        self._hash = blob_hasher()  # of the present blob
        self._lock = asyncio.Lock()
        self.digests = bytearray()

    async def piece(self, offset: int, length: int) -> memoryview:
        async with self._lock:
            assert offset == self._position, "ranges come in their order"
            return await asyncio.to_thread(self._take, length)

    def _take(self, length: int) -> memoryview:
        room, filled = _room(length), 0
        while filled < length:
            if not self._rest:
                self._rest = self._next()
            size = min(len(self._rest), length - filled)
            copied = room[filled : filled + size]
            copied[:] = self._rest[:size]
            self._hash.update(copied)  # of what is stored, whatever the source may be by now
            filled, self._rest = filled + size, self._rest[size:]
            if not self._rest and self._number >= 0:
                self.digests += self._hash.digest()
        self._position += length
        return room

    def _next(self) -> memoryview:
        blob = next(self._blobs)
        if blob.tensor != self._number:
            self._bytes = memoryview(b"")  # before there is another
            self._number, self._bytes = blob.tensor, self._content.bytes_of(blob.tensor)
        start = blob.offset - self._arrangement.offsets[blob.tensor]
        self._hash = blob_hasher()
        return self._bytes[start : start + blob.length]


def _room(length: int) -> memoryview:
    """Memory for one range, at an address that suits direct I/O."""
    made = mmap.mmap(-1, max(PAGE, length), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(made)[:length]


async def write(store: Store, attempt: Attempt, content: Content, *, read_back: bool) -> WrittenPart:
    """Store a share, and read it again if told so: CorruptError if it is not what was written."""
    layout = content.layout
    key = data_key(attempt, layout.rank)
    header = layout.arrangement.header(metadata_of(key))
    size = len(header) + layout.arrangement.data_size
    stream = Stream(content, header)
    await upload_from(store, key, size, stream.piece, first=len(header))
    pack = PackInfo(key, size, len(header), file_digest(header))
    table = build_table(layout, key, bytes(stream.digests))
    snapshot = RankSnapshot(
        attempt, layout, memoryview(b""), [None]
    )  # its bytes are written, and its values are tensors
    written = await finish_part(store, snapshot, table, [pack], reason="due")
    if read_back:
        await read.fetch(store, table, read.plan_reads(table, range(table.owned), far=store.remote), None)
    return written


def check_alike(written: Sequence[WrittenPart]) -> None:
    """SaveError unless all tiers got the same bytes: else the state changed while it was written."""
    digests = {one.table.digest.tobytes() for one in written}
    if len(digests) > 1:
        raise SaveError(
            "the state changed while it was written. With dcp.async_save wait for the last save before the next one, "
            "and do not train during dcp.save"
        )
