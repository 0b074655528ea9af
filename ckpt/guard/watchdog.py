"""Watches a trainer from its writer process, so that detection works when the trainer cannot run.

    the wakeup socket    signals that the trainer has not read within `LATE_S`, because the GIL is held
    a pipe               faulthandler's output, after a crash or when the writer has requested stacks
    the heartbeat        the current step, compared with the usual pace
    counters             kills by the kernel's OOM killer
    memory               a shortage of memory

Watching costs the trainer nothing. Only after too long a time without a step, the writer requests the trainer's stack
by a signal, which faulthandler handles without the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt.core.ipc.arena import MemoryRoom
from ckpt.core.ipc.heartbeat import Heartbeat, Process
from ckpt.core.ipc.messages import Arm, FaultNote
from ckpt.core.writer.held_run import PresentTrainer
from ckpt.events import log
from ckpt.guard import memory_pressure, probe
from ckpt.guard.hang import Evidence, still
from ckpt.guard.pace import StepPace
from ckpt.triggers import OnHang

LOOK_S = 0.5
LATE_S = 0.02  # seconds after which the writer handles a signal that the fault handler has not read
SAMPLES, BETWEEN_S = 3, 0.3
SURELY = 3.0  # a step that takes this multiple of the limit is a hang, even if the trainer looks busy
DUMP_S, QUIET_S = 1.0, 0.05
FATAL = "Fatal Python error"
MAX_TEXT = 1 << 20


@dataclass(frozen=True)
class Stall:
    """No step has ended for `idle_s` seconds, which is longer than `limit_s`."""

    idle_s: float
    limit_s: float
    usual_s: float
    evidence: Evidence

    @property
    def timings(self) -> dict[str, float]:
        """Return the timings for the report of the hang."""
        return {"idle_s": self.idle_s}


class Watchdog:
    """Watches one trainer. Create it in the event loop. `fds`: descriptors that the trainer sends with an `Arm`.

    `on_signals`: called in the loop with the signals that are triggers, and with all bytes that were read.
    `on_stall`: called when no step has ended for too long.
    """

    def __init__(
        self,
        trainer: PresentTrainer,
        request: Arm,
        fds: list[int],
        on_signals: Callable[[list[int], bytes], None],
        on_stall: Callable[[Stall], None],
    ) -> None:
        self._trainer, pid = trainer, trainer.pid
        self.process = Process.of(pid)
        self.pid, self.rank, self.world = pid, request.rank, request.world
        self.signals = request.signals
        self.hang = None if request.hang is None else OnHang(*request.hang)
        self._on_signals, self._on_stall, self._loop = on_signals, on_stall, asyncio.get_running_loop()
        self._text = ""
        self._crashed = trainer.crashed
        self._dumped = 0  # bytes of stack dumps that the trainer has written because the writer requested them
        self._changed = asyncio.Event()
        self._asking = asyncio.Lock()
        self._stopped = False
        self._stderr = fds[3]
        self._echo = request.echo
        self.heartbeat = Heartbeat.attach(fds[0])
        self._wakeup = socket.socket(fileno=fds[1])
        self._kills = memory_pressure.oom_kills(pid=pid)
        self._pressure: memory_pressure.PressureWatch | None = None
        if request.share is not None:
            self._pressure = memory_pressure.PressureWatch(request.share, self._on_pressure)
            self._pressure.start()
        self._pipe = fds[2]
        os.set_blocking(self._pipe, False)
        self._loop.add_reader(self._pipe, self._read_pipe)
        self._loop.add_reader(self._wakeup, self._on_readable)
        self._task = self._loop.create_task(self._look())

    def stop(self) -> None:
        """Stop calling the callbacks, and close the trainer's descriptors."""
        if self._stopped:
            return
        self._stopped = True
        self._task.cancel()
        if self._pressure is not None:
            self._pressure.stop()
        self._loop.remove_reader(self._wakeup)
        self._wakeup.close()
        self.heartbeat.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    # -- signals --

    def _on_readable(self) -> None:
        """Wait a moment for the fault handler to read the signals. Then handle the remaining signals in the writer."""
        self._loop.remove_reader(self._wakeup)
        self._loop.call_later(LATE_S, self._take_signals)

    def _take_signals(self) -> None:
        if self._stopped:
            return
        raw = b""
        try:
            raw = self._wakeup.recv(4096, socket.MSG_DONTWAIT)
            if not raw:
                return  # the trainer is gone
        except OSError:
            pass  # the fault handler has read the signals
        if raw:
            self._on_signals([n for n in dict.fromkeys(raw) if n in self.signals], raw)
        self._loop.add_reader(self._wakeup, self._on_readable)

    # -- crashes and stacks --

    def _read_pipe(self) -> None:
        """Read all available bytes from the pipe."""
        while self._pipe >= 0:
            try:
                raw = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            if raw:
                self._on_text(raw.decode("utf-8", "replace"))
            else:
                self._loop.remove_reader(self._pipe)
                os.close(self._pipe)
                self._pipe = -1

    def _on_text(self, text: str) -> None:
        self._dumped += len(text.encode())
        self._text = (self._text + text)[-MAX_TEXT:]
        self._changed.set()
        if FATAL in self._text and self._echo and self._stderr >= 0:
            with contextlib.suppress(OSError):
                os.write(self._stderr, text.encode())  # stderr, where faulthandler would have written it
        if "\n" in self.crash and not self._stopped:
            self._crashed.set()

    @property
    def crash(self) -> str:
        """Return faulthandler's output about a crash so far, or "" if there is none."""
        start = self._text.find(FATAL)
        return self._text[start:] if start >= 0 else ""

    async def sample(self) -> Evidence:
        """Inspect the trainer from outside, including the stack of its main thread."""
        async with self._asking:  # otherwise one sample would log the stacks that another has requested
            found = probe.sample(self.pid, self.rank, self.heartbeat.read(), ours=self._dumped)
            if found.state in ("stopped", "zombie", "gone"):
                return found
            stack = await self._stack()
            return replace(found, stack=stack, collective=probe.collective_of(stack))

    async def stack(self) -> tuple[str, ...]:
        """Return the stack of the trainer's main thread, innermost frame first. Return () if it does not respond."""
        async with self._asking:
            return await self._stack()

    async def _stack(self) -> tuple[str, ...]:
        self._text = self.crash
        start = len(self._text)
        if not self.process.alive:
            return ()
        try:
            os.kill(self.pid, probe.DUMP_SIGNAL)
        except OSError:
            return ()
        end = self._loop.time() + DUMP_S
        while self._loop.time() < end:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), QUIET_S)
            except TimeoutError:
                if len(self._text) > start:
                    break
        return probe.parse_dump(self._text[start:])

    # -- hangs --

    async def _look(self) -> None:
        pace, reported, patience = StepPace(self.hang or OnHang()), -1, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            beat, now = self.heartbeat.read(), time.monotonic()
            idle_s = pace.look(now, beat)
            if pace.usual_s is not None:
                self.heartbeat.usual_s = pace.usual_s
            if idle_s is None or self.hang is None:
                patience = 0.0
                continue
            limit_s = pace.limit_s or 0.0
            if beat.calls == reported or idle_s < patience:
                continue
            try:
                samples = await self._samples(beat.calls)
            except Exception as error:
                log.warning("cannot inspect the trainer: %r", error)
                continue
            if samples and (still(samples) or idle_s > SURELY * limit_s):
                reported = beat.calls
                self._on_stall(Stall(idle_s, limit_s, pace.usual_s or 0.0, samples[-1]))
            elif samples:
                patience = idle_s + limit_s / 2  # the trainer is slow but works: check again after half the limit

    async def _samples(self, calls: int) -> list[Evidence]:
        """Take several samples of the trainer while it is in the same step. Return [] if the step has ended."""
        samples: list[Evidence] = []
        for number in range(SAMPLES):
            if number:
                await asyncio.sleep(BETWEEN_S)
            if self.heartbeat.read().calls != calls:
                return []
            samples.append(await self.sample())
        return samples

    # -- memory --

    def _on_pressure(self, room: MemoryRoom, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._trainer.tell, FaultNote("memory", why))

    # -- after the death --

    def cause(self) -> tuple[str, str]:
        """Return how the trainer's death was detected, and its cause as text."""
        self._read_pipe()  # the pipe may have the output of a crash that has not been read yet
        if crash := self.crash:
            return "faulthandler", crash.partition("\n")[0].removeprefix(f"{FATAL}: ")
        if where := memory_pressure.oom_kills(pid="self", where=self._kills.where).since(self._kills):
            return "robust mutex", f"was killed, probably by the kernel's OOM killer (which was active in this {where})"
        return "robust mutex", "was killed (SIGKILL or os._exit)"
