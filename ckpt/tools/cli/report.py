"""`ckpt report`: print where the time of a run went, as computed by `ckpt.tools.observe.goodput.accounting`."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence

import click

from ckpt.core.cadence.ledger import Account
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.log.records import RunState
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, CorruptError, FormatError, NoCheckpointError, is_unreadable
from ckpt.guard.report import Fault
from ckpt.store import folder_of, normalise, open_store
from ckpt.tools.cli import UNREADABLE
from ckpt.tools.cli.arguments import files, run_argument
from ckpt.tools.cli.reading import read_faults, read_ledger
from ckpt.tools.cli.terminal import (
    PATIENCE_S,
    SHOWN,
    example,
    look_options,
    opened,
    print_err,
    print_few,
    print_json,
    print_table,
    put,
)
from ckpt.tools.maintain.find_runs import PRIVATE, runs_below
from ckpt.tools.observe.goodput.accounting import settled
from ckpt.tools.observe.goodput.breakdown import Statement
from ckpt.tools.observe.report.chronicle import chronicle
from ckpt.tools.observe.report.figures import INTERRUPTION, interruption, parts, summary
from ckpt.tools.observe.report.page import PARTS_OF, Subject, page
from ckpt.units import count_of
from ckpt.version import VERSION


@click.command(epilog=example("ckpt report runs/exp1", "ckpt report runs/exp1 --json | jq .effective",
                              "ckpt report runs/exp1 -o report.html"))  # fmt: skip
@run_argument
@click.option("--idle-after", "idle_after_h", type=click.FloatRange(min=0, min_open=True), metavar="HOURS",
              help="Breaks after an interruption that are longer than this count as intended, and none of their time "
                   "is counted. Shorter breaks count as restart time. The interruption is listed in both cases. "
                   "By default all such breaks count as restart time. Breaks after close() never count.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", shell_complete=files,
              help="Write an HTML page with charts to this file; the page needs no network and no other file. "
                   "- is stdout.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@look_options
def report(url: str, idle_after_h: float | None, output: str | None, force: bool, as_json: bool) -> int:
    """Report where the time of a run went: training, saving and interruptions. For a folder of runs, list the runs.

    Lost time is the time of interruptions (until the fault was detected, until training was restarted, restoring,
    repeating steps), and the time that saving took from training. The rest of the wall-clock time is effective,
    including pauses like evaluations in not_training() and other work (warm-up, closing). Trained time is only the time
    of steps that count. The wall-clock time begins when the first start was ready to train, and ends when the job was
    last seen. Later time, and time between jobs that were closed on purpose, is not counted.

    For each interruption: step, at which it happened; lost, the number of steps; and the time until it was detected
    (perceive), until training was restarted (restart), to restore, and to repeat the lost steps (recompute).

    The job measures these times itself and stores them in `ledger/` of the run. --json lists all interruptions. If a
    file in `ledger/` is damaged, it is skipped and the exit code is 1.
    """
    if output is not None:
        if as_json:
            raise click.UsageError("--json and -o cannot be combined: each prints the whole report")
        refuse_existing(output, force)
    try:
        url, accounts, faults, damaged, state = asyncio.run(_read(url))
    except (FormatError, NoCheckpointError):
        below, unread = ([], {}) if output is not None else asyncio.run(_runs_below(url))
        if not below and not unread:
            raise
        show_runs(url, below, as_json)
        for name, why in unread.items():
            print_err(f"{name} cannot be read: {why}")
        return UNREADABLE if unread else 0
    if not accounts and output is None:
        raise nothing_there(url, damaged)
    now, idle_after_s = time.time(), 3600 * (math.inf if idle_after_h is None else idle_after_h)
    run = settled(accounts, faults, now=now, idle_after_s=idle_after_s)
    found = run.statement
    if output is not None:
        problems = tuple(problems_of(url, damaged, state, there=bool(accounts)))
        steps = tuple(sorted(checkpoint.step for checkpoint in state.commits))
        subject = Subject(url, found, chronicle(run, faults), steps, problems, now, VERSION)
        write_page(output, page(subject))
    elif as_json:
        print_json({"url": url, "damaged": damaged, **found.to_json()})
    else:
        show(url, found)
    return 1 if damaged else 0


def show_runs(url: str, runs: Sequence[str], as_json: bool) -> None:
    """Print the runs below a folder as `ckpt report` commands that can be copied."""
    if as_json:
        print_json({"url": normalise(url), "runs": runs})
        return
    put(f"{normalise(url)} is not a run, but contains {count_of(len(runs), 'run')}:")
    print_few([f"ckpt report {shlex.quote(str(folder_of(run) or run))}" for run in runs])


async def _runs_below(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the runs, and the reason for each folder that cannot be read now. Ignore private ones."""
    closed: dict[str, str] = {}
    below = await runs_below(url, patience_s=PATIENCE_S, closed=closed)
    unread = {run: why for run, why in closed.items() if why != PRIVATE}

    async def check(run: str) -> None:
        store = open_store(run, patience_s=PATIENCE_S)
        try:
            await RunLog(store).open()
        except CheckpointError as error:
            if is_unreadable(error):
                unread[run] = str(error)
        finally:
            await store.aclose()

    await of_each(below, check)
    return below, unread


def nothing_there(url: str, damaged: Sequence[str]) -> CheckpointError:
    if damaged:
        return CorruptError(f"nothing to report: all run metrics of {url} are damaged")
    return FormatError(
        f"{url} has no run metrics: it was saved by an older version or through ckpt.dcp, or is a copy."
        " A Checkpointer records them from its next start on, in its nearest durable tier: give the URL of that tier"
    )


def problems_of(url: str, damaged: Sequence[str], state: RunState, *, there: bool) -> Iterator[str]:
    """Yield the problems that are printed next to the figures."""
    yield from (f"{key} is damaged and was skipped" for key in damaged)
    if state.damaged:
        shown = ", ".join(map(str, state.damaged[:SHOWN])) + ", …" * (len(state.damaged) > SHOWN)
        yield f"log records {shown} are damaged or missing: checkpoints may be missing here"
    if not there:
        yield str(nothing_there(url, damaged))


async def _read(url: str) -> tuple[str, list[Account], list[Fault], list[str], RunState]:
    """Return the run's URL, its metrics, its faults, the names of damaged files, and the state of its log."""
    async with opened(url) as log:
        accounts, damaged = await read_ledger(log)
        faults, bad = await read_faults(log)
        return log.store.url, accounts, faults, damaged + bad, log.state


# -- the HTML page --


def refuse_existing(output: str, force: bool) -> None:
    """Raise UsageError if the output exists, unless it is a file and `force` is set."""
    if output != "-" and os.path.lexists(output) and not (force and os.path.isfile(output)):
        raise click.UsageError(f"{output} exists: give another name, or --force to replace a file")


def write_page(output: str, text: str) -> None:
    """Write the page completely or not at all. If the path is a link, replace the file that it points to."""
    try:
        with click.open_file(output, "w", encoding="utf-8", atomic=True) as file:
            file.write(text)
    except OSError as error:
        raise click.UsageError(f"cannot write {output}: {error.strerror}") from None
    if output != "-":
        print_err(f"wrote {output}: open it in a browser")


# -- output --


def show(url: str, found: Statement) -> None:
    put(url)
    print_table(("summary", ""), summary(found))
    print_table(PARTS_OF, parts(found))
    shown = found.interruptions[-SHOWN:]
    if shown:
        print_table(INTERRUPTION, [interruption(one) for one in shown], below=[one.summary for one in shown])
    if hidden := len(found.interruptions) - len(shown):
        print(f"{hidden} earlier; --json shows all\n")
    for note in found.notes[-SHOWN:]:
        put(f"note: {note}")
    if len(found.notes) > SHOWN:
        put(f"{count_of(len(found.notes) - SHOWN, 'earlier note')}; --json shows all")
