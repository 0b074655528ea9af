"""Ranks of a small job of which every bit is known, for tests that kill, starve, confuse and deceive them.

    RANK=0 WORLD_SIZE=2 … python -c 'import rank_toy; rank_toy.main()' '[["train", {"run": "/some/where"}], …]'

Each rank does the named things one after the other and prints a JSON line for whatever happens. All tensors follow from
a step, a salt that each job brings, and, of what is a rank's own, the rank: whatever is restored can be checked against
what it must be, and a mixture of two moments, of two jobs or of two ranks is seen.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
import inside
from run_files import DATA, MANIFEST, checkpoint_files, data_files

SHAPES: dict[str, tuple[int, ...]] = {"wide": (40, 1024), "odd": (7, 3), "single": (1,), "empty": (0, 4)}


def bits(name: str, step: int, salt: int, shape: tuple[int, ...]) -> Tensor:
    """Return the value of a tensor at a step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {salt}".encode()))
    return torch.randn(shape, generator=generator)


def cut(whole: Tensor, rank: int, world: int) -> Tensor:
    """The rows that a rank has of a tensor that is divided among all."""
    rows = -(-whole.shape[0] // world)
    return whole[rank * rows : (rank + 1) * rows]


class Tensors(nn.Module):
    """A module with nothing but parameters."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor))


class Clock(torch.optim.Optimizer):
    """Sets what it optimizes, and a moment of each, to what they are at a step."""

    def __init__(self, set_to: dict[str, nn.Parameter]) -> None:
        super().__init__(list(set_to.values()), {"lr": 0.0})
        self.set_to = set_to

    @torch.no_grad()
    def step(self, step: int, salt: int) -> None:  # type: ignore[override]
        for name, param in self.set_to.items():
            moment = self.state[param].setdefault("moment", torch.zeros_like(param))
            put(param, name, step, salt)
            put(moment, f"{name} moment", step, salt)


def here(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[return-value]


def expected(tensor: Tensor, name: str, step: int, salt: int) -> Tensor:
    """Return the value that this rank must have of a tensor."""
    whole = bits(name, step, salt, tuple(tensor.shape))
    return cut(whole, dist.get_rank(), dist.get_world_size()) if isinstance(tensor, DTensor) else whole


def put(tensor: Tensor, name: str, step: int, salt: int) -> None:
    here(tensor).copy_(expected(tensor, name, step, salt))


class Toy:
    """A state with tensors of each kind: replicated (DDP), sharded (DTensor), and local to a rank."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        alike = Tensors(**{name: torch.zeros(shape) for name, shape in SHAPES.items()})
        divided = Tensors(
            **{
                name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None)
                for name, shape in SHAPES.items()
            }
        )
        self.ddp = nn.parallel.DistributedDataParallel(alike)
        set_to = {f"alike {name}": p for name, p in alike.named_parameters()}
        set_to |= {f"divided {name}": p for name, p in divided.named_parameters()}
        self.clock = Clock(set_to)
        self.own: dict[str, Any] = {"rank": rank, "world": world, "step": 0, "salt": 0, "tensor": torch.zeros(33)}
        self.state: dict[str, Any] = {"alike": self.ddp, "divided": divided, "clock": self.clock, "own": self.own}

    def advance(self, step: int, salt: int) -> None:
        """One step of training."""
        self.clock.step(step, salt)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.own |= {"rank": rank, "world": world, "step": step, "salt": salt}
        self.own["tensor"].copy_(bits(f"own {rank}", step, salt, (33,)))

    def wrong(self, step: int) -> list[str]:
        """Return the entries that do not equal, bit for bit, those at that step, if one job saved it."""
        rank, own = dist.get_rank(), self.own
        found = [] if own["step"] == step else [f"it says that it is step {own['step']}"]
        if own["rank"] != rank % own["world"]:
            found.append(f"rank {own['rank']} of {own['world']} where it should be that of rank {rank}")
        tensors = {f"own {own['rank']}": self.own["tensor"], **self.clock.set_to}
        for name, param in self.clock.set_to.items():
            tensors[f"{name} moment"] = self.clock.state[param]["moment"]
        return found + [
            name for name, t in tensors.items() if not torch.equal(here(t), expected(t, name, step, own["salt"]))
        ]


def say(what: str, **fields: Any) -> None:
    print(json.dumps({"say": what, **fields}), flush=True)


def together(timeout_s: float = 60.0) -> None:
    """All ranks have come this far."""
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=timeout_s))


def told(restored: ckpt.Restored | None) -> dict[str, Any]:
    assert restored is not None
    return {"tier": restored.tier, "skipped": [[s.step, s.tier, s.reason] for s in restored.skipped]}


# -- training --


class NextWriter(logging.Handler):
    """Arms the writer after next once the next one has taken over."""

    def __init__(self, spares: list[str]) -> None:
        super().__init__()
        self.spares = spares
        self.arm()

    def arm(self) -> None:
        os.environ["CKPT_FAIL"] = self.spares.pop(0) if self.spares else ""

    def emit(self, record: logging.LogRecord) -> None:
        if "started a new writer" in record.getMessage():
            say("replaced")
            self.arm()


def train(
    run: str | None,
    *,
    steps: int,
    every: int = 3,
    salt: int = 0,
    spares: dict[str, list[str]] | None = None,
    crash: dict[str, int] | None = None,
    wait_at: int = 0,
    salts: list[int] | None = None,
) -> None:
    """Restore and train `steps` further steps, all ranks in step. `run`: None for a run in memory only.

    `spares`: what the writers of each rank that follow are armed with. `crash`: the step at which a rank raises.
    After `wait_at` steps every save is waited for. `salts`: a lie, each rank with a salt of its own,
    which the library does not compare.
    """
    rank = dist.get_rank()
    if salts is not None:
        inside.compare_no_replicas()
    toy, open_saves = Toy(), list[ckpt.Save]()
    place: dict[str, Any] = {"tiers": [ckpt.Tier(run, every, 2)]} if run is not None else {}
    place = place or {"memory": ckpt.Memory(linger_s=25), "options": ckpt.Options(name="toy")}
    with ckpt.Checkpointer(toy.state, **place) as cp:
        logging.getLogger("ckpt").addHandler(NextWriter((spares or {}).get(str(rank), [])))
        start = cp.restore(default=0)
        say("start", step=start, wrong=toy.wrong(start) if start else [], **told(cp.last_restore))
        for step in range(start + 1, start + steps + 1):
            if (crash or {}).get(str(rank)) == step:
                raise RuntimeError("the training of this rank has a bug")
            toy.advance(step, salt if salts is None else salts[rank])
            together()
            save = cp.step(step)
            assert save is not None
            save.wait_staged(60)
            say("staged", step=step)
            open_saves += [save] if save.tiers else []
            for save in [s for s in open_saves if step == start + wait_at or s.status != "staged"]:
                save.wait_durable(60)
                say("committed", step=save.step)
                open_saves.remove(save)
    say("closed", step=step)


# -- what else may go wrong, each in a folder of its own --

Scenario = Callable[..., Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def failure(call: Callable[[], Any]) -> str:
    """The error that a call raises, "" if none."""
    try:
        call()
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def checkpointer(toy: Toy, root: str, **settings: Any) -> ckpt.Checkpointer:
    every = settings.pop("every", 1)
    return ckpt.Checkpointer(toy.state, ckpt.Tier(root, every, 3), **settings)


def go(toy: Toy, cp: ckpt.Checkpointer, step: int, salt: int = 0) -> ckpt.Save:
    toy.advance(step, salt)
    save = cp.step(step)
    assert save is not None
    save.wait_staged(60)
    return save


def again(root: str, **settings: Any) -> dict[str, Any]:
    """All ranks restore, each into a state that it has just made, and train a step."""
    together()
    toy = Toy()
    with checkpointer(toy, root, **settings) as cp:
        start = cp.restore(default=0)
        found = {"step": start, "wrong": toy.wrong(start) if start else [], **told(cp.last_restore)}
        go(toy, cp, start + 1, salt=1).wait_durable(60)
    return found


@contextlib.contextmanager
def armed(fail: str, *, on: int) -> Iterator[None]:
    """The writer that this rank starts inside is armed, if it is the rank that is meant."""
    if dist.get_rank() == on:
        os.environ["CKPT_FAIL"] = fail
    try:
        yield
    finally:
        os.environ.pop("CKPT_FAIL", None)


def steps_of(root: str) -> Iterator[int]:
    """The checkpoints that there are, newest first."""
    yield from inside.steps_at(root)


def impatient() -> dict[str, Any]:
    inside.wait_for_ranks_for(0.5)
    return {"options": ckpt.Options(agree_timeout_s=2.0)}


@scenario
def absent_at_opening(root: str, missing: int) -> dict[str, Any]:
    """One rank creates its Checkpointer only after the others have given up waiting."""
    toy, present = Toy(), dist.get_rank() != missing
    first = failure(lambda: checkpointer(toy, root, **impatient())) if present else ""
    together()
    late = failure(lambda: checkpointer(toy, root, **impatient())) if not present else ""
    return {"first": first, "late": late, "again": again(root)}


@scenario
def absent_at_restoring(root: str, missing: int) -> dict[str, Any]:
    toy, present = Toy(), dist.get_rank() != missing
    cp = checkpointer(toy, root, **impatient())
    first = failure(lambda: cp.restore(default=0)) if present else ""
    together()
    late = failure(lambda: cp.restore(default=0)) if not present else ""
    together()
    closing = failure(cp.close)
    return {"first": first, "late": late, "closing": closing, "again": again(root)}


@scenario
def absent_at_closing(root: str, missing: int) -> dict[str, Any]:
    """The step that all had in memory is there for whoever comes next."""
    toy, present = Toy(), dist.get_rank() != missing
    cp = checkpointer(toy, root, every=1000, **impatient())
    cp.restore(default=0)
    go(toy, cp, 1)
    first = failure(cp.close) if present else ""
    together()
    late = failure(cp.close) if not present else ""
    return {"first": first, "late": late, "again": again(root)}


@scenario
def other_place(root: str) -> dict[str, Any]:
    rank = dist.get_rank()
    error = failure(lambda: checkpointer(Toy(), f"{root}/{rank}", every=2 + rank))
    return {"error": error, "again": again(root + "-again")}


@scenario
def other_step(root: str) -> dict[str, Any]:
    """Rank 1 has counted one step more."""
    toy, rank = Toy(), dist.get_rank()
    with checkpointer(toy, root, options=ckpt.Options(on_error="warn", busy_timeout_s=2.0)) as cp:
        cp.restore(default=0)
        go(toy, cp, 3).wait_durable(60)
        together()
        save = go(toy, cp, 4 + rank)
        error = failure(lambda: save.wait_durable(60))
        together()
        go(toy, cp, 6).wait_durable(60)
    return {"error": error, "again": again(root)}


@scenario
def other_tensors(root: str, how: str) -> dict[str, Any]:
    """Rank 1 changes the replicated model, and changes it back."""
    rank = dist.get_rank()
    net = Tensors(first=torch.zeros(3), odd=torch.zeros(7, 3), wide=torch.zeros(40, 1024))
    kept = net.odd
    with ckpt.Checkpointer(
        {"net": nn.parallel.DistributedDataParallel(net)}, root, options=ckpt.Options(on_error="warn")
    ) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable(60)
        together()
        if rank == 1 and how == "more":
            net.register_parameter("another", nn.Parameter(torch.zeros(5, 5)))
        elif rank == 1:
            net.odd = nn.Parameter(torch.zeros(7, 4))
        save = cp.save(2)
        error = failure(lambda: save.wait_durable(60))
        together()
        net._parameters.pop("another", None)
        net.odd = kept
        cp.save(3).wait_durable(60)
    return {"error": error, "steps": list(steps_of(root))}


@scenario
def writer_stalls(root: str) -> dict[str, Any]:
    """The writer of rank 0 is stopped for a while, and then has many steps to write."""
    toy = Toy()
    with ckpt.Checkpointer(
        toy.state, ckpt.Tier(root, 1, 2), memory=ckpt.Memory(keep=8), options=ckpt.Options(on_error="warn")
    ) as cp:
        cp.restore(default=0)
        go(toy, cp, 1).wait_durable(60)
        together()
        writer = psutil.Process(cp.writer_pid)
        if dist.get_rank() == 0:
            writer.suspend()
        saves = [go(toy, cp, step) for step in range(2, 9)]
        time.sleep(2.0)  # the writer of rank 1 has all its parts stored, and looks for a commit less and less often
        writer.resume()
        errors = [failure(lambda save=save: save.wait_durable(60)) for save in saves]  # type: ignore[misc]
    return {"errors": errors, "again": again(root)}


@scenario
def other_restore(root: str) -> dict[str, Any]:
    """Rank 1 asks for a certain step, rank 0 for the newest; one asks for a restore, the other ends the run."""
    toy, rank = Toy(), dist.get_rank()
    with checkpointer(toy, root, **impatient()) as cp:
        cp.restore(default=0)
        for step in (1, 2, 3):
            go(toy, cp, step).wait_durable(60)
        together()
        error = failure(lambda: cp.restore(step=2 if rank == 1 else None))
        unchanged = toy.wrong(3)
    together()
    toy = Toy()
    cp = checkpointer(toy, root, **impatient())
    mixed = failure(cp.restore if rank == 0 else cp.close)
    together()
    failure(cp.close)
    return {"error": error, "unchanged": unchanged, "mixed": mixed, "again": again(root)}


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda newer, older: None,
    "part missing": lambda newer, older: of(newer, MANIFEST).unlink(),
    "part damaged": lambda newer, older: flip(of(newer, MANIFEST)),
    "data file of another attempt": lambda newer, older: shutil.copy(of(older, DATA), of(newer, DATA)),
    "data file damaged": lambda newer, older: flip(of(newer, DATA)),
    "data file cut short": lambda newer, older: os.truncate(of(newer, DATA), 5000),
}


def of(checkpoint: Path, kind: str) -> Path:
    """Return a file of rank 1. `checkpoint`: the folder of the run, followed by the checkpoint id."""
    (found,) = checkpoint_files(checkpoint.parent, kind, rank=1, of=checkpoint.name)
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


@scenario
def damaged(root: str) -> dict[str, Any]:
    """One file of rank 1 in the newest of two checkpoints, in every way."""
    toy, found = Toy(), {}
    with checkpointer(toy, root) as cp:
        cp.restore(default=0)
        checkpoints = [go(toy, cp, step).wait_durable(60).id for step in (1, 2)]
    together()
    for number, (how, damage) in enumerate(DAMAGE.items()):
        copy = Path(f"{root}-{number}")
        if dist.get_rank() == 0:
            shutil.copytree(root, copy)
            damage(copy / checkpoints[1], copy / checkpoints[0])
        together()
        found[how] = again(str(copy))
    return found


@scenario
def disk_fails(root: str, victim: int, fail: str, steps: int) -> dict[str, Any]:
    """The disk of one rank's writer fails repeatedly, at the points in `fail`. Report the result of each step."""
    toy, errors = Toy(), []
    with armed(fail, on=victim):
        cp = checkpointer(toy, root, options=ckpt.Options(on_error="warn"))
    with cp:
        cp.restore(default=0)
        for step in range(1, steps + 1):
            save = go(toy, cp, step)
            errors.append(failure(lambda save=save: save.wait_durable(60)))  # type: ignore[misc]
            together()
    return {"errors": errors, "again": again(root)}


@scenario
def staging_fails(root: str, how: str) -> dict[str, Any]:
    """Rank 1 cannot stage a step: the copy fails, or other code writes to its tensors meanwhile."""
    toy, rank = Toy(), dist.get_rank()
    wide = here(toy.clock.set_to["divided wide"])
    at = {"written while it is copied": "stage.eager"}.get(how)

    def meddle(name: str) -> None:
        if name == at:
            with torch.no_grad():
                wide.zero_()

    with checkpointer(toy, root, options=ckpt.Options(on_error="warn")) as cp:
        cp.restore(default=0)
        go(toy, cp, 1).wait_durable(60)
        together()
        if rank == 1 and at is None:
            inside.arm("trainer/stage.copied:eio")
        elif rank == 1:
            inside.at_points_of_staging(meddle)
        toy.advance(2, 0)
        save = cp.step(2)
        assert save is not None
        error = failure(lambda: save.wait_durable(60))
        together()
        inside.disarm()
        go(toy, cp, 3).wait_durable(60)
    return {"error": error, "steps": list(steps_of(root)), "again": again(root)}


@scenario
def disk_fills(root: str) -> dict[str, Any]:
    """For a while there is room for the small part of rank 0 and not for the large one of rank 1."""
    rank, errors = dist.get_rank(), list[str]()
    state = {"own": {"tensor": torch.zeros((6 if rank else 1) << 18)}}
    filler = Path(f"{root}-filler")
    with ckpt.Checkpointer(state, ckpt.Tier(root, 1, 2), options=ckpt.Options(on_error="warn")) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable(60)
        together()
        if rank == 0:
            free = shutil.disk_usage(root).free
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - (4 << 20))
        for step in range(2, 6):
            together()
            errors.append(failure(lambda step=step: cp.save(step).wait_durable(60)))  # type: ignore[misc]
            together()
            if rank == 0 and step == 4:
                filler.unlink()
        files = len(data_files(root)) // 2
    return {"errors": errors, "files": files}


@scenario
def oracle_sees(root: str) -> dict[str, Any]:
    """Report the results of `Toy.wrong` for a correct state and for wrong ones."""
    toy = Toy()
    toy.advance(1, 0)
    found = {"right": toy.wrong(1), "step": toy.wrong(2)}
    moment = here(toy.clock.state[toy.clock.set_to["divided wide"]]["moment"])
    moment.view(torch.int32)[3, 5] ^= 1
    found["bit"] = toy.wrong(1)
    toy.advance(1, 0)
    toy.own["rank"] = 1 - toy.own["rank"]
    return {**found, "rank": toy.wrong(1)}


def own_model() -> dict[str, Any]:
    """A model that each rank has for itself, under one name."""
    rank = dist.get_rank()
    return {"net": Tensors(weight=bits(f"stage {rank}", 0, 0, (4, 4)), bias=torch.ones(3))}


def save_unlike(root: str) -> None:
    """Save states that do not fit later: a model for each rank, and a replicated one."""
    own, alike = own_model(), {"net": nn.parallel.DistributedDataParallel(Tensors(weight=torch.ones(4, 5)))}
    for name, state in (("own", own), ("alike", alike)):
        with ckpt.Checkpointer(state, ckpt.Tier(f"{root}/{name}", 1, 3)) as cp:
            cp.restore(default=0)
            cp.step(1)
    say("saved")


@scenario
def cannot_hold(root: str) -> dict[str, Any]:
    """Restore the result of `save_unlike` of more ranks into states that do not fit."""
    found = {}
    own, alike = own_model(), {"net": nn.parallel.DistributedDataParallel(Tensors(weight=torch.zeros(4, 6)))}
    for name, state in (("own", own), ("alike", alike)):
        before = [t.detach().clone() for t in state["net"].state_dict().values()]
        with ckpt.Checkpointer(state, ckpt.Tier(f"{root}/{name}", 1, 3)) as cp:
            found[name] = failure(cp.restore)
        after = state["net"].state_dict().values()
        found[f"{name} unchanged"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return found


# -- the process --

ACTIONS: dict[str, Callable[..., Any]] = {"train": train, "save_unlike": save_unlike}


def main() -> None:
    faulthandler.register(signal.SIGUSR2)  # for who wonders why this takes so long
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for name, arguments in json.loads(sys.argv[1]):
        if name in ACTIONS:
            ACTIONS[name](**arguments)
            continue
        started = time.monotonic()
        try:
            result = SCENARIOS[name](**arguments)
        except Exception as error:
            traceback.print_exc()
            result = {"broken": f"{type(error).__name__}: {error}"}
        say("result", scenario=name, arguments=arguments, result=result, seconds=round(time.monotonic() - started, 2))
        together(120)
    dist.destroy_process_group()
