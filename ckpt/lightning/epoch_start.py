"""Runs on_train_epoch_start again when an epoch is resumed in its middle.

Lightning does not call the hook in that case. But scripts use it for settings of the whole epoch: frozen layers,
weights of losses, the epoch of a data set. So it runs again, and its changes to the restored state are undone. For
example, a learning rate that the hook halves had already been halved before the save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.core.state.sharding import is_dtensor, local
from ckpt.lightning.batches import warn
from ckpt.lightning.collected import LIGHTNING

HOOK = "on_train_epoch_start"
# These callbacks restore all of their state themselves, or their hook would train.
NOT_AGAIN = {"BaseFinetuning", "LearningRateFinder", "BatchSizeFinder", "StochasticWeightAveraging"}


def run_again(trainer: Any, callbacks: list[Any], groups: list[int]) -> bool:
    """Run the hook of the module and of the user's callbacks. Return False if none of them has this hook. `groups`:
    number of parameter groups of each optimizer before the hook."""
    module = trainer.lightning_module
    owners = [one for one in (*callbacks, module) if _is_own(one)]
    if not owners:
        return False
    before, module._current_fx_name = module._current_fx_name, HOOK
    try:
        with _put_back(trainer):
            for optimizer, count in zip(trainer.optimizers, groups, strict=False):
                del optimizer.param_groups[count:]  # the hook may add these groups again
            for one in owners:
                getattr(one, HOOK)(*(() if one is module else (trainer, module)))
    except Exception as error:  # a hook that cannot run twice must not stop the training
        warn(
            trainer,
            "%s.%s failed when it ran again for the resumed epoch, so attributes that it sets may be missing until the "
            "next epoch: %r",
            type(one).__name__,
            HOOK,
            error,
        )
    finally:
        module._current_fx_name = before
    return True


def _is_own(one: Any) -> bool:
    """Return True if a user has overridden the hook."""
    if any(cls.__name__ in NOT_AGAIN for cls in type(one).__mro__):
        return False
    return str(getattr(getattr(one, HOOK), "__module__", "")).partition(".")[0] not in LIGHTNING


@contextlib.contextmanager
def _put_back(trainer: Any) -> Iterator[None]:
    """Undo changes of the block to tensors of the model, to optimizers with their settings, and to schedules."""
    tensors = [t for t in trainer.lightning_module.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
    undo: list[Callable[[], None]] = []
    for optimizer in trainer.optimizers:
        undo.append(_undo(optimizer))
        tensors += [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    for config in trainer.lr_scheduler_configs:
        undo.append(partial(config.scheduler.load_state_dict, deepcopy(config.scheduler.state_dict())))
    memories = [(t, t.data) for t in tensors if not is_dtensor(t)]
    guard = _CopyBeforeWrite(tensors)
    try:
        with guard:
            yield
    finally:
        with torch.no_grad():
            for tensor, memory in memories:
                if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
                    tensor.data = memory
            guard.put_back()
        for work in undo:
            work()


def _undo(optimizer: Any) -> Callable[[], None]:
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    state = [(param, values, dict(values)) for param, values in optimizer.state.items()]

    def undo() -> None:
        optimizer.param_groups[:] = [group for group, _, _ in groups]
        for group, settings, params in groups:
            group.clear()
            group.update(settings)
            group["params"][:] = params
        if [id(p) for p in optimizer.state] != [id(p) for p, _, _ in state]:
            optimizer.state.clear()
            optimizer.state.update({param: values for param, values, _ in state})
        for param, values, saved in state:
            values.clear()
            values.update(saved)
            optimizer.state[param] = values

    return undo


class _CopyBeforeWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies the memory of these tensors before the first write to it, so that `put_back` can restore it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories = {_memory(t) for t in tensors}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                for one in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(one, Tensor) and _memory(one) in self._memories:
                        inner = local(one).detach() if is_dtensor(one) else one.detach()
                        self._copies.append((inner, inner.clone()))
        return func(*args, **kwargs)

    def put_back(self) -> None:
        for tensor, copy in reversed(self._copies):
            tensor.copy_(copy)


def _memory(tensor: Tensor) -> int:
    return (local(tensor) if is_dtensor(tensor) else tensor).untyped_storage().data_ptr()
