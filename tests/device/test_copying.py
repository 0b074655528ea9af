"""The waits of a snapshot during its copy by the device, deterministic where test_gpu.py depends on chance.

Each test fails if its wait is removed; tests/device/test_waits.py checks that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import ckpt
from ckpt.core.ipc.arena import EMPTY, Arena
from ckpt.core.snapshot import snapshot
from ckpt.core.snapshot.device import PageLocks
from ckpt.core.snapshot.fill import SlotFiller
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.snapshot.stage import Slots
from processes import eventually
from test_gpu import LARGE, LONG, Spins, adamw, buffers, open_run, read_back, ready, spins
from toy_states import differences, freeze

__all__ = ["open_run", "spins"]  # fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def job_of(cp: ckpt.Checkpointer) -> NewSnapshot:
    last = cp._saver.last
    assert last is not None
    return last


def another(cp: ckpt.Checkpointer, step: int) -> NewSnapshot:
    """Return a snapshot of another step that is neither requested nor started."""
    captured, checkpoint = cp._run.capture.read(), replace(job_of(cp).checkpoint, step=step)
    return NewSnapshot(checkpoint=checkpoint, captured=captured, values=b"[]", busy="skip")


@contextlib.contextmanager
def always_ended(job: NewSnapshot) -> Iterator[None]:
    """End the snapshot always, because close() would wait for a lost one."""
    try:
        yield
    finally:
        if not job.ended:
            job.error = ckpt.errors.SaveError("lost")
            job.release()
            job.save._set_failed(job.error)


def slow_thread(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Delay the staging thread in this part of a copy."""
    fill = getattr(SlotFiller, method)

    def late(self: SlotFiller, *slot_and_job: Any) -> None:
        time.sleep(0.2)
        fill(self, *slot_and_job)

    monkeypatch.setattr(SlotFiller, method, late)


def failing(monkeypatch: pytest.MonkeyPatch, target: Any, method: str, error: Callable[[], Exception]) -> None:
    """Make a method raise from now on."""

    def fail(*_: Any) -> None:
        raise error()

    monkeypatch.setattr(target, method, fail)


@contextlib.contextmanager
def noted_labels(monkeypatch: pytest.MonkeyPatch, state: int, check: Callable[[], bool]) -> Iterator[list[bool]]:
    """Record the result of `check` whenever a slot gets this label."""
    found: list[bool] = []
    set_label = Arena.set_label

    def noted(self: Arena, slot: int, label: Any) -> None:
        if label.state == state:
            found.append(check())
        set_label(self, slot, label)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "set_label", noted)
        yield found


def test_an_update_waits_until_its_copy_is_queued(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, no event on the device exists that the update could wait for."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    slow_thread(monkeypatch, "fill_guarded")
    save = cp.step(2)
    run.move(run.state, 3)
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_step_waits_until_the_copy_of_buffers_is_queued(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers too large to be cloned may be overwritten as soon as step() returns."""
    monkeypatch.setattr(snapshot, "MOST", 0)
    run = buffers()
    cp = open_run(run.state)
    boundary = ready(cp, run)
    slow_thread(monkeypatch, "fill_eager")
    save = cp.step(2)
    run.state["model"].mean.fill_(-1.0)
    run.state["mine"]["t"].data.fill_(-1.0)
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_tensors_are_kept_until_their_copy_has_ended(open_run: Any, spins: Spins) -> None:
    """Weights and moments are replaced while the copy is queued: their memory is not reused yet."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    assert job_of(cp).enqueued.wait(60.0)
    assert eventually(lambda: bool(cp._run.stager._flying))  # the staging thread has finished with it too
    for p in run.state["model"].parameters():
        p.data = torch.full_like(p, 7.0)
    run.state["optim"].state.clear()
    filled = [torch.full((LARGE, LARGE), 9.0, device="cuda") for _ in range(4)]
    assert spins.under_way
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    del filled


def test_copy_is_safe_if_the_next_one_fails(open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps run without an update in between, and the second snapshot fails. The update runs after the first copy
    on any stream, and the host does not wait."""
    run = adamw(fused=True)
    cp = open_run(run.state, on_error="warn")
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    assert job_of(cp).enqueued.wait(60.0)
    failing(monkeypatch, Slots, "take", lambda: ckpt.errors.SkippedError("not now"))
    cp._run.stager.submit(another(cp, 3))
    cp._run.stager.before_update()
    assert spins.under_way
    elsewhere = torch.cuda.Stream()
    with torch.cuda.stream(elsewhere):  # of another optimizer
        run.move(run.state, 3)
    assert spins.under_way
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_more_steps_ahead_than_slots_succeed(open_run: Any) -> None:
    """The device is behind by all steps. The staging thread waits for it only if it needs a slot."""
    run = adamw(fused=True)
    cp = open_run(run.state, busy_timeout_s=5.0, close_timeout_s=5.0)
    ready(cp, run)
    slots = cp._run.stager.arena.slots
    torch.cuda._sleep(LONG)
    saves, boundaries = list[ckpt.Save](), list[list[torch.Tensor]]()
    for step in range(2, 3 + slots):
        saves.append(cp.step(step))
        boundaries.append([p.detach().clone() for p in run.state["model"].parameters()])
        run.move(run.state, step + 1)
    for save in saves:
        save.wait_staged(60.0)
    read_back(cp, 2 + slots, run.twin)
    assert all(map(torch.equal, run.twin["model"].parameters(), boundaries[-1]))


def test_snapshot_is_sealed_when_it_is_complete(open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if the staging thread gets other work: it runs after the copy."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    assert job_of(cp).enqueued.wait(60.0)
    assert spins.under_way
    cp._run.stager.do(lambda: None)
    assert not spins.under_way, "it was sealed before it was copied"
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_close_waits_for_copies_in_progress(open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging thread ends after the device. Page-locks are released when no copy is running."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    ready(cp, run)
    unlocked, unlock = list[bool](), PageLocks.release_all

    def noted(self: PageLocks) -> None:
        unlocked.append(not spins.under_way)
        unlock(self)

    monkeypatch.setattr(PageLocks, "release_all", noted)
    spins.overlapped = True
    cp.step(2)
    job = job_of(cp)
    assert job.enqueued.wait(60.0)
    with always_ended(job):
        cp._run.stager.stop()
        assert job.place is not None and job.error is None
        assert unlocked == [True]


def test_slot_is_free_after_a_failed_copy_ends(open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next user of the slot may write to it from the host."""
    run = adamw(fused=True)
    cp = open_run(run.state, on_error="warn")
    ready(cp, run)
    failing(monkeypatch, NewSnapshot, "check_sources", lambda: ckpt.errors.SaveError("half-way"))
    spins.overlapped = True
    with noted_labels(monkeypatch, EMPTY, lambda: not spins.under_way) as ended:
        save = cp.step(2)
        with pytest.raises(ckpt.errors.SaveError, match="half-way"):
            save.wait_staged(60.0)
    assert ended == [True]


def test_an_update_waits_while_the_gate_is_held(open_run: Any) -> None:
    """This happens if another thread saves."""
    run = buffers()
    cp = open_run(run.state)
    ready(cp, run)
    weight = run.state["model"].weight
    before, held, same = weight.detach().cpu(), threading.Event(), list[bool]()

    def hold() -> None:
        with cp._run.stager.gate.held():
            held.set()
            time.sleep(0.3)
            same.append(torch.equal(weight.detach().cpu(), before))

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60.0)
    run.move(run.state, 3)
    thread.join()
    assert same == [True]


def test_compared_samples_are_kept_until_fetched(open_run: Any, spins: Spins) -> None:
    """The elements that detect foreign writes are kept, so their memory is not reused and no snapshot is dropped."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    assert job_of(cp).enqueued.wait(60.0)
    small = [torch.full((n,), 9, dtype=torch.int32, device="cuda") for n in range(1, 9000, 128)]
    assert spins.under_way
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    assert small and differences(freeze(run.state), boundary) == []
