"""`ckpt repair` reports all damage and repairs it bit for bit or not at all. Other bytes never change."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.core.checkpoint import chunks
from ckpt.core.log.run_log import Record, RunLog
from ckpt.errors import StoreError
from ckpt.store import Store, open_store, remember_options
from ckpt.testing import StoreTests, upload
from ckpt.tools.maintain import audit, find_copies, repair
from ckpt_backends.disk import Disk
from ckpt_backends.memory import MemoryStore
from ckpt_backends.remote_upload import PART
from ckpt_backends.retry import Retry
from ckpt_backends.s3 import S3Store
from commands import Result, call, flip, save, save_increments, spawn
from model_disk import Op, RecordingDisk, after, local
from processes import killed, run_script
from run_files import (
    DATA,
    DATA_FOLDER,
    INDEX,
    MANIFEST,
    checkpoint_files,
    data_file,
    indexes,
    kind_of,
    manifests,
    select,
    temporary_files,
)
from s3_server import FaultProxy, MotoServer, storage_options
from trees import tree

__all__ = ["call"]  # the fixture
Call = Callable[..., Result]
FORMS = ("none", "zstd")
STEPS = range(1, 6)  # the first two and the last are full, the others increments
COMMAND = "import sys\nfrom ckpt.tools.cli import main\nsys.exit(main())"


@pytest.fixture(scope="module", params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a run in two tiers, `near` and `far`, each of which encoded its own files."""
    folder = tmp_path_factory.mktemp(request.param)
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    save_increments([folder / "near", folder / "far"], STEPS, compression=request.param, full_every=5)
    patch.undo()
    return folder


# For behavior that does not depend on the form: bytes are copied unchanged, or no location has them.
one_form = pytest.mark.parametrize("made", FORMS[-1:], indirect=True, scope="module")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Copy `near`, to be damaged."""
    return Path(shutil.copytree(made / "near", tmp_path / "run"))


def header_of(file: Path) -> tuple[int, dict[str, Any]]:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little") + 8
    return size, json.loads(raw[8:size])


def place_of(file: Path, tensor: str) -> int:
    """Return the offset of a tensor's bytes in its file."""
    size, entries = header_of(file)
    return int(size + next(entry["data_offsets"][0] for name, entry in entries.items() if name.startswith(tensor)))


def hurt(run: Path, step: int, tensor: str) -> None:
    file = data_file(run, step)
    flip(file, place_of(file, tensor) + 11)


def same(run: Path, pristine: Path) -> bool:
    """Return True if all files are identical."""
    return tree(run) == tree(pristine)


def check(call: Call, run: Path, pristine: Path, *sources: Path) -> None:
    """Check that damage is only reported at first, and that --yes repairs it completely."""
    before = tree(run)
    words = [word for source in sources for word in ("--from", source)]
    assert call("verify", run, "--all").code == 1
    shown, told = call("repair", run, *words), call("repair", run, *words, "--json")
    assert (shown.code, told.code) == (1, 1), shown.out + shown.err
    assert told.json["damaged"] and told.json["done"] is None and not told.json["remains"], told.out
    assert "Add --yes" in shown.out and "LOST" not in shown.out
    assert tree(run) == before
    done = call("repair", run, *words, "--yes", "--json")
    assert (done.code, done.json["remains"], done.json["done"]["failed"]) == (0, False, []), done.out
    assert same(run, pristine)
    assert call("verify", run, "--all").code == 0 and not temporary_files(run)
    again = call("repair", run, *words)
    assert again.code == 0 and "nothing is damaged" in again.out


# -- every kind of damage, with an intact copy elsewhere --


def cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size + size)


INJURIES: dict[str, Callable[[Path], object]] = {
    "data of a full one": lambda run: hurt(run, 1, "noise"),
    "data of an increment": lambda run: hurt(run, 4, "noise"),
    "what others are based on": lambda run: [hurt(run, 2, "master"), hurt(run, 2, "frozen")],
    "the difference itself": lambda run: hurt(run, 3, "master"),
    "a header": lambda run: flip(data_file(run, 1), 30),
    "the length in a header": lambda run: flip(data_file(run, 4), 0),
    "a page of zeros": lambda run: zero(data_file(run, 5), 4096),
    "a data file that is gone": lambda run: data_file(run, 2).unlink(),
    "two data files that are gone": lambda run: [data_file(run, 2).unlink(), data_file(run, 3).unlink()],
    "a data file that is short": lambda run: cut(data_file(run, 3), -5000),
    "a data file that is empty": lambda run: os.truncate(data_file(run, 1), 0),
    "a data file that is long": lambda run: cut(data_file(run, 3), 1),
    "a part": lambda run: flip(manifests(run, 3)[0], 50),
    "a part that is gone": lambda run: manifests(run, 2)[0].unlink(),
    "an index": lambda run: flip(indexes(run, 4)[0], -1),
    "all indexes": lambda run: [path.unlink() for path in indexes(run)],
    "index and part": lambda run: [path.unlink() for path in checkpoint_files(run, INDEX, MANIFEST, step=3)],
    "FORMAT.json": lambda run: flip(run / "FORMAT.json", 20),
    "some of everything": lambda run: [flip(path, -3) for step in (2, 4)
                                        for path in checkpoint_files(run, DATA, MANIFEST, step=step)],
}  # fmt: skip


def zero(path: Path, size: int) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-size] + bytes(size))


@one_form
@pytest.mark.parametrize("injury", INJURIES)
def test_repair_restores_any_damage_with_intact_copy(
    made: Path, run: Path, call: Call, injury: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every damaged or missing file is restored bit for bit. Without --yes, not one byte changes."""
    monkeypatch.setattr(repair, "CHUNK", 3 * 4096)  # so that pieces cross the boundaries of writes
    INJURIES[injury](run)
    check(call, run, made / "near", made / "near")


@one_form
def test_repair_names_tensors_and_source_of_bytes(made: Path, run: Path, call: Call) -> None:
    hurt(run, 2, "frozen")
    assert call("verify", run, "--all").code == 1
    (file,) = call("repair", run, "--from", made / "near", "--yes", "--json").json["data_files"]
    (piece,) = file["pieces"]
    assert (piece["tensors"], piece["from"]) == (["frozen"], f"file://{made / 'near'}")
    assert piece["steps"] == [4, 3, 2] and run / file["key"] == data_file(run, 2)
    assert same(run, made / "near")


# -- without an intact copy --


CURABLE: dict[str, Callable[[Path], object]] = {
    "what an older full one has too": lambda run: hurt(run, 2, "frozen"),
    "the same the other way round": lambda run: hurt(run, 5, "frozen"),
    "a header": lambda run: [flip(data_file(run, step), 30) for step in (1, 2, 5)],
    "a header of an increment": lambda run: flip(data_file(run, 4), 30),
    "a data file that is long": lambda run: cut(data_file(run, 3), 1),
    "an index": lambda run: indexes(run, 4)[0].unlink(),
    "FORMAT.json": lambda run: (run / "FORMAT.json").unlink(),
}


@one_form
@pytest.mark.parametrize("injury", CURABLE)
def test_repair_rebuilds_from_the_run_itself(made: Path, run: Path, call: Call, injury: str) -> None:
    """Content comes from other checkpoints, re-encoded if needed. Headers, indexes and FORMAT.json are rebuilt."""
    CURABLE[injury](run)
    check(call, run, made / "near")


def test_repair_uses_copies_with_other_encodings(made: Path, run: Path, call: Call) -> None:
    """Only content counts: files with other names and encodings help, and give the same bytes again."""
    for tensor in ("frozen", "noise", "master"):
        for step in (1, 3):
            if step == 1 or tensor != "frozen":
                hurt(run, step, tensor)
    check(call, run, made / "near", made / "far")


LOST: dict[str, Callable[[Path], object]] = {
    "a tensor": lambda run: hurt(run, 4, "noise"),
    "a data file that is gone": lambda run: data_file(run, 4).unlink(),
    "a data file that is empty": lambda run: os.truncate(data_file(run, 4), 0),
    "a part": lambda run: flip(manifests(run, 3)[0], 50),
    "index and part": INJURIES["index and part"],
    "a log record": lambda run: flip(sorted((run / "log").iterdir())[2], 40),
}


@one_form
@pytest.mark.parametrize("injury", LOST)
def test_lost_content_is_reported_and_left_unchanged(run: Path, call: Call, injury: str) -> None:
    """The exit code is 1 with and without --yes, the output reports the loss, and not one byte changes."""
    LOST[injury](run)
    before = tree(run)
    for words in ([], ["--yes"]):
        found = call("repair", run, *words)
        assert found.code == 1 and ("LOST" in found.out or "cannot be repaired" in found.out), found.out
        assert tree(run) == before
    assert call("repair", run, "--yes", "--json").json["remains"]


def test_repair_restores_available_pieces_only(made: Path, run: Path, call: Call) -> None:
    """One of two damaged pieces in a file is repaired. The other stays unchanged and is reported as lost."""
    hurt(run, 2, "frozen")
    hurt(run, 2, "noise")
    wanted = bytearray(data_file(made / "near", 2).read_bytes())
    wanted[place_of(data_file(run, 2), "noise") + 11] ^= 1
    found = call("repair", run, "--yes")
    assert found.code == 1 and "LOST: no other copy of its content" in found.out and "Damage remains" in found.out
    assert data_file(run, 2).read_bytes() == bytes(wanted)
    problems = [p for c in call("verify", run, "--all", "--json").json["checkpoints"] for p in c["problems"]]
    assert problems and all(p.startswith("noise") for p in problems)


def test_repair_writes_no_incomplete_file(made: Path, run: Path, call: Call) -> None:
    """A missing file is not written from the pieces that other files have: the rest would be zeros.
    Control: it is written if another location has all of it."""
    file = data_file(run, 2)
    file.unlink()
    shown = call("repair", run)
    lines = shown.out.splitlines()
    verdicts = {row["step"]: row["verdict"] for row in call("repair", run, "--json").json["verdicts"]}
    assert lines[0].endswith("5 checkpoints read") and "step 2: lost" in lines and lines[4] == "steps 5, 1: sound"
    assert {verdicts[3], verdicts[4]} == {"stays damaged" if made.name.startswith("none") else "lost"}
    assert "header is damaged" not in shown.out and "is gone" in shown.out and "to write again: 0 files, " in shown.out
    assert "are in no location" in shown.out
    assert call("repair", run, "--yes").code == 1 and not file.exists()
    damaged = [c["step"] for c in call("verify", run, "--all", "--json").json["checkpoints"] if c["problems"]]
    assert damaged == [4, 3, 2] and call("verify", run, "--all", "--no-data").code == 1
    found = call("repair", run, "--from", made / "near", "--yes")
    assert found.code == 0 and "step 2: sound after this" in found.out
    assert same(run, made / "near")


def test_repair_keeps_bytes_no_checkpoint_uses(made: Path, run: Path, call: Call) -> None:
    """After older checkpoints were retired, no checkpoint may use most of a file. Those bytes stay unchanged."""

    async def retire(log: RunLog) -> None:
        gone = [str(c.checkpoint) for c in log.state.commits.values() if c.step == 2]
        await log.append(lambda _: Record("PLAN", {"retire": gone, "delete": []}, "plan"), owner=None)

    logged(run, retire)
    file = data_file(run, 2)
    hurt(run, 2, "frozen")
    flip(file, place_of(file, "noise") + 5)  # no checkpoint uses it now
    before = bytearray(file.read_bytes())
    before[place_of(file, "frozen") + 11] ^= 1
    assert call("repair", run, "--yes").code == 0
    assert file.read_bytes() == bytes(before)
    file.unlink()
    found = call("repair", run, "--yes", "--json")
    pieces = [piece for p in found.json["data_files"] for piece in p["pieces"] if piece["why_not"]]
    lost = {name for piece in pieces for name in piece["tensors"]}
    assert "noise" not in lost and found.code == 1 and not file.exists()
    assert [p["unavailable"] > 0 for p in found.json["data_files"]] == [True]


def logged(run: Path, work: Callable[[RunLog], Any]) -> Any:
    async def main() -> Any:
        log = RunLog(open_store(run))
        await log.open()
        try:
            return await work(log)
        finally:
            await log.store.aclose()

    return asyncio.run(main())


# -- one step --


@one_form
def test_repair_of_one_step_leaves_others(made: Path, run: Path, call: Call) -> None:
    """--step checks the files that this checkpoint needs, also those of older ones, and leaves the rest."""
    hurt(run, 1, "noise")
    hurt(run, 2, "frozen")
    found = call("repair", run, "--step", 3, "--from", made / "near", "--yes", "--json")
    assert found.code == 0 and found.json["steps"] == [3]
    assert [run / p["key"] for p in found.json["data_files"]] == [data_file(run, 2)]
    verdicts = {c["step"]: c["verdict"] for c in call("verify", run, "--all", "--json").json["checkpoints"]}
    assert verdicts == {5: "sound", 4: "sound", 3: "sound", 2: "sound", 1: "damaged"}


# -- failures --


@one_form
@pytest.mark.parametrize("moment", ["data_file.opened", "data_file.written", "data_file.synced"])
def test_repair_continues_after_a_kill(made: Path, run: Path, call: Call, moment: str) -> None:
    """The old file stays complete until its replacement. The next call completes the repair and cleans up."""
    hurt(run, 1, "noise")
    hurt(run, 4, "noise")
    pristine, before = tree(made / "near"), tree(run)
    assert killed(run_script(COMMAND, "repair", run, "--from", made / "near", "--yes", fail=f"{moment}:kill"))
    after = tree(run)
    assert all(after[key] in (before[key], pristine[key]) for key in before) and after.keys() == before.keys()
    assert (after == before) == (moment != "data_file.synced") and bool(temporary_files(run)) == (after == before)
    check(call, run, made / "near", made / "near")


@one_form
@pytest.mark.parametrize("what", ["reserve", "pwrite", "fsync", "replace"])
def test_failing_disk_leaves_file_unchanged(
    made: Path, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """If the disk is full or read-only, the file stays, no temporary file is left, and the failure is reported."""
    hurt(run, 1, "noise")
    before = tree(run)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC if what in ("reserve", "pwrite") else errno.EROFS, "no")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, what, fail)
        found = call("repair", run, "--from", made / "near", "--yes")
    assert found.code == 1 and "failed and unchanged" in found.out
    assert tree(run) == before and not temporary_files(run)
    check(call, run, made / "near", made / "near")


@one_form
def test_wrong_usage_of_repair_changes_nothing(made: Path, run: Path, call: Call, tmp_path: Path) -> None:
    """Duplicate and missing locations, a location without a run, and a missing step give one line and exit code 2."""
    (tmp_path / "empty").mkdir()
    hurt(run, 1, "noise")
    before = tree(run)
    for words in (
        ["--from", run],
        ["--from", f"{run}/"],
        ["--from", made / "near", "--from", f"file://{made / 'near'}"],
        ["--from", tmp_path / "empty"],
        ["--from", tmp_path / "none"],
        ["--from", "nosuch://place"],
        ["--step", "77"],
    ):
        found = call("repair", run, *words, "--yes")
        assert (found.code, found.out) == (2, ""), words
    assert call("repair", tmp_path / "none").code == 2 and not (tmp_path / "none").exists()
    assert tree(run) == before


@one_form
def test_source_of_another_run_is_reported(run: Path, call: Call, tmp_path: Path) -> None:
    """Another run can help only if contents are equal, which digests decide."""
    other = tmp_path / "other"
    save(other, {"x": torch.ones(3000)}, range(1, 2), every=1)
    hurt(run, 4, "noise")
    found = call("repair", run, "--from", other)
    assert found.code == 1 and "is another run" in found.err and "LOST" in found.out


@one_form
def test_damaged_source_is_not_used(made: Path, run: Path, call: Call, tmp_path: Path) -> None:
    """A source with the same damage is not used; a second source may have the bytes."""
    other = Path(shutil.copytree(made / "near", tmp_path / "other"))
    hurt(run, 4, "noise")
    hurt(other, 4, "noise")
    before = tree(run)
    assert call("repair", run, "--from", other, "--yes").code == 1 and tree(run) == before
    check(call, run, made / "near", other, made / "near")


@one_form
def test_negative_control_unverified_bytes_would_be_written(
    made: Path, run: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the comparison of source bytes, the check during writing stops the repair. Without both, it is wrong."""
    other = Path(shutil.copytree(made / "near", tmp_path / "other"))
    hurt(run, 4, "noise")
    file = data_file(other, 4)
    flip(file, place_of(file, "noise") + 12)
    before = tree(run)
    monkeypatch.setattr(find_copies, "_matching", lambda view, piece: view)
    found = call("repair", run, "--from", other, "--yes")
    assert (
        found.code == 1 and "changed while they were" in found.out and tree(run) == before and not temporary_files(run)
    )
    monkeypatch.setattr(repair.RangeHasher, "feed", lambda self, start, view: ())
    assert call("repair", run, "--from", other, "--yes").code == 0
    assert tree(run) != before and not same(run, made / "near") and call("verify", run, "--all").code == 1


# -- next to a running job --


def retiring(run: Path, step: int) -> None:
    """Retire a step as a job does: first the log record, then the files."""

    async def work(log: RunLog) -> None:
        gone = [str(c.checkpoint) for c in log.state.commits.values() if c.step == step]
        record = Record("PLAN", {"retire": gone, "delete": []}, f"plan{step}")
        await log.append(lambda _: record, owner=None)

    logged(run, work)
    for path in checkpoint_files(run, step=step):
        path.unlink()


@one_form
@pytest.mark.parametrize("moment", ["look", "audit", "seek"])
def test_checkpoint_retired_during_repair_is_skipped(
    made: Path, run: Path, call: Call, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt(run, 1, "noise")
    hurt(run, 4, "noise")
    real = getattr(repair.Repair, moment)

    async def late(self: Any, *words: Any) -> Any:
        found = await real(self, *words)
        await asyncio.to_thread(retiring, run, 1)
        return found

    monkeypatch.setattr(repair.Repair, moment, late)
    found = call("repair", run, "--from", made / "near", "--yes", "--json")
    assert found.code == 0, found.out + found.err
    assert len(found.json["done"]["data_files"]) == 1 and not checkpoint_files(run, step=1)
    assert bool(found.json["done"]["given_up_meanwhile"]) == (moment != "look")
    assert call("verify", run, "--all").code == 0


def test_running_job_continues_on_repaired_base(tmp_path: Path, call: Call) -> None:
    """A base is repaired during the job. The next checkpoints build on it, and all are intact."""
    run = tmp_path / "run"
    state = {"frozen": torch.randn(400, 256), "x": torch.zeros(2000)}
    with ckpt.Checkpointer(state, ckpt.Tier(str(run), every=1, keep=20)) as cp:
        cp.restore(default=0)
        for step in (1, 2, 3):
            state["x"] += 1
            cp.save(step).wait_durable(60.0)
        sound = Path(shutil.copytree(run, tmp_path / "sound"))
        hurt(run, 2, "frozen")
        assert call("repair", run, "--from", sound, "--yes").code == 0
        for step in (4, 5):
            state["x"] += 1
            cp.save(step).wait_durable(60.0)
    assert call("verify", run, "--all").code == 0
    assert [row["full"] for row in call("ls", run, "--json").json["checkpoints"]] == [False, False, False, True, True]


# -- object storage --


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@one_form
@pytest.mark.parametrize("engine", ["s3fs", "obstore"])
def test_repair_from_and_to_a_bucket(made: Path, call: Call, moto: MotoServer, tmp_path: Path, engine: str) -> None:
    url = f"s3://{moto.make_bucket(f'repair-{engine}-{made.name[:4]}')}/run"
    remember_options(url, storage_options(moto.url) | {"engine": engine})
    assert call("copy", f"{made / 'near'}@5", url, "--yes").code == 0

    async def injure() -> str:
        store = open_store(url, writable=True)
        (key,) = select([info.key async for info in store.list()], DATA)
        raw = bytearray(await store.get(key))
        raw[-5] ^= 1
        await store.put(key, bytes(raw))
        await store.aclose()
        return key

    asyncio.run(injure())
    assert call("repair", url).code == 1
    assert call("repair", url, "--from", made / "near", "--yes").code == 0
    assert call("verify", url).code == 0
    run = Path(shutil.copytree(made / "near", tmp_path / "run"))
    hurt(run, 5, "noise")
    assert call("repair", run, "--from", url, "--yes").code == 0 and same(run, made / "near")


# -- the guarantees of stores that repair needs --

KEY = f"{DATA_FOLDER}/p"


async def replace(disk: RecordingDisk, root: Path, old: bytes, new: bytes) -> int:
    """Return the number of disk operations before the replacement began."""
    async with local(root, disk) as store:
        await upload(store, KEY, old)
        began = len(disk.ops)
        await upload(store, KEY, new, replace=True)
    return began


def torn(ops: list[Op], began: int, old: bytes, new: bytes) -> list[str]:
    """Return the points at which a power cut leaves neither the old object nor the new one."""
    cut, rng, wrong = after(ops[:began]), random.Random(3), list[str]()
    for op in ops[began:]:
        cut.apply(op)
        for i in range(40):
            found = cut.draw(rng, ordered=i % 2 == 1)
            if list(found) != [KEY] or found[KEY] not in (old, new):
                wrong.append(f"after {op.kind} of {op.name}")
    last = [cut.draw(rng, ordered=i % 2 == 1)[KEY] for i in range(40)]
    return wrong + ["at the end"] * (set(last) != {new})


def test_power_cut_leaves_old_or_new_file(tmp_path: Path) -> None:
    """After a power cut, the disk has the old or the new file; once the replacement is done, the new one.
    Control: this fails without a sync of the file or the folder."""
    old, new, disk = bytes(range(256)) * 40, bytes(range(255, -1, -1)) * 50, RecordingDisk(tmp_path)
    began = asyncio.run(replace(disk, tmp_path / "run", old, new))
    assert torn(disk.ops, began, old, new) == []
    for kind in ("fsync", "fsync_dir"):
        careless = disk.ops[:began] + [op for op in disk.ops[began:] if op.kind != kind]
        assert torn(careless, began, old, new)


@one_form
def test_gc_removes_temporary_files(run: Path, call: Call) -> None:
    """`gc` removes the temporary file of a repair that was killed and never repeated."""
    file = data_file(run, 1)
    left = file.with_name(f".{file.name}.0123456789abcdef.new")
    left.write_bytes(bytes(100))
    before = tree(run)
    assert call("gc", run, "--yes").code == 0
    assert not left.exists() and {k: v for k, v in tree(run).items() if k[:4] != "log/"} == {
        k: v for k, v in before.items() if k[:4] != "log/"
    }


class InPlace(MemoryStore):
    """Removes the old object before the new one is complete."""

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Any:
        if replace:
            self.objects.pop(key, None)
        return await super().upload(key, size=size, replace=replace)


@pytest.mark.parametrize(
    "promise", ["test_upload_replaces_only_with_replace", "test_aborted_replacement_changes_nothing"]
)
def test_negative_control_early_replacement_fails_store_tests(promise: str) -> None:

    class Checked(StoreTests):
        kind = MemoryStore

        def make(self) -> Store:
            return self.kind()

        def reopen(self, store: Store) -> Store:
            assert isinstance(store, MemoryStore)
            return self.kind(objects=store.objects)

    suite = Checked()
    getattr(suite, promise)()
    suite.kind = InPlace
    with pytest.raises((AssertionError, StoreError)):
        getattr(suite, promise)()


LARGE = (33 << 20) + 7  # more than one part


@pytest.mark.parametrize("engine", ["s3fs", "obstore"])
@pytest.mark.parametrize("size", [1000, LARGE])
def test_failed_replacement_keeps_object_in_bucket(moto: MotoServer, engine: str, size: int) -> None:
    """After a denied, interrupted or unanswered request, the bucket has the old or the new object."""
    old, new = bytes(size), random.Random(4).randbytes(size)
    last = {"method": "POST", "match": "uploadId="} if size > PART else {"method": "PUT", "match": KEY}
    url = f"s3://{moto.make_bucket(f'kept-{engine}-{size}')}/run"
    with FaultProxy(moto.url) as proxy:
        remember_options(url, storage_options(proxy.url) | {"engine": engine})

        async def work() -> None:
            store = Retry(S3Store(url), base_s=0.01, budget_s=2.0)
            for fault in (
                {"kind": "lost_reply"},
                {"kind": "status", "code": 403, "s3_code": "AccessDenied", "count": 99},
            ):
                proxy.clear()
                await upload(store, KEY, old, replace=True)
                proxy.fail(**fault, **last)
                try:
                    await upload(store, KEY, new, replace=True)
                    said = True
                except StoreError:
                    said = False
                proxy.clear()
                found = bytes(await store.get(KEY))
                assert found in ((new,) if said else (old, new)), fault
                assert fault["kind"] == "lost_reply" or not said
                assert await store.drop_uploads(lambda key: False) == 0
                await upload(store, KEY, new, replace=True)
                assert bytes(await store.get(KEY)) == new
            await store.aclose()

        asyncio.run(work())


@one_form
def test_audit_reads_each_data_file_once(made: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data file is read once, in ranges of a bounded size, however large it is."""
    objects = tree(run)
    asked: list[tuple[str, int, int]] = []

    class Counting(MemoryStore):
        async def get(self, key: str, *, start: int = 0, length: int | None = None, **more: Any) -> memoryview:
            if kind_of(key) == DATA:
                asked.append((key, start, length or 0))
            return await super().get(key, start=start, length=length, **more)

    async def examined() -> int:
        log = RunLog(Counting(objects=objects))
        await log.open()
        work = repair.Repair(log)
        total = await work.look()
        seen: list[int] = []
        found = await work.audit(seen.append)
        assert not found.any and sum(seen) == total
        return total

    monkeypatch.setattr(audit, "READ", 20_000)
    monkeypatch.setattr(chunks, "GAP", 0)
    total = asyncio.run(examined())
    largest = max(piece[2] for piece in asked)
    assert largest <= 400 * 256 * 4 and sum(length for _, _, length in asked) == total
    assert len(set(asked)) == len(asked)


@one_form
def test_repair_works_without_torch(made: Path, run: Path) -> None:
    hurt(run, 1, "noise")
    words = ["repair", run, "--from", made / "near", "--yes"]
    result = spawn(*words, code="sys.modules['torch'] = None")
    assert (result.returncode, result.stderr) == (0, "") and same(run, made / "near")
