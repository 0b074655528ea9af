"""Two jobs on one run: the newer one wins, the older one is notified, and the run always stays intact.

See test_promise_ownership.py for takeovers of a run whose trainer lives and responds.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

import ckpt
import inside
import toy
from kills import Trainer, problems, steps_on_disk
from processes import eventually, writers
from test_promise_ownership import LIFE, Life

JOB = LIFE.replace('"tiers": place', '"tiers": ckpt.Tier(place, every=2, keep=1)')


def second(run: str) -> Life:
    return Life(run, 0, "takeover", code=JOB)


def finished(run: str, job: Life, steps: int) -> None:
    """Train these steps and commit the last one. Each step's weight is its number, which a restore prints."""
    last = int(job.began.split()[1]) + steps
    assert [job.do() for _ in range(steps)] == [f"staged {step}" for step in range(last - steps + 1, last + 1)]
    assert job.commit() == str(last)
    assert steps_on_disk(run)[0] == last
    assert eventually(lambda: problems(run) == [])  # the job may be deleting a checkpoint that was just listed
    assert ckpt.load(run)["w"].tolist() == [float(last)] * 8


def test_killed_loser_harms_nothing(run_dir: str) -> None:
    """The writer of a fenced job that dies does not write its memory into the run of the other."""
    with Life(run_dir, 5, code=JOB) as first:
        assert eventually(lambda: 4 in steps_on_disk(run_dir))
        with second(run_dir) as other:
            assert other.began.startswith("start 4 4 file:"), "step 5 is in the first one's memory only"
            assert first.do().startswith("FencedError")
            first.kill()
            finished(run_dir, other, 2)


@pytest.mark.parametrize(
    "fail", ["trainer/stage.copied:stop:6", "trainer/save.requested:stop:3", "writer/log.synced:stop:3"]
)
def test_fenced_process_cannot_commit_after_resume(run_dir: str, own_sockets: Path, fail: str) -> None:
    """A trainer that stood still, in the midst of a save, while another took over, is fenced when it wakes; so is one
    whose writer stood still within a commit, which the next start wakes."""
    with Trainer(JOB, run_dir, 100, fail=fail, stderr=subprocess.PIPE) as zombie:
        zombie.read_until("start")
        process = psutil.Process(zombie.process.pid) if fail.startswith("trainer") else writers(own_sockets)[0]
        assert eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        with second(run_dir) as other:
            assert int(other.began.split()[1]) >= 2
            assert other.do().startswith("staged")
            zombie.process.send_signal(signal.SIGCONT)
            assert zombie.process.stderr is not None and "FencedError" in zombie.process.stderr.read()
        with Life(run_dir, 0, code=JOB) as third:
            finished(run_dir, third, 4)


def test_jobs_that_race(run_dir: str, own_sockets: Path) -> None:
    """Jobs that take over from one another at full speed, each cleaning up after itself, leave a whole run."""
    for number in range(3):
        with Trainer(JOB, run_dir, 1_000_000, "takeover", stderr=subprocess.PIPE) as job:
            safe = steps_on_disk(run_dir)[0] if number else 0
            assert int(job.line().split()[1]) >= safe
            assert eventually(lambda safe=safe: steps_on_disk(run_dir)[:1] > [safe])
            if number == 2:
                break
            with second(run_dir) as other:
                assert job.process.stderr is not None and "FencedError" in job.process.stderr.read()
                assert other.do().startswith("staged")
    with Life(run_dir, 0, code=JOB) as last:
        finished(run_dir, last, 5)
        last.process.stdin.close()  # type: ignore[union-attr]
        assert last.process.wait(30) == 0
    assert eventually(lambda: not writers(own_sockets)), "a process is left"


def test_negative_control_without_the_fence_both_jobs_continue(
    run_dir: str, tmp_path: Path, own_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the owner's check in the log, and with a second job that cannot notify it, the first one continues to
    save: the tests above would detect it."""
    (tmp_path / "sitecustomize.py").write_text(inside.WITHOUT_FENCE)
    with Life(run_dir, 5, code=JOB, path=str(tmp_path)) as first:
        monkeypatch.setenv("CKPT_RUNTIME_DIR", str(own_sockets / "other"))
        with second(run_dir):
            assert first.do() == "staged 6" and first.commit() == "6"


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
