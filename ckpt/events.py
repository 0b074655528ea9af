"""Events of this process, for people (`log`) and for other programs (`subscribe`)."""

from __future__ import annotations

import logging
import sys

from ckpt.subscribers import Event, subscribe

__all__ = ["Event", "log", "subscribe"]

log = logging.getLogger("ckpt")  # without a handler: the program configures logging; Python prints warnings anyway


def tell(text: str) -> None:
    """Log at INFO. If logging is not configured and stderr is a terminal, also print the text to stderr.

    `logging.getLogger("ckpt").setLevel(logging.WARNING)` turns this off.
    """
    log.info("%s", text)
    unset = log.level <= logging.INFO and not log.hasHandlers() and log.manager.disable < logging.INFO
    if unset and sys.stderr is not None and sys.stderr.isatty():
        print(f"ckpt: {text}", file=sys.stderr, flush=True)
