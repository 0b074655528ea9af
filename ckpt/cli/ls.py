"""`ckpt ls`: the checkpoints of a run. It imports little, since people wait for it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import click

from ckpt.checkpoint import losses
from ckpt.checkpoint.concurrent import of_each
from ckpt.cli.arguments import run_argument
from ckpt.cli.terminal import (
    PATIENCE_S,
    count_of,
    example,
    human,
    look_options,
    newest_first,
    opened,
    print_few,
    print_json,
    print_table,
    redo_lines,
    redo_of,
    safe,
    say,
)
from ckpt.errors import CheckpointError, CorruptError, FormatError, StoreError
from ckpt.format.digest import file_digest
from ckpt.format.manifest import MAX_JSON, owner, part_key, rank_and_try
from ckpt.runlog.log import Commit, RunLog
from ckpt.store import get_small, normalise


@click.command(
    epilog=example("ckpt ls runs", "ckpt ls runs/exp1", "ckpt ls runs/exp1 --json | jq '.checkpoints[0].step'")
)
@run_argument
@look_options
def ls(url: str, as_json: bool) -> int:
    """List the checkpoints of a run, newest first; or the runs below a folder.

    The size is what each wrote itself: an increment uses files of older ones besides.
    """
    try:
        found = asyncio.run(_ls(url))
    except FormatError:
        if not (below := asyncio.run(_runs_below(url))):
            raise
        return show_runs(url, below, as_json)
    if as_json:
        return print_json(found)
    show_checkpoints(found)
    return 0


def show_runs(url: str, runs: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        return print_json({"url": normalise(url), "runs": runs})
    print(safe(normalise(url)))
    rows = [
        (one["name"], "" if one["newest"] is None else one["newest"], one["checkpoints"], when_text(one["created"]))
        for one in runs
        if not one["problem"]
    ]
    print_table(("run", "step", "checkpoints", "when"), rows)
    print_few([f"{one['name']} cannot be read: {one['problem']}" for one in runs if one["problem"]])
    print(count_of(len(runs), "run"))
    return 0


def when_text(created: str | None) -> str:
    """In the time of this machine."""
    return datetime.fromisoformat(created).astimezone().strftime("%F %T") if created else "?"


async def _runs_below(url: str) -> list[dict[str, Any]]:
    from ckpt.maintain.find_runs import runs_below

    top = normalise(url)

    async def look(run: str) -> dict[str, Any]:
        found: dict[str, Any] = {"name": run.removeprefix(f"{top}/"), "url": run}
        nothing: dict[str, Any] = {"newest": None, "checkpoints": 0, "created": None, "problem": None}
        try:
            async with opened(run) as log:
                newest = next(iter(log.state.lineage()), None)
                created = None if newest is None else await created_at(log, newest)
                step, count = newest and newest.step, len(log.state.commits)
                return {**found, **nothing, "newest": step, "checkpoints": count, "created": created}
        except CheckpointError as error:
            return {**found, **nothing, "problem": str(error)}

    return await of_each(await runs_below(url, patience_s=PATIENCE_S), look)


def show_checkpoints(found: dict[str, Any]) -> None:
    rows = []
    for row in found["checkpoints"]:
        when = when_text(row["created"])
        history = "newest" if row["newest"] else "" if row["in_history"] else "undone by a rollback"
        history = "not finite" if row["finite"] is False else history
        kept = "" if row["kept"] is None else f"kept: {row['kept']}"
        history = ", ".join(part for part in (history, kept) if part)
        size, kind = "gone" if row["gone"] else human(row["bytes"]), "full" if row["full"] else "increment"
        rows.append((row["step"], row["attempt"], when, size, kind, row["ranks"], row["reason"], history))
    print(safe(found["url"]))
    print_table(("step", "attempt", "when", "size", "kind", "ranks", "why", "history"), rows)
    written = human(sum(row["bytes"] for row in found["checkpoints"]))
    count = count_of(len(rows), "checkpoint")
    print(f"{count}, {written} written, {human(found['bytes_in_files'])} in files")
    for line in redo_lines(found["redo"]):
        print(line)


async def _ls(url: str) -> dict[str, Any]:
    async with opened(url) as log:
        commits = newest_first(log)
        created = await of_each(commits, lambda commit: created_at(log, commit))
        history = {c.attempt: i for i, c in enumerate(log.state.lineage())}
        sizes, in_files = await sizes_of(log, commits)
        rows = [
            {
                "step": c.step,
                "attempt": str(c.attempt),
                "created": when,
                "bytes": size or 0,
                "gone": size is None,
                "full": c.full,
                "ranks": c.world,
                "reason": c.reason,
                "finite": c.finite,
                "newest": history.get(c.attempt) == 0,
                "in_history": c.attempt in history,
                "kept": log.state.kept.get(c.attempt),
            }
            for c, when, size in zip(commits, created, sizes, strict=True)
            if c.attempt in log.state.commits  # not retired while we looked
        ]
        return {
            "url": log.store.url,
            "damaged_records": log.state.damaged,
            "may_be_lost": sorted({a.step for one in await losses.of_log(log) for a in one.attempts}),
            "bytes_in_files": in_files,
            "checkpoints": rows,
            "redo": redo_of(log),
        }


async def created_at(log: RunLog, commit: Commit) -> str | None:
    """When rank 0 finished its part, in UTC; None, and a word about it, if the part cannot tell."""
    try:
        rank, number, digest = commit.parts[0]
        key = part_key(commit.attempt, rank, number)
        raw = await get_small(log.store, key, MAX_JSON)
        if file_digest(raw) != digest:  # with the right digest, the part needs no check field by field
            raise CorruptError(f"{key} is not the part that was committed: its digest differs")
        return datetime.fromtimestamp(json.loads(bytes(raw))["created"], UTC).isoformat(timespec="seconds")
    except (StoreError, CorruptError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        from ckpt.checkpoint.read import still_live

        if await still_live(log, commit):
            say(f"WARNING: step {commit.step} is damaged: {error}. `ckpt verify --all` says more")
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
