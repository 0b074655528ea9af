"""The name of a run's trainer: whoever opens the run sees that somebody trains it, whatever became of the writer.

Nobody is ever answered there, so that it says the truth of a trainer that stands still too. The kernel frees the name
when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from ckpt.core.ipc import channel
from ckpt.core.ipc.process import Process

AGAIN_S = 1.0  # between two tries of one that goes on without the name


class Claim:
    """One trainer's claim to a run on this machine. Methods may be called from any thread."""

    def __init__(self, key: str) -> None:
        self._key = channel.trainer_key(key)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._other: Process | None = None  # who had the name when we asked last
        self._over = threading.Event()

    def take(self) -> int | None:
        """Have the name. Else the process that has it and lives, 0 for one that cannot be seen from here; None too if
        a child that outlived its trainer keeps it, or another Checkpointer of this process."""
        with self._lock:
            if self._lives(self._other) and channel.has_owner(self._key):  # each question takes a place in its queue
                return self._other.pid if self._other is not None else None
            self._other = None
            if self._socket is None and not self._over.is_set():
                self._socket = channel.listen(self._key)
            if self._socket is None and (pid := channel.holder(self._key)) is not None:
                self._other = Process.of(pid)
            return self._other.pid if self._other is not None and self._lives(self._other) else None

    @staticmethod
    def _lives(process: Process | None) -> bool:
        """Whether this is somebody else, who lives."""
        return process is not None and process.pid != os.getpid() and (process.pid == 0 or process.alive)

    def take_soon(self) -> None:
        """Have the name as soon as who lost the run lets go of it."""
        if self._socket is None:
            threading.Thread(target=self._take_soon, name="ckpt-claim", daemon=True).start()

    def _take_soon(self) -> None:
        while not self._over.wait(AGAIN_S) and self._socket is None:
            with contextlib.suppress(OSError):  # out of descriptors, say
                if not channel.has_owner(self._key):
                    self.take()

    def drop(self) -> None:
        """We train this run no more."""
        self._over.set()
        with self._lock:
            mine, self._socket = self._socket, None
        if mine is not None:
            mine.close()

    def forget(self) -> None:
        """In a forked child: it is the parent's, and must not outlive it."""
        self._over.set()
        mine, self._socket = self._socket, None
        if mine is not None:
            mine.close()
