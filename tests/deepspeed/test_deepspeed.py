"""Tests of `ckpt.deepspeed` with the real DeepSpeed, on CPU ranks: kills, other ZeRO stages, other numbers of ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from foreign import errors_of_versions, run_foreign, warmed
from parallel import said_by

MAIN = "import deepspeed_toy; deepspeed_toy.main()"
PIPELINE = "import deepspeed_pipeline_toy; deepspeed_pipeline_toy.main()"
PIPED = ["0-tied", "1-tied"]
ON_CPU = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
launch = partial(said_by, DS_ACCELERATOR="cpu")
KILLED, STEPS = 4, 7  # as in deepspeed_toy
CASES = (
    "0-fp32",
    "0-bf16",
    "1-bf16",
    "1-bf16-fp32-sums",
    "2-fp16-twice",
    "2-bf16-offload",
    "3-fp16",
    "3-fp32-offload",
)
OTHERS = {  # the stage that each is restored into
    "0-fp32": "3-fp32-offload",
    "0-bf16": "2-bf16-offload",
    "1-bf16": "3-bf16",
    "2-fp16-twice": "3-fp16",
    "3-fp16": "0-fp16",
    "3-fp32-offload": "2-fp32",
}


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Return an interpreter with DeepSpeed and our packages: transformers and Lightning behave differently with it."""
    yield from warmed("deepspeed", "torch._inductor.compile_fx", "deepspeed.pipe", "transformers.trainer", **ON_CPU)


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def untouched(python: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the output of two ranks without everystep. Then all cases were killed in the middle of step 5."""
    codes, said = launch(python, 2, MAIN, "kill", folder, *CASES)
    assert codes == [-signal.SIGKILL] * 2
    assert [one["case"] for one in said if "killed" in one] == list(CASES)
    return [one for one in said if "step" in one]


@pytest.fixture(scope="module")
def resumed(python: Path, folder: Path, untouched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return launch(python, 2, MAIN, "go_on", folder, *CASES)[1]


def of(said: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [one for one in said if one["case"] == case]


@pytest.mark.parametrize("case", CASES)
def test_killed_training_continues_exactly(case: str, untouched: Any, resumed: Any) -> None:
    """Training continues from memory at the last step before SIGKILL. Weights, moments, outputs, counts, learning rate
    and loss scale are equal at that step, and these and the losses at every later step."""
    first, *later = of(resumed, case)
    alone = of(untouched, case)
    assert first["restored"] == KILLED and first["tier"] == "memory"
    for key in ("high", "low", "counts"):
        assert first[key] == alone[KILLED - 1][key], key
    assert later == alone[KILLED:]
    assert len({one["high"] for one in alone}) > 3


def test_loss_scales_change_in_these_runs(untouched: Any) -> None:
    """The comparison covers them only if a step was skipped, and a scale grew."""
    for case in [case for case in CASES if "-fp16" in case]:
        assert len({json.loads(one["counts"])[3] for one in of(untouched, case)}) > 1
    assert any(json.loads(one["counts"])[1] for one in untouched)


@pytest.fixture(scope="module")
def by_three(python: Path, folder: Path, resumed: Any) -> list[dict[str, Any]]:
    """Continue with three ranks, in other ZeRO stages."""
    return launch(python, 3, MAIN, "take_over", folder, *(f"{case}={other}" for case, other in OTHERS.items()))[1]


@pytest.fixture(scope="module")
def by_one(python: Path, folder: Path, by_three: Any) -> list[dict[str, Any]]:
    """Continue with one rank after them, in the original stages."""
    return launch(python, 1, MAIN, "take_over", folder, *(f"{case}={case}" for case in OTHERS))[1]


@pytest.mark.parametrize("case", OTHERS)
def test_restore_on_other_ranks_and_stages(case: str, resumed: Any, by_three: Any, by_one: Any) -> None:
    """Weights, moments and counts equal the final ones of the previous ranks, as DeepSpeed gathers them.
    With equal precision, so does the model's output. Training continues."""
    ended = of(resumed, case)[-1]
    for step, said in ((STEPS, by_three), (STEPS + 1, by_one)):
        restored, later = of(said, case)
        assert restored["restored"] == step and later["step"] == step + 1
        assert restored["high"] == ended["high"]
        skipped = json.loads(later["counts"])[1] > json.loads(restored["counts"])[1]  # for its loss scale
        assert skipped == (later["high"] == restored["high"])
        assert json.loads(restored["counts"])[:3] == json.loads(ended["counts"])[:3]
        if case.split("-")[1] == ended.get("other", case).split("-")[1] == restored["other"].split("-")[1]:
            assert restored["low"] == ended["low"]
        ended = later


READ_BY_THEIRS = ["1-bf16", "2-fp16-twice", "3-fp32-offload"]  # their script cannot read ZeRO-0


@pytest.mark.parametrize("case", READ_BY_THEIRS)
def test_restored_file_equals_zero_to_fp32(case: str, python: Path, folder: Path, resumed: Any, tmp_path: Path) -> None:
    """It equals the result for DeepSpeed's own checkpoint of the step: the same names, shapes and numbers.
    A safetensors file has tied weights once. It also has frozen ones, which DeepSpeed omits from ZeRO-1 checkpoints."""
    code = (
        "import sys, torch; from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get;"
        "torch.save({k: v.clone() for k, v in get(sys.argv[1]).items()}, sys.argv[2])"
    )
    theirs = tmp_path / "theirs.pt"
    run_foreign(python, code, f"{folder}/{case}-deepspeed", theirs, **ON_CPU)
    expected = torch.load(theirs, weights_only=True)
    ckpt.Run(f"{folder}/{case}").export(tmp_path / "ours.safetensors", step=STEPS)
    found = load_file(tmp_path / "ours.safetensors")
    model = {name.removeprefix("model."): one for name, one in found.items() if name.startswith("model.")}
    assert model.keys() - {name for name in model if "frozen" in name} == expected.keys() - {
        "again.weight",
        *(name for name in expected if "frozen" in name),
    }
    assert {"frozen.weight", "frozen.bias"} <= model.keys()
    for name, one in expected.items():
        own = model["last.weight" if name == "again.weight" else name]
        assert torch.equal(own.float(), one.float()), name


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.long)])
def test_hugging_face_trainer_with_deepspeed_continues(stage: int, python: Path, tmp_path: Path) -> None:
    """With only the callback: killed at the start of step 6 of 8, it continues from memory at step 5, with losses,
    gradient norms and learning rates of an undisturbed run, including dropout."""
    main = "import deepspeed_hf_toy; deepspeed_hf_toy.main()"
    untouched = launch(python, 2, main, tmp_path / "untouched", stage, -1)[1]
    codes, killed = launch(python, 2, main, tmp_path / "run", stage, 5)
    assert codes == [-signal.SIGKILL] * 2
    resumed = launch(python, 2, main, tmp_path / "run", stage, -1)[1]
    assert resumed[-1] == {"restored": [5, "memory"]} and untouched[-1] == {"restored": [None, None]}

    def steps(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for one in said if "loss" in one]

    assert len(steps(untouched)) == 8
    assert steps(killed) == steps(untouched)[:5]
    # The log of step 5 may be from before or after its save; all later lines are equal.
    assert steps(resumed)[-3:] == steps(untouched)[5:]


def test_unsupported_deepspeed_version_fails_at_import(python: Path) -> None:
    """An unsupported version fails with the supported range; a missing DeepSpeed, with the package to install."""
    versions = ("0.17.6", "0.20.0", "1.0.0")
    for version, error in zip(versions, errors_of_versions(python, "deepspeed", "deepspeed", *versions), strict=True):
        assert f"supports DeepSpeed from 0.18 and below 0.20, but {version} is installed" in error
    with pytest.raises(ImportError, match=r"pip install 'everystep\[deepspeed\]'"):
        ckpt.deepspeed  # noqa: B018


@pytest.fixture(scope="module")
def piped(python: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run a two-stage pipeline: killed, continued, restored by ranks with all layers and by more ranks."""
    said = {}
    for world, action in ((2, "kill"), (2, "go_on"), (2, "all_layers"), (4, "again"), (2, "refuse")):
        cases = ["0-bias"] if action == "refuse" else PIPED
        codes, said[action] = launch(python, world, PIPELINE, action, folder / "piped", *cases)
        assert codes == [-signal.SIGKILL if action == "kill" else 0] * world
    return said


@pytest.mark.parametrize("case", PIPED)
def test_pipeline_stages_continue_after_kill(case: str, piped: dict[str, list[dict[str, Any]]]) -> None:
    """After a kill, losses and weights equal those of an undisturbed run. Other ranks start with the final weights.
    The first and the last stage share a weight."""
    said = {action: [one for one in lines if one["case"] == case] for action, lines in piped.items()}
    untouched, killed = said["kill"][:6], said["kill"][6:]
    assert [one["step"] for one in untouched] == list(range(1, 7)) and killed == untouched[:4]
    restored, *later = said["go_on"]
    assert (restored["restored"], restored["tier"]) == (4, "memory")
    assert restored["weights"] == untouched[3]["weights"] and later == untouched[4:]
    ended = untouched[-1]
    for action in ("all_layers", "again"):
        restored, stepped = said[action]
        assert (restored["restored"], restored["weights"]) == (ended["step"], ended["weights"])
        assert stepped["weights"] != restored["weights"]
        ended = stepped


def test_ambiguous_parameter_of_tied_layer_is_rejected(piped: dict[str, list[dict[str, Any]]]) -> None:
    """DeepSpeed ties the weight of such a layer, but not its bias, so the name is ambiguous and saving fails."""
    (said,) = piped["refuse"]
    assert "tied_modules.end.bias" in said["error"]
