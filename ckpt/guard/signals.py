"""Detects signals within a millisecond, whatever the main thread is doing.

A Python handler runs in the main thread between two bytecodes, so it cannot run while the main thread is inside a
collective. But the interpreter's C handler writes the signal's number to a descriptor immediately
(`signal.set_wakeup_fd`). `Wakeup` installs a socket as this descriptor. The fault handler thread reads the other end.
If it cannot run because another thread holds the GIL, the writer process, which shares the socket, reads it.

Handlers of other code keep working, because ours call the previous handlers. A handler that is installed later
replaces ours, but the descriptor still works. `put_back` restores the previous handlers.

A process may have several instances, but one handler per signal and one descriptor. The last armed instance owns the
descriptor. Each instance passes the bytes that it reads on to the previous one, the first to the original owner.
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

Handler = Any  # result of signal.getsignal: a callable, SIG_DFL or SIG_IGN


class _Descriptors:
    """The wakeup descriptors of this process. `ours`: armed instances in order. `others`: descriptor of other code that
    was installed before ours. `left`: our unread descriptors that the interpreter may still use."""

    ours: ClassVar[list[Wakeup]] = []
    left: ClassVar[set[int]] = set()
    others = -1


class Wakeup:
    """Detects signals. Arm it in the main thread. Any thread may read it."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.numbers = tuple(numbers)
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Handler] = {}
        self._armed = False
        # True after reading has stopped. A signal that would end the process then does so after `put_back`.
        self.deaf = False
        self._missed: list[int] = []
        self._taken = False  # True once the interpreter was given our descriptor
        # Stored once, because each access to a method creates a new object, and handlers are compared by identity.
        self._ours: Callable[[int, Any], None] = self._handle

    def arm(self) -> None:
        """Install the handlers. In a thread other than the main thread, only log that signals are not handled."""
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self.numbers)
            log.warning(
                "%s: not a trigger, because the Checkpointer was not created in the main thread, where Python handles "
                "signals. If a signal ends the process, the writer keeps the memory, as after any crash",
                names,
            )
            return
        try:
            self._take()
        except BaseException:  # for example Ctrl-C
            self._armed = True
            self.put_back()
            raise

    def _take(self) -> None:
        for number in self.numbers:
            before = signal.getsignal(number)
            if before is None or (before == signal.SIG_DFL and _caught(number)):  # Python could not restore it
                log.warning("%s is not a trigger, because code outside Python handles it", number.name)
                continue
            self._before[number] = before
            signal.signal(number, self._ours)
        _Descriptors.ours.append(self)
        self._armed = self._taken = True
        _take_descriptor()

    def put_back(self) -> None:
        """Restore the previous handlers if ours are still installed. Outside the main thread, only deactivate ours."""
        armed, self._armed = self._armed, False
        if self in _Descriptors.ours:
            _Descriptors.ours.remove(self)
        for later in _Descriptors.ours:  # handlers installed after ours now call the handler that ours replaced
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
        """Give the descriptor back to the instance armed before this one, or to the original owner."""
        ours = [one._writer.fileno() for one in _Descriptors.ours]
        try:
            found = signal.set_wakeup_fd([_Descriptors.others, *ours][-1], warn_on_full_buffer=False)
        except (OSError, ValueError):  # the owner has closed that descriptor
            found = signal.set_wakeup_fd(-1)
        self._taken = False
        if found not in (-1, self._writer.fileno(), *ours, *_Descriptors.left):
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)  # other code installed it after ours

    def close(self) -> None:
        if self._taken:  # the interpreter may still write to this number, so no other file may get it
            _Descriptors.left.add(self._writer.detach())
            self.reader.detach()
        else:
            self._writer.close()
            self.reader.close()

    def forget(self) -> None:
        """Remove the handlers and descriptors in a forked child, because its signals are not the trainer's."""
        self.put_back()
        self.close()

    def would_end(self, number: int) -> bool:
        """Return True if no other handler exists for this signal, so that it would end the process without ours."""
        handler, ours_found = signal.getsignal(number), False
        while isinstance(owner := getattr(handler, "__self__", None), Wakeup) and handler is owner._ours:
            handler, ours_found = owner._before[number], ours_found or owner is self
        return ours_found and handler == signal.SIG_DFL

    def miss(self, number: int) -> None:
        """Record a signal that is sent again once the previous handlers are restored."""
        self._missed.append(number)

    def pass_on(self, raw: bytes) -> None:
        """Send bytes to the previous owner of the descriptor."""
        armed = list(_Descriptors.ours)
        # Ignore errors: a full or closed descriptor is a matter of its owner, and this instance may not be armed.
        with contextlib.suppress(OSError, ValueError):
            if at := armed.index(self):
                armed[at - 1]._writer.send(raw)
            elif _Descriptors.others >= 0:
                os.write(_Descriptors.others, raw)  # the original owner's descriptor is a pipe or a socket

    def read(self) -> list[int]:
        """Return our signals that have arrived since the last call. Pass other signals on to their owner."""
        try:
            raw = self.reader.recv(4096)
        except (BlockingIOError, OSError):
            return []
        self.pass_on(raw)
        return [number for number in raw if number in self._before]

    def wait(self, also: int, timeout_s: float | None) -> None:
        """Wait until a signal arrives or the descriptor `also` is readable, at most `timeout_s` seconds."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        poll.register(also, select.POLLIN)
        poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)

    def _handle(self, number: int, frame: Any) -> None:
        """Handle a signal in the main thread, and call the previous handler."""
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
    """Install the descriptor of the last instance. Return True if it replaced the descriptor of other code. For
    example, an asyncio loop installs its own descriptor, and removes it when it ends."""
    ours = [one._writer.fileno() for one in _Descriptors.ours]
    found = signal.set_wakeup_fd(ours[-1], warn_on_full_buffer=False)
    if found in ours:
        return False
    _Descriptors.others = -1 if found in _Descriptors.left else found
    return True


def _caught(number: int) -> bool:
    """Return True if the kernel reports that this process has a handler for a signal, in Python or other code."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
