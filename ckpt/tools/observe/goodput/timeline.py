"""Place all job attempts of a run on one timeline.

Times on the timeline are seconds since the first attempt was started. Within one boot of a machine they follow its
monotonic clock, otherwise the wall clock. If the wall clock went back between two attempts, the time between them
counts as 0, and a note reports it. One rank's metrics represent an attempt; the others only add faults.

Recorded times are limited: no attempt ends after now, and no fault is detected after the next attempt was started.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ckpt.core.cadence.ledger import TOGETHER_S, Account, Restore, StepRow, in_order, term_of
from ckpt.guard.report import Fault, incidents
from ckpt.units import duration, moment

SKEW_S = 60.0  # maximum difference between the clocks of machines; times that are later count as now
SLIGHT_S = 1.0  # seconds by which a clock may go back without a note


@dataclass
class PlacedAccount:
    """A job attempt on the timeline. `offset`: added to a time of its clock to get a time of the timeline. `ceiling`:
    time when another attempt took ownership. `others`: other ranks' metrics. `moved`: the next one trains in a copy."""

    account: Account
    others: list[Account]
    reports: list[Fault]
    offset: float = 0.0
    ceiling: float = math.inf
    moved: bool = False

    def t(self, at: float) -> float:
        """Convert a time of the attempt's clock to the timeline."""
        return min(at + self.offset, self.ceiling)

    def wall(self, t: float) -> float:
        """Convert a time of the timeline to seconds since 1970."""
        return self.account.wall(t - self.offset)

    def starts(self, before: PlacedAccount) -> float:
        """Return when the process started, or when it opened the run if it is the process of the previous attempt."""
        born = self.t(self.account.born)
        return born if born >= before.t(before.account.opened) else self.t(self.account.opening)

    @property
    def terms(self) -> set[str]:
        """The terms that this attempt opened."""
        return {self.account.term, *(one.term for one in self.account.restores)}

    @property
    def last(self) -> float:
        """The last known time, by the attempt's clock. Records after its end do not count."""
        end = self.account.end
        return max(_active(self.account), end.at, end.gone) if end else max(_active(self.account), self.account.kept)

    @cached_property
    def rows(self) -> list[StepRow]:
        """The attempt's steps before another attempt took ownership, including those after its last row."""
        rows_before = list[StepRow]()
        for row in [*self.account.rows, *_unfiled(self.account)]:
            if row.at + self.offset <= self.ceiling:
                rows_before.append(row)
                continue
            whole = row.seconds + row.paused
            share = 1 - (row.at + self.offset - self.ceiling) / whole if whole > 0 else 0.0
            done = math.floor(row.steps * share)
            if done > 0:
                rows_before.append(_part(row, done))
            break
        return rows_before

    def events(self) -> Iterator[Restore | StepRow]:
        """Yield the attempt's rows and restores in the order of time."""
        restores = [one for one in self.account.restores if one.at + self.offset <= self.ceiling]
        timed = [(row.at, 0, row) for row in self.rows] + [(one.at, 1, one) for one in restores]
        return (event for _, _, event in sorted(timed, key=lambda each: each[:2]))

    @cached_property
    def began_with(self) -> Restore | None:
        """The restore before the attempt's first step: the last one that restored a step."""
        first = min((row.at for row in self.account.rows), default=math.inf)
        restores = sorted((one for one in self.account.restores if one.at < first), key=lambda one: one.at)
        return next((one for one in reversed(restores) if one.step is not None), restores[0] if restores else None)

    @property
    def failed(self) -> bool:
        """Return True if the attempt failed according to any rank."""
        beat = self.t(self.account.beat)
        return self.account.failed or any(at > beat for at, _, _ in self._seen(beat, 0.0) if self.account.end)

    def noticed(self, since: float) -> tuple[float | None, str, str]:
        """Return when the end of the attempt was first detected (on the timeline), the kind and a description. Faults
        long before `since`, the last step, and hangs before it do not count, because the attempt survived."""
        end = self.account.end
        seen = self._seen(since, TOGETHER_S)
        times = [one[0] for one in seen[:1]] + ([self.t(end.at)] if end else [])
        kind, summary = seen[0][1:] if seen else ("left" if end and end.how == "left" else "death" if end else "", "")
        for cause, *others in incidents(self.reports):  # skip consequences: errors caused by the end of another rank
            if any(one.kind == kind and one.summary.startswith(summary) for one in others):
                kind, summary = cause.kind, cause.summary
        return (min(times) if times else None), kind or "unknown", summary

    def _seen(self, since: float, before_s: float) -> list[tuple[float, str, str]]:
        """Return faults since `before_s` before the last step, which may have ended it: time, kind and description."""
        found = [
            (self._t_of(account, one.at), one.kind, one.summary, one.ends, self._has_clock_of(account))
            for account in (self.account, *self.others)
            for one in account.faults
        ]
        found += [(self.t_wall(one.when), one.kind, one.summary, _left(one), False) for one in self.reports]
        return sorted(
            (at, kind, summary)
            for at, kind, summary, ends, exact in found
            if (at > since if kind == "hang" and (exact or not ends) else ends and at >= since - before_s)
        )

    def _has_clock_of(self, other: Account) -> bool:
        return other is self.account or same_clock(other, self.account)

    def _t_of(self, other: Account, at: float) -> float:
        if self._has_clock_of(other):
            return self.t(at)
        return self.t_wall(other.wall(at))

    def t_wall(self, moment: float) -> float:
        """Convert seconds since 1970 to the timeline."""
        wall, mono = self.account.anchor
        return self.t(mono + moment - wall)


def placed(
    accounts: list[Account], faults: list[Fault], notes: list[str], now: float = math.inf
) -> list[PlacedAccount]:
    """Return one entry per job attempt, in order, with its offset. `now`: seconds since 1970."""
    ranks: dict[str, dict[int, Account]] = defaultdict(dict)
    for account in map(_ordered, accounts):
        account = _until(account, now, notes)
        known = ranks[account.term].get(account.rank)
        if known is None or (account.end is not None, account.kept) > (known.end is not None, known.kept):
            ranks[account.term][account.rank] = account
    reports: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        if fault.ending:
            reports[fault.term].append(fault)
    line: list[PlacedAccount] = []
    for account in in_order(group[min(group)] for group in ranks.values()):
        others = [one for one in ranks[account.term].values() if one is not account]
        one = PlacedAccount(account, others, [])
        one.reports = [fault for term in sorted(one.terms) for fault in reports[term]]
        if line:
            _place(line[-1], one, notes)
        else:
            one.offset = -account.born
        line.append(one)
    return line


def _place(before: PlacedAccount, one: PlacedAccount, notes: list[str]) -> None:
    """Set the offset of an attempt, and decide whether it took ownership from the previous one."""
    a, b = before.account, one.account
    before.moved = a.url != b.url and ((a.inode != b.inode and 0 not in (a.inode, b.inode)) or a.inode == b.inode == 0)
    last = before.last
    alive = max(_active(a), a.end.at) if a.end and a.end.how != "closed" else _active(a)
    if same_clock(a, b):
        one.offset = before.offset
        overlap = b.opened < alive and not before.moved
    else:
        gap = b.wall(b.born) - a.wall(last)
        one.offset = last + before.offset + gap - b.born
        overlap = b.wall(b.opened) < a.wall(alive) and (a.end is None or a.end.how == "left")
        overlap = overlap and not before.moved and not _came_later(before, one)
        if gap < 0 and not overlap:
            one.offset -= gap
            if gap < -SLIGHT_S:
                went = f"the clock went back by {duration(-gap)} from {a.term} to {b.term}"
                notes.append(f"{went}, so no time is counted between them")
    if before.moved:
        notes.append(f"from {b.term} on the run is a copy, so the time before that is not counted")
    elif overlap:
        before.ceiling = one.offset + b.opened
        notes.append(
            f"{b.term} took ownership at {moment(b.wall(b.opened))} while {a.term} was running,"
            " so later steps of that attempt are not counted"
        )


def _came_later(before: PlacedAccount, one: PlacedAccount) -> bool:
    """Return True if, by the clocks, the attempt restored a step that the previous attempt completed later."""
    restore = one.began_with
    if restore is None or restore.step is None or term_of(restore.checkpoint) not in before.terms:
        return False
    restored = one.account.wall(restore.at + restore.seconds)
    done = [row for row in before.account.rows if row.step - row.steps < restore.step <= row.step]
    return any(
        before.account.wall(row.at - row.seconds * (row.step - restore.step) / row.steps) > restored for row in done
    )


def _left(fault: Fault) -> bool:
    """Return True if the process ended with this fault. Otherwise it may have survived the fault."""
    return fault.exit_code is not None or (fault.by == "writer" and fault.kind in ("death", "oom"))


def same_clock(a: Account, b: Account) -> bool:
    return a.boot == b.boot != ""


def _active(account: Account) -> float:
    """Return the time of the last activity, by the account's clock."""
    ends = [one.at + one.seconds for one in account.restores]
    return max(account.opened, account.beat, *(row.at for row in account.rows), *ends, -math.inf)


def _unfiled(account: Account) -> list[StepRow]:
    """Return the steps that were completed after the last row."""
    at, step = account.opened, None
    for one in account.restores:
        if one.at + one.seconds >= at:
            at, step = one.at + one.seconds, one.step
    if account.rows and account.rows[-1].at >= at:
        at, step = account.rows[-1].at, account.rows[-1].step
    steps = account.step - (account.step - 1 if step is None else step)
    if account.beat <= at or account.step < 0 or steps <= 0:
        return []
    return [StepRow(account.beat, account.step, steps, account.beat - at)]


def _part(row: StepRow, steps: int) -> StepRow:
    """Return a row for the first `steps` steps of a row."""
    share = steps / row.steps
    whole = row.seconds + row.paused
    return StepRow(
        row.at - whole * (1 - share), row.step - row.steps + steps, steps, row.seconds * share, row.stalled * share,
        row.slowed * share, int(row.quiet * share), row.paused * share, int(row.saves * share), row.skipped,
    )  # fmt: skip


def _ordered(account: Account) -> Account:
    """Return the metrics with consistent times, and without rows of no steps."""
    opened = max(account.opened, account.opening, account.born)
    opening = min(account.opening, opened) or opened
    rows = [
        replace(
            row,
            steps=max(1, row.steps),
            seconds=max(0.0, row.seconds),
            stalled=max(0.0, row.stalled),
            paused=max(0.0, row.paused),
        )
        for row in account.rows
    ]
    born = min(account.born, opening) or opening
    return replace(account, born=born, opening=opening, opened=opened, rows=sorted(rows, key=lambda row: row.at))


def _until(account: Account, now: float, notes: list[str]) -> Account:
    """Return the metrics without times after now, and add a note if there were any."""
    limit = max(_active(account), account.anchor[1] + now - account.anchor[0])
    end = account.end
    late = max([account.kept] + ([end.at, end.gone] if end else [])) - limit
    if late <= SKEW_S:
        return account
    note = f"{account.term} has times up to {duration(late)} in the future, which count as now"
    if note not in notes:
        notes.append(note)
    end = replace(end, at=min(end.at, limit), gone=min(end.gone, limit)) if end else None
    return replace(account, kept=min(account.kept, limit), end=end)
