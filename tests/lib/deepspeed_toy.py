"""Small trainings under DeepSpeed, several of them in one process, because starting one is slow.

RANK=0 WORLD_SIZE=2 … python -c 'import deepspeed_toy; deepspeed_toy.main()' ACTION FOLDER CASE[=OTHER]…

kill FOLDER CASE…        each is trained to `STEPS` by DeepSpeed alone; then again with everystep, into FOLDER/CASE, and
                         killed in the middle of step `KILLED` + 1: SIGKILL to itself
go_on FOLDER CASE…       restored, and trained to `STEPS`; then also saved by DeepSpeed's own save_checkpoint
take_over FOLDER CASE=OTHER…    the checkpoint of CASE is restored with the settings of OTHER
Prints a JSON line for each step of each case, and for each restore.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

import ckpt
import ckpt.deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles an all-reduce first, for a minute
get_accelerator().is_fp16_supported = lambda: True  # torch computes with it on any CPU, if slowly

STEPS, KILLED = 7, 4
BATCH = 12
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
SCALED = {"fp16": {"initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}}  # overflows, and grows again
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "0-fp32": (0, "fp32", {}),
    "0-bf16": (0, "bf16", {}),
    "0-fp16": (0, "fp16", SCALED),
    "1-bf16": (1, "bf16", {}),
    "1-bf16-fp32-sums": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "2-fp16-twice": (2, "fp16", SCALED | {"gradient_accumulation_steps": 2}),
    "2-bf16-offload": (2, "bf16", OFFLOAD),
    "2-fp32": (2, "fp32", {}),
    "3-bf16": (3, "bf16", {}),
    "3-fp16": (3, "fp16", SCALED),
    "3-fp32-offload": (3, "fp32", OFFLOAD),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Net(nn.Module):
    """Uneven shapes, tied weights, frozen ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 61), nn.LayerNorm(61), nn.Linear(61, 32, bias=False)
        self.again = nn.Linear(61, 32, bias=False)
        self.again.weight = self.last.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1  # another tensor each time
        hidden = self.norm(nn.functional.gelu(self.first(x)))
        return self.last(hidden) + self.again(hidden) + 0.1 * self.frozen(x)


class Job:
    """One training under DeepSpeed."""

    def __init__(self, case: str) -> None:
        stage, self.dtype, more = CASES[case]
        torch.manual_seed(0)
        net, world = Net(), dist.get_world_size()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH // world,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        for key, value in more.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        trained = [p for p in net.parameters() if p.requires_grad]
        self.case, self.stage = case, stage
        self.engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=config)

    def train(self, step: int, cp: Any = None) -> float:
        for part in range(self.engine.gradient_accumulation_steps()):
            x = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(100 * step + part))
            mine = x[dist.get_rank() :: dist.get_world_size()].to(DTYPES[self.dtype])
            loss = (self.engine(mine) - mine.roll(1, 1)).float().pow(2).mean()
            self.engine.backward(loss)
            self.engine.step()
            if cp is not None:
                cp.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def digests(self) -> dict[str, str]:
        """Return digests of fp32 weights with moments, of the weights that the model computes with, and of counters."""
        high, low = hashlib.sha256(), hashlib.sha256()
        for name, p in self.engine.module.named_parameters():
            if p.requires_grad:
                high.update(name.encode())
                for one in self.of(p):
                    high.update(one.detach().float().flatten().numpy().tobytes())
        with torch.no_grad():
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(5)).to(DTYPES[self.dtype])
            low.update(self.engine.module(x).float().numpy().tobytes())
            self.engine.module.seen = self.engine.module.seen - 1
        counts = [self.engine.global_steps, self.engine.skipped_steps, self.engine.get_lr(), self.scale()]
        counts.append(float(self.engine.module.seen[0]))
        return {"high": high.hexdigest()[:16], "low": low.hexdigest()[:16], "counts": str(counts)}

    def of(self, p: Any) -> list[Tensor]:
        zero = self.engine.optimizer
        if self.stage:
            high = safe_get_full_fp32_param(p)
            if not getattr(zero, "_hp_optimizer_states_linked", any(zero.optimizer.state.values())):
                return [high, torch.zeros_like(high), torch.zeros_like(high)]  # every step has overflowed till now
            return [high, *(safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq"))]
        master = p
        if self.dtype != "fp32":
            groups = zip(zero.fp16_groups, zero.fp32_groups, strict=True)
            places = {id(low): high for lows, highs in groups for low, high in zip(lows, highs, strict=True)}
            master = places[id(p)]
        state = getattr(zero, "optimizer", zero).state[master]
        return [master, state["exp_avg"], state["exp_avg_sq"]]

    def scale(self) -> float:
        return float(getattr(self.engine.optimizer, "loss_scale", 1) or 1) if self.dtype == "fp16" else 1.0

    def attach(self, run: str) -> Any:
        tiers = [ckpt.Tier(run, every=3)]
        return ckpt.deepspeed.attach(self.engine, tiers, state={"rng": ckpt.RNG()})


def say(**words: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(words), flush=True)


def kill(folder: str, cases: list[str]) -> None:
    for case in cases:
        job = Job(case)
        for step in range(STEPS):
            loss = job.train(step)
            say(case=case, step=step + 1, loss=loss, **job.digests())
    kept = []
    for case in cases:
        job = Job(case)
        cp = job.attach(f"{folder}/{case}")
        cp.restore(default=0)
        for step in range(KILLED):
            job.train(step, cp)
        job.train(KILLED)  # not saved
        kept.append(cp)
        say(case=case, killed=KILLED)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: str, cases: list[str]) -> None:
    for case in cases:
        job = Job(case)
        with job.attach(f"{folder}/{case}") as cp:
            start = cp.restore()
            say(case=case, restored=start, tier=cp.last_restore.tier, **job.digests())
            for step in range(start, STEPS):
                loss = job.train(step, cp)
                say(case=case, step=step + 1, loss=loss, **job.digests())
        if job.stage:
            job.engine.save_checkpoint(f"{folder}/{case}-deepspeed")


def take_over(folder: str, pairs: list[str]) -> None:
    for pair in pairs:
        case, _, other = pair.partition("=")
        job = Job(other)
        with job.attach(f"{folder}/{case}") as cp:
            start = cp.restore()
            say(case=case, other=other, restored=start, **job.digests())
            job.train(start, cp)
            say(case=case, other=other, step=start + 1, **job.digests())


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    action, folder, *cases = sys.argv[1:]
    {"kill": kill, "go_on": go_on, "take_over": take_over}[action](folder, cases)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some of gloo's threads do not leave


MAIN = "import deepspeed_toy; deepspeed_toy.main()"
