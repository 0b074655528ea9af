"""A Lightning callback that saves every step and restores the run automatically.

    from ckpt.lightning import CheckpointCallback

    trainer = Trainer(..., callbacks=[CheckpointCallback("s3://bucket/run1", every=200)])
    trainer.fit(model, data)              # after a crash, run the same script again: it continues

It is a callback and not a `CheckpointIO`, because strategies that shard the model bypass a `CheckpointIO`. It saves
with a `ckpt.Checkpointer`: every optimizer step is staged in memory that survives the process, every 200th step is
written to the bucket, and signals, deadlines, hangs and preemption notices trigger emergency saves. All commands
(`ckpt ls`, `report`, `doctor`, ...) work on the run.

**What is restored**: model, optimizers, schedulers, the AMP scaler, loops, callbacks, the data module, values added in
`on_save_checkpoint`, random numbers, the remaining batches, values logged in the epoch so far, and torchmetrics in the
model. Accumulated gradients are not saved: a step is an optimizer step, and the batches after the last step are
repeated. An interrupted validation starts again. Losses, weights and metrics are then bit for bit those of a run
without the interruption.

**Batches.** A loader with `state_dict()` (torchdata's `StatefulDataLoader`) restores its own state. With other loaders,
the epoch begins again with its original random numbers, fetches the completed batches again and drops them. This is
exact, also with `shuffle=True`, workers, and loaders that start again within an epoch. It takes as long as loading
these batches. Three cases are not exact, and a warning is logged for each: random numbers of workers that outlive an
epoch (`persistent_workers=True`), more than 512 batches of an epoch that draw from the shared generators, and an epoch
that is resumed on another number of ranks.

**Hooks.** `on_train_epoch_start` runs again when an epoch is resumed in its middle, and its changes to the state are
undone. Flags of parameters, added groups, metrics, and lists that `on_train_epoch_end` reads are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt import best
from ckpt.best import Best
from ckpt.callbacks import check_keywords
from ckpt.checkpointer import Checkpointer
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint.retention import Keep
from ckpt.errors import CheckpointError, InvalidArgumentError, UsageError, public_function
from ckpt.lightning.checkpoint_io import CheckpointIO as CheckpointIO
from ckpt.lightning.checkpoint_io import with_bases
from ckpt.lightning.loop_hooks import LoopHooks, State, warn
from ckpt.lightning.start import given, last_file, limits, report_finished, report_resume, shorten
from ckpt.lightning.steps import StepCount
from ckpt.lightning.trainer_state import Monitored, TrainerState, state_of
from ckpt.loading import Loaded, load
from ckpt.options import DEFAULT_OPTIONS
from ckpt.saving import Save
from ckpt.tiers import DEFAULT_MEMORY, Memory, as_tiers

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Base
else:
    Base = object

NOT_OURS = ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
MEANT = {"save_top_k": "top_k="}


class CheckpointCallback(Base):
    """Saves a Lightning training while it trains, and restores it when the same script is started again.

    - `tiers`: folder, URL, `ckpt.Tier`, or a list of these, nearest first. None keeps steps in memory only.
    - `memory`: see `ckpt.Checkpointer`.
    - `every`: save interval of tiers given as strings: optimizer steps, a time ("10min") or "auto". `keep`: number of
      checkpoints that each of these tiers keeps.
    - `monitor`: name of a logged metric, for example "val_loss". The `top_k` steps with the best values (smallest with
      `mode="min"`, largest with "max") are saved to every tier and kept regardless of age; see `best_step`,
      `best_score` and `best_model`. The metric is read at the end of each validation and epoch. If training batches log
      it, it counts only if the last step logged it. In distributed runs, use `sync_dist=True`; rank 0's value decides.
    - `strict`: False restores the entries that fit a changed model, and the restored step then gets no score. Default
      True: raises MismatchError with the entries that do not fit.
    - All other keywords are those of `ckpt.Checkpointer`: `triggers`, `takeover` and `options`.

    Supports a single device, DDP, and FSDP2 or tensor parallelism (`ModelParallelStrategy`). FSDPStrategy hides its
    parameters, so it raises StateError. Lightning's ModelCheckpoint is optional (`enable_checkpointing=False`).
    `trainer.fit(ckpt_path=...)` sets the initial state of the first start. Once the run has checkpoints, it continues
    from them. Another ckpt_path than that of the first start then raises UsageError, unless it is the "last" file.
    """

    def __new__(cls, *args: Any, **arguments: Any) -> CheckpointCallback:
        found: CheckpointCallback = object.__new__(with_bases(cls, "", "Callback"))
        return found

    @public_function
    def __init__(
        self,
        tiers: object = None,
        *,
        memory: Memory | None = DEFAULT_MEMORY,
        every: int | str | Auto | None = None,
        keep: Keep | int | str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        top_k: int = 1,
        strict: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if "best" in arguments:
            raise InvalidArgumentError("best= is not supported here: use monitor=, mode= and top_k=")
        check_keywords(CheckpointCallback, arguments, MEANT)
        self._memory, self._durable = as_tiers(tiers, memory, every, keep)
        self._arguments, self._strict = arguments, strict
        self._best = None if monitor is None else Best(monitor, mode, top_k)
        self._began_from = ""  # the ckpt_path of the first start
        self._limits: list[Any] = []  # limits of the training in this script, compared with those in the saved state
        self._saved: State = {}
        self._missed = False
        self._count: StepCount | None = None  # not reset by `_close`, because saves while `fit` ends still read it
        self._close()

    def _close(self) -> None:
        self._cp: Checkpointer | None = None
        self._seams: LoopHooks | None = None
        self._rest: TrainerState | None = None
        self._monitored: Monitored | None = None
        self._save: Save | None = None
        self._step = 0
        self._has_step = False  # True if the model has the state of `_step`, so that a score belongs to it
        self._pause = contextlib.ExitStack()

    def __reduce__(self) -> Any:  # for launchers that spawn processes: they pickle the callback before `fit`
        kept = {k: v for k, v in vars(self).items() if k in ("_memory", "_durable", "_arguments", "_strict", "_best")}
        return _again, (kept,)

    # -- properties for users --

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The Checkpointer, while `fit` runs."""
        return self._cp

    @property
    def best_step(self) -> int | None:
        """The step with the best score so far, or None if no step has a score."""
        return self._best.scores[0][1] if self._best is not None and self._best.scores else None

    @property
    def best_score(self) -> float | None:
        return self._best.scores[0][0] if self._best is not None and self._best.scores else None

    @property
    def best_model(self) -> Loaded | None:
        """The model of the best step, read on access: `model.load_state_dict(callback.best_model.all())`. While `fit`
        runs, an access waits until the best step is saved."""
        if self.best_step is None:
            return None
        if not self._durable:
            raise UsageError("the best model is kept in a durable tier: give the callback a folder or URL")
        if self._cp is not None:
            self._cp.wait(step=self.best_step)  # its save may be in progress
        return load(self._durable[0].url, step=self.best_step, only="model.*").sub("model")

    # -- Lightning's events --

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        others = [c for c in trainer.callbacks if c is not self]
        if any(isinstance(c, CheckpointCallback) for c in others):
            raise UsageError(
                "this trainer has two CheckpointCallbacks: use one with all tiers, CheckpointCallback([a, b])"
            )
        kind = type(trainer.strategy).__name__
        if kind in NOT_OURS:
            raise UsageError(f"{kind} hides the state: use ModelParallelStrategy or DDP")
        trainer.callbacks = [*others, self]  # last, so that it sees the changes of other callbacks
        self._limits = limits(trainer, others)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fast_dev_run:
            warn(trainer, "fast_dev_run: nothing is saved or restored")
            return
        self._trainer = trainer
        self._seams = LoopHooks(trainer, self._begin, self._done, self._score, self._epoch_started)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._cp is not None:
            self._settle()  # a callback may now replace the weights by averaged ones
            self._pause.enter_context(self._cp.not_training(changes_state=True))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._cp is not None:
            self._pause.close()
            self._score()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._rest is not None:
            self._rest.epoch_begins()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._cp is not None:
            self._settle()  # training may end now, and a callback may replace the weights

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(finished=self._seams is not None and bool(self._seams.reached or trainer.should_stop))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        cp, seams = self._cp, self._seams
        with contextlib.suppress(CheckpointError):
            self._pause.close()
        self._close()
        if seams is not None:
            seams.detach()
        try:
            if cp is not None:
                cp.__exit__(type(exception), exception, exception.__traceback__)
        finally:
            shorten(exception)
            if type(exception).__name__ == "SIGTERMException" and isinstance(exception, SystemExit):
                # otherwise Lightning would exit with code 0, as if training had finished
                exception.code = exception.code or 128 + 15

    # -- begin --

    def _begin(self) -> None:
        """Open the run and restore its newest step, on all ranks, before a loop starts."""
        trainer, seams = self._trainer, self._seams
        assert seams is not None
        self._rest = TrainerState(trainer, seams, self, self._own, self._put_own)
        self._count = StepCount(trainer)
        tiers, state = self._durable or None, state_of(trainer, self._rest)
        self._cp = Checkpointer(state, tiers, memory=self._memory, best=self._best, **self._arguments)
        try:
            self._come_back(trainer, seams, self._cp, self._count)
        except CheckpointError:  # raised by fit(), but not a fault of the training
            with contextlib.suppress(CheckpointError):
                self._cp.close()
            self._cp = None
            raise

    def _come_back(self, trainer: Any, seams: LoopHooks, cp: Checkpointer, count: StepCount) -> None:
        self._step, theirs = trainer.global_step, given(trainer)
        cp.restore(default=None, strict=self._strict)
        count.begin(cp)
        found = cp.last_restore
        # With strict=False, the model may differ from the weights that are stored for the restored step. So when a
        # validation is repeated after the restore, it must not give that step a score.
        self._has_step = self._strict and found is not None and found.step is not None
        if self._best is not None:
            self._monitored = Monitored(trainer, self._best.monitor)
        if found is None or found.step is None:
            self._began_from = theirs
            return
        last = last_file(trainer, theirs, self._began_from, self._where(), found.step)
        before, self._step = self._step, count.now
        if not self._is_finished(trainer, seams):
            if trainer.is_global_zero:
                report_resume(trainer, found.tier or self._where(), self._step, last, before)
            cp.unpin(self._step)  # training had ended at this step, and continues now
            seams.resume(self._log_again)

    def _is_finished(self, trainer: Any, seams: LoopHooks) -> bool:
        """Return True if training has finished already, and log that."""
        limit, durable = seams.reached, self._durable
        look = bool(durable and (limit or self._saved.get("limits") == self._limits) and trainer.is_global_zero)
        kept = trainer.strategy.broadcast(best.kept(durable[0].url) if look else {})
        if best.END not in kept.get(self._step, ""):
            return False
        seams.skip()
        report_finished(trainer, self._where(), self._step, limit)
        return True

    def _epoch_started(self, put_random_state: Callable[[], None], groups: list[int]) -> None:
        assert self._rest is not None
        self._rest.epoch_started(put_random_state, groups)

    def _log_again(self) -> None:
        assert self._rest is not None
        self._rest.log_again()
        if self._monitored is not None:
            self._monitored.forget()

    def _where(self) -> str:
        name = self._arguments.get("options", DEFAULT_OPTIONS).name
        return self._durable[0].url if self._durable else f"memory ({name})"

    # -- state of this callback --

    def _own(self) -> State:
        assert self._count is not None
        return {"began_from": self._began_from, "limits": self._limits, "count": self._count.state_dict()}

    def _put_own(self, saved: State) -> None:
        self._saved, self._began_from = saved, saved["began_from"]
        if self._count is not None and "count" in saved:  # older versions did not save a count
            self._count.load_state_dict(saved["count"])

    # -- training --

    def _done(self, *, again: bool) -> None:
        """Save after a batch if an optimizer has stepped. `again`: True if the batch was completed before a restore."""
        if self._cp is None or self._count is None or not (again or self._count.batch_done(self._step)):
            return
        if not again:
            self._step, self._has_step = self._count.now, True
            self._save = self._cp.step(self._step) or self._save
        if self._monitored is not None:
            self._monitored.step_done()
            if self._has_step and self._seams is not None and self._seams.measured_next:
                self._save = self._cp.stage()  # if its score is among the best, this snapshot is written

    def _settle(self) -> None:
        """Wait until the last step is copied, because code other than optimizers may write to the model now."""
        if self._save is not None:
            self._save._wait_copied()  # if the copy fails, the next step raises the error

    # -- best steps --

    def _score(self) -> None:
        """Give the last step a score at the end of a validation or an epoch."""
        if self._monitored is None or self._cp is None or not self._has_step:
            return
        trainer = self._trainer
        score = trainer.strategy.broadcast(self._monitored.score())
        if score is None:
            self._miss(trainer)
        else:
            self._cp.score(self._step, score)

    def _miss(self, trainer: Any) -> None:
        assert self._best is not None
        if not self._missed and self._best.monitor not in trainer.callback_metrics:
            self._missed = True
            there = ", ".join(sorted(trainer.callback_metrics)) or "none"
            warn(trainer, "monitor=%r is not a logged metric so far; the metrics are: %s", self._best.monitor, there)

    # -- end --

    def _end(self, *, finished: bool = False) -> None:
        """Close the Checkpointer and remove all hooks. May be called more than once."""
        cp, seams = self._cp, self._seams
        try:
            if cp is not None:
                with contextlib.closing(cp):
                    if self._count is not None:
                        self._count.check_any(self._arguments.get("options", DEFAULT_OPTIONS))
                    if finished:
                        cp.pin(self._step, best.END)
        finally:
            if seams is not None:
                seams.detach()
            self._close()


def _again(kept: State) -> CheckpointCallback:
    found = CheckpointCallback(
        kept["_durable"] or None, memory=kept["_memory"], strict=kept["_strict"], **kept["_arguments"]
    )
    found._best = kept["_best"]
    return found
