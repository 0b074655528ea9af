"""Values that are neither plain nor tensors: constants of torch, members of enums, and what optimizers keep of objects.

An optimizer may keep helper objects in its state, such as the projectors of GaLore. Their attributes are saved. A
restore sets them on the object that is already there, or makes an object of the same class without calling any of its
code. Only a class that the optimizer's own package defines or imports, and that is an ordinary Python class, can be
made again. Nothing that a file names is ever imported.
"""

from __future__ import annotations

import functools
import logging
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ckpt.core.format.values import Json, Path, decode, encode, show
from ckpt.core.state.stateful import Stateful, adapt
from ckpt.errors import CorruptError, MismatchError, StateError


class Collecting(Protocol):
    """Encodes what is not a plain value; `entries` and `objects` are the tensors and arrays it has found."""

    entries: list[Any]
    objects: dict[str, object]

    def __call__(self, value: object, path: Path) -> Json | None: ...


OBJECT_TAGS = ("object", "generator", "given", "parameter")
_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)


def encode_constant(value: object, path: Path, extern: Collecting) -> Json | None:
    """Encode a constant of torch, a member of an enum or a named tuple. None for everything else."""
    if isinstance(value, _CONSTANTS):
        return {"$": f"torch.{type(value).__name__}", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"$": "torch.Size", "v": [int(n) for n in value]}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "v": str(value)}
    if isinstance(value, Enum):
        said = value.name if value.name in type(value).__members__ else encode(value.value, path)
        return {"$": "enum", "class": class_name(type(value), path), "v": said}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [encode(one, (*path, key), extern) for key, one in zip(value._fields, value, strict=True)]
        return {"$": "namedtuple", "class": class_name(type(value), path), "v": items}
    return None


def class_name(kind: type, path: Path) -> list[str]:
    """Return module and qualified name of a class. Raises StateError if they do not lead back to it."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the script, in a spawned process
    if loaded_class(module, kind.__qualname__) is not kind:
        raise StateError(
            f"{show(path)}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved, because a "
            "restarted process cannot find this class by its name. Define the class at the top level of its module"
        )
    return [module, kind.__qualname__]


def loaded_class(module: object, name: object) -> type | None:
    """Return the class of this name if its module is imported. No code is run to look it up."""
    found: Any = sys.modules.get(module) if type(module) is str else None
    for part in name.split(".") if type(name) is str else ("",):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def _class_of(reference: dict[str, Any]) -> type:
    """Return the class that a reference names. Raises MismatchError if it is not loaded."""
    module, name = reference["class"]
    if (found := loaded_class(module, name)) is None:
        raise MismatchError(
            f"the checkpoint has an object of type {module}.{name}, and this process has no such class: import "
            f"{module} before restore()"
        )
    return found


def decode_constant(reference: dict[str, Any]) -> Any:
    """Decode what `encode_constant` made. CorruptError for other tags, MismatchError if a class is not loaded."""
    tag, said = reference["$"], reference.get("v")
    for kind in _CONSTANTS:
        if tag == f"torch.{kind.__name__}":
            found = vars(torch).get(said) if type(said) is str else None
            if not isinstance(found, kind):
                raise CorruptError(f"not a {tag}: {said!r:.80}")
            return found
    if tag == "torch.Size" and type(said) is list and all(type(n) is int and 0 <= n < 2**62 for n in said):
        return torch.Size(said)
    if tag == "torch.device" and type(said) is str and re.fullmatch(r"[a-z]{1,20}(:\d{1,4})?", said):
        return torch.device(said)
    if tag == "enum":
        found = _class_of(reference)
        if not issubclass(found, Enum):
            raise CorruptError(f"{reference['class']!r:.200} is not an Enum")
        if type(said) is str and said in found.__members__:
            return found.__members__[said]
        if issubclass(found, Flag) and type(said) is int:
            return found(said)
        raise MismatchError(f"{'.'.join(reference['class'])} has no member {said!r:.80}, which the checkpoint has")
    if tag == "namedtuple":
        found = _class_of(reference)
        if not issubclass(found, tuple) or type(said) is not list or len(getattr(found, "_fields", ())) != len(said):
            raise CorruptError(f"{reference['class']!r:.200} is not a named tuple of what was saved of it")
        return tuple.__new__(found, said)
    raise CorruptError(f"unknown tag {tag!r}: written by a newer version?")


def as_plain(reference: dict[str, Any]) -> Any:
    """Decode for readers that have none of the classes: objects become dicts, members of enums their names."""
    tag = reference.get("$")
    if tag in ("enum", "parameter", "given", "torch.layout", "torch.memory_format"):
        return reference.get("v")
    if tag == "namedtuple":
        return tuple(reference["v"])
    if tag in ("object", "generator"):
        found = [reference[key] for key in ("attributes", "state") if key in reference]
        return found[0] if found else f"<the same object as {reference.get('name')}>"
    return decode_constant(reference)


# -- objects that optimizers keep --


@dataclass
class ObjectsOf:
    """Encodes the objects of one optimizer, and fills or makes them again.

    `params`: by id, the names of its parameters. `early`: names of the objects that there were when it was first read;
    None during that reading. `live`: by name, the objects of the last reading.
    """

    optimizer: torch.optim.Optimizer
    params: Mapping[int, str] = field(default_factory=dict)
    early: set[str] | None = None
    live: dict[str, object] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _bound: set[str] = field(default_factory=set)  # names of objects that can only be filled, never made

    def begin(self, params: Mapping[int, str]) -> None:
        """Begin a reading."""
        self.params, self.live, self._names, self._bound = params, {}, {}, set()

    def end(self) -> None:
        """End a reading that raised nothing."""
        if self.early is None:
            self.early = set(self._bound)

    # -- saving --

    def encode(self, value: object, path: Path, extern: Collecting) -> Json | None:
        """Encode an object that is neither plain nor a constant. None for tensors and arrays."""
        if isinstance(value, Tensor):
            return None if id(value) not in self.params else {"$": "parameter", "v": self.params[id(value)]}
        if isinstance(value, np.ndarray | np.generic):
            return None
        if (known := self._names.get(id(value))) is not None:
            return {"$": "object", "name": known}
        name = show(path)
        if (said := _name_of_given(value)) is not None:
            if "param_groups" not in path:  # a restarted script makes the same groups
                self._bind(name, path, value)
            self.live[name] = value
            return {"$": "given", "name": name, "v": said}
        self._names[id(value)], self.live[name] = name, value
        entries, objects, names, live = len(extern.entries), list(extern.objects), list(self._names), list(self.live)
        try:
            return self._by_attributes(value, path, extern)
        except StateError:
            # Its attributes cannot be saved. Take back what was collected of them, and try its own state_dict().
            del extern.entries[entries:]
            extern.objects = {key: extern.objects[key] for key in objects}
            self._names = {key: self._names[key] for key in names}
            self.live = {key: self.live[key] for key in live}
            target: Any = adapt(value) or value
            if isinstance(value, torch.optim.Optimizer) or not isinstance(target, Stateful):
                raise
        state = encode(target.state_dict(), path, extern)
        if isinstance(value, torch.Generator):
            return {"$": "generator", "name": name, "device": str(value.device), "state": state}
        if (kind := _kind_of_generator(value)) is not None:
            return {"$": "generator", "name": name, "kind": kind, "state": state}
        self._bind(name, path, value)
        return {"$": "object", "name": name, "state": state}

    def _by_attributes(self, value: object, path: Path, extern: Collecting) -> Json:
        kind = type(value)
        if why := self._refusal(kind):
            raise StateError(
                f"{show(path)}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved: {why}. Give "
                "it state_dict() and load_state_dict(), or keep tensors and plain values instead of it"
            )
        name = class_name(kind, path)
        attributes = encode(dict(sorted(_attributes(value).items())), path, extern)
        return {"$": "object", "name": show(path), "class": name, "attributes": attributes}

    def _bind(self, name: str, path: Path, value: object) -> None:
        """Note an object that a restart can only fill. Raises StateError if a restart will not have it."""
        self._bound.add(name)
        if self.early is not None and name not in self.early:
            raise StateError(
                f"{show(path)}: the optimizer made this {type(value).__module__}.{type(value).__qualname__} during the "
                "training, and a restarted process could not make it again. Make it when the optimizer is made, or "
                "before the Checkpointer is created"
            )

    def _refusal(self, kind: type) -> str:
        """Return why objects of a class cannot be made again without running its code, "" if they can."""
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
        """Return True if the package of the optimizer, or of one inside it, defines or imports a class."""
        inner = (one for one in vars(self.optimizer).values() if isinstance(one, torch.optim.Optimizer))
        modules = {base.__module__ for one in (self.optimizer, *inner) for base in type(one).__mro__}
        for module in modules:
            package = module.split(".")[0]
            if package in ("torch", "builtins", "typing", "abc", "collections"):
                continue
            if kind.__module__.split(".")[0] == package:
                return True
            if any(one is kind for one in vars(sys.modules.get(module, object)).values()):
                return True
        return False

    def restoring(self, values: Json) -> RestoredObjects:
        """Return what restores the objects in all that was saved of the optimizer."""
        return RestoredObjects(self, values)

    def target(self, reference: dict[str, Any]) -> object:
        """Return the object to fill: the live one, or a new one of its class. MismatchError if there is none."""
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
                raise MismatchError(f"{name} has a state in the checkpoint, and the optimizer has no such object here")
            return live
        kind = _class_of(reference)
        if why := self._refusal(kind):
            raise MismatchError(f"{name}: a {kind.__module__}.{kind.__qualname__} cannot be made again: {why}")
        return live if type(live) is kind else SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind)


class RestoredObjects:
    """Fills the objects of an optimizer, or makes them again. What was one object becomes one object."""

    def __init__(self, owner: ObjectsOf, values: Json) -> None:
        self._owner = owner
        self._params = {name: number for number, name in owner.params.items()}
        self._defined = {
            one["name"]: one for one in _objects_in(values) if _defines(one) and type(one.get("name")) is str
        }
        self._made: dict[str, object] = {}

    def check(self, values: Json) -> list[str]:
        """Return what differs from the checkpoint. MismatchError or CorruptError if an object cannot be had at all."""
        problems = []
        for one in _objects_in(values):
            tag, name = one["$"], one.get("name")
            if tag == "parameter":
                if type(one.get("v")) is not str or one["v"] not in self._params:
                    raise MismatchError(f"the state refers to a parameter {one.get('v')!r:.200} that is not here")
            elif type(name) is not str or (tag != "given" and name not in self._defined):
                raise CorruptError(f"nothing is stored of the object {name!r:.200}")
            elif tag == "given":
                here = self._owner.live.get(name)
                if here is None:
                    raise MismatchError(f"{name} was {one.get('v')!r:.200} in the checkpoint, and is not here")
                if (now := _name_of_given(here)) != one.get("v"):
                    problems.append(f"{name} was {one.get('v')!r:.200} in the checkpoint and is {now!r:.200} here")
            elif _defines(one):
                self._owner.target(one)
        return problems

    def key(self, data: Json) -> Any:
        """Decode a key of the state."""
        return decode(data, lambda one: self.decode(one) if one["$"] == "parameter" else decode_constant(one))

    def decode(self, reference: dict[str, Any]) -> object:
        """Return what a reference stands for. Objects are filled when the reference with their contents comes."""
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


def _numpy_generator(bits: str) -> np.random.Generator:
    return np.random.Generator(getattr(np.random, bits)(0))


_BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_GENERATORS: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(0),
    "numpy.RandomState": lambda: np.random.RandomState(0),
    **{f"numpy.{name}": functools.partial(_numpy_generator, name) for name in _BITS},
}


def _kind_of_generator(value: object) -> str | None:
    """Return the name of a generator of Python or numpy that can be made again; None for everything else."""
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
    """Return True if a reference has the contents of its object, and does not only repeat it."""
    return "attributes" in reference or "state" in reference


def _objects_in(values: Json) -> list[dict[str, Any]]:
    """Return all references to objects, those inside of others too."""
    found, pending = [], [values]
    while pending:
        value = pending.pop()
        if type(value) is dict and value.get("$") in OBJECT_TAGS:
            found.append(value)
        pending.extend(value.values() if type(value) is dict else value if type(value) is list else ())
    return found


_WITHOUT_STATE = (logging.Logger, re.Pattern, ModuleType)


def _name_of_given(value: object) -> str | None:
    """Return what names a class, a function, a partial call of one, or an object without state. None for the rest."""
    if isinstance(value, functools.partial):
        inner = _name_of_given(value.func)
        return None if inner is None else f"a partial call of {inner}"
    if isinstance(value, _WITHOUT_STATE):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
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
    """Give an object these attributes and no others. None of its code is called."""
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
