"""What saving took, and what is stored: pictures of a report page. See `ckpt.report.page`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from ckpt.goodput.breakdown import decimal, duration, moment
from ckpt.goodput.ledger import LandedSave
from ckpt.report.chronicle import BUCKETS, Chronicle, ShownEvent
from ckpt.report.svg import Plot, clock, count, decades, esc, legend, linear, rows, seconds, table
from ckpt.report.words import STROKES, TIERS, StoredBytes, Subject, clip, share

MOST_DOTS, MOST_LINES = 400, 120  # of a picture, for each tier: dots, and dots that a line goes through


def stalls(found: Chronicle) -> str:
    title = "<h2>How long training waited for a save</h2>"
    total = sum(found.stalls.values())
    if not total:
        says = "Nothing is known of single saves: none was taken, or an older version kept the ledger."
        return f'<section>{title}<p class="soft">{says}</p></section>'
    half, most = _quantile(found.stalls, 0.5), _quantile(found.stalls, 0.99)
    low, high = min(found.stalls), max(found.stalls)
    x = decades(_edge(low), _edge(high + 1), seconds)
    plot = Plot("", x, linear(0, max(found.stalls.values()), count, 4), 180)
    for bucket in BUCKETS:
        if number := found.stalls.get(bucket):
            text = (
                f"{duration(_edge(bucket))} to {duration(_edge(bucket + 1))}\n{number:,} saves, {share(number, total)}"
            )
            plot.column(_edge(bucket), _edge(bucket + 1) * 0.985, 0, number, "one", text)
    says = f"Of {total:,} saves half took less than {duration(half)} from training, 99 % less than {duration(most)}."
    plot.label = f"Number of saves by how long training waited. {says}"
    return f'<section>{title}<p class="soft">{says}</p>{plot.render()}</section>'


def _edge(bucket: int) -> float:
    return float(10 ** (bucket / 8))


def _quantile(stalls: dict[int, int], share: float) -> float:
    """The upper edge of the bucket that it lies in."""
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
    wide = max(times) > 20 * least
    y = decades(least, max(times), seconds) if wide else linear(0, max(times), duration, 4)
    plot = Plot("", clock(begin, until, 4), y, 180)
    lines = []
    for number, (url, saves) in enumerate(good.items()):
        failed = len(tiers[url]) - len(saves)
        if saves:
            lasted, behind = sorted(d.one.seconds for d in saves), max(d.one.behind for d in saves)
            late = lasted[min(len(lasted) - 1, int(0.99 * len(lasted)))]
            middle = duration(statistics.median(lasted))
            lines.append((url, f"{len(lasted):,}", f"{failed:,}", middle, duration(late), f"{behind:,}"))
        if number < len(TIERS):
            for d in _fewer(saves, MOST_DOTS):
                more = f"{duration(d.one.seconds)}, training {d.one.behind:,} steps further by then"
                plot.dot(
                    d.at, d.one.seconds, TIERS[number], f"step {d.one.step:,}, {moment(d.at)}\n{clip(url)}\n{more}", 3
                )
    plot.label = "Seconds from the order to write until committed, over time. " + "; ".join(
        f"{url}: {middle} usually, {late} at the 99th percentile" for url, _, _, middle, late, _ in lines
    )
    titles = ("tier", "saves", "failed", "usually", "99 %", "behind")
    return (
        f'<section>{title}<p class="soft">From the order to write until it was committed, of each save that the ledger'
        f" kept. Behind: how many steps training had gone on by then, at most.</p>{plot.render()}"
        f"{_tier_legend(good)}{table(titles, lines, range(1, 6))}</section>"
    )


def _none_landed(found: Chronicle, tiers: dict[str, list[ShownEvent[LandedSave]]]) -> str:
    if tiers:
        return f"None of {sum(map(len, tiers.values())):,} saves was committed."
    saves = [(url, s) for account in found.accounts for url, s in account.saves.items()]
    if not saves:
        return "Nothing has been saved to a durable tier yet."
    count = sum(s.count for _, s in saves)
    lasted = math.fsum(s.seconds for _, s in saves) / count if count else 0.0
    longest = max(s.longest_s for _, s in saves)
    return (
        f"{count:,} saves took {duration(lasted)} on average, {duration(longest)} at most. The version that kept this"
        " ledger wrote nothing down of single ones."
    )


def _tier_legend(tiers: Iterable[str]) -> str:
    return legend(zip(TIERS, (clip(url, 60) for url in tiers), strict=False))


def _fewer(saves: Sequence[ShownEvent[LandedSave]], most: int) -> Sequence[ShownEvent[LandedSave]]:
    return saves[:: max(1, math.ceil(len(saves) / most))]


# -- what is stored --


def classes(stock: StoredBytes | None) -> str:
    title = "<h2>What the newest checkpoint holds</h2>"
    if stock is None:
        return f'<section>{title}<p class="soft">There is no checkpoint to look into.</p></section>'
    raw, stored = sum(c.raw for c in stock.classes), sum(c.stored for c in stock.classes)
    most = max((c.raw for c in stock.classes), default=0)
    lines, cells = [], []
    for c in stock.classes:
        text = f"{clip(c.name, 60)}\n{decimal(c.raw)} in {c.tensors:,} tensors\n{decimal(c.stored)} stored for it"
        lines.append((f"{clip(c.name, 40)}: {decimal(c.raw)}, {decimal(c.stored)} stored",
                      [("raw", c.raw, text), ("one", c.stored, text)]))  # fmt: skip
        cells.append((c.name, f"{c.tensors:,}", decimal(c.raw), decimal(c.stored), share(c.stored, c.raw)))
    kind = "all of it in files of its own" if stock.full else "the rest is in files of older checkpoints"
    anew = f"{decimal(stored)} were stored for it ({share(stored, raw)})"
    says = f"Step {stock.step:,} holds {decimal(raw)}; {anew}, {kind}."
    label = f"Bytes by kind of tensor. {says}"
    titles = ("kind", "tensors", "bytes", "stored", "share")
    return (
        f'<section>{title}<p class="soft">{says} A restore reads {decimal(stock.reads)}.</p>'
        f"{legend((('raw', 'bytes of the state'), ('one', 'stored for this checkpoint')))}{rows(label, lines, most)}"
        f"<details><summary>As a table</summary>{table(titles, cells, range(1, 5))}</details></section>"
    )


def sizes(found: Chronicle) -> str:
    title = "<h2>Stored, over checkpoints</h2>"
    tiers = {
        url: [d for d in saves if not d.one.failed and d.one.nbytes] for url, saves in _tiers(found.landed).items()
    }
    tiers = {url: saves for url, saves in tiers.items() if saves}
    if not tiers:
        return f'<section>{title}<p class="soft">Nothing is known of single saves.</p></section>'
    every = [d.one for saves in tiers.values() for d in saves]
    most = max(max(one.nbytes, one.stored) for one in every)
    plot = Plot("", linear(min(o.step for o in every), max(o.step for o in every), count, 4),
                linear(0, most, decimal, 4), 180, foot="step")  # fmt: skip
    lines = []
    for number, (url, saves) in enumerate(tiers.items()):
        raw, stored = sum(d.one.nbytes for d in saves), sum(d.one.stored for d in saves)
        lines.append(
            (url, f"{len(saves):,}", decimal(raw / len(saves)), decimal(stored / len(saves)), share(stored, raw))
        )
        if number < len(TIERS):
            few = sorted(_fewer(saves, MOST_DOTS), key=lambda d: d.at)
            if number == 0:
                plot.line([(d.one.step, d.one.nbytes) for d in few], "raw dash")
            if len(few) <= MOST_LINES:
                plot.line(_rising(few), TIERS[number] + STROKES[number])
            for d in few:
                text = f"step {d.one.step:,}\n{clip(url)}\n{decimal(d.one.nbytes)}, {decimal(d.one.stored)} stored"
                plot.dot(d.one.step, d.one.stored, TIERS[number], text, 2.5)
    raw, stored = sum(one.nbytes for one in every), sum(one.stored for one in every)
    says = f"{decimal(stored)} were stored for {decimal(raw)} of states that the ledger kept ({share(stored, raw)})."
    plot.label = f"Bytes stored for each checkpoint, by step. {says}"
    titles = ("tier", "saves", "state", "stored", "share")
    return (
        f'<section>{title}<p class="soft">{says} The dashed grey line is the state as it is; of each rank that keeps a'
        f" ledger, its share.</p>{plot.render()}{_tier_legend(tiers)}{table(titles, lines, range(1, 5))}</section>"
    )


def _rising(saves: Sequence[ShownEvent[LandedSave]]) -> list[tuple[float, float] | None]:
    """A line over steps, broken where training went back."""
    found: list[tuple[float, float] | None] = []
    before = -1
    for d in saves:
        if d.one.step <= before:
            found.append(None)
        found.append((d.one.step, d.one.stored))
        before = d.one.step
    return found


def stored(one: Subject) -> str:
    steps = sorted(one.stored)
    says = f"{len(steps):,}: step " + ", ".join(f"{s:,}" for s in steps[-12:]) if steps else "none"
    return f'<section><h2>Checkpoints that are there</h2><p class="soft">{esc(says)}</p></section>'
