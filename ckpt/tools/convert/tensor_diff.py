"""Compare the tensors of two origins within a memory limit, whatever their size.

Use it to measure how a change of dtype, kernel, parallelism or library affects weights or the training state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.core.format.layout import BITS
from ckpt.tools.convert.cast import floats
from ckpt.tools.convert.source import Bytes, Origin, Want

CHUNK = 1 << 20  # elements that are compared at a time
WINDOW = 16 << 20  # bytes of each side that are in memory at the same time
_NUMBERS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1", "C64": "<c8", "C128": "<c16",
}  # fmt: skip

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two tensors. `differing`: number of elements that differ in any bit, or in value if the dtypes
    differ. The other fields: the largest absolute difference, the largest relative to the larger value, and the cosine
    of the angle between both tensors. These are None for dtypes that numpy lacks, and NaN if an element is NaN."""

    name: str
    dtype: str
    elements: int
    differing: int
    max_abs_difference: float | None
    max_rel_difference: float | None
    cosine: float | None
    dtype_b: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of equal shape to compare: a name, and the label of the tensor on each side."""

    name: str
    a: str
    b: str


def comparable(dtype: str, other: str) -> bool:
    """Return True if tensors of these dtypes can be compared element by element."""
    return dtype == other or all(d in _NUMBERS or d == "BF16" for d in (dtype, other))


async def differences(
    one: Origin, two: Origin, pairs: Sequence[Pair], *, window: int = WINDOW, on_bytes: OnBytes = None
) -> list[Difference]:
    """Return the differences of the pairs that differ, in order. Raise CorruptError if a side is damaged."""
    tallies = {pair: _Tally(one.tensors[pair.a].dtype, two.tensors[pair.b].dtype) for pair in pairs}
    for batch in _batches(one, two, pairs, window):
        here, there = ([_want(o, getattr(p, side), *run) for p, *run in batch] for o, side in ((one, "a"), (two, "b")))
        await asyncio.gather(one.read(here), two.read(there))
        for (pair, *_), a, b in zip(batch, here, there, strict=True):
            await asyncio.to_thread(tallies[pair].add, a.into, b.into)
            if on_bytes is not None:
                on_bytes(len(a.into) + len(b.into))
    return [tally.result(pair.name) for pair, tally in tallies.items() if tally.differing]


def _batches(one: Origin, two: Origin, pairs: Sequence[Pair], window: int) -> Iterator[list[tuple[Pair, int, int]]]:
    """Yield batches of element ranges. A batch fits into a window, measured on the side with more bytes."""
    batch, room = list[tuple[Pair, int, int]](), window
    for pair in pairs:
        item = max(BITS[o.tensors[label].dtype] for o, label in ((one, pair.a), (two, pair.b))) // 8
        count, start = math.prod(one.tensors[pair.a].shape), 0
        while start < count:
            stop = min(count, start + max(1, room // item))
            batch.append((pair, start, stop))
            room -= (stop - start) * item
            start = stop
            if room < item:
                yield batch
                batch, room = [], window
    if batch:
        yield batch


def _want(origin: Origin, label: str, start: int, stop: int) -> Want:
    spec = origin.tensors[label]
    into = np.empty((stop - start) * BITS[spec.dtype] // 8, np.uint8)
    return Want(label, ((0,) * len(spec.shape), spec.shape), start, stop, into)


@dataclass
class _Tally:
    """The result so far for one pair."""

    dtype: str
    other: str
    elements: int = 0
    differing: int = 0
    most: float = 0.0
    most_relative: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # sums of a*b, a*a and b*b

    @property
    def known(self) -> bool:
        return all(d in _NUMBERS or d == "BF16" for d in (self.dtype, self.other))

    def add(self, a: Bytes, b: Bytes) -> None:
        x, y = (raw.reshape(-1, BITS[dtype] // 8) for raw, dtype in ((a, self.dtype), (b, self.other)))
        for start in range(0, len(x), CHUNK):
            self._add(x[start : start + CHUNK], y[start : start + CHUNK])

    def _add(self, x: Bytes, y: Bytes) -> None:
        self.elements += len(x)
        if not self.known:
            self.differing += int((x != y).any(axis=1).sum())
            return
        with np.errstate(all="ignore"):
            a, b = numbers(x, self.dtype), numbers(y, self.other)
            where = (x != y).any(axis=1) if self.dtype == self.other else (a != b) & ~(np.isnan(a) & np.isnan(b))
            self.differing += int(where.sum())
            for i, (u, v) in enumerate(((a, b), (a, a), (b, b))):
                self.sums[i] += float(np.vdot(u, v).real)
            if where.any():
                a, b = a[where], b[where]
                apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
                relative = np.divide(apart, size, out=np.zeros_like(apart), where=size != 0)
                self.most = float(np.maximum(self.most, apart.max()))  # np.maximum, because it keeps NaN
                self.most_relative = float(np.maximum(self.most_relative, relative.max()))

    def result(self, name: str) -> Difference:
        most, relative, cosine = (self.most, self.most_relative, self._cosine()) if self.known else (None,) * 3
        return Difference(name, self.dtype, self.elements, self.differing, most, relative, cosine, self.other)

    def _cosine(self) -> float:
        dot, a, b = self.sums
        if a == b == 0:
            return 1.0
        return dot / math.sqrt(a) / math.sqrt(b) if a and b else 0.0


def numbers(rows: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return rows of bytes, one per element, as an array of numbers that are wide enough to compare."""
    values = floats(rows.reshape(-1), dtype) if dtype == "BF16" else rows.reshape(-1).view(_NUMBERS[dtype])
    return values.astype("<c16" if dtype.startswith("C") else "<f8")
