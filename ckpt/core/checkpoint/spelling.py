"""RUN@STEP: how a checkpoint is named, the same in every command and in `ckpt.load`.

RUN is a folder or URL. RUN@500 is its checkpoint of step 500, RUN@latest the newest one, RUN@best the
best of those that were scored (`ckpt.Best`). Only a last @ before digits or
one of those words counts: that of a user or a bucket's key elsewhere in a URL does not. A folder whose own name ends
like that is meant where there is one; a place in a bucket with such a name is given with a slash behind it.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.errors import InvalidArgumentError
from ckpt.store import folder_of, normalise

LATEST, BEST = "latest", "best"
WORDS = (LATEST, BEST)

Which = int | str | None
"""A step, one of `WORDS`, or None where nothing was said."""

_STEP = re.compile(rf"(.+)@([0-9]+|{'|'.join(WORDS)})", re.DOTALL)


def split(text: str | Path, step: int | None = None) -> tuple[str, Which]:
    """The run, and which checkpoint of it. `step`: what was said besides, by `--step`; InvalidArgumentError if they
    differ.
    """
    found = _STEP.fullmatch(str(text))
    if found is None or _is_folder(str(text)):
        return str(text), step
    named = found[2] if found[2] in WORDS else int(found[2])
    if step not in (None, named):
        raise InvalidArgumentError(f"{text} asks for @{named}, and besides for step {step}: say it once")
    return found[1], named


def _is_folder(text: str) -> bool:
    folder = folder_of(normalise(text))
    return folder is not None and folder.exists()


def number(wanted: Which) -> int | None:
    """The step, where one was named by its number."""
    return wanted if isinstance(wanted, int) else None
