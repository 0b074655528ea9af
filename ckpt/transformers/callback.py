"""A Hugging Face Trainer callback that saves every step and restores the run automatically.

    trainer = Trainer(..., callbacks=[ckpt.transformers.CheckpointCallback("s3://bucket/run1", every=200)])
    trainer.train()

    python -m ckpt.transformers s3://bucket/run1 --to exports/run1     # for from_pretrained()

A step is saved when all work of the step is done: immediately, or after logging and evaluation if these are scheduled.
A run that is killed in an evaluation restarts one step earlier and evaluates again. A run that is killed while
gradients are accumulated restarts at the last optimizer step. From the restored step on, losses, weights and the
Trainer's own log are bit for bit those of an uninterrupted run.

The sampler determines the order of examples. After a restart, it skips the examples that were used without reading
them. Random numbers that a dataset or collator draws (random masks) are not repeated for prefetched batches and in
workers; a warning is logged. A stream (IterableDataset) is read again from its beginning up to the position.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

try:
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError("ckpt.transformers needs transformers: pip install 'everystep[transformers]'") from missing

from ckpt.best import Best
from ckpt.callbacks import check_keywords
from ckpt.checkpointer import Checkpointer
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.restore.restore import Restored
from ckpt.core.state.nodes import RNG
from ckpt.core.state.sharding import ModulePart, named_parameters, unwrap
from ckpt.errors import CheckpointError, UsageError, public_function
from ckpt.saving import Save
from ckpt.tiers import DEFAULT_MEMORY, Memory, as_tiers
from ckpt.transformers import trainer_internals
from ckpt.transformers.further_state import ModuleWatch, check_further, further_modules
from ckpt.transformers.pretrained import Pretrained, digest, is_adapter, nbytes, pretrained, trained, unused
from ckpt.transformers.trainer_internals import logger, warn_once

BEST = 'best=ckpt.Best("eval_loss", keep=1)'
METRIC = (
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "monitor",
    "mode",
    "save_top_k",
    "top_k",
)
MEANT = dict.fromkeys(METRIC, BEST)
WATCHED = 8  # number of steps in which it is checked whether reading batches draws random numbers
FINISHED = (
    "nothing to do: the run in %s finished at step %d. Raise num_train_epochs, max_steps or the patience to continue, "
    "or give the callback another location for a new run"
)
OTHER_NUMBERS = (
    "dataloader_persistent_workers=True: the batches are the same, but random numbers (dropout) will differ from an "
    "uninterrupted run from the next epoch on"
)

__all__ = ["CheckpointCallback"]


class CheckpointCallback(TrainerCallback):
    """Saves a Trainer's run while it trains, and restores it when the same script is started again.

    Callbacks with a state (`ExportableState`) get their state back. Arguments with which they were created stay as in
    this script, unless training changed them or TrainingArguments has `restore_callback_states_from_checkpoint=True`.
    `checkpointer`: the Checkpointer, during training. `restored`: the result of the restore, once training has begun.
        `full_bytes`: size of all parameters and buffers. `stored_bytes`: size of those that are saved. train() raises
        MismatchError if the script has changed, and UsageError if the Trainer was resumed at a later step in another
        way.
    """

    @public_function
    def __init__(
        self,
        tiers: object = None,
        *,
        memory: Memory | None = DEFAULT_MEMORY,
        every: int | str | Auto | None = None,
        keep: Keep | int | str | None = None,
        best: Best | None = None,
        strict: bool = True,
        only_trained: bool | None = None,
        state: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Create the callback.

        - `tiers`: folder, URL, `ckpt.Tier`, or a list of these, nearest first. None keeps steps in memory only.
        - `memory`: see `ckpt.Checkpointer`.
        - `every`: save interval of tiers given as strings: optimizer steps (default 100), a time ("10min") or "auto".
          `keep`: number of checkpoints that each of these tiers keeps (default "all"). Memory gets every step.
        - `best`: for example `ckpt.Best("eval_loss", keep=3)` also keeps the three best of the evaluated steps.
        - `strict`: False restores only the entries that fit, if model, optimizer or data have changed. Default True.
        - `only_trained`: True omits frozen parameters, which `from_pretrained` loads. Their digest is saved, and a
          restart with another base model is rejected. Default: True for a PeftModel, else False.
        - `state`: further objects to save, by your own names: `{"ema": ema}` for a module, an optimizer, or an object
          with `state_dict()` and `load_state_dict()`. The dict is read when training begins.
        - All other keywords are those of `ckpt.Checkpointer`, for example `triggers` and `options`. An unknown keyword
          raises InvalidArgumentError with a suggestion.
        """
        check_keywords(CheckpointCallback, arguments, MEANT)
        self._memory, self._tiers = as_tiers(tiers, memory, every, keep)
        self._strict, self._only_trained, self._arguments = strict, only_trained, arguments
        self._best, self._said_missing = best, False
        self._further = check_further(state)
        self._watched_modules: ModuleWatch | None = None
        self._measured: dict[str, Any] = {}  # metrics of the step that is not saved yet
        self.checkpointer: Checkpointer | None = None
        self.restored: Restored | None = None
        self.full_bytes = self.stored_bytes = 0
        self._last = _Last(self)
        self._progress: trainer_internals.TrainerProgress | None = None
        self._rewind: trainer_internals.Rewind | None = None
        self._pending = False  # True if a step was completed and is not saved yet
        self._latest: Save | None = None
        self._thread = 0
        self._numbers: dict[str, Any] | None = None  # state of random numbers to set at the next opportunity
        self._paused = contextlib.ExitStack()
        self._watch = WATCHED
        self._drawn: list[Any] | None = None
        self._run_batch_size: int | None = (
            None  # batch size of the run's newest step, while `auto_find_batch_size` reduces the batch size to it
        )

    # -- begin --

    @public_function
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = trainer_internals.calling_trainer()
        if trainer is not None:
            self._enclose(trainer)

    def _enclose(self, trainer: Trainer) -> None:
        """Place this callback first, so that the other callbacks find the state restored. Place its helper last, so
        that it sees the requests of all callbacks."""
        handler = trainer.callback_handler
        others = [one for one in handler.callbacks if one is not self and one is not self._last]
        if any(isinstance(one, CheckpointCallback) for one in others):
            raise UsageError("this Trainer has two CheckpointCallbacks: use one with all tiers as a list")
        handler.callbacks = [self, *others, self._last]  # a new list, because the old one is being iterated

    @public_function
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        trainer = trainer_internals.calling_trainer()
        if trainer is None:
            raise UsageError("cannot find the Trainer that calls this callback: call trainer.train() in this thread")
        trainer_internals.check(trainer)
        self._enclose(trainer)
        self._end()
        if self._run_batch_size is not None:
            trainer_internals.reduce_batch_size(trainer, self._run_batch_size)
            self._run_batch_size = None
        _end_those_left()
        progress = self._progress = trainer_internals.TrainerProgress(trainer, given["train_dataloader"])
        self._pending, self._numbers, self._thread = False, None, threading.get_ident()
        self._measured, best = {}, self._best
        saved = {**self._state(trainer, progress), **further_modules(trainer), **check_further(self._further)}
        self._watched_modules = ModuleWatch(trainer, saved)
        self.checkpointer = Checkpointer(saved, self._tiers or None, memory=self._memory, best=best, **self._arguments)
        _open.append(self)
        try:
            self._resume(trainer, progress, state, control)
        except BaseException:
            with contextlib.suppress(CheckpointError):
                self._end()
            raise

    def _state(self, trainer: Trainer, progress: trainer_internals.TrainerProgress) -> dict[str, Any]:
        if trainer.is_deepspeed_enabled:
            return self._deepspeed_state(trainer, progress)
        whole = trainer.model_wrapped
        model = unwrap(whole)
        parameters = named_parameters(model)
        self.full_bytes = self.stored_bytes = nbytes(parameters | dict(model.named_buffers()))
        if self._only_trained or (self._only_trained is None and is_adapter(model)):
            some = trained(model)
            self.stored_bytes = nbytes(some)
            stored = {id(tensor) for tensor in some.values()}
            aside = unused(model)
            used = {name: tensor for name, tensor in parameters.items() if not name.startswith(aside)}
            once = {id(tensor): name for name, tensor in reversed(used.items())}  # tied parameters by their first name
            frozen = {name: parameters[name] for key, name in once.items() if key not in stored}
            progress.base = {"digest": digest(frozen), "tensors": len(frozen)}
            logger.info(
                "the model has %d bytes, of which the %d trained ones are stored",
                self.full_bytes,
                self.stored_bytes,
            )
            whole = ModulePart(whole, some)
            progress.save_only(whole, some)
        optimizer = trainer.optimizer
        first = trainer.is_world_process_zero()
        state = {
            "model": whole,
            "optimizer": optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            "scheduler": trainer.lr_scheduler,
            "rng": RNG(),
            "trainer": progress,
            "pretrained": pretrained(model, trainer.processing_class) if first else Pretrained({}),
        }
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        return state

    def _deepspeed_state(self, trainer: Trainer, progress: trainer_internals.TrainerProgress) -> dict[str, Any]:
        """Return the state when DeepSpeed is used. Its engine has the weights, the optimizer and the schedule."""
        from ckpt.deepspeed.attach import entries

        if self._only_trained:
            raise UsageError("only_trained is not supported with DeepSpeed: omit it to save frozen parameters too")
        engine: Any = trainer.model_wrapped
        first, model = trainer.is_world_process_zero(), engine.module
        about = pretrained(model, trainer.processing_class) if first else Pretrained({})
        self.full_bytes = self.stored_bytes = sum(
            getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters()
        ) + nbytes(dict(model.named_buffers()))
        return {**entries(engine)[1], "rng": RNG(), "trainer": progress, "pretrained": about}

    def _resume(
        self,
        trainer: Trainer,
        progress: trainer_internals.TrainerProgress,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        assert self.checkpointer is not None
        theirs = state.global_step  # above 0 if the Trainer has resumed by itself
        step = self.checkpointer.restore(default=theirs, strict=self._strict)
        self.restored = self.checkpointer.last_restore
        saved = progress.saved
        each = progress.data["steps_per_epoch"] or sys.maxsize
        if saved is None:
            progress.epoch, progress.behind = step // each - 1, step % each
            return
        if theirs > step:
            raise UsageError(
                f"resume_from_checkpoint restored step {theirs}, but {self._where()} only has step {step}: omit that "
                "argument, or use another location"
            )
        if theirs:
            warn_once(trainer, "resume_from_checkpoint is ignored, because %s has step %d", self._where(), step)
        if trainer.args.auto_find_batch_size and saved["batch_size"] < trainer._train_batch_size:
            self._run_batch_size = saved["batch_size"]
            trainer_internals.reduce_batch_size(trainer, saved["batch_size"])
        progress.compare(saved, strict=self._strict)
        self._numbers = RNG().state_dict()
        progress.load(trainer, saved)
        epoch: int | None = saved["epoch"]
        batches = progress.batches_done(saved, step)
        if trainer.args.max_steps <= 0 and saved["data"]["examples_per_step"] != progress.data["examples_per_step"]:
            state.max_steps = progress.last_step(saved, step, batches)
        if step >= state.max_steps or (
            trainer_internals.stopped_early(trainer) and saved["max_steps"] == state.max_steps
        ):
            epoch, self._numbers = None, None
            warn_once(trainer, FINISHED, self._where(), step)
        else:
            self._report_resume(trainer, step)
        if trainer.args.ignore_data_skip:
            batches = 0
        progress.epoch -= 1  # on_epoch_begin will be called again for this epoch
        self._rewind = trainer_internals.Rewind(
            trainer, theirs // each, epoch, batches, progress.put_flags, step > progress.epoch_began
        )

    def _report_resume(self, trainer: Trainer, step: int) -> None:
        if getattr(trainer.args, "dataloader_persistent_workers", False):
            warn_once(trainer, OTHER_NUMBERS)
        where = (self.restored and self.restored.tier) or self._where()
        warn_once(trainer, "everystep continues at step %d (from %s)", step, where)

    def _where(self) -> str:
        return next((one.url for one in self._tiers), "memory")

    # -- training --

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._paused.close()
        progress = self._progress
        assert progress is not None
        if self._numbers is not None:
            progress.draw_again()
            if state.global_step > progress.epoch_began:
                progress.epoch += 1
                return
            self._set_numbers()
        progress.begin(progress.epoch + 1, state.global_step)
        if self._pending:
            self._save(state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._drawn is not None:
            self._check_draws()
        if self._numbers is not None:
            self._set_numbers()
        elif self._pending:
            self._paused.close()
            self._save(state.global_step)

    def _check_draws(self) -> None:
        if self._drawn != trainer_internals.drawn():
            self._watch = 0
            logger.warning(
                "the dataset or the collator draws random numbers: batches that were prefetched before a crash are "
                "drawn again after it, so the run will not be bit-identical"
            )
        self._drawn = None

    def _set_numbers(self) -> None:
        RNG().load_state_dict(self._numbers or {})
        self._numbers = None

    def made_step(self, state: TrainerState, control: TrainerControl) -> None:
        """Save the step now, unless a callback has requested logging or an evaluation after it."""
        self._pending = True
        if not (_due(control) or control.should_training_stop or control.should_epoch_stop or _epoch_over(state)):
            self._save(state.global_step)
            if self._watch > 0:
                self._watch, self._drawn = self._watch - 1, trainer_internals.drawn()
        else:
            self._pause(control)

    def ended_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        progress = self._progress
        if self._pending and progress is not None:
            if _epoch_over(state):
                progress.begin(progress.epoch + 1, state.global_step)
                progress.epoch, progress.ahead = progress.epoch - 1, 1  # the next epoch has not begun yet
            if control.should_training_stop and not _due(control):
                self._save(state.global_step)
            self._pause(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._numbers is not None:  # no batch of the epoch remained, so no step has set them
            self._set_numbers()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        summary = {"train_runtime", "train_loss"} <= given["logs"].keys()
        if self._pending and summary and self._progress is not None:
            self._progress.summary = 1
            self._save(state.global_step)
        if summary and args.load_best_model_at_end and self._latest is not None:
            self._latest._wait_copied()  # the Trainer is about to load the best weights over the current ones

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self._pending:  # otherwise the evaluation is not part of the training, or the step is already saved
            self._measured |= given.get("metrics") or {}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._pending:
            self._save(state.global_step)
        self._end()

    def _pause(self, control: TrainerControl) -> None:
        """Suspend hang detection during an evaluation."""
        if self.checkpointer is not None and (control.should_evaluate or control.should_save):
            self._paused.close()
            self._paused.enter_context(self.checkpointer.not_training())

    def _save(self, step: int) -> None:
        self._pending = False
        for name in [] if self._watched_modules is None else self._watched_modules.changed():
            logger.warning(
                "training changes %s, which the checkpoint does not contain, so a restart begins with a new one. Save "
                "it with CheckpointCallback(..., state={%r: ...})",
                name,
                name.rpartition(".")[2],
            )
        if self.checkpointer is not None:
            if self._progress is not None:
                self._progress.store_unfrozen()
            self._latest = self.checkpointer.step(step) or self._latest
            if self._best is not None and self._measured:
                self._score(self._best, step)
        self._measured = {}

    def _score(self, best: Best, step: int) -> None:
        """Give a step its score. The name may omit "eval_", as in `metric_for_best_model`."""
        value = self._measured.get(best.monitor, self._measured.get(f"eval_{best.monitor}"))
        if value is not None and self.checkpointer is not None:
            self.checkpointer.score(step, value)
        elif not self._said_missing:
            self._said_missing = True
            there = ", ".join(sorted(self._measured))
            logger.warning("best=Best(%r): no evaluation measured this metric; there are: %s", best.monitor, there)

    def _end(self) -> None:
        self._paused.close()
        if self._rewind is not None:
            self._rewind.undo()
            self._rewind = None
        if self.checkpointer is not None:
            old, self.checkpointer, self._latest = self.checkpointer, None, None
            _open.remove(self)
            old.close()


_open: list[CheckpointCallback] = []  # callbacks whose training has begun and not ended


def _end_those_left() -> None:
    """End trainings that an exception has stopped, because the Trainer then calls no callback. A notebook may use the
    run again."""
    under_way = list(trainer_internals.calling_trainers())
    for one in [one for one in _open if one._thread == threading.get_ident()]:
        if one._progress is not None and not any(one._progress.trainer is trainer for trainer in under_way):
            with contextlib.suppress(CheckpointError):  # nothing depends on this run any longer
                one._end()


class _Last(TrainerCallback):
    """The helper of a CheckpointCallback that runs after all other callbacks."""

    def __init__(self, owner: CheckpointCallback) -> None:
        self._owner = owner

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._owner.checkpointer is not None:
            self._owner.made_step(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._owner.ended_epoch(state, control)


def _due(control: TrainerControl) -> bool:
    return bool(control.should_log or control.should_evaluate or control.should_save)


def _epoch_over(state: TrainerState) -> bool:
    return float(state.epoch) == int(state.epoch)
