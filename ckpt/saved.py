"""A checkpoint as one state, whoever saved it: what all ranks' layouts, values and tables say together.

A tensor is known by its name and its *instance*: the ranks that held it together, or `GLOBAL` if all did. A rank that
restores looks a name up with `resolve`; how many ranks there are now, and how they divide tensors, does not matter, as
long as it is clear which tensor is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CorruptError
from ckpt.geometry import Effort, TangledError, times_covered
from ckpt.plan import Layout, TensorSpec
from ckpt.share import GLOBAL
from ckpt.table import Table
from ckpt.values import Json, Path

Key = tuple[str, int]
I64 = npt.NDArray[np.int64]

SHARED_KINDS = ("module", "optimizer")  # of which each rank may hold some part


@dataclass(frozen=True)
class SavedNode:
    """One entry of a saved state. `names`: of its tensors, aliases too."""

    path: Path
    kind: str
    facts: dict[str, Any]
    values: Json
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """`spec` is of the whole tensor; `shards` are numbers in the table that cover it exactly once."""

    spec: TensorSpec
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Several ranks saved different values under one name, and it is not clear which is meant."""

    ranks: tuple[int, ...]


class Saved:
    """`layouts` and `values` of all ranks that saved, in rank order. `digested`: the table knows all digests.

    CorruptError if the ranks do not agree about a tensor, or some of it was saved by nobody, or twice.
    """

    def __init__(
        self, layouts: Sequence[Layout], values: Sequence[list[Json]], table: Table, *, digested: bool = True
    ) -> None:
        self.layouts, self.values, self.table, self.digested = list(layouts), list(values), table, digested
        self.world = len(self.layouts)
        for rank, (layout, mine) in enumerate(zip(self.layouts, self.values, strict=True)):
            if layout.rank != rank or layout.world != self.world:
                raise CorruptError(f"rank {rank} of {self.world} says it is rank {layout.rank} of {layout.world}")
            if len(layout.components) != len(mine):
                raise CorruptError(f"the plain values of rank {rank} are not of its layout")
        self.tensors = self._collect()
        self._instances: dict[str, list[int]] = {}
        for name, instance in sorted(self.tensors):
            self._instances.setdefault(name, []).append(instance)
        for layout in self.layouts:
            for name, instance in layout.instances.items():
                if (name, instance) not in self.tensors:
                    raise CorruptError(f"{name}: what rank {layout.rank} has of it was saved by nobody")
            for name in _names(layout):
                if layout.aliases.get(name, name) not in self._instances:
                    raise CorruptError(f"{name} is not in the table of the checkpoint")

    def _collect(self) -> dict[Key, SavedTensor]:
        found: dict[Key, list[int]] = {}
        for i, shard in enumerate(self.table.shards):
            found.setdefault((shard.name, shard.instance), []).append(i)
        specs = {(t.name, t.instance): t for layout in self.layouts for t in layout.tensors}
        on_device = {(t.name, t.instance) for layout in self.layouts for t in layout.tensors if t.accelerator}
        if specs.keys() != found.keys():
            name, _ = min(specs.keys() ^ found.keys())
            raise CorruptError(f"{name} is not in both the layouts and the table of the checkpoint")
        tensors: dict[Key, SavedTensor] = {}
        effort = Effort(Effort.left + 4 * len(self.table.shards))
        for key, numbers in found.items():
            spec = specs[key]
            for shard in (self.table.shards[i] for i in numbers):
                if (shard.dtype, shard.global_shape) != (spec.dtype, spec.full):
                    raise CorruptError(
                        f"{key[0]} is of shape {list(spec.full)} and dtype {spec.dtype} for one rank, and of "
                        f"{list(shard.global_shape)} and {shard.dtype} for rank {shard.rank}: they disagree"
                    )
            try:
                least, most = times_covered(spec.full, [self.table.shards[i].box for i in numbers], effort)
            except TangledError as error:
                raise CorruptError(f"the ranks do not agree about {key[0]}: {error}") from None
            if (least, most) != (1, 1):
                wrong = "saved by nobody" if least == 0 else f"saved {most} times"
                raise CorruptError(f"the ranks do not agree about {key[0]}: some of it was {wrong}")
            whole = TensorSpec(spec.name, spec.dtype, spec.full, key in on_device, instance=spec.instance)
            tensors[key] = SavedTensor(whole, tuple(numbers))
        self._check_alike(tensors)
        return tensors

    def _check_alike(self, tensors: dict[Key, SavedTensor]) -> None:
        """What all ranks hold together, all of them must know, and in the same form, whoever staged it."""
        alike = {name: t.spec for (name, instance), t in tensors.items() if instance == GLOBAL}
        for layout in self.layouts if self.world > 1 else ():
            for name in sorted(alike.keys() - set(_names(layout))):
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
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        found: I64 = before[:-1] - before[self.table.starts[:-1]][self.shard_of_blob]
        return found

    def blobs(self, key: Key) -> Iterator[int]:
        for shard in self.tensors[key].shards:
            yield from self.table.blobs(shard)

    # -- names --

    def mapped(self, rank: int) -> int:
        """Whose plain values, and values of its own, a rank takes: its own; in turn when there are more ranks now."""
        return rank % self.world

    def canonical(self, name: str, rank: int) -> str:
        """The tensor that a name stands for, as `rank` sees it."""
        own = self.layouts[self.mapped(rank)].aliases
        if name in own:
            return own[name]
        if name in self._instances:
            return name
        return next((la.aliases[name] for la in self.layouts if name in la.aliases), name)

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
        own = self._own(name, rank)
        if self.world == size and instance != GLOBAL and own in candidates:
            return name, own
        if self.identical(name):
            return name, candidates[0]
        if lenient and own in candidates:
            return name, own
        return Ambiguous(tuple(candidates))

    def _own(self, name: str, rank: int) -> int:
        return self.layouts[self.mapped(rank)].instances.get(name, GLOBAL)

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
        aliases = {alias: name for layout in reversed(self.layouts) for alias, name in layout.aliases.items()}
        for name, of in [*((name, name) for name in self._instances), *aliases.items()]:
            candidates = self.instances(of) if name == of or name not in self._instances else []
            if len(candidates) > 1 and not self.identical(of):
                found |= {f"{name}#{instance}": (of, instance) for instance in candidates}
            elif candidates:
                found[name] = (of, candidates[0])
        return found

    # -- entries of the state --

    def nodes(self, rank: int) -> list[SavedNode]:
        """The entries of the state as they concern one rank; of modules and optimizers, all that any rank saved."""
        mapped = self.mapped(rank)
        order = [mapped, *(r for r in range(self.world) if r != mapped)]
        found: dict[Path, list[SavedNode]] = {}
        for r in order:
            for component, value in zip(self.layouts[r].components, self.values[r], strict=True):
                path = tuple(component["path"])
                node = SavedNode(path, component["kind"], component["facts"], value, tuple(component["names"]))
                found.setdefault(path, []).append(node)
        try:
            return [_merged(nodes) for nodes in found.values()]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"what the ranks saved of one entry does not go together: {error}") from None

    def values_of(self, path: Path) -> Iterator[tuple[int, Json]]:
        """The plain values that each rank saved for one entry."""
        for rank, (layout, values) in enumerate(zip(self.layouts, self.values, strict=True)):
            for component, value in zip(layout.components, values, strict=True):
                if tuple(component["path"]) == path:
                    yield rank, value

    def shared_names(self) -> set[str]:
        """The names, none of them an alias, of everything in modules and optimizers: somebody must want each."""
        return {
            layout.aliases.get(name, name)
            for layout in self.layouts
            for component in layout.components
            if component["kind"] in SHARED_KINDS
            for name in component["names"]
        }


def _names(layout: Layout) -> Iterator[str]:
    for component in layout.components:
        yield from component["names"]


def _merged(nodes: list[SavedNode]) -> SavedNode:
    first = nodes[0]
    alike = [node for node in nodes if node.kind == first.kind]
    if len(alike) == 1 or first.kind not in SHARED_KINDS:
        return first
    names = tuple(_union(node.names for node in alike))
    if first.kind != "optimizer":
        return replace(first, names=names)
    return replace(first, names=names, facts=_merged_facts(alike), values=_merged_values(alike))


def _merged_facts(nodes: list[SavedNode]) -> dict[str, Any]:
    """Parameter groups joined one by one."""
    own = {name for group in nodes[0].facts["params"] for name in group}  # what it says of these is the truth
    groups = max(len(node.facts["params"]) for node in nodes)
    params = [_union(node.facts["params"][i] for node in nodes if i < len(node.facts["params"])) for i in range(groups)]
    state = [[n for n in node.facts["with_state"] if i == 0 or n not in own] for i, node in enumerate(nodes)]
    return {**nodes[0].facts, "params": params, "with_state": _union(state)}


def _merged_values(nodes: list[SavedNode]) -> Json:
    """The settings of the groups are the first one's; plain state of single parameters is anybody's."""
    own = {name for group in nodes[0].facts["params"] for name in group}
    state = {
        (name, key): value
        for i, node in reversed(list(enumerate(nodes)))
        for name, key, value in node.values["state"]
        if i == 0 or name not in own
    }
    return {**nodes[0].values, "state": [[name, key, value] for (name, key), value in state.items()]}


def _union(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(dict.fromkeys(one for each in lists for one in each))
