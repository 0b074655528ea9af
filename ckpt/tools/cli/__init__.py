"""The command `ckpt`: one file a command, of its name, which parses, calls and prints; what it does is found elsewhere.

In: words. Out: tables or `--json`, and an exit code. Commands are imported when they are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

UNREADABLE = 3  # exit code: files cannot be read now, so nothing is known about them
STOPPED = 130  # as a shell says of SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Ctrl-C ends it in one line, also while it is being imported."""
    try:
        from ckpt.tools.cli import app

        return app.main(arguments)
    except KeyboardInterrupt:
        print("ckpt: stopped", file=sys.stderr)
        return STOPPED
