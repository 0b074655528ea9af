"""Tests of small objects, of deleting them, and of listing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from ckpt.errors import CorruptError, ExistsError, NotFoundError, StoreError, UsageError
from ckpt.store import PAGE, Buffer, ObjectInfo, Store
from ckpt.testing.over_stores import BLOB, OverStores, keys, upload

BAD_KEYS = [
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "/a", ".hidden",
    "steps/.tmp", "a\0b", "a\nb", "a b", "a\\b", "-a", "a/-b", "ä", "a:b", "%2e%2e/x", "~/x", "a" * 513, "a\n",
]  # fmt: skip


class SmallObjectTests(OverStores):
    """Tests of put, get, head and delete."""

    async def test_get_returns_what_put_stored(self, store: Store) -> None:
        """Objects from bytes, bytearray and memoryview are read back, empty or not."""
        datas: list[Buffer] = [b"", b"x", bytearray(b"abc"), memoryview(b"defg"), BLOB * 10]
        for i, data in enumerate(datas):
            await store.put(f"some/{i}.json", data)
            assert bytes(await store.get(f"some/{i}.json")) == bytes(data)
            assert await store.head(f"some/{i}.json") == ObjectInfo(f"some/{i}.json", len(data))

    async def test_put_replaces_only_without_create(self, store: Store) -> None:
        """`create=True` rejects an existing name without changing its object. `create=False` replaces the object."""
        await store.put("log/0.json", b"first", create=True)
        with pytest.raises(ExistsError):
            await store.put("log/0.json", b"second", create=True)
        assert bytes(await store.get("log/0.json")) == b"first"
        await store.put("log/0.json", b"third, and longer")
        assert bytes(await store.get("log/0.json")) == b"third, and longer"

    async def test_empty_object_can_be_stored(self, store: Store) -> None:
        """An empty object behaves like any other: it exists, it can be read, and its name is in use."""
        await store.put("log/0", b"", create=True)
        for data in (b"", b"x"):
            with pytest.raises(ExistsError):
                await store.put("log/0", data, create=True)
        await upload(store, "steps/p", b"")
        for key in ("log/0", "steps/p"):
            assert (await store.head(key)).size == 0
            assert bytes(await store.get(key)) == bytes(await store.get(key, start=0, length=0)) == b""
            with pytest.raises(StoreError):
                await store.get(key, start=0, length=1)
        assert await keys(store) == ["log/0", "steps/p"]

    async def test_only_one_of_many_creators_succeeds(self, store: Store, other: Store) -> None:
        """Create-if-absent is atomic: of twenty concurrent calls in two stores, exactly one succeeds, and its bytes are
        stored."""
        checkpoints = [(store, other)[i % 2].put("log/1.json", b"%d" % i * 100, create=True) for i in range(20)]
        results = await asyncio.gather(*checkpoints, return_exceptions=True)
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert sum(isinstance(result, ExistsError) for result in results) == 19
        assert bytes(await store.get("log/1.json")) == b"%d" % winners[0] * 100
        assert await keys(store) == ["log/1.json"]

    async def test_other_clients_see_a_stored_object(self, store: Store, other: Store) -> None:
        """The effect of a call is visible to another store for the same location when the call has returned."""
        for data in (b"one", b"two, longer"):
            await store.put("log/0", data)
            assert bytes(await other.get("log/0")) == data
        await upload(store, "steps/p", BLOB)
        assert bytes(await other.get("steps/p", start=1, length=PAGE)) == BLOB[1 : PAGE + 1]
        assert await keys(other) == ["log/0", "steps/p"]
        await store.delete("log/0")
        assert await keys(other) == ["steps/p"]

    async def test_missing_object_raises_not_found(self, store: Store) -> None:
        """Every call that reads a missing object raises NotFoundError, which is not retryable. Deleting it succeeds,
        also repeatedly."""
        await store.put("steps/other", b"x")
        for key in ("steps/none", "none", "other/none"):
            for call in (store.head(key), store.get(key), store.get(key, limit=9), store.get(key, length=5)):
                with pytest.raises(NotFoundError) as caught:
                    await call
                assert not caught.value.retryable
            await store.delete(key)
        await store.delete("steps/other")
        await store.delete("steps/other")
        assert await keys(store) == []

    async def test_errors_name_the_object(self, store: Store) -> None:
        """The error for an existing name is not retryable, and its message has the name."""
        await store.put("log/taken.json", b"first", create=True)
        with pytest.raises(ExistsError, match="taken") as caught:
            await store.put("log/taken.json", b"second", create=True)
        assert not caught.value.retryable
        with pytest.raises(NotFoundError, match="missing"):
            await store.get("log/missing.json")

    async def test_folder_is_not_an_object(self, store: Store) -> None:
        """A prefix of keys is not itself an object."""
        await store.put("steps/one", b"x")
        for call in (store.head("steps"), store.get("steps"), store.get("steps", start=0, length=1)):
            with pytest.raises(StoreError):
                await call
        assert bytes(await store.get("steps/one")) == b"x"

    async def test_deleted_object_can_be_created_again(self, store: Store) -> None:
        """Neither a whole nor a ranged read returns the old bytes of an object that was deleted or replaced."""
        for data in (b"a" * 9000, b"b" * 9000):
            await upload(store, "steps/p", data)
            assert bytes(await store.get("steps/p", start=10, length=5000)) == data[:5000]
            await store.delete("steps/p")
            with pytest.raises(NotFoundError):
                await store.get("steps/p", start=0, length=10)
        for data in (b"c" * 50, b"d" * 60):
            await store.put("index/i", data)
            assert bytes(await store.get("index/i", start=0, length=50)) == data[:50]

    async def test_delete_many_deletes_all_objects(self, store: Store) -> None:
        """Exactly the named objects are deleted, even if names are missing, are more than fit into one request, or if
        the list is empty."""
        names = [f"steps/{i}" for i in range(12)]
        for name in [*names, "steps/1.more", "log/0"]:
            await store.put(name, b"x")
        await store.delete_many([])
        await store.delete_many([f"steps/missing-{i}" for i in range(1100)] + names[1:])
        assert await keys(store) == ["log/0", "steps/0", "steps/1.more"]
        await store.delete_many(["steps/0"])
        assert await keys(store) == ["log/0", "steps/1.more"]

    async def test_get_rejects_objects_above_the_limit(self, store: Store) -> None:
        """An object of `limit` bytes is read; a larger one raises CorruptError."""
        await store.put("log/0", b"12345")
        await store.put("log/empty", b"")
        for limit in (5, 6, 1 << 40):
            assert bytes(await store.get("log/0", limit=limit)) == b"12345"
        for limit in (4, 0):
            with pytest.raises(CorruptError):
                await store.get("log/0", limit=limit)
        assert bytes(await store.get("log/empty", limit=0)) == b""

    async def test_invalid_keys_are_rejected(self, store: Store) -> None:
        """Names from data never become paths outside the store: each call rejects them, and nothing is created."""
        await store.put("good", b"x")
        for key in BAD_KEYS:
            calls: list[Awaitable[object]] = [
                store.put(key, b"x"),
                store.put(key, b"x", create=True),
                store.upload(key, size=1),
                store.get(key),
                store.get(key, start=0, length=1),
                store.head(key),
                store.delete(key),
                store.delete_many(["harmless", key]),
            ]
            for call in calls:
                with pytest.raises(UsageError):
                    await call
        assert await keys(store) == ["good"]


class ListingTests(OverStores):
    """Tests of listings, which return the existing objects in any order."""

    async def test_list_returns_only_objects_in_the_folder(self, store: Store) -> None:
        """A listing returns all keys with their sizes, or those in a folder. A folder without its slash is rejected."""
        names = ["log/000000000010.json", "log/000000000002.json", "steps/b", "steps/a.safetensors", "a-b/c", "a0"]
        for name in names:
            await store.put(name, name.encode())
        assert await keys(store) == sorted(names)
        assert await keys(store, "log/") == ["log/000000000002.json", "log/000000000010.json"]
        assert await keys(store, "a-b/") == ["a-b/c"]
        assert await keys(store, "a/") == await keys(store, "none/") == await keys(store, "steps/b/") == []
        assert {info.key: info.size async for info in store.list("steps/")} == {"steps/a.safetensors": 19, "steps/b": 7}
        for prefix in ("pac", "steps", "steps/a", "steps/b", "/", "//", "../", "steps/../", "./", ".hidden/"):
            with pytest.raises(UsageError):
                await keys(store, prefix)

    async def test_list_returns_every_page(self, store: Store) -> None:
        """Each object is listed once, even if the store lists them page by page."""
        names = [f"log/{i:06d}" for i in range(self.many)]
        room = asyncio.Semaphore(16)

        async def put(name: str) -> None:
            async with room:
                await store.put(name, b"x")

        await asyncio.gather(*map(put, names))
        assert await keys(store, "log/") == names
        await store.delete_many(names[1:])
        assert await keys(store) == names[:1]

    async def test_other_calls_work_during_a_listing(self, store: Store) -> None:
        """Objects can be read and deleted while a listing is in progress."""
        for i in range(5):
            await store.put(f"log/{i}", b"x")
        async for info in store.list("log/"):
            assert bytes(await store.get(info.key)) == b"x"
            await store.delete(info.key)
        assert await keys(store) == []
