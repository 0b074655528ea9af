"""What is read of a run while it is opened is used by a restore, and never believed as it is."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.core.checkpoint.losses import Loss
from ckpt.core.log.log import RunLog
from ckpt.core.ranks.world import World
from ckpt.core.restore import early_look
from ckpt.core.restore.candidates import gather
from ckpt.core.restore.early_look import EarlyLook
from ckpt.core.restore.restore_first import Restored, restore_first
from ckpt.core.state.capture import Capture
from ckpt_backends.local import LocalStore
from run_files import DATA, INDEX, MANIFEST, keys_in, kind_of

SIZE = 3000


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((SIZE,), float(step)), "step": step}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A run of steps 1 and 2; and the same run, in which another start has come to step 3."""
    base = tmp_path_factory.mktemp("left")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(base))
    train(base / "run", 1, 2)
    shutil.copytree(base / "run", base / "before")
    train(base / "run", 3)
    yield base / "before", base / "run"
    patch.undo()


def train(folder: Path, *steps: int) -> None:
    state = state_of(0)
    with ckpt.Checkpointer(state, ckpt.Tier(str(folder), every=1, keep="all"), triggers=(), memory=None) as cp:
        cp.restore(default=0)
        for step in steps:
            state["weight"].fill_(step)
            state["step"] = step
            cp.save(step).wait_durable(60.0)


def looked(folder: Path) -> EarlyLook:
    """One that has come to its end."""
    early = EarlyLook([f"file://{folder}"])
    for thread in threading.enumerate():
        if thread.name == "ckpt-look":
            thread.join(60.0)
    return early


def restored(folder: Path, early: EarlyLook | None, step: int | None = None) -> Restored:
    """As `Checkpointer.restore` does it, and every bit is that step's."""
    state, result, lost = state_of(0), Restored(step=None), list[Loss]()
    sources = gather(World(), [], [], [f"file://{folder}"], [[0]], step, lost, early)
    capture = Capture(state)
    capture.read()
    restore_first(World(), sources, capture, result, strict=True, on_touch=lambda: None, lost=lost, step=step)
    assert result.step is not None
    assert torch.equal(state["weight"], state_of(result.step)["weight"]) and state["step"] == result.step
    return result


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often this process has read each object of a folder."""
    found, get = Counter[str](), LocalStore.get

    async def counted(store: LocalStore, key: str, **settings: Any) -> memoryview:
        found[key] += 1
        return await get(store, key, **settings)

    monkeypatch.setattr(LocalStore, "get", counted)
    return found


def small(reads: Counter[str]) -> dict[str, int]:
    """Of all but the bytes of tensors."""
    return {key: count for key, count in reads.items() if kind_of(key) != DATA}


def test_nothing_is_read_twice(left: tuple[Path, Path], reads: Counter[str]) -> None:
    """What was seen early is not read again; without it all of it is."""
    early = looked(left[0])
    before = small(reads)
    assert {kind_of(key) for key in before} == {"format", "log", INDEX, MANIFEST}
    assert restored(left[0], early).step == 2
    assert small(reads) == before and set(before.values()) == {1}
    assert restored(left[0], None).step == 2
    assert small(reads) == dict.fromkeys(before, 2)


def test_a_start_looks_at_the_run_once(left: tuple[Path, Path], tmp_path: Path, reads: Counter[str]) -> None:
    """From the opening of a run to the end of restore() the training reads each of its files once.

    FORMAT.json is read once more, to compare the run's id with that of a writer on this machine.
    """
    folder = shutil.copytree(left[1], tmp_path / "run")
    state = state_of(0)
    with ckpt.Checkpointer(state, str(folder), triggers=()) as cp:
        assert cp.restore() == 3
        assert torch.equal(state["weight"], state_of(3)["weight"])
        assert small(reads) | {"FORMAT.json": 1} == dict.fromkeys(small(reads), 1), small(reads)
        assert small(reads)["FORMAT.json"] <= 2
        assert cp.restore(step=1) == 1  # also what came since is seen: our own taking over
        assert torch.equal(state["weight"], state_of(1)["weight"])


def test_what_came_since_is_seen(left: tuple[Path, Path], tmp_path: Path) -> None:
    """Another start commits a step after the early look: a restore finds it; or that step which it is asked for."""
    for step in (None, 1, 2, 3):
        folder = shutil.copytree(left[0], tmp_path / f"{step}")
        early = looked(folder)
        shutil.copytree(left[1], folder, dirs_exist_ok=True)
        assert restored(folder, early, step).step == (step or 3)


def test_negative_control_what_was_seen_early_is_believed(
    left: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(left[0], tmp_path / "run")
    early = looked(folder)
    shutil.copytree(left[1], folder, dirs_exist_ok=True)

    async def believed(log: RunLog) -> Any:
        return log.state

    monkeypatch.setattr(RunLog, "refresh", believed)
    assert restored(folder, early).step == 2


def test_what_was_damaged_early_is_read_again(left: tuple[Path, Path], tmp_path: Path) -> None:
    """A record, or the index and the part of the newest checkpoint, that are mended before the restore are no loss; if
    they are not, it is told as ever."""
    for kind in ("log", INDEX, MANIFEST):
        for mended in (True, False):
            folder = shutil.copytree(left[0], tmp_path / f"{kind}-{mended}")
            path = folder / max(key for key in keys_in(folder) if kind_of(key) == kind)
            sound = path.read_bytes()
            path.write_bytes(sound[:-9] + bytes([sound[-9] ^ 4]) + sound[-8:])
            early = looked(folder)
            if mended:
                path.write_bytes(sound)
            found, plainly = restored(folder, early), restored(folder, None)
            assert (found.step, found.skipped) == (plainly.step, plainly.skipped)
            assert (found.step == 2 and not found.skipped) or not mended


def test_another_run_in_its_place(left: tuple[Path, Path], tmp_path: Path) -> None:
    """The folder is emptied after the early look, and another run begins there, which has more records: it is read."""
    folder = shutil.copytree(left[0], tmp_path / "run")
    early = looked(folder)
    shutil.rmtree(folder)
    train(folder, 5, 6, 7, 8)
    assert restored(folder, early).step == 8


def test_a_run_that_begins_later(left: tuple[Path, Path], tmp_path: Path) -> None:
    """Where nothing was to be seen early, a restore reads all."""
    early = looked(tmp_path / "run")
    shutil.copytree(left[0], tmp_path / "run")
    assert restored(tmp_path / "run", early).step == 2


def test_a_look_that_hangs_is_left_alone(left: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore does not wait for it for long, and reads all by itself."""
    monkeypatch.setattr(early_look, "_look", lambda url, look: None)
    monkeypatch.setattr(early_look, "WAIT_S", 0.05)
    assert restored(left[0], looked(left[0])).step == 2
