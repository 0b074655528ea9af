"""Tests of automatic compression, and of throttled background work while training waits for CPU cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ckpt.core.checkpoint.encode import ENCODED_A_SECOND, LITTLE, Encoder
from ckpt.core.checkpoint.incremental import Policy
from ckpt.core.writer import promotion
from ckpt.core.writer.promotion import Throttle, threads, waiting_s
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
    """Yield the PID of a process that shares one core with two other busy ones."""
    processes = [spinner() for _ in range(3)]
    yield processes[0].pid
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def alone() -> Iterator[int]:
    """Yield the PID of an idle process, which does not wait for a core."""
    process = spinner(rest="600")
    yield process.pid
    process.kill()
    process.wait()


def starved(pid: int) -> bool:
    """Return True if a `Throttle` considers the process starved within a second."""
    held = Throttle(lambda: pid)
    for look in range(5):
        held(0.0)
        if look and held.starved:
            return True
        time.sleep(2 * promotion.LOOK_S)
    return False


def test_trainer_waiting_for_core_is_detected(crowded: int) -> None:
    """The kernel counts the time of ready threads that do not run, and it exceeds the limit."""
    before = waiting_s(crowded)
    time.sleep(0.5)
    assert waiting_s(crowded) > before
    assert starved(crowded)


def test_trainer_without_core_shortage_is_not_starved(alone: int) -> None:
    """It waits for a network, a device or nothing; it has ended, or is unknown."""
    assert not starved(alone)
    assert not starved(0)
    assert waiting_s(2**22 + 1) == 0.0


def test_background_work_pauses_while_trainer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are proportional to the work, short, and stop as soon as the trainer has its cores again."""
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


def test_threads_are_divided_among_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one, at most a few, and not more than the cores per rank."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert threads() == promotion.MAX_THREADS
    for ranks, expected in (("8", 2), ("16", 1), ("64", 1), ("", promotion.MAX_THREADS)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert threads() == expected


# -- whether to compress --


class Far(MemoryStore):
    remote = True


def encoder(**changes: object) -> Encoder:
    found = Encoder(Policy(compression="auto"))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_auto_compresses_for_slow_stores() -> None:
    """Unmeasured buckets count as slow, and folders as fast. Measured stores count by their speed."""
    here, far = MemoryStore("memory://a"), Far("memory://b")
    assert not encoder()._decide(here, MANY) and encoder()._decide(far, MANY)
    assert encoder(sink=0.1 * ENCODED_A_SECOND)._decide(here, MANY)
    assert not encoder(sink=3 * ENCODED_A_SECOND)._decide(far, MANY)
    assert not encoder()._decide(far, LITTLE - 1), "no time can be saved"


def test_auto_does_not_compress_without_idle_cores() -> None:
    slow, store = encoder(sink=0.3 * ENCODED_A_SECOND, threads=4), MemoryStore("memory://a")
    slow.idle = lambda: 0.1
    assert not slow._decide(store, MANY)
    slow.idle = lambda: 2.0
    assert slow._decide(store, MANY)


def test_configured_compression_is_always_used() -> None:
    """ "none" and "zstd" do not depend on speeds."""
    store = Far("memory://b")
    assert not Encoder(Policy(compression="none"))._decide(store, MANY)
    assert Encoder(Policy(compression="zstd"), sink=1e12)._decide(store, 1)
