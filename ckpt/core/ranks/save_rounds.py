"""How ranks agree on what to save out of turn, without a collective.

Rounds are numbered. Who posts a round first has called it, by compare-and-set in the job's key-value store; everyone
else hears of it by looking now and then, in a thread that the training never waits for. A round says what to do:

    step    save the first step that is not below this one: the caller's step + 2, and more where looking takes longer
    ring    persist what is in memory, since somebody's main thread cannot come

A rank for which the step has passed already when it hears of it calls another round.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.errors import PeerError
from ckpt.events import log

LOOK_S = 0.25  # between two looks
LOOKS_PER_S = 2000  # of all ranks together, that the host of the store is asked to answer
AHEAD = 2  # steps


@dataclass(frozen=True, slots=True)
class Round:
    """`step`: -1 for the ring; `why`: what made the caller call; `grace_s`: seconds it has."""

    number: int
    rank: int
    step: int
    why: str
    grace_s: float


def step_ahead(step: int, usual_s: float, look_s: float) -> int:
    """The step that all ranks can still save, if the caller has just done `step`."""
    return step + AHEAD + (math.ceil(2 * look_s / usual_s) if usual_s > 0 else 0)


class SaveRounds:
    """This rank's part. `store`: a connection of its own to the key-value store; None for a single rank."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int, on_round: Callable[[Round], None]) -> None:
        self._store, self._prefix, self._rank, self._on_round = store, prefix, rank, on_round
        self.look_s = max(LOOK_S, size / LOOKS_PER_S) if size > 1 else 0.0
        self.pause_s = self.look_s  # between two looks at present
        self._next = 0
        self._mine: Round | None = None  # the last one that we have called, or tried to
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.reachable = True
        self._thread: threading.Thread | None = None
        if size > 1:
            self._thread = threading.Thread(target=self._look, name="ckpt-save-rounds", daemon=True)
            self._thread.start()

    def call(self, step: int, why: str, grace_s: float) -> Round:
        """Post a round, or take part in the one that another rank posted at the same time; `on_round` hears of others.

        PeerError if the store cannot be reached; it may take as long as the store takes to say so.
        """
        mine = Round(self._next, self._rank, step, why, grace_s)
        if self._thread is None:
            self._next += 1
            return mine
        if not self.reachable:
            raise PeerError("the store of the job cannot be reached, so that the other ranks do not hear of it")
        self._mine = mine
        try:
            found = self._store.compare_set(f"{self._prefix}{mine.number}", "", json.dumps(asdict(mine)))
        except (RuntimeError, OSError) as error:
            self.reachable = False
            raise PeerError(f"the store of the job cannot be reached: {str(error).partition(chr(10))[0]}") from error
        return self._heard(found)

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _heard(self, raw: bytes) -> Round:
        """Take note of a round, once. Our own may be seen by a look before `call` knows that it is ours."""
        found = Round(**json.loads(raw))
        with self._lock:
            new = found.number >= self._next
            self._next = max(self._next, found.number + 1)
        if new and found != self._mine:
            self._on_round(found)
        return found

    def _look(self) -> None:
        while not self._stopped.wait(self.pause_s):
            began = time.monotonic()
            try:
                key = f"{self._prefix}{self._next}"
                if self._store.check([key]):
                    self._heard(self._store.get(key))
            except (RuntimeError, OSError, ValueError, TypeError) as error:
                with contextlib.suppress(Exception):
                    log.info("other ranks' triggers cannot be heard: %s", str(error).partition("\n")[0])
                self.reachable = False
                return
            # Where the store is slow, it is asked less often.
            self.pause_s = max(self.look_s, 20 * (time.monotonic() - began))
