"""Saving and restoring with several ranks, compared with torch DCP and torch_checkpointing in the same run.

    make bench-ranks      or: python benchmarks/ranks.py [--quick] [--folder DIR] [--json FILE]

Every rank is a process on this machine, over gloo on the CPU; the libraries alternate inside the same ranks. Measured:

  * the bytes that each rank stages and writes of a replicated state (DDP), against its share of the state
  * the training time that a save takes: the call, and the wait before the next optimizer step
  * the restore time on the same or another number of ranks, from when all are ready until the last rank is done, and
    the CPU time of all ranks, which other work on the machine disturbs less; how often a byte is read, and how many
    bytes come from other ranks. The restored state is compared bit for bit

torch_checkpointing is measured if it is installed and works. Absolute times depend on the machine and its load; the
ratios, measured in one run, are more meaningful. Needs 6 GB of disk and of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.core.checkpoint import read


@dataclass(frozen=True)
class Workload:
    """Residual pairs of linear layers in float32, with AdamW's two moments for every parameter."""

    blocks: int
    width: int
    hidden: int
    batch: int = 16  # rows per rank

    @property
    def parameters(self) -> int:
        return self.blocks * (2 * self.width * self.hidden + self.width + self.hidden)

    @property
    def tensors(self) -> int:
        """Return the number of tensors, without AdamW's step counts (one number per parameter tensor)."""
        return self.blocks * 4 * 3

    @property
    def nbytes(self) -> int:
        return self.parameters * 12 + self.blocks * 4 * 4

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks of two linear layers {self.width} x {self.hidden}, AdamW: "
            f"{self.tensors} tensors, {self.nbytes / 2**20:.0f} MiB"
        )


@dataclass(frozen=True)
class Plan:
    """The measurements. `every`: steps between checkpoints on disk; all steps are saved to memory.

    `ours`, `others`: saves per turn. `resharded`: (mode, ranks that save, ranks that restore).
    """

    trained: Workload
    restored: Workload
    every: int
    worlds: tuple[int, ...]
    turns: int
    ours: int
    others: int
    resharded: tuple[tuple[str, int, int], ...]
    repetitions: int


FULL = Plan(
    trained=Workload(8, 512, 1024),
    restored=Workload(24, 640, 1280),
    every=10,
    worlds=(1, 2, 4),
    turns=4,
    ours=10,
    others=2,
    resharded=(("fsdp2", 4, 2), ("fsdp2", 2, 4), ("fsdp2", 4, 3), ("fsdp2", 8, 1), ("ddp", 4, 4)),
    repetitions=5,
)
QUICK = Plan(
    trained=Workload(8, 256, 512),
    restored=Workload(24, 320, 640),
    every=10,
    worlds=(2,),
    turns=3,
    ours=10,
    others=1,
    resharded=(("fsdp2", 4, 2), ("fsdp2", 2, 4), ("ddp", 4, 4)),
    repetitions=3,
)
GOALS = {"share": 0.05, "stall_s": 0.003, "restore": 0.5}
OURS, DCP, TC = "everystep", "torch DCP", "torch_checkpointing"
LAUNCH_S = 240.0

Told = list[dict[str, Any]]  # by ranks: `who` and `rank`, and the measurements
Figures = dict[str, Any]


# -- the state, on a rank --


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(mode: str, workload: Workload) -> dict[str, Any]:
    """Build the same state for any number of ranks: moments are weights times powers of two."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*[Block(workload.width, workload.hidden) for _ in range(workload.blocks)])
    if mode == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optim = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        moments = {"exp_avg": p.detach() * 0.5, "exp_avg_sq": p.detach().abs() * 0.25}
        optim.state[p] = {"step": torch.tensor(7.0), **moments}
    return {"model": net, "optim": optim}


def inner(state: dict[str, Any]) -> nn.Module:
    net: nn.Module = state["model"]
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def locals_of(state: dict[str, Any]) -> list[Tensor]:
    """Return this rank's part of every tensor of the state."""
    tensors = [*state["model"].parameters()]
    tensors += [t for p in state["model"].parameters() for t in state["optim"].state[p].values()]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in tensors]


def payload(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as DCP needs it: by names, with the live tensors."""
    model, optim = get_state_dict(state["model"], state["optim"])
    return {"model": model, "optim": optim}


def plain_payload(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": inner(state).state_dict(), "optim": state["optim"].state_dict()}


def tensor_bytes(tree: Any) -> int:
    if isinstance(tree, DTensor):
        tree = tree.to_local()
    if isinstance(tree, Tensor):
        return tree.nbytes
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return sum(tensor_bytes(value) for value in values)


# -- the libraries: saving while training --


class Saver(Protocol):
    """Saves with one library. `stalls`: the training time of each save, including the wait before the next update."""

    stalls: list[float]

    def save(self, step: int) -> None: ...

    def update(self) -> None:
        """Run an optimizer step when it may change the last saved state."""

    def settle(self) -> None:
        """Wait until everything is written."""

    def share(self) -> tuple[int, int]:
        """Return the bytes that this rank staged and wrote for the last checkpoint on disk."""

    def close(self) -> None: ...


class Ours:
    def __init__(self, state: dict[str, Any], folder: str, every: int) -> None:
        self.url, self.optim = folder, state["optim"]
        self.cp = ckpt.Checkpointer(state, ckpt.Tier(folder, every=every, keep=3))
        self.cp.restore(default=0)
        self.cp.save(1).wait_durable(120.0)  # memory is ready from here on
        self.cp.stats.stalls.clear()

    @property
    def stalls(self) -> list[float]:
        return list(self.cp.stats.stalls)

    def save(self, step: int) -> None:
        self.cp.step(step)

    def update(self) -> None:
        self.optim.step()  # its hook waits for the copy, and counts that

    def settle(self) -> None:
        self.cp.wait(120.0)

    def share(self) -> tuple[int, int]:
        rank = dist.get_rank()

        async def look() -> tuple[int, str]:
            log = await read.open_run(self.url)
            try:
                commit = read.choose(log)
                manifest = await read.load_all(log.store, commit)
                return manifest.layout(rank).arrangement.data_size, str(commit.checkpoint)
            finally:
                await log.store.aclose()

        staged, checkpoint = read.run(look())
        return staged, sum(file.stat().st_size for file in Path(self.url).glob(f"*/{checkpoint}.{rank}.*"))

    def close(self) -> None:
        self.cp.close()


def next_path(folder: str, step: int) -> str:
    """Return where a peer saves next. It keeps everything, so its previous checkpoint is deleted."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()
    return f"{folder}/{step}"


class CountingStager(DefaultStager):
    """The default stager of async_save; `nbytes`: the size of the last copied state."""

    nbytes = 0

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        staged = super().stage(state_dict, **kwargs)
        self.nbytes = tensor_bytes(staged)
        return staged


class Dcp:
    def __init__(self, state: dict[str, Any], folder: str) -> None:
        self.state, self.folder, self.optim = state, folder, state["optim"]
        self.group = dist.new_group(backend="gloo")  # its background thread must not disturb the training's own
        self.stager = CountingStager(StagingOptions(False, False, False, False))
        self.stalls: list[float] = []
        self.save(0)
        self.settle()
        self.stalls.clear()

    def save(self, step: int) -> None:
        self.path = next_path(self.folder, step)
        state = payload(self.state)
        started = time.perf_counter()
        self.future: Any = dcp.async_save(
            state, checkpoint_id=self.path, process_group=self.group, async_stager=self.stager
        )
        self.stalls.append(time.perf_counter() - started)

    def update(self) -> None:
        self.optim.step()  # staging has ended when async_save returns

    def settle(self) -> None:
        self.future.result()

    def share(self) -> tuple[int, int]:
        files = Path(self.path).glob(f"__{dist.get_rank()}_*.distcp")
        return self.stager.nbytes, sum(file.stat().st_size for file in files)

    def close(self) -> None:
        self.stager.close()


class TorchCheckpointing:
    def __init__(self, state: dict[str, Any], folder: str) -> None:
        self.state, self.folder, self.optim = state, folder, state["optim"]
        self.manager = manager(resharding=False)
        self.stalls: list[float] = []
        self.save(0)
        self.settle()
        self.stalls.clear()

    def save(self, step: int) -> None:
        self.path = next_path(self.folder, step)
        state = plain_payload(self.state)
        started = time.perf_counter()
        self.future = self.manager.save(self.path, state)
        self.stalls.append(time.perf_counter() - started)

    def update(self) -> None:
        started = time.perf_counter()
        with self.manager.lock():
            if self.stalls:
                self.stalls[-1] += time.perf_counter() - started
            self.optim.step()

    def settle(self) -> None:
        self.future.result()
        dist.barrier()  # until rank 0 has renamed the checkpoint

    def share(self) -> tuple[int, int]:
        staged = tensor_bytes(self.manager._saver.stager.get_staged_state_dict())
        return staged, sum(file.stat().st_size for file in Path(self.path).glob(f"*_{dist.get_rank()}.pt"))

    def close(self) -> None:
        self.manager.close()


def manager(*, resharding: bool) -> Any:
    """Create a manager of torch_checkpointing; raise ImportError if it is not installed.

    Two of its defaults do not work here and are changed: it gathers metadata over CUDA, and ext4 and XFS reject its
    direct writes, which are not aligned.
    """
    import torch_checkpointing as tc
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, data, group=process_group)
        return dict(enumerate(found))

    DefaultMetadataManager._all_gather_pickled_data = gather
    items = {name: tc.ItemSpec(resharder=DefaultResharder()) for name in ("model", "optim")} if resharding else {}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return tc.CheckpointManager(tc.CheckpointManager.Config(items=items, storage_config=storage))


def train_step(state: dict[str, Any], workload: Workload, update: Callable[[], None]) -> float:
    """Return the seconds of one training step."""
    started = time.perf_counter()
    x = torch.randn(workload.batch, workload.width)
    state["optim"].zero_grad()
    (state["model"](x) - x).pow(2).mean().backward()
    update()
    return time.perf_counter() - started


def train(folder: str, plan: Plan, mode: str) -> None:
    """Alternate the libraries, with a few saves each and a training step after every save."""
    state = build(mode, plan.trained)
    for _ in range(2):
        train_step(state, plan.trained, state["optim"].step)
    alone = [train_step(state, plan.trained, state["optim"].step) for _ in range(5)]
    makers: dict[str, Callable[[], Saver]] = {
        OURS: lambda: Ours(state, f"{folder}/ours", plan.every),
        DCP: lambda: Dcp(state, f"{folder}/dcp"),
        TC: lambda: TorchCheckpointing(state, f"{folder}/tc"),
    }
    savers: dict[str, Saver] = {}
    for name, make in makers.items():
        with told(name):
            savers[name] = make()
    step, steps = 1, dict[str, list[float]]()
    for _ in range(plan.turns):
        for name, saver in list(savers.items()):
            dist.barrier()
            with told(name, lambda name=name: savers.pop(name)):
                for _ in range(plan.ours if name == OURS else plan.others):
                    step += 1
                    saver.save(step)
                    steps.setdefault(name, []).append(train_step(state, plan.trained, saver.update))
                    if name != OURS:  # a peer's next save may begin only after the previous one is written
                        saver.settle()
                saver.settle()
    for name, saver in savers.items():
        staged, written = saver.share()
        tell(name, stalls=saver.stalls, staged=staged, written=written, alone=alone, steps=steps[name])
        saver.close()


# -- the libraries: restoring --


def keep(folder: str, plan: Plan, mode: str) -> None:
    """Save with every library."""
    state = build(mode, plan.restored)
    with ckpt.Checkpointer(state, [ckpt.Tier(f"{folder}/ours", every=1)], memory=None) as cp:
        cp.save(1).wait_durable(120.0)
    dcp.save(payload(state), checkpoint_id=f"{folder}/dcp")
    with told(TC):
        saver = manager(resharding=True)
        saver.save(f"{folder}/tc", plain_payload(state)).result()
        saver.close()


def fetch(folder: str, plan: Plan, mode: str) -> None:
    """Restore with every library in turn, each time into an overwritten state, and compare."""
    state = build(mode, plan.restored)
    expected = [t.clone() for t in locals_of(state)]
    names = {OURS: restore_ours, DCP: restore_dcp, TC: restore_tc}
    if not Path(folder, "tc").exists():
        del names[TC]
    for repetition in range(plan.repetitions):
        order = list(names.items())
        for name, restore in order if repetition % 2 == 0 else reversed(order):
            with told(name, lambda name=name: names.pop(name)):
                for t in locals_of(state):
                    t.fill_(-1.0)
                facts: dict[str, Any] = {"cold": None, "opening_s": 0.0}
                restore(state, folder, facts)
                right = all(map(torch.equal, locals_of(state), expected))
                tell(name, right=right, **facts)


@contextlib.contextmanager
def timed(folder: str, facts: dict[str, Any]) -> Iterator[None]:
    """Measure from when all ranks are ready. `moments`: on the shared clock; `read`: bytes by system calls."""
    dist.barrier()
    if dist.get_rank() == 0:
        facts["cold"] = drop_caches(folder)
    dist.barrier()
    before, cpu, started = bytes_read(), time.process_time(), time.monotonic()
    yield
    facts["moments"], facts["cpu_s"] = [started, time.monotonic()], time.process_time() - cpu
    facts["read"] = bytes_read() - before
    dist.barrier()


def restore_ours(state: dict[str, Any], folder: str, facts: dict[str, Any]) -> None:
    started = time.monotonic()
    with ckpt.Checkpointer(state, [ckpt.Tier(f"{folder}/ours", every=1000)], memory=None) as cp:
        facts["opening_s"] = time.monotonic() - started
        with timed(folder, facts):
            cp.restore()
        assert cp.last_restore is not None
        facts["counted"], facts["received"] = cp.last_restore.nbytes, cp.last_restore.nbytes_received


def restore_dcp(state: dict[str, Any], folder: str, facts: dict[str, Any]) -> None:
    tensors = payload(state)
    with timed(folder, facts):
        dcp.load(tensors, checkpoint_id=f"{folder}/dcp")
    set_state_dict(state["model"], state["optim"], model_state_dict=tensors["model"], optim_state_dict=tensors["optim"])


def restore_tc(state: dict[str, Any], folder: str, facts: dict[str, Any]) -> None:
    loader, tensors = manager(resharding=True), plain_payload(state)
    with timed(folder, facts):
        tensors = loader.load(f"{folder}/tc", into=tensors)
    inner(state).load_state_dict(tensors["model"])
    state["optim"].load_state_dict(tensors["optim"])
    loader.close()


def bytes_read() -> int:
    """Return the bytes that this process has read from files, from the page cache or not."""
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))


def drop_caches(folder: str) -> str:
    """Make the next reads cold, and return the method used."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "drop_caches"
    except OSError:
        for path in (path for path in Path(folder).rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "posix_fadvise"


# -- ranks as processes --


def tell(name: str, **facts: Any) -> None:
    print(json.dumps({"who": name, "rank": dist.get_rank(), **facts}), flush=True)


@contextlib.contextmanager
def told(name: str, give_up: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Report a peer that is missing or fails, and continue with the others. everystep must not fail."""
    try:
        yield
    except Exception as error:
        if name == OURS:
            raise
        missing = isinstance(error, ModuleNotFoundError)
        tell(name, failed="not installed" if missing else f"{type(error).__name__}: {shorten(str(error))}")
        give_up()


def shorten(message: str) -> str:
    """Return the first line of a message, or the last one if it has a traceback."""
    lines = message.strip().splitlines() or [""]
    return lines[-1 if "Traceback" in message else 0][:150]


def work(argument: str) -> None:
    """Run one rank: do the tasks that the starting process requested."""
    asked = json.loads(argument)
    plan = QUICK if asked["quick"] else FULL
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    dist.init_process_group("gloo")
    for action, folder, mode in asked["tasks"]:
        print(json.dumps({"task": [action, folder, mode]}), flush=True)
        {"train": train, "keep": keep, "fetch": fetch}[action](folder, plan, mode)
        dist.barrier()
    dist.destroy_process_group()


def launch(world: int, quick: bool, tasks: list[list[str]]) -> dict[tuple[str, ...], Told]:
    """Run tasks on this many ranks, and return their reports by task."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    quiet = {"OMP_WAIT_POLICY": "passive", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    shared = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    command = [sys.executable, __file__, "--rank", json.dumps({"quick": quick, "tasks": tasks})]
    found: dict[tuple[str, ...], Told] = {tuple(task): [] for task in tasks}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            each = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(f"{folder}/{rank}.out", "w") as out, open(f"{folder}/{rank}.err", "w") as err:
                ranks.append(subprocess.Popen(command, env=each, stdout=out, stderr=err))
        wait_for(ranks)
        for rank, process in enumerate(ranks):
            if process.returncode > 0:
                print(f"rank {rank} of {world}, {tasks}:\n{Path(folder, f'{rank}.err').read_text()[-3000:]}")
            task: tuple[str, ...] = ()
            for line in Path(folder, f"{rank}.out").read_text().splitlines():
                one = json.loads(line) if line.startswith("{") else {}
                task = tuple(one.get("task", task))
                if "who" in one:
                    found[task].append(one)
    return found


def wait_for(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; kill the others if one fails or the time limit is reached."""
    end = time.monotonic() + LAUNCH_S
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                print(f"{len(ranks)} ranks did not end within {LAUNCH_S:g} s")
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


# -- figures and tables --


def of(told: Told, name: str) -> tuple[Told, Figures]:
    """Return the reports about a library, and the reason if there are none."""
    mine = [one for one in told if one["who"] == name]
    why = next((one["failed"] for one in mine if "failed" in one), None if mine else "did not reach this task")
    return mine, {} if why is None else {"failed": why}


def figures_of_saving(told: Told, name: str, world: int, workload: Workload) -> Figures:
    mine, failed = of(told, name)
    if failed:
        return failed
    stalls, share = sorted(s for one in mine for s in one["stalls"]), workload.nbytes / world
    alone = statistics.median(s for one in mine for s in one["alone"])
    found = {
        "saves": len(mine[0]["stalls"]),
        "stall_median_s": statistics.median(stalls),
        "stall_p99_s": stalls[int(len(stalls) * 0.99)],
        "step_of_alone": statistics.median(s for one in mine for s in one["steps"]) / alone,
        "staged_of_share": max(one["staged"] for one in mine) / share,
        "written_of_share": max(one["written"] for one in mine) / share,
        "written_of_state": sum(one["written"] for one in mine) / workload.nbytes,
    }
    off = max(abs(found["staged_of_share"] - 1), abs(found["written_of_share"] - 1))
    return {**found, "fair": off <= GOALS["share"], "short": found["stall_median_s"] <= GOALS["stall_s"]}


def figures_of_restoring(told: Told, name: str, world: int, workload: Workload) -> Figures:
    mine, failed = of(told, name)
    if failed:
        return failed
    turns = list(zip(*([one for one in mine if one["rank"] == rank] for rank in range(world)), strict=True))

    def most(key: str) -> float:
        return max(sum(one[key] for one in turn) for turn in turns) / workload.nbytes

    seconds = [max(one["moments"][1] for one in turn) - min(one["moments"][0] for one in turn) for turn in turns]
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "cpu_s": statistics.median(sum(one["cpu_s"] for one in turn) for turn in turns),
        "read_of_state": most("counted" if name == OURS else "read"),
        "sent_of_state": most("received") if name == OURS else 0.0,
        "opening_s": statistics.median(max(one["opening_s"] for one in turn) for turn in turns),
        "right": all(one["right"] for one in mine),
        "cold": next(one["cold"] for one in mine if one["cold"]),
    }


def table(title: str, columns: dict[str, Callable[[Figures], str]], found: dict[str, dict[str, Figures]]) -> None:
    """Print a row for each library in each case; for a failed one, the reason."""
    rows, whys = [["", "", *columns]], list[str]()
    for case, name, figures in [(case, name, f) for case, by in found.items() for name, f in by.items()]:
        if why := figures.get("failed"):
            whys += [why] if why not in whys else []
            rows.append([case, name, f"({whys.index(why) + 1})", *("-" * (len(columns) - 1))])
        else:
            rows.append([case, name, *(cell(figures) for cell in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}\n")
    for row in rows:
        print(
            "  ".join(
                f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    for i, why in enumerate(whys):
        print(f"({i + 1}) {why}")


def ratio(key: str, digits: int = 3) -> Callable[[Figures], str]:
    return lambda f: f"{f[key]:.{digits}f}"


def ms(key: str) -> Callable[[Figures], str]:
    return lambda f: f"{f[key] * 1e3:.2f} ms"


def yes(key: str) -> Callable[[Figures], str]:
    return lambda f: "" if f[key] is None else "yes" if f[key] else "NO"


def show(found: dict[str, Any]) -> None:
    saving, restoring = found["saving"], found["restoring"]
    table(
        "DDP: bytes staged and written by the rank with the most, relative to its share of the state",
        {
            "staged / share": ratio("staged_of_share"),
            "written / share": ratio("written_of_share"),
            "written by all / state": ratio("written_of_state"),
            f"within {GOALS['share']:.0%}": yes("fair"),
        },
        {case: by for case, by in saving.items() if case.startswith("ddp")},
    )
    table(
        "Training time per save, over all ranks",
        {
            "saves": lambda f: str(f["saves"]),
            "median": ms("stall_median_s"),
            "99 %": ms("stall_p99_s"),
            "step / without saving": ratio("step_of_alone", 2),
            f"<= {GOALS['stall_s'] * 1e3:g} ms": yes("short"),
        },
        saving,
    )
    for by in restoring.values():
        for name, f in by.items():
            if "median_s" in f:
                f["of_dcp"] = f["median_s"] / by[DCP].get("median_s", float("nan"))
                f["fast"] = f["of_dcp"] <= GOALS["restore"] if name == OURS else None
    table(
        "Restoring with cold caches, until the last rank has its state",
        {
            "median": lambda f: f"{f['median_s'] * 1e3:.0f} ms",
            "least": lambda f: f"{min(f['seconds']) * 1e3:.0f}",
            "most": lambda f: f"{max(f['seconds']) * 1e3:.0f}",
            "/ DCP": ratio("of_dcp", 2),
            "CPU": lambda f: f"{f['cpu_s'] * 1e3:.0f} ms",
            "read / state": ratio("read_of_state"),
            "from ranks / state": ratio("sent_of_state", 2),
            "right": yes("right"),
            f"<= {GOALS['restore']:g} DCP": yes("fast"),
        },
        restoring,
    )


def measure(folder: str, quick: bool) -> dict[str, Any]:
    plan = QUICK if quick else FULL
    found: dict[str, Any] = {"saving": {}, "restoring": {}}
    for world in plan.worlds:
        tasks = [["train", f"{folder}/train-{mode}-{world}", mode] for mode in ("ddp", "fsdp2")]
        for (_, _, mode), told in launch(world, quick, tasks).items():
            by = {name: figures_of_saving(told, name, world, plan.trained) for name in (OURS, DCP, TC)}
            found["saving"][f"{mode}, {world}"] = by
    kept = {(mode, saved): f"{folder}/{mode}-{saved}" for mode, saved, _ in plan.resharded}
    saving: dict[str, Told] = {}  # by folder
    for world in sorted({saved for _, saved in kept}):
        tasks = [["keep", path, mode] for (mode, saved), path in kept.items() if saved == world]
        saving |= {path: told for (_, path, _), told in launch(world, quick, tasks).items()}
    fetched: dict[tuple[int, str], Told] = {}
    for world in sorted({restoring for _, _, restoring in plan.resharded}):
        tasks = [["fetch", kept[mode, saved], mode] for mode, saved, restoring in plan.resharded if restoring == world]
        fetched |= {(world, path): told for (_, path, _), told in launch(world, quick, tasks).items()}
    for mode, saved, world in plan.resharded:
        path = kept[mode, saved]
        told = [one for one in saving[path] if "failed" in one] + fetched[world, path]
        by = {name: figures_of_restoring(told, name, world, plan.restored) for name in (OURS, DCP, TC)}
        found["restoring"][f"{mode}, {saved} -> {world}"] = by
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller states and fewer cases, under 90 s")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return work(arguments.rank)
    plan, started = QUICK if arguments.quick else FULL, time.monotonic()
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    print(
        f"{machine['cpus']} cores, load {machine['load']:.1f}, torch {torch.__version__}, Python "
        f"{platform.python_version()}\ntrained:  {plan.trained}, batch {plan.trained.batch}; every step is kept in "
        f"memory, every {plan.every}th on disk\nrestored: {plan.restored}"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(folder, arguments.quick)
    show(found)
    cold = {f["cold"] for by in found["restoring"].values() for f in by.values() if "cold" in f}
    print(f"\ncold by {', '.join(cold)}; {time.monotonic() - started:.0f} s in total")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "plan": asdict(plan), **found}, indent=1))
    return None


if __name__ == "__main__":
    main()
