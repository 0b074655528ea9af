"""Presents several optimizers as one, for pipeline stages that are on this rank but elsewhere on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

IN_TURN = ("params", "param_names")  # the keys of a group that are concatenated


class Joint(torch.optim.Optimizer):
    """Presents optimizers with equal groups of different parameters as a single optimizer.

    It is a view: reads and writes go to the parts. It steps when all parts have stepped. `parts`: in order.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Join optimizers. Raise ValueError if their numbers of groups differ."""
        if len({len(one.param_groups) for one in parts}) != 1:
            raise ValueError("optimizers with other numbers of groups are not alike")
        self.parts = tuple(parts)
        self.defaults = getattr(parts[0], "defaults", {})
        self.state = _States(self.parts)  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        return [_Group(alike) for alike in zip(*(one.param_groups for one in self.parts), strict=True)]


class _Group(MutableMapping[str, Any]):
    """The groups with the same index in all parts."""

    def __init__(self, alike: Sequence[dict[str, Any]]) -> None:
        self._alike = alike

    def __getitem__(self, key: str) -> Any:
        if key in IN_TURN:
            return [one for group in self._alike for one in group[key]]
        return self._alike[0][key]

    def __setitem__(self, key: str, value: Any) -> None:
        for group in self._alike:
            group[key] = value

    def __delitem__(self, key: str) -> None:
        for group in self._alike:
            del group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._alike[0])

    def __len__(self) -> int:
        return len(self._alike[0])


class _States(MutableMapping[Tensor, dict[str, Any]]):
    """The state of all parameters. Check for a parameter first: torch's defaultdict would create a missing entry."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        for part in self._parts:
            if param in part.state:
                values: dict[str, Any] = part.state[param]
                return values
        raise KeyError(param)

    def __setitem__(self, param: Tensor, values: dict[str, Any]) -> None:
        home = next(part for part in self._parts if any(p is param for g in part.param_groups for p in g["params"]))
        home.state[param] = values

    def __delitem__(self, param: Tensor) -> None:
        for part in self._parts:
            part.state.pop(param, None)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def values(self) -> Any:
        """Return the values of all parts in order, without lookups."""
        return chain.from_iterable(part.state.values() for part in self._parts)

    def clear(self) -> None:
        for part in self._parts:
            part.state.clear()
