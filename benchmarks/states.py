"""States of real trainings, to compress: small models that learn Python from the standard library's sources.

    python benchmarks/states.py --states DIR [--quick]     (benchmarks/codecs.py calls it)

Each run is trained on the CPU to a base step and then 1, 10 and 100 steps further, with a snapshot at each. Seeds are
fixed, one thread trains a run, and existing snapshots are kept. A snapshot is a safetensors file. The name of a tensor
is its class, a slash, and its parameter: "exp_avg/blocks.0.up.weight". Every snapshot has everything that a restart
needs except the counters.

These runs are short: after hundreds of thousands of steps, at a lower learning rate, increments are smaller.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]

LAGS = (1, 10, 100)
BYTES = 256
TEXT = 24 << 20
WARM_UP = 50
LORA_RANK = 20
EXPERTS = 8
GRAMS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Size:
    """Size of the models. `base`: steps before the first snapshot; `rows`, `table_width`: of the sparse embedding."""

    name: str
    width: int
    layers: int
    base: int
    rows: int
    table_width: int = 64
    context: int = 64
    batch: int = 8
    lr: float = 1e-3


FULL = Size("full", width=512, layers=2, base=200, rows=1 << 17)
QUICK = Size("quick", width=256, layers=1, base=50, rows=1 << 15)


# -- text --


@cache
def text() -> Tensor:
    """Return the sources of the standard library, joined, as bytes."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or size > TEXT:
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


class Batches:
    """Draws random parts of the text, always the same ones."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text()) - self.length - 1, (self.rows, 1), generator=self.generator)
        cut = text()[starts + torch.arange(self.length + 1)].long()
        return cut[:, :-1], cut[:, 1:]


# -- models --


class Dense(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Routes by token, 32 byte values per expert: source code leaves those of control codes and non-ASCII idle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Dense(width) for _ in range(EXPERTS)])

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        out, route = torch.zeros_like(x), tokens * EXPERTS // BYTES
        for i, expert in enumerate(self.experts):
            chosen = route == i
            if chosen.any():  # else its gradients are None, and the optimizer skips it
                out[chosen] = expert(x[chosen], tokens[chosen])
        return out


class Block(nn.Module):
    def __init__(self, width: int, feed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.width, self.heads = width, width // 64
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = feed(width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (n.view(b, t, self.heads, -1).transpose(1, 2) for n in self.qkv(self.norm(x)).split(self.width, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        return x + self.feed(self.norm2(x), tokens)


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self, size: Size, feed: Callable[[int], nn.Module] = Dense) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size.width, feed) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 1 / math.sqrt(2 * size.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, tokens)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen linear layer with two small matrices that learn a correction."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(LORA_RANK, linear.in_features) / math.sqrt(linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, LORA_RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class Grams(nn.Module):
    """Predicts the next byte from hashes of the last one to five: each step updates a few rows of a large table."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(size.rows, size.table_width, sparse=True)
        self.head = nn.Linear(size.table_width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens`: (n, 5), the bytes before the one to predict."""
        value = torch.zeros_like(tokens[:, 0])
        rows = []
        for n in GRAMS:
            value = (value * 1_000_003 + tokens[:, -n] + n) % 2_147_483_647
            rows.append(value * 40_503 % self.table.num_embeddings)
        return self.head(self.table(torch.stack(rows, 1)).sum(1))


# -- trainings --


class Lion(torch.optim.Optimizer):
    """Uses the sign of an interpolated momentum (Chen et al. 2023), with one moment per parameter."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).add_(torch.lerp(p.grad, m, b1).sign_(), alpha=-lr)
                m.lerp_(p.grad, 1 - b2)


class Training:
    """A model in fp32 and its optimizer. Subclasses store the weights in other forms."""

    def __init__(self, size: Size, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.size, self.model, self.done = size, model, 0
        self.batches = Batches(size.batch, size.context)
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizers = [optimizer(self.stepped().values())]
        self.rates = [g["lr"] for o in self.optimizers for g in o.param_groups]

    def stepped(self) -> Tensors:
        """Return the tensors that the optimizer updates."""
        return self.trained

    def loss(self) -> Tensor:
        given, wanted = self.batches()
        return F.cross_entropy(self.model(given).float().flatten(0, 1), wanted.flatten())

    def step(self) -> float:
        self.done += 1
        for group, rate in zip((g for o in self.optimizers for g in o.param_groups), self.rates, strict=True):
            group["lr"] = rate * min(1.0, self.done / WARM_UP)
        loss = self.loss()
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        dense = [p for p in self.trained.values() if p.grad is not None and not p.grad.is_sparse]
        nn.utils.clip_grad_norm_(dense, 1.0)
        self.update()
        return loss.item()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def tensors(self) -> Tensors:
        found = {f"w/{name}": p.data for name, p in self.model.named_parameters()}
        return found | self.moments()

    def moments(self) -> Tensors:
        """Return the moments without the step counts (one number per parameter tensor)."""
        found = {}
        for name, p in self.stepped().items():
            for optimizer in self.optimizers:
                kept = optimizer.state.get(p, {})
                found |= {f"{key}/{name}": t for key, t in kept.items() if isinstance(t, Tensor) and t.dim() > 0}
        return found


class Mixed(Training):
    """Weights and arithmetic in bfloat16; the optimizer updates fp32 masters, and the weights are rounded from them."""

    def __init__(self, size: Size, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        super().__init__(size, model.bfloat16(), optimizer)

    def stepped(self) -> Tensors:
        return self.masters

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self.trained.items():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
        super().update()
        for name, p in self.trained.items():
            p.copy_(self.masters[name])  # rounded to nearest, as .to(torch.bfloat16)

    def tensors(self) -> Tensors:
        return super().tensors() | {f"master/{name}": t for name, t in self.masters.items()}


class Half(Training):
    """Weights in float16, rounded from fp32 masters; computed in fp32, since CPUs have no float16 arithmetic."""

    def __init__(self, size: Size, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        super().__init__(size, model, optimizer)
        self.round()

    def stepped(self) -> Tensors:
        return self.masters

    def update(self) -> None:
        for name, p in self.trained.items():
            self.masters[name].grad = p.grad
        super().update()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for name, p in self.trained.items():
            p.copy_(self.masters[name].half())

    def tensors(self) -> Tensors:
        weights = {f"w/{name}": p.data.half() for name, p in self.trained.items()}
        return weights | self.moments() | {f"master/{name}": t for name, t in self.masters.items()}


class Sparse(Training):
    """SparseAdam for the table, AdamW for the rest. `touched`: shares of the rows that steps changed."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, Grams(size), lambda p: torch.optim.AdamW(list(p)[1:], lr=size.lr))
        self.optimizers.append(torch.optim.SparseAdam([self.model.table.weight], lr=size.lr))
        self.rates.append(size.lr)
        self.batches = Batches(size.rows // 440, max(GRAMS))  # so that about 0.7 % of the rows change per step
        self.touched: list[float] = []

    def loss(self) -> Tensor:
        given, following = self.batches()
        return F.cross_entropy(self.model(given), following[:, -1])

    def update(self) -> None:
        grad = self.model.table.weight.grad.coalesce()
        self.touched.append(grad.indices().shape[1] / self.size.rows)
        super().update()


def adamw(size: Size, betas: tuple[float, float] = (0.9, 0.999)) -> Callable[..., torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=size.lr, betas=betas, weight_decay=0.1)


def lora(size: Size, folder: Path) -> Training:
    """Add adapters to the weights that another run has learnt; 95 % of all parameters are frozen."""
    model = Gpt(size)
    learnt = load_file(folder_of(folder, size, PRETRAINED) / "0.safetensors")
    model.load_state_dict({name: learnt[f"w/{name}"] for name, _ in model.named_parameters()})
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
        block.feed.up, block.feed.down = Adapted(block.feed.up), Adapted(block.feed.down)
    return Training(size, model, adamw(size))


# The trainings; `folder` is for those that start from another one's weights.
KINDS: dict[str, Callable[[Size, Path], Training]] = {
    "adamw": lambda size, folder: Training(size, Gpt(size), adamw(size)),
    "mixed": lambda size, folder: Mixed(size, Gpt(size), adamw(size)),
    "mixed, betas .9 .95": lambda size, folder: Mixed(size, Gpt(size), adamw(size, (0.9, 0.95))),
    "half": lambda size, folder: Half(size, Gpt(size), adamw(size)),
    "sgd": lambda size, folder: Training(size, Gpt(size), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adafactor": lambda size, folder: Training(size, Gpt(size), lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    "lion": lambda size, folder: Training(size, Gpt(size), lambda p: Lion(p, lr=1e-4)),
    "lora": lora,
    "sparse": lambda size, folder: Sparse(size),
    "moe": lambda size, folder: Training(size, Gpt(replace(size, layers=1), Experts), adamw(size)),
}
PRETRAINED = "adamw"
NEEDS = {"lora": PRETRAINED}
BASE_STEPS = {"sparse": 5}  # multiplies the steps before the first snapshot: its steps are cheap, its table is large
ABOUT = {
    "adamw": "fp32, AdamW",
    "mixed": "bf16 weights, fp32 masters and moments, AdamW",
    "mixed, betas .9 .95": "the same, betas (0.9, 0.95)",
    "half": "fp16 weights, fp32 masters and moments, AdamW",
    "sgd": "fp32, SGD with momentum",
    "adafactor": "fp32, Adafactor",
    "lion": "fp32, Lion",
    "lora": "LoRA, 95 % of the parameters frozen, AdamW",
    "sparse": "embedding, about 0.7 % of its rows changed per step, SparseAdam",
    "moe": "8 experts, some idle, AdamW",
}


# -- snapshots --


def folder_of(folder: Path, size: Size, kind: str) -> Path:
    return folder / size.name / "".join(c if c.isalnum() else "-" for c in kind)


def snapshot(folder: Path, size: Size, kind: str, lag: int) -> Tensors:
    """Return the state `lag` steps after the base step."""
    return load_file(folder_of(folder, size, kind) / f"{lag}.safetensors")


def train(kind: str, size: Size, folder: Path) -> str:
    """Train a run and store its snapshots; return a summary line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, started, losses = KINDS[kind](size, folder), time.monotonic(), list[float]()
    target, base = folder_of(folder, size, kind), size.base * BASE_STEPS.get(kind, 1)
    target.mkdir(parents=True, exist_ok=True)
    for lag in (0, *LAGS):
        while training.done < base + lag:
            losses.append(training.step())
        tensors = {name: t.detach().contiguous() for name, t in training.tensors().items()}
        part = target / f"{lag}.part"
        save_file(tensors, part)
        part.rename(target / f"{lag}.safetensors")
    mib = sum(t.nbytes for t in tensors.values()) / 2**20
    line = (
        f"{kind}: {mib:.0f} MiB, {training.done} steps in {time.monotonic() - started:.0f} s, "
        f"loss {losses[0]:.2f} to {sum(losses[-20:]) / 20:.2f}"
    )
    if isinstance(training, Sparse):
        line += f", {100 * sum(training.touched[-100:]) / 100:.2f} % of the rows a step"
    (target / "about.txt").write_text(line + "\n")
    return line


def there(kind: str, size: Size, folder: Path) -> bool:
    return (folder_of(folder, size, kind) / "about.txt").exists()


def prepare(folder: Path, size: Size, kinds: list[str], tell: Callable[[str], None] = print) -> None:
    """Train missing runs, in parallel on all cores."""
    missing = {kind for kind in kinds if not there(kind, size, folder)}
    missing |= {NEEDS[kind] for kind in missing & NEEDS.keys() if not there(NEEDS[kind], size, folder)}
    first = [kind for kind in KINDS if kind in missing and kind not in NEEDS]
    for some in (first, [kind for kind in KINDS if kind in missing and kind in NEEDS]):
        if not some:
            continue
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
            for done in as_completed([pool.submit(train, kind, size, folder) for kind in some]):
                tell(done.result())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", required=True, metavar="DIR", help="where to keep the snapshots")
    parser.add_argument("--quick", action="store_true", help="smaller ones")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    prepare(Path(arguments.states), QUICK if arguments.quick else FULL, arguments.only)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
