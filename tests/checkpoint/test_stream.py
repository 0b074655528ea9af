"""Reading a folder's chunks directly into their buffers gives the same bytes as `read.fetch`, all verified."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_incremental import HALF, KEY, columns_of, fetched, genuine

from ckpt.core.checkpoint import chunks as chunks_module
from ckpt.core.checkpoint import read
from ckpt.core.format import kernels as put_module
from ckpt.core.format.columns import I64
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.table import FILE, Table
from ckpt.errors import CheckpointError, TruncatedError
from ckpt_backends.local import LocalStore

EVERY = range(4)  # chunks of the shards of `genuine`; two bases follow


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small chunks be read directly too."""
    monkeypatch.setattr(read, "LEAST", 1)


class Collector:
    """Collects what was read into buffers (with guards around each), sent to the sink, and reported lost."""

    def __init__(self, table: Table, placed: Sequence[int]) -> None:
        self.memory = {chunk: np.full(int(table.length[chunk]) + 64, 0xEE, np.uint8) for chunk in placed}
        self.sunk: dict[int, bytes] = {}
        self.lost: dict[int, str] = {}

    def room(self, chunks: I64) -> I64:
        found = [self.memory.get(chunk) for chunk in chunks.tolist()]
        return np.array([0 if one is None else one[32:-32].ctypes.data for one in found], np.int64)

    def sink(self, chunk: int, data: memoryview) -> None:
        assert chunk not in self.sunk, "sent to the sink twice"
        self.sunk[chunk] = bytes(data)

    def note(self, chunks: Sequence[int], error: Exception) -> None:
        self.lost.update(dict.fromkeys(chunks, str(error)))

    def all(self) -> dict[int, bytes]:
        for memory in self.memory.values():
            assert set(memory[:32].tolist()) == set(memory[-32:].tolist()) == {0xEE}, "written outside of a buffer"
        placed = {chunk: memory[32:-32].tobytes() for chunk, memory in self.memory.items() if chunk not in self.lost}
        return {**placed, **self.sunk}  # shared chunks also go to the sink


def read_all(store: Any, table: Table, placed: Sequence[int], chunks: Sequence[int] = EVERY) -> Collector:
    collected = Collector(table, placed)
    batches = read.plan_reads(table, chunks, far=True)
    asyncio.run(read.fetch_local(store, table, batches, collected.sink, collected.note, collected.room))
    return collected


@pytest.mark.parametrize("streams", [1, 3])
def test_any_choice_of_buffers_gives_the_same_bytes(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw, encoded and delta chunks give the same bytes, whichever of them have buffers."""
    monkeypatch.setattr(read, "STREAMS", streams)
    store, table, plain = genuine()
    for chosen in range(1 << len(EVERY)):
        placed = [chunk for chunk in EVERY if chosen >> chunk & 1]
        collected = read_all(store, table, placed)
        assert collected.all() == {chunk: plain[chunk] for chunk in EVERY}
        assert collected.sunk.keys() == set(EVERY) - set(placed) and not collected.lost


def test_bases_may_be_requested_with_buffers() -> None:
    """The base of a delta is not overwritten before it is used, wherever it is."""
    store, table, plain = genuine()
    for chunks in ([4, 0], [0, 4], [0, 3, 4, 5]):
        assert read_all(store, table, [0, 4], chunks).all() == {chunk: plain[chunk] for chunk in chunks}


@pytest.mark.parametrize("placed", [(), (0, 1, 2, 3)])
def test_flipped_bit_affects_only_dependent_chunks(placed: tuple[int, ...]) -> None:
    """If a base, a raw or an encoded chunk is damaged, only chunks that need it are lost."""
    for hit, lost in [(4, {0}), (1, {1}), (2, {2})]:
        store, table, plain = genuine()
        raw = bytearray(store.objects[KEY])
        raw[int(table.offset[hit]) + 3] ^= 1
        store.objects[KEY] = bytes(raw)
        collected = read_all(store, table, placed)
        assert collected.lost.keys() == lost
        assert collected.all() == {chunk: plain[chunk] for chunk in EVERY if chunk not in lost}


RAW_ONES = (1, 4, 5)  # raw chunks of `genuine`


@pytest.mark.parametrize("placed", [(), (1,), (4, 5), RAW_ONES])
def test_small_chunks_are_read_together_but_verified_singly(
    placed: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw chunks too small for separate reads are all placed. A damaged one is reported and not placed. In a truncated
    file, the chunks before its end are read one by one."""
    monkeypatch.setattr(read, "LEAST", 1 << 30)
    store, table, plain = genuine()
    everything = {chunk: plain[chunk] for chunk in RAW_ONES}
    collected = read_all(store, table, placed, RAW_ONES)
    assert collected.all() == everything and collected.sunk.keys() == set(RAW_ONES) - set(placed) and not collected.lost
    whole = bytes(store.objects[KEY])
    for hit in RAW_ONES:
        raw = bytearray(whole)
        raw[int(table.offset[hit]) + 3] ^= 1
        store.objects[KEY] = bytes(raw)
        collected = read_all(store, table, placed, RAW_ONES)
        assert collected.lost.keys() == {hit} and "do not match their digest" in collected.lost[hit]
        assert collected.all() == {chunk: data for chunk, data in everything.items() if chunk != hit}
        assert hit not in collected.memory or set(collected.memory[hit].tolist()) == {0xEE}
    folder = LocalStore(f"file://{tmp_path}", writable=True)
    asyncio.run(folder.put(KEY, whole[:-1]))
    collected, of = Collector(table, placed), CheckpointId(1, 1, "0badcafe")
    with pytest.raises(TruncatedError):
        asyncio.run(read.fetch_repaired(folder, of, table, RAW_ONES, sink=collected.sink, room=collected.room))
    assert collected.sunk == {chunk: plain[chunk] for chunk in (1, 4)}


def test_negative_control_small_chunks_without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a check of their digests, damaged chunks are placed."""
    monkeypatch.setattr(put_module, "chunk_digest", lambda data: _Anything())
    monkeypatch.setattr(put_module, "find", lambda: None)
    with pytest.raises(AssertionError):
        test_small_chunks_are_read_together_but_verified_singly(RAW_ONES, Path(), monkeypatch)


def test_changed_table_never_places_wrong_bytes() -> None:
    """For any changed numbers in a table, both ways to read raise our error, or all bytes match their digests."""
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
            every = range(len(found.length))
            collected = read_all(store, found, dice.sample(EVERY, dice.randint(0, 4)), every)
        except CheckpointError:
            continue
        held += 1
        with contextlib.suppress(CheckpointError):
            got = asyncio.run(fetched(store, found, every))
            assert all(chunk_digest(data) == found.digest[chunk].tobytes() for chunk, data in got.items())
        for chunk, data in collected.all().items():
            assert chunk_digest(data) == found.digest[chunk].tobytes()
    assert held > 100  # many of these tables are still valid


def test_negative_control_damage_passes_without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is what detects the damage."""
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


def test_truncated_or_missing_file_loses_its_chunks(tmp_path: Path) -> None:
    """Missing bytes are never made up, and only our own errors are raised."""
    memory, table, _ = genuine()
    store = LocalStore(f"file://{tmp_path}", writable=True)
    whole = memory.objects[KEY]
    for size in (0, 1, len(whole) // 2, len(whole) - HALF - 1):  # the last base is not needed
        (tmp_path / KEY).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / KEY).write_bytes(whole[:size])
        collected = read_all(LocalStore(f"file://{tmp_path}"), table, [0, 1, 2])
        assert collected.lost and collected.lost.keys() | collected.all().keys() == set(EVERY)
    (tmp_path / KEY).unlink()
    assert read_all(store, table, [0]).lost.keys() == set(EVERY)
