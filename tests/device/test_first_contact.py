"""The program for the first minutes on a GPU is tested here, so that it does not fail there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import simulated
from processes import PYTHONPATH, REPO
from simulated import build

QUESTIONS = ["facts", "capture", "captured_before", "scaler", "locking", "killed", "fault", "copies", "orders", "many",
             "mixed", "compiled", "sharded"]  # fmt: skip
OTHERS = ["facts", "killed", "many"]  # test_contact.py tests the others too


@pytest.mark.parametrize("questions", [OTHERS, pytest.param(QUESTIONS, marks=pytest.mark.long)], ids=["few", "all"])
def test_first_contact_succeeds_on_the_simulated_device(tmp_path: Path, questions: list[str]) -> None:
    if why := build.why_not():
        pytest.skip(why)
    build.library()
    found = tmp_path / "found.jsonl"
    environment = {**os.environ, simulated.VARIABLE: "", "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPO / "benchmarks/first_contact.py"), "--small", "--json", str(found), "--only"]
    found.write_text(json.dumps({"question": "facts", "told": "before"}) + "\n")
    # Not forked, because a forked process would already have checked for a device.
    done = subprocess.run(
        [*command, *questions], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    answers = [json.loads(line) for line in found.read_text().splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one["question"] for one in answers] == questions and answers[0]["told"] == "before"
    assert all(one.get("ok", True) and "error" not in one for one in answers)
