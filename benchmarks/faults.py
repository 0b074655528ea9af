"""Cost of faults: detection time, lost steps, restart time, and the overhead of monitoring while nothing happens.

    python benchmarks/faults.py [--quick] [--only 1,3] [--folder DIR] [--json FILE]

Real processes on this machine, gloo on the CPU, real signals. Measured:

  1 signal    from os.kill, SIGUSR1, to the time in the fault report; a plain Python handler, installed before ours and
              called by it, records the same signals
  2 death     from SIGKILL of a trainer with much resident memory to the writer's report; a pidfd and the end of a pipe
              detect the same deaths
  3 steps     steps that the trainer had finished (reported by write(2) right after each optimizer step), minus the step
              that the next process restored
  4 restart   from SIGKILL or SIGSTOP of one of two ranks under torchrun to the end of the first new step of both;
              alternating with the same script without checkpoints, so that the difference is ours
  5 watching  Checkpointers with and without triggers alternate on the same state; and the CPU time of monitoring

A goal is met ("yes") if the worst value meets it, or the whole interval of a difference; "median" if the median does.
Absolute times depend on the machine and its load. Needs 8 GB of memory and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import platform
import queue
import random
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

BORN = time.time()  # when a rank ran its first line of Python, before it imports torch

NEVER = 10**9  # steps between checkpoints of a tier that must not save
Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Numbers of measurements. `resident`: bytes; `sessions`, `kills`: of torchrun, and in each; `pairs`: of blocks."""

    signals: int
    deaths: int
    resident: int
    lost: int
    sessions: int
    kills: int
    stops: int
    pairs: int
    quiet_s: float


FULL = Plan(10, 5, 3 << 30, 5, 2, 3, 3, 40, 15.0)
QUICK = Plan(2, 1, 1 << 30, 1, 1, 1, 0, 12, 4.0)
BLOCKED_S = 2.3  # how long a main thread is blocked each time
PLAIN_S = 2.0  # a plain handler that has not run after this time counts as not run
MIN_S = 10.0  # of on_hang, when a rank is stopped
BLOCK = 10  # steps
OWN = (("built", "imported"), ("imported", "opened"), ("opened", "restored"))  # everystep's parts of a restart
KINDS = ("armed", "unarmed")
PLACES = ("data", "forward", "backward", "told")  # of a fault from inside: before that part of a step, or after it


class Failed(Exception):
    """Raised when the event to measure did not happen."""


# ---- in the trainers ----


def say(what: str, **facts: Any) -> None:
    """Write one unbuffered line to the measuring process."""
    os.write(1, json.dumps({"what": what, "at": time.time(), **facts}).encode() + b"\n")


def hear() -> None:
    """Wait until the measuring process continues this one; exit if it has ended."""
    if not sys.stdin.readline():
        raise SystemExit(3)


def build(layers: int, width: int) -> Json:
    """Build weights and two moments in float32: 12 bytes per parameter."""
    import torch
    from torch import nn

    import ckpt

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    return {"model": model, "optim": torch.optim.AdamW(model.parameters()), "rng": ckpt.RNG()}


def train_step(state: Json, rows: int, at: Callable[[str], None] = lambda place: None) -> None:
    """Train one step, and call `at` between its parts."""
    import torch

    model = state["model"]
    at("data")
    x = torch.randn(rows, next(model.parameters()).shape[1])
    at("forward")
    loss = (model(x) - x).pow(2).mean()
    state["optim"].zero_grad()
    at("backward")
    loss.backward()
    state["optim"].step()


def get_ready() -> None:
    """Run the slow imports, and wait for the start."""
    import torch

    import ckpt.checkpointer  # noqa: F401

    torch.set_num_threads(1)
    say("ready", pid=os.getpid())
    hear()


def signalled(asked: Json) -> None:
    """Part 1: receive signals, round after round, while the main thread is in the requested situation."""
    import torch.distributed as dist

    import ckpt

    handled: list[float] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(time.time()))
    get_ready()
    faults: list[ckpt.types.Fault] = []
    if asked["situation"] == "collective":
        dist.init_process_group("gloo")
    leads = not dist.is_initialized() or dist.get_rank() == 0
    held_up = {"idle": sit_idle, "lock": sit_in_lock, "collective": lambda: all_have(True)}[asked["situation"]]
    state = build(4, 128)
    with ckpt.Checkpointer(
        state, ckpt.Tier(asked["run"], every=NEVER, keep=3), options=ckpt.Options(on_fault=faults.append)
    ) as cp:
        step = cp.restore(default=0)
        for number in range(asked["rounds"]):
            step = go_on(state, cp, step, lambda known=step: cp.stats.saves > known + 20)
            handled.clear()
            faults.clear()
            if not leads:
                hear()
            say("there", round=number)
            held_up()
            released = time.time()
            if asked["situation"] == "collective":
                step = go_on(state, cp, step, lambda: not leads or any(f.kind == "signal" for f in faults))
            else:
                eventually(lambda: bool(handled))
            seen = [f.when for f in faults if f.kind == "signal"]
            say("round", released=released, handled=handled[:1], seen=seen[:1])
        cp.wait(60.0)
        say("done")
        hear()
        os._exit(0)  # the other rank may not reach close


def sit_idle() -> None:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.001)


def sit_in_lock() -> None:
    """Block in a lock that this thread owns already, with the GIL held, since PyDLL does not release it."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    end = time.time() + BLOCKED_S
    until = ctypes.create_string_buffer(struct.pack("qq", int(end), int(end % 1 * 1e9)))
    libc.pthread_mutex_timedlock(mutex, until)


def all_have(this: bool) -> bool:
    """Return whether the value is true on all ranks, by a collective."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return this
    flag = torch.tensor(int(this))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def go_on(state: Json, cp: Any, step: int, enough: Callable[[], bool]) -> int:
    """Train, with a collective in every step, until `enough` is true on all ranks; return the last step."""
    least = step + 10  # so that the usual step time is known
    while not (all_have(enough()) and step >= least):
        train_step(state, 8)
        time.sleep(0.008)
        step += 1
        cp.step(step)
    cp.wait(60.0)
    return step


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def resident(asked: Json) -> None:
    """Part 2: allocate much memory, train, and be killed."""
    get_ready()
    import torch

    import ckpt

    piece = 64 << 20
    ballast = [torch.ones(piece // 4) for _ in range(asked["nbytes"] // piece)]
    state = build(4, 512)
    with ckpt.Checkpointer(state, ckpt.Tier(asked["run"], every=NEVER, keep=3)) as cp:
        for step in range(cp.restore(default=0), NEVER):
            train_step(state, 32)
            save = cp.step(step + 1)
            if step == 20 and save is not None:
                save.wait_staged(30.0)
                say("there", rss=psutil.Process().memory_info().rss, pieces=len(ballast))
            time.sleep(0.01)


def losing(asked: Json) -> None:
    """Part 3: restore, train, report every finished step, and fail at a random moment."""
    get_ready()
    import ckpt

    fault, rng = asked["fault"], random.Random(asked["seed"])
    hang = ckpt.triggers.on_hang(action="exit", min_s=1.0, factor=5.0)
    triggers = [ckpt.triggers.on_signal(), ckpt.triggers.on_exception(), ckpt.triggers.on_oom(), hang]
    tiers = [ckpt.Tier(asked["run"], every=NEVER, keep=3)]
    state = build(8, 512)  # 25 MB
    with ckpt.Checkpointer(state, tiers, triggers=triggers) as cp:
        start = cp.restore(default=0)
        say("restored", step=start)
        if asked["last"]:
            os._exit(0)
        due, where = start + rng.randint(12, 45), rng.choice(PLACES)
        if fault == "SEGV":
            delay_s = rng.uniform(0.4, 1.2)
            threading.Thread(target=lambda: (time.sleep(delay_s), ctypes.string_at(1)), daemon=True).start()
        for step in range(start + 1, NEVER):

            def at(place: str, step: int = step) -> None:
                if (step, place) == (due, where):
                    strike(fault, place)

            train_step(state, 256, at)
            say("step", step=step)
            at("told")  # before cp.step(), so that this step must be lost
            cp.step(step)


def strike(fault: str, place: str) -> None:
    if fault == "exception":
        raise RuntimeError(f"at {place}")
    if fault == "OOM":
        import torch

        torch.empty(1 << 50)
    if fault == "hang":
        time.sleep(3600.0)


def restarted(asked: Json) -> None:
    """Part 4: train one of two ranks under torchrun."""
    import torch
    import torch.distributed as dist
    from torch import nn

    moments = {"born": BORN, "torch": time.time()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    moments["group"] = time.time()
    torch.manual_seed(0)
    width = 1024
    layers = max(2, asked["nbytes"] // (12 * width * (width + 1)))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]))
    state: Json = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    moments["built"] = time.time()
    facts: Json = {"rank": dist.get_rank(), "incarnation": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    if not asked["ours"]:
        return repeat(state, 0, moments, facts, lambda step: None)
    import ckpt

    hang = [ckpt.triggers.on_signal(), ckpt.triggers.on_exception(), ckpt.triggers.on_hang(action="exit", min_s=MIN_S)]
    tiers = [ckpt.Tier(asked["run"], every=NEVER, keep=3)]
    moments["imported"] = time.time()
    with ckpt.Checkpointer(state, tiers, triggers=hang if asked["stops"] else "auto") as cp:
        moments["opened"] = time.time()
        step = cp.restore(default=0)
        moments["restored"] = time.time()
        assert cp.last_restore is not None
        facts |= {"restore_s": cp.last_restore.seconds, "tier": cp.last_restore.tier}

        def save(step: int) -> None:
            handle = cp.step(step)
            if not step % 10 and handle is not None:
                handle.wait_staged(60.0)  # so that "steady" is sent only when memory is in use

        return repeat(state, step, moments, facts, save)


def repeat(state: Json, start: int, moments: Json, facts: Json, save: Callable[[int], None]) -> None:
    """Train forever; report the first step, and the step after which a fault may strike."""
    for number, step in enumerate(range(start + 1, NEVER)):
        train_step(state, 8)
        if number == 0:
            say("first", step=step, pid=os.getpid(), moments={**moments, "first": time.time()}, **facts)
        save(step)
        if number == 12:
            say("steady", pid=os.getpid(), **facts)


def alternating(asked: Json) -> None:
    """Part 5: alternate a Checkpointer with triggers and one without, in blocks of steps on the same state.

    The writer of the inactive one is stopped, so that its background work counts in its own blocks.
    """
    get_ready()
    import ckpt

    state = build(24, 256)  # 144 tensors, in addition to AdamW's step counts
    held: dict[str, Any] = {}
    writers: dict[str, int] = {}
    for name, triggers in zip(KINDS, ("auto", []), strict=True):
        tiers = [ckpt.Tier(f"{asked['run']}-{name}", every=NEVER, keep=3)]
        held[name] = ckpt.Checkpointer(state, tiers, triggers=triggers, memory=ckpt.Memory(every=asked["every"]))
        writers[name] = held[name].writer_pid
        held[name].restore(default=0)
        train_step(state, asked["rows"])
        held[name].save(1).wait_durable(60.0)
    steps, rng = dict.fromkeys(held, 1), random.Random(5)
    try:
        for _ in range(asked["pairs"]):
            pair: dict[str, list[list[float]]] = {}
            for name in rng.sample(sorted(held), 2):
                for other, pid in writers.items():
                    os.kill(pid, signal.SIGCONT if other == name else signal.SIGSTOP)
                pair[name] = [timed_step(state, held[name], steps, name, asked["rows"]) for _ in range(BLOCK + 1)][1:]
                held[name].wait(60.0)
            say("pair", **pair)
    finally:
        for pid in writers.values():
            os.kill(pid, signal.SIGCONT)
    say("done")
    hear()
    os._exit(0)


def timed_step(state: Json, cp: Any, steps: dict[str, int], name: str, rows: int) -> list[float]:
    """Return the seconds of a whole step, its CPU seconds in the process, and those of this thread in step()."""
    wall, cpu = time.perf_counter(), time.process_time()
    train_step(state, rows)
    steps[name] += 1
    called = time.thread_time()
    cp.step(steps[name])
    ended = time.thread_time()
    return [time.perf_counter() - wall, time.process_time() - cpu, ended - called]


def quiet(asked: Json) -> None:
    """Part 5: train without saving, and measure the CPU time of all monitoring threads."""
    get_ready()
    import ckpt

    state = build(24, 256)
    tiers = [ckpt.Tier(asked["run"], every=NEVER, keep=3)]
    with ckpt.Checkpointer(
        state, tiers, triggers="auto" if asked["armed"] else [], memory=ckpt.Memory(every=NEVER, keep=3)
    ) as cp:
        step = cp.restore(default=0)
        cp.save(step + 1).wait_durable(60.0)
        step += 1
        writer = cp.writer_pid
        time.sleep(1.0)  # wait for the background work of the first save
        usual = {"MainThread", "ckpt-link", "ckpt-stage", "ckpt-exchange"}
        watching = [t for t in threading.enumerate() if t.name not in usual and t.ident is not None]
        clocks = [time.pthread_getcpuclockid(t.ident) for t in watching if t.ident is not None]
        before = [cpu_s(clocks), cpu_s([process_clock(writer)]), time.monotonic()]
        while time.monotonic() < before[2] + asked["seconds"]:
            train_step(state, 64)
            step += 1
            cp.step(step)
        after = [cpu_s(clocks), cpu_s([process_clock(writer)]), time.monotonic()]
        threads, theirs, seconds = (b - a for a, b in zip(before, after, strict=True))
        say("quiet", threads=threads / seconds, writer=theirs / seconds, names=sorted(t.name for t in watching))
        os._exit(0)


def process_clock(pid: int) -> int:
    """Return the same as clock_getcpuclockid(3). It counts nanoseconds; /proc counts hundredths of a second."""
    return (~pid << 3) | 2


def cpu_s(clocks: Sequence[int]) -> float:
    return sum(time.clock_gettime(clock) for clock in clocks)


ROLES: dict[str, Callable[[Json], None]] = {
    "signalled": signalled,
    "resident": resident,
    "losing": losing,
    "restarted": restarted,
    "alternating": alternating,
    "quiet": quiet,
}


# ---- in the process that measures ----


@dataclass
class Figure:
    """A row of the table. `values` in `unit`; `goal`: maximum or None; `interval`: 95 %, of the median."""

    part: int
    name: str
    unit: str
    values: list[float]
    goal: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def worst(self) -> float:
        return max(self.values)

    @property
    def met(self) -> str:
        if self.goal is None:
            return ""
        low, high = self.interval or (self.median, self.worst)
        if high <= self.goal:
            return "yes"
        if self.interval is not None:
            return "NO" if low > self.goal else "unclear"
        return "median" if self.median <= self.goal else "NO"


class Child:
    """A child process. A thread reads its lines into a queue."""

    def __init__(self, command: list[str], env: dict[str, str], errors: Path, pass_fds: tuple[int, ...] = ()) -> None:
        self.errors = errors
        with errors.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C reaches only the measuring process
            )
        self.pid = self.process.pid
        self._said: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # a line of torchrun or a library
                if isinstance(one := json.loads(line), dict):
                    self._said.put(one)
        self._said.put(None)

    def tell(self) -> None:
        """Continue the child process."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def expect(self, what: str, timeout_s: float = 60.0) -> Json:
        """Return the next event of this kind, skipping others."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                one = self._said.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise Failed(f"no {what!r} within {timeout_s:g} s\n{self.tail()}") from None
            if one is None:
                raise Failed(f"ended with {self.process.wait()} before {what!r}\n{self.tail()}")
            if one["what"] == what:
                return one

    def rest(self, timeout_s: float = 60.0) -> list[Json]:
        """Return all remaining events until the process ends."""
        found, end = list[Json](), time.monotonic() + timeout_s
        while True:
            try:
                one = self._said.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise Failed(f"has not ended within {timeout_s:g} s\n{self.tail()}") from None
            if one is None:
                self.process.wait(10.0)
                return found
            found.append(one)

    def tail(self) -> str:
        return self.errors.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Bench:
    """The folders of the benchmark. All processes started here have the socket folder in their environment."""

    plan: Plan
    folder: Path
    sockets: Path
    quick: bool
    notes: list[str] = field(default_factory=list)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fresh(self, name: str) -> str:
        """Return a path that was not used before."""
        with self._lock:
            self._count += 1
            return str(self.folder / f"{name}-{self._count}")

    @property
    def env(self) -> dict[str, str]:
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # With the agent's own store, new workers would read the addresses of dead ones (pytorch issue 135712).
        quiet |= {"PYTHONWARNINGS": "ignore", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return {**os.environ, **quiet, "CKPT_RUNTIME_DIR": str(self.sockets)}

    def child(self, role: str, *, env: Json | None = None, fds: tuple[int, ...] = (), **asked: Any) -> Child:
        command = [sys.executable, __file__, "--child", role, json.dumps(asked)]
        return Child(command, {**self.env, **(env or {})}, Path(self.fresh("err")), fds)

    def torchrun(self, **asked: Any) -> Child:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "20", __file__, "--child", "restarted", json.dumps(asked)]
        return Child(command, self.env, Path(self.fresh("err")))

    def ours(self) -> Iterator[psutil.Process]:
        """Yield the processes started here, directly or not: only they have this folder in the environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("CKPT_RUNTIME_DIR") == str(self.sockets):
                    yield process

    def kill_all(self) -> None:
        """Kill all processes, also those started in the meantime by torchrun or a trainer."""
        for _ in range(5):
            found = list(self.ours())
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not found:
                return
            psutil.wait_procs(found, timeout=5.0)

    def clear(self) -> None:
        """Clean up after a part: end all writers, and free disk and memory."""
        self.kill_all()
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def reports(run: str, kind: str, by: str) -> list[Json]:
    """Return the fault reports of a run, oldest first."""
    found = []
    for path in sorted(Path(run, "faults").glob("*.json")):
        with contextlib.suppress(ValueError):  # not completely written yet
            one = json.loads(path.read_bytes())
            if one["kind"] == kind and one["by"] == by:
                found.append(one)
    return found


def when(account: Json) -> float:
    return datetime.fromisoformat(account["time"]).timestamp()


# -- 1: signals --


def measure_signals(bench: Bench) -> list[Figure]:
    found = []
    for label, situation, goal in (
        ("main thread idle in Python", "idle", None),
        ("main thread in a gloo collective", "collective", 5.0),
        ("interpreter's lock held in C", "lock", 50.0),
    ):
        rounds = signal_rounds(bench, situation)
        ours = [(one["seen"] - one["sent"]) * 1e3 for one in rounds]
        plain = [(one["handled"] - one["sent"]) * 1e3 for one in rounds]
        found.append(Figure(1, f"SIGUSR1 noticed, {label}", "ms", ours, goal))
        within = sum(ms <= PLAIN_S * 1e3 for ms in plain)
        note = f"ran within {PLAIN_S:g} s: {within} of {len(plain)}"
        found.append(Figure(1, f"  plain Python handler, {label}", "ms", plain, note=note))
        if situation != "idle" and within:
            raise Failed(f"a plain handler ran within {PLAIN_S:g} s, so the main thread was not blocked: {plain}")
    return found


def signal_rounds(bench: Bench, situation: str) -> list[Json]:
    """Return for each round when the signal was sent, detected by us, and handled by Python."""
    run, rounds = bench.fresh("signal"), list[Json]()
    asked: Json = {"run": run, "situation": situation, "rounds": bench.plan.signals}
    ranks = 2 if situation == "collective" else 1
    port = free_port()
    children = [
        bench.child("signalled", env=rank_environment(rank, ranks, port) if ranks > 1 else {}, **asked)
        for rank in range(ranks)
    ]
    for child in children:
        child.expect("ready")
    for child in children:
        child.tell()
    first = children[0]
    for number in range(bench.plan.signals):
        first.expect("there")
        time.sleep(random.uniform(0.1, 0.2))
        sent = time.time()
        os.kill(first.pid, signal.SIGUSR1)
        for other in children[1:]:
            time.sleep(BLOCKED_S - 0.2)
            other.tell()
        told = first.expect("round")
        if situation == "lock":
            seen = await_reports(run, number + 1)[number]
        elif not told["seen"]:
            raise Failed(f"the sentinel did not see signal {number}")
        else:
            seen = told["seen"][0]
        if not told["handled"]:
            raise Failed(f"Python did not handle signal {number}")
        rounds.append({"sent": sent, "seen": seen, "handled": told["handled"][0], "released": told["released"]})
    first.expect("done")
    for child in children:
        child.kill()
    return rounds


def await_reports(run: str, count: int) -> list[float]:
    """Return when the writer detected its signals. It writes the report after everything is saved."""
    if not eventually(lambda: len(reports(run, "signal", "writer")) >= count, 15.0):
        raise Failed(f"the writer reported {len(reports(run, 'signal', 'writer'))} signals of {count}")
    return [when(one) for one in reports(run, "signal", "writer")]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def rank_environment(rank: int, world: int, port: int) -> Json:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


# -- 2: deaths --


def measure_deaths(bench: Bench) -> list[Figure]:
    nbytes = bench.plan.resident
    room = psutil.virtual_memory().available - (2 << 30)
    if room < nbytes:
        bench.notes.append(f"2: only {room / 2**30:.1f} GiB of memory are free, so less than planned is made resident")
        nbytes = max(256 << 20, room)
    found, rss = list[Json](), 0
    for _ in range(bench.plan.deaths):
        found.append(one_death(bench, nbytes))
        rss = found[-1]["rss"]
        bench.clear()
    label = f"SIGKILL at {rss / 2**30:.1f} GiB resident"
    return [
        Figure(2, f"{label}: noticed by the writer", "ms", [one["writer"] * 1e3 for one in found], 50.0),
        Figure(2, "  its pidfd becomes readable", "ms", [one["pidfd"] * 1e3 for one in found]),
        Figure(2, "  its pipe ends", "ms", [one["pipe"] * 1e3 for one in found]),
    ]


def one_death(bench: Bench, nbytes: int) -> Json:
    """Return the seconds from SIGKILL until detection by each means."""
    run = bench.fresh("death")
    reader, writer = os.pipe()  # the writer does not inherit the trainer's end
    child = bench.child("resident", fds=(writer,), run=run, nbytes=nbytes)
    os.close(writer)
    child.expect("ready")
    child.tell()
    rss = child.expect("there", 120.0)["rss"]
    time.sleep(random.uniform(0.1, 0.3))
    pidfd = os.pidfd_open(child.pid)
    poll = select.poll()
    names = {pidfd: "pidfd", reader: "pipe"}
    for fd in names:
        poll.register(fd, select.POLLIN)
    found: Json = {"rss": rss}
    sent = time.time()
    os.kill(child.pid, signal.SIGKILL)
    while names:
        for fd, _ in poll.poll(30_000) or [(-1, 0)]:
            if fd < 0:
                raise Failed("the trainer does not die")
            found[names.pop(fd)] = time.time() - sent
            poll.unregister(fd)
    os.close(pidfd)
    os.close(reader)
    child.kill()
    if not eventually(lambda: bool(reports(run, "death", "writer")), 60.0):
        raise Failed("the writer did not report the death")
    found["writer"] = when(reports(run, "death", "writer")[0]) - sent
    return found


# -- 3: lost steps --


def measure_losses(bench: Bench) -> list[Figure]:
    """Measure two runs at a time."""
    cases = ("SIGKILL", "SEGV", "OOM", "hang", "exception")
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(losses, bench, fault) for fault in cases]
        lost = [future.result() for future in futures]
    return [
        Figure(3, f"steps lost, {fault}, memory every step", "steps", [float(v["lost"]) for v in values], 1)
        for fault, values in zip(cases, lost, strict=True)
    ]


def losses(bench: Bench, fault: str) -> list[Json]:
    """Run processes one after another. The next one starts before the fault, so that it has already imported torch."""
    run, found, finished = bench.fresh(f"lost-{fault}"), list[Json](), 0
    rng = random.Random(f"{fault}1")

    def start(number: int) -> Child:
        asked: Json = {"fault": fault, "run": run, "seed": f"{fault}1{number}"}
        return bench.child("losing", **asked, last=number == bench.plan.lost)

    child = start(0)
    for number in range(bench.plan.lost + 1):
        child.expect("ready")
        child.tell()
        restored = child.expect("restored")["step"]
        if number:
            if restored > finished:
                raise Failed(f"step {restored} was restored, but the last finished step is {finished}")
            found.append({"lost": finished - restored, "finished": finished})
        if number == bench.plan.lost:
            break
        standby = start(number + 1)
        last = restored
        if fault.startswith("SIG"):  # from outside, at a random moment
            while last < restored + 12:
                last = child.expect("step")["step"]
            time.sleep(rng.uniform(0.0, 0.6))
            os.kill(child.pid, signal.Signals[fault])
        told = [one for one in child.rest() if one["what"] == "step"]
        finished = max([last, *(one["step"] for one in told)])
        child = standby
    child.rest()
    return found


# -- 4: restarts --


def measure_restarts(bench: Bench) -> list[Figure]:
    plan, turns = bench.plan, dict[bool, list[Json]]({True: [], False: []})
    for _ in range(plan.sessions):
        for ours in (True, False):
            turns[ours] += session(bench, ours=ours, kills=plan.kills, number=signal.SIGKILL)
            bench.clear()
    mine, bare = turns[True], turns[False]

    def spans(of: list[Json], first: str, last: str) -> list[float]:
        return [one[last] - one[first] for one in of]

    whole, alone = spans(mine, "hit", "first"), spans(bare, "hit", "first")
    added = statistics.median(whole) - statistics.median(alone)
    own = [sum(one[b] - one[a] for a, b in OWN) for one in mine]
    parts = [
        ("  torchrun: to the new workers' first line", "hit", "born"),
        ("  import torch", "born", "torch"),
        ("  init_process_group", "torch", "group"),
        ("  model, DDP and optimizer", "group", "built"),
    ]
    found = [Figure(4, "SIGKILL of a rank to first new step, with ckpt", "s", whole)]
    found += [Figure(4, label, "s", spans(mine, a, b)) for label, a, b in parts]
    found += [
        Figure(4, "  import ckpt", "s", spans(mine, "built", "imported")),
        Figure(4, "  Checkpointer constructor", "s", spans(mine, "imported", "opened")),
        Figure(4, "  restore(), between ranks", "s", spans(mine, "opened", "restored")),
        Figure(4, "  restore(), its own time", "s", [one["restore_s"] for one in mine], 0.5, note=tiers_of(mine)),
        Figure(4, "  first step", "s", spans(mine, "restored", "first")),
        Figure(4, "the same without ckpt, from step 0", "s", alone),
    ]
    found += [Figure(4, label, "s", spans(bare, a, b)) for label, a, b in parts]
    found += [
        Figure(4, "  first step", "s", spans(bare, "built", "first")),
        Figure(4, "ckpt's own part: import, constructor, restore()", "s", own, 1.0),
        Figure(
            4,
            "all that ckpt adds: difference of medians",
            "s",
            [added],
            1.0,
            interval_of_difference(whole, alone),
            f"{len(whole)} and {len(alone)} restarts",
        ),
    ]
    if plan.stops:
        stopped = session(bench, ours=True, kills=plan.stops, number=signal.SIGSTOP)
        bench.clear()
        values = spans(stopped, "hit", "first")
        found.append(Figure(4, f"SIGSTOP of a rank to first new step, on_hang min_s={MIN_S:g}", "s", values, 30.0))
    return found


def interval_of_difference(these: list[float], those: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of the medians, by bootstrap."""
    rng = random.Random(4)

    def median(of: list[float]) -> float:
        return statistics.median(rng.choices(of, k=len(of)))

    drawn = sorted(median(these) - median(those) for _ in range(2000))
    return drawn[50], drawn[-51]


def tiers_of(turns: list[Json]) -> str:
    return "from " + ", ".join(sorted({"memory" if one["tier"] == "memory" else "disk" for one in turns}))


def session(bench: Bench, *, ours: bool, kills: int, number: signal.Signals) -> list[Json]:
    """Hit one job again and again. Return for each hit when the last rank finished each part of the restart."""
    run, found, hit = bench.fresh("restart"), list[Json](), 0.0
    nbytes = (75 << 20) if bench.quick else (300 << 20)
    job = bench.torchrun(run=run, ours=ours, stops=number == signal.SIGSTOP, nbytes=nbytes)
    for incarnation in range(kills + 1):
        first = by_rank(job, "first", incarnation)
        if incarnation:
            last = {key: max(one["moments"][key] for one in first) for key in first[0]["moments"]}
            own = {"restore_s": max(one["restore_s"] for one in first), "tier": first[0]["tier"]} if ours else {}
            found.append({"hit": hit, **last, **own})
        if incarnation == kills:
            break
        steady = by_rank(job, "steady", incarnation)
        time.sleep(random.uniform(0.1, 0.6))
        hit = time.time()
        os.kill(steady[incarnation % 2]["pid"], number)
    job.kill()  # `clear` kills its workers
    return found


def by_rank(job: Child, what: str, incarnation: int) -> list[Json]:
    """Return the events of both ranks in one job attempt."""
    found: dict[int, Json] = {}
    while len(found) < 2:
        one = job.expect(what, 120.0)
        if one["incarnation"] == incarnation:
            found[one["rank"]] = one
    return [found[rank] for rank in sorted(found)]


# -- 5: watching --


def measure_watching(bench: Bench) -> list[Figure]:
    found = []
    for every in (10,) if bench.quick else (1, 10):
        child = bench.child("alternating", every=every, run=bench.fresh("watch"), pairs=bench.plan.pairs, rows=256)
        child.expect("ready")
        child.tell()
        pairs = [child.expect("pair", 120.0) for _ in range(bench.plan.pairs)]
        child.expect("done")
        bench.clear()
        found += figures_of_pairs(pairs, every)
    children = {
        armed: bench.child("quiet", armed=armed, run=bench.fresh("quiet"), seconds=bench.plan.quiet_s)
        for armed in (True, False)
    }
    for child in children.values():
        child.expect("ready")
    for child in children.values():
        child.tell()
    told = {armed: child.expect("quiet", 120.0) for armed, child in children.items()}
    bench.clear()
    names = ", ".join(told[True]["names"])
    more = told[True]["writer"] - told[False]["writer"]
    return [
        *found,
        Figure(5, "CPU of the sentinel's threads while idle", "%", [told[True]["threads"] * 100], 0.1, note=names),
        Figure(5, "CPU of the writer while idle", "%", [told[True]["writer"] * 100], 0.1),
        Figure(5, "  more than of an unarmed one", "%", [more * 100]),
    ]


def figures_of_pairs(pairs: list[Json], every: int) -> list[Figure]:
    """Compare pairs of blocks: the ratio of median steps, and the difference of mean calls of step()."""
    walls, cpus, calls, usual = list[float](), list[float](), list[float](), list[float]()
    for pair in pairs:
        (wall, cpu, call), (bare_wall, bare_cpu, bare_call) = (list(zip(*pair[n], strict=True)) for n in KINDS)
        usual.append(statistics.median(bare_cpu))
        walls.append((statistics.median(wall) / statistics.median(bare_wall) - 1) * 100)
        cpus.append((statistics.median(cpu) / usual[-1] - 1) * 100)
        calls.append((statistics.mean(call) - statistics.mean(bare_call)) / usual[-1] * 100)
    step_ms = statistics.median(usual) * 1e3
    micro = f"{statistics.median(calls) / 100 * step_ms * 1e3:.0f} us of {step_ms:.0f} ms a step, 144 tensors"
    where = f"memory every {every}"
    return [
        Figure(5, f"time of a step, armed to unarmed, {where}", "%", walls, 0.1, interval_of_median(walls)),
        Figure(5, f"  CPU time of the process in a step, {where}", "%", cpus, 0.1, interval_of_median(cpus)),
        Figure(5, f"  CPU time of step() alone, {where}", "%", calls, 0.1, interval_of_median(calls), micro),
    ]


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from the order of the values alone."""
    ordered, n = sorted(values), len(values)
    below, chance = -1, 0.0
    while (chance := chance + math.comb(n, below + 1) / 2**n) <= 0.025:
        below += 1
    return ordered[max(below, 0)], ordered[n - 1 - max(below, 0)]


# -- all of it --


PARTS: dict[int, tuple[str, Callable[[Bench], list[Figure]]]] = {
    1: ("signals", measure_signals),
    2: ("deaths", measure_deaths),
    3: ("lost steps", measure_losses),
    4: ("restarts", measure_restarts),
    5: ("watching", measure_watching),
}


def show(figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    right = ("N", "median", "worst", "goal")
    titles = ("", "figure", "N", "median", "worst", "goal", "met", "")
    table = Table(*(Column(t, justify="right" if t in right else "left", no_wrap=True) for t in titles), box=None)
    for one in figures:
        median, worst = f"{one.median:.4g}", f"{one.worst:.4g} {one.unit}"
        if one.interval is not None:  # the worst of many short blocks has no meaning
            median, worst = f"{one.median:.3f}", f"{one.interval[0]:.3f} to {one.interval[1]:.3f} {one.unit}"
        goal = "" if one.goal is None else f"{one.goal:g} {one.unit}"
        table.add_row(str(one.part), one.name, str(len(one.values)), median, worst, goal, one.met, one.note)
    Console(width=200, highlight=False).print(table)


def machine() -> Json:
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "available_gib": round(psutil.virtual_memory().available / 2**30, 1),
        "kernel": platform.release(),
        "huge_pages": huge.read_text().strip() if huge.exists() else "?",
        "torch": version("torch"),
        "python": platform.python_version(),
    }


@contextlib.contextmanager
def at_work(plan: Plan, folder: str | None, quick: bool) -> Iterator[Bench]:
    """Clean up all processes and folders, however the benchmark ends."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as work:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as sockets:  # a short path
            bench = Bench(plan, Path(work), Path(sockets), quick)
            try:
                yield bench
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleanup
                bench.kill_all()
                signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of each, and smaller states: under 2 minutes")
    parser.add_argument("--only", metavar="N,N", help="run only these parts, for example 1,3")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        ROLES[arguments.child[0]](json.loads(arguments.child[1]))
        return 0
    parts = [int(p) for p in arguments.only.split(",")] if arguments.only else sorted(PARTS)
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"unknown part {unknown.pop()}: choose from {', '.join(map(str, PARTS))}")
    facts, plan, started = machine(), QUICK if arguments.quick else FULL, time.monotonic()
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()), flush=True)
    figures, failures = list[Figure](), list[str]()
    with at_work(plan, arguments.folder, arguments.quick) as bench:
        for part in parts:
            name, measure = PARTS[part]
            began = time.monotonic()
            try:
                figures += measure(bench)
            except Failed as error:
                failures.append(f"{part} {name}: {error}")
            bench.clear()
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    show(figures)
    for line in [*bench.notes, *failures]:
        print(line)
    print(f"{time.monotonic() - started:.0f} s in all")
    if arguments.json:
        rows = [{**asdict(one), "median": one.median, "worst": one.worst, "met": one.met} for one in figures]
        found = {"machine": facts, "plan": asdict(plan), "figures": rows, "failures": failures}
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
