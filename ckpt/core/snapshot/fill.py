"""Fills a slot in shared memory: first the tensors that may change before the next optimizer step, then the rest.

`SlotFiller` copies in the staging thread. On an accelerator it only queues the copies, and events on the streams signal
their end. Large host tensors go through `SlotDigests`. It skips a tensor if the slot still contains the same bytes, for
example frozen weights under an adapter, because reading them once for a digest is faster than copying them.

A tensor is skipped only if the XXH3-128 digest of the live bytes equals the digest of the bytes in the slot. The slot's
digest is computed from the slot after the copy, so it matches the slot even if the tensor changed during the copy. The
live bytes are read when they would be copied, so the checks that protect a copy from concurrent writes protect the
digest too. Version counters miss fused optimizers and writes through `.data`. They only exclude tensors for which a
digest would be wasted.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.core.format.boxes import boxes_of_run
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import Layout, pages
from ckpt.core.ipc.arena import LOCK, Arena
from ckpt.core.snapshot import device
from ckpt.core.snapshot.device import PerDevice
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.state.sharding import slices
from ckpt.core.state.tensors import TORCH_DTYPE, as_bytes, version_of
from ckpt.errors import SaveError

LARGE = 1 << 20  # bytes; from this size, one memcpy without the GIL is faster than a batched copy
PAUSE = 64  # number of fills without a digest after a tensor has changed and its version counter has not

Pair = tuple[Tensor, Tensor, int]  # target, source, and number of the tensor in the layout


class SlotDigests:
    """The digests of large host tensors in the slots of one arena. For the staging thread only.

    `open` a slot, `put` tensors into it, `close` it. `open` discards the digests of the slot. `close` keeps only the
    digests of tensors that were put since `open`, so a fill that fails halfway leaves none.
    """

    def __init__(self) -> None:
        self.skipped_bytes = 0  # bytes that were not copied, because the slot had them
        self._layout: Layout | None = None
        self._versions: dict[int, int | None] = {}  # versions at the last fill, by tensor number
        self._newest: dict[int, bytes] = {}  # the last digest since the version changed, by tensor number
        self._pauses: dict[int, int] = {}  # remaining fills without a digest, by tensor number
        self._known: dict[int, dict[int, bytes]] = {}  # digests by slot and tensor number
        self._before: dict[int, bytes] = {}
        self._now: dict[int, bytes] = {}

    def open(self, slot: int, layout: Layout) -> None:
        """Begin to fill a slot. If the layout is new, forget all digests."""
        if layout is not self._layout:
            self.clear()
            self._layout = layout
        self._before, self._now = self._known.pop(slot, {}), {}

    def close(self, slot: int) -> None:
        """Keep the digests of this fill. The slot must not change until the next `open`."""
        self._known[slot], self._before, self._now = self._now, {}, {}

    def forget(self, slot: int) -> None:
        """Forget the digests of a slot, because other code may write to it."""
        self._known.pop(slot, None)

    def clear(self) -> None:
        """Forget everything, because the arena or the layout has changed."""
        self._layout = None
        for known in (self._versions, self._newest, self._pauses, self._known, self._before, self._now):
            known.clear()

    def put(self, number: int, target: Tensor, source: Tensor, *, beside_training: bool = True) -> None:
        """Copy a contiguous host tensor into the slot, without the GIL. `number`: its number in the layout.

        beside_training: True if other code runs during the copy, and might free the storage.
        """
        if beside_training:
            # Torch never resizes a storage that numpy has seen: `resize_()` raises an error instead.
            data = as_bytes(source).numpy().data
            if source.untyped_storage().nbytes() < source.nbytes:
                raise SaveError(
                    "the storage of a tensor was freed while it was copied. Call before_untracked_update() of the "
                    "Checkpointer first"
                )
        else:
            data = memoryview((ctypes.c_ubyte * source.nbytes).from_address(source.data_ptr())).cast("B")
        digest, version = self._before.pop(number, None), version_of(source)
        unchanged = self._versions.get(number, -1) == version  # according to the version counter
        self._versions[number] = version
        pause = self._pauses.pop(number, 0)
        if digest is not None and unchanged and not pause:
            if chunk_digest(data) == digest:
                self._now[number] = digest
                self.skipped_bytes += source.nbytes
                return
            pause = PAUSE
        there = as_bytes(target).numpy()
        np.copyto(there, np.frombuffer(data, np.uint8))
        if pause:
            self._pauses[number] = pause - 1
        elif unchanged:
            digest = chunk_digest(there.data)
            if self._newest.setdefault(number, digest) == digest:
                self._now[number] = digest
                return
            self._pauses[number] = PAUSE
        self._newest.pop(number, None)


class SlotFiller:
    """Fills slots in the staging thread. For each slot, call `fill_eager`, `fill_guarded`, and then `digests.close`."""

    def __init__(self, steady: contextlib.AbstractContextManager[Any]) -> None:
        """`steady`: a lock. While it is held, no memory is page-locked."""
        self._steady = steady
        self.digests = SlotDigests()
        self._streams: PerDevice = {}  # a separate stream on each device, for copies during training
        self._views: dict[tuple[bytes, int], tuple[Layout, list[Tensor]]] = {}

    def clear(self) -> None:
        """Forget all slots, because the arena has changed."""
        self._views.clear()
        self.digests.clear()

    def fill_eager(self, arena: Arena, slot: int, snapshot: NewSnapshot) -> None:
        """Copy the tensors that may change before the next optimizer step."""
        layout, streams = snapshot.captured.layout, self._streams_for(snapshot)
        self.digests.open(slot, layout)
        device.queue_behind(streams, snapshot.ready)
        self._copy_part(arena, slot, snapshot, snapshot.captured.early, beside_training=False)
        start = pages(layout.arrangement.data_size)
        arena.data(slot)[start : start + len(snapshot.values)] = snapshot.values
        for pack in snapshot.early:
            pack.fetch(streams)
        snapshot.eager = device.events_behind(streams)
        if not snapshot.taken_early:
            device.queue_behind(snapshot.streams, snapshot.eager)  # later kernels may change tensors being copied

    def fill_guarded(self, arena: Arena, slot: int, snapshot: NewSnapshot) -> None:
        """Copy the tensors that only optimizers change, and call `snapshot.beside`. On a device this only queues the
        work, and `snapshot.done` gets the events after it."""
        streams, guarded = self._streams_for(snapshot), snapshot.captured.guarded
        for pack in snapshot.late:
            with device.on(streams):
                pack.gather(snapshot.sources)
        self._copy_part(arena, slot, snapshot, list(compress(range(len(guarded)), guarded)), beside_training=True)
        for pack in snapshot.late:
            pack.fetch(streams)
        snapshot.check_sources()
        for one in snapshot.fingerprints if streams else ():
            one.fetch(streams)
        if snapshot.beside is not None:
            with device.on(streams):
                snapshot.beside()
        snapshot.done = device.events_behind(streams)

    def deal_out(self, arena: Arena, slot: int, snapshot: NewSnapshot) -> Tensor:
        """Distribute the tensors of packs that were copied from a device. Return the bytes of the slot."""
        for pack in (*snapshot.early, *snapshot.late):
            pack.deal_out(self._slot_views(arena, slot, snapshot.captured.layout))
        return torch.frombuffer(arena.data(slot), dtype=torch.uint8)

    def settle(self, snapshot: NewSnapshot) -> None:
        """Wait until no device copies for this snapshot, before its slot is reused or its sources are freed."""
        for where in snapshot.streams.keys() & self._streams.keys():
            with contextlib.suppress(Exception):  # a failed device copies nothing
                self._streams[where].synchronize()

    def _streams_for(self, snapshot: NewSnapshot) -> PerDevice:
        for where in snapshot.streams:
            if where not in self._streams:
                self._streams[where] = device.new_stream(where)
        return {where: self._streams[where] for where in snapshot.streams}

    def _copy_part(
        self, arena: Arena, slot: int, snapshot: NewSnapshot, numbers: list[int], *, beside_training: bool
    ) -> None:
        layout, sources = snapshot.captured.layout, snapshot.sources
        views = self._slot_views(arena, slot, layout)
        snapshot.check_memory(numbers)
        if snapshot.streams:
            packed = snapshot.packed
            pairs: Iterable[Pair] = [(views[n], sources[n], n) for n in numbers if n not in packed]
            if layout.arrangement.data_size > LOCK:
                pairs = [cut for pair in pairs for cut in _cut(*pair, layout.arrangement.offsets[pair[2]], LOCK)]
            self.copy(list(pairs), self._streams_for(snapshot))
            return
        little = [n for n in numbers if layout.sizes[n] < LARGE]  # most tensors are small, so they take a short path
        if little:
            device.copy_batch([views[n] for n in little], [sources[n] for n in little], {})
        large = [(views[n], sources[n], n) for n in numbers if layout.sizes[n] >= LARGE]
        self.copy(large, {}, beside_training)

    def _slot_views(self, arena: Arena, slot: int, layout: Layout) -> list[Tensor]:
        """Return the slot as tensors of the layout's shapes."""
        key = (arena.id, slot)
        cached = self._views.get(key)
        if cached is not None and cached[0] is layout:
            return cached[1]
        whole = torch.frombuffer(arena.data(slot), dtype=torch.uint8)
        typed = {dtype: whole.view(TORCH_DTYPE[dtype]) for dtype in {t.dtype for t in layout.tensors}}
        views = []
        for of, offset in zip(layout.tensors, layout.arrangement.offsets, strict=True):
            strides = [prod(of.shape[i + 1 :]) for i in range(len(of.shape))]
            views.append(typed[of.dtype].as_strided(of.shape, strides, offset // typed[of.dtype].itemsize))
        self._views[key] = (layout, views)
        return views

    def copy(self, pairs: Sequence[Pair], streams: PerDevice, beside_training: bool = True) -> None:
        """Queue the copies from devices, one batched call for each device, then copy large host tensors one by one.

        `beside_training`: True if training continues during these copies.
        """
        batches: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {one: ([], []) for one in streams}
        large: list[Pair] = []
        for target, source, number in pairs:
            if target.nbytes >= LARGE and _is_plain(source) and source.device.type == "cpu":
                large.append((target, source, number))
                continue
            targets, sources = batches.setdefault(source.device, ([], []))
            targets.append(target)
            sources.append(source)
        for targets, sources in batches.values():
            if targets:
                with self._steady:
                    device.copy_batch(targets, sources, streams)
        for target, source, number in large:
            self.digests.put(number, target, source, beside_training=beside_training)


def _is_plain(source: Tensor) -> bool:
    """Return True if a tensor's memory has the bytes of its elements in order."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _cut(target: Tensor, source: Tensor, number: int, offset: int, piece: int) -> Iterator[Pair]:
    """Cut a copy from a device at the ends of page-locked pieces. `offset`: byte offset of the target in its slot."""
    first = piece - offset % piece
    if source.device.type == "cpu" or target.nbytes <= first:
        yield target, source, number
        return
    bounds = [0, *range(first, target.nbytes, piece), target.nbytes]
    if _is_plain(source):
        there, here = as_bytes(target), as_bytes(source)
        yield from ((there[a:b], here[a:b], number) for a, b in pairwise(bounds))
        return
    flat = target.view(-1)  # a strided source is made contiguous first, piece by piece
    for a, b in pairwise(bound // target.itemsize for bound in bounds):
        for at, sizes in boxes_of_run(tuple(target.shape), a, b):
            count = prod(sizes)
            yield flat[a : a + count].view(sizes), source[slices((at, sizes))], number
            a += count
