"""The command that deletes one checkpoint: rm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ckpt.core.checkpoint.spelling import Which
from ckpt.tools.cli.arguments import checkpoint_argument
from ckpt.tools.cli.terminal import act, count_of, example, human, opened, plan_options, print_table, put
from ckpt.tools.cli.upkeep import (
    PARTIAL,
    TITLES,
    Deletion,
    Found,
    cells,
    grace_option,
    item_json,
    said_all,
    show_end,
    show_order,
    sum_of,
    told,
)

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.tools.maintain.prune import Watch
    from ckpt.tools.maintain.remove import RemovalPlan


@click.command(epilog=example("ckpt rm runs/exp1@500", "ckpt rm runs/exp1@500 --yes"))
@checkpoint_argument()
@grace_option
@plan_options
def rm(url: str, step: Which, grace_s: float | None, yes: bool, as_json: bool) -> int:
    """Delete one checkpoint. A job may be training there.

    The newest one that stays is read back first: nothing goes unless that is sound. One of `ckpt keep` stays, and so
    does the last one that a restore can take. Files that others use go with these. Exit code 1 if the one that was
    read back is damaged.

    files, size: what is deleted with it.
    """
    if step is None:
        raise click.UsageError(
            f"say which one: {url}@STEP. A whole run is a folder, or what a bucket has under that name: delete that, "
            "once `ckpt top` says on its machines that no writer has it"
        )
    deletion = Deletion()
    found = act(_rm(url, step, grace_s, yes, as_json, deletion.watch), deletion.so_far)
    if said_all(found, as_json, "this one"):
        return 1 if found["problems"] else 0
    return show_end(found, f"deleted step {found['remove']['step']}, {count_of(found['files'], 'file')}")


def show_rm(found: Found) -> None:
    put(found["url"])
    print_table(TITLES, [(*cells(found["remove"]), "to delete")])
    if shared := found["shared"]["files"]:
        put(f"{count_of(shared, 'file')} of it, {human(found['shared']['bytes'])}, stay: other checkpoints use them")
    if found["unread"]:
        steps = ", ".join(map(str, found["unread"]))
        put(f"its files stay as long as step {steps} cannot be read, and go when that does, or with `ckpt gc`")
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
        land = partial(remove, log, stock, commit.attempt, plan.check.attempt)
        found["problems"], landed = await upkeep.carry_out(
            log, stock, plan.check, land, grace_s=patience, on_wait=told, watch=watch
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
