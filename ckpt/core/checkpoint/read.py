"""Back from a store: which checkpoints there are, and what one consists of.

    open_run -> choose a commit -> load_manifest -> plan_reads -> fetch

Reading needs no torch: bytes are handed to a sink, which the caller gives. Who reads a run needs no other module: how
blobs are read is in `blobs`, of which files a checkpoint is put together in `parts`.
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
KEPT = 1 << 19  # blobs of tables that are kept for what is wanted next


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without reading tensors. `parts` are in rank order."""

    commit: Commit
    parts: tuple[Part, ...]
    table: Table

    @property
    def attempt(self) -> Attempt:
        return self.commit.attempt

    def layout(self, rank: int = 0, known: Layout | None = None) -> Layout:
        """`known`: what is taken for it if it is the same."""
        part = next(part for part in self.parts if part.rank == rank)
        same = known is not None and known.digest == part.layout_digest and known.as_json == part.layout
        layout = known if known is not None and same else Layout.from_json(part.layout)
        if layout.digest != part.layout_digest:
            raise CorruptError(f"the layout of rank {rank} at step {self.commit.step} does not match its digest")
        if len(layout.components) != len(part.values):
            raise CorruptError(f"the plain values of rank {rank} at step {self.commit.step} are not of its layout")
        return layout

    def saved(self, known: Layout | None = None) -> SavedState:
        """The checkpoint as one state. CorruptError if only some of the ranks' parts are in this place."""
        if len(self.parts) != self.commit.world:
            raise CorruptError(
                f"this tier holds {len(self.parts)} of the {self.commit.world} parts of step {self.commit.step}: the "
                "others are on the disks of other nodes"
            )
        return SavedState(
            [self.layout(part.rank, known) for part in self.parts], [part.values for part in self.parts], self.table
        )


async def open_run(url: str, store: Store | None = None) -> RunLog:
    """Open the log of a run. Raises NoCheckpointError if there is none."""
    log = RunLog(store if store is not None else open_store(url))
    try:
        await log.open()
    except BaseException:
        await log.store.aclose()
        raise
    return log


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """The store of a run whose log has been read already."""
    store = open_store(url)
    try:
        yield store
    finally:
        await store.aclose()


def choose(log: RunLog, step: Which = None) -> Commit:
    """The newest checkpoint that nobody called broken, that of a step, or the best. Else NoCheckpointError."""
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
    raise NoCheckpointError(f"{log.store.url} does not hold {wanted} (steps there: {steps})")


def _best(log: RunLog) -> Commit:
    state = log.state
    scored = [a for a, note in state.kept.items() if note.startswith(MARK + THE_BEST) and a in state.commits]
    if not scored:
        raise NoCheckpointError(
            f"no checkpoint of {log.store.url} is known as the best: `ckpt.Best` or a callback says which is"
        )
    return state.commits[max(scored)]


async def consists_of(store: Store, commit: Commit) -> Manifest | Directory:
    """What a checkpoint consists of, verified. CorruptError or NotFoundError if nobody can say."""
    index = await index_or_none(store, commit)
    return index if isinstance(index, Directory) else await load_manifest(store, commit, index)


async def load_saved(
    store: Store, commit: Commit, others: Sequence[str] = (), note: Note = lambda text: None, *, keep: bool = False
) -> SavedState:
    """A checkpoint as one state: `saved_by` what it consists of."""
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
    """A checkpoint as one state. What a directory leaves to further files is read when it is wanted.

    `urls`: the place, and others for such files that are lost there, which `note` is told. `known`: a layout that need
    not be read once more if it is that of a part. `keep`: tables that were wanted last are kept for the next.
    """
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
    """Small files, from the first place that has them all: their digests are known."""
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
            logger.warning("%s; %s has what is needed", failure, url)
            note(f"manifests of ranks came from {url}")
        return found
    assert failure is not None
    raise failure


async def load_manifest(store: Store, commit: Commit, index: Table | Directory | None = None) -> Manifest:
    """Read the parts of a checkpoint, all verified. CorruptError or NotFoundError if one is damaged or gone.

    A damaged index is no problem, because the parts have all that it has. `index`: if it has been read already.
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
    """The same, to be awaited one after the other: of many ranks some at a time, without their layouts, so that what
    all of them say need not be in memory. `index`: None if it cannot be read."""
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
    """Of some of the parts; an index that is a table is of all of them."""
    attempt, layout_of = commit.attempt, unpress if len(wanted) == len(commit.parts) else no_layout

    async def load(row: tuple[int, str]) -> Part:
        part, _ = await read_part(store, attempt, row[0], expected=row[1], layout_of=layout_of)
        await check_sizes(store, part, sizes)
        return part

    parts = tuple(await of_each(wanted, load))
    if any(part.world != commit.world for part in parts):
        raise CorruptError(f"the parts of step {commit.step} are of another number of ranks than its record says")
    table = index if isinstance(index, Table) else merge([table_of(part) for part in parts])
    packs = {pack.key: pack.size for part in parts for pack in part.packs}
    ends = np.zeros(len(table.packs), np.int64)
    np.maximum.at(ends, table.pack, table.offset + table.stored)
    for key, end in zip(table.packs, ends.tolist(), strict=True):
        if end > packs.get(key, -1):
            raise CorruptError(f"{index_key(commit.attempt)} points behind the end of {key}")
    return Manifest(commit, parts, table)


async def index_or_none(store: Store, commit: Commit) -> Table | Directory | None:
    """Return None if it is damaged or gone. The parts have all that it has."""
    try:
        return await load_index(store, commit)
    except (CorruptError, NotFoundError):
        return None


async def tables_of(store: Store, commit: Commit, names: Collection[str] = frozenset()) -> AsyncIterator[Table]:
    """All that a checkpoint stores; of many ranks one after the other, first those that have something of tensors of
    these names. CorruptError or StoreError if it cannot be read."""
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
    """Those of these ranks, of which so few are in memory that it does not matter how many there are."""
    wanted = list(dict.fromkeys(ranks))
    for start in range(0, len(wanted), MANY):
        for table in (await load_tables(store, commit, wanted[start : start + MANY])).values():
            yield table


async def packs_of(store: Store, commit: Commit) -> frozenset[str]:
    """The packs that a checkpoint uses, also those of older ones. CorruptError or StoreError if nobody can say."""
    index = await index_or_none(store, commit)
    if isinstance(index, Directory):
        return frozenset(index.packs)
    return frozenset({key async for share in in_turn(store, commit, index) for key in (await share).table.packs})


async def saved_of(
    log: RunLog, step: Which, others: Sequence[str] = (), note: Callable[[str], None] = lambda text: None
) -> tuple[Commit, SavedState]:
    """A checkpoint as one state, see `load_saved`; tables are kept."""
    commit = choose(log, step)
    async with there(log, commit):
        return commit, await load_saved(log.store, commit, others, note, keep=True)


@contextlib.asynccontextmanager
async def there(log: RunLog, commit: Commit) -> AsyncIterator[None]:
    """CorruptError says what it means that a checkpoint cannot be read."""
    try:
        yield
    except (CorruptError, NotFoundError, TruncatedError) as error:
        what = f"is damaged ({error})" if await still_live(log, commit) else "was given up while it was read"
        raise CorruptError(f"step {commit.step} {what}: choose another, see `ckpt ls`") from None


async def still_live(log: RunLog, commit: Commit) -> bool:
    """Whether what could not be read ought to be there; a running job may have retired it."""
    return commit.attempt in (await log.refresh()).commits


# -- whether it is sound --


async def verify(
    store: Store,
    commit: Commit,
    *,
    data: bool = True,
    new: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    on_unreadable: Callable[[StoreError], None] | None = None,
) -> list[str]:
    """Read every byte of a checkpoint; the problems found, none if it is sound.

    `data` False: everything but the tensors' bytes. `new`: of these, only what it did not take from older checkpoints.
    `on_unreadable`: called with each error that says nothing about the stored bytes. Without it, the first such error
    is raised.
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
            if isinstance(index, Table):  # else the manifest was made of these
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
    """Raise CorruptError unless layouts, names and plain values of these parts are what a restore can read."""
    values = {part.rank: part.values for part in manifest.parts}
    if isinstance(index, Directory):
        SavedState.listed(index, no_tables, no_tables).check_values(values)
    elif len(values) == manifest.commit.world <= MANY:
        manifest.saved().check_values(values)
    elif manifest.commit.world <= MANY:  # the other parts are on the disks of other nodes
        for rank in values:
            manifest.layout(rank)


def no_tables(ranks: Sequence[int]) -> dict[int, Any]:
    """In place of what a check does not read."""
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
    """Of blobs that say the same of the same few bytes, which become very many, one: to say it again costs nothing."""
    swelling = (table.codec[blobs] != RAW) & (table.stored[blobs] * 256 < table.length[blobs])
    some = blobs[swelling]
    columns = (table.pack, table.offset, table.stored, table.codec, table.base, table.length)
    numbers = np.stack([column[some] for column in columns], 1).astype(np.int64).view(np.uint8)
    rows = np.concatenate([numbers, table.digest[some], table.stored_digest[some]], 1)
    return np.sort(np.concatenate([blobs[~swelling], some[np.unique(rows, axis=0, return_index=True)[1]]]))
