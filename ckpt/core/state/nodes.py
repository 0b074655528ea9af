"""The entries of a state: how each kind is read, and how it is restored.

`StateNode.read` returns `Contents`: named live tensors (`StateEntry`) and plain values. Tensors that stay the same from
step to step are cached, and only compared by identity and address (`Places`, `Memories`), because reading happens
between two steps of training. Restoring has two halves. `prepare` matches every tensor and finds every mismatch before
anything is changed. It also registers work that runs after the tensors are filled, for example to set plain values.

This module has nodes for modules, plain values and objects with a `state_dict()`, and gives random number generators
and gradient scalers a `state_dict()`. Optimizers are in `ckpt.core.state.optimizer_node`. Adapters have nodes for other
kinds (`ckpt.core.state.wrappers`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, call, is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ckpt.core.format.values import Json, Path, SavedNode, encode, kind_of, show
from ckpt.core.state.placement import Placement, facts_of, matching
from ckpt.core.state.sharding import (
    NamedModule,
    Names,
    Replicas,
    StateEntry,
    is_dtensor,
    local,
    named_modules,
    replicated_by_ddp,
    reshard,
    storage_of,
    unwrap,
)
from ckpt.core.state.tensors import (
    ObjectEncoder,
    device_in_use,
    dims_of_expansion,
    encode_constant,
    from_array,
    kind_of_tensor,
    once,
)
from ckpt.core.state.wrappers import WrapperForm, inside, is_wrapped, sign, take_apart
from ckpt.errors import CorruptError, StateError


@dataclass
class Contents:
    """The current contents of a node. `fixed` is the same object as in the last reading if no entry has changed."""

    fixed: list[StateEntry]
    loose: list[StateEntry] = field(default_factory=list)  # tensors that each reading creates
    values: Json = None
    facts: dict[str, Any] = field(default_factory=dict)  # plain values that are part of the layout

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in (*self.fixed, *self.loose)]


_NOTHING: list[StateEntry] = []  # one object, so that an empty list compares as unchanged


class StateNode(ABC):
    """One entry of the state.

    `optimizer`: the optimizer whose steps change its tensors. `unguarded`: True if these steps run no hooks.
    """

    optimizer: torch.optim.Optimizer | None = None
    unguarded = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return the kind of the entry, as checkpoints name it."""

    @abstractmethod
    def read(self, names: Names) -> Contents:
        """Read the entry. `names`: the known parameters."""

    @abstractmethod
    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        """Match the saved tensors with the live ones. Record problems in the placement instead of raising them."""

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        """Prepare an entry whose state is exactly as it was saved, by filling its fixed tensors without checking each
        one. Return False if the entry needs more work."""
        return False


class Collector:
    """Replaces tensors and arrays in plain values by references.

    objects: encodes the objects of an optimizer; without it, objects raise StateError
    exact: also record the type of each tensor, for example Parameter, and raise StateError for other types
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


# -- is it unchanged? --


_FORM = attrgetter("shape", "dtype")
_NBYTES, _NUMBER = torch.UntypedStorage.nbytes, 8
_TOGETHER = 256  # tensors checked together, so that their torch objects stay in the processor's cache


class Places:
    """Known values of dicts, and known sizes. Every step compares them, so no Python code runs for each key."""

    def __init__(self, places: Sequence[tuple[Any, Any, object]] = (), sizes: Sequence[Any] = ()) -> None:
        self._asks = [owner.get if isinstance(owner, dict) else partial(_get, owner) for owner, _, _ in places]
        self._keys, self._values = [key for _, key, _ in places], [value for _, _, value in places]
        self._sized, self._sizes = list(sizes), list(map(len, sizes))

    def differs(self) -> bool:
        """Return True if a key's value or a container's size has changed."""
        if list(map(len, self._sized)) != self._sizes:
            return True
        return not all(map(is_, map(call, self._asks, self._keys), self._values))


def _get(members: Any, key: str) -> object:
    """Return a member, or None. A ScriptModule's members are not in a dict, so `members` may lack get()."""
    try:
        return members[key]
    except KeyError:
        return None


class Memories:
    """The addresses and forms of tensors. All lookups are cached, because every step checks them."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._wrapped = [(t, sign(t)) for t in tensors if is_wrapped(t)]
        if self._wrapped:
            tensors = [one for t in tensors for one in (inside(t) if is_wrapped(t) else [t])]
        self._some = [
            _Some(some[i : i + _TOGETHER], dtensors)
            for dtensors in (False, True)
            if (some := [t for t in tensors if is_dtensor(t) is dtensors])
            for i in range(0, len(some), _TOGETHER)
        ]

    def changed(self) -> bool:
        return any(some.changed() for some in self._some) or any(sign(one) != was for one, was in self._wrapped)


class _Some:
    """The addresses and forms of one batch of tensors. `dtensors`: all of them are DTensors."""

    def __init__(self, tensors: Sequence[Tensor], dtensors: bool) -> None:
        self._tensors, self._dtensors = tensors, dtensors
        now = self._now()
        self._were, self._forms, self._guards = list(map(Tensor.data_ptr, now)), _shapes(now), guards(now)
        self._storages = _storages(now)
        self._sizes = list(map(_NBYTES, self._storages))

    def _now(self) -> Sequence[Tensor]:
        return list(map(local, self._tensors)) if self._dtensors else self._tensors

    def changed(self) -> bool:
        now = self._now()
        if list(map(Tensor.data_ptr, now)) != self._were or list(map(_NBYTES, self._storages)) != self._sizes:
            return True
        # After `.data = …`, `t_()` or `resize_()`, a tensor may view the same memory differently, or more of it.
        if self._guards is not None and self._guards(*now):
            return False
        if _shapes(now) != self._forms:
            return True
        self._guards = guards(now)  # rebuilt, because these guards also depend on torch's modes and on requires_grad
        return False


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages that can shrink without a new address. All other changes show in the addresses.

    A storage of a single number is omitted because it cannot shrink. In an AdamW state, this is a quarter of them.
    """
    found = dict[int, torch.UntypedStorage]()
    for one in tensors:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse tensors have no storage
            storage = one.untyped_storage()
            if storage.nbytes() > _NUMBER:
                found[storage._cdata] = storage
    return list(found.values())


def _shapes(tensors: Sequence[Tensor]) -> list[object]:
    asked = (_FORM, Tensor.stride, Tensor.is_conj, Tensor.is_neg)
    return [ask(one) for one in tensors for ask in asked]


def guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function that checks in one call of torch that these tensors have their present shape, strides and
    dtype. It takes a fifth of the time of separate checks. Compiled code uses it, and it is private to torch. Return
    None if torch lacks it."""
    try:
        make = torch._C._dynamo.guards.TensorGuards
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except Exception:  # another version of torch, or tensors that it cannot check
        return None


# -- modules --


TWO_TENSORS = (
    "two tensors of the module get this name, so one of them would be lost. Rename one of them; wrappers such as "
    "torch.compile's add nothing to the names of the tensors in them"
)


class ModuleNode(StateNode):
    """Reads and restores the parameters and persistent buffers of an `nn.Module`, in place, without calling the
    module's own code. An adapter reads any other entries of its `state_dict()`."""

    def __init__(self, path: Path, module: nn.Module) -> None:
        super().__init__(path)
        self.whole, self.module = module, unwrap(module)  # `module` identifies the node, with or without wrappers
        self._replicas: dict[int, Replicas] = {}
        self._there, self._memories = Places(), Memories()
        self._piece: Contents | None = None
        self._forms: dict[str, WrapperForm] = {}  # forms of the wrapper tensors, by name

    @property
    def kind(self) -> str:
        return "module"

    def read(self, names: Names) -> Contents:
        if self._piece is None:
            reshard(self.whole)
        if self._piece is None or self.changed():
            self._piece = None  # if reading fails midway, the next call must read again
            self._piece = self._read(list(named_modules(self.whole)))
        return self._piece

    def changed(self) -> bool:
        """Return True if tensors were replaced or moved since the last reading. Reshard first if necessary."""
        if not (self._there.differs() or self._memories.changed()):
            return False
        reshard(self.whole)
        return self._there.differs() or self._memories.changed()

    def _read(self, modules: Sequence[NamedModule]) -> Contents:
        owners: list[dict[str, Any]] = []
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        children: list[tuple[dict[str, Any], str, nn.Module | None]] = []  # child modules, and tensors that are None
        self._there, self._memories = Places(), Memories()
        self._replicas = replicated_by_ddp(self.whole)
        live: dict[str, tuple[list[StateEntry], WrapperForm | None]] = {}
        for prefix, _, module in modules:
            members: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            owners += members
            children += [(module._modules, key, child) for key, child in module._modules.items()]
            for owner in members[1:]:
                for key, tensor in owner.items():
                    name = self._saved_as(f"{prefix}.{key}" if prefix else key)
                    if name is None or key in module._non_persistent_buffers_set:
                        continue
                    if tensor is None:  # the user may set it later
                        children.append((owner, key, None))
                        continue
                    if name in live and not is_one(live[name][0][0].owner.tensor, tensor):
                        raise StateError(f"{self._name(name)}: {TWO_TENSORS}")
                    live[name] = take_apart(self._entry(name, tensor))
                    places.append((owner, key, tensor))
        self._there, self._memories = Places([*children, *places], owners), Memories([t for _, _, t in places])
        self._forms = {name: form for name, (_, form) in live.items() if form is not None}
        return Contents([e for entries, _ in live.values() for e in entries], facts=facts_of(self._forms.values()))

    def _saved_as(self, name: str) -> str | None:
        """Return the name of a tensor in the checkpoint. Return None if it is not saved directly."""
        return name

    def _entry(self, name: str, tensor: Tensor) -> StateEntry:
        replicas = self._replicas.get(id(tensor))
        return StateEntry(self._name(name), tensor, isinstance(tensor, nn.Parameter), replicas)

    def _name(self, key: str) -> str:
        return show((*self.path, key))

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        own = {entry.name: entry for entry in self.read(Names()).fixed}
        names = placement.compare(self.path, saved.names, own)
        for name in matching(names, own, saved.facts, saved.names, placement):
            placement.fill(name, own[name])

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        return True


def memory_id(tensor: Tensor) -> object:
    """Return a key that is equal for two tensors in the same storage."""
    return storage_of(tensor) or id(tensor)


def view_id(tensor: Tensor) -> object:
    """Return a key that is equal for two equal views of the same storage."""
    if (memory := memory_id(tensor)) == id(tensor):
        return memory
    return memory, local(tensor).storage_offset(), tensor.shape, local(tensor).stride()


def is_one(a: Tensor, b: Tensor) -> bool:
    """Return True if both are the same tensor, or the same view of the same storage."""
    return a is b or view_id(a) == view_id(b)


# -- plain values --


class PlainNode(StateNode):
    """Plain values, tensors and arrays in the user's own dict or list. A restore writes into this container."""

    kind = "plain"

    def __init__(self, path: Path, parent: Any, key: str | int) -> None:
        super().__init__(path)
        self.parent, self.key = parent, key

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


def write_back(live: Any, value: Any) -> Any:
    """Write `value` into the user's containers and arrays of the same type. Return it in these objects."""
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
        except BufferError:  # a memoryview of the array prevents a change of its size
            return value
        return live
    if isinstance(live, np.ndarray) and (live.dtype, live.shape) == (value.dtype, value.shape) and live.flags.writeable:
        np.copyto(live, value)
        return live
    return value


# -- objects with a state_dict --


_LIVE = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}  # a scaler's tensors on the device, by saved name


@runtime_checkable
class Stateful(Protocol):
    """Any object with a state that can be saved and loaded, for example a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Resizable(Stateful, Protocol):
    """An object whose state must be divided again when the number of ranks changes, for example a data loader.

    `load_state_dicts` is called instead of `load_state_dict`, with the states of all ranks that saved, in rank order.
    """

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int, /) -> Any: ...


class Generator:
    """Adds state_dict() and load_state_dict() to a generator."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put(state["state"])


class Scaler:
    """A GradScaler whose two device numbers stay tensors, because its own state_dict() reads them, and the host then
    waits for all work queued on the device."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scaler: Any = self._scaler
        live = {key: getattr(scaler, name, None) for key, name in _LIVE.items()}  # a disabled scaler has neither tensor
        if not all(isinstance(one, Tensor) for one in live.values()):
            return dict(scaler.state_dict())  # no tensor is on a device yet
        settings = {
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }
        return {**settings, **live}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plain = {key: one.item() if isinstance(one, Tensor) else one for key, one in state.items()}
        self._scaler.load_state_dict(plain)


def adapt(value: object) -> Generator | Scaler | None:
    """Return a wrapper for a generator or scaler. Return None for all other objects."""
    if isinstance(value, torch.Generator):
        return Generator(value.get_state, lambda state: value.set_state(state.cpu()))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, np.random.RandomState):
        return Generator(lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, random.Random):
        return Generator(value.getstate, value.setstate)
    if isinstance(value, GradScaler) and type(value).state_dict is GradScaler.state_dict:
        return Scaler(value)
    return None


class RNG:
    """The random number generators of Python, numpy (global), torch and every accelerator."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()  # Python's state and its array, cached because few trainings use it
        self._array = np.array((), np.uint64)

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        if numbers != self._numbers:
            self._numbers, self._array = numbers, np.array(numbers, np.uint64)
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": (version, self._array, gauss),
            "numpy": (name, keys, int(position), int(has_gauss), float(cached)),
            "torch": torch.get_rng_state(),
        }
        # Skip an accelerator that other code has not initialized.
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if there is not None and (there.type != "cuda" or device_in_use()):
            module = torch.get_device_module()
            state["accelerator"] = [module.get_rng_state(i) for i in range(torch.accelerator.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"not the state of random number generators: {error}") from error

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Load after the number of ranks has changed. Each rank continues the stream of the same rank number.

        Additional ranks start new streams, seeded from the saved ones. If all ranks had the same stream, all get it.
        """
        self.load_state_dict(states[rank % len(states)])
        try:
            marks = {_mark(state) for state in states}
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"not the states of random number generators: {error}") from error
        if rank >= len(states) and len(marks) > 1:
            seed = int.from_bytes(hashlib.sha256(_mark(states[rank % len(states)]) + b"%d" % rank).digest()[:8], "big")
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed % 2**63)

    def _load(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        python = version, tuple(int(n) for n in numbers), gauss
        random.Random().setstate(python)  # check all values before changing anything
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"].cpu())
        random.setstate(python)
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        saved = state.get("accelerator", [])
        if saved and torch.accelerator.is_available():
            module = torch.get_device_module()
            for i, one in enumerate(saved[: torch.accelerator.device_count()]):
                module.set_rng_state(one.cpu(), i)


def _mark(state: dict[str, Any]) -> bytes:
    """Return a digest of a state, to compare two states."""
    found = hashlib.sha256(
        repr((state["python"][0], state["python"][2], state["numpy"][0], state["numpy"][2:])).encode()
    )
    for array in (state["python"][1], state["numpy"][1]):
        found.update(np.asarray(array).tobytes())
    for tensor in (state["torch"], *state.get("accelerator", ())):
        found.update(tensor.cpu().numpy().tobytes())
    return found.digest()


class StatefulNode(StateNode):
    """Reads and restores any object with state_dict and load_state_dict."""

    kind = "stateful"

    def __init__(self, path: Path, target: Stateful) -> None:
        super().__init__(path)
        self.target = target
        self._kind_here = ""  # the kind of value that state_dict() last returned
        self._tensors, self._values = True, None  # whether the last value had tensors, and its plain values
        # The settings of the script, to report which ones the checkpoint overrides.
        self._settings = scheduler_settings(target) if isinstance(target, LRScheduler) else None

    def read(self, names: Names) -> Contents:
        return self._read(Collector(exact=True))

    def _read(self, collect: Collector) -> Contents:
        values = encode(self.target.state_dict(), self.path, collect)
        self._kind_here, self._tensors, self._values = kind_of(values), bool(collect.entries), values
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
                now = [scheduler_settings(target)] if self._settings else []
                if self._settings and (text := overridden(now, [self._settings], now)):
                    placement.overridden.append(f"{show(self.path)}: {text}")

            placement.finish(self.path, finish, last=last)

    def _build(self, saved: SavedNode, placement: Placement) -> Callable[[], Any] | None:
        """Return a function that builds the state to load. If it cannot be built, record a problem and return None."""
        return placement.build(saved.values, like={})

    def _load(self, state: Any) -> None:
        self.target.load_state_dict(state)

    def may_have_moments(self) -> bool:
        """Return False if the saved values cannot contain an optimizer's state, because they contain only numbers."""
        if isinstance(self.target, torch.optim.Optimizer) or self._tensors:
            return True
        return '"param_groups"' in json.dumps(self._values)

    def _is_alike(self, values: Json, placement: Placement) -> bool:
        """Return True if the saved value is of the kind that the object returns now, usually a dict."""
        if (found := kind_of(values)) == self._kind_here:
            return True
        placement.problem(f"{show(self.path)} is {found} in the checkpoint and {self._kind_here} here")
        return False


# -- settings of optimizers and schedulers, compared to report which ones a checkpoint overrides --


Settings = list[dict[str, Any]]  # settings of each group, in order


def settings_of(optimizer: Any) -> Settings:
    """Return the numeric settings of each group as JSON values, with the learning rate before any schedule."""
    found = []
    for group in optimizer.param_groups:
        several = {k: list(v) if type(v) is tuple else v for k, v in group.items()}
        plain = {k: v for k, v in several.items() if all(map(_is_number, v if type(v) is list else [v]))}
        plain["lr"] = plain.pop("initial_lr", plain.get("lr"))
        found.append(plain)
    return found


def _is_number(value: object) -> bool:
    return type(value) in (bool, int, float) and math.isfinite(value) and abs(value) < 1 << 53  # type: ignore[arg-type]


def overridden(then: Settings, now: Settings, in_effect: Settings) -> str:
    """Return the settings that the script has changed since the run began, but that the checkpoint overrides, so they
    are not `in_effect` after a restore. Return "" if there are none."""
    differ: dict[str, list[str]] = {}
    for number, (old, new, real) in enumerate(zip(then, now, in_effect, strict=False)):
        for name in sorted(old.keys() & new.keys() & real.keys()):
            if old[name] != new[name] != real[name]:
                differ.setdefault(f"{name} {real[name]}, not the script's {new[name]}", []).append(str(number))
    return "; ".join(
        text if len(groups) == len(in_effect) else f"{text} (group {', '.join(groups)})"
        for text, groups in differ.items()
    )


PROGRESS = {
    "last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "_step_count", "_last_lr",
    "_get_lr_called_within_step", "_is_initial",
}  # fmt: skip
"""The keys of a scheduler's state_dict() that change during training."""


def scheduler_settings(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's numeric settings by name, including those of schedulers inside it."""
    found: dict[str, Any] = {}

    def collect(start: str, values: Any) -> None:
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            several = list(value) if isinstance(value, tuple) else value
            if isinstance(key, str) and key in PROGRESS:
                continue
            if _is_number(value) or (isinstance(several, list) and several and all(map(_is_number, several))):
                found[f"{start}{key}"] = several
            elif isinstance(several, dict | list):
                collect(f"{start}{key}.", several)

    try:
        collect("", scheduler.state_dict())
    except Exception:  # the user's code failed; the next save raises the error
        return {}
    return found
