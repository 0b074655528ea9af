"""Tests of `ckpt.megatron` with the real megatron-core, on CPU ranks: kills, also with other parallelism."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from foreign import errors_of_versions, warmed
from parallel import said_by

MAIN = "import megatron_on_cpu, megatron_toy; megatron_toy.main()"
KILLED, STEPS = 3, 5  # as in megatron_toy
BY_FOUR = {  # per case: tensor and pipeline sizes for four ranks, and model parts per stage if several
    "data-bf16": "1x1",
    "data-fp16": "1x2",
    "data-small": "2x1",
    "tensor-fp32": "4x1",
    "tensor-bf16": "2x2",
    "interleaved-bf16": "2x2x2",
}
CASES = tuple(BY_FOUR)
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Return an interpreter with megatron-core and our packages."""
    yield from warmed("megatron", "megatron_on_cpu", "megatron.core.models.gpt", "megatron.core.optimizer")


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def untouched(python: Path, folder: Path) -> Said:
    """Return the output of two ranks without everystep. Then all cases were killed in the middle of step 4."""
    codes, said = said_by(python, 2, MAIN, "kill", folder, *CASES)
    assert codes == [-signal.SIGKILL] * 2
    assert [one["case"] for one in said if "killed" in one] == list(CASES)
    return [one for one in said if "step" in one]


@pytest.fixture(scope="module")
def resumed(python: Path, folder: Path, untouched: Said) -> Said:
    return said_by(python, 2, MAIN, "go_on", folder, *CASES)[1]


@pytest.fixture(scope="module")
def by_four(python: Path, folder: Path, resumed: Said) -> Said:
    """Continue on four ranks with other sharding."""
    return said_by(python, 4, MAIN, "take_over", folder, *(f"{case}={divided}" for case, divided in BY_FOUR.items()))[1]


@pytest.fixture(scope="module")
def by_one(python: Path, folder: Path, by_four: Said) -> Said:
    """Continue on one rank after them."""
    return said_by(python, 1, MAIN, "take_over", folder, *(f"{case}=1x1" for case in CASES))[1]


def of(said: Said, case: str) -> Said:
    return [one for one in said if one["case"] == case]


@pytest.mark.parametrize("case", CASES)
def test_killed_training_continues_exactly(case: str, untouched: Said, resumed: Said) -> None:
    """Training continues from memory at the last step before SIGKILL. fp32 weights, moments, model output, learning
    rate, loss scale and random numbers are equal then, these and the losses at every later step."""
    first, *later, _ = of(resumed, case)
    alone = of(untouched, case)
    assert first["restored"] == KILLED and first["tier"] == "memory"
    assert first["digest"] == alone[KILLED - 1]["digest"]
    assert later == alone[KILLED:]
    assert len({one["digest"] for one in alone}) == STEPS


def test_loss_scales_change_in_these_runs(untouched: Said) -> None:
    """The comparison covers them only if a step was skipped."""
    assert len({one["scale"] for one in of(untouched, "data-fp16")}) > 1


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_part_of_loaded_state(case: str, resumed: Said, by_four: Said, by_one: Said) -> None:
    """Ranks with the saving parallelism, four ranks with another, and one rank together have every bit, also one step
    later.
    The loss is equal, and the optimizer continues to count. (In data-small only one rank has parameters to update.)"""
    *_, ended = of(resumed, case)
    assert ended["wrong"] == []
    step, loss, counts = STEPS, ended["evaluated"], ended["counts"]
    for said in (by_four, by_one):
        restored, later = of(said, case)
        assert restored["restored"] == step and later["step"] == step + 1
        assert restored["wrong"] == later["wrong"] == []
        assert restored["evaluated"] == pytest.approx(loss, rel=1e-5 if "fp32" in case else 2e-2)
        assert restored["counts"] == counts and len(counts[0]) == 1
        step, loss, counts = later["step"], later["evaluated"], later["counts"]


REFUSED = {
    "experts": "experts (MoE) are on other ranks",
    "optimizer": "FP32Optimizer is not Megatron's DistributedOptimizer: set use_distributed_optimizer=True",
    "names": "optim: ckpt.megatron uses these names for its own entries",
    "random": "numbers: ckpt.megatron saves random states already",
    "chunks": "model_chunks must be a list of Megatron's DistributedDataParallel, not GPTModel",
    "fp8": "weights in fp8 or fp4",
    "precision": "a precision-aware optimizer keeps its weights internally",
    "offloaded": "an optimizer that is offloaded to the host",
    "instances": "several instances of the distributed optimizer",
    "buffer": "rank 1: ckpt.megatron: seen is a buffer",  # only that rank has it
    "vocabulary": "model.embedding.word_embeddings.weight has shape [64, 32] in the checkpoint and [72, 32] here",
}


def test_unsupported_settings_are_rejected_on_all_ranks(python: Path, folder: Path, by_one: Said) -> None:
    """The error names the reason on all ranks, even if only one has it, and nothing is saved."""
    said = said_by(python, 2, MAIN, "refuse", folder)[1]
    assert [one["case"] for one in said] == list(REFUSED)
    for one in said:
        assert REFUSED[one["case"]] in one["error"]


def test_unsupported_version_is_rejected(python: Path) -> None:
    """An import fails with the supported range, or if megatron-core is missing, with what to install."""
    versions = ("0.15.3", "0.17.0rc1", "1.0.0")
    known = "ckpt.megatron supports megatron-core from 0.16 and below 0.17, but"
    errors = errors_of_versions(python, "megatron.core", "megatron", *versions)
    assert errors == [f"{known} {version} is installed" for version in versions]
    with pytest.raises(ImportError, match=r"pip install 'everystep\[megatron\]'"):
        ckpt.megatron  # noqa: B018
