"""`ckpt verify`: check that every byte of a checkpoint is intact."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from ckpt.core.checkpoint import chunks, losses, read, reference
from ckpt.core.checkpoint.manifests import MANY, load_index
from ckpt.core.checkpoint.reference import Which
from ckpt.core.format.manifest import MAX_FORMAT, read_format
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.errors import CorruptError, NotFoundError, StoreError, is_unreadable
from ckpt.tools.cli import UNREADABLE
from ckpt.tools.cli.arguments import checkpoint_argument
from ckpt.tools.cli.terminal import (
    example,
    look_options,
    newest_first,
    opened,
    print_few,
    print_json,
    print_table,
    progress,
    put,
)
from ckpt.tools.maintain.examine import examine
from ckpt.tools.maintain.prune import some


@click.command(epilog=example("ckpt verify runs/exp1@500", "ckpt verify runs/exp1 --all --json"))
@checkpoint_argument()
@click.option("--all", "every", is_flag=True, help="Check every checkpoint instead of the newest.")
@click.option(
    "--data/--no-data",
    default=True,
    help="--data (default): read and decode every byte that a restore would read, also in files of older checkpoints."
    " --no-data: check only the log, the manifests, and the headers and sizes of data files; this is fast, but misses"
    " damage in tensors.",
)
@look_options
def verify(url: str, step: Which, every: bool, data: bool, as_json: bool) -> int:
    """Check every byte of a checkpoint. The exit code is 1 if anything is damaged, including the log.

    The verdict covers everything that a restore of the step reads. `ckpt repair` repairs damage if intact copies exist.
    Files that cannot be read now may be intact. They are listed, and the exit code is 3 if no damage was found. This
    includes files of ranks that are on the disks of other nodes: verify those files there.
    """
    if every and step is not None:
        raise click.UsageError("a step and --all cannot be combined")
    found = asyncio.run(_verify(url, step, every, data))
    if as_json:
        print_json(found)
    else:
        print_table(("step", "id", "verdict"), [tuple(c.values())[:3] for c in found["checkpoints"]])
        for problems in (found["problems"], list(by_problem(found["checkpoints"]))):
            print_few(problems)
        away = [*found["unreadable"], *by_problem(found["checkpoints"], "unreadable")]
        print_few([f"{one}: cannot be read now" for one in away])
        if away:
            put(AWAY)
        if here := [one["elsewhere"] for one in found["checkpoints"] if one["elsewhere"]]:
            print_few(here)
            put(ON_NODES)
        if any(c["problems"] for c in found["checkpoints"]) or any(map(mendable, found["problems"])):
            put(f"`ckpt repair {found['url']}` may repair it")
        if any(problem.startswith("log record") for problem in found["problems"]):
            put(LOST_RECORDS)
    if found["problems"] or any(c["problems"] for c in found["checkpoints"]):
        return 1
    unread = any(c["unreadable"] or c["elsewhere"] for c in found["checkpoints"])
    return UNREADABLE if found["unreadable"] or unread else 0


AWAY = (
    "files that cannot be read now may be intact. Restore access to them (mount, "
    "permissions, open file limit, credentials) and verify again"
)
ON_NODES = "the files here were checked. Run `ckpt verify` on the other nodes to check the rest"
LOST_RECORDS = (
    "lost log records cannot be repaired; the checkpoints above are judged without them. `ckpt copy --all` to another "
    "location copies all intact checkpoints into a run without this fault"
)


def mendable(problem: str) -> bool:
    return not problem.startswith(("log record", losses.NO_RECORD))


def by_problem(checkpoints: list[dict[str, Any]], kind: str = "problems") -> Iterator[str]:
    """Yield each distinct problem once, with all steps that it affects."""
    steps: dict[str, list[int]] = {}
    for one in checkpoints:
        for problem in one[kind]:
            steps.setdefault(problem, []).append(one["step"])
    for problem, who in steps.items():
        yield f"step{'s' * (len(who) > 1)} {some(who)}: {problem}"


async def _verify(url: str, step: Which, every: bool, data: bool) -> dict[str, Any]:
    async with opened(url, whole=True) as log:
        away = list[str]()
        damaged, lost = log.state.damaged, [one.reason for one in await losses.of_log(log) if one.checkpoints]
        problems = lost if lost and len(damaged) == 1 else losses.one_by_one(damaged) + lost
        try:
            read_format(await chunks.get(log.store, "FORMAT.json", limit=MAX_FORMAT))
        except (CorruptError, StoreError) as error:  # FORMAT.json; the log contains the same information
            what = "FORMAT.json is lost" if isinstance(error, NotFoundError) else str(error)
            (away if is_unreadable(error) else problems).append(what)
        commits = to_verify(log, step, every)
        total = await bytes_to_read(log, commits) if data and sys.stderr.isatty() else 0
        with progress("verifying", total) if total else contextlib.nullcontext() as on_bytes:
            checkpoints = [asdict(await examine(log, commit, on_bytes, data=data)) for commit in commits]
        return {
            "url": log.store.url,
            "data": data,
            "problems": problems,
            "unreadable": away,
            "checkpoints": checkpoints,
        }


def to_verify(log: RunLog, step: Which, every: bool) -> list[Commit]:
    """Return the checkpoints to verify. Raise NoCheckpointError if there are none and no log record is damaged."""
    if every and log.state.commits:
        return newest_first(log)
    if reference.number(step) is None and log.state.damaged and not log.state.lineage():
        return []
    return [read.choose(log, step)]


async def bytes_to_read(log: RunLog, commits: list[Commit]) -> int:
    """Return the bytes of tensors in all files that these checkpoints use. For damaged checkpoints, the result is an
    estimate. With very many ranks, it assumes raw data, because their chunk tables should be read only once."""
    total = 0
    for commit in commits:
        with contextlib.suppress(CorruptError, StoreError):
            if commit.world > MANY:
                index = await load_index(log.store, commit)
                total += sum(index.spec(tensor).nbytes for tensor in range(len(index.keys)))
            else:
                table = (await read.load_all(log.store, commit)).table
                total += sum(b.nbytes for b in read.plan_reads(table, range(table.owned), far=log.store.remote))
    return total
