"""`ckpt rm`: one checkpoint goes, and all that stays can be restored."""

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
    """A copy of a run with the steps 1 to 5: 1, 2 and 5 full, 3 and 4 built on them."""
    retention._cache.clear()  # another test may have had this run in a better state
    return Path(shutil.copytree(increments, tmp_path / "run"))


def steps(run: Path, call: Any) -> list[int]:
    return [one["step"] for one in call("ls", run, "--json").json["checkpoints"]]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_one_goes_and_the_others_stay_whole(run: Path, call: Any, step: int) -> None:
    """A full one that others build on, an increment, the newest: what is left verifies, and is what it was."""
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


def test_what_is_kept_stays(run: Path, call: Any) -> None:
    """Until it is let go, by the command that the refusal names."""
    call("pin", f"{run}@3", "--note", "as published", "--yes")
    refused = call("rm", f"{run}@3", "--yes")
    assert refused.code == 2 and "as published" in refused.err
    assert call(*refused.err.replace("\n", " ").split("`ckpt ")[1].partition("`")[0].split()).code == 0
    assert call("rm", f"{run}@3", "--yes").code == 0 and steps(run, call) == [5, 4, 2, 1]


def test_the_last_one_stays(run: Path, call: Any) -> None:
    for step in (1, 2, 3, 4):
        assert call("rm", f"{run}@{step}", "--yes").code == 0
    refused = call("rm", f"{run}@5", "--yes")
    assert refused.code == 2 and "the only checkpoint" in refused.err and steps(run, call) == [5]


def test_nothing_goes_while_the_one_to_stay_is_damaged(run: Path, call: Any) -> None:
    file = data_file(run, 5)
    flip(file, file.stat().st_size // 2)
    before = tree(run)
    refused = call("rm", f"{run}@4", "--yes")
    assert refused.code == 1 and "step 5 is damaged" in refused.out and tree(run) == before
    assert call("rm", f"{run}@5", "--yes").code == 0  # which is what one may want of it
    assert steps(run, call) == [4, 3, 2, 1] and call("verify", run, "--all").code == 0


def test_two_that_cannot_be_read_do_not_hold_each_other(run: Path, call: Any) -> None:
    """Each of two can be given up, also the newest; what the rest needs stays, and the last takes all files along."""
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
def test_nothing_goes_while_others_cannot_be_read_now(run: Path, step: int, away: tuple[int, ...]) -> None:
    """Also if the one to delete cannot be read either, when damaged ones would be left aside."""

    async def plan() -> remove.RemovalPlan:
        log = RunLog(open_store(str(run)))
        await log.open()
        stock = await prune.take_stock(log)
        unread = {one: UnreadableError("Stale file handle") for one in stock.seen if one.step in away}
        stock = replace(stock, used={a: k for a, k in stock.used.items() if a not in unread}, unread=unread)
        return remove.plan_removal(log, stock, next(c for a, c in log.state.commits.items() if a.step == step))

    with pytest.raises(UnreadableError, match=r"step 1.* cannot be read now"):
        asyncio.run(plan())


def test_negative_control_without_the_sweep_s_care_the_others_lose_files(
    run: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every file that step 2 has written went with it, the increments on it would not verify."""
    everything = lambda state, retiring, verified, used, listed: sorted(  # noqa: E731
        key for checkpoint in retiring for key in used[checkpoint]
    )
    monkeypatch.setattr(retention, "plan_deletion", everything)
    call("rm", f"{run}@2", "--yes")
    assert call("verify", run, "--all").code == 1
