"""The moment before an optimizer changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import UsageError
from ckpt.trainer.staging.device import is_capturing


class UpdateHook:
    """Calls `before()` ahead of the first change that an optimizer makes to what is saved; counts the steps of these.
    `concerns` says of an optimizer of this process whether it is one of them.

    An optimizer that is given a closure runs forward and backward inside its step, so `before` is called when the
    closure first returns. A step inside a graph that is being captured runs no hooks when it is replayed later:
    `on_captured` is told which optimizer that is.
    """

    def __init__(
        self, before: Callable[[], None], on_captured: Callable[[object], None], concerns: Callable[[Any], bool]
    ) -> None:
        self.count = 0
        self._announced: dict[int, object] = {}
        self.on_step: Callable[[object], None] | None = None  # told which optimizer is about to step
        self._before, self._on_captured, self._concerns = before, on_captured, concerns
        self._handle = register_optimizer_step_pre_hook(_untraced(self._hook))
        self._active = True

    def remove(self) -> None:
        self._active = False
        self._handle.remove()

    def announced(self) -> list[object]:
        """The optimizers that have stepped, or are about to, since this was asked the last time."""
        found, self._announced = self._announced, {}
        return list(found.values())

    def fence(self, optimizers: list[Any]) -> None:
        """The caller is about to do what these would do, without them. UsageError within a capture: nothing waits at a
        replay for what was said while it was captured."""
        if is_capturing():
            raise UsageError("fence() belongs before the replay of a graph, not into its capture")
        self.count += 1
        self._announced.update((id(one), one) for one in optimizers)
        self._before()

    def silence(self) -> None:
        """In a forked child, where locks may be held by threads that are not there: do nothing any more."""
        self._active = False

    def _hook(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active or not self._concerns(optimizer):
            return None
        self.count += 1
        self._announced[id(optimizer)] = optimizer
        if self.on_step is not None:
            self.on_step(optimizer)
        if is_capturing():
            self._on_captured(optimizer)
            return None
        closure = kwargs.get("closure") or next((a for a in args[1:2] if callable(a)), None)
        if closure is None:
            self._before()
            return None

        def first_then_wait(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self._before()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": first_then_wait}
        return (args[0], first_then_wait, *args[2:]), kwargs


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Called as it is also in a step that is compiled, where torch would take what it finds for constants."""

    def call(*arguments: Any) -> Any:
        return hook(*arguments)

    disable: Callable[..., Callable[..., Any]] | None = getattr(torch, "_disable_dynamo", None)
    return call if disable is None else disable(call)  # unlike torch.compiler.disable it imports no compiler for it
