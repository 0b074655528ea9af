"""Prune, clean up and pin checkpoints of a run. `maintain.copy_run` copies them.

A plan is made first and can be shown; functions without I/O decide. Before acting, the state is read again, because a
job may be training in the run: a PLAN record is computed from exactly the state that precedes it in the log. These
operations append records without owning the run, and fence no job. They may be interrupted at any moment and repeated:
the next `gc` deletes the files that a PLAN record names and that still exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt.core.checkpoint import read, retention
from ckpt.core.checkpoint.retention import Sweep
from ckpt.core.checkpoint.retention import default_grace_s as default_grace_s
from ckpt.core.format.manifest import CheckpointId, by_owner, in_deletion_order, owner
from ckpt.core.log.records import Commit, Record, RunState, live_files
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, CorruptError, NoCheckpointError, StoreError, UnreadableError, is_unreadable
from ckpt.failpoints import point
from ckpt.store import Store, is_temporary

OURS = (
    "FORMAT.json",
    "latest.json",
    "lease.json",
    "log/",
    "faults/",
    "ledger/",
)  # prefixes of files in a run that belong to no checkpoint
TRIES = 10  # a job may commit between our read and our record, but hardly ten times in a row
BATCH, FAR_BATCH = 64, 1000  # files that are deleted between two updates of the progress bar; larger for buckets

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Item:
    """A row of a plan: a checkpoint, or the files of an unfinished one. `size`: bytes. `why`: reason for the row."""

    checkpoint: CheckpointId
    size: int = 0
    files: int = 0
    why: str = ""


def some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)


# -- contents of a run --


@dataclass(frozen=True, slots=True)
class RunFiles:
    """All files of a run with their sizes in bytes, listed before its log was read. `seen`: the checkpoints. `used`:
    the files that each readable checkpoint needs. `unread`: errors of the checkpoints that cannot be read."""

    sizes: dict[str, int]
    seen: Set[CheckpointId]
    used: dict[CheckpointId, set[str]]
    unread: dict[CheckpointId, CheckpointError] = field(default_factory=dict)

    def item(self, checkpoint: CheckpointId, keys: Iterable[str], why: str = "") -> Item:
        sizes = [self.sizes[key] for key in keys if key in self.sizes]
        return Item(checkpoint, sum(sizes), len(sizes), why)

    def files(self, keys: Iterable[str]) -> tuple[tuple[str, int], ...]:
        return tuple((key, self.sizes[key]) for key in keys)

    @property
    def owned(self) -> list[str]:
        """The files that belong to a checkpoint. No other files are ever deleted."""
        return [key for key in self.sizes if owner(key) is not None]


async def take_stock(log: RunLog) -> RunFiles:
    """List the files, then read the log. A file that appears later belongs to no checkpoint in this result."""
    sizes = {
        info.key: info.size for info in sorted([info async for info in log.store.list()], key=lambda info: info.key)
    }
    state = await log.refresh()
    for _ in range(TRIES):  # again if a job commits or deletes during the reads
        commits = dict(state.commits)
        unread = dict[CheckpointId, CheckpointError]()
        used = await retention.files_of(log, commits.values(), unread)
        state = await log.refresh()
        if state.commits.keys() <= commits.keys():
            break
    return RunFiles(sizes, frozenset(commits), used, unread)


Decide = Callable[[RunFiles, RunState], Sweep | None]
"""A function without I/O. It returns None if a checkpoint was committed after the files were listed."""


def refuse(state: RunState, stock: RunFiles, url: str, retiring: Set[CheckpointId] = frozenset()) -> None:
    """Raise CorruptError or UnreadableError with advice if it is unknown which files are needed. Does no I/O."""
    if state.damaged:
        raise CorruptError(
            f"nothing was deleted, because log records {some(state.damaged)} of {url} are damaged or missing, and may "
            "protect files that look unused. Continue in another location: `ckpt copy --all` copies all intact "
            "checkpoints"
        )
    unreadable = sorted(a for a in (state.commits.keys() & stock.seen) - stock.used.keys() if a not in retiring)
    if unreadable:
        steps = some([checkpoint.step for checkpoint in unreadable])
        errors = [stock.unread[checkpoint] for checkpoint in unreadable if checkpoint in stock.unread]
        if away := [error for error in errors if is_unreadable(error)]:
            raise UnreadableError(
                f"nothing was deleted, because step {steps} of {url} cannot be read now and may need any file. "
                f"The first error was: {away[0]}",
                advice="Restore access to its files, and repeat the command.",
            )
        raise CorruptError(
            f"nothing was deleted, because step {steps} of {url} cannot be read and may need any file. "
            f"`ckpt verify` lists the damage. If another checkpoint is intact, `ckpt rm {url}@{unreadable[0].step} "
            "--yes` deletes "
            "this one; if it is protected, run `ckpt unpin` first"
        )


async def sweep(log: RunLog, stock: RunFiles, decide: Decide) -> Sweep:
    """Record a PLAN that `decide` computes from the newest state. Delete no files yet."""
    for _ in range(TRIES):
        landed = await retention.land(log, None, partial(decide, stock))
        if landed is not None:
            return landed
        stock = await take_stock(log)
    raise StoreError(f"{log.store.url} changes faster than it can be read: try again later", retryable=True)


async def delete(
    store: Store,
    files: Sequence[tuple[str, int]],
    *,
    grace_s: float,
    on_wait: Callable[[float], None] = lambda seconds: None,
    on_bytes: OnBytes = None,
) -> None:
    """Wait for readers, then delete files that a PLAN record names. `files`: names and sizes."""
    if files and grace_s > 0:
        on_wait(grace_s)
        await asyncio.sleep(grace_s)
    sizes, batch = dict(files), FAR_BATCH if store.remote else BATCH
    for group in in_deletion_order(sizes):
        for some in (group[start : start + batch] for start in range(0, len(group), batch)):
            await store.delete_many(some)
            point("sweep.deleted")
            if on_bytes is not None:
                on_bytes(sum(sizes[key] for key in some))


Watch = Callable[[str, int], AbstractContextManager[OnBytes]]
"""Shows progress. Called with the name of a task and its total size in bytes; returns a context."""


def unwatched(what: str, total: int) -> AbstractContextManager[OnBytes]:
    return nullcontext()


async def carry_out(
    log: RunLog,
    stock: RunFiles,
    check: Commit,
    land: Callable[[], Awaitable[Sweep]],
    *,
    grace_s: float,
    on_wait: Callable[[float], None] = lambda seconds: None,
    watch: Watch = unwatched,
) -> tuple[list[str], Sweep]:
    """Read the checkpoint `check` back, record the PLAN and delete its files. Return the problems of `check`; if there
    are any, nothing was recorded or deleted."""
    total = sum(stock.sizes.get(key, 0) for key in stock.used[check.checkpoint])
    with watch("reading back", total) as on_bytes:
        problems = await read.verify(log.store, check, on_bytes=on_bytes)
    if problems:
        return problems, Sweep()
    landed = await land()
    files = [(key, stock.sizes.get(key, 0)) for key in landed.delete]
    with watch("deleting", sum(size for _, size in files)) as on_bytes:
        await delete(log.store, files, grace_s=grace_s, on_wait=on_wait, on_bytes=on_bytes)
    return [], landed


# -- prune --


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What to delete. `check`: checkpoint to read back first. `leftovers`: files of unfinished checkpoints."""

    check: Commit
    give_up: tuple[Item, ...]
    keep: tuple[Item, ...]
    leftovers: int
    delete: tuple[tuple[str, int], ...]
    partial: bool


def plan_prune(log: RunLog, stock: RunFiles, keep: retention.Keep) -> PrunePlan:
    """Plan what to delete. Raise CorruptError if nothing may be deleted, NoCheckpointError if the run is empty."""
    state, check = log.state, read.choose(log)
    doomed = decide_prune(log.store.url, keep, check.checkpoint, stock, state) or Sweep()
    why = retention.why_kept(state, keep, {check.checkpoint})
    owned = by_owner(doomed.delete)
    newest_first = sorted(state.commits, reverse=True)
    return PrunePlan(
        check,
        tuple(stock.item(a, owned.get(a, ())) for a in newest_first if a in doomed.retire),
        tuple(stock.item(a, stock.used[a], why[a]) for a in newest_first if a in why and a in stock.used),
        sum(len(keys) for checkpoint, keys in owned.items() if checkpoint not in doomed.retire),
        stock.files(doomed.delete),
        any(not commit.whole for commit in state.commits.values()),
    )


def decide_prune(
    url: str, keep: retention.Keep, checked: CheckpointId, stock: RunFiles, state: RunState
) -> Sweep | None:
    retiring = retention.choose(state, keep, {checked})
    refuse(state, stock, url, retiring)
    if checked not in state.commits:
        raise NoCheckpointError(
            f"{url}: step {checked.step}, which was read back, was deleted since. Repeat the command"
        )
    doomed = retention.plan_deletion(state, retiring, {checked}, stock.used, stock.owned)
    return None if doomed is None else Sweep(retiring, tuple(doomed))


async def prune(log: RunLog, stock: RunFiles, keep: retention.Keep, checked: CheckpointId) -> Sweep:
    """Record the PLAN of a prune. `checked`: a checkpoint that was just read back and is intact."""
    return await sweep(log, stock, partial(decide_prune, log.store.url, keep, checked))


# -- gc --


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What to clean up, by checkpoint.

    `opened`: unfinished checkpoints that may still be committed. `ending`: those of them to abort. `uploads`:
        unfinished uploads, by the name of their object. `foreign`: files of other programs.
    """

    doomed: tuple[Item, ...]
    delete: tuple[tuple[str, int], ...]
    opened: tuple[Item, ...]
    ending: tuple[CheckpointId, ...]
    uploads: tuple[str, ...]
    foreign: tuple[str, ...]
    live: Item


def plan_gc(url: str, state: RunState, stock: RunFiles, uploads: Sequence[str], abort_open: bool) -> GcPlan:
    """Plan the clean-up. Raise CorruptError if nothing may be deleted in this run."""
    owned = sorted(by_owner([*stock.sizes, *uploads]).items())
    ending = tuple(a for a, _ in owned if abort_open and may_end(state, a))
    later = replace(state, aborted=state.aborted | set(ending))
    found = decide_gc(url, stock, later) or Sweep()
    doomed = set(found.delete)
    used = set[str]().union(*(stock.used[checkpoint] for checkpoint in state.commits if checkpoint in stock.used))
    live = [key for key in stock.sizes if key in used or (owner(key) in state.commits and key not in doomed)]
    return GcPlan(
        tuple(stock.item(a, keys, _why_doomed(state, a)) for a, keys in sorted(by_owner(found.delete).items())),
        stock.files(found.delete),
        tuple(stock.item(a, keys, _why_open(state, a)) for a, keys in owned if not state.ended(a)),
        ending,
        tuple(key for key in uploads if is_temporary(key) or ((a := owner(key)) is not None and later.ended(a))),
        tuple(key for key in stock.sizes if owner(key) is None and not key.startswith(OURS)),
        Item(CheckpointId(0, 0, ""), sum(stock.sizes[key] for key in live), len(live)),
    )


def decide_gc(url: str, stock: RunFiles, state: RunState) -> Sweep | None:
    """Return the files to clean up. No checkpoint is deleted, so none must be read back, and a run may have none."""
    refuse(state, stock, url)
    if not state.commits.keys() <= stock.used.keys():
        return None
    listed = stock.owned
    live = live_files(state, listed, {key for checkpoint in state.commits for key in stock.used[checkpoint]})
    return Sweep(delete=tuple(key for key in listed if key not in live))


def may_end(state: RunState, checkpoint: CheckpointId) -> bool:
    """Return True if an unfinished checkpoint is of an earlier term, so that it can be aborted."""
    return not state.ended(checkpoint) and checkpoint.term < state.term


def _why_open(state: RunState, checkpoint: CheckpointId) -> str:
    if checkpoint.term < state.term:
        return "left by a crash or an interrupted copy, or being written"
    return "being written, or left by a crash"


def _why_doomed(state: RunState, checkpoint: CheckpointId) -> str:
    if checkpoint in state.commits:
        return "written again under another number"
    if checkpoint in state.retired:
        return "retired"
    return f"aborted: {state.reasons[checkpoint]}" if checkpoint in state.reasons else "aborted"


async def unfinished(store: Store) -> list[str]:
    """Return the names of unfinished uploads, and abort none of them."""
    names: list[str] = []

    def remember(key: str) -> bool:
        names.append(key)
        return True

    await store.drop_uploads(remember)
    return sorted(set(names))


async def gc(log: RunLog, stock: RunFiles, ending: Iterable[CheckpointId]) -> tuple[Sweep, int]:
    """Abort these checkpoints, record the PLAN and abort unfinished uploads. Return the PLAN and the number of aborted
    uploads."""
    for checkpoint in ending:
        await log.append(partial(_end, checkpoint), owner=None)
    landed = await sweep(log, stock, partial(decide_gc, log.store.url))
    state = log.state

    def keep_upload(key: str) -> bool:
        checkpoint = owner(key)
        return not is_temporary(key) if checkpoint is None else not state.ended(checkpoint)

    return landed, await log.store.drop_uploads(keep_upload)


def _end(checkpoint: CheckpointId, state: RunState) -> Record | None:
    body = {"checkpoint": str(checkpoint), "reason": "ended by hand, long after its term"}
    return Record("ABORT", body, f"abort:{checkpoint}") if may_end(state, checkpoint) else None
