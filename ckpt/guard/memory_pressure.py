"""How much memory is left for this process, whether the OOM killer struck, and a watch that tells when it gets short.

Memory is that of the machine, or of the tightest cgroup around the process: limits may sit on any ancestor (Slurm puts
them on the job and the step, Kubernetes on the container), in v1 or v2. Files of the kernel that are missing or odd
mean that nothing is known from there. All figures are bytes; nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.events import log

PROC, SYS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # v1 says 2**63 less a page where there is none
SPARED = -500  # of -1000, never killed, to 1000
PLENTY = 0.5  # of the memory is available: then stalls are those of making huge pages, not of a shortage


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What there is, in bytes; of this machine or of the tightest cgroup. `where`: "machine" or the cgroup's folder."""

    available: int
    total: int
    where: str

    @property
    def share(self) -> float:
        return self.available / self.total if self.total else 0.0


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


def room(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self") -> MemoryRoom:
    """The memory that a process can take without pushing anything out."""
    rooms = [_of_machine(proc)]
    for chain in cgroup_chains(proc, sys, pid):
        rooms += [found for folder in chain if (found := _of_cgroup(folder))]
    return min(rooms, key=lambda one: one.available)


def available_memory() -> int:
    """Bytes that can be taken without pushing anything out: of the machine, or of the tightest cgroup."""
    return room().available


def oom_kills(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self", *, where: str = "") -> OomKills:
    """The counters as of now, of a process's cgroup, or `where` an earlier answer is from: the dead have none."""
    machine = _table(proc / "vmstat").get("oom_kill")
    for folder in [Path(where)] if where else [chain[0] for chain in cgroup_chains(proc, sys, pid)]:
        for name in ("memory.events", "memory.oom_control"):
            if (count := _table(folder / name).get("oom_kill")) is not None:
                return OomKills(count, machine, str(folder))
    return OomKills(None, machine, where)


def spare_from_oom(pid: int | str = "self", *, proc: Path = PROC, score: int = SPARED) -> bool:
    """Ask the kernel to kill others first; whether it will. Ordinary users may not, and get False.

    To kill the writer frees little, since its snapshots are shared with the trainer, and it is what saves them.
    """
    file = proc / str(pid) / "oom_score_adj"
    with contextlib.suppress(OSError, ValueError):
        if int(file.read_bytes()) > score:
            file.write_text(f"{score}\n")
        return int(file.read_bytes()) <= score
    return False


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
    for line in _read(file).splitlines():
        if line.startswith(b"some avg10="):
            with contextlib.suppress(ValueError):
                return float(line[len(b"some avg10=") :].split(b" ")[0]) / 100
    return None


def _held(chains: list[list[Path]]) -> tuple[int, int]:
    """How often these cgroups were held at a limit of their own, and how often they ran out of memory."""
    limit = out = 0
    for folder in (folder for chain in chains for folder in chain):
        # "local": without the events of cgroups below, which are our neighbours'
        found = _table(folder / "memory.events.local") or _table(folder / "memory.events")
        limit += found.get("high", 0) + found.get("max", 0) + (_number(folder / "memory.failcnt") or 0)
        out += found.get("oom", 0) + _table(folder / "memory.oom_control").get("oom_kill", 0)
    return limit, out


def _of_machine(proc: Path) -> MemoryRoom:
    found = _table(proc / "meminfo")
    total, available = found.get("MemTotal:", 0) << 10, found.get("MemAvailable:")
    if total <= 0 or available is None:  # by system call, and without the caches that could be given back
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryRoom(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page, "machine")
    return MemoryRoom(min(available << 10, total), total, "machine")


def _of_cgroup(folder: Path) -> MemoryRoom | None:
    """What one cgroup leaves, if it has a limit. Above memory.high the kernel brakes hard: it counts as one."""
    files = [folder / name for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit = min((found for file in files if (found := _number(file)) is not None), default=NO_LIMIT)
    if limit >= NO_LIMIT:
        return None
    used = _number(folder / "memory.current")
    if used is None and (used := _number(folder / "memory.usage_in_bytes")) is None:
        return None
    stat = _table(folder / "memory.stat")  # in v1 without those below, unless it says total
    cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryRoom(max(0, min(limit - used + cache, limit)), limit, str(folder))


def cgroup_chains(proc: Path, sys: Path, pid: int | str, controller: str = "memory") -> list[list[Path]]:
    """The folders of the cgroups around a process, its own first and the mount's root last: of v1, and of v2."""
    paths = {}
    for line in _read(proc / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if controller.encode() in controllers.split(b","):
            paths[controller] = os.fsdecode(path)
        elif number == b"0" and not controllers:
            paths["unified"] = os.fsdecode(path)
    unified = sys / "unified" if os.path.isdir(sys / "unified") else sys
    roots = {controller: sys / controller, "unified": unified}
    return [_chain(root, paths.get(name, "/")) for name, root in roots.items() if name in paths or not paths]


def _chain(root: Path, path: str) -> list[Path]:
    """A container may see its own cgroup as the mount's root, under a path that counts from the machine's: the longest
    end of the path that exists is ours."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of what this container may see
        parts = []
    while parts and not os.path.isdir(root.joinpath(*parts)):
        parts.pop(0)
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read(file: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError):
        return file.read_bytes()
    return b""


def _number(file: Path) -> int | None:
    """None for a word such as "max", and where there is no such file."""
    text = _read(file).strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def _table(file: Path) -> dict[str, int]:
    """Lines of a name and a number, perhaps with a unit; others are left out."""
    found = {}
    for line in _read(file).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit() and len(words[1]) < 20:
            found[words[0].decode("ascii", "replace")] = int(words[1])
    return found
