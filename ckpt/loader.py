"""`ckpt.Loader`: batches that go on where they stopped, on any number of ranks: no sample repeated, none left out.

    loader = ckpt.Loader(dataset, batch_size=8, seed=0, num_workers=4)
    state = {"model": model, "optim": optim, "loader": loader, "rng": ckpt.RNG()}
    ...
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

A data loader that counts for each rank what that rank was given cannot go on with another number of ranks. This one
keeps one position for the whole job: every epoch has one order of the dataset, made of the seed and the number of the
epoch alone; from the position on, rank r of w takes every w-th sample. So the position after a step is a number that
does not depend on who asks, and the rest of the epoch can be divided over any number of ranks.

What a sample looks like must not depend on that either: where the dataset draws random numbers (augmentation), they
come from streams seeded with the epoch and the number of the sample, in whichever worker it is made. And nothing here
draws from the global generators, whose state belongs to the training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ckpt.errors import CorruptError, UsageError

OURS = ("sampler", "batch_sampler", "generator", "shuffle")


class Loader:
    """A DataLoader over a map-style dataset that is part of the state. Iterating it gives the rest of its epoch.

    `batch_size`: samples of a rank in a batch. `shuffle`, `seed`: the order of an epoch. `drop_last=False` ends an
    epoch as torch's DistributedSampler does: the last ranks may see a sample of the beginning once more, so that
    all have equally many; True leaves out the last, incomplete round of batches. `rank`, `world`: of
    torch.distributed, unless given. `seed_samples=False` saves about 0.1 ms a sample where the dataset draws no
    random numbers. `make`: what makes the loader, torchdata's StatefulDataLoader for example. Everything else goes
    to it as it is.

    `epoch` is the one that the next iteration gives the rest of. An iteration that is left early counts as stopped
    there: the next one goes on. Raises UsageError for what cannot be continued, such as an IterableDataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
        seed_samples: bool = True,
        make: Any = DataLoader,
        **options: Any,
    ) -> None:
        _check(dataset, batch_size, options)
        if (rank is None) != (world is None):
            raise UsageError("give rank and world both, or neither")
        self._asked = rank is None
        self._rank, self._world = (rank, world) if rank is not None and world is not None else _who()
        if not 0 <= self._rank < self._world:
            raise UsageError(f"rank {self._rank} of {self._world}: ranks are counted from 0")
        self._order = _Order(len(dataset), shuffle, seed)  # type: ignore[arg-type]
        self.batch_size, self.drop_last = batch_size, drop_last
        self.epoch = 0
        self._from = 0  # samples of the epoch that all ranks had been given when this division began
        self._batches = 0  # given to this rank since
        self._sampler = _Numbers(self)
        inner = _Seeded(dataset, seed) if seed_samples else _Plain(dataset)
        generator = torch.Generator()  # else every iteration would draw from the global one
        self._loader = make(
            inner, batch_size=batch_size, sampler=self._sampler, drop_last=False, generator=generator, **options
        )

    def __iter__(self) -> Iterator[Any]:
        if self._asked and (now := _who()) != (self._rank, self._world):
            raise UsageError(
                f"this loader was made by rank {self._rank} of {self._world}, which is rank {now[0]} of {now[1]} now: "
                "make it after torch.distributed.init_process_group(), or every rank would be given all samples"
            )
        if self._batches:  # left in the middle, or restored: divide what remains
            self._from, self._batches = self._position(), 0
        epoch = self.epoch
        for batch in self._loader:
            if self.epoch != epoch:
                raise UsageError("this loader was given another position: begin a new iteration")
            self._batches += 1
            yield batch
        self.epoch, self._from, self._batches = epoch + 1, 0, 0

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self._rounds(0)

    @property
    def remaining(self) -> int:
        """Batches that the next iteration gives."""
        return self._rounds(self._position())

    def state_dict(self) -> dict[str, Any]:
        """Where the whole job is, after the last batch that came out; what workers fetched ahead does not count."""
        return {"epoch": self.epoch, "position": self._position(), "order": self._order.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_state_dicts([state], self._rank, self._world)

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Go on where `states`, of any number of ranks, stopped."""
        try:
            places = {(int(state["epoch"]), int(state["position"])) for state in states}
            orders = [dict(state["order"]) for state in states]
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CorruptError(f"not the state of a ckpt.Loader: {error!r}") from error
        if any(epoch < 0 or position < 0 for epoch, position in places):
            raise CorruptError(f"not places that a ckpt.Loader can have been at: {sorted(places)}")
        if any(order != self._order.facts() for order in orders):
            changed = [
                f"{k} was {orders[0].get(k)}, is {v}" for k, v in self._order.facts().items() if orders[0].get(k) != v
            ]
            raise UsageError(f"the data is not the data that was saved: {'; '.join(changed)}; nothing was changed")
        if len(places) > 1:
            raise UsageError(
                f"the ranks had been given different numbers of batches ({sorted(places)}): all take one for every step"
            )
        ((self.epoch, self._from),) = places
        self._batches = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, unless the loader is in it already."""
        if epoch != self.epoch:
            self.epoch, self._from, self._batches = epoch, 0, 0

    def _position(self) -> int:
        return min(self._from + self._batches * self.batch_size * self._world, self._order.size)

    def _rounds(self, start: int) -> int:
        """Batches that each rank is given of what comes after `start`."""
        left, round_ = self._order.size - start, self.batch_size * self._world
        return left // round_ if self.drop_last else -(-left // round_)

    def _mine(self) -> list[int]:
        """Numbers of this rank's samples, each with its epoch, from the position on."""
        order, size = self._order.of(self.epoch), self._order.size
        rest = order[self._from :]
        if self.drop_last:
            rest = rest[: len(rest) - len(rest) % (self.batch_size * self._world)]
        elif missing := -len(rest) % self._world:
            rest = torch.cat([rest, order.repeat(-(-missing // max(1, size)))[:missing]])
        return (rest[self._rank :: self._world] + self.epoch * size).tolist()


class _Order:
    """The order of an epoch: of the seed and its number alone."""

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self.size, self._shuffle, self._seed = size, shuffle, seed

    def of(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.size)
        return torch.from_numpy(np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self.size))

    def facts(self) -> dict[str, int]:
        return {"samples": self.size, "shuffled": int(self._shuffle), "seed": self._seed}


class _Numbers(Sampler[int]):
    """Asked by the loader once an iteration. Each number is epoch * size + sample, so that workers know the epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[int]:
        return iter(self._loader._mine())

    def __len__(self) -> int:
        return len(self._loader._mine())


class _Plain(Dataset[Any]):
    """The dataset, asked by numbers of `_Numbers`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number % len(self.dataset)]

    def __getitems__(self, numbers: list[int]) -> Any:
        indexes = [number % len(self.dataset) for number in numbers]
        several = getattr(self.dataset, "__getitems__", None)
        return several(indexes) if several is not None else [self.dataset[index] for index in indexes]


class _Seeded(Dataset[Any]):
    """The same, and the random numbers that a sample is made with depend on the sample and the epoch alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __getitem__(self, number: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return self._make(number)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return self._make(number)
        finally:  # in the trainer itself: its streams are not ours
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def _make(self, number: int) -> Any:
        first, second = np.random.SeedSequence([self._seed, number]).generate_state(2).tolist()
        random.seed(first)
        np.random.seed(second)
        torch.default_generator.manual_seed(first << 31 ^ second)  # the processor's alone
        return self.dataset[number % len(self.dataset)]


def _check(dataset: Any, batch_size: object, options: dict[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            "ckpt.Loader needs a dataset with a length whose samples have numbers; for a stream use torchdata's "
            "StatefulDataLoader itself, which goes on with the same number of ranks"
        )
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(f"batch_size is a number of samples, not {batch_size!r}")
    for name in OURS:
        if options.get(name) is not None:
            raise UsageError(f"ckpt.Loader decides itself about {name!r}: leave it out")


def _who() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
