"""`ckpt ls`: list the checkpoints of a run. It imports little so that it starts quickly."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from datetime import datetime
from operator import itemgetter
from typing import Any

import click

from ckpt.core.checkpoint import losses
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.log.records import BY_HAND, MARK
from ckpt.errors import CheckpointError, FormatError, NoCheckpointError, is_unreadable
from ckpt.store import normalise
from ckpt.tools.cli import UNREADABLE
from ckpt.tools.cli.arguments import WholeRun, folders
from ckpt.tools.cli.terminal import (
    PATIENCE_S,
    example,
    human,
    look_options,
    opened,
    print_few,
    print_json,
    print_table,
    put,
)
from ckpt.units import count_of

REASONS = {"ring": "extra", "late": "extra"}


@click.command(epilog=example("ckpt ls", "ckpt ls runs/exp1", "ckpt ls runs/exp1 --json | jq '.checkpoints[0].step'"))
@click.argument("url", metavar="[RUN]", default=".", type=WholeRun(), shell_complete=folders)
@look_options
def ls(url: str, as_json: bool) -> int:
    """List the checkpoints of a run, newest first, or the runs below a folder. The default is the current folder.

    size: bytes that the checkpoint wrote; an increment also uses files of older checkpoints. ranks: number of ranks
    that saved it. why: scheduled, or extra (saved from memory, on request, at a fault, or after the trainer's death).
    history: marks the newest checkpoint, pinned checkpoints with the reason (the best with their scores, the step at
    which training ended), and checkpoints that a rollback undid. For a folder of runs: the newest step of each run,
    when it was saved, and the size of the run's data files. Times are local.
    """
    unread: list[object] = []
    try:
        found = asyncio.run(_ls(url))
    except (FormatError, NoCheckpointError):
        below = asyncio.run(_runs_below(url, unread))
        if not unread and all(one["bytes_in_files"] is None for one in below):
            raise
        show_runs(url, below, as_json)
        return UNREADABLE if unread else 0
    if as_json:
        print_json(found)
    else:
        show_checkpoints(found)
    return 0


def show_runs(url: str, runs: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"url": normalise(url), "runs": runs})
        return
    put(normalise(url))
    rows = [
        (
            one["name"],
            "" if one["newest"] is None else one["newest"],
            one["checkpoints"],
            when_text(one["saved"]),
            human(one["bytes_in_files"]),
        )
        for one in runs
        if not one["problem"]
    ]
    print_table(("run", "step", "checkpoints", "when", "size"), rows)
    print_few([f"{run['name']} cannot be read: {run['problem']}" for run in runs if run["problem"]])
    sizes = [one["bytes_in_files"] for one in runs if one["bytes_in_files"] is not None]
    put(f"{count_of(len(sizes), 'run')}, {human(sum(sizes))} in files")


def when_text(created: str | None) -> str:
    """Format a stored time as local time."""
    return datetime.fromisoformat(created).astimezone().strftime("%F %T") if created else "?"


async def _runs_below(url: str, unread: list[object]) -> list[dict[str, Any]]:
    """Return a row for each run below a folder. Add runs that cannot be read now to `unread`, except private runs."""
    from ckpt.tools.maintain.find_runs import PRIVATE, runs_below
    from ckpt.tools.maintain.listing import created, sizes_of

    top = normalise(url)

    def row(run: str, size: int | None, problem: str | None = None) -> dict[str, Any]:
        nothing = {"newest": None, "checkpoints": 0, "saved": None}
        return {"name": run.removeprefix(f"{top}/"), "url": run, **nothing, "bytes_in_files": size, "problem": problem}

    async def row_of(run: str) -> dict[str, Any]:
        try:
            async with opened(run) as log:
                newest = next(iter(log.state.lineage()), None)
                saved = None if newest is None else created(newest)
                step, count = newest and newest.step, len(log.state.commits)
                _, size = await sizes_of(log, [])
                return {**row(run, size), "newest": step, "checkpoints": count, "saved": saved}
        except CheckpointError as error:
            if is_unreadable(error):
                unread.append(run)
            return row(run, 0, str(error))

    closed: dict[str, str] = {}
    runs = await of_each(await runs_below(url, patience_s=PATIENCE_S, closed=closed), row_of)
    unread += [run for run, why in closed.items() if why != PRIVATE]
    return sorted([*runs, *(row(url, None, why) for url, why in closed.items())], key=itemgetter("name"))


def pinned_text(note: str | None) -> str:
    """Return why a checkpoint is pinned: the training's reason, with four-digit scores, or a note of the user."""
    if note is None:
        return ""
    ours, _, others = note.removeprefix(MARK).partition(BY_HAND)
    ours = re.sub(r"(?<==)-?\d+\.\d+(e[-+]?\d+)?", lambda score: f"{float(score[0]):.4g}", ours)
    return "pinned: " + "; ".join(part for part in (ours, others) if part)


def show_checkpoints(found: dict[str, Any]) -> None:
    rows = []
    for row in found["checkpoints"]:
        when = when_text(row["created"])
        history = "newest" if row["newest"] else "" if row["in_history"] else "undone by a rollback"
        history = "not finite" if row["finite"] is False else history
        history = ", ".join(part for part in (history, pinned_text(row["pinned"])) if part)
        size, kind = "gone" if row["gone"] else human(row["bytes"]), "full" if row["full"] else "increment"
        why = REASONS.get(row["reason"], row["reason"])
        rows.append((row["step"], when, size, kind, row["ranks"], why, history))
    put(found["url"])
    print_table(("step", "when", "size", "kind", "ranks", "why", "history"), rows)
    written = human(sum(row["bytes"] for row in found["checkpoints"]))
    count = count_of(len(rows), "checkpoint")
    put(f"{count}, {written} written, {human(found['bytes_in_files'])} in files")


async def _ls(url: str) -> dict[str, Any]:
    from ckpt.tools.maintain.listing import checkpoints_of

    async with opened(url) as log:
        rows, in_files = await checkpoints_of(log)
        return {
            "url": log.store.url,
            "damaged_records": log.state.damaged,
            "may_be_lost": sorted({a.step for one in await losses.of_log(log) for a in one.checkpoints}),
            "bytes_in_files": in_files,
            "checkpoints": [asdict(row) for row in rows],
        }
