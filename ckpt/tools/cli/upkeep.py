"""Functions shared by the commands that change a run: prune, rm, gc, pin, copy. `ckpt.tools.maintain` does the work.

Each command prints a plan, and changes nothing without `--yes`. `--json` prints one document: the plan, and under
`done` the result, or null if nothing was done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpt.tools.cli.terminal import OnBytes, human, print_err, print_few, print_json, progress, put

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.core.log.run_log import RunLog
    from ckpt.tools.maintain.prune import Item

Found = dict[str, Any]
TITLES = ("step", "id", "files", "size", "what")
PARTIAL = "this tier has the files of some ranks only: repeat the command in the tiers of the other nodes"

grace_option = click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time for readers to finish before files are deleted. By default 600 in object stores, 0 in folders.",
)


def show_end(found: Found, done: str) -> int:
    """Print the last line of output: what was done, or that --yes is needed to carry out the plan."""
    put(done if found["done"] else "Nothing was changed yet. Add --yes to carry out the plan.")
    return 0


def printed_early(found: Found, as_json: bool, needed: str) -> bool:
    """Print the JSON document, or the problems of the checkpoint that was read back. Return True if anything was
    printed. `needed`: the checkpoints that may be needed if the checkpoint that was read back is damaged."""
    if as_json:
        print_json(found)
    elif found["problems"]:
        print_few(found["problems"])
        put(f"Nothing was deleted: step {found['check']} is damaged, so {needed} may be needed")
    return as_json or bool(found["problems"])


def show_order(found: Found) -> None:
    put(f"step {found['check']} is read back before anything is deleted; then {patience_text(found['grace_s'])}")


def item_json(item: Item) -> Found:
    checkpoint = item.checkpoint
    return {"step": checkpoint.step, "id": str(checkpoint), "files": item.files, "bytes": item.size, "why": item.why}


def cells(found: Found) -> tuple[object, ...]:
    size = human(found["bytes"]) if found["bytes"] else ""
    return found["step"], found["id"], found["files"] or "", size


def patience_text(grace_s: float) -> str:
    return (
        f"files are deleted {grace_s:g} s after the log records it, so that readers can finish"
        if grace_s
        else "files are deleted immediately"
    )


def sum_of(keys: Sequence[str], sizes: dict[str, int]) -> Found:
    return {"files": len(keys), "bytes": sum(sizes.get(key, 0) for key in keys)}


class Deletion:
    """The progress of a deletion. `so_far` returns the line to print if the deletion is interrupted."""

    def __init__(self) -> None:
        self._begun = False

    def watch(self, what: str, total: int) -> contextlib.AbstractContextManager[OnBytes]:
        self._begun = self._begun or what == "deleting"
        return progress(what, total)

    def so_far(self) -> str:
        if self._begun:
            return "The checkpoints are already removed from the log: `ckpt gc` deletes their remaining files"
        return "Nothing was deleted: repeat the command"


def announce_wait(seconds: float, by: str = "`ckpt gc`") -> None:
    """Print that the files listed in a PLAN record of the log will be deleted after a wait."""
    print_err(
        f"the log lists the files to delete. Waiting {seconds:g} s for readers to finish; if this is stopped, the next "
        f"{by} deletes the files"
    )


async def delete_files(log: RunLog, keys: Sequence[str], sizes: dict[str, int], grace_s: float) -> None:
    from ckpt.tools.maintain import prune as upkeep

    files = [(key, sizes.get(key, 0)) for key in keys]
    with progress("deleting", sum(size for _, size in files)) as on_bytes:
        await upkeep.delete(
            log.store, files, grace_s=grace_s, on_wait=partial(announce_wait, by="call"), on_bytes=on_bytes
        )
