"""How a snapshot leaves a device: beside the training, all at once or paced, or before it goes on.

Beside it is the best as long as copies do not disturb kernels: they share the bus and the memory of the device, and
some trainings have been seen to take several times as long meanwhile. Paced, in small pieces with pauses between, they
leave room for what else wants to cross the bus: batches, a loss, other ranks' messages. So these ways are tried on the
run's own steps, now and then, and the one that takes least is kept.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from ckpt.events import log
from ckpt.units import duration

WAYS = ("overlap", "paced", "wait")  # the simplest first
TRIES = 8  # saves in each way
AGAIN = 512  # saves until it is tried again
WORTH = 0.02  # of a step: by so much another way has to be better than the first one, else it may be noise


class StageMode:
    """Of one trainer; for the thread that trains."""

    def __init__(self) -> None:
        self._now = WAYS[0]
        self._took: dict[str, deque[float]] = {way: deque(maxlen=TRIES) for way in WAYS}
        self._saves = 0
        self._last: tuple[int, float] | None = None

    def next(self, step: int) -> str:
        """How this one goes: one of WAYS. Called at every save from a device."""
        self._measure(step, time.perf_counter())
        self._saves = (self._saves + 1) % AGAIN
        tried, rest = divmod(self._saves, TRIES)
        if rest == 0 and tried < len(WAYS):
            self._now = WAYS[tried]
        elif rest == 0 and tried == len(WAYS):
            self._now = self._best()
        return self._now

    def _measure(self, step: int, now: float) -> None:
        """A step's time, with what the save before this one has cost."""
        if self._last is not None and step > self._last[0]:
            self._took[self._now].append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)

    def _best(self) -> str:
        """What takes least, if that is worth it."""
        takes = {way: median(self._took[way] or [0.0]) for way in WAYS}
        best = min(WAYS, key=takes.__getitem__)
        if takes[best] >= takes[WAYS[0]] * (1 - WORTH):
            best = WAYS[0]
        said = ", ".join(f"{way!r} {duration(takes[way])}" for way in WAYS)
        log.info("snapshots leave the device by %r: a step with a save takes, by the ways there are: %s", best, said)
        return best
