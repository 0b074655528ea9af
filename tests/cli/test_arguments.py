"""RUN@STEP selects the same checkpoint in every command and in `ckpt.load`."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.core.checkpoint import reference
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.store import normalise
from ckpt.tools.cli import app
from ckpt.tools.cli.terminal import human
from commands import call, save
from processes import PYTHONPATH, REPO
from run_files import data_bytes, data_files

__all__ = ["call"]  # a fixture


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    save(folder / "run", {"w": torch.arange(8.0)}, range(1, 7))
    patch.undo()
    return folder / "run"


@pytest.mark.parametrize(
    ("text", "run", "step"),
    [
        ("runs/exp1", "runs/exp1", None),
        ("runs/exp1@500", "runs/exp1", 500),
        ("runs/exp1@latest", "runs/exp1", "latest"),
        ("runs/a@b/exp1", "runs/a@b/exp1", None),
        ("runs/exp@v2", "runs/exp@v2", None),
        ("runs/exp@v2@7", "runs/exp@v2", 7),
        ("runs/exp1@7/", "runs/exp1@7/", None),
        ("runs/exp1@-7", "runs/exp1@-7", None),
        ("runs/exp1@7.5", "runs/exp1@7.5", None),
        ("@7", "@7", None),
        ("sftp://me@host/exp1", "sftp://me@host/exp1", None),
        ("sftp://me@host/exp1@12", "sftp://me@host/exp1", 12),
        ("s3://bucket/user@example.com/exp1", "s3://bucket/user@example.com/exp1", None),
        ("s3://bucket/user@example.com/exp1@latest", "s3://bucket/user@example.com/exp1", "latest"),
    ],
)
def test_only_a_last_at_before_a_step_counts(text: str, run: str, step: Any) -> None:
    assert reference.split(text) == (run, step)


def test_existing_folder_overrides_a_step(made: Path, tmp_path: Path, call: Any) -> None:
    """The folder is used even if the name could also be a step of another run, and it has its own steps."""
    shutil.copytree(made, tmp_path / "run")
    shutil.copytree(made, tmp_path / "run@4")
    assert call("show", tmp_path / "run@4", "--json").json["step"] == 6
    assert call("show", tmp_path / "run@4@2", "--json").json["step"] == 2
    assert call("show", tmp_path / "run@2", "--json").json["step"] == 2
    assert ckpt.load(tmp_path / "run@4").step == 6


def test_steps_of_url_and_option_must_agree(made: Path, call: Any) -> None:
    assert call("show", f"{made}@4", "--step", 4, "--json").json["step"] == 4
    refused = call("show", f"{made}@4", "--step", 2)
    assert refused.code == 2 and "use only one of them" in refused.err.replace("\n", " ")
    with pytest.raises(InvalidArgumentError, match="use only one of them"):
        ckpt.load(f"{made}@latest", step=2)


def steps_of(command: str, run: str, call: Any, tmp_path: Path) -> int:
    """Return the step that a command reports in its output."""
    more = {"copy": [tmp_path / "copy"], "diff": [run]}
    more |= {name: ["--to", tmp_path / "out.pt", "--dry-run"] for name in ("export", "restore")}
    found = call(command, run, *more.get(command, []), "--json").json
    match command:
        case "verify":
            (one,) = found["checkpoints"]
            return int(one["step"])
        case "copy":
            return int(found["copy"][0]["step"])
        case "repair":
            return int(found["steps"][0])
        case "export" | "restore":
            return int(found["source"].split("step ")[1].split()[0].strip(","))
        case "diff":
            return int(found["a"]["step"])
        case "rm":
            return int(found["remove"]["step"])
    return int(found["step"])


@pytest.mark.parametrize(
    "command", ["show", "verify", "copy", "repair", "export", "restore", "diff", "pin", "unpin", "rm"]
)
def test_every_command_accepts_a_step(command: str, made: Path, call: Any, tmp_path: Path) -> None:
    """Covers a given step, the newest and a missing one. Commands with a single run also have `--step`."""
    assert steps_of(command, f"{made}@4", call, tmp_path) == 4
    assert steps_of(command, f"{made}@latest", call, tmp_path) == 6
    with pytest.raises((AssertionError, ValueError, CheckpointError)):
        steps_of(command, f"{made}@5", call, tmp_path)
    if command != "diff":
        assert "--step" in call(command, "--help").out


def test_load_accepts_a_step(made: Path) -> None:
    assert ckpt.load(f"{made}@4").step == 4 and ckpt.load(f"{made}@latest").step == 6
    assert ckpt.load(f"{normalise(made)}@2").url == normalise(made)
    with pytest.raises(ckpt.errors.NoCheckpointError, match="step 5"):
        ckpt.load(f"{made}@5")


@pytest.mark.parametrize("command", ["ls", "gc", "prune", "faults", "report"])
def test_commands_for_whole_runs_reject_a_step(command: str, made: Path, call: Any) -> None:
    refused = call(command, f"{made}@4", *(["--keep-last", 2] if command == "prune" else []))
    assert refused.code == 2 and "a whole run" in refused.err


@pytest.mark.parametrize("command", ["pin", "unpin", "rm"])
def test_commands_that_change_a_checkpoint_require_a_step(command: str, made: Path, call: Any) -> None:
    refused = call(command, made, "--yes")
    assert refused.code == 2 and f"{made}@STEP" in refused.err


# -- runs below a folder --


def test_ls_lists_runs_in_subfolders(made: Path, tmp_path: Path, call: Any) -> None:
    """Runs in nested folders are listed with their newest steps. Other folders are ignored; a damaged run is named."""
    shutil.copytree(made, tmp_path / "runs" / "a")
    shutil.copytree(made, tmp_path / "runs" / "group" / "b")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "FORMAT.json").write_text("{}")
    found = call("ls", tmp_path / "runs", "--json").json["runs"]
    assert [(one["name"], one["newest"], one["checkpoints"]) for one in found] == [
        ("a", 6, 3), ("bad", None, 0), ("group/b", 6, 3),
    ]  # fmt: skip
    listing = call("ls", tmp_path / "runs")
    with contextlib.chdir(tmp_path / "runs"):
        assert call("ls").out == listing.out
    assert (
        listing.code == 0
        and "group/b" in listing.out
        and "bad cannot be read" in listing.out
        and "3 runs" in listing.out
    )
    assert call("ls", tmp_path / "runs" / "notes").code == 2


def test_private_folder_hides_no_run(made: Path, call: Any) -> None:
    """Another user's folder may or may not be a run: it is listed as unreadable, and the others are listed."""
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        for name in ("group/mine", "theirs"):
            shutil.copytree(made, parent / name)
        (parent / "group" / "x" / "deep").mkdir(parents=True)
        (parent / "theirs").chmod(0)
        (parent / "group" / "x" / "deep").chmod(0)
        parent.chmod(0o755)
        with nobody():
            listing, rows = call("ls", parent), call("ls", parent, "--json").json["runs"]
            assert call("ls", parent / "group" / "x").code == 2  # no run that could be named
        (parent / "group" / "x" / "deep").chmod(0o700)
        (parent / "theirs").chmod(0o700)
    assert [(one["name"], one["newest"], bool(one["problem"])) for one in rows] == [
        ("group/mine", 6, False), ("group/x/deep", None, True), ("theirs", None, True),
    ]  # fmt: skip
    assert listing.code == 0 and "theirs cannot be read: permission denied" in listing.out
    size = data_bytes(made)
    assert rows[0]["bytes_in_files"] == size and f"1 run, {human(size)} in files" in listing.out


def test_nightly_loop_of_the_guide_finds_damage(made: Path, tmp_path: Path) -> None:
    """The block in docs/guide/operate.md exits with 0 if all runs are intact, otherwise with 1 and the other names. A
    folder that is missing, has no runs, or is a run itself, gives an error."""
    page = (REPO / "docs" / "guide" / "operate.md").read_text()
    block = page[page.index("```bash\nset -eo") :].removeprefix("```bash\n").partition("```")[0]
    command, path = ["bash", "-c", block], f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "RUNS": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    for run in (tmp_path / "nothing", tmp_path, made):
        none = subprocess.run(command, capture_output=True, text=True, env={**environment, "RUNS": str(run)})
        assert none.returncode != 0 and none.stderr, run
    for name in ("good one", "hurt"):
        shutil.copytree(made, tmp_path / name)
    good = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (good.returncode, good.stdout) == (0, "")
    file = data_files(tmp_path / "hurt")[-1]
    file.write_bytes(file.read_bytes()[:-1])
    bad = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (bad.returncode, bad.stdout) == (1, f"file://{tmp_path}/hurt: exit code 1\n")


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Drop root privileges, because root can read every folder."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_commands_explain_use_with_a_folder_of_runs(made: Path, tmp_path: Path, call: Any) -> None:
    """`ckpt report` prints a command for each run, which works. Others refer to `ckpt ls` if there are runs."""
    shutil.copytree(made, tmp_path / "my runs" / "group" / "b")
    listing = call("report", tmp_path / "my runs")
    (command,) = [line for line in listing.out.splitlines() if line.startswith("ckpt report ")]
    assert listing.code == 0 and "contains 1 run" in listing.out
    assert call(*shlex.split(command)[1:]).code == 0
    assert call("report", tmp_path / "my runs", "--json").json["runs"] == [f"file://{tmp_path}/my runs/group/b"]
    refused = call("show", tmp_path / "my runs")
    assert refused.code == 2 and f"`ckpt ls '{tmp_path}/my runs'` lists them" in refused.err
    (tmp_path / "none").mkdir()
    assert call("report", tmp_path / "none").code == call("show", tmp_path / "none").code == 2


# -- the names of the command --


def test_command_runs_as_a_module(made: Path) -> None:
    """This is needed if another package has a command `ckpt`. `everystep` is the same command."""
    command = [sys.executable, "-m", "ckpt", "ls", str(made)]
    ended = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": PYTHONPATH}, check=True)
    assert "3 checkpoints" in ended.stdout
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["everystep"] == scripts["ckpt"] == f"{app.__package__}:main"
