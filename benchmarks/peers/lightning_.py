"""Lightning's `AsyncCheckpointIO`: a clone of every tensor, then `torch.save` to memory and from there to a file.

It is called like the Trainer does, with the Trainer's dict. Nothing is fsynced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import Peer, nothing
from workload import Training


class Lightning(Peer):
    requires = ("lightning==2.6.6",)
    fsync = False

    def __init__(self, training: Training, folder: Path) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        super().__init__(training, folder)
        self.io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, step: int) -> Callable[[], None]:
        """Save without a future. One thread executes saves in order, so an empty task marks the end."""
        self.io.save_checkpoint(self.checkpoint(step), self.path(step, ".ckpt"))
        after = self.io._executor.submit(nothing)

        def wait() -> None:
            after.result()
            if self.io._error is not None:
                raise self.io._error

        return wait

    def checkpoint(self, step: int) -> dict[str, Any]:
        """Return the dict that `Trainer.save_checkpoint` passes to its plugin, for a model without callbacks."""
        return {
            "epoch": 0,
            "global_step": step,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": self.training.model.state_dict(),
            "loops": {},
            "callbacks": {},
            "optimizer_states": [self.training.optim.state_dict()],
            "lr_schedulers": [],
        }

    def restore(self) -> None:
        found = self.io.load_checkpoint(self.newest(), weights_only=True)
        self.training.load_state_dict({"model": found["state_dict"], "optim": found["optimizer_states"][0]})

    def close(self) -> None:
        self.io.teardown()
