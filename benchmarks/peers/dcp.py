"""Distributed checkpoints of PyTorch (`torch.distributed.checkpoint`): blocking, in a thread, and in a process.

Its writer fsyncs the files that it writes, but no folder. The write plan is cached between saves. Tensors are read in
place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from peers import Peer, nothing
from workload import Training


class Blocking(Peer):
    """Saves with `dcp.save`."""

    threads: ClassVar[int] = 2  # each writes a file; one file per tensor takes longer

    def save(self, step: int) -> Callable[[], None]:
        dcp.save(self.training.state_dict(), storage_writer=self.writer(step), planner=planner(), no_dist=True)
        return nothing

    def restore(self) -> None:
        """Read tensors in place, and load the optimizer's plain values afterwards."""
        state = self.training.state_dict()
        dcp.load(state, checkpoint_id=self.newest(), no_dist=True)
        self.training.optim.load_state_dict(state["optim"])

    def writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.path(step), thread_count=self.threads)


class InThread(Blocking):
    """`dcp.async_save`: a copy into cached buffers, then `dcp.save` in a thread.

    The copy is made in a thread too. The forward and backward passes of the next step overlap it, and the update waits,
    as in the documentation of `AsyncSaveResponse`.
    """

    threads = 1  # its default, which leaves more cores to the training
    where: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    shared: ClassVar[bool] = False

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        cuda = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=self.shared,
            use_async_staging=True,
            use_non_blocking_copy=cuda,
        )
        self.stager = DefaultStager(options)
        self.newest_save: AsyncSaveResponse | None = None
        self.hook = training.optim.register_step_pre_hook(self.before_update)

    def save(self, step: int) -> Callable[[], None]:
        found = dcp.async_save(
            self.training.state_dict(),
            storage_writer=self.writer(step),
            planner=planner(),
            async_checkpointer_type=self.where,
            async_stager=self.stager,
            no_dist=True,
        )
        assert isinstance(found, AsyncSaveResponse)  # a bare future only if the copy is made immediately
        self.newest_save = found

        def wait() -> None:
            found.upload_completion.result()

        return wait

    def before_update(self, *_: object) -> None:
        if self.newest_save is not None:
            self.newest_save.staging_completion.result()

    def close(self) -> None:
        self.hook.remove()
        self.stager.close()


class InProcess(InThread):
    """`dcp.async_save`: a copy into shared memory, then `dcp.save` in a process, which the first save starts."""

    where = AsyncCheckpointerType.PROCESS
    shared = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        torch.multiprocessing.set_sharing_strategy("file_system")  # otherwise each tensor takes a descriptor
        os.environ["MASTER_ADDR"] = (
            "127.0.0.1"  # address for the process to connect; otherwise it resolves this host's name
        )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it requires a group

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()


def planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(enable_plan_caching=True)
