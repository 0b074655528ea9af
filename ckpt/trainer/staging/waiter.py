"""A thread that waits for devices, so that the thread that stages does not look again and again.

To ask an event whether it has been reached holds the interpreter, and may wait for the lock of a device that hangs. To
wait for it does neither.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from ckpt.trainer.staging.device import PerDevice, begin_thread, wait_for

MEANWHILE_S = 0.05

Awaited = tuple[PerDevice, threading.Event, Callable[[], None]]


class Waiter:
    """Of one trainer. What is waited for comes in turn."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PerDevice, threading.Event, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def when_reached(self, events: PerDevice, there: threading.Event, call: Callable[[], None]) -> None:
        """When all of them have been reached, or a device has failed, have `there` set and this called. Returns at
        once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-device", daemon=True)
            self._thread.start()
        self._queue.put((events, there, call))

    def until_reached(self, events: PerDevice, meanwhile: Callable[[], None]) -> None:
        """Wait for that, and do something now and then."""
        there = threading.Event()
        self.when_reached(events, there, lambda: None)
        while not there.wait(MEANWHILE_S):
            meanwhile()

    def stop(self) -> None:
        """Nothing comes any more; nobody waits for the thread, since a device may hang."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            events, there, call = item
            with contextlib.suppress(Exception):  # of a kernel that failed: whoever copies is told
                begin_thread(events)
                wait_for(events)
            there.set()
            call()
