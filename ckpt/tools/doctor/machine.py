"""Check the CPUs, memory, limits and clock of the machine, and measure how fast it copies snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.core.ipc import arena
from ckpt.tools.doctor.findings import ADVICE, GB, MIB, PROBLEM, Finding, JobSize, judge, read_text


def machine(job: JobSize, *, proc: Path = Path("/proc"), sys_: Path = Path("/sys")) -> list[Finding]:
    """Check everything except GPUs and the clock. `proc`, `sys_`: folders of the kernel's files."""
    return [cpus(proc, sys_), memory(job, proc, sys_), *oom_group(proc, sys_), *limits(job)]


def cpu_count(proc: Path = Path("/proc"), sys_: Path = Path("/sys")) -> float:
    """Return the number of CPUs that this process may use: those of its affinity, reduced by cgroup limits."""
    found = float(len(os.sched_getaffinity(0)))
    for file in cgroup_files("cpu", "cpu.max", proc, sys_):
        words = read_text(file).split()
        if len(words) == 2 and words[0].isdigit():
            found = min(found, int(words[0]) / int(words[1]))
    for file in cgroup_files("cpu", "cpu.cfs_quota_us", proc, sys_):
        quota, period = read_text(file).strip(), read_text(file.with_name("cpu.cfs_period_us")).strip()
        if quota.isdigit() and period.isdigit():
            found = min(found, int(quota) / int(period))
    return found


def cpus(proc: Path, sys_: Path) -> Finding:
    count = cpu_count(proc, sys_)
    words = read_text(proc / "loadavg").split()
    load = float(words[0]) if words else 0.0
    text = f"{count:g}, load {load:g}"
    if count < 2:
        return Finding("CPUs", text, ADVICE, "The writer competes with training: give each rank two CPUs")
    advice = "Other processes are running: the measured rates are lower than an idle machine's"
    return judge("CPUs", text, load > 1.2 * count, advice)


def memory(job: JobSize, proc: Path, sys_: Path) -> Finding:
    """Compare free memory with the need of the local ranks: three snapshots, and a fourth during a write to a tier."""
    room = arena.room(proc, sys_ / "fs" / "cgroup")
    text = f"{room.available / GB:.1f} of {room.total / GB:.1f} GB available"
    text += "" if room.where == "machine" else " (a cgroup's limit)"
    if not job.state:
        return Finding("memory", text, data=room.available)
    text += f", a snapshot takes {job.here / GB:.1f} GB"
    if 3 * job.here > 0.9 * room.available:
        advice = "Too little for ckpt.Memory, which needs up to three snapshots: use more nodes or more memory"
        return Finding("memory", text, PROBLEM, advice, room.available)
    tight = 4 * job.here > 0.8 * room.available
    return judge("memory", text, tight, "Tight: a write that outlives a step needs a fourth snapshot", room.available)


def cgroup_files(controller: str, name: str, proc: Path, sys_: Path) -> Iterator[Path]:
    """Yield the paths of a file in the cgroups that contain this process, v1 and v2, nearest first."""
    for chain in arena.cgroup_chains(proc, sys_ / "fs" / "cgroup", "self", controller):
        yield from (file for folder in chain if (file := folder / name).is_file())


def oom_group(proc: Path, sys_: Path) -> list[Finding]:
    """Return a finding if the OOM killer would kill all processes of the container together."""
    if not any(read_text(f).strip() == "1" for f in cgroup_files("memory", "memory.oom.group", proc, sys_)):
        return []
    advice = "The OOM killer also kills the writer, and its memory is lost: set singleProcessOOMKill in the kubelet"
    return [Finding("cgroup oom group", "on", ADVICE, advice)]


def limits(job: JobSize) -> list[Finding]:
    """Return findings about ulimits that would end or hinder a job."""
    most = {
        "open files (ulimit -n)": (resource.RLIMIT_NOFILE, 1024, "Raise it: ulimit -n 65536"),
        "file size (ulimit -f)": (
            resource.RLIMIT_FSIZE, max(job.here, GB), "A rank's whole share may be one file: ulimit -f unlimited",
        ),
        "address space (ulimit -v)": (
            resource.RLIMIT_AS, 1 << 60, "Trainer and writer map the snapshots: ulimit -v unlimited",
        ),
    }  # fmt: skip
    now = {what: resource.getrlimit(kind)[0] for what, (kind, _, _) in most.items()}
    return [
        judge(what, str(now[what]), now[what] < least, advice)
        for what, (_, least, advice) in most.items()
        if now[what] != resource.RLIM_INFINITY
    ]


class ClockWatch:
    """Detects jumps of the local clock while other checks run."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def finding(self) -> Finding:
        jump = time.time() - time.monotonic() - self._offset
        if abs(jump) > 0.5:
            return Finding(
                "local clock", f"jumped by {jump:+.1f} s during the checks", ADVICE, "Let chrony or NTP slew it"
            )
        return Finding("local clock", "steady")


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of copies to host memory, bytes per second. `by_device`: by the GPUs' copy engines, not by CPUs."""

    copy: float
    by_device: bool
    cpus: float
    available: int


def speed(device_rates: Sequence[float], job: JobSize) -> Speed:
    """Measure how fast this machine copies snapshots."""
    room = arena.room().available
    if device_rates:
        return Speed(sum(device_rates[: job.local]), True, cpu_count(), room)
    return Speed(copy_rate() if job.state else 0.0, False, cpu_count(), room)


def copy_rate(size: int = 128 * MIB) -> float:
    """Measure one thread's memcpy. The memory is larger than the caches, and was written before."""
    one, two = memoryview(bytearray(size)), memoryview(bytearray(size))
    times = []
    for _ in range(3):
        at = time.perf_counter()
        two[:] = one
        times.append(time.perf_counter() - at)
    return size / statistics.median(times)


# -- GPUs --

COPY = """
import json, time, torch
rates = []
for number in range(torch.cuda.device_count()):
    size = 256 << 20
    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    here.copy_(there)
    torch.cuda.synchronize(number)
    at = time.perf_counter()
    for _ in range(8):
        here.copy_(there, non_blocking=True)
    torch.cuda.synchronize(number)
    rates.append(8 * size / (time.perf_counter() - at))
print(json.dumps(rates))
"""
Run = Callable[[Sequence[str], float], str | None]


def run_command(arguments: Sequence[str], timeout_s: float) -> str | None:
    """Return the output of a program, or None if it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def gpu_count(dev: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs in this machine."""
    return sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in dev.iterdir())


def gpus(run: Run = run_command, dev: Path = Path("/dev")) -> tuple[list[Finding], list[float]]:
    """Measure copies from each GPU to pinned host memory. Return findings, and bytes per second or [] if that fails."""
    if not gpu_count(dev):
        return [Finding("GPU", "no GPU here")], []
    output = run([sys.executable, "-c", COPY], 120.0)
    rates: list[float] = []
    with contextlib.suppress(ValueError, TypeError, IndexError):
        rates = [float(rate) for rate in json.loads((output or "").strip().splitlines()[-1])]
    if not rates:
        advice = "torch cannot use the GPU: run `python -c 'import torch; torch.cuda.init()'` for the reason"
        return [Finding("GPU copy to pinned memory", "not measured", ADVICE, advice)], []
    text = f"{', '.join(f'{rate / GB:.1f}' for rate in rates)} GB/s"
    advice = "Under 10 GB/s: few PCIe lanes, or memory of another socket (numactl)"
    return [judge("GPU copy to pinned memory", text, min(rates) < 10e9, advice, rates)], rates
