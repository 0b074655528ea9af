"""What every store promises (`ckpt.store.Store`), over each that there is; and what the local one adds to it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import stat
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_disk import volume

from ckpt.errors import CheckpointError, ExistsError, NotFoundError, StoreError, UsageError
from ckpt.store import PAGE, Store, check_key, normalise, open_store
from ckpt_backends.disk import Disk
from ckpt_backends.local import LocalStore
from ckpt_backends.memory import MemoryStore

Open = Callable[[], Store]
BLOB = bytes(range(256)) * 100 + b"tail"  # 25,604 bytes: whole pages, and a rest


class TinyWrites(Disk):
    """A disk that takes a page, or half of less, at a time."""

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return super().pwrite(fd, view[: PAGE if len(view) > PAGE else max(1, len(view) // 2)], offset)


class TinyReads(Disk):
    """A disk that gives a thousand bytes at a time, as after a signal."""

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return super().preadv(fd, view[: min(len(view), PAGE if len(view) >= PAGE else 1000)], offset)


STORES: dict[str, Callable[[str], Store]] = {
    "memory": lambda url: MemoryStore(),
    "local": lambda url: LocalStore(url, writable=True),
    "local, through the page cache": lambda url: LocalStore(url, writable=True, direct=False),
    "local, tiny writes": lambda url: LocalStore(url, writable=True, disk=TinyWrites()),
    "local, tiny reads": lambda url: LocalStore(url, writable=True, disk=TinyReads()),
}


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return partial(STORES[request.param], f"file://{tmp_path}/store")


@contextlib.asynccontextmanager
async def opened(make: Open) -> AsyncIterator[Store]:
    store = make()
    try:
        yield store
    finally:
        await store.aclose()


def using(make: Open, work: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(make) as store:
            await work(store)

    asyncio.run(main())


async def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def upload(store: Store, key: str, data: bytes) -> None:
    target = await store.upload(key, size=len(data))
    await target.write_at(0, memoryview(data))
    await target.finish()


def aligned(size: int, shift: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, size + shift))[shift:]


# -- small objects --


def test_put_and_get(make: Open) -> None:
    """What was put is read back, from bytes, bytearray and memoryview, empty or not."""

    async def work(store: Store) -> None:
        for i, data in enumerate((b"", b"x", bytearray(b"abc"), memoryview(b"defg"), BLOB * 10)):
            await store.put(f"some/{i}.json", data)
            assert bytes(await store.get(f"some/{i}.json")) == bytes(data)
            assert (await store.head(f"some/{i}.json")).size == len(data)

    using(make, work)


def test_put_replaces_and_create_does_not(make: Open) -> None:
    """`create=True` refuses a name that is taken, and leaves what is there; without it the object is replaced."""

    async def work(store: Store) -> None:
        await store.put("log/0.json", b"first", create=True)
        with pytest.raises(ExistsError):
            await store.put("log/0.json", b"second", create=True)
        assert bytes(await store.get("log/0.json")) == b"first"
        await store.put("log/0.json", b"third, and longer")
        assert bytes(await store.get("log/0.json")) == b"third, and longer"

    using(make, work)


def test_one_of_many_creators_wins(make: Open) -> None:
    """Create-if-absent is atomic: of twenty at once one succeeds, and its bytes are there."""

    async def work(store: Store) -> None:
        attempts = [store.put("log/1.json", b"%d" % i * 100, create=True) for i in range(20)]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert sum(isinstance(result, ExistsError) for result in results) == 19
        assert bytes(await store.get("log/1.json")) == b"%d" % winners[0] * 100
        assert await keys(store) == ["log/1.json"]

    using(make, work)


def test_what_is_not_there(make: Open) -> None:
    """NotFoundError from every reading call; deleting it succeeds, again and again."""

    async def work(store: Store) -> None:
        await store.put("packs/other", b"x")
        for key in ("packs/none", "none", "other/none"):
            for call in (store.head(key), store.get(key), store.get(key, start=0, length=5)):
                with pytest.raises(NotFoundError):
                    await call
            await store.delete(key)
        await store.delete("packs/other")
        await store.delete("packs/other")
        assert await keys(store) == []

    using(make, work)


def test_a_folder_is_no_object(make: Open) -> None:
    """A prefix of a key names nothing."""

    async def work(store: Store) -> None:
        await store.put("packs/one", b"x")
        for call in (store.head("packs"), store.get("packs"), store.get("packs", start=0, length=1)):
            with pytest.raises(StoreError):
                await call
        assert bytes(await store.get("packs/one")) == b"x"

    using(make, work)


def test_deleted_objects_can_be_made_again(make: Open) -> None:
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

    using(make, work)


def test_list_is_sorted_and_takes_a_prefix(make: Open) -> None:
    """Keys in order as text, with sizes, below any prefix, be it a folder, half a name or nothing that is there."""

    async def work(store: Store) -> None:
        names = ["log/000000000010.json", "log/000000000002.json", "packs/b", "packs/a.safetensors", "a-b/c", "a", "a0"]
        names.remove("a")  # a file cannot be beside a folder of its name in every store
        for name in names:
            await store.put(name, name.encode())
        assert await keys(store) == sorted(names)
        assert await keys(store, "log/") == ["log/000000000002.json", "log/000000000010.json"]
        assert await keys(store, "packs/a") == ["packs/a.safetensors"]
        assert await keys(store, "pac") == ["packs/a.safetensors", "packs/b"]
        assert await keys(store, "a") == ["a-b/c", "a0"]
        assert await keys(store, "none/") == []
        assert [info.size async for info in store.list("packs/")] == [19, 7]

    using(make, work)


BAD_KEYS = [
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "/a", ".hidden",
    "packs/.tmp", "a\0b", "a\nb", "a b", "a\\b", "-a", "a/-b", "ä", "a:b", "%2e%2e/x", "~/x", "a" * 513, "a\n",
]  # fmt: skip


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused(make: Open, key: str) -> None:
    """Names from data never become paths: each call refuses them, and nothing is made."""

    async def work(store: Store) -> None:
        await store.put("good", b"x")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put(key, b"x"),
            lambda: store.put(key, b"x", create=True),
            lambda: store.upload(key, size=1),
            lambda: store.get(key),
            lambda: store.get(key, start=0, length=1),
            lambda: store.head(key),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(UsageError):
                await call()
        assert await keys(store) == ["good"]

    using(make, work)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_a_key_that_passes_stays_below_the_root(key: str) -> None:
    """Whatever passes the check is the name of something below the folder, and hides nothing."""
    try:
        check_key(key)
    except UsageError:
        return
    path = os.path.normpath(f"/root/of/store/{key}")
    assert path == f"/root/of/store/{key}" and path.startswith("/root/of/store/")
    assert not any(piece.startswith(".") for piece in key.split("/"))


# -- large objects --


def test_upload_out_of_order_in_odd_pieces(make: Open) -> None:
    """Pieces of any size, at any offset, at the same time and in any order make the object."""

    async def work(store: Store) -> None:
        target = await store.upload("packs/p", size=len(BLOB))
        cuts = [0, 1, 4096, 4097, 8192, 16384, 20000, 20480, len(BLOB)]
        pieces = [(a, BLOB[a:b]) for a, b in pairwise(cuts)]
        views = [(a, aligned(len(data))) for a, data in pieces]
        for (_, view), (_, data) in zip(views, pieces, strict=True):
            view[:] = data
        await asyncio.gather(*(target.write_at(a, view) for a, view in reversed(views)))
        await target.finish()
        assert bytes(await store.get("packs/p")) == BLOB
        assert (await store.head("packs/p")).size == len(BLOB)

    using(make, work)


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_upload_and_ranges_of_any_shape(make: Open, data: st.DataObject) -> None:
    """For any size, any cuts, any order and any alignment of memory: every range read back is what was written."""
    size = data.draw(st.integers(0, 5 * PAGE))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=6))})
    order = data.draw(st.permutations(range(len(cuts) - 1)))
    shift = data.draw(st.sampled_from((0, 1, 512)))
    start = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - start))
    content = (BLOB * 2)[:size]

    async def work(store: Store) -> None:
        await store.delete("packs/any")
        target = await store.upload("packs/any", size=size)
        for i in order:
            view = aligned(cuts[i + 1] - cuts[i], shift)
            view[:] = content[cuts[i] : cuts[i + 1]]
            await target.write_at(cuts[i], view)
        await target.finish()
        assert bytes(await store.get("packs/any")) == content
        into = aligned(length + 2 * PAGE, shift) if data.draw(st.booleans()) else None
        assert bytes(await store.get("packs/any", start=start, length=length, into=into)) == content[start:][:length]

    using(make, work)


def test_upload_is_create_only(make: Open) -> None:
    """A name that is taken is refused, at the latest by `finish`, and what is there stays."""

    async def work(store: Store) -> None:
        await upload(store, "packs/p", b"first")
        with pytest.raises(ExistsError):
            await upload(store, "packs/p", b"second")
        assert bytes(await store.get("packs/p")) == b"first"

    using(make, work)


def test_upload_does_not_take_more_than_was_declared(make: Open) -> None:
    """Bytes past the declared size are refused."""

    async def work(store: Store) -> None:
        target = await store.upload("packs/p", size=10)
        with pytest.raises(StoreError):
            await target.write_at(5, memoryview(b"123456"))
        await target.abort()
        assert await keys(store) == []

    using(make, work)


def test_abort_leaves_nothing(make: Open) -> None:
    """Given up at any time, also twice, nothing is left, and the name is free."""

    async def work(store: Store) -> None:
        for written in (b"", b"half"):
            target = await store.upload("packs/p", size=8)
            await target.write_at(0, memoryview(written))
            await target.abort()
            await target.abort()
            assert await keys(store) == []
        await upload(store, "packs/p", b"whole")
        assert bytes(await store.get("packs/p")) == b"whole"

    using(make, work)


def test_the_view_is_not_kept(make: Open) -> None:
    """After write_at has returned the caller may change the memory."""

    async def work(store: Store) -> None:
        view = aligned(PAGE)
        view[:] = b"a" * PAGE
        target = await store.upload("packs/p", size=PAGE)
        await target.write_at(0, view)
        view[:] = b"b" * PAGE
        await target.finish()
        assert bytes(await store.get("packs/p")) == b"a" * PAGE

    using(make, work)


# -- ranges --

RANGES = [
    (0, 1), (0, PAGE), (0, len(BLOB)), (1, PAGE), (PAGE, PAGE), (PAGE - 1, 2), (PAGE + 5, 3 * PAGE + 7),
    (len(BLOB) - 1, 1), (len(BLOB) - PAGE - 3, PAGE + 3), (len(BLOB), 0), (100, 0), (6 * PAGE, len(BLOB) - 6 * PAGE),
]  # fmt: skip


@pytest.mark.parametrize("scratch", ["none", "aligned", "misaligned", "just the length", "too small", "huge"])
def test_ranges(make: Open, scratch: str) -> None:
    """Exactly the bytes asked for, whatever scratch memory was given."""

    async def work(store: Store) -> None:
        await upload(store, "packs/p", BLOB)
        for start, length in RANGES:
            into = {
                "none": None,
                "aligned": aligned(length + 2 * PAGE),
                "misaligned": aligned(length + 2 * PAGE, 3),
                "just the length": aligned(length + 1)[:length],
                "too small": aligned(length // 2 + 1)[: length // 2],
                "huge": aligned(1 << 20),
            }[scratch]
            view = await store.get("packs/p", start=start, length=length, into=into)
            assert bytes(view) == BLOB[start : start + length], (start, length)

    using(make, work)


def test_many_ranges_at_once(make: Open) -> None:
    """Reads at the same time do not mix their bytes up."""

    async def work(store: Store) -> None:
        for i in range(20):
            await upload(store, f"packs/{i}", bytes([i]) * 3 + BLOB)

        async def one(i: int, start: int) -> None:
            view = await store.get(f"packs/{i}", start=start, length=5000, into=aligned(5000 + 2 * PAGE))
            assert bytes(view) == (bytes([i]) * 3 + BLOB)[start : start + 5000]

        await asyncio.gather(*(one(i, start) for i in range(20) for start in (0, 77, PAGE)))

    using(make, work)


@pytest.mark.parametrize(("start", "length"), [(0, len(BLOB) + 1), (len(BLOB), 1), (len(BLOB) - 5, 6), (10**9, 10)])
def test_a_short_range_is_an_error(make: Open, start: int, length: int) -> None:
    """Fewer bytes than asked for are never given."""

    async def work(store: Store) -> None:
        await upload(store, "packs/p", BLOB)
        for into in (None, aligned(len(BLOB) + 4 * PAGE)):
            with pytest.raises(StoreError):
                await store.get("packs/p", start=start, length=length, into=into)

    using(make, work)


def test_from_somewhere_to_the_end(make: Open) -> None:
    """Without a length, all that is left; a start behind the end is an error."""

    async def work(store: Store) -> None:
        await store.put("index/i", BLOB)
        for start in (0, 1, PAGE, len(BLOB) - 1, len(BLOB)):
            assert bytes(await store.get("index/i", start=start)) == BLOB[start:]
        with pytest.raises(StoreError):
            await store.get("index/i", start=len(BLOB) + 1)

    using(make, work)


# -- the local store --


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def writable(root: Path) -> Open:
    return lambda: LocalStore(f"file://{root}", writable=True)


def test_temporary_and_foreign_names_are_not_listed(root: Path) -> None:
    """What a crash left half-written, hidden files, links, pipes: nothing but whole objects is listed."""

    async def work(store: Store) -> None:
        await store.put("log/0.json", b"x")
        (root / "log" / ".0123456789abcdef.tmp").write_bytes(b"half")
        (root / ".reserve").write_bytes(b"")
        (root / ".hidden").mkdir()
        (root / ".hidden" / "file").write_bytes(b"")
        (root / "link").symlink_to(root / "log" / "0.json")
        (root / "linked").symlink_to(root / "log")
        os.mkfifo(root / "log" / "1.json")
        assert await keys(store) == ["log/0.json"]

    using(writable(root), work)


def test_nothing_temporary_is_left(root: Path) -> None:
    """After puts that succeeded and puts that were refused, only the objects are in the folder."""

    async def work(store: Store) -> None:
        for _ in range(2):
            with contextlib.suppress(ExistsError):
                await store.put("parts/p.json", b"x", create=True)
        await store.put("parts/p.json", b"y")
        assert os.listdir(root / "parts") == ["p.json"]

    using(writable(root), work)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    """A link with an object's name leads nowhere: what lies behind it is neither read nor written."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)

    async def work(store: Store) -> None:
        await store.put("packs/other", b"x")
        (root / "packs" / "p").symlink_to(secret)
        for call in (store.get("packs/p"), store.get("packs/p", start=0, length=6), store.upload("packs/p", size=1)):
            with pytest.raises(StoreError):
                await call
        with pytest.raises(ExistsError):
            await store.put("packs/p", b"x", create=True)
        await store.put("packs/p", b"mine")  # replaces the link itself
        assert secret.read_bytes() == b"secret" * 1000
        assert bytes(await store.get("packs/p")) == b"mine"

    using(writable(root), work)


def test_a_linked_folder_is_not_written_into(root: Path, tmp_path: Path) -> None:
    """A folder of the run that is a link to somewhere else takes no files."""
    (tmp_path / "elsewhere").mkdir()
    root.mkdir()
    (root / "packs").symlink_to(tmp_path / "elsewhere")

    async def work(store: Store) -> None:
        with pytest.raises(StoreError):
            await store.put("packs/p", b"x")
        with pytest.raises(StoreError):
            await store.upload("packs/p", size=1)

    using(writable(root), work)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_may_look(tmp_path: Path, umask: int) -> None:
    """Files have mode 0600 and folders 0700, whatever the umask."""
    root = tmp_path / "new" / "run"

    async def work(store: Store) -> None:
        await store.put("log/0.json", b"x", create=True)
        await store.put("index/i", b"x")
        await upload(store, "packs/p", BLOB)

    before = os.umask(umask)
    try:
        using(writable(root), work)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [root.parent, root, *root.rglob("*")]}
    folders = {"new", "run", "log", "index", "packs"}
    assert modes == {name: 0o700 if name in folders else 0o600 for name in modes}
    assert folders | {"0.json", "i", "p"} <= modes.keys()


def test_a_folder_that_may_not_be_written(root: Path) -> None:
    """It can be read all the same; writing is a StoreError that says what to check."""
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; see the read-only mount")
    using(writable(root), lambda store: store.put("log/0.json", b"x"))
    for folder in (root / "log", root):
        folder.chmod(0o500)
    try:
        using(lambda: LocalStore(f"file://{root}"), _refused)
    finally:
        for folder in (root, root / "log"):
            folder.chmod(0o700)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """The same, on a mount that is read-only."""
    with volume(tmp_path, "tmpfs", 4) as place:
        root = place.path / "store"
        using(writable(root), lambda store: store.put("log/0.json", b"x"))
        subprocess.run(["mount", "-o", "remount,ro", str(place.path)], check=True)
        using(lambda: LocalStore(f"file://{root}"), _refused)
        using(writable(root), _refused)  # the folder is there: opening it for writing changes nothing yet
        with pytest.raises(StoreError, match="read-only"):
            LocalStore(f"file://{place.path}/another", writable=True)


async def _refused(store: Store) -> None:
    assert await keys(store) == ["log/0.json"]
    assert bytes(await store.get("log/0.json")) == b"x"
    calls: list[Awaitable[object]] = [
        store.put("log/1.json", b"x", create=True),
        store.put("packs/p", b"x"),
        store.upload("log/p", size=1),
        store.delete("log/0.json"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="not allowed"):
            await call


def test_a_url_that_is_a_file(tmp_path: Path) -> None:
    """A place that is a file, or lies below one, is refused for writing, and is no run when read."""
    (tmp_path / "file").write_bytes(b"x")
    for name in ("file", "file/below"):
        with pytest.raises(StoreError):
            open_store(tmp_path / name, writable=True)

        async def work(store: Store) -> None:
            for call in (store.get("FORMAT.json"), store.head("FORMAT.json")):
                with pytest.raises(StoreError):
                    await call

        using(partial(open_store, tmp_path / name), work)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_store_opened_for_reading_makes_nothing(root: Path) -> None:
    """Looking at a place that is not there leaves it so."""

    async def work(store: Store) -> None:
        assert await keys(store) == []
        with pytest.raises(NotFoundError):
            await store.get("FORMAT.json")

    using(partial(open_store, root), work)
    assert not root.exists()


def test_a_folder_made_at_the_same_time(root: Path) -> None:
    """Two stores that make the same place, and the same folders in it, do not get in each other's way."""

    async def main() -> None:
        async with opened(writable(root)) as a, opened(writable(root)) as b:
            await asyncio.gather(*(s.put(f"log/{n}-{i}", b"x") for n, s in enumerate((a, b)) for i in range(10)))
            assert len(await keys(a)) == 20

    asyncio.run(main())


def test_descriptors_are_given_back(root: Path) -> None:
    """After closing, the process has as many open files as before, also when calls failed on the way."""

    async def work(store: Store) -> None:
        for i in range(30):
            await upload(store, f"packs/{i}", BLOB)
            await store.get(f"packs/{i}", start=0, length=len(BLOB))
            with pytest.raises(StoreError):
                await store.get(f"packs/{i}", start=0, length=len(BLOB) + 1)
            with pytest.raises(ExistsError):
                await store.upload(f"packs/{i}", size=1)
            target = await store.upload(f"packs/{i}x", size=10)
            await target.abort()

    using(writable(root), work)  # imports and pools first
    for path in (root / "packs").iterdir():
        path.unlink()
    before = len(os.listdir("/proc/self/fd"))
    using(writable(root), work)
    assert len(os.listdir("/proc/self/fd")) <= before


# -- URLs --


def test_unknown_schemes_name_what_there_is() -> None:
    """The message says which scheme is unknown, and which are known."""
    with pytest.raises(UsageError, match=r"no store is installed for gopher://.*file.*memory"):
        open_store("gopher://old/run")


@pytest.mark.parametrize("url", ["", "file://", "memory://", "s3://"])
def test_a_url_without_a_place(url: str) -> None:
    """Nothing after the scheme is a mistake, and the message says what to write."""
    with pytest.raises(UsageError, match="file:///"):
        normalise(url)


def test_paths_and_urls_of_one_folder_are_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path, an absolute one, a Path and a URL give the same URL."""
    monkeypatch.chdir(tmp_path)
    expected = f"file://{tmp_path}/run"
    assert {normalise(x) for x in ("run", "./run", f"{tmp_path}/run", tmp_path / "run", expected, f"{expected}/")} == {
        expected
    }


def test_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the user's folder, with and without a scheme."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert normalise("~/run") == normalise("file://~/run") == "file:///home/someone/run"


def test_errors_are_ours(root: Path) -> None:
    """No call lets the operating system's own error through."""

    class Broken(Disk):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            raise OSError(5, "broken")

        def unlink(self, path: str) -> None:
            raise OSError(5, "broken")

    async def work(store: Store) -> None:
        calls: list[Awaitable[object]] = [
            store.put("a", b"x"),
            store.put("log/a", b"x", create=True),
            store.upload("b", size=1),
            store.get("a"),
            store.get("a", start=0, length=1),
            store.delete("a"),
        ]
        for call in calls:
            with pytest.raises(CheckpointError) as caught:
                await call
            assert isinstance(caught.value, StoreError) and caught.value.retryable

    using(lambda: LocalStore(f"file://{root}", writable=True, disk=Broken()), work)
