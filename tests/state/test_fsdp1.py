"""Tests that FSDP1 and ZeRO optimizers are rejected, and that the suggested move to `fully_shard` is exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import ckpt
import ckpt.dcp
from commands import spawn
from parallel import SHARDS_HERE, free_port, launch

MAIN = "import sys; sys.path.insert(0, sys.argv.pop()); import test_fsdp1; test_fsdp1.main()"
KINDS = ("fsdp1", "zero")
STEPS = 3


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))


def step(model: nn.Module, optim: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    optim.zero_grad()
    (model(x) - x).square().mean().backward()
    optim.step()


def whole(value: Any) -> Any:
    """Gather a whole tensor. torch's own way to whole states of FSDP1 (`full_state_dict`) crashes on the CPU."""
    if isinstance(value, ShardedTensor):
        full = torch.empty(value.size()) if dist.get_rank() == 0 else None
        value.gather(0, full)
        return full
    return value.full_tensor() if isinstance(value, DTensor) else value


def by_name(weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
    names = {f"model.{name}": whole(value) for name, value in weights.items()}
    return names | {f"{name}.{key}": whole(v) for name, own in moments["state"].items() for key, v in own.items()}


def begin(kind: str, folder: Path) -> None:
    """Train, get rejected, and save in the suggested way; store the whole state in KIND-had.pt."""
    model: Any
    if kind == "fsdp1":
        model = FullyShardedDataParallel(net(0), device_id=torch.device("cpu"), use_orig_params=True)
        optim: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    else:
        model = nn.parallel.DistributedDataParallel(net(0))
        optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for number in range(STEPS):
        step(model, optim, number)
    try:
        ckpt.Checkpointer({"model": model, "optim": optim}, str(folder / "refused"))
    except ckpt.errors.StateError as error:
        print("refused", error, flush=True)
    if kind == "fsdp1":
        weights, moments = get_state_dict(model, optim)
        writer = ckpt.dcp.StorageWriter(str(folder / kind))
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"step-{STEPS}", storage_writer=writer)
        names = by_name(weights, moments)
    else:
        optim.consolidate_state_dict(to=0)
        if dist.get_rank():
            return
        state = {"model": model.module.state_dict(), "optim": optim.state_dict()}
        torch.save(state, folder / f"{kind}.pt")
        order = [name for name, _ in model.module.named_parameters()]
        names = {f"model.{k}": v for k, v in state["model"].items()}
        names |= {f"{order[n]}.{key}": v for n, own in state["optim"]["state"].items() for key, v in own.items()}
    if dist.get_rank() == 0:
        torch.save(names, folder / f"{kind}-had.pt")


def go_on(kind: str, folder: Path) -> None:
    """Restore into `fully_shard` from other weights, store the whole state in KIND-has.pt, and train on."""
    model = net(1)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.AdamW(model.parameters(), 1e-3)
    with ckpt.Checkpointer({"model": model, "optim": optim}, str(folder / f"{kind}-new")) as cp:
        start = cp.restore(default=0)
        names = by_name(*get_state_dict(model, optim))
        if dist.get_rank() == 0:
            torch.save(names, folder / f"{kind}-has.pt")
        print("started", kind, start, optim.param_groups[0]["lr"], flush=True)
        step(model, optim, start)
        cp.step(start + 1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in KINDS:
        (begin if sys.argv[1] == "begin" else go_on)(kind, Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp1")


@pytest.fixture(scope="module")
def refusals(folder: Path) -> list[str]:
    done = launch(2, MAIN, "begin", folder, Path(__file__).parent, port=free_port())
    assert all(one.returncode == 0 for one in done), [one.stderr[-3000:] for one in done]
    return [line for line in done[0].stdout.splitlines() if line.startswith("refused")]


@pytest.fixture(scope="module")
def started(folder: Path, refusals: list[str]) -> list[str]:
    """Return the output of three ranks, after the commands that the errors suggest."""
    if not SHARDS_HERE:
        pytest.skip("this torch shards on a GPU only")
    for words in (
        ("restore", folder / "fsdp1", "--to", folder / "fsdp1-new", "--format", "run"),
        ("import", folder / "zero.pt", folder / "zero-new", "--step", STEPS),
    ):
        ended = spawn(*words)
        assert ended.returncode == 0, ended.stderr
    done = launch(3, MAIN, "go_on", folder, Path(__file__).parent, port=free_port())
    assert all(one.returncode == 0 for one in done), [one.stderr[-3000:] for one in done]
    return [line for line in done[0].stdout.splitlines() if line.startswith("started")]


def test_rejection_names_object_and_remedy(refusals: list[str], folder: Path) -> None:
    """The error names the replacement, and the call and command to move a running training; nothing was created."""
    fsdp1, zero = refusals
    assert "model: FullyShardedDataParallel" in fsdp1 and "fully_shard" in fsdp1
    assert "ckpt.dcp.StorageWriter(OLD)" in fsdp1 and "`ckpt export OLD --to NEW --format run`" in fsdp1
    assert "optim: ZeroRedundancyOptimizer" in zero and "fully_shard" in zero
    assert "consolidate_state_dict()" in zero and "`ckpt import FILE NEW --step N`" in zero
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_with_fully_shard(kind: str, started: list[str], folder: Path) -> None:
    """Three ranks instead of two: step, weights, moments, counts and learning rate are equal."""
    assert f"started {kind} {STEPS} 0.01" in started
    had, has = (torch.load(folder / f"{kind}-{word}.pt", weights_only=True) for word in ("had", "has"))
    assert len(had) == 4 + 4 * 3 and had.keys() == has.keys()
    assert all(torch.equal(had[name], has[name]) for name in had)
    assert STEPS + 1 in [one.step for one in ckpt.Run(str(folder / f"{kind}-new")).list()]
