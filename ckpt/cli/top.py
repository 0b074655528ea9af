"""`ckpt top`: what a run does now, live. What is known of it is in `ckpt.cli.top_data`, how it is put in
`ckpt.cli.top_view`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.terminal import SAYING, example, json_option, place_option, print_json
from ckpt.cli.top_data import RunWatch
from ckpt.cli.top_view import PLAIN, Glyphs, Line, TopView, lines, plain
from ckpt.events import log as logger
from ckpt.store import normalise

if TYPE_CHECKING:
    from rich.text import Text

KEYS_S = 0.1  # between two looks at the size of the terminal


@click.command(epilog=example("ckpt top runs/exp1", "ckpt top runs/exp1 --once --json | jq '.ranks[].step'"))
@click.argument("run")
@click.option("--once", is_flag=True, help="One look, as text.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), metavar="SECONDS",
              help="Between two looks; 1 by default. If given, they go on in a pipe, too.")  # fmt: skip
@place_option
@json_option
def top(run: str, once: bool, interval_s: float | None, as_json: bool) -> int:
    """Watch a run: steps, what saving costs, what is in memory, and how far each tier is behind. q leaves.

    RUN is the first tier that the Checkpointer was given, or memory:NAME. Ranks on this machine are seen live, if they
    run as the same user. Of others, what RUN holds is shown, read every 10 s.

    Slots of memory: ■ a whole snapshot, ◧ all but what only optimizers change, □ being copied, · empty; where the
    terminal has no such signs, # + ~ and a dot. "behind 0/34" are steps that would be lost if only memory, or only that
    tier, were left.
    """
    place = run if run.startswith("memory:") else normalise(run)
    if place == "memory:":
        raise click.UsageError("memory:NAME, as in Checkpointer(..., name=NAME)")
    able = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    single = once or as_json or (not able and interval_s is None)
    with RunWatch(place) as sources:
        view = sources.first(patient=single)
        if as_json:
            print_json(view.to_json())
        elif single:
            _print(view)
        elif not able:
            _print_often(sources, view, interval_s or 1.0)
        else:
            _watch(sources, interval_s or 1.0)
    return 0


# -- how it is shown --


def _glyphs() -> Glyphs:
    try:
        "■◧□·█░…".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeError):
        return PLAIN
    return Glyphs()


def _width() -> int:
    """Of a terminal, and what one would like in a pipe."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    with contextlib.suppress(ValueError):
        return int(os.environ.get("COLUMNS", "")) or 120
    return 120


def _print(view: TopView) -> None:
    for line in lines(view, _width(), None, _glyphs()):
        print(plain(line))


def _print_often(sources: RunWatch, view: TopView, interval_s: float) -> None:
    sources.follow(interval_s)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _print(view)
            print(flush=True)
            time.sleep(interval_s)
            view = sources.view()


def _watch(sources: RunWatch, interval_s: float) -> None:
    """Until q or Ctrl-C; the terminal is as it was afterwards."""
    from rich.console import Console, Group
    from rich.live import Live

    sources.follow(interval_s)
    console, glyphs = Console(), _glyphs()

    def picture() -> Group:
        found = lines(sources.view(), console.width, console.height - 1, glyphs)
        return Group(*map(_text, found), _text([("q leaves", "dim")]))

    logger.removeHandler(SAYING)  # it would write into the picture
    try:
        with (
            _keys() as pressed,
            Live(
                picture(),
                console=console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
        ):
            while not pressed(interval_s):
                live.update(picture(), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        logger.addHandler(SAYING)


def _text(line: Line) -> Text:
    """Nothing in it is markup."""
    from rich.text import Text

    found = Text(no_wrap=True, overflow="crop")
    for text, style in line:
        found.append(text, style or None)
    return found


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits so long, or until the terminal has another size; whether somebody wants to leave."""
    fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
    before: Any = termios.tcgetattr(fd) if fd >= 0 else None
    ended = signal.signal(signal.SIGTERM, _interrupt)  # so that the terminal is put back then, too

    def pressed(seconds: float) -> bool:
        nonlocal fd
        end, size = time.monotonic() + seconds, _size()
        while (left := end - time.monotonic()) > 0 and _size() == size:
            if fd < 0:
                time.sleep(min(left, KEYS_S))
            elif select.select([fd], [], [], min(left, KEYS_S))[0]:
                keys = os.read(fd, 64)
                if b"q" in keys or b"Q" in keys:
                    return True
                fd = fd if keys else -1
        return False

    try:
        if fd >= 0:
            tty.setcbreak(fd, termios.TCSADRAIN)
        yield pressed
    finally:
        signal.signal(signal.SIGTERM, ended)
        if before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _size() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(sys.stdout.fileno())
        return size.columns, size.lines
    return 0, 0
