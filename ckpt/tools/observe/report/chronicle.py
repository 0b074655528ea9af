"""The events of a run over time, reduced to few numbers for charts. `goodput.accounting` computes the totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpt.core.cadence.ledger import TOGETHER_S, Account, Decision, LandedSave, Restore, StepRow
from ckpt.guard.report import Fault, SavedStep, incidents, was_asked
from ckpt.tools.observe.goodput.accounting import SettledRun
from ckpt.tools.observe.goodput.timeline import PlacedAccount

T = TypeVar("T")
MOST_POINTS = 1600  # maximum points of the curve of steps
BUCKETS = range(-56, 33)  # buckets of stall times, see ckpt.core.cadence.ledger.stall_bucket


@dataclass(frozen=True)
class ShownEvent(Generic[T]):
    """A recorded event, and its time in seconds since 1970."""

    at: float
    one: T


@dataclass(frozen=True, slots=True)
class Incident:
    """The reports of all ranks about one incident. `reported`: True if `faults/` has a report, False if only the
    metrics have a line. `asked`: True for a requested save, or a save because the job's time was nearly over."""

    at: float
    kind: str
    ranks: tuple[int, ...]
    step: int | None
    text: str
    saved: tuple[SavedStep, ...]
    reported: bool
    advice: str = ""
    hosts: tuple[str, ...] = ()
    asked: bool = False


@dataclass
class Chronicle:
    """The events of a run. `curve`: points (time, step), and None where the line is interrupted. `stalls`: number of
    saves by bucket of stall time."""

    begin: float = 0.0
    until: float = 0.0
    curve: list[tuple[float, int] | None] = field(default_factory=list)
    starts: list[ShownEvent[Account]] = field(default_factory=list)
    restores: list[ShownEvent[Restore]] = field(default_factory=list)
    decisions: list[ShownEvent[Decision]] = field(default_factory=list)
    landed: list[ShownEvent[LandedSave]] = field(default_factory=list)
    stalls: dict[int, int] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)

    @property
    def faults(self) -> list[Incident]:
        return [incident for incident in self.incidents if not incident.asked]

    @property
    def asked(self) -> list[Incident]:
        """Requested saves, and saves because the job's time was nearly over."""
        return [incident for incident in self.incidents if incident.asked]


def chronicle(run: SettledRun, faults: Sequence[Fault]) -> Chronicle:
    """Build the chronicle from the timeline of a run and its fault reports."""
    line = run.line
    found = Chronicle(incidents=_incidents(line, faults))
    if not line:
        return found
    clock = line[0]
    found.begin, found.until = run.statement.begin, max(run.statement.begin, run.statement.until)
    found.accounts = [one.account for one in line]
    for one in line:
        account = one.account
        _curve(found, clock, one, max(3, MOST_POINTS // len(line)))
        found.starts.append(ShownEvent(clock.wall(one.t(account.opened)), account))
        found.restores += [ShownEvent(clock.wall(one.t(each.at)), each) for each in account.restores]
        found.decisions += [
            ShownEvent(clock.wall(one.t(each.at or account.opened)), each) for each in account.decisions if each.every
        ]
        found.landed += [ShownEvent(clock.wall(one.t(each.at)), each) for each in account.landed if _sound(each)]
        for name, count in account.stalls.items():
            if name.lstrip("-").isdecimal() and len(name) < 4 and int(name) in BUCKETS and 0 < count < 2**53:
                found.stalls[int(name)] = found.stalls.get(int(name), 0) + count
    return found


def _sound(one: LandedSave) -> bool:
    return min(one.seconds, one.nbytes, one.stored, one.behind) >= 0 and max(one.nbytes, one.stored) < 2**63


def _curve(found: Chronicle, clock: PlacedAccount, one: PlacedAccount, most: int) -> None:
    points: list[tuple[float, int] | None] = []
    for event in one.events():
        if isinstance(event, StepRow):
            if not points or points[-1] is None:
                points.append((clock.wall(one.t(event.at - event.seconds)), event.step - event.steps))
            points.append((clock.wall(one.t(event.at)), event.step))
        elif event.step is not None:
            points += [None, (clock.wall(one.t(event.at + event.seconds)), event.step)]
    stride = math.ceil(len(points) / most) or 1
    last = len(points) - 1
    around = {n + d for n, point in enumerate(points) if point is None for d in (-1, 0, 1)}
    found.curve += [None, *(p for n, p in enumerate(points) if n % stride == 0 or n == last or n in around)]


# -- faults --


def _incidents(line: Sequence[PlacedAccount], faults: Sequence[Fault]) -> list[Incident]:
    found = []
    for group in incidents(faults):
        first = group[0]
        saved = sorted((s for one in group for s in one.saved), key=lambda s: (s.step, s.tier))
        step = max((step for one in group for step in one.steps.values()), default=None)
        ranks, hosts = tuple(sorted({one.rank for one in group})), tuple(sorted({one.host for one in group}))
        rest = first.summary, tuple(saved), True, first.advice, hosts, first.asked
        found.append(Incident(first.when, first.kind, ranks, step, *rest))
    for one in line:
        for seen in one.account.faults:
            at = one.account.wall(seen.at)
            reports = (f for f in faults if f.kind == seen.kind or (seen.ends and f.ending and f.term in one.terms))
            if not any(abs(at - fault.when) < TOGETHER_S for fault in reports):
                step = seen.step if seen.step >= 0 else None
                asked = was_asked(seen.kind, seen.by, ends=seen.ends)
                found.append(Incident(at, seen.kind, (seen.rank,), step, seen.summary, (), False, asked=asked))
    return sorted(found, key=lambda one: one.at)
