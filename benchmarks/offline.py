"""Measure checkpoint conversions from a shell: speed and memory. `make bench-offline`.

    python benchmarks/offline.py [--rounds 3] [--size full] [--folder DIR] [--json FILE]

One run of 1.5 GiB (the training of `workload.py`) is written as safetensors, torch.save, DCP, and runs for other
numbers of ranks, each by its command in a separate process, without cached pages. The same rounds measure torch's own
tools and a plain script for the same state, and the disk: a copy of the run with O_DIRECT, with overlapping reads and
writes.

Rates are bytes written per second of the whole command, with the start of the interpreter; `of the disk` is the ratio
to the rate of the copy. Peak memory is VmHWM of the process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue

REPO = Path(__file__).parent.parent
PIECE = 16 << 20
GOAL_MEMORY, GOAL_RATE = 256 << 20, 0.6

MAKE = """
import sys
import torch, ckpt, workload
from torch.distributed.checkpoint import save
training = workload.Training.build(workload.SIZES[sys.argv[2]])
state = {"model": training.model, "optim": training.optim}
with ckpt.Checkpointer(state, f"{sys.argv[1]}/run", memory=None) as cp:
    cp.save(1).wait_durable()
torch.save(training.state_dict(), f"{sys.argv[1]}/theirs.pt")
save(training.state_dict(), checkpoint_id=f"{sys.argv[1]}/theirs-dcp", no_dist=True)
"""
MEASURED = """
import re, sys
def peak():
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1])
"""
OURS = (
    MEASURED
    + """
from ckpt.tools.cli import main
status = main(sys.argv[1:])
print("peak", peak())
sys.exit(status)
"""
)
THEIRS = {
    "torch.load, save_file (weights)": MEASURED + """
import torch
from safetensors.torch import save_file
save_file(torch.load(sys.argv[1] + "/theirs.pt", weights_only=True)["model"], sys.argv[2])
print("peak", peak())
""",
    "torch.load(mmap), save_file (weights)": MEASURED + """
import torch
from safetensors.torch import save_file
save_file(torch.load(sys.argv[1] + "/theirs.pt", weights_only=True, mmap=True)["model"], sys.argv[2])
print("peak", peak())
""",
    "dcp_to_torch_save": MEASURED + """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1] + "/theirs-dcp", sys.argv[2])
print("peak", peak())
""",
    "torch_save_to_dcp": MEASURED + """
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
torch_save_to_dcp(sys.argv[1] + "/theirs.pt", sys.argv[2])
print("peak", peak())
""",
}  # fmt: skip
COMMANDS = {
    "safetensors, everything": ("--to", "{out}.safetensors", "--only", "*"),
    "safetensors, weights": ("--to", "{out}.safetensors"),
    "safetensors, weights as bf16": ("--to", "{out}.safetensors", "--dtype", "bf16"),
    "torch.save": ("--to", "{out}.pt"),
    "DCP": ("--to", "{out}", "--format", "dcp"),
    "a run of 1 rank": ("--to", "{out}", "--format", "run"),
    "a run of 8 ranks": ("--to", "{out}", "--world-size", "8"),
}


@dataclass
class Row:
    """Results of one command in each round."""

    name: str
    nbytes: int = 0
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)  # bytes

    @property
    def rate(self) -> float:
        """Return the median rate in bytes per second."""
        return self.nbytes / statistics.median(self.seconds)


def files_of(place: Path) -> list[Path]:
    return [p for p in place.rglob("*") if p.is_file()] if place.is_dir() else [place]


def size_of(place: Path) -> int:
    return sum(p.stat().st_size for p in files_of(place))


def forget(place: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in files_of(place):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def copy_direct(source: Path, target: Path) -> None:
    """Copy a file with one thread that reads and one that writes, both with O_DIRECT."""
    size = source.stat().st_size
    reading = os.open(source, os.O_RDONLY | os.O_DIRECT)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(writing, 0, size)
    empty: Queue[mmap.mmap] = Queue()
    full: Queue[tuple[int, int, mmap.mmap] | None] = Queue()
    for _ in range(4):
        empty.put(mmap.mmap(-1, PIECE))

    def read() -> None:
        for at in range(0, size, PIECE):
            memory = empty.get()
            count = os.preadv(reading, [memory], at)
            full.put((at, count, memory))
        full.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    while (one := full.get()) is not None:
        at, count, memory = one
        os.pwrite(writing, memoryview(memory)[: -(-count // 4096) * 4096], at)
        empty.put(memory)
    thread.join()
    os.ftruncate(writing, size)
    os.fsync(writing)
    os.close(reading)
    os.close(writing)


def timed(row: Row, source: Path, out: Path, work: Callable[[], int]) -> None:
    forget(source)
    started = time.perf_counter()
    peak = work()
    row.seconds.append(time.perf_counter() - started)
    row.peak.append(peak)
    row.nbytes = size_of(out)
    remove(out)


def process(code: str, *words: str) -> int:
    """Return the peak memory of a process that runs this code."""
    path = f"{REPO}:{REPO / 'backends'}:{REPO / 'benchmarks'}"
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    found = re.search(r"^peak ([0-9]+)$", done.stdout, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def rounds(folder: Path, count: int) -> tuple[Row, list[Row]]:
    """Measure the disk and all commands once per round."""
    run, disk = folder / "run", Row("the disk")
    rows = {name: Row(name) for name in (*COMMANDS, *THEIRS)}
    file = max(files_of(run), key=lambda path: path.stat().st_size)
    for number in range(count):
        say(f"round {number + 1} of {count}")
        timed(disk, run, folder / "copy", lambda: copy_to(file, folder / "copy"))
        for name, words in COMMANDS.items():
            out = Path(words[1].format(out=folder / "out"))
            timed(
                rows[name], run, out, lambda w=words, o=out: process(OURS, "restore", str(run), "--to", str(o), *w[2:])
            )
        for name, code in THEIRS.items():
            out = folder / "theirs"
            source = folder / ("theirs-dcp" if name.startswith("dcp") else "theirs.pt")
            timed(rows[name], source, out, lambda c=code, o=out: process(c, str(folder), str(o)))
    return disk, list(rows.values())


def copy_to(source: Path, target: Path) -> int:
    copy_direct(source, target)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(disk: Row, rows: list[Row]) -> Iterator[str]:
    yield f"{'':40} {'MB':>7} {'s':>7} {'GB/s':>6} {'of the disk':>12} {'peak MiB':>9}"
    for row in (disk, *rows):
        seconds, peak = statistics.median(row.seconds), max(row.peak) >> 20
        share = row.rate / disk.rate
        yield (
            f"{row.name:40} {row.nbytes / 1e6:7.0f} {seconds:7.2f} {row.rate / 1e9:6.2f} {share:12.2f} "
            f"{peak if peak else '':>9}"
        )


def goals(disk: Row, rows: list[Row]) -> Iterator[str]:
    whole = rows[0]
    share, peak = whole.rate / disk.rate, max(whole.peak)
    yield f"rate of the disk: {share:.2f} [at least {GOAL_RATE}]: {'met' if share >= GOAL_RATE else 'missed'}"
    yield f"peak memory: {peak >> 20} MiB [under {GOAL_MEMORY >> 20}]: {'met' if peak < GOAL_MEMORY else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--folder", type=Path, help="working folder; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        process(MAKE, str(folder), given.size)
        disk, rows = rounds(folder, given.rounds)
    print("\n".join(table(disk, rows)))
    print("\n".join(goals(disk, rows)))
    if given.json:
        machine = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "system": platform.release()}
        found = {**machine, "disk": asdict(disk), "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
