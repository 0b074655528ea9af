"""`python -m ckpt` is the command `ckpt`, also where another program has that name."""

import sys

from ckpt.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
