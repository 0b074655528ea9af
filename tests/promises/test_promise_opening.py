"""A run is opened by the first call that needs it: what becomes of a script that ends before, and of an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ckpt
import toy
from ckpt.checkpoint import read
from ckpt.goodput.ledger import Account
from ckpt.runlog.log import Acquire
from ckpt.trainer.supervise import opening
from ckpt.trainer.supervise.writer_client import WriterClient
from processes import PYTHONPATH, eventually, killed, run_script, writers

STEPS = 3

# Makes a Checkpointer, and ends before it has called it.
MADE = """
import os, signal, sys, toy, ckpt
run, how = sys.argv[1:]
state = toy.build()
cp = ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run, every=100)])
if how == "at once":
    os._exit(0)
cp.writer_pid  # waits for it
if how == "with":
    with cp:
        raise ValueError("enough")
if how == "raise":
    raise ValueError("enough")
if how == "ctrl-c":
    with cp:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
if how in ("SIGTERM", "SIGKILL"):
    os.kill(os.getpid(), getattr(signal, how))
    signal.pause()
if how == "fork":
    if os.fork() == 0:
        try:
            cp.restore()
        except ckpt.ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.wait()[1] == 0
    print("step", cp.restore(), flush=True)
    cp.close()
"""


def acquires(run: str) -> list[Acquire]:
    """Who has owned it, as its log says."""

    async def look() -> list[Acquire]:
        log = await read.open_run(run)
        await log.store.aclose()
        return list(log.state.acquires)

    return read.run(look())


def trained(run: str) -> None:
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run, every=100)]) as cp:
        for step in range(cp.restore(default=0), STEPS):
            toy.train_step(state)
            cp.step(step + 1)


def restored(run: str) -> tuple[int, str]:
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run, every=100)], triggers=None) as cp:
        return cp.restore(), toy.digest(state)


def ended_as(how: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the script ended as it would have without a Checkpointer."""
    if how in ("with", "raise"):
        return "ValueError: enough" in done.stderr and done.returncode == 1
    if how == "ctrl-c":
        return "KeyboardInterrupt" in done.stderr
    if how == "SIGTERM":
        return done.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
    return killed(done) if how == "SIGKILL" else done.returncode == 0


ENDS = ["end", "at once", "with", "raise", "ctrl-c", "SIGTERM", "SIGKILL"]


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_before_its_first_call_leaves_the_run_as_it_was(
    run_dir: str, how: str, own_sockets: Path
) -> None:
    """However it ends: nobody has taken the run over, no process is left, and the next start has what was there."""
    trained(run_dir)
    before = acquires(run_dir)
    done = run_script(MADE, run_dir, how)
    assert ended_as(how, done), done.stderr
    assert eventually(lambda: not writers(own_sockets)), "a process is left"
    assert acquires(run_dir) == before
    assert restored(run_dir) == (STEPS, toy.reference(STEPS))
    assert len(acquires(run_dir)) > len(before), "negative control: a call does take it over"


# Trains steps that only memory has, and dies.
DIES = """
import os, signal, sys, toy, ckpt
state = toy.build()
cp = ckpt.Checkpointer(state, [ckpt.Memory(linger_s=60), ckpt.Tier(sys.argv[1], every=100)])
for step in range(cp.restore(default=0), 5):
    toy.train_step(state)
    cp.step(step + 1).staged(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["end", "with", "SIGKILL"])
def test_memory_of_an_earlier_run_survives_a_script_that_ends_before_its_first_call(run_dir: str, how: str) -> None:
    """It was met by that script, and is there for the next one."""
    trained(run_dir)
    assert killed(run_script(DIES, run_dir))
    assert ended_as(how, done := run_script(MADE, run_dir, how)), done.stderr
    assert restored(run_dir) == (5, toy.reference(5))


def test_a_child_that_is_forked_before_the_first_call(run_dir: str, own_sockets: Path) -> None:
    """It is told that it is none of its own, and the trainer goes on."""
    trained(run_dir)
    done = run_script(MADE, run_dir, "fork")
    assert f"step {STEPS}" in done.stdout and done.returncode == 0, done.stderr
    assert eventually(lambda: not writers(own_sockets)), "a process is left"


def test_what_is_wrong_with_a_run_is_said_once(run_dir: str, own_sockets: Path) -> None:
    """By the first call; after that it is closed, and the place can be opened once it is mended."""
    place = Path(run_dir)
    place.write_text("in the way")
    cp = ckpt.Checkpointer(toy.build(), run_dir)
    with pytest.raises(ckpt.StoreError):
        cp.step(1)
    for call in (lambda: cp.step(1), cp.restore, cp.save):
        with pytest.raises(ckpt.ClosedError):
            call()
    cp.close()
    assert eventually(lambda: not writers(own_sockets)), "a process is left"
    place.unlink()
    trained(run_dir)
    assert restored(run_dir) == (STEPS, toy.reference(STEPS))


def test_closing_says_what_is_wrong_with_a_run(run_dir: str) -> None:
    """Where no other call has."""
    Path(run_dir).write_text("in the way")
    with pytest.raises(ckpt.StoreError), ckpt.Checkpointer(toy.build(), run_dir):
        pass


def test_a_writer_that_dies_before_the_first_call(run_dir: str) -> None:
    """Another takes its place, and has all that the first was told."""
    trained(run_dir)
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run_dir, every=100)]) as cp:
        first = cp.writer_pid
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: cp.writer_pid == 0)
        assert cp.restore() == STEPS and toy.digest(state) == toy.reference(STEPS)
        assert cp.writer_pid not in (0, first)
        toy.train_step(state)
        save = cp.step(STEPS + 1)
        assert save is not None and save.staged(60).step == STEPS + 1
        cp.save().committed(60)


def test_two_threads_that_come_first(run_dir: str) -> None:
    """One opens the run, the other waits for it; both get what they asked for."""
    trained(run_dir)
    cp, found = ckpt.Checkpointer(toy.build(), run_dir), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(cp.restore())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    cp.close()
    assert found == [STEPS, STEPS]


def on_another_machine(run: str, steps: int) -> None:
    """Train so many steps more, as a trainer that neither our claim nor our writer sees."""
    code = f"""
import os, toy, ckpt
os.environ["CKPT_RUNTIME_DIR"] = {str(Path(run).parent / "elsewhere")!r}
state = toy.build()
with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier({run!r}, every=100)]) as cp:
    for step in range(cp.restore(default=0), {steps}):
        toy.train_step(state)
        cp.step(step + 1)
"""
    run_script(code).check_returncode()


@pytest.mark.parametrize("fresh", [True, False])
def test_what_was_read_ahead_is_never_taken_for_the_newest(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """Another owner that has saved between the making of a Checkpointer and its first call is found, also while what
    was read ahead is held for fresh."""
    trained(run_dir)
    monkeypatch.setattr(opening, "FRESH_S", 600.0 if fresh else 0.0)
    asked = list[str]()
    ask = WriterClient.ask
    monkeypatch.setattr(
        WriterClient,
        "ask",
        lambda c, request, *a: (asked.append(type(request).__name__), ask(c, request, *a))[1],  # type: ignore
    )
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run_dir, every=100)]) as cp:
        early = cp._session.supervisor.run._early
        assert early is not None and early.reply.result(60)
        on_another_machine(run_dir, STEPS + 4)
        assert cp.restore() == STEPS + 4 and toy.digest(state) == toy.reference(STEPS + 4)
    assert asked.count("OpenRun") == (0 if fresh else 1), "negative control: what is old is asked for again"
    epochs = [one.epoch for one in acquires(run_dir)]
    assert epochs == sorted(set(epochs)), "each took over from the one before"


def of_its_epoch(run_dir: str, pid: int) -> bool:
    """Whether the ledger says that this process has restored, by which it owns the run."""
    found = (Account.from_bytes(path.read_bytes()) for path in Path(run_dir, "ledger").glob("*.json"))
    return any(account.pid == pid and account.restores for account in found)


def test_a_run_that_somebody_else_trains_by_the_first_call_is_refused(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He has begun since the Checkpointer was made: what was read ahead does not say so, and is too old to be used."""
    trained(run_dir)
    monkeypatch.setattr(opening, "FRESH_S", 0.0)
    cp = ckpt.Checkpointer(toy.build(), run_dir)
    early = cp._session.supervisor.run._early
    assert early is not None and early.reply.result(60)[0].tiers, "negative control: then it was free"
    code = f"""
import os, time, toy, ckpt
os.environ["CKPT_RUNTIME_DIR"] = {str(Path(run_dir).parent / "elsewhere")!r}
state = toy.build()
with ckpt.Checkpointer(state, {run_dir!r}) as cp:
    cp.restore()
    print("trains", flush=True)
    time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "trains\n"
            assert eventually(lambda: of_its_epoch(run_dir, other.pid))
            with pytest.raises(ckpt.InUseError, match=str(other.pid)):
                cp.restore()
        finally:
            other.kill()
