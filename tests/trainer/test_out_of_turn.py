"""Tests of emergency saves next to scheduled ones: neither affects the other."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.ipc.messages import Report
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
        assert eventually(lambda: [one.step for one in cp._run.supervisor.writes._retracts] == [])
        order(cp, 15)
        update(weight, optimizer, 15.0)
        save = cp.step(15)
        assert save is not None and save.tiers
        save.wait_durable(30)
        assert durable(run_dir) == [5, 7, 15]
        assert cp.restore(step=7) == 7 and torch.equal(weight, at_7)


def test_request_save_returns_result(run_dir: str, trained: Any) -> None:
    """The result has the step, its location and times. Before the first step and after close it is empty."""
    weight, optimizer = trained
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, ckpt.Tier(run_dir, every=1000)) as cp:
        cp.restore(default=0)
        early = cp._emergency.request_save("too early", time.monotonic() + 30)
        assert (early.saved, early.staged_s, early.durable_s) == ({}, None, None)
        update(weight, optimizer, 1.0)
        save = cp.step(1)
        assert save is not None
        save.wait_staged(30)
        found = cp._emergency.request_save("in memory already", time.monotonic() + 30)
        assert [(one.step, one.tier, one.error) for one in found.saved["ring"]] == [
            (1, "memory", ""),
            (1, cp._run.tiers[0].url, ""),
        ]
        assert found.staged_s is not None and found.durable_s is not None and found.staged_s <= found.durable_s < 30
        assert durable(run_dir) == [1]
    assert cp._emergency.request_save("too late", time.monotonic() + 1).durable_s is None


def test_newest_finite_step_is_saved_with_newest(run_dir: str, trained: Any) -> None:
    """A preempted machine loses its memory, so a diverged step alone would be useless."""
    weight, optimizer = trained
    tiers = [ckpt.Tier(run_dir, every=1000)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 9):
            update(weight, optimizer, float(step))
            save = cp.step(step, finite=step <= 5)
            assert save is not None
            save.wait_staged(30)
        with cp._run.supervisor.held.holding_still(alone=True) as checkpoints:
            assert [checkpoint.step for checkpoint in checkpoints] == [8, 5]


def test_trainer_that_continues_reports_no_exit(run_dir: str, trained: Any) -> None:
    """A later handler decides to continue: the report states that, to the writer too, without an exit code."""
    weight, optimizer = trained
    told: list[Any] = []
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, run_dir) as cp:
        cp.restore(default=0)
        update(weight, optimizer, 1.0)
        cp.step(1)
        ask = cp._run.supervisor.client.ask
        cp._run.supervisor.client.ask = lambda request, *a: (told.append(request), ask(request, *a))[1]  # type: ignore
        before = signal.getsignal(signal.SIGTERM)
        call = cp._fault_handler._incidents.new("signal", "SIGTERM came", how="test", grace_s=5.0)
        call.signal, call.leave = signal.SIGTERM, 143
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        cp._fault_handler._deal(call)
        signal.signal(signal.SIGTERM, before)
        assert call.leave is None and not cp._fault_handler._incidents.leaving
    (report,) = [one for one in told if isinstance(one, Report)]
    assert report.ends is False and report.fault["exit_code"] is None
