"""Reading a folder's chunks straight to where they belong: the same bytes as by `read.fetch`, and nothing
unverified."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_incremental import HALF, KEY, columns_of, genuine

from ckpt.core.checkpoint import chunks as chunks_module
from ckpt.core.checkpoint import read
from ckpt.core.format import kernels as put_module
from ckpt.core.format.columns import I64
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.table import FILE, Table
from ckpt.errors import CheckpointError, CorruptError
from ckpt_backends.local import LocalStore
from ckpt_backends.memory import MemoryStore

EVERY = range(4)  # chunks of `genuine` that are of shards; two bases are behind them


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are small here, and are given places all the same."""
    monkeypatch.setattr(read, "LEAST", 1)


class Taken:
    """What was read: into places (with a guard before and behind each), to the sink, and what was reported lost."""

    def __init__(self, table: Table, placed: Sequence[int]) -> None:
        self.memory = {chunk: np.full(int(table.length[chunk]) + 64, 0xEE, np.uint8) for chunk in placed}
        self.sunk: dict[int, bytes] = {}
        self.lost: dict[int, str] = {}

    def room(self, chunks: I64) -> I64:
        found = [self.memory.get(chunk) for chunk in chunks.tolist()]
        return np.array([0 if one is None else one[32:-32].ctypes.data for one in found], np.int64)

    def sink(self, chunk: int, data: memoryview) -> None:
        assert chunk not in self.sunk, "handed over twice"
        self.sunk[chunk] = bytes(data)

    def note(self, chunks: Sequence[int], error: Exception) -> None:
        self.lost.update(dict.fromkeys(chunks, str(error)))

    def all(self) -> dict[int, bytes]:
        for memory in self.memory.values():
            assert set(memory[:32].tolist()) == set(memory[-32:].tolist()) == {0xEE}, "written outside of a place"
        placed = {chunk: memory[32:-32].tobytes() for chunk, memory in self.memory.items() if chunk not in self.lost}
        return {**placed, **self.sunk}  # what several share is handed over all the same


def read_all(store: Any, table: Table, placed: Sequence[int], chunks: Sequence[int] = EVERY) -> Taken:
    taken = Taken(table, placed)
    batches = read.plan_reads(table, chunks, far=True)
    asyncio.run(read.fetch_local(store, table, batches, taken.sink, taken.note, taken.room))
    return taken


@pytest.mark.parametrize("streams", [1, 3])
def test_every_choice_of_places_gives_the_same_bytes(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw, encoded, and deltas whose base has a place of its own: whichever of them have places."""
    monkeypatch.setattr(read, "STREAMS", streams)
    store, table, plain = genuine()
    for chosen in range(1 << len(EVERY)):
        placed = [chunk for chunk in EVERY if chosen >> chunk & 1]
        taken = read_all(store, table, placed)
        assert taken.all() == {chunk: plain[chunk] for chunk in EVERY}
        assert taken.sunk.keys() == set(EVERY) - set(placed) and not taken.lost


def test_bases_may_be_wanted_and_placed_as_well() -> None:
    """What a delta is taken against is not overwritten before it was used, wherever it lies."""
    store, table, plain = genuine()
    for chunks in ([4, 0], [0, 4], [0, 3, 4, 5]):
        assert read_all(store, table, [0, 4], chunks).all() == {chunk: plain[chunk] for chunk in chunks}


@pytest.mark.parametrize("placed", [(), (0, 1, 2, 3)])
def test_a_flipped_bit_is_told_of_those_who_need_it(placed: tuple[int, ...]) -> None:
    """In a base, a raw chunk, an encoded one: those who need it are lost, and all others come."""
    for hit, lost in [(4, {0}), (1, {1}), (2, {2})]:
        store, table, plain = genuine()
        raw = bytearray(store.objects[KEY])
        raw[int(table.offset[hit]) + 3] ^= 1
        store.objects[KEY] = bytes(raw)
        taken = read_all(store, table, placed)
        assert taken.lost.keys() == lost
        assert taken.all() == {chunk: plain[chunk] for chunk in EVERY if chunk not in lost}


RAW_ONES = (1, 4, 5)  # of `genuine`


@pytest.mark.parametrize("placed", [(), (1,), (4, 5), RAW_ONES])
def test_small_pieces_are_read_together_and_verified_one_by_one(
    placed: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw pieces too small for a place of their own in a read: all come to their places, what is damaged is told of
    and does not, and of a file that ends early what is in front of the end comes."""
    monkeypatch.setattr(read, "LEAST", 1 << 30)
    store, table, plain = genuine()
    everything = {chunk: plain[chunk] for chunk in RAW_ONES}
    taken = read_all(store, table, placed, RAW_ONES)
    assert taken.all() == everything and taken.sunk.keys() == set(RAW_ONES) - set(placed) and not taken.lost
    whole = bytes(store.objects[KEY])
    for hit in RAW_ONES:
        raw = bytearray(whole)
        raw[int(table.offset[hit]) + 3] ^= 1
        store.objects[KEY] = bytes(raw)
        taken = read_all(store, table, placed, RAW_ONES)
        assert taken.lost.keys() == {hit} and "do not match their digest" in taken.lost[hit]
        assert taken.all() == {chunk: data for chunk, data in everything.items() if chunk != hit}
        assert hit not in taken.memory or set(taken.memory[hit].tolist()) == {0xEE}
    folder = LocalStore(f"file://{tmp_path}", writable=True)
    asyncio.run(folder.put(KEY, whole[:-1]))
    taken = read_all(folder, table, placed, RAW_ONES)
    assert taken.lost.keys() == {5} and taken.all() == {chunk: plain[chunk] for chunk in (1, 4)}


def test_negative_control_small_pieces_without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put without a look at their digests, they would be taken."""
    monkeypatch.setattr(put_module, "chunk_digest", lambda data: _Anything())
    monkeypatch.setattr(put_module, "find", lambda: None)
    with pytest.raises(AssertionError):
        test_small_pieces_are_read_together_and_verified_one_by_one(RAW_ONES, Path(), monkeypatch)


def test_no_table_puts_wrong_bytes_into_a_place() -> None:
    """Whatever numbers of a table are changed: an error of ours, or what came is what its digest says."""
    store, table, _ = genuine()
    whole = columns_of(table.to_bytes())
    dice = random.Random(0)
    held = 0
    for _ in range(2000):
        columns = dict(whole)
        for _ in range(dice.randint(1, 3)):
            name = dice.choice(["file", "offset", "stored", "length", "codec", "base", "chunk_ends"])
            column = columns[name].copy()
            value = dice.choice([-1, 0, 1, 2, 5, 64, HALF, 2 * HALF, dice.randrange(3 * HALF)])
            info = np.iinfo(column.dtype)
            column[dice.randrange(len(column))] = min(max(value, info.min), info.max)
            columns[name] = column
        try:
            found = Table.from_bytes(FILE.to_bytes(columns), "a table")
            taken = read_all(store, found, dice.sample(EVERY, dice.randint(0, 4)), range(len(found.length)))
        except CheckpointError:
            continue
        held += 1
        for chunk, data in taken.all().items():
            assert chunk_digest(data) == found.digest[chunk].tobytes()
    assert held > 100  # many of these tables are still tables


def test_negative_control_without_digests_damage_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the digest that finds it."""
    store, table, _ = genuine()
    raw = bytearray(store.objects[KEY])
    raw[int(table.offset[1]) + 3] ^= 1
    store.objects[KEY] = bytes(raw)
    monkeypatch.setattr(chunks_module, "chunk_digest", lambda data: _Anything())
    assert not read_all(store, table, [1]).lost


class _Anything(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __ne__(self, other: object) -> bool:
        return False


def test_what_is_damaged_comes_from_elsewhere_into_its_place(tmp_path: Path) -> None:
    """`mend` hands the sound bytes to the sink, which overwrites what was read into the place; or raises."""
    memory, table, plain = genuine()
    store = LocalStore(f"file://{tmp_path}", writable=True)
    raw = bytearray(memory.objects[KEY])
    raw[int(table.offset[1])] ^= 0x80
    asyncio.run(store.put(KEY, bytes(raw)))
    taken = Taken(table, [1])

    async def work() -> None:
        await read.fetch_repaired(
            store, CheckpointId(1, 1, "abcdefgh"), table, list(EVERY), taken.sink, room=taken.room
        )

    with pytest.raises(CorruptError, match="do not match their digest"):
        asyncio.run(work())
    assert taken.sunk == {chunk: plain[chunk] for chunk in (0, 2, 3)}


def test_a_file_that_ends_early_or_is_gone_loses_what_is_behind_it(tmp_path: Path) -> None:
    """Nothing is made up for bytes that are not there, and no other error than ours comes of it."""
    memory, table, _ = genuine()
    store = LocalStore(f"file://{tmp_path}", writable=True)
    whole = memory.objects[KEY]
    for size in (0, 1, len(whole) // 2, len(whole) - HALF - 1):  # the last base is not needed
        (tmp_path / KEY).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / KEY).write_bytes(whole[:size])
        taken = read_all(LocalStore(f"file://{tmp_path}"), table, [0, 1, 2])
        assert taken.lost and taken.lost.keys() | taken.all().keys() == set(EVERY)
    (tmp_path / KEY).unlink()
    assert read_all(store, table, [0]).lost.keys() == set(EVERY)


def test_scatter_fills_views_of_any_number_and_size(tmp_path: Path) -> None:
    """More views than one system call takes, empty ones, odd offsets, short reads: the bytes are in order."""
    dice = random.Random(0)
    data = dice.randbytes(300_000)
    folder = LocalStore(f"file://{tmp_path}", writable=True)
    asyncio.run(folder.put("data/x", data))
    pure = MemoryStore(objects={"data/x": data})

    class Short(type(folder.disk)):  # type: ignore[misc]
        def scatter(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            return int(super().scatter(fd, [views[0][: max(1, len(views[0]) // 2)]], offset))

    halting = LocalStore(f"file://{tmp_path}", disk=Short())
    for store in (folder, pure, halting):
        for count in (0, 1, 7, 3000):
            sizes = [dice.randrange(60) for _ in range(count)]
            views = [memoryview(bytearray(size)) for size in sizes]
            start = dice.randrange(1000)
            store.scatter("data/x", start, views)
            assert b"".join(views) == data[start : start + sum(sizes)]
        with pytest.raises(CheckpointError):
            store.scatter("data/x", len(data) - 5, [memoryview(bytearray(3)), memoryview(bytearray(3))])
        with pytest.raises(CheckpointError):
            store.scatter("data/y", 0, [memoryview(bytearray(3))])
