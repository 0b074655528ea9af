"""The kinds of entries of a state: how each is read, and how it is restored.

Reading returns `StateEntry`s (a name, a live tensor) and plain values. Entries that stay the same from step to step are
cached and only compared by identity, because reading happens between two steps of training. Restoring has two halves.
`prepare` matches every tensor and finds every mismatch before anything is changed. `finish`, after the tensors are
filled, sets plain values and attaches created tensors.

Modules are in `ckpt.core.state.module_node`, optimizers in `ckpt.core.state.optimizer_node`. Adapters have nodes for
the kinds that the core does not know (`ckpt.core.state.adapter`).
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, call, is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ckpt.core.format.saved_nodes import SavedNode
from ckpt.core.format.values import Json, Path, encode, kind_of, show
from ckpt.core.state.names import Names
from ckpt.core.state.placement import Placement
from ckpt.core.state.settings import overridden, scheduler_settings
from ckpt.core.state.sharding import StateEntry, is_dtensor, local
from ckpt.core.state.special_values import ObjectEncoder, encode_constant
from ckpt.core.state.stateful import RNG, Resizable, Stateful
from ckpt.core.state.tensors import dims_of_expansion, from_array, kind_of_tensor, once
from ckpt.core.state.wrappers import inside, is_wrapped, sign, take_apart


@dataclass
class Contents:
    """The contents of a node now. `fixed` is the same object as before if nothing in it changed."""

    fixed: list[StateEntry]
    loose: list[StateEntry] = field(default_factory=list)  # created by each reading
    values: Json = None
    facts: dict[str, Any] = field(default_factory=dict)  # plain values that are part of the layout

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in (*self.fixed, *self.loose)]


_NOTHING: list[StateEntry] = []  # one object, so that an empty list compares as unchanged


class StateNode(Protocol):
    """One entry of the state."""

    path: Path

    @property
    def kind(self) -> str: ...

    def read(self, names: Names) -> Contents:
        """Read the entry. `names`: the known parameters."""

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        """Match the saved tensors with the live ones. Problems are recorded in the placement, not raised."""

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        """Prepare an entry of a state that is exactly as it was saved: its fixed tensors are filled without checking
        each. Return False if the entry needs more than that."""


@runtime_checkable
class SteppedNode(StateNode, Protocol):
    """An entry whose tensors an optimizer changes. `unguarded`: the optimizer's steps run no hooks."""

    unguarded: bool

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...


class Collector:
    """Replaces tensors and arrays in plain values by references.

    objects: encodes the objects of an optimizer; without it, objects raise StateError.
    exact: also keep the type of each tensor, for example Parameter, and raise StateError for other types.
    """

    def __init__(self, objects: ObjectEncoder | None = None, *, exact: bool = False) -> None:
        self._exact = exact
        self.entries: list[StateEntry] = []
        self.objects: dict[str, object] = {}
        self._encoder = objects

    def __call__(self, value: object, path: Path) -> Json | None:
        if not isinstance(value, Tensor | np.ndarray) and (constant := encode_constant(value, path, self)) is not None:
            return constant
        if self._encoder is not None and (found := self._encoder.encode(value, path, self)) is not None:
            return found
        name = show(path)
        if isinstance(value, Tensor):
            expanded = dims_of_expansion(value) if self._encoder is not None else []
            if expanded:
                value = once(value, expanded)
            entries, form = take_apart(StateEntry(name, value))
            self.entries += entries
            self.objects.update((entry.name, value) for entry in entries)
            if form is not None:
                return form.to_json()
            found = {"$": "tensor", "name": name, **(kind_of_tensor(value, path) if self._exact else {})}
            return {**found, "expanded": expanded} if expanded else found
        if not isinstance(value, np.ndarray):
            return None
        tensor, reference = from_array(value, path)
        self.entries.append(StateEntry(name, tensor))
        self.objects[name] = value
        return {**reference, "name": name}


_FORM = attrgetter("shape", "dtype")
_NBYTES, _NUMBER = torch.UntypedStorage.nbytes, 8
_TOGETHER = 256  # tensors checked together, so that torch's data on them stays in the processor's cache


class Places:
    """The values of dicts under some keys, and sizes. Checked at every step, so without Python code for each key."""

    def __init__(self, places: Sequence[tuple[Any, Any, object]] = (), sizes: Sequence[Any] = ()) -> None:
        self._asks = [owner.get if isinstance(owner, dict) else partial(_get, owner) for owner, _, _ in places]
        self._keys, self._values = [key for _, key, _ in places], [value for _, _, value in places]
        self._sized, self._sizes = list(sizes), list(map(len, sizes))

    def differs(self) -> bool:
        """Return True if a key has another value, or a container another size."""
        if list(map(len, self._sized)) != self._sizes:
            return True
        return not all(map(is_, map(call, self._asks, self._keys), self._values))


def _get(members: Any, key: str) -> object:
    """Return a member of a ScriptModule, whose members are not in a dict."""
    try:
        return members[key]
    except KeyError:
        return None


class Memories:
    """The addresses and forms of tensors. Checked at every step, so lookups are cached."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._wrapped = [(t, sign(t)) for t in tensors if is_wrapped(t)]
        if self._wrapped:
            tensors = [one for t in tensors for one in (inside(t) if is_wrapped(t) else [t])]
        plain = [t for t in tensors if not is_dtensor(t)]
        others = [t for t in tensors if is_dtensor(t)]
        self._some = [_Some(plain[i : i + _TOGETHER]) for i in range(0, len(plain), _TOGETHER)]
        self._some += [_SomeDTensors(others[i : i + _TOGETHER]) for i in range(0, len(others), _TOGETHER)]

    def changed(self) -> bool:
        return any(some.changed() for some in self._some) or any(sign(one) != was for one, was in self._wrapped)


class _Some:
    """The addresses and forms of one batch of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        now = self._now()
        self._were, self._forms, self._guards = _places(now), _shapes(now), guards(now)
        self._storages = _storages(now)
        self._sizes = list(map(_NBYTES, self._storages))

    def _now(self) -> Sequence[Tensor]:
        return self._tensors

    def changed(self) -> bool:
        now = self._now()
        if _places(now) != self._were or list(map(_NBYTES, self._storages)) != self._sizes:
            return True
        # Another view of the same memory, or more of it, after `.data = …`, `t_()` or `resize_()`.
        if self._guards is not None and self._guards(*now):
            return False
        if _shapes(now) != self._forms:
            return True
        self._guards = guards(now)  # these guards also depend on torch's modes and on requires_grad
        return False


class _SomeDTensors(_Some):
    def _now(self) -> Sequence[Tensor]:
        return list(map(local, self._tensors))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages that can shrink at their address, each once. `_places` detects another address.

    A storage of one number is left out, because it cannot shrink: a quarter of an AdamW state are such.
    """
    found = dict[int, torch.UntypedStorage]()
    for one in tensors:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse tensors have none
            storage = one.untyped_storage()
            if storage.nbytes() > _NUMBER:
                found[storage._cdata] = storage
    return list(found.values())


def _shapes(tensors: Sequence[Tensor]) -> list[object]:
    asked = (_FORM, Tensor.stride, Tensor.is_conj, Tensor.is_neg)
    return [ask(one) for one in tensors for ask in asked]


def guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function that checks in one call of torch that these tensors have their present shape, strides and
    dtype. It takes a fifth of the time of checking each. Compiled code uses it, and it is private to torch. Return None
    without it."""
    try:
        make = torch._C._dynamo.guards.TensorGuards
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except Exception:  # another version, or tensors that it cannot check
        return None


class StatefulNode:
    """Reads and restores any object with state_dict and load_state_dict."""

    kind = "stateful"

    def __init__(self, path: Path, target: Stateful) -> None:
        self.path, self.target = path, target
        self._said = ""  # the kind of value that it last returned
        self._tensors, self._values = True, None  # whether it had tensors, and its plain values
        # The settings of the script, to report which ones the checkpoint overrides.
        self._settings = scheduler_settings(target) if isinstance(target, LRScheduler) else None

    def read(self, names: Names) -> Contents:
        return self._read(Collector(exact=True))

    def _read(self, collect: Collector) -> Contents:
        values = encode(self.target.state_dict(), self.path, collect)
        self._said, self._tensors, self._values = kind_of(values), bool(collect.entries), values
        return Contents(_NOTHING, collect.entries, values)

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
        elif self._is_alike(saved.values, placement) and (build := self._build(saved, placement)) is not None:

            def finish() -> None:
                self._load(build())
                if self._settings and (text := overridden(self._settings, scheduler_settings(target))):
                    placement.overruled.append(f"{show(self.path)}: {text}")

            placement.finish(self.path, finish, last=last)

    def _build(self, saved: SavedNode, placement: Placement) -> Callable[[], Any] | None:
        """Return a function that builds the state to load. If that is impossible, record a problem and return None."""
        return placement.build(saved.values, like={})

    def _load(self, state: Any) -> None:
        self.target.load_state_dict(state)

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        return False

    def may_have_moments(self) -> bool:
        """Return False if the saved values cannot contain an optimizer's state: a scheduler has only numbers."""
        if isinstance(self.target, torch.optim.Optimizer) or self._tensors:
            return True
        return '"param_groups"' in json.dumps(self._values)

    def _is_alike(self, values: Json, placement: Placement) -> bool:
        """Return True if the saved value is of the kind that the object returns now, usually a dict."""
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
        collect = Collector(exact=True)
        values = encode(self.parent[self.key], self.path, collect)
        return Contents(_NOTHING, collect.entries, values)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        collect = Collector()
        encode(self.parent[self.key], self.path, collect)
        live = {e.name: e for e in collect.entries if isinstance(collect.objects[e.name], Tensor)}
        build = placement.build(saved.values, live)

        def finish() -> None:
            self.parent[self.key] = write_back(self.parent[self.key], build())

        placement.finish(self.path, finish)

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        return False


def write_back(live: Any, value: Any) -> Any:
    """Return `value`, in the user's own containers and arrays if they have the same type."""
    if type(live) is not type(value):
        return value
    if isinstance(live, dict):
        new = {k: write_back(live[k], v) if k in live else v for k, v in value.items()}
        live.clear()
        live.update(new)
        return live
    if isinstance(live, list | deque | tuple):
        items = [*map(write_back, live, value), *list(value)[len(live) :]]
        if isinstance(live, deque) and live.maxlen == value.maxlen:
            live.clear()
            live.extend(items)
            return live
        if isinstance(live, list):
            live[:] = items
            return live
        return tuple(items) if type(live) is tuple else value
    if isinstance(live, set):
        live.clear()
        live.update(value)
        return live
    if isinstance(live, bytearray):
        try:
            live[:] = value
        except BufferError:  # a memoryview of it prevents a change of size
            return value
        return live
    if isinstance(live, np.ndarray) and (live.dtype, live.shape) == (value.dtype, value.shape) and live.flags.writeable:
        np.copyto(live, value)
        return live
    return value
