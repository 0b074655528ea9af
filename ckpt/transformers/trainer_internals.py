"""Access to the internals of transformers' Trainer that are needed to resume in the middle of training.

A callback does not receive the Trainer, and a caller cannot set where the Trainer's loop starts. The non-public names
used are `_run_epoch`, which runs one epoch and can skip completed steps, and the sum of losses that are not logged yet.
Tested with transformers 5.23. If another version lacks a name, an error is raised when training begins.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.utils import logging

from ckpt.core.state.nodes import RNG
from ckpt.core.state.sharding import ModulePart, named_parameters, unwrap
from ckpt.errors import MismatchError, UsageError
from ckpt.transformers.further_state import FurtherState
from ckpt.units import count_of

logger = logging.get_logger("transformers.everystep")  # a child of the logger that shows the Trainer's own messages
trainer_logger = logging.get_logger("transformers.trainer")

PRIVATE = (
    "_run_epoch",
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_train_batch_size",
)
NOWHERE = "/dev/null"  # a path without a checkpoint; passing it makes the Trainer's loop skip completed batches
KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Attributes of TrainerState that are saved. The script's arguments determine the others, except for log_history."""
PLAIN = (bool, int, float, str, type(None))


def warn_once(trainer: Trainer, text: str, *values: object) -> None:
    """Log a warning on rank 0 only."""
    if trainer.is_world_process_zero():
        logger.warning(text, *values)


def calling_trainer() -> Trainer | None:
    """Return the Trainer that is calling this callback, or None."""
    return next(calling_trainers(), None)


def calling_trainers() -> Iterator[Trainer]:
    """Yield the Trainers whose methods are on this thread's stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            yield found
        frame = frame.f_back


def check(trainer: Trainer) -> None:
    """Raise UsageError if a callback cannot resume a training of this Trainer."""
    missing = [name for name in PRIVATE if not hasattr(trainer, name)]
    if missing:
        raise UsageError(f"the Trainer of this version of transformers has no {', '.join(missing)}: use 5.23")
    if trainer.state.is_hyper_param_search:
        raise UsageError("the trials of a hyperparameter search would continue from each other: remove the callback")


def reduce_batch_size(trainer: Trainer, size: int) -> None:
    """Make `auto_find_batch_size` try a smaller batch size, unless the current one is `size` or less. To do so, raise
    an error that the Trainer takes for an out-of-memory error, because nothing else makes it start again."""
    if trainer._train_batch_size > size:
        raise RuntimeError(f"CUDA out of memory. (Not really: the run in progress uses a batch size of {size}.)")


class Rewind:
    """Makes the Trainer's loop continue at a batch of an epoch. If `epoch` is None, no epoch runs.

    Epochs before it are skipped without callbacks, and so is the evaluation before the first step (`eval_on_start`).

    put_flags: restores requires_grad after the callbacks' `on_train_begin`, and after `on_epoch_begin` if `begun`.
    begun: True if the epoch had begun when the state was saved.
    """

    def __init__(
        self,
        trainer: Trainer,
        first: int,
        epoch: int | None,
        batches: int,
        put_flags: Callable[[], None],
        begun: bool,
    ) -> None:
        self._trainer, self._next, self._epoch, self._batches = trainer, first, epoch, batches
        self._put_flags, self._begun = put_flags, begun
        self._run: Any = trainer._run_epoch
        self._begin: Any = trainer.callback_handler.on_epoch_begin
        self._signature = inspect.signature(self._run)
        vars(trainer)["_run_epoch"] = self._run_epoch
        vars(trainer)["_evaluate"] = lambda *_, **__: {}
        vars(trainer.callback_handler)["on_epoch_begin"] = self._begin_epoch

    def undo(self) -> None:
        vars(self._trainer).pop("_run_epoch", None)
        vars(self._trainer).pop("_evaluate", None)
        vars(self._trainer.callback_handler).pop("on_epoch_begin", None)

    def _begin_epoch(self, args: Any, state: Any, control: TrainerControl) -> TrainerControl:
        if self._epoch is None or self._next < self._epoch:
            return control
        self._put_flags()
        found: TrainerControl = self._begin(args, state, control)
        if self._begun:
            self._put_flags()
        return found

    def _run_epoch(self, *positional: Any, **keywords: Any) -> Any:
        call = self._signature.bind(*positional, **keywords)
        self._next = call.arguments["epoch"] + 1
        if self._epoch is None:
            self._trainer.control.should_training_stop = True
            return None
        if call.arguments["epoch"] < self._epoch:
            return None
        self.undo()
        call.arguments["epochs_trained"] = self._epoch
        call.arguments["steps_trained_in_current_epoch"] = self._batches
        call.arguments["resume_from_checkpoint"] = NOWHERE if self._batches else None
        return self._run(*call.args, **call.kwargs)


def losses(trainer: Trainer) -> dict[str, Any]:
    """Return the sums from which the Trainer computes the next log entry and the summary."""
    return {
        "flos": float(trainer.current_flos),
        "last_logged": int(trainer._globalstep_last_logged),
        "total": float(trainer._total_loss_scalar),
        "unlogged": trainer._tr_loss,
    }


def set_losses(trainer: Trainer, saved: dict[str, Any]) -> None:
    trainer.current_flos = saved["flos"]
    trainer._globalstep_last_logged = saved["last_logged"]
    trainer._total_loss_scalar, trainer._initial_global_step = saved["total"], 0  # totals are those of the whole run
    trainer._tr_loss = saved["unlogged"].to(trainer.args.device)


class CallbackStates:
    """The states of callbacks (`ExportableState`) and of the TrainerControl, by class, in order. A state has
    `attributes`, which training changes, and `args`, with which the callback was created. Many callbacks also change
    `args`. Unchanged ones belong to the script, so the initial values are stored too, to detect changes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._made = {name: [one["args"] for one in states] for name, states in self._read().items()}

    def _live(self) -> dict[str, list[ExportableState]]:
        found: dict[str, list[ExportableState]] = {}
        for one in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one)
        return found

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        """Return the current states. Store them in TrainerState as well, for the Trainer's own checkpoints."""
        states = {name: [one.state() for one in some] for name, some in self._live().items()}
        state: Any = self._trainer.state
        state.stateful_callbacks = {name: some[0] if len(some) == 1 else some for name, some in states.items()}
        return {
            name: [{"args": _plain(one.get("args", {})), "attributes": one.get("attributes", {})} for one in some]
            for name, some in states.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {"now": self._read(), "made": self._made}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the states into the existing callback objects."""
        if "now" not in saved:  # an older version saved this, with only the attributes
            saved = {"now": {n: [{"attributes": one} for one in some] for n, some in saved.items()}, "made": {}}
        live = self._live()
        missing = [name for name in saved["now"] if name not in live]
        if missing:
            trainer_logger.warning(
                "Checkpoint included callbacks not included in current configuration. Ignoring. (%s)",
                ", ".join(missing),
            )
        for name, some in live.items():
            was = saved["made"].get(name, [])
            for number, (one, state) in enumerate(zip(some, saved["now"].get(name, []), strict=False)):
                self._put(one, state, was[number] if number < len(was) else {})
        self._read()

    def _put(self, one: ExportableState, state: dict[str, Any], made: dict[str, Any]) -> None:
        given = one.state().get("args", {})
        every = self._trainer.args.restore_callback_states_from_checkpoint
        args = {k: v for k, v in state.get("args", {}).items() if every or k not in made or made[k] != v}
        if isinstance(one, TrainerControl):  # do not restore that training should stop; see `stopped_early`
            args.pop("should_training_stop", None)
        if any(k not in given or _plain(given).get(k) != v for k, v in args.items()):
            vars(one).update(vars(type(one)(**{**given, **args})))
        for key, value in state.get("attributes", {}).items():
            setattr(one, key, value)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the Trainer's own checkpoints could store, in the form in which these are read back."""
    found = {}
    for key, value in values.items():
        if type(value) in (bool, int, float, str):  # fast, because this runs at every step
            found[key] = value
            continue
        with contextlib.suppress(TypeError, ValueError):
            found[key] = json.loads(json.dumps(value))
    return found


def stopped_early(trainer: Trainer) -> bool:
    """Return True if an EarlyStoppingCallback has stopped training."""
    return any(
        isinstance(callback, EarlyStoppingCallback)
        and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in trainer.callback_handler.callbacks
    )


def data_of(trainer: Trainer, loader: Any) -> dict[str, Any]:
    """Return the values that determine the order of the examples, and the number of examples per step."""
    args = trainer.args
    try:
        examples: int | None = trainer.num_examples(loader)
        steps = trainer.set_initial_training_values(args, loader)[1]
    except (TypeError, ValueError):  # the loader is a stream without a length
        examples = steps = None
    each = trainer._train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)
    return {
        "examples": examples,
        "examples_per_step": each,
        "steps_per_epoch": steps,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "sampling": str(getattr(args, "train_sampling_strategy", "random")),
    }


def drawn() -> list[Any]:
    """Return a value that changes when a global generator draws random numbers."""
    return [
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["pos"],
    ]


def generator_of(loader: Any) -> torch.Generator | None:
    """Return the sampler's own generator, or None if it has none or seeds it again for each epoch."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else getattr(loader, "sampler", None)
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


class LogHistory:
    """`TrainerState.log_history` as bytes in a buffer that only grows, so that a long history costs no more than a
    short one. The buffer doubles when it is full, so that the layout of the checkpoint rarely changes."""

    def __init__(self, room: int = 1 << 14) -> None:
        self._count, self._used = 0, 0
        self._bytes = torch.zeros(room, dtype=torch.uint8)

    def read(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        if len(history) < self._count:  # entries were removed since the last call
            self._count = self._used = 0
        text = "".join(_line(entry) + "\n" for entry in history[self._count :]).encode()
        self._count = len(history)
        while self._used + len(text) > len(self._bytes):
            self._bytes = torch.cat([self._bytes, torch.zeros_like(self._bytes)])
        if text:
            self._bytes[self._used : self._used + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._used += len(text)
        return {"bytes": self._bytes, "used": self._used}

    @staticmethod
    def parse(saved: dict[str, Any]) -> list[dict[str, Any]]:
        text: Tensor = saved["bytes"][: saved["used"]]
        return [json.loads(line) for line in text.numpy().tobytes().splitlines()]


def _line(entry: dict[str, Any]) -> str:
    try:
        return json.dumps(entry, default=_json_value)
    except (TypeError, ValueError):  # the entry has keys that JSON lacks, or contains itself
        return json.dumps({str(key): value if type(value) in PLAIN else repr(value) for key, value in entry.items()})


def _json_value(value: Any) -> Any:
    """Convert a value that JSON lacks to a number, a list, or its repr."""
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        plain = value.tolist()
        return repr(plain) if isinstance(plain, complex) else plain
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return repr(value)


class FrozenFlags:
    """requires_grad of the model's parameters. Callbacks change it during training to freeze and unfreeze layers."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(model)
        self._begun = self._now()

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def read(self) -> dict[str, bool]:
        """Return the flags that have changed since the training began."""
        now = self._now()
        if now == self._begun:
            return {}
        changes = zip(self.parameters, now, self._begun, strict=True)
        return {name: flag for name, flag, begun in changes if flag != begun}

    def put(self, saved: dict[str, bool]) -> None:
        """Set the flags to their values at the beginning of this start, and then to the changed ones in `saved`."""
        for (name, parameter), begun in zip(self.parameters.items(), self._begun, strict=True):
            if parameter.requires_grad != (flag := saved.get(name, begun)):
                parameter.requires_grad_(flag)


class TrainerProgress:
    """The progress of the Trainer, as an entry of the state."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self.trainer, self._loader = trainer, loader
        self._generator = generator_of(loader)
        self._log = LogHistory()
        self._callbacks = CallbackStates(trainer)
        self._further = FurtherState(trainer)
        self.flags = FrozenFlags(unwrap(trainer.model_wrapped))
        self._part: ModulePart | None = None  # the part of the model that is saved, if frozen parameters are not saved
        self._trained: dict[str, Tensor] = {}
        self._unfrozen: set[str] = set()
        self._order: dict[str, Any] = {}
        self.data = data_of(trainer, loader)
        self.base: dict[str, Any] | None = None
        self.epoch, self.epoch_began = 0, 0
        self.behind = 0  # steps of the epoch that begins next that were completed before
        self.ahead = 0  # 1 if the epoch is over and the next one has not begun, else 0
        self.summary = 0  # number of entries at the end of the log that a longer run would not have
        self.saved: dict[str, Any] | None = None

    def begin(self, epoch: int, step: int) -> None:
        """Begin an epoch, and record the random state from which the order of its examples is drawn next."""
        self.epoch, self.epoch_began, self.ahead, self.behind = epoch, step - self.behind, 0, 0
        generator = None if self._generator is None else self._generator.get_state()
        self._order = {"numbers": RNG().state_dict(), "sampler": generator}

    def draw_again(self) -> None:
        """Restore the random state, so that the order of the current epoch is drawn again."""
        RNG().load_state_dict(self._order["numbers"])
        if self._generator is not None and self._order["sampler"] is not None:
            self._generator.set_state(self._order["sampler"])
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        state = self.trainer.state
        history = state.log_history[: len(state.log_history) - self.summary]
        return {
            "state": {name: getattr(state, name) for name in KEPT},
            "log": self._log.read(history),
            "losses": losses(self.trainer),
            "callbacks": self._callbacks.state_dict(),
            "further": self._further.state_dict(),
            "flags": self.flags.read(),
            "epoch": self.epoch + self.ahead,
            "epoch_began": self.epoch_began,
            "order": self._order,
            "data": self.data,
            "base": self.base,
            "max_steps": state.max_steps,
            "batch_size": self.trainer._train_batch_size,
        }

    def save_only(self, part: ModulePart, trained: dict[str, Tensor]) -> None:
        """Save only this part of the model: `trained`, and parameters that are unfrozen later."""
        self._part, self._trained = part, trained

    def store_unfrozen(self) -> None:
        """Add parameters that were unfrozen since the last call to the saved part. They stay in it if frozen again."""
        if self._part is not None:
            flagged = {name for name, flag in self.flags.read().items() if flag}
            if not flagged <= self._unfrozen:
                self._store(self._unfrozen | flagged)

    def _store(self, unfrozen: set[str]) -> None:
        assert self._part is not None
        self._unfrozen = unfrozen
        self._part.put(self._trained | {name: self.flags.parameters[name] for name in sorted(unfrozen)})

    def match_structure(self, saved: dict[Any, Any]) -> None:
        """Add the parameters that were unfrozen at the save to the saved part. Called before anything is restored."""
        if self._part is not None and ("model",) in saved:
            names = {name.removeprefix("model.") for name in saved[("model",)].names}
            self._store((names & self.flags.parameters.keys()) - self._trained.keys())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.saved = saved  # `load` passes it to the Trainer after `compare` has checked it

    def load(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        best = trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            logger.warning("the best checkpoint, %s, no longer exists", best)
            trainer.state.best_model_checkpoint = None
        trainer.state.log_history[:] = self._log.parse(saved["log"])
        set_losses(trainer, saved["losses"])
        self._callbacks.load_state_dict(saved["callbacks"])
        self._further.load_state_dict(saved["further"])
        self.put_flags()
        self.epoch, self.epoch_began, self._order = saved["epoch"], saved["epoch_began"], saved["order"]

    def put_flags(self) -> None:
        if self.saved is not None:
            self.flags.put(self.saved["flags"])

    def batches_done(self, saved: dict[str, Any], step: int) -> int:
        """Return how many batches of the current size contain the epoch's examples that were trained on."""
        each = self.trainer.args.gradient_accumulation_steps
        steps, then, now = (
            step - saved["epoch_began"],
            saved["data"]["examples_per_step"],
            self.data["examples_per_step"],
        )
        return int(steps * each if then == now else -(-steps * then * each // now))

    def last_step(self, saved: dict[str, Any], step: int, batches: int) -> int:
        """Return the step at which the last epoch ends, if the batch size changed at `step`."""
        each, steps = self.trainer.args.gradient_accumulation_steps, self.data["steps_per_epoch"]
        if steps is None:
            return int(self.trainer.state.max_steps)
        left = self.trainer.args.num_train_epochs - saved["epoch"]
        return int(step + max(0, math.ceil(left * steps) - batches // each))

    def compare(self, saved: dict[str, Any], *, strict: bool) -> None:
        """Raise MismatchError if the examples or the frozen weights differ from those of the run. With
        `auto_find_batch_size`, the Trainer chooses the batch size, so a smaller one only causes a warning."""
        found = ("examples_per_step", "steps_per_epoch") if self.trainer.args.auto_find_batch_size else ()
        lines = [
            f"{name}: {then!r} then, {self.data.get(name)!r} now"
            for name, then in saved["data"].items()
            if self.data.get(name) != then and name not in found
        ]
        if saved["batch_size"] != self.trainer._train_batch_size and found:
            logger.warning(
                "auto_find_batch_size chose a batch size of %d, but the run had %d: training continues with the "
                "remaining examples, and the learning-rate schedule continues to count steps",
                self.trainer._train_batch_size,
                saved["batch_size"],
            )
        if lines:
            lines.insert(0, "the data differ from those of the run, so the next batches would differ")
        if self.base is not None and saved["base"] is not None and self.base != saved["base"]:
            lines.append(
                "the frozen base model differs from the one of the run: load the same weights, with the same "
                f"revision and dtype ({count_of(saved['base']['tensors'], 'tensor')} then, {self.base['tensors']} now)"
            )
        if lines and strict:
            raise MismatchError("\n  ".join(lines) + "\nCheckpointCallback(..., strict=False) continues anyway")
        if lines:
            logger.warning("continuing although %s", "; ".join(lines))
