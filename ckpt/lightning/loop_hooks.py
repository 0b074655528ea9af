"""What Lightning's loops know and its callbacks do not: where training stands, and where its batches come from.

Everything here that touches names of Lightning which are not documented is here because there is no other way: no
callback is called when training is about to begin, when an epoch's iterator is made, before a batch is fetched, or
once everything that belongs to a batch is done. `LoopHooks` puts a call at each of these moments, on the loops of one
trainer, and takes them away again.

    fit_loop.run              <- begin: open the run and restore, before a loader is asked for
      epoch_loop.on_run_start <- an epoch begins: remember the random numbers that its order is drawn from
        epoch_loop.advance         <- a batch is about to be fetched; after a restore, come back to the batch instead
        epoch_loop.on_advance_end  <- the batch is done, the validation after it has not begun: save
      update_train_epoch_metrics   <- all that an epoch logs is there, and is forgotten next: look at it

A restored run thus goes on in the middle of an iteration, with what comes after a batch: validation, if it was due,
runs again from its beginning, and everything is as it was in the run that was killed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ckpt.errors import UsageError
from ckpt.state.stateful import RNG

State = dict[str, Any]
NOT_EXACT = "You're resuming from a checkpoint that ended before the epoch ended"  # it is, with what `BatchFeed` does


def say(trainer: Any, text: str, *values: object) -> None:
    """A warning among Lightning's own, which are shown unless somebody has turned them off."""
    _logger(trainer).warning(text, *values)


def inform(trainer: Any, text: str, *values: object) -> None:
    """What is no warning, shown like Lightning's own "Restoring states from …"."""
    _logger(trainer).info(text, *values)


def _logger(trainer: Any) -> logging.Logger:
    return logging.getLogger(type(trainer.fit_loop).__module__.partition(".loops")[0])


class LoopHooks:
    """The loops of a trainer, with calls in between. `begin`, `done` and `epoch_logged` are the callback's."""

    def __init__(
        self, trainer: Any, begin: Callable[[], None], done: Callable[..., None], epoch_logged: Callable[[], None]
    ) -> None:
        self._trainer, self._begin, self._done, self._epoch_logged = trainer, begin, done, epoch_logged
        self.feed = BatchFeed(trainer)
        self._resumed = self._behind = False  # the batch that is to come is done already
        self._should_stop = False
        self._max_steps: int | None = None
        self._accumulate = [1, 1]  # batches of a step: as the trainer was made, and in the epoch under way
        self._made_to_accumulate = trainer.accumulate_grad_batches
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._fetcher: Any = None
        self._names = [(fit, "run"), (epoch, "on_run_start"), (epoch, "advance"), (epoch, "on_advance_end")]
        self._names.append((trainer._logger_connector, "update_train_epoch_metrics"))
        for loop, name in self._names:
            mine, theirs = getattr(self, f"_{name}"), getattr(loop, name)
            setattr(loop, name, lambda *args, mine=mine, theirs=theirs: mine(theirs, *args))

    def detach(self) -> None:
        """The loops are what they were."""
        self._lift_limit()
        for loop, name in self._names:
            vars(loop).pop(name, None)

    def state_dict(self) -> State:
        loops = self._trainer.fit_loop.state_dict()
        self.feed.fix(loops["state_dict"])
        accumulate = [self._made_to_accumulate, self._trainer.accumulate_grad_batches]
        stop = bool(self._trainer.should_stop)
        return {"fit": loops, "feed": self.feed.state_dict(), "should_stop": stop, "accumulate": accumulate}

    def load_state_dict(self, state: State) -> None:
        self._trainer.fit_loop.load_state_dict(state["fit"])
        self.feed.load_state_dict(state["feed"])
        self._should_stop = state["should_stop"]
        self._accumulate = state.get("accumulate", [1, 1])  # of an older version

    @property
    def reached(self) -> str:
        """Which limit of the trainer the last batch has reached, "" if none."""
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        if epoch.max_steps != -1 and epoch.global_step >= epoch.max_steps:
            return f"max_steps={epoch.max_steps}"
        epochs = fit.epoch_progress.current.processed + bool(epoch.batch_progress.is_last_batch)
        if fit.max_epochs not in (None, -1) and epochs >= fit.max_epochs:
            return f"max_epochs={fit.max_epochs}"
        return ""

    def skip(self) -> None:
        """The loops have been restored to the last batch of a training that has ended: there is nothing to do."""
        current = self._trainer.fit_loop.epoch_progress.current
        current.processed = current.completed = current.started
        self._trainer.should_stop = True

    def resume(self, again: Callable[[], None]) -> None:
        """The loops have been restored: go on behind the batch that was the last one. `again` is called there."""
        epoch = self._trainer.fit_loop.epoch_loop
        self._resumed, self._again = True, again
        epoch.val_loop._has_run = False  # of an earlier fit() of this trainer
        if epoch.max_steps != -1 and epoch.global_step >= epoch.max_steps:
            self._max_steps = epoch.max_steps  # the last step is done, and not what comes after it
            epoch.max_steps = epoch.global_step + 1
        warnings.filterwarnings("ignore", message=NOT_EXACT)
        self.feed.resume()

    def _lift_limit(self) -> None:
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None

    @property
    def measured_next(self) -> bool:
        """Whether a validation, or the end of the epoch, may come before another step is done."""
        epoch, trainer = self._trainer.fit_loop.epoch_loop, self._trainer
        if epoch.batch_progress.is_last_batch or epoch._num_ready_batches_reached():
            return True
        if epoch._should_check_val_fx(self._fetcher):
            return True
        ahead = trainer.accumulate_grad_batches - 1
        if not ahead or not epoch._should_check_val_epoch() or trainer.val_check_batch is None:
            return bool(ahead and trainer.val_check_batch is None)  # by the clock
        done = 1 + (epoch.total_batch_idx if trainer.check_val_every_n_epoch is None else epoch.batch_idx)
        return any((done + more) % trainer.val_check_batch == 0 for more in range(1, ahead + 1))

    # -- the five moments --

    def _run(self, run: Callable[[], None]) -> None:
        self.feed.begin()
        self._begin()
        run()

    def _on_run_start(self, on_run_start: Callable[[Any], None], fetcher: Any) -> None:
        now, iterator = self.feed.now(), fetcher.combined_loader._iterator
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
        fit._restarting = False  # else its end would leave out schedulers that look at metrics: we have those
        fit.epoch_loop.val_loop.restarting = False  # it begins anew
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


class BatchFeed:
    """Where batches come from, so that a restored run sees the same ones.

    Loaders with a state of their own (all of them, or none counts) are told theirs by Lightning. Of others an epoch's
    order, and what their workers draw, follow from the random numbers at two moments: when the iterator was made, and
    when the first batch was asked for. So the iterator is made again from those, the batches seen are fetched again and
    dropped, and then random numbers are what they were at the step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._world = trainer.world_size
        self._setup: State = {}  # random numbers before the loaders were asked for
        self._begun: State = {}  # before the iterator was made
        self._fetch: State = {}  # before its first batch
        self._made = False  # by the epoch; else by what was set up before it
        self._first = 0  # batches of this epoch that were done before
        self._ahead: list[State] | None = None  # states of the loaders before the batch that was fetched in advance
        self._step: State = {}  # what was restored
        self._saved_world = self._world

    def now(self) -> State:
        """All random numbers that the order of batches may depend on."""
        return {"rng": RNG().state_dict(), "generators": [g.get_state() for g in self._generators()]}

    def _put(self, state: State) -> None:
        RNG().load_state_dict(state["rng"])
        for generator, saved in zip(self._generators(), state["generators"], strict=False):
            generator.set_state(saved.cpu())

    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _generators(self) -> list[torch.Generator]:
        """Those that users have given to loaders and samplers."""
        found: dict[int, torch.Generator] = {}
        for loader in self._loaders():
            batches = getattr(loader, "batch_sampler", None)
            for one in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
                generator = getattr(one, "generator", None)
                if isinstance(generator, torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())

    @property
    def _stateful(self) -> bool:
        loaders = self._loaders()
        return bool(loaders) and all(hasattr(x, "state_dict") and hasattr(x, "load_state_dict") for x in loaders)

    # -- as training goes on --

    def begin(self) -> None:
        self._setup = self.now()

    def epoch_begins(self, before: State, *, made: bool) -> None:
        self._begun, self._made, self._fetch = before if made else {}, made, {}

    def before_batch(self, fetcher: Any) -> None:
        if not self._fetch:
            self._check(fetcher)
            self._fetch, self._first = self.now(), self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if fetcher.length is None and self._stateful:  # such are fetched one ahead
            self._ahead = self._trainer.fit_loop._combined_loader._state_dicts()

    @staticmethod
    def _check(fetcher: Any) -> None:
        if hasattr(fetcher, "iterator_wrapper"):
            raise UsageError(
                "training_step(dataloader_iter) fetches batches by itself, so that nobody can come back to one: take "
                "`batch` instead"
            )

    # -- saved and restored --

    def fix(self, loop: State) -> None:
        """What Lightning's loop says of its loaders, put right."""
        if not self._stateful:
            loop.pop("combined_loader", None)
        elif self._ahead is not None and "combined_loader" in loop:
            loop["combined_loader"] = self._ahead

    def state_dict(self) -> State:
        epoch = {"begun": self._begun, "fetch": self._fetch, "made": self._made, "first": self._first}
        now = [g.get_state() for g in self._generators()]
        return {**epoch, "setup": self._setup, "generators": now, "world": self._world}

    def load_state_dict(self, state: State) -> None:
        self._begun, self._fetch, self._made = state["begun"], state["fetch"], state["made"]
        self._first, self._setup, self._saved_world = state["first"], state["setup"], state["world"]
        self._step = {"generators": state["generators"]}

    def resume(self) -> None:
        """Everything is restored, random numbers too: keep these for later, and begin as the run began."""
        self._step["rng"] = RNG().state_dict()
        self._put(self._setup)

    def come_back(self, fetcher: Any) -> None:
        """The batches of this epoch that are done will not come again, those that come are the ones that would have."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.ready
        self._check(fetcher)
        if not self._trainer.fit_loop.epoch_loop._num_ready_batches_reached() and not self._stateful:
            self._say_what_differs()
            if self._made:
                self._put(self._begun)
                iter(fetcher)  # makes a new one inside
            else:
                fetcher.fetched -= done  # it counts on, and these are yet to be fetched
            self._put(self._fetch)
            for _ in range(done - self._first):
                next(fetcher)
        self._put(self._step)

    def _say_what_differs(self) -> None:
        if self._saved_world != self._world:
            say(
                self._trainer,
                "saved by %d ranks and restored by %d in the middle of an epoch: the batches of its rest are divided "
                "anew, so that some samples may come twice and some not at all in this epoch",
                self._saved_world,
                self._world,
            )
        if any(getattr(loader, "persistent_workers", False) for loader in self._loaders()):
            say(
                self._trainer,
                "persistent_workers=True: the batches are the same again, but what workers draw at random goes on from "
                "other numbers than in the run that was interrupted",
            )
