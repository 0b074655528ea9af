"""Processes that tests start, wait for and look for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

REPO = Path(__file__).parent.parent.parent
# What a process of a test may import: the library, and what tests share.
PYTHONPATH = ":".join(map(str, (REPO, REPO / "backends", REPO / "tests" / "lib", REPO / "tests" / "promises")))


def writers(folder: Path) -> list[psutil.Process]:
    """The writer processes whose socket lies in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def run_script(
    code: str, *arguments: object, fail: str = "", timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run Python code as a training process of its own; `fail` arms fail points (see ckpt/events.py)."""
    # OpenMP's threads spin while they wait, which starves everything else on a machine with few cores.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "CKPT_FAIL": fail, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether a condition comes true before the deadline."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def killed(result: subprocess.CompletedProcess[str]) -> bool:
    return result.returncode == -signal.SIGKILL
