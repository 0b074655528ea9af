"""Chooses save intervals for `every="auto"`, predicts lost time, and measures the training time that saving costs.

    step durations (ckpt.core.writer.bookkeeper) -> Meter -> SaveCost -> decide() -> Decision
        -> an order to all ranks (ckpt.core.run.save_plan) -> SavePlan

**The choice** (`decide`). All functions are pure. A run without a history begins with `FIRST_MEMORY` and
`FIRST_DURABLE` and measures the cost of saving, because both rules need steps without any save for comparison.

- Memory is saved as often as a budget allows: every step, if a snapshot costs at most 1 % of a step's time.
  With very frequent faults, memory is saved more often, because repeating steps would cost more than snapshots.
- Durable tiers use the formula of Young and Daly. Frequent saves cost more, and rare saves lose more at a fault. The
  sum is lowest if the interval is about the square root of 2 x cost of a save x time between the faults for which the
  tier is needed. Faults after which a nearer tier was restored do not count. If memory survives, few faults remain.

**The model** (`predict`) computes the share of a job's time that is useful training. It solves the equation of
`ckpt.tools.observe.goodput.accounting` for any scale. `every="auto"`, `ckpt plan` and `ckpt doctor` use it.
`ckpt.tools.observe.goodput.job_plan` estimates the costs of a whole job. Times are seconds, sizes bytes.

    effective = 1 - [perceive + restart + restore + recompute + saving, per fault] / time between faults

    Costs, of each tier -> predict() -> Forecast

Faults come at any moment, as a Poisson process, also during recovery. For one tier, the solution is exact (a renewal
argument; a save that blocks gives Daly's complete model). With several tiers, the loss at the farther tier is a
first-order approximation. In 150,000 simulated faults, the predicted loss was within 0.4 %, even with faults as
frequent as restarts. `tests/goodput/test_plan.py` simulates such jobs, step by step.

**The measurement** (`Meter`) compares steps during a snapshot copy with steps without one, and steps during a
checkpoint write with otherwise equal steps. Durations vary, so trimmed means over dozens of steps are compared. Without
comparable steps, the cost is unknown: if every step takes a snapshot, only the wait is known.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.core.cadence.ledger import Account, Decision
from ckpt.errors import InvalidArgumentError, UsageError
from ckpt.units import duration

MEMORY = "memory"
FIRST_MEMORY, FIRST_DURABLE = 4, 100  # intervals in steps, until costs are measured
ANNOUNCED = ("signal", "preemption", "deadline")  # faults after which the training loop can still save its next step
FIRST_S = 10.0  # time between the durable saves that measure their cost
FLEET_GPU_S = 54 * 86400 * 16384 / 419  # GPU seconds between interruptions: Llama 3, arXiv 2407.21783, section 3.3.4
FURTHER = 10.0  # until measured, a tier counts as needed this many times more rarely than the next nearer tier
SAMPLES = 4  # number of saves after which the cost of a durable tier is known
SNAPSHOTS = 12
UNSURE = 2.0  # keep the present interval if it is optimal for a cost within this many standard errors
SEVERAL = 2  # a run's own time between faults counts once it has had this many faults
SLACK = 1.2  # factor by which a round number of steps may be below a bound, because costs are estimates
TIMED = 0.1  # tolerated deviation from a requested time
CHANGE = 2.2  # change an interval by at least this factor, because the total cost is flat around its minimum


@dataclass(frozen=True, slots=True)
class Auto:
    """A save interval that everystep measures and adapts.

    budget: share of training time that snapshots may cost, unless faults cost more
    mtbf_s: seconds between faults, if known; default: estimated from this run
    every_s: a fixed time between saves. Time outside steps, for example evaluations, does not count. All ranks save the
        same steps, so the time is converted into a number of steps, which is adjusted when the step duration changes
    """

    budget: float = 0.01
    mtbf_s: float | None = None
    every_s: float | None = None

    def __post_init__(self) -> None:
        seconds = (("mtbf_s", self.mtbf_s, math.inf), ("every_s", self.every_s, math.inf))
        for name, value, most in (("budget", self.budget, 1.0), *seconds):
            if value is None and name != "budget":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < most:
                least = "above 0" + (" and below 1" if most == 1.0 else ", in seconds")
                raise InvalidArgumentError(f"Auto({name}={value!r}): must be a number {least}")


_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")  # "30s", "1.5 h"
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def as_every(every: object) -> int | Auto:
    """Parse a save interval: a number of steps, a time, "auto" or an `Auto`. Raise InvalidArgumentError for all other
    values."""
    if every == "auto":
        return Auto()
    if isinstance(every, Auto):
        return every
    if isinstance(every, str) and (time := _TIME.fullmatch(every)) and float(time[1]):
        return Auto(every_s=float(time[1]) * _SECONDS[time[2]])
    if type(every) is not int or every < 1:
        raise InvalidArgumentError(
            f'every={every!r}: must be a number of steps from 1, a time like "30s", "10min" or "2h", '
            '"auto" or ckpt.Auto(...)'
        )
    return every


def is_auto(every: object) -> bool:
    """Return True if everystep chooses the interval itself. Return False for a fixed time, which is only converted."""
    found = as_every(every)
    return isinstance(found, Auto) and found.every_s is None


@dataclass(frozen=True, slots=True)
class TierCadence:
    """A tier whose interval is chosen. `every`: as configured. `now`: the present interval in steps. `remote`: True for
    a bucket."""

    name: str
    every: int | Auto
    now: int
    remote: bool = False


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The measured cost of a save to one tier. `save_s`: training time that a save costs. `unsure_s`: standard error of
    `save_s`. `write_s`: time until a save is durable."""

    save_s: float
    write_s: float
    samples: int
    unsure_s: float = 0.0

    def shifted(self, errors: float) -> SaveCost:
        return replace(self, save_s=max(0.0, self.save_s + errors * self.unsure_s))


@dataclass(frozen=True, slots=True)
class History:
    """The known faults. `training_s`: training time so far. `deaths`: number of faults after which the training loop
    saved no further step, so that only a snapshot helped. `served`: number of restarts from each tier."""

    training_s: float = 0.0
    interruptions: int = 0
    deaths: int = 0
    served: Mapping[str, int] = field(default_factory=dict)


def history(accounts: Sequence[Account]) -> History:
    """Return the history of these job attempts, in order. A restart after a planned stop is not a fault."""
    served: dict[str, int] = {}
    training = 0.0
    ended, deaths, after_fault = 0, 0, False
    for account in accounts:
        training += sum(row.seconds for row in account.rows)
        if account.failed:
            ended += 1
            in_time = (seen for seen in account.faults if seen.by == "fault handler" and seen.kind in ANNOUNCED)
            deaths += not any(seen.ends for seen in in_time)
        for restore in account.restores[:1]:
            if restore.step is not None and after_fault:
                served[restore.source] = served.get(restore.source, 0) + 1
        after_fault = account.failed or account.end is None
    return History(training, ended, deaths, served)


def expected_mtbf(known: History, world: int, served: int, rank_of_place: int) -> float:
    """Return the seconds between the faults for which a tier is needed. The fleet's figure (`FLEET_GPU_S`) counts as
    one fault, and this run's faults are added. `served`: number of faults that needed the tier or a farther one. The
    less likely this number is by the fleet's figure, the less weight the figure gets."""
    prior = min(FLEET_GPU_S / max(1, world), DAY_S) * FURTHER**rank_of_place
    weight = 1.0 if served < SEVERAL else _at_least(served, known.training_s / prior)
    return max(weight * prior + known.training_s, 1.0) / (weight + served)


def _at_least(count: int, expected: float) -> float:
    """Return the Poisson probability of at least `count` faults, given the expected number."""
    if expected <= 0:
        return 0.0 if count else 1.0
    fewer = math.fsum(math.exp(n * math.log(expected) - expected - math.lgamma(n + 1)) for n in range(min(count, 1000)))
    return max(0.0, 1 - fewer)


def decide(
    places: Sequence[TierCadence],
    step: int,
    step_s: float,
    costs: Mapping[str, SaveCost],
    known: History,
    world: int,
    held: Decision | None = None,
) -> Decision:
    """Choose the intervals of the tiers, memory first. A tier whose cost is unknown keeps its interval, or gets an
    interval at which the cost can be measured. `held`: the previous decision, perhaps of an earlier job attempt."""
    sure = {place.name: cost for place in places if enough(place, cost := costs.get(place.name)) and cost is not None}
    decision = Decision(step, {}, {}, {name: cost.save_s for name, cost in sure.items()}, {}, step_s=step_s)
    durable = [place.name for place in places if place.name != MEMORY]
    for place in places:
        every, why = place.now, "as configured"
        cost = sure.get(place.name)
        if isinstance(place.every, Auto) and place.every.every_s is not None:
            every, why = _timed(place.now, place.every.every_s, step_s)
        elif isinstance(place.every, Auto):
            if cost is None and held is not None and place.name in held.costs:
                every, why = _as_long(place.now, held.step_s, step_s), held.why.get(place.name, "")
                decision.costs[place.name] = held.costs[place.name]
                decision.mtbf_s |= {k: v for k, v in held.mtbf_s.items() if k == place.name}
            elif place.name == MEMORY:
                every, why = _memory(place, place.every, step_s, cost)
            else:
                at = durable.index(place.name)
                further = sum(known.served.get(name, 0) for name in durable[at:])
                mtbf_s = place.every.mtbf_s or expected_mtbf(known, world, further, at)
                decision.mtbf_s[place.name] = mtbf_s
                every, why = _durable(place, step_s, cost, mtbf_s, further, place.every.mtbf_s is not None)
            if place.name == MEMORY and MEMORY in decision.costs:
                mtbf_s = _mtbf_of_snapshots(place.every, known, world)
                often = _against_faults(decision.costs[MEMORY], mtbf_s, step_s)
                if often < every:
                    every, why = int(often), _thick(decision.costs[MEMORY], often * step_s, mtbf_s)
                    decision.mtbf_s[MEMORY] = mtbf_s
        decision.every[place.name], decision.why[place.name] = every, why
    return decision


def _timed(now: int, every_s: float, step_s: float) -> tuple[int, str]:
    """Return the number of steps in `every_s`, to two digits. Return `now` if it is right within a tenth."""
    steps = max(1.0, every_s / max(step_s, 1e-6))
    if abs(now - steps) > TIMED * steps:
        now = max(1, int(float(f"{steps:.2g}")))
    return now, f"{duration(every_s)}, in steps of {duration(step_s)}"


def _as_long(every: int, then_s: float, now_s: float) -> int:
    """Return the number of steps that lasts as long as `every` steps lasted at the previous step duration."""
    if then_s <= 0 or 0.5 < now_s / then_s < 2:
        return every
    return max(1, nice_steps(every * then_s, now_s))


def enough(place: TierCadence, cost: SaveCost | None) -> bool:
    """Return True if the cost of a save to this tier is known."""
    return cost is not None and cost.samples >= (SNAPSHOTS if place.name == MEMORY else SAMPLES)


def _memory(place: TierCadence, auto: Auto, step_s: float, cost: SaveCost | None) -> tuple[int, str]:
    if cost is None:
        return place.now, "until the cost of a snapshot is measured"

    def affordable(cost: SaveCost) -> int:
        steps = max(1, math.ceil(cost.save_s / (auto.budget * step_s) - 0.05))
        return steps_apart(0.0, steps * step_s, step_s, SLACK)

    every, sure = affordable(cost), ""
    if affordable(cost.shifted(-UNSURE)) <= place.now <= affordable(cost.shifted(UNSURE)):
        every, sure = place.now, ", within measurement error"
    share = cost.save_s / (every * step_s)
    why = f"a snapshot costs {duration(cost.save_s)} of training, a step takes {duration(step_s)}: "
    return every, f"{why}{share:.2%} of the time, of {auto.budget:.0%} allowed{sure}"


def _mtbf_of_snapshots(auto: Auto, known: History, world: int) -> float:
    """Return the seconds between faults after which only a snapshot helps; infinite if this is unknown."""
    if auto.mtbf_s is not None:
        return auto.mtbf_s
    return expected_mtbf(known, world, known.deaths, 0) if known.deaths >= SEVERAL else math.inf


def _against_faults(save_s: float, mtbf_s: float, step_s: float) -> float:
    """Return the steps between snapshots by Young's and Daly's formula, rounded down, where costs grow more slowly."""
    best_s = best_interval(max(save_s, 1e-4), mtbf_s)
    return max(1, nice_steps(best_s / math.sqrt(2), step_s)) if best_s < math.inf else math.inf


def _thick(save_s: float, interval_s: float, mtbf_s: float) -> str:
    return (
        f"a snapshot costs {duration(save_s)} of training, {save_s / interval_s:.1%} of the time. That is above its "
        f"budget, because a fault is expected every {duration(mtbf_s)} and repeating steps would cost more"
    )


def _durable(
    place: TierCadence, step_s: float, cost: SaveCost | None, mtbf_s: float, served: int, given: bool
) -> tuple[int, str]:
    if cost is None:
        if place.remote:
            return place.now, "until the cost of a checkpoint is measured"
        return max(1, nice_steps(FIRST_S, step_s)), "to measure the cost of a checkpoint"
    least = least_interval(cost.write_s, shared=place.remote)
    best = best_interval(max(cost.save_s, 1e-4), mtbf_s)
    every = steps_apart(best, least, step_s, SLACK)
    low, high = (best_interval(max(cost.shifted(by).save_s, 1e-4), mtbf_s) for by in (-UNSURE, UNSURE))
    if nice_steps(max(low, least), step_s) <= place.now <= nice_steps(max(high, least), step_s):
        every = place.now
    faults = "configured" if given else f"{served} so far" if served else "none so far"
    why = f"a checkpoint costs {duration(cost.save_s)} of training and is durable after {duration(cost.write_s)}; "
    why += f"it is expected to be needed once in {duration(mtbf_s)} ({faults})"
    if least > best:
        why += f"; at most every {duration(least)}, so that the tier is not busy all the time"
    return every, why


def differs(decision: Decision, places: Sequence[TierCadence]) -> bool:
    """Return True if a decision differs enough to change the intervals."""
    for place in places:
        if isinstance(place.every, Auto) and place.every.every_s is not None:
            if decision.every[place.name] != place.now:
                return True
            continue
        ratio = decision.every[place.name] / max(1, place.now)
        if ratio >= CHANGE or ratio <= 1 / CHANGE:
            return True
    return False


def lines(decision: Decision) -> list[str]:
    """Return the decision as text, with one line for each tier."""
    return [
        f"{name}: every {every} step{'s' * (every != 1)}"
        + (f" ({decision.why[name]})" if decision.why.get(name) else "")
        for name, every in decision.every.items()
    ]


# -- the model of lost time --


MOST_S = 1e12  # seconds; a larger value is a typing error
DAY_S = 86400.0
BUSY = 2.0  # an interval is at least this many writes long, so a folder is busy at most half of the time
BUSY_FAR, LEAST_FAR_S = 10.0, 60.0  # the same for a shared tier, and its shortest interval
THICK = 0.1  # a shared tier may be busier if its interval would exceed this share of the time between faults


@dataclass(frozen=True, slots=True)
class TierCost:
    """A tier that is saved to. `cost_s`: training time that one save costs. `every_s`: seconds of training between
    saves, infinite for never. `restore_s`: duration of a restore from it. `write_s`: time from the end of the saved
    step until the save is durable. `served`: share of faults after which a restore uses this tier."""

    name: str
    cost_s: float
    every_s: float
    restore_s: float
    write_s: float = 0.0
    served: float = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of faults and saves. `perceive_s`: mean time from a fault to its detection. `restart_s`: time from the
    detection to the call of restore(). `tiers`: nearest first. A farther tier serves the faults that nearer tiers do
    not survive."""

    perceive_s: float
    restart_s: float
    tiers: Sequence[TierCost]


@dataclass(frozen=True, slots=True)
class TierShare:
    """The forecast for a tier. `recompute_s`: training that is lost to a fault that the tier serves."""

    name: str
    served: float
    every_s: float
    restore_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Mean seconds for each fault. `effective`: share of wall-clock time that is training and not repeated later.
    `wall_s`: wall-clock time between faults, including faults during recovery."""

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
    faults. `recovering`: True if faults also occur during recovery, which then starts again."""
    _check(costs, mtbf_s)
    rate = 1.0 / mtbf_s
    used = [tier for tier in costs.tiers if tier.served > 0]
    slowing = sum(tier.cost_s / tier.every_s for tier in costs.tiers)
    again = rate if recovering else 0.0  # rate of faults during recovery
    visits = _visits(used, costs, again)
    total = sum(visits)
    stages = [0.0, 0.0, 0.0]
    ends = [0.0] * len(used)  # number of recoveries that end with a restore from each tier
    for i, (tier, count) in enumerate(zip(used, visits, strict=True)):
        past = 0.0
        for number, lasting in enumerate((costs.perceive_s, costs.restart_s, tier.restore_s)):
            stages[number] += count * _within(past, lasting, again)
            past += lasting
        ends[i] = count * math.exp(-again * past)
    # Training until the next fault. A save follows its steps, so on average half a save is still to come at the fault.
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
    """Return the number of recoveries that start from each tier, in a series of faults without training between them.
    A recovery uses the farthest tier that any fault of the series needs."""
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
    """Return the mean duration of a stage that starts after `past` seconds, if faults may end it early."""
    return lasting if not rate else -math.exp(-rate * past) * math.expm1(-rate * lasting) / rate


def _lost(tier: TierCost, rate: float, slowing: float) -> float:
    """Return the training lost to a fault: everything since the newest durable step of this tier. `rate`: rate of the
    faults that need this tier. These faults are 1 / rate apart on average. Each interval whose save becomes durable
    before the fault keeps `every_s` of training."""
    if rate <= 0:
        return 0.0
    done = (1 / rate + tier.cost_s / 2) / (1 + slowing)
    if math.isinf(tier.every_s):
        return done
    lap, behind = tier.every_s * (1 + slowing) * rate, tier.write_s - tier.cost_s
    if max(lap, rate * abs(behind)) < 1e-6:  # limit of the formula below, which subtracts two huge numbers
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
        raise UsageError(f"the values of `served` of all tiers must sum to 1, not {served:g}")


def positive(name: str, value: object, *, zero: bool = False, most: float = MOST_S) -> float:
    """Return a number as a float. Raise UsageError if it is not a number in the range."""
    right = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    if not right or not (0 if zero else 1e-9) <= value <= most:  # type: ignore[operator]
        raise UsageError(f"{name} is {value!r}: must be a number {'from' if zero else 'above'} 0, at most {most:g}")
    return float(value)  # type: ignore[arg-type]


# -- save intervals --


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between saves that minimize the sum of saving cost and lost training.

    `cost_s`: training time that a save costs. `mtbf_s`: seconds between the faults for which this save is needed.

    Small costs use Young's square root of 2 x cost x MTBF, others Daly's higher order. Return infinity if a value is
    infinite. Raise UsageError if a value is negative or not a number.
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
    """Return the minimum seconds between saves to a durable tier, so that the tier is not busy all the time."""
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
    """Return `nice_steps` for at least `least_s`. The result may be shorter than `least_s` by the factor `slack`."""
    steps = nice_steps(max(interval_s, least_s), step_s)
    if not steps or steps * step_s * (1 + 1e-9) >= least_s / slack:
        return steps
    return nice_steps(2 * least_s, step_s)  # the next larger number, because the nearest was too short


# -- the measured cost of saves --


STEPS, SAVES = 128, 16  # number of remembered values of each kind
STALE = 512  # steps after which a value is outdated, because trainings change
ANEW = 8  # number of steps after which a mean is computed again
ENOUGH = 4  # minimum number of values for a mean
MANY = 10  # minimum number of values to leave out the extremes; fewer values use the median
TRIM = 0.1  # share of values that a mean leaves out at each end
LEAST = 0.1  # minimum share of a save's duration that counts as its cost
FAR = 3.0  # a slowdown of more than this multiple of the maximum effect of saving has another cause

Kind = tuple[bool, tuple[str, ...]]  # a kind of step: True if it had a snapshot, and the tiers written to


class Meter:
    """Measures the cost of saving in one job attempt. Call it for each step in order, and at the end of each save."""

    def __init__(self) -> None:
        self._number = 0
        self._known: dict[Kind, tuple[int, float | None]] = {}  # mean durations, and the step number of each
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
        """Record a step. Return its extra time over a step without saves, not counting the wait; 0 if it is unknown.

        `beside_s`: time during which a write ran. A write cannot slow a step by more than this, and a copy cannot slow
            it by more than one step. A much longer step had another cause, for example an evaluation.
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
        """Record the end of a save to a tier. `lasted_s`: seconds since the save was ordered; None if it failed. Call
        `step` for the steps of the save first."""
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
        """Return the mean duration of steps of this kind, or None if too few are known."""
        known = self._known.get(kind)
        if known is None or self._number >= known[0] + ANEW:
            steps = self._steps.get(kind, ())
            usual = _mean([seconds for number, seconds in steps if number > self._number - STALE])
            known = self._known[kind] = self._number, usual
        return known[1]

    @property
    def snapshot_s(self) -> float | None:
        """Return the training time that a snapshot costs, which is at least the wait."""
        waited, more = _mean(self._stalls), self._more()
        return None if waited is None or len(more) < ENOUGH else max(waited, middle(more))

    @property
    def snapshot_unsure_s(self) -> float:
        """Return the standard error of `snapshot_s`."""
        more, plain = self._more(), [seconds for _, seconds in self._steps.get((False, ()), ())]
        return math.hypot(*(statistics.stdev(one) / len(one) ** 0.5 for one in (more, plain) if len(one) > 1))

    def _more(self) -> list[float]:
        """Return the extra time of each step with a snapshot, compared with steps without one but with equal writes."""
        base = {beside: self._usual((False, beside)) for beside in {beside for _, beside in self._copied}}
        return [seconds - known for seconds, beside in self._copied if (known := base.get(beside)) is not None]

    @property
    def snapshots(self) -> int:
        """Return the number of snapshots in the measurement of `snapshot_s`."""
        return len(self._copied)

    def save_s(self, name: str) -> float | None:
        """Return the training time that a checkpoint in a tier costs, without its snapshot. This is at least a share of
        the save's duration, because an apparent cost of zero would mean to save all the time. If a write runs during
        every step, only this share is known."""
        least, taken = LEAST * self.write_s(name), self._taken.get(name, ())
        if taken:
            return max(middle(taken), least)
        return least if len(self._lasted.get(name, ())) >= ENOUGH else None

    def save_unsure_s(self, name: str) -> float:
        """Return the standard error of `save_s`."""
        taken = self._taken.get(name, ())
        return statistics.stdev(taken) / len(taken) ** 0.5 if len(taken) > 1 else 0.0

    def write_s(self, name: str) -> float:
        """Return the median time until a save is durable."""
        lasted = self._lasted.get(name)
        return statistics.median(lasted) if lasted else 0.0

    def saves(self, name: str) -> int:
        return len(self._taken.get(name) or self._lasted.get(name) or ())


def middle(values: Iterable[float]) -> float:
    """Return the mean without the extremes. For few values, return the median."""
    ordered = sorted(values)
    if len(ordered) < MANY:
        return statistics.median(ordered)
    cut = int(TRIM * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _mean(values: Sequence[float] | deque[float]) -> float | None:
    return middle(values) if len(values) >= ENOUGH else None


def _bounded(slowed: float, most: float) -> float:
    return 0.0 if slowed > FAR * most else min(slowed, most)
