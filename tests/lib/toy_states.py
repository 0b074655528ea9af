"""States of every kind, filled, frozen and compared bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

State = dict[str, Any]


def raw(tensor: Tensor) -> bytes:
    """A tensor's elements in row-major order, bit for bit."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().clone()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def freeze(value: Any) -> Any:
    """Everything in a state by value, nothing of it shared with the state."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return (type(value), repr(context), [(name, freeze(getattr(value, name))) for name in names])
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), raw(value))
    if isinstance(value, torch.Generator):
        return freeze(value.get_state())
    if isinstance(value, np.random.Generator):
        return freeze(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.optim.Optimizer):
        state = value.state_dict()
        return freeze([state["param_groups"], [(i, sorted(s.items())) for i, s in sorted(state["state"].items())]])
    if hasattr(value, "state_dict"):
        return freeze(dict(value.state_dict()))
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value), value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return (type(value), [(k, freeze(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [freeze(v) for v in value])
    return (type(value), repr(value))


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the paths at which two frozen states differ."""
    if type(a) is type(b) and isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} entries"]
        names = [x[0] if isinstance(x, tuple) and x and isinstance(x[0], str) else i for i, x in enumerate(a)]
        return [d for n, x, y in zip(names, a, b, strict=True) for d in differences(x, y, f"{path}/{n}")]
    return [] if a == b and type(a) is type(b) else [path]


def fill(tensor: Tensor, seed: int) -> Tensor:
    """Random bits, which for floats means NaN payloads, infinities and subnormals too."""
    numbers = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    numbers = numbers % 2 if tensor.dtype == torch.bool else numbers
    with torch.no_grad():
        return tensor.copy_(numbers.view(tensor.dtype).view(tensor.shape))


class Loader:
    """Stands for any data loader: a state of plain values, tensors and arrays."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
