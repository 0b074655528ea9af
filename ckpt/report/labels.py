"""Words and values that the parts of a report page share; see `ckpt.report.page`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt.goodput.breakdown import InterruptionCost, Statement
from ckpt.report.chronicle import Chronicle

NEWEST, FIRST = 100, 15  # rows of a table: that are there at all, and that are seen at once
TIERS = ("one", "two", "three", "four")  # classes: the first tiers of a run; further ones are in tables only

NAMES = {
    "trained": "training",
    "saving": "saving",
    "recompute": "steps done once more",
    "restore": "restoring",
    "restart": "restarting",
    "perceive": "until a fault was noticed",
    "paused": "paused on purpose",
    "other": "other",
    "stopped": "stopped on purpose",
}


INNER = {
    "restart": (
        ("leave", "until the process was gone"), ("launch", "until the next was born"),
        ("start", "imports, model, process group"), ("open", "opening the run"),
        ("setup", "until restore() was called"), ("first_step", "first step, beyond a usual one"),
        ("unknown", "not divided: nobody saw the end"),
    ),
    "recompute": (
        ("unfinished", "the step that was cut off"), ("redone", "steps done once more"),
        ("undone", "steps not done again yet"),
    ),
}  # fmt: skip


def inner_parts(name: str, cost: InterruptionCost) -> list[tuple[str, float]]:
    """What the restart and the recomputation are made of, without what is 0."""
    return [(text, some) for field, text in INNER.get(name, ()) if (some := getattr(cost, field)) > 0]


@dataclass(frozen=True)
class Subject:
    """What a page is about. `problems`: what could not be read, or is missing; `made`: when, in seconds since 1970;
    `stored`: steps of the checkpoints that there are."""

    url: str
    statement: Statement
    chronicle: Chronicle
    stored: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    made: float = 0.0
    version: str = ""


def percent(value: float) -> str:
    """With as many digits as make the rest of 100 % plain: 99.95 %, 97 %, 0.003 %."""
    small = min(value, 1 - value)
    digits = 0 if small <= 0 else min(6, max(1, 1 - math.floor(math.log10(100 * small))))
    return f"{100 * value:.{digits}f} %"


def share(some: float, whole: float) -> str:
    """One as a part of the other."""
    value = 100 * some / whole if whole > 0 else 0.0
    if value <= 0:
        return "0 %"
    if value < 0.01:
        return "under 0.01 %"
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %" if value < 1000 else f"{value / 100:,.0f} times"


def clip(text: str, most: int = 160) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
