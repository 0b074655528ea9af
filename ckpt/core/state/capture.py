"""Reads the user's state between two steps of training.

`Capture` walks the nested dict once (`Walk`). If nothing in its structure (`ckpt.core.state.structure`) has changed,
later readings take well under a millisecond for a thousand tensors. A `Reading` is the state at one moment: the layout,
live tensors in the layout's order, and plain values. Nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ckpt.core.format.layout import Layout
from ckpt.core.format.partition import Seat
from ckpt.core.format.saved_nodes import SavedNode
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import MAX_DEPTH, Json, Path, show
from ckpt.core.state.adapter import adapter_of
from ckpt.core.state.fingerprint import SampledPlaces
from ckpt.core.state.module_node import ModuleNode
from ckpt.core.state.names import Names
from ckpt.core.state.nodes import Contents, PlainNode, StatefulNode, StateNode
from ckpt.core.state.optimizer_node import OptimizerNode, all_of_one_state, forgotten
from ckpt.core.state.placement import Placement
from ckpt.core.state.rewrap import forms_of
from ckpt.core.state.sharding import LocalPiece, StateEntry, storage_of, unsupported
from ckpt.core.state.stateful import Scaler, Stateful, adapt
from ckpt.core.state.structure import (
    SampledReplicas,
    Structure,
    loose_of,
    params_of,
    parts_of,
    stepped_nodes,
    steps_for,
)
from ckpt.core.state.tensors import Versioned
from ckpt.core.state.wrappers import inside, is_wrapped
from ckpt.errors import MismatchError, StateError


@dataclass(frozen=True)
class Reading:
    """The state at one moment.

    `tensors`: the live tensors that this rank stages, in the order of the layout. They are detached and keep their
    memory alive, so `p.data = ...` cannot free memory during a copy. `guarded`: for each tensor, True if only optimizer
    steps change it. `early`: the indices of all other tensors. `counters`: for each tensor, the object that counts the
    writes to it and to the wrappers around it. `spots`: where to sample the guarded tensors, to detect writes by other
    code.
    """

    layout: Layout
    tensors: list[Tensor]
    guarded: list[bool]
    early: list[int]
    values: list[Json]
    counters: Sequence[Versioned]
    spots: list[SampledPlaces] = field(default_factory=list)
    replicas: list[SampledReplicas] = field(default_factory=list)  # tensors that other ranks have too


SINGLE = Seat()


class Capture:
    """Reads one state repeatedly. Raises StateError with the path of an entry that cannot be saved."""

    def __init__(self, state: dict[str, Any], seat: Seat = SINGLE, *, subset: bool = False) -> None:
        """Walk the state. `subset`: `place` ignores top-level entries of a checkpoint that the state does not have."""
        if type(state) is not dict:
            raise StateError(f"the state must be a dict such as {{'model': model, 'optim': optim}}, not {type(state)}")
        self.state, self.seat, self.subset = state, seat, subset
        self._walk = Walk(state)
        self._names = Names()
        self._named: list[list[StateEntry]] = []
        self._structure: Structure | None = None
        self._holds = False  # True if `_structure` is valid
        self._unfinished = False  # True if a reading was started and has not ended
        self._announced: list[Any] | None = None  # None: every optimizer is trusted
        self.apart: set[str] = set()  # names that should be replicated, but differ between ranks
        self.eager: set[str] = set()  # names whose copy may not overlap training, because other code writes to them

    @property
    def nodes(self) -> list[StateNode]:
        return self._walk.nodes

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose steps change the guarded tensors."""
        return list(dict.fromkeys(one for node in self._walk.stepped if (one := node.optimizer) is not None))

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the last reading, or None if it is no longer valid."""
        return self._structure.layout if self._structure is not None and self._holds else None

    def name_of(self, param: Tensor) -> str:
        """Return the name of a parameter, or "" if the state has no name for it."""
        if (entry := self._names.get(id(param))) is not None:
            return entry.name
        return next((name for node in self._walk.optimizers if (name := node.own_name(param))), "")

    @property
    def has_scaler(self) -> bool:
        """Return True if the state has a GradScaler, which may skip optimizer steps."""
        return any(
            isinstance(n, StatefulNode) and isinstance(n.target, (Scaler, torch.amp.GradScaler)) for n in self.nodes
        )

    @property
    def has_unguarded(self) -> bool:
        """Return True if some optimizer's steps run no hooks, so that they cannot be counted."""
        return any(node.unguarded for node in self._walk.stepped)

    def unguard(self, optimizer: Any) -> None:
        """Copy the tensors of this optimizer before step() returns from now on, because its steps run no hooks."""
        for node in self._walk.stepped:
            if not node.unguarded and steps_for(optimizer, node.optimizer):
                node.unguarded = True
                self.forget()

    def guard_again(self) -> None:
        """Trust all optimizers again. Code that changes tensors outside steps calls
        `Checkpointer.before_untracked_update`.
        """
        for node in self._walk.stepped:
            if node.unguarded:
                node.unguarded = False
                self.forget()

    def concerns(self, optimizer: Any) -> bool:
        """Return True if a step of this optimizer may change the saved state. Return False for example for a probe that
        trains a model of its own."""
        known = self._structure if self._holds else None
        if known is None or known.copied or any(steps_for(optimizer, one) for one in self.optimizers):
            return True
        params = params_of(optimizer)
        theirs = {storage_of(one) for p in params for one in (inside(p) if is_wrapped(p) else [p])}
        return not theirs or 0 in theirs or not theirs.isdisjoint(known.storages)

    def trust(self, announced: list[Any]) -> None:
        """Set the optimizers whose hook ran before this step. Any other may have stepped without it, for example in a
        graph captured before the Checkpointer existed, and may do so again during a copy. So its tensors are copied
        before step() returns, until its hook runs."""
        self._announced = announced

    def _silent(self) -> frozenset[int]:
        """Return the ids of this state's optimizers that are not trusted."""
        if self._announced is None:
            return frozenset()
        announced = self._announced

        def trusted(optimizer: Any) -> bool:
            if any(one is optimizer for one in announced):
                return True
            return all(any(steps_for(one, part) for one in announced) for part in parts_of(optimizer))

        return frozenset(id(one) for one in self.optimizers if not trusted(one))

    @property
    def replicated(self) -> list[LocalPiece]:
        """Return the replicated tensors that only optimizers change."""
        known = self._structure if self._holds else None
        return [] if known is None else known.guards(self._silent()).replicated

    def holds_gradients(self) -> bool:
        """Return True if any parameter of the optimizers has a gradient."""
        return any(p.grad is not None for optimizer in self.optimizers for p in params_of(optimizer))

    def copy_eagerly(self, names: set[str]) -> None:
        """From now on, copy these before step() returns, because other code than optimizers writes to them."""
        if not names <= self.eager:
            self.eager |= names
            self.forget()

    def keep_apart(self, names: set[str]) -> None:
        """From now on, save these for each rank separately."""
        if not names <= self.apart:
            self.apart |= names
            self.forget()

    def forget(self) -> None:
        """Build the layout again at the next reading."""
        self._holds = False

    # -- reading --

    def _walk_again(self) -> None:
        unguarded = {id(node.optimizer) for node in self._walk.stepped if node.unguarded}
        settings = {id(node.optimizer): node.settings for node in self._walk.optimizers}
        walk = Walk(self.state)
        for one in walk.optimizers:
            one.settings = settings.get(id(one.optimizer), one.settings)
        for node in walk.stepped:
            node.unguarded = id(node.optimizer) in unguarded
        self._holds = False
        self._walk = walk

    def read(self) -> Reading:
        """Read the present state."""
        # Ctrl-C or a signal handler may have interrupted an earlier reading.
        if self._unfinished or self._walk.moved():
            self._walk_again()
        self._unfinished = True
        pieces = self._pieces()
        known = self._structure if self._holds else None
        if known is None or not known.same(pieces):
            self._holds = False
            known = self._structure = Structure(self.nodes, pieces, self.seat, self.apart, self.eager)
            self._holds = True
        reading = self._reading(known, pieces)
        self._unfinished = False
        return reading

    def _reading(self, known: Structure, pieces: list[Contents]) -> Reading:
        tensors = known.tensors(pieces)
        values = [piece.values for piece in pieces]
        guards, counters = known.guards(self._silent()), known.counters(tensors, pieces)
        spots, replicas = known.spots(tensors), known.replicas(pieces) if self.seat.size > 1 else []
        return Reading(known.layout, tensors, guards.guarded, guards.early, values, counters, spots, replicas)

    def _pieces(self) -> list[Contents]:
        """Read all nodes, optimizers last, because they need the names of parameters."""
        found: dict[int, Contents] = {}
        for i, node in enumerate(self.nodes):
            if not isinstance(node, OptimizerNode):
                found[i] = node.read(self._names)
        others = list(found.values())
        sources, loose = [piece.fixed for piece in others], loose_of(others)
        stepped = [entry for entry in loose if (entry.part_of or entry).tensor.requires_grad]
        if (
            stepped
            or len(sources) != len(self._named)
            or any(a is not b for a, b in zip(sources, self._named, strict=True))
        ):
            self._named, names = sources, Names()
            # including frozen ones, which may be unfrozen later
            for entry in [*(e for fixed in sources for e in fixed), *stepped]:
                names.setdefault(id(entry.owner.tensor), entry.owner)
            if _who(names) != _who(self._names):  # optimizers compare the identity of this dict
                self._names = names
        self._names.note(sources, loose)
        for i, node in enumerate(self.nodes):
            if isinstance(node, OptimizerNode):
                found[i] = node.read(self._names)
        return [found[i] for i in range(len(self.nodes))]

    # -- restoring --

    def place(self, saved: SavedState, *, strict: bool = True) -> Placement:
        """Match the tensors of a saved state with the live ones, without changes. Mismatches are in its `problems`.

        If the class of an object in the state has a method `match_structure`, that method may first change the
        structure of the other entries. It gets each saved entry by its path.
        """
        found = saved.nodes(self.seat.rank)
        targets: list[Any] = [getattr(node, "target", None) for node in self.nodes]
        for target in targets:
            if hasattr(type(target), "match_structure"):
                target.match_structure({one.path: one for one in found})
        if self._walk.moved():
            self._walk_again()
        pieces = self._pieces()
        placement = Placement(saved, strict, self._names, self.seat)
        known = self._structure if self._holds and not self._unfinished else None
        as_saved, lying = known is not None and known.is_as_saved(saved, pieces), set[str]()
        fixed = {node.path: piece.fixed for node, piece in zip(self.nodes, pieces, strict=True)}
        live = {node.path: node for node in self.nodes}
        if found and all(one.kind == BY_DCP for one in found):
            raise MismatchError(
                "this was saved through ckpt.dcp: dcp.load reads it, and `ckpt export RUN --to NEW --format run` "
                "makes a run of it that a Checkpointer goes on from"
            )
        for form in (form for one in found for form in forms_of(one.facts).values()):
            placement.shapes[form.name] = form.whole or form.size
        # With the same number of ranks, an entry that only other ranks saved is theirs: for example, only rank 0 has a
        # logger.
        expected = saved.paths(self.seat.rank) if saved.world == self.seat.size else None
        for one in found:
            node = live.pop(one.path, None)
            if node is None and expected is not None and one.path not in expected:
                continue
            if node is None and self.subset and one.path[0] not in self.state:
                continue
            if node is None:
                placement.problem(f"{show(one.path)} is in the checkpoint, and not in the state")
            elif node.kind != one.kind and not _plain_again(node, one) and not {node.kind, one.kind} <= MODULES:
                placement.problem(f"{show(one.path)} is a {one.kind} in the checkpoint and a {node.kind} here")
            elif as_saved and node.prepare_as_saved(one, placement):
                lying.update(entry.name for entry in fixed[node.path])
            else:
                node.prepare(one, placement)
        for path in live:
            placement.problem(f"{show(path)} is not in the checkpoint")
        if known is not None and lying:
            rows = {name: row for row, name in enumerate(saved.table.columns.names)}
            live_tensors = zip(known.layout.tensors, known.tensors(pieces), strict=True)
            placement.lying = [(rows[of.name], tensor) for of, tensor in live_tensors if of.name in lying]
        placement.check_sharing()
        return placement


MODULES = {"module", "custom module"}  # the second kind has entries other than parameters and buffers
BY_DCP = "dcp"  # the kind of the single entry of a checkpoint saved by torch's DCP


def _plain_again(node: StateNode, saved: SavedNode) -> bool:
    """Return True if a plain dict is restored where another program saved a `state_dict()` as a plain dict."""
    return isinstance(node, PlainNode) and saved.kind == StatefulNode.kind and type(node.parent[node.key]) is dict


def _who(names: Names) -> dict[int, tuple[str, object]]:
    return {key: (entry.name, entry.alike) for key, entry in names.items()}


# -- the entries of the state --


class Walk:
    """The nodes of one walk through the state. Raises StateError with the path of an entry that cannot be saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._shape: list[tuple[Any, list[Any]]] = []
        self._objects: list[tuple[Any, Any, object]] = []
        self.nodes: list[StateNode] = list(self._find(state, ()))
        self.optimizers = [node for node in self.nodes if isinstance(node, OptimizerNode)]
        self.stepped = stepped_nodes(self.nodes)
        listed = {id(one) for node in self.optimizers for one in all_of_one_state(node.optimizer)}
        listed |= {id(getattr(node, "target", None)) for node in self.nodes}
        for outer in self.optimizers:
            for name, inner in forgotten(outer.optimizer):
                if id(inner) not in listed:
                    raise StateError(
                        f"{show(outer.path)}: its state_dict() omits the optimizer in {name}, whose state would be "
                        "lost: add that optimizer to the state"
                    )
        seen: dict[int, Path] = {}
        for node in self.nodes:
            optimizer = node.optimizer if isinstance(node, OptimizerNode) else None
            for one in (optimizer, getattr(node, "module", None)):
                if one is not None and seen.setdefault(id(one), node.path) is not node.path:
                    raise StateError(f"{show(node.path)} is the same object as {show(seen[id(one)])}: list it once")

    def moved(self) -> bool:
        """Return True if the user has put other objects into the state since."""
        return any(list(_keys(container)) != keys for container, keys in self._shape) or any(
            container[key] is not value for container, key, value in self._objects
        )

    def _find(self, container: Any, path: Path) -> Iterator[StateNode]:
        """Yield a node for each entry of a dict or list, and for the entries of containers with stateful objects."""
        if len(path) > MAX_DEPTH:
            raise StateError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH}, or containing itself")
        self._shape.append((container, list(_keys(container))))
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if type(key) not in (str, int):
                raise StateError(f"{show(path)}: the key {key!r} is neither str nor int")
            here = (*path, key)
            if isinstance(value, (nn.Module, torch.optim.Optimizer)) and (instead := unsupported(value)):
                raise StateError(f"{show(here)}: {instead}")
            if (adapter := adapter_of(value)) is not None:
                yield adapter(here, value)
            elif isinstance(value, nn.Module):
                yield ModuleNode(here, value)
            elif isinstance(value, torch.optim.Optimizer):
                yield OptimizerNode(here, value)
            elif (adapted := adapt(value)) is not None:
                yield StatefulNode(here, adapted)
            elif isinstance(value, Stateful) and not isinstance(value, type):
                yield StatefulNode(here, value)
            elif type(value) in (dict, list, tuple) and _holds_objects(value):
                yield from self._find(value, here)
            elif isinstance(container, tuple):
                raise StateError(f"{show(here)}: a plain value in a tuple with objects cannot be restored: use a list")
            else:
                yield PlainNode(here, container, key)
                continue
            self._objects.append((container, key, value))


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _holds_objects(value: Any, depth: int = 0) -> bool:
    """Return True if a container has an object with state of its own inside."""
    if depth > MAX_DEPTH:
        return False
    if type(value) in (dict, list, tuple):
        inner = value.values() if type(value) is dict else value
        return any(_holds_objects(v, depth + 1) for v in inner)
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or adapter_of(value) is not None:
        return True
    if adapt(value) is not None:
        return True
    return isinstance(value, Stateful) and not isinstance(value, type)
