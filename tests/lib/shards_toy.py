"""Ranks that shard tensors in every way that `ckpt.state.Shards` can describe.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 python -c 'import shards_toy; shards_toy.main()' ACTION …

save RUN               three steps, the last one committed
load RUN               restore, and print what is wrong, as one JSON line
refuse RUN CASE…       save shards that contradict each other; print the errors
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ckpt

SHAPES: dict[str, tuple[int, ...]] = {
    "run": (7, 3, 5),
    "rows": (13, 4),
    "columns": (6, 9),
    "pieces": (11, 10),
    "parallel": (8, 6),
    "replica": (40, 300),
    "halves": (50, 40),
    "step": (),
    "nothing": (0, 4),
}


def wholes(step: int) -> dict[str, Tensor]:
    """Return the whole tensors at a step."""
    found = {}
    for name, shape in SHAPES.items():
        found[name] = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode())))
    return found


def edges(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return the range of a rank in `count` things: uneven shares; with several ranks the second has none."""
    weights = [1 if one == 0 else 0 if one == 1 else 2 for one in range(world)]
    total = sum(weights)
    return count * sum(weights[:rank]) // total, count * sum(weights[: rank + 1]) // total


def divide(of: dict[str, Tensor], rank: int, world: int) -> dict[str, list[ckpt.state.Shard]]:
    """Copies of what this rank has of each, as shards."""
    found: dict[str, list[ckpt.state.Shard]] = {}
    low, high = edges(105, rank, world)
    found["run"] = [ckpt.state.Shard(of["run"].flatten()[low:high].clone(), SHAPES["run"], start=low)]
    low, high = edges(13, rank, world)
    found["rows"] = [ckpt.state.Shard(of["rows"][low:high].clone(), (13, 4), (low, 0))] if low < high else []
    low, high = 9 * rank // world, 9 * (rank + 1) // world
    room = torch.zeros(6, 30)  # of which the columns are a view with gaps
    room[:, low:high] = of["columns"][:, low:high]
    found["columns"] = [ckpt.state.Shard(room[:, low:high], (6, 9), (0, low))]
    flat = of["pieces"].flatten()
    found["pieces"] = [
        ckpt.state.Shard(flat[at : at + 7].clone(), (11, 10), start=at) for at in range(7 * rank, 110, 7 * world)
    ]
    # Rows divided among all ranks, as tensor parallelism does, and of its own each rank has flat runs.
    low, high = 8 * rank // world, 8 * (rank + 1) // world
    mine, size = of["parallel"][low:high].flatten(), 6 * (high - low)
    found["parallel"] = [
        ckpt.state.Shard(mine[a:b].clone(), (8, 6), (low, 0), within=(high - low, 6), start=a)
        for a, b in ((0, size // 3), (size // 3, size))
    ]
    every = tuple(range(world))
    found["replica"] = [ckpt.state.Shard(of["replica"].clone(), SHAPES["replica"], replicas=every)]
    found["step"] = [ckpt.state.Shard(of["step"].clone(), (), replicas=every)]
    found["nothing"] = [ckpt.state.Shard(of["nothing"].clone(), (0, 4))]
    half = 25 * (rank % 2) if world > 1 else 0  # ranks of one parity hold the same half
    same = every[rank % 2 :: 2] if world > 1 else every
    size = 25 if world > 1 else 50
    found["halves"] = [ckpt.state.Shard(of["halves"][half : half + size].clone(), (50, 40), (half, 0), replicas=same)]
    return found


def save(run: str) -> None:
    held = divide(wholes(0), dist.get_rank(), dist.get_world_size())
    with ckpt.Checkpointer({"s": ckpt.state.Shards(lambda: held)}, ckpt.Tier(run, every=100)) as cp:
        cp.restore(default=0)
        for step in (1, 2, 3):
            for name, now in divide(wholes(step), dist.get_rank(), dist.get_world_size()).items():
                for mine, one in zip(held[name], now, strict=True):
                    mine.tensor.copy_(one.tensor)
            cp.save(step).wait_durable()


def load(run: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    held = divide({name: torch.zeros(shape) for name, shape in SHAPES.items()}, rank, world)
    heard: list[bool] = []

    def restored() -> None:
        heard.append(bool(held["step"][0].tensor == wholes(3)["step"]))

    with ckpt.Checkpointer({"s": ckpt.state.Shards(held, restored=restored)}, run) as cp:
        step = cp.restore()
    expected = divide(wholes(3), rank, world)
    wrong = [
        name
        for name, mine in held.items()
        if not all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, expected[name], strict=True))
    ]
    print(json.dumps({"step": step, "wrong": wrong, "restored": heard}), flush=True)


def case(name: str, rank: int) -> dict[str, Any]:
    """Return shards that contradict each other on two ranks. `agreed`: shards that do not."""
    full = torch.arange(20.0)
    low, high = 10 * rank, 10 * rank + 10
    piece, shape = full[low:high], (4, 5)
    if name == "twice":
        return {"w": ckpt.state.Shard(full[: high + 2] if rank == 0 else piece, shape, start=low)}
    if name == "hole":
        return {"w": ckpt.state.Shard(piece[: 8 + 2 * rank], shape, start=low)}
    if name == "dtype":
        return {"w": ckpt.state.Shard(piece.double() if rank else piece, shape, start=low)}
    if name == "dtype of nothing":
        return {
            "w": ckpt.state.Shard(full.double()[:0], shape, start=0) if rank else ckpt.state.Shard(full, shape, start=0)
        }
    if name == "shape":
        return {"w": ckpt.state.Shard(piece, (20,) if rank else shape, start=low)}
    if name == "not named":
        return {
            "w": ckpt.state.Shard(piece, shape, start=low),
            **({"v": ckpt.state.Shard(full, (20,))} if rank else {}),
        }
    if name == "replicas of one":
        return {"w": ckpt.state.Shard(full, (20,), replicas=(0, 1) if rank == 0 else None)}
    return {"w": ckpt.state.Shard(piece, shape, start=low)}


def refuse(run: str, *cases: str) -> None:
    for name in cases:
        said = ""
        state = {"s": ckpt.state.Shards(case(name, dist.get_rank()))}
        with ckpt.Checkpointer(state, f"{run}-{name.replace(' ', '-')}") as cp:
            cp.restore(default=0)
            try:
                cp.save(1).wait_durable()
            except ckpt.CheckpointError as error:
                said = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": name, "said": said}), flush=True)
        dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    action, run, *words = sys.argv[1:]
    {"save": save, "load": load, "refuse": refuse}[action](run, *words)
    dist.barrier()
    dist.destroy_process_group()


MAIN = "import shards_toy; shards_toy.main()"
