"""Tensors made of other tensors, such as Float8 weights and the moments of 8-bit optimizers.

What torch calls a traceable wrapper subclass has no memory of its own. Its `__tensor_flatten__` names the tensors in it
and tells its context, all else that it consists of. Those tensors are saved, as `<name>.<attribute>`; a `WrapperForm`
says how they belong together. A wrapper that lives is filled in place. One that nobody has yet is made again by its
class, if that is imported already and the context is plain: nothing that a file names is ever imported, and nothing
unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.core.format.values import Json, Path, decode, encode
from ckpt.core.state.sharding import Replicas, StateEntry, is_dtensor, local, share_of
from ckpt.core.state.tensors import PLAIN, check, memory_of
from ckpt.errors import CorruptError, MismatchError, StateError


@dataclass(frozen=True, slots=True)
class WrapperForm:
    """How a wrapper is made of its tensors. `kind`: module and qualified name of its class; `parts`: by attribute, the
    name of a tensor or the form of a wrapper in it; `whole`: the shape of the DTensor of which it is a rank's share;
    `share`: what this rank has of it, or of the DTensor it belongs to (`share_of`), None where it can be cut anew."""

    name: str
    kind: tuple[str, str]
    context: Json
    size: tuple[int, ...]
    stride: tuple[int, ...]
    parts: tuple[tuple[str, WrapperForm | str], ...]
    whole: tuple[int, ...] | None = None
    share: tuple[tuple[int, ...], ...] | None = None

    @property
    def names(self) -> list[str]:
        """Of all tensors in it."""
        return [name for _, one in self.parts for name in ([one] if isinstance(one, str) else one.names)]

    @property
    def shown(self) -> str:
        return ".".join(self.kind)

    def to_json(self) -> Json:
        parts = [[at, {"$": "tensor", "name": p} if isinstance(p, str) else p.to_json()] for at, p in self.parts]
        whole: dict[str, Json] = {} if self.whole is None else {"whole": list(self.whole)}
        if self.share is not None:
            whole["share"] = [list(runs) for runs in self.share]
        form = {"class": list(self.kind), "context": self.context, "size": list(self.size), "stride": list(self.stride)}
        return {"$": "wrapper", "name": self.name, **form, "tensors": parts, **whole}

    @classmethod
    def from_json(cls, data: Any) -> WrapperForm:
        """CorruptError if it is none."""
        try:
            module, name = map(_text, data["class"])
            whole = None if data.get("whole") is None else _dims(data["whole"])
            share = None if data.get("share") is None else tuple(map(_dims, data["share"]))
            size, stride = _dims(data["size"]), _dims(data["stride"])
            parts = tuple((_text(attribute), _part(one)) for attribute, one in data["tensors"])
            return cls(_text(data["name"]), (module, name), data["context"], size, stride, parts, whole, share)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptError(f"not the form of a tensor that is made of others: {error!r}") from None


def _part(data: Any) -> WrapperForm | str:
    return _text(data["name"]) if data["$"] == "tensor" else WrapperForm.from_json(data)


def _text(data: Any) -> str:
    if type(data) is not str:
        raise TypeError(f"not text: {data!r:.80}")
    return data


def _dims(data: Any) -> tuple[int, ...]:
    if type(data) is not list or not all(type(n) is int and 0 <= n < 2**62 for n in data):
        raise TypeError(f"not a shape: {data!r:.80}")
    return tuple(data)


def is_wrapper(tensor: object) -> bool:
    """Whether this is made of other tensors. A DTensor is not meant: see `ckpt.core.state.sharding`."""
    kind = type(tensor)
    if kind in PLAIN or not _flattens(kind) or is_dtensor(tensor):
        return False
    return isinstance(tensor, Tensor) and not tensor.is_nested


def is_wrapped(tensor: Tensor) -> bool:
    """The same of what this rank has of a tensor."""
    return type(tensor) not in PLAIN and is_wrapper(local(tensor))


def _flattens(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


# -- taking apart --


def take_apart(entry: StateEntry) -> tuple[list[StateEntry], WrapperForm | None]:
    """What is saved of an entry: itself, or the tensors in it, and their form. StateError if they cannot be saved."""
    if not is_wrapped(entry.tensor):
        check(entry.tensor, (entry.name,))
        return [entry], None
    found: list[tuple[str, Tensor, tuple[Tensor, ...]]] = []
    form = _taken(entry.name, entry.tensor, (), found)
    assert isinstance(form, WrapperForm)
    alike = entry.alike if isinstance(entry.alike, Replicas) else None  # else they are this rank's own
    if is_dtensor(beside := entry.alike if not is_dtensor(entry.tensor) else entry.tensor):
        form = replace(form, share=share_of(beside))
    if is_dtensor(entry.tensor) and all(_elements_of(local(entry.tensor), one) for _, one, _ in found):
        alike, form = entry.tensor, replace(form, share=None)  # type: ignore[assignment]
    parts = [StateEntry(n, t, entry.guarded, alike, entry.of, entry, around) for n, t, around in found]
    return parts, form


def take_all_apart(entries: Sequence[StateEntry]) -> tuple[list[StateEntry], list[WrapperForm]]:
    """The same of many."""
    found = [take_apart(entry) for entry in entries]
    return [one for parts, _ in found for one in parts], [form for _, form in found if form is not None]


def _taken(
    name: str, tensor: Tensor, around: tuple[Tensor, ...], found: list[tuple[str, Tensor, tuple[Tensor, ...]]]
) -> WrapperForm | str:
    """Notes the tensors in one, each with those around it."""
    if not is_wrapped(tensor):
        found.append((name, check(tensor, (name,)), around))
        return name
    if is_dtensor(tensor):
        share = _taken(name, local(tensor), (*around, tensor), found)
        assert isinstance(share, WrapperForm)
        return replace(share, whole=tuple(tensor.shape))
    attributes, context, inner = _flat(tensor)
    if not all(isinstance(one, Tensor) for one in inner):
        raise StateError(f"{name}: this {type(tensor).__name__} names something in it that is no tensor")
    if _hides_values(context):
        raise StateError(
            f"{name}: this {type(tensor).__name__} keeps a tensor or an array in its context, which would not be "
            "saved. Let its __tensor_flatten__ name it among its tensors"
        )
    parts = [
        (attribute, _taken(f"{name}.{attribute}", one, (*around, tensor), found))
        for attribute, one in zip(attributes, inner, strict=True)
    ]
    kind = type(tensor).__module__, type(tensor).__qualname__
    return WrapperForm(name, kind, _said(context), tuple(tensor.shape), tensor.stride(), tuple(parts))


def _flat(tensor: Any) -> tuple[Sequence[str], Any, list[Any]]:
    attributes, context = tensor.__tensor_flatten__()
    return attributes, context, [getattr(tensor, attribute) for attribute in attributes]


def _elements_of(whole: Tensor, one: Tensor) -> bool:
    """Whether these are the elements of a wrapper, which lie as its own do: not codes, nor scales."""
    return (one.shape, one.dtype, one.stride()) == (whole.shape, whole.dtype, whole.stride())


def inside(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper is made of in the end."""
    inner = _flat(local(tensor))[2]
    return [one for each in inner for one in (inside(each) if is_wrapped(each) else [each])]


def sign(tensor: Tensor) -> object:
    """Equal while a wrapper consists of the same memory in the same way."""
    attributes, context, inner = _flat(local(tensor))
    parts = [sign(one) if is_wrapped(one) else memory_of(local(one)) or tuple(one.shape) for one in inner]
    return tuple(attributes), _said(context), parts


class Counters:
    """The version counters of a tensor and of the wrappers around it, as one. Torch counts a write where it is made: at
    the wrapper if it comes through that, and then not in the tensor itself."""

    def __init__(self, tensor: Tensor, around: Sequence[Tensor]) -> None:
        self._all = [tensor, *around]

    @property
    def _version(self) -> int:
        return sum(one._version for one in self._all if not one.is_inference())

    def is_inference(self) -> bool:
        return all(one.is_inference() for one in self._all)


# -- contexts --


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
        if reference["$"] == "torch.dtype" and isinstance(found := vars(torch).get(_text(said)), torch.dtype):
            return found
        if reference["$"] == "torch.Size":
            return torch.Size(_dims(said))
        raise MismatchError(
            f"{form.name}: this {form.shown} cannot be made again, as {said!r:.200} is among what it consists of. "
            "Restore when it is there, and it is filled in place"
        )

    return decode(form.context, extern)


# -- back again --


def differs(saved: WrapperForm | None, live: WrapperForm | None, name: str) -> str:
    """What is wrong if one is to become the other, "" if nothing is."""
    if saved is None or live is None:
        if saved is live:
            return ""
        kinds = [f"a {form.shown}" if form else "a plain tensor" for form in (saved, live)]
        return f"{name} is {kinds[0]} in the checkpoint and {kinds[1]} here"
    if saved.kind != live.kind:
        return f"{name} is a {saved.shown} in the checkpoint and a {live.shown} here"
    here, there = [[attribute for attribute, _ in form.parts] for form in (live, saved)]
    if here != there:
        return f"{name} consists of {', '.join(there)} in the checkpoint and of {', '.join(here)} here"
    if saved.context != live.context:
        says = f"says {saved.context!r:.200} in the checkpoint and {live.context!r:.200} here"
        return f"{name}: its {live.shown} {says}: set it as it was, and restore again"
    shape, there_shape = live.whole or live.size, saved.whole or saved.size
    if shape != there_shape:
        return f"{name} has shape {list(there_shape)} in the checkpoint and {list(shape)} here"
    if saved.share != live.share:
        return cut_otherwise(saved)
    for (_, theirs), (_, ours) in zip(saved.parts, live.parts, strict=True):
        inner = [one if isinstance(one, WrapperForm) else None for one in (theirs, ours)]
        if problem := differs(inner[0], inner[1], ours if isinstance(ours, str) else ours.name):
            return problem
    return ""


def cut_otherwise(saved: WrapperForm) -> str:
    """What to say where this rank has another share of the whole."""
    return (
        f"{saved.name}: a share of a {saved.shown}, and this rank has another one here. Only its class knows how "
        "to cut it anew: restore on as many ranks as saved it, in the same mesh"
    )


def remake(form: WrapperForm, tensors: Mapping[str, Tensor]) -> Tensor:
    """A wrapper around these tensors, which may be empty yet. MismatchError if its class is not there, or makes another
    tensor of them."""
    kind: Any = _class_of(form)
    context = _context(form)
    inner = {at: tensors[one] if isinstance(one, str) else remake(one, tensors) for at, one in form.parts}
    try:
        with torch.no_grad():
            made = kind.__tensor_unflatten__(dict(inner), context, torch.Size(form.size), form.stride)
        again = _taken(form.name, made, (), [])
        whole = again == form and all(_same(a, b) for a, b in zip(inner.values(), _flat(made)[2], strict=True))
    except Exception as error:  # the code of others, on what a file says
        raise MismatchError(f"{form.name}: {form.shown} does not take what was saved of it: {error!r}") from error
    if not whole:
        raise MismatchError(f"{form.name}: {form.shown} makes something else of what was saved of it")
    assert isinstance(made, Tensor)
    return made


def _same(wanted: Tensor, found: Tensor) -> bool:
    if is_wrapper(wanted):
        return sign(wanted) == sign(found)
    return found is wanted or memory_of(wanted) == memory_of(found)


def _class_of(form: WrapperForm) -> type:
    """The class, if somebody has imported it. Attributes are looked up without running anything for it."""
    module, name = form.kind
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type) and issubclass(found, Tensor) and _flattens(found):
        return found
    raise MismatchError(
        f"{form.name} is a {form.shown} in the checkpoint, and there is no such class here: import {module} first, or "
        "restore when the tensor is there, and it is filled in place"
    )
