"""A minimal training with checkpoints: the lines that mention `ckpt` or `cp`.

    python examples/plain.py runs/plain

Kill it at any moment, with Ctrl-C or kill -9, and start it again: it continues at the same step.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import ckpt

STEPS = 1500

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
optim = torch.optim.AdamW(model.parameters())
state = {"model": model, "optim": optim, "rng": ckpt.RNG()}

with ckpt.Checkpointer(state, sys.argv[1] if sys.argv[1:] else "runs/plain") as cp:
    start = cp.restore(default=0)
    print(f"starts at step {start}", flush=True)
    for step in range(start, STEPS):
        x = torch.randn(64, 128)
        loss = (model(x) - x.flip(1)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        cp.step(step + 1)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)

print(f"done: {STEPS} steps")
