"""What an optimizer waits for before it changes anything: copies under way, and whoever needs the state as it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ckpt.errors import DeadlineError
from ckpt.trainer.staging import device
from ckpt.trainer.staging.snapshot import PendingSnapshot


class UpdateGate:
    """Of one trainer. Jobs come in turn, from the thread that trains; any thread may shut the gate."""

    def __init__(self) -> None:
        self.job: PendingSnapshot | None = None  # the newest that no optimizer has come after
        self._unchecked: list[PendingSnapshot] = []  # older ones, not sealed yet
        self._copying: PendingSnapshot | None = None  # still read by a device: every stream that updates waits for it
        self._shut: tuple[threading.Event, ...] = ()  # not set while something is copied that no optimizer may change
        self._shutting = threading.RLock()  # a signal handler may come in

    def follow(self, before: PendingSnapshot) -> None:
        """All of this job is queued at least, since the one after it was staged: jobs are done in turn."""
        self._line_up(before)
        self._unchecked = [one for one in (*self._unchecked, before) if not one.ended]

    def shut(self) -> threading.Event:
        """From now on an optimizer waits until this is set, and what others have shut it with. One that has begun
        before that has been counted."""
        opened = threading.Event()
        with self._shutting:
            self._shut = (*(one for one in self._shut if not one.is_set()), opened)
        return opened

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No optimizer changes anything meanwhile, but for one that has begun before and has been counted."""
        opened = self.shut()
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
            opened.wait(timeout_s)
        job = self.job
        if job is None:
            return time.perf_counter() - started
        if job.detached:
            in_time = True
        elif job.streams:
            in_time = job.enqueued.wait(timeout_s)
            self._line_up(job)
        else:
            in_time = job.copied.wait(timeout_s)
        if not in_time:
            job.error = DeadlineError(f"copying step {job.attempt.step} took more than {timeout_s:g} s")
        for one in (*self._unchecked, job):
            if not one.ended:  # by a device, which has not come so far; what is counted from now on is the update
                one.check_versions()
        self.job, self._unchecked = None, []
        return time.perf_counter() - started

    def _line_up(self, job: PendingSnapshot) -> None:
        """What the caller queues from now on, on its current streams, comes after the copies of this job."""
        if job.detached:
            return
        device.queue_caller_behind(job.done)
        self._copying = job if job.done else None

    def _line_up_again(self) -> None:
        """Another optimizer may step on another stream."""
        job = self._copying
        if job is not None and job.copied.is_set():
            self._copying = None
        elif job is not None:
            self._line_up(job)
