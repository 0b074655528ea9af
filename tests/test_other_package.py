"""Tests of installations next to the PyPI package `ckpt`, which has the same import and command: warning or error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from processes import REPO

THEIRS = '"""A package to create checkpoints in code for easier debugging."""\n\n__version__ = "0.2.3"\n'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages, with ours in it."""
    for package in (REPO / "ckpt", REPO / "backends" / "ckpt_backends"):
        shutil.copytree(package, tmp_path / "site" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "site" / "everystep-0.1.0.dist-info").mkdir()
    return tmp_path / "site"


def add_theirs(site: Path, *, last: bool) -> None:
    """Install like `pip install ckpt`, before or after ours: the later one's `__init__.py` remains."""
    (site / "ckpt-0.2.3.dist-info").mkdir()
    (site / "ckpt" / "decorator.py").write_text("def ckpt(f):\n    return f\n")
    if last:
        (site / "ckpt" / "__init__.py").write_text(THEIRS)


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONWARNINGS": "default"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=site.parent)


def test_own_package_alone_logs_nothing(site: Path) -> None:
    ended = python(site, "-c", "import ckpt; print(ckpt.Tier.__name__)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Tier\n", "")


def test_own_package_over_other_logs_warning(site: Path) -> None:
    """It works until the other package is uninstalled, which removes our files."""
    add_theirs(site, last=False)
    ended = python(site, "-c", "import ckpt; print(ckpt.Tier.__name__)")
    assert (ended.returncode, ended.stdout) == (0, "Tier\n")
    assert ended.stderr.count("UserWarning") == 1 and "pip uninstall ckpt" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "ckpt", "ls", "runs"),
        ("-c", "from ckpt.tools.cli import main; main(['ls', 'runs'])"),  # like the script `everystep`
        ("-c", "from ckpt.checkpointer import Checkpointer"),
        ("-c", "import ckpt.lightning"),
        ("-m", "ckpt.writer_process"),
    ],
)
def test_other_package_over_own_raises_error(site: Path, words: tuple[str, ...]) -> None:
    """Any use of our modules raises an error that names the other package, and the remedy."""
    add_theirs(site, last=True)
    ended = python(site, *words)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("ImportError") and "--force-reinstall everystep" in last
