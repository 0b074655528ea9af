"""Who stages what, as pure values: every rank computes its own share, and all shares fit together.

What several ranks hold alike (data parallel replicas) is cut into slices *before* it is copied, one slice a replica:
each rank stages and writes its slice only. All tensors that the same ranks hold alike are laid end to end, in the order
of their names, and that line is cut into pieces of equal bytes. A cut falls between rows, so that slices are boxes.
A parameter and its optimizer's state of the same shape lie side by side and are cut at the same row: one follows from
the other (see `ckpt.redo.adam`), which only who has both can use.
No rank needs to ask another: the line depends only on what is held alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.format.boxes import Box, Dims, boxes_of_run
from ckpt.format.layout import BITS

GRAIN = 64 << 10  # bytes; smaller pieces are not cut
LEAST = 1 << 10  # bytes of a slice, if others can do without: who wants all of a line reads from fewer ranks then
GLOBAL = -1  # the instance of a tensor that all ranks hold together


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of how many this is."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """A piece of a tensor that this rank has: a box of the `full` tensor, held alike by `replicas` (ascending).

    Ranks that do not hold one tensor together, but have one each of the same name, are told apart by `instance`: the
    lowest rank of those that hold it together, `GLOBAL` if all do.
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
    """What to stage of holding number `holding`: a box inside it."""

    holding: int
    box: Box


def share(holdings: Sequence[Holding], seat: Seat, beside: Mapping[str, str] | None = None) -> list[Cut]:
    """What this rank stages of what it holds, in the order of `holdings`.

    `beside`: names of tensors that are to be cut as another one is, by whose name they go.
    """
    lines: dict[tuple[int, ...], list[int]] = {}
    for i, holding in enumerate(holdings):
        lines.setdefault(holding.replicas, []).append(i)
    found: list[Cut] = []
    for replicas, members in lines.items():
        if seat.rank not in replicas:
            continue  # another rank's is the one that counts
        bundles = list(_bundles(holdings, members, beside or {}))
        found += _slices(holdings, bundles, replicas.index(seat.rank), len(replicas))
    return sorted(found, key=lambda cut: (cut.holding, cut.box))


def _bundles(holdings: Sequence[Holding], members: list[int], beside: Mapping[str, str]) -> Iterator[list[int]]:
    """What lies side by side in the line, one after the other."""

    def place(i: int) -> tuple[str, int, Dims, Dims, Dims]:
        one = holdings[i]
        return beside.get(one.name, one.name), one.instance, one.offsets, one.sizes, one.full

    for _, group in itertools.groupby(sorted(members, key=lambda i: (place(i), holdings[i].name)), key=place):
        yield list(group)


def _slices(holdings: Sequence[Holding], bundles: list[list[int]], number: int, count: int) -> list[Cut]:
    """Slice `number` of `count` of the line."""
    total = sum(holdings[i].elements * holdings[i].item_size for bundle in bundles for i in bundle)
    count = min(count, max(1, total // LEAST))  # of a few numbers that thousands hold, the first ones take some each
    if number >= count:
        return []
    low, high = total * number // count, total * (number + 1) // count
    found: list[Cut] = []
    position = 0
    for bundle in bundles:
        one, across = holdings[bundle[0]], sum(holdings[i].item_size for i in bundle)
        if not one.elements:
            if not math.prod(one.full) and number == 0:  # somebody has to name it
                found += [Cut(i, (tuple(0 for _ in one.sizes), one.sizes)) for i in bundle]
            continue
        start, stop = (_cut(one.sizes, across, at - position) for at in (low, high))
        found += [Cut(i, box) for box in boxes_of_run(one.sizes, start, stop) for i in bundle]
        position += one.elements * across
    return found


def _cut(sizes: Dims, across: int, at: int) -> int:
    """The element before which a cut at byte `at` falls, of tensors side by side with `across` bytes an element."""
    size, grain = math.prod(sizes), 1
    if at <= 0 or at >= size * across:
        return 0 if at <= 0 else size
    for length in reversed(sizes):  # as many whole rows as fit into a grain
        if grain * length * across > GRAIN:
            break
        grain *= length
    if grain == 1 and sizes and sizes[-1] * across > GRAIN:
        grain = GRAIN // across
    return min(round(at / (across * grain)) * grain, size)


def partner(rank: int, nodes: tuple[int, ...]) -> int | None:
    """The rank on the next node that keeps a second copy of a rank's memory; None if there is one node only."""
    count = max(nodes) + 1
    if count == 1:
        return None
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    there = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    return there[place % len(there)]
