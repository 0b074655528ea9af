"""Parse numbers with units on a command line."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from ckpt.core.cadence.cadence import DAY_S

_SI = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_IEC = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", 1)}
BYTES = {"": 1.0, "B": 1.0} | _SI | _IEC | {f"{name}B": value for name, value in (_SI | _IEC).items()}
BYTES |= {form(name): value for name, value in BYTES.items() for form in (str.lower, str.upper)}
UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "duration": ("for example 90s or 3.1h", {"": 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": DAY_S}),
    "share": ("for example 0.01 or 1%", {"": 1, "%": 0.01}),
    "count": ("for example 70B", {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}),
    "size": ("for example 5.7TB", BYTES),
    "rate": ("for example 25GB or 400Gbit", BYTES | {f"{name}bit": value / 8 for name, value in _SI.items()}),
}


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """A number with a unit. `kind`: a key of `UNITS`."""

    def __init__(self, kind: str) -> None:
        self.name, self._kind = kind, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        example, units = UNITS[self._kind]
        match = re.fullmatch(r"([0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?) *([A-Za-z%]*)(?:/s)?", value.strip())
        try:
            assert match is not None
            number = float(match[1]) * units[match[2]]
        except (AssertionError, KeyError, ValueError):
            self.fail(f"{value!r} is not a {self._kind}: expected a number with a unit, {example}", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is too large", param, ctx)
        return number


class ByteSize(Quantity):
    """A whole number of bytes, at least one."""

    def __init__(self) -> None:
        super().__init__("size")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size = int(value if isinstance(value, int) else super().convert(value, param, ctx))
        if size < 1:
            self.fail(f"{value!r} is not a size: give at least one byte, for example 500MB or 2GiB", param, ctx)
        return size
