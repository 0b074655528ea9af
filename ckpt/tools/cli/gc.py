"""`ckpt gc`: delete files that no checkpoint needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt.tools.cli.arguments import run_argument
from ckpt.tools.cli.terminal import (
    act,
    example,
    human,
    opened,
    plan_options,
    print_few,
    print_json,
    print_table,
    put,
)
from ckpt.tools.cli.upkeep import (
    TITLES,
    Found,
    cells,
    delete_files,
    grace_option,
    item_json,
    patience_text,
    show_end,
    sum_of,
)
from ckpt.units import count_of

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.tools.maintain.prune import GcPlan


@click.command(epilog=example("ckpt gc runs/exp1", "ckpt gc s3://bucket/exp1 --abort-open --yes"))
@run_argument
@click.option(
    "--abort-open",
    is_flag=True,
    help="First abort unfinished checkpoints of earlier job attempts, left by crashes or interrupted copies. They can"
    " never be completed afterwards, so make sure that no job and no copy is writing to the run.",
)
@grace_option
@plan_options
def gc(url: str, abort_open: bool, grace_s: float | None, yes: bool, as_json: bool) -> int:
    """Delete files that no checkpoint needs: those of unfinished and of deleted checkpoints.

    A job may be training in the run. Files of checkpoints that may still be committed stay, and so do files of other
    programs.

    files, size: number and size of the files to delete.
    """
    found = act(_gc(url, abort_open, grace_s, yes, as_json))
    if as_json:
        return print_json(found)
    if not found["needed"]:
        return 0
    done = found["done"] or {"files": 0, "uploads": 0}
    return show_end(
        found, f"deleted {count_of(done['files'], 'file')}, aborted {count_of(done['uploads'], 'unfinished upload')}"
    )


def show_gc(found: Found) -> None:
    put(found["url"])
    rows = [(*cells(one), f"to delete: {one['why']}") for one in found["delete"]]
    for one in found["open"]:
        rows.append((*cells(one), f"{'to end' if one['ending'] else 'stays, open'}: {one['why']}"))
    if rows:
        print_table(TITLES, rows)
    print_few([f"not from everystep, stays: {key}" for key in found["foreign"]], " that are not from everystep")
    live, files = found["live"], count_of(found["files"], "file")
    put(f"needed by checkpoints: {count_of(live['files'], 'file')}, {human(live['bytes'])}")
    uploads = count_of(found["uploads"], "unfinished upload")
    put(f"to delete: {files}, {human(found['bytes'])}, and {uploads}")
    if found["files"]:
        put(patience_text(found["grace_s"]))


async def _gc(url: str, abort_open: bool, grace_s: float | None, yes: bool, as_json: bool) -> Found:
    from ckpt.tools.maintain import prune as upkeep

    async with opened(url) as log:
        patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
        stock, uploads = await upkeep.take_stock(log), await upkeep.unfinished(log.store)
        plan = upkeep.plan_gc(log.store.url, log.state, stock, uploads, abort_open)
        found = _gc_json(log.store.url, plan, patience)
        if not as_json:
            show_gc(found)
        if not yes or not found["needed"]:
            return found
        landed, dropped = await upkeep.gc(log, stock, plan.ending)
        await delete_files(log, landed.delete, stock.sizes, patience)
        done = {**sum_of(landed.delete, stock.sizes), "uploads": dropped, "ended": list(map(str, plan.ending))}
        return {**found, "done": done}


def _gc_json(url: str, plan: GcPlan, grace_s: float) -> Found:
    return {
        "url": url,
        "delete": list(map(item_json, plan.doomed)),
        "open": [{**item_json(item), "ending": item.checkpoint in plan.ending} for item in plan.opened],
        "uploads": len(plan.uploads),
        "foreign": list(plan.foreign),
        "live": {"files": plan.live.files, "bytes": plan.live.size},
        "files": len(plan.delete),
        "bytes": sum(size for _, size in plan.delete),
        "grace_s": grace_s,
        "needed": bool(plan.delete or plan.uploads or plan.ending),
        "done": None,
    }
