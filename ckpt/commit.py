"""Taking a run over, making checkpoints exist, and tidying up after a crash: everything that changes the log.

A checkpoint exists from the moment its COMMIT record is durable. Before that, W verified parts of one attempt already
*are* a consistent checkpoint, since attempts are named alike on all ranks; so recovery rolls a whole attempt forward
and aborts the rest. Only an attempt that the store cannot read at that moment stays open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt.codec import file_digest
from ckpt.errors import (
    CorruptError,
    ExistsError,
    FormatError,
    NotFoundError,
    SaveError,
    StoreError,
)
from ckpt.events import log as logger
from ckpt.events import point
from ckpt.log import Acquire, Commit, Record, RunLog, RunState, infer_root
from ckpt.manifest import (
    MAX_JSON,
    Attempt,
    Part,
    index_key,
    new_format,
    owner,
    part_key,
    rank_and_try,
    table_key,
)
from ckpt.store import Store, get_small
from ckpt.table import MAX_TABLE, Table, merge
from ckpt.write import Written


async def create_run(store: Store) -> None:
    """Make sure that FORMAT.json is there, and that the store really creates only what is absent.

    FormatError if the place holds somebody else's files.
    """
    try:
        await store.head("FORMAT.json")
    except NotFoundError:
        if (root := await infer_root(store)) is not None:
            await store.put("FORMAT.json", new_format(root))  # lost, and the log still knows whose it is
        async for info in store.list():
            if root is not None:
                break
            raise FormatError(
                f"{store.url} is not empty and not a run: it holds {info.key}, and no FORMAT.json. Choose another place"
            ) from None
        try:
            await store.put("FORMAT.json", new_format(), create=True)
        except ExistsError:
            pass  # another job was quicker
    try:
        await store.put("FORMAT.json", new_format(), create=True)
    except ExistsError:
        return
    raise StoreError(
        f"{store.url} lets an object be created twice: two jobs could overwrite each other's commits. "
        "Use a store with atomic create-if-absent"
    )


async def acquire(log: RunLog, nonce: str, *, restored: Attempt | None = None, floor: int = 0) -> Acquire:
    """Become the owner of the run: from here on older incarnations are fenced.

    The epoch exceeds every epoch in this log and `floor`. With `restored`, the history continues from that attempt.
    """
    request = f"acquire:{nonce}"
    chosen: list[Acquire] = []

    def make(state: RunState) -> Record:
        # A damaged record may have been an ACQUIRE: leave room for its epoch.
        epoch = max(state.epoch + len(state.damaged), floor) + 1
        chosen[:] = [Acquire(epoch, nonce, restored)]
        body = {"epoch": epoch, "nonce": nonce, "restored": None if restored is None else str(restored)}
        return Record("ACQUIRE", body, request)

    state = await log.append(make, owner=None)
    point("acquire.done")
    mine = [a for a in state.acquires if a.nonce == nonce]
    if not mine:
        raise FormatError(f"the log of {log.store.url} has used up its epochs: go on in another place")
    return mine[-1]


async def commit(log: RunLog, mine: Acquire, parts: list[Written]) -> Commit:
    """Make a checkpoint of the parts of one attempt, one a rank. Doing it twice is harmless.

    SaveError if the attempt was aborted meanwhile; FencedError if a newer job has taken over.
    """
    attempt = Attempt.parse(parts[0].part.attempt)
    parts = sorted(parts, key=lambda w: w.part.rank)
    if [w.part.rank for w in parts] != list(range(parts[0].part.world)):
        raise SaveError(f"attempt {attempt} is not whole: it has ranks {[w.part.rank for w in parts]}")
    raw_index = merge([w.table for w in parts]).to_bytes()
    digest = file_digest(raw_index)
    log.check_owner(mine)
    await log.store.put(index_key(attempt, digest), raw_index)
    point("index.stored")

    def make(state: RunState) -> Record | None:
        if state.ended(attempt):
            return None
        body: dict[str, Any] = {
            "attempt": str(attempt),
            "world": len(parts),
            "parts": [[w.part.rank, w.part.number, w.digest] for w in parts],
            "index": digest,
            "finite": parts[0].part.finite,
            "reason": parts[0].part.reason,
        }
        return Record("COMMIT", body, f"commit:{attempt}")

    state = await log.append(make, owner=mine)
    found = state.commits.get(attempt)
    if found is None:
        log.check_owner(mine)  # a newer job ended it
        raise SaveError(f"attempt {attempt} was aborted or retired before it could be committed")
    return found


async def abort(log: RunLog, mine: Acquire, attempt: Attempt, reason: str) -> None:
    """End an attempt that will never be a checkpoint, so that its files can be cleaned up."""

    def make(state: RunState) -> Record | None:
        body = {"attempt": str(attempt), "reason": reason[:500]}
        return None if state.ended(attempt) else Record("ABORT", body, f"abort:{attempt}")

    await log.append(make, owner=mine)


async def retract(log: RunLog, mine: Acquire, attempt: Attempt) -> None:
    """Give one attempt up, committed or not, whatever the retention says: it is known not to be what it claims."""

    def make(state: RunState) -> Record | None:
        body = {"retire": [str(attempt)], "delete": []}
        return Record("PLAN", body, f"retract:{attempt}") if attempt in state.commits else None

    await log.append(make, owner=mine)
    await abort(log, mine, attempt, "taken back")  # or a restart would roll it forward


@dataclass
class Recovery:
    """What recovery did with attempts that a crash had left open."""

    rolled_forward: list[Attempt] = field(default_factory=list)
    aborted: list[Attempt] = field(default_factory=list)


async def recover(log: RunLog, mine: Acquire, in_flight: frozenset[Attempt] = frozenset()) -> Recovery:
    """End every open attempt: commit it if it is whole, else abort it. `in_flight`: being written by us right now."""
    found: dict[Attempt, list[str]] = {}
    for prefix in ("packs/", "parts/"):
        async for info in log.store.list(prefix):
            attempt = owner(info.key)
            if attempt is not None:
                found.setdefault(attempt, []).append(info.key)
    state = await log.refresh()
    done = Recovery()
    for attempt in sorted(found):
        if state.ended(attempt) or attempt in in_flight:
            continue
        try:
            parts = await _whole(log.store, attempt, found[attempt])
        except StoreError as error:
            logger.warning("attempt %s stays open, since it cannot be read now: %s", attempt, error)
            continue
        if parts is None:
            await abort(log, mine, attempt, "not whole when the run was opened")
            done.aborted.append(attempt)
        else:
            await commit(log, mine, parts)
            done.rolled_forward.append(attempt)
            logger.info("rolled step %d forward: all of it had been written before the crash", attempt.step)
    point("recover.done")
    return done


async def _whole(store: Store, attempt: Attempt, keys: list[str]) -> list[Written] | None:
    """The parts of an attempt if all are there and sound, the highest try of each rank first; else None.

    StoreError if the store failed, so that nobody can say.
    """
    newest: dict[int, Written] = {}
    tries = sorted((rank_and_try(k) for k in keys if k.startswith("parts/") and k.endswith(".json")), reverse=True)
    for rank, number in tries:
        if rank in newest:
            continue
        try:
            newest[rank] = await load_part(store, attempt, rank, number)
        except (CorruptError, FormatError, NotFoundError) as error:
            logger.warning("attempt %s, rank %d, try %d does not count: %s", attempt, rank, number, error)
    worlds = {w.part.world for w in newest.values()}
    if len(worlds) != 1 or set(newest) != set(range(worlds.pop())):
        return None
    return list(newest.values())


async def load_part(store: Store, attempt: Attempt, rank: int, number: int, *, expected: str | None = None) -> Written:
    """A part and its table, checked against their digests, and its packs against their sizes."""
    part, digest = await read_part(store, attempt, rank, number, expected=expected)
    table = await load_table(store, table_key(attempt, rank, number), part.table)
    return Written(part, digest, table)


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
    for pack in part.packs:
        info = await store.head(pack.key)
        if info.size != pack.size:
            raise CorruptError(f"{pack.key} holds {info.size} bytes, not {pack.size}")
    return part, digest


async def load_table(store: Store, key: str, digest: str) -> Table:
    raw = await get_small(store, key, MAX_TABLE)
    if file_digest(raw) != digest:
        raise CorruptError(f"{key} is damaged: its digest does not match")
    return Table.from_bytes(raw, key)
