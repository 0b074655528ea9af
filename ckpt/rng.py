"""Random number generators as parts of a state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckpt.errors import CorruptError


class RNG:
    """Random number generators: Python's, numpy's global one, torch's, and every accelerator's."""

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": (version, np.array(numbers, np.uint64), gauss),
            "numpy": (name, keys, int(position), int(has_gauss), float(cached)),
            "torch": torch.get_rng_state(),
        }
        if torch.accelerator.is_available():
            module = torch.get_device_module()
            state["accelerator"] = [module.get_rng_state(i) for i in range(torch.accelerator.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"not the state of random number generators: {error}") from error

    def _load(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(int(n) for n in numbers), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        saved = state.get("accelerator", [])
        if saved and torch.accelerator.is_available():
            module = torch.get_device_module()
            for i, one in enumerate(saved[: torch.accelerator.device_count()]):
                module.set_rng_state(one.cpu(), i)


class _Generator:
    """One generator object as a Stateful."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put(state["state"])


def adapt(value: object) -> _Generator | None:
    """Generators have states of their own kind; None for anything else."""
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, lambda state: value.set_state(state.cpu()))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, random.Random):
        return _Generator(value.getstate, value.setstate)
    return None
