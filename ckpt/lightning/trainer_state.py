"""The state of a Lightning run other than model, optimizers and schedulers, as one entry of the state.

`TrainerState` collects the same state as Lightning's own checkpoints: callbacks, the data module, the precision plugin,
and every `on_save_checkpoint`. It adds state that Lightning omits: metrics, and values logged in this epoch so far.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch.amp import GradScaler

from ckpt.core.format.values import encode
from ckpt.core.state.nodes import RNG
from ckpt.errors import StateError
from ckpt.lightning import epoch_start
from ckpt.lightning.batches import warn
from ckpt.lightning.collected import MAX_ITEMS, CollectedMetrics, Flags, ModelStructure, Outputs, to_device
from ckpt.lightning.configs import from_plain, to_plain
from ckpt.lightning.loop_hooks import LoopHooks, State

OWN = {"Callback", "CheckpointHooks", "LightningDataModule", "LightningModule"}  # base classes with empty methods


def overrides(one: object, method: str) -> bool:
    """Return True if a subclass overrides this method of a Lightning object."""
    return next(c for c in type(one).__mro__ if method in vars(c)).__name__ not in OWN


def constructed(one: Any) -> State:
    """Return the plain hyper-parameters that `save_hyperparameters()` recorded, in the form of Lightning's files. An
    export needs them, so that `load_from_checkpoint` can create the object; others must be passed to it."""
    found: State = {}
    for name, value in dict(to_plain(getattr(one, "hparams", None) or {}, marked=False)).items():
        with contextlib.suppress(StateError):
            encode(value)
            found[name] = value
    if not found:
        return {}
    noted = {one.CHECKPOINT_HYPER_PARAMS_KEY: found}
    return noted | ({one.CHECKPOINT_HYPER_PARAMS_NAME: one._hparams_name} if hasattr(one, "_hparams_name") else {})


def hyper_parameters(one: Any) -> State:
    """Return the hyper-parameters of a module or data module under the keys that Lightning's files use."""
    if not (given := getattr(one, "hparams", None)):
        return {}
    found = {one.CHECKPOINT_HYPER_PARAMS_NAME: one._hparams_name} if hasattr(one, "_hparams_name") else {}
    if isinstance(given, dict):
        return found | {one.CHECKPOINT_HYPER_PARAMS_KEY: dict(given)}
    return found | {one.CHECKPOINT_HYPER_PARAMS_KEY: given, one.CHECKPOINT_HYPER_PARAMS_TYPE: type(given)}


def scaler_of(trainer: Any) -> GradScaler | None:
    found = getattr(trainer.precision_plugin, "scaler", None)
    return found if isinstance(found, GradScaler) else None


def state_of(trainer: Any, rest: TrainerState) -> State:
    """Return the state dict of a trainer for a `Checkpointer`."""
    scaler = scaler_of(trainer)
    return {
        "model": trainer.strategy.model,
        "optim": list(trainer.optimizers),
        "sched": [config.scheduler for config in trainer.lr_scheduler_configs],
        "trainer": rest,
        "rng": RNG(),
        **({} if scaler is None else {"scaler": scaler}),
    }


class TrainerState:
    """Reads and restores the state of a trainer. `own`: plain values of the callback, which `put_own` restores."""

    def __init__(
        self,
        trainer: Any,
        seams: LoopHooks,
        callback: object,
        own: Callable[[], State],
        put_own: Callable[[State], None],
    ) -> None:
        self._trainer, self._seams = trainer, seams
        self._own, self._put_own = own, put_own
        self._others = [c for c in trainer.callbacks if c is not callback]
        self._savers = [c for c in self._others if overrides(c, "on_save_checkpoint")]
        self._module_saves = overrides(trainer.lightning_module, "on_save_checkpoint")
        self._metrics = CollectedMetrics(trainer, self._others)
        self._outputs = Outputs(trainer, self._others)
        self._flags = Flags(trainer.lightning_module)
        self._structure = ModelStructure(trainer, self._others)
        self._said_left_out = False
        self._restored: State = {}
        self._logged: State = {}
        self._constructed = constructed(trainer.lightning_module) | constructed(trainer.datamodule)

    # -- read --

    def state_dict(self) -> State:
        trainer = self._trainer
        data, plugin = trainer.datamodule, trainer.precision_plugin
        loops, callbacks = self._seams.state_dict(), self._callbacks()
        of_data = {} if data is None else dict(data.state_dict())
        return {
            "loops": loops,
            "callbacks": to_plain(callbacks),
            "hooks": to_plain(self._from_hooks(loops, callbacks, of_data)),
            "datamodule": of_data,
            "precision": {} if scaler_of(trainer) is not None else dict(plugin.state_dict()),
            "collected": dict(trainer.callback_metrics),
            "logged": _logged(trainer),
            "metrics": self._metrics.read(),
            "outputs": self._read_outputs(),
            "flags": self._flags.read(),
            "structure": self._structure.read(),
            "own": self._own(),
            "constructed": self._constructed,
        }

    def _read_outputs(self) -> State:
        found = self._outputs.read()
        if self._outputs.left_out and not self._said_left_out:
            self._said_left_out = True
            warn(
                self._trainer,
                "%s is not saved, because it has more than %d items, or items that cannot be stored: after a restart "
                "in the middle of an epoch, on_train_epoch_end sees only the items of later batches. Use "
                "self.log(on_epoch=True) or a metric of torchmetrics",
                ", ".join(sorted(self._outputs.left_out)),
                MAX_ITEMS,
            )
        return found

    def _callbacks(self) -> State:
        found = {c.state_key: c.state_dict() for c in self._others}
        return {key: state for key, state in found.items() if state}

    def _checkpoint(self, loops: State, callbacks: State, of_data: State) -> State:
        """Return the dict that hooks receive: Lightning's keys, with the live tensors instead of copies."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": VERSION,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": loops["fit"]},
            "callbacks": callbacks,
            "optimizer_states": [one.state_dict() for one in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            **hyper_parameters(trainer.lightning_module),
            **hyper_parameters(trainer.datamodule),
            **({type(trainer.datamodule).__qualname__: of_data} if of_data else {}),
        }

    def _from_hooks(self, loops: State, callbacks: State, of_data: State) -> State:
        """Return the values that on_save_checkpoint hooks add to the checkpoint or replace in it."""
        if not self._savers and not self._module_saves:
            return {}
        checkpoint = self._checkpoint(loops, callbacks, of_data)
        before = dict(checkpoint)
        for callback in self._savers:
            callback.on_save_checkpoint(self._trainer, self._trainer.lightning_module, checkpoint)
        if self._module_saves:
            self._trainer.lightning_module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if value is not before.get(key)}

    # -- restore --

    def match_structure(self, saved: dict[Any, Any]) -> None:
        """Change the structure of the model and its optimizers as callbacks had changed it before the save. saved: the
        entries of the saved state by path. Called before any entry is restored."""
        self._structure.match(saved)

    def load_state_dict(self, state: State) -> None:
        trainer = self._trainer
        state = {**state, "callbacks": from_plain(state["callbacks"]), "hooks": from_plain(state["hooks"])}
        self._restored = state
        self._put_own(state["own"])
        self._seams.load_state_dict(state["loops"])
        if state["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        self._flags.put(state["flags"])
        self._structure.put(state["structure"], trainer.strategy.root_device)
        self._load_hooks(state, self._others)
        self._metrics.put(state["metrics"])
        self._outputs.put(state["outputs"], trainer.strategy.root_device)
        trainer.callback_metrics.update(to_device(state["collected"], trainer.strategy.root_device))
        self._logged = state["logged"]

    def _load_hooks(self, state: State, callbacks: list[Any]) -> None:
        """Pass the saved values of the module and the callbacks to their hooks for loading."""
        trainer = self._trainer
        checkpoint = self._checkpoint(state["loops"], state["callbacks"], state["datamodule"])
        for key, value in state.get("constructed", {}).items():  # plain hyper-parameters of the run that was saved
            if type(value) is dict and type(checkpoint.get(key)) is dict:
                checkpoint[key] |= value
        checkpoint |= state["hooks"]
        if overrides(trainer.lightning_module, "on_load_checkpoint"):
            trainer.lightning_module.on_load_checkpoint(checkpoint)
        for callback in callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        for callback in callbacks:
            if saved := state["callbacks"].get(callback.state_key):
                patience = getattr(callback, "patience", None)
                callback.load_state_dict(deepcopy(saved))
                if patience is not None:  # EarlyStopping restores it from its state, but the script's value must win
                    callback.patience = patience
                if hasattr(callback, "_internal_optimizer_metadata"):  # BaseFinetuning: its groups were already added
                    callback._restarting = False

    def epoch_started(self, put_random_state: Callable[[], None], groups: list[int]) -> None:
        """Run on_train_epoch_start of the resumed epoch again, without changing the restored state. put_random_state:
        sets the random state in which the hook originally ran. groups: number of parameter groups of each optimizer at
        that time."""
        state, self._restored = self._restored, {}
        flags = self._flags.now()
        put_random_state()
        if epoch_start.run_again(self._trainer, self._others, groups):
            self._flags.set(flags)
            self._load_hooks(state, self._others)
            self._trainer.fit_loop.epoch_loop._results.clear()  # the hook has logged values a second time
        self._metrics.put(state["metrics"])  # hooks at the start of the epoch may have created or reset metrics
        self._outputs.put(state["outputs"], self._trainer.strategy.root_device)

    def epoch_begins(self) -> None:
        """Find the metrics that hooks have created at the start of the epoch."""
        self._metrics.find()

    def log_again(self) -> None:
        """Restore the values logged earlier in this epoch. Called once the loops are restored."""
        if self._logged:
            _log_again(self._trainer, to_device(self._logged, self._trainer.strategy.root_device))
        self._logged = {}
        for callback in self._others:
            if type(callback).__name__ == "StochasticWeightAveraging":
                self._average_again(callback)

    def _average_again(self, callback: Any) -> None:
        """Resume a callback that averages weights in the middle of an epoch: create its schedule again, but undo its
        changes to the optimizer."""
        trainer = self._trainer
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = trainer.optimizers[0].param_groups
            restored = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, saved in zip(groups, restored, strict=True):
                group.update(saved)


VERSION = "2.0.0"  # version of Lightning's checkpoint format; hooks of modules may migrate older formats


class Monitored:
    """A logged metric, and whether it was measured at the last step. Lightning's `callback_metrics` keeps all values
    ever logged. The results in its loops show which values are new: a value logged by a validation or an epoch counts
    at its end, and a value logged per batch counts if a batch of the last step logged it. A value that the user has
    written into `callback_metrics` counts once."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._name = trainer, name
        self._older: object = None  # value that batches had logged by the step before the last
        self._newer: object = None
        self._seen: object = None
        self.forget()

    def forget(self) -> None:
        """Mark the current values as old, because they were restored or logged before the restore."""
        self._older = self._newer = self._in_batches()
        self._seen = self._trainer.callback_metrics.get(self._name)

    def step_done(self) -> None:
        self._older, self._newer = self._newer, self._in_batches()

    def score(self) -> float | None:
        """Return the value measured at this step, at the end of a validation or an epoch, or None if it is not new."""
        value = self._trainer.callback_metrics.get(self._name)
        seen, self._seen = self._seen, value
        train, now = self._trainer.fit_loop.epoch_loop._results, self._trainer._results
        logged = [r for results in (train, now) for r in results.values() if self._name in _names(results, r)]
        if value is None:
            return None
        if not logged:
            return None if value is seen else float(value)
        ended = any(not r.has_reset and self._name in _epoch_names(now, r) for r in now.values())
        in_batches = self._in_batches()
        return float(value) if ended or (in_batches is not None and in_batches is not self._older) else None

    def _in_batches(self) -> object:
        """Return the value that a training batch logged last. Each time a batch logs, it is a new object."""
        results = self._trainer.fit_loop.epoch_loop._results
        named = (r for r in results.values() if r.meta.on_step and self._name == results._forked_name(r, True)[1])
        return next((r._forward_cache for r in named), None)


def _epoch_names(results: Any, one: Any) -> tuple[str, ...]:
    """Return the names under which callbacks find a result at the end of the epoch."""
    return tuple(results._forked_name(one, False)) if one.meta.on_epoch else ()


def _names(results: Any, one: Any) -> tuple[str, ...]:
    return (*_epoch_names(results, one), *results._forked_name(one, True))


# -- values logged for the end of an epoch --

SAID = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute",
)  # fmt: skip


def _logged(trainer: Any) -> State:
    """Return the sums that Lightning has accumulated in this epoch, by name, with the arguments of `log`."""
    connector, found = trainer._logger_connector, {}
    for key, one in trainer.fit_loop.epoch_loop._results.items():
        meta = one.meta
        if one.has_reset or not meta.on_epoch or meta.sync.group is not None:
            continue
        args = {word: getattr(meta, word) for word in SAID}
        args |= {"sync_dist": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
        reduce = meta.reduce_fx.__name__
        value = {"value": one.value, "step": one._forward_cache} if one.is_tensor else {}
        value |= {"count": getattr(one, "cumulated_batch_size", None)}
        found[key] = {"said": args, "reduce": reduce, "builtin": meta.reduce_fx is vars(builtins).get(reduce), **value}
    return {"sums": found, "first": connector._first_loop_iter, "fx": connector._current_fx}


def _log_again(trainer: Any, saved: State) -> None:
    results = trainer.fit_loop.epoch_loop._results
    for key, one in saved["sums"].items():
        attribute = one["said"]["metric_attribute"]
        if "value" not in one and attribute is None:
            continue
        value = one["value"] if "value" in one else trainer.lightning_module.get_submodule(attribute)
        reduce = getattr(builtins if one["builtin"] else torch, one["reduce"])
        results.log(value=value, reduce_fx=reduce, sync_dist_fn=trainer.strategy.reduce, batch_size=1, **one["said"])
        if "value" in one:
            results[key].value, results[key]._forward_cache = one["value"], one["step"]
            if one["count"] is not None:
                results[key].cumulated_batch_size = one["count"]
    trainer._logger_connector._first_loop_iter = saved["first"]
    trainer._logger_connector._current_fx = saved["fx"]
