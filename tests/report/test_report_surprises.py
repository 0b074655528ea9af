"""Tests of `ckpt report` with unusual runs: survived hangs, copies of running jobs, impossible files, evaluations, runs
that were never restarted, narrow terminals."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from accounts import WALL, account, costs, died, near, run, seen, settled
from ckpt.core.cadence.ledger import Account, End, SeenFault
from ckpt.guard.report import Fault
from ckpt.tools.observe.goodput import accounting, timeline
from ckpt.tools.observe.report.chronicle import chronicle

__all__ = ["run"]  # a fixture

DAY_S = 86400.0


def closed(one: Account, after_s: float = 0.5, gone_s: float = 0.25) -> Account:
    return died(one, after_s, gone_s, how="closed")


def at(seconds: float) -> str:
    """Return the time as a fault report has it."""
    return datetime.fromtimestamp(WALL + seconds, UTC).isoformat(timespec="microseconds")


# -- hangs --


def test_hang_ended_by_hand_is_an_interruption() -> None:
    """The last step ended at 14, the hang was detected at 24, and Ctrl-C came at 54: all of that is lost time."""
    one = closed(replace(account(1, 0.0), faults=[seen(24.0, "hang", ends=False)]), 40.0)
    assert one.failed
    found = settled(one, account(2, 60.0, first=11, of="1.abc"))
    (only,) = found.interruptions
    assert (only.kind, found.count, found.idle_s) == ("hang", 1, 0.0)
    assert costs(only.cost) == {
        "unfinished": 1.0, "perceive": 9.0, "leave": 30.25, "launch": 5.75, "start": 2.0, "open": 1.0, "restore": 1.0,
    }  # fmt: skip
    assert any("closed after a hang" in note and "not_training()" in note for note in found.notes)
    assert settled(one).ended == "hang" and settled(one).count == 1


def test_survived_hang_is_not_an_interruption() -> None:
    """Steps followed it: a later close is a close, and 5 s before another end it is not the start of that one."""
    one = replace(account(1, 0.0), faults=[seen(9.5, "hang", ends=False)])
    assert not closed(one).failed and settled(closed(one)).count == 0
    assert settled(closed(one), account(2, 60.0, first=11, of="1.abc")).count == 0
    two = account(2, 60.0, first=11, of="1.abc")
    for ends in (False, True):  # older ledgers state that every hang ended the job attempt
        hung = died(replace(one, faults=[seen(9.5, "hang", ends=ends)]), 10.0)
        (only,) = settled(hung, two).interruptions
        assert (only.kind, only.cost.perceive) == ("death", near(9.0))
    (only,) = settled(died(replace(one, faults=[seen(20.0, "hang", ends=False)]), 10.0), two).interruptions
    assert (only.kind, only.cost.perceive, only.cost.leave) == ("hang", near(5.0), near(4.25))


def test_hang_reports_count_like_ledger_entries() -> None:
    """A survived hang does not change another end; one that was not survived makes a close an interruption."""
    one, two = died(account(1, 0.0), 10.0), account(2, 60.0, first=11, of="1.abc")
    report = Fault("hang", "rank 3 waits", rank=3, time=at(9.5), term="1.abc")
    (only,) = settled(one, two, faults=(report,)).interruptions
    assert (only.kind, only.cost.perceive) == ("death", near(9.0))
    late = replace(report, time=at(20.0))
    (only,) = settled(closed(account(1, 0.0), 10.0), two, faults=(late,)).interruptions
    assert (only.kind, only.summary, only.cost.perceive) == ("hang", "rank 3 waits", near(5.0))
    assert settled(closed(account(1, 0.0), 10.0), two, faults=(report,)).count == 0


def test_exception_caused_by_killed_peer_is_not_a_fault() -> None:
    """Rank 0 reports a broken connection before the writer detects the killed rank 1: the death is the only
    interruption and mark.
    An exception in rank 0's own code stays the cause."""
    torn = SeenFault(14.2, "exception", "rank 0 raised RuntimeError: Connection closed by peer", 0, ends=True)
    one = died(replace(account(1, 0.0), faults=[torn]))
    for advice, kind in (("retry", "death"), ("fix", "exception")):
        mine = Fault("exception", torn.summary, time=at(14.2), term="1.abc", advice=advice, exit_code=1)
        faults = (mine, Fault("death", "rank 1 was killed", "writer", rank=1, time=at(14.4), term="1.abc"))
        (only,) = settled(one, account(2, 60.0, first=11, of="1.abc"), faults=faults).interruptions
        assert only.kind == kind
        for reported in (faults, faults[1:]):  # the fault report may be missing
            whole = accounting.settled([one], reported, now=WALL + 100)
            assert len(chronicle(whole, reported).faults) == 1
    assert len(chronicle(accounting.settled([one], (), now=WALL + 100), ()).faults) == 1  # only the ledger has it


# -- copies, and times that cannot be --


def test_report_with_wrong_clock_is_limited() -> None:
    """Its clock was wrong: a fault cannot be detected after the next job attempt started."""
    one, two = account(1, 0.0), account(2, 20.0, first=11, of="1.abc")
    report = Fault("oom", "x", time=at(40 * DAY_S), term="1.abc", exit_code=1)
    found = settled(one, two, faults=(report,))
    assert found.interruptions[0].cost.perceive == near(5.0) and found.wall_s == near(16 + 14)
    assert settled(one, faults=(report,), now=WALL + 30).interruptions[0].cost.perceive == near(15.0)
    assert settled(died(one, 2.0), two, faults=(report,)).interruptions[0].cost.perceive == near(1.0)


def test_end_in_the_future_counts_as_now() -> None:
    """A note states it. Clocks of machines may differ by up to a minute."""
    one, now = account(1, 0.0), WALL + 100
    for wild in (
        replace(one, kept=9 * DAY_S),
        replace(one, end=End("died", 9 * DAY_S, 9 * DAY_S)),
        replace(one, end=End("closed", 15.0, 9 * DAY_S)),
    ):
        found = settled(wild, now=now)
        assert found.wall_s == near(96.0) and found.until == near(now)
        assert any("9.0 d in the future, which count as now" in note for note in found.notes)
    assert settled(replace(one, kept=140.0), now=now).notes == ()
    assert settled(replace(one, kept=9 * DAY_S)).wall_s > 8 * DAY_S  # without a current time, it is believed


# -- negative controls --


def test_negative_control_survived_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "failed", property(lambda self: self.end is not None))
    with pytest.raises(AssertionError):
        test_survived_hang_is_not_an_interruption()


def test_negative_control_ends_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_until", lambda account, now, notes: account)
    with pytest.raises(AssertionError):
        test_end_in_the_future_counts_as_now()
    monkeypatch.setattr(timeline.PlacedAccount, "starts", lambda self, before: float("inf"))
    with pytest.raises(AssertionError):
        test_report_with_wrong_clock_is_limited()
