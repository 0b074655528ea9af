"""Receives faults from signals, preemption notices, and the writer's notes.

One thread receives them and never blocks. It queues a `FaultCall` for the thread that handles faults.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from typing import ClassVar

from ckpt.core.ipc.messages import Arm, FaultNote
from ckpt.guard import preemption, probe
from ckpt.guard.incidents import SOFT_S, Incidents
from ckpt.guard.signals import Wakeup
from ckpt.triggers import RESUBMIT_CODE, OnDeadline, OnHang, OnMemoryPressure, OnPreemption, OnSignal, Trigger

# SIGUSR1 and SIGUSR2 are not in this list, because the training continues after they request a save.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGQUIT, signal.SIGINT)
LAST_S = 20.0  # seconds before a preemption at which the state is saved a second time


class CrashOutput:
    """Sends faulthandler's crash output to the writer. If the output would have gone to stderr (`echo`), the writer
    copies it to stderr. If a process has several instances, the writer of the last open instance gets the output."""

    _open: ClassVar[list[CrashOutput]] = []

    def __init__(self) -> None:
        self.echo = False
        self._pipe: tuple[int, int] | None = None

    def enable(self) -> int:
        """Redirect crash output to a pipe. Return the descriptor from which the writer reads it."""
        self.echo = self._open[-1].echo if self._open else faulthandler.is_enabled()
        reader, writer = self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)  # a crashing process must not wait until the pipe is read
        self._open.append(self)
        self._direct(writer)
        return reader

    @staticmethod
    def _direct(writer: int) -> None:
        faulthandler.enable(file=writer, all_threads=True)
        faulthandler.register(probe.DUMP_SIGNAL, file=writer, all_threads=True)

    def disable(self) -> None:
        if self._pipe is None:
            return
        self._open.remove(self)
        if self._open and self._open[-1]._pipe is not None:
            self._direct(self._open[-1]._pipe[1])
        else:
            self._put_back()
        for fd in self._pipe:
            os.close(fd)
        self._pipe = None

    def _put_back(self) -> None:
        faulthandler.unregister(probe.DUMP_SIGNAL)
        # By default, DUMP_SIGNAL would end the process, and the writer may just have sent one.
        with contextlib.suppress(ValueError):
            signal.signal(probe.DUMP_SIGNAL, signal.SIG_IGN)
        faulthandler.disable()
        if self.echo:
            for stream in (sys.stderr, sys.__stderr__):
                with contextlib.suppress(Exception):  # sys.stderr may have no descriptor
                    faulthandler.enable(file=stream or 2)
                    break


class Perception:
    """Receives the faults of a trainer. Call `arm` and `put_back` from the main thread."""

    def __init__(self, triggers: tuple[Trigger, ...], incidents: Incidents) -> None:
        self._triggers, self._incidents, self._supervisor = triggers, incidents, incidents.supervisor
        self._signals = {number: t for t in triggers if isinstance(t, OnSignal) for number in t.numbers}
        self.wakeup = Wakeup(self._signals)
        self._stop_reader, self._stop_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._crash_output = CrashOutput()
        self._again: list[preemption.Notice] = []  # preemptions before which the state is saved a second time
        self.notices = preemption.NoticeWatch(
            [t for t in triggers if isinstance(t, (OnPreemption, OnDeadline))], self._on_notice
        )

    def arm(self) -> None:
        self.wakeup.arm()
        crash = self._crash_output.enable()
        hang = next((t for t in self._triggers if isinstance(t, OnHang)), None)
        pressure = next((t for t in self._triggers if isinstance(t, OnMemoryPressure)), None)
        request = Arm(
            rank=self._incidents.world.rank,
            world=self._incidents.world.size,
            signals=[int(number) for number in self._signals],
            hang=None if hang is None else (hang.action, hang.factor, hang.min_s),
            share=None if pressure is None else pressure.share,
            echo=self._crash_output.echo,
        )
        stderr = 2 if self._crash_output.echo else self._stop_reader  # without `echo` any open descriptor will do
        self._supervisor.tell(request, (self._incidents.heartbeat.fd, self.wakeup.reader.fileno(), crash, stderr))
        self._supervisor.hear(FaultNote, self._on_note)

    def stop(self) -> None:
        """Stop receiving faults. A signal that would end the process ends it once the handlers are restored."""
        self.wakeup.deaf = True
        self.notices.stop()
        with contextlib.suppress(OSError):
            os.write(self._stop_writer, b"x")

    def put_back(self) -> None:
        self.wakeup.put_back()
        self._crash_output.disable()

    def close(self) -> None:
        self.wakeup.close()
        for fd in (self._stop_reader, self._stop_writer):
            os.close(fd)

    def forget(self) -> None:
        """Stop in a forked child, because its signals are not the trainer's."""
        self.wakeup.forget()
        self._crash_output.disable()

    def decides(self, number: int) -> bool:
        """Return True if this signal ends the process unless we prevent it. Return False if a handler that was
        installed after ours decides."""
        trigger = self._signals[signal.Signals(number)]
        return bool(trigger.leave) or self.wakeup.would_end(number)

    # -- signals and notices --

    def receive(self) -> None:
        """Receive signals. Runs in its own thread until the handler stops."""
        while not self._incidents.stopped:
            self.wakeup.wait(self._stop_reader, None)
            for number in self.wakeup.read():
                self._on_signal(number, "wakeup descriptor")

    def _on_signal(self, number: int, how: str) -> None:
        trigger, incidents = self._signals.get(signal.Signals(number)), self._incidents
        if incidents.leaving and incidents.error is not None and self.wakeup.would_end(number):
            # An exception is propagating and the state is already safe, so the signal may end the process later.
            self.wakeup.miss(number)
        if trigger is None or incidents.leaving:
            return
        ends = trigger.leave
        if ends is None:
            ends = number in ENDING and self.wakeup.would_end(number)
        grace_s = trigger.grace_s if ends or number in ENDING else SOFT_S
        what = f"{signal.Signals(number).name} arrived at {incidents.me}"
        call = incidents.new("signal", what, how=how, grace_s=grace_s)
        call.signal, call.far = number, True
        if ends:
            incidents.leaving = True  # ignore further signals, because they cannot end the process sooner
            call.leave, call.fault.advice = 128 + number, "resubmit"
        else:
            call.fault.advice = "none"
        incidents.queue.put(call)

    def _on_notice(self, notice: preemption.Notice) -> None:
        left_s = SOFT_S if notice.at is None else max(1.0, notice.at - time.time())
        soft = notice.kind == "rebalance"
        if notice.kind == "preemption" and LAST_S < left_s < SOFT_S and notice not in self._again:
            self._again.append(notice)  # saves a second time shortly before the preemption
            later = threading.Timer(
                left_s - LAST_S, lambda: None if self._incidents.stopped else self._on_notice(notice)
            )
            later.daemon = True
            later.start()
        call = self._incidents.new(
            "preemption" if soft else notice.kind,
            f"{notice.what} ({self._incidents.me})",
            how="notice",
            grace_s=SOFT_S if soft else min(left_s, SOFT_S - 1),
        )
        call.far = True
        call.fault.advice = "replace" if notice.kind != "deadline" else "resubmit"
        if notice.kind == "deadline" and any(t.leave for t in self._triggers if isinstance(t, OnDeadline)):
            call.leave = RESUBMIT_CODE
        self._incidents.queue.put(call)

    # -- the writer --

    def _on_note(self, note: FaultNote) -> None:
        if note.kind == "trigger":
            self._incidents.request(f"requested by ckpt trigger: {note.why}", how="ckpt trigger")
        elif note.kind == "signal":
            self.wakeup.pass_on(bytes(note.raw))
            if note.numbers:
                self._incidents.heartbeat.handle()
            for number in note.numbers:
                self._on_signal(number, "writer")
        elif note.hang is not None:
            self._incidents.heartbeat.handle()
            if note.hang.evidence["state"] == "stopped":
                return  # the note arrived after the fault handler had stopped, and the writer has reported it already
            call = self._incidents.new("hang", "", how="step counter", grace_s=SOFT_S - 1)
            call.note = note.hang
            self._incidents.queue.put(call)
        elif note.kind == "memory":
            what = f"{self._incidents.me}: {note.why}"
            call = self._incidents.new("memory", what, how="memory", grace_s=SOFT_S)
            call.fault.advice = "none"
            self._incidents.queue.put(call)
