"""Objects with `state_dict()` and `load_state_dict()`, and wrappers that add these methods.

The wrappers are for random number generators and gradient scalers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler

from ckpt.core.state.tensors import device_in_use
from ckpt.errors import CorruptError

_LIVE = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}  # a scaler's tensors on the device, by saved name


@runtime_checkable
class Stateful(Protocol):
    """Any object with a state that can be saved and loaded, for example a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Resizable(Stateful, Protocol):
    """An object whose state must be divided again when the number of ranks changes, for example a data loader.

    `load_state_dicts` is called instead of `load_state_dict`, with the states of all ranks that saved, in rank order.
    """

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int, /) -> Any: ...


class Generator:
    """Adds state_dict() and load_state_dict() to a generator."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put(state["state"])


class Scaler:
    """A GradScaler whose two device numbers stay tensors. Its own state_dict() reads them, which makes the host wait
    for all work queued on the device."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scaler: Any = self._scaler
        live = {key: getattr(scaler, name, None) for key, name in _LIVE.items()}  # a disabled scaler has neither
        if not all(isinstance(one, Tensor) for one in live.values()):
            return dict(scaler.state_dict())  # no tensor is on a device yet
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
    """Return a wrapper for a generator or scaler. Return None for all other objects."""
    if isinstance(value, torch.Generator):
        return Generator(value.get_state, lambda state: value.set_state(state.cpu()))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, np.random.RandomState):
        return Generator(lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, random.Random):
        return Generator(value.getstate, value.setstate)
    if isinstance(value, GradScaler) and type(value).state_dict is GradScaler.state_dict:
        return Scaler(value)
    return None


class RNG:
    """The random number generators of Python, numpy (global), torch and every accelerator."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()  # Python's state and its array, cached because few trainings use it
        self._array = np.array((), np.uint64)

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        if numbers != self._numbers:
            self._numbers, self._array = numbers, np.array(numbers, np.uint64)
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": (version, self._array, gauss),
            "numpy": (name, keys, int(position), int(has_gauss), float(cached)),
            "torch": torch.get_rng_state(),
        }
        if _in_use():
            module = torch.get_device_module()
            state["accelerator"] = [module.get_rng_state(i) for i in range(torch.accelerator.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"not the state of random number generators: {error}") from error

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Load after the number of ranks has changed: each rank continues the stream of the same rank number.

        Ranks beyond those that saved start new streams, seeded from the saved ones. If all ranks had the same stream,
        they have the same stream again.
        """
        self.load_state_dict(states[rank % len(states)])
        try:
            marks = {_mark(state) for state in states}
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"not the states of random number generators: {error}") from error
        if rank >= len(states) and len(marks) > 1:
            seed = int.from_bytes(hashlib.sha256(_mark(states[rank % len(states)]) + b"%d" % rank).digest()[:8], "big")
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed % 2**63)

    def _load(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        python = version, tuple(int(n) for n in numbers), gauss
        random.Random().setstate(python)  # check all of it before changing anything
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"].cpu())
        random.setstate(python)
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        saved = state.get("accelerator", [])
        if saved and torch.accelerator.is_available():
            module = torch.get_device_module()
            for i, one in enumerate(saved[: torch.accelerator.device_count()]):
                module.set_rng_state(one.cpu(), i)


def _in_use() -> bool:
    """Return True if an accelerator was initialized by other code. A training on the CPU leaves it alone."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return there is not None and (there.type != "cuda" or device_in_use())


def _mark(state: dict[str, Any]) -> bytes:
    """Return a digest that differs if two states differ."""
    found = hashlib.sha256(
        repr((state["python"][0], state["python"][2], state["numpy"][0], state["numpy"][2:])).encode()
    )
    for array in (state["python"][1], state["numpy"][1]):
        found.update(np.asarray(array).tobytes())
    for tensor in (state["torch"], *state.get("accelerator", ())):
        found.update(tensor.cpu().numpy().tobytes())
    return found.digest()
