"""A store with limits for bytes per second, bytes in flight, and concurrent requests.

    Retry(Limit(S3Store(url), bytes_per_s=200e6))      a call that waits for its retry occupies no slot of the limit

Requests are served in order, so that small requests cannot starve a large range. The only exception is the lease of a
run, which is stored immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ckpt.errors import UsageError
from ckpt.store import LEASE, Buffer, ObjectInfo, Store, Upload


class Limit:
    """Implements `ckpt.store.Store` with limits.

    `bytes_per_s`: limit for bytes sent and received, None for no limit. `in_flight`: maximum bytes in flight.
        `requests`: maximum number of requests. A range larger than `in_flight` is sent alone. A whole object of unknown
        size is charged against `bytes_per_s` after it is read. An upload that keeps its memory (attribute `keeps`)
        counts as in flight until it ends. Meanwhile, ranges that would exceed the limit are sent alone.
    """

    def __init__(
        self, store: Store, *, bytes_per_s: float | None = None, in_flight: int = 256 << 20, requests: int = 32
    ) -> None:
        if (bytes_per_s is not None and not bytes_per_s > 0) or in_flight < 1 or requests < 1:
            raise UsageError("limits must be positive: bytes_per_s, in_flight, requests")
        self.store = store
        self.url = store.url
        self.remote = store.remote
        self.in_flight = in_flight
        self._gate = Gate(bytes_per_s, in_flight, requests)
        if hasattr(store, "in_flight"):  # bytes that the store sends after `write_at` has returned
            store.in_flight = min(store.in_flight, in_flight)

    @property
    def most_in_flight(self) -> int:
        """Return the maximum bytes that were in flight at the same time so far."""
        return self._gate.most

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        if key == LEASE:  # if the lease waited behind an upload, its job would look dead
            await self.store.put(key, data, create=create)
            return
        async with self._gate.request(memoryview(data).nbytes):
            await self.store.put(key, data, create=create)

    async def upload(self, key: str, *, size: int, replace: bool = False) -> LimitUpload:
        # a third-party store may lack the `replace` parameter; then an upload must not pass it
        more = {"replace": True} if replace else {}
        async with self._gate.request():
            return LimitUpload(self._gate, await self.store.upload(key, size=size, **more))

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        async with self._gate.request(max(0, length or 0)):
            found = await self.store.get(key, start=start, length=length, into=into, limit=limit)
        if length is None:
            self._gate.charge(len(found))
        return found

    async def head(self, key: str) -> ObjectInfo:
        async with self._gate.request():
            return await self.store.head(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = aiter(self.store.list(prefix))
        while True:
            # Admit a request for each key, because the caller may send its own requests before it takes the next key.
            async with self._gate.request():
                try:
                    info = await anext(found)
                except StopAsyncIteration:
                    return
            yield info

    async def delete(self, key: str) -> None:
        async with self._gate.request():
            await self.store.delete(key)

    async def delete_many(self, keys: Sequence[str]) -> None:
        async with self._gate.request():
            await self.store.delete_many(keys)

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        async with self._gate.request():
            return await self.store.drop_uploads(wanted)

    async def aclose(self) -> None:
        await self.store.aclose()


class LimitUpload:
    """Writes parts in the order in which they were queued. A part that waits for an earlier part occupies no slot."""

    def __init__(self, gate: Gate, upload: Upload) -> None:
        self._gate, self._upload = gate, upload
        self._kept = 0
        self._lined_up = 0  # end offset of the parts that were queued
        self._ended = False
        self._moved = asyncio.Condition()
        self.part = upload.part
        self.resumable = bool(getattr(upload, "resumable", False))
        self.keeps = bool(getattr(upload, "keeps", False))

    async def write_at(self, offset: int, view: memoryview) -> None:
        if self.part:
            await self._after_earlier_ones(offset, view.nbytes)
        async with self._gate.request(view.nbytes):
            await self._upload.write_at(offset, view)
            if self.keeps:
                self._gate.keep(view.nbytes)
                self._kept += view.nbytes

    async def _after_earlier_ones(self, offset: int, size: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._ended or self._lined_up >= offset)
            self._lined_up = max(self._lined_up, offset + size)
            self._moved.notify_all()

    async def finish(self) -> None:
        async with self._gate.request():
            await self._upload.finish()
        self._let_go()

    async def abort(self) -> None:
        try:
            await self._upload.abort()  # bypasses the gate, because an abort frees space
        finally:
            self._let_go()
        async with self._moved:
            self._ended = True
            self._moved.notify_all()

    def _let_go(self) -> None:
        self._gate.keep(-self._kept)
        self._kept = 0


class Gate:
    """Admits requests in order of arrival while the limits allow."""

    def __init__(self, bytes_per_s: float | None, in_flight: int, requests: int) -> None:
        self._bytes_per_s, self._in_flight, self._requests = bytes_per_s, in_flight, requests
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._inside = 0  # requests inside
        self._bytes = 0  # bytes of requests inside, and bytes kept by uploads
        self._paid_until = 0.0  # event loop time at which the average rate falls to `bytes_per_s` again
        self._alarm: asyncio.TimerHandle | None = None
        self.most = 0

    @contextlib.asynccontextmanager
    async def request(self, size: int = 0) -> AsyncIterator[None]:
        await self._enter(size)
        try:
            yield
        finally:
            self._leave(size)

    def keep(self, size: int) -> None:
        """Change the bytes in flight by `size`, which is negative to remove bytes, without admitting a request."""
        self._bytes += size
        self._admit()

    def charge(self, size: int) -> None:
        """Count bytes that were transferred without a reservation. Later requests wait for them."""
        if self._bytes_per_s is not None:
            self._paid_until = max(self._paid_until, _now()) + size / self._bytes_per_s

    async def _enter(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # the next request may fit now
            else:
                self._leave(size)  # the request was admitted and cancelled at the same moment
            raise

    def _leave(self, size: int) -> None:
        self._inside -= 1
        self._bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if not turn.done():  # otherwise the request was cancelled
                if not self._has_room(size) or not self._in_time(size):
                    return
                self._inside += 1
                self._bytes += size
                self.most = max(self.most, self._bytes)
                self.charge(size)
                turn.set_result(None)
            self._queue.popleft()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _has_room(self, size: int) -> bool:
        # If no request is inside, none will ever leave, so the first request is admitted, however large.
        fits = self._inside < self._requests and self._bytes + size <= self._in_flight
        return fits or self._inside == 0

    def _in_time(self, size: int) -> bool:
        """Return True if the rate allows a request now. Otherwise schedule another check for the time when it does."""
        if size == 0 or self._paid_until <= _now():
            return True
        if self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_at(self._paid_until, self._ring)
        return False

    def _ring(self) -> None:
        self._alarm = None
        self._admit()


def _now() -> float:
    return asyncio.get_running_loop().time()
