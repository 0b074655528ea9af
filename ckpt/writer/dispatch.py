"""Which method deals with which request: a table from its type, which is complete or the writer does not start.

And what runs beside: tasks of the writer's event loop, and threads that feed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ckpt import events
from ckpt.errors import ProtocolError
from ckpt.ipc.channel import Channel
from ckpt.ipc.protocol import PROTOCOL, Incoming, Request, message_of, table
from ckpt.ipc.requests import Greeting
from ckpt.version import VERSION


@dataclass(frozen=True)
class Caller:
    """Who asks, and what descriptors came along."""

    channel: Channel
    fds: list[int]


class Answer(NamedTuple):
    """A reply with descriptors."""

    value: object
    fds: tuple[int, ...]


S = TypeVar("S")
T = TypeVar("T")
Q = TypeVar("Q", bound=Request[Any])
HANDLERS: dict[type[Request[Any]], Callable[..., object]] = {}
_WANT_CALLER: set[type[Request[Any]]] = set()


def handles(kind: type[Q]) -> Callable[[Callable[[S, Q], T]], Callable[[S, Q], T]]:
    """A method for all requests of this type. What it returns is the reply, and what it raises; it may be async."""

    def enter(handler: Callable[[S, Q], T]) -> Callable[[S, Q], T]:
        HANDLERS[kind] = handler
        return handler

    return enter


def handles_caller(kind: type[Q]) -> Callable[[Callable[[S, Q, Caller], T]], Callable[[S, Q, Caller], T]]:
    """The same for a method that has to know who asks, or what came along."""

    def enter(handler: Callable[[S, Q, Caller], T]) -> Callable[[S, Q, Caller], T]:
        HANDLERS[kind] = handler
        _WANT_CALLER.add(kind)
        return handler

    return enter


class Dispatch:
    """Has these objects deal with all requests. TypeError if none of them deals with one."""

    def __init__(self, *objects: object) -> None:
        self._kinds = known()
        self._bound = {
            kind: getattr(one, handler.__name__)
            for kind, handler in HANDLERS.items()
            for one in objects
            if getattr(type(one), handler.__name__, None) is handler
        }
        _check_all(self._bound)

    def request(self, incoming: Incoming) -> Request[Any]:
        """What this message asks for; ProtocolError if it is no request."""
        return message_of(incoming, self._kinds)

    async def answer(self, request: Request[Any], caller: Caller) -> object:
        """What deals with it returns, or raises."""
        kind = type(request)
        found = self._bound[kind](request, caller) if kind in _WANT_CALLER else self._bound[kind](request)
        return await found if inspect.isawaitable(found) else found


def check_version(greeting: Greeting) -> None:
    """ProtocolError for a trainer of another version, before anything changes."""
    if greeting.protocol != PROTOCOL:
        raise ProtocolError(
            f"this writer is of everystep {VERSION}, protocol {PROTOCOL}, and keeps its memory for that: everystep "
            f"{greeting.library} speaks protocol {greeting.protocol}"
        )


def known() -> Mapping[str, type[Request[Any]]]:
    """All requests, by their name. TypeError if no method deals with one."""
    _check_all(HANDLERS)
    return table(HANDLERS)


def _check_all(dealt_with: Iterable[type[Request[Any]]]) -> None:
    if missing := [kind.__name__ for kind in Request.__subclasses__() if kind not in dealt_with]:
        raise TypeError(f"nobody deals with {', '.join(missing)}")


class Background:
    """Of one event loop, in which it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that nobody has to wait for; if it fails, that is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            events.log.error("something that ran beside failed", exc_info=error)

    def thread(self, target: Callable[..., None], *arguments: object) -> None:
        """A thread that the process does not wait for."""
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """From such a thread: have this called in the loop."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: we are leaving
            self.loop.call_soon_threadsafe(function, *arguments)
