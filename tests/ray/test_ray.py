"""`ckpt.ray` under the real Ray Train, on this machine: a worker is killed, and what Ray keeps and deletes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from foreign import python_with
from processes import PYTHONPATH, REPO


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has Ray beside our packages."""
    return python_with("ray")


def fits(python: Path, *asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What the driver has said of each, one after the other in one Ray, since to start that takes long."""
    off = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}
    ended = subprocess.run(
        [str(python), str(REPO / "tests" / "lib" / "ray_toy.py"), json.dumps(asked)],
        env={**os.environ, **off, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=290,
    )
    if "ray is up" not in ended.stdout:
        pytest.skip(f"Ray does not start here: {ended.stderr[-500:]}")
    assert ended.returncode == 0, ended.stderr[-5000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"metrics')]


def test_a_killed_worker_comes_back_from_memory(python: Path, tmp_path: Path) -> None:
    """Ray starts the workers again, and they are where they were, though the folder has an older step; weights are
    those of a run that nobody killed. Another number of workers goes on from the storage. Ray deletes what was reported
    before, and never the run."""
    one = {"folder": str(tmp_path / "killed"), "steps": 8, "kill_at": 5, "workers": 2}
    longer = {**one, "steps": 10, "kill_at": 0, "workers": 1}
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    *said, last = fits(python, one, {**one, "folder": str(tmp_path / "whole"), "kill_at": 0}, longer)
    weights = []
    for each, name in zip(said, ("killed", "whole"), strict=True):
        assert each["metrics"]["step"] == 8 and each["place"].endswith("@8")
        weights.append(torch.load(tmp_path / name / "weights.8.pt", weights_only=True))
        stored = ckpt.load(each["place"], only="model.*").sub("model").all()
        assert stored.keys() == weights[-1].keys()
        assert all(torch.equal(stored[key], weights[-1][key]) for key in stored)
    killed, whole = weights
    assert all(torch.equal(killed[key], whole[key]) for key in whole)
    experiment = tmp_path / "killed" / "storage" / "toy"
    assert len([path for path in experiment.glob("checkpoint_*") if path.is_dir()]) < 4  # that were reported
    assert {2, 4, 6, 8} <= {one.step for one in ckpt.Run(str(experiment / "everystep")).list()}
    assert last["place"].endswith("@10")
    starts = [json.loads(line) for line in (tmp_path / "killed" / "starts").read_text().splitlines()]
    assert starts[:2] == [[0, ""], [5, "memory"]] and [start for start, _ in starts] == [0, 5, 8]


def test_another_version_is_refused(python: Path) -> None:
    """With the range that is known."""
    code, path = "import ray; ray.__version__ = '2.9.0'; import ckpt.ray", {"PYTHONPATH": PYTHONPATH}
    ended = subprocess.run([python, "-c", code], env={**os.environ, **path}, capture_output=True, text=True)
    assert "ckpt.ray supports Ray from 2.60 and below 2.70, but 2.9.0 is installed" in ended.stderr
