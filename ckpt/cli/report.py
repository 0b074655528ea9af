"""`ckpt report`: where the time of a run went, for people and programs. What it says is found in
`ckpt.goodput.accounting`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar

import click

from ckpt import __version__
from ckpt.cli.reading import read_faults, read_ledger
from ckpt.cli.report_page import refuse_existing, steps_of, write_page
from ckpt.cli.terminal import (
    SHOWN,
    example,
    json_option,
    opened,
    place_option,
    print_json,
    print_table,
    safe,
)
from ckpt.errors import CheckpointError, CorruptError, FormatError
from ckpt.faults.report import Fault
from ckpt.goodput.accounting import settled
from ckpt.goodput.breakdown import LEAST_S, Interruption, Statement, duration, moment
from ckpt.goodput.ledger import Account
from ckpt.report.chronicle import chronicle
from ckpt.report.page import page
from ckpt.report.words import Subject, inner_parts, percent

T = TypeVar("T")
PARALLEL = 64  # small objects read at once


@click.command(epilog=example("ckpt report runs/exp1", "ckpt report runs/exp1 --json | jq .effective",
                              "ckpt report runs/exp1 -o report.html"))  # fmt: skip
@click.argument("url")
@click.option("--last", type=click.IntRange(min=0), default=SHOWN, show_default=True,
              help="Show only so many of the newest interruptions; the sums are of all.")  # fmt: skip
@click.option("--since", type=click.DateTime(), metavar="DATE",
              help="Count only starts of the job from then on, in local time. What was before the first of them is "
                   "left out, the interruption that led to it as well; so is a start before that as a whole, even if "
                   "it went on beyond it.")  # fmt: skip
@click.option("--idle-after", "idle_after_h", type=click.FloatRange(min=0, min_open=True), metavar="HOURS",
              help="If no process ran for longer than that after an interruption, somebody wanted it: all of that "
                   "break is counted nowhere. Shorter breaks still are restart, and the interruption still is one. "
                   "Without this, every break after a fault is restart. What was closed needs no option.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE",
              help="Write a page with pictures into this file, for any browser: it needs no network and no other file. "
                   "- is stdout.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@place_option
@json_option
def report(
    url: str,
    last: int,
    since: datetime | None,
    idle_after_h: float | None,
    output: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Where the time of a run went: training, saving, and what each interruption cost.

    Invalid is what interruptions took (until they were noticed, until training was started again, restoring, steps
    done once more) and what saving took from training. The rest of the wall-clock time is effective: that has what was
    paused, as with evaluations in pause(), and what is other (the first warm-up, closing) in it. Trained is what went
    into steps that stand, alone. The wall-clock time begins when the first start was ready to train, and ends when
    the job was last seen: time after that, and between jobs that were closed on purpose, is counted nowhere.

    It is measured by the job itself, in `ledger/` of the run; with --json all interruptions are in it. Exit code 1 if
    any of that is damaged: it is left out.
    """
    if output is not None:
        if as_json:
            raise click.UsageError("--json and -o are two forms of the same: give one of them")
        refuse_existing(output, force)
    url, accounts, faults, damaged = asyncio.run(_read(url))
    if since is not None:
        accounts = [one for one in accounts if one.wall(one.opened) >= since.timestamp()]
    if not accounts and (output is None or since is not None):
        raise nothing_there(url, damaged, since)
    now, idle_after_s = time.time(), 3600 * (math.inf if idle_after_h is None else idle_after_h)
    run = settled(accounts, faults, now=now, idle_after_s=idle_after_s)
    found = run.statement
    if output is not None:
        steps, problems = asyncio.run(steps_of(url))
        problems = [*(f"{key} is damaged, and left out" for key in damaged), *problems]
        if not accounts:
            problems.append(str(nothing_there(url, damaged, since)))
        subject = Subject(url, found, chronicle(run, faults), steps, tuple(problems), now, __version__)
        write_page(output, page(subject))
    elif as_json:
        print_json({"url": url, "damaged": damaged, **found.to_json()})
    else:
        show(url, found, last)
    return 1 if damaged else 0


def nothing_there(url: str, damaged: Sequence[str], since: datetime | None) -> CheckpointError:
    if damaged:
        return CorruptError(f"all of the ledger of {url} is damaged: there is nothing to report")
    if since is not None:
        return FormatError(f"nothing of {url} was started since {since:%F %T}: leave --since out to see all")
    return FormatError(
        f"{url} has no ledger: it was saved by an older version, through ckpt.dcp, or is a copy without it."
        " A Checkpointer keeps one from its next start on, in its nearest durable tier: give that one"
    )


# -- reading --


async def _read(url: str) -> tuple[str, list[Account], list[Fault], list[str]]:
    """The run's URL, its ledger, its faults, and the names of what is damaged."""
    async with opened(url) as log:
        accounts, damaged = await read_ledger(log)
        faults, bad = await read_faults(log)
        return log.store.url, accounts, faults, damaged + bad


# -- for people --


def show(url: str, found: Statement, last: int) -> None:
    print(safe(url))
    print_table(("summary", ""), summary(found))
    print_table(("part", "time", "of wall-clock", "per interruption"), parts(found))
    shown = found.interruptions[-last:] if last else ()
    if shown:
        print_interruptions(shown)
    if hidden := found.interruptions[: len(found.interruptions) - len(shown)]:
        print(f"and {hidden_line(hidden)}; --json shows all\n")
    for note in found.notes[-SHOWN:]:
        print(safe(f"note: {note}"))
    if len(found.notes) > SHOWN:
        print(f"and {len(found.notes) - SHOWN} earlier notes; --json shows all")


def summary(found: Statement) -> list[tuple[str, str]]:
    rows = [
        ("effective training time", "not known yet" if found.effective is None else percent(found.effective)),
        ("invalid training time", duration(found.invalid_s)),
        ("trained", "not known yet" if found.trained is None else trained_line(found, found.trained)),
        ("wall-clock time", f"{duration(found.wall_s)}, from {moment(found.begin)} to {moment(found.until)}"),
        ("state", state_line(found)),
        ("steps", steps_line(found)),
        ("interruptions", interruptions_line(found)),
    ]
    if found.count:
        rows.append(("of which", ", ".join(f"{count} {kind}" for kind, count in found.by_kind.items())))
    if found.by_source:
        served = (f"{count} from {source or 'nothing'}" for source, count in found.by_source.items())
        rows.append(("restored", ", ".join(served)))
    besides = (
        ("the first start", found.first_start_s),
        ("stopped on purpose", found.idle_s),
        ("copied", found.moved_s),
    )
    if told := ", ".join(f"{duration(s)} {what}" for what, s in besides if s > 0):
        rows.append(("counted nowhere", told))
    return rows


def trained_line(found: Statement, share: float) -> str:
    """Effective is more than that, where something was paused or other."""
    besides = (("paused", found.paused_s), ("other", found.other_s))
    told = " and ".join(f"{duration(seconds)} {name}" for name, seconds in besides if seconds >= LEAST_S)
    return f"{percent(share)} in steps that stand" + f"; effective has {told} besides" * bool(told)


def state_line(found: Statement) -> str:
    if found.running:
        return "running"
    if found.ended == "closed":
        return f"closed {moment(found.until)}"
    since = f"for {duration(found.down_s)}: that is counted nowhere"
    if found.ended:
        return f"ended by {found.ended} {moment(found.until)}, not started again {since}"
    return f"last seen {moment(found.until)}; nobody saw it end, and nothing was heard {since}"


def steps_line(found: Statement) -> str:
    line = f"{found.steps:,}"
    if found.redone_steps:
        line += f", and {found.redone_steps:,} done once more"
    return line if found.usual_step_s is None else f"{line}; one takes {duration(found.usual_step_s)}"


def interruptions_line(found: Statement) -> str:
    if found.mtbf_s is None:
        return f"none in {duration(found.training_s)} of training"
    return f"{found.count}, one in {duration(found.mtbf_s)} of training"


def parts(found: Statement) -> list[tuple[str, str, str, str]]:
    """What all seconds went into. Parts that are 0 are left out, but for those that the equation has."""
    cost = found.cost
    rows = []
    for name in ("perceive", "restart", "restore", "recompute"):
        rows.append(line(name, getattr(cost, name), found))
        rows += [line(f"  {text}", seconds, found) for text, seconds in inner_parts(name, cost)]
    rows.append(line("saving", found.saving_s, found, each=False))
    if found.saving_s > 0:
        rows.append(line("  training waited", found.stalled_s, found, each=False))
        slower = line("  steps were slower (estimate)", found.slowed_s, found, each=False)
        rows.append(slower if found.slowing_known or found.slowed_s > 0 else (slower[0], "not known", "", ""))
    rows.append(line("invalid", found.invalid_s, found, each=False))
    rows.append(line("productive", found.productive_s, found, each=False))
    for name, seconds in (("paused", found.paused_s), ("other", found.other_s)):
        if seconds > 0:
            rows.append(line(name, seconds, found, each=False))
    rows.append(line("wall-clock", found.wall_s, found, each=False))
    return rows


def line(name: str, seconds: float, found: Statement, *, each: bool = True) -> tuple[str, str, str, str]:
    share = percent(seconds / found.wall_s) if found.wall_s > 0 else ""
    return name, duration(seconds), share, duration(seconds / found.count) if each and found.count else ""


TITLES = ("when", "kind", "step", "lost", "restored from", "perceive", "restart", "restore", "recompute")


def print_interruptions(found: Sequence[Interruption]) -> None:
    """A table, in which the account of each has a line of its own below it."""
    print_table(TITLES, [row(one) for one in found], below=[one.summary for one in found])


def hidden_line(hidden: Sequence[Interruption]) -> str:
    """How many are not shown. What was wanted is no interruption."""
    faults = sum(one.counted for one in hidden)
    wanted = len(hidden) - faults
    texts = (
        f"{faults} earlier {'interruption' if faults == 1 else 'interruptions'}" * bool(faults),
        f"{wanted} earlier {'break that was' if wanted == 1 else 'breaks that were'} none" * bool(wanted),
    )
    return " and ".join(filter(None, texts))


def row(one: Interruption) -> tuple[object, ...]:
    lost = "?" if one.lost_steps is None else one.lost_steps
    source = "not yet" if one.lost_steps is None else f"{one.source}, step {one.restored}" if one.source else "nothing"
    kind = {"none": "stopped on purpose", "moved": "copied"}.get(one.kind, one.kind)
    cost = (one.cost.perceive, one.cost.restart, one.cost.restore, one.cost.recompute)
    step = "" if one.step is None else one.step
    return moment(one.at), kind, step, lost, source, *map(duration, cost)
