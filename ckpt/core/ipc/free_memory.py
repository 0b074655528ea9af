"""How much memory this process can still take, and whom the kernel kills first when there is none left.

Memory is that of the machine, or of the tightest cgroup around the process: limits may sit on any ancestor (Slurm puts
them on the job and the step, Kubernetes on the container), in v1 or v2. Files of the kernel that are missing or odd
mean that nothing is known from there. All figures are bytes; nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # v1 says 2**63 less a page where there is none
SPARED = -500  # of -1000, never killed, to 1000


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What there is, in bytes; of this machine or of the tightest cgroup. `where`: "machine" or the cgroup's folder."""

    available: int
    total: int
    where: str

    @property
    def share(self) -> float:
        return self.available / self.total if self.total else 0.0


def room(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self") -> MemoryRoom:
    """The memory that a process can take without pushing anything out."""
    rooms = [_of_machine(proc)]
    for chain in cgroup_chains(proc, sys, pid):
        rooms += [found for folder in chain if (found := _of_cgroup(folder))]
    return min(rooms, key=lambda one: one.available)


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


def _of_machine(proc: Path) -> MemoryRoom:
    found = read_table(proc / "meminfo")
    total, available = found.get("MemTotal:", 0) << 10, found.get("MemAvailable:")
    if total <= 0 or available is None:  # by system call, and without the caches that could be given back
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryRoom(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page, "machine")
    return MemoryRoom(min(available << 10, total), total, "machine")


def _of_cgroup(folder: Path) -> MemoryRoom | None:
    """What one cgroup leaves, if it has a limit. Above memory.high the kernel brakes hard: it counts as one."""
    files = [folder / name for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit = min((found for file in files if (found := read_number(file)) is not None), default=NO_LIMIT)
    if limit >= NO_LIMIT:
        return None
    used = read_number(folder / "memory.current")
    if used is None and (used := read_number(folder / "memory.usage_in_bytes")) is None:
        return None
    stat = read_table(folder / "memory.stat")  # in v1 without those below, unless it says total
    cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryRoom(max(0, min(limit - used + cache, limit)), limit, str(folder))


def cgroup_chains(proc: Path, sys: Path, pid: int | str, controller: str = "memory") -> list[list[Path]]:
    """The folders of the cgroups around a process, its own first and the mount's root last: of v1, and of v2."""
    paths = {}
    for line in read(proc / str(pid) / "cgroup").splitlines():
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


def read(file: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError):
        return file.read_bytes()
    return b""


def read_number(file: Path) -> int | None:
    """None for a word such as "max", and where there is no such file."""
    text = read(file).strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def read_table(file: Path) -> dict[str, int]:
    """Lines of a name and a number, perhaps with a unit; others are left out."""
    found = {}
    for line in read(file).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit() and len(words[1]) < 20:
            found[words[0].decode("ascii", "replace")] = int(words[1])
    return found
