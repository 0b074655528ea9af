"""A picture of the figures as one SVG: time that training loses, time until durable, and duration of restores.

    python benchmarks/figures.py --report FILE.json --picture FILE.svg

The code writes SVG itself, since a few bars do not justify a plotting library. It has no background, and its colours
are readable on white and on dark pages.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

Json = dict[str, Any]

OURS = "everystep"
PANELS = {"lost_s": "lost by training", "durable_s": "save to durable", "cold_s": "restore, cold"}
TEXT, BARS, OURS_COLOUR = "#787b80", "#9a9da3", "#2476d6"

NAMES, PANEL, VALUE, GAP = 190, 170, 62, 14  # widths: names, bars of a panel, the figure behind a bar, gaps
ROW, BAR, TOP, BOTTOM = 24, 14, 40, 50  # heights
LOG_FROM = 20.0  # ratio of largest to smallest value from which bars would be too short to see
FIVES = (1.0, 2.0, 5.0)


def draw(found: Json) -> str:
    """Draw a summary of `figures.py`: libraries that finished, with the least lost time first."""
    libraries = {name: one for name, one in found["libraries"].items() if "lost_s" in one["figures"]}
    names = sorted(libraries, key=lambda name: libraries[name]["figures"]["lost_s"])
    bottom = TOP + ROW * len(names)
    parts = [label(name, TOP + ROW * i) for i, name in enumerate(names)]
    starred = False
    for place, (key, title) in enumerate(PANELS.items()):
        left = NAMES + place * (PANEL + VALUE + GAP)
        values = {name: libraries[name]["figures"][key] for name in names if key in libraries[name]["figures"]}
        if not values:
            continue
        scale = Scale(list(values.values()))
        parts += [text(left, TOP - 20, title + (", log scale" if scale.log else ""), weight="bold")]
        parts += axis(scale, left, bottom)
        for i, name in enumerate(names):
            if name in values:
                star = key == "durable_s" and not libraries[name]["fsync"]
                starred |= star
                parts += bar(scale, left, TOP + ROW * i, values[name], name == OURS, "*" if star else "")
    notes = "Medians; shorter is better." + (" * complete before it is on the disk (no fsync)." if starred else "")
    parts.append(text(0, bottom + BOTTOM - 8, notes, size=11))
    width, height = NAMES + len(PANELS) * (PANEL + VALUE + GAP) - GAP, bottom + BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" '
            f'fill="{TEXT}" role="img">',
            f"<title>{escape(said(libraries, names))}</title>",
            *parts,
            "</svg>\n",
        ]
    )


class Scale:
    """Map seconds to the length of a bar: linear, or logarithmic if values differ too much.

    Values of 0 or less (time gained, by noise) have no bar.
    """

    def __init__(self, values: list[float]) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        self.most = max(positive)
        self.log = self.most / min(positive) > LOG_FROM
        self.least = 10 ** math.floor(math.log10(min(positive) * 0.7)) if self.log else 0.0

    def length(self, value: float) -> float:
        if value <= self.least:
            return 0.0
        if self.log:
            return PANEL * math.log(value / self.least) / math.log(self.most / self.least)
        return PANEL * value / self.most

    def ticks(self) -> list[float]:
        """Return powers of ten, or at most five round numbers."""
        if self.log:
            first, last = round(math.log10(self.least)), math.floor(math.log10(self.most))
            return [10.0**power for power in range(first, last + 1)]
        about = self.most / 4
        power = 10 ** math.floor(math.log10(about))
        step = next((five * power for five in FIVES if five * power >= about), 10 * power)
        return [step * i for i in range(int(self.most / step) + 1)]


def axis(scale: Scale, left: float, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = left + scale.length(tick)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="{TEXT}" stroke-opacity="0.2"/>'
        )
        parts.append(text(x, bottom + 14, tick_label(tick), size=10, anchor="middle"))
    return parts


def bar(scale: Scale, left: float, top: float, value: float, ours: bool, mark: str) -> list[str]:
    length, colour = scale.length(value), OURS_COLOUR if ours else BARS
    y = top + (ROW - BAR) / 2
    return [
        f'<rect x="{left}" y="{y}" width="{max(length, 1.0):.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
        text(left + length + 5, top + ROW / 2 + 4, seconds(value) + mark, size=11, ours=ours),
    ]


def label(name: str, top: float) -> str:
    return text(NAMES - 10, top + ROW / 2 + 4, name, anchor="end", ours=name == OURS)


def text(
    x: float, y: float, what: str, *, size: int = 12, anchor: str = "start", weight: str = "normal", ours: bool = False
) -> str:
    if ours:
        weight = "bold"
    fill = f' fill="{OURS_COLOUR}"' if ours else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"{fill}>'
        f"{escape(what)}</text>"
    )


def tick_label(value: float) -> str:
    return f"{value * 1e3:g} ms" if 0 < value < 0.1 else f"{value:g} s"


def seconds(value: float) -> str:
    return (
        f"{value * 1e3:.0f} ms" if abs(value) < 0.0995 else f"{value:.2f} s" if abs(value) < 9.95 else f"{value:.1f} s"
    )


def said(libraries: Json, names: list[str]) -> str:
    """Return the figures in words, for screen readers."""
    rows = []
    for name in names:
        figures = libraries[name]["figures"]
        rows.append(f"{name}: " + ", ".join(f"{t} {seconds(figures[k])}" for k, t in PANELS.items() if k in figures))
    return "; ".join(rows)
