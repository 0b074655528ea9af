"""Boxes: rectangular pieces of an array, and runs of its elements in row-major order. Pure numbers.

A box is (offsets, sizes), one number a dimension; an array without dimensions has one box, ((), ()).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Dims = tuple[int, ...]
Box = tuple[Dims, Dims]
I64: TypeAlias = "npt.NDArray[np.int64]"


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one array have in common; None if that is nothing."""
    starts = tuple(map(max, a[0], b[0]))
    ends = (min(i + m, j + n) for i, m, j, n in zip(*a, *b, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(n > 0 for n in sizes) else None


def within(box: Box, outer: Box) -> Box:
    """The same box, with offsets counted from the start of `outer`."""
    return tuple(i - j for i, j in zip(box[0], outer[0], strict=True)), box[1]


def boxes_of_run(sizes: Dims, start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of an array, in row-major order, as few boxes in the same order."""
    if start >= stop:
        return []
    if not sizes:
        return [((), ())]
    inner = math.prod(sizes[1:])
    first, skipped = divmod(start, inner)
    last, extra = divmod(stop, inner)
    if first == last:
        return _one_row(first, sizes, skipped, extra)
    found: list[Box] = []
    if skipped:
        found += _one_row(first, sizes, skipped, inner)
        first += 1
    if last > first:
        found.append(((first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])))
    return found + (_one_row(last, sizes, 0, extra) if extra else [])


def _one_row(row: int, sizes: Dims, start: int, stop: int) -> list[Box]:
    return [((row, *at), (1, *size)) for at, size in boxes_of_run(sizes[1:], start, stop)]


def run_of(box: Box, sizes: Dims) -> tuple[int, int]:
    """The shortest run of elements of an array that holds a box (not empty) of it."""
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    first = sum(i * s for i, s in zip(box[0], strides, strict=True))
    return first, first + 1 + sum((n - 1) * s for n, s in zip(box[1], strides, strict=True))


Runs = Sequence[tuple[int, int]]
"""Rising runs of indices: (first, how many)."""


def boxes_of_runs(runs: Sequence[Runs]) -> list[tuple[Box, Dims]]:
    """An array that holds these indices of every dimension of a larger one, as boxes of that.

    Each box comes with the offsets at which it lies in the array itself. No box if the array is empty.
    """
    placed = [_placed(each) for each in runs]
    return [
        ((tuple(start for start, _, _ in each), tuple(n for _, n, _ in each)), tuple(at for _, _, at in each))
        for each in itertools.product(*placed)
    ]


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Neighbours joined, empty ones dropped, and of each the place of its first index: (first, how many, place)."""
    found: list[tuple[int, int, int]] = []
    place = 0
    for first, count in runs:
        if found and first == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + count, found[-1][2])
        elif count:
            found.append((first, count, place))
        place += count
    return found


def take(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The indices at places `start` to `stop` of the runs."""
    found: list[tuple[int, int]] = []
    place = 0
    for first, count in runs:
        low, high = max(start - place, 0), min(stop - place, count)
        if low < high:
            found.append((first + low, high - low))
        place += count
    return found


class TangledError(ValueError):
    """Boxes that overlap in so many ways that counting them takes too long."""


@dataclass
class Effort:
    """What counting may cost, in units of some 30 microseconds. Boxes that do not overlap cost about one each."""

    left: int = 1 << 17

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TangledError("the boxes overlap in too many ways to be counted")


def times_covered(shape: Dims, boxes: Iterable[Box], effort: Effort | None = None) -> tuple[int, int]:
    """How often boxes inside an array cover its elements: (least, most). (1, 1) for an array without elements.

    Boxes can be made that take time beyond all bounds, a dozen in eight dimensions: TangledError if there is not
    enough `effort` left, which several calls may share.
    """
    if math.prod(shape) == 0:
        return 1, 1
    real = [box for box in boxes if all(box[1])]
    if len(real) == 1 and real[0][1] == shape and not any(real[0][0]):
        return 1, 1
    if not shape:
        return len(real), len(real)
    starts = np.array([offsets for offsets, _ in real], np.int64).reshape(len(real), len(shape))
    ends = starts + np.array([sizes for _, sizes in real], np.int64).reshape(len(real), len(shape))
    return _times(np.array(shape, np.int64), starts, ends, effort or Effort(len(real) + Effort.left))


def _times(shape: I64, starts: I64, ends: I64, effort: Effort) -> tuple[int, int]:
    if not len(starts):
        return 0, 0
    cut = np.flatnonzero((starts.min(0) > 0) | (starts.max(0) > 0) | (ends.min(0) < shape))
    if not len(cut):
        return len(starts), len(starts)
    # One dimension at a time: between two neighbouring cuts of it, the same boxes are there all along.
    dim, rest = cut[0], cut[1:]
    cuts = np.unique(np.concatenate([[0, shape[dim]], starts[:, dim], ends[:, dim]]))
    if not len(rest):
        effort.spend(1 + len(starts) // 64)
        depth = np.zeros(len(cuts), np.int64)
        np.add.at(depth, np.searchsorted(cuts, starts[:, dim]), 1)
        np.add.at(depth, np.searchsorted(cuts, ends[:, dim]), -1)
        times = np.cumsum(depth)[:-1]
        return int(times.min()), int(times.max())
    effort.spend(len(cuts) * (1 + len(starts) // 1024))
    seen: dict[bytes, tuple[int, int]] = {}
    for low, high in itertools.pairwise(cuts):
        there = (starts[:, dim] <= low) & (ends[:, dim] >= high)
        key = np.packbits(there).tobytes()
        if key not in seen:
            seen[key] = _times(shape[rest], starts[np.ix_(there, rest)], ends[np.ix_(there, rest)], effort)
    return min(least for least, _ in seen.values()), max(most for _, most in seen.values())
