"""Tests of emergency saves next to scheduled ones: neither affects the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.log.run_log import RunLog
from ckpt.store import open_store
from processes import eventually


def durable(run: str) -> list[int]:
    async def look() -> list[int]:
        log = RunLog(open_store(run))
        await log.open()
        await log.store.aclose()
        return sorted(commit.step for commit in log.state.commits.values())

    return asyncio.run(look())


def update(weight: nn.Parameter, optimizer: torch.optim.Optimizer, value: float) -> None:
    weight.grad = weight.detach() - value
    optimizer.step()


@pytest.fixture
def trained() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(1000))
    return weight, torch.optim.SGD([weight], lr=1.0)


def order(cp: ckpt.Checkpointer, step: int) -> None:
    """Order the save of a step, as another rank would."""
    cp._run.orders.post("save", step, {"why": "test", "grace_s": 30.0, "tries": 1})


def test_an_order_for_a_passed_step_uses_memory(run_dir: str, trained: Any) -> None:
    """Memory has step 7, but no longer step 6, which fails. Step 5 was saved before, and stays."""
    weight, optimizer = trained
    tiers = [ckpt.Tier(run_dir, every=1000, keep=9)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 15):
            update(weight, optimizer, float(step))
            cp.step(step)
            if step == 5:
                cp.save().wait_durable(30)
            if step == 7:
                order(cp, 7)
                assert eventually(lambda: durable(run_dir) == [5, 7])
                at_7 = weight.detach().clone()
        order(cp, 5)
        order(cp, 6)
        assert eventually(lambda: not cp._run.supervisor.writes._retracts)
        order(cp, 15)
        update(weight, optimizer, 15.0)
        save = cp.step(15)
        assert save is not None and save.tiers
        save.wait_durable(30)
        assert durable(run_dir) == [5, 7, 15]
        assert cp.restore(step=7) == 7 and torch.equal(weight, at_7)
