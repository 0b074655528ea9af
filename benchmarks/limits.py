"""The limits of this machine, with which all other figures are compared. Run by `figures.py`.

    python benchmarks/limits.py [--folder DIR] [--mib 1536]       # prints one JSON line per limit

GB are 10**9 bytes that arrive: a memcpy of 1 GB reads 1 GB and writes 1 GB, and counts once. CPU seconds are those of
this process, without the kernel's other work for buffered writes. Each figure is the median of three.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import xxhash

MIB = 1 << 20
FULL_MIB = 1536  # as large as the state of `workload.py`
HASHED_MIB = 1024
WRITE = 8 * MIB  # bytes per call, like the writes of everystep
POPULATE = 256 * MIB
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; Python has no name for it
PAGE = mmap.PAGESIZE
ROUNDS = 3

Task = Callable[[], object]


@dataclass(frozen=True)
class Limit:
    """One figure. `error`: the reason if there is none; then the others are 0."""

    name: str
    gb_s: float = 0.0
    cpu_s_per_gb: float = 0.0
    all_gb_s: tuple[float, ...] = ()
    error: str = ""


def measured(name: str, nbytes: int, task: Task, before: Task | None = None) -> Limit:
    """Run the task three times. `before` runs before each, and is not timed."""
    rates, cpu = [], []
    try:
        for _ in range(ROUNDS):
            if before is not None:
                before()
            started, cpu_started = time.perf_counter(), time.process_time()
            task()
            rates.append(nbytes / 1e9 / (time.perf_counter() - started))
            cpu.append((time.process_time() - cpu_started) / (nbytes / 1e9))
    except OSError as error:  # no O_DIRECT on this file system, or a kernel that is too old
        return Limit(name, error=str(error))
    return Limit(name, statistics.median(rates), statistics.median(cpu), tuple(rates))


def best(name: str, limits: list[Limit]) -> Limit:
    """Return the fastest of several ways to do the same."""
    found = max(limits, key=lambda one: one.gb_s)
    return Limit(name, found.gb_s, found.cpu_s_per_gb, found.all_gb_s, found.error)


def at_once(tasks: list[Task]) -> None:
    """Run each task in its own thread, the last one in this thread. Errors of tasks are raised here."""
    errors: list[BaseException] = []

    def run(task: Task) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks[:-1]]
    for thread in threads:
        thread.start()
    run(tasks[-1])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def shares(nbytes: int, threads: int) -> list[tuple[int, int]]:
    """Return the range of each thread, on page boundaries."""
    step = -(-nbytes // threads // PAGE) * PAGE
    return [(start, min(nbytes, start + step)) for start in range(0, nbytes, step)]


# -- memory --


def touched(nbytes: int) -> mmap.mmap:
    """Return page-aligned anonymous memory with all pages allocated, no two equal."""
    memory = mmap.mmap(-1, nbytes)
    noise = os.urandom(MIB)
    for start in range(0, nbytes, MIB):
        memory[start : start + min(MIB, nbytes - start)] = noise[: min(MIB, nbytes - start)]
        memory[start : start + 8] = start.to_bytes(8, "little")
    return memory


def copy(target: mmap.mmap, source: mmap.mmap, threads: int) -> None:
    """Copy with the C library, up to a sixth faster than `torch.Tensor.copy_`; each thread copies an equal part."""
    into, of = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
    parts = shares(len(source), threads)
    at_once([partial(ctypes.memmove, into + a, of + a, b - a) for a, b in parts])  # without the GIL


def memory_limits(nbytes: int) -> Iterator[Limit]:
    yield from copy_limits(nbytes)
    yield measured("populate a memfd", nbytes, partial(populate, nbytes))


def copy_limits(nbytes: int) -> Iterator[Limit]:
    """Use two buffers at a time."""
    source, targets = touched(nbytes), [touched(nbytes)]
    for threads in (1, 2):
        yield measured(f"memcpy, {count(threads)}", nbytes, partial(copy, targets[0], source, threads))

    def renew() -> None:
        targets.clear()
        targets.append(mmap.mmap(-1, nbytes))

    yield measured("memcpy into fresh pages", nbytes, lambda: copy(targets[0], source, 1), renew)


def populate(nbytes: int) -> None:
    """Allocate shared memory with all pages, as an arena does (see ckpt/core/ipc/arena.py)."""
    fd = os.memfd_create("limits", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, nbytes, POPULATE):
                memory.madvise(POPULATE_WRITE, start, min(POPULATE, nbytes - start))
    finally:
        os.close(fd)


# -- the disk --


def write(path: Path, memory: mmap.mmap, threads: int, flags: int) -> None:
    """Write a new, reserved file in pieces, and fsync it. Threads take the pieces in turn."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(memory))
        in_pieces(memory, threads, lambda piece, at: os.pwrite(fd, piece, at))
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, memory: mmap.mmap, threads: int, flags: int) -> None:
    """Read a whole file into existing memory."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        in_pieces(memory, threads, lambda piece, at: os.preadv(fd, [piece], at))
    finally:
        os.close(fd)


def in_pieces(memory: mmap.mmap, threads: int, move: Callable[[memoryview, int], int]) -> None:
    def run(first: int) -> None:
        for start in range(first * WRITE, len(memory), threads * WRITE):
            at, end = start, min(start + WRITE, len(memory))
            while at < end:
                moved = move(view[at:end], at)
                if moved <= 0:
                    raise OSError(f"the file ends at {at}")
                at += moved

    with memoryview(memory) as view:
        at_once([partial(run, first) for first in range(threads)])


def forget(path: Path) -> None:
    """Drop a file from the page cache. It must be on disk for that."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def disk_limits(nbytes: int, folder: Path) -> Iterator[Limit]:
    memory, path = touched(nbytes), folder / "limits"
    anew = partial(path.unlink, missing_ok=True)  # overwriting would be faster than writing a new file
    try:
        written = []
        for threads in (1, 2):
            task = partial(write, path, memory, threads, os.O_DIRECT)
            written.append(measured(f"O_DIRECT write, {count(threads)}", nbytes, task, anew))
            yield written[-1]
        yield best("O_DIRECT write", written)
        yield measured("buffered write and fsync", nbytes, partial(write, path, memory, 1, 0), anew)
        found = []
        cold = partial(forget, path)
        for threads in (1, 2):
            task = partial(read, path, memory, threads, os.O_DIRECT)
            found.append(measured(f"O_DIRECT read, {count(threads)}", nbytes, task, cold))
            yield found[-1]
        yield best("O_DIRECT read", found)
        task = partial(read, path, memory, 1, 0)
        yield measured("buffered read, cold", nbytes, task, cold)
        yield measured("buffered read, warm", nbytes, task, task)
    finally:
        anew()


# -- digests --


def digest(memory: mmap.mmap, threads: int) -> None:
    """Compute XXH3-128, as for every chunk (see ckpt/core/format/digest.py)."""
    with memoryview(memory) as view:
        parts = shares(len(memory), threads)
        at_once([partial(digest_part, view, a, b) for a, b in parts])


def digest_part(view: memoryview, start: int, end: int) -> None:
    with view[start:end] as part:
        xxhash.xxh3_128_digest(part)


def digest_limits(nbytes: int) -> Iterator[Limit]:
    memory = touched(nbytes)
    for threads in (1, 2):
        yield measured(f"xxh3-128, {count(threads)}", nbytes, partial(digest, memory, threads))


def limits(folder: Path, mib: int = FULL_MIB) -> Iterator[Limit]:
    """Measure all limits one after the other. At most two buffers and a file of `mib` exist at a time."""
    nbytes = mib * MIB
    yield from memory_limits(nbytes)
    yield from digest_limits(min(mib, HASHED_MIB) * MIB)
    yield from disk_limits(nbytes, folder)


def count(threads: int) -> str:
    return f"{threads} thread" + "s" * (threads > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: a temporary folder")
    parser.add_argument("--mib", type=int, default=FULL_MIB, help="size of a buffer and of the file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for limit in limits(Path(folder), arguments.mib):
            said = {"kind": "limit", **asdict(limit)}
            print(json.dumps({key: value for key, value in said.items() if value != ""}), flush=True)


if __name__ == "__main__":
    main()
