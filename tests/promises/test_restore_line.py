"""`restore()` reports its result: on a terminal, and in the log."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from processes import PYTHONPATH, run_python, start_python

SCRIPT = """
import logging, os, sys, ckpt, toy
{setup}
state = toy.build()
with ckpt.Checkpointer(state, sys.argv[1], every=2) as cp:
    for step in range(cp.restore(default=0) + 1, 4):
        toy.train_step(state)
        cp.step(step)
"""


def seen(run: Path, setup: str = "", *, terminal: bool = True) -> list[str]:
    """The lines on stderr of a start that tell of a restore."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", SCRIPT.format(setup=setup), str(run)]
    if not terminal:
        err = run_python(words, env=environment, capture_output=True, text=True, check=True).stderr
        return [line for line in err.splitlines() if "restored" in line]
    ours, theirs = pty.openpty()
    with start_python(words, env=environment, stderr=theirs) as job:
        os.close(theirs)
        out = b""
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # all ends of a terminal are closed
                break
            if not more:
                break
            out += more
    os.close(ours)
    assert job.returncode == 0, out
    return [line for line in out.decode().splitlines() if "restored" in line]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    assert seen(tmp_path / "run") == []  # there was nothing to restore
    return tmp_path / "run"


def test_one_line_at_a_terminal(run: Path) -> None:
    """One line with the source, the step and the duration."""
    (line,) = seen(run)
    assert line.startswith("ckpt: restored step 3 from ") and str(run) in line and line.split(" in ")[1].endswith("s")


def test_logging_decides_once_it_is_set_up(run: Path) -> None:
    """Once in its form, or not at all; where stderr is a file, nothing is shown unasked."""
    (line,) = seen(run, "logging.basicConfig(level=logging.INFO)")
    assert line.startswith("INFO:ckpt:restored step 3")
    assert seen(run, "logging.basicConfig()") == []
    assert seen(run, "logging.getLogger('ckpt').setLevel(logging.WARNING)") == []
    assert seen(run, "logging.disable(logging.INFO)") == []
    assert seen(run, terminal=False) == []
