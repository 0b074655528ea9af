"""The checkpoints of a run, as somebody asks for them. It imports little, since people wait for `ckpt ls`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt.core.format.manifest import owner, rank_and_try
from ckpt.core.log.log import Commit, RunLog


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run. `created`: UTC, ISO 8601; `bytes`: what it wrote itself, an
    increment uses files of older ones besides; `gone`: files that it wrote are missing; `ranks` that saved it;
    `reason`: why it was saved, "due" if by its cadence; `finite`: False if the training had gone wrong; `in_history`:
    not undone by a rollback; `kept`: the note of who keeps it for ever."""

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
    """Newest first; and the bytes of all packs there are."""
    commits = sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)
    history = {c.attempt: i for i, c in enumerate(log.state.lineage())}
    sizes, in_files = await sizes_of(log, commits)
    rows = [
        CheckpointInfo(
            c.step, str(c.attempt), created(c), size or 0, size is None, c.full, c.world, c.reason, c.finite,
            history.get(c.attempt) == 0, c.attempt in history, log.state.kept.get(c.attempt),
        )
        for c, size in zip(commits, sizes, strict=True)
        if c.attempt in log.state.commits  # not retired while we looked
    ]  # fmt: skip
    return rows, in_files


def created(commit: Commit) -> str:
    """Return when a checkpoint was committed: UTC, ISO 8601."""
    return datetime.fromtimestamp(commit.time, UTC).isoformat(timespec="seconds")


async def sizes_of(log: RunLog, commits: list[Commit]) -> tuple[list[int | None], int]:
    """Bytes of the packs that each checkpoint wrote: not those of older ones that it uses, nor of tries that failed.

    None if a full one has no pack of some part any more. And the bytes of all packs there are.
    """
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
