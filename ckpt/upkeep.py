"""Work on a whole run from outside: copy it, thin it out, clean it up, keep one checkpoint for ever.

Each begins with a plan that can be shown; what decides is pure. What is done then looks again first, since a job may be
training there: a PLAN record is made of the very state that it follows. Nothing here owns a run. Records are appended
for whoever does, and fence nobody; only `copy` may take a run over, where it is told to.

All of it may be stopped at any moment and called again: what was copied is found again, and what a landed PLAN names
and nobody has deleted yet is found by the next `gc`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial

from ckpt import promote, read, retain
from ckpt.commit import create_run, load_part
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    FormatError,
    NoCheckpointError,
    NotFoundError,
    SaveError,
    StoreError,
    UsageError,
)
from ckpt.events import point
from ckpt.log import Acquire, Commit, Record, RunLog, RunState, in_history, live_packs
from ckpt.manifest import MAX_JSON, Attempt, new_nonce, owner, part_key
from ckpt.store import Store, get_small, open_store

COPIED = "copy:"  # so begins the nonce of an ACQUIRE that a copy has made: no job trains under it
OURS = ("FORMAT.json", "log/", "faults/")  # files of a run that belong to no attempt
TRIES = 10  # a job may commit between our look and our record, though not for ever
BATCH, FAR_BATCH = 64, 1000  # files deleted between two words about it
READER_GRACE_S = 600.0  # in a remote place, where deleting takes a file away from those who are reading it

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Item:
    """A checkpoint, or the files of an attempt, in a plan. `size` in bytes; `why` says why it is where it is."""

    attempt: Attempt
    size: int = 0
    files: int = 0
    why: str = ""


def default_grace_s(store: Store) -> float:
    return READER_GRACE_S if store.remote else 0.0


# -- copy --


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Newest first. `lead`: the target's history is to go on from the first of `copy`; `fences`: whoever trains there.

    `after`: the ACQUIRE that was the target's newest when this was decided.
    """

    copy: tuple[Item, ...]
    there: tuple[Item, ...]
    left_out: tuple[Item, ...]
    new: bool
    lead: bool
    fences: bool
    after: Acquire | None


async def look(store: Store) -> RunLog | None:
    """The run in a place, None if the place is empty. FormatError if it holds somebody else's files."""
    log = RunLog(store)
    try:
        await log.open()
    except FormatError:
        async for info in store.list():
            if info.key == "FORMAT.json":
                raise
            raise FormatError(
                f"{store.url} is not empty and not a run: it holds {info.key}, and no FORMAT.json. Choose another place"
            ) from None
        return None
    return log


async def plan_copy(source: RunLog, target: RunLog | None, wanted: Sequence[Commit], take_over: bool) -> CopyPlan:
    """What to do to have these in another place. `target`: None if there is no run yet.

    What cannot be copied, because it is damaged or for another reason, is left out with the reason. UsageError if it
    needs `take_over`; CorruptError if the target's log is damaged.
    """
    far = RunState() if target is None else target.state
    if target is not None and far.damaged:
        raise CorruptError(
            f"log records {_some(far.damaged)} of {target.store.url} are damaged or missing: nobody can say what was "
            "given up there. Copy to another place"
        )
    copy, there, left_out = list[Item](), list[Item](), list[Item]()
    for commit in wanted:
        if target is not None and commit.attempt in far.commits:
            problem = await _missing(target, far.commits[commit.attempt])
            (left_out if problem else there).append(Item(commit.attempt, why=problem))
        elif why := why_not(source.state, far, commit) or await _being_written(target, commit.attempt, take_over):
            left_out.append(Item(commit.attempt, why=why))
        else:
            try:
                size = await promote.measure(source, commit)
                copy.append(Item(commit.attempt, size.nbytes, size.files))
            except (NotFoundError, CorruptError) as error:
                left_out.append(Item(commit.attempt, why=str(await _blame(source, commit.attempt, error))))
    newest = copy[0].attempt if copy else None
    lead = newest is not None and leads(far, newest, take_over)
    fences = lead and not nobodys(far)
    if fences and not take_over:
        raise UsageError(
            f"attempt {newest} is newer than anything that a job in epoch {far.epoch} of the target could save, and "
            "would hide it. With --take-over the target goes on from it, and a job that trains there is fenced"
        )
    after = far.acquires[-1] if far.acquires else None
    return CopyPlan(tuple(copy), tuple(there), tuple(left_out), target is None, lead, fences, after)


def why_not(near: RunState, far: RunState, commit: Commit) -> str:
    """Why a checkpoint cannot be brought to another place; empty if it can. Pure."""
    attempt = commit.attempt
    if not commit.whole:
        return (
            f"only {len(commit.parts)} of its {commit.world} parts are in the source: the others are on the disks of "
            "other nodes"
        )
    if far.ended(attempt) and attempt not in far.commits:
        said = far.reasons.get(attempt, "retired")
        return f"it was given up in the target ({said}) and cannot come back there: copy it to another place"
    undone = attempt not in in_history(near.acquires, near.commits)
    if undone and far.commits and attempt in in_history(far.acquires, {*far.commits, attempt}):
        return (
            "a rollback has undone it in the source, and the target would take it for history: copy it to a new place"
        )
    return ""


def nobodys(state: RunState) -> bool:
    """Whether no job has ever taken the run over, or only a copy has since."""
    return not state.acquires or state.acquires[-1].nonce.startswith(COPIED)


def leads(far: RunState, newest: Attempt, take_over: bool) -> bool:
    """Whether the target must be told that its history goes on from this one. Pure.

    A job there saves under its epoch: what has a higher one would hide all of that for ever. And a copy has said from
    where the history goes on, so what came later in the source would count as undone.
    """
    history = in_history(far.acquires, {*far.commits, newest})
    if newest.epoch > far.epoch:
        return True
    if take_over:
        return history[:1] != [newest]
    return nobodys(far) and newest not in history and all(newest > attempt for attempt in far.commits)


async def _missing(log: RunLog, commit: Commit) -> str:
    """What is wrong with a checkpoint at the first look; empty if nothing."""
    try:
        await promote.measure(log, commit)
    except (CorruptError, NotFoundError) as error:
        return f"it is in the target, but damaged there: {error}"
    return ""


async def _being_written(target: RunLog | None, attempt: Attempt, take_over: bool) -> str:
    """Whether a job may be bringing an attempt to this folder right now: two who write one file spoil it."""
    if target is None or target.store.remote or take_over or nobodys(target.state):
        return ""
    if attempt.epoch < target.state.epoch or not [info async for info in target.store.list(f"packs/{attempt}.")]:
        return ""
    return "a job may be writing it there right now: repeat this later, or with --take-over if no job trains there"


async def open_target(url: str) -> RunLog:
    """The run to copy to, created if it is not there."""
    store = open_store(url, writable=True)
    try:
        await create_run(store)
        log = RunLog(store)
        await log.open()
    except BaseException:
        await store.aclose()
        raise
    return log


async def copy(source: RunLog, target: RunLog, plan: CopyPlan, *, on_bytes: OnBytes = None) -> None:
    """Do it, the newest first. Whoever trains in the target is fenced only once the files are there.

    CorruptError if the source is damaged, NoCheckpointError if it has retired a checkpoint meanwhile, FencedError if
    a job took the target over meanwhile.
    """
    for number, item in enumerate(plan.copy):
        commit = source.state.commits.get(item.attempt)
        mine: Acquire | None = None
        try:
            if commit is None:
                raise NotFoundError(f"attempt {item.attempt} is gone")
            await _copy_files(source.store, target.store, commit, on_bytes)
            if number == 0 and plan.lead:
                mine = await _lead(target, plan.after, item.attempt)
            await promote.copy_checkpoint(source, target, commit, mine)
        except (NotFoundError, CorruptError) as error:
            raise await _blame(source, item.attempt, error) from None
        except SaveError as error:
            raise SaveError(f"{target.store.url}: {error}. Copy to another place") from None


async def _blame(source: RunLog, attempt: Attempt, error: CheckpointError) -> CheckpointError:
    """Whether what cannot be read is damaged, or was retired while we looked."""
    if attempt in (await source.refresh()).commits:
        return CorruptError(f"step {attempt.step} of {source.store.url} is damaged: {error}")
    return NoCheckpointError(
        f"step {attempt.step} of {source.store.url} was retired while it was copied. Copy a newer one, or `ckpt keep` "
        "it first"
    )


async def _copy_files(source: Store, target: Store, commit: Commit, on_bytes: OnBytes) -> None:
    window = asyncio.Semaphore(promote.PARTS)

    async def one(rank: int, number: int, digest: str) -> None:
        async with window:
            if not target.remote:
                await _drop_unfinished(source, target, commit.attempt, rank, number, digest)
            await promote.copy_part(source, target, commit.attempt, rank, number, expected=digest, on_bytes=on_bytes)
            await load_part(target, commit.attempt, rank, number, expected=digest)  # nobody has removed it meanwhile

    try:
        async with asyncio.TaskGroup() as group:
            for part in commit.parts:
                group.create_task(one(*part))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _drop_unfinished(source: Store, target: Store, attempt: Attempt, rank: int, number: int, digest: str) -> None:
    """In a folder a pack has its full size before its first byte: only with its part is it known to be whole."""
    try:
        await get_small(target, part_key(attempt, rank, number), MAX_JSON)
    except NotFoundError:
        for pack in (await load_part(source, attempt, rank, number, expected=digest)).part.packs:
            await target.delete(pack.key)


async def _lead(log: RunLog, after: Acquire | None, attempt: Attempt) -> Acquire:
    """Make the history of a run go on from an attempt. FencedError if somebody came after `after`."""
    nonce, chosen = f"{COPIED}{new_nonce()}", list[Acquire]()

    def make(state: RunState) -> Record:
        if (state.acquires[-1] if state.acquires else None) != after:
            raise FencedError(f"a job took {log.store.url} over while files were copied there: look again, and repeat")
        mine = Acquire(max(state.epoch, attempt.epoch) + 1, nonce, attempt)
        chosen[:] = [mine]
        body = {"epoch": mine.epoch, "nonce": nonce, "restored": str(attempt)}
        return Record("ACQUIRE", body, f"acquire:{nonce}")

    await log.append(make, owner=None)
    point("acquire.done")
    return chosen[0]


# -- what is in a place --


@dataclass(frozen=True, slots=True)
class Stock:
    """All files of a place by name, with their sizes in bytes, and then what its log says.

    `seen`: the checkpoints there were; `used`: the files that each of them needs, as far as it can be read.
    """

    sizes: dict[str, int]
    seen: Set[Attempt]
    used: dict[Attempt, set[str]]

    def item(self, attempt: Attempt, keys: Iterable[str], why: str = "") -> Item:
        found = [self.sizes[key] for key in keys if key in self.sizes]
        return Item(attempt, sum(found), len(found), why)

    def by_owner(self, keys: Iterable[str]) -> dict[Attempt, list[str]]:
        found: dict[Attempt, list[str]] = {}
        for key in keys:
            if (attempt := owner(key)) is not None:
                found.setdefault(attempt, []).append(key)
        return found


async def take_stock(log: RunLog) -> Stock:
    """The listing comes first: a file that appears later belongs to an attempt that is not in it."""
    sizes = {info.key: info.size async for info in log.store.list()}
    state = await log.refresh()
    for _ in range(TRIES):  # a job may commit and retire while we read
        commits = dict(state.commits)
        used = await retain.files_of(log, commits.values())
        state = await log.refresh()
        if state.commits.keys() <= commits.keys():
            break
    return Stock(sizes, frozenset(commits), used)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a PLAN record says: checkpoints given up, and files that go."""

    retire: Set[Attempt]
    delete: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.retire or self.delete)


Decide = Callable[[RunState, Stock], Sweep | None]
"""Pure. None: there is a checkpoint that came after the stock was taken."""


def refuse(state: RunState, stock: Stock, url: str, retiring: Set[Attempt] = frozenset()) -> None:
    """CorruptError, with advice, if nobody can say which files are needed. Pure."""
    if state.damaged:
        raise CorruptError(
            f"log records {_some(state.damaged)} of {url} are damaged or missing, and may protect what looks "
            "superfluous: nothing is deleted there. Go on in another place: `ckpt copy --all` brings over what is whole"
        )
    unreadable = sorted(a for a in (state.commits.keys() & stock.seen) - stock.used.keys() if a not in retiring)
    if unreadable:
        steps = _some([attempt.step for attempt in unreadable])
        raise CorruptError(
            f"step {steps} of {url} cannot be read, so nobody knows which files it needs: nothing is deleted while it "
            "stays. `ckpt verify` says what is wrong; `ckpt prune` can give it up, and `ckpt keep --undo` lets it go"
        )


async def sweep(log: RunLog, stock: Stock, decide: Decide) -> Sweep:
    """Land a PLAN that says what `decide` does of the newest state. Nothing is deleted here."""
    request, decided = f"plan:{secrets.token_hex(4)}", list[Sweep | None]()
    for _ in range(TRIES):

        def make(state: RunState, stock: Stock = stock) -> Record | None:
            decided[:] = [found := decide(state, stock)]
            if not found:
                return None
            body = {"retire": sorted(map(str, found.retire)), "delete": list(found.delete)}
            return Record("PLAN", body, f"{request}:{state.next_seq}")

        await log.append(make, owner=None)
        if (landed := decided[0]) is not None:
            if landed:
                point("plan.landed")
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
    batch = FAR_BATCH if store.remote else BATCH
    for start in range(0, len(files), batch):
        await store.delete_many([key for key, _ in files[start : start + batch]])
        point("sweep.deleted")
        if on_bytes is not None:
            on_bytes(sum(size for _, size in files[start : start + batch]))


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


def plan_prune(log: RunLog, stock: Stock, keep: retain.Keep) -> PrunePlan:
    """Pure. CorruptError if nothing may be deleted there; NoCheckpointError if nothing is there."""
    state, check = log.state, read.choose(log)
    retiring = retain.choose(state, keep, {check.attempt})
    refuse(state, stock, log.store.url, retiring)
    doomed = decide_prune(keep, check.attempt, state, stock) or Sweep(frozenset(), ())
    why = why_kept(state, keep, check.attempt)
    owned = stock.by_owner(doomed.delete)
    newest_first = sorted(state.commits, reverse=True)
    return PrunePlan(
        check,
        tuple(stock.item(a, owned.get(a, ())) for a in newest_first if a in doomed.retire),
        tuple(stock.item(a, stock.used[a], why[a]) for a in newest_first if a in why and a in stock.used),
        sum(len(keys) for attempt, keys in owned.items() if attempt not in doomed.retire),
        tuple((key, stock.sizes[key]) for key in doomed.delete),
        any(not commit.whole for commit in state.commits.values()),
    )


def decide_prune(keep: retain.Keep, checked: Attempt, state: RunState, stock: Stock) -> Sweep | None:
    retiring = retain.choose(state, keep, {checked})
    listed = [key for key in stock.sizes if owner(key) is not None]
    doomed = retain.plan_deletion(state, retiring, {checked}, stock.used, listed)
    return None if doomed is None else Sweep(frozenset(retiring), tuple(doomed))


def why_kept(state: RunState, keep: retain.Keep, checked: Attempt) -> dict[Attempt, str]:
    """Of what stays by `retain.choose`: why. Pure."""
    history = state.lineage()
    rest = sorted((c for c in state.commits.values() if c not in history), key=lambda c: c.attempt, reverse=True)
    ordered = [*history, *rest]
    due = {c.attempt for c in [c for c in ordered if c.reason == "due"][: keep.last]}
    newest = {c.attempt for c in ordered[: retain.ALWAYS]}
    finite = next((c.attempt for c in ordered if c.finite is not False), None)
    found = {}
    for attempt in state.commits.keys() - retain.choose(state, keep, {checked}):
        reasons = [
            f"kept: {state.kept[attempt]}" if attempt in state.kept else "",
            "the newest two stay" if attempt in newest else "",
            "the newest finite one" if attempt == finite else "",
            f"of the last {keep.last}" if attempt in due else "",
            f"every {keep.every}" if keep.every and attempt.step % keep.every == 0 else "",
        ]
        found[attempt] = "; ".join(filter(None, reasons)) or (
            "the one that was read back" if attempt == checked else "persisted at a death, after the regular ones"
        )
    return found


async def prune(log: RunLog, stock: Stock, keep: retain.Keep, checked: Attempt) -> Sweep:
    """Land the PLAN. `checked`: a checkpoint that was read back and found sound just now."""
    return await sweep(log, stock, partial(_decide_prune, log.store.url, keep, checked))


def _decide_prune(url: str, keep: retain.Keep, checked: Attempt, state: RunState, stock: Stock) -> Sweep | None:
    refuse(state, stock, url, retain.choose(state, keep, {checked}))
    if checked not in state.commits:
        raise NoCheckpointError(f"{url}: step {checked.step}, which was read back, has been retired since. Repeat it")
    return decide_prune(keep, checked, state, stock)


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


def plan_gc(url: str, state: RunState, stock: Stock, uploads: Sequence[str], abort_open: bool) -> GcPlan:
    """Pure. CorruptError if nothing may be deleted there."""
    refuse(state, stock, url)
    owned = stock.by_owner([*stock.sizes, *uploads])
    ending = tuple(a for a in sorted(owned) if abort_open and may_end(state, a))
    later = RunState(
        acquires=state.acquires, commits=state.commits, retired=state.retired, pins=state.pins,
        aborted=state.aborted | set(ending),
    )  # fmt: skip
    found = decide_gc(later, stock) or Sweep(frozenset(), ())
    doomed = set(found.delete)
    opened = [
        stock.item(attempt, keys, _why_open(state, attempt))
        for attempt, keys in owned.items()
        if not state.ended(attempt)
    ]
    live = [key for key in stock.sizes if owner(key) in state.commits and key not in doomed]
    return GcPlan(
        tuple(
            stock.item(attempt, keys, _why_doomed(state, attempt))
            for attempt, keys in sorted(stock.by_owner(found.delete).items())
        ),
        tuple((key, stock.sizes[key]) for key in found.delete),
        tuple(sorted(opened, key=lambda item: item.attempt)),
        ending,
        tuple(key for key in uploads if (a := owner(key)) is not None and later.ended(a)),
        tuple(key for key in stock.sizes if owner(key) is None and not key.startswith(OURS)),
        Item(Attempt(0, 0, ""), sum(stock.sizes[key] for key in live), len(live)),
    )


def decide_gc(state: RunState, stock: Stock) -> Sweep | None:
    """Nothing is given up, so nothing needs to have been read back."""
    if not state.commits.keys() <= stock.used.keys():
        return None
    listed = [key for key in stock.sizes if owner(key) is not None]
    live = live_packs(state, listed, {key for attempt in state.commits for key in stock.used[attempt]})
    return Sweep(frozenset(), tuple(key for key in listed if key not in live))


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


async def gc(log: RunLog, stock: Stock, ending: Iterable[Attempt]) -> tuple[Sweep, int]:
    """End these, land the PLAN, and drop unfinished uploads; what landed, and how many uploads were dropped."""
    for attempt in ending:
        await log.append(partial(_end, attempt), owner=None)
    landed = await sweep(log, stock, partial(_decide_gc, log.store.url))
    state = log.state

    def wanted(key: str) -> bool:
        attempt = owner(key)
        return attempt is None or not state.ended(attempt)

    return landed, await log.store.drop_uploads(wanted)


def _end(attempt: Attempt, state: RunState) -> Record | None:
    body = {"attempt": str(attempt), "reason": "ended by hand, long after its epoch"}
    return Record("ABORT", body, f"abort:{attempt}") if may_end(state, attempt) else None


def _decide_gc(url: str, state: RunState, stock: Stock) -> Sweep | None:
    refuse(state, stock, url)
    return decide_gc(state, stock)


# -- keep --


async def set_keep(log: RunLog, attempt: Attempt, note: str | None) -> None:
    """Never retire a checkpoint, and why; None: it may go again. NoCheckpointError if it was retired meanwhile."""
    token = secrets.token_hex(4)

    def make(state: RunState) -> Record | None:
        if attempt not in state.commits and note is not None:
            raise NoCheckpointError(f"step {attempt.step} of {log.store.url} was retired a moment ago")
        if state.kept.get(attempt) == note:
            return None
        body = {"attempt": str(attempt), "note": note or "", "keep": note is not None}
        return Record("KEEP", body, f"keep:{attempt}:{token}")

    await log.append(make, owner=None)


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
