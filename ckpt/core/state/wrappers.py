"""Defines adapters for special objects and tensors, and takes apart tensors that are made of other tensors.

Adapters read everything in a state that is not a dense tensor, a DTensor, an ordinary module or optimizer, a Stateful
object or a plain value. There are two kinds:

- **For an object** (`StateAdapter`): flat shards, and modules and optimizers whose own `state_dict()` or loader does
  more than torch's. An adapter is a class of nodes. `owns(value)` claims an object, and its node (`StateNode`) reads
  and restores it.
- **For a tensor** (`TensorAdapter`): subclasses that are made of other tensors, for example Float8 weights and the
  moments of 8-bit optimizers. `owns(kind)` claims a class, `flatten` takes one tensor apart by one level, and
  `unflatten` builds it again. This module and `ckpt.core.state.placement` handle names, DTensors around or inside
  the tensor, comparison and filling.

If several adapters own an object, the first is used. The core never imports an adapter. `ckpt.adapters` registers the
existing ones, and every reader of a state (`ckpt.checkpointer`, the integrations) imports that package. Registration is
global, because a class means the same in every state of a process.

A wrapper tensor has no memory of its own. The tensors in it are saved as `<name>.<attribute>`, and a `WrapperForm`
describes how they belong together. A live wrapper is filled in place. If there is none, a new wrapper is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ckpt.core.format.values import Json, Path
from ckpt.core.state.sharding import Replicas, StateEntry, is_dtensor, local, share_of
from ckpt.core.state.tensors import PLAIN, check, loaded_class, memory_of
from ckpt.errors import CorruptError, MismatchError

if TYPE_CHECKING:
    from ckpt.core.state.nodes import StateNode


class StateAdapter(Protocol):
    """A class of nodes. Each node reads and restores one object that the class owns."""

    def __call__(self, path: Path, value: Any, /) -> StateNode: ...

    def owns(self, value: object, /) -> bool: ...


class TensorAdapter(Protocol):
    """Takes tensors of some subclasses apart, by one level, and builds them again."""

    def owns(self, kind: type, /) -> bool:
        """Return True if tensors of this class are made of other tensors."""

    def flatten(self, tensor: Tensor, /) -> tuple[Sequence[str], list[Any], Json]:
        """Return the attributes that hold inner tensors, these tensors, and all other contents as plain values."""

    def check(self, tensor: Tensor, name: str, /) -> None:
        """Raise StateError if a part of the tensor would be lost."""

    def unflatten(self, kind: type, form: WrapperForm, inner: Mapping[str, Tensor], /) -> Tensor:
        """Build a tensor of that class around the inner tensors. Raise MismatchError if it cannot be built."""


objects: list[StateAdapter] = []
tensors: list[TensorAdapter] = []


def adapter_of(value: object) -> StateAdapter | None:
    """Return the adapter that owns an object, or None if the core reads the object itself."""
    return next((one for one in objects if one.owns(value)), None)


# -- wrapper tensors --


@dataclass(frozen=True, slots=True)
class WrapperForm:
    """How a wrapper is made of its tensors.

    `kind`: the module and qualified name of its class. `parts`: for each attribute, the name of a tensor or the form of
    an inner wrapper. `whole`: the shape of the DTensor, if the wrapper is a rank's shard of one. `share`: this rank's
    indices (`share_of`) in that DTensor, or in the one it belongs to; None if it can be sharded again.
    """

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
        """Return the names of all tensors in the wrapper."""
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
        """Decode a form. Raise CorruptError if the data is not a form."""
        try:
            module, name = map(text_of, data["class"])
            whole = None if data.get("whole") is None else dims_of(data["whole"])
            share = None if data.get("share") is None else tuple(map(dims_of, data["share"]))
            size, stride = dims_of(data["size"]), dims_of(data["stride"])
            parts = tuple((text_of(attribute), _part(one)) for attribute, one in data["tensors"])
            return cls(text_of(data["name"]), (module, name), data["context"], size, stride, parts, whole, share)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptError(f"not the form of a wrapper tensor: {error!r}") from None


def _part(data: Any) -> WrapperForm | str:
    return text_of(data["name"]) if data["$"] == "tensor" else WrapperForm.from_json(data)


def text_of(data: Any) -> str:
    if type(data) is not str:
        raise TypeError(f"not text: {data!r:.80}")
    return data


def dims_of(data: Any) -> tuple[int, ...]:
    if type(data) is not list or not all(type(n) is int and 0 <= n < 2**62 for n in data):
        raise TypeError(f"not a shape: {data!r:.80}")
    return tuple(data)


def is_wrapped(tensor: Tensor) -> bool:
    """Return True if this rank's part of a tensor is a wrapper. A DTensor alone is not a wrapper."""
    if type(tensor) in PLAIN or type(shard := local(tensor)) in PLAIN:
        return False
    return _adapter_of(type(shard)) is not None and not (is_dtensor(shard) or shard.is_nested)


def _adapter_of(kind: type) -> TensorAdapter | None:
    return next((one for one in tensors if one.owns(kind)), None)


def _owner_of(tensor: Tensor) -> TensorAdapter:
    adapter = _adapter_of(type(tensor))
    assert adapter is not None
    return adapter


# -- taking apart --


def take_apart(entry: StateEntry) -> tuple[list[StateEntry], WrapperForm | None]:
    """Return the entries to save (the entry or its inner tensors) and the form. Raise StateError if impossible."""
    if not is_wrapped(entry.tensor):
        check(entry.tensor, (entry.name,))
        return [entry], None
    found: list[tuple[str, Tensor, tuple[Tensor, ...]]] = []
    form = _taken(entry.name, entry.tensor, (), found)
    assert isinstance(form, WrapperForm)
    alike = entry.alike if isinstance(entry.alike, Replicas) else None  # None: they belong to this rank alone
    if is_dtensor(beside := entry.alike if not is_dtensor(entry.tensor) else entry.tensor):
        form = replace(form, share=share_of(beside))
    # Inner tensors with the layout of the whole wrapper are sharded like the wrapper. Codes and scales are not.
    if is_dtensor(entry.tensor) and all(_layout(one) == _layout(local(entry.tensor)) for _, one, _ in found):
        alike, form = entry.tensor, replace(form, share=None)  # type: ignore[assignment]
    parts = [StateEntry(n, t, entry.guarded, alike, entry.of, entry, around) for n, t, around in found]
    return parts, form


def take_all_apart(entries: Sequence[StateEntry]) -> tuple[list[StateEntry], list[WrapperForm]]:
    """Call `take_apart` for each entry. Return all entries to save, and all forms."""
    found = [take_apart(entry) for entry in entries]
    return [one for parts, _ in found for one in parts], [form for _, form in found if form is not None]


def _taken(
    name: str, tensor: Tensor, around: tuple[Tensor, ...], found: list[tuple[str, Tensor, tuple[Tensor, ...]]]
) -> WrapperForm | str:
    """Take a tensor apart and append its inner tensors, each with the wrappers around it."""
    if not is_wrapped(tensor):
        found.append((name, check(tensor, (name,)), around))
        return name
    if is_dtensor(tensor):
        share = _taken(name, local(tensor), (*around, tensor), found)
        assert isinstance(share, WrapperForm)
        return replace(share, whole=tuple(tensor.shape))
    adapter = _owner_of(tensor)
    adapter.check(tensor, name)
    attributes, inner, context = adapter.flatten(tensor)
    parts = [
        (attribute, _taken(f"{name}.{attribute}", one, (*around, tensor), found))
        for attribute, one in zip(attributes, inner, strict=True)
    ]
    kind = type(tensor).__module__, type(tensor).__qualname__
    return WrapperForm(name, kind, context, tuple(tensor.shape), tensor.stride(), tuple(parts))


def _layout(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.stride()


def inside(tensor: Tensor) -> list[Tensor]:
    """Return the innermost tensors of a wrapper."""
    inner = _owner_of(local(tensor)).flatten(local(tensor))[1]
    return [one for each in inner for one in (inside(each) if is_wrapped(each) else [each])]


def sign(tensor: Tensor) -> object:
    """Return a key that is equal as long as a wrapper consists of the same memory in the same way."""
    attributes, inner, context = _owner_of(local(tensor)).flatten(local(tensor))
    parts = [sign(one) if is_wrapped(one) else memory_of(local(one)) or tuple(one.shape) for one in inner]
    return tuple(attributes), context, parts


class Counters:
    """The sum of the version counters of a tensor and of the wrappers around it. Torch counts a write through a wrapper
    only at the wrapper, not in the inner tensor."""

    def __init__(self, tensor: Tensor, around: Sequence[Tensor]) -> None:
        self._all = [tensor, *around]

    @property
    def _version(self) -> int:
        return sum(one._version for one in self._all if not one.is_inference())

    def is_inference(self) -> bool:
        return all(one.is_inference() for one in self._all)


# -- back again --


def differs(saved: WrapperForm | None, live: WrapperForm | None, name: str) -> str:
    """Return the difference between two forms, or "" if the live wrapper can take the saved one."""
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
        contexts = f"has settings {saved.context!r:.200} in the checkpoint and {live.context!r:.200} here"
        return f"{name}: its {live.shown} {contexts}: create it with the saved settings and restore again"
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
    """Return a description of a saved shard that this rank cannot take."""
    return (
        f"{saved.name}: this rank has a different share of the {saved.shown} than was saved. Only its class knows "
        "how to shard it again: restore on the same number of ranks, with the same mesh"
    )


def remake(form: WrapperForm, parts: Mapping[str, Tensor]) -> Tensor:
    """Build a wrapper around these (empty) tensors. Raise MismatchError if that fails or its class is missing."""
    kind = loaded_class(*form.kind)
    adapter = _adapter_of(kind) if kind is not None and issubclass(kind, Tensor) else None
    if kind is None or adapter is None:
        raise MismatchError(
            f"{form.name} is a {form.shown} in the checkpoint, but this process has no such class: import "
            f"{form.kind[0]} first, or restore when the tensor exists, to fill it in place"
        )
    inner = {at: parts[one] if isinstance(one, str) else remake(one, parts) for at, one in form.parts}
    made = adapter.unflatten(kind, form, inner)
    try:
        again = _taken(form.name, made, (), [])
        whole = again == form and all(
            _same(a, b) for a, b in zip(inner.values(), _owner_of(made).flatten(made)[1], strict=True)
        )
    except Exception as error:  # code of other libraries, which may raise any error on data from a file
        raise MismatchError(f"{form.name}: {form.shown} cannot be created from its saved parts: {error!r}") from error
    if not whole:
        raise MismatchError(f"{form.name}: {form.shown} creates a different tensor from its saved parts")
    return made


def _same(wanted: Tensor, found: Tensor) -> bool:
    if is_wrapped(wanted):
        return sign(wanted) == sign(found)
    return found is wanted or memory_of(wanted) == memory_of(found)
