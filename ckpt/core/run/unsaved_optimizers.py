"""Warns about optimizers that step parameters of the state without being in it: a restart would lose their moments."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ckpt.core.state.capture import Capture
from ckpt.core.state.nodes import StatefulNode
from ckpt.core.state.optimizer_node import OptimizerNode, all_of_one_state
from ckpt.core.state.structure import params_of, steps_for
from ckpt.events import log

DEPTH = 3  # how many attributes deep a wrapper may hold an optimizer
_watching: weakref.WeakSet[UnsavedOptimizers] = weakref.WeakSet()


class UnsavedOptimizers:
    """Logs one warning that names the optimizers that one Checkpointer does not save."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned = False
        _watching.add(self)

    def close(self) -> None:
        _watching.discard(self)

    def check(self, stepped: Iterable[Any]) -> None:
        """Check the optimizers that have stepped since the last call. Each is checked once."""
        new = [one for one in stepped if one not in self._checked]
        if not new or self._warned:
            return
        self._checked.update(new)
        if unsaved := [one for one in new if self._names(one) and not any(w.saves(one) for w in list(_watching))]:
            self._warned = True
            log.warning(
                "%s stepped parameters of the state, but is not in it. A restart loses its moments and settings: put "
                "it into the state of the Checkpointer",
                _listed([self._described(one) for one in unsaved]),
            )

    def saves(self, optimizer: Any) -> bool:
        """Return True if an optimizer is in the state, or inside a wrapper that is."""
        held = (found for node in self._capture.nodes for found in _saved_with(node))
        return any(one is optimizer or steps_for(optimizer, one) for one in (*self._capture.optimizers, *held))

    def _names(self, optimizer: Any) -> list[str]:
        return [name for p in params_of(optimizer) if (name := self._capture.name_of(p))]

    def _described(self, optimizer: Any) -> str:
        names, kind = self._names(optimizer), type(optimizer)
        count = f"{len(names)} parameter{'s' if len(names) > 1 else ''}"
        return f"{kind.__module__}.{kind.__qualname__} ({count}, {names[0]})"


def _listed(texts: list[str]) -> str:
    more = len(texts) - 1
    return texts[0] if not more else f"{texts[0]} and {more} more optimizer{'s' if more > 1 else ''}"


def _saved_with(node: Any) -> Iterable[Any]:
    """Return the optimizers whose moments a node saves. None for modules: what an optimizer in one keeps is not saved.

    An object that is saved through its `state_dict()` counts if it has tensors or the groups of an optimizer in it.
    """
    if isinstance(node, OptimizerNode):
        return all_of_one_state(node.optimizer)
    if isinstance(node, StatefulNode) and not node.may_have_moments():
        return ()
    return _optimizers_in(getattr(node, "target", None) or getattr(node, "optimizer", None))


def _optimizers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the optimizers that an object holds in its attributes, and itself if it is one."""
    if value is None or isinstance(value, nn.Module | torch.Tensor | type | LRScheduler) or depth > DEPTH:
        return
    if isinstance(value, torch.optim.Optimizer):
        yield value
    held = list(value) if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    for one in list(value.values() if isinstance(value, dict) else held):
        if isinstance(one, torch.optim.Optimizer | list | tuple | dict) or hasattr(type(one), "state_dict"):
            yield from _optimizers_in(one, depth + 1)
