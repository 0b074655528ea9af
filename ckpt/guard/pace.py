"""Detects a hang of a training loop from its heartbeat and the usual time of a step. The caller reads both."""

from __future__ import annotations

import statistics
from collections import deque

from ckpt.core.ipc.heartbeat import TRAINING, Beat
from ckpt.triggers import OnHang

ENOUGH = 5  # minimum number of steps before a hang can be detected
_MEANS = 64
_GAPS = 32
_HOLE = 8.0  # this watch was stopped if no check took place for _HOLE times the usual gap, and for at least _HOLE_S:
_HOLE_S = 1.0


class StepPace:
    """Measures the usual time of a step from the heartbeat, and detects when a step exceeds it."""

    def __init__(self, trigger: OnHang) -> None:
        self._trigger = trigger
        self._gaps = deque[float](maxlen=_GAPS)  # seconds between consecutive checks
        self._looked: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._means = deque[float](maxlen=_MEANS)  # seconds per step, each averaged over the steps between two checks
        self._steps = 0
        self._usual: float | None = None
        self._last: Beat | None = None
        self._from: Beat | None = None  # start of the current measurement, if only training has been seen since
        self._excused = 0.0  # seconds since the last sign of life in which this watch was stopped

    @property
    def usual_s(self) -> float | None:
        """Return the usual seconds per step, or None until `ENOUGH` steps were seen."""
        return self._usual if self._steps >= ENOUGH else None

    @property
    def limit_s(self) -> float | None:
        """Return the seconds after which a step counts as a hang, or None until `ENOUGH` steps were seen."""
        usual = self.usual_s
        return None if usual is None else max(self._trigger.min_s, self._trigger.factor * usual)

    def look(self, now: float, beat: Beat) -> float | None:
        """Check the heartbeat; call this a few times a second. If the seconds since the last sign of life exceed the
        limit, return them, else None. `now`: time of the monotonic clock, like `beat.when`."""
        if self._last is not None and beat.calls < self._last.calls:
            self._forget()  # the counter has decreased, so the beat is from another trainer
        self._excuse(now, beat)
        self._learn(beat)
        self._last = beat
        silent, limit = now - beat.when - self._excused, self.limit_s
        return silent if beat.state == TRAINING and limit is not None and silent > limit else None

    def _excuse(self, now: float, beat: Beat) -> None:
        """Do not count the time in which this watch itself was stopped against the trainer."""
        looked, self._looked = self._looked, now
        if self._last is None or beat.when != self._last.when:
            self._excused = 0.0
        if looked is None or now < looked:
            return
        gap = now - looked
        if not self._gaps or gap > max(_HOLE_S, _HOLE * statistics.median(self._gaps)):
            self._excused += max(0.0, now - max(looked, beat.when))
        self._gaps.append(gap)

    def _learn(self, beat: Beat) -> None:
        last, start = self._last, self._from
        if beat.state != TRAINING:
            self._from = None
        elif last is None or beat.calls != last.calls:  # a step has ended, so `beat.when` is the time at which it ended
            if last is not None and start is not None and beat.calls > start.calls and beat.when > start.when:
                self._steps += beat.calls - start.calls
                self._means.append((beat.when - start.when) / (beat.calls - start.calls))
                self._usual = statistics.median(self._means)
            self._from = beat
        elif beat.when != last.when:  # a sign of life without a step: the trainer did something other than a step
            self._from = None
