"""Calls at unexpected moments: within another call, from two threads, in a forked child, at the end of the interpreter,
during a takeover."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ckpt
import inside
import toy
from ckpt.errors import InvalidArgumentError
from kills import steps_on_disk
from processes import eventually, killed, run_script, writers
from test_promise_ends import restored


def steps(cp: ckpt.Checkpointer, state: dict[str, Any], count: int) -> None:
    for step in range(cp.restore(default=0), count):
        toy.train_step(state)
        cp.step(step + 1)


@pytest.mark.parametrize("due", [False, True])
def test_no_restore_within_a_step(run_dir: str, monkeypatch: pytest.MonkeyPatch, due: bool) -> None:
    """A signal handler calls restore(): step() would continue with another state. It is rejected, and the step is
    saved."""
    state, said = toy.build(), list[BaseException]()
    cp = ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=100), memory=ckpt.Memory(every=1 if due else 10))
    steps(cp, state, 2)

    def interrupted() -> None:
        with pytest.raises(ckpt.errors.UsageError, match="cannot run inside") as caught:
            cp.restore()
        said.append(caught.value)

    toy.train_step(state)
    with monkeypatch.context() as patch:
        inside.interrupt_at(patch, inside.STATE_IS_READ, interrupted)
        cp.step(3)
        cp.save().wait_durable(30)
    cp.close()
    assert said and restored(run_dir) == (3, toy.reference(3))


def test_closed_within_restore(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler closes during restore(): restore() raises immediately, and the next one finds the checkpoint."""
    with ckpt.Checkpointer(state := toy.build(), run_dir) as cp:
        steps(cp, state, 3)
    cp = ckpt.Checkpointer(state, run_dir)
    inside.interrupt_at(monkeypatch, inside.RUN_IS_TAKEN, lambda: cp.close())
    began = time.monotonic()
    with pytest.raises(ckpt.errors.ClosedError):
        cp.restore()
    assert time.monotonic() - began < 15
    monkeypatch.undo()
    assert restored(run_dir) == (3, toy.reference(3))


def test_two_that_are_made_at_once(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads open the same run: one succeeds, the other is rejected."""
    found: list[ckpt.Checkpointer | ckpt.errors.UsageError] = []
    first = threading.Event()

    def slowly() -> None:
        first.set()
        time.sleep(1.0)

    inside.interrupt_at(monkeypatch, inside.MADE["prepare"], slowly, always=True)

    def make() -> None:
        try:
            found.append(ckpt.Checkpointer(toy.build(), run_dir, triggers=None))
        except ckpt.errors.UsageError as error:
            found.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    threads[0].start()
    assert first.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert sorted(type(one).__name__ for one in found) == ["Checkpointer", "UsageError"]
    next(one for one in found if isinstance(one, ckpt.Checkpointer)).close()
    ckpt.Checkpointer(toy.build(), run_dir, triggers=None).close()  # the name is free again


ENDING = """
import atexit, sys, threading, toy, ckpt
start = threading.Thread.start
def none_at_the_end(thread):
    if thread.name == "ckpt-touch":
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)
threading.Thread.start = none_at_the_end
state = toy.build()
cp = ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=100), triggers=None, memory=ckpt.Memory(every=100))
atexit.register(cp.close)
for step in range(cp.restore(default=0), 3):
    toy.train_step(state)
    cp.step(step + 1)
"""


def test_no_thread_can_be_started_at_the_end(run_dir: str) -> None:
    """As in Python 3.12: threads that only make copies faster are not started, and the last step is saved."""
    assert run_script(ENDING, run_dir).returncode == 0
    assert restored(run_dir) == (3, toy.reference(3))


CHILDREN = """
import os, sys, torch, ckpt
state = {"w": torch.zeros(1 << 20)}
with ckpt.Checkpointer(state, sys.argv[1]) as cp:
    cp.restore(default=0)
    save = cp.save(1)
    with cp.not_training():
        if not (child := os.fork()):
            found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and
                     os.path.lexists(f"/proc/self/fd/{fd}")]
            assert not [one for one in found if "memfd:ckpt" in one], found
            try:
                cp.wait()
            except ckpt.errors.ClosedError:
                sys.exit(7)
            sys.exit(8)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    save.wait_durable(30)
    cp.step(2)
"""


def test_a_forked_child_holds_nothing_and_waits_for_nothing(run_dir: str) -> None:
    """It is forked within pause(), during a save: it keeps no memory, its calls raise that only the trainer saves, and
    it ends normally. The trainer continues."""
    done = run_script(CHILDREN, run_dir)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


# -- steps that are to stay --

KEEPING = """
import os, signal, sys, toy, ckpt
run, victim = sys.argv[1:]
state = toy.build()
with ckpt.Checkpointer(state, ckpt.Tier(run, every=1, keep=1)) as cp:
    cp.restore(default=0)
    for step in range(1, 10):
        toy.train_step(state)
        save = cp.step(step)
        if step in (2, 3):
            cp.pin(step, "best so far" if step == 2 else "best")
        if step == 3:
            cp.pin(2, "second best")
        if step == 3 and victim == "writer":
            os.kill(cp.writer_pid, signal.SIGKILL)
        save.wait_durable(60)
    if victim == "trainer":
        cp.unpin(2)
        cp.pin(9, "last")
        toy.train_step(state)
        cp.step(10).wait_staged(60)
        os.kill(os.getpid(), signal.SIGKILL)
print(toy.digest(state))
"""


@pytest.mark.parametrize("victim", ["nobody", "writer", "trainer"])
def test_steps_that_are_to_stay(run_dir: str, own_sockets: Path, victim: str) -> None:
    """Kept steps stay with their notes, however quickly checkpoints come and go. The next writer knows them, and those
    requested before a later acknowledged step survive the trainer's death. Released ones are deleted by the next
    clean-up."""
    process = run_script(KEEPING, run_dir, victim)
    assert killed(process) if victim == "trainer" else process.returncode == 0, process.stderr
    assert eventually(lambda: victim == "trainer" or not writers(own_sockets))
    kept = {3: "best", 9: "last"} if victim == "trainer" else {2: "second best", 3: "best"}
    assert eventually(lambda: inside.kept_at(run_dir) == kept)
    there = set(steps_on_disk(run_dir))
    assert there >= {*kept, 9} and not there & {1, 4, 5}
    with ckpt.Checkpointer(state := toy.build(), ckpt.Tier(run_dir, every=1, keep=1), triggers=None, memory=None) as cp:
        first = cp.restore()
        assert first == (10 if victim == "trainer" else 9)
        for step in (2, 3, 9):
            cp.unpin(step)
        for step in range(first + 1, first + 4):
            toy.train_step(state)
            cp.step(step).wait_durable(60)  # type: ignore[union-attr]
    assert eventually(lambda: inside.kept_at(run_dir) == {} and not set(steps_on_disk(run_dir)) & {2, 3})


def test_what_is_no_note_is_refused(run_dir: str) -> None:
    """By name, and nothing is kept then."""
    with ckpt.Checkpointer(toy.build(), run_dir, triggers=None) as cp:
        for step, note in (("3", "best"), (3, None), (3, ""), (True, "x"), (-1, "x")):
            with pytest.raises(InvalidArgumentError, match=r"note must be|whole number"):
                cp.pin(step, note)  # type: ignore[arg-type]
