"""Multi-rank checkpoints are converted to every other form and back by the commands, without changing a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpt
from commands import call
from parallel import MAIN, free_port, gathered, launch, reports, whole

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


@pytest.mark.parametrize(("world", "to"), [(1, 2), (3, 3)])
def test_cut_for_other_ranks(saved: Path, tmp_path: Path, call: Any, world: int, to: int) -> None:
    """Converted to runs of other numbers of ranks: the same and other numbers of ranks restore them."""
    for mode in MODES:
        assert call("restore", saved / mode, "--to", tmp_path / mode, "--world-size", world).code == 0
        assert call("verify", tmp_path / mode).code == 0
    for mode, found in reports(launch(to, MAIN, "load", tmp_path, saved, STEPS, *MODES, port=free_port())).items():
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


# -- what torch's DCP has saved to a run --

DCP_RANKS = """
import os, sys, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import ckpt.dcp, parallel
from torch.distributed.checkpoint.state_dict import *

warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
live = parallel.build("fsdp")
for step in range(3):
    parallel.train_step("fsdp", live, step)
for flat in (False, True):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optim = get_optimizer_state_dict(live["model"], live["optim"], options=options)
    state = {"model": get_model_state_dict(live["model"]), "optim": optim, "meta": {"seen": 11, "more": [1, None]}}
    dcp.save(state, checkpoint_id="step-3", storage_writer=ckpt.dcp.StorageWriter(f"{sys.argv[1]}/{flat}"))
found = parallel.gathered(live)
if dist.get_rank() == 0:
    torch.save(found, f"{sys.argv[1]}/expected.pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends
"""


def test_dcp_checkpoints_convert_to_every_form(tmp_path: Path, call: Any) -> None:
    """Four ranks save through `ckpt.dcp`, with the optimizer nested and flattened: a Checkpointer, torch and hubs get
    the same, and the order of parameters is that of the model."""
    for done in launch(SAVED_BY, DCP_RANKS, tmp_path, port=free_port()):
        assert done.returncode == 0, done.stderr
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for form in ("False", "True"):
        assert call("export", tmp_path / form, "--to", tmp_path / f"{form}.pt").code == 0
        assert call("export", tmp_path / form, "--to", tmp_path / f"{form}-run", "--format", "run").code == 0
        assert call("export", tmp_path / form, "--to", tmp_path / f"{form}.safetensors").code == 0
        there = torch.load(tmp_path / f"{form}.pt", weights_only=True)
        net, net2 = whole(), whole()
        optim, optim2 = (torch.optim.AdamW(n.parameters()) for n in (net, net2))
        net.load_state_dict(there["model"])
        optim.load_state_dict(there["optim"])
        state = {"model": net2, "optim": optim2, "meta": {"seen": 0, "more": None}}
        with ckpt.Checkpointer(state, str(tmp_path / f"{form}-run")) as cp:
            assert cp.restore() == 3
        assert there["meta"] == state["meta"] == {"seen": 11, "more": [1, None]}
        for model, optimizer in ((net, optim), (net2, optim2)):
            found = gathered({"model": model, "optim": optimizer})
            assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected), form
        weights = safetensors.torch.load_file(tmp_path / f"{form}.safetensors")
        assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in weights.items()) and weights
