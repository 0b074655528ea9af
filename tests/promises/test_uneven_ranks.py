"""Ranks that do not do the same: they end at different steps, only some call step(), or each has a state of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt
from parallel import SHARDS_HERE, free_port, launch
from processes import eventually

# Each rank makes its number of steps, and prints what each of its calls raised. agree_timeout_s is 300.
UNEVEN = """
import json, os, signal, sys, time, torch, torch.distributed as dist, ckpt
run, how, *counts = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
last, others = int(counts[rank]), dist.distributed_c10d._get_default_store()
net = torch.nn.Linear(8, 8)
optim = torch.optim.SGD(net.parameters(), 0.1)
best = ckpt.Best("loss") if "scores" in how else None
cp = ckpt.Checkpointer({"net": net, "optim": optim}, ckpt.Tier(run, every=2), best=best)
cp.restore(default=0)

def train(first, last):
    for step in range(first, last + 1):
        net(torch.ones(1, 8)).sum().backward()
        optim.step()
        optim.zero_grad()
        try: cp.step(step)
        except ckpt.errors.SaveError: pass  # an older step failed, because another rank has left

def wait_for(key):
    while not others.check([key]):
        time.sleep(0.05)

found = {}
try:
    train(1, last)
    if (how, rank) in (("one raises", 1), ("one raises, the other scores", 0)):
        with cp: raise ValueError("mine")
    if how == "one raises, the other scores":
        train(last + 1, last + 2)
        try: cp.score(last + 2, 0.5)
        except ckpt.errors.PeerError as error: found["score"] = str(error)
    if how == "one scores, both go back":
        if rank == 0: cp.score(last, 0.5)
        step = cp.restore()
        train(step + 1, step + 1)
        found["score"] = [cp.score(step + 1, 0.1), best.scores]
    if how == "one is killed" and rank == 1:
        cp.save().wait_staged(60)
        others.set("killed", "")
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "one is slow" and rank == 1:
        with cp.not_training(): time.sleep(1)
        train(last + 1, 6)
    if how == "one closes first" and rank == 0:
        wait_for("closing")
        try: cp.save(9).wait_durable(60)
        except ckpt.CheckpointError as error: found["save"] = str(error)
    if how == "one is killed": wait_for("killed")
    others.set("closing", "")
    cp.close()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
print(json.dumps(found), flush=True)
if how == "one is killed": os._exit(0)
others.set(f"done/{rank}", "")
if rank == 0:  # it hosts the store
    for one in range(len(counts)): wait_for(f"done/{one}")
"""


def uneven(run: str, how: str, *counts: int) -> tuple[list[dict[str, Any]], str]:
    """Return each rank's result, and the log of all. No rank waits for one that cannot arrive."""
    done = launch(len(counts), UNEVEN, run, how, *counts, port=free_port(), timeout_s=100)
    found = [json.loads(one.stdout) if one.stdout else {} for one in done]
    return found, "\n".join(one.stderr for one in done)


def steps(run: str) -> list[int]:
    return sorted(one.step for one in ckpt.Run(run).list())


@pytest.mark.parametrize(
    ("counts", "missing", "kept"),
    [
        ((5, 6, 6), "rank 0 closed after step 5 without saving step 6", [2, 4, 5]),
        ((6, 6, 0), "rank 2 closed without any step() without saving step 2", []),
    ],
)
def test_close_names_the_rank_that_ended_early(
    run_dir: str, counts: tuple[int, ...], missing: str, kept: list[int]
) -> None:
    """The ranks that went further raise an error that names it. The newest step that all have is saved."""
    found, logged = uneven(run_dir, "", *counts)
    further = [rank for rank, count in enumerate(counts) if count == max(counts)]
    assert all(missing in found[rank]["error"] for rank in further), (found, logged)
    assert not any(found[rank] for rank in range(len(counts)) if rank not in further), found
    assert steps(run_dir) == kept


def test_save_fails_while_training_when_another_rank_has_closed(run_dir: str) -> None:
    """The remaining rank is notified before it calls close()."""
    found, logged = uneven(run_dir, "one closes first", 3, 3)
    assert "rank 1 closed after step 3 without saving step 9" in found[0]["save"], (found, logged)


@pytest.mark.parametrize(
    ("how", "names"),
    [("one raises", "rank 1 left without close() after step 4"), ("one is killed", "rank 1 has left")],
)
def test_close_does_not_wait_for_a_rank_that_left(run_dir: str, how: str, names: str) -> None:
    """It raised an exception or was killed. The error names it, and what was committed before stays."""
    found, logged = uneven(run_dir, how, 4, 4)
    assert found[0]["error"].startswith("PeerError: close: ") and names in found[0]["error"], (found, logged)
    assert eventually(lambda: 4 in steps(run_dir))


def test_score_fails_when_rank_0_has_left(run_dir: str) -> None:
    """Rank 0 decides which steps are the best, so the others would wait for it in vain."""
    found, logged = uneven(run_dir, "one raises, the other scores", 4, 4)
    assert found[1]["score"].startswith("rank 0 left without close(), so it is unknown"), (found, logged)


def test_scores_agree_again_after_restore(run_dir: str) -> None:
    """Rank 1 was interrupted before a score that rank 0 gave. It does not take that one for the next."""
    found, logged = uneven(run_dir, "one scores, both go back", 4, 4)
    assert found[0] == found[1] and found[0]["score"] == [True, [[0.1, 5]]], (found, logged)


def test_slow_rank_fails_no_save(run_dir: str) -> None:
    """It does something else for a while, and saves its part later."""
    found, logged = uneven(run_dir, "one is slow", 6, 2)
    assert found == [{}, {}] and steps(run_dir) == [2, 4, 6], (found, logged)


# An optimizer that keeps its moments as plain local tensors next to DTensor parameters, as TransformerEngine does.
PLAIN = """
import json, sys, torch, torch.distributed as dist, ckpt
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
run, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.one = torch.nn.Linear(6, 7), torch.nn.Linear(7, 1)  # rank 1 has nothing of the second one
    def forward(self, x):
        return self.one(self.wide(x))

class PlainAdam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            mine, grad, state = p.to_local(), p.grad.to_local(), self.state[p]
            if not state:
                state["step"] = torch.zeros(1)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(mine), torch.zeros_like(mine)
            assert not any(isinstance(one, DTensor) for one in state.values())
            assert state["exp_avg"].shape == mine.shape
            state["step"] += 1
            state["exp_avg"].lerp_(grad, 0.1)
            state["exp_avg_sq"].lerp_(grad * grad, 0.1)
            mine -= 0.1 * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-3)

torch.manual_seed(0)
net = Net()
for layer in net.wide, net.one, net: fully_shard(layer)
optim = PlainAdam(net.parameters())
with ckpt.Checkpointer({"net": net, "optim": optim}, ckpt.Tier(run, every=2), memory=ckpt.Memory(linger_s=0)) as cp:
    start = cp.restore(default=0)
    for step in range(start, steps):
        net(torch.full((2, 6), float(step))).pow(2).mean().backward()
        optim.step()
        optim.zero_grad()
        cp.step(step + 1)
whole = {name: p.full_tensor().flatten().tolist() for name, p in net.named_parameters()}
kinds = [[key, type(v).__name__, list(v.shape)] for s in optim.state.values() for key, v in s.items()]
print(json.dumps({"start": start, "whole": whole, "kinds": kinds}))
dist.barrier()
"""


@pytest.mark.skipif(not SHARDS_HERE, reason="this torch has a fully_shard that wants a GPU")
def test_plain_moments_next_to_dtensors_stay_plain(tmp_path: Path) -> None:
    """After a restart the next step finds plain local tensors, on a rank with an empty shard too, and with another
    number of ranks."""

    def trained(run: Path, world: int, steps: int) -> list[dict[str, Any]]:
        done = launch(world, PLAIN, run, steps, port=free_port())
        assert not any(one.returncode for one in done), [one.stderr[-3000:] for one in done]
        return [json.loads(one.stdout) for one in done]

    straight = trained(tmp_path / "a", 2, 6)
    trained(tmp_path / "b", 2, 4)
    resumed = trained(tmp_path / "b", 2, 6)
    assert [one["start"] for one in resumed] == [4, 4]
    assert [one["kinds"] for one in resumed] == [one["kinds"] for one in straight]
    assert [one["whole"] for one in resumed] == [one["whole"] for one in straight]
    assert {kind for _, kind, _ in straight[1]["kinds"]} == {"Tensor"} and ["exp_avg", "Tensor", [0, 7]] in straight[1][
        "kinds"
    ]
    assert ckpt.load(str(tmp_path / "b"))["optim.state.net.one.weight.exp_avg"].shape == (1, 7)
    assert trained(tmp_path / "b", 3, 8)[0]["start"] == 6
