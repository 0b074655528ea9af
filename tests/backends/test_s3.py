"""The contract of object stores and the additions of S3, tested on a local server with faults on demand.

Unless stated otherwise, each test runs with both libraries for data files: s3fs and obstore.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import random
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from ckpt.errors import AccessError, CorruptError, ExistsError, FullError, NotFoundError, StoreError, UsageError
from ckpt.store import Store, open_store, remember_options
from ckpt.testing import keys, pieces
from ckpt_backends.remote import RemoteStore
from ckpt_backends.s3 import S3Store
from ckpt_backends.s3_upload import MAX_PARTS, part_size
from s3_server import REGION, FaultProxy, MotoServer, storage_options

ENGINES = ("s3fs", "obstore")
RUN = "s3://bucket/a/run1"
SECRET = "a-very-secret-secret"
PART = 5 << 20  # the minimum of S3
SIZE = (12 << 20) + 7  # two and a half parts


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="module")
def proxy_of_all(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxy_of_all: FaultProxy, moto: MotoServer) -> FaultProxy:
    """Return a proxy of an empty bucket, without faults."""
    moto.reset()
    moto.make_bucket("bucket")
    proxy_of_all.clear()
    return proxy_of_all


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignore the S3 configuration of this machine."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("remote_upload", "s3_upload"):
        monkeypatch.setattr(f"ckpt_backends.{module}.PART", PART)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Using = Callable[[Callable[[S3Store], Awaitable[None]]], None]


def using(url: str, work: Callable[[Any], Awaitable[None]], options: dict[str, Any]) -> None:
    """Run `work` with the undecorated store of a URL."""
    remember_options(url, options)

    async def main() -> None:
        store = S3Store(url)
        try:
            await work(store)
        finally:
            await store.aclose()

    asyncio.run(main())


@pytest.fixture
def run(proxy: FaultProxy, engine: str) -> Using:
    """Return a function that runs work with the store of a run behind the proxy."""
    options = storage_options(proxy.url) | {"engine": engine, "secret": SECRET}
    return lambda work: using(RUN, work, options)


def admin(moto: MotoServer) -> Any:
    """Return a separate client of the server."""
    return boto3.client(
        "s3", endpoint_url=moto.url, region_name=REGION, aws_access_key_id="other", aws_secret_access_key="other"
    )


async def upload(store: Store, key: str, data: bytes) -> None:
    """Upload like the library, with eight parts in flight."""
    target = await store.upload(key, size=len(data))
    window = asyncio.Semaphore(8)

    async def write(a: int, b: int) -> None:
        async with window:
            await target.write_at(a, memoryview(data)[a:b])

    try:
        await asyncio.gather(*(write(a, b) for a, b in pieces(target.part, len(data))))
        await target.finish()
    except BaseException:
        await target.abort()
        raise


async def raised(call: Awaitable[object]) -> Exception:
    with pytest.raises(Exception) as caught:
        await call
    return caught.value


# -- large objects --


def test_uploaded_parts_are_read_back_bit_exact(run: Using) -> None:
    data = random.Random(1).randbytes(SIZE)

    async def work(store: S3Store) -> None:
        await upload(store, "data/p", data)
        assert (await store.head("data/p")).size == SIZE
        assert await store.get("data/p") == data
        for start, length in ((PART - 1, 2), (1, SIZE - 1), (SIZE - 5, 5), (12_345, 10 << 20)):
            assert await store.get("data/p", start=start, length=length) == data[start : start + length]
        assert await store.unfinished() == []

    run(work)


def test_parts_grow_with_the_object() -> None:
    """Parts have the usual size unless S3's limit on their number requires larger ones."""
    assert part_size(0) == part_size(MAX_PARTS * PART) == PART
    for size in (MAX_PARTS * PART + 1, 1 << 40, 5 << 40):
        assert -(-size // part_size(size)) <= MAX_PARTS and part_size(size) % (1 << 20) == 0


def test_unfinished_uploads_are_dropped(run: Using, moto: MotoServer) -> None:
    """Uploads of a dead process below our root are dropped unless they are wanted. Those of run10 are not seen."""
    client = admin(moto)
    for key in ("a/run1/data/old", "a/run1/data/wanted", "a/run10/data/x", "a/run1"):
        client.create_multipart_upload(Bucket="bucket", Key=key)

    async def work(store: S3Store) -> None:
        target = await store.upload("data/now", size=SIZE)
        await target.write_at(0, memoryview(bytes(PART)))
        seen: list[str] = []
        wanted = {"data/wanted", "data/now"}
        assert await store.drop_uploads(lambda key: seen.append(key) or key in wanted) == 1  # type: ignore[func-returns-value]
        assert set(seen) <= {"data/old", *wanted} and {"data/old", "data/wanted"} <= set(seen)
        await target.abort()

    run(work)
    left = {found["Key"] for found in client.list_multipart_uploads(Bucket="bucket")["Uploads"]}
    assert left == {"a/run1/data/wanted", "a/run10/data/x", "a/run1"}


def test_aborted_upload_leaves_nothing(run: Using, moto: MotoServer) -> None:
    """This holds with no part written, some, or one in flight. Control: without abort an upload remains."""

    async def work(store: S3Store) -> None:
        data = memoryview(bytes(SIZE))
        for written in (0, 1, 2):
            target = await store.upload(f"data/{written}", size=SIZE)
            for i in range(written):
                await target.write_at(i * PART, data[i * PART : (i + 1) * PART])
            await target.abort()
        target = await store.upload("data/cancelled", size=SIZE)
        writing = asyncio.ensure_future(target.write_at(0, data[:PART]))
        await asyncio.sleep(0.01)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await target.abort()
        assert await store.unfinished() == []

    run(work)
    client = admin(moto)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")
    client.create_multipart_upload(Bucket="bucket", Key="a/run1/data/forgotten")
    assert "Uploads" in client.list_multipart_uploads(Bucket="bucket")


def test_abort_does_not_wait_for_a_hanging_part(
    run: Using, proxy: FaultProxy, moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """abort() does not wait for the hanging part, and removes the upload before it returns."""
    monkeypatch.setattr("ckpt_backends.obstore.CLOSING_S", 0.2)
    monkeypatch.setattr("ckpt_backends.obstore.IN_FLIGHT", 1)  # otherwise obstore would wait for us instead of the part

    async def work(store: S3Store) -> None:
        proxy.fail("hang", method="PUT", match="partNumber=1", count=9)
        target = await store.upload("data/p", size=SIZE)
        data = memoryview(bytes(SIZE))
        writing = [asyncio.ensure_future(target.write_at(a, data[a:b])) for a, b in pieces(target.part, SIZE)]
        while not proxy.hits():
            await asyncio.sleep(0.05)
        assert len(await store.unfinished()) == 1
        for call in writing:
            call.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        await target.abort()
        assert await store.unfinished() == [] and await keys(store) == []

    run(work)


def test_failing_upload_raises_and_leaves_nothing(run: Using, proxy: FaultProxy) -> None:
    """Nothing blocks forever: each write and `finish` raise with the reason, and nothing is left."""

    async def work(store: S3Store) -> None:
        proxy.fail("status", method="PUT", match="partNumber=", count=1000, code=403, s3_code="AccessDenied")
        error = await raised(upload(store, "data/p", bytes(SIZE)))
        assert isinstance(error, AccessError) and "AccessDenied" in str(error)
        assert await keys(store) == [] and await store.unfinished() == []

    run(work)


# -- small objects, listing --


class SmallPages(S3Store):
    """A store that lists at most ten keys per request."""

    async def call(self, method: str, what: str, **arguments: Any) -> Any:
        more = {"MaxKeys": 10} if method == "list_objects_v2" else {}
        return await super().call(method, what, **arguments, **more)


def test_long_listing_continues_on_the_next_page(proxy: FaultProxy) -> None:
    """21 keys are listed once each, in three requests of at most ten."""
    names = [f"log/{i:012d}.json" for i in range(21)]
    remember_options(RUN, storage_options(proxy.url))

    async def main() -> None:
        store = SmallPages(RUN)
        for name in names:
            await store.put(name, b"")
        before = proxy.requests()["GET"]
        assert await keys(store) == names
        assert proxy.requests()["GET"] == before + 3
        await store.aclose()

    asyncio.run(main())


def test_run_does_not_list_neighbors(run: Using, moto: MotoServer) -> None:
    """`a/run1` is neither `a/run10` nor the object `a/run1`. A bucket itself can also be a root."""
    client = admin(moto)
    for key in ("a/run10/log/0", "a/run1", "a/run1/", "a/run1-log/0", "b/log/0"):
        client.put_object(Bucket="bucket", Key=key, Body=b"")

    async def work(store: S3Store) -> None:
        await store.put("log/1", b"")
        assert await keys(store) == ["log/1"]

    run(work)

    async def whole(store: S3Store) -> None:
        assert "a/run10/log/0" in await keys(store) and "a/run1/log/1" in await keys(store)

    using("s3://bucket", whole, storage_options(moto.url))


def test_delete_many_raises_for_failed_keys(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error for one key in a response with status 200 is raised. A key that is already gone is not an error."""

    async def work(store: S3Store) -> None:
        for code, kind in (("AccessDenied", AccessError), ("InternalError", StoreError), ("NoSuchKey", None)):

            async def answer(*_: Any, code: str = code, **__: Any) -> Any:
                return {"Errors": [{"Key": "a/run1/x", "Code": code, "Message": "no"}]}

            monkeypatch.setattr(store, "call", answer)
            if kind is None:
                await store.delete_many(["x", "y"])
            else:
                error = await raised(store.delete_many(["x", "y"]))
                assert type(error) is kind and code in str(error) and "run1/x" in str(error)
            monkeypatch.undo()

    using(RUN, work, storage_options(proxy.url))


def test_delete_many_works_without_bulk_requests(proxy: FaultProxy) -> None:
    """A server without bulk deletion gets single requests, and the bulk request is not repeated."""

    async def work(store: S3Store) -> None:
        proxy.fail("status", method="POST", match="delete", count=9, code=501, s3_code="NotImplemented")
        for i in range(5):
            await store.put(f"x{i}", b"")
        await store.delete_many(["x0", "x1"])
        await store.delete_many(["x2", "x3", "missing"])
        assert await keys(store) == ["x4"] and len(proxy.hits()) == 1

    using(RUN, work, storage_options(proxy.url))


# -- errors --

REFUSALS = [
    (403, "AccessDenied", "Allow"),
    (403, "SignatureDoesNotMatch", "secret key"),
    (400, "ExpiredToken", "Renew"),
    (301, "PermanentRedirect", "region"),
    (404, "NoSuchBucket", "[Cc]reate the bucket"),
    (403, "SomethingNew", "Allow"),
]

MEANINGS = [
    (412, "PreconditionFailed", ExistsError, False),
    (409, "ConditionalRequestConflict", StoreError, True),
    (409, "SomethingNew", StoreError, False),
    (507, "InsufficientStorage", FullError, False),
    (403, "QuotaExceeded", FullError, False),
    (503, "SlowDown", StoreError, True),
    (429, "TooManyRequests", StoreError, True),
    (400, "BadDigest", StoreError, True),
    (400, "SomethingNew", StoreError, False),
    (404, "NoSuchKey", NotFoundError, False),
]


async def each_call(store: S3Store) -> list[Exception]:
    """Return what every kind of request raises."""
    calls = (
        store.put("log/x", b"x", create=True),
        store.get("log/x"),
        store.get("log/x", start=0, length=5),
        keys(store),
        store.delete_many(["log/x"]),
        upload(store, "data/small", b"x"),
    )
    return [await raised(call) for call in calls]


@pytest.mark.parametrize(("status", "code", "advice"), REFUSALS, ids=[code for _, code, _ in REFUSALS])
def test_access_errors_have_advice(run: Using, proxy: FaultProxy, status: int, code: str, advice: str) -> None:
    """Every call raises AccessError with advice, without a retry, after one request."""

    async def work(store: S3Store) -> None:
        proxy.fail("status", count=1000, code=status, s3_code=code)
        for error in await each_call(store):
            assert type(error) is AccessError and not error.retryable
            with pytest.raises(AccessError, match=advice):
                raise error
            assert "bucket/a/run1" in str(error) and SECRET not in str(error)
            assert error.__cause__ is None and error.__suppress_context__

    run(work)


@pytest.mark.parametrize(("status", "code", "kind", "retryable"), MEANINGS, ids=[f"{s}-{c}" for s, c, _, _ in MEANINGS])
def test_error_codes_set_type_and_retryable(
    run: Using, proxy: FaultProxy, status: int, code: str, kind: type[StoreError], retryable: bool
) -> None:
    """The code decides, or the status if the code is unknown, also about `retryable`."""

    async def work(store: S3Store) -> None:
        proxy.fail("status", method="PUT", count=1000, code=status, s3_code=code)
        for call in (store.put("log/x", b"x", create=True), upload(store, "data/small", b"x")):
            error = await raised(call)
            assert isinstance(error, kind) and error.retryable is retryable
        assert len(proxy.hits()) == 2

    run(work)


@pytest.mark.parametrize("kind", ["reset", "truncate", "short", "status"])
def test_drivers_never_retry(run: Using, proxy: FaultProxy, kind: str) -> None:
    """s3fs, botocore and obstore never retry by themselves, and incomplete responses are never returned."""

    async def work(store: S3Store) -> None:
        await store.put("x", bytes(9000))
        calls = (store.get("x"), store.get("x", start=10, length=5000))
        for call in calls:
            proxy.clear()
            proxy.fail(kind, method="GET", count=1, after=100)
            error = await raised(call)
            assert isinstance(error, StoreError) and error.retryable, repr(error)
            assert proxy.requests()["GET"] == 1

    run(work)


def test_missing_bucket_raises_access_error(engine: str, moto: MotoServer) -> None:
    """The bucket is never created, and the error is not that of a missing object."""

    async def work(store: S3Store) -> None:
        for call in (store.get("x"), store.get("x", start=0, length=5), store.put("x", b""), upload(store, "p", b"x")):
            with pytest.raises(AccessError, match=r"[Cc]reate the bucket"):
                await call

    using("s3://no-such-bucket/run", work, storage_options(moto.url) | {"engine": engine})
    assert "no-such-bucket" not in {found["Name"] for found in admin(moto).list_buckets()["Buckets"]}


def test_missing_credentials_raise_access_error(engine: str, moto: MotoServer) -> None:
    """The error names possible sources of credentials. An anonymous caller needs none."""

    async def refused(store: S3Store) -> None:
        with pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
            await store.put("x", b"")
        with pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
            await store.get("x", start=0, length=5)

    moto.reset()
    moto.make_bucket("bucket")
    options: dict[str, Any] = {"endpoint_url": moto.url, "engine": engine}
    using(RUN, refused, options)

    async def anonymous(store: S3Store) -> None:
        with pytest.raises((NotFoundError, AccessError), match=r"NoSuchKey|AccessDenied"):
            await store.get("x", start=0, length=5)

    using(RUN, anonymous, options | {"anon": True})


def test_messages_have_no_secrets() -> None:
    """Secrets of options and environment, queries of signed URLs and passwords are removed, and the rest is kept."""
    url = f"s3://bucket/{random.random()}"
    remember_options(url, {"key": "my-access-key", "secret": SECRET, "client_kwargs": {"aws_session_token": "t" * 40}})
    text = f"PUT https://me:hunter22@host/b/k?X-Amz-Signature=abc&x=1 with {SECRET} and {'t' * 40}, status 403"
    assert S3Store(url).clean(text) == "PUT https://host/b/k with *** and ***, status 403"
    for secret in (SECRET, "hunter22", "Signature=abc", "t" * 40):
        assert secret in text


def test_errors_of_other_drivers_are_translated() -> None:
    """Errors are translated by type, errno or status, including both spellings of status 412 in s3fs."""

    class Answer(Exception):
        def __init__(self, status: int) -> None:
            super().__init__(f"status {status}")
            self.status = status

    store = RemoteStore("memory://errors")
    cases: list[tuple[Exception, type[StoreError], bool]] = [
        (FileExistsError("x"), ExistsError, False),
        (OSError(22, "PreconditionFailed: at least one"), ExistsError, False),
        (PermissionError("no"), AccessError, False),
        (OSError(28, "full"), FullError, False),
        (TimeoutError(), StoreError, True),
        (ConnectionResetError(), StoreError, True),
        (Answer(404), NotFoundError, False),
        (Answer(401), AccessError, False),
        (Answer(412), ExistsError, False),
        (Answer(503), StoreError, True),
        (Answer(501), StoreError, False),
        (ValueError("what?"), StoreError, False),
    ]
    for error, kind, retryable in cases:
        found = store.translated(error, "cannot")
        assert isinstance(found, kind) and found.retryable is retryable, error


# -- settings --


def test_encryption_reaches_every_request(proxy: FaultProxy, moto: MotoServer) -> None:
    """`s3_additional_kwargs` apply to small and large objects, and are ignored by other requests."""
    extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "some-key", "ChecksumAlgorithm": "SHA256"}

    async def work(store: S3Store) -> None:
        assert store.engine == "s3fs"
        await store.put("small", b"x")
        await upload(store, "data/one", b"x")
        await upload(store, "data/many", bytes(SIZE))
        assert await store.get("data/many", start=PART, length=9) == bytes(9)
        await store.delete_many(["small"])

    using(RUN, work, storage_options(proxy.url) | {"s3_additional_kwargs": extra, "requester_pays": True})
    client = admin(moto)
    for key in ("data/one", "data/many"):
        assert client.head_object(Bucket="bucket", Key=f"a/run1/{key}")["ServerSideEncryption"] == "aws:kms"

    async def plain(store: S3Store) -> None:
        await store.put("plain", b"x")

    using(RUN, plain, storage_options(proxy.url))
    assert client.head_object(Bucket="bucket", Key="a/run1/plain").get("ServerSideEncryption") != "aws:kms"


def test_engine_follows_options_and_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore is used if it is installed and supports the options. An impossible choice is rejected."""

    def chosen(**options: Any) -> str:
        remember_options(RUN, options)
        return S3Store(RUN).engine

    assert chosen() == chosen(key="a", secret="b") == "obstore"
    assert chosen(engine="s3fs") == "s3fs"
    hindrances: dict[str, dict[str, Any]] = {
        "s3_additional_kwargs": {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        "requester_pays": {"requester_pays": True},
        "proxies": {"config_kwargs": {"proxies": {"https": "http://proxy:3128"}}},
    }
    for name, options in hindrances.items():
        assert chosen(**options) == "s3fs"
        with pytest.raises(UsageError, match=name):
            chosen(engine="obstore", **options)
    with pytest.raises(UsageError, match="engine"):
        chosen(engine="rocket")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "obstore" else find(name, *more)
    )
    assert chosen() == "s3fs"
    with pytest.raises(UsageError, match=r"everystep\[obstore\]"):
        chosen(engine="obstore")


def test_environment_sets_endpoint_and_credentials(
    monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy, moto: MotoServer, engine: str
) -> None:
    """Both engines use botocore's endpoint and credentials, also with the bucket in the host name."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    async def work(store: S3Store) -> None:
        await upload(store, "data/p", bytes(SIZE))
        assert await store.get("data/p", start=5, length=9) == bytes(9)

    using(RUN, work, {"engine": engine})
    assert proxy.requests()["PUT"] == 3


def test_obstore_uses_the_host_of_botocore() -> None:
    """obstore uses botocore's host, with the bucket in its name or in the path."""
    from ckpt_backends.obstore import _endpoint

    async def endpoint(bucket: str, **options: Any) -> tuple[str, bool]:
        remember_options(RUN, {"key": "k", "secret": "s"} | options)
        store = S3Store(RUN)
        await store.connected()
        found = await _endpoint(store._s3, bucket)
        await store.aclose()
        return found

    async def main() -> None:
        region = {"client_kwargs": {"region_name": "eu-west-1"}}
        assert await endpoint("bucket", **region) == ("https://bucket.s3.eu-west-1.amazonaws.com", True)
        assert await endpoint("dotted.name", **region) == ("https://s3.eu-west-1.amazonaws.com", False)
        assert await endpoint("bucket", endpoint_url="http://host:81/base") == ("http://host:81/base", False)
        virtual = {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}
        assert await endpoint("bucket", endpoint_url="https://host", **virtual) == ("https://bucket.host", True)

    asyncio.run(main())


def test_obstore_uses_renewed_credentials(proxy: FaultProxy) -> None:
    """obstore uses the current credentials, not those of the start."""

    async def work(store: S3Store) -> None:
        await store.put("x", b"x" * 9)
        assert store._data is not None
        count = 0

        class Credentials:
            async def get_frozen_credentials(self) -> Any:
                nonlocal count
                count += 1
                return await given.get_frozen_credentials()

        given, store._data._credentials = store._data._credentials, Credentials()
        await store.get("x", start=0, length=5)
        assert count == 1
        await upload(store, "data/p", bytes(SIZE))
        assert count >= 4

    using(RUN, work, storage_options(proxy.url) | {"engine": "obstore"})


def test_range_with_wrong_status_falls_back_to_s3fs(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server returns 200 for a range, s3fs reads it and obstore is not used for reads again, only for uploads."""
    from obstore.exceptions import GenericError

    count = 0

    async def not_partial(*_: Any, **__: Any) -> Any:
        nonlocal count
        count += 1
        raise GenericError("Generic S3 error: Received non-partial response when range requested")

    async def work(store: S3Store) -> None:
        await store.put("x", b"0123456789")
        monkeypatch.setattr("obstore.get_range_async", not_partial)
        for _ in range(3):
            assert bytes(await store.get("x", start=2, length=3)) == b"234"
        assert count == 1
        await upload(store, "data/p", bytes(SIZE))
        assert (await store.head("data/p")).size == SIZE

    using(RUN, work, storage_options(proxy.url) | {"engine": "obstore"})


def test_aclose_leaves_nothing_open(run: Using, engine: str, moto: MotoServer) -> None:
    """After `aclose`, also after errors, no warning about an open session follows. Control: without it one does."""

    def warned(work: Callable[[], None]) -> list[str]:
        gc.collect()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
            gc.collect()
        return [str(one.message) for one in caught if "nclosed" in str(one.message)]

    async def work(store: S3Store) -> None:
        await store.put("x", bytes(9000))
        await raised(store.get("missing"))
        await store.get("x", start=0, length=5)
        assert isinstance(await raised(store.get("x", limit=5)), CorruptError)
        await store.aclose()
        await store.aclose()

    assert warned(lambda: run(work)) == []

    def careless() -> None:
        async def forget() -> None:
            await S3Store(RUN).put("x", b"")

        asyncio.run(forget())

    assert warned(careless)


def test_missing_package_is_named() -> None:
    """The error names the missing package."""
    if importlib.util.find_spec("gcsfs") is not None:
        pytest.skip("gcsfs is installed")
    with pytest.raises(UsageError, match="gcsfs"):
        open_store("gs://bucket/run")


# -- other file systems --
