"""List the checkpoints of a run. It imports little, so that `ckpt ls` starts quickly."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt.core.format.manifest import owner, rank_and_try
from ckpt.core.log.log import Commit, RunLog


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run.

    - `created`: UTC, ISO 8601. `ranks`: number that saved it.
    - `bytes`: size of the files that it wrote; an increment also uses files of older checkpoints.
    - `gone`: files that it wrote are missing.
    - `reason`: why it was saved; "due" if it was scheduled.
    - `finite`: False if training had diverged.
    - `in_history`: False if a rollback undid it.
    - `kept`: the note of its protection from deletion.
    """

    step: int
    attempt: str
    created: str
    bytes: int
    gone: bool
    full: bool
    ranks: int
    reason: str
    finite: bool | None
    newest: bool
    in_history: bool
    kept: str | None


async def checkpoints_of(log: RunLog) -> tuple[list[CheckpointInfo], int]:
    """Return the checkpoints, newest first, and the bytes of all data files."""
    commits = sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)
    history = {c.attempt: i for i, c in enumerate(log.state.lineage())}
    sizes, in_files = await sizes_of(log, commits)
    rows = [
        CheckpointInfo(
            c.step, str(c.attempt), created(c), size or 0, size is None, c.full, c.world, c.reason, c.finite,
            history.get(c.attempt) == 0, c.attempt in history, log.state.kept.get(c.attempt),
        )
        for c, size in zip(commits, sizes, strict=True)
        if c.attempt in log.state.commits  # not retired during the listing
    ]  # fmt: skip
    return rows, in_files


def created(commit: Commit) -> str:
    """Return when a checkpoint was committed: UTC, ISO 8601."""
    return datetime.fromtimestamp(commit.time, UTC).isoformat(timespec="seconds")


async def sizes_of(log: RunLog, commits: list[Commit]) -> tuple[list[int | None], int]:
    """Return the bytes of the data files that each checkpoint wrote, and of all data files. Files of older checkpoints
    and of failed retries do not count. None if a full checkpoint lacks the file of a rank."""
    sizes = {(c.attempt, rank, number): 0 for c in commits for rank, number, _ in c.parts}
    there, total = set(), 0
    async for info in log.store.list("packs/"):
        attempt = owner(info.key)
        total += info.size
        if attempt is not None and (key := (attempt, *rank_and_try(info.key))) in sizes:
            sizes[key] += info.size
            there.add(key)
    found: list[int | None] = []
    for commit in commits:
        mine = [(commit.attempt, rank, number) for rank, number, _ in commit.parts]
        gone = commit.full and not there.issuperset(mine)
        found.append(None if gone else sum(sizes[key] for key in mine))
    return found, total
