"""Reads chunks of a checkpoint, and replaces damaged ones by equal bytes from elsewhere, found by digest.

First it searches other checkpoints of the same run, which may have stored the same bytes in another file, then other
tiers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.core.checkpoint import read, read_local
from ckpt.core.checkpoint.blobs import Sink, plan_reads
from ckpt.core.checkpoint.blobs import fetch as fetch_blobs
from ckpt.core.checkpoint.put import Room
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.table import Content, Table
from ckpt.core.log.records import Commit, RunState
from ckpt.errors import CheckpointError, CorruptError, FormatError, NoCheckpointError, StoreError, is_unreadable
from ckpt.events import log as logger
from ckpt.store import Store

NEARBY = 8  # checkpoints of a tier that are searched

Lost = dict[int, CorruptError | StoreError]


async def fetch(
    store: Store,
    attempt: Attempt,
    table: Table,
    blobs: Sequence[int],
    sink: Sink,
    others: Sequence[str] = (),
    room: Room | None = None,
) -> list[str]:
    """Pass all of these chunks to `sink`, each verified. Return a description of chunks that came from elsewhere.

    Raise CorruptError or StoreError if a chunk cannot be found anywhere. If a tier that may have the missing bytes
    cannot be read now, that error is raised (`is_unreadable`) instead.

    others: URLs of tiers with the same checkpoint.
    room: addresses that chunks may be read to instead. Chunks from elsewhere still go to `sink`.
    """
    missing: Lost = {}

    def note(lost: Sequence[int], error: CorruptError | StoreError) -> None:
        missing.update(dict.fromkeys(lost, error))

    batches = plan_reads(table, blobs, far=True)  # long reads, also from a folder
    if store.remote or not hasattr(store, "scatter"):
        await fetch_blobs(store, table, batches, sink, on_damage=note)
    else:
        await read_local.fetch(store, table, batches, sink, note, room)
        # `scatter` reads once. The other function retries transient errors.
        again = [blob for blob, error in missing.items() if isinstance(error, StoreError)]
        for blob in again:
            del missing[blob]
        if again:
            await fetch_blobs(store, table, plan_reads(table, again, far=True), sink, on_damage=note)
    repaired, unreadable = list[str](), list[StoreError]()
    if missing:
        first = next(iter(missing.values()))
        for url in (store.url, *others):
            if missing:
                await _search(store, url, attempt, table, missing, sink, repaired, unreadable)
        for text in repaired:
            logger.warning("step %d in %s: %s; the first error: %s", attempt.step, store.url, text, first)
    if missing:
        errors = [*missing.values(), *unreadable]
        raise next((error for error in errors if is_unreadable(error)), errors[0])
    return repaired


async def _search(
    store: Store,
    url: str,
    attempt: Attempt,
    table: Table,
    missing: Lost,
    sink: Sink,
    repaired: list[str],
    unreadable: list[StoreError],
) -> None:
    """Search one tier while chunks are missing. Errors there are logged. `unreadable`: gets the errors that do not
    prove damage there."""
    try:
        async with read.opened(url) as other:
            state = (await read.open_run(url, other)).state
            for commit in _candidates(state, attempt, url == store.url):
                if missing:
                    await _take(other, commit, attempt, table, missing, sink, repaired, unreadable)
    except (CorruptError, FormatError, NoCheckpointError, StoreError) as error:
        _note_unreadable(error, unreadable)
        logger.warning("step %d cannot be repaired from %s: %s", attempt.step, url, error)


def _note_unreadable(error: CheckpointError, unreadable: list[StoreError]) -> None:
    if isinstance(error, StoreError) and is_unreadable(error):
        unreadable.append(error)


def _candidates(state: RunState, attempt: Attempt, here: bool) -> list[Commit]:
    same = state.commits.get(attempt) or state.held.get(attempt)
    others = [c for c in state.lineage() if c.attempt != attempt]
    others.sort(key=lambda c: abs(c.step - attempt.step))  # nearby steps are most alike
    return [*([same] if same is not None and not here else []), *others[:NEARBY]]


async def _take(
    other: Store,
    commit: Commit,
    attempt: Attempt,
    table: Table,
    missing: Lost,
    sink: Sink,
    repaired: list[str],
    unreadable: list[StoreError],
) -> None:
    """Read the missing chunks that one checkpoint has."""
    found: list[int] = []
    try:
        async for theirs in read.tables_of(other, commit, {table.name_of(blob) for blob in missing}):
            found += await _take_of(other, theirs, table, missing, sink, unreadable)
            if not missing:
                break
    except (CorruptError, FormatError, StoreError) as error:
        _note_unreadable(error, unreadable)
        logger.warning("cannot repair from step %d of %s: %s", commit.step, other.url, error)
    if found:
        names = list(dict.fromkeys(table.name_of(blob) for blob in sorted(found)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        pieces = "1 damaged piece" if len(found) == 1 else f"{len(found)} damaged pieces"
        where = other.url if commit.attempt == attempt else f"{other.url}, step {commit.step}"
        repaired.append(f"{pieces} ({', '.join(names[:3])}{more}) came from {where}")


async def _take_of(
    other: Store, theirs: Table, table: Table, missing: Lost, sink: Sink, unreadable: list[StoreError]
) -> set[int]:
    """Read missing chunks by digest, and return those that were found."""
    wanted: dict[Content, list[int]] = {}
    for blob in missing:
        wanted.setdefault(table.content(blob), []).append(blob)
    keys = zip(map(bytes, theirs.digest), theirs.length.tolist(), strict=True)
    alike = {blob: wanted[key] for blob, key in enumerate(keys) if key in wanted and blob < theirs.owned}
    done: set[int] = set()

    def take(blob: int, data: memoryview) -> None:
        for same in alike[blob]:
            if same not in done:
                sink(same, data)
                done.add(same)

    reads = plan_reads(theirs, alike, far=other.remote)
    await fetch_blobs(other, theirs, reads, take, on_damage=lambda blobs, error: _note_unreadable(error, unreadable))
    for blob in done:
        del missing[blob]
    return done
