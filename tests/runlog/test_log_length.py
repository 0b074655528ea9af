"""Tests of long logs: the newest snapshot and the records after it give the same state as the whole log."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_log import kept

from ckpt.core.checkpoint import commits as commits
from ckpt.core.format.manifest import new_nonce, unseal
from ckpt.core.log import records, run_log
from ckpt.core.log import run_log as logs
from ckpt.core.log.records import Record, expand, summary
from ckpt.core.log.run_log import RunLog, record_key
from ckpt.errors import CorruptError
from ckpt.store import ObjectInfo
from ckpt_backends.memory import MemoryStore
from logs import checkpoint, committed, new_log, reopened

EVERY = 8


class Counted(MemoryStore):
    """Counts the reads of log files."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects=objects)
        self.reads: list[str] = []

    async def get(self, key: str, **where: Any) -> memoryview:
        self.reads.append(key)
        return await super().get(key, **where)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.reads.append(f"list {prefix}")
        async for info in super().list(prefix):
            yield info


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (logs, run_log, records, run_log):
        monkeypatch.setattr(module, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr(records, "KEPT_REQUESTS", 2 * EVERY)


async def grow(log: RunLog, owner: Any, to: int) -> None:
    """Append commits (some built on older ones), aborts, retirements, KEEPs, and new owners."""
    while log.state.next_seq < to:
        step = log.state.next_seq
        one = checkpoint(owner.term, step)
        kind = step % 5
        if kind == 1:
            await log.append(
                lambda s, one=one: Record("ABORT", {"checkpoint": str(one), "reason": "x"}, f"a{one}"), owner=owner
            )
        elif kind == 2 and log.state.commits:
            old = min(log.state.commits)
            body = {"retire": [str(old)], "delete": []}
            await log.append(lambda s, body=body, n=step: Record("PLAN", body, f"p{n}"), owner=owner)
        elif kind == 3:
            await log.append(kept(one, f"k{one}"), owner=owner)
        elif kind == 4 and step % 3 == 0:
            owner = await commits.acquire(log, new_nonce())
        else:
            body = committed(one)["body"]
            if step % 2 and log.state.commits:
                body["needs"] = [str(max(log.state.commits))]
            await log.append(lambda s, body=body, one=one: Record("COMMIT", body, f"commit:{one}"), owner=owner)


def record_types(store: MemoryStore) -> dict[int, str]:
    keys = sorted(key for key in store.objects if key.startswith("log/"))
    return {seq: unseal(store.objects[key], key)["type"] for seq, key in enumerate(keys)}


@pytest.mark.parametrize("damage", ["flip", "missing", "other"])
def test_damaged_snapshot_is_skipped_and_reported(damage: str) -> None:
    """The previous one is used, the damage is reported, and no record of the log is lost."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        await grow(log, mine, 3 * EVERY + 2)
        key = record_key(3 * EVERY)
        if damage == "flip":
            raw = bytearray(store.objects[key])
            raw[len(raw) // 2] ^= 1
            store.objects[key] = bytes(raw)
        elif damage == "missing":
            del store.objects[key]
        else:
            store.objects[key] = store.objects[record_key(2 * EVERY)]
        found = await reopened(store)
        assert found.state.damaged == [3 * EVERY]
        assert found.state.commits == log.state.commits and found.state.acquires == log.state.acquires

    asyncio.run(scenario())


def test_contradictory_snapshot_is_damage() -> None:
    """A reader of the earlier records compares; a run with such a record is never cleaned up."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        await grow(log, mine, EVERY)
        body = summary(log.state) | {"commits": []}
        assert body["commits"] != summary(log.state)["commits"]
        await store.put(record_key(EVERY), log._sealed(Record("SNAPSHOT", body, "snapshot"), log.state), create=True)
        await log.refresh()
        assert log.state.damaged == [EVERY] and log.state.commits

    asyncio.run(scenario())


def test_damaged_log_gets_no_snapshot() -> None:
    """Damage may be temporary, so an ordinary record takes its place; readers go further back."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        await grow(log, mine, EVERY - 1)
        sound = store.objects.pop(record_key(2))
        blind = await reopened(store)
        assert blind.state.damaged == [2]
        await grow(blind, mine, 2 * EVERY + 2)
        assert "SNAPSHOT" not in record_types(store).values()
        store.objects[record_key(2)] = sound
        assert (await reopened(store)).state.damaged == []

    asyncio.run(scenario())


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_impossible_snapshots_raise_corrupt_error(data: st.DataObject) -> None:

    async def grown() -> dict[str, Any]:
        log, mine = await new_log(MemoryStore())
        await grow(log, mine, 2 * EVERY + 3)
        return summary(log.state)

    body = json.loads(json.dumps(asyncio.run(grown())))
    odd = [None, True, -1, 1.5, float("inf"), "", "x", [], [1], {}, {"x": 1}, "1.00000000-1", 10**30]
    place, keys = body, list(body)
    for _ in range(data.draw(st.integers(0, 3))):
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key]:
            break
        place = place[key]
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    place[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(odd))
    with contextlib.suppress(CorruptError):
        expand(body)
