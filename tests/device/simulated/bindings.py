"""The parts of `torch._C` in a CUDA build that torch's Python calls. The names are torch's."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import simulated

CUDA = 1  # the type of device
SUCCESS = 0
MEMORY = 64 << 30  # bytes that each device reports


def fill(C: Any, core: Any) -> None:
    """Add the names. `C`: torch._C, just loaded. `core`: the C++ module of the device."""
    for name, value in simulated.from_environment().items():
        core.turn(name, value)
    atexit.register(core.end)
    C._has_cuda = True
    for part in (_devices(core), _streams(C, core), _graphs(core), _memory(core), _others(core)):
        for name, value in part.items():
            setattr(C, name, value)


def _devices(core: Any) -> dict[str, Any]:
    started: list[int] = []  # the process ids

    def resize(storage: Any, size: int) -> Any:
        """Resize a storage; torch's own function lacks CUDA here."""
        import torch

        if storage.device.type != "cuda":
            return torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        core.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    def start() -> None:
        import torch

        started.append(os.getpid())
        torch.cuda.default_generators = tuple(map(core.generator, range(core.device_count())))
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        torch.cuda._get_device_properties = lambda device: _Properties()  # type: ignore[attr-defined]

    return {
        "_cuda_init": start,
        "_cuda_isInBadFork": lambda: bool(started) and started[0] != os.getpid(),
        "_cuda_getDeviceCount": core.device_count,
        "_cuda_getDevice": core.get_device,
        "_cuda_setDevice": core.set_device,
        "_cuda_exchangeDevice": core.exchange_device,
        "_cuda_maybeExchangeDevice": lambda device: core.exchange_device(device),  # separate for torch.compile
        "_cuda_hasPrimaryContext": core.is_awake,
        "_cuda_canDeviceAccessPeer": lambda a, b: False,
        "_cuda_synchronize": lambda: core.synchronize(core.get_device()),
        "_cuda_sleep": core.sleep,
        "_CudaDeviceProperties": _Properties,
    }


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "simulated", 9, 0, MEMORY, 132


def _streams(C: Any, core: Any) -> dict[str, Any]:
    def stream(number: int, device: int) -> tuple[int, int, int]:
        return number, core.get_device() if device < 0 else device, CUDA

    return {
        "_CudaStreamBase": _stream_class(C, core),
        "_CudaEventBase": _event_class(C),
        "_cuda_getCurrentStream": lambda d: stream(core.get_stream(core.get_device() if d < 0 else d), d),
        "_cuda_getDefaultStream": lambda d: stream(0, d),
        "_cuda_getStreamFromExternal": stream,
        "_cuda_getCurrentRawStream": core.get_stream,
        "_cuda_setStream": _set_stream(core),
    }


def _set_stream(core: Any) -> Any:
    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        if core.get_device() != device_index:
            core.set_device(device_index)
        core.set_stream(device_index, stream_id)

    return set_stream


def _stream_class(C: Any, core: Any) -> type:
    class CudaStreamBase(C.Stream):  # type: ignore[misc, name-defined]
        """A stream with CUDA's additional properties; torch's generic one queries the device guard."""

        def __new__(cls, priority: int = 0, stream_id: Any = None, stream_ptr: Any = None, **at: Any) -> Any:
            device = at.get("device_index", core.get_device())
            number = stream_id if stream_id is not None else stream_ptr
            if number is None:
                number = core.new_stream(device, priority)
            return super().__new__(cls, stream_id=number, device_index=device, device_type=CUDA)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return int(core.priority_of(self.stream_id))

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -3

    return CudaStreamBase


def _event_class(C: Any) -> type:
    class CudaEventBase(C.Event):  # type: ignore[misc, name-defined]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            return super().__new__(
                cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )

        @property
        def cuda_event(self) -> int:
            return id(self)

    return CudaEventBase


def _graphs(core: Any) -> dict[str, Any]:
    class CUDAGraph:
        def __new__(cls, keep_graph: bool = False) -> Any:
            return super().__new__(cls)

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            core.capture_begin(capture_error_mode, 0 if pool is None else pool[1])

        def capture_end(self) -> None:
            self._graph = core.capture_end()

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            del self._graph

        def pool(self) -> tuple[int, int]:
            return 0, self._graph.pool

    return {
        "_CUDAGraph": CUDAGraph,
        "_graph_pool_handle": lambda: (0, core.new_pool()),
        "_cuda_isCurrentStreamCapturing": core.is_capturing,
    }


def _memory(core: Any) -> dict[str, Any]:
    def counts(device: int) -> dict[str, Any]:
        used, peak, reserved = core.memory_counts(device)
        return {
            "allocated_bytes": {"all": {"current": used, "peak": peak}},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
        }

    return {
        "_cuda_memoryStats": counts,
        "_cuda_resetPeakMemoryStats": core.reset_peak,
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def _others(core: Any) -> dict[str, Any]:
    return {
        "_cudart": _runtime(core),
        "_nvtx": _ranges(),
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getArchFlags": lambda: "",
        # The compiler imports these for its graph trees, which are not used here.
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_set_cached_tensors_enabled": lambda enabled: None,
    }


class _Code(int):
    """An error code of CUDA."""

    success = SUCCESS


def _runtime(core: Any) -> ModuleType:
    """Return CUDA's library as torch exposes it. Pointers are numbers."""
    runtime: Any = ModuleType("torch._C._cudart")

    def make_stream(pointer: int) -> _Code:
        ctypes.c_int64.from_address(pointer).value = core.own_stream(core.get_device())
        return _Code(SUCCESS)

    runtime.cudaError = _Code
    runtime.cudaGetErrorString = core.text_of
    runtime.cudaHostRegister = lambda pointer, size, flags: _Code(core.host_register(pointer, size))
    runtime.cudaHostUnregister = lambda pointer: _Code(core.host_unregister(pointer))
    runtime.cudaMemGetInfo = lambda device: (MEMORY - core.memory_counts(device)[0], MEMORY)
    runtime.cudaStreamCreate = make_stream
    runtime.cudaStreamDestroy = lambda pointer: _Code(SUCCESS)
    sys.modules[runtime.__name__] = runtime
    return runtime  # type: ignore[no-any-return]


def _ranges() -> SimpleNamespace:
    """Return the profiler's ranges, which only count how many are open."""
    local = threading.local()

    def push(name: str) -> int:
        local.depth = getattr(local, "depth", 0) + 1
        return int(local.depth) - 1

    def pop() -> int:
        local.depth = getattr(local, "depth", 0) - 1
        return int(local.depth)

    return SimpleNamespace(rangePushA=push, rangePop=pop, markA=lambda name: None)
