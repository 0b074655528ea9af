"""Orders of calls in which an acknowledged step could get lost or torn: none may."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from processes import killed, run_script

LIFE = """
import os, sys, ckpt, torch
from torch import nn
width, kill_at = int(sys.argv[1]), int(sys.argv[2])
w = nn.Parameter(torch.zeros(width))
opt = torch.optim.SGD([w], lr=1.0)
def update():
    w.grad = torch.full_like(w, -1.0)
    opt.step()
with ckpt.Checkpointer({"w": w, "opt": opt}, memory=ckpt.Memory(keep=4), options=ckpt.Options(name="promises")) as cp:
    if "leave" in sys.argv:
        sys.exit(0)
    start = cp.restore(default=0)
    print("start", start, int(w[0]), cp.last_restore.tier, flush=True)
    for step in range(start + 1, kill_at + 1):
        update()
        cp.step(step).wait_staged(30)
    if "back" in sys.argv:
        cp.restore(step=2)
        for step in (3, 4, 5):
            update()
            cp.step(step)
    os.kill(os.getpid(), 9)
"""


def updated(weight: nn.Parameter, optimizer: torch.optim.Optimizer, value: float) -> None:
    weight.grad = weight.detach() - value
    optimizer.step()


@pytest.fixture
def trained() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(20_000_000))  # large enough for a copy to be under way
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_waiting_for_an_older_save_proves_nothing_about_a_newer_one(trained: Any) -> None:
    """`staged()` of the last step, while this one is copied, must not let the optimizer loose on it."""
    weight, optimizer = trained
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, options=ckpt.Options(name="older")) as cp:
        cp.restore(default=0)
        updated(weight, optimizer, 1.0)
        before = cp.save(1)
        for step in range(2, 7):
            updated(weight, optimizer, float(step))
            save = cp.step(step)
            assert save is not None
            before.wait_staged(30)
            updated(weight, optimizer, -1.0)  # immediately
            save.wait_staged(30)
            assert cp.restore(step=step) == step
            assert torch.equal(weight.detach(), torch.full_like(weight, float(step)))
            before = save


def test_a_restored_step_outlives_a_kill_right_after_the_rollback() -> None:
    """The snapshot that a rollback came from is the oldest in the ring, and the last that may be overwritten."""
    assert killed(run_script(LIFE, 8, 5, "back", fail="trainer/stage.claimed:kill:6"))
    assert run_script(LIFE, 8, 0).stdout.split() == ["start", "2", "2", "memory"]


@pytest.mark.parametrize("short_life", [("9", "0"), ("8", "0", "leave")], ids=["mismatch", "exit before restore"])
def test_memory_that_was_not_restored_stays(short_life: tuple[str, ...]) -> None:
    """A job attempt that ends before restoring leaves the memory unchanged for the next one."""
    assert killed(run_script(LIFE, 8, 5))
    assert run_script(LIFE, *short_life).returncode != -signal.SIGKILL
    assert run_script(LIFE, 8, 0).stdout.split() == ["start", "5", "5", "memory"]


def test_a_reading_that_fails_is_not_taken_for_unchanged(run_dir: str) -> None:
    """After a StateError, later steps say so too, instead of saving what there was before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.Checkpointer({"model": model, "opt": optimizer}, ckpt.Tier(run_dir, every=1)) as cp:
        cp.save(1).wait_durable(60)
        model[0] = nn.Linear(4, 4)
        model[1].register_buffer("bad", torch.zeros(1).expand(3))
        for step in (2, 3):
            with pytest.raises(ckpt.errors.StateError, match=r"model.*bad"):
                cp.step(step)
        del model[1].bad
        cp.save(4).wait_durable(60)
    assert torch.equal(ckpt.load(run_dir)["model.0.weight"], model[0].weight.detach())


def test_going_back_while_a_checkpoint_is_written_does_not_fence_us(run_dir: str) -> None:
    """`restore()` directly after `save()`: the checkpoint in progress still belongs to this job."""
    weight = nn.Parameter(torch.zeros(1_000_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, run_dir) as cp:
        cp.restore(default=0)
        updated(weight, optimizer, 1.0)
        cp.save(1).wait_durable(60)
        for step in range(2, 12):
            updated(weight, optimizer, float(step))
            cp.save(step).wait_staged(30)
            assert cp.restore(step=1) == 1
            updated(weight, optimizer, float(step))
            cp.save(step).wait_durable(60)
            cp.restore(step=1)
