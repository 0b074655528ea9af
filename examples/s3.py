"""A training whose steps go to memory, a folder and a bucket. Lose the machine, and any other goes on from the bucket.

    export AWS_ENDPOINT_URL=… AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…    # or a profile, or a role
    python examples/s3.py s3://bucket/run1 --folder /nvme/run1
    python examples/s3.py s3://bucket/run1 --folder /elsewhere/run1          # on another machine: goes on there

No endpoint at hand? `pip install 'moto[server]'`, `moto_server -p 5000`, AWS_ENDPOINT_URL=http://127.0.0.1:5000, any
key and secret, AWS_DEFAULT_REGION=us-east-1, and a bucket made by `aws s3 mb` or boto3. Who you are is nowhere in here.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import ckpt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("bucket", help="such as s3://bucket/run1")
parser.add_argument("--folder", default="runs/s3", help="a disk of this machine")
parser.add_argument("--steps", type=int, default=600)
given = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
optim = torch.optim.AdamW(model.parameters())
state = {"model": model, "optim": optim, "rng": ckpt.RNG()}
tiers = [
    ckpt.Tier(given.folder, every=20, keep=2),
    ckpt.Tier(given.bucket, every=100, keep=ckpt.Keep(last=3, every=1000)),
]

with ckpt.Checkpointer(state, tiers) as cp:
    start = cp.restore(default=0)
    came = cp.last_restore
    print(f"starts at step {start}" + (f", from {came.tier}" if came is not None and came.tier else ""), flush=True)
    for step in range(start, given.steps):
        x = torch.randn(64, 128)
        loss = (model(x) - x.flip(1)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        save = cp.step(step + 1)
        if (step + 1) % 100 == 0:
            assert save is not None
            save.wait_durable(tier="all")  # for this demonstration: to be able to say so. A training need not wait
            print(f"step {step + 1}: loss {loss.item():.6f}, in the bucket", flush=True)
    # leaving the block brings the last step to the bucket too

print(f"done: {given.steps} steps, weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
