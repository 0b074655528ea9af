"""The PyPI package `ckpt` has the same import and the same command: where both are installed, that is said."""

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
    """Where packages are installed, with ours in it."""
    for package in (REPO / "ckpt", REPO / "backends" / "ckpt_backends"):
        shutil.copytree(package, tmp_path / "site" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "site" / "everystep-0.1.0.dist-info").mkdir()
    return tmp_path / "site"


def add_theirs(site: Path, *, last: bool) -> None:
    """As `pip install ckpt` does, before ours or after it: one `__init__.py` is of whoever came last."""
    (site / "ckpt-0.2.3.dist-info").mkdir()
    (site / "ckpt" / "decorator.py").write_text("def ckpt(f):\n    return f\n")
    if last:
        (site / "ckpt" / "__init__.py").write_text(THEIRS)


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONWARNINGS": "default"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=site.parent)


def test_alone_it_says_nothing(site: Path) -> None:
    """The negative control."""
    ended = python(site, "-c", "import ckpt; print(ckpt.Tier.__name__)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Tier\n", "")


def test_ours_over_theirs_is_a_warning(site: Path) -> None:
    """It works, until somebody uninstalls the other one, which takes our files with it."""
    add_theirs(site, last=False)
    ended = python(site, "-c", "import ckpt; print(ckpt.Tier.__name__)")
    assert (ended.returncode, ended.stdout) == (0, "Tier\n")
    assert ended.stderr.count("UserWarning") == 1 and "pip uninstall ckpt" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "ckpt", "ls", "runs"),
        ("-c", "from ckpt.tools.cli import main; main(['ls', 'runs'])"),  # what the script `everystep` does
        ("-c", "from ckpt.checkpointer import Checkpointer"),
        ("-c", "import ckpt.lightning"),
        ("-m", "ckpt.writer_process"),
    ],
)
def test_theirs_over_ours_is_an_error(site: Path, words: tuple[str, ...]) -> None:
    """As soon as anything of ours is used: it says which package that is, and what to do."""
    add_theirs(site, last=True)
    ended = python(site, *words)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("ImportError") and "--force-reinstall everystep" in last
