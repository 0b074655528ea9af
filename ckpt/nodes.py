"""The kinds of things a state is made of: how each is read, and how it is put back.

Reading gives `Entry`s (a name, a live tensor) and plain values. What is the same from step to step is cached and only
checked by identity, since reading happens between two steps of training. Putting back has two halves: `prepare` says
where every tensor goes and finds every mismatch before anything is changed; `finish`, after the tensors are filled,
sets plain values and attaches what had to be created.
"""

from __future__ import annotations

from collections.abc import Container, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from ckpt.errors import CorruptError, StateError
from ckpt.restore import Placement, SavedNode, references
from ckpt.rng import RNG
from ckpt.tensors import check, from_array
from ckpt.values import Json, Path, encode, show


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say what it is and become it again, such as schedulers, scalers and data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """`guarded`: changes only inside optimizer steps, so its copy may overlap the next forward and backward."""

    name: str
    tensor: Tensor
    guarded: bool = False


@dataclass
class Piece:
    """What a node consists of now. `fixed` is the same object as before if nothing in it changed."""

    fixed: list[Entry]
    loose: list[Entry] = field(default_factory=list)  # made anew by every reading
    values: Json = None
    facts: dict[str, Any] = field(default_factory=dict)  # plain, and part of the layout


_NOTHING: list[Entry] = []  # one object, so that "nothing fixed" is seen as unchanged


class Node(Protocol):
    """One entry of the state."""

    path: Path
    kind: str

    def read(self, names: dict[int, str]) -> Piece:
        """`names`: by id, what parameters are called."""

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        """Say where tensors go. Problems are noted in the placement, not raised."""


class Collector:
    """Takes tensors and arrays out of plain values, leaving references."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.objects: dict[str, object] = {}

    def __call__(self, value: object, path: Path) -> Json | None:
        if isinstance(value, Tensor):
            tensor, reference = check(value, path), {"$": "tensor"}
        elif isinstance(value, np.ndarray):
            tensor, reference = from_array(value, path)
        else:
            return None
        name = show(path)
        self.entries.append(Entry(name, tensor))
        self.objects[name] = value
        return {**reference, "name": name}


class ModuleNode:
    """An nn.Module: parameters and persistent buffers, in place."""

    kind = "module"

    def __init__(self, path: Path, module: nn.Module) -> None:
        self.path, self.module = path, unwrap(module)
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._children: list[tuple[dict[str, Any], str, nn.Module | None]] = []
        self._places: list[tuple[dict[str, Any], str, Tensor, int, object]] = []
        self._piece: Piece | None = None

    def read(self, names: dict[int, str]) -> Piece:
        if self._piece is None or self._changed():
            self._piece = self._read()
        return self._piece

    def _changed(self) -> bool:
        for owner, size in self._sizes:
            if len(owner) != size:
                return True
        for owner, key, child in self._children:
            if owner.get(key) is not child:
                return True
        for owner, key, tensor, pointer, form in self._places:
            if owner.get(key) is not tensor or tensor.data_ptr() != pointer or _form(tensor) != form:
                return True
        return False

    def _read(self) -> Piece:
        self._piece = None  # should reading fail half-way, what is noted below must not pass for unchanged
        self._sizes, self._children, self._places = [], [], []
        live: dict[str, Tensor] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            members: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            self._sizes += [(owner, len(owner)) for owner in members]
            self._children += [(module._modules, key, child) for key, child in module._modules.items()]
            for owner in members[1:]:
                for key, tensor in owner.items():
                    if tensor is not None and key not in module._non_persistent_buffers_set:
                        live[f"{prefix}.{key}" if prefix else key] = check(tensor, (*self.path, prefix, key))
                        self._places.append((owner, key, tensor, tensor.data_ptr(), _form(tensor)))
        return Piece([Entry(self._name(key), tensor, isinstance(tensor, nn.Parameter)) for key, tensor in live.items()])

    def _name(self, key: str) -> str:
        return show((*self.path, key))

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        live = {entry.name: entry.tensor for entry in self.read({}).fixed}
        placement.match(self.path, saved.names, live)


def _form(tensor: Tensor) -> object:
    """Differs when `.data` was set to another view of the same memory."""
    return tensor.shape, tensor.stride(), tensor.dtype


class CustomModuleNode:
    """An nn.Module that says itself what its state is: hooks, extra state, or methods of its own."""

    kind = "custom module"

    def __init__(self, path: Path, module: nn.Module) -> None:
        self.path, self.module = path, unwrap(module)

    def read(self, names: dict[int, str]) -> Piece:
        collect = Collector()
        state = dict(self.module.state_dict(keep_vars=True))
        values = encode(state, self.path, collect)
        loose = [Entry(e.name, e.tensor, isinstance(e.tensor, nn.Parameter)) for e in collect.entries]
        return Piece(_NOTHING, loose, values)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        live = {entry.name: entry.tensor for entry in self.read({}).loose}
        for name in placement.compare(self.path, saved.names, live):
            placement.watch(name, live[name])
        state = placement.build(saved.values)

        def finish() -> None:
            self.module.load_state_dict(state(), strict=placement.strict)

        placement.finishers.append(finish)


class OptimizerNode:
    """A torch optimizer: state by parameter name, written back directly (its own loader would cast dtypes)."""

    kind = "optimizer"

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.optimizer = path, optimizer
        self.unguarded = False  # its steps run no hooks
        self._names: dict[int, str] | None = None
        self._piece: Piece | None = None
        self._state: object = None
        self._groups: list[tuple[list[Tensor], int]] = []
        self._dicts: list[tuple[Tensor, dict[str, Any], int]] = []
        self._places: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._others: list[tuple[str, dict[str, Any], str]] = []

    def read(self, names: dict[int, str]) -> Piece:
        if self._piece is None or names is not self._names or self._changed():
            self._read(names)
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
        return Piece(self._piece.fixed, collect.entries, values, self._piece.facts)

    def _changed(self) -> bool:
        optimizer = self.optimizer
        state: MutableMapping[Any, Any] = optimizer.state
        if state is not self._state or len(state) != len(self._dicts):
            return True
        if len(self._groups) != len(optimizer.param_groups):
            return True
        for group, (params, count) in zip(optimizer.param_groups, self._groups, strict=True):
            if group["params"] is not params or len(params) != count:
                return True
        for param, values, size in self._dicts:
            if state.get(param) is not values or len(values) != size:
                return True
        for values, key, tensor, pointer in self._places:
            if values.get(key) is not tensor or tensor.data_ptr() != pointer:
                return True
        # A key that was None may have become a tensor.
        return any(isinstance(values.get(key), Tensor) for _, values, key in self._others)

    def _read(self, names: dict[int, str]) -> None:
        self._piece = None  # as in ModuleNode
        self._names, self._state = names, self.optimizer.state
        self._groups = [(group["params"], len(group["params"])) for group in self.optimizer.param_groups]
        self._dicts, self._places, self._others = [], [], []
        fixed: list[Entry] = []
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
                    fixed.append(Entry(show(path), check(value, path), True))
                    self._places.append((values, key, value, value.data_ptr()))
                else:
                    self._others.append((name, values, key))
        params = [[called[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        self._piece = Piece(fixed, facts={"params": params, "with_state": [called[id(p)] for p, _, _ in self._dicts]})

    def param_names(self, names: dict[int, str]) -> dict[int, str]:
        """By id; a parameter that no module or tensor of the state names is called by its place."""
        return {
            id(p): names.get(id(p), f"{i}.{j}")
            for i, group in enumerate(self.optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        called = self.param_names(placement.names)
        mine = [[called[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        theirs: list[list[str]] = saved.facts["params"]
        if mine != theirs:
            have, want = {n for g in mine for n in g}, {n for g in theirs for n in g}
            odd = sorted(have ^ want)[:5]
            placement.problem(
                f"{show(self.path)}: the parameter groups differ ({len(mine)} groups here, {len(theirs)} saved; "
                f"{'not in both: ' + ', '.join(odd) if odd else 'other order'})"
            )
        params = {called[id(p)]: (p, g) for g in self.optimizer.param_groups for p in g["params"]}
        prefix = show((*self.path, "state")) + "."
        fresh: dict[str, dict[str, Any]] = {name: {} for name in saved.facts["with_state"] if name in params}
        nested = set(references(saved.values["state"]))  # inside lists and such, not values of their own
        for full in saved.names:
            if full in nested:
                continue
            name, key = _split(full.removeprefix(prefix), fresh)
            if full.startswith(prefix) and name in fresh:
                fresh[name][key] = self._target(full, key, *params[name], placement)
        if any(type(group) is not dict or group.keys() & {"$", "params"} for group in saved.values["groups"]):
            raise CorruptError(f"{show(self.path)}: the settings of its parameter groups are damaged")
        groups = [placement.build(group) for group in saved.values["groups"]]
        others = [(str(name), str(key), placement.build(value)) for name, key, value in saved.values["state"]]

        def finish() -> None:
            for name, key, value in others:
                if name in fresh:
                    fresh[name][key] = value()
            self.optimizer.state.clear()
            for name, values in fresh.items():
                self.optimizer.state[params[name][0]] = values
            for group, build in zip(self.optimizer.param_groups, groups, strict=False):
                _update_group(group, build())

        placement.finishers.append(finish)

    def _target(self, full: str, key: str, param: Tensor, group: dict[str, Any], placement: Placement) -> Tensor:
        """The live tensor if there is one that fits, else a new one, where torch itself would put it."""
        live = self.optimizer.state[param].get(key) if param in self.optimizer.state else None
        if isinstance(live, Tensor) and placement.fits(full, live):
            placement.fill(full, live)
            return live
        device = param.device
        if key == "step" and not (group.get("capturable") or group.get("fused")):
            device = torch.device("cpu")
        elif not placement.spec(full).accelerator and placement.accelerated:
            device = torch.device("cpu")  # an offloaded optimizer
        return placement.create(full, device)


def _split(text: str, names: Container[str]) -> tuple[str, str]:
    """`text` as the longest of `names` and, behind a dot, a key: both may have dots of their own."""
    end = len(text)
    while (end := text.rfind(".", 0, end)) >= 0:
        if text[:end] in names:
            return text[:end], text[end + 1 :]
    return "", text


def _update_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        live = group.get(key)
        if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
            live.copy_(value)  # a captured graph reads this very tensor
        else:
            group[key] = value


class StatefulNode:
    """Anything with state_dict and load_state_dict."""

    kind = "stateful"

    def __init__(self, path: Path, target: Stateful) -> None:
        self.path, self.target = path, target

    def read(self, names: dict[int, str]) -> Piece:
        collect = Collector()
        values = encode(self.target.state_dict(), self.path, collect)
        return Piece(_NOTHING, collect.entries, values)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        build = placement.build(saved.values)
        finishers = placement.last if isinstance(self.target, RNG) else placement.finishers
        finishers.append(lambda: self.target.load_state_dict(build()))


class PlainNode:
    """Plain values, tensors and arrays in the user's own dict or list, written back into it."""

    kind = "plain"

    def __init__(self, path: Path, parent: Any, key: str | int) -> None:
        self.path, self.parent, self.key = path, parent, key

    def read(self, names: dict[int, str]) -> Piece:
        collect = Collector()
        values = encode(self.parent[self.key], self.path, collect)
        return Piece(_NOTHING, collect.entries, values)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        collect = Collector()
        encode(self.parent[self.key], self.path, collect)
        live = {name: value for name, value in collect.objects.items() if isinstance(value, Tensor)}
        build = placement.build(saved.values, live)

        def finish() -> None:
            self.parent[self.key] = _write_back(self.parent[self.key], build())

        placement.finishers.append(finish)


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


def unwrap(module: nn.Module) -> nn.Module:
    """Inside torch.compile's wrapper, so that compiled and plain runs use the same names."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def speaks_for_itself(module: nn.Module) -> bool:
    """Whether state_dict() of this module may say something else than its parameters and buffers."""
    for m in module.modules():
        hooks = (
            m._state_dict_hooks, m._state_dict_pre_hooks, m._load_state_dict_pre_hooks, m._load_state_dict_post_hooks
        )  # fmt: skip
        if any(hooks) or type(m).get_extra_state is not nn.Module.get_extra_state:
            return True
        for name in ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"):
            owner = next(c for c in type(m).__mro__ if name in vars(c))
            if not owner.__module__.startswith("torch."):
                return True
    return False
