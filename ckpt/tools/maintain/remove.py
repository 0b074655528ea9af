"""Give up one checkpoint, because somebody says so.

Unlike retention it takes what is asked for, also one of the newest: but only beside another one that a restore can take
and that has just been read back, and never one that is kept. Files that other checkpoints use stay as long as they are
needed. A save in progress that builds on it fails by name, and the next one is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ckpt.core.checkpoint import retention
from ckpt.core.checkpoint.retention import Sweep
from ckpt.core.format.manifest import Attempt
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import Commit, RunState
from ckpt.errors import NoCheckpointError, UsageError, is_unreadable
from ckpt.tools.maintain.prune import Item, RunFiles, refuse, sweep


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """`check`: what has to be read back before anything goes; `delete`: with sizes in bytes; `shared`: files of it that
    stay, since others use them; `partial`: other nodes have parts of it; `unread`: steps of others that cannot be read,
    so that all files of it stay."""

    check: Commit
    item: Item
    delete: tuple[tuple[str, int], ...]
    shared: Item
    partial: bool
    unread: tuple[int, ...] = ()


def plan_removal(log: RunLog, stock: RunFiles, commit: Commit) -> RemovalPlan:
    """Pure. UsageError if that one has to stay, CorruptError or UnreadableError if nothing may be deleted there."""
    attempt, state = commit.attempt, log.state
    others = [c for c in state.lineage() if c.finite is not False and c.attempt != attempt]
    check = next((c for c in others if c.attempt in stock.used), None)
    if check is None:
        if any(is_unreadable(stock.unread[c.attempt]) for c in others if c.attempt in stock.unread):
            refuse(state, stock, log.store.url, {attempt})
        raise UsageError(
            f"step {commit.step} is the only checkpoint of {log.store.url} that a restore can take: it stays. A run "
            "that nobody needs any more is a folder, or what a bucket has under that name: delete that"
        )
    found = decide_removal(log.store.url, attempt, check.attempt, stock, state) or Sweep()
    going = set(found.delete)
    shared = [key for key in stock.used.get(attempt, ()) if key not in going]
    return RemovalPlan(
        check, stock.item(attempt, found.delete), stock.files(found.delete), stock.item(attempt, shared),
        not commit.whole, tuple(sorted(one.step for one in _unread(stock, state, attempt))),
    )  # fmt: skip


def decide_removal(url: str, attempt: Attempt, checked: Attempt, stock: RunFiles, state: RunState) -> Sweep | None:
    """Pure. None: there is a checkpoint that came after the stock was taken."""
    others = set() if attempt in stock.used else _unread(stock, state, attempt)
    refuse(state, stock, url, {attempt, *others})
    for one in (attempt, checked):
        if one not in state.commits:
            raise NoCheckpointError(f"step {one.step} of {url} was given up a moment ago. Repeat it")
    if attempt in state.kept:
        raise UsageError(
            f"step {attempt.step} of {url} is kept: {state.kept[attempt]}. To let it go, first "
            f"`ckpt keep {url}@{attempt.step} --undo --yes`"
        )
    if any(attempt in c.needs for c in state.held.values()):
        raise UsageError(f"a save under way builds on step {attempt.step} of {url}: remove it once that has ended")
    if others:  # two would block each other: this one is given up, and files go with the last that cannot be read
        return Sweep({attempt})
    listed = None if attempt in stock.used else stock.owned  # of one that cannot be read, whatever nobody else needs
    doomed = retention.plan_deletion(state, {attempt}, {checked}, stock.used, listed)
    if doomed is None:
        return None
    return Sweep({attempt}, tuple(key for key in doomed if key in stock.sizes))


def _unread(stock: RunFiles, state: RunState, attempt: Attempt) -> set[Attempt]:
    """Other checkpoints that are damaged: nobody knows which files they need. Those that cannot be read now do not
    count, because `refuse` has to see them."""
    others = (state.commits.keys() & stock.seen) - stock.used.keys() - {attempt}
    return {one for one in others if one not in stock.unread or not is_unreadable(stock.unread[one])}


async def remove(log: RunLog, stock: RunFiles, attempt: Attempt, checked: Attempt) -> Sweep:
    """Land the PLAN. `checked`: another checkpoint, that was read back and found sound just now."""
    return await sweep(log, stock, partial(decide_removal, log.store.url, attempt, checked))
