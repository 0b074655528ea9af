"""A store that retries transient errors: `Retry(S3Store(url))`.

The pause before each retry is random, with a growing upper limit, so that many processes that lost a store at the same
time do not all return at the same time. Errors that a retry cannot fix (`retryable` is False) are raised immediately.

If the response to a request was lost, the request may have been carried out, or may be carried out later. So only
idempotent requests are repeated. A create-if-absent succeeded if the object has exactly the writer's own bytes. This
needs bytes that no other writer can write, so log records contain the name of their writer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from random import SystemRandom
from typing import TypeVar

from ckpt.errors import CheckpointError, CorruptError, ExistsError, NotFoundError
from ckpt.events import log
from ckpt.store import Buffer, ObjectInfo, Store, Upload
from ckpt.units import count_of

T = TypeVar("T")
_DICE = SystemRandom()  # a separate generator, so the random state of the training does not change


class Retry:
    """Implements `ckpt.store.Store`. Pauses grow from `base_s` to `most_s` seconds. A call fails after `budget_s` s."""

    def __init__(self, store: Store, *, base_s: float = 0.2, most_s: float = 20.0, budget_s: float = 300.0) -> None:
        self.store = store
        self.url = store.url
        self.remote = store.remote
        self.base_s, self.most_s, self.budget_s = base_s, most_s, budget_s
        if hasattr(store, "in_flight"):
            self.in_flight = store.in_flight
        self._waiting = 0  # number of failed calls being retried
        self._down_since: float | None = None

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        undecided = False  # True if an earlier try may have created the object

        async def attempt() -> None:
            nonlocal undecided
            try:
                await self.store.put(key, data, create=create)
            except ExistsError:
                if not (undecided and await self._holds(key, data)):
                    raise
            except CheckpointError as error:
                undecided = undecided or error.retryable
                raise

        await self._repeat(attempt)

    async def _holds(self, key: str, data: Buffer) -> bool:
        """Return True if the object `key` has exactly the bytes `data`."""
        try:
            found = await self.store.get(key, limit=memoryview(data).nbytes)
        except (NotFoundError, CorruptError):  # the object was deleted, or is longer than `data`
            return False
        return bytes(found) == bytes(data)

    async def upload(self, key: str, *, size: int, replace: bool = False) -> RetryUpload:
        # a third-party store may lack the `replace` parameter; then an upload must not pass it
        more = {"replace": True} if replace else {}
        return RetryUpload(self, await self._repeat(partial(self.store.upload, key, size=size, **more)))

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        return await self._repeat(partial(self.store.get, key, start=start, length=length, into=into, limit=limit))

    async def head(self, key: str) -> ObjectInfo:
        return await self._repeat(partial(self.store.head, key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """List again from the start after an error, and yield each key once. Each new key resets the time limit."""
        seen = set[str]()
        with self._calling() as call:
            while True:
                try:
                    async for info in self.store.list(prefix):
                        if info.key not in seen:
                            seen.add(info.key)
                            call.answered()
                            yield info
                    call.answered()
                    return
                except CheckpointError as error:
                    await call.failed(error)

    async def delete(self, key: str) -> None:
        await self._repeat(partial(self.store.delete, key))

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self._repeat(partial(self.store.delete_many, keys))

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        return await self._repeat(partial(self.store.drop_uploads, wanted))

    async def aclose(self) -> None:
        await self.store.aclose()

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        with self._calling() as call:
            while True:
                try:
                    result = await attempt()
                except CheckpointError as error:
                    await call.failed(error)
                else:
                    call.answered()
                    return result

    @contextlib.contextmanager
    def _calling(self) -> Iterator[_Call]:
        call = _Call(self)
        try:
            yield call
        finally:
            call.rest()

    def _is_down(self, why: CheckpointError) -> None:
        """Log an outage once, regardless of how many calls it affects."""
        if self._down_since is None:
            self._down_since = asyncio.get_running_loop().time()
            log.warning("retrying %s for up to %.0f s: %s", self.url, self.budget_s, why)

    def _is_back(self) -> None:
        """Log the end of an outage when all affected calls have succeeded or failed."""
        if self._down_since is not None and self._waiting == 0:
            log.info(
                "%s is reachable again after %.1f s",
                self.url,
                asyncio.get_running_loop().time() - self._down_since,
            )
            self._down_since = None


class _Call:
    """One call and its retries."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._since = asyncio.get_running_loop().time()
        self._failures = 0

    async def failed(self, error: CheckpointError) -> None:
        """Wait before a retry, or raise the error if no retry is left."""
        retry = self._retry
        if not error.retryable:
            if isinstance(error, (NotFoundError, ExistsError)):  # these errors prove that the store is reachable
                self.answered()
            raise error
        if self._failures == 0:
            retry._waiting += 1
        self._failures += 1
        retry._is_down(error)
        spent = asyncio.get_running_loop().time() - self._since
        if spent >= retry.budget_s:
            error.args = (
                f"{error} (tried {count_of(self._failures, 'time')} in {spent:.0f} s). Check the network and the "
                "endpoint, if you configured one",
                *error.args[1:],
            )
            raise error
        bound = min(retry.most_s, retry.base_s * 2.0 ** min(self._failures - 1, 60))
        await asyncio.sleep(min(_DICE.uniform(0, bound), retry.budget_s - spent))

    def answered(self) -> None:
        self.rest()
        self._since = asyncio.get_running_loop().time()
        self._retry._is_back()

    def rest(self) -> None:
        """Stop counting the call as waiting, because it has succeeded or failed."""
        if self._failures:
            self._retry._waiting -= 1
        self._failures = 0


class RetryUpload:
    """Retries the calls of an upload if it is `resumable`. Otherwise the caller writes the object again."""

    def __init__(self, retry: Retry, upload: Upload) -> None:
        self._retry, self._upload = retry, upload
        self.part = upload.part
        self.resumable = bool(getattr(upload, "resumable", False))
        self.keeps = bool(getattr(upload, "keeps", False))

    async def write_at(self, offset: int, view: memoryview) -> None:
        await self._try(partial(self._upload.write_at, offset, view))

    async def finish(self) -> None:
        await self._try(self._upload.finish)

    async def abort(self) -> None:
        with contextlib.suppress(CheckpointError):  # `drop_uploads` or the clean-up deletes the remaining parts
            await self._upload.abort()

    async def _try(self, attempt: Callable[[], Awaitable[None]]) -> None:
        if self.resumable:
            await self._retry._repeat(attempt)
        else:
            await attempt()
