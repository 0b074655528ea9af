"""Work on a whole run from outside: thin it out, clean it up, keep one checkpoint for ever. `maintain.copy_run`
copies it.

Each begins with a plan that can be shown; what decides is pure. What is done then looks again first, since a job may be
training there: a PLAN record is made of the very state that it follows. Nothing here owns a run. Records are appended
for whoever does, and fence nobody. All of it may be stopped at any moment and called again: what a landed PLAN names
and nobody has deleted yet is found by the next `gc`.
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
from ckpt.core.format.manifest import Attempt, by_owner, in_deletion_order, owner
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import Commit, Record, RunState, live_packs
from ckpt.errors import CheckpointError, CorruptError, NoCheckpointError, StoreError, UnreadableError, is_unreadable
from ckpt.failpoints import point
from ckpt.store import Store, is_temporary

OURS = ("FORMAT.json", "latest.json", "log/", "faults/", "ledger/")  # files of a run that belong to no attempt
TRIES = 10  # a job may commit between our look and our record, though not for ever
BATCH, FAR_BATCH = 64, 1000  # files deleted between two words about it

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Item:
    """A checkpoint, or the files of an attempt, in a plan. `size` in bytes; `why` says why it is where it is."""

    attempt: Attempt
    size: int = 0
    files: int = 0
    why: str = ""


def some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)


# -- what is in a place --


@dataclass(frozen=True, slots=True)
class RunFiles:
    """All files of a place by name, with their sizes in bytes, and then what its log says.

    `seen`: the checkpoints there were; `used`: the files that each of them needs, as far as it can be read; `unread`:
    why others cannot.
    """

    sizes: dict[str, int]
    seen: Set[Attempt]
    used: dict[Attempt, set[str]]
    unread: dict[Attempt, CheckpointError] = field(default_factory=dict)

    def item(self, attempt: Attempt, keys: Iterable[str], why: str = "") -> Item:
        found = [self.sizes[key] for key in keys if key in self.sizes]
        return Item(attempt, sum(found), len(found), why)

    def files(self, keys: Iterable[str]) -> tuple[tuple[str, int], ...]:
        return tuple((key, self.sizes[key]) for key in keys)

    @property
    def owned(self) -> list[str]:
        """What belongs to an attempt: nothing else is ever deleted."""
        return [key for key in self.sizes if owner(key) is not None]


async def take_stock(log: RunLog) -> RunFiles:
    """The listing comes first: a file that appears later belongs to an attempt that is not in it."""
    sizes = {info.key: info.size for info in sorted([info async for info in log.store.list()], key=lambda one: one.key)}
    state = await log.refresh()
    for _ in range(TRIES):  # a job may commit and retire while we read
        commits = dict(state.commits)
        unread = dict[Attempt, CheckpointError]()
        used = await retention.files_of(log, commits.values(), unread)
        state = await log.refresh()
        if state.commits.keys() <= commits.keys():
            break
    return RunFiles(sizes, frozenset(commits), used, unread)


Decide = Callable[[RunFiles, RunState], Sweep | None]
"""Pure. None: there is a checkpoint that came after the stock was taken."""


def refuse(state: RunState, stock: RunFiles, url: str, retiring: Set[Attempt] = frozenset()) -> None:
    """CorruptError or UnreadableError, with advice, if nobody can say which files are needed. Pure."""
    if state.damaged:
        raise CorruptError(
            f"log records {some(state.damaged)} of {url} are damaged or missing, and may protect what looks "
            "superfluous: nothing is deleted there. Go on in another location: `ckpt copy --all` brings over what is "
            "whole"
        )
    unreadable = sorted(a for a in (state.commits.keys() & stock.seen) - stock.used.keys() if a not in retiring)
    if unreadable:
        steps = some([attempt.step for attempt in unreadable])
        errors = [stock.unread[attempt] for attempt in unreadable if attempt in stock.unread]
        if away := [error for error in errors if is_unreadable(error)]:
            raise UnreadableError(
                f"step {steps} of {url} cannot be read now, so nobody knows which files it needs: nothing was deleted. "
                f"The first error was: {away[0]}",
                advice="Restore access to its files, and call the same again.",
            )
        raise CorruptError(
            f"step {steps} of {url} cannot be read, so nobody knows which files it needs: nothing is deleted while it "
            f"stays. `ckpt verify` says what is wrong, `ckpt rm {url}@{unreadable[0].step} --yes` gives it up beside a "
            "sound one, and if it is kept, `ckpt keep --undo` comes first"
        )


async def sweep(log: RunLog, stock: RunFiles, decide: Decide) -> Sweep:
    """Land a PLAN that says what `decide` does of the newest state. Nothing is deleted here."""
    for _ in range(TRIES):
        landed = await retention.land(log, None, partial(decide, stock))
        if landed is not None:
            return landed
        stock = await take_stock(log)
    raise StoreError(f"{log.store.url} changes faster than it can be looked at: try again later", retryable=True)


async def delete(
    store: Store,
    files: Sequence[tuple[str, int]],
    *,
    grace_s: float,
    on_wait: Callable[[float], None] = lambda seconds: None,
    on_bytes: OnBytes = None,
) -> None:
    """Delete what a landed PLAN names, after readers have had their time. `files`: with their sizes."""
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
"""What shows how far something is: called with what is done, and how many bytes that takes."""


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
    """Read `check` back, land the PLAN, delete what it names. The problems of what was read back come first: if there
    are any, nothing was done."""
    total = sum(stock.sizes.get(key, 0) for key in stock.used[check.attempt])
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
    """`check`: what has to be read back before anything goes; `leftovers`: files of ended attempts that go as well."""

    check: Commit
    give_up: tuple[Item, ...]
    keep: tuple[Item, ...]
    leftovers: int
    delete: tuple[tuple[str, int], ...]
    partial: bool


def plan_prune(log: RunLog, stock: RunFiles, keep: retention.Keep) -> PrunePlan:
    """Pure. CorruptError if nothing may be deleted there; NoCheckpointError if nothing is there."""
    state, check = log.state, read.choose(log)
    doomed = decide_prune(log.store.url, keep, check.attempt, stock, state) or Sweep()
    why = retention.why_kept(state, keep, {check.attempt})
    owned = by_owner(doomed.delete)
    newest_first = sorted(state.commits, reverse=True)
    return PrunePlan(
        check,
        tuple(stock.item(a, owned.get(a, ())) for a in newest_first if a in doomed.retire),
        tuple(stock.item(a, stock.used[a], why[a]) for a in newest_first if a in why and a in stock.used),
        sum(len(keys) for attempt, keys in owned.items() if attempt not in doomed.retire),
        stock.files(doomed.delete),
        any(not commit.whole for commit in state.commits.values()),
    )


def decide_prune(url: str, keep: retention.Keep, checked: Attempt, stock: RunFiles, state: RunState) -> Sweep | None:
    retiring = retention.choose(state, keep, {checked})
    refuse(state, stock, url, retiring)
    if checked not in state.commits:
        raise NoCheckpointError(f"{url}: step {checked.step}, which was read back, has been given up since. Repeat it")
    doomed = retention.plan_deletion(state, retiring, {checked}, stock.used, stock.owned)
    return None if doomed is None else Sweep(retiring, tuple(doomed))


async def prune(log: RunLog, stock: RunFiles, keep: retention.Keep, checked: Attempt) -> Sweep:
    """Land the PLAN. `checked`: a checkpoint that was read back and found sound just now."""
    return await sweep(log, stock, partial(decide_prune, log.store.url, keep, checked))


# -- gc --


@dataclass(frozen=True, slots=True)
class GcPlan:
    """By attempt. `opened`: attempts that may still become checkpoints; `ending`: those of them that are to be ended;
    `uploads`: unfinished ones, by the name of what they were to be; `foreign`: files that are not ours."""

    doomed: tuple[Item, ...]
    delete: tuple[tuple[str, int], ...]
    opened: tuple[Item, ...]
    ending: tuple[Attempt, ...]
    uploads: tuple[str, ...]
    foreign: tuple[str, ...]
    live: Item


def plan_gc(url: str, state: RunState, stock: RunFiles, uploads: Sequence[str], abort_open: bool) -> GcPlan:
    """Pure. CorruptError if nothing may be deleted there."""
    owned = sorted(by_owner([*stock.sizes, *uploads]).items())
    ending = tuple(a for a, _ in owned if abort_open and may_end(state, a))
    later = replace(state, aborted=state.aborted | set(ending))
    found = decide_gc(url, stock, later) or Sweep()
    doomed = set(found.delete)
    used = set[str]().union(*(stock.used[attempt] for attempt in state.commits if attempt in stock.used))
    live = [key for key in stock.sizes if key in used or (owner(key) in state.commits and key not in doomed)]
    return GcPlan(
        tuple(stock.item(a, keys, _why_doomed(state, a)) for a, keys in sorted(by_owner(found.delete).items())),
        stock.files(found.delete),
        tuple(stock.item(a, keys, _why_open(state, a)) for a, keys in owned if not state.ended(a)),
        ending,
        tuple(key for key in uploads if is_temporary(key) or ((a := owner(key)) is not None and later.ended(a))),
        tuple(key for key in stock.sizes if owner(key) is None and not key.startswith(OURS)),
        Item(Attempt(0, 0, ""), sum(stock.sizes[key] for key in live), len(live)),
    )


def decide_gc(url: str, stock: RunFiles, state: RunState) -> Sweep | None:
    """Nothing is given up, so nothing needs to have been read back; and a run without checkpoints may be cleaned up."""
    refuse(state, stock, url)
    if not state.commits.keys() <= stock.used.keys():
        return None
    listed = stock.owned
    live = live_packs(state, listed, {key for attempt in state.commits for key in stock.used[attempt]})
    return Sweep(delete=tuple(key for key in listed if key not in live))


def may_end(state: RunState, attempt: Attempt) -> bool:
    """Whether an attempt is open, and of an epoch that is over. What is HELD here may be a checkpoint elsewhere."""
    return not state.ended(attempt) and attempt not in state.held and attempt.epoch < state.epoch


def _why_open(state: RunState, attempt: Attempt) -> str:
    if attempt in state.held:
        return "held for other nodes, whose disks may have the rest"
    if attempt.epoch < state.epoch:
        return "left by a crash, an interrupted copy, or being written"
    return "being written, or left by a crash"


def _why_doomed(state: RunState, attempt: Attempt) -> str:
    if attempt in state.commits:
        return "written again under another number"
    if attempt in state.retired:
        return "retired"
    return f"aborted: {state.reasons[attempt]}" if attempt in state.reasons else "aborted"


async def unfinished(store: Store) -> list[str]:
    """The names of what unfinished uploads were to be. None of them is dropped."""
    found: list[str] = []

    def note(key: str) -> bool:
        found.append(key)
        return True

    await store.drop_uploads(note)
    return sorted(set(found))


async def gc(log: RunLog, stock: RunFiles, ending: Iterable[Attempt]) -> tuple[Sweep, int]:
    """End these, land the PLAN, and drop unfinished uploads; what landed, and how many uploads were dropped."""
    for attempt in ending:
        await log.append(partial(_end, attempt), owner=None)
    landed = await sweep(log, stock, partial(decide_gc, log.store.url))
    state = log.state

    def wanted(key: str) -> bool:
        attempt = owner(key)
        return not is_temporary(key) if attempt is None else not state.ended(attempt)

    return landed, await log.store.drop_uploads(wanted)


def _end(attempt: Attempt, state: RunState) -> Record | None:
    body = {"checkpoint": str(attempt), "reason": "ended by hand, long after its term"}
    return Record("ABORT", body, f"abort:{attempt}") if may_end(state, attempt) else None
