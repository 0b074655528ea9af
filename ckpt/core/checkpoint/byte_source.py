"""Sources of the plain bytes of chunks: a slot of the arena or a store. Also loads the bases of deltas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckpt.core.checkpoint.blobs import fetch, plan_reads
from ckpt.core.checkpoint.incremental import Digests, Previous
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt, owner
from ckpt.core.format.table import Table
from ckpt.errors import CorruptError, StoreError
from ckpt.events import log as logger
from ckpt.store import Store

Peek = Callable[[int], memoryview]
"""Returns the plain bytes of a chunk, by its number."""


class ByteSource(Protocol):
    """A source of the plain bytes of a snapshot."""

    @property
    def digests(self) -> Digests | None:
        """Return the digests of all chunks, None if unknown."""

    async def load(self, blobs: Sequence[int]) -> Peek:
        """Prepare the bytes of these chunks."""


@dataclass
class InMemory:
    """A slot of the arena, with all bytes in memory."""

    layout: Layout
    data: memoryview

    @property
    def digests(self) -> None:
        return None

    async def load(self, blobs: Sequence[int]) -> Peek:
        return self.peek

    def peek(self, number: int) -> memoryview:
        blob = self.layout.arrangement.blobs[number]
        return self.data[blob.offset : blob.offset + blob.length]


@dataclass
class InStore:
    """Chunks of a table in a store, by their numbers there."""

    store: Store
    table: Table

    @property
    def digests(self) -> Digests:
        return self.table.digest[: self.table.owned]

    async def load(self, blobs: Sequence[int]) -> Peek:
        """Read chunks. Raise CorruptError or StoreError if one of them cannot be read."""
        found: dict[int, memoryview] = {}
        sizes = [int(self.table.length[blob]) for blob in blobs]
        room = memoryview(bytearray(sum(sizes)))
        at = dict(zip(blobs, np.cumsum([0, *sizes]).tolist(), strict=False))

        def keep(blob: int, data: memoryview) -> None:
            view = room[at[blob] : at[blob] + len(data)]
            view[:] = data
            found[blob] = view

        await fetch(self.store, self.table, plan_reads(self.table, blobs, far=self.store.remote), keep)
        return found.__getitem__


Bases = Callable[[Previous, Sequence[int]], Awaitable[dict[int, memoryview]]]
"""Loads the plain bytes of chunks of the previous table, as far as they are readable and intact."""


async def no_bases(previous: Previous, rows: Sequence[int]) -> dict[int, memoryview]:
    return {}


def bases_in(store: Store) -> Bases:
    """Return a loader of bases from the tier itself."""

    async def load(previous: Previous, rows: Sequence[int]) -> dict[int, memoryview]:
        return await _peeked(InStore(store, previous.table), {row: row for row in rows})

    return load


def bases_near(store: Store, find: Callable[[Attempt], Awaitable[Table | None]]) -> Bases:
    """Return a loader of bases from a nearer tier, by digest. `find`: returns this rank's table there."""

    async def load(previous: Previous, rows: Sequence[int]) -> dict[int, memoryview]:
        found: dict[int, memoryview] = {}
        table = previous.table
        for attempt in {owner(table.packs[int(table.pack[row])]) for row in rows} - {None}:
            theirs = None if attempt is None else await find(attempt)
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
