"""Increments together with other features: rollbacks, memory, copies of a run, detected damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt
import inside
from ckpt.errors import SaveError
from processes import run_script
from test_increments import build, differing, flip, frozen_copy, newest, train

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


def test_rollbacks_do_not_fence_the_job_itself(run_dir: str) -> None:
    """A save may say what it builds on in the very moment in which a rollback opens the next epoch of the same job."""
    state = build(size=300)
    places = [ckpt.Tier(run_dir, every=1, keep=6, compression="zstd")]
    with ckpt.Checkpointer(state, places, options=ckpt.Options(on_error="warn"), memory=ckpt.Memory(keep=4)) as cp:
        step = int(cp.restore(default=0))
        for _ in range(8):
            for _ in range(3):
                step += 1
                train(state, step)
                cp.step(step)
            step = int(cp.restore(step=step - 1))
        train(state, step + 1)
        cp.save(step + 1).wait_durable(60)  # not fenced
    assert inside.lasting_problems_at(run_dir) == []


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


def test_damage_found_by_a_restore_is_not_built_on(run_dir: str) -> None:
    """The piece came from elsewhere, so the state is whole; the next checkpoint does not refer to the damaged bytes."""
    state = build(size=300)
    tier = ckpt.Tier(run_dir, every=1, keep=3, compression="none")
    with ckpt.Checkpointer(state, tier, memory=None) as cp:
        cp.restore(default=0)
        for step in range(1, 6):
            train(state, step)
            cp.save(step).wait_durable(60)
        wanted = frozen_copy(state)
    key, offset = newest(run_dir).place_of("model.frozen.weight")
    flip(Path(run_dir, key), offset + 100)
    other = build(seed=5, size=300)
    with ckpt.Checkpointer(other, tier, memory=None, options=ckpt.Options(on_error="warn")) as cp:
        assert cp.restore() == 5 and differing(other, wanted) == []
        assert cp.last_restore is not None and len(cp.last_restore.repaired) == 1
        train(other, 6)
        cp.save(6).wait_durable(60)
        assert newest(run_dir).place_of("model.frozen.weight") != (key, offset)
        wanted = frozen_copy(other)
    again = build(seed=6, size=300)
    with ckpt.Checkpointer(again, tier, memory=None) as cp:
        assert cp.restore() == 6 and not cp.last_restore.repaired  # type: ignore[union-attr]
    assert differing(again, wanted) == []


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


def test_save_error_about_damage_names_the_remedy(run_dir: str) -> None:
    """Damage found by the clean-up is raised once. Training continues, and the next save is intact."""
    state = build(size=300)
    tier = ckpt.Tier(run_dir, every=1, keep=2, compression="none")
    errors: list[str] = []
    with ckpt.Checkpointer(state, [tier]) as cp:
        cp.restore(default=0)
        for step in range(1, 13):
            train(state, step)
            try:
                cp.save(step).wait_durable(60)
                cp.wait(60)
            except SaveError as error:
                errors.append(str(error))
            if step == 5:
                key, offset = newest(run_dir).place_of("model.frozen.weight")
                flip(Path(run_dir, key), offset + 100)
    assert all("ckpt repair" in error and "Training can continue" in error for error in errors)
    assert inside.problems_of_newest(run_dir) == []
