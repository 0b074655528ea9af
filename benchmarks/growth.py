"""The cost of a save as its work grows: in bytes, in tensors, in checkpoints of a run, in ranks.

    python benchmarks/scale.py --growth [--quick] [--json FILE]

One curve for each, with every point in its own process: `scale.py` runs them, and names each figure that grows faster
than the work between the last two points. Bytes and tensors are saved by a real Checkpointer to a folder. Checkpoints
and ranks use the functions of the writer, in memory if there is /dev/shm, so that a disk does not hide their cost.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt
import files_of_run
from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import manifests as manifests_of
from ckpt.core.checkpoint import read
from ckpt.core.checkpoint.write import RankSnapshot, write_part
from ckpt.core.format.boxes import Seat
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId, Manifest
from ckpt.core.log.run_log import RunLog, Trimmer
from ckpt.core.state.capture import Capture
from ckpt.store import Store, open_store

Json = dict[str, Any]
NONCE = "0badcafe"
MIB = 1 << 20
STEPS, SAVES = 12, 3
RECENT = 500  # saves over which trimming is summed: it happens only sometimes
FASTER = 1.25  # growth above this multiple of the work's growth, between the last two points, is more than noise


@contextmanager
def scratch(*, quick: bool) -> Iterator[Path]:
    """Create a temporary folder; `quick`: in memory, if possible."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=shm if quick and os.access(shm, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def trained(mib: float, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return parameters, moments and step counts with this total number and size."""
    size = max(1, int(mib * MIB / 4 / (3 * tensors / 4)))
    blocks = [nn.ParameterDict({f"weight{k}": torch.randn(size) for k in range(10)}) for _ in range(-(-tensors // 40))]
    model = nn.ModuleList(blocks)
    for param in list(model.parameters())[tensors // 4 :]:
        param.requires_grad_(False)
    kept = [param for param in model.parameters() if param.requires_grad]
    optim = torch.optim.AdamW(kept, foreach=True)
    for param in kept:
        param.grad = torch.full_like(param, 1e-3)
    optim.step()
    return model, optim


def metadata(root: Path, checkpoint: str) -> int:
    """Return the bytes on disk of a checkpoint without its tensors."""
    part = Manifest.from_bytes(files_of_run.files(root, files_of_run.MANIFEST, of=checkpoint)[0].read_bytes(), "a part")
    small = files_of_run.size(root, files_of_run.MANIFEST, files_of_run.INDEX, of=checkpoint)
    return small + sum(file.header_size for file in part.files)


def save(mib: float, tensors: int) -> Json:
    """Measure a real trainer and its writer."""
    model, optim = trained(mib, tensors)
    blocked, cpu, staged, committed = [], [], [], []
    with scratch(quick=False) as root:
        tiers = [ckpt.Tier(root, every=10**6, keep=3, compression="none", full_every=1)]
        with ckpt.Checkpointer({"model": model, "optim": optim}, tiers, memory=ckpt.Memory(every=1)) as cp:
            cp.save(1).wait_durable(300)
            for step in range(2, 2 + STEPS):
                optim.step()
                began, used = time.perf_counter(), time.thread_time()
                saved = cp.step(step)
                cpu.append(time.thread_time() - used)
                blocked.append(time.perf_counter() - began)
                assert saved is not None
                saved.wait_staged(300)
                staged.append(time.perf_counter() - began)
            for step in range(2 + STEPS, 2 + STEPS + SAVES):
                optim.step()
                began = time.perf_counter()
                saved = cp.save(step)
                saved.wait_durable(300)
                committed.append(time.perf_counter() - began)
        size = metadata(root, saved.id)
    quiet = blocked[STEPS // 3 :]  # each slot has been filled once by now
    return {
        "step_s": statistics.median(quiet), "step_cpu_s": statistics.median(cpu[STEPS // 3 :]),
        "step_worst_s": max(quiet), "staged_s": statistics.median(staged[STEPS // 3 :]),
        "committed_s": statistics.median(committed), "metadata_bytes": size,
    }  # fmt: skip


def a_layout(tensors: int, rank: int = 0, world: int = 1) -> tuple[Layout, list[Any]]:
    reading = Capture({"w": {f"layer{i}": torch.zeros(16) for i in range(tensors)}}, Seat(rank, world)).read()
    return reading.layout, reading.values


async def whole_save(store: Store, log: RunLog, mine: Any, step: int, layout: Layout, values: list[Any]) -> None:
    data = memoryview(bytearray(layout.arrangement.data_size))
    snapshot = RankSnapshot(CheckpointId(mine.term, step, NONCE), layout, data, values, finite=True)
    await commits.commit_or_end(log, mine, [await write_part(store, snapshot)])


async def begun(root: Path) -> tuple[Store, RunLog, Any]:
    store = open_store(root.as_uri(), writable=True)
    await commits.create_run(store)
    log = RunLog(store)
    await log.open()
    return store, log, await commits.acquire(log, NONCE)


def checkpoints(marks: list[int]) -> dict[str, Json]:
    """Measure one run that keeps all checkpoints, with its log trimmed as by a writer, at each of these counts.
    `save_s`: without the trimming, which runs next to saves."""

    async def work(root: Path) -> dict[str, Json]:
        store, log, mine = await begun(root)
        (layout, values), found, times, trimming = a_layout(8), dict[str, Json](), list[float](), list[float]()
        trimmer = Trimmer()
        for step in range(1, max(marks) + 1):
            began = time.perf_counter()
            await whole_save(store, log, mine, step, layout, values)
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
            await trimmer.step(log, mine)
            trimming.append(time.perf_counter() - began)
            if step in marks:
                trimmed_s = sum(trimming[-RECENT:]) / len(trimming[-RECENT:])
                found[str(step)] = {
                    "save_s": statistics.median(times[-20:]), "trimming_s": trimmed_s, **await looked_at(root),
                }  # fmt: skip
        await store.aclose()
        return found

    with scratch(quick=True) as root:
        return asyncio.run(work(root))


async def looked_at(root: Path) -> Json:
    """Open the run, as a restart does."""
    began = time.perf_counter()
    log = await read.open_run(root.as_uri())
    opened_s = time.perf_counter() - began
    began = time.perf_counter()
    await read.load_saved(log.store, read.choose(log))
    await log.store.aclose()
    return {
        "open_s": opened_s, "newest_s": time.perf_counter() - began,
        "log_bytes": sum(path.stat().st_size for path in (root / "log").rglob("*") if path.is_file()),
    }  # fmt: skip


def ranks(world: int, tensors: int) -> Json:
    """Measure each rank's own tensors: the plan per rank, the commit of all, and the reads of a restart."""

    async def work(root: Path) -> Json:
        store, log, mine = await begun(root)
        plans, checkpoint = [], CheckpointId(mine.term, 1, NONCE)
        for rank in range(world):
            began = time.perf_counter()
            layout, values = a_layout(tensors, rank, world)
            plans.append(time.perf_counter() - began)
            data = memoryview(bytearray(layout.arrangement.data_size))
            await write_part(store, RankSnapshot(checkpoint, layout, data, values, finite=True))
        keys = [info.key async for info in store.list()]
        began = time.perf_counter()
        parts = list((await manifests_of.intact_manifests(store, checkpoint, keys)).values())
        await commits.commit_or_end(log, mine, parts)
        committed_s = time.perf_counter() - began
        await store.aclose()
        looked = await looked_at(root)
        index = files_of_run.size(root, files_of_run.INDEX)
        return {
            "plan_s": statistics.median(plans), "commit_s": committed_s, "index_bytes": index,
            "newest_s": looked["newest_s"],
        }  # fmt: skip

    with scratch(quick=True) as root:
        return asyncio.run(work(root))


TASKS: dict[str, Callable[[Json], Json]] = {
    "save": lambda a: save(a["mib"], a["tensors"]),
    "checkpoints": lambda a: checkpoints(a["marks"]),
    "ranks": lambda a: ranks(a["world"], a["tensors"]),
}
SIZES, TENSORS = [16, 64, 256, 1024], [100, 1_000, 10_000, 50_000]
MARKS, WORLDS = [1, 10, 100, 1_000, 10_000], [1, 2, 4, 8]
# The figures that may grow with the work; all others should stay constant.
WORK = {
    "MiB, in 64 tensors": {"staged_s", "committed_s"},
    "tensors, 256 MiB in all": {"step_s", "step_cpu_s", "metadata_bytes"},
    "checkpoints of a run, 8 tensors each": {"log_bytes", "open_s"},
    "ranks, 2,000 tensors each": {"commit_s", "index_bytes", "newest_s"},
}


def measure(task: Callable[..., Json], say: Callable[[str], None], *, quick: bool) -> Json:
    """Return all curves, with their points by amount."""
    sizes, tensors, marks = (SIZES[:2], TENSORS[:2], MARKS[:3]) if quick else (SIZES, TENSORS, MARKS)
    by_size, by_tensors, by_marks, by_ranks = WORK
    found: Json = {by_size: {str(n): task("save", mib=n, tensors=64) for n in sizes}}
    say("sizes: measured")
    found[by_tensors] = {str(n): task("save", mib=256, tensors=n) for n in tensors}
    say("tensors: measured")
    found[by_marks] = task("checkpoints", marks=marks)
    for taken in ("peak_mb", "before_mb"):
        found[by_marks].pop(taken)
    say("checkpoints: measured")
    found[by_ranks] = {str(n): task("ranks", world=n, tensors=2_000) for n in WORLDS}
    say("ranks: measured")
    return found


def too_steep(found: Json) -> list[str]:
    """Return each figure that grows faster than its work, between the last two points of its curve."""
    named = []
    for curve, points in found.items():
        (less, before), (more, after) = list(pairwise((int(n), one) for n, one in points.items()))[-1]
        for name in after.keys() - {"peak_mb", "before_mb", "step_worst_s"}:
            work = more / less if name in WORK[curve] else 1.0
            growth = after[name] / max(before[name], 1e-9)
            if growth > FASTER * work:
                named.append(f"{name} grows {growth:.2g} times from {less:,} to {more:,} {curve}; its work {work:.2g}")
    return sorted(named)
