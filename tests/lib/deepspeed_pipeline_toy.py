"""Small trainings by DeepSpeed's pipeline engine, one after another, each in FOLDER/ZERO-TIED.

RANK=0 WORLD_SIZE=2 … python -c 'import deepspeed_pipeline_toy; deepspeed_pipeline_toy.main()' ACTION FOLDER CASE…

kill       trained to `STEPS` by DeepSpeed alone, and again with everystep to step `KILLED`, and then SIGKILL to itself
go_on      restored, and trained to `STEPS`
all_layers by ranks that have all layers: restored, and trained for one step
again      as go_on, for one more step, by any number of ranks
refuse     print the error
CASE       ZERO or ZERO-tied: the stage of ZeRO, and whether the first layer and the last share a weight; in ZERO-bias
           each also has its own bias
Prints a JSON line for each step of each case, and for each restore.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

import ckpt
import ckpt.deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles an all-reduce first, for a minute

STEPS, KILLED, BATCH, WIDTH = 6, 4, 8, 16


class Job:
    def __init__(self, case: str, stages: int) -> None:
        zero, _, tied = case.partition("-")
        self.case, self.dtype = case, torch.bfloat16 if int(zero) else torch.float32
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
        if tied:
            layers[0] = layers[3] = TiedLayerSpec("end", nn.Linear, WIDTH, WIDTH, bias=tied == "bias")
        self.shares = dist.get_world_size() // stages
        net = PipelineModule(layers, stages, loss_fn=_loss, seed_layers=True, base_seed=3, partition_method="uniform")
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // self.shares // 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": int(zero)},
            "bf16": {"enabled": bool(int(zero))},
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=net, config=config)

    def attach(self, folder: str) -> ckpt.Checkpointer:
        return ckpt.deepspeed.attach(self.engine, folder)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        whole = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(self.dtype)
        for part in whole[self.engine.grid.get_data_parallel_rank() :: self.shares].chunk(2):
            yield part, part.roll(1, 1)

    def train(self, step: int) -> None:
        loss = float(self.engine.train_batch(self.batches(step)))
        say(case=self.case, step=step + 1, loss=loss, weights=self.digest())

    def digest(self) -> str:
        """Return a digest of the weights of all stages."""
        mine = {name: _digest(p) for name, p in self.engine.module.named_parameters()}
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, mine)
        return hashlib.sha256(
            str(sorted({k: v for one in of_all for k, v in one.items()}.items())).encode()
        ).hexdigest()


def _loss(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).float().pow(2).mean()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()


def say(**words: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(words), flush=True)


def kill(folder: str, cases: list[str]) -> None:
    for case in cases:
        job = Job(case, 2)
        for step in range(STEPS):
            job.train(step)
    jobs = [Job(case, 2) for case in cases]
    for job in jobs:
        cp = job.attach(f"{folder}/{job.case}")
        cp.restore(default=0)
        for step in range(KILLED):
            job.train(step)
            save = cp.step()
            assert save is not None
            save.wait_staged(60)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: str, cases: list[str], stages: int = 2, steps: int = STEPS) -> None:
    for case in cases:
        job = Job(case, stages)
        with job.attach(f"{folder}/{case}") as cp:
            start = cp.restore()
            say(case=case, restored=start, tier=cp.last_restore.tier, weights=job.digest())
            for step in range(start, steps):
                job.train(step)
                cp.step()


def all_layers(folder: str, cases: list[str]) -> None:
    go_on(folder, cases, 1, STEPS + 1)


def again(folder: str, cases: list[str]) -> None:
    go_on(folder, cases, 2, STEPS + 2)


def refuse(folder: str, cases: list[str]) -> None:
    for case in cases:
        try:
            Job(case, 2).attach(folder)
        except ckpt.errors.UsageError as error:
            say(case=case, error=str(error))


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    action, folder, *cases = sys.argv[1:]
    actions = {"kill": kill, "go_on": go_on, "all_layers": all_layers, "again": again, "refuse": refuse}
    actions[action](folder, cases)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some of gloo's threads do not leave
