"""Tests of the bookkeeper alone: with a test heartbeat, and tiers that fail on request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ckpt.core.cadence.ledger import Account
from ckpt.core.checkpoint import lease
from ckpt.core.checkpoint.open_tier import OpenTier, open_place
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.messages import Books as Facts
from ckpt.core.ipc.messages import Introduce, RestoreDone
from ckpt.core.writer import bookkeeper
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.errors import StoreError
from ckpt.store import LEASE
from ckpt.tiers import Tier


class Books:
    """A bookkeeper, the heartbeat of its trainer, and the tiers that it writes to."""

    def __init__(self, places: list[OpenTier]) -> None:
        self.places = places
        self.keeper = Bookkeeper(lambda: self.places, lambda message: None)
        self.heartbeat = Heartbeat.create()
        self.opened = time.monotonic()

    def begin(self, *, again: bool = False) -> None:
        url, opened = self.places[0].url, self.opened
        trainer = Introduce(url, 0, 1, 0, opened, opened)
        self.keeper.begin(trainer, Facts("1.ab", [], {}, again=again), os.dup(self.heartbeat.fd), os.getpid())

    def beat(self, step: int, **cost: Any) -> None:
        self.heartbeat.beat(step, **cost)

    def restored(self, began: float, step: int, **cost: Any) -> None:
        known = {"stalled": 0.0, "saves": 0, "skipped": 0, "paused": self.heartbeat.paused_s, **cost}
        self.keeper.restored(RestoreDone(began, time.monotonic() - began, step, "memory", "1.a-1", "2.cd", **known))

    def stored(self, number: int = 0) -> Account:
        path = self.places[number].url.removeprefix("file://")
        return Account.from_bytes(Path(path, "ledger", "1.ab.0.json").read_bytes())

    @property
    def account(self) -> Account:
        assert self.keeper.account is not None
        return self.keeper.account


def played(test: Callable[[Books], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    async def run() -> None:
        places = [await open_place(Tier(str(tmp_path / name)).spec()) for name in ("near", "far")]
        books = Books(places)
        await test(books)
        books.keeper.stop()
        for place in places:
            await place.store.aclose()

    asyncio.run(run())


def test_restore_does_not_count_as_step_time(tmp_path: Path) -> None:
    """This also holds if the step ended before the restore was reported. Earlier pauses and waits count before it."""

    async def test(books: Books) -> None:
        books.begin()
        books.beat(1)
        books.heartbeat.paused(3.0)
        began = time.monotonic()
        time.sleep(0.2)
        ended = time.monotonic()
        books.keeper.look(began)
        time.sleep(0.02)
        books.heartbeat.beat(11, 5.5, 4)
        cost = {"stalled": 5.0, "saves": 3, "skipped": 0, "paused": 3.0}
        books.keeper.restored(RestoreDone(began, ended - began, 10, source="", checkpoint="", term="", **cost))
        books.keeper.look()
        first, second = books.account.rows
        assert (first.step, second.step) == (1, 11) and first.at < began
        assert second.seconds == pytest.approx(second.at - ended, abs=1e-6) and second.seconds < second.at - began
        assert (second.paused, second.saves) == (0.0, 1) and second.stalled == pytest.approx(0.5)

    played(test, tmp_path)


def test_unreadable_tier_loses_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new writer waits for the old one's ledger, and does not overwrite before it has read it."""
    monkeypatch.setattr(lease, "AGAIN_S", 0.1)

    async def test(books: Books) -> None:
        books.begin()
        books.restored(time.monotonic(), 5)
        books.beat(6)
        books.keeper.look()
        await books.keeper.finish()
        failures = [StoreError("it does not answer")] * 3
        get = lease.get_small

        async def flaky(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return await get(*arguments)

        monkeypatch.setattr(lease, "get_small", flaky)
        books.keeper = Bookkeeper(lambda: books.places, lambda message: None)
        books.begin(again=True)
        books.keeper.keep(now=True)
        await asyncio.sleep(0.15)
        assert len(books.stored().restores) == 1 and failures
        await asyncio.sleep(0.6)
        assert not failures and len(books.account.restores) == 1 and books.account.rows[0].step == 6

    played(test, tmp_path)


def test_hanging_tier_does_not_delay_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest tier gets the ledger, steps are counted, and the end is not delayed."""
    monkeypatch.setattr(bookkeeper, "LOOK_S", 0.02)
    monkeypatch.setattr(bookkeeper, "PATIENCE_S", 0.3)
    monkeypatch.setattr(lease, "KEEP_S", 0.05)

    async def test(books: Books) -> None:
        async def hang(*arguments: Any, **options: Any) -> None:
            await asyncio.sleep(3600)

        monkeypatch.setattr(books.places[1].log.store, "put", hang)
        books.begin()
        for step in range(1, 30):
            books.beat(step)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert books.account.step == 29 and books.stored().step == 29
        books.keeper.ended("closed")
        await asyncio.wait_for(books.keeper.finish(), 5)
        end = books.stored().end
        assert end is not None and end.how == "closed"

    played(test, tmp_path)


def test_newest_ledger_content_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow put of older content does not overwrite newer content. Failures are logged, and retried later."""

    async def test(books: Books) -> None:
        put, said = books.places[0].log.store.put, list[bytes]()
        failures = [StoreError("full")]

        async def slow(key: str, data: bytes, **options: Any) -> None:
            if key == LEASE:
                return
            said.append(data)
            await asyncio.sleep(0.1 if len(said) == 1 else 0.0)
            if failures:
                raise failures.pop()
            await put(key, data, **options)

        monkeypatch.setattr(books.places[0].log.store, "put", slow)
        books.begin()
        await asyncio.sleep(0.02)
        for step in range(1, 4):
            books.beat(step)
            books.keeper.look()
            books.keeper.keep(now=True)
        await books.keeper.finish()
        assert len(said) == 2 and books.stored().step == 3

    played(test, tmp_path)
