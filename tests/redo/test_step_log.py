"""A redo log written and redone, without processes: real trainings, whose every step comes back bit for bit.

A job here trains, and seals each step into a slot of an arena, as the trainer does; a `StepLog` appends it, as the
writer does; and `redo` makes of the files what was in the slot.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

from ckpt.errors import CorruptError, FullError, SaveError, StoreError
from ckpt.format.digest import blob_digest
from ckpt.format.layout import BLOB
from ckpt.format.manifest import Attempt, redo_name
from ckpt.ipc.arena import EMPTY, SEALED, Arena, Label
from ckpt.redo import adam as predict
from ckpt.redo import append, encode_frame, frame
from ckpt.redo.adam import AdamSettings
from ckpt.redo.append import Appended, StepLog
from ckpt.redo.encode_frame import Sealed, foresee
from ckpt.redo.frame import DELTA, DERIVED, PREDICTED, RAW, SAME, WHOLE
from ckpt.redo.frame_file import StoredFrame
from ckpt.redo.optimizer_recipe import GroupWatch, find_recipes
from ckpt.restore.redo_logs import Logs, RedoChain, look
from ckpt.restore.redo_source import redo
from ckpt.restore.sources import HeldSnapshot
from ckpt.state.capture import Capture, Reading

ROOM = 1 << 20
State = dict[str, Any]


@dataclass
class Job:
    """One rank that logs every step. `kept`: what each logged step was, by its attempt."""

    state: State
    root: Path
    max_restore_s: float = 1e9
    threads: int = 2
    epoch: int = 1
    kept: dict[Attempt, tuple[bytes, list[Any]]] = field(default_factory=dict)
    committed: set[Attempt] = field(default_factory=set)
    step: int = 0

    def __post_init__(self) -> None:
        self.capture, self.watch = Capture(self.state), GroupWatch()
        self.root.mkdir(exist_ok=True)
        self.log = StepLog(str(self.root), 0, 1, max_restore_s=self.max_restore_s, threads=self.threads)
        self.arena: Arena | None = None
        for optimizer in self.capture.optimizers:
            optimizer.register_step_pre_hook(lambda optimizer, *_: self.watch.note(optimizer))

    def attempt(self, step: int) -> Attempt:
        return Attempt(self.epoch, step, f"{self.epoch:08x}")

    def read(self) -> Reading:
        return self.capture.read()

    def seal(self) -> Sealed:
        """The state as it is now, in the slot that was not used last."""
        self.step += 1
        reading = self.read()
        values = json.dumps(reading.values).encode()
        layout = reading.layout
        size = layout.arrangement.data_size
        if self.arena is None or not self.arena.fits(size, len(values)):
            self.arena = Arena.create(2, size + len(values) + ROOM)
            weakref.finalize(self, self.arena.close)
        slot = self.step % 2
        data = self.arena.data(slot)
        for tensor, offset in zip(reading.tensors, layout.arrangement.offsets, strict=True):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            data[offset : offset + tensor.nbytes] = raw.data
        label = Label(SEALED, self.step, self.attempt(self.step), layout.digest, size, len(values), 1.0, None)
        self.arena.set_label(slot, label)
        self.arena.values(slot, label)[:] = values
        return Sealed(self.arena, slot, label, layout)

    def append(self, sealed: Sealed | None = None) -> Appended:
        """Log a step, by default the state as it is now."""
        sealed = sealed or self.seal()
        reading, stepping = self.read(), self.capture.stepping
        recipes = find_recipes(reading.layout, reading.tensors, stepping)
        told = self.watch.told([optimizer for _, optimizer, _ in stepping])
        settings = [None if row is None else AdamSettings(*row) for row in told]
        found = self.log.append(sealed, recipes, settings, self.committed)
        values = json.loads(bytes(sealed.arena.values(sealed.slot, sealed.label)))
        self.kept[sealed.attempt] = bytes(sealed.data), values
        return found

    @property
    def logs(self) -> Logs:
        return look(f"file://{self.root}")

    @property
    def newest(self) -> Attempt:
        return self.attempt(self.step)

    def frames(self) -> list[StoredFrame]:
        """Those of the log, in the order of their steps."""
        found = self.logs.frames.get(0, {})
        return [found[attempt] for attempt in sorted(found)]

    def check(self) -> list[StoredFrame]:
        """Every step in the log is redone, and is bit for bit what it was. The frames."""
        logs = self.logs
        assert not logs.problems
        for attempt in logs.frames[0]:
            for chain in logs.chains(0, attempt, {}):
                with redone(logs.url, chain) as found:
                    data, values = self.kept[attempt]
                    assert bytes(found.arena.data(0, len(data))) == data
                    assert json.loads(found.values()) == values
        return self.frames()


@contextmanager
def redone(url: str, chain: RedoChain) -> Iterator[HeldSnapshot]:
    found = redo(url, chain)
    try:
        found.check()
        yield found
    finally:
        found.arena.close()


def forms_of(stored: StoredFrame) -> dict[str, set[int]]:
    """How the blobs of each tensor are stored."""
    layout, found = stored.frame.layout, dict[str, set[int]]()
    for blob, form in zip(layout.arrangement.blobs, stored.frame.columns.form.tolist(), strict=True):
        found.setdefault(layout.tensors[blob.tensor].name, set()).add(form)
    return found


# -- trainings --

WIDTH = 96


def build(make: Callable[[Any], torch.optim.Optimizer], width: int = WIDTH) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width))
    return {"model": model, "optim": make(model.parameters()), "meta": {"losses": []}}


def train(state: State, scale: float = 1.0) -> None:
    x = torch.randn(8, state["model"][0].in_features)
    state["optim"].zero_grad()
    loss = scale * (state["model"](x) - x.roll(1, 1)).pow(2).mean()
    loss.backward()
    state["optim"].step()
    state["meta"]["losses"].append(loss.item())


def run(job: Job, steps: int = 6, turn: Callable[[State], None] = train) -> list[Appended]:
    found = []
    for _ in range(steps):
        turn(job.state)
        found.append(job.append())
    return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adam, coupled": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "maximize": lambda params: torch.optim.AdamW(params, lr=1e-5, maximize=True),
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(build(OPTIMIZERS["AdamW"]), tmp_path / "run")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted(tmp_path: Path, name: str) -> None:
    """With Adam and AdamW weights and exp_avg_sq are predicted, and every step comes back bit for bit."""
    job = Job(build(OPTIMIZERS[name]), tmp_path / "run")
    said = run(job)
    found = job.check()
    assert [one.frame.base for one in found] == [None, *(job.attempt(step) for step in range(1, 6))]
    assert all(one.predicted == one.known > 0 and one.base == i + 1 for i, one in enumerate(said[1:]))
    assert forms_of(found[-1])["model.0.weight"] == {PREDICTED}
    assert forms_of(found[-1])["optim.state.model.0.weight.exp_avg_sq"] == {PREDICTED}
    assert said[-1].stored < 0.4 * said[-1].raw


class Odd(torch.optim.AdamW):
    """Looks like AdamW, and steps in a way of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.99)


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "plain": lambda params: torch.optim.SGD(params, lr=1e-3),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "derived from AdamW": lambda params: Odd(params, lr=1e-3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_differences(tmp_path: Path, name: str) -> None:
    """What no formula is known for is stored as the difference to the step before, and comes back bit for bit."""
    job = Job(build(OTHERS[name]), tmp_path / "run")
    said = run(job)
    found = job.check()
    assert all(one.known == one.predicted == 0 and one.stored < one.raw for one in said[1:])
    assert forms_of(found[-1])["model.0.weight"] == {DELTA}


def test_nothing_is_what_was_predicted(job: Job) -> None:
    """Weights that something else changes at every step are not predicted for long, and come back all the same."""

    def spoil(state: State) -> None:
        train(state)
        for group in state["optim"].param_groups:
            for param in group["params"]:
                param.data.copy_(torch.randn_like(param))

    said = run(job, 6, spoil)
    job.check()
    assert said[-1].predicted < said[-1].known


def test_settings_that_change(tmp_path: Path) -> None:
    """Learning rates, betas and weight decay of the step itself count, not what a scheduler makes of them after it."""
    state = build(OPTIMIZERS["AdamW"])
    state["sched"] = torch.optim.lr_scheduler.LambdaLR(state["optim"], lambda step: 1 / (1 + step))
    job = Job(state, tmp_path / "run")

    def turn(state: State) -> None:
        group = state["optim"].param_groups[0]
        group["betas"] = (0.9 - 0.01 * job.step, 0.99)
        group["weight_decay"] = 0.1 * job.step
        train(state)
        state["sched"].step()

    said = run(job, 6, turn)
    job.check()
    assert all(one.predicted == one.known for one in said[1:])


def test_steps_that_were_skipped(job: Job) -> None:
    """A step in which the optimizer did nothing, or two in one, or went back, is stored without a prediction."""
    run(job, 2)
    still = job.append()
    assert still.stored < 0.05 * still.raw and still.predicted == still.known  # nothing has changed
    train(job.state)
    train(job.state)
    assert job.append().predicted == 0
    for found in job.state["optim"].state.values():
        found["step"] -= 2
    assert job.append().predicted <= job.append().known
    job.check()


NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e-42, -1e-42, 0.0, -0.0)


def test_odd_numbers(job: Job) -> None:
    """NaNs of any payload, infinities, denormals and zeros, in weights and moments, come back bit for bit."""

    def turn(state: State) -> None:
        train(state)
        with torch.no_grad():
            for param, found in state["optim"].state.items():
                for tensor in (param, found["exp_avg"], found["exp_avg_sq"]):
                    flat = tensor.view(-1)
                    flat[torch.randperm(len(flat))[: len(NUMBERS)]] = torch.tensor(NUMBERS)
                    flat.view(torch.int32)[job.step % len(flat)] = 0x7F812345

    run(job, 8, turn)
    job.check()


def test_torch_that_flushes_denormals(tmp_path: Path) -> None:
    """A thread that flushes denormals writes no predictions, and refuses to redo any rather than be wrong."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        job = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "run")
        said = run(job, 3)
    finally:
        torch.set_flush_denormal(False)
    assert all(one.predicted == 0 for one in said)
    job.check()
    run(job, 2)
    (chain,) = job.logs.chains(0, job.newest, {})
    with pytest.raises(CorruptError, match="denormals"):
        redo(job.logs.url, chain, lambda: torch.set_flush_denormal(True) and None)
    job.check()


class Everything(nn.Module):
    """Tensors of all kinds: frozen, unused, integers, truth, empty, of no dimension, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.tied = self.used
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.factor = nn.Parameter(torch.tensor(1.0))
        self.fine = nn.Parameter(torch.ones(33, dtype=torch.float64))
        for name, dtype in (("i8", torch.int8), ("u8", torch.uint8), ("i16", torch.int16), ("i64", torch.int64)):
            self.register_buffer(name, torch.arange(5000).to(dtype))
        self.register_buffer("truth", torch.zeros(5001, dtype=torch.bool))
        self.register_buffer("waves", torch.zeros(700, dtype=torch.complex64))
        self.register_buffer("eight", torch.zeros(5000).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        self.i64 += 1
        self.i8[::7] += 1
        self.i16[3] -= 1
        self.truth[int(self.i64[0]) :: 3] ^= True
        self.waves += torch.randn(700, dtype=torch.complex64)
        self.eight.copy_(torch.randn(5000).to(torch.float8_e4m3fn))
        found: Tensor = self.frozen(self.used(x)) * self.factor + self.fine.sum().float() * 1e-3
        return found


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    """Frozen and unused parts take next to nothing; integers, truth, complex and empty tensors come back too."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job({"model": model, "optim": optimizer}, tmp_path / "run")

    def turn(state: State) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).pow(2).mean().backward()
        optimizer.step()

    run(job, 5, turn)
    found = job.check()
    forms = forms_of(found[-1])
    assert forms["model.used.weight"] == {PREDICTED} and "model.nothing" not in forms
    for name in ("frozen", "unused"):
        assert forms[f"model.{name}.weight"] == {SAME} and f"optim.state.model.{name}.weight.exp_avg" not in forms
    names = {found[-1].frame.layout.tensors[one.weight].name for one in found[-1].frame.recipes}
    assert names == {"model.used.weight", "model.used.bias", "model.factor"}  # neither empty nor fp64


@pytest.mark.parametrize("needs_grad", [True, False])
def test_derived_weights(tmp_path: Path, needs_grad: bool) -> None:
    """bf16 weights that are the rounding of fp32 masters are not stored; those that once are not, are. Masters are
    predicted whether they need a gradient or are only given one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16)
    masters = [param.detach().float().requires_grad_(needs_grad) for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    job = Job({"model": model, "masters": masters, "optim": optimizer}, tmp_path / "run")

    def turn(state: State) -> None:
        x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
        model(x).float().pow(2).mean().backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)

    said = run(job, 4, turn)
    with torch.no_grad():
        model[0].weight.view(-1)[-1] += 1  # not what its first values promise
    job.append()
    found = job.check()
    assert said[-1].predicted == said[-1].known > 0
    assert all(forms_of(one)["model.0.weight"] == {DERIVED} for one in found[:4])
    assert DERIVED not in forms_of(found[4])["model.0.weight"]
    assert forms_of(found[4])["model.1.weight"] == {SAME}


def test_large_tensors(tmp_path: Path) -> None:
    """A tensor of several blobs, the last one short, is redone piece by piece; by one thread as by several."""
    width = 1200
    assert width * width * 4 > BLOB and (width * width * 4) % BLOB
    for threads in (1, 3):
        state = build(OPTIMIZERS["AdamW"], width)
        job = Job(state, tmp_path / str(threads), threads=threads)
        run(job, 3)
        found = job.check()
        assert forms_of(found[-1])["model.3.weight"] == {PREDICTED}
        triples = [unit for unit in frame.units(found[-1].frame.layout, found[-1].frame.recipes) if len(unit) > 1]
        assert len(triples) > len(found[-1].frame.recipes)


def test_no_optimizer(tmp_path: Path) -> None:
    """A state without an optimizer, and one without a tensor, are logged like any other."""
    for name, state in (("tensor", {"x": torch.zeros(3)}), ("values", {"meta": {"n": 0}})):
        job = Job(state, tmp_path / name)
        for n in range(3):
            if name == "tensor":
                state["x"] += 1  # type: ignore[operator]
            else:
                state["meta"]["n"] = n  # type: ignore[index]
            job.append()
        assert len(job.check()) == 3


def test_another_layout(job: Job) -> None:
    """A step of another layout stands alone, and the log goes on from there."""
    run(job, 3)
    job.state["more"] = torch.zeros(100)
    said = run(job, 2)
    assert [one.base for one in said] == [None, 4]
    job.check()


# -- what stands alone --


def test_rebases(tmp_path: Path) -> None:
    """A log whose redoing would take longer than a restore may begins anew; with no time at all every step does."""
    never = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "never")
    assert [one.base for one in run(never)] == [None, 1, 2, 3, 4, 5]
    always = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "always", max_restore_s=0.0)
    assert [one.base for one in run(always, 4)] == [None] * 4
    always.check()
    sometimes = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "sometimes")
    run(sometimes, 1)
    size = len(sometimes.kept[sometimes.newest][0])
    sometimes.log.max_restore_s = size / append.READ_A_SECOND + 3.5 * sometimes.log.guess_s(size)
    assert [one.base for one in run(sometimes, 7)] == [1, 2, None, 4, 5, None, 7]
    found = sometimes.check()
    assert forms_of(found[3])["model.0.weight"] <= {WHOLE, RAW}
    assert [chain.base for chain in sometimes.logs.chains(0, sometimes.newest, {})] == [7]


def test_rebases_make_older_files_needless(tmp_path: Path) -> None:
    """Without any checkpoint a log does not grow for ever: what is older than the last step but one that stands alone
    goes; of several ranks, whose logs may be some steps apart, a little more stays."""
    alone = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "alone", max_restore_s=0.0)
    run(alone, 12)
    assert names(alone) == of(alone, 11, 12)
    alone.log.world = 2
    run(alone, 3 * append.NEAR)
    assert append.NEAR < len(names(alone)) <= 2 * append.NEAR + 1
    mixed = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "mixed")
    run(mixed, 1)
    size = len(mixed.kept[mixed.newest][0])
    mixed.log.max_restore_s = size / append.READ_A_SECOND + 3.5 * mixed.log.guess_s(size)
    bases = [one.base for one in run(mixed, 20)]
    last = [step for step, base in enumerate(bases, 2) if base is None][-2:]
    assert names(mixed) == of(mixed, *last)


def test_what_a_restore_would_read_is_verified(job: Job) -> None:
    """Of a log that was only listed, frames that lead to the newest step are compared with their digests, those before
    the last checkpoint are not; a damaged one takes the steps after it along."""
    run(job, 9)
    frames = {one.frame.attempt.step: one for one in job.frames()}
    for step in (3, 7):
        with open(frames[step].path, "r+b") as file:
            file.seek(frames[step].payload[0] + frames[step].payload[1] // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    url = job.root.as_uri()
    logs = look(url, verify=False)
    commits: Any = {job.attempt(4): "a checkpoint"}
    assert len(logs.frames[0]) == 9
    logs.verify(commits)
    assert max(attempt.step for attempt in logs.reach(commits)) == 6
    assert len(logs.problems) == 1 and "step 7 does not match" in logs.problems[0]
    logs.verify({})
    assert max(attempt.step for attempt in logs.reach({})) == 2 and len(logs.problems) == 2


def test_forgotten(job: Job) -> None:
    """After a training went back, or its slot was used again, the next step stands alone. Until then the log knows the
    digests of all blobs of its newest step."""
    run(job, 2)
    data, blobs = job.kept[job.newest][0], job.frames()[-1].frame.layout.arrangement.blobs
    assert job.log.digests == b"".join(blob_digest(data[blob.offset : blob.offset + blob.length]) for blob in blobs)
    job.log.forget()
    assert job.log.digests is None
    assert [one.base for one in run(job, 2)] == [None, 3]
    assert job.arena is not None
    job.arena.set_label(job.step % 2, Label(EMPTY))
    assert [one.base for one in run(job, 2)] == [None, 5]
    job.check()


def test_overwritten(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot, or that of the step before, that is used again while it is logged: the step is refused, nothing of it is
    in the log, and the next step stands alone."""
    run(job, 2)
    for other in (0, 1):
        train(job.state)
        sealed = job.seal()
        slot = (sealed.slot + other) % 2
        label = sealed.arena.label(slot)
        assert label is not None

        def overwrite(*args: Any, slot: int = slot, label: Label = label, sealed: Sealed = sealed) -> memoryview:
            sealed.arena.set_label(slot, replace(label, order=label.order + 100))
            sealed.arena.data(slot, 1000)[:] = bytes(1000)
            return foresee(*args)

        path = next((job.root / "redo").iterdir())
        before = path.read_bytes()
        monkeypatch.setattr(encode_frame, "foresee", overwrite)
        with pytest.raises(SaveError, match="was overwritten"):
            job.append(sealed)
        monkeypatch.setattr(encode_frame, "foresee", foresee)
        assert path.read_bytes() == before
        assert [one.base for one in run(job, 2)] == [None, job.step - 1]
    job.check()


class Late(Sealed):
    """A slot that is used again at the very moment after it was found to be there."""

    def check(self) -> None:
        super().check()
        self.data[:] = bytes(len(self.data))
        values = self.arena.values(self.slot, self.label)
        values[:] = b" " * len(values)


def test_overwritten_after_the_check(job: Job) -> None:
    """Nothing is read from a slot after it was found to be still there: what is in the log is what it was."""
    train(job.state)
    sealed = job.seal()
    kept = bytes(sealed.data), json.loads(bytes(sealed.arena.values(sealed.slot, sealed.label)))
    job.log.append(Late(sealed.arena, sealed.slot, sealed.label, sealed.layout), [], [])
    job.kept[sealed.attempt] = kept
    assert len(job.check()) == 1


def test_a_label_that_is_damaged(job: Job) -> None:
    """A slot whose label cannot be read is one that was overwritten."""
    run(job, 1)
    train(job.state)
    sealed = job.seal()
    at = 4096 + sealed.slot * 256 + 40
    sealed.arena.memory[at] ^= 1
    with pytest.raises(SaveError, match="overwritten"):
        job.append(sealed)
    sealed.arena.memory[at] ^= 1
    assert job.append(sealed).base is None
    job.check()


# -- files --


def names(job: Job) -> list[str]:
    return sorted(os.listdir(job.root / "redo"))


def of(job: Job, *steps: int) -> list[str]:
    return sorted(redo_name(job.attempt(step), 0) for step in steps)


def test_turns(job: Job) -> None:
    """A checkpoint begins a new file, without standing alone; what is older than the last but one goes."""
    run(job, 3)
    assert names(job) == of(job, 1)
    job.committed.add(job.attempt(2))
    assert [one.base for one in run(job, 3)] == [3, 4, 5]
    assert names(job) == of(job, 1, 4)
    run(job, 1)  # the same checkpoint again is no turn
    assert names(job) == of(job, 1, 4)
    job.committed.add(job.attempt(7))
    run(job, 2)
    assert names(job) == of(job, 1, 4, 8)  # from the second step on all may still be needed
    job.committed.add(job.attempt(9))
    run(job, 2)
    assert names(job) == of(job, 8, 10)
    assert job.check()
    job.committed |= {job.attempt(10), job.attempt(11)}
    run(job, 1)
    assert names(job) == of(job, 10, 12)


def test_what_is_needed_stays(tmp_path: Path) -> None:
    """From each of the last two checkpoints every later step can be redone, whichever steps become checkpoints."""
    for number, marks in enumerate(itertools.combinations(range(1, 7), 3)):
        job = Job({"x": torch.zeros(8)}, tmp_path / str(number))
        for step in range(1, 8):
            job.state["x"] += 1
            job.append()
            if step in marks:
                job.committed.add(job.attempt(step))
        job.state["x"] += 1
        job.append()
        found = {one.frame.attempt.step for one in job.frames()}
        assert found >= set(range(marks[-2] + 1, 9)), (marks, found)


def test_a_restore_begins_at_the_checkpoint(job: Job) -> None:
    """What was logged before a checkpoint does not count for how long a restore takes."""
    run(job, 1)
    size = len(job.kept[job.newest][0])
    job.log.max_restore_s = size / append.READ_A_SECOND + 3.5 * job.log.guess_s(size)
    found = []
    for _ in range(8):
        found += run(job, 1)
        job.committed.add(job.newest)
    assert [one.base for one in found] == list(range(1, 9))


def test_older_incarnations(tmp_path: Path) -> None:
    """Logs of an earlier incarnation stay until this one has two checkpoints; foreign files stay."""
    first = Job(build(OPTIMIZERS["AdamW"]), tmp_path / "run")
    run(first, 2)
    first.log.close()
    job = Job(first.state, tmp_path / "run", epoch=2)
    (tmp_path / "run" / "redo" / "notes.txt").write_text("mine")
    run(job, 2)
    job.committed.add(job.attempt(2))
    run(job, 2)
    assert set(of(first, 1)) < set(names(job))
    job.committed.add(job.attempt(4))
    run(job, 1)
    assert names(job) == sorted([*of(job, 3, 5), "notes.txt"])


def test_another_writer(job: Job) -> None:
    """A step is sent again when the writer has died with it: the file that was begun for it is begun anew, and an older
    writer that is not quite dead writes nowhere."""
    train(job.state)
    sealed = job.seal()
    job.append(sealed)
    old = job.log
    job.log = StepLog(str(job.root), 0, 1, max_restore_s=1e9)
    assert job.append(sealed).base is None
    run(job, 2)
    assert old._file is not None
    old._file.begin()
    old._file.add(b"x" * (3 << 20))
    assert len(job.check()) == 3 and names(job) == of(job, 1)


def test_deleted_under_way(job: Job) -> None:
    """A log that somebody deletes is begun again, with a step that stands alone: no step is called durable that is in a
    file without a name."""
    run(job, 2)
    shutil.rmtree(job.root / "redo")
    assert [one.base for one in run(job, 2)] == [None, 3]
    assert [one.frame.attempt.step for one in job.check()] == [3, 4]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Any write beyond this size of a file is refused by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 39, 40, 41, 5000, 60_000])
def test_no_room(job: Job, room: int) -> None:
    """A write that the system refuses, anywhere in a frame, leaves the file with its whole frames; the next frame
    stands alone, and all of them come back."""
    run(job, 3)
    path = job.root / "redo" / names(job)[0]
    size = path.stat().st_size
    train(job.state)
    sealed = job.seal()
    with files_of_at_most(size + room), pytest.raises(StoreError, match="redo log"):
        job.append(sealed)
    assert path.stat().st_size == size
    assert [one.base for one in run(job, 2)] == [None, 5]
    found = job.check()
    assert [one.frame.attempt.step for one in found] == [1, 2, 3, 5, 6]


def test_no_room_at_first(job: Job) -> None:
    """Where not even the first frame finds room, the log begins when there is some."""
    for _ in range(2):
        train(job.state)
        sealed = job.seal()
        with files_of_at_most(100), pytest.raises(StoreError):
            job.append(sealed)
    assert job.frames() == [] and not job.logs.problems
    run(job, 2)
    job.check()


def test_kinds_of_failures(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space left is FullError, anything else StoreError; a folder that cannot be synced is tried again."""
    real = os.fsync

    def failing(code: int) -> Callable[[int], None]:
        def fail(fd: int) -> None:
            raise OSError(code, os.strerror(code))

        return fail

    for code, error in ((errno.ENOSPC, FullError), (errno.EDQUOT, FullError), (errno.EIO, StoreError)):
        monkeypatch.setattr(os, "fsync", failing(code))
        with pytest.raises(error, match="cannot be written"):
            run(job, 1)
        assert job.log._file is None
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    run(job, 1)
    assert synced == [str(job.root / "redo"), str(job.root)]
    job.check()


# -- redoing what is damaged --


def reseal(path: Path, stored: StoredFrame, change: Callable[[bytearray], object]) -> None:
    """Change a frame in a file, and make its digest right again."""
    raw = bytearray(path.read_bytes())
    body = raw[stored.offset : stored.offset + stored.size - 16]
    change(body)
    raw[stored.offset : stored.offset + stored.size] = body + xxhash.xxh3_128_digest(body[40:] + body[:40])
    path.write_bytes(raw)


def test_wrong_bytes(job: Job) -> None:
    """A frame that was written wrong, and says that it is right, ends the redo at its step, by name; earlier steps are
    not touched by that."""
    run(job, 5)
    path = job.root / "redo" / names(job)[0]
    third = job.frames()[2]
    raw = [b for b, form in enumerate(third.frame.columns.form.tolist()) if form == RAW]
    order = [b for unit in frame.units(third.frame.layout, third.frame.recipes) for b in unit[:3]]
    at = 40 + int(third.frame.columns.stored[order[: order.index(raw[0])]].sum())
    reseal(path, third, lambda body: body.__setitem__(at, body[at] ^ 1))
    logs = job.logs
    assert not logs.problems
    for step in (3, 4, 5):
        (chain,) = logs.chains(0, job.attempt(step), {})
        with pytest.raises(CorruptError, match=r"step 3 could not be redone: \S+ is not what it was"):
            redo(logs.url, chain)
    with redone(logs.url, logs.chains(0, job.attempt(2), {})[0]) as found:
        assert bytes(found.arena.data(0, len(job.kept[job.attempt(2)][0]))) == job.kept[job.attempt(2)][0]


def test_wrong_predictions(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: arithmetic that differs by one rounding is noticed at the first step that needs it."""
    run(job, 4)
    logs = job.logs
    (chain,) = logs.chains(0, job.newest, {})
    real = predict.weights

    def other(*args: Any) -> None:
        real(*args)
        bits = args[-1].view(np.int32)
        bits += 1

    monkeypatch.setattr(predict, "weights", other)
    with pytest.raises(CorruptError, match="step 2 could not be redone"):
        redo(logs.url, chain)


def test_any_wrong_byte(tmp_path: Path) -> None:
    """Whatever byte of a payload is wrong while digests of files are right: CorruptError, or the very same state."""
    job = Job({"x": torch.zeros(2000), "n": torch.zeros(3)}, tmp_path / "run")
    for _ in range(2):
        job.state["x"] += torch.randn(2000).round()
        job.append()
    path = tmp_path / "run" / "redo" / names(job)[0]
    kept, second = path.read_bytes(), job.frames()[1]
    size = second.payload[1]
    for at in range(0, size, max(1, size // 100)):
        reseal(path, second, lambda body, at=at: body.__setitem__(40 + at, body[40 + at] ^ 0x55))
        logs = job.logs
        (chain,) = logs.chains(0, job.newest, {})
        try:
            with redone(logs.url, chain) as found:
                assert bytes(found.arena.data(0, len(job.kept[job.newest][0]))) == job.kept[job.newest][0]
        except CorruptError:
            pass
        path.write_bytes(kept)
    job.check()


def test_missing_links(job: Job) -> None:
    """A damaged frame cuts the way to what was applied to it, and to nothing else."""
    run(job, 3)
    job.log.forget()
    run(job, 2)
    path = job.root / "redo" / names(job)[0]
    raw, frames = bytearray(path.read_bytes()), job.frames()
    raw[frames[1].offset + 100] ^= 1
    path.write_bytes(raw)
    logs = job.logs
    assert len(logs.problems) == 1
    ways = {step: len(logs.chains(0, job.attempt(step), {})) for step in range(1, 6)}
    assert ways == {1: 1, 2: 0, 3: 0, 4: 1, 5: 1}
    assert sorted(attempt.step for attempt in logs.reach({})) == [1, 4, 5]
    raw[: frames[2].offset] = bytes(frames[2].offset)  # not even the layout is left
    path.write_bytes(raw)
    assert sorted(attempt.step for attempt in job.logs.reach({})) == [4, 5]


def test_deleted_meanwhile(job: Job) -> None:
    """A file that goes, or is cut off, between looking and redoing is an error that a restore can go on from."""
    run(job, 3)
    logs, path = job.logs, job.root / "redo" / names(job)[0]
    (chain,) = logs.chains(0, job.newest, {})
    os.truncate(path, chain.frames[1].offset + 60)
    with pytest.raises(CorruptError):
        redo(logs.url, chain)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        redo(logs.url, chain)


def test_chains_of_several_layouts(job: Job) -> None:
    """Frames of one layout are not applied to a state of another one."""
    run(job, 2)
    job.state["more"] = torch.zeros(100)
    run(job, 2)
    first, _, third, fourth = job.frames()
    for frames in ((first, fourth), (first, third)):
        with pytest.raises(CorruptError, match="several layouts"):
            redo(job.logs.url, RedoChain(0, None, frames))


def test_frames_out_of_turn(job: Job) -> None:
    """Negative control: a frame that is applied to the wrong step is noticed."""
    run(job, 4)
    first, _, third, _ = job.frames()
    with pytest.raises(CorruptError, match="step 3 could not be redone"):
        redo(job.logs.url, RedoChain(0, None, (first, third)))


def test_logs_of_nothing(tmp_path: Path) -> None:
    """Where there is no redo log, or no folder of this machine, there is nothing to redo, and nothing is wrong."""
    (tmp_path / "empty" / "redo").mkdir(parents=True)
    (tmp_path / "empty" / "redo" / "x.redo").write_bytes(b"x")
    for url in (f"file://{tmp_path}/none", f"file://{tmp_path}/empty", "s3://bucket/run"):
        logs = look(url)
        assert not logs.frames and not logs.problems and not logs.reach({})


def test_taken_back(job: Job) -> None:
    """Nobody goes back to a step that was found to mix two moments, but later ones are redone by way of it."""
    run(job, 3)
    (job.root / "redo" / f"{redo_name(job.newest, 0)}{append.TAKEN_BACK}").touch()
    assert sorted(attempt.step for attempt in job.logs.reach({})) == [1, 2]
    run(job, 1)
    assert sorted(attempt.step for attempt in job.logs.reach({})) == [1, 2, 4]
    assert [one.base for one in run(job, 1)] == [4] and job.check()
    job.committed.add(job.attempt(4))
    run(job, 1)
    job.committed.add(job.attempt(6))
    run(job, 1)
    job.committed.add(job.attempt(7))
    run(job, 1)
    assert names(job) == of(job, 7, 8)  # what was said of it goes with the step


def test_another_rank(job: Job) -> None:
    """A file that is called another rank's is not taken for that."""
    run(job, 2)
    path = job.root / "redo" / names(job)[0]
    path.rename(path.with_name(redo_name(job.attempt(1), 1)))
    assert not job.logs.frames


def test_counts_of_steps_elsewhere(tmp_path: Path) -> None:
    """Where another rank stages the counts of steps, as it is when only weights and moments are sharded, what the
    optimizer was told says them, and predictions are as good."""

    class Shard(Job):
        def read(self) -> Reading:
            found = super().read()
            specs = found.layout.tensors
            kept = [i for i, spec in enumerate(specs) if not spec.name.endswith(".step")]
            elsewhere = {spec.name: (spec.dtype, spec.shape) for spec in specs if spec.name.endswith(".step")}
            tensors = tuple(specs[i] for i in kept)
            layout = replace(found.layout, tensors=tensors, world=2, elsewhere=elsewhere)
            return replace(found, layout=layout, tensors=[found.tensors[i] for i in kept])

    job = Shard(build(OPTIMIZERS["AdamW"]), tmp_path / "run")
    said = run(job)
    assert all(one.predicted == one.known > 0 for one in said[1:])
    assert all(one.step == -1 for one in job.check()[-1].frame.recipes)


# -- recipes --


def test_recipes() -> None:
    """Of every stepped fp32 parameter of an Adam or AdamW: the tensors of its own, and the group it is in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8))
    first = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1e-5}])
    second = torch.optim.Adam(model[2].parameters())
    third = torch.optim.Adam([{"params": model[3].weight, "amsgrad": True}, {"params": model[3].bias}])
    state = {"model": model, "a": first, "b": second, "c": third}
    x = torch.randn(2, 8)
    (model[3](model[2](model[1](model[0](x)).double()).float())).sum().backward()
    for optimizer in (first, second, third):
        optimizer.step()
    capture = Capture(state)
    reading = capture.read()
    recipes = find_recipes(reading.layout, reading.tensors, capture.stepping)
    named = [reading.layout.tensors[i].name for one in recipes for i in (one.weight, one.mean, one.square, one.step)]
    wanted = []
    for path, name in (("a", "0.weight"), ("a", "0.bias"), ("a", "1.weight"), ("a", "1.bias"), ("c", "3.bias")):
        own = (f"{path}.state.model.{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step"))
        wanted += [f"model.{name}", *own]
    assert named == wanted and [one.group for one in recipes] == [0, 0, 1, 1, 4]


def test_moments_that_share_memory() -> None:
    """Tensors that are one and the same, or belong to two optimizers, are in one recipe at most, and once."""
    param = nn.Parameter(torch.ones(4))
    one, other = torch.optim.AdamW([param]), torch.optim.AdamW([param])
    param.sum().backward()
    one.step()
    other.step()
    one.state[param]["exp_avg_sq"] = one.state[param]["exp_avg"]
    capture = Capture({"w": param, "a": one, "b": other})
    reading = capture.read()
    (found,) = find_recipes(reading.layout, reading.tensors, capture.stepping)
    assert reading.layout.tensors[found.mean].name.startswith("b.")


def test_what_optimizers_were_told() -> None:
    """What groups had when the optimizer stepped counts; one that has not stepped, or has no formula, told nothing."""
    param = nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam([param], lr=torch.tensor(0.5), weight_decay=0.25)
    other = torch.optim.SGD([param], lr=0.1)
    watch = GroupWatch()
    assert watch.told([adam, other]) == [None, None]
    watch.note(adam)
    watch.note(other)
    adam.param_groups[0]["lr"] = 0.125
    adam.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert watch.told([other, adam]) == [None, [0.5, 0.9, 0.999, 1e-8, 0.25, False, None], None]
    adam.param_groups[0]["lr"] = float("nan")
    watch.note(adam)
    assert watch.told([adam])[0] is None
