"""The port for requests: a table from the type of a request to the methods that handle it. If a type has no method, the
writer does not start.

Any object with methods below `@handles` can be given to `Dispatch`: of the core, of the guard, or of tools. If several
objects handle a type, they do so in the order in which they were given, and the result of the first is the reply.

Also here: background tasks of the writer's event loop, and threads that feed it.
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
    """The sender of a request, and the descriptors that came with it."""

    channel: Channel
    fds: list[int]


class Answer(NamedTuple):
    """A reply with descriptors."""

    value: object
    fds: tuple[int, ...]


H = TypeVar("H", bound=Callable[..., object])
HANDLERS: dict[type[Request[Any]], list[Callable[..., object]]] = {}


def handles(kind: type[Request[Any]]) -> Callable[[H], H]:
    """Mark a method as the handler of this type of request. It returns the reply or raises an error, and may be async.
    If it has a parameter `caller`, it also gets the caller."""

    def enter(handler: H) -> H:
        HANDLERS.setdefault(kind, []).append(handler)
        return handler

    return enter


class Dispatch:
    """Passes requests to the handlers of these objects. Raises TypeError if a type has none."""

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
        """Return the request in a message. Raises ProtocolError if it is not one."""
        return message_of(incoming, self._kinds)

    async def answer(self, request: Request[Any], caller: Caller) -> object:
        """Call the handlers, and return or raise the result of the first."""
        replies = []
        for handler in self._bound[type(request)]:
            wants_caller = "caller" in inspect.signature(handler).parameters
            found = handler(request, caller) if wants_caller else handler(request)
            replies.append(await found if inspect.isawaitable(found) else found)
        return replies[0]


def check_version(greeting: Greeting | Lend) -> None:
    """Raise ProtocolError for a trainer of another version, before anything changes."""
    if greeting.protocol != PROTOCOL:
        raise ProtocolError(
            f"this writer is of everystep {VERSION}, protocol {PROTOCOL}, and keeps its memory for that: everystep "
            f"{greeting.library} speaks protocol {greeting.protocol}"
        )


class Background:
    """Tasks and threads of the event loop in which it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # strong references, because the loop keeps none

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in the background. If it fails, the error is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            events.log.error("background task failed", exc_info=error)

    def thread(self, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that the process does not wait for."""
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, from such a thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: we are leaving
            self.loop.call_soon_threadsafe(function, *arguments)
