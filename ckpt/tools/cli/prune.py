"""`ckpt prune`: delete older checkpoints."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ckpt.tools.cli.arguments import run_argument
from ckpt.tools.cli.terminal import act, example, human, opened, plan_options, print_table, put
from ckpt.tools.cli.upkeep import (
    PARTIAL,
    TITLES,
    Deletion,
    Found,
    announce_wait,
    cells,
    grace_option,
    item_json,
    printed_early,
    show_end,
    show_order,
    sum_of,
)
from ckpt.units import count_of

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.core.checkpoint.retention import Keep
    from ckpt.tools.maintain.prune import PrunePlan, Watch


def number_or_all(context: click.Context, parameter: click.Parameter, text: str) -> int | str:
    return "all" if text == "all" else int(click.IntRange(min=1)(text, parameter, context))


@click.command(
    epilog=example("ckpt prune runs/exp1 --keep-last 3", "ckpt prune runs/exp1 --keep-last 2 --keep-daily 7 --yes")
)
@run_argument
@click.option(
    "--keep-last",
    callback=number_or_all,
    metavar="N|all",
    required=True,
    help='Number of newest checkpoints to keep, at least two; "all" deletes only files of unfinished checkpoints.',
)
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="Also keep each step that is a multiple of N."
)
@click.option(
    "--keep-hours",
    type=click.FloatRange(min=0, min_open=True),
    metavar="H",
    help="Keep all checkpoints that were committed at most H hours before the newest.",
)
@click.option(
    "--keep-daily", type=click.IntRange(min=0), default=0, metavar="N", help="Keep the newest of each of N days (UTC)."
)
@click.option(
    "--keep-weekly", type=click.IntRange(min=0), default=0, metavar="N", help="Keep the newest of each of N weeks."
)
@grace_option
@plan_options
def prune(
    url: str,
    keep_last: int | str,
    keep_every: int | None,
    keep_hours: float | None,
    keep_daily: int,
    keep_weekly: int,
    grace_s: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete older checkpoints. A job may be training in the run.

    The newest checkpoint is read back first; if it is damaged, nothing is deleted and the exit code is 1. Checkpoints
    that `ckpt pin` protects, the newest finite checkpoint and the newest two always stay.

    files, size: number and size of the files to delete.
    """
    deletion = Deletion()
    from ckpt.core.checkpoint.retention import Keep, as_keep

    if isinstance(keep_last, int):
        keep = Keep(keep_last, keep_every, keep_hours, keep_daily, keep_weekly)
    else:
        keep = as_keep(keep_last)
    found = act(_prune(url, keep, grace_s, yes, as_json, deletion.watch), deletion.so_far)
    if printed_early(found, as_json, "what is older"):
        return 1 if found["problems"] else 0
    if not (found["files"] or found["give_up"]):
        return 0
    done = found["done"] or {"given_up": (), "files": 0}
    return show_end(
        found, f"deleted {count_of(len(done['given_up']), 'checkpoint')}, {count_of(done['files'], 'file')}"
    )


def show_prune(found: Found) -> None:
    put(found["url"])
    rows = [(*cells(one), "to delete") for one in found["give_up"]]
    rows += [(*cells(one), f"stays: {one['why']}") for one in found["keep"]]
    print_table(TITLES, rows)
    if found["leftovers"]:
        put(f"also to delete: {count_of(found['leftovers'], 'file')} of unfinished checkpoints")
    put(f"{len(found['give_up'])} to delete: {count_of(found['files'], 'file')}, {human(found['bytes'])}")
    if found["partial"]:
        put(PARTIAL)
    if found["files"] or found["give_up"]:
        show_order(found)


async def _prune(url: str, keep: Keep, grace_s: float | None, yes: bool, as_json: bool, watch: Watch) -> Found:
    from ckpt.tools.maintain import prune as upkeep

    async with opened(url) as log:
        patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
        stock = await upkeep.take_stock(log)
        plan = upkeep.plan_prune(log, stock, keep)
        found = _prune_json(log.store.url, plan, keep, patience)
        if not as_json:
            show_prune(found)
        if not yes or not (plan.give_up or plan.delete):
            return found
        land = partial(upkeep.prune, log, stock, keep, plan.check.checkpoint)
        found["problems"], landed = await upkeep.carry_out(
            log, stock, plan.check, land, grace_s=patience, on_wait=announce_wait, watch=watch
        )
        if found["problems"]:
            return found
        given_up = sorted(map(str, landed.retire))
        return {**found, "done": {"given_up": given_up, **sum_of(landed.delete, stock.sizes)}}


def _prune_json(url: str, plan: PrunePlan, keep: Keep, grace_s: float) -> Found:
    return {
        "url": url,
        "keep_last": "all" if keep.all else keep.last,
        "keep_every": keep.every,
        "keep_hours": keep.hours,
        "keep_daily": keep.daily,
        "keep_weekly": keep.weekly,
        "check": plan.check.step,
        "give_up": list(map(item_json, plan.give_up)),
        "keep": list(map(item_json, plan.keep)),
        "leftovers": plan.leftovers,
        "files": len(plan.delete),
        "bytes": sum(size for _, size in plan.delete),
        "partial": plan.partial,
        "grace_s": grace_s,
        "problems": [],
        "done": None,
    }
