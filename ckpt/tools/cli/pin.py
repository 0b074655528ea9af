"""`ckpt pin` and `ckpt unpin`: protect a checkpoint from deletion, and remove the protection."""

from __future__ import annotations

import click

from ckpt.core.checkpoint.reference import Which
from ckpt.tools.cli.arguments import checkpoint_argument
from ckpt.tools.cli.ls import pinned_text
from ckpt.tools.cli.terminal import act, example, opened, plan_options, print_json, put
from ckpt.tools.cli.upkeep import PARTIAL, Found, show_end

BY_HAND = "by hand"


@click.command(epilog=example("ckpt pin runs/exp1@500 --note 'as published' --yes"))
@checkpoint_argument()
@click.option("--note", default=BY_HAND, help=f"Reason, stored with the checkpoint. By default {BY_HAND!r}.")
@plan_options
def pin(url: str, step: Which, note: str, yes: bool, as_json: bool) -> int:
    """Protect a checkpoint from retention and clean-up. A job may be training in the run."""
    return _change(url, step, note or BY_HAND, yes, as_json)


@click.command(epilog=example("ckpt unpin runs/exp1@500 --yes"))
@checkpoint_argument()
@plan_options
def unpin(url: str, step: Which, yes: bool, as_json: bool) -> int:
    """Remove the protection of a checkpoint, so that retention applies to it. A job may be training in the run."""
    return _change(url, step, None, yes, as_json)


def _change(url: str, step: Which, note: str | None, yes: bool, as_json: bool) -> int:
    if step is None:
        raise click.UsageError(f"no checkpoint given: use {url}@STEP or {url}@latest")
    found = act(_set_pin(url, step, note, yes, as_json))
    if as_json:
        return print_json(found)
    return 0 if found["was"] == note else show_end(found, "done")


def show_pin(found: Found) -> None:
    was = "is not pinned" if found["was"] is None else f"is {pinned_text(found['was'])}"
    put(f"step {found['step']} of {found['url']}, checkpoint {found['id']}, {was}")
    if found["was"] != found["note"]:
        put(
            "to remove its protection, so that retention applies"
            if found["note"] is None
            else f"to protect from deletion, with the note: {found['note']}"
        )
    if found["partial"]:
        put(PARTIAL)


async def _set_pin(url: str, step: Which, note: str | None, yes: bool, as_json: bool) -> Found:
    from ckpt.core.checkpoint import read, retention

    async with opened(url) as log:
        commit = read.choose(log, step)
        found: Found = {
            "url": log.store.url,
            "step": commit.step,
            "id": str(commit.checkpoint),
            "was": log.state.kept.get(commit.checkpoint),
            "note": note,
            "partial": not commit.whole,
            "done": None,
        }
        if not as_json:
            show_pin(found)
        if yes and found["was"] != note:
            await retention.set_keep(log, commit.checkpoint, note)
            found["done"] = {"pinned": note is not None}
        return found
