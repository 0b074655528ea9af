"""A checkpoint as one state, whoever saved it: which tensor a name means for a rank, and whose own values it takes.

A tensor is known by its name and its *instance*: the ranks that held it together, or `GLOBAL` if all did. A rank that
restores looks a name up with `resolve`; how many ranks there are now, and how they divide tensors, does not matter, as
long as it is clear which tensor is meant.

It is made of everything that all ranks say, or of a directory (`format.rank_index`). Of the second kind it knows
all names and forms at once, and no blobs: `narrowed` reads the tables of those ranks that have what is wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from ckpt.core.format.boxes import Box, Effort
from ckpt.core.format.columns import I64, end_to_end, starts_of
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.partition import GLOBAL
from ckpt.core.format.rank_index import Directory, RanksView, find_shards
from ckpt.core.format.rank_index import Key as Key
from ckpt.core.format.saved_nodes import ORDERS, SHARED_KINDS, SavedNode, check_node, joined
from ckpt.core.format.saved_tensors import SavedTensor, collect
from ckpt.core.format.table import Table, empty, merge
from ckpt.core.format.values import Json, Path, unlike
from ckpt.errors import CorruptError

T_co = TypeVar("T_co", covariant=True)


class Fetch(Protocol[T_co]):
    """Reads something of each of some ranks."""

    def __call__(self, ranks: Sequence[int], /) -> Mapping[int, T_co]: ...


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Several ranks saved different values under one name, and it is not clear which is meant."""

    ranks: tuple[int, ...]


class SavedState:
    """`layouts` and `values` of all ranks that saved, in rank order. `digested`: the table knows all digests.

    CorruptError if the ranks do not agree about a tensor, or some of it was saved by nobody, or twice.
    """

    def __init__(
        self, layouts: Sequence[Layout], values: Sequence[list[Json]], table: Table, *, digested: bool = True
    ) -> None:
        self.table, self.digested, self.directory = table, digested, None
        self.world = len(layouts)
        for rank, (layout, mine) in enumerate(zip(layouts, values, strict=True)):
            if layout.rank != rank or layout.world != self.world:
                raise CorruptError(f"rank {rank} of {self.world} says it is rank {layout.rank} of {layout.world}")
            if len(layout.components) != len(mine):
                raise CorruptError(f"the plain values of rank {rank} are not of its layout")
        self.views = [
            RanksView(la.rank, la.components, mine, la.aliases, la.instances)
            for la, mine in zip(layouts, values, strict=True)
        ]
        self._view_of: Sequence[int] = range(self.world)
        self.layout = layouts[0] if self.world == 1 else None
        self.tensors = collect(table.columns, layouts, self.views)
        for layout in layouts:
            for name, instance in layout.instances.items():
                if (name, instance) not in self.tensors:
                    raise CorruptError(f"{name}: what rank {layout.rank} has of it was saved by nobody")
        known = set(self.table.columns.names)
        for view in self.views:
            if lost := {view.aliases.get(name, name) for name in view.names()} - known:
                raise CorruptError(f"{min(lost)} is not in the table of the checkpoint")

    layout: Layout | None  # of the one rank that saved, if it was one
    directory: Directory | None
    _fetch_values: Fetch[list[Json]]
    _fetch_tables: Fetch[Table]
    _fetched: dict[int, list[Json]]
    _alike: Sequence[int]  # of each rank one that has the same plain values

    @classmethod
    def listed(cls, directory: Directory, values: Fetch[list[Json]], tables: Fetch[Table]) -> SavedState:
        """By a directory. What the parts and tables of some ranks say is read when it is needed."""
        self = cls.__new__(cls)
        self.directory, self.world, self.digested = directory, directory.world, True
        self.table, self.layout = empty(), None
        self.views, self._view_of = list(directory.views), directory.columns["view"].tolist()
        self._alike = directory.alike
        self._fetch_values, self._fetched, self._fetch_tables = values, {}, tables
        self.tensors = {key: SavedTensor(spec, ()) for key, spec in zip(directory.keys, directory.specs(), strict=True)}
        return self

    @cached_property
    def _instances(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, instance in sorted(self.tensors):
            found.setdefault(name, []).append(instance)
        return found

    @cached_property
    def accelerated(self) -> bool:
        """Whether any of it was on an accelerator."""
        return any(tensor.spec.accelerator for tensor in self.tensors.values())

    # -- blobs --

    @cached_property
    def shard_of_blob(self) -> I64:
        return np.repeat(np.arange(len(self.table.shards)), np.diff(self.table.starts))

    @cached_property
    def position(self) -> I64:
        """Of every blob: where it begins in the bytes of its shard."""
        lengths = self.table.length[: self.table.owned]
        before = starts_of(np.cumsum(lengths))
        found: I64 = before[:-1] - before[self.table.starts[:-1]][self.shard_of_blob]
        return found

    def blobs(self, key: Key) -> Iterator[int]:
        for shard in self.tensors[key].shards:
            yield from self.table.blobs(shard)

    @cached_property
    def numbers(self) -> I64:
        """Of every blob that belongs to a shard: its number among those of all ranks, the same for whoever asks."""
        if self.directory is None:
            return np.arange(self.table.owned)
        ranks = np.repeat(self.table.columns.rank, np.diff(self.table.starts))
        first = np.searchsorted(ranks, ranks)  # tables are attached in the order of their ranks
        found: I64 = self.directory.first_blob[ranks] + np.arange(len(ranks)) - first
        return found

    @cached_property
    def keys(self) -> list[Key]:
        """All tensors, in an order that is the same for all ranks."""
        return sorted(self.tensors)

    # -- of a directory --

    def narrowed(self, wanted: Mapping[Key, Iterable[Box]]) -> SavedState:
        """The same, with the blobs in which these boxes of these tensors lie, where it does not know all."""
        if self.directory is None:
            return self
        found = copy.copy(self)
        found.attach(self._fetch_tables(found.missing(wanted)))
        return found

    def boxes(self, key: Key) -> list[Box]:
        """The pieces of a tensor, in the order of the ranks that have them."""
        if self.directory is None:
            return [self.table.shards[number].box for number in self.tensors[key].shards]
        return [box for _, box in self.directory.pieces(self.directory.number[key])]

    def holders(self, key: Key) -> I64:
        """The ranks whose tables have something of a tensor, where a directory says so."""
        assert self.directory is not None
        return self.directory.holders(self.directory.number[key])

    def missing(self, wanted: Mapping[Key, Iterable[Box]]) -> list[int]:
        """The ranks whose tables have these boxes of these tensors.

        CorruptError unless the directory has each element of them exactly once.
        """
        assert self.directory is not None
        found, effort = self.directory, Effort()
        covering: dict[tuple[int, Box], I64] = {}
        patterns = found.columns["tensor_pattern"].tolist()
        self._wanted: list[tuple[Key, int, I64]] = []
        for key, boxes in wanted.items():
            number = found.number[key]
            pattern = found.pattern(patterns[number])
            pieces = []
            for box in dict.fromkeys(boxes):
                if (patterns[number], box) not in covering:
                    effort.left += 4 * len(pattern.ranks)
                    covering[patterns[number], box] = pattern.covering(box, key[0], effort)
                pieces.append(covering[patterns[number], box])
            if len(pieces) > 1:
                pieces = [np.unique(np.concatenate(pieces))]
            self._wanted.append((key, number, pieces[0]))
        ranks = [found.pattern(patterns[n]).ranks[pieces] + found.base_rank(n) for _, n, pieces in self._wanted]
        return [int(rank) for rank in np.unique(end_to_end(ranks))]

    def attach(self, tables: Mapping[int, Table]) -> None:
        """The tables of `missing` ranks. CorruptError unless they have what the directory says that they have."""
        assert self.directory is not None
        for rank, table in tables.items():
            if table.owned != int(self.directory.columns["owned"][rank]) or (table.columns.rank != rank).any():
                raise CorruptError(f"the table of rank {rank} is not what the index says")
        self.table = merge([tables[rank] for rank in sorted(tables)])
        for one in ("numbers", "position", "shard_of_blob"):
            self.__dict__.pop(one, None)
        places = find_shards(self.directory, self._wanted, self.table.columns)
        attached = zip(self._wanted, places, strict=True)
        self.tensors = {**self.tensors, **{k: SavedTensor(self.tensors[k].spec, rows) for (k, _, _), rows in attached}}

    # -- names --

    def mapped(self, rank: int) -> int:
        """Whose plain values, and values of its own, a rank takes: its own; in turn when there are more ranks now."""
        return rank % self.world

    def _view(self, rank: int) -> RanksView:
        return self.views[self._view_of[self.mapped(rank)]]

    def canonical(self, name: str, rank: int) -> str:
        """The tensor that a name stands for, as `rank` sees it."""
        own = self._view(rank).aliases
        if name in own:
            return own[name]
        if name in self._instances:
            return name
        return next((view.aliases[name] for view in self.views if name in view.aliases), name)

    def instances(self, name: str) -> list[int]:
        return self._instances.get(name, [])

    def resolve(
        self, name: str, rank: int, size: int, instance: int | None, *, lenient: bool
    ) -> Key | Ambiguous | None:
        """Which tensor `rank` of `size` means by a name; None if there is none.

        `instance`: of the tensor that will be filled, None if it does not exist yet. `lenient`: values of a rank's own
        (buffers, say) may be taken over by any rank when the number of ranks has changed; weights may not.
        """
        name = self.canonical(name, rank)
        candidates = self.instances(name)
        if len(candidates) < 2:
            return (name, candidates[0]) if candidates else None
        own = self._view(rank).instance(name, self.mapped(rank))
        if self.world == size and instance != GLOBAL and own in candidates:
            return name, own
        if self.identical(name):
            return name, candidates[0]
        if lenient and own in candidates:
            return name, own
        return Ambiguous(tuple(candidates))

    def identical(self, name: str) -> bool:
        """Whether all instances of a name hold the same bytes."""
        candidates = self.instances(name)
        return len({self.content((name, instance)) for instance in candidates}) == 1

    def same(self, a: Key, b: Key) -> bool:
        """Whether two tensors hold the same bytes, as far as digests tell."""
        return a == b or self.content(a) == self.content(b)

    def content(self, key: Key) -> object:
        """Equal for tensors that hold the same bytes, if they are cut in the same way."""
        if not self.digested:
            return key  # unknown, so equal to itself only
        if self.directory is not None:
            return self.directory.content(self.directory.number[key])
        tensor = self.tensors[key]
        pieces = []
        for number in tensor.shards:
            blobs = self.table.blobs(number)
            pieces.append((self.table.shards[number].box, self.table.digest[blobs.start : blobs.stop].tobytes()))
        return tensor.spec.dtype, tensor.spec.shape, tuple(sorted(set(pieces)))

    def order(self, key: Key, rank: int = 0) -> list[int] | None:
        """Return the dimensions of a tensor from the outermost to the innermost in memory; None for a contiguous one.

        Ranks may differ. The rank that a tensor belongs to decides, else the one whose values `rank` takes.
        """
        views = (self._view(rank if key[1] == GLOBAL else key[1]), *self.views)
        order = next((found for view in views if (found := self._orders(view).get(key[0])) is not None), None)
        if order is not None and sorted(order) != list(range(len(self.tensors[key].spec.shape))):
            raise CorruptError(f"{key[0]}: {order!r:.80} is not an order of its dimensions")
        return order

    def _orders(self, view: RanksView) -> dict[str, list[int]]:
        if view.first not in self._ordered:
            found = self._ordered[view.first] = dict[str, list[int]]()
            for component in view.components:
                orders: dict[str, list[int]] = component["facts"].get(ORDERS, {})
                if type(orders) is not dict or not all(map(_is_order, orders.values())):
                    raise CorruptError("what is stored of the memory layout of tensors is not a list of dimensions")
                found.update((view.aliases.get(name, name), order) for name, order in orders.items())
        return self._ordered[view.first]

    @cached_property
    def _ordered(self) -> dict[int, dict[str, list[int]]]:
        """By the first rank of each view."""
        return {}

    @cached_property
    def labels(self) -> dict[str, Key]:
        """Every tensor by a name of its own, aliases too: `name#rank` where ranks have different ones of one name."""
        found: dict[str, Key] = {}
        aliases = {alias: name for view in reversed(self.views) for alias, name in view.aliases.items()}
        for name, of in [*((name, name) for name in self._instances), *aliases.items()]:
            candidates = self.instances(of) if name == of or name not in self._instances else []
            if len(candidates) > 1 and not self.identical(of):
                found |= {unlike(f"{name}#{instance}", self._instances): (of, instance) for instance in candidates}
            elif candidates:
                found[name] = (of, candidates[0])
        return found

    # -- entries of the state --

    def nodes(self, rank: int) -> list[SavedNode]:
        """The entries of the state as they concern one rank; of modules and optimizers, all that any rank saved."""
        mapped = self.mapped(rank)
        here = self._view(rank)
        found: dict[Path, list[SavedNode]] = {}
        for view in (here, *(view for view in self.views if view is not here)):
            for i, component in enumerate(view.components):
                path = tuple(component["path"])
                said = found.setdefault(path, [])
                value = view.values[i]
                if self.directory is not None and (view is here or not said):
                    value = self._value(mapped if view is here else view.first, i)
                said.append(SavedNode(path, component["kind"], component["facts"], value, tuple(component["names"])))
        return [joined(nodes) for nodes in found.values()]

    def paths(self, rank: int) -> set[Path]:
        """Return the paths of the entries that the rank itself saved whose values `rank` takes."""
        return {tuple(component["path"]) for component in self._view(rank).components}

    def values_of(self, path: Path) -> Iterator[tuple[int, Json]]:
        """The plain values that each rank saved for one entry."""
        yield from ((rank, value) for rank, _, value in self.said(lambda here: here == path))

    def said(
        self, wanted: Callable[[Path], bool] = lambda path: True, *, once: bool = False
    ) -> Iterator[tuple[int, dict[str, Any], Json]]:
        """What each rank says of the entries of the state whose path is wanted, with its plain values.

        `once`: of each entry only what the first rank says that has it.
        """
        mine, seen = list[list[int]](), set[Path]()
        for view in self.views:
            paths = [tuple(component["path"]) for component in view.components]
            mine.append([i for i, path in enumerate(paths) if path not in seen and wanted(path)])
            seen.update(paths if once else ())
        who = ((view.first, i) for i, view in enumerate(self.views)) if once else enumerate(self._view_of)
        saying = [(rank, number) for rank, number in who if mine[number]]
        if self.directory is not None:
            self._read_values([rank for rank, _ in saying])
        for rank, number in saying:
            view = self.views[number]
            for i in mine[number]:
                value = view.values[i] if self.directory is None else self._fetched[self._alike[rank]][i]
                yield rank, view.components[i], value

    def _value(self, rank: int, component: int) -> Json:
        """Out of the part of a rank."""
        self._read_values([rank])
        return self._fetched[self._alike[rank]][component]

    def _read_values(self, ranks: Sequence[int]) -> None:
        wanted = dict.fromkeys(self._alike[rank] for rank in ranks)
        self.told(self._fetch_values([rank for rank in wanted if rank not in self._fetched]))

    def told(self, values: Mapping[int, list[Json]]) -> None:
        """The plain values of some ranks, which need not be read for them any more."""
        for rank, mine in values.items():
            if len(mine) != len(self._view(rank).components):
                raise CorruptError(f"the plain values of rank {rank} are not of its layout")
        self._fetched.update(values)

    def check_values(self, values: Mapping[int, list[Json]]) -> None:
        """Raise CorruptError unless a restore can read what these ranks saved of every entry of the state."""

        def find(name: str) -> TensorSpec | None:
            found = self.instances(self.canonical(name, rank))
            return self.tensors[self.canonical(name, rank), found[0]].spec if found else None

        for rank, mine in values.items():
            components = self._view(rank).components
            if len(components) != len(mine):
                raise CorruptError(f"the plain values of rank {rank} are not of its layout")
            self._orders(self._view(rank))
            for one, value in zip(components, mine, strict=True):
                node = SavedNode(tuple(one["path"]), one["kind"], one["facts"], value, tuple(one["names"]))
                check_node(node, find)

    def shared_names(self) -> set[str]:
        """The names, none of them an alias, of everything in modules and optimizers: somebody must want each."""
        return {
            view.aliases.get(name, name)
            for view in self.views
            for component in view.components
            if component["kind"] in SHARED_KINDS
            for name in component["names"]
        }


def _is_order(value: object) -> bool:
    return type(value) is list and all(type(dim) is int for dim in value)
