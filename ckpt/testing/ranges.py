"""What a store promises of reading ranges out of objects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ckpt.errors import NotFoundError, StoreError
from ckpt.store import PAGE, Store
from ckpt.testing.over_stores import BLOB, OverStores, aligned, upload

RANGES = [
    (0, 1), (0, PAGE), (0, len(BLOB)), (1, PAGE), (PAGE, PAGE), (PAGE - 1, 2), (PAGE + 5, 3 * PAGE + 7),
    (len(BLOB) - 1, 1), (len(BLOB) - PAGE - 3, PAGE + 3), (len(BLOB), 0), (100, 0), (6 * PAGE, len(BLOB) - 6 * PAGE),
]  # fmt: skip


class RangeTests(OverStores):
    """Exactly the bytes that were asked for, or an error."""

    @pytest.mark.parametrize("scratch", ["none", "aligned", "misaligned", "just the length", "too small", "huge"])
    async def test_ranges(self, store: Store, scratch: str) -> None:
        """Exactly the bytes asked for, whatever scratch memory was given."""
        await upload(store, "packs/p", BLOB)
        for start, length in RANGES:
            into = {
                "none": None,
                "aligned": aligned(length + 2 * PAGE),
                "misaligned": aligned(length + 2 * PAGE, 3),
                "just the length": aligned(length),
                "too small": aligned(length // 2),
                "huge": aligned(1 << 20),
            }[scratch]
            view = await store.get("packs/p", start=start, length=length, into=into)
            assert bytes(view) == BLOB[start : start + length], (start, length)

    async def test_scatter(self, store: Store) -> None:
        """Where a store that is not remote has it: views of any size are filled in turn, or it is an error."""
        scatter: Any = getattr(store, "scatter", None)
        if store.remote or scatter is None:
            pytest.skip("it has no such method")
        await store.put("packs/x", BLOB)
        views = [memoryview(bytearray(size)) for size in (3, 0, 1, len(BLOB) // 2)]
        scatter("packs/x", 5, views)
        assert b"".join(views) == BLOB[5 : 9 + len(BLOB) // 2]
        for key, start in [("packs/x", len(BLOB) - 2), ("packs/y", 0)]:
            with pytest.raises(StoreError):
                scatter(key, start, [memoryview(bytearray(2)), memoryview(bytearray(1))])

    async def test_many_ranges_at_once(self, store: Store) -> None:
        """Reads at the same time do not mix their bytes up."""
        for i in range(10):
            await upload(store, f"packs/{i}", bytes([i]) * 3 + BLOB)

        async def one(i: int, start: int) -> None:
            view = await store.get(f"packs/{i}", start=start, length=5000, into=aligned(5000 + 2 * PAGE))
            assert bytes(view) == (bytes([i]) * 3 + BLOB)[start : start + 5000]

        await asyncio.gather(*(one(i, start) for i in range(10) for start in (0, 77, PAGE)))

    @pytest.mark.parametrize(("start", "length"), [(0, len(BLOB) + 1), (len(BLOB), 1), (len(BLOB) - 5, 6), (10**9, 10)])
    async def test_a_short_range_is_an_error(self, store: Store, start: int, length: int) -> None:
        """Fewer bytes than asked for are never given."""
        await upload(store, "packs/p", BLOB)
        for into in (None, aligned(len(BLOB) + 4 * PAGE)):
            with pytest.raises(StoreError) as caught:
                await store.get("packs/p", start=start, length=length, into=into)
            assert not isinstance(caught.value, NotFoundError) and not caught.value.retryable

    async def test_from_somewhere_to_the_end(self, store: Store) -> None:
        """Without a length, all that is left; a start behind the end is an error."""
        await store.put("index/i", BLOB)
        for start in (0, 1, PAGE, len(BLOB) - 1, len(BLOB)):
            assert bytes(await store.get("index/i", start=start)) == BLOB[start:]
        with pytest.raises(StoreError):
            await store.get("index/i", start=len(BLOB) + 1)

    async def test_a_cancelled_call_harms_no_other(self, store: Store) -> None:
        """Calls that are cancelled on their way end at once, and the store goes on working."""
        await upload(store, "packs/p", BLOB)
        calls = [asyncio.ensure_future(store.get("packs/p", start=i, length=PAGE)) for i in range(20)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        for i, result in enumerate(results):
            if isinstance(result, BaseException):
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert bytes(result) == BLOB[i : i + PAGE]
        assert bytes(await store.get("packs/p")) == BLOB
