"""`ckpt copy`: copy checkpoints to another location with `ckpt.tools.maintain.copy_run`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from ckpt.core.checkpoint.reference import Which
from ckpt.errors import UsageError
from ckpt.store import normalise, open_store, remember_options
from ckpt.tools.cli.arguments import checkpoint_argument, folders
from ckpt.tools.cli.terminal import (
    act,
    example,
    human,
    opened,
    parse_options,
    plan_options,
    print_json,
    print_table,
    progress,
    put,
)
from ckpt.tools.cli.upkeep import TITLES, Found, cells, item_json, show_end
from ckpt.units import count_of

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.core.log.run_log import Commit, RunLog
    from ckpt.tools.maintain.copy_run import CopyPlan


@click.command(
    epilog=example(
        "ckpt copy runs/exp1 s3://bucket/exp1", "ckpt copy s3://bucket/exp1@500 runs/again --yes --src-option anon=true"
    )
)
@checkpoint_argument("src", "SRC")
@click.argument("dst", shell_complete=folders)
@click.option("--all", "every", is_flag=True, help="Copy every checkpoint of the current history.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Let DST continue from the copy even if a job trains there; that job can no longer save.",
)
@click.option("--src-option", "src_options", metavar="KEY=VALUE", multiple=True, callback=parse_options,
              help="Like --option, for SRC only.")  # fmt: skip
@click.option("--dst-option", "dst_options", metavar="KEY=VALUE", multiple=True, callback=parse_options,
              help="Like --option, for DST only.")  # fmt: skip
@plan_options
def copy(
    src: str,
    dst: str,
    step: Which,
    every: bool,
    take_over: bool,
    src_options: Found,
    dst_options: Found,
    yes: bool,
    as_json: bool,
) -> int:
    """Copy the newest checkpoint, or SRC@STEP, to another location: a new run or an existing one.

    Every byte is verified. Files that DST already has are not copied again, so an interrupted copy can be repeated. A
    training started in a new DST continues from the copy. With --all, damaged checkpoints are skipped; exit code 1.

    files, size: number and size of the files to copy.
    """
    if every and step is not None:
        raise click.UsageError("a step and --all cannot be combined")
    if normalise(src) == normalise(dst):
        raise click.UsageError("SRC and DST are the same location")
    remember_options(src, src_options or None)
    remember_options(dst, dst_options or None)
    found = act(_copy(src, dst, step, every, take_over, yes, as_json))
    if as_json:
        print_json(found)
    elif found["copy"]:
        for failed in found["done"]["failed"] if found["done"] else ():
            put(f"skipped: {failed['why']}")
        show_end(found, f"copied {len(found['done']['copied']) if found['done'] else 0}, every byte verified")
    return 1 if found["not_copied"] else 0


def show_copy(found: Found) -> None:
    put(f"{found['source']} -> {found['target']}" + (", a new run" if found["new_run"] else ""))
    rows = [(*cells(one), "to copy") for one in found["copy"]]
    rows += [(*cells(one), "already there") for one in found["already_there"]]
    rows += [(*cells(one), f"not copied: {one['why']}") for one in found["not_copied"]]
    print_table(TITLES, rows)
    put(f"{len(found['copy'])} to copy: {count_of(found['files'], 'file')}, {human(found['bytes'])}")
    if found["fences"]:
        put("a job that trains in the target can no longer save")


async def _copy(src: str, dst: str, step: Which, every: bool, take_over: bool, yes: bool, as_json: bool) -> Found:
    from ckpt.core.checkpoint.commits import written_run
    from ckpt.tools.maintain import copy_run

    async with opened(src) as source:
        wanted = _wanted(source, step, every)
        async with _existing(dst) as target:
            plan = await copy_run.plan_copy(source, target, wanted, take_over)
        if plan.left_out and not every:
            raise UsageError(f"step {wanted[0].step} cannot be copied: {plan.left_out[0].why}")
        found = _copy_json(source.store.url, normalise(dst), plan)
        if not as_json:
            show_copy(found)
        if yes and plan.copy:
            async with written_run(dst) as far:
                with progress("copying", sum(item.size for item in plan.copy)) as on_bytes:
                    failed = await copy_run.copy(source, far, plan, go_on=every, on_bytes=on_bytes)
            out = {item.checkpoint for item in failed}
            copied = [str(item.checkpoint) for item in plan.copy if item.checkpoint not in out]
            found["done"] = {"copied": copied, "failed": list(map(item_json, failed))}
            found["not_copied"] += found["done"]["failed"]
        return found


def _wanted(source: RunLog, step: Which, every: bool) -> list[Commit]:
    from ckpt.core.checkpoint import read

    return source.state.lineage() if every and source.state.lineage() else [read.choose(source, step)]


@contextlib.asynccontextmanager
async def _existing(url: str) -> AsyncIterator[RunLog | None]:
    from ckpt.tools.maintain import copy_run

    store = open_store(url)
    try:
        yield await copy_run.open_target(store)
    finally:
        await store.aclose()


def _copy_json(source: str, target: str, plan: CopyPlan) -> Found:
    return {
        "source": source,
        "target": target,
        "new_run": plan.new,
        "copy": list(map(item_json, plan.copy)),
        "already_there": list(map(item_json, plan.there)),
        "not_copied": list(map(item_json, plan.left_out)),
        "files": sum(item.files for item in plan.copy),
        "bytes": sum(item.size for item in plan.copy),
        "fences": plan.fences,
        "done": None,
    }
