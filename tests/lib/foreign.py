"""Interpreters of other environments than that of the tests, by benchmarks/environments.py. Where one cannot be had, a
test is skipped, with what pip said."""

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
    """One that has this trainer beside our packages."""
    try:
        return python_of(trainer)
    except NotInstalled as error:
        pytest.skip(str(error))


def warmed(trainer: str, *modules: str, **variables: str) -> Iterator[Path]:
    """The same for a fixture, while which `processes.start_python` forks what that interpreter starts."""
    python = python_with(trainer)
    with warm(*modules, python=python, PYTHONWARNINGS="ignore", **variables):
        yield python
