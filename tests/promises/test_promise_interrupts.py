"""Ctrl-C, or a signal handler that closes or saves, at any line of `step()`: acknowledged steps stay, and stored data
is right.

Python runs signal handlers between any two lines of the main thread. So a trace of one `step()` counts its lines within
the library, and interrupts it at one of them. The tested lines depend on the seed; `make test-long` tests all of them.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside

LIBRARY = str(Path(ckpt.__file__).parent)
HOWS = ("ctrl-c", "handler", "saves")
TRIES = 2  # of each way in CI; `long` has every line
PATIENCE_S = 15.0  # no call may take that long
ALL = 100_000

Bits = list[torch.Tensor]


def build(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return {"model": model, "optim": torch.optim.Adam(model.parameters(), lr=0.1)}


def train_step(state: dict[str, Any]) -> Bits:
    """Train one more step, and return the state."""
    state["optim"].zero_grad()
    torch.nn.functional.mse_loss(state["model"](torch.randn(8, 4)), torch.ones(8, 4)).backward()
    state["optim"].step()
    return bits(state)


def bits(state: dict[str, Any]) -> Bits:
    moments = [one for values in state["optim"].state.values() for one in values.values()]
    return [tensor.detach().clone() for tensor in (*state["model"].state_dict().values(), *moments)]


def same(one: Bits, other: Bits) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Interruption:
    """Calls `act` at one line of the library that this thread comes to; counts them all."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.lines, self.where = at, act, 0, ""

    def __enter__(self) -> Interruption:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _line(self, frame: Any, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                self.act()
        return self._line


def interrupted(run: str, at: int, how: str, step: int) -> int:
    """Train to a step whose `step()` is interrupted at that line, and a few more if that does not end it; then restore.
    How many lines it had."""
    state, seen, acknowledged = build(0), dict[int, Bits](), 0
    tiers = [ckpt.Tier(run, every=4)]
    cp = ckpt.Checkpointer(state, tiers, triggers=None, options=ckpt.Options(on_error="warn", close_timeout_s=60))
    cp.restore(default=0)

    def act() -> None:
        if how == "handler":
            cp.close()
        elif how == "saves":
            with contextlib.suppress(ckpt.errors.UsageError):  # before the first step
                cp.save()
        else:
            raise KeyboardInterrupt

    interruption = Interruption(at, act)
    began = time.monotonic()
    try:
        for n in range(1, step + 3):
            seen[n] = train_step(state)
            save: ckpt.Save | None = None
            try:
                if n == step:
                    with interruption:
                        save = cp.step(n)
                else:
                    save = cp.step(n)
            except KeyboardInterrupt:
                pass
            if save is not None:
                save.wait_staged(PATIENCE_S)
                acknowledged = n
        acknowledged = cp.save().wait_durable(PATIENCE_S).step
    except ckpt.errors.ClosedError:
        acknowledged = max(acknowledged, step - 1)  # the first lines come before this step
    cp.close()
    about = f"{how} at line {at} of step({step}), {interruption.where}"
    assert time.monotonic() - began < PATIENCE_S, about
    twin = build(1)
    with ckpt.Checkpointer(twin, run, triggers=None) as cp:
        found = cp.restore(default=0)
    assert found >= acknowledged and same(bits(twin), seen[found]), f"{about}: {found} of {acknowledged}"
    return interruption.lines


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("step", [1, 3, 4])
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_interrupted_anywhere(step: int, everywhere: bool, tmp_path: Path, one_thread: None) -> None:
    """At the first step, with an unknown layout; at a step for memory alone; at one for the folder too."""
    lines = range(1, interrupted(str(tmp_path / "whole"), ALL, "ctrl-c", step))
    for how in HOWS:
        for at in lines if everywhere else sorted(random.Random(f"{how} {step}").sample(lines, TRIES)):
            interrupted(str(tmp_path / f"{how}{at}"), at, how, step)


def test_negative_control_one_wrong_bit_is_seen(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a restored state differed from the saved one, the comparison would fail."""
    restore = ckpt.Checkpointer.restore

    def wrong(cp: ckpt.Checkpointer, *a: Any, **k: Any) -> Any:
        step = restore(cp, *a, **k)
        if step:
            inside.state_of(cp)["model"][0].weight.data.view(torch.int32)[0, 0] ^= 1
        return step

    monkeypatch.setattr(ckpt.Checkpointer, "restore", wrong)
    with pytest.raises(AssertionError):
        interrupted(str(tmp_path / "run"), ALL, "ctrl-c", 1)
