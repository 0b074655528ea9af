"""Format the current state of a run for `ckpt top`, as lines and tables for a terminal of any width. No I/O.

The contents of a run are not trusted: `safe` escapes control characters, and nothing is parsed as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ckpt.tools.cli.terminal import human, safe
from ckpt.tools.observe.telemetry.status import EMPTY, FILLING, SEALED, RankStatus, TierStatus
from ckpt.units import count_of, duration, moment

SLOW, LATE_S = 10.0, 5.0  # a rank is silent after SLOW times its usual step time, but not before LATE_S seconds
STALLING = 0.01  # share of the time spent on saving above which the stall is highlighted
BAR = 10
FAULT = 3  # maximum lines for a fault
GAP = 2
SLOTS = {SEALED: "#", FILLING: "~", EMPTY: ".", "damaged": "!"}
TIER_TITLES = ("tier", "step", "behind", "on its way", "rate", "stored")
RANK_TITLES = ("rank", "step", "does", "slots", "a step", "stall", "behind", "GPU", "its memory", "memory", "host")


@dataclass(frozen=True)
class RunStored:
    """The contents of the run's location, which every user with access can read.

    `at`: time of the read, seconds since 1970, 0 if never read. `error`: why the last read failed. `missing`: True if
        there is no run.
    `newest`: newest step or None, saved by `ranks` ranks. `seen_step`, `seen_at`: last progress in the run metrics,
        reported by rank `seen_rank` on host `seen_host`, whose first tier is `nearest`. `ended`: how the job attempt
        ended, "" if it has not.
    `running`: True if the job was alive a short time ago. `effective`: goodput over the last `starts` job attempts.
    """

    url: str
    at: float = 0.0
    error: str = ""
    missing: bool = False
    newest: int | None = None
    checkpoints: int = 0
    ranks: int = 0
    seen_step: int | None = None
    seen_at: float = 0.0
    seen_rank: int = 0
    seen_host: str = ""
    nearest: str = ""
    ended: str = ""
    running: bool = False
    effective: float | None = None
    starts: int = 0
    faults: int = 0
    fault: str = ""
    fault_at: str = ""


@dataclass(frozen=True)
class TopView:
    """The whole state. `silent`: for each local rank whose writer does not respond, the reason. `stored`: None if the
    run has no location, or if its location has not been read yet (`reading`)."""

    run: str
    looks: Sequence[RankStatus] = ()
    silent: dict[int, str] = field(default_factory=dict)
    stored: RunStored | None = None
    reading: bool = False
    at: float = 0.0

    @property
    def world(self) -> int:
        return max((look.world for look in self.looks), default=self.stored.ranks if self.stored else 0)

    @property
    def trains(self) -> bool:
        return any(look.trains for look in self.looks)

    @property
    def elsewhere(self) -> list[int]:
        """Return the ranks without a writer on this machine."""
        here = {look.rank for look in self.looks}
        return [rank for rank in range(self.world) if rank not in here] if self.looks else []

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "at": self.at,
            "trains": self.trains,
            "world": self.world,
            "ranks": [look.to_json() for look in self.looks],
            "silent": self.silent,
            "elsewhere": [] if self.silent else self.elsewhere,
            "place": None if self.stored is None else asdict(self.stored),
        }


def lines(view: TopView, width: int = 100, height: int | None = None) -> list[Text | Table]:
    """Return lines of at most `width` cells. If ranks do not fit into `height` lines, show the worst."""
    tiers = [_memory(view), *_tiers(view)] if view.looks else []
    head = [_line((_end_of(view.run, width), "bold")), *_status(view, width)]
    foot = [*_errors(view, width), *_stored(view), *_elsewhere(view), *_last_fault(view, width)]
    room = len(view.looks) if height is None else max(0, height - len(head) - len(foot) - len(tiers) - 2)
    found: list[Text | Table] = [*head]
    if tiers:
        found.append(_table(TIER_TITLES, tiers, width))
        found += _ranks(view, width, room)
    return [*found, *foot]


# -- format a line, a table --


def _line(*pieces: tuple[str, str]) -> Text:
    """Join texts with their styles. Nothing in the texts is parsed as markup."""
    found = Text(no_wrap=True, overflow="crop")
    for text, style in pieces:
        found.append(" " * GAP * bool(found) + safe(text), style or None)
    return found


def _table(titles: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Return a table without empty columns, and without the rightmost columns if they do not fit."""
    used = [n for n in range(len(titles)) if any(row[n] for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for number in used:
        width -= max(len(titles[number]), *(row[number].cell_len for row in rows))
        if width < 0 and table.columns:
            break
        width -= GAP
        table.add_column(titles[number], no_wrap=True, header_style="dim", overflow="crop")
    for row in rows:
        table.add_row(*(row[number] for number in used[: len(table.columns)]))
    return table


def _cells(*cells: str | tuple[str, str]) -> list[Text]:
    return [_line((cell, "") if isinstance(cell, str) else cell) for cell in cells]


def _end_of(text: str, most: int) -> str:
    """Return the end of a name that is too long, because the end is most specific."""
    text = safe(text)
    if cell_len(text) <= most:
        return text
    while cell_len(text) > most - 3:
        text = text[1:]
    return f"...{text}"


def _count(number: int | None) -> str:
    return "-" if number is None or number < 0 else f"{number:,}"


# -- the whole run --


def _status(view: TopView, width: int) -> list[Text]:
    if not view.looks:
        further = " has it as its first tier" * _is_further(view)
        return [_line((f"no trainer on this machine{further}", "yellow")), *_not_here(view)]
    stored, looks = view.stored, view.looks
    step, here = max(look.step for look in looks), len(looks)
    pieces = [_doing(view), (f"step {_count(step)}" if step >= 0 else "no step yet", "bold")]
    if view.world > 1:
        pieces.append((f"world {view.world}" + (f" ({here} here)" if here < view.world else ""), ""))
    if rates := [look.steps_s for look in looks if look.steps_s is not None and look.trains]:
        pieces.append((f"{min(rates):.3g} steps/s", ""))
        if samples := [look.samples_s for look in looks if look.samples_s is not None]:
            pieces.append((f"{sum(samples):,.4g} samples/s" + " here" * (here < view.world), ""))
        if mfu := [look.mfu for look in looks if look.mfu is not None]:
            pieces.append((f"MFU {100 * min(mfu):.1f} %", ""))
    if stored is not None and stored.effective is not None:
        pieces.append((f"effective {100 * stored.effective:.2f} %", ""))
    return [*_lines_of(pieces, width), *(_line((stale(look), "yellow")) for look in looks if look.leaves_s is not None)]


def _lines_of(pieces: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Distribute pieces of text over as many lines as they need, so that no piece is cut."""
    rows: list[list[tuple[str, str]]] = [[]]
    for piece in pieces:
        if rows[-1] and _line(*rows[-1], piece).cell_len > width:
            rows.append([])
        rows[-1].append(piece)
    return [_line(*row) for row in rows]


def stale(look: RankStatus) -> str:
    """Describe a writer without a trainer: its memory, when it exits, and the step that no tier has yet."""
    held = f"r{look.rank}: writer {look.writer} holds {human(look.snapshots)}, leaves in {duration(look.leaves_s or 0)}"
    return held + ("" if look.not_durable is None else f", step {look.not_durable:,} only there")


def _doing(view: TopView) -> tuple[str, str]:
    if view.trains:
        doing = sorted({look.doing for look in view.looks if look.trains})
        return "/".join(doing), "green" if doing == ["training"] else "yellow"
    how = "/".join(sorted({look.trainer for look in view.looks}))
    return f"not training: the trainer {_HOW.get(how, how)}", "red" if "dead" in how else "yellow"


_HOW = {
    "dead": "is dead, its writer holds the memory",
    "left": "has released its memory",
    "closed": "is done, its writer finishes",
}


def _is_further(view: TopView) -> bool:
    """Return True if this location is not the run's first tier, by which writers know the run."""
    return view.stored is not None and view.stored.nearest not in ("", view.stored.url)


def _not_here(view: TopView) -> list[Text]:
    stored = view.stored
    found = [_line((f"the writer of local rank {number} {why}", "red")) for number, why in sorted(view.silent.items())]
    if stored is not None and stored.seen_step is not None:
        ran = "has run" if stored.ended or not stored.running else "runs"
        who = f"it {ran} on {stored.seen_host or '?'}: step {_count(stored.seen_step)}"
        share = "" if stored.effective is None else f"effective {100 * stored.effective:.2f} %"
        end = stored.ended, "red" if stored.ended == "died" else ""
        found.append(_line((who, ""), (f"at {moment(stored.seen_at)}", ""), end, (share, "")))
    if stored is not None and _is_further(view):
        # The URL gets its own line, because a truncated URL cannot be copied.
        found += [_line(("its first tier, which shows it live:", "")), _line((stored.nearest, ""))]
    return found


# -- tiers --


def _memory(view: TopView) -> list[Text]:
    """Return the table row for memory, for the rank that is furthest behind."""
    held = [look.in_memory for look in view.looks]
    room = f"{human(sum(look.snapshots for look in view.looks))} set aside"
    if (step := min((-1 if one is None else one) for one in held)) < 0:
        return _cells(("memory", "cyan"), "-", ("no whole snapshot", "yellow"), "", "", (room, "dim"))
    behind = _behind(max(look.memory_lag for look in view.looks), 0.0)
    return _cells(("memory", "cyan"), _count(step), behind, "", "", (room, "dim"))


def _tiers(view: TopView) -> Iterable[list[Text]]:
    for url in dict.fromkeys(tier.url for look in view.looks for tier in look.tiers):
        yield _tier(url, [tier for look in view.looks for tier in look.tiers if tier.url == url])


def _tier(url: str, tiers: Sequence[TierStatus]) -> list[Text]:
    """Return the table row for a tier: the rank that is furthest behind, and the sum of the rates of all ranks."""
    worst = max(tiers, key=lambda one: (one.lag_steps, one.lag_s))
    newest = min((-1 if one.committed is None else one.committed) for one in tiers)
    busy, way = [one for one in tiers if one.writing is not None], ""
    if busy:
        share = sum(one.done for one in busy) / max(1, sum(one.total for one in busy))
        full = round(BAR * min(1.0, share))
        way = f"{'#' * full}{'.' * (BAR - full)} {100 * share:.0f} % of step {max(one.writing or 0 for one in busy):,}"
    if (waiting := max(one.waiting for one in tiers)) > 1:
        way += f" ({waiting} on their way)"
    rate = sum(one.rate for one in busy or tiers)
    raw = sum(one.raw for one in tiers)
    kept = f"{human(sum(one.stored for one in tiers))} for {human(raw)}" if raw else ""
    behind = (_behind(worst.lag_steps, worst.lag_s), "")
    if any(one.error for one in tiers):
        behind = f"{behind[0]}, {failed} failed" if (failed := sum(one.failed for one in tiers)) else behind[0], "red"
    cells = (_end_of(url, 30), "cyan"), _count(newest), behind, (way, "green"), f"{human(int(rate))}/s" if rate else ""
    return _cells(*cells, (kept, "dim"))


def _errors(view: TopView, width: int) -> Iterable[Text]:
    """Return for each tier why its last save failed or was skipped, because the tier's row has no space for it."""
    known = {tier.url: tier.error for look in view.looks for tier in look.tiers if tier.error}
    for url, error in known.items():
        text = safe(f"{_end_of(url, 30)}: {error}")
        yield from (_line((line, "red")) for line in wrap(text, width, max_lines=FAULT, placeholder="..."))


def _behind(steps: int, seconds: float) -> str:
    if not steps:
        return "up to date"
    return f"{steps:,}" + (f" ({duration(seconds)})" if seconds > 0 else "")


def _stored(view: TopView) -> list[Text]:
    """Return the contents of the requested location, unless a rank on this machine has it as a tier."""
    stored = view.stored
    known = stored is not None and any(tier.url == stored.url for look in view.looks for tier in look.tiers)
    if stored is None:
        waits = view.reading and not view.looks
        return [_line((f"{_end_of(view.run, 40)} has not responded yet", "yellow"))] if waits else []
    name = _end_of(stored.url, 40)
    if known or not stored.at:
        why = f"{name} cannot be read: {stored.error}"
        return [_line((why, "yellow" if known else "red"))] if stored.error or not known else []
    newest = "no checkpoint" if stored.newest is None else f"step {_count(stored.newest)}"
    count = f"{_count(stored.checkpoints)} checkpoint{'s' * (stored.checkpoints != 1)}"
    ranks = f"of {stored.ranks} ranks" * (stored.ranks > 1)
    old = f"as of {moment(stored.at)}: now {stored.error}" if stored.error else ""
    return [_line((name, "cyan"), (newest, "bold"), (count, ""), (ranks, ""), (old, "yellow"))]


# -- ranks --


def _ranks(view: TopView, width: int, room: int) -> list[Text | Table]:
    silent = [(f"local rank {number}: its writer {why}", "red") for number, why in sorted(view.silent.items())]
    found: list[Text | Table] = [_line(one) for one in silent]
    room -= len(found)
    looks = sorted(view.looks, key=lambda one: one.rank)
    shown = looks if len(looks) <= room else sorted(looks, key=_trouble)[: max(0, room - 1)]
    if shown:
        found.append(_table(RANK_TITLES, [_rank(look) for look in shown], width))
    if rest := [look for look in looks if look not in shown]:
        steps = f"steps {_count(min(one.step for one in rest))} to {_count(max(one.step for one in rest))}"
        stalled = f"stall at most {100 * max(look.stall_share for look in rest):.2g} %"
        found.append(
            _line((f"{count_of(len(rest), 'more rank')}, none worse", "dim"), (steps, "dim"), (stalled, "dim"))
        )
    return found


def _rank(look: RankStatus) -> list[Text]:
    does = look.doing, "green" if look.doing == "training" else "yellow"
    if look.trainer != "alive":
        does = look.trainer, "red" if look.trainer == "dead" else "yellow"
    elif _quiet(look):
        does = f"silent for {duration(look.idle_s)}", "red"
    took, stall, gpu = duration(look.step_s) if look.step_s else "", ("", ""), look.device
    if look.step_s:
        style = "yellow" if look.stall_share > STALLING else "dim"
        stall = f"{duration(look.stall_s)} {100 * look.stall_share:.2g} %", style
    return _cells(
        (f"r{look.rank}", "bold"), (_count(look.step), "bold"), does,
        ("".join(SLOTS.get(one.state, ".") for one in look.slots), "blue"), took, stall,
        "/".join(str(lag) for lag in (look.memory_lag, *(tier.lag_steps for tier in look.tiers))),
        "" if gpu is None or gpu.busy is None else f"{100 * gpu.busy:.0f} %",
        (f"{human(gpu.used)} of {human(gpu.total)}" if gpu and gpu.total else "", "dim"),
        (human(look.trainer_rss) if look.trainer_rss else "", "dim"), (look.host, "dim"),
    )  # fmt: skip


def _trouble(look: RankStatus) -> tuple[Any, ...]:
    """Return a sort key that puts the worst rank first: not alive, then furthest behind."""
    lag = max((tier.lag_s for tier in look.tiers), default=0.0)
    return look.trainer == "alive", look.step, -look.idle_s if _quiet(look) else 0.0, -lag, -look.stall_share, look.rank


def _quiet(look: RankStatus) -> bool:
    """Return True if a rank has given no sign of life for too long during training."""
    return look.trains and look.doing == "training" and look.idle_s > max(LATE_S, SLOW * look.usual_s)


def _elsewhere(view: TopView) -> list[Text]:
    ranks, stored = view.elsewhere, view.stored
    if not ranks or view.silent:
        return []
    who = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} elsewhere", "magenta"
    if stored is None or not stored.at:
        return [_line(who, ("nothing is known about them" + " yet" * view.reading, ""))]
    newest = "no checkpoint" if stored.newest is None else f"step {_count(stored.newest)}"
    progress = ""
    if stored.seen_step is not None and stored.seen_rank in ranks:
        progress = f"r{stored.seen_rank} at step {_count(stored.seen_step)}, {moment(stored.seen_at)}"
    return [_line(who, (f"the run's location has {newest} of all ranks", ""), (progress, ""))]


def _last_fault(view: TopView, width: int) -> list[Text]:
    known = [(look.fault_at, look.fault) for look in view.looks if look.fault]
    if view.stored is not None and view.stored.fault:  # the last fault of all ranks
        known.insert(0, (view.stored.fault_at, view.stored.fault))
    if not known:
        return []
    at, text = max(known, key=lambda one: one[0])
    line_text = safe(f"last fault {at[:19].replace('T', ' ')}Z: {text}")
    style = "yellow" if view.trains else "red"
    return [_line((line, style)) for line in wrap(line_text, width, max_lines=FAULT, placeholder="...")]
