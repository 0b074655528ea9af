"""A Python process that has imported torch and forks a child for each script that a test starts. A script then trains
after half a second of CPU instead of three and a half.

The library spawns and never forks. Forking is safe here, because only imports have run before it: no thread, no tensor,
no open file, and not `ckpt`, which each child imports itself. A child is like `python -c`, `python -m` or `python
script.py`: it has its own `__main__`, command line, path, environment, folder, files and session, and ends as an
interpreter ends. Only its parent is this process. A torchrun child has a process of this kind for its ranks.

The other end of the socket is `processes.start_python`, which decides which starts must be real.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import io
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from types import CodeType, ModuleType
from typing import Any

import writer_zygote

# The usual imports of a training process: constructing an optimizer imports torch._dynamo.
WARM = (
    "numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.nn.parallel", "torch.utils.data", "asyncio", "logging.handlers", "multiprocessing.connection",
)  # fmt: skip
NUMBER = struct.Struct("!I")  # a request's length, and the child's pid in reply

Program = tuple[CodeType, dict[str, Any]]


class Child:
    """A process, and the pipe into which goes how it has ended."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid, self.pidfd, self.status = pid, pidfd, status
        self.fds = [pidfd, status]  # that are open


def serve(path: list[str]) -> Program:
    """Import the modules, then serve forks."""
    if "SIMULATED_DEVICE" in os.environ:  # torch looks for a device once, while it is imported: see tests/device
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "device"))
        importlib.import_module("simulated").install()
    for name in (*WARM, *sys.argv[4:]):
        _import(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after the fork"
    gc.collect()
    gc.freeze()  # a child that ends would look at all of it, and copy it by that
    return _fork(socket.socket(fileno=int(sys.argv[1])), path)


def _import(name: str) -> Any:
    """A module, which may be one of this folder."""
    sys.path.insert(0, here := os.path.dirname(__file__))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def _fork(control: socket.socket, path: list[str]) -> Program:
    """Fork children until the socket closes. Returns in each child, with what it shall run in `__main__`."""
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if isinstance(key.data, Child):
                    _look_after(key.data, key.fd, ready)
                    continue
                request, fds = _receive(control)
                children = [key.data for key in ready.get_map().values() if key.data]
                if request is None:
                    _kill(children)
                    os._exit(0)
                *files, status = fds
                pid = os.fork()
                if pid == 0:
                    for fd in (control.detach(), status, *(fd for child in children for fd in child.fds)):
                        os.close(fd)
                    return _become(request, files, path)
                for fd in files:
                    os.close(fd)
                child = Child(pid, os.pidfd_open(pid), status)
                ready.register(child.pidfd, selectors.EVENT_READ, child)
                with contextlib.suppress(BrokenPipeError):  # the requester has exited, which is detected next
                    control.sendall(NUMBER.pack(pid))


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A request, and four files: 0 to 2, and the pipe for how the child ends."""
    head, fds, _, _ = socket.recv_fds(control, NUMBER.size, 4)
    if not head:
        return None, []
    (length,) = NUMBER.unpack(head)
    return json.loads(control.recv(length, socket.MSG_WAITALL)), fds


def _look_after(child: Child, fd: int, ready: selectors.BaseSelector) -> None:
    """Tell how it has ended; once that was read, and not before, its pid may be another's."""
    ready.unregister(fd)
    child.fds.remove(fd)
    if fd == child.pidfd:
        ended = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(child.status, NUMBER.pack(ended.si_status << (8 if ended.si_code == os.CLD_EXITED else 0)))
        ready.register(child.status, selectors.EVENT_READ, child)  # an error, when the other end is closed
    else:
        os.waitpid(child.pid, 0)
    os.close(fd)


def _kill(children: list[Child]) -> None:
    """Kill the children, because their requester has exited."""
    for child in children:
        os.kill(child.pid, signal.SIGKILL)


def _become(request: dict[str, Any], files: list[int], path: list[str]) -> Program:
    """Be what an interpreter is when it starts."""
    if request["inside"]:
        _enter(request["inside"])
    if request["session"]:
        os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    words, environment = request["words"], request["environment"]
    _open_standard_files(buffered=words[1] != "-u" and not environment.get("PYTHONUNBUFFERED"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.modules["numpy"].random.seed()
    if writer_zygote.VARIABLE in environment:
        subprocess.run = writer_zygote.run
    sys.orig_argv = words
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(":")), *path]
    importlib.invalidate_caches()
    if words[1:3] == ["-m", "torch.distributed.run"]:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            return _fork(theirs, path)
        theirs.close()
        _ask_for_ranks(ours)
    writer_zygote.call_myself(words)
    return _program(*words[1 + (words[1] == "-u") :])


def _ask_for_ranks(control: socket.socket) -> None:
    """torchrun starts ranks as tests start processes: what they import is imported. It sees no other difference."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as torchs

    processes = _import("processes")
    processes.ZYGOTE = processes.Zygote(control=control)
    torchs.Popen = lambda args, **settings: processes.start_python(args, **settings)  # type: ignore[misc,assignment]


def _enter(first: int) -> None:
    """Enter the namespaces of that process, like nsenter. The requester sees this process, which ends like the one that
    returns."""
    files = [os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "pid", "mnt")]
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in files:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    child = os.fork()  # of a process's namespaces that of pids is its children's
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)


def _open_standard_files(*, buffered: bool) -> None:
    """Anew: how they are read and written depends on what they are."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    if buffered:
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    else:
        raw = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(raw, write_through=True)
    raw = open(2, "wb", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)


def _program(first: str, *rest: str) -> Program:
    """Return the code that `python first rest…` runs in `__main__`, and that module's names."""
    module = ModuleType("__main__")  # a new module: objects reachable from the frozen one are never collected
    module.__loader__ = importlib.machinery.BuiltinImporter
    module.__annotations__ = {}
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    sys.argv, name = [first, *rest], "<string>"
    if first in ("-c", "-m"):
        del sys.argv[1]
    if first == "-c":
        sys.path.insert(0, "")
        text: str | bytes = rest[0]
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        text = f"__import__('runpy')._run_module_as_main({rest[0]!r})"
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
        module.__file__ = name = os.path.abspath(first)
        with io.open_code(name) as file:
            text = file.read()
    return compile(text, name, "exec", dont_inherit=True), vars(module)
