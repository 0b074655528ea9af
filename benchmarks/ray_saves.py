"""Time of a save and a restore under Ray Train: by everystep, and as in Ray's own guide, in one run.

    python benchmarks/ray_saves.py                          # DDP, two workers on the CPU
    python benchmarks/ray_saves.py --width 1024 --layers 12 --saves 6

In Ray's guide the first worker uses `torch.save` into a temporary folder. `ray.train.report` copies it to the
experiment's storage, either before it returns or later (its asynchronous upload). Time lost per save and restore are
defined as in deepspeed_saves.py. Ray is installed into a separate environment on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trainer_saves import RANKS, lost, options_of, show, timed, words_of

HERE = Path(__file__).parent


def work(asked: dict[str, Any]) -> None:
    """Train one worker and measure its saves."""
    import ray.train
    import torch
    from ray.train import Checkpoint, CheckpointUploadMode
    from torch import nn

    import ckpt.ray

    torch.set_num_threads(1)
    wide, rank = asked["width"], ray.train.get_context().get_world_rank()

    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        layers = [[nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)] for _ in range(asked["layers"])]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*(one for layer in layers for one in layer)))
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), 1e-4)}

    state, done = build(), 0

    def step() -> None:
        nonlocal done
        x = torch.randn(16, wide)
        state["optim"].zero_grad()
        (state["model"](x) - x).square().mean().backward()
        state["optim"].step()
        done += 1

    def theirs(mode: Any) -> None:
        if rank > 0:
            return ray.train.report({"step": done}, checkpoint=None, checkpoint_upload_mode=mode)
        folder = tempfile.mkdtemp(prefix="theirs-", dir=asked["folder"])
        torch.save({name: one.state_dict() for name, one in state.items()}, f"{folder}/state.pt")
        given = Checkpoint.from_directory(folder)
        return ray.train.report(
            {"step": done}, checkpoint=given, checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=True
        )

    cp = ckpt.ray.attach(state, every=10**6)
    cp.restore(default=0)
    for _ in range(2):
        step()
        cp.step(done)
    ways = {
        "memory": (lambda: cp.step(done), cp.wait),
        "disk": (lambda: (cp.step(done), cp.report({"step": done})), cp.wait),
        "sync": (lambda: theirs(CheckpointUploadMode.SYNC), lambda: None),
        "async": (lambda: theirs(CheckpointUploadMode.ASYNC), lambda: None),
    }
    found = lost(step, ways, asked["saves"])
    cp.close()
    state = build()
    with ckpt.ray.attach(state, every=10**6) as again:
        found["restore_memory_s"] = timed(again.restore)
    state = build()
    newest = max(Path(asked["folder"]).rglob("state.pt"), key=lambda path: path.stat().st_mtime)

    def load() -> None:
        read = torch.load(newest, map_location="cpu", weights_only=True)
        for name, one in state.items():
            one.load_state_dict(read[name])

    found["restore_sync_s"] = timed(load)
    if rank == 0:
        found["parameters"] = sum(p.numel() for p in state["model"].parameters())
        Path(asked["folder"], "row.json").write_text(json.dumps(found))


def drive(folder: str, options: argparse.Namespace) -> None:
    """Start Ray's workers, in an interpreter with Ray."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:  # its sockets need short paths
        ray.init(
            num_cpus=RANKS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=temporary,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
        try:
            asked = {"folder": folder, "width": options.width, "layers": options.layers, "saves": options.saves}
            TorchTrainer(
                work,
                train_loop_config=asked,
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(name="saves", storage_path=f"{folder}/storage"),
            ).fit()
        finally:
            ray.shutdown()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from environments import python_of

    folder = tempfile.mkdtemp(prefix="ray-saves-", dir=options.folder)
    off = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}
    path = ":".join(str(HERE.parent / one) for one in (".", "backends", "benchmarks"))
    try:
        command = [str(python_of("ray")), __file__, *words_of(options), "--rank-of", folder]
        ended = subprocess.run(command, env={**os.environ, **off, "PYTHONPATH": path}, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(ended.stderr[-4000:])
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
        return row
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    options = options_of(__doc__, width=768, layers=8)
    if options.rank_of:
        return drive(options.rank_of, options)
    ours = {"memory": "everystep", "disk": "everystep (reported)"}
    names = ours | {"sync": "torch.save, reported", "async": "torch.save, asynchronous"}
    return show(measure(options), options.json, "Ray Train, DDP", names)


if __name__ == "__main__":
    main()
