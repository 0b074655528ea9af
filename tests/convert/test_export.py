"""`ckpt export`: the files in other formats, interruptions, targets, sources and memory use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import ckpt
from ckpt.tools.cli import export as command
from ckpt.tools.convert import export, partial, to_run
from ckpt.tools.convert.output import Literal, OutFile, Output, TensorRun
from commands import call, flip, increments
from memory_origin import MemoryOrigin
from peak import PEAK
from processes import killed, run_script
from run_files import data_files

__all__ = ["call", "increments"]  # fixtures

MIB = 1 << 20


class Model(nn.Module):
    """Two tied layers, integer buffers, an embedding of several megabytes, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, 500)
        self.norm = nn.BatchNorm1d(500)
        self.head = nn.Linear(500, 3000, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.randn(33, 7).half())
        self.brain = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(3, dtype=torch.int64))


def state_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    sched = torch.optim.lr_scheduler.StepLR(optim, 2)
    return {"model": model, "optim": optim, "sched": sched, "rng": ckpt.RNG(), "meta": {"seen": (1, [2.5, None])}}


def save(run: Path, steps: int = 2) -> None:
    state = state_of()
    with ckpt.Checkpointer(state, [ckpt.Tier(str(run), every=1, keep=9)], memory=None) as cp:
        for step in range(1, steps + 1):
            with torch.no_grad():
                state["model"].narrow += 1
            cp.save(step).wait_durable()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_RUNTIME_DIR", str(folder))
        save(folder / "run")
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- safetensors --


def test_export_to_one_safetensors_file(made: Path, tmp_path: Path, call: Any) -> None:
    """Every weight is bit-exact under its name. Tied weights are written once, with the alias in the metadata."""
    found = call("export", made, "--to", tmp_path / "w.safetensors", "--json")
    assert found.code == 0 and found.json["done"]["nbytes"] == (tmp_path / "w.safetensors").stat().st_size
    there, whole = safetensors.torch.load_file(tmp_path / "w.safetensors"), ckpt.load(made, only="model.*")
    assert there.keys() | {"head.weight"} == {name.removeprefix("model.") for name in whole}
    assert all(torch.equal(tensor, whole[f"model.{name}"]) for name, tensor in there.items())
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    fresh = Model()
    assert safetensors.torch.load_model(fresh, tmp_path / "w.safetensors") == (set(), [])
    assert torch.equal(fresh.head.weight, whole["model.embed.weight"]) and fresh.head.weight is fresh.embed.weight
    assert left_in(tmp_path) == ["w.safetensors"]


def test_export_to_several_files_with_index(made: Path, tmp_path: Path, call: Any) -> None:
    """No file exceeds the requested size unless a single tensor does. The index lists the file of each tensor."""
    assert call("export", made, "--to", tmp_path / "hf", "--shard-size", "1MB").code == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    whole, there = ckpt.load(made, only="model.*"), dict[str, torch.Tensor]()
    for name, file in index["weight_map"].items():
        there[name] = safetensors.torch.load_file(tmp_path / "hf" / file)[name]
    assert all(torch.equal(tensor, whole[f"model.{name}"]) for name, tensor in there.items())
    assert len(there) == len(whole) - 1 and index["metadata"]["total_size"] == sum(t.nbytes for t in there.values())
    files = sorted(set(index["weight_map"].values()))
    assert left_in(tmp_path / "hf") == [*files, "model.safetensors.index.json"]
    assert (
        files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 1
    )


def test_export_casts_and_selects_tensors(made: Path, tmp_path: Path, call: Any) -> None:
    """Weights are rounded to bf16 like in torch, and integers stay. Only selected tensors are written, by full name."""
    assert call("export", made, "--to", tmp_path / "a", "--dtype", "bf16").code == 0
    whole = ckpt.load(made)
    for name, tensor in safetensors.torch.load_file(tmp_path / "a" / "model.safetensors").items():
        expected = whole[f"model.{name}"]
        assert torch.equal(tensor, expected.bfloat16() if expected.is_floating_point() else expected)
    names = ["--only", "optim.*exp_avg", "--only", "model.narrow"]
    assert call("export", made, "--to", tmp_path / "b.safetensors", *names).code == 0
    there = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert "model.narrow" in there and any(name.endswith("exp_avg") for name in there)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in there.items())


# -- runs with another number of ranks --


@pytest.mark.parametrize("world", [1, 64])
def test_export_to_run_with_other_world_size(made: Path, tmp_path: Path, call: Any, world: int) -> None:
    """The run is bit-exact, including plain values. Each rank's file has a part, and a training resumes from it."""
    assert call("export", made, "--to", tmp_path / "new", "--world-size", world).code == 0
    assert call("diff", made, tmp_path / "new").out == "equal\n"
    assert call("verify", tmp_path / "new").code == 0
    shown = call("show", tmp_path / "new", "--json").json
    assert (shown["ranks"], shown["step"]) == (world, 2)
    root, before = json.loads((made / "FORMAT.json").read_text())["root"], call("show", made, "--json").json
    assert (shown["parents"], before["parents"]) == ([f"{root}/{before['id']}"], [])
    state = state_of(seed=5)
    with ckpt.Checkpointer(state, str(tmp_path / "new")) as cp:
        assert cp.restore() == 2
        cp.save(3).wait_durable()
    whole = ckpt.load(made)
    assert all(torch.equal(t, whole[f"model.{n}"]) for n, t in state["model"].state_dict().items())
    assert state["meta"] == {"seen": (1, [2.5, None])}
    assert torch.equal(
        state["optim"].state[state["model"].narrow]["exp_avg"], whole["optim.state.model.narrow.exp_avg"]
    )


# -- interruptions --

RESTORE = """
import sys
from ckpt.tools import cli; from ckpt.tools.cli import export as command; from ckpt.tools.convert import export, to_run
from ckpt.tools.convert import partial
export.SYNC, command.WINDOW = 1, 1 << 20
sys.exit(cli.main(sys.argv[1:]))
"""


ARGUMENTS = {
    "safetensors": ("--format", "safetensors"),
    "run": ("--world-size", "3"),
    "torch": ("--format", "torch"),
    "dcp": ("--format", "dcp"),
}
WINDOWS = tuple(f"export.window:kill:{n}" for n in (1, 2, 4))  # the first records nothing, nor the second of a run
FAILS = {
    "safetensors": (WINDOWS[2], "export.whole:kill"),
    "run": (WINDOWS[2], "export.whole:kill", "log.linked:kill", "manifest.stored:kill"),
    "torch": (WINDOWS[1], "export.whole:kill"),
    "dcp": (WINDOWS[1], "export.whole:kill"),
}


@pytest.mark.parametrize("form", ["run", "safetensors"])
def test_killed_export_is_resumed(
    made: Path, tmp_path: Path, call: Any, form: str, monkeypatch: pytest.MonkeyPatch, fails: tuple[str, ...] = ()
) -> None:
    """The target appears only when complete. The next call resumes, and the result equals an uninterrupted export."""
    args, early = ARGUMENTS[form], WINDOWS[: 2 if form == "run" else 1]
    assert call("export", made, "--to", tmp_path / "whole", *args).code == 0
    monkeypatch.setattr(export, "SYNC", 1)
    monkeypatch.setattr(command, "WINDOW", MIB)
    for number, fail in enumerate(fails or FAILS[form]):
        target = tmp_path / str(number)
        result = run_script(RESTORE, "restore", made, "--to", target, *args, fail=fail)
        assert killed(result) and not target.exists(), result.stderr
        done = call("export", made, "--to", target, *args, "--json").json["done"]
        assert done["resumed"] > 0 or fail in early
        assert same_files(target, tmp_path / "whole") and not partial.partial_of(target).exists()
    target = tmp_path / "late"
    assert killed(run_script(RESTORE, "restore", made, "--to", target, *args, fail="export.appeared:kill"))
    assert same_files(target, tmp_path / "whole") and call("export", made, "--to", target, *args).code == 2


@pytest.mark.long
@pytest.mark.parametrize("form", ARGUMENTS)
def test_killed_export_is_resumed_long(
    made: Path, tmp_path: Path, call: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test at all of these points."""
    fails = (*WINDOWS, *FAILS[form][FAILS[form].index("export.whole:kill") :])
    test_killed_export_is_resumed(made, tmp_path, call, form, monkeypatch, fails)


def same_files(a: Path, b: Path) -> bool:
    """Return True if two folders are equal. For runs, dates and ids may differ."""
    if a.is_file():
        return a.read_bytes() == b.read_bytes()
    some = ("*.safetensors", "*.distcp")
    names = [
        sorted(str(p.relative_to(f)) for one in some for p in f.rglob(one) if "index" not in p.parts) for f in (a, b)
    ]
    return names[0] == names[1] and all((a / n).read_bytes() == (b / n).read_bytes() for n in names[0])


def interrupted(made: Path, target: Path) -> Path:
    """Return the largest file that a killed export leaves."""
    fail = "export.window:kill:5"
    assert killed(run_script(RESTORE, "restore", made, "--to", target, "--format", "safetensors", fail=fail))
    return max((p for p in partial.partial_of(target).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_resumed_export_verifies_written_data(
    made: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that was flipped in between is written again, as is everything missing in the journal."""
    call("export", made, "--to", tmp_path / "whole")
    file = interrupted(made, tmp_path / "a")
    flip(file, 2 * MIB)
    journal = partial.partial_of(tmp_path / "a") / "journal"
    journal.write_bytes(journal.read_bytes() + b'["mod')
    monkeypatch.setattr(command, "WINDOW", MIB)
    found = call("export", made, "--to", tmp_path / "a", "--json")
    assert found.json["done"]["resumed"] == 3 * MIB  # four were recorded
    assert same_files(tmp_path / "a", tmp_path / "whole")


def test_negative_control_without_verification(made: Path, tmp_path: Path, call: Any) -> None:
    """Without verification the comparison above detects the flipped byte."""
    call("export", made, "--to", tmp_path / "whole")
    flip(interrupted(made, tmp_path / "a"), 2 * MIB)
    trusting = RESTORE.replace("sys.exit", "export.chunk_digest = lambda data: Same()\nsys.exit").replace(
        "export.SYNC", "\nclass Same:\n    def hex(self):\n        return self\n    def __eq__(self, other):\n"
        "        return True\nexport.SYNC", 1
    )  # fmt: skip
    result = run_script(trusting, "restore", made, "--to", tmp_path / "a")
    assert "not JSON serializable" in result.stderr or not same_files(tmp_path / "a", tmp_path / "whole")


def test_other_unfinished_export_is_not_touched(made: Path, tmp_path: Path, call: Any) -> None:
    """Other options, another step, a foreign folder or a second process are rejected, and nothing is lost."""
    file = interrupted(made, tmp_path / "a")
    before = file.read_bytes()
    for args in (["--dtype", "bf16"], ["--step", "1"], ["--shard-size", "1MB"]):
        found = call("export", made, "--to", tmp_path / "a", *args)
        assert found.code == 2 and "unfinished export from another source" in found.err
    with open(partial.partial_of(tmp_path / "a") / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = call("export", made, "--to", tmp_path / "a")
    assert found.code == 2 and "another process" in found.err and file.read_bytes() == before
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "b.partial" / "thesis.txt").write_text("years of work")
    assert "is not from an export" in call("export", made, "--to", tmp_path / "b").err
    assert left_in(tmp_path / "b.partial") == ["lock", "thesis.txt"]


# -- targets --


def test_export_replaces_nothing(made: Path, tmp_path: Path, call: Any) -> None:
    """A file, a non-empty folder and a dangling link are rejected. An empty folder is accepted."""
    (tmp_path / "file.safetensors").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file.safetensors", "folder", "link"):
        found = call("export", made, "--to", tmp_path / name)
        assert (found.code, found.out) == (2, "") and "exists" in found.err, name
    assert (tmp_path / "file.safetensors").read_text() == "x" and left_in(tmp_path) == [
        "file.safetensors", "folder", "link",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    assert call("export", made, "--to", tmp_path / "empty").code == 0
    assert left_in(tmp_path / "empty") == ["model.safetensors"]
    assert call("export", made, "--to", tmp_path / "some" / "where" / "new").code == 0


def test_target_created_during_export_is_not_replaced(
    made: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other file stays, and the exported data is not lost."""
    real = partial._sync_tree

    def meanwhile(path: Path) -> None:
        (tmp_path / "w.safetensors").write_text("theirs")
        real(path)

    monkeypatch.setattr(partial, "_sync_tree", meanwhile)
    assert call("export", made, "--to", tmp_path / "w.safetensors").code == 2
    assert (tmp_path / "w.safetensors").read_text() == "theirs"
    (tmp_path / "w.safetensors").unlink()
    monkeypatch.undo()
    assert call("export", made, "--to", tmp_path / "w.safetensors", "--json").json["done"]["resumed"] > 0


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    """Write to `filler` until the disk is full."""
    with contextlib.suppress(OSError), open(disk / "filler", "wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("name", ["out.pt", "out"])
def test_export_to_full_disk_is_rejected_or_resumes(
    made: Path, tmp_path: Path, call: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little space is an error before any write. If space runs out later, all written data stays and is used when
    there is space again."""
    args = ["export", made, "--to", tmp_path / "disk" / name, "--format", "torch" if name == "out.pt" else "run"]
    with small_disk(tmp_path / "disk", 4) as disk:
        found = call(*args)
        assert found.code == 2 and "are free" in found.err and left_in(disk) == []
        subprocess.run(["mount", "-o", "remount,size=40m", disk], check=True)
        note, finish = partial.Workshop.note, to_run._finish

        def filled(self: partial.Workshop, done: Any) -> None:
            note(self, done)
            fill(disk)

        async def fuller(*arguments: Any) -> None:
            fill(disk)
            await finish(*arguments)

        with monkeypatch.context() as patch:
            if name == "out.pt":
                patch.setattr(partial.Workshop, "note", filled)
            else:
                patch.setattr(to_run, "_finish", fuller)
            found = call(*args)
        assert found.code == 2 and not (disk / name).exists() and "Traceback" not in found.err
        (disk / "filler").unlink()
        assert call(*args, "--json").json["done"]["resumed"] > 5 * MIB
        if name == "out.pt":
            assert call("import", disk / name, tmp_path / "run").code == 0
        else:
            assert call("diff", made, disk / name).code == 0


# -- sources --


def test_damage_is_repaired_from_another_run(run: Path, made: Path, tmp_path: Path, call: Any) -> None:
    """With --from, damaged data is read from a copy, and the output lists the repairs."""
    for file in data_files(run):
        flip(file, -5 * MIB)
    args = ["--only", "*"]
    found = call("export", run, "--to", tmp_path / "a", "--from", made, "--json", *args)
    assert found.code == 0 and "came from" in found.json["repaired"][0]
    call("export", made, "--to", tmp_path / "b", *args)
    assert same_files(tmp_path / "a", tmp_path / "b")


def test_unrepairable_damage_names_the_tensor(run: Path, made: Path, tmp_path: Path, call: Any) -> None:
    """Nothing is created. Once the run is intact, the same call resumes."""
    for file in data_files(run):  # both steps, because one would repair the other
        raw = bytearray(file.read_bytes())
        first = 8 + int.from_bytes(raw[:8], "little")
        raw[first : first + 64] = bytes(64)
        file.write_bytes(raw)
    found = call("export", run, "--to", tmp_path / "a", "--only", "*")
    assert found.code == 2 and "is damaged" in found.err and not (tmp_path / "a").exists()
    shutil.rmtree(run)
    shutil.copytree(made, run)
    assert call("export", run, "--to", tmp_path / "a", "--only", "*").code == 0


def test_increments_and_compressed_files_are_exported(tmp_path: Path, call: Any, increments: Path) -> None:
    """An increment stored as byte planes and deltas is exported like a plain checkpoint."""
    assert call("export", increments, "--to", tmp_path / "w.safetensors", "--only", "*").code == 0
    there, whole = safetensors.torch.load_file(tmp_path / "w.safetensors"), ckpt.load(increments)
    assert there.keys() == set(whole) and all(torch.equal(there[n], whole[n]) for n in there)


# -- memory --


def test_export_memory_is_bounded(tmp_path: Path) -> None:
    """A process that never uses more than 150 MiB exports 200 MiB of tensors, one of them 160 MiB."""
    big = {
        "model": nn.ParameterDict(
            {"big": nn.Parameter(torch.randn(40, MIB)), "more": nn.Parameter(torch.randn(10, MIB))}
        )
    }
    with ckpt.Checkpointer(big, str(tmp_path / "run")) as cp:
        cp.save(1).wait_durable()
    for args in (["--dtype", "bf16"], ["--world-size", "5"]):
        target = tmp_path / args[1]
        result = run_script(
            PEAK, "restore", tmp_path / "run", "--to", target, "--max-memory", "150MiB", *args, fresh=True
        )
        assert result.returncode == 0 and int(result.stderr) < 150 * 1024, result.stderr


def test_negative_control_without_memory_bound(tmp_path: Path) -> None:
    """The same measurement detects larger windows."""
    big = {"model": nn.ParameterDict({"big": nn.Parameter(torch.randn(40, MIB))})}
    with ckpt.Checkpointer(big, str(tmp_path / "run")) as cp:
        cp.save(1).wait_durable()
    code = PEAK.replace("status = ", "from ckpt.tools.cli import export\nexport.WINDOW = 64 << 20\nstatus = ")
    result = run_script(code, "restore", tmp_path / "run", "--to", tmp_path / "a", fresh=True)
    assert result.returncode == 0 and int(result.stderr) > 150 * 1024


def test_too_little_memory_is_reported(made: Path, tmp_path: Path, call: Any) -> None:
    """The error has the required minimum."""
    found = call("restore", made, "--to", tmp_path / "a", "--max-memory", "20MB")
    assert found.code == 2 and "at least" in found.err and left_in(tmp_path) == []


# -- output and options --


def test_dry_run_creates_nothing(made: Path, tmp_path: Path, call: Any) -> None:
    """A dry run prints the plan, and its JSON has the same keys as a real export."""
    found = call("export", made, "--to", tmp_path / "a", "--dtype", "bf16", "--dry-run")
    assert found.code == 0 and "embed.weight" in found.out and "F32 -> BF16" in found.out
    assert "Nothing was written" in found.out and left_in(tmp_path) == []
    dry = call("export", made, "--to", tmp_path / "a", "--dry-run", "--json").json
    real = call("export", made, "--to", tmp_path / "a", "--json").json
    assert dry.keys() == real.keys() and dry["files"] == real["files"] and dry["done"] is None


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors", "run"])
def test_printed_size_is_size_on_disk(made: Path, tmp_path: Path, call: Any, kind: str) -> None:
    """The files and bytes of the JSON are those on the disk. A dry run is smaller by at most the headers."""
    target = tmp_path / "out"
    dry = call("export", made, "--to", target, "--format", kind, "--dry-run", "--json").json
    found = call("export", made, "--to", target, "--format", kind, "--json")
    paths = [path for path in target.rglob("*") if path.is_file()] if target.is_dir() else [target]
    sizes = {path.name: path.stat().st_size for path in paths}
    shown = {Path(file["name"]).name: file["bytes"] for file in found.json["files"]}
    assert shown.items() <= sizes.items() and found.json["bytes"] == sum(shown.values()) == found.json["done"]["nbytes"]
    assert shown == sizes or kind in ("safetensors", "run")  # their small files are not listed
    assert 0.5 * found.json["bytes"] < dry["bytes"] <= found.json["bytes"]


def test_wrong_options_are_rejected(made: Path, tmp_path: Path, call: Any) -> None:
    """The error has the remedy, and nothing is created."""
    for args, expected in (
        (["--to", tmp_path / "a", "--dtype", "int3"], "bf16, fp16"),
        (["--to", tmp_path / "a", "--only", "nosuch*"], "no name matches"),
        (["--to", tmp_path / "a", "--only", "optim.*", "--dtype", "bf16"], "weights of modules"),
        (["--to", tmp_path / "a", "--only", "meta"], "no tensors"),
        (["--to", "s3://bucket/x"], "not on this machine"),
        (["--to", tmp_path / "a.pt", "--world-size", "2"], "--format run"),
        (["--to", tmp_path / "a.safetensors", "--shard-size", "1GB"], "--shard-size"),
        (["--to", tmp_path / "a", "--shard-size", "much"], "not a size"),
        (["--to", tmp_path / "a", "--step", "77"], "77"),
        (["--to", tmp_path / "a", "--world-size", "0"], "--world-size"),
        ([], "--to"),
    ):
        found = call("export", made, *args)
        assert found.code == 2 and expected in found.err and "Traceback" not in found.err, (args, found.err)
    assert left_in(tmp_path) == []


def test_unsupported_format_is_rejected(made: Path, tmp_path: Path, call: Any) -> None:
    """The error lists the supported formats. A name with another suffix is a folder, and --format overrides."""
    refused = call("export", made, "--to", tmp_path / "x.gguf")
    assert refused.code == 2 and "safetensors (.safetensors)" in refused.err and ".pt" in refused.err
    with pytest.raises(ckpt.errors.UsageError, match="gguf"):
        ckpt.Run(made).export(tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
    assert call("export", made, "--to", tmp_path / "exp1.5").code == 0 and (tmp_path / "exp1.5").is_dir()
    assert call("export", made, "--to", tmp_path / "x.zip", "--format", "torch").code == 0


def test_dtype_unsupported_by_safetensors_is_rejected(tmp_path: Path, call: Any) -> None:
    """complex128 is rejected with the tensor's name for safetensors, but can be exported to a run."""
    model = nn.ParameterDict({"z": nn.Parameter(torch.randn(3, dtype=torch.complex128))})
    with ckpt.Checkpointer({"model": model}, str(tmp_path / "run")) as cp:
        cp.save(1).wait_durable()
    found = call("export", tmp_path / "run", "--to", tmp_path / "a")
    assert found.code == 2 and "model.z has dtype C128" in found.err
    assert call("export", tmp_path / "run", "--to", tmp_path / "b", "--format", "run").code == 0
    assert call("diff", tmp_path / "run", tmp_path / "b").code == 0


# -- the engine by itself --


def output_of(origin: MemoryOrigin, draw: random.Random) -> tuple[Output, dict[str, bytes]]:
    """Return files with random literals and tensors, and their expected bytes."""
    files, expected = [], {}
    for number in range(draw.randrange(1, 4)):
        parts, raw = list[Literal | TensorRun](), b""
        for _ in range(draw.randrange(1, 9)):
            if draw.random() < 0.4 or not origin.tensors:
                data = bytes(4 * draw.randrange(1, 4000))
                parts.append(Literal(len(raw), data))
                raw += data
            else:
                label = draw.choice(sorted(origin.tensors))
                shape = origin.tensors[label].shape
                at = tuple(draw.randrange(n) for n in shape)
                sizes = tuple(draw.randrange(1, n - i + 1) for i, n in zip(at, shape, strict=True))
                parts.append(TensorRun(len(raw), label, (at, sizes), "F32"))
                raw += origin.part(label, (at, sizes)).numpy().tobytes()
        ends = sorted(draw.sample(range(1, len(raw)), min(3, len(raw) - 1)))
        sums = tuple(zip(ends, [*ends[1:], len(raw)], strict=True))
        files.append(OutFile(f"f{number}", len(raw), tuple(parts), sums))
        expected[f"f{number}"] = raw
    return Output("test", tuple(files), lambda folder, sums: None, side_by_side=draw.random() < 0.5), expected


@pytest.mark.parametrize("seed", range(10))
def test_any_plan_works_with_any_window(tmp_path: Path, seed: int) -> None:
    """For any files and window sizes, the bytes and checksums are correct."""
    from ckpt.core.format.digest import chunk_digest

    draw = random.Random(seed)
    origin = MemoryOrigin({f"t{i}": torch.randn(draw.randrange(1, 60), 50) for i in range(3)})
    output, expected = output_of(origin, draw)
    found: dict[str, dict[int, bytes]] = {}
    output = Output(output.kind, output.files, lambda f, s: found.update({k: dict(v) for k, v in s.items()}),
                    side_by_side=output.side_by_side)  # fmt: skip
    window = 4096 * draw.randrange(1, 9)
    if draw.random() < 0.5:
        origin.fail_after = draw.randrange(1, 20)
        with contextlib.suppress(ckpt.errors.CorruptError):
            asyncio.run(export.export(origin, output, tmp_path / "out", window=window))
        origin.fail_after = -1
    if not (tmp_path / "out").exists():
        asyncio.run(export.export(origin, output, tmp_path / "out", window=window))
    for file in output.files:
        raw = (tmp_path / "out" / file.name).read_bytes()
        assert raw == expected[file.name]
        assert found[file.name] == {start: chunk_digest(raw[start:stop]) for start, stop in file.sums}


def test_disk_error_is_one_line(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """A disk error during the export gives one line with what is kept and how to continue."""
    real = export._write_all
    count = iter(range(100))

    def failing(fd: int, data: memoryview, at: int) -> None:
        if next(count) == 1:
            raise OSError(5, "Input/output error")
        real(fd, data, at)

    monkeypatch.setattr(export, "_write_all", failing)
    found = call("restore", made, "--to", tmp_path / "a", "--only", "*")
    assert found.code == 2 and "continue from there" in found.err and "Traceback" not in found.err
    assert call("restore", made, "--to", tmp_path / "a", "--only", "*").code == 0


def test_different_exports_have_different_checkpoint_ids(made: Path, tmp_path: Path, call: Any) -> None:
    """The same step with other options gets another checkpoint id, so copies in one folder are not confused."""
    checkpoints = set()
    for number, args in enumerate(([], ["--dtype", "bf16"], ["--only", "model"], ["--world-size", "2"])):
        assert call("export", made, "--to", tmp_path / str(number), "--format", "run", *args).code == 0
        checkpoints.add(call("show", tmp_path / str(number), "--json").json["id"])
    assert len(checkpoints) == 4
