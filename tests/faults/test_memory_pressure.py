"""Memory pressure: the tightest limit is found at any level, and a shortage is reported once without false alarms.

Most tests simulate the kernel with their own folders. The last ones use a real cgroup if one can be created.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt.core.ipc import arena
from ckpt.core.ipc.arena import MemoryRoom, room, spare_from_oom
from ckpt.guard.memory_pressure import OomKills, PressureWatch, oom_kills
from processes import REPO, eventually

GIB, MIB = 1 << 30, 1 << 20
MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"  # 64 GiB, 32 GiB
UNLIMITED_V1 = 9223372036854771712


class Kernel:
    """Fake /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.put("proc/meminfo", MEMINFO)
        self.put("proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
        self.put("proc/self/oom_score_adj", "0\n")
        self.sys.mkdir()

    def put(self, name: str, content: str | bytes) -> None:
        file = self.proc.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def belongs(self, text: str) -> None:
        self.put("proc/self/cgroup", text)

    def v2(self, path: str, limit: object, used: int = 0, **stat: int) -> None:
        self.put(f"sys{path}/memory.max", f"{limit}\n")
        self.put(f"sys{path}/memory.current", f"{used}\n")
        self.put(f"sys{path}/memory.stat", "anon 7\n" + "".join(f"{k} {v}\n" for k, v in stat.items()))

    def v1(self, path: str, limit: int, used: int = 0, **stat: int) -> None:
        self.put(f"sys/memory{path}/memory.limit_in_bytes", f"{limit}\n")
        self.put(f"sys/memory{path}/memory.usage_in_bytes", f"{used}\n")
        self.put(f"sys/memory{path}/memory.stat", "rss 7\n" + "".join(f"{k} {v}\n" for k, v in stat.items()))

    def room(self) -> MemoryRoom:
        return room(self.proc, self.sys)

    def kills(self) -> OomKills:
        return oom_kills(self.proc, self.sys)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


MACHINE = MemoryRoom(32 * GIB, 64 * GIB, "machine")


# -- room --


def contained(kernel: Kernel) -> None:
    kernel.v2("", 4 * GIB, 3 * GIB)
    kernel.v2("/neighbour", MIB, MIB)


def four_levels(tight: str) -> Callable[[Kernel], object]:
    def make(kernel: Kernel) -> None:
        for path in ("", "/job", "/job/step", "/job/step/task"):
            kernel.v2(path, *((2 * GIB, GIB) if path == tight else (16 * GIB, GIB)))
        kernel.v2("/job/step/other", MIB, MIB)  # a sibling's limit does not apply

    return make


# The cgroup of the process, the files, and the room: available, total, limiting folder. None: the machine.
ROOMS: dict[str, tuple[str, Callable[[Kernel], object], tuple[int, int, str] | None]] = {
    "v2": ("0::/job", lambda k: k.v2("/job", 4 * GIB, 3 * GIB), (GIB, 4 * GIB, "job")),
    "v2, file cache can be reclaimed": (
        "0::/job",
        lambda k: k.v2("/job", 4 * GIB, 3 * GIB, inactive_file=GIB // 2, active_file=GIB),
        (GIB + GIB // 2, 4 * GIB, "job"),
    ),
    "v2, high: the kernel throttles above it": (
        "0::/job",
        lambda k: (k.v2("/job", 8 * GIB, GIB), k.put("sys/job/memory.high", f"{2 * GIB}\n")),
        (GIB, 2 * GIB, "job"),
    ),
    "v2, more used than allowed": ("0::/job", lambda k: k.v2("/job", GIB, 2 * GIB), (0, GIB, "job")),
    "v2, unknown usage": ("0::/job", lambda k: k.put("sys/job/memory.max", f"{GIB}\n"), None),
    "v2, no limit": ("0::/job", lambda k: k.v2("/job", "max", 40 * GIB), None),
    "v2, more than the machine has": ("0::/job", lambda k: k.v2("/job", 1000 * GIB, GIB), None),
    "v2, a cgroup named memory": (
        "0::/job", lambda k: (k.v2("/job", 8 * GIB), k.v2("/memory", MIB)), (8 * GIB, 8 * GIB, "job"),
    ),
    "v1, of several controllers": (
        "7:cpu,cpuacct:/other\n4:memory:/job\n1:name=systemd:/x",
        lambda k: (k.v1("/job", 4 * GIB, 3 * GIB, total_inactive_file=GIB), k.v1("/other", GIB, GIB)),
        (2 * GIB, 4 * GIB, "memory/job"),
    ),
    "v1, no limit": ("4:memory:/job", lambda k: k.v1("/job", UNLIMITED_V1, 40 * GIB), None),
    "v1, the end of the path exists": (
        "4:memory:/docker/0a1b2c/task",
        lambda k: (k.v1("", 4 * GIB, GIB), k.v1("/task", 2 * GIB, GIB)),
        (GIB, 2 * GIB, "memory/task"),
    ),
    "v1 and v2, limit in v1": (
        "4:memory:/a\n0::/b",
        lambda k: (k.v1("/a", 8 * GIB, GIB), k.v2("/unified/b", "max")),
        (7 * GIB, 8 * GIB, "memory/a"),
    ),
    "v1 and v2, limit in v2": (
        "4:memory:/a\n0::/b",
        lambda k: (k.v1("/a", 8 * GIB, GIB), k.v2("/unified/b", 2 * GIB, GIB)),
        (GIB, 2 * GIB, "unified/b"),
    ),
    **{
        f"container, {path[:20]}": (f"0::{path}", contained, (GIB, 4 * GIB, ""))
        for path in ("/docker/0a1b2c", "/../../neighbour", "/", "/gone (deleted)", "/" + "x" * 300)
    },
    **{
        f"v2, tightest at {tight!r}": ("0::/job/step/task", four_levels(tight), (GIB, 2 * GIB, tight[1:]))
        for tight in ("", "/job", "/job/step", "/job/step/task")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ROOMS)
def test_room_is_that_of_the_tightest_limit(kernel: Kernel, case: str) -> None:
    """The limit minus the usage, at any level, in either version; without a limit, the machine's memory."""
    belongs, make, expected = ROOMS[case]
    kernel.belongs(f"{belongs}\n")
    make(kernel)
    if expected is None:
        assert kernel.room() == MACHINE
    else:
        available, total, where = expected
        assert kernel.room() == MemoryRoom(available, total, str(kernel.sys / where))


ODD = [b"", b"\n", b"-5", b"12 13", b"\xff\xfe\x00", b"9" * 6000, b"many", b"some avg10=x\n", b"oom_kill\n"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_malformed_files_raise_nothing(kernel: Kernel, version: str, odd: bytes) -> None:
    """Malformed files, alone or together, raise nothing, and figures stay within the machine's."""
    kernel.belongs("4:memory:/job\n" if version == "v1" else "0::/job\n")
    (kernel.v1 if version == "v1" else kernel.v2)("/job", 4 * GIB, GIB, inactive_file=9)
    for name in ("memory.events", "memory.oom_control", "memory.failcnt", "memory.pressure", "memory.high"):
        kernel.put(f"sys{'/memory' if version == 'v1' else ''}/job/{name}", b"1")
    files = [file for folder in (kernel.proc, kernel.sys) for file in folder.rglob("*") if file.is_file()]
    for file in [*files, None]:
        kept = [(each, each.read_bytes()) for each in files if file in (None, each)]
        for each, _ in kept:
            each.write_bytes(odd)
        found = kernel.room()
        assert 0 <= found.available <= found.total
        kernel.kills()
        spare_from_oom(proc=kernel.proc)
        PressureWatch(0.05, lambda *_: None, proc=kernel.proc, sys=kernel.sys).check()
        for each, content in kept:
            each.write_bytes(content)


def test_missing_files_raise_nothing(tmp_path: Path) -> None:
    """Without /proc and /sys the system call returns the machine's memory, and nothing is raised."""
    found = room(tmp_path / "none", tmp_path / "no")
    assert found.where == "machine" and 0 < found.available <= found.total
    assert oom_kills(tmp_path / "none", tmp_path / "no") == OomKills(None, None)
    assert not spare_from_oom(proc=tmp_path / "none")
    assert room(pid=2**30).total > 0  # no process has that id


# -- the OOM killer --


def test_own_kills_are_counted_in_v2(kernel: Kernel) -> None:
    """A kill in the own cgroup is distinguished from a sibling's, which the machine's counter includes too."""
    kernel.belongs("0::/job\n")
    kernel.put("sys/job/memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 2\noom_group_kill 0\n")
    before = kernel.kills()
    assert before == OomKills(2, 3, str(kernel.sys / "job"))
    kernel.put("proc/vmstat", "oom_kill 4\n")
    assert kernel.kills().since(before) == ""
    kernel.put("sys/job/memory.events", "max 10\noom 5\noom_kill 3\n")
    assert kernel.kills().since(before) == "cgroup"
    assert before.since(before) == ""


def test_own_kills_are_counted_in_v1(kernel: Kernel) -> None:
    kernel.belongs("4:memory:/job\n0::/\n")
    counter = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    kernel.put("sys/memory/job/memory.oom_control", counter.format(0))
    before = kernel.kills()
    kernel.put("sys/memory/job/memory.oom_control", counter.format(1))
    assert kernel.kills().since(before) == "cgroup"


def test_machine_kills_count_without_a_cgroup(kernel: Kernel) -> None:
    """Without a cgroup counter the machine's counts. A counter that was missing before proves nothing."""
    before = kernel.kills()
    assert before == OomKills(None, 3)
    kernel.put("proc/vmstat", "oom_kill 4\n")
    assert kernel.kills().since(before) == "machine"
    assert kernel.kills().since(OomKills(None, None)) == ""
    assert OomKills(None, None).since(before) == ""


def test_oom_score_is_only_lowered(kernel: Kernel) -> None:
    """The score is lowered and never raised."""
    score = kernel.proc / "self/oom_score_adj"
    assert spare_from_oom(proc=kernel.proc)
    assert score.read_text() == "-500\n"
    score.write_text("-900\n")
    assert spare_from_oom(proc=kernel.proc)
    assert score.read_text() == "-900\n"


# -- the watch, without its thread --


class Driven:
    """A watch with a clock and an amount of free memory that the test sets."""

    def __init__(self, kernel: Kernel, share: float = 0.05, **more: Any) -> None:
        self.now, self.available, self.calls = 0.0, 50, []  # of 100
        self.calls: list[str]
        self.watch = PressureWatch(
            share,
            lambda room, why: self.calls.append(why),
            room=lambda: MemoryRoom(self.available, 100, "here"),
            clock=lambda: self.now,
            proc=kernel.proc,
            sys=kernel.sys,
            **more,
        )

    def run(self, available: int, seconds: int = 1, stalled: bool = False) -> int:
        """Check once a second. Return the total number of calls."""
        self.available = available
        for _ in range(seconds):
            self.now += 1
            self.watch.check(stalled)
        return len(self.calls)


def test_shortage_is_reported_once_per_episode(kernel: Kernel) -> None:
    """A long or intermittent shortage is reported once. After 30 s of recovery the next one is reported."""
    d = Driven(kernel)
    assert d.run(50, 100) == 0
    assert d.run(4, 100) == 1
    for _ in range(20):
        assert d.run(50, 20) == 1  # enough, but not long enough
        assert d.run(4, 1) == 1
    assert d.run(50, 31) == 1
    assert d.run(4, 5) == 2
    assert "4" in d.calls[0] or "here" in d.calls[0]


def test_episode_goes_on_between_short_and_plenty(kernel: Kernel) -> None:
    """Between the share and twice the share, memory is neither short nor plenty."""
    d = Driven(kernel)
    assert d.run(5, 100) == 0
    assert d.run(4) == 1
    for _ in range(5):
        d.run(50, 25)
        d.run(9, 25)  # not enough: the recovery time starts again
    assert d.watch.pressed and d.run(4) == 1


def test_negative_control_without_recovery_time(kernel: Kernel) -> None:
    """Without a recovery time each dip is an episode."""
    d = Driven(kernel, fine_s=0)
    for _ in range(5):
        d.run(50, 2)
        d.run(4, 1)
    assert len(d.calls) == 5


@pytest.mark.parametrize(
    ("line", "file", "text", "calls"),
    [
        ("0::/job/task\n", "job/memory.events", "high 0\nmax {}\noom 0\n", 1),
        ("0::/job/task\n", "job/task/memory.events.local", "high {}\nmax 0\noom 0\n", 1),
        ("4:memory:/job/task\n", "memory/job/memory.failcnt", "{}\n", 1),
        ("0::/job/task\n", "other/memory.events", "high 0\nmax {}\noom 0\n", 0),  # a sibling's file
        ("0::/job/task\n", "job/memory.events", "low {}\n", 0),
    ],
)
def test_hitting_a_limit_is_pressure(kernel: Kernel, line: str, file: str, text: str, calls: int) -> None:
    """Hitting a limit while little memory is free is pressure. Hitting it because of file cache is not, nor is a high
    but constant counter."""
    (kernel.sys / "job/task").mkdir(parents=True)
    (kernel.sys / "memory/job/task").mkdir(parents=True)
    kernel.belongs(line)
    kernel.put(f"sys/{file}", text.format(1000))
    d = Driven(kernel)
    assert d.run(9, 5) == 0
    kernel.put(f"sys/{file}", text.format(1001))
    assert d.run(80, 5) == 0
    kernel.put(f"sys/{file}", text.format(1002))
    assert d.run(9, 5) == calls


def test_out_of_memory_cgroup_is_pressure(kernel: Kernel) -> None:
    """A cgroup that ran out of memory is under pressure, even if the OOM killer has freed memory since."""
    kernel.belongs("0::/job\n")
    kernel.put("sys/job/memory.events", "max 5\noom 1\n")
    d = Driven(kernel)
    assert d.run(90, 3) == 0
    kernel.put("sys/job/memory.events", "max 6\noom 2\n")
    assert d.run(90, 3) == 1


def test_events_of_siblings_do_not_count(kernel: Kernel) -> None:
    """An ancestor's events include those of sibling cgroups. If the kernel has local counters, only they count."""
    kernel.belongs("0::/all/job\n")
    (kernel.sys / "all/job").mkdir(parents=True)
    kernel.put("sys/all/memory.events.local", "max 0\noom 0\n")
    kernel.put("sys/all/memory.events", "max 5\noom 1\n")
    d = Driven(kernel)
    d.run(8, 2)
    kernel.put("sys/all/memory.events", "max 6\noom 2\n")
    assert d.run(8, 2) == 0
    kernel.put("sys/all/memory.events.local", "max 1\noom 1\n")
    assert d.run(8, 2) == 1


@pytest.mark.parametrize(("avg10", "reported"), [("5.00", True), ("99.00", True), ("4.99", False), ("x", False)])
def test_average_of_stalls_is_compared_with_share(kernel: Kernel, avg10: str, reported: bool) -> None:
    """The average is compared with the share."""
    kernel.put("proc/pressure/memory", f"some avg10={avg10} avg60=0.00 avg300=0.00 total=0\nfull avg10=100.00\n")
    called, checks = Called(), []

    def read_room() -> MemoryRoom:
        checks.append(1)
        return MemoryRoom(20, 100, "here")

    watch = PressureWatch(0.05, called, poll_s=0.001, room=read_room, proc=kernel.proc, sys=kernel.sys)
    watch.start()
    assert eventually(lambda: len(checks) > 3)
    watch.stop()
    assert bool(called.calls) == reported


# -- the thread --


class Called:
    def __init__(self) -> None:
        self.calls: list[tuple[MemoryRoom, str, str]] = []

    def __call__(self, found: MemoryRoom, why: str) -> None:
        self.calls.append((found, why, threading.current_thread().name))


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "ckpt-pressure"]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert eventually(lambda: not threads())


def test_call_comes_from_own_thread_once(kernel: Kernel) -> None:
    """The watch's own thread makes the call, from the files alone, and only once."""
    kernel.belongs("0::/job\n")
    kernel.v2("/job", GIB, GIB // 2)
    called = Called()
    watch = PressureWatch(0.05, called, poll_s=0.001, proc=kernel.proc, sys=kernel.sys)
    watch.start()
    watch.start()  # a second start has no effect
    assert len(threads()) == 1
    assert not called.calls
    kernel.v2("/job", GIB, GIB)
    assert eventually(lambda: bool(called.calls))
    watch.stop()
    assert eventually(lambda: not threads())
    assert called.calls[0][2] == "ckpt-pressure"
    assert len(called.calls) == 1


# -- a real cgroup --

LIMIT = 96 * MIB
CHILD = """
import os, sys, threading
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from ckpt.core.ipc.arena import room
from ckpt.guard.memory_pressure import PressureWatch
report = lambda *values: os.write(1, (" ".join(map(str, values)) + "\\n").encode())  # in one call: two threads print
now = room()
report(now.total, now.available, now.where)
PressureWatch(0.3, lambda found, why: report("pressed", found.available, found.total), poll_s=0.01).start()
taken = []
for line in sys.stdin:
    taken.append(bytearray(b"x") * (int(line) << 20))
    report("taken", room().available)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Create a child cgroup with a limit of 96 MiB."""
    chains = arena.cgroup_chains(arena.PROC, arena.SYS, "self")
    reasons = []
    for own in [chain[0] for chain in chains]:
        made = own / f"everystep-{os.getpid()}"
        try:
            made.mkdir()
        except OSError as error:
            reasons.append(f"{own}: {error.strerror}")
            continue
        try:
            limits = [made / name for name in ("memory.max", "memory.limit_in_bytes") if (made / name).exists()]
            if limits:
                limits[0].write_text(str(LIMIT))
                with suppress(OSError):  # no swap
                    (made / "memory.swap.max").write_text("0")
                with suppress(OSError):
                    (made / "memory.swappiness").write_text("0")
                yield made
                return
            reasons.append(f"{own}: no memory controller")
        except OSError as error:
            reasons.append(f"{own}: {error.strerror}")
        finally:
            assert eventually(lambda made=made: _removed(made))  # type: ignore[misc]
    pytest.skip("no cgroup with a limit can be made: " + "; ".join(reasons))


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@pytest.fixture
def child(cgroup: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(cgroup)], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def allocate(child: subprocess.Popen[str], mib: int) -> None:
    assert child.stdin
    child.stdin.write(f"{mib}\n")
    child.stdin.flush()


def test_real_cgroup_reports_pressure_and_kill(cgroup: Path, child: subprocess.Popen[str]) -> None:
    """A process in a cgroup sees its limit and its usage, is notified when memory becomes short, and its end by the OOM
    killer is recognized."""
    assert child.stdout
    total, available, where = child.stdout.readline().split()
    assert (int(total), where) == (LIMIT, str(cgroup))
    assert LIMIT // 3 < int(available) < LIMIT
    assert room(pid=child.pid).where == str(cgroup)
    before = oom_kills(pid=child.pid)
    assert (before.cgroup, before.where) == (0, str(cgroup))
    allocate(child, 16)
    word, left = child.stdout.readline().split()
    assert word == "taken"  # negative control: no pressure yet
    assert int(left) < int(available) - 12 * MIB
    allocate(child, int(left) // MIB - LIMIT // MIB // 4)
    messages = {child.stdout.readline().split()[0] for _ in range(2)}
    assert messages == {"taken", "pressed"}
    allocate(child, 400)
    assert child.wait(60) == -signal.SIGKILL
    assert oom_kills(where=before.where).since(before) == "cgroup"


def test_other_kill_is_not_an_oom_kill(cgroup: Path, child: subprocess.Popen[str]) -> None:
    """Negative control: a process killed otherwise has not run out of memory."""
    assert child.stdout
    child.stdout.readline()
    before = oom_kills(pid=child.pid)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    assert oom_kills(where=before.where).since(before) == ""
