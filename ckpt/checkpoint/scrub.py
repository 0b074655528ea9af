"""Reads what is stored again, slowly, so that bytes that go bad are noticed while there is something to mend them with.

What is damaged is said in the log, and is not built on any more: the next checkpoint stores those blobs anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ckpt.checkpoint.blobs import Batch, fetch, plan_reads
from ckpt.checkpoint.commit import Role
from ckpt.checkpoint.parts import load_part
from ckpt.checkpoint.write import WrittenPart
from ckpt.errors import CheckpointError, CorruptError, NotFoundError, StoreError, TruncatedError, is_unreadable
from ckpt.events import log as logger
from ckpt.format.manifest import Attempt
from ckpt.format.table import Table
from ckpt.runlog.log import RunLog
from ckpt.runlog.records import Commit

ROUND_S = 6 * 3600.0  # after which what was read is read once more
PAUSE_S = 30.0  # between two looks at what is new


@dataclass
class Scrub:
    """One place, slowly. `bytes_per_s`: at most; `role`: which ranks' parts are ours; `busy`: not now, please.

    `found`: told of the pack and offset of each damaged blob; `distrust`: of a checkpoint of which more than blobs is
    damaged; `say`: told it in words. A round reads each stored range once, whoever uses it, and a base with each delta.
    """

    log: RunLog
    bytes_per_s: float
    role: Callable[[], Role]
    busy: Callable[[], bool]
    found: Callable[[tuple[str, int]], None]
    distrust: Callable[[Attempt], None] = lambda attempt: None
    say: Callable[[str], None] = lambda text: None
    rounds: int = 0
    nbytes: int = 0
    damaged: int = 0
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _done: set[tuple[Attempt, int, int]] = field(default_factory=set)  # parts of which all has been read

    async def run(self) -> None:
        """Until it is cancelled. Errors of the place are no reason to stop: it is tried again later."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(PAUSE_S)
            if time.monotonic() - began > ROUND_S:
                self._seen.clear()
                self._done.clear()
                began = time.monotonic()
            try:
                await self.round()
            except CheckpointError as error:
                logger.info("%s is not read again now: %s", self.log.store.url, error)

    async def round(self) -> bool:
        """Read what has not been read in this round; whether there was anything."""
        fresh = False
        for commit in self.log.state.lineage():
            fresh |= await self._one(commit)
        self.rounds += 1
        return fresh

    async def _one(self, commit: Commit) -> bool:
        role = self.role()
        mine = [part for i, part in enumerate(commit.parts) if i % max(1, len(role.ranks)) == role.place]
        fresh = False
        for rank, number, digest in mine:
            if (commit.attempt, rank, number) in self._done:
                continue
            try:
                written = await load_part(self.log.store, commit.attempt, rank, number, expected=digest)
            except (CorruptError, NotFoundError, TruncatedError) as error:
                if commit.attempt in (await self.log.refresh()).commits:
                    self.distrust(commit.attempt)
                    self._say(commit, str(error))
                continue
            fresh |= await self._part(commit, written)
            self._done.add((commit.attempt, rank, number))
        return fresh

    async def _part(self, commit: Commit, written: WrittenPart) -> bool:
        table = written.table
        # What has no bytes of its own is never seen by itself, and must not count as new for ever.
        new = [blob for blob in range(table.owned) if table.stored[blob] and table.place(blob) not in self._seen]
        for batch in _batches(table, new, self.log.store.remote):
            while self.busy():
                await asyncio.sleep(0.1)
            if commit.attempt not in self.log.state.commits:
                return True  # retired meanwhile
            lost: dict[int, CorruptError | StoreError] = {}
            await fetch(
                self.log.store,
                table,
                [batch],
                None,
                on_damage=lambda blobs, error, lost=lost: lost.update(dict.fromkeys(blobs, error)),  # type: ignore[misc]
            )
            self._seen.update(table.place(blob) for blob in batch.blobs)
            self.nbytes += batch.nbytes
            for blob, error in lost.items():
                await self._lost(commit, table, blob, error)
            await asyncio.sleep(batch.nbytes / self.bytes_per_s)
        return bool(new)

    async def _lost(self, commit: Commit, table: Table, blob: int, error: CorruptError | StoreError) -> None:
        if is_unreadable(error):
            return
        if commit.attempt not in (await self.log.refresh()).commits:
            return
        for one in (blob, *table.needed(blob)):
            if table.stored[one]:
                self.found(table.place(one))
        self._say(commit, str(error))

    def _say(self, commit: Commit, problem: str) -> None:
        self.damaged += 1
        url = self.log.store.url
        text = (
            f"step {commit.step} in {url} has gone bad: {problem}. The next checkpoint does not build on it; `ckpt "
            f"repair {url}`, with --from another location if there is one, may mend it"
        )
        logger.warning("%s", text)
        self.say(text)


def _batches(table: Table, blobs: list[int], remote: bool) -> Iterator[Batch]:
    """What has bytes of its own; the rest is seen with what it is derived from."""
    yield from plan_reads(table, np.array(blobs, np.int64)[table.stored[blobs] > 0].tolist(), far=remote)
