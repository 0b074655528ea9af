"""How long the steps of a run usually take, beside a save and without one. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt.goodput.ledger import StepRow
from ckpt.goodput.timeline import PlacedAccount

COMPARABLE = 3  # steps of one incarnation that say how long its steps take
ENOUGH = 4  # beside which nothing was saved, as in ckpt.goodput.overhead
FAR, FAR_S = 5.0, 0.5  # usual steps, and seconds: a single step that takes so much longer does more than a step


class UsualSteps:
    """What is usual. `share`: of what single rows say of slowing, what is left of it in the sum over all of them, where
    faster and slower steps cancel out; `usual`: seconds a step takes, without saving; `first`: the first of an
    incarnation; `here`: a step of the present incarnation."""

    def __init__(self, rows: Sequence[Sequence[StepRow]]) -> None:
        self._rows = rows
        slowed = [row.slowed for each in rows for row in each]
        more = math.fsum(max(0.0, value) for value in slowed)
        self.share = max(0.0, math.fsum(slowed)) / more if more > 0 else 0.0
        firsts = [self._step_s(row) for each in rows for row in each[:1]]
        self.usual = _median([(self._step_s(row), row.steps) for each in rows for row in each[1:]])
        self.usual = self.usual or min(firsts, default=0.0)
        self.first = max(self.usual, _median([(value, 1) for value in firsts]))
        self.here = self.usual

    def turn_to(self, number: int) -> None:
        rows = self._rows[number][1:]
        comparable = sum(row.steps for row in rows) >= COMPARABLE
        self.here = _median([(self._step_s(row), row.steps) for row in rows]) if comparable else self.usual

    def slowing_known(self, line: Sequence[PlacedAccount]) -> bool:
        """Of most steps at least; a few beside which nothing is saved have to be there, but for the first one."""
        known = unknown = 0
        for one, rows in zip(line, self._rows, strict=True):
            steps = sum(row.steps for row in rows)
            saved = any(row.saves for row in rows) or bool(one.account.saves)
            if not saved or sum(row.quiet for row in rows[1:]) >= ENOUGH:
                known += steps
            else:
                unknown += steps
        return known >= unknown

    def far(self) -> list[float]:
        """How much longer than usual single steps took beside which something was saved, if that is very much."""
        more = [
            row.seconds - row.stalled - self.usual
            for rows in self._rows
            for row in rows[1:]
            if row.steps == 1 and not row.quiet and row.slowed > 0
        ]
        return [seconds for seconds in more if seconds > max(FAR_S, FAR * self.usual)]

    def _step_s(self, row: StepRow) -> float:
        return max(0.0, row.seconds - row.stalled - max(0.0, row.slowed) * self.share) / row.steps


def _median(weighted: list[tuple[float, int]]) -> float:
    """Of values with weights; 0 for none."""
    half, total = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        total += weight
        if total >= half:
            return value
    return 0.0
