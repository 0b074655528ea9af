"""Chooses save intervals for `every="auto"`.

    step durations (ckpt.core.writer.bookkeeper) -> Costs -> decide() -> Decision
        -> an order to all ranks (ckpt.core.run.save_plan) -> SavePlan

- **Memory** is saved as often as a budget allows: every step, if a snapshot costs at most 1 % of its training time.
  With very frequent faults it is saved more often, because repeating steps would cost more than snapshots.
- **Durable tiers** use the formula of Young and Daly. Frequent saves cost more, and rare saves lose more at a fault.
  The sum is lowest at about the square root of 2 x cost of a save x time between the faults for which the tier is
  needed. Only faults that nearer tiers did not serve count, and if memory survives, these are few.

Both need steps without any save for comparison. So a run without a history begins with `FIRST` and measures the cost of
saving. All functions are pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.core.cadence.ledger import Account, Decision
from ckpt.core.cadence.model import DAY_S, best_interval, least_interval, nice_steps, steps_apart
from ckpt.errors import InvalidArgumentError
from ckpt.units import duration

MEMORY = "memory"
FIRST_MEMORY, FIRST_DURABLE = 4, 100  # steps, until costs are measured
ANNOUNCED = ("signal", "preemption", "deadline")  # faults that let the training loop save its next step
FIRST_S = 10.0  # between the durable saves that measure their cost
FLEET_GPU_S = 54 * 86400 * 16384 / 419  # GPU seconds between interruptions: Llama 3, arXiv 2407.21783, section 3.3.4
FURTHER = 10.0  # each farther tier is needed this much more rarely, until measured
SAMPLES = 4  # saves of a durable tier that are enough to know its cost
SNAPSHOTS = 12
UNSURE = 2.0  # standard errors within which the present interval may be optimal
SEVERAL = 2  # from this many faults on, a run's own time between faults counts
SLACK = 1.2  # a round number of steps may be below a bound by this factor, because costs are estimates
TIMED = 0.1  # tolerated deviation from a requested time
CHANGE = 2.2  # minimum factor for a change of the interval: the total cost is flat around its minimum


@dataclass(frozen=True, slots=True)
class Auto:
    """A save interval that everystep measures and adapts.

    budget: the share of training time that snapshots may cost, unless faults cost more.
    mtbf_s: seconds between faults, if known; default: estimated from this run.
    every_s: a fixed time between saves. Time outside steps, for example evaluations, does not count. All ranks save the
        same steps, so the interval is a number of steps that follows the step duration.
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
    values.
    """
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
    """Return True if everystep chooses the interval itself. A fixed time is only converted into steps."""
    found = as_every(every)
    return isinstance(found, Auto) and found.every_s is None


@dataclass(frozen=True, slots=True)
class TierCadence:
    """A tier whose interval is to be chosen. `every`: as configured; `now`: the present interval in steps; `remote`:
    True for a bucket."""

    name: str
    every: int | Auto
    now: int
    remote: bool = False


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The measured cost of a save to one tier. `save_s`: training time that it costs, `unsure_s`: its standard error;
    `write_s`: until it is durable."""

    save_s: float
    write_s: float
    samples: int
    unsure_s: float = 0.0

    def shifted(self, errors: float) -> SaveCost:
        return replace(self, save_s=max(0.0, self.save_s + errors * self.unsure_s))


@dataclass(frozen=True, slots=True)
class History:
    """The known faults. `training_s`: training time so far; `deaths`: faults after which the training loop saved no
    further step, so that only a snapshot helped; `served`: the number of restarts from each tier."""

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
    """Return the seconds between the faults for which a tier is needed. The fleet's figure counts as one fault, and
    this run's faults are added. `served`: how many faults needed the tier or a farther one. If that number is unlikely
    for the fleet's figure, the figure gets less weight."""
    prior = min(FLEET_GPU_S / max(1, world), DAY_S) * FURTHER**rank_of_place
    weight = 1.0 if served < SEVERAL else _at_least(served, known.training_s / prior)
    return max(weight * prior + known.training_s, 1.0) / (weight + served)


def _at_least(count: int, expected: float) -> float:
    """Return the Poisson probability of at least `count` faults if `expected` are expected."""
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
    """Choose the intervals of the tiers, memory first. A tier without a known cost keeps its interval, or gets one that
    measures the cost. `held`: the decision before, perhaps of an earlier job attempt."""
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
    """Return the steps in this time, to two digits. The present interval stays if it is within a tenth."""
    steps = max(1.0, every_s / max(step_s, 1e-6))
    if abs(now - steps) > TIMED * steps:
        now = max(1, int(float(f"{steps:.2g}")))
    return now, f"{duration(every_s)}, in steps of {duration(step_s)}"


def _as_long(every: int, then_s: float, now_s: float) -> int:
    """Return the steps that last as long as these did before the step duration changed."""
    if then_s <= 0 or 0.5 < now_s / then_s < 2:
        return every
    return max(1, nice_steps(every * then_s, now_s))


def enough(place: TierCadence, cost: SaveCost | None) -> bool:
    """Return True if the cost of a save there is known."""
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
    """Return the seconds between faults after which only a snapshot helps; infinite if unknown."""
    if auto.mtbf_s is not None:
        return auto.mtbf_s
    return expected_mtbf(known, world, known.deaths, 0) if known.deaths >= SEVERAL else math.inf


def _against_faults(save_s: float, mtbf_s: float, step_s: float) -> float:
    """Return the steps between snapshots by Young and Daly, rounded down, where the total cost grows more slowly."""
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
    """Return the decision as text, one line per tier."""
    return [
        f"{name}: every {every} step{'s' * (every != 1)}"
        + (f" ({decision.why[name]})" if decision.why.get(name) else "")
        for name, every in decision.every.items()
    ]
