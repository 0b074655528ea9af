"""How a snapshot leaves a device: beside the training, before it goes on, or from a copy that the device made for it.

Beside it is the best as long as copies do not disturb kernels: they share the bus and the memory of the device, and
some trainings have been seen to take several times as long meanwhile. So "auto" tries both on the run's own steps, now
and then, and keeps what takes less.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from ckpt.events import log
from ckpt.units import duration

TRIES = 8  # saves in each way
AGAIN = 512  # saves until it is tried again
WORTH = 0.02  # of a step: by so much "wait" has to be better, since it is noise that it is at all


class StageMode:
    """Of one trainer; for the thread that trains."""

    def __init__(self, wanted: str = "auto") -> None:
        self._now = "overlap" if wanted == "auto" else wanted
        self._auto = wanted == "auto"
        self._took: dict[str, deque[float]] = {mode: deque(maxlen=TRIES) for mode in ("overlap", "wait")}
        self._saves = 0
        self._last: tuple[int, float] | None = None

    def next(self, step: int) -> str:
        """How this one goes: "overlap", "wait" or "device". Called at every save from a device."""
        if self._auto:
            self._measure(step, time.perf_counter())
            self._saves += 1
            if self._saves == TRIES:
                self._now = "wait"
            elif self._saves == 2 * TRIES:
                self._now = self._better()
            elif self._saves == AGAIN:
                self._saves, self._now = 0, "overlap"
        return self._now

    def _measure(self, step: int, now: float) -> None:
        """A step's time, with what the save before this one has cost."""
        if self._last is not None and step > self._last[0]:
            self._took[self._now].append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)

    def _better(self) -> str:
        beside, before = (median(self._took[mode] or [0.0]) for mode in ("overlap", "wait"))
        better = "wait" if before < beside * (1 - WORTH) else "overlap"
        log.info(
            "snapshots leave the device %s: a step takes %s so, and %s the other way",
            "beside training" if better == "overlap" else "before training goes on",
            duration(min(beside, before) if better == "wait" else beside),
            duration(beside if better == "wait" else before),
        )
        return better
