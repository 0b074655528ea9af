"""Find the files of a run by their kind, for benchmarks that count them or their bytes."""

from __future__ import annotations

from pathlib import Path

from ckpt.core.format.manifest import owner

DATA, MANIFEST, INDEX = "data", "manifest", "index"


def kind_of(key: str) -> str | None:
    """Return the kind of a file of a checkpoint, or None for any other file."""
    if owner(key) is None:
        return None
    folder = key.partition("/")[0]
    return {"packs": DATA, "index": INDEX}.get(folder, MANIFEST)


def files(run: Path, *kinds: str, of: object = None) -> list[Path]:
    """Return the files of these kinds. `of`: a checkpoint id, default all checkpoints."""
    keys = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return [run / key for key in keys if kind_of(key) in kinds and (of is None or str(owner(key)) == str(of))]


def size(run: Path, *kinds: str, of: object = None) -> int:
    """Return the total size of these files in bytes."""
    return sum(path.stat().st_size for path in files(run, *kinds, of=of))
