"""Processes that tests start, wait for and look for."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from writer_zygote import ROOM, Writers
from zygote import NUMBER

LIB = Path(__file__).parent
REPO = LIB.parent.parent
# What a process of a test may import: the library, and the files that tests share.
PYTHONPATH = ":".join(map(str, (REPO, REPO / "backends", LIB, REPO / "tests" / "promises")))


def writers(folder: Path) -> list[psutil.Process]:
    """The writer processes whose socket lies in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


# -- Python processes, forked where that is as good as a start --

_SERVE = "import sys; sys.path[0] = sys.argv[2]; import zygote; del sys.path[0]; exec(*zygote.serve(list(sys.path)))"
# Variables that an interpreter and its libraries read only once, at their start, and variables without effect.
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC", "GLIBC", "OMP_", "MKL_", "OPENBLAS", "TORCH_", "KMP_")
_LATER = (
    "PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
_PLAIN = {"stdin", "stdout", "stderr", "cwd", "env", "text", "bufsize", "encoding", "start_new_session", "inside"}


class Zygote:
    """See zygote.py. It starts with the first process that is asked of it, and ends with this one."""

    def __init__(
        self,
        *modules: str,
        python: str | Path = sys.executable,
        control: socket.socket | None = None,
        **variables: str,
    ) -> None:
        self.modules = modules  # imported in addition to the modules in zygote.WARM
        self.variables = variables  # of its environment, when it imports them
        self.python = str(python)
        self.control = control
        self.lock = threading.Lock()
        self.environment = _at_start({**os.environ, **variables})
        self.process: subprocess.Popen[bytes] | None = None

    def can(self, words: Sequence[Any], settings: dict[str, Any]) -> bool:
        """Return True if a child would be like the process that `subprocess.Popen` starts."""
        return (
            str(words[0]) == self.python
            and (words[1] in ("-c", "-m", "-u") or not str(words[1]).startswith("-"))
            and settings.keys() <= _PLAIN
            and _at_start(environment := settings.get("env") or os.environ) == self.environment
            and not any(
                Path(path, "sitecustomize.py").exists() for path in environment.get("PYTHONPATH", "").split(":")
            )
        )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """The pid of a child that has these files."""
        message = json.dumps(request).encode()
        if WRITERS is not None:
            WRITERS.start()  # which it may ask for one
        with self.lock:
            control = self.control or self._start()
            try:
                socket.send_fds(control, [NUMBER.pack(len(message))], files)
                control.sendall(message)
                (pid,) = NUMBER.unpack(control.recv(NUMBER.size, socket.MSG_WAITALL))
            except BaseException:  # as of a test that took too long: what comes next would be its answer
                self.close()
                raise
        return int(pid)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None
        if self.process is not None:
            self.process.wait(60)
            self.process = None

    def _start(self) -> socket.socket:
        # OpenMP's threads spin while they wait, which starves everything else on a machine with few cores; OpenBLAS
        # starts its own when it is loaded.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", **self.variables}
        environment = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        self.control, theirs = socket.socketpair()
        words = [self.python, "-c", _SERVE, str(theirs.fileno()), str(LIB), "x" * ROOM, *self.modules]
        with theirs, open(os.devnull) as nothing:
            self.process = subprocess.Popen(words, env=environment, pass_fds=[theirs.fileno()], stdin=nothing)
        return self.control


def _at_start(environment: Any) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_AT_START) and k not in _LATER}


ZYGOTE: Zygote | None = None  # of pytest, and of torchrun; other processes start too few
WRITERS: Writers | None = None


@contextlib.contextmanager
def warm(*modules: str, python: str | Path = sys.executable, **variables: str) -> Iterator[None]:
    """Within this context, fork from this interpreter, with these modules imported too; see Zygote."""
    global ZYGOTE
    before, ZYGOTE = ZYGOTE, Zygote(*modules, python=python, **variables)
    try:
        yield
    finally:
        ZYGOTE.close()
        ZYGOTE = before


class Forked(subprocess.Popen[Any]):
    """A child of the zygote, which is used like any process. `inside`: a process in whose namespaces it shall be."""

    def __init__(self, words: Any, *, inside: int = 0, **settings: Any) -> None:
        self._inside = inside
        super().__init__(words, **settings)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        folder, environment = rest[4:6]
        pipes, session = rest[9:15], rest[20]
        request = {
            "words": list(map(os.fspath, args)),
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.fspath(folder or os.getcwd()),
            "session": session,
            "inside": self._inside,
        }
        theirs = pipes[0], pipes[3], pipes[5]
        files = [number if fd == -1 else fd for number, fd in enumerate(theirs)]
        assert ZYGOTE is not None
        self._ended, status = os.pipe()
        try:
            self.pid = ZYGOTE.fork(request, [*files, status])
        finally:
            os.close(status)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        """Like Popen's, whose arguments differ between versions of Python."""
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(False):
            try:
                if self.returncode is None and (found := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(found[1])  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._ended], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._ended, NUMBER.size)
        os.close(self._ended)
        return self.pid, NUMBER.unpack(status)[0] if status else signal.SIGKILL


def start_python(words: Sequence[Any], **settings: Any) -> subprocess.Popen[Any]:
    """Start a process like `subprocess.Popen`, or fork one if that makes no difference. `inside`: as for `nsenter`.

    Use `subprocess` itself if the start is tested: imports, or the parent.
    """
    if ZYGOTE is not None and ZYGOTE.can(words, settings):
        return Forked(words, **settings)
    first = settings.pop("inside", 0)
    return subprocess.Popen(nsenter(first, *words) if first else words, **settings)


def nsenter(first: int, *words: Any) -> list[str]:
    """A command line that runs in the namespaces of a process."""
    return ["nsenter", "--target", str(first), "--net", "--uts", "--pid", "--mount", "--", *map(str, words)]


def fake_meminfo(folder: Path, mib: int) -> list[str]:
    """Return the beginning of a command line: what it runs finds so much free memory, as its last word says."""
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    meminfo = folder / f"meminfo-{mib}"
    meminfo.write_text(f"MemTotal: 9000000 kB\nMemAvailable: {mib << 10} kB\n")
    command = [*enter, "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', str(meminfo)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        import pytest

        pytest.skip("this system lets nobody mount something over /proc/meminfo")
    return command


def run_python(
    words: Sequence[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **settings: Any,
) -> subprocess.CompletedProcess[Any]:
    """Like `subprocess.run`, but started by `start_python`."""
    if input is not None:
        settings["stdin"] = subprocess.PIPE
    if capture_output:
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(words, **settings) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    result = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        result.check_returncode()
    return result


def run_script(
    code: str, *arguments: object, fail: str = "", timeout_s: float = 120.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python code as a separate training process; `fail` arms fail points (see ckpt/failpoints.py).

    `fresh`: start without any imports, for tests of modules and memory.
    """
    # OpenMP's threads spin while they wait, which starves everything else on a machine with few cores.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "CKPT_FAIL": fail, "PYTHONPATH": PYTHONPATH}
    words = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run if fresh else run_python
    return run(words, env=environment, capture_output=True, text=True, timeout=timeout_s)


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Return True if a condition becomes true before the deadline."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def killed(result: subprocess.CompletedProcess[str]) -> bool:
    return result.returncode == -signal.SIGKILL
