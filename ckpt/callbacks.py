"""Check the keyword arguments of callbacks when they are created."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import fields

from ckpt.checkpointer import Checkpointer
from ckpt.errors import InvalidArgumentError
from ckpt.options import Options

PLACE = "the first argument, a folder or URL"
MEANT = {  # the names of our arguments, by the names that other trainers use
    "save_total_limit": "keep=",
    "save_steps": "every=",
    "every_n_train_steps": "every=",
    "train_time_interval": 'every="10min"',
    **dict.fromkeys(("dirpath", "output_dir", "path", "folder", "url", "run"), PLACE),
}


def check_keywords(callback: type, arguments: Mapping[str, object], meant: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError with a suggestion if a keyword is unknown to both the callback and Checkpointer.

    `meant`: further names of our arguments, by the names that other trainers use.
    """
    known: set[str] = set()
    for kind in (callback, Checkpointer):
        known |= inspect.signature(kind.__init__).parameters.keys() - {"self", "state", "arguments"}  # type: ignore[misc]
    names = {one: f"{one}=" for one in known} | {
        field.name: f"options=ckpt.Options({field.name}=...)" for field in fields(Options)
    }
    for word in arguments.keys() - known:
        near = [names[one] for one in difflib.get_close_matches(word, names, 1)]
        hint = {**MEANT, **meant}.get(word) or next(iter(near), None)
        raise InvalidArgumentError(f"unknown keyword {word}=" + (f": did you mean {hint}?" if hint else ""))
