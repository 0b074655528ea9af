"""Damage to the header and labels of an arena is detected. Concurrent changes are not reported as damage."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.arena import FILLING, SEALED, Arena, Label, _set_counts
from ckpt.core.snapshot import stage
from ckpt.errors import CorruptError, WriterError
from ckpt.store import PAGE
from processes import PYTHONPATH

pytestmark = pytest.mark.timeout(60)  # a hang is a failure


def flip(memory: memoryview, at: int) -> None:
    memory[at] ^= 0x10


def test_damaged_label_hides_only_its_slot() -> None:
    arena = Arena.create(2, 2 * PAGE)
    for slot in (0, 1):
        arena.set_label(slot, Label(SEALED, slot + 1, CheckpointId(1, slot + 1, "0" * 8), "00" * 32, 8, 8, 0.0))
    assert [slot for slot, _ in arena.sealed()] == [1, 0]
    arena.view[PAGE + PAGE // 16 + 40] ^= 4
    assert [slot for slot, _ in arena.sealed()] == [0]
    with pytest.raises(CorruptError):
        arena.label(1)


def test_each_damaged_header_byte_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that map an arena refuse it or read unchanged values. A damaged lock blocks none of them."""
    monkeypatch.setattr(stage, "LEAVING_S", 0.05)
    arena = Arena.create(3, 8 * PAGE)
    for at in [*range(48), *range(256, 256 + 48), *range(512, 512 + 48)]:
        flip(arena.view, at)
        try:
            other = Arena.attach(os.dup(arena.fd))
        except CorruptError:
            other = None
        if other is not None:
            assert (other.slots, other.ready, other.slot_size, other.id) == (3, 3, arena.slot_size, arena.id), at
            assert at >= 256, "a damaged header was accepted"
            with contextlib.suppress(CorruptError, WriterError):
                stage._lock(other)
                other.mutex.unlock()
            other.close()
        arena.view[256 : 256 + 48] = bytes(48)
        arena.view[512 : 512 + 48] = bytes(48)
        arena.mutex.initialise()
        arena._keeper.initialise()
        if at < 48:
            flip(arena.view, at)
    arena.close()


def change_for_ever(fd: int) -> None:
    """Change the counts and a label continuously."""
    arena, label = Arena.attach(fd), Label(FILLING, 1, CheckpointId(1, 1, "0" * 8), "00" * 32, 4 * PAGE, 8)
    print("ready", flush=True)
    while True:
        _set_counts(arena._words, 2, 2)
        arena.set_label(0, label)


def test_concurrent_changes_are_not_reported_as_damage() -> None:
    """A reader on another core reads each number as it was before or after a change."""
    arena = Arena.create(2, 8 * PAGE)
    arena.set_label(0, Label(FILLING, 1, CheckpointId(1, 1, "0" * 8), "00" * 32, 4 * PAGE, 8))
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    code = here + f"import test_arena_damage as t; t.change_for_ever({arena.fd})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        pass_fds=[arena.fd],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            seen = set()
            for _ in range(20_000):
                fresh = Arena(-1, arena.memory)  # raises CorruptError if its header is damaged
                seen.add((fresh.slots, fresh.ready))
                arena.label(0)
            assert seen == {(2, 2)} and arena.damage() == []
        finally:
            other.kill()
    arena.close()
