"""The user's state, read between two steps of training.

`Capture` walks the nested dict once, makes a node of every entry (`ckpt.state.adapters`), and from then on reads it in
well under a millisecond for a thousand tensors when nothing in its structure has changed. A `Reading` is one moment:
the layout, live tensors in the layout's order, and plain values. Nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ckpt.errors import MismatchError, StateError
from ckpt.format.layout import Layout, TensorSpec
from ckpt.format.merged import SavedNode, SavedState
from ckpt.format.partition import GLOBAL, Cut, Holding, Seat, share
from ckpt.format.values import MAX_DEPTH, Json, Path, is_text, show
from ckpt.state.adapters import Contents, PlainNode, Stateful, StatefulNode, StateNode
from ckpt.state.fingerprint import SampledPlaces
from ckpt.state.module_node import ModuleNode
from ckpt.state.names import Names
from ckpt.state.optimizer_node import OptimizerNode, keeps_elsewhere
from ckpt.state.placement import Placement
from ckpt.state.rng import adapt
from ckpt.state.sharding import LocalPiece, StateEntry, is_dtensor, local, slices, unsupported
from ckpt.state.sharding import pieces as of_rank
from ckpt.state.tensors import Memory, memory_of


@dataclass(frozen=True)
class Reading:
    """`tensors[i]` is `layout.tensors[i]`, live: what this rank stages. `guarded[i]`: only optimizer steps change it.

    The tensors are detached: they hold on to the memory itself, so `p.data = ...` cannot free what is being copied.
    `spots`: where to look in all that can be guarded, to see whether somebody else writes to it.
    """

    layout: Layout
    tensors: list[Tensor]
    guarded: list[bool]
    values: list[Json]
    spots: list[SampledPlaces] = field(default_factory=list)


@dataclass(frozen=True)
class Guards:
    """What may be copied beside training while some optimizers are not trusted. `guarded`: as in a `Reading`;
    `replicated`: what of it other ranks hold as well."""

    guarded: list[bool]
    replicated: list[LocalPiece]


MOST_GUARDS = 16  # with many optimizers that step now and then there are too many to keep


SINGLE = Seat()


class Capture:
    """Reads one state again and again. StateError names the path of anything that cannot be saved."""

    def __init__(self, state: dict[str, Any], seat: Seat = SINGLE) -> None:
        if type(state) is not dict:
            raise StateError(f"the state must be a dict such as {{'model': model, 'optim': optim}}, not {type(state)}")
        self.state, self.seat = state, seat
        self._shape: list[tuple[Any, list[Any]]] = []
        self._objects: list[tuple[Any, Any, object]] = []
        self.nodes: list[StateNode] = []
        self._names = Names()
        self._named: list[list[StateEntry]] = []
        self._fixed: list[list[StateEntry]] = []
        self._facts: list[dict[str, Any]] = []
        self._signature: object = None
        self._last: Reading | None = None
        self.weights: list[bool] = []  # of each tensor last read: what optimizers step, not what they remember
        self.parameters: list[bool] = []  # of each: a module's parameter, trained or not
        self._unfinished = False  # whether a reading was begun, and has not come to its end
        self._settled = False  # whether the last whole reading found all where it was
        self._watched: list[Tensor] = []  # parameters; and where they lay
        self._pointers: list[int] = []
        self._announced: list[Any] | None = None  # None: every optimizer is trusted
        self._guards: dict[frozenset[int], Guards] = {}  # by the optimizers that are not
        self._copied = False  # whether an object of the state may have given copies of what an optimizer steps
        self._storages = set[int]()  # of all that is saved, other ranks' shares of it too
        self._where_anew: list[tuple[int, tuple[int, ...]]] = []  # guarded tensors that are made anew
        self._memory: dict[Memory, str] = {}
        self.apart: set[str] = set()  # names that ranks should hold alike, and do not
        self.eager: set[str] = set()  # names whose copy may not overlap training: something else writes to them
        self._walk()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose steps change the guarded tensors."""
        return [node.optimizer for node in self.nodes if isinstance(node, OptimizerNode)]

    def name_of(self, param: Tensor) -> str:
        """What a parameter is called, "" if nothing in the state names it."""
        if (entry := self._names.get(id(param))) is not None:
            return entry.name
        nodes = (node for node in self.nodes if isinstance(node, OptimizerNode))
        return next((name for node in nodes if (name := node.own_name(param))), "")

    @property
    def has_scaler(self) -> bool:
        """A GradScaler skips optimizer steps on its own account."""
        return any(isinstance(n, StatefulNode) and isinstance(n.target, torch.amp.GradScaler) for n in self.nodes)

    @property
    def has_unguarded(self) -> bool:
        """Some optimizer's steps run no hooks: they cannot be counted."""
        return any(isinstance(node, OptimizerNode) and node.unguarded for node in self.nodes)

    def unguard(self, optimizer: Any) -> None:
        """This optimizer changes its tensors without saying so: copy them before step() returns, from now on."""
        for node in self.nodes:
            if isinstance(node, OptimizerNode) and not node.unguarded and _steps_for(optimizer, node.optimizer):
                node.unguarded = True
                self.forget()

    def concerns(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer may change what is saved: of a probe, say, that trains a model of its own it
        is known that it does not."""
        if self._last is None or self._copied or any(_steps_for(optimizer, one) for one in self.optimizers):
            return True
        theirs = {_storage(p) for group in optimizer.param_groups for p in group["params"]}
        return not theirs or 0 in theirs or not theirs.isdisjoint(self._storages)

    def trust(self, announced: list[Any]) -> None:
        """`announced`: the optimizers whose hook ran before this step. Any other may have stepped without it, as in a
        graph that was captured before we came, and may do so again while its tensors are copied. So these are copied
        before step() returns, until its hook runs."""
        self._announced = announced

    def _silent(self) -> frozenset[int]:
        """The ids of our optimizers that are not trusted."""
        if self._announced is None:
            return frozenset()
        ours = {id(optimizer): optimizer for optimizer in self.optimizers}
        heard = {id(one) for one in self._announced}
        others = [one for one in self._announced if id(one) not in ours]
        quiet = (key for key in ours if key not in heard)
        return frozenset(key for key in quiet if not any(_steps_for(other, ours[key]) for other in others))

    @property
    def replicated(self) -> list[LocalPiece]:
        """What other ranks hold as well, of that which only optimizers change."""
        return [] if self._last is None else self._guards_now(self._last).replicated

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
        unguarded = {id(node.optimizer) for node in self.nodes if isinstance(node, OptimizerNode) and node.unguarded}
        self._shape, self._objects = [], []
        self.nodes = list(self._find(self.state, ()))
        seen: dict[int, Path] = {}
        for node in self.nodes:
            for one in (getattr(node, "optimizer", None), getattr(node, "module", None)):
                if one is not None and seen.setdefault(id(one), node.path) is not node.path:
                    raise StateError(f"{show(node.path)} is the same object as {show(seen[id(one)])}: list it once")
        for node in self.nodes:
            if isinstance(node, OptimizerNode):
                node.unguarded = id(node.optimizer) in unguarded
        self._last = None
        self._stale = False

    def _find(self, container: Any, path: Path) -> Iterator[StateNode]:
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
                yield ModuleNode(here, value)
            elif isinstance(value, torch.optim.Optimizer) and not keeps_elsewhere(value):
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
        if self._unfinished or self._moved():  # Ctrl-C, or a signal handler that is in here, has come into a reading
            self._walk()
        self._unfinished = True
        pieces = self._pieces()
        loose = [entry for piece in pieces for entry in piece.loose]
        self._settled = self._last is not None and self._same(pieces, loose)
        if not self._settled:
            self._build(pieces, loose)
        self._pointers = list(map(Tensor.data_ptr, self._watched))
        reading = self._read_on(pieces, loose)
        self._unfinished = False
        return reading

    def read_on(self) -> Reading:
        """As `read`, at a fraction of its cost: modules and optimizers are taken to have the tensors that they had; of
        parameters it is seen where they lie. `changed` says whether they have others after all."""
        if self._unfinished or not self._settled or self._last is None or self._moved():
            return self.read()
        if list(map(Tensor.data_ptr, self._watched)) != self._pointers:
            return self.read()
        pieces = [node.read_on(self._names) for node in self.nodes]
        loose = [entry for piece in pieces for entry in piece.loose]
        if any(p.fixed is not f for p, f in zip(pieces, self._fixed, strict=True)) or (
            self._sign(loose) != self._signature
        ):
            return self.read()
        return self._read_on(pieces, loose)

    def changed(self) -> bool:
        """Whether modules or optimizers have other tensors than at the last whole reading, or have them elsewhere."""
        nodes = (node for node in self.nodes if isinstance(node, (ModuleNode, OptimizerNode)))
        return any(node.changed() for node in nodes)

    def _read_on(self, pieces: list[Contents], loose: list[StateEntry]) -> Reading:
        last = self._last
        assert last is not None
        tensors = last.tensors[: self._fixed_count]
        for entry in loose:
            if cuts := self._cuts.get(entry.name):
                views = [piece.tensor.detach() for piece in self._pieces_of(entry)]
                tensors += [views[number][index] for number, index in cuts]
        values = [piece.values for piece in pieces]
        return Reading(last.layout, tensors, self._guards_now(last).guarded, values, self._look_at(last, tensors))

    def _guards_now(self, last: Reading) -> Guards:
        """By the optimizers that are trusted; worked out once for the same ones."""
        silent = self._silent()
        if silent not in self._guards:
            if len(self._guards) == MOST_GUARDS:
                self._guards.clear()
            self._guards[silent] = Guards(
                [one and not steppers & silent for one, steppers in zip(last.guarded, self._steppers, strict=True)],
                [piece for piece, steppers in self._shared if not steppers & silent],
            )
        return self._guards[silent]

    def _look_at(self, last: Reading, tensors: list[Tensor]) -> list[SampledPlaces]:
        """In tensors that stay, and in those that are made anew by each reading, mostly in the same memory."""
        if not last.spots:
            fixed = [i for i, one in enumerate(last.guarded[: self._fixed_count]) if one]
            last.spots.append(SampledPlaces(last.layout, fixed, [tensors[i] for i in fixed]))
            self._anew = [i for i in range(self._fixed_count, len(tensors)) if last.guarded[i]]
        where = [(tensors[i].data_ptr(), tensors[i].stride()) for i in self._anew]
        if where != self._where_anew:
            self._where_anew = where
            last.spots[1:] = [SampledPlaces(last.layout, self._anew, [tensors[i] for i in self._anew])]
        return last.spots

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
            self._named, names = sources, Names()
            for entry in [*(e for fixed in sources for e in fixed), *loose]:  # frozen ones too: they may thaw
                names.setdefault(id(entry.tensor), entry)
            if _who(names) != _who(self._names):  # optimizers look at the identity of this dict
                self._names = names
        self._names.note(sources, [e for piece in found.values() for e in piece.loose])
        for i, node in enumerate(self.nodes):
            if isinstance(node, OptimizerNode):
                found[i] = node.read(self._names)
        return [found[i] for i in range(len(self.nodes))]

    def _same(self, pieces: list[Contents], loose: list[StateEntry]) -> bool:
        return (
            len(pieces) == len(self._fixed)
            and all(p.fixed is f for p, f in zip(pieces, self._fixed, strict=True))
            and all(p.facts == f for p, f in zip(pieces, self._facts, strict=True))
            and self._sign(loose) == self._signature
        )

    def _sign(self, loose: list[StateEntry]) -> object:
        """What a layout depends on in the entries that are made anew each time, sharing of memory included."""
        memory: dict[Memory, str] = {}
        found = []
        for entry in loose:
            key = memory_of(local(entry.tensor))
            owner = None if key is None else self._memory.get(key) or memory.setdefault(key, entry.name)
            found.append(([p.holding for p in of_rank(entry, self.seat)], owner, entry.guarded))
        return found

    def _build(self, pieces: list[Contents], loose: list[StateEntry]) -> None:
        fixed = [entry for piece in pieces for entry in piece.fixed]
        stepped: set[int] = set()
        for node in self.nodes:
            if isinstance(node, OptimizerNode) and not node.unguarded:
                stepped |= {id(p) for group in node.optimizer.param_groups for p in group["params"]}
        steppers = self._find_steppers(pieces, [*fixed, *loose])
        unguarded = [show(n.path) + "." for n in self.nodes if isinstance(n, OptimizerNode) and n.unguarded]
        parts: list[LocalPiece] = []
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
        shared = [p for p in parts if len(p.holding.replicas) > 1 and guards[p.holding.name]]
        self._shared = [(p, steppers[p.holding.name]) for p in shared]
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
        names = [parts[cut.holding].holding.name for cut in cuts]
        self._steppers = [steppers[name] for name in names]
        remembered = {entry.name for entry in fixed if entry.of is not None}
        self.weights = [guards[name] and name not in remembered for name in names]
        params = {entry.name for entry in fixed if isinstance(entry.tensor, nn.Parameter)}
        self.parameters = [name in params for name in names]
        self._storages = {_storage(entry.tensor) for entry in (*fixed, *loose)}
        self._copied = any(_says_copies(node, piece) for node, piece in zip(self.nodes, pieces, strict=True))
        self._watched = [e.tensor for e in fixed if e.name in params and not is_dtensor(e.tensor)]
        self._guards, self._where_anew = {}, []
        self._last = Reading(layout, tensors, [guards[name] for name in names], [piece.values for piece in pieces])

    def _find_steppers(self, pieces: list[Contents], entries: list[StateEntry]) -> dict[str, frozenset[int]]:
        """Of each entry: the ids of the optimizers that change it."""
        of_param: dict[int, set[int]] = {}
        of_name: dict[str, int] = {}
        for node, piece in zip(self.nodes, pieces, strict=True):
            if isinstance(node, OptimizerNode):
                of_name.update((name, id(node.optimizer)) for name in _own(piece))
                for param in (p for group in node.optimizer.param_groups for p in group["params"]):
                    of_param.setdefault(id(param), set()).add(id(node.optimizer))
        found: dict[str, frozenset[int]] = {}
        for entry in entries:
            owner = {of_name[entry.name]} if entry.name in of_name else set[int]()
            found[entry.name] = frozenset(owner | of_param.get(id(entry.tensor), set()))
        return found

    def _pieces_of(self, entry: StateEntry) -> list[LocalPiece]:
        """What this rank has of an entry. What differs from rank to rank is its own, whatever it should be."""
        found = of_rank(entry, self.seat)
        if entry.name in self.apart:
            rank = self.seat.rank
            if all(p.holding.sizes == p.holding.full for p in found):
                found = [LocalPiece(replace(p.holding, replicas=(rank,), instance=rank), p.tensor) for p in found]
        return found

    def keep_apart(self, names: set[str]) -> None:
        """Save these for each rank by itself from now on."""
        if not names <= self.apart:
            self.apart |= names
            self.forget()

    def _note_loose(self, parts: list[LocalPiece], cuts: list[Cut], loose: set[str]) -> None:
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

    def _may_overlap(self, entry: StateEntry, stepped: set[int]) -> bool:
        """Optimizer state and the parameters it steps. Whatever else writes, such as an average, may do so any time."""
        if entry.name in self.eager:
            return False
        tensor = entry.tensor
        return not isinstance(tensor, nn.Parameter) or id(tensor) in stepped

    # -- putting back --

    def place(self, saved: SavedState, *, strict: bool = True) -> Placement:
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
            elif node.kind != one.kind and not _plain_again(node, one) and not {node.kind, one.kind} <= MODULES:
                placement.problem(f"{show(one.path)} is a {one.kind} in the checkpoint and a {node.kind} here")
            else:
                node.prepare(one, placement)
        for path in live:
            placement.problem(f"{show(path)} is not in the checkpoint")
        placement.check_sharing()
        return placement


MODULES = {"module", "custom module"}  # with or without more than parameters and buffers
BY_DCP = "dcp"  # the kind of the one entry of what torch's DCP has saved


def _plain_again(node: StateNode, saved: SavedNode) -> bool:
    """What `state_dict()` said is stored like any dict, and what other programs saved does not say which it was."""
    return isinstance(node, PlainNode) and saved.kind == StatefulNode.kind and type(node.parent[node.key]) is dict


def _says_copies(node: StateNode, piece: Contents) -> bool:
    """Whether tensors are what an object says of itself, and not memory of its own for certain."""
    if isinstance(node, ModuleNode):
        return node.kind != "module"
    tensors = [entry.tensor for entry in (*piece.fixed, *piece.loose)] if isinstance(node, StatefulNode) else []
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _steps_for(stepping: Any, optimizer: Any) -> bool:
    """Whether this is the optimizer, or one that it is only a wrapper of, as Accelerate's is."""
    if stepping is optimizer:
        return True
    groups = list(optimizer.param_groups)
    return bool(groups) and all(any(one is group for one in stepping.param_groups) for group in groups)


def _storage(tensor: Any) -> int:
    """Where the memory lies that a tensor is a part of; 0 if nobody can tell."""
    try:
        return int(local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, AttributeError):  # a wrapper around others, say
        return 0


def _place(tensor: Tensor) -> Memory | int | None:
    """What a tensor is told from others by, of which it may be another view."""
    return memory_of(local(tensor)) or (id(tensor) if is_dtensor(tensor) else None)


def _who(names: Names) -> dict[int, tuple[str, object]]:
    return {key: (entry.name, entry.alike) for key, entry in names.items()}


def _index(holding: Holding, cut: Cut) -> tuple[slice, ...]:
    """What to take of a piece; nothing to do if it is all of it."""
    return () if cut.box[1] == holding.sizes else slices(cut.box)


def _elsewhere(parts: list[LocalPiece], cuts: list[Cut]) -> dict[str, tuple[str, tuple[int, ...]]]:
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
