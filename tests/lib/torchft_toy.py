"""One replica group of a training under torchft, of one process; or the lighthouse.

    python torchft_toy.py lighthouse                   # prints its address, ends with its input
    python torchft_toy.py train FOLDER GROUP KILL_AT   # trains, and dies by SIGKILL when that step is in memory
    python torchft_toy.py look FOLDER GROUP            # only restores

Prints JSON lines, and leaves in FOLDER what it had: GROUP-restored.pt, GROUP-killed.pt, GROUP-ended.pt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import ckpt

TOGETHER = 4  # steps of both groups after the death of one, with which all ends
ALONE = 3  # steps of the other one before it waits for the first


def lighthouse() -> None:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30000, heartbeat_timeout_ms=1000)
    print(server.address(), flush=True)
    sys.stdin.read()
    server.shutdown()


class Group:
    def __init__(self, folder: Path, number: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder, self.number = folder, number
        self.model = nn.Linear(16, 16)
        self.inner = torch.optim.AdamW(self.model.parameters(), 1e-2)

        def healed(state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])
            self.inner.load_state_dict(state["optim"])

        seconds = timedelta(seconds=60)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
            min_replica_size=1,
            load_state_dict=healed,
            state_dict=lambda: {"model": self.model.state_dict(), "optim": self.inner.state_dict()},
            replica_id=f"group{number}",
            timeout=timedelta(seconds=10),
            quorum_timeout=seconds,
            connect_timeout=seconds,
        )
        self.wrapped = DistributedDataParallel(self.manager, self.model)
        self.optim = Optimizer(self.manager, self.inner)
        state = {"model": self.wrapped, "optim": self.optim, "ft": self.manager}
        self.cp = ckpt.Checkpointer(state, str(folder / f"run-{number}"), every=2)
        self.start = self.cp.restore(default=0)
        source = self.cp.last_restore.tier if self.start and self.cp.last_restore else ""
        self.say(restored=self.start, tier=source, manager=self.manager.current_step())
        self.leave("restored")

    def say(self, **words: Any) -> None:
        print(json.dumps(words), flush=True)

    def leave(self, name: str) -> None:
        """All tensors that there are, in a file of that name."""
        found: dict[str, Tensor] = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        for parameter, p in self.model.named_parameters():
            found |= {f"{parameter}.{k}": v.clone() for k, v in self.inner.state.get(p, {}).items()}
        torch.save(found, self.folder / f"{self.number}-{name}.pt")

    def train(self, kill_at: int) -> None:
        together, up = 0, self.folder / "up"
        if self.start:
            up.touch()
        while together < TOGETHER:
            before = self.manager.current_step()
            seed = 10 * before + self.number
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            self.optim.zero_grad()
            (self.wrapped(x) - x).square().mean().backward()
            self.optim.step()
            now, groups = self.manager.current_step(), self.manager.num_participants()
            if now == before:  # a rank of the group died, so nobody has stepped
                continue
            save = self.cp.step(now)
            self.say(step=now, groups=groups)
            if self.number and now == kill_at and not up.exists():
                save.wait_staged(60.0)
                self.leave("killed")
                os.kill(os.getpid(), 9)
            together += now > kill_at and groups == 2
            while not self.number and now == kill_at + ALONE and not up.exists():
                time.sleep(0.1)
            time.sleep(0.1 if groups < 2 else 0)
        self.leave("ended")


def main() -> None:
    if sys.argv[1] == "lighthouse":
        return lighthouse()
    dist.init_process_group("gloo")  # of this group alone: torchft's manager wants its store
    group = Group(Path(sys.argv[2]), int(sys.argv[3]))
    if sys.argv[1] == "train":
        group.train(int(sys.argv[4]))
    group.cp.close()
    group.manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads do not end by themselves


if __name__ == "__main__":
    main()
