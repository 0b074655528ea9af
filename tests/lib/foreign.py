"""Interpreters of other environments than the test's own, from benchmarks/environments.py. If one cannot be installed,
the test is skipped with pip's message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import REPO, warm

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
