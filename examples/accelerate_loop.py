"""A custom training loop with Hugging Face Accelerate. The lines with `ckpt`, `cp` or `meta` save and resume it.

    pip install -e . accelerate
    python examples/accelerate_loop.py runs/loop --kill-at 30    # kills itself, with SIGKILL, after step 30
    python examples/accelerate_loop.py runs/loop                 # continues: the same losses, the same weights
    torchrun --nproc-per-node 2 examples/accelerate_loop.py runs/loop-2    # or: accelerate launch, on GPUs

A step is an optimizer step: `accelerator.sync_gradients` is true after enough accumulated gradients. The state contains
the position in the data (`meta`). `skip_first_batches` makes the sampler skip the batches that are already trained.
The order of an epoch must follow from its number (`use_seedable_sampler`). The loader has its own generator, so that a
restart draws nothing from the global one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt

EPOCHS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder or URL of the checkpoints")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP")
    options = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
        cpu=not torch.accelerator.is_available(),
    )
    torch.manual_seed(
        accelerator.process_index
    )  # dropout differs between ranks; DDP broadcasts the weights of the first one
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))
    optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100)
    data = TensorDataset(torch.randn(330, 32, generator=torch.Generator().manual_seed(1)))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, optim, sched, loader = accelerator.prepare(model, optim, sched, loader)

    meta: dict[str, Any] = {"epoch": 0, "batch": 0, "losses": []}
    state = {"model": model, "optim": optim, "sched": sched, "rng": ckpt.RNG(), "meta": meta}
    with ckpt.Checkpointer(state, options.run) as cp:
        step = cp.restore(default=0)
        accelerator.print(f"starts at step {step}", flush=True)
        while meta["epoch"] < EPOCHS:
            loader.set_epoch(meta["epoch"])
            for (x,) in skip_first_batches(loader, meta["batch"]):
                with accelerator.accumulate(model):
                    loss = (model(x) - x.flip(1)).square().mean()
                    accelerator.backward(loss)
                    optim.step()
                    sched.step()
                    optim.zero_grad()
                meta["batch"] += 1
                meta["losses"].append(loss.item())
                if accelerator.sync_gradients:
                    step += 1
                    cp.step(step)
                    if step == options.kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
            meta.update(epoch=meta["epoch"] + 1, batch=0)

    total = hashlib.sha256(repr((step, meta["losses"])).encode())
    for tensor in accelerator.unwrap_model(model).state_dict().values():
        total.update(tensor.cpu().numpy().tobytes())
    os.write(1, f"\nrank {accelerator.process_index}: {step} steps, {total.hexdigest()}\n".encode())
    if accelerator.num_processes > 1:
        torch.distributed.destroy_process_group()
        os._exit(0)


if __name__ == "__main__":
    main()
