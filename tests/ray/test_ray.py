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


def fit(python: Path, folder: Path, steps: int, kill_at: int, workers: int) -> dict[str, Any]:
    """What the driver has said in the end."""
    off = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}
    ended = subprocess.run(
        [str(python), str(REPO / "tests" / "lib" / "ray_toy.py"), str(folder), *map(str, (steps, kill_at, workers))],
        env={**os.environ, **off, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "ray is up" not in ended.stdout:
        pytest.skip(f"Ray does not start here: {ended.stderr[-500:]}")
    assert ended.returncode == 0, ended.stderr[-5000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_a_killed_worker_comes_back_from_memory(python: Path, tmp_path: Path) -> None:
    """Ray starts the workers again, and they are where they were, though the folder has an older step; weights are
    those of a run that nobody killed. Another number of workers goes on from the storage. Ray deletes what was reported
    before, and never the run."""
    for name, kill_at in (("killed", 5), ("whole", 0)):
        (tmp_path / name).mkdir()
        said = fit(python, tmp_path / name, 8, kill_at, 2)
        assert said["metrics"]["step"] == 8 and said["place"].endswith("@8")
        weights = torch.load(tmp_path / name / "weights.pt", weights_only=True)
        stored = ckpt.load(said["place"], only="model.*").sub("model").all()
        assert stored.keys() == weights.keys() and all(torch.equal(stored[key], weights[key]) for key in weights)
    starts = [json.loads(line) for line in (tmp_path / "killed" / "starts").read_text().splitlines()]
    assert starts == [[0, ""], [5, "memory"]]
    killed, whole = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("killed", "whole"))
    assert all(torch.equal(killed[key], whole[key]) for key in whole)
    experiment = tmp_path / "killed" / "storage" / "toy"
    assert len([path for path in experiment.glob("checkpoint_*") if path.is_dir()]) < 4  # that were reported
    assert {2, 4, 6, 8} <= {one.step for one in ckpt.Run(str(experiment / "everystep")).list()}
    assert fit(python, tmp_path / "killed", 10, 0, 1)["place"].endswith("@10")
    starts = [json.loads(line) for line in (tmp_path / "killed" / "starts").read_text().splitlines()]
    assert [start for start, _ in starts] == [0, 5, 8]


def test_another_version_is_refused(python: Path) -> None:
    """With the range that is known."""
    code, path = "import ray; ray.__version__ = '2.9.0'; import ckpt.ray", {"PYTHONPATH": PYTHONPATH}
    ended = subprocess.run([python, "-c", code], env={**os.environ, **path}, capture_output=True, text=True)
    assert "ckpt.ray knows Ray from 2.60 and below 2.70, and this is 2.9.0" in ended.stderr
