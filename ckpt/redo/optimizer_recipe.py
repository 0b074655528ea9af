"""Which tensors of a state an optimizer's step changes by a formula that is known: for a redo log, see
`ckpt.redo.adam`.

torch's own Adam and AdamW, without amsgrad, with an fp32 weight, exp_avg and exp_avg_sq of one shape and cut alike.
Anything else has no recipe, and is stored as the difference to the step before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.optim import Adam, AdamW

from ckpt.format.layout import Layout, TensorSpec
from ckpt.format.values import Path, show
from ckpt.redo.adam import AdamSettings
from ckpt.redo.frame import Recipe
from ckpt.state.sharding import local
from ckpt.state.tensors import memory_of

KNOWN = (Adam, AdamW)  # not what is derived from them: it may step in its own way


Stepping = tuple[Path, torch.optim.Optimizer, dict[int, str]]
"""An optimizer: its path in the state, and what its parameters are called, by id."""


def find_recipes(layout: Layout, tensors: Sequence[torch.Tensor], optimizers: Iterable[Stepping]) -> list[Recipe]:
    """`tensors`: those of the layout, live. The groups of all optimizers are counted in turn."""
    numbers: dict[str, list[int]] = {}
    for number, spec in enumerate(layout.tensors):
        numbers.setdefault(spec.name, []).append(number)
    # A master that needs no gradient has a name of its own in the state, and the optimizer does not know it.
    places = {memory_of(tensor): number for number, tensor in enumerate(tensors) if tensor.nbytes}
    found: list[Recipe] = []
    used: set[int] = set()
    group = 0
    for path, optimizer, called in optimizers:
        for settings in optimizer.param_groups:
            for param in settings["params"] if type(optimizer) in KNOWN and not settings.get("amsgrad") else ():
                name = called[id(param)]
                keys = [name, *(show((*path, "state", name, key)) for key in ("exp_avg", "exp_avg_sq", "step"))]
                pieces = [numbers.get(layout.aliases.get(key, key), []) for key in keys]
                if not pieces[0] and (place := places.get(memory_of(local(param)))) is not None:
                    pieces[0] = [place]
                for recipe in _matched(layout, pieces, group):
                    own = {recipe.weight, recipe.mean, recipe.square}
                    if len(own) == 3 and not used & own:
                        used |= own
                        found.append(recipe)
            group += 1
    return found


def _matched(layout: Layout, pieces: list[list[int]], group: int) -> list[Recipe]:
    """This rank's pieces of the weight, with those of its state that lie in the same place."""
    weights, means, squares, steps = pieces
    if len(steps) > 1:
        return []

    def by_place(numbers: list[int]) -> dict[object, int]:
        return {_place(layout.tensors[i]): i for i in numbers if layout.tensors[i].dtype == "F32"}

    mean, square = by_place(means), by_place(squares)
    return [
        Recipe(i, mean[place], square[place], steps[0] if steps else -1, group)
        for place, i in by_place(weights).items()
        if place in mean and place in square and layout.tensors[i].nbytes
    ]


def _place(tensor: TensorSpec) -> object:
    return tensor.full, tensor.at, tensor.shape


class GroupWatch:
    """What each parameter group told the last step of its optimizer. Schedulers change it before the state is saved."""

    def __init__(self) -> None:
        self._seen: dict[int, list[list[Any] | None]] = {}

    def note(self, optimizer: object) -> None:
        """Called before an optimizer steps."""
        if type(optimizer) in KNOWN:
            self._seen[id(optimizer)] = [_settings(group, optimizer) for group in optimizer.param_groups]  # type: ignore[attr-defined]

    def told(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[list[Any] | None]:
        """Of all groups of these, in turn, as `AdamSettings` for the writer; None: not known."""
        found: list[list[Any] | None] = []
        for optimizer in optimizers:
            groups, seen = optimizer.param_groups, self._seen.get(id(optimizer), [])
            rows = [*seen, *[None] * len(groups)][: len(groups)]
            found += [row and [*row[:-1], _step(optimizer, group)] for row, group in zip(rows, groups, strict=True)]
        return found


def _step(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float | None:
    """How often a group has stepped, going by the first of its parameters; None if only a device knows."""
    for param in group["params"]:
        count = optimizer.state.get(param, {}).get("step")
        if count is not None:
            there = not isinstance(count, torch.Tensor) or (count.device.type == "cpu" and count.numel() == 1)
            return float(count) if there else None
    return None


def _settings(group: dict[str, Any], optimizer: object) -> list[Any] | None:
    rate, betas = group["lr"], group["betas"]
    tensors = [one for one in (rate, *betas) if isinstance(one, torch.Tensor)]
    if any(one.device.type != "cpu" for one in tensors):
        return None  # to look at it would wait for the device
    decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
    decay = float(group["weight_decay"])
    found = astuple(AdamSettings(float(rate), float(betas[0]), float(betas[1]), float(group["eps"]), decay, decoupled))
    return list(found) if all(map(math.isfinite, found[:-1])) else None
