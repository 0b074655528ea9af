"""Reads and restores tensors that a trainer distributes among its ranks itself, described by name and position.

A checkpoint stores them like a module whose tensors are distributed among the ranks. So a saved `ckpt.state.Shards`
can be restored as a module with the same names, and vice versa.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt.core.format.boxes import Dims, boxes_of_run, times_covered
from ckpt.core.format.values import Path, SavedNode, show
from ckpt.core.state.nodes import Contents, Memories, StateNode
from ckpt.core.state.placement import Placement
from ckpt.core.state.sharding import Division, Names, StateEntry, is_dtensor
from ckpt.core.state.tensors import check
from ckpt.errors import StateError


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of a whole tensor of the given `shape` that is in this rank's memory (`tensor`, on any device).

    - `Shard(tensor, shape)`: the complete tensor.
    - `Shard(tensor, shape, offsets)`: the box with the sizes of `tensor` that begins at these indices.
    - `Shard(tensor, shape, start=a)`: elements a, a + 1, … of the whole in row-major order, as in flat buffers;
      `tensor` has one dimension and no gaps. It may be empty if this rank has no part of the whole.
    - `Shard(tensor, shape, offsets, within=sizes, start=a)`: elements a, a + 1, … of the box that begins at `offsets`
      and has these `sizes`, for example in the flat buffer of a parameter that is also sharded by tensor parallelism.

    `replicas`: the ranks that have exactly the same piece, including this rank. Each of them stages a part of it. None:
        only this rank has the piece. A restore writes into `tensor` in place.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    within: tuple[int, ...] | None = None
    start: int | None = None
    replicas: tuple[int, ...] | None = None


Pieces = Mapping[str, Shard | Sequence[Shard] | Tensor]


class Shards:
    """Named tensors of which every rank has some pieces, as an entry of the state: `{"masters":
    ckpt.state.Shards(pieces)}`.

    pieces: a dict from the name of each tensor to the parts of this rank: a `Shard`, a list of them, or an empty list.
        Or a function that returns the dict. It is called at every step, so the memory may change; if it returns the
        same dict object again, that is assumed to be unchanged. All ranks list the same names. Their pieces together
        must cover each tensor exactly once, replicas counted once; otherwise the save fails. A plain tensor belongs to
        this rank only. Two names for one `Shard` object are one tensor.
    optimizer: the only optimizer whose `step()` changes the tensors, so that their copy may overlap the next forward
        and backward. None: the tensors are copied before `cp.step()` returns.
    restored: called without arguments after a restore has filled all tensors of the state, to compute dependent values.
    ranks: the ranks that store these tensors together, so that each pipeline stage can have its own names. None: all.

    `step()`, `save()` and `restore()` raise StateError with the name of a tensor that cannot be saved, and the reason.
    """

    def __init__(
        self,
        pieces: Pieces | Callable[[], Pieces],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        restored: Callable[[], object] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._pieces = pieces
        self.optimizer, self.restored = optimizer, restored
        self.ranks = None if ranks is None else tuple(sorted(ranks))

    def pieces(self) -> Pieces:
        """Return the current pieces."""
        return self._pieces() if callable(self._pieces) else self._pieces


class ShardsNode(StateNode):
    """Reads a `Shards`, and restores it."""

    kind = "module"

    def __init__(self, path: Path, target: Shards) -> None:
        super().__init__(path)
        self.target, self.optimizer = target, target.optimizer
        self._last: Pieces | None = None
        self._forms: list[object] = []
        self._memories = Memories()
        self._contents: Contents | None = None
        self._here: dict[str, StateEntry] = {}  # tensors of which this rank has a part, by name in the state

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, Shards)

    def read(self, names: Names) -> Contents:
        given = self.target.pieces()
        if self._contents is None or given is not self._last or self._memories.changed():
            pieces = self._checked(given)
            owners: dict[tuple[int, ...], str] = {}  # for the pieces of each tensor, its first name
            forms: list[object] = [
                (name, owners.setdefault(tuple(map(id, own)), name), [_form(one) for one in own])
                for name, own in pieces.items()
            ]
            if self._contents is None or forms != self._forms:
                self._contents = None  # if this reading fails, the next one must not use old contents
                self._contents = self._divide(pieces)
            self._last, self._forms = given, forms
            self._memories = Memories([_memory(one) for own in pieces.values() for one in own])
        return self._contents

    def _divide(self, pieces: Mapping[str, Sequence[Shard | Tensor]]) -> Contents:
        known: dict[tuple[int, ...], StateEntry] = {}
        self._here = {}
        for name, own in pieces.items():
            if own:
                same = known.setdefault(tuple(map(id, own)), self._entry(name, own))
                self._here[self._name(name)] = replace(same, name=self._name(name))
        nothing = [self._name(name) for name, own in pieces.items() if not own]
        listed = [StateEntry(name, _NOTHING, alike=Division((0,), ())) for name in nothing]
        return Contents([*self._here.values(), *listed])

    def _name(self, name: str) -> str:
        return show((*self.path, name))

    def _checked(self, given: Pieces) -> dict[str, Sequence[Shard | Tensor]]:
        """Return this rank's parts of each tensor as a list. Raise StateError if they are not valid or savable."""
        found: dict[str, Sequence[Shard | Tensor]] = {}
        if not isinstance(given, Mapping):
            raise StateError(f"{show(self.path)}: the pieces of a Shards must be a dict by name, not {type(given)}")
        for name, each in given.items():
            own = [each] if isinstance(each, Shard | Tensor) else each
            odd = not isinstance(own, Sequence) or not all(isinstance(s, Shard) for s in own if s is not each)
            if type(name) is not str or odd:
                raise StateError(f"{show(self.path)}: {name!r} must be a str, and its value a Shard or a list of them")
            for one in own:
                if is_dtensor(memory := _memory(one)):
                    raise StateError(
                        f"{self._name(name)}: a DTensor contains its own placement: put it into the state directly"
                    )
                check(memory, (*self.path, name))
            found[name] = own
        return found

    def _entry(self, name: str, own: Sequence[Shard | Tensor]) -> StateEntry:
        path = (*self.path, name)
        if isinstance(own[0], Tensor):
            return StateEntry(show(path), own[0])
        shards = [one for one in own if isinstance(one, Shard)]
        first = shards[0]
        for one in shards:
            if one.tensor.dtype != first.tensor.dtype or tuple(one.shape) != tuple(first.shape):
                raise StateError(
                    f"{show(path)}: the pieces of this rank differ: {list(first.shape)} of {first.tensor.dtype}, and "
                    f"{list(one.shape)} of {one.tensor.dtype}: all must have the shape and dtype of the whole tensor"
                )
        boxes = [(view, at, one.replicas) for one in shards for view, at in _boxes(one, path)]
        shape = tuple(first.shape)
        filled = [(at, tuple(view.shape)) for view, at, _ in boxes if view.numel()]
        if len(filled) > 1 and times_covered(shape, filled)[1] > 1:
            raise StateError(f"{show(path)}: two pieces of this rank claim the same elements: list each element once")
        division = Division(shape, tuple(boxes), self.target.ranks)
        return StateEntry(show(path), first.tensor.detach(), self.optimizer is not None, division)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        contents = self.read(Names())
        nothing = set(contents.names) - self._here.keys()
        names = [name for name in saved.names if name not in nothing or placement.alone]
        found = placement.compare(self.path, names, self._here)
        keys = {name: placement.key(name) for name in found}
        owners: dict[int, str] = {}
        for name in found:
            division = self._here[name].alike
            if (owner := owners.setdefault(id(division), name)) == name or division is None:
                placement.fill(name, self._here[name])
            elif keys[name] != keys[owner]:
                placement.problem(f"{owner} and {name} are one tensor here, but were not when they were saved")
        if self.target.restored is not None:
            placement.finish(self.path, self.target.restored)


_NOTHING = torch.empty(0)


def _memory(one: Shard | Tensor) -> Tensor:
    return one.tensor if isinstance(one, Shard) else one


def _form(one: Shard | Tensor) -> object:
    """Return a value that is equal for two pieces that are the same part of a tensor in the same memory."""
    tensor = _memory(one)
    memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    place = (one.shape, one.offsets, one.within, one.start, one.replicas) if isinstance(one, Shard) else None
    return memory, place


def _boxes(one: Shard, path: Path) -> Iterator[tuple[Tensor, Dims]]:
    """Yield a shard as boxes: views of its memory, and their positions in the whole. Raise StateError if it cannot."""
    whole, memory = tuple(one.shape), one.tensor
    view = memory.detach()
    offsets = (0,) * len(whole) if one.offsets is None else tuple(one.offsets)
    if one.start is None:
        _check_inside(offsets, tuple(memory.shape), whole, path)
        yield view, offsets
        return
    within = whole if one.within is None else tuple(one.within)
    _check_inside(offsets, within, whole, path)
    stop = one.start + memory.numel()
    if memory.dim() != 1 or not memory.is_contiguous():
        raise StateError(
            f"{show(path)}: a run of elements (start=) must be memory of one dimension without gaps; this has shape "
            f"{list(memory.shape)} and strides {list(memory.stride())}: pass a slice of the flat buffer, not a copy"
        )
    if not 0 <= one.start <= stop <= math.prod(within):
        raise StateError(
            f"{show(path)}: elements {one.start} to {stop} are out of range: there are {math.prod(within)}. "
            "Remove padding with narrow()"
        )
    place = 0
    for at, sizes in boxes_of_run(within, one.start, stop):
        count = math.prod(sizes)
        yield view[place : place + count].view(sizes), tuple(i + j for i, j in zip(offsets, at, strict=True))
        place += count
    if not place and whole:
        yield view.new_empty((0,) * len(whole)), (0,) * len(whole)  # an empty piece declares name, shape and dtype


def _check_inside(offsets: Dims, sizes: Dims, whole: Dims, path: Path) -> None:
    fits = len(offsets) == len(sizes) == len(whole) and min((*offsets, *sizes), default=0) >= 0
    if not fits or any(at + size > n for at, size, n in zip(offsets, sizes, whole, strict=True)):
        raise StateError(
            f"{show(path)}: a box of {list(sizes)} at {list(offsets)} is out of range: the tensor is of shape "
            f"{list(whole)}. Give the indices at which it begins in the whole, and start= if it is a run of elements"
        )
