"""Signals are noticed whatever the main thread does, and nobody's handlers or descriptors are lost."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import threading
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


class Blocked:
    """A thread that hears one signal and then sets the main thread free; `events` is what came in which order."""

    def __init__(self, wakeup: Wakeup, free: Callable[[], None]) -> None:
        self.events: list[str] = []
        self._wakeup, self._free = wakeup, free
        self._stop, self._stopper = os.pipe()
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        threading.Timer(0.2, send, [signal.SIGUSR1]).start()
        self._wakeup.wait(self._stop, SAFETY_S)
        self.events.append("heard" if self._wakeup.read() == [signal.SIGUSR1] else "nothing")
        self._free()

    def end(self) -> list[str]:
        self.events.append("free")
        self._thread.join(SAFETY_S)
        os.close(self._stop)
        os.close(self._stopper)
        return self.events


def test_heard_while_the_main_thread_waits_for_a_lock(arm: Any) -> None:
    """It gets the lock only after the signal was heard."""
    lock = threading.Lock()
    lock.acquire()
    blocked = Blocked(arm(), lock.release)
    lock.acquire()
    assert blocked.end() == ["heard", "free"]


def test_heard_while_the_main_thread_waits_for_a_socket(arm: Any) -> None:
    """recv returns only after the signal was heard."""
    here, there = socket.socketpair()
    blocked = Blocked(arm(), lambda: there.sendall(b"x"))
    assert here.recv(1) == b"x"
    assert blocked.end() == ["heard", "free"]
    here.close()
    there.close()


def test_heard_while_the_main_thread_is_in_c(arm: Any) -> None:
    """As in a collective: C code that no signal interrupts. Negative control: Python's own handler comes too late."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    libc.pthread_mutex_lock(mutex)
    blocked: list[Blocked] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: blocked[0].events.append("handler"))
    blocked.append(Blocked(arm(), lambda: libc.pthread_mutex_unlock(mutex)))
    libc.pthread_mutex_lock(mutex)
    assert blocked[0].end() == ["heard", "handler", "free"]


def test_negative_control_unarmed_hears_nothing(arm: Any) -> None:
    """Without being armed there is nothing to read."""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    wakeup = Wakeup([signal.SIGUSR1])
    send(signal.SIGUSR1)
    assert wakeup.read() == []
    wakeup.close()


def test_the_users_own_handler_still_runs(arm: Any) -> None:
    """One that was there before is called by ours, with the same arguments; it decides, so nothing ends."""
    calls: list[tuple[int, Any]] = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append((number, frame)))
    wakeup = arm(signal.SIGTERM)
    send(signal.SIGTERM)
    assert [number for number, _ in calls] == [signal.SIGTERM] and calls[0][1] is not None
    assert wakeup.read() == [signal.SIGTERM]
    assert not wakeup.would_end(signal.SIGTERM)


def test_a_handler_that_raises_still_raises(arm: Any) -> None:
    """As Ctrl-C does."""

    def refuse(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("as the user wants it")

    signal.signal(signal.SIGHUP, refuse)
    wakeup = arm(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt, match="as the user wants it"):
        send(signal.SIGHUP)
    assert wakeup.read() == [signal.SIGHUP]


def test_a_handler_that_comes_later_replaces_ours_and_we_still_hear(arm: Any) -> None:
    """The descriptor does not depend on our handler."""
    calls: list[int] = []
    wakeup = arm(signal.SIGTERM)
    assert wakeup.would_end(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    assert not wakeup.would_end(signal.SIGTERM)
    send(signal.SIGTERM)
    assert calls == wakeup.read() == [signal.SIGTERM]


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


def test_would_end_says_what_would_happen_without_us(arm: Any) -> None:
    """Only of a signal that is ours now, and had its default before."""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    wakeup = arm(signal.SIGTERM, signal.SIGUSR1)
    assert wakeup.would_end(signal.SIGTERM)
    assert not wakeup.would_end(signal.SIGUSR1)  # has a handler
    assert not wakeup.would_end(signal.SIGHUP)  # none of ours
    send(signal.SIGTERM)
    assert wakeup.would_end(signal.SIGTERM)  # still
    wakeup.put_back()
    assert not wakeup.would_end(signal.SIGTERM)


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


def test_no_signals_arm_nothing(arm: Any) -> None:
    """Neither a handler nor the descriptor is touched."""
    wakeup = Wakeup(())
    wakeup.arm()
    assert current_fd() == -1
    wakeup.put_back()
    wakeup.close()


def test_outside_the_main_thread_it_is_only_said(arm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Python refuses handlers there: nothing changes, and the log says so."""
    before = signal.getsignal(signal.SIGUSR1)
    wakeup = Wakeup([signal.SIGUSR1])

    def in_thread() -> None:
        wakeup.arm()
        wakeup.put_back()

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(SAFETY_S)
    assert "not created in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) == before and current_fd() == -1
    assert not wakeup.would_end(signal.SIGUSR1) and wakeup.read() == []
    wakeup.put_back()
    wakeup.close()


def test_waiting_ends_by_the_other_descriptor_too(arm: Any) -> None:
    """So that who waits can be stopped; a timeout ends it as well."""
    wakeup = arm()
    reader, writer = os.pipe()
    waiter = threading.Thread(target=wakeup.wait, args=(reader, None))
    waiter.start()
    os.write(writer, b"x")
    waiter.join(SAFETY_S)
    assert not waiter.is_alive()
    os.read(reader, 1)
    wakeup.wait(reader, 0.01)
    assert wakeup.read() == []
    os.close(reader)
    os.close(writer)


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


def test_the_fixture_leaves_nothing() -> None:
    """What tests armed is undone: the default handlers and no descriptor."""
    assert current_fd() == -1
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
