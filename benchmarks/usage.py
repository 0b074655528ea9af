"""Memory and CPU time of a process and its children, by process and thread. Linux, from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
FAMILY = "BENCHMARK_FAMILY"  # in the environment: processes with the same value belong together


def family(pid: int, mark: str = "") -> list[int]:
    """Return a process, its descendants, and all processes with its mark, or `mark`, in the environment: a writer is
    not a child process."""
    children: dict[int, list[int]] = {}
    found, todo = set[int](), [pid]
    with contextlib.suppress(OSError):
        mark = mark or _mark(pid)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(one := int(entry.name))
                if mark and _mark(one) == mark:
                    todo.append(one)
    while todo:
        if (one := todo.pop()) not in found:
            found.add(one)
            todo += children.get(one, [])
    return sorted(found)


def _mark(pid: int) -> str:
    """Return the mark in its environment; empty if it has none."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((word.partition(b"=")[2].decode() for word in words if word.startswith(f"{FAMILY}=".encode())), "")


def memory(pid: int) -> int:
    """Return the bytes of a family, with shared memory counted once (proportional set size)."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def shared(name: str) -> int:
    """Return the bytes of the largest shared memory of this name (`memfd_create`) open in this process, or 0.
    Pages not written yet do not count."""
    sizes = [0]
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if name in os.readlink(fd):
                sizes.append(fd.stat().st_blocks * 512)
    return max(sizes)


@dataclass
class Peak:
    """The maximum of the measured memory, and the first value."""

    before: int = 0
    most: int = 0

    @property
    def extra(self) -> int:
        return self.most - self.before


@contextlib.contextmanager
def watching(pid: int, every_s: float = 0.1) -> Iterator[Peak]:
    """Measure a family's memory repeatedly. This slows the family down, so use it for saves that are not timed."""
    before = memory(pid)
    peak = Peak(before, before)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            peak.most = max(peak.most, memory(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class Cpu:
    """CPU seconds, in user mode and in the kernel."""

    user: float = 0.0
    system: float = 0.0

    def __add__(self, other: Cpu) -> Cpu:
        return Cpu(self.user + other.user, self.system + other.system)

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.user - other.user, self.system - other.system)

    @property
    def total(self) -> float:
        return self.user + self.system


@dataclass
class Clock:
    """CPU time so far of this process's threads by name, of its children, and of everything else."""

    threads: dict[str, Cpu] = field(default_factory=dict)
    children: Cpu = field(default_factory=Cpu)
    machine: Cpu = field(default_factory=Cpu)

    @classmethod
    def now(cls) -> Clock:
        """Return the current times. Threads unknown to Python (OpenMP's) count as "compute", like the main thread."""
        me = os.getpid()
        names = {t.native_id: t.name for t in threading.enumerate()}
        found = cls()
        for task in Path(f"/proc/{me}/task").iterdir():
            name = names.get(int(task.name), "compute")
            name = "compute" if name == "MainThread" else name.partition("_")[0]
            found.threads[name] = found.threads.get(name, Cpu()) + _cpu(task / "stat")
        for one in family(me):
            if one != me:
                found.children += _cpu(Path(f"/proc/{one}/stat"))
        fields = [int(n) * TICK_S for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        found.machine = Cpu(fields[0] + fields[1], fields[2] + fields[5] + fields[6])  # irq and softirq with system
        return found

    def since(self, before: Clock) -> dict[str, Cpu]:
        """Return CPU time by thread of the trainer, "child processes", and "kernel and others"."""
        found = {name: cpu - before.threads.get(name, Cpu()) for name, cpu in self.threads.items()}
        found["child processes"] = self.children - before.children
        own = sum(found.values(), Cpu())
        found["kernel and others"] = self.machine - before.machine - own
        return found


def _cpu(stat: Path) -> Cpu:
    with contextlib.suppress(OSError, IndexError):
        fields = stat.read_text().rpartition(")")[2].split()
        return Cpu(int(fields[11]) * TICK_S, int(fields[12]) * TICK_S)
    return Cpu()
