"""Train a small byte-level GPT on Python's own standard library, and save every step of it.

    python examples/train_gpt.py runs/gpt                   # kill it at any moment, and start it again
    python examples/train_gpt.py runs/gpt --kill-at 50      # it kills itself with SIGKILL once step 50 is staged
    python examples/train_gpt.py --outcome reference.json   # no RUN, no checkpoints: the reference outcome

Dropout, batches and schedule depend only on the state, so a killed run ends with the same bits as an uninterrupted one.
`--json` reports in JSON lines, each with an `event`: begin, restored, trained, kill, end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

import ckpt
from ckpt.core.checkpoint.lease import key_of
from ckpt.core.ipc import channel as link

CONTEXT, BATCH = 64, 16
WIDTH, HEADS, LAYERS = 160, 4, 4
DROPOUT = 0.1
WARMUP = 20


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        heads = [h.unflatten(2, (HEADS, -1)).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, dim=2)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.feed(self.norm2(x)))


class GPT(nn.Module):
    """A model of the next byte. The head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def corpus() -> Tensor:
    """Return the sources of the standard library: a few MB of text on every machine with Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def build(steps: int, seed: int = 0) -> dict[str, Any]:
    """Create the state that training depends on, all of which is saved."""
    torch.manual_seed(seed)
    model = GPT()
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(
        optim, lambda i: min((i + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * i / steps))
    )
    return {
        "model": model,
        "optim": optim,
        "sched": sched,
        "batches": torch.Generator().manual_seed(seed),
        "rng": ckpt.RNG(),
        "losses": [],
    }


def train_step(state: dict[str, Any], text: Tensor) -> float:
    """Train one update, and return the loss, which the state records too."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=state["batches"])
    window = text[starts + torch.arange(CONTEXT + 1)].long()
    logits = state["model"](window[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()
    state["sched"].step()
    state["losses"].append(loss.item())
    return state["losses"][-1]


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of every tensor of model, optimizer and generators, by name."""
    model = state["model"].state_dict()
    named = {f"model.{name}": tensor for name, tensor in model.items()}
    for number, values in state["optim"].state_dict()["state"].items():
        named |= {f"optim.{number}.{key}": tensor for key, tensor in values.items()}
    named |= {"batches": state["batches"].get_state(), "rng": torch.get_rng_state()}
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in named.items()}


class Reporter:
    """Lines on stdout for people or programs. Each is one write, which SIGKILL cannot split."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: str, **facts: Any) -> None:
        if self._as_json:
            line = json.dumps({"event": event, **facts})
        else:
            shown = (
                f"{key} {f'{v:.4g}' if type(v) is float else v}" for key, v in facts.items() if v not in (None, [])
            )
            line = f"{event:8}  {'  '.join(shown)}"
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


class Killer:
    """Kill this process like a crash, optionally with its writer."""

    def __init__(self, options: argparse.Namespace, report: Reporter) -> None:
        self._at, self._when = options.kill_at, options.kill_when
        self._writer_of = options.run if options.kill_writer else None
        self._report = report
        self._saves: list[ckpt.Save] = []

    def after(self, step: int, save: ckpt.Save | None, step_s: float) -> None:
        """Kill the process if the time has come. Called after every step, with its duration."""
        if save is not None:
            self._saves.append(save)
        if step != self._at:
            return
        if self._when == "random":
            threading.Timer(random.Random().uniform(0.0, step_s), self._strike).start()
            return
        if save is not None:
            save.wait_staged(30.0)
        self._strike()

    def _strike(self) -> NoReturn:
        writer = None if self._writer_of is None else writer_pid(self._writer_of)
        staged = self._newest("staged", "durable")
        self._report("kill", writer=writer, staged=staged, committed=self._newest("durable"))
        if writer is not None:
            os.kill(writer, signal.SIGKILL)
        # Immediately, so that no other writer starts.
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("the process survived SIGKILL")

    def _newest(self, *statuses: str) -> int | None:
        """Return the newest acknowledged step, which must not be lost."""
        return max((save.step for save in self._saves if save.status in statuses), default=None)


def writer_pid(run: str) -> int | None:
    """Return the process that holds a run's memory on this machine."""
    channel = link.connect(key_of(run))
    if channel is None:
        return None
    with contextlib.closing(channel):
        return link.peer_pid(channel.sock)


def restore(cp: ckpt.Checkpointer, report: Reporter) -> int:
    began = time.perf_counter()
    start = cp.restore(default=0)
    seconds = time.perf_counter() - began
    found = cp.last_restore
    assert found is not None
    skipped = [f"step {s.step} in {s.tier}: {s.reason}" for s in found.skipped]
    report("restored", step=start, tier=found.tier, seconds=seconds, verified=found.verified, skipped=skipped)
    return start


def train(
    state: dict[str, Any], steps: int, cp: ckpt.Checkpointer | None, start: int, report: Reporter, killer: Killer
) -> None:
    text = corpus()
    stalled_s = 0.0
    for step in range(start + 1, steps + 1):
        began = time.perf_counter()
        loss = train_step(state, text)
        save = cp.step(step) if cp is not None else None
        seconds = time.perf_counter() - began
        total_s = cp.stats.stalled_s if cp is not None else 0.0
        # the wait before this update for the copy of the last step, and the call of cp.step()
        report("trained", step=step, loss=loss, seconds=seconds, stall_s=total_s - stalled_s)
        stalled_s = total_s
        killer.after(step, save, seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="folder of the run; without it nothing is saved")
    parser.add_argument("--steps", type=int, default=200, help="total steps (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints on disk (%(default)s)")
    parser.add_argument("--linger-s", type=float, default=600.0, help="how long memory outlives a crash (%(default)s)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill this process with SIGKILL after this step")
    parser.add_argument(
        "--kill-when",
        choices=["staged", "random"],
        default="staged",
        help="once that step is staged, or at a random moment of the next one (%(default)s)",
    )
    parser.add_argument("--kill-writer", action="store_true", help="kill the writer too, so that its memory is lost")
    parser.add_argument("--outcome", type=Path, metavar="FILE", help="write losses and a digest of every tensor here")
    parser.add_argument("--json", action="store_true", help="report in JSON lines")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.use_deterministic_algorithms(True)
    report = Reporter(as_json=options.json)
    killer = Killer(options, report)
    state = build(options.steps)
    report("begin", parameters=sum(p.numel() for p in state["model"].parameters()))
    if options.run is None:
        train(state, options.steps, None, 0, report, killer)
    else:
        tiers = [ckpt.Tier(options.run, every=options.every, keep=3)]
        with ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(every=1, linger_s=options.linger_s)) as cp:
            train(state, options.steps, cp, restore(cp, report), report, killer)
    report("end", step=len(state["losses"]))
    if options.outcome is not None:
        options.outcome.write_text(json.dumps({"losses": state["losses"], "digests": digests(state)}))


if __name__ == "__main__":
    main()
