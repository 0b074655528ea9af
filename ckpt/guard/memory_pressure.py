"""Detects kills by the kernel's OOM killer, and shortages of memory.

Both are read from kernel files, as in `ckpt.core.ipc.arena`. No function of this module raises an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.core.ipc.arena import PROC, SYS, MemoryRoom, cgroup_chains, read, read_number, read_table, room
from ckpt.events import log

PLENTY = 0.5  # share of free memory above which stalls come from huge pages, not from a shortage


@dataclass(frozen=True, slots=True)
class OomKills:
    """How many processes the OOM killer has killed, in the cgroup `where` and on the whole machine. A container can
    read both counters. A counter is None if the kernel lacks it. The kernel increments it before the kill."""

    cgroup: int | None
    machine: int | None
    where: str = ""

    def since(self, earlier: OomKills) -> str:
        """Return "cgroup" or "machine", whichever has had a kill by the OOM killer since `earlier`, or "". The counter
        of the machine is used only if the cgroup has none."""
        if self.where == earlier.where and self.cgroup is not None and earlier.cgroup is not None:
            return "cgroup" if self.cgroup > earlier.cgroup else ""
        if self.machine is None or earlier.machine is None:
            return ""
        return "machine" if self.machine > earlier.machine else ""


def oom_kills(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self", *, where: str = "") -> OomKills:
    """Read the counters for a process. `where`: cgroup from an earlier result; needed for a dead process, because it
    has no cgroup any longer."""
    machine = read_table(proc / "vmstat").get("oom_kill")
    for folder in [Path(where)] if where else [chain[0] for chain in cgroup_chains(proc, sys, pid)]:
        for name in ("memory.events", "memory.oom_control"):
            if (count := read_table(folder / name).get("oom_kill")) is not None:
                return OomKills(count, machine, str(folder))
    return OomKills(None, machine, where)


class PressureWatch:
    """Calls `on_pressure(room, why)` in its own thread, once per episode, when memory becomes short. This means that

    - less than `share` of the total memory is available;
    - processes wait for memory for `share` of the time, or a cgroup is repeatedly stopped at its limit. Both count only
      while little memory is free, because a file cache that fills a cgroup, or a search for huge pages, looks the same;
    - a cgroup has run out of memory.

    An episode ends after `fine_s` seconds without any of these, if twice the share is available. Memory is checked
    every `poll_s` seconds; stalls are averages over ten seconds.
    """

    def __init__(
        self,
        share: float,
        on_pressure: Callable[[MemoryRoom, str], object],
        *,
        poll_s: float = 1.0,
        fine_s: float = 30.0,
        room: Callable[[], MemoryRoom] | None = None,
        proc: Path = PROC,
        sys: Path = SYS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share, self._enough = share, min(2 * share, (1 + share) / 2)
        self._call, self._poll_s, self._fine_s = on_pressure, poll_s, fine_s
        self._proc, self._sys, self._clock = proc, sys, clock
        self._room = room
        self._held: tuple[int, int] | None = None  # counters at the last check: times at the limit, times out of memory
        self._fine_since: float | None = None
        self.pressed = False  # True during an episode
        self._ended: threading.Event | None = None

    def start(self) -> None:
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="ckpt-pressure", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Any thread may call this. Returns immediately; a check or call in progress still ends."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()

    def check(self, stalled: bool = False) -> None:
        """Check once. `stalled`: True if the kernel reported that processes wait for memory."""
        now = self._room() if self._room else room(self._proc, self._sys)
        why = self._why(now, stalled)
        if why or now.share < self._enough:
            self._fine_since = None
        elif self._fine_since is None:
            self._fine_since = self._clock()
        elif self._clock() - self._fine_since >= self._fine_s:
            self.pressed = False
        if why and not self.pressed:
            self.pressed = True
            self._call(now, why)

    def _why(self, now: MemoryRoom, stalled: bool) -> str:
        before, self._held = self._held, _held(cgroup_chains(self._proc, self._sys, "self"))
        if now.share < self._share:
            return f"{now.available >> 20} MiB of {now.total >> 20} MiB are available ({now.where})"
        if before and self._held[1] > before[1]:
            return "a cgroup has run out of memory"
        if before and self._held[0] > before[0] and now.share < self._enough:
            return f"a cgroup is at its limit, {now.available >> 20} MiB are available ({now.where})"
        if stalled and now.share < PLENTY:
            return f"processes wait for memory although {now.available >> 20} MiB are available ({now.where})"
        return ""

    def _run(self, ended: threading.Event) -> None:
        own = [chain[0] / "memory.pressure" for chain in cgroup_chains(self._proc, self._sys, "self")]
        files = [*own, self._proc / "pressure" / "memory"]
        while not ended.is_set():
            try:
                stalls = (share for file in files if (share := _stalled(file)) is not None)
                self.check(next(stalls, 0.0) >= self._share)
            except Exception:
                log.warning("failed to handle memory pressure", exc_info=True)
            ended.wait(self._poll_s)


def _stalled(file: Path) -> float | None:
    """Return the share of the last ten seconds in which at least one process waited for memory."""
    for line in read(file).splitlines():
        if line.startswith(b"some avg10="):
            with contextlib.suppress(ValueError):
                return float(line[len(b"some avg10=") :].split(b" ")[0]) / 100
    return None


def _held(chains: list[list[Path]]) -> tuple[int, int]:
    """Return how often these cgroups were stopped at their own limits, and how often they ran out of memory."""
    limit = out = 0
    for folder in (folder for chain in chains for folder in chain):
        # The "local" file excludes the events of child cgroups, because those belong to other jobs.
        found = read_table(folder / "memory.events.local") or read_table(folder / "memory.events")
        limit += found.get("high", 0) + found.get("max", 0) + (read_number(folder / "memory.failcnt") or 0)
        out += found.get("oom", 0) + read_table(folder / "memory.oom_control").get("oom_kill", 0)
    return limit, out
