"""Which way snapshots leave a device, found out by what steps take. No device is needed: the clock is a table."""

from __future__ import annotations

import pytest

from ckpt.core.snapshot import stage_mode
from ckpt.core.snapshot.stage_mode import AGAIN, TRIES, WAYS, StageMode


def run(took: dict[str, float], saves: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways of so many saves, one a step, where a step takes so long by the way of the save before it."""
    mode, now, ways = StageMode(), 1000.0, list[str]()
    monkeypatch.setattr(stage_mode.time, "perf_counter", lambda: now)
    for step in range(saves):
        ways.append(mode.next(step))
        now += took[ways[-1]]
    return ways


@pytest.mark.parametrize(
    ("took", "best"),
    [
        ({"overlap": 0.5, "paced": 0.5, "wait": 0.9}, "overlap"),
        ({"overlap": 4.4, "paced": 2.0, "wait": 0.9}, "wait"),
        ({"overlap": 4.4, "paced": 0.6, "wait": 0.9}, "paced"),
        ({"overlap": 0.5, "paced": 0.495, "wait": 0.495}, "overlap"),
    ],
    ids=["undisturbed", "disturbed", "room between", "noise"],
)
def test_the_quickest_way_is_kept(took: dict[str, float], best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried on a few saves; another one than the first has to be worth it."""
    ways = run(took, AGAIN - 1, monkeypatch)
    tried = len(WAYS) * TRIES
    assert set(ways[:tried]) == set(WAYS) and set(ways[tried:]) == {best}


def test_it_is_tried_again_when_training_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some hundreds of saves, all ways once more."""
    ways = run({"overlap": 4.4, "paced": 0.6, "wait": 0.9}, AGAIN + len(WAYS) * TRIES, monkeypatch)
    assert set(ways[AGAIN:]) == set(WAYS) and ways[AGAIN - 2] == "paced"
