"""Copies verified bytes into tensors, from any tier, without a second copy of the state.

If the sharding has changed since the save, each overlap of a saved box and a target box is copied.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ckpt.core.format.boxes import Box, boxes_of_run, intersect, run_of, within
from ckpt.core.format.columns import distinct
from ckpt.core.format.layout import BITS, TensorSpec
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.state.sharding import slices
from ckpt.core.state.tensors import DTYPE_NAME, TORCH_DTYPE, as_bytes

# Bytes from a network may be read-only memory. This module only reads them.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning, __name__)

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to fill with a box of a saved tensor."""

    tensor: Tensor
    box: Box

    @classmethod
    def whole(cls, tensor: Tensor) -> Self:
        """Return a target for the complete saved tensor."""
        return cls(tensor, ((0,) * tensor.dim(), tuple(tensor.shape)))


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The overlap of a shard and a target. `region`: box in the shard. `view`: view of the target, with the same shape.

    `run`: the byte range of the region in the shard, if the region is contiguous in both shard and target.
    """

    region: Box
    view: Tensor
    run: tuple[int, int] | None


class Filler:
    """Copies verified chunks into tensors. Several threads may call `add` for different chunks.

    `chunks`: the numbers of all chunks to read, ascending.
    """

    def __init__(
        self,
        saved: SavedState,
        fills: Mapping[Key, list[Target]],
        whole: Sequence[tuple[int, Tensor]] = (),
        *,
        in_place: bool = True,
    ) -> None:
        """Find the chunks to read. `whole`: shard numbers, each with a tensor of the same form to fill completely."""
        self._saved = saved
        self._later: list[tuple[Tensor, Tensor]] = []
        self._met: list[tuple[I64, Target]] = []  # shards that overlap a target, with this target
        self._whole = list(whole)
        self._overlaps: dict[int, list[_Overlap]] = {}
        self._filled = [tensor for _, tensor in whole] + [one.tensor for targets in fills.values() for one in targets]
        wanted: list[I64] = [np.zeros(0, np.int64)]
        for key, targets in fills.items():
            tensor = saved.tensors[key]
            for target in targets:
                ready = self._ready(target, tensor.spec)
                flat = ready.tensor.is_contiguous() and ready.tensor.numel() > 0
                if saved.complete and len(tensor.shards) == 1 and flat and ready.box[1] == tensor.spec.shape:
                    self._whole.append((tensor.shards[0], ready.tensor))
                elif len(tensor.shards):
                    numbers = np.asarray(tensor.shards, np.int64)
                    wanted.append(self._chunks_for(ready, numbers, len(tensor.spec.shape)))
        numbers = np.array([number for number, _ in self._whole], np.int64)
        found = distinct(np.concatenate([*wanted, _ranges(saved.table.starts, numbers)]))
        self.chunks: list[int] = found[saved.table.length[found] > 0].tolist()
        self._crowded, self._address = set[int](), np.zeros(len(saved.table.shards), np.int64)
        self._in_place = in_place
        if not in_place:
            return
        # Find addresses for complete shards that go into one host tensor unchanged.
        tensors = [tensor for _, tensor in self._whole]
        places = [*tensors, *(target.tensor for _, target in self._met)]
        crowded = _crowded(places)
        self._crowded = {id(one) for one, several in zip(places, crowded.tolist(), strict=True) if several}
        here = np.fromiter((one.is_cpu and one.is_contiguous() for one in tensors), np.bool_, len(tensors))
        times = np.bincount(np.concatenate([numbers, *(met for met, _ in self._met)]), minlength=len(self._address))
        alone = here & ~crowded[: len(tensors)] & (times[numbers] == 1)
        addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        self._address[numbers[alone]] = addresses[alone]

    def _chunks_for(self, target: Target, numbers: I64, k: int) -> I64:
        """Return the chunks of these shards, of `k` dimensions, that overlap a target."""
        shards = self._saved.table.columns
        dims = shards.dims[shards.dim_starts[numbers][:, None] + np.arange(k, 3 * k)] if k else numbers[:, None][:, :0]
        low, high = dims[:, :k], dims[:, :k] + dims[:, k:]
        first = np.array(target.box[0], np.int64)
        last = first + np.array(target.box[1], np.int64)
        hit = (np.maximum(low, first) < np.minimum(high, last)).all(1)
        self._met.append((numbers[hit], target))
        whole = (low[hit] >= first).all(1) & (high[hit] <= last).all(1)
        inside, across = numbers[hit][whole], numbers[hit][~whole]
        parts = [b for n in across.tolist() if (o := self._overlap(n, target)) is not None for b in self._needed(n, o)]
        return np.concatenate([_ranges(self._saved.table.starts, inside), np.array(parts, np.int64)])

    @cached_property
    def _hits(self) -> dict[int, list[Target]]:
        """Return the targets of each shard. Computed when the first chunk without an address arrives."""
        found: dict[int, list[Target]] = {}
        for number, tensor in self._whole:
            found.setdefault(number, []).append(Target.whole(tensor))
        for numbers, target in self._met:
            for number in numbers.tolist():
                found.setdefault(number, []).append(target)
        return found

    def _overlap(self, number: int, target: Target) -> _Overlap | None:
        return _overlap(self._saved.table.shards[number].box, target)

    def _overlaps_of(self, number: int) -> list[_Overlap]:
        """Return the overlaps of a shard. Computed when the shard's first chunk arrives, because there may be many."""
        if number not in self._overlaps:
            found = (self._overlap(number, target) for target in self._hits.get(number, ()))
            self._overlaps[number] = [overlap for overlap in found if overlap is not None]
        return self._overlaps[number]

    def _ready(self, target: Target, spec: TensorSpec) -> Target:
        """Return a target that takes the saved bytes. A target of another dtype (strict=False) is filled last."""
        tensor = target.tensor.detach()
        if DTYPE_NAME[tensor.dtype] == spec.dtype and not tensor.is_conj() and not tensor.is_neg():
            return Target(tensor, target.box)
        whole = torch.empty(tensor.shape, dtype=TORCH_DTYPE[spec.dtype])
        self._later.append((tensor, whole))
        return Target(whole, target.box)

    def _needed(self, number: int, overlap: _Overlap) -> Iterable[int]:
        """Return the chunks of a shard that contain bytes of an overlap."""
        shard, saved = self._saved.table.shards[number], self._saved
        item = BITS[shard.dtype] // 8
        chunks = saved.table.chunks(number)
        if overlap.run == (0, item * math.prod(shard.sizes)):
            return [chunk for chunk in chunks if saved.table.length[chunk]]
        low, high = overlap.run or tuple(item * n for n in run_of(overlap.region, shard.sizes))
        found = []
        for chunk in chunks:
            start, length = int(saved.position[chunk]), int(saved.table.length[chunk])
            if start < high and start + length > low:
                boxes = boxes_of_run(shard.sizes, start // item, (start + length) // item)
                if overlap.run or any(intersect(box, overlap.region) for box in boxes):
                    found.append(chunk)
        return found

    def places(self, chunks: I64) -> I64:
        """Return the address for each chunk's bytes, or 0 if `add` must copy them. Only chunks whose bytes all go to
        one position in host memory, and nowhere else, have an address."""
        shards = self._saved.shard_of_chunk[chunks]
        found = self._address[shards]
        found[found > 0] += self._saved.position[chunks][found > 0]
        if self._met and self._in_place:
            for i in np.flatnonzero(found == 0).tolist():
                found[i] = self._place(int(chunks[i]), int(shards[i]))
        return found

    def _place(self, chunk: int, number: int) -> int:
        """Return the address for a chunk of a shard that is sharded differently from the live tensors."""
        overlaps = self._overlaps_of(number)
        if len(overlaps) != 1 or id(self._hits[number][0].tensor) in self._crowded:
            return 0
        if overlaps[0].run is None or overlaps[0].view.device.type != "cpu":
            return 0
        low, high = overlaps[0].run
        start = int(self._saved.position[chunk])
        stop = start + int(self._saved.table.length[chunk])
        return overlaps[0].view.data_ptr() + start - low if start >= low and stop <= high else 0

    def add(self, chunk: int, data: memoryview) -> None:
        number = int(self._saved.shard_of_chunk[chunk])
        shard, start = self._saved.table.shards[number], int(self._saved.position[chunk])
        if not len(data):
            return
        source = torch.frombuffer(data, dtype=torch.uint8)
        for overlap in self._overlaps_of(number):
            if overlap.run is not None:
                low, high = overlap.run
                first, last = max(low, start), min(high, start + len(data))
                if first < last:
                    overlap.view[first - low : last - low].copy_(source[first - start : last - start])
            else:
                _scatter(source, start, shard.sizes, BITS[shard.dtype] // 8, overlap)

    @torch.no_grad()
    def finish(self) -> None:
        """Fill the tensors whose dtype differs from the saved dtype."""
        for target, whole in self._later:
            target.copy_(whole)
        # Tell autograd about the writes, because torch did not see them.
        filled = [tensor for tensor in self._filled if not tensor.is_inference()]
        try:
            torch.autograd.graph.increment_version(filled)
        except TypeError:  # an older torch takes one tensor at a time
            for tensor in filled:
                torch.autograd.graph.increment_version(tensor)


def _ranges(starts: I64, numbers: I64) -> I64:
    """Return the chunks of these shards."""
    counts = starts[numbers + 1] - starts[numbers]
    found: I64 = np.repeat(starts[numbers] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    return found


def _crowded(views: Sequence[Tensor]) -> npt.NDArray[np.bool_]:
    """Return a mask of the views that share memory, because one must not be written while another is verified."""
    starts = np.fromiter(map(Tensor.data_ptr, views), np.int64, len(views))
    ends = starts + np.fromiter(map(_reach, views), np.int64, len(views))
    there = np.flatnonzero(ends > starts)
    order = there[np.argsort(starts[there], kind="stable")]
    widest = np.maximum.accumulate(ends[order])
    met = np.flatnonzero(starts[order][1:] < widest[:-1]) + 1
    found = np.zeros(len(views), np.bool_)
    if met.size:
        reached = np.maximum.accumulate(np.where(ends[order] == widest, np.arange(len(order)), 0))
        found[order[met]] = found[order[reached[met - 1]]] = True
    return found


def _reach(view: Tensor) -> int:
    """Return the number of bytes of host memory from the first element to the end of the last."""
    if not view.is_cpu or not view.numel():
        return 0
    if view.is_contiguous():
        return view.nbytes
    return (sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True)) + 1) * view.itemsize


_ITEM = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _overlap(box: Box, target: Target) -> _Overlap | None:
    if box == target.box and target.tensor.is_contiguous() and target.tensor.numel():
        view = as_bytes(target.tensor)  # exactly the same box, which is the usual case in a restore
        return _Overlap(within(box, box), view, (0, view.numel()))
    common = intersect(box, target.box)
    if common is None:
        return None
    region = within(common, box)
    view = target.tensor[slices(within(common, target.box))]
    item = view.element_size()
    start, stop = run_of(region, box[1])
    if view.is_contiguous() and stop - start == math.prod(region[1]):
        return _Overlap(region, as_bytes(view), (start * item, stop * item))
    return _Overlap(region, view.view(_ITEM[item]), None)


def _scatter(source: Tensor, start: int, sizes: tuple[int, ...], item: int, overlap: _Overlap) -> None:
    """Copy the elements of a chunk that are in the overlap's region into its view, which has another memory order."""
    elements = source.view(_ITEM[item]) if source.data_ptr() % item == 0 else source.clone().view(_ITEM[item])
    place = 0
    for box in boxes_of_run(sizes, start // item, (start + len(source)) // item):
        count = math.prod(box[1])
        common = intersect(box, overlap.region)
        if common is not None:
            piece = elements[place : place + count].view(box[1])
            overlap.view[slices(within(common, overlap.region))].copy_(piece[slices(within(common, box))])
        place += count
