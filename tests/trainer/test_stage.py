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
from boundaries import LARGE, Run, adamw, check_boundaries, close, gate, gradients, memory_ready, open_run, read_back
from ckpt.core.snapshot.fill import SlotDigests
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.snapshot.stage import Stager, UpdateGate
from ckpt.core.state.capture import Capture
from ckpt.errors import CheckpointError, SaveError
from processes import eventually
from toy_states import State, differences, freeze

__all__ = ["gate", "open_run"]  # fixtures


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}], ids=str)
def test_snapshot_has_no_later_updates_if_training_continues_immediately(settings: Any, open_run: Any) -> None:
    """The next update right after step() waits for the copy, and every snapshot equals its boundary."""
    run = adamw(**settings)
    cp = open_run(run.state)
    assert check_boundaries(cp, run, 25) == []


def test_negative_control_update_without_wait_tears_snapshots(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, a fused update, which does not change version counters, tears snapshots."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    monkeypatch.setattr(Stager, "before_update", lambda self, timeout_s=0.0: 0.0)
    assert any("optim" in line or "model" in line for line in check_boundaries(cp, run, 25))


def test_version_counters_detect_ordinary_updates(
    open_run: Any, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait, an ordinary update is still detected: the snapshot is dropped, not torn."""
    run = adamw(foreach=False)
    cp = open_run(run.state)
    monkeypatch.setattr(Stager, "before_update", lambda self, timeout_s=0.0: 0.0)
    run.move(run.state, 1)
    gate.clear()
    save = cp.step(1)
    run.move(run.state, 2)
    gate.set()
    with pytest.raises(SaveError, match="changed outside an optimizer step"):
        save.wait_staged(30.0)


def test_each_of_several_optimizers_waits(open_run: Any) -> None:
    """Two optimizers alternate, as in adversarial training: the first to step waits, whichever it is."""

    def build() -> State:
        models = [nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE)]
        return {
            "nets": models,
            "optims": [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models],
        }

    def move(state: State, step: int) -> None:
        for i in [(step + 1) % 2, step % 2][: 1 + (abs(step) % 3 == 0)]:
            gradients(state["nets"][i], abs(step))
            state["optims"][i].step()
            state["optims"][i].zero_grad()

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 20) == []


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


def test_lbfgs_with_many_evaluations_is_exact(open_run: Any) -> None:
    """Updates and evaluations alternate within a step of LBFGS; its state has lists of tensors."""

    def build() -> State:
        model = nn.Linear(600, 600)
        return {"model": model, "optim": torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4, history_size=3)}

    def move(state: State, step: int) -> None:
        x = torch.full((2, 600), abs(step) / 10)

        def closure() -> Tensor:
            state["optim"].zero_grad()
            loss: Tensor = (state["model"](x) - x).pow(2).mean()
            loss.backward()
            return loss

        state["optim"].step(closure)

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 14) == []


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


def test_write_during_copy_is_detected_across_steps(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without an update between them (a scaler skips it), then a manual write: no torn snapshot remains."""
    opened, put = threading.Event(), SlotDigests.put
    opened.set()

    def slow(self: SlotDigests, number: int, target: Any, source: Any, **options: Any) -> None:
        put(self, number, target, source, **options)
        assert opened.wait(30.0)

    monkeypatch.setattr(SlotDigests, "put", slow)
    monkeypatch.setattr(Capture, "trust", lambda self, announced: None)  # else all is copied before step() returns

    def make() -> State:
        model = nn.ParameterList([nn.Parameter(torch.ones(1 << 20)) for _ in range(3)])
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optim": optim, "scaler": torch.amp.GradScaler("cpu")}

    state, twin = make(), make()
    cp = open_run(state)
    cp.step(1).wait_staged(30.0)
    opened.clear()
    saves = [cp.step(2)]
    threading.Timer(0.5, opened.set).start()
    saves.append(cp.step(3))
    with torch.no_grad():
        for p in state["model"]:
            p.add_(1.0)
    for step, save in enumerate(saves, 2):
        with contextlib.suppress(CheckpointError):
            save.wait_staged(30.0)
            read_back(cp, step, twin)
            assert len({p.unique().item() for p in twin["model"]}) == 1


def test_steps_wait_for_a_full_ring(open_run: Any) -> None:
    """Without an optimizer between them, a step waits while the previous one waits for a slot."""
    cp = open_run({"t": torch.zeros(4)}, busy_timeout_s=0.5)
    cp.step(1).wait_staged(30.0)
    arena = cp._run.stager.arena
    for slot in range(arena.slots):
        cp._run.stager.slots.pin(arena, slot)
    with pytest.raises(CheckpointError, match="no slot became free"):
        for step in range(2, 100):
            cp.step(step)
    assert cp._run.step < 6
    for slot in range(arena.slots):
        cp._run.stager.slots.unpin(arena.id, slot)


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


def test_optimizer_without_hooks_is_copied_eagerly(open_run: Any) -> None:
    """As in a captured graph: once detected, its tensors are copied before training continues."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        for p in state["model"].parameters():
            p.data += step  # does not change version counters

    run = Run(build, move)
    gradients(run.state["model"], 1)
    run.state["optim"].step()
    cp = open_run(run.state)
    cp._run.capture.unguard(run.state["optim"])
    reading = cp._run.capture.read()
    assert not any(reading.guarded)
    assert check_boundaries(cp, run, 10) == []


def test_weights_swapped_through_data_stay_out(open_run: Any) -> None:
    """`p.data = other` right after step() changes no counter: the snapshot has the previous memory."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        for p in state["model"].parameters():
            p.data = torch.full_like(p, float(step))

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 15) == []


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


def test_grad_scaler_is_not_affected(open_run: Any) -> None:
    """GradScaler skips steps with infinite gradients: scale, weights and skips equal those of a run without us."""

    def build() -> State:
        model = nn.Linear(16, 16)
        return {
            "model": model,
            "optim": torch.optim.AdamW(model.parameters()),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3),
        }

    def move(state: State, step: int) -> None:
        x = torch.full((2, 16), float(step))
        loss = state["model"](x).pow(2).mean() * (float("inf") if step % 4 == 0 else 1.0)
        state["optim"].zero_grad()
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optim"])
        state["scaler"].update()

    run = Run(build, move)
    torch.manual_seed(0)
    alone = build()
    assert check_boundaries(open_run(run.state), run, 12) == []
    for step in range(1, 13):
        move(alone, step)
        move(alone, -step)
    assert differences(freeze(alone), freeze(run.state)) == []
    assert {int(s["step"]) for s in alone["optim"].state.values()} == {18}  # of 24: six were skipped


def test_layout_changing_every_step_is_exact(open_run: Any) -> None:
    """Parameters and groups are added while snapshots are taken: every staged one is exact."""

    def build(count: int = 1) -> State:
        model = nn.ModuleList([nn.Linear(64, 64) for _ in range(count)])
        optim = torch.optim.AdamW(model[0].parameters())
        for module in list(model)[1:]:
            optim.add_param_group({"params": list(module.parameters())})
        return {"model": model, "optim": optim}

    torch.manual_seed(0)
    state = build()
    cp = open_run(state, on_error="warn")
    staged = 0
    for step in range(1, 13):
        gradients(state["model"], step)
        state["optim"].step()
        boundary = freeze(state)
        save = cp.step(step)
        assert save is not None
        state["model"].append(nn.Linear(64, 64))
        state["optim"].add_param_group({"params": list(state["model"][-1].parameters())})
        try:
            save.wait_staged(30.0)
        except ckpt.errors.SkippedError:
            memory_ready(cp)  # more memory was being allocated
            continue
        staged += 1
        assert differences(read_back(cp, step, build(step)), boundary) == []
    assert staged >= 6


def test_hundred_saves_without_pause_are_exact(open_run: Any) -> None:
    """A ring is reused a hundred times: snapshots are complete, and the oldest ones are replaced in order."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    for step in range(1, 101):
        run.move(run.state, step)
        boundary = freeze(run.state) if step % 10 == 0 else None
        save = cp.step(step)
        assert save is not None
        if step % 10 == 0:
            save.wait_staged(30.0)
            assert differences(read_back(cp, step, run.twin), boundary) == []
    with cp._run.supervisor.held.snapshots() as snapshots:
        steps = [s.checkpoint.step for s in snapshots]
    assert steps == sorted(steps, reverse=True) and steps[0] == 100 and len(steps) >= 2


def test_finished_copy_keeps_no_tensors(open_run: Any) -> None:
    """A finished job keeps no tensor of the state alive."""
    state: State = {"t": torch.zeros(LARGE, LARGE)}
    cp = open_run(state)
    save = cp.step(1)
    assert save is not None
    save.wait_staged(30.0)
    assert cp._saver.last is not None
    assert cp._saver.last.sources == [] == cp._saver.last.overlapped


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
