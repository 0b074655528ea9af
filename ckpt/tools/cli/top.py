"""`ckpt top`: show a run live. `top_data` collects the data and `top_view` formats it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import click
from rich.console import Console, Group
from rich.live import Live

from ckpt.events import log as logger
from ckpt.store import normalise
from ckpt.tools.cli.arguments import folders
from ckpt.tools.cli.terminal import STDERR_HANDLER, example, human, look_options, print_json, print_table, put, width
from ckpt.tools.cli.top_data import RunWatch, writers_here
from ckpt.tools.cli.top_view import TopView, lines
from ckpt.tools.observe.telemetry.status import RankStatus
from ckpt.units import duration


@click.command(
    epilog=example("ckpt top", "ckpt top runs/exp1", "ckpt top runs/exp1 --once --json | jq '.ranks[].step'")
)
@click.argument("run", required=False, shell_complete=folders)
@click.option("--once", is_flag=True, help="Print the state once, as text.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
              metavar="SECONDS", help="Time between two updates.")  # fmt: skip
@look_options
def top(run: str | None, once: bool, interval_s: float, as_json: bool) -> int:
    """Watch a run: its steps, the cost of saving, the contents of memory, and how far each tier is behind. Ctrl-C ends
    it.

    RUN is the first tier of the Checkpointer, or memory:NAME. Without RUN, all writers of this user on this machine are
    listed once, with their memory and the time for which they outlive their trainer. Ranks of the same user on this
    machine are shown live. For other ranks, the contents of RUN are shown, which are read every 10 s.

    Slots of memory: # a complete snapshot, + complete except for tensors that only optimizers change, ~ being copied,
    . empty. "behind 0/34" are the steps that would be lost if only memory, or only that tier, survived.
    """
    if run is None:
        return show_writers(as_json)
    place = run if run.startswith("memory:") else normalise(run)
    if place == "memory:":
        raise click.UsageError("memory: needs a name: memory:NAME, as in Options(name=NAME)")
    able = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    single = once or as_json or not able
    with RunWatch(place) as sources:
        view = sources.first(patient=single)
        if as_json:
            print_json(view.to_json())
        elif single:
            show(view)
        else:
            watch(sources, interval_s)
    return 0


def show_writers(as_json: bool) -> int:
    """Print all writers of this user on this machine, including those whose trainer has ended."""
    found = writers_here()
    looks = [one for one in found if isinstance(one, RankStatus)]
    silent = [{"writer": one[0], "why": one[1]} for one in found if isinstance(one, tuple)]
    if as_json:
        return print_json({"writers": [one.to_json() for one in looks], "silent": silent})
    rows = [
        (one.run or "?", f"r{one.rank}", one.writer, human(one.snapshots), one.trainer,
         "" if one.not_durable is None else one.not_durable,
         "" if one.leaves_s is None else duration(one.leaves_s))
        for one in looks
    ]  # fmt: skip
    if rows:
        print_table(("run", "rank", "writer", "memory", "trainer", "not durable", "leaves in"), rows)
    for one in silent:
        put(f"writer {one['writer'] or '?'} {one['why']}")
    if not found:
        put("this user has no writer on this machine")
    return 0


def show(view: TopView) -> None:
    """Print the current state once, as text without colours."""
    columns = width()
    console = Console(width=columns, color_system=None)
    with console.capture() as captured:
        console.print(Group(*lines(view, columns)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def watch(sources: RunWatch, interval_s: float) -> None:
    """Update the screen until Ctrl-C or SIGTERM, then restore the terminal to its previous state."""
    sources.follow(interval_s)
    console = Console()

    def picture() -> Group:
        return Group(*lines(sources.view(), console.width, console.height))

    logger.removeHandler(STDERR_HANDLER)  # its output would damage the live screen
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), Live(
            console=console, screen=True, get_renderable=picture, refresh_per_second=1 / interval_s,
            redirect_stdout=False, redirect_stderr=False,
        ):  # fmt: skip
            while True:
                time.sleep(3600)
    finally:
        signal.signal(signal.SIGTERM, before)
        logger.addHandler(STDERR_HANDLER)
