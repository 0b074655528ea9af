"""Files that cannot be read for a while are never taken for damaged or lost: nothing is overwritten or passed over."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import ckpt
import ckpt.dcp
import inside
from ckpt.errors import CorruptError, StoreError, UnreadableError, is_unreadable
from ckpt_backends.disk import Disk
from commands import Result, call
from processes import PYTHONPATH, eventually, run_script
from run_files import DATA, DATA_FOLDER, INDEX, KINDS, MANIFEST, data_file, data_files, keys_in, kind_of, pattern
from s3_server import FaultProxy, MotoServer, storage_options
from threads import together as on_ranks

__all__ = ["call"]  # a fixture

Call = Callable[..., Result]

ERRORS = ("EACCES", "ESTALE", "EMFILE", "EIO", "ETIMEDOUT", "ENOENT")
FEW = ("ESTALE", "ENOENT")  # two ways through the code: an error, and a file that another one names


class Fault:
    """Makes each access to matching files fail in this process while it is on, or `count` times."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number, self.match, self.left = 0, "", 0
        for owner, name in ((Disk, "open"), (os, "lstat")):
            patch.setattr(owner, name, self._faulty(getattr(owner, name), 1 if owner is Disk else 0))

    def _faulty(self, real: Any, place: int) -> Any:
        def call_or_fail(*arguments: Any, **more: Any) -> Any:
            path = str(arguments[place])
            if self.left and re.search(self.match, path):
                self.left -= 1
                raise OSError(self.number, os.strerror(self.number), path)
            return real(*arguments, **more)

        return call_or_fail

    def on(self, name: str, match: str, count: int = 1 << 30) -> None:
        self.number, self.match, self.left = getattr(errno, name), match, count

    def off(self) -> None:
        self.left = 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with steps 1 and 2, in two folders: run and near."""
    folder = tmp_path_factory.mktemp("saved")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    save(folder / "run", folder / "near")
    yield folder
    patch.undo()


def save(*places: Path) -> None:
    state = {"w": torch.zeros(50_000)}
    with ckpt.Checkpointer(state, [ckpt.Tier(str(place), every=1) for place in places], memory=None) as cp:
        for step in (1, 2):
            state["w"].fill_(step)
            cp.save(step).wait_durable(60, tier="all")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


def pack(run: Path, step: int) -> Path:
    return data_file(run, step)


def digests(run: Path) -> dict[str, str]:
    return {
        key: hashlib.sha256((run / key).read_bytes()).hexdigest()
        for key in keys_in(run)
        if kind_of(key) in (*KINDS, "log")
    }


def restore(run: Path, before: Callable[[], None] = lambda: None, **how: Any) -> tuple[int, float, ckpt.Checkpointer]:
    """Restore in a new Checkpointer; `before` is called when it is open."""
    state = {"w": torch.full((50_000,), -1.0)}
    with ckpt.Checkpointer(state, [ckpt.Tier(str(run), every=1)], memory=None) as cp:
        before()
        return cp.restore(**how), float(state["w"][-1]), cp


# -- while it lasts --


@pytest.mark.parametrize("name", FEW)
def test_repair_and_verify_write_nothing_while_data_files_cannot_be_read(
    run: Path, saved: Path, fault: Fault, call: Call, name: str
) -> None:
    before = digests(run)
    fault.on(name, pattern(DATA))
    for extra in ((), ("--from", saved / "near")):
        repaired = call("repair", run, "--yes", *extra)
        assert repaired.code == 3 and "cannot be read now" in repaired.err and "nothing was written" in repaired.err
    verified = call("verify", run, "--all")
    assert verified.code == 3 and "cannot be read now" in verified.out
    assert "ckpt repair" not in verified.out and "damaged" not in verified.out
    found = call("verify", run, "--all", "--json").json
    assert [one["verdict"] for one in found["checkpoints"]] == ["cannot be read now"] * 2 and not found["problems"]
    fault.off()
    assert digests(run) == before and call("verify", run, "--all").code == 0


@pytest.mark.parametrize("name", ERRORS)
def test_restore_raises_and_skips_nothing_while_the_newest_step_cannot_be_read(
    run: Path, fault: Fault, name: str
) -> None:
    match = str(pack(run, 2))
    with pytest.raises(UnreadableError, match=r"step 2 in .* cannot be read now"):
        restore(run, lambda: fault.on(name, match))
    with pytest.raises(StoreError) as caught:
        ckpt.load(str(run)).all()
    assert is_unreadable(caught.value)
    fault.off()
    step, value, cp = restore(run)
    assert (step, value) == (2, 2.0) and cp.last_restore is not None and not cp.last_restore.skipped


@pytest.mark.parametrize("match", [pattern(MANIFEST), "/steps/", pattern(DATA)], ids=[MANIFEST, "all", DATA])
def test_restore_raises_whichever_file_of_the_newest_step_cannot_be_read(run: Path, fault: Fault, match: str) -> None:
    name = "EACCES"
    fault.on(name, match)  # before it is opened, where the newest checkpoint is read ahead
    with pytest.raises(UnreadableError):
        restore(run)
    fault.off()
    assert restore(run)[:2] == (2, 2.0)


def test_restore_takes_the_step_from_another_tier_that_has_it(saved: Path, tmp_path: Path, fault: Fault) -> None:
    for place in ("run", "near"):
        shutil.copytree(saved / place, tmp_path / place)
    state = {"w": torch.zeros(50_000)}
    with ckpt.Checkpointer(
        state, [ckpt.Tier(str(tmp_path / place), every=1) for place in ("run", "near")], memory=None
    ) as cp:
        fault.on("ESTALE", f"{tmp_path}/run/{pattern(DATA)}")
        assert cp.restore() == 2 and float(state["w"][0]) == 2.0
        assert cp.last_restore is not None and not cp.last_restore.skipped


@pytest.mark.parametrize(("away", "match"), [("near", "FORMAT.json"), ("far", "log/")])
def test_dcp_load_takes_no_older_step_while_a_tier_cannot_be_read(
    tmp_path: Path, fault: Fault, match: str, away: str
) -> None:
    """Near has steps 1, 2, 3 and far step 2, or the other way round."""
    places = {name: str(tmp_path / name) for name in ("near", "far")}
    tiers = [ckpt.Tier(place, every=1 if name == away else 2) for name, place in places.items()]
    for step in (1, 2, 3):
        where = tiers if step == 2 else ckpt.Tier(places[away], every=1)
        writer = ckpt.dcp.StorageWriter(where)
        dcp.save({"w": torch.full((4,), step)}, checkpoint_id=step, storage_writer=writer, no_dist=True)

    def loaded(step: int | None = None) -> int:
        state, reader = {"w": torch.zeros(4, dtype=torch.int64)}, ckpt.dcp.StorageReader(tiers, resume=False)
        dcp.load(state, checkpoint_id=step, storage_reader=reader, no_dist=True)
        return int(state["w"][0])

    fault.on("ESTALE", f"/{away}/{match}")
    with pytest.raises(dcp.CheckpointException, match="one tier cannot be read now"):
        loaded()
    with pytest.raises(StoreError, match="Stale file handle"):
        ckpt.dcp.latest(tiers)
    assert loaded(2) == 2
    fault.on("ESTALE", f"/{away}/{match}", count=1)
    assert loaded() == ckpt.dcp.latest(tiers) == 3


@pytest.mark.parametrize("command", [("gc",), ("prune", "--keep-last", "2"), ("copy",), ("rm",)])
def test_commands_delete_and_write_nothing_while_checkpoints_cannot_be_read(
    run: Path, tmp_path: Path, fault: Fault, call: Call, command: tuple[str, ...]
) -> None:
    name, *options = command
    before, target = digests(run), [tmp_path / "other"] if name == "copy" else []
    given = f"{run}@1" if name == "rm" else run
    for match in (pattern(MANIFEST),) if name == "copy" else (pattern(INDEX), "/steps/"):
        fault.on("ESTALE", match)
        found = call(name, given, *target, *options, "--yes")
        if match == pattern(INDEX) and found.code == 0:
            fault.off()
            continue  # the manifests say the same
        assert found.code == 3 and "`ckpt repair" not in found.err + found.out, found.out + found.err
        fault.off()
        assert digests(run) == before
    assert call(name, given, *target, *options, "--yes").code == 0


@pytest.mark.parametrize(("command", "match"), [("ls", "/away"), ("report", "/away/FORMAT.json")])
def test_folder_that_cannot_be_read_is_named_among_the_runs_below(
    run: Path, call: Call, source_fault: SourceFault, match: str, command: str
) -> None:
    (run.parent / "away").mkdir()
    source_fault.on("ESTALE", match, "scandir" if match == "/away" else "stat")
    found = call(command, run.parent)
    assert found.code == 3 and "away cannot be read: Stale file handle" in found.out + found.err, found.out + found.err


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Path]:
    """The lease of a Checkpointer that trains a run in this process until the test ends."""
    with ckpt.Checkpointer({"w": torch.zeros(4)}, [ckpt.Tier(str(tmp_path / "trained"), every=1)], memory=None) as cp:
        cp.restore(default=0)
        assert eventually((tmp_path / "trained" / "lease.json").exists)
        yield tmp_path / "trained" / "lease.json"
        cp.save(5).wait_durable(60)  # raises FencedError if another job owns the run


def test_run_is_not_taken_over_while_its_lease_cannot_be_read(
    lease: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.see_dead_trainers_after(monkeypatch, 0.1)
    run = lease.parent
    fault.on("EIO", "/lease.json")
    writer = ckpt.dcp.StorageWriter(str(run))
    with pytest.raises(dcp.CheckpointException, match="UnreadableError: cannot check now whether another process"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=9, storage_writer=writer, no_dist=True)
    fault.off()
    with pytest.raises(dcp.CheckpointException, match="InUseError"):  # control
        dcp.save({"w": torch.ones(4)}, checkpoint_id=9, storage_writer=writer, no_dist=True)


def test_damaged_lease_is_waited_for_until_its_trainer_renews_it(lease: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.see_dead_trainers_after(monkeypatch, 0.3)
    whole, said, run = lease.read_bytes(), list[str](), lease.parent
    newer = inside.of_newer_version(whole)
    for unknown in (whole[:50], b"", b"x" * 100_000, newer):
        lease.write_bytes(unknown)
        with pytest.raises(ckpt.errors.InUseError):
            inside.check_free(run, lambda text: lease.write_bytes(whole))
    for unknown in (whole[:50], newer):
        lease.write_bytes(unknown)
        said.clear()
        inside.check_free(run, said.append)  # it is not renewed
        assert len(said) == 1 and "waiting up to" in said[0]
    lease.write_bytes(newer)
    with pytest.raises(ckpt.errors.InUseError, match="cannot read"):
        inside.check_free(run, lambda text: lease.write_bytes(newer.replace(b'"renewed":', b'"renewed":1')))


def test_save_names_the_error_if_a_folder_cannot_be_looked_at(
    run: Path, source_fault: SourceFault, fault: Fault
) -> None:
    """It is not a file in the way of the folder."""
    store = inside.open_folder(str(run))
    source_fault.on("EIO", "/log", "stat")
    fault.on("EIO", "/log")
    with pytest.raises(StoreError, match=r"^Input/output error"):
        inside.run(store.put("log/000000000000.json", b"", create=True))


# -- files of other libraries --


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensor in every form that `ckpt import` takes."""
    folder, state = tmp_path_factory.mktemp("foreign"), {"a": torch.arange(1000.0)}
    (folder / "hf").mkdir()
    torch.save(state, folder / "x.pt")
    torch.save({"b": state}, folder / "other.pt")
    save_file(state, folder / "x.safetensors")
    save_file(state, folder / "hf" / "part.safetensors")
    (folder / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder


class SourceFault:
    """Makes each call of one kind fail for paths that end in `match`, from the `after`th on and `count` times."""

    CALLS = ("open", "stat", "listdir", "scandir", "pread", "preadv")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number, self.match, self.calls, self.after, self.left = 0, "", (), 0, 0
        for name in self.CALLS:
            patch.setattr(os, name, self._faulty(name, getattr(os, name)))

    def _faulty(self, name: str, real: Any) -> Any:
        def call_or_fail(path: Any = ".", *arguments: Any, **more: Any) -> Any:
            if self.left and name in self.calls:
                where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
                if where.endswith(self.match):
                    self.after -= 1
                    if self.after < 0:
                        self.left -= 1
                        raise OSError(self.number, os.strerror(self.number), None if isinstance(path, int) else where)
            return real(path, *arguments, **more)

        return call_or_fail

    def on(self, name: str, match: str, *calls: str, after: int = 0, count: int = 1 << 30) -> None:
        self.number, self.match, self.calls = getattr(errno, name), match, calls
        self.after, self.left = after, count


@pytest.fixture
def source_fault(monkeypatch: pytest.MonkeyPatch) -> SourceFault:
    return SourceFault(monkeypatch)


FOREIGN = [
    ("x.pt", "x.pt"),
    ("x.safetensors", "x.safetensors"),
    ("hf", "hf"),
    ("hf", "part.safetensors"),
    ("hf", "index.json"),
    ("dcp", ".metadata"),
    ("dcp", ".distcp"),
]


@pytest.mark.parametrize(("source", "match"), FOREIGN)
def test_import_and_diff_take_source_files_that_cannot_be_read_for_unreadable(
    foreign: Path, tmp_path: Path, source_fault: SourceFault, call: Call, source: str, match: str
) -> None:
    """Some use of a call fails, and all later ones do. A command that needs none of them succeeds as before."""
    works = ("import", foreign / source, tmp_path / "out"), ("diff", foreign / source, foreign / "other.pt")

    def result(number: int) -> Result:
        found = call(*works[number])
        for folder in (tmp_path / "out", tmp_path / "out.partial"):
            shutil.rmtree(folder, ignore_errors=True)
        return found

    different = result(1)
    assert result(0).code == 0 and different.code == 1
    calls = ("listdir", "stat") if match == "hf" else ("open", "stat", "pread", "preadv")
    for name, kind in zip(("EIO", "EMFILE", "ESTALE", "EACCES"), calls, strict=False):
        for number, after in ((0, 0), (0, 1), (0, 4), (1, 0), (1, 3)):
            source_fault.on(name, match, kind, after=after)
            found = result(number)
            if found.code == 3:
                assert "now: " in found.err and "damaged" not in found.err
            else:
                assert (found.code, "damaged" in found.err) == (number, False), (kind, after, found.err)
                assert not number or found.out == different.out


def test_negative_control_absent_source_files_stay_absent(
    foreign: Path, tmp_path: Path, source_fault: SourceFault, call: Call
) -> None:
    shutil.copytree(foreign, tmp_path / "copy")
    found = call("import", tmp_path / "nothing", tmp_path / "out")
    assert found.code == 2 and "does not exist" in found.err
    (tmp_path / "copy" / "hf" / "part.safetensors").unlink()
    found = call("import", tmp_path / "copy" / "hf", tmp_path / "out")
    assert found.code == 2 and "part.safetensors is missing" in found.err
    for after, end in ((1000, 0), (0, 2)):  # count its uses first, then let the last one fail
        source_fault.on("ENOENT", "x.safetensors", "stat", after=after or 999 - source_fault.after)
        found = call("import", foreign / "x.safetensors", tmp_path / f"out{after}")
        assert found.code == end
    assert "changed while it was read" in found.err


def test_restore_and_diff_of_a_run_whose_folder_cannot_be_read_exit_with_3(
    run: Path, tmp_path: Path, source_fault: SourceFault, fault: Fault, call: Call
) -> None:
    source_fault.on("ESTALE", "/run", "stat", "listdir", "scandir")
    fault.on("ESTALE", "/run/")
    export = ("export", run, "--to", tmp_path / "out", "--only", "w")
    for work in (export, ("diff", run, run), ("diff", f"{run}@1", f"{run}@2")):
        assert call(*work).code == 3
    fault.off()
    source_fault.left = 0
    assert call(*export).code == 0


def test_all_ranks_raise_while_one_of_them_cannot_read_its_share(run: Path, fault: Fault) -> None:
    """Control: once the files can be read again, all restore the newest step."""

    def body(ranks: Any) -> Any:
        state = {"w": torch.zeros(50_000)}
        try:
            result = inside.restore_folder(f"file://{run}", state, ranks)
        except UnreadableError as error:
            return str(error)
        return result.step, float(state["w"][0])

    fault.on("EIO", str(pack(run, 2)), 1 << 30)
    first, second = on_ranks(2, dist.HashStore(), body, node_of=lambda rank: "one")
    assert first == second and "step 2" in first and "rank" in first
    fault.off()
    assert on_ranks(2, dist.HashStore(), body, node_of=lambda rank: "one") == [(2, 2.0)] * 2


# -- for a moment --


@pytest.mark.parametrize("name", FEW)
def test_readers_survive_errors_that_last_a_moment(
    run: Path, fault: Fault, call: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inside.try_again_for(monkeypatch, 20.0, 0.01)
    match = str(pack(run, 2))
    step, value, cp = restore(run, lambda: fault.on(name, match, 5))
    assert (step, value) == (2, 2.0) and cp.last_restore is not None and not cp.last_restore.skipped
    assert fault.left == 0
    for work in (("verify", run, "--all"), ("repair", run, "--yes"), ("copy", run, run.parent / "copy", "--yes")):
        fault.on(name, match, 3)
        assert call(*work).code == 0 and fault.left == 0
    fault.on(name, match, 3)
    assert float(ckpt.load(str(run))["w"][0]) == 2.0 and fault.left == 0


@pytest.mark.parametrize("folder", ["", DATA_FOLDER])
def test_restore_waits_for_a_folder_that_is_away_for_a_moment(
    run: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    inside.try_again_for(monkeypatch, 20.0)
    gone = threading.Event()

    def away() -> None:
        os.rename(run / folder, run.parent / "away")
        gone.set()
        threading.Timer(0.5, os.rename, (run.parent / "away", run / folder)).start()

    step, value, cp = restore(run, away)
    assert gone.is_set() and (step, value) == (2, 2.0)
    assert cp.last_restore is not None and not cp.last_restore.skipped


@pytest.mark.parametrize("folder", ["", DATA_FOLDER])
def test_commands_take_a_folder_that_is_away_for_unreadable(run: Path, saved: Path, call: Call, folder: str) -> None:
    """Control: a file that is missing in a folder that is there is damage."""
    before = digests(run)
    os.rename(run / folder, run.parent / "away")
    found = call("verify", run)
    assert found.code == (3 if folder else 2) and "damaged" not in found.out
    assert call("repair", run, "--from", saved / "near", "--yes").code == (3 if folder else 2)
    os.rename(run.parent / "away", run / folder)
    assert digests(run) == before
    pack(run, 2).unlink()
    found = call("verify", run)
    assert found.code == 1 and "is gone" in found.out
    assert call("repair", run, "--from", saved / "near", "--yes").code == 0 and digests(run) == before


def test_a_listing_made_while_a_mount_is_away_does_not_make_files_lost(
    run: Path, saved: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`repair` lists the data files once. Without a second look, each of them would be gone."""
    from ckpt_backends.local import LocalStore

    scan, before, lists = LocalStore._scan, digests(run), []

    def empty(self: LocalStore, prefix: str) -> Any:
        if prefix == f"{DATA_FOLDER}/":
            lists.append(prefix)
            return []
        return scan(self, prefix)

    monkeypatch.setattr(LocalStore, "_scan", empty)
    found = call("repair", run, "--from", saved / "near", "--yes")
    assert found.code == 0 and "nothing is damaged" in found.out and lists and digests(run) == before


def test_a_listed_log_record_that_cannot_be_found_is_not_skipped(run: Path, fault: Fault, call: Call) -> None:
    """Control: once the record is really gone, the run is damaged."""
    newest = max((run / "log").glob("*.json"))
    fault.on("ENOENT", str(newest))
    assert call("ls", run).code == 3 and call("verify", run).code == 3
    fault.off()
    assert call("verify", run).code == 0


# -- real faults --


def test_repair_as_another_user_changes_nothing_without_permission(saved: Path) -> None:
    """A job that runs as another user cannot open the files."""
    run = saved.parent / f"{saved.name}-other" / "run"
    shutil.copytree(saved / "run", run)
    before, user = digests(run), []
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "65534:65534", str(run.parent)], check=True)
        for folder in (saved.parent, saved.parent.parent):
            os.chmod(folder, folder.stat().st_mode | 0o055)
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for path in data_files(run):
        path.chmod(0)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "HOME": str(run.parent)}
    words = [*user, sys.executable, "-m", "ckpt", "repair", str(run), "--yes"]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    for path in data_files(run):
        path.chmod(0o600)
    assert found.returncode == 3 and "Permission denied" in found.stderr, found.stderr
    assert digests(run) == before


def test_commands_find_no_damage_when_descriptors_run_out(run: Path) -> None:
    """With any number of free descriptors. Control: with enough of them, everything is read."""
    code = """
import os, resource, sys, ckpt, inside
inside.try_again_for(inside.FOREVER, 0.05)
run = sys.argv[1]
codes = [inside.main(["verify", run, "--all"])]
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most[1]))
for left in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 100):
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for fd in taken[:left]:
        os.close(fd)
    codes += [inside.main(["verify", run, "--all"]), inside.main(["repair", run, "--yes"])]
    try:
        found = ckpt.load(run).step
    except (ckpt.CheckpointError, OSError):
        found = 2
    assert found == 2
    for fd in taken[left:]:
        os.close(fd)
print("CODES", *codes)
"""
    before = digests(run)
    done = run_script(code, str(run))
    codes = done.stdout.rpartition("CODES")[2].split()
    assert set(codes) <= {"0", "2", "3"} and {"0", "3"} <= set(codes), done.stdout + done.stderr
    assert codes[0] == codes[-1] == "0" and digests(run) == before


# -- real damage --


class Loader:
    """An object of the user's script whose own code fails once, or always, at one of its calls."""

    def __init__(self, error: Exception | None = None, *, at: str = "load_state_dict", call: int = 1) -> None:
        self.position, self.error, self.at, self.call = 0, error, at, call

    def fail(self, at: str) -> None:
        if self.error is not None and at == self.at:
            self.call -= 1
            if self.call == 0:
                raise self.error

    def state_dict(self) -> dict[str, int]:
        self.fail("state_dict")
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.fail("load_state_dict")
        self.position = state["position"]


def own_state(loader: Loader) -> dict[str, Any]:
    return {"w": torch.zeros(1), "loader": loader}


@pytest.mark.parametrize(
    ("error", "at", "call"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "load_state_dict", 1),
        (TimeoutError(), "state_dict", 2),
        (KeyError("lr"), "load_state_dict", 1),
    ],
)
def test_error_of_the_users_code_skips_no_checkpoint(tmp_path: Path, error: Exception, at: str, call: int) -> None:
    """It is raised as it is, nothing is saved of the half restored state, and the next start has the newest step."""
    state = own_state(Loader())
    with ckpt.Checkpointer(state, tmp_path / "run", every=2) as cp:
        for step in range(1, 6):
            state["w"].fill_(step)
            state["loader"].position = step
            cp.step(step)
    with (
        pytest.raises(type(error)) as raised,
        ckpt.Checkpointer(own_state(Loader(error, at=at, call=call)), tmp_path / "run") as cp,
    ):
        cp.restore()
    assert raised.value is error
    assert at == "state_dict" or "loader raised this error during its restore" in error.__notes__[0]
    again = own_state(Loader())
    with ckpt.Checkpointer(again, tmp_path / "run") as cp:
        assert cp.restore() == 5 and cp.last_restore is not None and cp.last_restore.skipped == []
    assert (again["w"].item(), again["loader"].position) == (5, 5)


def hurt(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "harm", [hurt, lambda path: os.truncate(path, 10_000), lambda path: path.unlink()], ids=["bytes", "length", "gone"]
)
def test_real_damage_is_still_noticed_and_passed_over(
    run: Path, saved: Path, call: Call, harm: Callable[[Path], None]
) -> None:
    """Control: the same readers, on a file that is really damaged or deleted."""
    before = digests(run)
    harm(pack(run, 2))
    found = call("verify", run)
    assert found.code == 1 and "ckpt repair" in found.out
    with pytest.raises((CorruptError, StoreError)):
        ckpt.load(str(run)).all()
    assert call("repair", run, "--yes").code == 1  # no source has it, and nothing is invented
    again = call("repair", run, "--from", saved / "near", "--yes")
    assert again.code == 0 and digests(run) == before
    harm(pack(run, 2))
    step, value, cp = restore(run)
    assert (step, value) == (1, 1.0) and cp.last_restore is not None
    assert [one.step for one in cp.last_restore.skipped] == [2]


def test_repair_keeps_every_byte_of_a_file_that_it_cannot_cure(run: Path, call: Call) -> None:
    """A truncated file, and one with a damaged range: without a sound copy both stay as they are."""
    hurt(pack(run, 1))
    os.truncate(pack(run, 2), 60_000)
    before = digests(run)
    assert call("repair", run, "--yes").code == 1 and digests(run) == before


# -- object storage --


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[MotoServer, FaultProxy]]:
    with MotoServer() as server, FaultProxy(server.url) as proxy:
        server.make_bucket("bucket")
        yield server, proxy


@pytest.mark.parametrize(("code", "s3_code"), [(404, "NoSuchKey"), (403, "AccessDenied")])
def test_object_storage_that_refuses_reads_is_unreadable(
    bucket: tuple[MotoServer, FaultProxy],
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    s3_code: str,
) -> None:
    _, proxy = bucket
    url = f"s3://bucket/run{code}"
    tier = ckpt.Tier(url, every=1, storage_options=storage_options(proxy.url))
    state = {"w": torch.zeros(50_000)}
    with ckpt.Checkpointer(state, tier, memory=None) as cp:
        for step in (1, 2):
            state["w"].fill_(step)
            cp.save(step).wait_durable(60)
    with ckpt.Checkpointer(state, tier, memory=None) as cp:
        match = f"{pattern(MANIFEST, 2)}|{pattern(DATA, 2)}"
        for method in ("GET", "HEAD"):
            proxy.fail("status", method=method, match=match, code=code, s3_code=s3_code, count=10_000)
        with pytest.raises(UnreadableError):
            cp.restore()
        assert call("verify", f"{url}@2").code == 3
        assert call("repair", url, "--yes").code == 3
        assert not [one for one in proxy.hits() if one[0] not in ("GET", "HEAD")]
        proxy.clear()
        inside.try_again_for(monkeypatch, 20.0)
        proxy.fail("status", method="GET", match=match, code=code, s3_code=s3_code, count=2)
        assert cp.restore() == 2 and cp.last_restore is not None and not cp.last_restore.skipped
        assert len(proxy.hits()) == 2
        proxy.clear()
