"""What a snapshot waits for while a device copies it, and who waits for it: what test_gpu.py leaves to chance.

Each of these is red if the wait that it is about is taken out; tests/device/test_waits.py does that.
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
    """A snapshot that nobody has asked for, of a further step; not begun."""
    reading, checkpoint = cp._run.capture.read(), replace(job_of(cp).checkpoint, step=step)
    return NewSnapshot(checkpoint=checkpoint, reading=reading, values=b"[]", busy="skip")


@contextlib.contextmanager
def ended_anyway(job: NewSnapshot) -> Iterator[None]:
    """Whatever is wrong: who closes would wait for a snapshot that was lost."""
    try:
        yield
    finally:
        if not job.ended:
            job.error = ckpt.errors.SaveError("lost")
            job.release()
            job.save._set_failed(job.error)


def slow_thread(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The staging thread comes late to this part of a copy."""
    fill = getattr(SlotFiller, method)

    def late(self: SlotFiller, *slot_and_job: Any) -> None:
        time.sleep(0.2)
        fill(self, *slot_and_job)

    monkeypatch.setattr(SlotFiller, method, late)


def failing(monkeypatch: pytest.MonkeyPatch, target: Any, method: str, error: Callable[[], Exception]) -> None:
    """Fail there from now on."""

    def fail(*_: Any) -> None:
        raise error()

    monkeypatch.setattr(target, method, fail)


@contextlib.contextmanager
def noted_labels(monkeypatch: pytest.MonkeyPatch, state: int, look: Callable[[], bool]) -> Iterator[list[bool]]:
    """What `look` says whenever a slot gets this label."""
    found: list[bool] = []
    set_label = Arena.set_label

    def noted(self: Arena, slot: int, label: Any) -> None:
        if label.state == state:
            found.append(look())
        set_label(self, slot, label)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "set_label", noted)
        yield found


def test_an_update_waits_until_its_copy_is_queued(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then there is an event on the device that it can be put behind."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    slow_thread(monkeypatch, "fill_guarded")
    save = cp.step(2)
    run.move(run.state, 3)
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_step_waits_until_the_copy_of_buffers_is_queued(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may overwrite them as soon as it returns, where they are too much to be cloned."""
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
    """Weights and moments are replaced when all is queued and nothing is copied: nobody gets their memory yet."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    assert job_of(cp).enqueued.wait(60.0)
    assert eventually(lambda: bool(cp._run.stager._flying))  # the staging thread is done with it, too
    for p in run.state["model"].parameters():
        p.data = torch.full_like(p, 7.0)
    run.state["optim"].state.clear()
    filled = [torch.full((LARGE, LARGE), 9.0, device="cuda") for _ in range(4)]
    assert spins.under_way
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    del filled


def test_a_copy_is_safe_though_the_next_one_fails(open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps without an update between, and the second is not taken: the update comes after the first one's copy,
    on whichever stream, and the host waits for nothing."""
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
    with torch.cuda.stream(elsewhere):  # another optimizer's
        run.move(run.state, 3)
    assert spins.under_way
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_as_many_steps_ahead_as_there_are_slots_and_more(open_run: Any) -> None:
    """The device is behind by all of them: the staging thread waits for it when it needs a slot, not for itself."""
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


def test_a_snapshot_is_sealed_when_it_is_whole(open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the staging thread is given something else to do, such as to use other memory: that comes behind."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    assert job_of(cp).enqueued.wait(60.0)
    assert spins.under_way
    cp._run.stager.do(lambda: None)
    assert not spins.under_way, "it was said to be sealed before it was copied"
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_what_is_on_its_way_when_it_is_closed_arrives(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging thread ends behind the device. Page-locks are given up when nothing is copied there any more."""
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
    with ended_anyway(job):
        cp._run.stager.stop()
        assert job.place is not None and job.error is None
        assert unlocked == [True]


def test_a_slot_is_free_after_a_failure_when_nothing_is_copied_into_it(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets it next may write there from the host."""
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
    """As for the save of another thread."""
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


def test_what_is_compared_with_the_copy_is_kept_until_then(open_run: Any, spins: Spins) -> None:
    """The elements that tell whether somebody else has written: other tensors do not get their memory, so no snapshot
    is dropped for nothing."""
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
