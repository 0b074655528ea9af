"""The guard in the writer process: reports the trainer's death, and faults detected while the trainer lives. Faults
of a live trainer are sent to its fault handler; if it does not respond, the writer handles them.

The writer first saves, then records the fault, and only then acts. It also queries other writers on the node for the
activity of their trainers, so that the report of a hang names the rank that the others wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from ckpt.core.cadence.ledger import SeenFault
from ckpt.core.ipc import channel, messages
from ckpt.core.ipc.messages import FaultNote, Look, Report
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Background, Caller, HeldRun, PresentTrainer, handles
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import CheckpointError, UsageError
from ckpt.events import log
from ckpt.guard.hang import Evidence, note_evidence
from ckpt.guard.report import Fault, SavedStep
from ckpt.guard.watchdog import Stall, Watchdog
from ckpt.triggers import RETRY_CODE
from ckpt.units import duration

SAVE_S = 10.0  # seconds for memory to become durable before a hung trainer is killed
ASK_S = 2.0  # seconds for another writer of this node to reply
TOLD_S = 20.0  # seconds for memory to become durable before a death is reported
ECHO_S = 0.5  # seconds after a crash in which the writer still reads faulthandler's output
MAX_FAULTS = 16
AWAKE_S = 0.25  # seconds for the trainer to handle a signal that the writer has detected
HEARD_S = 1.0  # seconds for the fault handler to respond to a hang
GOING_S = 20.0  # seconds for a hung trainer to exit after its fault handler has responded


@dataclass(eq=False)
class FaultReporter:
    """The `TrainerWatch` of a writer, in its event loop. `faults`: faults not yet sent to a trainer. `seen`: number of
    faults, not counting requested saves. `last`: the last fault."""

    key: str
    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    saver: WriterSaver
    books: Bookkeeper
    background: Background
    faults: list[Fault] = field(default_factory=list)
    seen: int = 0
    last: Fault | None = None
    watchdog: Watchdog | None = None

    def open(self, watchdog: Watchdog, kind: str, **fields: Any) -> Fault:
        """Return a new report with the current time."""
        owner = self.run.owner
        beat = watchdog.heartbeat.read()
        fault = Fault(kind, "", by="writer", rank=watchdog.rank, world=watchdog.world, pid=watchdog.pid, **fields)
        fault.term = "" if owner is None else f"{owner.term}.{owner.nonce}"
        if beat.step >= 0:
            fault.steps[str(watchdog.rank)] = beat.step
        return fault

    async def keep(self, fault: Fault, *, untold: bool = True) -> None:
        """Log the fault, and write its report into the nearest tier only, because readers do not check other tiers.
        `untold`: True if the report must also be sent to the next trainer."""
        log.warning("%s", fault.line)
        self.books.fault(fault.pid, _seen(fault))
        if not fault.asked:
            self.seen, self.last = self.seen + 1, fault
        if untold:
            self.faults = [*self.faults, fault][-MAX_FAULTS:]
        for tier in self.run.tiers[:1]:
            try:
                await tier.prepare()
                await tier.log.store.put(fault.key, fault.to_bytes(), create=True)
            except CheckpointError as error:
                log.warning("could not write the report of this fault: %s", error)

    def in_memory(self, fault: Fault, seconds: float) -> None:
        """Add the steps in memory to the report, because a restart will find them there."""
        steps = {label.checkpoint.step for _, _, label in self.held_memory.ring() if label.checkpoint is not None}
        fault.saved += [SavedStep(step, "memory", "ring", seconds) for step in sorted(steps, reverse=True)]

    async def save(self, fault: Fault, began: float, deadline_s: float, *, far: bool = False) -> None:
        """Make memory durable, and add the result to the report."""
        self.in_memory(fault, time.monotonic() - began)
        before = time.monotonic() - began
        for write in await self.saver.persist(deadline_s, far=far):
            saved = SavedStep(write.step, write.tier, "ring", before + write.seconds, write.error)
            fault.saved.append(saved)
        fault.timings["durable_s"] = time.monotonic() - began

    # -- deaths, and the next trainer --

    def died(self, drained: asyncio.Event) -> None:
        watchdog = self.watchdog
        if watchdog is None:
            return
        if not self.trainer.announced:
            fault = self.death(watchdog)
            self.faults.append(fault)  # so the next job attempt receives it, however soon it starts
            self.background.spawn(self._record_death(fault, watchdog, drained))
        self.background.loop.call_later(ECHO_S, watchdog.stop)

    def hand_over(self) -> list[messages.Json]:
        found, self.faults = [fault.to_json() for fault in self.faults], []
        self.stop()
        return found

    async def _record_death(self, fault: Fault, watchdog: Watchdog, drained: asyncio.Event) -> None:
        """Record a death. Wait until memory is durable or another process adopts it, but at most `TOLD_S`."""
        began = time.monotonic()
        await self.tell_siblings(fault)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drained.wait(), TOLD_S)
        for step, url in self.saver.durable():
            fault.saved.append(SavedStep(step, url, "ring", time.monotonic() - began))
        fault.timings["durable_s"] = time.monotonic() - began
        if watchdog.crash:
            fault.stacks[str(watchdog.rank)] = watchdog.crash.splitlines()
        await self.keep(fault, untold=False)

    def death(self, watchdog: Watchdog) -> Fault:
        """Return the report of a death that the trainer did not announce. Durable steps are added later."""
        how, what = watchdog.cause()
        fault = self.open(watchdog, "oom" if "OOM" in what else "death", how=how)
        beat = watchdog.heartbeat.read()
        where = f"after step {beat.step}" if beat.step >= 0 else "before its first step"
        fault.summary = f"rank {watchdog.rank} on {fault.host} {_verb(what)} {where}, while {beat.doing}"
        self.in_memory(fault, 0.0)
        return fault

    async def tell_siblings(self, fault: Fault) -> None:
        """Send the fault to the writers of the other ranks of this node."""
        about = Report(fault.to_json(), peer=True)
        asked = [asyncio.to_thread(channel.ask_once, key, about, ASK_S) for key in self._others()]
        await asyncio.gather(*asked, return_exceptions=True)

    def _others(self) -> list[str]:
        return [key for key in channel.siblings(self.key).values() if key != self.key]

    # -- hangs --

    async def evidence(self, own: Evidence | None = None, *, node: bool) -> list[Evidence]:
        """Return the trainer's activity, or an empty list if the trainer is not watched. `node`: also collect the
        evidence of the other ranks of this node. `own`: evidence that is known already."""
        if self.watchdog is None:
            return []
        others = self._others() if node else []
        asked = [asyncio.to_thread(channel.ask_once, key, Look("own"), ASK_S) for key in others]
        replies = asyncio.gather(*asked, return_exceptions=True)
        found = [await self.watchdog.sample() if own is None else own]
        for reply in await replies:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if isinstance(reply, dict):  # otherwise the other writer is gone, or refuses the request
                    found += map(Evidence.from_json, reply["evidence"])
        return found

    async def hang(self, watchdog: Watchdog, stall: Stall) -> None:
        """Handle a hang of a trainer that does not respond: save, record, and kill the trainer if configured."""
        began = time.monotonic()
        fault = self.open(watchdog, "hang", how="step counter")
        note_evidence(fault, await self.evidence(stall.evidence, node=True), stall_text(stall))
        fault.timings |= stall.timings
        await self.save(fault, began, SAVE_S)
        leave = watchdog.hang is not None and watchdog.hang.action == "exit"
        fault.exit_code = 128 + signal.SIGKILL if leave else None
        await self.keep(fault)
        if leave and watchdog.heartbeat.read().calls == stall.evidence.calls:  # no step has ended since the detection
            end(watchdog, "it hangs")

    def signal(self, watchdog: Watchdog, number: int) -> Fault:
        """Return the report of a signal that the trainer has not handled."""
        fault = self.open(watchdog, "signal", how="wakeup descriptor", advice="resubmit")
        name = signal.Signals(number).name
        fault.summary = f"{name} arrived at rank {watchdog.rank} on {fault.host}, whose interpreter is blocked"
        return fault

    async def held_up(self, fault: Fault, watchdog: Watchdog, began: float) -> None:
        """Save and record a signal for a trainer that cannot handle it because another thread holds the GIL."""
        await self.save(fault, began, SAVE_S, far=True)
        fault.stacks[str(watchdog.rank)] = list(await watchdog.stack())
        await self.keep(fault)

    # -- the live trainer --

    @handles(messages.Arm)
    def arm(self, request: messages.Arm, caller: Caller) -> None:
        self.stop()
        self.watchdog = Watchdog(self.trainer, request, caller.fds, self._on_signals, self._on_stall)

    def stop(self) -> None:
        """Stop watching the trainer."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    async def _notify_trainer(self, watchdog: Watchdog, note: FaultNote, within_s: float) -> bool:
        """Send a note to the fault handler. Return True if it responds within `within_s` seconds."""
        handled, end = watchdog.heartbeat.handled, time.monotonic() + within_s
        self.trainer.tell(note)
        while time.monotonic() < end and watchdog.heartbeat.fd >= 0:
            if watchdog.heartbeat.handled != handled:
                return True
            await asyncio.sleep(0.01)
        return False

    # -- what the watchdog detects --

    def _on_signals(self, numbers: list[int], raw: bytes) -> None:
        self.background.spawn(self._signals(numbers, list(raw)))

    async def _signals(self, numbers: list[int], raw: list[int]) -> None:
        """Handle signals that the fault handler has not read, because it is late or the GIL is held."""
        watchdog, began = self.watchdog, time.monotonic()
        if not numbers or watchdog is None or self.trainer.dead:
            self.trainer.tell(FaultNote("signal", raw=raw))
            return
        faults = [self.signal(watchdog, number) for number in numbers]
        if not await self._notify_trainer(watchdog, FaultNote("signal", raw=raw, numbers=numbers), AWAKE_S):
            for fault in faults:
                await self.held_up(fault, watchdog, began)

    def _on_stall(self, stall: Stall) -> None:
        self.background.spawn(self._stall(stall))

    async def _stall(self, stall: Stall) -> None:
        """Send a hang to the fault handler, which knows more about it. If it does not respond, handle the hang here."""
        watchdog = self.watchdog
        if watchdog is None or self.trainer.dead:
            return
        hang = messages.Hang(stall.idle_s, stall.limit_s, stall.usual_s, stall.timings, stall.evidence.to_json())
        if not await self._notify_trainer(watchdog, FaultNote("hang", hang=hang), HEARD_S):
            await self.hang(watchdog, stall)
        elif watchdog.hang is not None and watchdog.hang.action == "exit":
            await asyncio.sleep(GOING_S)
            present = self.watchdog is watchdog and not self.trainer.dead
            if present and watchdog.heartbeat.read().calls == stall.evidence.calls:
                end(watchdog, "it hangs and did not exit")

    # -- requests --

    @handles(Report)
    async def report(self, request: Report) -> str:
        fault = Fault.from_json(request.fault)
        if request.peer:
            seen = SeenFault(time.monotonic(), "death", fault.summary[:500], fault.rank, ends=True, by="writer")
            self.books.fault(self.trainer.pid, seen)
            self.trainer.tell(FaultNote("peer", fault.summary, fault.rank))
            return fault.key
        if request.ends:
            self.trainer.announced = True
        await self.keep(fault, untold=False)
        return fault.key

    @handles(messages.TriggerSave)
    def trigger_save(self, request: messages.TriggerSave) -> messages.TriggerSaveReply:
        if self.trainer.dead or self.trainer.channel is None or self.watchdog is None:
            lives = self.trainer.state() == "alive"
            why = "is still starting, or has no triggers" if lives else "is not running"
            raise UsageError(f"the trainer of this run {why}: nothing to save")
        self.trainer.tell(FaultNote("trigger", request.why[:200]))
        beat = self.watchdog.heartbeat.read()
        return messages.TriggerSaveReply(self.trainer.pid, self.watchdog.rank, beat.step, beat.doing)


def _seen(fault: Fault) -> SeenFault:
    """Return the fault in the form in which the run metrics store it."""
    at = time.monotonic() - max(0.0, time.time() - fault.when)
    step = max(fault.steps.values(), default=-1)
    ends = fault.exit_code is not None or (fault.by == "writer" and fault.kind in ("death", "oom"))
    return SeenFault(at, fault.kind, fault.summary[:500], fault.rank, step, ends, fault.by)


def _verb(what: str) -> str:
    return what if what.startswith("was killed") else f"crashed ({what})"


def stall_text(stall: Stall) -> str:
    return f"no step for {duration(stall.idle_s)}, usually {duration(stall.usual_s)}"


def end(watchdog: Watchdog, why: str) -> None:
    """Kill the trainer, so that the launcher need not wait for it. SIGKILL ends stopped processes too."""
    log.warning("killed rank %d (%s); its exit code would have been %d", watchdog.rank, why, RETRY_CODE)
    with contextlib.suppress(OSError):
        if watchdog.process.alive:  # otherwise another process may have its process id
            os.kill(watchdog.pid, signal.SIGKILL)
