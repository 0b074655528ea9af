"""Check which objects pickled by torch's DCP can be read without running code."""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import threading
from collections.abc import Callable
from pathlib import PosixPath
from typing import Any, TypeVar

import torch

from ckpt.errors import UsageError
from ckpt.events import log as logger

_T = TypeVar("_T")

# Allowed in addition to torch's list. numpy's scalars are not: with a forged dtype, numpy uses bytes as addresses.
HARMLESS: list[Any] = [
    *(bytes, PosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
]


# -- stand-ins for classes that torch's restricted reader cannot create; they only check the pickled arguments --


def _stand_in(module: str, name: str) -> Callable[[_T], _T]:
    """Make torch's reader use the decorated object where a pickle names `module.name`."""

    def named(one: _T) -> _T:
        one.__module__, one.__name__, one.__qualname__ = module, name, name  # type: ignore[attr-defined]
        STAND_INS.append(one)
        return one

    return named


STAND_INS: list[Any] = []
NUMBER = re.compile(r"[-+]?[0-9]{1,4000}(/[0-9]{1,4000})?")  # no exponents: Python would compute the power of ten
DECIMAL = re.compile(r"[-+]?([0-9.]{1,4000}(E[-+]?[0-9]{1,18})?|Infinity|s?NaN[0-9]{0,4000})", re.IGNORECASE)


@_stand_in("collections", "deque")
def _deque(items: Any = (), maxlen: Any = None) -> list[Any]:
    _require(type(items) in (tuple, list) and (maxlen is None or type(maxlen) is int))
    return list(items)  # a list, because the reader appends the items that follow


@_stand_in("decimal", "Decimal")
def _decimal(text: str) -> tuple[str]:
    _require(type(text) is str and DECIMAL.fullmatch(text) is not None)
    return (text,)


@_stand_in("fractions", "Fraction")
def _fraction(*parts: Any) -> tuple[Any, ...]:
    _require(
        len(parts) in (1, 2)
        and all(type(p) is int or (type(p) is str and NUMBER.fullmatch(p) is not None) for p in parts)
    )
    return parts


def _of_integers(*bounds: Any) -> tuple[Any, ...]:
    _require(1 <= len(bounds) <= 3 and all(type(one) is int for one in bounds))
    return bounds


def _of_plain(*bounds: Any) -> tuple[Any, ...]:
    _require(1 <= len(bounds) <= 3 and all(type(one) in (int, float, str, type(None)) for one in bounds))
    return bounds


_stand_in("builtins", "range")(_of_integers)
_stand_in("builtins", "slice")(_of_plain)


@_stand_in("builtins", "frozenset")
def _frozenset(items: Any = ()) -> tuple[Any, ...]:
    _require(type(items) is list)
    return tuple(items)


@_stand_in("pathlib", "PurePosixPath")
def _pure_path(*parts: Any) -> tuple[Any, ...]:
    _require(all(type(one) is str for one in parts))
    return parts


@_stand_in("_io", "BytesIO")
class _BytesIO:
    def __setstate__(self, state: Any) -> None:
        _require(type(state) is tuple and len(state) == 3 and (type(state[0]), type(state[1])) == (bytes, int))
        _require(state[2] is None or state[2] == {})


@_stand_in("uuid", "UUID")
class _UUID:
    def __setstate__(self, state: Any) -> None:
        _require(
            type(state) is dict and set(state) <= {"int", "is_safe"} and all(type(n) is int for n in state.values())
        )


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("Python does not pickle such an object in this way")


REFUSED = re.compile(r"Unsupported (?:global|class|operand)[^\n]*?(?= was not an allowed|\. |\n|$)")
_said: set[str] = set()
_lock = threading.Lock()  # torch's list of allowed classes is shared by all threads


def check_object(what: str, raw: memoryview) -> None:
    """Raise UsageError if torch cannot read a pickled object without running code. `what`: its name for the error."""
    why = _refusal(raw)
    if why is not None:
        raise UsageError(
            f"{what} is an object that could run code when it is unpickled, so it is rejected ({why}). If you trust "
            "everyone who can write there, use StorageReader(..., trusted=True), or allow its classes with "
            "torch.serialization.add_safe_globals"
        )


def warn_once(name: str, raw: memoryview) -> None:
    """Log a warning once per name, during a save, if loading will reject the object."""
    if name in _said:
        return
    _said.add(name)
    why = _refusal(raw)
    if why is not None:
        logger.warning(
            "%s can only be loaded with StorageReader(..., trusted=True), or after its classes are allowed with "
            "torch.serialization.add_safe_globals (%s)",
            name,
            why,
        )


def _path(named: Any) -> str:
    """Return the name that torch's reader uses for an entry of `get_safe_globals()`."""
    return str(named[1]) if isinstance(named, tuple) else f"{named.__module__}.{named.__qualname__}"


def _refusal(raw: memoryview) -> str | None:
    with _lock, contextlib.closing(io.BytesIO(raw)) as file:
        named = torch.serialization.get_safe_globals()  # the user's entries stay allowed
        double = [one for one in named if _path(one) in {_path(stand_in) for stand_in in STAND_INS}]
        if double:  # if two entries have the same name, torch's reader uses either of them
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([one for one in named if one not in double])
        try:
            with torch.serialization.safe_globals([*(one for one in HARMLESS if one not in named), *STAND_INS]):
                torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # hostile bytes can cause any error
            found = REFUSED.search(str(error))
            return (found[0] if found else next(iter(str(error).splitlines()), type(error).__name__))[:300]
        finally:
            torch.serialization.add_safe_globals(double)
    return None
