"""List the checkpoints of a run. This module imports little, so that `ckpt ls` starts quickly."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt.core.format.manifest import STEPS, CheckpointId, is_data, owner, rank_of
from ckpt.core.log.records import MARK
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.errors import CorruptError, FormatError, StoreError, is_unreadable


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run.

    - `created`: time of the commit, UTC, ISO 8601. `ranks`: number of ranks that saved it.
    - `bytes`: size of the files that it wrote; an increment also uses files of older checkpoints.
    - `gone`: True if files that it wrote are missing.
    - `reason`: why it was saved; "due" means that it was scheduled.
    - `finite`: False if training had diverged.
    - `in_history`: False if a rollback undid it.
    - `id`: name of the checkpoint in its run, the same in every tier.
    - `pinned`: why it is protected from deletion; None if it is not.
    """

    step: int
    id: str
    created: str
    bytes: int
    gone: bool
    full: bool
    ranks: int
    reason: str
    finite: bool | None
    newest: bool
    in_history: bool
    pinned: str | None


def _pinned(note: str | None) -> str | None:
    """Return the note of a pin without the mark that pins of a training have."""
    return None if note is None else note.removeprefix(MARK)


async def checkpoints_of(log: RunLog) -> tuple[list[CheckpointInfo], int]:
    """Return the checkpoints, newest first, and the total bytes of all data files."""
    commits = sorted(log.state.commits.values(), key=lambda c: c.checkpoint, reverse=True)
    history = {c.checkpoint: i for i, c in enumerate(log.state.lineage())}
    sizes, in_files = await sizes_of(log, commits)
    rows = [
        CheckpointInfo(
            c.step, str(c.checkpoint), created(c), size or 0, size is None, c.full, c.world, c.reason, c.finite,
            history.get(c.checkpoint) == 0, c.checkpoint in history, _pinned(log.state.kept.get(c.checkpoint)),
        )
        for c, size in zip(commits, sizes, strict=True)
        if c.checkpoint in log.state.commits  # omit checkpoints that were retired during the listing
    ]  # fmt: skip
    return rows, in_files


def created(commit: Commit) -> str:
    """Return the time when a checkpoint was committed: UTC, ISO 8601."""
    return datetime.fromtimestamp(commit.time, UTC).isoformat(timespec="seconds")


async def sizes_of(log: RunLog, commits: list[Commit]) -> tuple[list[int | None], int]:
    """Return the bytes of the data files in each checkpoint's folder, and the total of all data files.

    The result is None for a full checkpoint that lacks the data file of a rank. A rank may never have had a data file,
    because its tensors are replicas or compressed to nothing. Its manifest, which is read only in that case, decides.
    """
    sizes: dict[tuple[CheckpointId | None, int | None], int] = {
        (c.checkpoint, rank): 0 for c in commits for rank, _ in c.manifests
    }
    there, total = set(), 0
    async for info in log.store.list(STEPS):
        if is_data(info.key):
            key, total = (owner(info.key), rank_of(info.key)), total + info.size
            if key in sizes:
                sizes[key] += info.size
                there.add(key)
    found: list[int | None] = []
    for commit in commits:
        folders = [(commit.checkpoint, rank) for rank, _ in commit.manifests]
        without = [row for row in commit.manifests if (commit.checkpoint, row[0]) not in there] if commit.full else []
        gone = await _any_lost(log, commit, without)
        found.append(None if gone else sum(sizes[key] for key in folders))
    return found, total


async def _any_lost(log: RunLog, commit: Commit, without: list[tuple[int, str]]) -> bool:
    """Return True if one of these ranks without data files should have one. An unreadable manifest does not count."""
    for rank, digest in without:
        from ckpt.core.checkpoint.manifests import read_manifest  # imports numpy

        try:
            manifest, _ = await read_manifest(log.store, commit.checkpoint, rank, expected=digest)
        except (CorruptError, FormatError, StoreError) as error:
            if is_unreadable(error):
                continue
            return True
        if any(owner(file.key) == commit.checkpoint for file in manifest.files):
            return True
    return False
