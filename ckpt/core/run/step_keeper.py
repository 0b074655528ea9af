"""Have the last step staged after all, for save(), score(), close() and faults, if it is not in memory yet.

The state is read as it is then. That is the last step only as long as no optimizer has begun the next one. An
exception, the end of a script, or another thread may come in the middle of a step, when buffers and random numbers have
moved on. Then the newest snapshot in memory counts, unless the exception came into `step()` itself.
"""

from __future__ import annotations

import threading
import time

from ckpt.core.run.progress import Progress, Staged
from ckpt.core.run.saves import Saves
from ckpt.core.run.session import Session
from ckpt.core.snapshot.snapshot import PendingSnapshot
from ckpt.errors import DeadlineError, UsageError
from ckpt.saving import Save

LEAST_S = 1.0  # for a copy, however little time there is: most take less
NO_TIME = "there was no time to copy it"


class StepKeeper:
    """Stages the last step of one Checkpointer."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, saves: Saves) -> None:
        self._session, self._progress, self._staged, self._saves = session, progress, staged, saves

    def save_again(self) -> Save:
        """The last step, to all tiers that it is not in, nor on its way to."""
        with self._session.stager.held():  # another thread may be training
            return self._save_again()

    def _save_again(self) -> Save:
        step, last = self._last_step("say which step this is: save(step)")
        timeout_s = self._session.settings.busy_timeout_s
        if last is not None and self._staged.last_is_under_way(timeout_s):
            last[1].copied.wait(timeout_s)
        if last is None or last[1].place is None:
            self._check_same()
            return self._saves.begin(step, self._session.settings.everywhere, explicit=True)
        self._saves.write_again(*last)
        return last[0]

    def stage_again(self) -> Save:
        """The last step, into memory if it is not there. Returns when it is copied, or cannot be."""
        with self._session.stager.held():
            return self._stage_again()

    def _stage_again(self) -> Save:
        step, last = self._last_step("call step() first: there is no step to stage")
        timeout_s = self._session.settings.busy_timeout_s
        if last is not None and self._staged.last_is_under_way(timeout_s):
            last[1].copied.wait(timeout_s)
        if last is not None and last[1].place is not None:
            return last[0]
        self._check_same()
        save = self._saves.begin(step, [], explicit=True)
        if (last := self._staged.last_of(step)) is not None:
            last[1].copied.wait(timeout_s)
        return save

    def _last_step(self, if_none: str) -> tuple[int, tuple[Save, PendingSnapshot] | None]:
        """The step, and how it was saved, if it was. UsageError if it is past."""
        step = self._progress.step
        if step is None:
            raise UsageError(if_none)
        self._progress.check_same()
        return step, self._staged.last_of(step)

    def _check_same(self) -> None:
        """Raise UsageError if it is known that the state is not that of the last step any more."""
        exchanged = (
            "weights are exchanged for others at the moment, see not_training()" if self._progress.exchanged else ""
        )
        if why := exchanged or self._torn():
            step = self._progress.step
            raise UsageError(f"step {step} cannot be saved any more: {why}. Call save() right after step()")

    def _torn(self) -> str:
        """Why the last step cannot be had, if others than optimizers wrote to it while it was copied."""
        last = self._staged.last_of(self._progress.step)
        return str(last[1].error) if last is not None and last[1].written_by_others else ""

    def stage_last(self, end: float, *, live: bool) -> str:
        """Have the last step in memory. Return "" if it is there, else why it is not.

        live: no exception ends the training, so the state may be read as it is now
        """
        with self._session.stager.held():  # another thread may be training
            return self._stage_held(end, live)

    def _stage_held(self, end: float, live: bool) -> str:
        progress, supervisor = self._progress, self._session.supervisor
        step = progress.step
        if step is None or not progress.stepped or self._session.errors.fenced is not None:
            return ""
        if supervisor.failure is not None:
            return str(supervisor.failure)
        try:
            self._session.stager.do(lambda: None, max(LEAST_S, end - time.monotonic()))
            if self._staged.newest_step(0.0) == step:
                return ""
            if why := self._why_gone():
                return why
            ended_here = live and threading.get_ident() == progress.thread  # any other thread may be within a step
            if not ended_here and progress.within != step:
                return self._why_not_staged()
            self._saves.begin(step, [], explicit=True, timeout_s=max(LEAST_S, end - time.monotonic()))
            if self._staged.newest_step(max(LEAST_S, end - time.monotonic())) == step:
                return ""
            error = None if self._staged.last is None else self._staged.last[1].error
            return str(error or NO_TIME)
        except DeadlineError:
            return NO_TIME
        except Exception as error:  # of a device that has failed, say: what was saved before is all there is
            return f"it could not be copied: {error}"

    def _why_gone(self) -> str:
        if self._progress.moved_on:
            return "an optimizer has begun a further step"
        if self._progress.torn:
            return "a restore has failed half-way since"
        if self._progress.exchanged:
            return "weights were exchanged for others, see not_training()"
        return self._torn()

    def _why_not_staged(self) -> str:
        last = self._staged.last_of(self._progress.step)
        if last is not None and last[1].error is not None:
            return str(last[1].error)
        return "it was not in memory, and training did not end by a call of close(). Memory(every=1) stages every step"
