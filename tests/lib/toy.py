"""A small, deterministic training that tests start, kill and start again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

import ckpt

WIDTH = 64


def build(seed: int = 0) -> dict[str, Any]:
    """A state with a module, buffers that change in forward, an optimizer, a schedule, RNG and plain values."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optim": optim,
        "sched": torch.optim.lr_scheduler.CosineAnnealingLR(optim, 1000),
        "rng": ckpt.RNG(),
        "meta": {"losses": []},
    }


def train_step(state: dict[str, Any]) -> None:
    x = torch.randn(8, WIDTH)
    loss = (state["model"](x) - x.roll(1, 1)).pow(2).mean()
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()
    state["sched"].step()
    state["meta"]["losses"].append(loss.item())


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    found = [t.detach() for t in state["model"].state_dict().values()]
    for values in state["optim"].state.values():
        found += [v for v in values.values() if isinstance(v, torch.Tensor)]
    return found


def digest(state: dict[str, Any]) -> str:
    """Return a digest of every bit of the state."""
    total = hashlib.sha256(json.dumps([state["meta"], state["sched"].state_dict()["last_epoch"]]).encode())
    for tensor in tensors(state):
        total.update(tensor.contiguous().numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()


def bits(found: dict[str, torch.Tensor]) -> str:
    """A digest of every bit of tensors by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def reference(steps: int) -> str:
    """The digest after an uninterrupted run, without any checkpointing."""
    state = build()
    for _ in range(steps):
        train_step(state)
    return digest(state)
