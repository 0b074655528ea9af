"""Memory pressure: the tightest limit is found wherever it is, and a shortage is told once, with no false alarms.

Most tests play the kernel with folders of their own; the last ones use a real cgroup where one can be made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
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


def test_v2_limit(kernel: Kernel) -> None:
    """What a v2 cgroup leaves is its limit, less what is used, plus file cache that nobody needs."""
    kernel.belongs("0::/job\n")
    kernel.v2("/job", 4 * GIB, 3 * GIB, inactive_file=GIB // 2, active_file=GIB)
    assert kernel.room() == MemoryRoom(GIB + GIB // 2, 4 * GIB, str(kernel.sys / "job"))
    kernel.v2("/job", 4 * GIB, 3 * GIB)  # negative control: without that cache there is less
    assert kernel.room().available == GIB


def test_v1_limit(kernel: Kernel) -> None:
    """The same in v1, where the cache of cgroups below has a name of its own."""
    kernel.belongs("7:cpu,cpuacct:/other\n4:memory:/job\n1:name=systemd:/x\n")
    kernel.v1("/job", 4 * GIB, 3 * GIB, inactive_file=1, total_inactive_file=GIB)
    kernel.v1("/other", GIB, GIB)  # of another controller: not ours
    assert kernel.room() == MemoryRoom(2 * GIB, 4 * GIB, str(kernel.sys / "memory/job"))


@pytest.mark.parametrize("tight", ["", "/job", "/job/step", "/job/step/task"])
def test_every_ancestor_counts(kernel: Kernel, tight: str) -> None:
    """The tightest limit may sit on the process's own cgroup, on the mount's root, or on anything between."""
    kernel.belongs("0::/job/step/task\n")
    for path in ("", "/job", "/job/step", "/job/step/task"):
        kernel.v2(path, *((2 * GIB, GIB) if path == tight else (16 * GIB, GIB)))
    kernel.v2("/job/step/other", MIB, MIB)  # a neighbour's limit is not ours
    assert kernel.room() == MemoryRoom(GIB, 2 * GIB, str(kernel.sys / tight[1:]))


def test_hybrid(kernel: Kernel) -> None:
    """With v1 and v2 mounted together the limit is found in either."""
    kernel.belongs("4:memory:/a\n0::/b\n")
    kernel.v1("/a", 8 * GIB, GIB)
    kernel.v2("/unified/b", "max")
    assert kernel.room() == MemoryRoom(7 * GIB, 8 * GIB, str(kernel.sys / "memory/a"))
    kernel.v2("/unified/b", 2 * GIB, GIB)
    assert kernel.room().where == str(kernel.sys / "unified/b")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_unlimited(kernel: Kernel, version: str) -> None:
    """ "max", a huge number, or more than the machine has, are no limit: then the machine counts."""
    kernel.belongs("4:memory:/job\n" if version == "v1" else "0::/job\n")
    if version == "v1":
        kernel.v1("/job", UNLIMITED_V1, 40 * GIB)
        kernel.v1("", UNLIMITED_V1, 40 * GIB)
    else:
        kernel.v2("/job", "max", 40 * GIB)
    assert kernel.room() == MACHINE
    (kernel.v1 if version == "v1" else kernel.v2)("/job", 1000 * GIB, GIB)
    assert kernel.room() == MACHINE
    (kernel.v1 if version == "v1" else kernel.v2)("/job", GIB, 0)  # negative control
    assert kernel.room() != MACHINE


def test_memory_high_is_a_limit(kernel: Kernel) -> None:
    """Above memory.high processes are stopped for so long that nothing should be planned there."""
    kernel.belongs("0::/job\n")
    kernel.v2("/job", 8 * GIB, GIB)
    kernel.put("sys/job/memory.high", f"{2 * GIB}\n")
    assert kernel.room() == MemoryRoom(GIB, 2 * GIB, str(kernel.sys / "job"))


@pytest.mark.parametrize("path", ["/docker/0a1b2c", "/../../neighbour", "/", "/gone (deleted)", "/" + "x" * 300])
def test_container(kernel: Kernel, path: str) -> None:
    """A path that is not under the mount means that the mount's root is our own cgroup."""
    kernel.belongs(f"0::{path}\n")
    kernel.v2("", 4 * GIB, 3 * GIB)
    kernel.v2("/neighbour", MIB, MIB)
    assert kernel.room() == MemoryRoom(GIB, 4 * GIB, str(kernel.sys))


def test_container_with_cgroups_of_its_own(kernel: Kernel) -> None:
    """Where the path counts from the machine's root, the end of it that exists is ours."""
    kernel.belongs("4:memory:/docker/0a1b2c/task\n")
    kernel.v1("", 4 * GIB, GIB)
    kernel.v1("/task", 2 * GIB, GIB)
    assert kernel.room() == MemoryRoom(GIB, 2 * GIB, str(kernel.sys / "memory/task"))


def test_a_cgroup_called_memory_is_not_v1(kernel: Kernel) -> None:
    """In pure v2 a folder `memory` is somebody's cgroup, unless nothing is known about where we are."""
    kernel.belongs("0::/job\n")
    kernel.v2("/job", 8 * GIB, 0)
    kernel.v2("/memory", MIB, 0)
    assert kernel.room().total == 8 * GIB
    (kernel.proc / "self/cgroup").unlink()
    assert kernel.room().total == MIB


ODD: list[bytes] = [
    b"",
    b"\n",
    b"-5",
    b"12 13",
    b"\xff\xfe\x00",
    b"9" * 6000,
    b"many",
    b"some avg10=x\n",
    b"oom_kill\n",
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_malformed_files(kernel: Kernel, version: str, odd: bytes) -> None:
    """Whatever a file says, alone or with all others, nothing is raised, and figures stay within the machine's."""
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


def test_missing_files(tmp_path: Path) -> None:
    """Without any /proc and /sys the system call tells what the machine has, and nothing is raised."""
    found = room(tmp_path / "none", tmp_path / "no")
    assert found.where == "machine" and 0 < found.available <= found.total
    assert oom_kills(tmp_path / "none", tmp_path / "no") == OomKills(None, None)
    assert not spare_from_oom(proc=tmp_path / "none")
    assert room(pid=2**30).total > 0  # nobody has that number


def test_used_is_unknown_or_above_the_limit(kernel: Kernel) -> None:
    """A limit without its usage says nothing; more used than allowed leaves nothing, not less than that."""
    kernel.belongs("0::/job\n")
    kernel.v2("/job", GIB, 2 * GIB)
    assert kernel.room() == MemoryRoom(0, GIB, str(kernel.sys / "job"))
    (kernel.sys / "job/memory.current").unlink()
    assert kernel.room() == MACHINE


# -- the OOM killer --


def test_kills_in_v2(kernel: Kernel) -> None:
    """A kill in our cgroup is told from one of a neighbour, which the machine's counter has too."""
    kernel.belongs("0::/job\n")
    kernel.put("sys/job/memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 2\noom_group_kill 0\n")
    before = kernel.kills()
    assert before == OomKills(2, 3, str(kernel.sys / "job"))
    kernel.put("proc/vmstat", "oom_kill 4\n")
    assert kernel.kills().since(before) == ""
    kernel.put("sys/job/memory.events", "max 10\noom 5\noom_kill 3\n")
    assert kernel.kills().since(before) == "cgroup"
    assert before.since(before) == ""


def test_kills_in_v1(kernel: Kernel) -> None:
    """The counter of v1 stands in another file."""
    kernel.belongs("4:memory:/job\n0::/\n")
    kernel.put("sys/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    before = kernel.kills()
    kernel.put("sys/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert kernel.kills().since(before) == "cgroup"


def test_kills_of_the_machine(kernel: Kernel) -> None:
    """Where no cgroup counts, the machine's counter does; a counter that was not there before proves nothing."""
    before = kernel.kills()
    assert before == OomKills(None, 3)
    kernel.put("proc/vmstat", "oom_kill 4\n")
    assert kernel.kills().since(before) == "machine"
    assert kernel.kills().since(OomKills(None, None)) == ""
    assert OomKills(None, None).since(before) == ""


def test_kills_of_one_who_is_dead(kernel: Kernel) -> None:
    """The cgroup of the dead is known from before; counters of different cgroups are not compared."""
    kernel.put("proc/77/cgroup", "0::/task\n")
    kernel.put("sys/task/memory.events", "oom_kill 0\n")
    kernel.put("sys/memory.events", "oom_kill 8\n")
    before = oom_kills(kernel.proc, kernel.sys, 77)
    (kernel.proc / "77/cgroup").unlink()
    assert oom_kills(kernel.proc, kernel.sys, 77).since(before) == ""  # of the mount's root, where 8 had died
    kernel.put("sys/task/memory.events", "oom_kill 1\n")
    assert oom_kills(kernel.proc, kernel.sys, where=before.where).since(before) == "cgroup"


def test_spare(kernel: Kernel) -> None:
    """The score is lowered, and never raised."""
    score = kernel.proc / "self/oom_score_adj"
    assert spare_from_oom(proc=kernel.proc)
    assert score.read_text() == "-500\n"
    score.write_text("-900\n")
    assert spare_from_oom(proc=kernel.proc)
    assert score.read_text() == "-900\n"


# -- the watch, driven by hand --


class Driven:
    """A watch with a clock and a room that the test sets."""

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
        """Look each second; how many calls there were in all."""
        self.available = available
        for _ in range(seconds):
            self.now += 1
            self.watch.check(stalled)
        return len(self.calls)


def test_once_per_episode(kernel: Kernel) -> None:
    """A long shortage, and one that comes and goes, is told once; the next one after 30 s of enough is told again."""
    d = Driven(kernel)
    assert d.run(50, 100) == 0
    assert d.run(4, 100) == 1
    for _ in range(20):
        assert d.run(50, 20) == 1  # enough, for too short a time
        assert d.run(4, 1) == 1
    assert d.run(50, 31) == 1
    assert d.run(4, 5) == 2
    assert "4" in d.calls[0] or "here" in d.calls[0]


def test_hysteresis(kernel: Kernel) -> None:
    """Between the share and twice the share memory is neither short nor fine."""
    d = Driven(kernel)
    assert d.run(5, 100) == 0
    assert d.run(4) == 1
    for _ in range(5):
        d.run(50, 25)
        d.run(9, 25)  # not enough: the time of rest starts again
    assert d.watch.pressed and d.run(4) == 1
    d.run(10, 31)
    assert not d.watch.pressed and d.run(4) == 2


def test_without_hysteresis_there_would_be_many_calls(kernel: Kernel) -> None:
    """Negative control of the two above: with no time of rest each dip is an episode."""
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
        ("0::/job/task\n", "other/memory.events", "high 0\nmax {}\noom 0\n", 0),  # a neighbour's
        ("0::/job/task\n", "job/memory.events", "low {}\n", 0),
    ],
)
def test_held_at_a_limit(kernel: Kernel, line: str, file: str, text: str, calls: int) -> None:
    """A limit that is hit while little is left is pressure; one that a file cache hits is not, and neither is a
    counter that stands still, however high."""
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


def test_out_of_memory_in_a_cgroup(kernel: Kernel) -> None:
    """A cgroup that ran out of memory is under pressure, also when the killer has made room since."""
    kernel.belongs("0::/job\n")
    kernel.put("sys/job/memory.events", "max 5\noom 1\n")
    d = Driven(kernel)
    assert d.run(90, 3) == 0
    kernel.put("sys/job/memory.events", "max 6\noom 2\n")
    assert d.run(90, 3) == 1


def test_a_neighbours_end_is_not_ours(kernel: Kernel) -> None:
    """Events of an ancestor include those of cgroups beside ours: where the kernel tells its own apart, they count."""
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


@pytest.mark.parametrize(("avg10", "felt"), [("5.00", True), ("99.00", True), ("4.99", False), ("x", False)])
def test_average_of_stalls(kernel: Kernel, avg10: str, felt: bool) -> None:
    """It is compared with the share."""
    kernel.put("proc/pressure/memory", f"some avg10={avg10} avg60=0.00 avg300=0.00 total=0\nfull avg10=100.00\n")
    called, looks = Called(), []

    def look() -> MemoryRoom:
        looks.append(1)
        return MemoryRoom(20, 100, "here")

    watch = PressureWatch(0.05, called, poll_s=0.001, room=look, proc=kernel.proc, sys=kernel.sys)
    watch.start()
    assert eventually(lambda: len(looks) > 3)
    watch.stop()
    assert bool(called.calls) == felt


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


def test_thread(kernel: Kernel) -> None:
    """The call comes from the watch's own thread, by files alone, and once."""
    kernel.belongs("0::/job\n")
    kernel.v2("/job", GIB, GIB // 2)
    called = Called()
    watch = PressureWatch(0.05, called, poll_s=0.001, proc=kernel.proc, sys=kernel.sys)
    watch.start()
    watch.start()  # a second start is none
    assert len(threads()) == 1
    assert not called.calls
    kernel.v2("/job", GIB, GIB)
    assert eventually(lambda: bool(called.calls))
    watch.stop()
    assert eventually(lambda: not threads())
    assert called.calls[0][2] == "ckpt-pressure"
    assert len(called.calls) == 1


def test_a_failing_call_does_not_end_the_watch(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    """An error in the call, or in looking, is logged, and the watch goes on; the episode has been told."""
    looks = 0

    def look() -> MemoryRoom:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("odd")
        return MemoryRoom(1, 100, "x")

    def call(found: MemoryRoom, why: str) -> None:
        raise ValueError("broken")

    watch = PressureWatch(0.05, call, poll_s=0.001, room=look, proc=kernel.proc, sys=kernel.sys)
    watch.start()
    assert eventually(lambda: looks > 5)
    watch.stop()
    assert caplog.text.count("ValueError: broken") == 1
    assert "odd" in caplog.text


# -- a real cgroup --

LIMIT = 96 * MIB
CHILD = """
import os, sys, threading
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from ckpt.core.ipc.arena import room
from ckpt.guard.memory_pressure import PressureWatch
say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece: two threads speak
now = room()
say(now.total, now.available, now.where)
PressureWatch(0.3, lambda found, why: say("pressed", found.available, found.total), poll_s=0.01).start()
taken = []
for line in sys.stdin:
    taken.append(bytearray(b"x") * (int(line) << 20))
    say("taken", room().available)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup below our own with a limit of 96 MiB."""
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
                with suppress(OSError):  # nothing goes to swap
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


def ask(child: subprocess.Popen[str], mib: int) -> None:
    assert child.stdin
    child.stdin.write(f"{mib}\n")
    child.stdin.flush()


def test_a_real_cgroup(cgroup: Path, child: subprocess.Popen[str]) -> None:
    """A process in a cgroup sees its limit and what it takes, is told when it becomes short, and its end by the OOM
    killer is known as such."""
    assert child.stdout
    total, available, where = child.stdout.readline().split()
    assert (int(total), where) == (LIMIT, str(cgroup))
    assert LIMIT // 3 < int(available) < LIMIT
    assert room(pid=child.pid).where == str(cgroup)
    before = oom_kills(pid=child.pid)
    assert (before.cgroup, before.where) == (0, str(cgroup))
    ask(child, 16)
    word, left = child.stdout.readline().split()
    assert word == "taken"  # and no word of pressure: the negative control
    assert int(left) < int(available) - 12 * MIB
    ask(child, int(left) // MIB - LIMIT // MIB // 4)
    said = {child.stdout.readline().split()[0] for _ in range(2)}
    assert said == {"taken", "pressed"}
    ask(child, 400)
    assert child.wait(60) == -signal.SIGKILL
    assert oom_kills(where=before.where).since(before) == "cgroup"


def test_a_kill_that_is_not_the_oom_killers(cgroup: Path, child: subprocess.Popen[str]) -> None:
    """Negative control: who is killed by somebody else has not run out of memory."""
    assert child.stdout
    child.stdout.readline()
    before = oom_kills(pid=child.pid)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    assert oom_kills(where=before.where).since(before) == ""
