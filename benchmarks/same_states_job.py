"""Save or restore one seeded run for `same_states.py`, with whichever everystep is on PYTHONPATH.

    python benchmarks/same_states_job.py save RUN SEED
    python benchmarks/same_states_job.py restore RUN SEED

The seed chooses model, optimizer, dtypes, plain values, the options of the tier and how the process ends. Each line of
the output is one JSON list: what was done, and the digest of the state after it. Only public names are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ckpt

STEPS = 10
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, batch: Tensor) -> Tensor:
        return torch.as_tensor(self.second(torch.relu(self.first(batch))))


def models(dice: random.Random) -> nn.Module:
    width = dice.choice([7, 32, 300])
    made = [
        lambda: nn.Sequential(nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 24)),
        lambda: nn.Sequential(nn.Linear(24, width), nn.BatchNorm1d(width), nn.Linear(width, 24)),
        lambda: nn.Sequential(nn.Linear(24, width), nn.Dropout(0.2), nn.Linear(width, 24)),
        Tied,
    ]
    return dice.choice(made)()


def optimizers(dice: random.Random, model: nn.Module) -> torch.optim.Optimizer:
    lr = dice.choice([1e-1, 1e-3])
    made = [
        lambda p: torch.optim.AdamW(p, lr=lr),
        lambda p: torch.optim.AdamW(p, lr=lr, amsgrad=True, fused=True),
        lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=lr),
        lambda p: torch.optim.Adagrad(p, lr=lr),
    ]
    optimizer: torch.optim.Optimizer = dice.choice(made)(model.parameters())
    return optimizer


def bits_of(dtype: torch.dtype, count: int) -> Tensor:
    """Return random bits, which contain NaN payloads, infinities and denormals."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


restored: dict[str, Tensor] = {}  # tensors of the state that is restored; a test damages them here


def build(seed: int, *, other: bool) -> dict[str, Any]:
    """Return the state of a seed. `other`: with the same structure and other values, for a restore."""
    dice, values = random.Random(seed), seed + 1_000_000 * other
    torch.manual_seed(values)
    np.random.seed(values)
    random.seed(values)
    model = models(dice)
    optimizer = optimizers(dice, model)
    odd = {str(dtype): bits_of(dtype, dice.choice([1, 5, 4000])) for dtype in dice.sample(DTYPES, 6)}
    restored.update(odd)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "odd": odd, "rng": ckpt.RNG()}
    state["large"] = {"frozen": torch.randn(dice.choice([10, 1 << 18])), "some": torch.randn(400, 64)}
    if dice.random() < 0.5:
        state["sched"] = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state["plain"] = {"step": 0, "losses": [], "array": np.zeros((3, 5)), "pair": (1, None), 7: {"x": {1, 2}}}
    return state


def train(state: dict[str, Any], step: int) -> None:
    """Train one step. The batch depends on the step alone."""
    batch = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
    loss = state["model"](batch).square().mean() + 0.0 * torch.rand(())
    loss.backward()
    state["optim"].step()
    state["optim"].zero_grad()
    if "sched" in state:
        state["sched"].step()
    for value in state["odd"].values():
        value.view(torch.uint8)[:: 1 + step % 3] ^= 1
    state["large"]["some"][step % 400] += 1.0
    state["plain"]["step"] = step
    state["plain"]["losses"].append(loss.item())
    state["plain"]["array"][step % 3] = step


def digest(value: Any) -> str:
    """Return a digest of all values of a state, bit for bit."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, Tensor):
            whole = one.detach().contiguous()
            found.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
            found.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, np.ndarray):
            found.update(f"{one.dtype} {one.shape}".encode() + one.tobytes())
        elif isinstance(one, ckpt.RNG):
            add([torch.get_rng_state(), list(np.random.get_state()), random.getstate()])
        elif hasattr(one, "state_dict"):
            add(one.state_dict())
        elif isinstance(one, dict):
            for key, inner in one.items():
                found.update(repr(key).encode())
                add(inner)
        elif isinstance(one, (list, tuple)):
            found.update(f"{type(one).__name__} {len(one)}".encode())
            for inner in one:
                add(inner)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()[:24]


def tier(run: str, seed: int) -> ckpt.Tier:
    dice = random.Random(seed)
    compression, full_every = dice.choice(["none", "auto", "zstd"]), dice.choice([2, 4, 100])
    return ckpt.Tier(run, every=dice.choice([1, 2, 3]), compression=compression, full_every=full_every)


def say(what: str, found: str) -> None:
    print(json.dumps([what, found]), flush=True)


def save(run: str, seed: int) -> None:
    """Train, save, and end: by close, or by SIGKILL with the last step in memory."""
    state, saves = build(seed, other=False), list[ckpt.Save]()
    with ckpt.Checkpointer(state, tier(run, seed), triggers=None, memory=ckpt.Memory(linger_s=60)) as cp:
        cp.restore(default=0)
        for step in range(1, STEPS + 1):
            train(state, step)
            say(f"trained {step}", digest(state))
            made = cp.step(step)
            if made is not None:
                made.wait_staged(60)
                saves += [made] if made.tiers else []
        for made in saves:
            made.wait_durable(60)
        if seed % 2:
            os.kill(os.getpid(), signal.SIGKILL)


def restore(run: str, seed: int) -> None:
    """Restore the newest step and then each checkpoint, and load each without a state."""
    state = build(seed, other=True)
    steps = sorted(found.step for found in ckpt.Run(run).list())
    with ckpt.Checkpointer(state, tier(run, seed), triggers=None, memory=ckpt.Memory(linger_s=0)) as cp:
        say(f"restored the newest, {cp.restore()}", digest(state))
        for step in steps:
            assert cp.restore(step=step) == step
            say(f"restored {step}", digest(state))
    for step in steps:
        say(f"loaded {step}", digest(dict(sorted(ckpt.load(run, step=step).all().items()))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"save": save, "restore": restore}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
