"""What the driver says about the accelerator of a process, from outside: NVML, where driver and package are there.

Nothing here raises, and nothing is tried again once it has failed: a machine without a GPU is the usual case.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

from ckpt.events import log
from ckpt.tools.observe.telemetry.status import DeviceStatus


class Devices:
    """`nvml`: the module to ask; by default pynvml, if it is installed."""

    def __init__(self, nvml: Any = None) -> None:
        self._given: Any = nvml
        self._nvml: Any = None
        self._tried = False
        self._asking = threading.Lock()

    def look(self, pid: int) -> DeviceStatus | None:
        """The device on which a process runs, or the only one there is; None if nobody knows. May take long: call it in
        a thread. While another thread is at it, which may hang in the driver, None."""
        if not self._asking.acquire(blocking=False):
            return None
        try:
            if not self._tried:
                self._tried = True
                self._open()
            return None if self._nvml is None else self._look(pid)
        except Exception as error:  # whatever a driver says
            log.info("the devices cannot be looked at any more: %r", error)
            self._nvml = None
            return None
        finally:
            self._asking.release()

    def _open(self) -> None:
        with contextlib.suppress(Exception):  # not installed, or no driver
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
        # In a container the driver may count processes by other numbers.
        return self._describe(handles[0], None) if len(handles) == 1 else None

    def _describe(self, handle: Any, mine: int | None) -> DeviceStatus:
        nvml: Any = self._nvml
        memory, name, busy = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle), None
        with contextlib.suppress(Exception):  # partitions of a device have no such figure
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        text = name.decode() if isinstance(name, bytes) else str(name)
        return DeviceStatus(text, busy, mine, int(memory.used), int(memory.total))
