"""Cores for background work: how many there are, and holding it back while the training waits for one.

Low priority alone does not do it: a core that is shared gives each side less cache and memory bandwidth, and where all
cores are busy even the lowest priority gets some time. The kernel counts for every thread how long it was ready to run
and did not (`schedstat`); while that grows for the trainer, we sleep.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import psutil

LOOK_S = 0.1  # between two looks
STARVED = 0.05  # seconds that threads of the trainer waited, a second
REST = 3.0  # seconds of sleep for a second of work, while it is starved
MOST_S = 0.5
LEAST_S = 0.5  # seconds of all cores together, that say anything about how idle they are
MAX_THREADS = 4  # of the background work of one rank


def threads() -> int:
    """That the background work of one rank may use, by the cores and ranks of this node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))


class IdleCores:
    """How many cores were idle since it was last asked."""

    def __init__(self) -> None:
        self._times, self._share = psutil.cpu_times(), 1.0

    def __call__(self) -> float:
        now = psutil.cpu_times()
        idle, total = now.idle - self._times.idle, sum(now) - sum(self._times)
        if total > LEAST_S:  # asked twice in a row, it would see a moment only
            self._times, self._share = now, max(idle / total, 0.0)
        return self._share * len(os.sched_getaffinity(0))


class Throttle:
    """`pid()`: of the process that must not wait; 0 or a process that is gone: nothing is held back."""

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid, self._lock = pid, threading.Lock()
        self._looked, self._waited, self.starved = 0.0, 0.0, False
        self._hurried = 0

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody who has little time waits for what is done meanwhile: nothing is held back."""
        self._hurried += 1
        try:
            yield
        finally:
            self._hurried -= 1

    def __call__(self, seconds: float) -> None:
        """Called by a thread that has worked for so long, before it goes on."""
        if self._hurried:
            return
        self._look()
        if self.starved:
            time.sleep(min(REST * seconds, MOST_S))

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._looked < LOOK_S:
                return
            waited = waiting_s(self._pid())
            grown, passed = waited - self._waited, now - self._looked
            # After a long pause, or with another process, the numbers have nothing to say to each other.
            self.starved = 0 < grown > STARVED * passed and passed < 10 * LOOK_S
            self._looked, self._waited = now, waited


def waiting_s(pid: int) -> float:
    """How long the threads of a process have been ready to run without running, in all; 0 if nobody counts."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/task/{task}/schedstat") as f:
                total += int(f.read().split()[1])
    return total / 1e9
