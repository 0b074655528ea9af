"""Format counts, durations, sizes and times for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime

LEAST_S = 0.5e-4  # seconds; a shorter duration is shown as 0 s
_UNITS = ((1.0, 1e-3, "ms"), (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (72 * 3600.0, 3600.0, "h"))


def duration(seconds: float) -> str:
    """Format a duration, for example 4.1 ms, 41 s or 3.2 h. Durations that round to 0.0 ms become "0 s"."""
    if abs(seconds) < LEAST_S:
        return "0 s"
    if not math.isfinite(seconds):
        return "for ever" if seconds > 0 else "unknown"
    unit, name = next(((unit, name) for most, unit, name in _UNITS if abs(seconds) < most), (86400.0, "d"))
    value = seconds / unit
    return f"{value:.1f} {name}" if abs(value) < 9.95 else f"{value:,.0f} {name}"


def count_of(number: float, what: str) -> str:
    """Format a number of things, for example 1 step or 2,000 steps."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def are(number: int) -> str:
    """Return the verb "is" or "are" for a number of things."""
    return "is" if number == 1 else "are"


def decimal(nbytes: float) -> str:
    """Format a number of bytes, for example 999 B, 4.1 kB or 1.2 GB."""
    value, names = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while abs(value) >= 999.5 and len(names) > 1:
        value, names = value / 1000, names[1:]
    return f"{value:.1f} {names[0]}" if abs(value) < 99.95 and names[0] != "B" else f"{value:,.0f} {names[0]}"


def moment(wall: float) -> str:
    """Format a time in seconds since 1970 as local date and time."""
    try:
        return datetime.fromtimestamp(wall, UTC).astimezone().strftime("%F %T")
    except (OverflowError, OSError, ValueError):
        return "?"
