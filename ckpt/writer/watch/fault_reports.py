"""What the writer says about faults: of its trainer's death, and of whatever the trainer cannot deal with itself.

The order is: save, record, and only then act. Other writers on the node are asked what their trainers do, so that the
account of a hang names the rank that the others wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.faults.hang import Evidence, note_evidence
from ckpt.faults.report import Fault, SavedStep
from ckpt.ipc import channel
from ckpt.ipc.watch_requests import PeerDied, Sample
from ckpt.triggers import RETRY_CODE
from ckpt.writer.held_run import HeldRun
from ckpt.writer.memory.held_memory import HeldMemory
from ckpt.writer.tiers.drain import Drain
from ckpt.writer.watch.watchdog import Stall, Watchdog

SAVE_S = 10.0  # for what is in memory to become durable, before a hung trainer is ended
ASK_S = 2.0  # for another writer of this node to answer
MAX_FAULTS = 16


@dataclass(eq=False)
class FaultReporter:
    """The accounts of one writer. `on_kept`: called with each; `faults`: those that no trainer has been told yet."""

    key: str
    run: HeldRun
    held_memory: HeldMemory
    drain: Drain
    on_kept: Callable[[Fault], None]
    faults: list[Fault] = field(default_factory=list)

    def open(self, watchdog: Watchdog, kind: str, **fields: Any) -> Fault:
        """An account, begun now."""
        owner = self.run.owner
        beat = watchdog.heartbeat.read()
        fault = Fault(kind, "", by="writer", rank=watchdog.rank, world=watchdog.world, pid=watchdog.pid, **fields)
        fault.attempt = "" if owner is None else f"{owner.epoch}.{owner.nonce}"
        if beat.step >= 0:
            fault.steps[str(watchdog.rank)] = beat.step
        return fault

    async def keep(self, fault: Fault, *, untold: bool = True) -> None:
        """Say it, and write it into the nearest tier; another location is not tried, since nobody would look there."""
        log.warning("%s", fault.line)
        self.on_kept(fault)
        if untold:
            self.faults = [*self.faults, fault][-MAX_FAULTS:]
        for tier in self.run.tiers[:1]:
            try:
                await tier.prepare()
                await tier.log.store.put(fault.key, fault.to_bytes(), create=True)
            except CheckpointError as error:
                log.warning("the report of this fault could not be written: %s", error)

    def in_memory(self, fault: Fault, seconds: float) -> None:
        """What a restart finds here."""
        steps = {label.attempt.step for _, _, label in self.held_memory.ring() if label.attempt is not None}
        fault.saved += [SavedStep(step, "memory", "ring", seconds) for step in sorted(steps, reverse=True)]

    async def save(self, fault: Fault, began: float, deadline_s: float, *, far: bool = False) -> None:
        """Make what is in memory durable, and note what became of it."""
        self.in_memory(fault, time.monotonic() - began)
        before = time.monotonic() - began
        for one in await self.drain.persist(deadline_s, far=far):
            saved = SavedStep(one.step, one.tier, "ring", before + one.seconds, one.error)
            fault.saved.append(saved)
        fault.timings["durable_s"] = time.monotonic() - began

    # -- deaths --

    def death(self, watchdog: Watchdog) -> Fault:
        """The account of a death that nobody had announced; what is durable is added later."""
        how, what = watchdog.cause()
        fault = self.open(watchdog, "oom" if "OOM" in what else "death", how=how)
        beat = watchdog.heartbeat.read()
        where = f"after step {beat.step}" if beat.step >= 0 else "before its first step"
        fault.summary = f"rank {watchdog.rank} on {fault.host} {_verb(what)} {where}, while {beat.doing}"
        self.in_memory(fault, 0.0)
        return fault

    async def tell_siblings(self, fault: Fault) -> None:
        """The other ranks of this node need not find out by themselves."""
        about = PeerDied(fault.rank, fault.summary)
        asked = [asyncio.to_thread(channel.ask_once, key, about, ASK_S) for key in self._others()]
        await asyncio.gather(*asked, return_exceptions=True)

    def _others(self) -> list[str]:
        return [key for key in channel.siblings(self.key).values() if key != self.key]

    # -- hangs --

    async def evidence(self, watchdog: Watchdog, own: Evidence | None = None) -> list[Evidence]:
        """Of every rank on this node."""
        asked = [asyncio.to_thread(channel.ask_once, key, Sample(), ASK_S) for key in self._others()]
        replies = asyncio.gather(*asked, return_exceptions=True)
        found = [await watchdog.sample() if own is None else own]
        for reply in await replies:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if isinstance(reply, dict):  # else it is gone, refuses, or watches nobody
                    found.append(Evidence.from_json(reply))
        return found

    async def hang(self, watchdog: Watchdog, stall: Stall) -> None:
        """The trainer does not answer: save, record, and end it if that was asked for."""
        began = time.monotonic()
        fault = self.open(watchdog, "hang", how="step counter")
        note_evidence(fault, await self.evidence(watchdog, stall.evidence), stall_text(stall))
        fault.timings |= stall.timings
        await self.save(fault, began, SAVE_S)
        leave = watchdog.hang is not None and watchdog.hang.action == "exit"
        fault.exit_code = 128 + signal.SIGKILL if leave else None
        await self.keep(fault)
        if leave and watchdog.heartbeat.read().calls == stall.evidence.calls:  # else it has come to itself meanwhile
            end(watchdog, "it hangs")

    def signal(self, watchdog: Watchdog, number: int) -> Fault:
        """A signal that the trainer has not taken, as of now."""
        fault = self.open(watchdog, "signal", how="wakeup descriptor", advice="resubmit")
        name = signal.Signals(number).name
        fault.summary = f"{name} came to rank {watchdog.rank} on {fault.host}, whose interpreter is held up"
        return fault

    async def held_up(self, fault: Fault, watchdog: Watchdog, began: float) -> None:
        """Nor can it: something holds the interpreter's lock."""
        await self.save(fault, began, SAVE_S, far=True)
        fault.stacks[str(watchdog.rank)] = list(await watchdog.stack())
        await self.keep(fault)


def _verb(what: str) -> str:
    return what if what.startswith(("died", "killed")) else f"crashed ({what})"


def stall_text(stall: Stall) -> str:
    return f"no step for {stall.idle_s:.1f} s, where {stall.usual_s:.2f} s are usual"


def end(watchdog: Watchdog, why: str) -> None:
    """By SIGKILL, which a stopped process does not outlive either, so that the launcher need not wait for it."""
    log.warning("rank %d is ended (%s); exit code %d would have been its own", watchdog.rank, why, RETRY_CODE)
    with contextlib.suppress(OSError):
        if watchdog.process.alive:  # else another may have its number
            os.kill(watchdog.pid, signal.SIGKILL)
