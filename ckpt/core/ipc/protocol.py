"""Typed messages between trainer and writer: encoding, decoding, and validation on arrival.

    Request   from a trainer, a tool or another writer to a writer, which replies   `requests`, `watch_requests`
    Note      from a writer to its trainer, which sends no reply                    `notes`

On the wire, a message is a JSON object: `op` is its name, `id` is the number of a request and its reply, `fds` is the
number of descriptors sent with it, and all other keys are fields. A message that is unknown, malformed or too long is
rejected with an error that names it. A trainer and a writer with different values of `PROTOCOL` do not use each other,
because they can exchange only errors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from ckpt.errors import ProtocolError, from_wire, to_wire
from ckpt.version import VERSION

PROTOCOL = 10  # increase it whenever a message changes
MIB = 1 << 20
MOST_BYTES = 256 * MIB  # of any message
MOST_NAME = 60  # maximum characters of an unknown name in an error
REPLY = "reply"  # the name of replies; a reply has a value or an error

R = TypeVar("R")
N = TypeVar("N", bound="Message")
T = TypeVar("T")


@functools.cache
def _op(name: str) -> str:
    """Return the name of a message on the wire: `write_slot` for `WriteSlot`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=_op):
    """A message with a name on the wire."""

    most_bytes: ClassVar[int] = 8 * MIB  # more for messages that grow with the model or the job
    descriptors: ClassVar[int] = 0  # number of descriptors sent with it


class Request(Message, Generic[R], frozen=True):
    """A request to a writer, which replies with an `R`."""


class Note(Message, frozen=True):
    """A message from a writer to its trainer."""

    most_bytes = MOST_BYTES


class Body(msgspec.Struct, frozen=True):
    """A part of a message or reply."""


class Failure(Body, frozen=True):
    """A reply that is an error; see `ckpt.errors.to_wire`."""

    error: str
    message: str
    retryable: bool = False


@dataclasses.dataclass(slots=True)
class Incoming:
    """A received message: its name, its number or None, its fields, and its size in bytes."""

    op: str
    id: int | None
    fields: dict[str, Any]
    size: int
    fds: list[int] = dataclasses.field(default_factory=list)

    def drop(self) -> None:
        """Close the descriptors that came with it."""
        while self.fds:
            with contextlib.suppress(OSError):
                os.close(self.fds.pop())


def table(kinds: Iterable[type[N]]) -> dict[str, type[N]]:
    """Return message types by their name on the wire."""
    return {_op(kind.__name__): kind for kind in kinds}


def encode(message: Message, number: int | None = None, fds: int = 0) -> bytes:
    """Encode a message. Raise ProtocolError if it is too long for its type."""
    name = _op(type(message).__name__)
    text = _text(name, number, fds, msgspec.structs.asdict(message))
    _check_size(name, len(text), message.most_bytes)
    return text


def encode_reply(value: object, number: int, fds: int = 0) -> bytes:
    """Encode the reply to a request, or a `Failure`."""
    text = _text(REPLY, number, fds, msgspec.structs.asdict(value) if isinstance(value, Failure) else {"value": value})
    _check_size(REPLY, len(text), MOST_BYTES)
    return text


def failure(error: BaseException) -> Failure:
    """Return an error as a reply."""
    return Failure(**to_wire(error))


def _text(name: str, number: int | None, fds: int, fields: dict[str, Any]) -> bytes:
    """Encode with Python's json, because msgspec rejects infinite numbers and file names that are not UTF-8."""
    head = {"op": name} | ({} if number is None else {"id": number}) | ({"fds": fds} if fds else {})
    return json.dumps({**head, **fields}, separators=(",", ":"), default=msgspec.structs.asdict).encode()


def decode(text: bytes | bytearray) -> Incoming | None:
    """Parse a message, None if it is not one. Only its name and number are checked here, its fields by its type."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if type(data) is not dict:
        return None
    op, number = data.get("op"), data.get("id")
    return Incoming(op if type(op) is str else "", number if type(number) is int else None, data, len(text))


def too_long(size: int, begin: bytes) -> Incoming:
    """Return a message that is too long to be read, with the name and number found in its first bytes."""
    op, number = re.search(rb'"op": ?"(\w+)"', begin), re.search(rb'"id": ?(\d{1,18})\b', begin)
    return Incoming(op[1].decode() if op else "", int(number[1]) if number else None, {}, size)


def message_of(incoming: Incoming, known: Mapping[str, type[N]]) -> N:
    """Convert to a typed message. Raise ProtocolError if it is unknown or invalid."""
    kind = known.get(incoming.op)
    _check_size(incoming.op, incoming.size, MOST_BYTES if kind is None else kind.most_bytes)
    if kind is None:
        raise refusal(incoming.op, "is not known here")
    found = _convert(incoming.fields, kind, incoming.op)
    if len(incoming.fds) != kind.descriptors:
        raise refusal(incoming.op, f"comes with {kind.descriptors} descriptors, not {len(incoming.fds)}")
    return found


def reply_of(incoming: Incoming, request: Request[R]) -> R:
    """Return the reply to a request. Raise the error in it, or ProtocolError if its type is wrong."""
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
    """Return the error for a rejected message. It has our version, for a peer of another version."""
    named = repr(name[:MOST_NAME]) if name else "a message without a name"
    return ProtocolError(f"{named} {problem} (everystep {VERSION}, protocol {PROTOCOL})")
