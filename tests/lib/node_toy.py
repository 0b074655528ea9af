"""A rank of a job on several nodes: trains, follows a list of words, and reports its observations.

    torchrun … node_toy.py '{"folder": "/some/where", "job": "a", "words": ["train 4", "close"], …}'

Words: `train N` (every step staged and committed before the next), `rush N` (without waiting for the commits),
`restore STEP` (rolls back), `save` (a step without training, to every tier), `copies` (until this node has all ranks'
snapshots of the step), `pause NAME` (until the file NAME is there), `close`, `hang`. Reports are JSON lines in
FOLDER/reports/JOB.RANK.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import ckpt
import parallel
from run_files import DATA, ranks_in

MODES = ("ddp", "fsdp")
LOCAL, SHARED = "local", "shared"


def build() -> dict[str, Any]:
    """Build a replicated and a sharded model, each with its optimizer and other objects."""
    state: dict[str, Any] = {}
    for mode in MODES:
        state |= {f"{mode}_{name}": value for name, value in parallel.build(mode).items()}
    del state["ddp_rng"]  # there is one generator
    return state


def train_step(state: dict[str, Any], step: int) -> None:
    for mode in MODES:
        parallel.train_step(mode, part(state, mode), step)


def part(state: dict[str, Any], mode: str) -> dict[str, Any]:
    return {name.removeprefix(f"{mode}_"): value for name, value in state.items() if name.startswith(mode)}


def mine(state: dict[str, Any]) -> str:
    """A digest of every bit of what this rank has."""
    total = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for mode in MODES:
        here = part(state, mode)
        net, optim = here["model"], here["optim"]
        found = [*net.state_dict().values(), *(v for s in optim.state.values() for v in s.values())]
        for tensor in found:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            total.update(local.detach().contiguous().numpy().tobytes())
        total.update(json.dumps([here["own"], here["sched"].state_dict()["last_epoch"]]).encode())
    return total.hexdigest()


def whole(state: dict[str, Any]) -> dict[str, str]:
    """Return a digest of all tensors of each model, gathered from all ranks: the same for any number of ranks."""
    digests: dict[str, str] = {}
    for mode in MODES:
        total, found = hashlib.sha256(), dict[str, Tensor](parallel.gathered(part(state, mode)))
        for name in sorted(found):
            total.update(name.encode() + found[name].contiguous().numpy().tobytes())
        digests[mode] = total.hexdigest()
    return digests


class Rank:
    """One rank at work."""

    def __init__(
        self,
        folder: str,
        job: str,
        words: list[str],
        *,
        local_every: int = 1,
        shared_every: int = 4,
        local_keep: int = 4,
        replicas: int = 1,
        busy_timeout_s: float = 60.0,
    ) -> None:
        self.folder, self.words = Path(folder), words
        self.report = (self.folder / "reports" / f"{job}.{dist.get_rank()}").open("a")
        self.state, self.step = build(), 0
        tiers = [
            ckpt.Tier(f"{folder}/{LOCAL}/run", local_every, keep=local_keep),
            ckpt.Tier(f"{folder}/{SHARED}/run", shared_every, keep=4),
        ]
        options = ckpt.Options(on_error="warn", busy_timeout_s=busy_timeout_s)
        self.cp = ckpt.Checkpointer(self.state, tiers, memory=ckpt.Memory(replicas=replicas), options=options)

    def say(self, what: str, **fields: Any) -> None:
        self.report.write(json.dumps({"what": what, **fields}) + "\n")
        self.report.flush()

    def do_restore(self, step: str = "") -> None:
        self.step = self.cp.restore(step=int(step)) if step else self.cp.restore(default=0)
        done = self.cp.last_restore
        assert done is not None
        self.say(
            "started",
            **asdict(done),
            start=self.step,
            node=socket.gethostname(),
            nodes=self.cp._run.world.nodes,
            local_ranks=sorted(ranks_in(self.folder / LOCAL / "run", DATA)),
            mine=mine(self.state),
            whole=whole(self.state),
        )

    def work(self) -> None:
        for word in self.words:
            verb, _, what = word.partition(" ")
            getattr(self, f"do_{verb}")(what)

    def do_train(self, count: str) -> None:
        self.do_rush(count, wait=True)

    def do_rush(self, count: str, *, wait: bool = False) -> None:
        for _ in range(int(count)):
            train_step(self.state, self.step)
            self.step += 1
            save = self.cp.step(self.step)
            assert save is not None
            save.wait_staged(60)
            for tier in save.tiers if wait else ():
                self.committed(save, tier)
            self.say("step", step=self.step, mine=mine(self.state), whole=whole(self.state))

    def committed(self, save: ckpt.Save, tier: str) -> None:
        started, error = time.monotonic(), None
        try:
            save.wait_durable(90, tier=tier)
        except ckpt.CheckpointError as problem:
            error = f"{type(problem).__name__}: {problem}"
        seconds = time.monotonic() - started
        self.say("saved", step=save.step, tier=Path(tier).parent.name, error=error, seconds=seconds)

    def do_save(self, _: str) -> None:
        for mode in MODES:
            self.state[f"{mode}_optim"].zero_grad()
        self.step += 1
        save = self.cp.save(self.step)
        for tier in save.tiers:
            self.committed(save, tier)

    def do_pause(self, name: str) -> None:
        self.say("paused", name=name)
        while not (self.folder / name).exists():
            time.sleep(0.02)

    def do_copies(self, _: str) -> None:
        """Wait until all ranks' snapshots of this step are in the memory of this node."""
        end, found = time.monotonic() + 60, set[int]()
        while len(found) < dist.get_world_size() and time.monotonic() < end:
            with self.cp._run.supervisor.held.snapshots() as snapshots:
                found = {s.layout.rank for s in snapshots if s.checkpoint.step == self.step}
            time.sleep(0.1)
        self.say("copies", step=self.step, ranks=sorted(found))

    def do_close(self, _: str) -> None:
        self.cp.close()
        self.say("closed", step=self.step)

    def do_hang(self, _: str) -> None:
        self.say("hangs")
        while True:
            time.sleep(1.0)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = json.loads(sys.argv[1])
    rank = Rank(**settings)
    rank.do_restore()
    rank.work()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
