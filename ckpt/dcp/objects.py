"""Objects that are no tensors, as torch's DCP pickles them: which of them can be read without running code."""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import threading
from pathlib import PosixPath
from typing import Any

import torch

from ckpt.errors import UsageError
from ckpt.events import log as logger

# Beside what torch allows. Not numpy's scalars: a dtype with made-up fields lets numpy take bytes for addresses.
HARMLESS: list[Any] = [
    *(bytes, PosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
]
REFUSED = re.compile(r"Unsupported (?:global|class|operand)[^\n]*?(?= was not an allowed|\. |\n|$)")
_said: set[str] = set()
_lock = threading.Lock()  # what torch allows is the same in all threads


def check_object(what: str, raw: memoryview) -> None:
    """UsageError if the bytes of an object are not what torch reads without running code."""
    why = _refusal(raw)
    if why is not None:
        raise UsageError(
            f"{what} is an object that could run code when it is unpickled, so it is refused ({why}). If you trust "
            "whoever could write there: StorageReader(..., trusted=True), or name its classes with "
            "torch.serialization.add_safe_globals"
        )


def warn_once(name: str, raw: memoryview) -> None:
    """Say while it is saved, the first time, that an object will be refused."""
    if name in _said:
        return
    _said.add(name)
    why = _refusal(raw)
    if why is not None:
        logger.warning(
            "%s can only be loaded again with StorageReader(..., trusted=True), or once its classes are named with "
            "torch.serialization.add_safe_globals (%s)",
            name,
            why,
        )


def _refusal(raw: memoryview) -> str | None:
    with _lock, contextlib.closing(io.BytesIO(raw)) as file:
        named = torch.serialization.get_safe_globals()  # by the user, and so they have to stay
        try:
            with torch.serialization.safe_globals([one for one in HARMLESS if one not in named]):
                torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever hostile bytes make of the reader
            found = REFUSED.search(str(error))
            return (found[0] if found else next(iter(str(error).splitlines()), type(error).__name__))[:300]
    return None
