"""`ckpt rm`: delete one checkpoint."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ckpt.core.checkpoint.reference import Which
from ckpt.tools.cli.arguments import checkpoint_argument
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
    from ckpt.tools.maintain.prune import Watch
    from ckpt.tools.maintain.remove import RemovalPlan


@click.command(epilog=example("ckpt rm runs/exp1@500", "ckpt rm runs/exp1@500 --yes"))
@checkpoint_argument()
@grace_option
@plan_options
def rm(url: str, step: Which, grace_s: float | None, yes: bool, as_json: bool) -> int:
    """Delete one checkpoint. A job may be training in the run.

    The newest other checkpoint is read back first; if it is damaged, nothing is deleted and the exit code is 1.
    Checkpoints that `ckpt pin` protects, and the last one that can be restored, are not deleted. Files that other
    checkpoints use stay.

    files, size: number and size of the files to delete.
    """
    if step is None:
        raise click.UsageError(
            f"no checkpoint given: use {url}@STEP. To delete a whole run, delete its folder or prefix "
            "when `ckpt top` on its machines lists no writer of it"
        )
    deletion = Deletion()
    found = act(_rm(url, step, grace_s, yes, as_json, deletion.watch), deletion.so_far)
    if printed_early(found, as_json, "this one"):
        return 1 if found["problems"] else 0
    return show_end(found, f"deleted step {found['remove']['step']}, {count_of(found['files'], 'file')}")


def show_rm(found: Found) -> None:
    put(found["url"])
    print_table(TITLES, [(*cells(found["remove"]), "to delete")])
    if shared := found["shared"]["files"]:
        put(
            f"{count_of(shared, 'file')} of it, {human(found['shared']['bytes'])}, stay because other checkpoints use "
            "them"
        )
    if found["unread"]:
        steps = ", ".join(map(str, found["unread"]))
        put(f"its files stay while step {steps} cannot be read; they are deleted with that step or by `ckpt gc`")
    if found["partial"]:
        put(PARTIAL)
    show_order(found)


async def _rm(url: str, step: Which, grace_s: float | None, yes: bool, as_json: bool, watch: Watch) -> Found:
    from ckpt.core.checkpoint import read
    from ckpt.tools.maintain import prune as upkeep
    from ckpt.tools.maintain.remove import plan_removal, remove

    async with opened(url) as log:
        patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
        stock = await upkeep.take_stock(log)
        commit = read.choose(log, step)
        plan = plan_removal(log, stock, commit)
        found = _rm_json(log.store.url, plan, patience)
        if not as_json:
            show_rm(found)
        if not yes:
            return found
        land = partial(remove, log, stock, commit.checkpoint, plan.check.checkpoint)
        found["problems"], landed = await upkeep.carry_out(
            log, stock, plan.check, land, grace_s=patience, on_wait=announce_wait, watch=watch
        )
        return found if found["problems"] else {**found, "done": sum_of(landed.delete, stock.sizes)}


def _rm_json(url: str, plan: RemovalPlan, grace_s: float) -> Found:
    shared = item_json(plan.shared)
    return {
        "url": url,
        "check": plan.check.step,
        "remove": item_json(plan.item),
        "files": len(plan.delete),
        "bytes": plan.item.size,
        "shared": {"files": shared["files"], "bytes": shared["bytes"]},
        "unread": list(plan.unread),
        "partial": plan.partial,
        "grace_s": grace_s,
        "problems": [],
        "done": None,
    }
