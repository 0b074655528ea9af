"""Skips copies of unchanged tensors: a tensor that has not changed since its slot was last filled is not copied again.

A slot is reused after some steps. Then it still contains frozen weights under an adapter, untrained embeddings and
constant buffers, bit for bit. Reading them once for a digest is faster than copying them. So a copy is skipped if the
XXH3-128 digest of the live bytes equals that of the bytes in the slot. Nothing else counts as proof: version counters
miss fused optimizers and writes through `.data`, and the identity of a tensor proves nothing. They only serve to
exclude tensors for which a digest would be wasted.

The digest is computed from the slot after the copy, so it matches the slot even if the tensor changed during the copy.
The live bytes are read at the time at which they would be copied. So a snapshot shows the same moment either way, and
the checks that protect a copy from concurrent writes protect the digest too.

Copies live tensors into a slot: first those that may change before the next optimizer step, then the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from math import prod
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.core.format.boxes import Box, boxes_of_run
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import Layout, pages
from ckpt.core.ipc.arena import LOCK, Arena
from ckpt.core.snapshot import device
from ckpt.core.snapshot.device import CopyStreams, Pack, PerDevice
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.state.tensors import TORCH_DTYPE, as_bytes, version_of
from ckpt.errors import SaveError

PROBE = 4 << 20  # first bytes of a tensor that must be equal twice before all of it is digested
MOST_REST = 64  # longest pause, in fills, without a digest of a tensor that keeps changing
FRESH = 64  # one of this many fills uses the slower method, to update its measured rate
SAMPLES = 9  # samples of each rate, of which the median is used


@dataclass
class CopyRates:
    """Measured rates of copies and digests on this machine, in bytes per second."""

    copying: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    digesting: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def digests_pay(self) -> bool:
        """Return True if digests are faster than copies, or while one of the rates is unknown."""
        return not (self.copying and self.digesting) or median(self.digesting) > median(self.copying)


@dataclass
class StagedBefore:
    """Properties of a tensor when it was last staged, into any slot. They are hints, never proof."""

    version: int | None = None
    probe: bytes = b""
    rest: int = 0  # remaining fills without a digest
    next_rest: int = 1
    fills: int = 0

    def changed(self) -> None:
        self.probe = b""
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, MOST_REST)


class Frozen:
    """Puts large host tensors into the slots of one arena. For the staging thread only.

    `open` a slot, `put` tensors into it, `close` it. `open` discards the known digests of a slot, and `close` keeps
    only those of tensors that were put or proven since. So a fill that fails halfway leaves none.
    """

    def __init__(self) -> None:
        self.rates = CopyRates()
        self.skipped_bytes = 0  # bytes that were not copied, because the slot had them
        self.beside_training = True  # other code runs during the copies, and might free a storage
        self._layout: Layout | None = None
        self._past: dict[int, StagedBefore] = {}
        self._known: dict[int, dict[int, bytes]] = {}  # digests, by slot and number of the tensor
        self._before: dict[int, bytes] = {}
        self._now: dict[int, bytes] = {}

    def open(self, slot: int, layout: Layout) -> None:
        """Begin to fill a slot. If the layout is new, forget all digests."""
        if layout is not self._layout:
            self.clear()
            self._layout = layout
        self._before, self._now = self._known.pop(slot, {}), {}

    def close(self, slot: int) -> None:
        """Keep the digests of this fill. The slot must not change until it is opened again."""
        self._known[slot] = self._now
        self._before, self._now = {}, {}

    def forget(self, slot: int) -> None:
        """Forget the digests of a slot, because it may be used otherwise."""
        self._known.pop(slot, None)

    def clear(self) -> None:
        """Forget everything, because the arena or the layout is another one."""
        self._layout = None
        for known in (self._past, self._known, self._before, self._now):
            known.clear()

    def put(self, number: int, target: Tensor, source: Tensor) -> None:
        """Bring a contiguous host tensor into the slot, without the GIL. `number`: its number in the layout."""
        data = _readable(source) if self.beside_training else _at_address(source)
        digest = self._before.pop(number, None)
        past = self._past.setdefault(number, StagedBefore(version_of(source)))
        past.fills += 1
        fresh = (past.fills + number) % FRESH == 0  # staggered, so that not all tensors do this in one fill
        if not self._promising(past, source):
            self._copy(target, data)
        elif not self.rates.digests_pay():
            if fresh:
                self._digest(data[:PROBE])
            self._copy(target, data)
        elif digest is None or fresh:
            self._copy(target, data)
            self._note(number, past, target)
        elif self._proven(digest, data):
            self._now[number] = digest
            past.next_rest = 1
            self.skipped_bytes += source.nbytes
        else:
            past.changed()
            self._copy(target, data)

    def _promising(self, past: StagedBefore, source: Tensor) -> bool:
        """Return True if a tensor may be unchanged, by hints that cost nothing."""
        version = version_of(source)
        if version != past.version:
            past.version = version
            past.changed()
            return False
        if past.rest > 0:
            past.rest -= 1
            return False
        return True

    def _proven(self, digest: bytes, data: memoryview) -> bool:
        """Return True if these bytes are equal to those in the slot."""
        return self._digest(data) == digest

    def _note(self, number: int, past: StagedBefore, target: Tensor) -> None:
        """Remember the digest of a tensor that was just copied, if its first bytes are the same as last time."""
        whole = as_bytes(target).numpy().data
        probe = self._digest(whole[:PROBE])
        before, past.probe = past.probe, probe
        if probe == before:
            self._now[number] = probe if target.nbytes <= PROBE else self._digest(whole)
        elif before:
            past.changed()

    def _copy(self, target: Tensor, data: memoryview) -> None:
        there = as_bytes(target).numpy()
        started = time.perf_counter()
        np.copyto(there, np.frombuffer(data, np.uint8))
        self.rates.copying.append(target.nbytes / max(time.perf_counter() - started, 1e-9))

    def _digest(self, data: memoryview) -> bytes:
        started = time.perf_counter()
        found = chunk_digest(data)
        self.rates.digesting.append(data.nbytes / max(time.perf_counter() - started, 1e-9))
        return found


def _readable(source: Tensor) -> memoryview:
    """Return the bytes of a tensor whose storage other code might free while they are read.

    Torch never resizes a storage that numpy has seen: `resize_()` raises an error instead.
    """
    found = as_bytes(source).numpy().data
    if source.untyped_storage().nbytes() < source.nbytes:
        raise SaveError(
            "the storage of a tensor was freed while it was copied. Call before_untracked_update() of the "
            "Checkpointer first"
        )
    return found


def _at_address(source: Tensor) -> memoryview:
    """Return the bytes of a tensor, and leave its storage resizable."""
    return memoryview((ctypes.c_ubyte * source.nbytes).from_address(source.data_ptr())).cast("B")


# -- filling a slot --


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
