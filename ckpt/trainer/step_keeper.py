"""When a step that is not due is kept, and how save(), close() and faults have it staged after all.

In a slot that is free, where that costs next to nothing, so that it outlives this process at a fault; else in this
process, for `save()` and `close()`.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator

from ckpt.errors import CheckpointError, DeadlineError, SkippedError, UsageError
from ckpt.goodput.cadence import Auto
from ckpt.save import Save
from ckpt.state.capture import Reading
from ckpt.trainer.progress import Progress, Staged
from ckpt.trainer.saves import Saves
from ckpt.trainer.session import Session
from ckpt.trainer.staging.snapshot import MOST, DeferredStep, DeferredSteps, PendingSnapshot

DEFERRED = 1 << 20  # bytes of a step that is not due, which are kept for a fault all the same
DEFER_SHARE = 0.001  # of a step, that it may cost
DEFER_AGAIN = 1000  # steps, after which it is measured again
LEAST_S = 1.0  # for a copy, however little time there is: most take less
NO_TIME = "there was no time to copy it"
KEEP_S, KEEP_SHARE, KEEP_MOST_S = 0.001, 0.05, 0.002  # of the CPU, to keep at each step what that is made of
KEEP_TRIES = 3  # that have to cost too much, one after the other: one alone may just have been held up


class StepKeeper:
    """Of one Checkpointer. `for_faults`: somebody would copy a step that was not due at a fault."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, saves: Saves, *, for_faults: bool) -> None:
        self._session, self._progress, self._staged, self._saves = session, progress, staged, saves
        self._for_faults = for_faults
        self._between = session.settings.between
        self._moments = DeferredSteps(math.inf if self._between else MOST)
        self._dear = 0  # how often running it cost too much to keep that
        self._keep_after = 0  # steps that are not due, until it is tried again
        self._defer_dear = 0  # how often running deferring cost too much
        self._not_due = 0

    def keep(self, step: int) -> None:
        """A step that is not due."""
        stats = self._session.stalls.stats
        if self._for_faults and self._session.supervisor.memory.rings and self._may_defer():
            began = time.perf_counter()
            self._defer(step)
            taken_s, usual_s = time.perf_counter() - began, self._session.heartbeat.usual_s
            self._defer_dear = self._defer_dear + 1 if usual_s and taken_s > self._defer_share * usual_s else 0
            stats.stalled_s += taken_s
        elif self._between is False:
            return
        elif self._keep_after > 0 and not self._between:
            self._keep_after -= 1
        else:
            began, cpu = time.perf_counter(), time.thread_time()
            self.take(step)
            usual_s = self._session.heartbeat.usual_s
            most_s = max(KEEP_S, min(KEEP_SHARE * usual_s, KEEP_MOST_S), self._defer_share * usual_s)
            self._dear = self._dear + 1 if usual_s and time.thread_time() - cpu > most_s else 0
            self._keep_after = min(2 ** (self._dear - KEEP_TRIES), DEFER_AGAIN) if self._dear >= KEEP_TRIES else 0
            stats.stalled_s += time.perf_counter() - began

    def take(self, step: int) -> None:
        """Keep it in this process."""
        capture = self._session.capture
        self._progress.moment = self._moments.take(step, capture.read(), capture)

    @contextlib.contextmanager
    def not_cut_off(self, step: int) -> Iterator[None]:
        """Whatever ends this, such as Ctrl-C: as long as we are here nothing has moved on, so the step can be kept."""
        progress = self._progress
        outer, progress.within = progress.within, step
        try:
            yield
        except SkippedError:
            raise
        except BaseException:
            if progress.step == step and not progress.closed:
                with contextlib.suppress(Exception):
                    self.take(step)
            raise
        finally:
            progress.within = outer

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
            return self._saves.begin(step, self._session.settings.everywhere, explicit=True, taken=self._as_stepped())
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
        save = self._saves.begin(step, [], explicit=True, taken=self._as_stepped())
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

    def _as_stepped(self) -> DeferredStep | None:
        """What the state was at the last step, which is not in memory; None if only the caller can know that it still
        is that now. UsageError if it is not."""
        progress = self._progress
        moment = progress.moment if progress.moment is not None and not progress.moment.too_large else None
        if progress.exchanged:
            why = "weights are exchanged for others at the moment, see pause()"
        else:
            why = self._torn() or ("" if moment is None else moment.gone())
        if why:
            raise UsageError(f"step {progress.step} cannot be saved any more: {why}. Call save() right after step()")
        return moment

    def _torn(self) -> str:
        """Why the last step cannot be had, if others than optimizers wrote to it while it was copied."""
        last = self._staged.last_of(self._progress.step)
        return str(last[1].error) if last is not None and last[1].written_by_others else ""

    def stage_last(self, end: float) -> str:
        """Have the last step in memory, if it is not there yet and nothing has changed since; else why it is not."""
        with self._session.stager.held():  # another thread may be training
            return self._stage_held(end)

    def _stage_held(self, end: float) -> str:
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
            if progress.moment is None and progress.within == step:  # a signal handler closes us, within step()
                self.take(step)
            if progress.moment is None:
                return self._why_not_kept()
            if why := progress.moment.gone():
                return why
            timeout_s = max(LEAST_S, end - time.monotonic())
            self._saves.begin(step, [], explicit=True, taken=progress.moment, timeout_s=timeout_s)
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
            return "weights were exchanged for others, see pause()"
        return self._torn()

    def _why_not_kept(self) -> str:
        last = self._staged.last_of(self._progress.step)
        if last is not None and last[1].error is not None:
            return str(last[1].error)
        if self._between is False:
            return "Memory(between=False) keeps nothing of steps that are not due"
        return "reading the state takes too long to keep what moves on within each step: see Memory(between=True)"

    # -- in a slot --

    def _may_defer(self) -> bool:
        """Whether that is worth it: measured now and then."""
        if self._between is not None:
            return self._between
        self._not_due += 1
        return self._defer_dear < KEEP_TRIES or self._not_due % DEFER_AGAIN == 0

    @property
    def _defer_share(self) -> float:
        memory = self._session.memory
        return memory.every.budget if memory is not None and isinstance(memory.every, Auto) else DEFER_SHARE

    def _defer(self, step: int) -> None:
        """Keep of a step that is not due what cannot be read later; the rest stays as it is until an optimizer begins.

        Nothing is kept aside where that would be much, as with a large frozen model.
        """
        reading = self._session.capture.read()
        self._progress.moment = self._moments.take(step, reading, self._session.capture)
        if sum(reading.layout.sizes[n] for n in reading.early) > DEFERRED:
            return
        values = json.dumps(reading.values, separators=(",", ":")).encode()
        if not self._has_memory(reading, len(values)):
            return
        self._session.supervisor.layouts.tell(reading.layout)
        save, attempt = self._saves.new(step, [])

        def on_end(job: PendingSnapshot) -> None:
            if job.place is not None:
                self._saves.on_ended(save, job, [])

        job = PendingSnapshot(
            attempt=attempt, reading=reading, values=values, finite=self._progress.finite, busy="skip", on_end=on_end
        )
        self._session.stager.postpone(job)
        self._progress.deferred = save, job

    def _has_memory(self, reading: Reading, values_size: int) -> bool:
        sizes = reading.layout.arrangement.data_size, values_size
        if not self._session.fits(*sizes):
            self._session.supervisor.memory.next.prepare(*sizes)
            with contextlib.suppress(CheckpointError):  # the next save says so
                if self._session.supervisor.memory.next.wait(0.0) is not None:
                    self._session.stager.do(lambda: self._session.supervisor.memory.take_prepared(0.0))
        return self._session.fits(*sizes)
