"""The value of compression and increments, on states of real trainings, compared with zstd, blosc2 and ZipNN.

    make bench-codecs     or: python benchmarks/codecs.py [--quick] [--part 1 2 3 4] [--states DIR] [--json FILE]

The states (benchmarks/states.py) are trained first, for a few minutes, and kept in DIR if it is given: 4 GB. The
benchmark needs another 3 GB of disk and 5 GB of memory.

  1  whole states by tensor class: bytes stored / bytes, and GB/s per core
  2  increments with a base that is 1, 10 and 100 steps older, by the codec alone
  3  the same through a Checkpointer and a folder: bytes of data files, and restore times of full and increment
  4  training time that a save takes, with and without compression

Ratios are exact, and everything encoded is decoded and compared. Tensors are cut into chunks of at most 4 MiB, as the
library does. "entropy" is the minimum for a coder that encodes every byte of a chunk's planes separately (order 0;
planes of the words, or of their XOR with the base's words): repetitions allow less. Speeds are GB of raw bytes per CPU
second on one pinned core, with alternating contenders; they depend on the machine more than their ratios do. ZipNN
changes its input, so it gets a copy, which is not measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import zstandard
from rich.console import Console
from rich.table import Table

import ckpt
import files_of_run
import states
from ckpt.core.format import codec
from ckpt.core.format.layout import CHUNK
from ckpt.core.state.tensors import DTYPE_NAME
from states import LAGS, Size, Tensors

Json = dict[str, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MIB = 1 << 20
WHOLE_SHARE = 0.9  # a delta larger than this share of the whole form is not worth a base
LIMIT_S = 300.0  # for one save
NEVER = 1_000_000  # steps
FULL_ONES = 2  # the first checkpoints of a run are always full
OURS, ZIPNN, BLOSC = "everystep", "ZipNN", "blosc2 zstd 1"


@dataclass(frozen=True)
class Plan:
    """`timed_mib`: maximum of a class; `rounds`: of timing; `copies`: of a state, to make restores long enough.

    `restores`: of each kind; `windows`: of training for each way to save; `periods`: in one, of two times `half` steps.
    """

    size: Size
    kinds: tuple[str, ...]
    timed_mib: int
    rounds: int
    copies: int
    restores: int
    windows: int
    periods: int
    half: int


FULL = Plan(
    states.FULL, tuple(states.KINDS), timed_mib=32, rounds=7, copies=4, restores=7, windows=4, periods=4, half=10
)
QUICK = Plan(
    states.QUICK,
    ("adamw", "mixed", "lora", "sparse"),
    timed_mib=4,
    rounds=9,
    copies=2,
    restores=3,
    windows=2,
    periods=2,
    half=15,
)
GOALS = {
    "full": {"adamw": 0.84},
    "increments": {"sparse": (0.01, 0.05, 0.2)},
    "of_changed": {"lora": 1.05},
    "restore of a full one's": 1.7,
}
TIMED = (
    ("adamw", "w F32"), ("adamw", "exp_avg F32"), ("adamw", "exp_avg_sq F32"), ("mixed", "w BF16"), ("half", "w F16"),
    ("sparse", "w F32"),
)  # fmt: skip
RESTORED = ("adamw", "mixed")


# -- chunks --


@dataclass(frozen=True)
class Chunk:
    plain: Bytes
    dtype: str

    @property
    def word(self) -> int:
        return codec.word_of(self.dtype)

    @cached_property
    def size(self) -> int:
        return len(self.plain)


Chunks = dict[str, list[Chunk]]  # by the tensor's name


def raw_of(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def cut(tensors: Tensors) -> Chunks:
    """Cut as the library does: at tensor boundaries, into chunks of at most 4 MiB."""
    found = {}
    for name, tensor in tensors.items():
        raw, dtype = raw_of(tensor), DTYPE_NAME[tensor.dtype]
        found[name] = [Chunk(raw[at : at + CHUNK], dtype) for at in range(0, len(raw), CHUNK)]
    return found


def class_of(name: str, chunks: list[Chunk]) -> str:
    return f"{name.partition('/')[0]} {chunks[0].dtype}"


def by_class(chunks: Chunks) -> dict[str, list[Chunk]]:
    found = defaultdict(list)
    for name, some in chunks.items():
        found[class_of(name, some)] += some
    return dict(found)


def size_of(chunks: Chunks) -> int:
    return sum(b.size for some in chunks.values() for b in some)


def entropy_of(plain: Bytes, word: int) -> float:
    """Return the bytes if every byte of each plane is coded separately, with the best code for that plane."""
    total = 0.0
    for plane in plain.reshape(-1, word).T:
        shares = np.bincount(plane, minlength=256) / max(1, len(plane))
        total -= float((shares[shares > 0] * np.log2(shares[shares > 0])).sum()) * len(plane) / 8
    return total


# -- contenders --


class Ours:
    """Encodes with ckpt.core.format.codec, without a base or with those in `bases`."""

    def __init__(self, bases: dict[int, Chunk] | None = None) -> None:
        self.bases = bases

    def base(self, chunk: Chunk) -> Bytes | None:
        return None if self.bases is None else self.bases[id(chunk)].plain

    @property
    def id(self) -> int:
        return codec.PLANES if self.bases is None else codec.DELTA

    def prepare(self, chunk: Chunk) -> Any:
        return chunk.plain

    def compress(self, chunk: Chunk, given: Any) -> bytes:
        return codec.encode(self.id, given, chunk.word, self.base(chunk))

    def decompress(self, chunk: Chunk, stored: bytes, into: bytearray) -> Any:
        codec.decode(self.id, stored, chunk.size, self.base(chunk), memoryview(into))
        return into


class Zstd:
    def __init__(self, level: int) -> None:
        self.compressor, self.reader = zstandard.ZstdCompressor(level), zstandard.ZstdDecompressor()

    def prepare(self, chunk: Chunk) -> Any:
        return chunk.plain

    def compress(self, chunk: Chunk, given: Any) -> bytes:
        return self.compressor.compress(given)

    def decompress(self, chunk: Chunk, stored: bytes, into: bytearray) -> Any:
        return self.reader.decompress(stored)


class Blosc:
    def __init__(self) -> None:
        self.blosc2 = importlib.import_module("blosc2")
        self.blosc2.set_nthreads(1)

    def prepare(self, chunk: Chunk) -> Any:
        return chunk.plain

    def compress(self, chunk: Chunk, given: Any) -> bytes:
        b = self.blosc2
        found: bytes = b.compress(given, typesize=chunk.word, clevel=1, filter=b.Filter.SHUFFLE, codec=b.Codec.ZSTD)
        return found

    def decompress(self, chunk: Chunk, stored: bytes, into: bytearray) -> Any:
        self.blosc2.decompress(stored, dst=into)
        return into


class Zip:
    NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # noqa: RUF012

    def __init__(self) -> None:
        make = importlib.import_module("zipnn").ZipNN
        self.by_dtype = {d: make(bytearray_dtype=name, threads=1) for d, name in self.NAMES.items()}

    def prepare(self, chunk: Chunk) -> Any:
        return bytearray(chunk.plain)  # it overwrites its input

    def compress(self, chunk: Chunk, given: Any) -> bytes:
        found: bytes = self.by_dtype[chunk.dtype].compress(given)
        return found

    def decompress(self, chunk: Chunk, stored: bytes, into: bytearray) -> Any:
        return self.by_dtype[chunk.dtype].decompress(stored)


MAKERS: dict[str, Callable[[], Any]] = {
    OURS: Ours,
    ZIPNN: Zip,
    BLOSC: Blosc,
    "zstd 1": lambda: Zstd(1),
    "zstd 3": lambda: Zstd(3),
}


def contenders() -> dict[str, Any]:
    """Return the contenders that are installed."""
    found = {}
    for name, make in MAKERS.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name} is skipped: {error}")
    return found


def stored_size(who: Any, chunk: Chunk) -> int:
    """Return the stored bytes, raw if that is less. Check that decompression restores the original."""
    stored = who.compress(chunk, who.prepare(chunk))
    found = who.decompress(chunk, stored, bytearray(chunk.size))
    if bytes(found) != chunk.plain.tobytes():
        raise AssertionError(f"{type(who).__name__} changed a chunk of {chunk.dtype}")
    return min(len(stored), chunk.size)


@contextmanager
def pinned() -> Iterator[None]:
    """Run on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def speeds(whos: dict[str, Any], chunks: list[Chunk], rounds: int) -> dict[str, Json]:
    """Return GB of raw bytes per CPU second. All contenders compress and decompress the same chunks, alternating."""
    taken: dict[str, dict[str, list[float]]] = {name: {"compress": [], "decompress": []} for name in whos}
    total, order = sum(b.size for b in chunks), list(whos)
    for turn in range(rounds + 1):  # the first one warms up
        for name in order:
            who, times = whos[name], {"compress": 0.0, "decompress": 0.0}
            for chunk in chunks:
                given, into = who.prepare(chunk), bytearray(chunk.size)
                began = time.process_time()
                stored = who.compress(chunk, given)
                times["compress"] += time.process_time() - began
                began = time.process_time()
                who.decompress(chunk, stored, into)
                times["decompress"] += time.process_time() - began
            for what, seconds in times.items() if turn else ():
                taken[name][what].append(seconds)
        order = order[1:] + order[:1]
    return {
        name: {what: total / 1e9 / statistics.median(some) for what, some in times.items()}
        for name, times in taken.items()
    }


# -- part 1: whole states --


def sizes(whos: dict[str, Any], chunks: list[Chunk]) -> Json:
    raw = sum(b.size for b in chunks)
    found: Json = {"mib": raw / MIB, "entropy": sum(entropy_of(b.plain, b.word) for b in chunks) / raw}
    return found | {name: sum(stored_size(who, b) for b in chunks) / raw for name, who in whos.items()}


def whole_states(plan: Plan, folder: Path, whos: dict[str, Any]) -> Json:
    """Return ratios by state and class; "state" is the total."""
    found: Json = {}
    for kind in plan.kinds:
        chunks = cut(states.snapshot(folder, plan.size, kind, 0))
        classes = {label: sizes(whos, some) for label, some in by_class(chunks).items()}
        mib = sum(f["mib"] for f in classes.values())
        state: Json = {"mib": mib}
        for column in ("entropy", *whos):
            state[column] = sum(f[column] * f["mib"] for f in classes.values()) / mib
        found[kind] = {"classes": classes, "state": state}
    return found


def timed_chunks(plan: Plan, folder: Path) -> Iterator[tuple[str, list[Chunk]]]:
    for kind, label in TIMED:
        if kind in plan.kinds:
            some = by_class(cut(states.snapshot(folder, plan.size, kind, 0)))[label]
            some = sorted(some, key=lambda b: -b.size)
            taken, room = [], plan.timed_mib * MIB
            while some and (not taken or some[0].size <= room) and room > 0:
                taken.append(some.pop(0))
                room -= taken[-1].size
            yield f"{kind}: {label}", taken


def whole_speeds(plan: Plan, folder: Path, whos: dict[str, Any]) -> Json:
    return {label: speeds(whos, chunks, plan.rounds) for label, chunks in timed_chunks(plan, folder)}


# -- part 2: increments --


@dataclass
class Tally:
    """Bytes of a class at one lag."""

    raw: int = 0
    unchanged: int = 0
    entropy: float = 0.0
    delta: int = 0
    whole: int = 0
    chosen: int = 0  # by the actual sizes
    estimated: int = 0  # by the estimate from samples


def weigh(tally: Tally, chunk: Chunk, base: Chunk | None) -> None:
    """Add a chunk to the tally. `base`: None for a tensor that was created later."""
    tally.raw += chunk.size
    if base is None:
        whole = stored_size(Ours(), chunk)
        for name in ("entropy", "delta", "whole", "chosen", "estimated"):
            setattr(tally, name, getattr(tally, name) + whole)
        return
    if np.array_equal(chunk.plain, base.plain):
        tally.unchanged += chunk.size
        return
    word = chunk.word
    delta, whole = stored_size(Ours({id(chunk): base}), chunk), stored_size(Ours(), chunk)
    tally.entropy += entropy_of(chunk.plain ^ base.plain, word)
    tally.delta += delta
    tally.whole += whole
    tally.chosen += delta if delta < WHOLE_SHARE * whole else whole
    ratio = codec.estimate(codec.DELTA, chunk.plain, word, base.plain)
    seems = ratio < WHOLE_SHARE * min(1.0, codec.estimate(codec.PLANES, chunk.plain, word))
    tally.estimated += delta if seems else whole


def increment(base: Chunks, now: Chunks) -> dict[str, Tally]:
    """Return the sizes of each class at a lag, and the result of choosing between delta and whole form."""
    found: dict[str, Tally] = defaultdict(Tally)
    for name, some in now.items():
        for i, chunk in enumerate(some):
            older = base[name][i] if name in base else None
            weigh(found[class_of(name, some)], chunk, older)
    return dict(found)


def told(tally: Tally) -> Json:
    changed = max(1, tally.raw - tally.unchanged)
    return {
        "mib": tally.raw / MIB,
        "unchanged": tally.unchanged / tally.raw,
        "entropy": tally.entropy / tally.raw,
        "delta": tally.delta / tally.raw,
        "chosen": tally.chosen / tally.raw,
        "estimated": tally.estimated / tally.raw,
        "of_changed": tally.chosen / changed,
    }


def increments(plan: Plan, folder: Path) -> Json:
    found: Json = {}
    for kind in plan.kinds:
        base = cut(states.snapshot(folder, plan.size, kind, 0))
        found[kind] = {}
        for lag in LAGS:
            classes = increment(base, cut(states.snapshot(folder, plan.size, kind, lag)))
            whole = Tally(*(sum(getattr(t, f) for t in classes.values()) for f in asdict(Tally())))
            found[kind][lag] = {"state": told(whole), "classes": {label: told(t) for label, t in classes.items()}}
    return found


def delta_speeds(plan: Plan, folder: Path) -> Json:
    """Return everystep's speeds only: the others have no deltas."""
    found = {}
    for kind, label in TIMED:
        if kind not in plan.kinds:
            continue
        for lag in (LAGS[0], LAGS[-1]):
            older, newer = (by_class(cut(states.snapshot(folder, plan.size, kind, n)))[label] for n in (0, lag))
            pairs = sorted(zip(newer, older, strict=True), key=lambda pair: -pair[0].size)
            pairs = pairs[: max(1, plan.timed_mib * MIB // pairs[0][0].size)]
            who = Ours({id(new): old for new, old in pairs})
            found[f"{kind}: {label}, lag {lag}"] = speeds({OURS: who}, [new for new, _ in pairs], plan.rounds)[OURS]
    return found


# -- part 3: through the library --


class Live:
    """Tensors that take the values of one snapshot after the other, like a training state."""

    def __init__(self, tensors: Tensors, copies: int = 1) -> None:
        self.state: dict[str, Any] = {}
        self.live: dict[str, list[torch.Tensor]] = defaultdict(list)
        for i in range(copies):
            for name, tensor in tensors.items():
                label, _, parameter = name.partition("/")
                one = self.state.setdefault(f"{label}{i}" if copies > 1 else label, {})[parameter] = tensor.clone()
                self.live[name].append(one)

    def become(self, tensors: Tensors) -> None:
        for name, some in self.live.items():
            for one in some:
                one.copy_(tensors[name])

    def forget(self) -> None:
        for some in self.live.values():
            for one in some:
                one.zero_()

    def holds(self, tensors: Tensors) -> bool:
        """Return True if all bits are equal, NaNs included."""
        return all(
            torch.equal(one.view(torch.uint8), tensors[name].view(torch.uint8))
            for name, some in self.live.items()
            for one in some
        )

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for some in self.live.values() for one in some)


def tier(folder: Path, compression: str, *, incremental: bool, every: int = NEVER) -> ckpt.Tier:
    return ckpt.Tier(
        str(folder), every=every, keep=ckpt.Keep(last=100), compression=compression, full_every=10 if incremental else 1
    )


@contextmanager
def opened(state: Json, tiers: list[Any], memory: ckpt.Memory | None = None) -> Iterator[ckpt.Checkpointer]:
    with ckpt.Checkpointer(state, tiers, memory=memory, triggers=[]) as cp:
        yield cp
    del cp
    gc.collect()  # frees the memory of snapshots: that of dozens would not fit


def save(cp: ckpt.Checkpointer, step: int, folder: Path) -> Json:
    began = time.perf_counter()
    checkpoint = cp.save(step).wait_durable(LIMIT_S).id
    return {
        "seconds": time.perf_counter() - began,
        "files": files_of_run.size(folder, files_of_run.DATA, of=checkpoint),
    }


def changed_bytes(base: Tensors, now: Tensors) -> int:
    return sum(t.nbytes for name, t in now.items() if name not in base or not torch.equal(base[name], t))


def common(base: Tensors, now: Tensors) -> Tensors:
    """Skip moments that were created after the base step: the tensors of a Checkpointer must exist from the start."""
    return {name: t for name, t in now.items() if name in base}


def saved(plan: Plan, folder: Path, scratch: Path) -> Json:
    """Return bytes of data files of a full checkpoint and the following increments, and if each restored correctly."""
    found: Json = {}
    for kind in plan.kinds:
        base = states.snapshot(folder, plan.size, kind, 0)
        shots = {0: base} | {n: common(base, states.snapshot(folder, plan.size, kind, n)) for n in LAGS}
        live, place = Live(base), scratch / "saved"
        by_lag: dict[int, Json] = {}
        with opened(live.state, [tier(place, "zstd", incremental=True)]) as cp:
            cp.restore(default=0)
            cp.save(FULL_ONES - 1).wait_durable(LIMIT_S)
            for lag, tensors in shots.items():
                live.become(tensors)
                by_lag[lag] = save(cp, FULL_ONES + lag, place)
                by_lag[lag]["ratio"] = by_lag[lag]["files"] / live.nbytes
                if lag:
                    by_lag[lag]["of_changed"] = by_lag[lag]["files"] / max(1, changed_bytes(base, tensors))
        for lag, tensors in shots.items():
            loaded = ckpt.load(str(place), step=FULL_ONES + lag)
            by_lag[lag]["right"] = all(
                torch.equal(loaded[name.replace("/", ".", 1)].view(torch.uint8), t.view(torch.uint8))
                for name, t in tensors.items()
            )
        with opened(live.state, [tier(place, "zstd", incremental=True)]) as cp:
            live.forget()
            cp.restore()
            by_lag[LAGS[-1]]["right"] &= live.holds(shots[LAGS[-1]])
        found[kind] = by_lag
        shutil.rmtree(place)
    return found


def drop_caches() -> bool:
    """Drop caches, and return True if the next reads come from disk."""
    done = subprocess.run(["sh", "-c", "sync; echo 1 > /proc/sys/vm/drop_caches"], stderr=subprocess.DEVNULL)
    return done.returncode == 0


def restored(plan: Plan, folder: Path, scratch: Path) -> Json:
    """Measure restore(): full checkpoints without and with compression, and increments, alternating."""
    found: Json = {"cold": drop_caches()}
    for kind in (kind for kind in RESTORED if kind in plan.kinds):
        base = states.snapshot(folder, plan.size, kind, 0)
        live, seconds, right = Live(base, plan.copies), defaultdict[str, list[float]](list), True
        ways: dict[str, tuple[ckpt.Tier, Tensors]] = {}
        for name, compression, lag in (
            ("full, raw", "none", LAGS[-1]),
            ("full", "zstd", LAGS[-1]),
            *((f"increment, lag {lag}", "zstd", lag) for lag in LAGS),
        ):
            incremental = name.startswith("increment")
            place = tier(scratch / f"{kind}-{name.replace(' ', '')}", compression, incremental=incremental)
            ways[name] = place, states.snapshot(folder, plan.size, kind, lag)
            with opened(live.state, [place]) as cp:
                cp.restore(default=0)
                live.become(base)
                for step in range(1, FULL_ONES + 1) if incremental else ():
                    cp.save(step).wait_durable(LIMIT_S)
                live.become(ways[name][1])
                cp.save(FULL_ONES + lag).wait_durable(LIMIT_S)
        for _ in range(plan.restores):
            for name, (place, tensors) in ways.items():
                with opened(live.state, [place]) as cp:
                    live.forget()
                    drop_caches()
                    began = time.perf_counter()
                    cp.restore()
                    seconds[name].append(time.perf_counter() - began)
                    right &= live.holds(tensors)
        found[kind] = {"mib": live.nbytes / MIB, "seconds": dict(seconds), "right": right}
        for place, _ in ways.values():
            shutil.rmtree(Path(place.url.removeprefix("file://")))
    return found


# -- part 4: training time lost --


WAYS = {
    "no saves": ("none", False),
    "none": ("none", False),
    "auto": ("auto", False),
    "auto, incremental": ("auto", True),
    "zstd": ("zstd", False),
}


def window(training: states.Training, way: str, plan: Plan, place: Path) -> Json:
    """Measure periods that begin with a save: seconds of the first half minus those of the second half.

    The write should end in the first half; `late` counts those that did not. `writer_s`: CPU seconds of the writer
    per period. Training may have to wait for this work, and it is less noisy than times.
    """
    compression, incremental = WAYS[way]
    period, lost, files, late = 2 * plan.half, list[float](), list[int](), 0
    state = {"model": training.model, "optim": training.optimizers[0]}
    every = NEVER if way == "no saves" else period
    tiers = [tier(place, compression, incremental=incremental, every=every)]
    with opened(state, tiers, ckpt.Memory(keep=2, every=every)) as cp:
        cp.restore(default=0)
        for step in range(1, FULL_ONES + 1):
            cp.save(step).wait_durable(LIMIT_S)  # memory is ready from here on, and there is a base
        time.sleep(1.0)  # let the following cleanup end
        first, writers = len(cp.stats.stalls), {psutil.Process(cp.writer_pid)}
        before = cpu_of(writers)
        for start in range(period, period * (plan.periods + 1), period):
            with_save, one = half(training, cp, start, plan.half)
            late += one is not None and one.status != "durable"
            lost.append(with_save - half(training, cp, start + plan.half, plan.half)[0])
            files.append(
                files_of_run.size(place, files_of_run.DATA, of=one.wait_durable(LIMIT_S).id) if one is not None else 0
            )
        stalls, writer_s = list(cp.stats.stalls)[first:] or [0.0], (cpu_of(writers) - before) / plan.periods
    return {"lost_s": lost, "stall_s": stalls, "files": files, "late": late, "writer_s": [writer_s]}


def cpu_of(processes: set[psutil.Process]) -> float:
    return sum(t.user + t.system for t in (process.cpu_times() for process in processes))


def half(training: states.Training, cp: ckpt.Checkpointer, start: int, steps: int) -> tuple[float, Any]:
    """Return the seconds of this many steps from number `start` on, and the save of the first one, if scheduled."""
    began, saves = time.perf_counter(), []
    for step in range(start, start + steps):
        training.step()
        saves.append(cp.step(step))
    return time.perf_counter() - began, saves[0]


def training_lost(plan: Plan, scratch: Path) -> Json:
    """Measure windows of each way in random order, so that a drift of the machine affects all."""
    torch.manual_seed(0)
    size_of_it = replace(plan.size, batch=plan.size.batch // 2)  # short steps make saves more visible
    training = states.Training(size_of_it, states.Gpt(size_of_it), states.adamw(size_of_it))
    for _ in range(10):
        training.step()
    size = sum(t.nbytes for t in training.tensors().values())
    all_of: dict[str, list[Json]] = defaultdict(list)
    chance = random.Random(0)
    for turn in range(plan.windows):
        for way in chance.sample(list(WAYS), len(WAYS)):
            all_of[way].append(window(training, way, plan, scratch / f"lost-{turn}"))
            shutil.rmtree(scratch / f"lost-{turn}")
    found = {}
    for way in WAYS:
        lost, stalls, files, writer = (
            [n for one in all_of[way] for n in one[key]] for key in ("lost_s", "stall_s", "files", "writer_s")
        )
        found[way] = {
            "lost_s": lost,
            "stall_s": statistics.median(stalls),
            "ratio": statistics.median(files) / size,
            "writer_s": statistics.median(writer),
            "late": sum(one["late"] for one in all_of[way]),
        }
    return found


# -- tables --


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def ratio(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def goal(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def show_whole(found: Json) -> None:
    columns = ["entropy", *(name for name in MAKERS if name in next(iter(found.values()))["state"])]
    rows = []
    for kind, f in found.items():
        for label, one in f["classes"].items():
            rows.append([f"{kind}: {label}", f"{one['mib']:.1f}", *(ratio(one[c]) for c in columns), ""])
        state = f["state"]
        line = [f"{kind}: state", f"{state['mib']:.1f}", *(ratio(state[c]) for c in columns)]
        rows.append([*line, goal(GOALS["full"].get(kind))])
    show("Full: bytes stored / bytes", ["", "MiB", *columns, "goal"], rows)


def show_speeds(found: Json) -> None:
    if not found:
        return
    names = list(next(iter(found.values())))
    for what in ("compress", "decompress"):
        rows = []
        for label, by in found.items():
            line = [label, *(ratio(by[name][what], 2) for name in names)]
            rows.append([*line, ratio(by[OURS][what] / by[ZIPNN][what], 2) if ZIPNN in by else ""])
        show(f"{what}: GB/s of one core", ["", *names, "ours / ZipNN's"], rows)


def show_increments(found: Json) -> None:
    rows, states_rows = [], []
    for kind, by_lag in found.items():
        for label in by_lag[LAGS[0]]["classes"]:
            cells = [by_lag[lag]["classes"][label] for lag in LAGS if label in by_lag[lag]["classes"]]
            told = [f"{c['delta']:.4f} ({c['entropy']:.3f})" for c in cells]
            rows.append([f"{kind}: {label}", *told, *(ratio(c["unchanged"], 2) for c in cells)])
        goals = GOALS["increments"].get(kind, (None,) * len(LAGS))
        line = [kind]
        for lag, wanted in zip(LAGS, goals, strict=True):
            line += [ratio(by_lag[lag]["state"]["chosen"], 4), goal(wanted)]
        line += [ratio(max(f["state"]["estimated"] / max(1e-9, f["state"]["chosen"]) for f in by_lag.values()), 4)]
        line += [ratio(max(by_lag[lag]["state"]["of_changed"] for lag in LAGS)), goal(GOALS["of_changed"].get(kind))]
        states_rows.append(line)
    lags = [f"lag {lag}" for lag in LAGS]
    show(
        "Deltas alone: bytes stored / bytes (entropy of the planes); share of bytes in unchanged chunks",
        ["", *lags, *(f"same, {lag}" for lag in LAGS)],
        rows,
    )
    columns = [column for lag in lags for column in (lag, "goal")]
    show(
        f"Increments: references, deltas if below {WHOLE_SHARE} of the whole form; bytes stored / bytes",
        ["", *columns, "by estimate(), more", "most / changed chunks", "goal"],
        states_rows,
    )


def show_delta_speeds(found: Json) -> None:
    rows = [[label, ratio(f["compress"], 2), ratio(f["decompress"], 2)] for label, f in found.items()]
    show("With a base: GB/s of one core", ["", "encode", "decode"], rows)


def show_saved(found: Json) -> None:
    rows = []
    for kind, by_lag in found.items():
        line = [kind, ratio(by_lag[0]["ratio"], 4), goal(GOALS["full"].get(kind))]
        goals = GOALS["increments"].get(kind, (None,) * len(LAGS))
        for lag, wanted in zip(LAGS, goals, strict=True):
            line += [ratio(by_lag[lag]["ratio"], 4), goal(wanted)]
        line += [ratio(max(by_lag[lag]["of_changed"] for lag in LAGS)), goal(GOALS["of_changed"].get(kind))]
        rows.append([*line, "yes" if all(f["right"] for f in by_lag.values()) else "NO"])
    columns = [column for lag in LAGS for column in (f"lag {lag}", "goal")]
    show(
        "Through a Checkpointer: bytes of data files / bytes of the state",
        ["", "full", "goal", *columns, "most / changed tensors", "goal", "right"],
        rows,
    )


def show_restored(found: Json) -> None:
    rows = []
    for kind in (kind for kind in found if kind != "cold"):
        f = found[kind]
        full = statistics.median(f["seconds"]["full"])
        for name, some in f["seconds"].items():
            middle = statistics.median(some)
            wanted = goal(GOALS["restore of a full one's"]) if name.startswith("increment") else ""
            line = [f"{kind}, {f['mib']:.0f} MiB: {name}", f"{middle:.3f}", f"{min(some):.3f}", f"{max(some):.3f}"]
            rows.append([*line, ratio(middle / full, 2), wanted, "yes" if f["right"] else "NO"])
    title = f"restore(), {'cold' if found['cold'] else 'warm'} cache, seconds, in turns"
    show(title, ["", "median", "least", "most", "of a full one's", "goal", "right"], rows)


def show_lost(found: Json) -> None:
    none = statistics.median(found["none"]["lost_s"])
    rows = []
    for way, f in found.items():
        low, middle, high = (1000 * q for q in statistics.quantiles(f["lost_s"], n=4))
        line = [way, f"{middle:.0f} ms", f"{low:.0f} .. {high:.0f}", f"{1000 * statistics.mean(f['lost_s']):.0f} ms"]
        line += [f"{middle - 1000 * none:+.0f} ms", "at most 0" if way.startswith("auto") else ""]
        rows.append(
            [
                *line,
                f"{f['writer_s']:.2f} s",
                f"{1000 * f['stall_s']:.1f} ms",
                ratio(f["ratio"]),
                f"{f['late']}/{len(f['lost_s'])}",
            ]
        )
    show(
        'Training time lost a save ("no saves" shows the noise)',
        [
            "compression",
            "median",
            "quartiles",
            "mean",
            "- none's",
            "goal",
            "writer's CPU",
            "a step waits",
            "data files / state",
            "late",
        ],
        rows,
    )


# -- main --


def measure(plan: Plan, parts: list[int], folder: Path, scratch: Path) -> Json:
    found: Json = {}
    if 1 in parts:
        with pinned():
            whos = contenders()
            found["full"], found["speeds"] = whole_states(plan, folder, whos), whole_speeds(plan, folder, whos)
        show_whole(found["full"])
        show_speeds(found["speeds"])
    if 2 in parts:
        with pinned():
            found["increments"], found["delta_speeds"] = increments(plan, folder), delta_speeds(plan, folder)
        show_increments(found["increments"])
        show_delta_speeds(found["delta_speeds"])
    if 3 in parts:
        found["saved"] = saved(plan, folder, scratch)
        show_saved(found["saved"])
        found["restored"] = restored(plan, folder, scratch)
        show_restored(found["restored"])
    if 4 in parts:
        found["lost"] = training_lost(plan, scratch)
        show_lost(found["lost"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer states, little trained: a minute")
    parser.add_argument(
        "--part", type=int, nargs="+", choices=range(1, 5), default=[1, 2, 3, 4], help="run only these parts"
    )
    parser.add_argument("--states", metavar="DIR", help="where to keep the trained states; default: a temporary folder")
    parser.add_argument("--folder", metavar="DIR", help="where to write checkpoints; default: a temporary folder")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    arguments = parser.parse_args()
    plan, started = QUICK if arguments.quick else FULL, time.monotonic()
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    print(
        f"{machine['cpus']} cores, load {machine['load']:.1f}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, zstandard {zstandard.__version__}"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-") as scratch:
        folder = Path(arguments.states or Path(scratch) / "states")
        states.prepare(folder, plan.size, list(plan.kinds))
        for kind in plan.kinds:
            print(f"  {kind}: {states.ABOUT[kind]}")
        found = measure(plan, arguments.part, folder, Path(scratch))
    print(f"{time.monotonic() - started:.0f} s in total")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "plan": asdict(plan), **found}, indent=1))


if __name__ == "__main__":
    main()
