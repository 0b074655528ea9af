"""Tests of `ckpt.torchtitan` with its real trainer on CPU ranks: kills, other ranks, and other initial checkpoints."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from foreign import errors_of_versions, run_foreign, warmed
from parallel import said_by

MAIN = "import titan_on_cpu, titan_toy; titan_toy.main()"
KILLED, STEPS = 5, 8  # as in titan_toy
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Return an interpreter with torchtitan and our packages, whose versions it would change."""
    # Without its trainer: pyarrow, which that imports, starts a thread.
    parts = (f"torchtitan.{name}" for name in ("models.llama3", "components.checkpointer", "components.metrics"))
    yield from warmed("torchtitan", "titan_on_cpu", *parts)


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


@pytest.fixture(scope="module")
def killed(python: Path, folder: Path) -> Said:
    """Return the output of two ranks with torchtitan's own manager, and then with ours until they were killed."""
    codes, said = said_by(python, 2, MAIN, "kill", folder)
    assert codes == [-signal.SIGKILL] * 2
    return said


@pytest.fixture(scope="module")
def resumed(python: Path, folder: Path, killed: Said) -> Said:
    return said_by(python, 2, MAIN, "go_on", folder)[1]


@pytest.fixture(scope="module")
def steps_kept(folder: Path, resumed: Said) -> dict[str, list[int]]:
    return {name: _steps(folder / name) for name in ("ours/checkpoint", "also")}


@pytest.fixture(scope="module")
def by_four(python: Path, folder: Path, steps_kept: Any) -> Said:
    codes, said = said_by(python, 4, MAIN, "four", folder)
    assert codes == [-signal.SIGKILL] * 4
    return said


@pytest.fixture(scope="module")
def begun(python: Path, folder: Path, by_four: Said) -> Said:
    return said_by(python, 2, MAIN, "begin", folder)[1]


@pytest.fixture(scope="module")
def piped(python: Path, folder: Path) -> Said:
    """Return the output of two ranks with two model parts each: without saving, saved until killed, and resumed."""
    codes, said = said_by(python, 2, MAIN, "pipeline", folder)
    assert codes == [-signal.SIGKILL] * 2
    return said + said_by(python, 2, MAIN, "pipeline_on", folder)[1]


@pytest.fixture(scope="module")
def replicated(python: Path, folder: Path, by_four: Said) -> Said:
    """Return the output of the model on two by two ranks (HSDP): without saving, saved until killed, and resumed."""
    return by_four + said_by(python, 4, MAIN, "replicated_on", folder)[1]


def of(said: Said, case: str) -> Said:
    """Return the lines of a case, without its name."""
    return [{key: one for key, one in line.items() if key != "case"} for line in said if line["case"] == case]


def _digests(one: dict[str, Any]) -> dict[str, str]:
    return {key: one[key] for key in ("weights", "moments", "counts")}


def _steps(run: Path) -> list[int]:
    return sorted(one.step for one in ckpt.Run(str(run)).list())


def test_killed_training_continues_exactly(killed: Said, resumed: Said) -> None:
    """Training continues from memory at the last step before SIGKILL. Weights, moments, learning rates and counts are
    equal then, and these, losses, gradient norms and tokens at every later step."""
    untouched, (first, *later) = of(killed, "theirs")[1:], of(resumed, "ours")
    assert of(killed, "ours")[1:] == untouched[: KILLED + 1]
    assert (first["loaded"], first["tier"], first["found"]) == (KILLED, "memory", True)
    assert _digests(first) == _digests(untouched[KILLED - 1])
    assert later == untouched[KILLED:]
    assert len({one["weights"] for one in untouched}) == len({one["loss"] for one in untouched}) == STEPS


def test_folders_have_interval_steps_and_keep_latest_k(steps_kept: dict[str, list[int]]) -> None:
    assert steps_kept == {"ours/checkpoint": [6, 8], "also": [6, 8]}


def test_save_runs_no_collective(killed: Said, folder: Path, steps_kept: Any) -> None:
    """No save runs a collective, and fused weights are saved as stored. torchtitan's own manager gathers them."""
    ours, theirs = of(killed, "ours, saved"), of(killed, "theirs, saved")
    assert [(one["step"], one["collectives"]) for one in ours] == [(step + 1, 0) for step in range(KILLED)]
    assert [one["step"] for one in ours if one["done"]] == [2, 4]
    assert all(one["collectives"] for one in theirs if one["done"])
    assert "model.layers.0.attention.qkv_linear.wqkv.weight" in ckpt.load(folder / "also")


def test_load_only_writes_nothing(by_four: Said, resumed: Said) -> None:
    """Four ranks load a checkpoint of two, except excluded entries, and train. No file there changes."""
    loaded, stepped, said = of(by_four, "looked at")
    assert loaded["loaded"] == STEPS and stepped["step"] == STEPS + 1 and said == {"unchanged": True}
    ended = of(resumed, "ours")[-1]
    assert loaded["weights"] == ended["weights"] and loaded["moments"] != ended["moments"]


def test_loader_state_of_other_ranks_is_rejected(by_four: Said) -> None:
    """torchtitan's loader cannot reshard them; the message explains the remedy."""
    (said,) = of(by_four, "refused")
    assert "exclude_from_loading=['dataloader']" in said["error"]


def test_tensor_parallel_ranks_restore_and_return(by_four: Said, begun: Said, resumed: Said) -> None:
    """Whole weights and moments, and the data position, equal the final ones of the previous ranks."""
    ended = of(resumed, "ours")[-1]
    for said, case, step in ((by_four, "tensor parallel", STEPS), (begun, "taken back", STEPS + 2)):
        loaded, *later = of(said, case)
        assert loaded["loaded"] == step and _digests(loaded) == _digests(ended)
        ended = later[-1]
    assert ended["step"] == STEPS + 3


def test_hsdp_training_continues_after_kill(replicated: Said) -> None:
    """With HSDP, training continues exactly, four fully sharded ranks restore it, and no save runs a collective."""
    untouched, said = of(replicated, "untouched")[1:], of(replicated, "replicated")
    resumed = said[KILLED + 2 :]
    assert resumed[0]["loaded"] == KILLED and resumed[0]["tier"] == "memory"
    assert _digests(resumed[0]) == _digests(untouched[KILLED - 1])
    assert resumed[1:] == untouched[KILLED:]
    loaded = of(replicated, "divided")[0]
    assert loaded["loaded"] == STEPS and _digests(loaded) == _digests(resumed[-1])
    assert not any(one["collectives"] for one in of(replicated, "replicated, saved"))


def test_pipeline_parts_continue_after_kill(piped: Said) -> None:
    """Killed training continues exactly. Ranks with all layers restore all weights and moments, and vice versa, though
    each part has its own optimizer. No save runs a collective."""
    untouched, said = of(piped, "alone")[1:], of(piped, "pipeline")
    again, *later = said[KILLED + 2 :]
    assert said[1 : KILLED + 2] == untouched[: KILLED + 1] and later == untouched[KILLED:]
    assert (again["loaded"], again["tier"]) == (KILLED, "memory")
    ended = untouched[-1]
    for case in ("tensor parallel", "pipeline again"):
        loaded, stepped = of(piped, case)
        assert all(loaded[key] == ended[key] for key in ("weights", "moments"))
        assert loaded["loaded"] == ended["step"] and stepped["weights"] != loaded["weights"]
        ended = stepped
    assert {one["collectives"] for one in of(piped, "pipeline, saved")} == {0}


def test_training_starts_from_torchtitan_checkpoint(begun: Said, killed: Said) -> None:
    """A full checkpoint of torchtitan's own manager continues as that training would."""
    untouched = of(killed, "theirs")[1:]
    loaded, *later = of(begun, "from theirs")
    assert loaded["loaded"] == 4 and _digests(loaded) == _digests(untouched[3])
    assert later == untouched[4:6]


@pytest.mark.parametrize("source", ["a run", "Hugging Face"])
def test_training_starts_from_weights_alone(source: str, begun: Said, resumed: Said) -> None:
    """Weights of another run of ours, or of a Hugging Face export, are equal at step 0."""
    loaded, stepped = of(begun, f"from {source}")
    assert (loaded["loaded"], loaded["found"], stepped["step"]) == (0, True, 1)
    assert loaded["weights"] == of(resumed, "ours")[-1]["weights"]


def test_manager_passes_checks_of_torchtitan(python: Path, tmp_path: Path) -> None:
    """Covered: which calls save, an empty folder, an error for a missing step, a run before `initial_load_path`, and no
    effect when disabled."""
    code = "import sys, titan_manager; titan_manager.main(sys.argv[1])"
    said = json.loads(run_foreign(python, code, tmp_path).splitlines()[-1])
    assert "step 9" in said.pop("step that is not there") and "step 5" in said.pop("step of an empty folder")
    assert said == {
        "found in an empty folder": False,
        "saved": [False, False, True, False, True],
        "comes back": True,
        "kept": [3, 5],
        "load only": [True, False, False],
        "kept after that": [3, 5],
        "first": [True, False],
        "off": [False, False],
    }


def test_unsupported_torchtitan_version_fails_at_import(python: Path) -> None:
    """An unsupported version fails at import with the supported range; a missing package, with what to install."""
    versions = ("0.2.1", "0.4.0", "1.0.0")
    errors = errors_of_versions(python, "torchtitan", "torchtitan", *versions)
    for version, error in zip(versions, errors, strict=True):
        assert f"supports torchtitan from 0.3 and below 0.4, but {version} is installed" in error
    with pytest.raises(ImportError, match=r"pip install 'everystep\[torchtitan\]'"):
        ckpt.torchtitan  # noqa: B018
