"""Which method deals with which request: a table from its type, which is complete or the writer does not start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ckpt.errors import ProtocolError
from ckpt.ipc.channel import Channel
from ckpt.ipc.protocol import PROTOCOL, Request, table
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


Q = TypeVar("Q", bound=Request[Any])
Handler = Callable[[Any, Q, Caller], Awaitable[object]]
HANDLERS: dict[type[Request[Any]], Handler[Any]] = {}


def handles(kind: type[Q]) -> Callable[[Handler[Q]], Handler[Q]]:
    """A method for all requests of this type. What it returns is the reply, and what it raises."""

    def enter(handler: Handler[Q]) -> Handler[Q]:
        HANDLERS[kind] = handler
        return handler

    return enter


def check_version(greeting: Greeting) -> None:
    """ProtocolError for a trainer of another version, before anything changes."""
    if greeting.protocol != PROTOCOL:
        raise ProtocolError(
            f"this writer is of everystep {VERSION}, protocol {PROTOCOL}, and keeps its memory for that: everystep "
            f"{greeting.library} speaks protocol {greeting.protocol}"
        )


def known() -> Mapping[str, type[Request[Any]]]:
    """All requests, by their name. TypeError if nobody deals with one."""
    if missing := [kind.__name__ for kind in Request.__subclasses__() if kind not in HANDLERS]:
        raise TypeError(f"nobody deals with {', '.join(missing)}")
    return table(HANDLERS)
