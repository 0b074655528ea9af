"""The simulated device is compiled once for concurrent callers, and reported as missing if it cannot be compiled."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from simulated import build


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the device, which is not compiled yet."""
    found = tmp_path / "cache" / "0123.so"
    monkeypatch.setattr(build, "_place", lambda: found)
    return found


def test_concurrent_callers_share_one_build(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second caller waits for the first one's complete file."""
    compiled: list[Path] = []

    def compile(place: Path) -> None:
        compiled.append(place)
        time.sleep(0.1)
        place.write_bytes(b"whole")

    monkeypatch.setattr(build, "_compile", compile)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(build.library().read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [place] and found == [b"whole"] * 3
    assert place.parent.stat().st_mode & 0o077 == 0


def test_failing_compiler_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error includes the compiler's output."""
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        build.library()
    assert [path.name for path in place.parent.iterdir()] == ["lock"]


def test_tests_are_skipped_without_a_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the remedy. A device that is already compiled needs no compiler."""
    monkeypatch.setenv("PATH", "")
    assert "g++" in build.why_not()
    place.parent.mkdir()
    place.write_bytes(b"")
    assert build.why_not() == ""
