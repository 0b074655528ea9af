"""The best steps of a run by a score: kept however old they get, and found by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

import ckpt
import toy
from ckpt.errors import NoCheckpointError, UsageError
from commands import call

__all__ = ["call"]  # a fixture

LOSSES = {2: 0.9, 4: 0.3, 6: 0.5, 8: math.nan, 10: 0.4, 12: 0.8}


def train(run: str, best: ckpt.Best, last: int, losses: dict[int, float]) -> dict[int, str]:
    """Go on to a step, and score some; the digests of the state at those."""
    state, digests = toy.build(), {}
    with ckpt.Checkpointer(state, run, every=1, keep=2) as cp:
        for step in range(cp.restore(default=0) + 1, last + 1):
            toy.train_step(state)
            cp.step(step)
            if step in losses:
                best.score(cp, step, losses[step])
                digests[step] = toy.digest(state)
    return digests


def kept(run: str) -> dict[int, str]:
    return {one.step: one.kept for one in ckpt.Run(run).list() if one.kept}


def test_the_best_stay_and_are_found(run_dir: str, call: Any) -> None:
    """The two best of those that were scored, whatever `keep` says; by `load(best=True)` and RUN@best the very best."""
    train(run_dir, ckpt.Best("loss", keep=2), 12, LOSSES)
    assert kept(run_dir) == {4: "kept by training: best, loss=0.3", 10: "kept by training: loss=0.4"}
    assert 2 not in {one.step for one in ckpt.Run(run_dir).list()}
    assert ckpt.load(run_dir, best=True).step == ckpt.load(f"{run_dir}@best").step == 4
    assert call("show", f"{run_dir}@best", "--json").json["step"] == 4
    with pytest.raises(UsageError, match="one of them"):
        ckpt.load(run_dir, best=True, step=10)


def test_it_is_known_again_after_a_restart(run_dir: str) -> None:
    """By what the run itself says: a later start that scores worse changes nothing, a better one takes its place."""
    train(run_dir, ckpt.Best("acc", mode="max"), 4, {2: 0.7, 4: 0.5})
    train(run_dir, ckpt.Best("acc", mode="max"), 8, {6: 0.6})
    assert kept(run_dir) == {2: "kept by training: best, acc=0.7"} and ckpt.load(run_dir, best=True).step == 2
    train(run_dir, ckpt.Best("acc", mode="max"), 12, {10: 0.8})
    assert kept(run_dir) == {10: "kept by training: best, acc=0.8"} and ckpt.load(run_dir, best=True).step == 10


def test_a_step_that_was_not_due_is_saved_for_it(run_dir: str) -> None:
    """With the weights that it had."""
    state, best = toy.build(), ckpt.Best("loss")
    with ckpt.Checkpointer(state, run_dir, every=100) as cp:
        for step in range(1, 6):
            toy.train_step(state)
            cp.step(step)
            if step == 3:
                assert best.score(cp, 3, 0.1)
    again = toy.build()
    with ckpt.Checkpointer(again, run_dir) as cp:
        assert cp.restore(step=3) == 3
    assert toy.digest(again) == toy.reference(3)


def test_nothing_is_the_best_until_it_is_said(run_dir: str) -> None:
    train(run_dir, ckpt.Best("loss"), 2, {})
    with pytest.raises(NoCheckpointError, match="known as the best"):
        ckpt.load(run_dir, best=True)
    with ckpt.Checkpointer(toy.build(), name="only-memory") as cp, pytest.raises(UsageError, match="durable"):
        ckpt.Best("loss").score(cp, 1, 0.5)
