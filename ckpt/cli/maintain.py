"""The commands that change a run from a shell: copy, prune, gc, keep.

What they do is in `ckpt.maintain.prune` and `ckpt.maintain.copy_run`.

Each prints a plan and does nothing, unless `--yes` is given. With `--json`, one document: the plan, and under `done`
what was done, null where nothing was.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.terminal import (
    act,
    count_of,
    example,
    human,
    json_option,
    opened,
    parse_options,
    place_option,
    print_few,
    print_json,
    print_table,
    progress,
    safe,
    say,
    yes_option,
)
from ckpt.errors import UsageError
from ckpt.store import normalise, open_store, remember_options

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.maintain.copy_run import CopyPlan
    from ckpt.maintain.prune import GcPlan, Item, PrunePlan
    from ckpt.runlog.log import Commit, RunLog

Found = dict[str, Any]
TITLES = ("step", "attempt", "files", "size", "what")
Show = Callable[[Found], None]


grace_option = click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long readers of what goes may go on before it is deleted. By default 600 in object stores, 0 in folders.",
)


def nothing(found: Found) -> None:
    """How a plan is shown to a program, which gets it with the rest."""


def show_end(found: Found, done: str) -> int:
    """The last line of a plan that is not empty."""
    print(safe(done) if found["done"] else "Nothing was done. With --yes it is.")
    return 0


# -- copy --


@click.command(
    epilog=example(
        "ckpt copy runs/exp1 s3://bucket/exp1", "ckpt copy s3://bucket/exp1 runs/again 500 --yes --src-option anon=true"
    )
)
@click.argument("src")
@click.argument("dst")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--all", "every", is_flag=True, help="Every checkpoint of the present history.")
@click.option("--take-over", is_flag=True, help="Let DST go on from it, also if a job trains there: that is fenced.")
@click.option("--src-option", "src_options", metavar="KEY=VALUE", multiple=True, callback=parse_options,
              help="The same for SRC alone.")  # fmt: skip
@click.option("--dst-option", "dst_options", metavar="KEY=VALUE", multiple=True, callback=parse_options,
              help="The same for DST alone.")  # fmt: skip
@place_option
@yes_option
@json_option
def copy(
    src: str,
    dst: str,
    step: int | None,
    every: bool,
    take_over: bool,
    src_options: Found,
    dst_options: Found,
    yes: bool,
    as_json: bool,
) -> int:
    """Copy the newest checkpoint, or that of STEP, to another location: a new run, or one that is there.

    Every byte is verified on the way. What is there already is not copied again, so an interrupted copy goes on where
    it stopped. A training that is started in a new DST goes on from there. With --all, what turns out damaged is left
    out, and the others are copied; exit code 1 if any was.
    """
    if every and step is not None:
        raise click.UsageError("STEP and --all exclude each other")
    if normalise(src) == normalise(dst):
        raise click.UsageError("SRC and DST are the same location")
    remember_options(src, src_options or None)
    remember_options(dst, dst_options or None)
    found = act(_copy(src, dst, step, every, take_over, yes, nothing if as_json else show_copy))
    if as_json:
        print_json(found)
    elif found["copy"]:
        for one in found["done"]["failed"] if found["done"] else ():
            print(safe(f"left out: {one['why']}"))
        show_end(found, f"copied {len(found['done']['copied']) if found['done'] else 0}, verified on the way")
    return 1 if found["not_copied"] else 0


def show_copy(found: Found) -> None:
    print(safe(f"{found['source']} -> {found['target']}" + (", a new run" if found["new_run"] else "")))
    rows = [(*_cells(one), "to copy") for one in found["copy"]]
    rows += [(*_cells(one), "already there") for one in found["already_there"]]
    rows += [(*_cells(one), f"not copied: {one['why']}") for one in found["not_copied"]]
    print_table(TITLES, rows)
    print(f"{len(found['copy'])} to copy: {count_of(found['files'], 'file')}, {human(found['bytes'])}")
    if found["fences"]:
        print("a job that trains in the target is fenced")


async def _copy(src: str, dst: str, step: int | None, every: bool, take_over: bool, yes: bool, show: Show) -> Found:
    from ckpt.maintain import copy_run

    async with opened(src) as source:
        wanted = _wanted(source, step, every)
        async with _existing(dst) as target:
            plan = await copy_run.plan_copy(source, target, wanted, take_over)
        if plan.left_out and not every:
            raise UsageError(f"step {wanted[0].step} cannot be copied: {plan.left_out[0].why}")
        show(found := _copy_json(source.store.url, normalise(dst), plan))
        if yes and plan.copy:
            far = await copy_run.open_target(dst)
            try:
                with progress("copying", sum(item.size for item in plan.copy)) as on_bytes:
                    failed = await copy_run.copy(source, far, plan, go_on=every, on_bytes=on_bytes)
            finally:
                await far.store.aclose()
            out = {item.attempt for item in failed}
            copied = [str(item.attempt) for item in plan.copy if item.attempt not in out]
            found["done"] = {"copied": copied, "failed": list(map(_item, failed))}
            found["not_copied"] += found["done"]["failed"]
        return found


def _wanted(source: RunLog, step: int | None, every: bool) -> list[Commit]:
    from ckpt.checkpoint import read

    return source.state.lineage() if every and source.state.lineage() else [read.choose(source, step)]


@contextlib.asynccontextmanager
async def _existing(url: str) -> AsyncIterator[RunLog | None]:
    from ckpt.maintain import copy_run

    store = open_store(url)
    try:
        yield await copy_run.look(store)
    finally:
        await store.aclose()


def _copy_json(source: str, target: str, plan: CopyPlan) -> Found:
    return {
        "source": source,
        "target": target,
        "new_run": plan.new,
        "copy": list(map(_item, plan.copy)),
        "already_there": list(map(_item, plan.there)),
        "not_copied": list(map(_item, plan.left_out)),
        "files": sum(item.files for item in plan.copy),
        "bytes": sum(item.size for item in plan.copy),
        "fences": plan.fences,
        "done": None,
    }


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
    found = act(_prune(url, keep_last, keep_every, grace_s, yes, nothing if as_json else show_prune))
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
    rows = [(*_cells(one), "to give up") for one in found["give_up"]]
    rows += [(*_cells(one), f"stays: {one['why']}") for one in found["keep"]]
    print_table(TITLES, rows)
    if found["leftovers"]:
        print(f"{found['leftovers']} files of attempts that have ended go as well")
    print(f"{len(found['give_up'])} to give up: {count_of(found['files'], 'file')}, {human(found['bytes'])}")
    if found["partial"]:
        print("this tier holds the parts of some ranks only: do the same in those of the other nodes")
    if found["files"] or found["give_up"]:
        print(f"step {found['check']} is read back before anything goes; then {_patience(found['grace_s'])}")


async def _prune(url: str, last: int | str, every: int | None, grace_s: float | None, yes: bool, show: Show) -> Found:
    from ckpt.checkpoint import read, retention
    from ckpt.maintain import prune as upkeep

    async with opened(url) as log:
        keep = retention.Keep(last, every) if isinstance(last, int) else retention.as_keep(last)
        patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
        stock = await upkeep.take_stock(log)
        plan = upkeep.plan_prune(log, stock, keep)
        show(found := _prune_json(log.store.url, plan, keep, patience))
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
        "give_up": list(map(_item, plan.give_up)),
        "keep": list(map(_item, plan.keep)),
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
    found = act(_gc(url, abort_open, grace_s, yes, nothing if as_json else show_gc))
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
    rows = [(*_cells(one), f"to delete: {one['why']}") for one in found["delete"]]
    for one in found["open"]:
        rows.append((*_cells(one), f"{'to end' if one['ending'] else 'stays, open'}: {one['why']}"))
    if rows:
        print_table(TITLES, rows)
    print_few([f"not ours, stays: {key}" for key in found["foreign"]], " that are not ours")
    live, files = found["live"], count_of(found["files"], "file")
    print(f"needed by checkpoints: {count_of(live['files'], 'file')}, {human(live['bytes'])}")
    uploads = count_of(found["uploads"], "unfinished upload")
    print(f"to delete: {files}, {human(found['bytes'])}, and {uploads}")
    if found["files"]:
        print(_patience(found["grace_s"]))


async def _gc(url: str, abort_open: bool, grace_s: float | None, yes: bool, show: Show) -> Found:
    from ckpt.maintain import prune as upkeep

    async with opened(url) as log:
        patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
        stock, uploads = await upkeep.take_stock(log), await upkeep.unfinished(log.store)
        plan = upkeep.plan_gc(log.store.url, log.state, stock, uploads, abort_open)
        show(found := _gc_json(log.store.url, plan, patience))
        if not yes or not found["needed"]:
            return found
        landed, dropped = await upkeep.gc(log, stock, plan.ending)
        await _delete(log, landed.delete, stock.sizes, patience)
        done = {**_sum(landed.delete, stock.sizes), "uploads": dropped, "ended": list(map(str, plan.ending))}
        return {**found, "done": done}


def _gc_json(url: str, plan: GcPlan, grace_s: float) -> Found:
    return {
        "url": url,
        "delete": list(map(_item, plan.doomed)),
        "open": [{**_item(item), "ending": item.attempt in plan.ending} for item in plan.opened],
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
    found = act(_keep(url, step, note, yes, nothing if as_json else show_keep))
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


async def _keep(url: str, step: int, note: str | None, yes: bool, show: Show) -> Found:
    from ckpt.checkpoint import read
    from ckpt.maintain import prune as upkeep

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
        show(found)
        if yes and found["was"] != note:
            await upkeep.set_keep(log, commit.attempt, note)
            found["done"] = {"kept": note is not None}
        return found


# -- what they share --


def _item(item: Item) -> Found:
    attempt = item.attempt
    return {"step": attempt.step, "attempt": str(attempt), "files": item.files, "bytes": item.size, "why": item.why}


def _cells(found: Found) -> tuple[object, ...]:
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
    with contextlib.ExitStack() as stack:
        bar: list[Callable[[int], None] | None] = []

        def advance(count: int) -> None:
            if not bar:  # not before the waiting is over
                bar.append(stack.enter_context(progress("deleting", sum(size for _, size in files))))
            if bar[0] is not None:
                bar[0](count)

        await upkeep.delete(log.store, files, grace_s=grace_s, on_wait=told, on_bytes=advance)
