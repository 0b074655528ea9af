"""Tests of the page with the training's progress: two mappings, in one or two processes, see the same."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.errors import CorruptError
from ckpt.store import PAGE


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    made = Heartbeat.create()
    yield made
    made.close()


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
