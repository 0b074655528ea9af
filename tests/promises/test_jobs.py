"""Two jobs on one run: the newer one wins, the older one is notified, and the run always stays intact."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ckpt
import inside
import toy
from kills import Trainer, problems, steps_on_disk
from processes import eventually, writers

EVERY = 2

JOB = """
import sys
import ckpt, toy

run, every = sys.argv[1], int(sys.argv[2])
state = toy.build()
cp = ckpt.Checkpointer(state, ckpt.Tier(run, every=every, keep=1), takeover=True)
step = cp.restore(default=0)
print("start", step, cp.last_restore.tier, flush=True)
for line in sys.stdin:  # how many steps to train, or "close"
    try:
        if line.strip() == "close":
            cp.close()
            print("closed", toy.digest(state), flush=True)
            continue
        for _ in range(int(line)):
            toy.train_step(state)
            step += 1
            save = cp.step(step)
            save.wait_staged(60)
            if save.tiers:
                save.wait_durable(60)
                print("committed", step, flush=True)
        print("done", step, flush=True)
    except ckpt.CheckpointError as error:
        print("error", type(error).__name__, flush=True)
"""


class Job(Trainer):
    """A job that has started. `start`: the step and the tier that it restored."""

    def __init__(self, run: str, *, every: int = EVERY, fail: str = "", path: str = "") -> None:
        super().__init__(JOB, run, every, fail=fail, path=path)
        self.start = self.read_until("start").split()[1:]

    def train(self, steps: int) -> str:
        """The last word on it: "done STEP" or "error NAME"."""
        self.say(str(steps))
        return self.outcome()

    def outcome(self) -> str:
        while (line := self.read_until("").strip()).startswith("committed"):
            pass
        return line

    def close(self) -> str:
        """The digest of what it trained, or the error."""
        self.say("close")
        return self.outcome().removeprefix("closed ")


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that are killed at the end, stopped ones too."""
    started: list[Job] = []
    yield started
    for job in started:
        job.process.kill()
        job.process.wait(30)


def test_second_job_wins(run_dir: str, own_sockets: Path, jobs: list[Job]) -> None:
    """The second starts from the newest checkpoint of the first, which is fenced at its next save, and ever after."""
    jobs.append(first := Job(run_dir))
    assert first.train(5) == "done 5"
    jobs.append(second := Job(run_dir))
    assert second.start == ["4", f"file://{run_dir}"], "step 5 is in the first one's memory only"
    assert first.train(1) == "error FencedError"
    assert first.train(1) == "error FencedError"
    assert second.train(3) == "done 7"
    first.close()
    assert second.train(1) == "done 8"
    assert second.close() == toy.reference(8)
    assert steps_on_disk(run_dir)[0] == 8
    assert problems(run_dir) == []
    for job in (first, second):
        job.kill()
    assert eventually(lambda: not writers(own_sockets)), "a process is left"


def test_killed_loser_harms_nothing(run_dir: str, jobs: list[Job]) -> None:
    """The writer of a fenced job that dies does not write its memory into the run of the other."""
    jobs.append(first := Job(run_dir))
    assert first.train(5) == "done 5"
    jobs.append(second := Job(run_dir))
    assert first.train(1) == "error FencedError"
    first.kill()
    assert second.train(2) == "done 6"
    assert second.close() == toy.reference(6)
    assert steps_on_disk(run_dir)[0] == 6
    assert problems(run_dir) == []


@pytest.mark.parametrize(
    "fail",
    ["trainer/stage.claimed:stop:5", "trainer/stage.copied:stop:6", "trainer/save.requested:stop:3"],
)
def test_fenced_trainer_cannot_commit_after_resume(run_dir: str, jobs: list[Job], fail: str) -> None:
    """A job that stood still, in the midst of a save, while another took over, is fenced when it wakes."""
    jobs.append(zombie := Job(run_dir, fail=fail))
    zombie.say("100")
    process = psutil.Process(zombie.process.pid)
    assert eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    jobs.append(second := Job(run_dir))
    assert int(second.start[0]) >= 4
    assert second.train(4).startswith("done")
    process.send_signal(signal.SIGCONT)
    assert zombie.outcome() == "error FencedError"
    assert second.train(4) == f"done {int(second.start[0]) + 8}"
    assert second.close() == toy.reference(int(second.start[0]) + 8)
    assert problems(run_dir) == []


@pytest.mark.parametrize("fail", ["writer/log.synced:stop:3"])
def test_fenced_writer_cannot_commit_after_resume(run_dir: str, own_sockets: Path, jobs: list[Job], fail: str) -> None:
    """A writer that stands still within a commit is woken up by the next start, and breaks nothing."""
    jobs.append(first := Job(run_dir, fail=fail))
    first.say("100")
    (writer,) = writers(own_sockets)
    assert eventually(lambda: writer.status() == psutil.STATUS_STOPPED)
    jobs.append(second := Job(run_dir))
    assert int(second.start[0]) >= 2
    assert second.train(4).startswith("done")
    assert first.outcome() == "error FencedError"
    assert second.train(2) == f"done {int(second.start[0]) + 6}"
    assert second.close() == toy.reference(int(second.start[0]) + 6)
    assert problems(run_dir) == []


def test_jobs_that_race(run_dir: str, own_sockets: Path, jobs: list[Job]) -> None:
    """Jobs that take over from one another at full speed, each cleaning up after itself, leave a whole run."""
    jobs.append(Job(run_dir, every=1))
    for _ in range(2):
        old = jobs[-1]
        old.say("1000000")
        safe = int(old.read_until("committed").split()[1])
        jobs.append(Job(run_dir, every=1))
        assert int(jobs[-1].start[0]) >= safe
        assert old.outcome() == "error FencedError"
    last = int(jobs[-1].start[0]) + 5
    assert jobs[-1].train(5) == f"done {last}"
    assert jobs[-1].close() == toy.reference(last)
    assert problems(run_dir) == []
    assert steps_on_disk(run_dir)[0] == last
    for job in jobs:
        job.kill()
    assert eventually(lambda: not writers(own_sockets)), "a process is left"


def test_negative_control_without_the_fence_both_jobs_continue(
    run_dir: str, tmp_path: Path, jobs: list[Job], own_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the owner's check in the log, and with a second job that cannot notify it, the first one continues to
    save: the tests above would detect it."""
    (tmp_path / "sitecustomize.py").write_text(inside.WITHOUT_FENCE)
    jobs.append(first := Job(run_dir, path=str(tmp_path)))
    assert first.train(5) == "done 5"
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(own_sockets / "other"))
    jobs.append(Job(run_dir))
    assert first.train(1) == "done 6"


def test_second_checkpointer_in_one_process(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error while the first is open, however the folder is spelt, and none once it is closed."""
    monkeypatch.chdir(Path(run_dir).parent)
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        for spelling in (run_dir, run_dir + "/", f"file://{run_dir}", os.path.basename(run_dir), Path(run_dir)):
            with pytest.raises(ckpt.errors.UsageError, match="close"):
                ckpt.Checkpointer(state, spelling)
        toy.train_step(state)
        save = cp.step(1)
        assert save is not None and save.wait_staged(60), "the attempt did no harm"
    with ckpt.Checkpointer(state, run_dir) as cp:
        assert cp.restore() == 1


def test_unreferenced_checkpointer_is_taken_over_in_its_own_process(run_dir: str) -> None:
    """A notebook cell is run again: without takeover, it is rejected with an explanation. With it, the older
    Checkpointer makes its last step durable and closes, and the new one continues from there."""

    def cell() -> None:
        state = toy.build()
        cp = ckpt.Checkpointer(state, run_dir)
        cp.restore(default=0)
        toy.train_step(state)
        cp.step(1)

    cell()
    state = toy.build()
    with pytest.raises(ckpt.errors.UsageError, match="takeover=True"):
        ckpt.Checkpointer(state, run_dir)
    with ckpt.Checkpointer(state, run_dir, takeover=True) as cp:
        assert cp.restore(default=0) == 1 and steps_on_disk(run_dir) == [1]
    reference = toy.build()
    toy.train_step(reference)
    assert toy.digest(state) == toy.digest(reference)
