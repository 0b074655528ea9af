"""The breakdown of a run's time, as plain values. `ckpt.tools.observe.goodput.accounting` computes it.

lost time = interruptions x (detect + restart + restore + recompute) + time that saving took from training goodput = 1 -
lost time / wall-clock time
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import Any

COUNTLESS = ("none", "moved")  # kinds that do not count as interruptions: stopped on purpose, and run was copied


@dataclass(frozen=True, slots=True)
class InterruptionCost:
    """The cost of one or several interruptions, in seconds. Parts of the restart: `leave`, from the detection until the
    process was gone; `launch`, until the next process was started; `start` (imports, model, process group), until it
    opened its Checkpointer; `open`; `setup`, until restore() was called; `first_step`, extra time of the first step;
    `unknown`, if the end of the process was not recorded. Parts of the recomputation: `unfinished`, the interrupted
    step; `redone`, repeated steps; `undone`, lost steps that are not repeated yet."""

    perceive: float = 0.0
    leave: float = 0.0
    launch: float = 0.0
    start: float = 0.0
    open: float = 0.0
    setup: float = 0.0
    first_step: float = 0.0
    unknown: float = 0.0
    restore: float = 0.0
    unfinished: float = 0.0
    redone: float = 0.0
    undone: float = 0.0

    @property
    def restart(self) -> float:
        return math.fsum(getattr(self, name) for name in RESTART)

    @property
    def recompute(self) -> float:
        return math.fsum(getattr(self, name) for name in RECOMPUTE)

    @property
    def total(self) -> float:
        return math.fsum((self.perceive, self.restart, self.restore, self.recompute))

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "restart": self.restart, "recompute": self.recompute, "total": self.total}


RESTART = ("leave", "launch", "start", "open", "setup", "first_step", "unknown")
RECOMPUTE = ("unfinished", "redone", "undone")


@dataclass(frozen=True, slots=True)
class Interruption:
    """One interruption of a training.

    `kind`: kind of the fault that was detected first (see ckpt.guard.report), or "left" (an exception without a
        report), "unknown" (nothing was detected), "rollback", or "taken over" by a newer job. "none" (stopped on
        purpose) and "moved" (the run was copied) do not count as interruptions, but steps may be repeated after them.

    `at`: time of the detection, seconds since 1970. `step`: the last completed step, or None. `restored`: the step from
        which training continued, or None. `source`: origin of the restored step, "memory", a URL, or "". `lost_steps`:
        steps to repeat, None while unknown. `resumed`: True if the next job attempt has opened the run.
    """

    kind: str
    at: float
    summary: str
    term: str
    step: int | None
    restored: int | None
    source: str
    lost_steps: int | None
    resumed: bool
    cost: InterruptionCost

    @property
    def counted(self) -> bool:
        """Return True if this counts as an interruption."""
        return self.kind not in COUNTLESS

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "counted": self.counted, "cost": self.cost.to_json()}


@dataclass(frozen=True, slots=True)
class Statement:
    """The breakdown of a run's time. Fields are seconds; `begin` and `until` are seconds since 1970.

    `wall_s` is the sum of `productive_s`, the cost of interruptions, `stalled_s`, `slowed_s`, `paused_s` and `other_s`
    (extra time of first steps without a fault, closing, and unfinished steps). `effective`: goodput, which includes
    `paused_s` and `other_s`. `trained`: share of `productive_s`, which is the time of steps that count. Outside
    `wall_s` are `first_start_s`, before the first attempt was ready; `idle_s`, between a closed job and the next one;
    `moved_s`, the same if the run was copied; `down_s`, from `until` to now if the run is not running. `steps`: number
    of distinct steps that count. `redone_steps`: number of repeated steps. `slowing_known`: False if too few steps
    without a save exist to compare with. `running`: True if the job was alive a short time ago. `ended`: "closed", or
    the kind of the last interruption if nothing followed it, or "" if the end was not recorded.
    """

    wall_s: float = 0.0
    productive_s: float = 0.0
    stalled_s: float = 0.0
    slowed_s: float = 0.0
    paused_s: float = 0.0
    other_s: float = 0.0
    first_start_s: float = 0.0
    idle_s: float = 0.0
    moved_s: float = 0.0
    steps: int = 0
    redone_steps: int = 0
    usual_step_s: float | None = None
    slowing_known: bool = True
    incarnations: int = 0
    begin: float = 0.0
    until: float = 0.0
    running: bool = False
    ended: str = ""
    down_s: float = 0.0
    interruptions: tuple[Interruption, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cost(self) -> InterruptionCost:
        """The cost of all interruptions, added up."""
        costs = [interruption.cost for interruption in self.interruptions]
        return InterruptionCost(
            **{f.name: math.fsum(getattr(cost, f.name) for cost in costs) for f in fields(InterruptionCost)}
        )

    @property
    def saving_s(self) -> float:
        return self.stalled_s + self.slowed_s

    @property
    def invalid_s(self) -> float:
        return self.cost.total + self.saving_s

    @property
    def effective(self) -> float | None:
        """Goodput, from 0 to 1; None before the first second."""
        return None if self.wall_s <= 0 else min(1.0, max(0.0, 1.0 - self.invalid_s / self.wall_s))

    @property
    def trained(self) -> float | None:
        """Share of the wall-clock time that was spent on steps that count, from 0 to 1."""
        return None if self.wall_s <= 0 else min(1.0, max(0.0, self.productive_s / self.wall_s))

    @property
    def count(self) -> int:
        """Number of interruptions."""
        return sum(one.counted for one in self.interruptions)

    @property
    def training_s(self) -> float:
        """Time in which steps were completed or repeated, including saving."""
        return self.productive_s + self.cost.recompute + self.saving_s

    @property
    def mtbf_s(self) -> float | None:
        """Training time between two interruptions. None if there was no interruption; the time is then longer than
        `training_s`."""
        return self.training_s / self.count if self.count else None

    @property
    def by_kind(self) -> dict[str, int]:
        return dict(Counter(one.kind for one in self.interruptions if one.counted).most_common())

    @property
    def by_source(self) -> dict[str, int]:
        """Return the number of interruptions by the source of the restore, which is "" if nothing was restored."""
        ended = (one for one in self.interruptions if one.counted and one.lost_steps is not None)
        return dict(Counter(one.source for one in ended).most_common())

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("interruptions", "notes")}
        derived = (
            "effective", "trained", "invalid_s", "saving_s", "training_s", "mtbf_s", "count", "by_kind", "by_source",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in derived},
            **plain,
            "cost": self.cost.to_json(),
            "interruptions": [one.to_json() for one in self.interruptions],
            "notes": list(self.notes),
        }
