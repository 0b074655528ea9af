"""Deletes the records below the floor, so that the log stays short.

The owner of the run does it in the background, after a save. Readers start at one of the two newest SNAPSHOTs, so they
miss nothing. A slow reader whose records are deleted starts again at a newer SNAPSHOT.
"""

from __future__ import annotations

import time

from ckpt.core.log.files import Listed, record_key
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import SNAPSHOT_EVERY, Acquire
from ckpt.errors import CheckpointError, FencedError
from ckpt.events import log as logger
from ckpt.failpoints import point

GRACE_S = 60.0  # in a remote store, between a new floor and the deletion
AT_ONCE = 64  # files


class Trimmer:
    """Trims the log of a store."""

    def __init__(self) -> None:
        self._floor, self._since = 0, 0.0  # the newest floor, and when it was first listed
        self._done = False  # True if everything below it is deleted

    async def step(self, log: RunLog, owner: Acquire | None) -> None:
        """Delete the records below a new floor. An error is logged, and the next step tries again.

        owner: the owner on whose behalf this runs; None skips the check. If a record that counts is damaged, nothing is
            deleted.
        """
        newest = (log.state.next_seq - 1) // SNAPSHOT_EVERY * SNAPSHOT_EVERY
        if newest <= SNAPSHOT_EVERY or log.state.damaged or (self._done and newest == self._floor + SNAPSHOT_EVERY):
            return
        try:
            log.check_owner(owner)
            seen = await log.list_records()
            if seen.floor != self._floor:
                self._floor, self._since, self._done = seen.floor, time.monotonic(), False
            if log.store.remote and time.monotonic() < self._since + GRACE_S:
                return  # a reader elsewhere may still be reading what it listed
            if not seen.below or await _stays(log, seen):
                await _delete(log, seen)
                self._done = True
        except FencedError:
            pass  # the next save raises it
        except CheckpointError as error:
            logger.warning("%s: could not delete old log records, retrying later: %s", log.store.url, error)


async def _stays(log: RunLog, seen: Listed) -> bool:
    """Return True if both SNAPSHOTs are still intact.

    No fsync is needed. Each put syncs the folder, and many records were put after the older SNAPSHOT.
    """
    for seq in seen.snapshots:
        if log.snapshot(seq, await log.read(seq, seen.sizes[seq])) is None:
            return False
    return True


async def _delete(log: RunLog, seen: Listed) -> None:
    keys = [record_key(seq) for seq in sorted(seen.below)]
    for start in range(0, len(keys), AT_ONCE):
        await log.check_same()
        await log.store.delete_many(keys[start : start + AT_ONCE])
        point("log.trimming")
