"""Saves out of turn beside those of the cadence: neither takes anything from the other."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.ipc.watch_requests import Report
from ckpt.runlog.log import RunLog
from ckpt.store import open_store
from ckpt.trainer.step_keeper import KEEP_TRIES
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


def test_what_was_saved_on_purpose_is_not_given_up(run_dir: str, trained: Any) -> None:
    """A round for a step that this rank has passed is given up, unless the step went to disk in another way."""
    weight, optimizer = trained
    tiers = [ckpt.Memory(), ckpt.Tier(run_dir, every=1000, keep=9)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 8):
            update(weight, optimizer, float(step))
            cp.step(step)
            if step == 5:
                cp.save().committed(30)
        assert not cp._fault_handler.securer.set_step(5) and not cp._fault_handler.securer.set_step(6)
        cp.save().committed(30)
        assert durable(run_dir) == [5, 7]


def test_close_makes_durable_what_was_copied_out_of_turn(run_dir: str, trained: Any) -> None:
    """The newest step that is in memory, and not the last one that was due there."""
    weight, optimizer = trained
    tiers = [ckpt.Memory(every=10, between=True), ckpt.Tier(run_dir, every=1000)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 16):
            update(weight, optimizer, float(step))
            save = cp.step(step)
            if save is not None:
                save.staged(30)
        assert cp._live.copy_live() == 15
    assert durable(run_dir) == [15]
    assert torch.equal(ckpt.load(run_dir)["w"], torch.full((1000,), 15.0))


def test_a_copy_is_not_made_once_an_optimizer_has_begun(run_dir: str, trained: Any) -> None:
    """Also if it changed only a part of the state, and raised."""
    weight, optimizer = trained
    tiers = [ckpt.Memory(every=10, between=True), ckpt.Tier(run_dir, every=1000)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 16):
            update(weight, optimizer, float(step))
            cp.step(step)
        update(weight, optimizer, 16.0)
        assert cp._live.copy_live() is None


class Slow:
    """A part of the state that takes its time to be read."""

    pause_s = 0.0

    def state_dict(self) -> dict[str, int]:
        time.sleep(self.pause_s)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(("times", "kept"), [(1, True), (KEEP_TRIES, False)], ids=["once", "always"])
def test_a_step_that_was_held_up_does_not_end_what_is_kept_between(
    run_dir: str, trained: Any, times: int, kept: bool
) -> None:
    """Steps that are not due can be copied at a fault, by a thread that is not the training's, although it once took
    long to read the state: only if it goes on taking long it is too dear."""
    weight, optimizer = trained
    slow = Slow()
    tiers = [ckpt.Memory(every=ckpt.Auto(budget=0.9)), ckpt.Tier(run_dir, every=10_000)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer, "slow": slow}, tiers, triggers=[ckpt.on_hang()]) as cp:
        cp.restore(default=0)
        step = 0

        def train(count: int, pause_s: float = 0.0) -> None:
            """So many steps that are not due, in which reading takes so long, and those that are due between them."""
            nonlocal step
            while count:
                step += 1
                update(weight, optimizer, float(step))
                time.sleep(0.05)
                due = cp._session.cadence.schedule.memory_due(step)
                slow.pause_s, count = 0.0 if due else pause_s, count - (not due)
                cp.step(step)

        train(15)  # too few for the cadence to be changed
        assert eventually(lambda: cp._session.heartbeat.usual_s > 0), "the writer has not learnt the pace"
        train(times, pause_s=0.5)
        train(3)
        with ThreadPoolExecutor(1) as other:
            found = other.submit(cp._live.copy_live).result()
        assert found == (step if kept else None)


def test_the_newest_sound_step_is_made_durable_beside_the_newest(run_dir: str, trained: Any) -> None:
    """A preempted machine takes its memory along: a broken step alone would be no use."""
    weight, optimizer = trained
    tiers = [ckpt.Memory(), ckpt.Tier(run_dir, every=1000)]
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 9):
            update(weight, optimizer, float(step))
            save = cp.step(step, finite=step <= 5)
            assert save is not None
            save.staged(30)
        with cp._session.supervisor.held.holding_still(alone=True) as attempts:
            assert [attempt.step for attempt in attempts] == [8, 5]


def test_who_stays_after_all_has_not_announced_its_end(run_dir: str, trained: Any) -> None:
    """A handler that came later decides to go on: the account says so, to the writer too, and no exit code is in it."""
    weight, optimizer = trained
    told: list[Any] = []
    with ckpt.Checkpointer({"w": weight, "opt": optimizer}, run_dir) as cp:
        cp.restore(default=0)
        update(weight, optimizer, 1.0)
        cp.step(1)
        ask = cp._session.supervisor.client.ask
        cp._session.supervisor.client.ask = lambda request, *a: (told.append(request), ask(request, *a))[1]  # type: ignore
        before = signal.getsignal(signal.SIGTERM)
        call = cp._fault_handler._incidents.new("signal", "SIGTERM came", how="test", grace_s=5.0)
        call.signal, call.leave = signal.SIGTERM, 143
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        cp._fault_handler._deal(call)
        signal.signal(signal.SIGTERM, before)
        assert call.leave is None and not cp._fault_handler._incidents.leaving
    (report,) = [one for one in told if isinstance(one, Report)]
    assert report.ends is False and report.fault["exit_code"] is None
