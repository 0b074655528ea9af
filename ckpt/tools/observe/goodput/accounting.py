"""Compute where the time of a run went, from the metrics of all its job attempts (ckpt.core.cadence.ledger). No I/O.

    lost time = interruptions x (detect + restart + restore + recompute) + time that saving took from training
    goodput = 1 - lost time / wall-clock time

So goodput includes all time that neither interruptions nor saving took, also pauses (`Checkpointer.not_training()`) and
other time (the first warm-up, closing). `Statement.trained` counts only the steps that were not lost.

All job attempts are placed on one timeline. A cursor moves along it and assigns every second to exactly one part, so
the parts add up to the wall-clock time, which begins when the first attempt was ready to train.

- **perceive**: until a fault was detected. The exact time of the fault is unknown: after the last step, the usual
  duration of a step counts as lost work, and the rest as time until detection.
- **restart**: until the next attempt could restore, in parts, and the extra time of its first step.
- **restore**: as measured.
- **recompute**: the interrupted step, and all steps that were repeated. Lost steps that are not repeated yet count with
  their original duration. If a step is done a third time, it counts for the later interruption if that one lost the
  step, otherwise for the earlier one.
- **saving**: the measured time that the training loop waited, and an estimate of how much slower its steps were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.core.cadence.ledger import Account
from ckpt.guard.report import Fault
from ckpt.tools.observe.goodput.breakdown import Statement
from ckpt.tools.observe.goodput.timeline import PlacedAccount, placed
from ckpt.tools.observe.goodput.walk import LedgerWalk

QUIET_S = 150.0  # a job with metrics of this age counts as running, because buckets get metrics every minute


@dataclass(frozen=True, slots=True)
class SettledRun:
    """The timeline of a run, and the result of walking along it once."""

    statement: Statement
    line: tuple[PlacedAccount, ...] = ()


def settled(
    accounts: Iterable[Account],
    faults: Iterable[Fault] = (),
    *,
    now: float | None = None,
    idle_after_s: float = math.inf,
) -> SettledRun:
    """Account for the time of a whole run. `now`: seconds since 1970; decides whether the run is still running, and is
    the latest possible time. `idle_after_s`: if nothing ran for longer than this after an interruption, that time was
    intended, so it counts as idle."""
    notes: list[str] = []
    line = placed(list(accounts), list(faults), notes, math.inf if now is None else now)
    if not line:
        return SettledRun(Statement(notes=tuple(notes)))
    walk = LedgerWalk(line, notes, idle_after_s, math.inf if now is None else now)
    walk.all()
    return SettledRun(_statement(line, walk, notes, now), tuple(line))


def _statement(line: Sequence[PlacedAccount], walk: LedgerWalk, notes: Sequence[str], now: float | None) -> Statement:
    first, last = line[0], line[-1]
    parts, besides = walk.parts, walk.besides
    until = last.wall(walk.cursor)
    going = last.account.end is None and now is not None and now - until < QUIET_S
    return Statement(
        wall_s=walk.cursor - first.t(first.account.born) - math.fsum(besides.values()),
        **{f"{name}_s": parts[name] for name in ("productive", "stalled", "slowed", "paused", "other")},
        **{f"{name}_s": besides[name] for name in ("first_start", "idle", "moved")},
        steps=walk.standing,
        redone_steps=walk.redone,
        usual_step_s=walk.usual or None,
        slowing_known=walk.slowing_known,
        incarnations=len(line),
        begin=first.wall(first.t(first.account.born) + besides["first_start"]),
        until=until,
        running=going,
        ended=walk.ended,
        down_s=0.0 if going or now is None else max(0.0, now - until),
        interruptions=tuple(loss.frozen() for loss in walk.losses if loss.listed),
        notes=tuple(notes),
    )
