"""Identifies processes and their machine. A process number alone is not enough, because it may be reused."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

_EXITING = 0x4  # PF_EXITING: the kernel is ending the process, which runs no more code
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine. `started`: in clock ticks since boot, -1 if it had ended before."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now."""
        return cls(pid, (_stat(pid) or (-1, True))[0])

    @property
    def alive(self) -> bool:
        """Return True if it runs. False if it has ended, is ending, or another process has its number now."""
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
        """Return the bytes of shared memory that the process has mapped and touched, 0 if unknown."""
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{number_in_proc(self.pid)}/status") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith("RssShmem:")), 0)
        return 0

    @property
    def born(self) -> float:
        """Return its start time by the monotonic clock, or the present time if it had ended before."""
        now = time.monotonic()
        return now if self.started < 0 else now - (time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS)


def _stat(pid: int) -> tuple[int, bool] | None:
    """Return the start time of a process in ticks since boot, and True if it is ending. None if it does not exist."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{number_in_proc(pid)}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return int(fields[19]), fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)
    return None


def number_in_proc(pid: int) -> int:
    """Return the number by which /proc lists a process of this PID namespace, -1 if it does not.

    It differs from `pid` in a container that has a PID namespace of its own and the /proc of another one.
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
    """Return the namespace of this process: equal for processes that see each other's numbers ("pid") or socket names
    ("net")."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    return 0
