"""One page about a run, to look at and to show: `ckpt report -o`. All figures in it are found elsewhere.

    Statement (ckpt.goodput.accounting), Chronicle (ckpt.report.chronicle)
        -> page -> one file of HTML that needs no other

What comes from the run is text, never markup: it goes through `ckpt.report.svg.esc`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt.goodput.breakdown import Statement
from ckpt.report import figures, saves, style, svg, tables
from ckpt.report.chronicle import Chronicle
from ckpt.report.labels import NAMES, Subject, clip, share
from ckpt.report.svg import Plot, clock, esc, legend, linear, stacked, table
from ckpt.units import duration, moment

PARTS_OF = ("part", "time", "of wall-clock", "per interruption")


def page(one: Subject) -> str:
    """All of it."""
    parts = [_head(one), _problems(one.problems)]
    if one.chronicle.accounts:
        parts += [_summary(one.statement), _time(one.statement), _timeline(one.chronicle)]
        parts += [f'<div class="halves">{saves.stalls(one.chronicle)}{saves.lag(one.chronicle)}</div>']
        parts += [
            tables.interruptions(one.statement),
            tables.faults(one.chronicle),
            tables.restores(one.chronicle),
        ]
        parts += [tables.cadence(one.chronicle), tables.notes(one.statement)]
    else:
        parts += [saves.stored(one), tables.faults(one.chronicle)]
    parts.append(
        f"<footer>Made {esc(moment(one.made))} by everystep {esc(one.version)} from what the run has written down."
        " Point at a picture, or focus it and use the arrow keys, to read its figures.</footer>"
    )
    return style.whole(f"Report: {esc(one.url, 120)}", "\n".join(filter(None, parts)))


# -- the top --


def _head(one: Subject) -> str:
    last = one.chronicle.accounts[-1:]
    facts = [
        f"{account.world} {'rank' if account.world == 1 else 'ranks'}, last on {account.host or '?'}"
        for account in last
    ]
    facts += [f"{name} {text}" for account in last for name, text in sorted(account.versions.items())[:6]]
    items = "".join(f"<li>{esc(fact, 120)}</li>" for fact in facts)
    return f'<header><h1>Checkpoint report</h1><p class="run">{esc(one.url)}</p><ul class="facts">{items}</ul></header>'


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    more = f"<p>and {len(problems) - 12:,} more</p>" if len(problems) > 12 else ""
    return f'<div class="warn" role="note">{"".join(f"<p>{esc(text, 600)}</p>" for text in problems[:12])}{more}</div>'


def _summary(found: Statement) -> str:
    starts = ("starts", f"{found.incarnations:,}")
    return f"<section><h2>In short</h2>{table(('', ''), [*figures.summary(found), starts], kind='parts')}</section>"


# -- where the time went --


def _time(found: Statement) -> str:
    cost, wall = found.cost, found.wall_s
    seconds = {
        "trained": found.productive_s, "saving": found.saving_s, "recompute": cost.recompute, "restore": cost.restore,
        "restart": cost.restart, "perceive": cost.perceive, "paused": found.paused_s, "other": found.other_s,
    }  # fmt: skip
    shown = {name: value for name, value in seconds.items() if value > 0}
    if wall <= 0 or not shown or not (found.steps or found.interruptions):
        return ""
    bars = [(name, value, f"{NAMES[name]}: {duration(value)}, {share(value, wall)}") for name, value in shown.items()]
    label = f"Parts of {duration(wall)} wall-clock time: " + "; ".join(text for _, _, text in bars)
    return (
        f"<section><h2>Where the time went</h2><p class=soft>All parts add up to {duration(wall)} of wall-clock time,"
        f" from when the first start was ready. Invalid is what interruptions and saving took.</p>"
        f"{stacked(label, bars)}{legend((name, NAMES[name]) for name in shown)}"
        f"{table(PARTS_OF, figures.parts(found), range(1, 4), 'parts')}</section>"
    )


def _timeline(found: Chronicle) -> str:
    """The step that training was at, over time."""
    steps = [point[1] for point in found.curve if point is not None]
    if not steps:
        return ""
    y = linear(min(steps), max(steps), svg.count, 4)
    plot = Plot("", clock(found.begin, found.until), y, 210)
    few = len(found.starts) <= 60
    if few:
        for start in found.starts:
            who = f"{start.one.world} ranks, process {start.one.pid} on {start.one.host}"
            plot.rule(start.at, "begin", f"{moment(start.at)}\nstart {start.one.epoch}, {who}")
        for fault in found.incidents:
            text = f"{moment(fault.at)}, {fault.kind}\n{clip(fault.text)}"
            plot.rule(fault.at, "fault", text)
    plot.line([None if p is None else (p[0], float(p[1])) for p in found.curve], "one")
    dots = [r for r in found.restores if r.one.step is not None]
    for each in dots[:: max(1, math.ceil(len(dots) / 300))]:
        one = each.one
        text = f"{moment(each.at)}\nrestored step {one.step:,} from {clip(one.source)} in {duration(one.seconds)}"
        plot.dot(each.at + one.seconds, float(one.step or 0), "restore", text, 4 if few else 2.2)
    marks = "dots: restores" + ("; dotted lines: starts; solid lines: faults" if few else "")
    plot.label = (
        f"Steps over time: from {min(steps):,} to {max(steps):,}, {len(found.starts):,} starts, {len(dots):,} restores,"
        f" {len(found.incidents):,} faults."
    )
    says = f"The step that training was at: where it drops, a restore went back ({marks})."
    return f'<section><h2>Timeline</h2><p class="soft">{says}</p>{plot.render()}</section>'
