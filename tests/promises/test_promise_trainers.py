"""Guarantees for trainings under Lightning or Hugging Face: the best checkpoints, the restored state, the files that
are left."""

from __future__ import annotations

import json
import logging
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt

pytest.importorskip("lightning")
pytest.importorskip("transformers")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

import hf_toy
import inside
import lightning_toy as toy
from ckpt.lightning import CheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Lightning's hints are no news here."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- a score belongs to the step it was measured at --


class Scored(Callback):
    """Logs "score" in validations, epoch by epoch or batch by batch, and notes at which step each was measured.

    `values`: what is measured, one after the other; None: nothing is logged this time.
    """

    def __init__(self, where: str, values: list[float | None]) -> None:
        self.where, self.values = where, iter(values)
        self.measured: dict[int, float] = {}
        self.digests: dict[int, str] = {}

    def _log(self, trainer: Any, module: Any, **how: Any) -> None:
        if (value := next(self.values, None)) is not None:
            self.measured[trainer.global_step], self.digests[trainer.global_step] = value, toy.digest(module)
            module.log("score", value, **how)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "validation" and not trainer.sanity_checking:
            self._log(trainer, pl_module)
        elif self.where == "sanity":  # of equal scores the older stay; that of the beginning is of no step
            self.digests[trainer.global_step] = toy.digest(pl_module)
            pl_module.log(
                "score", -1.0 if trainer.sanity_checking else self.measured.setdefault(trainer.global_step, 1.0)
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "batch":
            self._log(trainer, pl_module, on_step=True, on_epoch=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "epoch":
            self._log(trainer, pl_module)
        if self.where == "hand" and (value := next(self.values, None)) is not None:
            self.measured[trainer.global_step], self.digests[trainer.global_step] = value, toy.digest(pl_module)
            trainer.callback_metrics["score"] = torch.tensor(value)


HALF: dict[str, Any] = {"val_every": 0.5, "epochs": 3}
IN_A_STEP: dict[str, Any] = {"val_every": 0.5, "accumulate": 3, "epochs": 2}
SELDOM = 1000  # steps: nothing is due by itself
TRAININGS: dict[str, tuple[str, list[float | None], dict[str, Any], list[int]]] = {
    # where it is measured, what, how it is trained, and which steps are the three best
    "every other epoch": ("validation", [2.0, 3.0, 1.0], {"limits": {"check_val_every_n_epoch": 2}}, [48, 16, 32]),
    "in the middle of epochs": ("validation", [5.0, 1.0, None, None, 2.0, 9.0], HALF, [8, 20, 4]),
    "in the middle of a step": ("validation", [4.0, 3.0, 5.0, 6.0], IN_A_STEP, [3, 1, 4]),
    "by a step's batch": ("batch", [float(n % 8) for n in range(20)] + [None] * 28, {"epochs": 6}, [8, 16]),
    "where an epoch ends": ("epoch", [None, 2.0, None, None, 1.0, None], {"epochs": 6}, [40, 16]),
    "not in a sanity check": ("sanity", [], {"epochs": 3}, [8, 16, 24]),
    "by hand": ("hand", [None, 2.0, None, None, 1.0, None], {"epochs": 6}, [40, 16]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAININGS)
def test_a_score_is_of_the_step_it_was_measured_at(tmp_path: Path, name: str) -> None:
    """The best are exactly steps at which the metric was measured, with its score then. Each is saved completely,
    whatever the intervals, with the weights that were scored."""
    where, values, spec, expected = TRAININGS[name]
    run, scored = str(tmp_path / "run"), Scored(where, values)
    places = [ckpt.Tier(run, every=SELDOM, keep=1)]
    options = {"every": None, "memory": ckpt.Memory(every=SELDOM), "monitor": "score", "top_k": 3}
    found = toy.fit(run=places, callback=options, more=[scored], **{"epochs": 6, **spec})["callback"]
    assert [step for _, step in inside.scores(found)] == expected
    for score, step in inside.scores(found):
        assert score == scored.measured[step]
        weights = ckpt.load(run, step=step, only="model.*").sub("model").all()
        model = toy.Model(toy.DEFAULTS)
        model.load_state_dict(weights)
        assert toy.digest(model) == scored.digests[step], step


def test_the_random_numbers_of_a_training_are_not_drawn(tmp_path: Path) -> None:
    """Two that write to one log at the same moment wait for a random time, by random numbers of their own."""
    CheckpointIO().save_checkpoint(STATE, tmp_path / "run")
    before = random.getstate()
    inside.race_to_keep(str(tmp_path / "run"), 4)
    assert random.getstate() == before


# -- Hugging Face: callbacks that have a state come back as they were saved --


class Kept(TrainerCallback, ExportableState):
    """`label` is an argument of the constructor; `count` changes during training, and is reported as an argument, as is
    common."""

    def __init__(self, label: str = "default", count: int = 0, beside: object = None) -> None:
        self.label, self.count, self.beside = label, count, beside
        self.seen: list[Any] = []

    def state(self) -> dict[str, Any]:
        return {"args": {"label": self.label, "count": self.count, "beside": self.beside}, "attributes": {}}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((state.global_step, json.loads(json.dumps(state.stateful_callbacks, default=str))))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1


STOP = 6  # the step after which the first start ends


def two_starts(run: str, first: tuple[Any, ...], second: tuple[Any, ...], **settings: Any) -> dict[str, Any]:
    settings = {
        "patience": 0,
        "max_steps": 8,
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": False,
    } | settings
    hf_toy.run(run, kill=("stop", STOP), more=first, **settings)
    return hf_toy.run(run, more=second, **settings)


def test_callbacks_come_back_as_they_were_saved(run_dir: str) -> None:
    """With restore_callback_states_from_checkpoint, arguments and attributes are the saved ones, also for two callbacks
    of one class, and the state reports it."""
    stopping, kept = EarlyStoppingCallback(), (Kept(), Kept())
    first = (EarlyStoppingCallback(5, 0.2), Kept("first"), Kept("second"))
    two_starts(run_dir, first, (stopping, *kept), restore_callback_states_from_checkpoint=True)
    assert (stopping.early_stopping_patience, stopping.early_stopping_threshold) == (5, 0.2)
    assert [one.label for one in kept] == ["first", "second"]
    assert [one.count for one in kept] == [8, 8]
    step, said = kept[0].seen[0]
    assert step == STOP and said["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 5
    assert [one["args"]["count"] for one in said["Kept"]] == [STOP, STOP] and "TrainerControl" in said
    assert [one["args"]["count"] for one in kept[1].seen[-1][1]["Kept"]] == [7, 7], "as training goes on"


def test_script_arguments_win_and_trained_attributes_are_restored(run_dir: str) -> None:
    """Without that argument too, attributes that changed in training are restored; all others are as in this script."""
    kept = (Kept("new", beside=object()), Kept("newer"))
    stopping = EarlyStoppingCallback(3)
    found = two_starts(run_dir, (EarlyStoppingCallback(5), Kept("first"), Kept("second", count=10)), (stopping, *kept))
    assert found["started_at"] == STOP and stopping.early_stopping_patience == 3
    assert [(one.label, one.count) for one in kept] == [("new", 8), ("newer", 18)]


def test_missing_callback_logs_a_warning(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning has the Trainer's own text and logger; all other callbacks are restored."""
    kept = Kept()
    two_starts(run_dir, (EarlyStoppingCallback(5), Kept("first")), (kept,))
    said = [one for one in caplog.records if "not included in current configuration" in one.getMessage()]
    assert [one.name for one in said] == ["transformers.trainer"] and kept.count == 8
    assert "(EarlyStoppingCallback)" in said[0].getMessage()


# -- Lightning's own checkpoints, in our files --


class Police:
    """Counts threads as Lightning's own tests do: what was not there before and still lives is left behind."""

    def __init__(self) -> None:
        self.before = set(threading.enumerate())

    def left(self) -> list[str]:
        names = [one.name for one in set(threading.enumerate()) - self.before]
        return [name for name in names if not name.startswith("ThreadPoolExecutor-")]  # an AsyncCheckpointIO's own


STATE: dict[str, Any] = {"state_dict": {"w": torch.arange(100_000.0)}, "global_step": 3, "hyper": {"lr": 0.1}}


def lightning_trainer(folder: Path, *plugins: Any, **options: Any) -> tuple[pl.Trainer, ModelCheckpoint]:
    saver = ModelCheckpoint(folder, save_top_k=1, monitor="step", mode="max", save_last=True)
    options = {**toy.quiet, "enable_checkpointing": True, "logger": False, "accelerator": "cpu", **options}
    limits = {"max_epochs": 3, "limit_train_batches": 1, "limit_val_batches": 1, "limit_test_batches": 1}
    return pl.Trainer(plugins=list(plugins), callbacks=[saver], **{**limits, **options}), saver


def runs_in(folder: Path) -> set[str]:
    """Return our checkpoints there."""
    return {path.parent.name for path in folder.glob("*/FORMAT.json")}


def ended(plugin: Any) -> Any:
    """Return the inner plugin, once the threads of the AsyncCheckpointIOs around it are idle."""
    while isinstance(plugin, AsyncCheckpointIO):
        plugin.teardown()
        plugin = plugin.checkpoint_io
    return plugin


PLUGINS: dict[str, Any] = {
    "plain": CheckpointIO,
    "async": lambda: AsyncCheckpointIO(CheckpointIO()),
    "async twice": lambda: AsyncCheckpointIO(AsyncCheckpointIO(CheckpointIO())),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_no_thread_is_left_and_our_plugin_writes(tmp_path: Path, name: str) -> None:
    """Training, validation, a test of a checkpoint, a save and a load outside of them: everything is in our files, is
    there when the call returns, and no thread of ours outlives it; also inside of an AsyncCheckpointIO."""
    police, plugin = Police(), PLUGINS[name]()
    trainer, saver = lightning_trainer(tmp_path, plugin)
    model = BoringModel()
    trainer.validate(model, verbose=False)
    trainer.fit(model)
    assert isinstance(ended(plugin), CheckpointIO) and not police.left()
    left = runs_in(tmp_path)  # an AsyncCheckpointIO removes immediately, perhaps before its save has begun
    assert {Path(saver.best_model_path).name, "last.ckpt"} <= left and (len(left) == 2 or name != "plain")
    trainer.test(model, ckpt_path=saver.last_model_path, verbose=False)
    trainer.test(model, ckpt_path="best", verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    ended(plugin)
    assert not police.left()
    assert ckpt.load(tmp_path / "after.ckpt").step == 3
    again = PLUGINS[name]()
    trainer, _ = lightning_trainer(tmp_path, again, max_epochs=5)
    trainer.fit(BoringModel(), ckpt_path=tmp_path / "after.ckpt")
    ended(again)
    assert trainer.global_step == 5 and not police.left()


def test_storage_options_are_used_or_refused(tmp_path: Path) -> None:
    """A value that is not a dict, and options that a folder cannot use, raise an error; the others reach the store."""
    trainer, _ = lightning_trainer(tmp_path, CheckpointIO())
    trainer.strategy.connect(BoringModel())
    with pytest.raises(ckpt.errors.UsageError, match=r"a dict of fsspec options like .*, not str"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options="my options")
    with pytest.raises(ckpt.errors.UsageError, match="not object"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options=object())
    with pytest.raises(ckpt.errors.UsageError, match="with anon, key are for buckets"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options={"anon": True, "key": "k"})
    with pytest.raises(ckpt.errors.UsageError, match="a dict of fsspec options"):
        ckpt.load(tmp_path / "a.ckpt", storage_options="my options")  # type: ignore[arg-type]
    assert not (tmp_path / "a.ckpt").exists()
    for nothing in (None, {}):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options=nothing)
    assert ckpt.load(tmp_path / "a.ckpt").step == 0
    with pytest.raises(ckpt.CheckpointError, match="nonsense"):
        CheckpointIO().save_checkpoint(STATE, "s3://bucket/a.ckpt", storage_options={"nonsense": 1})
