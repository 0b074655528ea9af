"""The command `ckpt`: one file a command, of its name, which parses, calls and prints; what it does is found elsewhere.

In: words. Out: tables or `--json`, and an exit code. Commands are imported when they are asked for.
"""

from ckpt.cli.app import cli as cli
from ckpt.cli.app import main as main
