"""Where the training is: the step that it named last, what may be done there, and what memory holds of the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.arena import Arena
from ckpt.core.ipc.heartbeat import PAUSED
from ckpt.core.run.session import Session
from ckpt.core.snapshot.snapshot import PendingSnapshot
from ckpt.errors import CheckpointError, ClosedError, InvalidArgumentError, SkippedError, UsageError
from ckpt.saving import Save

TURN_S = 0.2  # between two looks at whether we were closed


class Progress:
    """Of one Checkpointer. Changed by the thread that trains; read by any."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.step: int | None = None
        self.stepped = False  # whether that is a step that was done since the last restore
        self.thread = 0  # that did it
        self.finite: bool | None = None  # what was said of it
        self.within: int | None = None  # the step that step() or save() deals with, or was interrupted in
        self.exchanged = False  # weights are others at the moment, as `not_training` was told
        self.restored = False
        self.torn = False  # a restore failed half-way
        self.closed = self.forked = False
        self.turn = threading.RLock()  # of whoever is in step(), save(), restore() or close()
        self._inside = False  # whether such a call is under way
        self._updates = 0  # optimizer steps before the last call of step()

    def begin(self, step: int, finite: bool | None) -> None:
        """The training has done this step."""
        session, stats = self._session, self._session.stalls.stats
        self.finite = finite
        self.step, self._updates = step, session.hook.count
        session.heartbeat.beat(step, stats.stalled_s, stats.saves, stats.skipped)
        self.stepped, self.exchanged, self.thread = True, False, threading.get_ident()
        stepped = session.hook.announced()
        session.capture.trust(stepped)
        session.unsaved.check(stepped)

    def went_back(self, step: int) -> None:
        """The state is that of a checkpoint."""
        self.step, self._updates = step, self._session.hook.count
        self.restored, self.torn = True, False
        self.stepped, self.exchanged, self.finite, self.within = False, False, None, None

    def starts(self, default: object) -> None:
        """There is no checkpoint."""
        self.restored, self.finite = True, None
        if isinstance(default, int):
            self.step = default

    @property
    def moved_on(self) -> bool:
        """Whether an optimizer has begun a further step."""
        return self._session.hook.count != self._updates

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Around the save of a step. If Ctrl-C ends it nothing has moved on, so close() may still stage the step."""
        outer, self.within = self.within, step
        try:
            yield
        except SkippedError:
            self.within = outer
            raise
        self.within = outer

    @contextlib.contextmanager
    def in_turn(self, *, alone: bool = False) -> Iterator[None]:
        """One thread at a time. Whoever closes us may wait for a thread that waits here, such as that of `on_fault`.

        `alone`: UsageError if a signal handler comes with it into another call, which would go on with another state.
        """
        while not self.turn.acquire(timeout=TURN_S):
            if self.closed or self.forked:
                self.check_usable()
        outer = self._inside
        try:
            if alone and outer:
                raise UsageError("restore() cannot come into step(), save() or close(), as from a signal handler")
            self._inside = True
            yield
        finally:
            self._inside = outer
            self.turn.release()

    @contextlib.contextmanager
    def pause(self, changes_state: bool) -> Iterator[None]:
        heartbeat, outer = self._session.heartbeat, self.exchanged
        if changes_state:
            self.exchanged = True
        before, began = heartbeat.state, time.monotonic()
        heartbeat.touch(PAUSED)
        try:
            yield
            self.exchanged = outer  # after an exception they may be so still
        finally:
            if not self.forked:  # in a child it is not there
                heartbeat.paused(time.monotonic() - began if before != PAUSED else 0.0)
                heartbeat.touch(before)

    # -- checks --

    def check_not_forked(self) -> None:
        if self.forked:
            raise ClosedError("this process was forked from the trainer: only the trainer saves")

    def check_usable(self, *, restoring: bool = False) -> None:
        self.check_not_forked()
        if self.closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        self._session.errors.check_owner()
        if restoring:
            return
        if self.torn:
            raise UsageError("the last restore failed half-way, so the state is not one of any step: restore again")
        if self._session.ownership.has_checkpoints and not self.restored:
            raise UsageError(
                f"{self._session.settings.places} holds checkpoints: call restore() before the first step, or use "
                "another location"
            )

    def check_next(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise InvalidArgumentError(
                f"step={step!r}: it must be the number of completed steps, a whole number from 0"
            )
        if self.step is not None and step <= self.step:
            raise UsageError(f"step {step} cannot follow step {self.step}: steps only go up (restore() goes back)")
        capture = self._session.capture
        silent = capture.has_scaler or capture.has_unguarded  # steps may be skipped, or run no hooks
        accumulating = self._session.hook.count > 0 and not self.moved_on and not silent
        if accumulating and capture.holds_gradients():
            raise UsageError(
                f"no optimizer has stepped since step {self.step}: call step() once per optimizer step, not in the "
                "middle of gradient accumulation. After a batch left out on purpose, drop its gradients first"
            )

    def check_same(self) -> None:
        if self.moved_on:
            raise UsageError(f"training went on after step {self.step}: call save() right after step()")


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
        save._set_staged()
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
            self.last[0]._set_failed(ClosedError(f"closed before step {self._progress.step} was staged"))
            self.last = None

    def forget(self) -> None:
        """Nothing keeps the memory any more."""
        self.last = self.newest = None
