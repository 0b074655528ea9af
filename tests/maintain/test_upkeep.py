"""Tests of the commands that change a run: effects on runs and on jobs that train there, and kills in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import toy
from ckpt.core.checkpoint import commits, retention
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.checkpoint.write import RankSnapshot, write_part
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, data_key, new_nonce, owner
from ckpt.core.log.run_log import Acquire, Record, RunLog, RunState
from ckpt.errors import FencedError, NoCheckpointError
from ckpt.store import remember_options
from ckpt.tools.maintain import copy_run, prune
from commands import Result, call, flip, stopped
from processes import PYTHONPATH, eventually, killed, run_script, start_python
from run_files import (
    DATA_FOLDER,
    INDEX,
    KINDS,
    checkpoint_files,
    data_file,
    data_files,
    indexes,
    manifests,
    temporary_files,
)
from s3_server import MotoServer, storage_options
from trees import tree

__all__ = ["call"]  # the fixture
Call = Callable[..., Result]
COMMAND = "import sys\nfrom ckpt.tools.cli import main\nsys.exit(main())"
LAYOUT = Layout((TensorSpec("w", "F32", (4096,)),), {}, [])
DATA = bytes(range(256)) * 64


# -- handmade runs --


def work(place: Path | str, do: Callable[[RunLog], Coroutine[Any, Any, Any]]) -> Any:
    async def scenario() -> Any:
        async with commits.written_run(place) as log:
            return await do(log)

    return asyncio.run(scenario())


async def save(log: RunLog, mine: Acquire, *steps: int, finite: bool | None = None) -> None:
    for step in steps:
        await commits.commit(log, mine, [await begin(log, mine, step, finite=finite)])


async def begin(log: RunLog, mine: Acquire, step: int, *, layout: Layout = LAYOUT, finite: bool | None = None) -> Any:
    checkpoint = CheckpointId(mine.term, step, mine.nonce)
    return await write_part(log.store, RankSnapshot(checkpoint, layout, memoryview(DATA), [], finite))


def make(place: Path | str, *steps: int, back_to: int | None = None, floor: int = 0) -> Acquire:
    """Save these steps in a new job attempt, after a rollback to `back_to` if given."""

    async def do(log: RunLog) -> Acquire:
        restored = next((c.checkpoint for c in log.state.lineage() if c.step == back_to), None)
        mine = await commits.acquire(log, new_nonce(), restored=restored, floor=floor)
        await save(log, mine, *steps)
        return mine

    found: Acquire = work(place, do)
    return found


def state_of(place: Path | str) -> RunState:
    async def do(log: RunLog) -> RunState:
        return log.state

    found: RunState = work(place, do)
    return found


def steps(place: Path | str) -> list[int]:
    """Return the steps of the current history, newest first."""
    return [c.step for c in state_of(place).lineage()]


def owners(folder: Path) -> set[int]:
    """Return the steps that have any file."""
    return {a.step for key in tree(folder) if (a := owner(key)) is not None}


def break_log(run: Path) -> None:
    flip(sorted((run / "log").iterdir())[1], 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run with steps 1 to 6 by hand."""
    folder = tmp_path_factory.mktemp("made") / "run"
    make(folder, 1, 2, 3, 4, 5, 6)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Copy that run, to be changed."""
    retention._cache.clear()  # another test may have verified this run before
    return Path(shutil.copytree(made, tmp_path / "run"))


# -- all commands --


@pytest.mark.parametrize(
    "words",
    [("copy", "{run}", "{run}-copy"), ("prune", "{run}", "--keep-last", "1"), ("gc", "{run}"),
     ("gc", "{run}", "--abort-open"), ("pin", "{run}@3", "--note", "x"), ("rm", "{run}@3")],
    ids=lambda words: "-".join(w.strip("-{}") for w in words[:1] + words[2:]),
)  # fmt: skip
def test_command_without_yes_only_shows_plan(run: Path, call: Call, words: Sequence[str]) -> None:
    """Without --yes not one byte changes, in either output form. With it, something changes."""
    make(run, 7)
    work(run, lambda log: begin(log, Acquire(1, "0" * 8, None), 9))
    work(run, lambda log: begin(log, log.state.acquires[-1], 2))
    ended = Record("ABORT", {"checkpoint": f"000000002.2-{state_of(run).acquires[-1].nonce}", "reason": "x"}, "abort:x")
    work(run, lambda log: log.append(lambda state: ended, owner=None))
    words = [word.format(run=run) for word in words]
    before = tree(run)
    shown, told = call(*words), call(*words, "--json")
    assert shown.code == 0 and "Add --yes" in shown.out and told.json["done"] is None
    assert tree(run) == before and not Path(f"{run}-copy").exists()
    assert call(*words, "--yes", "--json").json["done"]
    assert tree(run) != before or Path(f"{run}-copy").exists()


# -- copy --


def test_copy_is_an_independent_run(run: Path, call: Call, tmp_path: Path) -> None:
    """The copy is intact and equal bit for bit. Its history continues from the copied checkpoint, in a higher term."""
    there = tmp_path / "there"
    found = call("copy", run, there, "--yes", "--json").json
    assert (found["new_run"] and found["bytes"] == len(DATA) + 80) or found["bytes"] > len(DATA)
    assert found["files"] == 3 == len([key for key in tree(there) if owner(key)])
    assert steps(there) == [6] and call("verify", there).code == 0
    assert {k: v for k, v in tree(run).items() if k in tree(there) and owner(k)} == {
        k: v for k, v in tree(there).items() if owner(k)
    }
    state = state_of(there)
    assert state.term == 2 and state.acquires[-1].restored == max(state.commits)
    make(there, 7)
    assert steps(there) == [7, 6]


def test_repeated_copy_changes_nothing(run: Path, call: Call, tmp_path: Path) -> None:
    """It reports that the checkpoint exists there, after checking the target's own copy."""
    there = tmp_path / "there"
    call("copy", run, there, "--yes")
    before = tree(there)
    again = call("copy", run, there, "--yes")
    assert again.code == 0 and "already there" in again.out and tree(there) == before
    data_files(there)[0].unlink()
    again = call("copy", run, there, "--yes")
    assert again.code == 2 and "damaged there" in again.err


def test_copy_all_skips_undone_checkpoints(run: Path, call: Call, tmp_path: Path) -> None:
    """--all skips checkpoints that a rollback undid. A new location accepts one by its step number."""
    make(run, 20, back_to=3)
    call("copy", f"{run}@2", tmp_path / "one", "--yes")
    call("copy", run, tmp_path / "all", "--all", "--yes")
    call("copy", f"{run}@5", tmp_path / "undone", "--yes")
    assert steps(tmp_path / "one") == [2]
    assert steps(tmp_path / "all") == [20, 3, 2, 1]
    assert steps(tmp_path / "undone") == [5]
    refused = call("copy", f"{run}@5", tmp_path / "all", "--yes")  # it would seem to lie between 20 and 3
    assert refused.code == 2 and "a rollback undid it" in refused.err
    refused = call("copy", f"{run}@3", tmp_path / "all", "--all")
    assert refused.code == 2 and "cannot be combined" in refused.err


def test_repeated_copies_need_no_take_over(run: Path, call: Call, tmp_path: Path) -> None:
    """As the source continues, in its term and the next, the newest in the copy is the newest one copied."""
    there = tmp_path / "there"
    call("copy", run, there, "--yes")
    work(run, lambda log: save(log, log.state.acquires[-1], 7, 8))
    call("copy", run, there, "--yes")
    assert steps(there) == [8, 6]
    make(run, 9)
    call("copy", run, there, "--yes")
    assert steps(there)[0] == 9
    call("copy", f"{run}@1", there, "--yes")  # an older one is only added
    assert steps(there)[0] == 9 and steps(there)[-1] == 1
    make(run, 4, back_to=3)
    call("copy", run, there, "--yes")
    assert steps(there)[0] == 4 and call("verify", "--all", there).code == 0


def test_copy_of_older_checkpoint_fences_no_job(run: Path, call: Call, tmp_path: Path) -> None:
    """A job that trains in the target continues saving, and its checkpoints stay the newest."""
    there = shutil.copytree(run, tmp_path / "there")
    job = make(there, 50, floor=5)
    work(run, lambda log: save(log, log.state.acquires[-1], 7))
    assert call("copy", run, there, "--yes").code == 0
    work(there, lambda log: save(log, job, 51))
    assert steps(there)[:4] == [51, 50, 7, 6]


@pytest.mark.parametrize("more", [(), ("--all",), ("--take-over",)])
def test_copy_rejects_target_of_different_run(run: Path, call: Call, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Both may be copies with their own root ids. A job that has saved nothing there does not prevent the copy."""
    for other in (tmp_path / "other", tmp_path / "its-copy"):
        if other.name == "other":
            make(other, 1, 2)
        else:
            call("copy", tmp_path / "other", other, "--yes")
        before = tree(other)
        refused = call("copy", run, other, "--yes", *more)
        assert refused.code == 2 and "is a different run" in refused.err and tree(other) == before
    make(tmp_path / "begun")
    for there in (tmp_path / "begun", tmp_path / "copy"):
        assert call("copy", run, there, "--yes", *more).code == 0
        make(run, 7)
        assert call("copy", run, there, "--yes", "--take-over").code == 0


def test_copy_hiding_checkpoints_requires_take_over(run: Path, call: Call, tmp_path: Path) -> None:
    """Without --take-over nothing changes. With it, the job is fenced, and training continues from the copy."""
    there = shutil.copytree(run, tmp_path / "there")
    job = make(there, 50)
    make(run)
    make(run, 7)
    before = tree(there)
    refused = call("copy", run, there, "--yes")
    assert refused.code == 2 and "--take-over" in refused.err and tree(there) == before
    shown = call("copy", run, there, "--take-over", "--yes")
    assert shown.code == 0 and "can no longer save" in shown.out
    with pytest.raises(FencedError):
        work(there, lambda log: save(log, job, 51))
    assert steps(there)[0] == 7


def test_copy_yields_to_job_started_meanwhile(
    run: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy does not fence a job that its plan did not know."""
    there, real = tmp_path / "there", copy_run._copy_files

    async def and_a_job(source: Any, target: Any, *rest: Any) -> Any:
        written = await real(source, target, *rest)
        log = RunLog(target)
        await log.open()
        await commits.acquire(log, new_nonce())
        return written

    monkeypatch.setattr(copy_run, "_copy_files", and_a_job)
    refused = call("copy", run, there, "--yes")
    assert refused.code == 2 and "took" in refused.err and steps(there) == []


@pytest.mark.parametrize("how", ["retired", "aborted"])
def test_copy_never_restores_deleted_checkpoint(run: Path, call: Call, tmp_path: Path, how: str) -> None:
    """Its names cannot be used again; --all copies the others."""
    there = tmp_path / "there"
    call("copy", run, there, "--yes")
    gone = max(state_of(run).commits)
    if how == "retired":
        end = Record("PLAN", {"retire": [str(gone)], "delete": []}, "plan:x")
    else:
        shutil.rmtree(there)
        work(there, lambda log: commits.acquire(log, f"{copy_run.COPIED}{new_nonce()}"))
        end = Record("ABORT", {"checkpoint": str(gone), "reason": "by a test"}, "abort:x")
    work(there, lambda log: log.append(lambda state: end, owner=None))
    refused = call("copy", run, there, "--yes")
    assert refused.code == 2 and "cannot return" in refused.err
    rest = call("copy", run, there, "--all", "--yes", "--json")
    assert rest.code == 1 and [one["step"] for one in rest.json["not_copied"]] == [6]
    assert steps(there) == [5, 4, 3, 2, 1]


def test_copy_rejects_folder_with_other_files(run: Path, call: Call, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "thesis.tex").write_text("chapter 1")
    for more in ((), ("--yes",), ("--take-over", "--yes")):
        refused = call("copy", run, there, *more)
        assert refused.code == 2 and "thesis.tex" in refused.err
        assert tree(there) == {"thesis.tex": b"chapter 1"}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return the disk of one of two nodes: a run whose step has the files of one of its two ranks."""

    async def half(log: RunLog) -> None:
        mine = await commits.acquire(log, new_nonce())
        two = Layout(LAYOUT.tensors, {}, [], rank=0, world=2)
        await commits.commit(log, mine, [await begin(log, mine, 1, layout=two)])

    work(tmp_path / "node", half)
    return tmp_path / "node"


ON_NODES = "this location has the files of only 1 of the 2 ranks of step 1: the rest is on the disks of other nodes"


def test_copy_rejects_disk_of_one_node(call: Call, node: Path, tmp_path: Path) -> None:
    """The error states how many ranks are here, and that other disks have the rest."""
    refused = call("copy", node, tmp_path / "there", "--yes")
    assert refused.code == 2 and ON_NODES in refused.err and not (tmp_path / "there").exists()


def test_verify_and_show_report_disk_of_one_node(call: Call, node: Path) -> None:
    """Both state that this disk has the files of one of two ranks, and exit with 3. Neither calls the step damaged or
    sound. Damage on this disk is found."""
    shown, verified = call("show", node), call("verify", node)
    assert shown.code == verified.code == 3
    assert ON_NODES in shown.err and "damaged" not in shown.err and "`ckpt verify" in shown.err
    text = " ".join(verified.out.split())
    assert ON_NODES in text and "sound here" in text and "on the other nodes to check the rest" in text
    (row,) = call("verify", node, "--json").json["checkpoints"]
    assert row["verdict"] == "sound here" and row["elsewhere"] == ON_NODES and not row["unreadable"]
    flip(data_file(node, 1), -1)
    assert call("verify", node).code == 1 and call("show", node).code == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != INDEX])
def test_copy_names_damaged_source_file(run: Path, call: Call, tmp_path: Path, kind: str) -> None:
    """A damaged checkpoint never becomes a checkpoint of the target."""
    (path,) = checkpoint_files(run, kind, step=6)
    flip(path, path.stat().st_size // 2)
    refused = call("copy", run, tmp_path / "there", "--yes")
    assert refused.code == 2 and str(path.relative_to(run)) in refused.err
    assert not (tmp_path / "there" / "log").exists() or steps(tmp_path / "there") == []
    assert call("copy", f"{run}@5", tmp_path / "there", "--yes").code == 0  # control: the others can be had


def hurt(run: Path, step: int) -> Path:
    file = data_file(run, step)
    flip(file, file.stat().st_size // 2)
    return file


@pytest.mark.parametrize("damaged", [(6,), (6, 5), (4,), (6, 3, 1), (6, 5, 4, 3, 2, 1)])
def test_copy_all_skips_damaged_checkpoints(run: Path, call: Call, tmp_path: Path, damaged: Sequence[int]) -> None:
    """Intact checkpoints are copied, and damaged ones are reported with the cause. After a repair, a repeated copy adds
    them.
    Control: copying a damaged one alone fails."""
    there, rest = tmp_path / "there", [step for step in (6, 5, 4, 3, 2, 1) if step not in damaged]
    files = [hurt(run, step) for step in damaged]
    found = call("copy", run, there, "--all", "--yes")
    assert found.code == 1 and f"copied {len(rest)}, every byte verified" in found.out and steps(there) == rest
    for file, step in zip(files, damaged, strict=True):
        pattern = rf"^skipped: step {step} of .*{file.relative_to(run)}.* `ckpt repair file://{run}` may"
        assert re.search(pattern, found.out, re.M)
    assert call("copy", f"{run}@{damaged[0]}", tmp_path / "one", "--yes").code == 2
    for file in files:
        flip(file, file.stat().st_size // 2)
    again = call("copy", run, there, "--all", "--yes", "--json")
    assert again.code == 0 and len(again.json["done"]["copied"]) == len(damaged)
    assert steps(there) == [6, 5, 4, 3, 2, 1] and call("verify", there, "--all").code == 0


@pytest.mark.parametrize("again", [False, True])
def test_newest_copied_checkpoint_leads_the_copy(run: Path, call: Call, tmp_path: Path, again: bool) -> None:
    """The newest checkpoint that could be copied leads in the copy, and later the one that failed at first.
    The source continued in its term, or went back in a newer one."""
    there = tmp_path / "there"
    call("copy", run, there, "--all", "--yes")
    if again:
        make(run, 7, 8, 9, back_to=5)
    else:
        work(run, lambda log: save(log, log.state.acquires[-1], 7, 8, 9))
    file = hurt(run, 9)
    found = call("copy", run, there, "--all", "--yes", "--json")
    assert (found.code, [one["step"] for one in found.json["not_copied"]]) == (1, [9])
    assert [one["step"] for one in found.json["done"]["failed"]] == [9]
    assert steps(there)[:2] == [8, 7]
    flip(file, file.stat().st_size // 2)
    assert call("copy", run, there, "--all", "--yes").code == 0 and steps(there)[:3] == steps(run)[:3] == [9, 8, 7]


def test_checkpoint_retired_during_copy_is_reported(
    run: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, copy = tmp_path / "there", copy_run.copy

    async def late(source: RunLog, *rest: Any, **more: Any) -> Any:
        await retention.retire(source, None, Keep(1), {max(source.state.commits)})
        return await copy(source, *rest, **more)

    monkeypatch.setattr(copy_run, "copy", late)
    refused = call("copy", f"{run}@2", real, "--yes")
    assert refused.code == 2 and "was deleted during the copy" in refused.err


def test_copy_avoids_checkpoint_being_written(run: Path, call: Call, tmp_path: Path) -> None:
    """The copy does not touch a checkpoint that the target's job may be writing."""
    there, job = tmp_path / "there", state_of(run).acquires[-1]

    async def tier_of_the_same_job(log: RunLog) -> None:
        await log.append(
            lambda state: Record("ACQUIRE", {"term": job.term, "nonce": job.nonce, "restored": None}, "acquire:x"),
            owner=None,
        )
        await begin(log, job, 6)

    work(there, tier_of_the_same_job)
    before = tree(there)
    refused = call("copy", run, there, "--yes")
    assert refused.code == 2 and "right now" in refused.err and tree(there) == before
    assert call("copy", f"{run}@5", there, "--yes").code == 0


# -- copies that are killed --


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 6 steps, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(str(folder / "run"), every=2, keep=9)) as cp:
        cp.restore(default=0)
        for step in range(1, 7):
            toy.train_step(state)
            cp.step(step)
    patch.undo()
    return folder / "run"


def differences(a: Path, b: Path, call: Call) -> list[str]:
    """Return the checks that fail if the second run's checkpoint is damaged or has different bits."""
    found = []
    if call("verify", b).code:
        found.append("verify")
        return found
    if call("diff", a, b).code:
        found.append("diff")
    one, two = ckpt.load(str(a)), ckpt.load(str(b))
    if one.keys() != two.keys() or not all(torch.equal(one[name], two[name]) for name in one):
        found.append("load")
    return found


DEATHS = ("data_file.opened", "data_file.written", "acquire.done", "index.stored", "log.linked:kill:2")


@pytest.mark.parametrize("point", DEATHS)
def test_killed_copy_continues_on_next_call(trained: Path, tmp_path: Path, call: Call, point: str) -> None:
    """After SIGKILL at any point, no incomplete checkpoint exists, and the next call finishes the copy."""
    there = tmp_path / "there"
    fail = point if ":" in point else f"{point}:kill"
    assert killed(run_script(COMMAND, "copy", trained, there, "--yes", fail=fail)), "it was not killed"
    if "log.linked" not in point:
        assert steps(there) == []
    assert call("copy", trained, there, "--yes").code == 0
    assert differences(trained, there, call) == []


def test_negative_control_wrong_copy_is_detected(trained: Path, tmp_path: Path, call: Call) -> None:
    """The check detects one flipped bit, and a different step."""
    there = tmp_path / "there"
    call("copy", f"{trained}@4", there, "--yes")
    assert differences(trained, there, call) == ["diff", "load"]
    (file,) = data_files(there)
    flip(file, file.stat().st_size // 2)
    assert differences(trained, there, call) == ["verify"]


def test_ctrl_c_during_copy_leaves_no_partial_file(trained: Path, tmp_path: Path, call: Call) -> None:
    """The exit code is 130, the unfinished data file is removed, and the same call continues."""
    there = tmp_path / "there"
    assert "continue from here" in stopped("data_file.opened:stop", "copy", trained, there, "--yes")
    assert not data_files(there) and not temporary_files(there)
    assert call("copy", trained, there, "--yes").code == 0
    assert differences(trained, there, call) == []


def test_training_continues_from_a_copy(trained: Path, tmp_path: Path, call: Call) -> None:
    """Training restores the copied step bit for bit, and its new checkpoints come after it."""
    there = tmp_path / "there"
    call("copy", trained, there, "--yes")
    state = toy.build(seed=1)
    with ckpt.Checkpointer(state, ckpt.Tier(str(there), every=2)) as cp:
        assert cp.restore() == 6
        for step in range(7, 9):
            toy.train_step(state)
            cp.step(step)
    assert toy.digest(state) == toy.reference(8) and steps(there) == [8, 6]


# -- prune --


def test_prune_keeps_requested_checkpoints_with_reasons(run: Path, call: Call) -> None:
    """The last ones, every third, the pinned and the newest finite one stay. Only files of the others are deleted."""
    work(run, lambda log: save(log, log.state.acquires[-1], 7, 8, finite=False))
    call("pin", f"{run}@2", "--note", "as published", "--yes")
    (run / DATA_FOLDER / "notes.txt").write_text("mine")
    plan = call("prune", run, "--keep-last", 1, "--keep-every", 3, "--json").json
    why = {one["step"]: one["why"] for one in plan["keep"]}
    assert why.keys() == {8, 7, 6, 3, 2} and "as published" in why[2] and "every 3" in why[3] and "finite" in why[6]
    assert plan["check"] == 6  # the newest that a restore would choose
    done = call("prune", run, "--keep-last", 1, "--keep-every", 3, "--yes", "--json").json["done"]
    assert sorted(CheckpointId.parse(a).step for a in done["given_up"]) == [1, 4, 5]
    assert done["files"] == plan["files"] == 9 and done["bytes"] == plan["bytes"]
    assert steps(run) == [8, 7, 6, 3, 2] and owners(run) == {8, 7, 6, 3, 2}
    assert call("verify", "--all", run).code == 0 and (run / DATA_FOLDER / "notes.txt").exists()
    assert call("prune", run, "--keep-last", 1, "--keep-every", 3, "--yes", "--json").json["done"] is None


def test_prune_deletes_nothing_with_damaged_newest(run: Path, call: Call) -> None:
    """One flipped bit in the newest: exit code 1, the damaged file is named, and all files stay."""
    file = data_file(run, 6)
    flip(file, file.stat().st_size - 9)
    before = tree(run)
    refused = call("prune", run, "--keep-last", 1, "--yes")
    assert refused.code == 1 and str(file.relative_to(run)) in refused.out and "Nothing was deleted" in refused.out
    assert tree(run) == before
    assert call("prune", run, "--keep-last", 1, "--yes", "--json").json["problems"]
    flip(file, file.stat().st_size - 9)  # control
    assert call("prune", run, "--keep-last", 1, "--yes").code == 0 and steps(run) == [6, 5]


@pytest.mark.parametrize("words", [("prune", "--keep-last", "1"), ("gc",)], ids=["prune", "gc"])
def test_damaged_log_prevents_prune_and_gc(run: Path, call: Call, words: Sequence[str]) -> None:
    """The error gives advice that works."""
    break_log(run)
    before = tree(run)
    refused = call(words[0], run, *words[1:], "--yes")
    assert refused.code == 2 and "log records 1 " in refused.err and "ckpt copy --all" in refused.err
    assert tree(run) == before
    told = call("verify", run, "--all")
    assert told.code == 1 and "ckpt copy --all" in told.out and "ckpt repair" not in told.out
    assert call("copy", run, f"{run}-new", "--all", "--yes").code == 0 and steps(f"{run}-new") == [6, 5, 4, 3, 2]
    assert call("verify", f"{run}-new", "--all").code == 0
    break_log(Path(f"{run}-new"))
    refused = call("copy", run, f"{run}-new", "--yes")
    assert refused.code == 2 and "deleted there" in refused.err


def test_unreadable_checkpoint_prevents_deletions(run: Path, call: Call) -> None:
    """The files it needs are unknown. When it is deleted itself, it does not prevent anything."""
    for path in (manifests(run, 5)[0], indexes(run, 5)[0]):
        path.unlink()
    before = tree(run)
    for words in (("prune", run, "--keep-last", 1), ("gc", run)):
        refused = call(*words, "--yes")
        assert refused.code == 2 and "step 5 " in refused.err and tree(run) == before
    work(run, lambda log: save(log, log.state.acquires[-1], 7, 8))
    assert call("prune", run, "--keep-last", 1, "--yes").code == 0
    assert steps(run) == [8, 7] and owners(run) == {8, 7}


@pytest.mark.parametrize("command", ["prune", "gc"])
def test_commit_during_cleanup_loses_nothing(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A job that commits after the files were listed loses nothing, and the command still succeeds."""
    mine, real, left = state_of(run).acquires[-1], prune.take_stock, [7, 8]
    work(run, lambda log: begin(log, mine, 99))
    ended = Record("ABORT", {"checkpoint": f"000000099.1-{mine.nonce}", "reason": "x"}, "abort:x")
    work(run, lambda log: log.append(lambda state: ended, owner=None))

    async def and_a_commit(log: RunLog) -> prune.RunFiles:
        stock = await real(log)
        if left:
            async with commits.written_run(run) as other:
                await save(other, mine, left.pop(0))
        return stock

    monkeypatch.setattr(prune, "take_stock", and_a_commit)
    more = ("--keep-last", 1) if command == "prune" else ()
    assert call(command, run, *more, "--yes").code == 0
    assert steps(run)[:2] == [8, 7] and 99 not in owners(run) and call("verify", "--all", run).code == 0


# -- gc --


def with_leftovers(run: Path) -> dict[str, Acquire]:
    """Add to the checkpoints: 10 aborted, 11 open in an old term, 13 open in the newest term."""
    old = state_of(run).acquires[-1]

    async def do(log: RunLog) -> Acquire:
        for step in (10, 11):
            await begin(log, old, step)
        await commits.abort(log, old, CheckpointId(old.term, 10, old.nonce), "for the test")
        new = await commits.acquire(log, new_nonce())
        await begin(log, new, 13)
        return new

    return {"old": old, "new": work(run, do)}


def test_gc_deletes_only_unneeded_files(run: Path, call: Call) -> None:
    """Files of aborted checkpoints are deleted. Open ones and foreign files stay, and all are reported."""
    with_leftovers(run)
    (run / DATA_FOLDER / "notes.txt").write_text("mine")
    (run / "todo").write_text("mine")
    found = call("gc", run, "--yes", "--json").json
    assert [(one["step"], one["files"]) for one in found["delete"]] == [(10, 2)]
    assert "for the test" in found["delete"][0]["why"]
    assert {one["step"]: one["ending"] for one in found["open"]} == {11: False, 13: False}
    assert found["foreign"] == [f"{DATA_FOLDER}/notes.txt", "todo"]
    assert found["done"] == {"files": 2, "bytes": found["bytes"], "uploads": 0, "ended": []}
    assert owners(run) == {1, 2, 3, 4, 5, 6, 11, 13} and (run / "todo").exists()
    assert call("verify", "--all", run).code == 0
    assert "stays, open" in call("gc", run).out


def test_gc_aborts_open_checkpoints_of_old_terms(run: Path, call: Call) -> None:
    """--abort-open never ends checkpoints that the current term is writing."""
    terms = with_leftovers(run)
    found = call("gc", run, "--abort-open", "--yes", "--json").json
    assert {one["step"]: one["ending"] for one in found["open"]} == {11: True, 13: False}
    assert owners(run) == {1, 2, 3, 4, 5, 6, 13}
    assert CheckpointId(1, 11, terms["old"].nonce) in state_of(run).aborted
    work(run, lambda log: save_again(log, terms["new"]))
    assert steps(run)[0] == 13


async def save_again(log: RunLog, mine: Acquire) -> None:
    """Commit the open checkpoint."""
    part = await commits.stored_manifest(log.store, CheckpointId(mine.term, 13, mine.nonce), 0)
    assert part is not None
    await commits.commit(log, mine, [part])


def test_gc_waits_for_readers_before_deletion(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the grace period the log lists the deletions and all files exist. Folders need no grace period."""
    with_leftovers(run)
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert 10 in owners(run)
        record = json.loads(sorted((run / "log").iterdir())[-1].read_bytes())
        assert record["type"] == "PLAN" and len(record["body"]["delete"]) == 2

    monkeypatch.setattr(prune.asyncio, "sleep", sleep)
    assert "waiting 7 s" in call("gc", run, "--yes", "--grace", "7").err.lower()
    assert waited == [7.0] and 10 not in owners(run)
    call("prune", run, "--keep-last", 1, "--yes")
    assert waited == [7.0]


@pytest.mark.parametrize("fail", ["plan.landed:kill", "sweep.deleted:kill"])
@pytest.mark.parametrize("words", [("prune", "--keep-last", "1"), ("gc",)], ids=["prune", "gc"])
def test_gc_finishes_killed_cleanup(run: Path, call: Call, words: Sequence[str], fail: str) -> None:
    """The next gc deletes the files that the log lists as deleted. The remaining checkpoints are intact."""
    aborted = CheckpointId(1, 10, with_leftovers(run)["old"].nonce)
    for number in range(80):  # more than one batch
        (run / data_key(aborted, 1, number)).write_bytes(b"x")
    assert killed(run_script(COMMAND, words[0], run, *words[1:], "--yes", fail=fail))
    expected = {6, 5} if words[0] == "prune" else {6, 5, 4, 3, 2, 1}
    assert set(steps(run)) == expected
    assert owners(run) > expected | {11, 13}
    assert call("gc", run, "--yes").code == 0
    assert owners(run) == expected | {11, 13} and call("verify", "--all", run).code == 0


# -- pin --


def test_pin_and_unpin(run: Path, call: Call) -> None:
    """The note goes into the log, and a repeated pin adds no record. A missing step is rejected."""
    assert call("pin", f"{run}@2", "--note", "good", "--yes", "--json").json["done"] == {"pinned": True}
    assert [a.step for a in state_of(run).kept] == [2] and "good" in state_of(run).kept.values()
    records = len(list((run / "log").iterdir()))
    assert call("pin", f"{run}@2", "--note", "good", "--yes").code == 0
    assert len(list((run / "log").iterdir())) == records
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [6, 5, 2]
    assert "is pinned: good" in call("unpin", f"{run}@2", "--yes").out
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [6, 5]
    for words in (("pin", f"{run}@2", "--note", "x"), ("unpin", f"{run}@99"), ("pin", run), ("unpin", run)):
        assert call(*words, "--yes").code == 2


def test_pin_of_checkpoint_retired_meanwhile_fails(run: Path) -> None:
    """The checkpoint was retired between the check and the record."""

    async def late(log: RunLog) -> None:
        first = min(log.state.commits)
        async with commits.written_run(run) as other:
            await retention.retire(other, None, Keep(1), {max(log.state.commits)})
        with pytest.raises(NoCheckpointError, match="so it cannot be pinned"):
            await retention.set_keep(log, first, "x")

    work(run, late)


# -- next to a running job --


LIVE = """
import json, os, sys, time, ckpt, toy
run, enough = sys.argv[1:]
state, step = toy.build(), 0
with ckpt.Checkpointer(state, ckpt.Tier(run, every=5)) as cp:
    cp.restore(default=0)
    while step % 5 or not os.path.exists(enough):
        toy.train_step(state)
        step += 1
        cp.step(step)
        time.sleep(0.01)
print(json.dumps([step, toy.digest(state)]))
"""


def test_commands_do_not_disturb_running_job(tmp_path: Path, call: Call) -> None:
    """prune, gc, pin and copy run while a job saves: its result does not change, and all checkpoints are intact."""
    run, there, enough, kept = tmp_path / "run", tmp_path / "there", tmp_path / "enough", 0
    path = PYTHONPATH
    environment = {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
    words = [sys.executable, "-c", LIVE, str(run), str(enough)]
    with start_python(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert eventually(lambda: (run / "log").exists() and len(list((run / "log").iterdir())) > 6)
        for _ in range(2):
            for line in (("prune", run, "--keep-last", 2), ("gc", run), ("gc", run, "--abort-open")):
                assert call(*line, "--yes").code == 0
            copied = call("copy", run, there, "--yes")
            assert copied.code == 0 or "retired" in copied.err
            newest = call("ls", run, "--json").json["checkpoints"][0]["step"]
            said = call("pin", f"{run}@{newest}", "--note", "seen", "--yes")
            assert said.code == 0 or "does not have" in said.err or "was deleted since" in said.err
            kept = kept if said.code else newest  # it may be gone already
        assert job.poll() is None
        enough.touch()
        out, err = job.communicate()
    assert job.returncode == 0, err
    last, digest = json.loads(out)
    assert digest == toy.reference(last)
    assert call("verify", "--all", run).code == 0 and call("verify", "--all", there).code == 0
    assert steps(run)[0] == last and (not kept or kept in steps(run))
    assert "WARNING" not in err and "failed" not in err, err


def test_negative_control_take_over_fences_running_job(run: Path, tmp_path: Path, call: Call) -> None:
    make(run, 7, 8)
    there, state = tmp_path / "there", toy.build()
    with pytest.raises(FencedError), ckpt.Checkpointer(state, ckpt.Tier(str(there), every=1)) as cp:
        cp.restore(default=0)
        assert call("copy", run, there, "--take-over", "--yes").code == 0
        toy.train_step(state)
        cp.save(1).wait_durable(30.0)
    assert steps(there)[0] == 8


# -- in an object store --


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with MotoServer() as server:
        server.make_bucket("bucket")
        yield server.url


def words_of(server: str) -> list[str]:
    return [word for key, value in storage_options(server).items() for word in ("--option", f"{key}={value}")]


def test_copy_to_bucket_and_back_is_exact(bucket: str, trained: Path, tmp_path: Path, call: Call) -> None:
    """A copy to a bucket and back to another folder has the same bits."""
    far = "s3://bucket/there"
    remember_options(far, storage_options(bucket))
    assert call("copy", trained, far, "--all", "--yes", *words_of(bucket)).code == 0
    assert call("copy", far, tmp_path / "back", "--yes", *words_of(bucket)).code == 0
    assert differences(trained, tmp_path / "back", call) == []
    assert steps(far) == [6, 4, 2]


def test_prune_and_gc_in_a_bucket(bucket: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers have 600 s. Unfinished uploads of ended checkpoints are dropped, those of open ones are not."""
    far, waited = "s3://bucket/run", list[float]()
    remember_options(far, storage_options(bucket) | {"engine": "s3fs"})
    mine = make(far, 1, 2, 3, 4)
    checkpoints = {step: CheckpointId(1, step, mine.nonce) for step in (8, 9)}

    async def leave(log: RunLog) -> None:
        for checkpoint in checkpoints.values():
            upload = await log.store.upload(data_key(checkpoint, 0), size=40 << 20)
            await upload.write_at(0, memoryview(bytes(upload.part)))
        await commits.abort(log, mine, checkpoints[8], "for the test")

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    work(far, leave)
    monkeypatch.setattr(prune.asyncio, "sleep", sleep)
    assert call("prune", far, "--keep-last", 1, "--yes").code == 0
    assert 600.0 in waited and steps(far) == [4, 3]
    assert call("gc", far, "--json").json["uploads"] == 1
    assert call("gc", far, "--yes", "--json").json["done"]["uploads"] == 1

    async def left(log: RunLog) -> list[str]:
        return await prune.unfinished(log.store)

    assert work(far, left) == [data_key(checkpoints[9], 0)]
    assert call("verify", "--all", far).code == 0
