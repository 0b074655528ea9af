"""The oldest torch with the oldest Python that pyproject.toml claims, and the newest with the newest that can be had.
In environments of their own, which have what a user of the library gets, and pytest.

Only builds of torch without CUDA are taken, since the others are of several GB: `make test-corners` takes those, too.
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
# State of every kind, files of torch.save, snapshots and checkpoints, kills of either process, several ranks.
FILES = ("state", "convert/test_source_files.py", "test_best.py", "promises/test_kill.py", "promises/test_ranks.py")
OLDEST = re.sub("[^0-9.]", "", PROJECT["requires-python"])


def torch_from() -> str:
    (found,) = (one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith("torch>="))
    return f"{found}.0" if found.count(".") == 1 else found


def pythons() -> Iterator[Path]:
    """Those that run, the newest first: on the path, and of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(20, int(OLDEST.partition(".")[2]) - 1, -1):
        name = f"python3.{minor}"
        for found in (shutil.which(name), *sorted(root.glob(f"versions/3.{minor}.*/bin/{name}"))):
            if found and subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0:
                yield Path(found)
                break


def builds(python: Path, *, any_build: bool) -> list[str]:
    """The versions of torch that pip finds for it, the newest first; on x86 Linux a build without CUDA says so."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    listed = re.search("Available versions: (.*)", said)
    found = listed[1].split(", ") if listed else []
    some = any_build or sys.platform != "linux" or platform.machine() != "x86_64"
    return [one for one in found if some or one.endswith("+cpu")]


def corner(which: str, any_build: bool) -> tuple[Path, str]:
    """An interpreter of an environment, and which torch it has."""
    oldest, why = which == "oldest", f"no build of torch without CUDA is to be had here for Python from {OLDEST}"
    for python in reversed(list(pythons())) if oldest else pythons():
        for torch in builds(python, any_build=any_build):
            if oldest and torch.partition("+")[0] != torch_from():
                continue
            minor = re.sub(r"^python3\.|\D", "", python.name)
            if (torch, int(minor)) == (version("torch"), sys.version_info[1]):
                pytest.skip(f"the {which} that can be had here, torch {torch} and Python 3.{minor}, runs all tests")
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
def test_what_is_claimed(which: str, request: pytest.FixtureRequest) -> None:
    """Whoever has it gets what is promised: the tests of it pass there."""
    python, torch = corner(which, request.config.getoption("--any-build"))
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "CKPT_"))}
    environment["PYTHONPATH"] = PYTHONPATH
    paths = [f"tests/{name}" for name in FILES]
    ended = subprocess.run([str(python), *words, *paths], cwd=REPO, env=environment, capture_output=True, text=True)
    print(torch, ended.stdout[-2000:])
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert re.search(r"\d+ passed", ended.stdout) and "failed" not in ended.stdout
