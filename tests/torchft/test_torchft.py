"""The recipe for torchft: two replica groups with a folder each, one killed, with the real lighthouse and manager."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from foreign import python_with
from parallel import free_port
from processes import LIB, PYTHONPATH

KILLED = 4


@pytest.fixture(scope="module")
def python() -> Path:
    """Return an interpreter with torchft and our packages."""
    return python_with("torchft")


@pytest.fixture
def lighthouse(python: Path) -> Iterator[str]:
    words = [str(python), str(LIB / "torchft_toy.py"), "lighthouse"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": PYTHONPATH}, **pipes) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def start(python: Path, lighthouse: str, *words: object) -> subprocess.Popen[str]:
    """Start one group, which has its own store."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **own, "PYTHONPATH": PYTHONPATH, "TORCHFT_LIGHTHOUSE": lighthouse}
    command = [str(python), str(LIB / "torchft_toy.py"), *map(str, words)]
    return subprocess.Popen(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str], code: int = 0) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err[-4000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"')]


def same(folder: Path, one: str, other: str) -> bool:
    first, second = (torch.load(folder / f"{name}.pt", weights_only=True) for name in (one, other))
    return first.keys() == second.keys() and len(first) > 2 and all(torch.equal(first[k], second[k]) for k in first)


def test_killed_replica_group_restores_and_rejoins(python: Path, lighthouse: str, tmp_path: Path) -> None:
    """The killed group restores its last step from memory bit for bit, and torchft heals it. Both end equal.

    A new start restores the final state, with the manager's step."""
    groups = [start(python, lighthouse, "train", tmp_path, number, KILLED) for number in (0, 1)]
    try:
        assert said(groups[1], -signal.SIGKILL)[-1]["step"] == KILLED
        groups[1] = start(python, lighthouse, "train", tmp_path, 1, KILLED)
        survivor, joiner = (said(group) for group in groups)
    finally:
        for group in groups:
            group.kill()
            group.wait()
    assert joiner[0] == {"restored": KILLED, "tier": "memory", "manager": KILLED}
    assert same(tmp_path, "1-restored", "1-killed")
    steps = [one["step"] for one in survivor[1:]]
    assert steps == list(range(1, steps[-1] + 1))
    assert [one["groups"] for one in survivor if one.get("step") in (KILLED + 1, KILLED + 2)] == [1, 1]
    assert joiner[-1] == survivor[-1] and joiner[-1]["groups"] == 2
    assert same(tmp_path, "0-ended", "1-ended") and not same(tmp_path, "0-ended", "1-killed")
    for number in (0, 1):
        assert steps[-1] in [one.step for one in ckpt.Run(str(tmp_path / f"run-{number}")).list()]
        restored = said(start(python, lighthouse, "look", tmp_path, number))[0]
        assert restored["restored"] == restored["manager"] == steps[-1]
        assert same(tmp_path, f"{number}-restored", f"{number}-ended")
