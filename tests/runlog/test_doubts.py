"""What a log says of pieces that somebody has found damaged."""

from __future__ import annotations

import asyncio

from ckpt.core.checkpoint import commit, incremental
from ckpt.core.format.manifest import new_nonce
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import expand, summary
from ckpt_backends.memory import MemoryStore


def test_doubts_are_known_to_all_writers() -> None:
    """What one writer has found damaged is in the log, survives a SNAPSHOT, and is said once."""

    async def scenario() -> None:
        store = MemoryStore("memory://run")
        await commit.create_run(store)
        log, other = RunLog(store), RunLog(store)
        await log.open()
        mine = await commit.acquire(log, new_nonce())
        attempt = incremental.Attempt(mine.epoch, 3, mine.nonce)
        for _ in range(2):
            await commit.doubt(log, mine, attempt, {("packs/a", 5), ("packs/b", 7)})
        await commit.doubt(log, mine, attempt, set())
        await other.open()
        assert other.state.doubts == {("packs/a", 5), ("packs/b", 7)} and other.state.next_seq == 2
        assert expand(summary(other.state)).doubts == other.state.doubts
        old = {key: value for key, value in summary(other.state).items() if key != "doubts"}
        assert expand(old).doubts == set(), "a snapshot of before there were any"

    asyncio.run(scenario())
