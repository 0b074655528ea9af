"""The recipe for a custom loop with Accelerate: training that is killed and restarted ends like uninterrupted
training."""

from __future__ import annotations

import subprocess

import pytest
import torch

from parallel import free_port, launch
from processes import REPO, killed, run_script, warm

pytest.importorskip("accelerate")

SCRIPT = REPO / "examples" / "accelerate_loop.py"


def start(ranks: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Start the script on several ranks. One rank has no launcher."""
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    if ranks == 1:
        return [run_script(code, *arguments)]
    return launch(ranks, code, *arguments, port=free_port())


def lines(ended: list[subprocess.CompletedProcess[str]], beginning: str) -> list[str]:
    assert all(one.returncode == 0 for one in ended), ended
    return sorted(line for one in ended for line in one.stdout.splitlines() if line.startswith(beginning))


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_killed_accelerate_training_continues_exactly(run_dir: str, ranks: int) -> None:
    """All losses and weights equal those of an uninterrupted run, in the second epoch too."""
    with warm("accelerate"):
        ended = start(ranks, run_dir, "--kill-at", "17" if ranks == 2 else "29")
        assert all(one.returncode for one in ended) and any(map(killed, ended)), ended
        assert not any("rank 0" in one.stdout for one in ended), ended
        resumed = start(ranks, run_dir)
        assert int(lines(resumed, "starts at")[0].split()[-1]) in ((16, 17) if ranks == 2 else (28, 29))
        alone = start(ranks, f"{run_dir}-2")
    assert lines(resumed, "rank") == lines(alone, "rank")
    assert len(lines(resumed, "rank")) == ranks


SHARDED = """
import os, sys
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
import ckpt

run, steps, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
print("plugin", type(accelerator.prepare(nn.Linear(2, 2))).__name__)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.2), nn.Linear(9, 9))
mesh = init_device_mesh("cpu", (accelerator.num_processes,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.randn(64, 9, generator=torch.Generator().manual_seed(1))
generator = torch.Generator().manual_seed(2)  # else a restart of the loader draws from the global one
loader = accelerator.prepare(DataLoader(data, batch_size=4, generator=generator))
torch.manual_seed(accelerator.process_index)
with ckpt.Checkpointer({"model": model, "optim": optim, "rng": ckpt.RNG()}, run, every=100) as cp:
    start = cp.restore(default=0)
    for step, x in zip(range(steps), loader):
        if step < start:
            continue
        optim.zero_grad()
        accelerator.backward((model(x) - x).square().mean())
        optim.step()
        save = cp.step(step + 1)
        if step + 1 == kill_at:
            save.wait_staged(60.0)
            dist.barrier()
            os.kill(os.getpid(), 9)
whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
for name, p in model.named_parameters():
    whole |= {f"{name}.{key}": one.full_tensor() for key, one in optim.state[p].items() if one.ndim}
if accelerator.is_main_process:
    torch.save(whole, f"{run}.pt")
print("started at", start)
dist.destroy_process_group()
"""


def test_fully_shard_without_accelerate_plugin_continues_exactly(run_dir: str) -> None:
    """Two killed ranks continue at the last step and end like an uninterrupted run. One rank restores the result.

    On the CPU, FSDP2's plugin wraps models with DDP as documented."""

    def sharded(ranks: int, place: str, steps: int, kill_at: int = 0) -> list[subprocess.CompletedProcess[str]]:
        return launch(ranks, SHARDED, place, steps, kill_at, port=free_port())

    with warm("accelerate"):
        ended = sharded(2, run_dir, 7, kill_at=4)
        assert any(map(killed, ended)), ended
        resumed = sharded(2, run_dir, 7)
        assert lines(resumed, "started") == ["started at 4"] * 2
        assert lines(resumed, "plugin") == ["plugin DistributedDataParallel"] * 2
        assert lines(sharded(2, f"{run_dir}-whole", 7), "started") == ["started at 0"] * 2
        again, whole = (torch.load(f"{place}.pt", weights_only=True) for place in (run_dir, f"{run_dir}-whole"))
        assert len(whole) == 12 and whole.keys() == again.keys()
        assert all(torch.equal(again[name], whole[name]) for name in whole)
        assert lines(sharded(1, run_dir, 7), "started") == ["started at 7"]
    alone = torch.load(f"{run_dir}.pt", weights_only=True)
    assert all(torch.equal(alone[name], whole[name]) for name in whole)
