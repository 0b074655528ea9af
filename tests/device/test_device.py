"""The simulated device: it is as asynchronous as a real one, and rejects what a real one rejects."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import simulated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not simulated.wanted(), reason="simulated device only")]

LONG = 600_000_000  # cycles: 0.3 s
SIZE = 1 << 20


def elsewhere(work: Callable[[], Any]) -> Any:
    """Run work in another thread. Return its result or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def fetched(source: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Return page-locked memory that receives an asynchronous copy on that stream."""
    here = torch.zeros(source.shape, dtype=source.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        here.copy_(source, non_blocking=True)
    return here


@pytest.fixture
def source() -> torch.Tensor:
    found = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return found


# -- order --


def test_copy_without_a_wait_is_torn(source: torch.Tensor) -> None:
    """An update overwrites part of it during the copy. Behind an event it does not."""
    side = torch.cuda.Stream()
    for ordered in (False, True):
        source.fill_(1)
        torch.cuda.synchronize()
        with simulated.turned(d2h_gbs=0.02):
            here = fetched(source, side)
            while here[0] != 1:
                time.sleep(0.001)
            if ordered:
                torch.cuda.current_stream().wait_stream(side)
            source.fill_(7)
            torch.cuda.synchronize()
        assert sorted(set(here.tolist())) == ([1] if ordered else [1, 7])


def test_streams_come_from_a_pool_of_32_streams() -> None:
    """The 33rd stream is the first again. Other priorities have separate streams. Some streams are not in the pool."""
    some = [torch.cuda.Stream() for _ in range(33)]
    assert some[32] == some[0] and len(set(some)) == 32
    assert torch.cuda.Stream(priority=-1) not in some and torch.cuda.Stream(priority=-1).priority == -1
    pointer = ctypes.c_int64()
    torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(pointer))
    assert torch.cuda.ExternalStream(pointer.value) not in some


def test_hung_stream_blocks_only_its_own_work() -> None:
    x, side = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with simulated.hung(side):
        with torch.cuda.stream(side):
            x += 1
        torch.cuda.current_stream().synchronize()
        assert not side.query() and x.item() == 0
    side.synchronize()
    assert x.item() == 1


# -- memory --


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == SIZE
    del x
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() - before == SIZE


def test_page_locking_has_limits_and_takes_time() -> None:
    """It accepts whole ranges once, up to a limit, and blocks other calls. The next kernel raises its error."""
    runtime, room = torch.cuda.cudart(), torch.zeros(1 << 20, dtype=torch.uint8)
    here, address = room.numpy(), room.data_ptr()
    with simulated.turned(lock_gbs=0.01):
        locking = threading.Thread(target=lambda: runtime.cudaHostRegister(address, 1 << 20, 0))
        locking.start()
        time.sleep(0.02)
        began = time.perf_counter()
        torch.cuda.current_stream().record_event()
        assert time.perf_counter() - began > 0.03
        locking.join()
    assert room.is_pinned() and runtime.cudaHostRegister(address, 4096, 0) == 712
    with pytest.raises(RuntimeError, match="already mapped"):
        torch.ones(1, device="cuda")
    assert runtime.cudaHostUnregister(address) == 0 and runtime.cudaHostRegister(address, 1 << 19, 0) == 0
    with pytest.raises(RuntimeError, match="across page-locked and other memory"):
        torch.from_numpy(here).copy_(torch.ones(1 << 20, dtype=torch.uint8, device="cuda"), non_blocking=True)
    assert runtime.cudaHostUnregister(address) == 0
    with simulated.turned(lock_call_bytes=4096):
        assert runtime.cudaHostRegister(address, 1 << 20, 0) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.ones(1, device="cuda")


# -- graphs --


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("relaxed", [False, True])
def test_other_thread_invalidates_global_captures(mode: Any, relaxed: bool) -> None:
    """A global capture is invalidated if another thread queries an event, unless that thread uses relaxed mode."""
    event, current = torch.cuda.current_stream().record_event(), torch.cuda.current_stream()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()

    def query() -> bool:
        mode = ctypes.c_int(2 if relaxed else 0)
        ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return event.query()

    spoilt = mode == "global" and not relaxed
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            x += 1
            found = elsewhere(query)
    except RuntimeError as error:
        assert spoilt and "previous error during capture" in str(error) and "not permitted" in str(found)
    else:
        assert not spoilt and found is True and x.item() == 0
        graph.replay()
        graph.replay()
        assert x.item() == 2
    torch.cuda.set_stream(current)  # torch leaves the stream of a failed capture current


def test_capture_must_not_wait() -> None:
    current = torch.cuda.current_stream()
    outside = current.record_event()
    for call in (torch.cuda.synchronize, lambda: torch.ones(1, device="cuda").item(), outside.wait):
        with pytest.raises(RuntimeError, match="CUDA error"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
        torch.cuda.set_stream(current)


# -- faults, devices, time --


def test_after_a_fault_every_call_fails(source: torch.Tensor) -> None:
    """Calls that already wait fail too, and queued work is not done."""
    torch.cuda._sleep(LONG)
    with simulated.faulty(torch.cuda.current_stream()):
        source.fill_(5)
        for call in (torch.cuda.synchronize, lambda: source + 1, torch.cuda.Stream):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                call()
    torch.cuda.synchronize()
    assert source[0].item() == 1
