"""Tests that a snapshot is exactly the step boundary, whatever training does while it is copied.

Every test here reads the snapshot from shared memory into a twin, and compares all of it, bit for bit, with a copy
made at the boundary by other means.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
import inside
from boundaries import LARGE, Run, adamw, check_boundaries, close, gate, gradients, open_run, read_back
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.snapshot.stage import Stager, UpdateGate
from ckpt.errors import SaveError
from processes import eventually
from toy_states import State, differences, freeze

__all__ = ["gate", "open_run"]  # fixtures


def test_snapshot_has_no_later_updates_if_training_continues_immediately(open_run: Any) -> None:
    """The next update right after step() waits for the copy, and every snapshot equals its boundary."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    assert check_boundaries(cp, run, 25) == []


def test_negative_control_update_without_wait_tears_snapshots(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, a fused update, which does not change version counters, tears snapshots."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    monkeypatch.setattr(Stager, "before_update", lambda self, timeout_s=0.0: 0.0)
    assert any("optim" in line or "model" in line for line in check_boundaries(cp, run, 25))


def test_optimizer_outside_of_the_state_waits(open_run: Any) -> None:
    """The hook is on all optimizers, since an unlisted one may step the same parameters."""
    hidden: dict[int, torch.optim.Optimizer] = {}

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        hidden[id(model)] = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.0)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        hidden[id(state["model"])].step()

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 15) == []


@pytest.mark.parametrize("place", ["argument", "keyword"])
def test_closures_run_before_the_wait_and_updates_after_it(place: str, open_run: Any) -> None:
    """With a closure, the pre-step hook runs before forward: the copy overlaps with it, and the update waits."""

    def build() -> State:
        model = nn.Sequential(nn.Linear(LARGE, LARGE), nn.BatchNorm1d(LARGE))
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def move(state: State, step: int) -> None:
        def closure() -> Tensor:
            state["model"][1].running_mean += 1  # buffers change in forward
            gradients(state["model"], abs(step))
            return torch.zeros(())

        state["optim"].step(closure) if place == "argument" else state["optim"].step(closure=closure)

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 15) == []


def test_weights_changed_before_closure_are_detected(open_run: Any, gate: threading.Event) -> None:
    """Sharpness-aware steps change weights before the loss: such snapshots are dropped, later ones copied eagerly."""

    class Climbing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(1.0)
            return super().step(closure)

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": Climbing(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        def closure() -> Tensor:
            gate.set()
            gradients(state["model"], abs(step))
            return torch.zeros(())

        state["optim"].step(closure)

    run = Run(build, move)
    cp = open_run(run.state)
    move(run.state, 1)
    gate.clear()
    save = cp.step(1)
    move(run.state, 2)
    with pytest.raises(SaveError, match=r"model\.weight"):
        save.wait_staged(30.0)
    assert check_boundaries(cp, run, 12, first=2) == []


def test_buffer_changes_after_step_stay_out(open_run: Any) -> None:
    """BatchNorm means, plain tensors and arrays that change right after step() were copied before."""

    def build() -> State:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model.register_buffer("large", torch.zeros(LARGE, LARGE))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optim": optim, "mine": {"t": torch.zeros(LARGE, 64), "a": torch.zeros(3).numpy()}}

    def move(state: State, step: int) -> None:
        loss = state["model"](torch.full((4, 8), float(step)) + torch.arange(4)[:, None]).sum()
        state["model"].large += step
        state["mine"]["t"].add_(step)
        state["mine"]["a"] += step
        state["optim"].zero_grad()
        loss.backward()
        state["optim"].step()

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 15) == []


def busy(cp: ckpt.Checkpointer) -> threading.Event:
    """Block the staging thread until the returned event is set."""
    opened = threading.Event()
    cp._run.stager._worker.put(lambda: opened.wait(30.0))
    return opened


def small_buffers() -> State:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optim": optim,
        "mine": {"t": torch.arange(12.0).view(3, 4).t(), "a": torch.zeros(3).numpy()},
    }


def test_step_with_few_eager_bytes_does_not_wait(open_run: Any) -> None:
    """step() itself copies the few tensors that may change before the next update, so later writes stay out.
    It returns while the staging thread is busy."""
    state, twin = small_buffers(), small_buffers()
    cp = open_run(state)
    cp.step(1).wait_staged(30.0)
    wanted = freeze(state)
    opened = busy(cp)
    save = cp.step(2)  # would hang here if it waited
    state["model"][1].running_mean += 5
    state["mine"]["t"].mul_(3)
    state["mine"]["a"] += 1
    opened.set()
    save.wait_staged(30.0)
    assert read_back(cp, 2, twin) == wanted


def test_negative_control_writes_leak_without_clone(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the clone keeps later writes out."""
    monkeypatch.setattr(NewSnapshot, "clone_early", lambda self, files: True)
    state, twin = small_buffers(), small_buffers()
    cp = open_run(state)
    cp.step(1).wait_staged(30.0)
    wanted = freeze(state)
    opened = busy(cp)
    save = cp.step(2)
    state["model"][1].running_mean += 5
    opened.set()
    save.wait_staged(30.0)
    assert read_back(cp, 2, twin) != wanted


def write(state: State, step: int) -> None:
    with torch.no_grad():
        state["model"].weight.mul_(0.5)  # for example weight clipping during the copy


def test_write_at_end_of_copy_is_detected(open_run: Any) -> None:
    """The version changes after the write: a copy that ends in between must not count as complete. A copy that ended
    earlier is complete."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    run = Run(build, move)
    for step in range(1, 9):
        cp = open_run(run.state)
        move(run.state, step)
        boundary = freeze(run.state)
        save = cp.step(step)
        with torch.no_grad():
            torch._foreach_mul_(list(run.state["model"].parameters()), 0.5)
        try:
            save.wait_staged(30.0)
        except SaveError as error:
            assert "model.weight" in str(error)
        else:
            assert differences(read_back(cp, step, run.twin), boundary) == []
        for later in (step + 100, step + 200):  # a detected tensor is copied before step() returns from now on
            move(run.state, step)
            save = cp.save(later)
            boundary = freeze(run.state)
            with torch.no_grad():
                torch._foreach_mul_(list(run.state["model"].parameters()), 0.5)
            with contextlib.suppress(SaveError):  # the other tensor of the two may have been the next
                save.wait_staged(30.0)
                break
        save.wait_staged(30.0)
        assert differences(read_back(cp, later, run.twin), boundary) == []
        close(cp)


def test_write_outside_optimizer_makes_copies_eager(
    open_run: Any, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The snapshot is dropped with a warning that names the tensor; later copies come before training continues."""

    def build() -> State:
        model, average = nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE).requires_grad_(False)
        return {"model": model, "average": average, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        write(state, step)
        gradients(state["model"], abs(step))
        state["optim"].step()

    run = Run(build, move)
    cp = open_run(run.state)
    move(run.state, 1)
    gate.clear()
    save = cp.step(1)
    write(run.state, 2)
    gate.set()
    with pytest.raises(SaveError, match=r"model\.weight"):
        save.wait_staged(30.0)
    assert check_boundaries(cp, run, 15, first=2) == []
    assert caplog.text.count("was dropped") == 1 and "model.weight" in caplog.text


def test_tensors_deleted_during_copy_are_exact(open_run: Any) -> None:
    """Users may drop or replace tensors after step(): the copy keeps its sources alive until it ends."""

    def build() -> State:
        model = nn.ModuleList([nn.Linear(LARGE, LARGE)])
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optim": optim, "extra": {"t": torch.randn(LARGE, LARGE)}}

    def move(state: State, step: int) -> None:
        state["optim"].state.clear()
        del state["model"][0].weight
        del state["extra"]["t"]
        gc.collect()
        torch.full((LARGE, LARGE), 7.0)  # takes the memory, if it was freed
        state["model"][0].weight = nn.Parameter(torch.full((LARGE, LARGE), float(step)))
        state["extra"]["t"] = torch.full((LARGE, LARGE), float(step))
        state["optim"].param_groups[0]["params"] = list(state["model"].parameters())

    run = Run(build, move)
    move(run.twin, 0)  # the names are in the order of the state from the first move on
    assert check_boundaries(open_run(run.state), run, 4) == []


def test_interrupt_after_sealing_loses_no_step(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends step() right after its snapshot was sealed: it stays, and close() writes it."""
    state: State = {"t": torch.zeros(LARGE, LARGE)}  # too large to be cloned, so that step() waits
    cp = ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1000), triggers=None)
    cp.restore(default=0)
    sealed = threading.Event()

    def at(name: str) -> None:
        if name == "stage.sealed":
            sealed.set()
            assert eventually(lambda: cp._saver.last is not None and cp._saver.last.error is not None)

    def interrupted(*_: object) -> bool:
        assert sealed.wait(30.0)
        raise KeyboardInterrupt

    inside.at_points_of_staging(at)
    monkeypatch.setattr(UpdateGate, "wait_for", interrupted)
    state["t"] += 7
    try:
        with pytest.raises(KeyboardInterrupt):
            cp.step(1)
    finally:
        inside.disarm()
        monkeypatch.undo()
    cp.close()
    found: State = {"t": torch.zeros(LARGE, LARGE)}
    assert ckpt.load(run_dir).step == 1
    with ckpt.Checkpointer(found, run_dir, triggers=None) as cp:
        assert cp.restore() == 1
    assert bool((found["t"] == 7).all())
