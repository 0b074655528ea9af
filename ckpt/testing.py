"""What every store promises, as tests: for those who write a store of their own.

    # test_my_store.py
    from ckpt.testing import StoreTests
    from my_package import MyStore

    class TestMyStore(StoreTests):
        has_unfinished = True

        @pytest.fixture(autouse=True)
        def place(self, tmp_path):
            self.url = f"my://{tmp_path}"

        def make(self):
            return MyStore(self.url, writable=True)

Only the contract (`ckpt.store.Store`) is used, so a store that passes can hold checkpoints. Needs pytest.

`in_virtual_time` is for tests of what waits: retries, limits, deadlines.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from ckpt.errors import CorruptError, ExistsError, NotFoundError, StoreError, UsageError
from ckpt.store import PAGE, Buffer, ObjectInfo, Store

BLOB = bytes(range(256)) * 100 + b"tail"  # 25,604 bytes: whole pages, and a rest

BAD_KEYS = [
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "/a", ".hidden",
    "packs/.tmp", "a\0b", "a\nb", "a b", "a\\b", "-a", "a/-b", "ä", "a:b", "%2e%2e/x", "~/x", "a" * 513, "a\n",
]  # fmt: skip

RANGES = [
    (0, 1), (0, PAGE), (0, len(BLOB)), (1, PAGE), (PAGE, PAGE), (PAGE - 1, 2), (PAGE + 5, 3 * PAGE + 7),
    (len(BLOB) - 1, 1), (len(BLOB) - PAGE - 3, PAGE + 3), (len(BLOB), 0), (100, 0), (6 * PAGE, len(BLOB) - 6 * PAGE),
]  # fmt: skip

Work = Callable[[Store], Awaitable[None]]
T = TypeVar("T")


async def keys(store: Store, prefix: str = "", after: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix, after=after)]


def aligned(size: int, shift: int = 0) -> memoryview:
    """Page-aligned memory, or memory so many bytes off."""
    return memoryview(mmap.mmap(-1, max(1, size + shift)))[shift : shift + size]


def pieces(part: int, size: int) -> list[tuple[int, int]]:
    """(start, end) of the ranges in which an upload takes an object."""
    return [(start, min(start + part, size)) for start in range(0, size, part)] if part else [(0, size)]


async def upload(store: Store, key: str, data: bytes, *, replace: bool = False) -> None:
    """Write a large object as the library does: ranges begun in order, several at a time."""
    target = await store.upload(key, size=len(data), **({"replace": True} if replace else {}))
    try:
        view = memoryview(data)
        await asyncio.gather(*(target.write_at(a, view[a:b]) for a, b in pieces(target.part, len(data))))
        await target.finish()
    except BaseException:
        await target.abort()
        raise


class StoreTests:
    """Subclass it, and give it a `make`. Each test uses one place, empty at its start."""

    has_unfinished = False
    """Whether an upload that was begun and forgotten is invisible and found by `drop_uploads`."""
    creates_uploads = True
    """Whether an upload refuses a name that is taken; the names of packs are unique anyway."""
    many = 1500
    """How many objects to list; more than the store gives at once."""

    def make(self) -> Store:
        """A store, writable, over the place of this test. Called while an event loop runs."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """A second store over the same place, as another process would have it."""
        return self.make()

    def using(self, work: Work) -> None:
        async def main() -> None:
            store = self.make()
            try:
                await work(store)
            finally:
                await store.aclose()

        asyncio.run(main())

    def using_two(self, work: Callable[[Store, Store], Awaitable[None]]) -> None:
        async def both(store: Store) -> None:
            other = self.reopen(store)
            try:
                await work(store, other)
            finally:
                await other.aclose()

        self.using(both)

    # -- small objects --

    def test_put_and_get(self) -> None:
        """What was put is read back, from bytes, bytearray and memoryview, empty or not."""

        async def work(store: Store) -> None:
            datas: list[Buffer] = [b"", b"x", bytearray(b"abc"), memoryview(b"defg"), BLOB * 10]
            for i, data in enumerate(datas):
                await store.put(f"some/{i}.json", data)
                assert bytes(await store.get(f"some/{i}.json")) == bytes(data)
                assert await store.head(f"some/{i}.json") == ObjectInfo(f"some/{i}.json", len(data))

        self.using(work)

    def test_put_replaces_and_create_does_not(self) -> None:
        """`create=True` refuses a name that is taken, and leaves what is there; without it the object is replaced."""

        async def work(store: Store) -> None:
            await store.put("log/0.json", b"first", create=True)
            with pytest.raises(ExistsError):
                await store.put("log/0.json", b"second", create=True)
            assert bytes(await store.get("log/0.json")) == b"first"
            await store.put("log/0.json", b"third, and longer")
            assert bytes(await store.get("log/0.json")) == b"third, and longer"

        self.using(work)

    def test_empty_objects(self) -> None:
        """No bytes are an object like any other: it is there, it can be read, and its name is taken."""

        async def work(store: Store) -> None:
            await store.put("log/0", b"", create=True)
            for data in (b"", b"x"):
                with pytest.raises(ExistsError):
                    await store.put("log/0", data, create=True)
            await upload(store, "packs/p", b"")
            for key in ("log/0", "packs/p"):
                assert (await store.head(key)).size == 0
                assert bytes(await store.get(key)) == bytes(await store.get(key, start=0, length=0)) == b""
                with pytest.raises(StoreError):
                    await store.get(key, start=0, length=1)
            assert await keys(store) == ["log/0", "packs/p"]

        self.using(work)

    def test_one_of_many_creators_wins(self) -> None:
        """Create-if-absent is atomic: of twenty at once, in two stores, one succeeds, and its bytes are there."""

        async def work(store: Store, other: Store) -> None:
            attempts = [(store, other)[i % 2].put("log/1.json", b"%d" % i * 100, create=True) for i in range(20)]
            results = await asyncio.gather(*attempts, return_exceptions=True)
            winners = [i for i, result in enumerate(results) if result is None]
            assert len(winners) == 1
            assert sum(isinstance(result, ExistsError) for result in results) == 19
            assert bytes(await store.get("log/1.json")) == b"%d" % winners[0] * 100
            assert await keys(store) == ["log/1.json"]

        self.using_two(work)

    def test_others_see_it(self) -> None:
        """What a call has done is seen by another store over the same place as soon as it has returned."""

        async def work(store: Store, other: Store) -> None:
            for data in (b"one", b"two, longer"):
                await store.put("log/0", data)
                assert bytes(await other.get("log/0")) == data
            await upload(store, "packs/p", BLOB)
            assert bytes(await other.get("packs/p", start=1, length=PAGE)) == BLOB[1 : PAGE + 1]
            assert await keys(other) == ["log/0", "packs/p"]
            await store.delete("log/0")
            assert await keys(other) == ["packs/p"]

        self.using_two(work)

    def test_what_is_not_there(self) -> None:
        """NotFoundError from every reading call, which no retry mends; deleting it succeeds, again and again."""

        async def work(store: Store) -> None:
            await store.put("packs/other", b"x")
            for key in ("packs/none", "none", "other/none"):
                for call in (store.head(key), store.get(key), store.get(key, limit=9), store.get(key, length=5)):
                    with pytest.raises(NotFoundError) as caught:
                        await call
                    assert not caught.value.retryable
                await store.delete(key)
            await store.delete("packs/other")
            await store.delete("packs/other")
            assert await keys(store) == []

        self.using(work)

    def test_errors_are_clear(self) -> None:
        """A name that is taken is no error that a retry mends, and the message says which name."""

        async def work(store: Store) -> None:
            await store.put("log/taken.json", b"first", create=True)
            with pytest.raises(ExistsError, match="taken") as caught:
                await store.put("log/taken.json", b"second", create=True)
            assert not caught.value.retryable
            with pytest.raises(NotFoundError, match="missing"):
                await store.get("log/missing.json")

        self.using(work)

    def test_a_folder_is_no_object(self) -> None:
        """A prefix of a key names nothing."""

        async def work(store: Store) -> None:
            await store.put("packs/one", b"x")
            for call in (store.head("packs"), store.get("packs"), store.get("packs", start=0, length=1)):
                with pytest.raises(StoreError):
                    await call
            assert bytes(await store.get("packs/one")) == b"x"

        self.using(work)

    def test_deleted_objects_can_be_made_again(self) -> None:
        """Neither a whole nor a ranged read gives the old bytes of a name that was deleted, or replaced."""

        async def work(store: Store) -> None:
            for data in (b"a" * 9000, b"b" * 9000):
                await upload(store, "packs/p", data)
                assert bytes(await store.get("packs/p", start=10, length=5000)) == data[:5000]
                await store.delete("packs/p")
                with pytest.raises(NotFoundError):
                    await store.get("packs/p", start=0, length=10)
            for data in (b"c" * 50, b"d" * 60):
                await store.put("index/i", data)
                assert bytes(await store.get("index/i", start=0, length=50)) == data[:50]

        self.using(work)

    def test_delete_many(self) -> None:
        """Exactly the named ones go, missing ones among them or not, also more than fit one request, and none."""

        async def work(store: Store) -> None:
            names = [f"packs/{i}" for i in range(12)]
            for name in [*names, "packs/1.more", "log/0"]:
                await store.put(name, b"x")
            await store.delete_many([])
            await store.delete_many([f"packs/missing-{i}" for i in range(1100)] + names[1:])
            assert await keys(store) == ["log/0", "packs/0", "packs/1.more"]
            await store.delete_many(["packs/0"])
            assert await keys(store) == ["log/0", "packs/1.more"]

        self.using(work)

    def test_a_limit_for_whole_objects(self) -> None:
        """An object of `limit` bytes is read; one that has more is a CorruptError."""

        async def work(store: Store) -> None:
            await store.put("log/0", b"12345")
            await store.put("log/empty", b"")
            for limit in (5, 6, 1 << 40):
                assert bytes(await store.get("log/0", limit=limit)) == b"12345"
            for limit in (4, 0):
                with pytest.raises(CorruptError):
                    await store.get("log/0", limit=limit)
            assert bytes(await store.get("log/empty", limit=0)) == b""

        self.using(work)

    def test_bad_keys_are_refused(self) -> None:
        """Names from data never become paths: each call refuses them, and nothing is made."""

        async def work(store: Store) -> None:
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

        self.using(work)

    # -- listing --

    def test_list_is_sorted_and_takes_a_prefix(self) -> None:
        """Keys in order as text, with sizes, below any prefix, be it a folder, half a name or nothing that is there."""

        async def work(store: Store) -> None:
            names = ["log/000000000010.json", "log/000000000002.json", "packs/b", "packs/a.safetensors", "a-b/c", "a0"]
            for name in names:
                await store.put(name, name.encode())
            assert await keys(store) == sorted(names)
            assert await keys(store, "log/") == ["log/000000000002.json", "log/000000000010.json"]
            assert await keys(store, "packs/a") == ["packs/a.safetensors"]
            assert await keys(store, "packs/a.safetensors") == ["packs/a.safetensors"]
            assert await keys(store, "pac") == ["packs/a.safetensors", "packs/b"]
            assert await keys(store, "a") == ["a-b/c", "a0"]
            assert await keys(store, "none/") == []
            assert [info.size async for info in store.list("packs/")] == [19, 7]

        self.using(work)

    def test_list_after(self) -> None:
        """Only what comes after a key, be it there or not, within the prefix."""

        async def work(store: Store) -> None:
            names = ["a/1", "log/01", "log/02", "log/10", "log/3", "z"]
            for name in names:
                await store.put(name, b"x")
            for after in ["", "a", "log/", "log/00", "log/015", "log/9", "zz", *names]:
                assert await keys(store, after=after) == [name for name in names if name > after], after
                expected = [name for name in names if name > after and name.startswith("log/")]
                assert await keys(store, "log/", after=after) == expected, after

        self.using(work)

    def test_many_objects_are_listed(self) -> None:
        """Each once and in order, also where the store gives them page by page."""

        async def work(store: Store) -> None:
            names = [f"log/{i:06d}" for i in range(self.many)]
            room = asyncio.Semaphore(16)

            async def put(name: str) -> None:
                async with room:
                    await store.put(name, b"x")

            await asyncio.gather(*map(put, names))
            assert await keys(store, "log/") == names
            assert await keys(store, "log/", after=names[-3]) == names[-2:]
            await store.delete_many(names[1:])
            assert await keys(store) == names[:1]

        self.using(work)

    def test_other_calls_while_listing(self) -> None:
        """Whoever walks through a listing may read and delete what it names."""

        async def work(store: Store) -> None:
            for i in range(5):
                await store.put(f"log/{i}", b"x")
            async for info in store.list("log/"):
                assert bytes(await store.get(info.key)) == b"x"
                await store.delete(info.key)
            assert await keys(store) == []

        self.using(work)

    # -- large objects --

    def test_upload_in_ranges(self) -> None:
        """Ranges at the same time make the object: of odd sizes in any order, or part by part where it has parts."""

        async def work(store: Store) -> None:
            probe = await store.upload("packs/probe", size=1 << 20)
            await probe.abort()
            size = 2 * probe.part + 12_345
            data = (BLOB * (size // len(BLOB) + 1))[:size]
            target = await store.upload("packs/p", size=size)
            if target.part:
                cuts = pieces(target.part, size)
            else:
                cuts = list(pairwise([0, 1, 4096, 4097, 8192, 8192 + 512, 12_000, size]))[::-1]
            views = [aligned(b - a) for a, b in cuts]
            for (a, b), view in zip(cuts, views, strict=True):
                view[:] = data[a:b]
            await asyncio.gather(*(target.write_at(a, view) for (a, _), view in zip(cuts, views, strict=True)))
            await target.finish()
            assert (await store.head("packs/p")).size == size
            assert await store.get("packs/p") == data
            for start, length in ((0, 100), (max(0, size - 20_000), 12_345), (size - 1, 1)):
                view = await store.get("packs/p", start=start, length=length, into=aligned(length + 2 * PAGE))
                assert bytes(view) == data[start : start + length]

        self.using(work)

    def test_upload_and_ranges_of_any_shape(self) -> None:
        """For any size, cuts, order and alignment of memory: every range read back is what was written."""

        async def shape(store: Store, seed: int) -> None:
            draw = random.Random(seed)
            size = draw.choice((0, 1, PAGE, draw.randint(0, 5 * PAGE)))
            content = (BLOB * 2)[:size]
            target = await store.upload(f"packs/{seed}", size=size)
            cuts = pieces(target.part, size)
            if not target.part:
                cuts = list(pairwise(sorted({0, size, *(draw.randint(0, size) for _ in range(draw.randint(0, 6)))})))
                draw.shuffle(cuts)
            views = []
            for a, b in cuts:
                view = aligned(b - a, draw.choice((0, 1, 512)))
                view[:] = content[a:b]
                views.append(view)  # as they are until `finish`
                await target.write_at(a, view)
            await target.finish()
            assert bytes(await store.get(f"packs/{seed}")) == content
            for _ in range(3):
                start = draw.randint(0, size)
                length = draw.randint(0, size - start)
                into = draw.choice((None, aligned(length + 2 * PAGE, draw.choice((0, 1, 512)))))
                view = await store.get(f"packs/{seed}", start=start, length=length, into=into)
                assert bytes(view) == content[start : start + length], (seed, start, length)

        async def work(store: Store) -> None:
            for seed in range(12):
                await shape(store, seed)

        self.using(work)

    def test_upload_means_nothing_before_finish(self) -> None:
        """Nobody reads the whole object before `finish`: it is not there, or does not have its bytes yet. The name is
        there afterwards."""

        async def work(store: Store, other: Store) -> None:
            target = await store.upload("packs/p", size=len(BLOB))
            if target.part == 0:
                await target.write_at(0, memoryview(BLOB)[:PAGE])
            if await keys(other):
                assert bytes(await other.get("packs/p")) != BLOB
            else:
                with pytest.raises(NotFoundError):
                    await other.get("packs/p")
            if target.part == 0:
                await target.write_at(PAGE, memoryview(BLOB)[PAGE:])
            else:
                await asyncio.gather(*(target.write_at(a, memoryview(BLOB)[a:b]) for a, b in _of(target.part)))
            await target.finish()
            assert await keys(other) == ["packs/p"]
            assert bytes(await other.get("packs/p")) == BLOB

        self.using_two(work)

    def test_upload_is_create_only(self) -> None:
        """A name that is taken is refused, at the latest by `finish`, and what is there stays."""
        if not self.creates_uploads:
            pytest.skip("the store does not promise it")

        async def work(store: Store) -> None:
            await upload(store, "packs/p", b"first")
            with pytest.raises(ExistsError):
                await upload(store, "packs/p", b"second")
            assert bytes(await store.get("packs/p")) == b"first"

        self.using(work)

    def test_one_of_many_uploads_wins(self) -> None:
        """Of several uploads of one name at once, one gets it, and its bytes are there."""
        if not self.creates_uploads:
            pytest.skip("the store does not promise it")

        async def work(store: Store, other: Store) -> None:
            attempts = [upload((store, other)[i % 2], "packs/p", b"%d" % i * 9000) for i in range(6)]
            results = await asyncio.gather(*attempts, return_exceptions=True)
            winners = [i for i, result in enumerate(results) if result is None]
            assert len(winners) == 1
            assert all(isinstance(result, ExistsError) for result in results if result is not None)
            assert bytes(await store.get("packs/p")) == b"%d" % winners[0] * 9000

        self.using_two(work)

    def test_an_upload_replaces_only_if_it_is_told_to(self) -> None:
        """With `replace`, and only at its end: longer or shorter bytes stand in place of the old ones, for whoever
        opens it, and a name that nobody had is as good."""

        async def work(store: Store, other: Store) -> None:
            for i, (old, new) in enumerate(((BLOB, BLOB[::-1]), (b"short", BLOB), (BLOB, b""), (None, BLOB))):
                key = f"packs/{i}"
                if old is not None:
                    await upload(store, key, old)
                    assert bytes(await store.get(key, start=0, length=len(old))) == old
                target = await store.upload(key, size=len(new), replace=True)
                await asyncio.gather(
                    *(target.write_at(a, memoryview(new)[a:b]) for a, b in pieces(target.part, len(new)))
                )
                if old is not None:
                    assert bytes(await store.get(key)) == bytes(await other.get(key)) == old
                    assert [info.size async for info in other.list(key)] == [len(old)]
                else:
                    assert await keys(other, key) == []
                await target.finish()
                for reader in (store, other):
                    assert await keys(reader, key) == [key]
                    assert bytes(await reader.get(key)) == new
                assert bytes(await store.get(key, start=0, length=len(new))) == new

        self.using_two(work)

    def test_a_replacement_that_is_given_up_changes_nothing(self) -> None:
        """What was there stays, whether the upload was aborted before its first byte, in the middle, or forgotten; and
        a later one gets through."""

        async def work(store: Store, other: Store) -> None:
            await upload(store, "packs/p", BLOB)
            for written in (False, True):
                target = await store.upload("packs/p", size=len(BLOB), replace=True)
                if written and target.part == 0:
                    await target.write_at(0, memoryview(bytes(PAGE)))
                elif written:
                    await asyncio.gather(
                        *(target.write_at(a, memoryview(bytes(b - a))) for a, b in pieces(target.part, len(BLOB)))
                    )
                await target.abort()
                await target.abort()
                assert await keys(other) == ["packs/p"] and bytes(await other.get("packs/p")) == BLOB
            forgotten = await store.upload("packs/p", size=8, replace=True)
            await forgotten.write_at(0, memoryview(b"complete" if forgotten.part else b"half"))
            assert await keys(other) == ["packs/p"] and bytes(await other.get("packs/p")) == BLOB
            await upload(other, "packs/p", BLOB[::-1], replace=True)
            assert bytes(await store.get("packs/p")) == BLOB[::-1]
            await forgotten.abort()
            assert await keys(other) == ["packs/p"] and bytes(await store.get("packs/p")) == BLOB[::-1]

        self.using_two(work)

    def test_uploads_at_the_same_time(self) -> None:
        """Several large objects being written do not mix their bytes up."""

        async def work(store: Store) -> None:
            await asyncio.gather(*(upload(store, f"packs/{i}", bytes([i]) * 5 + BLOB) for i in range(8)))
            for i in range(8):
                assert bytes(await store.get(f"packs/{i}")) == bytes([i]) * 5 + BLOB

        self.using(work)

    def test_upload_does_not_take_more_than_was_declared(self) -> None:
        """Bytes past the declared size are refused."""

        async def work(store: Store) -> None:
            target = await store.upload("packs/p", size=10)
            with pytest.raises(StoreError):
                await target.write_at(0, memoryview(b"x" * 11))
            await target.abort()
            assert await keys(store) == []

        self.using(work)

    def test_abort_leaves_nothing(self) -> None:
        """Given up at any time, also twice, nothing is left, nothing is there to be dropped, and the name is free."""

        async def work(store: Store) -> None:
            for written in (False, True):
                target = await store.upload("packs/p", size=8)
                if written:
                    await target.write_at(0, memoryview(b"complete" if target.part else b"half"))
                await target.abort()
                await target.abort()
                assert await keys(store) == []
            assert await store.drop_uploads(lambda key: False) == 0
            await upload(store, "packs/p", b"whole")
            assert bytes(await store.get("packs/p")) == b"whole"

        self.using(work)

    def test_drop_uploads(self) -> None:
        """What a dead process began is found, unless it is wanted or an object like any other; objects stay."""

        async def work(store: Store, other: Store) -> None:
            await upload(store, "packs/finished", BLOB)
            await store.put("log/0", b"x")
            if not self.has_unfinished:
                assert await other.drop_uploads(lambda key: False) == 0
            else:
                part = (await store.upload("packs/probe", size=1 << 20)).part
                left = []
                for name in ("packs/left", "packs/wanted"):
                    left.append(await store.upload(name, size=part + PAGE))
                    await left[-1].write_at(0, memoryview(bytes(part)))
                assert await keys(other) == ["log/0", "packs/finished"]
                assert await other.drop_uploads(lambda key: key == "packs/wanted") == 1
                assert await other.drop_uploads(lambda key: False) == 1
                assert await other.drop_uploads(lambda key: False) == 0
                for target in left:
                    await target.abort()  # what is gone already is no error
            assert await keys(other) == ["log/0", "packs/finished"]
            assert bytes(await other.get("packs/finished")) == BLOB

        self.using_two(work)

    # -- ranges --

    @pytest.mark.parametrize("scratch", ["none", "aligned", "misaligned", "just the length", "too small", "huge"])
    def test_ranges(self, scratch: str) -> None:
        """Exactly the bytes asked for, whatever scratch memory was given."""

        async def work(store: Store) -> None:
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

        self.using(work)

    def test_scatter(self) -> None:
        """Where a store that is not remote has it: views of any size are filled in turn, or it is an error."""

        async def work(store: Store) -> None:
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

        self.using(work)

    def test_many_ranges_at_once(self) -> None:
        """Reads at the same time do not mix their bytes up."""

        async def work(store: Store) -> None:
            for i in range(10):
                await upload(store, f"packs/{i}", bytes([i]) * 3 + BLOB)

            async def one(i: int, start: int) -> None:
                view = await store.get(f"packs/{i}", start=start, length=5000, into=aligned(5000 + 2 * PAGE))
                assert bytes(view) == (bytes([i]) * 3 + BLOB)[start : start + 5000]

            await asyncio.gather(*(one(i, start) for i in range(10) for start in (0, 77, PAGE)))

        self.using(work)

    @pytest.mark.parametrize(("start", "length"), [(0, len(BLOB) + 1), (len(BLOB), 1), (len(BLOB) - 5, 6), (10**9, 10)])
    def test_a_short_range_is_an_error(self, start: int, length: int) -> None:
        """Fewer bytes than asked for are never given."""

        async def work(store: Store) -> None:
            await upload(store, "packs/p", BLOB)
            for into in (None, aligned(len(BLOB) + 4 * PAGE)):
                with pytest.raises(StoreError) as caught:
                    await store.get("packs/p", start=start, length=length, into=into)
                assert not isinstance(caught.value, NotFoundError) and not caught.value.retryable

        self.using(work)

    def test_from_somewhere_to_the_end(self) -> None:
        """Without a length, all that is left; a start behind the end is an error."""

        async def work(store: Store) -> None:
            await store.put("index/i", BLOB)
            for start in (0, 1, PAGE, len(BLOB) - 1, len(BLOB)):
                assert bytes(await store.get("index/i", start=start)) == BLOB[start:]
            with pytest.raises(StoreError):
                await store.get("index/i", start=len(BLOB) + 1)

        self.using(work)

    def test_a_cancelled_call_harms_no_other(self) -> None:
        """Calls that are cancelled on their way end at once, and the store goes on working."""

        async def work(store: Store) -> None:
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

        self.using(work)


def _of(part: int) -> list[tuple[int, int]]:
    return pieces(part, len(BLOB))


def in_virtual_time(work: Coroutine[Any, Any, T], *, turns: int | None = None) -> T:
    """Run a coroutine on an event loop whose clock starts at 0 and jumps to the next timer when nothing is left to do.

    For code that waits for timers and for other tasks only, not for threads or sockets. RuntimeError if all tasks wait
    and no timer is set, or if the loop goes round more than `turns` times: somebody polls.
    """
    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(turns)) as runner:
        return runner.run(work)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, turns: int | None) -> None:
        self._clock = _Clock(turns)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Clock(selectors.SelectSelector):
    """A selector that does not wait: time passes instead."""

    def __init__(self, turns: int | None) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._turns is not None:
            self._turns -= 1
        if timeout is None or self._turns == 0:
            self._turns = None  # so that the loop can be closed
            raise RuntimeError("the loop turns and turns" if timeout is not None else "every task waits, for nothing")
        self.now += max(0.0, timeout)
        return super().select(0)
