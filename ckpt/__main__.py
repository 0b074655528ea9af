"""Run the command line as `python -m ckpt`, which works even if another program is called `ckpt`."""

import sys

from ckpt.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
