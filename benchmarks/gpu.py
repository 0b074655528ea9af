"""The cost of saving every step on a GPU, and how much of the copy overlaps with training.

    make bench-gpu        or: python benchmarks/gpu.py [--json FILE] [--trace FILE] [--folder DIR]
    python benchmarks/gpu.py --device cpu --quick        everything except the trace, on any machine, to test the script

One GPT (see `workload.py`), in bfloat16 by autocast with fused AdamW, as large as the memory of the GPU and the host
allows. The batch makes a step last at least 100 ms, and twice as long as copying the state takes.

- *copies*: how fast the device fills one large pinned buffer, and how fast it copies a whole snapshot, by events on the
  copy stream.
- *steps*: blocks of 25 with a save after each step and without, alternating, so that drift affects both. `free`: the
  loop never waits for the device, so the host runs ahead. `read`: the loss is read after each step, so the device is
  idle while step() blocks. `blocks`: the duration of step(); `with waits`: including the host's wait before updates.
- *overlap*: the share of the time of copies to the host during which kernels ran, by the profiler's records of the
  device, or by events on both streams if there are none. As a control, the same for a save while nothing else runs: it
  must be almost zero.
- *durable*: a save to memory and to a folder. `lost`: the extra time of it and of all steps until two after its end,
  compared with as many steps without a save in progress.
- *restores*: into the live tensors, after they were overwritten; equal only if every bit is.

Exits with status 1 if anything restored differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))

import ckpt
from ckpt.core.snapshot.fill import SlotFiller
from workload import GPT, SMALL, THREADS, Size, Training

T = TypeVar("T")
Span = tuple[float, float]  # from begin to end, on one clock

LEAST_STEP_S = 0.1
COPY_SHARE = 0.5  # of a step; copying its state may take at most this share
CARD_SHARE = 1 / 16  # of the GPU's memory, for the state: activations take most of the rest
HOST_SHARE = 1 / 12  # of the available memory: four slots take a third of it
PER_PARAM = 12  # bytes of state: a weight and two moments
GOALS = {"ratio": 1.01, "median_s": 0.003, "p99_s": 0.010}
DUE = 1000  # steps between durable saves; steps between two cycles are skipped
LONGEST_S = 300.0
QUICK_GIB = 0.75


@dataclass(frozen=True)
class Plan:
    """The number of measurements."""

    block: int = 25  # steps
    pairs: int = 8  # of blocks without and with saves
    warm_up: int = 5
    raw_bytes: int = 1 << 30
    repeats: int = 10
    traced: int = 6  # steps
    quiet: int = 8  # steps of a cycle of durable saves without another save in progress
    cycles: int = 3


FULL = Plan()
QUICK = Plan(block=5, pairs=2, warm_up=1, raw_bytes=32 << 20, repeats=3, traced=2, quiet=3, cycles=2)


class Device:
    """The few operations that differ between a GPU and the CPU."""

    def __init__(self, kind: str) -> None:
        self.kind, self.is_gpu = kind, kind == "cuda"

    def wait(self) -> None:
        """Wait until the training's kernels have ended; copies on other streams may continue."""
        if self.is_gpu:
            torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        """Wait until nothing is running."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"device": platform.processor() or platform.machine()}
        if self.is_gpu:
            about = torch.cuda.get_device_properties(0)
            found = {
                "device": about.name,
                "device_gib": about.total_memory / 2**30,
                "driver": nvidia("driver_version"),
                "link": f"PCIe {nvidia('pcie.link.gen.max')} x{nvidia('pcie.link.width.max')}",
                "cuda": torch.version.cuda,
            }
        return {
            **found,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpus": THREADS,
            "host_gib": available_bytes() / 2**30,
        }


def nvidia(field: str) -> str:
    """Return what nvidia-smi reports about the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return "unknown"


def available_bytes() -> int:
    """Return the available bytes of the host's memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds, and the result of the call."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def drop_caches() -> bool:
    """Drop caches so that files are read from disk; return True if allowed."""
    command = ["sh", "-c", "sync; echo 1 > /proc/sys/vm/drop_caches"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


# -- the training --


class Autocast(Training):
    """The workload as it runs on a GPU: bfloat16 by autocast, with batches created on the device."""

    device = "cpu"
    loss: Tensor

    @classmethod
    def of(cls, size: Size, device: str, seed: int = 0) -> Autocast:
        torch.set_num_threads(THREADS)
        torch.manual_seed(seed)
        with torch.device(device):  # a large model is created faster there
            model = GPT(size)
        training = cls(size, model, torch.optim.AdamW(model.parameters(), fused=True), batches(size, seed, device))
        training.device = device
        training.step()
        return training

    def step(self) -> None:
        tokens = next(self.batches)
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            self.loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optim.zero_grad()
        self.loss.backward()
        self.on_gradients()
        self.optim.step()

    def digest(self) -> str:
        """Return a digest of every bit of the state: several GB within a second."""
        found = xxhash.xxh3_128()
        for tensor in self.tensors():
            found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def on_gradients(self) -> None:
        """Do nothing unless a measurement replaces it."""

    def enlarge(self, batch: int) -> None:
        """Train with this batch size from now on."""
        self.size = replace(self.size, batch=batch)
        self.batches = batches(self.size, batch, self.device)


def batches(size: Size, seed: int, device: str) -> Iterator[Tensor]:
    """Yield batches without a copy from the host, since the host would wait for the device."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = size.batch, size.context + 1
    while True:
        yield torch.randint(size.vocabulary, shape, generator=generator, device=device)


def chosen(state_bytes: float) -> Size:
    """Return a GPT with about this many bytes of state, in tensors of usual sizes."""
    width, vocabulary, context = 1024, 32768, 1024
    layers = (state_bytes / PER_PARAM - (vocabulary + context) * width) / (12 * width * width)
    return Size(max(2, round(layers)), width, width // 64, vocabulary, context, batch=1)


def fitting(device: Device, raw_rate: float, state_gib: float | None) -> Autocast:
    """Return the largest state that both memories allow, with a batch that makes steps long enough."""
    if not device.is_gpu:
        return Autocast.of(SMALL, "cpu")
    total = torch.cuda.get_device_properties(0).total_memory
    wanted = state_gib * 2**30 if state_gib else min(total * CARD_SHARE, available_bytes() * HOST_SHARE)
    training = Autocast.of(chosen(wanted), "cuda")
    least = max(LEAST_STEP_S, training.nbytes / raw_rate / COPY_SHARE)
    while step_s(device, training) < least:
        batch = training.size.batch
        if not holds(device, training, 2 * batch):
            training.optim.zero_grad()
            training.loss = torch.zeros(())
            torch.cuda.empty_cache()
            training.enlarge(batch)
            break
    return training


def holds(device: Device, training: Autocast, batch: int) -> bool:
    """Return True if the GPU's memory is enough for a step with this batch, which the training then uses."""
    training.enlarge(batch)
    try:
        training.step()
        device.settle()
    except torch.OutOfMemoryError:
        return False
    return True


def step_s(device: Device, training: Training, count: int = 4, *, each: bool = False) -> float:
    """Return the seconds of a step while nothing else runs. `each`: wait for the device after each step."""
    training.step()
    device.wait()
    started = time.perf_counter()
    for _ in range(count):
        training.step()
        if each:
            device.wait()
    device.wait()
    return (time.perf_counter() - started) / count


# -- copies --


def raw_rate(device: Device, plan: Plan) -> float:
    """Return the bytes per second from the device into one large page-locked buffer; on the CPU, of a plain copy."""
    source = torch.ones(plan.raw_bytes, dtype=torch.uint8, device=device.kind)
    target = torch.zeros(plan.raw_bytes, dtype=torch.uint8, pin_memory=device.is_gpu)
    took = []
    for _ in range(plan.repeats + 2):
        if device.is_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / 1e3)
        else:
            took.append(timed(lambda: target.copy_(source))[0])
    return plan.raw_bytes / statistics.median(took[2:])


class Marks:
    """Records events around all copies on a Checkpointer's copy streams."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.origin = torch.cuda.Event(enable_timing=True)
        self.origin.record()

    def at(self, event: torch.cuda.Event) -> float:
        """Return the time of an event, in seconds since the first one."""
        return float(self.origin.elapsed_time(event)) / 1e3

    def spans(self) -> list[Span]:
        torch.cuda.synchronize()
        return [(self.at(begin), self.at(end)) for begin, end in self.pairs]


@contextlib.contextmanager
def marking() -> Iterator[Marks]:
    marks, copy = Marks(), SlotFiller.copy

    def marked(self: SlotFiller, pairs: Any, streams: Any) -> None:
        begins = [(stream, torch.cuda.Event(enable_timing=True)) for stream in streams.values()]
        for stream, begin in begins:
            begin.record(stream)
        copy(self, pairs, streams)
        for stream, begin in begins:
            end = torch.cuda.Event(enable_timing=True)
            end.record(stream)
            marks.pairs.append((begin, end))

    SlotFiller.copy = marked  # type: ignore[method-assign]
    try:
        yield marks
    finally:
        SlotFiller.copy = copy  # type: ignore[method-assign]


# -- does the copy overlap? --


def merged(spans: list[Span]) -> list[Span]:
    """Merge spans that touch or overlap, in ascending order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def shared(these: list[Span], those: list[Span]) -> float:
    """Return the time during which both ran; both must be merged."""
    total, first = 0.0, 0
    for begin, end in these:
        while first < len(those) and those[first][1] <= begin:
            first += 1
        for other in those[first:]:
            if other[0] >= end:
                break
            total += min(end, other[1]) - max(begin, other[0])
    return total


@dataclass
class Seen:
    """Activity of the device, in seconds: copies to the host, and kernels of the training. `kinds`: copies by name."""

    copies: list[Span]
    kernels: list[Span]
    kinds: dict[str, int]

    def hidden(self) -> dict[str, Any]:
        """Return the share of the copying time during which kernels ran."""
        copies, kernels = merged(self.copies), merged(self.kernels)
        whole = length(copies)
        share = shared(copies, kernels) / whole if whole else 0.0
        return {"share": share, "copying_s": whole, "computing_s": length(kernels), "kinds": self.kinds}


def recorded(trace: dict[str, Any]) -> Seen:
    """Read activity from a profiler trace, whose unit is a microsecond. Empty if it could not record the device."""
    seen = Seen([], [], {})
    for event in trace["traceEvents"]:
        kind, name = event.get("cat"), event.get("name", "")
        if kind not in ("gpu_memcpy", "kernel"):
            continue
        span = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        if kind == "kernel":
            seen.kernels.append(span)
        elif "DtoH" in name:
            seen.copies.append(span)
            seen.kinds[name] = seen.kinds.get(name, 0) + 1
    return seen


def profiled(work: Callable[[], None], keep: Path | None = None) -> Seen:
    """Profile the training. `keep`: file for the whole trace, for a viewer."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return recorded(json.loads(path.read_text()))


def by_events(work: Callable[[], None], training: Autocast) -> Seen:
    """Measure without a profiler: a step's forward and backward pass count as one kernel."""
    ticks: list[torch.cuda.Event] = []

    def tick() -> None:
        ticks.append(torch.cuda.Event(enable_timing=True))
        ticks[-1].record()

    step = training.step

    def ticked() -> None:
        tick()
        step()

    with marking() as marks:
        training.step, training.on_gradients = ticked, tick  # type: ignore[method-assign]
        try:
            work()
        finally:
            del training.step, training.on_gradients
        copies = marks.spans()
    at = [marks.at(one) for one in ticks]
    return Seen(copies, list(zip(at[::2], at[1::2], strict=True)), {})


# -- a folder --


class Watch:
    """Waits in a thread until a checkpoint is durable."""

    def __init__(self, save: ckpt.Save, started: float) -> None:
        self.took, self.ended = 0.0, threading.Event()
        self.error: BaseException | None = None
        self._save, self._started = save, started
        threading.Thread(target=self._run, name="bench-watch", daemon=True).start()

    def _run(self) -> None:
        try:
            self._save.wait_durable(LONGEST_S)
        except BaseException as error:
            self.error = error
        self.took = time.perf_counter() - self._started
        self.ended.set()


# -- results --


class Report:
    """Results as JSON lines for a file, and as a table for people."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines = path, list[str]()

    def say(self, kind: str, **what: Any) -> None:
        self._lines.append(json.dumps({"kind": kind, **what}))
        if self._path is not None:  # after each result, since the next one may fail
            self._path.write_text("\n".join(self._lines) + "\n")

    def row(self, name: str, value: str, note: str = "") -> None:
        print(f"{name:<46} {value:>24}  {note}".rstrip(), flush=True)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def gb_s(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def goal(name: str, value: float) -> str:
    limit = GOALS[name]
    return f"goal {limit:g}: met" if value <= limit else f"goal {limit:g}: MISSED"


def spread(seconds: list[float]) -> dict[str, float]:
    """Format the median, the 99th percentile and the maximum."""
    ordered = sorted(seconds)
    place = -(-99 * len(ordered) // 100) - 1
    return {"median_s": statistics.median(ordered), "p99_s": ordered[place], "most_s": ordered[-1]}


@dataclass
class Block:
    """Seconds of a step, of each call of step(), and of each call including the wait before the next update."""

    step_s: float
    blocked: list[float]
    waited: list[float]


@dataclass
class Bench:
    """One training and all its measurements. `last`: the number of the last saved step."""

    device: Device
    plan: Plan
    training: Autocast
    report: Report
    raw: float
    last: int = 0

    def __post_init__(self) -> None:
        self.state = {"model": self.training.model, "optim": self.training.optim, "rng": ckpt.RNG()}

    def next(self) -> int:
        self.last += 1
        return self.last

    def save(self, cp: ckpt.Checkpointer) -> ckpt.Save:
        """Save without a training step before it."""
        self.training.optim.zero_grad()  # else it looks like a step of gradient accumulation
        return cp.save(self.next())

    def in_memory(self, trace: Path | None) -> bool:
        """Measure copies, steps, the overlap, and restores from memory; return True if these are equal."""
        opened, cp = timed(lambda: ckpt.Checkpointer(self.state, options=ckpt.Options(name=f"bench-gpu-{os.getpid()}")))
        with cp:
            cp.restore(default=0)
            first, save = timed(lambda: self.save(cp))
            save.wait_staged(LONGEST_S)
            self.report.say("open", open_s=opened, first_save_s=first)
            self.report.row("opening; first save, which locks memory", f"{opened:.2f} s; {first:.2f} s")
            self.copies(cp)
            for name, read in (("free", False), ("read", True)):
                self.steps(cp, name, read=read)
            if self.device.is_gpu:
                self.overlap(cp, trace)
            else:
                self.report.say("overlap", left_out="no device to profile")
                self.report.row("overlap", "skipped: no device")
            self.save(cp).wait_staged(LONGEST_S)
            expected = self.training.digest()
            equal = [self.restored(cp, expected, "memory", "memory") for _ in range(3)]
        return all(equal)

    def in_folder(self, url: str) -> bool:
        """Measure durable saves, and restores from the folder alone; return True if these are equal."""
        with ckpt.Checkpointer(self.state, ckpt.Tier(url, every=DUE, keep=2)) as cp:
            cp.restore(default=0)
            self.save(cp).wait_durable(LONGEST_S)
            cycles = [self.cycle(cp) for _ in range(self.plan.cycles)]
            self.training.step()
            self.save(cp).wait_durable(LONGEST_S)
        self.report.say("durable", cycles=cycles)
        for name in ("blocks_s", "lost_s", "durable_s"):
            self.report.row(f"folder: {name[:-2]}", ms(statistics.median(one[name] for one in cycles)))
        expected = self.training.digest()
        with ckpt.Checkpointer(self.state, tier := ckpt.Tier(url, every=DUE, keep=2), memory=None) as cp:
            cold = "folder, cold" if drop_caches() else "folder, perhaps cached"
            equal = [self.restored(cp, expected, source, tier.url) for source in (cold, "folder, warm")]
        return all(equal)

    def copies(self, cp: ckpt.Checkpointer) -> None:
        """Measure the copy of a whole snapshot, from the start of its first copy to the end of its last, alone."""
        by_device, by_clock = [], []
        for _ in range(self.plan.repeats):
            self.training.step()
            self.device.settle()
            with marking() if self.device.is_gpu else contextlib.nullcontext() as marks:
                by_clock.append(timed(lambda: cp.save(self.next()).wait_staged(LONGEST_S))[0])
            if marks is not None:
                spans = marks.spans()
                by_device.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        rate = self.training.nbytes / statistics.median(by_device or by_clock)
        staged = statistics.median(by_clock)
        self.report.say("copies", raw_bytes_s=self.raw, ours_bytes_s=rate, staged_s=staged)
        self.report.row("copies: one pinned buffer", gb_s(self.raw))
        self.report.row("copies: a whole snapshot", f"{gb_s(rate)}, {rate / self.raw:.0%}")
        self.report.row("copies: call to staged, nothing else runs", ms(staged))

    def block(self, steps: int, cp: ckpt.Checkpointer | None, *, read: bool) -> Block:
        """Run this many steps, with or without saves. Wait for saves in progress before and after."""
        blocked: list[float] = []
        save: ckpt.Save | None = None
        before = len(cp.stats.stalls) if cp is not None else 0
        self.device.settle()
        started = time.perf_counter()
        for _ in range(steps):
            self.training.step()
            if read:
                self.training.loss.item()
                self.device.wait()
            if cp is not None:
                took, save = timed(lambda: cp.step(self.next()))
                blocked.append(took)
        self.device.wait()
        took = time.perf_counter() - started
        if save is not None:
            save.wait_staged(LONGEST_S)
        return Block(took / steps, blocked, list(cp.stats.stalls)[before:] if cp is not None else [])

    def steps(self, cp: ckpt.Checkpointer, name: str, *, read: bool) -> None:
        """Alternate blocks without and with saves."""
        self.block(self.plan.warm_up, cp, read=read)
        skipped = cp.stats.skipped
        without, saving = list[Block](), list[Block]()
        for _ in range(self.plan.pairs):
            without.append(self.block(self.plan.block, None, read=read))
            saving.append(self.block(self.plan.block, cp, read=read))
        ratios = [b.step_s / a.step_s for a, b in zip(without, saving, strict=True)]
        alone, beside = (statistics.median(one.step_s for one in side) for side in (without, saving))
        ratio, skipped = statistics.median(ratios), cp.stats.skipped - skipped
        blocks = spread([took for one in saving for took in one.blocked])
        waits = spread([took for one in saving for took in one.waited])
        saves = self.plan.block * self.plan.pairs
        self.report.say(
            "steps", loop=name, saves=saves, skipped=skipped, step_alone_s=alone, step_saving_s=beside, ratio=ratio,
            ratios=ratios, blocks=blocks, with_waits=waits, goals=GOALS,
        )  # fmt: skip
        row = self.report.row
        row(f"steps, {name}: alone; saving", f"{ms(alone)}; {ms(beside)}", f"{saves} saves, {skipped} skipped")
        row(f"steps, {name}: ratio", f"{ratio:.4f}", goal("ratio", ratio))
        row(f"steps, {name}: ratio, minimum and maximum", f"{min(ratios):.4f}; {max(ratios):.4f}")
        for key, title in (("median_s", "median"), ("p99_s", "99 %")):
            row(f"steps, {name}: step() blocks, {title}", ms(blocks[key]), goal(key, blocks[key]))
        row(f"steps, {name}: with waits, median; 99 %", f"{ms(waits['median_s'])}; {ms(waits['p99_s'])}")

    def overlap(self, cp: ckpt.Checkpointer, trace: Path | None) -> None:
        """Measure the share of copying time overlapped by kernels, for saved steps and for a save alone."""

        def train() -> None:
            for _ in range(self.plan.traced):
                self.training.step()
                cp.step(self.next())
            self.training.step()  # during which the last copy runs
            cp.wait(LONGEST_S)

        def alone() -> None:
            self.save(cp).wait_staged(LONGEST_S)

        train()
        for what, work, keep in (("training", train, trace), ("control, nothing else runs", alone, None)):
            seen, how = profiled(work, keep), "profiler"
            if not seen.copies:
                seen, how = by_events(work, self.training), "events"
            found = seen.hidden()
            self.report.say("overlap", of=what, by=how, copies=len(seen.copies), **found)
            self.report.row(f"overlap ({what})", f"{found['share']:.1%}", f"by {how}, {', '.join(found['kinds'])}")

    def cycle(self, cp: ckpt.Checkpointer) -> dict[str, float]:
        """Run quiet steps, one step that is also saved to the folder, and steps until two after that save ended."""
        usual = step_s(self.device, self.training, self.plan.quiet, each=True)
        self.last = (self.last // DUE + 1) * DUE
        started = time.perf_counter()
        blocked, save = timed(lambda: cp.step(self.last))
        assert save is not None
        watch, steps, after = Watch(save, started), 0, 0
        while after < 2:
            after += watch.ended.is_set()
            self.training.step()
            cp.step(self.next())
            self.device.wait()
            steps += 1
        took = time.perf_counter() - started
        if watch.error is not None:
            raise watch.error
        cp.wait(LONGEST_S)
        lost = took - steps * usual
        return {"blocks_s": blocked, "lost_s": lost, "durable_s": watch.took, "quiet_step_s": usual, "steps": steps}

    def restored(self, cp: ckpt.Checkpointer, expected: str, source: str, tier: str) -> bool:
        """Overwrite the state, restore it, and compare every bit."""
        self.training.spoil()
        spoilt = self.training.digest() != expected

        def restore() -> None:
            cp.restore()
            self.device.settle()

        took, _ = timed(restore)
        found = cp.last_restore
        right = spoilt and found is not None and found.tier == tier
        equal = right and self.training.digest() == expected
        self.report.say("restored", source=source, seconds=took, equal=equal)
        rate = gb_s(self.training.nbytes / took)
        self.report.row(f"restored from {source}", f"{took:.3f} s, {rate}", "equal" if equal else "DIFFERS")
        return equal


def run(device: Device, plan: Plan, report: Report, folder: Path, state_gib: float | None, trace: Path | None) -> bool:
    """Run all measurements; return True if everything restored is equal."""
    facts = device.facts()
    report.say("machine", **facts)
    report.row(f"{facts['device']}, driver {facts.get('driver', 'none')}", f"torch {facts['torch']}")
    raw = raw_rate(device, plan)
    training = fitting(device, raw, state_gib)
    tensors = training.tensors()
    report.say("model", state_bytes=training.nbytes, tensors=len(tensors), **asdict(training.size))
    report.row(f"state in {len(tensors)} tensors, batch of {training.size.batch}", f"{training.nbytes / 1e9:.2f} GB")
    del tensors
    bench = Bench(device, plan, training, report, raw)
    equal = [bench.in_memory(trace), bench.in_folder(str(folder / "run"))]
    return all(equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="few steps, to test the script; required on the CPU")
    parser.add_argument("--pairs", type=int, help="blocks of steps without saves, and as many with (default: 8)")
    parser.add_argument("--block", type=int, help="steps of a block (default: 25)")
    parser.add_argument("--state-gib", type=float, help="of weights and moments; by default what memory allows")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write all results there, one per line")
    parser.add_argument("--trace", type=Path, help="write the profiler's trace there, for a viewer")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures a CUDA device, and torch finds none here. `--device cpu --quick` tests the rest")
    if arguments.device == "cpu" and not arguments.quick:
        sys.exit("The CPU supports only --quick: `make bench` measures CPU training")
    device, plan = Device(arguments.device), QUICK if arguments.quick else FULL
    plan = replace(plan, pairs=arguments.pairs or plan.pairs, block=arguments.block or plan.block)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        state_gib = arguments.state_gib or (QUICK_GIB if arguments.quick else None)
        equal = run(device, plan, Report(arguments.json), Path(folder), state_gib, arguments.trace)
    if not equal:
        sys.exit("The restored state differs from the saved one")


if __name__ == "__main__":
    main()
