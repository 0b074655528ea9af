"""Restores the state of a run, and begins a new term that continues from the restored checkpoint."""

from __future__ import annotations

import json
import time
from typing import Any

from ckpt.core.ipc.heartbeat import OPENING, RESTORING
from ckpt.core.ipc.watch_requests import KeepBooks, RestoreDone, Show
from ckpt.core.ranks.world import together
from ckpt.core.restore.restore import Candidates, Restored, restore_first
from ckpt.core.restore.sources import MemorySource, RestoreSource
from ckpt.core.run.saver import Saver
from ckpt.core.run.training_run import TrainingRun
from ckpt.core.snapshot.snapshot import Snapshot
from ckpt.errors import CorruptError, NoCheckpointError
from ckpt.events import log, tell
from ckpt.subscribers import publish
from ckpt.units import duration

MISSING: Any = object()


class Restoring:
    """Restores the state of one `Checkpointer`. `last`: the result of the last restore. `reached`: the last known step
    of earlier job attempts, 0 if unknown."""

    def __init__(self, run: TrainingRun, saver: Saver, reached: int) -> None:
        self._run, self._saver, self._reached = run, saver, reached
        self.last: Restored | None = None

    def restore(self, default: Any, step: int | None, strict: bool) -> Any:
        """Restore the state; see `Checkpointer.restore`."""
        heartbeat = self._run.heartbeat
        heartbeat.touch(RESTORING)
        began = time.monotonic()
        try:
            result, source = self._fill(step, strict)
            if source is not None:
                self._finish(source, result, began)
            self.last = result
            found = result.step if source is not None else self._without(default, step, result)
            self._tell(began)
            return found
        finally:
            heartbeat.touch(OPENING)

    def _fill(self, step: int | None, strict: bool) -> tuple[Restored, RestoreSource | None]:
        """Restore from the first usable source. Return the result, and the source if there was one."""
        run, result = self._run, Restored(step=None)
        urls, supervisor = [tier.url for tier in run.tiers], run.supervisor
        with supervisor.held.snapshots() as snapshots:
            acquires, damage = supervisor.memory.inherited.acquires, supervisor.held.damage
            candidates = Candidates(run.world, snapshots, acquires, urls, run.ownership.roots, step, damage)

            def post() -> Any:
                return {"intervals": self._settle(step), "candidates": candidates.post()}

            def choose(posts: list[Any]) -> Any:
                intervals = max(post["intervals"] for post in posts)
                return {"intervals": intervals, "candidates": candidates.choose([post["candidates"] for post in posts])}

            agreed = together(run.world, "candidates", post, choose)
            run.intervals.begin(agreed["intervals"])
            source = restore_first(
                run.world,
                candidates.sources(agreed["candidates"]),
                run.capture,
                result,
                strict=strict,
                on_touch=self._touch,
                lost=candidates.lost,
                step=step,
                term=run.ownership,
            )
        return result, source

    def _settle(self, step: int | None) -> list[Any]:
        """Wait until no copy is under way, because the restore overwrites the state, and until the saves that it may
        need have ended. Return this rank's save intervals, on which all ranks then agree."""
        timeout_s = self._run.settings.busy_timeout_s
        self._run.stager.do(lambda: None, timeout_s)
        if self._run.world.size > 1:  # the new term applies to all ranks, and must not fence saves under way
            self._saver.wait(timeout_s)
        elif step is not None:
            self._saver.wait(timeout_s, step)
        return self._run.intervals.suspend()

    def _touch(self) -> None:
        self._run.torn = True

    def _without(self, default: Any, step: int | None, result: Restored) -> Any:
        """Return the default if no checkpoint exists. Otherwise raise the reason why none could be restored."""
        if result.skipped:
            self._run.restored = False
            lines = "\n  ".join(f"step {s.step} in {s.tier}: {s.reason}" for s in result.skipped)
            touched = ". The state is partly overwritten: do not train on it" if self._run.torn else ""
            place = next((s.tier for s in result.skipped if s.tier != "memory"), "RUN")
            raise CorruptError(
                f"no checkpoint could be restored{touched}. `ckpt repair {place}`, with --from another location, may "
                f"mend it\n  {lines}"
            )
        if default is MISSING or self._run.ownership.has_checkpoints or step is not None:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            alone = self._run.world.size == 1
            lost = "" if alone else ", at least none of which the parts of all ranks can be reached"
            raise NoCheckpointError(f"there is no {wanted} in {self._run.settings.places}{lost}")
        self._run.starts(default)
        return default

    def _finish(self, source: RestoreSource, result: Restored, began: float) -> None:
        run, saver, supervisor = self._run, self._saver, self._run.supervisor
        run.ownership.begin_term(source.term, source.attempt)
        if source.damaged:
            supervisor.run.distrust(source.tier)
        run.heartbeat.went_back(source.attempt.step)
        memory = source if isinstance(source, MemorySource) else None
        place = memory.place_of(run.world.rank) if memory is not None else None
        newest: Snapshot | None = None
        kept = memory is not None and place is not None and supervisor.memory.holds(place[0])
        if memory is not None and place is not None and kept:
            if memory.world == run.world.size:  # otherwise it is not a snapshot of this rank's present share
                newest = Snapshot(source.attempt, place=place)
                newest.save._set_staged()
            if supervisor.memory.rings:
                # After a rollback it may be the oldest snapshot in memory, but it must not be lost.
                run.stager.slots.pin(*place)
        # Set these together, so that Ctrl-C leaves either all old values or all new ones.
        before, saver.pinned = saver.pinned, place if kept and supervisor.memory.rings else None
        saver.last, saver.newest, saver.owed = None, newest, {}
        self._run.went_back(source.attempt.step)
        if before is not None:
            run.stager.slots.unpin(before[0].id, before[1])
        if newest is not None and not supervisor.memory.rings:  # the next snapshot needs its slot
            self._saver.write_missing(newest, run.settings.everywhere[:1])
        result.seconds = time.monotonic() - began
        say = tell if run.world.rank == 0 else log.info
        say(_line(result, self._reached))
        reading = run.capture.read()
        supervisor.memory.next.prepare(reading.layout.arrangement.data_size, len(json.dumps(reading.values)))

    def _tell(self, began: float) -> None:
        """Report the restore to the writer, for the run metrics, and to subscribers."""
        run, result, stats = self._run, self.last, self._run.stats
        assert result is not None
        owner = run.supervisor.owner
        request = RestoreDone(
            at=began,
            seconds=time.monotonic() - began,
            step=result.step,
            source=result.tier or "",
            attempt=str(owner.restored or ""),
            epoch=f"{owner.epoch}.{owner.nonce}",
            stalled=stats.stalled_s,
            saves=stats.saves,
            skipped=stats.skipped,
            paused=run.heartbeat.paused_s,
            repaired=len(result.repaired),
            passed_over=len(result.skipped),
            why=_first_reason(result),
        )
        run.supervisor.standing.amend(Show, restored=request)
        run.supervisor.standing.amend(KeepBooks, term=request.epoch)
        run.supervisor.writer.send(request)
        if result.step is not None:
            facts = {"source": result.tier, "seconds": result.seconds, "repaired": len(result.repaired)}
            publish("restored", result.step, **facts)


def _line(result: Restored, reached: int) -> str:
    """Return the log line for a restore: the step, its source, and how many steps are lost if known."""
    how = "" if result.verified else " (not verified: no digest was computed while its trainer lived)"
    step = result.step or 0
    lost = f"; training had come to step {reached}: {reached - step} steps are lost" if reached > step else ""
    newer = f"; newer ones that cannot be used, see above: {len(result.skipped)}" if result.skipped else ""
    return f"restored step {step} from {result.tier} in {duration(result.seconds)}{how}{lost}{newer}"


def _first_reason(result: Restored) -> str:
    """Return why a restore skipped the first checkpoint it skipped; "" if it skipped none."""
    first = result.skipped[0] if result.skipped else None
    return f"step {first.step} in {first.tier}: {first.reason}"[:500] if first else ""
