"""Which runs lie below a folder, or a URL."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckpt.store import folder_of, normalise, open_store, url_of

MARK = "FORMAT.json"
PRIVATE = "permission denied, so nobody knows whether it is a run"
DEPTH = 3  # folders: who has runs deeper than that gives a folder nearer to them


async def runs_below(url: str, *, patience_s: float = 10.0, closed: dict[str, str] | None = None) -> list[str]:
    """Their URLs, sorted. What lies within a run is not looked at. In a bucket all names below are listed.
    `closed` gets the folders that may be runs and cannot be looked into, and why."""
    place = normalise(url)
    folder = folder_of(place)
    if folder is not None:
        return [url_of(path) for path in sorted(_walk(folder, DEPTH, {} if closed is None else closed))]
    store = open_store(place, patience_s=patience_s)
    try:
        marks = [info.key async for info in store.list() if info.key.endswith(f"/{MARK}")]
        found: list[str] = []
        for run in sorted(mark.removesuffix(f"/{MARK}") for mark in marks):  # a folder comes before what is within
            if not any(run.startswith(f"{above}/") for above in found):
                found.append(run)
        return [f"{place}/{run}" for run in found]
    finally:
        await store.aclose()


def _walk(folder: Path, depth: int, closed: dict[str, str]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in below:
            if _is_run(path, closed):
                yield path
            elif depth > 1 and url_of(path) not in closed:
                yield from _walk(path, depth - 1, closed)
    except (FileNotFoundError, NotADirectoryError):  # it went while we looked
        return
    except OSError as error:
        closed[url_of(folder)] = _reason(error)


def _is_run(folder: Path, closed: dict[str, str]) -> bool:
    try:
        return stat.S_ISREG((folder / MARK).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        closed[url_of(folder)] = _reason(error)
        return False


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return PRIVATE
    return f"{error.strerror or error}, so nobody knows whether it is a run"
