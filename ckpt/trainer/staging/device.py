"""What is asked of an accelerator: streams, events, page-locked memory, marks in its profiler's timeline.

The only file of the trainer that knows an accelerator's API. Copies run on a stream of their own, which first waits for
the compute stream; before an update the compute stream waits for the copy, and the host does not. Nothing here wakes a
device up that nobody uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.state.tensors import device_in_use
from ckpt.trainer.staging.cuda_runtime import new_stream, relax_capture

PORTABLE = 1  # page-locked for every device, not only for the one that is current

PerDevice = dict[torch.device, Any]
"""A stream of each device, or an event."""


def memory_node(tensors: Iterable[Tensor]) -> int | None:
    """The node of the machine's memory by which the first device of these lies, None if that is not known."""
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    for index in devices[:1]:
        of: Any = torch.cuda.get_device_properties(index)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            name = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
            return node if node >= 0 else None
    return None


def compute_streams(tensors: Iterable[Tensor]) -> PerDevice:
    """The caller's current streams where these tensors lie."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return {device: torch.get_device_module(device).current_stream(device) for device in devices}


def events_behind(streams: PerDevice) -> PerDevice:
    """Behind all that is on these streams; who waits for them sleeps, where CUDA would spin."""
    events: PerDevice = {}
    for device, stream in streams.items():
        module = torch.get_device_module(device)
        events[device] = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        events[device].record(stream)
    return events


def wait_for(events: PerDevice) -> None:
    """The host does. Raises what a kernel before them failed with."""
    for event in events.values():
        event.synchronize()


def queue_behind(streams: PerDevice, events: PerDevice) -> None:
    """What is put on these streams from now on comes after the events."""
    for device, event in events.items():
        streams[device].wait_event(event)


def queue_caller_behind(events: PerDevice) -> None:
    """What the calling thread puts on its current streams from now on comes after these."""
    for device, event in events.items():
        torch.get_device_module(device).current_stream(device).wait_event(event)


def begin_thread(devices: Iterable[torch.device]) -> None:
    """In a thread of ours, before it calls any of them. A thread begins with the first device, and would take memory
    there; and where it waits it would spoil a graph that another thread captures just then."""
    for device in devices:
        torch.get_device_module(device).set_device(device)
        if device.type == "cuda":
            relax_capture()


def is_capturing() -> bool:
    """Whether the calling thread's kernels are put into a graph, and not done."""
    return device_in_use() and torch.cuda.is_current_stream_capturing()


def begin_range(name: str) -> bool:
    """Mark what follows in NVTX timelines; whether there is a device that does."""
    if device_in_use():
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        return True
    return False


def end_range() -> None:
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class CopyStreams:
    """A stream of our own on each device, for copies beside training."""

    def __init__(self) -> None:
        self._streams: PerDevice = {}

    def of(self, devices: Iterable[torch.device]) -> PerDevice:
        for device in devices:
            if device not in self._streams:
                self._streams[device] = new_stream(device)
        return {device: self._streams[device] for device in devices}

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Wait until nothing is copied any more; a device that has failed copies nothing."""
        for device in devices:
            with contextlib.suppress(Exception):
                self.of([device])[device].synchronize()


@contextlib.contextmanager
def on(streams: PerDevice) -> Iterator[None]:
    """Inside, these are the calling thread's current ones."""
    with contextlib.ExitStack() as stack:
        for device, stream in streams.items():
            stack.enter_context(torch.get_device_module(device).stream(stream))
        yield


def copy_batch(targets: list[Tensor], sources: list[Tensor], streams: PerDevice) -> None:
    """In one call, for sources that lie on one device: on its stream if it has one here, else at once."""
    device = sources[0].device
    if device in streams:
        with on({device: streams[device]}):
            torch._foreach_copy_(targets, sources, non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources)


def lock_pages(address: int, size: int, where: torch.device) -> int:
    """Page-lock memory for all devices; 0, or the driver's error."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, size, PORTABLE))
    if error:
        with contextlib.suppress(RuntimeError):  # CUDA keeps a thread's last error, for the next kernel's check
            torch.ones(1, device=where)
    return error


def unlock_pages(address: int) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)
