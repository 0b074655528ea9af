"""Combines the manifests of all ranks of a checkpoint into one state, and finds in it what each restoring rank needs.

A tensor is identified by its name and its *instance*: the lowest rank that shares the tensor, or `GLOBAL` if all ranks
share it. A restoring rank finds a tensor with `resolve`, even after the number of ranks or the sharding has changed,
unless the name has become ambiguous. `mapped` selects the saved rank whose plain values a rank restores.

The state always has an index (`format.index`), with the names and forms of all tensors. A state built from every rank's
manifest has all chunks. A state built from the index alone reads the manifests of the needed ranks in `narrowed`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ckpt.core.format.boxes import GLOBAL, Box, Effort
from ckpt.core.format.columns import I64, end_to_end, starts_of
from ckpt.core.format.index import Index, Share, View, build
from ckpt.core.format.index import Key as Key
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.table import DTYPE_NUMBER, Table, empty, merge
from ckpt.core.format.values import ORDERS, SHARED_KINDS, Json, Path, SavedNode, check_node, joined, unlike
from ckpt.errors import CorruptError

KEPT = 1 << 19  # the cache of tables is emptied when it has more chunks than this


class Fetch(Protocol):
    """Reads the plain values and the chunk tables of some ranks."""

    def __call__(self, ranks: Sequence[int], /) -> Mapping[int, tuple[list[Json], Table]]: ...


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Marks a name under which several ranks saved different values, when no rule selects one of them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor. `spec`: form of the whole tensor. `shards`: table rows that cover the requested boxes."""

    spec: TensorSpec
    shards: Sequence[int]


class _Tensors(Mapping[Key, SavedTensor]):
    """Creates each `SavedTensor` on access, because a restore with unchanged sharding needs none."""

    def __init__(self, index: Index, shards: Mapping[int, Sequence[int]]) -> None:
        """Look up tensors in `index`. `shards`: table rows of each tensor whose rows are known, by tensor number."""
        self._index, self._shards = index, shards

    def __getitem__(self, key: Key) -> SavedTensor:
        number = self._index.number[key]
        return SavedTensor(self._index.spec(number), self._shards.get(number, ()))

    def __iter__(self) -> Iterator[Key]:
        return iter(self._index.number)

    def __len__(self) -> int:
        return len(self._index.number)

    def __contains__(self, key: object) -> bool:
        return key in self._index.number


class SavedState:
    """Joins the `layouts`, `values` and `tables` of every rank, in rank order. `digested`: the tables have digests.

    Raises CorruptError if the ranks disagree about a tensor, or if any element was not saved, or saved twice.
    """

    layout: Layout | None = None  # set only if a single rank saved the checkpoint
    views: list[View]

    def __init__(
        self, layouts: Sequence[Layout], values: Sequence[list[Json]], tables: Sequence[Table], *, digested: bool = True
    ) -> None:
        shares = [
            Share(layout.rank, layout.world, layout.shared, mine, table)
            for layout, mine, table in zip(layouts, values, tables, strict=True)
        ]
        self._open(build(shares), _nothing)
        self.layout = layouts[0] if len(layouts) == 1 else None
        self.complete, self.digested = True, digested
        self.told(dict(enumerate(values)))
        self.table = merge(tables)
        self.tensors = _Tensors(self.index, self._rows())

    @classmethod
    def listed(cls, index: Index, fetch: Fetch) -> SavedState:
        """Open a state by its index. Manifests are read later, when they are needed."""
        self = cls.__new__(cls)
        self._open(index, fetch)
        return self

    def _open(self, index: Index, fetch: Fetch) -> None:
        self.index, self.world, self.table = index, index.world, empty()
        self.complete, self.digested = False, True
        self.views = list(index.views)
        self._view_of: list[int] = index.columns["view"].tolist()
        self._alike: list[int] = index.columns["alike"].tolist()
        self._fetch, self._fetched = fetch, dict[int, list[Json]]()
        self._kept: dict[int, Table] = {}
        self.tensors = _Tensors(index, {})

    @cached_property
    def _instances(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, instance in self.index.keys:
            found.setdefault(name, []).append(instance)
        return found

    @property
    def accelerated(self) -> bool:
        """Return True if any tensor was on an accelerator."""
        return self.index.accelerated

    # -- chunks --

    @cached_property
    def shard_of_chunk(self) -> I64:
        return np.repeat(np.arange(len(self.table.shards)), np.diff(self.table.starts))

    @cached_property
    def position(self) -> I64:
        """Return the offset of each chunk in the bytes of its shard."""
        lengths = self.table.length[: self.table.owned]
        before = starts_of(np.cumsum(lengths))
        found: I64 = before[:-1] - before[self.table.starts[:-1]][self.shard_of_chunk]
        return found

    def chunks(self, key: Key) -> Iterator[int]:
        for shard in self.tensors[key].shards:
            yield from self.table.chunks(shard)

    @cached_property
    def numbers(self) -> I64:
        """Return the global number of each chunk that belongs to a shard. The numbers are equal on every rank."""
        if self.complete:
            return np.arange(self.table.owned)
        ranks = np.repeat(self.table.columns.rank, np.diff(self.table.starts))
        first = np.searchsorted(ranks, ranks)  # tables are attached in the order of their ranks
        found: I64 = self.index.first_chunk[ranks] + np.arange(len(ranks)) - first
        return found

    @property
    def keys(self) -> list[Key]:
        """Return all tensors, in an order that is the same for all ranks."""
        return self.index.keys

    def boxes(self, key: Key) -> list[Box]:
        """Return the pieces of a tensor, in the order of the ranks that have them."""
        return self.index.pattern(self.index.number[key]).boxes()

    def holders(self, key: Key) -> I64:
        """Return the rank that has each piece of a tensor, in the order of the pieces."""
        return self.index.holders(self.index.number[key])

    # -- the tables of some ranks --

    def narrowed(self, wanted: Mapping[Key, Iterable[Box]]) -> SavedState:
        """Return the state with the chunks that contain elements of these boxes.

        Raise CorruptError unless each element was saved exactly once, and the tables of the ranks match the index.
        """
        if self.complete:
            return self
        found, effort = copy.copy(self), Effort()
        covering: dict[tuple[int, Box], I64] = {}
        pieces: dict[int, I64] = {}
        for key, boxes in wanted.items():
            number = self.index.number[key]
            pattern, how = self.index.pattern(number), self.index.pattern_number(number)
            some = []
            for box in dict.fromkeys(boxes):
                if (how, box) not in covering:
                    effort.left += 4 * len(pattern.ranks)
                    covering[how, box] = pattern.covering(box, key[0], effort)
                some.append(covering[how, box])
            pieces[number] = some[0] if len(some) == 1 else np.unique(end_to_end(some))
        ranks = np.unique(end_to_end(self.index.holders(number)[some] for number, some in pieces.items()))
        found._attach(self._tables(ranks.tolist()), pieces)
        return found

    def _tables(self, ranks: Sequence[int]) -> dict[int, Table]:
        """Return the tables of some ranks. Recently read tables are reused."""
        found = {rank: self._kept[rank] for rank in ranks if rank in self._kept}
        found |= self._read([rank for rank in ranks if rank not in found])
        return found

    def _read(self, ranks: Sequence[int]) -> dict[int, Table]:
        """Read the manifests of some ranks. Keep their plain values, and return their tables."""
        if not ranks:
            return {}
        found = self._fetch(ranks)
        self.told({rank: values for rank, (values, _) in found.items()})
        tables = {rank: table for rank, (_, table) in found.items()}
        for rank, table in tables.items():
            if table.owned != int(self.index.columns["owned"][rank]) or (table.columns.rank != rank).any():
                raise CorruptError(f"the table of rank {rank} does not match the index")
        self._kept |= tables
        if sum(table.owned for table in self._kept.values()) > KEPT:
            self._kept = {}
        return tables

    def _attach(self, tables: Mapping[int, Table], wanted: Mapping[int, I64]) -> None:
        """Add the tables of some ranks. Raise CorruptError unless they have the wanted pieces of each tensor."""
        self.table = merge([tables[rank] for rank in sorted(tables)])
        for one in ("numbers", "position", "shard_of_chunk"):
            self.__dict__.pop(one, None)
        here = np.zeros(self.world, np.bool_)
        here[list(tables)] = True
        rows, found, shards = self._rows(), dict[int, Sequence[int]](), self.table.columns
        for number, pieces in wanted.items():
            pattern, holders = self.index.pattern(number), self.index.holders(number)
            there, mine = here[holders], np.asarray(rows.get(number, ()), np.int64)
            spec, k = self.index.spec(number), len(pattern.shape)
            fits = len(mine) == np.count_nonzero(there) and bool((np.diff(shards.dim_starts)[mine] == 3 * k).all())
            if fits:  # pieces and rows are both sorted by rank
                dims = shards.dims[shards.dim_starts[mine][:, None] + np.arange(3 * k)] if k else mine[:, None][:, :0]
                boxes = np.concatenate([pattern.offsets[there], pattern.sizes[there]], 1)
                fits = (
                    np.array_equal(holders[there], shards.rank[mine])
                    and np.array_equal(boxes, dims[:, k:])
                    and bool((dims[:, :k] == np.array(pattern.shape, np.int64)).all())
                    and bool((shards.dtype[mine] == DTYPE_NUMBER[spec.dtype]).all())
                )
            if not fits:
                raise CorruptError(f"the index does not match the tables of the ranks that have {spec.name}")
            found[number] = mine[(np.cumsum(there) - 1)[pieces]].tolist()
        self.tensors = _Tensors(self.index, found)

    def _rows(self) -> dict[int, list[int]]:
        """Return the rows of the table that belong to each tensor, by the number of the tensor."""
        shards, found = self.table.columns, dict[int, list[int]]()
        numbers = map(self.index.number.get, zip(shards.names, shards.instance.tolist(), strict=True))
        for row, number in enumerate(numbers):
            if number is not None:
                found.setdefault(number, []).append(row)
        return found

    # -- names --

    def mapped(self, rank: int) -> int:
        """Return the saved rank whose plain values `rank` restores: `rank` modulo the saved world size."""
        return rank % self.world

    def _view(self, rank: int) -> View:
        return self.views[self._view_of[self.mapped(rank)]]

    def canonical(self, name: str, rank: int) -> str:
        """Resolve an alias to the name of its tensor, as seen by `rank`."""
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
        """Return the saved tensor that `rank` of `size` restores under a name, or None if there is no such tensor.

        `instance`: instance of the tensor to fill, None if that tensor does not exist yet. `lenient`: after a change of
        the number of ranks, let a rank restore a tensor of another rank. Use it for buffers, not for weights.
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
        """Return True if all instances of a name have the same bytes."""
        candidates = self.instances(name)
        return len({self.content((name, instance)) for instance in candidates}) == 1

    def same(self, a: Key, b: Key) -> bool:
        """Return True if two tensors have the same bytes according to their digests."""
        return a == b or self.content(a) == self.content(b)

    def content(self, key: Key) -> object:
        """Return a value that is equal for two tensors if they have the same bytes, divided into the same chunks."""
        if not self.digested:
            return key  # the digests are unknown, so the tensor is equal only to itself
        return self.index.content(self.index.number[key])

    def order(self, key: Key, rank: int = 0) -> list[int] | None:
        """Return the dimensions of a tensor from the outermost to the innermost in memory, None if it is contiguous.

        If ranks differ, the rank that owns the tensor takes precedence, then the rank whose values `rank` restores.
        """
        views = (self._view(rank if key[1] == GLOBAL else key[1]), *self.views)
        order = next((found for view in views if (found := self._orders(view).get(key[0])) is not None), None)
        if order is not None and sorted(order) != list(range(len(self.tensors[key].spec.shape))):
            raise CorruptError(f"{key[0]}: {order!r:.80} is not an order of its dimensions")
        return order

    def _orders(self, view: View) -> dict[str, list[int]]:
        if view.first not in self._ordered:
            found = self._ordered[view.first] = dict[str, list[int]]()
            for component in view.components:
                orders: dict[str, list[int]] = component["facts"].get(ORDERS, {})
                if type(orders) is not dict or not all(map(_is_order, orders.values())):
                    raise CorruptError("the stored memory layout of tensors is not a list of dimensions")
                found.update((view.aliases.get(name, name), order) for name, order in orders.items())
        return self._ordered[view.first]

    @cached_property
    def _ordered(self) -> dict[int, dict[str, list[int]]]:
        """Return the cache for `_orders`, by the first rank of each view."""
        return {}

    @cached_property
    def labels(self) -> dict[str, Key]:
        """Return all tensors by unique names, including aliases. A name with different tensors becomes `name#rank`."""
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
        """Return the entries of the state for one rank. Modules and optimizers are joined from every rank."""
        mapped = self.mapped(rank)
        here = self._view(rank)
        found: dict[Path, list[SavedNode]] = {}
        for view in (here, *(view for view in self.views if view is not here)):
            for i, component in enumerate(view.components):
                path = tuple(component["path"])
                said = found.setdefault(path, [])
                value = view.values[i]
                if view is here or not said:
                    value = self._value(mapped if view is here else view.first, i)
                said.append(SavedNode(path, component["kind"], component["facts"], value, tuple(component["names"])))
        return [joined(nodes) for nodes in found.values()]

    def paths(self, rank: int) -> set[Path]:
        """Return the paths of entries that were saved by the rank whose values `rank` restores."""
        return {tuple(component["path"]) for component in self._view(rank).components}

    def values_of(self, path: Path) -> Iterator[tuple[int, Json]]:
        """Yield the plain values of one entry from each rank that saved it."""
        yield from ((rank, value) for rank, _, value in self.said(lambda here: here == path))

    def said(
        self, wanted: Callable[[Path], bool] = lambda path: True, *, once: bool = False
    ) -> Iterator[tuple[int, dict[str, Any], Json]]:
        """Yield rank, component and plain values of the entries whose path `wanted` accepts, from each rank that saved
        them.

        `once`: yield only the first rank's version of each entry.
        """
        mine, seen = list[list[int]](), set[Path]()
        for view in self.views:
            paths = [tuple(component["path"]) for component in view.components]
            mine.append([i for i, path in enumerate(paths) if path not in seen and wanted(path)])
            seen.update(paths if once else ())
        who = ((view.first, i) for i, view in enumerate(self.views)) if once else enumerate(self._view_of)
        saying = [(rank, number) for rank, number in who if mine[number]]
        self._read_values([rank for rank, _ in saying])
        for rank, number in saying:
            view = self.views[number]
            for i in mine[number]:
                yield rank, view.components[i], self._fetched[self._alike[rank]][i]

    def _value(self, rank: int, component: int) -> Json:
        """Return the plain values of a component from the manifest of a rank."""
        self._read_values([rank])
        return self._fetched[self._alike[rank]][component]

    def _read_values(self, ranks: Sequence[int]) -> None:
        wanted = dict.fromkeys(self._alike[rank] for rank in ranks)
        self._read([rank for rank in wanted if rank not in self._fetched])

    def told(self, values: Mapping[int, list[Json]]) -> None:
        """Keep the plain values of some ranks, so that they need not be read again."""
        for rank, mine in values.items():
            if len(mine) != len(self._view(rank).components):
                raise CorruptError(f"the plain values of rank {rank} do not match its layout")
        self._fetched.update(values)

    def check_values(self, values: Mapping[int, list[Json]]) -> None:
        """Raise CorruptError unless a restore can read the plain values of every entry that these ranks saved."""

        def find(name: str) -> TensorSpec | None:
            found = self.instances(self.canonical(name, rank))
            return self.tensors[self.canonical(name, rank), found[0]].spec if found else None

        for rank, mine in values.items():
            components = self._view(rank).components
            if len(components) != len(mine):
                raise CorruptError(f"the plain values of rank {rank} do not match its layout")
            self._orders(self._view(rank))
            for one, value in zip(components, mine, strict=True):
                node = SavedNode(tuple(one["path"]), one["kind"], one["facts"], value, tuple(one["names"]))
                check_node(node, find)

    def shared_names(self) -> set[str]:
        """Return all tensor names in modules and optimizers, without aliases. A restore must use every name."""
        return {
            view.aliases.get(name, name)
            for view in self.views
            for component in view.components
            if component["kind"] in SHARED_KINDS
            for name in component["names"]
        }


def _nothing(ranks: Sequence[int]) -> dict[int, tuple[list[Json], Table]]:
    """Return nothing, because the state already has all manifests."""
    return {}


def _is_order(value: object) -> bool:
    return type(value) is list and all(type(dim) is int for dim in value)
