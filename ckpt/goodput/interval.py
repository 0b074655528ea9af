"""How far saves are apart: what `every="auto"`, `ckpt plan` and `ckpt doctor` solve. Pure; times are seconds."""

from __future__ import annotations

import math

from ckpt.errors import UsageError

BUSY = 2.0  # a folder may be written to for half of the time;
BUSY_FAR, LEAST_FAR_S = 10.0, 60.0  # a shared tier for a tenth, since others pay for it too, and once a minute at most
THICK = 0.1  # of the time between faults: intervals beyond that lose so much that a shared tier may be busier


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
