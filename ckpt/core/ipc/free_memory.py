"""Measures the memory that a process can still allocate, and protects a process from the out-of-memory killer.

Memory is that of the machine, or of the tightest cgroup around the process. Any ancestor may have a limit, in v1 or v2
(Slurm limits the job and the step, Kubernetes the container). Kernel files that are missing or cannot be parsed are
ignored. All figures are bytes. No function here raises.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # without a limit, v1 shows 2**63 less a page
SPARED = -500  # oom_score_adj, from -1000 (never killed) to 1000 (killed first)


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory in bytes, of the machine or of the tightest cgroup. `where`: "machine" or the cgroup's folder."""

    available: int
    total: int
    where: str

    @property
    def share(self) -> float:
        return self.available / self.total if self.total else 0.0


def room(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self") -> MemoryRoom:
    """Return the memory that a process can allocate without swapping."""
    rooms = [_of_machine(proc)]
    for chain in cgroup_chains(proc, sys, pid):
        rooms += [found for folder in chain if (found := _of_cgroup(folder))]
    return min(rooms, key=lambda one: one.available)


def spare_from_oom(pid: int | str = "self", *, proc: Path = PROC, score: int = SPARED) -> bool:
    """Make the kernel kill other processes first. Return True if it will, False without the necessary privilege.

    Killing the writer frees little memory, because its snapshots are shared with the trainer, and it must save them.
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
    if total <= 0 or available is None:  # from system calls, which do not count reclaimable caches
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryRoom(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page, "machine")
    return MemoryRoom(min(available << 10, total), total, "machine")


def _of_cgroup(folder: Path) -> MemoryRoom | None:
    """Return the memory left in a cgroup with a limit. memory.high is a limit too: above it, the kernel throttles."""
    files = [folder / name for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit = min((found for file in files if (found := read_number(file)) is not None), default=NO_LIMIT)
    if limit >= NO_LIMIT:
        return None
    used = read_number(folder / "memory.current")
    if used is None and (used := read_number(folder / "memory.usage_in_bytes")) is None:
        return None
    stat = read_table(folder / "memory.stat")  # in v1, only the `total_` values include child cgroups
    cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryRoom(max(0, min(limit - used + cache, limit)), limit, str(folder))


def cgroup_chains(proc: Path, sys: Path, pid: int | str, controller: str = "memory") -> list[list[Path]]:
    """Return the cgroup folders of a process for v1 and for v2, its own first and the mount's root last."""
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
    """Return the existing folders from a cgroup to the root. In a container, the root may be the container's cgroup,
    while the path begins at the machine's root. So the longest suffix of the path that exists is used."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # not visible in this container
        parts = []
    while parts and not os.path.isdir(root.joinpath(*parts)):
        parts.pop(0)
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def read(file: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError):
        return file.read_bytes()
    return b""


def read_number(file: Path) -> int | None:
    """Return the number in a file, None for a word like "max" or a missing file."""
    text = read(file).strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def read_table(file: Path) -> dict[str, int]:
    """Parse lines with a name, a number and possibly a unit. Other lines are ignored."""
    found = {}
    for line in read(file).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit() and len(words[1]) < 20:
            found[words[0].decode("ascii", "replace")] = int(words[1])
    return found
