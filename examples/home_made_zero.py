"""Homemade ZeRO: each rank has a share of a flat fp32 copy of all weights, and updates only that share.

    torchrun --nproc-per-node 2 examples/home_made_zero.py runs/zero
    torchrun --nproc-per-node 3 examples/home_made_zero.py runs/zero --steps 40    # continues with three ranks

A share begins and ends within parameters, so no tensor describes its position: `ckpt.state.Shards` does. Kill the job
at any time. It prints a line per step: the loss, and a digest of all weights and moments.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt

BATCH, WIDTH = 12, 32


class Zero:
    """AdamW on this rank's share of the flat buffer. The model itself is bfloat16, and whole on every rank."""

    def __init__(self, model: nn.Module) -> None:
        self.params = dict(model.named_parameters())
        self.world = dist.get_world_size()
        share = -(-sum(p.numel() for p in self.params.values()) // self.world)
        self.first = share * dist.get_rank()
        self.flat = torch.zeros(share * self.world)  # the last share has some padding
        for first, p in self.places():
            self.flat[first : first + p.numel()] = p.detach().flatten()
        self.own = nn.Parameter(self.flat[self.first : self.first + share].clone())
        self.optim = torch.optim.AdamW([self.own], lr=1e-2)
        zeros = {key: torch.zeros_like(self.own) for key in ("exp_avg", "exp_avg_sq")}
        self.optim.state[self.own] = {
            "step": torch.tensor(0.0),
            **zeros,
        }  # exists before the first step, to restore into

    def places(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield the offset of each parameter in the flat buffer."""
        first = 0
        for p in self.params.values():
            yield first, p
            first += p.numel()

    def pieces(self) -> dict[str, ckpt.state.Shard | list[ckpt.state.Shard]]:
        """Return this rank's shards: the elements of each parameter in its share, often none."""
        state, share = self.optim.state[self.own], len(self.own)
        found: dict[str, ckpt.state.Shard | list[ckpt.state.Shard]] = {}
        for label, mine in {"fp32": self.own, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            for name, (first, p) in zip(self.params, self.places(), strict=True):
                low, high = max(first, self.first), min(first + p.numel(), self.first + share)
                piece = mine[low - self.first : high - self.first]
                found[f"{name}.{label}"] = ckpt.state.Shard(piece, p.shape, start=low - first) if low < high else []
        found["step"] = ckpt.state.Shard(
            state["step"], (), replicas=tuple(range(self.world))
        )  # all ranks have the same
        return found

    @torch.no_grad()
    def gather(self) -> None:
        """Update the model's weights from all shares."""
        dist.all_gather(list(self.flat.chunk(self.world)), self.own.detach())
        for first, p in self.places():
            p.copy_(self.flat[first : first + p.numel()].view_as(p))

    def step(self) -> None:
        grads = torch.zeros_like(self.flat)
        for first, p in self.places():
            assert p.grad is not None
            grads[first : first + p.numel()] = p.grad.flatten()
            p.grad = None
        dist.all_reduce(grads)
        self.own.grad = grads[self.first : self.first + len(self.own)] / self.world
        self.optim.step()
        self.gather()

    def digest(self) -> str:
        """Return a digest of all masters and moments; it is the same for any number of ranks."""
        found, size = hashlib.sha256(), sum(p.numel() for p in self.params.values())
        for mine in (self.own.detach(), *(v for v in self.optim.state[self.own].values() if v.dim())):
            whole = torch.empty_like(self.flat)
            dist.all_gather(list(whole.chunk(self.world)), mine)
            found.update(whole[:size].numpy().tobytes())
        return found.hexdigest()[:16]


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of this rank's share of the batch. The batch depends only on the step."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
    mine = x[dist.get_rank() :: dist.get_world_size()]
    return (model(mine) - mine.roll(1, 1)).float().pow(2).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 61), nn.GELU(), nn.LayerNorm(61), nn.Linear(61, WIDTH)).bfloat16()
    zero = Zero(model)
    state = {"zero": ckpt.state.Shards(zero.pieces, optimizer=zero.optim, restored=zero.gather)}
    with ckpt.Checkpointer(state, ckpt.Tier(options.run, every=5)) as cp:
        start = cp.restore(default=0)
        print("restored", start, zero.digest(), flush=True)
        for step in range(start, options.steps):
            loss = loss_of(model, step)
            loss.backward()
            zero.step()
            cp.step(step + 1)
            print("step", step + 1, repr(loss.item()), zero.digest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
