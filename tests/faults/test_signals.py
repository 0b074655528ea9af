"""Signals are detected whatever the main thread does, and handlers and descriptors of others are kept."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt.guard.signals import Wakeup
from processes import run_script

USED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SAFETY_S = 10.0


@pytest.fixture
def arm() -> Iterator[Callable[..., Wakeup]]:
    """Return a function that creates and arms a Wakeup. Undo everything after the test."""
    before = {number: signal.getsignal(number) for number in USED}
    descriptor = signal.set_wakeup_fd(-1)
    made: list[Wakeup] = []

    def make(*numbers: signal.Signals) -> Wakeup:
        made.append(Wakeup(numbers or (signal.SIGUSR1,)))
        made[-1].arm()
        return made[-1]

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)
    for wakeup in made:
        wakeup.put_back()
        wakeup.close()
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


@pytest.fixture
def foreign() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A wakeup descriptor of another library, the second socket, and the end that gets its bytes."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    yield here, there
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


def current_fd() -> int:
    """Return the wakeup descriptor of this process and leave it unchanged."""
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return found


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_later_handler_may_call_ours(arm: Any) -> None:
    """The handler before is ours, whether armed or put back. The handler below ours is called each time."""
    calls: list[str] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append("first"))
    wakeup = arm()
    ours = signal.getsignal(signal.SIGUSR1)
    assert callable(ours)

    def last(number: int, frame: Any) -> None:
        calls.append("last")
        ours(number, frame)

    signal.signal(signal.SIGUSR1, last)
    send(signal.SIGUSR1)
    assert calls == ["last", "first"]
    wakeup.put_back()
    assert signal.getsignal(signal.SIGUSR1) is last
    send(signal.SIGUSR1)
    assert calls == ["last", "first"] * 2


def test_previous_descriptor_still_gets_its_bytes(arm: Any, foreign: Any) -> None:
    """It gets every byte, also of other signals. Only our signals are reported."""
    here, there = foreign
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    wakeup = arm(signal.SIGUSR1, signal.SIGUSR2)
    for number in (signal.SIGUSR2, signal.SIGHUP, signal.SIGUSR1):
        send(number)
    assert wakeup.read() == [signal.SIGUSR2, signal.SIGUSR1]
    assert list(here.recv(100)) == [signal.SIGUSR2, signal.SIGHUP, signal.SIGUSR1]
    wakeup.put_back()
    assert current_fd() == there.fileno()
    send(signal.SIGHUP)
    assert list(here.recv(100)) == [signal.SIGHUP] and wakeup.read() == []


def test_full_or_closed_foreign_descriptor_is_ignored(arm: Any, foreign: Any) -> None:
    """Bytes that cannot be forwarded are dropped. A descriptor that is closed by then, as of an asyncio loop that has
    ended, is not put back."""
    here, there = foreign
    with pytest.raises(BlockingIOError):
        while True:
            there.send(b"x" * 4096)
    wakeup = arm()
    send(signal.SIGUSR1)
    assert wakeup.read() == [signal.SIGUSR1]
    here.close()
    send(signal.SIGUSR1)
    assert wakeup.read() == [signal.SIGUSR1]
    there.close()
    wakeup.put_back()
    assert current_fd() == -1


def test_signals_arrive_after_an_asyncio_loop(arm: Any) -> None:
    """The loop takes the descriptor and leaves none. The next signal and all later ones are still received."""
    calls: list[int] = []
    wakeup = arm(signal.SIGUSR1)

    async def main() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, lambda: (calls.append(signal.SIGUSR2), done.set()))
        send(signal.SIGUSR2)
        await asyncio.wait_for(done.wait(), SAFETY_S)
        send(signal.SIGUSR1)  # ours, while the loop has the descriptor
        await asyncio.sleep(0)

    asyncio.run(main())
    assert calls == [signal.SIGUSR2]
    assert wakeup.read() == [signal.SIGUSR1]
    for _ in range(2):
        send(signal.SIGUSR1)
        assert wakeup.read() == [signal.SIGUSR1]
    wakeup.put_back()
    assert current_fd() == -1


def test_put_back_keeps_later_handlers(arm: Any) -> None:
    """put_back() does not remove a later handler or descriptor."""
    here, there = socket.socketpair()
    there.setblocking(False)

    def later(number: int, frame: Any) -> None:
        pass

    wakeup = arm(signal.SIGTERM, signal.SIGUSR1)
    signal.signal(signal.SIGTERM, later)
    signal.set_wakeup_fd(there.fileno())
    wakeup.put_back()
    assert signal.getsignal(signal.SIGTERM) is later
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert current_fd() == there.fileno()
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


def test_ignored_signal_is_received_without_ending(arm: Any) -> None:
    """Under nohup, for example, a save is made and the process continues."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wakeup = arm(signal.SIGHUP)
    assert not wakeup.would_end(signal.SIGHUP)
    send(signal.SIGHUP)
    assert wakeup.read() == [signal.SIGHUP]
    wakeup.put_back()
    send(signal.SIGHUP)  # ignored again
    assert wakeup.read() == []


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("taken", [False, True], ids=["", "taken between"])
def test_several_instances_share_one_process(arm: Any, foreign: Any, closed: tuple[int, ...], taken: bool) -> None:
    """Each armed instance and the previous owner receive a signal once, and no byte loops. This holds with any of them
    closed, or if another library used the descriptor. Each remaining one reports that the signal ends the process, and
    the descriptor and handler are restored."""
    here, there = foreign
    made = [arm(signal.SIGTERM) for _ in range(3)]
    for at in closed:
        made[at].put_back()
        made[at].close()
    if taken:
        asyncio.run(asyncio.sleep(0, signal.set_wakeup_fd(-1)))
    rest = [wakeup for at, wakeup in enumerate(made) if at not in closed]
    for _ in range(2):
        send(signal.SIGTERM)
        assert [wakeup.would_end(signal.SIGTERM) for wakeup in rest] == [True] * len(rest)
        assert [wakeup.read() for wakeup in reversed(rest)] == [[signal.SIGTERM]] * len(rest)
        assert [wakeup.read() for wakeup in rest] == [[]] * len(rest)
        if not taken:
            assert list(here.recv(9)) == [signal.SIGTERM]
    for wakeup in rest:
        wakeup.put_back()
    assert current_fd() == (-1 if taken else there.fileno())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# -- effects on a whole process --

HEAD = """
import functools, os, signal, socket, sys, threading, time
from ckpt.guard.signals import Wakeup
print = functools.partial(print, flush=True)  # a fatal signal does not flush
def send(number):
    os.kill(os.getpid(), number)
"""


def test_signal_ends_the_process_after_put_back() -> None:
    """This also holds if a later handler still calls ours, and after put_back() in another thread."""
    plain = (
        HEAD + "w = Wakeup([signal.SIGTERM]); w.arm(); send(15); print(w.read()); w.put_back(); send(15); print('no')"
    )
    chained = HEAD + (
        "w = Wakeup([signal.SIGTERM]); w.arm(); ours = signal.getsignal(15)\n"
        "signal.signal(15, lambda n, f: ours(n, f)); w.put_back(); print([15]); send(15); time.sleep(1); print('no')"
    )
    thread = HEAD + (
        "w = Wakeup([signal.SIGTERM]); w.arm()\n"
        "t = threading.Thread(target=w.put_back); t.start(); t.join()\nprint([15])\nsend(15); time.sleep(9); print(0)"
    )
    for code in (plain, chained, thread):
        result = run_script(code)
        assert (result.returncode, result.stdout) == (-signal.SIGTERM, "[15]\n"), result.stderr


def test_close_in_another_thread_misdirects_no_byte() -> None:
    """A later signal must not write to the next opened file."""
    code = (
        HEAD
        + """
import tempfile
signal.signal(signal.SIGUSR1, lambda n, f: None)
w = Wakeup([signal.SIGUSR1])
w.arm()
def close():
    w.put_back()
    w.close()
t = threading.Thread(target=close)
t.start()
t.join()
files = [tempfile.TemporaryFile(buffering=0) for _ in range(8)]
send(signal.SIGUSR1)
print([os.fstat(f.fileno()).st_size for f in files])
"""
    )
    result = run_script(code)
    assert result.stdout == f"{[0] * 8}\n", result.stderr


def test_c_handler_is_left_alone() -> None:
    """A handler of faulthandler.register(SIGUSR1) for stack dumps works before, while and after ours is armed."""
    code = (
        HEAD
        + """
import faulthandler, tempfile
file = tempfile.TemporaryFile()
def dumped():
    before = os.fstat(file.fileno()).st_size
    send(signal.SIGUSR1)
    return os.fstat(file.fileno()).st_size > before
faulthandler.register(signal.SIGUSR1, file=file)
w = Wakeup([signal.SIGUSR1])
found = [dumped()]
w.arm()
found.append(dumped())
w.put_back()
found.append(dumped())
print(found)
"""
    )
    result = run_script(code)
    assert result.stdout == "[True, True, True]\n", (result.returncode, result.stderr)
