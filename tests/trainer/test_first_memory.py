"""What becomes of a step whose memory is still being made: nobody waits for that in step(), and nothing due is lost."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.ipc.arena import Arena
from ckpt.core.run.supervise.memory import SnapshotMemory
from ckpt.core.snapshot.slots import Slots
from processes import killed, run_script

WIDTH = 256


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1), "n": torch.zeros(1)}


def train(state: dict[str, Any]) -> None:
    for param in state["model"].parameters():
        param.grad = torch.ones_like(param)
    state["optim"].step()
    state["n"] += 1


def grow(state: dict[str, Any]) -> None:
    state["model"].extend(nn.Linear(WIDTH, WIDTH) for _ in range(20))
    state["optim"].add_param_group({"params": list(state["model"][2:].parameters())})


def weights(state: dict[str, Any]) -> list[torch.Tensor]:
    return [*(param.detach().clone() for param in state["model"].parameters()), state["n"].clone()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Memory is made, but does not come before this is set."""
    come, take = threading.Event(), SnapshotMemory.take_prepared

    def take_when_come(self: SnapshotMemory, timeout_s: float) -> None:
        if come.wait(0.01):
            take(self, timeout_s)

    monkeypatch.setattr(SnapshotMemory, "take_prepared", take_when_come)
    return come


def restored(tiers: Any) -> tuple[int, list[torch.Tensor]]:
    state = build()
    with ckpt.Checkpointer(state, tiers, triggers=None) as cp:
        step = cp.restore()
    return step, weights(state)


def test_a_step_that_is_due_nowhere_is_left_out_and_training_goes_on(
    run_dir: str, slow: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """step() and the update after it return though there is no memory; the handle and one line of the log say so. When
    memory is there the next step is staged."""
    caplog.set_level(logging.INFO, "ckpt")
    state = build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1000), triggers=None) as cp:
        cp.restore(default=0)
        saves = []
        for step in range(1, 4):
            train(state)
            saves.append(cp.step(step))
        train(state)
        assert not slow.is_set()
        for save in saves:
            assert save is not None
            with pytest.raises(ckpt.errors.SkippedError, match="left out"):
                save.wait_staged(30)
        assert caplog.text.count("left out") == 1 and cp.stats.skipped == 3
        slow.set()
        last = cp.step(4)
        assert last is not None and last.wait_staged(30).step == 4
        expected = weights(state)
    step, found = restored(run_dir)
    assert step == 4 and same(found, expected)


def test_a_step_that_is_due_is_staged_when_memory_is_there(run_dir: str, slow: threading.Event) -> None:
    """step() returns without it; the next update waits, and what is committed is the step as it was."""
    state = build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=9), triggers=None) as cp:
        cp.restore(default=0)
        train(state)
        save = cp.step(1)
        expected = weights(state)
        assert save is not None and save.status == "staging" and not slow.is_set()
        state["n"] += 5  # no optimizer's: the step has been cloned by now
        threading.Timer(0.5, slow.set).start()
        train(state)
        assert slow.is_set()  # the update came after it
        assert save.wait_durable(30).step == 1
    found = build()
    with ckpt.Checkpointer(found, run_dir, triggers=None) as cp:
        assert cp.restore(step=1) == 1
    assert same(weights(found), expected)


@pytest.mark.parametrize("every", [1, 1000])
def test_an_exit_right_after_the_first_step_has_it(run_dir: str, slow: threading.Event, every: int) -> None:
    """Due or not: close() waits for the memory, since nothing has moved on."""
    state = build()
    cp = ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=every), triggers=None)
    cp.restore(default=0)
    train(state)
    cp.step(1)
    expected = weights(state)
    threading.Timer(0.3, slow.set).start()
    cp.close()
    step, found = restored(run_dir)
    assert step == 1 and same(found, expected)


def test_a_save_that_is_asked_for_is_never_left_out(run_dir: str, slow: threading.Event) -> None:
    """save() returns at once, and the update waits for its copy."""
    state = build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1000), triggers=None) as cp:
        cp.restore(default=0)
        train(state)
        save = cp.save(1)
        assert save.status == "staging"
        threading.Timer(0.3, slow.set).start()
        train(state)
        assert save.wait_durable(30).step == 1


@pytest.mark.parametrize("due", [True, False])
def test_a_state_that_has_grown(run_dir: str, slow: threading.Event, due: bool) -> None:
    """It needs new memory in the middle of a run: what is due is staged when that is there, what is not is left out,
    and what memory held before is held until then."""
    slow.set()
    state = build()
    tiers = [ckpt.Tier(run_dir, every=1 if due else 1000, keep=9)]
    with ckpt.Checkpointer(state, tiers, triggers=None) as cp:
        cp.restore(default=0)
        train(state)
        save = cp.step(1)
        assert save is not None
        save.wait_staged(30)
        slow.clear()
        grow(state)
        train(state)
        save, expected = cp.step(2), weights(state)
        assert save is not None and save.status == "staging"
        assert cp._staged.newest_step(0.0) == 1
        if due:
            threading.Timer(0.3, slow.set).start()
        train(state)
        if due:
            assert save.wait_durable(30).step == 2
        else:
            with pytest.raises(ckpt.errors.SkippedError, match="left out"):
                save.wait_staged(30)
            slow.set()
            save, expected = cp.step(3), weights(state)
            assert save is not None and save.wait_staged(30).step == 3
    found = build()
    grow(found)
    with ckpt.Checkpointer(found, run_dir, triggers=None) as cp:
        assert cp.restore(step=2 if due else 3) == (2 if due else 3)
    assert same(weights(found), expected)


def arenas_open() -> list[str]:
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(f"{os.readlink(f'/proc/self/fd/{name}')} {os.stat(f'/proc/self/fd/{name}').st_ino}")
    return [link for link in found if link.startswith("/memfd:ckpt-arena")]


@pytest.mark.parametrize("raises", [False, True], ids=["closed", "left by an exception"])
def test_a_state_that_has_just_grown_leaves_no_memory_open(run_dir: str, raises: bool) -> None:
    """Of the arena that was outgrown, too, whose step is still being written: who still has the Checkpointer in his
    hands has no descriptor of its memory."""
    state, before = build(), arenas_open()
    with (
        contextlib.suppress(ZeroDivisionError),
        ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1)) as cp,
    ):
        cp.restore(default=0)
        for step in (1, 2, 3):
            train(state)
            cp.step(step)
        grow(state)
        train(state)
        cp.step(4)
        if raises:
            raise ZeroDivisionError
    assert cp.writer_pid == 0 and set(arenas_open()) <= set(before)  # an earlier test may have left some


def test_slots_that_are_not_ready_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena is handed out with its first slot: no other is offered before its memory is there, and one that it is
    not there for is given up."""
    arena, slots = Arena.create(3, 1 << 20, ready=1), Slots()
    assert (arena.slots, arena.ready, slots.unpinned(arena)) == (3, 1, [0])
    arena.make_ready()
    assert (arena.slots, arena.ready, slots.unpinned(arena)) == (3, 3, [0, 1, 2])
    arena.close()
    arena = Arena.create(3, 1 << 20, ready=1)
    monkeypatch.setattr("ckpt.core.ipc.arena._take", refuse)
    with pytest.raises(MemoryError):
        arena.make_ready()
    assert (arena.slots, arena.ready, slots.unpinned(arena)) == (1, 1, [0])
    arena.close()


def refuse(*_: object) -> None:
    raise MemoryError


KILLED = """
import os, signal, sys, torch, ckpt
weight = torch.nn.Parameter(torch.zeros(1 << 22))
optim = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
with ckpt.Checkpointer({"w": weight, "o": optim}, ckpt.Tier(sys.argv[1], every=1)) as cp:
    cp.restore(default=0)
    weight.grad = torch.full_like(weight, -1.0)
    optim.step()
    save = cp.step(1)
    if sys.argv[2] == "staged":
        save.wait_staged(60)
    print(save.status, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    import time; time.sleep(60)
"""


@pytest.mark.parametrize("when", ["returned", "staged"])
def test_killed_right_after_the_first_step(run_dir: str, when: str) -> None:
    """Promised is what staged() has said: that is there. Before it there is the step or none, and never a torn one."""
    assert killed(run_script(KILLED, run_dir, when, "SIGKILL"))
    weight = nn.Parameter(torch.zeros(1 << 22))
    optim = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    with ckpt.Checkpointer({"w": weight, "o": optim}, ckpt.Tier(run_dir, every=1)) as cp:
        step = cp.restore(default=0)
    assert step == 1 or (step == 0 and when == "returned")
    assert bool((weight == step).all())


def test_terminated_right_after_the_first_step(run_dir: str) -> None:
    """SIGTERM leaves time: the step is there afterwards."""
    run_script(KILLED, run_dir, "returned", "SIGTERM")
    weight = nn.Parameter(torch.zeros(1 << 22))
    optim = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    with ckpt.Checkpointer({"w": weight, "o": optim}, ckpt.Tier(run_dir, every=1)) as cp:
        assert cp.restore(default=0) == 1
    assert bool((weight == 1).all())
