"""Tests of large objects, which are uploaded in ranges, and of reading ranges of any object."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest

from ckpt.errors import ExistsError, NotFoundError, StoreError, TruncatedError
from ckpt.store import PAGE, Store
from ckpt.testing.over_stores import BLOB, OverStores, aligned, keys, pieces, upload

RANGES = [
    (0, 1), (0, PAGE), (0, len(BLOB)), (1, PAGE), (PAGE, PAGE), (PAGE - 1, 2), (PAGE + 5, 3 * PAGE + 7),
    (len(BLOB) - 1, 1), (len(BLOB) - PAGE - 3, PAGE + 3), (len(BLOB), 0), (100, 0), (6 * PAGE, len(BLOB) - 6 * PAGE),
]  # fmt: skip


class LargeObjectTests(OverStores):
    """Tests of uploads: from the first range to `finish`, aborted, or abandoned."""

    async def test_upload_accepts_ranges_in_any_order(self, store: Store) -> None:
        """An object consists of its ranges, which are written concurrently: ranges of odd sizes in any order, or whole
        parts if the store has parts."""
        probe = await store.upload("steps/probe", size=1 << 20)
        await probe.abort()
        size = 2 * probe.part + 12_345
        data = (BLOB * (size // len(BLOB) + 1))[:size]
        target = await store.upload("steps/p", size=size)
        if target.part:
            cuts = pieces(target.part, size)
        else:
            cuts = list(pairwise([0, 1, 4096, 4097, 8192, 8192 + 512, 12_000, size]))[::-1]
        views = [aligned(b - a) for a, b in cuts]
        for (a, b), view in zip(cuts, views, strict=True):
            view[:] = data[a:b]
        await asyncio.gather(*(target.write_at(a, view) for (a, _), view in zip(cuts, views, strict=True)))
        await target.finish()
        assert (await store.head("steps/p")).size == size
        assert await store.get("steps/p") == data
        for start, length in ((0, 100), (max(0, size - 20_000), 12_345), (size - 1, 1)):
            view = await store.get("steps/p", start=start, length=length, into=aligned(length + 2 * PAGE))
            assert bytes(view) == data[start : start + length]

    async def test_upload_and_ranges_have_any_size_and_position(self, store: Store) -> None:
        """For any size, split, order and alignment of memory, every range read is equal to what was written."""

        async def shape(store: Store, seed: int) -> None:
            draw = random.Random(seed)
            size = draw.choice((0, 1, PAGE, draw.randint(0, 5 * PAGE)))
            content = (BLOB * 2)[:size]
            target = await store.upload(f"steps/{seed}", size=size)
            cuts = pieces(target.part, size)
            if not target.part:
                cuts = list(pairwise(sorted({0, size, *(draw.randint(0, size) for _ in range(draw.randint(0, 6)))})))
                draw.shuffle(cuts)
            views = []
            for a, b in cuts:
                view = aligned(b - a, draw.choice((0, 1, 512)))
                view[:] = content[a:b]
                views.append(view)  # not changed until `finish`
                await target.write_at(a, view)
            await target.finish()
            assert bytes(await store.get(f"steps/{seed}")) == content
            for _ in range(3):
                start = draw.randint(0, size)
                length = draw.randint(0, size - start)
                into = draw.choice((None, aligned(length + 2 * PAGE, draw.choice((0, 1, 512)))))
                view = await store.get(f"steps/{seed}", start=start, length=length, into=into)
                assert bytes(view) == content[start : start + length], (seed, start, length)

        for seed in range(12):
            await shape(store, seed)

    async def test_upload_is_invisible_before_finish(self, store: Store, other: Store) -> None:
        """Before `finish`, the whole object cannot be read, because it does not exist or lacks its bytes. Afterwards
        the name exists."""
        target = await store.upload("steps/p", size=len(BLOB))
        if target.part == 0:
            await target.write_at(0, memoryview(BLOB)[:PAGE])
        if await keys(other):
            assert bytes(await other.get("steps/p")) != BLOB
        else:
            with pytest.raises(NotFoundError):
                await other.get("steps/p")
        if target.part == 0:
            await target.write_at(PAGE, memoryview(BLOB)[PAGE:])
        else:
            await asyncio.gather(
                *(target.write_at(a, memoryview(BLOB)[a:b]) for a, b in pieces(target.part, len(BLOB)))
            )
        await target.finish()
        assert await keys(other) == ["steps/p"]
        assert bytes(await other.get("steps/p")) == BLOB

    async def test_upload_fails_if_the_object_exists(self, store: Store) -> None:
        """An upload to an existing name is rejected, at the latest by `finish`, and the object does not change."""
        if not self.creates_uploads:
            pytest.skip("the store need not reject existing names")
        await upload(store, "steps/p", b"first")
        with pytest.raises(ExistsError):
            await upload(store, "steps/p", b"second")
        assert bytes(await store.get("steps/p")) == b"first"

    async def test_only_one_of_many_uploads_succeeds(self, store: Store, other: Store) -> None:
        """If several uploads of one name run concurrently, only one succeeds, and its bytes are stored."""
        if not self.creates_uploads:
            pytest.skip("the store need not reject existing names")
        checkpoints = [upload((store, other)[i % 2], "steps/p", b"%d" % i * 9000) for i in range(6)]
        results = await asyncio.gather(*checkpoints, return_exceptions=True)
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert all(isinstance(result, ExistsError) for result in results if result is not None)
        assert bytes(await store.get("steps/p")) == b"%d" % winners[0] * 9000

    async def test_upload_replaces_only_with_replace(self, store: Store, other: Store) -> None:
        """An upload replaces old bytes, longer or shorter ones, only with `replace`, and for every reader only at its
        end. With a name that does not exist, `replace` works too."""
        for i, (old, new) in enumerate(((BLOB, BLOB[::-1]), (b"short", BLOB), (BLOB, b""), (None, BLOB))):
            key = f"steps/{i}"
            if old is not None:
                await upload(store, key, old)
                assert bytes(await store.get(key, start=0, length=len(old))) == old
            target = await store.upload(key, size=len(new), replace=True)
            await asyncio.gather(*(target.write_at(a, memoryview(new)[a:b]) for a, b in pieces(target.part, len(new))))
            if old is not None:
                assert bytes(await store.get(key)) == bytes(await other.get(key)) == old
                assert [info.size async for info in other.list() if info.key == key] == [len(old)]
            else:
                assert key not in await keys(other)
            await target.finish()
            for reader in (store, other):
                assert (await keys(reader)).count(key) == 1
                assert bytes(await reader.get(key)) == new
            assert bytes(await store.get(key, start=0, length=len(new))) == new

    async def test_aborted_replacement_changes_nothing(self, store: Store, other: Store) -> None:
        """The object does not change if the upload is abandoned, or aborted before its first byte or in the middle. A
        later upload succeeds."""
        await upload(store, "steps/p", BLOB)
        for written in (False, True):
            target = await store.upload("steps/p", size=len(BLOB), replace=True)
            if written and target.part == 0:
                await target.write_at(0, memoryview(bytes(PAGE)))
            elif written:
                await asyncio.gather(
                    *(target.write_at(a, memoryview(bytes(b - a))) for a, b in pieces(target.part, len(BLOB)))
                )
            await target.abort()
            await target.abort()
            assert await keys(other) == ["steps/p"] and bytes(await other.get("steps/p")) == BLOB
        forgotten = await store.upload("steps/p", size=8, replace=True)
        await forgotten.write_at(0, memoryview(b"complete" if forgotten.part else b"half"))
        assert await keys(other) == ["steps/p"] and bytes(await other.get("steps/p")) == BLOB
        await upload(other, "steps/p", BLOB[::-1], replace=True)
        assert bytes(await store.get("steps/p")) == BLOB[::-1]
        await forgotten.abort()
        assert await keys(other) == ["steps/p"] and bytes(await store.get("steps/p")) == BLOB[::-1]

    async def test_concurrent_uploads_do_not_interfere(self, store: Store) -> None:
        """Concurrent writes of several large objects do not mix up their bytes."""
        await asyncio.gather(*(upload(store, f"steps/{i}", bytes([i]) * 5 + BLOB) for i in range(8)))
        for i in range(8):
            assert bytes(await store.get(f"steps/{i}")) == bytes([i]) * 5 + BLOB

    async def test_upload_rejects_more_bytes_than_declared(self, store: Store) -> None:
        """Bytes beyond the declared size are rejected."""
        target = await store.upload("steps/p", size=10)
        with pytest.raises(StoreError):
            await target.write_at(0, memoryview(b"x" * 11))
        await target.abort()
        assert await keys(store) == []

    async def test_aborted_upload_leaves_nothing(self, store: Store) -> None:
        """After an abort at any time, and a second abort, nothing is left to read or drop, and the name is free."""
        for written in (False, True):
            target = await store.upload("steps/p", size=8)
            if written:
                await target.write_at(0, memoryview(b"complete" if target.part else b"half"))
            await target.abort()
            await target.abort()
            assert await keys(store) == []
        assert await store.drop_uploads(lambda key: False) == 0
        await upload(store, "steps/p", b"whole")
        assert bytes(await store.get("steps/p")) == b"whole"

    async def test_drop_uploads_finds_uploads_of_dead_processes(self, store: Store, other: Store) -> None:
        """Uploads of a dead process are dropped, except those for which `wanted` is True. Complete objects stay."""
        await upload(store, "steps/finished", BLOB)
        await store.put("log/0", b"x")
        if not self.has_unfinished:
            assert await other.drop_uploads(lambda key: False) == 0
        else:
            part = (await store.upload("steps/probe", size=1 << 20)).part
            left = []
            for name in ("steps/left", "steps/wanted"):
                left.append(await store.upload(name, size=part + PAGE))
                await left[-1].write_at(0, memoryview(bytes(part)))
            assert await keys(other) == ["log/0", "steps/finished"]
            assert await other.drop_uploads(lambda key: key == "steps/wanted") == 1
            assert await other.drop_uploads(lambda key: False) == 1
            assert await other.drop_uploads(lambda key: False) == 0
            for target in left:
                await target.abort()  # must not raise an error, although the upload is gone
        assert await keys(other) == ["log/0", "steps/finished"]
        assert bytes(await other.get("steps/finished")) == BLOB


class RangeTests(OverStores):
    """Tests of reading ranges: a read returns exactly the requested bytes, or raises an error."""

    @pytest.mark.parametrize("scratch", ["none", "aligned", "misaligned", "just the length", "too small", "huge"])
    async def test_range_reads_return_the_requested_bytes(self, store: Store, scratch: str) -> None:
        """A read returns exactly the requested bytes, with any scratch memory."""
        await upload(store, "steps/p", BLOB)
        for start, length in RANGES:
            into = {
                "none": None,
                "aligned": aligned(length + 2 * PAGE),
                "misaligned": aligned(length + 2 * PAGE, 3),
                "just the length": aligned(length),
                "too small": aligned(length // 2),
                "huge": aligned(1 << 20),
            }[scratch]
            view = await store.get("steps/p", start=start, length=length, into=into)
            assert bytes(view) == BLOB[start : start + length], (start, length)

    async def test_scatter_fills_all_views(self, store: Store) -> None:
        """The optional method of local stores fills views of any size one after another, or raises an error."""
        scatter: Any = getattr(store, "scatter", None)
        if store.remote or scatter is None:
            pytest.skip("the store has no such method")
        await store.put("steps/x", BLOB)
        views = [memoryview(bytearray(size)) for size in (3, 0, 1, len(BLOB) // 2)]
        scatter("steps/x", 5, views)
        assert b"".join(views) == BLOB[5 : 9 + len(BLOB) // 2]
        for key, start, error in [("steps/x", len(BLOB) - 2, TruncatedError), ("steps/y", 0, NotFoundError)]:
            with pytest.raises(error):
                scatter(key, start, [memoryview(bytearray(2)), memoryview(bytearray(1))])

    async def test_concurrent_range_reads_are_correct(self, store: Store) -> None:
        """Concurrent reads do not mix up their bytes."""
        for i in range(10):
            await upload(store, f"steps/{i}", bytes([i]) * 3 + BLOB)

        async def one(i: int, start: int) -> None:
            view = await store.get(f"steps/{i}", start=start, length=5000, into=aligned(5000 + 2 * PAGE))
            assert bytes(view) == (bytes([i]) * 3 + BLOB)[start : start + 5000]

        await asyncio.gather(*(one(i, start) for i in range(10) for start in (0, 77, PAGE)))

    @pytest.mark.parametrize(("start", "length"), [(0, len(BLOB) + 1), (len(BLOB), 1), (len(BLOB) - 5, 6), (10**9, 10)])
    async def test_range_beyond_the_end_raises(self, store: Store, start: int, length: int) -> None:
        """A read never returns fewer bytes than requested."""
        await upload(store, "steps/p", BLOB)
        for into in (None, aligned(len(BLOB) + 4 * PAGE)):
            with pytest.raises(TruncatedError) as caught:
                await store.get("steps/p", start=start, length=length, into=into)
            assert not caught.value.retryable

    async def test_range_without_length_reads_to_the_end(self, store: Store) -> None:
        """Without a length, a read returns the rest of the object. A start beyond the end is an error."""
        await store.put("index/i", BLOB)
        for start in (0, 1, PAGE, len(BLOB) - 1, len(BLOB)):
            assert bytes(await store.get("index/i", start=start)) == BLOB[start:]
        with pytest.raises(TruncatedError):
            await store.get("index/i", start=len(BLOB) + 1)

    async def test_cancelled_call_does_not_affect_others(self, store: Store) -> None:
        """A cancelled call ends immediately, and other calls still work."""
        await upload(store, "steps/p", BLOB)
        calls = [asyncio.ensure_future(store.get("steps/p", start=i, length=PAGE)) for i in range(20)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        for i, result in enumerate(results):
            if isinstance(result, BaseException):
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert bytes(result) == BLOB[i : i + PAGE]
        assert bytes(await store.get("steps/p")) == BLOB
