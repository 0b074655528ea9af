"""What users write is typed: right uses pass a strict checker, wrong ones do not."""

from __future__ import annotations

import subprocess
import sys

from processes import REPO


def test_a_type_checker_takes_what_is_right_and_nothing_else() -> None:
    """`tests/lib/typed.py` has both; an ignore that nothing needs is an error, so it cannot pass by knowing nothing."""
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
