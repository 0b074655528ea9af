"""A run is the folder or bucket that a process sees, not the path or URL by which it is named.

Two containers may mount different folders at one path, and a folder or bucket may be deleted, moved, emptied or
replaced while its job runs. Each job restores, holds and commits its own run, and nothing is written elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import ckpt
import inside
from ckpt.errors import StoreError
from kills import Trainer, kill_all
from processes import REPO, eventually, start_python, writers
from run_files import select
from s3_server import MotoServer, storage_options

JOB = """
import json, sys, torch, ckpt
tag, places, options = float(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3])
w = torch.nn.Parameter(torch.full((8,), tag))
opt = torch.optim.SGD([w], lr=0.0)
tiers = [ckpt.Tier(p, every=1000, storage_options=options if "://" in p else None) for p in places]
with ckpt.Checkpointer({"w": w, "opt": opt}, [*tiers], options=ckpt.Options(on_error="warn")) as cp:
    step = cp.restore(default=0)
    print("start", step, w[0].item(), cp.last_restore.tier if step else None, flush=True)
    for line in sys.stdin:
        word, number = line.split()
        for step in range(step + 1, int(number) + 1):
            cp.step(step).wait_staged(30)
        try:
            if word == "commit":
                cp.save().wait_durable(30, tier="all")
            print("done", step, flush=True)
        except ckpt.CheckpointError as error:
            print(type(error).__name__, error, flush=True)
"""
ROOT = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
unshared = pytest.mark.skipif(not ROOT, reason="namespaces need root")
PROC = ("--mount-proc", "--kill-child")
NAMESPACES = {"mount": (), "mount and pid": ("-p", "-f", *PROC), "pid without its own /proc": ("-p", "-f", PROC[1])}
names = count()


class Job(Trainer):
    """A job that trains up to a step, and commits if requested."""

    def __init__(self, tag: float, *places: object, before: Sequence[str] = (), options: str = "{}") -> None:
        super().__init__(JOB, tag, ",".join(map(str, places)), options, before=before, stderr=subprocess.PIPE)
        self.began = self.line()

    def go(self, word: str, step: int) -> str:
        self.say(f"{word} {step}")
        return self.line()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


def started(tag: float, *places: object, **more: object) -> str:
    """Start a job, return the step that it restores, and end it."""
    with Job(tag, *places, **more) as job:  # type: ignore[arg-type]
        if job.began:
            job.close()
        return job.began or job.error()


@pytest.fixture
def mounted(tmp_path: Path) -> Callable[..., list[str]]:
    """The command that mounts one of two folders at the path of the job."""
    for name in ("a", "b", "at"):
        (tmp_path / name).mkdir()

    def command(name: str, namespaces: Sequence[str] = ()) -> list[str]:
        mount = f'mount --bind "{tmp_path}/{name}" "{tmp_path}/at" && exec "$@"'
        return ["unshare", "-m", *namespaces, "sh", "-c", mount, "sh"]

    return command


@unshared
@pytest.mark.parametrize(
    "kind, copied", [("mount", True), *(pytest.param(kind, False, marks=pytest.mark.long) for kind in NAMESPACES)]
)
def test_job_keeps_its_own_run_beside_another_at_the_same_path(
    kind: str, copied: bool, mounted: Callable[..., list[str]], tmp_path: Path
) -> None:
    """While the other job trains, while its writer lingers, and when the other one starts again."""
    run, step = tmp_path / "at" / "run", 0
    if copied:
        with Job(7.0, tmp_path / "a" / "run") as base:
            base.go("commit", 3)
            base.close()
        shutil.copytree(tmp_path / "a" / "run", tmp_path / "b" / "run")
        step = 3
    kept = 7.0 if copied else 2.0
    with Job(1.0, run, before=mounted("a", NAMESPACES[kind])) as a:
        assert a.began.split()[:2] == ["start", str(step)] and a.go("commit", 20) == "done 20"
        with Job(2.0, run, before=mounted("b", NAMESPACES[kind])) as b:
            assert b.began.split()[:3] == ["start", str(step), str(kept)], b.began or b.error()
            assert b.go("commit", 5) == "done 5"
            assert "InUseError" in started(3.0, run, before=mounted("b", NAMESPACES[kind]))
            b.process.kill()
        a.go("commit", 25)
        a.process.kill()
    for name, last in (("b", 5), ("a", 25)):
        found = started(9.0, run, before=mounted(name, NAMESPACES[kind])).split()
        assert found[:3] == ["start", str(last), str(7.0 if copied else {"a": 1.0, "b": 2.0}[name])]
        assert ckpt.load(tmp_path / name / "run").step == last


@unshared
def test_commands_reach_only_the_run_that_they_see(mounted: Callable[..., list[str]], tmp_path: Path) -> None:
    """`ckpt trigger` and `ckpt top` inside one container do not reach the job of another at the same path."""
    run = str(tmp_path / "at" / "run")
    with Job(1.0, run, before=mounted("a")) as a, Job(2.0, run, before=mounted("b")) as b:
        a.go("commit", 4), b.go("commit", 9)
        told = [
            (
                step,
                start_python(
                    [*mounted(name), sys.executable, "-m", "ckpt", *words],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'backends'}"},
                ),
            )
            for name, step in (("a", 4), ("b", 9))
            for words in (["trigger", run], ["top", run, "--once"])
        ]
        for step, process in told:
            text = process.communicate(timeout=60)[0]
            assert f"step {step}" in text and f"step {13 - step}" not in text, text


@pytest.mark.parametrize("how", ["the folder was restored from a copy", "only the nearest tier was emptied"])
def test_memory_is_found_by_the_run_when_its_folder_is_another_one(how: str, tmp_path: Path) -> None:
    """The writer of a killed trainer holds newer steps than any tier. Control: a fresh run does not get them."""
    near, far, copy = tmp_path / "near", tmp_path / "far", tmp_path / "copy"
    places = (near, far) if "nearest" in how else (near,)
    with Job(1.0, *places) as job:
        job.go("commit", 3)
        shutil.copytree(near, copy)
        job.go("step", 8)
        shutil.rmtree(near)
        job.process.kill()
        job.process.wait()
    if len(places) == 1:
        assert started(5.0, tmp_path / "near2") == "start 0 5.0 None"
        copy.rename(near)
    assert started(5.0, *places).startswith("start 8 1.0 memory")


@pytest.mark.parametrize(("how", "gap_s"), [("deleted", 0.0), ("moved", 0.1), ("replaced", 0.4), ("swapped link", 0.0)])
def test_new_folder_is_a_new_run_whatever_the_old_writer_was_about_to_write(
    how: str, gap_s: float, tmp_path: Path, own_sockets: Path
) -> None:
    """The killed trainer's writer is about to write a step. Nothing of it appears in the new folder, and its memory is
    released once another run has begun there."""
    folder, other = tmp_path / "run", tmp_path / "other"
    with Job(6.0, other) as job:
        job.go("commit", 2)
        job.close()
    if how == "swapped link":
        (tmp_path / "first").mkdir()
        folder.symlink_to("first")
    with Job(1.0, folder) as job:
        job.go("commit", 3)
        job.go("step", 8)
        job.process.send_signal(signal.SIGKILL)
        eventually(lambda: False, gap_s)
    if how == "swapped link":
        folder.unlink()
        folder.symlink_to("other")
    elif how == "moved":
        folder.rename(tmp_path / "moved")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if how == "replaced":
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(other, folder)
    folder.mkdir(exist_ok=True)
    eventually(lambda: False, 0.5)
    expected = "start 2 6.0" if how in ("replaced", "swapped link") else "start 0 5.0"
    with Job(5.0, folder) as job:
        assert job.began.startswith(expected), job.began or job.error()
        assert how == "swapped link" or eventually(lambda: len(writers(own_sockets)) == 1)


def test_new_writer_does_not_begin_a_run_in_an_emptied_folder(tmp_path: Path, own_sockets: Path) -> None:
    """The folder is emptied, and then the writer dies: the next one raises at each save. When the folder is back, saves
    continue."""
    folder, aside = tmp_path / "run", tmp_path / "aside"
    with Job(1.0, folder) as job:
        assert job.go("commit", 2) == "done 2"
        folder.rename(aside)
        folder.mkdir()
        kill_all(writers(own_sockets))
        assert "moved, emptied or replaced" in job.go("commit", 4)
        assert list(folder.iterdir()) == []
        folder.rmdir()
        aside.rename(folder)
        assert job.go("commit", 6) == "done 6"
        job.close()
    assert ckpt.load(folder).step == 6


# -- buckets --


@pytest.fixture(scope="module")
def servers() -> Iterator[list[MotoServer]]:
    with MotoServer() as one, MotoServer() as other:
        one.make_bucket("bucket")
        other.make_bucket("bucket")
        yield [one, other]


@pytest.fixture
def url() -> str:
    return f"s3://bucket/identity{next(names)}"


def options_of(server: MotoServer) -> str:
    return json.dumps(storage_options(server.url))


def keys_at(url: str, server: MotoServer, *, delete: bool = False) -> list[str]:
    inside.use_options(url, storage_options(server.url))
    keys = inside.file_names(url)
    if delete:
        inside.delete_files(url, keys)
    return keys


def test_buckets_of_one_name_at_two_endpoints_are_two_runs(servers: list[MotoServer], url: str) -> None:
    """Both jobs train at the same time; each restarts from its own memory."""
    one, other = map(options_of, servers)
    with Job(1.0, url, options=one) as a, Job(2.0, url, options=other) as b:
        assert (a.began, b.began) == ("start 0 1.0 None", "start 0 2.0 None"), a.began or a.error()
        assert a.go("commit", 3) == "done 3" and b.go("commit", 5) == "done 5"
        a.go("step", 4), b.go("step", 7)
        a.process.kill(), b.process.kill()
    assert started(9.0, url, options=other).startswith("start 7 2.0 memory")
    assert started(9.0, url, options=one).startswith("start 4 1.0 memory")


@pytest.mark.parametrize("alone", [True, False], ids=["bucket", "folder and bucket"])
def test_nothing_is_uploaded_to_an_emptied_bucket(
    alone: bool, servers: list[MotoServer], url: str, tmp_path: Path, own_sockets: Path
) -> None:
    """Each save fails with an error, and the bucket stays empty. The restart begins a new run there, or continues from
    the folder; the memory of the old run is released once the new one has begun."""
    places, options = (url,) if alone else (tmp_path / "run", url), options_of(servers[0])
    with Job(1.0, *places, options=options) as job:
        assert job.go("commit", 2) == "done 2"
        assert keys_at(url, servers[0], delete=True)
        for step in (4, 6):
            assert "moved, emptied or replaced" in job.go("commit", step)
        assert keys_at(url, servers[0]) == []
        job.process.kill()
        job.process.wait()
    assert len(writers(own_sockets)) == 1 and keys_at(url, servers[0]) == []  # it keeps the memory
    with Job(5.0, *places, options=options) as job:
        assert job.began.startswith("start 0 5.0" if alone else "start 6 1.0 memory"), job.began or job.error()
        assert job.go("commit", 8) == "done 8" and "FORMAT.json" in keys_at(url, servers[0])
        assert eventually(lambda: len(writers(own_sockets)) == 1)


def test_memory_is_kept_until_the_new_run_has_begun(servers: list[MotoServer], url: str, tmp_path: Path) -> None:
    """A start fails after it has found the emptied bucket. When the bucket is back, the run continues from memory."""
    options = options_of(servers[0])
    with Job(1.0, url, options=options) as job:
        assert job.go("commit", 2) == "done 2" and job.go("step", 5) == "done 5"
        job.process.kill()
        job.process.wait()
    assert eventually(lambda: bool(select(keys_at(url, servers[0]), step=5)))

    saved = inside.read_files(url)
    keys_at(url, servers[0], delete=True)
    assert "Error" in started(5.0, url, "/proc/nothing/here", options=options)
    keys_at(url, servers[0], delete=True)
    inside.write_files(url, saved)
    assert started(5.0, url, options=options).startswith("start 5 1.0 memory")


# -- temporary files --


@pytest.mark.parametrize("by", ["start", "gc"])
def test_temporary_files_of_crashed_writers_are_deleted(
    by: str, run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In all folders of a run; not one that is being written, nor a user's file."""
    with Job(1.0, run_dir) as job:
        job.go("commit", 2)
        job.close()
    folders = [Path(run_dir), *(path for path in Path(run_dir).rglob("*") if path.is_dir())]
    left = [folder / f".{i:016x}.tmp" for i, folder in enumerate(folders)]
    for path in left:
        path.write_text("half of a file")
    mine, live = Path(run_dir) / "log" / ".notes.tmp", Path(run_dir) / "log" / f".{99:016x}.tmp"
    mine.write_text("a user's")
    code = "import fcntl, sys; f = open(sys.argv[1], 'x'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, live], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        if by == "gc":
            inside.command("gc", run_dir, "--json")
            assert all(path.exists() for path in left), "only a plan"
            inside.command("gc", run_dir, "--yes", "--json")
        else:
            assert started(1.0, run_dir).startswith("start 2")
        assert [path for path in left if path.exists()] == [] and live.exists() and mine.exists()
        writer.kill()
    capsys.readouterr()


@pytest.mark.parametrize("replaced", [False, True])
def test_changing_inode_number_is_an_error_only_if_the_run_is_another(
    replaced: bool, run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlay and FUSE file systems may give a file another inode number whenever it is looked up."""
    real, changes = os.stat, count(1)
    inside.append_record(str(tmp_path / "other"), lambda store: None)

    def stat(path: Any, **options: Any) -> os.stat_result:
        if not str(path).endswith("FORMAT.json"):
            return real(path, **options)
        change = next(changes)
        if replaced and change == 2:  # after the check, right before the write
            shutil.copy(tmp_path / "other" / "FORMAT.json", path)
        found = real(path, **options)
        return os.stat_result((found[0], found.st_ino + change, *found[2:]))

    with pytest.raises(StoreError, match="no longer this run") if replaced else contextlib.nullcontext():
        inside.append_record(run_dir, lambda store: monkeypatch.setattr(os, "stat", stat))
    assert len(list(Path(run_dir, "log").glob("*.json"))) == (1 if replaced else 2)
