"""CheckpointIO: files after `save_checkpoint`, and the error for a `ckpt_path` without a checkpoint."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt

pytest.importorskip("lightning")
import fsspec
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from ckpt.lightning import CheckpointIO, checkpoint_io
from s3_server import MotoServer, environment

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 4


class Model(BoringModel):
    """Logs the number of the epoch as its validation loss."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        if config is not None:
            self.save_hyperparameters()

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val_loss", float(self.current_epoch))
        return super().validation_step(batch, index)


def fit(folder: str, *callbacks: Any, epochs: int = EPOCHS, model: Any = None, **more: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        callbacks=list(callbacks),
        plugins=[CheckpointIO()],
        accelerator="cpu",
        limit_train_batches=2,
        limit_val_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        max_epochs=epochs,
        default_root_dir=folder,
    )
    trainer.fit(model or Model(), **more)
    return trainer


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a folder or a bucket. s3fs caches listings."""
    if request.param == "folder":
        yield str(tmp_path / "files")
    elif request.param == "memory":
        yield f"memory://{tmp_path.name}/files"
    else:
        pytest.importorskip("s3fs")
        with MotoServer() as server:
            server.make_bucket("bucket")
            for name, value in environment(server.url).items():
                monkeypatch.setenv(name, value)
            yield "s3://bucket/files"
            fsspec.get_filesystem_class("s3").clear_instance_cache()


def names(folder: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(folder)
    system.invalidate_cache()
    return sorted(name.rstrip("/").rpartition("/")[2] for name in system.ls(path, detail=False))


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
def test_two_model_checkpoints_keep_all_epochs_in_one_folder(place: str) -> None:
    """They keep the two best and every epoch under the same default names. Neither replaces files of the other."""
    best = ModelCheckpoint(place, monitor="val_loss", mode="max", save_top_k=2)
    every = ModelCheckpoint(place, save_top_k=-1, every_n_epochs=1)
    fit(place, best, every)
    found = names(place)
    assert {name.split("-")[0] for name in found} == {f"epoch={epoch}" for epoch in range(EPOCHS)}
    assert len(found) == EPOCHS + 2
    steps = [CheckpointIO().load_checkpoint(f"{place}/{name}")["global_step"] for name in found]
    assert sorted(set(steps)) == [2, 4, 6, 8]


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
def test_nothing_is_left_of_a_save_whose_path_was_emptied(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, path, real = CheckpointIO(), f"{place}/last.ckpt", checkpoint_io.write_part

    async def emptied(*given: Any) -> Any:
        monkeypatch.setattr(checkpoint_io, "write_part", real)
        system, inner = fsspec.core.url_to_fs(path)
        system.rm(inner, recursive=True)
        return await real(*given)

    def save(step: int) -> None:
        plugin.save_checkpoint({"w": torch.full((10,), step), "global_step": step}, path)

    save(1)
    monkeypatch.setattr(checkpoint_io, "write_part", emptied)
    with pytest.raises(ckpt.errors.RunGoneError):
        save(2)
    save(3)
    assert plugin.load_checkpoint(path)["global_step"] == 3


class Looks(Callback):
    """List the paths right after a save, as loggers and scripts do."""

    def __init__(self, folder: str, looked: threading.Semaphore) -> None:
        self.folder, self.looked, self.seen = folder, looked, list[bool]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        path = f"{self.folder}/{trainer.current_epoch}.ckpt"
        system, inner = fsspec.core.url_to_fs(path)
        assert not system.exists(inner)
        trainer.save_checkpoint(path)
        self.seen.append(system.exists(inner))
        self.looked.release()


def test_path_exists_as_soon_as_the_save_returns(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes begin after the check, because they are slow."""
    writing, looked = checkpoint_io._write, threading.Semaphore(0)

    async def later(*given: Any) -> None:
        await asyncio.to_thread(looked.acquire, timeout=60)
        await writing(*given)

    monkeypatch.setattr(checkpoint_io, "_write", later)
    looks = Looks(place, looked)
    fit(place, looks, epochs=2)
    assert looks.seen == [True, True]
    assert CheckpointIO().load_checkpoint(f"{place}/1.ckpt")["global_step"] == 4


def test_save_that_cannot_be_stored_leaves_no_path(tmp_path: Path) -> None:
    """An error in the state is raised before the folder is created."""
    with pytest.raises(ckpt.errors.StateError, match=r"hyper_parameters\.config"):
        fit(str(tmp_path), ModelCheckpoint(tmp_path / "files"), model=Model(object()))
    assert not list((tmp_path / "files").glob("*.ckpt"))


def test_folder_of_others_is_refused_before_save_returns(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(ckpt.errors.FormatError, match="not a run"):
                trainer.save_checkpoint(tmp_path / "theirs")

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    fit(str(tmp_path), Saves(), epochs=1)
    assert os.listdir(tmp_path / "theirs") == ["notes.txt"]


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
@pytest.mark.parametrize("begun", [False, True])
def test_missing_ckpt_path_is_a_file_not_found_error(place: str, begun: bool) -> None:
    """Lightning's own plugin raises it too. `begun`: a process was killed in its first save to this path."""
    path = f"{place}/missing.ckpt"
    if begun:
        checkpoint_io.read.run(checkpoint_io._create(ckpt.store.normalise(path)))
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        fit(place, ModelCheckpoint(place), ckpt_path=path)
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        CheckpointIO().load_checkpoint(path)


def test_ckpt_path_of_another_kind_is_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ckpt.errors.NoCheckpointError, match="no run"):
        CheckpointIO().load_checkpoint(tmp_path)


class Container:
    """Stands for omegaconf's base class of containers."""

    def __init__(self, content: Any, flags: dict[str, bool] | None = None) -> None:
        self.content, self._metadata = content, type("Metadata", (), {"flags": flags or {}})

    def _get_parent(self) -> None:
        return None

    def _set_flag(self, name: str, value: bool) -> None:
        self._metadata.flags[name] = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other)["content"] == self.content

    __hash__ = None  # type: ignore[assignment]


def test_containers_of_omegaconf_are_stored_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in replaces omegaconf if it is not installed. Without omegaconf, a reader gets plain content."""
    module = type(sys)("omegaconf")
    module.Container = Container  # type: ignore[attr-defined]
    module.DictConfig = type("DictConfig", (Container,), {})  # type: ignore[attr-defined]
    module.ListConfig = type("ListConfig", (Container,), {})  # type: ignore[attr-defined]

    class Functions:
        @staticmethod
        def to_container(value: Container, resolve: bool) -> Any:
            return value.content

        @staticmethod
        def create(content: Any) -> Any:
            kind = module.ListConfig if isinstance(content, list) else module.DictConfig  # type: ignore[attr-defined]
            return kind(content)

    module.OmegaConf = Functions  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf", module)
    config, layers = module.DictConfig({"width": 4}, {"readonly": True}), module.ListConfig([1, 2])  # type: ignore[attr-defined]
    given = {"global_step": 1, "config": config, "more": [(layers,)], "kind": type(config), "w": torch.ones(2)}
    CheckpointIO().save_checkpoint(given, tmp_path / "file.ckpt")
    found = CheckpointIO().load_checkpoint(tmp_path / "file.ckpt")
    assert found["config"] == config and found["config"]._metadata.flags == {"readonly": True}
    assert found["more"] == [(layers,)] and found["kind"] is type(config) and torch.equal(found["w"], given["w"])
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    plain = CheckpointIO().load_checkpoint(tmp_path / "file.ckpt")
    assert plain["config"] == {"width": 4} and plain["more"] == [([1, 2],)] and plain["kind"] is None
