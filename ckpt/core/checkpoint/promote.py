"""Copies a checkpoint's files from one store to another, byte for byte, and verifies each chunk.

    pending -> copy_part of every rank -> commit

Names are the same in all tiers, so files copied before a crash are found and not copied again. Nothing counts in the
target before its log records it.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpt.core.checkpoint import steady
from ckpt.core.checkpoint.parts import load_part
from ckpt.core.checkpoint.write import CHUNK, WrittenPart, upload_from
from ckpt.core.format.digest import blob_digest, file_digest
from ckpt.core.format.manifest import MAX_JSON, Attempt, PackInfo, manifest_key
from ckpt.core.format.table import Table
from ckpt.core.log.log import RunLog
from ckpt.core.log.log import Commit, RunState
from ckpt.errors import CorruptError, ExistsError, NotFoundError
from ckpt.store import PAGE, Store, get_small

if TYPE_CHECKING:
    import numpy.typing as npt

BACKLOG = 3  # checkpoints that a new job attempt still copies to another tier

OnBytes = Callable[[int], None] | None


def pending(near: RunState, far: RunState, every: int, *, before: int) -> list[Commit]:
    """Return the checkpoints that are scheduled for another tier and are not there yet, newest first. Pure.

    Only checkpoints of earlier terms count, because these are the same on all ranks. Of these, only the last few that
    are newer than everything in the other tier are returned: after a long outage of a bucket, a run does not copy all
    that it missed.
    """
    history = [c for c in near.lineage() if c.attempt.epoch < before]
    there = [a for a in far.commits if a.epoch < before and a in {c.attempt for c in history}]
    newest = max(there, default=None)
    due = [c for c in history if c.step % every == 0 and (newest is None or c.attempt > newest)]
    return [c for c in due[:BACKLOG] if not far.ended(c.attempt)]


async def copy_part(
    source: Store,
    target: Store,
    attempt: Attempt,
    rank: int,
    *,
    expected: str | None = None,
    used: Set[str] = frozenset(),
    on_bytes: OnBytes = None,
) -> WrittenPart:
    """Copy one rank's manifest and the data files that it uses, including those of older checkpoints.

    Complete files in the target stay. Raise CorruptError if the source is damaged, or if a data file that the target
    uses has other bytes.

    expected: the digest of the manifest, if known.
    used: data files that checkpoints in the target use.
    """
    written = await load_part(source, attempt, rank, expected=expected)
    key = manifest_key(attempt, rank)
    if await _holds(target, key, written.digest):
        if on_bytes is not None:
            on_bytes(sum(pack.size for pack in written.part.packs))
        return written  # the manifest is copied last, so its data files are complete
    for pack in written.part.packs:
        await _copy_pack(source, target, pack, written.table, pack.key in used, on_bytes)
    await _put_once(target, key, await steady.get(source, key, limit=MAX_JSON))
    return written


async def _holds(store: Store, key: str, digest: str) -> bool:
    try:
        return file_digest(await get_small(store, key, MAX_JSON)) == digest
    except (NotFoundError, CorruptError):
        return False


async def _put_once(target: Store, key: str, data: memoryview) -> None:
    try:
        await target.put(key, data, create=True)
    except ExistsError:
        if not await _holds(target, key, file_digest(data)):
            raise


async def _copy_pack(source: Store, target: Store, pack: PackInfo, table: Table, used: bool, on_bytes: OnBytes) -> None:
    try:
        there = (await target.head(pack.key)).size
    except NotFoundError:
        there = -1
    if used and there >= 0 and (there != pack.size or not await _same(target, pack, table)):
        raise CorruptError(
            f"{target.url} has a damaged or different {pack.key} in use: repair it with `ckpt repair`, or copy "
            "to a new location"
        )
    if there == pack.size and (target.remote or used):
        if on_bytes is not None:
            on_bytes(pack.size)
        return  # objects appear whole or not at all; a file has its full size before its first byte
    if there >= 0:
        await target.delete(pack.key)
    await upload_from(target, pack.key, pack.size, VerifiedRanges(source, pack, table).read, on_bytes)


async def _same(store: Store, pack: PackInfo, table: Table) -> bool:
    """Return True if a data file matches its entries in a table."""
    sound = VerifiedRanges(store, pack, table)
    try:
        for offset in range(0, pack.size, CHUNK):
            await sound.read(offset, min(CHUNK, pack.size - offset))
    except CorruptError:
        return False
    return True


class VerifiedRanges:
    """Reads ranges of a data file, and verifies every chunk that they touch."""

    def __init__(self, source: Store, pack: PackInfo, table: Table) -> None:
        self._source, self._pack = source, pack
        in_pack = table.pack == table.packs.index(pack.key) if pack.key in table.packs else np.zeros(0, np.bool_)
        order = np.argsort(table.offset[in_pack], kind="stable")
        self._starts: npt.NDArray[np.int64] = table.offset[in_pack][order]
        self._stops: npt.NDArray[np.int64] = self._starts + table.stored[in_pack][order]
        self._digests: list[bytes] = [bytes(digest) for digest in table.stored_digest[in_pack][order]]

    async def read(self, offset: int, length: int) -> memoryview:
        """Read a range. Raise CorruptError if anything in it is damaged."""
        first = int(np.searchsorted(self._stops, offset, "right"))
        last = int(np.searchsorted(self._starts, offset + length, "left"))
        start, stop = offset, offset + length
        if last > first:
            start, stop = min(start, int(self._starts[first])), max(stop, int(self._stops[last - 1]))
        head = self._pack.header_size if offset < self._pack.header_size else 0
        if head:
            start, stop = 0, max(stop, head)
        room = memoryview(mmap.mmap(-1, stop - start + 2 * PAGE))
        data = await steady.get(self._source, self._pack.key, start=start, length=stop - start, into=room)
        await asyncio.to_thread(self._check, data, start, first, last, head)
        return data[offset - start : offset - start + length]

    def _check(self, data: memoryview, start: int, first: int, last: int, head: int) -> None:
        if head and file_digest(data[:head]) != self._pack.header:
            raise CorruptError(f"{self._pack.key} is damaged: its header does not match its digest")
        for i in range(first, last):
            low, high = int(self._starts[i]), int(self._stops[i])
            if blob_digest(data[low - start : high - start]) != self._digests[i]:
                raise CorruptError(
                    f"{self._pack.key} is damaged: {high - low} bytes at {low} do not match their digest"
                )


@dataclass(frozen=True, slots=True)
class Size:
    """The number of files of a checkpoint, and their bytes."""

    files: int
    nbytes: int


async def measure(log: RunLog, commit: Commit, counted: set[str] | None = None) -> Size:
    """Return how much must be copied. Raise CorruptError or NotFoundError if the checkpoint is incomplete.

    `counted`: data files that another checkpoint copies already. Those of this checkpoint are added.
    """
    packs: dict[str, int] = {}
    for rank, digest in commit.parts:  # one at a time, because there may be thousands
        written = await load_part(log.store, commit.attempt, rank, expected=digest)
        packs |= {pack.key: pack.size for pack in written.part.packs}
    if counted is not None:
        packs = {key: size for key, size in packs.items() if key not in counted}
        counted.update(packs)
    return Size(len(packs) + len(commit.parts) + 1, sum(packs.values()))
