"""Ctrl-C in commands that make or delete something: nothing is left half, and one line says what is true."""

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
SIZE = 3072  # of a matrix of 36 MiB: three windows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 2, 4 and 6 of a large module, and its weights as another program saves them."""
    folder = tmp_path_factory.mktemp("made")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    model = nn.Linear(SIZE, SIZE)
    save(folder / "run", {"model": model}, range(1, 7), compression="none")  # compressed they have several files
    patch.undo()
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


@pytest.mark.parametrize("name", ["hf", "x.pt", "x.safetensors", "dcp", "run"])
def test_an_export_that_is_stopped(made: Path, tmp_path: Path, call: Any, name: str) -> None:
    """Nothing has the name that was asked for; the same call goes on, and what it makes is what an export makes that
    nobody stopped."""
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


def test_an_export_that_is_stopped_when_it_is_there(made: Path, tmp_path: Path, call: Any) -> None:
    """What has its name already is whole, and that is what is said."""
    line = stopped("export.appeared@1", "restore", made / "run", "--to", tmp_path / "hf")
    assert line == f"ckpt: stopped. {tmp_path / 'hf'} is complete"
    assert call("diff", tmp_path / "hf", made / "run", "--only", "*.weight").code == 0


def test_an_import_that_is_stopped(made: Path, tmp_path: Path, call: Any) -> None:
    """There is no run before it is whole; the same call goes on, and all bits are those of the file."""
    target = tmp_path / "run"
    line = stopped("export.window@2", "import", made / "weights.safetensors", target)
    assert "Nothing was written yet" in line and not target.exists()
    assert call("import", made / "weights.safetensors", target).code == call("verify", target).code == 0
    found = ckpt.load(target)
    for name, tensor in load_file(made / "weights.safetensors").items():
        assert torch.equal(found[f"model.{name}"], tensor)


@pytest.mark.parametrize("point", ["plan.landed@1", "sweep.deleted@1"])
def test_giving_up_that_is_stopped(made: Path, tmp_path: Path, call: Any, point: str) -> None:
    """The run is sound, and what the line says is true: `ckpt gc` takes what is left of the step, all others stay."""
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))
    assert "`ckpt gc` deletes their remaining files" in stopped(point, "rm", f"{run}@2", "--yes")
    assert call("verify", run, "--all").code == 0
    assert [one["step"] for one in call("ls", run, "--json").json["checkpoints"]] == [6, 4]
    assert call("gc", run, "--yes").code == 0
    left = data_files(run)
    assert call("gc", run, "--json").json["files"] == 0 and len(left) == 2, left
    assert call("verify", run, "--all").code == 0


def interrupted(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command that gets SIGINT when it begins to read a checkpoint."""
    words = [sys.executable, "-c", f"{KILL_ITSELF}{COMMAND}", *map(str, arguments)]
    return subprocess.run(
        words, env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=120, check=False
    )


def test_giving_up_that_is_stopped_before_anything_goes(made: Path, tmp_path: Path, call: Any) -> None:
    """While the checkpoint that stays is read back: all are there, and the same call gives the step up."""
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))
    done = interrupted("rm", f"{run}@2", "--yes")
    assert (done.returncode, done.stderr.strip()) == (130, "ckpt: stopped. Nothing was deleted: repeat the command")
    assert [one["step"] for one in call("ls", run, "--json").json["checkpoints"]] == [6, 4, 2]
    assert call("verify", run, "--all").code == call("rm", f"{run}@2", "--yes").code == 0


def test_looking_that_is_stopped(made: Path) -> None:
    """A command that only looks says so in a line as well."""
    done = interrupted("verify", made / "run")
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "ckpt: stopped", "")


SLOWLY = """
import sys, time
class Slow:  # a cold disk
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("words", [["-m", "ckpt"], ["-c", COMMAND], ["-c", COMMAND.replace("cli", "cli.app")]])
def test_a_command_that_is_stopped_before_it_has_begun(tmp_path: Path, words: list[str]) -> None:
    """One line, and no traceback, also while it is being imported. Control: without `cli.main` there is one."""
    (tmp_path / "sitecustomize.py").write_text(SLOWLY)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PYTHONPATH}"}
    command = [sys.executable, *words, "--help"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    if "app" in words[1]:
        assert "Traceback" in said
    else:
        assert (process.returncode, said) == (130, "ckpt: stopped\n")
