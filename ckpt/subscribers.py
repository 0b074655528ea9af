"""Sends events of a trainer's saves to other programs: `ckpt.events.subscribe`.

    training loop, staging thread, messages of the writer -> publish -> a bounded queue -> one thread -> functions

Training never waits for a subscriber, except for up to 5 s in close().
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

log = logging.getLogger("ckpt")

KINDS = ("staged", "committed", "failed", "restored", "fault", "decided", "closed")
MOST = 1024  # maximum events queued for a slow subscriber; beyond it, the oldest events are dropped
FLUSH_S = 5.0  # maximum seconds that close() waits until the last events are delivered


@dataclass(frozen=True, slots=True)
class Event:
    """An event in this process. Fields that its kind does not use are None.

    - `at`: seconds since 1970. `dropped`: number of events lost before this one because a subscriber was too slow.
    - "staged": `step` is in memory. `stall_s`: seconds that training waited; `nbytes`: size of this rank's state.
    - "committed": the step is durable in `tier`, a URL. `seconds`: time since the request. `nbytes`: size of the state;
      `stored`: bytes that were written.
    - "failed": the step is not stored in `tier` ("memory" or a URL). `error`: the reason.
    - "restored": `step` from `source`, "memory" or a URL; `seconds`: duration; `repaired`: chunks from another tier.
    - "fault": a fault of this job attempt or of the previous one. `account`: a line for people; `fault`: its kind.
    - "decided": from `step` on, `every` has the save interval of each tier in steps (0: never). `why`: reason by tier.
    - "closed": the last event of a Checkpointer.
    """

    kind: str
    step: int | None
    at: float
    tier: str | None = None
    seconds: float | None = None
    stall_s: float | None = None
    nbytes: int | None = None
    stored: int | None = None
    error: str | None = None
    source: str | None = None
    repaired: int | None = None
    account: str | None = None
    fault: str | None = None
    every: dict[str, int] | None = None
    why: dict[str, str] | None = None
    dropped: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields that this kind of event uses, as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None and (name != "dropped" or value)}


Subscriber = Callable[[Event], object]


class Subscribers:
    """The subscribers of one process and the thread that calls them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._subscribers: dict[int, Subscriber] = {}
        self._number = 0
        self._queue: deque[tuple[str, int | None, float, dict[str, Any]]] = deque()
        self._dropped = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        self._complained: set[tuple[int, str]] = set()

    def subscribe(self, function: Subscriber) -> Callable[[], None]:
        with self._changed:
            self._number += 1
            number = self._number
            self._subscribers[number] = function
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-events", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._changed:
                self._subscribers.pop(number, None)

        return unsubscribe

    def publish(self, kind: str, step: int | None, **facts: Any) -> None:
        if not self._subscribers:
            return
        with self._changed:
            full = len(self._queue) >= MOST
            if full:
                self._queue.popleft()
                self._dropped += 1
            first = full and self._dropped == 1
            self._queue.append((kind, step, time.time(), facts))
            self._changed.notify_all()
        if first:
            log.warning("a subscriber of ckpt.events is too slow: the oldest events are dropped")

    def flush(self, timeout_s: float) -> bool:
        """Wait until the subscribers have received all events published so far. Return False after a timeout."""
        if self._thread is None or threading.current_thread() is self._thread:
            return not self._queue
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue))
                kind, step, at, facts = self._queue.popleft()
                dropped, self._dropped = self._dropped, 0
                subscribers, self._busy = list(self._subscribers.items()), True
            event = Event(kind, step, at, **facts, dropped=dropped)
            for number, function in subscribers:
                self._tell(number, function, event)

    def _tell(self, number: int, function: Subscriber, event: Event) -> None:
        try:
            function(event)
        except BaseException:  # including SystemExit; the thread continues, and logs one error per kind of event
            if (number, event.kind) not in self._complained:
                self._complained.add((number, event.kind))
                log.exception('a subscriber of ckpt.events failed on a "%s" event', event.kind)


_board = Subscribers()


def subscribe(function: Subscriber) -> Callable[[], None]:
    """Call a function with each `Event` of this process from now on. Return a function that ends this subscription.

    Subscribe before or after creating a Checkpointer; the events of all Checkpointers are delivered. In a distributed
    job, each rank delivers its own events. A background thread calls the function, in the order of the events. If the
    function raises an exception, it is logged once per kind of event, and later events are still delivered. For a slow
    function, 1,024 events are queued, then the oldest are dropped; the next event has their number in `dropped`.
    close() waits up to 5 s until the last events are delivered.

    For Weights & Biases:

        def log(event):
            if event.kind == "committed":
                wandb.log({"ckpt/step": event.step, "ckpt/seconds": event.seconds, "ckpt/stored": event.stored})

        ckpt.events.subscribe(log)

    To a file with one line of JSON per event:

        file = open("events.jsonl", "a", buffering=1)
        ckpt.events.subscribe(lambda event: file.write(json.dumps(event.to_json()) + "\\n"))
    """
    if not callable(function):
        raise TypeError(f"subscribe() needs a function that takes one event, not {function!r}")
    return _board.subscribe(function)


def publish(kind: str, step: int | None, **facts: Any) -> None:
    """Queue an event for the subscribers, if there are any. Return immediately."""
    _board.publish(kind, step, **facts)


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Wait until the subscribers have received all published events. Return False after a timeout."""
    return _board.flush(timeout_s)


def _forget() -> None:
    """Drop the subscribers in a forked child, because they belong to the parent."""
    global _board
    _board = Subscribers()


os.register_at_fork(after_in_child=_forget)
