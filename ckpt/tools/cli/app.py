"""The command `ckpt`: inspect runs from a shell, or request a save of a running job. This module does not import torch.

Each command has a module of the same name, except for those in `HOMES`. `ckpt.tools.cli.terminal` prints the results.
Exit codes: 0 fine or equal; 1 damaged or different; 2 wrong usage or another error, which stderr names; 3 files cannot
be read now, so they may be intact, and nothing was changed.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence

import click

from ckpt.core.checkpoint.reference import split
from ckpt.errors import CheckpointError, ExistsError, FullError, OutcomeUnknownError, is_unreadable
from ckpt.events import log as logger
from ckpt.store import folder_of, normalise
from ckpt.tools.cli import STOPPED, UNREADABLE
from ckpt.tools.cli.terminal import STDERR_HANDLER, print_err
from ckpt.version import VERSION

GROUPS = {
    "Inspect": ("ls", "show", "diff", "top", "report"),
    "Health": ("verify", "repair", "doctor", "faults"),
    "Manage": ("copy", "pin", "unpin", "prune", "rm", "gc", "trigger"),
    "Convert": ("export", "import"),
    "Plan": ("plan",),
}
COMMANDS = sorted(name for names in GROUPS.values() for name in names)
HOMES = {
    "import": ("import_", "import_"),
    "unpin": ("pin", "unpin"),
    "restore": ("export", "export"),
}  # module and function of the command

MEANT = {  # our commands, by the names that other programs use for them
    "clean": "gc", "convert": "import", "delete": "rm", "info": "show", "inspect": "show", "keep": "pin",
    "list": "ls", "load": "export", "remove": "rm", "save": "trigger", "status": "top",
}  # fmt: skip
SENTENCE = re.compile(r"(?<=\.) ")
WHOLE = 1000  # maximum characters of a sentence in the list of commands, enough never to shorten one


class Commands(click.Group):
    """Imports the module of a command when the command is used, so that `ls` starts without the other commands."""

    def list_commands(self, context: click.Context) -> list[str]:
        return COMMANDS

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS and name not in HOMES:
            return None
        module, function = HOMES.get(name, (name, name))
        command: click.Command = getattr(importlib.import_module(f"ckpt.tools.cli.{module}"), function)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = arguments[0]
        if word not in COMMANDS and word not in HOMES and not context.resilient_parsing:
            from difflib import get_close_matches

            if meant := MEANT.get(word) or next(iter(get_close_matches(word, COMMANDS, 1)), None):
                context.fail(f"unknown command {word!r}: did you mean {meant}?")
        return super().resolve_command(context, arguments)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group, each with the complete first sentence of its help, wrapped over several lines."""
        for group, names in GROUPS.items():
            commands = ((name, self.get_command(context, name)) for name in names)
            with formatter.section(group):
                formatter.write_dl(
                    [(name, command.get_short_help_str(WHOLE)) for name, command in commands if command is not None]
                )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ckpt")
def cli() -> None:
    """Inspect and manage everystep runs. RUN is the folder or URL that a Checkpointer saves to, for example runs/exp1
    or s3://bucket/run1. RUN@500 is its checkpoint of step 500, RUN@latest the newest, RUN@best the one with the best
    score.

    Exit codes: 0 fine or equal, 1 damaged or different, 2 wrong usage or another error, 3 files cannot be read now.
    """


def advice_of(error: CheckpointError, arguments: Sequence[str]) -> str:
    """Return an error's advice for a shell user, with the run in place of RUN. Omit sentences about Python calls and
    about the command that failed."""
    unwanted = re.compile(rf"\w\(|`ckpt {re.escape(next(iter(arguments), ''))}\b")
    advice = " ".join(sentence for sentence in SENTENCE.split(error.advice) if not unwanted.search(sentence))
    return re.sub(r"\bRUN\b", lambda _: shlex.quote(run_of(arguments, str(error))), advice)


def run_of(arguments: Sequence[str], message: str) -> str:
    """Return the run that the command was given. With several runs, return the one in the error message, or "RUN"."""
    command = cli.get_command(click.Context(cli), arguments[0]) if arguments else None
    if command is None:
        return "RUN"
    given = command.make_context(arguments[0], list(arguments[1:]), resilient_parsing=True).params
    found = [given[one.name or ""] for one in command.params if isinstance(one, click.Argument) or one.name == "others"]
    runs = [split(run)[0] for one in found if one for run in ([one] if isinstance(one, str) else one)]
    urls = {run: normalise(run) for run in runs} if len(runs) > 1 else {}
    named = [run for run, url in urls.items() if url in message or str(folder_of(url)) in message]
    return max(named, key=lambda run: len(urls[run])) if named else runs[0] if len(runs) == 1 else "RUN"


def _is_about_reading(error: CheckpointError) -> bool:
    """Return True if an error means that stored files could not be read. Wrong paths and failed writes do not count."""
    others = isinstance(error, (FullError, ExistsError, OutcomeUnknownError)) or not error.advice
    return is_unreadable(error) and not others and not isinstance(error.__cause__, NotADirectoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logger.addHandler(STDERR_HANDLER)  # a logger ignores a handler that it already has
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names may have characters that the terminal lacks
    try:
        status = cli.main(arguments, prog_name="ckpt", standalone_mode=False)
        print(end="", flush=True)
        return int(status or 0)
    except click.ClickException as error:
        error.show()
    except click.Abort:
        print_err("stopped")
        return STOPPED
    except SystemExit as left:  # click exits with 1 if the output pipe was closed, and with 0 after success
        return 141 if left.code else 0  # 141: exit code of a shell for a command that SIGPIPE has ended
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit fails too
        return 141
    except OSError as error:  # of a file argument or of stdout, because stores raise their own errors
        print_err(f"{error.filename or 'input or output failed'}: {error.strerror or error}")
    except CheckpointError as error:
        print_err(str(error))
        if advice := advice_of(error, sys.argv[1:] if arguments is None else arguments):
            print_err(advice)
        if _is_about_reading(error):
            return UNREADABLE
    except MemoryError:
        print_err("not enough memory for this command")
    return 2
