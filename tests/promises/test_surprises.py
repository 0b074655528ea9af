"""Unexpected users and files: edited exports, changing sources, colliding names."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckpt
import inside
from commands import call, save
from peak import PEAK
from processes import run_script

__all__ = ["call"]  # the fixture


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small training with an optimizer and plain values."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optim.step()
    save(tmp_path / "run", {"model": model, "opt": optim, "meta": {"epoch": 3}}, range(1, 2), every=1)
    return tmp_path / "run"


# -- files that changed --


def test_edited_export_is_detected(run: Path, tmp_path: Path, call: Any) -> None:
    """A setting, a value, a tensor more or less: refused, with what to do; without the description all of it counts."""
    assert call("export", run, "--to", tmp_path / "e.pt").code == 0
    edits = (
        lambda x: x["opt"]["param_groups"][0].update(lr=5.0),
        lambda x: x["meta"].update(epoch=99),
        lambda x: x["model"].update(extra=torch.ones(7)),
        lambda x: x.update(note="hi"),
        lambda x: x["model"].pop("bias"),
    )
    for number, edit in enumerate(edits):
        edited = torch.load(tmp_path / "e.pt", weights_only=True)
        edit(edited)
        torch.save(edited, tmp_path / f"{number}.pt")
        found = call("import", tmp_path / f"{number}.pt", tmp_path / f"run-{number}")
        assert found.code == 2 and "changed after its export" in found.err, number
        del edited["__everystep__"]
        torch.save(edited, tmp_path / f"{number}.pt")
        assert call("import", tmp_path / f"{number}.pt", tmp_path / f"run-{number}").code == 0
    shown = call("show", tmp_path / "run-1", "--json").json
    assert {v["path"]: v["value"] for v in shown["values"]}["meta.epoch"] == 99
    unedited = torch.load(tmp_path / "e.pt", weights_only=True)
    torch.save(unedited, tmp_path / "same.pt")
    assert call("import", tmp_path / "same.pt", tmp_path / "same").code == 0
    assert call("diff", run, tmp_path / "same").code == 0


def test_a_file_with_an_object_in_it_is_imported_without_it(tmp_path: Path, call: Any) -> None:
    """Rejected with path and class and two alternatives, each of which works; `diff` reports what it does not
    compare."""
    source, state = tmp_path / "s.pt", {"model": {"w": torch.ones(3)}, "cli": {"args": Namespace(lr=0.1), "seed": 1}}
    torch.save(state, source)
    refused = call("import", source, tmp_path / "no")
    assert refused.code == 2 and "cli.args (an object of argparse.Namespace)" in refused.err
    assert "--skip-objects" in refused.err and "--only model" in refused.err and not (tmp_path / "no").exists()
    assert call("import", source, tmp_path / "part", "--only", "model").code == 0
    all_but = call("import", source, tmp_path / "all-but", "--skip-objects")
    assert all_but.code == 0 and "skipped cli.args (an object of argparse.Namespace)" in all_but.out
    assert call("import", source, tmp_path / "no", "--only", "cli").code == 2
    compared = call("diff", tmp_path / "all-but", source)
    assert compared.code == 0 and "argparse.Namespace" in compared.err
    values = {v["path"]: v["value"] for v in call("show", tmp_path / "all-but", "--json").json["values"]}
    assert values == {"cli.seed": 1}, values


def test_lenient_restores_report_skipped_entries(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """strict=False reports mismatches; if nothing matches, it still raises an error, and nothing is changed."""
    model = nn.Linear(30, 20)
    with ckpt.Checkpointer({"model": model, "optim": torch.optim.AdamW(model.parameters())}, str(run)) as cp:
        assert cp.restore(strict=False) == 1
        assert any("opt is in the checkpoint" in text for text in cp.last_restore.left_out)
        assert "strict=False skipped entries" in caplog.text
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        ckpt.Checkpointer({"net": model}, str(run)) as cp,
        pytest.raises(ckpt.errors.MismatchError, match="no entry fits"),
    ):
        cp.restore(strict=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwritten in place between two windows, or replaced: nothing appears."""
    for how in ("in place", "replaced"):
        source, target = tmp_path / "s.pt", tmp_path / f"run {how}"
        torch.save({"model": {"a": torch.zeros(3000, 1000), "b": torch.zeros(3000, 1000)}}, source)

        def change(how: str = how) -> None:
            torch.save({"model": {"a": torch.ones(3000, 1000), "b": torch.ones(3000, 1000)}}, tmp_path / "new.pt")
            if how == "replaced":
                os.replace(tmp_path / "new.pt", tmp_path / "s.pt")
            else:
                shutil.copyfile(tmp_path / "new.pt", tmp_path / "s.pt")

        with monkeypatch.context() as patch:
            inside.interrupt_at(patch, inside.FILE_IS_CONVERTED, change, before=False)
            found = call("import", source, target)
        assert found.code == 2 and "changed while it was read" in found.err and not target.exists(), how


def test_arrays_in_pickles_are_not_taken_from_an_older_file(tmp_path: Path, call: Any) -> None:
    """An import that was stopped, and is repeated after its source was rewritten, is another import."""
    import numpy as np

    source = tmp_path / "s.pt"
    torch.save({"meta": {"arr": np.zeros(1000), "tag": "old"}}, source)
    fail = "export.whole:kill"
    code = "import sys\nfrom inside import main\nsys.exit(main(sys.argv[1:]))"
    assert run_script(code, "import", source, tmp_path / "new", fail=fail).returncode == -9
    torch.save({"meta": {"arr": np.ones(1000), "tag": "new"}}, source)
    found = call("import", source, tmp_path / "new")
    assert found.code == 2 and "unfinished export from another source" in found.err
    shutil.rmtree(tmp_path / "new.partial")
    assert call("import", source, tmp_path / "new").code == 0
    assert ckpt.load(tmp_path / "new").plain("meta")["arr"].sum() == 1000


# -- tensors that lie otherwise --


def test_transposed_tensors_within_bounds(tmp_path: Path, call: Any) -> None:
    """A large tensor that is stored in columns arrives correctly, within the announced memory."""
    weight = torch.randn(4000, 5000).t()
    torch.save({"model": {"w": weight, "v": torch.randn(7, 6, 5).permute(2, 0, 1)[1:4, ::2]}}, tmp_path / "t.pt")
    expected = torch.load(tmp_path / "t.pt")["model"]
    result = run_script(PEAK, "import", tmp_path / "t.pt", tmp_path / "new", "--max-memory", "420MiB", fresh=True)
    assert result.returncode == 0 and int(result.stderr) < 420 * 1024, result.stderr  # of which torch has 310
    found = ckpt.load(tmp_path / "new")
    assert all(torch.equal(found[f"model.{name}"], expected[name]) for name in expected)


# -- names --


def test_chosen_names_are_the_names_that_are_written(tmp_path: Path, call: Any) -> None:
    """For tied weights, the name that matches is used; a run of only that module restores into it."""
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    b.weight = a.weight
    save(tmp_path / "run", {"a": a, "b": b}, range(1, 2), every=1)
    assert call("export", tmp_path / "run", "--to", tmp_path / "b.safetensors", "--only", "b.*").code == 0
    assert set(safetensors.torch.load_file(tmp_path / "b.safetensors")) == {"weight", "bias"}
    words = ["--only", "b.*", "--format", "run"]
    assert call("export", tmp_path / "run", "--to", tmp_path / "b", *words).code == 0
    fresh = nn.Linear(3, 3)
    with ckpt.Checkpointer({"b": fresh}, str(tmp_path / "b")) as cp:
        assert cp.restore() == 1
    assert torch.equal(fresh.weight, a.weight)


def test_each_pattern_must_match(run: Path, tmp_path: Path, call: Any) -> None:
    """`meta.*` means the entry meta, and a typo among good patterns is named."""
    words = ["--only", "model.*", "--only", "opt.*", "--only", "meta.*"]
    assert call("export", run, "--to", tmp_path / "a.pt", *words).code == 0
    there = torch.load(tmp_path / "a.pt", weights_only=True)
    assert there["meta"] == {"epoch": 3} and "opt" in there
    found = call("export", run, "--to", tmp_path / "b.pt", *words, "--only", "typo.*")
    assert found.code == 2 and "'typo.*'" in found.err


# -- places --


def test_a_run_whose_name_ends_like_a_step(run: Path, tmp_path: Path, call: Any) -> None:
    """`r@7` is that folder if it is a run, and a step of `r` else."""
    run.rename(tmp_path / "r@7")
    assert call("diff", tmp_path / "r@7", f"{tmp_path / 'r@7'}@1").code == 0


def test_dcp_folders_with_keys_in_tuples(tmp_path: Path, call: Any) -> None:
    """Dicts with numbers as keys, inside of tuples, go to DCP and come back."""
    state = {"model": nn.Linear(2, 2), "meta": {"x": ({0: torch.ones(3), 1: 2},), "y": [{5: torch.zeros(1)}]}}
    save(tmp_path / "run", state, range(1, 2), every=1)
    assert call("export", tmp_path / "run", "--to", tmp_path / "d", "--format", "dcp").code == 0
    assert call("import", tmp_path / "d", tmp_path / "back").code == 0
    assert call("diff", tmp_path / "run", tmp_path / "back").out == "equal\n"


# -- what is passed over --


class Config:
    """An object that only a loader that runs code could restore."""


def test_unsupported_objects_do_not_prevent_a_weight_export(tmp_path: Path, call: Any) -> None:
    """A run that DCP saved with an object of a user's class: its weights are exported, and a note names the object.
    A Checkpointer that opens such a run raises the remedy, also with strict=False."""
    import torch.distributed.checkpoint as dcp

    import ckpt.dcp

    state = {"model": {"w": torch.randn(3)}, "cfg": Config()}
    with pytest.warns(UserWarning):
        dcp.save(state, checkpoint_id="step-1", storage_writer=ckpt.dcp.StorageWriter(tmp_path / "run"))
    found = call("export", tmp_path / "run", "--to", tmp_path / "w.safetensors")
    assert found.code == 0 and torch.equal(
        safetensors.torch.load_file(tmp_path / "w.safetensors")["w"], state["model"]["w"]
    )
    assert "cfg" in found.out and "skipped" in found.out
    for strict in (True, False):
        with ckpt.Checkpointer({"model": nn.Linear(2, 2)}, str(tmp_path / "run")) as cp:
            with pytest.raises(ckpt.errors.MismatchError, match=r"with ckpt\.dcp"):
                cp.restore(strict=strict)
