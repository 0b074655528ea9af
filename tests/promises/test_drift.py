"""Ranks with different values of replicated tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
import inside
from parallel import free_port, launch, reports

State = dict[str, Any]


def build(kind: str) -> State:
    """A state of which ranks hold something equal, after a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 3))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // 2, 2))
        net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Replicate(), Shard(0)]))
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=kind != "own buffers") if kind != "hsdp" else net
    if kind == "frozen":
        net[0].requires_grad_(requires_grad=False)
    optim = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-3)
    train(optim)
    return {"model": model, "optim": optim}


def train(optim: torch.optim.Optimizer) -> None:
    for param in (p for group in optim.param_groups for p in group["params"]):
        param.grad = torch.full_like(param, 0.5)
    optim.step()


def inner(state: State) -> nn.Sequential:
    model = state["model"]
    found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(found, nn.Sequential)
    return found


def drifting(state: State, kind: str) -> Tensor:
    """The tensor that differs from rank to rank."""
    net, optim = inner(state), state["optim"]
    if kind == "moment":
        return optim.state[net[2].weight]["exp_avg_sq"]  # type: ignore[no-any-return]
    if kind == "step":
        return optim.state[net[2].bias]["step"]  # type: ignore[no-any-return]
    if kind in ("buffers", "own buffers"):
        return net[1].running_mean  # type: ignore[return-value]
    weight = net[0].weight
    return weight._local_tensor if kind == "hsdp" else weight  # type: ignore[no-any-return, union-attr]


NAMED = {
    "one element": "model.0.weight",
    "moment": "optim.state.model.2.weight.exp_avg_sq",
    "step": "optim.state.model.2.bias.step",
    "frozen": "model.0.weight",
    "no optimizer": "model.0.weight",
    "late": "model.0.weight",
}
LEGITIMATE = ["buffers", "own buffers"]


@torch.no_grad()
def drift(state: State, kind: str, rank: int) -> None:
    tensor = drifting(state, kind)
    if kind == "one element":
        tensor.view(-1)[31234] += rank  # not a sampled element
    else:
        tensor += rank


def save() -> None:
    """Runs on each of the ranks: one durable save before the drift, two after it."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    for kind in sys.argv[2:]:
        state, errors = build(kind), list[str]()
        tiers = [ckpt.Tier(folder / kind, every=1000)]
        saved = {key: one for key, one in state.items() if key != "optim" or kind != "no optimizer"}
        with ckpt.Checkpointer(
            saved, tiers, options=ckpt.Options(on_error="warn"), memory=ckpt.Memory(linger_s=0)
        ) as cp:
            cp.save(1).wait_durable(60)
            for number in (2, 4):
                train(state["optim"])
                if number == 2:
                    drift(state, kind, rank)
                if kind == "late":
                    cp.step(number)  # so it is in memory before a save to a tier is requested
                try:
                    cp.save(number).wait_durable(60)
                    errors.append("")
                except ckpt.errors.SaveError as error:
                    errors.append(str(error))
                    until(lambda cp=cp: inside.differing_replicas(cp))
                dist.barrier()
        own = drifting(state, kind).double().sum().item()
        print(json.dumps({"mode": kind, "errors": errors, "own": own}), flush=True)
        if kind != "hsdp":
            fresh = build(kind)
            wanted = {key: one for key, one in fresh.items() if key in saved}
            with ckpt.Checkpointer(wanted, [ckpt.Tier(folder / kind)], memory=None) as cp:
                step = cp.restore()
            own = drifting(fresh, kind).double().sum().item()
            print(json.dumps({"mode": f"{kind} restored", "step": step, "own": own}), flush=True)
    dist.destroy_process_group()


def until(condition: Any) -> None:
    import time

    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_drift as t; t.save()"
    kinds = (*NAMED, *LEGITIMATE)
    return 3, folder, reports(launch(3, code, folder, *kinds, port=free_port(), timeout_s=300))


@pytest.mark.parametrize("kind", NAMED)
def test_commit_fails_by_name_if_ranks_have_drifted(kind: str, job: Any) -> None:
    """No rank commits a checkpoint that mixes ranks, not even if one element differs. The next one has each rank's own
    tensor, and so has each rank after a restore."""
    world, _, said = job
    listed = ", ".join(map(str, range(world)))
    for rank in range(world):
        first, second = said[kind][rank]["errors"]
        assert f"ranks {listed} have different values of replicated tensors: {NAMED[kind]}. " in first
        assert second == ""
        restored = said[f"{kind} restored"][rank]
        assert restored["step"] == 4 and restored["own"] == said[kind][rank]["own"]
    assert len({one["own"] for one in said[kind]}) == world


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_buffers_that_differ_by_design_are_committed(kind: str, job: Any) -> None:
    """DDP overwrites the buffers of other ranks by those of rank 0, or leaves each rank its own."""
    world, _, said = job
    for rank in range(world):
        assert said[kind][rank]["errors"] == ["", ""]
        counts = rank if kind == "own buffers" else 0
        assert said[f"{kind} restored"][rank]["own"] == said[kind][counts]["own"]


def test_drifted_shards_are_refused_at_each_commit(tmp_path: Path) -> None:
    """HSDP: the replicas of a shard differ."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_drift as t; t.save()"
    said = reports(launch(4, code, tmp_path, "hsdp", port=free_port()))["hsdp"]
    assert len(said) == 4
    for one in said:
        assert all(error.count("replicated tensors: model.0.weight") for error in one["errors"])


def test_drifted_weights_are_refused_on_another_number_of_ranks(job: Any, tmp_path: Path) -> None:
    """Each rank's own weight exists; none is chosen silently."""
    _, folder, _ = job
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 3))
    with ckpt.Checkpointer({"model": net, "optim": torch.optim.AdamW(net.parameters())}, folder / "one element") as cp:
        with pytest.raises(ckpt.errors.MismatchError, match=r"model\.0\.weight has different values on ranks 0, 1"):
            cp.restore()
