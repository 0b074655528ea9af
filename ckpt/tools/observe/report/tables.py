"""Tables of a report page: interruptions, faults, restores, save intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ckpt.guard.report import in_words
from ckpt.tools.observe.goodput.breakdown import Statement
from ckpt.tools.observe.report import figures
from ckpt.tools.observe.report.chronicle import Chronicle, Incident
from ckpt.tools.observe.report.figures import FIRST, NEWEST
from ckpt.tools.observe.report.svg import esc, table
from ckpt.units import count_of, duration, moment


def interruptions(found: Statement) -> str:
    shown = list(found.interruptions)[-NEWEST:]
    if not shown:
        return ""
    lines = [(*figures.interruption(one), one.summary) for one in reversed(shown)]
    return _section(
        "Interruptions, newest first", _kinds(found), (*figures.INTERRUPTION, "account"), lines,
        len(found.interruptions), (2, 3, 5, 6, 7, 8),
    )  # fmt: skip


def _kinds(found: Statement) -> str:
    by_kind = ", ".join(f"{count:,} {in_words(kind)}" for kind, count in found.by_kind.items())
    by_source = ", ".join(f"{count:,} from {source or 'nothing'}" for source, count in found.by_source.items())
    return f"By kind: {by_kind or 'none counts as one'}." + (f" Restored: {by_source}." if by_source else "")


def faults(found: Chronicle) -> str:
    shown = found.faults[-NEWEST:]
    if not shown:
        return '<section><h2>Faults</h2><p class="soft">None was detected.</p></section>' if found.accounts else ""
    lines = [
        (moment(f.at), in_words(f.kind), _ranks(f.ranks), "" if f.step is None else f"{f.step:,}", f.text, _saved(f),
         f.advice, ", ".join(f.hosts[:4]) + (" …" if len(f.hosts) > 4 else ""))
        for f in reversed(shown)
    ]  # fmt: skip
    titles = ("when", "kind", "rank", "step", "what was seen", "what was saved", "advice", "host")
    says = "What the ranks detected and saved, and what to do, from their reports."
    return _section("Faults, newest first", says, titles, lines, len(found.faults), (3,))


def asked(found: Chronicle) -> str:
    """Return a table of the requested saves, which had no fault."""
    shown = found.asked[-NEWEST:]
    if not shown:
        return ""
    lines = [
        (moment(one.at), in_words(one.kind, asked=True), _ranks(one.ranks), "" if one.step is None else f"{one.step:,}",
         one.text, _saved(one))
        for one in reversed(shown)
    ]  # fmt: skip
    titles = ("when", "what", "rank", "step", "why", "what was saved")
    says = "By a call, a command or a signal, or because the job's time was nearly over. Training continued."
    return _section("Requested saves, newest first", says, titles, lines, len(found.asked), (3,))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


def _saved(one: Incident) -> str:
    good = [s for s in one.saved if not s.error]
    if not one.reported:
        return "nothing was recorded"
    best = sorted({(s.step, s.tier) for s in good}, reverse=True)[:3]
    lines = [f"step {step:,} in {tier}" for step, tier in best]
    lines += [f"not in {s.tier}: {s.error}" for s in one.saved if s.error][:2]
    return "\n".join(lines) or "nothing new"


def restores(found: Chronicle) -> str:
    every = [r for r in found.restores if r.one.step is not None or r.one.passed_over]
    if not every:
        return '<section><h2>Restores</h2><p class="soft">Nothing was restored so far.</p></section>'
    times = sorted(r.one.seconds for r in every if r.one.step is not None)
    says = ""
    if times:
        half, most = duration(statistics.median(times)), duration(times[-1])
        says = f"{len(times):,} {'restore' if len(times) == 1 else 'restores'}: {half} usually, {most} at most."
    if mended := sum(r.one.repaired > 0 for r in every):
        says += f" {mended:,} read damaged chunks from a further tier."
    if passed := sum(r.one.passed_over > 0 for r in every):
        says += f" {passed:,} skipped newer checkpoints that could not be used."
    lines = [
        (moment(r.at), "none" if r.one.step is None else f"{r.one.step:,}", r.one.source or "nothing",
         duration(r.one.seconds), f"{r.one.repaired:,}", f"{r.one.passed_over:,}", r.one.why)
        for r in reversed(every[-NEWEST:])
    ]  # fmt: skip
    titles = ("when", "step", "from", "took", "chunks repaired", "skipped", "why")
    return _section("Restores, newest first", says, titles, lines, len(every), (1, 3, 4, 5))


def cadence(found: Chronicle) -> str:
    if not found.decisions:
        return ""
    lines = []
    for d in reversed(found.decisions[-NEWEST:]):
        for place, every in d.one.every.items():
            cost = d.one.costs.get(place)
            lines.append(
                (moment(d.at), f"{max(0, d.one.step):,}", place, "never" if every <= 0 else f"{every:,}",
                 "" if cost is None else duration(cost), d.one.why.get(place, ""))
            )  # fmt: skip
    titles = ("when", "from step", "tier", "every … steps", "a save costs", "why")
    says = 'Save intervals chosen by every="auto", and why.'
    return _section("Save intervals", says, titles, lines[:NEWEST], len(lines), (1, 3, 4))


def notes(found: Statement) -> str:
    if not found.notes:
        return ""
    shown = "".join(f"<li>{esc(note, 600)}</li>" for note in found.notes[-30:])
    more = f" (not shown: {count_of(len(found.notes) - 30, 'earlier note')})" if len(found.notes) > 30 else ""
    says = f"Uncertainties of these numbers{more}."
    return f'<section><h2>Notes</h2><p class="soft">{says}</p><ul>{shown}</ul></section>'


def _section(
    title: str, says: str, titles: Sequence[str], lines: Sequence[Sequence[object]], total: int,
    numbers: Iterable[int] = (),
) -> str:  # fmt: skip
    hidden = f" The newest {len(lines):,} of {total:,} are shown." if total > len(lines) else ""
    first, rest = lines[:FIRST], lines[FIRST:]
    more = (
        f"<details><summary>{count_of(len(rest), 'earlier one')}</summary>{table(titles, rest, numbers)}</details>"
        * bool(rest)
    )
    return (
        f'<section class="long"><h2>{esc(title)}</h2><p class="soft">{esc(says, 600)}{hidden}</p>'
        f"{table(titles, first, numbers)}{more}</section>"
    )
