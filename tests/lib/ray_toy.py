"""A small training under Ray's TorchTrainer, as a driver of its own.

    python ray_toy.py '[{"folder": "/some/where", "steps": 8, "kill_at": 5, "workers": 2}, …]'

One after the other. Worker 0 dies by SIGKILL when that step is in memory, once. Says in a line of JSON what became of
each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import ckpt
import ckpt.ray

WIDTH = 16


def train(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optim = torch.optim.AdamW(model.parameters(), 1e-2)
    with ckpt.ray.attach({"model": model, "optim": optim}, every=100) as cp:
        start = cp.restore(default=0)
        if rank == 0:
            source = cp.last_restore.tier if start and cp.last_restore is not None else ""
            with Path(asked["folder"], "starts").open("a") as file:
                file.write(json.dumps([start, source]) + "\n")
        for step in range(start, asked["steps"]):
            # the same for any number of workers
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            optim.zero_grad()
            (model(x) - x).square().mean().backward()
            optim.step()
            save = cp.step(step + 1)
            if step + 1 == asked["kill_at"] and not start and save is not None:
                save.wait_staged(60.0)
                torch.distributed.barrier()  # so that all have it
                if rank == 0:
                    os.kill(os.getpid(), 9)
            if (step + 1) % 2 == 0:
                cp.report({"step": step + 1})
        if rank == 0:
            torch.save(model.module.state_dict(), Path(asked["folder"], f"weights.{asked['steps']}.pt"))


def fit(asked: dict[str, Any]) -> dict[str, Any]:
    """Run one training and return its result."""
    result = TorchTrainer(
        train,
        train_loop_config=asked,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=asked["workers"], resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="toy",
            storage_path=str(Path(asked["folder"], "storage")),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    return {"metrics": result.metrics, "place": ckpt.ray.place_of(result.checkpoint)}


def main() -> None:
    every = json.loads(sys.argv[1])
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "CKPT_RUNTIME_DIR")}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:  # its sockets must have short names
        ray.init(
            num_cpus=max(asked["workers"] for asked in every),
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=temporary,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            runtime_env={"env_vars": {**variables, "OMP_NUM_THREADS": "1"}},
        )
        print("ray is up", flush=True)
        try:
            for asked in every:
                print(json.dumps(fit(asked)), flush=True)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
