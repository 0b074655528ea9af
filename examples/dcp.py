"""FSDP2 with torch's own checkpoint calls, in runs of everystep: verified, atomic, and retained like any other run.

torchrun --nproc-per-node 4 examples/dcp.py runs/dcp          # stop it whenever you like, start it again,
torchrun --nproc-per-node 2 examples/dcp.py runs/dcp          # with another number of ranks
ckpt ls runs/dcp
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
import ckpt.dcp

STEPS, EVERY = 60, 10


class Training:
    """A model and its optimizer, in the form that DCP needs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        self.model: Any = torch.nn.Sequential(*layers)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*layers, self.model):
            fully_shard(module, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]

    def train(self) -> float:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.step))
        loss = (self.model(x) - x.roll(1, 1)).pow(2).mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.step += 1
        return float(loss.detach())


def main(url: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training()
    tiers = [ckpt.Tier(url, every=EVERY, keep=3)]  # add "s3://bucket/dcp" for a copy that survives this machine
    if ckpt.dcp.latest(tiers) is not None:
        dcp.load({"training": training}, storage_reader=ckpt.dcp.StorageReader(tiers))
    if dist.get_rank() == 0:
        print(f"starts at step {training.step}", flush=True)
    writer, saving = ckpt.dcp.StorageWriter(tiers), None
    apart = dist.new_group()  # else messages of the saving thread would mix with those of training
    while training.step < STEPS:
        loss = training.train()
        if training.step % EVERY == 0:
            if saving is not None:
                saving.result()  # raises the error of the previous save, if any
            saving = dcp.async_save(
                {"training": training},
                checkpoint_id=f"step-{training.step}",
                storage_writer=writer,
                process_group=apart,
            )
            if dist.get_rank() == 0:
                print(f"step {training.step}: loss {loss:.4f}", flush=True)
    if saving is not None:
        saving.result()
    leave()


def leave() -> None:
    """Exit without ending the interpreter: a thread of gloo that releases a tensor during that aborts the process."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/dcp")
