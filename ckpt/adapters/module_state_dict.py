"""What a module says of itself beside the parameters and buffers that lie in it.

State-dict hooks and methods mostly rename, divide or gather what lies there: read as it lies, it restores the same, and
nobody has to be asked between two steps of training. So each module with words of its own is asked once, with
collectives refused, and what it said is compared with what lies there. Only one that says something else is asked again
at every reading; extra state is asked for by itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.core.format.values import Path, show
from ckpt.core.state.module_node import TWO_TENSORS, is_one, memory_id, view_id
from ckpt.core.state.sharding import belongs_to_torch, named_modules, plain_key, wrapped_attribute
from ckpt.errors import MismatchError, StateError
from ckpt.events import log as logger

EXTRA = "_extra_state"


@dataclass
class OwnState:
    """By prefix: `speakers` are asked for state_dict() at every reading, and nothing below them is read as it lies;
    `extras` for get_extra_state(); `loaders` have their say in loading, so they are handed their own state once it is
    restored. `names`: what tensors are called, if not as they lie; `left_out`: which of them are not saved.
    """

    speakers: dict[str, nn.Module] = field(default_factory=dict)
    extras: dict[str, nn.Module] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    loaders: dict[str, nn.Module] = field(default_factory=dict)
    notes: dict[tuple[str, type[nn.Module]], list[str]] = field(default_factory=dict)

    @property
    def spoken(self) -> bool:
        """Whether there is more than parameters and buffers."""
        return bool(self.speakers or self.extras)

    def speaks(self, prefix: str) -> bool:
        """Whether a module is, or lies in, one that speaks for itself."""
        return any(prefix.startswith(speaker) for speaker in self.speakers)

    def drop(self, prefix: str) -> None:
        """Forget all about what lies below."""
        for found in (self.speakers, self.extras, self.names, self.loaders):
            for key in [key for key in found if key.startswith(prefix)]:
                del found[key]
        self.left_out = {key for key in self.left_out if not key.startswith(prefix)}


def lying(module: nn.Module, words: OwnState, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of what does not speak for itself, by full name."""
    for name, _, each in named_modules(module):
        here = prefix + (name + "." if name else "")
        if not words.speaks(here):
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None and key not in each._non_persistent_buffers_set:
                    yield here + key, tensor


def listen(module: nn.Module, path: Path) -> OwnState:
    """What the modules in `module` say of themselves. What follows from it for the user is logged, once.

    Raises StateError if two tensors have one name.
    """
    words, seen = OwnState(), dict[str, Tensor]()
    for name, tensor in lying(module, words):
        if not is_one(seen.setdefault(name, tensor), tensor):
            raise StateError(f"{show((*path, name))}: {TWO_TENSORS}")
    _listen(module, "", words)
    for (verdict, kind), prefixes in words.notes.items():
        first = show((*path, prefixes[0].rstrip("."))) if prefixes[0] else show(path)
        more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
        _say(f"{first}{more} ({kind.__name__}): {verdict}")
    return words


_said: set[str] = set()


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def _listen(module: nn.Module, prefix: str, words: OwnState) -> None:
    wrapped = wrapped_attribute(module)
    for name, child in module._modules.items():
        if child is not None:
            _listen(child, prefix if name == wrapped else f"{prefix}{name}.", words)
    extra = type(module).get_extra_state is not nn.Module.get_extra_state
    if wrapped is not None and _adds_to_speaker(module, prefix, words, extra):
        words.drop(prefix)
        words.speakers[prefix] = module  # its state_dict() has both
        return
    if extra:
        words.extras[prefix] = module
    saves, loads = _own(module)
    if saves or loads:
        verdict = _judge(module, prefix, words, loads)
        if verdict:
            words.notes.setdefault((verdict, type(module)), []).append(prefix)


def _adds_to_speaker(wrapper: nn.Module, prefix: str, words: OwnState, extra: bool) -> bool:
    """Return True if a wrapper has state next to a module of the same name that speaks for itself."""
    if extra and prefix in words.extras:
        return True
    return prefix in words.speakers and bool(wrapper._parameters or wrapper._buffers or len(wrapper._modules) > 1)


def _own(module: nn.Module) -> tuple[bool, bool]:
    """Whether a module has hooks or methods of its own for saving, and for loading."""

    def has(methods: tuple[str, ...], hooks: Iterable[Any]) -> bool:
        owners = (next(c for c in type(module).__mro__ if name in vars(c)).__module__ for name in methods)
        plain = (home.startswith("torch.") and not home.startswith("torch.ao.") for home in owners)
        return not (all(plain) and all(map(belongs_to_torch, hooks)))

    before, after = module._state_dict_pre_hooks.values(), module._state_dict_hooks.values()
    first, last = module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values()
    saves = has(("state_dict", "_save_to_state_dict"), (*before, *after))
    return saves, has(("load_state_dict", "_load_from_state_dict"), (*first, *last))


GATHERS = (
    "its state_dict() runs collectives, so it is not asked. Parameters, buffers and extra state are saved as they lie; "
    "anything else that its hooks add is not saved"
)
REARRANGES = "its state_dict() rearranges its parameters. They are saved as they lie, which restores the same"
LEAVES_OUT = "its state_dict() leaves out some parameters or buffers. They are not saved"
SPEAKS = "its state_dict() says more than its parameters and buffers, so it is called at every save"


def _judge(module: nn.Module, prefix: str, words: OwnState, loads: bool) -> str:
    """Note what follows from the words of one module; what to tell the user of it."""
    said = _ask(module)
    if said is None:
        return GATHERS
    if loads:
        for inner in [p for p in words.loaders if p.startswith(prefix)]:
            del words.loaders[inner]
        words.loaders[prefix] = module
    here = {key: tensor for key, tensor in lying(module, words, prefix) if key not in words.left_out}
    own = {memory_id(tensor) for tensor in here.values()}
    expected = {p + EXTRA for p in words.extras}
    said = {prefix + plain_key(module, k): v for k, v in said.items()}
    rest = {k: v for k, v in said.items() if k not in expected and not words.speaks(k)}
    new = {k: v for k, v in rest.items() if not isinstance(v, Tensor) or memory_id(v) not in own}
    there = {memory_id(v) for k, v in rest.items() if k not in new}
    missing = {k: tensor for k, tensor in here.items() if memory_id(tensor) not in there}
    again = {prefix + plain_key(module, k): v for k, v in (_ask(module) or {}).items()} if new else {}
    if new and not _rearranged(new, missing, again):
        words.drop(prefix)
        words.speakers[prefix] = module
        return SPEAKS
    if new:
        return REARRANGES
    words.left_out |= missing.keys()
    _rename({k: t for k, t in here.items() if k not in missing}, rest, words)
    return LEAVES_OUT if missing else ""


def _rearranged(new: Mapping[str, Any], missing: Mapping[str, Tensor], again: Mapping[str, Any]) -> bool:
    """Whether what is new may be made of what is missing: as much of it, and nothing that lies somewhere else."""
    if not all(isinstance(value, Tensor) for value in new.values()):
        return False
    if any(isinstance(v := again.get(key), Tensor) and memory_id(v) == memory_id(value) for key, value in new.items()):
        return False  # both answers are alive, so this is kept somewhere
    apart = {memory_id(tensor): tensor.numel() for tensor in missing.values()}
    return sum(apart.values()) == sum(int(value.numel()) for value in new.values())


def _rename(here: Mapping[str, Tensor], said: Mapping[str, Tensor], words: OwnState) -> None:
    """Tensors that a module calls otherwise, such as a wrapper that leaves out its own part of the name."""
    other: dict[object, list[str]] = {}
    for key, tensor in said.items():
        if key not in here:
            other.setdefault(view_id(tensor), []).append(key)
    for key, tensor in here.items():
        if key not in said and (called := other.get(view_id(tensor))):  # tied tensors have several names
            words.names[key] = next((name for name in called if key.endswith(f".{name}")), called[0])


class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collectives end in an error before anything is sent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and any(issubclass(one, distributed.DTensor) for one in types):
            return NotImplemented  # what it makes of it comes here again
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"):
            self.refused = True
            raise RuntimeError(f"{func} is a collective, and other ranks are not asked")
        return func(*args, **(kwargs or {}))


def _ask(module: nn.Module) -> dict[str, Any] | None:
    """What a module says; None if it cannot say it without other ranks."""
    mode = Refusing()
    try:
        with torch.no_grad(), mode:
            said = dict(module.state_dict(keep_vars=True))
    except Exception:
        if not mode.refused:
            raise
    return None if mode.refused else said


def hand_back(module: nn.Module) -> None:
    """Let a module that has its say in loading see what has been restored: its hooks may derive more from it."""
    mode = Refusing()
    try:
        with mode:
            load_into(module, module.state_dict(), strict=False)
    except Exception:
        if not mode.refused:
            raise


def hand_resized(module: nn.Module, path: Path, tensors: Mapping[str, Tensor], strict: bool) -> None:
    """Load tensors of other shapes than the module's own ones through its own loader, which may resize these.

    Everything else is in place already. `tensors`: by their names within the module. Raises MismatchError if the loader
    raises an error.
    """
    state = module.state_dict()
    named = {plain_key(module, key): key for key in state}
    for key, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[key] = value.clone()  # the loader may overwrite its own tensors before it copies
    state.update((named.get(name, name), tensor) for name, tensor in tensors.items())
    try:
        load_into(module, state, strict=strict)
    except Exception as error:
        problem = (
            f"{show(path)}: the loader of {type(module).__qualname__} does not accept the saved "
            f"{', '.join(f'{name} of shape {list(t.shape)}' for name, t in tensors.items())}: {error}"
        )
        if strict:
            raise MismatchError(
                f"{problem}. The rest was restored: make the module as it was, and restore again"
            ) from error
        logger.warning("%s. They were left as they are", problem)


def load_into(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Call load_state_dict(), which need not have the parameter `strict` if the module has written it.

    Return what it returns.
    """
    parameters = inspect.signature(module.load_state_dict).parameters
    takes = "strict" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return module.load_state_dict(state) if strict or not takes else module.load_state_dict(state, strict=False)
