"""How ranks agree to save out of turn: one round has one caller, and every rank hears of every round once, in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from ckpt.core.ranks import save_rounds as rounds
from ckpt.core.ranks.save_rounds import AHEAD, LOOKS_PER_S, Round, SaveRounds, step_ahead
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


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is who hears what, not how soon."""
    monkeypatch.setattr(rounds, "LOOK_S", 0.02)


class Ranks:
    """Some ranks that share a store; `heard[rank]`: the rounds that came to it."""

    def __init__(self, connect: Callable[[], Any], prefix: str = "x/") -> None:
        self._connect, self._prefix = connect, prefix
        self.rallies: list[SaveRounds] = []
        self.heard: list[list[Round]] = []

    def add(self, size: int) -> SaveRounds:
        heard: list[Round] = []
        save_rounds = SaveRounds(self._connect(), self._prefix, len(self.rallies), size, heard.append)
        self.rallies.append(save_rounds)
        self.heard.append(heard)
        return save_rounds

    def stop(self) -> None:
        for save_rounds in self.rallies:
            save_rounds.stop()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Over a store on loopback, with a connection for each rank."""
    short = timedelta(seconds=5)
    host = TCPStore("127.0.0.1", 0, None, True, short, wait_for_workers=False)
    made = Ranks(lambda: TCPStore("127.0.0.1", host.port, None, False, short, wait_for_workers=False))
    yield made
    made.stop()


def settled(rallies: list[SaveRounds]) -> None:
    """Every rank has looked several times since."""
    time.sleep(4 * max(save_rounds.look_s for save_rounds in rallies))


def test_two_that_call_at_once_have_one_round(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wins, both know who and what; the loser is told of it as of any other's, the winner is not."""
    monkeypatch.setattr(rounds, "LOOK_S", 0.5)  # a look between the two calls would make two rounds of them
    rallies = [ranks.add(3) for _ in range(3)]
    for turn in range(4):
        barrier, found = threading.Barrier(2), dict[int, Round]()

        def call(rank: int, turn: int = turn, barrier: threading.Barrier = barrier, found: Any = found) -> None:
            barrier.wait()
            found[rank] = rallies[rank].call(10 * turn + rank, f"of rank {rank}", 25.0)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert found[0] == found[1] and found[0].number == turn
        winner = found[0].rank
        assert found[0] == Round(turn, winner, 10 * turn + winner, f"of rank {winner}", 25.0)
        others = [rank for rank in range(3) if rank != winner]
        assert eventually(lambda: all(ranks.heard[r][-1:] == [found[0]] for r in others))  # noqa: B023
        assert found[0] not in ranks.heard[winner]
    settled(rallies)
    assert [one.number for one in ranks.heard[2]] == [0, 1, 2, 3]
    for rank in (0, 1):
        numbers = [one.number for one in ranks.heard[rank]]
        assert numbers == sorted(set(numbers)) and all(one.rank != rank for one in ranks.heard[rank])


def test_a_look_that_is_quicker_than_the_call_is_not_told_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is in the store before the caller knows that it has won: whoever looks then has called it himself."""
    monkeypatch.setattr(rounds, "LOOK_S", 60.0)
    store, heard = HashStore(), list[Round]()

    class Slow:
        def compare_set(self, *arguments: Any) -> Any:
            found = store.compare_set(*arguments)
            calling._heard(store.get("x/0"))  # what the looking thread does
            return found

    calling = SaveRounds(Slow(), "x/", 0, 2, heard.append)
    mine = calling.call(5, "why", 1.0)
    calling.stop()
    assert heard == [] and mine.number == 0
    assert calling._next == 1


def test_every_rank_hears_of_a_round_once(ranks: Ranks) -> None:
    """However often it looks, and whether it hears by looking or by calling."""
    one, two = ranks.add(2), ranks.add(2)
    first = one.call(5, "why", 600.0)
    assert eventually(lambda: ranks.heard[1] == [first])
    second = two.call(9, "another", 0.5)
    assert eventually(lambda: ranks.heard[0] == [second])
    settled([one, two])
    assert ranks.heard == [[second], [first]]
    assert (first.number, second.number) == (0, 1)


def test_a_late_rank_hears_all_rounds_in_order(ranks: Ranks) -> None:
    """A rank that begins to look later misses nothing."""
    one = ranks.add(2)
    called = [one.call(step, f"round {step}", 25.0) for step in range(5)]
    late = ranks.add(2)
    assert eventually(lambda: ranks.heard[1] == called)
    settled([one, late])
    assert ranks.heard == [[], called]


def test_a_rank_that_has_not_heard_yet_takes_part_in_what_was_called(ranks: Ranks) -> None:
    """Whoever calls a number that is taken gets that round, is told of it once, and calls the next number after it."""
    one = ranks.add(2)
    first = one.call(5, "why", 600.0)
    two = ranks.add(2)
    found = two.call(7, "late", 1.0)
    if found == first:  # else it had looked before, and called the next
        found = two.call(8, "late", 1.0)
    assert (found.number, found.rank) == (1, 1)
    assert eventually(lambda: ranks.heard[0] == [found])
    settled([one, two])
    assert ranks.heard == [[found], [first]]


def test_negative_control_ranks_of_another_meeting_hear_nothing() -> None:
    """The prefix keeps incarnations apart; with the same one they would hear each other."""
    store = HashStore()
    here, there, same = Ranks(lambda: store, "1/"), Ranks(lambda: store, "2/"), Ranks(lambda: store, "1/")
    for one in (here, there, same):
        one.add(2)
    called = here.rallies[0].call(1, "", 1.0)
    assert eventually(lambda: same.heard == [[called]])
    settled(there.rallies)
    assert there.heard == [[]]
    for one in (here, there, same):
        one.stop()


def test_a_single_rank_needs_no_store() -> None:
    """It has its round at once, numbered, and no thread."""
    before = threading.active_count()
    alone = SaveRounds(None, "x/", 0, 1, lambda heard: pytest.fail("nobody else is there"))
    assert [alone.call(3, "why", 25.0).number for _ in range(3)] == [0, 1, 2]
    assert threading.active_count() == before and alone.look_s == 0.0
    alone.stop()


def test_what_is_posted_is_plain_json() -> None:
    """Any text may stand in it, and it is a round again on the other side."""
    store = HashStore()
    ranks = Ranks(lambda: store)
    one, two = ranks.add(2), ranks.add(2)
    called = one.call(-1, 'line one\n"ä😀\udc80"', 0.5)
    assert json.loads(store.get("x/0")) == asdict(called)
    assert eventually(lambda: ranks.heard[1] == [called])
    one.stop()
    two.stop()


@contextlib.contextmanager
def foreign_host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A store in another process, which can be killed or stopped."""
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            yield host, int(host.stdout.readline())
        finally:
            host.kill()


def test_a_store_that_dies_is_said_and_not_waited_for() -> None:
    """Looking ends, `reachable` is False, a call is a PeerError at once, and stop() returns."""
    short = timedelta(seconds=2)
    with foreign_host() as (host, port):
        ranks = Ranks(lambda: TCPStore("127.0.0.1", port, None, False, short, wait_for_workers=False))
        one, two = ranks.add(2), ranks.add(2)
        called = one.call(1, "", 1.0)  # negative control: it works
        assert eventually(lambda: ranks.heard[1] == [called]) and one.reachable and two.reachable
        host.kill()
        host.wait(10)
        with pytest.raises(PeerError, match="store of the job cannot be reached"):
            one.call(2, "", 1.0)
        assert not one.reachable
        assert eventually(lambda: not two.reachable)
        with pytest.raises(PeerError, match="other ranks do not hear of it"):
            two.call(2, "", 1.0)
        ranks.stop()
        assert not [t for t in threading.enumerate() if t.name == "ckpt-save-rounds"]
        assert ranks.heard == [[], [called]]


def test_stop_returns_although_the_store_stands_still() -> None:
    """The host is frozen, not dead: looking hangs in the store, and nobody waits for it for long."""
    with foreign_host() as (host, port):
        long = timedelta(seconds=60)
        ranks = Ranks(lambda: TCPStore("127.0.0.1", port, None, False, long, wait_for_workers=False))
        save_rounds = ranks.add(2)
        os.kill(host.pid, signal.SIGSTOP)
        settled([save_rounds])
        stopper = threading.Thread(target=save_rounds.stop)
        stopper.start()
        stopper.join(30)
        assert not stopper.is_alive()
        os.kill(host.pid, signal.SIGKILL)
        assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "ckpt-save-rounds"])


def test_after_stop_nothing_is_heard() -> None:
    """stop() ends the looking, also when called twice."""
    store = HashStore()
    ranks = Ranks(lambda: store)
    one, two = ranks.add(2), ranks.add(2)
    two.stop()
    two.stop()
    called = one.call(1, "", 1.0)
    third = ranks.add(2)  # negative control
    assert eventually(lambda: ranks.heard[2] == [called])
    assert ranks.heard[1] == []
    one.stop()
    third.stop()


class Broken:
    """A store that holds what is no round."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return self.raw


@pytest.mark.parametrize("raw", [b"", b"{", b"5", b"{}", b'{"number": 0}', b"\xff"])
def test_what_is_no_round_ends_the_looking_only(raw: bytes) -> None:
    """Whatever stands in the store, the thread ends by itself and the rank goes on without the others."""
    heard: list[Round] = []
    save_rounds = SaveRounds(Broken(raw), "x/", 0, 2, heard.append)
    assert eventually(lambda: not save_rounds.reachable)
    save_rounds.stop()
    assert heard == []


def test_the_step_that_all_can_still_save() -> None:
    """Two ahead, and as many more as fit into two looks; without a pace it is just two."""
    assert step_ahead(10, 0.0, 0.25) == 10 + AHEAD
    assert step_ahead(10, 1.0, 0.0) == 10 + AHEAD
    assert step_ahead(10, 1.0, 0.25) == 10 + AHEAD + 1  # half a step: rounded up
    assert step_ahead(10, 0.5, 0.25) == 10 + AHEAD + 1
    assert step_ahead(10, 0.1, 0.25) == 10 + AHEAD + 5
    assert step_ahead(-1, 0.001, 0.25) == -1 + AHEAD + 500
    for usual_s in (0.003, 0.07, 0.4, 2.0):
        ahead = step_ahead(0, usual_s, 0.25) - AHEAD
        assert (ahead - 1) * usual_s < 0.5 <= ahead * usual_s or ahead == 1


def test_many_ranks_look_less_often() -> None:
    """The host of the store answers a bounded number of looks a second."""
    store = HashStore()
    for size, look_s in [(2, rounds.LOOK_S), (40, rounds.LOOK_S), (LOOKS_PER_S, 1.0), (4 * LOOKS_PER_S, 4.0)]:
        save_rounds = SaveRounds(store, "x/", 0, size, lambda heard: None)
        assert save_rounds.look_s == look_s
        save_rounds.stop()
