"""Saved shards: rectangular pieces of tensors. A large checkpoint has millions, so they are stored as columns. A
`SavedShard` is created from a row only when it is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, overload

import numpy as np

from ckpt.core.format.boxes import Box
from ckpt.core.format.columns import I64, end_to_end, spans, starts_of
from ckpt.core.format.layout import BITS, MAX_DIMS, Layout, TensorSpec
from ckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy.typing as npt

DTYPES = (
    "F64", "I64", "U64", "C64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "BOOL", "C128", "C32", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4_E2M1X2",
)  # fmt: skip
DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
MAX_DIM = 2**62
EXACT = 2**53  # below this, a float represents a product exactly


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A rectangular piece of a global tensor."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int = 0
    instance: int = -1

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * BITS[self.dtype] // 8


class SavedShards(Sequence[SavedShard]):
    """Many shards as columns: `dims[dim_starts[i] : dim_starts[i + 1]]` are global shape, offsets and sizes of shard i.

    `dtype`: index in `DTYPES`. `accelerated` is 1 if the rank had it on an accelerator. Equal to any sequence of the
    same shards.
    """

    __slots__ = ("accelerated", "dim_starts", "dims", "dtype", "instance", "names", "rank")

    def __init__(
        self,
        names: tuple[str, ...],
        dtype: I64,
        rank: I64,
        instance: I64,
        dims: I64,
        dim_starts: I64,
        accelerated: I64 | None = None,
    ) -> None:
        self.names, self.dtype, self.rank, self.instance = names, dtype, rank, instance
        self.dims, self.dim_starts = dims, dim_starts
        self.accelerated = np.zeros(len(dtype), np.int64) if accelerated is None else accelerated

    @classmethod
    def of(cls, shards: Iterable[SavedShard]) -> SavedShards:
        rows = list(shards)
        dims = [(*s.global_shape, *s.offsets, *s.sizes) for s in rows]
        ranks = np.array([s.rank for s in rows], np.int64)
        return cls._of_rows([s.name for s in rows], [s.dtype for s in rows], ranks, [s.instance for s in rows], dims)

    @classmethod
    def of_layout(cls, layout: Layout) -> SavedShards:
        """Return the shards that a rank stages, in the order of its data file."""
        found = layout.made_of_it.get(cls)
        if found is None:
            rows = [layout.tensors[i] for i in layout.arrangement.order]
            dims = [(*t.full, *t.at, *t.shape) for t in rows]
            names, instances = [t.name for t in rows], [t.instance for t in rows]
            ranks = np.full(len(rows), layout.rank)
            found = cls._of_rows(names, [t.dtype for t in rows], ranks, instances, dims)
            found.accelerated = np.array([t.accelerator for t in rows], np.int64)
            layout.made_of_it[cls] = found
        assert isinstance(found, SavedShards)
        return found

    @classmethod
    def _of_rows(
        cls, names: list[str], dtypes: list[str], ranks: I64, instances: list[int], dims: list[tuple[int, ...]]
    ) -> SavedShards:
        return cls(
            tuple(names),
            np.array([DTYPE_NUMBER[dtype] for dtype in dtypes], np.int64),
            ranks,
            np.array(instances, np.int64),
            np.fromiter(chain.from_iterable(dims), np.int64),
            starts_of(np.cumsum(np.fromiter(map(len, dims), np.int64))),
        )

    @classmethod
    def join(cls, parts: Sequence[SavedShards]) -> SavedShards:
        counts = np.cumsum([0, *(len(part.dims) for part in parts)])
        starts = [part.dim_starts[1:] + counts[i] for i, part in enumerate(parts)]
        return cls(
            tuple(chain.from_iterable(part.names for part in parts)),
            end_to_end(part.dtype for part in parts),
            end_to_end(part.rank for part in parts),
            end_to_end(part.instance for part in parts),
            end_to_end(part.dims for part in parts),
            end_to_end([[0], *starts]),
            end_to_end(part.accelerated for part in parts),
        )

    def take(self, rows: I64) -> SavedShards:
        """Return some of the shards, without their names."""
        counts = self.dim_starts[rows + 1] - self.dim_starts[rows]
        return SavedShards(
            (),
            self.dtype[rows],
            self.rank[rows],
            self.instance[rows],
            self.dims[spans(self.dim_starts[rows], counts)],
            starts_of(np.cumsum(counts)),
            self.accelerated[rows],
        )

    def narrow(self) -> SavedShards:
        """Return the same in the narrowest numbers."""
        small = self.dims.max(initial=0) < 2**31
        return SavedShards(
            self.names,
            self.dtype.astype(np.uint8),
            self.rank.astype(np.int32),
            self.instance.astype(np.int32),
            self.dims.astype(np.int32) if small else self.dims,
            self.dim_starts.astype(np.int32),
            self.accelerated.astype(np.uint8),
        )

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return each shard as a layout lists it."""
        whole, on = self.whole.tolist(), self.accelerated.tolist()
        return tuple(
            TensorSpec(
                s.name,
                s.dtype,
                s.sizes,
                bool(on[i]),
                None if whole[i] else s.global_shape,
                () if whole[i] else s.offsets,
                s.instance,
            )
            for i, s in enumerate(self)
        )

    def same(self, other: SavedShards) -> bool:
        """Return True if all columns are equal."""
        columns = ("dtype", "rank", "instance", "dims", "dim_starts", "accelerated")
        return self.names == other.names and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in columns
        )

    def __len__(self) -> int:
        return len(self.dtype)

    @overload
    def __getitem__(self, at: int) -> SavedShard: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[SavedShard, ...]: ...
    def __getitem__(self, at: int | slice) -> SavedShard | tuple[SavedShard, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        i = range(len(self))[at]
        row = self.dims[self.dim_starts[i] : self.dim_starts[i + 1]].tolist()
        name = self.names[i] if self.names else ""
        return _shard(name, int(self.dtype[i]), row, int(self.rank[i]), int(self.instance[i]))

    def __iter__(self) -> Iterator[SavedShard]:
        dims, starts = self.dims.tolist(), self.dim_starts.tolist()
        rows = zip(self.names, self.dtype.tolist(), self.rank.tolist(), self.instance.tolist(), strict=True)
        for i, (name, dtype, rank, instance) in enumerate(rows):
            yield _shard(name, dtype, dims[starts[i] : starts[i + 1]], rank, instance)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SavedShards({list(self)!r})"

    @property
    def item_sizes(self) -> I64:
        """Return the bytes per element of each shard."""
        return np.array([BITS[dtype] // 8 for dtype in DTYPES], np.int64)[self.dtype]

    def by_dims(self) -> Iterator[tuple[int, I64, I64]]:
        """Yield (number of dimensions k, shards with k dimensions, their rows of `dims`) for each k that occurs."""
        count = np.diff(self.dim_starts)
        for length in np.flatnonzero(np.bincount(count)).tolist():
            same = count == length
            yield length // 3, np.flatnonzero(same), self.dims[np.repeat(same, count)].reshape(int(same.sum()), length)

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Return which of them are complete tensors."""
        found = np.ones(len(self), np.bool_)
        for k, rows, dims in self.by_dims():
            found[rows] = (dims[:, k : 2 * k] == 0).all(1) & (dims[:, 2 * k :] == dims[:, :k]).all(1)
        return found


def volume(sizes: I64, item: I64) -> I64:
    """Return the bytes of each box, given its sizes and item size. -1 if a result is too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        rough = sizes.prod(1, dtype=np.float64) * item
        if len(rough) and rough.max() < EXACT:
            certain: I64 = rough.astype(np.int64)
            return certain
        empty, sane = (sizes == 0).any(1), rough < MAX_DIM
        exact = sizes.prod(1, dtype=np.int64) * item
    found: I64 = np.where(empty, 0, np.where(sane, exact, -1))
    return found


def _shard(name: str, dtype: int, row: list[int], rank: int, instance: int) -> SavedShard:
    k = len(row) // 3
    return SavedShard(name, DTYPES[dtype], tuple(row[:k]), tuple(row[k : 2 * k]), tuple(row[2 * k :]), rank, instance)


def check_shards(shards: SavedShards, what: str) -> I64:
    """Check that every shard is a box inside its tensor. Return the bytes of each, -1 if that is too large."""
    lengths = np.diff(shards.dim_starts)
    odd = (lengths % 3 != 0) | (lengths > 3 * MAX_DIMS)
    impossible = np.flatnonzero(shards.dims.view(np.uint64) >= MAX_DIM)[:1]  # or negative
    odd[np.searchsorted(shards.dim_starts, impossible, "right") - 1] = True
    if odd.any():
        raise CorruptError(f"{what}: impossible shape of shard {int(np.argmax(odd))}")
    sizes = np.zeros(len(shards), np.int64)
    for k, rows, dims in shards.by_dims():
        outside = (dims[:, k : 2 * k] + dims[:, 2 * k :] > dims[:, :k]).any(1)
        if outside.any():
            i = int(rows[np.argmax(outside)])
            raise CorruptError(f"{what}: shard {i}, of {shards.names[i]}, is outside its tensor")
        sizes[rows] = volume(dims[:, 2 * k :], shards.item_sizes[rows])
    return sizes
