"""The trainer's own watch: it sees what happens, has the state saved, says so, and ends the process if it must.

One thread takes in what comes (signals, notices, requests, what the writer sees) and never waits for anything. Another
deals with one incident after the other:

    perceive -> agree on a step, or take what is in memory -> make it durable -> report -> leave, if that is called for

Neither ever waits for the main thread without a deadline. Where that cannot come, the state is copied without it
(`ckpt.trainer.stage`), or what is in memory already is made durable by the writer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.errors import CheckpointError, PeerError
from ckpt.events import log
from ckpt.faults import preemption, probe
from ckpt.faults.hang import Evidence, note_evidence
from ckpt.faults.report import Fault, SavedStep, tell_launcher
from ckpt.faults.signals import Wakeup
from ckpt.format.manifest import Attempt
from ckpt.ipc import notes
from ckpt.ipc.heartbeat import NEVER, OPENING, RESTORING, Heartbeat
from ckpt.ipc.requests import Persist
from ckpt.ipc.watch_requests import Arm, AskEvidence, Heard, Report
from ckpt.ranks.save_rounds import Round, SaveRounds, step_ahead
from ckpt.ranks.world import World
from ckpt.save import Save
from ckpt.subscribers import publish
from ckpt.trainer.replica_rescue import MissingTensors
from ckpt.trainer.writer_supervisor import WriterSupervisor
from ckpt.triggers import (
    REPLACE_CODE,
    RESUBMIT_CODE,
    RETRY_CODE,
    OnDeadline,
    OnException,
    OnHang,
    OnMemoryPressure,
    OnOom,
    OnPreemption,
    OnSignal,
    Trigger,
)

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGQUIT, signal.SIGINT)  # the SIGUSRs say "go on"
LAST_S = 20.0  # before a preemption, the state is saved once more
SOFT_S = 600.0  # for a save that nobody is in a hurry for
PERSIST_S = 60.0  # for what is in memory to become durable, if the other ranks have it too
COPYING_S = 2.0  # for a copy that is under way
GUESS_S = 0.1
PATIENCE_S = 0.5  # for the training loop to come, beyond what its steps take
ROUND_S = 1.0  # for the other ranks to be told
NODES_S = 2.0  # for other nodes to say what their ranks do
EVIDENCE_S = 5.0
REPORT_S = 2.0  # for the report to be written
CRASHING_S = 0.5  # for the newest step to become durable, where memory has it in any case
FLUSH_S = 0.5
MISSED = 3  # rounds that may be called because some rank was past the step


class FaultActions(Protocol):
    """What the fault handler may do to a run. All of it can be called from any thread, and none of it hangs."""

    def in_memory(self, timeout_s: float) -> int | None:
        """The newest step that memory holds; waits for a copy that is under way."""

    def copy_live(self) -> int | None:
        """Copy the running state as it was at the last step() into memory, if it still is that; which step it is."""

    def fill_in(self, gap: MissingTensors) -> list[int]:
        """Copy what this rank holds of what a dead one lacks; which of its tensors, by number."""

    def give_up(self, attempt: Attempt) -> None:
        """This rank will not take part in an attempt that others may have begun."""

    def give_memory_back(self) -> int:
        """Do with one snapshot less; how many bytes that is."""


@dataclass
class FaultCall:
    """Something that was seen. `grace_s`: from `seen` on; `leave`: the exit code, None to go on."""

    fault: Fault
    grace_s: float
    leave: int | None = None
    far: bool = False  # the machine may go: to tiers beyond the nearest as well
    signal: int = 0
    note: notes.HangNote | None = None  # of a hang
    seen: float = field(default_factory=time.monotonic)

    @property
    def hurried(self) -> bool:
        return self.grace_s < SOFT_S

    @property
    def left_s(self) -> float:
        return max(0.0, self.seen + self.grace_s - time.monotonic())

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.seen


class _Excepthook:
    """Stands in sys.excepthook for a fault handler. Somebody else may wrap it and keep it for ever, so it does not keep
    the fault handler, nor the memory that hangs on it."""

    def __init__(self, fault_handler: FaultHandler) -> None:
        self.before = sys.excepthook
        self._fault_handler = weakref.ref(fault_handler)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if (fault_handler := self._fault_handler()) is not None:
            fault_handler.on_uncaught(error)
        self.before(kind, error, trace)


class FaultHandler:
    """Of one Checkpointer. `start`, `stop` and `exception` belong to the main thread."""

    def __init__(
        self,
        triggers: tuple[Trigger, ...],
        world: World,
        supervisor: WriterSupervisor,
        heartbeat: Heartbeat,
        levers: FaultActions,
        on_fault: Callable[[Fault], None] | None,
    ) -> None:
        self._triggers, self._world, self._supervisor = triggers, world, supervisor
        self._heartbeat, self._levers, self._on_fault = heartbeat, levers, on_fault
        self._signals = {number: t for t in triggers if isinstance(t, OnSignal) for number in t.numbers}
        self._calls: queue.SimpleQueue[FaultCall | Callable[[], None] | None] = queue.SimpleQueue()
        self._dead_peers: dict[int, str] = {}
        self._answers: dict[int, Save] = {}
        self._answered = threading.Condition()
        self._last_due = -1
        self._leaving = False
        self._stopped = False
        self._again: list[preemption.Notice] = []  # preemptions that get a second save
        self._seen_error: BaseException | None = None
        self._excepthook = _Excepthook(self)
        self._threads: list[threading.Thread] = []
        self._wakeup = Wakeup(self._signals)
        self._stop_reader, self._stop_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._save_rounds: SaveRounds | None = None
        self._notices = preemption.NoticeWatch(
            [t for t in triggers if isinstance(t, (OnPreemption, OnDeadline))], self._on_notice
        )
        self._crash_pipe: tuple[int, int] | None = None
        self._had_faulthandler = False

    # -- life --

    def start(self) -> None:
        """Arm everything."""
        if not self._triggers:
            return
        if self._world.size > 1:
            self._save_rounds = self._world.save_rounds(self._on_round)
        self._wakeup.arm()
        self._enable_faulthandler()
        self._arm_writer()
        self._listen()
        self._excepthook.before, sys.excepthook = sys.excepthook, self._excepthook
        for name, target in (("ckpt-fault-handler", self._receive), ("ckpt-incident", self._deal_with_all)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._notices.start()

    def stop(self, timeout_s: float = SOFT_S) -> None:
        """Put everything back. An incident that is being dealt with is finished first, if it is in time."""
        if self._stopped:
            return
        self._stopped = True
        if not self._triggers:
            self._close()
            return
        self._wakeup.deaf = True
        with self._answered:
            self._answered.notify_all()
        self._notices.stop()
        if self._save_rounds is not None:
            self._save_rounds.stop()
        self._calls.put(None)
        with contextlib.suppress(OSError):
            os.write(self._stop_writer, b"x")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.1, timeout_s))
        with contextlib.suppress(queue.Empty):
            while True:  # what came too late to be dealt with
                late = self._calls.get_nowait()
                if isinstance(late, FaultCall) and late.leave is not None and late.signal:
                    self._wakeup.miss(late.signal)
        self._wakeup.put_back()
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._excepthook.before
        self._disable_faulthandler()
        self._close()

    def _close(self) -> None:
        self._wakeup.close()
        for fd in (self._stop_reader, self._stop_writer):
            os.close(fd)
        self._heartbeat.close()

    def forget(self) -> None:
        """In a forked child: signals to it are not the trainer's, and a crash of it is its own."""
        if self._triggers and not self._stopped:
            self._stopped = True
            self._wakeup.forget()
            self._disable_faulthandler()

    @property
    def armed(self) -> bool:
        return bool(self._triggers) and not self._stopped

    @property
    def saw_exception(self) -> bool:
        """Whether an exception ended the training."""
        return self._seen_error is not None

    def has(self, kind: type[Trigger]) -> bool:
        return any(isinstance(trigger, kind) for trigger in self._triggers)

    def _enable_faulthandler(self) -> None:
        """What a crash says goes to the writer, which passes it on to stderr if it would have gone there."""
        self._had_faulthandler = faulthandler.is_enabled()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)  # a crash must not wait for a reader
        self._crash_pipe = reader, writer
        faulthandler.enable(file=writer, all_threads=True)
        faulthandler.register(probe.DUMP_SIGNAL, file=writer, all_threads=True)

    def _disable_faulthandler(self) -> None:
        if self._crash_pipe is None:
            return
        faulthandler.unregister(probe.DUMP_SIGNAL)
        # The default action of that signal would end us, and the writer may just have sent it.
        with contextlib.suppress(ValueError):
            signal.signal(probe.DUMP_SIGNAL, signal.SIG_IGN)
        faulthandler.disable()
        if self._had_faulthandler:
            for stream in (sys.stderr, sys.__stderr__):
                with contextlib.suppress(Exception):  # a stream without a descriptor
                    faulthandler.enable(file=stream or 2)
                    break
        for fd in self._crash_pipe:
            os.close(fd)
        self._crash_pipe = None

    def _arm_writer(self) -> None:
        assert self._crash_pipe is not None
        hang = next((t for t in self._triggers if isinstance(t, OnHang)), None)
        pressure = next((t for t in self._triggers if isinstance(t, OnMemoryPressure)), None)
        request = Arm(
            rank=self._world.rank,
            world=self._world.size,
            signals=[int(number) for number in self._signals],
            hang=None if hang is None else (hang.action, hang.factor, hang.min_s),
            share=None if pressure is None else pressure.share,
            echo=self._had_faulthandler,
        )
        stderr = 2 if self._had_faulthandler else self._stop_reader  # any descriptor, where nothing is to be echoed
        self._supervisor.arm(request, (self._heartbeat.fd, self._wakeup.reader.fileno(), self._crash_pipe[0], stderr))

    # -- the main thread --

    def due(self, step: int) -> bool:
        """Whether this step is to be saved out of turn. One comparison with a number in shared memory."""
        at = self._heartbeat.save_at
        if step < at or at == self._last_due:
            return False
        self._last_due = at
        return True

    def went_back(self) -> None:
        """Step numbers come again: what was due is not due any more."""
        self._last_due, self._heartbeat.save_at = -1, NEVER
        with self._answered:
            self._answers.clear()

    def answer(self, save: Save | None) -> None:
        """The step that was due has been saved."""
        with self._answered:
            if save is not None:
                self._answers = {**dict(list(self._answers.items())[-8:]), self._last_due: save}
            self._answered.notify_all()

    def request(self, why: str) -> None:
        """Have all ranks save soon; returns at once."""
        self._put("request", f"asked for by the code of rank {self._world.rank}: {why}", how="call", grace_s=SOFT_S)

    def tell(self, fault: Fault) -> None:
        """Of an earlier incarnation, to `on_fault`."""
        self._calls.put(lambda: self._call_hook(fault))

    def exception(self, error: BaseException) -> None:
        """An exception leaves the training loop; called by the thread that it leaves, which is the last to save."""
        oom = is_oom(error)
        if error is self._seen_error:
            return
        self._seen_error = error
        if self._leaving or self._stopped or not (self.has(OnOom) if oom else self.has(OnException)):
            return
        self._leaving = True  # what comes now is a consequence
        what = "ran out of memory" if oom else f"raised {type(error).__name__}"
        call = self._new_call("oom" if oom else "exception", "", how="exception", grace_s=CRASHING_S)
        fault = call.fault
        fault.summary = f"{self._me} {what}: {str(error)[:500]}".rstrip(": ")
        frames = traceback.extract_tb(error.__traceback__)
        fault.stacks[str(self._world.rank)] = [f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames)]
        fault.advice, fault.exit_code = ("retry" if oom else "fix"), 1
        if self._heartbeat.step >= 0:
            fault.steps[str(self._world.rank)] = self._heartbeat.step
        if self._can_save:
            self._secure(call, leaving=True, at_hand=True)
        self._close_case(call, ends=True)

    def on_uncaught(self, error: BaseException) -> None:
        """Where the Checkpointer is not used as a context manager."""
        if isinstance(error, Exception):
            try:
                self.exception(error)
            except Exception:
                log.exception("the exception that ends the training could not be dealt with")

    # -- taking in: never waits --

    def _receive(self) -> None:
        """The thread that hears signals."""
        while not self._stopped:
            self._wakeup.wait(self._stop_reader, None)
            for number in self._wakeup.read():
                self._on_signal(number, "wakeup descriptor")

    def _on_signal(self, number: int, how: str) -> None:
        trigger = self._signals.get(signal.Signals(number))
        if self._leaving and self._seen_error is not None and self._wakeup.would_end(number):
            self._wakeup.miss(number)  # an exception is on its way out, and the state safe: after that it may end us
        if trigger is None or self._leaving:
            return
        name = signal.Signals(number).name
        ends = trigger.leave
        if ends is None:
            ends = number in ENDING and self._wakeup.would_end(number)
        grace_s = trigger.grace_s if ends or number in ENDING else SOFT_S
        call = self._new_call("signal", f"{name} came to {self._me}", how=how, grace_s=grace_s)
        call.signal, call.far = number, True
        if ends:
            self._leaving = True  # a second one does not make it quicker
            call.leave, call.fault.advice = 128 + number, "resubmit"
        else:
            call.fault.advice = "none"
        self._calls.put(call)

    def _on_notice(self, notice: preemption.Notice) -> None:
        left_s = SOFT_S if notice.at is None else max(1.0, notice.at - time.time())
        soft = notice.kind == "rebalance"
        if notice.kind == "preemption" and LAST_S < left_s < SOFT_S and notice not in self._again:
            self._again.append(notice)  # and once more, shortly before it happens
            later = threading.Timer(left_s - LAST_S, lambda: None if self._stopped else self._on_notice(notice))
            later.daemon = True
            later.start()
        call = self._new_call(
            "preemption" if soft else notice.kind,
            f"{notice.what} ({self._me})",
            how="notice",
            grace_s=SOFT_S if soft else min(left_s, SOFT_S - 1),
        )
        call.far = True
        call.fault.advice = "replace" if notice.kind != "deadline" else "resubmit"
        if notice.kind == "deadline" and any(t.leave for t in self._triggers if isinstance(t, OnDeadline)):
            call.leave = RESUBMIT_CODE
        self._calls.put(call)

    def _listen(self) -> None:
        """To what the writer sees of us, or hears."""
        hear = self._supervisor.hear
        hear(notes.PeerDiedNote, self._on_peer_died)
        hear(notes.SignalNote, self._on_signal_note)
        hear(notes.PassedNote, lambda note: self._wakeup.pass_on(bytes(note.raw)))
        shell = "asked for at a shell"
        hear(notes.TriggerNote, lambda n: self._put("request", f"{shell}: {n.why}", how="ckpt trigger", grace_s=SOFT_S))
        hear(notes.HangNote, self._on_hang)
        hear(notes.PressureNote, self._on_pressure)

    def _on_peer_died(self, note: notes.PeerDiedNote) -> None:
        self._dead_peers[note.rank] = note.summary
        self._calls.put(lambda: self._relieve(note.writer, note.rank))

    def _on_signal_note(self, note: notes.SignalNote) -> None:
        self._supervisor.tell(Heard())
        self._on_signal(note.number, "writer")

    def _on_hang(self, note: notes.HangNote) -> None:
        self._supervisor.tell(Heard())
        call = self._new_call("hang", "", how="step counter", grace_s=SOFT_S - 1)
        call.note = note
        self._calls.put(call)

    def _on_pressure(self, note: notes.PressureNote) -> None:
        call = self._new_call("memory", f"{self._me}: {note.why}", how="memory", grace_s=SOFT_S)
        call.fault.advice = "none"
        self._calls.put(call)

    @property
    def _me(self) -> str:
        return f"rank {self._world.rank}" if self._world.size > 1 else "the trainer"

    def _new_call(self, kind: str, summary: str, *, how: str, grace_s: float) -> FaultCall:
        owner = self._supervisor.owner
        fault = Fault(kind, summary, how=how, rank=self._world.rank, world=self._world.size)
        fault.attempt = f"{owner.epoch}.{owner.nonce}"
        return FaultCall(fault, grace_s)

    def _put(self, kind: str, summary: str, *, how: str, grace_s: float) -> None:
        call = self._new_call(kind, summary, how=how, grace_s=grace_s)
        call.fault.advice, call.far = "none", True
        self._calls.put(call)

    # -- dealing with it --

    def _deal_with_all(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if isinstance(call, FaultCall):
                    self._deal(call)
                else:
                    call()
            except Exception:
                log.exception("an incident could not be dealt with")
            if isinstance(call, FaultCall) and call.leave is not None:
                self._take_the_last()
                leave(call.leave)

    def _take_the_last(self) -> None:
        """Training went on while the state became durable: what it did meanwhile is at least in memory."""
        with contextlib.suppress(Exception):
            if self._can_save and self._levers.in_memory(COPYING_S) != self._heartbeat.step:
                self._levers.copy_live()

    def _deal(self, call: FaultCall) -> None:
        if call.note is not None:
            self._look_around(call, call.note)
        if call.fault.kind == "memory" and self._can_save:
            with contextlib.suppress(CheckpointError):
                freed = self._levers.give_memory_back()
                call.fault.summary += f"; gave {freed / 2**20:.0f} MiB of snapshots back" if freed else ""
        if self._heartbeat.step >= 0:
            call.fault.steps.setdefault(str(self._world.rank), self._heartbeat.step)
        if self._can_save:
            self._secure(call, leaving=call.leave is not None)
        self._close_case(call, ends=call.leave is not None)

    @property
    def _can_save(self) -> bool:
        """Not before the first step: what is in memory or durable then is of an earlier incarnation, and stays."""
        return self._heartbeat.step >= 0 and self._heartbeat.state not in (OPENING, RESTORING)

    def _secure(self, call: FaultCall, *, leaving: bool, at_hand: bool = False) -> None:
        """Have the newest state saved that all ranks can have. `at_hand`: this is the thread that trains."""
        fault, alone = call.fault, self._world.size == 1
        blocked = bool(self._dead_peers) or fault.kind == "hang"  # somebody's training loop cannot come
        for summary in self._dead_peers.values():
            fault.summary += f" (before that: {summary})"
        held = self._levers.in_memory(min(COPYING_S, call.left_s))
        ready = held is not None and held == self._heartbeat.step
        # What memory has already need not be waited for, unless all ranks should save the same step in their own time.
        ask = not ready or not (alone or leaving)
        if ask and not blocked and not at_hand and self._agree(call):
            return
        if not ready and (step := self._levers.copy_live()) is not None:
            fault.saved.append(SavedStep(step, "memory", "live", call.passed_s))
        fault.timings["staged_s"] = call.passed_s
        if not alone and not blocked:
            for _ in range(MISSED):  # until the round is ours, and not another rank's for a step
                called = self._call_round(call, -1)
                if called is None or called.step < 0:
                    break
        if blocked and leaving and self._supervisor.has_memory:
            self._note_memory(call)  # the writer makes it durable while the launcher starts the next trainer
        else:
            self._persist(call)

    def _agree(self, call: FaultCall) -> bool:
        """Have the training loops of all ranks save one step; False if they do not come."""
        for _ in range(MISSED):
            if self._stopped:
                return False
            step, usual_s = self._heartbeat.step, self._usual_s()
            ahead = step + 1
            if self._save_rounds is not None:
                called = self._call_round(call, step_ahead(step, usual_s, self._save_rounds.pause_s))
                if called is None or called.step < 0:
                    return False
                ahead = called.step
            if not self._set_step(ahead):
                continue  # another's round, too early for us: call a later one
            patience_s = call.left_s
            if call.hurried:
                patience_s = min(call.left_s / 2, 3 * (ahead - step) * usual_s + PATIENCE_S)
            return self._await_answer(call, ahead, patience_s)
        return False

    def _usual_s(self) -> float:
        """How long a step takes; as long as nobody has learnt that, a guess from what happens now."""
        if usual_s := self._heartbeat.usual_s:
            return usual_s
        before = self._heartbeat.step
        time.sleep(GUESS_S)
        return GUESS_S / max(1, self._heartbeat.step - before)

    def _set_step(self, step: int) -> bool:
        """Have the training loop save this step; False if it has passed it already."""
        if self._heartbeat.step < step:
            self._heartbeat.save_at = step
            if self._heartbeat.step < step or self._last_due == step:
                return True
        owner = self._supervisor.owner
        self._levers.give_up(Attempt(owner.epoch, step, owner.nonce))
        return False

    def _await_answer(self, call: FaultCall, ahead: int, patience_s: float) -> bool:
        """Until this step, or one that was called for later, is saved."""
        end, tried = time.monotonic() + patience_s, list[Save]()
        while time.monotonic() < end and not self._stopped:
            with self._answered:
                found = [save for step, save in self._answers.items() if step >= ahead and save not in tried]
                if not found:
                    self._answered.wait(min(1.0, max(0.0, end - time.monotonic())))
                    continue
            tried.append(found[0])
            if self._follow_save(call, found[0]):
                return True
        return False

    def _follow_save(self, call: FaultCall, save: Save) -> bool:
        """Until it is as safe as it gets; False if it failed, perhaps since another rank had passed that step."""
        saved: list[SavedStep] = []
        try:
            save.staged(call.left_s)
            saved.append(SavedStep(save.step, "memory", "agreed", call.passed_s))
            for tier in save.tiers:
                save.committed(call.left_s, tier=tier)
                saved.append(SavedStep(save.step, tier, "agreed", call.passed_s))
        except CheckpointError as error:
            log.info("step %d was not saved out of turn: %s", save.step, error)
            return False
        call.fault.saved += saved
        call.fault.timings["durable_s"] = call.passed_s
        return True

    def _call_round(self, call: FaultCall, step: int) -> Round | None:
        """Tell the other ranks; None if they cannot be told in time."""
        if self._save_rounds is None:
            return None
        found: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        save_rounds = self._save_rounds

        def post() -> None:
            try:
                found.put(save_rounds.call(step, call.fault.kind, call.fault.summary[:200], call.left_s))
            except PeerError as error:
                log.warning("%s", error)
                found.put(None)

        threading.Thread(target=post, name="ckpt-round", daemon=True).start()
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=ROUND_S)
        return None

    def _on_round(self, heard: Round) -> None:
        """Another rank has called; in the thread that heard it. What is quick is done at once."""
        log.info("rank %d asks for a save: %s", heard.rank, heard.why)
        if heard.step < 0:
            self._calls.put(lambda: self._follow_ring(heard))
        elif self._can_save and not self._set_step(heard.step):
            self._calls.put(lambda: self._follow_later(heard))

    def _follow_ring(self, heard: Round) -> None:
        """Somebody cannot come: make durable what is in memory."""
        if self._can_save:
            if self._levers.in_memory(COPYING_S) != self._heartbeat.step:
                self._levers.copy_live()
            self._persist(self._new_call(heard.kind, heard.why, how=f"rank {heard.rank}", grace_s=heard.grace_s))

    def _follow_later(self, heard: Round) -> None:
        """We were past that step: call for a later one."""
        self._agree(self._new_call(heard.kind, heard.why, how=f"rank {heard.rank}", grace_s=heard.grace_s))

    def _persist(self, call: FaultCall) -> None:
        """Have the writer make durable what is in memory."""
        before_s = call.passed_s
        self._note_memory(call)
        deadline_s = min(call.left_s, PERSIST_S)
        try:
            with self._supervisor.holding_still(alone=self._world.size == 1) as attempts:
                request = Persist(deadline_s, call.far, [str(attempt) for attempt in attempts])
                saved = self._supervisor.client.ask(request, deadline_s + 1.0)
        except CheckpointError as error:
            log.warning("what is in memory is not durable: %s", error)
            return
        for one in saved:
            call.fault.saved.append(SavedStep(one.step, one.tier, "ring", before_s + one.seconds, one.error))
        call.fault.timings["durable_s"] = call.passed_s

    def _note_memory(self, call: FaultCall) -> None:
        known = {saved.step for saved in call.fault.saved if saved.tier == "memory"}
        steps = sorted((attempt.step for attempt in self._supervisor.sealed()), reverse=True)
        wanted = steps[:1] if self._world.size == 1 else steps  # of several ranks the newest may not be common
        call.fault.saved += [SavedStep(s, "memory", "ring", call.passed_s) for s in wanted if s not in known]

    def _relieve(self, key: str, rank: int) -> None:
        """We may hold what a dead rank was about to copy."""
        if self._can_save:
            with contextlib.suppress(CheckpointError):
                if whole := self._supervisor.relieve(key, self._levers.fill_in):
                    log.warning("attempt %s of rank %d is whole in memory: its replicas here were copied", whole, rank)

    # -- hangs --

    def _look_around(self, call: FaultCall, note: notes.HangNote) -> None:
        """What every rank that can be reached does, and whom they wait for."""
        found = dict[int, Evidence]()
        try:
            for data in self._supervisor.client.ask(AskEvidence(), EVIDENCE_S):
                one = Evidence.from_json(data)
                found[one.rank] = one
        except (CheckpointError, ValueError, KeyError) as error:
            log.warning("the ranks of this node cannot be looked at: %s", error)
        rank = self._world.rank
        if rank in found:
            frames = probe.own_stack(threading.main_thread().ident or 0)
            found[rank] = Evidence.from_json(
                {
                    **found[rank].to_json(),
                    "stack": list(frames),
                    "collective": probe.collective_of(frames),
                }
            )
        if max(self._world.nodes) > 0:
            found |= self._ask_nodes(found)
        what = f"no step for {note.idle_s:.1f} s, where {note.usual_s:.2f} s are usual"
        note_evidence(call.fault, list(found.values()), what)
        call.fault.timings |= note.timings
        if next((t.action for t in self._triggers if isinstance(t, OnHang)), "") == "exit":
            self._leaving = True
            call.leave = REPLACE_CODE if call.fault.suspects == [rank] and self._world.size > 1 else RETRY_CODE
            call.fault.advice = "replace" if call.leave == REPLACE_CODE else "retry"

    def _ask_nodes(self, here: dict[int, Evidence]) -> dict[int, Evidence]:
        """What other nodes found out; each rank that can posts all that its node knows."""
        found: dict[int, Evidence] = {}
        step = self._heartbeat.step
        try:
            mailbox = self._world.mailbox()
            mailbox.put(f"hang/{step}/{self._world.rank}", [one.to_json() for one in here.values()])
            end = time.monotonic() + NODES_S
            missing = set(range(self._world.size)) - here.keys()
            while missing and time.monotonic() < end:
                for key in [f"hang/{s}/{r}" for r in sorted(missing) for s in (step, step - 1, step + 1)]:
                    if mailbox.poll([key]):
                        for data in mailbox.wait([key], 1.0)[0]:
                            one = Evidence.from_json(data)
                            found[one.rank] = one
                missing -= found.keys()
                time.sleep(0.05)
        except (CheckpointError, ValueError, TypeError) as error:
            log.info("other nodes do not say what their ranks do: %s", error)
        return {rank: one for rank, one in found.items() if rank not in here}

    # -- the end of it --

    def _close_case(self, call: FaultCall, *, ends: bool) -> None:
        """Record, tell, and be ready to leave."""
        fault = call.fault
        if call.leave is not None:
            if call.signal and not self._ours(call.signal):
                call.leave = None  # a handler that came later decides
            if call.note is not None and self._heartbeat.read().calls != call.note.evidence["calls"]:
                call.leave = None  # it has come to itself
            self._leaving = ends = call.leave is not None  # else its death, should that come, is news
            fault.exit_code = call.leave
        fault.timings["total_s"] = call.passed_s
        log.warning("%s", fault.line)
        with contextlib.suppress(CheckpointError):
            self._supervisor.client.ask(Report(fault.to_json(), ends), REPORT_S)
        if ends:
            tell_launcher(fault, fault.stacks.get(str(fault.rank), ()))
        self._call_hook(fault)

    def _ours(self, number: int) -> bool:
        trigger = self._signals[signal.Signals(number)]
        return bool(trigger.leave) or self._wakeup.would_end(number)

    def _call_hook(self, fault: Fault) -> None:
        publish("fault", max(fault.steps.values(), default=None), fault=fault.kind, account=fault.line)
        if self._on_fault is not None:
            try:
                self._on_fault(fault)
            except Exception:
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
