"""The recipe for a loop of one's own with Accelerate: killed and started again, it ends as if it never had been."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from processes import REPO, run_python

pytest.importorskip("accelerate")

SCRIPT = REPO / "examples" / "accelerate_loop.py"
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPO}:{REPO / 'backends'}",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
    }
    command = [*launcher, str(SCRIPT), *arguments]
    return run_python(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def lines(ended: subprocess.CompletedProcess[str], beginning: str) -> list[str]:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(line for line in ended.stdout.splitlines() if line.startswith(beginning))


@pytest.mark.parametrize(("launcher", "ranks"), [(ALONE, 1), (TORCHRUN, 2)], ids=["one process", "two ranks"])
def test_killed_and_resumed(run_dir: str, launcher: list[str], ranks: int) -> None:
    """Every loss of every batch, and all weights, are those of a run that was not killed, in the second epoch too."""
    killed = start(launcher, run_dir, "--kill-at", "17" if ranks == 2 else "29")
    assert killed.returncode != 0 and "rank 0" not in killed.stdout, killed.stdout + killed.stderr
    resumed = start(launcher, run_dir)
    assert int(lines(resumed, "starts at")[0].split()[-1]) in ((16, 17) if ranks == 2 else (28, 29))
    alone = start(launcher, f"{run_dir}-2")
    assert lines(resumed, "rank") == lines(alone, "rank")
    assert len(lines(resumed, "rank")) == ranks
