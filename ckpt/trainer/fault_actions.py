"""What may be done to a run at a fault, without its main thread: see `FaultActions`."""

from __future__ import annotations

import threading
import time

from ckpt.format.manifest import Attempt
from ckpt.trainer.progress import Progress
from ckpt.trainer.saves import Saves
from ckpt.trainer.session import Session
from ckpt.trainer.staged import Staged
from ckpt.trainer.step_keeper import StepKeeper

LIVE_S = 10.0  # for a copy of the running state


class LiveRun:
    """Of one Checkpointer."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, saves: Saves, keeper: StepKeeper) -> None:
        self._session, self._progress = session, progress
        self._staged, self._saves, self._keeper = staged, saves, keeper

    def in_memory(self, timeout_s: float) -> int | None:
        return self._staged.newest_step(timeout_s)

    def copy_live(self) -> int | None:
        progress = self._progress
        deferred, unmoved = progress.deferred, progress.unmoved()
        if threading.get_ident() == progress.thread:  # it is not training meanwhile, and so need not be held up
            self._keeper.stage_last(time.monotonic() + LIVE_S)
            return progress.step if self.in_memory(0.0) == progress.step else None
        if deferred is None or deferred[0].step != progress.step or progress.torn:
            return None
        progress.deferred = None
        save, job = deferred
        return save.step if self._session.stager.complete(job, unmoved, LIVE_S) else None

    def give_up(self, attempt: Attempt) -> None:
        if not self._saves.is_sent(attempt.step):
            rank = self._session.world.rank
            self._session.supervisor.retract(attempt, f"rank {rank} had passed step {attempt.step} by then")

    def give_memory_back(self) -> int:
        # Of several ranks one may be a step behind: what is left must still hold a step that all have.
        stager = self._session.stager
        return stager.give_up_slot() if self._session.world.size == 1 else stager.give_up_slot(3)
