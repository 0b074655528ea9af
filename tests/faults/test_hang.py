"""Hangs: the usual pace is learnt, what a rank does is seen from outside, and whoever holds the others up is named."""

from __future__ import annotations

import dataclasses
import json
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
from ckpt.guard.hang import Evidence, HangDiagnosis, diagnose, still
from ckpt.guard.pace import StepPace
from ckpt.guard.probe import collective_of, parse_dump, sample
from ckpt.triggers import OnHang
from processes import REPO, eventually

LOOK_S = 0.25


class Loop:
    """A training loop and its looker, on a clock of their own."""

    def __init__(self, factor: float = 10.0, min_s: float = 5.0) -> None:
        self.pace = StepPace(OnHang(factor=factor, min_s=min_s))
        self.now, self.next_look = 1000.0, 1000.0
        self.beat = Beat(0, -1, self.now, OPENING, 0)
        self.said: list[float] = []

    def wait(self, seconds: float, looking: bool = True) -> None:
        """Time passes; somebody looks, unless it is a time in which the looker stands."""
        end = self.now + seconds
        while looking and self.next_look <= end:
            self.look(self.next_look)
        self.now = end
        self.next_look = max(self.next_look, end)

    def look(self, now: float) -> None:
        self.next_look = now + LOOK_S
        if (found := self.pace.look(now, self.beat)) is not None:
            self.said.append(found)

    def steps(self, count: int, seconds: float, looking: bool = True) -> None:
        for _ in range(count):
            self.wait(seconds, looking)
            calls = self.beat.calls + 1
            self.beat = Beat(calls, calls - 1, self.now, TRAINING, calls)

    def touch(self, state: int) -> None:
        self.beat = dataclasses.replace(self.beat, state=state, when=self.now)


def usual(loop: Loop) -> float:
    assert loop.pace.usual_s is not None
    return loop.pace.usual_s


@pytest.mark.parametrize("step_s", [0.001, 0.1, 0.25, 3.0])
def test_the_usual_step_is_learnt(step_s: float) -> None:
    """Whether many steps pass between two looks or many looks between two steps; and nothing is said meanwhile."""
    loop = Loop()
    loop.steps(max(40, int(20 / step_s) if step_s < 0.1 else 0), step_s)
    assert usual(loop) == pytest.approx(step_s, rel=0.01)
    assert loop.pace.limit_s == pytest.approx(max(5.0, 10 * step_s), rel=0.01)
    assert loop.said == []
    loop.wait(max(5.0, 10 * step_s) * 1.2 + 1)
    assert loop.said and min(loop.said) > 5.0 and loop.said == sorted(loop.said)


def test_nothing_is_said_before_five_steps() -> None:
    """Four are not enough to know what is usual, whatever then happens; with one more it is said."""
    for count, says in ((5, False), (6, True)):  # the first tells no time: nobody knows when it began
        loop = Loop()
        loop.steps(count, 1.0)
        loop.wait(300.0)
        assert bool(loop.said) == says
        assert (loop.pace.limit_s is None) == (not says)


def test_slow_first_steps_and_outliers_do_not_spoil_it() -> None:
    """Three steps of a minute for compilation, and one step in ten that takes ten times as long."""
    loop = Loop(min_s=1.0)
    loop.steps(3, 60.0)
    rng = random.Random(1)
    for _ in range(80):
        loop.steps(1, 10.0 if rng.random() < 0.1 else 1.0)
    assert usual(loop) == pytest.approx(1.0)
    assert loop.said == []


def test_a_step_time_that_grows_slowly_is_followed() -> None:
    """From one second to forty, the limit being three times the usual: never too long. At once, it is."""
    loop, sudden = Loop(factor=3, min_s=1.0), Loop(factor=3, min_s=1.0)
    for i in range(400):
        loop.steps(1, 1.0 + i / 10)
    assert loop.said == [] and usual(loop) > 30
    sudden.steps(20, 1.0)
    sudden.steps(1, 40.0)
    assert sudden.said


@pytest.mark.parametrize("state", [OPENING, PAUSED, RESTORING, LEAVING])
def test_other_states_never_count_and_are_not_learnt(state: int) -> None:
    """A long evaluation between all steps changes nothing, and a hang after it is still seen."""
    loop = Loop(min_s=1.0)
    loop.steps(10, 1.0)
    for _ in range(100):
        loop.wait(0.3)
        loop.touch(state)
        loop.wait(500.0)
        assert loop.said == []
        loop.touch(TRAINING)
        loop.steps(1, 0.01)  # before anybody looks
    assert usual(loop) == pytest.approx(1.0)
    loop.wait(20.0)
    assert loop.said


def test_a_pause_that_nobody_saw_is_not_learnt() -> None:
    """One that begins and ends between two looks is known by the sign of life that came without a step."""
    loop = Loop()
    loop.steps(10, 1.0)
    for _ in range(100):
        loop.wait(0.3)
        loop.touch(TRAINING)  # at the end of such a pause
        loop.wait(3.0)
        loop.steps(1, 1.0)
        loop.steps(1, 1.0)
    assert usual(loop) == pytest.approx(1.0)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The looker was stopped for an hour: no word about the trainer, before it has looked for long enough itself."""
    loop = Loop()
    loop.steps(20, 1.0)
    loop.wait(2.0)
    loop.wait(3600.0, looking=False)
    loop.wait(5.0)
    assert loop.said == []
    loop.wait(10.0)
    assert loop.said and max(loop.said) < 20
    control = Loop()
    control.steps(20, 1.0)
    control.wait(3600.0)
    assert max(control.said) > 3500


def test_another_trainer_is_learnt_anew() -> None:
    """Fewer calls than before: nothing is said before five steps of the new one."""
    loop = Loop(min_s=1.0)
    loop.steps(20, 1.0)
    loop.beat = Beat(1, 19, loop.now, TRAINING, 1)
    loop.wait(1000.0)
    assert loop.said == [] and loop.pace.usual_s is None


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
def test_hostile_evidence_is_refused(name: str) -> None:
    """Every field, with whatever JSON can hold: ValueError, or a value of the right type within bounds."""
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
def test_evidence_that_is_no_object_is_refused(data: object) -> None:
    """Whatever came instead."""
    with pytest.raises(ValueError):
        Evidence.from_json(data)


def test_still_or_not() -> None:
    """Nothing moves in it: not the steps, the log or the functions; and hardly any CPU, or not one line."""
    here = ("read (/u/t.py:5)", "main (/u/t.py:9)")
    there = ("read (/u/t.py:6)", "main (/u/t.py:9)")
    a = rank(stack=here)
    assert still([a, dataclasses.replace(a, idle_s=42.0)])
    assert still([a, dataclasses.replace(a, idle_s=42.0, cpu_s=3.0)])  # computes, and stays in the same line
    assert still([a, dataclasses.replace(a, idle_s=42.0, stack=there)])  # polls
    assert still([rank(), rank(idle_s=42.0)])  # no stack, no CPU
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
    """Python code in a process of its own; SIGUSR2 dumps its stacks into `dump`."""
    processes: list[subprocess.Popen[bytes]] = []

    def go(code: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", code, str(tmp_path / "dump")]
        with open(tmp_path / "out", "wb") as out:
            processes.append(subprocess.Popen(words, stdout=out))
        assert eventually(lambda: (tmp_path / "out").read_bytes().startswith(b"ready"))
        return processes[-1]

    yield go
    for process in processes:
        process.kill()
        process.wait()


def dumped(pid: int, file: Path) -> tuple[str, ...]:
    """Its stack now, by way of faulthandler."""
    before = file.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    assert eventually(lambda: file.stat().st_size > before and file.read_bytes().endswith(b"in <module>\n"))
    return parse_dump(file.read_text())


def looks(pid: int, file: Path, stacks: bool = True) -> list[Evidence]:
    """Two samples with stacks, some time apart."""
    found: list[Evidence] = []
    beat = dataclasses.replace(BEAT, when=time.monotonic())
    for _ in range(2):
        stack = dumped(pid, file) if stacks else ()
        found.append(dataclasses.replace(sample(pid, 0, beat, ours=file.stat().st_size), stack=stack))
        time.sleep(0.5)
    return found


def test_a_sleeping_process_is_still(start: Start, tmp_path: Path) -> None:
    """The writes that our own looking caused do not count, as long as they are said to be ours."""
    process = start(SLEEPS)
    for _ in range(5):  # on a busy machine it may still be answering the last look
        found = looks(process.pid, tmp_path / "dump")
        if found[-1].state == "sleeping":
            break
    assert found[-1].state == "sleeping" and still(found), found
    assert found[0].stack[0].startswith("nap (<string>:")
    blamed = [dataclasses.replace(found[0], written=found[0].written - 400), found[1]]
    assert not still(blamed)


def test_a_busy_process_is_not_still(start: Start, tmp_path: Path) -> None:
    """It uses CPU and is in different functions; without stacks the CPU alone tells."""
    process = start(SPINS)
    assert eventually(lambda: not still(looks(process.pid, tmp_path / "dump")))
    assert not still(looks(process.pid, tmp_path / "dump", stacks=False))
    found = sample(process.pid, 0, BEAT)
    assert found.state == "running" and found.cpu_s > 0


def test_a_stopped_process_is_still_and_named(start: Start) -> None:
    """Also when it was busy before; let go on, it is not stopped any more; dead and gone are told apart."""
    process = start(SPINS)
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: sample(process.pid, 0, BEAT).state == "stopped")
    found = sample(process.pid, 0, BEAT)
    assert still([found])
    said = diagnose([found], 1)
    assert said.kind == "stopped" and said.suspects == (0,) and f"kill -CONT {process.pid}" in said.why
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
def test_the_main_thread_of_a_dump_is_found(kind: str, named: bool) -> None:
    """Current or not, with threads that have names as from 3.14 on, after other dumps, with what a crash adds."""
    worker = WORKER.format(name=" [pt_autograd_0 (]" if named else "")
    main = MAIN.format(kind=kind, name=" [python]" if named else "")
    dump = f"{worker}\n{worker}\n{main}"
    crash = (
        f"Fatal Python error: Aborted\n\n{dump}\nCurrent thread's C stack trace (most recent call first):\n"
        '  Binary file "/x/python", at _Py_DumpStack+0x32 [0x5]\n\nExtension modules: a, b (total: 2)\n'
    )
    older = f"{worker}\n{main.replace('deep', 'older')}"
    for text in (
        dump,
        crash,
        older + dump,
        f"Timeout (0:00:00.1)!\n{dump}",
        f"some line of a log\n{dump}",
        main,
        older + main,
    ):
        assert parse_dump(text) == DEEP_STACK, text
    assert parse_dump(f"{older}{worker}\n{worker}") == ()  # the last one has no main thread


THREADS = """
import faulthandler, sys, threading, time
def work(): time.sleep(60)
def spot(): faulthandler.dump_traceback(file=sys.stdout)
for _ in range(int(sys.argv[1])): threading.Thread(target=work, daemon=True).start()
def deep():
    if sys.argv[2] == "main": return spot()
    thread = threading.Thread(target=spot)
    thread.start()
    thread.join()
deep()
sys.stdout.flush()
import os; os._exit(0)
"""


@pytest.mark.parametrize(("count", "who", "inner"), [(3, "main", "spot"), (3, "other", "deep"), (120, "other", "")])
def test_a_real_dump_of_many_threads(count: int, who: str, inner: str) -> None:
    """By this very Python: the main thread is the last one, whoever dumps; beyond a hundred it is not there."""
    words = [sys.executable, "-c", THREADS, str(count), who]
    text = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    found = parse_dump(text)
    if not inner:
        assert found == () and "\n...\n" in text
        return
    assert found[-1].startswith("<module> (") and any(frame.startswith(f"{inner} (") for frame in found)


def test_the_collective_of_a_stack() -> None:
    """The innermost frame of torch.distributed counts; not one below code of the user's that does something else."""
    c10d, user = "/v/site-packages/torch/distributed/distributed_c10d.py", "step (/u/train.py:3)"
    wrapper = "wrapper (/v/site-packages/torch/distributed/c10d_logger.py:83)"
    for name in (
        "all_reduce",
        "barrier",
        "monitored_barrier",
        "recv",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):
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


RANK = """
import faulthandler, json, os, signal, sys, threading, time
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[3], "w"))
from ckpt.guard import probe as evidence
rank, main = int(sys.argv[1]), threading.get_ident()
assert "torch" not in sys.modules
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

def answer():
    for _ in sys.stdin:
        stack = evidence.own_stack(main)
        print(json.dumps(stack), flush=True)

def load_batch():
    time.sleep(600)

threading.Thread(target=answer, daemon=True).start()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank == 1:
    load_batch()
dist.all_reduce(torch.ones(4))
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks; the second does not come to the fourth all_reduce."""
    environment = {**os.environ, "PYTHONPATH": f"{REPO}", "OMP_NUM_THREADS": "1"}
    processes = []
    for number in range(2):
        words = [sys.executable, "-c", RANK, str(number), str(tmp_path / "meet"), str(tmp_path / f"dump{number}")]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(words, env=environment, **pipes))
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen[str]) -> tuple[str, ...]:
    assert process.stdin and process.stdout
    process.stdin.write("?\n")
    process.stdin.flush()
    return tuple(json.loads(process.stdout.readline()))


def test_a_rank_that_does_not_come_to_a_collective(job: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """A real job over gloo: the stacks from inside and outside are the same, and tell who is missing, and where."""
    assert eventually(lambda: collective_of(ask(job[0])) == "all_reduce", 100)
    assert eventually(lambda: "load_batch" in ask(job[1])[0], 100)
    found = []
    for number, process in enumerate(job):
        inside = ask(process)
        stack = dumped(process.pid, tmp_path / f"dump{number}")
        assert stack == inside
        one = sample(process.pid, number, dataclasses.replace(BEAT, when=time.monotonic()))
        one = dataclasses.replace(one, stack=stack, collective=collective_of(stack))
        found.append(Evidence.from_json(json.loads(json.dumps(one.to_json()))))
    assert [one.collective for one in found] == ["all_reduce", ""]

    said = diagnose(found, 2)
    assert said.suspects == (1,) and said.kind == "missing from a collective"
    assert "Rank 0 waits in all_reduce" in said.why and "sleeps at load_batch (<string>:" in said.why
    swapped = [dataclasses.replace(found[0], rank=1), dataclasses.replace(found[1], rank=0)]
    assert diagnose(swapped, 2).suspects == (0,)


# -- whom the others wait for --

IN = {"collective": "all_reduce", "stack": FRAMES}
LOADS = {"stack": ("read (/x/lib/python3.11/socket.py:7)", "load (/u/data.py:31)", "main (/u/train.py:5)")}


def said(*ranks: dict[str, Any], world: int | None = None) -> HangDiagnosis:
    """Of ranks 0, 1, … with these things known of them."""
    return diagnose([rank(i, **one) for i, one in enumerate(ranks)], len(ranks) if world is None else world)


@pytest.mark.parametrize("state", ["stopped", "zombie", "gone"])
def test_a_rank_that_does_not_run_is_named_first(state: str) -> None:
    """Before the one that is behind, and before one that is not in the collective."""
    found = said(IN, {"state": state, **IN}, {**LOADS, "step": 2})
    assert found.suspects == (1,) and found.kind == "stopped" and "Rank 1 (process 101 on h1)" in found.why
    assert said(IN, IN, {**LOADS, "step": 2}).suspects == (2,)


def test_who_is_not_in_the_collective_is_named_with_the_place() -> None:
    """The place is the user's own, and where inside it; all missing ones are named, however many."""
    found = said(IN, LOADS, IN)
    assert found.suspects == (1,) and found.kind == "missing from a collective"
    assert "Ranks 0, 2 wait in all_reduce." in found.why
    assert "sleeps at load (/u/data.py:31), inside read (/x/lib/python3.11/socket.py:7)" in found.why
    many = said(IN, *[LOADS] * 9)
    assert many.suspects == tuple(range(1, 10)) and "ranks 5-9" in many.why
    busy = said(IN, {**LOADS, "state": "running"})
    assert "computes at load" in busy.why
    assert said(IN, {**LOADS, "state": "disk"}).kind == "blocked" and "disk" in said(IN, {**LOADS, "state": "disk"}).why
    assert said(IN, {}).suspects == (1,)  # without any stack
    assert said(IN, IN).suspects == ()


def test_different_collectives_are_a_mismatch() -> None:
    """By the stacks: the odd one; both if there are two."""
    other = {"collective": "barrier"}
    found = said(IN, other, IN)
    assert found.suspects == (1,) and "all_reduce on ranks 0, 2, barrier on rank 1" in found.why
    assert said(IN, other).suspects == (0, 1)
    assert said(IN, {"collective": "backward"}, IN).suspects == ()  # may be the same one


def test_a_rank_of_which_nothing_is_heard() -> None:
    """It is the one if all others wait; else it is said besides."""
    found = said(IN, IN, world=4)
    assert found.suspects == (2, 3) and found.kind == "missing from a collective" and "ranks 2-3" in found.why
    both = said(IN, LOADS, world=3)
    assert both.suspects == (1,) and "No response from rank 2." in both.why
    unclear = said(LOADS, world=2)
    assert unclear.suspects == (1,) and unclear.kind == "unknown" and "load (/u/data.py:31)" in unclear.why
    assert diagnose([], 3) == HangDiagnosis((), "No rank has responded.", "unknown")
    assert diagnose([rank(7)], 3).suspects == () and said(IN, IN, world=2).suspects == ()


def test_a_rank_behind_in_steps() -> None:
    """All wait, or none does; the same step is no sign."""
    assert said({"step": 9, **IN}, {"step": 8, **IN}).suspects == (1,)
    found = said({"step": 9, **LOADS}, {"step": 8, **LOADS}, {"step": 9, **LOADS})
    assert found.suspects == (1,) and found.kind == "behind" and "step 8 last, others reached 9" in found.why
    assert said({"step": 9, **IN}, {"step": 9, **IN}).suspects == ()


def test_all_in_one_collective_is_the_network() -> None:
    """With the hosts between which it lies, or the one."""
    found = said(IN, IN, IN)
    assert found.suspects == () and found.kind == "blocked"
    assert "All ranks wait in all_reduce: check the network between the hosts h0, h1, h2" in found.why
    assert "network of h," in said({**IN, "host": "h"}, {**IN, "host": "h"}).why


def test_one_rank_alone() -> None:
    """Where it stands, whatever it is in: it waits for nobody else's."""
    found = said({**LOADS, "state": "running"})
    assert found.suspects == (0,) and found.kind == "busy" and "load (/u/data.py:31)" in found.why
    assert said({**IN, "state": "sleeping"}).kind == "blocked" and said({"state": "unknown"}).kind == "unknown"


def test_nobody_in_a_collective() -> None:
    """One in a disk wait, or one that stands elsewhere than most; else nobody is named."""
    assert said(LOADS, {**LOADS, "state": "disk"}).suspects == (1,)
    other = {"stack": ("parse (/u/data.py:50)",)}
    found = said(LOADS, LOADS, {**other, "state": "running"})
    assert found.suspects == (2,) and found.kind == "busy"
    assert said(LOADS, LOADS, other).kind == "blocked"
    assert said(LOADS, other).kind == "unknown" and said(LOADS, LOADS).suspects == ()
