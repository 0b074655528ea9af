"""For a step that memory was not scheduled to have, either exactly that step is saved, or nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
import toy
from boundaries import memory_ready
from processes import run_script
from test_promise_ends import restored

STEPS = 25


def rare(run: str) -> dict[str, Any]:
    return {"tiers": ckpt.Tier(run, every=1000), "memory": ckpt.Memory(every=10)}


def train(cp: ckpt.Checkpointer, state: dict[str, Any], steps: int = STEPS) -> None:
    for step in range(cp.restore(default=0), steps):
        toy.train_step(state)
        memory_ready(cp)
        cp.step(step + 1)


def halve(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for param in state["model"].parameters():
            param.mul_(0.5)


# -- save() of a step that was not due --


@pytest.mark.parametrize("call", [ckpt.Checkpointer.save, ckpt.Checkpointer.stage])
def test_a_step_that_was_not_due_is_saved_on_request(run_dir: str, call: Callable[[ckpt.Checkpointer], Any]) -> None:
    """Right after its step(). What is staged so survives an exception as well."""
    state = toy.build()
    with contextlib.suppress(ValueError), ckpt.Checkpointer(state, **rare(run_dir)) as cp:
        train(cp, state)
        call(cp)
        raise ValueError("enough")
    assert restored(run_dir) == (STEPS, toy.reference(STEPS))


def test_a_step_whose_weights_are_exchanged_cannot_be_saved(run_dir: str) -> None:
    """save() raises, whatever the interval, and the run keeps its earlier steps."""
    state = toy.build()
    with contextlib.suppress(ValueError), ckpt.Checkpointer(state, **rare(run_dir)) as cp:
        train(cp, state)
        with cp.not_training(changes_state=True):
            halve(state)
            with pytest.raises(ckpt.errors.UsageError, match=r"step 25 can no longer be saved.*right after step"):
                cp.save()
            raise ValueError("enough")
    assert restored(run_dir) == (20, toy.reference(20))


def test_going_back_to_a_step_that_is_on_its_way(run_dir: str) -> None:
    """restore(step=) waits until it is saved, even if it has left one memory."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=5), memory=ckpt.Memory(keep=2)) as cp:
        for step in range(cp.restore(default=0), 40):
            toy.train_step(state)
            cp.step(step + 1)
            if step % 10 == 9:
                assert cp.restore(step=step - 4) == step - 4
                assert toy.digest(state) == toy.reference(step - 4)
                assert cp.restore(step=step - 4) == step - 4
                while (back := inside.current_step(cp)) is not None and back < step + 1:
                    toy.train_step(state)
                    cp.step(back + 1)


# -- memory alone --

ALONE = """
import sys, os, signal, torch, toy, ckpt
name, every, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
state = toy.build()
cp = ckpt.Checkpointer(state, memory=ckpt.Memory(every=every, linger_s=60), options=ckpt.Options(name=name))
def train():
    for step in range(cp.restore(default=0), 25):
        toy.train_step(state)
        save = cp.step(step + 1)
        if save is not None:
            save.wait_staged(60)
    if how.endswith("raise"): raise ValueError("enough")
    if how.endswith("interrupt"): raise KeyboardInterrupt
    if how.endswith("exit"): sys.exit(75)
if how.startswith("with "):
    with cp: train()
elif how.startswith("finally "):
    try: train()
    finally: cp.close()
else:
    train()
"""
AGAIN = """
import sys, toy, ckpt
state = toy.build(seed=1)
with ckpt.Checkpointer(state, options=ckpt.Options(name=sys.argv[1])) as cp:
    step = cp.restore(default=-1)
    print("FOUND", step, step == -1 or toy.digest(state) == toy.reference(step))
"""


@pytest.mark.parametrize(
    ("every", "how"), [(10, "with interrupt"), (10, "finally raise"), (10, "end"), (1, "with raise"), (1, "with exit")]
)
def test_memory_alone_outlives_what_is_no_clean_end(every: int, how: str, own_sockets: Path) -> None:
    """Exceptions, Ctrl-C, an exit code, and a script that never closes: a restart finds the last step that memory was
    scheduled to have, bit for bit."""
    run_script(ALONE, "alone", str(every), how)
    assert run_script(AGAIN, "alone").stdout.split() == ["FOUND", "25" if every == 1 else "20", "True"]


def test_a_clean_end_lets_go_of_memory_alone(own_sockets: Path) -> None:
    """The memory is no longer needed; the next run of that name starts at 0."""
    run_script(ALONE, "alone", "1", "with end")
    assert run_script(AGAIN, "alone").stdout.split()[:2] == ["FOUND", "-1"]


# -- other threads, other processes --


def test_closing_while_another_thread_trains(tmp_path: Path) -> None:
    """close() of a watchdog at any moment: what it keeps is a boundary, and no step() hangs."""
    for trial in range(3):
        state, place, boundaries = toy.build(), str(tmp_path / str(trial)), dict[int, str]()
        cp = ckpt.Checkpointer(state, **rare(place))
        cp.restore(default=0)
        closed = threading.Event()

        def close(cp: ckpt.Checkpointer = cp, wait_s: float = 0.05 + 0.03 * trial, closed: Any = closed) -> None:
            time.sleep(wait_s)
            with contextlib.suppress(ckpt.CheckpointError):
                cp.close()
            closed.set()

        thread = threading.Thread(target=close)
        thread.start()
        step = 0
        with contextlib.suppress(ckpt.errors.ClosedError):
            while True:
                toy.train_step(state)
                step += 1
                boundaries[step] = toy.digest(state)
                cp.step(step)
        while not closed.is_set():
            toy.train_step(state)
        thread.join()
        found = toy.build(seed=1)
        with ckpt.Checkpointer(found, place, triggers=None) as again:
            back = again.restore(default=0)
        assert back == 0 or toy.digest(found) == boundaries[back]


# -- writes outside of step() --


def test_a_dropped_step_is_not_saved_as_it_is_now(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Averaged weights came while the snapshot was copied: it was dropped, and save() does not take them for it."""
    model = torch.nn.Linear(3000, 3000)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    boundaries: dict[int, torch.Tensor] = {}
    with ckpt.Checkpointer({"model": model, "optim": optim}, ckpt.Tier(run_dir)) as cp:
        cp.restore(default=0)
        for step in range(1, 5):
            model.weight.grad = torch.ones_like(model.weight)
            optim.step()
            boundaries[step] = model.weight.detach().clone()
            cp.step(step)
            with torch.no_grad():
                model.weight.mul_(0.5)  # the copy may contain some of it
            with contextlib.suppress(ckpt.CheckpointError):
                cp.save().wait_durable(60)
            with torch.no_grad():
                model.weight.copy_(boundaries[step])
    with contextlib.suppress(ckpt.errors.NoCheckpointError):
        found = ckpt.load(run_dir)
        assert torch.equal(found["model.weight"], boundaries[found.step])


def test_stage_is_of_the_step_that_was_named(run_dir: str) -> None:
    """After a further update it is refused, as save() is."""
    state = toy.build()
    with ckpt.Checkpointer(state, **rare(run_dir)) as cp:
        train(cp, state, 3)
        toy.train_step(state)
        for call in (cp.stage, cp.save):
            with pytest.raises(ckpt.errors.UsageError, match="training went on"):
                call()
        cp.save(4)  # a run in which no step was saved ends with an error


def test_what_was_said_of_a_step_is_of_that_step_alone(run_dir: str) -> None:
    """Back from one that had gone wrong, the older one is saved with other settings: a restart finds those."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1)) as cp:
        train(cp, state, 4)
        toy.train_step(state)
        cp.step(5, finite=False)
        assert cp.restore(step=4) == 4
        state["optim"].param_groups[0]["weight_decay"] = 0.5
        cp.save().wait_durable(60)
    again = toy.build(seed=1)
    with ckpt.Checkpointer(again, run_dir, triggers=None) as cp:
        assert cp.restore() == 4 and again["optim"].param_groups[0]["weight_decay"] == 0.5


def test_a_pause_within_a_pause_gives_nothing_free(run_dir: str) -> None:
    """An evaluation inside of an exchange of weights ends before the exchange does."""
    state = toy.build()
    with ckpt.Checkpointer(state, **rare(run_dir)) as cp:
        train(cp, state)
        with cp.not_training(changes_state=True):
            with cp.not_training():
                halve(state)
            with pytest.raises(ckpt.errors.UsageError, match="are replaced"):
                cp.save()


# -- steps that the user calls broken --


def broken(cp: ckpt.Checkpointer, state: dict[str, Any], step: int) -> None:
    toy.train_step(state)
    save = cp.step(step, finite=False)
    assert save is not None and save.wait_staged(30)


def test_what_was_said_of_a_refused_step_is_not_said_of_another(run_dir: str) -> None:
    """A batch is skipped, and `step()` rejected: the last finished step is still intact."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1000), memory=ckpt.Memory(every=50)) as cp:
        train(cp, state, 9)
        state["model"](torch.randn(8, toy.WIDTH)).sum().backward()
        with pytest.raises(ckpt.errors.UsageError, match="no optimizer has stepped"):
            cp.step(10, finite=False)
        for param in state["model"].parameters():
            param.grad = None
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, run_dir) as cp:
        assert cp.restore(default=0) == 9


def test_two_slots_and_broken_steps_hold_nobody_up(own_sockets: Path) -> None:
    """The newest slot is broken, the other one is the newest intact one: the next step replaces the broken one."""
    state = toy.build()
    with ckpt.Checkpointer(state, options=ckpt.Options(name="two", busy_timeout_s=20)) as cp:
        cp.restore(default=0)
        toy.train_step(state)
        done = cp.step(1)
        assert done is not None and done.wait_staged(30)
        inside.give_up_slots(cp)
        began = time.monotonic()
        for step in range(2, 8):
            broken(cp, state, step)
        assert time.monotonic() - began < 15
        assert inside.finite_in_memory(cp) == {None, False}
