"""Responds to queries about the trainer, with its status or metrics, from data that the writer has anyway.

Nothing is polled between queries, so only queries cost anything. The trainer's progress is in its heartbeat, which is
shared memory and remains readable after the trainer's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace

import psutil

from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.ipc import messages as watch
from ckpt.core.ipc.arena import EMPTY, FILLING, SEALED, Arena, room
from ckpt.core.ipc.heartbeat import Beat, Heartbeat, StepDone, number_in_proc
from ckpt.core.ipc.messages import Json
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Caller, HeldRun, PresentTrainer, handles
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import CheckpointError
from ckpt.guard.fault_reports import FaultReporter
from ckpt.metrics import Metrics
from ckpt.tools.observe.telemetry import status
from ckpt.tools.observe.telemetry.exporter import Exporter, deferred
from ckpt.tools.observe.telemetry.nvml import Devices
from ckpt.tools.observe.telemetry.status import DeviceStatus, RankStatus, SlotStatus, TierStatus, shown

RECENT_S, RECENT = 60.0, 16  # "recent steps": those of the last RECENT_S seconds, or the last RECENT if steps are long
MOST_TEXT = 500  # maximum characters of a fault's text
DEVICE_S, DEVICE_WAIT_S = 1.0, 2.0  # seconds between queries of the driver; maximum seconds to wait for its response
_STATES = {EMPTY: status.EMPTY, FILLING: status.FILLING, SEALED: status.SEALED}


@dataclass(slots=True)
class _Stretch:
    """A period of training without a restore. It has the totals of saving at the beginning of the period."""

    begin: float = 0.0
    calls: int = 0
    stalled: float = 0.0
    paused: float = 0.0

    def trained(self, last: StepDone | None) -> float:
        """Return the seconds of this period that were spent on steps."""
        if last is None:
            return 0.0
        return max(0.0, last.when - self.begin - (last.stalled - self.stalled) - (last.paused - self.paused))


class Observers:
    """Responds to queries about the trainer and exports metrics, in the writer's event loop."""

    def __init__(
        self,
        trainer: PresentTrainer,
        run: HeldRun,
        held_memory: HeldMemory,
        saver: WriterSaver,
        books: Bookkeeper,
        reporter: FaultReporter,
    ) -> None:
        self._trainer, self._run, self._held_memory = trainer, run, held_memory
        self._saver, self._books, self._reporter = saver, books, reporter
        self._serves = ""
        self._told: watch.Introduce | None = None
        self._heartbeat: Heartbeat | None = None
        self._pid = 0
        self._stretch = _Stretch()
        self._trained = 0.0  # seconds spent on steps in earlier periods
        self._restored: watch.RestoreDone | None = None
        self._devices, self._device_at = Devices(), float("-inf")
        self._device: DeviceStatus | None = None
        self._me = psutil.Process(number_in_proc(os.getpid()))
        self.exporter = Exporter(self.look, trainer.say, self._metrics_at)

    # -- messages of the trainer --

    @handles(watch.Introduce)
    async def introduce(self, request: watch.Introduce, caller: Caller) -> None:
        """Register a trainer and its heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._heartbeat, self._told, self._pid = Heartbeat.attach(caller.fds[0]), request, self._trainer.pid
        self._stretch = _Stretch(request.opened)
        self._trained, self._restored = 0.0, None
        if request.restored is not None:  # the trainer restored a step before this writer started
            self._on_restored(request.restored)
        metrics = None if request.metrics is None else Metrics(**request.metrics)
        await self.exporter.begin(metrics, request.rank, request.local_rank)

    @handles(watch.RunEvent)
    def on_event(self, request: watch.RunEvent) -> None:
        if request.restored is not None:
            self._on_restored(request.restored)

    def _on_restored(self, restore: watch.RestoreDone) -> None:
        """Begin a new period after a call of restore()."""
        if self._heartbeat is None:
            return
        at = restore.at
        before = [one for one in self._done(self._heartbeat) if one.when <= at]
        if before:
            self._trained += self._stretch.trained(before[-1])
        calls, later = self._heartbeat.since(0)
        calls -= sum(one.when > at for one in later)
        self._stretch = _Stretch(at + restore.seconds, calls, restore.stalled, restore.paused)
        self._restored = restore

    def _metrics_at(self, where: str) -> None:
        """Record the address of the endpoint, or "" if there is none."""
        self._serves = where

    # -- status --

    @handles(watch.Look)
    async def on_look(self, request: watch.Look) -> Json:
        if request.evidence:
            found = await self._reporter.evidence(node=request.evidence == "node")
            return {"evidence": [one.to_json() for one in found]}
        return (await self.look()).to_json()

    async def look(self) -> RankStatus:
        """Return the status, with that of the device if the driver responds within `DEVICE_WAIT_S`."""
        found = self.look_now()
        if time.monotonic() > self._device_at + DEVICE_S:
            self._device_at, self._device = time.monotonic(), None
            with contextlib.suppress(TimeoutError):
                self._device = await asyncio.wait_for(deferred(self._devices.look, found.pid), DEVICE_WAIT_S)
        return replace(found, device=self._device)

    def look_now(self) -> RankStatus:
        """Return the status without that of the device."""
        found = self._with_memory(self._who())
        if self._restored is not None:
            step, seconds = self._restored.step, self._restored.seconds
            restore_s, source = None if step is None else seconds, shown(self._restored.source)
            found = replace(found, started=step, restore_s=restore_s, restored_from=source)
        if self._heartbeat is None or found.pid != self._pid:  # a new trainer has not sent its heartbeat yet
            return found
        return self._with_steps(found, self._heartbeat, self._heartbeat.read())

    def _leaves_s(self, now: float) -> float:
        """Return the seconds until the writer exits. While it makes memory durable, return the minimum: `linger_s`."""
        leaves_at = self._run.leaves_at
        return self._run.linger_s if leaves_at is None else max(0.0, leaves_at - now)

    def _who(self) -> RankStatus:
        """Return a status with the run, the trainer's settings, and the trainer's state."""
        introduced, account, owner = self._told, self._books.account, self._run.owner
        trainer = self._trainer.state()
        metrics = (introduced and introduced.metrics) or {}
        now, last = time.monotonic(), self._reporter.last
        ended = now if self._trainer.ended_at is None else self._trainer.ended_at
        return RankStatus(
            run=shown(introduced.url) if introduced else "",
            at=time.time(),
            rank=introduced.rank if introduced else 0,
            world=introduced.world if introduced else 1,
            host=socket.gethostname(),
            pid=self._trainer.pid,
            writer=os.getpid(),
            term="" if owner is None else f"{owner.term}.{owner.nonce}",
            trainer=trainer,
            leaves_s=self._leaves_s(now) if trainer in ("dead", "left") else None,
            slowed_s=None if account is None else sum(row.slowed for row in account.rows),
            wall_s=max(0.0, ended - (introduced.opening if introduced else now)),
            faults=self._reporter.seen,
            fault=last.line[:MOST_TEXT] if last else "",
            fault_at=last.time if last else "",
            samples_per_step=metrics.get("samples_per_step"),
            flops_per_step=metrics.get("flops_per_step"),
            peak_flops=metrics.get("peak_flops"),
            serves=self._serves,
        )

    def _with_memory(self, found: RankStatus) -> RankStatus:
        return replace(
            found,
            trainer_rss=_rss(found.pid) if found.trainer in ("alive", "frozen", "left") else 0,
            writer_rss=self._me.memory_info().rss,
            writer_cpu_s=sum(self._me.cpu_times()[:2]),
            snapshots=sum(arena.slots * arena.slot_size for arena in self._held_memory.all()),
            available=room().available,
            slots=tuple(slot for arena in self._held_memory.arenas.values() for slot in _slots(arena)),
        )

    def _done(self, heartbeat: Heartbeat) -> list[StepDone]:
        """Return the last completed steps of the current period."""
        return heartbeat.since(self._stretch.calls)[1]

    def _with_steps(self, found: RankStatus, heartbeat: Heartbeat, beat: Beat) -> RankStatus:
        done, held = self._done(heartbeat), self._saver.in_memory()
        in_memory = held[0].step if held else None
        last = done[-1] if done else None
        step_s, stall_s, share = recent(done)
        return replace(
            found,
            doing=beat.doing,
            step=beat.step,
            calls=beat.calls,
            idle_s=max(0.0, time.monotonic() - beat.when),
            usual_s=heartbeat.usual_s or step_s,
            step_s=step_s,
            stall_s=stall_s,
            stall_share=share,
            stalled_s=last.stalled if last is not None else self._stretch.stalled,
            saves=last.saves if last is not None else self._restored.saves if self._restored else 0,
            skipped=last.skipped if last is not None else self._restored.skipped if self._restored else 0,
            trained_s=self._trained + self._stretch.trained(last),
            in_memory=in_memory,
            memory_lag=_lag(beat.step, in_memory, found.started),
            tiers=tuple(_tier(tier, beat.step, found.started, done, step_s) for tier in self._run.tiers),
        )


def recent(done: list[StepDone]) -> tuple[float, float, float]:
    """Return the duration, the stall and the stall share of recent steps. All are 0 while they are unknown."""
    if len(done) < 2:
        return 0.0, 0.0, 0.0
    since = done[-1].when - RECENT_S
    start = next(number for number, one in enumerate(done) if one.when >= since)
    start = max(0, min(start, len(done) - 1 - RECENT))
    first, steps = done[start], len(done) - 1 - start
    seconds = max(0.0, done[-1].when - first.when - (done[-1].paused - first.paused))
    stalled = max(0.0, done[-1].stalled - first.stalled)
    return seconds / steps, stalled / steps, stalled / seconds if seconds > 0 else 0.0


def _lag(step: int, there: int | None, started: int | None) -> int:
    """Return the steps that would be lost if only this tier survived: without a checkpoint, all since the start."""
    return max(0, step - (there if there is not None else started or 0))


def _tier(tier: OpenTier, step: int, started: int | None, done: list[StepDone], step_s: float) -> TierStatus:
    flow, history = tier.flow, tier.log.state.lineage() if tier.opened else []
    committed = history[0].step if history else None
    lag = _lag(step, committed, started)
    then = next((one.when for one in reversed(done) if one.step <= step - lag), None)
    total = max(flow.total, 0)
    return TierStatus(
        url=shown(tier.url),
        every=tier.every,
        committed=committed,
        writing=flow.step,
        done=min(flow.done, total) if flow.step is not None else 0,
        total=total if flow.step is not None else 0,
        rate=flow.speed if flow.step is not None and flow.done else flow.rate,
        waiting=max(tier.waiting, len(tier.in_flight)),
        lag_steps=lag,
        lag_s=0.0 if not lag else done[-1].when - then if then is not None else lag * step_s,
        saves=flow.saves,
        failed=flow.failed,
        left_out=flow.left_out,
        raw=flow.raw,
        stored=flow.stored,
        error=flow.error if tier.opened or flow.error else "not opened yet",
    )


def _slots(arena: Arena) -> list[SlotStatus]:
    found = []
    for slot in range(arena.slots):
        try:
            label = arena.label(slot)
        except CheckpointError:
            found.append(SlotStatus("damaged"))
            continue
        if label is None or label.checkpoint is None:
            found.append(SlotStatus(status.FILLING if label is None else _STATES.get(label.state, status.EMPTY)))
        else:
            state = _STATES.get(label.state, status.EMPTY)
            found.append(
                SlotStatus(state, label.checkpoint.step, str(label.checkpoint), label.data_size + label.values_size)
            )
    return found


def _rss(pid: int) -> int:
    with contextlib.suppress(psutil.Error, OSError):
        return int(psutil.Process(number_in_proc(pid)).memory_info().rss) if pid else 0
    return 0
