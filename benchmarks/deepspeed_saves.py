"""Time of a save and a restore under DeepSpeed: by everystep, and by its own `save_checkpoint`, in one run.

    python benchmarks/deepspeed_saves.py                       # ZeRO-1 and 3, two ranks on the CPU
    python benchmarks/deepspeed_saves.py --stage 2 --width 1024 --layers 12 --saves 6

Time lost per save: the additional time of two steps with a save between them, as the median of alternating pairs.
Restore: from the call until tensors are in place, from files that were just written. DeepSpeed is installed into a
separate environment on first use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trainer_saves import end, lost, options_of, run_ranks, show, timed


def train(folder: str, options: argparse.Namespace) -> None:
    """Train one rank and measure its saves."""
    import deepspeed
    import deepspeed.ops
    import torch
    from torch import nn

    import ckpt
    import ckpt.deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")

    def build() -> Any:
        torch.manual_seed(0)
        wide = options.width
        layers = [[nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)] for _ in range(options.layers)]
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": options.stage},
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
        }
        model = nn.Sequential(*(one for layer in layers for one in layer))
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    engine = build()

    def step() -> None:
        x = torch.randn(16, options.width, dtype=torch.bfloat16)
        engine.backward((engine(x) - x).float().pow(2).mean())
        engine.step()

    cp = ckpt.deepspeed.attach(engine, ckpt.Tier(f"{folder}/ours", every=10**6))
    cp.restore(default=0)
    for _ in range(2):
        step()
        cp.step()
    ways = {
        "memory": (cp.step, cp.wait),
        "disk": (lambda: cp.save(engine.global_steps), cp.wait),
        "theirs": (lambda: engine.save_checkpoint(f"{folder}/theirs"), lambda: None),
    }
    found = lost(step, ways, options.saves)
    cp.close()
    engine = build()
    with ckpt.deepspeed.attach(engine, f"{folder}/ours") as again:
        found["restore_memory_s"] = timed(again.restore)
    found["restore_theirs_s"] = timed(lambda: engine.load_checkpoint(f"{folder}/theirs"))
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    end({"stage": options.stage, "parameters": parameters, **found})


def main() -> None:
    options = options_of(__doc__, stage=None, width=768, layers=8)  # ZeRO stages 1 and 3 by default
    if options.rank_of:
        return train(options.rank_of, options)
    names = {"memory": "everystep", "disk": "everystep (disk too)", "theirs": "save_checkpoint"}
    for stage in (1, 3) if options.stage is None else (options.stage,):
        options.stage = stage
        show(run_ranks(__file__, options, DS_ACCELERATOR="cpu"), options.json, f"ZeRO-{stage}", names)
    return None


if __name__ == "__main__":
    main()
