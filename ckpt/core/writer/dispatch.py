"""Which methods deal with which request: a table from its type, which is complete or the writer does not start.

This is the port for requests. Whatever has methods below `@handles` can be given to `Dispatch`, which knows none of the
classes: objects of the core, of the guard, or of tools. If several objects deal with a type, they do so in the order in
which they were given, and the first one's result is the reply.

And what runs beside: tasks of the writer's event loop, and threads that feed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ckpt import events
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.protocol import PROTOCOL, Incoming, Request, message_of, table
from ckpt.core.ipc.requests import Greeting, Lend
from ckpt.errors import ProtocolError
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


H = TypeVar("H", bound=Callable[..., object])
HANDLERS: dict[type[Request[Any]], list[Callable[..., object]]] = {}


def handles(kind: type[Request[Any]]) -> Callable[[H], H]:
    """A method for all requests of this type. What it returns is the reply, and what it raises; it may be async. It
    gets the `caller` as well if it has that parameter: who has to know who asks, or what came along."""

    def enter(handler: H) -> H:
        HANDLERS.setdefault(kind, []).append(handler)
        return handler

    return enter


class Dispatch:
    """Has these objects deal with all requests. TypeError if none of them deals with one."""

    def __init__(self, *objects: object) -> None:
        self._kinds = table(HANDLERS)
        self._bound: dict[type[Request[Any]], list[Callable[..., object]]] = {
            kind: [
                getattr(one, handler.__name__)
                for one in objects
                for handler in handlers
                if getattr(type(one), handler.__name__, None) is handler
            ]
            for kind, handlers in HANDLERS.items()
        }
        if missing := [kind.__name__ for kind in Request.__subclasses__() if not self._bound.get(kind)]:
            raise TypeError(f"nobody deals with {', '.join(missing)}")

    def request(self, incoming: Incoming) -> Request[Any]:
        """What this message asks for; ProtocolError if it is no request."""
        return message_of(incoming, self._kinds)

    async def answer(self, request: Request[Any], caller: Caller) -> object:
        """What deals with it returns, or raises."""
        replies = []
        for handler in self._bound[type(request)]:
            wants_caller = "caller" in inspect.signature(handler).parameters
            found = handler(request, caller) if wants_caller else handler(request)
            replies.append(await found if inspect.isawaitable(found) else found)
        return replies[0]


def check_version(greeting: Greeting | Lend) -> None:
    """ProtocolError for a trainer of another version, before anything changes."""
    if greeting.protocol != PROTOCOL:
        raise ProtocolError(
            f"this writer is of everystep {VERSION}, protocol {PROTOCOL}, and keeps its memory for that: everystep "
            f"{greeting.library} speaks protocol {greeting.protocol}"
        )


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
