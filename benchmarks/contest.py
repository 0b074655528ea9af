"""Measure one library: time that training loses to its saves, and duration of restores. Run by `figures.py`.

    python benchmarks/contest.py save NAME --folder DIR       # prints one JSON line per finding
    python benchmarks/contest.py restore NAME --folder DIR

A cycle of `save`: quiet steps for the duration of a step, a save, steps until it is complete, and two more.
- *blocks*: duration of the call.
- *lost*: that, and the excess of every step over the median until two steps after the end. This figure counts: a short
  stall with a CPU-hungry background costs more than a blocking save.
- *durable*: from the call until the library reports a complete checkpoint.
- *memory*: additional peak memory of the trainer and its children, during a save without time measurement.

Restored state is compared bit for bit with the saved state.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

from peers import MODULES, Peer, peer_class
from usage import Clock, Cpu
from workload import SIZES, Training

T = TypeVar("T")

QUIET = 6  # steps of a cycle without a save in flight
AFTER = 2  # steps after the end that count too: caches are cold, clean-up has begun
LONGEST_S = 120.0  # limit of a save; a slower library has failed
EXPECTED = "expected.txt"  # digest of the newest checkpoint


class Watch:
    """Wait in a thread for the end of a save, to the millisecond, independent of the duration of steps."""

    def __init__(self, wait: Callable[[], None], started: float) -> None:
        self.started, self.took, self.error = started, 0.0, None
        self._wait, self._ended = wait, threading.Event()
        threading.Thread(target=self._run, name="bench-watch", daemon=True).start()

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self.error = error
        self.took = time.perf_counter() - self.started
        self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def join(self) -> float:
        if not self._ended.wait(LONGEST_S):
            raise TimeoutError(f"a save is not complete after {LONGEST_S:g} s")
        if self.error is not None:
            raise self.error
        return self.took


def say(kind: str, **what: Any) -> None:
    print(json.dumps({"kind": kind, **what}), flush=True)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return seconds and the result."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def seconds(work: Callable[[], object]) -> float:
    return timed(work)[0]


def saves(name: str, folder: Path, training: Training, cycles: int) -> None:
    peer_type = peer_class(name)
    alone = statistics.median(seconds(training.step) for _ in range(QUIET + 2))
    opened, peer = timed(lambda: peer_type(training, folder))
    started = time.perf_counter()
    blocked, wait = timed(lambda: peer.save(1))
    wait()
    durable = time.perf_counter() - started
    say("start", step_s=alone, open_s=opened, first_blocks_s=blocked, first_durable_s=durable, fsync=peer.fsync)
    for _ in range(AFTER):
        training.step()
    for step in range(2, cycles + 2):
        say("cycle", **cycle(peer, training, step))
        peer.tidy()
    say("memory begins")
    watch = Watch(peer.save(cycles + 2), time.perf_counter())
    while not watch.ended:
        training.step()
    watch.join()
    say("memory ends", slots=peer.extra_slots())  # a save may have added one
    training.step()
    peer.save(cycles + 3)()
    expected = training.digest()
    (folder / EXPECTED).write_text(expected)
    if peer.memory:
        for _ in range(3):
            training.spoil()
            took = seconds(peer.restore_memory)
            say("restored", source="memory", seconds=took, equal=training.digest() == expected)
    peer.close()
    say("end", written=sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))


def cycle(peer: Peer, training: Training, step: int) -> dict[str, Any]:
    """Measure quiet steps, a save, and steps until two steps after its end."""
    clock = Clock.now()
    began = time.perf_counter()
    quiet = [seconds(training.step) for _ in range(QUIET)]
    quiet_s = time.perf_counter() - began
    quiet_cpu = Clock.now().since(clock)
    usual = statistics.median(quiet)
    clock = Clock.now()
    began = time.perf_counter()
    wait = peer.save(step)
    blocked = time.perf_counter() - began
    watch = Watch(wait, began)
    flying, after = [], 0
    while after < AFTER:
        after += watch.ended
        flying.append(seconds(training.step))
    window_s = time.perf_counter() - began
    busy_cpu = Clock.now().since(clock)
    durable = watch.join()
    lost = blocked + sum(took - usual for took in flying)
    rate = {who: Cpu(cpu.user / quiet_s, cpu.system / quiet_s) for who, cpu in quiet_cpu.items()}
    cpu = {}
    for who, used in busy_cpu.items():  # beyond normal use in the same time without a save
        usually = rate.get(who, Cpu())
        share = window_s - lost if who == "compute" else window_s
        cpu[who] = [used.user - usually.user * share, used.system - usually.system * share]
    return {
        "quiet_step_s": usual,
        "blocks_s": blocked,
        "lost_s": lost,
        "durable_s": durable,
        "steps": flying,
        "window_s": window_s,
        "cpu_s": cpu,
    }


def restores(name: str, folder: Path, training: Training) -> None:
    expected = (folder / EXPECTED).read_text()
    opened, peer = timed(lambda: peer_class(name)(training, folder))
    for source in ("cold", "warm", "warm"):
        training.spoil()
        if source == "cold":
            forget(folder)
        took = seconds(peer.restore)
        say("restored", source=source, seconds=took, open_s=opened, equal=training.digest() == expected)
    peer.close()
    say("end")


def forget(folder: Path) -> None:
    """Drop the cached pages of these files alone, so that reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)  # unwritten pages stay cached
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "restore"])
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--cycles", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "save":
        training = Training.build(SIZES[arguments.size])
        for _ in range(2):
            training.step()
        saves(arguments.name, arguments.folder, training, arguments.cycles)
    else:
        training = Training.build(SIZES[arguments.size], seed=1)
        restores(arguments.name, arguments.folder, training)


if __name__ == "__main__":
    main()
