"""What `ckpt report -o` reads besides the ledger, and how it writes its page."""

from __future__ import annotations

import os

import click

from ckpt.cli.terminal import SHOWN, opened, say


def refuse_existing(output: str, force: bool) -> None:
    """Only files are ever replaced, and only if that is wanted."""
    if output != "-" and os.path.lexists(output) and not (force and os.path.isfile(output)):
        raise click.UsageError(f"{output} is there already: give another name, or --force to replace a file")


def write_page(output: str, text: str) -> None:
    """All of it or nothing. A link stays one: what it leads to is replaced."""
    try:
        with click.open_file(output, "w", encoding="utf-8", atomic=True) as file:
            file.write(text)
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}") from None
    if output != "-":
        say(f"{output} is written: open it in a browser")


async def steps_of(url: str) -> tuple[tuple[int, ...], list[str]]:
    """Of a run's checkpoints, and what of its log cannot be read."""
    async with opened(url) as log:
        shown = ", ".join(map(str, log.state.damaged[:SHOWN])) + ", …" * (len(log.state.damaged) > SHOWN)
        problems = [f"log records {shown} are damaged or missing: checkpoints may be missing here"] * bool(shown)
        return tuple(sorted(attempt.step for attempt in log.state.commits)), problems
