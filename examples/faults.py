"""Inject real faults into a real training run, and watch it recover.

    python examples/faults.py                   # a menu
    python examples/faults.py kill hang         # these faults, one after the other
    python examples/faults.py --all             # every one of them: about four minutes
    python examples/faults.py --list
    python examples/faults.py --all --json      # also one JSON document on stdout; the other output goes to stderr

Two ranks train a small GPT under DDP and `torchrun`. Every step is saved to memory, every 50th to disk. Each fault is
real, and is injected once into a run of its own. The output shows which process detected it and when, what was saved,
which step was restored from where, and how long training was interrupted. Finally, all losses and a digest of every
tensor are compared, bit for bit, with an undisturbed run without everystep.

A fault that cannot be injected here is skipped, which does not count as a recovery.

Exit code: 0 if all chosen faults recovered as promised, 1 if any did not or none was injected, 2 for wrong usage,
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import train_gpt
from rich.console import Console
from rich.status import Status
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import ckpt
from ckpt.core.checkpoint.lease import key_of
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import channel
from ckpt.errors import CorruptError
from ckpt.guard.report import Fault, incidents

RANKS, VICTIM = 2, 1  # the victim is the rank that a fault strikes
STEPS, EVERY = 120, 50  # EVERY: steps between checkpoints on disk
PACE_S = 0.02  # minimum duration of a step
BATCH = 2
LATE, EARLY = 70, 30  # steps after which faults strike; EARLY leaves time for the ranks to agree on a step
DEADLINE_S = 1.5  # after the Checkpointer is created
HANG_S = 3.0
LIMIT_S = 90.0  # for one entry
LINGER_S = 60.0  # if this process is killed, the writers exit after this time
CGROUP_BYTES = 1 << 30
MACHINE_TIME_S = 0.005  # reports and our own clock are read one after the other


# -- the faults --


@dataclass(frozen=True)
class Entry:
    """One fault, and the recovery it must have.

    `deed`: the action on the run; `at`: the step after which it happens; `kinds`: expected kinds of fault reports, ()
    for none; `words`: expected text of the report; `may_lose`: maximum of lost steps; `goes_on`: True if training is
    not interrupted.
    """

    name: str
    title: str
    deed: str
    at: int = LATE
    kinds: tuple[str, ...] = ("death",)
    words: str = ""
    may_lose: int = 1
    goes_on: bool = False


ENTRIES = (
    Entry("kill", "one rank is killed with SIGKILL", "SIGKILL to rank 1", words="SIGKILL"),
    Entry("segv", "one rank reads an invalid address", "rank 1 reads address 0", words="Segmentation fault"),
    Entry("abort", "one rank aborts, as C++ does on a failed assertion", "rank 1 calls abort()", words="Aborted"),
    Entry(
        "oom-kill",
        "one rank allocates memory until the kernel's OOM killer ends it",
        "rank 1 allocates memory forever, in a cgroup of 1 GiB",
        kinds=("oom",),
        words="OOM killer",
    ),
    Entry(
        "exception",
        "an exception in the backward pass of one rank",
        "rank 1 raises in backward()",
        kinds=("exception",),
        words="ArithmeticError",
    ),
    Entry(
        "oom",
        "one rank allocates a tensor that does not fit",
        "rank 1 calls torch.empty() for one exbibyte",
        kinds=("oom",),
        words="ran out of memory",
    ),
    Entry("stop", "one rank is stopped, as by a debugger", "SIGSTOP to rank 1", kinds=("hang",), words="rank 1"),
    Entry(
        "hang",
        "one rank never joins the collective",
        "rank 1 sleeps forever, before backward()",
        kinds=("hang",),
        words="rank 1",
    ),
    Entry(
        "sigterm",
        "the scheduler ends the job, and it is resubmitted",
        "SIGTERM to torchrun and all ranks",
        kinds=("signal",),
        words="SIGTERM",
        may_lose=0,
    ),
    Entry(
        "usr1",
        "a signal that requests a save and continues",
        "SIGUSR1 to rank 1",
        at=EARLY,
        kinds=("signal",),
        words="SIGUSR1",
        may_lose=0,
        goes_on=True,
    ),
    Entry(
        "request",
        "a user requests a save from a shell",
        "ckpt trigger RUN",
        at=EARLY,
        kinds=("request",),
        words="coffee",
        may_lose=0,
        goes_on=True,
    ),
    Entry(
        "preemption",
        "the cloud announces that it will reclaim the machine in 2 minutes",
        "a notice in a metadata service of EC2 that this example simulates",
        at=EARLY,
        kinds=("preemption",),
        words="EC2",
        may_lose=0,
        goes_on=True,
    ),
    Entry(
        "deadline",
        "the job's time limit is near",
        "the job's time limit is 60 s away",
        kinds=("deadline",),
        may_lose=0,
        goes_on=True,
    ),
    Entry(
        "writer",
        "a writer is killed with SIGKILL: training does not notice",
        "SIGKILL to the writer of rank 1",
        kinds=(),
        may_lose=0,
        goes_on=True,
    ),
    Entry(
        "both",
        "trainer and writer of one rank are killed: its memory is lost",
        "SIGKILL to rank 1 and its writer",
        kinds=("exception", "death"),
        may_lose=EVERY,
    ),
)
BY_NAME = {entry.name: entry for entry in ENTRIES}
FROM_WITHIN = ("segv", "abort", "oom-kill", "exception", "oom", "hang")


# -- the training program: what torchrun starts --


def train(folder: str, fault: str, start: str, extra: str) -> None:
    """Train one rank in one job attempt. `start`: number of manual starts; `extra`: data that the fault needs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank = int(os.environ["RANK"])
    if fault == "oom-kill" and rank == VICTIM:
        Path(extra, "cgroup.procs").write_text(str(os.getpid()))  # before its writer starts there too
    dist.init_process_group("gloo")
    tell = Teller(rank, [int(start), int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
    tell("begin", pid=os.getpid())
    state = build(rank)
    if fault == "none":
        go_on(state, 0, tell, lambda step: None)
    else:
        first = tell.life == [0, 0]
        if fault == "deadline" and first:
            tell("struck", time=time.time() + DEADLINE_S)
        tiers = [ckpt.Tier(f"{folder}/run", every=EVERY, keep=50)]
        with ckpt.Checkpointer(
            state, tiers, triggers=triggers(fault, extra), memory=ckpt.Memory(every=1, linger_s=LINGER_S)
        ) as cp:
            began = time.perf_counter()
            done = cp.restore(default=0)
            assert cp.last_restore is not None
            tell("restored", step=done, tier=cp.last_restore.tier, seconds=time.perf_counter() - began)
            strikes = first and rank == VICTIM and fault in FROM_WITHIN
            go_on(state, done, tell, cp.step, fault if strikes else "")
    outcome = {"losses": state["losses"], "digests": train_gpt.digests(state)}
    Path(folder, f"outcome-{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


def triggers(fault: str, extra: str) -> object:
    """Return when to save on faults. The default is enough for most faults."""
    if fault in ("stop", "hang"):
        return [
            ckpt.triggers.on_signal(),
            ckpt.triggers.on_exception(),
            ckpt.triggers.on_oom(),
            ckpt.triggers.on_hang(action="exit", min_s=HANG_S),
        ]
    if fault == "preemption":
        return [ckpt.triggers.on_preemption("ec2", base_url=extra, poll_s=0.2)]
    if fault == "deadline":
        return [ckpt.triggers.on_deadline(in_s=60.0 + DEADLINE_S, before_s=60.0)]
    return "auto"


def build(rank: int) -> dict[str, Any]:
    """Build the complete training state. Each rank has its own batches and dropout, both determined by the state."""
    state = train_gpt.build(STEPS)
    state["model"] = nn.parallel.DistributedDataParallel(state["model"])
    state["batches"].manual_seed(rank)
    torch.manual_seed(rank)
    return state


def go_on(
    state: dict[str, Any], done: int, tell: Teller, step_done: Callable[[int], ckpt.Save | None], fault: str = ""
) -> None:
    """Train the remaining steps. `fault`: the fault that this rank injects into itself in one of them."""
    text, saves = train_gpt.corpus(), list[ckpt.Save]()
    for step in range(done + 1, STEPS + 1):
        began = time.perf_counter()
        strikes = bool(fault) and step == BY_NAME[fault].at + 1
        train_step(state, text, (lambda loss: strike(fault, loss, tell)) if strikes else None)
        save = step_done(step)
        saves = [*saves[-EVERY:], *([save] if save is not None else [])]
        tell("trained", step=step, staged=newest(saves, "staged", "durable"), committed=newest(saves, "durable"))
        time.sleep(max(0.0, PACE_S - (time.perf_counter() - began)))


def train_step(state: dict[str, Any], text: Tensor, strike: Callable[[Tensor], None] | None) -> None:
    """Run one update, with a fault in the middle if requested."""
    starts = torch.randint(len(text) - train_gpt.CONTEXT, (BATCH, 1), generator=state["batches"])
    window = text[starts + torch.arange(train_gpt.CONTEXT + 1)].long()
    logits = state["model"](window[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    state["optim"].zero_grad()
    if strike is not None:
        strike(loss)
    loss.backward()
    state["optim"].step()
    state["sched"].step()
    state["losses"].append(loss.item())


def newest(saves: list[ckpt.Save], *statuses: str) -> int:
    """Return the newest step with one of these statuses, or 0 if there is none."""
    return max((save.step for save in saves if save.status in statuses), default=0)


def strike(fault: str, loss: Tensor, tell: Teller) -> None:
    """Inject the fault into this rank."""
    tell("struck")
    if fault == "segv":
        ctypes.string_at(0)
    elif fault == "abort":
        os.abort()
    elif fault == "oom-kill":
        taken = []
        while True:
            taken.append(b"\1" * (16 << 20))
    elif fault == "exception":
        loss.register_hook(explode)
    elif fault == "oom":
        torch.empty(1 << 60, dtype=torch.uint8)
    elif fault == "hang":
        threading.Event().wait()


def explode(_: Tensor) -> None:
    raise ArithmeticError("an error in a gradient hook of this example")


class Teller:
    """Writes lines to stdout, each in one write, so that neither other ranks nor kills split them.
    `life`: number of the manual start, number of the restart."""

    def __init__(self, rank: int, life: list[int]) -> None:
        self.rank, self.life = rank, life

    def __call__(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "rank": self.rank, "life": self.life, "time": time.time(), **facts})
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


# -- what happened --


class FaultsError(Exception):
    """Raised when a run did not do its task."""


@dataclass
class Outcome:
    """The final state of one rank: the loss of each step, and a digest of every tensor by name."""

    losses: list[float]
    digests: dict[str, str]


@dataclass
class Story:
    """Everything known about one fault. Times are in seconds, after the fault unless stated otherwise.

    `at`: the last step that all ranks had finished when the fault struck; `finished`: the same when training was
    interrupted; `acknowledged`: the newest step that surviving processes had acknowledged; `durable`: complete steps on
    disk saved by the fault; `slowest_s`: the longest step after a fault that did not interrupt training.
    """

    name: str
    at: int | None = None
    perceived_by: str = ""
    perceived_s: float | None = None
    accounts: list[dict[str, Any]] = field(default_factory=list)
    in_memory: list[int] = field(default_factory=list)
    durable: list[int] = field(default_factory=list)
    durable_s: float | None = None
    restarts: int = 0
    finished: int = 0
    acknowledged: int = 0
    restored: int | None = None
    tier: str | None = None
    restore_s: float | None = None
    back_s: float | None = None
    slowest_s: float | None = None
    exit_codes: list[int] = field(default_factory=list)
    skipped: str = ""
    broken: str = ""

    @property
    def lost(self) -> int | None:
        """Return the finished steps that had to be repeated, or would be if the machine had failed then."""
        if self.restarts:
            return None if self.restored is None else max(0, self.finished - self.restored)
        if BY_NAME[self.name].kinds and self.at is not None:
            return max(0, self.at - max(self.durable, default=0))
        return 0 if self.at is not None else None

    @property
    def place(self) -> str:
        return {None: "nothing", "memory": "memory"}.get(self.tier, "disk")


def judge(story: Story, reference: Sequence[Outcome], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the ways in which a fault did not recover as promised; empty if it did."""
    entry = BY_NAME[story.name]
    if story.broken:
        return [story.broken]
    if story.at is None or story.back_s is None:
        return ["the fault was never injected" if story.at is None else "training never continued"]
    problems = [*judge_account(entry, story), *judge_restart(entry, story)]
    if story.lost is None or story.lost > entry.may_lose:
        verb = "was" if story.lost == 1 else "were"
        problems.append(f"{count(story.lost, 'step')} {verb} lost, more than the {entry.may_lose} allowed")
    if len(reference) != RANKS or len(outcomes) != RANKS:
        problems.append(f"{len(outcomes)} ranks ended, and {len(reference)} in the reference")
    for rank, (mine, theirs) in enumerate(zip(reference, outcomes, strict=False)):
        problems += [f"rank {rank}: {difference}" for difference in differences(mine, theirs)]
    return problems


def judge_account(entry: Entry, story: Story) -> list[str]:
    """Check the detection and the reports of the fault."""
    if story.perceived_s is None:
        return ["the fault was not detected" if entry.kinds else "no new writer was started"]
    if not entry.kinds:
        return [f"an unexpected report of {one['kind']} was written" for one in story.accounts]
    problems = []
    if not any(one["kind"] in entry.kinds and entry.words.lower() in one["summary"].lower() for one in story.accounts):
        problems.append(f"no report of {' or '.join(entry.kinds)} contains {entry.words!r}")
    if "hang" in entry.kinds and not any(one["suspects"] == [VICTIM] for one in story.accounts):
        problems.append(f"no report names only rank {VICTIM} as the hung rank")
    if entry.name == "sigterm" and any(one["exit_code"] != 128 + signal.SIGTERM for one in story.accounts):
        problems.append(f"a rank did not exit with code {128 + signal.SIGTERM}")
    return problems


def judge_restart(entry: Entry, story: Story) -> list[str]:
    """Check the number of restarts and the restored step."""
    problems = []
    if story.exit_codes[-1:] != [0] or any(code == 0 for code in story.exit_codes[:-1]):
        problems.append(f"torchrun ended with exit code {' then '.join(map(str, story.exit_codes))}")
    if entry.goes_on:
        if story.restarts:
            problems.append(f"training was restarted {count(story.restarts, 'time')}")
        return problems
    if story.restarts != 1:
        problems.append(f"training was restarted {count(story.restarts, 'time')}, not once")
    if story.restored is not None and story.restored < story.acknowledged:
        problems.append(f"step {story.acknowledged} was acknowledged, and step {story.restored} restored")
    if entry.name == "both" and story.place != "disk":
        problems.append(f"step {story.restored} came from {story.place}, though the memory of rank {VICTIM} was lost")
    return problems


def differences(reference: Outcome, outcome: Outcome) -> list[str]:
    """Return the losses and tensors in which two outcomes differ; empty if they are equal."""
    problems = []
    if len(reference.losses) != len(outcome.losses):
        problems.append(f"{len(outcome.losses)} losses, not {len(reference.losses)}")
    pairs = enumerate(zip(reference.losses, outcome.losses, strict=False), start=1)
    problems += [f"loss of step {step}: {y!r}, not {x!r}" for step, (x, y) in pairs if x != y]
    names = sorted(reference.digests.keys() | outcome.digests.keys())
    return problems + [f"tensor {name}" for name in names if reference.digests.get(name) != outcome.digests.get(name)]


class Record:
    """The events that the ranks of one job sent, by job attempt and rank."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.lives: list[list[int]] = []
        self.struck: float | None = None
        self._trained: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        self._restored: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}

    def add(self, line: dict[str, Any]) -> None:
        life, rank = tuple(line["life"]), line["rank"]
        if line["event"] == "begin":
            self.pids[rank] = line["pid"]
            if line["life"] not in self.lives:
                self.lives.append(line["life"])
        elif line["event"] == "struck":
            self.struck = line["time"] if self.struck is None else min(self.struck, line["time"])
        elif line["event"] == "restored":
            self._restored.setdefault(life, {})[rank] = line
        else:
            steps = self._trained.setdefault(life, {}).setdefault(rank, {})
            steps[line["step"]] = line

    def finished(self, life: Sequence[int], until: float = float("inf")) -> int:
        """Return the last step that all ranks had finished at that time, or 0 if there is none."""
        ranks = self._trained.get(tuple(life), {})
        steps = [[s for s, line in one.items() if line["time"] <= until] for one in ranks.values()]
        return min((max(one, default=0) for one in steps), default=0) if len(steps) == RANKS else 0

    def said(self, life: Sequence[int], what: str) -> list[int]:
        """Return the last staged or committed step of each rank."""
        return [one[max(one)][what] for one in self._trained.get(tuple(life), {}).values()]

    def steps(self, life: Sequence[int]) -> list[tuple[int, float]]:
        """Return the steps that all ranks finished, with the finish time of the last rank."""
        ranks = self._trained.get(tuple(life), {})
        common = set.intersection(*map(set, ranks.values())) if len(ranks) == RANKS else set()
        return [(step, max(one[step]["time"] for one in ranks.values())) for step in sorted(common)]

    def restored(self, life: Sequence[int]) -> list[dict[str, Any]]:
        return list(self._restored.get(tuple(life), {}).values())


# -- one entry after the other --


class Faults:
    """Starts jobs, one at a time, and injects faults. `home`: the folder for all folders and sockets."""

    def __init__(self, console: Console, home: Path) -> None:
        self.console, self.home = console, home
        self.reference: list[Outcome] = []
        self.stories: list[Story] = []
        self.problems: dict[str, list[str]] = {}
        self._folder = home
        self._job: subprocess.Popen[bytes] | None = None
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._late = False
        self._status: Status | None = None

    def play(self, entries: Sequence[Entry]) -> None:
        with self.console.status("") if self.console.is_terminal else contextlib.nullcontext() as self._status:
            self.say(f"The reference: {RANKS} ranks train {STEPS} steps, without faults and without everystep.")
            self._open("reference")
            for line in self._lines("none", 0, ""):
                self._show(line)
            self.reference = self._outcomes()
            if self._job is None or self._job.returncode != 0 or len(self.reference) != RANKS:
                raise FaultsError(f"the reference cannot be trained:\n{self._errors()}")
            for entry in entries:
                self._play(entry)

    def _play(self, entry: Entry) -> None:
        self.say("")
        self.say(f"{entry.name}: {entry.title}", "bold")
        story = Story(entry.name)
        self.stories.append(story)
        with contextlib.ExitStack() as stack:
            extra, injected = "", Injected(entry, self)
            if entry.name == "oom-kill":
                if (group := stack.enter_context(cgroup(f"everystep-{os.getpid()}", CGROUP_BYTES))) is None:
                    story.skipped = "not possible here: cannot create a cgroup with a memory limit"
                    self.say(f"  skipped: {story.skipped}", "yellow")
                    return
                extra = str(group)
            elif entry.name == "preemption":
                injected.cloud = stack.enter_context(Cloud())
                extra = injected.cloud.url
            self._open(entry.name)
            watchdog = threading.Timer(LIMIT_S, self._give_up)
            watchdog.daemon = True
            watchdog.start()
            stack.callback(watchdog.cancel)
            stack.callback(self._kill_all)
            self._run(entry, story, injected, extra)
            found = self.problems[entry.name] = judge(story, self.reference, self._outcomes())
        self._say_verdict(found)

    def _run(self, entry: Entry, story: Story, injected: Injected, extra: str) -> None:
        """Run the job from its first start to its last end."""
        record = injected.record
        for start in range(2 if entry.name == "sigterm" else 1):
            for line in self._lines(entry.name, start, extra):
                record.add(line)
                self._show(line)
                if line["event"] == "trained" and line["life"] == [0, 0]:
                    injected.look(line["step"])
                injected.tell(story)
            assert self._job is not None
            story.exit_codes.append(self._job.returncode)
        if self._late:
            story.broken = f"it did not finish within {LIMIT_S:.0f} s:\n{self._errors()}"
        elif story.exit_codes[-1] != 0:
            story.broken = f"torchrun ended with exit code {story.exit_codes[-1]}:\n{self._errors()}"
        injected.finish(story)

    def _show(self, line: dict[str, Any]) -> None:
        """Update the status line on a terminal."""
        if self._status is not None:
            what = {"trained": "step", "restored": "restored step"}.get(line["event"])
            if what is not None:
                self._status.update(f"{self._folder.name}: {what} {line['step']} of {STEPS}")
            elif line["event"] == "begin":
                self._status.update(f"{self._folder.name}: rank {line['rank']} starts ...")

    def _say_verdict(self, problems: list[str]) -> None:
        for problem in problems[:10]:
            self.say(f"  wrong: {problem}", "red")
        if problems:
            self.say(f"  FAILED: {len(problems)} {'thing is' if len(problems) == 1 else 'things are'} wrong", "red")
            return
        losses, tensors = len(self.reference[0].losses), len(self.reference[0].digests)
        self.say(f"  recovered: all {losses} losses and all {tensors} tensors are equal on both ranks, bit for bit")

    # -- processes --

    def _open(self, name: str) -> None:
        """Create a folder and a socket folder for this entry alone."""
        self._folder = self.home / name
        (self._folder / "sockets").mkdir(parents=True, mode=0o700)

    @property
    def run(self) -> Path:
        return self._folder / "run"

    def _lines(self, fault: str, start: int, extra: str) -> Iterator[dict[str, Any]]:
        """Start a job, and yield the events of its ranks until it ends."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        words = ["--nproc-per-node", str(RANKS), __file__, "train", str(self._folder), fault, str(start), extra]
        with self._log.open("ab") as errors:
            self._job = subprocess.Popen(
                [*torchrun, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only this process, which cleans up
                env=self.environment,
            )
        assert self._job.stdout is not None
        with self._job.stdout as stdout:
            yield from map(json.loads, stdout)
        self._job.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "CKPT_RUNTIME_DIR": str(self._folder / "sockets"),  # so that only this job finds its writers
            "TMPDIR": str(self._folder),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted ranks connect to dead ones
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }

    def job_pid(self) -> int:
        assert self._job is not None
        return self._job.pid

    def ask(self, *words: str) -> None:
        """Start the command `ckpt`, and do not wait for it."""
        command = [sys.executable, "-m", "ckpt", *words]
        with self._log.open("ab") as log:
            found = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self._helpers.append(found)

    def committed(self) -> set[int]:
        """Return the steps committed with the manifests of all ranks, including those deleted since."""
        records = [json.loads(path.read_text()) for path in (self.run / "log").glob("*.json")]
        bodies = [record["body"] for record in records if record["type"] == "COMMIT"]
        return {CheckpointId.parse(body["checkpoint"]).step for body in bodies if len(body["manifests"]) == RANKS}

    def accounts(self) -> list[Fault]:
        """Return the fault reports that `ckpt faults` shows."""
        found = []
        for path in (self.run / "faults").glob("*.json"):
            with contextlib.suppress(CorruptError, OSError, ValueError):  # being written
                found.append(Fault.from_json(json.loads(path.read_text())))
        return found

    def writer_key(self, rank: int) -> str:
        return key_of(self.run, rank)

    def find_writer(self, rank: int) -> int | None:
        """Return a writer's PID. Its arguments contain the key of its run. Its name shows when it is ready."""
        key = self.writer_key(rank)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if key in process.cmdline() and process.name() == channel.AT_WORK:
                    return process.pid
        return None

    def writer_pid(self, rank: int) -> int:
        found = self.find_writer(rank)
        if found is None:
            raise FaultsError(f"rank {rank} has no writer")
        return found

    def processes(self) -> list[psutil.Process]:
        """Return all processes started here, whoever their parents are now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                folder = process.environ().get("CKPT_RUNTIME_DIR", "")
                if folder.startswith(f"{self.home}/") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _kill_all(self) -> None:
        """Kill torchrun first, so that it restarts nothing, and then all other processes."""
        end = time.monotonic() + 10.0
        if self._job is not None:
            self._job.kill()
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > end:
                self.say("A process of this example cannot be killed.", "bold red")
                break
            time.sleep(0.01)
        for process in (*self._helpers, *([self._job] if self._job is not None else [])):
            process.wait()

    def _give_up(self) -> None:
        self._late = True
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def stop(self) -> None:
        """Leave no process behind."""
        self._kill_all()

    @property
    def _log(self) -> Path:
        return self._folder / "job.log"

    def _errors(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def _outcomes(self) -> list[Outcome]:
        paths = sorted(self._folder.glob("outcome-*.json"))
        return [Outcome(**json.loads(path.read_text())) for path in paths]

    # -- the end --

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def verdict(self, story: Story) -> str:
        if story.skipped:
            return "skipped"
        return "recovered" if self.problems.get(story.name) == [] else "FAILED"

    def table(self) -> Table:
        heads = ("fault", "detected after", "lost steps", "next step after", "of which restore", "verdict")
        table = Table(*heads, box=None)
        for story in self.stories:
            times = (show_s(story.perceived_s), show(story.lost), show_s(story.back_s), show_s(story.restore_s))
            verdict = self.verdict(story)
            style = {"recovered": "green", "skipped": "yellow"}.get(verdict, "bold red")
            table.add_row(story.name, *times, verdict, style=style if verdict != "recovered" else "")
        return table

    def document(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        entries = [
            {
                **asdict(story),
                "title": BY_NAME[story.name].title,
                "lost": story.lost,
                "may_lose": BY_NAME[story.name].may_lose,
                "goes_on": BY_NAME[story.name].goes_on,
                "verdict": self.verdict(story).lower(),
                "problems": self.problems.get(story.name, []),
            }
            for story in self.stories
        ]
        return {"ok": self.code == 0, "ranks": RANKS, "steps": STEPS, "every": EVERY, "entries": entries}

    @property
    def code(self) -> int:
        verdicts = [self.verdict(story) for story in self.stories]
        return 0 if "recovered" in verdicts and "FAILED" not in verdicts else 1


class Injected:
    """Injects one fault into one run, and prints the consequences as soon as they are known."""

    def __init__(self, entry: Entry, faults: Faults) -> None:
        self.entry, self.faults, self.record = entry, faults, Record()
        self.cloud: Cloud | None = None
        self._writer: int | None = None  # before it was killed
        self._told: set[str] = set()

    def look(self, step: int) -> None:
        """Inject the fault if this finished step is the one before it."""
        done = self.record.struck is not None or self.entry.name in FROM_WITHIN or self.entry.name == "deadline"
        if step < self.entry.at or done or len(self.record.pids) < RANKS:
            return
        writer = self.faults.writer_pid(VICTIM) if self.entry.name in ("writer", "both") else 0
        self._writer = self.faults.find_writer(VICTIM)
        self.record.struck = time.time()
        with contextlib.suppress(ProcessLookupError):
            self._strike(self.record.pids[VICTIM], writer)

    def _strike(self, victim: int, writer: int) -> None:
        """Inject the fault from outside the rank."""
        name = self.entry.name
        if name == "sigterm":
            for pid in (*self.record.pids.values(), self.faults.job_pid()):
                os.kill(pid, signal.SIGTERM)
        elif name == "request":
            self.faults.ask("trigger", str(self.faults.run), "--why", "coffee")
        elif name == "preemption":
            assert self.cloud is not None
            self.cloud.announced = True
        elif name == "both":
            os.kill(writer, signal.SIGKILL)
            os.kill(victim, signal.SIGKILL)
        else:
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "usr1": signal.SIGUSR1, "writer": signal.SIGKILL}
            os.kill(writer or victim, number[name])

    # -- the consequences --

    def tell(self, story: Story) -> None:
        """Print what is known by now, each fact once."""
        if self.record.struck is None:
            return
        if self._once("fault") and (ahead := self.record.struck - time.time()) > 0.1:
            self.faults.say(f"  in {ahead:.1f} s: {self.entry.deed}", "red")
        elif self._told == {"fault"} and time.time() < self.record.struck:
            return
        elif self._once("struck"):
            at = self.record.finished([0, 0], self.record.struck)
            self.faults.say(f"  after step {at}: {self.entry.deed}", "red")
        again = self.record.lives[1:]
        restored = bool(again) and len(self.record.restored(again[0])) == RANKS
        if (restored or self.entry.goes_on) and "perceived" not in self._told:
            self._perceive(story)
            if story.perceived_s is not None and self._once("perceived"):
                self._say_perceived(story)
        if restored and self._once("restored"):
            self._restore(story)
            self.faults.say(f"  restored step {story.restored} from {story.place}, {self._lost(story)}", "green")
        if again and self.record.steps(again[0]) and self._once("back"):
            self._measure(story)
            self.faults.say(
                f"  next step {show_s(story.back_s)} after the fault; restore() took {show_s(story.restore_s)} of it"
            )

    def finish(self, story: Story) -> None:
        """Complete the story when all fault reports exist."""
        self._perceive(story)
        if story.perceived_s is not None and self._once("perceived"):
            self._say_perceived(story)
        self._restore(story)
        self._measure(story)
        if self.entry.goes_on and self.entry.kinds:
            story.durable = sorted(self.faults.committed() & set(story.durable))
        if self.entry.goes_on and story.back_s is not None:
            slowest = f"the slowest step since then took {show_s(story.slowest_s)}"
            lost = f"{self._lost(story)}, " if self.entry.kinds else ""
            self.faults.say(f"  {lost}training continued: {slowest}", "green")

    def _once(self, what: str) -> bool:
        new = what not in self._told
        self._told.add(what)
        return new

    def _perceive(self, story: Story) -> None:
        struck = self.record.struck
        if struck is None:
            return
        found = [a for a in self.faults.accounts() if a.when > struck - MACHINE_TIME_S and a.kind != "memory"]
        if not self.entry.kinds:
            story.accounts = [account.to_json() for account in found]
            number = self.faults.find_writer(VICTIM)
            if story.perceived_s is None and number is not None and number != self._writer:
                story.perceived_by, story.perceived_s = "the trainer, which started a new writer", time.time() - struck
            return
        for incident in incidents(found):
            if any(account.kind in self.entry.kinds for account in incident):
                first = incident[0]
                story.accounts = [account.to_json() for account in incident]
                story.perceived_by = f"the {first.by} of rank {first.rank} ({first.how})"
                story.perceived_s = first.when - struck
                break
        else:
            return
        ours = [account for account in found if account.kind in self.entry.kinds or account.ending]
        saved = [(a.when - struck + one.seconds, one) for a in ours for one in a.saved if not one.error]
        story.in_memory = sorted({one.step for _, one in saved if one.tier == "memory"})
        story.durable = sorted({one.step for _, one in saved if one.tier != "memory"})
        story.durable_s = max(
            (when for when, one in saved if one.tier != "memory" and one.step == story.durable[-1]), default=None
        )

    def _say_perceived(self, story: Story) -> None:
        self.faults.say(f"  detected after {show_s(story.perceived_s)} by {story.perceived_by}")
        for account in story.accounts:
            if account["kind"] in self.entry.kinds:
                self.faults.say(f"    {' '.join(account['summary'].split())[:300]}", "dim")
                break
        if story.in_memory or story.durable:
            kept = [f"{named(story.in_memory)} in memory"] if story.in_memory else []
            kept += [f"{named(story.durable)} on disk {show_s(story.durable_s)} after"] if story.durable else []
            self.faults.say(f"  saved: {', '.join(kept)}")

    def _restore(self, story: Story) -> None:
        record, lives = self.record, self.record.lives
        if record.struck is None:
            return
        story.at = record.finished([0, 0], record.struck)
        story.restarts, story.finished = len(lives) - 1, record.finished([0, 0])
        lines = record.restored(lives[1]) if len(lives) > 1 else []
        if len(lines) == RANKS:
            story.restored, story.tier = lines[0]["step"], lines[0]["tier"]
            story.restore_s = max(line["seconds"] for line in lines)
            if self.entry.name == "both":
                story.acknowledged = max(record.said([0, 0], "committed"), default=0)
            else:
                story.acknowledged = min(record.said([0, 0], "staged"), default=0)

    def _measure(self, story: Story) -> None:
        """Measure from the fault to the first new step that all ranks have finished."""
        record, struck = self.record, self.record.struck
        if struck is None:
            return
        steps = record.steps(record.lives[1] if len(record.lives) > 1 else record.lives[0])
        since = [when for _, when in steps if when > struck]
        story.back_s = since[0] - struck if since else None
        if len(record.lives) == 1 and len(since) > 1:
            story.slowest_s = max(b - a for a, b in itertools.pairwise(since))

    def _lost(self, story: Story) -> str:
        return f"{count(story.lost, 'step')} lost" if story.lost else "nothing lost"


# -- what some faults need --


class Cloud:
    """Simulates EC2's metadata service for preemption notices: on loopback, with a token like the real one."""

    def __init__(self) -> None:
        self.announced = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer(200, "token")

            def do_GET(self) -> None:
                asked = self.path == "/latest/meta-data/spot/instance-action"
                if asked and cloud.announced and self.headers.get("X-aws-ec2-metadata-token") == "token":
                    self._answer(200, json.dumps({"action": "terminate", "time": cloud.time}))
                else:
                    self._answer(404, "")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def __enter__(self) -> Cloud:
        self.time = (datetime.now(UTC) + timedelta(seconds=120)).strftime("%Y-%m-%dT%H:%M:%SZ")
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def cgroup(name: str, limit: int) -> Iterator[Path | None]:
    """Create a cgroup with this memory limit and without swap; yield None if that is not possible."""
    made = None
    for parent in cgroup_parents():
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if any(set_limit(folder, *files, limit) for files in LIMIT_FILES):
            made = folder
            break
        folder.rmdir()
    try:
        yield made
    finally:
        end = time.monotonic() + 5.0
        while made is not None and time.monotonic() < end:
            try:
                made.rmdir()
                break
            except OSError:  # the dead processes are still being removed
                time.sleep(0.05)


LIMIT_FILES = (("memory.max", "memory.swap.max", 0), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", None))


def cgroup_parents() -> Iterator[Path]:
    """Return the folders for a new memory cgroup.
    In v1 it is below our own. In v2 it is a sibling, since a cgroup with processes cannot have children."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield root / "memory" / path.strip("/")
            elif number == "0" and not controllers:
                own = root / path.strip("/")
                yield from (own.parent, own) if own != root else (root,)


def set_limit(folder: Path, memory: str, swap: str, swap_bytes: int | None, limit: int) -> bool:
    """Set the limit; return False if this cgroup has none."""
    try:
        if not (folder / memory).exists():
            return False
        (folder / memory).write_text(str(limit))
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a kernel without swap has no such file
        if (folder / swap).exists():
            (folder / swap).write_text(str(limit if swap_bytes is None else swap_bytes))
    return True


# -- formatting --


def count(number: int | None, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def named(numbers: list[int]) -> str:
    if not numbers:
        return "nothing"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers))}"


def show(value: object) -> str:
    return "" if value is None else str(value)


def show_s(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.0f} ms"


# -- choosing --


class UnknownError(Exception):
    """Raised for an unknown fault name."""


def choose(words: Sequence[str]) -> list[Entry]:
    """Choose faults by name or number, each once; `all` chooses all."""
    found: list[Entry] = []
    for word in words:
        if word == "all":
            found += ENTRIES
        elif word in BY_NAME:
            found.append(BY_NAME[word])
        elif word.isascii() and word.isdigit() and 1 <= int(word) <= len(ENTRIES):
            found.append(ENTRIES[int(word) - 1])
        else:
            raise UnknownError(f"unknown fault {word!r}: choose from {', '.join(BY_NAME)}, or all")
    return list(dict.fromkeys(found))


def menu(console: Console) -> None:
    table = Table("", "fault", "what happens", box=None)
    for number, entry in enumerate(ENTRIES, start=1):
        table.add_row(str(number), entry.name, entry.title)
    console.print(table)


def ask(console: Console) -> list[Entry]:
    """Ask until the input is valid; return an empty list at its end."""
    menu(console)
    while True:
        try:
            words = console.input("Which? Names or numbers, or all: ").replace(",", " ").split()
        except EOFError:
            return []
        try:
            if words:
                return choose(words)
        except UnknownError as error:
            console.print(str(error), style="red", highlight=False, markup=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names or numbers, see --list")
    parser.add_argument("--all", action="store_true", help="every fault")
    parser.add_argument("--list", action="store_true", help="list all faults")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout at the end")
    parser.add_argument("--keep", action="store_true", help="keep the folder with runs and logs")
    options = parser.parse_args()
    try:
        options.entries = choose([*options.faults, *(["all"] if options.all else [])])
    except UnknownError as error:
        parser.error(str(error))
    if not options.entries and not options.list and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("name faults, or use --all; --list shows their names")
    return options


def main() -> int:
    options = parse()
    console = Console(stderr=options.json)
    if options.list:
        if options.json:
            print(json.dumps([{"name": entry.name, "title": entry.title} for entry in ENTRIES], indent=1))
        else:
            menu(console)
        return 0
    # Clean up on every signal except SIGKILL.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        entries = options.entries or ask(console)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if not entries:
        return 2
    return play(console, entries, as_json=options.json, keep=options.keep)


def play(console: Console, entries: Sequence[Entry], *, as_json: bool, keep: bool) -> int:
    """Inject all chosen faults, and return the exit code."""
    home = Path(tempfile.mkdtemp(prefix="everystep-faults-"))
    faults = Faults(console, home)
    try:
        faults.play(entries)
        console.print()
        console.print(faults.table())
        if as_json:
            print(json.dumps(faults.document(), indent=1))
        return faults.code
    except FaultsError as error:
        console.print(f"FAILED: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # cleanup is quick, and must not be interrupted
        faults.stop()
        if keep:
            console.print(f"Kept: {home}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"] and "RANK" in os.environ:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
