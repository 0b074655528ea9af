"""Tests that a power cut at any moment loses nothing acknowledged: on a model disk, and on real file systems.

The model is weaker than any real disk: each page and name persists independently unless it was synced. The workload
is recorded once, with the real store; then the power may fail after every prefix of the recording.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt.core.checkpoint import chunks, commits, read
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.log import records, run_log
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, FencedError
from ckpt_backends.local import LocalStore
from model_disk import (
    CuttingDisk,
    Fault,
    Killed,
    Op,
    PowerCut,
    RecordingDisk,
    Run,
    Volume,
    check_disk,
    folder_of_sync,
    kind_of_sync,
    local,
    payload,
    restored,
    violation,
    volume,
)
from run_files import DATA, DATA_FOLDER, INDEX, MANIFEST, data_key


class AtOnce(ThreadPoolExecutor):
    """Runs tasks immediately: for digests of a kilobyte, waiting for threads would dominate."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)
        return done


@pytest.fixture(autouse=True)
def quick(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence the warnings of thousands of recoveries, and avoid their threads."""
    caplog.set_level(logging.CRITICAL, "ckpt")
    monkeypatch.setattr(chunks, "ThreadPoolExecutor", AtOnce)
    short_logs(monkeypatch)


def short_logs(patch: pytest.MonkeyPatch) -> None:
    """A log of few records counts as long, so that it is trimmed."""
    for module in (run_log, records):
        patch.setattr(module, "SNAPSHOT_EVERY", 3)


# -- the model --


async def workload(root: Path, disk: RecordingDisk) -> None:
    """Run two job attempts that save, clean up, abort, trim their log, and leave complete and incomplete checkpoints
    behind."""
    async with local(root, disk) as store:
        first = await Run.open(store)
        for step in (1, 2, 3):
            disk.ack(await first.save(step))
        await first.retire()
        disk.ack(await first.save(4))
        await first.write(5)  # complete, but never committed
        torn = await store.upload(data_key(first.checkpoint(6)), size=9000)
        await torn.write_at(0, memoryview(b"x" * 5000))  # the job ends here
    async with local(root, disk) as store:
        second = await Run.open(store)
        disk.ack(first.checkpoint(5))  # rolled forward
        trimmer = run_log.Trimmer()
        disk.ack(await second.save(7))
        await second.retire()
        await trimmer.step(second.log, second.mine)
        await second.write(8)
        await commits.abort(second.log, second.mine, second.checkpoint(8), "of no use")
        for step in (9, 10, 11):
            disk.ack(await second.save(step))
            await second.retire()
            await trimmer.step(second.log, second.mine)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    base = tmp_path_factory.mktemp("disk")
    disk = RecordingDisk(base)
    with pytest.MonkeyPatch.context() as patch:
        short_logs(patch)
        asyncio.run(workload(base / "run", disk))
    assert not disk.synced_again
    trimmed = [op.name for op in disk.ops if op.kind == "unname" and op.folder == "run/log" and op.name[0] != "."]
    assert len(trimmed) >= 3, trimmed
    return disk.ops


async def search(ops: list[Op], states: int, seed: int, *, enough: int) -> tuple[int, int, list[str]]:
    """Cut the power after every operation in many ways. Return the numbers of (distinct) disks, and violations."""
    rng = random.Random(seed)
    cut, drawn, wrong = PowerCut("run"), 0, []
    each, seen = -(-states // len(ops)), set()
    asyncio.get_running_loop().set_default_executor(AtOnce())
    for op in ops:
        cut.apply(op)
        for i in range(each):
            objects = cut.draw(rng, ordered=i % 2 == 1)
            drawn += 1
            key = (len(cut.acked), hash(frozenset(objects.items())))
            if key in seen:
                continue
            seen.add(key)
            found = await violation(objects, cut.acked)
            if found:
                wrong.append(found)
            if len(wrong) >= enough:
                return drawn, len(seen), wrong
    return drawn, len(seen), wrong


OFTEN = [pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("states", "seed"), [(900, 1), *(pytest.param(110_000, seed, marks=OFTEN) for seed in range(10, 15))]
)
def test_power_cut_loses_no_acknowledged_checkpoint(recording: list[Op], states: int, seed: int) -> None:
    """Whichever unsynced pages and names survive a cut, all acknowledged checkpoints exist, bit for bit."""
    drawn, distinct, wrong = asyncio.run(search(recording, states, seed, enough=5))
    print(f"{drawn} disks after {len(recording)} moments of power cut, {distinct} distinct: {len(wrong)} violations")
    assert not wrong, wrong


def without_sync(ops: list[Op], what: str) -> list[Op]:
    """Return the recording without one kind of fsync."""
    kinds = kind_of_sync(ops)
    left = [
        op
        for op in ops
        if not (op.kind == "fsync" and kinds.get(op.node) == what)
        and not (op.kind == "fsync_dir" and folder_of_sync(op.folder) == what)
    ]
    assert len(left) < len(ops)
    return left


def unlinked_before_plan(ops: list[Op]) -> list[Op]:
    """Return the recording with files deleted before their PLAN is in the log."""
    moved: list[Op] = []
    for op in ops:
        if op.kind == "unname" and op.folder.startswith(f"run/{DATA_FOLDER}/"):
            plan = max(
                i for i, o in enumerate(moved) if o.kind == "name" and o.folder == "run/log" and o.name[0] == "."
            )
            moved.insert(plan, op)
            moved.insert(plan + 1, Op("fsync_dir", op.folder))
        else:
            moved.append(op)
    assert moved != ops
    return moved


SYNCS = [DATA, MANIFEST, INDEX, "log", "format", "folder checkpoint", "folder steps", "folder log", "folder run"]


@pytest.mark.parametrize("what", SYNCS)
def test_negative_control_each_fsync_is_needed(recording: list[Op], what: str) -> None:
    """Without any one kind of fsync, the oracle finds violations."""
    _, _, wrong = asyncio.run(search(without_sync(recording, what), 20_000, 2, enough=1))
    assert wrong


def test_negative_control_unlink_before_plan_loses_data(recording: list[Op]) -> None:
    """If files are deleted before the PLAN is written, the oracle finds violations."""
    _, _, wrong = asyncio.run(search(unlinked_before_plan(recording), 20_000, 3, enough=1))
    assert wrong


# -- the writer is killed first, and the power fails later --


async def killed_while_saving(base: Path, disk: RecordingDisk, at: int | None) -> Run:
    """Save two checkpoints, and kill the process at an operation of the third save (None: never)."""
    async with local(base / "run", disk) as store:
        run = await Run.open(store)
        disk.ack(await run.save(1))
        disk.ack(await run.save(2))
        disk.count, disk.fault = 0, None if at is None else Fault(at, None)
        try:
            await run.save(3)
        except Killed:
            pass
        disk.fault = None
        return run


async def restart_and_recover(base: Path, disk: RecordingDisk, before: Run) -> None:
    """Start a new job attempt: it may report everything that it finds committed, or rolls forward."""
    async with local(base / "run", disk) as store:
        run = await Run.open(store)
        for checkpoint in run.log.state.commits:
            disk.ack(checkpoint)


async def respawn_and_write_again(base: Path, disk: RecordingDisk, before: Run) -> None:
    """Start a new writer for the same trainer: it gets the same slot again, and acknowledges it."""
    async with local(base / "run", disk) as store:
        log = RunLog(store)
        await log.open()
        disk.ack(await Run(log, before.mine).save(3, number=1000))


GoOn = Callable[[Path, RecordingDisk, Run], Coroutine[Any, Any, None]]


def killed_everywhere(folder: Path, go_on: GoOn, draws: int, *, enough: int, first: int = 0) -> list[str]:
    """Kill at every operation of a save from `first`, continue, and cut the power in many ways. Return violations."""
    rng, wrong = random.Random(4), []

    async def one(base: Path, at: int | None) -> RecordingDisk:
        disk = RecordingDisk(base)
        before = await killed_while_saving(base, disk, at)
        if at is not None:
            await go_on(base, disk, before)
        return disk

    operations = asyncio.run(one(folder / "whole", None)).count
    assert operations > 20
    for at in range(first, operations):
        disk = asyncio.run(one(folder / str(at), at))
        found = check_disk(disk, rng, draws)
        if found:
            wrong.append(f"killed at operation {at}: {found}")
        if len(wrong) >= enough:
            break
    return wrong


@pytest.mark.parametrize("draws", [4, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("go_on", [restart_and_recover, respawn_and_write_again])
def test_power_cut_after_kill_loses_nothing(tmp_path: Path, go_on: GoOn, draws: int) -> None:
    """A killed writer leaves unsynced names; its successor must not rely on them."""
    wrong = killed_everywhere(tmp_path, go_on, draws, enough=5)
    assert not wrong, wrong


def test_negative_control_kill_then_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor that treats the existing files as durable loses data."""
    monkeypatch.setattr(LocalStore, "_sync_folders", lambda store: None)
    assert killed_everywhere(tmp_path, respawn_and_write_again, 20, enough=1, first=22)


# -- real file systems --


async def save_until_the_power_goes(place: Volume, at: int, *, lazy: bool = False) -> list[CheckpointId]:
    """Continue the run, and cut the power at operation `at`. Return the acknowledged checkpoints."""
    acked: list[CheckpointId] = []
    try:
        async with local(place.path / "run", CuttingDisk(place, at, lazy=lazy)) as store:
            run = await Run.open(store)
            newest = max((checkpoint.step for checkpoint in run.log.state.commits), default=0)
            for step in range(newest + 1, newest + 100):
                acked.append(await run.save(step))
                await run.retire()
    except CheckpointError as error:
        assert not isinstance(error, FencedError)
    return acked


async def what_is_lost(place: Volume, acked: list[CheckpointId]) -> str | None:
    """Read the run again with the real store, and return the first violation."""
    store = LocalStore(f"file://{place.path}/run")
    try:
        log = await read.open_run(store.url, store)
        if log.state.damaged:
            return f"log records {log.state.damaged} are damaged"
        for checkpoint in acked:
            if checkpoint not in log.state.commits and checkpoint not in log.state.retired:
                return f"step {checkpoint.step} is lost"
        if acked and log.state.lineage()[0].checkpoint < acked[-1]:
            return "the newest is too old"
        for checkpoint, found in log.state.commits.items():
            if await read.verify(store, found) or await restored(log, checkpoint) != payload(checkpoint):
                return f"step {checkpoint.step} is damaged"
    except CheckpointError as error:
        return str(error) if acked else None
    finally:
        await store.aclose()
    return None


def cut_and_look(place: Volume, rng: random.Random, *, lazy: bool = False) -> tuple[int, str | None]:
    acked = asyncio.run(save_until_the_power_goes(place, rng.randint(5, 250), lazy=lazy))
    place.unmount()  # fails if a file of ours is still open
    place.mount()
    return len(acked), asyncio.run(what_is_lost(place, acked))


@pytest.mark.parametrize("cuts", [8, pytest.param(300, marks=OFTEN)])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_real_power_cut_loses_nothing(tmp_path: Path, kind: str, cuts: int) -> None:
    """The file system stops at a random operation without a flush. After a mount, acknowledged steps restore."""
    rng, acknowledged = random.Random(cuts), 0
    with volume(tmp_path, kind, 400 if kind == "xfs" else 64) as place:
        for number in range(cuts):
            saved, lost = cut_and_look(place, rng)
            acknowledged += saved
            assert lost is None, f"cut {number}: {lost}"
    print(f"{cuts} cuts on {kind}, {acknowledged} checkpoints acknowledged: none lost")
    assert acknowledged


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_negative_control_real_power_cut_without_fsync(tmp_path: Path, kind: str) -> None:
    """A store that never syncs loses acknowledged checkpoints."""
    rng = random.Random(5)
    with volume(tmp_path, kind, 400 if kind == "xfs" else 64) as place:
        assert any(cut_and_look(place, rng, lazy=True)[1] for _ in range(8))
