"""Inject faults into real training jobs, and compare every state that comes back with the one that was saved.

    python benchmarks/torture.py [--quick] [--only kill,flip] [--seed N] [--folder DIR] [--json FILE]

Nothing here knows how everystep works inside: the jobs (`torture_job.py`) and the checks use its public names and its
commands. Each job records a digest of its state at every step, and every acknowledgement it gets. A fault is injected
from outside. Then a new job starts, and its state must have the digest of the step that it claims to continue from.

  kill      SIGKILL at a random moment of a save: the trainer alone (memory survives), or the trainer and its writer
  disk      the file system is full in the middle of a run; later it is enlarged
  flip      one bit is flipped in a file of the run, for each kind of file
  truncate  a file of the run is cut at a random place, for each kind of file
  remove    a file of the run is removed, for each kind of file
  bucket    an object store with slow, failed and truncated responses
  jobs      two different jobs open one path at the same moment
  ranks     two ranks save with FSDP2; three ranks and one rank restore
  writes    weights change through `.data` and numpy right after step() returns
  clean     `ckpt prune` and `ckpt gc` run all the time while a job saves

The table counts, for each fault: attempts; tensors restored wrong without an error; attempts that lost more steps than
the promise allows; hangs; errors that are not one of everystep's own; errors that are. The promise: SIGKILL of the
trainer loses no step that was acknowledged in memory; every other fault loses no step that was acknowledged on disk.
A damaged, truncated or removed file may cost the newest checkpoint, but never the one before it. Exit code 1 if one of
the four bad columns is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).resolve().parent.parent
LIMIT_S = 90.0  # a job that runs longer hangs: the longest of them takes 15 s
READ_LIMIT_S = 60  # the same for reading one checkpoint: about 10 ms, and 4 s of retries if a file is missing
MARK = "TORTURE_MARK"  # an environment variable by which the processes of one attempt are found


@dataclass
class Counts:
    """Results of all attempts with one fault."""

    fault: str
    attempts: int = 0
    wrong: int = 0
    lost: int = 0
    hangs: int = 0
    unclear: int = 0
    clear: int = 0
    seconds: float = 0.0
    skipped: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.wrong + self.lost + self.hangs + self.unclear

    def note(self, column: str, text: str) -> None:
        """Count one attempt in a column, and keep the first reasons."""
        setattr(self, column, getattr(self, column) + 1)
        if column != "clear" and len(self.notes) < 20:
            self.notes.append(f"{column}: {text}")


@dataclass(frozen=True)
class Plan:
    """Number of attempts for each fault. flips: for each kind of file."""

    kills: int
    disks: int
    flips: int
    cuts: int
    buckets: int
    pairs: int
    ranks: int
    writes: int
    cleans: int


FULL = Plan(kills=100, disks=5, flips=200, cuts=25, buckets=6, pairs=6, ranks=2, writes=4, cleans=2)
QUICK = Plan(kills=6, disks=1, flips=10, cuts=4, buckets=1, pairs=2, ranks=1, writes=1, cleans=1)


# -- jobs --


class Journal:
    """Records of all jobs that used the same run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self.read()

    def read(self) -> None:
        """Read all complete lines."""
        text = self.path.read_text() if self.path.exists() else ""
        self.lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def newest(self, ack: str) -> int:
        """Return the newest step with this acknowledgement, or 0."""
        return max((line["step"] for line in self.lines if line.get("ack") == ack), default=0)

    def digests(self, step: int) -> set[str]:
        """Return the digests of a step. Several jobs may have reached it."""
        return {line["digest"] for line in self.lines if line.get("step") == step and "digest" in line}

    @property
    def restored(self) -> dict[str, Any] | None:
        """Return what the newest job started from, or None if no job came so far."""
        return next((line for line in reversed(self.lines) if "restored" in line), None)

    @property
    def starts(self) -> int:
        return sum("restored" in line for line in self.lines)


class Job:
    """A training process, or torchrun with several of them."""

    def __init__(
        self,
        run: str,
        journal: Path,
        *words: object,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        repo: Path = REPO,
    ) -> None:
        """repo: the checkout whose library and job are used."""
        self.mark = uuid.uuid4().hex
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the job has ended
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{repo}:{repo / 'backends'}",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            MARK: self.mark,
            **(env or {}),
        }
        command = [*start, str(repo / "benchmarks" / "torture_job.py"), run, str(journal), *map(str, words)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True
        )

    def wait(self, timeout_s: float = LIMIT_S) -> int | None:
        """Return the exit code, or None if the job hangs. A job that hangs is killed with all its processes."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """Kill the trainer and whatever it has started, which includes its writer."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def judge(self, code: int | None, counts: Counts) -> bool:
        """Count how the job ended. Return True if it ended well."""
        if code == 0:
            return True
        text = self.errors()
        if code is None:
            counts.note("hangs", f"a job did not end within {LIMIT_S:.0f} s: {text[-400:]}")
        elif re.search(r"^(\[rank\d+\]: )?ckpt\.errors\.\w+: ", text, re.MULTILINE):
            counts.note("clear", text[-400:])
        else:
            counts.note("unclear", f"exit code {code}: {text[-600:]}")
        return False


def check_start(journal: Journal, counts: Counts, promised: int, what: str) -> int:
    """Compare what the newest job started from with what was recorded. Return that step."""
    found = journal.restored
    if found is None:
        counts.note("lost", f"{what}: no job started, {promised} was acknowledged")
        return 0
    step = int(found["restored"])
    if step and found["digest"] not in journal.digests(step):
        counts.note("wrong", f"{what}: the state restored as step {step} from {found['from']} was never saved")
    elif step < promised:
        counts.note("lost", f"{what}: step {promised} was acknowledged, step {step} came back from {found['from']}")
    return step


def wait_for(condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


# -- faults in running jobs --


def torture_kill(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """Odd attempts kill the trainer alone, even ones the trainer and its writer."""
    journal, run = Journal(folder / "journal"), str(folder / "run")
    promised, what = 0, "first start"
    for attempt in range(plan.kills + 1):
        last = attempt == plan.kills
        starts = journal.starts
        job = Job(run, journal.path, "--every", 1, "--steps", promised + (3 if last else 10_000))

        def started(job: Job = job, starts: int = starts) -> bool:
            journal.read()
            return journal.starts > starts or job.process.poll() is not None

        if not wait_for(started):
            counts.note("hangs", f"{what}: the next job did not start")
            job.kill_all()
            continue
        if job.process.poll() is not None and journal.starts == starts:
            job.judge(job.process.returncode, counts)
            continue
        if attempt:
            counts.attempts += 1
            check_start(journal, counts, promised, what)
        if last:
            job.judge(job.wait(), counts)
            break
        newest = journal.newest("committed")
        wait_for(lambda newest=newest: (journal.read(), journal.newest("committed") > newest)[1], 20.0)
        time.sleep(rng.uniform(0.0, 0.15))  # a step with its save takes about 15 ms
        if rng.random() < 0.5:
            job.kill()
            ack, what = "staged", f"kill {attempt} of the trainer"
        else:
            job.kill_all()
            ack, what = "committed", f"kill {attempt} of trainer and writer"
        journal.read()
        promised = journal.newest(ack)


def torture_disk(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """The disk is a tmpfs of its own, which needs the right to mount."""
    for attempt in range(plan.disks):
        disk = folder / f"disk{attempt}"
        disk.mkdir()
        size = rng.randrange(3_000, 9_000)  # KB: a checkpoint has 1.6 MB
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], capture_output=True
        ).returncode:
            counts.skipped = "needs the right to mount a file system"
            return
        try:
            journal = Journal(folder / f"journal{attempt}")
            counts.attempts += 1
            job = Job(str(disk / "run"), journal.path, "--every", 1, "--keep", 20, "--steps", 60)
            job.judge(job.wait(), counts)
            job.kill_all()
            journal.read()
            promised = journal.newest("committed")
            subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
            job = Job(str(disk / "run"), journal.path, "--every", 1, "--keep", 20, "--steps", promised + 3)
            well = job.judge(job.wait(), counts)
            job.kill_all()
            journal.read()
            if well:
                check_start(journal, counts, promised, f"a disk of {size} KB that was full")
        finally:
            subprocess.run(["umount", "-l", disk], check=False)


def torture_bucket(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """The proxy of the tests stands between the job and moto's S3."""
    sys.path.insert(0, str(REPO / "tests" / "lib"))
    from s3_server import FaultProxy, MotoServer, environment

    kinds = ("status", "reset", "lost_reply", "truncate", "short", "delay", "late_reply", "corrupt")
    with MotoServer() as server, FaultProxy(server.url) as proxy:
        server.make_bucket("bucket")
        for attempt in range(plan.buckets):
            url, journal = f"s3://bucket/run{attempt}", Journal(folder / f"journal{attempt}")
            for _ in range(12):
                kind = rng.choice(kinds)
                method = rng.choice(("GET", "PUT", ""))
                proxy.fail(
                    kind, method=method, skip=rng.randrange(30), count=rng.randrange(1, 4), s=rng.uniform(0.1, 1)
                )
            counts.attempts += 1
            job = Job(url, journal.path, "--every", 2, "--steps", 30, env=environment(proxy.url))
            job.judge(job.wait(), counts)
            job.kill_all()
            journal.read()
            promised = journal.newest("committed")
            job = Job(url, journal.path, "--every", 2, "--steps", promised + 3, env=environment(server.url))
            well = job.judge(job.wait(), counts)
            job.kill_all()
            journal.read()
            if well:
                check_start(journal, counts, promised, f"bucket {attempt}")


def torture_jobs(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """Two jobs with different data. The second is refused with an error, or continues after the first has finished."""
    for attempt in range(plan.pairs):
        run, go = str(folder / f"run{attempt}"), folder / f"go{attempt}"
        journals = [Journal(folder / f"journal{attempt}-{salt}") for salt in (1, 2)]
        steps = rng.choice((40, 500))  # the first job may end while the second still waits for the run
        words = ("--every", 1, "--steps", steps, "--go", go)
        jobs = [Job(run, j.path, *words, "--salt", salt) for salt, j in enumerate(journals, 1)]
        time.sleep(4.0)  # both have imported torch
        go.touch()
        time.sleep(rng.choice((0.0, 0.5)))
        counts.attempts += 1
        codes = [job.wait() for job in jobs]
        for job, code in zip(jobs, codes, strict=True):
            job.judge(code, counts)
        for job in jobs:
            job.kill_all()
        for journal in journals:
            journal.read()
        # One journal for the next job, with the records of both.
        joined = Journal(folder / f"journal{attempt}")
        joined.path.write_text("".join(journal.path.read_text() for journal in journals if journal.path.exists()))
        joined.read()
        promised = joined.newest("committed")
        job = Job(run, joined.path, "--every", 1, "--steps", promised + 2)
        if job.judge(job.wait(), counts):
            joined.read()
            check_start(joined, counts, promised, f"pair {attempt}")
        job.kill_all()


def torture_ranks(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """A run of two ranks is copied, since each restore adds to it."""
    for attempt in range(plan.ranks):
        run, journal = folder / f"run{attempt}", Journal(folder / f"journal{attempt}")
        job = Job(str(run), journal.path, "--steps", 12, "--every", 3, "--no-memory", ranks=2)
        if not job.judge(job.wait(), counts):
            continue
        for ranks in (3, 1):
            copy, copied = folder / f"run{attempt}-{ranks}", Journal(folder / f"journal{attempt}-{ranks}")
            shutil.copytree(run, copy)
            shutil.copy(journal.path, copied.path)
            counts.attempts += 1
            job = Job(str(copy), copied.path, "--steps", 14, "--no-memory", ranks=ranks)
            if job.judge(job.wait(), counts):
                copied.read()
                check_start(copied, counts, 12, f"{ranks} ranks")
            job.kill_all()


def torture_writes(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """A step that was torn by such a write must fail with an error. It may never come back."""
    for attempt in range(plan.writes):
        run, journal = str(folder / f"run{attempt}"), Journal(folder / f"journal{attempt}")
        job = Job(run, journal.path, "--every", 1, "--keep", 40, "--steps", 30, "--foreign-writes", "--pause", 0)
        job.judge(job.wait(), counts)
        job.kill_all()
        for step in steps_in(run)[:: 1 if plan is FULL else 8]:
            shutil.copytree(run, copy := folder / "copy")
            job = Job(str(copy), journal.path, "--at", step, "--steps", step)
            counts.attempts += 1
            if job.judge(job.wait(), counts):
                journal.read()
                check_start(journal, counts, step, f"step {step} of a run with writes through .data")
            job.kill_all()
            shutil.rmtree(copy)


def torture_clean(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """Both commands run in turns until the job has ended."""
    for attempt in range(plan.cleans):
        run, journal = str(folder / f"run{attempt}"), Journal(folder / f"journal{attempt}")
        job = Job(run, journal.path, "--every", 1, "--keep", 50, "--steps", 300)
        wait_for(lambda journal=journal: (journal.read(), journal.newest("committed") > 2)[1])
        counts.attempts += 1
        while job.process.poll() is None:
            for words in (["prune", run, "--keep-last", "2", "--yes"], ["gc", run, "--yes"]):
                done = command(*words)
                if done.returncode not in (0, 1) or "Traceback" in done.stderr:
                    counts.note("unclear", f"ckpt {words[0]}: {done.stderr[-400:]}")
        job.judge(job.wait(), counts)
        job.kill_all()
        if command("verify", run).returncode:
            counts.note("wrong", "ckpt verify found damage after the clean-up")
        journal.read()
        promised = journal.newest("committed")
        job = Job(run, journal.path, "--every", 1, "--steps", promised + 2)
        if job.judge(job.wait(), counts):
            journal.read()
            check_start(journal, counts, promised, "clean-up during saves")
        job.kill_all()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'backends'}", "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-c", "from ckpt.tools.cli import main; main()"]
    return subprocess.run([*start, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S)


# -- faults in files --


def torture_flip(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """Flip one bit of one file, and read the run again."""

    def flip(path: Path) -> str:
        data = bytearray(path.read_bytes())
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        return f"bit {bit} of byte {at} of {len(data)}"

    damage_files(counts, plan.flips, folder, rng, flip)


def torture_truncate(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """Cut one file, and read the run again."""

    def cut(path: Path) -> str:
        data = path.read_bytes()
        path.write_bytes(data[: (at := rng.randrange(len(data)))])
        return f"cut at {at} of {len(data)}"

    damage_files(counts, plan.cuts, folder, rng, cut)


def torture_remove(counts: Counts, plan: Plan, folder: Path, rng: random.Random) -> None:
    """Remove one file, and read the run again."""

    def remove(path: Path) -> str:
        path.unlink()
        return "removed"

    damage_files(counts, max(1, plan.cuts // 5), folder, rng, remove)


def damage_files(
    counts: Counts, attempts: int, folder: Path, rng: random.Random, damage: Callable[[Path], str]
) -> None:
    """Damage copies of a run, the same number for each kind of file, and read each copy."""
    run, journal = folder / "run", Journal(folder / "journal")
    job = Job(str(run), journal.path, "--every", 2, "--steps", 10, "--no-memory", "--keep", 4)
    if not job.judge(job.wait(), counts):
        return
    intact = {step: read_digest(str(run), step) for step in steps_in(str(run))}
    newest, before = sorted(intact, reverse=True)[:2]
    kinds: dict[str, list[Path]] = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.stat().st_size:
            kind = re.sub(r"[0-9a-f]{8,}|\d+", "#", str(path.relative_to(run)))
            kinds.setdefault(kind, []).append(path)
    for kind, paths in kinds.items():
        for _ in range(attempts):
            path = rng.choice(paths)
            copy = folder / "copy"
            shutil.copytree(run, copy, copy_function=os.link)
            target = copy / path.relative_to(run)
            target.unlink()
            shutil.copy(path, target)
            what = f"{kind}: {damage(target)}"
            counts.attempts += 1
            try:
                with deadline(READ_LIMIT_S):
                    step, found = read_newest(str(copy))
                if intact.get(step) != found:
                    counts.note("wrong", f"{what}: step {step} has another state than it was saved with")
                elif step < before:
                    counts.note("lost", f"{what}: step {step} instead of {newest} or {before}")
            except TimeoutError:
                counts.note("hangs", what)
            except Exception as error:
                ours = type(error).__module__ == "ckpt.errors"
                counts.note("clear" if ours else "unclear", f"{what}: {type(error).__name__}: {error}")
            finally:
                shutil.rmtree(copy)


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the time is over."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- reading runs --


def read_newest(run: str) -> tuple[int, str]:
    """Return step and digest of the newest checkpoint that can be read."""
    import ckpt

    loaded = ckpt.load(run)
    return loaded.step, digest_of(loaded)


def read_digest(run: str, step: int) -> str | None:
    """Return the digest of a checkpoint, or None if it is gone by now."""
    import ckpt

    try:
        return digest_of(ckpt.load(run, step=step))
    except ckpt.errors.NoCheckpointError:
        return None


def steps_in(run: str) -> list[int]:
    import ckpt

    return [checkpoint.step for checkpoint in ckpt.Run(run).list()]


def digest_of(loaded: Any) -> str:
    """Return a digest of all tensors and of the plain values, by the names that `ckpt.load` gives them."""
    import hashlib

    import torch

    found = hashlib.sha256()
    for name, tensor in sorted(loaded.all().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(repr(loaded.plain("plain")).encode())
    return found.hexdigest()[:24]


FAULTS: dict[str, Callable[[Counts, Plan, Path, random.Random], None]] = {
    "kill": torture_kill,
    "disk": torture_disk,
    "flip": torture_flip,
    "truncate": torture_truncate,
    "remove": torture_remove,
    "bucket": torture_bucket,
    "jobs": torture_jobs,
    "ranks": torture_ranks,
    "writes": torture_writes,
    "clean": torture_clean,
}


def show(console: Console, results: list[Counts]) -> None:
    columns = (
        "fault",
        "attempts",
        "wrong tensors",
        "lost steps",
        "hangs",
        "unclear errors",
        "clear errors",
        "seconds",
    )
    table = Table(*columns)
    for one in results:
        if one.skipped:
            table.add_row(one.fault, f"not run: {one.skipped}")
        else:
            numbers = (one.attempts, one.wrong, one.lost, one.hangs, one.unclear, one.clear, round(one.seconds))
            table.add_row(one.fault, *map(str, numbers))
    console.print(table)
    for one in results:
        for text in one.notes:
            console.print(f"{one.fault}, {text}", markup=False, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few attempts for each fault, in about three minutes")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults, separated by commas")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--folder", type=Path, help="where the runs go; default: a temporary folder, removed at the end"
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    sys.path[:0] = [str(REPO), str(REPO / "backends")]
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)  # about damage that was made here
    console, results = Console(width=max(110, Console().width)), list[Counts]()
    console.print(f"Python {platform.python_version()} on {platform.machine()}, seed {given.seed}")
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        for name in names:
            counts, folder = Counts(name), Path(place) / name
            folder.mkdir()
            began = time.monotonic()
            with console.status(f"{name}: {FAULTS[name].__doc__}"):
                FAULTS[name](counts, QUICK if given.quick else FULL, folder, random.Random(f"{given.seed} {name}"))
            counts.seconds = time.monotonic() - began
            results.append(counts)
            shutil.rmtree(folder, ignore_errors=True)
            if not console.is_terminal:
                console.print(f"{name}: {counts.attempts} attempts in {counts.seconds:.0f} s, {counts.bad} bad")
    show(console, results)
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "faults": [asdict(one) for one in results]}, indent=1))
    return 1 if any(one.bad for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
