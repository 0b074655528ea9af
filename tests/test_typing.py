"""Type hints of the public API: a strict checker accepts valid uses and rejects invalid ones."""

from __future__ import annotations

import subprocess
import sys

from processes import REPO


def test_type_checker_accepts_only_valid_uses() -> None:
    """`tests/lib/typed.py` contains both. Unused ignores are errors, so untyped names would fail."""
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(REPO / "pyproject.toml"),
        str(REPO / "tests" / "lib" / "typed.py"),
    ]
    result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
