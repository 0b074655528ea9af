"""Multi-rank checkpoints are converted to every other form and back by the commands, without changing a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpt
from commands import call
from parallel import MAIN, free_port, launch, reports

__all__ = ["call"]  # the fixture

STEPS = 5
SAVED_BY = 4
MODES = ("fsdp", "fsdp_tp", "pp", "ddp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks have trained and saved a model in each of these ways: `MODE` is the run, `MODE.pt` what was in it."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_RUNTIME_DIR", str(folder))
        reports(launch(SAVED_BY, MAIN, "save", folder, folder, STEPS, *MODES, port=free_port()))
    return folder


def there_and_back(call: Any, run: Path, out: Path, back: Path) -> None:
    """Convert a run to another form, and back to a run."""
    words = ["--format", "dcp"] if out.suffix == "" else []
    assert call("export", run, "--to", out, *words).code == 0
    assert call("import", out, back).code == 0


@pytest.mark.parametrize("form", ["out.pt", "out"], ids=["torch", "dcp"])
def test_whole_states_come_back(saved: Path, tmp_path: Path, call: Any, form: str) -> None:
    """Through one torch.save file, or a DCP folder, and back: two ranks restore the checkpoint that four saved."""
    for mode in MODES:
        there_and_back(call, saved / mode, tmp_path / mode / form, tmp_path / "back" / mode)
    for mode, found in reports(
        launch(2, MAIN, "load", tmp_path / "back", saved, STEPS, *MODES, port=free_port())
    ).items():
        for one in found:
            assert "error" not in one and one["wrong"] == [] and one["tensors"] > 0, (mode, one)


def test_cut_for_other_ranks(saved: Path, tmp_path: Path, call: Any) -> None:
    """Converted to runs of another number of ranks, which yet another number restores."""
    for mode in MODES:
        assert call("restore", saved / mode, "--to", tmp_path / mode, "--world-size", 3).code == 0
        assert call("verify", tmp_path / mode).code == 0
    for mode, found in reports(launch(2, MAIN, "load", tmp_path, saved, STEPS, *MODES, port=free_port())).items():
        for one in found:
            assert "error" not in one and one["wrong"] == [], (mode, one)


@pytest.mark.parametrize("mode", MODES)
def test_weights_as_hubs_have_them(saved: Path, tmp_path: Path, call: Any, mode: str) -> None:
    """safetensors of the whole model, which the library reads, and which come back as a run with the same weights."""
    assert call("restore", saved / mode, "--to", tmp_path / "hf", "--shard-size", "5KB").code == 0
    whole = ckpt.load(saved / mode)
    there: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        there |= safetensors.torch.load_file(file)
    assert there and all(torch.equal(tensor, whole[f"model.{name}"]) for name, tensor in there.items())
    assert call("import", tmp_path / "hf", tmp_path / "back", "--step", STEPS).code == 0
    found = call("diff", saved / mode, tmp_path / "back", "--only", "model.*", "--json").json
    assert (found["tensors"], found["changed"], found["only_in_a"], found["only_in_b"]) == ([], [], [], [])


def test_negative_control_one_changed_number_is_seen(saved: Path, tmp_path: Path, call: Any) -> None:
    """A weight that is changed in the torch.save file in between arrives, and the comparison reports it."""
    assert call("restore", saved / "fsdp", "--to", tmp_path / "out.pt").code == 0
    there = torch.load(tmp_path / "out.pt", weights_only=True)
    there["model"]["layers.0.up.weight"].view(torch.int32)[3, 2] ^= 1
    torch.save(there, tmp_path / "changed.pt")
    assert call("import", tmp_path / "changed.pt", tmp_path / "back").code == 0
    found = call("diff", saved / "fsdp", tmp_path / "back", "--json")
    assert found.code == 1 and [t["name"] for t in found.json["tensors"]] == ["model.layers.0.up.weight"]
