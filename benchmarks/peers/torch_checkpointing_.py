"""torch_checkpointing: the state is staged into shared memory in a thread, and a process of its own writes it.

As its guide says, the update of the weights is guarded by `CheckpointManager.lock`, so that nothing changes while it
is staged; here from hooks of the optimizer. Direct writes are off, since ext4 and XFS refuse them when not aligned.
It does no fsync: complete means that the page cache has everything, and that the folder has its name.
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
        """Into the tensors that are there: its loader copies in place. The rest is the parameter groups."""
        loaded = self.manager.load(str(self.newest()), into=self.training.state_dict(), strict=True)
        self.training.optim.load_state_dict(loaded["optim"])

    def extra_slots(self) -> int:
        return self.training.nbytes  # what it stages into stays allocated

    def close(self) -> None:
        self.manager.close()

    def _before_update(self, *_: Any) -> None:
        self.guard = self.manager.lock()
        self.guard.__enter__()

    def _after_update(self, *_: Any) -> None:
        self.guard.__exit__(None, None, None)
