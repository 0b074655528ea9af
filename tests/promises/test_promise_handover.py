"""A trainer's state reaches the next one after a late close, an exit, a change of ranks, or with a writer that does not
respond."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckpt
import inside
import run_files
from kills import Trainer
from parallel import free_port
from processes import eventually, writers
from run_files import DATA_FOLDER

NAME = "handover"
RUN = f"memory:{NAME}"
LIFE = """
import os, sys, ckpt, torch
import torch.distributed as dist
from torch import nn
until, words = int(sys.argv[1]), sys.argv[2:]
options = {"options": ckpt.Options(name="handover", busy_timeout_s=20)}
def prepare(): pass
#PATCH#
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
w = nn.Parameter(torch.zeros(8))
opt = torch.optim.SGD([w], lr=1.0)
cp = ckpt.Checkpointer({"w": w, "opt": opt}, takeover="takeover" in words, **options)
start = step = cp.restore(default=0)
print("start", start, int(w[0]), flush=True)
def train():
    global step
    w.grad = torch.full_like(w, -1.0)
    opt.step()
    step += 1
    cp.step(step).wait_staged(30)
while step < until:
    train()
print("trained", cp.writer_pid, flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print("done", step, flush=True)
    except ckpt.CheckpointError as error:
        print(type(error).__name__, error, flush=True)
"""
FOLDER = 'options = {"tiers": [ckpt.Tier(os.environ["PLACE"], every=1000)], "options": ckpt.Options(busy_timeout_s=20)}'
HELD = """
import os, time
def held(real):
    def sync(fd):
        while "FOLDER" in os.readlink(f"/proc/self/fd/{fd}") and os.path.exists(os.environ["HELD"]):
            if os.path.getsize(os.environ["HELD"]):
                with open(os.environ["HELD"] + ".failed", "a") as file:
                    file.write("x")
                raise OSError(5, "as a test wants it")
            time.sleep(0.05)
        return real(fd)
    return sync
os.fsync, os.fdatasync = held(os.fsync), held(os.fdatasync)
"""
IMPATIENT = "import inside; inside.wait_for_writers_for(1.0)"


class Rank(Trainer):
    """A trainer that has trained up to a step, and then follows commands."""

    def __init__(self, until: int = 0, *words: str, patch: str = "", **more: Any) -> None:
        more = {"OMP_NUM_THREADS": "1", "path": more.pop("site", ""), **more}
        super().__init__(LIFE.replace("#PATCH#", patch), until, *words, stderr=subprocess.PIPE, **more)

    def line(self) -> str:
        """Return its next line of output; at its end the last line of its error."""
        if line := super().line():
            return line
        assert self.process.stderr is not None
        said = self.process.stderr.read().splitlines()
        return next((one for one in reversed(said) if one.startswith("ckpt.errors.")), said[-1] if said else "")

    def trained(self) -> str:
        """Return the step at which it started, once it is ready."""
        began = self.line()
        if began.startswith("start"):
            self.writer = int(self.line().split()[1])
        return began


@contextlib.contextmanager
def two_ranks(until: int, patch: str = "", **more: str) -> Iterator[list[Rank]]:
    """A job of two that has trained up to a step."""
    shared: dict[str, Any] = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with contextlib.ExitStack() as stack:
        own = [{"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2)]
        ranks = [stack.enter_context(Rank(until, patch=patch, **each, **shared, **more)) for each in own]
        assert [rank.trained() for rank in ranks] == ["start 0 0"] * 2
        yield ranks


def start(**more: str) -> str:
    """Start one rank, kill it, and return the step at which it started."""
    with Rank(**more) as one:
        return one.trained()


# -- close --


class Place:
    """A folder for a run in which nothing becomes durable before it is released."""

    def __init__(self, tmp_path: Path) -> None:
        self.run, self.held = tmp_path / "run", tmp_path / "held"
        self.held.touch()
        (tmp_path / "sitecustomize.py").write_text(HELD.replace("FOLDER", f"/{DATA_FOLDER}/"))
        self.options: dict[str, Any] = {
            "patch": FOLDER,
            "PLACE": str(self.run),
            "HELD": str(self.held),
            "site": str(tmp_path),
        }

    @property
    def failures(self) -> int:
        failed = Path(f"{self.held}.failed")
        return failed.stat().st_size if failed.exists() else 0


@pytest.fixture
def place(tmp_path: Path, own_sockets: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("then", ["ends", "lives on"])
def test_what_a_close_had_no_time_for_is_found_by_the_next_start(then: str, place: Place) -> None:
    """A close that times out reports that saves continue. A start before their end continues from their step, whether
    or not the closing process has ended; so does the next start, from its memory."""
    with Rank(3, **place.options) as first:
        assert first.trained() == "start 0 0"
        assert first.do("cp.close(0.5)").startswith("DeadlineError")
        if then == "ends":
            first.kill()
        with Rank(5, **place.options) as second:
            assert second.trained() == "start 3 3"
            assert second.do("train()") == "done 6"
        assert start(**place.options) == "start 6 6"


def test_a_writer_that_nobody_comes_for_leaves_when_all_is_durable(place: Place, own_sockets: Path) -> None:
    """After a close that timed out, the writer finishes and exits; the step is in the tier."""
    with Rank(3, **place.options) as first:
        first.trained()
        assert first.do("cp.close(0.5)").startswith("DeadlineError")
    place.held.unlink()
    assert eventually(lambda: not writers(own_sockets))
    assert ckpt.load(str(place.run)).step == 3


def test_what_fails_after_a_close_is_tried_again(place: Place, own_sockets: Path) -> None:
    """The tier fails when no trainer is left to be notified: the step is retried, and is in memory for the next
    start."""
    with Rank(3, **place.options) as first:
        first.trained()
        assert first.do("cp.close(0.5)").startswith("DeadlineError")
    place.held.write_text("fail")
    assert eventually(lambda: place.failures >= 2)
    assert start(**place.options) == "start 3 3"


# -- a writer that outlives its trainer --

FAR = (
    FOLDER
    + "; options['memory'] = ckpt.Memory(linger_s=float(os.environ['LINGER']))"
    + ("; options['tiers'].append(ckpt.Tier(os.environ['FAR'], every=1000))")
)


def far_options(tmp_path: Path, linger_s: float) -> dict[str, Any]:
    return {"patch": FAR, "PLACE": str(tmp_path / "run"), "FAR": str(tmp_path / "far"), "LINGER": str(linger_s)}


@pytest.mark.parametrize("reachable", [True, False], ids=["reachable", "moved away"])
def test_newest_step_reaches_every_tier_after_the_death_of_all_ranks(
    reachable: bool, own_sockets: Path, tmp_path: Path
) -> None:
    """Two ranks are killed long before the next scheduled checkpoint, and not restarted. Their writers save the newest
    step to the nearest tier and to the next one, even if that is reachable only later. Then they exit."""
    far, aside = tmp_path / "far", tmp_path / "aside"
    with two_ranks(4, **far_options(tmp_path, 0)) as ranks:
        if not reachable:
            far.rename(aside)
        for rank in ranks:
            rank.process.kill()
    assert eventually(lambda: inside.steps_at(tmp_path / "run")[:1] == [4])
    if not reachable:
        assert len(writers(own_sockets)) == 2
        aside.rename(far)
    assert eventually(lambda: inside.steps_at(far) == [4])
    assert eventually(lambda: not writers(own_sockets), 90.0)
    assert inside.problems_at(far) == [] and ckpt.load(str(far))["w"].tolist() == [4.0] * 8


@pytest.mark.parametrize("short", [True, False], ids=["short", "negative control"])
def test_writer_keeps_memory_for_a_restart_unless_it_is_short(short: bool, own_sockets: Path, tmp_path: Path) -> None:
    """When every tier has the newest step, memory only makes a restart faster, so it is released if memory is short."""
    patch = "\nos.environ.pop('CKPT_TEST_WRITERS', 0)\nimport inside; inside.run_in_writers(inside.FOREVER, "
    patch += "inside.MEMORY_IS_SHORT)"
    options = far_options(tmp_path, 600)
    with Rank(4, **{**options, "patch": FAR + (patch if short else "")}) as one:
        assert one.trained() == "start 0 0"
    assert eventually(lambda: inside.steps_at(tmp_path / "far") == [4])
    if short:
        assert eventually(lambda: not writers(own_sockets))
    assert start(**options) == "start 4 4"
    assert bool(one.writer in [writer.pid for writer in writers(own_sockets)]) != short


# -- a trainer that has left, and lives --


def test_memory_of_a_trainer_that_left_and_lives_is_only_read(own_sockets: Path) -> None:
    """A trainer leaves, and its process lives and copies on. The next one restores that memory, and stages into memory
    of its own, so that neither waits for the other."""
    late = "import inside; inside.do_before_it_lets_go_of_memory(cp, lambda: (print('leaving'), sys.stdin.readline()))"
    with Rank(4) as first:
        first.trained()
        assert first.do(late) == "done 4"
        assert first.do("inside.abandon(cp)") == "leaving"
        with Rank(4) as second:
            assert second.trained() == "start 4 4"
            assert [second.do("train()"), second.do("train()"), second.do("train()")] == ["done 5", "done 6", "done 7"]
            assert first.do("") == "done 4"
        assert start() == "start 7 7"


def test_an_error_in_the_staging_thread_is_no_death() -> None:
    """The copying thread fails. The trainer lives: it is not considered dead, and continues to save."""
    with Rank(3) as first:
        first.trained()
        assert first.do("import inside; inside.run_in_staging_thread(cp, lambda: 1 / 0)") == "done 3"
        with Rank() as second:
            assert f"InUseError: process {first.process.pid}" in second.line()
        assert [first.do("train()"), first.do("train()")] == ["done 4", "done 5"]
    assert start() == "start 5 5"


# -- ranks that are no more --


def test_memory_of_a_writer_that_is_slow_to_answer_is_not_passed_over(own_sockets: Path) -> None:
    """Two ranks die, one starts; the writer of the other is stopped. It has part of the newest step, so it is resumed
    and waited for."""
    with two_ranks(4) as ranks:
        slow = psutil.Process(ranks[1].writer)
    slow.suspend()
    assert start(patch="import inside; inside.wait_for_writers_for(1.0, patient_s=60.0)") == "start 4 4"
    assert start() == "start 4 4"


def test_a_writer_that_never_answers_is_no_older_step(own_sockets: Path) -> None:
    """As above, but its name is taken by a process that does not respond: the start fails with an error that names it,
    instead of using an older step. When it has ended, all is found."""
    with two_ranks(4):
        pass
    silent = inside.take_name_of_writer(name := inside.name_of_writer(RUN, 3))
    assert silent is not None
    with silent:
        with Rank(patch=IMPATIENT) as one:
            assert name in (error := one.line()) and "DeadlineError" in error
    assert start() == "start 4 4"


def test_memory_of_ranks_that_are_gone_is_held_by_the_new_job(own_sockets: Path, tmp_path: Path) -> None:
    """Two ranks die, one starts: it borrows the memory of the other rank, whose writer leaves then. Killed before its
    first step, it leaves all of that to the next start."""
    with two_ranks(4, patch=FOLDER, PLACE=str(tmp_path / "run")) as ranks:
        left_over = inside.process_of(ranks[1].writer)
    with Rank(patch=FOLDER, PLACE=str(tmp_path / "run")) as one:
        assert one.trained() == "start 4 4"
        assert eventually(lambda: not left_over.alive)
        assert [writer.pid for writer in writers(own_sockets)] == [one.writer]
    for file in run_files.data_files(tmp_path / "run"):
        file.unlink()
    assert start(patch=FOLDER, PLACE=str(tmp_path / "run")) == "start 4 4"


def test_takeover_by_fewer_ranks_fences_every_rank(own_sockets: Path, tmp_path: Path) -> None:
    """Two ranks train, and a job of a single rank takes over: it starts from their newest checkpoint, and both ranks
    get FencedError at their next call."""
    with two_ranks(4, patch=FOLDER, PLACE=str(tmp_path / "run")) as ranks:
        for rank in ranks:
            rank.say("cp.save().wait_durable(60)")
        assert [rank.line() for rank in ranks] == ["done 4"] * 2
        for rank in ranks:
            rank.say("train()")
        assert [rank.line() for rank in ranks] == ["done 5"] * 2
        with Rank(0, "takeover", patch=FOLDER, PLACE=str(tmp_path / "run")) as one:
            assert one.trained() == "start 4 4"
            assert eventually(lambda: [writer.pid for writer in writers(own_sockets)] == [one.writer])
        assert [rank.do("train()").split()[0] for rank in ranks] == ["FencedError"] * 2


# -- whom a start may end --


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs namespaces",
)
def test_a_start_ends_nothing_that_it_cannot_see(own_sockets: Path) -> None:
    """Two containers share a network, and do not see each other's processes. The writer of one stands still: a start in
    the other is refused, and kills neither that writer nor its own process group."""
    away = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with Rank(2, before=away) as first:
        first.trained()
        (writer,) = writers(own_sockets)
        writer.suspend()
        with Rank(patch=IMPATIENT + "; os.setsid()", before=away) as second:
            assert "InUseError" in second.line() and second.process.wait() == 1
        writer.resume()
        assert first.do("train()") == "done 3"
