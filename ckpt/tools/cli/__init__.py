"""The command `ckpt`. Each command has a module of the same name that parses arguments, calls the library and prints.

Commands print tables, or JSON with `--json`, and return an exit code. A module is imported when its command is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

UNREADABLE = 3  # exit code if files cannot be read now, so that they may be intact or damaged
STOPPED = 130  # exit code of the shell for a command that SIGINT has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Ctrl-C ends the command with one line, even during imports."""
    try:
        from ckpt.tools.cli import app

        return app.main(arguments)
    except KeyboardInterrupt:
        print("ckpt: stopped", file=sys.stderr)
        return STOPPED
