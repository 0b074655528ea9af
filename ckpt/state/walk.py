"""What the user's state consists of: one node for everything in the nested dict that has a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ckpt.errors import StateError
from ckpt.format.values import MAX_DEPTH, Path, show
from ckpt.state.adapted import adapt
from ckpt.state.adapters import PlainNode, Stateful, StatefulNode, StateNode
from ckpt.state.module_node import ModuleNode
from ckpt.state.optimizer_node import OptimizerNode, keeps_elsewhere
from ckpt.state.sharding import unsupported


class Walk:
    """One walk through the state. StateError names the path of what cannot be saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._shape: list[tuple[Any, list[Any]]] = []
        self._objects: list[tuple[Any, Any, object]] = []
        self.nodes: list[StateNode] = list(self._find(state, ()))
        self.optimizers = [node for node in self.nodes if isinstance(node, OptimizerNode)]
        seen: dict[int, Path] = {}
        for node in self.nodes:
            for one in (getattr(node, "optimizer", None), getattr(node, "module", None)):
                if one is not None and seen.setdefault(id(one), node.path) is not node.path:
                    raise StateError(f"{show(node.path)} is the same object as {show(seen[id(one)])}: list it once")

    def moved(self) -> bool:
        """Whether the user has put other objects into the state since."""
        return any(list(_keys(container)) != keys for container, keys in self._shape) or any(
            container[key] is not value for container, key, value in self._objects
        )

    def _find(self, container: Any, path: Path) -> Iterator[StateNode]:
        """A node for everything in a dict or list; containers of stateful things are walked into."""
        if len(path) > MAX_DEPTH:
            raise StateError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH}, or containing itself")
        self._shape.append((container, list(_keys(container))))
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if type(key) not in (str, int):
                raise StateError(f"{show(path)}: the key {key!r} is neither str nor int")
            here = (*path, key)
            if isinstance(value, (nn.Module, torch.optim.Optimizer)) and (instead := unsupported(value)):
                raise StateError(f"{show(here)}: {instead}")
            if isinstance(value, nn.Module):
                yield ModuleNode(here, value)
            elif isinstance(value, torch.optim.Optimizer) and not keeps_elsewhere(value):
                yield OptimizerNode(here, value)
            elif (adapted := adapt(value)) is not None:
                yield StatefulNode(here, adapted)
            elif isinstance(value, Stateful) and not isinstance(value, type):
                yield StatefulNode(here, value)
            elif type(value) in (dict, list, tuple) and _holds_objects(value):
                yield from self._find(value, here)
            elif isinstance(container, tuple):
                raise StateError(f"{show(here)}: cannot be set again in a tuple beside objects; use a list")
            else:
                yield PlainNode(here, container, key)
                continue
            self._objects.append((container, key, value))


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _holds_objects(value: Any, depth: int = 0) -> bool:
    """Whether a container has something with a state of its own inside."""
    if depth > MAX_DEPTH:
        return False
    if type(value) in (dict, list, tuple):
        inner = value.values() if type(value) is dict else value
        return any(_holds_objects(v, depth + 1) for v in inner)
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or adapt(value) is not None:
        return True
    return isinstance(value, Stateful) and not isinstance(value, type)
