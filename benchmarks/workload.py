"""The training that all libraries save: one GPT, its optimizer, its batches. The same for everystep and all peers.

Slower steps favor all libraries, since background work then has more time between two steps. So the workload is fixed
here: 1.5 GiB of float32 state (weights and two moments of AdamW) in about 900 tensors, a batch of 64 tokens, AdamW in
its fused form (the fastest on a CPU), and as many threads as cores: no core is left for the library.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Size:
    """The size of the model. `FULL` is measured for the figures; `SMALL` is for tests."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int


FULL = Size(layers=25, width=640, heads=10, vocabulary=18432, context=64, batch=1)
SMALL = Size(layers=24, width=128, heads=4, vocabulary=2048, context=32, batch=1)
SIZES = {"full": FULL, "small": SMALL}


class Block(nn.Module):
    """Attention and a feed-forward network, each after a layer norm: 12 parameters with 12 width^2 numbers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return result


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = functional.linear(self.norm(x), self.tokens.weight)
        return logits


@dataclass
class Training:
    """A model, its optimizer and its batches."""

    size: Size
    model: nn.Module
    optim: torch.optim.AdamW
    batches: Iterator[Tensor]

    @classmethod
    def build(cls, size: Size, seed: int = 0, device: str = "cpu") -> Training:
        """Build weights from this seed, and run one step, so that the optimizer has its state."""
        torch.set_num_threads(THREADS)
        torch.manual_seed(seed)
        model = GPT(size).to(device)
        training = cls(size, model, torch.optim.AdamW(model.parameters(), fused=True), _batches(size, seed, device))
        training.step()
        return training

    def step(self) -> None:
        tokens = next(self.batches)
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state, in a fixed order."""
        moments = [t for p in self.model.parameters() for t in self.optim.state[p].values()]
        return [*self.model.state_dict().values(), *moments]

    def state_dict(self) -> dict[str, Any]:
        """Return one dict, with names of `state_dict()` and indices of parameters, as most libraries need it."""
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optim.load_state_dict(state["optim"])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def digest(self) -> str:
        """Return a digest of every bit of the state: if it differs after a restore, the restore is wrong."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors():
            found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def spoil(self) -> None:
        """Overwrite the state, so that a restore without effect is detected."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(-7)


def _batches(size: Size, seed: int, device: str) -> Iterator[Tensor]:
    """Yield random tokens: the cost of a step does not depend on what is learnt."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), generator=generator)
        yield tokens.to(device)
