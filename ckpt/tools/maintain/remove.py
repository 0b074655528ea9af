"""Delete one checkpoint on request.

Unlike retention, this can delete one of the newest checkpoints, but only if another one was just read back and can be
restored, and never a pinned one. Files that other checkpoints use stay. If a save in progress builds on the deleted
checkpoint, that save fails with an error that names it, and the next save is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ckpt.core.checkpoint import retention
from ckpt.core.checkpoint.retention import Sweep
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.log.records import Commit, RunState
from ckpt.core.log.run_log import RunLog
from ckpt.errors import NoCheckpointError, UsageError, is_unreadable
from ckpt.tools.maintain.prune import Item, RunFiles, refuse, sweep


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """What to delete. `check`: checkpoint to read back first. `delete`: files with their sizes in bytes. `shared`:
    files that stay, because other checkpoints use them. `partial`: True if other nodes have files of the checkpoint.
    `unread`: steps of other checkpoints that cannot be read, so that all files stay."""

    check: Commit
    item: Item
    delete: tuple[tuple[str, int], ...]
    shared: Item
    partial: bool
    unread: tuple[int, ...] = ()


def plan_removal(log: RunLog, stock: RunFiles, commit: Commit) -> RemovalPlan:
    """Plan a deletion. Raise UsageError if the checkpoint must stay, and CorruptError or UnreadableError if nothing may
    be deleted."""
    checkpoint, state = commit.checkpoint, log.state
    others = [c for c in state.lineage() if c.finite is not False and c.checkpoint != checkpoint]
    check = next((c for c in others if c.checkpoint in stock.used), None)
    if check is None:
        if any(is_unreadable(stock.unread[c.checkpoint]) for c in others if c.checkpoint in stock.unread):
            refuse(state, stock, log.store.url, {checkpoint})
        raise UsageError(
            f"step {commit.step} is the only checkpoint of {log.store.url} that can be restored, so it is not "
            "deleted. To delete a "
            "whole run, delete its folder or prefix"
        )
    found = decide_removal(log.store.url, checkpoint, check.checkpoint, stock, state) or Sweep()
    going = set(found.delete)
    shared = [key for key in stock.used.get(checkpoint, ()) if key not in going]
    return RemovalPlan(
        check, stock.item(checkpoint, found.delete), stock.files(found.delete), stock.item(checkpoint, shared),
        not commit.whole, tuple(sorted(one.step for one in _unread(stock, state, checkpoint))),
    )  # fmt: skip


def decide_removal(
    url: str, checkpoint: CheckpointId, checked: CheckpointId, stock: RunFiles, state: RunState
) -> Sweep | None:
    """Return the files to delete, or None if a checkpoint was committed after they were listed. Does no I/O."""
    others = set() if checkpoint in stock.used else _unread(stock, state, checkpoint)
    refuse(state, stock, url, {checkpoint, *others})
    for one in (checkpoint, checked):
        if one not in state.commits:
            raise NoCheckpointError(f"step {one.step} of {url} was deleted since. Repeat the command")
    if checkpoint in state.kept:
        raise UsageError(
            f"step {checkpoint.step} of {url} is protected: {state.kept[checkpoint]}. To delete it, first run "
            f"`ckpt unpin {url}@{checkpoint.step} --yes`"
        )
    if others:  # two unreadable checkpoints block each other's files: delete only the entry in the log
        return Sweep({checkpoint})
    listed = None if checkpoint in stock.used else stock.owned  # if unreadable, it may own any unused file
    doomed = retention.plan_deletion(state, {checkpoint}, {checked}, stock.used, listed)
    if doomed is None:
        return None
    return Sweep({checkpoint}, tuple(key for key in doomed if key in stock.sizes))


def _unread(stock: RunFiles, state: RunState, checkpoint: CheckpointId) -> set[CheckpointId]:
    """Return other damaged checkpoints. Omit those that cannot be read now, because `refuse` must raise their error."""
    others = (state.commits.keys() & stock.seen) - stock.used.keys() - {checkpoint}
    return {one for one in others if one not in stock.unread or not is_unreadable(stock.unread[one])}


async def remove(log: RunLog, stock: RunFiles, checkpoint: CheckpointId, checked: CheckpointId) -> Sweep:
    """Record in the log the PLAN to delete a checkpoint. `checked`: another checkpoint, just read back and intact."""
    return await sweep(log, stock, partial(decide_removal, log.store.url, checkpoint, checked))
