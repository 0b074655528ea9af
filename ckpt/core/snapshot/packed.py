"""Small tensors of a device, gathered there and brought to the host in one copy.

A copy costs the host some 6 us however small it is, and a model has thousands of norms, biases and step counts.
Gathered by a few kernels, on whichever stream, they cross the bus together; the host deals them out when they are here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ckpt.core.format.layout import Layout
from ckpt.core.snapshot import device
from ckpt.core.state.capture import Reading
from ckpt.core.state.tensors import TORCH_DTYPE

SMALL = 256 << 10  # bytes below which a tensor is gathered
LEAST = 8  # of them, else they are copied as they are
ALIGN = 16  # bytes

Kind = tuple[torch.device, bool]
"""Where tensors are, and whether only optimizers change them."""


class Pack:
    """Room for some tensors of a layout (`numbers`), on a device and on the host. Used again and again."""

    def __init__(self, layout: Layout, numbers: Sequence[int], where: torch.device) -> None:
        self.numbers, self.where = numbers, where
        specs = [layout.tensors[number] for number in numbers]
        starts = list(accumulate((-(-spec.nbytes // ALIGN) * ALIGN for spec in specs), initial=0))
        self._there = torch.empty(starts[-1], dtype=torch.uint8, device=where)
        self._here = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        places = list(zip(specs, starts, strict=False))

        def views(memory: Tensor) -> list[Tensor]:
            return [memory[at : at + s.nbytes].view(TORCH_DTYPE[s.dtype]).view(s.shape) for s, at in places]

        self._targets, self._found = views(self._there), views(self._here)
        kinds: dict[str, list[int]] = {}
        for i, spec in enumerate(specs):
            kinds.setdefault(spec.dtype, []).append(i)
        self._kinds = list(kinds.values())  # one kernel does many tensors of one dtype

    def gather(self, sources: Sequence[Tensor]) -> None:
        """On the current stream. `sources`: all tensors of the layout."""
        for kind in self._kinds:
            torch._foreach_copy_([self._targets[i] for i in kind], [sources[self.numbers[i]] for i in kind])

    def fetch(self, streams: device.PerDevice) -> None:
        """Have the host hold them when this stream has come so far."""
        with device.on({self.where: streams[self.where]}):
            self._here.copy_(self._there, non_blocking=True)

    def deal_out(self, views: Sequence[Tensor]) -> None:
        """Into a slot, given as all tensors of the layout. When they have come."""
        torch._foreach_copy_([views[number] for number in self.numbers], self._found)


class Packs:
    """The rooms that one layout needs: of each device, for what is copied early and for the rest. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._guarded: list[bool] = []
        self._numbers: dict[Kind, list[int]] = {}
        self._free: dict[Kind, list[Pack]] = {}

    def take(self, reading: Reading, *, late: bool) -> list[Pack]:
        """For the small ones among these, the guarded (`late`) or the others; to be given back."""
        layout, guarded = reading.layout, reading.guarded
        with self._lock:
            if layout is not self._layout or guarded is not self._guarded:
                self._layout, self._guarded, self._free = layout, guarded, {}
                self._numbers = _small(layout, guarded, reading.tensors)
            found = []
            for key, numbers in self._numbers.items():
                if key[1] is late:
                    free = self._free.setdefault(key, [])
                    found.append(free.pop() if free else Pack(layout, numbers, key[0]))
            return found

    def give_back(self, packs: Iterable[Pack]) -> None:
        """Nothing is copied there any more."""
        with self._lock:
            for pack in packs:
                for key, numbers in self._numbers.items():
                    if pack.numbers is numbers:
                        self._free.setdefault(key, []).append(pack)


def _small(layout: Layout, guarded: list[bool], sources: Sequence[Tensor]) -> dict[Kind, list[int]]:
    found: dict[Kind, list[int]] = {}
    for number, (spec, source) in enumerate(zip(layout.tensors, sources, strict=True)):
        plain = not (source.is_conj() or source.is_neg())
        if source.device.type == "cuda" and 0 < spec.nbytes < SMALL and plain:
            found.setdefault((source.device, guarded[number]), []).append(number)
    return {key: numbers for key, numbers in found.items() if len(numbers) >= LEAST}
