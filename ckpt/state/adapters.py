"""The kinds of things a state is made of: how each is read, and how it is put back.

Reading gives `StateEntry`s (a name, a live tensor) and plain values. What is the same from step to step is cached and
only checked by identity, since reading happens between two steps of training. Putting back has two halves: `prepare`
says where every tensor goes and finds every mismatch before anything is changed; `finish`, after the tensors are
filled, sets plain values and attaches what had to be created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from ckpt.errors import CorruptError, StateError
from ckpt.format.saved_nodes import SavedNode
from ckpt.format.values import Json, Path, encode, kind_of, pairs, show, splitter, unpaired
from ckpt.state.own_words import EXTRA, OwnState, hand_back, listen
from ckpt.state.placement import Names, Placement, Span, references, span_of
from ckpt.state.rng import RNG
from ckpt.state.sharding import Replicas, StateEntry, clean, is_dtensor, local, replicas_of, reshard, unwrap
from ckpt.state.tensors import check, from_array


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say what it is and become it again, such as schedulers, scalers and data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class Contents:
    """What a node consists of now. `fixed` is the same object as before if nothing in it changed."""

    fixed: list[StateEntry]
    loose: list[StateEntry] = field(default_factory=list)  # made anew by every reading
    values: Json = None
    facts: dict[str, Any] = field(default_factory=dict)  # plain, and part of the layout


@runtime_checkable
class Resizable(Stateful, Protocol):
    """Something whose state has to be divided anew when the number of ranks changes, such as a data loader.

    `load_state_dicts` is called instead of `load_state_dict`, with the states of all ranks that saved, in rank order.
    """

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int, /) -> Any: ...


_NOTHING: list[StateEntry] = []  # one object, so that "nothing fixed" is seen as unchanged


class StateNode(Protocol):
    """One entry of the state."""

    path: Path

    @property
    def kind(self) -> str: ...

    def read(self, names: Names) -> Contents:
        """`names`: what is known of parameters."""

    def read_on(self, names: Names) -> Contents:
        """The same, where it would take long to find out that tensors lie where they lay: by what was found before."""

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        """Say where tensors go. Problems are noted in the placement, not raised."""


class Collector:
    """Takes tensors and arrays out of plain values, leaving references."""

    def __init__(self) -> None:
        self.entries: list[StateEntry] = []
        self.objects: dict[str, object] = {}

    def __call__(self, value: object, path: Path) -> Json | None:
        if isinstance(value, Tensor):
            tensor, reference = check(value, path), {"$": "tensor"}
        elif isinstance(value, np.ndarray):
            tensor, reference = from_array(value, path)
        else:
            return None
        name = show(path)
        self.entries.append(StateEntry(name, tensor))
        self.objects[name] = value
        return {**reference, "name": name}


class Memories:
    """Where tensors have their memory, and in which form. Asked at every step, so what can be looked up once is."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._plain = [t for t in tensors if not is_dtensor(t)]
        self._others = [t for t in tensors if is_dtensor(t)]
        self._ask = [t.data_ptr for t in self._plain]
        self._were, self._forms = self._places(), self._shapes()

    def _places(self) -> list[int]:
        return [ask() for ask in self._ask] + [local(t).data_ptr() for t in self._others]

    def _shapes(self) -> list[object]:
        return [(t.shape, t.stride(), t.dtype) for t in (*self._plain, *map(local, self._others))]

    def moved(self) -> bool:
        return self._places() != self._were

    def reshaped(self) -> bool:
        """Differs when `.data` was set to another view of the same memory."""
        return self._shapes() != self._forms


class ModuleNode:
    """An nn.Module: parameters and persistent buffers, in place; and what else it says of itself, see
    `ckpt.state.own_words`."""

    def __init__(self, path: Path, module: nn.Module) -> None:
        self.path = path
        self.module, self._ddp = unwrap(module)
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._children: list[tuple[dict[str, Any], str, nn.Module | None]] = []
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._memories = Memories()
        self._piece: Contents | None = None
        self._words, self._heard = OwnState(), list[nn.Module]()
        self._order: list[str] = []  # names, and prefixes of modules that say more

    @property
    def kind(self) -> str:
        return "custom module" if self._words.spoken else "module"

    def read(self, names: Names) -> Contents:
        if self._piece is None:
            reshard(self.module)
        if self._piece is None or self.changed():
            self._piece = self._read()
        return self._and_words(self._piece) if self._words.spoken else self._piece

    def read_on(self, names: Names) -> Contents:
        if self._piece is None:
            return self.read(names)
        return self._and_words(self._piece) if self._words.spoken else self._piece

    def changed(self) -> bool:
        """Whether the module has other tensors than were read, or has them elsewhere; sharded, if it gathers them."""
        if not self._differs():
            return False
        reshard(self.module)
        return self._differs()

    def _differs(self) -> bool:
        for owner, size in self._sizes:
            if len(owner) != size:
                return True
        for owner, key, child in self._children:
            if owner.get(key) is not child:
                return True
        for owner, key, tensor in self._places:
            if owner.get(key) is not tensor:
                return True
        return self._memories.moved() or self._memories.reshaped()

    def _read(self) -> Contents:
        self._piece = None  # should reading fail half-way, what is noted below must not pass for unchanged
        self._sizes, self._children, self._places = [], [], []
        self._memories = Memories()
        modules = list(self.module.named_modules(remove_duplicate=False))
        if len(modules) != len(self._heard) or any(a is not b for (_, a), b in zip(modules, self._heard, strict=True)):
            self._words, self._heard = listen(self.module, self.path), [module for _, module in modules]
        live: dict[str, tuple[str, Tensor]] = {}
        order: dict[str, None] = {}
        for full, module in modules:
            prefix = clean(full)
            members: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            self._sizes += [(owner, len(owner)) for owner in members]
            self._children += [(module._modules, key, child) for key, child in module._modules.items()]
            if self._words.speaks(inside := f"{prefix}." if prefix else ""):
                if inside in self._words.speakers:
                    order[inside] = None
                continue
            for owner in members[1:]:
                for key, tensor in owner.items():
                    here = f"{prefix}.{key}" if prefix else key
                    if tensor is None or key in module._non_persistent_buffers_set or here in self._words.left_out:
                        continue
                    name = self._words.names.get(here, here)
                    live[name] = here, check(tensor, (*self.path, here))
                    order[name] = None
                    self._places.append((owner, key, tensor))
            if inside in self._words.extras:
                order[inside] = None
        self._order = list(order)
        self._memories = Memories([tensor for _, _, tensor in self._places])
        return Contents([self._entry(name, *found) for name, found in live.items()])

    def _entry(self, name: str, key: str, tensor: Tensor) -> StateEntry:
        return StateEntry(self._name(name), tensor, isinstance(tensor, nn.Parameter), alike(self._ddp, key, tensor))

    def _name(self, key: str) -> str:
        return show((*self.path, key))

    def _and_words(self, piece: Contents) -> Contents:
        """All that it consists of by key, as its state_dict() would say it."""
        collect = Collector()
        state: dict[str, Json] = {}
        for key in self._order:
            if key in self._words.extras:
                value = self._words.extras[key].get_extra_state()
                state[key + EXTRA] = encode(value, (*self.path, key + EXTRA), collect)
            elif key in self._words.speakers:
                for inner, value in self._words.speakers[key].state_dict(keep_vars=True).items():
                    state[key + inner] = encode(value, (*self.path, key + inner), collect)
            else:
                state[key] = {"$": "tensor", "name": self._name(key)}
        keys: dict[int, str] = {}
        if self._ddp is not None:
            keys = {id(tensor): key for key, tensor in (*self.module.named_parameters(), *self.module.named_buffers())}
        loose = []
        for e in collect.entries:
            mine = alike(self._ddp, keys[id(e.tensor)], e.tensor) if id(e.tensor) in keys else None
            loose.append(StateEntry(e.name, e.tensor, isinstance(e.tensor, nn.Parameter), mine))
        return Contents(piece.fixed, loose, pairs(state))

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        piece = self.read(Names())
        lying = {entry.name: entry for entry in piece.fixed}
        said = {entry.name: entry for entry in piece.loose}
        state = self._saved_state(saved)
        free = set(references([value for key, value in state.items() if key.endswith(EXTRA)]))  # may differ each time
        own = {name: entry for name, entry in (lying | said).items() if not self._in_extra(name)}
        for name in placement.compare(self.path, [name for name in saved.names if name not in free], own):
            if name in lying:
                placement.fill(name, lying[name])
            else:
                placement.watch(name, said[name])
        self._prepare_words(state, said, placement)
        for module in self._words.loaders.values():
            placement.finish(self.path, partial(hand_back, module))

    def _in_extra(self, name: str) -> bool:
        return any(name.startswith(self._name(prefix + EXTRA)) for prefix in self._words.extras)

    def _saved_state(self, saved: SavedNode) -> dict[str, Json]:
        """What was saved of it by key. CorruptError if it is not that."""
        if saved.kind == "module":
            start = len(self._name(""))
            return {name[start:]: {"$": "tensor", "name": name} for name in saved.names}
        found = unpaired(saved.values)
        if found is None:
            raise CorruptError(f"{show(self.path)}: what is stored of it is not the state of a module")
        return found

    def _prepare_words(self, state: dict[str, Json], said: Mapping[str, StateEntry], placement: Placement) -> None:
        claimed = set()
        for prefix, module in self._words.extras.items():
            key = prefix + EXTRA
            claimed.add(key)
            if key in state:
                placement.finish(self.path, partial(_set_extra, module, placement.build(state[key])))
            else:
                placement.problem(f"{self._name(key)} is not in the checkpoint")
        for prefix, module in self._words.speakers.items():
            mine = {key: value for key, value in state.items() if key.startswith(prefix)}
            claimed |= mine.keys()
            build = placement.build(pairs({k.removeprefix(prefix): v for k, v in mine.items()}), like=said)
            placement.finish(self.path, partial(_load, module, build, placement.strict))
        for key, value in state.items():
            if key not in claimed and not (type(value) is dict and value.get("$") == "tensor"):
                placement.problem(f"{self._name(key)} is in the checkpoint, and not in {show(self.path)}")


def _set_extra(module: nn.Module, build: Callable[[], Any]) -> None:
    module.set_extra_state(build())


def _load(module: nn.Module, build: Callable[[], Any], strict: bool) -> None:
    module.load_state_dict(build(), strict=strict)


def alike(ddp: nn.parallel.DistributedDataParallel | None, key: str, tensor: Tensor) -> Replicas | None:
    """The ranks that hold a parameter or buffer of a module alike, by DDP's rules."""
    replicas = replicas_of(ddp)
    if ddp is None or replicas is None or key in ddp.parameters_to_ignore:
        return None
    if isinstance(tensor, nn.Parameter):
        return replicas
    # The first rank's buffers overwrite the others' before each forward; without that they go their own ways.
    return Replicas(replicas.ranks, first_only=True) if ddp.broadcast_buffers else None


class OptimizerNode:
    """A torch optimizer: state by parameter name, written back directly (its own loader would cast dtypes).

    What it steps and nothing else in the state holds, such as fp32 masters, is saved with it.
    """

    kind = "optimizer"

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.optimizer = path, optimizer
        self.unguarded = False  # its steps run no hooks
        self._names: Names | None = None
        self._piece: Contents | None = None
        self._state: object = None
        self._groups: list[list[Tensor]] = []
        self._dicts: list[tuple[Tensor, dict[str, Any], int]] = []
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._memories = Memories()
        self._others: list[tuple[str, dict[str, Any], str]] = []
        self._nameless: list[tuple[str, Tensor, Span | None]] = []  # parameters, by their places
        self._held: list[bool] = []  # which of them something else holds
        self._own: dict[str, StateEntry] = {}

    def read(self, names: Names) -> Contents:
        if self._piece is None or names is not self._names or self.changed() or self._is_held(names) != self._held:
            self._read(names)
        return self._contents()

    def read_on(self, names: Names) -> Contents:
        grown = len(self.optimizer.state) != len(self._dicts)
        return self.read(names) if self._piece is None or grown else self._contents()

    def _contents(self) -> Contents:
        assert self._piece is not None
        collect = Collector()
        values = {
            "groups": [
                {k: encode(v, (*self.path, "param_groups", i, k), collect) for k, v in group.items() if k != "params"}
                for i, group in enumerate(self.optimizer.param_groups)
            ],
            "state": [
                [name, key, encode(state[key], (*self.path, "state", name, key), collect)]
                for name, state, key in self._others
            ],
        }
        return Contents(self._piece.fixed, collect.entries, values, self._piece.facts)

    def changed(self) -> bool:
        """Whether the optimizer has other tensors than were read, or has them elsewhere."""
        optimizer = self.optimizer
        state: MutableMapping[Any, Any] = optimizer.state
        if state is not self._state or len(state) != len(self._dicts):
            return True
        if len(self._groups) != len(optimizer.param_groups):
            return True
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return True
        for param, values, size in self._dicts:
            if state.get(param) is not values or len(values) != size:
                return True
        for values, key, tensor in self._places:
            if values.get(key) is not tensor:
                return True
        if self._memories.moved():
            return True
        # A key that was None may have become a tensor.
        return any(isinstance(values.get(key), Tensor) for _, values, key in self._others)

    def _read(self, names: Names) -> None:
        self._piece = None  # as in ModuleNode
        self._names, self._state = names, self.optimizer.state
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._dicts, self._places, self._others = [], [], []
        self._memories = Memories()
        fixed: list[StateEntry] = []
        called = self.param_names(names)
        for param, values in self.optimizer.state.items():
            name = called.get(id(param))
            if name is None:
                raise StateError(f"{show(self.path)}: holds state of a tensor that is in none of its groups")
            self._dicts.append((param, values, len(values)))
            for key, value in values.items():
                if type(key) is not str:
                    raise StateError(f"{show(self.path)}: the key {key!r} in the state of {name} is not a str")
                if isinstance(value, Tensor):
                    path = (*self.path, "state", name, key)
                    fixed.append(StateEntry(show(path), check(value, path), True, _beside(param, names), param))
                    self._places.append((values, key, value))
                else:
                    self._others.append((name, values, key))
        bare = {id(p): p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in names}
        self._nameless = [(called[number], p, span_of(p)) for number, p in bare.items()]
        self._held = self._is_held(names)
        mine = (one for one, held in zip(self._nameless, self._held, strict=True) if not held)
        paths = ((p, (*self.path, "params", place)) for place, p, _ in mine)
        self._own = {show(path): StateEntry(show(path), check(p, path), True) for p, path in paths}
        fixed += self._own.values()
        self._memories = Memories([*(tensor for _, _, tensor in self._places), *(p for _, p, _ in self._nameless)])
        params = [[called[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        self._piece = Contents(
            fixed, facts={"params": params, "with_state": [called[id(p)] for p, _, _ in self._dicts]}
        )

    def _is_held(self, names: Names) -> list[bool]:
        return [names.hold(span) for _, _, span in self._nameless]

    def own_name(self, param: Tensor) -> str:
        """What a parameter is called that is saved with the optimizer; "" if it is not."""
        return next((name for name, entry in self._own.items() if entry.tensor is param), "")

    def param_names(self, names: Names) -> dict[int, str]:
        """By id; a parameter that nothing else in the state names is called by its place."""
        return {
            id(p): names[id(p)].name if id(p) in names else f"{i}.{j}"
            for i, group in enumerate(self.optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        called = self.param_names(placement.names)
        mine = [[called[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        if not _is_optimizer(saved):
            raise CorruptError(f"{show(self.path)}: what is stored of it is not the state of an optimizer")
        self._compare_groups(mine, saved.facts["params"], placement)
        params = {called[id(p)]: (p, g) for g in self.optimizer.param_groups for p in g["params"]}
        start = show((*self.path, "params")) + "."
        placement.match(self.path, [name for name in saved.names if name.startswith(start)], self._own)
        prefix = show((*self.path, "state")) + "."
        fresh: dict[str, dict[str, Any]] = {name: {} for name in saved.facts["with_state"] if name in params}
        self._begin_anew(fresh, params, placement)
        nested = set(references(saved.values["state"]))  # inside lists and such, not values of their own
        split = splitter(fresh)
        for full in saved.names:
            if full in nested:
                continue
            found = split(full.removeprefix(prefix)) if full.startswith(prefix) else None
            if found is not None:
                name, key = found
                fresh[name][key] = self._target(full, key, *params[name], placement)
        settings = zip(self.optimizer.param_groups, saved.values["groups"], strict=False)
        groups = [placement.build(self._usable(live, group, placement)) for live, group in settings]
        others = [(name, key, placement.build(value)) for name, key, value in saved.values["state"] if name in fresh]

        def finish() -> None:
            for name, key, value in others:
                fresh[name][key] = value()
            state = {params[name][0]: values for name, values in fresh.items()}
            if not _filled(self.optimizer.state, state):
                self.optimizer.state.clear()
                self.optimizer.state.update(state)
            for group, build in zip(self.optimizer.param_groups, groups, strict=False):
                _update_group(group, build())

        placement.finish(self.path, finish)

    def _usable(self, live: dict[str, Any], saved: dict[str, Json], placement: Placement) -> dict[str, Json]:
        """The settings of a group that are of the kind that they are here, or were or are None."""
        found = {}
        for key, value in saved.items():
            kinds = {kind_of(value), kind_of(encode(live.get(key), (*self.path, key), Collector()))} - {"None"}
            if len(kinds) < 2 or kinds == {"a number", "a tensor"}:
                found[key] = value
            else:
                placement.problem(f"{show(self.path)}: {key} is {kind_of(value)} in the checkpoint, and not here")
        return found

    def _begin_anew(
        self, fresh: dict[str, Any], params: Mapping[str, tuple[Tensor, Any]], placement: Placement
    ) -> None:
        """What was learnt about a parameter of another shape does not fit this one: it would fail at the next step."""
        if placement.strict:
            return
        shapes = {name: tensor.spec.whole or tensor.spec.shape for (name, _), tensor in placement.saved.tensors.items()}
        for name in list(fresh):
            shape = shapes.get(placement.saved.canonical(name, placement.seat.rank))
            if shape is not None and tuple(shape) != tuple(params[name][0].shape):
                del fresh[name]
                placement.problem(
                    f"{show((*self.path, 'state', name))}: begins anew, as its parameter has another shape"
                )

    def _compare_groups(self, mine: list[list[str]], theirs: list[list[str]], placement: Placement) -> None:
        """Where several ranks saved or restore, one rank's groups hold some of the parameters of all."""
        if mine == theirs or (not placement.alone and _fit(mine, theirs)):
            return
        have, want = {n for g in mine for n in g}, {n for g in theirs for n in g}
        odd = sorted(have ^ want if placement.alone else have - want)[:5]
        placement.problem(
            f"{show(self.path)}: the parameter groups differ ({len(mine)} groups here, {len(theirs)} saved; "
            f"{'not in both: ' + ', '.join(odd) if odd else 'other order'})"
        )

    def _target(self, full: str, key: str, param: Tensor, group: dict[str, Any], placement: Placement) -> Tensor:
        """The live tensor if there is one that fits, else a new one, where torch itself would put it."""
        live = self.optimizer.state[param].get(key) if param in self.optimizer.state else None
        beside = _beside(param, placement.names)
        if isinstance(live, Tensor):
            entry = StateEntry(full, live, True, beside)
            if placement.fits(full, entry):
                placement.fill(full, entry)
                return live
        device = local(param).device
        if key == "step" and not (group.get("capturable") or group.get("fused")):
            device = torch.device("cpu")
        elif not placement.spec(full).accelerator and placement.accelerated:
            device = torch.device("cpu")  # an offloaded optimizer
        return placement.create(full, device, beside)


def _is_optimizer(saved: SavedNode) -> bool:
    def texts(value: object) -> bool:
        return type(value) is list and all(type(one) is str for one in value)

    params, values = saved.facts.get("params"), saved.values
    if type(params) is not list or not all(map(texts, params)) or not texts(saved.facts.get("with_state")):
        return False
    if type(values) is not dict or type(values.get("groups")) is not list or type(values.get("state")) is not list:
        return False
    groups = (type(group) is dict and not group.keys() & {"$", "params"} for group in values["groups"])
    return all(groups) and all(type(row) is list and len(row) == 3 and texts(row[:2]) for row in values["state"])


def keeps_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what `state_dict()` says is not what `.state` and `.param_groups` hold, as of several optimizers in one.

    A wrapper forwards those of the one that it is around.
    """
    owner = next(one for one in type(optimizer).__mro__ if "state_dict" in vars(one))
    if owner.__module__.startswith("torch."):
        return False
    inner = (one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer))
    return not any(one.state is optimizer.state for one in inner)


def _filled(live: Mapping[Any, dict[str, Any]], wanted: Mapping[Any, dict[str, Any]]) -> bool:
    """Whether the state consists of these very tensors in these places already, and of nothing else."""
    if list(map(id, live)) != list(map(id, wanted)):
        return False
    for param, values in wanted.items():
        have = live[param]
        if list(have) != list(values) or any(have[key] is not value for key, value in values.items()):
            return False
    return True


def _beside(param: Tensor, names: Names) -> Replicas | Tensor | None:
    """Optimizer state lies on the ranks like the parameter it belongs to."""
    if is_dtensor(param):
        return param
    entry = names.get(id(param))
    return None if entry is None else entry.alike


def _fit(mine: list[list[str]], theirs: list[list[str]]) -> bool:
    return len(mine) == len(theirs) and all(set(a) <= set(b) for a, b in zip(mine, theirs, strict=True))


def _update_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        live = group.get(key)
        if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
            live.copy_(value)  # a captured graph reads this very tensor
        else:
            group[key] = value


class StatefulNode:
    """Anything with state_dict and load_state_dict; also an optimizer that keeps its state in ways of its own."""

    kind = "stateful"

    def __init__(self, path: Path, target: Stateful) -> None:
        self.path, self.target = path, target
        self._said = ""  # what kind of value

    def read(self, names: Names) -> Contents:
        collect = Collector()
        values = encode(self.target.state_dict(), self.path, collect)
        self._said = kind_of(values)
        return Contents(_NOTHING, collect.entries, values)

    read_on = read

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        target, last = self.target, isinstance(self.target, RNG)
        if placement.resized and isinstance(target, Resizable):
            several, seat = target, placement.seat
            every = list(placement.saved.values_of(self.path))
            if all(self._is_alike(values, placement) for _, values in every):
                builds = [placement.build(values, rank=rank) for rank, values in every]

                def divide() -> None:
                    several.load_state_dicts([build() for build in builds], seat.rank, seat.size)

                placement.finish(self.path, divide, last=last)
        elif self._is_alike(saved.values, placement):
            # An optimizer's own loader wants tensors that lie on the ranks like those that it has.
            own = self.read(Names()).loose if isinstance(target, torch.optim.Optimizer) else []
            build = placement.build(saved.values, like={entry.name: entry for entry in own})
            placement.finish(self.path, lambda: target.load_state_dict(build()), last=last)

    def _is_alike(self, values: Json, placement: Placement) -> bool:
        """Whether what was saved is of the kind that it says of itself now: a dict, as a rule."""
        if (found := kind_of(values)) == self._said:
            return True
        placement.problem(f"{show(self.path)} is {found} in the checkpoint and {self._said} here")
        return False


class PlainNode:
    """Plain values, tensors and arrays in the user's own dict or list, written back into it."""

    kind = "plain"

    def __init__(self, path: Path, parent: Any, key: str | int) -> None:
        self.path, self.parent, self.key = path, parent, key

    def read(self, names: Names) -> Contents:
        collect = Collector()
        values = encode(self.parent[self.key], self.path, collect)
        return Contents(_NOTHING, collect.entries, values)

    read_on = read

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        collect = Collector()
        encode(self.parent[self.key], self.path, collect)
        live = {e.name: e for e in collect.entries if isinstance(collect.objects[e.name], Tensor)}
        build = placement.build(saved.values, live)

        def finish() -> None:
            self.parent[self.key] = _write_back(self.parent[self.key], build())

        placement.finish(self.path, finish)


def _write_back(live: Any, value: Any) -> Any:
    """`value`, inside the user's own containers and arrays where they are of the same type."""
    if type(live) is not type(value):
        return value
    if isinstance(live, dict):
        new = {k: _write_back(live[k], v) if k in live else v for k, v in value.items()}
        live.clear()
        live.update(new)
        return live
    if isinstance(live, list):
        live[:] = [_write_back(live[i], v) if i < len(live) else v for i, v in enumerate(value)]
        return live
    if isinstance(live, np.ndarray) and (live.dtype, live.shape) == (value.dtype, value.shape) and live.flags.writeable:
        np.copyto(live, value)
        return live
    return value
