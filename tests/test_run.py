"""Tests of `ckpt.Run`, and of the public names of classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.core.checkpoint import retention
from ckpt.errors import CorruptError, NoCheckpointError, UsageError
from commands import call, flip, increments
from run_files import data_file
from trees import tree

__all__ = ["call", "increments"]  # fixtures


@pytest.fixture
def run(increments: Path, tmp_path: Path) -> ckpt.Run:
    """Copy a run with the steps 1 to 5: 1, 2 and 5 are full, 3 and 4 are built on them."""
    retention._cache.clear()
    return ckpt.Run(shutil.copytree(increments, tmp_path / "run"))


def folder(run: ckpt.Run) -> Path:
    return Path(run.url.removeprefix("file://"))


def steps(run: ckpt.Run) -> list[int]:
    return [one.step for one in run.list()]


def test_run_list_equals_ls(run: ckpt.Run, call: Any) -> None:
    told = call("ls", folder(run), "--json").json["checkpoints"]
    assert [{name: getattr(one, name) for name in told[0]} for one in run.list()] == told
    newest, *rest = run.list()
    assert newest.step == 5 and newest.newest and newest.full and not any(one.newest for one in rest)


def test_run_pin_prune_and_delete(run: ckpt.Run) -> None:
    """As with the commands, pinned checkpoints stay until they are unpinned, and the remaining ones are complete."""
    run.pin(1, "as published")
    assert {one.step: one.pinned for one in run.list()} == {5: None, 4: None, 3: None, 2: None, 1: "as published"}
    assert run.prune(2) == (3,)  # the newest two, the newest two full ones, and pinned ones stay
    with pytest.raises(UsageError, match="as published"):
        run.delete(1)
    run.unpin(1)
    run.delete(1)
    run.delete("latest")
    assert steps(run) == [4, 2]
    assert all(one.verdict == "sound" for one in run.verify())
    assert run.prune("all") == ()
    for gone in (1, 5, 99):
        with pytest.raises(NoCheckpointError):
            run.delete(gone)


def test_run_deletes_nothing_with_damaged_checkpoint(run: ckpt.Run) -> None:
    file = data_file(folder(run), 5)
    flip(file, file.stat().st_size // 2)
    before = tree(folder(run))
    for work in (lambda: run.prune(2), lambda: run.delete(3)):
        with pytest.raises(CorruptError, match="nothing was deleted, because step 5"):
            work()
    assert tree(folder(run)) == before
    five, *others = run.verify()
    assert (five.step, five.verdict, bool(five.problems)) == (5, "damaged", True)
    assert all(one.verdict == "sound" for one in others)
    assert [one.verdict for one in run.verify("latest")] == ["damaged"]


def test_export(run: ckpt.Run, tmp_path: Path) -> None:
    """The file has the tensors of that step, in the form of its name or as requested, and never replaces a file."""
    wanted = ckpt.load(f"{folder(run)}@3")
    run.export(tmp_path / "all.safetensors", step=3, only=["master"])
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == {"master"} and torch.equal(found["master"], wanted["master"])
    with pytest.raises(UsageError, match="exists"):
        run.export(tmp_path / "all.safetensors", step=3)
    run.export(tmp_path / "other", step="latest", form="run")
    assert torch.equal(ckpt.load(tmp_path / "other")["noise"], ckpt.load(folder(run))["noise"])


def test_run_of_other_folder_fails(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="no run"):
        ckpt.Run(tmp_path).list()
    with pytest.raises(UsageError, match="whole run"):
        ckpt.Run(f"{tmp_path}/run@5")


# -- public names --


def test_dir_lists_only_public_names() -> None:
    seen = {name for name in dir(ckpt.Checkpointer) if not name.startswith("_")}
    assert seen == {
        "step", "save", "stage", "restore", "wait", "close", "request_save", "score", "pin", "unpin",
        "before_untracked_update", "not_training", "stats", "last_restore", "writer_pid",
    }  # fmt: skip
    assert {name for name in dir(ckpt.Run) if not name.startswith("_")} == {
        "list", "pin", "unpin", "prune", "delete", "verify", "export",
    }  # fmt: skip
    assert {name for name in dir(ckpt) if not name.startswith("_")} == {
        *ckpt.__all__, "dcp", "deepspeed", "errors", "events", "lightning", "megatron", "ray", "state", "torchtitan",
        "transformers", "triggers", "types",
    }  # fmt: skip


def test_open_checkpointer_shows_only_public_names(run_dir: str) -> None:
    with ckpt.Checkpointer({"w": torch.zeros(3)}, run_dir) as cp:
        assert {name for name in vars(cp) if not name.startswith("_")} == {"faults"}
        cp.restore(default=0)
