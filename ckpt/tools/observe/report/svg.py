"""Charts as SVG in HTML. They are drawn by this module, so that a page needs no other file.

Horizontal coordinates are percentages and vertical ones pixels, so a chart fills the available width without stretching
its text. Lines are paths in a nested SVG that is stretched, but not its strokes. Colours are CSS classes.

All text passes through `esc`, so it cannot be markup. A mark with a `tip` shows this text when the user points at it or
selects it with the arrow keys.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ckpt.units import duration

CLIP = 300  # maximum characters of a text that comes from a run
WIDE = 1000  # width of the coordinate system in a stretched chart


def esc(text: object, most: int = CLIP) -> str:
    """Escape text for HTML and its attributes: without markup and control characters, and with limited length."""
    plain = str(text)
    plain = plain if len(plain) <= most else f"{plain[:most]}…"
    shown = "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in plain
    )
    return html.escape(shown.encode("utf-8", "backslashreplace").decode(), quote=True)


def tip(text: str) -> str:
    return f' data-tip="{esc(text, 600)}"' if text else ""


# -- scales --


@dataclass(frozen=True)
class Scale:
    """Maps values to a share of the axis, from 0 to 1. `ticks`: values with labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    log: bool = False

    def at(self, value: float) -> float:
        if self.high <= self.low:
            return 0.5
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))


def linear(low: float, high: float, name: Callable[[float], str], most: int = 5) -> Scale:
    """Return a linear scale whose ends are round numbers."""
    if high <= low:
        high = low + 4
    raw = (high - low) / most
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(f * base for f in (1, 2, 5, 10) if f * base >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [n * step for n in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], tuple((tick, name(tick)) for tick in ticks))


def decades(low: float, high: float, name: Callable[[float], str]) -> Scale:
    """Return a logarithmic scale whose ends are powers of ten."""
    low = max(low, 1e-9)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(max(high, low)) - 1e-9)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    ticks = [10.0**n for n in range(first, last + 1, stride)]
    return Scale(10.0**first, 10.0**last, tuple((tick, name(tick)) for tick in ticks), log=True)


def seconds(value: float) -> str:
    """Format a label of a logarithmic scale of seconds, whose labels are powers of ten."""
    return f"{value:g} s" if 1 <= value < 10_000 else duration(value)


_CLOCK_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400)


def clock(begin: float, until: float, most: int = 6) -> Scale:
    """Return a scale of time, with local times as labels."""
    span = max(1e-3, until - begin)
    day = 86400.0
    step = next((float(s) for s in _CLOCK_STEPS if span / s <= most), day * math.ceil(span / day / most))
    try:
        shift = time.localtime(begin).tm_gmtoff
        first = math.ceil((begin + shift) / step) * step - shift
        form = "%H:%M:%S" if step < 60 else "%H:%M" if span < 20 * 3600 else "%b %-d %H:%M" if step < day else "%b %-d"
        ticks = [first + n * step for n in range(most + 1) if first + n * step <= until]
        return Scale(begin, until, tuple((tick, time.strftime(form, time.localtime(tick))) for tick in ticks))
    except (OverflowError, OSError, ValueError):  # the clock of the machine was never set
        return Scale(begin, until)


def count(value: float) -> str:
    """Format a count: 950, 12k, 1.5M."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (10 * size if name == "k" else size):
            return f"{value / size:.3g}{name}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


# -- plots --


def pc(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def px(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


@dataclass
class Plot:
    """A chart with two axes. `label`: description for screen readers."""

    x: Scale
    y: Scale
    height: int
    label: str = ""
    marks: list[str] = field(default_factory=list)

    def down(self, value: float) -> float:
        return 6 + (self.height - 6) * (1 - self.y.at(value))

    def column(self, low: float, high: float, top: float, kind: str, text: str = "") -> None:
        """Draw a rectangle between two values, from 0 up to `top`."""
        left, right, y = self.x.at(low), self.x.at(high), self.down(top)
        where = f'x="{pc(left)}" width="{pc(right - left)}" y="{px(y)}" height="{px(max(0.4, self.down(0) - y))}"'
        self.marks.append(f'<rect class="{kind}" {where}{tip(text)}/>')

    def line(self, points: Iterable[tuple[float, float] | None], kind: str) -> None:
        """Draw a line that is interrupted wherever a point is None."""
        words, pen = [], "M"
        for point in points:
            if point is None:
                pen = "M"
                continue
            words.append(f"{pen}{WIDE * self.x.at(point[0]):.1f} {self.down(point[1]):.1f}")
            pen = "L"
        if words:
            path = f'<path class="line {kind}" d="{"".join(words)}"/>'
            whole = f'viewBox="0 0 {WIDE} {self.height}" preserveAspectRatio="none" width="100%" height="{self.height}"'
            self.marks.append(f"<svg {whole}>{path}</svg>")

    def dot(self, x: float, y: float, kind: str, text: str = "", r: float = 3.5) -> None:
        where = f'cx="{pc(self.x.at(x))}" cy="{px(self.down(y))}" r="{r}"'
        self.marks.append(f'<circle class="dot {kind}" {where}{tip(text)}/>')

    def rule(self, x: float, kind: str, text: str = "") -> None:
        """Draw a vertical line. A wider invisible line makes it easy to point at."""
        at = pc(self.x.at(x))
        where = f'x1="{at}" x2="{at}" y1="0" y2="{self.height}"'
        self.marks.append(f'<line class="rule {kind}" {where}/><line class="hit" {where}{tip(text)}/>')

    def render(self) -> str:
        grid, names = [], []
        for value, text in self.y.ticks:
            y = px(self.down(value))
            grid.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
            names.append(f'<text class="tick end" x="52" y="{px(self.down(value) + 4)}">{esc(text)}</text>')
        foot = self.height + 16
        for number, (value, text) in enumerate(self.x.ticks):
            share = self.x.at(value)
            anchor = "start" if share < 0.06 else "end" if share > 0.94 else "middle"
            kind = "tick" if number % 2 == 0 else "tick wide"
            grid.append(f'<text class="{kind} {anchor}" x="{pc(share)}" y="{foot}">{esc(text)}</text>')
        whole = self.height + 24
        return (
            f'<div class="plot"><svg class="axis" width="56" height="{whole}" aria-hidden="true">{"".join(names)}</svg>'
            f'<svg class="area" width="100%" height="{whole}" role="img" tabindex="0" '
            f'aria-label="{esc(self.label, 900)}">'
            f"{''.join(grid)}{''.join(self.marks)}</svg></div>"
        )


# -- bars and tables --


def stacked(label: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """Return a bar that fills the width. `parts`: (class, size, tip) of each part."""
    total = math.fsum(size for _, size, _ in parts) or 1.0
    marks, left = [], 0.0
    for kind, size, text in parts:
        share = size / total
        where = f'x="{pc(left)}" y="0" width="{pc(share)}" height="34"'
        marks.append(f'<rect class="{kind} cell" {where}{tip(text)}/>')
        left += share
    whole = f'width="100%" height="34" role="img" tabindex="0" aria-label="{esc(label, 900)}"'
    return f'<svg class="area bar" {whole}>{"".join(marks)}</svg>'


def table(titles: Sequence[str], lines: Sequence[Sequence[object]], numbers: Iterable[int] = (), kind: str = "") -> str:
    """Return a table. `numbers`: indices of the columns that are aligned to the right. `kind`: a CSS class."""
    right = set(numbers)

    def cells(word: str, values: Sequence[object]) -> str:
        scope = ' scope="col"' if word == "th" else ""
        return "".join(
            f"<{word}{scope}{' class=n' if at in right else ''}>{esc(value)}</{word}>"
            for at, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    kind = kind or "when" * (titles[:1] == ("when",))
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{esc(", ".join(titles))}"><table><thead>'
        f"<tr>{cells('th', titles)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def legend(parts: Iterable[tuple[str, str]], rules: Iterable[tuple[str, str]] = ()) -> str:
    """Return a legend. `parts`: (class, name) of areas and dots. `rules`: (class, name) of vertical lines."""
    marks = [(f'<rect class="{kind}" width="12" height="12" rx="2"/>', name) for kind, name in parts]
    marks += [(f'<line class="rule {kind}" x1="6" x2="6" y1="0" y2="12"/>', name) for kind, name in rules]
    items = "".join(
        f'<li><svg width="12" height="12" aria-hidden="true">{mark}</svg>{esc(name, 60)}</li>' for mark, name in marks
    )
    return f'<ul class="legend">{items}</ul>' if items else ""
