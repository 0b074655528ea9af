"""Tests of the mutex in shared memory that detects a death."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ckpt.core.ipc.arena import Arena, Got
from processes import REPO

HOLDER = """
import sys
from ckpt.core.ipc.arena import Arena

arena = Arena.attach(int(sys.argv[1]))
print("got", arena.mutex.lock(), flush=True)
if sys.argv[2] == "unlock":
    arena.mutex.unlock()
    print("unlocked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("manner", "expected"), [("hold", Got.OWNER_DIED), ("unlock", Got.FREE)])
def test_mutex_reports_only_death_of_owner(manner: str, expected: Got) -> None:
    """A waiter is notified if the owner died while it had the mutex, and not if it had unlocked it before."""
    arena = Arena.create(2, 4096)
    os.set_inheritable(arena.fd, True)
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'backends'}"}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(arena.fd), manner],
        env=environment,
        pass_fds=(arena.fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert "FREE" in holder.stdout.readline()
    if manner == "unlock":
        holder.stdout.readline()
    else:
        assert arena.mutex.try_lock() is Got.BUSY
    holder.kill()
    assert arena.mutex.lock() is expected
    arena.mutex.unlock()
    holder.wait(10)
    arena.close()
