"""What happened, for people (`log`) and for other programs (`subscribe`)."""

from __future__ import annotations

import logging
import sys

from ckpt.subscribers import Event, subscribe

__all__ = ["Event", "log", "subscribe"]

log = logging.getLogger("ckpt")  # no handler: what is shown is up to the program, and warnings are without its doing


def tell(text: str) -> None:
    """Log at INFO; and as long as nobody has set up logging, show it to who sits at a terminal.
    `logging.getLogger("ckpt").setLevel(logging.WARNING)` keeps it quiet."""
    log.info("%s", text)
    unset = log.level <= logging.INFO and not log.hasHandlers() and log.manager.disable < logging.INFO
    if unset and sys.stderr is not None and sys.stderr.isatty():
        print(f"ckpt: {text}", file=sys.stderr, flush=True)
