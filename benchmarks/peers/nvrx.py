"""NVRx: its asynchronous checkpoints in the format of DCP, by a persistent process and two that write a file each.

Its other caller forks the trainer at every save, so each page that training changes is copied: that was slower. Its
local checkpoints were not tried: they do no fsync, and require CUDA tensors.

On a GPU, the persistent process copies tensors off the device before the call returns. CPU tensors are not copied: its
queue moves training's own tensors to shared memory, and later changes of training are written. So this peer makes that
copy in cached shared memory, and omits the staging function, which synchronises CUDA. Nothing of NVRx is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from peers import Peer
from workload import Training

POLL_S = 0.005
FILES = 2  # as in its example


class NVRx(Peer):
    requires = ("nvidia-resiliency-ext==0.4.1",)

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import init_checkpoint_metadata_cache

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # NVRx reads the rank
        init_checkpoint_metadata_cache()
        self.queue = AsyncCallsQueue(persistent=True)
        self.staged: Any = None

    def save(self, step: int) -> Callable[[], None]:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )

        self.staged = staged(self.training.state_dict(), self.staged)
        writer = FileSystemWriterAsync(self.path(step), thread_count=FILES)
        planner = dcp.DefaultSavePlanner()
        planned = save_state_dict_async_plan(self.staged, writer, planner=planner, enable_cache=True)
        write, _, arguments = writer.get_save_function_and_args()
        finish = [lambda: save_state_dict_async_finalize(*planned)]  # writes the file that marks the rest as complete
        self.queue.schedule_async_request(AsyncRequest(write, arguments, finish))

        def wait() -> None:
            while not self.queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
                time.sleep(POLL_S)

        return wait

    def restore(self) -> None:
        """Restore into existing tensors, and then the parameter groups."""
        state = self.training.state_dict()
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.newest()))
        self.training.optim.load_state_dict(state["optim"])

    def extra_slots(self) -> int:
        return self.training.nbytes  # the staging buffers stay allocated

    def close(self) -> None:
        if self.queue.persistent_caller is not None:
            self.queue.persistent_caller.close()
        dist.destroy_process_group()


def staged(value: Any, kept: Any) -> Any:
    """Return the value with tensors in shared memory, in the previous ones if any."""
    if isinstance(value, dict):
        return {key: staged(one, None if kept is None else kept[key]) for key, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if kept is None:
        kept = torch.empty_like(value).share_memory_()
    kept.copy_(value.detach())
    return kept
