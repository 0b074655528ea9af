"""Limits the cores of background work, and throttles it while the training waits for a core.

Low priority alone is not enough: a shared core has less cache and memory bandwidth for each side, and if all cores are
busy, even the lowest priority gets some time. The kernel counts how long each thread was ready to run but did not run
(`schedstat`). While that grows for the trainer, background work sleeps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import psutil

LOOK_S = 0.1  # interval between two checks
STARVED = 0.05  # seconds per second that threads of the trainer may wait for a core
REST = 3.0  # seconds of sleep per second of work, while the trainer waits too long
MOST_S = 0.5
LEAST_S = 0.5  # minimum sample, in core-seconds, to estimate how idle the cores are
MAX_THREADS = 4  # maximum number of background threads per rank


def threads() -> int:
    """Return the number of threads for the background work of a rank, by the cores and ranks of this node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))


class IdleCores:
    """Estimates how many cores were idle since the last call."""

    def __init__(self) -> None:
        self._times, self._share = psutil.cpu_times(), 1.0

    def __call__(self) -> float:
        now = psutil.cpu_times()
        idle, total = now.idle - self._times.idle, sum(now) - sum(self._times)
        if total > LEAST_S:  # after a shorter time, keep the last estimate
            self._times, self._share = now, max(idle / total, 0.0)
        return self._share * len(os.sched_getaffinity(0))


class Throttle:
    """Slows down background threads. `pid`: returns the id of the process that must not wait for a core. If it is 0 or
    the process has ended, nothing is throttled."""

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid, self._lock = pid, threading.Lock()
        self._looked, self._waited, self.starved = 0.0, 0.0, False
        self._hurried = 0

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Throttle nothing inside the block, because an urgent request waits for the work."""
        self._hurried += 1
        try:
            yield
        finally:
            self._hurried -= 1

    def __call__(self, seconds: float) -> None:
        """Sleep if the trainer waits for cores. A thread calls this after `seconds` of work."""
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
            # After a long pause, or with another process, the two values are not comparable.
            self.starved = 0 < grown > STARVED * passed and passed < 10 * LOOK_S
            self._looked, self._waited = now, waited


def waiting_s(pid: int) -> float:
    """Return the total time for which the threads of a process were ready but did not run; 0 if unknown."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/task/{task}/schedstat") as f:
                total += int(f.read().split()[1])
    return total / 1e9
