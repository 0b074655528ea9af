"""Planning, committing and restoring a checkpoint with thousands of ranks: the cost for one rank.

    make bench-scale     or: python benchmarks/scale.py [--quick] [--worlds RANKS ...] [--folder DIR] [--json FILE]
    python benchmarks/scale.py --growth                  how each cost grows instead, see growth.py

The ranks are simulated, one at a time. The measured ones hold real DTensors on a mesh of all ranks (torch's fake
process group sends nothing), the others are described by the same pure functions, and all write the real files. Data
files have their sizes and headers, and no other bytes. Each task runs in its own process on one core, and reports its
peak memory; a process that has imported torch and the library has about 350 MB at its start.

The state is that of a transformer with three-dimensional parallelism: PP 8 x TP 8 x FSDP 1, 8, ... 64, parameters and
AdamW's moments. Tensors sharded only by FSDP (norms) are cut into slices across the tensor-parallel ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "backends"))

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Printed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import files_of_run
import growth
import long_log
import looks
from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import manifests as manifests_of
from ckpt.core.checkpoint import read, write
from ckpt.core.format.boxes import GLOBAL, Dims, Holding, Seat, share
from ckpt.core.format.digest import file_digest
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import (
    CheckpointId,
    DataFile,
    data_key,
    manifest_key,
    metadata_of,
    new_format,
)
from ckpt.core.format.saved_state import SavedState
from ckpt.core.log.run_log import RunLog
from ckpt.core.restore.sources import StoreSource
from ckpt.core.state.capture import Capture, CapturedState, _elsewhere, _spec
from ckpt.core.state.filler import Filler, Target
from ckpt.core.state.sharding import _Cutting, _lie
from ckpt.store import open_store

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results" / "scale.json"
GROWTH = RESULTS.with_name("growth.json")
CHECKPOINT = CheckpointId(1, 1000, "0badcafe")
ROUNDS = 3
OPEN_S = 0.2  # for the log of any run
GOALS = {"cold_s": 2.0, "cached_s": 0.1, "record_mb": 64.0, "reshard_s": 2.0}


# -- the state --


@dataclass(frozen=True)
class World:
    """The number of stages and the sharding of each; `layers` in total, `width` of the model."""

    stages: int = 8
    tensor: int = 8
    fsdp: int = 64
    layers: int = 376
    width: int = 8192

    @property
    def size(self) -> int:
        return self.stages * self.per_stage

    @property
    def per_stage(self) -> int:
        return self.tensor * self.fsdp

    def stage_of(self, rank: int) -> int:
        return rank // self.per_stage

    def ranks(self, stage: int) -> Tensor:
        """Return the ranks of a stage: FSDP x tensor parallelism."""
        first = stage * self.per_stage
        return torch.arange(first, first + self.per_stage).reshape(self.fsdp, self.tensor)

    def parameters(self, stage: int) -> Iterator[tuple[str, Dims, str]]:
        """Yield name, shape and sharding: by columns, by rows, or replicated in tensor parallelism."""
        width, hidden = self.width, self.width * 7 // 2
        each = self.layers // self.stages
        for layer in range(stage * each, (stage + 1) * each):
            for part in ("attention.wq", "attention.wk", "attention.wv"):
                yield f"layers.{layer}.{part}.weight", (width, width), "columns"
            yield f"layers.{layer}.attention.wo.weight", (width, width), "rows"
            for part in ("feed_forward.w1", "feed_forward.w3"):
                yield f"layers.{layer}.{part}.weight", (hidden, width), "columns"
            yield f"layers.{layer}.feed_forward.w2.weight", (width, hidden), "rows"
            for part in ("attention_norm", "ffn_norm"):
                yield f"layers.{layer}.{part}.weight", (width,), "alike"

    def placements(self, how: str) -> tuple[Any, Any]:
        if how == "columns":
            return _StridedShard(0, split_factor=self.tensor), Shard(0)
        return (Shard(0), Shard(1)) if how == "rows" else (Shard(0), Replicate())


class _Stand:
    """Replaces a mesh that does not contain the rank of this process."""

    def __init__(self, ranks: Tensor) -> None:
        self.mesh = ranks


@lru_cache(64)
def stand_in(world: World, stage: int) -> _Stand:
    return _Stand(world.ranks(stage))


def cuttings(world: World, how: str) -> tuple[_Cutting, ...]:
    return tuple(_Cutting(getattr(p, "dim", None), getattr(p, "split_factor", 1)) for p in world.placements(how))


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Make torch treat this process as a rank of a larger job, without communication."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def state_of(world: World, rank: int) -> dict[str, Any]:
    """Build the state of a rank with real DTensors; call it as that rank."""
    stage = world.stage_of(rank)
    mesh = DeviceMesh("cpu", world.ranks(stage), mesh_dim_names=("fsdp", "tensor"), _init_backend=False)
    at = tuple(mesh.get_coordinate() or ())
    net: Any = nn.Module()
    state: dict[Tensor, dict[str, Tensor]] = {}

    def made(full: Dims, how: str) -> Any:
        sizes, _, _ = _lie(full, stand_in(world, stage), at, cuttings(world, how))
        strides = tuple(math.prod(full[i + 1 :]) for i in range(len(full)))
        return DTensor.from_local(
            torch.empty(sizes), mesh, world.placements(how), run_check=False, shape=torch.Size(full), stride=strides
        )

    for name, full, how in world.parameters(stage):
        *path, last = name.split(".")
        home = net
        for part in path:
            if not hasattr(home, part):
                home.add_module(part, nn.Module())
            home = getattr(home, part)
        param: Any = made(full, how).requires_grad_()
        param._is_param = True  # like nn.Parameter, whose detach() may get another rank's mesh from torch's caches
        home.register_parameter(last, param)
        state[param] = {"step": torch.zeros(()), "exp_avg": made(full, how), "exp_avg_sq": made(full, how)}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    optimizer.state.update(state)
    return {
        "model": net,
        "optim": optimizer,
        "tokens": 10**12,
        "data": {"term": 3, "at": 17},
        "rng": torch.Generator(),
    }


# -- the layouts for every rank, without tensors --


def layout_of(world: World, rank: int, like: Layout) -> Layout:
    """Return the layout of any rank in the stage of the layout `like`: the same names, other pieces."""
    stage = world.stage_of(rank)
    at = tuple((world.ranks(stage) == rank).nonzero()[0].tolist())
    members = tuple(world.ranks(stage).flatten().tolist())
    instance = GLOBAL if len(members) == world.size else members[0]
    forms = {f"model.{name}": (full, how) for name, full, how in world.parameters(stage)}
    own = {t.name: t for t in like.tensors if t.instance == like.rank and t.name in forms_own(like, forms)}
    held: list[Holding] = []
    for name in dict.fromkeys(n for component in like.components for n in component["names"]):
        _, _, rest = name.partition("optim.state.")
        param, _, what = rest.rpartition(".")
        form = forms.get(name) or (None if what == "step" else forms.get(param))
        if form is not None:
            full, how = form
            _, boxes, replicas = _lie(full, stand_in(world, stage), at, cuttings(world, how))
            held += [Holding(name, "F32", full, *box, replicas, instance) for box, _ in boxes]
        elif what == "step":
            held.append(Holding(name, "F32", (), (), (), members, instance))
        else:
            one = own[name]
            mine = rank if world.size > 1 else GLOBAL
            held.append(Holding(name, one.dtype, one.shape, (0,) * len(one.shape), one.shape, (rank,), mine))
    cuts = share(held, Seat(rank, world.size))
    parts: list[Any] = [_Held(holding) for holding in held]
    return Layout(
        tuple(_spec(held[cut.holding], cut) for cut in cuts),
        {},
        like.components,
        rank,
        world.size,
        {one.name: one.instance for one in held if one.instance != GLOBAL},
        _elsewhere(parts, cuts),
    )


@dataclass(frozen=True)
class _Held:
    holding: Holding


def forms_own(like: Layout, forms: dict[str, Any]) -> set[str]:
    """Return the names that are neither parameters nor their optimizer state."""
    return {t.name for t in like.tensors if t.name not in forms and not t.name.startswith("optim.state.")}


# -- files --


class Folder:
    """Writes small files without fsync: files of described ranks need not be durable."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = root

    async def put(self, key: str, data: Any, *, create: bool = False) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_ranks(world: World, root: str, first: int, last: int) -> int:
    """Write the manifests of some ranks of one stage. Return their bytes."""
    with as_rank(first, world.size):
        reading = Capture(state_of(world, first), Seat(first, world.size)).read()
    rng, total = np.random.default_rng(first), 0
    for rank in range(first, last):
        total += asyncio.run(write_rank(world, Path(root), rank, reading, rng))
    return total


async def write_rank(world: World, root: Path, rank: int, like: CapturedState, rng: np.random.Generator) -> int:
    layout = layout_of(world, rank, like.layout)
    arrangement = layout.arrangement
    key = data_key(CHECKPOINT, rank)
    header = arrangement.header(metadata_of(key))
    table = write.build_table(layout, key, rng.bytes(16 * len(arrangement.chunks)))
    data_file = DataFile(key, len(header) + arrangement.data_size, len(header), file_digest(header))
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    with open(root / key, "wb") as file:
        file.write(header)
        file.truncate(data_file.size)
    store: Any = Folder(root)
    snapshot = write.RankSnapshot(CHECKPOINT, layout, memoryview(b""), like.values, finite=True)
    await write.finish_manifest(store, snapshot, table, [data_file], reason="due")
    return (root / manifest_key(CHECKPOINT, rank)).stat().st_size


def write_all(world: World, root: Path) -> None:
    """Write a run with the manifests that make one checkpoint, with two processes."""
    (root / "FORMAT.json").parent.mkdir(parents=True, exist_ok=True)
    (root / "FORMAT.json").write_bytes(new_format())
    step = min(world.per_stage, 64)
    spans = [(first, first + step) for first in range(0, world.size, step)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(write_ranks, *zip(*[(world, str(root), *span) for span in spans], strict=True)))


# -- the measurements --


class Clock:
    """Measures the seconds of consecutive steps."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.steps[name], self._at = now - self._at, now

    @property
    def total(self) -> float:
        return sum(self.steps.values())


def plan(world: World, rank: int) -> Json:
    """Measure planning from the state to a layout and its positions in memory and file; and again without changes."""
    with as_rank(rank, world.size):
        state, clock = state_of(world, rank), Clock()
        capture = Capture(state, Seat(rank, world.size))
        reading = capture.read()
        clock.lap("read")
        arrangement = reading.layout.arrangement
        found = len(arrangement.header({})), len(arrangement.chunks), reading.layout.digest
        clock.lap("arrange")
        cached = []
        for _ in range(20):
            started = time.perf_counter()
            again = capture.read()
            assert again.layout is reading.layout
            cached.append(time.perf_counter() - started)
        held = {name for component in reading.layout.components for name in component["names"]}
    return {
        "cold_s": clock.total, **clock.steps, "cached_s": statistics.median(cached), "held": len(held),
        "pieces": len(reading.layout.tensors), "blobs": found[1],
    }  # fmt: skip


def take_over(root: Path) -> Json:
    """Measure a writer that finds the manifest of every rank, checks them, and commits the checkpoint."""

    async def work() -> Json:
        store = open_store(root.as_uri(), writable=True)
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        mine = await commits.acquire(log, "0badcafe")
        clock, cpu = Clock(), time.process_time()
        keys = [info.key async for info in store.list()]
        parts = list((await manifests_of.intact_manifests(store, CHECKPOINT, keys)).values())
        clock.lap("read_s")
        await commits.commit_or_end(log, mine, parts)
        clock.lap("merge_s")
        await store.aclose()
        return {"commit_s": clock.total, **clock.steps, "cpu_s": time.process_time() - cpu}

    return asyncio.run(work())


def sizes(root: Path) -> Json:
    """Return the bytes that a restoring rank reads first, and that each rank writes."""
    index = files_of_run.size(root, files_of_run.INDEX)
    record = max(path.stat().st_size for path in (root / "log").iterdir())
    parts = [path.stat().st_size for path in files_of_run.files(root, files_of_run.MANIFEST)]
    return {
        "record_bytes": record, "index_bytes": index, "record_mb": (record + index) / 1e6,
        "part_bytes": statistics.mean(parts),
    }  # fmt: skip


def reshard(root: Path, world: World, rank: int) -> Json:
    """Measure one rank of another job, with real DTensors, from the log to its planned reads."""
    url = root.as_uri()
    with as_rank(rank, world.size):
        capture = Capture(state_of(world, rank), Seat(rank, world.size))
        capture.read()
        clock = Clock()
        commit = read.run(newest(url))
        clock.lap("log")
        source = StoreSource(url, commit.checkpoint, commit)
        source.open([])
        clock.lap("index")
        placement = capture.place(source.saved)
        placement.check()
        clock.lap("place")
        source.narrow({key: [target.box for target in targets] for key, targets in placement.fills.items()})
        clock.lap("tables")
        filler = Filler(source.saved, placement.fills)
        clock.lap("fill")
        batches = read.plan_reads(source.saved.table, filler.chunks, far=True)
        clock.lap("reads")
    return {
        "reshard_s": clock.total, **clock.steps, "tensors": len(placement.fills), "blobs": len(filler.chunks),
        "tables_read": len(set(source.saved.table.columns.rank.tolist())), "batches": len(batches),
    }  # fmt: skip


def names_of_a_stage(root: Path, layers: int) -> Json:
    """Measure one process that loads some layers' whole weights."""
    url, clock = root.as_uri(), Clock()
    commit = read.run(newest(url))
    clock.lap("log")
    saved = read.run(opened(url, commit))
    clock.lap("index")
    wanted = {f"model.layers.{i}." for i in range(layers)}
    fills: dict[Any, list[Target]] = {}
    for name, key in saved.labels.items():
        if ".".join(name.split(".")[:3]) + "." in wanted:
            shape = saved.tensors[key].spec.shape
            fills[key] = [Target(torch.empty(shape, device="meta"), ((0,) * len(shape), shape))]
    clock.lap("place")
    narrowed = saved.narrowed({key: [target.box for target in targets] for key, targets in fills.items()})
    clock.lap("tables")
    filler = Filler(narrowed, fills)
    clock.lap("fill")
    batches = read.plan_reads(narrowed.table, filler.chunks, far=True)
    clock.lap("reads")
    return {
        "reshard_s": clock.total, **clock.steps, "tensors": len(fills), "blobs": len(filler.chunks),
        "tables_read": len(set(narrowed.table.columns.rank.tolist())), "batches": len(batches),
    }  # fmt: skip


async def newest(url: str) -> Any:
    log = await read.open_run(url)
    await log.store.aclose()
    return read.choose(log)


async def opened(url: str, commit: Any) -> SavedState:
    async with read.opened(url) as store:
        return await read.load_saved(store, commit)


TASKS: dict[str, Callable[[Json], Json]] = {
    "plan": lambda a: plan(World(**a["world"]), a["rank"]),
    "commit": lambda a: take_over(Path(a["root"])),
    "reshard": lambda a: reshard(Path(a["root"]), World(**a["world"]), a["rank"]),
    "names": lambda a: names_of_a_stage(Path(a["root"]), a["layers"]),
    "look": lambda a: looks.look(Path(a["root"]), a["what"]),
    "log": lambda a: long_log.synthetic(Path(a["root"]), a["records"]),
    **growth.TASKS,
}


def middle(by: str, name: str, **arguments: Any) -> Json:
    """Return the median of three runs, by one of their figures, since the machine may be busy."""
    return sorted((task(name, **arguments) for _ in range(ROUNDS)), key=lambda one: float(one[by]))[ROUNDS // 2]


def task(name: str, **arguments: Any) -> Json:
    """Run a task in its own process, on one core."""
    ran = subprocess.run(
        [sys.executable, __file__, "--task", json.dumps({"name": name, **arguments})],
        stdout=subprocess.PIPE,
        check=True,
    )
    found: Json = json.loads(ran.stdout.splitlines()[-1])
    return found


def run_task(asked: Json) -> None:
    if asked["name"] != "save":  # "save" also has a writer process
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = TASKS[asked["name"]](asked)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**found, "peak_mb": most * 1024 / 1e6, "before_mb": before * 1024 / 1e6}))


# -- all of it --


def world_of(size: int, layers: int) -> World:
    """Use FSDP across all ranks, so that each has about the same number of bytes, however many there are."""
    fsdp = size // 64
    return World(8, 8, fsdp, layers, 1024 * math.isqrt(fsdp))


def others(world: World) -> dict[str, World]:
    """Return the jobs to restore in: the same, half the ranks, and another sharding."""
    same = asdict(world)
    found = {"the same": world}
    if world.fsdp > 1:
        found[f"{world.size // 2} ranks (FSDP {world.fsdp // 2})"] = World(**{**same, "fsdp": world.fsdp // 2})
    found[f"TP {2 * world.tensor}, PP {world.stages // 2}"] = World(
        **{**same, "tensor": 2 * world.tensor, "stages": world.stages // 2}
    )
    return found


def measure(sizes_: list[int], layers: int, folder: Path, say: Callable[[str], None]) -> Json:
    found: Json = {}
    for size in sizes_:
        world, root = world_of(size, layers), folder / f"run-{size}"
        if not (root / "log").exists():
            started = time.perf_counter()
            write_all(world, root)
            say(f"{size} ranks: parts written in {time.perf_counter() - started:.0f} s")
            made = task("commit", root=str(root))
            (folder / f"commit-{size}.json").write_text(json.dumps(made))
        rank = world.size * 5 // 8 + 3
        mine: Json = {
            "world": asdict(world),
            "plan": middle("cold_s", "plan", world=asdict(world), rank=rank),
            "commit": json.loads((folder / f"commit-{size}.json").read_text()),
            "sizes": sizes(root),
            "reshard": {},
        }
        for name, other in others(world).items():
            at = other.size * 5 // 8 + 3
            mine["reshard"][name] = middle("reshard_s", "reshard", root=str(root), world=asdict(other), rank=at)
        mine["reshard"]["one process, the weights of a stage"] = middle(
            "reshard_s", "names", root=str(root), layers=layers // 8
        )
        mine["looks"] = looks.measure(task, root)
        found[str(size)] = mine
        say(f"{size} ranks: measured")
    return found


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Printed(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def logs(counts: list[int], folder: Path, say: Callable[[str], None]) -> list[Json]:
    """Measure the log of a run that has saved very often."""
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            found.append(task("log", root=f"{root}/run", records=count))
        say(f"a log of {count} records: measured")
    return found


def show_logs(found: list[Json]) -> None:
    rows = [
        [
            f"{one['records']:,}",
            str(one["files"]),
            f"{one['bytes'] / 1e6:.2f} ({one['taken'] / 1e6:.2f}) MB",
            f"{one['open_s']:.3f} s",
            "" if one["whole_s"] is None else f"{one['whole_s']:.1f} s",
        ]
        for one in found
    ]
    rows.append(["goal", "", "", f"{OPEN_S:g} s", ""])
    show("The log of a run", ["records", "files", "bytes (on disk)", "opened", "all of it read"], rows)


def show_all(found: Json) -> None:
    rows, reshards = [], []
    for size, f in found.items():
        plan_, sizes_, commit = f["plan"], f["sizes"], f["commit"]
        rows.append(
            [
                size,
                str(plan_["held"]),
                str(plan_["pieces"]),
                f"{plan_['cold_s']:.3f} s",
                f"{1000 * plan_['cached_s']:.2f} ms",
                f"{sizes_['part_bytes'] / 1e3:.0f} kB",
                f"{sizes_['record_bytes'] / 1e6:.2f} + {sizes_['index_bytes'] / 1e6:.2f} MB",
                f"{commit['read_s']:.1f} + {commit['merge_s']:.1f} ({commit['cpu_s']:.1f}) s",
                f"{commit['peak_mb']:.0f} MB",
            ]
        )
        for name, one in f["reshard"].items():
            steps = "  ".join(f"{one[k]:.2f}" for k in ("log", "index", "place", "tables", "fill", "reads"))
            line = [f"{size} ranks -> {name}", f"{one['reshard_s']:.2f} s", f"{GOALS['reshard_s']:g} s", steps]
            reshards.append([*line, str(one["tables_read"]), str(one["blobs"]), f"{one['peak_mb']:.0f} MB"])
    goals = ["goal", "", "", f"{GOALS['cold_s']:g} s", f"{1000 * GOALS['cached_s']:g} ms", ""]
    rows.append([*goals, f"{GOALS['record_mb']:g} MB", "", ""])
    head = [
        "ranks",
        "tensors",
        "pieces",
        "plan, cold",
        "cached",
        "manifest",
        "COMMIT + index",
        "read + merge",
        "peak",
    ]
    show("One rank's plan, its files, and the committer", head, rows)
    head = ["", "in all", "goal", "log, index, place, tables, fill, reads", "tables", "blobs", "peak"]
    show("A rank's work before it reads the first tensor", head, reshards)
    head = ["", "CPU", "peak", "requests", "read", "parts", "tables"]
    show("Reads of commands, without data files", head, looks.rows({size: f["looks"] for size, f in found.items()}))


def show_growth(found: Json) -> None:
    for curve, points in found.items():
        names = [name for name in next(iter(points.values())) if not name.endswith("_mb")]
        rows = [
            [f"{int(n):,}", *(f"{one[k]:,}" if k.endswith("bytes") else f"{1000 * one[k]:,.2f} ms" for k in names)]
            for n, one in points.items()
        ]
        show(curve, ["", *names], rows)
    for text in growth.too_steep(found):
        print(f"faster than its work: {text}")


def judged(found: Json) -> list[str]:
    """Return the goals that were missed."""
    missed = []
    for size, f in found.items():
        figures = {**f["plan"], **f["sizes"], "reshard_s": max(one["reshard_s"] for one in f["reshard"].values())}
        missed += [
            f"{size} ranks: {k} is {figures[k]:.3g}, not below {most:g}"
            for k, most in GOALS.items()
            if figures[k] >= most
        ]
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 and 256 ranks, fewer layers: half a minute")
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="RANKS")
    parser.add_argument("--folder", metavar="DIR", help="where to keep the files; default: a temporary folder")
    parser.add_argument("--json", metavar="FILE", help="write all figures there instead of to benchmarks/results")
    parser.add_argument("--growth", action="store_true", help="how costs grow with bytes, tensors, checkpoints, ranks")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        run_task(json.loads(arguments.task))
        return
    worlds, layers = ([64, 256], 40) if arguments.quick else (arguments.worlds, 376)
    started = time.monotonic()
    about = {
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if arguments.growth:
        curves = growth.measure(task, lambda text: print(text, flush=True), quick=arguments.quick)
        show_growth(curves)
        put_down(arguments, GROWTH, {"machine": about, "curves": curves, "steep": growth.too_steep(curves)})
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(arguments.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(worlds, layers, folder, lambda text: print(text, flush=True))
        records = [1_000, 10_000] if arguments.quick else [1_000, 100_000, 1_000_000]
        long = logs(records, folder, lambda text: print(text, flush=True))
    show_all(found)
    show_logs(long)
    slow = [
        f"a log of {one['records']} records: opened in {one['open_s']:.2f} s" for one in long if one["open_s"] >= OPEN_S
    ]
    for text in judged(found) + slow:
        print(f"missed: {text}")
    print(f"{time.monotonic() - started:.0f} s in total")
    put_down(arguments, RESULTS, {"machine": about, "goals": GOALS, "worlds": found, "logs": long})


def put_down(arguments: argparse.Namespace, usual: Path, found: Json) -> None:
    target = Path(arguments.json) if arguments.json else None if arguments.quick else usual
    if target is not None:
        target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
