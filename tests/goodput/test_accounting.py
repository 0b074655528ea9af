"""Where the time of a run went: figures computed by hand for each rule, sums on random timelines, and the output."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounts import WALL, account, costs, died, invoke, near, run, seen, settled, write
from ckpt.core.cadence.ledger import PREFIX, Account, Decision, End, Restore, SeenFault, StepRow
from ckpt.errors import CorruptError, FormatError, NoCheckpointError
from ckpt.guard.report import Fault, SavedStep
from ckpt.tools.cli import reading
from ckpt.tools.observe.goodput import accounting, walk

__all__ = ["run"]  # fixtures


# -- one job attempt --


def test_undisturbed_run_is_all_productive() -> None:
    """The first start is reported but counted nowhere: the wall clock starts when training can begin."""
    found = settled(replace(account(1, 100.0), end=End("closed", 114.5, 115.0)))
    assert (found.wall_s, found.productive_s, found.other_s) == (near(11.0), near(10.0), near(1.0))
    assert (found.first_start_s, found.steps, found.effective) == (near(4.0), 10, 1.0)
    assert (found.begin, found.until) == (near(WALL + 104), near(WALL + 115))
    assert found.mtbf_s is None and found.training_s == near(10.0) and found.interruptions == ()


def test_run_is_running_if_saved_recently() -> None:
    one = account(1, 100.0, kept=114.5)
    assert settled(one, now=WALL + 115).running
    assert not settled(one, now=WALL + 115 + 3600).running
    assert not settled(one).running
    assert not settled(died(one), now=WALL + 115).running


def test_saving_cost_is_stalls_plus_slowing() -> None:
    """Slowing is summed over rows, so faster steps offset slower ones. Pauses are reported, but are not lost time."""
    one = account(1, 0.0, steps=4, step_s=2.0)
    one.rows[1] = replace(one.rows[1], stalled=0.25, slowed=0.5, quiet=0, saves=1)
    one.rows[2] = replace(one.rows[2], slowed=-0.2)
    one.rows[3] = replace(one.rows[3], at=one.rows[3].at + 0.5, paused=0.5)
    one.beat = one.kept = one.rows[3].at
    found = settled(one)
    assert (found.stalled_s, found.slowed_s, found.paused_s) == (near(0.25), near(0.3), near(0.5))
    assert found.productive_s == near(8.5 - 0.25 - 0.3 - 0.5)
    assert found.invalid_s == near(0.55) and found.effective == near(1 - 0.55 / 8.5)


# -- interruptions --


def test_crash_cost_is_split_into_parts() -> None:
    """Steps 1 to 10 take 1 s each, until 14. The crash is detected at 16.5; one second before that was work. The
    process ends at 17, the next starts at 20, opens its Checkpointer from 22 to 23 and restores step 7 until 25. Its
    first step takes 3 s, 2 more than usual. Steps 8 to 10 are redone, 11 to 13 are new."""
    one = died(account(1, 0.0), 2.5, 0.5)
    two = account(2, 20.0, first=8, steps=6, of="1.abc", back=2.0)
    two.rows = [replace(row, at=row.at + 2) for row in two.rows]
    two.rows[0] = replace(two.rows[0], seconds=3.0)
    two.beat = two.kept = two.rows[-1].at
    found = settled(one, two)
    (only,) = found.interruptions
    assert costs(only.cost) == {
        "unfinished": 1.0, "perceive": 1.5, "leave": 0.5, "launch": 3.0, "start": 2.0, "open": 1.0, "restore": 2.0,
        "first_step": 2.0, "redone": 3.0,
    }  # fmt: skip
    assert (only.cost.restart, only.cost.recompute, only.cost.total) == (near(8.5), near(4.0), near(16.0))
    assert (only.kind, only.step, only.restored, only.source, only.lost_steps) == ("death", 10, 7, "memory", 3)
    assert (only.at, only.term, only.resumed, only.counted) == (near(WALL + 16.5), "1.abc", True, True)
    assert (found.wall_s, found.productive_s) == (near(29.0), near(13.0))
    assert (found.steps, found.redone_steps, found.incarnations, found.count) == (13, 3, 2, 1)
    assert found.effective == near(13 / 29) and found.mtbf_s == near(13 + 4)
    assert found.by_kind == {"death": 1} and found.by_source == {"memory": 1}


def test_earliest_sign_of_the_end_counts() -> None:
    """The sign may be of this rank or another, seen here or in a report. Faults that were survived do not count."""
    two = account(2, 60.0, first=11, of="1.abc")
    one = died(account(1, 0.0), 10.0)  # last step at 14, detected at 24
    assert settled(one, two).interruptions[0].cost.perceive == near(9.0)
    hang = replace(one, faults=[seen(20.0, "hang"), seen(23.0, "signal")])
    (only,) = settled(hang, two).interruptions
    assert (only.kind, only.cost.perceive, only.cost.leave, only.summary) == (
        "hang", near(5.0), near(4.25), "hang of rank 0",
    )  # fmt: skip
    passed = replace(one, faults=[seen(20.0, "request", ends=False)])
    assert settled(passed, two).interruptions[0].cost.perceive == near(9.0)
    assert settled(replace(one, beat=14.0, faults=[seen(-90.0)]), two).interruptions[0].kind == "death"
    time = datetime.fromtimestamp(WALL + 18, UTC).isoformat()
    report = Fault("oom", "rank 3 ran out of memory", rank=3, time=time, term="1.abc", exit_code=1)
    (only,) = settled(one, two, faults=(report,)).interruptions
    assert (only.kind, only.cost.perceive) == ("oom", near(3.0))
    elsewhere = replace(report, term="9.zzz")
    assert settled(one, two, faults=(elsewhere,)).interruptions[0].kind == "death"
    request = replace(report, kind="request", exit_code=None)
    assert settled(one, two, faults=(request,)).interruptions[0].kind == "death"


def test_warning_before_last_step_costs_no_detection() -> None:
    """After a preemption notice, training continues to the agreed step. All time after that step counts as leaving."""
    one = died(replace(account(1, 0.0), faults=[seen(12.0, "preemption")]), 0.5, 0.5, how="left")
    (only,) = settled(one, account(2, 20.0, first=11, of="1.abc")).interruptions
    assert (only.kind, only.lost_steps) == ("preemption", 0)
    assert costs(only.cost) == {"leave": 1.0, "launch": 5.0, "start": 2.0, "open": 1.0, "restore": 1.0}


def test_other_ranks_contribute_only_faults() -> None:
    """If a folder has metrics from several ranks, those of the lowest rank count, by its own clock."""
    one, two = died(account(1, 0.0), 10.0), account(2, 60.0, first=11, of="1.abc")
    other = replace(one, rank=3, boot="two", anchor=(WALL - 1000, -1000.0), faults=[seen(18.0, "oom", 3)])
    found = settled(other, one, two)
    assert (found.incarnations, found.steps) == (2, 20)
    assert (found.interruptions[0].kind, found.interruptions[0].cost.perceive) == ("oom", near(3.0))
    assert found.wall_s == settled(one, two).wall_s
    other.rows = [replace(row, stalled=0.5) for row in other.rows]
    assert settled(one, other, two).stalled_s == 0.0 and settled(other, two).stalled_s == near(5.0)


def test_duplicate_metrics_count_once() -> None:
    """This happens if several tiers are read. The most recently saved metrics count."""
    one, two = died(account(1, 0.0)), account(2, 20.0, first=8, of="1.abc")
    older = replace(one, rows=one.rows[:4], step=4, beat=one.rows[3].at, kept=one.rows[3].at, end=None)
    assert settled(older, one, two, two, older) == settled(one, two)


# -- undetected ends --


def test_undetected_end_is_not_split_into_parts() -> None:
    """Trainer and writer were killed together. One part covers the time from the last step to the next start."""
    one = account(1, 0.0, kept=14.5)
    found = settled(one, account(2, 20.0, first=8, of="1.abc"))
    (only,) = found.interruptions
    assert only.kind == "unknown"
    assert costs(only.cost) == {"unknown": 6.0, "start": 2.0, "open": 1.0, "restore": 1.0, "redone": 3.0}
    assert any("nothing is known from" in note for note in found.notes)


def test_unrecorded_steps_count_as_work() -> None:
    """The next attempt restored step 13, and step 10 is the last recorded one: three steps at the usual pace."""
    found = settled(account(1, 0.0), account(2, 20.0, first=14, of="1.abc"))
    (only,) = found.interruptions
    assert (only.step, only.lost_steps, only.cost.unknown) == (13, 0, near(3.0))
    assert (found.steps, found.productive_s) == (23, near(23.0))
    found = settled(account(1, 0.0), account(2, 20.0, first=101, of="1.abc"))  # at most what fits in
    assert found.interruptions[0].cost.unknown == 0.0 and found.productive_s == near(16 + 10)


def test_missing_attempt_is_inferred_from_the_next() -> None:
    """The metrics of an attempt are damaged. The step that the next one restored shows how far it got."""
    found = settled(died(account(1, 0.0), 0.0, 0.0), account(3, 40.0, first=21, of="2.xyz"))
    (only,) = found.interruptions
    assert any("are missing" in note for note in found.notes)
    assert (only.lost_steps, only.cost.unknown, found.steps) == (0, near(40 - 14 - 10), 30)


def test_metrics_may_begin_in_the_middle() -> None:
    """A run was saved before run metrics existed. Nothing counts as lost."""
    found = settled(account(4, 0.0, first=501, of="3.old"))
    assert (found.steps, found.redone_steps, found.count) == (10, 0, 0)
    assert any("begin at step 500" in note for note in found.notes)


# -- other ends --


def rolled_back(to: int = 4, steps: int = 10) -> Account:
    """Return ten steps, a restore() of step `to` from 14.5 to 15.5, and more steps."""
    one = account(1, 0.0)
    one.restores.append(Restore(14.5, 1.0, to, "file:///run", f"1.abc-{to}", "2.def"))
    one.rows += [StepRow(16.5 + n, to + 1 + n, 1, 1.0, quiet=1) for n in range(steps)]
    one.beat = one.kept = one.rows[-1].at
    one.step = one.rows[-1].step
    return one


def test_rollback_costs_restore_and_redone_steps() -> None:
    found = settled(rolled_back())
    (only,) = found.interruptions
    assert (only.kind, only.step, only.restored, only.lost_steps, only.source) == ("rollback", 10, 4, 6, "file:///run")
    assert costs(only.cost) == {"unfinished": 0.5, "restore": 1.0, "redone": 6.0}
    assert (found.steps, found.productive_s) == (14, near(14.0))


def test_time_between_closed_jobs_is_idle() -> None:
    """Idle time lasts until the next attempt is ready. Redone steps count as recompute, not as a fault."""
    one = replace(account(1, 0.0), end=End("closed", 14.25, 14.5))
    found = settled(one, account(2, 5000.0, first=11, of="1.abc"))
    assert (found.idle_s, found.wall_s, found.interruptions) == (near(5004 - 14.5), near(20.5), ())
    found = settled(one, account(2, 5000.0, first=9, of="1.abc"))
    (only,) = found.interruptions
    assert (only.kind, only.counted, only.lost_steps, costs(only.cost)) == ("none", False, 2, {"redone": 2.0})
    assert (found.count, found.mtbf_s, found.by_kind, found.effective) == (0, None, {}, near(1 - 2 / 20.5))


def test_long_break_can_count_as_idle() -> None:
    """It is unknown whether the break was intended. A note mentions it, and an option counts it as idle."""
    one, two = died(account(1, 0.0), 0.0, 0.0), account(2, 7214.0, first=11, of="1.abc")
    found = settled(one, two)
    assert found.cost.launch == near(7200.0)
    assert any("nothing ran" in note and "--idle-after" in note for note in found.notes)
    found = settled(one, two, idle_after_s=3600.0)
    assert (found.cost.launch, found.idle_s, found.count) == (0.0, near(7200.0), 1)


def test_steps_after_a_takeover_do_not_count() -> None:
    """The second attempt opened at 11.5, when the first had done 7 steps. Later work of the first does not
    count."""
    one = died(account(1, 0.0, steps=20), how="left")
    two = account(2, 8.5, first=6, of="1.abc")
    found = settled(one, two)
    (only,) = found.interruptions
    assert (only.kind, only.step, only.lost_steps, only.cost.perceive) == ("taken over", 7, 2, 0.0)
    assert costs(only.cost) == {"unfinished": 0.5, "restore": 1.0, "redone": 2.0}
    assert found.steps == 15 and any("took ownership" in note for note in found.notes)
    assert found.wall_s == near(two.beat - 4.0)
    other = settled(one, replace(two, boot="two"))  # on another machine, by wall clock
    assert other.interruptions == found.interruptions and other.wall_s == near(found.wall_s)


# -- clocks --


@pytest.mark.parametrize("end", [True, False])
def test_clock_set_back_adds_no_time(end: bool) -> None:
    """The next machine's clock is an hour behind: no time is counted between the two, with a note. A job that restored
    earlier steps of the other did not run at the same time, whatever the clocks show."""
    one = died(account(1, 0.0), 0.0, 0.0) if end else account(1, 0.0)
    two = account(2, 20.0, first=8, of="1.abc", boot="two", clock=WALL - 3600)
    found = settled(one, two)
    (only,) = found.interruptions
    assert costs(only.cost) == {"start": 2.0, "open": 1.0, "restore": 1.0, "redone": 3.0}
    assert (found.steps, found.wall_s) == (17, near(10 + 14))
    assert any("clock went back by 60 min" in note for note in found.notes)


# -- copies --


def test_copied_run_starts_a_new_count() -> None:
    """The time between is neither an interruption nor part of the run. Redone steps are reported."""
    one = account(1, 0.0)
    two = account(2, 9000.0, first=9, of="1.abc", url="file:///copy", inode=8)
    found = settled(one, two)
    (only,) = found.interruptions
    assert (only.kind, only.counted, only.lost_steps, costs(only.cost)) == ("moved", False, 2, {"redone": 2.0})
    assert (found.moved_s, found.wall_s, found.count) == (near(9004 - 14), near(20.0), 0)
    assert any("is a copy" in note for note in found.notes)


# -- invalid input --


def test_impossible_numbers_raise_corrupt_error() -> None:
    """Such metrics are rejected when they are read."""
    for wild in (account(2, 1e300), account(2, 15.0, step=10**40), account(2, 15.0, anchor=(-1e305, 0.0))):
        with pytest.raises(CorruptError):
            Account.from_bytes(json.dumps(json.loads(wild.to_bytes())).encode())


few = st.floats(0.0, 2.0).map(lambda value: round(value, 6))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 25), st.booleans(), few), min_size=1, max_size=8), few)
def test_result_matches_simulated_attempts(lives: list[tuple[int, int, bool, float]], unnoticed: float) -> None:
    """Job attempts do steps of 1 s, starting some steps before the last one, with single or merged rows. Counting how
    often each step was done gives the same sums."""
    clock, done, times, accounts, lost = 10.0, 0, dict[int, int](), list[Account](), list[int]()
    for number, (steps, back, merged, restart_s) in enumerate(lives, 1):
        first = max(1, done + 1 - back)
        one = account(number, clock, first, steps, of=f"{number - 1}.abc" if number > 1 else "")
        if merged and steps > 1:
            one.rows = [one.rows[0], StepRow(one.beat, one.step, steps - 1, steps - 1.0, quiet=steps - 1)]
        accounts.append(died(one, 1.0 + unnoticed, 0.5))
        for step in range(first, first + steps):
            times[step] = times.get(step, 0) + 1
        lost.append(done - first + 1)
        done = first + steps - 1
        clock = accounts[-1].kept + restart_s
    found = settled(*accounts)
    stands, all_done = sum(step <= done for step in times), sum(times.values())
    assert found.steps == stands and found.productive_s == pytest.approx(stands)
    assert found.cost.redone + found.cost.undone == pytest.approx(all_done - stands)
    assert [one.lost_steps for one in found.interruptions] == [*lost[1:], None]
    assert found.cost.restore == pytest.approx(len(lives) - 1) and found.cost.leave == pytest.approx(0.5 * len(lives))
    assert found.cost.launch == pytest.approx(sum(restart_s for *_, restart_s in lives[:-1]))
    if all_done:
        assert found.cost.unfinished == pytest.approx(len(lives))
        assert found.cost.perceive == pytest.approx(unnoticed * len(lives))


@pytest.mark.parametrize("part", ["perceive", "redone", "launch", "restore", "first_step", "unfinished"])
def test_negative_control_missing_part_is_detected(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = died(account(1, 0.0), 2.5)
    two = account(2, 20.0, first=8, of="1.abc", back=2.0)
    two.rows[0] = replace(two.rows[0], seconds=3.0)
    two.rows = [two.rows[0], *(replace(row, at=row.at + 2) for row in two.rows[1:])]
    two.rows[0] = replace(two.rows[0], at=two.rows[0].at + 2)
    two.beat = two.rows[-1].at
    settled(one, two)
    frozen = walk._Loss.frozen
    monkeypatch.setattr(
        walk._Loss, "frozen", lambda self: replace(frozen(self), cost=replace(frozen(self).cost, **{part: 0.0}))
    )
    with pytest.raises(AssertionError):
        settled(one, two)


# -- the command --


def test_report_shows_where_the_time_went(run: Path) -> None:
    """The text has a summary, parts, interruptions and notes. The JSON output is the statement itself."""
    one = died(account(1, 0.0, faults=[seen(14.2, "oom")]), 0.5)
    write(run, one, account(2, 20.0, first=8, of="1.abc"))
    result = invoke(run)
    assert result.return_value == 0, result
    for text in (
        "effective training time",
        "1 out of memory",
        "1 from memory",
        "perceive",
        "the interrupted step",
        "wall-clock",
    ):
        assert text in result.stdout
    found = json.loads(invoke(run, "--json").stdout)
    keys = [f"{PREFIX}{number}.abc.0.json" for number in (1, 2)]
    expected = accounting.settled([Account.from_bytes((run / key).read_bytes()) for key in keys]).statement
    assert found["effective"] == pytest.approx(expected.effective) and found["url"] == f"file://{run}"
    assert found["interruptions"] == json.loads(json.dumps(expected.to_json()))["interruptions"]


def test_report_reads_fault_files(run: Path) -> None:
    """A rank's report of the end splits time that the metrics alone cannot split."""
    write(run, account(1, 0.0), account(2, 20.0, first=8, of="1.abc"))
    (run / "faults").mkdir(exist_ok=True)
    time = datetime.fromtimestamp(WALL + 18, UTC).isoformat()
    fault = Fault("hang", "rank 3 waits", time=time, term="1.abc", saved=[SavedStep(7, "memory", "ring", 0.1)])
    (run / fault.key).write_bytes(fault.to_bytes())
    (only,) = json.loads(invoke(run, "--json").stdout)["interruptions"]
    assert (only["kind"], only["cost"]["perceive"]) == ("hang", pytest.approx(3.0))


def test_damaged_metrics_are_skipped_and_reported(run: Path) -> None:
    """The exit code is 1, and the rest is reported. If no metrics are left, the command fails."""
    write(run, died(account(1, 0.0)), account(2, 20.0, first=8, of="1.abc"))
    (run / f"{PREFIX}2.abc.0.json").write_bytes(b'{"version": 1, "ep')
    (run / f"{PREFIX}notes.txt").write_text("not ours")
    result = invoke(run)
    assert result.return_value == 1 and "2.abc.0.json, which is damaged" in result.stderr
    assert "not ours" not in result.output and "notes.txt" not in result.output
    assert json.loads(invoke(run, "--json").stdout)["damaged"] == [f"{PREFIX}2.abc.0.json"]
    (run / f"{PREFIX}1.abc.0.json").write_bytes(b"[]")
    assert isinstance(invoke(run).exception, CorruptError)


def test_run_without_metrics_raises_clear_error(run: Path) -> None:
    result = invoke(run)
    assert isinstance(result.exception, FormatError) and "has no run metrics" in str(result.exception)
    (run / "empty").mkdir()
    result = invoke(run / "empty")
    assert isinstance(result.exception, NoCheckpointError) and "no run metrics" not in str(result.exception)


def test_control_characters_do_not_reach_a_terminal(run: Path) -> None:
    """A fault summary may contain any text."""
    one = died(account(1, 0.0, faults=[SeenFault(14.2, "oom\x1b[31m", "[red]\x1b[31mworm\x9b", ends=True)]))
    one.term, one.restores = "1.abc", [Restore(3.0, 1.0, None, "\x1b")]
    write(run, one, account(2, 20.0, of="1.abc", first=3, source="\x1bx"))
    assert not set(invoke(run).output) & {"\x1b", "\x9b"}


def test_interval_lines_show_since_when_and_why() -> None:
    """The line of a tier covers the time since its last change. The newest attempt with a decision counts."""
    one = account(1, 0.0)
    one.decisions = [
        Decision(0, {"memory": 4, "file:///run": 100}),
        Decision(40, {"memory": 1, "file:///run": 100}, {"memory": "a snapshot takes 2.1 ms from training"}),
        Decision(240, {"memory": 1, "file:///run": 0}, {"memory": "a snapshot takes 2.0 ms from training"}),
    ]
    assert reading.cadence_lines([account(2, 20.0), one]) == [
        "memory: every step, since step 40: a snapshot takes 2.0 ms from training",
        "file:///run: never, since step 240",
    ]
    two = replace(account(2, 20.0), decisions=[Decision(9, {"memory": 2000})])
    assert reading.cadence_lines([two, one]) == ["memory: every 2,000 steps, since step 9"]
    assert reading.cadence_lines([account(1, 0.0)]) == [] == reading.cadence_lines([])
