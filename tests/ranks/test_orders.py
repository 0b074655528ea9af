"""Tests of the order channel over real key-value stores that are slow, die or hang.
`tests/model/test_orders_at_random.py` covers all orders of events."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from ckpt.core.ipc.heartbeat import Process
from ckpt.core.ranks import orders as channel
from ckpt.core.ranks.orders import LOOKS_PER_S, Order, Orders
from ckpt.core.ranks.world import Board, World, pack
from ckpt.errors import PeerError
from processes import eventually

HOST = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=2), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
SHORT = timedelta(seconds=2)


@pytest.fixture(autouse=True)
def quick_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read orders often: these tests check what is executed, not how soon."""
    monkeypatch.setattr(channel, "LOOK_S", 0.02)


class PlayedWorld:
    """Provides what `Orders` needs of a world, without a rendezvous."""

    def __init__(self, store: Any, rank: int, size: int, prefix: str = "x/") -> None:
        self._store, self.rank, self.size, self.prefix = store, rank, size, prefix

    def connect(self) -> Board:
        return Board(self._store).another()


class Ranks:
    """Some ranks that share a store. `executed[rank]`: the orders that this rank has executed."""

    def __init__(self, connect: Callable[[], Any], size: int = 2, prefix: str = "x/") -> None:
        self.orders: list[Orders] = []
        self.executed: list[list[Order]] = []
        for rank in range(size):
            orders, executed = Orders(PlayedWorld(connect(), rank, size, prefix)), list[Order]()  # type: ignore[arg-type]
            for kind in ("save", "interval"):
                orders.hear(kind, executed.append)
            self.orders.append(orders)
            self.executed.append(executed)

    def start(self) -> Ranks:
        for orders in self.orders:
            orders.start()
        return self

    def stop(self) -> None:
        for orders in self.orders:
            orders.stop()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckpt-orders"]


@pytest.fixture(params=["TCPStore", "HashStore", "FileStore"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    """Yield three ranks over each kind of store that torch's launchers use."""
    if request.param == "TCPStore":
        host = TCPStore("127.0.0.1", 0, None, True, SHORT, wait_for_workers=False)
        made = Ranks(lambda: TCPStore("127.0.0.1", host.port, None, False, SHORT, wait_for_workers=False), 3)
    elif request.param == "HashStore":
        store = HashStore()
        made = Ranks(lambda: store, 3)
    else:
        made = Ranks(lambda: FileStore(str(tmp_path / "store"), 3), 3)
    yield made.start()
    made.stop()


def test_all_ranks_execute_orders_in_same_sequence(ranks: Ranks) -> None:
    """Each rank posts several concurrently. None is lost or repeated."""
    body = {"why": 'line one\n"ä😀\udc80"', "long": "x" * 10_000}

    def post(rank: int) -> None:
        for step in range(4):
            posted = ranks.orders[rank].post("save", 10 * rank + step, body)
            assert (posted.rank, posted.step, posted.body) == (rank, 10 * rank + step, body)

    threads = [threading.Thread(target=post, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert eventually(lambda: all(len(executed) == 12 for executed in ranks.executed))
    first = ranks.executed[0]
    assert all(executed == first for executed in ranks.executed)
    assert [order.number for order in first] == list(range(12))
    assert {(order.rank, order.step) for order in first} == {(r, 10 * r + s) for r in range(3) for s in range(4)}


def test_negative_control_other_job_attempt_executes_nothing() -> None:
    """The prefix separates job attempts. With the same one they would receive each other's orders."""
    store = HashStore()
    here, there, same = (Ranks(lambda: store, 2, prefix).start() for prefix in ("1/", "2/", "1/"))
    posted = here.orders[0].post("save", 1, {})
    assert eventually(lambda: same.executed[1] == [posted])
    assert there.executed == [[], []]
    for some in (here, there, same):
        some.stop()


def test_single_rank_needs_no_store_or_thread() -> None:
    orders, executed = Orders(World(0, 1)), list[Order]()
    orders.hear("save", executed.append)
    orders.start()
    assert [orders.post("save", step, {}).number for step in range(3)] == [0, 1, 2]
    assert [order.step for order in executed] == [0, 1, 2] and orders.pause_s == 0.0
    assert not readers()
    orders.stop()


@contextlib.contextmanager
def foreign_host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a store in another process, which can be killed or stopped."""
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            yield host, int(host.stdout.readline())
        finally:
            host.kill()


def can_post(orders: Orders) -> bool:
    with contextlib.suppress(PeerError):
        return orders.post("save", 3, {}).step == 3
    return False


def over(port: int, timeout: timedelta = SHORT) -> Ranks:
    return Ranks(lambda: TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)).start()


def test_post_raises_when_the_store_has_died() -> None:
    """It does not wait long, and stop() returns."""
    with foreign_host() as (host, port):
        ranks = over(port)
        posted = ranks.orders[0].post("save", 1, {})  # negative control: it works
        assert eventually(lambda: ranks.executed[1] == [posted])
        host.kill()
        host.wait(10)
        for orders in ranks.orders:
            with pytest.raises(PeerError, match=r"cannot reach the torch\.distributed store"):
                orders.post("save", 2, {})
        ranks.stop()
        assert eventually(lambda: not readers())
        assert ranks.executed == [[posted], [posted]]


def test_post_and_stop_return_when_store_hangs() -> None:
    """Its host is stopped, and requests hang. When it continues, orders are read again."""
    with foreign_host() as (host, port):
        ranks = over(port, timedelta(seconds=60))
        process = Process.of(host.pid)
        os.kill(host.pid, signal.SIGSTOP)
        assert eventually(lambda: process.suspended)
        with pytest.raises(PeerError, match="no response within 1 s"):
            ranks.orders[0].post("save", 2, {})
        os.kill(host.pid, signal.SIGCONT)
        assert eventually(lambda: can_post(ranks.orders[0]))
        assert eventually(lambda: [order.step for order in ranks.executed[1]][-1:] == [3])
        os.kill(host.pid, signal.SIGSTOP)
        time.sleep(0.2)  # readers hang now
        stopper = threading.Thread(target=ranks.stop)
        stopper.start()
        stopper.join(30)
        assert not stopper.is_alive()
        os.kill(host.pid, signal.SIGKILL)
        assert eventually(lambda: not readers())


def test_orders_are_read_again_after_store_failure() -> None:
    store, failures = HashStore(), [RuntimeError("Broken pipe")] * 3

    class Flaky:
        compare_set, get = store.compare_set, store.get

        def check(self, keys: list[str]) -> bool:
            if failures:
                raise failures.pop()
            return store.check(keys)

    ranks = Ranks(Flaky)
    ranks.orders[1].start()
    posted = ranks.orders[0].post("save", 1, {})
    assert eventually(lambda: ranks.executed[1] == [posted]) and not failures
    ranks.stop()


@pytest.mark.parametrize("raw", [b"{", b"j{}", b'j[0,"save"]', b"z\xff"])
def test_invalid_order_is_skipped(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks skip that number with a warning, and execute the next."""
    store = HashStore()
    store.set("x/orders/0/0", raw)
    ranks = Ranks(lambda: store).start()
    posted = ranks.orders[0].post("save", 1, {})
    assert posted.number == 1
    assert eventually(lambda: ranks.executed == [[posted], [posted]])
    assert "skipped order 0 of this job" in caplog.text
    ranks.stop()


def test_failing_handler_does_not_end_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    store.set("x/orders/0/0", pack([0, "dance", 1, {}]))
    ranks = Ranks(lambda: store)
    ranks.orders[1].hear("interval", lambda order: 1 / 0)
    ranks.start()
    ranks.orders[0].post("interval", 1, {})
    posted = ranks.orders[0].post("save", 2, {})
    assert eventually(lambda: ranks.executed[1] == [posted])
    assert "the interval order of rank 0 could not be executed" in caplog.text
    ranks.stop()


def test_many_ranks_read_less_often() -> None:
    """The host of the store handles a bounded number of requests per second."""
    for size, pause_s in [(2, channel.LOOK_S), (40, channel.LOOK_S), (LOOKS_PER_S, 1.0), (4 * LOOKS_PER_S, 4.0)]:
        assert Orders(PlayedWorld(None, 0, size)).pause_s == pause_s  # type: ignore[arg-type]
