"""Ranks that are threads of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import inside
from inside import World
from processes import start_python

StoreOf = Callable[[int], Any]


def tcp_client(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture(scope="module")
def tcp() -> StoreOf:
    """A TCPStore, and the client of each rank."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients: dict[int, Any] = {0: host}
    return lambda rank: clients.get(rank) or clients.setdefault(rank, tcp_client(host.port))


@pytest.fixture
def store_of(request: pytest.FixtureRequest, tcp: StoreOf) -> StoreOf:
    """The store as each rank has it."""
    return lambda rank: dist.PrefixStore(request.node.name, tcp(rank))  # as a process group has it


def together(
    size: int, store_of: Any, body: Callable[[World], Any], *, node_of: Callable[[int], str] = str, **options: Any
) -> list[Any]:
    """Return the results of `body` on each rank, or the errors it raises."""
    outcomes: list[Any] = [None] * size
    stores = [store_of(rank) if callable(store_of) else store_of for rank in range(size)]

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(
                inside.rank(rank, size, stores[rank], node=node_of(rank), **{"timeout_s": 20} | options)
            )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return outcomes


HOST = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a TCPStore, and its port."""
    with start_python([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()
