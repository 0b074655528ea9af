"""Measures the training time that saving costs, by comparing steps. Pure.

A step during a snapshot copy is compared with steps without any, and a step during a checkpoint write with otherwise
equal steps. Durations vary, so trimmed means over dozens of steps are compared. Without comparable steps the cost is
unknown: if every step takes a snapshot, only the wait is known.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

STEPS, SAVES = 128, 16  # remembered values of each kind
STALE = 512  # steps after which a value is outdated, because trainings change
ANEW = 8  # steps after which a mean is computed again
ENOUGH = 4  # values needed for a mean
MANY = 10  # from this many values on, the extremes are left out; with fewer, the median is used
TRIM = 0.1  # the share of values left out of a mean at each end
LEAST = 0.1  # minimum share of a save's duration that counts as its cost
FAR = 3.0  # if a step took longer than this many times the maximum effect of saving, something else slowed it

Kind = tuple[bool, tuple[str, ...]]  # of a step: True if a snapshot was taken, and the tiers that were written to


class Meter:
    """Measures one job attempt. Call it for each step in order, and at the end of each save."""

    def __init__(self) -> None:
        self._number = 0
        self._known: dict[Kind, tuple[int, float | None]] = {}  # durations of steps, and since when
        self._steps: dict[Kind, deque[tuple[int, float]]] = {}
        self._copied: deque[tuple[float, tuple[str, ...]]] = deque(maxlen=STEPS)  # steps with a snapshot
        self._stalls: deque[float] = deque(maxlen=STEPS)
        self._open: dict[str, float] = {}  # the cost so far of each unfinished write
        self._taken: dict[str, deque[float]] = {}  # the cost of each save
        self._lasted: dict[str, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=STEPS)

    def step(
        self, seconds: float, stalled: float, snapshot: bool, writing: Iterable[str], beside_s: float = math.inf
    ) -> float:
        """Record a step. Return how much longer it took than a step without saves, without the wait; 0 if unknown.

        `beside_s`: the time during which something was written. Saving cannot slow a step by more than that, and a copy
            cannot slow it by more than one step. A much longer step, for example with an evaluation, had other reasons.
        """
        beside = tuple(sorted(writing))
        quiet, alike = self.quiet_s, self._usual((snapshot, ()))
        self._number += 1
        self._all.append(seconds)
        if snapshot:
            self._copied.append((seconds, beside))
            self._stalls.append(stalled)
        self._steps.setdefault((snapshot, beside), deque(maxlen=STEPS)).append((self._number, seconds))
        if beside and alike is not None:
            more = _bounded(seconds - alike, beside_s)
            for name in beside:
                self._open[name] = self._open.get(name, 0.0) + more / len(beside)
        if not beside and not snapshot:
            return 0.0
        if quiet is not None:
            return _bounded(seconds - stalled - quiet, (beside_s if beside else 0.0) + quiet * snapshot)
        return _bounded(seconds - alike, beside_s) if beside and alike is not None else 0.0

    def saved(self, name: str, lasted_s: float | None) -> None:
        """Record the end of a save to a tier, `lasted_s` after it was ordered; None if it failed. Its steps must have
        been recorded before."""
        taken = self._open.pop(name, None)
        if lasted_s is None:
            return
        self._lasted.setdefault(name, deque(maxlen=SAVES)).append(lasted_s)
        if taken is not None:
            self._taken.setdefault(name, deque(maxlen=SAVES)).append(taken)

    @property
    def step_s(self) -> float | None:
        """Return the median duration of all steps."""
        return statistics.median(self._all) if len(self._all) >= ENOUGH else None

    @property
    def quiet_s(self) -> float | None:
        """Return the duration of a step without any save."""
        return self._usual((False, ()))

    def _usual(self, kind: Kind) -> float | None:
        """Return the mean duration of such a step."""
        known = self._known.get(kind)
        if known is None or self._number >= known[0] + ANEW:
            steps = self._steps.get(kind, ())
            usual = _mean([seconds for number, seconds in steps if number > self._number - STALE])
            known = self._known[kind] = self._number, usual
        return known[1]

    @property
    def snapshot_s(self) -> float | None:
        """Return the training time that a snapshot costs, at least the wait."""
        waited, more = _mean(self._stalls), self._more()
        return None if waited is None or len(more) < ENOUGH else max(waited, middle(more))

    @property
    def snapshot_unsure_s(self) -> float:
        """Return the standard error of `snapshot_s`."""
        more, plain = self._more(), [seconds for _, seconds in self._steps.get((False, ()), ())]
        return math.hypot(*(statistics.stdev(one) / len(one) ** 0.5 for one in (more, plain) if len(one) > 1))

    def _more(self) -> list[float]:
        """Return the extra time of steps with a snapshot, compared with steps without one and with the same writes."""
        base = {beside: self._usual((False, beside)) for beside in {beside for _, beside in self._copied}}
        return [seconds - known for seconds, beside in self._copied if (known := base.get(beside)) is not None]

    @property
    def snapshots(self) -> int:
        """Return the number of snapshots in that measurement."""
        return len(self._copied)

    def save_s(self, name: str) -> float | None:
        """Return the training time that a checkpoint in that tier costs, without its snapshot. It is at least a share
        of the save's duration, because an apparent cost of zero would mean to save all the time. If every step has a
        write during it, that share is all that is known."""
        least, taken = LEAST * self.write_s(name), self._taken.get(name, ())
        if taken:
            return max(middle(taken), least)
        return least if len(self._lasted.get(name, ())) >= ENOUGH else None

    def save_unsure_s(self, name: str) -> float:
        """Return the standard error of `save_s`."""
        taken = self._taken.get(name, ())
        return statistics.stdev(taken) / len(taken) ** 0.5 if len(taken) > 1 else 0.0

    def write_s(self, name: str) -> float:
        """Return the time until a save is durable."""
        lasted = self._lasted.get(name)
        return statistics.median(lasted) if lasted else 0.0

    def saves(self, name: str) -> int:
        return len(self._taken.get(name) or self._lasted.get(name) or ())


def middle(values: Iterable[float]) -> float:
    """Return the mean without the extremes, or the median of few values."""
    ordered = sorted(values)
    if len(ordered) < MANY:
        return statistics.median(ordered)
    cut = int(TRIM * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _mean(values: Sequence[float] | deque[float]) -> float | None:
    return middle(values) if len(values) >= ENOUGH else None


def _bounded(slowed: float, most: float) -> float:
    return 0.0 if slowed > FAR * most else min(slowed, most)
