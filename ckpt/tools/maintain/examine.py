"""Check whether a checkpoint is intact, and name each problem once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.core.checkpoint import read
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.errors import NotFoundError, StoreError
from ckpt.store import Store

UNREADABLE = "cannot be read now"
NAMED = re.compile(r"\bsteps/[\w.-]+/[\w-]+\.(safetensors|json)\b")  # a file name in a message


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one checkpoint. `verdict`: "sound", "damaged", "cannot be read now", or "retired" during the
    check. `problems`: the damage, as text. `unreadable`: files that cannot be read now and may be intact."""

    step: int
    id: str
    verdict: str
    problems: list[str]
    unreadable: list[str] = field(default_factory=list)


async def examine(
    log: RunLog, commit: Commit, on_bytes: Callable[[int], None] | None = None, *, data: bool = True
) -> Verdict:
    """Read a checkpoint back. `data=False` reads only its metadata."""
    away = dict[str, None]()
    problems = await read.verify(
        log.store, commit, data=data, on_bytes=on_bytes, on_unreadable=lambda error: away.update({str(error): None})
    )
    verdict = "damaged" if problems else UNREADABLE if away else "sound"
    if verdict != "sound" and not await read.still_live(log, commit):
        return Verdict(commit.step, str(commit.checkpoint), "retired", [])
    return Verdict(commit.step, str(commit.checkpoint), verdict, await plainly(log.store, problems), list(away))


async def plainly(store: Store, problems: list[str]) -> list[str]:
    """Shorten the problems: for a missing file, state only that."""
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
