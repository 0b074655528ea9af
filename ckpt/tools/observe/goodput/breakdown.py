"""What became of the time of a run, in figures: what `ckpt.tools.observe.goodput.accounting` finds. Plain values.

invalid training time = interruptions x (perceive + restart + restore + recompute) + what saving took from training
effective training time = 1 - invalid / wall-clock
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import Any

COUNTLESS = ("none", "moved")  # kinds that are no interruptions: stopped on purpose, copied


@dataclass(frozen=True, slots=True)
class InterruptionCost:
    """Of one interruption or of several, in seconds.

    Of the restart: `leave`, from when it was noticed until the process was gone; `launch`, until the next one was
    born; `start`, until it opened its Checkpointer: imports, model, process group; `open`; `setup`, until restore() was
    called; `first_step`, what its first step took beyond a usual one; `unknown`: what cannot be divided, since nobody
    wrote down when the process ended. Of the recomputation: `unfinished`, the step that was cut off; `redone`, steps
    that had been done before; `undone`, those that have not been done again yet.
    """

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
    """`kind`: of the fault that was noticed first (see ckpt.guard.report), or "left" by an exception that nobody
    described, "unknown" if nobody noticed anything, "rollback", "taken over" by a newer job; "none" if the job was
    stopped on purpose and "moved" if the run was copied: these two are no interruptions, but steps may be done again
    after them.

    `at`: when it was noticed, in seconds since 1970; `step`: the last one that was done, None if there was none;
    `restored`: the step that training went on from, None for none, with `source`, "memory" or a URL, "" for none;
    `lost_steps`: that had to be done again, None as long as that is open; `resumed`: the next incarnation has opened.
    """

    kind: str
    at: float
    summary: str
    epoch: str
    step: int | None
    restored: int | None
    source: str
    lost_steps: int | None
    resumed: bool
    cost: InterruptionCost

    @property
    def counted(self) -> bool:
        """Whether it is an interruption."""
        return self.kind not in COUNTLESS

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "counted": self.counted, "cost": self.cost.to_json()}


@dataclass(frozen=True, slots=True)
class Statement:
    """Seconds, but for `begin` and `until`, which are moments, in seconds since 1970.

    `wall_s` is the sum of `productive_s`, what interruptions cost, `stalled_s`, `slowed_s`, `paused_s` and `other_s`:
    how much longer the first step took where no fault is to blame, closing, and what is under way. `effective` is all
    of it that faults and saving did not take, `paused_s` and `other_s` too; `trained` is the share of `productive_s`,
    steps that stand, alone. Told besides, and part of nothing: `first_start_s`, before the first incarnation was ready;
    `idle_s`, between the end of a job that was closed and when the next was ready; `moved_s`, the same where the run
    was copied meanwhile; `down_s`, from `until` to now, if it is not running. `steps`: that stand, each counted once,
    by their numbers; `redone_steps`: done once more. `slowing_known`: False if most steps have nothing to be compared
    with. `running`: a short while ago, at least. `ended`: "closed", or the kind of the last interruption if nothing
    came after it; "" if nobody saw an end.
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
        """Of all interruptions together."""
        costs = [one.cost for one in self.interruptions]
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
        """Of the wall-clock time, from 0 to 1; None where there is none yet."""
        return None if self.wall_s <= 0 else min(1.0, max(0.0, 1.0 - self.invalid_s / self.wall_s))

    @property
    def trained(self) -> float | None:
        """The share of the wall-clock time that went into steps that stand, from 0 to 1."""
        return None if self.wall_s <= 0 else min(1.0, max(0.0, self.productive_s / self.wall_s))

    @property
    def count(self) -> int:
        """Interruptions."""
        return sum(one.counted for one in self.interruptions)

    @property
    def training_s(self) -> float:
        """In which steps were done, once or again, with what saving took."""
        return self.productive_s + self.cost.recompute + self.saving_s

    @property
    def mtbf_s(self) -> float | None:
        """Training time between two interruptions; None without one: it is longer than `training_s` then."""
        return self.training_s / self.count if self.count else None

    @property
    def by_kind(self) -> dict[str, int]:
        return dict(Counter(one.kind for one in self.interruptions if one.counted).most_common())

    @property
    def by_source(self) -> dict[str, int]:
        """How many interruptions ended with a restore from where; "" for none."""
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
