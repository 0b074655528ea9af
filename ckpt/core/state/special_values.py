"""Encodes values that are neither plain nor tensors: constants of torch, members of enums and named tuples.

A class named in a file is never imported. An adapter encodes and restores objects of other classes, if one exists.
"""

from __future__ import annotations

import re
import sys
from enum import Enum, Flag
from typing import Any, Protocol

import torch

from ckpt.core.format.values import Json, Path, encode, show
from ckpt.errors import CorruptError, MismatchError, StateError


class Collecting(Protocol):
    """Encodes values that are not plain. `entries` and `objects` collect the tensors and arrays that it finds."""

    entries: list[Any]
    objects: dict[str, object]

    def __call__(self, value: object, path: Path) -> Json | None: ...


class ObjectEncoder(Protocol):
    """Encodes objects that are not constants."""

    def encode(self, value: object, path: Path, extern: Collecting) -> Json | None: ...


class ObjectDecoder(Protocol):
    """Restores objects from all values that were saved with them."""

    def check(self, values: Json) -> list[str]:
        """Return the differences. Raise MismatchError or CorruptError if an object cannot be restored."""

    def key(self, data: Json) -> Any: ...

    def decode(self, reference: dict[str, Any]) -> object: ...


OBJECT_TAGS = ("object", "generator", "given", "parameter")
_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)


def encode_constant(value: object, path: Path, extern: Collecting) -> Json | None:
    """Encode a constant of torch, a member of an enum or a named tuple. Return None for everything else."""
    if isinstance(value, _CONSTANTS):
        return {"$": f"torch.{type(value).__name__}", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"$": "torch.Size", "v": [int(n) for n in value]}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "v": str(value)}
    if isinstance(value, Enum):
        member = value.name if value.name in type(value).__members__ else encode(value.value, path)
        return {"$": "enum", "class": class_name(type(value), path), "v": member}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [encode(one, (*path, key), extern) for key, one in zip(value._fields, value, strict=True)]
        return {"$": "namedtuple", "class": class_name(type(value), path), "v": items}
    return None


def class_name(kind: type, path: Path) -> list[str]:
    """Return module and qualified name of a class. Raise StateError if the class cannot be found by them."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the script, in a spawned process
    if loaded_class(module, kind.__qualname__) is not kind:
        raise StateError(
            f"{show(path)}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved, because a "
            "restarted process cannot find this class by its name. Define the class at the top level of its module"
        )
    return [module, kind.__qualname__]


def loaded_class(module: object, name: object) -> type | None:
    """Return the class of this name if its module is imported. Looking it up runs no code."""
    found: Any = sys.modules.get(module) if type(module) is str else None
    for part in name.split(".") if type(name) is str else ("",):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def class_of(reference: dict[str, Any]) -> type:
    """Return the class that a reference names. Raise MismatchError if it is not loaded."""
    module, name = reference["class"]
    if (found := loaded_class(module, name)) is None:
        raise MismatchError(
            f"the checkpoint has an object of type {module}.{name}, and this process has no such class: import "
            f"{module} before restore()"
        )
    return found


def decode_constant(reference: dict[str, Any]) -> Any:
    """Decode a result of `encode_constant`. Raise CorruptError for other tags, MismatchError for unknown classes."""
    tag, value = reference["$"], reference.get("v")
    for kind in _CONSTANTS:
        if tag == f"torch.{kind.__name__}":
            found = vars(torch).get(value) if type(value) is str else None
            if not isinstance(found, kind):
                raise CorruptError(f"not a {tag}: {value!r:.80}")
            return found
    if tag == "torch.Size" and type(value) is list and all(type(n) is int and 0 <= n < 2**62 for n in value):
        return torch.Size(value)
    if tag == "torch.device" and type(value) is str and re.fullmatch(r"[a-z]{1,20}(:\d{1,4})?", value):
        return torch.device(value)
    if tag == "enum":
        found = class_of(reference)
        if not issubclass(found, Enum):
            raise CorruptError(f"{reference['class']!r:.200} is not an Enum")
        if type(value) is str and value in found.__members__:
            return found.__members__[value]
        if issubclass(found, Flag) and type(value) is int:
            return found(value)
        raise MismatchError(f"{'.'.join(reference['class'])} has no member {value!r:.80}, which the checkpoint has")
    if tag == "namedtuple":
        found = class_of(reference)
        if not issubclass(found, tuple) or type(value) is not list or len(getattr(found, "_fields", ())) != len(value):
            raise CorruptError(f"{reference['class']!r:.200} is not a named tuple with the saved fields")
        return tuple.__new__(found, value)
    raise CorruptError(f"unknown tag {tag!r}: written by a newer version?")


def as_plain(reference: dict[str, Any]) -> Any:
    """Decode for readers without the classes: objects become dicts, members of enums become names."""
    tag = reference.get("$")
    if tag in ("enum", "parameter", "given", "torch.layout", "torch.memory_format"):
        return reference.get("v")
    if tag == "namedtuple":
        return tuple(reference["v"])
    if tag in ("object", "generator"):
        found = [reference[key] for key in ("attributes", "state") if key in reference]
        return found[0] if found else f"<the same object as {reference.get('name')}>"
    return decode_constant(reference)
