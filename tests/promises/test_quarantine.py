"""Steps that the user marks as not finite: kept for inspection, but never restored by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import toy
from processes import killed, run_script

BREAK = """
import os, sys, ckpt, toy, torch
state = toy.build()
with ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=4)) as cp:
    start = cp.restore(default=0)
    print("start", start, cp.last_restore.tier, flush=True)
    for step in range(start + 1, 31):
        toy.train_step(state)
        broken = step > 20 and "mend" not in sys.argv
        if broken:
            state["model"][0].weight.data.fill_(float("nan"))
        save = cp.step(step, finite=not broken)
        save.wait_staged(30)
        if save.tiers:
            save.wait_durable(30)
    if "mend" not in sys.argv:
        os.kill(os.getpid(), 9)
print("digest", toy.digest(state))
"""


def test_ten_broken_steps_keep_the_last_intact_one(run_dir: str) -> None:
    """Neither in memory, where the ring is shorter than that, nor on disk; the run continues from the step before
    them."""
    assert killed(run_script(BREAK, run_dir))
    again = run_script(BREAK, run_dir, "mend")
    assert again.stdout.split()[:3] == ["start", "20", "memory"], again.stderr
    assert again.stdout.split()[-1] == toy.reference(30)


def test_broken_step_can_be_restored_by_number(run_dir: str) -> None:
    """It is restored by its number; without one, restore() and load() take the last intact one."""
    weight = nn.Parameter(torch.zeros(4))
    state: dict[str, Any] = {"w": weight, "opt": torch.optim.SGD([weight], lr=1.0)}
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=5)) as cp:
        cp.restore(default=0)
        for step in range(1, 5):
            weight.data.fill_(float(step) if step < 3 else float("nan"))
            save = cp.step(step, finite=torch.isfinite(weight).all())
            assert save is not None
            save.wait_durable(30)
        assert cp.restore() == 2 and torch.equal(weight.detach(), torch.full((4,), 2.0))
        assert cp.restore(step=4) == 4 and weight.isnan().all()
    assert ckpt.load(run_dir, step=4)["w"].isnan().all()
    assert torch.equal(ckpt.load(run_dir)["w"], torch.full((4,), 2.0))


def test_only_broken_steps_prevent_a_default_start(run_dir: str) -> None:
    """A default is for locations without checkpoints; here a person must decide."""
    weight = nn.Parameter(torch.zeros(4))
    state: dict[str, Any] = {"w": weight, "opt": torch.optim.SGD([weight], lr=1.0)}
    for again in (False, True):
        with ckpt.Checkpointer(state, [ckpt.Tier(run_dir, every=1)], memory=None) as cp:
            if again:
                with pytest.raises(ckpt.errors.NoCheckpointError):
                    cp.restore(default=0)
                assert cp.restore(step=1) == 1
            else:
                save = cp.step(1, finite=False)
                assert save is not None
                save.wait_durable(30)


def test_negative_control_an_unmarked_broken_step_is_restored(run_dir: str) -> None:
    """It is `finite` that makes the difference."""
    first = BREAK.replace("finite=not broken", "finite=None")
    assert killed(run_script(first, run_dir))
    assert run_script(first, run_dir, "mend").stdout.split()[:3] == ["start", "30", "memory"]
