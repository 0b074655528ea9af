"""What an optimizer waits for before it changes anything: copies under way, and whoever needs the state as it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.core.ipc.process import Process
from ckpt.core.snapshot import device
from ckpt.core.snapshot.device import is_capturing
from ckpt.core.snapshot.snapshot import PendingSnapshot
from ckpt.errors import DeadlineError, UsageError
from ckpt.events import log

WARN_S = 5.0  # how long training may wait for a copy before a warning explains it


class UpdateGate:
    """Of one trainer. Jobs come in turn, from the thread that trains; any thread may shut the gate.

    writer_pid: process id of the writer, which hands out the memory that a copy may wait for; 0 if it is unknown.
    """

    def __init__(self) -> None:
        self.writer_pid = 0
        self.job: PendingSnapshot | None = None  # the newest that no optimizer has come after
        self._unchecked: list[PendingSnapshot] = []  # older ones, not sealed yet
        self._copying: PendingSnapshot | None = None  # still read by a device: every stream that updates waits for it
        self._shut: tuple[threading.Event, ...] = ()  # not set while something is copied that no optimizer may change
        self._shutting = threading.RLock()  # a signal handler may come in

    def follow(self, before: PendingSnapshot) -> None:
        """All of this job is queued at least, since the one after it was staged: jobs are done in turn."""
        self._line_up(before)
        self._unchecked = [one for one in (*self._unchecked, before) if not one.ended]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No optimizer changes anything meanwhile, but for one that has begun before and has been counted."""
        opened = threading.Event()
        with self._shutting:
            self._shut = (*(one for one in self._shut if not one.is_set()), opened)
        try:
            yield
        finally:
            opened.set()

    def wait(self, timeout_s: float) -> float:
        """Before an optimizer changes anything; the seconds that took. A copy that does not end in time costs the
        snapshot, never the training."""
        self._line_up_again()
        job, shut = self.job, self._shut
        if job is None and all(one.is_set() for one in shut):
            return 0.0
        started = time.perf_counter()
        for opened in shut:
            self.wait_for(opened, "an optimizer", timeout_s)
        job = self.job
        if job is None:
            return time.perf_counter() - started
        if job.leave_out():
            in_time = True
        elif job.streams:
            in_time = self.wait_for(job.enqueued, "an optimizer", timeout_s)
            self._line_up(job)
        else:
            in_time = self.wait_for(job.copied, "an optimizer", timeout_s)
        if not in_time:
            job.error = DeadlineError(f"copying step {job.attempt.step} took more than {timeout_s:g} s")
        for one in (*self._unchecked, job):
            if not one.ended:  # by a device, which has not come so far; what is counted from now on is the update
                one.check_versions()
        self.job, self._unchecked = None, []
        return time.perf_counter() - started

    def wait_for(self, event: threading.Event, waiter: str, timeout_s: float | None = None) -> bool:
        """Wait for an event in the training thread. Log one warning after 5 s that names the cause.

        waiter: what waits, for the message
        Returns False if the event did not happen within `timeout_s`.
        """
        first = WARN_S if timeout_s is None else min(WARN_S, timeout_s)
        if event.wait(first):
            return True
        rest = None if timeout_s is None else timeout_s - first
        if rest is None or rest > 0:
            self._warn(waiter)
        return event.wait(rest)

    def _warn(self, waiter: str) -> None:
        writer = Process.of(self.writer_pid)
        if self.writer_pid and writer.suspended:
            cause = (
                f"the writer process {writer.pid} is stopped. Training goes on when that process continues "
                f"(kill -CONT {writer.pid}) or ends"
            )
        else:
            cause = f"the writer process {writer.pid} has not made the memory yet, or the machine is busy"
        log.warning("%s has waited %g s for the copy of a step: %s", waiter, WARN_S, cause)

    def _line_up(self, job: PendingSnapshot) -> None:
        """What the caller queues from now on, on its current streams, comes after the copies of this job."""
        device.queue_caller_behind(job.done)
        if job.done:  # one that was not taken leaves what is copied before it
            self._copying = job

    def _line_up_again(self) -> None:
        """Another optimizer may step on another stream."""
        job = self._copying
        if job is not None and job.copied.is_set():
            self._copying = None
        elif job is not None:
            self._line_up(job)


class UpdateHook:
    """Calls `before()` ahead of the first change that an optimizer makes to what is saved; counts the steps of these.
    `concerns` says of an optimizer of this process whether it is one of them.

    An optimizer that is given a closure runs forward and backward inside its step, so `before` is called when the
    closure first returns. A step inside a graph that is being captured runs no hooks when it is replayed later:
    `on_captured` is told which optimizer that is.
    """

    def __init__(
        self, before: Callable[[], None], on_captured: Callable[[object], None], concerns: Callable[[Any], bool]
    ) -> None:
        self.count = 0
        self._announced: dict[int, object] = {}
        self._before, self._on_captured, self._concerns = before, on_captured, concerns
        self._handle = register_optimizer_step_pre_hook(_untraced(self._hook))
        self._active = True

    def remove(self) -> None:
        self._active = False
        self._handle.remove()

    def announced(self) -> list[object]:
        """The optimizers that have stepped, or are about to, since this was asked the last time."""
        found, self._announced = self._announced, {}
        return list(found.values())

    def fence(self, optimizers: list[Any]) -> None:
        """The caller is about to do what these would do, without them. UsageError within a capture: nothing waits at a
        replay for what was said while it was captured."""
        if is_capturing():
            raise UsageError("call before_untracked_update() before the replay of a graph, not in its capture")
        self.count += 1
        self._announced.update((id(one), one) for one in optimizers)
        self._before()

    def silence(self) -> None:
        """In a forked child, where locks may be held by threads that are not there: do nothing any more."""
        self._active = False

    def _hook(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active or not self._concerns(optimizer):
            return None
        self.count += 1
        self._announced[id(optimizer)] = optimizer
        if is_capturing():
            self._on_captured(optimizer)
            return None
        closure = kwargs.get("closure") or next((a for a in args[1:2] if callable(a)), None)
        if closure is None:
            self._before()
            return None

        def first_then_wait(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self._before()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": first_then_wait}
        return (args[0], first_then_wait, *args[2:]), kwargs


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Called as it is also in a step that is compiled, where torch would take what it finds for constants."""

    def call(*arguments: Any) -> Any:
        return hook(*arguments)

    disable: Callable[..., Callable[..., Any]] | None = getattr(torch, "_disable_dynamo", None)
    return call if disable is None else disable(call)  # unlike torch.compiler.disable it imports no compiler for it
