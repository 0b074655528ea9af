"""Interpreters of other environments than the test's own, from benchmarks/environments.py. If one cannot be installed,
the test is skipped with pip's message."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import PYTHONPATH, REPO, run_python, warm

sys.path.insert(0, str(REPO / "benchmarks"))

from environments import NotInstalled as NotInstalled
from environments import apart as apart
from environments import python_of


def python_with(trainer: str) -> Path:
    """Return an interpreter with this trainer and our packages."""
    try:
        return python_of(trainer)
    except NotInstalled as error:
        pytest.skip(str(error))


def warmed(trainer: str, *modules: str, **variables: str) -> Iterator[Path]:
    """The same for a fixture, while which `processes.start_python` forks what that interpreter starts."""
    python = python_with(trainer)
    with warm(*modules, python=python, PYTHONWARNINGS="ignore", **variables):
        yield python


def run_foreign(python: Path, code: str, *words: object, **environment: str) -> str:
    """Run code in another environment and return its output, forked from a warmed interpreter where there is one."""
    settings = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore", **environment}
    command = [str(python), "-c", code, *map(str, words)]
    ended = run_python(command, env=settings, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return str(ended.stdout)


def errors_of_versions(python: Path, package: str, ours: str, *versions: str, **environment: str) -> list[str]:
    """Return what the import of our integration says for versions of its package that it does not support."""
    code = f"""
import {package}, sys
for {package}.__version__ in sys.argv[1:]:
    try:
        import ckpt.{ours}
    except ImportError as error:
        print(str(error).splitlines()[0])
"""
    return run_foreign(python, code, *versions, **environment).splitlines()
