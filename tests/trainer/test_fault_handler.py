"""Tests of faults on a single rank (signals, exceptions, crashes, hangs, requests): saves, reports, cleanup."""

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
from ckpt.core.ipc.messages import FaultNote, TriggerSave
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
    """The toy run, step by step. `at`: the last finished step; `faults`: the arguments of on_fault."""

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
        """Train until the condition is true."""
        end = time.monotonic() + ANSWER_S
        while not condition():
            assert time.monotonic() < end, "the condition did not become true"
            self.go()
            time.sleep(0.01)

    def fault(self, kind: str, number: int = 1) -> Fault:
        """Train until this many faults of this kind were reported, and return the last of them."""
        self.until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    def of(self, kind: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind == kind]


@contextlib.contextmanager
def training(run: str, *, memory: int = 1, on_fault: Any = None, **settings: Any) -> Iterator[Training]:
    """Open a Checkpointer that saves to disk only at its end."""
    state, faults = toy.build(), list[Fault]()

    def note(fault: Fault) -> None:
        faults.append(fault)
        if on_fault is not None:
            on_fault(fault)

    tiers = [ckpt.Tier(run, every=10_000)]
    with ckpt.Checkpointer(
        state, tiers, options=ckpt.Options(on_fault=note), memory=ckpt.Memory(every=memory, keep=4), **settings
    ) as cp:
        yield Training(cp, state, faults)


def durable(run: str) -> list[int]:
    """Return the durable steps on disk."""

    async def look() -> list[int]:
        store = open_store(run, writable=False)
        log = RunLog(store)
        await log.open()
        await store.aclose()
        return sorted(commit.step for commit in log.state.commits.values())

    return asyncio.run(look())


def reports(run: str) -> list[Fault]:
    """Return the fault reports of the run, in order."""
    found = sorted(Path(run, "faults").glob("*.json"))
    return [Fault.from_json(json.loads(path.read_text())) for path in found]


def saved_on_disk(fault: Fault) -> list[int]:
    return [saved.step for saved in fault.saved if saved.tier != "memory" and not saved.error]


@pytest.fixture
def handlers() -> Iterator[Callable[[int, Any], None]]:
    """Install handlers of the user, and remove them afterwards."""
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
    cp = ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(every=memory, keep=4), **settings)
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
    """Start a training process that the test acts upon while it runs."""
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
    """Return all lines up to this one; fail if it does not appear."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == wanted:
            return lines
    raise AssertionError(f"{wanted!r} did not appear: {lines}")


def steps_of(output: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]


def is_exact(run: Training) -> bool:
    """Return True if the state equals that of an uninterrupted run, bit for bit."""
    return toy.digest(run.state) == toy.reference(run.at)


# -- signals --


def test_sigusr1_saves_and_training_continues(run_dir: str) -> None:
    """The last or the next step becomes durable and is reported. Training continues with an unchanged state."""
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


def test_negative_control_signal_without_trigger_saves_nothing(run_dir: str, handlers: Any) -> None:
    """If only SIGUSR2 is a trigger, SIGUSR1 reaches only the user's handler."""
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
def test_sigterm_with_user_handler_saves_and_continues(run_dir: str, handlers: Any, when: str) -> None:
    """The handler runs, the process continues and the state is saved, whether it was installed before or after ours."""
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


def test_ctrl_c_raises_keyboard_interrupt_without_report(run_dir: str) -> None:
    """Ctrl-C raises KeyboardInterrupt, writes no fault report, and makes the newest step durable."""
    with pytest.raises(KeyboardInterrupt):
        with training(run_dir) as run:
            run.go(3)
            send(signal.SIGINT)
            time.sleep(ANSWER_S)
    assert run.faults == [] and reports(run_dir) == [] and durable(run_dir) == [3]


def test_sigterm_saves_exits_and_next_start_continues(run_dir: str) -> None:
    """The exit code is 143, the last finished step is durable, and the next start continues bit for bit.
    SIGTERM during a restore loses nothing, before and after it has begun to fill the state."""
    with trainer(run_dir, "train(opened(), 10_000)\n") as process:
        await_line(process, "step 5")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=ANSWER_S)
    assert process.returncode == SIGTERM_CODE, output
    (fault,) = reports(run_dir)
    last = max(steps_of(output), default=5)
    assert eventually(lambda: durable(run_dir)[-1] >= last)  # steps finished after the report may become durable later
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
        assert run.cp.faults == []  # they exited as announced, so the next start reports nothing
        run.go(3)
        assert is_exact(run)


def test_sigterm_saves_while_main_thread_is_blocked(run_dir: str) -> None:
    """The main thread is blocked in C code that no signal interrupts: the snapshot in memory becomes durable, and the
    process exits. Further SIGTERMs change nothing."""
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


def test_sigterm_saves_two_runs_in_one_process(run_dir: str) -> None:
    """Both runs save their last step, also the slower one, and the process exits with 143."""
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


def test_sigterm_while_closing_loses_no_step(run_dir: str) -> None:
    """On a slow disk (a suspended writer), the newest step is durable or in memory, then the process exits."""
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


def test_save_beyond_grace_period_is_not_reported_durable(run_dir: str, handlers: Any) -> None:
    """The disk does not respond within the grace period: the report lists the step in memory only, later as durable."""
    handlers(signal.SIGTERM, lambda number, frame: None)
    with training(run_dir, triggers=[ckpt.triggers.on_signal("SIGTERM", grace_s=1.0)]) as run:
        run.go(3)
        send(signal.SIGTERM)
        assert saved_on_disk(run.fault("signal"))  # negative control: normally the disk is fast enough
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


# -- what close() restores --


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
    """Return the threads of ckpt. The one for event subscribers lives as long as the process and does not count."""
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt"))
    return [name for name in names if name != "ckpt-events"]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("enabled", [True, False], ids=["faulthandler", "no faulthandler"])
def test_close_restores_handlers_threads_and_descriptors(run_dir: str, enabled: bool, own_sockets: Path) -> None:
    """After close(): handlers, wakeup descriptor, faulthandler, excepthook, threads and descriptors are as before."""
    was = faulthandler.is_enabled()
    (faulthandler.enable if enabled else faulthandler.disable)()
    try:
        with training(f"{run_dir}-first") as run:  # PyTorch and Python open some descriptors only once
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
def test_ctrl_c_while_opening_leaves_no_handlers(run_dir: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """After the exception is caught, the previous handlers are active again, and the run can be opened again."""
    with training(f"{run_dir}-first") as run:  # PyTorch and Python open some descriptors only once
        run.go(2)
    assert eventually(lambda: not threads(), 20.0), threads()  # those of the first run, whose writer may exit slowly
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


def test_run_without_triggers_installs_nothing(run_dir: str) -> None:
    """Handlers stay as they were, no descriptor leaks, and no emergency save happens; a request raises UsageError."""
    with training(f"{run_dir}-first", triggers=[]) as run:  # PyTorch and Python open some descriptors only once
        run.go(2)
    assert eventually(lambda: not threads(), 20.0), threads()
    before, fds = surroundings(), descriptors()
    with training(run_dir, triggers=[]) as run:
        run.go(2)  # memory for the state may still be allocated in the background
        assert eventually(lambda: run.cp._run.stager.arena is not None)
        during = surroundings()
        there = [name for name in threads() if name not in ("ckpt-stage", "ckpt-receive")]
        assert {**during, "threads": []} == before
        assert not [name for name in there if "sentinel" in name or "incident" in name]
        with pytest.raises(UsageError, match="has triggers=\\[\\]"):
            run.cp.request_save("no")
        with pytest.raises(UsageError, match="has no triggers"):
            channel.ask_once(key_of(run_dir, 0), TriggerSave(""), 10.0)
    assert eventually(lambda: descriptors() <= fds, 5.0)
    with pytest.raises(ValueError), training(run_dir, triggers=None) as run:
        raise ValueError
    assert reports(run_dir) == [] and run.faults == []


# -- exceptions --


def test_exception_is_reported_with_stack_and_advice(run_dir: str) -> None:
    """The report has kind, summary, stack from the innermost frame, advice and exit code; the last step is durable."""

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


def test_exception_caught_in_the_loop_is_no_fault(run_dir: str) -> None:
    """This includes a failed allocation. SystemExit is not a fault either."""
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
def test_out_of_memory_is_reported_as_oom(run_dir: str, how: str) -> None:
    """This covers errors of PyTorch on the host and MemoryError of Python; the advice is to retry."""
    with pytest.raises((RuntimeError, MemoryError)), training(run_dir) as run:
        run.go(2)
        if how == "torch":
            torch.empty(1 << 50)
        raise MemoryError
    (fault,) = run.faults
    assert (fault.kind, fault.advice, fault.exit_code) == ("oom", "retry", 1)
    assert "ran out of memory" in fault.summary and durable(run_dir) == [2]


def test_uncaught_exception_reaches_torchrun(run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a `with` block: exit code 1, the usual traceback, a report, and torchrun's error file."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    result = run_script(HEAD + "cp = opened(); train(cp, 3); cp.stage(); raise ValueError('boom')\n", run_dir)
    assert result.returncode == 1 and result.stderr.rstrip().endswith("ValueError: boom")
    assert "boom" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    (fault,) = reports(run_dir)
    assert (fault.kind, fault.exit_code) == ("exception", 1)
    with training(run_dir) as run:
        assert run.at == 3 and is_exact(run) and run.cp.faults == []


@pytest.mark.parametrize("caught", [False, True], ids=["uncaught", "caught"])
def test_error_while_opening_is_reported_to_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caught: bool
) -> None:
    """torchrun's error file has the caller's frame, and stderr shows the error once, without frames of ckpt.
    Control: a caught error is not reported, and the next exception is the cause."""
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


# -- crashes --


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([sys.executable, "-m", "ckpt", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_next_start_reports_how_trainer_died(run_dir: str, how: str) -> None:
    """cp.faults[0] and on_fault report it, with the stack of a crash, even if another Checkpointer was closed before.
    The step in memory is restored. A crash still prints its stack to stderr. `ckpt trigger` fails for a dead
    trainer."""
    if how == "crash":  # faulthandler is enabled before, as in `python -X faulthandler`
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
    with training(run_dir) as run:  # the next start does not report it again
        assert run.cp.faults == []


def test_sigterm_while_interpreter_is_blocked_saves_snapshot(run_dir: str) -> None:
    """No thread of the trainer can run: the writer receives the signal and makes the snapshot in memory durable."""
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
        time.sleep(0.5)  # else the fault handler may receive the signal before the lock blocks it
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: bool(reports(run_dir)))
        (fault,) = reports(run_dir)
        assert (fault.kind, fault.by) == ("signal", "writer") and "interpreter is blocked" in fault.summary
        assert saved_on_disk(fault)[0] == 5 and durable(run_dir)[-1] == 5
        assert process.poll() is None


# -- hangs --


def test_hang_is_reported_but_declared_pause_is_not(run_dir: str) -> None:
    """Inside cp.not_training() nothing is reported; outside it, one fault is, during the pause."""
    with training(run_dir, triggers=[ckpt.triggers.on_hang(**QUICK_HANG)]) as run:
        end = time.monotonic() + 1.5
        run.until(lambda: time.monotonic() > end)  # so that the usual step time is known
        with run.cp.not_training():
            with run.cp.not_training():  # an evaluation that pauses too: the outer pause goes on
                pass
            time.sleep(3.5)
        assert run.faults == []
        end = time.monotonic() + 0.5
        run.until(lambda: time.monotonic() > end)
        assert run.faults == []
        hung = run.at
        assert eventually(lambda: bool(run.faults))  # negative control: this thread does nothing else
        time.sleep(1.0)
        (fault,) = run.faults
        assert fault.kind == "hang" and fault.exit_code is None and fault.steps == {"0": hung}
        assert saved_on_disk(fault) == [hung] and durable(run_dir)[-1] == hung
        assert any("eventually" in frame for frame in fault.stacks["0"])
        run.go(3)
        assert is_exact(run)


def test_stopped_trainer_is_reported_only_by_writer(run_dir: str) -> None:
    """The writer reports a trainer stopped by SIGSTOP. After SIGCONT it trains, and reports no hang itself."""
    code = "cp = opened(triggers=[ckpt.triggers.on_hang(min_s=1, factor=2)])\nwhile True: train(cp, 20)\n"
    with trainer(run_dir, code) as process:
        await_line(process, "step 120")
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: bool(reports(run_dir)))
        process.send_signal(signal.SIGCONT)
        await_line(process, "step 400")
        (fault,) = reports(run_dir)
        assert (fault.kind, fault.by) == ("hang", "writer") and "kill -CONT" in fault.summary


def test_hang_with_exit_action_ends_process(run_dir: str) -> None:
    """action="exit": the last step is durable, and the exit code makes the launcher restart the process."""
    code = "cp = opened(triggers=[ckpt.triggers.on_hang(action='exit', min_s=1, factor=2)]); train(cp, 120); block()\n"
    result = run_script(HEAD + code, run_dir, timeout_s=ANSWER_S)
    assert result.returncode == 75, result.stderr
    (fault,) = reports(run_dir)
    assert (fault.kind, fault.exit_code, fault.advice) == ("hang", 75, "retry")
    assert eventually(
        lambda: durable(run_dir)[-1:] == [120]
    )  # memory has it already, so the exit does not wait for the disk
    assert any("block" in frame for frame in fault.stacks["0"])
    with training(run_dir) as run:
        assert run.at == 120 and is_exact(run) and run.cp.faults == []


# -- requests --


def test_request_saves_one_of_the_next_steps(run_dir: str) -> None:
    """Requests return immediately, from any thread, repeatedly; the report has their source and reason."""
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


def test_trigger_command_requests_a_save(run_dir: str) -> None:
    """`ckpt trigger` prints which trainer it notified; the report has its reason, and `ckpt ls` marks the checkpoint.
    Without a running trainer it fails."""
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


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_on_fault_exception_is_logged_and_ignored(
    run_dir: str, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    """The exception is logged, also SystemExit; later faults are handled and reported as before."""

    def fail(fault: Fault) -> None:
        raise kind("of the hook")

    with training(run_dir, on_fault=fail) as run:
        run.go()
        for number in (1, 2):
            run.cp.request_save(f"number {number}")
            assert saved_on_disk(run.fault("request", number))
    assert caplog.text.count("on_fault failed") == 2 and "of the hook" in caplog.text


# -- forked children --


def test_signal_to_dataloader_worker_spares_trainer(run_dir: str) -> None:
    """The worker ends as usual (on SIGTERM from its parent it exits with 0). The trainer saves nothing, continues, and
    still accepts save requests."""
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
            pass  # PyTorch raises it when a worker is killed
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


# -- memory --


def test_memory_pressure_frees_slot_and_is_reported(run_dir: str) -> None:
    """A memory warning from the writer frees a slot, and the report states how much."""
    with training(run_dir) as run:
        run.go(5)
        arena = run.cp._run.stager.arena
        assert arena is not None and eventually(lambda: arena.ready == arena.slots)  # else no slot can be freed
        run.cp._run.supervisor._on_note(FaultNote("memory", "little is left"))
        fault = run.fault("memory")
        assert "little is left" in fault.summary and "of snapshots" in fault.summary
        assert fault.exit_code is None and saved_on_disk(fault)
