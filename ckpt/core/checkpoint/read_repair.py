"""Read blobs of a checkpoint; what is damaged comes, by its digest, from wherever else the same bytes are.

That is another checkpoint of the same run first, which may have stored the same bytes in another file, and then other
places.
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

NEARBY = 8  # checkpoints of a place that are looked at

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
    """Hand all of these blobs to `sink`, each verified. Return what was damaged and came from elsewhere, in words.

    Raises CorruptError or StoreError if one cannot be had anywhere. If a place that may have the missing bytes cannot
    be read now, that error is raised (`is_unreadable`), not damage.

    `others`: URLs of places that have the same checkpoint. `room`: where blobs may be read to instead; what comes from
    elsewhere is handed to `sink` all the same.
    """
    missing: Lost = {}

    def note(lost: Sequence[int], error: CorruptError | StoreError) -> None:
        missing.update(dict.fromkeys(lost, error))

    batches = plan_reads(table, blobs, far=True)  # long reads, from a folder as well
    if store.remote or not hasattr(store, "scatter"):
        await fetch_blobs(store, table, batches, sink, on_damage=note)
    else:
        await read_local.fetch(store, table, batches, sink, note, room)
        # `scatter` reads once. The other way to read retries what may pass.
        again = [blob for blob, error in missing.items() if isinstance(error, StoreError)]
        for blob in again:
            del missing[blob]
        if again:
            await fetch_blobs(store, table, plan_reads(table, again, far=True), sink, on_damage=note)
    mended, away = list[str](), list[StoreError]()
    if missing:
        first = next(iter(missing.values()))
        for url in (store.url, *others):
            if missing:
                await _search(store, url, attempt, table, missing, sink, mended, away)
        for text in mended:
            logger.warning("step %d in %s: %s; the first was: %s", attempt.step, store.url, text, first)
    if missing:
        errors = [*missing.values(), *away]
        raise next((error for error in errors if is_unreadable(error)), errors[0])
    return mended


async def _search(
    store: Store,
    url: str,
    attempt: Attempt,
    table: Table,
    missing: Lost,
    sink: Sink,
    mended: list[str],
    away: list[StoreError],
) -> None:
    """In one place, as long as anything is missing. Whatever is wrong there is no reason to give up. `away`: gets the
    errors that say nothing about the bytes there."""
    try:
        async with read.opened(url) as other:
            state = (await read.open_run(url, other)).state
            for commit in _candidates(state, attempt, url == store.url):
                if missing:
                    await _take(other, commit, attempt, table, missing, sink, mended, away)
    except (CorruptError, FormatError, NoCheckpointError, StoreError) as error:
        _note_away(error, away)
        logger.warning("step %d cannot be repaired from %s: %s", attempt.step, url, error)


def _note_away(error: CheckpointError, away: list[StoreError]) -> None:
    if isinstance(error, StoreError) and is_unreadable(error):
        away.append(error)


def _candidates(state: RunState, attempt: Attempt, here: bool) -> list[Commit]:
    same = state.commits.get(attempt) or state.held.get(attempt)
    others = [c for c in state.lineage() if c.attempt != attempt]
    others.sort(key=lambda c: abs(c.step - attempt.step))  # the nearer, the more alike
    return [*([same] if same is not None and not here else []), *others[:NEARBY]]


async def _take(
    other: Store,
    commit: Commit,
    attempt: Attempt,
    table: Table,
    missing: Lost,
    sink: Sink,
    mended: list[str],
    away: list[StoreError],
) -> None:
    """What one checkpoint has of what is missing."""
    found: list[int] = []
    try:
        async for theirs in read.tables_of(other, commit, {table.name_of(blob) for blob in missing}):
            found += await _take_of(other, theirs, table, missing, sink, away)
            if not missing:
                break
    except (CorruptError, FormatError, StoreError) as error:
        _note_away(error, away)
        logger.warning("cannot repair from step %d of %s: %s", commit.step, other.url, error)
    if found:
        names = list(dict.fromkeys(table.name_of(blob) for blob in sorted(found)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "1 damaged piece" if len(found) == 1 else f"{len(found)} damaged pieces"
        where = other.url if commit.attempt == attempt else f"{other.url}, step {commit.step}"
        mended.append(f"{what} ({', '.join(names[:3])}{more}) came from {where}")


async def _take_of(
    other: Store, theirs: Table, table: Table, missing: Lost, sink: Sink, away: list[StoreError]
) -> set[int]:
    """The blobs that were missing, and are not any more."""
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
    await fetch_blobs(other, theirs, reads, take, on_damage=lambda blobs, error: _note_away(error, away))
    for blob in done:
        del missing[blob]
    return done
