"""What the commands share that say what stays of a run: prune, rm, gc, keep, copy. What they do is in `maintain`.

Each prints a plan and does nothing, unless `--yes` is given. With `--json`, one document: the plan, and under `done`
what was done, null where nothing was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpt.tools.cli.terminal import OnBytes, human, print_few, print_json, progress, put, say

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.core.log.log import RunLog
    from ckpt.tools.maintain.prune import Item

Found = dict[str, Any]
TITLES = ("step", "attempt", "files", "size", "what")
PARTIAL = "this tier holds the parts of some ranks only: do the same in those of the other nodes"

grace_option = click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long readers of what goes may go on before it is deleted. By default 600 in object stores, 0 in folders.",
)


def show_end(found: Found, done: str) -> int:
    """The last line of a plan that is not empty."""
    put(done if found["done"] else "Nothing was done yet: --yes does it.")
    return 0


def said_all(found: Found, as_json: bool, needed: str) -> bool:
    """Of what is read back before anything goes: whether nothing is left to say, for a program, or since that is
    damaged. `needed`: which may be needed then."""
    if as_json:
        print_json(found)
    elif found["problems"]:
        print_few(found["problems"])
        put(f"Nothing was done: step {found['check']} is damaged, and {needed} may be needed")
    return as_json or bool(found["problems"])


def show_order(found: Found) -> None:
    put(f"step {found['check']} is read back before anything goes; then {patience_text(found['grace_s'])}")


def item_json(item: Item) -> Found:
    attempt = item.attempt
    return {"step": attempt.step, "attempt": str(attempt), "files": item.files, "bytes": item.size, "why": item.why}


def cells(found: Found) -> tuple[object, ...]:
    size = human(found["bytes"]) if found["bytes"] else ""
    return found["step"], found["attempt"], found["files"] or "", size


def patience_text(grace_s: float) -> str:
    return (
        f"files go {grace_s:g} s after the log says so, for those who are reading them"
        if grace_s
        else "files go at once"
    )


def sum_of(keys: Sequence[str], sizes: dict[str, int]) -> Found:
    return {"files": len(keys), "bytes": sum(sizes.get(key, 0) for key in keys)}


class Deletion:
    """What is shown while checkpoints are deleted, and what is true if that is stopped."""

    def __init__(self) -> None:
        self._begun = False

    def watch(self, what: str, total: int) -> contextlib.AbstractContextManager[OnBytes]:
        self._begun = self._begun or what == "deleting"
        return progress(what, total)

    def so_far(self) -> str:
        if self._begun:
            return "What was to go is no checkpoint any more: `ckpt gc` deletes the files of it that are still there"
        return "Nothing was deleted: call the same again"


def told(seconds: float, by: str = "`ckpt gc`") -> None:
    """Before what a PLAN names is deleted."""
    say(
        f"the log says what goes. Waiting {seconds:g} s for those who are reading it; if this is stopped, the next "
        f"{by} deletes it"
    )


async def delete_files(log: RunLog, keys: Sequence[str], sizes: dict[str, int], grace_s: float) -> None:
    from ckpt.tools.maintain import prune as upkeep

    files = [(key, sizes.get(key, 0)) for key in keys]
    with progress("deleting", sum(size for _, size in files)) as on_bytes:
        await upkeep.delete(log.store, files, grace_s=grace_s, on_wait=partial(told, by="call"), on_bytes=on_bytes)
