"""The libraries that are measured: one file each, and what all of them have to offer.

A file here makes one library save and restore a `workload.Training` as its own documentation recommends, and nothing
else; `benchmarks/contest.py` does the measuring, the same way for all. What a library needs is installed by the
benchmark (`Peer.requires`), into an environment of its own where it clashes with others, and never by ours.
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
    """One library, in one process that trains. Made once the training has its state; it writes below `folder`.

    Checkpoints are complete when the function that `save` returned has returned. Called again, `save` may block for as
    long as the library needs to: that is a stall like any other, so the measuring waits for the one before.
    """

    requires: ClassVar[tuple[str, ...]] = ()  # for pip; nothing for what comes with torch or with us
    alone: ClassVar[bool] = False  # needs an environment of its own
    fsync: ClassVar[bool] = True  # complete means on the disk, not in the page cache
    memory: ClassVar[bool] = False  # can restore from memory, in the process that saved

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder

    @abstractmethod
    def save(self, step: int) -> Callable[[], None]:
        """Save as a training loop would. Returns when the training may go on, with what waits for the whole of it."""

    @abstractmethod
    def restore(self) -> None:
        """The newest checkpoint in the folder into the training's own tensors. Also in a new process."""

    def restore_memory(self) -> None:
        """The newest from memory, if `memory`."""
        raise NotImplementedError

    def extra_slots(self) -> int:
        """Bytes of memory that hold snapshots on purpose, beside which everything else is overhead."""
        return 0

    def tidy(self) -> None:
        """Delete all but the newest checkpoint, where the library does not; called when nothing is measured."""
        for old in self.checkpoints()[:-1]:
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()

    def close(self) -> None:  # noqa: B027, most have nothing to end
        """End what runs in the background."""

    # -- for the files here --

    def path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:06d}{suffix}"

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("step-*"))

    def newest(self) -> Path:
        return self.checkpoints()[-1]


def peer_class(name: str) -> type[Peer]:
    """The class that `MODULES` names. ImportError if its library is not there."""
    module, _, attribute = MODULES[name].partition(":")
    found = getattr(importlib.import_module(f"peers.{module}"), attribute)
    assert issubclass(found, Peer)
    return found


def nothing() -> None:
    """What there is to wait for after a save that blocks."""
