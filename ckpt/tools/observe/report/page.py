"""The report page of a run, for `ckpt report -o`. Other modules compute the numbers on the page.

    Statement (ckpt.tools.observe.goodput.accounting), Chronicle (ckpt.tools.observe.report.chronicle)
        -> page -> one self-contained HTML file

Data of the run is always text, never markup, because it passes through `ckpt.tools.observe.report.svg.esc`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.core.cadence.ledger import LandedSave
from ckpt.guard.report import in_words
from ckpt.tools.observe.goodput.breakdown import Statement
from ckpt.tools.observe.report import figures, style, tables
from ckpt.tools.observe.report.chronicle import BUCKETS, Chronicle, ShownEvent
from ckpt.tools.observe.report.figures import NAMES, TIERS, clip, share
from ckpt.tools.observe.report.svg import Plot, clock, count, decades, esc, legend, linear, seconds, stacked, table
from ckpt.units import count_of, decimal, duration, moment

PARTS_OF = ("part", "time", "of wall-clock", "per interruption")
ASKED = "requested saves"
MOST_DOTS = 400  # maximum points per tier in a chart


@dataclass(frozen=True)
class Subject:
    """The input of a page. `problems`: files that could not be read. `made`: time of the page, seconds since 1970.
    `stored`: steps of the existing checkpoints."""

    url: str
    statement: Statement
    chronicle: Chronicle
    stored: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    made: float = 0.0
    version: str = ""


def page(one: Subject) -> str:
    """Return the HTML of the whole page."""
    parts = [_head(one), _problems(one.problems)]
    if one.chronicle.accounts:
        parts += [_summary(one.statement), _time(one.statement), _timeline(one.chronicle)]
        parts += [f'<div class="halves">{stalls(one.chronicle)}{lag(one.chronicle)}</div>']
        parts += [
            tables.interruptions(one.statement),
            tables.faults(one.chronicle),
            tables.asked(one.chronicle),
            tables.restores(one.chronicle),
        ]
        parts += [tables.cadence(one.chronicle), tables.notes(one.statement)]
    else:
        parts += [stored(one), tables.faults(one.chronicle), tables.asked(one.chronicle)]
    parts.append(
        f"<footer>Made {esc(moment(one.made))} by everystep {esc(one.version)} from the recorded metrics of the run."
        " Point at a chart, or focus it and use the arrow keys, to read its values.</footer>"
    )
    return style.whole(f"Report: {esc(one.url, 120)}", "\n".join(filter(None, parts)))


# -- top of the page --


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
    more = f"<p>{len(problems) - 12:,} more</p>" if len(problems) > 12 else ""
    return f'<div class="warn" role="note">{"".join(f"<p>{esc(text, 600)}</p>" for text in problems[:12])}{more}</div>'


def _summary(found: Statement) -> str:
    starts = ("starts", f"{found.incarnations:,}")
    return f"<section><h2>In short</h2>{table(('', ''), [*figures.summary(found), starts], kind='parts')}</section>"


# -- breakdown of the time --


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
        f" starting when the first start was ready. Lost is the time of interruptions and saving.</p>"
        f"{stacked(label, bars)}{legend((name, NAMES[name]) for name in shown)}"
        f"{table(PARTS_OF, figures.parts(found), range(1, 4), 'parts')}</section>"
    )


def _timeline(found: Chronicle) -> str:
    """Return a chart of the current step over time."""
    steps = [point[1] for point in found.curve if point is not None]
    if not steps:
        return ""
    y = linear(min(steps), max(steps), count, 4)
    plot = Plot(clock(found.begin, found.until), y, 210)
    few = len(found.starts) <= 60
    if few:
        for start in found.starts:
            who = f"{count_of(start.one.world, 'rank')}, process {start.one.pid} on {start.one.host}"
            plot.rule(start.at, "begin", f"{moment(start.at)}\nstart {start.one.term}, {who}")
        for one in found.incidents:
            what = f"save {in_words(one.kind, asked=True)}" if one.asked else in_words(one.kind)
            plot.rule(one.at, "asked" if one.asked else "fault", f"{moment(one.at)}, {what}\n{clip(one.text)}")
    plot.line([None if p is None else (p[0], float(p[1])) for p in found.curve], "one")
    dots = [r for r in found.restores if r.one.step is not None]
    for each in dots[:: max(1, math.ceil(len(dots) / 300))]:
        came = each.one
        text = f"{moment(each.at)}\nrestored step {came.step:,} from {clip(came.source)} in {duration(came.seconds)}"
        plot.dot(each.at + came.seconds, float(came.step or 0), "restore", text, 4 if few else 2.2)
    drawn = [("restore", "restores")] if dots else []
    rules = (("begin", "starts", found.starts), ("fault", "faults", found.faults), ("asked", ASKED, found.asked))
    plot.label = (
        f"Steps over time: from {min(steps):,} to {max(steps):,}, {count_of(len(found.starts), 'start')},"
        f" {count_of(len(dots), 'restore')},"
        f" {count_of(len(found.faults), 'fault')}, {len(found.asked):,} {ASKED}."
    )
    says = "The current step of training. It drops when a restore goes back."
    key = legend(drawn, [(kind, name) for kind, name, some in rules if some and few])
    return f'<section><h2>Timeline</h2><p class="soft">{says}</p>{plot.render()}{key}</section>'


# -- cost of saving --


def stalls(found: Chronicle) -> str:
    title = "<h2>How long training waited for a save</h2>"
    total = sum(found.stalls.values())
    if not total:
        says = "No data about single saves: none was taken, or an older version recorded the metrics."
        return f'<section>{title}<p class="soft">{says}</p></section>'
    half, most = _quantile(found.stalls, 0.5), _quantile(found.stalls, 0.99)
    low, high = min(found.stalls), max(found.stalls)
    x = decades(_edge(low), _edge(high + 1), seconds)
    plot = Plot(x, linear(0, max(found.stalls.values()), count, 4), 180)
    for bucket in BUCKETS:
        if number := found.stalls.get(bucket):
            waited = f"{duration(_edge(bucket))} to {duration(_edge(bucket + 1))}"
            text = f"{waited}\n{count_of(number, 'save')}, {share(number, total)}"
            plot.column(_edge(bucket), _edge(bucket + 1) * 0.985, number, "one", text)
    says = (
        f"Half of {count_of(total, 'save')} blocked training for less than {duration(half)}, "
        f"99 % for less than {duration(most)}."
    )
    plot.label = f"Number of saves by how long training waited. {says}"
    return f'<section>{title}<p class="soft">{says}</p>{plot.render()}</section>'


def _edge(bucket: int) -> float:
    return float(10 ** (bucket / 8))


def _quantile(stalls: dict[int, int], share: float) -> float:
    """Return the upper edge of the bucket that contains this quantile."""
    left = share * sum(stalls.values())
    for bucket in sorted(stalls):
        left -= stalls[bucket]
        if left <= 0:
            return _edge(bucket + 1)
    return 0.0


def _tiers(landed: Iterable[ShownEvent[LandedSave]]) -> dict[str, list[ShownEvent[LandedSave]]]:
    found: dict[str, list[ShownEvent[LandedSave]]] = {}
    for done in landed:
        found.setdefault(done.one.url, []).append(done)
    return found


def lag(found: Chronicle) -> str:
    title = "<h2>How long a save took to be durable</h2>"
    tiers = _tiers(found.landed)
    good = {url: [d for d in saves if not d.one.failed] for url, saves in tiers.items()}
    times = [d.one.seconds for saves in good.values() for d in saves]
    if not times:
        return f'<section>{title}<p class="soft">{_none_landed(found, tiers)}</p></section>'
    begin, until = found.begin, max(found.until, found.begin + 1e-3)
    least = max(1e-3, min(times))
    plot = Plot(clock(begin, until, 4), decades(least, max(times), seconds), 180)
    lines = []
    for number, (url, saves) in enumerate(good.items()):
        failed = len(tiers[url]) - len(saves)
        if saves:
            lasted, behind = sorted(d.one.seconds for d in saves), max(d.one.behind for d in saves)
            late = lasted[min(len(lasted) - 1, int(0.99 * len(lasted)))]
            middle = duration(statistics.median(lasted))
            raw, kept = sum(d.one.nbytes for d in saves), sum(d.one.stored for d in saves)
            lines.append(
                (url, f"{len(lasted):,}", f"{failed:,}", middle, duration(late), f"{behind:,}", decimal(raw),
                 f"{decimal(kept)}, {share(kept, raw)}")
            )  # fmt: skip
        if number < len(TIERS):
            for d in saves[:: max(1, math.ceil(len(saves) / MOST_DOTS))]:
                more = f"{duration(d.one.seconds)}, training was {count_of(d.one.behind, 'step')} further by then"
                plot.dot(
                    d.at, d.one.seconds, TIERS[number], f"step {d.one.step:,}, {moment(d.at)}\n{clip(url)}\n{more}", 3
                )
    plot.label = "Seconds from the request to the commit, over time. " + "; ".join(
        f"{line[0]}: {line[3]} usually, {line[4]} at the 99th percentile" for line in lines
    )
    titles = ("tier", "saves", "failed", "usually", "99 %", "behind", "state", "stored")
    return (
        f'<section>{title}<p class="soft">Time from the request to the commit of each recorded save.'
        f" Behind: most steps that training did in this time.</p>{plot.render()}"
        f"{legend(zip(TIERS, (clip(url, 60) for url in good), strict=False))}"
        f"{table(titles, lines, range(1, 8))}</section>"
    )


def _none_landed(found: Chronicle, tiers: dict[str, list[ShownEvent[LandedSave]]]) -> str:
    if tiers:
        return f"None of {count_of(sum(map(len, tiers.values())), 'save')} was committed."
    saves = [(url, s) for account in found.accounts for url, s in account.saves.items()]
    if not saves:
        return "Nothing has been saved to a durable tier yet."
    count = sum(s.count for _, s in saves)
    lasted = math.fsum(s.seconds for _, s in saves) / count if count else 0.0
    longest = max(s.longest_s for _, s in saves)
    return (
        f"{count_of(count, 'save')} took {duration(lasted)} on average, {duration(longest)} at most. The version that "
        "recorded these metrics did not record single saves."
    )


def stored(one: Subject) -> str:
    steps = sorted(one.stored)
    says = f"{len(steps):,}: step " + ", ".join(f"{s:,}" for s in steps[-12:]) if steps else "none"
    return f'<section><h2>Existing checkpoints</h2><p class="soft">{esc(says)}</p></section>'
