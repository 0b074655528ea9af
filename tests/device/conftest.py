"""Tests on the simulated device: each group runs in a pytest forked from a process whose torch has the device."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import processes
import simulated
from simulated import build

HERE = Path(__file__).parent
SIDE = "512"  # side of the squares in tests/promises/test_gpu.py: a megabyte, for kernels on one core


@dataclass(frozen=True)
class Outcome:
    """The result of the tests of one process."""

    code: int
    red: list[str]
    text: str

    @property
    def green(self) -> bool:
        return self.code == 0


RunTests = Callable[..., Outcome]


@pytest.fixture(scope="session")
def device_process() -> Iterator[processes.Zygote]:
    if why := build.why_not():
        pytest.skip(why)
    build.library()  # the first build may take half a minute
    zygote = processes.Zygote("pytest", "botocore.loaders", **{simulated.VARIABLE: ""})
    yield zygote
    zygote.close()


@pytest.fixture
def run_tests(device_process: processes.Zygote, monkeypatch: pytest.MonkeyPatch) -> RunTests:
    """Return a function that runs gpu tests. `arguments`: files and options; `knobs`: see `simulated.VARIABLE`."""

    def run_tests(*arguments: str, knobs: str = "") -> Outcome:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment |= {
            simulated.VARIABLE: knobs, "GPU_TEST_SIDE": SIDE, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": f"{HERE}:{processes.PYTHONPATH}",
        }  # fmt: skip
        options = ("-m", "pytest", "-p", "simulated.plugin", "-p", "no:cacheprovider", "-m", "gpu", "-q", "--no-header")
        done = processes.run_python(
            [sys.executable, *options, "--timeout", "60", *arguments],
            env=environment, cwd=str(processes.REPO), capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        text = done.stdout + done.stderr
        return Outcome(done.returncode, re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", text, re.M), text)

    monkeypatch.setattr(processes, "ZYGOTE", device_process)
    return run_tests
