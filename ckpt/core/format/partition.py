"""Who stages what, as pure values: every rank computes its own share, and all shares fit together.

What several ranks hold alike (data parallel replicas) is cut into slices *before* it is copied, one slice a replica:
each rank stages and writes its slice only. All tensors that the same ranks hold alike are laid end to end, in the order
of their names, and that line is cut into pieces of equal bytes. A cut falls between rows, so that slices are boxes.
No rank needs to ask another: the line depends only on what is held alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.core.format.boxes import Box, Dims, boxes_of_run
from ckpt.core.format.layout import BITS

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


def share(holdings: Sequence[Holding], seat: Seat) -> list[Cut]:
    """What this rank stages of what it holds, in the order of `holdings`."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for i, holding in enumerate(holdings):
        lines.setdefault(holding.replicas, []).append(i)
    found: list[Cut] = []
    for replicas, members in lines.items():
        if seat.rank not in replicas:
            continue  # another rank's is the one that counts
        members.sort(key=lambda i: (holdings[i].name, holdings[i].instance, holdings[i].offsets))
        found += _slices(holdings, members, replicas.index(seat.rank), len(replicas))
    return sorted(found, key=lambda cut: (cut.holding, cut.box))


def _slices(holdings: Sequence[Holding], members: list[int], number: int, count: int) -> list[Cut]:
    """Slice `number` of `count` of the line."""
    total = sum(holdings[i].elements * holdings[i].item_size for i in members)
    count = min(count, max(1, total // LEAST))  # of a few numbers that thousands hold, the first ones take some each
    if number >= count:
        return []
    low, high = total * number // count, total * (number + 1) // count
    found: list[Cut] = []
    position = 0
    for i in members:
        holding = holdings[i]
        if not holding.elements:
            if not math.prod(holding.full) and number == 0:  # somebody has to name it
                found.append(Cut(i, (tuple(0 for _ in holding.sizes), holding.sizes)))
            continue
        start, stop = (_cut(holding, at - position) for at in (low, high))
        found += [Cut(i, box) for box in boxes_of_run(holding.sizes, start, stop)]
        position += holding.elements * holding.item_size
    return found


def _cut(holding: Holding, at: int) -> int:
    """The element of a holding before which a cut at byte `at` of it falls."""
    size, grain = holding.elements, 1
    if at <= 0 or at >= size * holding.item_size:
        return 0 if at <= 0 else size
    for length in reversed(holding.sizes):  # as many whole rows as fit into a grain
        if grain * length * holding.item_size > GRAIN:
            break
        grain *= length
    if grain == 1 and holding.sizes and holding.sizes[-1] * holding.item_size > GRAIN:
        grain = GRAIN // holding.item_size
    return min(round(at / (holding.item_size * grain)) * grain, size)


def partner(rank: int, nodes: tuple[int, ...]) -> int | None:
    """The rank on the next node that keeps a second copy of a rank's memory; None if there is one node only."""
    count = max(nodes) + 1
    if count == 1:
        return None
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    there = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    return there[place % len(there)]
