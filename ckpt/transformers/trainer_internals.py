"""What has to be known of the inside of transformers' Trainer to have it go on in the middle: all of it is here.

A callback is not given the Trainer, and the place where its loop begins cannot be set from outside. What is used that
is not public: `_run_epoch`, which runs one epoch and knows how to leave out what a checkpoint has behind it, and the
sum of the losses that were not logged yet. Tried with transformers 5.23; what another version lacks is said at once.
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

from ckpt.core.state.sharding import ModulePart, named_parameters, unwrap
from ckpt.core.state.stateful import RNG
from ckpt.errors import MismatchError, UsageError
from ckpt.transformers.further_state import FurtherState

say = logging.get_logger("transformers.everystep")  # shown where the Trainer's own messages are
theirs = logging.get_logger("transformers.trainer")

PRIVATE = (
    "_run_epoch",
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_train_batch_size",
)
NOWHERE = "/dev/null"  # where a checkpoint of the Trainer's own would be: only its loop shall believe that there is one
KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Of TrainerState. The rest follows from the arguments of this start, or is said elsewhere (log_history)."""
PLAIN = (bool, int, float, str, type(None))


def say_once(trainer: Trainer, text: str, *values: object) -> None:
    """A warning of the first of all ranks."""
    if trainer.is_world_process_zero():
        say.warning(text, *values)


def calling_trainer() -> Trainer | None:
    """The Trainer that is calling back right now."""
    return next(calling_trainers(), None)


def calling_trainers() -> Iterator[Trainer]:
    """Those that have a method on this thread's stack."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            yield found
        frame = frame.f_back


def check(trainer: Trainer) -> None:
    """UsageError if this Trainer cannot be resumed by a callback."""
    missing = [name for name in PRIVATE if not hasattr(trainer, name)]
    if missing:
        raise UsageError(f"the Trainer of this version of transformers has no {', '.join(missing)}: use 5.23")
    if trainer.state.is_hyper_param_search:
        raise UsageError("the trials of a hyperparameter search would go on from each other: leave the callback out")


def reduce_batch_size(trainer: Trainer, size: int) -> None:
    """Have `auto_find_batch_size` try a smaller batch size, unless it has come down to `size` or below.

    Raises what the Trainer takes for a lack of memory, which is the only way to make it start over.
    """
    if trainer._train_batch_size > size:
        raise RuntimeError(f"CUDA out of memory. (Not really: the run in progress uses a batch size of {size}.)")


class Rewind:
    """Make the loop that is about to start continue at an epoch and a batch of it. If the epoch is None, none runs.

    Skip epochs without calling callbacks for them, and skip the evaluation before the first step (`eval_on_start`).

    put_flags: restores requires_grad after the callbacks' `on_train_begin`, and after `on_epoch_begin` if `begun`.
    begun: the epoch had begun when the state was saved.
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
    """What the next entry of the log and the summary are made of."""
    return {
        "flos": float(trainer.current_flos),
        "last_logged": int(trainer._globalstep_last_logged),
        "total": float(trainer._total_loss_scalar),
        "unlogged": trainer._tr_loss,
    }


def set_losses(trainer: Trainer, saved: dict[str, Any]) -> None:
    trainer.current_flos = saved["flos"]
    trainer._globalstep_last_logged = saved["last_logged"]
    trainer._total_loss_scalar, trainer._initial_global_step = saved["total"], 0  # of the whole run
    trainer._tr_loss = saved["unlogged"].to(trainer.args.device)


class CallbackStates:
    """Callbacks that have a state (`ExportableState`), and the TrainerControl, by class; several of one in their order.

    A state has `attributes`, which change as training goes on, and `args`, which a callback is made with. Many keep in
    `args` what changes too, and what does not change there is for the script to say, so what they were made with is
    kept beside it.
    """

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
        """What is there now, also for those who ask the TrainerState, such as the Trainer's own checkpoints."""
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
        """Into the callbacks there are, which stay the same objects."""
        if "now" not in saved:  # of an older version, which knew of attributes only
            saved = {"now": {n: [{"attributes": one} for one in some] for n, some in saved.items()}, "made": {}}
        live = self._live()
        missing = [name for name in saved["now"] if name not in live]
        if missing:
            theirs.warning(
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
        if isinstance(one, TrainerControl):  # a training that begins is not over; see `stopped_early`
            args.pop("should_training_stop", None)
        if any(k not in given or _plain(given).get(k) != v for k, v in args.items()):
            vars(one).update(vars(type(one)(**{**given, **args})))
        for key, value in state.get("attributes", {}).items():
            setattr(one, key, value)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Those that the Trainer could write too, as they would come back."""
    found = {}
    for key, value in values.items():
        if type(value) in (bool, int, float, str):  # at every step: quickly
            found[key] = value
            continue
        with contextlib.suppress(TypeError, ValueError):
            found[key] = json.loads(json.dumps(value))
    return found


def stopped_early(trainer: Trainer) -> bool:
    """Whether an EarlyStoppingCallback has had enough."""
    return any(
        isinstance(callback, EarlyStoppingCallback)
        and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in trainer.callback_handler.callbacks
    )


def data_of(trainer: Trainer, loader: Any) -> dict[str, Any]:
    """What the order of the examples depends on, and how many a step takes."""
    args = trainer.args
    try:
        examples: int | None = trainer.num_examples(loader)
        steps = trainer.set_initial_training_values(args, loader)[1]
    except (TypeError, ValueError):  # a stream without a length
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
    """Differs if random numbers were drawn from one of the global generators."""
    return [
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["pos"],
    ]


def generator_of(loader: Any) -> torch.Generator | None:
    """The generator of its own that the sampler draws the order from, if it has one that is not seeded anew."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else getattr(loader, "sampler", None)
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


class LogHistory:
    """`TrainerState.log_history` as bytes that grow by what was added, so that a long one costs no more than a short.

    Room is doubled when it is used up: the layout of a checkpoint stays the same most of the time.
    """

    def __init__(self, room: int = 1 << 14) -> None:
        self._count, self._used = 0, 0
        self._bytes = torch.zeros(room, dtype=torch.uint8)

    def read(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        if len(history) < self._count:  # somebody has taken entries away
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
    except (TypeError, ValueError):  # keys that JSON lacks, or an object that contains itself
        return json.dumps({str(key): value if type(value) in PLAIN else repr(value) for key, value in entry.items()})


def _json_value(value: Any) -> Any:
    """Return a value that JSON lacks as a number, a list, or its repr."""
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        plain = value.tolist()
        return repr(plain) if isinstance(plain, complex) else plain
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return repr(value)


class FrozenFlags:
    """requires_grad of the model's parameters, which callbacks change in mid-training to freeze and unfreeze layers."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(model)
        self._begun = self._now()

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def read(self) -> dict[str, bool]:
        """Return those that have changed since the training began."""
        now = self._now()
        if now == self._begun:
            return {}
        changes = zip(self.parameters, now, self._begun, strict=True)
        return {name: flag for name, flag, begun in changes if flag != begun}

    def put(self, saved: dict[str, bool]) -> None:
        """Set them to what they were when this start began, but for the changes that `read` has returned."""
        for (name, parameter), begun in zip(self.parameters.items(), self._begun, strict=True):
            if parameter.requires_grad != (flag := saved.get(name, begun)):
                parameter.requires_grad_(flag)


class TrainerProgress:
    """How far the Trainer is, as a part of the state."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self.trainer, self._loader = trainer, loader
        self._generator = generator_of(loader)
        self._log = LogHistory()
        self._callbacks = CallbackStates(trainer)
        self._further = FurtherState(trainer)
        self.flags = FrozenFlags(unwrap(trainer.model_wrapped))
        self._part: ModulePart | None = None  # all that is saved of the model, if frozen parameters are not
        self._trained: dict[str, Tensor] = {}
        self._unfrozen: set[str] = set()
        self._order: dict[str, Any] = {}
        self.data = data_of(trainer, loader)
        self.base: dict[str, Any] | None = None
        self.epoch, self.epoch_began = 0, 0
        self.behind = 0  # steps of the epoch that begins, which were made before
        self.ahead = 0  # 1: the epoch is over, and the next one has not begun
        self.summary = 0  # entries at the end of the log that a longer run would not have
        self.saved: dict[str, Any] | None = None

    def begin(self, epoch: int, step: int) -> None:
        """An epoch begins: the order of its examples is about to be drawn."""
        self.epoch, self.epoch_began, self.ahead, self.behind = epoch, step - self.behind, 0, 0
        generator = None if self._generator is None else self._generator.get_state()
        self._order = {"numbers": RNG().state_dict(), "sampler": generator}

    def draw_again(self) -> None:
        """Have the order of the epoch that was under way be drawn once more."""
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
        """Save this part of the model: what is trained when the training begins, and what is unfrozen later."""
        self._part, self._trained = part, trained

    def store_unfrozen(self) -> None:
        """Have parameters stored that were unfrozen since the last call. They stay when they are frozen again."""
        if self._part is not None:
            flagged = {name for name, flag in self.flags.read().items() if flag}
            if not flagged <= self._unfrozen:
                self._store(self._unfrozen | flagged)

    def _store(self, unfrozen: set[str]) -> None:
        assert self._part is not None
        self._unfrozen = unfrozen
        self._part.put(self._trained | {name: self.flags.parameters[name] for name in sorted(unfrozen)})

    def match_structure(self, saved: dict[Any, Any]) -> None:
        """Expect the parameters that had been unfrozen when a state was saved. Called before anything is restored."""
        if self._part is not None and ("model",) in saved:
            names = {name.removeprefix("model.") for name in saved[("model",)].names}
            self._store((names & self.flags.parameters.keys()) - self._trained.keys())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.saved = saved  # the Trainer gets it when it is known to fit

    def load(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        best = trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            say.warning("the best checkpoint, %s, is not there any more", best)
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
        """Return how many batches of today's size hold the examples of the epoch that were trained on."""
        each = self.trainer.args.gradient_accumulation_steps
        steps, then, now = (
            step - saved["epoch_began"],
            saved["data"]["examples_per_step"],
            self.data["examples_per_step"],
        )
        return int(steps * each if then == now else -(-steps * then * each // now))

    def last_step(self, saved: dict[str, Any], step: int, batches: int) -> int:
        """Return the step at which the last epoch ends if the batch size changed at `step`."""
        each, steps = self.trainer.args.gradient_accumulation_steps, self.data["steps_per_epoch"]
        if steps is None:
            return int(self.trainer.state.max_steps)
        left = self.trainer.args.num_train_epochs - saved["epoch"]
        return int(step + max(0, math.ceil(left * steps) - batches // each))

    def compare(self, saved: dict[str, Any], *, strict: bool) -> None:
        """MismatchError if the examples, or the frozen weights, are not those that were trained with.

        With `auto_find_batch_size` the batch size is the Trainer's to choose: a smaller one is a warning.
        """
        found = ("examples_per_step", "steps_per_epoch") if self.trainer.args.auto_find_batch_size else ()
        lines = [
            f"{name}: {then!r} then, {self.data.get(name)!r} now"
            for name, then in saved["data"].items()
            if self.data.get(name) != then and name not in found
        ]
        if saved["batch_size"] != self.trainer._train_batch_size and found:
            say.warning(
                "auto_find_batch_size chose a batch size of %d, and the run had %d: training goes on with the examples "
                "that are left, and the learning-rate schedule goes on counting steps",
                self.trainer._train_batch_size,
                saved["batch_size"],
            )
        if lines:
            lines.insert(0, "the data are others than those of the run, so that the next batches cannot be the same")
        if self.base is not None and saved["base"] is not None and self.base != saved["base"]:
            lines.append(
                "the frozen base model is another one than that which was trained on: load the same weights, of the "
                f"same revision and dtype ({saved['base']['tensors']} tensors then, {self.base['tensors']} now)"
            )
        if lines and strict:
            raise MismatchError("\n  ".join(lines) + "\nCheckpointCallback(..., strict=False) goes on all the same")
        if lines:
            say.warning("going on although %s", "; ".join(lines))
