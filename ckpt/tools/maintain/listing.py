"""The checkpoints of a run, as somebody asks for them. It imports little, since people wait for `ckpt ls`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import MAX_JSON, owner, part_key, rank_and_try
from ckpt.core.log.log import Commit, RunLog
from ckpt.errors import CorruptError, StoreError, is_unreadable
from ckpt.events import log as logger
from ckpt.store import get_small


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run. `created`: UTC, ISO 8601, None if that cannot be read; `bytes`: what it wrote itself, an
    increment uses files of older ones besides; `gone`: files that it wrote are missing; `ranks` that saved it;
    `reason`: why it was saved, "due" if by its cadence; `finite`: False if the training had gone wrong; `in_history`:
    not undone by a rollback; `kept`: the note of who keeps it for ever."""

    step: int
    attempt: str
    created: str | None
    bytes: int
    gone: bool
    full: bool
    ranks: int
    reason: str
    finite: bool | None
    newest: bool
    in_history: bool
    kept: str | None


async def checkpoints_of(
    log: RunLog, on_unreadable: Callable[[int], object] = lambda step: None
) -> tuple[list[CheckpointInfo], int]:
    """Newest first; and the bytes of all packs there are. `on_unreadable`: see `created_at`."""
    commits = sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)
    created = await of_each(commits, lambda commit: created_at(log, commit, on_unreadable))
    history = {c.attempt: i for i, c in enumerate(log.state.lineage())}
    sizes, in_files = await sizes_of(log, commits)
    rows = [
        CheckpointInfo(
            c.step, str(c.attempt), when, size or 0, size is None, c.full, c.world, c.reason, c.finite,
            history.get(c.attempt) == 0, c.attempt in history, log.state.kept.get(c.attempt),
        )
        for c, when, size in zip(commits, created, sizes, strict=True)
        if c.attempt in log.state.commits  # not retired while we looked
    ]  # fmt: skip
    return rows, in_files


async def created_at(
    log: RunLog, commit: Commit, on_unreadable: Callable[[int], object] = lambda step: None
) -> str | None:
    """When rank 0 finished its part, in UTC; None, and a word about it, if the part cannot tell. `on_unreadable` is
    called with the step if the part cannot be read now."""
    try:
        rank, number, digest = commit.parts[0]
        key = part_key(commit.attempt, rank, number)
        raw = await get_small(log.store, key, MAX_JSON)
        if file_digest(raw) != digest:  # with the right digest, the part needs no check field by field
            raise CorruptError(f"{key} is not the part that was committed: its digest differs")
        return datetime.fromtimestamp(json.loads(bytes(raw))["created"], UTC).isoformat(timespec="seconds")
    except (StoreError, CorruptError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        from ckpt.core.checkpoint.read import still_live  # which imports much

        if await still_live(log, commit):
            problem = "cannot be read now" if is_unreadable(error) else "is damaged"
            if is_unreadable(error):
                on_unreadable(commit.step)
            logger.warning("step %d %s: %s. `ckpt verify --all` says more", commit.step, problem, error)
        return None


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
