"""Signals, noticed within a millisecond whatever the main thread does.

A Python handler runs in the main thread, between two bytecodes: never while that thread sits in a collective. The
interpreter's own handler writes the number of a signal to a descriptor at once, though (`signal.set_wakeup_fd`). Here
that is a socket whose other end two processes have: the fault handler thread reads it, and if it cannot, because
something holds the interpreter's lock, the writer does.

Nobody's handlers are lost: ours call those that were there before, and those that are installed later replace ours,
which the descriptor does not depend on. `put_back` restores what was there.

There may be several of us in a process, which has one handler of a signal and one descriptor. The last that was armed
has the descriptor; each passes on what it reads to the one before it, and the first to whoever was there before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from ckpt.events import log

Handler = Any  # what signal.getsignal gives: a callable, SIG_DFL, SIG_IGN


class _Descriptors:
    """Of this process. `ours`: who is armed, in that order; `others`: whose descriptor it was before any of us, or that
    came between; `left`: ours that the interpreter may have, though nobody reads there any more."""

    ours: ClassVar[list[Wakeup]] = []
    left: ClassVar[set[int]] = set()
    others = -1


class Wakeup:
    """Armed in the main thread, read in any other."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.numbers = tuple(numbers)
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Handler] = {}
        self._armed = False
        self.deaf = False  # nobody reads any more: what would have ended the process does so once all is put back
        self._missed: list[int] = []
        self._taken = False  # whether the interpreter has our descriptor
        # Bound once: a method is a new object each time it is asked for, and we compare by identity.
        self._ours: Callable[[int, Any], None] = self._handle

    def arm(self) -> None:
        """In the main thread, or it is only said that signals are not handled."""
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self.numbers)
            log.warning(
                "%s: no trigger here, since the Checkpointer was not made in the main thread, where Python handles "
                "signals. One that ends the process leaves memory to the writer, as any death does",
                names,
            )
            return
        try:
            self._take()
        except BaseException:  # Ctrl-C
            self._armed = True
            self.put_back()
            raise

    def _take(self) -> None:
        for number in self.numbers:
            before = signal.getsignal(number)
            if before is None or (before == signal.SIG_DFL and _caught(number)):  # it could not be put back
                log.warning("%s is handled by something else than Python: it is no trigger", number.name)
                continue
            self._before[number] = before
            signal.signal(number, self._ours)
        _Descriptors.ours.append(self)
        self._armed = self._taken = True
        _take_descriptor()

    def put_back(self) -> None:
        """What is still ours becomes what it was. From another thread than the main one ours only go quiet."""
        armed, self._armed = self._armed, False
        if self in _Descriptors.ours:
            _Descriptors.ours.remove(self)
        for later in _Descriptors.ours:  # they call what ours called
            later._before = {n: self._before[n] if h is self._ours else h for n, h in later._before.items()}
        if not armed or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) is self._ours:
                signal.signal(number, before)
        self._give_descriptor_back()
        for number in self._missed:
            os.kill(os.getpid(), number)

    def _give_descriptor_back(self) -> None:
        """To the one of us that was armed before, or to whoever was there before us."""
        ours = [one._writer.fileno() for one in _Descriptors.ours]
        try:
            found = signal.set_wakeup_fd([_Descriptors.others, *ours][-1], warn_on_full_buffer=False)
        except (OSError, ValueError):  # it was closed meanwhile
            found = signal.set_wakeup_fd(-1)
        self._taken = False
        if found not in (-1, self._writer.fileno(), *ours, *_Descriptors.left):
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)  # somebody else's, later than ours

    def close(self) -> None:
        if self._taken:  # the interpreter goes on writing to that number: no other file may get it, and no pipe break
            _Descriptors.left.add(self._writer.detach())
            self.reader.detach()
        else:
            self._writer.close()
            self.reader.close()

    def forget(self) -> None:
        """In a forked child, whose signals are not the trainer's: nothing of ours is left there."""
        self.put_back()
        self.close()

    def would_end(self, number: int) -> bool:
        """Whether the process would have ended of this signal without us: nobody else handles it."""
        handler, found = signal.getsignal(number), False
        while isinstance(one := getattr(handler, "__self__", None), Wakeup) and handler is one._ours:
            handler, found = one._before[number], found or one is self
        return found and handler == signal.SIG_DFL

    def miss(self, number: int) -> None:
        """Not now: it is sent again when everything is put back."""
        self._missed.append(number)

    def pass_on(self, raw: bytes) -> None:
        """To whoever had the descriptor before us."""
        armed = list(_Descriptors.ours)
        with contextlib.suppress(OSError, ValueError):  # full or closed is its owner's business; or we are not armed
            if at := armed.index(self):
                armed[at - 1]._writer.send(raw)
            elif _Descriptors.others >= 0:
                os.write(_Descriptors.others, raw)  # a pipe or a socket

    def read(self) -> list[int]:
        """The signals that have come since, ours only; others' descriptors get theirs passed on."""
        try:
            raw = self.reader.recv(4096)
        except (BlockingIOError, OSError):
            return []
        self.pass_on(raw)
        return [number for number in raw if number in self._before]

    def wait(self, also: int, timeout_s: float | None) -> None:
        """Until a signal comes, or the descriptor `also` can be read."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        poll.register(also, select.POLLIN)
        poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)

    def _handle(self, number: int, frame: Any) -> None:
        """In the main thread, as soon as it comes round to it."""
        if _Descriptors.ours and _take_descriptor():
            with contextlib.suppress(OSError):
                _Descriptors.ours[-1]._writer.send(bytes([number]))
        before = self._before.get(number)
        if self._armed and self.deaf and before == signal.SIG_DFL:
            self._missed.append(number)
        if callable(before):
            before(number, frame)
        elif not self._armed and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _take_descriptor() -> bool:
    """For the last of us; whether it was nobody's who is armed: a loop of asyncio takes the descriptor for itself, and
    sets it to none at its end."""
    ours = [one._writer.fileno() for one in _Descriptors.ours]
    found = signal.set_wakeup_fd(ours[-1], warn_on_full_buffer=False)
    if found in ours:
        return False
    _Descriptors.others = -1 if found in _Descriptors.left else found
    return True


def _caught(number: int) -> bool:
    """Whether this process has a handler for a signal, Python's or not, as the kernel knows it."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
