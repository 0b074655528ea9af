"""What a slot holds already: a tensor that nobody wrote to since this slot was last filled need not be copied again.

A slot comes round after some steps. Frozen weights under an adapter, embeddings that are not trained and constant
buffers are in it still, bit for bit. Reading them once, for a digest, takes less time than reading and writing them, so
a tensor is left out when the XXH3-128 of its live bytes is that of the bytes in the slot. Nothing else counts as proof:
version counters miss fused optimizers and writes through `.data`, and the identity of a tensor says nothing. They only
tell which tensors are not worth the attempt.

The digest is taken from the slot itself, after the copy, so it is true of what lies there even if somebody wrote to the
tensor meanwhile. The live bytes are read at the moment at which they would have been copied, so a snapshot is of the
same moment either way, and what guards the copy against other writers guards the reading.
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

PROBE = 4 << 20  # bytes of a tensor, from its beginning, that must be alike twice before all of it is digested
MOST_REST = 64  # fills for which a tensor that keeps changing is left alone
FRESH = 64  # one fill in so many is a copy, or a digest, whatever pays: to know what each costs now
SAMPLES = 9  # of each rate; their median counts


@dataclass
class CopyRates:
    """How fast this machine copies and digests now, bytes per second, by what was really done."""

    copying: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    digesting: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def digests_pay(self) -> bool:
        """Also while one of the two is not known."""
        return not (self.copying and self.digesting) or median(self.digesting) > median(self.copying)


@dataclass
class StagedBefore:
    """What one tensor of the layout was like when it was last staged, into whichever slot. Hints, never proof."""

    version: int | None = None
    probe: bytes = b""
    rest: int = 0  # fills for which it is not tried
    next_rest: int = 1
    fills: int = 0

    def changed(self) -> None:
        self.probe = b""
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, MOST_REST)


class Frozen:
    """Puts large host tensors into the slots of one arena. For the staging thread only.

    `open` a slot, `put` tensors into it, `close` it. What was known of a slot is gone with `open`, and `close` keeps
    only what was put or proven since: a fill that fails half-way leaves nothing behind.
    """

    def __init__(self) -> None:
        self.rates = CopyRates()
        self.skipped_bytes = 0  # not copied, since they were there
        self.beside_training = True  # other code runs meanwhile, and might free a storage
        self._layout: Layout | None = None
        self._past: dict[int, StagedBefore] = {}
        self._known: dict[int, dict[int, bytes]] = {}  # by slot, and number of the tensor: its digest
        self._before: dict[int, bytes] = {}
        self._now: dict[int, bytes] = {}

    def open(self, slot: int, layout: Layout) -> None:
        """Begin to fill a slot. Of another layout nothing is known."""
        if layout is not self._layout:
            self.clear()
            self._layout = layout
        self._before, self._now = self._known.pop(slot, {}), {}

    def close(self, slot: int) -> None:
        """What was put since `open` is there, and nobody else writes to the slot."""
        self._known[slot] = self._now
        self._before, self._now = {}, {}

    def forget(self, slot: int) -> None:
        """Something else may become of this slot."""
        self._known.pop(slot, None)

    def clear(self) -> None:
        """Another arena, or another layout."""
        self._layout = None
        for known in (self._past, self._known, self._before, self._now):
            known.clear()

    def put(self, number: int, target: Tensor, source: Tensor) -> None:
        """Have a contiguous host tensor in the slot, without the GIL; `number`: which one of the layout it is."""
        data = _readable(source) if self.beside_training else _at_address(source)
        digest = self._before.pop(number, None)
        past = self._past.setdefault(number, StagedBefore(version_of(source)))
        past.fills += 1
        fresh = (past.fills + number) % FRESH == 0  # not all tensors at once
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
        """Whether a tensor may be what it was, by all that costs nothing to know."""
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
        """Whether these are the bytes in the slot."""
        return self._digest(data) == digest

    def _note(self, number: int, past: StagedBefore, target: Tensor) -> None:
        """Remember what has just been copied, if its beginning is as it was the last time."""
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
