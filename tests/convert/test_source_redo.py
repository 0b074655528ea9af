"""Steps of a redo log in other forms: `ckpt restore` and `ckpt diff` redo them, bit for bit, and say so."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import ckpt
import toy
from ckpt.faults import memory_pressure
from ckpt.format.manifest import Attempt
from ckpt.restore import redo_logs
from commands import call as call
from test_redo import flip, frames, logged_run, newest_pack, opened


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A folder as a killed job left it, checkpoints of steps 5 and 10 and a log up to 13; digests of all steps."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_RUNTIME_DIR", str(folder))
        digests = logged_run(str(folder / "run"), 13, 5)
    return str(folder / "run.copy"), digests


@pytest.fixture
def left(logged: tuple[str, list[str]], tmp_path: Path) -> tuple[str, list[str]]:
    """A copy of that, to be changed."""
    folder, digests = logged
    return str(shutil.copytree(folder, tmp_path / "left")), digests


def restored(folder: str | Path) -> tuple[int, str]:
    """What a Checkpointer finds in a run, and every bit of it."""
    state = toy.build(seed=7)
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder))]) as cp:
        return cp.restore(), toy.digest(state)


def test_a_run_made_of_any_step(logged: tuple[str, list[str]], tmp_path: Path, call: Any) -> None:
    """Checkpoint or not, it is what the training had; what was redone is said, and only then. By default the newest."""
    folder, digests = logged
    steps = {13: "3 steps", 12: "2 steps", 11: "1 step"}
    for asked, wanted in ((None, 13), (12, 12), (11, 11), (10, 10), (5, 5)):
        words, to = ([] if asked is None else ["--step", asked]), tmp_path / str(wanted)
        found = call("restore", folder, *words, "--to", to, "--format", "run", "--json")
        assert found.code == 0 and restored(to) == (wanted, digests[wanted])
        said = [note for note in found.json["notes"] if "redo log" in note]
        expected = f"step {wanted} comes from the redo log: step 10 was loaded, and {steps.get(wanted)} after it redone"
        assert said == ([expected] if wanted > 10 else [])


def test_weights_of_a_redone_step(left: tuple[str, list[str]], tmp_path: Path, call: Any) -> None:
    """As safetensors and as a torch file, on a terminal too; nothing is changed in the run."""
    folder, digests = left
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    found = call("restore", folder, "--to", tmp_path / "w.safetensors")
    assert found.code == 0 and "Note: step 13 comes from the redo log" in found.out
    assert call("restore", folder, "--to", tmp_path / "w.pt").code == 0
    state = toy.build(seed=7)
    with opened(state, copy) as cp:
        assert cp.restore() == 13 and toy.digest(state) == digests[13]
    expected = state["model"].state_dict()
    weights, file = load_file(tmp_path / "w.safetensors"), torch.load(tmp_path / "w.pt", weights_only=True)
    assert weights.keys() == expected.keys() == file["model"].keys()
    assert all(torch.equal(weights[name], t) and torch.equal(file["model"][name], t) for name, t in expected.items())
    assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == before


def test_differences_between_redone_steps(logged: tuple[str, list[str]], call: Any) -> None:
    """Steps are compared whether they are checkpoints or not; a step is equal to itself."""
    folder, _ = logged
    assert call("diff", f"{folder}@13", f"{folder}@13").code == 0
    found = call("diff", f"{folder}@10", f"{folder}@12", "--json")
    assert found.code == 1 and found.json["tensors"]
    assert (found.json["b"]["redone"], found.json["b"]["base_step"]) == (2, 10) and "redone" not in found.json["a"]
    assert call("diff", f"{folder}@14", folder).code == 2


def test_a_damaged_log_leads_as_far_as_it_is_sound(left: tuple[str, list[str]], tmp_path: Path, call: Any) -> None:
    """By default the last sound step is taken, and one that is asked for and cannot be had is an error."""
    folder, digests = left
    stored = frames(folder)[12]
    flip(stored.path, stored.offset + stored.size // 2)
    assert call("restore", folder, "--to", tmp_path / "a", "--format", "run").code == 0
    assert restored(tmp_path / "a") == (11, digests[11])
    for step in (12, 13):
        found = call("restore", folder, "--step", step, "--to", tmp_path / "b", "--format", "run")
        assert found.code == 2 and not (tmp_path / "b").exists()
        assert f"step {step} is no checkpoint" in found.err and "step 12 does not match its digest" in found.err
    stored = frames(folder)[11]
    flip(stored.path, stored.offset + stored.size // 2)
    assert call("restore", folder, "--to", tmp_path / "c", "--format", "run").code == 0
    assert restored(tmp_path / "c") == (10, digests[10])


def test_a_step_of_the_present_history_comes_before_one_that_was_undone(
    left: tuple[str, list[str]], tmp_path: Path, call: Any
) -> None:
    """Training went back to step 5 and took another way: step 10 is what the log has of it, not the old checkpoint."""
    folder, digests = left
    state, found = toy.build(), dict[int, str]()
    with opened(state, folder, every=100) as cp:
        cp.restore(step=5)
        torch.manual_seed(99)
        for step in range(6, 12):
            toy.train_step(state)
            save = cp.step(step)
            assert save is not None and save.logged(60).step == step
            found[step] = toy.digest(state)
        shutil.copytree(folder, tmp_path / "went")
    for step in (10, 11, 7):
        to = tmp_path / f"to{step}"
        assert call("restore", tmp_path / "went", "--step", step, "--to", to, "--format", "run").code == 0
        assert restored(to) == (step, found[step]) and found[step] != digests[step]


def test_what_is_damaged_of_the_checkpoint_below_comes_from_elsewhere(
    left: tuple[str, list[str]], tmp_path: Path, call: Any
) -> None:
    """With --from, as of any checkpoint; without it, from the checkpoint before."""
    folder, digests = left
    shutil.copytree(folder, tmp_path / "whole")
    pack = newest_pack(Path(folder))
    for at in range(0, pack.stat().st_size, 1000):
        flip(pack, at)
    for number, words in enumerate((["--from", tmp_path / "whole"], [])):
        to = tmp_path / f"to{number}"
        found = call("restore", folder, *words, "--to", to, "--format", "run", "--json")
        assert found.code == 0 and restored(to) == (13, digests[13])
        assert bool(found.json["repaired"]) == bool(words)
        assert f"step {10 if words else 5} was loaded" in " ".join(found.json["notes"])


def test_a_run_without_any_checkpoint(run_dir: str, tmp_path: Path, call: Any) -> None:
    """What is in its redo log is enough."""
    digests = logged_run(run_dir, 4, 100)
    assert call("restore", f"{run_dir}.copy", "--to", tmp_path / "to", "--format", "run").code == 0
    assert restored(tmp_path / "to") == (4, digests[4])


def test_more_than_there_is_memory_for(
    logged: tuple[str, list[str]], tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint needs none, and is taken instead with a word; a step that was asked for is an error."""
    folder, digests = logged
    monkeypatch.setattr(memory_pressure, "available_memory", lambda: 1000)
    found = call("restore", folder, "--to", tmp_path / "to", "--format", "run")
    assert found.code == 0 and "0 B may be taken" in found.err, found.err
    assert restored(tmp_path / "to") == (10, digests[10])
    found = call("restore", folder, "--step", "12", "--to", tmp_path / "b", "--format", "run")
    assert found.code == 2 and "redone in memory" in found.err and not (tmp_path / "b").exists()


def test_one_rank_that_saw_a_nan_is_enough() -> None:
    """Whoever speaks for all ranks' logs: what is exported, or restored by itself, is finite for all of them."""
    attempt = Attempt(1, 2, "ab")
    for said, expected in (((True, False), False), ((True, None), None), ((True, True), True), ((None, False), False)):
        frames = {rank: {attempt: SimpleNamespace(frame=SimpleNamespace(finite=one))} for rank, one in enumerate(said)}
        assert redo_logs.Logs("file:///nowhere", cast("Any", frames)).finite(attempt, range(2)) is expected


def test_show_says_how_to_get_there(logged: tuple[str, list[str]], call: Any) -> None:
    """A step of the log is none that `show` can look into, but not one that is lost."""
    found = call("show", logged[0], "--step", "12")
    assert found.code == 2 and "ckpt restore" in found.err and "12" in found.err and "--to PATH" in found.err
    assert call("ls", logged[0], "--json").json["redo"][-1]["step"] == 13
