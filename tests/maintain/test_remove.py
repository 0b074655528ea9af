"""`ckpt rm` deletes one checkpoint, and all others stay restorable."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.core.checkpoint import retention
from ckpt.core.log.run_log import RunLog
from ckpt.errors import UnreadableError
from ckpt.store import open_store
from ckpt.tools.maintain import prune, remove
from commands import call, flip, increments
from run_files import checkpoint_files, data_file
from trees import tree

__all__ = ["call", "increments"]  # fixtures


@pytest.fixture
def run(increments: Path, tmp_path: Path) -> Path:
    """Return a copy of a run with the steps 1 to 5: 1, 2 and 5 full, 3 and 4 increments."""
    retention._cache.clear()  # another test may have cached a better state of this run
    return Path(shutil.copytree(increments, tmp_path / "run"))


def steps(run: Path, call: Any) -> list[int]:
    return [one["step"] for one in call("ls", run, "--json").json["checkpoints"]]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_remove_deletes_one_checkpoint_and_keeps_others_intact(run: Path, call: Any, step: int) -> None:
    """A full checkpoint with increments, an increment, the newest: all others verify and are unchanged."""
    rest = [n for n in (5, 4, 3, 2, 1) if n != step]
    before, size = {n: ckpt.load(run, step=n).all() for n in rest}, sum(map(len, tree(run).values()))
    assert call("rm", f"{run}@{step}", "--yes").code == 0
    assert steps(run, call) == rest
    assert call("verify", run, "--all").code == 0
    for n in rest:
        after = ckpt.load(run, step=n).all()
        assert all(torch.equal(after[name], before[n][name]) for name in before[n]), n
    assert call("gc", run, "--yes").code == 0 and call("verify", run, "--all").code == 0
    assert sum(map(len, tree(run).values())) < size


def test_remove_refuses_pinned_checkpoint(run: Path, call: Any) -> None:
    call("pin", f"{run}@3", "--note", "as published", "--yes")
    refused = call("rm", f"{run}@3", "--yes")
    assert refused.code == 2 and "as published" in refused.err
    assert call(*refused.err.replace("\n", " ").split("`ckpt ")[1].partition("`")[0].split()).code == 0
    assert call("rm", f"{run}@3", "--yes").code == 0 and steps(run, call) == [5, 4, 2, 1]


def test_remove_refuses_last_checkpoint(run: Path, call: Any) -> None:
    for step in (1, 2, 3, 4):
        assert call("rm", f"{run}@{step}", "--yes").code == 0
    refused = call("rm", f"{run}@5", "--yes")
    assert refused.code == 2 and "the only checkpoint" in refused.err and steps(run, call) == [5]


def test_remove_refuses_while_remaining_checkpoint_is_damaged(run: Path, call: Any) -> None:
    file = data_file(run, 5)
    flip(file, file.stat().st_size // 2)
    before = tree(run)
    refused = call("rm", f"{run}@4", "--yes")
    assert refused.code == 1 and "step 5 is damaged" in refused.out and tree(run) == before
    assert call("rm", f"{run}@5", "--yes").code == 0  # a damaged checkpoint can be deleted
    assert steps(run, call) == [4, 3, 2, 1] and call("verify", run, "--all").code == 0


def test_remove_deletes_each_of_two_unreadable_checkpoints(run: Path, call: Any) -> None:
    """Each of two can be deleted, even the newest. Files that others need stay until the last one is deleted."""
    for path in checkpoint_files(run, step=1) + checkpoint_files(run, step=5):  # full ones that no other is built on
        path.unlink()
    retention._cache.clear()
    rest = {n: ckpt.load(run, step=n).all() for n in (4, 3, 2)}
    assert call("ls", run).out.count("gone") == 2
    refused = call("rm", f"{run}@4", "--yes")
    assert refused.code == 2 and f"`ckpt rm file://{run}@1 --yes` deletes" in refused.err
    first = call("rm", f"{run}@5", "--yes")
    assert first.code == 0 and "while step 1 cannot be read" in first.out and "0 files" in first.out
    assert steps(run, call) == [4, 3, 2, 1]
    second = call("rm", f"{run}@1", "--yes")
    assert second.code == 0 and "cannot be read" not in second.out and steps(run, call) == [4, 3, 2]
    assert call("gc", run, "--yes").code == 0 and call("verify", run, "--all").code == 0
    assert all(torch.equal(ckpt.load(run, step=n).all()[name], rest[n][name]) for n in rest for name in rest[n])


@pytest.mark.parametrize(("step", "away"), [(5, (1, 2, 3, 4)), (5, (1,)), (5, (1, 5))])
def test_remove_refuses_while_others_are_unreadable(run: Path, step: int, away: tuple[int, ...]) -> None:
    """This holds even if the checkpoint to delete is unreadable too. Damaged ones would be skipped."""

    async def plan() -> remove.RemovalPlan:
        log = RunLog(open_store(str(run)))
        await log.open()
        stock = await prune.take_stock(log)
        unread = {one: UnreadableError("Stale file handle") for one in stock.seen if one.step in away}
        stock = replace(stock, used={a: k for a, k in stock.used.items() if a not in unread}, unread=unread)
        return remove.plan_removal(log, stock, next(c for a, c in log.state.commits.items() if a.step == step))

    with pytest.raises(UnreadableError, match=r"step 1.* cannot be read now"):
        asyncio.run(plan())


def test_negative_control_sweep_without_checks_deletes_shared_files(
    run: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all files that step 2 wrote were deleted, its increments would not verify."""
    everything = lambda state, retiring, verified, used, listed: sorted(  # noqa: E731
        key for checkpoint in retiring for key in used[checkpoint]
    )
    monkeypatch.setattr(retention, "plan_deletion", everything)
    call("rm", f"{run}@2", "--yes")
    assert call("verify", run, "--all").code == 1
