"""Checks for folders only: file system, mount options, free space, fsync and clock."""

from __future__ import annotations

import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from ckpt.store import PAGE
from ckpt.tools.doctor.findings import ADVICE, GB, MIB, OK, PROBLEM, Finding, clock_difference, judge, read_text
from ckpt.units import duration

SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "glusterfs", "afs", "wekafs"}
VOLATILE = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class FileSystem:
    kind: str
    shared: bool
    finding: Finding


def file_system(path: str, mountinfo: str | None = None) -> FileSystem:
    """Return the file system of a folder. `mountinfo`: text of /proc/self/mountinfo, by default read from there."""
    text = mountinfo if mountinfo is not None else read_text("/proc/self/mountinfo")
    kind, options = mount_of(os.path.realpath(path), text)
    advice = ""
    if kind in VOLATILE:
        advice = "This is memory, which does not survive a reboot. Save to a disk; host memory is memory=ckpt.Memory()"
    elif kind in ("overlay", "aufs"):
        advice = "This is the container's own layer, which is deleted with the container: mount a volume"
    elif kind.startswith("fuse"):
        advice = "A file system in user space: check its documentation on fsync and atomic link"
    elif kind in SHARED and "soft" in options:
        advice = "Mounted soft: the kernel may lose data after a timeout. Mount it hard"
    elif kind in SHARED:
        advice = "Shared over the network: add a tier on a local disk, or save here less often"
    verdict = ADVICE if advice else OK
    if "ro" in options:
        verdict, advice = PROBLEM, "Mounted read-only: mount it for writing"
    elif options & {"nobarrier", "barrier=0"}:
        verdict, advice = PROBLEM, "Without barriers a power cut loses acknowledged writes: mount it with barriers"
    shared = kind in SHARED or (kind.startswith("fuse") and kind != "fuseblk")
    return FileSystem(kind, shared, Finding("file system", kind or "unknown", verdict, advice))


def mount_of(path: str, mountinfo: str) -> tuple[str, set[str]]:
    """Return the type and the options of the file system that contains a path."""
    best, kind, options = -1, "", set[str]()
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if len(words) < 6 or not kinds:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # >=, because a later mount at the same path hides an earlier one
            more = kinds[2].split(",") if len(kinds) > 2 else []
            best, kind, options = len(point), kinds[0], {*words[5].split(","), *more}
    return kind, options


def nearest_folder(path: Path) -> Path:
    """Return the path itself if it is a folder, otherwise its nearest parent that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def space(path: str) -> list[Finding]:
    """Return findings about free bytes (also as data) and free inodes."""
    stats = os.statvfs(nearest_folder(Path(path)))
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    tight = free < 0.05 * total or free < 64 * MIB
    advice = "Free some space: on a full disk saves fail, training continues, and nothing new is durable"
    rows = [judge("free space", f"{free / GB:.1f} of {total / GB:.1f} GB", tight, advice, free)]
    if stats.f_files:
        advice = "Free some inodes: each checkpoint needs a few files per rank"
        rows.append(judge("free inodes", f"{stats.f_favail / 1e6:.1f} million", stats.f_favail < 10_000, advice))
    return rows


def disk(folder: str) -> list[Finding]:
    """Measure fsync in a scratch folder, and compare the clock of a file server with this machine's clock."""
    found, clock = fsync_time(f"{folder}/sync"), Path(folder, "clock")
    clock.write_bytes(b"x")
    return [found, folder_fsync(folder), clock_difference(clock.stat().st_mtime - time.time(), 1.0)]


def folder_fsync(folder: str) -> Finding:
    """Check that the file system can make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        advice = "A power cut may lose the newest checkpoints here. A crash of a process loses nothing"
        return Finding("fsync of folders", os.strerror(error.errno or 0), ADVICE, advice)
    finally:
        os.close(fd)
    return Finding("fsync of folders", "supported")


def fsync_time(path: str, *, times: int = 10, most_s: float = 3.0) -> Finding:
    taken: list[float] = []
    end = time.monotonic() + most_s
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        while len(taken) < times and time.monotonic() < end:
            os.pwrite(fd, os.urandom(PAGE), len(taken) * PAGE)
            at = time.perf_counter()
            os.fsync(fd)
            taken.append(time.perf_counter() - at)
    finally:
        os.close(fd)
    median = statistics.median(taken)
    text = f"{duration(median)}, at most {duration(max(taken))}"
    if median > 0.1:
        return Finding("fsync", text, ADVICE, "Slow: other processes write to this disk, or it has no power-safe cache")
    advice = "Faster than any disk: this is memory, or a disk that does not flush"
    return judge("fsync", text, median < 20e-6, advice)
