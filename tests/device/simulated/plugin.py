"""`pytest -p simulated.plugin -m gpu`, with tests/device on PYTHONPATH: the tests that need a device get this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

import simulated

os.environ.setdefault(simulated.VARIABLE, "")  # for the processes that tests start
if "torch" not in sys.modules:  # else this process was forked from one that has the device
    simulated.install()
import torch  # noqa: F401

simulated.turn(**{**simulated.FIRST, **simulated.from_environment()})


@pytest.fixture(autouse=True)
def as_at_first() -> Iterator[None]:
    """No test leaves a device to the next that is broken, slower or hung."""
    yield
    simulated.core().heal()
    simulated.turn(**{**simulated.FIRST, **simulated.from_environment()})
