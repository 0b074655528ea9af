"""Back from a store: which checkpoints there are, what one consists of, and its bytes, each verified before use.

    open_run -> choose a commit -> load_manifest -> plan_reads -> fetch

Reading needs no torch: bytes are handed to a sink, which the caller gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ckpt.codec import blob_digest, file_digest
from ckpt.commit import load_table, read_part
from ckpt.errors import AccessError, CorruptError, NoCheckpointError, NotFoundError, StoreError
from ckpt.events import log as logger
from ckpt.log import Commit, RunLog
from ckpt.manifest import Attempt, Part, index_key, table_key
from ckpt.plan import Layout
from ckpt.saved import Saved
from ckpt.store import PAGE, Store, open_store
from ckpt.table import Table, merge

S = TypeVar("S")
T = TypeVar("T")
AT_ONCE = 64  # parts or tables
READ, FAR_READ = 8 << 20, 16 << 20  # bytes of one read, at most (a blob is never split); and where each is a request
GAP = 64 << 10  # reading over a gap this small is cheaper than another read
PARALLEL = 8

Sink = Callable[[int, memoryview], None]
"""`sink(blob, data)`: verified bytes of a blob, by its number in the table. Called from several threads; the memory is
reused after it returns."""

OnDamage = Callable[[Sequence[int], CorruptError | StoreError], None]
"""`on_damage(blobs, error)`: why these cannot be had from here. Called from several threads."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from plain code, also where an event loop is already running (notebooks)."""
    with ThreadPoolExecutor(1, "ckpt-run") as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without reading tensors. `parts` are in rank order."""

    commit: Commit
    parts: tuple[Part, ...]
    table: Table

    @property
    def attempt(self) -> Attempt:
        return self.commit.attempt

    def layout(self, rank: int = 0) -> Layout:
        part = next(part for part in self.parts if part.rank == rank)
        layout = Layout.from_json(part.layout)
        if layout.digest != part.layout_digest:
            raise CorruptError(f"the layout of rank {rank} at step {self.commit.step} does not match its digest")
        if len(layout.components) != len(part.values):
            raise CorruptError(f"the plain values of rank {rank} at step {self.commit.step} are not of its layout")
        return layout

    def saved(self) -> Saved:
        """The checkpoint as one state. CorruptError if only some of the ranks' parts are in this place."""
        if len(self.parts) != self.commit.world:
            raise CorruptError(
                f"this place holds {len(self.parts)} of the {self.commit.world} parts of step {self.commit.step}: the "
                "others are on the disks of other nodes"
            )
        return Saved([self.layout(part.rank) for part in self.parts], [part.values for part in self.parts], self.table)


async def open_run(url: str, store: Store | None = None) -> RunLog:
    """The log of an existing run. FormatError if there is none."""
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


def choose(log: RunLog, step: int | None = None) -> Commit:
    """The newest checkpoint that nobody called broken, or that of a step. NoCheckpointError names what there is."""
    history = log.state.lineage()
    sound = [commit for commit in history if commit.finite is not False]
    if step is None and sound:
        return sound[0]
    for commit in [*history, *sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)]:
        if commit.step == step:
            return commit
    steps = ", ".join(str(c.step) for c in history[:20]) or "none"
    wanted = "a checkpoint" if step is None else f"step {step}"
    raise NoCheckpointError(f"{log.store.url} does not hold {wanted} (steps there: {steps})")


async def _some_at_a_time(items: Sequence[S], work: Callable[[S], Coroutine[Any, Any, T]]) -> list[T]:
    """There may be as many parts as a record says, and none of them there."""
    found: list[T] = []
    for start in range(0, len(items), AT_ONCE):
        found += await asyncio.gather(*(work(item) for item in items[start : start + AT_ONCE]))
    return found


async def load_manifest(store: Store, commit: Commit) -> Manifest:
    """Parts and index of a checkpoint, all verified. CorruptError or NotFoundError if one is damaged or gone.

    The index says again what the parts' tables say, so a damaged one is made up for by them.
    """
    attempt = commit.attempt
    read = await _some_at_a_time(
        commit.parts, lambda part: read_part(store, attempt, part[0], part[1], expected=part[2])
    )
    parts = tuple(part for part, _ in read)
    if any(part.world != commit.world for part in parts):
        raise CorruptError(f"the parts of step {commit.step} are of another number of ranks than its record says")
    try:
        table = await load_table(store, index_key(attempt, commit.index), commit.index)
    except (CorruptError, NotFoundError) as error:
        keys = [(table_key(attempt, part.rank, part.number), part.table) for part in parts]
        table = merge(await _some_at_a_time(keys, lambda key: load_table(store, *key)))
        logger.warning("%s; the tables of the parts are whole and used instead", error)
    packs = {pack.key: pack.size for part in parts for pack in part.packs}
    ends = np.zeros(len(table.packs), np.int64)
    np.maximum.at(ends, table.pack, table.offset + table.stored)
    for key, end in zip(table.packs, ends.tolist(), strict=True):
        if key in packs and end > packs[key]:
            raise CorruptError(f"{index_key(commit.attempt, commit.index)} points behind the end of {key}")
    return Manifest(commit, parts, table)


@dataclass(frozen=True, slots=True)
class Read:
    """One range of one pack, and the numbers of the blobs in it."""

    pack: str
    start: int
    length: int
    blobs: tuple[int, ...]


def plan_reads(table: Table, blobs: Iterable[int], *, far: bool = False) -> list[Read]:
    """Ranges that cover the given blobs, near ones joined, in the order they lie on disk. `far`: in a remote place."""
    most = FAR_READ if far else READ
    wanted = sorted((int(table.pack[blob]), int(table.offset[blob]), blob) for blob in blobs)
    reads: list[Read] = []
    group: list[int] = []
    pack = start = end = -1
    for p, offset, blob in wanted:
        last = offset + int(table.stored[blob])
        if group and (p != pack or offset > end + GAP or max(last, end) - start > most):
            reads.append(Read(table.packs[pack], start, end - start, tuple(group)))
            group = []
        if not group:
            pack, start, end = p, offset, last
        group.append(blob)
        end = max(end, last)
    if group:
        reads.append(Read(table.packs[pack], start, end - start, tuple(group)))
    return reads


async def fetch(
    store: Store,
    table: Table,
    reads: Sequence[Read],
    sink: Sink | None,
    *,
    on_bytes: Callable[[int], None] | None = None,
    on_damage: OnDamage | None = None,
) -> None:
    """Read, verify and hand over. The first damaged blob raises CorruptError before any byte of it is handed over.

    With `on_damage`, that is told what cannot be read instead, and reading goes on. Memory in use: PARALLEL reads.
    """
    queue = iter(reads)
    failed = False

    async def worker(pool: ThreadPoolExecutor) -> None:
        nonlocal failed
        loop = asyncio.get_running_loop()
        scratch = memoryview(mmap.mmap(-1, FAR_READ + 2 * PAGE))  # touched as far as it is used
        for read in queue:
            if failed:
                return
            try:
                data = await store.get(read.pack, start=read.start, length=read.length, into=scratch)
                await loop.run_in_executor(pool, _deliver, table, read, data, sink, on_damage)
            except (StoreError, CorruptError) as error:
                if on_damage is None:
                    failed = True
                    raise
                on_damage(read.blobs, error)
            if on_bytes is not None:
                on_bytes(read.length)

    with ThreadPoolExecutor(PARALLEL, "ckpt-verify") as pool:
        results = await asyncio.gather(
            *(worker(pool) for _ in range(min(PARALLEL, len(reads)))), return_exceptions=True
        )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _deliver(table: Table, read: Read, data: memoryview, sink: Sink | None, on_damage: OnDamage | None) -> None:
    for blob in read.blobs:
        at = int(table.offset[blob]) - read.start
        view = data[at : at + int(table.stored[blob])]
        if blob_digest(view) != table.digest[blob].tobytes():
            shard = int(np.searchsorted(table.starts, blob, "right")) - 1
            problem = (
                f"{table.shards[shard].name} is damaged: {len(view)} bytes at {read.start + at} of {read.pack} "
                "do not match their digest"
            )
            if on_damage is None:
                raise CorruptError(problem)
            on_damage((blob,), CorruptError(problem))
        elif sink is not None:
            sink(blob, view)


def _problem(store: Store, error: CorruptError | StoreError) -> str:
    """What is wrong with stored bytes. An error that is only about reaching them is raised instead."""
    if store.remote and (isinstance(error, AccessError) or error.retryable):
        raise error
    return str(error)


async def verify(store: Store, commit: Commit, *, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Read every byte of a checkpoint; the problems found, none if it is sound.

    StoreError if the place does not let itself be read now: that says nothing about what is in it.
    """
    try:
        manifest = await load_manifest(store, commit)
    except (CorruptError, StoreError) as error:
        return [_problem(store, error)]
    attempt, damaged = commit.attempt, list[str]()
    tables = [(table_key(attempt, part.rank, part.number), part.table) for part in manifest.parts]
    for key, digest in [(index_key(attempt, commit.index), commit.index), *tables]:
        try:
            await load_table(store, key, digest)
        except (CorruptError, StoreError) as error:
            damaged.append(_problem(store, error))
    for part in manifest.parts:
        for pack in part.packs:
            try:
                head = await store.get(pack.key, start=0, length=pack.header_size)
            except StoreError as error:
                damaged.append(_problem(store, error))
                continue
            if file_digest(head) != pack.header:
                damaged.append(f"{pack.key} is damaged: its header does not match its digest")
    reads = plan_reads(manifest.table, range(len(manifest.table.length)), far=store.remote)
    await fetch(
        store, manifest.table, reads, None, on_bytes=on_bytes, on_damage=lambda _, e: damaged.append(_problem(store, e))
    )
    return damaged
