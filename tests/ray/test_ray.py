"""Tests of `ckpt.ray` with the real Ray Train on this machine: a killed worker, and the checkpoints Ray keeps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from foreign import errors_of_versions, python_with
from processes import PYTHONPATH, REPO


@pytest.fixture(scope="module")
def python() -> Path:
    """Return an interpreter with Ray and our packages."""
    return python_with("ray")


def fits(python: Path, *asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the driver's output for each request, all in one Ray, since its start is slow."""
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


def test_killed_worker_restores_from_memory(python: Path, tmp_path: Path) -> None:
    """Ray restarts the workers, and they continue from memory, though the folder has an older step. Weights equal those
    of an undisturbed run. Another number of workers continues from storage. Ray deletes older reported checkpoints,
    never the run."""
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
    assert len([path for path in experiment.glob("checkpoint_*") if path.is_dir()]) < 4  # reported ones
    assert {2, 4, 6, 8} <= {one.step for one in ckpt.Run(str(experiment / "everystep")).list()}
    assert last["place"].endswith("@10")
    starts = [json.loads(line) for line in (tmp_path / "killed" / "starts").read_text().splitlines()]
    assert starts[:2] == [[0, ""], [5, "memory"]] and [start for start, _ in starts] == [0, 5, 8]


def test_unsupported_version_is_rejected(python: Path) -> None:
    """The error has the supported range."""
    (error,) = errors_of_versions(python, "ray", "ray", "2.9.0")
    assert "ckpt.ray supports Ray from 2.60 and below 2.70, but 2.9.0 is installed" in error
