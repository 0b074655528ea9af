"""A restore reports the settings of schedulers that the checkpoint overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import ckpt

SCHEDULERS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "T_max": (lambda o, n: lrs.CosineAnnealingLR(o, 10 * n), "sched: T_max 10, not the script's 20"),
    "milestones": (lambda o, n: lrs.StepLR(o, 3 * n), "sched: step_size 3, not the script's 6"),
    "inside another": (
        lambda o, n: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.CosineAnnealingLR(o, 10 * n)], [2]),
        "sched: _schedulers.1.T_max 10, not the script's 20",
    ),
    "the same": (lambda o, n: lrs.CosineAnnealingLR(o, 10), ""),
}


def made(make: Callable[[Any, int], Any], n: int, lr: float) -> dict[str, Any]:
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    return {"net": net, "opt": opt, "sched": make(opt, n)}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_restore_reports_scheduler_settings_that_differ(kind: str, tmp_path: Path) -> None:
    """Like settings of optimizers: in last_restore.overridden. Progress is not reported."""
    make, text = SCHEDULERS[kind]
    state = made(make, 1, 0.5)
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        for step in range(3):
            state["opt"].step()
            state["sched"].step()
            cp.step(step + 1)
    with ckpt.Checkpointer(made(make, 2, 0.5), tmp_path / "run") as cp:
        assert cp.restore() == 3
        assert cp.last_restore is not None and cp.last_restore.overridden == ([text] if text else [])


def test_restore_reports_base_learning_rates_that_differ(tmp_path: Path) -> None:
    """A learning rate that was changed in the script is overridden in the optimizer and in the scheduler."""
    make = SCHEDULERS["the same"][0]
    with ckpt.Checkpointer(made(make, 1, 0.5), tmp_path / "run") as cp:
        cp.step(1)
        cp.save(1)
    with ckpt.Checkpointer(made(make, 1, 0.25), tmp_path / "run") as cp:
        cp.restore()
        assert cp.last_restore is not None
        assert "sched: base_lrs [0.5], not the script's [0.25]" in cp.last_restore.overridden
