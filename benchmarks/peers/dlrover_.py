"""DLRover's flash checkpoint: the call copies the state to shared memory, and a separate process writes it.

Its documentation requires `dlrover-run`, whose agent is that process. Otherwise the checkpointer forks one from the
trainer, which retains every memory page of the trainer at that moment. So the agent's loop runs here in a spawned
process. It writes by `torch.save` without fsync, except for the file that names the newest step. A save is complete
when this file names the step.
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
    requires = ("dlrover==0.6.1", "grpcio==1.85.1")  # it imports grpc without a declared dependency
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
        CheckpointEngine.saver_proc = self.saver  # one exists: do not fork another
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
        """Restore from the disk: a new process has no shared memory, so it reads the file that it tracks."""
        self.training.load_state_dict(self.checkpointer.load_checkpoint())

    def restore_memory(self) -> None:
        """Restore copies of the returned views of shared memory. A GPU would copy them anyway."""
        loaded = self.checkpointer.load_checkpoint()
        self.training.model.load_state_dict(loaded["model"])
        with torch.no_grad():
            for number, values in self.training.optim.state_dict()["state"].items():
                for name, value in values.items():
                    value.copy_(loaded["optim"]["state"][number][name])

    def extra_slots(self) -> int:
        return self.training.nbytes

    def checkpoints(self) -> list[Path]:
        """Return the folders that are named by their step."""
        return sorted((p for p in self.folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))

    def close(self) -> None:
        engine: Any = self.checkpointer._engine
        engine.close()
        engine._shm_handler.unlink()
        self.saver.terminate()
        self.saver.join()
        shutil.rmtree(Path(engine._event_queue._socket_file).parent)
