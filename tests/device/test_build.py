"""The simulated device is compiled once, whoever asks, and said to be missing where it cannot be."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from simulated import build


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it would lie, and does not."""
    found = tmp_path / "cache" / "0123.so"
    monkeypatch.setattr(build, "_place", lambda: found)
    return found


def test_two_that_ask_at_once_get_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and finds it whole."""
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


def test_a_compiler_that_fails_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is in the error."""
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        build.library()
    assert [path.name for path in place.parent.iterdir()] == ["lock"]


def test_without_a_compiler_the_tests_are_skipped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they say what to do; unless it has been compiled before."""
    monkeypatch.setenv("PATH", "")
    assert "g++" in build.why_not()
    place.parent.mkdir()
    place.write_bytes(b"")
    assert build.why_not() == ""
