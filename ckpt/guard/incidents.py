"""The queue of detected faults, and the last steps of handling one: record, report, and end the process if needed."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.core.ipc.messages import Hang, Report
from ckpt.core.run.training_run import TrainingRun
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.guard.report import Fault, tell_launcher
from ckpt.subscribers import publish

SOFT_S = 600.0  # seconds allowed for a save that has no deadline
_PEER = re.compile("closed by peer|reset by peer|broken pipe|remote process exited|socket closed", re.IGNORECASE)


@dataclass
class FaultCall:
    """A detected fault. `grace_s`: seconds from `seen` until it takes effect. `leave`: exit code, or None to go on."""

    fault: Fault
    grace_s: float
    leave: int | None = None
    far: bool = False  # True if the machine may disappear: the save then also goes to the tiers beyond the nearest
    signal: int = 0
    note: Hang | None = None  # details, if the fault is a hang
    seen: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float | None:
        return self.seen + self.grace_s if self.grace_s < SOFT_S else None

    @property
    def left_s(self) -> float:
        return max(0.0, self.seen + self.grace_s - time.monotonic())

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.seen


class Incidents:
    """The faults of a trainer, in order. `leaving`: True once a fault ends the process; later faults are then its
    consequences. `stopped`: True once no more faults are handled. `error`: the exception that ends the training."""

    def __init__(self, run: TrainingRun) -> None:
        self.world, self.supervisor, self.heartbeat = run.world, run.supervisor, run.heartbeat
        self.queue: queue.SimpleQueue[FaultCall | Callable[[], None] | None] = queue.SimpleQueue()
        self.leaving = self.stopped = False
        self.error: BaseException | None = None

    @property
    def me(self) -> str:
        return f"rank {self.world.rank}" if self.world.size > 1 else "the trainer"

    def new(self, kind: str, summary: str, *, how: str, grace_s: float) -> FaultCall:
        owner = self.supervisor.owner
        fault = Fault(kind, summary, how=how, rank=self.world.rank, world=self.world.size)
        fault.term = f"{owner.term}.{owner.nonce}"
        return FaultCall(fault, grace_s)

    def request(self, summary: str, *, how: str) -> None:
        """Queue a requested save."""
        call = self.new("request", summary, how=how, grace_s=SOFT_S)
        call.fault.advice, call.far = "none", True
        self.queue.put(call)


REPORT_S = 2.0  # seconds for the writer to record the report
FLUSH_S = 0.5


class CaseCloser:
    """Completes the faults of a trainer. `decides`: returns True if a signal would end the process by itself."""

    def __init__(
        self, incidents: Incidents, decides: Callable[[int], bool], on_fault: Callable[[Fault], None] | None
    ) -> None:
        self._incidents, self._decides, self._on_fault = incidents, decides, on_fault

    def close_case(self, call: FaultCall, *, ends: bool) -> None:
        """Record and report a fault, and decide whether the process ends."""
        fault = call.fault
        if call.leave is not None:
            if call.signal and not self._decides(call.signal):
                call.leave = None  # a handler that was installed after ours decides whether the process ends
            if call.note is not None and self._incidents.heartbeat.read().calls != call.note.evidence["calls"]:
                call.leave = None  # the trainer has done a step, so the hang has ended
            self._incidents.leaving = ends = call.leave is not None  # if False, a later death is a new fault
            fault.exit_code = call.leave
        fault.timings["total_s"] = call.passed_s
        log.warning("%s", fault.line)
        with contextlib.suppress(CheckpointError):
            self._incidents.supervisor.client.ask(Report(fault.to_json(), ends), REPORT_S)
        if ends:
            tell_launcher(fault, fault.stacks.get(str(fault.rank), ()))
        self.tell(fault)

    def tell(self, fault: Fault) -> None:
        """Pass a fault to the subscribers and to `on_fault`."""
        publish("fault", max(fault.steps.values(), default=None), fault=fault.kind, account=fault.line)
        if self._on_fault is not None:
            try:
                self._on_fault(fault)
            except BaseException:  # including SystemExit, because sys.exit() would end only this thread
                log.exception("on_fault failed")


def is_oom(error: BaseException) -> bool:
    """Return True if memory ran out, on a device or on the host."""
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def is_of_a_peer(error: BaseException) -> bool:
    """Return True if the error is a lost connection to another process, whose end is then the cause."""
    return isinstance(error, (OSError, RuntimeError)) and _PEER.search(str(error)) is not None


def leave(code: int) -> None:
    """End the process from any thread, whatever the main thread is doing."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold a stream's lock
    try:
        flushing.start()
        flushing.join(FLUSH_S)
    except RuntimeError:  # the interpreter is exiting; since Python 3.12, no thread can be started then
        flush()
    os._exit(code)
