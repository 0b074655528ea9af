"""Access to accelerators: streams, events, packs, page-locked memory, and ranges in a profiler's timeline.

In the trainer, only this file uses an accelerator's API. Copies run on a separate stream, which first waits for the
compute stream. Before an update, the compute stream waits for the copy, but the host does not. Devices that the process
does not use are never initialized. CUDA functions that torch does not offer are called with ctypes, in the library that
torch has loaded. Other accelerators (ROCm) do without these functions.

**Packs.** A copy costs the host about 6 us even if it is small, and a model has thousands of norms, biases and step
counts. So a few kernels gather them on the device, one copy brings them to the host, and the host distributes them.

**Page locks.** Locking memory takes about 0.1 s per GB under a driver lock that all processes of a machine share.
During that time, the process launches no kernels. So a thread locks the arena in pieces, and pauses after each piece
for as long as the locking took. Training waits for one piece at most. Some kernels (Linux 6.11 to 6.13) refuse more
than 2 GiB in one call, but pieces are smaller. Copies to memory that is not locked yet are slower. The driver treats
pieces as separate memory, so a copy may not cross the end of a piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from ckpt.core.format.layout import Layout
from ckpt.core.ipc.arena import LOCK, Arena
from ckpt.core.state.capture import CapturedState
from ckpt.core.state.tensors import TORCH_DTYPE, device_in_use
from ckpt.events import log

RELAXED = 2  # cudaStreamCaptureModeRelaxed
NON_BLOCKING = 1  # cudaStreamNonBlocking: this stream and the default stream do not wait for each other
LOWEST = 0  # lowest priority, so that the device schedules work on other streams first
NEEDED = ("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithPriority")


@cache
def _library() -> Any:
    """Return the CUDA runtime library that the process has loaded, or None."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (None, f"libcudart.so.{major}") if torch.version.hip is None else ():
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(name)
            if all(hasattr(found, function) for function in NEEDED):
                return found
    return None


def new_stream(device: torch.device) -> Any:
    """Return a stream outside torch's pool of 32, because a hanging collective may block any of those. If that is not
    possible, return a stream of torch."""
    library = _library() if device.type == "cuda" else None
    handle = ctypes.c_void_p()
    if library is not None:
        with torch.cuda.device(device):
            if library.cudaStreamCreateWithPriority(ctypes.byref(handle), NON_BLOCKING, LOWEST) == 0:
                return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]
    return torch.get_device_module(device).Stream(device)


PORTABLE = 1  # page-lock for every device, not only for the current one

PerDevice = dict[torch.device, Any]
"""A stream or an event for each device."""


def memory_node(tensors: Iterable[Tensor]) -> int | None:
    """Return the NUMA node of the first device that has any of these tensors, or None if it is unknown."""
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    for index in devices[:1]:
        of: Any = torch.cuda.get_device_properties(index)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            name = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
            return node if node >= 0 else None
    return None


def compute_streams(tensors: Sequence[Tensor]) -> PerDevice:
    """Return the caller's current streams on the devices of these tensors."""
    one_of_each = dict(zip(map(Tensor.get_device, tensors), tensors, strict=True)).values()  # quick for thousands
    devices = {tensor.device for tensor in one_of_each if not tensor.is_cpu}
    return {device: torch.get_device_module(device).current_stream(device) for device in devices}


def events_behind(streams: PerDevice) -> PerDevice:
    """Record an event after the work on each stream. Waiting for it sleeps, while CUDA would spin by default."""
    events: PerDevice = {}
    for device, stream in streams.items():
        module = torch.get_device_module(device)
        events[device] = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        events[device].record(stream)
    return events


def wait_for(events: PerDevice) -> None:
    """Block the host until the events are reached. Raise the error of a kernel that failed before an event."""
    for event in events.values():
        event.synchronize()


def queue_behind(streams: PerDevice, events: PerDevice) -> None:
    """Make later work on these streams wait for the events."""
    for device, event in events.items():
        streams[device].wait_event(event)


def queue_caller_behind(events: PerDevice) -> None:
    """Make later work on the calling thread's current streams wait for the events."""
    for device, event in events.items():
        torch.get_device_module(device).current_stream(device).wait_event(event)


def begin_thread(devices: Iterable[torch.device]) -> None:
    """Prepare one of our threads for these devices, because it would otherwise allocate memory on the first device."""
    for device in devices:
        torch.get_device_module(device).set_device(device)
        if device.type == "cuda" and (library := _library()) is not None:
            # In the default mode, waiting would fail while another thread captures a graph, and would break the graph.
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))


def is_capturing() -> bool:
    """Return True if the calling thread captures its kernels into a graph."""
    return device_in_use() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def on(streams: PerDevice) -> Iterator[None]:
    """Make these the current streams of the calling thread in the `with` block."""
    with contextlib.ExitStack() as stack:
        for device, stream in streams.items():
            stack.enter_context(torch.get_device_module(device).stream(stream))
        yield


def copy_batch(targets: list[Tensor], sources: list[Tensor], streams: PerDevice) -> None:
    """Copy sources from one device in one call. Use the device's stream in `streams` if there is one."""
    device = sources[0].device
    if device in streams:
        with on({device: streams[device]}):
            torch._foreach_copy_(targets, sources, non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources)


def lock_pages(address: int, size: int, where: torch.device) -> int:
    """Page-lock memory for all devices. Return 0, or the error code of the driver."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, size, PORTABLE))
    if error:
        with contextlib.suppress(RuntimeError):  # clears the last CUDA error, which the next kernel would raise
            torch.ones(1, device=where)
    return error


def unlock_pages(address: int) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


class Waiter:
    """A thread that waits for devices, so that the staging thread need not poll them. Polling an event holds the GIL
    and may block on the lock of a hanging device. Waiting for an event does neither."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PerDevice, threading.Event, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def when_reached(self, events: PerDevice, there: threading.Event, call: Callable[[], None]) -> None:
        """Set `there` and call `call` once all events are reached or a device has failed. Return immediately."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-device", daemon=True)
            self._thread.start()
        self._queue.put((events, there, call))

    def stop(self) -> None:
        """End the thread. Do not wait for it, because a device may hang."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            events, there, call = item
            with contextlib.suppress(Exception):  # the staging thread raises the error of a failed kernel
                begin_thread(events)
                wait_for(events)
            there.set()
            call()


# -- packs --

SMALL = 256 << 10  # bytes; smaller tensors are packed
LEAST = 8  # minimum number of small tensors in a pack
ALIGN = 16  # bytes

Kind = tuple[torch.device, bool]
"""The device of some tensors, and whether only optimizers change them."""


class Pack:
    """A reusable buffer on a device and on the host, for the tensors `numbers` of a layout."""

    def __init__(self, layout: Layout, numbers: Sequence[int], where: torch.device) -> None:
        self.numbers, self.where = numbers, where
        specs = [layout.tensors[number] for number in numbers]
        starts = list(accumulate((-(-spec.nbytes // ALIGN) * ALIGN for spec in specs), initial=0))
        self._there = torch.empty(starts[-1], dtype=torch.uint8, device=where)
        self._here = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        places = list(zip(specs, starts, strict=False))

        def views(memory: Tensor) -> list[Tensor]:
            return [memory[at : at + s.nbytes].view(TORCH_DTYPE[s.dtype]).view(s.shape) for s, at in places]

        self._targets, self._found = views(self._there), views(self._here)
        kinds: dict[str, list[int]] = {}
        for i, spec in enumerate(specs):
            kinds.setdefault(spec.dtype, []).append(i)
        self._kinds = list(kinds.values())  # one kernel copies many tensors of one dtype

    def gather(self, sources: Sequence[Tensor]) -> None:
        """Gather the tensors of this pack on the current stream. `sources`: all tensors of the layout."""
        for kind in self._kinds:
            torch._foreach_copy_([self._targets[i] for i in kind], [sources[self.numbers[i]] for i in kind])

    def fetch(self, streams: PerDevice) -> None:
        """Queue the copy to the host."""
        with on({self.where: streams[self.where]}):
            self._here.copy_(self._there, non_blocking=True)

    def deal_out(self, views: Sequence[Tensor]) -> None:
        """Distribute the tensors of this pack after the copy. `views`: all tensors of the layout, in the slot."""
        torch._foreach_copy_([views[number] for number in self.numbers], self._found)


class Packs:
    """The packs of one layout: for each device, one for the first part of a copy and one for the rest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._guarded: list[bool] = []
        self._numbers: dict[Kind, list[int]] = {}
        self._free: dict[Kind, list[Pack]] = {}

    def lend(self, captured: CapturedState, *, late: bool) -> list[Pack]:
        """Lend packs for small tensors. `late`: True for tensors that only optimizers change, False for others."""
        layout, guarded = captured.layout, captured.guarded
        with self._lock:
            if layout is not self._layout or guarded is not self._guarded:
                self._layout, self._guarded, self._free = layout, guarded, {}
                small: dict[Kind, list[int]] = {}
                for number, (spec, source) in enumerate(zip(layout.tensors, captured.tensors, strict=True)):
                    plain = not (source.is_conj() or source.is_neg())
                    if source.device.type == "cuda" and 0 < spec.nbytes < SMALL and plain:
                        small.setdefault((source.device, guarded[number]), []).append(number)
                self._numbers = {key: numbers for key, numbers in small.items() if len(numbers) >= LEAST}
            found = []
            for key, numbers in self._numbers.items():
                if key[1] is late:
                    free = self._free.setdefault(key, [])
                    found.append(free.pop() if free else Pack(layout, numbers, key[0]))
            return found

    def give_back(self, packs: Iterable[Pack]) -> None:
        """Return packs to the pool. No device may still use them."""
        with self._lock:
            for pack in packs:
                for key, numbers in self._numbers.items():
                    if pack.numbers is numbers:
                        self._free.setdefault(key, []).append(pack)


# -- page locks --

LEAST_PAUSE_S = 0.001  # minimum pause between two pieces, so that waiting threads get the driver lock
STOP_S = 10.0  # timeout for locking the current piece
READY_S = 0.01  # pause between two checks whether the writer has added another slot


def ready_slots(arena: Arena, stopped: threading.Event) -> Iterator[int]:
    """Yield every slot, in order, as soon as it is ready. End early when `stopped` is set."""
    slot = 0
    while slot < arena.slots and not stopped.is_set():
        if slot < arena.ready:
            yield slot
            slot += 1
        else:
            stopped.wait(READY_S)


class PageLocks:
    """Page-locks one arena at a time, for the staging thread. `held`: addresses of the locked pieces, by slot."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.steady = threading.Lock()  # while a caller holds it, no further piece is locked
        self._given_up: set[int] = set()
        self._slots = 0  # number of slots that are locked or will be
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, arena: Arena, where: torch.device) -> None:
        """Start locking the arena in the background, on the first call and again after a slot was added."""
        if where.type != "cuda" or arena.slots <= self._slots or (self._thread is not None and self._thread.is_alive()):
            return
        self._slots = arena.slots
        self._stopped = stopped = threading.Event()
        thread = threading.Thread(target=self._lock, args=(arena, where, stopped), name="ckpt-lock", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while the interpreter exits
            thread.start()
            self._thread = thread

    def release(self, slot: int) -> None:
        """Unlock a slot permanently, so that its memory can be released."""
        with self.steady:
            self._given_up.add(slot)
            for address in self.held.pop(slot, ()):
                unlock_pages(address)

    def release_all(self) -> None:
        """Unlock all pieces, before another arena is used."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        for slot in list(self.held):
            self.release(slot)
        self._given_up.clear()
        self._thread, self._slots = None, 0

    # -- in a separate thread --

    def _lock(self, arena: Arena, where: torch.device, stopped: threading.Event) -> None:
        begin_thread([where])
        began = time.monotonic()
        for slot in ready_slots(arena, stopped):
            for start in range(0, 0 if slot in self.held else arena.slot_size, LOCK):
                started = time.monotonic()
                if not self._lock_piece(arena, slot, start, where, stopped):
                    return
                stopped.wait(max(LEAST_PAUSE_S, time.monotonic() - started))
        log.info("page-locked the memory for snapshots in %.1f s: copies are fast now", time.monotonic() - began)

    def _lock_piece(self, arena: Arena, slot: int, start: int, where: torch.device, stopped: threading.Event) -> bool:
        """Lock one piece of a slot. Return False if locking must end."""
        with self.steady:
            if stopped.is_set():
                return False
            if slot in self._given_up:
                return True
            size = min(LOCK, arena.slot_size - start)
            address = torch.frombuffer(arena.data(slot), dtype=torch.uint8).data_ptr() + start
            error = lock_pages(address, size, where)
            if not error:
                self.held.setdefault(slot, []).append(address)
                return True
        log.warning("could not page-lock memory for %s (error %d): copies stay slow", where, error)
        return False


# -- profilers --

P = ParamSpec("P")
T = TypeVar("T")


class span:
    """A named range in the timelines of profilers: torch.profiler, and Nsight Systems by NVTX. Costs well under a
    microsecond if no profiler is active.

        ckpt.step      step() and save(), in the training thread
        ckpt.wait      an optimizer waits for a copy to end
        ckpt.restore   restore()
        ckpt.stage     a snapshot is copied, in the staging thread

    torch.profiler records the thread that started it, or all threads with
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`. NVTX ranges are recorded as
    soon as CUDA is in use.
    """

    __slots__ = ("_marked", "_name", "_recorded")

    def __init__(self, name: str) -> None:
        self._name, self._recorded, self._marked = name, None, False

    _recorded: Any

    def __enter__(self) -> None:
        # Check first, because entering a range costs 10 us even without a profiler.
        if profiler._is_profiler_enabled:
            self._recorded = torch.profiler.record_function(self._name)
            self._recorded.__enter__()
        self._marked = device_in_use()
        if self._marked:
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if self._marked:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if self._recorded is not None:
            self._recorded.__exit__(*error)


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that marks each call of a function as a range with this name."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return function(*args, **kwargs)

        return inside

    return wrap
