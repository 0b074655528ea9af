"""Ranks change their cadence together, whatever happens to the words by which they agree on it.

Ranks are threads here, each with its own `CadenceSync`, over one store; their writers and training loops are played.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore

import ckpt
from ckpt.core.cadence.cadence import Change
from ckpt.core.cadence.ledger import Decision
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.notes import CadenceNote
from ckpt.core.ipc.watch_requests import SetCadence
from ckpt.core.log.log import Acquire
from ckpt.core.ranks.world import World
from ckpt.core.run import cadence_sync
from ckpt.core.run.cadence_sync import CadenceSync
from ckpt.errors import PeerError
from processes import eventually

URL = "file:///tmp/x"


class PlayedSupervisor:
    """What a `CadenceSync` tells the writer."""

    def __init__(self) -> None:
        self.owner = Acquire(3, "ab", None)
        self.writes = self.standing = self
        self.retracted: list[int] = []
        self.told: list[dict[str, Any]] = []

    def retract(self, attempt: Any, reason: str) -> None:
        assert cadence_sync.TOO_LATE in reason
        self.retracted.append(attempt.step)

    def tell(self, request: SetCadence) -> None:
        self.told.append(request.decision)


class Rank:
    def __init__(self, world: World) -> None:
        self.supervisor, self.heartbeat = PlayedSupervisor(), Heartbeat.create()
        self.heartbeat.beat(100 + world.rank)
        memory, tiers = ckpt.Memory(every="auto"), [ckpt.Tier(URL, every="auto")]
        self.cadence_sync = CadenceSync(world, self.supervisor, self.heartbeat, memory, tiers, {})  # type: ignore[arg-type]

    @property
    def newest(self) -> Change:
        return self.cadence_sync.schedule.newest


class Ranks(list[Rank]):
    def propose(self, memory: int, tier: int) -> None:
        decision = Decision(0, {"memory": memory, URL: tier}, step_s=0.5)
        self[0].cadence_sync.propose(CadenceNote(asdict(decision)))

    def agree(self) -> bool:
        return eventually(lambda: len({rank.newest for rank in self}) == 1 and self[0].newest.step >= 0, 20)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(cadence_sync, "LOOK_S", 0.02)
    store, size = HashStore(), 3
    with ThreadPoolExecutor(size) as pool:  # they meet
        worlds = pool.map(lambda rank: World(rank, size, store, node="n", timeout_s=20.0), range(size))
        made = Ranks(map(Rank, worlds))
    yield made
    for rank in made:
        rank.cadence_sync.stop()


def test_all_ranks_change_at_one_step_ahead_of_all(ranks: Ranks) -> None:
    """Ahead of the rank that is farthest; until then the old cadence holds; every writer is told."""
    assert all(rank.newest == Change(-1, 4, (100,)) for rank in ranks)
    ranks.propose(10, 500)
    assert ranks.agree()
    change = ranks[0].newest
    assert change.step > 102 + cadence_sync.AHEAD and (change.memory, change.tiers) == (10, (500,))
    assert all(rank.cadence_sync.schedule.at(change.step - 1) == Change(-1, 4, (100,)) for rank in ranks)
    assert eventually(lambda: all(len(rank.supervisor.told) == 1 for rank in ranks))
    assert not any(rank.supervisor.retracted for rank in ranks)


def test_changes_follow_each_other(ranks: Ranks) -> None:
    """Each is heard of once, in order."""
    for number in range(1, 4):
        ranks.propose(number, 100 * number)
        assert eventually(lambda number=number: all(rank.newest.memory == number for rank in ranks), 20)
    assert [[told["every"]["memory"] for told in rank.supervisor.told] for rank in ranks] == [[1, 2, 3]] * 3


def test_nothing_changes_until_all_have_heard(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank does not listen: the change is dropped for all, and the next one, when it listens again, is made."""
    monkeypatch.setattr(cadence_sync, "HEAR_S", 0.5)
    deaf = threading.Event()
    listen = ranks[2].cadence_sync._hear

    def hear() -> None:
        if not deaf.is_set():
            listen()

    monkeypatch.setattr(ranks[2].cadence_sync, "_hear", hear)
    deaf.set()
    ranks.propose(10, 500)
    assert eventually(lambda: ranks[1].cadence_sync._number == 1, 20)
    assert all(rank.newest == Change(-1, 4, (100,)) for rank in ranks)
    deaf.clear()
    assert eventually(lambda: ranks[2].cadence_sync._number == 1, 20)
    ranks.propose(20, 1000)
    assert ranks.agree() and ranks[2].newest.memory == 20


def test_a_store_that_does_not_answer_for_a_while_is_asked_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that could not hear, or be heard, does so later."""
    failures = [PeerError("the store of the job cannot be reached")] * 3
    mail = ranks[1].cadence_sync._mail
    assert mail is not None
    poll = mail.poll

    def flaky(keys: Any) -> bool:
        if failures:
            raise failures.pop()
        return poll(keys)

    monkeypatch.setattr(mail, "poll", flaky)
    ranks.propose(10, 500)
    assert ranks.agree() and not failures


def test_a_rank_that_hears_too_late_takes_back_what_differs(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps that one cadence saves durably and the other does not; what both save, or neither, stays."""
    listen = ranks[1].cadence_sync._hear
    ahead = threading.Event()

    def late() -> None:
        if ranks[1].cadence_sync._heard < 0 or ahead.is_set():
            listen()

    monkeypatch.setattr(ranks[1].cadence_sync, "_hear", late)
    ranks.propose(10, 30)
    assert eventually(lambda: ranks[0].newest.step >= 0, 20)
    step = ranks[0].newest.step
    ranks[1].heartbeat.beat(step + 200)
    ahead.set()
    assert ranks.agree()
    expected = [s for s in range(step, step + 201) if (s % 100 == 0) != (s % 30 == 0)]
    assert ranks[1].supervisor.retracted == expected and expected
    assert not ranks[0].supervisor.retracted and not ranks[2].supervisor.retracted


def test_a_restore_settles_what_some_have_not_heard(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was told of the last change tells the others; from then on it holds from any step on, and is not heard
    of again."""
    monkeypatch.setattr(ranks[2].cadence_sync, "_hear", lambda: None if ranks[2].cadence_sync._heard >= 0 else hear())
    hear = type(ranks[2].cadence_sync)._hear.__get__(ranks[2].cadence_sync)
    ranks.propose(10, 500)
    assert eventually(lambda: ranks[0].newest.step >= 0 and ranks[1].newest.step >= 0, 20)
    assert ranks[2].newest == Change(-1, 4, (100,))
    threads = [threading.Thread(target=rank.cadence_sync.settle) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [rank.newest for rank in ranks] == [Change(-1, 10, (500,))] * 3
    monkeypatch.setattr(ranks[2].cadence_sync, "_hear", hear)
    time.sleep(0.2)
    assert ranks[2].newest == Change(-1, 10, (500,)) and len(ranks[2].supervisor.told) == 0
    ranks.propose(20, 1000)
    assert ranks.agree() and ranks[2].newest.memory == 20


def test_one_rank_changes_at_its_next_step() -> None:
    """It has nobody to ask."""
    rank = Rank(World(0, 1))
    rank.cadence_sync.propose(CadenceNote(asdict(Decision(0, {"memory": 1, URL: 50}))))
    assert eventually(lambda: rank.newest == Change(101, 1, (50,)))
