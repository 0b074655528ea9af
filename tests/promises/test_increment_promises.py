"""Increments together with other features: rollbacks, memory, copies of a run, detected damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt
import inside
from processes import run_script
from test_increments import build, flip, newest, train

MEMORY_ONLY = """
import os, signal, sys
import ckpt, test_increments as t

state = t.build(size=300)
with ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=1, keep=4, compression="zstd")) as cp:
    start = cp.restore(default=0)
    restored = cp.last_restore
    if start:
        print(start, restored.tier, restored.verified, t.digest(state))
        sys.exit()
    for step in range(1, 7):
        t.train(state, step)
        cp.step(step).wait_durable(60)
    print(6, "memory", True, t.digest(state), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_memory_is_restored_after_saves_with_deltas(run_dir: str) -> None:
    """The digests of a snapshot are those of its own chunks, whatever the last save of it was based on: it comes from
    memory, verified, bit for bit."""
    first = run_script(MEMORY_ONLY, run_dir)
    assert newest(run_dir).has_bases, "there were no deltas"
    second = run_script(MEMORY_ONLY, run_dir)
    assert second.returncode == 0, second.stderr[-2000:]
    assert second.stdout == first.stdout


def test_tiers_with_the_same_root_id_do_not_delete_each_others_files(run_dir: str) -> None:
    """A tier that was filled by copying a run's folder has the same root id, but then stores checkpoints differently:
    the known files of one are not assumed for the other."""
    near, far = run_dir, f"{run_dir}-copy"
    state = build(size=300)

    def go(steps: range, *places: ckpt.Tier) -> None:
        with ckpt.Checkpointer(state, [*places]) as cp:
            cp.restore(default=0)
            for step in steps:
                train(state, step)
                save = cp.step(step)
                assert save is not None
                save.wait_durable(60, tier="all")

    go(range(1, 4), ckpt.Tier(far, every=1, keep=2))
    shutil.copytree(far, near)
    zstd = ckpt.Tier(far, every=1, keep=2, compression="zstd")
    go(range(4, 12), ckpt.Tier(near, every=1, keep=2, compression="none"), zstd)
    assert inside.lasting_problems_at(near) == inside.lasting_problems_at(far) == []
    assert inside.steps_at(near)[:2] == inside.steps_at(far)[:2] == [11, 10]


def test_load_repairs_a_damaged_chunk_from_another_step(run_dir: str) -> None:
    """`ckpt.load` repairs as a restore does. Control: with that checkpoint damaged too, it raises the damage."""
    state = build(size=300)
    with ckpt.Checkpointer(state, [ckpt.Tier(run_dir, every=1, keep=3, compression="none")], memory=None) as cp:
        cp.restore(default=0)
        for step in range(1, 5):
            train(state, step)
            cp.save(step).wait_durable(60)
    places = {saved.place_of("model.frozen.weight") for saved in inside.history(run_dir).values()}
    assert len(places) > 1
    for n, (key, offset) in enumerate(sorted(places)):
        flip(Path(run_dir, key), offset + 100)
        last = n == len(places) - 1
        if last:
            with pytest.raises(ckpt.errors.CorruptError, match="frozen"):
                ckpt.load(run_dir)["model.frozen.weight"]
        else:
            assert ckpt.load(run_dir)["model.frozen.weight"].equal(state["model"]["frozen"].weight.detach())
