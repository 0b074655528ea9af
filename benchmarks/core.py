"""What a save costs and how fast a restore is, beside torch.save in the same run.

    make bench            or: python benchmarks/core.py [--mib 512] [--steps 60] [--folder DIR] [--json]

Trains a model of wide linear layers on the CPU whose AdamW state has the size asked for, saves every step to memory and
every tenth to a folder, and restores from memory and from the folder. Absolute times depend on the machine and on what
else it does; the ratios, taken in one run, say more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt

WIDTH = 1024
EVERY = 10


def build(mib: int) -> dict[str, Any]:
    """Weights and two moments, float32: 12 bytes a parameter."""
    torch.manual_seed(0)
    layers = max(2, mib * 2**20 // (12 * (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    return {"model": model, "optim": torch.optim.AdamW(model.parameters()), "rng": ckpt.RNG()}


def train_step(state: dict[str, Any]) -> None:
    x = torch.randn(64, WIDTH)
    loss = (state["model"](x) - x).pow(2).mean()
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()


def timed_steps(state: dict[str, Any], steps: int) -> float:
    """Median seconds of a step without any saving."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        train_step(state)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def size_of(state: dict[str, Any]) -> int:
    tensors = [*state["model"].parameters()]
    tensors += [t for s in state["optim"].state.values() for t in s.values()]
    return sum(t.nbytes for t in tensors)


def saving(state: dict[str, Any], folder: str, steps: int) -> dict[str, float]:
    step_s, committed_s = [], []
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(folder, every=EVERY)]) as cp:
        cp.restore(default=0)
        cp.save(1).committed(120.0)  # memory is ready from here on
        first = len(cp.stats.stalls)
        for step in range(2, steps + 2):
            started = time.perf_counter()
            train_step(state)
            cp.step(step)
            step_s.append(time.perf_counter() - started)
        cp.wait(120.0)
        stalls = sorted(list(cp.stats.stalls)[first:])
        for _ in range(3):
            time.sleep(1.0)  # let the clean-up after the last one end: it reads a whole checkpoint back
            train_step(state)
            step += 1
            started = time.perf_counter()
            cp.save(step).committed(120.0)
            committed_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        cp.restore()
        memory_s = time.perf_counter() - started
    return {
        "step_saving_s": statistics.median(step_s),
        "stall_median_s": statistics.median(stalls),
        "stall_p99_s": stalls[int(len(stalls) * 0.99)],
        "committed_s": statistics.median(committed_s),
        "restore_memory_s": memory_s,
    }


def restoring(state: dict[str, Any], folder: str) -> float:
    with ckpt.Checkpointer(state, [ckpt.Tier(folder, every=EVERY)]) as cp:
        drop_caches()
        started = time.perf_counter()
        cp.restore()
        return time.perf_counter() - started


def torch_save(state: dict[str, Any], folder: str) -> tuple[float, float]:
    """Seconds to save and fsync, and to load again into the same tensors."""
    path = Path(folder) / "state.pt"
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": state["model"].state_dict(), "optim": state["optim"].state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    saved = time.perf_counter() - started
    drop_caches()
    started = time.perf_counter()
    loaded = torch.load(path, weights_only=True)
    state["model"].load_state_dict(loaded["model"])
    state["optim"].load_state_dict(loaded["optim"])
    return saved, time.perf_counter() - started


def drop_caches() -> None:
    """Cold reads, where we may; otherwise both sides read from the cache."""
    subprocess.run(["sh", "-c", "sync; echo 1 > /proc/sys/vm/drop_caches"], stderr=subprocess.DEVNULL, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        state = build(arguments.mib)
        train_step(state)
        found = {"state_mib": size_of(state) / 2**20, "step_alone_s": timed_steps(state, arguments.steps // 2)}
        found |= saving(state, folder + "/run", arguments.steps)
        found["restore_disk_s"] = restoring(state, folder + "/run")
        found["torch_save_s"], found["torch_load_s"] = torch_save(state, folder)
    found["slowdown"] = found["step_saving_s"] / found["step_alone_s"]
    found["stall_of_torch_save"] = found["stall_median_s"] / found["torch_save_s"]
    found["durable_of_torch_save"] = found["committed_s"] / found["torch_save_s"]
    found["restore_of_torch_load"] = found["restore_disk_s"] / found["torch_load_s"]
    if arguments.json:
        print(
            json.dumps({**found, "cpus": os.cpu_count(), "torch": torch.__version__, "python": sys.version.split()[0]})
        )
        return
    for name, value in found.items():
        print(f"{name:24s} {value:12.4f}")


if __name__ == "__main__":
    main()
