"""Ranks under torchrun with injected faults, for tests of their recovery.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 ladder_toy.py '{"run": "/some/where", "steps": 80, …}'

Data-parallel training whose every bit follows from the step: model, averages, buffers, a generator for the batches and
plain values are all in the state. Each rank reports its actions as JSON lines, each in a single write, so that no kill
tears it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.core.state.sharding import local

WIDTH = 48


def say(what: str, **fields: Any) -> None:
    rank, life = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    line = json.dumps({"say": what, "rank": rank, "life": life, "at": time.time(), "pid": os.getpid(), **fields})
    os.write(1, f"\n{line}\n".encode())


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    wrapped = nn.parallel.DistributedDataParallel(model)
    return {
        "model": wrapped,
        "optim": torch.optim.AdamW(wrapped.parameters(), lr=1e-2),
        "batches": torch.Generator().manual_seed(dist.get_rank()),
        "meta": {"losses": []},
    }


def train_step(state: dict[str, Any], *, fail: str = "") -> None:
    x = torch.randn(8, WIDTH, generator=state["batches"])
    loss = (state["model"](x) - x.roll(1, 1)).pow(2).mean()
    state["optim"].zero_grad()
    if fail:
        loss.register_hook(_raise(fail))
    loss.backward()
    state["optim"].step()
    state["meta"]["losses"].append(loss.item())


def _raise(why: str) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        raise RuntimeError(why)

    return hook


def digest(state: dict[str, Any]) -> str:
    """Return a digest of every bit of this rank."""
    total = hashlib.sha256(json.dumps(state["meta"]).encode())
    tensors = [*state["model"].state_dict().values(), state["batches"].get_state()]
    for values in state["optim"].state.values():
        tensors += values.values()
    for tensor in tensors:
        total.update(local(tensor.detach()).contiguous().numpy().tobytes())
    return total.hexdigest()


def inject(kind: str) -> None:
    """Inject a fault into this rank."""
    say("fault", kind=kind)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segv":
        ctypes.string_at(1)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "oom":
        torch.empty(1 << 50)


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    state, steps, fault = build(), options["steps"], options.get("fault", {})
    mine = fault if dist.get_rank() in fault.get("ranks", ()) else {}
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        mine = {}
    if options["run"] is None:
        for _ in range(steps):
            train_step(state)
        say("end", digest=digest(state))
        return
    triggers: Any = "auto"
    if options.get("exit_after"):
        triggers = [
            ckpt.triggers.on_signal(),
            ckpt.triggers.on_exception(),
            ckpt.triggers.on_hang(action="exit", min_s=options["exit_after"]),
        ]
    tiers = [ckpt.Tier(options["run"], every=options.get("durable", 1000))]
    with ckpt.Checkpointer(state, tiers, triggers=triggers, memory=ckpt.Memory(every=options.get("every", 1))) as cp:
        start = cp.restore(default=0)
        assert cp.last_restore is not None
        say("start", step=start, tier=cp.last_restore.tier, faults=[f.to_json() for f in cp.faults])
        for step in range(start + 1, steps + 1):
            now = mine.get("at") == step
            train_step(state, fail="a bug" if now and mine["kind"] == "exception" else "")
            cp.step(step)
            say("done", step=step)
            if now:
                inject(mine["kind"])
            time.sleep(options.get("pause", 0.02))
        say("end", digest=digest(state))


if __name__ == "__main__":
    main()
