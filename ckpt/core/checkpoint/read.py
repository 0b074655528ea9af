"""Reads checkpoints from a store: which exist, and what each contains.

    open_run -> choose a commit -> load_manifest -> plan_reads -> fetch

Reading needs no torch: bytes go to a sink that the caller provides. Readers of a run need only this module. `blobs`
reads chunks, and `parts` reads manifests and indexes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ckpt.core.checkpoint.blobs import Sink as Sink
from ckpt.core.checkpoint.blobs import fetch as fetch
from ckpt.core.checkpoint.blobs import plan_reads as plan_reads
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.checkpoint.concurrent import run as run
from ckpt.core.checkpoint.parts import (
    MANY,
    check_sizes,
    load_index,
    load_tables,
    load_values,
    no_layout,
    read_header,
    read_part,
    sizes_of_many,
    table_of,
)
from ckpt.core.checkpoint.spelling import BEST, Which, number
from ckpt.core.format.codec import RAW
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt, Part, index_key, owner, unpress
from ckpt.core.format.rank_index import Directory
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import Table, merge
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import MARK, THE_BEST, Commit
from ckpt.errors import CorruptError, NoCheckpointError, NotFoundError, StoreError, TruncatedError, is_unreadable
from ckpt.events import log as logger
from ckpt.store import Store, open_store

if TYPE_CHECKING:
    import numpy.typing as npt

T = TypeVar("T")
Note = Callable[[str], None]
KEPT = 1 << 19  # chunks of tables that are cached for the next call


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors. `parts`: its manifests in rank order."""

    commit: Commit
    parts: tuple[Part, ...]
    table: Table

    @property
    def attempt(self) -> Attempt:
        return self.commit.attempt

    def layout(self, rank: int = 0, known: Layout | None = None) -> Layout:
        """Return the layout of a rank. `known`: a layout that is used instead of parsing if it is the same."""
        part = next(part for part in self.parts if part.rank == rank)
        same = known is not None and known.digest == part.layout_digest and known.as_json == part.layout
        layout = known if known is not None and same else Layout.from_json(part.layout)
        if layout.digest != part.layout_digest:
            raise CorruptError(f"the layout of rank {rank} at step {self.commit.step} does not match its digest")
        if len(layout.components) != len(part.values):
            raise CorruptError(f"the plain values of rank {rank} at step {self.commit.step} are not of its layout")
        return layout

    def saved(self, known: Layout | None = None) -> SavedState:
        """Return the checkpoint as one state. Raise CorruptError if this tier has only some ranks' manifests."""
        if len(self.parts) != self.commit.world:
            raise CorruptError(
                f"this tier has only {len(self.parts)} of the {self.commit.world} ranks' manifests of step "
                f"{self.commit.step}: the others are on the disks of other nodes"
            )
        return SavedState(
            [self.layout(part.rank, known) for part in self.parts], [part.values for part in self.parts], self.table
        )


async def open_run(url: str, store: Store | None = None) -> RunLog:
    """Open the log of an existing run. Raise NoCheckpointError if there is none."""
    log = RunLog(store if store is not None else open_store(url))
    try:
        await log.open()
    except BaseException:
        await log.store.aclose()
        raise
    return log


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """Open the store of a run whose log has been read already."""
    store = open_store(url)
    try:
        yield store
    finally:
        await store.aclose()


def choose(log: RunLog, step: Which = None) -> Commit:
    """Return the newest finite checkpoint, the one of a step, or the best. Raise NoCheckpointError if it is missing."""
    if step == BEST:
        return _best(log)
    history = log.state.lineage()
    sound = [commit for commit in history if commit.finite is not False]
    if number(step) is None and sound:
        return sound[0]
    for commit in [*history, *sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)]:
        if commit.step == step:
            return commit
    steps = ", ".join(str(c.step) for c in history[:20]) or "none"
    wanted = "a checkpoint" if number(step) is None else f"step {step}"
    raise NoCheckpointError(f"{log.store.url} does not have {wanted} (steps there: {steps})")


def _best(log: RunLog) -> Commit:
    state = log.state
    scored = [a for a, note in state.kept.items() if note.startswith(MARK + THE_BEST) and a in state.commits]
    if not scored:
        raise NoCheckpointError(
            f"{log.store.url} has no best checkpoint: score checkpoints with `ckpt.Best` or a callback"
        )
    return state.commits[max(scored)]


async def consists_of(store: Store, commit: Commit) -> Manifest | Directory:
    """Return the verified contents of a checkpoint. Raise CorruptError or NotFoundError if they cannot be read."""
    index = await index_or_none(store, commit)
    return index if isinstance(index, Directory) else await load_manifest(store, commit, index)


async def load_saved(
    store: Store, commit: Commit, others: Sequence[str] = (), note: Note = lambda text: None, *, keep: bool = False
) -> SavedState:
    """Return a checkpoint as one state, see `saved_by`."""
    return saved_by(await consists_of(store, commit), commit, (store.url, *others), note, keep=keep)


def saved_by(
    found: Manifest | Directory,
    commit: Commit,
    urls: Sequence[str],
    note: Note = lambda text: None,
    known: Layout | None = None,
    *,
    keep: bool = False,
) -> SavedState:
    """Return a checkpoint as one state. With a directory, further files are read when they are needed. `urls`: the
    tier, and others for files that are lost there. `note` is called with a message about these. `known`: a layout that
    is used instead of parsing if it is the same. `keep`: cache the tables of the last call for the next one."""
    if isinstance(found, Manifest):
        return found.saved(known)
    directory = found

    def values(ranks: Sequence[int]) -> dict[int, list[Any]]:
        return run(_from_any(urls, lambda place: load_values(place, commit, ranks), note)) if ranks else {}

    kept: dict[int, Table] = {}

    def tables(ranks: Sequence[int]) -> dict[int, Table]:
        nonlocal kept
        new, found = [rank for rank in ranks if rank not in kept], kept
        if new:
            found = kept | run(_from_any(urls, lambda place: load_tables(place, commit, new), note))
        found = {rank: found[rank] for rank in ranks}
        kept = found if keep and sum(table.owned for table in found.values()) <= KEPT else {}
        return found

    return SavedState.listed(directory, values, tables)


async def _from_any(
    urls: Sequence[str], load: Callable[[Store], Coroutine[Any, Any, T]], note: Callable[[str], None]
) -> T:
    """Load small files from the first tier that has them all. Their digests are known."""
    failure: CorruptError | StoreError | None = None
    for url in urls:
        try:
            async with opened(url) as store:
                found = await load(store)
        except (CorruptError, StoreError) as error:
            if failure is None or (is_unreadable(error) and not is_unreadable(failure)):
                failure = error
            continue
        if failure is not None:
            logger.warning("%s; the files were read from %s instead", failure, url)
            note(f"manifests of ranks came from {url}")
        return found
    assert failure is not None
    raise failure


async def load_manifest(store: Store, commit: Commit, index: Table | Directory | None = None) -> Manifest:
    """Read the manifests of a checkpoint, verified. Raise CorruptError or NotFoundError if one is damaged or missing.

    A damaged index is only logged, because the manifests contain the same data. `index`: if it has been read already.
    """
    try:
        index = await load_index(store, commit) if index is None else index
    except (CorruptError, NotFoundError) as error:
        logger.warning("%s; the manifests of the ranks are used instead", error)
    sizes = await sizes_of_many(store, commit.attempt, len(commit.parts))
    return await _manifest(store, commit, commit.parts, index, sizes)


async def in_turn(
    store: Store, commit: Commit, index: Table | Directory | None
) -> AsyncIterator[Coroutine[Any, Any, Manifest]]:
    """Yield coroutines that read the manifests, to be awaited in order. With many ranks, each reads some of them,
    without layouts, so that not all are in memory at once. `index`: None if it cannot be read."""
    sizes, parts = await sizes_of_many(store, commit.attempt, len(commit.parts)), commit.parts
    few = len(parts) if isinstance(index, Table) else MANY
    for start in range(0, len(parts), few):
        yield _manifest(store, commit, parts[start : start + few], index, sizes)


async def _manifest(
    store: Store,
    commit: Commit,
    wanted: Sequence[tuple[int, str]],
    index: Table | Directory | None,
    sizes: Mapping[str, int],
) -> Manifest:
    """Read some of the manifests. An index that is a table covers all of them."""
    attempt, layout_of = commit.attempt, unpress if len(wanted) == len(commit.parts) else no_layout

    async def load(row: tuple[int, str]) -> Part:
        part, _ = await read_part(store, attempt, row[0], expected=row[1], layout_of=layout_of)
        await check_sizes(store, part, sizes)
        return part

    parts = tuple(await of_each(wanted, load))
    if any(part.world != commit.world for part in parts):
        raise CorruptError(f"the manifests of step {commit.step} have another number of ranks than its record")
    table = index if isinstance(index, Table) else merge([table_of(part) for part in parts])
    packs = {pack.key: pack.size for part in parts for pack in part.packs}
    ends = np.zeros(len(table.packs), np.int64)
    np.maximum.at(ends, table.pack, table.offset + table.stored)
    for key, end in zip(table.packs, ends.tolist(), strict=True):
        if end > packs.get(key, -1):
            raise CorruptError(f"{index_key(commit.attempt)} points beyond the end of {key}")
    return Manifest(commit, parts, table)


async def index_or_none(store: Store, commit: Commit) -> Table | Directory | None:
    """Return the index, or None if it is damaged or missing. The manifests contain the same data."""
    try:
        return await load_index(store, commit)
    except (CorruptError, NotFoundError):
        return None


async def tables_of(store: Store, commit: Commit, names: Collection[str] = frozenset()) -> AsyncIterator[Table]:
    """Yield the tables of a checkpoint. With many ranks, they are read in turn, starting with ranks that have tensors
    of these names. Raise CorruptError or StoreError if it cannot be read."""
    index = await index_or_none(store, commit)
    if isinstance(index, Table):
        yield index
    elif index is None:
        async for share in in_turn(store, commit, None):
            yield (await share).table
    else:
        likely = [index.holders(number).tolist() for number, (name, _) in enumerate(index.keys) if name in names]
        async for table in tables_in_turn(store, commit, [*chain(*likely), *range(index.world)]):
            yield table


async def tables_in_turn(store: Store, commit: Commit, ranks: Iterable[int]) -> AsyncIterator[Table]:
    """Yield the tables of these ranks, a few at a time to limit memory."""
    wanted = list(dict.fromkeys(ranks))
    for start in range(0, len(wanted), MANY):
        for table in (await load_tables(store, commit, wanted[start : start + MANY])).values():
            yield table


async def packs_of(store: Store, commit: Commit) -> frozenset[str]:
    """Return the data files that a checkpoint uses, including older ones. Raise CorruptError or StoreError."""
    index = await index_or_none(store, commit)
    if isinstance(index, Directory):
        return frozenset(index.packs)
    return frozenset({key async for share in in_turn(store, commit, index) for key in (await share).table.packs})


async def saved_of(
    log: RunLog, step: Which, others: Sequence[str] = (), note: Callable[[str], None] = lambda text: None
) -> tuple[Commit, SavedState]:
    """Return a checkpoint and its state, see `load_saved`. Tables are cached."""
    commit = choose(log, step)
    async with there(log, commit):
        return commit, await load_saved(log.store, commit, others, note, keep=True)


@contextlib.asynccontextmanager
async def there(log: RunLog, commit: Commit) -> AsyncIterator[None]:
    """Explain a CorruptError: the checkpoint is damaged, or was retired during the read."""
    try:
        yield
    except (CorruptError, NotFoundError, TruncatedError) as error:
        cause = f"is damaged ({error})" if await still_live(log, commit) else "was retired while it was read"
        raise CorruptError(f"step {commit.step} {cause}: choose another, see `ckpt ls`") from None


async def still_live(log: RunLog, commit: Commit) -> bool:
    """Return True if an unreadable checkpoint should exist. A running job may have retired it."""
    return commit.attempt in (await log.refresh()).commits


# -- verification --


async def verify(
    store: Store,
    commit: Commit,
    *,
    data: bool = True,
    new: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    on_unreadable: Callable[[StoreError], None] | None = None,
) -> list[str]:
    """Read every byte of a checkpoint. Return the problems, [] if it is intact.

    data: if False, read everything except the tensors' bytes.
    new: of these, read only the bytes that were not taken from older checkpoints.
    on_unreadable: called with each error that does not prove damage. Without it, the first such error is raised.
    """
    problems: list[str] = []

    def note(error: CorruptError | StoreError) -> None:
        if not is_unreadable(error):
            problems.append(str(error))
        elif on_unreadable is None:
            raise error
        else:
            on_unreadable(cast(StoreError, error))

    async def check(work: Awaitable[T]) -> T | None:
        try:
            return await work
        except (CorruptError, StoreError) as error:
            note(error)
        return None

    index = await check(load_index(store, commit))
    async for share in in_turn(store, commit, index):
        manifest = await check(share)
        for part in manifest.parts if manifest else ():
            if isinstance(index, Table):  # otherwise the manifest was made of these
                await check(asyncio.to_thread(table_of, part))
            for pack in part.packs:
                if not new or owner(pack.key) == commit.attempt:
                    await check(read_header(store, pack))
        if manifest:
            await check(asyncio.to_thread(_check_parses, manifest, index))
        if data and manifest:
            await _verify_blobs(store, commit, manifest.table, new, on_bytes, note)
    return problems


def _check_parses(manifest: Manifest, index: Table | Directory | None) -> None:
    """Raise CorruptError unless a restore can read the layouts, names and plain values of these manifests."""
    values = {part.rank: part.values for part in manifest.parts}
    if isinstance(index, Directory):
        SavedState.listed(index, no_tables, no_tables).check_values(values)
    elif len(values) == manifest.commit.world <= MANY:
        manifest.saved().check_values(values)
    elif manifest.commit.world <= MANY:  # the other manifests are on the disks of other nodes
        for rank in values:
            manifest.layout(rank)


def no_tables(ranks: Sequence[int]) -> dict[int, Any]:
    """Replace the loader of data that a check does not read."""
    return {}


async def _verify_blobs(
    store: Store,
    commit: Commit,
    table: Table,
    new: bool,
    on_bytes: Callable[[int], None] | None,
    note: Callable[[CorruptError | StoreError], None],
) -> None:
    own = np.array([not new or owner(key) == commit.attempt for key in table.packs], np.bool_)
    blobs = _distinct(table, np.flatnonzero(own[table.pack[: table.owned]]))

    def on_damage(blobs: Sequence[int], error: CorruptError | StoreError) -> None:
        note(error)

    batches = plan_reads(table, blobs.tolist(), far=store.remote)
    await fetch(store, table, batches, None, on_bytes=on_bytes, on_damage=on_damage)


def _distinct(table: Table, blobs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Drop repeated chunks that expand the same few bytes, so that no small file makes verification very long."""
    swelling = (table.codec[blobs] != RAW) & (table.stored[blobs] * 256 < table.length[blobs])
    some = blobs[swelling]
    columns = (table.pack, table.offset, table.stored, table.codec, table.base, table.length)
    numbers = np.stack([column[some] for column in columns], 1).astype(np.int64).view(np.uint8)
    rows = np.concatenate([numbers, table.digest[some], table.stored_digest[some]], 1)
    return np.sort(np.concatenate([blobs[~swelling], some[np.unique(rows, axis=0, return_index=True)[1]]]))
