"""Writers that tests start are forked from a process that has imported what a writer does: 20 ms of CPU, not 500.

The library starts a small process that spawns the writer and ends. In tests, and in processes forked from the zygote
(see zygote.py), `subprocess.run` detects that start and requests the writer from the process here instead. Such a
writer is like a real one, including its command line, except that it shares the interpreter. All other starts are real,
and so are those of trainers that a shell or `subprocess` has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

VARIABLE = "CKPT_TEST_WRITERS"  # where to ask
HOMES = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "backends")]
LENGTH = struct.Struct("!I")
ROOM = 1 << 14  # for the command line of a writer
# Variables that an interpreter and its libraries read only once, at their start.
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC", "GLIBC")

_run = subprocess.run
_PYTHON = sys.executable  # until a test changes it


def inherited() -> list[object]:
    """Return the settings that a process inherits: namespaces, user, umask and limits."""
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    return [umask, os.getuid(), os.getgid(), Path("/proc/self/limits").read_text(), *spaces]


_INHERITED = inherited()


def at_start(environment: Any) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_AT_START) and k != "PYTHONPATH"}


# -- who asks --


class Writers:
    """The process, which starts when it is first needed. `ask`: what `subprocess.run` becomes."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0ckpt-test-writers-{os.getpid()}")
        self._listener.listen(100)
        self._process: subprocess.Popen[bytes] | None = None
        os.environ[VARIABLE] = self._listener.getsockname()[1:].decode()

    def start(self) -> None:
        if self._process is None:
            fd = self._listener.fileno()
            code = (
                "import sys; sys.path[:0] = sys.argv[3:]; import writer_zygote; writer_zygote.serve(int(sys.argv[1]))"
            )
            words = [sys.executable, "-c", code, str(fd), "x" * ROOM, str(Path(__file__).parent), *HOMES]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(words, pass_fds=[fd], stdin=subprocess.PIPE, env=environment)

    def run(self, *arguments: Any, **settings: Any) -> Any:
        if _wanted(arguments, settings):
            self.start()
        return run(*arguments, **settings)

    def close(self) -> None:
        os.environ.pop(VARIABLE, None)
        self._listener.close()
        if self._process is not None:
            self._process.communicate()  # it ends with its input


def run(*arguments: Any, **settings: Any) -> Any:
    """`subprocess.run`, or a writer by a fork."""
    if _wanted(arguments, settings):
        with contextlib.suppress(OSError, EOFError):
            return _asked(arguments[0], **settings)
    return _run(*arguments, **settings)


def _wanted(arguments: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    words, environment = arguments[0] if arguments else (), settings.get("env") or {}
    return (
        VARIABLE in environment
        and isinstance(words, list)
        and len(words) > 16
        and words[0] == words[5] == _PYTHON
        and inherited() == _INHERITED
        and "ckpt.writer_process" in words[8]
        and sorted(words[15:]) == sorted(HOMES)
        and not any(Path(path, "sitecustomize.py").exists() for path in environment.get("PYTHONPATH", "").split(":"))
    )


def _asked(words: list[str], **settings: Any) -> subprocess.CompletedProcess[bytes]:
    request = json.dumps({"words": words[5:], "environment": settings["env"]}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(settings["timeout"])
        sock.connect("\0" + settings["env"][VARIABLE])
        (channel,) = settings["pass_fds"]
        socket.send_fds(sock, [LENGTH.pack(len(request))], [channel, settings["stdout"].fileno()])
        sock.sendall(request)
        if sock.recv(1) != b"y":
            raise EOFError
    return subprocess.CompletedProcess(words, 0)


# -- the process that forks --


def serve(fd: int) -> None:
    """Until standard input ends, which is when the tests do."""
    for name in ("ckpt.writer_process", "ckpt_backends.local"):
        importlib.import_module(name)

    environment = at_start(os.environ)
    listener = socket.socket(fileno=fd)
    gc.collect()
    gc.freeze()  # else each writer would copy all of it when it collects
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            sys.exit()
        sock, _ = listener.accept()
        with sock:
            head, fds, _, _ = socket.recv_fds(sock, LENGTH.size, 2)
            if not head:
                continue
            text = sock.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
            request = json.loads(text)
            if at_start(request["environment"]) == environment:
                between = os.fork()
                if between == 0:
                    os.setsid()
                    if os.fork():
                        os._exit(0)  # a writer has no parent
                    listener.close()
                    sock.close()
                    _become(request["words"], request["environment"], *fds)
                os.waitpid(between, 0)
                sock.sendall(b"y")
            for one in fds:
                os.close(one)


def _become(words: list[str], environment: dict[str, str], channel: int, output: int) -> None:
    """Be what the interpreter is when a writer begins. Never returns."""
    try:
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        os.close(nothing)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        call_myself([*words[:4], str(channel), *words[5:]])
        sys.argv = ["-c", str(channel), *words[5:]]
        from ckpt import failpoints
        from ckpt.writer_process import main

        armed = environment.get("CKPT_FAIL")
        failpoints._armed = failpoints._parse(armed) if armed else None
        main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def call_myself(words: list[str]) -> None:
    """The command line, as others see it: what the kernel shows is our own memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(word.encode() for word in words) + b"\0"
    ctypes.memmove(start, line[: end - start].ljust(end - start, b"\0"), end - start)
