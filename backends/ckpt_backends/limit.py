"""A store that takes only its share: so many bytes a second, so many on the way, so many requests at once.

    Retry(Limit(S3Store(url), bytes_per_s=200e6))      waits between tries then hold no place

Whoever came first goes first; nobody overtakes, so a large range is not starved by small ones. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ckpt.errors import UsageError
from ckpt.store import Buffer, ObjectInfo, Store, Upload


class Limit:
    """See `ckpt.store.Store`.

    `bytes_per_s` counts what is sent and received (None: no bound), `in_flight` is bytes, `requests` is a number. A
    range larger than `in_flight` goes alone. A whole object of unknown size counts for the rate once it is read.
    An upload that keeps the memory it was given (attribute `keeps`) has it in flight until it ends; what does not fit
    beside that goes alone, one request after another, as waiting for the end could last for ever.
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
        if hasattr(store, "in_flight"):  # what it sends after `write_at` has returned
            store.in_flight = min(store.in_flight, in_flight)

    @property
    def most_in_flight(self) -> int:
        """The most bytes that were on the way at the same time so far."""
        return self._gate.most

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        async with self._gate.request(memoryview(data).nbytes):
            await self.store.put(key, data, create=create)

    async def upload(self, key: str, *, size: int, replace: bool = False) -> LimitUpload:
        more = {"replace": True} if replace else {}  # somebody's own store may not know it, and hold checkpoints
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
            async with self._gate.request():  # given back for each key: the caller may ask for more before the next
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
    """Parts line up in their order: one that its store lets wait for an earlier one takes no place before that has."""

    def __init__(self, gate: Gate, upload: Upload) -> None:
        self._gate, self._upload = gate, upload
        self._kept = 0
        self._lined_up = 0  # all parts up to here have been in line
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
            await self._upload.abort()  # not through the gate: it makes room
        finally:
            self._let_go()
        async with self._moved:
            self._ended = True
            self._moved.notify_all()

    def _let_go(self) -> None:
        self._gate.keep(-self._kept)
        self._kept = 0


class Gate:
    """Lets requests through, first come first served, while there is room for them."""

    def __init__(self, bytes_per_s: float | None, in_flight: int, requests: int) -> None:
        self._bytes_per_s, self._in_flight, self._requests = bytes_per_s, in_flight, requests
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._inside = 0  # requests
        self._bytes = 0  # theirs, and what uploads keep
        self._paid_until = 0.0  # the loop's time at which what has passed would have passed at `bytes_per_s`
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
        """So many bytes are in flight without a request, or (negative) no longer are."""
        self._bytes += size
        self._admit()

    def charge(self, size: int) -> None:
        """So many bytes have passed: who comes next waits for them, and pays for the time."""
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
                self._admit()  # whoever stood behind us may fit
            else:
                self._leave(size)  # let in and cancelled at the same moment
            raise

    def _leave(self, size: int) -> None:
        self._inside -= 1
        self._bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if not turn.done():  # else cancelled
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
        # With nobody inside, nobody need ever leave: whoever is first goes, however large.
        fits = self._inside < self._requests and self._bytes + size <= self._in_flight
        return fits or self._inside == 0

    def _in_time(self, size: int) -> bool:
        """Whether what has passed is paid for; if not, everybody is looked at again when it is."""
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
