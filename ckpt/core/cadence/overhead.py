"""What saving takes from training, found out while it happens, by comparing steps. Pure.

A step beside which a snapshot is copied is compared with those beside which none was, a step beside which a checkpoint
is written with those that are like it otherwise. Times vary, so that means over some dozens of steps are compared,
without their extremes. What nothing can be compared with is not known: if every step takes a snapshot, only the wait.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

STEPS, SAVES = 128, 16  # of each kind that are remembered
STALE = 512  # steps, after which one says nothing any more: trainings change
ANEW = 8  # steps, after which what they take is worked out anew
ENOUGH = 4  # of them, that say something
MANY = 10  # values, of which the extremes can be left out; of fewer the median is taken
TRIM = 0.1  # of the values at each end, which are left out of a mean
LEAST = 0.1  # of the time that a save lasts, that it takes from training
FAR = 3.0  # times what saving can have done to a step at the most: then it was something else

Kind = tuple[bool, tuple[str, ...]]  # of a step: whether a snapshot was taken, and the places that were written to


class Meter:
    """Of one incarnation. Feed it the steps in order, and the ends of saves."""

    def __init__(self) -> None:
        self._number = 0
        self._known: dict[Kind, tuple[int, float | None]] = {}  # what steps take, and when that was found
        self._steps: dict[Kind, deque[tuple[int, float]]] = {}
        self._copied: deque[tuple[float, tuple[str, ...]]] = deque(maxlen=STEPS)  # steps with a snapshot
        self._stalls: deque[float] = deque(maxlen=STEPS)
        self._open: dict[str, float] = {}  # what writes that have not ended have taken so far
        self._taken: dict[str, deque[float]] = {}  # what each save has
        self._lasted: dict[str, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=STEPS)

    def step(
        self, seconds: float, stalled: float, snapshot: bool, writing: Iterable[str], beside_s: float = math.inf
    ) -> float:
        """One step. How much longer it took than one beside which nothing is saved, without the wait; 0 if unknown.

        `beside_s`: how long something was written beside it. Saving cannot slow a step by more than that, nor can a
        copy by more than a step: what took much longer, such as an evaluation, had other reasons.
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
        """A checkpoint is complete in a place, `lasted_s` after it was ordered, and its steps have been fed; None: it
        failed."""
        taken = self._open.pop(name, None)
        if lasted_s is None:
            return
        self._lasted.setdefault(name, deque(maxlen=SAVES)).append(lasted_s)
        if taken is not None:
            self._taken.setdefault(name, deque(maxlen=SAVES)).append(taken)

    @property
    def step_s(self) -> float | None:
        """What a step takes with all that is going on: the median."""
        return statistics.median(self._all) if len(self._all) >= ENOUGH else None

    @property
    def quiet_s(self) -> float | None:
        """What a step takes beside which nothing is saved."""
        return self._usual((False, ()))

    def _usual(self, kind: Kind) -> float | None:
        """What such a step takes."""
        known = self._known.get(kind)
        if known is None or self._number >= known[0] + ANEW:
            steps = self._steps.get(kind, ())
            usual = _mean([seconds for number, seconds in steps if number > self._number - STALE])
            known = self._known[kind] = self._number, usual
        return known[1]

    @property
    def snapshot_s(self) -> float | None:
        """What a snapshot takes from training, the wait included: that is the least, however the steps vary."""
        waited, more = _mean(self._stalls), self._more()
        return None if waited is None or len(more) < ENOUGH else max(waited, middle(more))

    @property
    def snapshot_unsure_s(self) -> float:
        """The standard error of that."""
        more, plain = self._more(), [seconds for _, seconds in self._steps.get((False, ()), ())]
        return math.hypot(*(statistics.stdev(one) / len(one) ** 0.5 for one in (more, plain) if len(one) > 1))

    def _more(self) -> list[float]:
        """How much longer steps with a snapshot took than those without, that had the same beside them."""
        base = {beside: self._usual((False, beside)) for beside in {beside for _, beside in self._copied}}
        return [seconds - known for seconds, beside in self._copied if (known := base.get(beside)) is not None]

    @property
    def snapshots(self) -> int:
        """From how many that is known."""
        return len(self._copied)

    def save_s(self, name: str) -> float | None:
        """What a checkpoint in that place takes from training, beside the snapshot that it is made from. A share of the
        time that it lasts is the least: at a cost that only looks like nothing one would save all the time. If it is
        written beside every step, nothing can be compared, and that share is what is known."""
        least, taken = LEAST * self.write_s(name), self._taken.get(name, ())
        if taken:
            return max(middle(taken), least)
        return least if len(self._lasted.get(name, ())) >= ENOUGH else None

    def save_unsure_s(self, name: str) -> float:
        """The standard error of that."""
        taken = self._taken.get(name, ())
        return statistics.stdev(taken) / len(taken) ** 0.5 if len(taken) > 1 else 0.0

    def write_s(self, name: str) -> float:
        """How long it takes until it is durable."""
        lasted = self._lasted.get(name)
        return statistics.median(lasted) if lasted else 0.0

    def saves(self, name: str) -> int:
        return len(self._taken.get(name) or self._lasted.get(name) or ())


def middle(values: Iterable[float]) -> float:
    """The mean without the extremes; of few values the median."""
    ordered = sorted(values)
    if len(ordered) < MANY:
        return statistics.median(ordered)
    cut = int(TRIM * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _mean(values: Sequence[float] | deque[float]) -> float | None:
    return middle(values) if len(values) >= ENOUGH else None


def _bounded(slowed: float, most: float) -> float:
    return 0.0 if slowed > FAR * most else min(slowed, most)
