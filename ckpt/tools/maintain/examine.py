"""Check whether a checkpoint is intact, and report each problem once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.core.checkpoint import read
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.errors import NotFoundError, StoreError
from ckpt.store import Store

UNREADABLE = "cannot be read now"
NAMED = re.compile(r"\bsteps/[\w.-]+/[\w-]+\.(safetensors|json)\b")  # matches the name of a file in a message


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking one checkpoint.

    - `verdict`: "sound"; "sound here" if the files here are intact, but files of other ranks are on the disks of other
      nodes; "damaged"; "cannot be read now"; or "retired" if it was deleted during the check.
    - `problems`: the damage, as text.
    - `unreadable`: files that cannot be read now and may be intact.
    - `elsewhere`: "" if all files are here, otherwise a text with the number of ranks whose files are here.
    """

    step: int
    id: str
    verdict: str
    problems: list[str]
    unreadable: list[str] = field(default_factory=list)
    elsewhere: str = ""


async def examine(
    log: RunLog, commit: Commit, on_bytes: Callable[[int], None] | None = None, *, data: bool = True
) -> Verdict:
    """Read a checkpoint back. `data=False` reads only its metadata."""
    away = dict[str, None]()
    problems = await read.verify(
        log.store, commit, data=data, on_bytes=on_bytes, on_unreadable=lambda error: away.update({str(error): None})
    )
    intact = "sound" if commit.whole else "sound here"
    verdict = "damaged" if problems else UNREADABLE if away else intact
    if verdict != intact and not await read.still_live(log, commit):
        return Verdict(commit.step, str(commit.checkpoint), "retired", [])
    elsewhere, shown = "" if commit.whole else read.elsewhere(commit), await plainly(log.store, problems)
    return Verdict(commit.step, str(commit.checkpoint), verdict, shown, list(away), elsewhere)


async def plainly(store: Store, problems: list[str]) -> list[str]:
    """Shorten problems: if a file is missing, report only that."""
    shortened, gone = list[str](), dict[str, bool]()
    for problem in problems:
        if named := NAMED.search(problem):
            key = named[0]
            if key not in gone:
                try:
                    await store.head(key)
                    gone[key] = False
                except StoreError as error:
                    gone[key] = isinstance(error, NotFoundError)
            problem = f"{key} is gone" if gone[key] else problem
        shortened.append(problem)
    return list(dict.fromkeys(shortened))
