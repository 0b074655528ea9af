"""What is saved at each step: by the intervals of memory and tiers, and by orders (`ckpt.core.ranks.orders`).

The training loop calls `decide` once for each step. Other threads change the plan by `order` and `change`, which return
the steps that were decided too early for that. One lock makes a decision and a change exclude each other: a step is
either decided by the change, or returned by it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

REMEMBERED = 1024  # decided steps, many more than one rank is ahead of another


@dataclass(frozen=True, slots=True)
class Change:
    """Intervals from a step on, in steps; 0 for never. `memory`: of snapshots; `tiers`: of checkpoints in each tier."""

    step: int
    memory: int
    tiers: tuple[int, ...]

    def tiers_due(self, step: int) -> set[int]:
        return {i for i, every in enumerate(self.tiers) if every > 0 and step % every == 0}


@dataclass(slots=True)
class Decision:
    """What is saved at a step. `tiers`: their numbers; `ordered`: an order wants the step, in all of them; `memory`: a
    snapshot is due."""

    step: int
    tiers: set[int]
    memory: bool
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """A step that was decided too early for a change or an order. `has`: tiers that it went to; `wants`: to which it
    should have gone."""

    step: int
    has: set[int]
    wants: set[int]


class SavePlan:
    """Plan the saves of one rank. `newest`: the intervals that were set last."""

    def __init__(self, memory: int, tiers: Sequence[int]) -> None:
        self._lock = threading.RLock()  # a signal handler may close us within step()
        self._everywhere = set(range(len(tiers)))
        self.reset(Change(-1, memory, tuple(tiers)))

    def reset(self, change: Change) -> None:
        """Begin again with these intervals, because step numbers come again: no step is decided, none is ordered."""
        with self._lock:
            self.newest = Change(-1, change.memory, change.tiers)
            self._changes = [self.newest]
            self._ordered: list[int] = []  # each is served by the first step that is not below it
            self._decided: deque[Decision] = deque(maxlen=REMEMBERED)
            self._on_purpose: deque[int] = deque(maxlen=REMEMBERED)  # steps that went to all tiers whatever the plan

    def at(self, step: int) -> Change:
        """Return the intervals that hold at a step."""
        return next((one for one in reversed(self._changes) if one.step <= step), self._changes[0])

    # -- the training loop --

    def decide(self, step: int) -> Decision:
        """Decide what is saved at this step, once: the next call for the same step returns the same."""
        with self._lock:
            if self._decided and self._decided[-1].step == step:
                return self._decided[-1]
            due = self.at(step)
            found = Decision(step, due.tiers_due(step), due.memory > 0 and step % due.memory == 0)
            if any(one <= step for one in self._ordered):
                found.ordered, found.tiers = True, set(self._everywhere)
                self._ordered = [one for one in self._ordered if one > step]
                self._on_purpose.append(step)
            self._decided.append(found)
            return found

    def saved_everywhere(self, step: int) -> None:
        """Note that a step went to all tiers on purpose, on all ranks."""
        with self._lock:
            self._on_purpose.append(step)

    # -- orders, in other threads --

    @property
    def awaits_step(self) -> bool:
        """Return True if an ordered step lies ahead."""
        return bool(self._ordered)

    def order(self, step: int) -> Late | None:
        """Have the first step saved that is not below this one. Return it if it was decided already."""
        with self._lock:
            passed = [one for one in self._decided if one.step >= step]
            if not passed:
                self._ordered.append(step)
                return None
            if passed[0] is self._decided[0] and len(self._decided) == REMEMBERED:
                return Late(step, set(), set(self._everywhere))  # so long ago that memory cannot have it
            first = passed[0]
            has = self._everywhere if first.step in self._on_purpose else first.tiers
            self._on_purpose.append(first.step)  # if it cannot be, it fails
            return Late(first.step, set(has), set(self._everywhere))

    def change(self, change: Change) -> list[Late]:
        """Change the intervals from a step on; later changes are forgotten. Return the steps that were decided by the
        old ones, and that the new ones save elsewhere."""
        with self._lock:
            past = [one for one in self._decided if one.step >= change.step and one.step not in self._on_purpose]
            late = [Late(one.step, one.tiers, change.tiers_due(one.step)) for one in past]
            for one in past:
                one.tiers = change.tiers_due(one.step)
            now = self.at(self._decided[-1].step) if self._decided else self._changes[0]
            self._changes = [one for one in self._changes if now.step <= one.step < change.step] + [change]
            self.newest = change
            return [one for one in late if one.has != one.wants]
