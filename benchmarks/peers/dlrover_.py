"""DLRover's flash checkpoint: the call copies the state to shared memory, and a process next door writes it.

Its documentation wants `dlrover-run`, whose agent is that process. Without it the checkpointer forks one from the
trainer, which then holds on to every page of memory that the trainer has at that moment; so here the same loop is
started as the agent does, in a process that is spawned. What it writes goes to `torch.save` without fsync (only the
file that names the newest step gets one), and complete means that this file names the step.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers import Peer
from workload import Training

POLL_S = 0.005


class DLRover(Peer):
    requires = ("dlrover==0.6.1", "grpcio==1.85.1")  # it imports grpc without asking for it
    fsync = False
    memory = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        os.environ["DLROVER_LOG_LEVEL"] = "WARNING"
        os.environ["TORCHELASTIC_RUN_ID"] = f"contest-{os.getpid()}"  # names its sockets and its shared memory
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
        from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine, start_async_save

        self.saver = multiprocessing.get_context("spawn").Process(target=start_async_save, daemon=True)
        self.saver.start()
        CheckpointEngine.saver_proc = self.saver  # there is one: do not fork another
        self.checkpointer = DdpCheckpointer(str(folder))
        self.disk = StorageType.DISK
        self.tracker = folder / CheckpointConstant.TRACER_FILE_NAME

    def save(self, step: int) -> Callable[[], None]:
        self.checkpointer.save_checkpoint(step, self.training.state_dict(), storage_type=self.disk)

        def wait() -> None:
            while not self.tracker.exists() or self.tracker.read_text() != str(step):
                time.sleep(POLL_S)

        return wait

    def restore(self) -> None:
        """From the disk: no shared memory belongs to a new process, so it reads the file that it tracks."""
        self.training.load_state_dict(self.checkpointer.load_checkpoint())

    def restore_memory(self) -> None:
        """What it returns are views of its shared memory, so they are copied, which a GPU would do by itself."""
        loaded = self.checkpointer.load_checkpoint()
        self.training.model.load_state_dict(loaded["model"])
        with torch.no_grad():
            for number, values in self.training.optim.state_dict()["state"].items():
                for name, value in values.items():
                    value.copy_(loaded["optim"]["state"][number][name])

    def extra_slots(self) -> int:
        return self.training.nbytes

    def checkpoints(self) -> list[Path]:
        """Folders that are named by their step."""
        return sorted((p for p in self.folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))

    def close(self) -> None:
        engine: Any = self.checkpointer._engine
        engine.close()
        engine._shm_handler.unlink()
        self.saver.terminate()
        self.saver.join()
        shutil.rmtree(Path(engine._event_queue._socket_file).parent)
