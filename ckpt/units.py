"""Durations, sizes and moments, as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

LEAST_S = 0.5e-4  # that is shown
_UNITS = ((1.0, 1e-3, "ms"), (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (72 * 3600.0, 3600.0, "h"))


def duration(seconds: float) -> str:
    """As 4.1 ms, 41 s, 3.2 h; what rounds to 0.0 ms is 0 s."""
    if abs(seconds) < LEAST_S:
        return "0 s"
    if not math.isfinite(seconds):
        return "for ever" if seconds > 0 else "unknown"
    unit, name = next(((unit, name) for most, unit, name in _UNITS if abs(seconds) < most), (86400.0, "d"))
    value = seconds / unit
    return f"{value:.1f} {name}" if abs(value) < 9.95 else f"{value:,.0f} {name}"


def decimal(nbytes: float) -> str:
    """Bytes, as 999 B, 4.1 kB, 1.2 GB."""
    value, names = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while abs(value) >= 999.5 and len(names) > 1:
        value, names = value / 1000, names[1:]
    return f"{value:.1f} {names[0]}" if abs(value) < 99.95 and names[0] != "B" else f"{value:,.0f} {names[0]}"


def moment(wall: float) -> str:
    """A moment, in seconds since 1970, as the clock on the wall here shows it."""
    try:
        return datetime.fromtimestamp(wall, UTC).astimezone().strftime("%F %T")
    except (OverflowError, OSError, ValueError):
        return "?"
