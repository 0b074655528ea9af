"""What happened, for people (`log`) and for other programs (`subscribe`)."""

from __future__ import annotations

import logging

from ckpt.subscribers import Event, subscribe

__all__ = ["Event", "log", "subscribe"]

log = logging.getLogger("ckpt")  # no handler: what is shown is up to the program, and warnings are without its doing
