"""Damage is noticed: whatever file, record or region of shared memory it hits, readers get the right tensors, or say
by name what is lost. Nothing hangs, and memory stays bounded."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import ckpt
import inside
import toy
from inside import SharedMemory
from processes import eventually, killed, run_script, writers

STEPS = (2, 4, 6)
pytestmark = pytest.mark.timeout(60)  # a hang is a failure


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A run with three checkpoints, and the digests of their states."""
    folder, digests = tmp_path_factory.mktemp("damage") / "run", dict[int, str]()
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=2)], memory=None) as cp:
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
    verified = inside.invoke("verify", str(folder), standalone_mode=False)
    assert verified.return_value == 1 and "step 6" in verified.output, verified.output
    assert "log record" in verified.output and "ckpt repair" not in verified.output
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=2)], memory=None) as cp:
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
    assert inside.losses_at(folder, lambda: record.write_bytes(raw), 0.05) == [] and not warnings(caplog)


def test_verify_does_not_read_a_large_format_file(folder: Path) -> None:
    """A FORMAT.json of any size is refused by its size."""
    with open(folder / "FORMAT.json", "r+b") as file:
        file.truncate(8 << 30)
    verified = inside.invoke("verify", str(folder), standalone_mode=False)
    said = " ".join(verified.output.split())
    assert verified.return_value == 1 and "FORMAT.json is implausibly large" in said, said


# -- shared memory --


def flip(memory: memoryview, at: int) -> None:
    memory[at] ^= 0x10


def zero(memory: memoryview) -> None:
    memory[:] = bytes(len(memory))


def change_sequence(memory: SharedMemory) -> None:
    memory.newest_sequence[0] ^= 1


HEADER = "the header of the shared memory is damaged"
SLOT = "of the shared memory is damaged: the snapshot in it, perhaps a newer step, is lost"
REGIONS: dict[str, tuple[Callable[[SharedMemory], object], str, Sequence[int], bool]] = {
    # what is damaged; what is logged; steps that may come back; whether they have to be right
    "magic": (lambda m: flip(m.header["magic"], 1), HEADER, (4, 5), True),
    "slot size": (lambda m: flip(m.header["slot size"], 2), HEADER, (4, 5), True),
    "id": (lambda m: flip(m.header["id"], 6), HEADER, (4, 5), True),
    "counts": (lambda m: flip(m.header["counts"], 0), HEADER, (4, 5), True),
    "kind of a lock": (lambda m: flip(m.header["lock"], 16), HEADER, (4, 5), True),
    "whole header": (lambda m: zero(m.header["all"]), HEADER, (4, 5), True),
    "label": (lambda m: flip(m.newest_label, 22), SLOT, (4,), True),
    "state of a label": (lambda m: flip(m.newest_label, 0), SLOT, (4,), True),
    "all labels": (lambda m: zero(m.labels), SLOT, (4,), True),
    "sequence number of a label": (change_sequence, "", (5,), True),
    "data": (lambda m: flip(m.newest_data, len(m.newest_data) // 2), "", (5,), False),
}


def train(folder: str, region: str) -> None:
    """In a process of its own: five steps, damage, and death."""
    state = toy.build()
    cp = ckpt.Checkpointer(state, ckpt.Tier(folder, every=4), memory=ckpt.Memory(keep=2))
    for step in range(1, 6):
        toy.train_step(state)
        cp.step(step)
    cp.wait()
    cp.stage().wait_staged()
    REGIONS[region][0](SharedMemory.of_this_process())
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder: str) -> None:
    """In another one: what comes back."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(folder, every=4), memory=ckpt.Memory(keep=2)) as cp:
        step = cp.restore()
        assert cp.last_restore is not None
        print(json.dumps([step, cp.last_restore.tier, cp.last_restore.verified, toy.digest(state)]))


@pytest.mark.parametrize("region", REGIONS)
def test_damaged_shared_memory_is_noticed_at_the_first_start(
    region: str, run: tuple[Path, dict[int, str]], run_dir: str, own_sockets: Path
) -> None:
    """Each region is damaged just before the trainer dies. The first start succeeds and reports the damage; its tensors
    are right, or reported as unverified."""
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
