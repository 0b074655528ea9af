"""Tests of the page with the training's progress: two mappings, in one or two processes, see the same."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ckpt.core.ipc.heartbeat import LEAVING, OPENING, PAUSED, RESTORING, STATES, TRAINING, Beat, Heartbeat
from ckpt.errors import CorruptError
from ckpt.store import PAGE

OTHER = """
import sys
from ckpt.core.ipc.heartbeat import Heartbeat
heartbeat = Heartbeat.attach(int(sys.argv[1]))
for _ in sys.stdin:
    beat = heartbeat.read()
    print(beat.calls, beat.step, beat.when, beat.doing, beat.updates, heartbeat.usual_s, flush=True)
    heartbeat.usual_s = 0.25
"""


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    made = Heartbeat.create()
    yield made
    made.close()


def test_new_page_has_no_step(heartbeat: Heartbeat) -> None:
    """It has no step, no step time, and a recent time."""
    before = time.monotonic()
    found = Heartbeat.create().read()
    assert before <= found.when <= time.monotonic()
    assert (found.calls, found.step, found.updates, found.doing) == (0, -1, 0, "opening")
    assert (heartbeat.usual_s, heartbeat.step, heartbeat.state) == (0.0, -1, OPENING)


def test_every_field_is_visible_to_another_mapping(heartbeat: Heartbeat) -> None:
    """Fields of the training loop and of the writer are visible to the other side."""
    other = Heartbeat.attach(os.dup(heartbeat.fd))
    at = time.monotonic()
    heartbeat.beat(7)
    first = other.read()
    assert first == heartbeat.read()
    assert (first.calls, first.step, first.state, first.updates) == (1, 7, TRAINING, 0)
    assert at <= first.when <= time.monotonic()
    heartbeat.beat(9)
    heartbeat.update()
    heartbeat.update()
    assert (other.read().calls, other.step, other.read().updates) == (2, 9, 2)
    for state in (PAUSED, RESTORING, LEAVING, OPENING, TRAINING):
        heartbeat.touch(state)
        assert other.state == state and other.read().doing == STATES[state]
    assert (other.step, other.read().calls) == (9, 2)  # a touch is not a step
    other.usual_s = 1.5
    assert heartbeat.usual_s == 1.5 and other.read().updates == 2
    other.close()


def test_two_processes_see_each_other(heartbeat: Heartbeat) -> None:
    """The descriptor is passed to another process, and both directions work."""
    command = [sys.executable, "-c", OTHER, str(heartbeat.fd)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, pass_fds=[heartbeat.fd], **pipes) as other:  # type: ignore[call-overload]
        try:
            for step in (3, 4):
                heartbeat.beat(step)
                heartbeat.update()
                other.stdin.write("\n")
                other.stdin.flush()
                seen = other.stdout.readline().split()
                beat = heartbeat.read()
                expected = [beat.calls, beat.step, beat.when, "training", beat.updates]
                assert seen[:5] == [str(value) for value in expected]
            assert seen[5:] == ["0.25"]  # its own value, written after the first line
            assert heartbeat.usual_s == 0.25
        finally:
            other.stdin.close()
            other.wait(10)


def test_negative_control_pages_are_independent(heartbeat: Heartbeat) -> None:
    """Two pages are independent."""
    other = Heartbeat.create()
    heartbeat.beat(5)
    assert other.step == -1 and other.read().calls == 0
    other.close()


def test_last_steps_are_returned_in_order(heartbeat: Heartbeat) -> None:
    """Steps since the last read are returned in order, with the cost of saving; if there are too many, the newest."""
    assert heartbeat.since(0) == (0, [])
    for step in range(1, 6):
        heartbeat.beat(step, stalled_s=0.25 * step, saves=2 * step, skipped=step)
    heartbeat.paused(1.5)
    heartbeat.beat(9, 2.0, 11, 5)
    calls, done = heartbeat.since(3)
    assert calls == 6 and [one.step for one in done] == [4, 5, 9]
    assert [one.stalled for one in done] == [1.0, 1.25, 2.0] and [one.saves for one in done] == [8, 10, 11]
    assert [one.paused for one in done] == [0.0, 0.0, 1.5] and done[-1].skipped == 5
    assert done[-1].when == heartbeat.read().when and heartbeat.since(6) == (6, [])
    for step in range(10, 5000):
        heartbeat.beat(step)
    calls, done = heartbeat.since(6)
    steps = [one.step for one in done]
    assert calls == 4996 and 400 < len(steps) < 1000 and steps == list(range(5000 - len(steps), 5000))


def test_page_size_is_sealed(heartbeat: Heartbeat) -> None:
    """No process can truncate the page, which would end readers with SIGBUS, or undo the seal."""
    assert os.fstat(heartbeat.fd).st_size == 9 * PAGE
    for size in (0, PAGE, 18 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(heartbeat.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(heartbeat.fd, 1033, 0x0008)  # one more seal
    loose = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # negative control
    os.ftruncate(loose, PAGE)
    os.ftruncate(loose, 0)
    os.close(loose)


def test_page_descriptor_is_not_inherited(heartbeat: Heartbeat) -> None:
    """A program started by the trainer does not get the descriptor."""
    assert not os.get_inheritable(heartbeat.fd)


def refused(fd: int) -> str:
    with pytest.raises(CorruptError) as caught:
        Heartbeat.attach(fd)
    os.close(fd)
    return str(caught.value)


def memory(content: bytes, size: int = 9 * PAGE) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.ftruncate(fd, size)
    return fd


def test_foreign_memory_is_rejected_as_page(heartbeat: Heartbeat) -> None:
    """Too small, empty, other content or another major version: CorruptError, and no crash."""
    whole = mmap.mmap(heartbeat.fd, 9 * PAGE)[:]
    reader, writer = os.pipe()
    os.close(writer)
    assert "not the pages of a trainer" in refused(reader)
    assert "not the pages of a trainer" in refused(memory(b"", 0))
    assert "not the pages of a trainer" in refused(memory(whole, 9 * PAGE - 1))
    assert "of this version" in refused(memory(b""))
    assert "of this version" in refused(memory(b"x" * 9 * PAGE))
    assert "of this version" in refused(memory(bytes([whole[0] ^ 1]) + whole[1:]))
    copy = Heartbeat.attach(memory(whole))  # negative control: the same bytes are accepted
    assert copy.read() == heartbeat.read()
    copy.close()


def test_unknown_state_is_shown(heartbeat: Heartbeat) -> None:
    """A state of another version is shown as unknown."""
    assert Beat(0, 0, 0.0, 99, 0).doing == Beat(0, 0, 0.0, -1, 0).doing == "?"
    heartbeat.touch(99)
    assert heartbeat.read().doing == "?"


def test_closing_page_twice_is_harmless(heartbeat: Heartbeat) -> None:
    """Closing twice is harmless, and other readers still see the last state."""
    made = Heartbeat.create()
    made.beat(3)
    fd = made.fd
    made.close()
    made.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert made.step == 3
