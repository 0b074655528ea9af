"""Redo logs end to end: real trainers and writers, killed for good, their files damaged, their disk full.

What a trainer said of a step before it died, that it is logged and what every bit of the state was, is what the folder
alone is held to afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import toy
from ckpt.cli.app import cli
from ckpt.errors import (
    CheckpointError,
    DeadlineError,
    NoCheckpointError,
    SaveError,
    SkippedError,
    UsageError,
    WriterError,
)
from ckpt.failpoints import REDO_POINTS
from ckpt.format.manifest import Attempt
from ckpt.redo.frame_file import StoredFrame
from ckpt.restore import redo_logs
from kills import Trainer, steps_on_disk
from model_disk import Volume, volume
from processes import eventually, killed, run_script, writers

State = dict[str, Any]
EVERY = 7

# -- a training run in a process of its own --


def say(*words: object) -> None:
    """One whole line, so that a kill cannot leave half of one."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Watcher(logging.Handler):
    """Arms the next writer once one has taken over; or dies with the first."""

    def __init__(self, spares: list[str], die: bool) -> None:
        super().__init__()
        self.spares, self.die = spares, die

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.die and "the writer is gone" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "a new writer has taken over" in text:
            say("replaced")
            os.environ["CKPT_FAIL"] = self.spares.pop(0) if self.spares else ""


def main() -> None:
    """Restore and train; `words`: `step` until there are so many, `back STEP`, `other` (another history), `hang`."""
    settings = json.loads(sys.argv[1])
    run, words, every = settings["run"], settings["words"], settings.get("every", EVERY)
    spares, state = settings.get("spares", []), toy.build()
    logging.getLogger("ckpt").addHandler(Watcher(spares, settings.get("die", False)))
    torch.set_num_threads(1)
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run, every=every, keep=2, log_every_step=True)]) as cp:
        os.environ["CKPT_FAIL"] = spares.pop(0) if spares else ""
        step = cp.restore(default=0)
        done = cp.last_restore
        assert done is not None
        say("start", json.dumps([step, done.tier, done.redone, done.base_step, len(done.skipped), toy.digest(state)]))
        for word in words:
            verb, _, what = word.partition(" ")
            if verb == "back":
                step = cp.restore(step=int(what))
                done = cp.last_restore
                say("back", step, done.redone, toy.digest(state))
            elif verb == "other":
                torch.manual_seed(int(what))
            elif verb == "hang":
                say("hangs")
                signal.pause()
            while verb == "step" and step < int(what):
                toy.train_step(state)
                step += 1
                save = cp.step(step)
                assert save is not None
                if settings.get("wait", True):
                    save.logged(60)
                    say("logged", step, toy.digest(state))
        cp.wait(60)
    say("closed", step, toy.digest(state))
    os._exit(0)


MAIN = "import test_redo; test_redo.main()"


@dataclass
class Run:
    """A run in a folder, and what its trainers have said of it."""

    folder: str
    logged: dict[int, str] = field(default_factory=dict)  # the newest history: what every bit was
    start: list[Any] = field(default_factory=list)
    replaced: int = 0

    def hear(self, said: str) -> None:
        for line in said.splitlines():
            word, _, rest = line.partition(" ")
            if word == "start":
                self.start = json.loads(rest)
            elif word in ("logged", "closed"):
                step, digest = rest.split()
                self.logged = {s: d for s, d in self.logged.items() if s < int(step)} | {int(step): digest}
            elif word == "back":
                self.logged = {s: d for s, d in self.logged.items() if s <= int(rest.split()[0])}
            elif word == "replaced":
                self.replaced += 1

    @property
    def newest(self) -> int:
        return max(self.logged, default=0)

    def settings(self, *words: str, **settings: Any) -> str:
        return json.dumps({"run": self.folder, "words": words, **settings})

    def train(self, *words: str, fail: str = "", **settings: Any) -> subprocess.CompletedProcess[str]:
        self.start = []
        done = run_script(MAIN, self.settings(*words, **settings), fail=fail)
        self.hear(done.stdout)
        return done

    def begin(self, *words: str, fail: str = "", **settings: Any) -> Trainer:
        return Trainer(MAIN, self.settings(*words, **settings), fail=fail)

    def end(self, trainer: Trainer, said: str, sockets: Path) -> None:
        """Trainer and writer are gone for good, as with their machine: only the folder is left."""
        trainer.process.send_signal(signal.SIGSTOP)
        for process in writers(sockets):
            process.kill()
        trainer.kill()
        gone(sockets)
        self.start = []
        self.hear(said + trainer.read_until("the end"))


def gone(sockets: Path) -> None:
    """The writers, whoever has to reap them."""
    for process in writers(sockets):
        process.kill()
    assert eventually(lambda: not writers(sockets))


def reference(steps: int) -> list[str]:
    """The digest after each step of a run that nobody killed, without any checkpointing."""
    state = toy.build()
    found = [toy.digest(state)]
    for _ in range(steps):
        toy.train_step(state)
        found.append(toy.digest(state))
    return found


@pytest.fixture(scope="module")
def right() -> list[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the trainers; others compare with processes that have as many as there are cores
    try:
        return reference(400)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def run(run_dir: str) -> Run:
    return Run(run_dir)


def frames(folder: str | Path, rank: int = 0) -> dict[int, StoredFrame]:
    """The whole frames of a rank, by step; the newest history counts."""
    found = redo_logs.look(f"file://{folder}").frames.get(rank, {})
    return {attempt.step: found[attempt] for attempt in sorted(found)}


def logs(folder: str | Path) -> list[Path]:
    """Of a run, oldest first."""
    return sorted(Path(folder, "redo").iterdir(), key=lambda path: Attempt.parse(path.name.rsplit(".", 2)[0]))


@contextlib.contextmanager
def opened(state: State, folder: str | Path, **settings: Any) -> Iterator[ckpt.Checkpointer]:
    """A Checkpointer with a redo log that only looks: what it does not restore is left to its writer."""
    memory = settings.pop("memory", ckpt.Memory())
    own = {k: settings.pop(k) for k in ("every", "keep", "max_restore_s") if k in settings}
    tier = ckpt.Tier(str(folder), **{"every": 1000, "keep": 3, **own}, log_every_step=True)
    with ckpt.Checkpointer(state, [memory, tier], **settings) as cp:
        yield cp


# -- deaths --


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 25), marks=pytest.mark.long)])
def test_killed_at_random_steps_with_only_the_folder_left(
    seeds: range, run: Run, own_sockets: Path, right: list[str]
) -> None:
    """Every start after a death of both processes is at the very step that was last said to be logged, or at a later
    one that is whole; and it has the bits of a run that was never killed."""
    trainer, redone = run.begin("step 1000"), 0
    said = trainer.read_until("start")
    for seed in seeds:
        dice = random.Random(seed)
        for _ in range(dice.randrange(1, 12)):
            said += trainer.read_until("logged")
        eventually(lambda: False, dice.uniform(0, 0.02))
        run.end(trainer, said, own_sockets)
        newest = run.newest
        assert newest > 0
        trainer = run.begin("step 1000")
        said = trainer.read_until("start")
        run.hear(said)
        step, tier, steps, base, skipped, digest = run.start
        assert step >= newest and tier == f"file://{run.folder}", f"seed {seed}: {newest} was logged, went on at {step}"
        assert digest == right[step] and not skipped
        assert not steps or base + steps == step
        redone += steps
    assert redone, "no step was ever redone"
    run.end(trainer, said, own_sockets)
    assert all(digest == right[step] for step, digest in run.logged.items())


def test_writer_killed_at_every_moment_of_an_append(run: Run, own_sockets: Path, right: list[str]) -> None:
    """The next writer logs what was pending, be it the very first step: every step is logged, the end is right, and a
    step of before, between and after the deaths can be redone."""
    for part, points in enumerate((REDO_POINTS[:2], REDO_POINTS[2:])):
        chain = Run(f"{run.folder}{part}")
        fails = [f"writer/{points[0]}:kill:1", f"writer/{points[1]}:kill:1", f"writer/{points[0]}:kill:9"]
        trainer = chain.begin("step 30", "hang", fail=fails[0], spares=["", *fails[1:]][1:], every=1000)
        said = trainer.read_until("hangs")
        chain.end(trainer, said, own_sockets)
        assert chain.replaced == 3, said
        assert chain.logged == {step: right[step] for step in range(1, 31)}
        state = toy.build()
        with opened(state, chain.folder) as cp:
            assert cp.restore() == 30 and toy.digest(state) == right[30]
            for step in sorted(frames(chain.folder)):
                assert cp.restore(step=step) == step and toy.digest(state) == right[step]
            assert len(frames(chain.folder)) == 30


def test_both_killed_at_every_moment_of_an_append(run: Run, own_sockets: Path, right: list[str]) -> None:
    """The trainer dies with its writer in the middle of an append, of the very first frame of the run, of the first of
    an incarnation or of a later one: the step before is there, or the step itself. Where no frame was ever whole
    nothing was acknowledged, and the run begins anew."""
    for number, (nth, point) in enumerate(itertools.product((1, 6), REDO_POINTS)):
        before = run.newest
        done = run.train("step 300", fail=f"writer/{point}:kill:{nth}", die=True)
        assert killed(done), done.stderr
        gone(own_sockets)
        step, _, _, _, skipped, digest = run.start
        assert before <= step <= before + 2 and digest == right[step] and not skipped, f"before {point}:{nth}"
        assert number > 1 or (step == 0 and logs(run.folder) and not frames(run.folder))
    before = run.newest
    trainer = run.begin("hang")
    run.end(trainer, trainer.read_until("hangs"), own_sockets)
    assert before <= run.start[0] <= before + 2 and run.start[5] == right[run.start[0]]


# -- going back --


def test_what_was_undone_stays_undone(run: Run, own_sockets: Path, right: list[str]) -> None:
    """A rollback to a step that only the redo log has, and a death at once or after some steps of another history: the
    next start goes on there, and never at a step of the history that was given up."""
    trainer = run.begin("step 40", "back 23", "hang", every=20)  # far from the newest, and not in memory
    run.end(trainer, trainer.read_until("hangs"), own_sockets)
    assert run.newest == 23
    trainer = run.begin("other 5", "step 30", "back 26", "other 6", "step 29", "hang", every=1000)
    said = trainer.read_until("hangs")
    run.end(trainer, said, own_sockets)
    assert run.start[:2] == [23, f"file://{run.folder}"] and run.start[5] == right[23] and run.start[2] > 0
    assert "back 26 " in said and run.newest == 29 and run.logged[27] != right[27]
    trainer = run.begin("hang")
    run.end(trainer, trainer.read_until("hangs"), own_sockets)
    assert run.start[0] == 29 and run.start[5] == run.logged[29]
    state = toy.build()
    with opened(state, run.folder) as cp:
        for step in (29, 28, 27, 26, 24, 23, 21):
            assert cp.restore(step=step) == step and toy.digest(state) == run.logged[step], step


# -- damage --


def logged_run(folder: str, steps: int, every: int) -> list[str]:
    """The digest of each step of a run that was logged in this process; `{folder}.copy` is what it left."""
    state, found = toy.build(), [""]
    with opened(state, folder, every=every, keep=3) as cp:
        cp.restore(default=0)
        for step in range(1, steps + 1):
            toy.train_step(state)
            save = cp.step(step)
            assert save is not None and save.logged(60).step == step
            if save.tiers:
                save.committed(60)
            found.append(toy.digest(state))
        shutil.copytree(folder, f"{folder}.copy")
    return found


def flip(path: str | Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def newest_pack(folder: Path) -> Path:
    return max((folder / "packs").iterdir(), key=lambda path: Attempt.parse(".".join(path.name.split(".")[:2])))


@dataclass(frozen=True)
class Hurt:
    """What is done to the folder, and which step comes back, of how many redone."""

    what: Callable[[Path, dict[int, StoredFrame]], object]
    step: int
    redone: int


HURT = {
    "nothing": Hurt(lambda folder, found: None, 59, 19),
    "torn tail": Hurt(lambda folder, found: os.truncate(found[59].path, found[59].offset + found[59].size - 1), 58, 18),
    "torn in its head": Hurt(lambda folder, found: os.truncate(found[59].path, found[59].offset + 9), 58, 18),
    "newest frame": Hurt(lambda folder, found: flip(found[59].path, found[59].payload[0] + 99), 58, 18),
    "head of a frame": Hurt(lambda folder, found: flip(found[57].path, found[57].offset + 2), 56, 16),
    "far from the end": Hurt(lambda folder, found: flip(found[42].path, found[42].payload[0] + 999), 41, 1),
    "first frame of the file": Hurt(lambda folder, found: flip(found[41].path, found[41].payload[0] + 999), 40, 0),
    "its checkpoint": Hurt(lambda folder, found: flip(newest_pack(folder), 30000), 59, 39),
    "its checkpoint is gone": Hurt(lambda folder, found: newest_pack(folder).unlink(), 59, 39),
    "newest log deleted": Hurt(lambda folder, found: os.unlink(found[59].path), 40, 0),
    "all logs deleted": Hurt(lambda folder, found: shutil.rmtree(folder / "redo"), 40, 0),
}


def test_damage_costs_steps_and_never_bits(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is torn, flipped or gone: the newest step that is whole comes back, with every bit, and what was passed
    over is said. An end that is torn, as a killed run leaves it, is no damage."""
    caplog.set_level(logging.WARNING, "ckpt")
    digests = logged_run(run_dir, 59, 20)
    for number, (how, hurt) in enumerate(HURT.items()):
        folder = Path(f"{run_dir}{number}")
        shutil.copytree(f"{run_dir}.copy", folder)
        hurt.what(folder, frames(folder))
        caplog.clear()
        state = toy.build()
        with opened(state, folder) as cp:
            step, done = cp.restore(), cp.last_restore
            assert done is not None
            assert (step, toy.digest(state)) == (hurt.step, digests[hurt.step]), how
            assert done.redone == hurt.redone and (done.base_step or step) + done.redone == step, how
            said = [r.getMessage() for r in caplog.records if "redo log" in r.getMessage()] or done.skipped
            silent = ("nothing", "torn tail", "torn in its head", "newest log deleted", "all logs deleted")
            assert bool(said) == (how not in silent), how


def test_negative_control_a_wrong_byte_would_be_seen(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the digest of a frame not compared, a flipped bit would be met in what it stores, and is seen there."""
    digests, state = logged_run(run_dir, 6, 100), toy.build()
    found = frames(f"{run_dir}.copy")[6]
    values = found.payload[0] + found.payload[1] - found.values
    flip(found.path, values - 20)  # of the last blob that is stored
    with opened(state, f"{run_dir}.copy") as cp:
        assert cp.restore() == 5 and toy.digest(state) == digests[5]
        monkeypatch.setattr(redo_logs.Logs, "verify", lambda *_: None)
        assert cp.restore(step=5) == 5
        with pytest.raises(CheckpointError, match=r"could not be redone|does not decompress|damaged"):
            cp.restore(step=6)


# -- all that a step may do --

Training = tuple[State, Callable[[int], None]]


def bits(value: Any) -> str:
    """A digest of every bit, and of every plain value."""
    total = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            total.update(f"{one.dtype} {tuple(one.shape)}".encode())
            total.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif hasattr(one, "state_dict"):
            add(one.state_dict())
        elif isinstance(one, dict):
            for key in sorted(one, key=str):
                total.update(str(key).encode())
                add(one[key])
        elif isinstance(one, (list, tuple)):
            for each in one:
                add(each)
        else:
            total.update(repr(one).encode())

    add(value)
    return total.hexdigest()


def net(size: int = 64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Tanh(), torch.nn.Linear(size, size))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.roll(1, 1)).pow(2).mean()


def backward(model: torch.nn.Module, step: int) -> None:
    loss_of(model, step).backward()


def with_optimizer(
    make: Callable[[Any], torch.optim.Optimizer], meddle: Callable[[Any, int], None] | None = None
) -> Any:
    """`meddle(model, step)`: with the gradients, before the optimizer steps."""

    def build(at: int) -> Training:
        model = net()
        optim = make(model.parameters())

        def train(step: int) -> None:
            optim.zero_grad()
            backward(model, step)
            if meddle is not None:
                meddle(model, step)
            optim.step()

        return {"model": model, "optim": optim}, train

    return build


def schedule(before: bool) -> Any:
    """A learning rate, betas and weight decay that change at every step."""

    def build(at: int) -> Training:
        model = net()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        sched = torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, 100)

        def train(step: int) -> None:
            if not before and step > 1:  # after cp.step() of the step before
                sched.step()
            optim.zero_grad()
            backward(model, step)
            optim.step()
            if before:
                sched.step()
                optim.param_groups[0]["weight_decay"] = 0.1 / step

        return {"model": model, "optim": optim, "sched": sched}, train

    return build


def group_added(at: int) -> Training:
    """At step 6, in the middle of an interval."""
    model, more = net(), net()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if at >= 6:
        optim.add_param_group({"params": list(more.parameters()), "lr": 3e-3, "weight_decay": 0.5})

    def train(step: int) -> None:
        if step == 6:
            optim.add_param_group({"params": list(more.parameters()), "lr": 3e-3, "weight_decay": 0.5})
        optim.zero_grad()
        backward(model, step)
        if step >= 6:
            backward(more, step)
        optim.step()

    return {"model": model, "more": more, "optim": optim}, train


def started_again(at: int) -> Training:
    """At step 6 the optimizer forgets all that it knew."""
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(step: int) -> None:
        if step == 6:
            optim.state.clear()
            optim.param_groups[0].update(lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
        optim.zero_grad()
        backward(model, step)
        optim.step()

    return {"model": model, "optim": optim}, train


def scaled(at: int) -> Training:
    """A loss scaler finds infinite gradients in every third step, and leaves it out."""
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def train(step: int) -> None:
        optim.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step % 3 == 0:
            next(model.parameters()).grad[3, 5] = float("inf")  # type: ignore[index]
        scaler.step(optim)
        scaler.update()

    return {"model": model, "optim": optim, "scaler": scaler}, train


def left_out(at: int) -> Training:
    """Every third step the optimizer does not step, though the model's buffers change."""
    model = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(64))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(step: int) -> None:
        optim.zero_grad()
        backward(model, step)
        if step % 3:
            optim.step()
        optim.zero_grad()

    return {"model": model, "optim": optim}, train


def accumulated(at: int) -> Training:
    state, _ = with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True))(at)

    def train(step: int) -> None:
        state["optim"].zero_grad()
        for part in range(3):
            backward(state["model"], 3 * step + part)
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.01)
        state["optim"].step()

    return state, train


def masters(at: int) -> Training:
    """bf16 weights, and what the optimizer knows of them in fp32."""
    model = net().to(torch.bfloat16)
    master = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    optim = torch.optim.AdamW(master.values(), lr=1e-2)

    def train(step: int) -> None:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        model.zero_grad()
        (model(x) - x).float().pow(2).mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            master[name].grad = p.grad.float()
        optim.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(master[name])

    return {"model": model, "master": master, "optim": optim}, train


def growing(at: int) -> Training:
    """Plain values that the memory for snapshots has to be made larger for, again and again."""
    state, step_of = with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2))(at)
    state["meta"] = {"losses": [], "text": "x"}

    def train(step: int) -> None:
        step_of(step)
        state["meta"]["losses"] += [step / 7 + i for i in range(1000 * step)]

    return state, train


def tiny(at: int) -> Training:
    """Weights and moments where fp32 has few bits left, and zeros of both signs."""
    state, _ = with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-41, eps=1e-12, weight_decay=0.3))(at)
    model, optim = state["model"], state["optim"]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-39)

    def train(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) * 1e-20
            p.grad[..., ::7] = -0.0
        optim.step()

    return state, train


def not_a_number(model: Any, step: int) -> None:
    if step == 4:
        model[0].weight.grad[1, 2:9] = float("nan")
        model[2].bias.grad[3] = -float("inf")


KINDS: dict[str, dict[str, Callable[[int], Training]]] = {
    "as usual": {
        "schedule before": schedule(True),
        "accumulated": accumulated,
        "masters": masters,
        "coupled": with_optimizer(lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1)),
        "fused": with_optimizer(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True)),
        "amsgrad": with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True)),
        "sgd": with_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    },
    "changing": {"schedule after": schedule(False), "group added": group_added, "started again": started_again},
    "disturbed": {
        "scaled": scaled,
        "left out": left_out,
        "not a number": with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2), not_a_number),
        "tiny": tiny,
    },
    "growing": {"growing": growing},
    "flushed": {"tiny": tiny, "sgd": with_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))},
}


def side_by_side(kind: str, at: int) -> tuple[State, dict[str, State], Callable[[int], None]]:
    """Several trainings in one state, as it looks at a step."""
    made = {name: build(at) for name, build in KINDS[kind].items()}
    whole = {f"{name} {key}": one for name, (state, _) in made.items() for key, one in state.items()}

    def train(step: int) -> None:
        for _, each in made.values():
            each(step)

    return whole, {name: state for name, (state, _) in made.items()}, train


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_every_kind_comes_back(kind: str, run_dir: str) -> None:
    """From a frame that stands alone, from a checkpoint, and through many steps: bit by bit what it was; and trained on
    from there it becomes what it became."""
    found = [dict[str, str]()]
    torch.set_flush_denormal(kind == "flushed")
    try:
        state, parts, train = side_by_side(kind, 0)
        with opened(state, run_dir, every=8, keep=9) as cp:
            cp.restore(default=0)
            for step in range(1, 14):
                train(step)
                assert cp.step(step) is not None
                found.append({name: bits(part) for name, part in parts.items()})
                if step % 8 == 0:
                    cp.wait(60)  # else the checkpoint comes later
            cp.wait(60)
            shutil.copytree(run_dir, f"{run_dir}.copy")
        there = list(frames(f"{run_dir}.copy"))
        assert there == list(range(1, 14)) if kind != "changing" else there[-8:] == list(range(6, 14))
        for steps in ((13, 12, 9, 7, 6), (5, 2, 1)):
            if not set(steps) <= set(there):
                continue  # what is older than two steps that stand alone is not kept
            state, parts, train = side_by_side(kind, steps[0])
            with opened(state, f"{run_dir}.copy") as cp:
                if steps[0] == 13:
                    assert cp.restore() == 13 and cp.last_restore is not None and cp.last_restore.redone == 5
                for step in steps:
                    assert cp.restore(step=step) == step
                    assert {name: bits(part) for name, part in parts.items()} == found[step], f"step {step}"
        for step in range(2, 14) if kind != "changing" else ():
            train(step)
            assert {name: bits(part) for name, part in parts.items()} == found[step]
    finally:
        torch.set_flush_denormal(False)


def test_a_step_that_is_not_finite_is_restored_by_its_number_only(run_dir: str) -> None:
    """However many of them a training has left behind it; and what is after them is whole."""
    state, train = with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2))(0)
    found = [""]
    with opened(state, run_dir, max_restore_s=1e-6) as cp:
        cp.restore(default=0)
        for step in range(1, 41):
            train(step)
            cp.step(step, finite=step not in (3, 4) and step <= 12)
            found.append(bits(state))
        cp.wait(60)
        shutil.copytree(run_dir, f"{run_dir}.copy")
    assert sum(one.frame.base is None for one in frames(f"{run_dir}.copy").values()) > 15, "max_restore_s was small"
    assert {11, 12} <= frames(f"{run_dir}.copy").keys(), "a step that has gone wrong has displaced one that has not"
    with opened(state, f"{run_dir}.copy") as cp:
        assert cp.restore() == 12 and bits(state) == found[12]
        for step in (40, 30, 11):
            assert cp.restore(step=step) == step and bits(state) == found[step]


# -- a log that cannot keep up, or not be written --


def adam(run: str, **settings: Any) -> tuple[State, Callable[[int], None], Any]:
    state, train = with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2))(0)
    return state, train, opened(state, run, **settings)


def check(folder: str | Path, found: dict[int, str]) -> None:
    """These steps can be restored from a copy of the folder, with these bits."""
    state, _, opening = adam(str(folder))
    with opening as cp:
        for step in found:
            assert cp.restore(step=step) == step and bits(state) == found[step]


def test_training_waits_for_a_log_that_does_not_come_along(run_dir: str, own_sockets: Path) -> None:
    """With every slot waiting to be logged the next step waits, and nothing is left out; nor is anything of what waits
    when the run is closed."""
    state, train, opening = adam(run_dir, memory=ckpt.Memory(every=10))
    found = dict[int, str]()
    with opening as cp:
        cp.restore(default=0)

        def work() -> None:
            for step in range(2, 16):
                train(step)
                found[step] = bits(state)
                assert cp.step(step) is not None

        train(1)
        found[1] = bits(state)
        cp.step(1).logged(60)  # type: ignore[union-attr]
        (writer,) = writers(own_sockets)
        writer.suspend()
        thread = threading.Thread(target=work)
        thread.start()
        assert eventually(lambda: len(found) > 3)
        assert not eventually(lambda: len(found) > 10, 1.0), "what has not been logged was overwritten"
        writer.resume()
        thread.join(60)
        cp.wait(60)
        writer.suspend()
        for step in (16, 17):
            train(step)
            found[step] = bits(state)
            assert cp.step(step) is not None
        with pytest.raises(DeadlineError):
            cp.wait(0.2)
        threading.Timer(0.5, writer.resume).start()
    shutil.copytree(run_dir, f"{run_dir}.copy")
    assert list(frames(f"{run_dir}.copy")) == list(range(1, 18))
    check(f"{run_dir}.copy", found)


def test_a_close_that_cannot_wait_leaves_the_rest_to_the_writer(run_dir: str, own_sockets: Path) -> None:
    """It says so; what was sent is logged when the writer can go on."""
    _, train, opening = adam(run_dir)
    with pytest.raises(DeadlineError), opening as cp:
        cp.restore(default=0)
        train(1)
        cp.step(1).logged(60)  # type: ignore[union-attr]
        (writer,) = writers(own_sockets)
        writer.suspend()
        for step in (2, 3):
            train(step)
            cp.step(step)
        cp.close(timeout_s=0.5)
    writer.resume()
    assert eventually(lambda: list(frames(run_dir)) == [1, 2, 3]) and eventually(lambda: not writer.is_running())


def test_steps_are_skipped_where_training_must_not_wait(run_dir: str, own_sockets: Path) -> None:
    """Those are not logged, their handles say so, and those that are can be redone all the same."""
    state, train, opening = adam(run_dir, on_busy="skip")
    found, skipped, saves = dict[int, str](), list[int](), list[ckpt.Save]()
    with opening as cp:
        cp.restore(default=0)
        train(1)
        cp.save(1).logged(60)
        (writer,) = writers(own_sockets)
        for step in range(2, 31):
            if step in (10, 20):
                writer.suspend() if step == 10 else writer.resume()
            train(step)
            found[step] = bits(state)
            save = cp.step(step)
            assert save is not None
            saves.append(save)
            if step >= 20:
                assert eventually(lambda: not any(save.unfinished() for save in saves), 60.0)
        for save in saves:
            try:
                save.logged(60)
            except SkippedError:
                skipped.append(save.step)
        shutil.copytree(run_dir, f"{run_dir}.copy")
    assert set(skipped) & set(range(10, 20)) and 30 not in skipped
    check(f"{run_dir}.copy", {step: digest for step, digest in found.items() if step not in skipped})


def test_no_writer_any_more(run_dir: str, own_sockets: Path) -> None:
    """When writers keep dying, what waits to be logged fails with the rest, and training goes on without waiting."""
    _, train, opening = adam(run_dir, on_error="warn")
    with opening as cp:
        cp.restore(default=0)
        saves = list[ckpt.Save]()
        for step in range(1, 30):
            train(step)
            saves += [cp.step(step)]  # type: ignore[list-item]
            if cp._session.supervisor.failure is not None:
                break
            with contextlib.suppress(WriterError):  # that there is none may be found out just now
                saves[-1].staged(60)
            if step % 3 == 0:
                for writer in writers(own_sockets):
                    writer.kill()
                eventually(lambda: bool(writers(own_sockets)) or cp._session.supervisor.failure is not None, 10.0)
        assert cp._session.supervisor.failure is not None
        cp.wait(60)
        with pytest.raises(CheckpointError, match="no writer any more") as failed:
            saves[-1].logged(60)
        assert "still in memory" not in str(failed.value)  # it ends with this process


@pytest.fixture(params=["tmpfs", pytest.param("ext4", marks=pytest.mark.long)])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    """A file system with little room."""
    with volume(tmp_path, request.param, 24) as made:
        yield made


def test_the_disk_is_full_for_a_while(small: Volume) -> None:
    """The first step that does not fit is said, further ones only if asked for; training goes on; with room again the
    log begins again, and no step before or after is lost."""
    run = str(small.path / "run")
    state, train, opening = adam(run)
    found = dict[int, str]()
    with opening as cp:
        cp.restore(default=0)

        def step(number: int) -> ckpt.Save:
            train(number)
            found[number] = bits(state)
            save = cp.step(number)
            assert save is not None
            return save

        for number in range(1, 6):
            step(number).logged(60)
        filler = small.path / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))
        raised = list[str]()
        for number in range(6, 12):
            try:
                save = step(number)
            except SaveError as error:
                raised.append(str(error))
            while save.unfinished():
                time.sleep(0.02)
        assert (
            len(raised) == 1 and "step 6 is not in the redo log" in raised[0] and "no space left" in raised[0].lower()
        )
        with pytest.raises(SaveError, match="step 11 is not in the redo log"):
            save.logged(60)
        filler.unlink()
        for number in range(12, 16):
            step(number).logged(60)
        copy = small.path.parent / "copy"
        shutil.copytree(run, copy)
    there = frames(copy)
    assert set(there) == {*range(1, 6), *range(12, 16)} and there[12].frame.base is None
    check(copy, {number: found[number] for number in there})


# -- commands --


def test_commands_beside_a_redo_log(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` and `show` tell of it, and no command changes it."""
    logged_run(run_dir, 13, 5)
    folder = f"{run_dir}.copy"

    def command(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main([*words], standalone_mode=False)
        return int(code or 0), " ".join(capsys.readouterr().out.split())  # lines break where they are full

    before = {path.name: path.read_bytes() for path in logs(folder)}
    assert before
    code, said = command("ls", folder)
    assert code == 0 and "redo log: steps 11 to 13" in said and "step 10 is loaded, and 3 steps after it redone" in said
    found = json.loads(command("ls", folder, "--json")[1])["redo"]
    assert [one["step"] for one in found] == [11, 12, 13] and [one["redone"] for one in found] == [1, 2, 3]
    assert "redo log: steps 11 to 13" in command("show", folder)[1]
    assert [one["step"] for one in json.loads(command("show", folder, "--json")[1])["redo"]] == [11, 12, 13]
    with pytest.raises(NoCheckpointError, match="Step 12 is in the redo log, which leads to it from step 10"):
        command("show", folder, "--step", "12")
    with pytest.raises(NoCheckpointError, match="does not hold step 14"):
        command("show", folder, "--step", "14")
    assert command("verify", folder, "--all")[0] == 0
    assert command("copy", folder, f"{run_dir}.there", "--yes")[0] == 0
    assert command("gc", folder, "--yes")[0] == 0
    assert command("prune", folder, "--keep-last", "1", "--yes")[0] == 0
    assert {path.name: path.read_bytes() for path in logs(folder)} == before
    state = toy.build()
    with opened(state, folder) as cp:
        assert cp.restore() == 13
    state = toy.build()
    with opened(state, f"{run_dir}.there") as cp:
        assert cp.restore() == 10


def test_a_run_that_has_nothing_but_a_redo_log(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a run with something to restore: it is restored, shown, and not begun over."""
    digests = logged_run(run_dir, 4, 100)
    folder = f"{run_dir}.copy"
    assert steps_on_disk(folder) == []
    cli.main(["ls", folder], standalone_mode=False)
    assert "redo log: steps 1 to 4" in capsys.readouterr().out
    with pytest.raises(NoCheckpointError, match="Step 1 is in the redo log"):
        cli.main(["show", folder], standalone_mode=False)
    state = toy.build()
    with opened(state, folder) as cp:
        with pytest.raises(UsageError, match="call restore"):
            cp.step(1)
        assert cp.restore(default=0) == 4 and toy.digest(state) == digests[4]
        assert cp.last_restore is not None and (cp.last_restore.redone, cp.last_restore.base_step) == (3, 1)


def test_where_no_redo_log_can_be(tmp_path: Path) -> None:
    """A bucket cannot be appended to; and a handle without a log says what to do."""
    with pytest.raises(UsageError, match="log_every_step=True on a Tier for a folder"):
        ckpt.Tier("s3://bucket/run", log_every_step=True)
    state, train = with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2))(0)
    with ckpt.Checkpointer(state, str(tmp_path / "run")) as cp:
        train(1)
        with pytest.raises(SaveError, match="log_every_step=True"):
            cp.save(1).logged(60)
