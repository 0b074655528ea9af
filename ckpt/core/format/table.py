"""Chunk tables: the shards of one or more ranks, and where the chunks of each shard are stored.

A shard is a rectangular piece of a tensor. A large checkpoint has millions of shards, so they are stored as columns
(`SavedShards`). A `SavedShard` is created from a row only when it is needed. A manifest has the table of its rank as a
file of columns (`format.columns`):

    names, name_ends          UTF-8 text of all names joined, and where each ends
    dtypes                    one byte for each shard: its index in `DTYPES`
    ranks                     the rank that wrote the shard
    accelerated               1 if the rank had the shard on an accelerator
    instances                 the rank that owns the tensor of that name, -1: shared by all ranks
    dims, dim_ends            global shape, offsets and sizes of each shard in turn, and where each shard ends
    chunk_ends                shard i owns chunks chunk_ends[i-1] .. chunk_ends[i]
    file, offset, stored      number of the data file, offset in the file in bytes, bytes stored
    length, codec, base       plain bytes, codec (0: raw, see `ckpt.core.format.codec`), base chunk (-1: none)
    digest                    16 bytes for each chunk: the digest of its plain bytes
    stored_digest             16 bytes for each chunk that is not raw: the digest of its stored bytes
    files                     JSON list of the keys of data files, including those of older checkpoints

The chunks of the shards are followed by *bases*: chunks of older checkpoints that deltas depend on, stored whole. So a
reader needs no other table to read every shard in a table. The base of a delta is never a delta itself, and there are
no cycles, because a base belongs to no shard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ckpt.core.format.boxes import Box
from ckpt.core.format.codec import CODECS, DELTA, RAW
from ckpt.core.format.columns import I64, Bytes, ColumnFile, Columns, distinct, end_to_end, reading, spans, starts_of
from ckpt.core.format.digest import DIGEST_SIZE
from ckpt.core.format.layout import BITS, MAX_DIMS, Layout, TensorSpec
from ckpt.core.format.manifest import MAX_WORLD
from ckpt.errors import CorruptError, FormatError

if TYPE_CHECKING:
    import numpy.typing as npt


DTYPES = (
    "F64", "I64", "U64", "C64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "BOOL", "C128", "C32", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4_E2M1X2",
)  # fmt: skip
DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
MAX_DIM = 2**62
EXACT = 2**53  # a float represents a product below this limit exactly


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
    """Shards as columns: `dims[dim_starts[i] : dim_starts[i + 1]]` has the global shape, offsets and sizes of shard i.

    `dtype`: index in `DTYPES`. `accelerated`: 1 if the rank had the shard on an accelerator. An instance equals any
    sequence of the same shards.
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
        """Return the shards that a rank stages, in the order in which its data file has them."""
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
        """Return these shards with the smallest integer dtypes that fit."""
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
        """Return the spec of each shard, as in a layout."""
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
        """Yield for each number of dimensions k: k, the shards with k dimensions, their rows of `dims`."""
        count = np.diff(self.dim_starts)
        for length in np.flatnonzero(np.bincount(count)).tolist():
            same = count == length
            yield length // 3, np.flatnonzero(same), self.dims[np.repeat(same, count)].reshape(int(same.sum()), length)

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Return for each shard whether it is a complete tensor."""
        found = np.ones(len(self), np.bool_)
        for k, rows, dims in self.by_dims():
            found[rows] = (dims[:, k : 2 * k] == 0).all(1) & (dims[:, 2 * k :] == dims[:, :k]).all(1)
        return found


def volume(sizes: I64, item: I64) -> I64:
    """Return the bytes of each box from its sizes and its bytes per element, or -1 for a box that is too large."""
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
    """Check that every shard is a box inside its tensor. Return the bytes of each shard, -1 if too large."""
    lengths = np.diff(shards.dim_starts)
    odd = (lengths % 3 != 0) | (lengths > 3 * MAX_DIMS)
    impossible = np.flatnonzero(shards.dims.view(np.uint64) >= MAX_DIM)[:1]  # unsigned, so also negative values
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


# -- the chunk table --


MAX_TABLE = 1 << 30
MAX_TABLE_HEADER = 1 << 16  # bytes; enough for the eighteen entries of the header
COLUMNS = {
    "names": "uint8", "name_ends": "int64", "dtypes": "uint8", "accelerated": "uint8", "ranks": "int32",
    "instances": "int32", "dims": "int64", "dim_ends": "int64", "chunk_ends": "int64", "file": "int32",
    "offset": "int64", "stored": "int64", "length": "int64", "codec": "uint8", "base": "int64", "digest": "uint8",
    "stored_digest": "uint8", "files": "uint8",
}  # fmt: skip
FILE = ColumnFile(COLUMNS, MAX_TABLE, ("name_ends", "dtypes", "length"), ("files",), ("digest", "stored_digest"))
MAX_CHUNK = 64 << 20  # maximum bytes of a chunk that a reader accepts; our writer makes chunks of 4 MiB
Content = tuple[bytes, int]
"""The digest of a chunk's plain bytes, and their length."""
FEW_NAMES = 1 << 20  # maximum bytes of cached names; the ranks of a pipeline stage have the same names


@dataclass(frozen=True)
class Table:
    """The chunk table of one or more ranks. Shard i owns chunks `starts[i]` to `starts[i + 1]`; later chunks are bases.

    `stored_digest` has an entry for every chunk. For a raw chunk, this entry equals `digest`.
    """

    shards: Sequence[SavedShard]
    starts: I64
    file: I64
    offset: I64
    stored: I64
    length: I64
    codec: I64
    base: I64
    digest: Bytes
    stored_digest: Bytes
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.shards, SavedShards):
            object.__setattr__(self, "shards", SavedShards.of(self.shards))

    @property
    def columns(self) -> SavedShards:
        """Return the shards as columns."""
        assert isinstance(self.shards, SavedShards)
        return self.shards

    @property
    def owned(self) -> int:
        """Return the number of chunks that belong to shards. The others are bases."""
        return int(self.starts[-1])

    def chunks(self, shard: int) -> range:
        return range(int(self.starts[shard]), int(self.starts[shard + 1]))

    def place(self, chunk: int) -> tuple[str, int]:
        """Return the data file of a chunk, and the chunk's offset in the file."""
        return self.files[int(self.file[chunk])], int(self.offset[chunk])

    def content(self, chunk: int) -> Content:
        return self.digest[chunk].tobytes(), int(self.length[chunk])

    def users(self, chunk: int) -> list[int]:
        """Return a list with the shard that a chunk belongs to. For a base, return a shard with a delta against it."""
        rows = [chunk] if chunk < self.owned else np.flatnonzero(self.base[: self.owned] == chunk)[:1].tolist()
        return [int(np.searchsorted(self.starts, row, "right")) - 1 for row in rows]

    def name_of(self, chunk: int) -> str:
        """Return the name of the tensor that a chunk belongs to."""
        names = [self.columns.names[shard] for shard in self.users(chunk)] or ["nothing"]
        return names[0] if chunk < self.owned else f"the base of {names[0]}"

    def compact(self) -> Table:
        """Return a copy with only the columns that the index needs, in the smallest dtypes, without chunk locations."""
        none = np.broadcast_to(np.int64(0), (self.owned,))
        starts: Any = self.starts.astype(np.int32)
        digest = self.digest[: self.owned]
        return Table(self.columns.narrow(), starts, none, none, none, none, none, none, digest, digest, self.files)

    def to_bytes(self) -> bytes:
        shards, names = self.columns, [name.encode() for name in self.columns.names]
        columns: dict[str, npt.NDArray[Any]] = {
            "names": np.frombuffer(b"".join(names), np.uint8),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            "dtypes": shards.dtype.astype(np.uint8),
            "accelerated": shards.accelerated.astype(np.uint8),
            "ranks": shards.rank.astype(np.int32),
            "instances": shards.instance.astype(np.int32),
            "dims": shards.dims,
            "dim_ends": shards.dim_starts[1:],
            "chunk_ends": self.starts[1:],
            "file": self.file.astype(np.int32),
            "offset": self.offset,
            "stored": self.stored,
            "length": self.length,
            "codec": self.codec.astype(np.uint8),
            "base": self.base,
            "digest": self.digest,
            "stored_digest": self.stored_digest[self.codec != RAW],
            "files": np.frombuffer(json.dumps(self.files).encode(), np.uint8),
        }
        return FILE.to_bytes(columns)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, what: str) -> Table:
        """Read a table. Every number is checked before memory is allocated for it."""
        if len(raw) > MAX_TABLE:
            raise CorruptError(f"{what} is implausibly large: {len(raw)} bytes")
        if int.from_bytes(raw[:8], "little") > MAX_TABLE_HEADER:
            raise CorruptError(f"{what} is not a table: its header is implausibly large")
        with reading(what):
            return _checked(columns_of(raw, what), what)


def columns_of(raw: bytes | memoryview, what: str) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a table by name, as they are stored. Each digest is a row."""
    found = FILE.from_bytes(raw, what)
    return found | {name: found[name].reshape(-1, DIGEST_SIZE) for name in FILE.whole}


def merge(tables: Sequence[Table]) -> Table:
    """Join tables of several ranks: first the chunks of every shard, then all bases."""
    if len(tables) < 2:
        return tables[0] if tables else empty()
    files = tuple(dict.fromkeys(key for t in tables for key in t.files))
    place = {key: i for i, key in enumerate(files)}
    owned = np.cumsum([0, *(t.owned for t in tables)])
    bases = owned[-1] + np.cumsum([0, *(len(t.length) - t.owned for t in tables)])
    columns: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in _COLUMNS}
    for i, t in enumerate(tables):
        base = np.where(t.base >= t.owned, t.base - t.owned + bases[i], t.base + owned[i])
        renumbered = {
            "file": np.array([place[key] for key in t.files], np.int64)[t.file],
            "base": np.where(t.base < 0, -1, base),
        }
        for name, (first, last) in columns.items():
            column = renumbered.get(name, getattr(t, name))
            first.append(column[: t.owned])
            last.append(column[t.owned :])
    return Table(
        shards=SavedShards.join([t.columns for t in tables]),
        starts=end_to_end([[0], *(t.starts[1:] + owned[i] for i, t in enumerate(tables))]),
        files=files,
        **{name: np.concatenate([*first, *last]) for name, (first, last) in columns.items()},
    )


_COLUMNS = ("file", "offset", "stored", "length", "codec", "base", "digest", "stored_digest")


def texts(text: bytes, ends: I64) -> tuple[str, ...]:
    """Split a UTF-8 text into names that end at `ends`. Raise ValueError if it is not UTF-8."""
    return (_remembered if len(text) <= FEW_NAMES else _texts)(text, ends.tobytes())


def _texts(text: bytes, ends: bytes) -> tuple[str, ...]:
    stops = np.frombuffer(ends, np.int64).tolist()
    return tuple(text[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False))


_remembered = lru_cache(16)(_texts)


def _checked(raw: dict[str, npt.NDArray[Any]], what: str) -> Table:
    columns = Columns(raw, what)
    shards, chunks, files = raw["dtypes"].size, raw["length"].size, columns.files()
    text, dims = raw["names"].tobytes(), raw["dims"].astype(np.int64, casting="safe")
    owned = int(columns.numbers("chunk_ends", shards, 0, chunks)[-1]) if shards else 0  # the other chunks are bases
    rows = SavedShards(
        texts(text, columns.ends("name_ends", shards, len(text))),
        columns.numbers("dtypes", shards, 0, len(DTYPES) - 1),
        columns.numbers("ranks", shards, 0, MAX_WORLD),
        columns.numbers("instances", shards, -1, MAX_WORLD),
        dims,
        starts_of(columns.ends("dim_ends", shards, dims.size)),
        columns.numbers("accelerated", shards, 0, 1),
    )
    sizes = check_shards(rows, what)
    codec, digest = columns.numbers("codec", chunks, RAW, 255), columns.digests("digest", chunks)
    if codec.any() and (unknown := sorted(set(distinct(codec).tolist()) - CODECS.keys())):
        raise FormatError(
            f"{what} uses codec {unknown[0]}, which this version does not know: upgrade with `pip install -U everystep`"
        )
    stored_digest = digest.copy()
    stored_digest[codec != RAW] = columns.digests("stored_digest", int(np.count_nonzero(codec)))
    table = Table(
        shards=rows,
        starts=starts_of(columns.ends("chunk_ends", shards, owned)),
        file=columns.numbers("file", chunks, 0, len(files) - 1),
        offset=columns.numbers("offset", chunks),
        stored=columns.numbers("stored", chunks, 0, MAX_CHUNK),
        length=columns.numbers("length", chunks, 0, MAX_CHUNK),
        codec=codec,
        base=columns.numbers("base", chunks, -1, chunks - 1),
        digest=digest,
        stored_digest=stored_digest,
        files=files,
    )
    _check_sums(table, sizes, what)
    _check_forms(table, what)
    return table


def _check_sums(table: Table, sizes: I64, what: str) -> None:
    """Raise CorruptError unless the chunks of each shard have exactly its bytes (`sizes`), in whole elements."""
    sums = starts_of(np.cumsum(table.length))
    held = sums[table.starts[1:]] - sums[table.starts[:-1]]
    wrong = np.flatnonzero(held != sizes)
    if wrong.size:
        name = table.columns.names[int(wrong[0])]
        raise CorruptError(f"{what}: the chunks of {name} do not add up to its size")
    if (table.length[: table.owned] % np.repeat(table.columns.item_sizes, np.diff(table.starts))).any():
        raise CorruptError(f"{what}: a chunk ends within an element")


def _check_forms(table: Table, what: str) -> None:
    """Raise CorruptError if a chunk has an impossible base or stored size."""
    raw, delta = table.codec == RAW, table.codec == DELTA
    if (table.stored != table.length)[raw].any():
        raise CorruptError(f"{what}: the stored and the plain length of a raw chunk differ")
    if (table.stored > table.length).any():
        raise CorruptError(f"{what}: a chunk takes more room than its plain bytes")
    if (table.base[~delta] >= 0).any():
        raise CorruptError(f"{what}: a chunk has an impossible base")
    if delta[table.owned :].any():
        raise CorruptError(f"{what}: a base has a base itself")
    base = table.base[delta]
    if (base < table.owned).any() or (table.length[base] != table.length[delta]).any():
        raise CorruptError(f"{what}: a delta has an impossible base")


@cache
def empty() -> Table:
    """Return a table without shards."""
    none, digests = end_to_end(()), np.zeros((0, DIGEST_SIZE), np.uint8)
    return Table(SavedShards.of(()), starts_of(none), none, none, none, none, none, none, digests, digests, ())
