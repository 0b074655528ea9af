"""What a save and a restore take under DeepSpeed: by everystep, and by its own `save_checkpoint`, in one run.

    python benchmarks/deepspeed_saves.py                       # ZeRO-1 and 3, two ranks on the CPU
    python benchmarks/deepspeed_saves.py --stage 2 --width 1024 --layers 12 --saves 6

Time lost a save: how much longer two steps take with a save between them than without one, medians of such pairs that
take turns. Restore: from the call to tensors in place, out of files that were just written. DeepSpeed is installed into
an environment of its own on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def train(folder: str, options: argparse.Namespace) -> None:
    """One rank."""
    import deepspeed
    import deepspeed.ops
    import torch
    import torch.distributed as dist
    from torch import nn

    import ckpt
    import ckpt.deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()

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

    def step(engine: Any) -> None:
        x = torch.randn(16, options.width, dtype=torch.bfloat16)
        engine.backward((engine(x) - x).float().pow(2).mean())
        engine.step()

    def timed(work: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began

    engine = build()
    cp = ckpt.deepspeed.attach(engine, [ckpt.Memory(), ckpt.Tier(f"{folder}/ours", every=10**6)])
    cp.restore(default=0)
    spent: dict[str, list[float]] = {"nothing": [], "memory": [], "disk": [], "theirs": []}
    for _ in range(2):
        step(engine)
        cp.step()
    for _ in range(options.saves):
        # A copy goes beside the next step, so that counts to the save that caused it.
        spent["nothing"].append(timed(lambda: (step(engine), step(engine))))
        spent["memory"].append(timed(lambda: (step(engine), cp.step(), step(engine))))
        spent["disk"].append(timed(lambda: (step(engine), cp.save(engine.global_steps), step(engine))))
        cp.wait()
        spent["theirs"].append(timed(lambda: (step(engine), engine.save_checkpoint(f"{folder}/theirs"), step(engine))))
        os.sync()
    cp.close()
    nothing = statistics.median(spent["nothing"])
    found = {f"lost_{k}_s": statistics.median(v) - nothing for k, v in spent.items() if k != "nothing"}
    engine = build()
    with ckpt.deepspeed.attach(engine, f"{folder}/ours") as again:
        found["restore_ours_s"] = timed(again.restore)
    found["restore_theirs_s"] = timed(lambda: engine.load_checkpoint(f"{folder}/theirs"))
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    if rank == 0:
        row = {"stage": options.stage, "parameters": parameters, "step_s": nothing / 2, **found}
        print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)  # some of gloo's threads do not leave


def measure(stage: int, options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(HERE))
    from environments import environment

    python = environment("deepspeed", ("deepspeed",), "DeepSpeed")
    folder = tempfile.mkdtemp(prefix="deepspeed-saves-", dir=options.folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [python, __file__, "--stage", stage, "--width", options.width, "--layers", options.layers]
    words += ["--saves", options.saves, "--rank-of", folder]
    base = {
        **os.environ,
        "PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'backends'}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        ranks = [
            subprocess.Popen(
                [str(word) for word in words],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        rows = [line for line in said[0].splitlines() if line.startswith('{"stage"')]
        if not rows:
            sys.exit(said[0][-4000:])
        found: dict[str, Any] = json.loads(rows[0])
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, help="of ZeRO (default: 1 and 3)")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go (default: the system's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return train(options.rank_of, options)
    for stage in (1, 3) if options.stage is None else (options.stage,):
        row = measure(stage, options)
        if options.json:
            print(json.dumps(row))
            continue
        size = row["parameters"] / 1e6
        print(f"ZeRO-{stage}, {size:.0f} million parameters, 2 ranks, a step without a save {row['step_s']:.2f} s")
        print(f"  lost a save   everystep {row['lost_memory_s']:.2f} s (memory), {row['lost_disk_s']:.2f} s (disk too)")
        print(f"                save_checkpoint {row['lost_theirs_s']:.2f} s")
        print(
            f"  restore       everystep {row['restore_ours_s']:.2f} s, load_checkpoint {row['restore_theirs_s']:.2f} s"
        )
    return None


if __name__ == "__main__":
    main()
