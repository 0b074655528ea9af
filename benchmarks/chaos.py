"""The cost of faults and saving: the same job under the same random faults, with everystep and with peers.

    python benchmarks/chaos.py [--mtbf 40] [--faults 8] [--seed 1] [--only NAME ...] [--json FILE] [--markdown]
    python benchmarks/chaos.py --report FILE --markdown     # the tables of an earlier run
    python benchmarks/chaos.py --quick                      # a small model, three faults: a minute per contender

One process trains under `torchrun`. It is killed, hung, starved of memory and sent SIGTERM, on a schedule that depends
only on the seed. The intervals of the schedule count training time since the job resumed, so all contenders have the
same exposure. Every second from the first step to the last belongs to one part:

- *perceive*: from the fault until the process has ended. Peers have no hang detection, so a watchdog of this benchmark
  ends their hung processes. everystep has `on_hang(action="exit")`, and its emergency save and exit count here too.
- *restart*: from then to the first new step, without the restore: torchrun, imports, the model, opening the
  checkpointer, and the extra duration of the first step. A separate table splits restarts and saving into stages.
- *restore*. *recompute*: the step that the fault interrupted, and the repeated steps at the usual step time.
- *saving*: the duration of save calls, and the extra duration of steps during a save and up to two steps after it.
- *other*: how much steps without a save in progress deviate from the usual step time: the noise of the machine.
- *training*: the rest, which is the number of steps times the usual step time.

Effective training time is 1 - (perceive + restart + restore + recompute + saving) / wall-clock.

The usual step time is the median of all quiet steps (steps without a save in progress). They come from a run without
saving right before a contender's run, from that run itself if it has any, and from after its last step. All three
are reported.

Peers save every N steps, at their optimum by Young and Daly: N = sqrt(2 x cost x MTBF) / step. The cost is the
training time that a save takes, measured right before as in `contest.py`. Peers resume from the newest complete
checkpoint, and do nothing on a signal or an exception, as in their documentation.
At the end, every contender's weights are compared, bit for bit, with those of an undisturbed run of as many steps.

The cost of saving is a difference between two step times, so nothing else should use the machine. everystep with its
default save interval has no quiet step, so all noise of its run counts as saving. The report states where the noise
exceeds 5 %.

Exit status 1: a contender failed, or has different weights.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "backends")]  # if not installed

from figures import environment, goal, goal_table, machine, seconds, table, tell, times

Json = dict[str, Any]

HERE = Path(__file__).parent
KINDS = ("SIGKILL", "hang", "OOM", "SIGTERM")
FLOOR_S = 2.0  # between the first step after a fault and the next fault
TAIL_S = 5.0  # of training after the last fault, at least
START_S = 120.0  # until a process finishes its first step
REFERENCE_S = 3600.0
PARTS = ("perceive", "restart", "restore", "recompute", "saving", "other")
STAGES = ("launcher", "imports", "model", "opening", "loop", "first step")  # of a restart
SAVING = ("calls", "soon after a start", "later")  # what saving took: the calls themselves, and the steps during saves
SOON = 8  # steps
FIGURE = ("restore", "recompute", "saving")  # the parts that depend on the way of saving
AT_MOST = 0.2  # of the best peer's figure
LEDGER_WITHIN = 0.02
NOISE = 0.05  # share of the wall-clock or of a step; above it, figures mostly show the noise of the machine
ADDS_UP_S = 1e-3
OWN_ROOM_S = 30.0  # per contender, for everything except exposure and faults
OUTAGE_S = 7.0  # of a fault, about


class Failed(Exception):
    """Raised when a contender did not do its task."""


class Skipped(Exception):
    """Raised when a contender is not available here."""


@dataclass(frozen=True)
class Contender:
    """A library and how it saves.

    `peer`: its name in `peers/`; `auto`: True if everystep measures its save interval."""

    peer: str
    auto: bool = False

    @property
    def ours(self) -> bool:
        return self.peer == "everystep"


CONTENDERS = {
    "torch.save": Contender("torch.save"),
    "DCP async": Contender("DCP async, thread"),
    "torch_checkpointing": Contender("torch_checkpointing"),
    "everystep": Contender("everystep"),
    "everystep, auto": Contender("everystep", auto=True),
    "DCP async, process": Contender("DCP async, process"),
}
BY_DEFAULT = list(CONTENDERS)[:5]
FIXED, AUTO = "everystep", "everystep, auto"


@dataclass(frozen=True)
class Plan:
    """The settings of a run, in seconds.
    `watchdog`: time without a step after which the process is killed; `min_s`: of everystep's `on_hang`."""

    mtbf: float = 40.0
    faults: int = 8
    seed: int = 1
    watchdog: float = 10.0
    min_s: float = 3.0
    size: str = "full"
    floor: float = FLOOR_S
    tail: float = TAIL_S


# -- pure: the schedule, the save interval, and the part that each second belongs to --


def schedule(plan: Plan) -> list[tuple[float, str]]:
    """Return intervals and kinds of faults.
    Intervals are exponential, one from each n-th of the distribution, shuffled: even a few have the requested mean.
    Each kind occurs equally often."""
    rng, n = random.Random(f"chaos {plan.seed}"), plan.faults
    intervals = [-plan.mtbf * math.log(1 - (i + rng.random()) / n) for i in range(n)]
    kinds = [KINDS[i % len(KINDS)] for i in range(n)]
    rng.shuffle(intervals)
    rng.shuffle(kinds)
    return [(round(max(plan.floor, interval), 3), kind) for interval, kind in zip(intervals, kinds, strict=True)]


def best_every(cost_s: float, mtbf_s: float, step_s: float) -> int:
    """Return Young's interval in steps."""
    return max(1, round(math.sqrt(2 * max(cost_s, 0.0) * mtbf_s) / step_s))


@dataclass(frozen=True)
class Hit:
    """A fault as its injector saw it. `at`: when it struck; `gone`: when the process had ended; `by`: what ended it."""

    kind: str
    at: float
    gone: float
    by: str = "itself"


@dataclass
class Interruption:
    """The cost of one fault, in seconds.
    `step`: the last one finished before; `lost`: the steps to repeat; `stages`: the durations of the stages of the
    restart."""

    kind: str
    by: str
    step: int
    restored: int
    source: str
    perceive: float
    restart: float
    restore: float
    recompute: float
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        return self.step - self.restored


@dataclass
class Bill:
    """The part that every second of a contender's run belongs to: `training` + the parts = `wall`.
    `usual_s`: of a step; `quiet`: the number of quiet steps in the run, with their median `own_s`; `saving_in`: the
    duration of saving, by `SAVING`."""

    steps: int
    usual_s: float
    wall: float
    training: float
    parts: dict[str, float]
    interruptions: list[Interruption]
    first_start_s: float = 0.0
    saves: int = 0
    quiet: int = 0
    own_s: float | None = None
    saving_in: dict[str, float] = field(default_factory=dict)

    @property
    def invalid(self) -> float:
        """Sum all parts except the noise of the machine."""
        return sum(value for name, value in self.parts.items() if name != "other")

    @property
    def effective(self) -> float:
        return 1.0 - self.invalid / self.wall

    @property
    def figure(self) -> float:
        return sum(self.parts[name] for name in FIGURE)


def lives_of(events: Sequence[Json]) -> list[list[Json]]:
    """Return the events of each job attempt."""
    found: list[list[Json]] = []
    for event in events:
        if event["what"] == "born":
            found.append([])
        found[-1].append(event)
    return found


def bill_of(events: Sequence[Json], hits: Sequence[Hit], usual_s: float) -> Bill:
    """Compute the bill from the lines of `chaos_job.py` in order, and the faults. Raise Failed if they do not match."""
    lives = lives_of(events)
    if len(lives) != len(hits) + 1 or not all(steps_of(life) for life in lives):
        raise Failed(f"{len(hits)} faults, and {len(lives)} processes, of which not all came to a step")
    parts, saving, training = dict.fromkeys(PARTS, 0.0), dict.fromkeys(SAVING, 0.0), 0.0
    interruptions: list[Interruption] = []
    mark, clock, saves = 0, steps_of(lives[0])[0]["begin"], 0
    begun = clock
    for number, life in enumerate(lives):
        restored, steps = one(life, "restored"), steps_of(life)
        if number:
            hit = hits[number - 1]
            interruptions.append(interruption(hit, clock, lives[number - 1], life, mark, usual_s, parts))
            clock = steps[0]["begin"]
        called = {event["step"]: event["at"] for event in life if event["what"] == "called"}
        expected = list(range(restored["step"] + 1, restored["step"] + 1 + len(steps)))
        if [step["step"] for step in steps] != expected or restored["step"] > mark:
            raise Failed(f"step {restored['step']} was restored, {mark} were done, and then not one after the other")
        for index, step in enumerate(steps):
            parts["other"] += step["begin"] - clock
            beyond = step["done"] - step["begin"] - usual_s
            if index == 0:
                parts["restart" if number else "other"] += beyond
                if number:
                    interruptions[-1].restart += beyond
                    interruptions[-1].stages["first step"] = beyond
            elif step["load"] in ("busy", "after"):
                parts["saving"] += beyond
                saving["soon after a start" if index < SOON else "later"] += beyond
            else:
                parts["other"] += beyond
            if step["step"] <= mark:
                parts["recompute"] += usual_s
                interruptions[-1].recompute += usual_s
            else:
                training += usual_s
                mark = step["step"]
            clock = called.get(step["step"], step["done"])
            parts["saving"] += clock - step["done"]
            saves += step["due"]
    wall = clock - begun
    if abs(training + sum(parts.values()) - wall) > ADDS_UP_S:
        raise Failed(f"the parts are {training + sum(parts.values()):.6f} s in all, and it took {wall:.6f} s")
    quiet = quiet_of(events)
    own = statistics.median(quiet) if quiet else None
    first = begun - lives[0][0]["born"]
    saving["calls"] = parts["saving"] - sum(saving.values())
    return Bill(mark, usual_s, wall, training, parts, interruptions, first, saves, len(quiet), own, saving)


def interruption(
    hit: Hit, clock: float, before: list[Json], after: list[Json], mark: int, usual_s: float, parts: dict[str, float]
) -> Interruption:
    """Measure from the last finished event, at `clock`, to the first new step, and add the durations to `parts`."""
    last, restored, first = steps_of(before)[-1], one(after, "restored"), steps_of(after)[0]
    in_save = (
        last["due"]
        and clock == last["done"]
        and not any(event["what"] == "called" and event["step"] == last["step"] for event in before)
    )
    struck = min(max(hit.at, clock), hit.gone)
    cut = struck - clock  # of the interrupted step, or of an interrupted save call
    perceive = hit.gone - struck
    restore = restored["at"] - restored["began"]
    restart = restored["began"] - hit.gone + first["begin"] - restored["at"]
    parts["saving" if in_save else "recompute"] += cut
    for name, value in (("perceive", perceive), ("restart", restart), ("restore", restore)):
        parts[name] += value
    lost_s = 0.0 if in_save else cut
    source = restored["source"] or "nothing"
    stages = stages_of(hit.gone, after)
    return Interruption(hit.kind, hit.by, mark, restored["step"], source, perceive, restart, restore, lost_s, stages)


def stages_of(gone: float, life: Sequence[Json]) -> dict[str, float]:
    """Return the durations of the stages of a restart, except its first step."""
    born, restored, first = one(life, "born"), one(life, "restored"), steps_of(life)[0]
    built = next((event["at"] for event in life if event["what"] == "built"), born["at"])
    marks = [gone, born["born"], born["at"], built, restored["began"]]
    took = [after - before for before, after in itertools.pairwise(marks)]
    return dict(zip(STAGES, [*took, first["begin"] - restored["at"]], strict=False))


def steps_of(life: Sequence[Json]) -> list[Json]:
    return [event for event in life if event["what"] == "step"]


def quiet_of(events: Sequence[Json]) -> list[float]:
    """Return the durations of the steps without a save in progress."""
    return [event["done"] - event["begin"] for event in steps_of(events) if event["load"] == "quiet"]


def one(life: Sequence[Json], what: str) -> Json:
    found = next((event for event in life if event["what"] == what), None)
    if found is None:
        raise Failed(f"a process never sent {what!r}")
    return found


# -- processes --


class Job:
    """One command and the events that it and its descendants write to a pipe. `close` ends all of them."""

    def __init__(self, command: list[str], folder: Path, sockets: Path) -> None:
        self.pipe, self.log = folder / "events", folder / "job.log"
        self.events: list[Json] = []
        self.pid = 0  # of the trainer
        self._pidfd = self._gone_at = None
        self._rest = b""
        if not self.pipe.exists():
            os.mkfifo(self.pipe)
        self._fd = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)  # also for writing, so that it stays open
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=job_environment(sockets),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C reaches only this process
            )

    def pump(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Read events until `until` is true; return False on a timeout. Raise Failed if the command ends before."""
        end = time.monotonic() + timeout_s
        while not until():
            left = end - time.monotonic()
            if left <= 0:
                return False
            ended = self.process.poll() is not None
            watched = [self._fd] if self._pidfd is None else [self._fd, self._pidfd]
            ready, _, _ = select.select(watched, [], [], 0.0 if ended else min(left, 0.05))
            if self._pidfd in ready:
                self._note_death()
            if self._fd in ready:
                self._read()
            elif ended and not until():
                raise Failed(f"it ended with {self.process.returncode}:\n{self.tail()}")
        return True

    def _read(self) -> None:
        self._rest += os.read(self._fd, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.events.append(event)
            if event["what"] == "born":
                self.pid, self._gone_at = event["pid"], None
                try:
                    self._pidfd = os.pidfd_open(self.pid)
                except ProcessLookupError:
                    self._gone_at = time.monotonic()

    def _note_death(self) -> None:
        assert self._pidfd is not None
        self._gone_at = time.monotonic()
        os.close(self._pidfd)
        self._pidfd = None

    @property
    def gone_at(self) -> float | None:
        """Return when the trainer process ended, or None if it has not."""
        return self._gone_at

    def newest(self, what: str) -> Json | None:
        """Return the newest event of this kind in this job attempt."""
        for event in reversed(self.events):
            if event["what"] == what:
                return event
            if event["what"] == "born":
                return None
        return None

    def count(self, what: str) -> int:
        return sum(event["what"] == what for event in self.events)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
        os.close(self._fd)


def job_environment(sockets: Path) -> dict[str, str]:
    """Return the environment of all benchmarks. A process with these sockets in it belongs to this benchmark."""
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**environment(), **quiet, "CKPT_RUNTIME_DIR": str(sockets)}


@dataclass
class Bench:
    """The folders of the benchmark, and the job that runs now."""

    plan: Plan
    home: Path
    sockets: Path
    job: Job | None = None

    @contextlib.contextmanager
    def started(self, what: str, asked: Json, python: Path, folder: Path, *, restarts: int = 0) -> Iterator[Job]:
        """Start `chaos_job.py`, under torchrun if it needs restarts. All its processes are ended on exit."""
        run = [str(HERE / "chaos_job.py"), what, json.dumps({**asked, "pipe": str(folder / "events")})]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        torchrun += ["--max-restarts", str(restarts)]
        self.job = Job([str(python), *(torchrun if restarts else []), *run], folder, self.sockets)
        try:
            yield self.job
        finally:
            self.stop()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that were started here, whoever their parents are now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("CKPT_RUNTIME_DIR") == str(self.sockets)
                if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def stop(self) -> None:
        """End torchrun first, so that it restarts nothing, and then every process started until then."""
        if self.job is not None:
            self.job.close()
            self.job = None
        for _ in range(5):
            found = self.processes()
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not found:
                return
            psutil.wait_procs(found, timeout=5.0)
        raise Failed("cannot end a process of this benchmark")


# -- measuring --


@dataclass
class Calibration:
    """Measured before a contender's run, in seconds, medians.
    `quiet`: durations of steps; `costs`: the training time a save takes, by way; `complete`: until it is complete;
    `blocks`: the call alone."""

    quiet: list[float]
    costs: dict[str, float]
    complete: dict[str, float]
    blocks: float
    nbytes: int


def calibrate(bench: Bench, contender: Contender, python: Path, folder: Path) -> Calibration:
    asked = {"peer": contender.peer, "size": bench.plan.size, "folder": str(folder)}
    with bench.started("calibrate", asked, python, folder) as job:
        if not job.pump(lambda: job.count("over") > 0, START_S):
            raise Failed(f"the calibration takes more than {START_S:g} s:\n{job.tail()}")
        cycles = [event for event in job.events if event["what"] == "cycle"]
        ways = dict.fromkeys(event["way"] for event in cycles)

        def medians(key: str) -> dict[str, float]:
            return {way: statistics.median(one[key] for one in cycles if one["way"] == way) for way in ways}

        first = one(job.events, "calibrated")
    blocks = medians("blocks_s")["save"]
    return Calibration(first["quiet"], medians("lost_s"), medians("durable_s"), blocks, first["nbytes"])


def disturbed(
    bench: Bench, name: str, contender: Contender, python: Path, folder: Path, every: int
) -> tuple[list[Json], list[Hit]]:
    """Run one contender under all faults; return its events and the faults."""
    plan, faults = bench.plan, schedule(bench.plan)
    strike, stop = folder / "strike", folder / "stop"
    asked = {"peer": contender.peer, "auto": contender.auto, "every": every, "min_s": plan.min_s, "size": plan.size}
    asked |= {"folder": str(folder), "strike": str(strike), "stop": str(stop)}
    hits: list[Hit] = []
    with bench.started("train", asked, python, folder, restarts=10 * len(faults) + 10) as job:

        def trains_on(seconds_: float) -> None:
            """Wait until this many seconds after its first step."""
            if not job.pump(lambda: job.newest("step") is not None or unasked(), START_S) or unasked():
                raise Failed(f"it does not come to a step after {len(hits)} faults:\n{job.tail()}")
            end = next(event["done"] for event in lives_of(job.events)[-1] if event["what"] == "step") + seconds_
            while time.monotonic() < end:
                job.pump(unasked, min(1.0, end - time.monotonic()))
                if unasked() or time.monotonic() - job.events[-1]["at"] > plan.watchdog:
                    raise Failed(f"it stopped by itself after {len(hits)} faults:\n{job.tail()}")

        def unasked() -> bool:
            return job.count("born") != len(hits) + 1 or (job.gone_at is not None and bool(job.count("born")))

        job.pump(lambda: job.count("born") > 0, START_S)
        for number, (interval, kind) in enumerate(faults, start=1):
            trains_on(interval)
            hits.append(hit(job, kind, strike, plan.watchdog))
            tell(f"{name}: fault {number} of {len(faults)}, {kind}, gone after {seconds(hits[-1].gone - hits[-1].at)}")
            if not job.pump(lambda: job.count("born") == len(hits) + 1, START_S):
                raise Failed(f"torchrun does not start it again:\n{job.tail()}")
        mark = max(event["step"] for event in job.events if event["what"] == "step")
        trains_on(plan.tail)
        while (job.newest("step") or {"step": 0})["step"] <= mark + 2:
            trains_on(time.monotonic() - steps_of(lives_of(job.events)[-1])[0]["done"] + 1.0)
        stop.touch()
        if not job.pump(lambda: job.count("digest") > 0, START_S):
            raise Failed(f"it does not end:\n{job.tail()}")
        return job.events, hits


def hit(job: Job, kind: str, strike: Path, watchdog_s: float) -> Hit:
    """Inject the fault, and wait until the process has ended."""
    by = "itself"
    if kind.startswith("SIG"):
        at = time.monotonic()
        os.kill(job.pid, signal.Signals[kind])
    else:
        waiting = strike.with_suffix(".new")
        waiting.write_text(kind.lower())
        waiting.rename(strike)
        struck = job.count("struck")
        if not job.pump(lambda: job.count("struck") > struck, watchdog_s + 60.0):
            raise Failed(f"it was never struck by {kind}")
        at = job.newest("struck")["at"]  # type: ignore[index]

    def idle_s() -> float:
        last = max(event["at"] for event in job.events[-3:] if event["what"] != "struck")
        return time.monotonic() - last

    while not job.pump(lambda: job.gone_at is not None, 0.05):
        if idle_s() > watchdog_s:
            by = "watchdog"
            os.kill(job.pid, signal.SIGKILL)
            if not job.pump(lambda: job.gone_at is not None, 30.0):
                raise Failed("the process cannot be killed")
            break
    assert job.gone_at is not None
    return Hit(kind, at, job.gone_at, by)


def contest(bench: Bench, name: str) -> Json:
    """Run one contender from its calibration to its bill, as plain values."""
    from environments import NotInstalled, python_for

    contender, plan = CONTENDERS[name], bench.plan
    if contender.auto and not knows_auto():
        raise Skipped('every="auto" is unknown to this version')
    try:
        python = Path(sys.executable) if contender.ours else python_for(contender.peer)
    except NotInstalled as error:
        raise Skipped(str(error)) from None
    with folder_in(bench.home) as folder:
        before = calibrate(bench, contender, python, folder)
        step_s = statistics.median(before.quiet)
        every = 0 if contender.ours else best_every(max(before.costs["save"], before.blocks), plan.mtbf, step_s)
        how = ", ".join(f"{way} {seconds(cost)}" for way, cost in before.costs.items())
        tell(f"{name}: a step {seconds(step_s)}, costs: {how}" + (f", every {every} steps" if every else ""))
        events, hits = disturbed(bench, name, contender, python, folder, every)
        ended = next(event for event in events if event["what"] == "digest")
        bill = bill_of(events, hits, statistics.median(before.quiet + quiet_of(events) + ended["tail"]))
        found: Json = {
            "every": every,
            "head_s": step_s,
            "tail_s": statistics.median(ended["tail"]),
            "costs": before.costs,
            "complete": before.complete,
            "nbytes": before.nbytes,
            "bill": asdict(bill),
            "hits": [asdict(hit) for hit in hits],
            "digest": ended["digest"],
        }
        if contender.ours:
            found["statement"] = statement(folder / "run")
            found["cadence"] = cadence(folder / "run")
            found["predicted"] = predicted(found, plan)
    tell(f"{name}: {bill.effective:.1%} of {bill.wall:.0f} s, {seconds(bill.figure / len(hits))} a fault")
    return found


def knows_auto() -> bool:
    from ckpt.errors import UsageError
    from ckpt.tiers import Memory

    try:
        Memory(every="auto")  # type: ignore[arg-type]
    except UsageError:
        return False
    return True


def undisturbed(bench: Bench, steps: Sequence[int]) -> Json:
    """Return the digests after these step counts, and the usual step time."""
    with folder_in(bench.home) as folder:
        asked = {"size": bench.plan.size, "steps": sorted(set(steps))}
        with bench.started("reference", asked, Path(sys.executable), folder) as job:
            if not job.pump(lambda: job.count("over") > 0, REFERENCE_S):
                raise Failed("the undisturbed run does not end")
            took = [t for event in job.events if event["what"] == "took" for t in event["quiet"]]
            digests = {str(event["step"]): event["digest"] for event in job.events if event["what"] == "digest"}
    return {"digests": digests, "step_s": statistics.median(took), "steps": len(took)}


@contextlib.contextmanager
def folder_in(home: Path) -> Iterator[Path]:
    """Create a folder. On exit, remove it and flush the disk before the next contender starts."""
    folder = Path(tempfile.mkdtemp(dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()


# -- everystep's own accounting of the same run --


def accounts_of(run: Path) -> list[Any]:
    """Return the accounts in the ledger of a run, oldest first, or none if it has no ledger."""
    try:
        from ckpt.core.cadence.ledger import Account, in_order
    except ImportError:
        return []
    return in_order(Account.from_bytes(path.read_bytes()) for path in sorted((run / "ledger").glob("*.json")))


def statement(run: Path) -> Json | None:
    """Return the ledger's statement by the library's own accounting, or None without a ledger."""
    accounts = accounts_of(run)
    try:
        from ckpt.tools.observe.goodput.accounting import settled
    except ImportError:
        return None
    if not accounts:
        return None
    from ckpt.guard.report import Fault

    faults = [Fault.from_json(json.loads(path.read_text())) for path in sorted((run / "faults").glob("*.json"))]
    found: Json = settled(accounts, faults).statement.to_json()
    for name in ("interruptions", "by_source", "ended"):  # these contain the path of the run
        found.pop(name, None)
    return found


def cadence(run: Path) -> Json | None:
    """Return the last save intervals that were chosen, in steps, for memory and the folder."""
    decisions = [decision for account in accounts_of(run) for decision in account.decisions]
    if not decisions:
        return None
    return {"memory" if place == "memory" else "folder": steps for place, steps in decisions[-1].every.items()}


def predicted(found: Json, plan: Plan) -> Json | None:
    """Return the forecast of `cadence.model` for this run, from save costs measured before it.
    Detection, restart and restore times do not depend on the save interval, so they are taken from the run itself. None
    without the model."""
    try:
        from ckpt.core.cadence.cadence import Costs, TierCost, predict
    except ImportError:
        return None
    bill, every = found["bill"], {"memory": 1, "folder": 100}
    if found["cadence"]:
        every = found["cadence"]
    faults = len(bill["interruptions"])

    def mean(part: str) -> float:
        return statistics.mean(one[part] for one in bill["interruptions"])

    def place(name: str, way: str, served: float) -> Any:
        every_s = every[name] * bill["usual_s"] if every.get(name) else math.inf
        return TierCost(name, max(found["costs"][way], 0.0), every_s, mean("restore"), found["complete"][way], served)

    costs = Costs(mean("perceive"), mean("restart"), [place("memory", "memory", 1.0), place("folder", "save", 0.0)])
    exposed = sum(interval for interval, _ in schedule(plan)) + plan.tail
    said = predict(costs, exposed / faults, recovering=False)
    per_fault = said.perceive_s + said.restart_s + said.restore_s + said.recompute_s + said.saving_s
    return {**asdict(said), "invalid_s": faults * per_fault}


# -- summary: pure --


def summary(told: Json) -> Json:
    """Return which contenders are correct, which is best, and which goals are met."""
    found, digests = told["contenders"], told.get("reference", {}).get("digests", {})
    rows = {name: row_of(one, digests) for name, one in found.items() if "bill" in one}
    faults = told["plan"]["faults"]
    peers = {name: row["figure"] for name, row in rows.items() if not CONTENDERS[name].ours and row["equal"]}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    goals = []
    for name in (FIXED, AUTO):
        if name in rows:
            note, ratio = ("no peer", None) if best is None else (best, rows[name]["figure"] / peers[best])
            goals.append(goal(f"{name}: restore + recompute + saving / best peer", ratio, AT_MOST, "x", note=note))
    if FIXED in rows and AUTO in rows:
        ratio = rows[AUTO]["figure"] / rows[FIXED]["figure"]
        goals.append(goal("the same, every=auto / default save interval", ratio, 1.0, "x"))
    for name, row in rows.items():
        if row["ledger_off"] is not None:
            goals.append(goal(f"{name}: invalid time by its ledger, off by", row["ledger_off"], LEDGER_WITHIN, "x"))
    wrong = [f"{name}: {one['failed']}" for name, one in found.items() if "failed" in one]
    wrong += [f"{name} ended with other weights" for name, row in rows.items() if row["equal"] is False]
    return {"rows": rows, "best": best, "goals": goals, "wrong": wrong, "faults": faults}


def row_of(found: Json, digests: Json) -> Json:
    bill = found["bill"]
    said = found.get("statement")
    invalid = sum(value for name, value in bill["parts"].items() if name != "other")
    ledger = said.get("invalid_s") if said else None
    expected = digests.get(str(bill["steps"]))
    return {
        "figure": sum(bill["parts"][name] for name in FIGURE),
        "effective": 1.0 - invalid / bill["wall"],
        "invalid": invalid,
        "ledger": ledger,
        "ledger_off": None if ledger is None else abs(ledger / invalid - 1),
        "lost": sum(one["step"] - one["restored"] for one in bill["interruptions"]),
        "equal": None if expected is None else expected == found["digest"],
    }


# -- tables --


def part_table(told: Json, found: Json, *, markdown: bool = False) -> str:
    """Tabulate seconds per fault, by part."""
    head = ["", "saves every", *PARTS, "restore + recompute + saving", "steps lost", "effective", "equal"]
    rows, faults = [], found["faults"]
    for name, row in found["rows"].items():
        one = told["contenders"][name]
        cells = [amount(one["bill"]["parts"][part] / faults) for part in PARTS]
        cells += [amount(row["figure"] / faults), f"{row['lost'] / faults:.1f}", f"{row['effective']:.1%}"]
        rows.append([name, every_of(one), *cells, {True: "yes", False: "NO", None: "-"}[row["equal"]]])
    if found["best"] is not None:
        best = found["rows"][found["best"]]["figure"]
        for name, row in found["rows"].items():
            if CONTENDERS[name].ours:
                ratio = times(row["figure"] / best)
                rows.append([f"{name} / {found['best']}", *[""] * (len(PARTS) + 1), ratio, "", "", ""])
    return table("Seconds that a fault costs", head, rows, markdown=markdown)


def amount(value: float) -> str:
    return seconds(0.0 if abs(value) < 5e-5 else value)


def every_of(one: Json) -> str:
    if one["every"]:
        return f"{one['every']} steps"
    if one.get("cadence"):
        return ", ".join(f"{place} {n}" for place, n in one["cadence"].items())
    return "memory 1, folder 100"


def stage_table(told: Json, found: Json, *, markdown: bool = False) -> str:
    """Tabulate the stages of restarts and of saving."""
    rows, faults = [], found["faults"]
    for name in found["rows"]:
        bill = told["contenders"][name]["bill"]
        if not bill.get("saving_in"):
            continue  # measured before stages were recorded
        stages = [sum(one["stages"].get(stage, 0.0) for one in bill["interruptions"]) / faults for stage in STAGES]
        rows.append([name, *map(amount, stages), *(amount(bill["saving_in"][key] / faults) for key in SAVING)])
    head = ["", *STAGES, *(f"saving: {key}" for key in SAVING)]
    return "" if not rows else table("Restart and saving in detail, seconds a fault", head, rows, markdown=markdown)


def fault_table(told: Json, found: Json, *, markdown: bool = False) -> str:
    """Tabulate each kind of fault, with means over its interruptions."""
    rows = []
    for name in found["rows"]:
        interruptions = told["contenders"][name]["bill"]["interruptions"]
        for kind in KINDS:
            mine = [one for one in interruptions if one["kind"] == kind]
            if mine:
                means = [statistics.mean(one[key] for one in mine) for key in PARTS[:4]]
                lost = statistics.mean(one["step"] - one["restored"] for one in mine)
                sources = ", ".join(sorted({one["source"] for one in mine}))
                by = ", ".join(sorted({one["by"] for one in mine}))
                rows.append([name, kind, str(len(mine)), *map(amount, means), f"{lost:.1f}", sources, by])
    head = ["", "fault", "times", *PARTS[:4], "steps lost", "from", "ended by"]
    return table("By kind of fault, means", head, rows, markdown=markdown, left=2)


def step_table(told: Json, found: Json, *, markdown: bool = False) -> str:
    """Tabulate the usual step times, and the cost of a save measured before."""
    rows = []
    for name in found["rows"]:
        one = told["contenders"][name]
        bill = one["bill"]
        own = "-" if bill["own_s"] is None else f"{bill['own_s'] * 1e3:.1f} ms ({bill['quiet']})"
        ms = [f"{value * 1e3:.1f} ms" for value in (one["head_s"], one["tail_s"], bill["usual_s"])]
        costs = ", ".join(f"{way} {seconds(cost)}" for way, cost in one["costs"].items())
        rows.append([name, *ms, own, costs, f"{bill['wall']:.0f} s", str(bill["steps"])])
    head = ["", "a step before", "after", "taken", "quiet ones in the run", "a save costs", "wall-clock", "steps"]
    return table("Step times", head, rows, markdown=markdown)


def ledger_table(told: Json, found: Json, *, markdown: bool = False) -> str:
    """Compare everystep's lost time by the stopwatch, by its ledger and by the forecast."""
    rows = []
    for name, row in found["rows"].items():
        if not CONTENDERS[name].ours:
            continue
        guess = told["contenders"][name].get("predicted")
        ledger = "-" if row["ledger"] is None else f"{row['ledger']:.1f} s ({row['ledger_off']:.1%} off)"
        forecast = "-" if not guess else f"{guess['invalid_s']:.1f} s, effective {guess['effective']:.1%}"
        rows.append([name, f"{row['invalid']:.1f} s", ledger, f"{row['effective']:.1%}", forecast])
    head = ["", "invalid time by the stopwatch", "by its ledger", "effective", "forecast"]
    return table("everystep, measured and reported", head, rows, markdown=markdown)


def about(told: Json) -> str:
    m, plan, reference = told["machine"], told["plan"], told.get("reference") or {}
    first = next((one for one in told["contenders"].values() if "nbytes" in one), {"nbytes": 0})
    mix = ", ".join(f"{sum(kind == one for _, one in told['schedule'])} {kind}" for kind in KINDS)
    trained = sum(interval for interval, _ in told["schedule"])
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']:g} GiB, Linux {m['kernel']}, {m['file_system']}, torch "
        f"{m['torch']}, Python {m['python']}, {m['date']}; load before {m['load_before']:.1f}.",
        f"State {first['nbytes'] / 1e6:.0f} MB ({plan['size']}); {plan['faults']} faults ({mix}), seed {plan['seed']}, "
        f"MTBF {plan['mtbf']:g} s, {trained:.0f} s of training between them; watchdog {plan['watchdog']:g} s, ours "
        f"on_hang min_s={plan['min_s']:g}; {told['took_s'] / 60:.0f} minutes in all.",
    ]
    if reference:
        lines.append(f"Undisturbed at the end: {reference['step_s'] * 1e3:.1f} ms a step over {reference['steps']}.")
    return "\n".join(lines)


def report(told: Json, found: Json, *, markdown: bool = False) -> str:
    makers = (part_table, stage_table, fault_table, step_table, ledger_table)
    parts = [about(told), *(shown for make in makers if (shown := make(told, found, markdown=markdown)))]
    parts.append(goal_table(found, markdown=markdown))
    parts += [f"{name} was left out: {why}" for name, why in told["skipped"].items()]
    parts += [f"Too noisy: {why}" for why in noisy(told, found)]
    return "\n\n".join(parts)


def noisy(told: Json, found: Json) -> list[str]:
    """Return why figures should not be trusted: another process used the machine."""
    lines = []
    for name in found["rows"]:
        one = told["contenders"][name]
        bill = one["bill"]
        off = abs(bill["parts"]["other"]) / bill["wall"]
        usual = [s for s in (one["head_s"], one["tail_s"], bill["own_s"]) if s is not None]
        if off > NOISE:
            lines.append(f"{name}: steps without a save deviated by {off:.0%} of the wall-clock")
        elif max(usual) > (1 + NOISE) * min(usual):
            lines.append(f"{name}: a quiet step took from {min(usual) * 1e3:.0f} to {max(usual) * 1e3:.0f} ms")
    return lines


# -- from the command line --


@contextlib.contextmanager
def at_work(plan: Plan, folder: Path | None) -> Iterator[Bench]:
    """Clean up all processes and folders, however the benchmark ends."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=folder, ignore_cleanup_errors=True) as home:
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as sockets:  # a short path
            bench = Bench(plan, Path(home), Path(sockets))
            try:
                yield bench
            finally:
                before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleanup
                bench.stop()
                signal.signal(signal.SIGINT, before)


def measured(plan: Plan, names: Sequence[str], folder: Path | None, keep: Callable[[Json], None]) -> Json:
    """Run all contenders one after the other, and the undisturbed run. `keep`: called with the results after each."""
    faults, started = schedule(plan), time.monotonic()
    one_s = sum(interval for interval, _ in faults) + OUTAGE_S * len(faults) + OWN_ROOM_S
    told: Json = {"plan": asdict(plan), "schedule": faults, "contenders": {}, "skipped": {}}
    tell("faults: " + ", ".join(f"{kind} after {interval:.1f} s" for interval, kind in faults))
    with at_work(plan, folder) as bench:
        told["machine"] = machine(bench.home)
        for number, name in enumerate(names):
            left = one_s * (len(names) - number) + 0.7 * one_s
            tell(f"{name}: contender {number + 1} of {len(names)}; about {left / 60:.0f} minutes left")
            try:
                told["contenders"][name] = contest(bench, name)
            except Skipped as why:
                told["skipped"][name] = str(why)
                tell(f"{name} is left out: {why}")
            except Failed as why:
                told["contenders"][name] = {"failed": str(why)}
                tell(f"{name} FAILED: {why}")
            told["took_s"] = time.monotonic() - started
            keep(told)
        steps = [one["bill"]["steps"] for one in told["contenders"].values() if "bill" in one]
        if steps:
            tell(f"undisturbed, {max(steps)} steps")
            told["reference"] = undisturbed(bench, steps)
    told["took_s"] = time.monotonic() - started
    return told


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtbf", type=float, help="seconds of training between faults; default: 40")
    parser.add_argument("--faults", type=int, metavar="COUNT", help="default: 8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--watchdog", type=float, help="kill it after this many seconds without a step; default: 10")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of: {'; '.join(CONTENDERS)}")
    parser.add_argument("--quick", action="store_true", help="a small model and three faults, to check that it works")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: where temporary files go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing, show what --json wrote")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    arguments = parser.parse_args(given)
    names = arguments.only or BY_DEFAULT
    if unknown := [name for name in names if name not in CONTENDERS]:
        parser.error(f"{unknown[0]!r} is none of: {'; '.join(CONTENDERS)}")
    if arguments.report:
        told: Json = json.loads(arguments.report.read_text())
    else:
        base = Plan(mtbf=3.0, faults=3, watchdog=4.0, min_s=1.0, size="tiny", floor=1.0, tail=1.0)
        base = base if arguments.quick else Plan()
        asked = {key: getattr(arguments, key) for key in ("mtbf", "faults", "seed", "watchdog")}
        plan = Plan(**{**asdict(base), **{key: value for key, value in asked.items() if value is not None}})
        if not (math.isfinite(plan.mtbf) and plan.mtbf > 0 and plan.faults > 0 and plan.watchdog > plan.min_s):
            parser.error("mtbf and faults must be above 0, and watchdog above the min_s of on_hang")

        def keep(told: Json) -> None:
            if arguments.json:
                arguments.json.write_text(json.dumps({**told, "summary": summary(told)}, indent=1))

        try:
            told = measured(plan, names, arguments.folder, keep)
        except KeyboardInterrupt:
            tell("stopped; what was measured until then is kept" if arguments.json else "stopped")
            return 130
        keep(told)
    found = summary(told)
    print(report(told, found, markdown=arguments.markdown))
    for why in found["wrong"]:
        tell(f"WRONG: {why}")
    return 1 if found["wrong"] or not found["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
