"""Staging without a writer: what is in a slot is what was at the boundary."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import inside
from ckpt.errors import CheckpointError, SaveError
from inside import memory_ready as memory_ready
from toy_states import State, differences, freeze

LARGE = 1500  # a square of this side takes some milliseconds to copy: training has time to interfere


@pytest.fixture
def open_run() -> Iterator[Callable[..., ckpt.Checkpointer]]:
    """A Checkpointer in memory only, closed at the end whatever became of it."""
    with contextlib.ExitStack() as stack:

        def open_run(state: State, *, every: int = 1, **settings: Any) -> ckpt.Checkpointer:
            options = ckpt.Options(name="staging", **settings)
            cp = ckpt.Checkpointer(state, memory=ckpt.Memory(every=every), options=options)
            stack.callback(close, cp)
            cp.restore(default=0)
            memory_ready(cp)
            return cp

        yield open_run


def close(cp: ckpt.Checkpointer) -> None:
    with contextlib.suppress(CheckpointError):
        cp.close()


def read_back(cp: ckpt.Checkpointer, step: int, twin: State) -> Any:
    """The snapshot of a step, taken out of shared memory into another state; frozen."""
    inside.restore_from_memory(cp, step, twin)
    return freeze(twin)


class Run:
    """A state, how to train it by one step, and a twin."""

    def __init__(self, build: Callable[[], State], move: Callable[[State, int], None]) -> None:
        torch.manual_seed(0)
        self.state = build()
        torch.manual_seed(1)
        self.twin = build()
        self.move = move


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay the copy that overlaps training while the gate is cleared, so that the order of events is certain."""
    opened = threading.Event()

    def wait() -> None:
        assert opened.wait(30.0)

    inside.interrupt_at(monkeypatch, inside.COPIED_BESIDE_TRAINING, wait, always=True)
    opened.set()
    return opened


def check_boundaries(cp: ckpt.Checkpointer, run: Run, steps: int, *, first: int = 1) -> list[str]:
    """Save every step and continue training immediately. Return the differences from the boundaries, and the dropped
    steps."""
    found: list[str] = []
    skipped = 0
    for step in range(first, first + steps):
        run.move(run.state, step)
        boundary = freeze(run.state)
        save = cp.step(step)
        run.move(run.state, -step)  # immediately, during the copy
        assert save is not None
        try:
            save.wait_staged(30.0)
        except ckpt.errors.SkippedError:  # more memory, for optimizer state, is on its way
            memory_ready(cp)
            skipped += 1
        except SaveError as error:
            found.append(f"step {step} dropped: {error}")
        else:
            found += [f"step {step}: {d}" for d in differences(read_back(cp, step, run.twin), boundary)]
    assert skipped < steps / 2
    return found


def gradients(model: nn.Module, seed: int) -> None:
    """Set new gradients from the seed without a forward pass, so that the update follows immediately."""
    for i, p in enumerate(model.parameters()):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.fill_((seed % 7) + i + 1.0)


def adamw(**settings: Any) -> Run:
    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, **settings)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)
