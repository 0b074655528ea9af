"""Find and name the files of a run.

Tests do not spell the names of these files. When the layout of a run changes, this module follows it and the tests stay
as they are. It imports nothing of the library, so tests of promises may use it.

A key is the name of a file relative to its run, as stores use it. A checkpoint id is the text that the library prints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

DATA, MANIFEST, INDEX = "data", "manifest", "index"
KINDS = (DATA, MANIFEST, INDEX)  # of files that belong to a checkpoint
DATA_FOLDER = "steps"  # in which a writer creates data files. A file under this name makes every save fail

_KEY = re.compile(
    r"steps/((\d{9,})\.(\d+)-[0-9a-f]{8})/(?:(index)\.safetensors|rank-(\d+)(?:(\.json)|(?:-(\d+))?\.safetensors))"
)


class _Name(NamedTuple):
    """The fields of a file name. Names sort by step, then by rank, then by the number of the data file."""

    step: int
    term: int
    checkpoint: str
    rank: int  # -1 if the file belongs to no rank
    number: int
    kind: str


def _parse(key: str) -> _Name | None:
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    checkpoint, step, term, index, rank, json, number = found.groups()
    kind = INDEX if index else MANIFEST if json else DATA
    return _Name(int(step), int(term), checkpoint, int(rank or -1), int(number or 0), kind)


# -- keys --


def kind_of(key: str) -> str | None:
    """Return the kind of a file of a checkpoint. For other files of a run: "format" or their folder."""
    name, folder = _parse(key), key.partition("/")[0]
    if name or key == "FORMAT.json":
        return name.kind if name else "format"
    return folder if folder in ("log", "ledger", "faults") else None


def step_of(key: str) -> int | None:
    """Return the step of the checkpoint that wrote the file."""
    name = _parse(key)
    return name.step if name else None


def rank_of(key: str) -> int | None:
    """Return the rank that wrote the file. An index belongs to no rank."""
    name = _parse(key)
    return name.rank if name and name.rank >= 0 else None


def id_of(key: str) -> str | None:
    """Return the id of the checkpoint that wrote the file."""
    name = _parse(key)
    return name.checkpoint if name else None


def select(
    keys: Iterable[str], *kinds: str, step: int | None = None, rank: int | None = None, of: object = None
) -> list[str]:
    """Return the files of these kinds (default: all kinds) of a step, a rank or a checkpoint id, oldest step first."""
    found = [(name, key) for key in keys if (name := _parse(key)) is not None]
    wanted = [
        (name, key)
        for name, key in found
        if name.kind in (kinds or KINDS)
        and step in (None, name.step)
        and rank in (None, name.rank)
        and (of is None or str(of) == name.checkpoint)
    ]
    return [key for _, key in sorted(wanted)]


def checkpoint_id(step: int, term: int = 1, nonce: str = "0badcafe") -> str:
    return f"{step:09d}.{term}-{nonce}"


def data_key(checkpoint: object, rank: int = 0, number: int | None = None) -> str:
    """Name a data file. `number`: counts the files of a rank that has several; None if it has one."""
    return f"steps/{checkpoint}/rank-{rank:05d}{f'-{number:05d}' if number else ''}.safetensors"


def manifest_key(checkpoint: object, rank: int = 0) -> str:
    return f"steps/{checkpoint}/rank-{rank:05d}.json"


def index_key(checkpoint: object) -> str:
    return f"steps/{checkpoint}/index.safetensors"


def pattern(kind: str, step: int | None = None, rank: int | None = None) -> str:
    """Return a regular expression for keys, for paths and for the paths of requests to a bucket."""
    of = (r"\d{9,}" if step is None else f"{step:09d}") + r"\.\d+-[0-9a-f]{8}"
    ranks = r"rank-\d+" if rank is None else f"rank-{rank:05d}"
    name = {DATA: rf"{ranks}(-\d+)?[.]safetensors", MANIFEST: f"{ranks}[.]json", INDEX: "index[.]safetensors"}[kind]
    return f"steps/{of}/{name}"


# -- paths --


def keys_in(run: Path | str) -> list[str]:
    """List all files of a run except temporary ones. Files may vanish during the call."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), run)
        for folder, _, names in os.walk(run)
        for name in names
        if not name.startswith(".")
    )


def checkpoint_files(
    run: Path | str, *kinds: str, step: int | None = None, rank: int | None = None, of: object = None
) -> list[Path]:
    """Return the files that `select` selects in a folder."""
    return [Path(run, key) for key in select(keys_in(run), *kinds, step=step, rank=rank, of=of)]


def data_files(run: Path | str, step: int | None = None, rank: int | None = None) -> list[Path]:
    return checkpoint_files(run, DATA, step=step, rank=rank)


def manifests(run: Path | str, step: int | None = None, rank: int | None = None) -> list[Path]:
    return checkpoint_files(run, MANIFEST, step=step, rank=rank)


def indexes(run: Path | str, step: int | None = None) -> list[Path]:
    return checkpoint_files(run, INDEX, step=step)


def data_file(run: Path | str, step: int, rank: int = 0) -> Path:
    """Return the only data file that a rank wrote for a step."""
    (found,) = data_files(run, step, rank)
    return found


def data_bytes(run: Path | str, step: int | None = None, of: object = None) -> int:
    """Return the total size of the data files of a step, a checkpoint id or a run."""
    return sum(path.stat().st_size for path in checkpoint_files(run, DATA, step=step, of=of))


def ranks_in(run: Path | str, *kinds: str) -> set[int]:
    """Return the ranks that have files of these kinds (default: all kinds) in a folder."""
    return {rank for key in select(keys_in(run), *kinds) if (rank := rank_of(key)) is not None}


def temporary_files(run: Path | str) -> list[Path]:
    """Return the files that a writer has not completed."""
    return sorted(path for path in Path(run, DATA_FOLDER).rglob(".*") if path.is_file())


def id_at(run: Path | str, step: int) -> str:
    """Return the id of the checkpoint that wrote the data files of a step."""
    return next(found for path in data_files(run, step) if (found := id_of(str(path.relative_to(run)))))
