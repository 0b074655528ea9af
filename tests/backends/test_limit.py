"""`Limit`: bytes per second, bytes in flight and requests are bounded, in order, and no slot is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from ckpt.store import Buffer, ObjectInfo, Store
from ckpt.testing import in_virtual_time, keys
from ckpt_backends.limit import Limit
from ckpt_backends.memory import MemoryStore


class Slow(MemoryStore):
    """Each request takes `seconds`. Records when each began and the peak of bytes and requests in flight."""

    def __init__(self, seconds: float = 1.0, *, keeps: bool = False) -> None:
        super().__init__()
        self.seconds, self.keeps = seconds, keeps
        self.began: list[tuple[float, str, int]] = []
        self.requests = self.bytes = self.most_requests = self.most_bytes = 0

    async def request(self, name: str, size: int = 0) -> None:
        self.began.append((now(), name, size))
        self.requests += 1
        self.bytes += size
        self.most_requests = max(self.most_requests, self.requests)
        self.most_bytes = max(self.most_bytes, self.bytes)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.requests -= 1
            self.bytes -= size

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await self.request(key, len(data))
        await super().put(key, data, create=create)

    async def upload(self, key: str, *, size: int) -> Any:
        await self.request(key)
        return SlowUpload(self, key)

    async def get(self, key: str, *, start: int = 0, length: int | None = None, **more: Any) -> memoryview:
        await self.request(key, length or 0)
        if length is None:
            return memoryview(self.objects[key])[start:]
        return memoryview(bytes(length))

    async def head(self, key: str) -> ObjectInfo:
        await self.request(key)
        return ObjectInfo(key, 0)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self.request("list")
        async for info in super().list(prefix):
            yield info

    async def delete(self, key: str) -> None:
        await self.request(key)


class SlowUpload:
    part = 0

    def __init__(self, store: Slow, key: str) -> None:
        self._store, self._key = store, key
        self.keeps = store.keeps
        self._kept = 0

    async def write_at(self, offset: int, view: memoryview) -> None:
        await self._store.request(self._key, len(view))
        if self.keeps:
            self._kept += len(view)
            self._store.bytes += len(view)

    async def finish(self) -> None:
        await self._store.request(self._key)
        await self.abort()

    async def abort(self) -> None:
        self._store.bytes -= self._kept
        self._kept = 0


class InOrder(SlowUpload):
    """Writes the parts of an object in order, whatever order they arrive in."""

    part = 100

    def __init__(self, store: Slow, key: str) -> None:
        super().__init__(store, key)
        self._at = 0
        self._moved = asyncio.Condition()

    async def write_at(self, offset: int, view: memoryview) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._at == offset)
            await super().write_at(offset, view)
            self._at += self.part
            self._moved.notify_all()


def now() -> float:
    return asyncio.get_running_loop().time()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run with a virtual clock. A lost slot would block forever, which raises an error."""
    in_virtual_time(work, turns=20_000)


def empty(limit: Limit) -> bool:
    gate = limit._gate
    return not gate._queue and gate._inside == 0 and gate._bytes == 0 and gate._alarm is None


# -- bytes per second --


def keeps_the_rate(limited: Callable[[Store], Store]) -> None:
    """Check 1,000 bytes per second: at no time have more bytes begun than allowed, plus one request."""

    async def main() -> None:
        store = Slow(seconds=0.3)
        limit = limited(store)
        sizes = [100, 300, 50, 1000, 1, 200, 600]
        calls: list[Awaitable[object]] = [limit.put(f"data/{i}", bytes(size)) for i, size in enumerate(sizes)]
        calls += [limit.get("data/x", start=0, length=size) for size in sizes]
        await asyncio.gather(*calls)
        before = 0
        for at, _, size in store.began:
            assert before <= 1000 * at + 1e-6
            before += size
        assert before == 2 * sum(sizes)
        assert store.began[-1][0] == pytest.approx((before - store.began[-1][2]) / 1000)  # and not slower

    run(main())


def test_bytes_per_second_are_bounded() -> None:
    """Sent and received bytes count together."""
    keeps_the_rate(lambda store: Limit(store, bytes_per_s=1000.0))


def test_negative_control_without_the_rate() -> None:
    """Without the bound, and with one 50 % too high, the check fails."""
    for bytes_per_s in (None, 1500.0):
        with pytest.raises(AssertionError):
            keeps_the_rate(lambda store, rate=bytes_per_s: Limit(store, bytes_per_s=rate))  # type: ignore[misc]


# -- bytes and requests in flight --


def keeps_the_bytes(limited: Callable[[Store], Limit], most: int = 1000) -> None:
    """Check that at most 1,000 bytes are in flight for any mix, as counted by the store."""

    async def main() -> None:
        store = Slow()
        limit = limited(store)
        target = await limit.upload("data/p", size=9000)
        sizes = [300, 300, 500, 100, 1000, 400, 700, 1, 900]
        calls: list[Awaitable[object]] = [limit.put(f"data/{i}", bytes(size)) for i, size in enumerate(sizes)]
        calls += [limit.get("data/x", start=0, length=size) for size in sizes]
        calls += [target.write_at(0, memoryview(bytes(size))) for size in sizes]
        await asyncio.gather(*calls)
        await target.finish()
        assert store.most_bytes <= most
        assert limit.most_in_flight == store.most_bytes > most // 2
        assert empty(limit)

    run(main())


def test_bytes_in_flight_are_bounded() -> None:
    keeps_the_bytes(lambda store: Limit(store, in_flight=1000))


def test_negative_control_without_the_bound() -> None:
    """With the default or a slightly higher bound, the check fails."""
    for in_flight in (256 << 20, 1100):
        with pytest.raises(AssertionError):
            keeps_the_bytes(lambda store, most=in_flight: Limit(store, in_flight=most))  # type: ignore[misc]


def test_range_above_the_bound_runs_alone() -> None:
    """It is not rejected, and nothing runs next to it."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, in_flight=1000)
        await asyncio.gather(*(limit.put(f"data/{i}", bytes(size)) for i, size in enumerate((10, 5000, 20, 3000))))
        assert [at for at, _, _ in store.began] == [0.0, 1.0, 2.0, 3.0]
        assert limit.most_in_flight == store.most_bytes == 5000
        assert empty(limit)

    run(main())


@pytest.mark.parametrize("requests", [1, 3, 100])
def test_concurrent_requests_are_bounded(requests: int) -> None:
    """The bound covers requests of all types together."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, requests=requests)
        calls: list[Awaitable[object]] = []
        for i in range(10):
            calls += [limit.put(f"log/{i}", b"x"), limit.get("x", start=0, length=1), limit.head("x"), keys(limit)]
            calls += [limit.delete("x"), limit.upload(f"data/{i}", size=1)]
        await asyncio.gather(*calls)
        assert store.most_requests == min(requests, 60)
        assert empty(limit)

    run(main())


# -- uploads that buffer their data --


def test_buffered_bytes_above_the_bound_do_not_block() -> None:
    """Two concurrent uploads that buffer more than allowed continue range by range, and so does a reader."""

    async def main() -> None:
        store = Slow(keeps=True)
        limit = Limit(store, in_flight=1000)

        async def one(name: str) -> None:
            target = await limit.upload(name, size=4000)
            await asyncio.gather(*(target.write_at(i * 400, memoryview(bytes(400))) for i in range(10)))
            await limit.get("x", start=0, length=500)
            await target.finish()

        await asyncio.gather(one("data/a"), one("data/b"))
        assert limit.most_in_flight > 1000 and empty(limit)

    run(main())


# -- uploads that write their parts in order --


def parts_out_of_order(limited: Callable[[Store], Store]) -> None:
    """Check that all parts are written if the first one arrives late."""

    async def main() -> None:
        class Ordered(Slow):
            async def upload(self, key: str, *, size: int) -> Any:
                return InOrder(self, key)

        store = Ordered()
        limit = limited(store)
        target = await limit.upload("data/p", size=1000)
        order = [3, 1, 2, 4, 5, 0, 7, 6, 9, 8]
        await asyncio.gather(*(target.write_at(i * 100, memoryview(bytes(100))) for i in order))
        await target.finish()
        assert len(store.began) == 11

    run(main())


def test_later_parts_do_not_block_the_first() -> None:
    """A part that waits for an earlier one does not occupy a slot that the earlier one needs."""
    for settings in ({"requests": 1}, {"requests": 2}, {"in_flight": 200}, {"in_flight": 50}, {"bytes_per_s": 100.0}):
        parts_out_of_order(lambda store, settings=settings: Limit(store, **settings))  # type: ignore[misc]


def test_negative_control_parts_in_order_of_arrival() -> None:
    """If slots are given in order of arrival, the upload blocks forever, which is detected."""

    class InOrderOfArrival(Limit):
        async def upload(self, key: str, *, size: int) -> Any:
            target = await super().upload(key, size=size)
            target.part = 0
            return target

    with pytest.raises(RuntimeError, match="waits"):
        parts_out_of_order(lambda store: InOrderOfArrival(store, requests=2))


# -- no slot is lost --


def test_random_calls_and_cancellations_keep_the_bounds() -> None:
    """Under random load with cancellations the bounds hold, and all slots are free at the end."""

    async def one(limit: Limit, store: Slow, draw: random.Random) -> None:
        await asyncio.sleep(draw.random() * 20)
        size = draw.choice((0, 1, 100, 500, 999))
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: limit.put("log/0", bytes(size)),
            lambda: limit.get("log/0", start=0, length=size),
            lambda: limit.head("log/0"),
            lambda: keys(limit),
        ]
        await draw.choice(calls)()
        assert store.most_bytes <= 1000 and store.most_requests <= 5

    async def main(seed: int) -> None:
        draw = random.Random(seed)
        store = Slow()
        limit = Limit(store, bytes_per_s=4000.0, in_flight=1000, requests=5)
        tasks = [asyncio.ensure_future(one(limit, store, draw)) for _ in range(80)]
        for task in tasks[::3]:
            asyncio.get_running_loop().call_later(draw.random() * 40, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert empty(limit)

    for seed in range(20):
        run(main(seed))
