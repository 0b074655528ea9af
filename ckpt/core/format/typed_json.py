"""Values of known types out of JSON that anybody may have written."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decoded(raw: bytes | memoryview) -> Any:
    """ValueError if it is no JSON, or has a number that JSON does not know."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def typed(kind: type[T], data: object) -> T:
    """A dataclass of plain values: what it does not know is left out, what is missing has its default. ValueError where
    a field is of another type, or a number that is not finite."""
    try:
        return msgspec.json.decode(msgspec.json.encode(data), type=kind)  # NaN comes out as null
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
