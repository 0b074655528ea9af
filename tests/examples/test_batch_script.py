"""The batch script of docs/guide/faults.md follows the advice of a run's last fault, and does nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import ckpt
import toy
from ckpt.guard.report import Fault
from documents import blocks
from processes import PYTHONPATH, REPO

pytestmark = pytest.mark.skipif(shutil.which("jq") is None, reason="the script wants jq")
(SCRIPT,) = (one.text for one in blocks(REPO / "docs" / "guide" / "faults.md") if "#SBATCH" in one.text)


def fault(kind: str, after_s: float, **fields: object) -> Fault:
    """Return a fault at this number of seconds after now."""
    at = (datetime.now(UTC) + timedelta(seconds=after_s)).isoformat(timespec="microseconds")
    return Fault(kind, kind, time=at, **fields)  # type: ignore[arg-type]


def called(folder: Path, *faults: Fault) -> list[str]:
    """Return the commands that Slurm gets after a job of this run has failed."""
    run, tools = folder / "runs" / "exp1", folder / "tools"
    with ckpt.Checkpointer(toy.build(), run, triggers=None) as cp:
        cp.step(1)
    (run / "faults").mkdir(exist_ok=True)
    for one in faults:
        (run / one.key).write_bytes(one.to_bytes())
    tools.mkdir()
    for name, does in {
        "srun": "exit 7",
        "scontrol": f'echo "$@" >> {folder}/asked',
        "ckpt": f'exec {sys.executable} -m ckpt "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": PYTHONPATH}
    environment |= {"SLURM_JOB_ID": "31", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (7, "")
    asked = folder / "asked"
    return asked.read_text().splitlines() if asked.exists() else []


def test_batch_script_follows_advice_of_last_fault(tmp_path: Path) -> None:
    """The script drains the node that one account wants replaced, although the last save was requested."""
    asked = called(
        tmp_path,
        fault("hang", -3600.0, advice="fix"),
        fault("hang", 5.0, advice="retry", host="a", term="1.x"),
        fault("death", 6.0, advice="replace", host="b", term="1.x"),
        fault("request", 90.0, advice="none"),
    )
    assert asked == ["update NodeName=b State=DRAIN Reason=training hung here", "requeue 31"]


def test_batch_script_ignores_faults_of_earlier_jobs(tmp_path: Path) -> None:
    """A job that fails before training is not requeued for an earlier fault or a save request."""
    assert called(tmp_path, fault("death", -3600.0, advice="retry"), fault("request", 5.0, advice="retry")) == []
