"""Makes optimizers wait before they change tensors that are being copied, and counts their steps."""

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
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.errors import DeadlineError, UsageError
from ckpt.events import log

WARN_S = 5.0  # how long training may wait for a copy before a warning explains it


class UpdateGate:
    """The gate that optimizers of this trainer pass before an update. Any thread may shut it.

    writer_pid: process id of the writer, which makes the memory that a copy may wait for; 0 if unknown
    """

    def __init__(self) -> None:
        self.writer_pid = 0
        self.snapshot: NewSnapshot | None = None  # the newest; None once an optimizer has stepped since
        self._unchecked: list[NewSnapshot] = []  # older snapshots that are not sealed yet
        self._copying: NewSnapshot | None = None  # a device still reads its sources, so streams of updates wait for it
        self._shut: tuple[threading.Event, ...] = ()  # an unset event keeps optimizers out
        self._shutting = threading.RLock()  # a signal handler may interrupt the thread that holds it

    def follow(self, before: NewSnapshot) -> None:
        """Note that a snapshot after `before` was submitted. The copies of `before` are at least on their streams."""
        self._line_up(before)
        self._unchecked = [one for one in (*self._unchecked, before) if not one.ended]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep optimizers from starting a step in this block. One that has already started is counted and continues."""
        opened = threading.Event()
        with self._shutting:
            self._shut = (*(one for one in self._shut if not one.is_set()), opened)
        try:
            yield
        finally:
            opened.set()

    def wait(self, timeout_s: float) -> float:
        """Wait until an optimizer may change the state. Return the seconds waited. If a copy does not end in time, its
        snapshot fails and the training continues."""
        self._line_up_again()
        snapshot, shut = self.snapshot, self._shut
        if snapshot is None and all(one.is_set() for one in shut):
            return 0.0
        started = time.perf_counter()
        for opened in shut:
            self.wait_for(opened, "an optimizer", timeout_s)
        snapshot = self.snapshot
        if snapshot is None:
            return time.perf_counter() - started
        if snapshot.streams:
            in_time = self.wait_for(snapshot.enqueued, "an optimizer", timeout_s)
            self._line_up(snapshot)
        else:
            in_time = self.wait_for(snapshot.copied, "an optimizer", timeout_s)
        if not in_time:
            snapshot.error = DeadlineError(f"copying step {snapshot.attempt.step} took more than {timeout_s:g} s")
        for one in (*self._unchecked, snapshot):
            if not one.ended:  # a device still copies it; version counters that grow later are due to the update
                one.check_versions()
        self.snapshot, self._unchecked = None, []
        return time.perf_counter() - started

    def wait_for(self, event: threading.Event, waiter: str, timeout_s: float | None = None) -> bool:
        """Wait for an event in the training thread. After 5 s, log one warning that names the cause.

        waiter: the name of the waiting call, for the message
        Returns False if the event was not set within `timeout_s`.
        """
        first = WARN_S if timeout_s is None else min(WARN_S, timeout_s)
        if event.wait(first):
            return True
        rest = None if timeout_s is None else timeout_s - first
        if rest is None or rest > 0:
            self.warn(waiter)
        return event.wait(rest)

    def warn(self, waiter: str) -> None:
        """Log that the training waits for memory or for a copy, and why."""
        writer = Process.of(self.writer_pid)
        if self.writer_pid and writer.suspended:
            cause = (
                f"the writer process {writer.pid} is stopped. Training goes on when that process continues "
                f"(kill -CONT {writer.pid}) or ends"
            )
        else:
            cause = f"the writer process {writer.pid} has not made the memory yet, or the machine is busy"
        log.warning("%s has waited %g s for the copy of a step: %s", waiter, WARN_S, cause)

    def _line_up(self, snapshot: NewSnapshot) -> None:
        """Make later work on the caller's streams wait for the copies of this snapshot."""
        device.queue_caller_behind(snapshot.done)
        if snapshot.done:  # otherwise it was skipped, and an older snapshot is still being copied
            self._copying = snapshot

    def _line_up_again(self) -> None:
        """Make the stream of another optimizer wait too."""
        snapshot = self._copying
        if snapshot is not None and snapshot.copied.is_set():
            self._copying = None
        elif snapshot is not None:
            self._line_up(snapshot)


class UpdateHook:
    """Calls `before()` before an optimizer changes the saved state, and counts the steps of such optimizers.

    - `concerns`: return True for an optimizer of the saved state.
    - `on_captured`: called with an optimizer whose step is captured into a graph. A replay of it runs no hooks.

    An optimizer that gets a closure runs forward and backward inside its step, so `before` is called when the closure
    first returns.
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
        """Return the optimizers that have begun a step since the last call."""
        found, self._announced = self._announced, {}
        return list(found.values())

    def fence(self, optimizers: list[Any]) -> None:
        """Count a step that the caller is about to make in place of these optimizers. Raises UsageError during a graph
        capture, because a replay would not wait."""
        if is_capturing():
            raise UsageError("call before_untracked_update() before the replay of a graph, not in its capture")
        self.count += 1
        self._announced.update((id(one), one) for one in optimizers)
        self._before()

    def silence(self) -> None:
        """Disable the hook in a forked child, where threads that do not exist there may hold locks."""
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
    """Return a hook that torch.compile does not trace. A traced hook would treat its values as constants."""

    def call(*arguments: Any) -> Any:
        return hook(*arguments)

    disable: Callable[..., Callable[..., Any]] | None = getattr(torch, "_disable_dynamo", None)
    return call if disable is None else disable(call)  # torch.compiler.disable would import the compiler
