"""Objects that have a state of their own kind, each made something with `state_dict()`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler

_LIVE = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}  # what a device holds of a scaler, by its saved name


class Generator:
    """One generator object."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put(state["state"])


class Scaler:
    """A GradScaler whose two numbers on the device stay tensors: to ask for them, as its own state_dict() does, makes
    the host wait for everything that the device has yet to do."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scaler: Any = self._scaler
        live = {key: getattr(scaler, name) for key, name in _LIVE.items()}
        if not scaler.is_enabled() or not all(isinstance(one, Tensor) for one in live.values()):
            return dict(scaler.state_dict())  # nothing is on a device yet
        settings = {
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }
        return {**settings, **live}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plain = {key: one.item() if isinstance(one, Tensor) else one for key, one in state.items()}
        self._scaler.load_state_dict(plain)


def adapt(value: object) -> Generator | Scaler | None:
    """None for what needs no help."""
    if isinstance(value, torch.Generator):
        return Generator(value.get_state, lambda state: value.set_state(state.cpu()))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, random.Random):
        return Generator(value.getstate, value.setstate)
    if isinstance(value, GradScaler) and type(value).state_dict is GradScaler.state_dict:
        return Scaler(value)
    return None
