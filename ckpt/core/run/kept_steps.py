"""Keeps steps regardless of their age: the steps that the user pins, and the steps with the best scores."""

from __future__ import annotations

import math
import time
from typing import Any

from ckpt.core.ipc.requests import KeepSteps, KeptReply
from ckpt.core.log.records import THE_BEST
from ckpt.core.ranks.world import together
from ckpt.core.run.saver import Saver
from ckpt.core.run.training_run import TrainingRun
from ckpt.errors import CheckpointError, DeadlineError, InvalidArgumentError, PeerError, UsageError, from_wire, to_wire
from ckpt.events import log


class KeptSteps:
    """Keeps steps for one Checkpointer. Rank 0 decides which steps are the best without waiting for other ranks, which
    wait for its decision in `score`. The writer reads the scores of earlier job attempts from the run logs."""

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._best = run.settings.best
        self._pinned: dict[int, str] | None = None  # pins of this and earlier job attempts; None until they are read
        self._scored = 0  # calls of `score` since the last restore
        if self._best is not None:
            self._best.scores = []  # the object may have been used for another run

    def pin(self, step: int, note: str) -> None:
        """Pin a step; see `Checkpointer.pin`."""
        if not isinstance(note, str) or not note:
            raise InvalidArgumentError(f"pin(note={note!r}): note must be a string that is not empty")
        self._change_pins(step, note)

    def unpin(self, step: int) -> None:
        """Unpin a step; see `Checkpointer.unpin`."""
        self._change_pins(step, None)

    def _change_pins(self, step: int, note: str | None) -> None:
        if type(step) is not int or step < 0:
            raise InvalidArgumentError(f"step={step!r}: it must be a whole number from 0")
        if self._pinned is None:  # the writer replaces the set of pins, so it must contain those of earlier attempts
            self._pinned = {at: text for at, text, _ in self._ask(step).notes}
        others = {at: text for at, text in self._pinned.items() if at != step}
        self._pinned = others if note is None else {**others, step: note}
        self._tell()

    def score(self, step: int, value: object) -> bool:
        """Score a step; see `Checkpointer.score`."""
        best, run = self._best, self._run
        if best is None:
            raise UsageError('nothing says which score is best: Checkpointer(..., best=ckpt.Best("val_loss"))')
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
                log.info("step %d stays where it is saved, and is not saved elsewhere: %s", step, error)
        return among

    def wait(self, timeout_s: float | None, step: int | None) -> None:
        """Wait for saves and for notes in the run logs; see `Checkpointer.wait`."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._saver.wait(timeout_s, step)
        self._run.supervisor.writes.note_down(end - time.monotonic())

    # -- rank 0 decides --

    def _agree(self, step: int, value: object) -> tuple[bool, bool]:
        """Return whether the step is among the best and whether it is saved, as decided by rank 0."""
        world, best = self._run.world, self._best
        assert best is not None
        if world.size == 1:
            return self._decide(step, value)
        epoch = self._run.supervisor.owner.epoch  # a restore begins a new term, so keys are not used twice
        key, self._scored = f"score/{epoch}/{self._scored}", self._scored + 1
        mailbox = self._run.ownership.mailbox()
        if world.rank > 0:
            try:
                (word,) = mailbox.wait([key], world.timeout_s, lambda: mailbox.poll(["left/0"]))
            except DeadlineError:
                if not mailbox.poll(["left/0"]):
                    raise
                how = mailbox.wait(["left/0"], world.timeout_s)[0]["how"]
                raise PeerError(f"rank 0 {how}, so nobody decides whether step {step} is among the best") from None
            if word["step"] != step:
                raise PeerError(
                    f"rank 0 scored step {word['step']}, and this rank step {step}: all ranks must score alike"
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
            raise InvalidArgumentError(f"step {step!r} was not made yet, so it has no score: step() has named {last}")
        saved = self._ask(step).saved or any(save.step == step for save in self._saver.under_way())
        if not math.isfinite(number):
            log.warning("step %d scored %s=%r: it is none of the best", step, best.monitor, number)
            return False, saved
        before = list(best.scores)
        among = best.add(number, step)
        if among and not saved and step != last:
            best.scores = before
            raise UsageError(
                f"step {step} would be one of the best by {best.monitor}, but is saved nowhere, or not any more, and "
                f"training has come to step {last}: score it before the next step(), or save it first"
            )
        return among, saved

    # -- after a restore --

    def went_back(self) -> None:
        """Reload scores after a restore, on all ranks: those of steps in the restored history that are still saved."""
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
        if not saved and any(at == step for _, at in best.scores):  # restored from memory before a tier had it
            self._tell()
            self._saver.save_last()

    def _ask(self, step: int) -> KeptReply:
        return self._run.supervisor.writer.insist(lambda client: client.ask(KeepSteps(step=step)))

    def _say_others(self, steps: list[int]) -> None:
        if steps and self._best is not None and self._pinned is not None:
            notes = ", ".join(f"step {step} ({self._pinned[step].removeprefix(THE_BEST)})" for step in steps)
            log.warning(
                "the best by another score than %s, %s, stays too; unpin() releases it", self._best.monitor, notes
            )

    def _tell(self) -> None:
        """Send the kept steps and their notes to the writer. Only one score can be the best."""
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
