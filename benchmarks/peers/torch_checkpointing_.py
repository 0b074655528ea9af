"""torch_checkpointing: a thread stages the state into shared memory, and a separate process writes it.

As its guide says, `CheckpointManager.lock` guards the weight update during staging; here in hooks of the optimizer.
Direct writes are off, since ext4 and XFS refuse unaligned ones. It does no fsync: a save is complete when the page
cache has all data and the folder has its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import Peer
from workload import Training


class TorchCheckpointing(Peer):
    requires = ("torch_checkpointing==0.1.1",)
    fsync = False

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self.guard: Any = None
        training.optim.register_step_pre_hook(self._before_update)
        training.optim.register_step_post_hook(self._after_update)

    def save(self, step: int) -> Callable[[], None]:
        future = self.manager.save(str(self.path(step)), self.training.state_dict())
        return lambda: future.result() and None

    def restore(self) -> None:
        """Restore into existing tensors: its loader copies in place. Then load the parameter groups."""
        loaded = self.manager.load(str(self.newest()), into=self.training.state_dict(), strict=True)
        self.training.optim.load_state_dict(loaded["optim"])

    def extra_slots(self) -> int:
        return self.training.nbytes  # the staging buffers stay allocated

    def close(self) -> None:
        self.manager.close()

    def _before_update(self, *_: Any) -> None:
        self.guard = self.manager.lock()
        self.guard.__enter__()

    def _after_update(self, *_: Any) -> None:
        self.guard.__exit__(None, None, None)
