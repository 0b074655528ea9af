"""Faults of ranks under torchrun: the job is back at work from memory, at the step it had reached, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import PYTHONPATH, REPO, eventually, run_python, start_python, writers

STEPS = 70
AT = 40
Line = dict[str, Any]


class Job:
    """One torchrun, and what its ranks say."""

    def __init__(self, folder: Path, options: dict[str, Any], *, ranks: int = 2, restarts: int = 3) -> None:
        self.lines: list[Line] = []
        self.errors = folder / "errors"
        # torchrun's agent keeps its store over restarts, and gloo then reads addresses of the dead (pytorch 135712).
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with self.errors.open("wb") as errors:
            self.process = start_python(
                [*command, "--max-restarts", str(restarts), str(REPO / "tests/lib/ladder_toy.py"), json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                self.lines.append(json.loads(text))

    def finish(self, timeout_s: float = 90.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def said(self, what: str, **fields: Any) -> list[Line]:
        return [x for x in self.lines if x["say"] == what and all(x[k] == v for k, v in fields.items())]

    def reached(self, life: int = 0) -> int:
        """Return the last step that all ranks finished in a job attempt."""
        done: dict[int, int] = {}
        for line in self.said("done", life=life):
            done[line["rank"]] = line["step"]
        return min(done.values())

    def digests(self) -> dict[int, str]:
        return {line["rank"]: line["digest"] for line in self.said("end")}

    def pids(self) -> list[int]:
        return [line["pid"] for line in self.said("start")]

    def kill(self) -> None:
        for process in [*psutil.Process(self.process.pid).children(recursive=True)] if self.alive else []:
            process.kill()
        self.process.kill()
        self.process.wait(10)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends what is left of them."""
    jobs: list[Job] = []

    def make(ranks: int = 2, restarts: int = 3, **options: Any) -> Job:
        what = {"run": str(tmp_path / "run"), "steps": STEPS, **options}
        jobs.append(Job(tmp_path, what, ranks=ranks, restarts=restarts))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the final state of a job without faults and without checkpoints."""
    job = Job(tmp_path_factory.mktemp("reference"), {"run": None, "steps": STEPS})
    assert job.finish() == 0
    return job.digests()


def accounts(folder: Path) -> list[Line]:
    """Return the fault reports in order of time."""
    return [json.loads(path.read_text()) for path in sorted((folder / "run/faults").glob("*.json"))]


def lost(job: Job) -> int:
    """Steps that all ranks had done, and that had to be done again."""
    return job.reached(0) - min(line["step"] for line in job.said("start", life=1))


@pytest.mark.parametrize(
    ("kind", "ranks", "options", "at_most"),
    [
        ("kill", [1], {}, 1),
        pytest.param("kill", [0, 1], {}, 1, marks=pytest.mark.long),
        pytest.param("segv", [1], {}, 1, marks=pytest.mark.long),
        ("stop", [1], {"exit_after": 1.5}, 1),
        ("exception", [1], {"every": 10}, 4),
        pytest.param("oom", [0], {}, 1, marks=pytest.mark.long),
    ],
    ids=["kill", "kill all", "segv", "stop", "exception between saves", "oom"],
)
def test_a_rank_fails_and_the_job_goes_on_from_memory(
    start: Callable[..., Job],
    tmp_path: Path,
    reference: dict[int, str],
    kind: str,
    ranks: list[int],
    options: dict[str, Any],
    at_most: int,
) -> None:
    """No disk holds anything by then: the steps are those that memory was scheduled to have, at most one more is lost,
    and all bits are right."""
    job = start(fault={"kind": kind, "ranks": ranks, "at": AT + 5}, **options)
    assert job.finish() == 0, job.errors.read_text()[-3000:]
    again = job.said("start", life=1)
    assert {line["tier"] for line in again} == {"memory"} and len({line["step"] for line in again}) == 1
    assert lost(job) <= at_most
    assert job.digests() == reference
    kinds = {"kill": "death", "segv": "death", "stop": "hang"}
    written = accounts(tmp_path)
    first = [one for one in written if one["kind"] == kinds.get(kind, kind)]
    assert {one["rank"] for one in first} & set(ranks), [(one["kind"], one["rank"]) for one in written]
    told = [fault["kind"] for line in again for fault in line["faults"]]
    assert kind not in ("kill", "segv") or "death" in told  # the next job attempt is notified immediately


def test_single_rank_job_continues_from_memory_after_an_exception(start: Callable[..., Job]) -> None:
    """The folder has the step as well, but the writer is still there, with memory that need not be read or made. All
    bits are right."""
    undisturbed = start(ranks=1, run=None)
    assert undisturbed.finish() == 0
    job = start(ranks=1, fault={"kind": "exception", "ranks": [0], "at": AT + 5})
    assert job.finish() == 0, job.errors.read_text()[-3000:]
    assert [(line["step"], line["tier"]) for line in job.said("start", life=1)] == [(AT + 4, "memory")]
    assert job.digests() == undisturbed.digests()


def test_memory_is_released_after_an_exception_without_a_restart(start: Callable[..., Job]) -> None:
    """When torchrun does not start the job again no writer stays behind, however long it would linger after a death."""
    job = start(ranks=1, restarts=0, fault={"kind": "exception", "ranks": [0], "at": AT + 5})
    assert job.finish() != 0
    assert job.reached(0) == AT + 4
    assert eventually(lambda: not writers(Path(os.environ["CKPT_RUNTIME_DIR"])))


def test_negative_control_without_memory_more_is_lost(start: Callable[..., Job], reference: dict[int, str]) -> None:
    """The same kill with the writers killed as well costs all steps since the last durable one."""
    job = start(fault={"kind": "stop", "ranks": [0, 1], "at": AT + 5}, durable=30)
    assert eventually(lambda: len(job.said("fault")) == 2, 60)
    for process in writers(Path(os.environ["CKPT_RUNTIME_DIR"])):
        process.kill()
    for pid in job.pids():
        os.kill(pid, signal.SIGKILL)
    assert job.finish() == 0
    assert lost(job) == 15 and job.digests() == reference


def test_emergency_saves_are_of_the_same_step_on_all_ranks(start: Callable[..., Job], tmp_path: Path) -> None:
    """However many ranks get requests, in any order or simultaneously, all save the same step, and training
    continues."""
    job = start(steps=100_000)
    assert eventually(lambda: bool(job.said("done", step=10)), 60), job.errors.read_text()[-2000:]
    pids, run = job.pids(), tmp_path / "run"

    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}

    def committed() -> list[int]:
        command = [sys.executable, "-m", "ckpt", "ls", str(run), "--json"]
        found = run_python(command, capture_output=True, env=environment, check=True)
        return [row["step"] for row in json.loads(found.stdout)["checkpoints"]]

    def ask() -> None:
        command = [sys.executable, "-m", "ckpt", "trigger", str(run), "--why", "test"]
        run_python(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    def both() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)

    def race() -> None:
        threads = [threading.Thread(target=ask), threading.Thread(target=both)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for trigger in (lambda: os.kill(pids[1], signal.SIGUSR1), both, ask, race):
        before = job.lines[-1]["step"]
        trigger()
        assert eventually(lambda least=before: max(committed(), default=0) > least), (
            before,
            committed(),
            job.errors.read_text()[-3000:],
            accounts(tmp_path)[-3:],
        )
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
    job.process.terminate()
    assert job.finish() != 0
    last = max(accounts(tmp_path), key=lambda one: one["time"])
    assert (last["kind"], last["exit_code"], last["advice"]) == ("signal", 143, "resubmit")
    assert max(committed()) >= job.reached(0) - 1
    assert [line for line in job.said("start") if line["life"]] == []
