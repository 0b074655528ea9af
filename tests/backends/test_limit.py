"""`Limit`: so many bytes a second, so many on the way, so many requests; in turn, and without a place ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from ckpt.errors import StoreError
from ckpt.store import Buffer, ObjectInfo, Store
from ckpt.testing import in_virtual_time, keys
from ckpt_backends.limit import Limit
from ckpt_backends.memory import MemoryStore


class Slow(MemoryStore):
    """Each request takes `seconds`. Notes when each began, and how much was on the way at most."""

    def __init__(self, seconds: float = 1.0, *, keeps: bool = False) -> None:
        super().__init__()
        self.seconds, self.keeps = seconds, keeps
        self.began: list[tuple[float, str, int]] = []
        self.requests = self.bytes = self.most_requests = self.most_bytes = 0

    async def take(self, name: str, size: int = 0) -> None:
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
        await self.take(key, len(data))
        await super().put(key, data, create=create)

    async def upload(self, key: str, *, size: int) -> Any:
        await self.take(key)
        return SlowUpload(self, key)

    async def get(self, key: str, *, start: int = 0, length: int | None = None, **more: Any) -> memoryview:
        await self.take(key, length or 0)
        if length is None:
            return memoryview(self.objects[key])[start:]
        return memoryview(bytes(length))

    async def head(self, key: str) -> ObjectInfo:
        await self.take(key)
        return ObjectInfo(key, 0)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self.take("list")
        async for info in super().list(prefix):
            yield info

    async def delete(self, key: str) -> None:
        await self.take(key)


class SlowUpload:
    part = 0

    def __init__(self, store: Slow, key: str) -> None:
        self._store, self._key = store, key
        self.keeps = store.keeps
        self._kept = 0

    async def write_at(self, offset: int, view: memoryview) -> None:
        await self._store.take(self._key, len(view))
        if self.keeps:
            self._kept += len(view)
            self._store.bytes += len(view)

    async def finish(self) -> None:
        await self._store.take(self._key)
        await self.abort()

    async def abort(self) -> None:
        self._store.bytes -= self._kept
        self._kept = 0


class InOrder(SlowUpload):
    """Takes the parts of an object one after another, in whatever order they come."""

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
    """With a clock that jumps; a place that was lost would let everybody wait for ever, which is an error."""
    in_virtual_time(work, turns=20_000)


def empty(limit: Limit) -> bool:
    gate = limit._gate
    return not gate._queue and gate._inside == 0 and gate._bytes == 0 and gate._alarm is None


async def puts(store: Store, number: int, size: int) -> None:
    await asyncio.gather(*(store.put(f"data/{i}", bytes(size)) for i in range(number)))


# -- bytes a second --


def keeps_the_rate(limited: Callable[[Store], Store]) -> None:
    """1,000 bytes a second: at no time have more begun than fit, and one request."""

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
        assert store.began[-1][0] == pytest.approx((before - store.began[-1][2]) / 1000)  # and no slower than that

    run(main())


def test_bytes_a_second() -> None:
    """What is sent and what is received count together."""
    keeps_the_rate(lambda store: Limit(store, bytes_per_s=1000.0))


def test_negative_control_no_rate() -> None:
    """Without the bound, and with one half too wide, the check is red."""
    for bytes_per_s in (None, 1500.0):
        with pytest.raises(AssertionError):
            keeps_the_rate(lambda store, rate=bytes_per_s: Limit(store, bytes_per_s=rate))  # type: ignore[misc]


def test_time_unused_is_not_saved_up() -> None:
    """After an idle hour the rate is what it was."""

    async def main() -> None:
        store = Slow(seconds=0.0)
        limit = Limit(store, bytes_per_s=100.0)
        await puts(limit, 3, 100)
        await asyncio.sleep(3600.0)
        started = now()
        await puts(limit, 3, 100)
        assert [at - started for at, _, _ in store.began[3:]] == [0.0, 1.0, 2.0]

    run(main())


def test_whole_objects_count_when_they_are_there() -> None:
    """Who comes after an object whose size was not known waits for it."""

    async def main() -> None:
        store = Slow(seconds=0.0)
        store.objects["log/0"] = bytes(500)
        limit = Limit(store, bytes_per_s=100.0)
        await limit.get("log/0")
        await limit.put("log/1", b"x")
        assert now() == 5.0

    run(main())


# -- bytes and requests on the way --


def keeps_the_bytes(limited: Callable[[Store], Limit], most: int = 1000) -> None:
    """Whatever the mix, at most 1,000 bytes are on the way, as the store itself counts them."""

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


def test_bytes_on_the_way() -> None:
    """The bound holds, and is said truthfully."""
    keeps_the_bytes(lambda store: Limit(store, in_flight=1000))


def test_negative_control_no_bound() -> None:
    """With the default, or a little more than allowed, the check is red."""
    for in_flight in (256 << 20, 1100):
        with pytest.raises(AssertionError):
            keeps_the_bytes(lambda store, most=in_flight: Limit(store, in_flight=most))  # type: ignore[misc]


def test_a_range_larger_than_the_bound_goes_alone() -> None:
    """It is not refused, and nothing is beside it."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, in_flight=1000)
        await asyncio.gather(*(limit.put(f"data/{i}", bytes(size)) for i, size in enumerate((10, 5000, 20, 3000))))
        assert [at for at, _, _ in store.began] == [0.0, 1.0, 2.0, 3.0]
        assert limit.most_in_flight == store.most_bytes == 5000
        assert empty(limit)

    run(main())


@pytest.mark.parametrize("requests", [1, 3, 100])
def test_requests_at_once(requests: int) -> None:
    """Of every kind together."""

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


def test_a_listing_holds_no_place_between_keys() -> None:
    """With one request at a time, whoever walks through a listing may ask for what it names."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, requests=1)
        await puts(limit, 3, 1)
        found = [(info.key, await limit.head(info.key)) async for info in limit.list()]
        assert len(found) == 3 and empty(limit)

    run(main())


# -- in turn --


def test_first_come_first_served() -> None:
    """Small ones do not overtake a large one, nor anybody else."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, in_flight=1000, requests=2)
        sizes = [600, 600, 10, 1000, 10, 10, 300, 5000, 1]
        await asyncio.gather(*(limit.put(f"{i}", bytes(size)) for i, size in enumerate(sizes)))
        assert [name for _, name, _ in store.began] == [f"{i}" for i in range(len(sizes))]

    run(main())


# -- uploads that keep what they were given --


def test_kept_bytes_beyond_the_bound_do_not_wait_for_ever() -> None:
    """Two uploads at the same time that keep more than is allowed go on, range by range, and so does a reader."""

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


# -- uploads that take one part after another --


def parts_out_of_order(limited: Callable[[Store], Store]) -> None:
    """All but the first part are there before it; in the end all are written."""

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


def test_later_parts_do_not_keep_the_first_out() -> None:
    """A part that waits for an earlier one takes no place that the earlier one needs."""
    for settings in ({"requests": 1}, {"requests": 2}, {"in_flight": 200}, {"in_flight": 50}, {"bytes_per_s": 100.0}):
        parts_out_of_order(lambda store, settings=settings: Limit(store, **settings))  # type: ignore[misc]


def test_negative_control_parts_in_the_order_they_come() -> None:
    """Places given to whoever comes first are waited for for ever, and that is seen."""

    class AsTheyCome(Limit):
        async def upload(self, key: str, *, size: int) -> Any:
            target = await super().upload(key, size=size)
            target.part = 0
            return target

    with pytest.raises(RuntimeError, match="waits"):
        parts_out_of_order(lambda store: AsTheyCome(store, requests=2))


def test_parts_may_be_written_again() -> None:
    """An earlier part that comes a second time waits for nobody; nor does anybody once the upload is given up."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, requests=1)
        target = await limit.upload("data/p", size=400)
        target.part = 100
        for i in (0, 1, 0, 1, 2, 0):
            await target.write_at(i * 100, memoryview(bytes(100)))
        other = await limit.upload("data/q", size=400)
        other.part = 100
        waiting = asyncio.ensure_future(other.write_at(300, memoryview(bytes(100))))
        await asyncio.sleep(100.0)
        assert not waiting.done()
        await other.abort()
        await waiting
        assert empty(limit)

    run(main())


# -- no place is lost --


def test_errors_give_the_place_back() -> None:
    """Of any call."""

    class Broken(Slow):
        async def take(self, name: str, size: int = 0) -> None:
            await asyncio.sleep(0.1)
            raise StoreError("broken")

    async def main() -> None:
        limit = Limit(Broken(), in_flight=10, requests=1)
        for _ in range(3):
            calls: list[Awaitable[object]] = [limit.put("a", b"x" * 9), limit.get("a", start=0, length=9)]
            calls += [limit.head("a"), limit.delete("a"), limit.upload("a", size=9), keys(limit)]
            for call in calls:
                with pytest.raises(StoreError):
                    await call
        assert empty(limit)

    run(main())


def test_who_is_cancelled_while_waiting_lets_others_pass() -> None:
    """Also if it was the first, and too large for what is on the way."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, in_flight=1000)
        first = asyncio.ensure_future(limit.put("first", bytes(600)))
        large = asyncio.ensure_future(limit.put("large", bytes(900)))
        small = asyncio.ensure_future(limit.put("small", bytes(100)))
        await asyncio.sleep(0.5)
        large.cancel()
        await asyncio.gather(first, small)
        assert [(at, name) for at, name, _ in store.began] == [(0.0, "first"), (0.5, "small")]
        assert large.cancelled() and empty(limit)

    run(main())


def test_cancelled_at_the_moment_of_being_let_in() -> None:
    """The place goes to the next."""

    async def main() -> None:
        store = Slow()
        limit = Limit(store, requests=1)
        first, second, third = (asyncio.ensure_future(limit.put(f"{i}", b"x")) for i in range(3))
        first.add_done_callback(lambda _: second.cancel())  # the first has made room, the second does not know yet
        await asyncio.gather(first, third)
        assert second.cancelled() and empty(limit)
        assert [name for _, name, _ in store.began] in (["0", "2"], ["0", "1", "2"])

    run(main())


def test_any_mix_of_calls_and_cancels() -> None:
    """Under a random load with cancels everywhere the bounds hold, and in the end every tier is free."""

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
