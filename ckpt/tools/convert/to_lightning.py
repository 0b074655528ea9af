"""Write a run of `ckpt.lightning` as Lightning's own `.ckpt` file, for `load_from_checkpoint`,
`trainer.test(ckpt_path=…)` and `trainer.fit(ckpt_path=…)`.

Lightning's file stores the same values under other names. It cannot store random numbers, the batches of the epoch that
were used, values logged in the epoch, and collected metrics. So `fit` continues exactly from the end of an epoch. From
the middle of an epoch, it continues as from Lightning's own files, and chooses other batches.
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
    ".ckpt is Lightning's format, but {} is not from a Lightning run. --format torch writes it like torch.save, "
    "--to NAME.safetensors writes its weights{}"
)
HUGGING_FACE = ", and `python -m ckpt.transformers RUN --to FOLDER` writes a folder for from_pretrained()"
NAME = "checkpoint"  # entry of a run of `ckpt.lightning.CheckpointIO`: the contents of Lightning's file
CONFIG = "everystep.omegaconf"  # key that marks an OmegaConf container: see ckpt.lightning.configs
VERSION = "2.0.0"  # version of Lightning's file format, by which Lightning decides whether to migrate the file
OTHER_LOOPS = ("validate_loop", "test_loop", "predict_loop")


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str]) -> Output:
    """Plan the file as `convert.to_torch` does. Raise UsageError unless `ckpt.lightning` saved the checkpoint."""
    more = HUGGING_FACE if PRETRAINED in {entry.path for entry in view.entries} else ""

    def shape(root: Mapping[Any, Any]) -> dict[Any, Any]:
        theirs, trainer = root.get(NAME), root.get("trainer")
        if isinstance(theirs, Mapping) and "pytorch-lightning_version" in theirs:
            return {key: _without_marks(value) for key, value in theirs.items()}
        if "model" not in root or not isinstance(trainer, Mapping) or "loops" not in trainer:
            raise UsageError(NOT_ONE.format(origin.title, more))
        return checkpoint(root, view.step or 0)

    # Notes are dropped, because they mostly concern values that Lightning's file cannot store.
    return replace(plan_torch(origin, view, dtypes, shape), kind="Lightning", notes=())


def _without_marks(value: Any) -> Any:
    """Return a value with OmegaConf containers, which CheckpointIO stores as marked dicts, as plain dicts and lists."""
    if isinstance(value, dict) and CONFIG in value:
        return value.get("content")
    if type(value) is dict:
        return {key: _without_marks(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_marks(one) for one in value)
    return value


def checkpoint(root: Mapping[Any, Any], step: int) -> dict[str, Any]:
    """Build the contents of Lightning's file. `root`: nested state of a `ckpt.lightning.CheckpointCallback`. `step`:
    number of optimizer steps."""
    trainer = root["trainer"]
    contents = {
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
    contents["epoch"] = contents["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if precision := root.get("scaler", trainer["precision"]):
        contents["MixedPrecision"] = precision
    if trainer["datamodule"]:
        contents[trainer.get("datamodule_name", "LightningDataModule")] = trainer["datamodule"]
    contents.pop(DESCRIPTION, None)
    return contents


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in the form of torch's `state_dict`."""
    return {"state": saved["state"], "param_groups": saved["param_groups"]}


def _loops(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loops after an epoch. Lightning saves when the epoch counts as completed, but everystep
    saves after the epoch's last batch."""
    loops = {name: {**part} if isinstance(part, dict) else part for name, part in fit.items()}
    stepped = fit["epoch_loop.state_dict"]
    if "_batches_that_stepped" in stepped:  # Lightning counts it after everystep has saved; it positions logged values
        loops["epoch_loop.state_dict"] = {**stepped, "_batches_that_stepped": stepped["_batches_that_stepped"] + 1}
    if fit["epoch_loop.batch_progress"]["is_last_batch"]:
        progress = fit["epoch_progress"]
        loops["epoch_progress"] = {
            word: {**count, "processed": count["started"], "completed": count["started"]}
            for word, count in progress.items()
        }
    idle = {"state_dict": {}, "batch_progress": _NOTHING_DONE}
    return {"fit_loop": loops, **dict.fromkeys(OTHER_LOOPS, idle)}


_ZERO = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
_NOTHING_DONE = {"total": _ZERO, "current": _ZERO, "is_last_batch": False}
