"""The run log stays small: old records lie together in archives, and nobody ever reads a gap, or something older."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_log import kept
from test_log_length import grow

from ckpt.core.checkpoint import commit as commits
from ckpt.core.format.manifest import Attempt, new_nonce
from ckpt.core.log import archiving, records
from ckpt.core.log import log as logs
from ckpt.core.log.archive import Archive, archive_of, chain, pack, unpack
from ckpt.core.log.archiving import Archivist, to_merge
from ckpt.core.log.attempts import Attempts
from ckpt.core.log.log import RunLog, record_key
from ckpt.core.log.records import RunState, expand, summary
from ckpt.errors import CorruptError, FencedError, StoreError
from ckpt.store import ObjectInfo
from ckpt_backends.memory import MemoryStore
from logs import attempt, new_log, reopened

EVERY, FAN = 8, 3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (logs, records, archiving):
        monkeypatch.setattr(module, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr(archiving, "FAN", FAN)


class Patient(MemoryStore):
    """Everybody else may do something before each request. `fail`: how many requests are done before one is not."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects=objects)
        self.fail: int | None = None

    async def turn(self) -> None:
        await asyncio.sleep(0)
        if self.fail is not None:
            self.fail -= 1
            if self.fail < 0:
                raise Killed

    async def put(self, *args: Any, **named: Any) -> None:
        await self.turn()
        await super().put(*args, **named)

    async def get(self, *args: Any, **named: Any) -> memoryview:
        await self.turn()
        return await super().get(*args, **named)

    async def delete(self, key: str) -> None:
        await self.turn()
        await super().delete(key)

    async def list(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self.turn()
        async for info in super().list(prefix, after=after):
            yield info


class Killed(BaseException):
    """The process ends here."""


def files(store: MemoryStore) -> tuple[list[int], list[Archive]]:
    """The records that are files of their own, and the archives."""
    sizes = [ObjectInfo(key, len(raw)) for key, raw in sorted(store.objects.items()) if key.startswith("log/")]
    archives = [one for info in sizes if (one := archive_of(info)) is not None]
    return [int(info.key[4:16]) for info in sizes if info.key.endswith(".json")], archives


async def history(store: MemoryStore) -> list[bytes]:
    """All records, as a log says them that is read from the beginning on."""
    found: list[bytes] = []

    class All(RunLog):
        def _apply(self, seq: int, raw: bytes | None) -> None:
            assert seq == len(found) and raw is not None
            found.append(raw)
            super()._apply(seq, raw)

    log = All(store, whole=True)
    await log.open()
    assert not log.state.damaged
    return found


async def long_log(store: MemoryStore, count: int, *, archive: bool = True) -> tuple[RunLog, Any, list[bytes]]:
    """A log of so many records, archived on the way; and what the records are."""
    log, mine = await new_log(store)
    archivist, plain = Archivist(), dict[int, bytes]()
    while log.state.next_seq < count:
        await grow(log, mine, log.state.next_seq + 1)
        mine = log.state.acquires[-1]
        plain |= {int(key[4:16]): raw for key, raw in store.objects.items() if key.startswith("log/0")}
        if archive:
            await archivist.step(log, mine)
    return log, mine, [plain[seq] for seq in sorted(plain)]


def test_a_long_log_has_few_files() -> None:
    """At most three SNAPSHOT_EVERYs of records, and archives of which FAN of one length become one, twice. Whoever
    opens it, jumps, or reads everything sees what there was, byte for byte."""

    async def scenario() -> None:
        store = MemoryStore()
        count = EVERY * (FAN**2 * 3 + FAN * 2 + 2 + 1) + 3
        log, mine, plain = await long_log(store, count)
        left, archives = files(store)
        assert len(left) < 3 * EVERY and left == list(range(left[0], log.state.next_seq))
        assert [one.count for one in chain(archives)] == 3 * [EVERY * FAN**2] + 2 * [EVERY * FAN] + 2 * [EVERY]
        assert len(archives) <= len(chain(archives)) + FAN
        assert await history(store) == plain
        assert summary((await reopened(store)).state) == summary(log.state)
        await grow(log, mine, log.state.next_seq + 3)
        assert summary((await reopened(store)).state) == summary(log.state)

    asyncio.run(scenario())


def test_each_record_is_written_three_times_at_most() -> None:
    """The work is linear: a byte of a record goes to an archive of each length once."""

    class Counting(MemoryStore):
        archived = 0

        async def put(self, key: str, data: Any, *, create: bool = False) -> None:
            new = key not in self.objects
            await super().put(key, data, create=create)
            if new and (archive := archive_of(ObjectInfo(key, len(data)))) is not None:
                self.archived += archive.count

    async def scenario() -> None:
        store = Counting()
        log, _, _ = await long_log(store, EVERY * FAN**2 * 3)
        assert store.archived <= 3 * log.state.next_seq

    asyncio.run(scenario())


def test_a_late_writer_is_told_that_his_record_does_not_count() -> None:
    """It was suspended when it knew the end of the log; when it goes on, that number is archived and its place free.
    The record that it puts there counts for nobody, and it learns who owns the run."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        await grow(log, mine, 5)
        late, old = await reopened(store), log.state.acquires[-1]
        at = late.state.next_seq
        waiting, go = asyncio.Event(), asyncio.Event()

        class Suspended(MemoryStore):
            async def put(self, key: str, data: Any, *, create: bool = False) -> None:
                waiting.set()
                await go.wait()
                await super().put(key, data, create=create)

        late.store = Suspended(objects=store.objects)
        late_append = asyncio.create_task(late.append(kept(attempt(1, 999), "late"), owner=old))
        await waiting.wait()
        mine = await commits.acquire(log, new_nonce())
        archivist = Archivist()
        while at in files(store)[0]:
            await grow(log, log.state.acquires[-1], log.state.next_seq + 1)
            await archivist.step(log, None)
        before = summary((await reopened(store)).state)
        go.set()
        with pytest.raises(FencedError):
            await late_append
        assert at in files(store)[0], "it must have been put, or this shows nothing"
        assert attempt(1, 999) not in late.state.kept
        for whole in (False, True):
            fresh = RunLog(store, whole=whole)
            await fresh.open()
            assert summary(fresh.state) == before and not fresh.state.damaged
        await grow(log, log.state.acquires[-1], log.state.next_seq + 2 * EVERY)
        await archivist.step(log, None)
        assert at not in files(store)[0], "and it is cleaned away"
        assert mine.epoch > old.epoch

    asyncio.run(scenario())


def test_who_was_away_for_long_finds_his_own_request() -> None:
    """It had landed, and was archived before its sender could look: it is not said twice, however long that took."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        late = await reopened(store)
        put = store.put

        async def lands(key: str, data: Any, *, create: bool = False) -> None:
            await put(key, data, create=create)
            store.put = put  # type: ignore[method-assign]
            archivist = Archivist()
            await log.refresh()
            for seq in range(8 * EVERY):
                await log.append(kept(attempt(1, seq), f"other{seq}"), owner=mine)
                await archivist.step(log, mine)

        store.put = lands  # type: ignore[method-assign]
        state = await late.append(kept(attempt(1, 999), "mine"), owner=mine)
        assert state.requests["mine"] == 1 and 1 not in files(store)[0]
        assert [b'"id":"mine"' in raw for raw in await history(store)].count(True) == 1

    asyncio.run(scenario())


def test_killed_at_any_request_of_a_step() -> None:
    """Archived and nothing deleted, half deleted, merged: whoever comes next sees the whole log, and goes on."""

    async def scenario(at: int) -> bool:
        store = Patient()
        log, mine, plain = await long_log(store, EVERY * (FAN + 3), archive=False)
        archivist = Archivist()
        await archivist.step(log, mine)  # archives, merges
        await grow(log, log.state.acquires[-1], EVERY * (FAN + 5) + 1)  # and now it deletes as well
        expected, known = summary(log.state), plain + (await history(store))[len(plain) :]
        store.fail = at
        with contextlib.suppress(Killed):
            await archivist.step(log, None)
        done, store.fail = store.fail >= 0, None
        assert await history(store) == known
        other = await reopened(store)
        assert summary(other.state) == expected and not other.state.damaged
        for _ in range(2):
            await Archivist().step(other, None)
        assert await history(store) == known
        left, archives = files(store)
        assert len(left) <= 3 * EVERY and sorted(chain(archives)) == archives
        return done

    at = 0
    while not asyncio.run(scenario(at)):
        at += 1
    assert at > 40


def test_a_damaged_archive_takes_nothing_with_it() -> None:
    """Its records are called damaged, what it has is not deleted, and checkpoints are found as before."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine, _ = await long_log(store, 4 * EVERY, archive=False)
        archivist = Archivist()
        await archivist.step(log, mine)
        (archive,) = files(store)[1][:1]
        raw = bytearray(store.objects[archive.key])
        raw[len(raw) // 2] ^= 1
        store.objects[archive.key] = bytes(raw)
        await grow(log, mine, 8 * EVERY)
        await archivist.step(log, None)
        assert set(range(archive.first, archive.last + 1)) <= set(files(store)[0])
        assert not (await reopened(store)).state.damaged
        whole = RunLog(store, whole=True)
        await whole.open()
        assert whole.state.damaged and set(whole.state.damaged) <= set(range(archive.first, archive.last + 2))

    asyncio.run(scenario())


def test_a_run_with_damage_is_not_archived() -> None:
    """Nobody can say what is missing."""

    async def scenario() -> None:
        store = MemoryStore()
        await long_log(store, 5 * EVERY, archive=False)
        store.objects[record_key(4 * EVERY + 1)] = b"{}"
        before = dict(store.objects)
        await Archivist().step(await reopened(store), None)
        assert store.objects == before

    asyncio.run(scenario())


@given(seed=st.integers(0, 2**32), readers=st.integers(1, 3), writers=st.integers(1, 2))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_readers_beside_those_who_archive(seed: int, readers: int, writers: int) -> None:
    """However requests of writers, archivists and readers meet: nobody sees damage, or less than was there before, and
    in the end all have seen the same."""
    asyncio.run(beside(seed, readers, writers))


async def beside(seed: int, readers: int, writers: int) -> None:
    dice = random.Random(seed)

    class Slow(Patient):
        async def turn(self) -> None:
            for _ in range(int(dice.expovariate(dice.choice((0.01, 0.2))))):
                await asyncio.sleep(0)

    store = Patient()
    log, mine = await new_log(store)
    told: list[int] = []  # what is in the log for sure

    async def write(name: int) -> None:
        own, archivist = await reopened(store), Archivist()
        for number in range(5 * EVERY):
            step = 1000 * name + number
            await own.append(kept(attempt(1, step), f"{step}"), owner=mine)
            told.append(step)
            await archivist.step(own, mine)

    async def read() -> None:
        far = Slow(objects=store.objects)
        own = await reopened(far)
        while len(told) < writers * 5 * EVERY:
            known = set(told)
            if dice.random() < 0.5:
                own = await reopened(far)
            state = await own.refresh()
            assert not state.damaged, state.damaged
            assert known <= {of.step for of in state.kept}, "what was there before is not seen"
            await asyncio.sleep(0)

    await asyncio.gather(*(write(name) for name in range(writers)), *(read() for _ in range(readers)))
    assert len(await history(store)) == (await log.refresh()).next_seq
    assert len(files(store)[0]) <= 4 * EVERY


def test_negative_control_readers_that_believe_their_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second look, archiving beside them is taken for damage, the end, or unreadable files."""
    look_on, refresh = RunLog._look_on, RunLog._refresh

    async def once(self: RunLog, *own: Any) -> Any:
        seen: list[Any] = []

        async def look(*own: Any) -> Any:
            seen[:] = seen or [await look_on(self, *own)]
            return seen[0]

        self._look_on = look  # type: ignore[method-assign]
        return await refresh(self, *own)

    monkeypatch.setattr(RunLog, "_refresh", once)
    with pytest.raises((AssertionError, StoreError)):
        for seed in range(60):
            asyncio.run(beside(seed, 3, 2))


# -- parts of it --


def test_what_archives_are_needed() -> None:
    """The fewest that have all; what is missing between them is left out."""
    small = [Archive(7, 0, 999), Archive(15, 8, 999), Archive(23, 16, 999)]
    large = Archive(15, 0, 999)
    assert chain(small) == small
    assert chain([*small, large]) == [large, small[2]]
    assert chain([small[2], large]) == [large, small[2]]
    assert chain([small[0], small[2]]) == [small[0], small[2]]
    assert chain([Archive(15, 8, 999), Archive(15, 0, 999), Archive(7, 0, 999)]) == [large]
    assert to_merge([large, *small]) == () or to_merge(small) == small


@pytest.mark.parametrize(
    "name",
    [
        "log/archive/000000000007-000000000008.zst", "log/archive/00000000007-000000000000.zst",
        "log/archive/999999999999-000000000000.zst", "log/archive/000000000007-000000000000.zst.1",
    ],
)  # fmt: skip
def test_names_that_are_no_archive(name: str) -> None:
    """Of impossible records, or of so many that its bytes cannot have them."""
    assert archive_of(ObjectInfo(name, 10_000)) is None
    assert archive_of(ObjectInfo("log/archive/000000000007-000000000000.zst", 10_000)) is not None


@given(st.lists(st.lists(st.binary(min_size=1).map(lambda raw: raw.replace(b"\n", b"")), min_size=1), min_size=1))
def test_archives_put_together_are_an_archive(parts: list[list[bytes]]) -> None:
    """And whatever bytes one has, it is read, or a CorruptError of ours."""
    whole = b"".join(map(pack, parts))
    count = sum(map(len, parts))
    assert list(unpack(whole, count, 1 << 20)) == [raw for part in parts for raw in part]
    for cut in range(0, len(whole), max(1, len(whole) // 20)):
        with contextlib.suppress(CorruptError):
            list(unpack(whole[:cut] + bytes([whole[cut] ^ 255]) + whole[cut + 1 :], count, 1 << 20))


BOMBS: dict[str, list[bytes]] = {  # frames of records from 8 on, of which there should be 8
    "one long line": [bytes(1 << 26)] * 8,
    "empty records": [b"\n" * (1 << 26)] * 8,
    "too many records": [b"{}\n" * 9],
    "long records": [(bytes(1 << 24) + b"\n") * 8],
}


@pytest.mark.parametrize("name", BOMBS)
def test_archive_is_damaged_if_it_decompresses_to_more_than_its_size_allows(name: str) -> None:
    """Readers stop early, report the records as damaged, and go on behind them; memory stays bounded."""
    whole = b"".join(map(zstandard.ZstdCompressor(level=1).compress, BOMBS[name]))

    async def scenario() -> None:
        store = MemoryStore()
        log, _, plain = await long_log(store, EVERY * 5)
        archive = chain(files(store)[1])[-1]
        store.objects[archive.key] = whole + bytes(max(0, 32 * archive.count - len(whole)))
        found = RunLog(store, whole=True)
        tracemalloc.start()
        await found.open()
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
        assert found.state.damaged and found.state.next_seq == len(plain)
        assert (await reopened(store)).state.commits.keys() == log.state.commits.keys()

    try:
        asyncio.run(scenario())
    finally:
        tracemalloc.stop()


def test_snapshot_is_damaged_if_it_names_more_ended_attempts_than_records_before_it() -> None:
    """A few bytes stand for any number of steps: `[first, stride, count]`."""
    body = summary(RunState()) | {"retired": {"1.00000000": [[0, 1, 10_000_000]]}}
    with pytest.raises(CorruptError):
        expand(body, 256)


@given(st.sets(st.tuples(st.integers(1, 3), st.integers(0, 60), st.sampled_from(["0" * 8, "1" * 8]))))
def test_attempts_are_a_set(some: set[tuple[int, int, str]]) -> None:
    """Like any other; and what it says of itself does not depend on how it came about."""
    plain = {Attempt(*one) for one in some}
    found = Attempts(sorted(plain))
    assert found == plain and len(found) == len(plain) and sorted(found) == sorted(plain)
    assert found.to_json() == Attempts(sorted(plain, reverse=True)).to_json()
    assert Attempts.from_json(found.to_json()) == plain
    one_by_one: dict[str, list[Any]] = {}
    for of in sorted(plain):
        one_by_one.setdefault(f"{of.epoch}.{of.nonce}", []).append(of.step)
    assert Attempts.from_json(one_by_one) == plain
    for order in (sorted(plain), sorted(plain, reverse=True), list(plain)):  # said again and again as it grows
        growing = Attempts()
        for number, of in enumerate(order):
            growing.add(of)
            assert number % 3 or growing.to_json() == Attempts(sorted(order[: number + 1])).to_json()
    if plain:
        growing.discard(min(plain))
        assert growing.to_json() == Attempts(sorted(plain - {min(plain)})).to_json()
    more = {Attempt(2, 61, "0" * 8), Attempt(9, 1, "2" * 8)}
    assert found | more == plain | more and found == plain
    assert all(of in found for of in plain) and not any(of in found for of in more)


def test_a_snapshot_of_very_many_is_small() -> None:
    """A million steps of one incarnation, of which one in a thousand stays, are a few thousand bytes; and impossible
    ones are refused before they take memory."""

    async def scenario() -> dict[str, Any]:
        log, _ = await new_log(MemoryStore())
        log.state.retired = Attempts(attempt(1, step) for step in range(0, 100_000, 5) if step % 1000)
        return summary(log.state)

    body = asyncio.run(scenario())
    assert len(str(body["retired"])) < 3000
    assert len(expand(body).retired) == 19_900
    for rows in (
        [[0, 1, 10**12]],
        [[0, 0, 5]],
        [[0, 1]],
        [["0", 1, 1]],
        [[0, 1, 1, 1]],
        [[10**18, 1, 1]],
        [-1],
        [True],
    ):
        with pytest.raises(CorruptError):
            expand({**body, "retired": {"1.00000000": rows}})
