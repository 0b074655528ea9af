"""A full or failing disk: the save in progress fails cleanly, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import random
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
import inside
from ckpt.errors import CheckpointError, FullError, SaveError
from ckpt_backends.disk import Disk
from ckpt_backends.local_files import OpenFiles
from model_disk import MEGABYTE, Fault, RecordingDisk, Run, Volume, check_disk, local, volume
from processes import eventually


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "ckpt")


# -- every operation fails in turn --

FAULTS = {
    "full once": Fault(0, errno.ENOSPC),
    "full from then on": Fault(0, errno.ENOSPC, forever=True),
    "broken once": Fault(0, errno.EIO),
    "broken from then on": Fault(0, errno.EIO, forever=True),
    "done, and called full": Fault(0, errno.ENOSPC, late=True),
    "done, and called broken": Fault(0, errno.EIO, late=True),
}


# Each operation fails in one of the ways, in turns; `make test-long` has each at every one.
SOME = [pytest.param(kind, range(start, 1000, len(FAULTS)), id=f"{kind}, some") for start, kind in enumerate(FAULTS)]
EVERY = [pytest.param(kind, range(1000), id=kind, marks=pytest.mark.long) for kind in FAULTS]
AT = pytest.mark.parametrize(("kind", "where"), [*SOME, *EVERY])


def at(number: int, fault: Fault) -> Fault:
    return Fault(number, fault.number, fault.forever, fault.late)


async def sound(root: Path) -> list[int]:
    """The steps of a run, after every byte of each was verified and every acknowledged one was found."""
    async with local(root) as store:
        return await inside.checked_steps(store)


async def save_with_fault(base: Path, disk: RecordingDisk, fault: Fault | None) -> tuple[int, bool]:
    """Three saves; a fourth and a clean-up with the fault; one after it is gone. Operations, and whether it hit."""
    async with local(base / "run", disk) as store:
        run = await Run.open(store)
        for step in (1, 2, 3):
            disk.ack(await run.save(step))
        disk.count, disk.fault, failed = 0, fault, False
        try:
            disk.ack(await run.save(4))
            await run.retire()
        except CheckpointError:
            failed = True
        if failed and fault is not None and fault.forever:
            with pytest.raises(CheckpointError):
                await run.save(5)
        operations, disk.fault = disk.count, None
        assert 3 in await sound(base / "run")
        disk.ack(await run.save(6))
        await run.retire()
    assert (await sound(base / "run"))[-1] == 6
    return operations, failed


@AT
def test_every_operation_of_a_save_may_fail(
    tmp_path: Path, kind: str, where: range, record_property: Callable[[str, object], None]
) -> None:
    """Whichever one fails: our own error, the older checkpoints are whole, the next save succeeds, and what was
    acknowledged stands a power cut."""
    whole = RecordingDisk(tmp_path / "whole")
    operations, failed = asyncio.run(save_with_fault(tmp_path / "whole", whole, None))
    assert operations > 40 and not failed
    failures, tried = 0, [number for number in where if number < operations]
    for number in tried:
        base = tmp_path / str(number)
        disk = RecordingDisk(base)
        _, failed = asyncio.run(save_with_fault(base, disk, at(number, FAULTS[kind])))
        failures += failed
        assert not disk.synced_again, f"operation {number}: synced again after its fsync failed"
        wrong = check_disk(disk, random.Random(number), draws=6)
        assert wrong is None, f"operation {number}: {wrong}"
    record_property("operations", operations)
    assert failures > len(tried) // 4, "hardly any fault was noticed"


async def acknowledged_just_before_the_power_goes(base: Path, disk: RecordingDisk, fault: Fault) -> None:
    async with local(base / "run", disk) as store:
        run = await Run.open(store)
        disk.ack(await run.save(1))
        disk.count, disk.fault = 0, fault
        try:
            disk.ack(await run.save(2))
        except CheckpointError:
            pass


@AT
def test_acknowledged_saves_survive_a_power_cut(tmp_path: Path, kind: str, where: range) -> None:
    """After a fault that the store handled, for example a full disk that used its reserve, no file is left unsynced."""
    for number in where[: 40 // where.step]:
        disk = RecordingDisk(tmp_path / str(number))
        asyncio.run(acknowledged_just_before_the_power_goes(tmp_path / str(number), disk, at(number, FAULTS[kind])))
        wrong = check_disk(disk, random.Random(number), draws=6)
        assert wrong is None, f"operation {number}: {wrong}"


def test_negative_control_a_swallowed_fault_is_seen(tmp_path: Path) -> None:
    """A disk whose failed sync goes unnoticed loses acknowledged data."""

    class Liar(RecordingDisk):
        def fsync_dir(self, path: str) -> None:
            if not path.endswith("/log"):
                super().fsync_dir(path)

    disk = Liar(tmp_path)
    asyncio.run(save_with_fault(tmp_path, disk, None))
    assert check_disk(disk, random.Random(0), draws=50) is not None


def test_negative_control_a_second_fsync_is_seen(tmp_path: Path) -> None:
    """The disk does notice a file that is synced again."""
    disk = RecordingDisk(tmp_path)
    fd = disk.open(str(tmp_path / "file"), os.O_CREAT | os.O_WRONLY)
    disk.fault = at(disk.count, FAULTS["broken once"])
    with pytest.raises(OSError):
        disk.fsync(fd)
    disk.fsync(fd)
    disk.close(fd)
    assert disk.synced_again == [str(tmp_path / "file")]


@AT
def test_every_operation_of_opening_a_run_may_fail(tmp_path: Path, kind: str, where: range) -> None:
    """A run whose opening failed is opened by the next try, whether it was new or not."""

    async def open_twice(root: Path, number: int) -> int:
        disk = RecordingDisk(root.parent)
        disk.fault = at(number, FAULTS[kind])
        try:
            async with local(root, disk) as store:
                await Run.open(store)
        except CheckpointError:
            pass
        async with local(root) as store:
            await (await Run.open(store)).save(1)
        assert await sound(root) == [1]
        return disk.count

    operations = asyncio.run(open_twice(tmp_path / "whole", 10**9))
    for number in (number for number in where if number < operations):
        asyncio.run(open_twice(tmp_path / str(number), number))


class Straggler(Disk):
    """One thread is still writing a data file when another's write has failed and the file is aborted."""

    def __init__(self) -> None:
        self.writing, self.given_up = threading.Event(), threading.Event()
        self.closed: set[int] = set()
        self.strays: list[int] = []

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        fd = super().open(path, flags, mode)
        self.closed.discard(fd)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        self.closed.add(fd)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        if fd in self.closed:
            self.strays.append(fd)
        if offset == 0:
            assert self.writing.wait(10)
            raise OSError(errno.ENOSPC, "full")
        if self.writing.is_set():
            return super().pwrite(fd, view, offset)
        self.writing.set()
        written = super().pwrite(fd, view[:100], offset)
        assert self.given_up.wait(10)
        return written  # the rest is another call

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.given_up.set()


def test_a_failed_pack_is_never_written_through_a_closed_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may belong to another file by then: the bytes of one data file would land in that."""
    inside.write_in_pieces_of(monkeypatch, inside.PAGE)  # several writes of one small data file
    disk = Straggler()

    async def save() -> None:
        async with local(tmp_path / "run") as store:
            run = await Run.open(store)
            store.disk = disk
            with pytest.raises(FullError):
                await run.save(1)
            assert await asyncio.to_thread(eventually, lambda: bool(disk.closed))
            store.disk = Disk()
            await run.save(2)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(save())
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not disk.strays


# -- real file systems --


def fill(place: Volume) -> Path:
    """Take all the space there is left."""
    path = place.path / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(b"x" * size)
                    os.fsync(file.fileno())  # space that is promised twice is found out about only here
    return path


@pytest.fixture(params=["ext4", pytest.param("tmpfs", marks=pytest.mark.long)])
def small(tmp_path: Path, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with volume(tmp_path, request.param, 16) as place:
        yield place


def test_negative_control_without_the_reserve_the_log_is_stuck(small: Volume) -> None:
    """It is the reserve that the record was written from."""

    async def run_full() -> None:
        async with local(small.path / "run") as store:
            run = await Run.open(store)
            (small.path / "run" / ".reserve").unlink()
            fill(small)
            with pytest.raises(FullError):
                await run.abort(2, "no space")

    asyncio.run(run_full())


async def save_more_than_fits(place: Volume) -> None:
    async with local(place.path / "run") as store:
        run = await Run.open(store)
        for step in range(1, 25):
            await run.save(step, layout=MEGABYTE)
            assert await run.problems(step) == []
            await run.retire()
    assert await sound(place.path / "run") == [23, 24]


def test_clean_up_frees_the_space(small: Volume) -> None:
    """Verified and retired checkpoints use no space, although the store keeps files open for reading."""
    asyncio.run(save_more_than_fits(small))


def test_negative_control_open_files_keep_the_space(small: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store kept reading deleted files, the disk would fill up."""
    monkeypatch.setattr(OpenFiles, "forget", lambda files, path: None)
    with pytest.raises(FullError):
        asyncio.run(save_more_than_fits(small))


def build() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 600)  # 1.4 MB
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


def train(state: dict[str, object]) -> None:
    model, optim = state["model"], state["optim"]
    assert isinstance(model, torch.nn.Module) and isinstance(optim, torch.optim.Optimizer)
    optim.zero_grad()
    model(torch.ones(1, 600)).sum().backward()
    optim.step()


def test_training_continues_while_the_disk_is_full(small: Volume) -> None:
    """The handle, or the next call, raises that the disk is full. Training and memory continue. With space again, the
    next save commits, and a new job restores it."""
    state, url, numbers = build(), str(small.path / "run"), itertools.count(1)

    def step() -> ckpt.Save:
        train(state)
        save = cp.step(next(numbers))
        assert save is not None
        return save

    with ckpt.Checkpointer(state, ckpt.Tier(url, every=1, keep=2)) as cp:
        cp.restore(default=0)
        step().wait_durable(60)
        filler = fill(small)
        with pytest.raises(SaveError, match=r"step 2 was not written .* no space left.*elsewhere on that disk"):
            save = step()
            assert save.wait_staged(60).step == 2
            save.wait_durable(60)
        with pytest.raises(SaveError, match=r"step 3 was not written .* no space left") as again:
            for _ in range(10):  # the first call after the failure raises, be it the same one
                step()
                cp.wait(60)
        assert "elsewhere" not in str(again.value) and "ckpt prune" not in str(again.value)  # reported once
        frames = [frame.name for frame in traceback.extract_tb(again.value.__traceback__)]
        assert frames[-1] == "entered"  # the only one of ours: step() or wait() raises, whichever is called first
        assert frames[-2] in ("step", "test_training_continues_while_the_disk_is_full")
        cp.wait(60)
        filler.unlink()
        with contextlib.suppress(SaveError):  # of the last save on the full disk
            step()
        last = step().wait_durable(60).step
        kept = {name: t.clone() for name, t in state["model"].state_dict().items()}  # type: ignore[attr-defined]
    again = build()
    with ckpt.Checkpointer(again, url) as cp:
        assert cp.restore() == last
    assert all(torch.equal(kept[name], t) for name, t in again["model"].state_dict().items())  # type: ignore[attr-defined]
    assert last in asyncio.run(sound(small.path / "run"))


def test_a_job_starts_and_restores_on_a_full_disk(small: Volume) -> None:
    """Restarting must not need space."""
    state, url = build(), str(small.path / "run")
    with ckpt.Checkpointer(state, url) as cp:
        cp.restore(default=0)
        train(state)
        cp.save(1).wait_durable(60)
    fill(small)
    again = build()
    with ckpt.Checkpointer(again, url) as cp:
        assert cp.restore() == 1


def test_the_log_of_a_full_disk_is_whole(small: Volume) -> None:
    """Many records on a full disk: each lands whole or is refused, and the reserve comes back with the space."""

    async def many() -> None:
        async with local(small.path / "run") as store:
            run = await Run.open(store)
            await run.save(1)
            filler, refused, before = fill(small), 0, run.records
            with pytest.raises(FullError, match="no space left"):
                await run.save(2, layout=MEGABYTE)
            await run.abort(2, "no space")  # the record is written from the reserve
            assert run.records == before + 1
            for step in range(3, 400):
                try:
                    await run.abort(step, "x" * 500)
                except FullError:
                    refused += 1
                    break
            assert refused or small.kind != "tmpfs"
            filler.unlink()
            await run.save(500)
            assert (small.path / "run" / ".reserve").exists()
            job = await inside.Job.go_on(store)
            assert not job.damaged and job.steps[0] == 500

    asyncio.run(many())
