"""A save is written while it is being copied: whoever dies meanwhile, and whatever is dropped, none of it is believed.

`tests/model/test_following_orders.py` tries the orders of things; here real processes are held and killed in between.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.failpoints import FOLLOW_POINTS
from ckpt.format.manifest import owner
from ckpt.store import PAGE
from kills import Trainer, problems, steps_on_disk
from processes import eventually, writers

# Does what it is told, line by line; `save N`: of the tensors of that step only N are copied until it is told to go on.
TRAIN = """
import os, sys, threading
import ckpt, toy
from ckpt.trainer import saves
from ckpt.trainer.staging import fill
from ckpt.trainer.staging.unchanged import Frozen

toy.WIDTH, saves.FOLLOWED, fill.LARGE = 1024, 0, 1 << 20
put, left, go, fails = Frozen.put, [0.0], threading.Event(), []

def held(self, number, target, source):
    if left[0] <= 0:
        go.wait()
        if fails:
            raise OSError(fails.pop())
    left[0] -= 1
    put(self, number, target, source)

Frozen.put = held
state = toy.build()
tiers = [ckpt.Memory(), ckpt.Tier(sys.argv[1], every=1, keep=3, compression="none")]
with ckpt.Checkpointer(state, tiers, on_error="warn") as cp:
    step = cp.restore(default=0)
    os.environ["CKPT_FAIL"] = ""
    print("start", step, flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "save":
            go.clear()
            left[0] = float(rest)
            toy.train_step(state)
            step += 1
            save = cp.step(step)
            print("begun", step, flush=True)
            continue
        if word == "digest":
            print(toy.digest(state), flush=True)
            continue
        if word == "fail":
            fails.append("no memory, say")
        go.set()
        try:
            save.committed(60)
            print("committed", step, flush=True)
        except ckpt.CheckpointError as error:
            print("failed", error, flush=True)
"""
TENSORS = 6  # that are large: two weights, and two moments of each


@pytest.fixture
def trainer(run_dir: str) -> Iterator[Trainer]:
    """One that has saved often enough to know that nothing can be shared, and has begun another save."""
    with begun(run_dir) as trainer:
        hold(trainer, run_dir)
        yield trainer


def begun(run_dir: str, fail: str = "") -> Trainer:
    trainer = Trainer(TRAIN, run_dir, fail=fail)
    assert trainer.line() == "start 0"
    for step in (1, 2, 3):
        assert trainer.do("save inf") == f"begun {step}"
        assert trainer.do("go") == f"committed {step}"
    return trainer


def hold(trainer: Trainer, run_dir: str) -> None:
    """Two thirds of step 4 are copied, and half of that is written."""
    assert trainer.do(f"save {TENSORS * 2 // 3}") == "begun 4"
    assert eventually(lambda: written(run_dir, 4)), "nothing was written while it was copied"
    assert steps_on_disk(run_dir)[0] == 3


def packs(run_dir: str, step: int) -> list[Path]:
    found = ((path, owner(f"packs/{path.name}")) for path in Path(run_dir, "packs").glob("*"))
    return [path for path, attempt in found if attempt is not None and attempt.step == step]


def written(run_dir: str, step: int) -> bool:
    """Whether any data of its pack is there, behind the header."""
    for path in packs(run_dir, step):
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            file.seek(start + (1 << 20))
            if any(file.read(PAGE)):
                return True
    return False


def check_restored(trainer: Trainer, run_dir: str, step: int) -> None:
    """That a process which has no memory of it gets the very bits that this one has."""
    digest = trainer.do("digest")
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()
    assert trainer.process.wait(60) == 0
    assert problems(run_dir) == []
    with Trainer(TRAIN, run_dir) as again:
        assert again.line() == f"start {step}"
        assert again.do("digest") == digest


def test_what_was_written_while_it_was_copied_is_what_was_saved(trainer: Trainer, run_dir: str) -> None:
    """Nothing names it before it is whole; then it is a checkpoint, and restores bit for bit."""
    assert trainer.do("go") == "committed 4"
    assert len(packs(run_dir, 4)) == 1
    check_restored(trainer, run_dir, 4)


def test_what_is_dropped_leaves_nothing(trainer: Trainer, run_dir: str) -> None:
    """The copy fails half-way: what was written is taken away again, and the next save is like any other."""
    assert "no memory, say" in trainer.do("fail")
    assert eventually(lambda: not packs(run_dir, 4))
    assert steps_on_disk(run_dir)[0] == 3
    assert trainer.do("save inf") == "begun 5"
    assert trainer.do("go") == "committed 5"
    check_restored(trainer, run_dir, 5)


def test_a_trainer_that_dies_while_it_copies(trainer: Trainer, run_dir: str) -> None:
    """What it had not copied to the end never was: nothing of it is left, and the run goes on from the step before."""
    trainer.kill()
    assert eventually(lambda: not packs(run_dir, 4))
    assert problems(run_dir) == []
    assert steps_on_disk(run_dir)[0] == 3
    with Trainer(TRAIN, run_dir) as second:
        assert second.line() == "start 3"
        assert second.do("save inf") == "begun 4"
        assert second.do("go") == "committed 4"
        check_restored(second, run_dir, 4)


def test_a_writer_that_dies_while_it_follows(trainer: Trainer, run_dir: str, own_sockets: Path) -> None:
    """The next one knows nothing of it, and writes the slot when it is sealed."""
    (writer,) = writers(own_sockets)
    writer.send_signal(signal.SIGKILL)
    assert eventually(lambda: [one.pid for one in writers(own_sockets)] not in ([], [writer.pid]))
    assert trainer.do("go") == "committed 4"
    check_restored(trainer, run_dir, 4)


@pytest.mark.parametrize("action", ["kill", "enospc"])
@pytest.mark.parametrize("point", [*FOLLOW_POINTS, "pack.opened", "pack.written", "pack.synced"])
def test_following_fails_at_every_point(run_dir: str, point: str, action: str) -> None:
    """Whatever becomes of it, a kill or a full disk: the slot is written when it is sealed, as if nobody had followed
    it."""
    visits = 3 if point in FOLLOW_POINTS else 4  # the third save is not followed: it looks at what it can share
    with begun(run_dir, f"writer/{point}:{action}:{visits}") as trainer:
        assert trainer.do("save 4") == "begun 4"
        assert trainer.do("go") == "committed 4"
        check_restored(trainer, run_dir, 4)
