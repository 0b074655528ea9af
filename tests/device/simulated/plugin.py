"""`pytest -p simulated.plugin -m gpu`, with tests/device on PYTHONPATH: tests that need a device use this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

import simulated

os.environ.setdefault(simulated.VARIABLE, "")  # for the processes that tests start
if "torch" not in sys.modules:  # otherwise this process was forked from one that has the device
    simulated.install()
import torch  # noqa: F401

simulated.turn(**{**simulated.FIRST, **simulated.from_environment()})


@pytest.fixture(autouse=True)
def as_at_first() -> Iterator[None]:
    """Prevent tests from leaving a broken, slower or hung device to the next test."""
    yield
    simulated.core().heal()
    simulated.turn(**{**simulated.FIRST, **simulated.from_environment()})
