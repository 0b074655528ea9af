"""The end of an incident: it is recorded and told, and the process ends if that is called for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.faults.report import Fault, tell_launcher
from ckpt.ipc.heartbeat import Heartbeat
from ckpt.ipc.watch_requests import Report
from ckpt.subscribers import publish
from ckpt.trainer.faults.incidents import FaultCall, Incidents
from ckpt.trainer.supervise.writer_supervisor import WriterSupervisor

REPORT_S = 2.0  # for the report to be written
FLUSH_S = 0.5


class CaseCloser:
    """Of one trainer. `decides`: whether a signal still ends the process if we say so."""

    def __init__(
        self,
        supervisor: WriterSupervisor,
        heartbeat: Heartbeat,
        incidents: Incidents,
        decides: Callable[[int], bool],
        on_fault: Callable[[Fault], None] | None,
    ) -> None:
        self._supervisor, self._heartbeat, self._incidents = supervisor, heartbeat, incidents
        self._decides, self._on_fault = decides, on_fault

    def close_case(self, call: FaultCall, *, ends: bool) -> None:
        """Record, tell, and be ready to leave."""
        fault = call.fault
        if call.leave is not None:
            if call.signal and not self._decides(call.signal):
                call.leave = None  # a handler that came later decides
            if call.note is not None and self._heartbeat.read().calls != call.note.evidence["calls"]:
                call.leave = None  # it has come to itself
            self._incidents.leaving = ends = call.leave is not None  # else its death, should that come, is news
            fault.exit_code = call.leave
        fault.timings["total_s"] = call.passed_s
        log.warning("%s", fault.line)
        with contextlib.suppress(CheckpointError):
            self._supervisor.client.ask(Report(fault.to_json(), ends), REPORT_S)
        if ends:
            tell_launcher(fault, fault.stacks.get(str(fault.rank), ()))
        self.tell(fault)

    def tell(self, fault: Fault) -> None:
        """Subscribers, and `on_fault`."""
        publish("fault", max(fault.steps.values(), default=None), fault=fault.kind, account=fault.line)
        if self._on_fault is not None:
            try:
                self._on_fault(fault)
            except BaseException:  # sys.exit() too: it would end this thread, and nothing else
                log.exception("on_fault failed")


def is_oom(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def leave(code: int) -> None:
    """End the process from any thread, whatever the main one does."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold a stream's lock
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(code)
