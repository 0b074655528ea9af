"""Tensors that torch calls traceable wrapper subclasses, such as Float8 weights and the moments of 8-bit optimizers.

Their `__tensor_flatten__` names the tensors in them and tells their context, all else that they consist of. One is made
again only by its class, if that is imported already and the context is plain: nothing that a file names is ever
imported, and nothing unpickled.
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
    """The `TensorAdapter` for all of them."""

    def owns(self, kind: type) -> bool:
        return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")

    def flatten(self, tensor: Any) -> tuple[Sequence[str], list[Any], Json]:
        attributes, context = tensor.__tensor_flatten__()
        return attributes, [getattr(tensor, attribute) for attribute in attributes], _said(context)

    def check(self, tensor: Any, name: str) -> None:
        attributes, context = tensor.__tensor_flatten__()
        if not all(isinstance(getattr(tensor, attribute), Tensor) for attribute in attributes):
            raise StateError(f"{name}: this {type(tensor).__name__} names something in it that is no tensor")
        if _hides_values(context):
            raise StateError(
                f"{name}: this {type(tensor).__name__} keeps a tensor or an array in its context, which would not be "
                "saved. Let its __tensor_flatten__ name it among its tensors"
            )

    def unflatten(self, kind: Any, form: WrapperForm, inner: Mapping[str, Tensor]) -> Tensor:
        context = _context(form)
        try:
            with torch.no_grad():
                made = kind.__tensor_unflatten__(dict(inner), context, torch.Size(form.size), form.stride)
        except Exception as error:  # the code of others, on what a file says
            raise MismatchError(f"{form.name}: {form.shown} does not take what was saved of it: {error!r}") from error
        if not isinstance(made, Tensor):
            raise MismatchError(f"{form.name}: {form.shown} makes something else of what was saved of it")
        return made


def _said(context: Any) -> Json:
    """As plain values, as far as it consists of them. Of all else what it is: enough to compare, not to make it."""
    try:
        return encode(context, (), _described)
    except StateError:  # nested without end, say
        return _named(context)


def _described(value: object, path: Path) -> Json:
    if isinstance(value, torch.dtype):
        return {"$": "torch.dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"$": "torch.Size", "v": [int(n) for n in value]}
    if isinstance(value, Enum):
        return {**_named(value), "of": value.name}
    if hasattr(value, "__qualname__"):  # a class, a function
        return {**_named(value), "of": f"{value.__module__}.{value.__qualname__}"}
    held = encode(_held(value), (*path, "…"), _described)
    return {**_named(value), "of": held} if held else _named(value)


def _named(value: object) -> dict[str, Json]:
    return {"$": "object", "v": f"{type(value).__module__}.{type(value).__qualname__}"}


def _held(value: object) -> list[Any] | dict[str, Any]:
    """What an object consists of, as far as that can be seen."""
    if isinstance(value, tuple | list | set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return [list(pair) for pair in value.items()]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    slots = [one for kind in type(value).__mro__ for one in getattr(kind, "__slots__", ())]
    return {one: getattr(value, one) for one in slots if hasattr(value, one)} | getattr(value, "__dict__", {})


def _hides_values(context: Any) -> bool:
    """Whether a tensor or an array is among what a context consists of."""
    pending, seen = [context], dict[int, Any]()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor | np.ndarray):
            return True
        if id(value) not in seen and not hasattr(value, "__qualname__"):
            held = _held(value)
            pending += held.values() if isinstance(held, dict) else held
            seen[id(value)] = value
    return False


def _context(form: WrapperForm) -> Any:
    """MismatchError if it is not plain."""

    def extern(reference: Json) -> object:
        said = reference["v"]
        if reference["$"] == "torch.dtype" and isinstance(found := vars(torch).get(text_of(said)), torch.dtype):
            return found
        if reference["$"] == "torch.Size":
            return torch.Size(dims_of(said))
        raise MismatchError(
            f"{form.name}: this {form.shown} cannot be made again, as {said!r:.200} is among what it consists of. "
            "Restore when it is there, and it is filled in place"
        )

    return decode(form.context, extern)
