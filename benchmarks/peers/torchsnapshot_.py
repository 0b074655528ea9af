"""torchsnapshot: `Snapshot.async_take`, and `Snapshot.restore` into existing tensors. Nothing is fsynced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peers import Peer
from workload import Training


class Torchsnapshot(Peer):
    requires = ("torchsnapshot==0.1.0",)
    fsync = False

    def __init__(self, training: Training, folder: Path) -> None:
        from torchsnapshot import Snapshot

        super().__init__(training, folder)
        self.snapshot = Snapshot
        self.state = {"model": training.model, "optim": training.optim}

    def save(self, step: int) -> Callable[[], None]:
        pending = self.snapshot.async_take(str(self.path(step)), self.state)
        return lambda: pending.wait() and None

    def restore(self) -> None:
        self.snapshot(str(self.newest())).restore(self.state)
