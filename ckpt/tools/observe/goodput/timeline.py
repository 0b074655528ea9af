"""All incarnations of a run on one time line.

Time is a coordinate of its own here, in seconds since the first incarnation was born: within one boot of a machine it
follows its monotonic clock, and from there to another machine the wall clock. If that went back meanwhile, no time has
passed, and a note says so. One rank's account stands for an incarnation; those of others tell of faults.

Nothing that an account or a report says is believed beyond what is possible: no end after now, and none that was
noticed after the next incarnation was born.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ckpt.core.cadence.ledger import TOGETHER_S, Account, Restore, StepRow, in_order
from ckpt.guard.report import Fault, incidents
from ckpt.units import duration, moment

SKEW_S = 60.0  # the clocks of machines differ; what is further in the future than that is nonsense too
SLIGHT_S = 1.0  # a clock that was set back by less than that deserves no note


@dataclass
class PlacedAccount:
    """An incarnation on the time line. `offset`: from its clock to the line; `ceiling`: when another took the run over;
    `others`: accounts of other ranks; `moved`: the next one trains in a copy."""

    account: Account
    others: list[Account]
    reports: list[Fault]
    offset: float = 0.0
    ceiling: float = math.inf
    moved: bool = False

    def t(self, at: float) -> float:
        """A moment of its clock, on the line."""
        return min(at + self.offset, self.ceiling)

    def wall(self, t: float) -> float:
        """A moment of the line, in seconds since 1970."""
        return self.account.wall(t - self.offset)

    def starts(self, before: PlacedAccount) -> float:
        """On the line: when it was born, or opened the run, if that was in the same process as the one before."""
        born = self.t(self.account.born)
        return born if born >= before.t(before.account.opened) else self.t(self.account.opening)

    @property
    def epochs(self) -> set[str]:
        """All that it opened."""
        return {self.account.epoch, *(one.epoch for one in self.account.restores)}

    @property
    def last(self) -> float:
        """By its clock: up to when something is known of it. What was kept after its end is no part of that."""
        end = self.account.end
        return max(_active(self.account), end.at, end.gone) if end else max(_active(self.account), self.account.kept)

    @cached_property
    def rows(self) -> list[StepRow]:
        """As far as nobody had taken the run over, and the steps after the last row."""
        found = list[StepRow]()
        for row in [*self.account.rows, *_unfiled(self.account)]:
            if row.at + self.offset <= self.ceiling:
                found.append(row)
                continue
            whole = row.seconds + row.paused
            share = 1 - (row.at + self.offset - self.ceiling) / whole if whole > 0 else 0.0
            done = math.floor(row.steps * share)
            if done > 0:
                found.append(_part(row, done))
            break
        return found

    def events(self) -> Iterator[Restore | StepRow]:
        """Rows and restores in the order in which they came."""
        restores = [one for one in self.account.restores if one.at + self.offset <= self.ceiling]
        timed = [(row.at, 0, row) for row in self.rows] + [(one.at, 1, one) for one in restores]
        return (event for _, _, event in sorted(timed, key=lambda each: each[:2]))

    @cached_property
    def began_with(self) -> Restore | None:
        """What it restored before its first step: the last of several, but something rather than nothing."""
        first = min((row.at for row in self.account.rows), default=math.inf)
        restores = sorted((one for one in self.account.restores if one.at < first), key=lambda one: one.at)
        return next((one for one in reversed(restores) if one.step is not None), restores[0] if restores else None)

    @property
    def failed(self) -> bool:
        """Account.failed, by what other ranks saw and wrote as well."""
        beat = self.t(self.account.beat)
        return self.account.failed or any(at > beat for at, _, _ in self._seen(beat, 0.0) if self.account.end)

    def noticed(self, since: float) -> tuple[float | None, str, str]:
        """When its end was first noticed, on the line, the kind of what was, and what was said of it. Faults that were
        seen long before `since`, the last step, were survived, and so were hangs that were seen before it."""
        end = self.account.end
        seen = self._seen(since, TOGETHER_S)
        times = [one[0] for one in seen[:1]] + ([self.t(end.at)] if end else [])
        kind, summary = seen[0][1:] if seen else ("left" if end and end.how == "left" else "death" if end else "", "")
        for cause, *others in incidents(self.reports):  # an exception that a peer's end has caused is not the cause
            if any(one.kind == kind and one.summary.startswith(summary) for one in others):
                kind, summary = cause.kind, cause.summary
        return (min(times) if times else None), kind or "unknown", summary

    def _seen(self, since: float, before_s: float) -> list[tuple[float, str, str]]:
        """What may have ended it, from so long before its last step on: when, its kind, and what was said of it."""
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
        """A moment in seconds since 1970, on the line."""
        wall, mono = self.account.anchor
        return self.t(mono + moment - wall)


def placed(
    accounts: list[Account], faults: list[Fault], notes: list[str], now: float = math.inf
) -> list[PlacedAccount]:
    """One of each incarnation, in order, each with its place on the line. `now`: in seconds since 1970."""
    ranks: dict[str, dict[int, Account]] = defaultdict(dict)
    for account in map(_ordered, accounts):
        account = _until(account, now, notes)
        known = ranks[account.epoch].get(account.rank)
        if known is None or (account.end is not None, account.kept) > (known.end is not None, known.kept):
            ranks[account.epoch][account.rank] = account
    reports: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        if fault.ending:
            reports[fault.attempt].append(fault)
    line: list[PlacedAccount] = []
    for account in in_order(group[min(group)] for group in ranks.values()):
        others = [one for one in ranks[account.epoch].values() if one is not account]
        one = PlacedAccount(account, others, [])
        one.reports = [fault for epoch in sorted(one.epochs) for fault in reports[epoch]]
        if line:
            _place(line[-1], one, notes)
        else:
            one.offset = -account.born
        line.append(one)
    return line


def _place(before: PlacedAccount, one: PlacedAccount, notes: list[str]) -> None:
    """Find the offset of an incarnation, and whether it took over from the one before."""
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
                went = f"the clock went back by {duration(-gap)} from {a.epoch} to {b.epoch}"
                notes.append(f"{went}: no time between them")
    if before.moved:
        notes.append(f"from {b.epoch} on the run is a copy: what lies between is no part of its time")
    elif overlap:
        before.ceiling = one.offset + b.opened
        notes.append(
            f"{b.epoch} took the run over at {moment(b.wall(b.opened))} while {a.epoch} still ran:"
            " what that did afterwards is not counted"
        )


def _came_later(before: PlacedAccount, one: PlacedAccount) -> bool:
    """Whether it restored a step that the one before did after that, if one believes the clocks."""
    restore = one.began_with
    if restore is None or restore.step is None or restore.attempt.rpartition("-")[0] not in before.epochs:
        return False
    restored = one.account.wall(restore.at + restore.seconds)
    done = [row for row in before.account.rows if row.step - row.steps < restore.step <= row.step]
    return any(
        before.account.wall(row.at - row.seconds * (row.step - restore.step) / row.steps) > restored for row in done
    )


def _left(fault: Fault) -> bool:
    """Whether its process really left, or was gone; others may have been survived."""
    return fault.exit_code is not None or (fault.by == "writer" and fault.kind in ("death", "oom"))


def same_clock(a: Account, b: Account) -> bool:
    return a.boot == b.boot != ""


def _active(account: Account) -> float:
    """When it last did something, by its clock."""
    ends = [one.at + one.seconds for one in account.restores]
    return max(account.opened, account.beat, *(row.at for row in account.rows), *ends, -math.inf)


def _unfiled(account: Account) -> list[StepRow]:
    """Steps that were done after the last row."""
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
    """The first steps of a row."""
    share = steps / row.steps
    whole = row.seconds + row.paused
    return StepRow(
        row.at - whole * (1 - share), row.step - row.steps + steps, steps, row.seconds * share, row.stalled * share,
        row.slowed * share, int(row.quiet * share), row.paused * share, int(row.saves * share), row.skipped,
    )  # fmt: skip


def _ordered(account: Account) -> Account:
    """The same, born before it opened, and with rows of one step at least."""
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
    """The same, with no end after now."""
    limit = max(_active(account), account.anchor[1] + now - account.anchor[0])
    end = account.end
    late = max([account.kept] + ([end.at, end.gone] if end else [])) - limit
    if late <= SKEW_S:
        return account
    note = f"{account.epoch} is said to have gone on until {duration(late)} from now: that counts as now"
    if note not in notes:
        notes.append(note)
    end = replace(end, at=min(end.at, limit), gone=min(end.gone, limit)) if end else None
    return replace(account, kept=min(account.kept, limit), end=end)
