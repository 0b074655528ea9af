"""The fault handler in the trainer process. It receives faults, has the state saved, reports each fault, and ends the
process if needed.

One thread receives signals, notices, requests and the writer's notes, and never blocks. Another thread handles the
incidents one after the other (`ckpt.guard`):

    perceive -> EmergencySaver.request_save -> report -> leave, if requested

Neither thread ever waits for the main thread without a deadline.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ckpt.core.ipc.messages import Hang
from ckpt.core.run.closing import EmergencySaver
from ckpt.core.run.training_run import TrainingRun
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.guard.incidents import SOFT_S, CaseCloser, FaultCall, Incidents, is_of_a_peer, is_oom, leave
from ckpt.guard.look_around import look_around
from ckpt.guard.perceive import Perception
from ckpt.guard.report import Fault, SavedStep
from ckpt.triggers import REPLACE_CODE, RETRY_CODE, OnException, OnHang, OnOom, Trigger

CRASHING_S = 0.5  # seconds after an exception for the newest step, which is in memory, to become durable
OTHERS_S = 60.0  # seconds for other runs of this process to copy their last step into memory

_armed: weakref.WeakSet[FaultHandler] = weakref.WeakSet()  # the armed fault handlers of this process
_ending = threading.Lock()  # acquired once, by the thread that ends the process


class _Excepthook:
    """The fault handler's entry in sys.excepthook. Other code may wrap this object and keep it forever, so it keeps
    neither the fault handler nor its memory alive."""

    def __init__(self, fault_handler: FaultHandler) -> None:
        self.before = sys.excepthook
        self._fault_handler = weakref.ref(fault_handler)

    def put_in(self) -> None:
        self.before, sys.excepthook = sys.excepthook, self

    def put_back(self) -> None:
        if sys.excepthook is self:
            sys.excepthook = self.before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if (fault_handler := self._fault_handler()) is not None:
            fault_handler.on_uncaught(error)
        self.before(kind, error, trace)


class FaultHandler:
    """Handles the faults of a Checkpointer. Call `start`, `stop` and `exception` from the main thread."""

    def __init__(
        self,
        triggers: tuple[Trigger, ...],
        run: TrainingRun,
        emergency: EmergencySaver,
        on_fault: Callable[[Fault], None] | None,
    ) -> None:
        self._triggers, self._run, self._emergency = triggers, run, emergency
        self._world, self._heartbeat = run.world, run.heartbeat
        self._incidents = incidents = Incidents(run)
        self._perception = Perception(triggers, incidents)
        self._closer = CaseCloser(incidents, self._perception.decides, on_fault)
        self._excepthook = _Excepthook(self)
        self._threads: list[threading.Thread] = []

    # -- life --

    def start(self) -> None:
        """Install all triggers. If one trigger fails, uninstall the others and raise its error."""
        if not self._triggers:
            return
        _armed.add(self)
        try:
            self._perception.arm()
            self._excepthook.put_in()
            for name, target in (
                ("ckpt-fault-handler", self._perception.receive),
                ("ckpt-incident", self._deal_with_all),
            ):
                self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                self._threads[-1].start()
            self._perception.notices.start()
        except BaseException:  # includes Ctrl-C, so that the previous handlers are always restored
            self.stop()
            raise

    def stop(self, timeout_s: float = SOFT_S) -> None:
        """Restore the previous handlers. First wait up to `timeout_s` for a fault in progress."""
        if self._incidents.stopped:
            return
        self._incidents.stopped = True
        _armed.discard(self)
        if self._triggers:
            self._disarm(timeout_s)
        self._perception.close()
        self._heartbeat.close()

    def _disarm(self, timeout_s: float) -> None:
        perception, end = self._perception, time.monotonic() + timeout_s
        perception.stop()
        self._emergency.stop(timeout_s)
        self._incidents.queue.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.1, end - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            while True:  # drain incidents that arrived after the handler thread had ended
                late = self._incidents.queue.get_nowait()
                if isinstance(late, FaultCall) and late.leave is not None and late.signal:
                    perception.wakeup.miss(late.signal)
        perception.put_back()
        self._excepthook.put_back()

    def forget(self) -> None:
        """Stop handling faults in a forked child, because its signals and crashes are not those of the trainer."""
        if self.armed:
            self._incidents.stopped = True
            _armed.discard(self)
            self._perception.forget()

    @property
    def armed(self) -> bool:
        return bool(self._triggers) and not self._incidents.stopped

    # -- called in the main thread --

    @property
    def saw_exception(self) -> bool:
        """Return True if an exception ended the training."""
        return self._incidents.error is not None

    def request(self, why: str) -> None:
        """Request a save on all ranks at one of the next steps. Return immediately."""
        self._incidents.request(f"requested by the code of rank {self._world.rank}: {why}", how="call")

    def tell(self, fault: Fault) -> None:
        """Pass a fault of an earlier job attempt to `on_fault`."""
        self._incidents.queue.put(lambda: self._closer.tell(fault))

    def exception(self, error: BaseException) -> None:
        """Handle an exception that leaves the training loop. The training thread calls it last."""
        incidents, oom = self._incidents, is_oom(error)
        if error is incidents.error:
            return
        incidents.error = error
        if incidents.leaving or incidents.stopped or not self._has(OnOom if oom else OnException):
            return
        incidents.leaving = True  # faults after this one are its consequences
        what = "ran out of memory" if oom else f"raised {type(error).__name__}"
        call = incidents.new("oom" if oom else "exception", "", how="exception", grace_s=CRASHING_S)
        fault = call.fault
        fault.summary = f"{incidents.me} {what}: {str(error)[:500]}".rstrip(": ")
        frames = traceback.extract_tb(error.__traceback__)
        fault.stacks[str(self._world.rank)] = [f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames)]
        fault.advice, fault.exit_code = ("retry" if oom or is_of_a_peer(error) else "fix"), 1
        if self._heartbeat.step >= 0:
            fault.steps[str(self._world.rank)] = self._heartbeat.step
        self._save(call, leaving=True, loop_ended=True)
        self._closer.close_case(call, ends=True)

    def _has(self, kind: type[Trigger]) -> bool:
        return any(isinstance(trigger, kind) for trigger in self._triggers)

    def on_uncaught(self, error: BaseException) -> None:
        """Handle an uncaught exception if the Checkpointer is not used as a context manager."""
        if isinstance(error, Exception):
            try:
                self.exception(error)
            except Exception:
                log.exception("failed to handle the exception that ends the training")

    # -- handle incidents --

    def _deal_with_all(self) -> None:
        """Handle one incident after the other; runs in its own thread."""
        while (call := self._incidents.queue.get()) is not None:
            try:
                if isinstance(call, FaultCall):
                    self._deal(call)
                else:
                    call()
            except Exception:
                log.exception("failed to handle an incident")
            if isinstance(call, FaultCall) and call.leave is not None:
                with contextlib.suppress(Exception):
                    self._emergency.await_copy()
                if _ending.acquire(blocking=False):  # otherwise another run waits for this one and ends the process
                    self._wait_for_others(time.monotonic() + min(call.left_s, OTHERS_S))
                    leave(call.leave)

    def _wait_for_others(self, end: float) -> None:
        """Wait until other runs of this process have handled their incidents and copied their last step."""
        for other in list(_armed - {self}):
            done = threading.Event()
            other._incidents.queue.put(partial(other._await_copy, done))
            done.wait(max(0.0, end - time.monotonic()))

    def _await_copy(self, done: threading.Event) -> None:
        try:
            self._emergency.await_copy()
        finally:
            done.set()

    def _deal(self, call: FaultCall) -> None:
        if call.note is not None:
            self._look_around(call, call.note)
        if call.fault.kind == "memory":
            self._free_memory(call)
        if self._heartbeat.step >= 0:
            call.fault.steps.setdefault(str(self._world.rank), self._heartbeat.step)
        self._save(call, leaving=call.leave is not None)
        self._closer.close_case(call, ends=call.leave is not None)

    def _free_memory(self, call: FaultCall) -> None:
        """Release snapshots in memory on a host that is short of memory."""
        with contextlib.suppress(CheckpointError):
            freed = self._emergency.give_memory_back()
            call.fault.summary += f"; released {freed / 2**20:.0f} MiB of snapshots" if freed else ""

    def _save(self, call: FaultCall, *, leaving: bool, loop_ended: bool = False) -> None:
        """Save the newest state that all ranks can save, and add the outcome to the report."""
        fault = call.fault
        for summary in self._run.dead_ranks.values():
            fault.summary += f" (before that: {summary})"
        before_s, hung = call.passed_s, fault.kind == "hang"
        outcome = self._emergency.request_save(
            fault.summary, call.deadline, far=call.far, leaving=leaving, hung=hung, loop_ended=loop_ended
        )
        for how, saved in outcome.saved.items():
            fault.saved += [SavedStep(one.step, one.tier, how, before_s + one.seconds, one.error) for one in saved]
        for name, seconds in ("staged_s", outcome.staged_s), ("durable_s", outcome.durable_s):
            if seconds is not None:
                fault.timings[name] = before_s + seconds

    def _look_around(self, call: FaultCall, note: Hang) -> None:
        """Add the activity of every rank to the report, and decide whether this rank exits."""
        look_around(call, note, self._incidents)
        if next((t.action for t in self._triggers if isinstance(t, OnHang)), "") == "exit":
            self._incidents.leaving = True
            guilty = call.fault.suspects == [self._world.rank] and self._world.size > 1
            call.leave = REPLACE_CODE if guilty else RETRY_CODE
            call.fault.advice = "replace" if guilty else "retry"
