"""Walk along the timeline of a run and assign every second to one part, as `goodput.accounting` defines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt.core.cadence.ledger import End, StepRow, term_of
from ckpt.tools.observe.goodput.breakdown import COUNTLESS, Interruption, InterruptionCost
from ckpt.tools.observe.goodput.timeline import PlacedAccount
from ckpt.units import count_of, duration, moment

LONG_S = 3600.0  # seconds; a longer break may have been intended, so a note mentions it
COMPARABLE = 3  # minimum steps of an attempt to compute its usual step time
ENOUGH = 4  # minimum steps without a save to compare with, as in ckpt.core.cadence.cadence
FAR, FAR_S = 5.0, 0.5  # a step longer than FAR usual steps and FAR_S seconds contains work other than training


class UsualSteps:
    """Usual durations of steps. `share`: share of the measured slowing that remains after faster steps are subtracted
    from slower ones.

    `usual`: seconds per step without saving. `first`: seconds of the first step of an attempt. `here`: seconds per step
        of the current attempt.
    """

    def __init__(self, rows: Sequence[Sequence[StepRow]]) -> None:
        self._rows = rows
        slowed = [row.slowed for each in rows for row in each]
        more = math.fsum(max(0.0, value) for value in slowed)
        self.share = max(0.0, math.fsum(slowed)) / more if more > 0 else 0.0
        firsts = [self._step_s(row) for each in rows for row in each[:1]]
        self.usual = _median([(self._step_s(row), row.steps) for each in rows for row in each[1:]])
        self.usual = self.usual or min(firsts, default=0.0)
        self.first = max(self.usual, _median([(value, 1) for value in firsts]))
        self.here = self.usual

    def turn_to(self, number: int) -> None:
        rows = self._rows[number][1:]
        comparable = sum(row.steps for row in rows) >= COMPARABLE
        self.here = _median([(self._step_s(row), row.steps) for row in rows]) if comparable else self.usual

    def slowing_known(self, line: Sequence[PlacedAccount]) -> bool:
        """Return True if slowing is known for most steps. That needs `ENOUGH` later steps without a save."""
        known = unknown = 0
        for one, rows in zip(line, self._rows, strict=True):
            steps = sum(row.steps for row in rows)
            saved = any(row.saves for row in rows) or bool(one.account.saves)
            if not saved or sum(row.quiet for row in rows[1:]) >= ENOUGH:
                known += steps
            else:
                unknown += steps
        return known >= unknown

    def far(self) -> list[float]:
        """Return the extra time of each single step with a save whose extra time is very long."""
        more = [
            row.seconds - row.stalled - self.usual
            for rows in self._rows
            for row in rows[1:]
            if row.steps == 1 and not row.quiet and row.slowed > 0
        ]
        return [seconds for seconds in more if seconds > max(FAR_S, FAR * self.usual)]

    def _step_s(self, row: StepRow) -> float:
        return max(0.0, row.seconds - row.stalled - max(0.0, row.slowed) * self.share) / row.steps


def _median(weighted: list[tuple[float, int]]) -> float:
    """Return the weighted median, or 0 if there are no values."""
    half, total = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        total += weight
        if total >= half:
            return value
    return 0.0


@dataclass
class _Loss:
    """An interruption that is still being measured. `high`: the last completed step. `besides`: name under which the
    time until training resumes is counted if no fault caused it. `gap`: the same until a process starts."""

    kind: str
    at: float = 0.0
    summary: str = ""
    term: str = ""
    high: int | None = None
    besides: str = ""
    gap: str = "launch"
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    restored: int | None = None
    source: str = ""
    lost: int | None = None
    resumed: bool = False

    @property
    def listed(self) -> bool:
        """Return False if this cost no time and does not count as an interruption."""
        return self.kind not in COUNTLESS or bool(self.lost) or any(self.seconds.values())

    def frozen(self) -> Interruption:
        return Interruption(
            self.kind, self.at, self.summary, self.term, self.high, self.restored, self.source, self.lost,
            self.resumed, InterruptionCost(**self.seconds),
        )  # fmt: skip


class LedgerWalk:
    """Walks along the timeline and assigns each second to one part."""

    def __init__(self, line: Sequence[PlacedAccount], notes: list[str], idle_after_s: float, now: float) -> None:
        self._line, self.notes, self._idle_after_s, self._now = line, notes, idle_after_s, now
        self._terms = {term for one in line for term in one.terms}
        self._numbers = UsualSteps([one.rows for one in line])
        self.usual, self.slowing_known = self._numbers.usual, self._numbers.slowing_known(line)
        self.cursor = line[0].t(line[0].account.born)
        self.parts: dict[str, float] = defaultdict(float)
        self.besides: dict[str, float] = defaultdict(float)
        self.losses: list[_Loss] = []
        self._highs: list[_Loss] = []  # interruptions with steps to repeat; their `high` decreases
        self._waiting: list[_Loss] = []  # interruptions for which the step where training resumes is not known yet
        self._done: list[tuple[int, int, float]] = []  # steps completed for the first time: after, up to, seconds
        self._position: int | None = None  # the last completed step of the current attempt
        self.redone = self.standing = 0
        self._fresh = True  # True until the current attempt has completed a step
        self.ended = ""  # as `Statement.ended`

    def all(self) -> None:
        loss: _Loss | None = _Loss("start", besides="first_start")
        for number, one in enumerate(self._line):
            assert loss is not None
            after = self._line[number + 1] if number + 1 < len(self._line) else None
            self._numbers.turn_to(number)
            self._incarnation(one, loss)
            if number == 0 and self._position:
                began = one.began_with
                if began is not None and began.step is not None:
                    self.notes.append(f"the metrics begin at step {began.step}: earlier steps are unknown")
            loss = self._end(one, after)
        end = self._line[-1].account.end
        self.ended = loss.kind if loss is not None else "closed" if end is not None else ""
        self._undo()
        if slow := self._numbers.far():
            self.notes.append(
                f"{count_of(len(slow), 'step')} during a save took {duration(math.fsum(slow))} longer than others: "
                "evaluations during a save look like slowing by it. Put them into not_training()"
            )
        if not self.slowing_known:
            known = "known for some steps only" if self.parts["slowed"] else "not known"
            self.notes.append(f"how much saving slowed the steps is {known}: too few steps had no save")

    # -- assign time --

    def _spend(self, until: float, into: dict[str, float], name: str) -> None:
        into[name] += max(0.0, until - self.cursor)
        self.cursor = max(self.cursor, until)

    def _way(self, loss: _Loss, until: float, name: str) -> None:
        """Assign the time until training resumes."""
        if loss.besides:
            self._spend(until, self.besides, loss.besides)
        else:
            self._spend(until, loss.seconds, name)

    # -- one attempt --

    def _incarnation(self, one: PlacedAccount, loss: _Loss) -> None:
        account = one.account
        self._position, self._fresh, loss.resumed = None, True, True
        self._wait(one, loss)
        self._way(loss, one.t(account.opening), "start")
        self._way(loss, one.t(account.opened), "open")
        start, stepped = loss, False
        for event in one.events():
            if isinstance(event, StepRow):
                self._row(one, event, start if self._fresh else None)
                self._fresh, stepped = False, True
                continue
            if stepped:
                loss = self._lose(_Loss("rollback", one.wall(one.t(event.at)), term=account.term, resumed=True))
                self._spend(min(one.t(event.at), self.cursor + self._numbers.here), loss.seconds, "unfinished")
                stepped = False
            self._way(loss, one.t(event.at), "setup")
            self._way(loss, one.t(event.at + event.seconds), "restore")
            if event.step is not None:
                for each in self._waiting:
                    each.restored, each.source = event.step, event.source
                loss.restored, loss.source = event.step, event.source
                self._stand(event.step)

    def _wait(self, one: PlacedAccount, loss: _Loss) -> None:
        """Assign the time until the process of the attempt is started."""
        born, account = one.t(one.account.born), one.account
        if not loss.besides and born - self.cursor > min(LONG_S, self._idle_after_s):
            began, ended = moment(account.wall(account.born - (born - self.cursor))), moment(account.wall(account.born))
            idle = born - self.cursor > self._idle_after_s
            counts = "counts as idle" if idle else "counts as restart; if it was intended, use --idle-after"
            self.notes.append(f"nothing ran from {began} to {ended}, {duration(born - self.cursor)}: this {counts}")
            if idle:
                self._spend(born, self.besides, "idle")
        self._way(loss, born, loss.gap)

    def _row(self, one: PlacedAccount, row: StepRow, first: _Loss | None) -> None:
        """Account for some steps. `first`: the interruption before them, if they are the first steps after it."""
        if self._position is None:
            self._stand(row.step - row.steps)
        elif row.step <= self._position:  # the step number went back, without a recorded restore
            at = one.wall(self.cursor)
            self._lose(_Loss("rollback", at, term=one.account.term, resumed=True))
            self._stand(row.step - row.steps)
        assert self._position is not None
        until = max(one.t(row.at), self.cursor)
        span = until - self.cursor

        def spend(wanted: float, name: str, into: dict[str, float]) -> None:
            nonlocal span
            got = min(max(0.0, wanted), span)
            span -= got
            into[name] += got

        spend(span - row.seconds - row.paused, "other", self.parts)
        spend(row.paused, "paused", self.parts)
        spend(row.stalled, "stalled", self.parts)
        spend(row.slowed * self._numbers.share, "slowed", self.parts)
        if first is not None:
            into, name = (self.parts, "other") if first.besides else (first.seconds, "first_step")
            spend(span - row.steps * self._numbers.here, name, into)
        self._work(self._position, row.step, span)
        self.cursor = until
        self._position = row.step

    def _work(self, low: int, high: int, seconds: float) -> None:
        """Account for the steps after `low` up to `high`. Each was either repeated or completed for the first time."""
        each = seconds / (high - low)
        for loss, count in self._owed(low, high):
            loss.seconds["redone"] += count * each
            self.redone += count
            low += count
        if high > low:
            self._done.append((low, high, (high - low) * each))
            self.parts["productive"] += (high - low) * each

    def _owed(self, low: int, high: int) -> Iterator[tuple[_Loss, int]]:
        """Yield the interruptions that caused repeated steps, with their number: for each the last that lost it."""
        for loss in reversed(self._highs):
            assert loss.high is not None
            if loss.high > low:
                count = min(high, loss.high) - low
                yield loss, count
                low += count
            if low >= high:
                return

    def _lose(self, loss: _Loss) -> _Loss:
        loss.high = self._position
        if loss.high is not None:
            while self._highs and (self._highs[-1].high or 0) <= loss.high:
                self._highs.pop()
            self._highs.append(loss)
        self.losses.append(loss)
        self._waiting.append(loss)
        return loss

    def _stand(self, step: int) -> None:
        """Record that training resumes from this step, and compute the steps that interruptions have lost."""
        self._position = step
        for loss in self._waiting:
            loss.lost = 0 if loss.high is None else max(0, loss.high - step)
        self._waiting.clear()

    # -- the end of an attempt --

    def _end(self, one: PlacedAccount, after: PlacedAccount | None) -> _Loss | None:
        """Account for the time between the end of an attempt and the next attempt."""
        account, end = one.account, one.account.end
        loss = _Loss("none", one.wall(self.cursor), term=account.term)
        if after is not None and one.moved:
            self._unseen(one, after, after.t(after.account.born), self._missing(one, after))
            self._spend(one.t(one.last), self.parts, "other")
            loss.kind, loss.besides = "moved", "moved"
            return self._lose(loss)
        if one.ceiling < math.inf:
            return self._taken_over(one, loss)
        noticed, loss.kind, loss.summary = one.noticed(self.cursor)
        if end is not None and not one.failed:
            self._spend(self._gone(one, after, end), self.parts, "other")
            loss.kind, loss.summary, loss.besides = "none", "", "idle"
            return self._lose(loss) if after is not None else None
        if noticed is None and after is None:
            self._spend(one.t(one.last), self.parts, "other")
            return None
        if end is not None and end.how == "closed":
            self.notes.append(
                f"{account.term} was closed after a {loss.kind} without another step, which counts as an interruption."
                " Put long intended work into not_training()"
            )
        return self._fault(one, after, loss, noticed)

    def _gone(self, one: PlacedAccount, after: PlacedAccount | None, end: End) -> float:
        """Return when the process of an attempt was gone, which is at the latest when the next one was started."""
        gone = one.t(max(end.at, end.gone))
        return gone if after is None else min(gone, max(self.cursor, after.starts(one)))

    def _taken_over(self, one: PlacedAccount, loss: _Loss) -> _Loss:
        loss.kind, loss.at = "taken over", one.wall(one.ceiling)
        self._lose(loss)
        self._spend(min(one.ceiling, self.cursor + self._numbers.here), loss.seconds, "unfinished")
        self._spend(one.ceiling, loss.seconds, "unknown")
        return loss

    def _fault(self, one: PlacedAccount, after: PlacedAccount | None, loss: _Loss, noticed: float | None) -> _Loss:
        account, end = one.account, one.account.end
        missing = after is not None and self._missing(one, after)
        if noticed is None:
            self._unnoticed(one, after, loss, missing)
        else:
            latest = one.t_wall(self._now) if after is None else after.starts(one)
            noticed = max(min(noticed, latest), self.cursor)
            loss.at = one.wall(noticed)
            self._unseen(one, after, noticed, False)
            self._perceive(loss, noticed)
        if end is not None:
            self._spend(self._gone(one, after, end), loss.seconds, "leave")
        elif after is None:
            self._spend(one.t(one.last), loss.seconds, "leave")
        if missing and after is not None:
            self._unseen(one, after, after.t(after.account.born), True)
            self.notes.append(
                f"the metrics of a job attempt between {account.term} and {after.account.term} are missing"
            )
        loss.gap = "launch" if end is not None and not missing else "unknown"
        return self._lose(loss)

    def _unnoticed(self, one: PlacedAccount, after: PlacedAccount | None, loss: _Loss, missing: bool) -> None:
        """Account for the common end of trainer and writer, of which the last step and the time are unknown."""
        loss.kind = "unknown"
        if after is None:
            return
        born, account = after.account.born, one.account
        self._unseen(one, after, after.t(born), missing)
        since, until = moment(account.wall(max(account.kept, account.beat))), moment(after.account.wall(born))
        self.notes.append(
            f"nothing is known from {since} to {until}: trainer and writer of {account.term} ended together"
        )

    def _perceive(self, loss: _Loss, noticed: float) -> None:
        """Account for the interrupted step, and the time until the fault was detected."""
        self._spend(min(noticed, self.cursor + self._numbers.here), loss.seconds, "unfinished")
        if self._fresh:  # the interrupted step is the attempt's first one, which takes longer
            more = max(0.0, self._numbers.first - self._numbers.here)
            self._spend(min(noticed, self.cursor + more), loss.seconds, "first_step")
        self._spend(noticed, loss.seconds, "perceive")

    def _missing(self, one: PlacedAccount, after: PlacedAccount) -> bool:
        """Return True if an attempt whose metrics are missing ran between these two."""
        term = _origin(after)
        return term not in self._terms and one.account.number < _number(term) < after.account.number

    def _unseen(self, one: PlacedAccount, after: PlacedAccount | None, until: float, missing: bool) -> None:
        """Account for unrecorded steps before the end, if the next attempt restored a later step."""
        restore = after.began_with if after is not None else None
        if after is None or restore is None or restore.step is None or self._position is None:
            return
        steps = restore.step - self._position
        if steps <= 0 or not (missing or _origin(after) in one.terms):
            return
        seconds = min(steps * self._numbers.here, max(0.0, until - self.cursor))
        self._work(self._position, restore.step, seconds)
        self.cursor += max(0.0, seconds)
        self._position = restore.step
        self.notes.append(
            f"the metrics lack {count_of(steps, 'step')} before step {restore.step}, which count as {duration(seconds)}"
        )

    def _undo(self) -> None:
        """Count steps that were undone and are not repeated yet as lost."""
        position, standing = self._position, 0
        for low, high, seconds in self._done:
            keep = high if position is None else min(max(position, low), high)
            standing += keep - low
            if keep < high:
                each = seconds / (high - low)
                self.parts["productive"] -= (high - keep) * each
                for loss, count in self._owed(keep, high):
                    loss.seconds["undone"] += count * each
        self.parts["productive"] = max(0.0, self.parts["productive"])
        self.standing = standing


def _origin(one: PlacedAccount) -> str:
    """Return the term that wrote the checkpoint that an attempt restored, or "" if it restored none."""
    restore = one.began_with
    return term_of(restore.checkpoint) if restore is not None else ""


def _number(term: str) -> int:
    text = term.partition(".")[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
