"""Locations of runs: tiers that belong together, leftovers of deleted runs, and starts that save nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
import toy
from ckpt.errors import InvalidArgumentError, UsageError
from processes import eventually, run_script


def trained(tiers: list[Any], steps: int, **settings: Any) -> int:
    """Train the toy to this step. Return the step at which it began."""
    state = toy.build()
    with ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(linger_s=0), **settings) as cp:
        start: int = cp.restore(default=0)
        for step in range(start, steps):
            toy.train_step(state)
            cp.step(step + 1)
    return start


def listed(folder: Path) -> list[int]:
    return [one.step for one in ckpt.Run(folder).list()]


@pytest.mark.parametrize("swapped", [False, True])
def test_tiers_of_different_runs_are_refused(tmp_path: Path, swapped: bool) -> None:
    """The older run has more terms, so that it would take over the newer one, or the reverse. Neither is changed."""
    old, copy, new = (tmp_path / name for name in ("old", "copy", "new"))
    for steps in (2, 4, 6):
        trained([ckpt.Tier(str(old), every=1), ckpt.Tier(str(copy), every=1)], steps)
    trained([ckpt.Tier(str(new), every=1)], 9)
    before = listed(copy), listed(new)
    pair = [new, copy] if not swapped else [copy, new]
    with pytest.raises(UsageError, match="different runs"):
        trained([ckpt.Tier(str(one), every=1, keep=2) for one in pair], 20)
    assert (listed(copy), listed(new)) == before
    assert trained([ckpt.Tier(str(new), every=1)], 9) == 9  # its log is unchanged


def test_tier_that_was_left_out_joins_its_run_again(tmp_path: Path) -> None:
    """Negative control: both tiers have steps that the other one lacks, and one start in common."""
    near, far = tmp_path / "near", tmp_path / "far"
    both = [ckpt.Tier(str(near), every=1), ckpt.Tier(str(far), every=1)]
    assert trained(both, 2) == 0
    assert trained(both[:1], 4) == 2
    assert trained(both, 6) == 4
    assert listed(far)[0] == listed(near)[0] == 6


def test_copy_of_a_run_joins_it_as_a_tier(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    trained([ckpt.Tier(str(near), every=1)], 3)
    assert inside.command("copy", near, far) == 0
    assert trained([ckpt.Tier(str(near), every=1), ckpt.Tier(str(far), every=1)], 5) == 3
    assert listed(far)[0] == 5


def test_run_begins_beside_files_of_a_deleted_run(tmp_path: Path) -> None:
    """A writer may have renewed its lease while its run was deleted."""
    run = tmp_path / "run"
    trained([str(run)], 2)
    kept = (run / "latest.json").read_bytes()
    shutil.rmtree(run)
    run.mkdir()
    (run / "latest.json").write_bytes(kept)
    (run / "lease.json").write_bytes(kept)
    assert trained([str(run)], 2) == 0 and listed(run)[0] == 2


def test_file_url_of_this_machine_names_the_folder(tmp_path: Path) -> None:
    trained([f"file://localhost{tmp_path}/run"], 2)
    assert listed(tmp_path / "run")[0] == 2


@pytest.mark.parametrize("url", ["~nosuchuser/run", b"/tmp/\xff/run".decode("utf-8", "surrogateescape")])
def test_impossible_folder_is_an_invalid_argument(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        ckpt.Checkpointer({"w": torch.zeros(2)}, url)


STUCK = """
import sys, torch, ckpt
model = torch.nn.Linear(4, 4)
optim = torch.optim.AdamW(model.parameters())
tier = ckpt.Tier(sys.argv[1], every=int(sys.argv[2]))
with ckpt.Checkpointer({"m": model, "o": optim}, tier, memory=None, triggers=None) as cp:
    start = cp.restore(default=0)
    for step in range(start, start + 3):
        model(torch.ones(1, 4)).sum().backward()
        optim.step()
        cp.step(step + 1)
    if sys.argv[3] == "further":
        optim.step()  # the state is no longer that of the last step
"""


def test_restart_that_saves_nothing_ends_with_an_error(run_dir: str) -> None:
    """Otherwise a chain of jobs would repeat the same steps forever with exit code 0."""
    assert run_script(STUCK, run_dir, "3", "close").returncode == 0
    for _ in range(2):
        stuck = run_script(STUCK, run_dir, "1000", "further")
        assert stuck.returncode == 1 and "no step of this start, which continued from step 3, was saved" in stuck.stderr
    assert run_script(STUCK, run_dir, "1000", "close").returncode == 0
    assert listed(Path(run_dir))[0] == 6


def test_pin_of_an_expired_step_is_refused(run_dir: str) -> None:
    """A step that no tier has any more cannot be protected. A saved one, the present one and later ones can."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=2, full_every=1)) as cp:
        cp.restore(default=0)
        for step in range(1, 9):
            toy.train_step(state)
            cp.step(step)
        cp.wait()
        assert eventually(lambda: 3 not in listed(Path(run_dir)))  # the clean-up follows the last commit
        with pytest.raises(UsageError, match="step 3 cannot be pinned"):
            cp.pin(3)
        for step in (7, 8, 20):
            cp.pin(step)
        cp.wait()
    pinned = {one.step for one in ckpt.Run(run_dir).list() if one.pinned}
    assert pinned == {7, 8}
