"""Another writer, when the one that we had has died."""

from __future__ import annotations

import contextlib
import time

from ckpt.errors import DeadlineError, FencedError, NameTakenError, StoreError, WriterError
from ckpt.events import log
from ckpt.ipc import requests
from ckpt.trainer.supervise import find_writer
from ckpt.trainer.supervise.current_writer import CurrentWriter
from ckpt.trainer.supervise.find_writer import WriterFinder
from ckpt.trainer.supervise.opening import RunOpener
from ckpt.trainer.supervise.writer_client import WriterClient

RESPAWN_LIMIT = 3  # writers that die within RESPAWN_WINDOW_S, before we stop trying
RESPAWN_WINDOW_S = 60.0


class WriterRespawner:
    """Of one rank."""

    def __init__(self, writer: CurrentWriter, finder: WriterFinder, run: RunOpener) -> None:
        self._writer, self._finder, self._run = writer, finder, run
        self._deaths: list[float] = []
        self._respawns = 0

    def start(self) -> WriterClient:
        """One that has opened the run, and knows nothing else yet. WriterError if one after the other dies, FencedError
        if the run is another's by now."""
        while (fresh := self._start_one()) is None:
            log.warning("the new writer cannot go on either")
        return fresh

    def _start_one(self) -> WriterClient | None:
        """None if it died of that, or the store did not answer."""
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < RESPAWN_WINDOW_S] + [now]
        if len(self._deaths) > RESPAWN_LIMIT:
            raise WriterError(f"the writer died {len(self._deaths)} times within {RESPAWN_WINDOW_S:g} s")
        self._respawns += 1
        try:
            fresh = self._spawn_in_turn()
        except WriterError as error:
            log.warning("%s", error)
            return None
        try:
            self._run.open_again(fresh, writers=self._respawns)
        except (WriterError, StoreError, DeadlineError) as error:
            log.warning("%s", error)
            fresh.send(requests.Close())
            fresh.close()
            return None
        return fresh

    def _spawn_in_turn(self) -> WriterClient:
        """Once whoever has the name goes: one of ours that is slow to end, or of a start that came to nothing.
        FencedError if the run is another's by now: who has lost it must not stand in the way."""
        end = time.monotonic() + find_writer.MEET_S
        while True:
            if self._writer.lost is not None:
                raise self._writer.lost
            if not self._finder.is_taken():
                with contextlib.suppress(NameTakenError):
                    return self._finder.spawn(next_one=True)
            self._check_mine()
            if self._writer.closing or time.monotonic() > end:
                raise WriterError("another writer has the name of this run")
            time.sleep(0.1)

    def _check_mine(self) -> None:
        """FencedError if the writer that has the name serves an owner that is none of ours."""
        found = self._finder.whose()
        if found is not None and not self._run.is_ours(found.owner):
            raise FencedError(f"process {found.trainer} on this machine has opened this run")
