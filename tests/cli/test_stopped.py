"""Ctrl-C in commands that create or delete something leaves nothing incomplete, and one line describes the result."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt
from commands import call, save, stopped
from processes import PYTHONPATH
from run_files import data_files

__all__ = ["call"]  # a fixture

COMMAND = "import sys\nfrom ckpt.tools.cli import main\nsys.exit(main())"
KILL_ITSELF = """
import os, signal
from ckpt.core.checkpoint import read
real = read.verify
async def verify(*given, **more):
    os.kill(os.getpid(), signal.SIGINT)
    return await real(*given, **more)
read.verify = verify
"""
SIZE = 3072  # a matrix of 36 MiB: three windows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with the steps 2, 4 and 6 of a large module, and its weights in a safetensors file."""
    folder = tmp_path_factory.mktemp("made")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    model = nn.Linear(SIZE, SIZE)
    save(folder / "run", {"model": model}, range(1, 7), compression="none")  # compressed, they would have several files
    patch.undo()
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


@pytest.mark.parametrize("name", ["hf", "x.pt", "dcp", "run"])
def test_stopped_export_is_resumed(made: Path, tmp_path: Path, call: Any, name: str) -> None:
    """The target does not exist. The same call resumes, and its result equals an uninterrupted export."""
    more = {"dcp": ("--format", "dcp"), "run": ("--format", "run", "--world-size", 2)}.get(name, ())
    target, whole = tmp_path / name, tmp_path / f"whole-{name}"
    line = stopped("export.window@2", "restore", made / "run", "--to", target, *more)
    assert line == "ckpt: stopped. Nothing was written yet: repeat the command to continue from here"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.partial"]
    assert call("export", made / "run", "--to", target, *more).code == 0
    assert call("export", made / "run", "--to", whole, *more).code == 0
    assert not list(tmp_path.glob("*.partial"))
    if name == "run":
        assert call("diff", target, made / "run").code == call("verify", target).code == 0
    else:
        files = [target] if target.is_file() else sorted(path for path in target.iterdir() if path.is_file())
        for file in files:
            twin = whole if file == target else whole / file.name
            assert file.read_bytes() == twin.read_bytes(), file


def test_export_stopped_at_the_end_is_complete(made: Path, tmp_path: Path, call: Any) -> None:
    line = stopped("export.appeared@1", "restore", made / "run", "--to", tmp_path / "hf")
    assert line == f"ckpt: stopped. {tmp_path / 'hf'} is complete"
    assert call("diff", tmp_path / "hf", made / "run", "--only", "*.weight").code == 0


def test_stopped_import_is_resumed(made: Path, tmp_path: Path, call: Any) -> None:
    """The run does not exist until it is complete. The same call resumes, and all bits equal those of the file."""
    target = tmp_path / "run"
    line = stopped("export.window@2", "import", made / "weights.safetensors", target)
    assert "Nothing was written yet" in line and not target.exists()
    assert call("import", made / "weights.safetensors", target).code == call("verify", target).code == 0
    found = ckpt.load(target)
    for name, tensor in load_file(made / "weights.safetensors").items():
        assert torch.equal(found[f"model.{name}"], tensor)


@pytest.mark.parametrize("point", ["plan.landed@1", "sweep.deleted@1"])
def test_stopped_rm_leaves_an_intact_run(made: Path, tmp_path: Path, call: Any, point: str) -> None:
    """The run is intact, and the message is correct: `ckpt gc` deletes the rest of the step, and all others stay."""
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))
    assert "`ckpt gc` deletes their remaining files" in stopped(point, "rm", f"{run}@2", "--yes")
    assert call("verify", run, "--all").code == 0
    assert [one["step"] for one in call("ls", run, "--json").json["checkpoints"]] == [6, 4]
    assert call("gc", run, "--yes").code == 0
    left = data_files(run)
    assert call("gc", run, "--json").json["files"] == 0 and len(left) == 2, left
    assert call("verify", run, "--all").code == 0


def interrupted(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command that gets SIGINT when it starts to read a checkpoint."""
    command = [sys.executable, "-c", f"{KILL_ITSELF}{COMMAND}", *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=120, check=False
    )


def test_rm_stopped_early_deletes_nothing(made: Path, tmp_path: Path, call: Any) -> None:
    """During the check of the remaining checkpoint, nothing is deleted yet. The same call then deletes the step."""
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))
    done = interrupted("rm", f"{run}@2", "--yes")
    assert (done.returncode, done.stderr.strip()) == (130, "ckpt: stopped. Nothing was deleted: repeat the command")
    assert [one["step"] for one in call("ls", run, "--json").json["checkpoints"]] == [6, 4, 2]
    assert call("verify", run, "--all").code == call("rm", f"{run}@2", "--yes").code == 0


def test_stopped_verify_prints_one_line(made: Path) -> None:
    done = interrupted("verify", made / "run")
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "ckpt: stopped", "")


SLOW_IMPORT = """
import sys, time
class Slow:  # a cold disk
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("options", [["-m", "ckpt"], ["-c", COMMAND], ["-c", COMMAND.replace("cli", "cli.app")]])
def test_command_stopped_during_imports_prints_one_line(tmp_path: Path, options: list[str]) -> None:
    """One line and no traceback is printed, even during imports. Control: without `cli.main` there is a traceback."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PYTHONPATH}"}
    command = [sys.executable, *options, "--help"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1]
    if "app" in options[1]:
        assert "Traceback" in stderr
    else:
        assert (process.returncode, stderr) == (130, "ckpt: stopped\n")
