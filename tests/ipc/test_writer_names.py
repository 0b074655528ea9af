"""Tests of writer names, their owners, and processes identified by more than their PID."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ckpt
from ckpt.core.ipc import channel
from ckpt.core.ipc.heartbeat import Process
from ckpt.core.ipc.messages import ContinueRun, Note, ProblemNote, StoredNote
from ckpt.core.run.writer_link import WriterClient
from processes import eventually, writers


def test_notes_before_first_listener_are_delivered() -> None:
    ours, theirs = socket.socketpair()
    client, writer = WriterClient(channel.Channel(ours), "none"), channel.Channel(theirs)
    writer.send(StoredNote(arena="00", slot=1))
    future = client.send(ContinueRun())
    writer.reply(1, None)
    future.result(30)
    heard: list[Note] = []
    client.listen(heard.append, lambda: None)
    writer.send(ProblemNote("so"))
    assert eventually(lambda: heard == [StoredNote(arena="00", slot=1), ProblemNote("so")])
    client.close()
    writer.close()


def test_unresponsive_name_counts_as_taken(own_sockets: Path) -> None:
    """Its owner was stopped before it listened: clients do not continue to the alternative names for other users."""
    key = channel.run_key("memory:bound", 0)
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(channel._address(key, 0))
        assert channel.listen(key) is None


def test_writer_name_has_one_owner(own_sockets: Path) -> None:
    """If many request a name at the same time, one gets it. It becomes free when its owner has ended, and a late writer
    does not take it from its successor."""
    key = channel.run_key("memory:name", 0)
    got = list[object]()
    threads = [threading.Thread(target=lambda: got.append(channel.listen(key))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (owner,) = [one for one in got if one is not None]
    assert channel.listen(key) is None and channel.siblings(key) == {0: key}
    with pytest.raises(ckpt.errors.WriterError, match="another writer"):
        late = WriterClient.spawn(key, "memory:handover", 0)
        try:
            late.greet(60.0, 60.0)
        finally:
            late.close()
    assert channel.siblings(key) == {0: key}
    owner.close()  # type: ignore[attr-defined]
    again = channel.listen(key)
    assert again is not None
    again.close()


def test_process_is_identified_by_start_time() -> None:
    """Its start time distinguishes it from another process with its PID. A process that ended is not alive."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process.alive and not Process(child.pid, process.started - 1).alive
    assert abs(process.born - time.monotonic()) < 60
    child.kill()
    assert eventually(lambda: not process.alive)  # a zombie
    child.wait()
    assert not process.alive and Process.of(child.pid) != process


@pytest.mark.parametrize("again", [False, True], ids=["the trainer", "its number again"])
def test_writer_identifies_trainer_by_start_time(
    own_sockets: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """If a trainer dies and another process gets its PID, its starting writer exits, but waits for the true one."""
    process, lost = Process.of(os.getpid()), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Process, "of", lambda pid: Process(pid, process.started - again))
        client = WriterClient.spawn(channel.run_key("memory:handover", 0), "memory:handover", 0)
    try:
        client.listen(lambda note: None, lost.set)
        assert lost.wait(30 if again else 2) == again
        assert not again or eventually(lambda: not writers(own_sockets))
    finally:
        client.close()
        for process in writers(own_sockets):
            process.send_signal(signal.SIGKILL)
