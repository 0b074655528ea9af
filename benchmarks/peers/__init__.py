"""The measured libraries: one file each, and their common interface.

A file here makes one library save and restore a `workload.Training` as its own documentation recommends, and nothing
else; `benchmarks/contest.py` measures all in the same way. The benchmark installs the requirements of a library
(`Peer.requires`), in a separate environment if they conflict with others; our packages never require them.
"""

from __future__ import annotations

import importlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from workload import Training

MODULES = {
    "everystep": "everystep:Everystep",
    "torch.save": "torch_save:TorchSave",
    "safetensors": "safetensors_file:SafetensorsFile",
    "DCP": "dcp:Blocking",
    "DCP async, thread": "dcp:InThread",
    "DCP async, process": "dcp:InProcess",
    "torch_checkpointing": "torch_checkpointing_:TorchCheckpointing",
    "Lightning AsyncCheckpointIO": "lightning_:Lightning",
    "torchsnapshot": "torchsnapshot_:Torchsnapshot",
    "DLRover": "dlrover_:DLRover",
    "NVRx": "nvrx:NVRx",
}


class Peer(ABC):
    """One library, in one training process. Created once the training has its state; it writes below `folder`.

    A checkpoint is complete when the function returned by `save` has returned. The next `save` may block as long as the
    library needs: that is a stall like any other, so the measurement waits for the previous one.
    """

    requires: ClassVar[tuple[str, ...]] = ()  # for pip; empty for what comes with torch or with everystep
    alone: ClassVar[bool] = False  # needs its own environment
    fsync: ClassVar[bool] = True  # complete means on disk, not in the page cache
    memory: ClassVar[bool] = False  # can restore from memory, in the saving process

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder

    @abstractmethod
    def save(self, step: int) -> Callable[[], None]:
        """Save as a training loop would. When training may continue, return a function that waits for completion."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the newest checkpoint in the folder into the training's own tensors, also in a new process."""

    def restore_memory(self) -> None:
        """Restore the newest checkpoint from memory, if `memory`."""
        raise NotImplementedError

    def extra_slots(self) -> int:
        """Return the bytes of memory for intended snapshots; everything else is overhead."""
        return 0

    def tidy(self) -> None:
        """Delete all but the newest checkpoint if the library does not; called outside of measurements."""
        for old in self.checkpoints()[:-1]:
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()

    def close(self) -> None:  # noqa: B027, most have nothing to end
        """End background work."""

    # -- for the files here --

    def path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:06d}{suffix}"

    def checkpoints(self) -> list[Path]:
        """Return checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def newest(self) -> Path:
        return self.checkpoints()[-1]


def peer_class(name: str) -> type[Peer]:
    """Return the class in `MODULES`. Raise ImportError if its library is missing."""
    module, _, attribute = MODULES[name].partition(":")
    found = getattr(importlib.import_module(f"peers.{module}"), attribute)
    assert issubclass(found, Peer)
    return found


def nothing() -> None:
    """Do nothing: a blocking save has nothing to wait for."""
