"""Whether the kernel's OOM killer struck, and a watch that reports when memory becomes short.

Both read the kernel's files as `ckpt.core.ipc.free_memory` does, and nothing here raises.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.core.ipc.free_memory import PROC, SYS, MemoryRoom, cgroup_chains, read, read_number, read_table, room
from ckpt.events import log

PLENTY = 0.5  # of the memory is available: then stalls are those of making huge pages, not of a shortage


@dataclass(frozen=True, slots=True)
class OomKills:
    """How many processes the OOM killer has killed: of the cgroup in the folder `where`, and of the whole machine,
    which a container sees too. None where the kernel does not tell. It counts before it kills."""

    cgroup: int | None
    machine: int | None
    where: str = ""

    def since(self, earlier: OomKills) -> str:
        """Whom it has struck since then: "cgroup" for a process of this cgroup; "machine" for any at all, where only
        that is known; "" for nobody. A neighbour's end is no news where the cgroup has a counter of its own."""
        if self.where == earlier.where and self.cgroup is not None and earlier.cgroup is not None:
            return "cgroup" if self.cgroup > earlier.cgroup else ""
        if self.machine is None or earlier.machine is None:
            return ""
        return "machine" if self.machine > earlier.machine else ""


def oom_kills(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self", *, where: str = "") -> OomKills:
    """The counters as of now, of a process's cgroup, or `where` an earlier answer is from: the dead have none."""
    machine = read_table(proc / "vmstat").get("oom_kill")
    for folder in [Path(where)] if where else [chain[0] for chain in cgroup_chains(proc, sys, pid)]:
        for name in ("memory.events", "memory.oom_control"):
            if (count := read_table(folder / name).get("oom_kill")) is not None:
                return OomKills(count, machine, str(folder))
    return OomKills(None, machine, where)


class PressureWatch:
    """Calls `on_pressure(room, why)` in a thread of its own when memory becomes short, once per episode:

    - less than `share` of the total is available;
    - processes wait for memory for `share` of the time, or a cgroup is held at its limit again and again. A file cache
      that fills a cgroup and the search for huge pages do that too, so these count while memory is not plentiful;
    - a cgroup has run out of memory.

    The episode is over when `fine_s` seconds have passed without any of that, and with twice the share available.
    All of it is looked at every `poll_s` seconds; stalls are averages over ten seconds.
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
        self._held: tuple[int, int] | None = None  # at the last look: times at a limit, times out of memory
        self._fine_since: float | None = None
        self.pressed = False  # whether an episode goes on
        self._ended: threading.Event | None = None

    def start(self) -> None:
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="ckpt-pressure", daemon=True).start()

    def stop(self) -> None:
        """Returns at once, from any thread; a look or call that has begun goes on."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()

    def look(self, stalled: bool = False) -> None:
        """One look. `stalled`: processes wait for memory, as the kernel said."""
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
            return f"processes wait for memory, though {now.available >> 20} MiB are available ({now.where})"
        return ""

    def _run(self, ended: threading.Event) -> None:
        own = [chain[0] / "memory.pressure" for chain in cgroup_chains(self._proc, self._sys, "self")]
        files = [*own, self._proc / "pressure" / "memory"]
        while not ended.is_set():
            try:
                stalls = (share for file in files if (share := _stalled(file)) is not None)
                self.look(next(stalls, 0.0) >= self._share)
            except Exception:
                log.warning("memory pressure was not dealt with", exc_info=True)
            ended.wait(self._poll_s)


def _stalled(file: Path) -> float | None:
    """The share of the last ten seconds that some process waited for memory."""
    for line in read(file).splitlines():
        if line.startswith(b"some avg10="):
            with contextlib.suppress(ValueError):
                return float(line[len(b"some avg10=") :].split(b" ")[0]) / 100
    return None


def _held(chains: list[list[Path]]) -> tuple[int, int]:
    """How often these cgroups were held at a limit of their own, and how often they ran out of memory."""
    limit = out = 0
    for folder in (folder for chain in chains for folder in chain):
        # "local": without the events of cgroups below, which are our neighbours'
        found = read_table(folder / "memory.events.local") or read_table(folder / "memory.events")
        limit += found.get("high", 0) + found.get("max", 0) + (read_number(folder / "memory.failcnt") or 0)
        out += found.get("oom", 0) + read_table(folder / "memory.oom_control").get("oom_kill", 0)
    return limit, out
