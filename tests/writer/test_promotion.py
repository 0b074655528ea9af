"""A writer that promotes checkpoints to a slow or failing tier, or whose checkpoint another rank aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import open_tier
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.messages import Note, OpenRun, OwnRun, ProblemNote, StoredNote, WriteSlot
from ckpt.core.log.records import Commit, Record, commit_body
from ckpt.core.writer import promotion
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Background, HeldRun
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.opening import TierOpener
from ckpt.core.writer.promotion import Throttle, Turns
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import AccessError, SaveError, SkippedError, StoreError
from ckpt.store import options_of
from ckpt_backends.memory import MemoryStore
from ckpt_backends.retry import Retry
from logs import checkpoint, committed, folded, new_log, reopened
from run_files import MANIFEST, kind_of


class Far(MemoryStore):
    """An object store that can be unreachable, and can return one damaged response."""

    remote = True

    def __init__(self, url: str = "s3://far", **more: Any) -> None:
        super().__init__(url, **more)
        self.up = asyncio.Event()
        self.up.set()
        self.flip = ""

    async def put(self, key: str, data: Any, *, create: bool = False) -> None:
        await self.up.wait()
        await super().put(key, data, create=create)

    async def list(self, prefix: str = "") -> AsyncIterator[Any]:
        await self.up.wait()
        async for info in super().list(prefix):
            yield info

    async def get(self, key: str, **where: Any) -> memoryview:
        found = await super().get(key, **where)
        if key != self.flip:
            return found
        self.flip = ""
        raw = bytearray(found)
        raw[20] ^= 1
        return memoryview(bytes(raw))


class Writer:
    """A saver of rank 0 of two, with a source tier, a destination tier and simulated slots."""

    def __init__(self) -> None:
        self.told: list[Note] = []
        trainer: Any = SimpleNamespace(tell=self.told.append, adoptions=0, pid=0)
        self.memory, self.run, background = HeldMemory(trainer), HeldRun(trainer), Background()
        books = Bookkeeper(lambda: self.run.tiers, self.told.append)
        self.saver = WriterSaver(trainer, self.run, self.memory, books, Throttle(lambda: 0), background)
        self.opener = TierOpener(trainer, self.run, self.saver, books, self.memory)

    async def open(self, ranks: int = 2) -> None:
        role = commits.Role(tuple(range(ranks)), 0, ranks)
        for store in (MemoryStore("file:///near"), Far()):
            log, self.owner = await new_log(store)
            self.run.tiers.append(OpenTier(store.url, Keep(3), log, role=role))
        self.near, self.far = self.run.tiers
        self.run.owner = self.owner

    def checkpoint(self, step: int) -> CheckpointId:
        return CheckpointId(self.owner.term, step, self.owner.nonce)

    async def write(self, step: int) -> None:
        """Write a step that the source tier has already."""
        one = self.checkpoint(step)
        label = SimpleNamespace(checkpoint=one, layout="x", data_size=0)
        arena: Any = SimpleNamespace(label=lambda slot: label, id=b"\xaa")
        self.memory.arenas["aa"] = arena
        stored = asyncio.get_running_loop().create_future()
        stored.set_result(True)
        self.saver.stored[self.near.url, one] = stored
        await self.saver.write(WriteSlot(tier=1, arena="aa", slot=0, checkpoint=str(one)))

    @property
    def freed(self) -> set[int]:
        """Return the steps whose memory is no longer needed."""
        return {CheckpointId.parse(note.checkpoint).step for note in self.told if isinstance(note, StoredNote)}


def scenario(work: Callable[[Writer], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        async def main() -> None:
            writer = Writer()
            await writer.open()
            await asyncio.wait_for(work(writer), 60)

        asyncio.run(main())

    test.__name__, test.__doc__ = work.__name__, work.__doc__
    return test


@scenario
async def test_retracted_snapshot_is_not_promoted(writer: Writer) -> None:
    """A torn snapshot is retracted while it waits for the destination tier: it is never promoted."""
    async with writer.far.busy:
        writing = asyncio.create_task(writer.write(10))
        await asyncio.sleep(0.01)
        writer.memory.retracted[writer.checkpoint(10)] = "it is torn"
    with pytest.raises(SaveError, match="aborted: it is torn"):
        await writing


@scenario
async def test_skipped_steps_free_memory_and_pins(writer: Writer) -> None:
    """The destination is unreachable while new steps arrive: all free their memory immediately. Only the newest stay
    pinned in the source tier. The others fail without waiting for the destination."""
    far: Any = writer.far.store
    async with writer.far.busy:
        far.up.clear()
        writing = {step: asyncio.create_task(writer.write(step)) for step in range(1, 9)}
        await asyncio.sleep(0.1)
        assert writer.freed == set(range(1, 9))
        late = [step for step, task in writing.items() if task.done()]
        assert late == [2, 3, 4, 5, 6]
        assert all(isinstance(writing[step].exception(), SkippedError) for step in late)
        assert {one.step for one in writer.near.promoting} == {1, 7, 8}
        for task in writing.values():
            task.cancel()
        await asyncio.gather(*writing.values(), return_exceptions=True)
    assert not writer.near.promoting


@pytest.mark.parametrize(("still_s", "advice"), [(10.0, "raise its every="), (-1.0, "check that it responds")])
def test_unresponsive_tier_is_not_reported_as_slow(
    monkeypatch: pytest.MonkeyPatch, still_s: float, advice: str
) -> None:
    """For an unresponsive tier, a longer save interval would not help. Control: after a short silence it is slow."""
    monkeypatch.setattr(promotion, "STILL_S", still_s)

    @scenario
    async def left_out(writer: Writer) -> None:
        async with writer.far.busy:
            tasks = [asyncio.create_task(writer.write(step)) for step in (1, 2, 3, 4)]
            with pytest.raises(SkippedError, match=advice):
                await tasks[1]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    left_out()


def test_cancelled_turn_does_not_block_next() -> None:
    """It receives its cancellation only after the previous task has ended in the same round of the event loop."""
    turns, place, done = Turns(), cast(OpenTier, SimpleNamespace(url="memory://far")), list[int]()

    async def save(number: int, go: asyncio.Event) -> None:
        async with turns.turn(place, checkpoint(1, number), 3):
            await go.wait()
            done.append(number)

    async def work() -> None:
        events = [asyncio.Event() for _ in range(3)]
        one, two, three = tasks = [asyncio.create_task(save(*given)) for given in enumerate(events, 1)]
        await asyncio.sleep(0)
        events[2].set()
        events[0].set()
        two.cancel()  # the first was woken before, so it ends before this one is cancelled
        await asyncio.wait(tasks, timeout=10.0)
        assert one.done() and two.cancelled() and three.done() and done == [1, 3]

    asyncio.run(work())


def test_pending_promotions_ignore_current_term() -> None:
    """Pending are scheduled checkpoints of earlier terms, newer than the destination's newest one of them.
    Saves of the current term, in either tier, do not change the result."""
    term = [
        {"type": "ACQUIRE", "id": f"a{n}", "body": {"term": n, "nonce": f"{n:08x}", "restored": None}} for n in (1, 2)
    ]
    old = [committed(checkpoint(1, step)) for step in (10, 15, 20, 30, 40)]
    near = folded(term[0], *old, term[1])
    far = folded(term[0], committed(checkpoint(1, 10)), term[1])
    found = promotion.pending(near, far, 10, before=2)
    assert [one.step for one in found] == [40, 30, 20]
    later = folded(term[0], *old, term[1], *(committed(checkpoint(2, step)) for step in (50, 60)))
    there = folded(term[0], committed(checkpoint(1, 10)), term[1], committed(checkpoint(2, 50)))
    assert [one.checkpoint for one in promotion.pending(later, there, 10, before=2)] == [
        one.checkpoint for one in found
    ]
    given_up = folded(
        term[0], term[1], {"type": "ABORT", "id": "x", "body": {"checkpoint": str(checkpoint(1, 40)), "reason": ""}}
    )
    assert [one.step for one in promotion.pending(near, given_up, 10, before=2)] == [30, 20]
    assert promotion.pending(near, near, 10, before=2) == []


# -- wrong or missing responses --


def test_damaged_response_does_not_damage_log() -> None:
    """After one flipped bit in one response, the log reads again. The record counts, and the next one is consistent."""

    async def main() -> None:
        store = Far()
        a, mine = await new_log(store)
        b = await reopened(store)
        first = Record("KEEP", {"checkpoint": "000000001.1-ab12cd34", "note": ""}, "k1")
        await b.append(lambda state: first, owner=mine)
        store.flip = "log/000000000001.json"
        second = Record("KEEP", {"checkpoint": "000000002.1-ab12cd34", "note": ""}, "k2")
        await a.append(lambda state: second, owner=mine)
        assert not store.flip
        for log in (a, await reopened(store)):
            assert not log.state.damaged and len(log.state.kept) == 2

    asyncio.run(main())


@pytest.mark.parametrize("failing", [1, 2])
def test_probe_accepts_store_after_lost_reply(failing: int) -> None:
    """One request to a correct store fails or has no reply: it is accepted. A store that creates twice is not."""

    class Once(Far):
        count = 0

        async def put(self, key: str, data: Any, *, create: bool = False) -> None:
            self.count += 1
            if self.count == failing + 1:
                raise StoreError("503", retryable=True)
            await super().put(key, data, create=create)

    class Liar(Far):
        async def put(self, key: str, data: Any, *, create: bool = False) -> None:
            await super().put(key, data)

    async def main() -> None:
        store = Retry(Once(), base_s=0.001)
        await commits.create_run(store)
        await commits.create_run(store)
        with pytest.raises(StoreError, match="created twice"):
            await commits.create_run(Retry(Liar(), base_s=0.001))

    asyncio.run(main())


def test_expired_credentials_are_not_reported_as_damage() -> None:
    """If credentials expire while a checkpoint is verified, cleanup waits, and no damage is reported.
    Control: missing files are reported."""

    class Shut(Far):
        error: Exception | None = AccessError("ExpiredToken. Renew the credentials")

        async def get(self, key: str, **where: Any) -> memoryview:
            if self.error and kind_of(key) == MANIFEST:
                raise self.error
            return await super().get(key, **where)

    async def main() -> None:
        store = Shut()
        log, mine = await new_log(store)
        for step in range(1, 6):
            one = Commit(CheckpointId(mine.term, step, mine.nonce), 1, ((0, "0" * 64),), "0" * 64)
            body = commit_body(one)
            await log.append(lambda s, body=body, step=step: Record("COMMIT", body, f"c{step}"), owner=mine)  # type: ignore[misc]
        told: list[Any] = []
        place = OpenTier(store.url, Keep(2), log)
        await place.sweep(mine, told.append)
        assert told == []
        store.error = None
        await place.sweep(mine, told.append)
        assert [type(note) for note in told] == [ProblemNote]

    asyncio.run(main())


def test_new_credentials_reach_running_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted trainer's new options reach the writer that outlived it. Equal options have no effect."""
    opened: list[Any] = []
    objects: dict[str, bytes] = {}

    def open_store(url: str, **settings: Any) -> Far:
        opened.append(dict(options_of(url)))
        return Far(url, objects=objects)

    monkeypatch.setattr(open_tier, "open_store", open_store)

    def message(key: str) -> OpenRun:
        return OpenRun([{"url": "s3://b/r", "keep": {"last": 3}, "options": {"key": key}}], 1.0, 1.0, [], [])

    async def main() -> None:
        writer = Writer()
        for key in ("expired", "expired", "renewed"):
            await writer.opener.open(message(key))

    asyncio.run(main())
    assert opened == [{"key": "expired"}, {"key": "renewed"}]


def test_unreachable_bucket_error_names_available_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a bucket is unreachable, startup fails, and the error names the step that could be restored. Control: without
    a step it names none."""

    class Down(Far):
        async def get(self, key: str, **where: Any) -> memoryview:
            raise AccessError("403. Renew the credentials")

    stores: dict[str, Any] = {"near": MemoryStore("near"), "s3://far": Down("s3://far")}
    monkeypatch.setattr(open_tier, "open_store", lambda url, **settings: stores[url])
    message = OpenRun([{"url": url, "keep": {"last": 3}} for url in stores], 1.0, 1.0, [], [])

    async def main() -> None:
        with pytest.raises(AccessError) as empty:
            await Writer().opener.open(message)
        log, mine = await new_log(stores["near"])
        await log.append(lambda state: Record("COMMIT", committed(checkpoint(1, 7))["body"], "one"), owner=mine)
        with pytest.raises(AccessError) as said:
            await Writer().opener.open(message)
        assert str(empty.value) == "403. Renew the credentials"
        assert str(said.value).startswith(f"{empty.value}. near has step 7; ") and "without s3://far" in str(said.value)

    asyncio.run(main())


def test_new_writer_starts_without_unreachable_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer died while a tier was unreachable: the next one continues with the other tier and opens this one
    later. At a first start this is an error."""
    down = [True]

    class Down(Far):
        async def head(self, key: str) -> Any:
            if down[0]:
                raise StoreError("503", retryable=True)
            return await super().head(key)

    stores = {"near": MemoryStore("near"), "s3://far": Down()}
    monkeypatch.setattr(open_tier, "open_store", lambda url, **settings: stores[url])

    async def main() -> None:
        specs = [{"url": url, "keep": {"last": 3}} for url in stores]
        message = OpenRun(specs, 1.0, 1.0, [], [])
        with pytest.raises(StoreError):
            await Writer().opener.open(message)
        down[0] = False
        await new_log(stores["s3://far"])
        down[0] = True
        writer = Writer()
        await writer.opener.open(structs.replace(message, first_number=10_000))
        near, far = writer.run.tiers
        assert near.opened and not far.opened
        await writer.opener.own(OwnRun((1, "0" * 8, None), [([0], 0, 1)] * 2, []))
        down[0] = False
        await far.prepare()
        assert far.opened and far.log.root

    asyncio.run(main())
