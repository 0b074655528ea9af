"""Memory that a snapshot waits for before it can be copied, since it is still being made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt.errors import DeadlineError, SkippedError

if TYPE_CHECKING:
    from ckpt.core.snapshot.snapshot import PendingSnapshot

MOST_S = 0.01  # that an optimizer waits for what may be left out


class AwaitedMemory:
    """Of one snapshot. The staging thread asks until it is there; an optimizer that comes before that waits too, but
    not for long if the snapshot `may_be_left_out`. Whichever comes first decides."""

    def __init__(self, ask: Callable[[], None], *, may_be_left_out: bool) -> None:
        """`ask`: takes what has been made by now; waits a little for it, and raises why there will be none."""
        self._ask, self._may_be_left_out = ask, may_be_left_out
        self._deciding = threading.Lock()
        self._there = threading.Event()
        self.left_out = False

    def leave_out(self) -> bool:
        """The training goes on without this snapshot; False if it must wait for it, or is being copied by now."""
        if self._may_be_left_out:
            self._there.wait(MOST_S)
        with self._deciding:
            self.left_out |= self._may_be_left_out and not self._there.is_set()
            return self.left_out

    def await_room(self, job: PendingSnapshot, has_room: Callable[[PendingSnapshot], bool]) -> None:
        """In the staging thread: until it is there for this one, which is copied then. Raises why it will not be."""
        step = job.attempt.step
        while not self._there.is_set():
            there = has_room(job)
            with self._deciding:
                if self.left_out:
                    raise SkippedError(f"step {step} was left out: its memory was being made when training went on")
                if there:
                    self._there.set()
                    return
            if job.error is not None:
                raise job.error
            if time.monotonic() > job.deadline:
                raise DeadlineError(f"step {step} was not saved: there was no memory in time")
            self._ask()
