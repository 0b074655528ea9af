"""Reads and restores optimizers with hooks, their own `state_dict()` or loader, or helper objects in their state.

This module decides which methods and hooks are called, and which packages' wrappers add no state (`TRUSTED`).

An example of a helper object is a projector of GaLore. Its attributes are saved. A restore sets them on the live
object, or creates an object of the same class without calling any of its code. It creates only ordinary Python
classes that the optimizer's own package defines or imports. It never imports a class that a file names.
"""

from __future__ import annotations

import functools
import logging
import random
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.core.format.values import Json, Path, SavedNode, decode, encode, show
from ckpt.core.state.nodes import Collector, Contents, Stateful, StatefulNode, adapt
from ckpt.core.state.optimizer_node import EXTRA, OptimizerNode, all_of_one_state, inside
from ckpt.core.state.placement import Placement
from ckpt.core.state.sharding import Names, is_dtensor
from ckpt.core.state.tensors import (
    OBJECT_TAGS,
    Collecting,
    ObjectDecoder,
    ObjectEncoder,
    class_name,
    class_of,
    decode_constant,
)
from ckpt.core.state.wrappers import is_wrapped
from ckpt.errors import CorruptError, MismatchError, StateError
from ckpt.events import log

PRE_HOOKS = "_optimizer_state_dict_pre_hooks"  # the attribute in which torch's optimizers store these hooks


class CustomOptimizerNode(OptimizerNode):
    """Any optimizer whose state is in `.state` and `.param_groups`. If its `state_dict()` adds entries to torch's, the
    added entries are saved as `extra`, and a restore passes them to `load_state_dict()`. A restore also calls
    `load_state_dict()` if the method or its hooks may compute further values."""

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(path, optimizer)
        self._objects = self._encoder = ObjectsOf(optimizer)
        self._adds_entries, self._same = has_own_state_dict(optimizer), all_of_one_state(optimizer)
        self._extra: dict[str, Any] = {}  # entries that the state_dict() added at the current reading

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, torch.optim.Optimizer)

    def read(self, names: Names) -> Contents:
        self._extra = self._own_entries()  # called first, because the hooks may write into the groups and the state
        return super().read(names)

    def _values(self, collect: Collector) -> dict[str, Any]:
        extra, self._extra = self._extra, {}
        self._objects.begin(self._called)
        values = super()._values(collect)
        if extra:
            values["extra"] = encode(extra, (*self.path, "extra"), collect)
        self._objects.end()
        return values

    def _own_entries(self) -> dict[str, Any]:
        """Run the hooks that prepare a `state_dict()`. Return the entries that the optimizer adds to torch's."""
        if not self._adds_entries:
            for one in self._same:
                for hook in tuple((vars(one).get(PRE_HOOKS) or {}).values()):
                    hook(one)
            return {}
        entries = self.optimizer.state_dict()
        return {key: value for key, value in entries.items() if key not in ("state", "param_groups")}

    def _decoder(self, values: Json) -> ObjectDecoder:
        return RestoredObjects(self._objects, values)

    def _prepare_loader(self, saved: SavedNode, placement: Placement, objects: ObjectDecoder | None) -> None:
        extra = self._saved_extra(saved, placement, objects)
        if extra is not None or any(map(_derives_when_loaded, self._same)):

            def finish() -> None:
                self._load({} if extra is None else extra(), dict(self.optimizer.state))

            placement.finish(self.path, finish)

    def _saved_extra(
        self, saved: SavedNode, placement: Placement, objects: ObjectDecoder | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Return a function that builds the additional entries of the saved `state_dict()`."""
        found = saved.values.get("extra")
        if found is None:
            return None
        if not self._adds_entries:
            placement.problem(f"{show(self.path)}: its saved state_dict() has more entries than the one here")
            return None
        if self._differing([EXTRA], placement):
            return None
        return placement.build(found, guarded=True, objects=objects)

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        if self._adds_entries or any(map(_derives_when_loaded, self._same)):
            return False
        return super().prepare_as_saved(saved, placement)

    def _new_encoder(self) -> ObjectEncoder:
        return ObjectsOf(self.optimizer)

    def _load(self, extra: dict[str, Any], state: dict[Any, Any]) -> None:
        """Call the optimizer's own loader. Undo the changes that torch's loader makes, for example casts to the dtypes
        of the weights."""
        entries, groups = self._state_dict_of(state), self.optimizer.param_groups
        sharing = [vars(one) for one in self._same if vars(one).get("param_groups") is groups]
        try:
            self.optimizer.load_state_dict({**entries, **extra})
        except Exception as error:
            if extra:
                raise
            log.warning(
                "%s: its state was restored, but its own load_state_dict() failed with %r, so values that the "
                "optimizer computes from the loaded state may be missing",
                show(self.path),
                error,
            )
        # torch's loader creates another list, but a wrapper that shares the groups would keep the old one.
        groups = next((one["param_groups"] for one in sharing if one["param_groups"] is not groups), groups)
        for one in sharing:
            one["param_groups"] = groups
        for key, values in self.optimizer.state.items():
            if key not in state:
                state[key] = values
            elif isinstance(values, dict) and isinstance(state[key], dict):
                saved = state[key]
                state[key].update({k: v for k, v in values.items() if k not in saved or _is_derived(v, saved[k])})
        self._put(state)

    def _state_dict_of(self, state: dict[Any, Any]) -> dict[str, Any]:
        """Return the `state_dict()` for the restored state. Discard values that the call or hooks write into the state,
        because they belong to this process, not to the checkpoint."""
        held = {key: dict(values) for key, values in state.items() if isinstance(values, dict)}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        hooks = [(vars(one), vars(one).get(PRE_HOOKS)) for one in self._same]
        try:
            for owner, of_one in hooks:
                if of_one:
                    owner[PRE_HOOKS] = OrderedDict()
            entries = self.optimizer.state_dict()
        finally:
            for owner, of_one in hooks:
                if of_one:
                    owner[PRE_HOOKS] = of_one
        for key, values in held.items():
            state[key].clear()
            state[key].update(values)
        if type(packed := entries.get("param_groups")) is not list or len(packed) != len(groups):
            return entries
        return {**entries, "param_groups": _Groups({**a, **b} for a, b in zip(packed, groups, strict=True))}


class SeparateOptimizerNode(StatefulNode):
    """An optimizer with state outside `.state` and `.param_groups`. Only its `state_dict()` contains this state."""

    def __init__(self, path: Path, target: torch.optim.Optimizer) -> None:
        super().__init__(path, target)
        self._objects = ObjectsOf(target)

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, torch.optim.Optimizer) and keeps_state_elsewhere(value)

    def read(self, names: Names) -> Contents:
        self._objects.begin({})
        contents = self._read(Collector(self._objects))
        self._objects.end()
        return contents

    def _build(self, saved: SavedNode, placement: Placement) -> Callable[[], Any] | None:
        # The loader needs tensors with the same placement on the ranks as the optimizer's own tensors.
        like = {entry.name: entry for entry in self.read(Names()).loose}
        objects = RestoredObjects(self._objects, saved.values)
        try:
            return placement.build(saved.values, like=like, guarded=True, objects=objects)
        except MismatchError as error:
            placement.problem(
                f"{show(self.path)} starts from the beginning, because a part of its state cannot be restored: {error}"
            )
            return None

    def _load(self, state: Any) -> None:
        """Call the loader. Undo the casts of moments to the dtypes of the weights, which torch's own loader makes."""
        self.target.load_state_dict(state)
        _recast(self.target.state_dict(), state)  # a state_dict() has the optimizer's own dicts of parameters


def _recast(live: Any, saved: Any) -> Any:
    """Return a loaded value in which each tensor that the loader has cast is replaced by the saved tensor."""
    if isinstance(live, Tensor):
        cast = isinstance(saved, Tensor) and saved.shape == live.shape and saved.dtype != live.dtype
        return saved.to(live.device) if cast else live
    if isinstance(live, dict) and isinstance(saved, dict):
        for key in live.keys() & saved.keys():
            live[key] = _recast(live[key], saved[key])
    elif type(live) in (list, tuple) and type(saved) is type(live) and len(live) == len(saved):
        found = [_recast(one, other) for one, other in zip(live, saved, strict=True)]
        if type(live) is tuple:
            return tuple(found)
        live[:] = found
    return live


TRUSTED = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "opacus"}
"""Packages whose wrappers of optimizers add nothing to the `state_dict()` of the optimizer inside."""


def _is_trusted(owner: type) -> bool:
    """Return True if a class is defined in torch.optim or in a `TRUSTED` package, but not in torch.distributed."""
    return owner.__module__.startswith("torch.optim.") or owner.__module__.split(".")[0] in TRUSTED


def has_own_state_dict(optimizer: Any) -> bool:
    """Return True if a method or hook may make `state_dict()` return more than `.state` and `.param_groups`."""
    if vars(optimizer).get("_optimizer_state_dict_post_hooks") or "state_dict" in vars(optimizer):
        return True
    owner = next((one for one in type(optimizer).__mro__ if "state_dict" in vars(one)), None)
    if owner is None:
        return False
    if not _is_trusted(owner):
        return True
    return any(has_own_state_dict(one) for one in inside(optimizer) if one.state is optimizer.state)


def _derives_when_loaded(optimizer: Any) -> bool:
    """Return True if a method or hook may make loading do more than set `.state` and `.param_groups`."""
    names = ("load_state_dict", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    if any(vars(optimizer).get(name) for name in names):
        return True
    owners = (
        next((one for one in type(optimizer).__mro__ if m in vars(one)), None) for m in (names[0], "__setstate__")
    )
    return any(owner is not None and not _is_trusted(owner) for owner in owners)


class _Groups(list[dict[str, Any]]):
    """A list of groups that deepcopy() returns unchanged. In torch's loader, deepcopy() would copy the parameters."""

    def __deepcopy__(self, memo: Any) -> list[dict[str, Any]]:
        return [dict(group) for group in self]


def _is_derived(loaded: Any, saved: Any) -> bool:
    """Return True if an optimizer's loader replaced a saved value by another one. A tensor of the same shape does not
    count, because torch's loader casts to the dtype of the parameter, and hooks may round values."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        same_kind = type(loaded) is type(saved) and not (is_wrapped(saved) or is_dtensor(saved))
        return same_kind and loaded.shape != saved.shape
    numbers = (bool, int, float, type(None))
    return type(loaded) in numbers and type(saved) in numbers and repr(loaded) != repr(saved)


def keeps_state_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `state_dict()` returns something other than `.state` and `.param_groups`, for example the states
    of several optimizers. It is False for a wrapper that forwards both and only adds entries to its `state_dict()`."""
    if not has_own_state_dict(optimizer):
        return False
    owner = next(one for one in type(optimizer).__mro__ if "state_dict" in vars(one))
    if not any(one.state is optimizer.state for one in inside(optimizer)):
        return owner.__module__.split(".")[0] != "torch" or "state_dict" in vars(optimizer)
    return not {"state", "param_groups"} <= optimizer.state_dict().keys()


# -- objects that optimizers keep --


@dataclass
class ObjectsOf:
    """Encodes the helper objects of one optimizer. In a restore, it fills the live objects or creates them.

    `params`: names of the optimizer's parameters, by id. `early`: names of the objects at the first reading, None
        during that reading. `live`: the objects of the last reading, by name.
    """

    optimizer: torch.optim.Optimizer
    params: Mapping[int, str] = field(default_factory=dict)
    early: set[str] | None = None
    live: dict[str, object] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _bound: set[str] = field(default_factory=set)  # names of objects that a restore can fill, but not create
    _forms: set[str] = field(default_factory=set)  # results of `_form_of` for the script's objects at the first reading

    def begin(self, params: Mapping[int, str]) -> None:
        """Reset the records before the optimizer is read."""
        self.params, self.live, self._names, self._bound = params, {}, {}, set()

    def end(self) -> None:
        """Store the names of the objects after a reading that raised no error."""
        if self.early is None:
            self.early = set(self._bound)

    # -- saving --

    def encode(self, value: object, path: Path, extern: Collecting) -> Json | None:
        """Encode an object that is neither plain nor a constant. Return None for tensors and arrays."""
        if isinstance(value, Tensor):
            return None if id(value) not in self.params else {"$": "parameter", "v": self.params[id(value)]}
        if isinstance(value, np.ndarray | np.generic):
            return None
        if (known := self._names.get(id(value))) is not None:
            return {"$": "object", "name": known}
        name = show(path)
        if (given := _name_of_given(value)) is not None:
            if "param_groups" not in path:  # a restarted script creates the same groups
                self._bind(name, path, value)
            self.live[name] = value
            return {"$": "given", "name": name, "v": given}
        self._names[id(value)], self.live[name] = name, value
        entries, objects, names, live = len(extern.entries), list(extern.objects), list(self._names), list(self.live)
        try:
            return self._by_attributes(value, path, extern)
        except StateError:
            # The attributes cannot be saved. Remove their collected parts, and try the object's own state_dict().
            del extern.entries[entries:]
            extern.objects = {key: extern.objects[key] for key in objects}
            self._names = {key: self._names[key] for key in names}
            self.live = {key: self.live[key] for key in live}
            target: Any = adapt(value) or value
            if isinstance(value, torch.optim.Optimizer):
                raise
            if not isinstance(target, Stateful):
                if not self._comes_from_script(value, path):
                    raise
                del self._names[id(value)]
                return {"$": "given", "name": name, "v": _name_of_class(value)}
        state = encode(target.state_dict(), path, extern)
        if isinstance(value, torch.Generator):
            return {"$": "generator", "name": name, "device": str(value.device), "state": state}
        if (kind := _kind_of_generator(value)) is not None:
            return {"$": "generator", "name": name, "kind": kind, "state": state}
        self._bind(name, path, value)
        return {"$": "object", "name": name, "state": state}

    def _comes_from_script(self, value: object, path: Path) -> bool:
        """Return True for an object without tensors in `param_groups`, which a restarted script creates again. Raise
        StateError if the object was created or changed since the first reading."""
        form = _form_of(value) if "param_groups" in path else None
        if form is None:
            return False
        if self.early is None:
            self._forms.add(form)
        if form not in self._forms:
            raise StateError(
                f"{show(path)}: this {_name_of_class(value)} was created or changed during the training, and a "
                "restarted process would have the script's object instead. Add state_dict() and load_state_dict(), "
                "or use tensors and plain values instead"
            )
        return True

    def _by_attributes(self, value: object, path: Path, extern: Collecting) -> Json:
        kind = type(value)
        if why := self._refusal(kind):
            raise StateError(
                f"{show(path)}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved: {why}. Add "
                "state_dict() and load_state_dict() to it, or use tensors and plain values instead"
            )
        name = class_name(kind, path)
        attributes = encode(dict(sorted(_attributes(value).items())), path, extern)
        return {"$": "object", "name": show(path), "class": name, "attributes": attributes}

    def _bind(self, name: str, path: Path, value: object) -> None:
        """Record an object that a restart can only fill. Raise StateError if it will not exist after a restart."""
        self._bound.add(name)
        if self.early is not None and name not in self.early:
            raise StateError(
                f"{show(path)}: the optimizer created this {type(value).__module__}.{type(value).__qualname__} during "
                "the training, and a restarted process could not create it again. Create it with the optimizer, "
                "or before the Checkpointer"
            )

    def _refusal(self, kind: type) -> str:
        """Return the reason why objects of a class cannot be created without calling its code, or "" if they can be."""
        if kind is SimpleNamespace:
            return ""
        if getattr(kind, "__new__", None) is not getattr(object, "__new__", None):
            return "its class has its own __new__"
        if any("__del__" in vars(one) for one in kind.__mro__[:-1]):
            return "its class has its own __del__"
        if not any(name in vars(one) for one in kind.__mro__[:-1] for name in ("__dict__", "__slots__")):
            return "it has no attributes"
        if not self._is_ours(kind):
            return "its class does not belong to the optimizer's package"
        return ""

    def _is_ours(self, kind: type) -> bool:
        """Return True if the package of the optimizer, or of an optimizer inside it, defines or imports a class."""
        modules = {base.__module__ for one in (self.optimizer, *inside(self.optimizer)) for base in type(one).__mro__}
        for module in modules:
            package = module.split(".")[0]
            if package in ("torch", "builtins", "typing", "abc", "collections"):
                continue
            if kind.__module__.split(".")[0] == package:
                return True
            if any(one is kind for one in vars(sys.modules.get(module, object)).values()):
                return True
        return False

    def target(self, reference: dict[str, Any]) -> object:
        """Return the object to fill, either the live one or a new one of its class. Raise MismatchError if neither
        works."""
        name = reference["name"]
        live = self.live.get(name)
        if reference["$"] == "generator" and reference.get("kind") is not None:
            if (make := _GENERATORS.get(reference["kind"])) is None:
                raise CorruptError(f"unknown kind of generator {reference['kind']!r:.80}: written by a newer version?")
            return live if _kind_of_generator(live) == reference["kind"] else make()
        if reference["$"] == "generator":
            return live if isinstance(live, torch.Generator) else torch.Generator(device=reference["device"])
        if "attributes" not in reference:
            if not isinstance(adapt(live) or live, Stateful):
                raise MismatchError(f"{name} has a state in the checkpoint, but this optimizer has no such object")
            return live
        kind = class_of(reference)
        if why := self._refusal(kind):
            raise MismatchError(f"{name}: a {kind.__module__}.{kind.__qualname__} cannot be created again: {why}")
        return live if type(live) is kind else SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind)


class RestoredObjects:
    """Fills the objects of an optimizer, or creates them. Shared objects stay shared."""

    def __init__(self, owner: ObjectsOf, values: Json) -> None:
        self._owner = owner
        self._params = {name: number for number, name in owner.params.items()}
        self._defined = {
            one["name"]: one for one in _objects_in(values) if _defines(one) and type(one.get("name")) is str
        }
        self._made: dict[str, object] = {}

    def check(self, values: Json) -> list[str]:
        """Return descriptions of differences between the live objects and the checkpoint. Raise MismatchError or
        CorruptError if an object cannot be restored."""
        problems = []
        for one in _objects_in(values):
            tag, name = one["$"], one.get("name")
            if tag == "parameter":
                if type(one.get("v")) is not str or one["v"] not in self._params:
                    raise MismatchError(f"the state refers to a parameter {one.get('v')!r:.200} that is not here")
            elif type(name) is not str or (tag != "given" and name not in self._defined):
                raise CorruptError(f"the checkpoint has no contents of the object {name!r:.200}")
            elif tag == "given":
                here = self._owner.live.get(name)
                if here is None:
                    raise MismatchError(f"{name} was {one.get('v')!r:.200} in the checkpoint, but does not exist here")
                if (now := _name_of_given(here) or _name_of_class(here)) != one.get("v"):
                    problems.append(f"{name} was {one.get('v')!r:.200} in the checkpoint and is {now!r:.200} here")
            elif _defines(one):
                self._owner.target(one)
        return problems

    def key(self, data: Json) -> Any:
        """Decode a key of the state."""
        return decode(data, lambda one: self.decode(one) if one["$"] == "parameter" else decode_constant(one))

    def decode(self, reference: dict[str, Any]) -> object:
        """Return the value of a reference. If the reference has an object's contents, fill that object first."""
        if reference["$"] == "parameter":
            number = self._params[reference["v"]]
            groups = self._owner.optimizer.param_groups
            return next(p for group in groups for p in group["params"] if id(p) == number)
        name = reference["name"]
        if reference["$"] == "given":
            return self._owner.live[name]
        if name not in self._made:
            self._made[name] = self._owner.target(self._defined[name])
        made: Any = self._made[name]
        if "attributes" in reference:
            _set_attributes(made, reference["attributes"])
        elif "state" in reference:
            (adapt(made) or made).load_state_dict(reference["state"])
        return made


_BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_GENERATORS: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(0),
    "numpy.RandomState": lambda: np.random.RandomState(0),
    **{
        f"numpy.{name}": functools.partial(lambda bits: np.random.Generator(bits(0)), getattr(np.random, name))
        for name in _BITS
    },
}


def _kind_of_generator(value: object) -> str | None:
    """Return the name of a Python or numpy generator that can be created again, or None for all other values."""
    if type(value) is random.Random:
        return "random.Random"
    if type(value) is np.random.RandomState and type(value._bit_generator) is np.random.MT19937:
        return "numpy.RandomState"
    if type(value) is not np.random.Generator:
        return None
    bits = type(value.bit_generator)
    known = bits.__name__ in _BITS and getattr(np.random, bits.__name__) is bits
    return f"numpy.{bits.__name__}" if known else None


def _defines(reference: dict[str, Any]) -> bool:
    """Return True if a reference has the contents of its object. Only an object's first reference has contents."""
    return "attributes" in reference or "state" in reference


def _objects_in(values: Json) -> list[dict[str, Any]]:
    """Return all references to objects, including nested ones."""
    found, pending = [], [values]
    while pending:
        value = pending.pop()
        if type(value) is dict and value.get("$") in OBJECT_TAGS:
            found.append(value)
        pending.extend(value.values() if type(value) is dict else value if type(value) is list else ())
    return found


_WITHOUT_STATE = (logging.Logger, re.Pattern, ModuleType)


def _name_of_given(value: object) -> str | None:
    """Return a name for a class, function, partial call of a function, or object without state, otherwise None."""
    if isinstance(value, functools.partial):
        inner = _name_of_given(value.func)
        return None if inner is None else f"a partial call of {inner}"
    if isinstance(value, _WITHOUT_STATE):
        return _name_of_class(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return None


def _name_of_class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


_VALUES = (
    str, bytes, bytearray, Number, list, tuple, set, frozenset, dict, deque, date, timedelta, PurePath, Enum,
)  # fmt: skip


def _form_of(value: object) -> str | None:
    """Return a text that changes with the plain values in an object. Return None if the object has tensors, is an
    iterator, or is itself a value, for example of a subclass of str.

    The values of process groups and meshes of torch.distributed are ignored, because they are not training state.
    """
    if isinstance(value, (Iterator, *_VALUES)):
        return None

    def extern(inner: object, path: Path) -> Json:
        if isinstance(inner, Tensor | np.ndarray):
            raise StateError(f"{show(path)} is a tensor or an array")
        return f"{_name_of_class(inner)} {id(inner)}"

    values: Any = ()
    if not any(base.__module__.startswith("torch.distributed.") for base in type(value).__mro__):
        try:
            values = value.__reduce_ex__(4)
        except Exception:  # the value cannot be pickled
            values = dict(value) if isinstance(value, Mapping) else _attributes(value)
    if isinstance(values, tuple):
        values = [list(one) if isinstance(one, Iterator) else one for one in values]
    try:
        return f"{_name_of_class(value)} {encode(values, (), extern)}"
    except StateError:
        return None


def _slots(kind: type) -> list[str]:
    found = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{slot}" if private else slot)
    return [slot for slot in found if slot not in ("__dict__", "__weakref__")]


def _attributes(value: object) -> dict[str, object]:
    held = {slot: getattr(value, slot) for slot in _slots(type(value)) if hasattr(value, slot)}
    return held | getattr(value, "__dict__", {})


def _set_attributes(target: object, wanted: Any) -> None:
    """Set exactly these attributes of an object, without calling its code."""
    slots = _slots(type(target))
    if type(wanted) is not dict or not all(type(key) is str for key in wanted):
        raise CorruptError(f"not the attributes of an object: {wanted!r:.80}")
    held = getattr(target, "__dict__", None)
    if held is not None:
        held.clear()
        held.update({key: value for key, value in wanted.items() if key not in slots})
    for slot in slots:
        if slot in wanted:
            object.__setattr__(target, slot, wanted[slot])
        elif hasattr(target, slot):
            object.__delattr__(target, slot)
