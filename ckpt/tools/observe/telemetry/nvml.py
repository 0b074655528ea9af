"""Query the accelerator of a process through NVML, from another process, if driver and package are installed.

No method raises an error. After a failure no query is made again, because machines without a GPU are common.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

from ckpt.events import log
from ckpt.tools.observe.telemetry.status import DeviceStatus


class Devices:
    """The accelerators of this machine. `nvml`: the module to use, default pynvml if it is installed."""

    def __init__(self, nvml: Any = None) -> None:
        self._given: Any = nvml
        self._nvml: Any = None
        self._tried = False
        self._asking = threading.Lock()

    def look(self, pid: int) -> DeviceStatus | None:
        """Return the device of a process, or the machine's only device; None if unknown. This may take long, so call it
        in a thread. While another thread queries, return None, because the driver may hang."""
        if not self._asking.acquire(blocking=False):
            return None
        try:
            if not self._tried:
                self._tried = True
                self._open()
            return None if self._nvml is None else self._look(pid)
        except Exception as error:  # a driver may raise any kind of exception
            log.info("stopped querying accelerators after an error: %r", error)
            self._nvml = None
            return None
        finally:
            self._asking.release()

    def _open(self) -> None:
        with contextlib.suppress(Exception):  # the package is not installed, or there is no driver
            nvml = self._given or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml

    def _look(self, pid: int) -> DeviceStatus | None:
        nvml: Any = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        for handle in handles:
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == pid:
                    return self._describe(handle, process.usedGpuMemory)
        # The process was not found, because in a container the driver may use other process ids.
        return self._describe(handles[0], None) if len(handles) == 1 else None

    def _describe(self, handle: Any, mine: int | None) -> DeviceStatus:
        nvml: Any = self._nvml
        memory, name, busy = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle), None
        with contextlib.suppress(Exception):  # a partition of a device does not have this value
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        text = name.decode() if isinstance(name, bytes) else str(name)
        return DeviceStatus(text, busy, mine, int(memory.used), int(memory.total))
