"""Tests of the fault example: it recovers, reports that, and does not accept a false recovery."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import REPO, eventually, start_python, writers

sys.path.insert(0, str(REPO / "examples"))

import faults
from faults import BY_NAME, ENTRIES, EVERY, Outcome, Story

QUICK = ("kill",)
SCRIPT = str(REPO / "examples/faults.py")


def start(*arguments: object, tmp: Path) -> subprocess.Popen[str]:
    """Start the example in its own process, without a terminal."""
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'backends'}", "TMPDIR": str(tmp)}
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    pipe = subprocess.PIPE
    return start_python(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def run(*arguments: object, tmp: Path, timeout_s: float = 60.0) -> tuple[int, str, str]:
    process = start(*arguments, tmp=tmp)
    stdout, stderr = process.communicate(timeout=timeout_s)
    return process.returncode, stdout, stderr


def left(tmp: Path) -> list[Any]:
    """Return the processes and folders that an ended example left behind."""
    return [*writers(tmp), *tmp.glob("everystep-faults-*")]


def check(one: dict[str, Any]) -> None:
    """Check the JSON of a fault that has recovered."""
    entry = BY_NAME[one["name"]]
    assert one["verdict"] == "recovered" and one["problems"] == []
    assert 0 <= one["lost"] <= entry.may_lose
    assert one["perceived_s"] is not None and one["back_s"] > 0
    assert one["exit_codes"][-1] == 0
    if entry.goes_on:
        assert one["restarts"] == 0 and one["restored"] is None
        assert not entry.kinds or max(one["durable"]) >= one["at"]
    else:
        assert one["restarts"] == 1 and 0 < one["restore_s"] < one["back_s"]
        assert one["restored"] >= one["acknowledged"] > 0
        assert one["tier"] is not None
    if entry.kinds:
        assert {account["kind"] for account in one["accounts"]} & set(entry.kinds)


@pytest.mark.timeout(280)
def test_killed_rank_recovers_and_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL loses at most one step, the JSON document shows that, and nothing is left behind."""
    code, stdout, stderr = run(*QUICK, "--json", tmp=tmp_path, timeout_s=260.0)
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found["ok"] is True and found["ranks"] == 2
    assert [one["name"] for one in found["entries"]] == list(QUICK)
    for one in found["entries"]:
        check(one)
    assert found["entries"][0]["tier"] == "memory"
    assert stderr.count("bit for bit") == len(QUICK)
    assert not left(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES if entry.name not in QUICK])
def test_every_other_fault_recovers(name: str, tmp_path: Path) -> None:
    """Each fault recovers as promised, or is reported as impossible here, which is not a success."""
    code, stdout, stderr = run(name, "--json", tmp=tmp_path, timeout_s=260.0)
    found = json.loads(stdout)
    [one] = found["entries"]
    assert not left(tmp_path)
    if name == "oom-kill" and one["verdict"] == "skipped":
        assert code == 1 and found["ok"] is False
        pytest.skip(one["skipped"])
    assert code == 0, stderr
    check(one)


@pytest.mark.long
def test_interrupted_faults_example_leaves_no_processes(tmp_path: Path) -> None:
    """Ctrl-C while the ranks train ends all processes, removes the folder, and sets the exit code."""
    process = start("kill", tmp=tmp_path)
    assert eventually(lambda: bool(list(tmp_path.glob("everystep-faults-*/kill/run"))), 120.0)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60.0)
    assert process.returncode == 130, stdout
    assert not left(tmp_path)


# -- the parts of the verdict --


def account(kind: str, summary: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "summary": summary, "suspects": [], "exit_code": None, **fields}


def recovered(name: str) -> Story:
    """Return the story of a perfect recovery."""
    entry = BY_NAME[name]
    story = Story(name, at=70, perceived_s=0.004, back_s=2.0, exit_codes=[0])
    if entry.kinds:
        story.accounts = [account(entry.kinds[0], f"so it was: {entry.words}", suspects=[1])]
    if entry.goes_on:
        story.durable, story.slowest_s = [80], 0.05
    else:
        story.restarts, story.finished, story.restored, story.restore_s, story.tier = 1, 71, 71, 0.1, "memory"
        story.acknowledged = 70
    if name == "both":
        story.restored, story.tier, story.acknowledged = EVERY, "file:///run", EVERY
    if name == "sigterm":
        story.exit_codes, story.accounts[0]["exit_code"] = [1, 0], 143
    return story


def outcomes() -> list[Outcome]:
    return [Outcome([2.0, 1.5, 1.25], {"model.weight": f"a{rank}", "optim.0.exp_avg": "b"}) for rank in range(2)]


def test_verdict_accepts_perfect_recovery() -> None:
    """Every entry passes; otherwise the checks below would prove nothing."""
    for name in BY_NAME:
        assert faults.judge(recovered(name), outcomes(), outcomes()) == [], name


def test_verdict_rejects_different_results() -> None:
    """A different or missing digest, loss, tensor or rank is reported with its rank."""

    def judged(change: Callable[[list[Outcome]], object]) -> list[str]:
        found = outcomes()
        change(found)
        return faults.judge(recovered("kill"), outcomes(), found)

    assert judged(lambda o: o[1].digests.update({"model.weight": "a0"})) == ["rank 1: tensor model.weight"]
    assert judged(lambda o: o[0].digests.pop("optim.0.exp_avg")) == ["rank 0: tensor optim.0.exp_avg"]
    assert judged(lambda o: o[0].digests.update(more="c")) == ["rank 0: tensor more"]
    [other] = judged(lambda o: o[0].losses.__setitem__(1, 1.5 + 1e-9))
    assert other.startswith("rank 0: loss of step 2:")
    assert judged(lambda o: o[1].losses.pop()) == ["rank 1: 2 losses, not 3"]
    assert len(judged(lambda o: o.pop())) == 1
    assert len(faults.judge(recovered("kill"), [], [])) == 1


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("kill", {"restored": 69, "acknowledged": 0}, "2 steps were lost, more than the 1 allowed"),
        ("kill", {"restored": 70, "acknowledged": 71}, "step 71 was acknowledged, and step 70 restored"),
        ("kill", {"restarts": 2}, "restarted 2 times"),
        ("kill", {"restarts": 0}, "restarted 0 times"),
        ("kill", {"accounts": []}, "no report of death contains 'SIGKILL'"),
        ("kill", {"perceived_s": None}, "the fault was not detected"),
        ("kill", {"at": None}, "the fault was never injected"),
        ("kill", {"back_s": None}, "training never continued"),
        ("kill", {"broken": "it did not finish"}, "it did not finish"),
        ("kill", {"exit_codes": [1]}, "torchrun ended with exit code 1"),
        ("sigterm", {"restored": 70}, "1 step was lost, more than the 0 allowed"),
        ("sigterm", {"exit_codes": [0, 0]}, "torchrun ended with exit code 0 then 0"),
        ("sigterm", {"accounts": [account("signal", "SIGTERM came", exit_code=1)]}, "exit with code 143"),
        ("hang", {"accounts": [account("hang", "rank 1", suspects=[0])]}, "names only rank 1"),
        ("usr1", {"durable": []}, "70 steps were lost"),
        ("usr1", {"durable": [69]}, "1 step was lost"),
        ("usr1", {"restarts": 1, "finished": 70, "restored": 70}, "restarted 1 time"),
        ("writer", {"perceived_s": None}, "no new writer was started"),
        ("writer", {"restarts": 1, "finished": 70, "restored": 70}, "restarted 1 time"),
        ("both", {"restored": 20}, "51 steps were lost"),
        ("both", {"tier": "memory"}, "came from memory"),
    ],
)
def test_verdict_rejects_broken_promises(name: str, changes: dict[str, Any], says: str) -> None:
    """Each wrong number of lost steps or restarts, report and exit code is detected by itself."""
    problems = faults.judge(dataclasses.replace(recovered(name), **changes), outcomes(), outcomes())
    assert any(says in problem for problem in problems), problems
