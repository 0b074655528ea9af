"""`torch.save` to a file, and fsync: the common baseline."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from peers import Peer, nothing


class TorchSave(Peer):
    def save(self, step: int) -> Callable[[], None]:
        path = self.path(step, ".pt")
        with path.open("wb") as file:
            torch.save(self.training.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.folder)
        return nothing

    def restore(self) -> None:
        self.training.load_state_dict(torch.load(self.newest(), weights_only=True))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
