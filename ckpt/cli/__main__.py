"""`python -m ckpt.cli` is `ckpt`."""

import sys

from ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
