"""Writers that die at an awkward moment: while memory is adopted, or while a trainer leaves; and saves that training
could overtake."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import inside
import toy
from ckpt.errors import DeadlineError, UsageError
from processes import killed, run_script
from test_promise_ends import restored

# Trains three steps a life; `sys.argv[2]` is code that runs before.
LIFE = """
import os, signal, sys, time, torch, ckpt, inside
name, before, steps, end = sys.argv[1:]
state = {"w": torch.zeros(1 << 12)}

def other_writer(old):
    while inside.writer_named("memory:" + name) in (None, old):
        time.sleep(0.01)
    time.sleep(0.5)

exec(before)
cp = ckpt.Checkpointer(state, triggers=None, options=ckpt.Options(name=name, busy_timeout_s=20))
start = cp.restore(default=0)
print("start", start, int(state["w"][0]), flush=True)
for step in range(start + 1, start + 1 + int(steps)):
    state["w"].fill_(step)
    cp.step(step).wait_staged(30)
exec(end)
os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_WHILE_IT_IS_ADOPTED = """
def late():
    old = inside.writer_named("memory:" + name)
    os.kill(old, signal.SIGKILL)
    other_writer(old)
inside.interrupt_at(inside.FOREVER, inside.MEMORY_IS_ADOPTED, late)
"""

KILLED_BEFORE_IT_HAS_OPENED = "inside.kill_first_writer_before_it_opens()"


@pytest.mark.parametrize("when", [KILLED_WHILE_IT_IS_ADOPTED, KILLED_BEFORE_IT_HAS_OPENED], ids=["adopted", "opened"])
def test_a_writer_that_dies_while_its_memory_is_taken_over(own_sockets: Path, when: str) -> None:
    """The next writer gets what the first trainer left: nothing of it is lost, and later steps are held."""
    assert run_script(LIFE, "adopted", "", 3, "").stdout.split() == ["start", "0", "0"]
    second = run_script(LIFE, "adopted", when, 3, "")
    assert killed(second) and second.stdout.split() == ["start", "3", "3"], second.stderr
    assert run_script(LIFE, "adopted", "", 0, "").stdout.split() == ["start", "6", "6"]


LEAVING = """
try:
    with cp:
        os.kill(cp.writer_pid, signal.SIGKILL)
        raise ValueError
except ValueError:
    pass
"""
ENDS = {"with": LEAVING, "exit": "os.kill(cp.writer_pid, signal.SIGKILL); sys.exit(3)"}


@pytest.mark.parametrize("how", ENDS)
def test_leaving_while_the_writer_is_dead(own_sockets: Path, how: str) -> None:
    """A script ends by an error right after its writer has died: it waits until the next one has the memory."""
    run_script(LIFE, "leaving", "", 5, ENDS[how])
    assert run_script(LIFE, "leaving", "", 0, "").stdout.split() == ["start", "5", "5"]


# -- saves by another thread --


def large() -> dict[str, Any]:
    params = [nn.Parameter(torch.zeros(2 << 20)) for _ in range(4)]
    return {"m": nn.ParameterList(params), "opt": torch.optim.SGD(params, lr=1.0), "meta": {"n": 0}}


def train(state: dict[str, Any]) -> None:
    for param in state["m"]:
        param.grad = torch.full_like(param, -1.0)
    state["opt"].step()
    state["meta"]["n"] += 1


@pytest.mark.parametrize("call", [ckpt.Checkpointer.save, ckpt.Checkpointer.stage])
def test_training_does_not_overtake_a_save_of_another_thread(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[ckpt.Checkpointer], ckpt.Save]
) -> None:
    """Its memory takes a while: the next update waits, or the save is refused; what is
    saved is of one step."""
    state, asked = large(), threading.Event()

    def slow() -> None:
        asked.set()
        time.sleep(0.5)

    tiers = [ckpt.Tier(run_dir, every=1000)]
    with ckpt.Checkpointer(state, tiers, triggers=None, memory=ckpt.Memory(every=1000)) as cp:
        cp.restore(default=0)
        for step in range(1, 4):
            train(state)
            cp.step(step)
        inside.interrupt_at(monkeypatch, inside.MEMORY_IS_PREPARED, slow, always=True)
        thread = threading.Thread(target=call, args=(cp,))
        thread.start()
        assert asked.wait(30)
        train(state)
        thread.join()
    found = large()
    with ckpt.Checkpointer(found, run_dir, triggers=None) as cp:
        assert cp.restore() == found["meta"]["n"]
    assert all(bool((param == found["meta"]["n"]).all()) for param in found["m"])


@pytest.mark.parametrize("timeout_s", [0.0, 0.001])
def test_closing_with_too_little_time_says_so(run_dir: str, timeout_s: float) -> None:
    """By DeadlineError; what was begun is finished by the writer, and the last step is there."""
    state = toy.build()
    cp = ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=100), triggers=None, memory=ckpt.Memory(every=100))
    for step in range(cp.restore(default=0), 3):
        toy.train_step(state)
        cp.step(step + 1)
    with pytest.raises(DeadlineError):
        cp.close(timeout_s)
    assert restored(run_dir) == (3, toy.reference(3))


def test_a_child_may_open_the_run_when_its_trainer_has_gone(run_dir: str) -> None:
    """Inherited resources belong to its parent; the name of the run is free for the child's own Checkpointer."""
    with ckpt.Checkpointer(toy.build(), run_dir, triggers=None) as cp:
        cp.restore(default=0)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                ckpt.Checkpointer(toy.build(), run_dir, triggers=None)
            except UsageError as error:
                os.write(writing, str(error).encode())
            except ckpt.CheckpointError as error:
                os.write(writing, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 1000) == b"InUseError"
