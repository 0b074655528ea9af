"""The recipe for Lightning's Fabric: training that is killed and restarted ends like uninterrupted training."""

from __future__ import annotations

import pytest

from parallel import free_port, launch
from processes import killed, run_script, warm

pytest.importorskip("lightning")

TRAINING = """
import hashlib, os, sys
import torch
from lightning.fabric import Fabric
import ckpt

run, kill_at, ranks = sys.argv[1], int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
optim = torch.optim.AdamW(plain.parameters(), 1e-2)
fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
fabric.launch()
model, optim = fabric.setup(plain, optim)
with ckpt.Checkpointer({"model": model, "optim": optim, "rng": ckpt.RNG()}, run, every=100) as cp:
    start = cp.restore(default=0)
    for step in range(start, 8):
        seed = 10 * step + int(os.environ.get("RANK", "0"))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optim.zero_grad()
        fabric.backward((model(x) - x).square().mean())
        optim.step()
        save = cp.step(step + 1)
        if step + 1 == kill_at:
            save.wait_staged(60.0)
            os.kill(os.getpid(), 9)
weights = b"".join(p.detach().numpy().tobytes() for p in plain.parameters())
print("started at", start, "ended with", hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_killed_fabric_training_continues_exactly(run_dir: str, ranks: int) -> None:
    """Training continues at the last step, with the weights, moments and dropout of an uninterrupted run."""

    def start(place: str, kill_at: int = 0) -> list[str]:
        words = place, str(kill_at)
        ended = launch(ranks, TRAINING, *words, port=free_port()) if ranks > 1 else [run_script(TRAINING, *words)]
        if kill_at:
            assert any(map(killed, ended)), ended
        else:
            assert not any(one.returncode for one in ended), ended
        return [line for one in ended for line in one.stdout.splitlines() if line.startswith("started")]

    with warm("lightning.fabric"):
        start(run_dir, kill_at=5)
        again, whole = start(run_dir), start(f"{run_dir}-whole")
    assert len(again) == ranks and all(line.startswith("started at 5 ") for line in again)
    assert {line.split()[-1] for line in again} == {line.split()[-1] for line in whole}
    assert len({line.split()[-1] for line in whole}) == 1
