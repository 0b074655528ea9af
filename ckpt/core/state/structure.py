"""The state as a full reading found it: its layout, and how to take the same slices at the next reading.

It is valid until something in the state has moved. `Structure.same` checks this. Then a new one is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.partition import GLOBAL, Cut, Holding, Seat, share
from ckpt.core.format.saved_nodes import ORDERS
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import is_text, show
from ckpt.core.state.fingerprint import SampledPlaces
from ckpt.core.state.joint import Joint
from ckpt.core.state.module_node import ModuleNode
from ckpt.core.state.nodes import Contents, StatefulNode, StateNode, SteppedNode
from ckpt.core.state.sharding import Division, LocalPiece, StateEntry, is_dtensor, local, slices, storage_of
from ckpt.core.state.sharding import pieces as of_rank
from ckpt.core.state.tensors import Memory, Versioned, memory_of, order_of
from ckpt.core.state.wrappers import Counters
from ckpt.errors import StateError

MOST_GUARDS = 16  # enough for usual alternations; more would not be worth their memory


@dataclass(frozen=True)
class Guards:
    """Which tensors may be copied in the background while some optimizers are not trusted. `guarded`, `early`: as in a
    `Reading`; `replicated`: those of them that other ranks have too."""

    guarded: list[bool]
    early: list[int]
    replicated: list[LocalPiece]


class Structure:
    """Built from the contents of all nodes. Raise StateError for names that cannot be saved. `apart`: names that should
    be replicated, but differ between ranks. `eager`: names whose copy may not overlap training."""

    def __init__(
        self, nodes: Sequence[StateNode], pieces: Sequence[Contents], seat: Seat, apart: set[str], eager: set[str]
    ) -> None:
        self._seat = seat
        self._fixed, self._facts = [p.fixed for p in pieces], [p.facts for p in pieces]
        fixed, loose = [e for each in self._fixed for e in each], loose_of(pieces)
        entries = [*fixed, *loose]
        memory, aliases = _shared(entries)
        self._memory = {k: memory[k] for e in fixed if (k := memory_of(local(e.tensor))) in memory}
        self._signature = self._sign(loose)
        beside = {e.name: memory[key] for e in fixed if e.of is not None and (key := _memory_of(e.of)) in memory}
        self._apart = _spread(apart, beside)
        parts = [part for entry in entries if entry.name not in aliases for part in self._pieces_of(entry)]
        cuts = share([part.holding for part in parts], seat)
        self._note_loose(parts, cuts, {e.name for e in loose})
        self.layout = _layout(nodes, pieces, parts, cuts, aliases, seat)
        self._tensors = [parts[cut.holding].tensor.detach()[_index(parts[cut.holding].holding, cut)] for cut in cuts]
        self._note_steps(nodes, pieces, parts, [parts[cut.holding].holding.name for cut in cuts], eager)
        self._spots: list[SampledPlaces] = []
        self._anew: list[int] = []
        self._where_anew: list[tuple[int, tuple[int, ...]]] = []  # guarded tensors that each reading creates
        # True if an object of the state may have returned copies of tensors that an optimizer steps.
        self.copied = any(says_copies(node, piece) for node, piece in zip(nodes, pieces, strict=True))
        everything = [*(entry.tensor for entry in entries), *(part.tensor for part in parts)]
        self.storages = set(map(storage_of, everything))  # including other ranks' shares

    def _note_steps(
        self,
        nodes: Sequence[StateNode],
        pieces: Sequence[Contents],
        parts: list[LocalPiece],
        names: list[str],
        eager: set[str],
    ) -> None:
        """Record the effects of optimizers on the tensors of these names."""
        fixed = [e for each in self._fixed for e in each]
        entries = [*fixed, *loose_of(pieces)]
        guards, steppers = guards_of(nodes, entries, eager), steppers_of(nodes, pieces, entries)
        self._names, self._around = names, {e.name: e.around for e in fixed if e.around}
        self._guarded, self._steppers = [guards[name] for name in names], [steppers[name] for name in names]
        shared = [p for p in parts if len(p.holding.replicas) > 1 and guards[p.holding.name]]
        self._shared = [(p, steppers[p.holding.name]) for p in shared]
        loose = {entry.name for entry in loose_of(pieces)}
        self._replicated = [p for p in parts if len(p.holding.replicas) > 1 and p.holding.name not in loose]
        self._replicated_anew = {p.holding.name for p in parts if len(p.holding.replicas) > 1} & loose
        self._replica_spots: list[SampledReplicas] | None = None
        self._guards: dict[frozenset[int], Guards] = {}  # by the optimizers that are not trusted

    # -- is it still valid? --

    def same(self, pieces: Sequence[Contents]) -> bool:
        return (
            len(pieces) == len(self._fixed)
            and all(p.facts == f for p, f in zip(pieces, self._facts, strict=True))
            and all(p.fixed is f for p, f in zip(pieces, self._fixed, strict=True))
            and self._sign(loose_of(pieces)) == self._signature
        )

    def is_as_saved(self, saved: SavedState, pieces: Sequence[Contents]) -> bool:
        """Return True if a single rank saved exactly this layout, each tensor in one piece, and nothing else."""
        theirs, here = saved.layout, self.layout
        if theirs is None or self._seat.size > 1 or len(saved.table.shards) != len(here.tensors):
            return False
        plain = not any(map(Tensor.is_conj, self._tensors)) and not any(map(Tensor.is_neg, self._tensors))
        return plain and (theirs is here or theirs.digest == here.digest) and self.same(pieces)

    def _sign(self, loose: list[StateEntry]) -> object:
        """Return everything in the newly created entries that a layout depends on, including shared memory."""
        memory: dict[Memory, str] = {}
        found = []
        for entry in loose:
            key = memory_of(local(entry.tensor))
            owner = None if key is None else self._memory.get(key) or memory.setdefault(key, entry.name)
            order = order_of(local(entry.tensor))
            found.append(([p.holding for p in of_rank(entry, self._seat)], owner, entry.guarded, order))
        return found

    # -- its tensors now --

    def tensors(self, pieces: Sequence[Contents]) -> list[Tensor]:
        """Return the live tensors, detached, in the order of the layout."""
        found = self._tensors[: self._fixed_count]
        for entry in loose_of(pieces):
            if cuts := self._cuts.get(entry.name):
                views = [piece.tensor.detach() for piece in self._pieces_of(entry)]
                found += [views[number][index] for number, index in cuts]
        return found

    def counters(self, tensors: list[Tensor], pieces: Sequence[Contents]) -> Sequence[Versioned]:
        """Return the object that counts the writes to each tensor."""
        around = self._around | {e.name: e.around for e in loose_of(pieces) if e.around}
        if not around:
            return tensors
        named = zip(tensors, self._names, strict=True)
        return [Counters(one, around[name]) if name in around else one for one, name in named]

    def guards(self, silent: frozenset[int]) -> Guards:
        """Return the guards while some optimizers are not trusted, cached. `silent`: the ids of these optimizers."""
        if silent not in self._guards:
            if len(self._guards) == MOST_GUARDS:
                self._guards.clear()
            guarded = [
                one and not steppers & silent for one, steppers in zip(self._guarded, self._steppers, strict=True)
            ]
            self._guards[silent] = Guards(
                guarded,
                [number for number, one in enumerate(guarded) if not one],
                [piece for piece, steppers in self._shared if not steppers & silent],
            )
        return self._guards[silent]

    def spots(self, tensors: list[Tensor]) -> list[SampledPlaces]:
        """Return where to sample tensors that stay, and tensors that each reading creates."""
        if not self._spots:
            fixed = [i for i, one in enumerate(self._guarded[: self._fixed_count]) if one]
            self._spots.append(SampledPlaces(self.layout, fixed, [tensors[i] for i in fixed]))
            self._anew = [i for i in range(self._fixed_count, len(tensors)) if self._guarded[i]]
        where = [(tensors[i].data_ptr(), tensors[i].stride()) for i in self._anew]
        if where != self._where_anew:
            self._where_anew = where
            self._spots[1:] = [SampledPlaces(self.layout, self._anew, [tensors[i] for i in self._anew])]
        return self._spots

    def replicas(self, pieces: Sequence[Contents]) -> list[SampledReplicas]:
        """Return where to sample whole tensors that other ranks have too."""
        if self._replica_spots is None:
            self._replica_spots = sampled_replicas(self._replicated)
        if not self._replicated_anew:
            return self._replica_spots
        entries = [entry for entry in loose_of(pieces) if entry.name in self._replicated_anew]
        anew = [part for entry in entries for part in self._pieces_of(entry)]
        return [*self._replica_spots, *sampled_replicas([p for p in anew if len(p.holding.replicas) > 1])]

    def _pieces_of(self, entry: StateEntry) -> list[LocalPiece]:
        """Return this rank's pieces of an entry. If it differs between ranks, it belongs to this rank alone."""
        found, rank = of_rank(entry, self._seat), self._seat.rank
        if entry.name in self._apart and all(p.holding.sizes == p.holding.full for p in found):
            return [LocalPiece(replace(p.holding, replicas=(rank,), instance=rank), p.tensor) for p in found]
        return found

    def _note_loose(self, parts: list[LocalPiece], cuts: list[Cut], loose: set[str]) -> None:
        """Record how to take the same slices of newly created tensors. They are last in the layout."""
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


@dataclass(frozen=True)
class SampledReplicas:
    """Elements to compare of tensors that several ranks have. `places` has the indices of `holdings`."""

    holdings: list[Holding]
    places: SampledPlaces


def sampled_replicas(pieces: Sequence[LocalPiece]) -> list[SampledReplicas]:
    """Return one object for each group of ranks with the same tensors. These ranks sample the same elements."""
    groups: dict[tuple[int, ...], list[LocalPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.holding.replicas, []).append(piece)
    found = []
    for some in groups.values():
        specs = [TensorSpec(str(n), p.holding.dtype, p.holding.sizes) for n, p in enumerate(some)]
        tensors = [piece.tensor.detach() for piece in some]
        places = SampledPlaces(Layout(tuple(specs), {}, []), range(len(some)), tensors)
        found.append(SampledReplicas([piece.holding for piece in some], places))
    return found


def _spread(apart: set[str], beside: Mapping[str, str]) -> set[str]:
    """Add the optimizer state of each parameter that differs, and the parameter of each optimizer state that differs:
    at the next step, one makes the other differ. `beside`: the parameter of each tensor of optimizer state."""
    params = {beside.get(name, name) for name in apart}
    return apart | {one for state, param in beside.items() if param in params for one in (state, param)}


def loose_of(pieces: Sequence[Contents]) -> list[StateEntry]:
    return [entry for piece in pieces for entry in piece.loose]


def _shared(entries: Sequence[StateEntry]) -> tuple[dict[Memory | int, str], dict[str, str]]:
    """Return the name of the owner of each memory, and the owner of each name that is an alias of another."""
    memory: dict[Memory | int, str] = {}
    aliases: dict[str, str] = {}
    seen = set[str]()
    for entry in entries:
        if entry.name in seen or entry.name == "__metadata__" or not is_text(entry.name):
            raise StateError(f"{entry.name!r}: two entries of the state get this name, or it is reserved")
        seen.add(entry.name)
        divided = isinstance(entry.alike, Division)  # identified by its name, not by its memory
        key = id(entry.alike) if divided else _memory_of(entry.tensor)
        owner = entry.name if key is None else memory.setdefault(key, entry.name)
        if owner != entry.name:
            aliases[entry.name] = owner
    return memory, aliases


def _layout(
    nodes: Sequence[StateNode],
    pieces: Sequence[Contents],
    parts: list[LocalPiece],
    cuts: list[Cut],
    aliases: dict[str, str],
    seat: Seat,
) -> Layout:
    components = [
        {"path": list(node.path), "kind": node.kind, "facts": piece.facts | _orders(piece), "names": piece.names}
        for node, piece in zip(nodes, pieces, strict=True)
    ]
    return Layout(
        tuple(_spec(parts[cut.holding].holding, cut) for cut in cuts),
        aliases,
        components,
        seat.rank,
        seat.size,
        {p.holding.name: p.holding.instance for p in parts if p.holding.instance != GLOBAL},
        _elsewhere(parts, cuts),
    )


def _orders(piece: Contents) -> dict[str, Any]:
    """Return the memory layout of each tensor that is not contiguous, as a fact."""
    entries = [entry for entry in (*piece.fixed, *piece.loose) if not isinstance(entry.alike, Division)]
    found = {entry.name: order for entry in entries if (order := order_of(local(entry.tensor))) is not None}
    return {ORDERS: found} if found else {}


def _memory_of(tensor: Tensor) -> Memory | int | None:
    """Return a key that is equal for two views of the same memory or DTensor."""
    return memory_of(local(tensor)) or (id(tensor) if is_dtensor(tensor) else None)


def _index(holding: Holding, cut: Cut) -> tuple[slice, ...]:
    """Return the index of a cut in a piece, or () if the cut is the whole piece."""
    return () if cut.box[1] == holding.sizes else slices(cut.box)


def _elsewhere(parts: list[LocalPiece], cuts: list[Cut]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the replicated tensors that another rank stages."""
    staged = {parts[cut.holding].holding.name for cut in cuts}
    rest = (p.holding for p in parts if p.holding.instance == GLOBAL and p.holding.name not in staged)
    return {holding.name: (holding.dtype, holding.full) for holding in rest}


def _spec(holding: Holding, cut: Cut) -> TensorSpec:
    at = tuple(i + j for i, j in zip(holding.offsets, cut.box[0], strict=True))
    sizes = cut.box[1]
    whole, offsets = (None, ()) if sizes == holding.full else (holding.full, at)
    return TensorSpec(holding.name, holding.dtype, sizes, holding.accelerator, whole, offsets, holding.instance)


# -- which optimizer steps which tensors: a tensor that only optimizers change may be copied in the background --


def guards_of(nodes: Sequence[StateNode], entries: Sequence[StateEntry], eager: set[str]) -> dict[str, bool]:
    """Return by name whether only optimizer steps change the tensor. Other code, for example a moving average, may
    write at any time. So may the writers of the `eager` tensors, and an optimizer whose steps run no hooks."""
    optimizers = stepped_nodes(nodes)
    exposed = tuple(show(node.path) + "." for node in optimizers if node.unguarded)
    stepped = {id(p) for node in optimizers if not node.unguarded for p in params_of(node.optimizer)}

    def may_overlap(entry: StateEntry) -> bool:
        if not entry.guarded or entry.name in eager or entry.name.startswith(exposed):
            return False
        whole = entry.owner.tensor
        return not isinstance(whole, nn.Parameter) or id(whole) in stepped

    return {entry.name: may_overlap(entry) for entry in entries}


def steppers_of(
    nodes: Sequence[StateNode], pieces: Sequence[Contents], entries: Sequence[StateEntry]
) -> dict[str, frozenset[int]]:
    """Return the ids of the optimizers that change each name."""
    of_param: dict[int, set[int]] = {}
    of_name: dict[str, int] = {}
    for node, piece in zip(nodes, pieces, strict=True):
        if isinstance(node, SteppedNode) and node.optimizer is not None:
            of_name.update((name, id(node.optimizer)) for name in piece.names)
            for param in params_of(node.optimizer):
                of_param.setdefault(id(param), set()).add(id(node.optimizer))
    found: dict[str, frozenset[int]] = {}
    for entry in entries:
        owner = {of_name[entry.name]} if entry.name in of_name else set[int]()
        found[entry.name] = frozenset(owner | of_param.get(id(entry.owner.tensor), set()))
    return found


def stepped_nodes(nodes: Iterable[StateNode]) -> list[SteppedNode]:
    """Return the nodes whose tensors a known optimizer changes."""
    return [n for n in nodes if isinstance(n, SteppedNode) and n.optimizer is not None]


def params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def parts_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that must all step for this one to step."""
    return optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)


def steps_for(stepping: Any, optimizer: Any) -> bool:
    """Return True for the same optimizer, for one that it wraps (as Accelerate's does), and for its parts."""
    if stepping is optimizer or any(stepping is part for part in parts_of(optimizer)):
        return True
    groups = list(optimizer.param_groups)
    return bool(groups) and all(any(one is group for one in stepping.param_groups) for group in groups)


def says_copies(node: StateNode, piece: Contents) -> bool:
    """Return True if an object's `state_dict()` may have returned copies instead of its own memory."""
    if isinstance(node, ModuleNode):
        return node.kind != "module"
    tensors = [entry.tensor for entry in (*piece.fixed, *piece.loose)] if isinstance(node, StatefulNode) else []
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
