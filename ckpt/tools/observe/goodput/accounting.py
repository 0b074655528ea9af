"""Where the time of a run went, from the accounts of all its incarnations (ckpt.core.cadence.ledger). Pure.

    invalid training time = interruptions x (perceive + restart + restore + recompute) + what saving took from training
    effective training time = 1 - invalid / wall-clock

Effective is hence all that neither faults nor saving took: pauses (`Checkpointer.pause()`) and what is other (the first
warm-up, closing) are in it. What went into steps that stand is `Statement.trained`.

All incarnations are laid on one time line, and a cursor goes along it: every second is given to one part, once, so the
parts add up to the wall-clock time. That begins when the first incarnation was ready to train.

- **perceive**: until a fault was noticed. Nobody knows when it happened: what follows the last step for as long as a
  step usually takes is work that was lost, and what is beyond that was spent unnoticed.
- **restart**: until the next incarnation could restore, in parts, and what its first step took beyond a usual one.
- **restore**: as measured.
- **recompute**: the unfinished step, and all steps that had been done before. Steps that were undone and are not done
  again yet count as what they took when they were done. A step that has to be done a third time is done again because
  of the later interruption, if that one lost it, else because of the earlier one.
- **saving**: what the training loop waited for it, measured; and how much slower its steps were, an estimate.
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

QUIET_S = 150.0  # a ledger that was kept so recently is of a job that runs: in buckets it is put every minute


@dataclass(frozen=True, slots=True)
class SettledRun:
    """What one walk along the time line finds, and the line."""

    statement: Statement
    line: tuple[PlacedAccount, ...] = ()


def settled(
    accounts: Iterable[Account],
    faults: Iterable[Fault] = (),
    *,
    now: float | None = None,
    idle_after_s: float = math.inf,
) -> SettledRun:
    """Of a whole run. `now`, in seconds since 1970, tells whether it is running, and no end is later than that.
    If nothing ran for longer than `idle_after_s` after an interruption, somebody wanted that: it counts as idle."""
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
