"""The contract of stores (`ckpt.store.Store`) for every store, and additional guarantees of the local one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.core.checkpoint.commits import check_empty
from ckpt.errors import CheckpointError, ExistsError, FormatError, NotFoundError, StoreError, UsageError
from ckpt.store import PAGE, Buffer, ObjectInfo, Store, check_key, normalise, open_store, remember_options
from ckpt.testing import StoreTests, keys
from ckpt.tools.maintain.find_runs import runs_below
from ckpt_backends.disk import Disk
from ckpt_backends.limit import Limit
from ckpt_backends.local import LocalStore
from ckpt_backends.memory import MemoryStore
from ckpt_backends.remote import RemoteStore
from ckpt_backends.retry import Retry
from ckpt_backends.s3 import S3Store
from s3_server import MotoServer, storage_options

Open = Callable[[], Store]


class Tiny(Disk):
    """A disk that writes one page or half of a smaller piece per call, and reads a page or a thousand bytes."""

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return super().pwrite(fd, view[: PAGE if len(view) > PAGE else max(1, len(view) // 2)], offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return super().preadv(fd, view[: min(len(view), PAGE if len(view) >= PAGE else 1000)], offset)


STORES: dict[str, Callable[[str], Store]] = {
    "memory": lambda url: MemoryStore(),
    "local": lambda url: LocalStore(url, writable=True),
    "local, through the page cache": lambda url: LocalStore(url, writable=True, direct=False),
    "local, tiny reads and writes": lambda url: LocalStore(url, writable=True, disk=Tiny()),
}


DECORATORS: dict[str, Callable[[Store], Store]] = {
    "bare": lambda store: store,
    "retried and limited": lambda store: Retry(Limit(store, bytes_per_s=1e9)),
}
ENGINES = ["s3fs", "obstore"]
CASES = [*((store, "bare") for store in STORES), ("local", "retried and limited")]


class TestStores(StoreTests):
    """Every store of this machine, and one of them decorated."""

    @pytest.fixture(autouse=True, params=CASES, ids=" ".join)
    def place(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        store, decorator = request.param
        self.open, self.decorate = partial(STORES[store], f"file://{tmp_path}/store"), DECORATORS[decorator]
        self.many = 1500 if (store, decorator) == ("local", "bare") else 50

    def make(self) -> Store:
        return self.decorate(self.open())

    def reopen(self, store: Store) -> Store:
        inner = undecorated(store)
        if isinstance(inner, MemoryStore):
            return self.decorate(MemoryStore(objects=inner.objects))
        return self.make()


def undecorated(store: Store) -> Store:
    while isinstance(store, (Retry, Limit)):
        store = store.store
    return store


@pytest.fixture(scope="session")
def bucket() -> Iterator[Callable[[str], str]]:
    """Return a function that makes the URL of an empty run on a local S3 server, for an engine."""
    with MotoServer() as server:
        name = server.make_bucket("bucket")
        number = itertools.count()

        def place(engine: str) -> str:
            url = f"s3://{name}/runs/run-{next(number)}"
            remember_options(url, storage_options(server.url) | {"engine": engine})
            return url

        yield place


class TestS3(StoreTests):
    """S3 with both libraries for data files, one bare and the other decorated as by default."""

    has_unfinished = True
    creates_uploads = False
    many = 50  # pages: test_long_listing_continues_on_the_next_page

    @pytest.fixture(autouse=True, params=[("s3fs", "bare"), ("obstore", "retried and limited")], ids=ENGINES)
    def place(self, request: pytest.FixtureRequest, bucket: Callable[[str], str]) -> None:
        engine, decorator = request.param
        self.url, self.decorate = bucket(engine), DECORATORS[decorator]

    def make(self) -> Store:
        return self.decorate(S3Store(self.url, writable=True))


class TestDirectoryBucket(StoreTests):
    """S3 Express on a local server that rejects what AWS rejects there and lists in no order."""

    has_unfinished = True
    creates_uploads = False
    many = 50

    @pytest.fixture(autouse=True)
    def place(self, directory_bucket: Callable[[str], str]) -> None:
        self.url = directory_bucket(secrets.token_hex(8))

    def make(self) -> Store:
        return S3Store(self.url, writable=True)


@pytest.fixture(scope="session")
def directory_bucket() -> Iterator[Callable[[str], str]]:
    """Return a function that makes the URL of a folder in a local directory bucket."""
    with MotoServer() as server:
        bucket = f"s3://{server.make_bucket('runs--use1-az4--x-s3')}"

        def place(folder: str) -> str:
            remember_options(f"{bucket}/{folder}", storage_options(server.url))
            return f"{bucket}/{folder}"

        yield place


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("list_objects_v2", {"Prefix": "run/log/0"}),
    ("list_objects_v2", {"Prefix": "run/", "StartAfter": "run/log/0"}),
    ("list_objects_v2", {"Prefix": "run/", "Delimiter": "-"}),
    ("list_objects", {"Prefix": "run/"}),
    ("list_multipart_uploads", {"Prefix": "run/log/0"}),
    ("list_multipart_uploads", {"Prefix": "run/", "KeyMarker": "run/", "UploadIdMarker": "1"}),
    ("put_object", {"Key": "run/log/9", "ACL": "private"}),
]


def test_negative_control_directory_bucket_is_strict(directory_bucket: Callable[[str], str]) -> None:
    """The server is as strict as the AWS reference and lists unsorted, so passing its tests is meaningful."""

    async def work(store: Store) -> None:
        assert isinstance(store, S3Store)
        for number in range(20):
            await store.put(f"log/{number:02d}", b"")
        answer = await store.call("list_objects_v2", "cannot list", Prefix=store.prefix)
        names = [found["Key"] for found in answer["Contents"]]
        assert answer["IsTruncated"] and names != sorted(names)
        for method, arguments in REFUSED:
            with pytest.raises(StoreError, match=r"NotImplemented|InvalidArgument"):
                await store.call(method, "refused", **arguments)

    using(lambda: S3Store(directory_bucket(secrets.token_hex(8)), writable=True), work)


def test_obstore_is_rejected_for_directory_buckets() -> None:
    """The error names the unsupported bucket type. Without the option, the other engine is used."""
    url = "s3://runs--use1-az4--x-s3/elsewhere"
    assert S3Store(url).engine == "s3fs"
    remember_options(url, {"engine": "obstore"})
    with pytest.raises(UsageError, match="a directory bucket"):
        S3Store(url)


class TestFsspec(StoreTests):
    """Any other fsspec file system, here its own one in memory."""

    creates_uploads = False

    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.url = f"memory://{secrets.token_hex(8)}"

    def make(self) -> Store:
        return RemoteStore(self.url, writable=True)


# -- negative controls: a broken promise is detected --


class Overwrites(MemoryStore):
    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await super().put(key, data)


class ChecksFirst(MemoryStore):
    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        there = key in self.objects
        await asyncio.sleep(0)
        if create and there:
            raise ExistsError(f"{key} exists")
        await super().put(key, data)


class GivesLess(MemoryStore):
    async def get(self, key: str, *, start: int = 0, length: int | None = None, **more: Any) -> memoryview:
        return (await super().get(key))[start : None if length is None else start + length]


class ListsAll(MemoryStore):
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return super().list()


class ListsHalfNames(MemoryStore):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for key in [key for key in self.objects if key.startswith(prefix)]:
            yield ObjectInfo(key, len(self.objects[key]))


class ListsAPage(MemoryStore):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in [info async for info in super().list(prefix)][:1000]:
            yield info


class ListsTwice(MemoryStore):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for number, info in enumerate([info async for info in super().list(prefix)]):
            for _ in range(2 if number == 1000 else 1):  # the last one of a page, and the first one of the next
                yield info


class DeletesAPage(MemoryStore):
    async def delete_many(self, keys: Sequence[str]) -> None:
        await super().delete_many(keys[:1000])


class ShowsEarly(MemoryStore):
    async def upload(self, key: str, *, size: int) -> Any:
        target = await super().upload(key, size=size)
        await target.finish()
        return target


BROKEN: dict[type[MemoryStore], str] = {
    Overwrites: "test_put_replaces_only_without_create",
    ChecksFirst: "test_only_one_of_many_creators_succeeds",
    GivesLess: "test_range_without_length_reads_to_the_end",
    ListsAll: "test_list_returns_only_objects_in_the_folder",
    ListsHalfNames: "test_list_returns_only_objects_in_the_folder",
    ListsAPage: "test_list_returns_every_page",
    ListsTwice: "test_list_returns_every_page",
    DeletesAPage: "test_delete_many_deletes_all_objects",
    ShowsEarly: "test_aborted_upload_leaves_nothing",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_negative_control_broken_promise_is_detected(broken: type[MemoryStore]) -> None:
    """The test of the promise fails, and passes for a store that keeps it."""

    class Checked(StoreTests):
        kind = MemoryStore

        def make(self) -> Store:
            return self.kind()

        def reopen(self, store: Store) -> Store:
            return self.kind(objects=cast(MemoryStore, store).objects)

    suite = Checked()
    getattr(suite, BROKEN[broken])()
    suite.kind = broken
    with pytest.raises((AssertionError, CheckpointError, pytest.fail.Exception)):
        getattr(suite, BROKEN[broken])()


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


# -- listings have no order --


def test_run_is_recognized_in_any_listing_order() -> None:
    """A run that another rank has just created does not count as foreign files. Control: other files do."""
    ours = MemoryStore(objects={"FORMAT.json": b"", **{f"log/{number:012d}.json": b"" for number in range(9)}})
    theirs = MemoryStore(objects={f"photos/{number}.jpg": b"" for number in range(9)})
    for _ in range(10):
        asyncio.run(check_empty(ours))
        with pytest.raises(FormatError, match="it has photos/"):
            asyncio.run(check_empty(theirs))


def test_runs_in_a_bucket_are_found_in_any_order() -> None:
    """Folders within a run are not runs, whether their names sort before or after `FORMAT.json`."""
    url = f"memory://{secrets.token_hex(8)}"
    names = ["b/within/FORMAT.json", "b/A/FORMAT.json", "b/FORMAT.json", "b1/FORMAT.json", "a/deep/FORMAT.json", "a/x"]

    async def work(store: Store) -> None:
        for name in names:
            await store.put(name, b"")
        assert await runs_below(url) == [f"{url}/{run}" for run in ("a/deep", "b", "b1")]

    using(lambda: RemoteStore(url, writable=True), work)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_valid_key_stays_below_the_root(key: str) -> None:
    """Any key that passes the check names a path below the root, without hidden parts."""
    try:
        check_key(key)
    except UsageError:
        return
    path = os.path.normpath(f"/root/of/store/{key}")
    assert path == f"/root/of/store/{key}" and path.startswith("/root/of/store/")
    assert not any(piece.startswith(".") for piece in key.split("/"))


# -- the local store --


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def writable(root: Path) -> Open:
    return lambda: LocalStore(f"file://{root}", writable=True)


def test_temporary_and_foreign_names_are_not_listed(root: Path) -> None:
    """Incomplete files of a crash, hidden files, links and pipes are not listed."""

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


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    """The target of a link with an object's name is neither read nor written."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)

    async def work(store: Store) -> None:
        await store.put("data/other", b"x")
        (root / "data" / "p").symlink_to(secret)
        for call in (store.get("data/p"), store.get("data/p", start=0, length=6), store.upload("data/p", size=1)):
            with pytest.raises(StoreError):
                await call
        with pytest.raises(ExistsError):
            await store.put("data/p", b"x", create=True)
        await store.put("data/p", b"mine")  # replaces the link itself
        assert secret.read_bytes() == b"secret" * 1000
        assert bytes(await store.get("data/p")) == b"mine"

    using(writable(root), work)


def test_linked_folder_accepts_no_files(root: Path, tmp_path: Path) -> None:
    """A folder of the run that is a link elsewhere accepts no files."""
    (tmp_path / "elsewhere").mkdir()
    root.mkdir()
    (root / "data").symlink_to(tmp_path / "elsewhere")

    async def work(store: Store) -> None:
        with pytest.raises(StoreError):
            await store.put("data/p", b"x")
        with pytest.raises(StoreError):
            await store.upload("data/p", size=1)

    using(writable(root), work)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_store_opened_for_reading_creates_nothing(root: Path) -> None:
    async def work(store: Store) -> None:
        assert await keys(store) == []
        with pytest.raises(NotFoundError):
            await store.get("FORMAT.json")

    using(partial(open_store, root), work)
    assert not root.exists()


def test_checkpoint_folder_is_deleted_with_its_last_file(root: Path) -> None:
    """Another process may delete the folder while it is empty. A write then creates it again."""
    folder = root / "steps" / "000000001.1-0badcafe"

    class Racing(Disk):
        """Deletes the empty folder right before a file is created in it."""

        armed = True

        def open(self, path: str, flags: int, mode: int = 0o666) -> int:
            if flags & os.O_CREAT and self.armed and folder.is_dir():
                self.armed = False
                folder.rmdir()
            return super().open(path, flags, mode)

    async def work() -> None:
        disk = Racing()
        store, other = (LocalStore(f"file://{root}", writable=True, disk=one) for one in (disk, Disk()))
        keys = [f"steps/{folder.name}/{name}" for name in ("rank-00000.safetensors", "rank-00000.json")]
        upload = await store.upload(keys[0], size=5)
        await upload.write_at(0, memoryview(b"bytes"))
        await upload.finish()
        assert not disk.armed
        await other.delete(keys[0])
        assert not folder.exists() and folder.parent.is_dir()
        disk.armed = True
        await store.put(keys[1], b"{}", create=True)
        assert not disk.armed and bytes(await other.get(keys[1])) == b"{}"
        await store.put("steps/notes", b"mine")
        await other.delete_many([keys[1], "steps/notes"])
        assert not folder.exists() and folder.parent.is_dir()
        for one in (store, other):
            await one.aclose()

    asyncio.run(work())


# -- URLs --


def test_unknown_scheme_error_lists_known_schemes() -> None:
    with pytest.raises(UsageError, match=r"no store is installed for gopher://.*file.*s3"):
        open_store("gopher://old/run")


@pytest.mark.parametrize("url", ["", "file://", "memory://", "s3://"])
def test_url_without_a_path_is_rejected(url: str) -> None:
    with pytest.raises(UsageError, match="file:///"):
        normalise(url)


def test_paths_and_urls_of_a_folder_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = f"file://{tmp_path}/run"
    assert {normalise(x) for x in ("run", "./run", f"{tmp_path}/run", tmp_path / "run", expected, f"{expected}/")} == {
        expected
    }


def test_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert normalise("~/run") == normalise("file://~/run") == "file:///home/someone/run"


@pytest.mark.parametrize("text", ["s3:/bucket/run", "s3:bucket/run", "s3//bucket/run", "S3:/bucket/run", "file:/data"])
def test_almost_a_url_is_not_a_folder(text: str) -> None:
    """pathlib would remove a slash and use a folder instead of a bucket, so such paths are rejected."""
    with pytest.raises(UsageError, match="two slashes"):
        normalise(text)
    assert normalise("S3://bucket/run/") == normalise("s3a://bucket/run") == "s3://bucket/run"
    assert normalise("s3run").startswith("file:///")


@pytest.mark.parametrize(
    "url", ["s3://bucket//run", "s3://bucket/a//run", "s3a://bucket/./run", "gs://bucket/a/../run", "az://box//a"]
)
def test_url_with_ambiguous_segment_is_rejected(url: str) -> None:
    """s3fs and obstore would write to different keys."""
    with pytest.raises(UsageError, match="empty segment"):
        normalise(url)


@pytest.mark.parametrize("url", ["s3://bucket/a b%20c#d?e", "memory:///run", "s3://bucket/...", "hdfs:///data/run"])
def test_url_with_plain_segments_is_kept(url: str) -> None:
    assert normalise(url) == url


def test_password_in_a_url_is_rejected_and_not_repeated() -> None:
    """It would appear in logs, run metrics and reports. A user name alone is allowed."""
    for url in ("s3://key:secret@bucket/run", "SFTP://me:secret@host/run"):
        with pytest.raises(UsageError, match="storage_options") as caught:
            normalise(url)
        assert "secret" not in str(caught.value)
    assert normalise("sftp://me@host/a:b") == "sftp://me@host/a:b"
