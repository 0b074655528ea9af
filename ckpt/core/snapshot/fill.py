"""Copies live tensors into a slot: first those that may change before the next optimizer step, then the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from ckpt.core.format.boxes import Box, boxes_of_run
from ckpt.core.format.layout import Layout, pages
from ckpt.core.ipc.arena import LOCK, Arena
from ckpt.core.snapshot import device
from ckpt.core.snapshot.device import CopyStreams, Pack, PerDevice
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.snapshot.unchanged import Frozen
from ckpt.core.state.tensors import TORCH_DTYPE, as_bytes

LARGE = 1 << 20  # bytes from which one memcpy, without the GIL, beats a batched copy

Pair = tuple[Tensor, Tensor, int]  # target, source, and number of the tensor in the layout


class SlotFiller:
    """Fills slots in the staging thread. For each, call `begin`, `fill_eager`, `fill_guarded`, `end`."""

    def __init__(self, steady: contextlib.AbstractContextManager[Any]) -> None:
        """`steady`: a lock that prevents page-locking of memory while it is held."""
        self._steady = steady
        self.frozen = Frozen()
        self._streams = CopyStreams()
        self._views: dict[tuple[bytes, int], tuple[Layout, list[Tensor]]] = {}

    def clear(self) -> None:
        """Forget all slots, because another arena is used."""
        self._views.clear()
        self.frozen.clear()

    def begin(self, slot: int, snapshot: NewSnapshot) -> None:
        self.frozen.open(slot, snapshot.reading.layout)

    def end(self, slot: int) -> None:
        """Remember the contents of the slot, for the next snapshot in it."""
        self.frozen.close(slot)

    def fill_eager(self, arena: Arena, slot: int, snapshot: NewSnapshot) -> None:
        """Copy the tensors that may change before the next optimizer step."""
        streams = self._streams.of(snapshot.streams)
        device.queue_behind(streams, snapshot.ready)
        self._copy_part(arena, slot, snapshot, guarded=False)
        start = pages(snapshot.reading.layout.arrangement.data_size)
        arena.data(slot)[start : start + len(snapshot.values)] = snapshot.values
        for pack in snapshot.early:
            pack.fetch(streams)
        snapshot.eager = device.events_behind(streams)
        if not snapshot.taken_early:
            device.queue_behind(snapshot.streams, snapshot.eager)  # later kernels may change tensors being copied

    def fill_guarded(self, arena: Arena, slot: int, snapshot: NewSnapshot) -> None:
        """Copy the tensors that only optimizers change, and call `snapshot.beside`. On a device this only queues the
        work, and `snapshot.done` has the events after it."""
        streams = self._streams.of(snapshot.streams)
        for pack in snapshot.late:
            with device.on(streams):
                pack.gather(snapshot.sources)
        self._copy_part(arena, slot, snapshot, guarded=True)
        for pack in snapshot.late:
            pack.fetch(streams)
        snapshot.check_sources()
        for one in snapshot.fingerprints if streams else ():
            one.fetch(streams)
        if snapshot.beside is not None:
            with device.on(streams):
                snapshot.beside()
        snapshot.done = device.events_behind(streams)

    def deal_out(self, arena: Arena, slot: int, snapshot: NewSnapshot, packs: Iterable[Pack]) -> None:
        """Distribute tensors that were copied from a device in packs."""
        for pack in packs:
            pack.deal_out(self._slot_views(arena, slot, snapshot.reading.layout))

    def settle(self, snapshot: NewSnapshot) -> None:
        """Wait until no device copies for this snapshot, before its slot is reused or its sources are freed."""
        self._streams.settle(snapshot.streams)

    def whole(self, arena: Arena, slot: int) -> Tensor:
        """Return the bytes of a slot."""
        return torch.frombuffer(arena.data(slot), dtype=torch.uint8)

    def _copy_part(self, arena: Arena, slot: int, snapshot: NewSnapshot, *, guarded: bool) -> None:
        """Copy the tensors that only optimizers change (`guarded`), or all others."""
        views, sources = self._slot_views(arena, slot, snapshot.reading.layout), snapshot.sources
        numbers = list(compress(range(len(views)), snapshot.reading.guarded) if guarded else snapshot.reading.early)
        snapshot.check_memory(numbers)
        if snapshot.streams:
            self.copy(self._pairs(views, numbers, snapshot), self._streams.of(snapshot.streams))
            return
        little, large = list[int](), list[Pair]()
        for n in numbers:  # most tensors are small, so keep their path short
            if snapshot.reading.layout.sizes[n] < LARGE:
                little.append(n)
            else:
                large.append((views[n], sources[n], n))
        if little:
            device.copy_batch([views[n] for n in little], [sources[n] for n in little], {})
        self.copy(large, {}, guarded)  # the caller waits for the first part

    def _pairs(self, views: list[Tensor], numbers: Iterable[int], snapshot: NewSnapshot) -> list[Pair]:
        """Return target, source and number of each unpacked tensor, cut at the ends of page-locked pieces."""
        packed = snapshot.packed
        pairs = [(views[n], snapshot.sources[n], n) for n in numbers if n not in packed]
        if snapshot.reading.layout.arrangement.data_size <= LOCK:
            return pairs
        offsets = snapshot.reading.layout.arrangement.offsets
        return [cut for pair in pairs for cut in _cut(*pair, offsets[pair[2]], LOCK)]

    def _slot_views(self, arena: Arena, slot: int, layout: Layout) -> list[Tensor]:
        """Return the slot as tensors of the layout's shapes."""
        key = (arena.id, slot)
        cached = self._views.get(key)
        if cached is not None and cached[0] is layout:
            return cached[1]
        whole = self.whole(arena, slot)
        typed = {dtype: whole.view(TORCH_DTYPE[dtype]) for dtype in {t.dtype for t in layout.tensors}}
        views = [
            typed[t.dtype].as_strided(t.shape, _strides(t.shape), offset // typed[t.dtype].itemsize)
            for t, offset in zip(layout.tensors, layout.arrangement.offsets, strict=True)
        ]
        self._views[key] = (layout, views)
        return views

    def copy(
        self,
        pairs: Sequence[Pair],
        streams: PerDevice,
        beside_training: bool = True,
    ) -> None:
        """Queue the copies from devices, one batched call each, then copy large host tensors one by one.

        `beside_training`: training continues during these copies.
        """
        batches: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {one: ([], []) for one in streams}
        large: list[Pair] = []
        for target, source, number in pairs:
            plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
            if target.nbytes >= LARGE and plain and source.device.type == "cpu":
                large.append((target, source, number))
                continue
            targets, sources = batches.setdefault(source.device, ([], []))
            targets.append(target)
            sources.append(source)
        for targets, sources in batches.values():
            if targets:
                with self._steady:
                    device.copy_batch(targets, sources, streams)
        self.frozen.beside_training = beside_training
        for target, source, number in large:
            self.frozen.put(number, target, source)


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def _cut(target: Tensor, source: Tensor, number: int, offset: int, piece: int) -> Iterator[Pair]:
    """Cut a copy from a device at the ends of page-locked pieces. `offset`: of the target in its slot, in bytes."""
    first = piece - offset % piece
    if source.device.type == "cpu" or target.nbytes <= first:
        yield target, source, number
        return
    bounds = [0, *range(first, target.nbytes, piece), target.nbytes]
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        there, here = as_bytes(target), as_bytes(source)
        yield from ((there[a:b], here[a:b], number) for a, b in pairwise(bounds))
        return
    flat = target.view(-1)  # a strided source is made contiguous first, one piece at a time
    for a, b in pairwise(bound // target.itemsize for bound in bounds):
        for (at, sizes), there in _boxes(tuple(target.shape), flat[a:b], a, b):
            here = source
            for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
                here = here.narrow(dim, start, size)
            yield there, here, number


def _boxes(shape: tuple[int, ...], run: Tensor, start: int, stop: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield elements `start` to `stop` of a tensor as boxes, each with its part of `run`."""
    for box in boxes_of_run(shape, start, stop):
        count = prod(box[1])
        yield box, run[:count].view(box[1])
        run = run[count:]
