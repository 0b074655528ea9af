"""How often to save: `every="auto"`.

    what steps took (ckpt.core.writer.bookkeeper) -> Costs -> decide() -> Decision
        -> ordered for all ranks (ckpt.core.run.save_plan) -> SavePlan

- **Memory** is saved as often as a budget allows: every step, if a snapshot takes at most 1 % of it from training. And
  more often where faults come so thick that doing their steps again costs more than the snapshots would.
- **Durable places** by Young and Daly: saving more often costs more, and less often loses more at a fault; the sum is
  least where the interval is about the root of 2 x what a save costs x the time between the faults for which the place
  is needed. Those are few where memory survives: only faults that the nearer places did not serve are counted.

Both need a step beside which nothing is saved, to compare with; so a run without a history begins with `FIRST`, and
tries out what saving costs. Everything here is pure.
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
FIRST_MEMORY, FIRST_DURABLE = 4, 100  # steps, until something is known
ANNOUNCED = ("signal", "preemption", "deadline")  # faults for which the training loop saves its next step
FIRST_S = 10.0  # between the durable saves by which their cost is found out
FLEET_GPU_S = 54 * 86400 * 16384 / 419  # GPU seconds between interruptions: Llama 3, arXiv 2407.21783, section 3.3.4
FURTHER = 10.0  # a place is needed so much more rarely than the one before, as long as nothing else is known
SAMPLES = 4  # saves of a durable tier that say enough
SNAPSHOTS = 12
UNSURE = 2.0  # standard errors, within which what is may be right
SEVERAL = 2  # faults, from which on a run tells something about the time between them
SLACK = 1.2  # a round number of steps may be below a bound by so much: costs are not known better
TIMED = 0.1  # by which a cadence may be off the time that it was asked for
CHANGE = 2.2  # a new cadence has to differ by this factor: the sum of both losses is flat around its least


@dataclass(frozen=True, slots=True)
class Auto:
    """A cadence that is found out. `budget`: the share of training time that snapshots may cost, unless faults cost
    more, and at most as much again what is kept of the steps between, so that a hang, an exception or a signal loses
    none; `mtbf_s`: seconds between faults, where that is known better than a run can see by itself. `every_s`: as many
    steps as last so many seconds, whatever that costs. What is no step, such as an evaluation, does not count; ranks
    always save the same steps, so that it is a number of steps which follows what steps take."""

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
                raise InvalidArgumentError(f"Auto({name}={value!r}): it has to be a number {least}")


_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")  # "30s", "1.5 h"
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def as_every(every: object) -> int | Auto:
    """What the user says of a cadence: a number of steps, a time, "auto" or an `Auto`. InvalidArgumentError else."""
    if every == "auto":
        return Auto()
    if isinstance(every, Auto):
        return every
    if isinstance(every, str) and (time := _TIME.fullmatch(every)) and float(time[1]):
        return Auto(every_s=float(time[1]) * _SECONDS[time[2]])
    if type(every) is not int or every < 1:
        raise InvalidArgumentError(
            f'every={every!r} makes no sense: it is a number of steps from 1, a time such as "30s", "10min" or "2h", '
            '"auto" or ckpt.Auto(...)'
        )
    return every


def is_auto(every: object) -> bool:
    """Whether it is to be found out what is best, and not only how many steps a time has."""
    found = as_every(every)
    return isinstance(found, Auto) and found.every_s is None


@dataclass(frozen=True, slots=True)
class TierCadence:
    """One that is to be decided about. `every`: as the user said; `now`: in steps, at present; `remote`: a bucket."""

    name: str
    every: int | Auto
    now: int
    remote: bool = False


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Of one place, measured. `save_s`: what a save takes from training, `unsure_s`: the standard error of that;
    `write_s`: until it is durable."""

    save_s: float
    write_s: float
    samples: int
    unsure_s: float = 0.0

    def shifted(self, errors: float) -> SaveCost:
        return replace(self, save_s=max(0.0, self.save_s + errors * self.unsure_s))


@dataclass(frozen=True, slots=True)
class History:
    """What is known of faults. `training_s`: watched so far; `deaths`: after which only a snapshot helped, since the
    training loop did not save a further step; `served`: by place, how often a restart took the state from there."""

    training_s: float = 0.0
    interruptions: int = 0
    deaths: int = 0
    served: Mapping[str, int] = field(default_factory=dict)


def history(accounts: Sequence[Account]) -> History:
    """Of the incarnations so far, in order. After a planned stop no place is needed because of a fault."""
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
    """Seconds between the faults for which a place is needed: what a fleet has seen, as if it were one fault, and what
    this run has seen besides. `served`: how often the place, or one further away, was needed so far. If that is hardly
    likely by what the fleet has seen, it says little about this run, and counts for as much less."""
    prior = min(FLEET_GPU_S / max(1, world), DAY_S) * FURTHER**rank_of_place
    weight = 1.0 if served < SEVERAL else _at_least(served, known.training_s / prior)
    return max(weight * prior + known.training_s, 1.0) / (weight + served)


def _at_least(count: int, expected: float) -> float:
    """How likely so many faults are, or more, where so many are expected (Poisson)."""
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
    """For the places in order, memory first if there is one. What nothing is known about yet keeps its cadence, or gets
    one by which its cost can be found out. `held`: what was decided before, perhaps by an earlier incarnation."""
    sure = {place.name: cost for place in places if enough(place, cost := costs.get(place.name)) and cost is not None}
    decision = Decision(step, {}, {}, {name: cost.save_s for name, cost in sure.items()}, {}, step_s=step_s)
    durable = [place.name for place in places if place.name != MEMORY]
    for place in places:
        every, why = place.now, "as it was asked for"
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
    """As many steps as last so long, to two digits; what is within a tenth of that is left alone."""
    steps = max(1.0, every_s / max(step_s, 1e-6))
    if abs(now - steps) > TIMED * steps:
        now = max(1, int(float(f"{steps:.2g}")))
    return now, f"{duration(every_s)}, in steps of {duration(step_s)}"


def _as_long(every: int, then_s: float, now_s: float) -> int:
    """As many steps as last as long as these did, when a step took another time."""
    if then_s <= 0 or 0.5 < now_s / then_s < 2:
        return every
    return max(1, nice_steps(every * then_s, now_s))


def enough(place: TierCadence, cost: SaveCost | None) -> bool:
    """Whether it is known what a save there costs."""
    return cost is not None and cost.samples >= (SNAPSHOTS if place.name == MEMORY else SAMPLES)


def _memory(place: TierCadence, auto: Auto, step_s: float, cost: SaveCost | None) -> tuple[int, str]:
    if cost is None:
        return place.now, "until it is known what a snapshot costs"

    def affordable(cost: SaveCost) -> int:
        steps = max(1, math.ceil(cost.save_s / (auto.budget * step_s) - 0.05))
        return steps_apart(0.0, steps * step_s, step_s, SLACK)

    every, sure = affordable(cost), ""
    if affordable(cost.shifted(-UNSURE)) <= place.now <= affordable(cost.shifted(UNSURE)):
        every, sure = place.now, ", as far as that can be told"  # it may well be the right one
    share = cost.save_s / (every * step_s)
    why = f"a snapshot takes {duration(cost.save_s)} from training, a step {duration(step_s)}: "
    return every, f"{why}{share:.2%} of the time, of {auto.budget:.0%} that it may cost{sure}"


def _mtbf_of_snapshots(auto: Auto, known: History, world: int) -> float:
    """Seconds between faults after which only a snapshot helps; infinite if nobody knows."""
    if auto.mtbf_s is not None:
        return auto.mtbf_s
    return expected_mtbf(known, world, known.deaths, 0) if known.deaths >= SEVERAL else math.inf


def _against_faults(save_s: float, mtbf_s: float, step_s: float) -> float:
    """Steps between snapshots by Young and Daly; of the round numbers one that is rather too small, since the sum of
    both losses grows more slowly on that side."""
    best_s = best_interval(max(save_s, 1e-4), mtbf_s)
    return max(1, nice_steps(best_s / math.sqrt(2), step_s)) if best_s < math.inf else math.inf


def _thick(save_s: float, interval_s: float, mtbf_s: float) -> str:
    return (
        f"a snapshot takes {duration(save_s)} from training, {save_s / interval_s:.1%} of the time: more than its "
        f"budget, as one is expected to be needed every {duration(mtbf_s)}, and steps that are done again cost more"
    )


def _durable(
    place: TierCadence, step_s: float, cost: SaveCost | None, mtbf_s: float, served: int, given: bool
) -> tuple[int, str]:
    if cost is None:
        if place.remote:
            return place.now, "until it is known what a checkpoint costs"
        return max(1, nice_steps(FIRST_S, step_s)), "to find out what a checkpoint costs"
    least = least_interval(cost.write_s, shared=place.remote)
    best = best_interval(max(cost.save_s, 1e-4), mtbf_s)
    every = steps_apart(best, least, step_s, SLACK)
    low, high = (best_interval(max(cost.shifted(by).save_s, 1e-4), mtbf_s) for by in (-UNSURE, UNSURE))
    if nice_steps(max(low, least), step_s) <= place.now <= nice_steps(max(high, least), step_s):
        every = place.now
    faults = "as you said" if given else f"{served} so far" if served else "none so far"
    why = f"a checkpoint takes {duration(cost.save_s)} from training and {duration(cost.write_s)} to be durable; "
    why += f"it is expected to be needed once in {duration(mtbf_s)} ({faults})"
    if least > best:
        why += f"; not more often than every {duration(least)}, so that the tier is not busy all the time"
    return every, why


def differs(decision: Decision, places: Sequence[TierCadence]) -> bool:
    """Whether it is worth a change."""
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
    """For people."""
    return [
        f"{name}: every {every} step{'s' * (every != 1)}"
        + (f" ({decision.why[name]})" if decision.why.get(name) else "")
        for name, every in decision.every.items()
    ]
