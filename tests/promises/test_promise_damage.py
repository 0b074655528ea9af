"""Damage that costs steps is reported with what it cost, and only regular files are read.

One real run with a rollback in it is made once. Each test damages a copy, and compares every bit of what it restores
with the state at that step.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import inside
import toy
from ckpt.errors import CheckpointError, CorruptError
from commands import flip
from inside import Job
from processes import eventually, run_script
from run_files import DATA, MANIFEST, checkpoint_files, keys_in, kind_of
from run_files import KINDS as FILE_KINDS
from test_damage import SMALL, VALUES, save
from threads import together as on_ranks

EVERY, BACK, STEPS = 8, 16, 40


@dataclass(frozen=True)
class Left:
    """A folder that a run has left, and the digest of each of its steps."""

    folder: Path
    digests: dict[int, str]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.folder, to))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    """Trained to 20, rolled back to 16, trained to 40; every eighth step is a checkpoint."""
    base, threads = tmp_path_factory.mktemp("left"), torch.get_num_threads()
    torch.set_num_threads(1)
    state, digests = toy.build(), dict[int, str]()
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(base))
    with ckpt.Checkpointer(state, tier(base / "run")) as cp:
        step = cp.restore(default=0)
        for until in (20, STEPS):
            while step < until:
                toy.train_step(state)
                step += 1
                done = cp.step(step)
                assert done is not None
                if done.tiers:
                    done.wait_durable(60)
                digests[step] = toy.digest(state)
            step = cp.restore(step=BACK) if until == 20 else step
        assert eventually(lambda: not checkpoint_files(base / "run", step=8)), "the first checkpoint is deleted"
        # Without the files that may say that this live process trains the run.
        shutil.copytree(base / "run", base / "copy", ignore=shutil.ignore_patterns("ledger", "lease.json"))
    shutil.copytree(base / "run" / "ledger", base / "ledger")
    yield Left(base / "copy", digests)
    patch.undo()
    torch.set_num_threads(threads)


def tier(folder: Path) -> ckpt.Tier:
    return ckpt.Tier(str(folder), every=EVERY, keep=4)


def restored(folder: Path, state: Any = None) -> ckpt.Restored:
    """Restore as `Checkpointer.restore` does, from a run that no job has opened and repaired before."""
    return inside.restore_folder(f"file://{folder}", state or toy.build())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def check(left: Left, folder: Path, caplog: pytest.LogCaptureFixture, named: str) -> int:
    """Restore, and check that the result is right. If it is older than possible, one message must list the skipped
    checkpoints and their cost. Return the step."""
    caplog.clear()
    state = toy.build()
    done = restored(folder, state=state)
    assert done.step is not None and toy.digest(state) == left.digests[done.step]
    if done.step < STEPS:
        assert done.skipped and max(one.step for one in done.skipped) == STEPS, (done, warnings(caplog))
        assert len(said := warnings(caplog)) == 1 and named in said[0], said
        assert f"{STEPS - done.step} steps after step {done.step}, up to step {STEPS}" in said[0]
        assert any(named in one.reason for one in done.skipped)
    else:
        assert not done.skipped and len(warnings(caplog)) <= 1
    return done.step


# -- the log --


def records(folder: Path) -> list[tuple[int, str]]:
    names = sorted(os.listdir(folder / "log"))
    return [(int(name[:12]), json.loads((folder / "log" / name).read_bytes())["type"]) for name in names]


def test_flipped_bit_in_any_log_record_is_reported(
    left: Left, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever record it was: restores and loads are right. If they are older, a message reports the skipped steps and
    their number. A lost COMMIT costs steps."""
    older = 0
    for seq, kind in records(left.folder):
        folder = left.copy(tmp_path / f"r{seq}")
        size = (folder / "log" / f"{seq:012d}.json").stat().st_size
        for at in (1, size // 2):
            shutil.copy(left.folder / "log" / f"{seq:012d}.json", folder / "log")
            flip(folder / "log" / f"{seq:012d}.json", at)
            step = check(left, folder, caplog, f"log record {seq} is damaged")
            assert len(warnings(caplog)) == 1 and f"log record {seq} is damaged" in warnings(caplog)[0]
            assert step == STEPS or kind == "COMMIT"
            caplog.clear()
            loaded = ckpt.load(folder)
            assert loaded.step == step and bool(loaded.skipped) == (step < STEPS) == bool(warnings(caplog))
            assert all(f"log record {seq} " in text and "up to step 40" in text for text in warnings(caplog))
            older += step < STEPS
    assert older == 2


def test_start_commits_a_checkpoint_again_if_its_record_is_damaged(
    left: Left, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that opens the run finds that checkpoint intact, commits it again, and loses nothing. If the record is
    damaged during the job, its next restore reports what it skips."""
    folder = left.copy(tmp_path / "run")
    last = max(seq for seq, kind in records(folder) if kind == "COMMIT")
    flip(folder / "log" / f"{last:012d}.json", 60)
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=1000)], memory=None) as cp:
        assert cp.restore() == 40 and toy.digest(state) == left.digests[40]
        assert cp.last_restore is not None and not cp.last_restore.skipped
        again = max(seq for seq, kind in records_of(folder) if kind == "COMMIT")
        flip(folder / "log" / f"{again:012d}.json", 60)
        caplog.clear()
        assert cp.restore() == 32 and toy.digest(state) == left.digests[32]
        assert cp.last_restore is not None and [one.step for one in cp.last_restore.skipped] == [40]
        assert len(said := warnings(caplog)) == 1 and "8 steps after step 32, up to step 40" in said[0]


def records_of(folder: Path) -> list[tuple[int, str]]:
    """Those that are whole."""
    found = []
    for name in sorted(os.listdir(folder / "log")):
        try:
            found.append((int(name[:12]), json.loads((folder / "log" / name).read_bytes())["type"]))
        except ValueError:
            continue
    return found


# -- retracted checkpoints stay away --


async def opened(folder: Path) -> Job:
    return await Job.open(inside.open_folder(str(folder)), recover=False)


async def attempted(job: Job, step: int) -> Any:
    return await job.write(step, SMALL, bytes(SMALL.size), VALUES)


async def begun(folder: Path) -> Job:
    job = await opened(folder)
    await save(job, SMALL, 10)
    return job


async def next_start(folder: Path) -> list[int]:
    """The steps that there are after a restart."""
    return (await Job.open(inside.open_folder(str(folder)))).steps


@pytest.mark.parametrize("how", ["crash", "aborted", "aborted, damaged", "crash, other damage"])
def test_recovery_commits_nothing_that_may_have_been_retracted(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A complete checkpoint is committed at the next start, unless a damaged record may have ended it. Then it is left
    out, and this is reported. A record that was damaged before the checkpoint's job began cannot have ended it."""

    async def body() -> list[int]:
        job = await begun(tmp_path)
        if how == "crash, other damage":
            flip(tmp_path / "log" / f"{1:012d}.json", 60)
            job = await opened(tmp_path)
        written = await attempted(job, 20)
        if how.startswith("aborted"):
            await job.abort(written)
        if how == "aborted, damaged":
            flip(tmp_path / job.last_record, 60)
        return await next_start(tmp_path)

    assert asyncio.run(body()) == {
        "crash": [20, 10],
        "aborted": [10],
        "aborted, damaged": [10],
        "crash, other damage": [20, 10],
    }[how] or (how == "crash, other damage" and asyncio.run(next_start(tmp_path))[:1] == [20])
    if how == "aborted, damaged":
        assert any("skipped step 20" in text for text in warnings(caplog))
        assert inside.losses_at(tmp_path) == [20]


@pytest.mark.parametrize("record", ["ABORT", "PLAN"])
def test_a_retracted_checkpoint_stays_away_when_its_record_is_damaged(record: str, tmp_path: Path) -> None:
    """A checkpoint that mixed two moments cannot be restored, even if the record of its retraction is damaged."""

    async def body() -> list[int]:
        job = await begun(tmp_path)
        written = await attempted(job, 20)
        if record == "PLAN":
            await job.commit(written)
        await job.retract(written)
        flip(tmp_path / job.last_record, 60)
        steps = await next_start(tmp_path)
        await inside.check_unreadable(inside.open_folder(str(tmp_path)), 20)
        return steps

    assert asyncio.run(body()) == ([20, 10] if record == "PLAN" else [10])


def test_damage_found_by_one_rank_is_reported_on_all(
    left: Left, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one rank reads a shared folder. Each rank has its findings in its result, and they are logged once."""
    folder = left.copy(tmp_path / "run")
    seq = max(seq for seq, kind in records(folder) if kind == "COMMIT")
    flip(folder / "log" / f"{seq:012d}.json", 60)
    caplog.clear()

    def body(ranks: Any) -> Any:
        return [(one.step, one.reason) for one in inside.lost_in_folder(f"file://{folder}", toy.build(), ranks)]

    first, second = on_ranks(2, dist.HashStore(), body, node_of=lambda rank: "one")
    assert first == second and [step for step, _ in first] == [STEPS] and f"log record {seq} is damaged" in first[0][1]


def test_nothing_but_damage(left: Left, tmp_path: Path) -> None:
    """If damage has left nothing to continue from, a job does not silently start at step 0."""
    folder = left.copy(tmp_path / "run")
    for path in checkpoint_files(folder, DATA, MANIFEST):
        path.unlink()
    done = restored(folder)
    assert done.step is None and STEPS in [one.step for one in done.skipped]
    with ckpt.Checkpointer(toy.build(), tier(folder), memory=None) as cp, pytest.raises(CorruptError, match="step 40"):
        cp.restore(default=0)


def test_commands_say_what_is_lost(left: Left, tmp_path: Path) -> None:
    """`ls`, `verify` and `restore` name the damage and what it costs."""
    folder = left.copy(tmp_path / "run")
    seq = max(seq for seq, kind in records(folder) if kind == "COMMIT")
    flip(folder / "log" / f"{seq:012d}.json", 60)
    for command in (["ls"], ["verify"], ["restore", "--to", str(tmp_path / "other.safetensors")]):
        found = inside.invoke(command[0], folder, *command[1:])
        assert f"log record {seq} is damaged" in found.output and "step 40 a checkpoint" in found.output, found.output


# -- only files --


def pipe(path: Path) -> None:
    os.mkfifo(path)


def looped(path: Path) -> None:
    path.symlink_to(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": pipe,
    "folder": Path.mkdir,
    "loop": looped,
    "device": zeros,
    "socket": listening,
}


def victims(folder: Path) -> list[Path]:
    """One file of every kind that a run consists of, the first and the last where the order matters."""
    found = [folder / "FORMAT.json"]
    for kind in (*FILE_KINDS, "log", "ledger", "faults"):
        paths = [folder / key for key in keys_in(folder) if kind_of(key) == kind]
        assert paths, kind
        found += [paths[0], paths[-1]] if len(paths) > 1 else paths
    return list(dict.fromkeys(found))


def read_everything(base: str) -> None:
    """Run all readers of a run, with something else in place of each file in turn. Runs in a separate process."""
    torch.set_num_threads(1)
    inside.try_again_for(pytest.MonkeyPatch(), 0.02)
    for kind, place in itertools.product(KINDS, range(len(victims(Path(base))))):
        folder = Path(shutil.copytree(base, f"{base}.{kind}.{place}"))
        victim = victims(folder)[place]
        victim.unlink()
        KINDS[kind](victim)
        said = []
        for work in (
            lambda folder=folder: ckpt.load(folder).all(),
            lambda folder=folder: restored(folder).step,
        ):
            try:
                work()
            except CheckpointError as error:
                said.append(type(error).__name__)
        for command in (["verify", "--all"], ["faults"], ["report", "--json"]):
            found = inside.invoke(command[0], folder, *command[1:])
            assert found.exception is None or isinstance(found.exception, (SystemExit, CheckpointError)), found
        shutil.rmtree(folder)
        print("READ", kind, victim.relative_to(folder), said)


def test_only_files_are_read(left: Left, tmp_path: Path) -> None:
    """A pipe, folder, loop of links, device or socket in place of any file of a run is skipped or raises an error of
    ours; nothing waits, and no other error is raised."""
    folder = left.copy(tmp_path / "run")
    shutil.copytree(left.folder.parent / "ledger", folder / "ledger")
    (folder / "faults").mkdir(exist_ok=True)
    (folder / "faults" / "20260101T000000.0.json").write_text("{}")
    done = run_script("import sys, test_promise_damage as t; t.read_everything(sys.argv[1])", folder, timeout_s=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("READ") == len(KINDS) * len(victims(folder))


def test_record_that_is_not_a_file_counts_as_damaged_at_start(left: Left, tmp_path: Path) -> None:
    """A job reports it, continues after it, and does not wait for it to become a file."""
    folder = left.copy(tmp_path / "run")
    name = f"{max(seq for seq, _ in records(folder)) + 1:012d}.json"
    os.mkfifo(folder / "log" / name)
    code = (
        "import sys, ckpt, toy\n"
        "with ckpt.Checkpointer(toy.build(), sys.argv[1], memory=None) as cp: print('RESTORED', cp.restore())"
    )
    done = run_script(code, folder, timeout_s=40)
    assert "RESTORED" in done.stdout and f"log record {int(name[:12])} is damaged" in done.stderr, done
    assert max(os.listdir(folder / "log")) > name


@pytest.mark.parametrize(
    "command",
    [["import", "{}", "{run}"], ["import", "{folder}", "{run}"], ["plan", "--costs", "{}"], ["ls", "{}"]],
    ids=lambda words: " ".join(words),
)
def test_paths_of_users_are_not_waited_for(command: list[str], tmp_path: Path) -> None:
    """A pipe that a user names, or that lies in a folder that he names, is refused by its name."""
    (tmp_path / "folder").mkdir()
    named = tmp_path / "folder" / "model.safetensors"
    os.mkfifo(named)
    words = [word.format(named, folder=named.parent, run=tmp_path / "made") for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt", *words],
        capture_output=True, text=True, timeout=40, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode not in (0, -9) and "Traceback" not in done.stderr, done.stderr
    assert "model.safetensors" in done.stderr, done.stderr
