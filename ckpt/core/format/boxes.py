"""Computes with boxes (rectangular pieces of an array), and divides replicated tensors among ranks. Pure numbers.

A box is (offsets, sizes) with one number per dimension. An array without dimensions has one box, ((), ()). A run is a
range of elements in row-major order.

`share` divides replicated pieces (data parallel replicas) into slices *before* they are copied, so that each rank
stages and writes only its slice. All tensors that the same ranks have are concatenated in the order of their names, and
divided into slices of equal bytes. The boundaries are between rows, so that slices are boxes. The ranks need no
communication, because each computes the division from the replicated tensors alone, with the same result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckpt.core.format.layout import BITS

if TYPE_CHECKING:
    import numpy.typing as npt


Dims = tuple[int, ...]
Box = tuple[Dims, Dims]
I64: TypeAlias = "npt.NDArray[np.int64]"


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of one array, or None if it is empty."""
    starts = tuple(map(max, a[0], b[0]))
    ends = (min(i + m, j + n) for i, m, j, n in zip(*a, *b, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(n > 0 for n in sizes) else None


def within(box: Box, outer: Box) -> Box:
    """Return the box with its offsets relative to `outer`."""
    return tuple(i - j for i, j in zip(box[0], outer[0], strict=True)), box[1]


def boxes_of_run(sizes: Dims, start: int, stop: int) -> list[Box]:
    """Return elements `start` to `stop` of an array, in row-major order, as the fewest boxes in this order."""
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
    """Return the shortest run of elements of an array that contains a box. The box must not be empty."""
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    first = sum(i * s for i, s in zip(box[0], strides, strict=True))
    return first, first + 1 + sum((n - 1) * s for n, s in zip(box[1], strides, strict=True))


Runs = Sequence[tuple[int, int]]
"""Ascending runs of indices, each as (first, count)."""


def boxes_of_runs(runs: Sequence[Runs]) -> list[tuple[Box, Dims]]:
    """Return the boxes of an array that together have the elements with these indices in every dimension.

    Each box comes with its offsets in the smaller array of these elements. Return [] if that array is empty.
    """
    placed = [_placed(each) for each in runs]
    return [
        ((tuple(start for start, _, _ in each), tuple(n for _, n, _ in each)), tuple(at for _, _, at in each))
        for each in itertools.product(*placed)
    ]


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Join neighbouring runs and drop empty runs. Return (first, count, position of the first index) for each."""
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
    """Return the indices at positions `start` to `stop` of the runs."""
    found: list[tuple[int, int]] = []
    place = 0
    for first, count in runs:
        low, high = max(start - place, 0), min(stop - place, count)
        if low < high:
            found.append((first + low, high - low))
        place += count
    return found


class TangledError(ValueError):
    """Raised if boxes overlap in too many ways to count them in reasonable time."""


@dataclass
class Effort:
    """The cost limit of counting, in units of about 30 microseconds. A box without overlaps costs about one unit."""

    left: int = 1 << 17

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TangledError("the boxes overlap in too many ways to be counted")


def times_covered(shape: Dims, boxes: Iterable[Box], effort: Effort | None = None) -> tuple[int, int]:
    """Return how often boxes cover each element of an array, as (minimum, maximum); (1, 1) if it has no elements.

    Counting a dozen boxes in eight dimensions can take extremely long. Several calls may share one `effort`. Raise
    TangledError when the effort is used up.
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
    # Handle one dimension at a time. Between two neighbouring cuts, the set of boxes is constant.
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


# -- division of replicated tensors among ranks --


GRAIN = 64 << 10  # bytes; smaller pieces are not divided
LEAST = 1 << 10  # minimum bytes of a slice, so that a reader of the whole tensor needs fewer ranks
GLOBAL = -1  # the instance of a tensor that all ranks share


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of this process, and the world size."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """A piece of a tensor on this rank: a box of the `full` tensor. `replicas`: all ranks with this piece, ascending.

    Several ranks may have different tensors of the same name. `instance` distinguishes them: it is the lowest rank that
    shares the tensor, or `GLOBAL` if all ranks share it.
    """

    name: str
    dtype: str
    full: Dims
    offsets: Dims
    sizes: Dims
    replicas: tuple[int, ...] = (0,)
    instance: int = GLOBAL
    accelerator: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def item_size(self) -> int:
        return BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Cut:
    """A box inside holding number `holding`, which this rank stages."""

    holding: int
    box: Box


def share(holdings: Sequence[Holding], seat: Seat) -> list[Cut]:
    """Return the boxes that this rank stages, in the order of `holdings`."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for i, holding in enumerate(holdings):
        lines.setdefault(holding.replicas, []).append(i)
    found: list[Cut] = []
    for replicas, members in lines.items():
        if seat.rank not in replicas:
            continue  # only other ranks have these pieces
        members.sort(key=lambda i: (holdings[i].name, holdings[i].instance, holdings[i].offsets))
        found += _slices(holdings, members, replicas.index(seat.rank), len(replicas))
    return sorted(found, key=lambda cut: (cut.holding, cut.box))


def _slices(holdings: Sequence[Holding], members: list[int], number: int, count: int) -> list[Cut]:
    """Return slice `number` of `count` of the concatenated tensors."""
    total = sum(holdings[i].elements * holdings[i].item_size for i in members)
    count = min(count, max(1, total // LEAST))  # only the first ranks stage slices of a small tensor
    if number >= count:
        return []
    low, high = total * number // count, total * (number + 1) // count
    found: list[Cut] = []
    position = 0
    for i in members:
        holding = holdings[i]
        if not holding.elements:
            if not math.prod(holding.full) and number == 0:  # one rank must list even an empty tensor
                found.append(Cut(i, (tuple(0 for _ in holding.sizes), holding.sizes)))
            continue
        start, stop = (_cut(holding, at - position) for at in (low, high))
        found += [Cut(i, box) for box in boxes_of_run(holding.sizes, start, stop)]
        position += holding.elements * holding.item_size
    return found


def _cut(holding: Holding, at: int) -> int:
    """Return the element number at which a slice may end that is nearest to byte `at` of a holding."""
    size, grain = holding.elements, 1
    if at <= 0 or at >= size * holding.item_size:
        return 0 if at <= 0 else size
    for length in reversed(holding.sizes):  # a grain has as many complete rows as fit
        if grain * length * holding.item_size > GRAIN:
            break
        grain *= length
    if grain == 1 and holding.sizes and holding.sizes[-1] * holding.item_size > GRAIN:
        grain = GRAIN // holding.item_size
    return min(round(at / (holding.item_size * grain)) * grain, size)


def partner(rank: int, nodes: tuple[int, ...]) -> int | None:
    """Return the rank on the next node that keeps the replica of a rank's memory, or None with a single node."""
    count = max(nodes) + 1
    if count == 1:
        return None
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    there = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    return there[place % len(there)]
