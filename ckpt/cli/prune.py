"""The commands that say what stays of a run: prune, gc, keep. What they do is in `ckpt.maintain.prune`.

Each prints a plan and does nothing, unless `--yes` is given. With `--json`, one document: the plan, and under `done`
what was done, null where nothing was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.terminal import (
    act,
    count_of,
    example,
    human,
    json_option,
    opened,
    place_option,
    print_few,
    print_json,
    print_table,
    progress,
    safe,
    say,
    yes_option,
)

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.maintain.prune import GcPlan, Item, PrunePlan
    from ckpt.runlog.log import RunLog

Found = dict[str, Any]
TITLES = ("step", "attempt", "files", "size", "what")


grace_option = click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long readers of what goes may go on before it is deleted. By default 600 in object stores, 0 in folders.",
)


def show_end(found: Found, done: str) -> int:
    """The last line of a plan that is not empty."""
    print(safe(done) if found["done"] else "Nothing was done. With --yes it is.")
    return 0


# -- prune --


def number_or_all(context: click.Context, parameter: click.Parameter, text: str) -> int | str:
    return "all" if text == "all" else int(click.IntRange(min=1)(text, parameter, context))


@click.command(
    epilog=example("ckpt prune runs/exp1 --keep-last 3", "ckpt prune runs/exp1 --keep-last 2 --keep-every 1000 --yes")
)
@click.argument("url")
@click.option(
    "--keep-last",
    callback=number_or_all,
    metavar="INTEGER|all",
    required=True,
    help='So many of the newest stay, two at least; "all": only files of attempts that have ended go.',
)
@click.option("--keep-every", type=click.IntRange(min=1), help="And every one whose step is a multiple of this.")
@grace_option
@place_option
@yes_option
@json_option
def prune(
    url: str,
    keep_last: int | str,
    keep_every: int | None,
    grace_s: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Give up older checkpoints. A job may be training there.

    The newest one is read back first: nothing goes unless that is sound. Those of `ckpt keep`, the newest finite one
    and the newest two stay in any case. Exit code 1 if the newest one is damaged.
    """
    found = act(_prune(url, keep_last, keep_every, grace_s, yes, as_json))
    if as_json:
        print_json(found)
        return 1 if found["problems"] else 0
    if found["problems"]:
        print_few(found["problems"])
        print(f"Nothing was done: step {found['check']} is damaged, and what is older may be needed")
        return 1
    if not (found["files"] or found["give_up"]):
        return 0
    done = found["done"] or {"given_up": (), "files": 0}
    return show_end(found, f"gave up {len(done['given_up'])}, deleted {count_of(done['files'], 'file')}")


def show_prune(found: Found) -> None:
    print(safe(found["url"]))
    rows = [(*cells(one), "to give up") for one in found["give_up"]]
    rows += [(*cells(one), f"stays: {one['why']}") for one in found["keep"]]
    print_table(TITLES, rows)
    if found["leftovers"]:
        print(f"{found['leftovers']} files of attempts that have ended go as well")
    print(f"{len(found['give_up'])} to give up: {count_of(found['files'], 'file')}, {human(found['bytes'])}")
    if found["partial"]:
        print("this tier holds the parts of some ranks only: do the same in those of the other nodes")
    if found["files"] or found["give_up"]:
        print(f"step {found['check']} is read back before anything goes; then {_patience(found['grace_s'])}")


async def _prune(
    url: str, last: int | str, every: int | None, grace_s: float | None, yes: bool, as_json: bool
) -> Found:
    from ckpt.checkpoint import read, retention
    from ckpt.maintain import prune as upkeep

    async with opened(url) as log:
        keep = retention.Keep(last, every) if isinstance(last, int) else retention.as_keep(last)
        patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
        stock = await upkeep.take_stock(log)
        plan = upkeep.plan_prune(log, stock, keep)
        found = _prune_json(log.store.url, plan, keep, patience)
        if not as_json:
            show_prune(found)
        if not yes or not (plan.give_up or plan.delete):
            return found
        total = sum(stock.sizes.get(key, 0) for key in stock.used[plan.check.attempt])
        with progress("reading back", total) as on_bytes:
            found["problems"] = await read.verify(log.store, plan.check, on_bytes=on_bytes)
        if found["problems"]:
            return found
        landed = await upkeep.prune(log, stock, keep, plan.check.attempt)
        await _delete(log, landed.delete, stock.sizes, patience)
        given_up = sorted(map(str, landed.retire))
        return {**found, "done": {"given_up": given_up, **_sum(landed.delete, stock.sizes)}}


def _prune_json(url: str, plan: PrunePlan, keep: Any, grace_s: float) -> Found:
    return {
        "url": url,
        "keep_last": "all" if keep.all else keep.last,
        "keep_every": keep.every,
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


# -- gc --


@click.command(epilog=example("ckpt gc runs/exp1", "ckpt gc s3://bucket/exp1 --abort-open --yes"))
@click.argument("url")
@click.option(
    "--abort-open",
    is_flag=True,
    help="First end attempts of earlier epochs that are still open: left by crashes, or by interrupted copies. They can"
    " never be completed then, so let no job and no copy be at work there.",
)
@grace_option
@place_option
@yes_option
@json_option
def gc(url: str, abort_open: bool, grace_s: float | None, yes: bool, as_json: bool) -> int:
    """Delete files that no checkpoint needs: of attempts that have ended, and of those given up.

    A job may be training there. Attempts that may still become checkpoints stay, and so do files that are not ours.
    """
    found = act(_gc(url, abort_open, grace_s, yes, as_json))
    if as_json:
        return print_json(found)
    if not found["needed"]:
        return 0
    done = found["done"] or {"files": 0, "uploads": 0}
    return show_end(
        found, f"deleted {count_of(done['files'], 'file')}, dropped {count_of(done['uploads'], 'unfinished upload')}"
    )


def show_gc(found: Found) -> None:
    print(safe(found["url"]))
    rows = [(*cells(one), f"to delete: {one['why']}") for one in found["delete"]]
    for one in found["open"]:
        rows.append((*cells(one), f"{'to end' if one['ending'] else 'stays, open'}: {one['why']}"))
    if rows:
        print_table(TITLES, rows)
    print_few([f"not ours, stays: {key}" for key in found["foreign"]], " that are not ours")
    live, files = found["live"], count_of(found["files"], "file")
    print(f"needed by checkpoints: {count_of(live['files'], 'file')}, {human(live['bytes'])}")
    uploads = count_of(found["uploads"], "unfinished upload")
    print(f"to delete: {files}, {human(found['bytes'])}, and {uploads}")
    if found["files"]:
        print(_patience(found["grace_s"]))


async def _gc(url: str, abort_open: bool, grace_s: float | None, yes: bool, as_json: bool) -> Found:
    from ckpt.maintain import prune as upkeep

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
        await _delete(log, landed.delete, stock.sizes, patience)
        done = {**_sum(landed.delete, stock.sizes), "uploads": dropped, "ended": list(map(str, plan.ending))}
        return {**found, "done": done}


def _gc_json(url: str, plan: GcPlan, grace_s: float) -> Found:
    return {
        "url": url,
        "delete": list(map(item_json, plan.doomed)),
        "open": [{**item_json(item), "ending": item.attempt in plan.ending} for item in plan.opened],
        "uploads": len(plan.uploads),
        "foreign": list(plan.foreign),
        "live": {"files": plan.live.files, "bytes": plan.live.size},
        "files": len(plan.delete),
        "bytes": sum(size for _, size in plan.delete),
        "grace_s": grace_s,
        "needed": bool(plan.delete or plan.uploads or plan.ending),
        "done": None,
    }


# -- keep --


@click.command(
    epilog=example("ckpt keep runs/exp1 500 --note 'as published' --yes", "ckpt keep runs/exp1 500 --undo --yes")
)
@click.argument("url")
@click.argument("step", type=click.IntRange(min=0))
@click.option("--note", help="Why; stays with the checkpoint.")
@click.option("--undo", is_flag=True, help="It may go again, as its age demands.")
@place_option
@yes_option
@json_option
def keep(
    url: str,
    step: int,
    note: str | None,
    undo: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Keep a checkpoint for ever: no retention and no clean-up takes it. A job may be training there."""
    if undo == (note is not None):
        raise click.UsageError("give --note, which says why, or --undo")
    found = act(_keep(url, step, note, yes, as_json))
    if as_json:
        return print_json(found)
    return 0 if found["was"] == note else show_end(found, "done")


def show_keep(found: Found) -> None:
    was = "is not kept" if found["was"] is None else f"is kept: {found['was']}"
    print(safe(f"step {found['step']} of {found['url']}, attempt {found['attempt']}, {was}"))
    if found["was"] != found["note"]:
        print(safe("to let it go, as its age demands" if found["note"] is None else f"to keep it: {found['note']}"))
    if found["partial"]:
        print("this tier holds the parts of some ranks only: do the same in those of the other nodes")


async def _keep(url: str, step: int, note: str | None, yes: bool, as_json: bool) -> Found:
    from ckpt.checkpoint import read, retention

    async with opened(url) as log:
        commit = read.choose(log, step)
        found: Found = {
            "url": log.store.url,
            "step": commit.step,
            "attempt": str(commit.attempt),
            "was": log.state.kept.get(commit.attempt),
            "note": note,
            "partial": not commit.whole,
            "done": None,
        }
        if not as_json:
            show_keep(found)
        if yes and found["was"] != note:
            await retention.set_keep(log, commit.attempt, note)
            found["done"] = {"kept": note is not None}
        return found


# -- what they share --


def item_json(item: Item) -> Found:
    attempt = item.attempt
    return {"step": attempt.step, "attempt": str(attempt), "files": item.files, "bytes": item.size, "why": item.why}


def cells(found: Found) -> tuple[object, ...]:
    size = human(found["bytes"]) if found["bytes"] else ""
    return found["step"], found["attempt"], found["files"] or "", size


def _patience(grace_s: float) -> str:
    return (
        f"files go {grace_s:g} s after the log says so, for those who are reading them"
        if grace_s
        else "files go at once"
    )


def _sum(keys: Sequence[str], sizes: dict[str, int]) -> Found:
    return {"files": len(keys), "bytes": sum(sizes.get(key, 0) for key in keys)}


async def _delete(log: RunLog, keys: Sequence[str], sizes: dict[str, int], grace_s: float) -> None:
    from ckpt.maintain import prune as upkeep

    def told(seconds: float) -> None:
        say(
            f"the log says what goes. Waiting {seconds:g} s for those who are reading it; if this is stopped, the next "
            "`ckpt gc` deletes it"
        )

    files = [(key, sizes.get(key, 0)) for key in keys]
    with progress("deleting", sum(size for _, size in files)) as on_bytes:
        await upkeep.delete(log.store, files, grace_s=grace_s, on_wait=told, on_bytes=on_bytes)
