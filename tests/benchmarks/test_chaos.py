"""Tests of the fault benchmark: every second belongs to one part, and all contenders end with the same weights."""

from __future__ import annotations

import copy
import statistics
import sys
from typing import Any

import pytest

from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import chaos

Json = dict[str, Any]


# -- the schedule --


def test_schedule_depends_only_on_the_seed() -> None:
    """The same seed gives the same faults, and another seed different ones.
    Each kind occurs equally often, intervals have the requested mean, and none is below the floor."""
    plan = chaos.Plan(mtbf=20.0, faults=40, seed=3)
    faults = chaos.schedule(plan)
    assert faults == chaos.schedule(plan)
    assert faults != chaos.schedule(chaos.Plan(mtbf=20.0, faults=40, seed=4))
    assert {kind: sum(kind == one for _, one in faults) for kind in chaos.KINDS} == dict.fromkeys(chaos.KINDS, 10)
    assert min(interval for interval, _ in faults) >= plan.floor
    assert 18.0 < statistics.mean(interval for interval, _ in faults) < 22.0


# -- the part that each second belongs to: handmade lines, with a usual step of 1 s --


def started(born: float, began: float, restored: float, step: int) -> list[Json]:
    where = "folder" if step else ""
    return [
        {"what": "born", "at": born, "born": born, "pid": 1},
        {"what": "restored", "at": restored, "began": began, "step": step, "source": where},
    ]


def stepped(step: int, begin: float, done: float, load: str = "quiet", *, due: bool = False) -> Json:
    return {"what": "step", "at": done, "step": step, "begin": begin, "done": done, "load": load, "due": due}


FIRST = [
    *started(0.0, 0.9, 1.0, 0),
    stepped(1, 1.0, 2.5, "warm"),  # other 0.5
    stepped(2, 2.5, 3.5, due=True),
    {"what": "called", "at": 3.75, "step": 2},  # saving 0.25
    stepped(3, 3.75, 5.0, "busy"),  # saving 0.25
    stepped(4, 5.0, 6.125),  # other 0.125
]
SECOND = [
    *started(8.0, 9.0, 9.25, 2),  # restore 0.25
    stepped(3, 9.5, 11.0, "warm"),  # recompute 1, restart 0.5
    stepped(4, 11.0, 12.25, "warm"),  # recompute 1, other 0.25
    stepped(5, 12.25, 13.25),
]
KILLED = chaos.Hit("SIGKILL", 6.5, 7.0)  # recompute 0.375, perceive 0.5; then restart 2 + 0.25


def test_every_second_belongs_to_one_part() -> None:
    """A kill in the middle of a step: all parts match the values computed by hand."""
    bill = chaos.bill_of([*FIRST, *SECOND], [KILLED], 1.0)
    parts = {"perceive": 0.5, "restart": 2.75, "restore": 0.25, "recompute": 2.375, "saving": 0.5, "other": 0.875}
    assert bill.parts == parts
    assert bill.training == 5.0 and bill.steps == 5
    assert bill.wall == 12.25 == bill.training + sum(parts.values())
    assert bill.invalid == 6.375 and bill.effective == 1 - 6.375 / 12.25
    assert bill.figure == 3.125
    assert (bill.saves, bill.quiet, bill.own_s, bill.first_start_s) == (1, 3, 1.0, 1.0)
    only = bill.interruptions[0]
    assert (only.kind, only.step, only.restored, only.lost, only.source) == ("SIGKILL", 4, 2, 2, "folder")
    assert (only.perceive, only.restart, only.restore, only.recompute) == (0.5, 2.75, 0.25, 2.375)
    assert sum(only.stages.values()) == only.restart
    assert only.stages | {"model": 0.0, "imports": 0.0} == only.stages
    assert [only.stages[name] for name in ("launcher", "opening", "loop", "first step")] == [1.0, 1.0, 0.25, 0.5]
    assert bill.saving_in == {"calls": 0.25, "soon after a start": 0.25, "later": 0.0}


@pytest.mark.parametrize("spoil", ["a step", "the restore", "a process", "a fault", "what was lost"])
def test_inconsistent_event_lines_are_rejected(spoil: str) -> None:
    """Negative control: a missing line, or a restored step that was never finished, raises Failed."""
    events, hits = copy.deepcopy([*FIRST, *SECOND]), [KILLED]
    if spoil == "a step":
        del events[4]
        events = [event for event in events if event.get("step") != 3 or event["what"] != "step"]
    elif spoil == "the restore":
        events = [event for event in events if event["what"] != "restored"]
    elif spoil == "a process":
        events = FIRST
    elif spoil == "a fault":
        hits = []
    else:
        for event in events[len(FIRST) :]:
            event["step"] = event.get("step", 0) + 3
    with pytest.raises(chaos.Failed):
        chaos.bill_of(events, hits, 1.0)


# -- the summary --


def told(**figures: float) -> Json:
    """Return a run of each contender with these restore times; all have the expected weights."""
    found: Json = {}
    for name, restore_s in figures.items():
        parts = {**dict.fromkeys(chaos.PARTS, 0.0), "restart": 50.0, "restore": restore_s}
        bill = {"steps": 7, "wall": 160.0, "training": 100.0, "parts": parts, "interruptions": []}
        found[name.replace("_", " ").replace("ours", "everystep")] = {"bill": bill, "digest": "right"}
    return {"plan": {"faults": 10}, "contenders": found, "reference": {"digests": {"7": "right"}}}


def test_goal_compares_with_best_correct_peer() -> None:
    """The ratio covers only the parts that depend on saving. A peer with different weights is named only."""
    lines = told(ours=2.0, torch_save=10.0, DCP_async=5.0)
    lines["contenders"] = {
        {"torch save": "torch.save"}.get(name, name): one for name, one in lines["contenders"].items()
    }
    found = chaos.summary(lines)
    assert found["best"] == "DCP async" and not found["wrong"]
    assert found["goals"][0]["ours"] == 0.4 and found["goals"][0]["met"] is False
    lines["contenders"]["DCP async"]["digest"] = "other"
    found = chaos.summary(lines)
    assert found["best"] == "torch.save" and found["wrong"] == ["DCP async ended with other weights"]
    assert found["goals"][0]["ours"] == 0.2 and found["goals"][0]["met"] is True
