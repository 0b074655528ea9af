"""A training that saves steps to memory, a folder and a bucket. Any other machine can continue from the bucket.

    export AWS_ENDPOINT_URL=… AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…    # or a profile, or a role
    python examples/s3.py s3://bucket/run1 --folder /nvme/run1
    python examples/s3.py s3://bucket/run1 --folder /elsewhere/run1          # on another machine: continues from there

Without an endpoint: `pip install 'moto[server]'`, `moto_server -p 5000`, AWS_ENDPOINT_URL=http://127.0.0.1:5000, any
key and secret, AWS_DEFAULT_REGION=us-east-1, and a bucket from `aws s3 mb` or boto3. The code has no credentials.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import ckpt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("bucket", help="such as s3://bucket/run1")
parser.add_argument("--folder", default="runs/s3", help="folder on a local disk")
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
            save.wait_durable(tier="all")  # only for this demonstration; a training need not wait
            print(f"step {step + 1}: loss {loss.item():.6f}, in the bucket", flush=True)
    # the end of the block uploads the last step too

print(f"done: {given.steps} steps, weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
