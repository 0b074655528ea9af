"""What a script that ends has done, what memory that is acknowledged is worth, and trainings where memory is short."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from conftest import REPO, eventually, killed, run_script, writers

import ckpt

# Trains 25 steps, not all of which are due anywhere, and ends within the next one, by what the second argument says.
ENDING = """
import sys, torch, toy, ckpt
run, how, kind = sys.argv[1:]
state = toy.build()
sparse = [ckpt.Memory(every=10), ckpt.Tier(run, every=100), ckpt.Tier(run + "-far", every=1000)]
cp = ckpt.Checkpointer(state, run if kind == "auto" else sparse, every="auto" if kind == "auto" else None)

def train():
    start = cp.restore(default=0)
    for step in range(start, 25):
        toy.train_step(state)
        cp.step(step + 1, finite=step != 24)
    if how in ("end", "with", "close"):
        return
    state["model"](torch.randn(8, toy.WIDTH))  # the next step has begun: random numbers and buffers move on
    if how.startswith("raise"):
        raise ValueError("enough")
    if how.startswith("interrupt"):
        raise KeyboardInterrupt
    sys.exit(3)

if how.endswith("within") or how == "with":
    with cp:
        train()
else:
    train()
    if how == "close":
        cp.close()
"""


def restored(place: str, step: int | None = None) -> tuple[int, str]:
    """The step that a place gives back, and a digest of every bit of it."""
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, place, triggers=None) as cp:
        return cp.restore(step=step), toy.digest(state)


@pytest.mark.parametrize("kind", ["sparse", "auto"])
@pytest.mark.parametrize("how", ["with", "close", "end", "raise within", "raise", "interrupt within", "exit"])
def test_a_script_that_ends_keeps_its_last_step(run_dir: str, how: str, kind: str) -> None:
    """Whatever the cadences and however it ends: the last step() is in every tier, as it was then, bit for bit, also if
    the next step had begun; and what was said of it stays with it."""
    if kind == "auto" and how not in ("with", "raise within"):
        pytest.skip("the cadence makes no difference there")
    done = run_script(ENDING, run_dir, how, kind)
    assert done.returncode == {"i": 130, "e": 3}.get(how[0], 0) if how in ("exit", "with", "close", "end") else True
    wanted = (25, toy.reference(25))
    for place in [run_dir] if kind == "auto" else [run_dir, run_dir + "-far"]:
        assert restored(place, 25) == wanted, (place, done.stderr)
