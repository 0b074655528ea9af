"""Checks of the measurements of benchmarks/growth.py."""

from __future__ import annotations

import sys

from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import growth


def test_growth_curves_have_all_judged_figures() -> None:
    """Small points have all figures of each work, and sizes are those of real files."""
    marks = growth.checkpoints([1, 4])
    assert list(marks) == ["1", "4"] and marks["4"]["log_bytes"] > 2 * marks["1"]["log_bytes"]
    ranks = {str(world): growth.ranks(world, 20) for world in (1, 2)}
    assert ranks["2"]["index_bytes"] > ranks["1"]["index_bytes"]
    saved = growth.save(1, 40)
    assert 40 * 16 < saved["metadata_bytes"] < 40 * 1000
    points = ({"staged_s", "committed_s"}, saved), (growth.WORK["tensors, 256 MiB in all"], saved)
    points += ((growth.WORK["checkpoints of a run, 8 tensors each"], marks["4"]),)
    points += ((growth.WORK["ranks, 2,000 tensors each"], ranks["2"]),)
    assert all(names <= found.keys() for names, found in points)


def test_growth_reports_figures_that_exceed_their_work() -> None:
    """Tenfold work may cost ten times as much. Figures without work may not grow. Noise is ignored."""
    curve = "tensors, 256 MiB in all"
    points = {
        "10": {"step_s": 1.0, "committed_s": 1.0, "metadata_bytes": 10},
        "100": {"step_s": 10.5, "committed_s": 2.0, "metadata_bytes": 300},
    }
    found = growth.too_steep({curve: points})
    assert [text.split()[0] for text in found] == ["committed_s", "metadata_bytes"]
    assert found[0] == "committed_s grows 2 times from 10 to 100 tensors, 256 MiB in all; its work 1"
