"""Tests that ranks change their save intervals together, by orders.

Ranks are threads here, each with its own `Orders` and `Intervals`, over one store. Their writers and training loops are
simulated. `tests/model/test_orders_at_random.py` covers all orders of events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore

import ckpt
from ckpt.core.cadence.ledger import Decision
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.messages import CadenceNote, RunEvent
from ckpt.core.ranks import orders as channel
from ckpt.core.ranks.orders import Order, Orders
from ckpt.core.ranks.world import World, together
from ckpt.core.run import save_plan as module
from ckpt.core.run.save_plan import Change, Intervals, Late
from processes import eventually

URL = "file:///tmp/x"


class PlayedSupervisor:
    """Records the requests of `Intervals` to the writer."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def tell(self, request: RunEvent) -> None:
        assert request.decision is not None
        self.told.append(request.decision)


class Rank:
    def __init__(self, world: World) -> None:
        self.world, self.orders = world, Orders(world)
        self.supervisor, self.heartbeat = PlayedSupervisor(), Heartbeat.create()
        self.heartbeat.beat(100 + world.rank)
        memory, tiers = ckpt.Memory(every="auto"), [ckpt.Tier(URL, every="auto")]
        self.intervals = Intervals(world, self.orders, self.supervisor, self.heartbeat, memory, tiers, {})  # type: ignore[arg-type]
        self.late: list[Late] = []
        self.orders.hear("interval", self.change)

    def change(self, order: Order) -> None:
        self.late += self.intervals.change(order)

    @property
    def newest(self) -> Change:
        return self.intervals.plan.newest

    def restore(self) -> None:
        agreed = together(self.world, "settle", self.intervals.suspend, max)
        self.intervals.begin(agreed)
        self.orders.resume()


class Ranks(list[Rank]):
    def propose(self, memory: int, tier: int) -> None:
        decision = Decision(0, {"memory": memory, URL: tier}, step_s=0.5)
        self[0].intervals.propose(CadenceNote(asdict(decision)))

    def agree(self, memory: int) -> bool:
        return eventually(
            lambda: {rank.newest for rank in self} == {self[0].newest} and self[0].newest.memory == memory
        )

    def together(self, work: Callable[[Rank], object]) -> None:
        with ThreadPoolExecutor(len(self)) as pool:
            list(pool.map(work, self))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Yield three connected ranks, at steps 100 to 102. Rank 2 reads no orders until `orders.start()`."""
    monkeypatch.setattr(channel, "LOOK_S", 0.02)
    store, size = HashStore(), 3
    with ThreadPoolExecutor(size) as pool:
        worlds = pool.map(lambda rank: World(rank, size, store, node="n", timeout_s=20.0), range(size))
        made = Ranks(map(Rank, worlds))
    for rank in made[:2]:
        rank.orders.start()
    yield made
    for rank in made:
        rank.orders.stop()


def test_all_ranks_change_interval_at_one_step(ranks: Ranks) -> None:
    """Until then the old intervals apply. Every writer is notified."""
    ranks[2].orders.start()
    assert all(rank.newest == Change(-1, 4, (100,)) for rank in ranks)
    ranks.propose(10, 500)
    assert ranks.agree(10)
    change = ranks[0].newest
    assert change.step >= 100 + module.AHEAD + module.AHEAD_S / 0.5 and change.tiers == (500,)
    assert all(rank.intervals.plan.at(change.step - 1) == Change(-1, 4, (100,)) for rank in ranks)
    assert [len(rank.supervisor.told) for rank in ranks] == [1, 1, 1]
    assert not any(rank.late for rank in ranks)


def test_restore_applies_last_change_on_all_ranks(ranks: Ranks) -> None:
    """Rank 2 has not read the order. After the restore it applies from any step on, and is not executed again."""
    ranks.propose(10, 500)
    assert eventually(lambda: ranks[0].newest.step >= 0 and ranks[1].newest.step >= 0)
    assert ranks[2].newest == Change(-1, 4, (100,))
    ranks.together(Rank.restore)
    assert [rank.newest for rank in ranks] == [Change(-1, 10, (500,))] * 3
    ranks[2].orders.start()
    time.sleep(0.2)
    assert ranks[2].newest == Change(-1, 10, (500,)) and not ranks[2].supervisor.told
    ranks.propose(20, 1000)
    assert ranks.agree(20)
