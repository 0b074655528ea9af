"""The log stays small: what comes before the last two SNAPSHOTs is brought together in archives, and the files go.

By whoever owns the run, in the background, a step for each SNAPSHOT. Two who do it at once do no harm: an archive has a
name of its own and says what the records say; and only what an archive has is ever deleted.

    1. delete the records, and the smaller archives, that an archive had when this step began: those of the step before
    2. read the next SNAPSHOT_EVERY records, see that they follow one another, and put them in an archive
    3. put the last FAN archives of one length together in a larger one

So each record is written three times in all, a run has few files however long it is, and between the archive and the
deletion lies a whole step: a reader that is as slow, or a store that lists as late, misses nothing. Killed anywhere,
the next step goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable, Sequence

from ckpt.core.format.digest import file_digest
from ckpt.core.log.archive import Archive, chain, pack, unpack
from ckpt.core.log.files import MAX_RECORD, Listed, record_key
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import SNAPSHOT_EVERY, Acquire
from ckpt.errors import CheckpointError, CorruptError, ExistsError, FencedError
from ckpt.events import log as logger
from ckpt.failpoints import point

FAN = 16  # archives of one length that become one
LEVELS = 2  # times that this happens: the longest have 65,536 records
MAX_MERGED = 64 << 20  # bytes
GRACE_S = 60.0  # in a remote place, between the archive and the deletion: it may be listed late
BATCH = 64  # files deleted at once


class Archivist:
    """Archives the log of one place. It remembers nothing that it must not forget."""

    _log: RunLog

    def __init__(self) -> None:
        self._at = -1  # the SNAPSHOT that the last step went by
        self._known: dict[Archive, float] = {}  # since when

    async def step(self, log: RunLog, mine: Acquire | None) -> None:
        """If there is a new SNAPSHOT. Errors are no reason to stop anything else. `mine`: None asks for no owner."""
        self._log = log
        at = max(0, log.state.next_seq - 1) // SNAPSHOT_EVERY
        if at == self._at or log.state.damaged:
            return
        try:
            log.check_owner(mine)
            await self._step()
            self._at = at
        except FencedError:
            pass  # the next save says so
        except CheckpointError as error:
            logger.warning("%s: old records of the log are archived later: %s", log.store.url, error)

    async def _step(self) -> None:
        seen = await self._log.look()
        now = time.monotonic()
        self._known = {one: self._known.get(one, now) for one in seen.archives}
        await self._delete(seen)
        seen = await self._archive(seen)
        archives = [*seen.archives]
        while (parts := to_merge(chain(archives))) and (larger := await self._merge(parts)) is not None:
            archives.append(larger)

    # -- deleting --

    async def _delete(self, seen: Listed) -> None:
        """What an archive has that was there before this step."""
        since = time.monotonic() - (GRACE_S if self._log.store.remote else 0.0)
        keys: list[str] = []
        for archive in chain(one for one in seen.archives if self._known[one] <= since):
            below = [record_key(seq) for seq in seen.below if archive.first <= seq <= archive.last]
            parts = [one.key for one in seen.archives if archive.covers(one)]
            if (below or parts) and await self._stays(archive):
                keys += [*below, *parts]
        if keys:
            await self._log.check_same()
        for start in range(0, len(keys), BATCH):
            await self._log.store.delete_many(keys[start : start + BATCH])
            point("archive.deleting")

    async def _stays(self, archive: Archive) -> bool:
        """Whether it has all the records that it should have, and is durable."""
        store = self._log.store
        raw = await self._log.read_archive(archive) or b""
        if await self._count(archive, raw) != archive.count:
            return False
        if not store.remote:
            with contextlib.suppress(ExistsError):  # who has put it may have been killed before its name was synced
                await store.put(archive.key, raw, create=True)
        return True

    async def _count(self, archive: Archive, raw: bytes) -> int:
        """How many records it has, sound, and each following the one before; -1 if one is not."""
        try:
            return await asyncio.to_thread(self._follow, archive.first, unpack(raw, archive.count, MAX_RECORD))
        except CorruptError as error:
            logger.warning("%s: %s is damaged: %s", self._log.store.url, archive.key, error)
            return -1

    def _follow(self, first: int, raws: Iterable[bytes]) -> int:
        """How many. CorruptError unless each is sound, and follows the one before."""
        last, count = "", 0
        for seq, raw in enumerate(raws, first):
            record = self._log.unsealed(seq, raw)
            if last and record.get("prev") != last:
                raise CorruptError(f"log record {seq} does not follow the one before")
            last, count = file_digest(raw), count + 1
        return count

    # -- archiving --

    async def _archive(self, seen: Listed) -> Listed:
        """All that is due, SNAPSHOT_EVERY records at a time."""
        newest = (self._log.state.next_seq - 1) // SNAPSHOT_EVERY * SNAPSHOT_EVERY
        end = newest - SNAPSHOT_EVERY  # the last SNAPSHOT but one
        for seq in (end, newest) if seen.floor + SNAPSHOT_EVERY < end else ():
            if await self._log.snapshot(seq, seen) is None:
                return seen  # readers need those before
        while (first := seen.floor + 1) + SNAPSHOT_EVERY <= end:
            raws = await self._read(first, seen)
            seen = await self._log.look()
            if seen.floor >= first:
                continue  # somebody else has done it meanwhile
            archive, raw = Archive(first + SNAPSHOT_EVERY - 1, first), await asyncio.to_thread(pack, raws)
            if await self._count(archive, raw) != archive.count:
                raise CorruptError(f"records {first} to {archive.last} do not fit into an archive that readers accept")
            await self._put(archive, raw)
            point("archive.stored")
            seen = await self._log.look()
            if seen.floor < first:
                break  # it is not listed yet
        return seen

    async def _read(self, first: int, seen: Listed) -> list[bytes]:
        """CorruptError unless all are there, and the next one follows them."""
        wanted = range(first, first + SNAPSHOT_EVERY + 1)
        raws: list[bytes] = []
        for start in range(0, len(wanted), BATCH):
            some = wanted[start : start + BATCH]
            found = await asyncio.gather(*(self._log.read(seq, seen.sizes.get(seq)) for seq in some))
            raws += [raw or b"" for raw in found]
        await asyncio.to_thread(self._follow, first, raws)
        return raws[:-1]

    async def _put(self, archive: Archive, raw: bytes) -> None:
        """CorruptError if something else is there then."""
        with contextlib.suppress(ExistsError):  # of another one who archives, or our own
            await self._log.store.put(archive.key, raw, create=True)
        there = await self._log.read_archive(archive)
        if there not in (None, raw) and not await asyncio.to_thread(_alike, archive.count, there or b"", raw):
            raise CorruptError(f"{archive.key} is not what was written")

    async def _merge(self, parts: Sequence[Archive]) -> Archive | None:
        """None if one is gone: somebody else does it. Nor is one made of what is damaged: more would be lost then."""
        raws = [await self._log.read_archive(one) for one in parts]
        whole = b"".join(raw for raw in raws if raw is not None)
        larger = Archive(parts[-1].last, parts[0].first, len(whole))
        if None in raws or await self._count(larger, whole) != larger.count:
            return None
        await self._put(larger, whole)
        point("archive.merged")
        return larger


def _alike(count: int, one: bytes, other: bytes) -> bool:
    """Whether two archives have the same records: another version may pack them otherwise."""
    pairs = itertools.zip_longest(unpack(one, count, MAX_RECORD), unpack(other, count, MAX_RECORD))
    return all(mine == theirs for mine, theirs in pairs)


def to_merge(archives: Sequence[Archive]) -> Sequence[Archive]:
    """The first FAN neighbours of one length that may become one. Pure."""
    longest = SNAPSHOT_EVERY * FAN**LEVELS
    for start in range(len(archives) - FAN + 1):
        some = archives[start : start + FAN]
        alike = len({one.count for one in some}) == 1 and some[0].count < longest
        joined = all(one.last + 1 == other.first for one, other in itertools.pairwise(some))
        if alike and joined and sum(one.size for one in some) <= MAX_MERGED:
            return some
    return ()
