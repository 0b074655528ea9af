"""Small training runs in every way of dividing a model among ranks, each rank a process, over gloo on the CPU.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 python -c 'import parallel; parallel.main()' ACTION …

save ROOT OUT STEPS MODE…    train and checkpoint every mode into ROOT/MODE; OUT/MODE.pt: the gathered tensors
load ROOT OUT STEPS MODE…    restore every mode and compare with OUT/MODE.pt, train on; prints one JSON line a mode
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from processes import PYTHONPATH, start_python

SHARDS_HERE = hasattr(torch.cpu.Stream, "record_event")  # torch 2.6 has a fully_shard that wants a GPU

MODES = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "pp") if SHARDS_HERE else ("ddp", "tp", "pp")
WIDTH, HIDDEN, LAYERS = 20, 36, 5  # 36 is divided evenly by 2, 3 and 4; 20 unevenly by 3


class Block(nn.Module):
    """A residual pair of linear layers with a norm that has parameters and, in one of them, odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Named layers, so that a pipeline stage keeps the names that its layers have in the whole."""

    def __init__(self, layers: range = range(LAYERS)) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers.values():
            x = layer(x)
        return x


def whole() -> Net:
    torch.manual_seed(7)
    return Net()


def stage(rank: int, world: int) -> range:
    return range(LAYERS * rank // world, LAYERS * (rank + 1) // world)


def build(mode: str) -> dict[str, Any]:
    """The state of a mode on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net: nn.Module = whole()
    if mode == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif mode == "fsdp":
        shard(net, init_device_mesh("cpu", (world,)))
    elif mode == "hsdp":
        outer = 2 if world % 2 == 0 else 1
        shard(net, init_device_mesh("cpu", (outer, world // outer), mesh_dim_names=("replicate", "shard")))
    elif mode == "tp":
        parallelize(net, init_device_mesh("cpu", (world,)))
    elif mode == "fsdp_tp":
        inner = 2 if world % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("dp", "tp"))
        parallelize(net, mesh["tp"])
        shard(net, mesh["dp"])
    else:
        net.layers = nn.ModuleDict({str(i): net.layers[str(i)] for i in stage(rank, world)})
    optim = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 1000)
    return {"model": net, "optim": optim, "sched": schedule, "rng": ckpt.RNG(), "own": {"rank": rank}}


def shard(net: Any, mesh: Any) -> None:
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def parallelize(net: Any, mesh: Any) -> None:
    for layer in net.layers.values():
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train_step(mode: str, state: dict[str, Any], step: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    state["optim"].zero_grad()
    if mode == "pp":
        pipeline(state["model"], x, rank, world)
    else:
        tensor_parallel = {"tp": world, "fsdp_tp": 2 if world % 2 == 0 else 1}.get(mode, 1)  # these see the same data
        mine = x.chunk(world // tensor_parallel)[rank // tensor_parallel]
        (state["model"](mine) - mine.roll(1, 1)).pow(2).mean().backward()
    state["optim"].step()
    state["sched"].step()
    torch.rand(1 + rank)  # each rank's own generator goes its own way


def pipeline(net: nn.Module, x: Tensor, rank: int, world: int) -> None:
    """One batch forward and back through the stages."""
    into = x
    if rank > 0:
        into = torch.empty_like(x)
        dist.recv(into, rank - 1)
        into.requires_grad_()
    out = net(into)
    if rank < world - 1:
        dist.send(out.detach(), rank + 1)
        back = torch.empty_like(out)
        dist.recv(back, rank + 1)
        out.backward(back)
    else:
        (out - x.roll(1, 1)).pow(2).mean().backward()
    if rank > 0:
        dist.send(into.grad, rank - 1)


def gathered(state: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors, whole, by torch's own means; of a pipeline only this rank's."""
    net = state["model"]
    net = net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net
    found = dict(net.state_dict())
    names = {p: name for name, p in net.named_parameters()}
    for p, values in state["optim"].state.items():
        found |= {f"{names[p]}/{key}": v for key, v in values.items() if isinstance(v, Tensor)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in found.items()}


def save(mode: str, root: str, out: str, steps: int) -> dict[str, Any]:
    state = build(mode)
    with ckpt.Checkpointer(state, ckpt.Tier(f"{root}/{mode}", every=2)) as cp:
        assert cp.restore(default=0) == 0
        for step in range(steps):
            train_step(mode, state, step)
            cp.step(step + 1)
    tensors = gathered(state)
    if mode == "pp":
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, tensors)
        tensors = {name: t for each in every for name, t in each.items()}
    if dist.get_rank() == 0:
        torch.save(tensors, f"{out}/{mode}.pt")
    return {"step": steps}


def load(mode: str, root: str, out: str, steps: int) -> dict[str, Any]:
    state = build(mode)
    expected = torch.load(f"{out}/{mode}.pt", weights_only=True)
    with ckpt.Checkpointer(state, ckpt.Tier(f"{root}/{mode}", every=1000), memory=ckpt.Memory(every=1000)) as cp:
        step = cp.restore()
        done = cp.last_restore
        assert done is not None
        found = gathered(state)
        wrong = [name for name, t in found.items() if not torch.equal(t, expected[name])]
        train_step(mode, state, step)
    missing = sorted(expected.keys() - found.keys()) if mode != "pp" else []
    return {
        "step": step,
        "tier": done.tier,
        "wrong": wrong + missing,
        "tensors": len(found),
        "own": state["own"]["rank"],
        "lr": state["optim"].param_groups[0]["lr"],
        "read": done.nbytes,
        "received": done.nbytes_received,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    action, root, out, steps, *modes = sys.argv[1:]
    for mode in modes:
        try:
            result = {"save": save, "load": load}[action](mode, root, out, int(steps))
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"mode": mode, "rank": dist.get_rank(), **result}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def launch(
    world: int,
    code: str,
    *arguments: object,
    port: int,
    timeout_s: float = 120.0,
    python: str | Path = sys.executable,
    **environment: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python code as the ranks of one job on this machine, and wait for all of them."""
    base = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        **environment,
    }
    processes = [
        start_python(
            [str(python), "-c", code, *map(str, arguments)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    done = []
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=timeout_s)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr))
    finally:
        for process in processes:
            process.kill()
    return done


def said_by(
    python: Path, world: int, code: str, *words: object, **environment: str
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the exit codes of the ranks of a job under a foreign interpreter, and the JSON output of the first one.
    They end well, or by SIGKILL."""
    more = {"LOCAL_WORLD_SIZE": str(world), "PYTHONWARNINGS": "ignore", **environment}
    done = launch(world, code, *words, port=free_port(), timeout_s=280, python=python, **more)
    codes = [one.returncode for one in done]
    assert set(codes) <= {0, -signal.SIGKILL}, "\n".join(one.stderr[-4000:] for one in done)
    return codes, [json.loads(line) for line in done[0].stdout.splitlines() if line.startswith('{"')]


def reports(done: list[subprocess.CompletedProcess[str]]) -> dict[str, list[dict[str, Any]]]:
    """Return the output of the ranks, by mode, in rank order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for process in done:
        assert process.returncode == 0, process.stderr[-4000:]
        for line in process.stdout.splitlines():
            if line.startswith("{"):
                one = json.loads(line)
                found.setdefault(one["mode"], []).append(one)
    return found


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


MAIN = "import parallel; parallel.main()"

if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    main()
