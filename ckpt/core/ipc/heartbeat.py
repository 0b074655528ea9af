"""The heartbeat: the progress of the training loop, in a few pages of memory that trainer and writer share.

The trainer's main thread writes its progress to these pages without sending a message. The writer compares it with the
usual pace, even if the trainer is frozen, and writes the pace that it has measured to the same pages.

Every field is an aligned word of eight bytes that only one process writes, so it is never read half written. After the
fields follows a ring of the last steps, with the time of each step and the cost of saving up to it. The writer computes
the run metrics from the ring, even if the trainer has just been killed. A step costs about a microsecond.

`Process` identifies a process by its id and start time, because process ids are reused."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from dataclasses import dataclass

from ckpt.errors import CorruptError
from ckpt.store import PAGE

_EXITING = 0x4  # PF_EXITING: the kernel is ending the process, which runs no more code
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine. `started`: start time in clock ticks since boot, -1 if it had ended before."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this process id now."""
        return cls(pid, (_stat(pid) or (-1, True))[0])

    @property
    def alive(self) -> bool:
        """Return True if the process runs. False if it has ended or is ending, or another process has its id now."""
        started, ending = _stat(self.pid) or (-1, True)
        return started >= 0 and started == self.started and not ending

    @property
    def suspended(self) -> bool:
        """Return True if the process is stopped, by SIGSTOP or by a debugger."""
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    @property
    def shared_bytes(self) -> int:
        """Return the number of bytes of shared memory that the process has mapped and touched, 0 if unknown."""
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{number_in_proc(self.pid)}/status") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith("RssShmem:")), 0)
        return 0

    @property
    def born(self) -> float:
        """Return the process's start time by the monotonic clock, or the present time if it had ended before."""
        now = time.monotonic()
        return now if self.started < 0 else now - (time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS)


def _stat(pid: int) -> tuple[int, bool] | None:
    """Return a process's start time in ticks since boot, and True if it is ending. Return None if it does not exist."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{number_in_proc(pid)}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return int(fields[19]), fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)
    return None


def number_in_proc(pid: int) -> int:
    """Return the id by which /proc lists a process of this PID namespace, or -1 if /proc does not list it.

    This id differs from `pid` in a container that has its own PID namespace but the /proc of another one.
    """
    with contextlib.suppress(OSError, ValueError):
        if int(os.readlink("/proc/self")) == os.getpid():
            return pid
    try:
        fd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return -1
    try:
        with open(f"/proc/self/fdinfo/{fd}") as file:
            return next((int(line[4:]) for line in file if line.startswith("Pid:")), -1)
    finally:
        os.close(fd)


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def namespace(kind: str) -> int:
    """Return the id of a namespace of this process. Processes with equal ids see each other's process ids ("pid") or
    socket names ("net")."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    return 0


# -- the heartbeat --


OPENING, TRAINING, PAUSED, RESTORING, LEAVING = range(5)
STATES = ("opening", "training", "paused", "restoring", "leaving")

_MAGIC = 0x3230_4553_4C55_5031
_SEALS = 0x0001 | 0x0002 | 0x0004
_ADD_SEALS = 1033
# Fields: magic, calls, step, when (ns), state, updates, paused (ns), usual (ns, set by the writer), handled
_RING, _ENTRIES, _WIDTH = PAGE // 8, 512, 8  # each entry: step, when (ns), stalled (ns), saves, skipped, paused (ns)
_SIZE = PAGE + 8 * _ENTRIES * _WIDTH


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that ended at `when`, by the monotonic clock, with totals up to that time: seconds that saves `stalled`
    the loop, number of snapshots (`saves`), number of `skipped` snapshots, and seconds `paused`."""

    step: int
    when: float
    stalled: float
    saves: int
    skipped: int
    paused: float


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading of the heartbeat. `calls`: number of calls of step(). `step`: the last step, -1 for none. `when`:
    last sign of life, by the monotonic clock, which is the same in all processes. `updates`: optimizer steps begun."""

    calls: int
    step: int
    when: float
    state: int
    updates: int

    @property
    def doing(self) -> str:
        return STATES[self.state] if 0 <= self.state < len(STATES) else "?"


class Heartbeat:
    """The shared pages. `fd` can be sent to another process, which maps the pages with `attach`."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self._memory = memory
        self._at = memoryview(memory).cast("q")
        if self._at[0] != _MAGIC:
            raise CorruptError("these are not the pages of a trainer of this version")

    @classmethod
    def create(cls) -> Heartbeat:
        fd = os.memfd_create("ckpt-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _SIZE)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, _SIZE)
        memory.madvise(mmap.MADV_DONTFORK)
        fields = memoryview(memory).cast("q")
        fields[2], fields[0] = -1, _MAGIC
        heartbeat = cls(fd, memory)
        heartbeat.touch(OPENING)
        return heartbeat

    @classmethod
    def attach(cls, fd: int) -> Heartbeat:
        """Map the pages of another process."""
        if os.fstat(fd).st_size < _SIZE:
            raise CorruptError("these are not the pages of a trainer of this version")
        return cls(fd, mmap.mmap(fd, _SIZE))

    # -- the trainer's main thread --

    def beat(self, step: int, stalled_s: float = 0.0, saves: int = 0, skipped: int = 0) -> None:
        """Record a call of step(), and the cost of saving up to now (see `StepDone`)."""
        at, now = self._at, time.monotonic_ns()
        entry = _RING + at[1] % _ENTRIES * _WIDTH
        at[entry], at[entry + 1], at[entry + 2], at[entry + 3] = step, now, int(stalled_s * 1e9), saves
        at[entry + 4], at[entry + 5] = skipped, at[6]
        at[2], at[3], at[4] = step, now, TRAINING
        at[1] += 1

    def went_back(self, step: int) -> None:
        """Set the last step after a rollback."""
        self._at[2] = step

    def paused(self, seconds: float) -> None:
        """Add seconds to the total of intended pauses in training."""
        self._at[6] += int(seconds * 1e9)

    def touch(self, state: int) -> None:
        """Record a sign of life and the present state, for example PAUSED."""
        self._at[3], self._at[4] = time.monotonic_ns(), state

    def update(self) -> None:
        """Record that an optimizer step begins."""
        self._at[5] += 1

    # -- another thread of the trainer --

    def handle(self) -> None:
        """Record that the fault handler has received a `FaultNote` and is handling it."""
        self._at[8] += 1

    # -- the writer --

    @property
    def usual_s(self) -> float:
        """Return the usual duration of a step in seconds, 0 while it is unknown."""
        return self._at[7] / 1e9

    @usual_s.setter
    def usual_s(self, seconds: float) -> None:
        self._at[7] = int(seconds * 1e9)

    # -- any process --

    def since(self, calls: int) -> tuple[int, list[StepDone]]:
        """Return the number of calls of step(), and the steps after the first `calls` calls. If the ring cannot store
        all of them, the oldest steps are missing."""
        at, now = self._at, self._at[1]
        numbers = range(max(calls, now - _ENTRIES), now)
        raw = [list(at[(entry := _RING + n % _ENTRIES * _WIDTH) : entry + 6]) for n in numbers]
        spoilt = max(0, at[1] + 1 - _ENTRIES - numbers.start)  # entries overwritten before or during this read
        return now, [StepDone(e[0], e[1] / 1e9, e[2] / 1e9, e[3], e[4], e[5] / 1e9) for e in raw[spoilt:]]

    @property
    def handled(self) -> int:
        """Return the number of calls of `handle`."""
        return self._at[8]

    @property
    def step(self) -> int:
        return self._at[2]

    @property
    def state(self) -> int:
        return self._at[4]

    @property
    def paused_s(self) -> float:
        """Return the total seconds of intended pauses."""
        return self._at[6] / 1e9

    def read(self) -> Beat:
        at = self._at
        return Beat(at[1], at[2], at[3] / 1e9, at[4], at[5])

    def close(self) -> None:
        """Close the descriptor. The pages are unmapped when their last view is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
