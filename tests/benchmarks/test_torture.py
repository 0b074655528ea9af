"""The torture program finds no errors here, and counts all kinds of errors."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import torture
from torture import QUICK, Counts, Journal


def journal(folder: Path, *lines: dict[str, object]) -> Journal:
    path = folder / "journal"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Journal(path)


OFTEN = ("flip",)  # tests of promises inject the other faults each time
STEPS = [{"step": 4, "digest": "four"}, {"step": 5, "digest": "five"}, {"ack": "staged", "step": 5}]


@pytest.mark.parametrize(
    ("restored", "column"),
    [
        ({"restored": 5, "digest": "five", "from": "memory"}, ""),
        ({"restored": 4, "digest": "four", "from": "disk"}, "lost"),
        ({"restored": 5, "digest": "four", "from": "disk"}, "wrong"),
        ({"restored": 0, "digest": "", "from": ""}, "lost"),
        (None, "lost"),
    ],
)
def test_check_start_counts_wrong_and_lost_states(
    tmp_path: Path, restored: dict[str, object] | None, column: str
) -> None:
    counts = Counts("kill")
    lines = [*STEPS, *([restored] if restored else [])]
    torture.check_start(journal(tmp_path, *lines), counts, 5, "a test")
    assert (counts.wrong, counts.lost) == (int(column == "wrong"), int(column == "lost"))
    assert counts.bad == bool(column)


def test_damage_files_counts_wrong_tensors_losses_and_foreign_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty reader accepts damaged bytes, skips two checkpoints, and raises other errors. All are counted."""
    real, turns = torture.read_newest, itertools.cycle(("wrong", "lost", "unclear"))

    def read(run: str) -> tuple[int, str]:
        match next(turns):
            case "wrong":
                return real(run)[0], "another digest"
            case "lost":
                return 6, str(torture.read_digest(run, 6))
        raise KeyError("rank-0")

    monkeypatch.setattr(torture, "read_newest", read)
    counts = Counts("remove")
    torture.damage_files(counts, 1, tmp_path, random.Random(1), lambda path: "left as it is")
    assert counts.attempts == counts.wrong + counts.lost + counts.unclear > 3, counts.notes
    assert min(counts.wrong, counts.lost, counts.unclear) > 0, counts.notes


def test_journal_digest_changes_with_one_bit() -> None:
    import torture_job

    state = torture_job.build(1, 1)
    torture_job.train_step(state, 1)
    before = torture_job.digest(state)
    moment = next(iter(state["optim"].state.values()))["exp_avg"]
    moment.view(torch.int32)[(0,) * moment.dim()] ^= 1
    assert torture_job.digest(state) != before


@pytest.mark.parametrize(
    "fault",
    [fault if fault in OFTEN else pytest.param(fault, marks=pytest.mark.long) for fault in torture.FAULTS],
)
def test_no_fault_gives_wrong_tensors_losses_hangs_or_unclear_errors(fault: str, tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "torture.py"), "--quick", "--only", fault]
    written = tmp_path / "counts.json"
    done = subprocess.run([*command, "--json", str(written)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    [counts] = json.loads(written.read_text())["faults"]
    assert counts["attempts"] >= 1 or counts["skipped"]
    assert QUICK.kills >= 1
