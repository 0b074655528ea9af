"""Functions shared by the commands: options, opening runs for reading, and output for people and programs.

The contents of a checkpoint are not trusted. `safe` escapes control characters in all text, and rich gets the text as
plain text, never as markup. JSON is one ASCII document on stdout without tensor data. Values that JSON lacks (NaN,
bytes) are written as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import click

from ckpt.core.checkpoint import losses
from ckpt.core.checkpoint.losses import Loss
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.errors import FormatError, NoCheckpointError
from ckpt.store import exists, folder_of, open_store, remember_options
from ckpt.tools.cli import STOPPED
from ckpt.tools.cli.arguments import folders
from ckpt.tools.maintain.find_runs import runs_below

T = TypeVar("T")
OnBytes = Callable[[int], None] | None

PATIENCE_S = 10.0  # seconds for which transient errors are retried; short, because a person waits
NUMBERS = (  # titles of the columns that are aligned to the right
    "step", "size", "stored", "used", "files", "checkpoints", "ranks", "elements", "differing", "largest", "relative",
    "cosine", "saved step", "steps",
)  # fmt: skip
NARROW = 20  # cells; a column of long text is not wrapped to a smaller width
SHOWN, WIDTH = 20, 60  # maximum problems to print, and maximum characters of a value


class StderrHandler(logging.Handler):
    """Prints warnings of the library on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print_err(f"WARNING: {record.getMessage()}")


STDERR_HANDLER = StderrHandler(logging.WARNING)


def example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def parse_options(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE options into fsspec's storage_options. A key a.b sets the key b of a dict a. Values are parsed as
    JSON (true, null, numbers, ...), but access keys and secrets are always text. Errors do not repeat the value,
    because it may be a secret."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or not name:
            raise click.BadParameter("give KEY=VALUE", context, parameter)
        inner, (*above, last) = found, name.split(".")
        for word in above:
            inner = inner.setdefault(word, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(f"{word} already has a value", context, parameter)
        inner[last] = _value_of(last, text)
    return found


def _value_of(name: str, text: str) -> Any:
    if re.search(r"key|secret|token|passw", name, re.IGNORECASE):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _for_all(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> None:
    remember_options(None, parse_options(context, parameter, given))


place_option = click.option(
    "--option",
    metavar="KEY=VALUE",
    multiple=True,
    expose_value=False,
    callback=_for_all,
    help="Option for object stores, as in fsspec's storage_options; repeatable. Pass secrets in the environment.",
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
yes_option = click.option("--yes", is_flag=True, help="Carry out the plan. Without this, it is only shown.")


def look_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options that every command for reading has: `place_option` and --json."""
    return place_option(json_option(command))


def plan_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options of commands that show a plan and carry it out if --yes is given."""
    return place_option(yes_option(json_option(command)))


def from_option(what: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add the option --from for further locations of a run. `what`: the help text of the option."""
    return click.option(
        "--from", "others", metavar="URL", multiple=True, shell_complete=folders, help=f"{what}; repeatable."
    )


def nothing_half() -> str:
    return "All completed work is kept: repeat the command to continue from here"


def act(work: Coroutine[Any, Any, T], so_far: Callable[[], str] = nothing_half) -> T:
    """Run the coroutine of a command. If it is interrupted, print the result of `so_far`."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        print_err(f"stopped. {so_far()}")
        raise click.exceptions.Exit(STOPPED) from None


@contextlib.asynccontextmanager
async def opened(url: str, *, whole: bool = False) -> AsyncIterator[RunLog]:
    """Open the log of a run. `whole`: read all of its records. Raise NoCheckpointError if there is no run. Print
    damaged records on stderr."""
    log = RunLog(open_store(url, patience_s=PATIENCE_S), whole=whole)
    try:
        try:
            await log.open()
        except (FormatError, NoCheckpointError) as error:
            if await exists(log.store, "FORMAT.json"):
                raise error from None
            folder = folder_of(log.store.url)
            if folder is not None and await runs_below(log.store.url):
                raise NoCheckpointError(
                    f"{error}. It contains runs: `ckpt ls {shlex.quote(str(folder))}` lists them"
                ) from None
            missing = NoCheckpointError(f"{error}. Give the folder or URL that a Checkpointer saves to")
            missing.advice = "Nothing was changed."  # the usual advice names `ckpt ls`, which would fail as well
            raise missing from None
        if damage := await losses.of_log(log):
            print_err(f"WARNING: {damage_text(log, damage)}")
        yield log
    finally:
        await log.store.aclose()


def newest_first(log: RunLog) -> list[Commit]:
    return sorted(log.state.commits.values(), key=lambda c: c.checkpoint, reverse=True)


def damage_text(log: RunLog, damage: Sequence[Loss]) -> str:
    """Return one line about the damaged records of a run, and the checkpoints that may be lost with them. If no record
    is damaged, a missing record may be one that a writer is appending."""
    if not log.state.damaged:
        return losses.listed(damage)
    newest = next((commit.checkpoint for commit in log.state.lineage() if commit.finite is not False), None)
    missed = losses.passed_over(damage, newest, log.state.acquires)
    if missed:
        return losses.in_words(missed, 0 if newest is None else newest.step)
    return f"{losses.listed(damage)}. Checkpoints may be missing"


def safe(text: object) -> str:
    """Escape all characters that could control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def print_err(text: str) -> None:
    """Print a line on stderr, wrapped if stderr is a terminal."""
    line = f"ckpt: {safe(text)}"
    click.echo("\n".join(wrapped(line, width())) if sys.stderr.isatty() else line, err=True)


def short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"


def human(size: int) -> str:
    from rich import filesize

    return filesize.decimal(size)


def print_json(found: dict[str, Any]) -> int:
    print(json.dumps(found, indent=2, allow_nan=False))
    return 0


def width() -> int:
    """Return the width of the terminal, the value of COLUMNS, or 80 for pipes and files."""
    return shutil.get_terminal_size((80, 24)).columns


def put(text: object) -> None:
    """Print a paragraph on stdout, with control characters escaped, wrapped to the terminal's width."""
    print("\n".join(wrapped(safe(text), width())))


def print_few(lines: Sequence[object], what: str = "") -> None:
    """Print the first lines, and the number of lines that are not shown."""
    for line in lines[:SHOWN]:
        put(line)
    if len(lines) > SHOWN:
        put(f"{len(lines) - SHOWN} more{what}; --json shows all")


def wrapped(text: str, most: int, indent: str = "  ") -> list[str]:
    """Wrap text to lines of at most `most` cells, and indent all lines but the first. A word is never split, because
    names must be copyable; a word that is wider than a line gets its own line."""
    from rich.cells import cell_len

    if cell_len(text) <= most:
        return [text]
    start = text[: len(text) - len(text.lstrip(" "))]
    lines = [start]
    for word in text.split():
        fresh = lines[-1] in (start, start + indent)
        if not fresh and cell_len(f"{lines[-1]} {word}") > most:
            lines.append(f"{start}{indent}")
            fresh = True
        lines[-1] += word if fresh else f" {word}"
    return lines


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]], below: Sequence[str] = ()) -> None:
    """Print a table. If a row is too wide, its widest cells are wrapped. If that is not enough, columns are moved out
    of the table: the first column above its row, others below it. Empty columns are omitted. `below`: a text below each
    row."""
    cells = [[safe(cell) for cell in row] for row in rows]
    there = [i for i in range(len(titles)) if not rows or any(row[i] for row in cells)]
    cells, names = [[row[i] for i in there] for row in cells], [titles[i] for i in there]
    inside, room = list(range(len(names))), width()
    columns = [[name, *(row[i] for row in cells)] for i, name in enumerate(names)]
    while (widths := widths_for([columns[i] for i in inside], room)) is None:
        out = max(inside, key=lambda i: least_width(columns[i]))
        inside.remove(out)
        room = width() - 2 * (0 not in inside)
    above = "" if 0 in inside or not names else names[0]
    lines = [*([above] if above else []), *_row([names[i] for i in inside], names, inside, widths, bool(above))]
    for row, text in zip(cells, below or [""] * len(rows), strict=True):
        lines += wrapped(row[0], width()) if above else []
        lines += _row([row[i] for i in inside], names, inside, widths, bool(above))
        others = [i for i in range(1, len(names)) if i not in inside and row[i]]
        for extra in (*(f"{names[i]}: {row[i]}" for i in others), *([safe(text)] if text else [])):
            lines += wrapped(f"  {extra}", width())
    print("\n".join(lines), end="\n\n")


def _row(
    cells: Sequence[str], names: Sequence[str], inside: Sequence[int], widths: Sequence[int], indented: bool
) -> list[str]:
    """Return the lines of a table row, as many as the cell with the most lines has."""
    from rich.cells import cell_len

    parts = [wrapped(cell, most, "") for cell, most in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, parts), default=0)):
        padded = []
        for i, part, most in zip(inside, parts, widths, strict=True):
            text = part[number] if number < len(part) else ""
            fill = " " * (most - cell_len(text))
            padded.append(fill + text if names[i] in NUMBERS else text + fill)
        lines.append(("  " * indented + "  ".join(padded)).rstrip())
    return lines


def least_width(column: Sequence[str]) -> int:
    """Return the smallest width of a wrapped column: that of its longest word, but at least `NARROW` for long text."""
    from rich.cells import cell_len

    whole = max(map(cell_len, column))
    return min(whole, max([NARROW, *(cell_len(word) for cell in column for word in cell.split())]))


def widths_for(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return the widths of the columns in `room` cells, narrowing the widest columns first. None if they do not fit."""
    from rich.cells import cell_len

    widths, least = [max(map(cell_len, column)) for column in columns], [least_width(column) for column in columns]
    over = sum(widths) + 2 * max(0, len(widths) - 1) - room
    if over > sum(widths) - sum(least):
        return None if len(widths) > 1 else [room]
    for _ in range(over):
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[OnBytes]:
    """Show a progress bar on stderr if stderr is a terminal. `total`: bytes, 0 if unknown."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as parts
    from rich.console import Console

    sizes = (parts.DownloadColumn(), parts.TransferSpeedColumn()) if total else (parts.TimeElapsedColumn(),)
    columns = (parts.TextColumn(what), parts.BarColumn(), *sizes)
    console = Console(stderr=True)
    with parts.Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda count: bar.advance(task, count)
