"""Signals are noticed whatever the main thread does, and nobody's handlers or descriptors are lost."""

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
    """Makes and arms; whatever a test leaves behind is undone."""
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


def current_fd() -> int:
    """The wakeup descriptor of this process, which stays as it is."""
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return found


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_later_handler_may_call_the_one_before_it(arm: Any) -> None:
    """Which is ours, while armed and after it was put back; the one below ours is called each time."""
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


def test_a_descriptor_that_was_there_before_still_gets_its_bytes(arm: Any) -> None:
    """Every byte, also of signals that are none of ours; ours alone are reported."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
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
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


def test_a_full_or_closed_descriptor_of_others_harms_nothing(arm: Any) -> None:
    """What cannot be passed on is its owner's business."""
    here, there = socket.socketpair()
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            there.send(b"x" * 4096)
    signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    wakeup = arm()
    send(signal.SIGUSR1)
    assert wakeup.read() == [signal.SIGUSR1]
    here.close()
    send(signal.SIGUSR1)
    assert wakeup.read() == [signal.SIGUSR1]
    signal.set_wakeup_fd(-1)
    there.close()


def test_put_back_after_the_descriptor_before_ours_was_closed(arm: Any) -> None:
    """As when a Checkpointer was made inside a loop of asyncio that has ended: there is nothing to put back."""
    here, there = socket.socketpair()
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
    wakeup = arm()
    here.close()
    there.close()
    wakeup.put_back()
    assert current_fd() == -1


def test_a_loop_of_asyncio_between(arm: Any) -> None:
    """It takes the descriptor and leaves none behind. The next signal is heard all the same, and so are all later."""
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


def test_put_back_restores_exactly_what_was_there(arm: Any) -> None:
    """Default, ignored, a handler; and the descriptor."""
    here, there = socket.socketpair()
    there.setblocking(False)

    def mine(number: int, frame: Any) -> None:
        pass

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, mine)
    signal.set_wakeup_fd(there.fileno())
    wakeup = arm(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    assert current_fd() not in (-1, there.fileno())
    assert all(callable(signal.getsignal(number)) for number in wakeup.numbers)  # negative control
    wakeup.put_back()
    assert [signal.getsignal(number) for number in wakeup.numbers] == [signal.SIG_DFL, signal.SIG_IGN, mine]
    assert current_fd() == there.fileno()
    wakeup.put_back()  # again: harmless
    assert current_fd() == there.fileno()
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


def test_what_others_put_there_meanwhile_stays(arm: Any) -> None:
    """A later handler and a later descriptor are not ours to remove."""
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


def test_a_signal_that_was_ignored_is_heard_and_ends_nothing(arm: Any) -> None:
    """As under nohup: a save is made, and the process goes on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wakeup = arm(signal.SIGHUP)
    assert not wakeup.would_end(signal.SIGHUP)
    send(signal.SIGHUP)
    assert wakeup.read() == [signal.SIGHUP]
    wakeup.put_back()
    send(signal.SIGHUP)  # ignored again
    assert wakeup.read() == []


def test_repeated_signals_are_all_heard_and_too_many_harm_nothing(arm: Any) -> None:
    """In order; a socket that is full drops the rest, and neither raises nor blocks."""
    wakeup = arm(signal.SIGUSR1, signal.SIGTERM)
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        send(number)
    assert wakeup.read() == [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
    assert wakeup.read() == []
    for _ in range(20_000):
        send(signal.SIGUSR1)
    found = 0
    while heard := wakeup.read():
        assert set(heard) == {signal.SIGUSR1}
        found += len(heard)
    assert 0 < found <= 20_000
    send(signal.SIGTERM)
    assert wakeup.read() == [signal.SIGTERM]


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("taken", [False, True], ids=["", "taken between"])
def test_several_in_one_process(arm: Any, closed: tuple[int, ...], taken: bool) -> None:
    """Each that is armed hears a signal once, and so does who was there before; no byte goes round. Whichever of them
    were closed before, and if another library had the descriptor in between: each of the rest says that it ends the
    process, and the descriptor and the handler are as they were in the end."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
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
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


# -- what ends or changes a whole process --

HEAD = """
import functools, os, signal, socket, sys, threading, time
from ckpt.guard.signals import Wakeup
print = functools.partial(print, flush=True)  # what a signal ends does not flush
def send(number):
    os.kill(os.getpid(), number)
"""


def test_once_put_back_a_signal_ends_the_process_as_ever() -> None:
    """Also where a later handler still calls ours, and from another thread, where handlers cannot be put back."""
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


def test_a_forked_child_has_its_handlers_as_before() -> None:
    """In the child nothing of ours is left, and a signal to it does what it would have done; the parent hears none."""
    code = (
        HEAD
        + """
here, there = socket.socketpair()
there.setblocking(False)
calls = []
signal.signal(signal.SIGUSR1, lambda n, f: calls.append(n))
signal.set_wakeup_fd(there.fileno())
w = Wakeup([signal.SIGTERM, signal.SIGUSR1])
w.arm()
os.register_at_fork(after_in_child=w.forget)
child = os.fork()
if not child:
    send(signal.SIGUSR1)
    good = calls == [signal.SIGUSR1] and signal.getsignal(15) == signal.SIG_DFL
    good = good and signal.set_wakeup_fd(-1) == there.fileno() and here.recv(9) == bytes([signal.SIGUSR1])
    if not good:
        os._exit(3)
    send(15)
    os._exit(4)
print(os.waitpid(child, 0)[1], w.read(), w.would_end(15))
send(15)
send(signal.SIGUSR1)
print(w.read(), calls)
"""
    )
    result = run_script(code)
    assert result.stdout.splitlines() == ["15 [] True", "[15, 10] [10]"], result.stderr


def test_negative_control_without_forgetting_the_parent_hears_the_childs_signals() -> None:
    """The descriptor is shared by a fork, so that forgetting is needed."""
    code = (
        HEAD
        + """
w = Wakeup([signal.SIGTERM])
w.arm()
child = os.fork()
if not child:
    send(15)
    os._exit(4)
print(os.waitpid(child, 0)[1] >> 8, w.read())
"""
    )
    assert run_script(code).stdout == "4 [15]\n"


def test_closed_from_another_thread_no_byte_goes_astray() -> None:
    """A signal that comes after that must not write into whatever file was opened next."""
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


def test_a_handler_in_c_is_left_alone() -> None:
    """As of faulthandler.register(SIGUSR1), by which people have stacks dumped: before, while and after ours."""
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
