"""Exports of Lightning runs are files that Lightning itself continues from."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ckpt

pytest.importorskip("lightning")
import lightning.pytorch as pl

from ckpt.lightning import CheckpointCallback

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, BATCHES = 8, 3


class Model(pl.LightningModule):
    """A model with an argument `odd` that is not a plain value, and cannot be in a checkpoint."""

    def __init__(self, width: int, lr: float = 0.1, odd: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, width)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.net(batch) - batch).pow(2).mean()

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"note": "from a hook"}


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(4 * BATCHES, WIDTH, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]


def model_of(package: Any) -> Any:
    """Return the model as a module of either Lightning package."""
    if package is pl:
        return Model(WIDTH)
    kind = type("Model", (package.LightningModule,), {k: v for k, v in vars(Model).items() if k != "__classcell__"})
    kind.__init__ = lambda self: package.LightningModule.__init__(self)  # type: ignore[method-assign,misc]
    made = kind()
    made.save_hyperparameters({"width": WIDTH, "lr": 0.1})
    made.net = nn.Linear(WIDTH, WIDTH)
    return made


def trainer(folder: Path, epochs: int, *callbacks: Any, package: Any = pl, **more: Any) -> Any:
    theirs = any("Checkpoint" in type(one).__name__ for one in callbacks if not isinstance(one, CheckpointCallback))
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": theirs}
    settings = {"accelerator": "cpu", "callbacks": list(callbacks), "default_root_dir": folder, **off, **more}
    return package.Trainer(max_epochs=epochs, **settings)


def trained(folder: Path, epochs: int, *callbacks: Any, **arguments: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model, found = Model(WIDTH, **arguments), trainer(folder, epochs, *callbacks)
    found.fit(model, loader())
    return model, found


@pytest.mark.parametrize("step", [BATCHES, 2 * BATCHES], ids=["an epoch in the middle", "the last"])
def test_lightning_continues_from_exported_file(tmp_path: Path, step: int) -> None:
    """`load_from_checkpoint` restores the model and its arguments, and `test` accepts the file.

    From the end of an epoch, `fit` continues like an uninterrupted run, bit for bit, schedule included."""
    saved, _ = trained(tmp_path, 2, CheckpointCallback(str(tmp_path / "run"), every=1), lr=0.2)
    file = tmp_path / "model.ckpt"
    ckpt.Run(str(tmp_path / "run")).export(file, step=step)
    found = torch.load(file, weights_only=True)
    assert (found["epoch"], found["global_step"], found["mine"]) == (step // BATCHES, step, {"note": "from a hook"})
    assert not [key for key in found if key.startswith("__")]
    loaded = Model.load_from_checkpoint(file)
    assert loaded.hparams == {"width": WIDTH, "lr": 0.2, "odd": None}
    stored = ckpt.load(str(tmp_path / "run"), step=step, only="model.*").sub("model").all()
    assert stored.keys() == loaded.state_dict().keys()
    assert all(torch.equal(stored[key], value) for key, value in loaded.state_dict().items())
    if step == 2 * BATCHES:
        assert all(map(torch.equal, loaded.state_dict().values(), saved.state_dict().values()))
    expected = trainer(tmp_path, 1).test(loaded, loader(), verbose=False)
    assert trainer(tmp_path, 1).test(Model(WIDTH), loader(), ckpt_path=file, verbose=False) == expected
    wanted, _ = trained(tmp_path, 4, lr=0.2)
    model, again = Model(WIDTH, lr=0.2), trainer(tmp_path, 4)
    again.fit(model, loader(), ckpt_path=file)
    assert again.global_step == 4 * BATCHES
    assert all(map(torch.equal, model.state_dict().values(), wanted.state_dict().values()))


def test_arguments_without_plain_values_are_passed_again(tmp_path: Path) -> None:
    """They prevent neither training nor export. Pass them to `load_from_checkpoint`, as with Lightning's own files."""
    trained(tmp_path, 1, CheckpointCallback(str(tmp_path / "run"), every=1), odd=nn.ReLU())
    file = tmp_path / "model.ckpt"
    ckpt.Run(str(tmp_path / "run")).export(file)
    assert torch.load(file, weights_only=True)["hyper_parameters"] == {"width": WIDTH, "lr": 0.1}
    assert isinstance(Model.load_from_checkpoint(file, odd=nn.GELU()).hparams["odd"], nn.GELU)


def test_export_refuses_runs_of_other_trainers(tmp_path: Path, capsys: Any) -> None:
    """The message lists the available formats. Runs of Hugging Face's Trainer have an entry of the same name."""
    from ckpt.tools.cli import app

    hugging_face = {"model": nn.Linear(2, 2), "trainer": {"state": {"epoch": 1.0}}, "pretrained": {"files": {}}}
    for name, state in (("plain", {"model": nn.Linear(2, 2)}), ("hf", hugging_face)):
        run, file = str(tmp_path / name), str(tmp_path / f"{name}.ckpt")
        with ckpt.Checkpointer(state, run) as cp:
            cp.save(1).wait_durable()
        capsys.readouterr()
        assert app.main(["restore", run, "--to", file]) == 2
        said = capsys.readouterr().err
        assert f"step 1 of file://{run} is not from a Lightning run. --format torch" in said and "Traceback" not in said
        assert ("from_pretrained" in said) == (name == "hf") and not Path(file).exists()
        assert app.main(["restore", run, "--to", file, "--format", "torch"]) == 0
        assert torch.load(file, weights_only=True)["model"]["weight"].shape == (2, 2)
    trained(tmp_path, 1, CheckpointCallback(str(tmp_path / "run"), every=1))
    with pytest.raises(ckpt.errors.UsageError, match="omit --only"):
        ckpt.Run(str(tmp_path / "run")).export(tmp_path / "some.ckpt", only=["model.*"])
    capsys.readouterr()
    assert app.main(["restore", str(tmp_path / "run"), "--to", str(tmp_path / "whole.ckpt")]) == 0
    assert "Note" not in capsys.readouterr().out  # no note that users could not act on


@pytest.mark.parametrize("where", ["a relative root", "a link", "a logger's folder", "the other package"])
def test_last_file_of_model_checkpoint_is_ignored(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit(ckpt_path="last")` continues from the newest step at every start, wherever Lightning keeps that file."""
    monkeypatch.chdir(tmp_path)
    Path("real").mkdir()
    Path("linked").symlink_to("real")
    for epochs in (2, 3):
        found = importlib.import_module("pytorch_lightning") if where == "the other package" else pl
        settings: dict[str, Any] = {"logger": found.loggers.CSVLogger("logs", version=1)} if "logger" in where else {}
        saver = found.callbacks.ModelCheckpoint("linked/files" if where == "a link" else None, save_last=True)
        torch.manual_seed(0)
        model = model_of(found)
        saving = CheckpointCallback("run", every=1)
        trainer(Path(), epochs, saver, saving, package=found, **settings).fit(model, loader(), ckpt_path="last")
    assert list(tmp_path.rglob("last*.ckpt"))
    wanted, _ = trained(tmp_path / "whole", 3)
    assert all(map(torch.equal, model.state_dict().values(), wanted.state_dict().values()))
