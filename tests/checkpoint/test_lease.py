"""`lease.json` shows whether another job is training a run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import ckpt
import inside
from ckpt.core.checkpoint import commits
from ckpt.core.checkpoint.concurrent import run as run_async
from ckpt.core.checkpoint.lease import Lease, fence, inode_of
from ckpt.core.format.manifest import seal
from ckpt.core.log.run_log import RunLog
from ckpt.errors import FencedError, InUseError
from ckpt.store import open_store
from processes import eventually


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose owner has term 1. A start watches it for 0.6 s."""
    inside.see_dead_trainers_after(monkeypatch, 0.2)

    async def begin() -> None:
        store = open_store(tmp_path / "run", writable=True)
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        await commits.acquire(log, "0" * 8)

    run_async(begin())
    return tmp_path / "run"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that lives until the test ends."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def write(run: Path, lease: Lease) -> None:
    inode = lease.inode or inode_of(f"file://{run}")
    (run / "lease.json").write_bytes(seal({"version": 1, **asdict(replace(lease, inode=inode))}))


def owner(run: Path) -> str:
    """Return the term of the job that owns a run, as in its lease."""

    async def read() -> str:
        log = RunLog(open_store(run))
        await log.open()
        return f"{log.state.acquires[-1].term}.{log.state.acquires[-1].nonce}"

    return run_async(read())


def nothing(text: str) -> None:
    pytest.fail(f"the start waited: {text}")


def held_by(run: Path, pid: int, **changes: object) -> Lease:
    lease = replace(Lease.of_trainer(owner(run), "token", 0, pid), **changes)  # type: ignore[arg-type]
    write(run, lease)
    return lease


def test_run_is_free_immediately_after_its_trainer_ended(run: Path) -> None:
    held_by(run, os.getpid(), ended="died", boot="another machine")
    inside.check_free(run, nothing)
    held_by(run, os.getpid(), boot="another machine")  # control
    with pytest.raises(pytest.fail.Exception, match="waited"):
        inside.check_free(run, nothing)


def test_pid_that_another_process_uses_now_does_not_hold_a_run(run: Path) -> None:
    held_by(run, os.getpid(), born=0.0)
    inside.check_free(run, nothing)


@pytest.mark.parametrize(
    "elsewhere",
    [{"boot": "another machine"}, {"namespace": 1}, {"term": "7.abc"}, {"inode": 1}],
    ids=lambda one: next(iter(one)),
)
def test_lease_is_watched_if_its_process_is_unknown(
    run: Path, sleeper: subprocess.Popen[bytes], elsewhere: dict[str, object]
) -> None:
    """If the machine, PID namespace, term or folder differs, only a renewal shows that the job is alive."""
    lease, messages = held_by(run, sleeper.pid, **elsewhere), list[str]()
    inside.check_free(run, messages.append)
    assert len(messages) == 1 and f"process {sleeper.pid}" in messages[0] and "takeover=True" in messages[0]
    with pytest.raises(InUseError, match=f"process {sleeper.pid} on"):
        inside.check_free(run, lambda text: write(run, replace(lease, renewed=1)))


def test_fenced_job_does_not_renew_the_lease_of_the_owner(tmp_path: Path) -> None:
    """After a takeover, the previous job cannot write the lease."""
    run = tmp_path / "run"
    with (
        pytest.raises(FencedError),
        ckpt.Checkpointer({"w": torch.zeros(4)}, ckpt.Tier(str(run), every=1), memory=None) as first,
    ):
        first.restore(default=0)
        first.save(1).wait_durable(60)
        assert eventually((run / "lease.json").exists)
        run_async(fence([ckpt.Tier(str(run)).spec()]))
        held_by(run, 1)
        of_the_owner = (run / "lease.json").read_bytes()
        first.save(2).wait_durable(60)
    assert (run / "lease.json").read_bytes() == of_the_owner


def test_next_writer_renews_the_lease_after_a_restore(tmp_path: Path) -> None:
    """A restore gives the job a new term. The writer that replaces a dead one uses it."""
    run, state = tmp_path / "run", {"w": torch.zeros(4)}
    with ckpt.Checkpointer(state, str(run)) as cp:
        cp.restore(default=0)
        cp.step(1)
    with ckpt.Checkpointer(state, str(run)) as cp:
        assert cp.restore(default=0) == 1
        cp.save(2).wait_durable(60)

        def lease() -> Lease:
            return Lease.parse((run / "lease.json").read_bytes())

        assert eventually(lambda: lease().term == owner(run))
        first = lease().token
        os.kill(cp.writer_pid, signal.SIGKILL)
        cp.save(3).wait_durable(60)
        assert eventually(lambda: lease().token != first and lease().term == owner(run))
    assert lease().ended == "closed"
