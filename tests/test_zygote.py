"""Tests that processes started by `processes.start_python` behave like ordinary processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckpt
from processes import Forked, run_python, start_python

STARTS = pytest.mark.parametrize("run", (subprocess.run, run_python), ids=("spawned", "forked"))


def python(run: Any, code: str, *words: str, **settings: Any) -> tuple[int, str, str]:
    done = run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, **settings)
    return done.returncode, done.stdout, done.stderr


def test_only_zygote_processes_are_forked() -> None:
    words = [sys.executable, "-c", "import os; print(os.getppid())"]
    for settings, forked in (({}, True), ({"env": {**os.environ, "PYTHONHASHSEED": "1"}}, False)):
        with start_python(words, stdout=subprocess.PIPE, text=True, **settings) as process:  # type: ignore[arg-type]
            assert isinstance(process, Forked) == forked
            assert process.stdout is not None
            assert (int(process.stdout.read()) != os.getpid()) == forked


@STARTS
def test_exit_codes_and_tracebacks_are_ordinary(run: Any) -> None:
    assert python(run, "import sys; sys.exit(3)") == (3, "", "")
    assert python(run, "raise SystemExit('no')") == (1, "", "no\n")
    assert python(run, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")[0] == -signal.SIGKILL
    code, _, err = python(run, "1 / 0")
    assert code == 1 and err.startswith("Traceback") and err.endswith("ZeroDivisionError: division by zero\n")
    late = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
class Loud:
    def __del__(self): print("deleted")
loud = Loud()
print("end")
"""
    assert python(run, late) == (0, "end\nthread\nat exit\ndeleted\n", "")


@STARTS
def test_environment_and_arguments_are_ordinary(run: Any, tmp_path: Path) -> None:
    look = """
import os, sys, threading
print(__name__, sys.argv, os.getcwd(), sorted(os.environ), sys.path[:2], sys.stdin.read())
with open("/proc/self/cmdline") as file: print(file.read().split(chr(0))[:len(sys.orig_argv)] == sys.orig_argv)
del file
print(sorted(vars()), threading.active_count(), len(os.listdir("/proc/self/fd")), "ckpt" in sys.modules)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP", "CKPT"))}
    environment |= {"PYTHONPATH": "/here", "NEW": "é"}
    code, out, err = python(run, look, "a", "é b", cwd=tmp_path, env=environment, input="said")
    there, line, inside = out.splitlines()
    assert (code, err, line) == (0, "", "True")
    assert there == f"__main__ ['-c', 'a', 'é b'] {tmp_path} {sorted(environment)} ['', '/here'] said"
    names = ["__annotations__", "__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"]
    assert inside == f"{[*names, 'os', 'sys', 'threading']} 1 4 False"


def facts(process: psutil.Process) -> dict[str, Any]:
    """Return what other processes can see of a process."""
    line = [word for word in process.cmdline() if word]
    status = Path(f"/proc/{process.pid}/status").read_text()
    return {
        "line": [*line[:4], *line[5:7], *line[8:]],  # without the number of a descriptor, and when its trainer started
        "name": process.name(), "parent": process.ppid(), "session": os.getsid(process.pid) == process.pid,
        "nice": process.nice(), "folder": process.cwd(), "io": process.ionice(),
        "ignored": [int(x[8:], 16) & 0x7FFFFFFF for x in status.splitlines() if x.startswith("SigIgn")],
        "standard": [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)],
        "open": sorted(os.readlink(path).partition(":")[0] for path in Path(f"/proc/{process.pid}/fd").iterdir()),
    }  # fmt: skip


def test_forked_writer_equals_spawned_writer(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers everything visible to other processes, and its environment."""
    found = []
    for forked in (True, False):
        if not forked:
            monkeypatch.setenv("PYTHONHASHSEED", "1")  # an interpreter reads it when it starts
        with ckpt.Checkpointer({"x": 1}, ckpt.Tier(run_dir, every=1)) as cp:
            writer = psutil.Process(cp.writer_pid)
            cp.restore(default=0)
            cp.save(1 + len(found)).wait_durable(60)
            found.append(facts(writer))
        writer.wait(30)
    assert found[0] == found[1]


def test_forked_writer_has_its_fail_points(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_FAIL", "writer/data_file.written:enospc:1")
    with ckpt.Checkpointer({"x": 1}, run_dir, options=ckpt.Options(on_error="warn")) as cp:
        cp.restore(default=0)
        with pytest.raises(ckpt.errors.SaveError, match=r"[Nn]o space"):
            cp.save(1).wait_durable(60)
