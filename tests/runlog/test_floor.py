"""Tests of the log's floor: records below the older of the two newest SNAPSHOTs are deleted and never count."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_log import kept
from test_log_length import EVERY, Counted, grow, short

from ckpt.core.checkpoint import commits as commits
from ckpt.core.format.manifest import new_nonce
from ckpt.core.log import run_log
from ckpt.core.log.records import Record, summary
from ckpt.core.log.run_log import RunLog, Trimmer, record_key
from ckpt.errors import FencedError, OutcomeUnknownError, StoreError
from ckpt_backends.memory import MemoryStore
from logs import checkpoint, new_log, reopened

__all__ = ["short"]  # SNAPSHOTs at every eighth record


def numbers(store: MemoryStore) -> list[int]:
    return sorted(int(key[4:16]) for key in store.objects if key.startswith("log/"))


async def long_log(store: MemoryStore, count: int) -> tuple[RunLog, Any]:
    """Create a log with this many records, none deleted; return it with its owner."""
    log, mine = await new_log(store)
    await grow(log, mine, count)
    return log, log.state.acquires[-1]


def damage(store: MemoryStore, seq: int) -> None:
    raw = bytearray(store.objects[record_key(seq)])
    raw[len(raw) // 2] ^= 1
    store.objects[record_key(seq)] = bytes(raw)


def test_trimmed_log_keeps_few_records() -> None:
    """However long the log is, at most two intervals of records remain, and opening reads no more."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        trimmer = Trimmer()
        while log.state.next_seq < 30 * EVERY + EVERY:
            await grow(log, mine, log.state.next_seq + 1)
            mine = log.state.acquires[-1]
            await trimmer.step(log, mine)
            newest = (log.state.next_seq - 1) // EVERY * EVERY
            assert numbers(store) == list(range(max(0, newest - EVERY), log.state.next_seq))
        counted = Counted(store.objects)
        assert summary((await reopened(counted)).state) == summary(log.state)
        assert sum(not key.startswith("list") for key in counted.reads) == 1 + 2 + (EVERY - 1)  # with FORMAT.json
        assert summary((whole := await opened_whole(store)).state) == summary(log.state) and not whole.state.damaged

    asyncio.run(scenario())


async def opened_whole(store: MemoryStore) -> RunLog:
    log = RunLog(store, whole=True)
    await log.open()
    return log


@pytest.mark.parametrize(("which", "first"), [((4,), 3 * EVERY), ((5,), 0), ((4, 5), 0)])
def test_damaged_snapshot_does_not_set_floor(which: tuple[int, ...], first: int) -> None:
    """Only intact SNAPSHOTs determine the floor. If the newest is damaged, nothing is deleted."""

    async def scenario() -> None:
        store = MemoryStore()
        log, _ = await long_log(store, 5 * EVERY + 3)
        for number in which:
            damage(store, number * EVERY)
        fresh = await reopened(store)
        assert fresh.state.commits == log.state.commits
        await Trimmer().step(fresh, None)
        assert numbers(store) == list(range(first, 5 * EVERY + 3))

    asyncio.run(scenario())


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "control"])
def test_log_keeps_all_commits_that_follow_the_loss_of_both_snapshots(damaged: bool) -> None:
    """More than two intervals of records follow. None of them is a SNAPSHOT, so the first of them must still count."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await long_log(store, 5 * EVERY + 3)
        await Trimmer().step(log, mine)
        for number in (4, 5) if damaged else ():
            damage(store, number * EVERY)
        blind = await reopened(store)
        await grow(blind, blind.state.acquires[-1], 9 * EVERY + 3)
        await Trimmer().step(blind, None)
        found = (await reopened(store)).state
        assert found.commits == blind.state.commits and found.acquires == blind.state.acquires
        assert numbers(store)[0] == (4 if damaged else 8) * EVERY

    asyncio.run(scenario())


def test_whole_log_read_finds_older_damage() -> None:
    """A reader that starts at the newest SNAPSHOT does not detect it, but `verify` must."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await long_log(store, 6 * EVERY + 3)
        await Trimmer().step(log, mine)
        for seq in (5 * EVERY, 5 * EVERY + 3):
            damage(store, seq)
        del store.objects[record_key(5 * EVERY + 5)]
        assert (await reopened(store)).state.damaged == []
        assert (await opened_whole(store)).state.damaged == [5 * EVERY, 5 * EVERY + 3, 5 * EVERY + 5]

    asyncio.run(scenario())


def test_inactive_reader_restarts_despite_damaged_snapshot() -> None:
    """Deleted records are not damage. A record put in place of a deleted one never counts as recorded."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await long_log(store, EVERY + 2)
        away, late = await reopened(store), await reopened(store)
        await grow(log, mine, 6 * EVERY + 3)
        await Trimmer().step(log, None)
        damage(store, 5 * EVERY)
        await away.refresh()
        assert summary(away.state) == summary(log.state) and not away.state.damaged

        async def suspended() -> Any:
            return late.state  # what it knew before

        async def put(key: str, *args: Any, **named: Any) -> None:
            late._refresh = real  # type: ignore[method-assign]
            await MemoryStore.put(store, key, *args, **named)

        real, late._refresh, store.put = late._refresh, suspended, put  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknownError):
            await late.append(kept(checkpoint(1, 1), "late"), owner=None)
        assert checkpoint(1, 1) not in (await reopened(store)).state.kept

    asyncio.run(scenario())


def test_next_owner_fences_without_both_snapshots() -> None:
    """The remaining records contain the term, although no ACQUIRE remains."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        for _ in range(9):
            mine = await commits.acquire(log, new_nonce())
        while log.state.next_seq < 6 * EVERY + 3:
            step = log.state.next_seq
            await log.append(kept(checkpoint(mine.term, step), f"kept{step}"), owner=mine)
        await Trimmer().step(log, mine)
        for number in (5, 6):
            damage(store, number * EVERY)
        blind = await reopened(store)
        assert not blind.state.acquires
        assert (await commits.acquire(blind, new_nonce())).term > mine.term
        with pytest.raises(FencedError):
            await log.append(kept(checkpoint(1, 1), "late"), owner=mine)

    asyncio.run(scenario())


def test_unreadable_older_snapshot_is_skipped() -> None:
    """After a bad sector, the newest SNAPSHOT is enough to open the run. Control: the newest must be readable."""

    class Sector(MemoryStore):
        bad = ""

        async def get(self, key: str, **where: Any) -> memoryview:
            if key == self.bad:
                raise StoreError("Input/output error", retryable=False)
            return await super().get(key, **where)

    async def scenario() -> None:
        base = MemoryStore()
        log, _ = await long_log(base, 4 * EVERY + 2)
        store = Sector(objects=base.objects)
        store.bad = record_key(3 * EVERY)
        assert summary((await reopened(store)).state) == summary(log.state)
        store.bad = record_key(4 * EVERY)
        with pytest.raises(StoreError, match="Input/output"):
            await reopened(store)

    asyncio.run(scenario())


def test_bucket_keeps_old_records_temporarily(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may have listed them shortly before."""

    class Remote(MemoryStore):
        remote = True

    async def scenario() -> None:
        store, now = Remote(), [100.0]
        monkeypatch.setattr(run_log.time, "monotonic", lambda: now[0])
        log, mine = await long_log(store, 4 * EVERY + 1)
        trimmer = Trimmer()
        for seconds, first in ((0, 0), (59, 0), (2, 3 * EVERY)):
            now[0] += seconds
            await trimmer.step(log, mine)
            assert numbers(store)[0] == first

    asyncio.run(scenario())


def test_foreign_files_do_not_raise_the_floor() -> None:
    """These are names far above the log, copies of SNAPSHOTs under other names, and records of another run."""

    async def scenario() -> None:
        store = MemoryStore()
        log, _ = await long_log(store, 3 * EVERY + 2)
        other, _ = await long_log(MemoryStore(), 9 * EVERY + 1)
        store.objects[record_key(10**9 * EVERY)] = b"{}"
        store.objects[record_key(8 * EVERY)] = store.objects[record_key(3 * EVERY)]
        assert isinstance(other.store, MemoryStore)
        store.objects[record_key(9 * EVERY)] = other.store.objects[record_key(9 * EVERY)]
        found = await reopened(store)
        assert found.state.commits == log.state.commits and found.state.acquires == log.state.acquires
        assert found.state.damaged and (await found.list_records()).floor == 2 * EVERY
        end = Record("ABORT", {"checkpoint": "000000007.1-00000000", "reason": ""}, "x")
        await found.append(lambda state: end, owner=None)

    asyncio.run(scenario())
