"""A run of `ckpt.lightning` as the `.ckpt` file that Lightning would have written: for `load_from_checkpoint`,
`trainer.test(ckpt_path=…)` and `trainer.fit(ckpt_path=…)`.

Lightning's file holds the same things under other names. What it has no place for stays out: random numbers, which
batches of the epoch were had already, what was logged in it, metrics that are collected. So `fit` goes on exactly from
the end of an epoch, and from the middle of one as from Lightning's own files: with batches of its own choosing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.errors import UsageError
from ckpt.tools.convert.forms import PRETRAINED
from ckpt.tools.convert.output import Output
from ckpt.tools.convert.source import DESCRIPTION, Origin, RankView
from ckpt.tools.convert.to_torch import plan as plan_torch

NOT_ONE = (
    "a .ckpt is Lightning's file, and {} is of no Lightning run. --format torch writes it as torch.save would have, "
    "--to NAME.safetensors its weights{}"
)
HUGGING_FACE = ", and `python -m ckpt.transformers RUN --to FOLDER` a folder for from_pretrained()"
NAME = "checkpoint"  # the one entry of what a `ckpt.lightning.CheckpointIO` has saved, which is Lightning's file
CONFIG = "everystep.omegaconf"  # in the place of an OmegaConf container: see ckpt.lightning.configs
VERSION = "2.0.0"  # of the form, by which Lightning knows what to make of an old one
OTHER_LOOPS = ("validate_loop", "test_loop", "predict_loop")


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str]) -> Output:
    """As of `convert.to_torch`. UsageError if neither a callback nor a CheckpointIO of `ckpt.lightning` has saved
    it."""
    more = HUGGING_FACE if PRETRAINED in {entry.path for entry in view.entries} else ""

    def shape(root: Mapping[Any, Any]) -> dict[Any, Any]:
        theirs, trainer = root.get(NAME), root.get("trainer")
        if isinstance(theirs, Mapping) and "pytorch-lightning_version" in theirs:
            return {key: _without_marks(value) for key, value in theirs.items()}
        if "model" not in root or not isinstance(trainer, Mapping) or "loops" not in trainer:
            raise UsageError(NOT_ONE.format(origin.title, more))
        return checkpoint(root, view.step or 0)

    # What the notes tell of is mostly what Lightning's file has no place for.
    return replace(plan_torch(origin, view, dtypes, shape), kind="Lightning", notes=())


def _without_marks(value: Any) -> Any:
    """Return OmegaConf containers, which CheckpointIO stores as marked dicts, as plain dicts and lists."""
    if isinstance(value, dict) and CONFIG in value:
        return value.get("content")
    if type(value) is dict:
        return {key: _without_marks(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_marks(one) for one in value)
    return value


def checkpoint(root: Mapping[Any, Any], step: int) -> dict[str, Any]:
    """`root`: the state of a `ckpt.lightning.CheckpointCallback`, nested. `step`: optimizer steps done."""
    trainer = root["trainer"]
    found = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": VERSION,
        "state_dict": root["model"],
        "loops": _loops(trainer["loops"]["fit"]),
        "callbacks": trainer["callbacks"],
        "optimizer_states": [_optimizer(one) for one in root["optim"]],
        "lr_schedulers": list(root.get("sched", ())),
        **trainer.get("constructed", {}),
        **trainer["hooks"],
    }
    found["epoch"] = found["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if precision := root.get("scaler", trainer["precision"]):
        found["MixedPrecision"] = precision
    if trainer["datamodule"]:
        found[trainer.get("datamodule_name", "LightningDataModule")] = trainer["datamodule"]
    found.pop(DESCRIPTION, None)
    return found


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """As torch's own `state_dict` says it."""
    return {"state": saved["state"], "param_groups": saved["param_groups"]}


def _loops(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Where it was. We save behind the last batch of an epoch, Lightning behind that epoch, when it counts as done."""
    found = {name: {**part} if isinstance(part, dict) else part for name, part in fit.items()}
    stepped = fit["epoch_loop.state_dict"]
    if "_batches_that_stepped" in stepped:  # it is counted after we save; what is logged goes by it
        found["epoch_loop.state_dict"] = {**stepped, "_batches_that_stepped": stepped["_batches_that_stepped"] + 1}
    if fit["epoch_loop.batch_progress"]["is_last_batch"]:
        progress = fit["epoch_progress"]
        found["epoch_progress"] = {
            word: {**count, "processed": count["started"], "completed": count["started"]}
            for word, count in progress.items()
        }
    idle = {"state_dict": {}, "batch_progress": _NOTHING_DONE}
    return {"fit_loop": found, **dict.fromkeys(OTHER_LOOPS, idle)}


_ZERO = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
_NOTHING_DONE = {"total": _ZERO, "current": _ZERO, "is_last_batch": False}
