"""What the machine allows: CPUs, memory, limits, kernel and launcher, and how fast it copies snapshots."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.doctor.findings import ADVICE, GB, MIB, PROBLEM, Finding, JobSize, judge, per_second, read_text
from ckpt.faults import memory_pressure
from ckpt.ipc import channel
from ckpt.ipc.arena import Arena


def machine(
    job: JobSize,
    *,
    proc: Path = Path("/proc"),
    sys_: Path = Path("/sys"),
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Everything but GPUs and clocks that jump. `proc`, `sys_`: where the kernel tells."""
    found = [versions(), cpus(proc, sys_), memory(job, proc, sys_), *cgroup(proc, sys_), *limits(job)]
    found += [huge_pages(sys_), arena(), kernel(), ptrace(proc, environment), sockets(environment), clock_source(sys_)]
    return found + launcher(environment)


def versions() -> Finding:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        advice = "Fine for looking at runs; training needs torch 2.6 or newer"
        return Finding("versions", f"Python {platform.python_version()}, no torch", ADVICE, advice)
    old = tuple(int(n) for n in re.findall(r"\d+", torch)[:2]) < (2, 6)
    text = f"Python {platform.python_version()}, torch {torch}"
    return judge("versions", text, old, "torch 2.6 or newer is needed", verdict=PROBLEM)


def cpu_count(proc: Path = Path("/proc"), sys_: Path = Path("/sys")) -> float:
    """CPUs that this process may use: its affinity, less what a cgroup takes away."""
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
        return Finding("CPUs", text, ADVICE, "The writer takes its time from training: give each rank two")
    advice = "Others are at work here: what is measured now is less than there is"
    return judge("CPUs", text, load > 1.2 * count, advice)


def memory(job: JobSize, proc: Path, sys_: Path) -> Finding:
    """Against the snapshots of the ranks here: three, and one that is being written for a tier."""
    room = memory_pressure.room(proc, sys_ / "fs" / "cgroup")
    text = f"{room.available / GB:.1f} of {room.total / GB:.1f} GB available"
    text += "" if room.where == "machine" else " (a cgroup's limit)"
    if not job.state:
        return Finding("memory", text, data=room.available)
    text += f", a snapshot takes {job.here / GB:.1f} GB"
    if 3 * job.here > 0.9 * room.available:
        advice = "Too little for ckpt.Memory, which needs three or more snapshots: more nodes, or more memory"
        return Finding("memory", text, PROBLEM, advice, room.available)
    tight = 4 * job.here > 0.8 * room.available
    return judge("memory", text, tight, "Tight: use ckpt.Memory(keep=2)", room.available)


def cgroup_files(controller: str, name: str, proc: Path, sys_: Path) -> Iterator[Path]:
    """The files of a name in the cgroups around this process, v1 and v2, the nearest first."""
    for chain in memory_pressure.cgroup_chains(proc, sys_ / "fs" / "cgroup", "self", controller):
        yield from (file for folder in chain if (file := folder / name).is_file())


def cgroup(proc: Path, sys_: Path) -> list[Finding]:
    """Limits on processes, and whether the OOM killer takes all of a container at once."""
    found = []
    most = [int(n) for f in cgroup_files("pids", "pids.max", proc, sys_) if (n := read_text(f).strip()).isdigit()]
    if most:
        advice = "Each rank has a writer with some threads, beside data loaders: raise pids.max"
        found.append(judge("cgroup pids", f"{min(most)} at most", min(most) < 1000, advice))
    if any(read_text(f).strip() == "1" for f in cgroup_files("memory", "memory.oom.group", proc, sys_)):
        advice = "The OOM killer takes the writer along, and memory with it: set singleProcessOOMKill in the kubelet"
        found.append(Finding("cgroup oom group", "on", ADVICE, advice))
    return found


def limits(job: JobSize) -> list[Finding]:
    """ulimits that matter."""
    files, size, mapped, core, lock = (
        resource.getrlimit(kind)[0]
        for kind in (
            resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CORE,
            resource.RLIMIT_MEMLOCK,
        )
    )  # fmt: skip
    infinite = resource.RLIM_INFINITY

    def limit(what: str, value: int, bad: bool, advice: str) -> Finding:
        return judge(what, "unlimited" if value == infinite else str(value), bad, advice)

    found = [limit("open files (ulimit -n)", files, files != infinite and files < 1024, "Raise it: ulimit -n 65536")]
    if size != infinite:
        advice = "Packs of a rank's whole share are one file: ulimit -f unlimited"
        found.append(limit("file size (ulimit -f)", size, size < max(job.here, GB), advice))
    if mapped != infinite:
        advice = "Snapshots are mapped by trainer and writer: ulimit -v unlimited"
        found.append(limit("address space (ulimit -v)", mapped, True, advice))
    advice = "A crash writes the whole memory to a file before anything starts again: ulimit -c 0"
    found.append(limit("core dumps (ulimit -c)", core, core != 0, advice))
    pinning = lock != infinite and Path("/dev/nvidiactl").exists()
    advice = "RDMA, and some drivers, pin memory under it: ulimit -l unlimited"
    return [*found, limit("locked memory (ulimit -l)", lock, pinning, advice)]


def huge_pages(sys_: Path) -> Finding:
    found = re.search(r"\[(\w+)\]", read_text(sys_ / "kernel/mm/transparent_hugepage/shmem_enabled"))
    chosen = found[1] if found else "not known"
    bad = chosen not in ("advise", "within_size", "always", "force", "not known")
    advice = "Memory is made ready at a tenth of the speed: echo advise > "
    advice += "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return judge("huge pages for shared memory", chosen, bad, advice)


def arena(size: int = 64 * MIB) -> Finding:
    """The very thing that holds snapshots, small: sealed shared memory with a mutex that tells of deaths."""
    try:
        at = time.perf_counter()
        made = Arena.create(1, size)
        rate = size / (time.perf_counter() - at)
        made.mutex.lock()
        made.mutex.unlock()
        made.close()
    except (OSError, MemoryError, AttributeError) as error:
        return Finding("shared memory", f"cannot be made: {error}", PROBLEM, "Linux 3.17 or newer with memfd is needed")
    advice = "The first snapshots come late, until all memory is ready: see huge pages"
    return judge("shared memory", f"made ready at {per_second(rate)}", rate < 0.5e9, advice)


def kernel() -> Finding:
    missing = []
    for name, number in (("pidfd_open", os.getpid()), ("eventfd", 0)):
        try:
            os.close(getattr(os, name)(number))
        except (OSError, AttributeError):
            missing.append(name.removesuffix("_open"))
    text = platform.release() + (f", without {', '.join(missing)}" if missing else "")
    advice = "Linux 5.3 or newer, and a seccomp filter that lets them pass"
    return judge("kernel", text, bool(missing), advice, verdict=PROBLEM)


def ptrace(proc: Path, environment: Mapping[str, str]) -> Finding:
    """Whether stacks of a hung process can be taken from outside."""
    scope = read_text(proc / "sys/kernel/yama/ptrace_scope").strip() or "0"
    spy = shutil.which("py-spy", path=environment.get("PATH")) is not None
    text = f"ptrace_scope {scope}, py-spy {'is' if spy else 'not'} installed"
    if scope != "0" and os.geteuid() != 0:
        advice = "Stacks of a hang come from faulthandler alone: sysctl kernel.yama.ptrace_scope=0"
        return Finding("stacks of a hang", text, ADVICE, advice)
    return judge("stacks of a hang", text, not spy, "pip install py-spy, for stacks of all threads of any process")


def sockets(environment: Mapping[str, str]) -> Finding:
    """Where trainer, writer and `ckpt trigger` meet, and where a writer's own words go."""
    try:
        channel.siblings(channel.run_key("doctor", 0))
    except OSError as error:
        return Finding("writers", f"/proc/net/unix: {error}", PROBLEM, "The writers of a node do not find each other")
    path = channel.log_path("doctor")
    if not path:
        advice = f"Set {channel.RUNTIME} to a folder of this user, mode 700"
        return Finding("writers", "no place for what they say", ADVICE, advice)
    return Finding("writers", f"met by name, their logs are in {Path(path).parent}")


def clock_source(sys_: Path) -> Finding:
    name = read_text(sys_ / "devices/system/clocksource/clocksource0/current_clocksource").strip()
    slow = name in ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
    advice = "Slow to read, often since the TSC was found unstable: look at dmesg"
    return judge("clock source", name or "not known", slow, advice)


def launcher(environment: Mapping[str, str]) -> list[Finding]:
    """torchrun, Slurm, Kubernetes: what is known to be missing."""
    found = []
    if "TORCHELASTIC_RUN_ID" in environment:
        shared = environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") in ("", "0")
        advice = "After a restart, workers read addresses of the dead: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        found.append(judge("launcher", "torchrun", shared, advice))
    if "SLURM_JOB_ID" in environment:
        advice = "The end of the job is not known here: say on_deadline(in_s=...), or --signal=USR1@120"
        found.append(judge("launcher", "Slurm", "SLURM_JOB_END_TIME" not in environment, advice))
    if "KUBERNETES_SERVICE_HOST" in environment:
        advice = "terminationGracePeriodSeconds above grace_s, and the trainer or torchrun started with exec"
        found.append(Finding("launcher", "Kubernetes", ADVICE, advice))
    return found or [Finding("launcher", "none seen: not inside a job")]


class ClockWatch:
    """Whether the clock of this machine jumps while something else is done."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def finding(self) -> Finding:
        jump = time.time() - time.monotonic() - self._offset
        if abs(jump) > 0.5:
            return Finding("local clock", f"jumped by {jump:+.1f} s meanwhile", ADVICE, "Let chrony or NTP slew it")
        return Finding("local clock", "steady")


@dataclass(frozen=True, slots=True)
class Speed:
    """Of copies into host memory, in bytes a second; by devices of their own (GPUs), or by the CPUs."""

    copy: float
    by_device: bool
    cpus: float
    available: int


def speed(device_rates: Sequence[float], job: JobSize) -> Speed:
    """What copies a snapshot here."""
    room = memory_pressure.room().available
    if device_rates:
        return Speed(sum(device_rates[: job.local]), True, cpu_count(), room)
    return Speed(copy_rate() if job.state else 0.0, False, cpu_count(), room)


def copy_rate(size: int = 128 * MIB) -> float:
    """memcpy of one thread into memory that was touched before; more than fits into caches."""
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


def run_command(words: Sequence[str], timeout_s: float) -> str | None:
    """What a program says, None if it cannot be run, fails, or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def gpu_count(dev: Path = Path("/dev")) -> int:
    """Those of NVIDIA that this machine has."""
    return sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in dev.iterdir())


def gpus(run: Run = run_command, dev: Path = Path("/dev")) -> tuple[list[Finding], list[float]]:
    """Bytes a second from each to pinned host memory (none where that cannot be measured)."""
    if not gpu_count(dev):
        return [Finding("GPU", "no GPU here")], []
    said = run([sys.executable, "-c", COPY], 120.0)
    rates: list[float] = []
    with contextlib.suppress(ValueError, TypeError, IndexError):
        rates = [float(rate) for rate in json.loads((said or "").strip().splitlines()[-1])]
    if not rates:
        advice = "torch cannot use the GPU: look at `python -c 'import torch; torch.cuda.init()'`"
        return [Finding("GPU copy to pinned memory", "not measured", ADVICE, advice)], []
    text = f"{', '.join(f'{rate / GB:.1f}' for rate in rates)} GB/s"
    advice = "Under 10 GB/s: few PCIe lanes, or memory of another socket (numactl)"
    return [judge("GPU copy to pinned memory", text, min(rates) < 10e9, advice, rates)], rates
