"""The end of a script, the value of acknowledged memory, and trainings with little memory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
import toy
from boundaries import memory_ready
from parallel import free_port, launch
from processes import PYTHONPATH, REPO, eventually, fake_meminfo, killed, run_python, run_script

STEPS = 25

# Trains steps of which memory has the twentieth, and ends within the next one.
ENDING = """
import gc, sys, torch, toy, ckpt
from boundaries import memory_ready
run, how = sys.argv[1:]
state = toy.build()
tiers = [ckpt.Tier(run, every=100), ckpt.Tier(run + "-far", every=1000)]
cp = ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(every=10))
for step in range(cp.restore(default=0), 25):
    toy.train_step(state)
    memory_ready(cp)
    cp.step(step + 1)
if how == "unheld":
    del cp
    gc.collect()
if how != "end":
    state["model"](torch.randn(8, toy.WIDTH))
if how == "raise":
    raise ValueError("enough")
if how.startswith("ctrl-c"):
    import os, signal, inside
    moments = [inside.LAST_STEP_IS_STAGED]
    if how == "ctrl-c twice":
        moments += [inside.STAGING_THREAD_IS_ASKED, inside.STEPPING["hand over"]]
    for moment in moments:
        interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
        inside.interrupt_at(inside.FOREVER, moment, interrupt, always=how == "ctrl-c twice")
"""


def restored(place: str, step: int | None = None) -> tuple[int, str]:
    """Return the step that a location restores, and a digest of every bit of it."""
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, place, triggers=None) as cp:
        return cp.restore(step=step), toy.digest(state)


def sparse(run: str) -> dict[str, Any]:
    tiers = [ckpt.Tier(run, every=100), ckpt.Tier(run + "-far", every=1000)]
    return {"tiers": tiers, "memory": ckpt.Memory(every=10)}


def trained(run: str, steps: int, *, memory_every: int = 10) -> tuple[dict[str, Any], ckpt.Checkpointer]:
    """Return a state after some steps, and its Checkpointer, which has saved the last one nowhere yet."""
    state = toy.build()
    cp = ckpt.Checkpointer(
        state,
        ckpt.Tier(run, every=100),
        memory=ckpt.Memory(every=memory_every),
        options=ckpt.Options(close_timeout_s=30),
    )
    train_to(cp, state, steps)
    return state, cp


def train_to(cp: ckpt.Checkpointer, state: dict[str, Any], last: int) -> None:
    """No step that memory is to have is left out because its memory is being made."""
    for step in range(cp.restore(default=0), last):
        toy.train_step(state)
        memory_ready(cp)
        cp.step(step + 1)


def newest(place: str) -> int:
    """Return the newest step that is durable there, -1 if there is none."""
    with contextlib.suppress(ckpt.CheckpointError):
        return ckpt.load(place).step
    return -1


@pytest.mark.parametrize(
    ("error", "auto"),
    [(None, False), (None, True), (ValueError, False), (ValueError, True), (KeyboardInterrupt, False)],
)
def test_leaving_the_block_keeps_a_step(
    run_dir: str, error: type[BaseException] | None, auto: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the intervals: the last step is in every tier, bit for bit, and a restart does not save it again. At an
    exception, possibly within the next step, it is the newest step that memory was scheduled to have."""
    state = toy.build()
    tiers: Any = {"tiers": run_dir, "every": "auto"} if auto else sparse(run_dir)
    with contextlib.suppress(error or ZeroDivisionError), ckpt.Checkpointer(state, **tiers) as cp:
        train_to(cp, state, STEPS)
        if error is not None:
            state["model"](torch.randn(8, toy.WIDTH))  # random numbers and buffers move on
            raise error("enough")
    kept = STEPS if error is None else newest(run_dir) if auto else 20
    for place in [run_dir] if auto else [run_dir, run_dir + "-far"]:
        assert newest(place) == kept
    assert kept > STEPS - 10 and restored(run_dir) == (kept, toy.reference(kept))
    assert kept != 20 or "the last step is 25, but only step 20 is saved: it was not in memory" in caplog.text


@pytest.mark.parametrize("how", ["end", "raise", "unheld"])
def test_a_script_that_just_ends_keeps_what_memory_has(run_dir: str, how: str) -> None:
    """Without close(), the end of the interpreter closes, also after an exception and without references. It may happen
    during a step."""
    done = run_script(ENDING, run_dir, how)
    assert done.returncode == (how == "raise"), done.stderr
    assert newest(run_dir + "-far") == 20
    assert restored(run_dir) == (20, toy.reference(20))


@pytest.mark.parametrize("how", ["ctrl-c", "ctrl-c twice"])
def test_ctrl_c_while_a_script_just_ends(run_dir: str, how: str) -> None:
    """It ends immediately without closing again, and the writer does the rest. Another Ctrl-C at any moment costs no
    step."""
    done = run_script(ENDING, run_dir, how)
    assert "KeyboardInterrupt" in done.stderr
    assert restored(run_dir) == (20, toy.reference(20))


def test_what_is_left_to_the_writer_is_no_failure(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """An exception on one rank of several abandons a save in progress: it is not reported as failed, a waiting caller
    is notified that it continues, and it is committed."""
    state = {"x": torch.randn(1 << 20)}
    slow = ckpt.Tier(run_dir, every=1, max_mib_s=4)
    cp = ckpt.Checkpointer(state, [slow])
    with caplog.at_level(logging.WARNING, "ckpt"):
        cp.restore(default=0)
        save = cp.step(1)
        assert save is not None
        save.wait_staged(60)
        inside.abandon(cp)
        with pytest.raises(ckpt.errors.SaveError, match="its writer continues"):
            save.wait_durable(60)
    assert not caplog.messages
    assert eventually(lambda: newest(run_dir) == 1)


def test_ctrl_c_stays_what_ends_the_script(run_dir: str) -> None:
    """If close() fails in a `finally`, its error is a note of the KeyboardInterrupt, which propagates."""
    state = toy.build()
    with pytest.raises(KeyboardInterrupt) as raised:
        cp = ckpt.Checkpointer(state, run_dir)
        try:
            cp.restore(default=0)
            toy.train_step(state)
            cp.step(1)
            inside.fail_in_background(cp, ckpt.errors.SaveError("the disk is full"))
            raise KeyboardInterrupt
        finally:
            cp.close()
    assert any("the disk is full" in note for note in raised.value.__notes__)
    assert newest(run_dir) == 1


# Trains in a thread that outlives the main thread, in a child; `how`: its start method.
IN_A_CHILD = """
import multiprocessing, sys, threading, time, toy, ckpt
def train(run):
    state = toy.build()
    cp = ckpt.Checkpointer(state, ckpt.Tier(run, every=100), triggers=None, memory=ckpt.Memory(every=10))
    start = cp.restore(default=0)
    opened.set()
    for step in range(start, 25):
        toy.train_step(state)
        cp.step(step + 1)
        time.sleep(0.02)
    cp.stage()
opened = threading.Event()
def child(run):
    threading.Thread(target=train, args=[run]).start()
    opened.wait()
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[2]).Process(target=child, args=[sys.argv[1]])
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_child_whose_thread_trains(run_dir: str, tmp_path: Path, how: str) -> None:
    """Its end waits for that thread, as that of any process does; then the newest step in memory is kept."""
    script = tmp_path / "script.py"
    script.write_text(IN_A_CHILD)
    done = run_python(
        [sys.executable, script, run_dir, how],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert restored(run_dir) == (STEPS, toy.reference(STEPS))


def test_an_update_that_has_begun_is_said(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once an optimizer has begun the next step, the last one cannot be saved any longer: the newest step in memory is
    kept, and one warning names it, the reason and the cost."""
    state = toy.build()
    with caplog.at_level(logging.WARNING, "ckpt"), ckpt.Checkpointer(state, **sparse(run_dir)) as cp:
        train_to(cp, state, STEPS)
        toy.train_step(state)
    said = [record.getMessage() for record in caplog.records if "the last step is" in record.getMessage()]
    assert said == [
        "the last step is 25, but only step 20 is saved: an optimizer has begun a further step; a restart repeats 5 "
        "steps"
    ]
    assert restored(run_dir) == (20, toy.reference(20))


def test_weights_that_are_others_at_the_end_are_not_saved(run_dir: str) -> None:
    """An exception within an evaluation with other weights: what lies in the model is of no step."""
    state = toy.build()
    with contextlib.suppress(ValueError), ckpt.Checkpointer(state, **sparse(run_dir)) as cp:
        train_to(cp, state, STEPS)
        with cp.not_training(), torch.no_grad():
            state["model"][0].weight.zero_()
            raise ValueError("enough")
    assert restored(run_dir) == (20, toy.reference(20))


def test_what_was_only_restored_is_not_saved_again(run_dir: str) -> None:
    """A script that restores and ends has done no step: there is nothing to bring anywhere."""
    for _ in range(2):
        state = toy.build()
        with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=5), memory=None) as cp:
            if cp.restore(default=0) == 0:
                toy.train_step(state)
                cp.step(5)
    with ckpt.Checkpointer(toy.build(), [ckpt.Tier(run_dir, every=5), ckpt.Tier(run_dir + "-far")], memory=None) as cp:
        assert cp.restore() == 5
    assert newest(run_dir) == 5 and newest(run_dir + "-far") == -1


def test_a_broken_last_step_does_not_stand_alone(run_dir: str) -> None:
    """With finite=False it is saved as such, together with the newest intact step."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=100)) as cp:
        for step in range(cp.restore(default=0), 8):
            toy.train_step(state)
            save = cp.step(step + 1, finite=step < 6)
            assert save is not None
            save.wait_staged(60)
    assert ckpt.load(run_dir, step=8).step == 8
    assert restored(run_dir) == (6, toy.reference(6))


RANKS = """
import sys, torch.distributed as dist, toy, ckpt
run, how = sys.argv[1:]
dist.init_process_group("gloo")
state = toy.build()
tiers = [ckpt.Tier(run, every=100), ckpt.Tier(run + "-far", every=100)]
with ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(every=10)) as cp:
    for step in range(cp.restore(default=0), 15):
        toy.train_step(state)
        cp.step(step + 1)
    dist.barrier()
    if how == "raise":
        raise ValueError("enough")
    if how == "nothing saved" and dist.get_rank() == 0:
        import shutil
        shutil.rmtree(run)
    dist.barrier()
    if how != "with":
        sys.exit(0)
"""


@pytest.mark.parametrize("how", ["with", "exit", "nothing saved", "raise"])
def test_several_ranks_keep_their_last_step(run_dir: str, how: str) -> None:
    """All have it when they end together, by sys.exit(0) too, which fails if it cannot be saved. After an exception on
    each of them the writers see to the newest step in memory, and no rank waits for another."""
    done = launch(2, RANKS, run_dir, how, port=free_port())
    assert [one.returncode for one in done] == ([0, 0] if how in ("with", "exit") else [1, 1]), done[0].stderr[-2000:]
    if how == "nothing saved":
        assert all("SaveError: step 15 was not written" in one.stderr for one in done)
        return
    assert eventually(lambda: newest(run_dir) == (10 if how == "raise" else 15))
    if how != "raise":
        assert newest(run_dir + "-far") == 15


# Loses its writer; the next one starts when a file `gate` appears. Says what its handles say, and is killed.
UNKEPT = """
import json, os, signal, sys, time, psutil, toy, ckpt
from boundaries import memory_ready
run, folder, when = sys.argv[1:]
state = toy.build()
cp = ckpt.Checkpointer(state, ckpt.Tier(run, every=1000), options=ckpt.Options(on_error="warn"))
cp.restore(default=0)

def train(step):
    toy.train_step(state)
    return cp.step(step)

train(1).wait_staged(60)
memory_ready(cp)  # else a step waits for memory from the next writer, which waits for the gate
with open(f"{folder}/python", "w") as script:
    script.write(f'#!/bin/sh\\nwhile [ ! -e {folder}/gate ]; do sleep 0.02; done\\nexec {sys.executable} "$@"\\n')
os.chmod(f"{folder}/python", 0o700)
sys.executable = f"{folder}/python" if when != "never" else f"{folder}/nothing"
writer = psutil.Process(cp.writer_pid)
writer.kill()
writer.wait()
saves = [train(step) for step in range(2, 12)]

def outcome(save, timeout_s):
    try:
        return save.wait_staged(timeout_s).tier
    except ckpt.CheckpointError as error:
        return type(error).__name__

found = {"at once": outcome(saves[-1], 0.1), "status": saves[-1].status}
open(f"{folder}/gate", "w")
found["then"] = [outcome(save, 60) for save in saves]
print(json.dumps(found), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_staged_is_told_when_another_process_has_the_memory(run_dir: str, tmp_path: Path) -> None:
    """After the writer's death steps are staged again, but acknowledged only when the next writer has the memory:
    killed right after that, the newest is restored from there. Overwritten steps are reported as such."""
    done = run_script(UNKEPT, run_dir, tmp_path, "after")
    assert killed(done), done.stderr
    found = json.loads(done.stdout)
    assert (found["at once"], found["status"]) == ("DeadlineError", "staging")
    assert found["then"][-1] == "memory" and found["then"][0] == "SaveError"
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1000)) as cp:
        assert cp.restore() == 11 and toy.digest(state) == toy.reference(11)
        assert cp.last_restore is not None and cp.last_restore.tier == "memory"


def test_without_a_writer_nothing_is_acknowledged(run_dir: str, tmp_path: Path) -> None:
    """If no writer can be started, a step that only the trainer has is not called staged, and no call waits."""
    done = run_script(UNKEPT, run_dir, tmp_path, "never")
    assert killed(done), done.stderr
    assert set(json.loads(done.stdout)["then"]) <= {"WriterError", "SaveError"}


def test_staged_says_what_it_is_worth(run_dir: str) -> None:
    """Memory that does not survive the trainer and is written nowhere is reported as such."""
    for tiers, memory, worth in (
        (None, ckpt.Memory(linger_s=0), "trainer"),
        (None, ckpt.Memory(), "memory"),
        (ckpt.Tier(run_dir, every=1), None, "memory"),
    ):
        options = ckpt.Options(name=f"memory {worth}")
        with ckpt.Checkpointer({"w": torch.ones(3)}, tiers, memory=memory, options=options) as cp:
            cp.restore(default=0)
            assert cp.save(1).wait_staged(60).tier == worth


# Trains on a machine with the free memory that a file contains (as lxcfs has it in containers): 20 MiB a snapshot.
SHORT = """
import json, logging, sys, torch, ckpt
logging.basicConfig(level=logging.WARNING, format="%(message)s")
run, meminfo, memory, *on_error = sys.argv[1:]
weight = torch.nn.Parameter(torch.zeros(5 << 20))
optim = torch.optim.SGD([weight], lr=1.0)
tier = ckpt.Tier(run, every=2, keep=9, full_every=1)
found = []

def train(step):
    weight.grad = torch.full_like(weight, -1.0)
    optim.step()
    save = cp.step(step)
    try:
        found.append(save and (save.wait_staged(60).tier, *(save.wait_durable(60, tier=t).step for t in save.tiers)))
    except ckpt.errors.SkippedError:  # it was not known yet how much memory there is
        found.append(None)

held = ckpt.Memory(keep=4) if memory == "memory" else None
options = ckpt.Options(on_error=(on_error or ["raise"])[0])
with ckpt.Checkpointer({"w": weight, "opt": optim}, tier, memory=held, options=options) as cp:
    start = cp.restore(default=0)
    for step in range(start + 1, start + 5):
        train(step)
    cp.save().wait_durable(60)
    if on_error:
        with open(meminfo, "w") as file:
            file.write("MemTotal: 9000000 kB\\nMemAvailable: 1000000 kB\\n")
        train(start + 5)
        train(start + 6)
    print(json.dumps({"start": start, "found": found}))
"""


def on_short_machine(folder: Path, mib: int, *arguments: str) -> dict[str, Any]:
    """Return the output of a training with limited free memory, and its log under "log"."""
    words = fake_meminfo(folder, mib)
    script = [sys.executable, "-c", SHORT, str(folder / "run"), words[-1], *arguments]
    done = subprocess.run(
        [*words, *script],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": f"{REPO}:{REPO / 'backends'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


def test_never_more_snapshots_than_an_arena_takes(tmp_path: Path) -> None:
    """Twelve are asked for, and each tier has one more: as many as go are held, and all is kept."""
    state = toy.build()
    tiers = [ckpt.Tier(str(tmp_path / str(n))) for n in range(5)]
    with ckpt.Checkpointer(state, [*tiers], memory=ckpt.Memory(keep=12)) as cp:
        train_to(cp, state, 5)
    for tier in tiers:
        assert restored(tier.url) == (5, toy.reference(5))


def test_fewer_snapshots_are_held_where_memory_is_short(tmp_path: Path) -> None:
    """Two snapshots fit where four were requested: this is logged once, and every step is staged."""
    found = on_short_machine(tmp_path, 70, "memory")
    assert found["found"] == [["memory"], ["memory", 2], ["memory"], ["memory", 4]]
    assert found["log"].count("memory is short: 2 of 4 snapshots") == found["log"].count("memory is short") == 1


def test_checkpoints_are_written_where_one_snapshot_fits(tmp_path: Path) -> None:
    """No step stays in memory, which is logged once; scheduled steps are written to the folder one after the other."""
    for start in (0, 4):
        found = on_short_machine(tmp_path, 35, "memory")
        assert found["start"] == start
        assert found["found"] == [None, ["memory", start + 2], None, ["memory", start + 4]]
        assert found["log"].count("memory is short: 1 of") == found["log"].count("memory is short") == 1
    assert float(ckpt.load(str(tmp_path / "run"))["w"][0]) == 8.0


def test_memory_is_used_again_once_there_is_room(tmp_path: Path) -> None:
    """With room again, the next scheduled step is held in memory. Before that, only scheduled steps are saved."""
    found = on_short_machine(tmp_path, 20, "memory", "warn")
    url = f"file://{tmp_path}/run"
    assert found["found"] == [None, [url, 2], None, [url, 4], None, ["memory", 6]], found["log"]
    assert found["log"].count("memory is short") == 1
    assert float(ckpt.load(str(tmp_path / "run"))["w"][0]) == 6.0


# Trains where no shared memory can be made, and prints how each script would end.
NOTHING_FITS = """
import json, resource, sys, tempfile, torch, ckpt, inside
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
found = {}

def script(work, tiers=None, every=2, **settings):
    model = torch.nn.Linear(600, 600)
    optim = torch.optim.AdamW(model.parameters())
    name = work.__name__ if tiers == "name" else None
    place = None if name else tempfile.mkdtemp(dir=sys.argv[1]) + "/run"
    options = ckpt.Options(name=name, **settings)
    settings = {"options": options, "triggers": None} | ({} if name else {"every": every})

    def train(cp, steps):
        for step in range(cp.restore(default=0), steps):
            model(torch.ones(1, 600)).sum().backward()
            optim.step()
            optim.zero_grad()
            cp.step(step + 1)

    try:
        work(lambda: ckpt.Checkpointer({"model": model, "optim": optim}, place, **settings), train)
        found[work.__name__] = "exit 0"
    except BaseException as error:
        code = f" {error.code}" if isinstance(error, SystemExit) else ""
        found[work.__name__] = type(error).__name__ + code
        print(work.__name__, repr(error), getattr(error, "__notes__", ""), file=sys.stderr)

def with_block(make, train):
    with make() as cp: train(cp, 12)
def nothing_scheduled(make, train):
    with make() as cp: train(cp, 3)
def last_step_scheduled(make, train):
    cp = make(); train(cp, 2); cp.close()
def waited(make, train):
    cp = make()
    train(cp, 2)
    try: cp.wait()
    finally: inside.abandon(cp)
def memory_alone(make, train):
    with make() as cp: train(cp, 5)
def exit_0(make, train):
    with make() as cp: train(cp, 2); sys.exit(0)
def exit_3(make, train):
    with make() as cp: train(cp, 1); sys.exit(3)
def exit_3_finally(make, train):
    cp = make()
    try: train(cp, 1); sys.exit(3)
    finally: cp.close()
def own_error(make, train):
    with make() as cp: train(cp, 1); raise ZeroDivisionError
def only_logged(make, train):
    with make() as cp: train(cp, 12)

for work in with_block, last_step_scheduled, waited, exit_0, exit_3, exit_3_finally, own_error: script(work)
script(nothing_scheduled, every=100)
script(memory_alone, "name")
script(only_logged, on_error="warn")
print(json.dumps(found))
"""


def test_script_fails_when_no_save_succeeded(tmp_path: Path) -> None:
    """However the script ends, it ends with an error, and its own exception or exit code comes first."""
    done = run_script(NOTHING_FITS, str(tmp_path))
    found = json.loads(done.stdout.splitlines()[-1])
    own = {"exit_3": "SystemExit 3", "exit_3_finally": "SystemExit 3", "own_error": "ZeroDivisionError"}
    assert {name: found.pop(name) for name in own} == own, done.stderr
    assert found.pop("only_logged") == "exit 0"
    assert set(found.values()) <= {"SkippedError", "SaveError"} and len(found) == 6, (found, done.stderr)
    assert done.stderr.count("closing the Checkpointer failed") >= 3  # by exit_3, exit_3_finally and own_error


@pytest.mark.parametrize("then", ["wait", "next step", "close", "moved on", "warn"])
def test_scheduled_save_that_was_dropped_is_an_error_unless_made_up_for(run_dir: str, then: str) -> None:
    """Weights are written to by hand while a scheduled step is copied. The next step is saved in its place. If there is
    none, wait() and close() raise."""
    model = torch.nn.Linear(64, 64)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(step: int) -> None:
        model.weight.grad = torch.ones_like(model.weight)
        optim.step()
        cp.step(step)

    on_error = "warn" if then == "warn" else "raise"
    cp = ckpt.Checkpointer(
        {"model": model, "optim": optim}, run_dir, every=2, triggers=None, options=ckpt.Options(on_error=on_error)
    )
    cp.restore(default=0)
    train(1)
    memory_ready(cp)
    copying = threading.Event()
    inside.run_in_staging_thread(cp, lambda: copying.wait() and None)
    train(2)
    with torch.no_grad():
        model.weight.mul_(0.5)
    copying.set()
    if then == "wait":
        with pytest.raises(ckpt.errors.SaveError, match=r"step 2 was dropped: model\.weight changed outside"):
            cp.wait(60)
        cp.wait(60)  # once
    if then in ("wait", "next step"):
        train(3)
        cp.close()
        assert newest(run_dir) == 3
        return
    if then == "moved on":
        model.weight.grad = torch.ones_like(model.weight)
        optim.step()
    with (
        contextlib.nullcontext() if then == "warn" else pytest.raises(ckpt.errors.SaveError, match="step 2 was dropped")
    ):
        cp.close()
    assert newest(run_dir) == 1  # which memory had


# -- an end within an end --


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Restore the SIGUSR1 handler after a test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def closes(cp: ckpt.Checkpointer) -> Callable[[], None]:
    """A signal whose handler closes it."""
    signal.signal(signal.SIGUSR1, lambda *_: cp.close())
    return lambda: signal.raise_signal(signal.SIGUSR1)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "moment"),
    [*((how, moment) for how in ("handler", "close") for moment in inside.CLOSING), ("exit", "stage the last step")],
)
def test_interrupted_within_close(run_dir: str, monkeypatch: pytest.MonkeyPatch, moment: str, how: str) -> None:
    """A handler that closes too: neither waits for the other. Ctrl-C, as in a notebook: closed again, or opened again.
    At the exit it is not closed again, and memory stays. The last step always exists."""
    _, cp = trained(run_dir, 7)
    if how == "exit":
        cp.stage()
    if how == "handler":
        inside.interrupt_at(monkeypatch, inside.CLOSING[moment], closes(cp))
        began = time.monotonic()
        cp.close()
        assert time.monotonic() - began < 15
    else:
        inside.interrupt_at(monkeypatch, inside.CLOSING[moment], interrupt)
        with pytest.raises(KeyboardInterrupt):
            inside.close_at_exit(cp) if how == "exit" else cp.close()
        if how == "close":
            cp.close()
    monkeypatch.undo()
    assert restored(run_dir) == (7, toy.reference(7))


def test_on_fault_may_save_while_we_close(run_dir: str) -> None:
    """on_fault gets the error that this Checkpointer is closed, and close() does not wait for it beyond its timeout."""
    heard: list[object] = []
    arrived, state = threading.Event(), toy.build()

    def on_fault(fault: object) -> None:
        arrived.set()
        while not inside.is_closed(cp):
            time.sleep(0.01)
        try:
            cp.save()
        except ckpt.CheckpointError as error:
            heard.append(error)

    with ckpt.Checkpointer(state, run_dir, options=ckpt.Options(on_fault=on_fault, close_timeout_s=60)) as cp:
        cp.restore(default=0)
        toy.train_step(state)
        cp.step(1)
        cp.request_save("a test")
        last = 1
        while not arrived.wait(0.05):  # a step taken before the request arrived does not count
            assert last < 600
            last += 1
            toy.train_step(state)
            cp.step(last)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert restored(run_dir) == (last, toy.reference(last))
    assert [type(one) for one in heard] == [ckpt.errors.ClosedError]


@pytest.mark.parametrize("shared", [False, True])
def test_an_optimizer_of_something_else_begins_no_further_step(run_dir: str, shared: bool) -> None:
    """A probe with a model of its own is trained after the last step, which is still saved. If the optimizer shares
    memory with the state, that counts as a further step."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=100), memory=ckpt.Memory(every=10)) as cp:
        train_to(cp, state, 13)
        probe = torch.nn.Linear(4, 1)
        params = [next(iter(state["model"].parameters())).detach().view(-1)[:1]] if shared else probe.parameters()
        probe(torch.randn(2, 4)).sum().backward()
        torch.optim.SGD(params, lr=0.0).step()
        now = toy.digest(state)  # the probe has drawn random numbers
    assert restored(run_dir) == ((10, toy.reference(10)) if shared else (13, now))


def test_ctrl_c_while_it_is_made(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: it can be created again immediately, and has the earlier steps."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        cp.restore(default=0)
        toy.train_step(state)
        cp.step(1)
    for name, moment in inside.MADE.items():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            inside.act_instead(patch, moment, interrupt)
            ckpt.Checkpointer(state, run_dir)
        began = time.monotonic()
        assert restored(run_dir) == (1, toy.reference(1)), name
        assert time.monotonic() - began < 20, name


def test_a_step_is_in_memory_when_its_layout_is_too(own_sockets: Path) -> None:
    """A stopped writer has not received a new layout: nothing is acknowledged until it has."""
    state: dict[str, Any] = {"left": torch.zeros(1)}
    with ckpt.Checkpointer(state, options=ckpt.Options(name="layouts")) as cp:
        cp.restore(default=0)
        first = cp.step(1)
        assert first is not None and first.wait_staged(30)
        os.kill(cp.writer_pid, signal.SIGSTOP)
        try:
            state["left"] = torch.zeros(2)
            second = cp.step(2)
            assert second is not None
            with pytest.raises(ckpt.errors.DeadlineError):
                second.wait_staged(1.0)
        finally:
            os.kill(cp.writer_pid, signal.SIGCONT)
        assert second.wait_staged(30).step == 2
