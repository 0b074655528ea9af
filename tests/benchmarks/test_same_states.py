"""The comparison of two versions finds this version equal to itself, and a wrong bit of another one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import same_states

WRONG_BIT = """
import sys
if any("same_states_job" in word for word in sys.orig_argv):
    import ckpt, torch
    restore = ckpt.Checkpointer.restore
    def wrong(cp, *arguments, **options):
        step = restore(cp, *arguments, **options)
        if step == 4:
            next(iter(sys.modules["__main__"].restored.values())).view(torch.uint8)[0] ^= 1
        return step
    ckpt.Checkpointer.restore = wrong
"""


def test_differences_lists_changed_and_missing_states() -> None:
    assert same_states.differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b", "c"]
    found = {"trained 2": "x", "trained 4": "y", "restored 2": "x", "restored the newest, 4": "x"}
    assert same_states.inconsistent(found) == ["restored the newest, 4"]


@pytest.mark.long
def test_compare_finds_one_wrong_bit_of_the_other_version(tmp_path: Path) -> None:
    """Control: everything else is equal, so each version is deterministic."""
    for name in ("ckpt", "backends"):
        (tmp_path / name).symlink_to(REPO / name)
    (tmp_path / "sitecustomize.py").write_text(WRONG_BIT)
    differing, count = same_states.compare((REPO, tmp_path), 2, False)
    assert count > 20
    assert differing == ["restored 4", f"restored 4, with {tmp_path}"]
