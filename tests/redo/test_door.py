"""The redo log is an experiment: who does not ask for it has none of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from processes import PYTHONPATH, run_python

TRAINING = """
import json, sys
import torch
import ckpt

folder, logs = sys.argv[1], sys.argv[2] == "logs"
model = torch.nn.Linear(4, 4)
for _ in range(2):
    with ckpt.Checkpointer({"model": model}, [ckpt.Memory(linger_s=0), ckpt.Tier(folder, log_every_step=logs)]) as cp:
        first = cp.restore(default=0) + 1
        cp.step(first)
print(json.dumps(sorted(name for name in sys.modules if "redo" in name and name.startswith("ckpt"))))
"""


def modules_of(*words: str) -> list[str]:
    """Of a process that has imported nothing of ours before."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = run_python([sys.executable, *words], capture_output=True, text=True, check=True, env=environment)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_training_without_it_imports_the_door_alone(tmp_path: Path) -> None:
    """A run is opened, saved, closed, opened again and restored, and of the redo log only its door was imported; with
    `log_every_step` the same training imports what is behind it, and so does one that finds such a log."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    assert modules_of(str(script), str(tmp_path / "plain"), "none") == ["ckpt.redo"]
    with_logs = {"ckpt.trainer.redo", "ckpt.redo.optimizer_recipe"}
    assert with_logs <= set(modules_of(str(script), str(tmp_path / "logged"), "logs"))
    finds = set(modules_of(str(script), str(tmp_path / "logged"), "none"))
    assert "ckpt.restore.redo_logs" in finds and not with_logs & finds


def test_a_writer_without_it_imports_its_handlers_alone() -> None:
    """What a writer process imports when it starts has the messages of the redo log in it, and nothing that works."""
    what = (
        "import json, sys, ckpt.writer.main; print(json.dumps([n for n in sys.modules if n.startswith('ckpt.redo')]))"
    )
    assert modules_of("-c", what) == ["ckpt.redo"]
