"""Parses references to checkpoints, RUN@STEP, and name patterns, for all commands and `ckpt.load`.

RUN is a folder or URL. RUN@500 is its checkpoint of step 500, RUN@latest its newest checkpoint, and RUN@best the
checkpoint with the best score (`ckpt.Best`). Only the last @ counts, and only before digits or one of these words, so a
user name or a bucket key in a URL may contain @. If a folder with the full name exists, that folder is meant. For a
bucket prefix with such a name, add a slash.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from ckpt.errors import InvalidArgumentError
from ckpt.store import folder_of, normalise

LATEST, BEST = "latest", "best"
WORDS = (LATEST, BEST)

Which = int | str | None
"""A step, one of `WORDS`, or None if unspecified."""

_STEP = re.compile(rf"(.+)@([0-9]+|{'|'.join(WORDS)})", re.DOTALL)


def split(text: str | Path, step: int | None = None) -> tuple[str, Which]:
    """Return the run, and the step or word that selects its checkpoint. `step`: the value of the option `--step`. Raise
    InvalidArgumentError if `text` and `step` differ.
    """
    found = _STEP.fullmatch(str(text))
    if found is None or _is_folder(str(text)):
        return str(text), step
    named = found[2] if found[2] in WORDS else int(found[2])
    if step not in (None, named):
        raise InvalidArgumentError(f"{text} names @{named}, but the step option is {step}: use only one of them")
    return found[1], named


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a shell pattern matches a name or a prefix of its path: `model` matches everything below it."""
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def _is_folder(text: str) -> bool:
    folder = folder_of(normalise(text))
    return folder is not None and folder.exists()


def number(wanted: Which) -> int | None:
    """Return the step if it was given as a number, else None."""
    return wanted if isinstance(wanted, int) else None
