"""Format a `Statement` as text and table rows, for terminals and pages."""

from __future__ import annotations

import math

from ckpt.guard.report import in_words
from ckpt.tools.observe.goodput.breakdown import Interruption, InterruptionCost, Statement
from ckpt.units import LEAST_S, duration, moment

NEWEST, FIRST = 100, 15  # maximum rows of a table, and rows that are visible without expanding the table
TIERS = ("one", "two", "three", "four")  # CSS classes of a run's first tiers; further tiers are only in tables

NAMES = {
    "trained": "training",
    "saving": "saving",
    "recompute": "steps repeated",
    "restore": "restoring",
    "restart": "restarting",
    "perceive": "until a fault was detected",
    "paused": "paused on purpose",
    "other": "other",
}


INNER = {
    "restart": (
        ("leave", "until the process was gone"), ("launch", "until the next was started"),
        ("start", "imports, model, process group"), ("open", "opening the run"),
        ("setup", "until restore() was called"), ("first_step", "extra time of the first step"),
        ("unknown", "not divided: the end was not recorded"),
    ),
    "recompute": (
        ("unfinished", "the interrupted step"), ("redone", "steps repeated"),
        ("undone", "lost steps not repeated yet"),
    ),
}  # fmt: skip


def inner_parts(name: str, cost: InterruptionCost) -> list[tuple[str, float]]:
    """Return the parts of the restart or of the recomputation that are not 0, with their texts."""
    return [(text, some) for field, text in INNER.get(name, ()) if (some := getattr(cost, field)) > 0]


def percent(value: float) -> str:
    """Format a share with more digits the closer it is to 0 % or 100 %: 99.95 %, 97 %, 0.003 %."""
    small = min(value, 1 - value)
    digits = 0 if small <= 0 else min(6, max(1, 1 - math.floor(math.log10(100 * small))))
    return f"{100 * value:.{digits}f} %"


def share(some: float, whole: float) -> str:
    """Format a value as a percentage of another value."""
    value = 100 * some / whole if whole > 0 else 0.0
    if value <= 0:
        return "0 %"
    if value < 0.01:
        return "under 0.01 %"
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %" if value < 1000 else f"{value / 100:,.0f} times"


def clip(text: str, most: int = 160) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# -- rows --


def summary(found: Statement) -> list[tuple[str, str]]:
    rows = [
        ("effective training time", "not known yet" if found.effective is None else percent(found.effective)),
        ("lost training time", duration(found.invalid_s)),
        ("trained", "not known yet" if found.trained is None else trained_line(found, found.trained)),
        ("wall-clock time", f"{duration(found.wall_s)}, from {moment(found.begin)} to {moment(found.until)}"),
        ("state", state_line(found)),
        ("steps", steps_line(found)),
        ("interruptions", interruptions_line(found)),
    ]
    if found.count:
        rows.append(("of which", ", ".join(f"{count} {in_words(kind)}" for kind, count in found.by_kind.items())))
    if found.by_source:
        served = (f"{count} from {source or 'nothing'}" for source, count in found.by_source.items())
        rows.append(("restored", ", ".join(served)))
    besides = (
        ("the first start", found.first_start_s),
        ("stopped on purpose", found.idle_s),
        ("copied", found.moved_s),
    )
    if uncounted := ", ".join(f"{duration(s)} {what}" for what, s in besides if s > 0):
        rows.append(("counted nowhere", uncounted))
    return rows


def trained_line(found: Statement, share: float) -> str:
    """Return the share of time in steps that count, and the paused and other time that goodput includes in addition."""
    besides = (("paused", found.paused_s), ("other", found.other_s))
    included = " and ".join(f"{duration(seconds)} {name}" for name, seconds in besides if seconds >= LEAST_S)
    return f"{percent(share)} in steps that count" + f"; effective also includes {included}" * bool(included)


def state_line(found: Statement) -> str:
    if found.running:
        return "running"
    if found.ended == "closed":
        return f"closed {moment(found.until)}"
    since = f"for {duration(found.down_s)}, which is not counted"
    if found.ended:
        return f"ended ({in_words(found.ended)}) {moment(found.until)}, not started again {since}"
    return f"last seen {moment(found.until)}; its end was not recorded, and there was no sign of it {since}"


def steps_line(found: Statement) -> str:
    line = f"{found.steps:,}"
    if found.redone_steps:
        line += f", and {found.redone_steps:,} repeated"
    return line if found.usual_step_s is None else f"{line}; one takes {duration(found.usual_step_s)}"


def interruptions_line(found: Statement) -> str:
    if found.mtbf_s is None:
        return f"none in {duration(found.training_s)} of training"
    return f"{found.count}, one in {duration(found.mtbf_s)} of training"


def parts(found: Statement) -> list[tuple[str, str, str, str]]:
    """Return the rows of the breakdown. Omit parts that are 0, unless they belong to the equation of lost time."""
    cost = found.cost
    rows = []
    for name in ("perceive", "restart", "restore", "recompute"):
        rows.append(_line(name, getattr(cost, name), found))
        rows += [_line(f"  {text}", seconds, found) for text, seconds in inner_parts(name, cost)]
    rows.append(_line("saving", found.saving_s, found, each=False))
    if found.saving_s > 0:
        rows.append(_line("  training waited", found.stalled_s, found, each=False))
        slower = _line("  steps were slower (estimate)", found.slowed_s, found, each=False)
        rows.append(slower if found.slowing_known or found.slowed_s > 0 else (slower[0], "not known", "", ""))
    rows.append(_line("invalid", found.invalid_s, found, each=False))
    rows.append(_line("productive", found.productive_s, found, each=False))
    for name, seconds in (("paused", found.paused_s), ("other", found.other_s)):
        if seconds > 0:
            rows.append(_line(name, seconds, found, each=False))
    rows.append(_line("wall-clock", found.wall_s, found, each=False))
    return rows


def _line(name: str, seconds: float, found: Statement, *, each: bool = True) -> tuple[str, str, str, str]:
    share = percent(seconds / found.wall_s) if found.wall_s > 0 else ""
    return name, duration(seconds), share, duration(seconds / found.count) if each and found.count else ""


INTERRUPTION = ("when", "kind", "step", "lost", "restored from", "perceive", "restart", "restore", "recompute")


def interruption(one: Interruption) -> tuple[object, ...]:
    """Return the table row of an interruption, in the order of the titles `INTERRUPTION`."""
    lost = "?" if one.lost_steps is None else one.lost_steps
    source = "not yet" if one.lost_steps is None else f"{one.source}, step {one.restored}" if one.source else "nothing"
    cost = (one.cost.perceive, one.cost.restart, one.cost.restore, one.cost.recompute)
    step = "" if one.step is None else one.step
    return moment(one.at), in_words(one.kind), step, lost, source, *map(duration, cost)
