"""Tests of Megatron's `torch_dist` checkpoints, imported and exported, compared with Megatron's own save and load."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from commands import run_here
from foreign import warmed
from parallel import said_by

MAIN = "import megatron_on_cpu, megatron_own; megatron_own.main()"
SAVED, STEPS = 3, 5  # as in megatron_own
BY_FOUR = {"data-bf16": "2x1", "data-fp16": "1x2", "tensor-fp32": "4x1", "pipeline-bf16": "2x2"}
CASES = tuple(BY_FOUR)
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Return an interpreter with megatron-core and our packages."""
    yield from warmed("megatron", "megatron_on_cpu", "megatron.core.models.gpt", "megatron.core.optimizer")


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with Megatron's checkpoint of each case, and the run imported from it."""
    folder = tmp_path_factory.mktemp("torch_dist")
    said_by(python, 2, MAIN, "save", folder, *CASES)
    for case in CASES:
        assert run_here("import", folder / "theirs" / case, folder / "runs" / case).code == 0
    return folder


@pytest.fixture(scope="module")
def resumed(python: Path, folder: Path) -> Said:
    return said_by(python, 2, MAIN, "resume", folder, *CASES)[1]


@pytest.fixture(scope="module")
def loaded(python: Path, folder: Path, resumed: Said) -> Said:
    """Load the exports on four ranks with other sharding."""
    for case in CASES:
        given = folder / "given" / case
        given.parent.mkdir(exist_ok=True)
        assert run_here("restore", folder / "runs" / case, "--to", given, "--format", "torch_dist").code == 0
    return said_by(python, 4, MAIN, "look", folder, *(f"{case}={sizes}" for case, sizes in BY_FOUR.items()))[1]


def of(said: Said, case: str) -> dict[str, Any]:
    (one,) = (one for one in said if one["case"] == case)
    return one


@pytest.mark.parametrize("case", CASES)
def test_imported_run_continues_like_megatron(case: str, resumed: Said) -> None:
    """Weights, moments, counts, learning rate and loss scale equal those of Megatron's own load, and these and the
    losses are equal at every later step."""
    found = of(resumed, case)
    assert found["ours"] == found["theirs"]
    assert found["ours"][0] == SAVED and len(set(found["ours"])) == len(found["ours"])


@pytest.mark.parametrize("case", CASES)
def test_megatron_loads_exported_checkpoint(case: str, loaded: Said) -> None:
    """With other tensor and pipeline parallelism, the ranks together have all weights and moments, bit for bit."""
    found = of(loaded, case)
    assert (found["step"], found["wrong"]) == (STEPS, [])
    assert found["counts"][0] == [2.0 if case == "data-fp16" else 5.0]  # three steps of fp16 have overflowed


def test_export_and_import_are_exact(folder: Path, loaded: Said) -> None:
    """All tensors and settings are equal; common.pt has only plain values."""
    case = "data-fp16"
    assert run_here("import", folder / "given" / case, folder / "again").code == 0
    before, after = ckpt.load(folder / "runs" / case), ckpt.load(folder / "again")
    names = {name for name in before if name.startswith(("model.", "optim."))}
    assert names == {name for name in after if name.startswith(("model.", "optim."))}
    assert all(torch.equal(before[name], after[name]) for name in names)
    common = torch.load(folder / "given" / case / "common.pt", weights_only=True)
    assert common["iteration"] == STEPS and common["opt_param_scheduler"]["num_steps"] == STEPS


def test_object_in_optimizer_is_named(folder: Path, tmp_path: Path) -> None:
    """The import fails unless the object or the whole optimizer is excluded; so does one in the schedule."""
    shutil.copytree(folder / "theirs" / CASES[0], tmp_path / "theirs")
    common = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)
    common["optimizer"]["optimizer"]["param_groups"][0]["hook"] = argparse.Namespace()
    common["opt_param_scheduler"]["rule"] = argparse.Namespace()
    torch.save(common, tmp_path / "theirs" / "common.pt")
    told = [
        f"{where} (an object of argparse.Namespace, in common.pt)"
        for where in ("megatron.optimizer.optimizer.param_groups.0.hook", "sched.opt_param_scheduler.rule")
    ]
    refused = run_here("import", tmp_path / "theirs", tmp_path / "run")
    assert refused.code and ", ".join(told) in refused.err and not (tmp_path / "run").exists()
    for name, words in (("run", ["--skip-objects"]), ("weights", ["--only", "model"])):
        done = run_here("import", tmp_path / "theirs", tmp_path / name, *words)
        assert done.code == 0, done.err
        said = " ".join((done.out + done.err).split())
        assert [f"skipped {one}" in said for one in told] == [name == "run"] * 2


def test_unsupported_megatron_formats_are_rejected(folder: Path, tmp_path: Path) -> None:
    """An optimizer saved by rank is rejected with its name and the remedy; the weights alone can be imported.
    Other formats and runs of other trainers are rejected too."""
    by_rank = folder / "theirs" / "by-rank"
    refused = run_here("import", by_rank, tmp_path / "run")
    assert refused.code and "optim (which Megatron saved as dp_reshardable" in refused.err
    assert "--dist-ckpt-optim-fully-reshardable" in refused.err and not (tmp_path / "run").exists()
    assert run_here("import", by_rank, tmp_path / "run", "--only", "model").code == 0
    assert ckpt.load(tmp_path / "run")["model.decoder.layers.3.mlp.linear_fc2.weight"].dtype == torch.bfloat16

    shutil.copytree(by_rank, tmp_path / "zarr")
    (tmp_path / "zarr" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert (
        "has Megatron's format 'zarr', not torch_dist" in run_here("import", tmp_path / "zarr", tmp_path / "other").err
    )
    refused = run_here("export", tmp_path / "run", "--to", tmp_path / "out", "--format", "torch_dist")
    assert "this is not a run of ckpt.megatron" in refused.err
