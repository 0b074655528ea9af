"""What memory holds of this run, or is about to hold."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from ckpt.errors import CheckpointError, ClosedError
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import Arena
from ckpt.save import Save
from ckpt.trainer.progress import Progress
from ckpt.trainer.session import Session
from ckpt.trainer.staging.snapshot import PendingSnapshot

QUEUED_S = 30.0  # for what the staging thread has to do


class StagedStep(NamedTuple):
    """`place`: arena and slot."""

    save: Save
    attempt: Attempt
    place: tuple[Arena, int]


class Staged:
    """Of one Checkpointer. `last`: the save begun last, in memory or on its way there."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session, self._progress = session, progress
        self.last: tuple[Save, PendingSnapshot] | None = None
        self.newest: StagedStep | None = None  # staged, or restored from there
        self.sound: StagedStep | None = None  # the newest that is not broken, if that is
        self.restored: tuple[Arena, int] | None = None  # the place that was restored from, pinned

    def last_of(self, step: int | None) -> tuple[Save, PendingSnapshot] | None:
        """The last save, if it is of that step."""
        return self.last if self.last is not None and self.last[0].step == step else None

    def newest_step(self, timeout_s: float) -> int | None:
        """The newest step that memory holds; waits for a copy that is under way."""
        if (last := self.last_of(self._progress.step)) is not None:
            save, job = last
            job.copied.wait(timeout_s)
            if job.place is not None:
                return save.step
        newest = self.newest
        return None if newest is None else newest.save.step

    def sealed(self) -> list[tuple[str, bool]]:
        """What memory holds of this history, and whether the training was sound then."""
        arena = self._session.stager.arena
        broken = {label.attempt for _, label in (arena.sealed() if arena is not None else ()) if label.finite is False}
        return [(str(attempt), attempt not in broken) for attempt in self._session.supervisor.held.sealed()]

    def held(self, attempt: Attempt) -> StagedStep | None:
        arena, slot = self._session.stager.arena, self._session.supervisor.held.sealed().get(attempt)
        if arena is None or slot is None:
            return None
        save = Save(attempt.step, str(attempt), [])
        save.set_staged()
        return StagedStep(save, attempt, (arena, slot))

    def unpin_restored(self) -> None:
        if self.restored is not None:
            arena, slot = self.restored
            self.restored = None
            self._session.stager.slots.unpin(arena.id, slot)

    def last_is_under_way(self, timeout_s: float) -> bool:
        """Whether the last save comes into memory by itself, or has. Not one that step() was about to submit, when a
        signal handler came, which is here."""
        return self.last is not None and self._has_begun(self.last[1], timeout_s) and self.last[1].error is None

    def _has_begun(self, job: PendingSnapshot, timeout_s: float) -> bool:
        if not job.begun:
            with contextlib.suppress(CheckpointError):
                self._session.stager.do(lambda: None, timeout_s)  # what was queued has begun after that
        return job.begun

    def forgo_begun(self) -> None:
        """A snapshot that a signal handler, which closes us within `step()`, has kept from being staged."""
        if self.last is not None and not self._has_begun(self.last[1], QUEUED_S):
            self.last[0].set_failed(ClosedError(f"closed before step {self._progress.step} was staged"))
            self.last = None

    def forget(self) -> None:
        """Nothing keeps the memory any more."""
        self.last = self.newest = None
