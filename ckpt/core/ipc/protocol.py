"""What trainer and writer say to each other: typed messages, and how they become bytes and are checked on arrival.

    Request   from a trainer, a tool or another writer to a writer, which replies   `requests`, `watch_requests`
    Note      from a writer to its trainer, which does not                          `notes`

On the wire a message is an object of JSON: `op` is its name, `id` numbers a request and the reply to it, `fds` counts
the descriptors that travel with it, and everything else is fields. What is unknown, has a wrong or no field, or is too
long, is refused by name. Another number of `PROTOCOL` means that nothing but a refusal will be understood: a trainer
and a writer of different numbers leave each other alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from ckpt.errors import ProtocolError, from_wire, to_wire
from ckpt.version import VERSION

PROTOCOL = 10  # raise it whenever a message changes
MIB = 1 << 20
MOST_BYTES = 256 * MIB  # of any message
MOST_NAME = 60  # characters of a name that is not known
REPLY = "reply"  # its value, or its error, is what its request is answered by

R = TypeVar("R")
N = TypeVar("N", bound="Message")
T = TypeVar("T")


@functools.cache
def _op(name: str) -> str:
    """`WriteSlot` is called `write_slot` on the wire."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=_op):
    """What goes over the wire by a name of its own."""

    most_bytes: ClassVar[int] = 8 * MIB  # more where it grows with the model, or with the job
    descriptors: ClassVar[int] = 0  # how many come with it


class Request(Message, Generic[R], frozen=True):
    """What a writer is asked, and answers by an `R`."""


class Note(Message, frozen=True):
    """What a writer tells its trainer."""

    most_bytes = MOST_BYTES


class Body(msgspec.Struct, frozen=True):
    """What is part of a message, or of a reply."""


class Failure(Body, frozen=True):
    """A reply that is an error; see `ckpt.errors.to_wire`."""

    error: str
    message: str
    retryable: bool = False


@dataclass(slots=True)
class Incoming:
    """A message as it came: its name, its number or None, what else is in it, and how many bytes it had."""

    op: str
    id: int | None
    fields: dict[str, Any]
    size: int
    fds: list[int] = field(default_factory=list)

    def drop(self) -> None:
        """Close what came with it."""
        while self.fds:
            with contextlib.suppress(OSError):
                os.close(self.fds.pop())


def table(kinds: Iterable[type[N]]) -> dict[str, type[N]]:
    """Types of messages, by their name on the wire."""
    return {_op(kind.__name__): kind for kind in kinds}


def encode(message: Message, number: int | None = None, fds: int = 0) -> bytes:
    """ProtocolError if it is too long for what it is."""
    name = _op(type(message).__name__)
    text = _text(name, number, fds, msgspec.structs.asdict(message))
    _check_size(name, len(text), message.most_bytes)
    return text


def encode_reply(value: object, number: int, fds: int = 0) -> bytes:
    """Of what a request was answered by, or of a `Failure`."""
    text = _text(REPLY, number, fds, msgspec.structs.asdict(value) if isinstance(value, Failure) else {"value": value})
    _check_size(REPLY, len(text), MOST_BYTES)
    return text


def failure(error: BaseException) -> Failure:
    """An error as a reply."""
    return Failure(**to_wire(error))


def _text(name: str, number: int | None, fds: int, fields: dict[str, Any]) -> bytes:
    """By the json of Python: that of msgspec has no infinite seconds, and refuses names of files that are no UTF-8."""
    head = {"op": name} | ({} if number is None else {"id": number}) | ({"fds": fds} if fds else {})
    return json.dumps({**head, **fields}, separators=(",", ":"), default=msgspec.structs.asdict).encode()


def decode(text: bytes | bytearray) -> Incoming | None:
    """What every message begins with is checked here, all else by its type; None for what is no message."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if type(data) is not dict:
        return None
    op, number = data.get("op"), data.get("id")
    return Incoming(op if type(op) is str else "", number if type(number) is int else None, data, len(text))


def too_long(size: int, begin: bytes) -> Incoming:
    """Of a message that is not even read: its name and number, as far as its first bytes say them."""
    op, number = re.search(rb'"op": ?"(\w+)"', begin), re.search(rb'"id": ?(\d{1,18})\b', begin)
    return Incoming(op[1].decode() if op else "", int(number[1]) if number else None, {}, size)


def message_of(incoming: Incoming, known: Mapping[str, type[N]]) -> N:
    """ProtocolError for what is none of these, by its name."""
    kind = known.get(incoming.op)
    _check_size(incoming.op, incoming.size, MOST_BYTES if kind is None else kind.most_bytes)
    if kind is None:
        raise refusal(incoming.op, "is not known here")
    found = _convert(incoming.fields, kind, incoming.op)
    if len(incoming.fds) != kind.descriptors:
        raise refusal(incoming.op, f"comes with {kind.descriptors} descriptors, not {len(incoming.fds)}")
    return found


def reply_of(incoming: Incoming, request: Request[R]) -> R:
    """The reply to a request. Raises the error that it is, or ProtocolError if it is not what answers this."""
    kind: type[R] = type(request).__orig_bases__[0].__args__[0]  # type: ignore[attr-defined]
    name = f"the reply to {_op(type(request).__name__)}"
    if "error" in incoming.fields:
        raise from_wire(msgspec.structs.asdict(_convert(incoming.fields, Failure, name)))
    return _convert(incoming.fields.get("value"), kind, name)


def _convert(data: object, kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise refusal(name, f"is malformed: {error}") from None


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise refusal(name, f"has {size / MIB:.0f} MiB, where {most / MIB:.0f} MiB are the most")


def refusal(name: str, problem: str) -> ProtocolError:
    """Of a message, by its name. It says who we are, for another version."""
    named = repr(name[:MOST_NAME]) if name else "a message without a name"
    return ProtocolError(f"{named} {problem} (everystep {VERSION}, protocol {PROTOCOL})")
