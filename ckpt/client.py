"""The trainer's end of the writer: find the one that survived, or spawn one; ask it things; notice when it is gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

import ckpt
import ckpt_backends
from ckpt import link
from ckpt.errors import CheckpointError, DeadlineError, WriterError, from_wire
from ckpt.events import log
from ckpt.link import Channel, Message

Reply = tuple[Message, list[int]]
REQUEST_S = 120.0

_BOOT = "import sys; sys.path[:0] = sys.argv[4:]; from ckpt.writer import main; main()"


class WriterClient:
    """A connection to one writer process. `on_note` gets its messages, `on_lost` is called when the connection ends."""

    def __init__(self, channel: Channel, process: subprocess.Popen[bytes] | None) -> None:
        self._channel, self._process = channel, process
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Reply]] = {}
        self._lock = threading.Lock()
        self._lost = False
        self._closing = False
        self.on_note: Callable[[Message], None] = lambda note: None
        self.on_lost: Callable[[], None] = lambda: None
        threading.Thread(target=self._receive, name="ckpt-link", daemon=True).start()

    @classmethod
    def find(cls, key: str) -> WriterClient | None:
        """The writer that holds this run's memory on this host, if one does."""
        channel = link.connect(link.socket_path(key))
        return None if channel is None else cls(channel, None)

    @classmethod
    def spawn(cls, key: str) -> WriterClient:
        """A new writer, in a session of its own, so that it survives what kills the trainer's process group."""
        path = link.socket_path(key)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        homes = dict.fromkeys(str(Path(str(module.__file__)).parent.parent) for module in (ckpt, ckpt_backends))
        with theirs, open(path.removesuffix(".sock") + ".log", "ab") as output:
            os.fchmod(output.fileno(), 0o600)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), key, path, *homes],
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,  # not ours: a pipe that we inherited must not stay open after us
                    cwd="/",
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
            except OSError as error:
                ours.close()
                raise WriterError(f"the writer process cannot be started: {error}") from error
        return cls(Channel(ours), process)

    @property
    def alive(self) -> bool:
        return not self._lost

    # -- asking --

    def send(self, op: str, *, fds: tuple[int, ...] = (), **fields: Any) -> Future[Reply]:
        """Ask without waiting. The future fails with the writer's error, or WriterError if the writer is gone."""
        future: Future[Reply] = Future()
        number = next(self._ids)
        with self._lock:
            if self._lost:
                future.set_exception(WriterError("the writer is gone"))
                return future
            self._waiting[number] = future
        try:
            self._channel.send({"op": op, "id": number, **fields}, fds)
        except OSError:
            self._channel.hang_up()  # the receiving thread notices, and fails the future
        return future

    def ask(self, op: str, *, timeout_s: float = REQUEST_S, fds: tuple[int, ...] = (), **fields: Any) -> Reply:
        """Ask and wait."""
        try:
            return self.send(op, fds=fds, **fields).result(timeout_s)
        except TimeoutError as error:
            if isinstance(error, CheckpointError):
                raise
            raise DeadlineError(f"the writer did not answer {op!r} within {timeout_s:g} s") from None

    def greet(self, timeout_s: float, patient_s: float) -> Reply:
        """Introduce ourselves to a writer that we found; longer than `timeout_s` is waited only if it can run."""
        future, began = self.send("hello"), time.monotonic()
        while True:
            try:
                return future.result(timeout_s)
            except TimeoutError as error:
                if isinstance(error, CheckpointError):
                    raise
                waited = time.monotonic() - began
                if waited > patient_s or not self._runs():
                    raise DeadlineError(f"no answer within {waited:.0f} s") from None

    def _runs(self) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            still = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return psutil.Process(link.peer_pid(self._channel.sock)).status() not in still
        return False

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if message.get("op") != "reply":
                try:
                    self.on_note(message)
                except Exception:  # must not end the thread that everybody's answers come through
                    log.exception("a note of the writer could not be dealt with: %r", message.get("op"))
                continue
            with self._lock:
                future = self._waiting.pop(message["id"], None)
            if future is None:
                for fd in fds:
                    os.close(fd)
            elif "error" in message:
                future.set_exception(from_wire(message))
            else:
                future.set_result((message, fds))
        with self._lock:
            self._lost = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(WriterError("the writer died"))
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                if not self._closing:
                    self._process.kill()  # it stands still, and another takes over
        if not self._closing:
            log.warning("the writer is gone")
            self.on_lost()

    def close(self) -> None:
        """Hang up. The writer goes on with whatever it was asked."""
        self._closing = True
        self._channel.close()

    def forget(self) -> None:
        """In a forked child: drop the descriptor without a word."""
        self._closing = True
        self._channel.forget()
