"""Whether a module's own loader accepts a saved state. This is tried on a copy whose tensors have no memory."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.saved_nodes import check_array
from ckpt.core.format.values import Json
from ckpt.core.state.module_state_dict import Refusing, load_into
from ckpt.core.state.sharding import plain_key
from ckpt.core.state.special_values import decode_constant
from ckpt.core.state.tensors import TORCH_DTYPE, of_kind


def accepts(module: nn.Module, state: Mapping[str, Any], *, plain: bool) -> bool:
    """Return True if `module.load_state_dict(state)` succeeds.

    Keys that an own load_state_dict() returns as missing or unexpected, and does not raise an error for, are accepted.
    The module does not change. Raises Untried if that cannot be found out on a copy.

    state: tensors on the meta device, by their names within the module.
    plain: the names are those of `named_modules`, not the module's own; see `as_its_own`.
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
                found = load_into(twin, given, strict=True)
                # If the loader does not return what it misses, its names must be the same now.
                return not mode.refused and (found is not None or _forms(twin.state_dict()) == names)
        except Exception as error:
            if "in loading state_dict for" in str(error) or mode.refused:  # it is torch that refuses the keys
                return False
            raise Untried(f"its loader failed on a copy of the module without memory: {error!r:.200}") from error


class Untried(Exception):
    """A module's loader cannot be tried on a copy; the text says why."""


def _twin(module: nn.Module) -> nn.Module:
    """Return a copy without memory, whose hooks for loading reach nothing of the original."""
    if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
        raise TypeError("a ScriptModule has memory in its copy")
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
    """Return what deepcopy() returns, but copies of functions, which have copies of what they keep.

    Raises TypeError for what would reach the original.
    """
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
    """Yield what is in lists, tuples, sets and dicts."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


def as_its_own(module: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state as the module's own state_dict() would return it: with its names and its version numbers."""
    own = module.state_dict()
    named = {plain_key(module, key): key for key in own}
    found = OrderedDict((named.get(key, key), value) for key, value in state.items())
    found._metadata = getattr(own, "_metadata", {})  # type: ignore[attr-defined]
    return found


def without_memory(spec_of: Callable[[str], TensorSpec], reference: Json) -> object:
    """Decode a reference with a tensor on the meta device. Raises CorruptError if that cannot be done."""
    if reference["$"] == "ndarray":
        dtype, shape = check_array(spec_of(reference["name"]), reference)
        return np.zeros(shape, dtype)
    if reference["$"] == "tensor":
        spec = spec_of(reference["name"])
        return of_kind(torch.empty(spec.shape, dtype=TORCH_DTYPE[spec.dtype], device="meta"), reference)
    return decode_constant(reference)


class _WithoutMemory(TorchFunctionMode):
    """deepcopy() of a tensor returns one on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):  # a Parameter clones its data
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))


class _Trial(Refusing):  # type: ignore[no-untyped-call]
    """Also, tensors without memory can be copied to a device, and into the tensors that a loader creates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = {**(kwargs or {}), "device": torch.device("meta")}
        return super().__torch_dispatch__(func, types, args, kwargs)


def _forms(state: Mapping[str, Any]) -> dict[str, object]:
    """Equal for states that have the same names, with tensors of the same shapes."""
    return {key: tuple(v.shape) if isinstance(v, Tensor) else type(v) for key, v in state.items()}
