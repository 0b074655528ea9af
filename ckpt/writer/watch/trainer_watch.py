"""What happens when the writer sees something at its trainer: the fault handler there is told, and if it does not
answer the writer deals with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.errors import UsageError
from ckpt.faults.memory_pressure import MemoryRoom
from ckpt.faults.report import Fault
from ckpt.ipc import notes, requests
from ckpt.ipc import watch_requests as watch
from ckpt.ipc.protocol import Note
from ckpt.writer.background import Background
from ckpt.writer.dispatch import Caller, handles, handles_caller
from ckpt.writer.present_trainer import PresentTrainer
from ckpt.writer.watch.fault_reports import FaultReporter, end
from ckpt.writer.watch.observers import Observers
from ckpt.writer.watch.watchdog import Stall, Watchdog, WatchdogCalls

AWAKE_S = 0.25  # for it to take a signal that the writer has seen
HEARD_S = 1.0  # for its fault handler to answer
GOING_S = 20.0  # for it to leave, once it said that it would


@dataclass(eq=False)
class TrainerWatch:
    """Everything runs in the writer's event loop. `on_crash`: called when the trainer is seen to crash; with a large
    process or a core dump its death takes a while."""

    trainer: PresentTrainer
    reporter: FaultReporter
    observers: Observers
    background: Background
    on_crash: Callable[[], None]
    watchdog: Watchdog | None = None
    _heard: asyncio.Event = field(default_factory=asyncio.Event)  # the fault handler deals with what it was told last

    @handles_caller(watch.Arm)
    def arm(self, request: watch.Arm, caller: Caller) -> None:
        self.stop()
        calls = WatchdogCalls(lambda text: self.on_crash(), self._on_signals, self._on_stall, self._on_pressure)
        self.watchdog = Watchdog(self.trainer.pid, request, caller.fds, calls)

    def stop(self) -> None:
        """Watch nobody."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    @handles(watch.Heard)
    def heard(self, request: watch.Heard) -> None:
        self._heard.set()

    async def _hears(self, note: Note, within_s: float) -> bool:
        """Tell the fault handler; whether it answers."""
        self._heard.clear()
        self.trainer.tell(note)
        try:
            await asyncio.wait_for(self._heard.wait(), within_s)
        except TimeoutError:
            return False
        return True

    # -- what is seen --

    def _on_signals(self, numbers: list[int], raw: bytes) -> None:
        self.trainer.tell(notes.PassedNote(list(raw)))  # others may wait for them too
        for number in numbers:
            self.background.spawn(self._signal(number))

    async def _signal(self, number: int) -> None:
        """The fault handler has not taken it: perhaps it is only late; else something holds the interpreter's lock."""
        watchdog, began = self.watchdog, time.monotonic()
        if watchdog is None or self.trainer.dead:
            return
        fault = self.reporter.signal(watchdog, number)
        if not await self._hears(notes.SignalNote(number), AWAKE_S):
            await self.reporter.held_up(fault, watchdog, began)

    def _on_stall(self, stall: Stall) -> None:
        self.background.spawn(self._stall(stall))

    async def _stall(self, stall: Stall) -> None:
        """The fault handler knows more, and can copy what runs. If it does not answer, it is up to us."""
        watchdog = self.watchdog
        if watchdog is None or self.trainer.dead:
            return
        evidence = stall.evidence.to_json()
        note = notes.HangNote(stall.idle_s, stall.limit_s, stall.usual_s, stall.timings, evidence)
        if not await self._hears(note, HEARD_S):
            await self.reporter.hang(watchdog, stall)
        elif watchdog.hang is not None and watchdog.hang.action == "exit":
            await asyncio.sleep(GOING_S)
            present = self.watchdog is watchdog and not self.trainer.dead
            if present and watchdog.heartbeat.read().calls == stall.evidence.calls:
                end(watchdog, "it hangs, and did not leave")

    def _on_pressure(self, room: MemoryRoom, why: str) -> None:
        self.trainer.tell(notes.PressureNote(room.available, room.total, why))

    # -- what is asked --

    @handles(watch.Report)
    async def report(self, request: watch.Report) -> str:
        fault = Fault.from_json(request.fault)
        if request.ends:
            self.trainer.announced = True
        await self.reporter.keep(fault, untold=False)
        return fault.key

    @handles(watch.Sample)
    async def sample(self, request: watch.Sample) -> requests.Json | None:
        return None if self.watchdog is None else (await self.watchdog.sample()).to_json()

    @handles(watch.AskEvidence)
    async def evidence(self, request: watch.AskEvidence) -> list[requests.Json]:
        found = [] if self.watchdog is None else await self.reporter.evidence(self.watchdog)
        return [one.to_json() for one in found]

    @handles(watch.PeerDied)
    def peer_died(self, request: watch.PeerDied) -> None:
        self.observers.books.peer(request.rank, request.summary)
        self.trainer.tell(notes.PeerDiedNote(request.rank, request.summary))

    @handles(watch.TriggerSave)
    def trigger_save(self, request: watch.TriggerSave) -> watch.TriggerSaveReply:
        if self.trainer.dead or self.trainer.channel is None or self.watchdog is None:
            raise UsageError("the trainer of this run does not live, or takes no triggers: nothing to save")
        self.trainer.tell(notes.TriggerNote(request.why[:200]))
        beat = self.watchdog.heartbeat.read()
        return watch.TriggerSaveReply(self.trainer.pid, self.watchdog.rank, beat.step, beat.doing)
