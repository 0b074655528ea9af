"""Run metrics (the ledger): their content, what survives each fault, and which files are rejected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.core.cadence import ledger
from ckpt.core.cadence.ledger import Account, Decision, End, Restore, SaveTotals, SeenFault, StepRow, term_of
from ckpt.errors import CorruptError, FormatError
from parallel import free_port, launch
from processes import PYTHONPATH, eventually, killed, run_script, start_python, writers

JOB = """
import os, sys, time, boundaries, toy, ckpt
run, steps, kill_at, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
state = toy.build()
every = "auto" if mode == "auto" else 10
memory = ckpt.Memory(every=every if mode == "auto" else 1)
with ckpt.Checkpointer(state, ckpt.Tier(run, every=every), memory=memory) as cp:
    start = cp.restore(default=0)
    for step in range(start, steps):
        toy.train_step(state)
        if mode == "back" and step == 5:
            with cp.not_training():
                time.sleep(0.4)
        if mode == "auto":
            time.sleep(0.006)
        boundaries.memory_ready(cp)  # otherwise a step may be skipped
        save = cp.step(step + 1)
        if step + 1 == kill_at:
            if mode == "raise":
                raise RuntimeError("as it was asked to")
            if mode == "both":
                cp.wait(30)
                time.sleep(1.5)
                os.kill(cp._run.supervisor.client._process.pid, 9)
            if mode == "writer":
                time.sleep(1.2)
                os.kill(cp._run.supervisor.client._process.pid, 9)
                time.sleep(1.0)
                continue
            if mode == "stop":
                print("here", flush=True)
                os.kill(os.getpid(), 19)
            if save is not None:
                save.wait_staged(30)
            os.kill(os.getpid(), 15 if mode == "term" else 9)
            time.sleep(30)
        if mode == "back" and step + 1 == 20 and cp.last_restore.step is None:
            cp.wait(30)
            cp.restore(step=10)
            for again in range(10, 30):
                toy.train_step(state)
                cp.step(again + 1)
            break
"""


def accounts(run: str) -> list[Account]:
    """Return the metrics of a run in a folder, in order."""
    return ledger.in_order(Account.from_bytes(path.read_bytes()) for path in Path(run, "ledger").glob("*.json"))


def sample() -> Account:
    account = Account("3.abcd", 1, 8, "host", "boot", 42, "file:///x", 7, (1e9, 50.0), 1.0, 2.0, 3.0, 9.0, 12, 8.5)
    account.restores = [Restore(3.0, 0.5, 10, "memory", "2.cd-10", "4.ef")]
    account.rows = [StepRow(4.0, 11, 1, 0.5, 0.1, 0.01, 0, 0.0, 1, 0), StepRow(8.5, 12, 1, 0.5)]
    account.saves = {"file:///x": SaveTotals(2, 1, 3.0, 2.0, 100, 50)}
    account.faults = [SeenFault(9.0, "death", "died", 1, 12, True, "writer")]
    account.decisions = [Decision(5, {"memory": 2}, {"memory": "why"}, {"memory": 0.1}, {"file:///x": 1e4}, 4.0)]
    account.end = End("died", 9.0, 9.1)
    return account


# -- file format --


def test_metrics_survive_a_round_trip() -> None:
    """A round trip through bytes keeps every field. The file name has term and rank, and wall time uses the anchor."""
    account = sample()
    assert Account.from_bytes(account.to_bytes()) == account
    assert account.key == "ledger/3.abcd.1.json" and ledger.is_account(account.key) and account.number == 3
    assert account.wall(60.0) == 1e9 + 10


def test_cut_or_changed_metrics_raise_corrupt_error() -> None:
    """A file that is cut off anywhere, or has a field of another type, raises only CorruptError."""
    raw = sample().to_bytes()
    for stop in range(len(raw)):
        with pytest.raises(CorruptError):
            Account.from_bytes(raw[:stop])
    whole = json.loads(raw)
    wrong: list[tuple[str, Any]] = [
        ("term", "x"), ("rank", "0"), ("anchor", [1]), ("anchor", [1.0, "b"]), ("opened", None),
        ("kept", float("nan")),
        ("rows", []), ("restores", [3]), ("end", {"how": 1, "at": 2.0, "gone": 3.0}), ("faults", [{}]), ("pid", True),
        ("rows", {**whole["rows"], "step": [1.5, 2]}), ("rows", {**whole["rows"], "at": [1.0]}), ("saves", {"a": None}),
        ("decisions", [{"step": 1, "every": [], "why": {}}]), ("born", 1e999), ("version", "2"), ("version", None),
    ]  # fmt: skip
    (decision,) = whole["decisions"]
    for field, inner in (("every", "x"), ("every", 1.5), ("every", True), ("every", None), ("why", 3),
                         ("costs", "a lot"), ("costs", [1]), ("mtbf_s", {})):  # fmt: skip
        wrong.append(("decisions", [{**decision, field: {"x": inner}}]))
    for name, value in wrong:
        with pytest.raises(CorruptError):
            Account.from_bytes(json.dumps({**whole, name: value}).encode())
    with pytest.raises(FormatError, match="newer version"):
        Account.from_bytes(json.dumps({**whole, "version": 99}).encode())
    assert Account.from_bytes(json.dumps({**whole, "something new": 1}).encode()) == sample()  # negative control


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 10), st.booleans()), max_size=3000))
def test_merged_rows_keep_their_sums(steps: list[tuple[int, float, bool]]) -> None:
    """Merged rows are limited in number, keep the first ones unmerged, and never span a rollback."""
    rows: list[StepRow] = []
    at, step = 0.0, 1000
    for count, seconds, back in steps:
        at, step = at + seconds, step - 500 if back else step + count
        ledger.append(rows, StepRow(at, step, count, seconds, stalled=seconds / 2, saves=1))
    assert len(rows) <= ledger.MOST_ROWS or sum(back for _, _, back in steps) > 100
    assert sum(row.steps for row in rows) == sum(count for count, _, _ in steps)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(seconds for _, seconds, _ in steps))
    assert sum(row.saves for row in rows) == len(steps) and [row.at for row in rows] == sorted(row.at for row in rows)
    assert all(row.saves == 1 for row in rows[: ledger.FINE_ROWS])


def test_many_events_keep_first_and_last() -> None:
    found = ledger.bounded(range(1000))
    assert len(found) == ledger.MOST_EVENTS and found[0] == 0 and found[-1] == 999


# -- metrics of a run --


def test_closed_run_has_complete_metrics(run_dir: str) -> None:
    """A closed run has one file: every step in order, an empty first restore, the counted saves, and its end."""
    assert run_script(JOB, run_dir, 40, 0, "").returncode == 0
    (one,) = accounts(run_dir)
    assert [row.step for row in one.rows] == list(range(1, 41))
    assert one.step == 40 and one.beat == pytest.approx(one.rows[-1].at, abs=1e-5)
    assert [r.step for r in one.restores] == [None] and one.end is not None and one.end.how == "closed"
    assert one.born < one.opening < one.opened <= one.restores[0].at < one.rows[0].at < one.end.at
    (saves,) = one.saves.values()
    assert saves.count == 4 and saves.nbytes > 0 and not saves.failed and not one.faults
    assert sum(row.saves for row in one.rows) == 39  # the save after the last step is in no row
    assert 0 < sum(row.stalled for row in one.rows) < sum(row.seconds for row in one.rows)


def test_killed_trainer_has_metrics_to_its_last_step(run_dir: str, own_sockets: Path) -> None:
    """The writer detects the death and records it while it holds the memory. The next attempt records its restore."""
    assert killed(run_script(JOB, run_dir, 40, 17, ""))
    assert writers(own_sockets), "the writer should still be there"
    assert eventually(lambda: [one.end for one in accounts(run_dir)] not in ([], [None]), 10)
    assert run_script(JOB, run_dir, 40, 0, "").returncode == 0
    first, second = accounts(run_dir)
    assert first.step == 17 and first.end is not None and first.end.how == "died"
    assert first.beat <= first.end.at <= first.end.gone and [f.kind for f in first.faults if f.ends] == ["death"]
    assert (second.restores[0].step, second.restores[0].source) == (17, "memory")
    assert term_of(second.restores[0].checkpoint) in (first.term, first.restores[0].term)
    assert second.rows[0].step == 18 and second.number > first.number


def test_metrics_survive_killed_trainer_and_writer(run_dir: str) -> None:
    """Earlier data stays: the file has no end, but it is complete until shortly before the kill."""
    assert killed(run_script(JOB, run_dir, 200, 60, "both"))
    (one,) = accounts(run_dir)
    assert one.end is None and one.restores and one.kept >= one.opened
    assert run_script(JOB, run_dir, 80, 0, "").returncode == 0
    assert accounts(run_dir)[1].restores[0].source.startswith("file://")


def test_killed_writer_leaves_no_gap(run_dir: str) -> None:
    """The next writer continues with the last stored metrics."""
    assert run_script(JOB, run_dir, 60, 30, "writer").returncode == 0
    (one,) = accounts(run_dir)
    assert one.end is not None and one.end.how == "closed" and one.step == 60
    assert len(one.restores) == 1 and sum(row.steps for row in one.rows) == 60
    assert [row.at for row in one.rows] == sorted(row.at for row in one.rows)


def test_exception_and_signal_are_recorded_by_kind(run_dir: str) -> None:
    """The fault that ended an attempt is recorded with its kind and its time of detection."""
    assert run_script(JOB, run_dir, 40, 12, "raise").returncode == 1
    assert run_script(JOB, run_dir, 40, 25, "term").returncode == 143
    assert eventually(lambda: all(one.end for one in accounts(run_dir)))  # stored by writers after the exit
    first, second = accounts(run_dir)
    for one, kind in ((first, "exception"), (second, "signal")):
        assert kind in [f.kind for f in one.faults if f.ends and f.by == "fault handler"], one.faults
        assert one.end is not None and one.beat <= one.end.at <= one.end.gone and one.end.how != "closed"


def test_pause_and_rollback_are_recorded_separately(run_dir: str) -> None:
    """Time in not_training() is separate from the step around it. A rollback is a second restore in the same file, and
    its steps are recorded again."""
    assert run_script(JOB, run_dir, 40, 0, "back").returncode == 0
    (one,) = accounts(run_dir)
    assert 0.4 <= sum(row.paused for row in one.rows) < 5
    assert one.rows[5].paused >= 0.4 and one.rows[5].step == 6
    assert [r.step for r in one.restores] == [None, 10]
    assert [row.step for row in one.rows] == [*range(1, 21), *range(11, 31)]


def test_run_continues_if_metrics_cannot_be_stored(run_dir: str) -> None:
    """A file blocks the ledger folder: the run is still saved, and a warning is logged."""
    assert run_script(JOB, run_dir, 5, 0, "").returncode == 0
    for path in Path(run_dir, "ledger").iterdir():
        path.unlink()
    Path(run_dir, "ledger").rmdir()
    Path(run_dir, "ledger").write_text("in the way")
    result = run_script(JOB, run_dir, 40, 0, "")
    assert result.returncode == 0
    assert ckpt.load(run_dir, step=40).step == 40


# -- "auto" --


def test_auto_interval_is_reused_by_the_next_start(run_dir: str) -> None:
    """Decisions are stored with their reasons. A restart begins with the last one and loses no step."""
    assert killed(run_script(JOB, run_dir, 3000, 500, "auto"))
    (one,) = accounts(run_dir)
    assert one.decisions, "nothing was decided in 500 steps"
    last = one.decisions[-1]
    assert set(last.every) == set(last.why) == {"memory", one.url} and all(n >= 1 for n in last.every.values())
    assert run_script(JOB, run_dir, 520, 0, "auto").returncode == 0
    second = accounts(run_dir)[1]
    assert second.decisions and second.decisions[0].every == last.every


RANK = """
import os, sys, time, toy, ckpt
import torch, torch.distributed as dist
dist.init_process_group("gloo")
state = toy.build()
with ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every="auto"), memory=ckpt.Memory(every="auto")) as cp:
    for step in range(cp.restore(default=0), 900):
        toy.train_step(state)
        time.sleep(0.008)
        dist.barrier()
        cp.step(step + 1)
    newest = cp._run.intervals.plan.newest
    result = f"RANK {dist.get_rank()} {newest.step} {newest.memory} {newest.tiers} {cp.stats.saves}"
    print(result, flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_two_ranks_change_their_interval_together(run_dir: str) -> None:
    """Every committed step has the manifests of both ranks, and both have the same last decision."""
    ranks = launch(2, RANK, run_dir, port=free_port(), timeout_s=240)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    results = [rank.stdout.split(maxsplit=2)[2] for rank in ranks]
    assert results[0] == results[1]
    (one,) = accounts(run_dir)
    assert one.rank == 0 and one.decisions and one.end is not None and one.end.how == "closed"
    assert all("was not written" not in rank.stderr for rank in ranks)


@pytest.mark.long
def test_frozen_trainer_still_has_metrics(run_dir: str) -> None:
    """The writer reads the steps of a trainer stopped by SIGSTOP."""
    command = [sys.executable, "-c", JOB, run_dir, "40", "23", "stop"]
    process = start_python(command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert eventually(lambda: bool(found := accounts(run_dir)) and found[0].step == 23)
        assert accounts(run_dir)[0].end is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
