"""A snapshot is of one moment, whatever writes to its tensors; and a complete copy stays.

Writers other than optimizers: code with and without torch's version counters, a fused step that bypasses its hook, and
a graph. Restored values are compared with the boundary, bit for bit.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
import inside
from boundaries import LARGE, Run, adamw, gate, gradients, open_run, read_back
from ckpt.errors import SaveError
from processes import eventually, killed, run_script
from toy_states import State, differences, freeze

__all__ = ["gate", "open_run"]  # fixtures

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def sgd() -> Run:
    """Two layers, so that one may be copied before a write and one after it."""

    def build() -> State:
        model = nn.Sequential(nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE))
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], step)
        state["optim"].step()

    return Run(build, move)


def exchange(state: State) -> None:
    """Exchange weights, as averaging does for an evaluation; torch counts it."""
    state["model"].load_state_dict({name: t * 0.5 + 1.0 for name, t in state["model"].state_dict().items()})


# -- what was whole stays --


def test_a_committed_step_stays_when_weights_are_exchanged_later(run_dir: str) -> None:
    """If weights are exchanged long after the copy, no checkpoint or snapshot is retracted: not at the next update, not
    at the next step, not at a repeated wait."""
    run = sgd()
    with ckpt.Checkpointer(run.state, ckpt.Tier(run_dir, every=1), memory=None) as cp:
        cp.restore(default=0)
        boundaries = {}
        for step in (1, 2, 3):
            run.move(run.state, step)
            boundaries[step] = freeze(run.state)
            save = cp.step(step)
            assert save is not None
            assert eventually(lambda save=save: save.status == "durable")  # without any request
            exchange(run.state)
            run.move(run.state, step)  # the first possible check
            assert (save.wait_durable(1.0).step, save.wait_staged(1.0).step) == (step, step)
            assert differences(read_back(cp, step, run.twin), boundaries[step]) == []
    with ckpt.Checkpointer(run.twin, ckpt.Tier(run_dir, every=1), memory=None) as cp:
        for step in (1, 2, 3):
            assert cp.restore(step=step) == step
            assert differences(freeze(run.twin), boundaries[step]) == []


# -- writes that torch does not count --


def decayed(state: State) -> None:
    for p in state["model"].parameters():
        p.data.mul_(1 - 1e-4)


def clipped(state: State) -> None:
    """Changes the outermost hundredth."""
    for p in state["model"].parameters():
        p.data.clamp_(*p.data.flatten()[:100_000].quantile(torch.tensor([0.005, 0.995])).tolist())


def averaged(state: State) -> None:
    for p in state["model"].parameters():
        p.data.copy_(p.data.roll(1, 0) * 0.5)


def through_numpy(state: State) -> None:
    for p in state["model"].parameters():
        p.detach().numpy()[...] += 1.0


@pytest.mark.parametrize("write", [decayed, clipped, averaged, through_numpy])
def test_uncounted_writes_tear_no_snapshot(write: Any, open_run: Any, gate: threading.Event) -> None:
    """Between step() and the next optimizer, before the rest is copied: that snapshot is dropped, with the names of
    what was written; from then on it is copied before step() returns, and every snapshot is its boundary."""
    run = sgd()
    cp = open_run(run.state, on_error="warn")
    run.move(run.state, 1)
    cp.step(1).wait_staged(30.0)
    run.move(run.state, 2)
    gate.clear()
    save = cp.step(2)
    write(run.state)
    gate.set()
    with pytest.raises(SaveError, match=r"step 2 was dropped: model\.0\.weight"):
        save.wait_staged(30.0)
    for step in range(3, 9):
        run.move(run.state, step)
        boundary = freeze(run.state)
        save = cp.step(step)
        write(run.state)
        save.wait_staged(30.0)
        assert differences(read_back(cp, step, run.twin), boundary) == []


def test_write_after_a_fence_loses_no_step(open_run: Any, gate: threading.Event) -> None:
    """A fence announced before the write waits for the copy: the snapshot is intact, and weights are still copied in
    the background."""
    run = sgd()
    cp = open_run(run.state)
    for step in range(1, 4):
        run.move(run.state, step)
        boundary = freeze(run.state)
        gate.clear()
        save = cp.step(step)
        threading.Timer(0.1, gate.set).start()
        cp.before_untracked_update()
        decayed(run.state)
        save.wait_staged(30.0)
        assert differences(read_back(cp, step, run.twin), boundary) == []
        assert inside.copied_at_once(cp) == set()


def test_weights_that_are_exchanged_and_back_again_while_they_are_copied(
    open_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the copy, neither the weights nor any counter show a change: only the copy itself does."""
    run = sgd()
    cp = open_run(run.state, on_error="warn")
    run.move(run.state, 1)
    cp.step(1).wait_staged(30.0)
    run.move(run.state, 2)
    first, others = run.state["model"][0].weight, list(run.state["model"][1].parameters())

    def meanwhile(source: Tensor) -> None:
        if source.data_ptr() in (first.data_ptr(), others[0].data_ptr()):
            for p in others:
                p.data.neg_()

    inside.after_each_large_copy(monkeypatch, meanwhile)
    save = cp.step(2)
    with pytest.raises(SaveError, match=r"step 2 was dropped: model\.1\.weight"):
        save.wait_staged(30.0)


def test_a_few_elements_by_a_write_that_torch_counts(open_run: Any, gate: threading.Event) -> None:
    """One element, which no fingerprint needs to meet, is noticed by the counter."""
    run = sgd()
    cp = open_run(run.state, on_error="warn")
    run.move(run.state, 1)
    cp.step(1).wait_staged(30.0)
    gate.clear()
    run.move(run.state, 2)
    save = cp.step(2)
    with torch.no_grad():
        run.state["model"][1].weight[321, 123] += 1.0
    gate.set()
    with pytest.raises(SaveError, match=r"step 2 was dropped: model\.1\.weight"):
        save.wait_staged(30.0)


IN_THE_MIDDLE = """
import os, signal, sys, time
import torch, ckpt, inside

model = torch.nn.Linear(1500, 1500, bias=False)
weight, optim = torch.nn.init.zeros_(model.weight), torch.optim.SGD(model.parameters(), lr=1.0)

def move():
    weight.grad = torch.full_like(weight, -1.0)
    optim.step()

cp = ckpt.Checkpointer({"model": model, "optim": optim}, triggers=(), options=ckpt.Options(name="killed"))
cp.restore(default=0)
move()
cp.step(1).wait_staged(30.0)
move()
first = weight.detach().view(-1)

def in_the_middle(streams, beside_training):
    while float(first[0]) == 2.0:
        time.sleep(0.0001)

inside.before_copies(inside.FOREVER, in_the_middle)
save = cp.step(2)
inside.when_staged(save, lambda: os.kill(os.getpid(), signal.SIGKILL))  # if it is not sealed
with torch.no_grad():
    torch._foreach_mul_([weight] * 5000, 1.001)  # is counted when all of it has ended
"""


def test_write_in_progress_when_the_trainer_dies(own_sockets: Path) -> None:
    """The copy ends in the middle of a long write that torch counts at its end, and the process is killed before any
    thread of it looks again: what is found in memory by the next one is a whole step."""
    assert killed(run_script(IN_THE_MIDDLE, fail="trainer/stage.sealed:kill:2"))
    model = nn.Linear(1500, 1500, bias=False)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1.0)}
    with ckpt.Checkpointer(state, triggers=(), options=ckpt.Options(name="killed")) as cp:
        step = cp.restore()
        assert model.weight.unique().tolist() == [step] == [1.0]


# -- optimizers that step without their hook --


def replay(state: State, step: int) -> None:
    """Simulate a replayed graph: no hook runs, no version is counted."""
    gradients(state["model"], step)
    type(state["optim"]).step.__wrapped__(state["optim"])


def test_optimizer_that_bypasses_its_hook_tears_no_snapshot(open_run: Any) -> None:
    """Whose hook has not run since the last step is copied before step() returns: with nothing dropped."""
    run = adamw(fused=True)
    replay(run.state, 1)
    cp = open_run(run.state)
    for step in range(1, 12):
        replay(run.state, step)
        boundary = freeze(run.state)
        save = cp.step(step)
        replay(run.state, step)
        with contextlib.suppress(ckpt.errors.SkippedError):  # the first may come before its memory
            save.wait_staged(30.0)
            assert differences(read_back(cp, step, run.twin), boundary) == []
    assert not any(inside.guarded(cp).values()) and inside.updates_announced(cp) == 0


# -- on a device --


def on_device(**settings: Any) -> Run:
    def build() -> State:
        model = nn.Linear(512, 512, device="cuda")
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), **settings)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], step)
        state["optim"].step()

    return Run(build, move)


@gpu
@pytest.mark.gpu
def test_a_write_past_the_counters_on_a_device(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is held up on its stream, and a kernel that torch does not count comes first."""
    run, late = on_device(fused=True), threading.Event()

    def held(streams: list[Any], beside_training: bool) -> None:
        for stream in streams if late.is_set() else ():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000_000)

    cp = open_run(run.state, on_error="warn")
    run.move(run.state, 1)
    cp.save(1).wait_staged(60.0)
    inside.before_copies(monkeypatch, held)
    run.move(run.state, 2)
    late.set()
    save = cp.step(2)
    run.state["model"].weight.data.mul_(0.5)
    with pytest.raises(SaveError, match=r"step 2 was dropped: model\.weight"):
        save.wait_staged(60.0)
    late.clear()
    for step in (3, 4, 5):
        run.move(run.state, step)
        boundary = freeze(run.state)
        save = cp.step(step)
        run.state["model"].weight.data.mul_(0.5)
        save.wait_staged(60.0)
        assert differences(read_back(cp, step, run.twin), boundary) == []


@gpu
@pytest.mark.gpu
def test_a_graph_that_was_captured_before(open_run: Any) -> None:
    """An optimizer inside a graph of before the Checkpointer was made: no hook ever runs, and nothing is torn."""
    run = on_device(capturable=True)
    state = run.state
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run.move(state, 1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state["optim"].step()
    cp = open_run(state)
    for step in range(1, 9):
        graph.replay()
        boundary = freeze(state)
        save = cp.save(step)
        graph.replay()
        save.wait_staged(60.0)
        assert differences(read_back(cp, step, run.twin), boundary) == []
    assert inside.updates_announced(cp) == 0
