"""Divides replicated tensors among ranks: every rank computes its own share, and all shares fit together. Pure values.

Replicated pieces (data parallel replicas) are divided into slices *before* they are copied. Each rank stages and writes
only its slice. All tensors with the same replicas are concatenated in the order of their names, and the result is
divided into slices of equal bytes. The boundaries are between rows, so that slices are boxes. This needs no
communication, because it depends only on the replicated tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.core.format.boxes import Box, Dims, boxes_of_run
from ckpt.core.format.layout import BITS

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
    """A piece of a tensor on this rank: a box of the `full` tensor, replicated on `replicas` (ascending).

    Several ranks may have different tensors of the same name. `instance` distinguishes them: the lowest rank of those
    that share the tensor, or `GLOBAL` if all ranks do.
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
    """The part of holding number `holding` to stage: a box inside it."""

    holding: int
    box: Box


def share(holdings: Sequence[Holding], seat: Seat) -> list[Cut]:
    """Return the part of its holdings that this rank stages, in the order of `holdings`."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for i, holding in enumerate(holdings):
        lines.setdefault(holding.replicas, []).append(i)
    found: list[Cut] = []
    for replicas, members in lines.items():
        if seat.rank not in replicas:
            continue  # another rank saves it
        members.sort(key=lambda i: (holdings[i].name, holdings[i].instance, holdings[i].offsets))
        found += _slices(holdings, members, replicas.index(seat.rank), len(replicas))
    return sorted(found, key=lambda cut: (cut.holding, cut.box))


def _slices(holdings: Sequence[Holding], members: list[int], number: int, count: int) -> list[Cut]:
    """Return slice `number` of `count` of the concatenated tensors."""
    total = sum(holdings[i].elements * holdings[i].item_size for i in members)
    count = min(count, max(1, total // LEAST))  # if thousands of ranks have a few numbers, the first ranks take all
    if number >= count:
        return []
    low, high = total * number // count, total * (number + 1) // count
    found: list[Cut] = []
    position = 0
    for i in members:
        holding = holdings[i]
        if not holding.elements:
            if not math.prod(holding.full) and number == 0:  # one rank must name it
                found.append(Cut(i, (tuple(0 for _ in holding.sizes), holding.sizes)))
            continue
        start, stop = (_cut(holding, at - position) for at in (low, high))
        found += [Cut(i, box) for box in boxes_of_run(holding.sizes, start, stop)]
        position += holding.elements * holding.item_size
    return found


def _cut(holding: Holding, at: int) -> int:
    """Return the element of a holding at which a cut at its byte `at` is made."""
    size, grain = holding.elements, 1
    if at <= 0 or at >= size * holding.item_size:
        return 0 if at <= 0 else size
    for length in reversed(holding.sizes):  # as many complete rows as fit into a grain
        if grain * length * holding.item_size > GRAIN:
            break
        grain *= length
    if grain == 1 and holding.sizes and holding.sizes[-1] * holding.item_size > GRAIN:
        grain = GRAIN // holding.item_size
    return min(round(at / (holding.item_size * grain)) * grain, size)


def partner(rank: int, nodes: tuple[int, ...]) -> int | None:
    """Return the rank on the next node that keeps a second copy of a rank's memory, or None with a single node."""
    count = max(nodes) + 1
    if count == 1:
        return None
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    there = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    return there[place % len(there)]
