"""A run has one owner at a time. A takeover fences the previous owner through the log, and releases its memory; a
restart after a death inherits memory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import ckpt
import inside
import toy
from kills import Trainer
from processes import REPO, eventually, killed, run_script, writers

LIFE = """
import os, sys, time, ckpt, torch
from torch import nn
place, until, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
w = nn.Parameter(torch.zeros(int(os.environ.get("SIZE", 8))))
opt = torch.optim.SGD([w], lr=1.0)
place = {"options": ckpt.Options(name=place[7:])} if place.startswith("memory:") else {"tiers": place}
with ckpt.Checkpointer({"w": w, "opt": opt}, takeover="takeover" in words, **place) as cp:
    start = cp.restore(default=0)
    print("start", start, int(w[0]), cp.last_restore.tier, flush=True)
    step = start
    for step in range(start + 1, until + 1):
        w.grad = torch.full_like(w, -1.0)
        opt.step()
        cp.step(step).wait_staged(30)
    if "kill" in words:
        os.kill(os.getpid(), 9)
    if "go on" in words:
        print("trained", flush=True)
    for line in sys.stdin if "go on" in words else ():
        if line.strip():
            exec(line)
            continue
        w.grad = torch.full_like(w, -1.0)
        opt.step()
        step += 1
        try:
            cp.step(step).wait_staged(30)
            print("staged", step, flush=True)
        except ckpt.CheckpointError as error:
            print(type(error).__name__, error, flush=True)
"""


def patched(patch: str) -> str:
    """The same life, after something was made otherwise in that process."""
    return LIFE.replace("w = nn", f"import inside\n{patch}\nw = nn", 1)


class Life(Trainer):
    """A script that has trained up to a step, and trains one more for each empty line; other lines are code."""

    def __init__(
        self, place: str, until: int, *words: str, before: Sequence[str] = (), code: str = LIFE, **more: str
    ) -> None:
        super().__init__(code, place, until, "go on", *words, before=before, stderr=None, **more)
        self.began = self.line()
        if self.began.startswith("start"):
            assert self.line() == "trained"

    def ask(self, code: str) -> str:
        """Run code in it, and return its output."""
        return self.do(f"print({code}, flush=True)")

    def commit(self) -> str:
        """The step that it is at, once that is durable."""
        return self.ask("cp.save().wait_durable(60).step")


def start_of(place: str, until: int = 0, *words: str) -> list[str]:
    """Return the step that the next start finds."""
    found = run_script(LIFE, place, until, *words)
    return found.stdout.split() if found.returncode in (0, -signal.SIGKILL) else [found.stderr]


@pytest.mark.parametrize("where", ["memory:owned", "folder"])
def test_a_run_whose_trainer_lives_is_not_taken_over_by_an_opening(where: str, run_dir: str) -> None:
    """A second opening is rejected with the process's name, and harms nothing: the first continues to save, and the
    next start after its death finds the last step."""
    place = run_dir if where == "folder" else where
    with Life(place, 3) as first:
        second = run_script(LIFE, place, 9)
        assert (
            f"InUseError: process {first.process.pid} on this machine ({socket.gethostname()}) trains" in second.stderr
        )
        assert (
            run_dir if where == "folder" else "in memory only"
        ) in second.stderr and "takeover=True" in second.stderr
        assert f" since {time.strftime('%Y-')}" in second.stderr
        assert [first.do(), first.do()] == ["staged 4", "staged 5"]
    assert start_of(place, 0) == ["start", "5", "5", "memory"]


def shared_memory(pid: int) -> int:
    """Bytes of shared memory that a process has mapped and touched."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))


def on_disk(run_dir: str, step: int) -> str:
    return f"start {step} {step} file://{run_dir}"


def test_takeover_fences_through_the_log_and_releases_memory(run_dir: str, own_sockets: Path) -> None:
    """The second job starts from the newest checkpoint. The writer of the first has released all memory by then, even
    though its trainer is stopped and has it mapped. The first job gets FencedError at its next call."""
    with Life(run_dir, 3, SIZE=str(1 << 22)) as first:
        assert first.commit() == "3" and [first.do(), first.do()] == ["staged 4", "staged 5"]
        pid, writer = first.process.pid, int(first.ask("cp.writer_pid"))
        assert shared_memory(pid) > 2 * (4 << 22)
        first.process.send_signal(signal.SIGSTOP)
        with Life(run_dir, 0, "takeover", SIZE=str(1 << 22)) as second:
            assert second.began == on_disk(run_dir, 3)
            assert shared_memory(pid) < 4 << 22
            assert eventually(lambda: writer not in [process.pid for process in writers(own_sockets)])
            assert second.do() == "staged 4" and second.commit() == "4"
            first.process.send_signal(signal.SIGCONT)
            assert first.do().startswith("FencedError") and first.do().startswith("FencedError")
            assert second.do() == "staged 5"
    with Life(run_dir, 0, SIZE=str(1 << 22)) as third:
        assert third.began == "start 5 5 memory"


def test_idle_writer_releases_memory_when_another_machine_takes_over(run_dir: str) -> None:
    """Nobody asks the writer: it reads the log by itself, although its job saves nothing."""
    with Life(run_dir, 3) as first:
        assert first.commit() == "3" and first.do() == "staged 4"
        writer = inside.process_of(int(first.ask("cp.writer_pid")))
        away = 'import os, tempfile\nos.environ["CKPT_RUNTIME_DIR"] = tempfile.mkdtemp()\n' + LIFE
        assert start_of_script(away, run_dir, 0, "takeover")[:2] == ["start", "3"]
        assert eventually(lambda: not writer.alive)
        assert first.do().startswith("FencedError")


def test_takeover_names_a_stopped_writer_and_its_memory(run_dir: str) -> None:
    """The writer cannot release memory while it is stopped. The job is still fenced, and the next start finds the
    memory released after the writer was resumed."""
    patch = "inside.wait_for_release_for(2.0); inside.stop_writer_after_its_first_answer()"
    with Life(run_dir, 3, SIZE=str(1 << 20)) as first:
        assert first.commit() == "3"
        writer = int(first.ask("cp.writer_pid"))
        refused = run_script(patched(patch), run_dir, 9, "takeover").stderr
        assert f"InUseError: process {writer} (stopped by SIGSTOP), a writer of this run that holds " in refused
        size = float(refused.split("a writer of this run that holds ")[1].split(" MB")[0])
        assert size >= 2 * 4 * (1 << 20) / 1e6
        os.kill(writer, signal.SIGCONT)
        with Life(run_dir, 0, "takeover", SIZE=str(1 << 20)) as second:
            assert second.began == on_disk(run_dir, 3)
        assert first.do().startswith("FencedError")


def test_run_in_memory_only_is_not_taken_over_from_a_living_trainer(run_dir: str) -> None:
    """Without a log there is nothing that could fence the first job, so nothing is taken from it."""
    with Life("memory:taken", 4) as first:
        assert "takeover=True needs a folder or URL" in run_script(LIFE, "memory:taken", 9, "takeover").stderr
        assert first.do() == "staged 5"
    assert start_of("memory:taken", 0, "takeover") == ["start", "5", "5", "memory"]


@pytest.mark.parametrize("fail", ["acquire.done", "run.taken"])
def test_killed_takeover_leaves_the_newest_checkpoint(fail: str, run_dir: str) -> None:
    """The second job is killed when it has fenced the first one, or when it has become the owner."""
    with Life(run_dir, 6) as first:
        assert first.commit() == "6" and first.ask("cp.restore(step=6)") == "6" and first.do() == "staged 7"
        assert killed(run_script(LIFE, run_dir, 9, "takeover", fail=f"trainer/{fail}:kill:1"))
        assert start_of(run_dir, 0, "takeover") == on_disk(run_dir, 6).split()
        assert first.do().startswith("FencedError")


def test_third_start_harms_no_takeover_under_way(run_dir: str) -> None:
    """A second job takes over from a first one, and before it has opened the run a third one comes. The third is
    refused despite takeover=True, because the second has not read the log yet."""
    held = patched(
        "hold = lambda: (print('held', flush=True), sys.stdin.readline(), {})[-1]\n"
        "inside.act_instead(inside.FOREVER, inside.LEFT_OVER_MEMORY_IS_TAKEN, hold)"
    )
    with Life(run_dir, 4) as first:
        assert first.commit() == "4"
        with Life(run_dir, 0, "takeover", code=held) as second:
            assert second.began == "held"
            found = run_script(patched("inside.wait_for_release_for(1.0)"), run_dir, 6, "kill", "takeover")
            assert "InUseError" in found.stderr
            assert first.do().startswith("FencedError")
            second.say()
            assert [second.line(), second.line(), second.do()] == [on_disk(run_dir, 4), "trained", "staged 5"]
    assert start_of(run_dir) == ["start", "5", "5", "memory"]


def test_a_trainer_whose_writer_has_died_is_seen(run_dir: str) -> None:
    """Its writer is killed, and another process opens the run before it has a new one: rejected, and the trainer
    continues."""
    place = run_dir
    with Life(place, 4) as first:
        writer = int(first.ask("cp.writer_pid"))
        assert eventually(lambda: any((Path(run_dir) / "ledger").glob("[0-9]*.json")))
        first.process.send_signal(signal.SIGSTOP)
        os.kill(writer, signal.SIGKILL)
        assert f"InUseError: process {first.process.pid}" in run_script(LIFE, place, 9).stderr
        first.process.send_signal(signal.SIGCONT)
        assert [first.do(), first.do()] == ["staged 5", "staged 6"]
    assert start_of(place) == ["start", "6", "6", "memory"]


def test_fenced_trainer_keeps_nobody_from_starting(run_dir: str) -> None:
    """A run is taken over from a stopped trainer. A third start is refused only while the second job lives. The first
    gets FencedError when it resumes, and never takes the name of the run again."""
    with Life(run_dir, 4) as first:
        assert first.commit() == "4"
        first.process.send_signal(signal.SIGSTOP)
        with Life(run_dir, 6, "takeover") as second:
            assert second.began == on_disk(run_dir, 4)
            assert f"InUseError: process {second.process.pid}" in run_script(LIFE, run_dir, 9).stderr
            assert second.do() == "staged 7"
        with Life(run_dir, 8) as third:
            assert third.began == "start 7 7 memory"
            first.process.send_signal(signal.SIGCONT)
            assert first.do().startswith("FencedError")
            assert third.do() == "staged 9"
            writer = int(third.ask("cp.writer_pid"))
        os.kill(writer, signal.SIGKILL)
        assert first.do().startswith("FencedError")
        assert start_of(run_dir)[0] == "start"


def test_step_sealed_after_the_fence_is_not_acknowledged(run_dir: str) -> None:
    """A trainer is stopped before it has sealed a step, as on a suspended machine, loses its run, and resumes."""
    with Life(run_dir, 4, code=patched("inside.stop_before_sealing(5)")) as first:
        assert first.commit() == "4"
        first.say()
        assert eventually(lambda: psutil.Process(first.process.pid).status() == psutil.STATUS_STOPPED)
        with Life(run_dir, 4, "takeover") as second:
            assert second.began == on_disk(run_dir, 4)
            first.process.send_signal(signal.SIGCONT)
            assert first.line().startswith("FencedError")
            assert second.do() == "staged 5"


@pytest.mark.parametrize(("lives", "where"), [(True, "memory:silent"), (False, "memory:silent"), (False, "folder")])
def test_silent_writer_is_killed_only_if_its_trainer_is_dead(lives: bool, where: str, run_dir: str) -> None:
    """It cannot be resumed. A start is refused, unless the ledger proves that the trainer is dead: then the writer is
    killed, and the start restores from the folder."""
    place = run_dir if where == "folder" else where
    patch = "inside.wait_for_writers_for(2.0, 2.0); inside.wake_no_writer()"
    with Life(place, 4) as first:
        if where == "folder":
            assert first.commit() == "4"
        writer = int(first.ask("cp.writer_pid"))
        os.kill(writer, signal.SIGSTOP)
        if lives:
            assert "InUseError" in run_script(patched(patch), place, 0).stderr
            os.kill(writer, signal.SIGCONT)
            assert first.do() == "staged 5" and int(first.ask("cp.writer_pid")) == writer
    if not lives and where == "folder":
        assert run_script(patched(patch), place, 0).stdout.split() == on_disk(run_dir, 4).split()
    elif not lives:
        assert f"process {writer} (stopped by SIGSTOP)" in run_script(patched(patch), place, 0).stderr


def test_a_takeover_that_cannot_succeed_ends_no_training(run_dir: str, tmp_path: Path) -> None:
    """One of the second job's tiers cannot be used: it raises, and the first continues to train."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "notes.txt").write_text("somebody else's")
    script = LIFE.replace("**place)", f"tiers=[sys.argv[1], ckpt.Tier({str(tmp_path / 'bad')!r})])")
    with Life(run_dir, 3) as first:
        assert "FormatError" in run_script(script, run_dir, 9, "takeover").stderr
        assert first.do() == "staged 4"
    assert start_of(run_dir) == ["start", "4", "4", "memory"]


def test_memory_is_found_whatever_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login folder is gone, TMPDIR and home have changed: the surviving writer is still found. One in another
    network namespace is reported."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert killed(run_script(LIFE, "memory:session", 5, "kill"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.delenv("TMPDIR")
    assert start_of("memory:session", 7, "kill") == ["start", "5", "5", "memory"]
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode == 0:
        path = f"{REPO}:{REPO / 'backends'}"
        found = subprocess.run(
            ["unshare", "--net", sys.executable, "-c", LIFE, "memory:session", "0"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "start 0" in found.stdout and "cannot be reached from here" in found.stderr


@pytest.mark.parametrize("how", ["moved", "emptied", "replaced"])
def test_a_folder_that_is_not_the_run_any_more_is_not_written_to(how: str, run_dir: str, tmp_path: Path) -> None:
    """The next save raises; nothing is written. When the folder is back, saves continue."""
    state, folder, deferred = toy.build(), Path(run_dir), tmp_path / "aside"
    with ckpt.Checkpointer(toy.build(), [ckpt.Tier(str(tmp_path / "other"), every=1)], memory=None) as other:
        other.restore(default=0)
        other.save(7).wait_durable(60)
    cp = ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1), options=ckpt.Options(on_error="warn"))
    cp.restore(default=0)
    toy.train_step(state)
    cp.save(1).wait_durable(60)
    folder.rename(deferred)
    if how == "emptied":
        folder.mkdir()
    if how == "replaced":
        (tmp_path / "other").rename(folder)
    before = sorted(folder.rglob("*")) if folder.exists() else None
    toy.train_step(state)
    with pytest.raises(ckpt.errors.SaveError, match="moved, emptied or replaced"):
        cp.save(2).wait_durable(60)
    assert (sorted(folder.rglob("*")) if folder.exists() else None) == before
    if folder.exists():
        shutil.rmtree(folder)
    deferred.rename(folder)
    toy.train_step(state)
    cp.save(3).wait_durable(60)
    cp.close()
    assert ckpt.load(run_dir).step == 3


@pytest.mark.skipif(not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), reason="only root can choose numbers")
def test_a_number_that_is_used_again_is_no_trainer(run_dir: str) -> None:
    """The pid of the dead trainer belongs to another process by now: the next start does not wait for that one."""
    with Life(run_dir, 3) as first:
        pid = first.process.pid
    other = None
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        candidate = subprocess.Popen(["sleep", "600"])
        if candidate.pid == pid:
            other = candidate
            break
        candidate.kill()
        candidate.wait()
    if other is None:
        pytest.skip("another process was quicker, each time")
    try:
        script = LIFE.replace("**place)", "tiers=ckpt.Tier(sys.argv[1]), options=ckpt.Options(busy_timeout_s=5))")
        found = run_script(script, run_dir, 8)
        assert found.stdout.split() == ["start", "3", "3", "memory"] and found.returncode == 0, found.stderr
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs namespaces",
)
def test_another_machine_sees_whether_a_trainer_lives(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a trainer's process is not visible, renewals of lease.json show that it lives. After a death that its writer
    has detected, the run is opened immediately."""
    away = ["unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]
    with Life(run_dir, 3) as first:
        assert eventually((Path(run_dir) / "lease.json").exists)
        path = f"{REPO}:{REPO / 'backends'}"
        found = subprocess.run(
            [*away, sys.executable, "-c", LIFE, run_dir, "9"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"InUseError: process {first.process.pid}" in found.stderr and "waiting up to" in found.stderr
        assert first.do() == "staged 4"
    with Life(run_dir, 0, before=away) as second:
        assert second.began == f"start 4 4 file://{run_dir}"


def test_the_loser_of_two_starts_is_told_even_if_errors_are_only_logged(run_dir: str) -> None:
    """Two jobs never both train one run: with on_error="warn" too, the previous owner is notified, at a step or at the
    latest at its end."""
    weight = nn.Parameter(torch.zeros(8))
    state = {"w": weight, "opt": torch.optim.SGD([weight], lr=1.0)}
    cp = ckpt.Checkpointer(state, [ckpt.Tier(run_dir, every=10)], memory=None, options=ckpt.Options(on_error="warn"))
    cp.restore(default=0)
    cp.save(1).wait_durable(60)
    script = 'import os, sys, tempfile\nos.environ["CKPT_RUNTIME_DIR"] = tempfile.mkdtemp()\n' + LIFE
    assert start_of_script(script, run_dir, 3, "takeover")[:2] == ["start", "1"]
    with pytest.raises(ckpt.errors.FencedError):
        cp.close()


def start_of_script(script: str, *arguments: object) -> list[str]:
    found = run_script(script, *arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def test_the_writer_is_no_child_of_the_trainer(own_sockets: Path) -> None:
    """Launchers end the children of what they started, and wait for them: the writer is not among these, nor in the
    trainer's session, and outlives it."""
    with Life("memory:orphan", 2) as first:
        (writer,) = writers(own_sockets)
        below = psutil.Process(first.process.pid).children(recursive=True)
        assert writer.pid not in [child.pid for child in below]
        assert os.getsid(writer.pid) != os.getsid(first.process.pid)
        for child in below:
            child.kill()
    assert writer.is_running() and start_of("memory:orphan") == ["start", "2", "2", "memory"]


def test_a_checkpointer_of_another_thread_says_what_signals_do(caplog: pytest.LogCaptureFixture) -> None:
    """Signals are not triggers there, as under Ray; a log line reports this and the remaining triggers."""

    def make() -> None:
        ckpt.Checkpointer(
            toy.build(), triggers=[ckpt.triggers.on_signal("SIGTERM")], options=ckpt.Options(name="thread")
        ).close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "SIGTERM: not a trigger" in caplog.text
