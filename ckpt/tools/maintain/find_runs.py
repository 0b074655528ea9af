"""Find the runs below a folder or URL."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckpt.store import folder_of, normalise, open_store, url_of

MARK = "FORMAT.json"
PRIVATE = "permission denied, so it may be a run"
DEPTH = 3  # levels of folders to search; to find deeper runs, start from a folder that is nearer to them


async def runs_below(url: str, *, patience_s: float = 10.0, closed: dict[str, str] | None = None) -> list[str]:
    """Return the sorted URLs of the runs below a URL. Folders inside a run are not searched. In a bucket, all names are
    listed. `closed`: gets the folders that may be runs but cannot be read, each with the reason."""
    location = normalise(url)
    folder = folder_of(location)
    if folder is not None:
        return [url_of(path) for path in sorted(_walk(folder, DEPTH, {} if closed is None else closed))]
    store = open_store(location, patience_s=patience_s)
    try:
        marks = [info.key async for info in store.list() if info.key.endswith(f"/{MARK}")]
        found: list[str] = []
        for run in sorted(mark.removesuffix(f"/{MARK}") for mark in marks):  # sorted, so a folder precedes its contents
            if not any(run.startswith(f"{above}/") for above in found):
                found.append(run)
        return [f"{location}/{run}" for run in found]
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
    except (FileNotFoundError, NotADirectoryError):  # the folder was deleted during the search
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
    return f"{error.strerror or error}, so it may be a run"
