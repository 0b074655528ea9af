"""Reads and creates traceable wrapper subclasses of torch, for example Float8 weights and moments of 8-bit optimizers.

`__tensor_flatten__` of a wrapper returns the names of its inner tensors, and a context with everything else. A restore
creates a wrapper only if its class is already imported and its context is plain. It never imports anything that a file
names, and never unpickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.core.format.values import Json, Path, decode, encode
from ckpt.core.state.wrappers import WrapperForm, dims_of, text_of
from ckpt.errors import MismatchError, StateError


class WrapperSubclasses:
    """The `TensorAdapter` for all traceable wrapper subclasses."""

    def owns(self, kind: type) -> bool:
        return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")

    def flatten(self, tensor: Any) -> tuple[Sequence[str], list[Any], Json]:
        attributes, context = tensor.__tensor_flatten__()
        return attributes, [getattr(tensor, attribute) for attribute in attributes], _as_json(context)

    def check(self, tensor: Any, name: str) -> None:
        attributes, context = tensor.__tensor_flatten__()
        if not all(isinstance(getattr(tensor, attribute), Tensor) for attribute in attributes):
            raise StateError(f"{name}: this {type(tensor).__name__} lists an attribute that is not a tensor")
        if _hides_values(context):
            raise StateError(
                f"{name}: this {type(tensor).__name__} keeps a tensor or an array in its context, which would not be "
                "saved. Add it to the tensors that its __tensor_flatten__ returns"
            )

    def unflatten(self, kind: Any, form: WrapperForm, inner: Mapping[str, Tensor]) -> Tensor:
        context = _context(form)
        try:
            with torch.no_grad():
                made = kind.__tensor_unflatten__(dict(inner), context, torch.Size(form.size), form.stride)
        except Exception as error:  # code of other libraries, which may raise any error on data from a file
            raise MismatchError(f"{form.name}: {form.shown} does not accept its saved tensors: {error!r}") from error
        if not isinstance(made, Tensor):
            raise MismatchError(f"{form.name}: {form.shown} does not return a tensor for its saved tensors")
        return made


def _as_json(context: Any) -> Json:
    """Return a context as plain values if possible. Describe other values by text, which suffices to compare contexts,
    but not to create them."""
    try:
        return encode(context, (), _described)
    except StateError:  # for example, a value that contains itself
        return _named(context)


def _described(value: object, path: Path) -> Json:
    if isinstance(value, torch.dtype):
        return {"$": "torch.dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"$": "torch.Size", "v": [int(n) for n in value]}
    if isinstance(value, Enum):
        return {**_named(value), "of": value.name}
    if hasattr(value, "__qualname__"):  # for example, a class or a function
        return {**_named(value), "of": f"{value.__module__}.{value.__qualname__}"}
    parts = encode(_parts_of(value), (*path, "…"), _described)
    return {**_named(value), "of": parts} if parts else _named(value)


def _named(value: object) -> dict[str, Json]:
    return {"$": "object", "v": f"{type(value).__module__}.{type(value).__qualname__}"}


def _parts_of(value: object) -> list[Any] | dict[str, Any]:
    """Return the values inside an object: its items or its attributes."""
    if isinstance(value, tuple | list | set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return [list(pair) for pair in value.items()]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    slots = [one for kind in type(value).__mro__ for one in getattr(kind, "__slots__", ())]
    return {one: getattr(value, one) for one in slots if hasattr(value, one)} | getattr(value, "__dict__", {})


def _hides_values(context: Any) -> bool:
    """Return True if a context contains a tensor or an array."""
    pending, seen = [context], dict[int, Any]()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor | np.ndarray):
            return True
        if id(value) not in seen and not hasattr(value, "__qualname__"):
            parts = _parts_of(value)
            pending += parts.values() if isinstance(parts, dict) else parts
            seen[id(value)] = value
    return False


def _context(form: WrapperForm) -> Any:
    """Decode the context. Raise MismatchError if it is not plain."""

    def extern(reference: Json) -> object:
        value = reference["v"]
        if reference["$"] == "torch.dtype" and isinstance(found := vars(torch).get(text_of(value)), torch.dtype):
            return found
        if reference["$"] == "torch.Size":
            return torch.Size(dims_of(value))
        raise MismatchError(
            f"{form.name}: this {form.shown} cannot be created again, because it contains {value!r:.200}. "
            "Create it before the restore, which then fills it in place"
        )

    return decode(form.context, extern)
