"""The command `ckpt`: look at runs from a shell, or ask a running one to save. It needs no torch.

Each command has a module of its name (`import_` for import). How they show things is in `ckpt.tools.cli.terminal`.
Exit codes: 0 fine or equal; 1 damaged or different; 2 wrong usage, or another error (stderr says which); 3 files cannot
be read now, so nothing is known about them and nothing was changed.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence

import click

from ckpt.core.checkpoint.spelling import split
from ckpt.errors import CheckpointError, ExistsError, FullError, OutcomeUnknownError, is_unreadable
from ckpt.events import log as logger
from ckpt.store import folder_of, normalise
from ckpt.tools.cli import STOPPED, UNREADABLE
from ckpt.tools.cli.terminal import SAYING, say
from ckpt.version import VERSION

COMMANDS = (
    "copy", "diff", "doctor", "faults", "gc", "import", "keep", "ls", "plan", "prune", "repair", "report", "restore",
    "rm", "show", "top", "trigger", "verify",
)  # fmt: skip

MEANT = {  # how other programs call it
    "clean": "gc", "convert": "import", "delete": "rm", "export": "restore", "info": "show", "inspect": "show",
    "list": "ls", "load": "restore", "remove": "rm", "save": "trigger", "status": "top",
}  # fmt: skip
SENTENCE = re.compile(r"(?<=\.) ")
WHOLE = 1000  # characters of a sentence


class Commands(click.Group):
    """Each is imported when it is asked for: `ls` should not wait for the others."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        called = "import_" if name == "import" else name
        command: click.Command = getattr(importlib.import_module(f"ckpt.tools.cli.{called}"), called)
        return command

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = words[0]
        if word not in COMMANDS and not context.resilient_parsing:
            from difflib import get_close_matches

            if meant := MEANT.get(word) or next(iter(get_close_matches(word, COMMANDS, 1)), None):
                context.fail(f"there is no command {word!r}: did you mean {meant}?")
        return super().resolve_command(context, words)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Each with its first sentence, all of it: in several lines where it is long."""
        commands = ((name, self.get_command(context, name)) for name in COMMANDS)
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(WHOLE)) for name, one in commands if one is not None])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ckpt")
def cli() -> None:
    """Look at runs of everystep. RUN is what a Checkpointer was given: a folder, or a URL such as s3://bucket/run1.
    RUN@500 is its checkpoint of step 500, RUN@latest the newest, RUN@best the best that was scored.

    Exit codes: 0 fine or equal, 1 damaged or different, 2 wrong usage or another error, 3 files cannot be read now."""


def advice_of(error: CheckpointError, words: Sequence[str]) -> str:
    """What to do next at a shell: of the run that was given, without sentences about calls in Python, or about the
    command that was called."""
    unwanted = re.compile(rf"\w\(|`ckpt {re.escape(next(iter(words), ''))}\b")
    said = " ".join(one for one in SENTENCE.split(error.advice) if not unwanted.search(one))
    return re.sub(r"\bRUN\b", lambda _: shlex.quote(run_of(words, str(error))), said)


def run_of(words: Sequence[str], said: str) -> str:
    """The run that a command was given. Of several: the one that the error names, or RUN if nobody knows."""
    command = cli.get_command(click.Context(cli), words[0]) if words else None
    if command is None:
        return "RUN"
    given = command.make_context(words[0], list(words[1:]), resilient_parsing=True).params
    found = [given[one.name or ""] for one in command.params if isinstance(one, click.Argument) or one.name == "others"]
    runs = [split(run)[0] for one in found if one for run in ([one] if isinstance(one, str) else one)]
    urls = {run: normalise(run) for run in runs} if len(runs) > 1 else {}
    named = [run for run, url in urls.items() if url in said or str(folder_of(url)) in said]
    return max(named, key=lambda run: len(urls[run])) if named else runs[0] if len(runs) == 1 else "RUN"


def _is_about_reading(error: CheckpointError) -> bool:
    """Return True if stored files could not be read, False for a wrong path and for what could not be written."""
    others = isinstance(error, (FullError, ExistsError, OutcomeUnknownError)) or not error.advice
    return is_unreadable(error) and not others and not isinstance(error.__cause__, NotADirectoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    logger.addHandler(SAYING)  # once, however often this is called
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name need not fit the terminal's encoding
    try:
        status = cli.main(arguments, prog_name="ckpt", standalone_mode=False)
        print(end="", flush=True)
        return int(status or 0)
    except click.ClickException as error:
        error.show()
    except click.Abort:
        say("stopped")
        return STOPPED
    except SystemExit as left:  # click's way of leaving when a pipe is closed, with 1, and after completion, with 0
        return 141 if left.code else 0  # as a shell says of SIGPIPE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails as well
        return 141
    except OSError as error:  # of a file by name, or of stdout: stores have errors of their own
        say(f"{error.filename or 'input or output failed'}: {error.strerror or error}")
    except CheckpointError as error:
        say(str(error))
        if advice := advice_of(error, sys.argv[1:] if arguments is None else arguments):
            say(advice)
        if _is_about_reading(error):
            return UNREADABLE
    except MemoryError:
        say("not enough memory for this")
    return 2
