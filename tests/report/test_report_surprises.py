"""What `ckpt report` makes of what nobody had thought of: hangs that were survived, copies of running jobs, files that
say what cannot be, evaluations, runs that nobody started again, narrow terminals."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from accounts import WALL, account, costs, died, near, run, seen, settled
from ckpt.core.cadence.ledger import Account, End, SeenFault
from ckpt.guard.report import Fault
from ckpt.tools.observe.goodput import accounting, timeline
from ckpt.tools.observe.goodput.breakdown import Statement
from ckpt.tools.observe.report import figures
from ckpt.tools.observe.report.chronicle import chronicle

__all__ = ["run"]  # a fixture

DAY_S = 86400.0


def closed(one: Account, after_s: float = 0.5, gone_s: float = 0.25) -> Account:
    return died(one, after_s, gone_s, how="closed")


def at(seconds: float) -> str:
    """As a fault report has it."""
    return datetime.fromtimestamp(WALL + seconds, UTC).isoformat(timespec="microseconds")


# -- hangs --


def test_a_hang_that_somebody_ended_by_hand_is_an_interruption() -> None:
    """The last step was done at 14, the hang was seen at 24, Ctrl-C came at 54: nothing of that was wanted."""
    one = closed(replace(account(1, 0.0), faults=[seen(24.0, "hang", ends=False)]), 40.0)
    assert one.failed
    found = settled(one, account(2, 60.0, first=11, of="1.abc"))
    (only,) = found.interruptions
    assert (only.kind, found.count, found.idle_s) == ("hang", 1, 0.0)
    assert costs(only.cost) == {
        "unfinished": 1.0, "perceive": 9.0, "leave": 30.25, "launch": 5.75, "start": 2.0, "open": 1.0, "restore": 1.0,
    }  # fmt: skip
    assert any("closed after a hang" in note and "pause()" in note for note in found.notes)
    assert settled(one).ended == "hang" and settled(one).count == 1


def test_a_hang_that_was_survived_ends_nothing() -> None:
    """Steps were done after it: closing is closing, and 5 s before another end it is not the beginning of that."""
    one = replace(account(1, 0.0), faults=[seen(9.5, "hang", ends=False)])
    assert not closed(one).failed and settled(closed(one)).count == 0
    assert settled(closed(one), account(2, 60.0, first=11, of="1.abc")).count == 0
    two = account(2, 60.0, first=11, of="1.abc")
    for ends in (False, True):  # older ledgers say that every hang ended something
        hung = died(replace(one, faults=[seen(9.5, "hang", ends=ends)]), 10.0)
        (only,) = settled(hung, two).interruptions
        assert (only.kind, only.cost.perceive) == ("death", near(9.0))
    (only,) = settled(died(replace(one, faults=[seen(20.0, "hang", ends=False)]), 10.0), two).interruptions
    assert (only.kind, only.cost.perceive, only.cost.leave) == ("hang", near(5.0), near(4.25))


def test_reports_of_hangs_are_taken_as_what_is_in_the_ledger() -> None:
    """One that was survived does not spoil another end; one that was not makes an interruption of closing."""
    one, two = died(account(1, 0.0), 10.0), account(2, 60.0, first=11, of="1.abc")
    report = Fault("hang", "rank 3 waits", rank=3, time=at(9.5), attempt="1.abc")
    (only,) = settled(one, two, faults=(report,)).interruptions
    assert (only.kind, only.cost.perceive) == ("death", near(9.0))
    late = replace(report, time=at(20.0))
    (only,) = settled(closed(account(1, 0.0), 10.0), two, faults=(late,)).interruptions
    assert (only.kind, only.summary, only.cost.perceive) == ("hang", "rank 3 waits", near(5.0))
    assert settled(closed(account(1, 0.0), 10.0), two, faults=(report,)).count == 0


def test_an_exception_that_a_killed_peer_caused_is_no_fault_of_its_own() -> None:
    """Rank 0 says that its connection broke before the writer of the killed rank 1 has noticed: the interruption, and
    the one mark in the report, is the death. An exception of rank 0's own code stays the cause."""
    torn = SeenFault(14.2, "exception", "rank 0 raised RuntimeError: Connection closed by peer", 0, ends=True)
    one = died(replace(account(1, 0.0), faults=[torn]))
    for advice, kind in (("retry", "death"), ("fix", "exception")):
        mine = Fault("exception", torn.summary, time=at(14.2), attempt="1.abc", advice=advice, exit_code=1)
        faults = (mine, Fault("death", "rank 1 was killed", "writer", rank=1, time=at(14.4), attempt="1.abc"))
        (only,) = settled(one, account(2, 60.0, first=11, of="1.abc"), faults=faults).interruptions
        assert only.kind == kind
        for reported in (faults, faults[1:]):  # the account of an end may never have arrived
            whole = accounting.settled([one], reported, now=WALL + 100)
            assert len(chronicle(whole, reported).faults) == 1
    assert len(chronicle(accounting.settled([one], (), now=WALL + 100), ()).faults) == 1  # only the ledger has it


def test_what_did_not_leave_is_no_end() -> None:
    """An exception after which the process went on, as its report says, is not why it died later; a death that the
    writer saw is."""
    one, two = died(account(1, 0.0), 10.0), account(2, 60.0, first=11, of="1.abc")
    survived = Fault("exception", "rank 1 raised", time=at(18.0), attempt="1.abc")
    assert settled(one, two, faults=(survived,)).interruptions[0].kind == "death"
    left = replace(survived, exit_code=1)
    assert settled(one, two, faults=(left,)).interruptions[0].kind == "exception"
    of_writer = replace(survived, kind="oom", by="writer")
    assert settled(one, two, faults=(of_writer,)).interruptions[0].kind == "oom"


@pytest.mark.parametrize(
    ("how", "faults", "failed"),
    [
        (None, [seen(20.0)], False), ("died", [], True), ("left", [], True), ("closed", [], False),
        ("closed", [seen(20.0, "exception")], True), ("closed", [seen(20.0, "request", ends=False)], False),
        ("closed", [seen(13.0, "exception")], False), ("closed", [seen(14.0, "hang", ends=False)], False),
    ],
)  # fmt: skip
def test_what_a_failed_end_is(how: str | None, faults: list[Any], failed: bool) -> None:
    """One word for all who ask: by the end, and by what came after the last step."""
    one = replace(account(1, 0.0), faults=faults)
    assert (one if how is None else died(one, 10.0, how=how)).failed is failed


# -- copies, and times that cannot be --


def test_steps_between_the_last_word_of_a_copied_ledger_and_the_copy_are_work() -> None:
    """The ledger was last kept at step 10; the copy was made, and goes on, three steps later."""
    two = account(2, 9000.0, first=14, of="1.abc", url="file:///copy", inode=8)
    found = settled(account(1, 0.0), two)
    assert (found.steps, found.redone_steps, found.count, found.wall_s) == (23, 0, 0, near(23.0))
    assert found.productive_s == near(23.0) and found.moved_s == near(9004 - 17)
    assert any("not in the metrics" in note for note in found.notes)


def test_a_report_from_after_the_next_start_was_not_40_days_unnoticed() -> None:
    """Its clock was wrong: nothing of the incarnation before can have been noticed after the next was born."""
    one, two = account(1, 0.0), account(2, 20.0, first=11, of="1.abc")
    report = Fault("oom", "x", time=at(40 * DAY_S), attempt="1.abc", exit_code=1)
    found = settled(one, two, faults=(report,))
    assert found.interruptions[0].cost.perceive == near(5.0) and found.wall_s == near(16 + 14)
    assert settled(one, faults=(report,), now=WALL + 30).interruptions[0].cost.perceive == near(15.0)
    assert settled(died(one, 2.0), two, faults=(report,)).interruptions[0].cost.perceive == near(1.0)


def test_an_end_in_the_future_is_now() -> None:
    """And a note says so. A minute is how much the clocks of machines may differ."""
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
    assert settled(replace(one, kept=9 * DAY_S)).wall_s > 8 * DAY_S  # who does not say what time it is believes it


@pytest.mark.parametrize("how", ["died", "closed"])
def test_a_process_is_gone_before_the_next_is_born(how: str) -> None:
    """What is said of a later time is taken from nothing that the next one did."""
    one = replace(account(1, 0.0), end=End(how, 14.5, 400.0))
    found = settled(one, account(2, 20.0, first=11, of="1.abc"))
    assert found.cost.leave <= 6.0 and found.steps == 20 and found.other_s == near(0.0 if how == "died" else 6.0)
    assert found.productive_s == near(20.0)


def test_the_same_process_opens_the_run_again() -> None:
    """It was born long before the end of what it did first: that does not make this end earlier."""
    one = replace(account(1, 0.5), end=End("left", 15.0, 16.5))
    two = replace(account(2, 17.0, first=11, of="1.abc"), born=0.5)
    (only,) = settled(one, two).interruptions
    assert costs(only.cost) == {"unfinished": 0.5, "leave": 1.5, "start": 2.5, "open": 1.0, "restore": 1.0}


def test_a_clock_that_was_set_back_by_milliseconds_deserves_no_note() -> None:
    """Clocks of machines are not better than that."""
    one = died(account(1, 0.0), 0.0, 0.0)
    for back_s, told in ((0.4, False), (30.0, True)):
        two = account(2, 14.0, first=11, of="1.abc", boot="two", clock=WALL - back_s)
        assert any("clock went back" in note for note in settled(one, two).notes) is told


# -- what is said --


def test_evaluations_beside_a_save_are_told() -> None:
    """Three of them took ten times as long as a step: that looks like slowing. Without a save it does not."""
    one = account(1, 0.0, steps=20)
    for number in (5, 10, 15):
        one.rows[number] = replace(one.rows[number], seconds=11.0, slowed=10.0, quiet=0, saves=1)
        for later in range(number, 20):
            one.rows[later] = replace(one.rows[later], at=one.rows[later].at + 10)
    one.beat = one.kept = one.rows[-1].at
    (note,) = settled(one).notes
    assert note.startswith("3 steps during a save took 30 s longer than others") and "pause()" in note
    usual = replace(one, rows=[replace(row, slowed=min(row.slowed, 2.0)) for row in one.rows])
    usual.rows = [replace(row, seconds=min(row.seconds, 3.0)) for row in usual.rows]
    assert settled(usual).notes == ()
    assert settled(replace(one, rows=[replace(row, slowed=0.0, quiet=1) for row in one.rows])).notes == ()


def test_effective_and_trained_are_two_figures() -> None:
    """A pause is no fault's doing, and no training."""
    one = account(1, 0.0)
    one.rows[5:] = [replace(row, at=row.at + 10.0) for row in one.rows[5:]]
    one.rows[5] = replace(one.rows[5], paused=10.0)
    one.beat = one.kept = one.rows[-1].at
    found = settled(one)
    assert (found.effective, found.trained) == (1.0, near(0.5))
    assert dict(figures.summary(found))["trained"] == "50.0 % in steps that count; effective also includes 10 s paused"
    assert Statement().trained is None and found.to_json()["trained"] == near(0.5)


def test_the_state_says_how_it_ended_and_since_when_nothing_runs() -> None:
    """Time in which a dead run waits for its restart is counted nowhere, and that is said."""
    one, now = account(1, 0.0), WALL + 14.75 + 7 * DAY_S
    states = {
        "ended (crash or kill)": settled(died(one), now=now),
        "ended (exception or early end)": settled(died(one, how="left"), now=now),
        "closed": settled(closed(one), now=now),
        "its end was not recorded": settled(one, now=now),
        "running": settled(one, now=WALL + 20),
    }
    for text, found in states.items():
        line = dict(figures.summary(found))["state"]
        assert text in line, line
        assert ("for 7.0 d, which is not counted" in line) is (text not in ("closed", "running")), line
    assert "not started again" in dict(figures.summary(states["ended (crash or kill)"]))["state"]
    assert states["ended (crash or kill)"].wall_s == near(10.75)
    ended = [found.ended for found in states.values()]
    assert ended == ["death", "left", "closed", "", ""]


# -- negative controls --


def test_negative_control_survived_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes every hang for the end is found out."""
    monkeypatch.setattr(Account, "failed", property(lambda self: self.end is not None))
    with pytest.raises(AssertionError):
        test_a_hang_that_was_survived_ends_nothing()


def test_negative_control_ends_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who believes them is found out, and so is who believes what cannot be reckoned with."""
    monkeypatch.setattr(timeline, "_until", lambda account, now, notes: account)
    with pytest.raises(AssertionError):
        test_an_end_in_the_future_is_now()
    monkeypatch.setattr(timeline.PlacedAccount, "starts", lambda self, before: float("inf"))
    with pytest.raises(AssertionError):
        test_a_report_from_after_the_next_start_was_not_40_days_unnoticed()
