"""How much of a job's time is training, before it has begun, and how far its saves are best apart: the equation of
`ckpt.tools.observe.goodput.accounting`, at any scale. `every="auto"`, `ckpt plan` and `ckpt doctor` go by it.

    effective = 1 - [perceive + restart + restore + recompute + saving, per fault] / time between faults

    Costs, of each tier -> predict() -> Forecast

A whole job, and which costs it is expected to have, is in `ckpt.tools.observe.goodput.job_plan`.

Faults come at any moment, as a Poisson process, also while the job recovers. For one tier this is solved exactly (a
renewal argument; Daly's complete model is the case of a save that blocks). With several tiers, how much of the farther
one is lost is taken to first order; over 150,000 played faults, what is lost came out within 0.4 %, also where faults
were as frequent as restarts. `tests/goodput/test_plan.py` plays such jobs, step by step.

Everything is pure. Times are seconds, sizes bytes, rates bytes a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError

MOST_S = 1e12  # seconds: more is a slip of the pen
DAY_S = 86400.0
BUSY = 2.0  # a folder may be written to for half of the time;
BUSY_FAR, LEAST_FAR_S = 10.0, 60.0  # a shared tier for a tenth, since others pay for it too, and once a minute at most
THICK = 0.1  # of the time between faults: intervals beyond that lose so much that a shared tier may be busier


@dataclass(frozen=True, slots=True)
class TierCost:
    """A tier that is saved to. `cost_s`: what one save takes from training; `every_s`: seconds of training between
    saves, infinite for never; `restore_s`: how long a restore from it takes; `write_s`: from the end of the step that
    is saved until it is safe there; `served`: of the faults, the share after which this tier is restored from."""

    name: str
    cost_s: float
    every_s: float
    restore_s: float
    write_s: float = 0.0
    served: float = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """`perceive_s`: from a fault to when it is noticed, on average; `restart_s`: from there to the call of restore();
    `tiers`: the nearest first. A farther one serves the faults that nearer ones do not survive."""

    perceive_s: float
    restart_s: float
    tiers: Sequence[TierCost]


@dataclass(frozen=True, slots=True)
class TierShare:
    """Of one tier. `recompute_s`: what is lost to a fault that it serves."""

    name: str
    served: float
    every_s: float
    restore_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds per fault, and `effective`, the share of wall-clock that is training which is never done again.

    `wall_s`: wall-clock from fault to fault, those during recovery counted."""

    mtbf_s: float
    wall_s: float
    effective: float
    perceive_s: float
    restart_s: float
    restore_s: float
    recompute_s: float
    saving_s: float
    tiers: tuple[TierShare, ...]

    @property
    def parts(self) -> dict[str, float]:
        names = ("perceive", "restart", "restore", "recompute", "saving")
        return {name: float(getattr(self, f"{name}_s")) for name in names}

    @property
    def invalid_s(self) -> float:
        return sum(self.parts.values())


def predict(costs: Costs, mtbf_s: float, *, recovering: bool = True) -> Forecast:
    """What follows from costs. `mtbf_s`: mean time between faults, of a job that trains and, if `recovering`, of one
    that recovers as well: then what was noticed, started and read has to be so again. UsageError for what makes no
    sense."""
    _check(costs, mtbf_s)
    rate = 1.0 / mtbf_s
    used = [tier for tier in costs.tiers if tier.served > 0]
    slowing = sum(tier.cost_s / tier.every_s for tier in costs.tiers)
    again = rate if recovering else 0.0  # of faults while the job recovers
    visits = _visits(used, costs, again)
    total = sum(visits)
    stages = [0.0, 0.0, 0.0]
    ends = [0.0] * len(used)  # how often a recovery ends with this tier
    for i, (tier, count) in enumerate(zip(used, visits, strict=True)):
        past = 0.0
        for number, lasting in enumerate((costs.perceive_s, costs.restart_s, tier.restore_s)):
            stages[number] += count * _within(past, lasting, again)
            past += lasting
        ends[i] = count * math.exp(-again * past)
    # Until the next fault: a save comes after the steps that it saves, so that half a save more is work.
    extra = sum(end * tier.cost_s / 2 for end, tier in zip(ends, used, strict=True))
    work = min(mtbf_s, (mtbf_s + extra) / (1 + slowing))
    lost = [_lost(tier, rate * sum(ends[i:]), slowing) for i, tier in enumerate(used)]
    useful = max(0.0, work - sum(end * seconds for end, seconds in zip(ends, lost, strict=True)))
    wall = mtbf_s + sum(stages)
    by_name = {tier.name: seconds for tier, seconds in zip(used, lost, strict=True)}
    shares = (TierShare(t.name, t.served, t.every_s, t.restore_s, by_name.get(t.name, 0.0)) for t in costs.tiers)
    perceive_s, restart_s, restore_s = (seconds / total for seconds in stages)
    lost_s, saving_s, effective = (work - useful) / total, (mtbf_s - work) / total, min(1.0, max(0.0, useful / wall))
    return Forecast(mtbf_s, wall / total, effective, perceive_s, restart_s, restore_s, lost_s, saving_s, tuple(shares))


def _visits(used: Sequence[TierCost], costs: Costs, rate: float) -> list[float]:
    """How often, per series of faults that follow each other before training goes on, a recovery from each tier is
    begun. The farthest tier that any fault of the series needs is what counts, so there is no way back."""
    found, nearer, began = [], 0.0, 0.0
    for tier in used:
        lasting = costs.perceive_s + costs.restart_s + tier.restore_s
        ends = math.exp(-rate * lasting)
        nearer += tier.served
        count = tier.served * (1 + began) / max(1 - min(1.0, nearer) * (1 - ends), 1e-100)
        began += count * (1 - ends)
        found.append(count)
    return found


def _within(past: float, lasting: float, rate: float) -> float:
    """How long a stage that begins after `past` seconds lasts on average, if a fault ends it."""
    return lasting if not rate else -math.exp(-rate * past) * math.expm1(-rate * lasting) / rate


def _lost(tier: TierCost, rate: float, slowing: float) -> float:
    """Work that a fault undoes: from the newest step that is safe in this tier. `rate`: of faults that need it.

    In the mean time between such faults, 1 / rate, every interval that is survived to its end, and until it is safe,
    is worth `every_s` of work.
    """
    if rate <= 0:
        return 0.0
    done = (1 / rate + tier.cost_s / 2) / (1 + slowing)
    if math.isinf(tier.every_s):
        return done
    lap, behind = tier.every_s * (1 + slowing) * rate, tier.write_s - tier.cost_s
    if max(lap, rate * abs(behind)) < 1e-6:  # the limit of what is below, which is the difference of two huge numbers
        return max(0.0, (tier.cost_s / 2 + behind) / (1 + slowing) + tier.every_s / 2)
    late = math.exp(-min(600.0, max(-50.0, rate * behind)))
    return max(0.0, done - (tier.every_s * late / math.expm1(lap) if lap < 600 else 0.0))


def _check(costs: Costs, mtbf_s: float) -> None:
    positive("the mean time between faults", mtbf_s)
    for tier in costs.tiers:
        if tier.served > 0 and math.isinf(tier.every_s):
            raise UsageError(f"{tier.name} is never saved to, and {tier.served:.0%} of the faults need it")
    served = sum(tier.served for tier in costs.tiers)
    if not abs(served - 1) < 1e-6:
        raise UsageError(f"the shares of faults that tiers serve sum to {served:g}, and it has to be 1")


def positive(name: str, value: object, *, zero: bool = False, most: float = MOST_S) -> float:
    """The number, if it is one that makes sense; UsageError if not."""
    right = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    if not right or not (0 if zero else 1e-9) <= value <= most:  # type: ignore[operator]
        raise UsageError(f"{name} is {value!r}: it has to be a number {'from' if zero else 'above'} 0, to {most:g}")
    return float(value)  # type: ignore[arg-type]


# -- how far saves are apart --


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves, so that what saving costs and what faults undo is least in sum. `cost_s`: what
    a save takes from training; `mtbf_s`: between the faults for which it is needed. Young's root of 2 x cost x MTBF
    where the cost is small, Daly's higher order elsewhere. Infinite if either is; UsageError if one is negative, or no
    number."""
    for name, value in (("cost_s", cost_s), ("mtbf_s", mtbf_s)):
        if not value >= 0:
            raise UsageError(f"{name}={value!r} is no number of seconds")
    if math.isinf(mtbf_s):
        return math.inf if cost_s > 0 else 0.0
    if cost_s >= 2 * mtbf_s:  # then a save is hardly ever done in time
        return mtbf_s if cost_s < math.inf else math.inf
    half = cost_s / (2 * mtbf_s) if mtbf_s else 0.0
    young = math.sqrt(2 * cost_s) * math.sqrt(mtbf_s)
    return young * (1 + math.sqrt(half) / 3 + half / 9) - cost_s


def least_interval(write_s: float, mtbf_s: float = math.inf, *, shared: bool = False) -> float:
    """Seconds that saves to a durable tier are apart at the least, so that it is not busy all the time."""
    gentle = max(BUSY_FAR * write_s, LEAST_FAR_S)
    return gentle if shared and gentle <= THICK * mtbf_s else BUSY * write_s


def nice_steps(interval_s: float, step_s: float) -> int:
    """The nearest of 1, 2, 5, 10, 20, … steps, by ratio; 0, which is never, for an infinite interval."""
    if not step_s > 0 or math.isinf(step_s) or not interval_s >= 0:
        raise UsageError(f"an interval of {interval_s!r} s, in steps of {step_s!r} s, makes no sense")
    steps = interval_s / step_s
    if math.isinf(steps):
        return 0
    if steps <= 1:
        return 1
    power: int = 10 ** int(math.log10(steps))
    found = min((n * power for n in (1, 2, 5, 10)), key=lambda n: abs(math.log(steps / n)))
    return int(found)


def steps_apart(interval_s: float, least_s: float, step_s: float, slack: float = 1.0) -> int:
    """`nice_steps`, that last `least_s` at the least; shorter by the factor `slack` is good enough."""
    steps = nice_steps(max(interval_s, least_s), step_s)
    if not steps or steps * step_s * (1 + 1e-9) >= least_s / slack:
        return steps
    return nice_steps(2 * least_s, step_s)  # the next, as the nearest was below
