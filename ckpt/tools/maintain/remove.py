"""Delete one checkpoint on request.

Unlike retention this may delete one of the newest, but only if another one was just read back and can be restored, and
never a protected one. Files that other checkpoints use stay while they are needed. A save in progress that builds on it
fails by name, and the next one is full.
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
    """What to delete. `check`: the checkpoint to read back first. `delete`: files with sizes in bytes. `shared`: its
    files that others use and that stay. `partial`: other nodes have files of it. `unread`: steps of others that
    cannot be read, so that all its files stay."""

    check: Commit
    item: Item
    delete: tuple[tuple[str, int], ...]
    shared: Item
    partial: bool
    unread: tuple[int, ...] = ()


def plan_removal(log: RunLog, stock: RunFiles, commit: Commit) -> RemovalPlan:
    """Plan a deletion. UsageError if the checkpoint must stay; CorruptError or UnreadableError if nothing may be
    deleted."""
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
    """Return what to delete, or None if a checkpoint was committed after the files were listed. No side effects."""
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
    if any(checkpoint in c.needs for c in state.held.values()):
        raise UsageError(
            f"a save in progress builds on step {checkpoint.step} of {url}: repeat this after it has ended"
        )
    if others:  # two unreadable checkpoints would block each other: delete this entry now, and files with the last one
        return Sweep({checkpoint})
    listed = None if checkpoint in stock.used else stock.owned  # if unreadable, delete what no other checkpoint needs
    doomed = retention.plan_deletion(state, {checkpoint}, {checked}, stock.used, listed)
    if doomed is None:
        return None
    return Sweep({checkpoint}, tuple(key for key in doomed if key in stock.sizes))


def _unread(stock: RunFiles, state: RunState, checkpoint: CheckpointId) -> set[CheckpointId]:
    """Return other damaged checkpoints. Those that cannot be read now do not count, because `refuse` must see them."""
    others = (state.commits.keys() & stock.seen) - stock.used.keys() - {checkpoint}
    return {one for one in others if one not in stock.unread or not is_unreadable(stock.unread[one])}


async def remove(log: RunLog, stock: RunFiles, checkpoint: CheckpointId, checked: CheckpointId) -> Sweep:
    """Record the PLAN. `checked`: another checkpoint that was just read back and is intact."""
    return await sweep(log, stock, partial(decide_removal, log.store.url, checkpoint, checked))
