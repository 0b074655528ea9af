"""A snapshot is the step boundary and nothing later, whatever training does while it is copied.

Every test here reads the snapshot back out of shared memory into a twin, and compares all of it, bit for bit, with a
copy that was made at the boundary by other means.
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
    """The next update comes right after step(): it waits for the copy, and every snapshot is its boundary."""
    run = adamw(**settings)
    cp = open_run(run.state)
    assert check_boundaries(cp, run, 25) == []


def test_negative_control_without_waiting_the_update_leaks_in(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wait taken out, a fused update, which leaves no trace in version counters, tears snapshots."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    monkeypatch.setattr(Stager, "before_update", lambda self, timeout_s=0.0: 0.0)
    assert any("optim" in line or "model" in line for line in check_boundaries(cp, run, 25))


def test_version_counters_are_a_second_guard(
    open_run: Any, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait, an ordinary update is still noticed: the snapshot is dropped, not torn."""
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


def test_several_optimizers_wait_each(open_run: Any) -> None:
    """Two optimizers take turns, as in adversarial training: the first to step waits, whichever it is."""

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


def test_an_optimizer_that_is_not_in_the_state_waits_too(open_run: Any) -> None:
    """The hook is on all optimizers: one that nobody listed may step the same parameters."""
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
    """With a closure the pre-step hook comes before forward: the copy overlaps that, and the update waits."""

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


def test_lbfgs_evaluates_its_closure_many_times(open_run: Any) -> None:
    """Updates and evaluations alternate inside one step of LBFGS; its state holds lists of tensors."""

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


def test_an_optimizer_that_changes_weights_before_its_closure_is_found_out(
    open_run: Any, gate: threading.Event
) -> None:
    """Sharpness-aware steps climb first and evaluate then: such snapshots are dropped, later ones copied eagerly."""

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


def test_buffers_of_the_next_forward_stay_out(open_run: Any) -> None:
    """BatchNorm's means, in-place plain tensors and arrays change right after step(): they were copied before."""

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
    """The staging thread does nothing until this is set."""
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


def test_a_step_waits_for_no_thread_if_little_may_change(open_run: Any) -> None:
    """What may change before the next update is taken by step() itself, so later writes stay out, whenever the rest
    is copied; and step() returns while the staging thread is busy with something else."""
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


def test_negative_control_without_the_clone_later_writes_leak_in(
    open_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the clone that keeps them out."""
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


def test_a_write_into_a_copy_under_way_is_noticed_over_several_steps(
    open_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without an update between them (a scaler skips it), then a write by hand: no torn snapshot is left."""
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


def test_steps_do_not_pile_up_behind_a_full_ring(open_run: Any) -> None:
    """Without an optimizer between them, a step that finds the one before still waiting for a slot waits itself."""
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
        state["model"].weight.mul_(0.5)  # weight clipping, say, in the middle of the copy


def test_a_write_that_the_copy_overtakes_is_noticed_too(open_run: Any) -> None:
    """A version is counted up after the write: a copy that ends meanwhile must not pass for a whole one. One that had
    ended before is whole."""

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
        for later in (step + 100, step + 200):  # what was seen is copied before it returns from now on
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


def test_writes_outside_an_optimizer_are_noticed_then_copied_eagerly(
    open_run: Any, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The snapshot is dropped and the user told which tensor it was; from then on the copy comes before training."""

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


def test_an_optimizer_whose_steps_run_no_hooks_is_copied_eagerly(open_run: Any) -> None:
    """As inside a captured graph: once that is known, its tensors are copied before training goes on."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        for p in state["model"].parameters():
            p.data += step  # leaves no trace in version counters

    run = Run(build, move)
    gradients(run.state["model"], 1)
    run.state["optim"].step()
    cp = open_run(run.state)
    cp._run.capture.unguard(run.state["optim"])
    reading = cp._run.capture.read()
    assert not any(reading.guarded)
    assert check_boundaries(cp, run, 10) == []


def test_weights_swapped_through_data_are_not_seen(open_run: Any) -> None:
    """`p.data = other` right after step(), which no counter shows: the snapshot holds the memory that was there."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        for p in state["model"].parameters():
            p.data = torch.full_like(p, float(step))

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 15) == []


def test_tensors_deleted_while_they_are_copied(open_run: Any) -> None:
    """The user may drop or replace anything after step(): the copy holds on to what it reads, then lets go of it."""

    def build() -> State:
        model = nn.ModuleList([nn.Linear(LARGE, LARGE)])
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optim": optim, "extra": {"t": torch.randn(LARGE, LARGE)}}

    def move(state: State, step: int) -> None:
        state["optim"].state.clear()
        del state["model"][0].weight
        del state["extra"]["t"]
        gc.collect()
        torch.full((LARGE, LARGE), 7.0)  # takes the memory, if it was given back
        state["model"][0].weight = nn.Parameter(torch.full((LARGE, LARGE), float(step)))
        state["extra"]["t"] = torch.full((LARGE, LARGE), float(step))
        state["optim"].param_groups[0]["params"] = list(state["model"].parameters())

    run = Run(build, move)
    move(run.twin, 0)  # the order of names is as in the state from the first move on
    assert check_boundaries(open_run(run.state), run, 4) == []


def test_a_scaler_is_not_disturbed(open_run: Any) -> None:
    """GradScaler skips steps with infinite gradients; scale, weights and skipping are as in a run without us."""

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


def test_a_layout_that_changes_every_step(open_run: Any) -> None:
    """Parameters added and groups growing while snapshots are taken: whatever is staged is exact."""

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
            memory_ready(cp)  # for more was on its way
            continue
        staged += 1
        assert differences(read_back(cp, step, build(step)), boundary) == []
    assert staged >= 6


def test_a_hundred_saves_without_pause(open_run: Any) -> None:
    """A ring, reused a hundred times without pause: snapshots are whole, and older ones give way in order."""
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
    assert steps == sorted(steps, reverse=True) and steps[0] == 100 and len(steps) >= 3


def test_nothing_is_held_after_the_copy(open_run: Any) -> None:
    """A job that is done keeps no tensor of the state alive."""
    state: State = {"t": torch.zeros(LARGE, LARGE)}
    cp = open_run(state)
    save = cp.step(1)
    assert save is not None
    save.wait_staged(30.0)
    assert cp._saver.last is not None
    assert cp._saver.last.sources == [] == cp._saver.last.overlapped


def test_interrupt_at_the_moment_of_sealing_loses_no_step(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends step() right after its snapshot was sealed: the snapshot stays, and close() writes it."""
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
