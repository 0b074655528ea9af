"""Hooks into Lightning's loops at moments without a callback: start of training, iterators, batches.

This module uses undocumented names of Lightning, because Lightning has no callback for these moments: training begins,
an epoch's iterator is created, a batch is about to be fetched, a batch is completely done. `LoopHooks` adds a call at
each of these moments to the loops of one trainer, and removes the calls at the end.

    fit_loop.run                   <- open the run and restore, before a loader is requested
      setup_data (fit, validation) <- loaders are created: record or repeat the epoch and the random state
      fit_loop.on_advance_start    <- after a restore: run the resumed epoch's on_train_epoch_start again
      epoch_loop.on_run_start      <- an epoch begins: record the random state from which its order is drawn
        epoch_loop.advance         <- a batch is about to be fetched; after a restore, return to the batch first
          _on_before/after_fetch   <- record, or repeat, random states on which the order of later batches depends
        epoch_loop.on_advance_end  <- the batch is done, but the validation after it has not begun: save
      update_train_epoch_metrics   <- all values logged in the epoch exist, and are reset next: check the metric

So a restored run continues in the middle of an epoch, after a batch. A scheduled validation runs again from its
beginning. All other state is as in the run that was killed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ckpt.lightning.batches import BatchFeed as BatchFeed
from ckpt.lightning.batches import State as State
from ckpt.lightning.batches import inform as inform
from ckpt.lightning.batches import warn as warn

# the beginning of a Lightning warning that is suppressed, because `BatchFeed` makes the resume exact
NOT_EXACT = "You're resuming from a checkpoint that ended before the epoch ended"


class LoopHooks:
    """Adds calls to the loops of a trainer. `begin`, `done`, `epoch_logged`, `epoch_started`: functions of the callback
    that are called; `epoch_started` runs the hooks of a resumed epoch again."""

    def __init__(
        self,
        trainer: Any,
        begin: Callable[[], None],
        done: Callable[..., None],
        epoch_logged: Callable[[], None],
        epoch_started: Callable[[Callable[[], None], list[int]], None],
    ) -> None:
        self._trainer, self._begin, self._done, self._epoch_logged = trainer, begin, done, epoch_logged
        self._epoch_started = epoch_started
        self.feed = BatchFeed(trainer)
        self._groups: list[int] = []  # number of parameter groups of each optimizer before on_train_epoch_start
        self._resumed = self._behind = False  # True if the next batch was completed before the restore
        self._should_stop = False
        self._max_steps: int | None = None
        self._accumulate = [1, 1]  # batches per step: as the trainer was created, and in the current epoch
        self._made_to_accumulate = trainer.accumulate_grad_batches
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._fetcher: Any = None
        val = epoch.val_loop
        self._their_val_setup = val.setup_data
        calls: list[tuple[Any, str, Callable[..., None]]] = [
            (fit, "run", self._run),
            (fit, "setup_data", self._setup_data),
            (fit, "_load_combined_loader_states", self._loaders_made),
            (val, "setup_data", self._setup_val_data),
            (fit, "on_advance_start", self._on_advance_start),
            (epoch, "on_run_start", self._on_run_start),
            (epoch, "advance", self._advance),
            (epoch, "_on_before_fetch", self._on_before_fetch),
            (epoch, "_on_after_fetch", self._on_after_fetch),
            (epoch, "on_advance_end", self._on_advance_end),
            (trainer._logger_connector, "update_train_epoch_metrics", self._update_train_epoch_metrics),
        ]
        self._names = [(loop, name) for loop, name, _ in calls]
        for loop, name, added in calls:
            theirs = getattr(loop, name)
            setattr(loop, name, lambda *args, added=added, theirs=theirs: added(theirs, *args))

    def detach(self) -> None:
        """Remove the calls from the loops."""
        self._lift_limit()
        for loop, name in self._names:
            vars(loop).pop(name, None)

    def state_dict(self) -> State:
        loops = self._trainer.fit_loop.state_dict()
        self.feed.fix(loops["state_dict"])
        accumulate = [self._made_to_accumulate, self._trainer.accumulate_grad_batches]
        stop = bool(self._trainer.should_stop)
        feed, groups = self.feed.state_dict(), list(self._groups)
        return {"fit": loops, "feed": feed, "should_stop": stop, "accumulate": accumulate, "groups": groups}

    def load_state_dict(self, state: State) -> None:
        self._trainer.fit_loop.load_state_dict(state["fit"])
        self.feed.load_state_dict(state["feed"])
        self._should_stop = state["should_stop"]
        self._accumulate, self._groups = state["accumulate"], state["groups"]

    @property
    def reached(self) -> str:
        """The limit of the trainer that the last batch has reached, or "" if it has reached none."""
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        if epoch.max_steps != -1 and epoch.global_step >= epoch.max_steps:
            return f"max_steps={epoch.max_steps}"
        epochs = fit.epoch_progress.current.processed + bool(epoch.batch_progress.is_last_batch)
        if fit.max_epochs not in (None, -1) and epochs >= fit.max_epochs:
            return f"max_epochs={fit.max_epochs}"
        return ""

    def skip(self) -> None:
        """Skip the training, because the loops were restored to the last batch of a training that has ended."""
        current = self._trainer.fit_loop.epoch_progress.current
        current.processed = current.completed = current.started
        self._trainer.should_stop = True

    def resume(self, again: Callable[[], None]) -> None:
        """Continue after the last batch of the restored loops. `again`: called at that point."""
        epoch = self._trainer.fit_loop.epoch_loop
        self._resumed, self._again = True, again
        epoch.val_loop._has_run = False  # an earlier fit() of this trainer may have set it
        if epoch.max_steps != -1 and epoch.global_step >= epoch.max_steps:
            self._max_steps = epoch.max_steps  # the last step is done, but not what follows it
            epoch.max_steps = epoch.global_step + 1
        warnings.filterwarnings("ignore", message=NOT_EXACT)
        self.feed.resume()
        self._reload_val_data()

    def _reload_val_data(self) -> None:
        """Create the validation loaders in the same epoch in which the saved run created them."""
        trainer, val = self._trainer, self._trainer.fit_loop.epoch_loop.val_loop
        made = self.feed.val_made
        if made and (val._combined_loader is None or val._last_val_dl_reload_epoch != made["epoch"]):
            val._combined_loader = None
            trainer.validating = True
            with self.feed.as_made(made):
                self._their_val_setup()
            trainer.training = True

    def _lift_limit(self) -> None:
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None

    @property
    def measured_next(self) -> bool:
        """True if a validation, or the end of the epoch, may come before the next step."""
        epoch, trainer = self._trainer.fit_loop.epoch_loop, self._trainer
        if epoch.batch_progress.is_last_batch or epoch._num_ready_batches_reached():
            return True
        if epoch._should_check_val_fx(self._fetcher):
            return True
        ahead = trainer.accumulate_grad_batches - 1
        if not ahead or not epoch._should_check_val_epoch() or trainer.val_check_batch is None:
            return bool(ahead and trainer.val_check_batch is None)  # validation is scheduled by time
        done = 1 + (epoch.total_batch_idx if trainer.check_val_every_n_epoch is None else epoch.batch_idx)
        return any((done + more) % trainer.val_check_batch == 0 for more in range(1, ahead + 1))

    # -- the added calls --

    def _run(self, run: Callable[[], None]) -> None:
        self._begin()
        run()

    def _setup_data(self, setup_data: Callable[[], None]) -> None:
        fit = self._trainer.fit_loop
        if self._resumed and fit._combined_loader is None:
            with self.feed.as_made(self.feed.made):
                setup_data()
            return
        if fit._combined_loader is None or fit._should_reload_train_dl:
            self.feed.made = self.feed.making()
        setup_data()
        if not self._resumed:
            self.feed.epoch_started = self.feed.now()  # on_advance_start runs next, with the hooks of the epoch
            self._groups = [len(optimizer.param_groups) for optimizer in self._trainer.optimizers]

    def _loaders_made(self, load_states: Callable[[], None]) -> None:
        self.feed.loaders_made(list(self._trainer.fit_loop._combined_loader.flattened))
        load_states()

    def _setup_val_data(self, setup_data: Callable[[], None]) -> None:
        val = self._trainer.fit_loop.epoch_loop.val_loop
        if val._combined_loader is None or val._should_reload_val_dl:
            self.feed.val_made = self.feed.making()
        setup_data()

    def _on_advance_start(self, on_advance_start: Callable[[], None]) -> None:
        on_advance_start()
        if self._resumed:
            self._epoch_started(self.feed.put_epoch_started, self._groups)

    def _on_before_fetch(self, on_before_fetch: Callable[[], None]) -> None:
        on_before_fetch()
        self.feed.before_fetch()

    def _on_after_fetch(self, on_after_fetch: Callable[[], None]) -> None:
        self.feed.after_fetch()
        on_after_fetch()

    def _on_run_start(self, on_run_start: Callable[[Any], None], fetcher: Any) -> None:
        now, iterator = self.feed.now(), fetcher.combined_loader._iterator
        if not self._resumed:
            self.feed.epoch_ends()
        on_run_start(fetcher)
        if not self._resumed:
            self.feed.epoch_begins(now, made=fetcher.combined_loader._iterator is not iterator)

    def _advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        self._behind, self._resumed = self._resumed, False
        if not self._behind:
            self.feed.before_batch(fetcher)
            advance(fetcher)
            return
        fit = self._trainer.fit_loop
        fit._restarting = False  # otherwise the end of the epoch would skip schedulers that use metrics
        fit.epoch_loop.val_loop.restarting = False  # the validation begins again
        if self._accumulate[0] == self._trainer.accumulate_grad_batches:
            self._trainer.accumulate_grad_batches = self._accumulate[1]
        self._trainer.should_stop = self._trainer.should_stop or self._should_stop
        self._lift_limit()
        self._again()
        self.feed.come_back(fetcher)

    def _on_advance_end(self, on_advance_end: Callable[[Any], None], fetcher: Any) -> None:
        self._fetcher = fetcher
        self._done(again=self._behind)
        on_advance_end(fetcher)

    def _update_train_epoch_metrics(self, update_train_epoch_metrics: Callable[[], None]) -> None:
        self._epoch_logged()
        update_train_epoch_metrics()
