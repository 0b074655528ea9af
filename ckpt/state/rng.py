"""Random number generators as parts of a state."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from ckpt.errors import CorruptError
from ckpt.state.tensors import device_in_use


class RNG:
    """Random number generators: Python's, numpy's global one, torch's, and every accelerator's."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()  # of Python's at the last time, and as an array: few trainings use it
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
        """When the number of ranks has changed: a rank goes on where the rank of its number stopped.

        Ranks beyond those that saved start streams of their own, made from the saved ones; but if all ranks had the
        same stream, they have it as well.
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
        random.Random().setstate(python)  # nothing is changed before all of it is known to be right
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
    """Whether an accelerator is there, and was woken up by somebody else: a training on the CPU leaves it alone."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return there is not None and (there.type != "cuda" or device_in_use())


def _mark(state: dict[str, Any]) -> bytes:
    """Differs if two states do."""
    found = hashlib.sha256(
        repr((state["python"][0], state["python"][2], state["numpy"][0], state["numpy"][2:])).encode()
    )
    for array in (state["python"][1], state["numpy"][1]):
        found.update(np.asarray(array).tobytes())
    for tensor in (state["torch"], *state.get("accelerator", ())):
        found.update(tensor.cpu().numpy().tobytes())
    return found.digest()
