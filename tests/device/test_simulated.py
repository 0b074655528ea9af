"""All tests marked gpu pass on the simulated device, so none of them needs a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from processes import REPO

# Each file, and the knobs of the device.
FILES = {
    "tests/promises/test_gpu.py": "devices=2,clock_ghz=2",
    "tests/promises/test_promise_provenance.py": "clock_ghz=4",
    "tests/test_events.py": "",
    "tests/device/test_device.py": "devices=2",
    "tests/device/test_copying.py": "devices=2,clock_ghz=2",
    "tests/device/test_contact.py": "devices=2",
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).stem)
def test_gpu_tests_pass_on_the_simulated_device(file: str, run_tests: Any) -> None:
    outcome = run_tests(file, knobs=FILES[file])
    assert outcome.green, outcome.text


def test_every_file_with_gpu_tests_is_listed() -> None:
    marked = [p for p in (REPO / "tests").rglob("test_*.py") if "pytest.mark.gpu" in p.read_text()]
    found = {path.relative_to(REPO).as_posix() for path in marked} - {Path(__file__).relative_to(REPO).as_posix()}
    assert found == set(FILES)
