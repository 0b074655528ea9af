"""`ckpt.torchtitan` under the real trainer of torchtitan, on CPU ranks: killed and gone on, on other ranks, and begun
with what others have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from foreign import warmed
from parallel import said_by
from processes import PYTHONPATH, REPO

MAIN = "import titan_on_cpu, titan_toy; titan_toy.main()"
KILLED, STEPS = 5, 8  # as in titan_toy
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """An interpreter that has torchtitan beside our packages, whose versions it would change."""
    # Not its trainer: pyarrow, which that imports, starts a thread.
    parts = (f"torchtitan.{name}" for name in ("models.llama3", "components.checkpointer", "components.metrics"))
    yield from warmed("torchtitan", "titan_on_cpu", *parts)


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


@pytest.fixture(scope="module")
def killed(python: Path, folder: Path) -> Said:
    """What two ranks said under torchtitan's own manager, and then under ours, until they were killed."""
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
    """Two parts of the model on each of two ranks: without saving, and then saved until they were killed."""
    codes, said = said_by(python, 2, MAIN, "pipeline", folder)
    assert codes == [-signal.SIGKILL] * 2
    return said + said_by(python, 2, MAIN, "pipeline_on", folder)[1]


@pytest.fixture(scope="module")
def replicated(python: Path, folder: Path, by_four: Said) -> Said:
    """The model on two ranks, and on two others again (HSDP): without saving, saved until they were killed, and on."""
    return by_four + said_by(python, 4, MAIN, "replicated_on", folder)[1]


def of(said: Said, case: str) -> Said:
    """Without the name of the case."""
    return [{key: one for key, one in line.items() if key != "case"} for line in said if line["case"] == case]


def _digests(one: dict[str, Any]) -> dict[str, str]:
    return {key: one[key] for key in ("weights", "moments", "counts")}


def _steps(run: Path) -> list[int]:
    return sorted(one.step for one in ckpt.Run(str(run)).list())


def test_killed_it_goes_on_as_if_nothing_had_been(killed: Said, resumed: Said) -> None:
    """From the last step before SIGKILL, out of memory: weights, moments, learning rates and counts are equal then,
    and losses, gradient norms, tokens and all of these at every step after it."""
    untouched, (first, *later) = of(killed, "theirs")[1:], of(resumed, "ours")
    assert of(killed, "ours")[1:] == untouched[: KILLED + 1]
    assert (first["loaded"], first["tier"], first["found"]) == (KILLED, "memory", True)
    assert _digests(first) == _digests(untouched[KILLED - 1])
    assert later == untouched[KILLED:]
    assert len({one["weights"] for one in untouched}) == len({one["loss"] for one in untouched}) == STEPS


def test_the_folders_hold_every_interval_and_keep_latest_k(steps_kept: dict[str, list[int]]) -> None:
    """Two of the steps that the interval names, in its folder and in further ones."""
    assert steps_kept == {"ours/checkpoint": [6, 8], "also": [6, 8]}


def test_to_save_gathers_nothing(killed: Said, folder: Path, steps_kept: Any) -> None:
    """No collective runs in any save, and fused weights are saved as they lie; torchtitan's own manager divides them,
    for which it gathers them."""
    ours, theirs = of(killed, "ours, saved"), of(killed, "theirs, saved")
    assert [(one["step"], one["collectives"]) for one in ours] == [(step + 1, 0) for step in range(KILLED)]
    assert [one["step"] for one in ours if one["done"]] == [2, 4]
    assert all(one["collectives"] for one in theirs if one["done"])
    assert "model.layers.0.attention.qkv_linear.wqkv.weight" in ckpt.load(folder / "also")


def test_load_only_writes_nothing(by_four: Said, resumed: Said) -> None:
    """It loads on four ranks what two have saved, but for what is excluded, and trains; no file there has changed."""
    loaded, stepped, said = of(by_four, "looked at")
    assert loaded["loaded"] == STEPS and stepped["step"] == STEPS + 1 and said == {"unchanged": True}
    ended = of(resumed, "ours")[-1]
    assert loaded["weights"] == ended["weights"] and loaded["moments"] != ended["moments"]


def test_batches_of_another_number_of_shares_are_refused(by_four: Said) -> None:
    """torchtitan's loader cannot divide them; the message says how to go on."""
    (said,) = of(by_four, "refused")
    assert "exclude_from_loading=['dataloader']" in said["error"]


def test_tensor_parallel_ranks_take_over_and_give_back(by_four: Said, begun: Said, resumed: Said) -> None:
    """Whole weights and moments are those with which the others ended, and so is where the data is."""
    ended = of(resumed, "ours")[-1]
    for said, case, step in ((by_four, "tensor parallel", STEPS), (begun, "taken back", STEPS + 2)):
        loaded, *later = of(said, case)
        assert loaded["loaded"] == step and _digests(loaded) == _digests(ended)
        ended = later[-1]
    assert ended["step"] == STEPS + 3


def test_replicas_of_divided_ranks(replicated: Said) -> None:
    """HSDP: killed, it goes on as if nothing had been; four ranks that all divide the model take over, and no save runs
    a collective."""
    untouched, said = of(replicated, "untouched")[1:], of(replicated, "replicated")
    resumed = said[KILLED + 2 :]
    assert resumed[0]["loaded"] == KILLED and resumed[0]["tier"] == "memory"
    assert _digests(resumed[0]) == _digests(untouched[KILLED - 1])
    assert resumed[1:] == untouched[KILLED:]
    loaded = of(replicated, "divided")[0]
    assert loaded["loaded"] == STEPS and _digests(loaded) == _digests(resumed[-1])
    assert not any(one["collectives"] for one in of(replicated, "replicated, saved"))


def test_parts_of_a_pipeline(piped: Said) -> None:
    """Killed, it goes on as if nothing had been. Ranks that hold all layers take over all weights and moments, and give
    them back, though each part has an optimizer of its own; and no save runs a collective."""
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


def test_it_begins_with_what_torchtitan_has_written(begun: Said, killed: Said) -> None:
    """Of a checkpoint of torchtitan's own manager with all that is in it: as if that one had gone on."""
    untouched = of(killed, "theirs")[1:]
    loaded, *later = of(begun, "from theirs")
    assert loaded["loaded"] == 4 and _digests(loaded) == _digests(untouched[3])
    assert later == untouched[4:6]


@pytest.mark.parametrize("source", ["a run", "Hugging Face"])
def test_it_begins_with_the_weights_alone(source: str, begun: Said, resumed: Said) -> None:
    """Of another run of ours, and of what was exported in the form of Hugging Face: the same numbers, at step 0."""
    loaded, stepped = of(begun, f"from {source}")
    assert (loaded["loaded"], loaded["found"], stepped["step"]) == (0, True, 1)
    assert loaded["weights"] == of(resumed, "ours")[-1]["weights"]


def test_what_its_own_tests_ask_of_a_manager(python: Path, tmp_path: Path) -> None:
    """Which calls save, what an empty folder gives, that a step which is asked for and not there is an error and no
    fresh start, that a folder with a run is preferred to `initial_load_path`, and that it does nothing
    when it is off."""
    path = {"PYTHONPATH": PYTHONPATH}
    script = [python, REPO / "tests/lib/titan_manager.py", tmp_path]
    ended = subprocess.run(script, env={**os.environ, **path}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
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


def test_what_it_does_not_know_is_refused(python: Path) -> None:
    """Another version at import, with the range that is known; and where there is none, what to install."""
    code = """
import sys, torchtitan
for torchtitan.__version__ in sys.argv[1:]:
    try:
        import ckpt.torchtitan
    except ImportError as error:
        print(error)
"""
    versions = ("0.2.1", "0.4.0", "1.0.0")
    ended = subprocess.run(
        [python, "-c", code, *versions], env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True
    )
    for version in versions:
        assert f"supports torchtitan from 0.3 and below 0.4, but {version} is installed" in ended.stdout, ended.stderr
    with pytest.raises(ImportError, match=r"pip install 'everystep\[torchtitan\]'"):
        ckpt.torchtitan  # noqa: B018
