"""`pytest -p without --without NAME`: run tests with one wait of the library removed. A test must then fail.

Each function here removes one wait by replacing the waiting code at run time. No source is changed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

WAITS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def wait(remove: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    WAITS[remove.__name__] = remove
    return remove


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", choices=sorted(WAITS))


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    WAITS[config.getoption("without")](patch)


# -- waits of devices --


def _not_queued(patch: pytest.MonkeyPatch, which: Callable[[Any, Any], bool]) -> None:
    """Remove the fence of the filler for which `which(job, events)` returns True."""
    from ckpt.core.snapshot import device
    from ckpt.core.snapshot.fill import SlotFiller

    jobs = threading.local()
    fill, queue_behind = SlotFiller.fill_eager, device.queue_behind

    def fill_eager(self: Any, arena: Any, slot: int, job: Any) -> None:
        jobs.now = job
        fill(self, arena, slot, job)

    def queue(streams: Any, events: Any) -> None:
        if not which(jobs.now, events):
            queue_behind(streams, events)

    patch.setattr(SlotFiller, "fill_eager", fill_eager)
    patch.setattr(device, "queue_behind", queue)


@wait
def copy_behind_the_kernels_of_the_step(patch: pytest.MonkeyPatch) -> None:
    _not_queued(patch, lambda job, events: events is job.ready)


@wait
def caller_behind_the_copy_of_buffers(patch: pytest.MonkeyPatch) -> None:
    _not_queued(patch, lambda job, events: events is job.eager)


@wait
def update_behind_the_copy(patch: pytest.MonkeyPatch) -> None:
    from ckpt.core.snapshot.stage import UpdateGate

    line_up = UpdateGate._line_up
    patch.setattr(UpdateGate, "_line_up", lambda self, job: None if job is self.snapshot else line_up(self, job))


@wait
def other_streams_behind_the_copy(patch: pytest.MonkeyPatch) -> None:
    from ckpt.core.snapshot.stage import UpdateGate

    patch.setattr(UpdateGate, "_line_up_again", lambda self: None)


# `UpdateGate.follow` also queues updates behind an older copy. That has no effect: either the newer copy is behind it
# on its stream, or it has failed, and its waiters wait until the device copies nothing.


# -- waits of the host --


def _set_from_the_beginning(patch: pytest.MonkeyPatch, event: str) -> None:
    from ckpt.core.snapshot.snapshot import NewSnapshot

    begin = NewSnapshot.__init__

    def begun(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        getattr(self, event).set()

    patch.setattr(NewSnapshot, "__init__", begun)


@wait
def update_until_the_copy_is_queued(patch: pytest.MonkeyPatch) -> None:
    _set_from_the_beginning(patch, "enqueued")


@wait
def step_until_the_copy_of_buffers_is_queued(patch: pytest.MonkeyPatch) -> None:
    _set_from_the_beginning(patch, "eager_done")


@wait
def update_until_the_gate_is_open(patch: pytest.MonkeyPatch) -> None:
    from ckpt.core.snapshot.stage import UpdateGate

    wait = UpdateGate.wait

    def without(self: Any, timeout_s: float) -> float:
        self._shut = ()
        return wait(self, timeout_s)

    patch.setattr(UpdateGate, "wait", without)


def _not_waited_for(patch: pytest.MonkeyPatch, which: Callable[[Any, Any], bool], method: str) -> None:
    """Skip `wait_for` in this method of the stager if `which(job, events)` returns True."""
    from ckpt.core.snapshot import stage

    jobs: list[Any] = []
    inside, wait_for = getattr(stage.Stager, method), stage.wait_for

    def noted(self: Any, *arguments: Any) -> None:
        jobs.append(arguments[-1])
        inside(self, *arguments)
        jobs.pop()

    patch.setattr(stage.Stager, method, noted)
    patch.setattr(stage, "wait_for", lambda events: None if jobs and which(jobs[-1], events) else wait_for(events))


@wait
def seal_until_the_copy_has_ended(patch: pytest.MonkeyPatch) -> None:
    _not_waited_for(patch, lambda job, events: events is job.done, "_seal")


@wait
def failure_until_the_copy_has_ended(patch: pytest.MonkeyPatch) -> None:
    from ckpt.core.snapshot.fill import SlotFiller

    patch.setattr(SlotFiller, "settle", lambda self, job: None)


def _not_landed(patch: pytest.MonkeyPatch, caller: str) -> None:
    """Skip the wait for copies in progress in this method of the stager."""
    from ckpt.core.snapshot.stage import Stager

    land = Stager._land

    def without(self: Any, *, wait: bool) -> None:
        if not wait or sys._getframe(1).f_code.co_qualname != f"Stager.{caller}":
            land(self, wait=wait)

    patch.setattr(Stager, "_land", without)


@wait
def other_work_until_copies_have_ended(patch: pytest.MonkeyPatch) -> None:
    _not_landed(patch, "do.<locals>.run")


@wait
def end_until_copies_have_ended(patch: pytest.MonkeyPatch) -> None:
    _not_landed(patch, "_leave")


@wait
def slot_until_copies_have_ended(patch: pytest.MonkeyPatch) -> None:
    _not_landed(patch, "_stage")


# -- references that are kept --


def _borrowed(tensor: Any) -> Any:
    """Return a tensor with the same memory that does not keep it alive."""
    import torch

    if not tensor.is_cuda or not tensor.numel():
        return tensor
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


@wait
def tensors_kept_until_the_copy_has_ended(patch: pytest.MonkeyPatch) -> None:
    """The snapshot and the cached structure of the state keep the tensors."""
    from ckpt.core.state import nodes
    from ckpt.core.state.capture import Structure

    tensors = Structure.tensors
    patch.setattr(nodes, "_storages", lambda tensors: [])

    def without(self: Any, pieces: Any) -> Any:
        self._tensors = list(map(_borrowed, self._tensors))
        return list(map(_borrowed, tensors(self, pieces)))

    patch.setattr(Structure, "tensors", without)


@wait
def samples_kept_until_they_are_fetched(patch: pytest.MonkeyPatch) -> None:
    from ckpt.core.state.fingerprint import Fingerprint

    fetch = Fingerprint.fetch

    def without(self: Any, streams: Any) -> None:
        fetch(self, streams)
        self._held.clear()

    patch.setattr(Fingerprint, "fetch", without)
