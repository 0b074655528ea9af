"""Threads for the end of the interpreter: from Python 3.12 on none can be started by then, and a writer may die."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

SPARES = 2  # what the client of one writer takes
JOIN_S = 1.0

_work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()


def begin(work: Callable[[], None], name: str) -> None:
    """In a thread of its own, or in one that was kept for the end."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        _work.put(work)


class SpareThreads:
    """Kept from the beginning of a run until it is closed."""

    def __init__(self) -> None:
        self._threads = [threading.Thread(target=_wait, name="ckpt-spare", daemon=True) for _ in range(SPARES)]
        with contextlib.suppress(RuntimeError):
            for thread in self._threads:
                thread.start()

    def end(self) -> None:
        """Once; those that work end when that is done."""
        ended, self._threads = [thread for thread in self._threads if thread.is_alive()], []
        for _ in ended:
            _work.put(None)
        for thread in ended:
            thread.join(JOIN_S)


def _wait() -> None:
    while (work := _work.get()) is not None:
        work()
