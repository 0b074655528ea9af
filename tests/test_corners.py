"""Tests with the oldest torch and Python that pyproject.toml names, and with the newest that are available.

Each environment has the packages of a normal installation and pytest. Only builds of torch without CUDA are used,
since the others take several GB: `make test-corners` adds those.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from foreign import NotInstalled, apart
from processes import PYTHONPATH, REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
TESTS = ("pytest", "pytest-timeout", "hypothesis")
# State of every kind, files of torch.save, snapshots, checkpoints, kills of either process, several ranks.
FILES = ("state", "convert/test_source_files.py", "test_best.py", "promises/test_kill.py", "promises/test_ranks.py")
OLDEST = re.sub("[^0-9.]", "", PROJECT["requires-python"])


def torch_from() -> str:
    (found,) = (one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith("torch>="))
    return f"{found}.0" if found.count(".") == 1 else found


def pythons() -> Iterator[Path]:
    """Yield interpreters that start, the newest first: from PATH and from pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(20, int(OLDEST.partition(".")[2]) - 1, -1):
        name = f"python3.{minor}"
        for found in (shutil.which(name), *sorted(root.glob(f"versions/3.{minor}.*/bin/{name}"))):
            if found and subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0:
                yield Path(found)
                break


def builds(python: Path, *, any_build: bool) -> list[str]:
    """Return the versions of torch that pip finds for this Python, the newest first. x86 Linux builds name CUDA."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    listed = re.search("Available versions: (.*)", said)
    found = listed[1].split(", ") if listed else []
    some = any_build or sys.platform != "linux" or platform.machine() != "x86_64"
    return [one for one in found if some or one.endswith("+cpu")]


def corner(which: str, any_build: bool) -> tuple[Path, str]:
    """Return the interpreter of an environment and its version of torch."""
    oldest, why = which == "oldest", f"no build of torch without CUDA is available here for Python from {OLDEST}"
    for python in reversed(list(pythons())) if oldest else pythons():
        for torch in builds(python, any_build=any_build):
            if oldest and torch.partition("+")[0] != torch_from():
                continue
            minor = re.sub(r"^python3\.|\D", "", python.name)
            if (torch, int(minor)) == (version("torch"), sys.version_info[1]):
                pytest.skip(f"the {which} available here, torch {torch} and Python 3.{minor}, runs all tests")
            needs = [one for one in PROJECT["dependencies"] if not one.startswith("torch")]
            try:
                return apart(f"corner-3.{minor}-{torch}", python, f"torch=={torch}", *needs, *TESTS), torch
            except NotInstalled as error:
                why = str(error)
        if oldest:
            pytest.skip(f"torch {torch_from()} for Python {OLDEST}: {why}")
    pytest.skip(why)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_promises_hold_with_claimed_versions(which: str, request: pytest.FixtureRequest) -> None:
    python, torch = corner(which, request.config.getoption("--any-build"))
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "CKPT_"))}
    environment["PYTHONPATH"] = PYTHONPATH
    paths = [f"tests/{name}" for name in FILES]
    ended = subprocess.run([str(python), *words, *paths], cwd=REPO, env=environment, capture_output=True, text=True)
    print(torch, ended.stdout[-2000:])
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert re.search(r"\d+ passed", ended.stdout) and "failed" not in ended.stdout
