"""Tests that a save waits for its memory, at the first step and after the state has grown, and no step is lost."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import arena as arena_module
from ckpt.core.ipc.arena import SEALED, Arena, Label
from ckpt.core.run import saver
from ckpt.core.run.memory import NextArena
from ckpt.core.snapshot.stage import Slots
from processes import eventually, run_script

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
    """Delay new memory until the returned event is set."""
    come, wait = threading.Event(), NextArena.wait

    def wait_until_set(self: NextArena, timeout_s: float) -> Any:
        return wait(self, timeout_s) if come.wait(0.01) else None

    monkeypatch.setattr(NextArena, "wait", wait_until_set)
    return come


def restored(tiers: Any, step: int | None = None, *, grown: bool = False) -> tuple[int, list[torch.Tensor]]:
    state = build()
    if grown:
        grow(state)
    with ckpt.Checkpointer(state, tiers, triggers=None) as cp:
        found = cp.restore(step=step)
    return found, weights(state)


@pytest.mark.parametrize("every", [1, 1000])
def test_first_step_waits_for_its_memory(run_dir: str, slow: threading.Event, every: int) -> None:
    """It waits whether or not a tier has scheduled the step. The saved step is the one for which step() was called."""
    state = build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=every, keep=9), triggers=None) as cp:
        cp.restore(default=0)
        train(state)
        expected = weights(state)
        threading.Timer(0.5, slow.set).start()
        save = cp.step(1)
        assert slow.is_set() and save is not None
        train(state)
        assert save.wait_staged(30).step == 1 and cp.stats.skipped == 0
        if every == 1:
            assert save.wait_durable(30).step == 1
        else:
            cp.step(2)
            expected = weights(state)
    last = 1 if every == 1 else 2
    step, found = restored(run_dir, last)
    assert step == last and same(found, expected)


@pytest.mark.parametrize("due", [True, False])
def test_grown_state_waits_for_new_memory(run_dir: str, slow: threading.Event, due: bool) -> None:
    """The old memory keeps its snapshots until then."""
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
        held = list[int | None]()
        threading.Timer(0.3, lambda: (held.append(cp._saver.newest_step(0.0)), slow.set())).start()
        save, expected = cp.step(2), weights(state)
        assert save is not None and held == [1]
        train(state)
        assert save.wait_staged(30).step == 2
        if due:
            assert save.wait_durable(30).step == 2
        else:
            cp.step(3)
            expected = weights(state)
    step, found = restored(run_dir, 2 if due else 3, grown=True)
    assert step == (2 if due else 3) and same(found, expected)


def test_close_in_a_signal_handler_ends_the_wait_for_memory(run_dir: str, slow: threading.Event) -> None:
    """The handler interrupts step(), and its close() saves that step. step() then raises ClosedError."""
    state = build()
    cp = ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1), triggers=None)
    cp.restore(default=0)
    train(state)

    def close(*_: object) -> None:
        slow.set()
        cp.close()

    before = signal.signal(signal.SIGUSR1, close)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(ckpt.errors.ClosedError):
            cp.step(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    step, found = restored(run_dir)
    assert step == 1 and same(found, weights(state))


def test_missing_memory_fails_the_step_in_time(run_dir: str, slow: threading.Event) -> None:
    state = build()
    tiers = ckpt.Tier(run_dir, every=1)
    with ckpt.Checkpointer(state, tiers, triggers=None, options=ckpt.Options(busy_timeout_s=0.5)) as cp:
        cp.restore(default=0)
        train(state)
        with pytest.raises(ckpt.errors.DeadlineError, match="step 1 was not saved: no memory became free in time"):
            cp.step(1)
        slow.set()
        train(state)
        save = cp.step(2)
        assert save is not None and save.wait_durable(30).step == 2


def test_long_wait_for_memory_is_explained(
    run_dir: str, slow: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "ckpt")
    monkeypatch.setattr(saver, "WARN_S", 0.1)
    state = build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1), triggers=None) as cp:
        cp.restore(default=0)
        train(state)
        threading.Timer(0.5, slow.set).start()
        cp.step(1)
    assert caplog.text.count("has not allocated the memory yet") == 1


def arenas_open() -> list[str]:
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(f"{os.readlink(f'/proc/self/fd/{name}')} {os.stat(f'/proc/self/fd/{name}').st_ino}")
    return [link for link in found if link.startswith("/memfd:ckpt-arena")]


@pytest.mark.parametrize("raises", [False, True], ids=["closed", "left by an exception"])
def test_grown_state_leaves_no_memory_open(run_dir: str, raises: bool) -> None:
    """After close, no descriptor of an arena stays open, even of an outgrown one whose step is being written."""
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


TERMINATED = """
import os, signal, sys, torch, ckpt
weight = torch.nn.Parameter(torch.zeros(1 << 22))
optim = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
with ckpt.Checkpointer({"w": weight, "o": optim}, ckpt.Tier(sys.argv[1], every=1)) as cp:
    cp.restore(default=0)
    weight.grad = torch.full_like(weight, -1.0)
    optim.step()
    cp.step(1)
    os.kill(os.getpid(), signal.SIGTERM)
    import time; time.sleep(60)
"""


def test_sigterm_right_after_first_step_saves_it(run_dir: str) -> None:
    run_script(TERMINATED, run_dir)
    weight = nn.Parameter(torch.zeros(1 << 22))
    optim = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    with ckpt.Checkpointer({"w": weight, "o": optim}, ckpt.Tier(run_dir, every=1)) as cp:
        assert cp.restore(default=0) == 1
    assert bool((weight == 1).all())


def slots_during_a_write(run_dir: str, *, reads: bool = True) -> list[int]:
    """Save four steps while a tier reads the snapshot of step 1. Return the number of slots after each step."""
    state, found = {"w": torch.zeros(1000)}, list[int]()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1000), options=ckpt.Options(on_busy="skip")) as cp:
        cp.restore(default=0)
        for step in range(1, 5):
            state["w"] += 1
            save = cp.step(step)
            assert save is not None
            save.wait_staged(60)
            stager = cp._run.stager
            arena = stager.arena
            assert arena is not None
            assert eventually(lambda slots=stager.slots: not slots.adding)
            ((slot, label),) = arena.sealed()[:1]
            assert label.checkpoint is not None and label.checkpoint.step == step
            if step == 1 and reads:
                stager.slots.pin(arena, slot)
                read = slot
            found.append(arena.slots)
        if reads:
            assert arena.label(read).checkpoint.step == 1  # type: ignore[union-attr]  # it was never overwritten
            stager.slots.unpin(arena.id, read)
        cp.restore()
    assert float(state["w"][0]) == 4.0
    return found


def test_memory_has_two_slots_without_slow_writes(run_dir: str) -> None:
    assert slots_during_a_write(run_dir, reads=False) == [2, 2, 2, 2]


def test_memory_adds_one_slot_during_a_slow_write(run_dir: str) -> None:
    """Every step is held although a tier reads a slot all the time."""
    assert slots_during_a_write(run_dir) == [2, 3, 3, 3]


def test_steps_are_skipped_if_no_further_slot_fits(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without memory for another slot, the step after the next one cannot be held."""
    monkeypatch.setattr(arena_module, "FREE_SHARE", 0.0)
    with pytest.raises(ckpt.errors.SkippedError, match="still being written"):
        slots_during_a_write(run_dir)


def test_newest_two_snapshots_stay_while_a_slot_is_added() -> None:
    """Another rank may be a step behind, so that the job continues from the second newest step."""
    arena, slots = Arena.create(3, 1 << 16, most=4), Slots()
    slots.keep = 3
    for slot in range(3):
        arena.set_label(slot, Label(SEALED, slot + 1, CheckpointId(1, slot + 1, "ab")))
    slots.pin(arena, 0)  # a tier reads the oldest
    assert slots.free(arena, ()) == 1  # no memory for another slot: the step is not skipped
    slots.adding = True
    assert slots.free(arena, ()) is None
    arena.add_slot()
    slots.end_adding()
    assert slots.free(arena, ()) == 3
    arena.close()


def test_kill_while_a_slot_is_added_leaves_the_arena_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies after half of the memory: the next one finds the slots before, and adds the slot again."""
    arena, taken = Arena.create(2, 3 * arena_module._PIECE, most=3), list[int]()
    take = arena_module._take

    def dies(fd: int, memory: Any, start: int, length: int) -> None:
        if len(taken) == 1:
            raise KeyboardInterrupt
        taken.append(start)
        take(fd, memory, start, length)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(arena_module, "_take", dies)
        arena.add_slot()
    after = Arena.attach(os.dup(arena.fd))
    assert (after.slots, after.ready) == (2, 2)
    after.add_slot()
    assert (arena.slots, arena.ready) == (3, 3) and arena.label(2) == Label(0)
    after.close()
    arena.close()


@pytest.mark.parametrize("first", ["made", "added"])
def test_slot_that_becomes_ready_during_the_check_is_used(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot becomes ready right after the check found none. The step checks again, because nothing wakes it."""
    arena = Arena.create(2, 1 << 16, ready=1) if first == "made" else Arena.create(1, 1 << 16, most=2)
    arena.set_label(0, Label(SEALED, 1, CheckpointId(1, 1, "ab")))
    slots, checks, free = Slots(), list[int | None](), Slots.free
    slots.pin(arena, 0)
    slots.adding = first == "added"

    def late(*arguments: Any) -> int | None:
        checks.append(free(*arguments))
        if len(checks) == 1:
            if first == "made":
                arena.make_ready()
            else:
                arena.add_slot()
                slots.adding = False
        return checks[-1]

    monkeypatch.setattr(Slots, "free", late)
    layout = SimpleNamespace(arrangement=SimpleNamespace(data_size=8))
    snapshot: Any = SimpleNamespace(
        captured=SimpleNamespace(layout=layout),
        values=b"",
        busy="skip",
        deadline=float("inf"),
        checkpoint=CheckpointId(1, 2, "ab"),
    )
    assert slots.take(arena, (), snapshot) == 1 and checks == [None, 1]
    arena.close()
