"""Predicts the share of a job's time that is useful training, and the best save interval. It solves the equation of
`ckpt.tools.observe.goodput.accounting` for any scale. `every="auto"`, `ckpt plan` and `ckpt doctor` use it.

    effective = 1 - [perceive + restart + restore + recompute + saving, per fault] / time between faults

    Costs, of each tier -> predict() -> Forecast

`ckpt.tools.observe.goodput.job_plan` estimates the costs of a whole job.

Faults come at any moment, as a Poisson process, also during recovery. For one tier, the solution is exact (a renewal
argument; Daly's complete model is the case of a save that blocks). With several tiers, the loss at the farther one is a
first-order approximation. In 150,000 simulated faults, the predicted loss was within 0.4 %, even with faults as
frequent as restarts. `tests/goodput/test_plan.py` simulates such jobs, step by step.

All functions are pure. Times are seconds, sizes bytes, rates bytes a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError

MOST_S = 1e12  # seconds: more is a typing error
DAY_S = 86400.0
BUSY = 2.0  # writes may take half of the time of a folder
BUSY_FAR, LEAST_FAR_S = 10.0, 60.0  # but a tenth of the time of a shared tier, and at most one write a minute
THICK = 0.1  # of the time between faults: a longer interval loses so much that a shared tier may be busier


@dataclass(frozen=True, slots=True)
class TierCost:
    """A tier that is saved to. `cost_s`: training time that one save costs. `every_s`: seconds of training between
    saves, infinite for never. `restore_s`: duration of a restore from it. `write_s`: from the end of the saved step
    until the save is durable there. `served`: the share of faults after which this tier is restored from."""

    name: str
    cost_s: float
    every_s: float
    restore_s: float
    write_s: float = 0.0
    served: float = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of faults and saves. `perceive_s`: from a fault to its detection, on average. `restart_s`: from there
    to the call of restore(). `tiers`: nearest first. A farther one serves the faults that nearer ones do not
    survive."""

    perceive_s: float
    restart_s: float
    tiers: Sequence[TierCost]


@dataclass(frozen=True, slots=True)
class TierShare:
    """The forecast for a tier. `recompute_s`: training lost to a fault that it serves."""

    name: str
    served: float
    every_s: float
    restore_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds per fault, and `effective`, the share of wall-clock time spent on training that is never repeated.
    `wall_s`: wall-clock time between faults, including those during recovery."""

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
    """Return the forecast for these costs. Raise UsageError if a value is impossible. `mtbf_s`: mean time between
    faults. `recovering`: if True, faults also occur during recovery, which then starts again."""
    _check(costs, mtbf_s)
    rate = 1.0 / mtbf_s
    used = [tier for tier in costs.tiers if tier.served > 0]
    slowing = sum(tier.cost_s / tier.every_s for tier in costs.tiers)
    again = rate if recovering else 0.0  # rate of faults during recovery
    visits = _visits(used, costs, again)
    total = sum(visits)
    stages = [0.0, 0.0, 0.0]
    ends = [0.0] * len(used)  # how many recoveries end with this tier
    for i, (tier, count) in enumerate(zip(used, visits, strict=True)):
        past = 0.0
        for number, lasting in enumerate((costs.perceive_s, costs.restart_s, tier.restore_s)):
            stages[number] += count * _within(past, lasting, again)
            past += lasting
        ends[i] = count * math.exp(-again * past)
    # Until the next fault. A save follows the steps that it saves, so half a save more is training.
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
    """Return how many recoveries from each tier start, for each series of faults without training between them. The
    farthest tier that any fault of the series needs is used."""
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
    """Return the mean duration of a stage that starts after `past` seconds, if a fault ends it."""
    return lasting if not rate else -math.exp(-rate * past) * math.expm1(-rate * lasting) / rate


def _lost(tier: TierCost, rate: float, slowing: float) -> float:
    """Return the training lost to a fault: everything since the newest durable step of this tier. `rate`: of the faults
    that need this tier. In the mean time between such faults, 1 / rate, every interval that ends and becomes durable
    before a fault adds `every_s` of training."""
    if rate <= 0:
        return 0.0
    done = (1 / rate + tier.cost_s / 2) / (1 + slowing)
    if math.isinf(tier.every_s):
        return done
    lap, behind = tier.every_s * (1 + slowing) * rate, tier.write_s - tier.cost_s
    if max(lap, rate * abs(behind)) < 1e-6:  # the limit of the formula below, which subtracts two huge numbers
        return max(0.0, (tier.cost_s / 2 + behind) / (1 + slowing) + tier.every_s / 2)
    late = math.exp(-min(600.0, max(-50.0, rate * behind)))
    return max(0.0, done - (tier.every_s * late / math.expm1(lap) if lap < 600 else 0.0))


def _check(costs: Costs, mtbf_s: float) -> None:
    positive("the mean time between faults", mtbf_s)
    for tier in costs.tiers:
        if tier.served > 0 and math.isinf(tier.every_s):
            raise UsageError(f"{tier.name} is never saved to, but {tier.served:.0%} of the faults need it")
    served = sum(tier.served for tier in costs.tiers)
    if not abs(served - 1) < 1e-6:
        raise UsageError(f"the shares of faults that tiers serve must sum to 1, not {served:g}")


def positive(name: str, value: object, *, zero: bool = False, most: float = MOST_S) -> float:
    """Return the number as a float. Raise UsageError if it is not a number in range."""
    right = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    if not right or not (0 if zero else 1e-9) <= value <= most:  # type: ignore[operator]
        raise UsageError(f"{name} is {value!r}: must be a number {'from' if zero else 'above'} 0, to {most:g}")
    return float(value)  # type: ignore[arg-type]


# -- save intervals --


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between saves that minimize the sum of saving cost and lost training.

    `cost_s`: training time that a save costs. `mtbf_s`: seconds between the faults for which this save is needed.

    Young's square root of 2 x cost x MTBF for small costs, Daly's higher order for others. Infinite if either value is.
    Raises UsageError if one is negative or not a number.
    """
    for name, value in (("cost_s", cost_s), ("mtbf_s", mtbf_s)):
        if not value >= 0:
            raise UsageError(f"{name}={value!r}: must be a number of seconds from 0")
    if math.isinf(mtbf_s):
        return math.inf if cost_s > 0 else 0.0
    if cost_s >= 2 * mtbf_s:  # a save would rarely end before a fault
        return mtbf_s if cost_s < math.inf else math.inf
    half = cost_s / (2 * mtbf_s) if mtbf_s else 0.0
    young = math.sqrt(2 * cost_s) * math.sqrt(mtbf_s)
    return young * (1 + math.sqrt(half) / 3 + half / 9) - cost_s


def least_interval(write_s: float, mtbf_s: float = math.inf, *, shared: bool = False) -> float:
    """Return the minimum seconds between saves to a durable tier, so that it is not busy all the time."""
    gentle = max(BUSY_FAR * write_s, LEAST_FAR_S)
    return gentle if shared and gentle <= THICK * mtbf_s else BUSY * write_s


def nice_steps(interval_s: float, step_s: float) -> int:
    """Return the nearest of 1, 2, 5, 10, 20, … steps, by ratio; 0 (never) for an infinite interval."""
    if not step_s > 0 or math.isinf(step_s) or not interval_s >= 0:
        raise UsageError(f"cannot divide an interval of {interval_s!r} s into steps of {step_s!r} s")
    steps = interval_s / step_s
    if math.isinf(steps):
        return 0
    if steps <= 1:
        return 1
    power: int = 10 ** int(math.log10(steps))
    found = min((n * power for n in (1, 2, 5, 10)), key=lambda n: abs(math.log(steps / n)))
    return int(found)


def steps_apart(interval_s: float, least_s: float, step_s: float, slack: float = 1.0) -> int:
    """Return `nice_steps` for at least `least_s`. An interval shorter by the factor `slack` is accepted."""
    steps = nice_steps(max(interval_s, least_s), step_s)
    if not steps or steps * step_s * (1 + 1e-9) >= least_s / slack:
        return steps
    return nice_steps(2 * least_s, step_s)  # the next one, because the nearest was too short
