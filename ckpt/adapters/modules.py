"""Reads and restores modules with their own `state_dict()` or loader, with state-dict hooks, or with extra state.

State-dict hooks and methods mostly rename, divide or gather the tensors of the module. Saving the tensors as they are
in memory restores the same state, and runs no user code between two steps. So the state_dict() of each module with such
code is called once, without collectives, and the result is compared with the module's tensors. Only if the result has
more contents, state_dict() is called at every reading. Extra state is read separately. Whether a module's own loader
accepts a saved state is tested on a copy whose tensors have no memory.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.values import Json, Path, SavedNode, check_array, decode, encode, pairs, show, unpaired
from ckpt.core.state.nodes import TWO_TENSORS, Collector, Contents, ModuleNode, is_one, memory_id, view_id
from ckpt.core.state.placement import Placement, forms_of, matching, references
from ckpt.core.state.sharding import (
    NamedModule,
    Names,
    Replicas,
    StateEntry,
    belongs_to_torch,
    is_dtensor,
    local,
    named_modules,
    plain_key,
    replicated_by_ddp,
    wrapped_attribute,
)
from ckpt.core.state.tensors import TORCH_DTYPE, decode_constant, of_kind, saved_device
from ckpt.core.state.wrappers import take_apart
from ckpt.errors import CheckpointError, CorruptError, MismatchError, StateError
from ckpt.events import log as logger

EXTRA = "_extra_state"
_warned: set[str] = set()


@dataclass
class OwnState:
    """The methods and hooks for saving and loading that modules define themselves, by the modules' prefix.

    `custom`: modules whose state_dict() is called at every reading. No tensor below them is read directly.
    `extras`: modules whose get_extra_state() is called.
    `loaders`: modules with their own load_state_dict() or hooks, which get their state when it is restored. The
        load_state_dict() of a module inside another one does not count, because the outer one does not call it.
    `names`: names in the state_dict(), if the module names the tensor differently. `left_out`: tensors not saved.
    """

    custom: dict[str, nn.Module] = field(default_factory=dict)
    extras: dict[str, nn.Module] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    loaders: dict[str, nn.Module] = field(default_factory=dict)
    notes: dict[tuple[str, type[nn.Module]], list[str]] = field(default_factory=dict)

    @property
    def has_values(self) -> bool:
        """Return True if the modules have more state than parameters and buffers."""
        return bool(self.custom or self.extras)

    def is_custom(self, prefix: str) -> bool:
        """Return True if a module is one of the `custom` modules, or inside one of them."""
        return any(prefix.startswith(inner) for inner in self.custom)

    def is_inner(self, prefix: str) -> bool:
        """Return True if the load_state_dict() of a module is not called because the module is inside another one. It
        is called only for a module whose own state_dict() was saved."""
        custom = type(self.custom.get(prefix))
        return bool(prefix) and getattr(custom, "state_dict", nn.Module.state_dict) is nn.Module.state_dict

    def drop(self, prefix: str) -> None:
        """Forget all methods and hooks below a prefix."""
        for found in (self.custom, self.extras, self.names, self.loaders):
            for key in [key for key in found if key.startswith(prefix)]:
                del found[key]
        self.left_out = {key for key in self.left_out if not key.startswith(prefix)}


def plain_tensors(module: nn.Module, own_state: OwnState, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, by full name, except those in `custom` modules."""
    for name, _, each in named_modules(module):
        here = prefix + (name + "." if name else "")
        if not own_state.is_custom(here):
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None and key not in each._non_persistent_buffers_set:
                    yield here + key, tensor


def find_own_state(module: nn.Module, path: Path) -> OwnState:
    """Find the own methods and hooks of all modules in `module`, and log their consequences for the user once. Raise
    StateError if two tensors have the same name."""
    own_state, seen = OwnState(), dict[str, Tensor]()
    for name, tensor in plain_tensors(module, own_state):
        if not is_one(seen.setdefault(name, tensor), tensor):
            raise StateError(f"{show((*path, name))}: {TWO_TENSORS}")
    _collect(module, "", own_state)
    for (verdict, kind), prefixes in own_state.notes.items():
        first = show((*path, prefixes[0].rstrip("."))) if prefixes[0] else show(path)
        more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
        text = f"{first}{more} ({kind.__name__}): {verdict}"
        if text not in _warned:
            _warned.add(text)
            logger.warning("%s", text)
    return own_state


def _collect(module: nn.Module, prefix: str, own_state: OwnState) -> None:
    wrapped = wrapped_attribute(module)
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, prefix if name == wrapped else f"{prefix}{name}.", own_state)
    extra = type(module).get_extra_state is not nn.Module.get_extra_state
    more = bool(module._parameters or module._buffers or len(module._modules) > 1)
    both = (extra and prefix in own_state.extras) or (more and prefix in own_state.custom)
    if wrapped is not None and both:  # the wrapper and the module, which share a name, both have state
        own_state.drop(prefix)
        own_state.custom[prefix] = module  # its state_dict() has the state of both
        return
    if extra:
        own_state.extras[prefix] = module
    saves, loads = _own(module, LOADING[bool(prefix) :])
    if saves or loads:
        verdict = _classify(module, prefix, own_state, loads)
        if verdict:
            own_state.notes.setdefault((verdict, type(module)), []).append(prefix)


LOADING = ("load_state_dict", "_load_from_state_dict")


def _own(module: nn.Module, loading: tuple[str, ...]) -> tuple[bool, bool]:
    """Return two flags: the module has its own hooks or methods for saving, and for loading. `loading`: names from
    LOADING of the methods that are called."""

    def has(methods: tuple[str, ...], hooks: Iterable[Any]) -> bool:
        owners = (next(c for c in type(module).__mro__ if name in vars(c)).__module__ for name in methods)
        plain = (home.startswith("torch.") and not home.startswith("torch.ao.") for home in owners)
        return not (all(plain) and all(map(belongs_to_torch, hooks)))

    before, after = module._state_dict_pre_hooks.values(), module._state_dict_hooks.values()
    first, last = module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values()
    saves = has(("state_dict", "_save_to_state_dict"), (*before, *after))
    return saves, has(loading, (*first, *last))


GATHERS = (
    "its state_dict() runs collectives, so it is not called. Parameters, buffers and extra state are saved as they are "
    "in memory; anything else that its hooks add is not saved"
)
REARRANGES = "its state_dict() rearranges its parameters. They are saved as they are in memory, with the same result"
LEAVES_OUT = "its state_dict() leaves out some parameters or buffers. These are not saved"
HAS_MORE = "its state_dict() has more than its parameters and buffers, so it is called at every save"


def _classify(module: nn.Module, prefix: str, own_state: OwnState, loads: bool) -> str:
    """Record the consequences of a module's state_dict(). Return a message for the user, or "" if there are none."""
    entries = _state_dict_of(module)
    if entries is None:
        return GATHERS
    if loads:
        for inner in [p for p in own_state.loaders if p.startswith(prefix)]:
            del own_state.loaders[inner]
        own_state.loaders[prefix] = module
    here = {key: tensor for key, tensor in plain_tensors(module, own_state, prefix) if key not in own_state.left_out}
    own = {memory_id(tensor) for tensor in here.values()}
    expected = {p + EXTRA for p in own_state.extras}
    entries = {prefix + plain_key(module, k): v for k, v in entries.items()}
    rest = {k: v for k, v in entries.items() if k not in expected and not own_state.is_custom(k)}
    new = {k: v for k, v in rest.items() if not isinstance(v, Tensor) or memory_id(v) not in own}
    there = {memory_id(v) for k, v in rest.items() if k not in new}
    missing = {k: tensor for k, tensor in here.items() if memory_id(tensor) not in there}
    again = {prefix + plain_key(module, k): v for k, v in (_state_dict_of(module) or {}).items()} if new else {}
    if new and not _rearranged(new, missing, again):
        own_state.drop(prefix)
        own_state.custom[prefix] = module
        return HAS_MORE
    if new:
        return REARRANGES
    own_state.left_out |= missing.keys()
    _rename({k: t for k, t in here.items() if k not in missing}, rest, own_state)
    return LEAVES_OUT if missing else ""


def _rearranged(new: Mapping[str, Any], missing: Mapping[str, Tensor], again: Mapping[str, Any]) -> bool:
    """Return True if the new tensors may be copies of the missing ones: as many elements, but in other memory."""
    if not all(isinstance(value, Tensor) for value in new.values()):
        return False
    if any(isinstance(v := again.get(key), Tensor) and memory_id(v) == memory_id(value) for key, value in new.items()):
        return False  # both calls of state_dict() returned the same memory, so the module stores this tensor
    apart = {memory_id(tensor): tensor.numel() for tensor in missing.values()}
    return sum(apart.values()) == sum(int(value.numel()) for value in new.values())


def _rename(here: Mapping[str, Tensor], entries: Mapping[str, Tensor], own_state: OwnState) -> None:
    """Record the names in the state_dict() that differ from the module's own names, for example because a wrapper
    removes its part of the name."""
    other: dict[object, list[str]] = {}
    for key, tensor in entries.items():
        if key not in here:
            other.setdefault(view_id(tensor), []).append(key)
    for key, tensor in here.items():
        if key not in entries and (called := other.get(view_id(tensor))):  # a tied tensor has several names
            own_state.names[key] = next((name for name in called if key.endswith(f".{name}")), called[0])


class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes collectives raise an error before anything is sent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and any(issubclass(one, distributed.DTensor) for one in types):
            return NotImplemented  # torch then dispatches the inner operations of this one to this mode
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"):
            self.refused = True
            raise RuntimeError(f"{func} is a collective, but the other ranks do not take part")
        return func(*args, **(kwargs or {}))


def _state_dict_of(module: nn.Module) -> dict[str, Any] | None:
    """Return a module's state_dict(), or None if it needs other ranks."""
    mode = Refusing()
    try:
        with torch.no_grad(), mode:
            entries = dict(module.state_dict(keep_vars=True))
    except Exception:
        if not mode.refused:
            raise
    return None if mode.refused else entries


def hand_back(module: nn.Module, inner: bool) -> None:
    """Call the loader of a module with its restored state, because its hooks may compute other values from this state.
    `inner`: see `load_into`."""
    mode = Refusing()
    try:
        with mode:
            load_into(module, module.state_dict(), strict=False, inner=inner)
    except Exception:
        if not mode.refused:
            raise


def hand_resized(
    module: nn.Module, path: Path, tensors: Mapping[str, Tensor], strict: bool, inner: bool = False
) -> None:
    """Load tensors whose shapes differ from those of the module through its own loader, which may resize its tensors.
    Everything else has been restored already. `tensors`: by their names in the module. `inner`: see `load_into`. Raise
    MismatchError if the loader raises an error."""
    state = module.state_dict()
    named = {plain_key(module, key): key for key in state}
    for key, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[key] = value.clone()  # the loader may overwrite its own tensors before it copies from the state
    state.update((named.get(name, name), tensor) for name, tensor in tensors.items())
    try:
        load_into(module, state, strict=strict, inner=inner)
    except Exception as error:
        problem = (
            f"{show(path)}: the loader of {type(module).__qualname__} does not accept the saved "
            f"{', '.join(f'{name} of shape {list(t.shape)}' for name, t in tensors.items())}: {error}"
        )
        if strict:
            raise MismatchError(
                f"{problem}. Everything else was restored. Create the module with the saved shapes, and restore again"
            ) from error
        logger.warning("%s. These tensors were not restored", problem)


def load_into(module: nn.Module, state: Mapping[str, Any], *, strict: bool, inner: bool = False) -> Any:
    """Call load_state_dict() and return its result. Omit `strict` if the module's own method lacks this parameter.
    `inner`: bypass the module's own load_state_dict(), as that of an enclosing module does."""
    if inner:
        return nn.Module.load_state_dict(module, state, strict=strict)
    parameters = inspect.signature(module.load_state_dict).parameters
    takes = "strict" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return module.load_state_dict(state) if strict or not takes else module.load_state_dict(state, strict=False)


# -- check whether a module's own loader accepts a saved state --


def accepts(module: nn.Module, state: Mapping[str, Any], *, plain: bool, inner: bool = False) -> bool:
    """Return True if `module.load_state_dict(state)` succeeds.

    Keys that a load_state_dict() only returns as missing or unexpected, without an error, are accepted. The module
    does not change. Raise Untried if the loader cannot be tested on a copy.

    state: tensors on the meta device, by their names in the module
    plain: True if `state` has the names of `named_modules`, not those of the module's state_dict(); see `as_its_own`
    inner: as in `load_into`
    """
    mode = _Trial()
    with torch.random.fork_rng(devices=[]):
        try:
            twin = _twin(module)
        except Exception as error:
            raise Untried(f"its loader cannot be tried on a copy of the module: {error!r:.200}") from error
        try:
            with mode:
                given = as_its_own(twin, state) if plain else dict(state)
                names = _forms(given)
                found = load_into(twin, given, strict=True, inner=inner)
                # If the loader returns no list of missing keys, the module's names must now equal the saved names.
                return not mode.refused and (found is not None or _forms(twin.state_dict()) == names)
        except Exception as error:
            if "in loading state_dict for" in str(error) or mode.refused:  # torch rejected the keys
                return False
            raise Untried(f"its loader failed on a copy of the module without memory: {error!r:.200}") from error


class Untried(Exception):
    """Raised if a module's loader cannot be tried on a copy. The text gives the reason."""


def _twin(module: nn.Module) -> nn.Module:
    """Return a copy without memory. Its loading hooks must not be able to change the original."""
    if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
        raise TypeError("the copy of a ScriptModule has memory")
    memo: dict[int, Any] = {}
    with _WithoutMemory():
        twin = copy.deepcopy(module, memo)
        for one in module.modules():
            for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
                for key, hook in getattr(one, name).items():
                    hooks = getattr(memo[id(one)], name)
                    if hasattr(hook, "hook"):
                        hooks[key].hook = _copied(hook.hook, memo)
                    else:
                        hooks[key] = _copied(hook, memo)
            for name in {"load_state_dict", "_load_from_state_dict"} & vars(one).keys():
                vars(memo[id(one)])[name] = _copied(vars(one)[name], memo)
    return twin


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deepcopy() in which functions are copied too, with the values that they capture. Raise TypeError for
    a value through which the original could be changed."""
    if isinstance(value, partial):
        return partial(_copied(value.func, memo), *_copied(value.args, memo), **_copied(value.keywords, memo))
    if isinstance(value, MethodType):
        return MethodType(_copied(value.__func__, memo), copy.deepcopy(value.__self__, memo))
    if not isinstance(value, FunctionType):
        if any(isinstance(one, weakref.ref | FunctionType) for one in _leaves(value)):
            raise TypeError("a hook keeps weak references, or functions in a list or dict")
        return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(CellType() for _ in value.__closure__ or ())
        made = memo[id(value)] = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        made.__dict__.update(value.__dict__)
        for cell, kept in zip(cells, value.__closure__ or (), strict=True):
            cell.cell_contents = _copied(kept.cell_contents, memo)
        made.__defaults__ = value.__defaults__ and tuple(_copied(one, memo) for one in value.__defaults__)
        made.__kwdefaults__ = value.__kwdefaults__ and {k: _copied(v, memo) for k, v in value.__kwdefaults__.items()}
    return memo[id(value)]


def _leaves(value: object) -> Iterator[object]:
    """Yield the values in nested lists, tuples, sets and dicts."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


def as_its_own(module: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state as the module's own state_dict() would return it, with the same names and version numbers."""
    own = module.state_dict()
    named = {plain_key(module, key): key for key in own}
    found = OrderedDict((named.get(key, key), value) for key, value in state.items())
    found._metadata = getattr(own, "_metadata", {})  # type: ignore[attr-defined]
    return found


def without_memory(spec_of: Callable[[str], TensorSpec], reference: Json) -> object:
    """Decode a reference as a tensor on the meta device. Raise CorruptError if the reference is invalid."""
    if reference["$"] == "ndarray":
        dtype, shape = check_array(spec_of(reference["name"]), reference)
        return np.zeros(shape, dtype)
    if reference["$"] == "tensor":
        spec = spec_of(reference["name"])
        return of_kind(torch.empty(spec.shape, dtype=TORCH_DTYPE[spec.dtype], device="meta"), reference)
    return decode_constant(reference)


class _WithoutMemory(TorchFunctionMode):
    """Makes deepcopy() of a tensor return a tensor on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):  # deepcopy() of a Parameter calls clone()
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))


class _Trial(Refusing):  # type: ignore[no-untyped-call]
    """Refuses collectives, but allows copies of tensors without memory to a device and into tensors of a loader."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = {**(kwargs or {}), "device": torch.device("meta")}
        return super().__torch_dispatch__(func, types, args, kwargs)


def _forms(state: Mapping[str, Any]) -> dict[str, object]:
    """Return a value that is equal for states that have the same names, with tensors of the same shapes."""
    return {key: tuple(v.shape) if isinstance(v, Tensor) else type(v) for key, v in state.items()}


# -- read and restore modules --


class CustomModuleNode(ModuleNode):
    """Reads any module as in the core, and also with the module's own methods and hooks (`find_own_state`)."""

    def __init__(self, path: Path, module: nn.Module) -> None:
        super().__init__(path, module)
        self._own, self._modules_read = OwnState(), list[nn.Module]()
        self._untried: list[str] = []  # reasons why loaders could not be tested with the checkpoint
        self._order: list[str] = []  # names of tensors, and prefixes of `custom` modules, in order

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, nn.Module)

    @property
    def kind(self) -> str:
        return "custom module" if self._own.has_values else "module"

    def read(self, names: Names) -> Contents:
        piece = super().read(names)
        return self._with_own_values(piece) if self._own.has_values else piece

    def _read(self, modules: Sequence[NamedModule]) -> Contents:
        if len(modules) != len(self._modules_read) or any(
            one.module is not b for one, b in zip(modules, self._modules_read, strict=True)
        ):
            self._own, self._modules_read = find_own_state(self.whole, self.path), [one.module for one in modules]
        piece, order = super()._read(modules), dict[str, None]()
        for prefix, _, module in modules if self._own.has_values else ():
            inside = f"{prefix}." if prefix else ""
            if inside in self._own.custom:
                order[inside] = None
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                name = self._saved_as(inside + key)
                if name is not None and tensor is not None and key not in module._non_persistent_buffers_set:
                    order[name] = None
            if inside in self._own.extras:
                order[inside] = None
        self._order = list(order)
        return piece

    def _saved_as(self, name: str) -> str | None:
        omitted = self._own.is_custom(name) or name in self._own.left_out
        return None if omitted else self._own.names.get(name, name)

    def _with_own_values(self, piece: Contents) -> Contents:
        """Collect all values of the module by key, like its state_dict()."""
        collect, exact = Collector(), Collector(exact=True)  # set_extra_state() must get exactly the saved values
        state: dict[str, Json] = {}
        for key in self._order:
            if key in self._own.extras:
                value = self._own.extras[key].get_extra_state()
                state[key + EXTRA] = encode(value, (*self.path, key + EXTRA), exact)
            elif key in self._own.custom:
                for inner, value in self._own.custom[key].state_dict(keep_vars=True).items():
                    if key + inner in state:
                        raise StateError(f"{self._name(key + inner)}: {TWO_TENSORS}")
                    state[key + inner] = encode(value, (*self.path, key + inner), collect)
            else:
                form = self._forms.get(key)
                state[key] = {"$": "tensor", "name": self._name(key)} if form is None else form.to_json()
        replicas = replicated_by_ddp(self.whole)  # a module with its own state_dict() may replace tensors at any time
        loose = []
        for e in (*collect.entries, *exact.entries):
            of, whole = e.part_of, e.owner.tensor
            ranks = replicas.get(id(whole))
            guarded = isinstance(whole, nn.Parameter)
            of = of and StateEntry(of.name, whole, guarded, ranks)
            loose.append(StateEntry(e.name, e.tensor, guarded, ranks or e.alike, part_of=of, around=e.around))
        return Contents(piece.fixed, loose, pairs(state), piece.facts)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        piece = self.read(Names())
        if saved.kind == "module" and not (self._own.has_values or self._own.loaders):
            super().prepare(saved, placement)
            return
        fixed = {entry.name: entry for entry in piece.fixed}
        loose = {entry.name: entry for entry in piece.loose}
        state = self._saved_state(saved)
        problems, self._untried = len(placement.problems), []
        free = set(references([value for key, value in state.items() if key.endswith(EXTRA)]))  # extra state may differ
        extras = tuple(self._name(prefix + EXTRA) for prefix in self._own.extras)
        own = {name: entry for name, entry in (fixed | loose).items() if not name.startswith(extras)}
        theirs = [name for name in saved.names if name not in free]
        differing = self._differing(theirs, own, placement)
        resized = self._resized(saved, theirs, own, placement)
        whole = self._loaders_of_all(saved, state, own, differing - resized.keys(), placement)
        given = {name for name in (*own, *theirs) if whole and self._key(name).startswith(tuple(whole))}
        resized = {name: prefix for name, prefix in resized.items() if name not in given}
        omitted = resized.keys() | (given & differing)
        live = {name: entry for name, entry in own.items() if name not in omitted}
        names = placement.compare(self.path, [name for name in theirs if name not in omitted], live)
        filled = set[str]()
        for name in matching(names, own, saved.facts, saved.names, placement):
            if name in fixed and name not in given:
                placement.fill(name, fixed[name])
                filled.add(name)
            else:
                placement.watch(name, own[name])
        weights = self._weights(theirs, own, placement) if placement.strict else set[str]()
        self._prepare_own_values(state, fixed | loose, whole, weights, placement)
        self._hand_back(placement, filled, self._created(resized, own, weights, placement), whole)
        if whole:
            placement.finish(self.path, self._forget)
        if len(placement.problems) > problems:
            placement.problems += self._untried

    def _forget(self) -> None:
        """Discard the results of the last reading, because the state_dict() may have other keys after a restore."""
        self._piece, self._modules_read = None, []

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        if self._own.has_values:
            return False
        self._hand_back(placement, saved.names, {}, {})
        return True

    def _hand_back(
        self,
        placement: Placement,
        filled: Container[str],
        resized: Mapping[str, tuple[str, Tensor]],
        whole: Mapping[str, nn.Module],
    ) -> None:
        for prefix, module in self._own.loaders.items():
            if prefix in whole:
                continue
            new = {name: tensor for name, (of, tensor) in resized.items() if of == prefix}
            load = partial(hand_back, module, bool(prefix))
            if new:
                path = (*self.path, prefix.rstrip(".")) if prefix else self.path
                tensors = {self._key(name).removeprefix(prefix): tensor for name, tensor in new.items()}
                load = partial(hand_resized, module, path, tensors, placement.strict, bool(prefix))
            placement.finish(self.path, partial(self._load_exactly, prefix, module, filled, new, load))

    def _load_exactly(
        self,
        prefix: str,
        module: nn.Module,
        filled: Container[str],
        new: Mapping[str, Tensor],
        load: Callable[[], None],
    ) -> None:
        """Run the loader of a module, then fill its tensors again, because the loader may have rounded or reset them.

        filled: names of the tensors that already have their saved values.
        new: the tensors that the loader receives, by name.
        """
        own = [entry for entry in self._tensors_in(prefix, module) if entry.name in filled]
        kept = {**{entry.name: local(entry.tensor).to("cpu", copy=True) for entry in own}, **new}
        load()
        for entry in self._tensors_in(prefix, module):
            saved, here = kept.get(entry.name), local(entry.tensor)
            if saved is not None and (saved.shape, saved.dtype) == (here.shape, here.dtype):
                here.detach().copy_(saved)

    def _tensors_in(self, prefix: str, module: nn.Module) -> Iterator[StateEntry]:
        """Yield the entries of a module's tensors that are saved directly, including those inside wrapper tensors."""
        for key, tensor in plain_tensors(module, self._own, prefix):
            if (name := self._saved_as(key)) is not None:
                yield from take_apart(self._entry(name, tensor))[0]

    def _resized(
        self, saved: SavedNode, theirs: Collection[str], own: Mapping[str, StateEntry], placement: Placement
    ) -> dict[str, str]:
        """Return the saved tensors that only a module's loader can restore, because the live tensor is None or has
        another shape. The result maps each tensor's name to the prefix of the module with the loader."""
        found: dict[str, str] = {}
        if not self._own.loaders:
            return found
        made_of_several = {part for form in forms_of(saved.facts).values() for part in form.names}
        empty = {
            f"{name}.{key}" if name else key
            for name, _, module in named_modules(self.whole)
            for members in (module._parameters, module._buffers)
            for key, tensor in members.items()
            if tensor is None
        }
        for name in theirs:
            key, entry = self._key(name), own.get(name)
            prefix = max((p for p in self._own.loaders if key.startswith(p)), key=len, default=None)
            if prefix is None or name in made_of_several or self._own.is_custom(key):
                continue
            if entry is None:
                if key in empty or "." not in key.removeprefix(prefix):
                    found[name] = prefix
            elif _has_other_shape(name, entry, placement):
                found[name] = prefix
        return found

    def _created(
        self, resized: Mapping[str, str], own: Mapping[str, StateEntry], weights: Collection[str], placement: Placement
    ) -> dict[str, tuple[str, Tensor]]:
        """Create a tensor for each result of `_resized`, to be filled. Return prefix and tensor by name."""
        found: dict[str, tuple[str, Tensor]] = {}
        for name, prefix in resized.items():
            if (entry := own.get(name)) is None:
                made = placement.create(name, saved_device(placement.spec(name)), guarded=name in weights)
            else:
                assert isinstance(entry.alike, Replicas | None)
                made = placement.create(name, entry.tensor.device, entry.alike, guarded=entry.guarded)
            found[name] = prefix, made
        return found

    def _weights(self, theirs: Collection[str], own: Mapping[str, StateEntry], placement: Placement) -> set[str]:
        """Return the names of saved tensors that become parameters. All ranks must have saved the same values for them.
        An unknown name counts as a parameter if a live parameter that was not saved has the same last part of its name,
        or otherwise the same shape."""
        parameters = {
            self._name(f"{name}.{key}" if name else key)
            for name, _, module in named_modules(self.whole)
            for key in module._parameters
        }
        left = [own[name] for name in own.keys() - set(theirs)]

        def is_weight(name: str) -> bool:
            if name in own or name in parameters:
                return name in parameters or own[name].guarded
            last = name.rpartition(".")[2]
            alike = [entry for entry in left if entry.name.rpartition(".")[2] == last]
            alike = alike or [entry for entry in left if tuple(entry.tensor.shape) == placement.spec(name).shape]
            return any(entry.guarded for entry in alike)

        return {name for name in theirs if is_weight(name)}

    def _differing(self, theirs: Collection[str], own: Mapping[str, StateEntry], placement: Placement) -> set[str]:
        """Return the names of tensors that exist only live or only in the checkpoint, or have different shapes
        there."""
        if not (self._own.loaders or self._own.custom):
            return set()  # without a loader, no module can handle differences
        shared = (name for name in theirs if name in own and _has_other_shape(name, own[name], placement))
        return {*(own.keys() ^ set(theirs)), *shared}

    def _loaders_of_all(
        self,
        saved: SavedNode,
        state: Mapping[str, Json],
        own: Mapping[str, StateEntry],
        differing: Collection[str],
        placement: Placement,
    ) -> dict[str, nn.Module]:
        """Return the modules, by prefix, that have differences and whose own loaders accept all of their saved state.
        The loaders then get all of it. No module of the result is inside another one."""
        own_state, found = self._own, dict[str, nn.Module]()
        keys = {self._key(name) for name in differing} | {key for key in state if self._is_unclaimed(key, state[key])}
        for prefix, module in (*own_state.custom.items(), *own_state.loaders.items()):
            is_custom = prefix in own_state.custom
            if not any(key.startswith(prefix) for key in keys) or not (is_custom or self._is_plain(prefix, saved, own)):
                continue
            try:
                state_of_it = {
                    key.removeprefix(prefix): decode(value, partial(without_memory, placement.spec))
                    for key, value in state.items()
                    if key.startswith(prefix)
                }
            except CheckpointError:
                continue
            try:
                accepted = accepts(module, state_of_it, plain=not is_custom, inner=own_state.is_inner(prefix))
            except Untried as error:
                path = (*self.path, prefix.rstrip(".")) if prefix else self.path
                self._untried.append(f"{show(path)}: {error}")
                continue
            if accepted:
                found = {p: inner for p, inner in found.items() if not p.startswith(prefix)} | {prefix: module}
                keys = {key for key in keys if not key.startswith(prefix)}
        return found

    def _is_plain(self, prefix: str, saved: SavedNode, own: Mapping[str, StateEntry]) -> bool:
        """Return True if the saved state of a module has the form that the module's loader takes, which is plain
        tensors with the names of its state_dict()."""
        rearranged = [p for (verdict, _), ps in self._own.notes.items() if verdict in (GATHERS, REARRANGES) for p in ps]
        wrappers = (self._key(name) for name in forms_of(saved.facts))
        return (
            not any(p.startswith(prefix) or prefix.startswith(p) for p in rearranged)
            and not any(key.startswith(prefix) for key in wrappers)
            and all(_is_plain(entry) for name, entry in own.items() if self._key(name).startswith(prefix))
        )

    def _is_unclaimed(self, key: str, value: Json) -> bool:
        """Return True for a saved value that is not a tensor and that no live module handles."""
        if self._own.is_custom(key) or any(key == prefix + EXTRA for prefix in self._own.extras):
            return False
        return not (type(value) is dict and value.get("$") in ("tensor", "wrapper"))

    def _key(self, name: str) -> str:
        """Return a name relative to the module."""
        return name[len(self._name("")) :]

    def _saved_state(self, saved: SavedNode) -> dict[str, Json]:
        """Return the module's saved state by key. Raise CorruptError if it is not the state of a module."""
        if saved.kind == "module":
            return {self._key(name): {"$": "tensor", "name": name} for name in saved.names}
        found = unpaired(saved.values)
        if found is None:
            raise CorruptError(f"{show(self.path)}: its stored state is not the state of a module")
        return found

    def _prepare_own_values(
        self,
        state: dict[str, Json],
        live: Mapping[str, StateEntry],
        whole: Mapping[str, nn.Module],
        weights: Collection[str],
        placement: Placement,
    ) -> None:
        claimed = set()
        for prefix, module in self._own.extras.items():
            key = prefix + EXTRA
            if key.startswith(tuple(whole)):
                continue
            claimed.add(key)
            if key in state:
                build = placement.build(state[key])
                placement.finish(
                    self.path, partial(lambda module, build: module.set_extra_state(build()), module, build)
                )
            else:
                placement.problem(f"{self._name(key)} is not in the checkpoint")
        outer = {p: m for p, m in self._own.custom.items() if not p.startswith(tuple(whole))}
        for prefix, module in (*outer.items(), *whole.items()):
            saved = {key: value for key, value in state.items() if key.startswith(prefix)}
            claimed |= saved.keys()
            values = pairs({k.removeprefix(prefix): v for k, v in saved.items()})
            build = placement.build(values, like=live, guarded=weights)
            plain = prefix not in self._own.custom
            inner = self._own.is_inner(prefix)
            placement.finish(self.path, partial(_load, module, self.path, build, placement.strict, plain, inner))
        for key, value in state.items():
            if key not in claimed and self._is_unclaimed(key, value):
                placement.problem(f"{self._name(key)} is in the checkpoint, but not in {show(self.path)}")


def _has_other_shape(name: str, entry: StateEntry, placement: Placement) -> bool:
    """Return True for a plain tensor whose saved shape differs from the live shape."""
    return _is_plain(entry) and placement.spec(name).shape != tuple(entry.tensor.shape)


def _is_plain(entry: StateEntry) -> bool:
    """Return True for a tensor that is not sharded and is not part of another tensor."""
    return isinstance(entry.alike, Replicas | None) and entry.part_of is None and not is_dtensor(entry.tensor)


def _load(module: nn.Module, path: Path, build: Callable[[], Any], strict: bool, plain: bool, inner: bool) -> None:
    found = load_into(module, as_its_own(module, build()) if plain else build(), strict=strict, inner=inner)
    texts = {"not in the checkpoint": "missing_keys", "in the checkpoint, but not in the module": "unexpected_keys"}
    for text, name in texts.items():
        if keys := getattr(found, name, ()):
            logger.warning(
                "%s: its load_state_dict() accepted that these are %s: %s", show(path), text, ", ".join(keys)
            )
