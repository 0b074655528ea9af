"""Train for `torture.py`: a small model whose state at every step is recorded in a journal before it is saved.

The journal is a file of JSON lines, written without buffering, so that it survives SIGKILL:

    {"restored": 4, "digest": "...", "from": "memory"}   what this process started from; step 0 has no digest
    {"step": 5, "digest": "..."}                         the state after step 5, written before step 5 is saved
    {"ack": "staged", "step": 5}                         the library acknowledged step 5 in memory
    {"ack": "committed", "step": 5}                      the library acknowledged step 5 in the first tier
    {"done": 40}                                         the process reached its last step and closed the Checkpointer

Only public names of everystep are used. Several ranks train with FSDP2, so each holds a part of each tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt

WIDTH = 128
VARIANTS = ("adamw", "sgd", "amsgrad", "adagrad", "nadam")
FROZEN = 1 << 16  # elements of a tensor that never changes, as in LoRA


class Net(nn.Module):
    """Two layers that train, and a frozen table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(FROZEN), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.to(dtype)

    def forward(self, batch: Tensor) -> Tensor:
        return batch + torch.nn.functional.linear(
            torch.relu(torch.nn.functional.linear(batch, self.first.weight, self.first.bias)),
            self.second.weight,
            self.second.bias,
        )


def build(salt: int, ranks: int, variant: str = "adamw") -> dict[str, Any]:
    """Return the state of a job. Jobs with different salts never have an equal tensor."""
    torch.manual_seed(salt)
    model = Net(torch.bfloat16 if variant == "sgd" else torch.float32)
    if ranks == 1:
        model.first.weight.data = model.first.weight.data.t().contiguous().t()  # as in channels_last; FSDP rejects it
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(params, lr=1e-3),
        "sgd": lambda: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
        "amsgrad": lambda: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(params, lr=1e-2),
        "nadam": lambda: torch.optim.NAdam(params, lr=1e-3),
    }[variant]()
    plain = {"salt": salt, "step": 0, "losses": [0.0], "others": {"a": (1, 2.5, None), "b": b"x"}}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    return {"model": model, "optim": optimizer, "schedule": schedule, "plain": plain, "rng": ckpt.RNG()}


def train_step(state: dict[str, Any], step: int) -> None:
    """Train one step on a batch that depends on the step and the salt only."""
    generator = torch.Generator().manual_seed(1000 * state["plain"]["salt"] + step)
    model, optimizer = state["model"], state["optim"]
    batch = torch.randn(16, WIDTH, generator=generator).to(model.table.dtype)

    def loss_of() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(loss_of)
    state["schedule"].step()
    model.seen += 1
    torch.rand(step % 5)  # moves the generator that the state contains
    state["plain"]["step"] = step
    state["plain"]["losses"] = [*state["plain"]["losses"], loss.item()][-20:]


def digest(state: Mapping[str, Any]) -> str:
    """Return a digest of every tensor and plain value of a state. All ranks call it together."""
    found = hashlib.sha256()
    tensors = list(state["model"].state_dict().items())
    for number, moments in sorted(state["optim"].state_dict()["state"].items()):
        for name, value in sorted(moments.items()):
            values = value if isinstance(value, list) else [value]
            tensors += [(f"{number}.{name}.{i}", torch.as_tensor(one)) for i, one in enumerate(values)]
    tensors.append(("generator", torch.get_rng_state()))
    for name, tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    schedule = {k: v for k, v in state["schedule"].state_dict().items() if not k.startswith("_get")}
    found.update(repr([state["plain"], schedule, state["optim"].param_groups[0]["lr"]]).encode())
    return found.hexdigest()[:24]


class Journal:
    """Appends to the journal. A rank other than 0 writes nothing."""

    def __init__(self, path: str, *, every: int, silent: bool) -> None:
        self._every = every
        self._file = -1 if silent else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._acks: dict[tuple[str, int], ckpt.Save] = {}

    def write(self, **fields: Any) -> None:
        if self._file >= 0:
            os.write(self._file, json.dumps(fields).encode() + b"\n")

    def expect(self, save: ckpt.Save | None) -> None:
        """Record the acknowledgements of a save as soon as `poll` finds them."""
        if save is not None:
            self._acks["staged", save.step] = save
            if save.step % self._every == 0:
                self._acks["committed", save.step] = save

    def poll(self) -> None:
        for (what, step), save in list(self._acks.items()):
            with contextlib.suppress(ckpt.errors.DeadlineError):
                try:
                    save.wait_staged(0) if what == "staged" else save.wait_durable(0)
                    self.write(ack=what, step=step)
                except ckpt.CheckpointError as error:
                    if isinstance(error, ckpt.errors.DeadlineError):
                        raise
                    self.write(failed=step, what=what, why=str(error)[:300])
                del self._acks[what, step]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run")
    parser.add_argument("journal")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints in the tier")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--at", type=int, help="continue from this step; default: the newest")
    parser.add_argument("--salt", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, default="adamw", help="the optimizer, and the dtype with it")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds that each step waits in addition")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--linger", type=float, default=60.0)
    parser.add_argument("--foreign-writes", action="store_true", help="write through .data right after each step()")
    parser.add_argument("--kill-at", type=int, help="SIGKILL itself as soon as this step is in memory")
    parser.add_argument("--go", default="", help="wait until this file exists before the run is opened")
    return parser.parse_args()


@contextlib.contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Yield rank and number of ranks; join the group that torchrun started, if there is one."""
    if "WORLD_SIZE" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def main() -> int:
    given = options()
    torch.set_num_threads(1)
    with process_group() as (rank, ranks):
        state, journal = (
            build(given.salt, ranks, given.variant),
            Journal(given.journal, every=given.every, silent=rank > 0),
        )
        while given.go and not Path(given.go).exists():
            time.sleep(0.001)
        memory = None if given.no_memory else ckpt.Memory(linger_s=given.linger)

        tiers = ckpt.Tier(given.run, every=given.every, keep=given.keep)
        with ckpt.Checkpointer(state, tiers, memory=memory) as cp:
            start = cp.restore(step=given.at) if given.at else cp.restore(default=0)
            found = cp.last_restore
            restored = digest(state) if start else ""
            journal.write(restored=start, digest=restored, **{"from": found.tier if found and start else ""})
            for step in range(start + 1, given.steps + 1):
                train_step(state, step)
                now = digest(state)
                journal.write(step=step, digest=now)
                save = cp.step(step)
                journal.expect(save)
                if step == given.kill_at and save is not None:
                    save.wait_staged()
                    os.kill(os.getpid(), signal.SIGKILL)
                if given.foreign_writes:
                    with torch.no_grad():
                        state["model"].second.weight.data.add_(step)
                    state["model"].first.bias.detach().numpy()[:] = step
                end = time.monotonic() + given.pause
                while time.monotonic() < end:
                    journal.poll()
                    time.sleep(0.001)
                journal.poll()
            cp.wait()
            journal.poll()
        journal.poll()
        journal.write(done=given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
