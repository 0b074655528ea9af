"""Whether a module's own loader accepts a saved state. This is tried on a copy whose tensors have no memory."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ckpt.adapters.module_state_dict import Refusing, load_into
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.saved_nodes import check_array
from ckpt.core.format.values import Json
from ckpt.core.state.sharding import plain_key
from ckpt.core.state.special_values import decode_constant
from ckpt.core.state.tensors import TORCH_DTYPE, of_kind


def accepts(module: nn.Module, state: Mapping[str, Any], *, plain: bool) -> bool:
    """Return True if `module.load_state_dict(state)` succeeds and reports no missing or unexpected keys.

    The module does not change. Return False if it cannot be copied, or if a hook would reach the original.

    state: tensors on the meta device, by their names within the module.
    plain: the names are those of `named_modules`, not the module's own; see `as_its_own`.
    """
    mode = _Trial()
    try:
        if not all(map(_can_be_tried, module.modules())):
            return False
        with torch.random.fork_rng(devices=[]):
            with _WithoutMemory():
                twin = copy.deepcopy(module)
            with mode:
                given = as_its_own(twin, state) if plain else dict(state)
                names = _forms(given)
                found = load_into(twin, given, strict=True)
                if found is None:  # the loader does not return what it misses
                    return _forms(twin.state_dict()) == names and not mode.refused
                return not (found.missing_keys or found.unexpected_keys or mode.refused)
    except Exception:
        return False


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


def _can_be_tried(module: nn.Module) -> bool:
    """Return False if loading into a copy could change the original."""
    if isinstance(module, torch.jit.ScriptModule):
        return False  # its copy has memory
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    methods = (vars(module)[name] for name in ("load_state_dict", "_load_from_state_dict") if name in vars(module))
    return not any(map(_shares, (*(getattr(hook, "hook", hook) for hook in hooks), *methods)))


def _shares(value: object) -> bool:
    """Return True if a function keeps objects that deepcopy() would not copy, because it does not copy functions."""
    if isinstance(value, partial):
        return _shares(value.func)  # the arguments are copied
    if isinstance(value, MethodType):
        return _shares(value.__func__)
    if not isinstance(value, FunctionType):
        return False
    kept = (*(cell.cell_contents for cell in value.__closure__ or ()), *(value.__defaults__ or ()))
    return any(_shares(one) if isinstance(one, FunctionType) else not _is_constant(one) for one in kept)


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | type)


def _forms(state: Mapping[str, Any]) -> dict[str, object]:
    """Equal for states that have the same names, with tensors of the same shapes."""
    return {key: tuple(v.shape) if isinstance(v, Tensor) else type(v) for key, v in state.items()}
