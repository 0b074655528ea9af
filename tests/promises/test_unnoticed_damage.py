"""Damage is noticed: whatever file, record or region of shared memory it hits, readers get the right tensors, or say
by name what is lost. Nothing hangs, and memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt
import toy
from ckpt.checkpoint import losses, read
from ckpt.cli.app import cli
from ckpt.errors import CorruptError, WriterError
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import FILLING, Arena, Label, _set_counts
from ckpt.store import PAGE
from ckpt.trainer.staging import stage
from processes import PYTHONPATH, eventually, killed, run_script, writers

STEPS = (2, 4, 6)
pytestmark = pytest.mark.timeout(60)  # a hang is a failure


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A run with three checkpoints, and the digests of their states."""
    folder, digests = tmp_path_factory.mktemp("damage") / "run", dict[int, str]()
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=2)]) as cp:
        for step in range(1, STEPS[-1] + 1):
            toy.train_step(state)
            cp.step(step)
            digests[step] = toy.digest(state)
        cp.wait()
    return folder, digests


@pytest.fixture
def folder(run: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(run[0], tmp_path / "run"))


def newest_commit(folder: Path) -> Path:
    """The record of the newest checkpoint, made the newest record."""
    records = sorted((folder / "log").glob("*.json"))
    while b'"type":"COMMIT"' not in records[-1].read_bytes():
        records.pop().unlink()
    return records[-1]


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


def replace_with_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_with_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def replace_with_link_to_copy(path: Path) -> None:
    copy = path.parent.parent.parent / "elsewhere"
    path.rename(copy)
    path.symlink_to(copy)


def replace_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [replace_with_pipe, replace_with_link_to_itself, replace_with_link_to_copy, replace_with_folder, remove]
)
def test_lost_newest_record_is_noticed_by_readers_and_verify(
    folder: Path, run: tuple[Path, dict[int, str]], damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Readers fall back with a warning, `verify` fails, and the next start gets the newest step back."""
    damage(newest_commit(folder))
    found = ckpt.load(folder)
    assert found.step == 4 and [one.step for one in found.skipped] == [6]
    assert "up to step 6" in warnings(caplog)
    caplog.clear()
    assert ckpt.Run(folder).list()[0].step == 4 and "log record" in warnings(caplog)
    verified = CliRunner().invoke(cli, ["verify", str(folder)], standalone_mode=False)
    assert verified.return_value == 1 and "step 6" in verified.output, verified.output
    assert "log record" in verified.output and "ckpt repair" not in verified.output
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=2)]) as cp:
        assert cp.restore() == 6 and toy.digest(state) == run[1][6]
        toy.train_step(state)
        toy.train_step(state)
        cp.step(8)
        cp.wait()
    assert ckpt.load(folder).step == 8


def test_unfinished_commit_of_a_running_job_is_no_damage(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An index comes before the record that names it: a reader that sees one looks again before it warns."""
    record = newest_commit(folder)
    raw = record.read_bytes()
    record.unlink()

    async def meanwhile() -> int:
        log = await read.open_run(f"file://{folder}")
        asyncio.get_running_loop().call_later(0.05, record.write_bytes, raw)
        found = await losses.of_log(log)
        await log.store.aclose()
        return len(found)

    assert read.run(meanwhile()) == 0 and not warnings(caplog)


def test_verify_does_not_read_a_large_format_file(folder: Path) -> None:
    """A FORMAT.json of any size is refused by its size."""
    with open(folder / "FORMAT.json", "r+b") as file:
        file.truncate(8 << 30)
    verified = CliRunner().invoke(cli, ["verify", str(folder)], standalone_mode=False)
    said = " ".join(verified.output.split())
    assert verified.return_value == 1 and "FORMAT.json is implausibly large" in said, said


# -- shared memory --


def arena_of_this_process() -> Arena:
    """The arena that this process trains in, mapped once more."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:ckpt-arena"):
                return Arena.attach(os.dup(int(name)))
    raise AssertionError("there is no arena")


def flip(memory: memoryview, at: int) -> None:
    memory[at] ^= 0x10


def newest_slot(arena: Arena) -> int:
    return arena.sealed()[0][0]


def label_at(arena: Arena) -> int:
    return PAGE + newest_slot(arena) * PAGE // 16


def zero_labels(arena: Arena) -> None:
    arena.view[PAGE : 2 * PAGE] = bytes(PAGE)


def zero_header(arena: Arena) -> None:
    arena.view[:PAGE] = bytes(PAGE)


def flip_data(arena: Arena) -> None:
    slot, label = arena.sealed()[0]
    flip(arena.data(slot, label.data_size), label.data_size // 2)


HEADER = "the header of the shared memory is damaged"
SLOT = "of the shared memory is damaged: the snapshot in it, perhaps a newer step, is lost"
REGIONS: dict[str, tuple[Callable[[Arena], object], str, Sequence[int], bool]] = {
    # what is damaged; what is logged; steps that may come back; whether they have to be right
    "magic": (lambda a: flip(a.view, 1), HEADER, (4, 5), True),
    "slot size": (lambda a: flip(a.view, 18), HEADER, (4, 5), True),
    "id": (lambda a: flip(a.view, 30), HEADER, (4, 5), True),
    "counts": (lambda a: flip(a.view, 40), HEADER, (4, 5), True),
    "kind of a lock": (lambda a: flip(a.view, 256 + 16), HEADER, (4, 5), True),
    "whole header": (zero_header, HEADER, (4, 5), True),
    "label": (lambda a: flip(a.view, label_at(a) + 30), SLOT, (4,), True),
    "state of a label": (lambda a: flip(a.view, label_at(a) + 8), SLOT, (4,), True),
    "all labels": (zero_labels, SLOT, (4,), True),
    "sequence number of a label": (lambda a: a.view.__setitem__(label_at(a), a.view[label_at(a)] ^ 1), "", (5,), True),
    "data": (flip_data, "", (5,), False),
}


def train(folder: str, region: str) -> None:
    """In a process of its own: five steps, damage, and death."""
    state = toy.build()
    cp = ckpt.Checkpointer(state, [ckpt.Memory(keep=2), ckpt.Tier(folder, every=4)])
    for step in range(1, 6):
        toy.train_step(state)
        cp.step(step)
    cp.wait()
    cp.stage().staged()
    REGIONS[region][0](arena_of_this_process())
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder: str) -> None:
    """In another one: what comes back."""
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Memory(keep=2), ckpt.Tier(folder, every=4)]) as cp:
        step = cp.restore()
        assert cp.last_restore is not None
        print(json.dumps([step, cp.last_restore.tier, cp.last_restore.verified, toy.digest(state)]))


@pytest.mark.parametrize("region", REGIONS)
def test_damaged_shared_memory_is_noticed_at_the_first_start(
    region: str, run: tuple[Path, dict[int, str]], run_dir: str, own_sockets: Path
) -> None:
    """Each region is damaged just before the trainer dies. The first start succeeds and names the damage; its tensors
    are right, or not said to be verified."""
    _, expected, steps, right = REGIONS[region]
    assert killed(run_script(f"import test_unnoticed_damage as t; t.train({run_dir!r}, {region!r})"))
    found = run_script(f"import test_unnoticed_damage as t; t.start({run_dir!r})", timeout_s=50)
    assert found.returncode == 0, found.stderr
    step, tier, verified, digest = json.loads(found.stdout.splitlines()[-1])
    assert step in steps and expected in " ".join(found.stderr.split()), found.stderr
    assert (digest == run[1][step]) == right
    assert right or (tier, verified) == ("memory", False)


def test_step_that_was_stored_after_a_death_is_not_called_verified(run_dir: str, own_sockets: Path) -> None:
    """The writer digests what it finds in memory then; if memory was damaged before, the folder has the same bytes."""
    assert killed(run_script(f"import test_unnoticed_damage as t; t.train({run_dir!r}, 'data')"))
    assert eventually(lambda: ckpt.load(run_dir).step == 5)
    for process in writers(own_sockets):
        process.kill()
    found = run_script(f"import test_unnoticed_damage as t; t.start({run_dir!r})", timeout_s=50)
    step, tier, verified, _ = json.loads(found.stdout.splitlines()[-1])
    assert (step, tier, verified) == (5, f"file://{run_dir}", False)


def test_each_damaged_byte_of_a_header_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever maps an arena refuses it, or finds that nothing has changed. Nobody waits for a damaged lock for ever."""
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
            assert at >= 256, "a damaged header was believed"
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
    """A process that changes the counts and a label all the time."""
    arena, label = Arena.attach(fd), Label(FILLING, 1, Attempt(1, 1, "0" * 8), "00" * 32, 4 * PAGE, 8)
    print("ready", flush=True)
    while True:
        _set_counts(arena._words, 2, 2)
        arena.set_label(0, label)


def test_what_is_being_changed_is_not_called_damaged() -> None:
    """A reader on another core sees each number as it was before a change, or as it is after it."""
    arena = Arena.create(2, 8 * PAGE)
    arena.set_label(0, Label(FILLING, 1, Attempt(1, 1, "0" * 8), "00" * 32, 4 * PAGE, 8))
    code = f"import test_unnoticed_damage as t; t.change_for_ever({arena.fd})"
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


class Colour(enum.Enum):
    """A value that only this script knows."""

    RED = "red"


def test_verify_accepts_values_of_every_kind(run_dir: str) -> None:
    """What a restore can read is not called damaged, whoever knows what it stands for."""
    model = torch.nn.Linear(3, 2).to(memory_format=torch.preserve_format)
    optim = torch.optim.AdamW(model.parameters())
    optim.param_groups[0] |= {"kind": torch.bfloat16, "colour": Colour.RED, "when": deque([1, 2], 3)}
    plain = {
        "set": {1, "x", (2.0, None)}, "deque": deque([torch.ones(2), {"a": 1j}]), "array": np.ones((2, 3)),
        "keys": {1.5: "a", None: "b", (1, "x"): frozenset({3})}, "counter": Counter("aab"), "bytes": b"\0\xff",
        "parameter": torch.nn.Parameter(torch.ones(3)), "time": datetime(2026, 1, 1), "scalar": np.float32(2),
    }  # fmt: skip
    with ckpt.Checkpointer({"model": model, "optim": optim, "plain": plain, "rng": ckpt.RNG()}, run_dir) as cp:
        model(torch.ones(3)).sum().backward()
        optim.step()
        cp.step(1)
        cp.save().committed()
    verified = CliRunner().invoke(cli, ["verify", run_dir], standalone_mode=False)
    assert verified.return_value == 0, verified.output
