"""Tests of texts for people."""

from __future__ import annotations

import pytest

from ckpt.units import are, count_of


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps are"), (1, "1 step is"), (2, "2 steps are")])
def test_count_of_agrees_with_number(number: int, text: str) -> None:
    """One thing is singular; zero and more are plural. Large numbers have separators."""
    assert f"{count_of(number, 'step')} {are(number)}" == text
    assert count_of(12000, "file") == "12,000 files"
