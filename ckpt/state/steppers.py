"""Which optimizer steps what: what may be copied beside training, because nothing else changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ckpt.format.values import show
from ckpt.state.adapters import Contents, StatefulNode, StateNode
from ckpt.state.module_node import ModuleNode
from ckpt.state.optimizer_node import OptimizerNode
from ckpt.state.sharding import StateEntry


def guards_of(nodes: Sequence[StateNode], entries: Sequence[StateEntry], eager: set[str]) -> dict[str, bool]:
    """By name: whether only optimizer steps change it. Whatever else writes, such as an average, may do so any time,
    and so may what writes to the `eager` ones, and an optimizer whose steps run no hooks."""
    optimizers = [node for node in nodes if isinstance(node, OptimizerNode)]
    exposed = tuple(show(node.path) + "." for node in optimizers if node.unguarded)
    stepped = {id(p) for node in optimizers if not node.unguarded for p in params_of(node.optimizer)}

    def may_overlap(entry: StateEntry) -> bool:
        if not entry.guarded or entry.name in eager or entry.name.startswith(exposed):
            return False
        whole = entry.owner.tensor
        return not isinstance(whole, nn.Parameter) or id(whole) in stepped

    return {entry.name: may_overlap(entry) for entry in entries}


def steppers_of(
    nodes: Sequence[StateNode], pieces: Sequence[Contents], entries: Sequence[StateEntry]
) -> dict[str, frozenset[int]]:
    """By name: the ids of the optimizers that change it."""
    of_param: dict[int, set[int]] = {}
    of_name: dict[str, int] = {}
    for node, piece in zip(nodes, pieces, strict=True):
        if isinstance(node, OptimizerNode):
            of_name.update((name, id(node.optimizer)) for name in piece.names)
            for param in params_of(node.optimizer):
                of_param.setdefault(id(param), set()).add(id(node.optimizer))
    found: dict[str, frozenset[int]] = {}
    for entry in entries:
        owner = {of_name[entry.name]} if entry.name in of_name else set[int]()
        found[entry.name] = frozenset(owner | of_param.get(id(entry.owner.tensor), set()))
    return found


def params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def steps_for(stepping: Any, optimizer: Any) -> bool:
    """Whether this is the optimizer, or one that it is only a wrapper of, as Accelerate's is."""
    if stepping is optimizer:
        return True
    groups = list(optimizer.param_groups)
    return bool(groups) and all(any(one is group for one in stepping.param_groups) for group in groups)


def says_copies(node: StateNode, piece: Contents) -> bool:
    """Whether tensors are what an object says of itself, and not memory of its own for certain."""
    if isinstance(node, ModuleNode):
        return node.kind != "module"
    tensors = [entry.tensor for entry in (*piece.fixed, *piece.loose)] if isinstance(node, StatefulNode) else []
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
