"""`Retry`: retryable errors are retried, nothing takes effect twice, and results stay correct."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from ckpt.errors import AccessError, CheckpointError, DeadlineError, ExistsError, FullError, NotFoundError, StoreError
from ckpt.store import Buffer, ObjectInfo, Store, Upload, remember_options
from ckpt.testing import in_virtual_time, keys, pieces
from ckpt_backends.memory import MemoryStore
from ckpt_backends.retry import Retry
from ckpt_backends.s3 import S3Store
from s3_server import FaultProxy, MotoServer, storage_options

LOST = "the call takes effect, and its reply is lost"


def busy(text: str = "slow down") -> StoreError:
    return StoreError(text, retryable=True)


class Scripted:
    """A store in memory. Each call and each listed key consumes an item of the script: None (nothing happens), an error
    instead of the call, LOST, or a function that runs before an error."""

    remote = True
    url = "scripted://bucket"

    def __init__(self, *script: object, resumable: bool = False) -> None:
        self.inner = MemoryStore()
        self.objects = self.inner.objects
        self.script = deque(script)
        self.resumable = resumable
        self.calls: list[str] = []
        self.closed = False

    async def _do(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(name)
        item = self.script.popleft() if self.script else None
        if isinstance(item, CheckpointError):
            raise item
        if callable(item):
            item()
            raise busy("another client was faster")
        result = await call()
        if item is LOST:
            raise busy("no answer")
        return result

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await self._do("put", lambda: self.inner.put(key, data, create=create))

    async def upload(self, key: str, *, size: int) -> ScriptedUpload:
        inner = await self._do("upload", lambda: self.inner.upload(key, size=size))
        return ScriptedUpload(self, inner)

    async def get(self, key: str, **more: Any) -> Any:
        return await self._do("get", lambda: self.inner.get(key, **more))

    async def head(self, key: str) -> Any:
        return await self._do("head", lambda: self.inner.head(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.calls.append("list")
        for info in sorted([info async for info in self.inner.list(prefix)], key=lambda info: info.key):
            item = self.script.popleft() if self.script else None
            if isinstance(item, CheckpointError):
                raise item
            yield info

    async def delete(self, key: str) -> None:
        await self._do("delete", lambda: self.inner.delete(key))

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self._do("delete_many", lambda: self.inner.delete_many(keys))

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> Any:
        return await self._do("drop_uploads", lambda: self.inner.drop_uploads(wanted))

    async def aclose(self) -> None:
        self.closed = True


class ScriptedUpload:
    part = 512

    def __init__(self, store: Scripted, inner: Upload) -> None:
        self._store, self._inner = store, inner
        self.resumable = store.resumable

    async def write_at(self, offset: int, view: memoryview) -> None:
        await self._store._do("write_at", lambda: self._inner.write_at(offset, view))

    async def finish(self) -> None:
        await self._store._do("finish", self._inner.finish)

    async def abort(self) -> None:
        await self._store._do("abort", self._inner.abort)


async def upload(store: Store) -> None:
    target = await store.upload("data/p", size=4)
    await target.write_at(0, memoryview(b"data"))
    await target.finish()


CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "put": lambda store: store.put("log/1", b"data"),
    "create": lambda store: store.put("log/1", b"data", create=True),
    "get": lambda store: store.get("log/0"),
    "get a range": lambda store: store.get("log/0", start=1, length=2),
    "head": lambda store: store.head("log/0"),
    "list": lambda store: keys(store),
    "delete": lambda store: store.delete("log/0"),
    "delete_many": lambda store: store.delete_many(["log/0", "none"]),
    "drop_uploads": lambda store: store.drop_uploads(lambda key: False),
    "upload": lambda store: store.upload("data/p", size=4),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[Store], Awaitable[object]]:
    return CALLS[request.param]


def run(store: Store, call: Callable[[Store], Awaitable[Any]], **settings: float) -> tuple[Any, float]:
    """Return the result of a call through Retry, and its duration in seconds."""

    async def main() -> tuple[Any, float]:
        result = await call(Retry(store, **settings))
        return result, asyncio.get_running_loop().time()

    return in_virtual_time(main())


def with_object(*script: object) -> Scripted:
    store = Scripted(*script)
    store.objects["log/0"] = b"there"
    return store


# -- retries --


def test_every_call_is_retried(call: Callable[[Store], Awaitable[object]]) -> None:
    """After retryable errors with pauses, each call has the same result as at first."""
    plain, failing = with_object(), with_object(busy(), DeadlineError("no answer"), busy())
    expected, _ = run(plain, call)
    result, took = run(failing, call)
    assert result == expected or hasattr(result, "finish")
    assert failing.objects == plain.objects
    assert len(failing.calls) == len(plain.calls) + 3
    assert 0 < took <= 0.2 + 0.4 + 0.8


@pytest.mark.parametrize("error", [StoreError("no"), AccessError("no"), FullError("no"), NotFoundError("no")])
def test_other_errors_are_raised_immediately(call: Callable[[Store], Awaitable[object]], error: StoreError) -> None:
    """An error that is not retryable is raised unchanged, without a second request or a pause."""
    store = with_object(error, busy())
    with pytest.raises(type(error)) as caught:
        run(store, call)
    assert caught.value is error and len(store.calls) == 1


def test_retries_end_after_the_budget(call: Callable[[Store], Awaitable[object]]) -> None:
    """When its time is over, the last error is raised, still retryable, with the number of tries and the time."""
    store = with_object(*[busy("the store is on fire")] * 10_000)

    async def main() -> None:
        with pytest.raises(StoreError, match=r"on fire \(tried \d+ times in 300 s\)") as caught:
            await call(Retry(store))
        assert caught.value.retryable
        assert asyncio.get_running_loop().time() == pytest.approx(300.0)

    in_virtual_time(main())
    assert 20 < len(store.calls) < 200


# -- create-if-absent --


async def create(store: Store) -> None:
    await store.put("log/0", b"ours", create=True)


def taken_by(data: bytes) -> tuple[Scripted, Callable[[], None]]:
    """Return a store, and a function that creates our object as another client."""
    store = Scripted()
    return store, lambda: store.objects.update({"log/0": data})


def creates_truthfully(retry: type[Retry]) -> None:
    """After a lost reply, our own object is a success, and another client's object is not."""

    async def main() -> None:
        store = Scripted(LOST)
        await create(retry(store))
        assert store.objects["log/0"] == b"ours"
        for other in (b"mine", b"ours, and more", b"our", b""):
            store, create_as_other = taken_by(other)
            store.script.extend([create_as_other])
            with pytest.raises(ExistsError):
                await create(retry(store))
            assert store.objects["log/0"] == other

    in_virtual_time(main())


def test_only_own_object_counts_as_success() -> None:
    """If the result of a conditional creation is unknown, the object is read back."""
    creates_truthfully(Retry)


class AlwaysOwn(Retry):
    async def _holds(self, key: str, data: Buffer) -> bool:
        return True


class NeverOwn(Retry):
    async def _holds(self, key: str, data: Buffer) -> bool:
        return False


@pytest.mark.parametrize("wrong", [AlwaysOwn, NeverOwn])
def test_negative_control_without_reading_back(wrong: type[Retry]) -> None:
    """The check detects a false success and a false failure."""
    with pytest.raises((ExistsError, pytest.fail.Exception)):
        creates_truthfully(wrong)


def test_object_found_at_first_try_is_not_own() -> None:
    """An equal object that exists at the first try belongs to another client. It is not read."""
    store = Scripted()
    store.objects["log/0"] = b"ours"
    with pytest.raises(ExistsError):
        run(store, create)
    assert store.calls == ["put"]


# -- listings --


def lists_once(retry: type[Retry]) -> Scripted:
    """Check that every key is returned once despite errors."""
    store = Scripted(None, None, busy(), None, busy(), busy(), None, busy())
    store.objects.update({f"log/{i}": b"x" for i in range(8)})
    found, _ = in_virtual_time(_listed(retry(store)))
    assert found == [f"log/{i}" for i in range(8)]
    return store


async def _listed(store: Store) -> tuple[list[str], float]:
    return await keys(store, "log/"), asyncio.get_running_loop().time()


def test_listing_returns_each_key_once_after_errors() -> None:
    """A listing has no order, so it starts again after each error."""
    assert lists_once(Retry).calls == ["list"] * 5


def test_negative_control_listing_with_repeated_keys() -> None:
    """Repeated keys are detected."""

    class Forgets(Retry):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            while True:
                try:
                    async for info in self.store.list(prefix):
                        yield info
                    return
                except StoreError:
                    pass

    with pytest.raises(AssertionError):
        lists_once(Forgets)


def test_listing_budget_restarts_with_each_key() -> None:
    """A long listing continues while each try returns a new key. Control: without new keys it fails."""
    store = Scripted(*(item for number in range(400) for item in [busy(), busy(), *[None] * number, busy()]))
    store.objects.update({f"log/{i:03d}": b"x" for i in range(400)})
    found, took = in_virtual_time(_listed(Retry(store, budget_s=20.0)))
    assert len(found) == 400 and took > 60.0
    store = Scripted(*[None, busy()] * 400)
    store.objects.update({"log/0": b"x", "log/1": b"x"})
    with pytest.raises(StoreError, match="tried"):
        in_virtual_time(_listed(Retry(store, budget_s=20.0)))


# -- uploads --


@pytest.mark.parametrize("resumable", [False, True])
def test_only_resumable_uploads_are_retried(resumable: bool) -> None:
    """Only resumable uploads send a range again. Others fail immediately, to be written under a new name."""
    for script in ([None, busy()], [None, None, busy()]):
        store = Scripted(*script, resumable=resumable)
        if resumable:
            run(store, upload)
            assert store.objects["data/p"] == b"data" and len(store.calls) == 4
        else:
            with pytest.raises(StoreError, match=r"(?m)slow down$"):
                run(store, upload)
            assert len(store.calls) == len(script)


def test_abort_never_raises() -> None:
    """abort() does not delay a failing save either."""

    async def main() -> None:
        for error in (busy(), AccessError("no"), NotFoundError("no such upload")):
            store = Scripted(None, error)
            target = await Retry(store).upload("data/p", size=4)
            await target.abort()
            assert asyncio.get_running_loop().time() == 0.0

    in_virtual_time(main())


# -- log messages --


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An outage logs one warning with the reason, whatever the number of calls, and one line when it ends."""
    caplog.set_level(logging.INFO, "ckpt")

    async def main() -> None:
        store = Scripted(*[busy("the disk is asleep")] * 40)
        retry = Retry(store)
        await asyncio.gather(*(retry.put(f"log/{i}", b"x") for i in range(5)))
        assert messages(caplog) == ["WARNING", "INFO"]
        for text in ("scripted://bucket", "the disk is asleep", "is reachable again"):
            assert text in caplog.text
        await retry.put("log/0", b"x")
        assert len(caplog.records) == 2
        store.script.extend([busy()])
        await retry.put("log/0", b"x")
        assert messages(caplog) == ["WARNING", "INFO"] * 2

    in_virtual_time(main())


# -- S3 behind a proxy that fails each kind of request in each way --

TIMEOUT_S = 0.4
FAULTS: dict[str, dict[str, Any]] = {
    "503": {"kind": "status", "code": 503, "s3_code": "SlowDown"},  # other codes: test_s3.py
    "timeout": {"kind": "hang"},
    "reset": {"kind": "reset"},
    "lost reply": {"kind": "lost_reply"},
    "late reply": {"kind": "late_reply", "s": TIMEOUT_S + 0.2},
    "truncated": {"kind": "truncate", "after": 10},
    "200 with an error": {"kind": "error_body"},
}
NO_BODY = FAULTS.keys() - {"truncated", "200 with an error"}  # of the response
DATA = b"0123456789" * 1000
LARGE = bytes(range(256)) * 4 * (6 << 10)  # 6 MiB, in parts of 5 MiB

Arm = Callable[[str, str], None]
"""Makes the next request with a method and a pattern in its path and query fail."""


async def _create(store: Store, key: str, arm: Arm) -> None:
    arm("PUT", key)
    await store.put(key, DATA, create=True)
    assert bytes(await store.get(key)) == DATA


async def _create_what_is_there(store: Store, key: str, arm: Arm) -> None:
    await store.put(key, DATA)
    arm("PUT", key)
    with pytest.raises(ExistsError):
        await store.put(key, b"other", create=True)
    assert bytes(await store.get(key)) == DATA


async def _get(store: Store, key: str, arm: Arm) -> None:
    await store.put(key, DATA)
    arm("GET", key)
    assert bytes(await store.get(key)) == DATA


async def _get_range(store: Store, key: str, arm: Arm) -> None:
    await store.put(key, DATA)
    arm("GET", key)
    assert bytes(await store.get(key, start=5, length=5000)) == DATA[5:5005]


async def _list(store: Store, key: str, arm: Arm) -> None:
    names = [f"{key}/{i}" for i in range(3)]
    for name in names:
        await store.put(name, b"x")
    arm("GET", "list-type=2")
    assert await keys(store, f"{key}/") == names


async def _delete_many(store: Store, key: str, arm: Arm) -> None:
    for i in range(3):
        await store.put(f"{key}/{i}", b"x")
    arm("POST", "delete")
    await store.delete_many([f"{key}/{i}" for i in range(3)])
    assert await keys(store, f"{key}/") == []


async def _write(store: Store, key: str, data: bytes) -> None:
    """Write like the library: a failed upload is written again under a new name."""
    for name in (key, f"{key}-again", f"{key}-and-again"):
        target = await store.upload(name, size=len(data))
        try:
            for a, b in pieces(target.part, len(data)):
                await target.write_at(a, memoryview(data)[a:b])
            await target.finish()
        except StoreError as error:
            assert error.retryable and not getattr(target, "resumable", False), error
            await target.abort()
        else:
            assert await store.get(name) == data
            return
    raise AssertionError("each of three uploads failed")


async def _begin_upload(store: Store, key: str, arm: Arm) -> None:
    arm("POST", f"{key}.*uploads")
    await _write(store, key, LARGE)


async def _upload_part(store: Store, key: str, arm: Arm) -> None:
    arm("PUT", f"{key}.*partNumber=1")
    await _write(store, key, LARGE)


async def _complete_upload(store: Store, key: str, arm: Arm) -> None:
    arm("POST", f"{key}.*uploadId=")
    await _write(store, key, LARGE)


async def _drop_an_upload(store: Store, key: str, arm: Arm) -> None:
    target = await store.upload(key, size=len(LARGE))
    await target.write_at(0, memoryview(LARGE)[: target.part])
    arm("DELETE", f"{key}.*uploadId=")
    await store.drop_uploads(lambda found: found != key)
    assert await store.drop_uploads(lambda found: found != key) == 0
    await target.abort()


REQUESTS: dict[Callable[[Store, str, Arm], Awaitable[None]], set[str]] = {
    _create: NO_BODY,
    _create_what_is_there: NO_BODY,
    _get: FAULTS.keys() - {"200 with an error"},  # its body is an ordinary object that only digests reject
    _get_range: FAULTS.keys() - {"200 with an error"},
    _list: set(FAULTS),
    _delete_many: set(FAULTS),
    _begin_upload: set(FAULTS),
    _upload_part: NO_BODY,
    _complete_upload: set(FAULTS),
    _drop_an_upload: NO_BODY,
}
PACKS = (_get_range, _begin_upload, _upload_part, _complete_upload)  # by obstore if installed
REPRESENTATIVE = {
    "s3fs": (_create, _create_what_is_there, _get, _list, _delete_many, _upload_part, _complete_upload),
    "obstore": (_get_range, _complete_upload),
}
"""One request of each kind that is built in its own way. The others run as `long`."""


def cases() -> Iterator[Any]:
    for engine, requests in {"s3fs": tuple(REQUESTS), "obstore": PACKS}.items():
        for request in requests:
            marks = () if request in REPRESENTATIVE[engine] else pytest.mark.long
            yield pytest.param(engine, request, id=f"{engine}-{request.__name__.strip('_')}", marks=marks)


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with MotoServer() as server, FaultProxy(server.url) as proxy:
        server.make_bucket("bucket")
        yield proxy


class TestFaults:
    """Each kind of request fails twice in each way, but takes effect once and reports the correct result."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("remote_upload", "s3_upload"):
            monkeypatch.setattr(f"ckpt_backends.{module}.PART", 5 << 20)

    def run(self, proxy: FaultProxy, engine: str, work: Callable[[Store], Awaitable[None]]) -> None:
        url = f"s3://bucket/runs/{secrets.token_hex(8)}"
        options = storage_options(proxy.url, read_timeout=TIMEOUT_S, connect_timeout=TIMEOUT_S)
        remember_options(url, options | {"engine": engine})

        async def main() -> None:
            store = S3Store(url, writable=True)
            try:
                await store.put("log/warm", b"x")
                await work(store)
            finally:
                await store.aclose()

        asyncio.run(main())

    @pytest.mark.parametrize(("engine", "request_"), list(cases()))
    def test_each_request_survives_each_fault(self, proxy: FaultProxy, engine: str, request_: Any) -> None:
        """Transient errors are hidden. A lost or late reply neither repeats the effect nor counts as a failure."""

        async def work(store: Store) -> None:
            for fault in sorted(REQUESTS[request_]):
                proxy.clear()
                key = f"{request_.__name__}/{fault}".replace(" ", "-").strip("_")
                try:
                    await request_(Retry(store, base_s=0.02, budget_s=20.0), key, partial(self.arm, proxy, fault))
                except Exception as error:
                    raise AssertionError(f"{fault}: {error!r}, after {proxy.paths()}") from error
                assert proxy.hits(), f"{fault} did not happen: {proxy.paths()}"

        self.run(proxy, engine, work)

    @staticmethod
    def arm(proxy: FaultProxy, fault: str, method: str, match: str) -> None:
        times = 1 if fault in ("timeout", "late reply") else 2  # these take long
        proxy.fail(**FAULTS[fault], method=method, match=match, count=times)

    def test_negative_control_without_retry(self, proxy: FaultProxy) -> None:
        """Without Retry each fault raises a retryable error."""

        async def work(store: Store) -> None:
            for fault in sorted(FAULTS):
                proxy.clear()
                request = _create if fault in NO_BODY else _list
                with pytest.raises(StoreError) as caught:
                    await request(store, fault.replace(" ", "-"), partial(self.arm, proxy, fault))
                assert caught.value.retryable and not isinstance(caught.value, ExistsError), fault

        self.run(proxy, "s3fs", work)
