"""Decides for each chunk of a checkpoint whether to take it from an older checkpoint or to store it, and the base of a
delta.

    Policy.full  decides if a checkpoint must be full
    plan_chunks  digests, previous -> the possible sources of each chunk, without I/O

A *full* checkpoint uses only its own data files. An *increment* takes unchanged chunks from the previous checkpoint in
the same tier, and may store other chunks as deltas. `previous` is this rank's manifest of the previous checkpoint.

Reading an increment never needs a long chain, because its table names each chunk from an older checkpoint with its data
file, no matter how many checkpoints have reused the chunk. The base of a delta is always stored whole.

A `ByteSource` has the plain bytes of chunks, from a slot of the arena or a store. `Bases` load the bases of deltas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from ckpt.core.checkpoint.chunks import fetch, plan_reads
from ckpt.core.format.layout import CHUNK, Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, DataFile, Manifest, owner
from ckpt.core.format.table import Table
from ckpt.core.log.records import RunState
from ckpt.errors import CorruptError, StoreError
from ckpt.events import log as logger
from ckpt.store import Store

if TYPE_CHECKING:
    import numpy.typing as npt


I64: TypeAlias = "npt.NDArray[np.int64]"
Digests: TypeAlias = "npt.NDArray[np.uint8]"

FULLS = 2  # all checkpoints are full until this many full ones exist, so one damaged chunk cannot damage all
MOSTLY_DEAD = 0.25  # if an increment needs less than this fraction of an older data file, it stores that part again
MAX_OWNERS = 32  # maximum number of checkpoints whose data files an increment may use
MAX_CHAIN = 48


@dataclass(frozen=True, slots=True)
class Policy:
    """The way in which a tier stores chunks, see `ckpt.tiers.Tier`. `cadence`: steps between checkpoints."""

    incremental: bool = True
    compression: str = "auto"
    full_every: int = 10
    cadence: int = 1

    def full(self, state: RunState, checkpoint: CheckpointId, chain: int) -> bool:
        """Return True if a checkpoint must be full. `chain`: number of increments since the last full checkpoint.

        The result depends on the step, so that all ranks write full checkpoints at the same time without communication.
        """
        if not self.incremental or sum(not c.needs for c in state.lineage() if c.checkpoint < checkpoint) < FULLS:
            return True
        number, off = divmod(checkpoint.step, self.cadence)
        return (not off and number % self.full_every == 0) or chain + 1 >= min(2 * self.full_every, MAX_CHAIN)


@dataclass(frozen=True)
class WrittenManifest:
    """A stored manifest, its SHA-256, and its chunk table. With many ranks, it has only what the index needs."""

    manifest: Manifest
    digest: str
    table: Table

    @cached_property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId.parse(self.manifest.checkpoint)

    @cached_property
    def full(self) -> CheckpointId:
        """Return the id of the last full checkpoint, which may be this one."""
        return CheckpointId.parse(self.manifest.full) if self.manifest.full else self.checkpoint

    @cached_property
    def files(self) -> dict[str, DataFile]:
        """Return the data files of this manifest, by key."""
        return {file.key: file for file in self.manifest.files}

    def rows(self, layout: Layout) -> I64:
        """Return, for every chunk of a layout in file order, the row of the same piece in this table, or -1."""
        there = {
            (s.name, s.instance, s.dtype, s.global_shape, s.offsets, s.sizes): i
            for i, s in enumerate(self.table.shards)
            if s.rank == layout.rank
        }
        found: list[I64] = []
        for tensor in (layout.tensors[i] for i in layout.arrangement.order):
            count = -(-tensor.nbytes // CHUNK)
            at = there.get((tensor.name, tensor.instance, tensor.dtype, tensor.full, tensor.at, tensor.shape))
            chunks = range(0) if at is None else self.table.chunks(at)
            lengths = [min(CHUNK, tensor.nbytes - start) for start in range(0, tensor.nbytes, CHUNK)]
            alike = self.table.length[chunks.start : chunks.stop].tolist() == lengths  # cut into the same chunks
            found.append(np.arange(chunks.start, chunks.stop) if alike else np.full(count, -1))
        return np.concatenate([np.zeros(0, np.int64), *found]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The plan for all chunks. Each array has an entry for each chunk, in file order; -1 means none.

    `taken`: the equal chunk of the previous checkpoint. `same`: an earlier chunk of this checkpoint that has the same
    bytes. `base`: the chunk of the previous table that can be the base of a delta. This chunk is stored whole, in the
    last full checkpoint, so the delta depends on no checkpoint in between.
    """

    taken: I64
    same: I64
    base: I64

    @property
    def anew(self) -> list[int]:
        """Return the chunks that must be stored."""
        return np.flatnonzero((self.taken < 0) & (self.same < 0)).tolist()


def plan_chunks(layout: Layout, digests: Digests, previous: WrittenManifest | None) -> ChunkPlan:
    """Plan all chunks. `digests`: digests of all chunks, in file order. `previous`: None for a full checkpoint."""
    count = len(digests)
    taken, base = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    if previous is not None:
        table, rows = previous.table, previous.rows(layout)
        there = np.flatnonzero(rows >= 0)
        row = rows[there]
        equal = (table.digest[row] == digests[there]).all(1)
        taken[there[equal]] = row[equal]
        # The base is the base of the previous delta, or the previous chunk itself if the full checkpoint has it whole.
        delta = table.base[row] >= table.owned
        whole = np.where(delta, table.base[row], row)
        from_full = np.array([owner(key) == previous.full for key in table.files], np.bool_)[table.file[whole]]
        useful = ~equal & (delta | from_full)
        base[there[useful]] = whole[useful]
        for key in _given_up(previous, taken):
            leaving = _uses(table, taken, table.files.index(key))
            taken[leaving] = -1
    return ChunkPlan(taken, _same(layout, digests, taken), base)


def _uses(table: Table, taken: I64, file: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the chunks that are taken from a data file, or are deltas against a chunk in it."""
    row = np.maximum(taken, 0)
    base = table.base[row]
    in_file: npt.NDArray[np.bool_] = table.file[row] == file
    in_file |= (base >= 0) & (table.file[np.maximum(base, 0)] == file)
    return in_file & (taken >= 0)


def _given_up(previous: WrittenManifest, taken: I64) -> list[str]:
    """Return the older data files to use no longer, because little of them is needed or their checkpoint is too old."""
    table = previous.table
    rows = taken[taken >= 0]
    rows = np.unique(np.concatenate([rows, table.base[rows][table.base[rows] >= 0]]))
    needed = np.bincount(table.file[rows], weights=table.stored[rows], minlength=len(table.files))
    dead = [
        key
        for key, nbytes in zip(table.files, needed.tolist(), strict=True)
        if 0 < nbytes < MOSTLY_DEAD * previous.files[key].size
        and owner(key) not in (previous.checkpoint, previous.full)
    ]
    used = {owner(key) for key, nbytes in zip(table.files, needed.tolist(), strict=True) if nbytes and key not in dead}
    owners = sorted((a for a in used if a is not None and a != previous.full), reverse=True)
    too_old = set(owners[MAX_OWNERS:])
    return dead + [key for key in table.files if owner(key) in too_old and key not in dead]


def _same(layout: Layout, digests: Digests, taken: I64) -> I64:
    """Return, for each chunk to store, the first chunk with the same bytes, or -1 if this chunk is the first one."""
    same = np.full(len(digests), -1, np.int64)
    chunks, first = layout.arrangement.chunks, dict[tuple[bytes, int], int]()
    for chunk in np.flatnonzero(taken < 0).tolist():
        key = digests[chunk].tobytes(), chunks[chunk].length
        earlier = first.setdefault(key, chunk)
        if earlier != chunk:
            same[chunk] = earlier
    return same


def kind_of(tensor: TensorSpec) -> str:
    """Return the kind of a tensor. Tensors of a kind have similar bytes, for example exp_avg of all parameters."""
    return f"{tensor.name.rpartition('.')[2]} {tensor.dtype}"


# -- the bytes of chunks --


Peek = Callable[[int], memoryview]
"""Function that returns the plain bytes of a chunk, by its number."""


class ByteSource(Protocol):
    """A source of the plain bytes of a snapshot."""

    @property
    def digests(self) -> Digests | None:
        """Return the digests of all chunks, or None if they are unknown."""

    async def load(self, chunks: Sequence[int]) -> Peek:
        """Load these chunks. Return a function that returns the bytes of each."""


@dataclass
class InMemory:
    """A slot of the arena, with all bytes in memory."""

    layout: Layout
    data: memoryview

    @property
    def digests(self) -> None:
        return None

    async def load(self, chunks: Sequence[int]) -> Peek:
        return self.peek

    def peek(self, number: int) -> memoryview:
        chunk = self.layout.arrangement.chunks[number]
        return self.data[chunk.offset : chunk.offset + chunk.length]


@dataclass
class InStore:
    """The chunks of a table in a store, by their numbers in this table."""

    store: Store
    table: Table

    @property
    def digests(self) -> Digests:
        return self.table.digest[: self.table.owned]

    async def load(self, chunks: Sequence[int]) -> Peek:
        """Read chunks. Raise CorruptError or StoreError if a chunk cannot be read."""
        found: dict[int, memoryview] = {}
        sizes = [int(self.table.length[chunk]) for chunk in chunks]
        room = memoryview(bytearray(sum(sizes)))
        at = dict(zip(chunks, np.cumsum([0, *sizes]).tolist(), strict=False))

        def keep(chunk: int, data: memoryview) -> None:
            view = room[at[chunk] : at[chunk] + len(data)]
            view[:] = data
            found[chunk] = view

        await fetch(self.store, self.table, plan_reads(self.table, chunks, far=self.store.remote), keep)
        return found.__getitem__


Bases = Callable[[WrittenManifest, Sequence[int]], Awaitable[dict[int, memoryview]]]
"""Function that loads the plain bytes of chunks, by row in the previous table. It leaves out unreadable chunks."""


async def no_bases(previous: WrittenManifest, rows: Sequence[int]) -> dict[int, memoryview]:
    return {}


def bases_in(store: Store) -> Bases:
    """Return a loader of bases from the tier itself."""

    async def load(previous: WrittenManifest, rows: Sequence[int]) -> dict[int, memoryview]:
        return await _peeked(InStore(store, previous.table), {row: row for row in rows})

    return load


def bases_near(store: Store, find: Callable[[CheckpointId], Awaitable[Table | None]]) -> Bases:
    """Return a loader that finds bases by digest in a nearer tier. `find`: returns this rank's table in that tier."""

    async def load(previous: WrittenManifest, rows: Sequence[int]) -> dict[int, memoryview]:
        found: dict[int, memoryview] = {}
        table = previous.table
        for checkpoint in {owner(table.files[int(table.file[row])]) for row in rows} - {None}:
            theirs = None if checkpoint is None else await find(checkpoint)
            if theirs is not None:
                numbers = {digest.tobytes(): n for n, digest in enumerate(theirs.digest[: theirs.owned])}
                there = {row: numbers[d] for row in rows if (d := table.digest[row].tobytes()) in numbers}
                found |= await _peeked(InStore(store, theirs), there)
        return found

    return load


async def _peeked(source: InStore, rows: dict[int, int]) -> dict[int, memoryview]:
    try:
        peek = await source.load(sorted(set(rows.values())))
    except (CorruptError, StoreError) as error:
        logger.warning(
            "could not read the bases of deltas from %s, so chunks are stored whole: %s", source.store.url, error
        )
        return {}
    return {row: peek(number) for row, number in rows.items()}
