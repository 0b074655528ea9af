"""A checkpoint as one state, whoever saved it: which tensor a name means for a rank, and whose own values it takes.

A tensor is known by its name and its *instance*: the ranks that held it together, or `GLOBAL` if all did. A rank that
restores looks a name up with `resolve`; how many ranks there are now, and how they divide tensors, does not matter, as
long as it is clear which tensor is meant.

It is made of everything that all ranks say, or of a directory (`ckpt.format.rank_index`). Of the second kind it knows
all names and forms at once, and no blobs: `narrowed` reads the tables of those ranks that have what is wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np

from ckpt.errors import CorruptError
from ckpt.format.boxes import Box, Effort
from ckpt.format.columns import I64, NONE, starts_of
from ckpt.format.layout import Layout, TensorSpec
from ckpt.format.partition import GLOBAL
from ckpt.format.rank_index import Directory, RanksView, check_cover, find_shards
from ckpt.format.rank_index import Key as Key
from ckpt.format.saved_nodes import SHARED_KINDS, SavedNode, joined
from ckpt.format.shards import DTYPE_NUMBER, Shards
from ckpt.format.table import EMPTY, Table, merge
from ckpt.format.values import Json, Path, unlike

T_co = TypeVar("T_co", covariant=True)


class Fetch(Protocol[T_co]):
    """Reads something of each of some ranks."""

    def __call__(self, ranks: Sequence[int], /) -> Mapping[int, T_co]: ...


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """`spec` is of the whole tensor; `shards` are numbers in the table that cover it exactly once.

    Of a directory only those that are attached, which cover what was asked for.
    """

    spec: TensorSpec
    shards: Sequence[int]


class _Tensors(Mapping[Key, SavedTensor]):
    """Made when they are asked for: a state that is as it was saved asks for none."""

    def __init__(
        self, rows: dict[Key, tuple[int, ...]], specs: dict[Key, TensorSpec], on_device: Container[Key]
    ) -> None:
        self._rows, self._specs, self._on_device = rows, specs, on_device

    def __getitem__(self, key: Key) -> SavedTensor:
        spec, accelerator = self._specs[key], key in self._on_device
        if spec.whole is not None or spec.accelerator != accelerator:
            spec = TensorSpec(spec.name, spec.dtype, spec.full, accelerator, instance=spec.instance)
        return SavedTensor(spec, self._rows[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows


def _check_forms(shards: Shards, specs: Sequence[TensorSpec]) -> None:
    """CorruptError unless each shard is of a tensor of this dtype and shape, by the layout of some rank."""
    dims = np.fromiter((len(t.full) for t in specs), np.int64, len(specs))
    wrong = (np.diff(shards.dim_starts) != 3 * dims) | (shards.dtype != [DTYPE_NUMBER.get(t.dtype, -1) for t in specs])
    if not wrong.any():
        ends = np.cumsum(dims)
        at = np.arange(int(dims.sum())) + np.repeat(shards.dim_starts[:-1] - (ends - dims), dims)
        odd = np.flatnonzero(shards.dims[at] != np.fromiter(chain.from_iterable(t.full for t in specs), np.int64))
        wrong[np.searchsorted(ends, odd, "right")] = True
    if wrong.any():
        shard, spec = shards[int(np.argmax(wrong))], specs[int(np.argmax(wrong))]
        raise CorruptError(
            f"{spec.name} is of shape {list(spec.full)} and dtype {spec.dtype} for one rank, and of "
            f"{list(shard.global_shape)} and {shard.dtype} for rank {shard.rank}: they disagree"
        )


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
        self.tensors: Mapping[Key, SavedTensor] = self._collect(layouts)
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

    @classmethod
    def listed(cls, directory: Directory, values: Fetch[list[Json]], tables: Fetch[Table]) -> SavedState:
        """By a directory. What the parts and tables of some ranks say is read when it is needed."""
        self = cls.__new__(cls)
        self.directory, self.world, self.digested = directory, directory.world, True
        self.table, self.layout = EMPTY, None
        self.views, self._view_of = list(directory.views), directory.columns["view"].tolist()
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

    def _collect(self, layouts: Sequence[Layout]) -> Mapping[Key, SavedTensor]:
        shards = self.table.columns
        keys = list(zip(shards.names, shards.instance.tolist(), strict=True))
        rows: dict[Key, tuple[int, ...]] = {key: (i,) for i, key in enumerate(keys)}
        if several := len(rows) < len(keys):
            gathered: dict[Key, list[int]] = {}
            for i, key in enumerate(keys):
                gathered.setdefault(key, []).append(i)
            rows = {key: tuple(numbers) for key, numbers in gathered.items()}
        specs = {(t.name, t.instance): t for layout in layouts for t in layout.tensors}
        if specs.keys() != rows.keys():
            name, _ = min(specs.keys() ^ rows.keys())
            raise CorruptError(f"{name} is not in both the layouts and the table of the checkpoint")
        _check_forms(shards, [specs[key] for key in keys])
        effort, alone = Effort(Effort.left + 4 * len(shards)), shards.whole
        for key, numbers in rows.items() if several or not alone.all() else ():
            if len(numbers) > 1 or not alone[numbers[0]]:
                check_cover(specs[key].full, [shards[i].box for i in numbers], key[0], effort)
        on_device = {(t.name, t.instance) for layout in layouts for t in layout.tensors if t.accelerator}
        tensors = _Tensors(rows, specs, on_device)
        self._check_alike(tensors, layouts)
        return tensors

    def _check_alike(self, tensors: Mapping[Key, SavedTensor], layouts: Sequence[Layout]) -> None:
        """What all ranks hold together, all of them must know, and in the same form, whoever staged it."""
        if self.world == 1:
            return
        alike = {name: t.spec for (name, instance), t in tensors.items() if instance == GLOBAL}
        for view, layout in zip(self.views, layouts, strict=True):
            for name in sorted(alike.keys() - set(view.names())):
                raise CorruptError(f"{name} is not in the state of rank {layout.rank}, and others hold it together")
            for name, (dtype, shape) in layout.elsewhere.items():
                if name in alike and (dtype, shape) != (alike[name].dtype, alike[name].shape):
                    raise CorruptError(
                        f"{name} is of shape {list(shape)} and dtype {dtype} for rank {layout.rank}, and of "
                        f"{list(alike[name].shape)} and {alike[name].dtype} for others: they disagree"
                    )

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
        return [int(rank) for rank in np.unique(np.concatenate([NONE, *ranks]))]

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

    def values_of(self, path: Path) -> Iterator[tuple[int, Json]]:
        """The plain values that each rank saved for one entry."""
        has = [any(tuple(one["path"]) == path for one in view.components) for view in self.views]
        if self.directory is not None:
            self._read_values([rank for rank in range(self.world) if has[self._view_of[rank]]])
        for rank in range(self.world):
            view = self._view(rank)
            for i, component in enumerate(view.components):
                if tuple(component["path"]) == path:
                    yield rank, view.values[i] if self.directory is None else self._value(rank, i)

    def _value(self, rank: int, component: int) -> Json:
        """Out of the part of a rank."""
        self._read_values([rank])
        return self._fetched[rank][component]

    def _read_values(self, ranks: Sequence[int]) -> None:
        new = self._fetch_values([rank for rank in ranks if rank not in self._fetched])
        for rank, values in new.items():
            if len(values) != len(self._view(rank).components):
                raise CorruptError(f"the plain values of rank {rank} are not of its layout")
        self._fetched.update(new)

    def shared_names(self) -> set[str]:
        """The names, none of them an alias, of everything in modules and optimizers: somebody must want each."""
        return {
            view.aliases.get(name, name)
            for view in self.views
            for component in view.components
            if component["kind"] in SHARED_KINDS
            for name in component["names"]
        }
