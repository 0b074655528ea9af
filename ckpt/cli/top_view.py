"""A run as it is now, in lines of text of any width: what `ckpt top` shows. Pure.

What a run says is not trusted: `safe` takes out what a terminal would obey, and nothing is read as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

from rich.cells import cell_len, set_cell_size

from ckpt.cli.terminal import human, safe
from ckpt.goodput.breakdown import duration, moment
from ckpt.telemetry.status import EAGER, FILLING, SEALED, RankStatus, SlotStatus, TierStatus

SLOW, LATE_S = 10.0, 5.0  # times a usual step, and seconds, without a sign of life: then that is said
STALLING = 0.01  # share of the time that saving takes: a bottleneck
BAR = 10
FAULT = 3  # lines
GAP = "  "

Piece = tuple[str, str]  # text and style; of those that do not fit, the later ones are left out
Line = list[Piece]


@dataclass(frozen=True)
class Glyphs:
    """By what slots and bars are drawn."""

    slots: dict[str, str] = field(default_factory=lambda: {SEALED: "■", EAGER: "◧", FILLING: "□", "": "·"})
    full: str = "█"
    empty: str = "░"
    ellipsis: str = "…"


PLAIN = Glyphs({SEALED: "#", EAGER: "+", FILLING: "~", "": "."}, "#", ".", "~")


@dataclass(frozen=True)
class RunStored:
    """What the run's place holds, for everybody who can read it. `at`: when it was read, in seconds since 1970, 0 for
    never; `error`: why it could not be read the last time; `missing`: there is no run.

    `newest`: step, None for none, of `ranks` ranks; `seen_step`, `seen_at`: what the ledger heard last, of rank
    `seen_rank` on `seen_host`, whose first tier is `nearest`; `ended`: how that ended, "" if it is open; `running`: a
    short while ago; `effective`: share of the time, over the last `starts` starts.
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
    """All that is known. `silent`: writers here that do not answer, by the number of their rank on this machine;
    `stored`: None where there is no place, or it has not been read yet (`reading`)."""

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
        """Ranks that no writer on this machine speaks for."""
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


def lines(view: TopView, width: int = 100, height: int | None = None, glyphs: Glyphs = PLAIN) -> list[Line]:
    """As many as fit into `height`, none wider than `width` cells."""
    show = _Show(view, max(10, width), glyphs)
    top = [show.title(), *show.status(), *show.places()]
    bottom = [*show.elsewhere(), *show.last_fault()]
    room = math.inf if height is None else max(1, height - len(top) - len(bottom))
    found = [*top, *show.ranks(room), *bottom]
    return [clip(line, show.width, glyphs.ellipsis) for line in found][:height]


def clip(line: Line, width: int, ellipsis: str) -> Line:
    """Without what is too wide: pieces that do not fit are left out; the first one is cut off."""
    kept: Line = []
    used = 0
    for number, (text, style) in enumerate(line):
        text = safe(text)
        gap = len(GAP) if kept else 0
        if used + gap + cell_len(text) <= width:
            kept.append((GAP[:gap] + text, style))
            used += gap + cell_len(text)
        elif number == 0:
            kept.append((set_cell_size(text, max(0, width - cell_len(ellipsis))) + ellipsis, style))
            break
    return kept


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def tail(text: str, most: int, ellipsis: str) -> str:
    """The end of a long name, which tells most."""
    text = safe(text)
    if cell_len(text) <= most:
        return text
    end = text[-max(1, most - cell_len(ellipsis)) :]
    while len(end) > 1 and cell_len(ellipsis + end) > most:  # signs that are two cells wide
        end = end[1:]
    return ellipsis + end


def bar(done: int, total: int, glyphs: Glyphs) -> str:
    share = min(1.0, done / total) if total else 0.0
    full = round(BAR * share)
    return f"{glyphs.full * full}{glyphs.empty * (BAR - full)} {100 * share:.0f} %"


def slots(found: Iterable[SlotStatus], glyphs: Glyphs) -> str:
    return "".join(glyphs.slots.get(one.state, "!" if one.state == "damaged" else glyphs.slots[""]) for one in found)


def count(number: int) -> str:
    return f"{number:,}"


def trouble(look: RankStatus) -> tuple[Any, ...]:
    """The worst rank is the first: those that do not live, then those that are behind."""
    lag = max((tier.lag_s for tier in look.tiers), default=0.0)
    return look.trainer == "alive", look.step, -look.idle_s if quiet(look) else 0.0, -lag, -look.stall_share, look.rank


def quiet(look: RankStatus) -> bool:
    """Whether it has given no sign of life for long."""
    return look.trains and look.doing == "training" and look.idle_s > max(LATE_S, SLOW * look.usual_s)


class _Show:
    """The parts of one picture."""

    def __init__(self, view: TopView, width: int, glyphs: Glyphs) -> None:
        self.view, self.width, self.glyphs = view, width, glyphs
        self.looks = sorted(view.looks, key=lambda one: one.rank)

    def title(self) -> Line:
        return [(tail(self.view.run, self.width, self.glyphs.ellipsis), "bold")]

    def status(self) -> list[Line]:
        view, stored = self.view, self.view.stored
        if not self.looks:
            return [
                [("nobody trains on this machine" + " into it first" * self._is_further, "yellow")],
                *self._not_here(),
            ]
        steps = [look.step for look in self.looks]
        if view.trains:
            doing = sorted({look.doing for look in self.looks if look.trains})
            first: Piece = ("/".join(doing), "green" if doing == ["training"] else "yellow")
        else:
            how = "/".join(sorted({look.trainer for look in self.looks}))
            first = (f"nobody trains: the trainer {_HOW.get(how, how)}", "red" if "dead" in how else "yellow")
        here = len(self.looks)
        pieces: Line = [first, (f"step {count(max(steps))}" if max(steps) >= 0 else "no step yet", "bold")]
        if view.world > 1:
            pieces.append((f"world {view.world}" + (f" ({here} here)" if here < view.world else ""), ""))
        rates = [look.steps_s for look in self.looks if look.steps_s is not None and look.trains]
        if rates:
            pieces.append((f"{min(rates):.3g} steps/s", ""))
        samples = [look.samples_s for look in self.looks if look.samples_s is not None]
        if rates and samples:
            pieces.append((f"{sum(samples):,.4g} samples/s" + " here" * (here < view.world), ""))
        mfu = [look.mfu for look in self.looks if look.mfu is not None]
        if rates and mfu:
            pieces.append((f"MFU {100 * min(mfu):.1f} %", ""))
        if stored is not None and stored.effective is not None:
            pieces.append((f"effective {100 * stored.effective:.2f} %", ""))
        return [pieces]

    @property
    def _is_further(self) -> bool:
        """Whether writers are known by another name, that of the first tier."""
        stored = self.view.stored
        return stored is not None and bool(stored.nearest) and stored.nearest != stored.url

    def _not_here(self) -> list[Line]:
        stored, silent = self.view.stored, self.view.silent
        found = [[(f"the writer of local rank {number} {why}", "red")] for number, why in sorted(silent.items())]
        if stored is not None and stored.seen_step is not None:
            ran = "has run" if stored.ended or not stored.running else "runs"
            who = f"it {ran} on {stored.seen_host or '?'}: step {count(stored.seen_step)}"
            line: Line = [(who, ""), (f"at {moment(stored.seen_at)}", "")]
            if stored.ended:
                line.append((stored.ended, "red" if stored.ended == "died" else ""))
            if stored.effective is not None:
                line.append((f"effective {100 * stored.effective:.2f} %", ""))
            found.append(line)
        if stored is not None and self._is_further:
            # A line of its own: an address that is cut off cannot be copied.
            found += [[("its first tier, by which it may be seen live:", "")], [(stored.nearest, "")]]
        return found

    # -- places --

    def places(self) -> list[Line]:
        """Memory and every tier, as the rank sees it that is behind most; what comes is summed up over the ranks."""
        found = [self._memory()] if self.looks else []
        urls = list(dict.fromkeys(tier.url for look in self.looks for tier in look.tiers))
        for url in urls:
            found += self._tier(url, [tier for look in self.looks for tier in look.tiers if tier.url == url])
        stored = self.view.stored
        if stored is not None and (not self.looks or stored.url not in urls):
            found.append(self._stored(stored))
        elif stored is not None and stored.error:
            found.append([(f"{self._name(stored.url)} cannot be read: {stored.error}", "yellow")])
        elif self.view.reading and stored is None and not self.looks:
            found.append([(f"{self._name(self.view.run)} has not answered yet", "yellow")])
        return found

    def _name(self, url: str) -> str:
        return tail(url, max(10, self.width // (3 if self.width > 60 else 4)), self.glyphs.ellipsis)

    def _memory(self) -> Line:
        held = [look.in_memory for look in self.looks]
        if any(step is None for step in held):
            return [("memory", "cyan"), ("no whole snapshot" + " of some rank" * (len(held) > 1), "yellow")]
        lag = max(look.memory_lag for look in self.looks)
        common = min(step for step in held if step is not None)
        room = human(sum(look.snapshots for look in self.looks))
        return [
            ("memory", "cyan"),
            (f"step {count(common)}", ""),
            (_behind(lag, None), ""),
            (f"{room} set aside", "dim"),
        ]

    def _tier(self, url: str, tiers: Sequence[TierStatus]) -> list[Line]:
        worst = max(tiers, key=lambda one: (one.lag_steps, one.lag_s))
        line: Line = [(self._name(url), "cyan")]
        steps = [one.committed for one in tiers]
        common = None if any(step is None for step in steps) else min(step for step in steps if step is not None)
        line.append(("nothing yet" if common is None else f"step {count(common)}", ""))
        busy = [one for one in tiers if one.writing is not None]
        if busy:
            done, total = sum(one.done for one in busy), sum(one.total for one in busy)
            line.append((bar(done, total, self.glyphs), "green"))
        line.append((_behind(worst.lag_steps, worst.lag_s), ""))
        if busy:
            line.append((f"step {count(max(one.writing or 0 for one in busy))} on its way", ""))
        rate = sum(one.rate for one in busy or tiers)
        if rate:
            line.append((f"{human(int(rate))}/s", ""))
        waiting = max(one.waiting for one in tiers)
        if waiting > 1:
            line.append((f"{waiting} on their way", "yellow"))
        raw, kept = sum(one.raw for one in tiers), sum(one.stored for one in tiers)
        if raw:
            line.append((f"{human(kept)} stored for {human(raw)}", "dim"))
        failed = sum(one.failed for one in tiers)
        error = next((one.error for one in tiers if one.error), "")
        if not error:
            return [line]
        return [line, [(f"  {failed} failed: {error}" if failed else f"  {error}", "red")]]

    def _stored(self, stored: RunStored) -> Line:
        line: Line = [(self._name(stored.url), "cyan")]
        if not stored.at:
            return [*line, (f"cannot be read: {stored.error}", "red")]
        newest = "no checkpoint" if stored.newest is None else f"step {count(stored.newest)}"
        line += [(newest, "bold"), (f"{count(stored.checkpoints)} checkpoint{'s' * (stored.checkpoints != 1)}", "")]
        if stored.ranks > 1:
            line.append((f"of {stored.ranks} ranks", ""))
        if stored.error:
            line.append((f"as of {moment(stored.at)}: now {stored.error}", "yellow"))
        return line

    # -- ranks --

    def ranks(self, room: float) -> list[Line]:
        found = [[(f"local rank {n}", ""), (f"its writer {why}", "red")] for n, why in sorted(self.view.silent.items())]
        if not self.looks:
            return []
        if len(self.looks) + len(found) <= room:
            return found + [self._rank(look) for look in self.looks]
        shown = sorted(self.looks, key=trouble)[: int(max(0, room - len(found) - 1))]
        rest = [look for look in self.looks if look not in shown]
        return found + [self._rank(look) for look in shown] + [self._others(rest, bool(shown))]

    def _rank(self, look: RankStatus) -> Line:
        wide = len(str(max(1, self.view.world) - 1))
        step = count(look.step) if look.step >= 0 else "-"
        line: Line = [(f"r{look.rank:<{wide}} {step:>{len(count(max(one.step for one in self.looks)))}}", "bold")]
        if look.trainer != "alive":
            line.append((f"{look.trainer:<8}", "red" if look.trainer == "dead" else "yellow"))
        elif quiet(look):
            line.append((f"silent for {duration(look.idle_s)}", "red"))
        else:
            line.append((f"{look.doing:<8}", "green" if look.doing == "training" else "yellow"))
        if look.slots:
            line.append((slots(look.slots, self.glyphs), "blue"))
        if look.step_s:
            style = "yellow" if look.stall_share > STALLING else "dim"
            line.append((f"{duration(look.step_s)}/step", ""))
            line.append((f"stall {duration(look.stall_s)} {100 * look.stall_share:.2g} %", style))
        lags = "/".join(str(lag) for lag in (look.memory_lag, *(tier.lag_steps for tier in look.tiers)))
        line.append((f"behind {lags}", ""))
        if look.device is not None and look.device.busy is not None:
            line.append((f"GPU {100 * look.device.busy:.0f} %", ""))
        if look.device is not None and look.device.total:
            line.append((f"{human(look.device.used)} of {human(look.device.total)}", "dim"))
        if look.trainer_rss:
            line.append((human(look.trainer_rss), "dim"))
        if look.host and len({one.host for one in self.looks}) > 1:
            line.append((look.host, "dim"))
        return line

    def _others(self, rest: Sequence[RankStatus], some: bool) -> Line:
        steps, stall = [look.step for look in rest], max(look.stall_share for look in rest)
        lag = max((tier.lag_steps for look in rest for tier in look.tiers), default=0)
        span = count(min(steps)) if min(steps) == max(steps) else f"{count(min(steps))} to {count(max(steps))}"
        who = f"{len(rest)} more ranks, none worse" if some else f"{len(rest)} ranks"
        stalled = f"stall at most {100 * stall:.2g} %"
        return [(who, "dim"), (f"step {span}", "dim"), (stalled, "dim"), (f"behind {lag} at most", "dim")]

    def elsewhere(self) -> list[Line]:
        ranks, stored = self.view.elsewhere, self.view.stored
        if not ranks or self.view.silent:
            return []
        line: Line = [(f"{_ranges(ranks)} elsewhere", "magenta")]
        if stored is None or not stored.at:
            return [[*line, ("nothing is known of them" + " yet" * self.view.reading, "")]]
        newest = "no checkpoint" if stored.newest is None else f"step {count(stored.newest)}"
        line.append((f"all ranks are in the place with {newest}", ""))
        if stored.seen_step is not None and stored.seen_rank in ranks:
            line.append((f"r{stored.seen_rank} at step {count(stored.seen_step)}, {moment(stored.seen_at)}", ""))
        return [line]

    def last_fault(self) -> list[Line]:
        known = [(look.fault_at, look.fault) for look in self.looks if look.fault]
        stored = self.view.stored
        if stored is not None and stored.fault:
            known.append((stored.fault_at, stored.fault))
        if not known:
            return []
        at, text = max(known)
        style = "red" if not self.view.trains else "yellow"
        told = safe(f"last fault {at[:19].replace('T', ' ')}Z: {text}")
        return [[(line, style)] for line in wrap(told, self.width, max_lines=FAULT, placeholder=self.glyphs.ellipsis)]


_HOW = {"dead": "is dead, its writer holds the memory", "left": "has let go", "closed": "is done, its writer finishes"}


def _behind(steps: int, seconds: float | None) -> str:
    if not steps:
        return "up to date"
    told = f"{count(steps)} behind"
    return told if seconds is None or seconds <= 0 else f"{told} ({duration(seconds)})"


def _ranges(ranks: Sequence[int]) -> str:
    """As r0-3 r8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"r{first}" if first == last else f"r{first}-{last}" for first, last in spans]
    return " ".join(shown[:8]) + " ..." * (len(shown) > 8)
