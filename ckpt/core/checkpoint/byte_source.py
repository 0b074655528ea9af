"""Where the plain bytes of blobs come from: a slot of the arena, or what is stored somewhere; and those of bases."""

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
"""The plain bytes of a blob, by its number."""


class ByteSource(Protocol):
    """Where the plain bytes of a snapshot come from."""

    @property
    def digests(self) -> Digests | None:
        """Of all blobs, if they are known."""

    async def load(self, blobs: Sequence[int]) -> Peek:
        """Have the bytes of these ready."""


@dataclass
class InMemory:
    """A slot of the arena: everything is there."""

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
    """Blobs of a table, in some store, by their numbers there."""

    store: Store
    table: Table

    @property
    def digests(self) -> Digests:
        return self.table.digest[: self.table.owned]

    async def load(self, blobs: Sequence[int]) -> Peek:
        """CorruptError or StoreError if any of them cannot be had."""
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
"""The plain bytes of blobs of the previous table, as far as they can be had and are sound."""


async def no_bases(previous: Previous, rows: Sequence[int]) -> dict[int, memoryview]:
    return {}


def bases_in(store: Store) -> Bases:
    """Bases read from the place itself."""

    async def load(previous: Previous, rows: Sequence[int]) -> dict[int, memoryview]:
        return await _peeked(InStore(store, previous.table), {row: row for row in rows})

    return load


def bases_near(store: Store, find: Callable[[Attempt], Awaitable[Table | None]]) -> Bases:
    """Bases read, by their digests, from a nearer place. `find`: this rank's table there of a checkpoint."""

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
        logger.warning("no deltas against what is in %s: %s", source.store.url, error)
        return {}
    return {row: peek(number) for row, number in rows.items()}
