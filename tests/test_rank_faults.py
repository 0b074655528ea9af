"""Faults of single ranks: what all ranks together have saved is still whole, and whoever waits is told in time.

A job is two to four real processes over gloo (`rank_toy`), started and killed here as torchrun does it: when one of
them dies, the others are killed. Two oracles: a restore yields, bit for bit and on all ranks, one checkpoint that was
begun, and not an older one than the newest that was acknowledged (O1); nothing is wrong with any byte of a live
checkpoint, and each of them is one step of one job (O2).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rank_toy
import torch
from conftest import REPO, eventually, writers
from parallel import free_port
from rank_toy import SHAPES
from test_kill import DISK, MEMORY, kill_all, problems

import ckpt
from ckpt import read
from ckpt.events import TRAINER_POINTS, WRITER_POINTS

Line = dict[str, Any]
Todo = list[tuple[str, dict[str, Any]]]
Fails = dict[int, str]
JOB_S = 90.0  # nothing here may take so long: whoever gets there hangs

AFTER_START = [p for p in WRITER_POINTS if p not in ("acquire.done", "recover.done", "drain.started")]
STEPS, EVERY = 8, 2


# -- jobs --


@dataclass
class Done:
    """A job that has ended: what its ranks have said, how they ended, and what they complained of."""

    said: list[list[Line]]
    codes: list[int | None]
    stderr: list[str]

    def heard(self, word: str) -> list[list[Line]]:
        """By rank."""
        return [[line for line in lines if line["say"] == word] for lines in self.said]

    def whole(self) -> Done:
        """Checked: every rank came to its end by itself."""
        assert set(self.codes) == {0}, "\n".join(self.stderr)[-8000:]
        return self


def job(
    folder: Path,
    world: int,
    todo: Todo,
    fails: Fails | None = None,
    *,
    timeout_s: float = JOB_S,
    disk: Path | None = None,
) -> Done:
    """Run the ranks of a job. Once one has died the others are killed; a job that does not end is an error.

    `fails`: what single ranks, and the writers that they start, are armed with (see `ckpt.events`). With `disk` each
    rank is on a node of its own, and sees another folder under this name.
    """
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPO}:{REPO / 'backends'}:{REPO / 'tests'}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    command = [sys.executable, "-c", "import rank_toy; rank_toy.main()", json.dumps(todo)]
    processes = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "CKPT_FAIL": (fails or {}).get(rank, "")}
        begin = command
        if disk is not None:
            own["XDG_RUNTIME_DIR"] = str(node(disk, rank) / "sockets")
            begin = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
            begin += [str(node(disk, rank) / "disk"), str(disk), *command]
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
            processes.append(subprocess.Popen(begin, env=environment | own, stdout=out, stderr=err))
    try:
        hangs = not eventually(lambda: _ended(processes), timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
    said = [list(_lines(folder / f"{rank}.out")) for rank in range(world)]
    stderr = [(folder / f"{rank}.err").read_text(errors="replace") for rank in range(world)]
    if hangs:
        last = [lines[-1:] for lines in said]
        raise AssertionError(f"the job did not end; the last words of its ranks: {last}\n" + "\n".join(stderr)[-8000:])
    return Done(said, [process.returncode for process in processes], stderr)


def node(disk: Path, rank: int) -> Path:
    """What the node of a rank has for itself: a folder of sockets, and its disk."""
    found = disk.with_name(f"{disk.name}-of-{rank}")
    (found / "disk").mkdir(parents=True, exist_ok=True)
    (found / "sockets").mkdir(mode=0o700, exist_ok=True)
    disk.mkdir(exist_ok=True)
    return found


def _ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether all have come to their end, or one has died."""
    codes = [process.poll() for process in processes]
    return any(codes) or None not in codes


def _lines(path: Path) -> Iterator[Line]:
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut off by a kill
            if type(found := json.loads(line)) is dict:
                yield found


# -- a run: several jobs, one after the other --


@dataclass
class Run:
    """One run, trained by one job after the other, and what has been acknowledged so far."""

    folder: Path
    url: str | None
    staged: int = 0  # on all ranks
    committed: int = 0  # on any rank, for then all can rely on it
    left: str = MEMORY  # the nearest tier that the last death has left
    jobs: int = 0
    places: list[str] = field(default_factory=list)  # from which tiers the jobs have gone on
    nodes: bool = False  # whether each rank has a node and a disk of its own

    def train(
        self, world: int = 2, fails: Fails | None = None, *, left: str = MEMORY, **arguments: Any
    ) -> Done:
        """Train until the end, or until a death that leaves the tier `left`."""
        self.jobs += 1
        arguments = {"run": self.url, "steps": STEPS, "every": EVERY, "salt": self.jobs, **arguments}
        disk = Path(self.url) if self.nodes and self.url else None
        done = job(self.folder / f"job-{self.jobs}", world, [("train", arguments)], fails, disk=disk)
        self.hear(done, world)
        if left == DISK or done.heard("start").count([]) == 0:
            self.left = left
        return done

    def hear(self, done: Done, world: int) -> None:
        """Check what the ranks have restored, and note what is safe from now on."""
        safe = max(self.staged, self.committed) if self.left == MEMORY else self.committed
        starts = [lines[0] for lines in done.heard("start") if lines]
        if starts:
            assert len({start["step"] for start in starts}) == 1, starts
            assert [start["wrong"] for start in starts] == [[]] * len(starts)
            assert len({json.dumps(start["skipped"]) for start in starts}) == 1, starts
            start = starts[0]["step"]
            assert not lost(start, safe), f"{safe} was safe, went on at {start}\n" + "\n".join(done.stderr)
            self.places.append(starts[0]["tier"] or "")
            self.staged = start
        steps = [[line["step"] for line in lines] for lines in done.heard("staged")]
        if len(starts) == world:
            self.staged = max(self.staged, min(max(mine, default=0) for mine in steps))
        for lines in (*done.heard("committed"), *done.heard("closed")):
            self.committed = max([self.committed, *(line["step"] for line in lines)])

    def finish(self, sockets: Path, world: int = 2) -> None:
        """Train to the end and look at everything."""
        self.train(world).whole()
        assert eventually(lambda: not any_drains(sockets)), "a process is left"
        if self.url is not None:
            check_disk(self.url)


def lost(start: int, safe: int) -> bool:
    """Whether a run went on before a step that was acknowledged (oracle O1)."""
    return start < safe


def any_drains(sockets: Path) -> bool:
    return bool(writers(sockets))


def check_disk(run: str) -> list[int]:
    """O2, and that every live checkpoint is, bit for bit, one step of one job. The steps, newest first."""
    assert problems(run) == []
    log = read.run(read.open_run(f"file://{run}"))
    found = [commit.step for commit in log.state.lineage()]
    for step in found:
        assert mixed(run, step) == []
    return found


def mixed(run: str, step: int) -> list[str]:
    """The tensors of a checkpoint that are not what they were at this step of the job that saved it."""
    loaded = ckpt.load(run, step=step)
    own = loaded.plain("own")
    tensors = {}
    for name, shape in SHAPES.items():
        for kind in ("alike", "divided"):
            tensors[f"{kind}.{name}"] = (f"{kind} {name}", shape)
            tensors[f"clock.state.{kind}.{name}.moment"] = (f"{kind} {name} moment", shape)
    for rank in range(own["world"]):
        label = "own.tensor" if own["world"] == 1 else f"own.tensor#{rank}"
        tensors[label] = (f"own {rank}", (33,))
    expected = {name: rank_toy.bits(what, step, own["salt"], shape) for name, (what, shape) in tensors.items()}
    missing = [name for name in tensors if name not in loaded]
    return missing + [n for n, t in expected.items() if n in loaded and not torch.equal(loaded[n], t)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, str(tmp_path / "run"))
