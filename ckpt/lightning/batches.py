"""Records how the batches of a Lightning training were drawn, so that a restored run sees the same batches.

The order of a plain loader follows from the random state at a few moments. `BatchFeed` records these random states,
and sets them again when a run is restored.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import data

from ckpt.core.state.nodes import RNG, adapt
from ckpt.errors import UsageError
from ckpt.lightning import orders
from ckpt.units import count_of

State = dict[str, Any]
PLAIN = (bool, int, float, str, type(None))
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
PARTS = {"sampler", "batch_sampler", "dataset", "loader", "dataloader"}  # names of attributes with parts of a loader
MAX_OBJECTS, MAX_ITEMS = 64, 32
MAX_DRAWS = 512  # maximum recorded batches of an epoch, at about 5 KB each
AT_ONCE = (
    data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler,
    data.DistributedSampler,
)  # fmt: skip


def warn(trainer: Any, text: str, *values: object) -> None:
    """Log a warning to Lightning's own logger, where it is visible by default."""
    _logger(trainer).warning(text, *values)


def inform(trainer: Any, text: str, *values: object) -> None:
    """Log an info message to Lightning's own logger, like its "Restoring states from …"."""
    _logger(trainer).info(text, *values)


def _logger(trainer: Any) -> logging.Logger:
    return logging.getLogger(type(trainer.fit_loop).__module__.partition(".loops")[0])


class BatchFeed:
    """Records how batches are drawn, and brings a restored training back to the same batch.

    Lightning restores loaders that have a state, but only if all loaders of the training have one. With other loaders,
    the order of an epoch and the random numbers of workers follow from the random state at two moments: when the
    iterator was created, and when the first batch was requested. So a restore creates the iterator again from these
    states, fetches the completed batches again and drops them, and then sets the random state of the restored step.
    Three more cases need records. Loaders are created again in the epoch, and from the random state, in which the run
    created them. With several loaders, a shorter one starts again within the epoch. And samplers, streams and
    generators of unknown classes may draw from the shared generators at each batch. The state of such a generator is
    recorded before the batch, unless nothing has drawn from it since the batch before.

    Counters and generators in samplers and data sets are treated like the random state.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._world = trainer.world_size
        self.made: State = {}  # the epoch and the random state in which the loaders were created
        self.val_made: State = {}  # the same for validation
        self.epoch_started: State = {}  # random state before on_train_epoch_start
        self._begun: State = {}  # random state before the iterator was created
        self._fetch: State = {}  # random state before the iterator's first batch
        self._was_made = False  # True if the epoch created its iterator, False if the iterator existed before
        self._first = 0  # batches of this epoch that were completed before the iterator's first batch
        self._ahead: list[State] | None = None  # states of the loaders before the batch that was fetched in advance
        self._step: State = {}  # restored state of the step, to be set when training is back at the batch
        self._saved_world = self._world
        self._base: list[State] = []  # counters of samplers and data sets as the script created them
        self._orders: list[State] = []  # lists and arrays of samplers and data sets as the script created them
        self._left_out: set[str] = set()
        self._objects: list[Any] = []  # loaders, samplers and data sets
        self._lazy = self._several = False  # any batch may draw; a loader may start again in an epoch
        self._draws = Draws()
        self._count = 0  # batches fetched since the first of this epoch
        self._before: State = {}  # random state before the batch that is being fetched
        self._after: State = {}  # random state after the previous batch was fetched
        self._iterators: list[tuple[int, int]] = []
        self._replaying = False
        self._returning = False  # True after a restore, until training is back at the batch

    # -- random states --

    def now(self) -> State:
        """Return every random state on which the order of batches may depend."""
        return {"rng": RNG().state_dict(), "objects": self._counted(), "orders": self._ordered()}

    def _put(self, state: State) -> None:
        RNG().load_state_dict(state["rng"])
        self._count_as(state["objects"])
        if (saved := state.get("orders")) is not None:
            self._order_as(saved)

    def put_epoch_started(self) -> None:
        """Set the random state in which on_train_epoch_start ran."""
        if self.epoch_started:
            self._put(self.epoch_started)

    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    @property
    def _stateful(self) -> bool:
        loaders = self._loaders()
        return bool(loaders) and all(_is_stateful(loader) for loader in loaders)

    # -- counters and generators in loaders --

    def loaders_made(self, loaders: list[Any]) -> None:
        """Record the parts of the loaders and their counters, before an iterator is created."""
        self._objects = _parts(loaders)
        self._base = [_scalars(one) for one in self._objects]
        self._orders = [{k: orders.base_of(v) for k, v in _sequences(one).items()} for one in self._objects]
        stateful = all(map(_is_stateful, loaders))
        self._lazy = not stateful and not all(map(_draws_at_once, loaders))
        self._several = not stateful and len(loaders) > 1

    def _counted(self) -> list[Any]:
        """Return the counters that differ from the script's initial values, and the state of each generator."""
        found: list[Any] = []
        for number, (one, base) in enumerate(zip(self._objects, self._base, strict=True)):
            changed = {k: v for k, v in _scalars(one).items() if k not in base or base[k] != v}
            generators = {k: _state_of(v) for k, v in vars(one).items() if isinstance(v, GENERATORS)}
            if changed or generators:
                found.append([number, type(one).__qualname__, changed, generators])
        return found

    def _count_as(self, saved: list[Any]) -> None:
        by_number = {number: rest for number, *rest in saved}
        for number, (one, base) in enumerate(zip(self._objects, self._base, strict=True)):
            kind, changed, generators = by_number.get(number, (type(one).__qualname__, {}, {}))
            if kind != type(one).__qualname__:  # the script uses other loaders than when it was saved
                continue
            for key, value in _scalars(one).items():
                wanted = changed.get(key, base.get(key, value))
                if wanted != value:
                    vars(one)[key] = wanted
            vars(one).update({key: value for key, value in changed.items() if key not in vars(one)})
            for key, state in generators.items():
                if isinstance(vars(one).get(key), GENERATORS):
                    _set_state(vars(one)[key], state)

    def _ordered(self) -> list[Any]:
        """Return the lists and arrays that differ from those that the script created."""
        found: list[Any] = []
        for number, (one, base) in enumerate(zip(self._objects, self._orders, strict=True)):
            changes = {key: orders.change(value, base.get(key)) for key, value in _sequences(one).items()}
            for key in [key for key, value in changes.items() if value is orders.LEFT_OUT]:
                self._warn_left_out(f"{type(one).__name__}.{key}")
            if changed := {key: value for key, value in changes.items() if isinstance(value, list)}:
                found.append([number, type(one).__qualname__, changed])
        return found

    def _warn_left_out(self, name: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            warn(
                self._trainer,
                "training changes %s, which has more than %d items, or new items that are not numbers, so it is not "
                "saved: after a restart batches may come in another order. Draw the order of an epoch from its number, "
                "or use a separate generator",
                name,
                orders.MAX_NUMBERS,
            )

    def _order_as(self, saved: list[Any]) -> None:
        by_number = {number: rest for number, *rest in saved}
        for number, (one, base) in enumerate(zip(self._objects, self._orders, strict=True)):
            kind, changed = by_number.get(number, (type(one).__qualname__, {}))
            if kind == type(one).__qualname__:
                for key in {**_sequences(one), **changed}:
                    orders.put(vars(one), key, base.get(key), changed.get(key))

    # -- during the training --

    def making(self) -> State:
        """Return the state on which loaders that are created now may depend."""
        return {"epoch": self._trainer.current_epoch, "rng": RNG().state_dict()}

    @contextlib.contextmanager
    def as_made(self, made: State) -> Iterator[None]:
        """Set the epoch and the random state in which the loaders were created. Finally, restore the epoch."""
        current = self._trainer.fit_loop.epoch_progress.current
        epoch, current.completed = current.completed, made["epoch"]
        RNG().load_state_dict(made["rng"])
        try:
            yield
        finally:
            current.completed = epoch

    def epoch_ends(self) -> None:
        """Begin a new record, because batches that are fetched from now on belong to the next epoch."""
        self._fetch = {}

    def epoch_begins(self, before: State, *, made: bool) -> None:
        self._begun, self._was_made, self._fetch = before if made else {}, made, {}

    def before_batch(self, fetcher: Any) -> None:
        if not self._fetch:
            self._check(fetcher)
            self._fetch, self._first = self.now(), self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._draws, self._count, self._after = Draws(), 0, self._fetch["rng"]
        if fetcher.length is None and self._stateful:  # without a length, Lightning fetches one batch in advance
            self._ahead = self._trainer.fit_loop._combined_loader._state_dicts()

    def before_fetch(self) -> None:
        if self._replaying:
            self._draws.repeat(self._count)
        elif self._fetch and not self._returning and (self._lazy or self._several):
            self._before, self._iterators = RNG().state_dict(), self._iterated()

    def after_fetch(self) -> None:
        if self._before and not self._replaying:
            self._note_draws()
        self._count += 1

    def _note_draws(self) -> None:
        before, self._before = self._before, {}
        now = RNG().state_dict()
        if self._lazy or self._has_restarted():
            drawn = {k: v for k, v in before.items() if not _same(v, now[k]) and not _same(v, self._after.get(k))}
            if drawn and not self._draws.add(self._count, drawn):
                warn(
                    self._trainer,
                    "more than %d batches of this epoch drew from the shared random generators, and training drew from "
                    "them between the batches: a restart from here on sees other batches in the rest of the epoch. "
                    "Give the sampler or data set a torch.Generator of its own, or use a StatefulDataLoader",
                    MAX_DRAWS,
                )
        self._after = now

    def _iterated(self) -> list[tuple[int, int]]:
        inner = getattr(self._trainer.fit_loop._combined_loader, "_iterator", None)
        return [(id(one), getattr(one, "_num_yielded", 0)) for one in getattr(inner, "iterators", ())]

    def _has_restarted(self) -> bool:
        """Return True if one of several loaders started again during this fetch."""
        pairs = zip(self._iterators, self._iterated(), strict=False)
        return any(old != new or now <= then for (old, then), (new, now) in pairs)

    @staticmethod
    def _check(fetcher: Any) -> None:
        if hasattr(fetcher, "iterator_wrapper"):
            raise UsageError(
                "training_step(dataloader_iter) fetches batches itself, so a restart cannot continue at one: use "
                "training_step(batch) instead"
            )

    # -- save and restore --

    def fix(self, loop: State) -> None:
        """Correct the state of the loaders in the state of Lightning's loop."""
        if not self._stateful:
            loop.pop("combined_loader", None)
        elif self._ahead is not None and "combined_loader" in loop:
            loop["combined_loader"] = self._ahead

    def state_dict(self) -> State:
        ended = self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        return {
            "orders": self._ordered() if ended else [],  # within an epoch, the orders at its beginning suffice
            "begun": self._begun,
            "fetch": self._fetch,
            "was_made": self._was_made,
            "first": self._first,
            "draws": self._draws.state_dict(),
            "made": self.made,
            "val_made": self.val_made,
            "epoch_started": self.epoch_started,
            "objects": self._counted(),
            "world": self._world,
        }

    def load_state_dict(self, state: State) -> None:
        self._begun, self._fetch, self._was_made = state["begun"], state["fetch"], state["was_made"]
        self._first, self._saved_world = state["first"], state["world"]
        self.made, self.val_made, self.epoch_started = state["made"], state["val_made"], state["epoch_started"]
        self._draws = Draws()
        self._draws.load_state_dict(state["draws"])
        self._step, self._returning = {"objects": state["objects"], "orders": state.get("orders") or None}, True

    def resume(self) -> None:
        """Record the random numbers once everything is restored, to set them again in `come_back`."""
        self._step["rng"] = RNG().state_dict()

    def come_back(self, fetcher: Any) -> None:
        """Continue an epoch after its completed batches, so that the next batches are those of the interrupted run."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.ready
        self._check(fetcher)
        if not self._trainer.fit_loop.epoch_loop._num_ready_batches_reached() and not self._stateful:
            self._warn_what_differs()
            if self._was_made:
                self._put(self._begun)
                iter(fetcher)  # creates a new iterator inside the fetcher
            else:
                fetcher.fetched -= done  # the batches that are fetched again below will count again
            self._put(self._fetch)
            self._count, self._replaying = 0, True
            try:
                for _ in range(done - self._first):
                    next(fetcher)
            finally:
                self._replaying = False
        self._after, self._returning = {}, False
        self._put(self._step)

    def _warn_what_differs(self) -> None:
        if self._saved_world != self._world:
            warn(
                self._trainer,
                "saved by %s and restored by %d in the middle of an epoch: the remaining batches are divided "
                "again, so that some samples may come twice and some not at all in this epoch",
                count_of(self._saved_world, "rank"),
                self._world,
            )
        if any(getattr(loader, "persistent_workers", False) for loader in self._loaders()):
            warn(
                self._trainer,
                "persistent_workers=True: the batches are the same again, but the random numbers that workers draw "
                "differ from those of the interrupted run",
            )


class Draws:
    """Random states before single batches of an epoch, by the number of the batch. For each generator, one array has a
    state per row. So a save has few entries, and adding a state rarely adds an entry."""

    def __init__(self) -> None:
        self._rows: dict[str, np.ndarray[Any, Any]] = {}
        self._marks: list[list[Any]] = []  # number of the batch; each generator's row and plain values
        self._full = False

    def add(self, count: int, state: State) -> bool:
        """Record a state. If the records are full, return False once, so that the caller logs one warning."""
        if len(self._marks) >= MAX_DRAWS:
            first, self._full = not self._full, True
            return not first
        mark: dict[str, Any] = {}
        for name, value in state.items():
            array, rest = _split(name, value)
            rows = self._rows.get(name)
            used = sum(name in marked for _, marked in self._marks)
            if rows is None or used == len(rows):
                grown = np.zeros((max(4, 2 * used), array.size), array.dtype)
                if rows is not None:
                    grown[:used] = rows
                rows = self._rows[name] = grown
            rows[used] = array
            mark[name] = [used, rest]
        self._marks.append([count, mark])
        return True

    def repeat(self, count: int) -> None:
        """Set the random state that was recorded before this batch, if one was recorded."""
        for marked, mark in self._marks:
            if marked == count:
                whole = {name: _join(name, self._rows[name][row], rest) for name, (row, rest) in mark.items()}
                RNG().load_state_dict({**RNG().state_dict(), **whole})

    def state_dict(self) -> State:
        return {"rows": dict(self._rows), "marks": list(self._marks), "full": self._full}

    def load_state_dict(self, state: State) -> None:
        self._rows = {name: np.array(rows) for name, rows in state["rows"].items()}
        self._marks, self._full = list(state["marks"]), state["full"]


def _split(name: str, value: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """Split the state of one of the generators of `RNG` into one array and plain values."""
    if name == "torch":
        return value.numpy(), None
    if name == "accelerator":
        return np.concatenate([one.cpu().numpy() for one in value]), [one.numel() for one in value]
    before, array, *after = value if name == "numpy" else (value[0], value[1], value[2])
    return np.asarray(array), [before, *after]


def _join(name: str, array: np.ndarray[Any, Any], rest: Any) -> Any:
    if name == "torch":
        return torch.from_numpy(array.copy())
    if name == "accelerator":
        return list(torch.split(torch.from_numpy(array.copy()), rest))
    return (rest[0], array.copy(), *rest[1:])


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _draws_at_once(loader: Any) -> bool:
    """Return True if the whole order of an epoch is drawn when its iteration begins."""
    if _is_stateful(loader):
        return True
    if not isinstance(loader, data.DataLoader):
        return False
    if isinstance(loader.dataset, data.IterableDataset):
        return loader.num_workers > 0  # workers draw from seeds that were drawn at the beginning
    batches = loader.batch_sampler
    samplers = [loader.sampler] if batches is None else [batches, getattr(batches, "sampler", None)]
    return all(type(one) in (*AT_ONCE, data.BatchSampler) for one in samplers)


def _parts(loaders: list[Any]) -> list[Any]:
    """Return the loaders, and the samplers and data sets in them, each once, in a reproducible order."""
    found: dict[int, Any] = {}
    pending = list(loaders)
    while pending and len(found) < MAX_OBJECTS:
        one = pending.pop(0)
        if id(one) in found or not hasattr(one, "__dict__") or isinstance(one, type):
            continue
        found[id(one)] = one
        for key, value in vars(one).items():
            several = (
                list(value.values()) if type(value) is dict else value if type(value) in (list, tuple) else [value]
            )
            if len(several) <= MAX_ITEMS:
                kinds = (data.DataLoader, data.Sampler, data.Dataset)
                pending += [v for v in several if isinstance(v, kinds) or (key in PARTS and hasattr(v, "__dict__"))]
    return list(found.values())


_OF_TORCH = frozenset(vars(data.DataLoader(data.TensorDataset(torch.zeros(1)))))


def _scalars(one: Any) -> State:
    """Return the plain attributes of a loader, sampler or data set, in which user code may count."""
    if _is_stateful(one):
        return {}
    skipped = _OF_TORCH if isinstance(one, data.DataLoader) else frozenset[str]()
    return {k: v for k, v in vars(one).items() if type(v) in PLAIN and k not in skipped and not k.startswith("__")}


def _sequences(one: Any) -> State:
    """Return the lists and arrays of a sampler or data set, because they may hold an order."""
    return {} if _is_stateful(one) or isinstance(one, data.DataLoader) else orders.sequences(vars(one))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=True)
    adapted = adapt(generator)
    assert adapted is not None
    return adapted.state_dict()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif (adapted := adapt(generator)) is not None:
        adapted.load_state_dict(state)
