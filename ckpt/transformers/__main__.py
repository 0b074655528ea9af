"""`python -m ckpt.transformers RUN --to FOLDER` writes a folder as `from_pretrained` reads it."""

import sys

from ckpt.transformers.callback import main

if __name__ == "__main__":
    sys.exit(main())
