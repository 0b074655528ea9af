"""Taking a run over, making checkpoints exist, and tidying up after a crash: everything that changes the log.

A checkpoint exists from the moment its COMMIT record is durable. Before that, W verified parts of one attempt already
*are* a consistent checkpoint, since attempts are named alike on all ranks; so recovery rolls a whole attempt forward
and aborts the rest. Only an attempt that the store cannot read at that moment stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ckpt.checkpoint.losses import UNCLEAR, records
from ckpt.checkpoint.store_trial import PREFIX, check_ranges, created_twice, try_out
from ckpt.checkpoint.write import WrittenPart
from ckpt.errors import (
    CorruptError,
    ExistsError,
    FormatError,
    NotFoundError,
    SaveError,
    SkippedError,
    StoreError,
)
from ckpt.events import log as logger
from ckpt.events import point
from ckpt.format.digest import file_digest
from ckpt.format.join_ranks import Slim, build
from ckpt.format.layout import Layout
from ckpt.format.manifest import (
    MAX_FORMAT,
    MAX_JSON,
    MAX_NEEDS,
    Attempt,
    Part,
    index_key,
    needs_texts,
    new_format,
    owner,
    part_key,
    rank_and_try,
    table_key,
)
from ckpt.format.merged import SavedState
from ckpt.format.table import MAX_TABLE, Table, merge
from ckpt.runlog.log import RunLog, infer_root
from ckpt.runlog.records import MAX_DOUBTS, Acquire, Commit, Record, RunState, commit_body
from ckpt.store import Store, get_small

STAGGER_S = 5.0  # the writer of each further rank waits so much longer before it commits for the first one
PROBES = 3  # whoever repeats a request whose answer was lost finds these bytes, and may take them for his own
LEFT_OUT = "was left out in"  # so says a reason for an ABORT that is no failure: the place cannot keep up
POLL_S = (0.01, 0.5)  # seconds between two looks, at first and in the end
FAR_STAGGER_S, FAR_POLL_S = 60.0, (0.5, 10.0)  # the same where each look is a request
FEW = 4  # packs, each of which is asked for by itself
HEADS = 64  # questions at a time
AT_ONCE = 16  # parts
MANY = 64  # ranks: the index of more is a directory in any case
WHOLE = 1 << 14  # rows of all tables (pieces and blobs): with more, the index is a directory of them
GROWTH, FAR_GROWTH = 1.3, 2.0  # of the time between two looks


async def create_run(store: Store) -> None:
    """Make sure that FORMAT.json is there, and that the store really creates only what is absent, and knows ranges.

    FormatError if the place holds somebody else's files, StoreError if it cannot hold a run: nothing is written then.
    """
    try:
        await get_small(store, "FORMAT.json", MAX_FORMAT)  # not just a look: what it is refused for, only this says
    except NotFoundError:
        if (root := await infer_root(store)) is None:  # else it was lost, and the log still knows whose it is
            await _check_empty(store)
        if store.remote:
            await try_out(store)
        try:
            await store.put("FORMAT.json", new_format(root), create=True)
        except ExistsError:
            pass  # another rank or job was quicker
    there = bytes(await get_small(store, "FORMAT.json", MAX_FORMAT))
    for _ in range(PROBES):
        try:
            await store.put("FORMAT.json", there, create=True)  # the same bytes: no harm, should it replace them
        except ExistsError:
            break
    else:
        raise created_twice(store)
    if store.remote:
        await check_ranges(store, "FORMAT.json", there)


async def _check_empty(store: Store) -> None:
    """FormatError if somebody else's files are there."""
    async for info in store.list():
        if info.key == "FORMAT.json":
            return  # another rank or job was quicker
        if not info.key.startswith(PREFIX):  # `ckpt doctor` is at work, or another start tries the place out
            raise FormatError(
                f"{store.url} is not empty and not a run: it holds {info.key}, and no FORMAT.json. Choose another "
                "location"
            )


async def acquire(log: RunLog, nonce: str, *, restored: Attempt | None = None, floor: int = 0) -> Acquire:
    """Become the owner of the run: from here on older incarnations are fenced.

    The epoch exceeds every epoch in this log and `floor`. With `restored`, the history continues from that attempt.
    """
    request = f"acquire:{nonce}"
    chosen: list[Acquire] = []

    def make(state: RunState) -> Record:
        # A damaged record may have been an ACQUIRE that came after the newest we know: leave room for its epoch.
        newest = state.requests.get(f"acquire:{state.acquires[-1].nonce}", -1) if state.acquires else -1
        epoch = max(state.epoch + sum(seq > newest for seq in state.damaged), floor) + 1
        chosen[:] = [Acquire(epoch, nonce, restored)]
        body = {"epoch": epoch, "nonce": nonce, "restored": None if restored is None else str(restored)}
        return Record("ACQUIRE", body, request)

    state = await log.append(make, owner=None)
    point("acquire.done")
    mine = [a for a in state.acquires if a.nonce == nonce]
    if not mine:
        raise FormatError(f"the log of {log.store.url} has used up its epochs: go on in another location")
    return mine[-1]


@dataclass(frozen=True, slots=True)
class Role:
    """Whose parts belong into one place, and how soon a writer may commit them: the first at once, others later."""

    ranks: tuple[int, ...] = (0,)
    place: int = 0
    world: int = 1

    @property
    def partial(self) -> bool:
        """A disk that only some of the ranks see."""
        return len(self.ranks) < self.world


def check_sources(
    state: RunState, attempt: Attempt, needs: Iterable[Attempt], packs: Iterable[str] = frozenset()
) -> None:
    """SaveError unless the older checkpoints that an attempt builds on are live in this very state.

    Then all that it takes from them is there, also what they took from still older ones, since no PLAN deletes what a
    live one uses; and what is committed next to this state protects it from then on by using it too. `packs`: of these
    checkpoints only those count that were committed, and of no other try.
    """
    tries = {a: {(rank, number) for rank, number, _ in state.commits[a].parts} for a in needs if a in state.commits}
    for base in needs:
        if base not in tries:
            why = "was retired meanwhile" if base in state.retired else "is no checkpoint here"
            raise SaveError(f"step {attempt.step} builds on step {base.step}, which {why}: the next save will be whole")
    for key in packs:
        of = owner(key)
        if of in tries and rank_and_try(key) not in tries[of]:
            raise SaveError(f"step {attempt.step} builds on {key}, of a try that was not committed")


def check_borrowed(state: RunState, attempt: Attempt, packs: Iterable[str], used: Mapping[Attempt, Set[str]]) -> None:
    """SaveError if what was copied refers to a pack that a PLAN may have named: of an attempt that has ended here, and
    in use by no live checkpoint. `used`: as far as it is known, what each of them uses."""
    safe = set[str]().union(*(used[a] for a in used.keys() & state.commits.keys()))
    for key in sorted(packs):
        of = owner(key)
        if of is not None and of != attempt and key not in safe and state.ended(of):
            raise SaveError(f"step {attempt.step} refers to {key}, of an attempt that was given up here")


def vouches(state: RunState, base: WrittenPart) -> bool:
    """Whether one may build on a part: it belongs to a live checkpoint, which was made of this very try."""
    part = base.part
    found = state.commits.get(Attempt.parse(part.attempt))
    return found is not None and (part.rank, part.number, base.digest) in found.parts


async def begin(log: RunLog, mine: Acquire | None, attempt: Attempt, pins: Iterable[Attempt]) -> None:
    """Say that an attempt builds on these checkpoints: retention leaves them alone until it has ended.

    Several ranks may say so of one attempt, each of its own. Nothing happens if the attempt has ended. SaveError if one
    of them is no checkpoint any more, or they are too many.
    """
    wanted = set(pins)

    def make(state: RunState) -> Record | None:
        said = set(state.pins.get(attempt, ()))
        if state.ended(attempt) or wanted <= said & state.commits.keys():
            return None
        check_sources(state, attempt, sorted(wanted))
        pinned = wanted | (said & state.commits.keys())
        _check_needs(attempt, pinned)
        body = {"attempt": str(attempt), "pins": needs_texts(pinned)}
        return Record("BEGIN", body, f"begin:{attempt}:{state.next_seq}" if said else f"begin:{attempt}")

    await log.append(make, owner=mine)


def _check_needs(attempt: Attempt, needs: Collection[Attempt]) -> None:
    """SaveError if nobody could read the record that says this."""
    if len(needs) > MAX_NEEDS:
        raise SaveError(f"step {attempt.step} builds on {len(needs)} older ones, which is too many: save it whole")
    if needs and max(needs) >= attempt:
        raise SaveError(f"step {attempt.step} builds on step {max(needs).step}, which is not older: save it whole")


async def commit(
    log: RunLog,
    mine: Acquire | None,
    parts: list[WrittenPart],
    *,
    kind: str = "COMMIT",
    used: Mapping[Attempt, Set[str]] | None = None,
) -> Commit:
    """Make a checkpoint of the parts of one attempt, one a rank. Doing it twice is harmless. `mine` None: fence nobody.

    SaveError if the attempt was aborted meanwhile, or builds on a checkpoint that was retired meanwhile; FencedError if
    a newer job has taken over. `used`: for a copy, which has brought along all that it refers to: what it was built on
    need not be here then. Says which files each checkpoint here uses.
    """
    attempt = Attempt.parse(parts[0].part.attempt)
    parts = sorted(parts, key=lambda w: w.part.rank)
    needs = sorted({Attempt.parse(need) for w in parts for need in w.part.needs})
    packs = {key for w in parts for key in w.table.packs}
    _check_needs(attempt, needs)
    large = is_large(parts, kind)
    raw_index = await asyncio.to_thread(index_of, parts, kind) if large else index_of(parts, kind)
    digest = file_digest(raw_index)
    log.check_owner(mine)
    await log.store.put(index_key(attempt, digest), raw_index)
    point("index.stored")

    found = Commit(
        attempt,
        parts[0].part.world,
        tuple((w.part.rank, w.part.number, w.digest) for w in parts),
        digest,
        all_finite([w.part.finite for w in parts]),
        next((w.part.reason for w in parts if w.part.reason != "due"), "due"),
        tuple(needs),
    )

    def make(state: RunState) -> Record | None:
        if state.ended(attempt) or (kind == "HELD" and attempt in state.held):
            return None
        # Packs may be of attempts that are retired by now: what was built on uses them, and vouches for them.
        if used is None:
            check_sources(state, attempt, needs, packs)
        else:
            check_borrowed(state, attempt, packs, used)
        return Record(kind, commit_body(found), f"{kind.lower()}:{attempt}")

    state = await log.append(make, owner=mine)
    landed = state.commits.get(attempt) or (state.held.get(attempt) if kind == "HELD" else None)
    if landed is None:
        log.check_owner(mine)  # a newer job ended it
        why = state.reasons.get(attempt, "retired")
        raise SaveError(f"attempt {attempt} was given up before it could be committed: {why}")
    return landed


def index_of(parts: Sequence[WrittenPart], kind: str = "COMMIT") -> bytes:
    """The index of parts in rank order: all tables as one while that is small, so that restoring reads one file and a
    lost table can be made again; else a directory of them. SaveError if the ranks do not agree about what they saved.
    """
    tables = [w.table for w in parts]
    if not is_large(parts, kind):
        return merge(tables).to_bytes()
    try:
        return build([w.part for w in parts], tables).to_bytes()
    except CorruptError as error:
        raise SaveError(str(error)) from error


def is_large(parts: Sequence[WrittenPart], kind: str) -> bool:
    """Whether the index will be a directory. What lies on several disks is told by each, with its whole table."""
    if kind != "COMMIT" or not 1 < len(parts) == parts[0].part.world:
        return False
    rows = sum(len(w.table.shards) + len(w.table.length) for w in parts)
    return len(parts) > MANY or rows > WHOLE


async def complete(log: RunLog, mine: Acquire, attempt: Attempt) -> None:
    """All other places hold their parts too: what is HELD here is a checkpoint.

    SaveError, and the attempt is ended here, if it builds on a checkpoint that was retired meanwhile.
    """

    def make(state: RunState) -> Record | None:
        held = state.held.get(attempt)
        if held is None or state.ended(attempt):
            return None
        check_sources(state, attempt, held.needs)
        return Record("COMMIT", commit_body(held), f"commit:{attempt}")

    try:
        await log.append(make, owner=mine)
    except SaveError as error:
        await abort(log, mine, attempt, str(error), held=True)
        raise


def given_up(state: RunState, attempt: Attempt) -> SaveError:
    """Why an attempt that has ended is no checkpoint."""
    why = state.reasons.get(attempt, "its reason is not known any more")
    kind = SkippedError if LEFT_OUT in why else SaveError
    return kind(f"step {attempt.step} was given up: {why}")


def check_fit(parts: list[WrittenPart]) -> None:
    """SaveError if the ranks do not agree about what they saved: some of it twice, or by nobody."""
    ordered = sorted(parts, key=lambda w: w.part.rank)
    try:
        layouts = [Layout.from_json(w.part.layout) for w in ordered]
        SavedState(layouts, [w.part.values for w in ordered], merge([w.table for w in ordered]))
    except CorruptError as error:
        raise SaveError(str(error)) from error


async def settle(
    log: RunLog,
    owner: Callable[[], Acquire],
    own: WrittenPart,
    role: Role,
    *,
    deadline_s: float,
    on_held: Callable[[], None] = lambda: None,
) -> None:
    """From a part to a checkpoint: commit when all ranks' parts are there, or wait until another rank's writer has.

    No rank asks another: the parts in the store are the truth. SaveError if the attempt is given up, or parts are
    missing after `deadline_s`. `on_held` is called when all that belongs into this place is there, and the checkpoint
    needs those of other places as well.
    """
    attempt = Attempt.parse(own.part.attempt)
    remote = log.store.remote
    stagger_s, poll_s = (FAR_STAGGER_S, FAR_POLL_S) if remote else (STAGGER_S, POLL_S)
    started, pause, told = time.monotonic(), poll_s[0], False
    while True:
        waited = time.monotonic() - started
        if waited >= role.place * stagger_s:
            parts = await _present(log.store, attempt, own, role)
            if parts is not None and attempt not in log.state.held:
                await _commit_or_end(log, owner(), parts, kind="HELD" if role.partial else "COMMIT")
        elif role.world > 1:
            await log.refresh()
        state = log.state
        if attempt in state.commits or (attempt in state.retired and attempt not in state.reasons):
            return  # perhaps so long ago that newer ones have taken its place
        if state.ended(attempt):
            raise given_up(state, attempt)
        log.check_owner(owner())
        if attempt in state.held and not told:
            told = True
            on_held()
        if waited > deadline_s:
            await _too_late(log, owner(), own, role, deadline_s)
        await asyncio.sleep(pause)
        pause = min(pause * (FAR_GROWTH if remote else GROWTH), poll_s[1])
        if role.place * stagger_s <= waited:
            await log.refresh()


async def _commit_or_end(log: RunLog, mine: Acquire, parts: list[WrittenPart], *, kind: str) -> None:
    """SaveError, and the attempt is ended, if these parts cannot be a checkpoint."""
    try:
        if len(parts) > 1 and kind == "COMMIT" and not is_large(parts, kind):  # to make a directory is to check it
            await asyncio.to_thread(check_fit, parts)
        await commit(log, mine, parts, kind=kind)
    except SaveError as error:
        await abort(log, mine, Attempt.parse(parts[0].part.attempt), str(error))
        raise


async def _present(store: Store, attempt: Attempt, own: WrittenPart, role: Role) -> list[WrittenPart] | None:
    """The parts of all ranks that belong here, None while some are missing."""
    if role.ranks == (own.part.rank,):
        return [own]
    keys = [info.key async for info in store.list(f"parts/{attempt}.")]
    ready = {rank for rank, _ in _tries(keys)}
    if not ready.issuperset(role.ranks):
        return None
    found = await _sound(store, attempt, keys, own)
    return [found[rank] for rank in role.ranks] if found.keys() >= set(role.ranks) else None


async def _too_late(log: RunLog, mine: Acquire, own: WrittenPart, role: Role, deadline_s: float) -> None:
    attempt = Attempt.parse(own.part.attempt)
    keys = [info.key async for info in log.store.list(f"parts/{attempt}.")]
    ready = (await _sound(log.store, attempt, keys, own)).keys()  # a damaged one has not come
    missing = ", ".join(map(str, sorted(set(role.ranks) - ready)[:8]))
    what = f"the parts of ranks {missing}" if missing else "the word that the disks of other nodes hold theirs"
    reason = f"{what} did not come within {deadline_s:g} s"
    if not role.partial:
        await abort(log, mine, attempt, reason)
        if attempt in log.state.commits:
            return  # at the last moment
    raise SaveError(f"step {attempt.step} was not committed: {reason}")


async def abort(log: RunLog, mine: Acquire, attempt: Attempt, reason: str, *, held: bool = False) -> None:
    """End an attempt that will never be a checkpoint, so that its files can be cleaned up.

    One that is HELD here may be a checkpoint in other places by now: it is ended only with `held`.
    """

    def make(state: RunState) -> Record | None:
        body = {"attempt": str(attempt), "reason": reason[:500]}
        kept = state.ended(attempt) or (attempt in state.held and not held)
        return None if kept else Record("ABORT", body, f"abort:{attempt}")

    await log.append(make, owner=mine)


async def retract(log: RunLog, mine: Acquire, attempt: Attempt, reason: str) -> None:
    """Give one attempt up, committed or not, whatever the retention says: it is known not to be what it claims.

    Its parts and its index go at once, so that a record that is damaged later does not bring it back.
    """

    def make(state: RunState) -> Record | None:
        body = {"retire": [str(attempt)], "delete": [], "reason": reason[:500]}
        return Record("PLAN", body, f"retract:{attempt}") if attempt in state.commits else None

    await abort(log, mine, attempt, reason, held=True)  # from here on it cannot be committed any more
    await log.append(make, owner=mine)
    with contextlib.suppress(StoreError):
        for prefix in (f"parts/{attempt}.", f"index/{attempt}-"):
            await log.store.delete_many([info.key async for info in log.store.list(prefix)])


async def doubt(log: RunLog, mine: Acquire, attempt: Attempt, ranges: Collection[tuple[str, int]]) -> None:
    """Say to the writers of all ranks which bytes were found damaged, by pack and offset, so that nobody builds on
    them."""
    new = sorted(set(ranges) - log.state.doubts)[:MAX_DOUBTS]
    if not new:
        return
    body = {"attempt": str(attempt), "ranges": [list(one) for one in new]}
    request = f"doubt:{attempt}:{file_digest(repr(new).encode())[:16]}"
    await log.append(lambda state: Record("DOUBT", body, request), owner=mine)


@dataclass
class Recovery:
    """What recovery did with attempts that a crash had left open."""

    rolled_forward: list[Attempt] = field(default_factory=list)
    aborted: list[Attempt] = field(default_factory=list)


async def recover(
    log: RunLog, mine: Acquire, in_flight: frozenset[Attempt] = frozenset(), *, partial: bool = False
) -> Recovery:
    """End every open attempt: commit it if it is whole, else abort it. `in_flight`: being written by us right now.

    Also one that has no file yet, and only said what it would build on: that could never be retired.

    `partial`: this tier holds the parts of some ranks only. There an attempt is left HELD with what is sound of it,
    since the disks of other nodes may have the rest.

    Where a record that is damaged may have ended an attempt, all of it being there does not say that it was not taken
    back. Only its index does, which is stored in order to commit it: without, it is left out.
    """
    found: dict[Attempt, list[str]] = {}
    for prefix in ("packs/", "parts/"):
        async for info in log.store.list(prefix):
            attempt = owner(info.key)
            if attempt is not None:
                found.setdefault(attempt, []).append(info.key)
    state = await log.refresh()
    indexes = {info.key async for info in log.store.list("index/")} if state.damaged else set()
    done = Recovery()
    for attempt in sorted(found.keys() | state.pins.keys()):
        if state.ended(attempt) or attempt in in_flight or attempt in state.held:
            continue
        reason = "not whole when the run was opened"
        try:
            parts = list((await _sound(log.store, attempt, found.get(attempt, []))).values())
            kind = "COMMIT" if _is_whole(parts) else "HELD"
            if kind == "COMMIT" or (partial and parts):
                if _may_have_ended(state, attempt) and _index_key(parts, kind) not in indexes:
                    reason = f"it {UNCLEAR}: {records(state.damaged)}"
                    raise SaveError(f"step {attempt.step} is left out, though all of it is there: {reason}")
                await _commit_or_end(log, mine, parts, kind=kind)
                done.rolled_forward.append(attempt)
                logger.info("rolled step %d forward: all of it had been written before the crash", attempt.step)
                continue
        except SaveError as error:
            logger.warning("%s", error)
        except StoreError as error:
            logger.warning("attempt %s stays open, since it cannot be read now: %s", attempt, error)
            continue
        await abort(log, mine, attempt, reason)
        done.aborted.append(attempt)
    point("recover.done")
    return done


def _may_have_ended(state: RunState, attempt: Attempt) -> bool:
    """Whether a damaged record may have said so: one that came after its incarnation had taken the run over."""
    since = state.requests.get(f"acquire:{attempt.nonce}", -1)
    return any(seq > since for seq in state.damaged)


def _index_key(parts: list[WrittenPart], kind: str) -> str:
    """Of the index that is stored before these are committed."""
    ordered = sorted(parts, key=lambda w: w.part.rank)
    return index_key(Attempt.parse(parts[0].part.attempt), file_digest(index_of(ordered, kind)))


def all_finite(said: list[bool | None]) -> bool | None:
    """What ranks said, as one: one that has seen a NaN is enough."""
    return False if False in said else None if None in said else True


def _is_whole(parts: list[WrittenPart]) -> bool:
    worlds = {w.part.world for w in parts}
    return len(worlds) == 1 and {w.part.rank for w in parts} == set(range(worlds.pop()))


async def _sound(
    store: Store, attempt: Attempt, keys: list[str], own: WrittenPart | None = None
) -> dict[int, WrittenPart]:
    """The parts of an attempt that are sound, by rank: of each the highest try. `own`: what needs no reading.

    StoreError if the store failed, so that nobody can say.
    """
    newest: dict[int, WrittenPart] = {} if own is None else {own.part.rank: own}
    tries: dict[int, list[int]] = {}
    for rank, number in _tries(keys):
        if rank not in newest:
            tries.setdefault(rank, []).append(number)
    slim, ranks = Slim(), list(tries)
    for start in range(0, len(ranks), AT_ONCE):
        some = ranks[start : start + AT_ONCE]
        results = await asyncio.gather(
            *(_newest(store, attempt, rank, tries[rank], slim) for rank in some), return_exceptions=True
        )
        for rank, result in zip(some, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            if result is not None:
                newest[rank] = result
    return newest


async def _newest(store: Store, attempt: Attempt, rank: int, tries: Iterable[int], slim: Slim) -> WrittenPart | None:
    """The first of these tries of a rank that is sound."""
    for number in tries:
        try:
            try:
                found = await load_part(store, attempt, rank, number)
            except CorruptError:
                if not store.remote:
                    raise
                found = await load_part(store, attempt, rank, number)  # perhaps damaged on its way
            return found if found.part.world <= MANY else replace(found, part=slim(found.part))
        except (CorruptError, FormatError, NotFoundError) as error:
            logger.warning("attempt %s, rank %d, try %d does not count: %s", attempt, rank, number, error)
    return None


def _tries(keys: Iterable[str]) -> list[tuple[int, int]]:
    """(rank, try) of every part among some files, the highest first; what is called otherwise is nobody's."""
    found = []
    for key in keys:
        if key.startswith("parts/") and key.endswith(".json"):
            with contextlib.suppress(CorruptError):
                found.append(rank_and_try(key))
    return sorted(found, reverse=True)


async def stored_part(store: Store, attempt: Attempt, rank: int) -> WrittenPart | None:
    """What a rank has stored of an attempt, if it is sound."""
    keys = [info.key async for info in store.list(f"parts/{attempt}.{rank}.")]
    return (await _sound(store, attempt, keys)).get(rank)


async def load_part(
    store: Store, attempt: Attempt, rank: int, number: int, *, expected: str | None = None
) -> WrittenPart:
    """A part and its table, checked against their digests, and its packs against their sizes."""
    part, digest = await read_part(store, attempt, rank, number, expected=expected)
    key = table_key(attempt, rank, number)
    table = await load_table(store, key, part.table)
    if not {pack.key for pack in part.packs}.issuperset(table.packs):
        raise CorruptError(f"{key} names packs that its part does not")
    return WrittenPart(part, digest, table)


async def read_part(
    store: Store, attempt: Attempt, rank: int, number: int, *, expected: str | None = None
) -> tuple[Part, str]:
    """A part and its digest, without its table."""
    raw = await get_small(store, part_key(attempt, rank, number), MAX_JSON)
    digest = file_digest(raw)
    what = part_key(attempt, rank, number)
    if expected is not None and digest != expected:
        raise CorruptError(f"{what} is not the part that was committed: its digest differs")
    part = Part.from_bytes(raw, what)
    if (part.attempt, part.rank, part.number) != (str(attempt), rank, number):
        raise CorruptError(f"{what} says it is a part of {part.attempt}")
    sizes = await _sizes(store, part)
    for pack in part.packs:
        if sizes[pack.key] != pack.size:
            raise CorruptError(f"{pack.key} holds {sizes[pack.key]} bytes, not {pack.size}")
    return part, digest


async def _sizes(store: Store, part: Part) -> dict[str, int]:
    """Of all packs of a part. NotFoundError if one is not there."""
    keys = [pack.key for pack in part.packs]
    found: dict[str, int] = {}
    if store.remote and len(keys) > FEW:  # an answer to a listing says as much as many to single questions
        for of in sorted({of for key in keys if (of := owner(key)) is not None}):
            found |= {info.key: info.size async for info in store.list(f"packs/{of}.{part.rank}.")}
    for start in range(0, len(keys), HEADS):
        rest = [key for key in keys[start : start + HEADS] if key not in found]
        infos = await asyncio.gather(*(store.head(key) for key in rest))
        found |= {info.key: info.size for info in infos}
    return found


async def load_table(store: Store, key: str, digest: str) -> Table:
    raw = await get_small(store, key, MAX_TABLE)
    if file_digest(raw) != digest:
        raise CorruptError(f"{key} is damaged: its digest does not match")
    return Table.from_bytes(raw, key)
