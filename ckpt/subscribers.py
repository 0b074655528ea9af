"""What a trainer's saves come to, for other programs: `ckpt.events.subscribe`.

    the training, the staging thread, the writer's answers -> publish -> a bounded queue -> one thread -> functions

Nobody waits for a subscriber but close(), and that for a short while.
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
MOST = 1024  # events that wait for a slow subscriber; the oldest are dropped beyond that
FLUSH_S = 5.0  # that close() waits for the last of them


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in this process. `at`: seconds since 1970; `dropped`: how many events before this one
    nobody was told of, since a subscriber was too slow. What a kind does not have is None.

    - "staged": `step` is in memory. `stall_s`: what training had waited for it; `nbytes`: of the state of this rank.
    - "committed": it is durable in `tier`, a URL. `seconds` since it was ordered; `nbytes`, and `stored` of them.
    - "failed": it is not in `tier` ("memory" or a URL), and why: `error`.
    - "restored": `step` from `source`, "memory" or a URL; `seconds`; `repaired`: pieces taken from a further tier.
    - "fault": one that was noticed, of this start or the one before: `account`, a line for people; `fault`, its kind.
    - "decided": from `step` on saves are taken as `every` says, in steps by place, 0 for never; `why`, by place.
    - "closed": nothing comes after it from that Checkpointer.
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
        """Plain values; without what its kind does not have."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value is not None and (name != "dropped" or value)}


Subscriber = Callable[[Event], object]


class Subscribers:
    """Of one process."""

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
        """Whether all that was published before has been told, or nobody listens."""
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
        except BaseException:  # sys.exit() too: it stays, and says so once for each kind of event
            if (number, event.kind) not in self._complained:
                self._complained.add((number, event.kind))
                log.exception('a subscriber of ckpt.events failed at "%s"', event.kind)


_board = Subscribers()


def subscribe(function: Subscriber) -> Callable[[], None]:
    """Have a function called with each `Event` of this process from now on; returns what ends that.

    Before or after a Checkpointer is made, for all of them; on every rank of a job it tells of that rank. It is called
    in a background thread of its own, in the order in which things happened, never by the thread that trains. What it
    raises is logged, once for each kind of event, and it goes on being called. If it is slow, the oldest of 1,024
    waiting events are dropped, and the next one that it gets says how many. close() waits up to 5 s for the last ones.

    To Weights & Biases:

        def log(event):
            if event.kind == "committed":
                wandb.log({"ckpt/step": event.step, "ckpt/seconds": event.seconds, "ckpt/stored": event.stored})

        ckpt.events.subscribe(log)

    To a file, a line of JSON each:

        file = open("events.jsonl", "a", buffering=1)
        ckpt.events.subscribe(lambda event: file.write(json.dumps(event.to_json()) + "\\n"))
    """
    if not callable(function):
        raise TypeError(f"subscribe() takes a function of one event, not {function!r}")
    return _board.subscribe(function)


def publish(kind: str, step: int | None, **facts: Any) -> None:
    """Tell the subscribers, if there are any; returns at once."""
    _board.publish(kind, step, **facts)


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Wait until subscribers were told of all that was published; False if that takes longer."""
    return _board.flush(timeout_s)


def _forget() -> None:
    """In a forked child: who subscribed was the parent."""
    global _board
    _board = Subscribers()


os.register_at_fork(after_in_child=_forget)
