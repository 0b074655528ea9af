"""Faults of single ranks: checkpoints of all ranks stay intact, and waiting ranks are notified in time.

A job is two to four real processes with gloo (`rank_toy`), started and killed as torchrun does: when one rank dies, the
others are killed. Two oracles: a restore yields, bit for bit and on all ranks, one checkpoint that was begun, not older
than the newest acknowledged one (O1); every byte of every live checkpoint is right, and each checkpoint is one step of
one job (O2).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpt
import rank_toy
from inside import TRAINER_POINTS, WRITER_POINTS
from kills import DISK, MEMORY, kill_all, lost, problems, steps_on_disk
from model_disk import volume, why_not
from parallel import free_port
from processes import PYTHONPATH, eventually, start_python, writers
from rank_toy import SHAPES
from run_files import DATA, MANIFEST, checkpoint_files, pattern

Line = dict[str, Any]
Todo = list[tuple[str, dict[str, Any]]]
Fails = dict[int, str]
JOB_S = 90.0  # nothing here may take so long: whoever gets there hangs

AFTER_START = [p for p in WRITER_POINTS if p not in ("acquire.done", "recover.done", "drain.started")]
STEPS, EVERY = 8, 2


# -- jobs --


@dataclass
class Done:
    """A finished job: the output of its ranks, their exit codes, and their errors."""

    said: list[list[Line]]
    codes: list[int | None]
    stderr: list[str]

    def heard(self, word: str) -> list[list[Line]]:
        """Return the reports of one kind, by rank."""
        return [[line for line in lines if line["say"] == word] for lines in self.said]

    def whole(self) -> Done:
        """Checked: every rank came to its end by itself."""
        assert set(self.codes) == {0}, "\n".join(self.stderr)[-8000:]
        return self


def job(folder: Path, world: int, todo: Todo, fails: Fails | None = None, *, timeout_s: float = JOB_S) -> Done:
    """Run the ranks of a job. Once one has died the others are killed; a job that does not end is an error.

    `fails`: what single ranks, and the writers that they start, are armed with (see `ckpt.events`).
    """
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    command = [sys.executable, "-c", "import rank_toy; rank_toy.main()", json.dumps(todo)]
    processes = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "CKPT_FAIL": (fails or {}).get(rank, "")}
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
            processes.append(start_python(command, env=environment | own, stdout=out, stderr=err))
    try:
        if hangs := not eventually(lambda: _ended(processes), timeout_s):
            for process in processes:
                process.send_signal(signal.SIGUSR2)  # where are you?
            time.sleep(1.0)
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


def _ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Return True if all have ended, or one has died or is stopped (then a watchdog acts)."""
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

    def train(self, world: int = 2, fails: Fails | None = None, *, left: str = MEMORY, **arguments: Any) -> Done:
        """Train until the end, or until a death that leaves the tier `left`."""
        self.jobs += 1
        arguments = {"run": self.url, "steps": STEPS, "every": EVERY, "salt": self.jobs, **arguments}
        done = job(self.folder / f"job-{self.jobs}", world, [("train", arguments)], fails)
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
        assert self.url is not None
        check_disk(self.url)


def check_disk(run: str) -> list[int]:
    """O2, and that every live checkpoint is, bit for bit, one step of one job. The steps, newest first."""
    assert problems(run) == []
    found = steps_on_disk(run)
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
WRITES = ("data_file.opened", "data_file.written", "data_file.synced", "manifest.stored")  # what every writer does
COMMITS = [p for p in AFTER_START if p not in WRITES and p != "mirror.taken"]  # and what one does for all


def test_a_rank_killed_at_every_point(run: Run, own_sockets: Path) -> None:
    """A SIGKILL of one rank at any fail point loses no step that all ranks had staged; the job is restarted with the
    same and with other numbers of ranks."""
    # Without a restore, its fail points are not visited: begin with the others.
    for i, point in enumerate(sorted(TRAINER_POINTS, key=lambda p: p.startswith(("restore.", "run.")))):
        world = (2, 2, 3)[i % 3]
        done = run.train(world, {i % world: f"trainer/{point}:kill:{VISITS.get(point, 3 + i)}"})
        assert done.codes[i % world] == -signal.SIGKILL, point
    run.finish(own_sockets)
    assert "memory" in run.places


def test_the_writers_of_ranks_killed_at_every_point(run: Run, own_sockets: Path) -> None:
    """Writers of both ranks die repeatedly: each is replaced, every step is committed, and training continues."""
    for part in range(3):  # a trainer stops restarting its writer at the fourth death
        first = [f"writer/{p}:kill:{n}" for p, n in zip((*WRITES, *COMMITS)[part::3], (2, 3, 1), strict=False)]
        second = [f"writer/{p}:kill:{n}" for p, n in zip(WRITES[part::3], (3, 2), strict=False)]
        one = Run(run.folder, f"{run.url}-{part}", jobs=10 * part)
        spares = {"0": first[1:], "1": second[1:]}
        done = one.train(2, {0: first[0], 1: second[0]}, spares=spares, steps=16).whole()
        # The last one may reach its point only while the run is closed, when it is not replaced.
        for deaths, replaced in zip((first, second), done.heard("replaced"), strict=True):
            assert len(replaced) >= len(deaths) - 1, f"{deaths}: {done.stderr}"
        assert one.committed == 16
        assert eventually(lambda: not writers(own_sockets)), "a process is left"
        assert check_disk(f"{run.url}-{part}")[0] == 16


def test_ranks_killed_with_their_writers(run: Run, own_sockets: Path) -> None:
    """If the memory of a rank, or of all, is lost too, all ranks continue from the newest committed step."""
    for world, victims in ((3, (0,)), (2, (0, 1))):
        before = run.committed
        fails = dict.fromkeys(victims, "trainer/stage.copied:kill:8,writer/manifest.stored:kill:4")
        run.train(world, fails, left=DISK, wait_at=5)
        assert run.committed > before
    run.finish(own_sockets)


def test_a_rank_is_suspended_or_raises_an_exception(run: Run, own_sockets: Path) -> None:
    """A watchdog ends the job, or a rank leaves the `with` block while the others are in a collective: it does not wait
    for them. The next job continues from the newest step that all ranks had staged."""
    done = run.train(2, {1: "trainer/stage.copied:stop:5"})
    assert [len(lines) for lines in done.heard("staged")] in ([4, 4], [5, 4])
    assert run.staged == 4
    done = run.train(2, crash={"1": 6})
    assert done.codes[1] == 1 and "the training of this rank has a bug" in done.stderr[1]
    assert run.staged == 5
    run.train(3, crash={"0": 8})
    assert run.staged == 7
    run.finish(own_sockets)


def test_memory_of_other_numbers_of_ranks(run: Run, own_sockets: Path) -> None:
    """Fewer and more ranks continue from the memory of the previous job's writers; there is no disk."""
    run.url = None
    for world in (4, 2, 3):
        assert run.train(world, {world - 1: "trainer/stage.copied:kill:4"}).codes[-1] == -signal.SIGKILL
    run.train(2).whole()
    kill_all(writers(own_sockets))  # those of ranks that are gone would wait for a larger job
    assert run.places == ["", "memory", "memory", "memory"]


SCENES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"rank {rank} absent at {where}": (f"absent_at_{where}", {"missing": rank})
        for where, rank in (("opening", 0), ("restoring", 1), ("closing", 0))
    },
    "other place": ("other_place", {}),
    "other step": ("other_step", {}),
    **{f"other {how}": ("other_tensors", {"how": how}) for how in ("more", "shape")},
    "other restore": ("other_restore", {}),
    "damaged": ("damaged", {}),
    "disk of rank 1": (
        "disk_fails",
        {
            "victim": 1,
            # Each time one step further: what fails early is not visited later.
            "fail": "writer/data_file.opened:enospc:2,writer/data_file.written:eio:2,writer/data_file.synced:eio:2,"
            "writer/manifest.stored:eio:2",
            "steps": 6,
        },
    ),
    "committer": ("disk_fails", {"victim": 0, "fail": "writer/log.linked:eio:3,writer/index.stored:eio:3", "steps": 4}),
    **{f"staging: {how}": ("staging_fails", {"how": how}) for how in ("copying fails", "written while it is copied")},
    "stall": ("writer_stalls", {}),
    "oracle": ("oracle_sees", {}),
}
FULL = "full disk"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """The results of all scenes, by rank. A single job plays them all, because starting processes is slow."""
    folder = tmp_path_factory.mktemp("scenes")
    sockets = folder / "sockets"
    sockets.mkdir(mode=0o700)
    todo = [(name, {"root": str(folder / f"{i}"), **given}) for i, (name, given) in enumerate(SCENES.values())]
    labels = list(SCENES)
    with contextlib.ExitStack() as stack:
        if why_not("tmpfs") is None:
            place = stack.enter_context(volume(folder, "tmpfs", 16))
            todo.append(("disk_fills", {"root": str(place.path / "run")}))
            labels.append(FULL)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("CKPT_RUNTIME_DIR", str(sockets))
        done = job(folder / "job", 2, todo, timeout_s=240.0).whole()
        results = [[line["result"] for line in lines] for lines in done.heard("result")]
        yield {label: list(each) for label, each in zip(labels, zip(*results, strict=True), strict=True)}
        kill_all(writers(sockets))


def both(scene: list[Any], key: str) -> Any:
    """Return a value that is equal on all ranks."""
    assert "broken" not in scene[0] and "broken" not in scene[1], scene
    assert scene[0][key] == scene[1][key]
    return scene[0][key]


def went_on(scene: list[Any], step: int, tier: str = "") -> None:
    """All ranks have restored this step afterwards, and saved another."""
    found = both(scene, "again")
    assert (found["step"], found["wrong"]) == (step, [])
    assert tier in (found["tier"] or "")


@pytest.mark.parametrize(("where", "missing", "step"), [("opening", 0, 0), ("restoring", 1, 0), ("closing", 0, 1)])
def test_an_absent_rank_is_named(told: dict[str, list[Any]], where: str, step: int, missing: int) -> None:
    """A rank that waits in vain gets DeadlineError; so does the late one, or a rank that waits with it; then all can
    continue."""
    scene = told[f"rank {missing} absent at {where}"]
    found = both(scene, "again")
    assert (found["step"], found["wrong"]) == (step, [])
    text = scene[1 - missing]["first"]
    assert text.startswith("DeadlineError: ") and f"rank {missing} did not " in text
    if (where, missing) == ("restoring", 1):
        assert "rank 1 did not arrive" in scene[1]["late"]


def test_ranks_with_other_settings(told: dict[str, list[Any]]) -> None:
    """A different location and interval is reported immediately, on all ranks, with both settings."""
    text = both(told["other place"], "error")
    assert text.startswith("UsageError: rank 1 saves to ") and "/1 with every=3, rank 0 to " in text
    assert text.endswith("with every=2")
    went_on(told["other place"], 0)


def test_ranks_at_other_steps(told: dict[str, list[Any]]) -> None:
    """Steps that only one rank has saved fail at the deadline, with the missing ranks; the next one that all ranks save
    is committed."""
    scene = told["other step"]
    for rank, (step, other) in enumerate(((4, 1), (5, 0))):
        assert f"step {step} was not committed: the manifests of ranks {other} did not arrive" in scene[rank]["error"]
    went_on(scene, 6, "file:")


@pytest.mark.parametrize(("how", "named"), [("more", "net.another"), ("shape", "net.odd is of shape [7, 4]")])
def test_ranks_with_other_tensors(told: dict[str, list[Any]], how: str, named: str) -> None:
    """Mismatched tensors never form a checkpoint; the error on all ranks names the tensor; later saves succeed."""
    scene = told[f"other {how}"]
    assert both(scene, "steps") == [3, 1]
    for one in scene:
        assert one["error"].startswith("SaveError: step 2 was not written") and named in one["error"]


def test_ranks_that_want_other_checkpoints(told: dict[str, list[Any]]) -> None:
    """Nothing is restored where ranks ask for different steps, or one restores and another one closes."""
    scene = told["other restore"]
    assert both(scene, "error") == "UsageError: rank 1 requests step 2, rank 0 requests the newest checkpoint"
    assert both(scene, "unchanged") == []
    assert both(scene, "mixed").startswith("PeerError: ") and "same calls in the same order" in both(scene, "mixed")
    went_on(scene, 3)


@pytest.mark.parametrize("how", [how for how in rank_toy.DAMAGE if how != "nothing"])
def test_damage_to_one_rank_affects_all_ranks(told: dict[str, list[Any]], how: str) -> None:
    """All ranks restore the older checkpoint, and report the same skipped one and reason."""
    found = both(told["damaged"], how)
    assert (found["step"], found["wrong"]) == (1, [])
    ((step, tier, reason),) = found["skipped"]
    assert step == 2 and tier == found["tier"]
    kind = DATA if how.startswith("data file") else MANIFEST
    assert re.search(pattern(kind, step=2, rank=1), reason)


def test_negative_control_undamaged(told: dict[str, list[Any]]) -> None:
    """An undamaged copy is restored to its newest step."""
    found = both(told["damaged"], "nothing")
    assert (found["step"], found["wrong"], found["skipped"]) == (2, [], [])


def test_the_disk_fails_one_rank(told: dict[str, list[Any]]) -> None:
    """Only the save in progress fails, on all ranks and without waiting for a deadline; the error names the rank."""
    scene = told["disk of rank 1"]
    errors = [one["errors"] for one in scene]
    assert all(mine[0] == mine[5] == "" for mine in errors)
    for theirs, own in zip(errors[0][1:4], errors[1][1:4], strict=True):
        assert "was aborted: rank 1: " in theirs
        assert own.startswith("SaveError: ")
    for text in (errors[0][4], errors[1][4]):  # the manifest was whole: the others may have been quick enough
        assert text == "" or "No space" in text or "Input/output error" in text
    went_on(scene, 6)


def test_the_disk_fails_the_committer(told: dict[str, list[Any]]) -> None:
    """The same where one rank commits for all; only of a record that may have landed the others know better."""
    first, second = (one["errors"] for one in told["committer"])
    assert (first[0], second[0], first[3], second[3]) == ("", "", "", "")
    assert "cannot determine whether the checkpoint is recorded in " in first[1]
    assert first[2].startswith("SaveError: ") and "was aborted: rank 0: " in second[2]
    went_on(told["committer"], 4)


def test_full_disk_is_not_filled_by_aborted_saves(told: dict[str, list[Any]]) -> None:
    """The disk has space for the files of one rank, but not for the other's. Nothing is left of such saves, so the next
    one succeeds once there is space again."""
    if FULL not in told:
        pytest.skip("no tmpfs here")
    for one in told[FULL]:
        *full, last = one["errors"]
        assert all("no space left" in text.lower() for text in full), full
        assert last == ""
        assert one["files"] == 2


@pytest.mark.parametrize("how", ["copying fails", "written while it is copied"])
def test_staging_fails_on_one_rank(told: dict[str, list[Any]], how: str) -> None:
    """The others do not wait for it, and get its error."""
    scene = told[f"staging: {how}"]
    assert "was aborted: rank 1: step 2 " in scene[0]["error"]
    assert scene[1]["error"].startswith("SaveError: step 2 ")
    assert 2 not in both(scene, "steps")
    went_on(scene, 3)


def test_checkpoint_retired_before_another_rank_reads_its_record(told: dict[str, list[Any]]) -> None:
    """One writer is stopped and then commits many steps, the first of which are retired before the other has read their
    records: they were checkpoints for both."""
    assert both(told["stall"], "errors") == [""] * 7
    went_on(told["stall"], 8)


# -- states that cannot take what was saved --


def test_world_that_does_not_fit_the_checkpoint(tmp_path: Path, own_sockets: Path) -> None:
    """Fewer ranks than models under one name, or another shape: the error on all ranks names the tensor, and nothing is
    changed."""
    root = str(tmp_path / "run")
    job(tmp_path / "save", 4, [("save_unlike", {"root": root})]).whole()
    done = job(tmp_path / "load", 2, [("cannot_hold", {"root": root})]).whole()
    for (line,) in done.heard("result"):
        found = line["result"]
        assert found["own"].startswith("MismatchError: ") and "does not fit this state" in found["own"]
        assert "net.weight has different values on ranks 0, 1, 2, 3" in found["own"]
        assert found["alike"].startswith("MismatchError: ")
        assert "net.weight has shape [4, 5] in the checkpoint and [4, 6] here" in found["alike"]
        assert found["own unchanged"] and found["alike unchanged"]


# -- the oracles themselves --


def test_negative_control_a_lost_checkpoint_is_seen(run: Run, own_sockets: Path) -> None:
    """O1 goes red when the newest checkpoint is taken away behind the run's back."""
    run.train(2, steps=4).whole()
    assert run.url is not None
    for path in Path(run.url, "log").iterdir():
        if str(json.loads(path.read_text())["body"].get("checkpoint")).startswith("000000004."):
            path.unlink()
    for path in checkpoint_files(run.url, step=4):
        path.unlink()  # or recovery would make the checkpoint again
    with pytest.raises(AssertionError, match="4 was safe, went on at 2"):
        run.train(2, steps=2)


def test_negative_control_ranks_of_two_jobs_are_seen(run: Run, own_sockets: Path) -> None:
    """O2 goes red where the shares of two ranks are not of one state, though every byte is as it was written."""
    run.train(2, steps=4, salts=[1, 2]).whole()
    assert run.url is not None and problems(run.url) == []
    with pytest.raises(AssertionError):
        check_disk(run.url)


def test_negative_control_a_wrong_bit_is_seen(told: dict[str, list[Any]]) -> None:
    """The check of what was restored notices one bit of a shard, another rank's tensor, and another step."""
    for one in told["oracle"]:
        assert one["right"] == []
        assert one["bit"] == ["divided wide moment"]
        assert one["rank"] and one["step"]


# -- the same, often --


def restart_until_it_starts(run: Run, sockets: Path, world: int, fails: Fails, left: str, **arguments: Any) -> None:
    """A job with some memory but no checkpoint refuses to start at 0: then that memory is released."""
    if left == DISK and not run.committed:
        kill_all(writers(sockets))
    run.train(world, fails, left=left, **arguments)
    if left == DISK and not run.committed:
        kill_all(writers(sockets))


@pytest.mark.long
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("trainer", ["stage.claimed", "stage.copied", "stage.sealed", "save.requested"])
@pytest.mark.parametrize("point", [*AFTER_START, "drain.started"])
def test_both_killed_at_points(run: Run, own_sockets: Path, trainer: str, point: str, victims: tuple[int, ...]) -> None:
    """Trainer and writer of a rank, for every pair of points, twice in a row."""
    for nth, world in ((2, 2), (4, 3)):
        fails = dict.fromkeys(victims, f"trainer/{trainer}:kill:{nth + 2},writer/{point}:kill:{nth}")
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
