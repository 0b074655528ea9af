"""Hang detection: the usual step time is learned, ranks are observed from outside, and the blocking rank is named."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.core.ipc.heartbeat import LEAVING, OPENING, PAUSED, RESTORING, TRAINING, Beat
from ckpt.guard.hang import Evidence, diagnose, still
from ckpt.guard.pace import StepPace
from ckpt.guard.probe import collective_of, parse_dump, sample
from ckpt.triggers import OnHang
from processes import eventually

CHECK_S = 0.25


class Loop:
    """A training loop and its watch, on a simulated clock."""

    def __init__(self, factor: float = 10.0, min_s: float = 5.0) -> None:
        self.pace = StepPace(OnHang(factor=factor, min_s=min_s))
        self.now, self.next_check = 1000.0, 1000.0
        self.beat = Beat(0, -1, self.now, OPENING, 0)
        self.silences: list[float] = []

    def wait(self, seconds: float, watching: bool = True) -> None:
        """Let time pass with regular checks, or without checks if the watch is stopped."""
        end = self.now + seconds
        while watching and self.next_check <= end:
            self.check(self.next_check)
        self.now = end
        self.next_check = max(self.next_check, end)

    def check(self, now: float) -> None:
        self.next_check = now + CHECK_S
        if (found := self.pace.look(now, self.beat)) is not None:
            self.silences.append(found)

    def steps(self, count: int, seconds: float, watching: bool = True) -> None:
        for _ in range(count):
            self.wait(seconds, watching)
            calls = self.beat.calls + 1
            self.beat = Beat(calls, calls - 1, self.now, TRAINING, calls)

    def touch(self, state: int) -> None:
        self.beat = dataclasses.replace(self.beat, state=state, when=self.now)


def usual(loop: Loop) -> float:
    assert loop.pace.usual_s is not None
    return loop.pace.usual_s


@pytest.mark.parametrize("step_s", [0.001, 0.1, 0.25, 3.0])
def test_usual_step_time_is_learned(step_s: float) -> None:
    """The usual time is learned with many steps between checks or many checks between steps. No hang is reported."""
    loop = Loop()
    loop.steps(max(40, int(20 / step_s) if step_s < 0.1 else 0), step_s)
    assert usual(loop) == pytest.approx(step_s, rel=0.01)
    assert loop.pace.limit_s == pytest.approx(max(5.0, 10 * step_s), rel=0.01)
    assert loop.silences == []
    loop.wait(max(5.0, 10 * step_s) * 1.2 + 1)
    assert loop.silences and min(loop.silences) > 5.0 and loop.silences == sorted(loop.silences)


def test_no_hang_is_reported_before_five_steps() -> None:
    """Four steps are too few to detect a hang. With a fifth one it is detected."""
    for count, detected in ((5, False), (6, True)):  # the first is not timed: its start is unknown
        loop = Loop()
        loop.steps(count, 1.0)
        loop.wait(300.0)
        assert bool(loop.silences) == detected
        assert (loop.pace.limit_s is None) == (not detected)


def test_slow_first_steps_and_outliers_are_ignored() -> None:
    """Three compilation steps of a minute and one slow step in ten do not change the median."""
    loop = Loop(min_s=1.0)
    loop.steps(3, 60.0)
    rng = random.Random(1)
    for _ in range(80):
        loop.steps(1, 10.0 if rng.random() < 0.1 else 1.0)
    assert usual(loop) == pytest.approx(1.0)
    assert loop.silences == []


def test_slowly_growing_step_time_is_not_a_hang() -> None:
    """The step time grows from 1 s to 40 s with a limit of three times the usual: no hang. A sudden increase is one."""
    loop, sudden = Loop(factor=3, min_s=1.0), Loop(factor=3, min_s=1.0)
    for i in range(400):
        loop.steps(1, 1.0 + i / 10)
    assert loop.silences == [] and usual(loop) > 30
    sudden.steps(20, 1.0)
    sudden.steps(1, 40.0)
    assert sudden.silences


@pytest.mark.parametrize("state", [OPENING, PAUSED, RESTORING, LEAVING])
def test_other_states_are_neither_counted_nor_learned(state: int) -> None:
    """A long evaluation between steps changes nothing, and a later hang is still detected."""
    loop = Loop(min_s=1.0)
    loop.steps(10, 1.0)
    for _ in range(100):
        loop.wait(0.3)
        loop.touch(state)
        loop.wait(500.0)
        assert loop.silences == []
        loop.touch(TRAINING)
        loop.steps(1, 0.01)  # before the next check
    assert usual(loop) == pytest.approx(1.0)
    loop.wait(20.0)
    assert loop.silences


def test_time_without_checks_does_not_count() -> None:
    """The watch was stopped for an hour: it reports nothing until it has checked again for long enough."""
    loop = Loop()
    loop.steps(20, 1.0)
    loop.wait(2.0)
    loop.wait(3600.0, watching=False)
    loop.wait(5.0)
    assert loop.silences == []
    loop.wait(10.0)
    assert loop.silences and max(loop.silences) < 20
    control = Loop()
    control.steps(20, 1.0)
    control.wait(3600.0)
    assert max(control.silences) > 3500


# -- evidence --

BEAT = Beat(7, 6, 0.0, TRAINING, 7)
FRAMES = ("all_reduce (/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3252)", "f (/u/t.py:9)")


def rank(number: int = 0, **changes: Any) -> Evidence:
    base = Evidence(number, f"h{number}", 100 + number, 6, 7, 40.0, "sleeping", 1.0, 10, 0)
    return dataclasses.replace(base, **changes)


DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Evidence)])
def test_hostile_evidence_is_rejected(name: str) -> None:
    """Any JSON value in any field raises ValueError or gives a value of the right type within bounds."""
    good = rank(stack=FRAMES).to_json()
    values: tuple[Any, ...] = (
        None, True, -5, 2**70, -(2**70), 1.5, float("nan"), float("inf"), 1e300, "", "x" * 5000, "a\nb", "\x1b[31m",
        "\ud800", "dead", [], ["x"] * 1000, [1], ["a\x00"], [[]], {}, DEEP,
    )  # fmt: skip
    for bad in values:
        try:
            found = Evidence.from_json({**good, name: bad})
        except ValueError:
            continue
        value = getattr(found, name)
        assert type(value) is type(getattr(rank(), name)) and value == (tuple(bad) if isinstance(bad, list) else bad)
        assert not isinstance(bad, str) or bad.isprintable()
    if name not in ("stack", "collective", "pending"):
        with pytest.raises(ValueError):
            Evidence.from_json({key: value for key, value in good.items() if key != name})


@pytest.mark.parametrize("data", [None, [], "x", 1, DEEP, [["rank", 1]]])
def test_evidence_that_is_not_an_object_is_rejected(data: object) -> None:
    """Any other JSON value raises ValueError."""
    with pytest.raises(ValueError):
        Evidence.from_json(data)


def test_still_requires_no_movement() -> None:
    """A rank is still if steps, output and functions do not change, and it is idle or stays in one line."""
    here = ("read (/u/t.py:5)", "main (/u/t.py:9)")
    there = ("read (/u/t.py:6)", "main (/u/t.py:9)")
    a = rank(stack=here)
    assert still([a, dataclasses.replace(a, idle_s=42.0)])
    assert still([a, dataclasses.replace(a, idle_s=42.0, cpu_s=3.0)])  # busy, but in the same line
    assert still([a, dataclasses.replace(a, idle_s=42.0, stack=there)])  # polls in a loop
    assert still([rank(), rank(idle_s=42.0)])  # no stack and no CPU time
    assert still([rank(state="stopped")]) and still([a, rank(state="gone", written=-1)])
    for moved in (
        {"cpu_s": 3.0, "stack": there}, {"written": 60}, {"calls": 8}, {"stack": ("other (/u/t.py:5)",)},
        {"pid": 9}, {"rank": 1},
    ):  # fmt: skip
        assert not still([a, dataclasses.replace(a, idle_s=42.0, **moved)]), moved
    assert not still([]) and not still([a]) and not still([rank(), rank(idle_s=42.0, cpu_s=2.0)])


# -- real processes --

LINE = "import sys, time, faulthandler, signal; faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], 'w'))\n"
SLEEPS = LINE + "def nap():\n    print('ready', flush=True)\n    while True: time.sleep(0.05)\nnap()"
SPINS = (
    LINE
    + "def left(n):\n    return sum(range(n))\ndef right(n):\n    return max(range(n))\n"
    + "print('ready', flush=True)\nwhile True:\n    left(10**5)\n    right(10**5)\n"
)
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that runs Python code in its own process. SIGUSR2 dumps its stacks to `dump`."""
    processes: list[subprocess.Popen[bytes]] = []

    def go(code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, str(tmp_path / "dump")]
        with open(tmp_path / "out", "wb") as out:
            processes.append(subprocess.Popen(command, stdout=out))
        assert eventually(lambda: (tmp_path / "out").read_bytes().startswith(b"ready"))
        return processes[-1]

    yield go
    for process in processes:
        process.kill()
        process.wait()


def dumped(pid: int, file: Path) -> tuple[str, ...]:
    """Return its current stack, dumped by faulthandler."""
    before = file.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    assert eventually(lambda: file.stat().st_size > before and file.read_bytes().endswith(b"in <module>\n"))
    return parse_dump(file.read_text())


def samples(pid: int, file: Path, stacks: bool = True) -> list[Evidence]:
    """Return two samples with stacks, some time apart."""
    found: list[Evidence] = []
    beat = dataclasses.replace(BEAT, when=time.monotonic())
    for _ in range(2):
        stack = dumped(pid, file) if stacks else ()
        found.append(dataclasses.replace(sample(pid, 0, beat, ours=file.stat().st_size), stack=stack))
        time.sleep(0.5)
    return found


def test_sleeping_process_is_still(start: Start, tmp_path: Path) -> None:
    """Output caused by our own sampling does not count if it is passed as `ours`."""
    process = start(SLEEPS)
    for _ in range(5):  # on a busy machine it may still handle the last signal
        found = samples(process.pid, tmp_path / "dump")
        if found[-1].state == "sleeping":
            break
    assert found[-1].state == "sleeping" and still(found), found
    assert found[0].stack[0].startswith("nap (<string>:")
    blamed = [dataclasses.replace(found[0], written=found[0].written - 400), found[1]]
    assert not still(blamed)


def test_busy_process_is_not_still(start: Start, tmp_path: Path) -> None:
    """It uses CPU in changing functions. Without stacks, the CPU time alone is enough."""
    process = start(SPINS)
    assert eventually(lambda: not still(samples(process.pid, tmp_path / "dump")))
    assert not still(samples(process.pid, tmp_path / "dump", stacks=False))
    found = sample(process.pid, 0, BEAT)
    assert found.state == "running" and found.cpu_s > 0


def test_stopped_process_is_still_and_named(start: Start) -> None:
    """A busy process that is stopped counts as still. After SIGCONT it runs. Zombie and gone differ."""
    process = start(SPINS)
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: sample(process.pid, 0, BEAT).state == "stopped")
    found = sample(process.pid, 0, BEAT)
    assert still([found])
    diagnosis = diagnose([found], 1)
    assert diagnosis.kind == "stopped" and diagnosis.suspects == (0,) and f"kill -CONT {process.pid}" in diagnosis.why
    process.send_signal(signal.SIGCONT)
    assert eventually(lambda: sample(process.pid, 0, BEAT).state == "running")
    process.kill()
    assert eventually(lambda: sample(process.pid, 0, BEAT).state == "zombie")
    assert Evidence.from_json(sample(process.pid, 0, BEAT).to_json()).state == "zombie"
    process.wait()
    found = sample(process.pid, 0, BEAT)
    assert found.state == "gone" and found.written == -1 and still([found])
    assert diagnose([found], 1).kind == "stopped"


# -- dumps --

WORKER = """Thread 0x00007f149aaa46c0{name} (most recent call first):
  File "/x/a.py", line 3 in work
  File "/x/lib/python3.13/threading.py", line 992 in run
  File "/x/lib/python3.13/threading.py", line 1012 in _bootstrap
"""
MAIN = """{kind} 0x00007f149be20b80{name} (most recent call first):
  File "/x/a (1).py", line 8 in deep
  File "/x/a.py", line 11 in <module>
"""
DEEP_STACK = ("deep (/x/a (1).py:8)", "<module> (/x/a.py:11)")


@pytest.mark.parametrize("kind", ["Thread", "Current thread"])
@pytest.mark.parametrize("named", [False, True])
def test_main_thread_of_a_dump_is_found(kind: str, named: bool) -> None:
    """Dumps differ by current thread, thread names (from 3.14 on), earlier dumps, and the text that a crash adds."""
    worker = WORKER.format(name=" [pt_autograd_0 (]" if named else "")
    main = MAIN.format(kind=kind, name=" [python]" if named else "")
    dump = f"{worker}\n{worker}\n{main}"
    crash = (
        f"Fatal Python error: Aborted\n\n{dump}\nCurrent thread's C stack trace (most recent call first):\n"
        '  Binary file "/x/python", at _Py_DumpStack+0x32 [0x5]\n\nExtension modules: a, b (total: 2)\n'
    )
    older = f"{worker}\n{main.replace('deep', 'older')}"
    for text in (dump, crash, older + dump, f"some line of a log\n{dump}", main, older + main):
        assert parse_dump(text) == DEEP_STACK, text
    assert parse_dump(f"{older}{worker}\n{worker}") == ()  # the last dump has no main thread


def test_collective_is_read_from_the_stack() -> None:
    """The innermost frame of torch.distributed counts, unless user code below it does something else."""
    c10d, user = "/v/site-packages/torch/distributed/distributed_c10d.py", "step (/u/train.py:3)"
    wrapper = "wrapper (/v/site-packages/torch/distributed/c10d_logger.py:83)"
    for name in ("all_reduce", "monitored_barrier", "recv", "all_gather_into_tensor"):
        assert collective_of((f"{name} ({c10d}:1)", wrapper, user)) == name
    functional = "/v/site-packages/torch/distributed/_functional_collectives.py"
    assert collective_of((f"wait_tensor ({functional}:9)", user)) == "wait_tensor"
    assert (
        collective_of((f"_store_based_barrier ({c10d}:9)", f"init_process_group ({c10d}:1)")) == "store_based_barrier"
    )
    assert collective_of(("wait (/x/lib/python3.11/threading.py:1)", f"recv ({c10d}:1)")) == "recv"
    backward = ("_engine_run_backward (/v/site-packages/torch/autograd/graph.py:8)", user)
    assert collective_of(backward) == "backward"
    assert collective_of(("load (/u/data.py:1)", *backward)) == ""
    assert collective_of(("load (/u/data.py:1)", f"all_reduce ({c10d}:1)")) == ""
    assert collective_of((user,)) == collective_of(()) == collective_of(("nonsense",)) == ""
    assert collective_of(("main (/v/site-packages/torch/distributed/run.py:1)",)) == ""


# -- the blocking rank --

IN = {"collective": "all_reduce", "stack": FRAMES}
LOADS = {"stack": ("read (/x/lib/python3.11/socket.py:7)", "load (/u/data.py:31)", "main (/u/train.py:5)")}


DISK, RUNNING = {"state": "disk"}, {"state": "running"}
OTHER = {"stack": ("parse (/u/data.py:50)",)}
BARRIER = {"collective": "barrier"}
# The ranks of a job, how many it has, the suspects, the kind, and what the diagnosis says.
DIAGNOSES: list[tuple[list[dict[str, Any]], int, tuple[int, ...], str, list[str]]] = [
    # a halted rank is named before one that is behind or not in the collective
    *(
        ([IN, {"state": state, **IN}, {**LOADS, "step": 2}], 3, (1,), "stopped", ["Rank 1 (process 101 on h1)"])
        for state in ("stopped", "zombie", "gone")
    ),
    ([IN, IN, {**LOADS, "step": 2}], 3, (2,), "", []),
    # the missing rank, with the user's line and the inner frame
    ([IN, LOADS, IN], 3, (1,), "missing from a collective", [
        "Ranks 0, 2 wait in all_reduce.", "sleeps at load (/u/data.py:31), inside read (/x/lib/python3.11/socket.py:7)",
    ]),
    ([IN, *[LOADS] * 9], 10, tuple(range(1, 10)), "", ["ranks 5-9"]),
    ([IN, {**LOADS, **RUNNING}], 2, (1,), "", ["computes at load"]),
    ([IN, {**LOADS, **DISK}], 2, (1,), "blocked", ["disk"]),
    ([IN, {}], 2, (1,), "", []),  # without a stack
    # different collectives: with two ranks both are suspects; backward may be the same one
    ([IN, BARRIER, IN], 3, (1,), "", ["all_reduce on ranks 0, 2, barrier on rank 1"]),
    ([IN, BARRIER], 2, (0, 1), "", []),
    ([IN, {"collective": "backward"}, IN], 3, (), "", []),
    # ranks without evidence are suspects if all others wait, and mentioned otherwise
    ([IN, IN], 4, (2, 3), "missing from a collective", ["ranks 2-3"]),
    ([IN, LOADS], 3, (1,), "", ["No response from rank 2."]),
    ([LOADS], 2, (1,), "unknown", ["load (/u/data.py:31)"]),
    ([], 3, (), "unknown", ["No rank has responded."]),
    # behind in steps, whether all ranks wait or none
    ([{"step": 9, **IN}, {"step": 8, **IN}], 2, (1,), "", []),
    ([{"step": 9, **LOADS}, {"step": 8, **LOADS}, {"step": 9, **LOADS}], 3, (1,), "behind", [
        "step 8 last, others reached 9",
    ]),
    # all in one collective: the network between the hosts, or of the only host
    ([IN, IN, IN], 3, (), "blocked", ["All ranks wait in all_reduce: check the network between the hosts h0, h1, h2"]),
    ([{**IN, "host": "h"}, {**IN, "host": "h"}], 2, (), "", ["network of h,"]),
    # a single rank waits for no other
    ([{**LOADS, **RUNNING}], 1, (0,), "busy", ["load (/u/data.py:31)"]),
    ([{**IN, "state": "sleeping"}], 1, (0,), "blocked", []),
    ([{"state": "unknown"}], 1, (0,), "unknown", []),
    # without a collective: a disk wait, or another line than most
    ([LOADS, {**LOADS, **DISK}], 2, (1,), "", []),
    ([LOADS, LOADS, {**OTHER, **RUNNING}], 3, (2,), "busy", []),
    ([LOADS, LOADS, OTHER], 3, (2,), "blocked", []),
    ([LOADS, OTHER], 2, (), "unknown", []),
    ([LOADS, LOADS], 2, (), "", []),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "world", "suspects", "kind", "texts"), DIAGNOSES)
def test_diagnosis_names_the_rank_that_blocks(
    ranks: list[dict[str, Any]], world: int, suspects: tuple[int, ...], kind: str, texts: list[str]
) -> None:
    found = diagnose([rank(i, **one) for i, one in enumerate(ranks)], world)
    assert found.suspects == suspects and kind in found.kind, found
    assert [text for text in texts if text not in found.why] == [], found
