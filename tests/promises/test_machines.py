"""Machines as they are: the rows of the table in docs/guide/operate.md that no other file has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import PYTHONPATH, REPO, killed

LIFE = """
import os, sys
import torch, ckpt
state = {"w": torch.zeros(1 << 16)}
with ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=100), memory=ckpt.Memory(linger_s=60)) as cp:
    start = cp.restore(default=0)
    print("start", start, cp.last_restore.tier if start else None, state["w"].sum().item() / (1 << 16), flush=True)
    for step in range(start + 1, start + 4):
        state["w"].add_(1.0)
        save = cp.step(step)
    save.wait_staged(60)
    if len(sys.argv) > 2:
        os.kill(os.getpid(), 9)
"""
MACHINES = {
    "no HOME, no environment at all": "true",
    "a small /dev/shm": "mount -t tmpfs -o size=64k none /dev/shm",
    "nothing to write to but the folder": "for place in {places}; do mount -t tmpfs -o ro none $place; done",
}


def on(machine: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Return a command with the private mounts of that machine. The folder is at /mnt."""
    used = [REPO, Path(sys.prefix), Path(sys.base_prefix)]
    places = ("/dev/shm", "/tmp", "/var/tmp", "/run")
    free = [place for place in places if not any(path.is_relative_to(place) for path in used)]
    mounts = f"set -e; mount --bind {folder} /mnt; {MACHINES[machine].format(places=' '.join(free))}"
    words = ["unshare", "--mount", "sh", "-c", f'{mounts}; exec "$@"', "sh", *command]
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH}
    return subprocess.run(words, env=own, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_outlives_the_trainer(machine: str, tmp_path: Path) -> None:
    """Killed by SIGKILL and started again, it is at the last step, from memory: that needs no file anywhere."""
    if (tried := on(machine, tmp_path, "true")).returncode:
        pytest.skip(f"needs the right to mount: {tried.stderr}")
    life = [sys.executable, "-c", LIFE, "/mnt/run"]
    first = on(machine, tmp_path, *life, "kill")
    assert killed(first), first.stderr
    again = on(machine, tmp_path, *life)
    assert again.stdout.splitlines() == ["start 3 memory 3.0"], again.stderr


def test_jobs_on_one_node_have_memory_of_their_own(tmp_path: Path) -> None:
    """Two trainings die together, and each finds its own memory by the location that it saves to."""
    own, starts = {**os.environ, "PYTHONPATH": PYTHONPATH}, list[str]()
    for words in (["kill"], []):
        commands = [[sys.executable, "-c", LIFE, str(tmp_path / name), *words] for name in "ab"]
        jobs = [subprocess.Popen(one, env=own, stdout=subprocess.PIPE, text=True) for one in commands]
        starts = [job.communicate(timeout=120)[0].strip() for job in jobs]
    assert starts == ["start 3 memory 3.0"] * 2
