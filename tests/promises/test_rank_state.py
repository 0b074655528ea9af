"""Optimizers that keep state on some ranks only, next to parameters that DDP keeps equal on all of them."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt
import inside
from parallel import free_port, launch

STEPS = 4


class Muon(torch.optim.Optimizer):
    """Keeps the momentum of parameter i on rank i % world only, as Keller Jordan's Muon does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for i, p in enumerate(params):
            if i % dist.get_world_size() == dist.get_rank():
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(momentum.lerp_(p.grad, 0.1), alpha=0.05)
        for i, p in enumerate(params):
            dist.broadcast(p, i % dist.get_world_size())


class Sharded(torch.optim.AdamW):
    """ZeRO by hand: each rank steps every second parameter, and broadcasts it."""

    def __init__(self, params: Any) -> None:
        self.all = list(params)
        super().__init__(self.all[dist.get_rank() :: dist.get_world_size()])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for i, p in enumerate(self.all):
            dist.broadcast(p.detach(), i % dist.get_world_size())


def build(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    one = kind == "one matrix"  # rank 0 has all state, and rank 1 has none
    net = nn.parallel.DistributedDataParallel(
        nn.Linear(60, 50, bias=False) if one else nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 3))
    )
    params = list(net.parameters())
    if kind == "two optimizers":
        return {"net": net, "muon": Muon(params[:2]), "adam": torch.optim.AdamW(params[2:])}
    how = {"sharded": Sharded, "late": torch.optim.AdamW, "gone": torch.optim.AdamW}.get(kind, Muon)
    return {"net": net, "optim": how(params)}


def train(state: dict[str, Any], kind: str, step: int) -> None:
    rank = dist.get_rank()
    optims = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
    x = torch.randn(4, 60, generator=torch.Generator().manual_seed(10 * step + rank))
    state["net"](x).square().mean().backward()
    for optim in optims:
        optim.step()
        optim.zero_grad()
    if kind in ("late", "gone"):
        values = optims[0].state[optims[0].param_groups[0]["params"][0]]
        values.setdefault("more", torch.zeros(7, 300)).add_(step)
        if rank == (1 if kind == "late" else 0) and (kind == "late" or step > 1):
            del values["more"]


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of this rank: weights, and the state of each parameter by its position."""
    found = {f"net {name}": p.detach() for name, p in state["net"].named_parameters()}
    positions = {p: i for i, p in enumerate(state["net"].parameters())}
    for name, optim in state.items():
        for param, values in optim.state.items() if isinstance(optim, torch.optim.Optimizer) else ():
            found |= {f"{name} {positions[param]} {key}": value for key, value in values.items()}
    return found


def main() -> None:
    """Runs on each rank: restore, compare with what this rank had at that step, train, save and die."""
    kind, where, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), dict[str, Any]()
    if "unchecked" in sys.argv:
        inside.assume_common_state()
    inside.wait_for_common_state(1.0)
    state = build(kind)
    tiers = None if where == "memory" else [ckpt.Tier(folder / "run", every=2)]
    cp = ckpt.Checkpointer(state, tiers, options=ckpt.Options(name=f"rank-state-{kind}"), memory=ckpt.Memory(every=1))
    try:
        start = found["start"] = cp.restore(default=0, strict="lenient" not in sys.argv)
    except ckpt.CheckpointError as error:
        print(json.dumps({"restore": str(error)}), flush=True)
        os._exit(0)
    if start:
        there, here = torch.load(folder / f"{rank}-{start}.pt"), tensors(state)
        found["bits"] = there.keys() == here.keys() and all(torch.equal(there[key], here[key]) for key in there)
        found["tensors"] = len(here)
    steps = 2 if kind == "gone" else STEPS  # later steps in memory would replace the last one that all ranks have
    for step in range(start + 1, start + steps + 1):
        train(state, kind, step)
        torch.save(copy.deepcopy(tensors(state)), folder / f"{rank}-{step}.pt")
        try:
            cp.step(step)
            saved = cp.save()
            saved.wait_staged(60)
            if tiers:
                saved.wait_durable(10)
            found["acknowledged"] = step
        except ckpt.CheckpointError as error:
            found.setdefault("errors", []).append(str(error))
    print(json.dumps(found), flush=True)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def job(kind: str, where: str, folder: Path, *more: str, world: int = 2) -> list[dict[str, Any]]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_rank_state as t; t.main()"
    done = launch(world, code, kind, where, folder, *more, port=free_port(), timeout_s=100)
    assert all(one.stdout.startswith("{") for one in done), "".join(one.stderr[-4000:] for one in done)
    return [json.loads(one.stdout.splitlines()[-1]) for one in done]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("muon", "folder"),
        ("muon", "memory"),
        ("one matrix", "folder"),
        ("sharded", "memory"),
        ("two optimizers", "folder"),
        ("late", "folder"),
        ("late", "memory"),
    ],
)
def test_optimizer_state_of_some_ranks_returns_bit_for_bit(kind: str, where: str, tmp_path: Path) -> None:
    """Every save is acknowledged. After a kill, each rank restores the newest step, with the state that it had."""
    for start in (0, STEPS):
        for one in job(kind, where, tmp_path):
            assert one["start"] == start and one["acknowledged"] == start + STEPS and "errors" not in one
            assert start == 0 or one["bits"]


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_negative_control_unchecked_state_cannot_be_restored(where: str, tmp_path: Path) -> None:
    """If all state next to a replicated parameter is divided without a comparison, no step can be restored."""
    for one in job("muon", where, tmp_path, "unchecked"):
        assert "acknowledged" not in one if where == "folder" else one["acknowledged"] == STEPS
    assert any("no checkpoint could be restored" in one["restore"] for one in job("muon", where, tmp_path))


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_divided_state_that_one_rank_drops_fails_by_name(where: str, tmp_path: Path) -> None:
    """The rank that no longer has the state raises an error. A restart continues from the last step before it."""
    first, other = job("gone", where, tmp_path)
    assert first["acknowledged"] == 1
    assert "this rank no longer has optim.state.net.0.weight.more" in first["errors"][0]
    assert where == "memory" or other["acknowledged"] == 1
    for one in job("gone", where, tmp_path):
        assert one["start"] == 1 and one["bits"]


def test_optimizer_state_of_some_ranks_is_not_restored_on_fewer(tmp_path: Path) -> None:
    """The error names the entries and the remedy. With `strict=False`, a rank restores what its own rank had."""
    job("muon", "folder", tmp_path)
    (one,) = job("muon", "folder", tmp_path, world=1)
    for text in ("optim.state.net.0.bias.momentum_buffer was saved by rank 1", "strict=False"):
        assert text in one["restore"]
    (one,) = job("muon", "folder", tmp_path, "lenient", world=1)
    assert one["start"] == STEPS and one["bits"]
