"""Hugging Face's Trainer in its DeepSpeed mode, on CPU ranks.

RANK=0 WORLD_SIZE=2 … python -c 'import deepspeed_hf_toy; deepspeed_hf_toy.main()' RUN STAGE KILL

Trains 8 steps under a ZeRO stage, and kills itself as step KILL + 1 begins, if KILL is not negative. Prints a JSON line
for each step that was logged, and one of what was restored.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")

import deepspeed.ops
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckpt.transformers import CheckpointCallback

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles an all-reduce first, for a minute

STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.drop(self.inner(x.to(self.inner.weight.dtype))) - x).float().pow(2).mean()}


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.randn(16, generator=torch.Generator().manual_seed(i))}


class Watch(TrainerCallback):
    def __init__(self, kill: int) -> None:
        self.kill = kill

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs and args.process_index == 0:
            print(json.dumps({"step": state.global_step, **logs}), flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    run, stage, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    args = TrainingArguments(
        output_dir=f"{run}-out",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
        deepspeed=config,
    )
    saving = CheckpointCallback(run, every=100)
    Trainer(Net(), args, train_dataset=Data(), callbacks=[saving, Watch(kill)]).train()
    if args.process_index == 0:
        restored = saving.restored
        print(json.dumps({"restored": restored and [restored.step, restored.tier]}), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # some of gloo's threads do not leave
