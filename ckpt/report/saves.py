"""What saving took: pictures of a report page. See `ckpt.report.page`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from ckpt.goodput.ledger import LandedSave
from ckpt.report.chronicle import BUCKETS, Chronicle, ShownEvent
from ckpt.report.labels import TIERS, Subject, clip, share
from ckpt.report.svg import Plot, clock, count, decades, esc, legend, linear, seconds, table
from ckpt.units import decimal, duration, moment

MOST_DOTS = 400  # of a picture, for each tier


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
    plot = Plot("", clock(begin, until, 4), decades(least, max(times), seconds), 180)
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
                more = f"{duration(d.one.seconds)}, training {d.one.behind:,} steps further by then"
                plot.dot(
                    d.at, d.one.seconds, TIERS[number], f"step {d.one.step:,}, {moment(d.at)}\n{clip(url)}\n{more}", 3
                )
    plot.label = "Seconds from the order to write until committed, over time. " + "; ".join(
        f"{line[0]}: {line[3]} usually, {line[4]} at the 99th percentile" for line in lines
    )
    titles = ("tier", "saves", "failed", "usually", "99 %", "behind", "state", "stored")
    return (
        f'<section>{title}<p class="soft">From the order to write until it was committed, of each save that the ledger'
        f" kept. Behind: how many steps training had gone on by then, at most.</p>{plot.render()}"
        f"{legend(zip(TIERS, (clip(url, 60) for url in good), strict=False))}"
        f"{table(titles, lines, range(1, 8))}</section>"
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


def stored(one: Subject) -> str:
    steps = sorted(one.stored)
    says = f"{len(steps):,}: step " + ", ".join(f"{s:,}" for s in steps[-12:]) if steps else "none"
    return f'<section><h2>Checkpoints that are there</h2><p class="soft">{esc(says)}</p></section>'
