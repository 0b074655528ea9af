"""One rank and what befalls it: signals, exceptions, crashes, hangs, requests. What is saved, said, left behind."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpt
import toy
from ckpt.core.checkpoint.lease import key_of
from ckpt.core.ipc import channel
from ckpt.core.ipc.messages import PressureNote, TriggerSave
from ckpt.core.log.run_log import RunLog
from ckpt.errors import UsageError
from ckpt.guard.report import Fault
from ckpt.store import open_store
from processes import PYTHONPATH, eventually, run_python, run_script, start_python, writers

SIGTERM_CODE = 128 + signal.SIGTERM
QUICK_HANG = {"min_s": 1.0, "factor": 2.0}
ANSWER_S = 60.0


# -- training in this process --


class Training:
    """The toy run, step by step. `at`: the last step done; `faults`: what on_fault was told."""

    def __init__(self, cp: ckpt.Checkpointer, state: dict[str, Any], faults: list[Fault]) -> None:
        self.cp, self.state, self.faults = cp, state, faults
        self.at = int(cp.restore(default=0))

    def go(self, steps: int = 1) -> ckpt.Save | None:
        save = None
        for _ in range(steps):
            toy.train_step(self.state)
            self.at += 1
            save = self.cp.step(self.at)
        return save

    def until(self, condition: Callable[[], bool]) -> None:
        """Train until something comes true."""
        end = time.monotonic() + ANSWER_S
        while not condition():
            assert time.monotonic() < end, "what the test waits for does not come"
            self.go()
            time.sleep(0.01)

    def fault(self, kind: str, number: int = 1) -> Fault:
        """The account of so many faults of this kind, trained for until it is there."""
        self.until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    def of(self, kind: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind == kind]


@contextlib.contextmanager
def training(run: str, *, memory: int = 1, on_fault: Any = None, **settings: Any) -> Iterator[Training]:
    """A Checkpointer that by itself saves to disk at its end only."""
    state, faults = toy.build(), list[Fault]()

    def note(fault: Fault) -> None:
        faults.append(fault)
        if on_fault is not None:
            on_fault(fault)

    tiers = [ckpt.Tier(run, every=10_000)]
    with ckpt.Checkpointer(
        state, tiers, options=ckpt.Options(on_fault=note), memory=ckpt.Memory(every=memory), **settings
    ) as cp:
        yield Training(cp, state, faults)


def durable(run: str) -> list[int]:
    """The steps that the disk holds."""

    async def look() -> list[int]:
        store = open_store(run, writable=False)
        log = RunLog(store)
        await log.open()
        await store.aclose()
        return sorted(commit.step for commit in log.state.commits.values())

    return asyncio.run(look())


def reports(run: str) -> list[Fault]:
    """The accounts that the run holds, in order."""
    found = sorted(Path(run, "faults").glob("*.json"))
    return [Fault.from_json(json.loads(path.read_text())) for path in found]


def saved_on_disk(fault: Fault) -> list[int]:
    return [saved.step for saved in fault.saved if saved.tier != "memory" and not saved.error]


@pytest.fixture
def handlers() -> Iterator[Callable[[int, Any], None]]:
    """Installs handlers of the user, and takes them away again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

    def install(number: int, handler: Any) -> None:
        assert number in before
        signal.signal(number, handler)

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


# -- training in another process --

HEAD = """
import ctypes, faulthandler, os, signal, sys, threading, time
import psutil, torch, toy, ckpt
state, me, libc = toy.build(), os.getpid(), ctypes.CDLL(None)
def say(*words):
    print(*words, flush=True)
def opened(memory=1, **settings):
    tiers = [ckpt.Tier(sys.argv[1], every=10_000)]
    cp = ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(every=memory), **settings)
    say("start", cp.restore(default=0))
    return cp
def train(cp, steps, pause_s=0.01):
    first = (cp._run.step or 0) + 1
    for step in range(first, first + steps):
        toy.train_step(state)
        cp.step(step)
        say("step", step)
        time.sleep(pause_s)
def block():  # as a collective does: no signal interrupts it
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
def later(seconds, action, *arguments):
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
    timer.start()
"""


@contextlib.contextmanager
def trainer(run: str, code: str, fail: str = "") -> Iterator[subprocess.Popen[str]]:
    """A training process that the test acts upon while it runs."""
    path = PYTHONPATH
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "CKPT_FAIL": fail, "PYTHONPATH": path}
    process = start_python(
        [sys.executable, "-c", HEAD + code, run],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def await_line(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Everything it says until this line, which must come."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == wanted:
            return lines
    raise AssertionError(f"{wanted!r} did not come: {lines}")


def steps_of(output: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]


def is_exact(run: Training) -> bool:
    """Whether the state is bit for bit that of an uninterrupted run."""
    return toy.digest(run.state) == toy.reference(run.at)


# -- signals --


def test_sigusr1_saves_and_goes_on(run_dir: str) -> None:
    """The last step or the next becomes durable, the account says so, training goes on, the state is not touched."""
    with training(run_dir) as run:
        for number in (1, 2):
            run.go(3)
            before = run.at
            send(signal.SIGUSR1)
            fault = run.fault("signal", number)
            assert "SIGUSR1" in fault.summary and fault.exit_code is None and fault.advice == "none"
            assert saved_on_disk(fault) and before <= min(saved_on_disk(fault)) <= run.at
            assert set(saved_on_disk(fault)) <= set(durable(run_dir))
        run.go(3)
        assert is_exact(run)
    assert [fault.kind for fault in reports(run_dir)] == ["signal", "signal"]


def test_negative_control_a_signal_that_is_no_trigger_saves_nothing(run_dir: str, handlers: Any) -> None:
    """With another signal among the triggers, SIGUSR1 is the user's alone."""
    calls: list[int] = []
    handlers(signal.SIGUSR1, lambda number, frame: calls.append(number))
    with training(run_dir, triggers=[ckpt.triggers.on_signal("SIGUSR2")]) as run:
        run.go(3)
        send(signal.SIGUSR1)
        run.go(3)
        time.sleep(0.5)
        assert calls == [signal.SIGUSR1] and run.faults == [] and durable(run_dir) == []
        send(signal.SIGUSR2)  # and this one does
        assert saved_on_disk(run.fault("signal"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_users_own_handler_decides_about_sigterm(run_dir: str, handlers: Any, when: str) -> None:
    """It runs, the process goes on, and the state is saved; whether it was there before ours or came later."""
    calls: list[int] = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    if when == "before":
        handlers(signal.SIGTERM, mine)
    with training(run_dir) as run:
        if when == "after":
            handlers(signal.SIGTERM, mine)
        run.go(3)
        send(signal.SIGTERM)
        fault = run.fault("signal")
        assert calls == [signal.SIGTERM] and fault.exit_code is None
        assert saved_on_disk(fault)
        send(signal.SIGTERM)  # again
        assert saved_on_disk(run.fault("signal", 2)) and len(calls) == 2
    assert signal.getsignal(signal.SIGTERM) is mine


def test_ctrl_c_is_what_it_always_was(run_dir: str) -> None:
    """KeyboardInterrupt, no account of a fault, and the newest step durable."""
    with pytest.raises(KeyboardInterrupt):
        with training(run_dir) as run:
            run.go(3)
            send(signal.SIGINT)
            time.sleep(ANSWER_S)
    assert run.faults == [] and reports(run_dir) == [] and durable(run_dir) == [3]


def test_sigterm_saves_leaves_and_the_next_start_goes_on(run_dir: str) -> None:
    """Exit code 143, the last finished step durable, and a bit-exact continuation. A restore that is hit by SIGTERM
    costs nothing, before and after it has begun to fill the state."""
    with trainer(run_dir, "train(opened(), 10_000)\n") as process:
        await_line(process, "step 5")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=ANSWER_S)
    assert process.returncode == SIGTERM_CODE, output
    (fault,) = reports(run_dir)
    last = max(steps_of(output), default=5)
    assert eventually(lambda: durable(run_dir)[-1] >= last)  # steps that were made meanwhile come after the account
    newest = durable(run_dir)[-1]
    assert newest <= last + 1
    assert (fault.kind, fault.exit_code, fault.advice) == ("signal", SIGTERM_CODE, "resubmit")
    said = max(saved_on_disk(fault))
    assert 5 <= said <= newest and f"step {said} is durable" in fault.line

    for point in ("restore.chosen", "restore.filled"):
        with trainer(run_dir, "opened(); time.sleep(60)\n", fail=f"trainer/{point}:stop") as process:
            assert eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            output, _ = process.communicate(timeout=ANSWER_S)
        assert process.returncode == SIGTERM_CODE, output
        assert durable(run_dir)[-1] == newest
    with training(run_dir) as run:
        assert run.at == newest and is_exact(run)
        assert run.cp.faults == []  # they left as announced: that is no news
        run.go(3)
        assert is_exact(run)


def test_sigterm_while_the_main_thread_is_blocked(run_dir: str) -> None:
    """In C code that nothing interrupts: what is in memory becomes durable, and the process leaves. A second SIGTERM
    makes it neither quicker nor worse."""
    with trainer(
        run_dir, "cp = opened(); train(cp, 5); cp._saver.last.copied.wait(); say('blocked'); block()\n"
    ) as process:
        await_line(process, "blocked")
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=ANSWER_S)
    assert process.returncode == SIGTERM_CODE
    assert durable(run_dir)[-1] == 5 and len(reports(run_dir)) == 1
    with training(run_dir) as run:
        assert run.at == 5 and is_exact(run)


def test_sigterm_to_two_runs_in_one_process(run_dir: str) -> None:
    """Both have their last step, also the one that has more to do; the process ends with 143."""
    code = """
from ckpt.core.run.closing import EmergencySaver
other = toy.build()
tiers = [ckpt.Tier(sys.argv[1] + "-2", every=10_000)]
cp, cp2 = opened(1000), ckpt.Checkpointer(other, tiers, memory=ckpt.Memory(every=1000))
cp2.restore(default=0)
for step in range(1, 6):
    for some, of in (state, cp), (other, cp2):
        toy.train_step(some)
        of.step(step)
        if step == 5:
            of.stage()  # so that memory has it
request_save = EmergencySaver.request_save
def slow(self, *arguments, **options):
    time.sleep(2.0 if self is cp2._emergency else 0.0)
    return request_save(self, *arguments, **options)
EmergencySaver.request_save = slow
say("ready")
block()
"""
    with trainer(run_dir, code) as process:
        await_line(process, "ready")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=ANSWER_S)
    assert process.returncode == SIGTERM_CODE, output
    for run in (run_dir, run_dir + "-2"):
        with training(run) as again:
            assert again.at == 5


def test_sigterm_before_the_first_step_and_with_its_own_leave(run_dir: str) -> None:
    """There is nothing to save, and it is said so: exit code 143 and an empty run."""
    with trainer(run_dir, "opened(); say('open'); block()\n") as process:
        await_line(process, "open")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=ANSWER_S)
    assert process.returncode == SIGTERM_CODE
    (fault,) = reports(run_dir)
    assert fault.saved == [] and "nothing new was saved" in fault.line and durable(run_dir) == []
    with training(run_dir) as run:
        assert run.at == 0


def test_sigterm_while_closing(run_dir: str) -> None:
    """While close() waits for a disk that is slow, here a writer that stands still for a while: the newest step becomes
    durable, or stays in memory, and the process leaves."""
    code = """
cp = opened()
train(cp, 5)
writer = psutil.Process(cp.writer_pid)
writer.suspend()
later(0.3, os.kill, me, signal.SIGTERM)
later(1.0, writer.resume)
cp.close()
say("closed")
block()
"""
    result = run_script(HEAD + code, run_dir, timeout_s=ANSWER_S)
    assert result.returncode == SIGTERM_CODE, result.stderr
    with training(run_dir) as run:
        assert run.at == 5 and is_exact(run)


def test_sigterm_while_the_fault_handler_stops_is_not_lost(run_dir: str) -> None:
    """close() waits for an incident that is being dealt with; a SIGTERM that comes then ends the process even so."""
    code = """
began = threading.Event()
def slow(fault):
    began.set()
    time.sleep(2)
cp = opened(options=ckpt.Options(on_fault=slow))
train(cp, 2)
cp.request_save("now")
while not began.is_set():
    train(cp, 1)
later(0.7, os.kill, me, signal.SIGTERM)
cp.close()
say("closed")
time.sleep(1)
"""
    result = run_script(HEAD + code, run_dir, timeout_s=ANSWER_S)
    assert result.returncode in (SIGTERM_CODE, -signal.SIGTERM), result.stdout


def test_a_deadline_that_is_too_short_is_not_called_a_save(run_dir: str, handlers: Any) -> None:
    """The disk does not answer within the grace: memory has the step, nothing is said to be durable. Later it is."""
    handlers(signal.SIGTERM, lambda number, frame: None)
    with training(run_dir, triggers=[ckpt.triggers.on_signal("SIGTERM", grace_s=1.0)]) as run:
        run.go(3)
        send(signal.SIGTERM)
        assert saved_on_disk(run.fault("signal"))  # negative control: it is quick enough as a rule
        (writer,) = writers(Path(os.environ["CKPT_RUNTIME_DIR"]))
        writer.suspend()
        try:
            before = run.at
            send(signal.SIGTERM)
            fault = run.fault("signal", 2)
        finally:
            writer.resume()
        assert saved_on_disk(fault) == []
        assert max(saved.step for saved in fault.saved if saved.tier == "memory") >= before
        assert "is in memory, not durable yet" in fault.line
    assert durable(run_dir)[-1] == run.at


# -- what is put back --


def surroundings() -> dict[str, object]:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return {
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": descriptor,
        "faulthandler": faulthandler.is_enabled(),
        "excepthook": sys.excepthook,
        "threads": threads(),
    }


def threads() -> list[str]:
    """One thread for subscribers of events stays as long as the process, whoever started it."""
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt"))
    return [name for name in names if name != "ckpt-events"]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("enabled", [True, False], ids=["faulthandler", "no faulthandler"])
def test_everything_is_put_back(run_dir: str, enabled: bool, own_sockets: Path) -> None:
    """After close(): handlers, wakeup descriptor, faulthandler, excepthook, threads and descriptors are as before."""
    was = faulthandler.is_enabled()
    (faulthandler.enable if enabled else faulthandler.disable)()
    try:
        with training(f"{run_dir}-first") as run:  # what torch and Python open once for all
            run.go(2)
        before, fds = surroundings(), descriptors()
        with training(run_dir) as run:
            run.go(2)
            during = surroundings()
            assert all(during[name] != before[name] for name in ("handlers", "wakeup", "excepthook", "threads"))
            assert faulthandler.is_enabled()
            run.cp.request_save("something to do")
            run.fault("request")
        assert surroundings() == before
        assert eventually(lambda: descriptors() <= fds), os.listdir("/proc/self/fd")
        assert eventually(lambda: not writers(own_sockets))
    finally:
        (faulthandler.enable if was else faulthandler.disable)()


@pytest.mark.parametrize("where", ["signal.set_wakeup_fd", "ckpt.guard.preemption.NoticeWatch.start"])
def test_ctrl_c_while_it_arms_leaves_nothing_armed(run_dir: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Whoever catches it goes on with the handlers that were there, and may open the run again."""
    with training(f"{run_dir}-first") as run:  # what torch and Python open once for all
        run.go(2)
    assert eventually(lambda: not threads(), 20.0), threads()  # of that one, whose writer may be slow to leave
    before, fds = surroundings(), descriptors()
    owner, _, method = where.rpartition(".")
    place = pkgutil.resolve_name(owner)
    real, calls = getattr(place, method), list[Any]()

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        found = real(*arguments, **settings)
        calls.append(found)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(place, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.Checkpointer(toy.build(), run_dir)
    monkeypatch.undo()
    assert eventually(lambda: surroundings() == before, 20.0), surroundings()
    assert eventually(lambda: descriptors() <= fds), os.listdir("/proc/self/fd")
    with training(run_dir) as run:
        run.go(2)
    assert eventually(lambda: surroundings() == before, 20.0)


def test_no_triggers_arm_nothing(run_dir: str) -> None:
    """Everything stays as it was, no descriptor is left, and nothing is saved out of turn; request() says why it
    cannot."""
    with training(f"{run_dir}-first", triggers=[]) as run:  # what torch and Python open once for all
        run.go(2)
    assert eventually(lambda: not threads(), 20.0), threads()
    before, fds = surroundings(), descriptors()
    with training(run_dir, triggers=[]) as run:
        run.go(2)  # memory for the state as it is after a step may still be on its way
        assert eventually(lambda: run.cp._run.stager.arena is not None)
        during = surroundings()
        there = [name for name in threads() if name not in ("ckpt-stage", "ckpt-receive")]
        assert {**during, "threads": []} == before
        assert not [name for name in there if "sentinel" in name or "incident" in name]
        with pytest.raises(ckpt.errors.UsageError, match="has triggers=\\[\\]"):
            run.cp.request_save("no")
    assert eventually(lambda: descriptors() <= fds, 5.0)
    with pytest.raises(ValueError), training(run_dir, triggers=None) as run:
        raise ValueError
    assert reports(run_dir) == [] and run.faults == []


# -- exceptions --


def test_an_exception_is_accounted_for(run_dir: str) -> None:
    """Kind, summary, stack from the innermost frame, advice and exit code; the last step is durable."""

    def break_down() -> None:
        raise ValueError("the data are broken")

    with pytest.raises(ValueError, match="the data are broken"), training(run_dir) as run:
        run.go(4)
        break_down()
    (fault,) = reports(run_dir)
    assert (fault.kind, fault.advice, fault.exit_code, fault.how) == ("exception", "fix", 1, "exception")
    assert "raised ValueError: the data are broken" in fault.summary
    assert fault.stacks["0"][0].startswith("break_down (") and __file__ in fault.stacks["0"][0]
    assert fault.steps == {"0": 4}
    assert run.faults == [fault] and saved_on_disk(fault) == durable(run_dir) == [4]


def test_what_is_caught_in_the_loop_is_no_fault(run_dir: str) -> None:
    """Also if it would be one outside: an exception, an allocation that fails. SystemExit is no fault either."""
    with pytest.raises(SystemExit), training(run_dir) as run:
        run.go(2)
        with contextlib.suppress(ValueError):
            raise ValueError
        with contextlib.suppress(RuntimeError):
            torch.empty(1 << 50)
        run.go(2)
        sys.exit(0)
    assert run.faults == [] and reports(run_dir) == [] and durable(run_dir) == [4]


@pytest.mark.parametrize("how", ["torch", "python"])
def test_no_memory_is_a_kind_of_its_own(run_dir: str, how: str) -> None:
    """What torch raises on the host, and what Python does; the advice is to try again."""
    with pytest.raises((RuntimeError, MemoryError)), training(run_dir) as run:
        run.go(2)
        if how == "torch":
            torch.empty(1 << 50)
        raise MemoryError
    (fault,) = run.faults
    assert (fault.kind, fault.advice, fault.exit_code) == ("oom", "retry", 1)
    assert "ran out of memory" in fault.summary and durable(run_dir) == [2]


def test_only_the_kinds_that_were_asked_for(run_dir: str) -> None:
    """on_oom() alone says nothing of other exceptions, and the other way round."""
    errors: list[tuple[Any, Exception, list[str]]] = [
        (ckpt.triggers.on_oom(), ValueError(), []), (ckpt.triggers.on_oom(), MemoryError(), ["oom"]),
        (ckpt.triggers.on_exception(), MemoryError(), []), (ckpt.triggers.on_exception(), ValueError(), ["exception"]),
    ]  # fmt: skip
    for number, (trigger, error, kinds) in enumerate(errors):
        with pytest.raises(type(error)), training(f"{run_dir}-{number}", triggers=[trigger]) as run:
            run.go()
            raise error
        assert [fault.kind for fault in run.faults] == kinds


def test_an_exception_inside_the_optimizer_takes_what_memory_has(run_dir: str) -> None:
    """The state is half changed then, so that it must not be copied."""

    def fail(*_: Any) -> None:
        raise RuntimeError("inside the optimizer")

    with pytest.raises(RuntimeError, match="inside"), training(run_dir, memory=10) as run:
        save = run.go(10)
        assert save is not None
        save.wait_staged(60)  # a later step, where memory was not there in time
        run.go(3)
        run.state["optim"].register_step_post_hook(fail)
        run.go()
    (fault,) = run.faults
    assert {saved.step for saved in fault.saved} == {10} and saved_on_disk(fault) == [10]
    with training(run_dir, memory=10) as run:
        assert run.at == 10 and is_exact(run)


def test_an_exception_that_nobody_catches(run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `with` block too: exit code 1, the traceback as ever, an account, and a word to torchrun."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    result = run_script(HEAD + "cp = opened(); train(cp, 3); cp.stage(); raise ValueError('boom')\n", run_dir)
    assert result.returncode == 1 and result.stderr.rstrip().endswith("ValueError: boom")
    assert "boom" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    (fault,) = reports(run_dir)
    assert (fault.kind, fault.exit_code) == ("exception", 1)
    with training(run_dir) as run:
        assert run.at == 3 and is_exact(run) and run.cp.faults == []


@pytest.mark.parametrize("caught", [False, True], ids=["uncaught", "caught"])
def test_what_keeps_a_run_from_being_opened_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caught: bool
) -> None:
    """To torchrun, with the caller's frame; and on the screen once, without ours. Control: who catches it says nothing,
    and the next exception is the cause."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    opening = "def opening(): ckpt.Checkpointer({'n': torch.zeros(1)}, '/proc/no/run')\n"
    calling = (
        "import contextlib\nwith contextlib.suppress(ckpt.errors.StoreError): opening()\n1 / 0"
        if caught
        else "opening()"
    )
    said = run_script(f"import ckpt, torch\n{opening}{calling}\n").stderr
    if caught:
        assert "ZeroDivisionError" in said and "/proc/no" not in said and not (tmp_path / "error.json").exists()
        return
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "NotFoundError" in message["message"] and "/proc/no/run" in message["message"]
    assert "opening (<string>:2)" in message["extraInfo"]["py_callstack"]
    assert said.count("file:///proc/no/run") == 1 and "errors.py" not in said and said.startswith("Traceback")


# -- deaths --


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([sys.executable, "-m", "ckpt", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_the_next_start_knows_how_the_last_one_died(run_dir: str, how: str) -> None:
    """cp.faults[0] and on_fault say it, with the stack of a crash, even if another Checkpointer was closed before; the
    step in memory is restored. A crash is told on stderr as ever. Nobody can trigger a dead trainer."""
    if how == "crash":  # faulthandler is on before, as in `python -X faulthandler`
        code = "faulthandler.enable()\ndef crash(): ctypes.string_at(1)\n"
        code += "other = ckpt.Checkpointer({'n': torch.zeros(1)}, options=ckpt.Options(name='other'))\n"
        code += "cp = opened(); train(cp, 5)\n"
        code += "other.close(); cp._saver.last.copied.wait(); crash()\n"
    else:
        code = "cp = opened(); train(cp, 5); cp._saver.last.copied.wait(); os.kill(me, signal.SIGKILL)\n"
    result = run_script(HEAD + code, run_dir)
    assert result.returncode == (-signal.SIGSEGV if how == "crash" else -signal.SIGKILL)
    assert ("Segmentation fault" in result.stderr) == (how == "crash")
    told = cli("trigger", run_dir)
    assert told.returncode != 0 and "is not running" in told.stderr
    with training(run_dir) as run:
        assert run.at == 5 and run.cp.last_restore is not None and run.cp.last_restore.tier == "memory"
        assert is_exact(run)
        (fault,) = run.cp.faults
        assert (fault.kind, fault.by, fault.steps) == ("death", "writer", {"0": 5})
        assert "after step 5" in fault.summary and "training" in fault.summary
        assert (fault.how == "faulthandler") == (how == "crash")
        assert eventually(lambda: run.faults == [fault])
        assert eventually(lambda: [one.kind for one in reports(run_dir)] == ["death"])
        if how == "crash":
            assert any(" in crash" in line for line in reports(run_dir)[0].stacks["0"])
        else:
            assert "SIGKILL" in fault.summary
    with training(run_dir) as run:  # it is said once
        assert run.cp.faults == []


def test_sigterm_while_the_interpreter_is_held_up(run_dir: str) -> None:
    """No thread of the trainer can act: the writer hears the signal, and makes durable what is in memory."""
    code = """
cp = opened()
train(cp, 5)
cp._saver.last.copied.wait()
mutex, held = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
held.pthread_mutex_lock(mutex)
say("held")
held.pthread_mutex_lock(mutex)
"""
    with trainer(run_dir, code) as process:
        await_line(process, "held")
        time.sleep(0.5)  # else the fault handler may just take the signal before the lock is held for ever
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: bool(reports(run_dir)))
        (fault,) = reports(run_dir)
        assert (fault.kind, fault.by) == ("signal", "writer") and "interpreter is blocked" in fault.summary
        assert saved_on_disk(fault)[0] == 5 and durable(run_dir)[-1] == 5
        assert process.poll() is None


# -- hangs --


def test_a_hang_is_reported_and_a_pause_is_none(run_dir: str) -> None:
    """The same standstill twice: nothing is logged inside cp.not_training(), and one line outside it, while
    it still lasts."""
    with training(run_dir, triggers=[ckpt.triggers.on_hang(**QUICK_HANG)]) as run:
        end = time.monotonic() + 1.5
        run.until(lambda: time.monotonic() > end)  # so that the usual pace is known
        with run.cp.not_training():
            time.sleep(3.5)
        assert run.faults == []
        end = time.monotonic() + 0.5
        run.until(lambda: time.monotonic() > end)
        assert run.faults == []
        hung = run.at
        assert eventually(lambda: bool(run.faults))  # negative control: this thread does nothing else meanwhile
        time.sleep(1.0)
        (fault,) = run.faults
        assert fault.kind == "hang" and fault.exit_code is None and fault.steps == {"0": hung}
        assert saved_on_disk(fault) == [hung] and durable(run_dir)[-1] == hung
        assert any("eventually" in frame for frame in fault.stacks["0"])
        run.go(3)
        assert is_exact(run)


def test_a_trainer_that_was_stopped_does_not_report_it_again(run_dir: str) -> None:
    """Who is stopped by SIGSTOP is reported as that by its writer; let go on, it trains, and says of no hang."""
    code = "cp = opened(triggers=[ckpt.triggers.on_hang(min_s=1, factor=2)])\nwhile True: train(cp, 20)\n"
    with trainer(run_dir, code) as process:
        await_line(process, "step 120")
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: bool(reports(run_dir)))
        process.send_signal(signal.SIGCONT)
        await_line(process, "step 400")
        (fault,) = reports(run_dir)
        assert (fault.kind, fault.by) == ("hang", "writer") and "kill -CONT" in fault.summary


def test_a_hang_may_end_the_process(run_dir: str) -> None:
    """action="exit": the last step is durable, and the exit code tells the launcher to start it again."""
    code = "cp = opened(triggers=[ckpt.triggers.on_hang(action='exit', min_s=1, factor=2)]); train(cp, 120); block()\n"
    result = run_script(HEAD + code, run_dir, timeout_s=ANSWER_S)
    assert result.returncode == 75, result.stderr
    (fault,) = reports(run_dir)
    assert (fault.kind, fault.exit_code, fault.advice) == ("hang", 75, "retry")
    assert eventually(
        lambda: durable(run_dir)[-1:] == [120]
    )  # memory has it in any case, so nobody waited for the disk
    assert any("block" in frame for frame in fault.stacks["0"])
    with training(run_dir) as run:
        assert run.at == 120 and is_exact(run) and run.cp.faults == []


def test_a_pause_inside_a_pause(run_dir: str) -> None:
    """An evaluation that pauses by itself, called inside a pause: until the outer one ends it is no training."""
    with training(run_dir) as run:
        run.go()
        with run.cp.not_training():
            with run.cp.not_training():
                pass
            assert run.cp._run.heartbeat.read().doing == "paused"


# -- requests --


def test_a_request_saves_one_of_the_next_steps(run_dir: str) -> None:
    """From any thread, at once, and as often as asked for; the account says who wanted it, and why."""
    with training(run_dir) as run:
        run.go(2)
        run.cp.request_save("before the upgrade")
        fault = run.fault("request")
        assert "before the upgrade" in fault.summary and fault.exit_code is None and saved_on_disk(fault)
        thread = threading.Thread(target=run.cp.request_save)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        again = run.fault("request", 2)
        assert saved_on_disk(again) > saved_on_disk(fault)
    with pytest.raises(ckpt.errors.ClosedError):
        run.cp.request_save("too late")


def test_a_request_after_going_back(run_dir: str) -> None:
    """The same step number as of an earlier request is another step after restore(step=...)."""
    with training(run_dir, memory=10) as run:
        run.go(4)
        run.cp.save().wait_durable(ANSWER_S)
        run.go(2)
        for _ in range(2):
            run.cp.request_save("now")
            assert eventually(lambda: run.cp._run.intervals.plan._ordered == [7], 5.0)
            time.sleep(0.3)  # the second time it is 7 already
            save = run.go()
            assert save is not None and save.tiers
            if not run.of("request"):
                run.fault("request")
                assert run.cp.restore(step=4) == 4
                run.at = 4
                run.go(2)


def test_a_shell_can_ask_for_a_save(run_dir: str) -> None:
    """`ckpt trigger` says whom it told; the account has its words, `ckpt ls` why it is there. No run: an error."""
    missing = cli("trigger", f"{run_dir}-elsewhere")
    assert missing.returncode != 0 and "this run has no writer on this machine" in missing.stderr
    with training(run_dir) as run:
        run.go(2)
        command = [sys.executable, "-m", "ckpt", "trigger", run_dir, "--why", "before the upgrade", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
            fault = run.fault("request")
            told = json.loads(shell.communicate(timeout=ANSWER_S)[0])
        assert shell.returncode == 0 and told["pid"] == os.getpid() and told["rank"] == 0
        assert 2 <= told["step"] <= run.at and told["doing"] == "training"
        assert fault.how == "ckpt trigger" and "before the upgrade" in fault.summary and saved_on_disk(fault)
    assert "  extra" in cli("ls", run_dir).stdout
    closed = cli("trigger", run_dir)
    assert closed.returncode != 0 and "no writer" in closed.stderr


def test_a_run_without_triggers_cannot_be_asked(run_dir: str) -> None:
    """It says so, instead of promising a save."""
    with training(run_dir, triggers=[]) as run:
        run.go()
        with pytest.raises(UsageError, match="has no triggers"):
            channel.ask_once(key_of(run_dir, 0), TriggerSave(""), 10.0)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_on_fault_that_raises_harms_nothing(
    run_dir: str, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    """It is logged, sys.exit() too; later faults are dealt with and told as before."""

    def fail(fault: Fault) -> None:
        raise kind("of the hook")

    with training(run_dir, on_fault=fail) as run:
        run.go()
        for number in (1, 2):
            run.cp.request_save(f"number {number}")
            assert saved_on_disk(run.fault("request", number))
    assert caplog.text.count("on_fault failed") == 2 and "of the hook" in caplog.text


# -- forked children --


def test_a_signal_to_a_dataloader_worker_is_its_own(run_dir: str) -> None:
    """The worker ends as ever (torch answers its parent's SIGTERM by leaving with 0); the trainer saves nothing, stays,
    and can still be asked to save."""
    code = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index): return torch.full((4,), float(index))
faults = []
with opened(options=ckpt.Options(on_fault=faults.append)) as cp:
    train(cp, 3)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        batches = iter(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"))
        next(batches)
        worker = batches._workers[0]
        try:
            os.kill(worker.pid, number)
            worker.join(20)
            time.sleep(0.2)
        except RuntimeError:
            pass  # torch tells its user so
        say("worker", worker.exitcode, faults)
        batches._shutdown_workers()
    os.kill(me, signal.SIGUSR1)
    while not faults:
        train(cp, 1)
    say("mine", [fault.kind for fault in faults])
os._exit(0)
"""
    result = run_script(HEAD + code, run_dir, timeout_s=ANSWER_S)
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if not line.startswith("step")] == [
        "start 0", "worker 0 []", f"worker -{signal.SIGUSR1:d} []", "mine ['signal']",
    ]  # fmt: skip


def in_child(action: Callable[[], object]) -> int:
    """The status of a forked child that does this, and nothing else."""
    child = os.fork()
    if not child:
        try:
            action()
        except ckpt.errors.ClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_can_do_nothing_and_break_nothing(run_dir: str) -> None:
    """ClosedError for what it may not do; SIGTERM ends it, and the parent hears of none of that."""

    def pause() -> None:
        with run.cp.not_training():
            os._exit(0)

    with training(run_dir) as run:
        run.go(2)
        assert in_child(pause) in (0, 7 << 8)  # it does nothing, or is refused
        for action in (lambda: run.cp.step(3), lambda: run.cp.request_save(), lambda: run.cp.restore()):
            assert in_child(action) == 7 << 8
        assert in_child(run.cp.close) == 1 << 8  # harmless
        assert in_child(lambda: (send(signal.SIGTERM), time.sleep(20))) == signal.SIGTERM
        assert run.faults == []
        run.go(2)


# -- memory --


def test_memory_is_given_back_and_saving_goes_on(run_dir: str) -> None:
    """Slot by slot down to two; pages return to the system, no step is skipped, and what is saved then restores."""
    with training(run_dir) as run:
        first = run.go()
        assert first is not None
        first.wait_staged(ANSWER_S)  # steps before there is memory are left out
        run.go(9)
        skipped, arena = run.cp.stats.skipped, run.cp._run.stager.arena
        assert arena is not None
        slots, blocks = arena.slots, os.fstat(arena.fd).st_blocks
        given = []
        while freed := run.cp._emergency.give_memory_back():
            given.append(freed)
            assert is_sealed_newest(run)
            run.go(3)
        assert len(given) == slots - 2 and set(given) == {arena.slot_size}
        assert os.fstat(arena.fd).st_blocks * 512 <= blocks * 512 - sum(given)
        run.go(10)
        assert run.cp.stats.skipped == skipped and run.cp._run.stager.arena is arena
        exact = toy.digest(run.state)
        run.cp.save().wait_durable(ANSWER_S)
        with torch.no_grad():
            for tensor in toy.tensors(run.state):
                tensor.zero_()
        assert run.cp.restore() == run.at
        assert run.cp.last_restore is not None and run.cp.last_restore.tier == "memory"
        assert toy.digest(run.state) == exact
        run.go(5)
        assert is_exact(run)
    assert durable(run_dir)[-1] == run.at


def is_sealed_newest(run: Training) -> bool:
    """Whether memory still holds the newest step."""
    assert run.cp._saver.last is not None
    run.cp._saver.last.copied.wait(ANSWER_S)
    return max(checkpoint.step for checkpoint in run.cp._run.supervisor.held.sealed()) == run.at


def test_pressure_is_accounted_for(run_dir: str) -> None:
    """What the writer says of memory frees a slot, and the account says how much."""
    with training(run_dir) as run:
        run.go(5)
        arena = run.cp._run.stager.arena
        assert arena is not None and eventually(lambda: arena.ready == arena.slots)  # else there is no slot to spare
        run.cp._run.supervisor._on_note(PressureNote(1, 2, "little is left"))
        fault = run.fault("memory")
        assert "little is left" in fault.summary and "of snapshots" in fault.summary
        assert fault.exit_code is None and saved_on_disk(fault)
