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

import psutil
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
    """Whether all have come to their end, or one has died, or stands still: for that there are watchdogs."""
    codes = [process.poll() for process in processes]
    stopped = [psutil.Process(p.pid).status() for p, code in zip(processes, codes, strict=True) if code is None]
    return any(codes) or None not in codes or psutil.STATUS_STOPPED in stopped


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
        assert eventually(lambda: not writers(sockets)), "a process is left"
        if self.url is not None:
            check_disk(self.url)


def lost(start: int, safe: int) -> bool:
    """Whether a run went on before a step that was acknowledged (oracle O1)."""
    return start < safe


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


# -- deaths --

VISITS = {"run.taken": 1, "restore.chosen": 1, "restore.filled": 1, "save.requested": 2}
WRITES = ("pack.opened", "pack.written", "pack.synced", "table.stored", "part.stored")  # what every writer does
COMMITS = [p for p in AFTER_START if p not in WRITES and p != "mirror.taken"]  # and what one does for all


def test_a_rank_killed_at_every_point(run: Run, own_sockets: Path) -> None:
    """A SIGKILL of one rank at any named point loses no step that all ranks had staged; the job is started again with
    the same number of ranks, and with others."""
    # Where nothing is restored, the points of a restore are not visited: begin with the others.
    for i, point in enumerate(sorted(TRAINER_POINTS, key=lambda p: p.startswith(("restore.", "run.")))):
        world = (2, 2, 3)[i % 3]
        done = run.train(world, {i % world: f"trainer/{point}:kill:{VISITS.get(point, 3 + i)}"})
        assert set(done.codes) == {-9}, point
    run.finish(own_sockets)
    assert "memory" in run.places


def test_the_writers_of_ranks_killed_at_every_point(run: Run, own_sockets: Path) -> None:
    """Writers of both ranks die again and again: each is replaced, every step is committed, training notices nothing."""
    for part in range(3):  # a trainer gives up on the fourth death
        first = [f"writer/{p}:kill:{n}" for p, n in zip((*WRITES, *COMMITS)[part::3], (2, 3, 1), strict=False)]
        second = [f"writer/{p}:kill:{n}" for p, n in zip(WRITES[part::3], (3, 2), strict=False)]
        one = Run(run.folder, f"{run.url}-{part}", jobs=10 * part)
        spares = {"0": first[1:], "1": second[1:]}
        done = one.train(2, {0: first[0], 1: second[0]}, spares=spares, steps=16).whole()
        # The last one may get to its point only while the run is closed, when nobody replaces it any more.
        for deaths, replaced in zip((first, second), done.heard("replaced"), strict=True):
            assert len(replaced) >= len(deaths) - 1, f"{deaths}: {done.stderr}"
        assert one.committed == 16
        assert eventually(lambda: not writers(own_sockets)), "a process is left"
        assert check_disk(f"{run.url}-{part}")[0] == 16


def test_ranks_killed_with_their_writers(run: Run, own_sockets: Path) -> None:
    """Where the memory of a rank is gone too, all go on from the newest committed step: rank 0, another, and both."""
    run.train(2, {1: "trainer/stage.copied:kill:7,writer/drain.started:kill"}, left=DISK, every=1)
    assert run.committed > 0
    for world, victims in ((3, (0,)), (2, (0, 1))):
        fails = {v: "trainer/save.requested:kill:3,writer/part.stored:kill:3" for v in victims}
        run.train(world, fails, left=DISK)
    run.finish(own_sockets)


def test_a_rank_that_stands_still(run: Run, own_sockets: Path) -> None:
    """When the watchdog has ended the job, the next one goes on from the newest step that all ranks had staged."""
    done = run.train(2, {1: "trainer/stage.copied:stop:5"})
    assert [len(lines) for lines in done.heard("staged")] in ([4, 4], [5, 4])
    assert run.staged == 4
    run.finish(own_sockets)


def test_an_exception_in_one_rank(run: Run, own_sockets: Path) -> None:
    """A rank leaves the `with` block by an exception while the others sit in a collective: it waits for nobody, and
    the next job goes on from the newest step that all had."""
    done = run.train(2, crash={"1": 6})
    assert done.codes[1] == 1 and "the training of this rank has a bug" in done.stderr[1]
    assert run.staged == 5
    run.train(3, crash={"0": 8})
    assert run.staged == 7
    run.finish(own_sockets)


def test_memory_of_other_numbers_of_ranks(run: Run, own_sockets: Path) -> None:
    """Fewer ranks, and more, go on from the memory of the writers that the job before has left; there is no disk."""
    run.url = None
    for world in (4, 2, 3):
        assert set(run.train(world, {world - 1: "trainer/stage.copied:kill:4"}).codes) == {-9}
    run.finish(own_sockets, 2)
    assert run.places == ["", "memory", "memory", "memory"]


@pytest.mark.long
def test_disks_that_single_nodes_have(run: Run, own_sockets: Path) -> None:
    """Each rank is on a node of its own, with a disk of its own: one node loses its memory, and all go on from what
    both disks hold."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    run.nodes = True
    assert run.url is not None
    try:
        run.train(2, {1: "trainer/stage.copied:kill:7,writer/drain.started:kill"}, left=DISK, every=1)
        assert run.committed > 0
        run.train(2, {0: "trainer/stage.sealed:kill:5"}, every=1)
        run.train(2, {0: "writer/pack.written:kill:2", 1: "writer/log.linked:kill:3"}, every=1).whole()
        for rank in range(2):
            assert problems(str(node(Path(run.url), rank) / "disk")) == []
    finally:
        kill_all(writers(run.folder))


def restart_until_it_starts(run: Run, sockets: Path, world: int, fails: Fails, left: str, **arguments: Any) -> None:
    """A job of which some memory is left and no checkpoint refuses to begin at 0: then that memory is given up."""
    if left == DISK and not run.committed:
        kill_all(writers(sockets))
    run.train(world, fails, left=left, **arguments)
    if left == DISK and not run.committed:
        kill_all(writers(sockets))


@pytest.mark.long
@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_ranks_killed_often_at_a_point(
    run: Run, own_sockets: Path, point: str, victims: tuple[int, ...], nth: int
) -> None:
    """The same, for several visits of each point, one rank and both, twice in a row."""
    run.train(2, {1: "trainer/stage.sealed:kill:5"})
    for world in (2, 3):
        run.train(world, {v: f"trainer/{point}:kill:{min(nth, VISITS.get(point, nth))}" for v in victims})
    run.finish(own_sockets)


@pytest.mark.long
@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("point", AFTER_START)
def test_writers_killed_often_at_a_point(
    run: Run, own_sockets: Path, point: str, victims: tuple[int, ...], nth: int
) -> None:
    """The same, three times in a row in one job, for several visits of each point."""
    fail = f"writer/{point}:kill:{nth}"
    run.train(2, {v: fail for v in victims}, spares={str(v): [fail, fail] for v in victims}, steps=16).whole()
    assert run.committed == 16
    run.finish(own_sockets)


@pytest.mark.long
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("trainer", ["stage.claimed", "stage.copied", "stage.sealed", "save.requested"])
@pytest.mark.parametrize("point", [*AFTER_START, "drain.started"])
def test_both_killed_at_points(
    run: Run, own_sockets: Path, trainer: str, point: str, victims: tuple[int, ...]
) -> None:
    """Trainer and writer of a rank, for every pair of points, twice in a row."""
    for nth, world in ((2, 2), (4, 3)):
        fails = {v: f"trainer/{trainer}:kill:{nth + 2},writer/{point}:kill:{nth}" for v in victims}
        restart_until_it_starts(run, own_sockets, world, fails, DISK)
    run.finish(own_sockets)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_killed_anywhere(run: Run, own_sockets: Path, seed: int) -> None:
    """Any ranks of any number, their trainers, writers or both, at any point; what is left of them, or nothing."""
    dice = random.Random(seed)
    for _ in range(4):
        world = dice.choice((1, 2, 2, 2, 3, 4))
        fails, left = {}, MEMORY
        for victim in dice.sample(range(world), min(world, dice.choice((1, 1, 2)))):
            kind, armed = dice.choice(("trainer", "trainer", "writer", "both")), []
            if kind != "writer":
                point = dice.choice(TRAINER_POINTS)
                armed.append(f"trainer/{point}:kill:{VISITS.get(point, dice.randint(1, 8))}")
            if kind != "trainer":
                armed.append(f"writer/{dice.choice(AFTER_START)}:kill:{dice.randint(1, 4)}")
                left = DISK
            fails[victim] = ",".join(armed)
        restart_until_it_starts(run, own_sockets, world, fails, left, every=dice.choice((1, 2, 3)))
        if dice.random() < 0.3:
            kill_all(writers(own_sockets))
            run.left = DISK
    run.finish(own_sockets, dice.choice((1, 2, 3)))
