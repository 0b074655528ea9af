"""The command `ckpt`. Each command has a module of its name, which parses the arguments, calls the library and prints.

Input: arguments. Output: tables or `--json`, and an exit code. A command's module is imported when the command is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

UNREADABLE = 3  # exit code: files cannot be read now, so nothing is known about them
STOPPED = 130  # the shell's exit code for SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Ctrl-C ends it with one line, also during imports."""
    try:
        from ckpt.tools.cli import app

        return app.main(arguments)
    except KeyboardInterrupt:
        print("ckpt: stopped", file=sys.stderr)
        return STOPPED
