"""What becomes of saves on their way to durable tiers, as the user is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from ckpt.errors import CheckpointError, DeadlineError, FencedError, SaveError, SkippedError
from ckpt.events import log
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import Arena
from ckpt.save import Save
from ckpt.subscribers import publish
from ckpt.trainer.cadence_sync import TOO_LATE
from ckpt.trainer.session import Session
from ckpt.trainer.staged import StagedStep
from ckpt.trainer.supervise.writes import WriteInFlight
from ckpt.units import decimal, duration


class TierWrites:
    """Of one Checkpointer. Any thread may call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()  # a signal handler may close us meanwhile
        self._active: list[Save] = []

    def follow(self, save: Save) -> None:
        """`wait` waits for it."""
        with self._lock:
            self._active = [*(s for s in self._active if s is not save and s.unfinished()), save]

    def wait(self, timeout_s: float | None = None, step: int | None = None) -> None:
        """Until every save that is followed, or that of one step, has ended well or not. DeadlineError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            active = [save for save in self._active if step in (None, save.step)]
        for save in active:
            for future in save.unfinished():
                try:
                    future.exception(None if end is None else max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise DeadlineError(f"saves are not finished after {timeout_s:g} s; they go on") from None

    def write(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tier: int) -> None:
        """Have the writer write it there."""
        url, began = self._session.tiers[tier].url, time.monotonic()

        def done(error: CheckpointError | None) -> None:
            if error is None:
                self._say_committed(save, url, time.monotonic() - began, write)
                save.set_committed(url)
            else:
                self._on_failed(save, url, error)

        write = WriteInFlight(attempt, *place, tier, done)
        self._session.supervisor.write(write)

    def write_also(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tier: int) -> None:
        """To a tier that it was not on its way to. Cut off by Ctrl-C, nobody waits for it, and close() tries again."""
        url = self._session.tiers[tier].url
        try:
            save.add_tier(url)
            self.write(save, attempt, place, tier)
        except BaseException as error:
            save.cut_off(url, SaveError(f"step {save.step} was not written to {url}: {error!r}"))
            raise

    def write_missing(self, staged: StagedStep, tiers: Sequence[int]) -> None:
        """To those of these tiers that it is not on its way to."""
        for i in tiers:
            if staged.save.misses(self._session.tiers[i].url):
                self.follow(staged.save)
                self.write_also(*staged, i)

    def _on_failed(self, save: Save, url: str, error: CheckpointError) -> None:
        publish("failed", save.step, tier=url, error=str(error))
        # A further tier is slow, or another rank: no reason to disturb the training.
        if isinstance(error, SkippedError) or TOO_LATE in str(error):
            self._session.stalls.stats.skipped += 1
            log.warning("%s", error)
            save.set_failed(error, url)
            return
        if not isinstance(error, FencedError):
            others = [other for other in save.tiers if other != url and save.written(other)]
            where = f"in {others[0]}" if others else "in memory"
            error = SaveError(f"step {save.step} was not written to {url}: {error}. It is still {where}")
        self._session.errors.note(error, save)  # before anybody who waits for the save goes on
        save.set_failed(error, url)

    def _say_committed(self, save: Save, url: str, seconds: float, write: WriteInFlight) -> None:
        publish("committed", save.step, tier=url, seconds=seconds, nbytes=write.nbytes, stored=write.nbytes_stored)
        world = self._session.world
        level = logging.INFO if world.rank == 0 else logging.DEBUG
        of = "" if world.size == 1 else f" (of rank {world.rank})"
        sizes = f"{decimal(write.nbytes)} as {decimal(write.nbytes_stored)}{of}"
        log.log(level, "step %d committed to %s in %s, %s", save.step, url, duration(seconds), sizes)
