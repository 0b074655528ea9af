"""Parses untrusted JSON into values of known types."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decoded(raw: bytes | memoryview) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, or has a number that JSON does not allow."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def typed(kind: type[T], data: object) -> T:
    """Convert data to a dataclass. Unknown fields are ignored, and missing ones get their default. Raise ValueError if
    a field has another type or a number is not finite."""
    try:
        return msgspec.json.decode(msgspec.json.encode(data), type=kind)  # NaN becomes null
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
