"""The connection to a writer process (`WriterClient`): starts or finds it, exchanges messages, and detects its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import psutil

import ckpt
import ckpt_backends
from ckpt.core.ipc import channel as link
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.heartbeat import Process, number_in_proc
from ckpt.core.ipc.messages import (
    PROTOCOL,
    REPLY,
    Incoming,
    Lend,
    LendReply,
    Note,
    ProblemNote,
    Request,
    encode,
    message_of,
    reply_of,
    table,
)
from ckpt.errors import (
    CheckpointError,
    DeadlineError,
    InUseError,
    ProtocolError,
    UsageError,
    WriterError,
)
from ckpt.events import log
from ckpt.units import decimal

JOIN_S = 1.0

HUNG_UP = "the trainer left before the request was done, but its writer continues"


def start_thread(work: Callable[[], None], name: str) -> None:
    """Run `work` in a new thread. While the interpreter exits, run it in this thread, because Python 3.12 then starts
    no threads."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        work()


R = TypeVar("R")
NOTES = table(Note.__subclasses__())
REQUEST_S = 120.0

# The trainer waits while the writer starts. Importing numpy later saves a third of the start time, and disabling
# garbage collection during imports saves a twentieth.
_BOOT = (
    "import gc, sys; gc.disable(); sys.path[:0] = sys.argv[7:]; "
    "from ckpt.later import later; later('numpy'); from ckpt.writer_process import main; main()"
)
_BETWEEN = "import os, sys; os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)"
SPAWN_S = 60.0
ENDING_S = 5.0  # timeout for a writer to end after it has disconnected


class WriterClient:
    """A connection to one writer process. Notes that arrive before `listen` is called are kept until then.

    A separate thread sends messages, because Ctrl-C could interrupt the main thread in the middle of a message, which
    would corrupt all later messages. Nor may a signal handler that closes the connection wait for the main thread.
    """

    def __init__(self, channel: Channel, key: str, found: Process | None = None) -> None:
        self._channel, self._key = channel, key
        self._found = found  # identity of an existing writer, from the kernel; a writer that we start sends its own
        self._process: Process | None = None  # set once we are its trainer
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[Request[Any], Future[Any]]] = {}
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that holds the lock
        self._outbox: queue.SimpleQueue[tuple[bytes, tuple[int, ...]] | None] = queue.SimpleQueue()
        self._lost = False
        self._closing = self._fenced = False
        self._on_note: Callable[[Note], None] | None = None
        self._early: list[Note] = []  # notes that arrived before `listen`
        self._on_lost: Callable[[], None] | None = None
        self._gone = False  # True once the process and the connection have ended
        self._sent = threading.Event()
        self._threads = [
            threading.Thread(target=self._transmit, name="ckpt-send", daemon=True),
            threading.Thread(target=self._receive, name="ckpt-link", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def find(cls, key: str) -> WriterClient | None:
        """Connect to the writer that holds this run's memory on this host. Return None if no writer does."""
        channel = link.connect(key)
        return None if channel is None else cls(channel, key, Process.of(link.peer_pid(channel.sock)))

    @classmethod
    def spawn(cls, key: str, run: str, rank: int) -> WriterClient:
        """Start a writer in a new session, so that it survives when the trainer's process group is killed.

        An intermediate process starts the writer and exits, so that the writer is not a child of the trainer, because
        launchers look for child processes.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        homes = dict.fromkeys(str(Path(str(module.__file__)).parent.parent) for module in (ckpt, ckpt_backends))
        path = link.log_path(key)
        with theirs, open(path or os.devnull, "ab") as output:
            if path:
                os.fchmod(output.fileno(), 0o600)
            since = str(Process.of(os.getpid()).started)  # lets the writer detect that our process id was reused
            words = [str(theirs.fileno()), key, path, since, run, str(rank), *homes]
            writer = [sys.executable, "-P", "-c", _BOOT, *words]
            try:
                between = subprocess.run(
                    [sys.executable, "-I", "-S", "-c", _BETWEEN, *writer],
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,  # not our stderr: if it is a pipe, the writer would keep it open after we exit
                    cwd="/",
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    check=False,
                    timeout=SPAWN_S,
                )
            except (OSError, subprocess.SubprocessError) as error:
                ours.close()
                raise WriterError(f"the writer process cannot be started: {error}") from error
        if between.returncode:
            ours.close()
            raise WriterError(f"the writer process cannot be started: exit code {between.returncode}, see {path}")
        return cls(Channel(ours), key)

    @property
    def alive(self) -> bool:
        return not self._lost

    @property
    def pid(self) -> int:
        """Return the process id of the writer; 0 if it is not known yet, or belongs to another container."""
        return 0 if self._process is None else self._process.pid

    def listen(self, on_note: Callable[[Note], None], on_lost: Callable[[], None]) -> None:
        """Call `on_note` with each note of the writer, including earlier ones. Call `on_lost` once, when the writer has
        ended."""
        with self._lock:
            self._on_note, early = on_note, self._early
        for note in early:
            on_note(note)
        with self._lock:
            self._on_lost, gone = on_lost, self._gone
        if gone:
            on_lost()

    # -- requests --

    def send(self, request: Request[R], fds: tuple[int, ...] = ()) -> Future[tuple[R, list[int]]]:
        """Send a request without waiting. The future gets the reply and its descriptors, or the writer's error, or
        WriterError if the writer is gone."""
        future: Future[tuple[R, list[int]]] = Future()
        number = next(self._ids)
        try:
            body = encode(request, number, len(fds))
        except ProtocolError as error:  # the message is too long; log it, because the caller may ignore the future
            log.warning("%s", error)
            future.set_exception(error)
            return future
        with self._lock:
            if self._lost:
                future.set_exception(WriterError("the writer is gone"))
                return future
            self._waiting[number] = request, future
            self._outbox.put((body, tuple(map(os.dup, fds))))
        return future

    def _transmit(self) -> None:
        while (one := self._outbox.get()) is not None:
            body, fds = one
            try:
                self._channel.transmit(body, fds)
            except OSError:
                self._channel.hang_up()  # the receiving thread detects this and fails the futures
            for fd in fds:
                os.close(fd)
        self._sent.set()

    def ask(self, request: Request[R], timeout_s: float = REQUEST_S, fds: tuple[int, ...] = ()) -> R:
        """Send a request and wait for its reply. Only for replies without descriptors."""
        try:
            return self.send(request, fds).result(timeout_s)[0]
        except TimeoutError as error:
            if isinstance(error, CheckpointError):
                raise
            raise DeadlineError(f"no reply to {type(request).__name__} by the writer within {timeout_s:g} s") from None

    def greet(self, timeout_s: float, patient_s: float) -> tuple[LendReply, list[int]]:
        """Become the trainer of this writer unless its own trainer lives. Return its memory. See `ask_patiently`."""
        hello, fds = self.ask_patiently(Lend(inherit=True), timeout_s, patient_s)
        self._process = self._found or Process.of(hello.pid)
        return hello, fds

    def ask_patiently(self, request: Request[R], timeout_s: float, patient_s: float) -> tuple[R, list[int]]:
        """Send a request to an existing writer. If the writer process is stopped, resume it after `timeout_s`. Wait up
        to `patient_s` for the reply.

        Raises DeadlineError. Raises ProtocolError if the writer has another version, and leaves that writer as it is.
        """
        future, began = self.send(request), time.monotonic()
        while True:
            try:
                return future.result(timeout_s)
            except (ProtocolError, UsageError) as error:  # writers without a protocol version reply with UsageError
                raise self._foreign(error) from None
            except TimeoutError as error:
                if isinstance(error, CheckpointError):
                    raise
                waited = time.monotonic() - began
                if waited > patient_s or not self._wake():
                    raise DeadlineError(f"no reply within {waited:.0f} s") from None

    def _foreign(self, error: CheckpointError) -> ProtocolError:
        """Return the error for a writer of another version, with the remedy."""
        if self._found is None:
            return ProtocolError(
                f"the writer process that was started is of another version: {error}. everystep was changed on disk "
                "while this process ran: start it again"
            )
        pid = self._found.pid
        return ProtocolError(
            f"process {pid} holds memory of this run on this machine, perhaps its newest step, and is a writer of "
            f"another version than everystep {ckpt.__version__}, protocol {PROTOCOL}: {error}. To continue from its "
            "memory, start with its version. Or wait until the process ends; before that, it writes its memory to the "
            f"first tier, if there is one. To start without its memory, kill -9 {pid}"
        )

    @property
    def found_pid(self) -> int:
        """Return the process id of the existing writer; 0 if we started the writer or cannot see its process."""
        return 0 if self._found is None else self._found.pid

    def described(self) -> str:
        """Describe the existing writer for messages: its process, the size of its memory, and whether it is stopped."""
        if self._found is None or self._found.pid <= 0:
            return "the writer of this run in another container"
        stopped = " (stopped by SIGSTOP)" if self._found.suspended else ""
        memory = decimal(self._found.shared_bytes)
        return f"process {self._found.pid}{stopped}, a writer of this run that holds {memory} of memory"

    def _wake(self) -> bool:
        """Resume the existing writer if it is stopped. Return False if its process has ended or is unknown."""
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            found = psutil.Process(number_in_proc(link.peer_pid(self._channel.sock)))
            if found.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                log.warning("resumed %s", self.described())
                found.resume()
            return bool(found.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
        return False

    def end(self) -> None:
        """Kill an unresponsive process that has the name of this run. Raises InUseError if the process is not a writer
        or cannot be seen from this container."""
        process = self._found
        self.close()
        if process is None or process.pid <= 0:
            raise InUseError(
                "the memory of this run is held by a writer in another container, which does not respond and cannot be "
                "ended from here"
            )
        if process.alive and not self._kill(process):
            raise InUseError(
                f"process {process.pid} uses the name of this run's writer on this machine, does not respond, and is "
                "not a writer: end it, or give this run another location"
            )
        _until_gone(process)

    def _kill(self, process: Process) -> bool:
        """Kill a process and return True if it is a writer of this run. Return False without killing it if its id now
        belongs to another process."""
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(process.pid)
            try:
                if Process.of(process.pid) == process and link.is_writer(process.pid, self._key):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    return True
            finally:
                os.close(fd)
        return False

    def _receive(self) -> None:
        while (incoming := self._channel.receive()) is not None:
            if incoming.op == REPLY:
                self._answered(incoming)
            else:
                self._note(incoming)
        with self._lock:
            self._lost = True
            waiting, self._waiting = self._waiting, {}
            self._outbox.put(None)
        for _, future in waiting.values():
            future.set_exception(WriterError(HUNG_UP if self._closing else "the writer died"))
        process, closing = self._process, lambda: self._closing
        gone = process is None or _until_gone(process, closing)
        if process is not None and not (gone or self._closing or self._fenced) and self._kill(process):
            _until_gone(process, closing)  # it had hung; a new writer replaces it
        if not self._closing:
            log.warning("the writer is gone")
            with self._lock:
                self._gone, on_lost = True, self._on_lost
            if on_lost is not None:
                on_lost()

    def _answered(self, incoming: Incoming) -> None:
        with self._lock:
            request, future = self._waiting.pop(-1 if incoming.id is None else incoming.id, (None, None))
        if request is None or future is None:
            incoming.drop()
            return
        try:
            future.set_result((reply_of(incoming, request), incoming.fds))
        except CheckpointError as error:
            if isinstance(error, ProtocolError):  # log it, because the caller may ignore the future
                log.warning("%s", error)
            incoming.drop()
            future.set_exception(error)

    def _note(self, incoming: Incoming) -> None:
        try:
            note = message_of(incoming, NOTES)
        except ProtocolError as error:
            incoming.drop()
            log.warning("received an invalid message from the writer: %s", error)
            return
        self._fenced |= isinstance(note, ProblemNote) and note.error == "FencedError"
        with self._lock:
            heard = self._on_note
            if heard is None:
                self._early.append(note)
                return
        try:
            heard(note)
        except Exception:  # must not end this thread, which receives the replies to all requests
            log.exception("failed to handle a note from the writer: %r", incoming.op)

    def close(self) -> None:
        """Disconnect. The writer continues to process the requests that it has received."""
        self._closing = True
        self._outbox.put(None)
        self._sent.wait(link.SEND_S)
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    def forget(self) -> None:
        """Close the descriptor in a forked child, without closing the parent's connection."""
        self._closing = True
        self._channel.forget()


def _until_gone(process: Process, closing: Callable[[], bool] = lambda: False) -> bool:
    """Wait until a process ends, `closing()` is True, or `ENDING_S` passes. Return True if the process has ended."""
    end = time.monotonic() + ENDING_S
    while process.alive and time.monotonic() < end and not closing():
        time.sleep(0.01)
    return not process.alive
