"""`ckpt.Loader`: a data loader that continues at its position on any number of ranks, without repeating or skipping
samples.

    loader = ckpt.Loader(dataset, batch_size=8, seed=0, num_workers=4)
    state = {"model": model, "optim": optim, "loader": loader, "rng": ckpt.RNG()}
    ...
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

A loader that counts batches per rank cannot continue with another number of ranks. `Loader` has one position for the
whole job. The order of the dataset in an epoch depends only on the seed and the number of the epoch. From the position
on, rank r of w takes every w-th sample. So the position after a step is the same on every rank, and the rest of the
epoch can be divided among any number of ranks.

Samples must not depend on the number of ranks either. If the dataset draws random numbers (augmentation), they come
from streams seeded with the epoch and the number of the sample, no matter which worker makes the sample. The loader
never draws from the global generators, whose state belongs to the training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ckpt.errors import CorruptError, InvalidArgumentError, UsageError

OURS = ("sampler", "batch_sampler", "generator", "shuffle")


class Loader:
    """A DataLoader over a map-style dataset, for the state of a Checkpointer. Iterating it yields the rest of an epoch.

    - `batch_size`: samples per batch on one rank, default 1.
    - `shuffle`, `seed`: order of the samples in an epoch, default True and 0.
    - `drop_last`: False (default) ends an epoch like torch's DistributedSampler: the last ranks may repeat samples from
      the beginning, so that all ranks yield equally many. True drops the last, incomplete round of batches.
    - `rank`, `world`: rank and number of ranks, default those of torch.distributed.
    - `seed_samples`: False saves about 0.1 ms per sample if the dataset draws no random numbers. Default True.
    - `make`: function that creates the inner loader, for example torchdata's StatefulDataLoader. Default DataLoader.
    - `options`: further keyword arguments for `make`.

    `epoch` is the epoch of the next iteration, which continues at the position where the last iteration was left.
    Raises UsageError for a dataset that cannot be continued, for example an IterableDataset.
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
            raise InvalidArgumentError("pass both rank and world, or neither")
        self._asked = rank is None
        self._rank, self._world = (rank, world) if rank is not None and world is not None else _who()
        if not 0 <= self._rank < self._world:
            raise InvalidArgumentError(
                f"rank={self._rank} with world={self._world}: rank must be between 0 and world - 1"
            )
        self._order = _Order(len(dataset), shuffle, seed)  # type: ignore[arg-type]
        self.batch_size, self.drop_last = batch_size, drop_last
        self.epoch = 0
        self._from = 0  # samples of the epoch that all ranks consumed before the current division
        self._batches = 0  # batches that this rank yielded since the current division
        self._sampler = _Numbers(self)
        inner = _Seeded(dataset, seed) if seed_samples else _Plain(dataset)
        generator = torch.Generator()  # without it, every iteration would draw from the global generator
        self._loader = make(
            inner, batch_size=batch_size, sampler=self._sampler, drop_last=False, generator=generator, **options
        )

    def __iter__(self) -> Iterator[Any]:
        if self._asked and (now := _who()) != (self._rank, self._world):
            raise UsageError(
                f"this loader was created as rank {self._rank} of {self._world}, but this is now rank {now[0]} of "
                f"{now[1]}: create it after torch.distributed.init_process_group(), or every rank would see all samples"
            )
        if self._batches:  # iteration stopped early, or the state was restored, so divide the remaining samples
            self._from, self._batches = self._position(), 0
        epoch = self.epoch
        for batch in self._loader:
            if self.epoch != epoch:
                raise UsageError("the position of this loader was changed during the iteration: begin a new one")
            self._batches += 1
            yield batch
        self.epoch, self._from, self._batches = epoch + 1, 0, 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch on this rank."""
        return self._rounds(0)

    @property
    def remaining(self) -> int:
        """Return the number of batches in the next iteration on this rank."""
        return self._rounds(self._position())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the whole job after the last batch that was yielded. Batches that workers have only
        prefetched do not count."""
        return {"epoch": self.epoch, "position": self._position(), "order": self._order.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_state_dicts([state], self._rank, self._world)

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Continue at the position in `states`, which any number of ranks may have saved."""
        try:
            positions = {(int(state["epoch"]), int(state["position"])) for state in states}
            orders = [dict(state["order"]) for state in states]
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CorruptError(f"not the state of a ckpt.Loader: {error!r}") from error
        if any(epoch < 0 or position < 0 for epoch, position in positions):
            raise CorruptError(f"not positions that a ckpt.Loader can have been at: {sorted(positions)}")
        if any(order != self._order.facts() for order in orders):
            changed = [
                f"{k} was {orders[0].get(k)}, is {v}" for k, v in self._order.facts().items() if orders[0].get(k) != v
            ]
            raise UsageError(
                f"the dataset or its order differs from the saved one: {'; '.join(changed)}; nothing was changed"
            )
        if len(positions) > 1:
            raise UsageError(
                f"the ranks had consumed different numbers of batches ({sorted(positions)}): take one batch per step "
                "on every rank"
            )
        ((self.epoch, self._from),) = positions
        self._batches = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch. Do nothing if the loader is in it already."""
        if epoch != self.epoch:
            self.epoch, self._from, self._batches = epoch, 0, 0

    def _position(self) -> int:
        return min(self._from + self._batches * self.batch_size * self._world, self._order.size)

    def _rounds(self, start: int) -> int:
        """Return the number of batches per rank after the position `start`."""
        left, round_ = self._order.size - start, self.batch_size * self._world
        return left // round_ if self.drop_last else -(-left // round_)

    def _mine(self) -> list[int]:
        """Return the numbers of this rank's samples after the position, as `_Numbers` defines them."""
        order, size = self._order.of(self.epoch), self._order.size
        rest = order[self._from :]
        if self.drop_last:
            rest = rest[: len(rest) - len(rest) % (self.batch_size * self._world)]
        elif missing := -len(rest) % self._world:
            rest = torch.cat([rest, order.repeat(-(-missing // max(1, size)))[:missing]])
        return (rest[self._rank :: self._world] + self.epoch * size).tolist()


class _Order:
    """The order of the samples in each epoch. It depends only on the seed and the number of the epoch."""

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self.size, self._shuffle, self._seed = size, shuffle, seed

    def of(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.size)
        return torch.from_numpy(np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self.size))

    def facts(self) -> dict[str, int]:
        return {"samples": self.size, "shuffled": int(self._shuffle), "seed": self._seed}


class _Numbers(Sampler[int]):
    """The sampler of a rank. It yields epoch * size + sample, so that workers can compute the epoch from the number."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[int]:
        return iter(self._loader._mine())

    def __len__(self) -> int:
        return len(self._loader._mine())


class _Plain(Dataset[Any]):
    """The dataset, indexed by the numbers that `_Numbers` yields."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number % len(self.dataset)]

    def __getitems__(self, numbers: list[int]) -> Any:
        indexes = [number % len(self.dataset) for number in numbers]
        several = getattr(self.dataset, "__getitems__", None)
        return several(indexes) if several is not None else [self.dataset[index] for index in indexes]


class _Seeded(Dataset[Any]):
    """Like `_Plain`, but seeds the random generators by the sample and the epoch before it creates each sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __getitem__(self, number: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return self._make(number)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return self._make(number)
        finally:  # without workers this is the trainer process, whose generators must stay unchanged
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def _make(self, number: int) -> Any:
        first, second = np.random.SeedSequence([self._seed, number]).generate_state(2).tolist()
        random.seed(first)
        np.random.seed(second)
        torch.default_generator.manual_seed(first << 31 ^ second)  # unlike torch.manual_seed(), seeds only the CPU
        return self.dataset[number % len(self.dataset)]


def _check(dataset: Any, batch_size: object, options: dict[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InvalidArgumentError(
            "ckpt.Loader needs a map-style dataset with a length; for a stream use torchdata's "
            "StatefulDataLoader, which continues on the same number of ranks"
        )
    if type(batch_size) is not int or batch_size < 1:
        raise InvalidArgumentError(f"batch_size={batch_size!r}: it must be a whole number of at least 1")
    for name in OURS:
        if options.get(name) is not None:
            raise InvalidArgumentError(f"ckpt.Loader sets {name!r} itself: remove this argument")


def _who() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
