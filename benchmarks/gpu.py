"""What saving every step costs on a GPU, and whether the copy is hidden under training.

    make bench-gpu        or: python benchmarks/gpu.py [--json FILE] [--trace FILE] [--folder DIR]
    python benchmarks/gpu.py --device cpu --quick        all but the trace, on any machine, to try the program itself

One GPT (see `workload.py`), in bfloat16 by autocast with fused AdamW, as large as the card's and the host's memory
allow, with a batch that makes a step last 100 ms at least, and twice as long as copying its state takes.

- *copies*: how fast one large pinned buffer is filled by the device, and how fast a whole snapshot is, by events on the
  stream that copies.
- *steps*: blocks of 25 with a save after each step and without, in turn, so that drift hits both. `free`: nothing in
  the loop waits for the device, so the host runs ahead of it. `read`: the loss is read after each step, so that the
  device has nothing to do while step() blocks. `blocks`: how long step() takes; `with waits`: and what the host waits
  before updates.
- *overlap*: the share of the time spent copying to the host during which kernels ran, by the profiler's records of the
  device; by events on both streams where there are none. The same figure of a save while nothing else runs is a
  control: it has to be next to nothing.
- *durable*: a save to memory and to a folder; `lost` is what it and all steps until two after its end took beyond as
  many steps with nothing in flight.
- *restores*: into the live tensors, of a state that was overwritten before; equal only if each bit is.

Ends with status 1 if anything that was restored differs.
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
Span = tuple[float, float]  # from when to when, in one clock

LEAST_STEP_S = 0.1
COPY_SHARE = 0.5  # of a step, that copying its state may take at the most
CARD_SHARE = 1 / 16  # of the card's memory, for the state: activations take most of the rest
HOST_SHARE = 1 / 12  # of the memory that is available: four slots take a third of it
PER_PARAM = 12  # bytes of state: a weight and two moments
GOALS = {"ratio": 1.01, "median_s": 0.003, "p99_s": 0.010}
DUE = 1000  # steps between durable saves; the steps between two cycles are not run
LONGEST_S = 300.0
QUICK_GIB = 0.75


@dataclass(frozen=True)
class Plan:
    """How much of everything is done."""

    block: int = 25  # steps
    pairs: int = 8  # of blocks without and with saves
    warm_up: int = 5
    raw_bytes: int = 1 << 30
    repeats: int = 10
    traced: int = 6  # steps
    quiet: int = 8  # steps of a cycle of durable saves with nothing in flight
    cycles: int = 3


FULL = Plan()
QUICK = Plan(block=5, pairs=2, warm_up=1, raw_bytes=32 << 20, repeats=3, traced=2, quiet=3, cycles=2)


class Device:
    """The few things that differ between a card and the CPU."""

    def __init__(self, kind: str) -> None:
        self.kind, self.is_gpu = kind, kind == "cuda"

    def wait(self) -> None:
        """Until the training's kernels have ended; copies on other streams may go on."""
        if self.is_gpu:
            torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        """Until nothing runs any more."""
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
    """What nvidia-smi says of the first card."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return "unknown"


def available_bytes() -> int:
    """Of the host's memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what came of it."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def drop_caches() -> bool:
    """So that files are read from the disk; whether we may."""
    command = ["sh", "-c", "sync; echo 1 > /proc/sys/vm/drop_caches"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


# -- what is trained --


class Autocast(Training):
    """The workload as it is trained on a card: bfloat16 by autocast, batches made where they are used."""

    device = "cpu"
    loss: Tensor

    @classmethod
    def of(cls, size: Size, device: str, seed: int = 0) -> Autocast:
        torch.set_num_threads(THREADS)
        torch.manual_seed(seed)
        with torch.device(device):  # a large model is made faster there
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
        """Of every bit of the state; of several GB, within a second."""
        found = xxhash.xxh3_128()
        for tensor in self.tensors():
            found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def on_gradients(self) -> None:
        """Nothing, unless somebody looks."""

    def enlarge(self, batch: int) -> None:
        """Train with this batch from now on."""
        self.size = replace(self.size, batch=batch)
        self.batches = batches(self.size, batch, self.device)


def batches(size: Size, seed: int, device: str) -> Iterator[Tensor]:
    """Without a copy from the host, which would have the host wait for the device."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = size.batch, size.context + 1
    while True:
        yield torch.randint(size.vocabulary, shape, generator=generator, device=device)


def chosen(state_bytes: float) -> Size:
    """A GPT with about so many bytes of state, in tensors of the usual sizes."""
    width, vocabulary, context = 1024, 32768, 1024
    layers = (state_bytes / PER_PARAM - (vocabulary + context) * width) / (12 * width * width)
    return Size(max(2, round(layers)), width, width // 64, vocabulary, context, batch=1)


def fitting(device: Device, raw_rate: float, state_gib: float | None) -> Autocast:
    """The largest state that both memories allow, and a batch for steps that are long enough."""
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
    """Whether the card's memory is enough for a step with this batch, which is the training's from now on."""
    training.enlarge(batch)
    try:
        training.step()
        device.settle()
    except torch.OutOfMemoryError:
        return False
    return True


def step_s(device: Device, training: Training, count: int = 4, *, each: bool = False) -> float:
    """Seconds of a step with nothing beside it. `each`: the device is waited for after each of them."""
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
    """Bytes a second from the device into one large page-locked buffer; on the CPU, of a plain copy."""
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
    """Events around all that a Checkpointer puts on its copying streams."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.origin = torch.cuda.Event(enable_timing=True)
        self.origin.record()

    def at(self, event: torch.cuda.Event) -> float:
        """When it came, in seconds since these began."""
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


# -- is the copy hidden? --


def merged(spans: list[Span]) -> list[Span]:
    """The same time in spans that neither touch nor overlap, ascending."""
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
    """How long both went on; each of them merged."""
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
    """What the device did, in seconds: copies to the host, and kernels of the training. `kinds`: copies by name."""

    copies: list[Span]
    kernels: list[Span]
    kinds: dict[str, int]

    def hidden(self) -> dict[str, Any]:
        """The share of the copying during which kernels ran."""
        copies, kernels = merged(self.copies), merged(self.kernels)
        whole = length(copies)
        share = shared(copies, kernels) / whole if whole else 0.0
        return {"share": share, "copying_s": whole, "computing_s": length(kernels), "kinds": self.kinds}


def recorded(trace: dict[str, Any]) -> Seen:
    """From a trace of the profiler, whose unit is a microsecond. Empty if it could not look at the device."""
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
    """`keep`: where the whole trace is written, for a viewer."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return recorded(json.loads(path.read_text()))


def by_events(work: Callable[[], None], training: Autocast) -> Seen:
    """Without a profiler: a step's forward and backward count as one kernel."""
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
    """Waits in a thread for a checkpoint to be durable."""

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


# -- what is found --


class Report:
    """Lines of JSON for a file, and a table for a person."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines = path, list[str]()

    def say(self, kind: str, **what: Any) -> None:
        self._lines.append(json.dumps({"kind": kind, **what}))
        if self._path is not None:  # after each finding: the next one may fail
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
    """The median, what one in a hundred is longer than, and the longest."""
    ordered = sorted(seconds)
    place = -(-99 * len(ordered) // 100) - 1
    return {"median_s": statistics.median(ordered), "p99_s": ordered[place], "most_s": ordered[-1]}


@dataclass
class Block:
    """Seconds: of a step, of each call of step(), and of each with the wait before the next update."""

    step_s: float
    blocked: list[float]
    waited: list[float]


@dataclass
class Bench:
    """One training, and all that is measured of it. `last`: the number of the last step that was saved."""

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
        """Without a step of training before it."""
        self.training.optim.zero_grad()  # else it looks like the middle of gradient accumulation
        return cp.save(self.next())

    def in_memory(self, trace: Path | None) -> bool:
        """Copies, steps, the overlap, and restores from memory; whether these are equal."""
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
                self.report.say("overlap", left_out="there is no device to look at")
                self.report.row("overlap", "left out: no device")
            self.save(cp).wait_staged(LONGEST_S)
            expected = self.training.digest()
            equal = [self.restored(cp, expected, "memory", "memory") for _ in range(3)]
        return all(equal)

    def in_folder(self, url: str) -> bool:
        """Durable saves, and restores from the folder alone; whether these are equal."""
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
        """Of a whole snapshot, from the beginning of its first copy to the end of its last; nothing else runs."""
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
        """So many steps, with saves or without. What was in flight before has ended, and so has ours afterwards."""
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
        """Blocks without and with saves, in turn."""
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
        row(f"steps, {name}: ratio, least and most", f"{min(ratios):.4f}; {max(ratios):.4f}")
        for key, title in (("median_s", "median"), ("p99_s", "99 %")):
            row(f"steps, {name}: step() blocks, {title}", ms(blocks[key]), goal(key, blocks[key]))
        row(f"steps, {name}: with waits, median; 99 %", f"{ms(waits['median_s'])}; {ms(waits['p99_s'])}")

    def overlap(self, cp: ckpt.Checkpointer, trace: Path | None) -> None:
        """The share of copying that is hidden under kernels, of steps that are saved and of a save by itself."""

        def train() -> None:
            for _ in range(self.plan.traced):
                self.training.step()
                cp.step(self.next())
            self.training.step()  # under which the last copy goes
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
        """Quiet steps, one that goes to the folder as well, and steps until two after that is complete."""
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
        """Overwrite the state, restore it, and look at every bit."""
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
    """Everything in turn; whether all that was restored is equal."""
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
    parser.add_argument("--quick", action="store_true", help="few steps, to try the program; the CPU's only choice")
    parser.add_argument("--pairs", type=int, help="blocks of steps without saves, and as many with (default: 8)")
    parser.add_argument("--block", type=int, help="steps of a block (default: 25)")
    parser.add_argument("--state-gib", type=float, help="of weights and moments; by default what memory allows")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write all findings there, one a line")
    parser.add_argument("--trace", type=Path, help="write the profiler's trace there, for a viewer")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "This measures a CUDA device, and torch finds none here. `--device cpu --quick` tries all the rest of it"
        )
    if arguments.device == "cpu" and not arguments.quick:
        sys.exit("On the CPU only --quick makes sense: figures of CPU training are made by `make bench`")
    device, plan = Device(arguments.device), QUICK if arguments.quick else FULL
    plan = replace(plan, pairs=arguments.pairs or plan.pairs, block=arguments.block or plan.block)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        state_gib = arguments.state_gib or (QUICK_GIB if arguments.quick else None)
        equal = run(device, plan, Report(arguments.json), Path(folder), state_gib, arguments.trace)
    if not equal:
        sys.exit("What was restored is not what was saved")


if __name__ == "__main__":
    main()
