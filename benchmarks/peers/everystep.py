"""Everystep: memory and a folder at every save of the contest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ckpt
from peers import Peer
from usage import shared
from workload import Training


class Everystep(Peer):
    memory = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        state = {"model": training.model, "optim": training.optim}
        fresh = not (folder / "run").exists()
        tiers = [ckpt.Tier(str(folder / "run"), every=1, keep=2)]
        self.checkpointer = ckpt.Checkpointer(state, tiers)
        if fresh:
            self.checkpointer.restore(default=0)  # as every training begins; otherwise `restore` does it, and is timed

    def save(self, step: int) -> Callable[[], None]:
        handle = self.checkpointer.step(step)
        return lambda: handle.wait_durable(600.0)

    def restore(self) -> None:
        self.checkpointer.restore()

    def restore_memory(self) -> None:
        self.checkpointer.restore()

    def extra_slots(self) -> int:
        return shared("ckpt-arena")

    def tidy(self) -> None:
        """Do nothing, since `keep=2` deletes old checkpoints."""

    def close(self) -> None:
        self.checkpointer.close()
