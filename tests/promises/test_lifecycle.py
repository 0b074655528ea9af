"""One Checkpointer from its creation to its end, in one process: what may be called when, and what each end leaves."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ckpt
import inside
import toy
import writer_zygote
from kills import kill_all, problems, steps_on_disk
from processes import eventually, run_script, writers
from run_files import DATA_FOLDER, data_files

State = dict[str, Any]


def train(cp: ckpt.Checkpointer, state: State, first: int, last: int) -> ckpt.Save | None:
    """Steps `first` to `last`, each staged; the handle of the last."""
    save = None
    for step in range(first, last + 1):
        toy.train_step(state)
        save = cp.step(step)
        if save is not None:
            save.wait_staged(60)
    return save


def rare(run: str, **options: Any) -> dict[str, Any]:
    """Memory at every step, and a durable tier that is never due."""
    return {"tiers": ckpt.Tier(run, every=1000), "memory": ckpt.Memory(**options)}


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Writers that make no progress, as behind a disk that hangs."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def abandon(run: str, steps: int, *, every: int = 1000, name: str = "") -> None:
    """Another process trains `steps` steps and is killed; its memory stays."""
    tiers = f"ckpt.Tier({run!r}, every={every})" if run else None
    code = f"""
import os, signal, ckpt, toy
state = toy.build()
cp = ckpt.Checkpointer(state, {tiers}, options=ckpt.Options(name={name or None!r}))
for step in range(1, {steps} + 1):
    toy.train_step(state)
    cp.step(step).wait_staged(60)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_script(code)
    assert result.returncode == -signal.SIGKILL, result.stderr


# -- the end --


def test_close_twice_and_use_after_close(run_dir: str) -> None:
    """A second close() does nothing; every other call raises that the Checkpointer is closed."""
    state = toy.build()
    cp = ckpt.Checkpointer(state, run_dir)
    train(cp, state, 1, 2)
    cp.close()
    cp.close()
    for call in (lambda: cp.step(3), cp.save, cp.restore, lambda: cp.save(3)):
        with pytest.raises(ckpt.errors.ClosedError):
            call()
    assert steps_on_disk(run_dir) == [2]


def test_close_keeps_what_was_restored_from_memory_alone(run_dir: str) -> None:
    """A step that was brought back from memory, with nothing trained after it, is durable after close()."""
    folder = Path(run_dir, DATA_FOLDER)
    Path(run_dir).mkdir()
    ckpt.Checkpointer(toy.build(), **rare(run_dir)).close()
    folder.write_text("in the way")  # so that the writer cannot persist the ring at the death
    abandon(run_dir, 5)
    assert steps_on_disk(run_dir) == []
    with ckpt.Checkpointer(toy.build(), **rare(run_dir)) as cp:
        assert cp.restore() == 5
        assert cp.last_restore is not None and cp.last_restore.tier == "memory"
        folder.unlink()
    assert steps_on_disk(run_dir)[0] == 5


def test_negative_control_an_open_one_is_seen(run_dir: str, own_sockets: Path) -> None:
    """What `test_nothing_outlives_close` counts exists while a Checkpointer is open."""
    me = psutil.Process()
    gc.collect()
    before = threading.active_count(), me.num_fds(), len(writers(own_sockets))
    with ckpt.Checkpointer(toy.build(), run_dir):
        during = threading.active_count(), me.num_fds(), len(writers(own_sockets))
        assert _global_optimizer_pre_hooks
    assert all(now > then for now, then in zip(during, before, strict=True))


# -- places that cannot be used --


def make_foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")


def make_newer(folder: Path) -> None:
    ckpt.Checkpointer(toy.build(), str(folder)).close()
    inside.rewrite_format(folder, major=99)  # the file must be whole, and of a later version


def make_file(folder: Path) -> None:
    folder.write_text("a file")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (make_foreign, ckpt.errors.FormatError),
        (make_newer, ckpt.errors.FormatError),
        (make_file, ckpt.errors.StoreError),
    ],
)
def test_place_that_is_not_ours(
    run_dir: str, own_sockets: Path, make: Callable[[Path], None], error: type[Exception]
) -> None:
    """A folder with other files, one of a newer version, or a file is rejected unchanged, and no process is left."""
    make(Path(run_dir))

    def content() -> dict[str, bytes]:
        root = Path(run_dir)
        return {str(p): p.read_bytes() for p in [root, *root.rglob("*")] if p.is_file()}

    before = content()
    with pytest.raises(error):
        ckpt.Checkpointer(toy.build(), run_dir)
    assert content() == before
    assert eventually(lambda: not writers(own_sockets)), "a process is left"
    assert not _global_optimizer_pre_hooks


def test_place_that_is_read_only(run_dir: str, own_sockets: Path) -> None:
    """A folder that nothing can be written to is refused when opened, with a hint."""
    Path(run_dir).mkdir()
    if subprocess.run(["mount", "--bind", "-o", "ro", run_dir, run_dir], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", run_dir], capture_output=True, check=False)
        if os.access(run_dir, os.W_OK):
            pytest.skip("read-only mounts do not work here")
        with pytest.raises(ckpt.errors.StoreError, match="read-only"):
            ckpt.Checkpointer(toy.build(), run_dir)
    finally:
        subprocess.run(["umount", run_dir], check=True)
    assert eventually(lambda: not writers(own_sockets)), "a process is left"


def test_damaged_format_file_loses_nothing(run_dir: str) -> None:
    """The run is rejected or opened, never created again: its checkpoints still exist."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        train(cp, state, 1, 2)
    for content in (b"", b"{", b"\0" * 200):
        Path(run_dir, "FORMAT.json").write_bytes(content)
        with contextlib.suppress(ckpt.errors.FormatError, ckpt.errors.CorruptError):
            with ckpt.Checkpointer(toy.build(1), run_dir) as cp:
                assert cp.restore(default=0) == 2
        assert len(data_files(run_dir)) == 1


# -- steps --


def test_step_without_restore(run_dir: str) -> None:
    """Nobody loses a good run to a forgotten restore()."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        train(cp, state, 1, 2)
    with ckpt.Checkpointer(state, run_dir) as cp:
        for call in (lambda: cp.step(1), lambda: cp.save(1)):
            with pytest.raises(ckpt.errors.UsageError, match="restore"):
                call()
        assert cp.restore() == 2
        train(cp, state, 3, 3)
    assert steps_on_disk(run_dir) == [3, 2]


def test_steps_only_go_up(run_dir: str) -> None:
    """A step that repeats, goes back or is not a number raises an error, and the run continues."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        train(cp, state, 1, 2)
        wrong: list[Any] = [2, 1, -1, True, 1.5, "3", 10**18]
        for step in wrong:
            with pytest.raises(ckpt.errors.UsageError):
                cp.step(step)
        train(cp, state, 3, 3)


def test_call_amid_gradient_accumulation(run_dir: str) -> None:
    """step() where no optimizer has stepped since the last call, and gradients wait, is an error."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        train(cp, state, 1, 1)
        state["optim"].zero_grad()
        state["model"](torch.randn(8, toy.WIDTH)).sum().backward()
        with pytest.raises(ckpt.errors.UsageError, match="accumulation"):
            cp.step(2)
        state["optim"].step()
        saved = cp.step(2)
        assert saved is not None
        saved.wait_staged(60)


def test_step_left_out_by_a_grad_scaler(run_dir: str) -> None:
    """A GradScaler that skips an optimizer step because of an overflow is not an error."""
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = {"model": model, "optim": optim, "scaler": scaler}
    with ckpt.Checkpointer(state, run_dir) as cp:
        for step, factor in enumerate((1.0, float("inf"), 1.0), start=1):
            before = model.weight.detach().clone()
            optim.zero_grad()
            scaler.scale((model(torch.ones(2, 4)) * factor).sum()).backward()
            scaler.step(optim)
            scaler.update()
            assert torch.equal(before, model.weight) == (factor != 1.0)
            cp.step(step)
    assert steps_on_disk(run_dir) == [3]


# -- restore --


def test_default_only_where_nothing_is(run_dir: str) -> None:
    """restore(default) gives the default in an empty place, and the step where there is one; without, it raises."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        with pytest.raises(ckpt.errors.NoCheckpointError):
            cp.restore()
        assert cp.restore(default=None) is None
        assert cp.restore(default=0) == 0
        train(cp, state, 1, 2)
    with ckpt.Checkpointer(state, run_dir) as cp:
        assert cp.restore(default=0) == 2
        with pytest.raises(ckpt.errors.NoCheckpointError):
            cp.restore(default=0, step=77)


def test_rollback_stays(run_dir: str, own_sockets: Path) -> None:
    """restore(step=N) goes back, and no later restart brings the undone steps back, saved anything or not."""
    code = f"""
import os, signal, ckpt, toy
state = toy.build()
cp = ckpt.Checkpointer(state, ckpt.Tier({run_dir!r}, every=5, keep=9))
print(cp.restore(step=10), toy.digest(state), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=5, keep=9)) as cp:
        train(cp, state, 1, 20)
    assert steps_on_disk(run_dir) == [20, 15, 10, 5]
    assert run_script(code).stdout.split() == ["10", toy.reference(10)]
    kill_all(writers(own_sockets))
    for last in (10, 12):  # killed before anything was saved; then after two steps that are in memory only
        state = toy.build()
        with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=5, keep=9)) as cp:
            assert cp.restore() == 10
            assert toy.digest(state) == toy.reference(10)
            train(cp, state, 11, last)
    assert steps_on_disk(run_dir)[:2] == [12, 10]
    assert problems(run_dir) == []


def test_rollback_in_memory_stays(run_dir: str) -> None:
    """The same with the memory of the undone steps still there."""
    abandon(run_dir, 5, every=1)
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=9)) as cp:
        assert cp.restore() == 5
        assert cp.restore(step=3) == 3
        assert toy.digest(state) == toy.reference(3)
        assert cp.restore() == 3
        assert cp.restore(step=5) == 5  # asked for by its number it can be had
        assert cp.restore(step=3) == 3
    with ckpt.Checkpointer(state, run_dir) as cp:
        assert cp.restore() == 3


def test_memory_only_run(own_sockets: Path) -> None:
    """A run without any durable tier is found again by its name, and by no other."""
    abandon("", 4, name="mine")
    with ckpt.Checkpointer(toy.build(), options=ckpt.Options(name="other")) as cp:
        assert cp.restore(default=None) is None
    state = toy.build()
    with ckpt.Checkpointer(state, options=ckpt.Options(name="mine")) as cp:
        with pytest.raises(ckpt.errors.UsageError, match="restore"):
            cp.step(1)
        assert cp.restore() == 4
        assert toy.digest(state) == toy.reference(4)
        train(cp, state, 5, 6)
    assert eventually(lambda: not writers(own_sockets)), "a process is left"
    with pytest.raises(ckpt.errors.UsageError, match="name"):
        ckpt.Checkpointer(state)


# -- handles and saves --


def test_save_and_handles(run_dir: str) -> None:
    """save() writes to every tier; handles report what is safe, and raise for levels that were not requested."""
    state = toy.build()
    with ckpt.Checkpointer(state, **rare(run_dir)) as cp:
        with pytest.raises(ckpt.errors.UsageError, match="needs the step"):
            cp.save()
        staged = train(cp, state, 1, 1)
        assert staged is not None and staged.wait_staged(60).tier == "memory"
        assert staged.status == "staged"
        with pytest.raises(ckpt.errors.SaveError, match="stays in memory"):
            staged.wait_durable(60)
        saved = cp.save()
        assert saved.wait_durable(60).step == 1
        assert saved.status == "durable" and saved.wait_durable(0).tier == f"file://{run_dir}"
        with pytest.raises(ckpt.errors.SaveError, match="not written"):
            saved.wait_durable(tier="file:///elsewhere")
        assert cp.save(1).id == saved.id, "a step that is safe is not saved again"
        toy.train_step(state)
        with pytest.raises(ckpt.errors.UsageError, match="went on"):
            cp.save()
        assert cp.save(2).wait_durable(60).step == 2
        assert steps_on_disk(run_dir) == [2, 1]


def test_handle_waits_no_longer_than_told(run_dir: str, own_sockets: Path) -> None:
    """A wait past its deadline raises DeadlineError, and the save continues."""
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(run_dir, every=1)], memory=None) as cp:
        train(cp, state, 1, 1)
        cp.wait(60)
        with stopped(writers(own_sockets)):
            save = train(cp, state, 2, 2)
            assert save is not None
            with pytest.raises(ckpt.errors.DeadlineError):
                save.wait_durable(0.05)
            with pytest.raises(ckpt.errors.DeadlineError):
                cp.wait(0.05)
        assert save.wait_durable(60).step == 2


def test_busy_skip(run_dir: str, own_sockets: Path) -> None:
    """When the store hangs, steps are skipped, never waited for; what was due is written once it is back."""
    state = toy.build()
    with ckpt.Checkpointer(
        state, [ckpt.Tier(run_dir, every=1, keep=50)], memory=None, options=ckpt.Options(on_busy="skip")
    ) as cp:
        train(cp, state, 1, 1)
        cp.wait(60)
        saves = []
        with stopped(writers(own_sockets)):
            for step in range(2, 12):
                toy.train_step(state)
                saves.append(cp.step(step))
        assert saves[-1] is not None
        with pytest.raises(ckpt.errors.SkippedError):
            saves[-1].wait_staged(1)
        skipped = [s.step for s in saves if s is not None and s.status == "failed"]
        assert skipped and cp.stats.skipped == len(skipped)
        assert eventually(lambda: saves[0] is not None and saves[0].status == "durable")
        cp.wait(60)
        train(cp, state, 12, 12)
    assert set(steps_on_disk(run_dir)) == set(range(1, 13)) - set(skipped)


def test_busy_wait_has_a_deadline(run_dir: str, own_sockets: Path) -> None:
    """With this choice, step() waits for the store, at most busy_timeout_s, and then raises; later saves succeed."""
    state = toy.build()
    cp = ckpt.Checkpointer(
        state, [ckpt.Tier(run_dir, every=1, keep=50)], memory=None, options=ckpt.Options(busy_timeout_s=0.3)
    )
    with cp:
        train(cp, state, 1, 1)
        cp.wait(60)
        with stopped(writers(own_sockets)):
            with pytest.raises(ckpt.errors.DeadlineError, match="no slot became free"):
                for step in range(2, 12):
                    toy.train_step(state)
                    cp.step(step)
        cp.wait(60)
        train(cp, state, 20, 20)
    assert steps_on_disk(run_dir)[0] == 20
    assert problems(run_dir) == []


# -- memory --


def test_state_that_grows(run_dir: str, own_sockets: Path) -> None:
    """New parameters in mid-run get memory for themselves; every step staged before and after restores bit for bit."""

    def grown() -> State:
        state = toy.build()
        state["extra"] = nn.Linear(1500, 1500)  # many times the rest
        return state

    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=5, keep=9)) as cp:
        train(cp, state, 1, 7)
        state["extra"] = nn.Linear(1500, 1500)
        state["optim"].add_param_group({"params": list(state["extra"].parameters())})
        for step in range(8, 31):
            loss = state["extra"](torch.randn(2, 1500)).pow(2).mean()
            state["optim"].zero_grad()
            loss.backward()
            state["optim"].step()
            cp.step(step)
        cp.wait(60)
        wanted = [t.clone() for t in (*state["extra"].parameters(), *state["model"].parameters())]
        moments = [v.clone() for p in state["extra"].parameters() for v in state["optim"].state[p].values()]
    assert steps_on_disk(run_dir)[0] == 30
    assert problems(run_dir) == []
    again = grown()
    again["optim"].add_param_group({"params": list(again["extra"].parameters())})
    with ckpt.Checkpointer(again, run_dir) as cp:
        assert cp.restore() == 30
    got = [*again["extra"].parameters(), *again["model"].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    back = [v for p in again["extra"].parameters() for v in again["optim"].state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(back, moments, strict=True))
    small = toy.build()
    with ckpt.Checkpointer(small, run_dir) as cp:
        assert cp.restore(step=5) == 5
        assert toy.digest(small) == toy.reference(5)


# -- failures in the background --


def test_failure_is_raised_at_the_next_call_and_later_saves_succeed(run_dir: str) -> None:
    """A failed write is raised once, by the next call. Once the store is repaired, saving works as before."""
    state = toy.build()
    folder = Path(run_dir, DATA_FOLDER)
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=50)) as cp:
        folder.write_text("in the way")
        told: list[str] = []
        for step in (1, 2):
            toy.train_step(state)
            try:
                cp.step(step)
            except ckpt.errors.SaveError as error:  # by the next call, or by this one, if it failed that quickly
                told += [str(error), *getattr(error, "__notes__", ())]
            inside.wait_for_writes(cp, 60)  # as wait() does, but raises nothing
        assert sum("step 1 was not written" in one for one in told) == 1, told
        folder.unlink()
        if not any("step 2 was not written" in one for one in told):
            with pytest.raises(ckpt.errors.SaveError, match="step 2 was not written"):  # it failed after that call
                cp.save()
        toy.train_step(state)
        saved = cp.step(3)
        assert saved is not None and saved.wait_durable(60).step == 3
    assert steps_on_disk(run_dir)[0] == 3
    assert problems(run_dir) == []


def committed(save: ckpt.Save | None) -> None:
    """Wait for a save whose error may also be raised by step() itself."""
    assert save is not None
    save.wait_durable(60)


def test_failed_step_is_told_once_and_can_be_saved_again(run_dir: str) -> None:
    """An error that its handle has raised is not raised by the next call as well. save() writes that step once more."""
    state = toy.build()
    folder = Path(run_dir, DATA_FOLDER)
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1)) as cp:
        folder.write_text("in the way")
        toy.train_step(state)
        with pytest.raises(ckpt.errors.SaveError):
            committed(cp.step(1))
        folder.unlink()
        assert cp.save().wait_durable(60).step == 1
        train(cp, state, 2, 2)


def test_failures_can_be_warnings(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """With on_error="warn" they are logged and never raised."""
    state = toy.build()
    folder = Path(run_dir, DATA_FOLDER)
    with caplog.at_level(logging.WARNING, "ckpt"):
        with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1), options=ckpt.Options(on_error="warn")) as cp:
            folder.write_text("in the way")
            toy.train_step(state)
            cp.step(1)
            cp.wait(60)
            toy.train_step(state)
            cp.step(2)
            cp.wait(60)
            folder.unlink()
            train(cp, state, 3, 3)
    assert "step 1 was not written" in caplog.text
    assert steps_on_disk(run_dir)[0] == 3


def test_close_logs_an_error_if_every_save_failed(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """With on_error="warn" nothing is raised, and the script ends with exit code 0."""
    state = toy.build()
    with caplog.at_level(logging.ERROR, "ckpt"):
        with ckpt.Checkpointer(
            state, ckpt.Tier(run_dir, every=1), memory=None, options=ckpt.Options(on_error="warn")
        ) as cp:
            Path(run_dir, DATA_FOLDER).write_text("in the way")
            train(cp, state, 1, 2)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "step 2 was the last step, but no tier has a step of this job attempt"
    ]


def test_writer_that_keeps_dying(run_dir: str, own_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After several deaths in a row no writer is started; this is reported, and training continues. The error of an
    earlier failed start is not reported as the reason, because later starts succeeded."""
    state = toy.build()
    cp = ckpt.Checkpointer(state, **rare(run_dir))
    train(cp, state, 1, 2)
    once = Path(run_dir).with_name("once")
    monkeypatch.delenv(writer_zygote.VARIABLE)  # forks of it would not run what is set below
    fails = (
        f"import os; os.path.exists({str(once)!r}) or (open({str(once)!r}, 'x'), __import__('everystep_was_removed'))"
    )
    inside.run_in_writers(monkeypatch, fails)
    for _ in range(inside.MOST_RESTARTS_OF_WRITER - 1):  # the start that fails is a death too
        old = {process.pid for process in writers(own_sockets)}
        kill_all(writers(own_sockets))
        assert eventually(lambda old=old: {p.pid for p in writers(own_sockets)} - old != set())
        assert cp.save().wait_durable(60)
        last = (cp.save().step or 0) + 1
        train(cp, state, last, last)
    kill_all(writers(own_sockets))
    with pytest.raises(ckpt.errors.WriterError, match="died") as failed:
        for step in range(10, 10_000):
            toy.train_step(state)
            cp.step(step)
    assert once.exists() and "everystep_was_removed" not in str(failed.value)
    toy.train_step(state)
    cp.step(20_001)
    with pytest.raises(ckpt.CheckpointError, match="the writer is lost"):
        cp.save().wait_durable(60)
    with contextlib.suppress(ckpt.CheckpointError):
        cp.close()
    assert eventually(lambda: not writers(own_sockets)), "a process is left"
    assert steps_on_disk(run_dir)[0] >= 2
    assert problems(run_dir) == []


def test_why_no_new_writer_starts_is_said(run_dir: str, own_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the library was removed during the job: the error has Python's message. A failed save is not called
    held in memory, because nothing keeps it when the trainer ends."""
    state = toy.build()
    cp = ckpt.Checkpointer(state, **rare(run_dir))
    train(cp, state, 1, 2)
    inside.run_in_writers(monkeypatch, "import everystep_was_removed", instead=True)
    kill_all(writers(own_sockets))
    saved = cp.save()
    with pytest.raises(ckpt.errors.SaveError, match="No writer has it: memory is lost when this process") as failed:
        saved.wait_durable(60)
    assert "still in memory" not in str(failed.value)
    with pytest.raises(ckpt.errors.WriterError, match=r"times within.*No module named 'everystep_was_removed'"):
        for step in range(10, 10_000):
            toy.train_step(state)
            cp.step(step)
    with contextlib.suppress(ckpt.CheckpointError):
        cp.close()


CLOSED = """
import gc, json, sys, torch, ckpt

def shared_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))

def train(folder):
    model = torch.nn.Linear(1024, 1024)
    with ckpt.Checkpointer({"model": model}, folder) as cp:
        hook = sys.excepthook
        sys.excepthook = lambda *what: hook(*what)  # as libraries do that are imported late, and keep it
        cp.step(1).wait_staged()
        return shared_kib()

def collect():
    for _ in range(3):
        gc.collect()
    return shared_kib()

print(json.dumps([train(sys.argv[1]), collect()]))
"""


def test_closed_gives_its_memory_back(run_dir: str) -> None:
    """After close() nothing keeps the memory of the snapshots in this process, not even an excepthook around ours."""
    done = run_script(CLOSED, run_dir)
    assert done.returncode == 0, done.stderr
    held, left = json.loads(done.stdout.splitlines()[-1])
    assert held >= 4096 and left < 1024


def test_nothing_outlives_close(run_dir: str, own_sockets: Path) -> None:
    """Threads and memory wait neither for the writer to end, nor for the garbage collector; processes, descriptors and
    hooks are as before soon after it."""

    def left() -> tuple[int, int]:
        me = psutil.Process()
        return me.num_fds(), len(writers(own_sockets)) + len(me.children())

    state = toy.build()
    ckpt.Checkpointer(state, run_dir + "-first").close()
    assert eventually(lambda: not writers(own_sockets))
    threads, gc_was_on, before = set(threading.enumerate()), gc.isenabled(), left()
    gc.collect()
    gc.disable()
    try:
        for tiers in (run_dir, [run_dir + "-a", run_dir + "-b"]):
            arenas = _arenas()
            with ckpt.Checkpointer(state, tiers, every=2) as cp:
                for step in range(cp.restore(default=0), 4):
                    toy.train_step(state)
                    cp.step(step + 1)
            assert {one.name for one in set(threading.enumerate()) - threads} == set()
            assert _arenas() == arenas
    finally:
        if gc_was_on:
            gc.enable()
    gc.collect()
    assert eventually(lambda: all(now <= then for now, then in zip(left(), before, strict=True))), (left(), before)
    assert not _global_optimizer_pre_hooks


def _arenas() -> int:
    """Count the descriptors of snapshot memory in this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "ckpt-arena" in os.readlink(f"/proc/self/fd/{name}")
    return found
