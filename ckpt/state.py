"""The user's state, read between two steps of training.

`Capture` walks the nested dict once, makes a node of every entry (`ckpt.nodes`), and from then on reads it in well
under a millisecond for a thousand tensors when nothing in its structure has changed. A `Reading` is one moment: the
layout, live tensors in the layout's order, and plain values. Nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ckpt.errors import MismatchError, StateError
from ckpt.nodes import (
    Contents,
    CustomModuleNode,
    ModuleNode,
    Node,
    OptimizerNode,
    PlainNode,
    Stateful,
    StatefulNode,
    speaks_for_itself,
)
from ckpt.plan import Layout, TensorSpec
from ckpt.restore import Names, Placement
from ckpt.rng import adapt
from ckpt.saved import Saved, SavedNode
from ckpt.sharding import Entry, Piece, is_dtensor, local, slices, unsupported
from ckpt.sharding import pieces as of_rank
from ckpt.share import GLOBAL, Cut, Holding, Seat, share
from ckpt.tensors import Memory, memory_of
from ckpt.values import MAX_DEPTH, Json, Path, is_text, show


@dataclass(frozen=True)
class Reading:
    """`tensors[i]` is `layout.tensors[i]`, live: what this rank stages. `guarded[i]`: only optimizer steps change it.

    The tensors are detached: they hold on to the memory itself, so `p.data = ...` cannot free what is being copied.
    """

    layout: Layout
    tensors: list[Tensor]
    guarded: list[bool]
    values: list[Json]


SINGLE = Seat()


class Capture:
    """Reads one state again and again. StateError names the path of anything that cannot be saved."""

    def __init__(self, state: dict[str, Any], seat: Seat = SINGLE) -> None:
        if type(state) is not dict:
            raise StateError(f"the state must be a dict such as {{'model': model, 'optim': optim}}, not {type(state)}")
        self.state, self.seat = state, seat
        self._shape: list[tuple[Any, list[Any]]] = []
        self._objects: list[tuple[Any, Any, object]] = []
        self.nodes: list[Node] = []
        self._names: Names = {}
        self._named: list[list[Entry]] = []
        self._fixed: list[list[Entry]] = []
        self._facts: list[dict[str, Any]] = []
        self._signature: object = None
        self._last: Reading | None = None
        self.weights: list[
            bool
        ] = []  # of each tensor last read: what optimizers step, not what they remember
        self._settled = False  # whether the last whole reading found all where it was
        self._memory: dict[Memory, str] = {}
        self.replicated: list[Piece] = []  # what other ranks hold as well
        self.apart: set[str] = set()  # names that ranks should hold alike, and do not
        self.eager: set[str] = set()  # names whose copy may not overlap training: something else writes to them
        self._walk()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose steps change the guarded tensors."""
        return [node.optimizer for node in self.nodes if isinstance(node, OptimizerNode)]

    def name_of(self, param: Tensor) -> str:
        """What a parameter is called, "" if nothing in the state names it."""
        entry = self._names.get(id(param))
        return "" if entry is None else entry.name

    @property
    def has_scaler(self) -> bool:
        """A GradScaler skips optimizer steps on its own account."""
        return any(isinstance(n, StatefulNode) and isinstance(n.target, torch.amp.GradScaler) for n in self.nodes)

    @property
    def has_unguarded(self) -> bool:
        """Some optimizer's steps run no hooks: they cannot be counted."""
        return any(isinstance(node, OptimizerNode) and node.unguarded for node in self.nodes)

    def unguard(self, optimizer: object) -> None:
        """This optimizer changes its tensors without saying so: copy them before step() returns, from now on."""
        for node in self.nodes:
            if isinstance(node, OptimizerNode) and node.optimizer is optimizer and not node.unguarded:
                node.unguarded = True
                self.forget()

    @property
    def stepping(self) -> list[tuple[Path, torch.optim.Optimizer, dict[int, str]]]:
        """Of each optimizer: its path, itself, and what its parameters are called, by id."""
        nodes = [node for node in self.nodes if isinstance(node, OptimizerNode)]
        return [(node.path, node.optimizer, node.param_names(self._names)) for node in nodes]

    def holds_gradients(self) -> bool:
        """Whether any parameter of the optimizers has a gradient."""
        params = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        return any(p.grad is not None for p in params)

    def copy_eagerly(self, names: set[str]) -> None:
        """Something besides optimizers writes to these: copy them before step() returns, from now on."""
        if not names <= self.eager:
            self.eager |= names
            self.forget()

    def forget(self) -> None:
        """Build the layout anew at the next reading."""
        self._last = None

    # -- walking --

    def _walk(self) -> None:
        self._stale = True  # until all of it has been walked
        self._shape, self._objects = [], []
        self.nodes = list(self._find(self.state, ()))
        seen: dict[int, Path] = {}
        for node in self.nodes:
            for one in (getattr(node, "optimizer", None), getattr(node, "module", None)):
                if one is not None and seen.setdefault(id(one), node.path) is not node.path:
                    raise StateError(f"{show(node.path)} is the same object as {show(seen[id(one)])}: list it once")
        self._last = None
        self._stale = False

    def _find(self, container: Any, path: Path) -> Iterator[Node]:
        """A node for everything in a dict or list; containers of stateful things are walked into."""
        if len(path) > MAX_DEPTH:
            raise StateError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH}, or containing itself")
        self._shape.append((container, list(_keys(container))))
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if type(key) not in (str, int):
                raise StateError(f"{show(path)}: the key {key!r} is neither str nor int")
            here = (*path, key)
            if isinstance(value, (nn.Module, torch.optim.Optimizer)) and (instead := unsupported(value)):
                raise StateError(f"{show(here)}: {instead}")
            if isinstance(value, nn.Module):
                yield CustomModuleNode(here, value) if speaks_for_itself(value) else ModuleNode(here, value)
            elif isinstance(value, torch.optim.Optimizer):
                yield OptimizerNode(here, value)
            elif (adapted := adapt(value)) is not None:
                yield StatefulNode(here, adapted)
            elif isinstance(value, Stateful) and not isinstance(value, type):
                yield StatefulNode(here, value)
            elif type(value) in (dict, list, tuple) and _holds_objects(value):
                yield from self._find(value, here)
            elif isinstance(container, tuple):
                raise StateError(f"{show(here)}: cannot be set again in a tuple beside objects; use a list")
            else:
                yield PlainNode(here, container, key)
                continue
            self._objects.append((container, key, value))

    def _moved(self) -> bool:
        """Whether the user has put other objects into the state."""
        return (
            self._stale
            or any(list(_keys(container)) != keys for container, keys in self._shape)
            or any(container[key] is not value for container, key, value in self._objects)
        )

    # -- reading --

    def read(self) -> Reading:
        """The state as it is now."""
        if self._moved():
            self._walk()
        pieces = self._pieces()
        loose = [entry for piece in pieces for entry in piece.loose]
        self._settled = self._last is not None and self._same(pieces, loose)
        return self._read_on(pieces, loose) if self._settled else self._build(pieces, loose)

    def read_on(self) -> Reading:
        """As `read`, at a third of its cost: tensors in modules and optimizers are taken to lie where they lay. If they
        do not, the next `read` has another layout than this."""
        if not self._settled or self._last is None or self._moved():
            return self.read()
        pieces = [node.read_on(self._names) for node in self.nodes]
        loose = [entry for piece in pieces for entry in piece.loose]
        if any(p.fixed is not f for p, f in zip(pieces, self._fixed, strict=True)) or (
            self._sign(loose) != self._signature
        ):
            return self.read()
        return self._read_on(pieces, loose)

    def _read_on(self, pieces: list[Contents], loose: list[Entry]) -> Reading:
        last = self._last
        assert last is not None
        tensors = last.tensors[: self._fixed_count]
        for entry in loose:
            if cuts := self._cuts.get(entry.name):
                views = [piece.tensor.detach() for piece in self._pieces_of(entry)]
                tensors += [views[number][index] for number, index in cuts]
        return Reading(last.layout, tensors, last.guarded, [piece.values for piece in pieces])

    def _pieces(self) -> list[Contents]:
        """Modules and plain tensors first: optimizers need to know what parameters are called."""
        found: dict[int, Contents] = {}
        for i, node in enumerate(self.nodes):
            if not isinstance(node, OptimizerNode):
                found[i] = node.read(self._names)
        sources = [piece.fixed for piece in found.values()]
        loose = [e for piece in found.values() for e in piece.loose if e.tensor.requires_grad]
        if (
            loose
            or len(sources) != len(self._named)
            or any(a is not b for a, b in zip(sources, self._named, strict=True))
        ):
            self._named, names = sources, dict[int, Entry]()
            for entry in [*(e for fixed in sources for e in fixed), *loose]:  # frozen ones too: they may thaw
                names.setdefault(id(entry.tensor), entry)
            if _who(names) != _who(self._names):  # optimizers look at the identity of this dict
                self._names = names
        for i, node in enumerate(self.nodes):
            if isinstance(node, OptimizerNode):
                found[i] = node.read(self._names)
        return [found[i] for i in range(len(self.nodes))]

    def _same(self, pieces: list[Contents], loose: list[Entry]) -> bool:
        return (
            len(pieces) == len(self._fixed)
            and all(p.fixed is f for p, f in zip(pieces, self._fixed, strict=True))
            and all(p.facts == f for p, f in zip(pieces, self._facts, strict=True))
            and self._sign(loose) == self._signature
        )

    def _sign(self, loose: list[Entry]) -> object:
        """What a layout depends on in the entries that are made anew each time, sharing of memory included."""
        memory: dict[Memory, str] = {}
        found = []
        for entry in loose:
            key = memory_of(local(entry.tensor))
            owner = None if key is None else self._memory.get(key) or memory.setdefault(key, entry.name)
            found.append(([p.holding for p in of_rank(entry, self.seat)], owner, entry.guarded))
        return found

    def _build(self, pieces: list[Contents], loose: list[Entry]) -> Reading:
        fixed = [entry for piece in pieces for entry in piece.fixed]
        stepped: set[int] = set()
        for node in self.nodes:
            if isinstance(node, OptimizerNode) and not node.unguarded:
                stepped |= {id(p) for group in node.optimizer.param_groups for p in group["params"]}
        unguarded = [show(n.path) + "." for n in self.nodes if isinstance(n, OptimizerNode) and n.unguarded]
        parts: list[Piece] = []
        guards: dict[str, bool] = {}
        aliases: dict[str, str] = {}
        memory: dict[Memory | int, str] = {}
        for entry in [*fixed, *loose]:
            if entry.name in guards or entry.name == "__metadata__" or not is_text(entry.name):
                raise StateError(f"{entry.name!r}: two entries of the state get this name, or it is reserved")
            key = _place(entry.tensor)
            owner = entry.name if key is None else memory.setdefault(key, entry.name)
            exposed = any(entry.name.startswith(prefix) for prefix in unguarded)
            guards[entry.name] = entry.guarded and not exposed and self._may_overlap(entry, stepped)
            if owner != entry.name:
                aliases[entry.name] = owner
            else:
                parts += self._pieces_of(entry)
        self._fixed, self._facts = [p.fixed for p in pieces], [p.facts for p in pieces]
        self._memory = {k: memory[k] for e in fixed if (k := memory_of(local(e.tensor))) is not None}
        self._signature = self._sign(loose)
        components = [
            {"path": list(node.path), "kind": node.kind, "facts": piece.facts, "names": _own(piece)}
            for node, piece in zip(self.nodes, pieces, strict=True)
        ]
        beside = {e.name: memory[key] for e in fixed if e.of is not None and (key := _place(e.of)) in memory}
        cuts = share([part.holding for part in parts], self.seat, beside)
        self.replicated = [p for p in parts if len(p.holding.replicas) > 1 and guards[p.holding.name]]
        self._note_loose(parts, cuts, {e.name for e in loose})
        layout = Layout(
            tuple(_spec(parts[cut.holding].holding, cut) for cut in cuts),
            aliases,
            components,
            self.seat.rank,
            self.seat.size,
            {p.holding.name: p.holding.instance for p in parts if p.holding.instance != GLOBAL},
            _elsewhere(parts, cuts),
        )
        tensors = [parts[cut.holding].tensor.detach()[_index(parts[cut.holding].holding, cut)] for cut in cuts]
        guarded = [guards[parts[cut.holding].holding.name] for cut in cuts]
        remembered = {entry.name for entry in fixed if entry.of is not None}
        self.weights = [guards[n] and n not in remembered for n in (parts[cut.holding].holding.name for cut in cuts)]
        self._last = Reading(layout, tensors, guarded, [piece.values for piece in pieces])
        return self._last

    def _pieces_of(self, entry: Entry) -> list[Piece]:
        """What this rank has of an entry. What differs from rank to rank is its own, whatever it should be."""
        found = of_rank(entry, self.seat)
        if entry.name in self.apart:
            rank = self.seat.rank
            if all(p.holding.sizes == p.holding.full for p in found):
                found = [Piece(replace(p.holding, replicas=(rank,), instance=rank), p.tensor) for p in found]
        return found

    def keep_apart(self, names: set[str]) -> None:
        """Save these for each rank by itself from now on."""
        if not names <= self.apart:
            self.apart |= names
            self.forget()

    def _note_loose(self, parts: list[Piece], cuts: list[Cut], loose: set[str]) -> None:
        """How to take the same slices of tensors that are made anew each time; they come last."""
        self._cuts: dict[str, list[tuple[int, tuple[slice, ...]]]] = {}
        first: dict[str, int] = {}
        for i, part in enumerate(parts):
            first.setdefault(part.holding.name, i)
        self._fixed_count = len(cuts)
        for cut in reversed(cuts):
            holding = parts[cut.holding].holding
            if holding.name in loose:
                self._fixed_count -= 1
                where = (cut.holding - first[holding.name], _index(holding, cut))
                self._cuts.setdefault(holding.name, []).insert(0, where)

    def _may_overlap(self, entry: Entry, stepped: set[int]) -> bool:
        """Optimizer state and the parameters it steps. Whatever else writes, such as an average, may do so any time."""
        if entry.name in self.eager:
            return False
        tensor = entry.tensor
        return not isinstance(tensor, nn.Parameter) or id(tensor) in stepped

    # -- putting back --

    def place(self, saved: Saved, *, strict: bool = True) -> Placement:
        """Where the tensors of a saved state go. Changes nothing; what does not fit is among its `problems`."""
        if self._moved():
            self._walk()
        self._pieces()
        placement = Placement(saved, strict, self._names, self.seat)
        live = {node.path: node for node in self.nodes}
        found = saved.nodes(self.seat.rank)
        if found and all(one.kind == BY_DCP for one in found):
            raise MismatchError(
                "this was saved through ckpt.dcp: dcp.load reads it, and `ckpt restore URL --to NEW --format run` "
                "makes a run of it that a Checkpointer goes on from"
            )
        for one in found:
            node = live.pop(one.path, None)
            if node is None:
                placement.problem(f"{show(one.path)} is in the checkpoint, and not in the state")
            elif node.kind != one.kind and not _plain_again(node, one):
                placement.problem(f"{show(one.path)} is a {one.kind} in the checkpoint and a {node.kind} here")
            else:
                node.prepare(one, placement)
        for path in live:
            placement.problem(f"{show(path)} is not in the checkpoint")
        placement.check_sharing()
        return placement


BY_DCP = "dcp"  # the kind of the one entry of what torch's DCP has saved


def _plain_again(node: Node, saved: SavedNode) -> bool:
    """What `state_dict()` said is stored like any dict, and what other programs saved does not say which it was."""
    return isinstance(node, PlainNode) and saved.kind == StatefulNode.kind and type(node.parent[node.key]) is dict


def _place(tensor: Tensor) -> Memory | int | None:
    """What a tensor is told from others by, of which it may be another view."""
    return memory_of(local(tensor)) or (id(tensor) if is_dtensor(tensor) else None)


def _who(names: Names) -> dict[int, tuple[str, object]]:
    return {key: (entry.name, entry.alike) for key, entry in names.items()}


def _index(holding: Holding, cut: Cut) -> tuple[slice, ...]:
    """What to take of a piece; nothing to do if it is all of it."""
    return () if cut.box[1] == holding.sizes else slices(cut.box)


def _elsewhere(parts: list[Piece], cuts: list[Cut]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What this rank holds like all others, and stages nothing of."""
    staged = {parts[cut.holding].holding.name for cut in cuts}
    rest = (p.holding for p in parts if p.holding.instance == GLOBAL and p.holding.name not in staged)
    return {holding.name: (holding.dtype, holding.full) for holding in rest}


def _spec(holding: Holding, cut: Cut) -> TensorSpec:
    at = tuple(i + j for i, j in zip(holding.offsets, cut.box[0], strict=True))
    sizes = cut.box[1]
    whole, offsets = (None, ()) if sizes == holding.full else (holding.full, at)
    return TensorSpec(
        holding.name,
        holding.dtype,
        sizes,
        holding.accelerator,
        whole,
        offsets,
        holding.instance,
    )


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _own(piece: Contents) -> list[str]:
    return [entry.name for entry in (*piece.fixed, *piece.loose)]


def _holds_objects(value: Any, depth: int = 0) -> bool:
    """Whether a container has something with a state of its own inside."""
    if depth > MAX_DEPTH:
        return False
    if type(value) in (dict, list, tuple):
        inner = value.values() if type(value) is dict else value
        return any(_holds_objects(v, depth + 1) for v in inner)
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or adapt(value) is not None:
        return True
    return isinstance(value, Stateful) and not isinstance(value, type)
