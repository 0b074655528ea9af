"""Restores the state of a run, and keeps steps regardless of their age.

`Restoring` fills the state from the first usable source, and begins a new term that continues from the restored
checkpoint. `KeptSteps` manages the steps that the user pins and the steps with the best scores."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from ckpt.core.checkpoint.reference import BEST
from ckpt.core.ipc.heartbeat import OPENING, RESTORING
from ckpt.core.ipc.messages import Introduce, KeepSteps, KeptReply, RestoreDone, RunEvent
from ckpt.core.log.records import THE_BEST
from ckpt.core.ranks.world import together
from ckpt.core.restore.restore import Candidates, Restored, restore_first
from ckpt.core.restore.sources import MemorySource, RestoreSource
from ckpt.core.run.saver import Saver
from ckpt.core.run.training_run import TrainingRun
from ckpt.core.snapshot.snapshot import Snapshot
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DeadlineError,
    InvalidArgumentError,
    NoCheckpointError,
    PeerError,
    UsageError,
    from_wire,
    to_wire,
)
from ckpt.events import log, tell
from ckpt.subscribers import publish
from ckpt.units import are, count_of, duration

MISSING: Any = object()


class Restoring:
    """Restores the state of one `Checkpointer`. `last`: result of the last restore. `reached`: the last step that
    earlier job attempts are known to have done, 0 if unknown."""

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
            self._tell(began, source)
            return found
        finally:
            heartbeat.touch(OPENING)

    def _fill(self, step: int | None, strict: bool) -> tuple[Restored, RestoreSource | None]:
        """Restore from the first usable source. Return the result, and the source or None."""
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
        """Wait for the end of a copy under way, because the restore overwrites the state, and for saves that the
        restore may need. Return this rank's save intervals, on which all ranks then agree."""
        timeout_s = self._run.settings.busy_timeout_s
        self._run.stager.do(lambda: None, timeout_s)
        if self._run.world.size > 1:  # the new term, which applies to all ranks, must not fence saves under way
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
                f"repair it\n  {lines}"
            )
        if default is MISSING or self._run.ownership.has_checkpoints or step is not None:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            alone = self._run.world.size == 1
            lost = "" if alone else ", or some ranks' files of it cannot be reached"
            raise NoCheckpointError(f"there is no {wanted} in {self._run.settings.places}{lost}")
        self._run.starts(default)
        return default

    def _finish(self, source: RestoreSource, result: Restored, began: float) -> None:
        run, saver, supervisor = self._run, self._saver, self._run.supervisor
        run.ownership.begin_term(source.term, source.checkpoint)
        run.heartbeat.went_back(source.checkpoint.step)
        memory = source if isinstance(source, MemorySource) else None
        place = memory.place_of(run.world.rank) if memory is not None else None
        newest: Snapshot | None = None
        kept = memory is not None and place is not None and supervisor.memory.holds(place[0])
        if memory is not None and place is not None and kept:
            if memory.world == run.world.size:  # otherwise it is not a snapshot of this rank's present shard
                newest = Snapshot(source.checkpoint, place=place)
                newest.save._set_staged()
            if supervisor.memory.rings:
                # After a rollback, the restored snapshot may be the oldest in memory, but must not be overwritten.
                run.stager.slots.pin(*place)
        # Set these together, so that Ctrl-C leaves either all old values or all new ones.
        before, saver.pinned = saver.pinned, place if kept and supervisor.memory.rings else None
        saver.last, saver.newest, saver.owed = None, newest, {}
        self._run.went_back(source.checkpoint.step)
        if before is not None:
            run.stager.slots.unpin(before[0].id, before[1])
        if newest is not None and not supervisor.memory.rings:  # the next snapshot needs its slot
            self._saver.write_missing(newest, run.settings.everywhere[:1])
        result.seconds = time.monotonic() - began
        say = tell if run.world.rank == 0 else log.info
        say(_line(result, self._reached))
        reading = run.capture.read()
        supervisor.memory.next.prepare(reading.layout.arrangement.data_size, len(json.dumps(reading.values)))

    def _tell(self, began: float, source: RestoreSource | None) -> None:
        """Report the restore to the writer, which adds it to the run metrics, and to subscribers."""
        run, result, stats = self._run, self.last, self._run.stats
        assert result is not None
        owner = run.supervisor.owner
        done = RestoreDone(
            at=began,
            seconds=time.monotonic() - began,
            step=result.step,
            source=result.tier or "",
            checkpoint=str(owner.restored or ""),
            term=f"{owner.term}.{owner.nonce}",
            stalled=stats.stalled_s,
            saves=stats.saves,
            skipped=stats.skipped,
            paused=run.heartbeat.paused_s,
            repaired=len(result.repaired),
            passed_over=len(result.skipped),
            why=_first_reason(result),
            damaged=source.tier if source is not None and source.damaged else "",
        )
        run.supervisor.amend(Introduce, restored=done)
        run.supervisor.send(RunEvent(restored=done))
        if result.step is not None:
            facts = {"source": result.tier, "seconds": result.seconds, "repaired": len(result.repaired)}
            publish("restored", result.step, **facts)


def _line(result: Restored, reached: int) -> str:
    """Return the log line for a restore: the step, its source, and the number of lost steps if it is known."""
    how = "" if result.verified else " (not verified: no digest was computed while its trainer lived)"
    step = result.step or 0
    count = reached - step
    lost = f"; training had come to step {reached}: {count_of(count, 'step')} {are(count)} lost" if count > 0 else ""
    newer = f"; skipped {count_of(len(result.skipped), 'newer checkpoint')}, see above" if result.skipped else ""
    return f"restored step {step} from {result.tier} in {duration(result.seconds)}{how}{lost}{newer}"


def _first_reason(result: Restored) -> str:
    """Return the reason why the first skipped checkpoint was skipped; "" if none was skipped."""
    first = result.skipped[0] if result.skipped else None
    return f"step {first.step} in {first.tier}: {first.reason}"[:500] if first else ""


# -- pinned steps and best steps --


class KeptSteps:
    """Keeps steps for one Checkpointer. Rank 0 decides which steps are the best without waiting for other ranks. The
    other ranks wait for this decision in `score`. The writer reads scores of earlier job attempts from the run logs."""

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._best = run.settings.best
        self._pinned: dict[int, str] | None = None  # pins of all job attempts; None until they are read
        self._scored = 0  # calls of `score` since the last restore
        if self._best is not None:
            self._best.scores = []  # the user may have passed this object to another run before

    def pin(self, step: int, note: str) -> None:
        """Pin a step; see `Checkpointer.pin`."""
        if not isinstance(note, str) or not note:
            raise InvalidArgumentError(f"pin(note={note!r}): note must be a string that is not empty")
        last = self._run.step
        if type(step) is int and last is not None and 0 <= step < last and not self._is_saved(step):
            raise UsageError(
                f"step {step} cannot be pinned: no tier has it, and training has come to step {last}. Pin a step "
                "before its save()"
            )
        self._change_pins(step, note)

    def unpin(self, step: int) -> None:
        """Unpin a step; see `Checkpointer.unpin`."""
        self._change_pins(step, None)

    def _change_pins(self, step: int, note: str | None) -> None:
        if type(step) is not int or step < 0:
            raise InvalidArgumentError(f"step={step!r}: it must be a whole number from 0")
        if self._pinned is None:  # the writer replaces all pins, so include pins of earlier attempts
            self._pinned = {at: text for at, text, _ in self._ask(step).notes}
        others = {at: text for at, text in self._pinned.items() if at != step}
        self._pinned = others if note is None else {**others, step: note}
        self._tell()

    def score(self, step: int, value: object) -> bool:
        """Score a step; see `Checkpointer.score`."""
        best, run = self._best, self._run
        if best is None:
            raise UsageError('score() needs a rule: pass Checkpointer(..., best=ckpt.Best("val_loss"))')
        before = list(best.scores)
        among, saved = self._agree(step, value)
        if best.scores != before:
            self._tell()  # before the save, so that retention cannot delete the checkpoint
        if among and step == run.step and (run.stepped or not saved):
            try:
                self._saver.save_last()
            except CheckpointError as error:
                if not saved:
                    best.scores = before
                    self._tell()
                    raise
                log.info("step %d is one of the best, but is not copied to further tiers: %s", step, error)
        return among

    def number_of(self, name: str) -> int:
        """Return the step with the best score according to the run logs. Rank 0 decides."""
        if name != BEST:
            raise InvalidArgumentError(
                f'step={name!r}: it must be the number of a step, "best", or None for the newest'
            )

        def look() -> list[int]:
            return [step for step, note, there in self._ask(-1).notes if there and note.startswith(THE_BEST)]

        found: list[int] = together(self._run.world, "best step", look, lambda posts: posts[0])
        if not found:
            raise InvalidArgumentError(
                'step="best": no checkpoint of this run has a score. Give the number of a step, or record scores with '
                "Checkpointer(..., best=ckpt.Best(...)) and score()"
            )
        return max(found)

    def wait(self, timeout_s: float | None, step: int | None) -> None:
        """Wait for saves and for notes in the run logs; see `Checkpointer.wait`."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._saver.wait(timeout_s, step)
        self._run.supervisor.writes.note_down(end - time.monotonic())

    # -- rank 0 decides --

    def _agree(self, step: int, value: object) -> tuple[bool, bool]:
        """Return rank 0's decisions: whether the step is among the best, and whether it is saved."""
        world, best = self._run.world, self._best
        assert best is not None
        if world.size == 1:
            return self._decide(step, value)
        term = self._run.supervisor.owner.term  # a restore begins a new term, so keys are unique
        key, self._scored = f"score/{term}/{self._scored}", self._scored + 1
        mailbox = self._run.ownership.mailbox()
        if world.rank > 0:
            try:
                (word,) = mailbox.wait([key], world.timeout_s, lambda: mailbox.poll(["left/0"]))
            except DeadlineError:
                if not mailbox.poll(["left/0"]):
                    raise
                how = mailbox.wait(["left/0"], world.timeout_s)[0]["how"]
                raise PeerError(f"rank 0 {how}, so it is unknown whether step {step} is among the best") from None
            if word["step"] != step:
                raise PeerError(
                    f"rank 0 scored step {word['step']}, this rank step {step}: all must score the same step"
                )
            if "error" in word:
                raise from_wire(word["error"])
            best.scores = [(score, at) for score, at in word["scores"]]
            return word["among"], word["saved"]
        word = {"step": step}
        try:
            word["among"], word["saved"] = among, saved = self._decide(step, value)
            word["scores"] = best.scores
            return among, saved
        except CheckpointError as error:
            word["error"] = to_wire(error)
            raise
        finally:
            mailbox.put(key, word)

    def _decide(self, step: int, value: object) -> tuple[bool, bool]:
        best, last = self._best, self._run.step
        assert best is not None
        number = _number(value)
        if type(step) is not int or last is None or not 0 <= step <= last:
            raise InvalidArgumentError(f"step {step!r} cannot be scored yet: the last completed step is {last}")
        saved = self._is_saved(step)
        if not math.isfinite(number):
            log.warning("step %d scored %s=%r, so it is not among the best", step, best.monitor, number)
            return False, saved
        before = list(best.scores)
        among = best.add(number, step)
        if among and not saved and step != last:
            best.scores = before
            raise UsageError(
                f"step {step} would be one of the best by {best.monitor}, but is not saved (or no longer), and "
                f"training has come to step {last}: score it before the next step(), or save it first"
            )
        return among, saved

    # -- after a restore --

    def went_back(self) -> None:
        """Reload the scores of steps that are in the restored history and still saved. All ranks call this."""
        best, step = self._best, self._run.step
        self._scored = 0
        if best is None:
            return

        def look() -> list[Any]:
            reply = self._ask(-1 if step is None else step)
            best.scores = []
            others = best.take({at: note for at, note, there in reply.notes if there or at == step})
            if self._pinned is None:
                self._pinned = others
                self._say_others([at for at, note in others.items() if note.startswith(THE_BEST)])
            return [best.scores, reply.saved]

        scores, saved = together(self._run.world, "best", look, lambda posts: posts[0])
        best.scores = [(score, at) for score, at in scores]
        if not saved and any(at == step for _, at in best.scores):  # restored from memory, and in no tier yet
            self._tell()
            self._saver.save_last()

    def _is_saved(self, step: int) -> bool:
        """Return True if a tier has this step, or a save of it is under way."""
        return self._ask(step).saved or any(save.step == step for save in self._saver.under_way())

    def _ask(self, step: int) -> KeptReply:
        return self._run.supervisor.insist(lambda client: client.ask(KeepSteps(step=step)))

    def _say_others(self, steps: list[int]) -> None:
        if steps and self._best is not None and self._pinned is not None:
            notes = ", ".join(f"step {step} ({self._pinned[step].removeprefix(THE_BEST)})" for step in steps)
            log.warning(
                "the best by another score than %s, %s, stays too. unpin() releases it", self._best.monitor, notes
            )

    def _tell(self) -> None:
        """Send the kept steps and their notes to the writer. Pins of another score lose the mark of the best."""
        notes: dict[int, Any] = dict(self._pinned or {})
        if self._best is not None and self._best.scores:
            notes = {step: note.removeprefix(THE_BEST) for step, note in notes.items()}
        for step, note in ({} if self._best is None else self._best.notes()).items():
            notes[step] = f"{note}, {notes[step]}" if step in notes else note
        self._run.supervisor.writes.keep_steps(notes)


def _number(value: Any) -> float:
    """Return a score as a float. Raises InvalidArgumentError if it is not one number."""
    try:
        return float("" if isinstance(value, str) else value)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for a tensor with several elements
        raise InvalidArgumentError(f"a score is one number, not {value!r}") from None
