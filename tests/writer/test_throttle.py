"""When a place compresses by itself, and how background work is held back while the training waits for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ckpt.core.checkpoint.encode import ENCODED_A_SECOND, LITTLE, Encoder, Learnt
from ckpt.core.checkpoint.incremental import Policy
from ckpt.core.writer import promotion
from ckpt.core.writer.promotion import IdleCores, Throttle, threads, waiting_s
from ckpt_backends.memory import MemoryStore

MANY = 100 * LITTLE

SPIN = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print("ready", flush=True)
time.sleep(float(os.environ["REST"]))
while True:
    pass
"""


def spinner(rest: str = "0") -> subprocess.Popen[str]:
    environment = {**os.environ, "REST": rest}
    process = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline()
    return process


@pytest.fixture
def crowded() -> Iterator[int]:
    """A process that shares one core with two others that never rest."""
    processes = [spinner() for _ in range(3)]
    yield processes[0].pid
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def alone() -> Iterator[int]:
    """A process that has nothing to do, and so waits for no core."""
    process = spinner(rest="600")
    yield process.pid
    process.kill()
    process.wait()


def starved(pid: int) -> bool:
    """What a `Throttle` makes of a process, looked at for a second."""
    held = Throttle(lambda: pid)
    for look in range(5):
        held(0.0)
        if look and held.starved:
            return True
        time.sleep(2 * promotion.LOOK_S)
    return False


def test_a_trainer_that_waits_for_a_core_is_seen(crowded: int) -> None:
    """Its threads are ready and do not run: the kernel counts that, and it is more than the limit."""
    before = waiting_s(crowded)
    time.sleep(0.5)
    assert waiting_s(crowded) > before
    assert starved(crowded)


def test_a_trainer_that_has_what_it_wants_holds_nothing_back(alone: int) -> None:
    """One that waits for a network, a device or nothing at all; and one that is gone, or not known."""
    assert not starved(alone)
    assert not starved(0)
    assert waiting_s(2**22 + 1) == 0.0


def test_work_rests_while_the_trainer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to what was worked, and never long; not at all as soon as the trainer has its cores again."""
    waited, slept, clock = [0.0], list[float](), [0.0]
    monkeypatch.setattr(promotion, "waiting_s", lambda pid: waited[0])
    monkeypatch.setattr(promotion.time, "sleep", slept.append)
    monkeypatch.setattr(promotion.time, "monotonic", lambda: clock[0])
    held = Throttle(lambda: 1)
    for worked, waits in [(0.01, 0.0), (0.01, 0.06), (0.02, 0.12), (10.0, 0.12), (0.01, 0.0)]:
        clock[0] += 2 * promotion.LOOK_S
        waited[0] += waits
        held(worked)
    assert slept == [promotion.REST * 0.01, promotion.REST * 0.02, promotion.MOST_S]


def test_threads_are_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one, at most a few, and not more than the cores there are for each rank."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert threads() == promotion.MAX_THREADS
    for ranks, expected in (("8", 2), ("16", 1), ("64", 1), ("", promotion.MAX_THREADS)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert threads() == expected


def test_idle_cores_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two questions; a machine of which the clock has not moved counts as idle."""
    times = type(promotion.psutil.cpu_times())
    now = dict.fromkeys(times._fields, 0.0)
    monkeypatch.setattr(promotion.psutil, "cpu_times", lambda: times(**now))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    idle = IdleCores()
    assert idle() == 8
    now["idle"], now["user"] = 3.0, 1.0
    assert idle() == pytest.approx(6.0)
    now["user"] = 5.0
    assert idle() == 0.0


# -- whether to compress --


class Far(MemoryStore):
    remote = True


def encoder(**changes: object) -> Encoder:
    found = Encoder(Policy(compression="auto"))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_auto_compresses_where_the_place_is_slower_than_encoding() -> None:
    """A place that was never measured: a bucket is taken for slow, a folder for fast. One that was: by its speed."""
    here, far = MemoryStore("memory://a"), Far("memory://b")
    assert not encoder()._decide(here, MANY) and encoder()._decide(far, MANY)
    assert encoder(sink=0.1 * ENCODED_A_SECOND)._decide(here, MANY)
    assert not encoder(sink=3 * ENCODED_A_SECOND)._decide(far, MANY)
    assert not encoder()._decide(far, LITTLE - 1), "there is no time to be won"


def test_auto_does_not_waver() -> None:
    """A place about as fast as encoding: what was done before goes on being done."""
    between = encoder(sink=0.85 * ENCODED_A_SECOND)
    store = MemoryStore("memory://a")
    assert not between._decide(store, MANY)
    between.sink = 0.5 * ENCODED_A_SECOND
    assert between._decide(store, MANY)
    between.sink = 0.85 * ENCODED_A_SECOND
    assert between._decide(store, MANY)
    between.sink = 1.2 * ENCODED_A_SECOND
    assert not between._decide(store, MANY)


def test_auto_takes_no_core_from_the_training() -> None:
    """However slow the place: on cores that are all in use there is nothing to compress with."""
    slow, store = encoder(sink=0.3 * ENCODED_A_SECOND, threads=4), MemoryStore("memory://a")
    slow.idle = lambda: 0.1
    assert not slow._decide(store, MANY)
    slow.idle = lambda: 2.0
    assert slow._decide(store, MANY)


def test_what_is_said_is_done() -> None:
    """Neither "none" nor "zstd" asks about speeds."""
    store = Far("memory://b")
    assert not Encoder(Policy(compression="none"))._decide(store, MANY)
    assert Encoder(Policy(compression="zstd"), sink=1e12)._decide(store, 1)


def test_speeds_are_learnt_from_what_was_really_done() -> None:
    """The first measurement counts as it is, later ones bit by bit; little says nothing about a speed."""
    one = encoder()
    one.learn(stored=10, upload_s=1.0, plain=10, encode_s=1.0)
    assert one.sink is None and one.rate == ENCODED_A_SECOND
    one.learn(stored=100 << 20, upload_s=1.0, plain=100 << 20, encode_s=2.0)
    assert one.sink == 100 << 20 and one.rate < ENCODED_A_SECOND
    one.learn(stored=200 << 20, upload_s=1.0, plain=0, encode_s=0.0)
    assert 100 << 20 < one.sink < 200 << 20


def test_a_base_is_worth_it_where_it_saves_enough() -> None:
    """For a kind of which any chunk gains by it; noise is left raw; and a choice is not given up for a trifle."""
    assert Learnt().choose([0.8, 0.8], []) == "whole"
    assert Learnt().choose([1.0, 0.99], []) == "raw"
    assert Learnt().choose([0.8, 0.8], [0.95, 0.3]) == "delta"
    assert Learnt().choose([0.8, 0.8], [0.88, 0.9]) == "whole"
    kept = Learnt(form="delta")
    assert kept.choose([0.8, 0.8], [0.88, 0.9]) == "delta" and kept.choose([0.8], [0.91]) == "whole"
    assert Learnt(form="raw").choose([0.96], []) == "raw" and Learnt(form="whole").choose([0.96], []) == "whole"
