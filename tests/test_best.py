"""Tests of the best steps by a score: they are kept however old they get, and can be loaded by name."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import toy
from ckpt.errors import InvalidArgumentError, NoCheckpointError, UsageError
from commands import call
from parallel import free_port, launch
from processes import eventually, killed, run_script, writers

__all__ = ["call"]  # a fixture

LOSSES = {2: 0.9, 4: 0.3, 6: 0.5, 8: math.nan, 10: 0.41234567890123, 12: 0.8}


def train(run: Any, best: ckpt.Best, last: int, losses: dict[int, float]) -> None:
    """Continue to step `last`, and score some steps. `run`: a folder, of which two steps stay, or tiers."""
    state, alone = toy.build(), isinstance(run, str)
    with ckpt.Checkpointer(state, ckpt.Tier(run, every=1, keep=2) if alone else run, best=best) as cp:
        for step in range(cp.restore(default=0) + 1, last + 1):
            toy.train_step(state)
            cp.step(step)
            if step in losses:
                cp.score(step, losses[step])


def kept(run: str) -> dict[int, str]:
    return {one.step: one.pinned for one in ckpt.Run(run).list() if one.pinned}


def is_at(run: str, step: int) -> bool:
    """Return True if the checkpoint of this step has the training state of that step, bit for bit."""
    state = toy.build()
    with ckpt.Checkpointer(state, run, triggers=None) as cp:
        return cp.restore(step=step) == step and toy.digest(state) == toy.reference(step)


def test_best_steps_stay_and_load_by_name(run_dir: str, call: Any) -> None:
    """The two best of all scored steps stay, whatever `keep` is. `load(best=True)` and RUN@best return the best one."""
    train(run_dir, ckpt.Best("loss", keep=2), 12, LOSSES)
    assert kept(run_dir) == {4: "best, loss=0.3", 10: "loss=0.41234567890123"}
    assert 2 not in {one.step for one in ckpt.Run(run_dir).list()}
    assert ckpt.load(run_dir, best=True).step == ckpt.load(f"{run_dir}@best").step == 4
    assert call("show", f"{run_dir}@best", "--json").json["step"] == 4
    with pytest.raises(UsageError, match="not both"):
        ckpt.load(run_dir, best=True, step=10)
    ckpt.Run(run_dir).pin(10, "for the paper")
    listed = {line.split()[0]: line for line in call("ls", run_dir).out.splitlines() if "  " in line}
    assert listed["10"].endswith("  pinned: loss=0.4123; for the paper"), "in the row, with four digits"
    assert listed["4"].endswith("  pinned: best, loss=0.3") and "history" in listed["step"]
    assert is_at(run_dir, 4)


def test_restore_accepts_best(run_dir: str) -> None:
    """`restore(step="best")` restores the step with the best score of an earlier start or of this one, also without
    `best=`. Without scores, and for another word, the error names the remedy."""
    train(run_dir, ckpt.Best("loss", keep=2), 12, LOSSES)
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir, triggers=None) as cp:
        assert cp.restore(step="best") == 4 and toy.digest(state) == toy.reference(4)
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir, triggers=None, best=ckpt.Best("loss")) as cp:
        cp.restore()
        cp.score(4, 0.1)
        assert cp.restore(default=0, step="best") == 4
        with pytest.raises(InvalidArgumentError, match=r"step='newest': it must be the number of a step, \"best\""):
            cp.restore(step="newest")
    with ckpt.Checkpointer(toy.build(), f"{run_dir}-2", triggers=None) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable()
        with pytest.raises(InvalidArgumentError, match=r"no checkpoint of this run has a score.*best=ckpt\.Best"):
            cp.restore(step="best")
        assert cp.restore() == 1


def test_scores_are_known_after_a_restart(run_dir: str) -> None:
    """The run itself stores the scores: a worse score of a later start changes nothing, a better one replaces it."""
    train(run_dir, best := ckpt.Best("acc", mode="max"), 4, {2: 0.7, 4: 0.5})
    train(run_dir, best, 8, {6: 0.6})
    assert kept(run_dir) == {2: "best, acc=0.7"} and ckpt.load(run_dir, best=True).step == 2
    train(run_dir, best, 12, {10: 0.8})
    assert kept(run_dir) == {10: "best, acc=0.8"} and ckpt.load(run_dir, best=True).step == 10
    train(f"{run_dir}-2", best, 4, {4: 0.1})
    assert kept(f"{run_dir}-2") == {4: "best, acc=0.1"}, "another run has its own scores"


def test_score_saves_an_unscheduled_step(run_dir: str) -> None:
    """The step is saved immediately with its weights: when `wait()` returns, the log has the score."""
    state, best = toy.build(), ckpt.Best("loss")
    with ckpt.Checkpointer(state, run_dir, every=100, best=best) as cp:
        for step in range(1, 6):
            toy.train_step(state)
            cp.step(step)
            if step == 3:
                assert cp.score(3, torch.tensor(0.25)) and best.scores == [(0.25, 3)]
                cp.wait(60)
                assert kept(run_dir) == {3: "best, loss=0.25"}
    assert is_at(run_dir, 3)


def test_late_score_pins_a_saved_step(run_dir: str) -> None:
    """For example from a validation in the background: a saved step stays from then on."""
    state, best = toy.build(), ckpt.Best("loss")
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=2, keep=2), best=best, memory=None) as cp:
        for step in range(1, 12):
            toy.train_step(state)
            save = cp.step(step)
            if save is not None:
                save.wait_durable(60)
            if step == 5:
                assert cp.score(4, 0.5) and cp.score(5, 0.4) and not cp.score(2, 0.7)
                cp.wait(60)
                assert kept(run_dir) == {5: "best, loss=0.4"}
    assert kept(run_dir) == {5: "best, loss=0.4"} and is_at(run_dir, 5)


def test_invalid_score_changes_nothing(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """A step that was not made or is not saved, or a value that is not a number, does not change the best steps."""
    state, best = toy.build(), ckpt.Best("loss", keep=2)
    with ckpt.Checkpointer(state, run_dir, every=100, best=best) as cp:
        for step in range(1, 6):
            toy.train_step(state)
            cp.step(step)
            if step == 2:
                cp.score(2, 0.5)
        for wrong, why in (
            (6, "cannot be scored yet"),
            (-1, "cannot be scored"),
            ("5", "cannot be scored"),
            (True, "cannot be scored"),
            (4, "is not saved"),
        ):
            with pytest.raises(UsageError, match=why):
                cp.score(wrong, 0.1)  # type: ignore[arg-type]
        for value in ("0.1", None, torch.zeros(2), {}):
            with pytest.raises(UsageError, match="one number"):
                cp.score(5, value)  # type: ignore[arg-type]
        for number in (math.nan, -math.inf):
            assert not cp.score(5, number)
        toy.train_step(state)  # training has passed step 5 now
        with pytest.raises(UsageError, match="went on after step 5"):
            cp.score(5, 0.1)
        assert best.scores == [(0.5, 2)]
    assert kept(run_dir) == {2: "best, loss=0.5"} and is_at(run_dir, 2)
    assert [r.getMessage() for r in caplog.records if "not among the best" in r.getMessage()] == [
        "step 5 scored loss=nan, so it is not among the best",
        "step 5 scored loss=-inf, so it is not among the best",
    ]


def test_score_without_best_or_tier_fails(run_dir: str) -> None:
    """Without `best`, or without a durable tier, the error states what is missing."""
    train(run_dir, ckpt.Best("loss"), 2, {})
    with pytest.raises(NoCheckpointError, match="has no best checkpoint"):
        ckpt.load(run_dir, best=True)
    in_memory = ckpt.Options(name="only-memory")
    with ckpt.Checkpointer(toy.build(), options=in_memory) as cp, pytest.raises(UsageError, match="best=ckpt"):
        cp.score(1, 0.5)
    for place, best in (({"options": in_memory}, ckpt.Best("loss")), ({"tiers": run_dir}, "loss")):
        with pytest.raises(UsageError, match="folder or URL"):
            ckpt.Checkpointer(toy.build(), best=best, **place)  # type: ignore[arg-type]


def test_step_pinned_by_command_keeps_its_note(run_dir: str, call: Any) -> None:
    """A step pinned by `ckpt pin` that is among the best for a while has both notes then, and only its own later."""
    train(run_dir, ckpt.Best("loss"), 3, {3: 0.5})
    assert call("pin", f"{run_dir}@3", "--note", "as published", "--yes").code == 0
    train(run_dir, ckpt.Best("loss"), 6, {6: 0.9})
    assert kept(run_dir) == {3: "best, loss=0.5; by hand: as published"} and ckpt.load(run_dir, best=True).step == 3
    train(run_dir, ckpt.Best("loss"), 7, {7: 0.4})
    assert kept(run_dir) == {3: "as published", 7: "best, loss=0.4"}
    assert call("pin", f"{run_dir}@7", "--note", "mine", "--yes").code == 0
    state, best = toy.build(), ckpt.Best("loss", keep=2)
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=2), best=best) as cp:
        cp.restore()
        cp.pin(7, "ours")
        cp.wait(60)
        assert kept(run_dir)[7] == "best, loss=0.4, ours; by hand: mine"
        cp.unpin(7)
    assert kept(run_dir) == {3: "as published", 7: "best, loss=0.4; by hand: mine"}
    assert call("unpin", f"{run_dir}@7", "--yes").code == 0 and kept(run_dir) == {3: "as published"}


def test_best_steps_of_another_score_stay(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """After a misspelt or changed score name, the old best steps stay, with a warning. There is one best step."""
    train(run_dir, ckpt.Best("loss", keep=2), 4, {1: 0.2, 3: 0.1})
    train(run_dir, ckpt.Best("lss"), 8, {6: 0.5})
    assert kept(run_dir) == {1: "loss=0.2", 3: "loss=0.1", 6: "best, lss=0.5"}
    assert ckpt.load(run_dir, best=True).step == 6
    assert "the best by another score than lss, step 3 (loss=0.1), stays too" in caplog.text


def test_rollback_removes_undone_steps_from_best(run_dir: str) -> None:
    """Steps that are no longer in the history are not among the best; earlier ones stay."""
    state, best = toy.build(), ckpt.Best("loss", keep=2)
    with ckpt.Checkpointer(state, run_dir, every=1, best=best) as cp:
        for step in range(cp.restore(default=0) + 1, 7):
            toy.train_step(state)
            cp.step(step)
            if step in (2, 3, 6):
                cp.score(step, 1 / step)
        assert best.scores == [(1 / 6, 6), (1 / 3, 3)]
        cp.wait(60)
        assert cp.restore(step=4) == 4
        toy.train_step(state)
        cp.step(5)
        assert cp.score(5, 0.9) and best.scores == [(1 / 3, 3), (0.9, 5)]
    assert kept(run_dir) == {3: f"best, loss={1 / 3!r}", 5: "loss=0.9"} and ckpt.load(run_dir, best=True).step == 3


def test_best_steps_survive_loss_of_first_tier(tmp_path: Path) -> None:
    """On another machine only the bucket knows the best steps, and they stay there."""
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    tiers = [ckpt.Tier(near, every=1, keep=2), ckpt.Tier(far, every=2, keep=2)]
    train(tiers, ckpt.Best("loss"), 6, {2: 0.1, 3: 0.5})
    shutil.rmtree(near)
    train(tiers, ckpt.Best("loss"), 14, {9: 0.3})
    assert kept(far) == {2: "best, loss=0.1"} and ckpt.load(far, best=True).step == 2 and is_at(far, 2)


# -- kills --

KILLED = """
import os, signal, sys, toy, ckpt
run, victim = sys.argv[1:]
scores = {2: (2, 0.9), 5: (4, 0.3), 7: (7, 0.2), 8: (8, 0.5), 11: (10, 0.4)}  # in step: of step, and what
state, best = toy.build(), ckpt.Best("loss", keep=2)
with ckpt.Checkpointer(state, ckpt.Tier(run, every=2, keep=2), best=best) as cp:
    start = cp.restore(default=0)
    for step in range(start + 1, 13):
        toy.train_step(state)
        save = cp.step(step)
        if save is not None and save.tiers:
            save.wait_durable(60)
        if step in scores:
            cp.score(*scores[step])
        if step == 7 and start == 0 and victim != "nobody":
            writer = cp.writer_pid
            if victim != "writer":
                cp.wait(60)
            if victim != "trainer":
                os.kill(writer, signal.SIGKILL)
            if victim != "writer":
                os.kill(os.getpid(), signal.SIGKILL)
print(toy.digest(state))
"""


@pytest.mark.parametrize("victim", ["writer", "both", pytest.param("trainer", marks=pytest.mark.long)])
def test_scores_survive_kills(run_dir: str, own_sockets: Path, victim: str) -> None:
    """After a kill following a score, the result equals that of a run without kills. Scores that `wait()` covered are
    in the run's log, even if all processes are dead."""
    process = run_script(KILLED, run_dir, victim)
    if victim == "both":
        assert killed(process) and kept(run_dir) == {7: "best, loss=0.2", 4: "loss=0.3"}
    if victim != "writer":
        assert killed(process), process.stderr
        process = run_script(KILLED, run_dir, victim)
    assert process.returncode == 0 and process.stdout.strip() == toy.reference(12), process.stderr
    assert eventually(lambda: not writers(own_sockets))
    assert kept(run_dir) == {7: "best, loss=0.2", 4: "loss=0.3"} and ckpt.load(run_dir, best=True).step == 7
    assert not {2, 6} & {one.step for one in ckpt.Run(run_dir).list()}
    assert is_at(run_dir, 7) and is_at(run_dir, 4)


@pytest.mark.parametrize("nth", [6, *(pytest.param(nth, marks=pytest.mark.long) for nth in (5, 7))])
def test_writer_death_before_score_is_recovered(run_dir: str, nth: int) -> None:
    """After each of the records that commit and pin a step, the next writer appends the missing ones."""
    process = run_script(KILLED, run_dir, "nobody", fail=f"writer/log.appended:kill:{nth}")
    assert process.returncode == 0, process.stderr
    assert "started a new writer" in process.stderr
    assert kept(run_dir) == {7: "best, loss=0.2", 4: "loss=0.3"} and is_at(run_dir, 7)


# -- ranks --

RANKS = """
import os, signal, sys, torch, torch.distributed as dist, ckpt, parallel, toy
torch.set_num_threads(1)
dist.init_process_group("gloo")
run, who, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, scores = dist.get_rank(), {2: 0.9, 3: 0.8, 5: 0.3, 6: 0.5, 8: 0.4, 9: 0.7}
state, best = parallel.build("ddp"), ckpt.Best("loss", keep=2)
options = ckpt.Options(agree_timeout_s=60)
with ckpt.Checkpointer(state, ckpt.Tier(run, every=3, keep=2), best=best, memory=None, options=options) as cp:
    for step in range(cp.restore(default=0) + 1, 11):
        parallel.train_step("ddp", state, step)
        cp.step(step)
        if step in scores and (who == "all" or (rank == 0 and step % 3 == 0)):
            among = cp.score(step, scores[step] if rank == 0 else 1 - scores[step])
            print(step, among, toy.bits(dict(state["model"].module.state_dict())), flush=True)
        if step == kill_at:
            cp.wait(60)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def test_score_of_rank_0_decides(run_dir: str) -> None:
    """Ranks measured different values: all use rank 0's, save a requested step together, and know it after a kill."""
    first = launch(2, RANKS, run_dir, "all", 7, port=free_port())
    assert [one.returncode for one in first] == [-9, -9], first[0].stderr
    then = launch(2, RANKS, run_dir, "all", 0, port=free_port())
    assert [one.returncode for one in then] == [0, 0], then[0].stderr
    for one, two in ((first[0], first[1]), (then[0], then[1])):
        assert one.stdout == two.stdout
    said = [line.split() for line in (first[0].stdout + then[0].stdout).splitlines()]
    assert [(step, among) for step, among, _ in said] == [
        ("2", "True"), ("3", "True"), ("5", "True"), ("6", "True"), ("8", "True"), ("9", "False"),
    ]  # fmt: skip
    assert kept(run_dir) == {5: "best, loss=0.3", 8: "loss=0.4"}
    best = ckpt.load(run_dir, best=True)
    assert best.step == 5 and toy.bits(best.sub("model").all()) == said[2][2]


def test_rank_0_alone_may_score_saved_step(run_dir: str) -> None:
    done = launch(2, RANKS, run_dir, "first", 0, port=free_port())
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert [line.split()[1] for line in done[0].stdout.splitlines()] == ["True", "True", "True"] and not done[1].stdout
    assert kept(run_dir) == {6: "best, loss=0.5", 9: "loss=0.7"}


def test_disagreeing_scores_fail_on_all_ranks(run_dir: str) -> None:
    code = """
import sys, torch, torch.distributed as dist, ckpt, parallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
state, rank = parallel.build("ddp"), dist.get_rank()
options = ckpt.Options(agree_timeout_s=60)
with ckpt.Checkpointer(state, sys.argv[1], every=1, best=ckpt.Best("loss"), options=options) as cp:
    cp._run.world.timeout_s = 2
    parallel.train_step("ddp", state, 1)
    cp.step(1)
    for step, value, first in ((2, 0.1, 0), (1, 0.2 if rank else "x", 0), (1 - rank, 0.1, 0), (1, 0.1, 1)):
        dist.barrier()
        try:
            print(cp.score(step, value) if rank >= first else "", flush=True)
        except ckpt.CheckpointError as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
    cp._run.world.timeout_s = 60
dist.destroy_process_group()
"""
    first, second = launch(2, code, run_dir, port=free_port())
    assert first.returncode == second.returncode == 0, second.stderr
    ours, others = first.stdout.splitlines(), second.stdout.splitlines()
    assert ours[:2] == others[:2] and ours[0].startswith("InvalidArgumentError step 2 cannot be scored yet")
    assert ours[1].startswith("InvalidArgumentError a score is one number") and ours[2:] == ["True", ""]
    assert others[2].startswith("PeerError rank 0 scored step 1, this rank step 0")
    assert others[3].startswith(("DeadlineError", "PeerError rank 0 closed"))
    assert kept(run_dir) == {1: "best, loss=0.1"}
