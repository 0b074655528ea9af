"""Skips copies of unchanged tensors: a tensor that has not changed since its slot was last filled is not copied again.

A slot is reused after some steps. Then it still contains frozen weights under an adapter, untrained embeddings and
constant buffers, bit for bit. Reading them once for a digest is faster than copying them. So a copy is skipped if the
XXH3-128 digest of the live bytes equals that of the bytes in the slot. Nothing else counts as proof: version counters
miss fused optimizers and writes through `.data`, and the identity of a tensor proves nothing. They only serve to
exclude tensors for which a digest would be wasted.

The digest is computed from the slot after the copy, so it matches the slot even if the tensor changed during the copy.
The live bytes are read at the time at which they would be copied. So a snapshot shows the same moment either way, and
the checks that protect a copy from concurrent writes protect the digest too.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from torch import Tensor

from ckpt.core.format.digest import blob_digest
from ckpt.core.format.layout import Layout
from ckpt.core.state.tensors import as_bytes, version_of
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
        found = blob_digest(data)
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
