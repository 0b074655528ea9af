"""Reads the user's state between two steps of training, and matches it with a saved state.

`Capture.read` returns a `CapturedState`: the layout, the live tensors and the plain values of one moment. It copies
nothing. The first reading walks the nested dict (`Walk`), reads each entry (`StateNode`), cuts the tensors among the
ranks, and keeps the result as a `Structure`. Later readings only check that the structure is still valid, which takes
well under a millisecond for a thousand tensors. If an object or a tensor has moved, a new structure is built.

`Capture.place` reads the state again and returns a `Placement`, without changing anything.

Invariants:

1. The tensors of a captured state keep their memory alive, so `p.data = ...` cannot free it during a copy.
2. A tensor is guarded only if every writer is an optimizer whose hook runs. All other tensors are copied early.
3. Two readings with the same layout object have the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from ckpt.core.format.boxes import GLOBAL, Cut, Holding, Seat, share
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import MAX_DEPTH, ORDERS, Json, Path, SavedNode, is_text, show
from ckpt.core.state.fingerprint import SampledPlaces
from ckpt.core.state.nodes import (
    Contents,
    ModuleNode,
    PlainNode,
    Scaler,
    Stateful,
    StatefulNode,
    StateNode,
    adapt,
)
from ckpt.core.state.optimizer_node import Joint, OptimizerNode, all_of_one_state, forgotten
from ckpt.core.state.placement import Placement, forms_of
from ckpt.core.state.sharding import (
    Division,
    LocalPiece,
    Names,
    StateEntry,
    is_dtensor,
    local,
    slices,
    storage_of,
    unsupported,
)
from ckpt.core.state.sharding import pieces as of_rank
from ckpt.core.state.tensors import Memory, Versioned, memory_of, order_of
from ckpt.core.state.wrappers import Counters, adapter_of, inside, is_wrapped
from ckpt.errors import MismatchError, StateError

MODULES = {"module", "custom module"}  # a custom module has entries other than parameters and buffers
BY_DCP = "dcp"  # the kind of the single entry of a checkpoint saved by torch's DCP
MOST_GUARDS = 16  # maximum cached guard lists, enough for the usual alternation of optimizers
SINGLE = Seat()

SampledReplicas = tuple[list[Holding], SampledPlaces]
"""Tensors that several ranks have, and the elements to compare, by index of the tensor."""
CommonGroups = dict[tuple[int, ...], dict[str, list[Holding]]]
"""Optimizer state of replicated parameters, by the ranks that divide it and by optimizer. A group may be empty."""


@dataclass(frozen=True)
class CapturedState:
    """The state at one moment.

    `tensors`: the live tensors that this rank stages, detached, in the order of the layout. `guarded`: for each tensor,
    True if only optimizer steps change it. `early`: indices of the other tensors. `counters`: for each tensor, the
    object that counts the writes to it and to its wrappers. `spots`: where to sample the guarded tensors, to detect
    writes by other code. `replicas`: where to sample whole tensors that other ranks have too.
    """

    layout: Layout
    tensors: list[Tensor]
    guarded: list[bool]
    early: list[int]
    values: list[Json]
    counters: Sequence[Versioned]
    spots: list[SampledPlaces]
    replicas: list[SampledReplicas]


class Capture:
    """Reads one state repeatedly. Raises StateError with the path of an entry that cannot be saved."""

    def __init__(self, state: dict[str, Any], seat: Seat = SINGLE, *, subset: bool = False) -> None:
        """Walk the state. `subset`: `place` ignores top-level checkpoint entries that are missing from the state."""
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
        self.own: set[str] = set()  # names of optimizer state that other ranks may not have
        self._agreed = False  # True if `own` is known for `_structure`
        self.eager: set[str] = set()  # names whose copy may not overlap training, because other code writes to them

    # -- reading --

    def read(self, find_own: Callable[[CommonGroups], set[str]] | None = None) -> CapturedState:
        """Read the present state.

        find_own: returns the names of optimizer state that is this rank's own, after a change of the layout
        """
        # Ctrl-C or a signal handler may have interrupted an earlier reading.
        if self._unfinished or self._walk.moved():
            self._walk_again()
        self._unfinished = True
        contents = self._read_nodes()
        known = self._valid
        if known is None or not known.same(contents):
            known = self._build(contents)
            self._agreed = False
        if find_own is not None and not self._agreed:
            if self.own != (own := find_own(known.common)):
                self.own = own
                known = self._build(contents)
            self._agreed = True
        captured = known.capture(contents, self._silent())
        self._unfinished = False
        return captured

    def _build(self, contents: list[Contents]) -> Structure:
        self._holds = False
        self._structure = Structure(self.nodes, contents, self.seat, self.apart, self.own, self.eager)
        self._holds = True
        return self._structure

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

    def _read_nodes(self) -> list[Contents]:
        """Read all nodes. Optimizers come last, because they need the names of parameters."""
        found = {i: node.read(self._names) for i, node in enumerate(self.nodes) if not isinstance(node, OptimizerNode)}
        fixed, loose = [one.fixed for one in found.values()], loose_of(found.values())
        stepped = [entry for entry in loose if entry.owner.tensor.requires_grad]
        if (
            stepped
            or len(fixed) != len(self._named)
            or any(a is not b for a, b in zip(fixed, self._named, strict=True))
        ):
            self._named, names = fixed, Names()
            # Include frozen parameters, which may be unfrozen later.
            for entry in [*(entry for each in fixed for entry in each), *stepped]:
                names.setdefault(id(entry.owner.tensor), entry.owner)
            if _who(names) != _who(self._names):  # compare first, because optimizers compare the identity of this dict
                self._names = names
        self._names.note(fixed, loose)
        for i, node in enumerate(self.nodes):
            if isinstance(node, OptimizerNode):
                found[i] = node.read(self._names)
        return [found[i] for i in range(len(self.nodes))]

    # -- what is known of the state --

    @property
    def nodes(self) -> list[StateNode]:
        return self._walk.nodes

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose steps change the guarded tensors."""
        return list(dict.fromkeys(one for node in self._walk.stepped if (one := node.optimizer) is not None))

    @property
    def _valid(self) -> Structure | None:
        return self._structure if self._holds else None

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the last reading, or None if it is no longer valid."""
        return None if self._valid is None else self._valid.layout

    @property
    def replicated(self) -> list[LocalPiece]:
        """Return the replicated tensors that only optimizers change."""
        silent = self._silent()
        return [] if self._valid is None else [p for p, steppers in self._valid.shared if not steppers & silent]

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

    def holds_gradients(self) -> bool:
        """Return True if any parameter of the optimizers has a gradient."""
        return any(p.grad is not None for optimizer in self.optimizers for p in params_of(optimizer))

    def name_of(self, param: Tensor) -> str:
        """Return the name of a parameter, or "" if the state has no name for it."""
        if (entry := self._names.get(id(param))) is not None:
            return entry.name
        return next((name for node in self._walk.optimizers if (name := node.own_name(param))), "")

    def concerns(self, optimizer: Any) -> bool:
        """Return True if a step of this optimizer may change the saved state. A probe that trains its own model, for
        example, does not change it."""
        known = self._valid
        if known is None or known.copied or any(steps_for(optimizer, one) for one in self.optimizers):
            return True
        params = params_of(optimizer)
        theirs = {storage_of(one) for p in params for one in (inside(p) if is_wrapped(p) else [p])}
        return not theirs or 0 in theirs or not theirs.isdisjoint(known.storages)

    # -- which tensors may be copied in the background --

    def trust(self, announced: list[Any]) -> None:
        """Set the optimizers whose hook ran before this step. Any other may have stepped without its hook, for example
        in a graph captured before the Checkpointer existed, and may do so again during a copy. So its tensors are
        copied before step() returns, until its hook runs."""
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

    def unguard(self, optimizer: Any) -> None:
        """From now on, copy this optimizer's tensors before step() returns, because its steps run no hooks."""
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

    def copy_eagerly(self, names: set[str]) -> None:
        """From now on, copy these tensors before step() returns, because code other than optimizers writes to them."""
        if not names <= self.eager:
            self.eager |= names
            self.forget()

    def keep_apart(self, names: set[str]) -> None:
        """From now on, save the tensors with these names for each rank separately."""
        if not names <= self.apart:
            self.apart |= names
            self.forget()

    def find_own_again(self) -> None:
        """Make the next reading determine again which optimizer state is this rank's own."""
        self._agreed = False

    def forget(self) -> None:
        """Build the layout again at the next reading."""
        self._holds = False

    # -- restoring --

    def place(self, saved: SavedState, *, strict: bool = True) -> Placement:
        """Match the saved tensors with the live ones, and change nothing. The result lists mismatches in `problems`.

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
        contents = self._read_nodes()
        placement = Placement(saved, strict, self._names, self.seat)
        known = None if self._unfinished else self._valid
        as_saved, whole = known is not None and known.is_as_saved(saved, contents), set[str]()
        fixed = {node.path: one.fixed for node, one in zip(self.nodes, contents, strict=True)}
        live = {node.path: node for node in self.nodes}
        if found and all(one.kind == BY_DCP for one in found):
            raise MismatchError(
                "this was saved with ckpt.dcp: load it with dcp.load, or use `ckpt export RUN --to NEW --format run` "
                "to convert it to a run that a Checkpointer can continue"
            )
        for form in (form for one in found for form in forms_of(one.facts).values()):
            placement.shapes[form.name] = form.whole or form.size
        # With the same number of ranks, an entry that only other ranks saved is not missing: for example, rank 0's
        # logger.
        expected = saved.paths(self.seat.rank) if saved.world == self.seat.size else None
        for one in found:
            node = live.pop(one.path, None)
            if node is None:
                theirs = expected is not None and one.path not in expected
                if not theirs and not (self.subset and one.path[0] not in self.state):
                    placement.problem(f"{show(one.path)} is in the checkpoint, but not in the state")
            elif node.kind != one.kind and not _plain_again(node, one) and not {node.kind, one.kind} <= MODULES:
                placement.problem(f"{show(one.path)} is a {one.kind} in the checkpoint and a {node.kind} here")
            elif as_saved and node.prepare_as_saved(one, placement):
                whole.update(entry.name for entry in fixed[node.path])
            else:
                node.prepare(one, placement)
        for path in live:
            placement.problem(f"{show(path)} is not in the checkpoint")
        if known is not None and whole:
            rows = {name: row for row, name in enumerate(saved.table.columns.names)}
            live_tensors = zip(known.layout.tensors, known.tensors(contents), strict=True)
            placement.whole = [(rows[of.name], tensor) for of, tensor in live_tensors if of.name in whole]
        placement.check_sharing()
        return placement


def _plain_again(node: StateNode, saved: SavedNode) -> bool:
    """Return True if a plain dict is restored from a plain dict that another program's `state_dict()` returned."""
    return isinstance(node, PlainNode) and saved.kind == StatefulNode.kind and type(node.parent[node.key]) is dict


def _who(names: Names) -> dict[int, tuple[str, object]]:
    return {key: (entry.name, entry.alike) for key, entry in names.items()}


# -- the structure of a state --


class Structure:
    """The result of a capture: the layout, and how the next reading takes the same slices of the tensors."""

    def __init__(
        self,
        nodes: Sequence[StateNode],
        contents: Sequence[Contents],
        seat: Seat,
        apart: set[str],
        own: set[str],
        eager: set[str],
    ) -> None:
        """Cut the tensors of all nodes among the ranks. Raise StateError for names that cannot be saved.

        apart: names that should be replicated, but differ between ranks
        own: names of optimizer state that other ranks may not have
        eager: names whose copy may not overlap training
        """
        self._seat = seat
        self._fixed, self._facts = [one.fixed for one in contents], [one.facts for one in contents]
        fixed, loose = [entry for each in self._fixed for entry in each], loose_of(contents)
        entries = [*fixed, *loose]
        memory, aliases = _owners_of_memory(entries)
        self._memory = {k: memory[k] for e in fixed if (k := memory_of(local(e.tensor))) in memory}
        self._signature = self._sign(loose)
        # If a parameter differs between ranks, its optimizer state is saved separately too, and vice versa, because at
        # the next step, one makes the other differ.
        params = {e.name: memory[key] for e in fixed if e.of is not None and (key := _memory_of(e.of)) in memory}
        differing = {params.get(name, name) for name in apart}
        self._apart = apart | own | {one for pair in params.items() if pair[1] in differing for one in pair}
        parts = [part for entry in entries if entry.name not in aliases for part in self._pieces_of(entry)]
        cuts = share([part.holding for part in parts], seat)
        self.layout = _layout(nodes, contents, parts, cuts, aliases, seat)
        self.common = _common_groups(nodes, contents, aliases, seat)
        everything = [*(entry.tensor for entry in entries), *(part.tensor for part in parts)]
        self.storages = set(map(storage_of, everything))  # including tensors that only other ranks stage
        # True if an object of the state may have returned copies of tensors that an optimizer steps.
        self.copied = any(_may_return_copies(node, one) for node, one in zip(nodes, contents, strict=True))

        # Sources of the tensors: the fixed tensors, and how to slice the loose ones, which are last in the layout.
        self._tensors = [parts[cut.holding].tensor.detach()[_index(parts[cut.holding].holding, cut)] for cut in cuts]
        first: dict[str, int] = {}
        for i, part in enumerate(parts):
            first.setdefault(part.holding.name, i)
        created = {entry.name for entry in loose}
        self._cuts: dict[str, list[tuple[int, tuple[slice, ...]]]] = {}
        for cut in cuts:
            holding = parts[cut.holding].holding
            if holding.name in created:
                place = cut.holding - first[holding.name], _index(holding, cut)
                self._cuts.setdefault(holding.name, []).append(place)
        self._fixed_count = len(cuts) - sum(map(len, self._cuts.values()))

        # Find the writers. A tensor that only optimizers change may be copied in the background.
        guards, steppers = _writers(nodes, contents, entries, eager)
        self._names = [parts[cut.holding].holding.name for cut in cuts]
        self._around = {e.name: e.around for e in fixed if e.around}
        self._guarded, self._steppers = [guards[n] for n in self._names], [steppers[n] for n in self._names]
        self._guards: dict[frozenset[int], tuple[list[bool], list[int]]] = {}  # key: optimizers that are not trusted
        self._spots: list[SampledPlaces] = []
        self._anew: list[int] = []  # guarded tensors that each reading creates
        self._where_anew: list[tuple[int, tuple[int, ...]]] = []

        # Tensors that other ranks have too. `shared`: those that are guarded, with the optimizers that step them.
        several = [part for part in parts if len(part.holding.replicas) > 1]
        self.shared = [(p, steppers[p.holding.name]) for p in several if guards[p.holding.name]]
        self._replicated_anew = {p.holding.name for p in several} & created
        self._replicas = _sampled_replicas([p for p in several if p.holding.name not in created])

    # -- is it still valid? --

    def same(self, contents: Sequence[Contents]) -> bool:
        return (
            len(contents) == len(self._fixed)
            and all(one.facts == facts for one, facts in zip(contents, self._facts, strict=True))
            and all(one.fixed is fixed for one, fixed in zip(contents, self._fixed, strict=True))
            and self._sign(loose_of(contents)) == self._signature
        )

    def is_as_saved(self, saved: SavedState, contents: Sequence[Contents]) -> bool:
        """Return True if a single rank saved exactly this layout, each tensor in one piece, and no other tensors."""
        theirs, here = saved.layout, self.layout
        if theirs is None or self._seat.size > 1 or len(saved.table.shards) != len(here.tensors):
            return False
        plain = not any(map(Tensor.is_conj, self._tensors)) and not any(map(Tensor.is_neg, self._tensors))
        return plain and (theirs is here or theirs.digest == here.digest) and self.same(contents)

    def _sign(self, loose: list[StateEntry]) -> object:
        """Return a key of all facts in the newly created entries that a layout depends on, including shared memory."""
        memory: dict[Memory, str] = {}
        found = []
        for entry in loose:
            key = memory_of(local(entry.tensor))
            owner = None if key is None else self._memory.get(key) or memory.setdefault(key, entry.name)
            order = order_of(local(entry.tensor))
            found.append(([p.holding for p in of_rank(entry, self._seat)], owner, entry.guarded, order))
        return found

    # -- the state now --

    def capture(self, contents: Sequence[Contents], silent: frozenset[int]) -> CapturedState:
        """Return the state with these contents. `silent`: ids of optimizers that are not trusted."""
        tensors = self.tensors(contents)
        loose = loose_of(contents)
        counters: Sequence[Versioned] = tensors
        if around := self._around | {e.name: e.around for e in loose if e.around}:
            named = zip(tensors, self._names, strict=True)
            counters = [Counters(one, around[name]) if name in around else one for one, name in named]
        if silent not in self._guards:
            if len(self._guards) == MOST_GUARDS:
                self._guards.clear()
            both = zip(self._guarded, self._steppers, strict=True)
            guarded = [one and not steppers & silent for one, steppers in both]
            self._guards[silent] = guarded, [number for number, one in enumerate(guarded) if not one]
        replicas = self._replicas
        if self._replicated_anew:
            parts = [p for entry in loose if entry.name in self._replicated_anew for p in self._pieces_of(entry)]
            replicas = [*replicas, *_sampled_replicas([p for p in parts if len(p.holding.replicas) > 1])]
        values = [one.values for one in contents]
        return CapturedState(
            self.layout, tensors, *self._guards[silent], values, counters, self._sampled_places(tensors), replicas
        )

    def tensors(self, contents: Sequence[Contents]) -> list[Tensor]:
        """Return the live tensors, detached, in the order of the layout."""
        found = self._tensors[: self._fixed_count]
        for entry in loose_of(contents):
            if cuts := self._cuts.get(entry.name):
                views = [piece.tensor.detach() for piece in self._pieces_of(entry)]
                found += [views[number][index] for number, index in cuts]
        return found

    def _sampled_places(self, tensors: list[Tensor]) -> list[SampledPlaces]:
        """Return where to sample the guarded tensors: those that stay, and those that each reading creates."""
        if not self._spots:
            fixed = list(compress(range(self._fixed_count), self._guarded))
            self._spots.append(SampledPlaces(self.layout, fixed, [tensors[i] for i in fixed]))
            self._anew = [i for i in range(self._fixed_count, len(tensors)) if self._guarded[i]]
        where = [(tensors[i].data_ptr(), tensors[i].stride()) for i in self._anew]
        if where != self._where_anew:
            self._where_anew = where
            self._spots[1:] = [SampledPlaces(self.layout, self._anew, [tensors[i] for i in self._anew])]
        return self._spots

    def _pieces_of(self, entry: StateEntry) -> list[LocalPiece]:
        """Return this rank's pieces of an entry. An entry that differs between ranks belongs to this rank alone."""
        found, rank = of_rank(entry, self._seat), self._seat.rank
        if entry.name in self._apart and all(p.holding.sizes == p.holding.full for p in found):
            return [LocalPiece(replace(p.holding, replicas=(rank,), instance=rank), p.tensor) for p in found]
        return found


def _common_groups(
    nodes: Sequence[StateNode], contents: Sequence[Contents], aliases: Container[str], seat: Seat
) -> CommonGroups:
    found: CommonGroups = {}
    for node, one in zip(nodes, contents, strict=True) if seat.size > 1 else ():
        for entry in (*one.fixed, *one.loose):
            for holding in (p.holding for p in of_rank(entry, seat)) if entry.name not in aliases else ():
                if len(holding.replicas) > 1 and holding.sizes == holding.full:
                    group = found.setdefault(holding.replicas, {})
                    if entry.of is not None:
                        group.setdefault(show(node.path), []).append(holding)
    return found


def loose_of(contents: Iterable[Contents]) -> list[StateEntry]:
    """Return the entries that this reading has created."""
    return [entry for one in contents for entry in one.loose]


def _memory_of(tensor: Tensor) -> Memory | int | None:
    """Return a key that is equal for two views of the same memory or DTensor."""
    return memory_of(local(tensor)) or (id(tensor) if is_dtensor(tensor) else None)


def _owners_of_memory(entries: Sequence[StateEntry]) -> tuple[dict[Memory | int, str], dict[str, str]]:
    """Return the owner's name for each memory, and the owner's name for each alias."""
    memory: dict[Memory | int, str] = {}
    aliases: dict[str, str] = {}
    seen = set[str]()
    for entry in entries:
        if entry.name in seen or entry.name == "__metadata__" or not is_text(entry.name):
            raise StateError(f"{entry.name!r}: two entries of the state have this name, or it is reserved")
        seen.add(entry.name)
        divided = isinstance(entry.alike, Division)  # identified by its name, because it is a part of a larger tensor
        key = id(entry.alike) if divided else _memory_of(entry.tensor)
        owner = entry.name if key is None else memory.setdefault(key, entry.name)
        if owner != entry.name:
            aliases[entry.name] = owner
    return memory, aliases


def _layout(
    nodes: Sequence[StateNode],
    contents: Sequence[Contents],
    parts: list[LocalPiece],
    cuts: list[Cut],
    aliases: dict[str, str],
    seat: Seat,
) -> Layout:
    components = []
    for node, one in zip(nodes, contents, strict=True):
        # Record the memory layout of each tensor that is not contiguous.
        dense = [entry for entry in (*one.fixed, *one.loose) if not isinstance(entry.alike, Division)]
        orders = {e.name: order for e in dense if (order := order_of(local(e.tensor))) is not None}
        facts = one.facts | ({ORDERS: orders} if orders else {})
        components.append({"path": list(node.path), "kind": node.kind, "facts": facts, "names": one.names})
    return Layout(
        tuple(_spec(parts[cut.holding].holding, cut) for cut in cuts),
        aliases,
        components,
        seat.rank,
        seat.size,
        {p.holding.name: p.holding.instance for p in parts if p.holding.instance != GLOBAL},
        _elsewhere(parts, cuts),
    )


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


def _index(holding: Holding, cut: Cut) -> tuple[slice, ...]:
    """Return the index of a cut in a piece, or () if the cut is the whole piece."""
    return () if cut.box[1] == holding.sizes else slices(cut.box)


def _sampled_replicas(pieces: Sequence[LocalPiece]) -> list[SampledReplicas]:
    """Return one item for each group of ranks with the same tensors. All ranks of a group sample the same elements."""
    groups: dict[tuple[int, ...], list[LocalPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.holding.replicas, []).append(piece)
    found = []
    for some in groups.values():
        specs = [TensorSpec(str(n), p.holding.dtype, p.holding.sizes) for n, p in enumerate(some)]
        tensors = [piece.tensor.detach() for piece in some]
        places = SampledPlaces(Layout(tuple(specs), {}, []), range(len(some)), tensors)
        found.append(([piece.holding for piece in some], places))
    return found


# -- which optimizer steps which tensors --


def _writers(
    nodes: Sequence[StateNode], contents: Sequence[Contents], entries: Sequence[StateEntry], eager: set[str]
) -> tuple[dict[str, bool], dict[str, frozenset[int]]]:
    """Return by name whether only optimizer steps change the tensor, and the ids of the optimizers that change it.

    Other code, for example a moving average, may write to its tensors at any time. So may the writers of the `eager`
    tensors, and an optimizer whose steps run no hooks.
    """
    exposed: tuple[str, ...] = ()
    hooked = set[int]()  # parameters of optimizers whose steps run hooks
    of_param: dict[int, set[int]] = {}
    of_name: dict[str, int] = {}
    for node, one in zip(nodes, contents, strict=True):
        if node.optimizer is None:
            continue
        of_name.update((name, id(node.optimizer)) for name in one.names)
        params = set(map(id, params_of(node.optimizer)))
        for param in params:
            of_param.setdefault(param, set()).add(id(node.optimizer))
        if node.unguarded:
            exposed += (show(node.path) + ".",)
        else:
            hooked |= params
    guards: dict[str, bool] = {}
    steppers: dict[str, frozenset[int]] = {}
    for entry in entries:
        whole = entry.owner.tensor
        guarded = entry.guarded and entry.name not in eager and not entry.name.startswith(exposed)
        guards[entry.name] = guarded and (not isinstance(whole, nn.Parameter) or id(whole) in hooked)
        owner = {of_name[entry.name]} if entry.name in of_name else set[int]()
        steppers[entry.name] = frozenset(owner | of_param.get(id(whole), set()))
    return guards, steppers


def params_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer steps."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def parts_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that must all step before this optimizer counts as stepped."""
    return optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)


def steps_for(stepping: Any, optimizer: Any) -> bool:
    """Return True if it is the same optimizer, the one that it wraps (as Accelerate's does), or one of its parts."""
    if stepping is optimizer or any(stepping is part for part in parts_of(optimizer)):
        return True
    groups = list(optimizer.param_groups)
    return bool(groups) and all(any(one is group for one in stepping.param_groups) for group in groups)


def _may_return_copies(node: StateNode, contents: Contents) -> bool:
    """Return True if an object's `state_dict()` may have returned copies instead of its own memory."""
    if isinstance(node, ModuleNode):
        return node.kind != "module"
    tensors = [entry.tensor for entry in (*contents.fixed, *contents.loose)] if isinstance(node, StatefulNode) else []
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


# -- the entries of a state --


class Walk:
    """The nodes of one walk through the state. Raises StateError with the path of an entry that cannot be saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._shape: list[tuple[Any, list[Any]]] = []
        self._objects: list[tuple[Any, Any, object]] = []
        self.nodes: list[StateNode] = list(self._find(state, ()))
        self.optimizers = [node for node in self.nodes if isinstance(node, OptimizerNode)]
        self.stepped = [node for node in self.nodes if node.optimizer is not None]
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
        """Return True if the user has replaced objects in the state since the walk."""
        return any(list(_keys(container)) != keys for container, keys in self._shape) or any(
            container[key] is not value for container, key, value in self._objects
        )

    def _find(self, container: Any, path: Path) -> Iterator[StateNode]:
        """Yield a node for each entry of a dict or list. Descend into containers with stateful objects."""
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
            elif isinstance(adapted := adapt(value) or value, Stateful) and not isinstance(value, type):
                yield StatefulNode(here, adapted)
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
    """Return True if a container holds an object that has state, at any depth."""
    if type(value) in (dict, list, tuple):
        inner = value.values() if type(value) is dict else value
        return depth < MAX_DEPTH and any(_holds_objects(v, depth + 1) for v in inner)
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or adapter_of(value) is not None:
        return True
    return isinstance(adapt(value) or value, Stateful) and not isinstance(value, type)
