"""The table of a checkpoint: which shards there are and where the blobs of each lie.

Kept as columns in a safetensors file, so that millions of rows load at once and any safetensors tool can look at them.
In memory it stays columns too: a `Shard` is made of a row only when somebody asks for it.

    names, name_ends          UTF-8 text of all names joined, and where each ends
    dtypes                    one byte a shard: its place in `DTYPES`
    ranks                     the rank that wrote the shard
    instances                 whose tensor of that name it belongs to, -1: one that all ranks hold together
    dims, dim_ends            global shape, offsets and sizes of a shard, one after the other, and where each shard ends
    blob_ends                 shard i owns blobs blob_ends[i-1] .. blob_ends[i]
    pack, offset, stored      which file, where in it (bytes from its start), bytes stored
    length, codec, base       plain bytes, codec (0: raw, see `ckpt.format.codec`), base blob (-1: none)
    digest                    16 bytes a blob, of the plain bytes
    stored_digest             16 bytes of each blob that is not raw, of the bytes stored; left out if all are
    packs                     JSON list of pack keys, those of older attempts too

Behind the blobs of the shards come *bases*: whole blobs of older checkpoints, against which deltas were taken. So a
table says all that is needed to read what it lists, a delta is never taken against a delta, and nothing can go round in
circles: what a delta is based on belongs to no shard, and what is derived is based on what is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from ckpt.errors import CorruptError, FormatError
from ckpt.format.boxes import Box
from ckpt.format.codec import BF16, CODECS, RAW
from ckpt.format.digest import DIGEST_SIZE
from ckpt.format.layout import BITS, MAX_DIMS
from ckpt.format.manifest import MAX_WORLD, owner

DTYPES = (
    "F64", "I64", "U64", "C64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "BOOL", "C128", "C32", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4_E2M1X2",
)  # fmt: skip
MAX_TABLE = 1 << 30
MAX_TABLE_HEADER = 1 << 16  # of fifteen columns
MAX_BLOB = 64 << 20  # bytes read at once; we cut at 4 MiB
MAX_MASTERS = 8  # blobs that one may be derived from; as we cut there are two
MAX_DIM = 2**62
FEW_NAMES = 1 << 20  # bytes of names that are worth remembering: ranks of one stage have the same

ITEM_SIZES = np.array([BITS[dtype] // 8 for dtype in DTYPES], np.int64)

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangular piece of one global tensor."""

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


class Shards(Sequence[Shard]):
    """Many shards as columns: `dims[dim_starts[i] : dim_starts[i + 1]]` are global shape, offsets and sizes of shard i.

    `dtype` counts in `DTYPES`. Equal to any sequence of the same shards.
    """

    __slots__ = ("dim_starts", "dims", "dtype", "instance", "names", "rank")

    def __init__(
        self, names: tuple[str, ...], dtype: I64, rank: I64, instance: I64, dims: I64, dim_starts: I64
    ) -> None:
        self.names, self.dtype, self.rank, self.instance = names, dtype, rank, instance
        self.dims, self.dim_starts = dims, dim_starts

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> Shards:
        rows = list(shards)
        dims = [(*s.global_shape, *s.offsets, *s.sizes) for s in rows]
        return cls(
            tuple(s.name for s in rows),
            np.array([DTYPES.index(s.dtype) for s in rows], np.int64),
            np.array([s.rank for s in rows], np.int64),
            np.array([s.instance for s in rows], np.int64),
            np.array(list(chain.from_iterable(dims)), np.int64),
            _starts(dims),
        )

    @classmethod
    def join(cls, parts: Sequence[Shards]) -> Shards:
        counts = np.cumsum([0, *(len(part.dims) for part in parts)])
        starts = [part.dim_starts[1:] + counts[i] for i, part in enumerate(parts)]
        zero = np.zeros(0, np.int64)
        return cls(
            tuple(chain.from_iterable(part.names for part in parts)),
            np.concatenate([zero, *(part.dtype for part in parts)]),
            np.concatenate([zero, *(part.rank for part in parts)]),
            np.concatenate([zero, *(part.instance for part in parts)]),
            np.concatenate([zero, *(part.dims for part in parts)]),
            np.concatenate([np.zeros(1, np.int64), *starts]),
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, at: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        i = range(len(self))[at]
        row = self.dims[self.dim_starts[i] : self.dim_starts[i + 1]].tolist()
        return _shard(self.names[i], int(self.dtype[i]), row, int(self.rank[i]), int(self.instance[i]))

    def __iter__(self) -> Iterator[Shard]:
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
        return f"Shards({list(self)!r})"

    @property
    def item_sizes(self) -> I64:
        """Bytes of an element of each."""
        return ITEM_SIZES[self.dtype]

    def by_dims(self) -> Iterator[tuple[int, I64, I64]]:
        """(dimensions, shards of so many, their rows of `dims`), for each number of dimensions that there is."""
        count = np.diff(self.dim_starts)
        for length in np.unique(count).tolist():
            rows = np.flatnonzero(count == length)
            yield length // 3, rows, self.dims[self.dim_starts[rows][:, None] + np.arange(length)]

    def nbytes(self) -> I64:
        """Of each, -1 where it is beyond all measure."""
        found = np.zeros(len(self), np.int64)
        for k, rows, dims in self.by_dims():
            found[rows] = volume(dims[:, 2 * k :], self.item_sizes[rows])
        return found


def volume(sizes: I64, item: I64) -> I64:
    """Bytes of boxes of these sizes, one a row, with items of so many bytes; -1 where it is beyond all measure."""
    empty = (sizes == 0).any(1)
    with np.errstate(over="ignore", invalid="ignore"):
        sane = sizes.prod(1, dtype=np.float64) * item < MAX_DIM
        exact = sizes.prod(1, dtype=np.int64) * item
    found: I64 = np.where(empty, 0, np.where(sane, exact, -1))
    return found


def _shard(name: str, dtype: int, row: list[int], rank: int, instance: int) -> Shard:
    k = len(row) // 3
    return Shard(name, DTYPES[dtype], tuple(row[:k]), tuple(row[k : 2 * k]), tuple(row[2 * k :]), rank, instance)


@dataclass(frozen=True)
class Table:
    """`shards[i]` owns blobs `starts[i]` to `starts[i + 1]` of the columns; from `starts[-1]` on they are bases.

    `stored_digest` is given for every blob, that of a raw one is its `digest`.
    """

    shards: Sequence[Shard]
    starts: I64
    pack: I64
    offset: I64
    stored: I64
    length: I64
    codec: I64
    base: I64
    digest: Bytes
    stored_digest: Bytes
    packs: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.shards, Shards):
            object.__setattr__(self, "shards", Shards.of(self.shards))

    @property
    def columns(self) -> Shards:
        """The shards, as what they are kept as."""
        assert isinstance(self.shards, Shards)
        return self.shards

    @property
    def owned(self) -> int:
        """How many blobs belong to shards: the others are bases."""
        return int(self.starts[-1])

    def needed(self, blob: int) -> range:
        """The blobs without which one cannot be decoded."""
        base = int(self.base[blob])
        if base < 0:
            return range(0)
        if int(self.codec[blob]) != BF16:
            return range(base, base + 1)
        stop, left = base, 2 * int(self.length[blob])
        while left > 0:
            left -= int(self.length[stop])
            stop += 1
        return range(base, stop)

    def blobs(self, shard: int) -> range:
        return range(int(self.starts[shard]), int(self.starts[shard + 1]))

    def to_bytes(self) -> bytes:
        shards, names = self.columns, [name.encode() for name in self.columns.names]
        columns: dict[str, npt.NDArray[Any]] = {
            "names": np.frombuffer(b"".join(names), np.uint8),
            "name_ends": _starts(names)[1:],
            "dtypes": shards.dtype.astype(np.uint8),
            "ranks": shards.rank.astype(np.int32),
            "instances": shards.instance.astype(np.int32),
            "dims": shards.dims,
            "dim_ends": shards.dim_starts[1:],
            "blob_ends": self.starts[1:],
            "pack": self.pack.astype(np.int32),
            "offset": self.offset,
            "stored": self.stored,
            "length": self.length,
            "codec": self.codec.astype(np.uint8),
            "base": self.base,
            "digest": self.digest,
            "packs": np.frombuffer(json.dumps(self.packs).encode(), np.uint8),
        }
        if self.codec.any():
            columns["stored_digest"] = self.stored_digest[self.codec != RAW]
        return bytes(safetensors.numpy.save(columns))

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, what: str) -> Table:
        """Checked: every number is plausible and consistent before anything is allocated by it."""
        if len(raw) > MAX_TABLE:
            raise CorruptError(f"{what} is implausibly large: {len(raw)} bytes")
        if int.from_bytes(raw[:8], "little") > MAX_TABLE_HEADER:
            raise CorruptError(f"{what} is not a table: its header is implausibly large")
        try:
            return _checked(safetensors.numpy.load(bytes(raw)), what)
        except (
            safetensors.SafetensorError,
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            OverflowError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CorruptError(f"{what} is damaged: {error}") from None


def merge(tables: Sequence[Table]) -> Table:
    """One table of all ranks' tables: all their shards' blobs, then all their bases."""
    if len(tables) < 2:
        return tables[0] if tables else EMPTY
    packs = tuple(dict.fromkeys(key for t in tables for key in t.packs))
    place = {key: i for i, key in enumerate(packs)}
    owned = np.cumsum([0, *(t.owned for t in tables)])
    bases = owned[-1] + np.cumsum([0, *(len(t.length) - t.owned for t in tables)])
    columns: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in _COLUMNS}
    for i, t in enumerate(tables):
        base = np.where(t.base >= t.owned, t.base - t.owned + bases[i], t.base + owned[i])
        renumbered = {
            "pack": np.array([place[key] for key in t.packs], np.int64)[t.pack],
            "base": np.where(t.base < 0, -1, base),
        }
        for name, (first, last) in columns.items():
            column = renumbered.get(name, getattr(t, name))
            first.append(column[: t.owned])
            last.append(column[t.owned :])
    return Table(
        shards=Shards.join([t.columns for t in tables]),
        starts=np.concatenate([np.zeros(1, np.int64), *(t.starts[1:] + owned[i] for i, t in enumerate(tables))]),
        packs=packs,
        **{name: np.concatenate([*first, *last]) for name, (first, last) in columns.items()},
    )


_COLUMNS = ("pack", "offset", "stored", "length", "codec", "base", "digest", "stored_digest")


def _starts(rows: Sequence[Sequence[object]]) -> I64:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def texts(text: bytes, ends: I64) -> tuple[str, ...]:
    """Names out of one text. ValueError if it is not UTF-8."""
    return (_remembered if len(text) <= FEW_NAMES else _texts)(text, ends.tobytes())


def _texts(text: bytes, ends: bytes) -> tuple[str, ...]:
    stops = np.frombuffer(ends, np.int64).tolist()
    return tuple(text[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False))


_remembered = lru_cache(16)(_texts)


def _checked(columns: dict[str, npt.NDArray[np.generic]], what: str) -> Table:
    def numbers(name: str, count: int, low: int = 0, high: int = 2**62) -> I64:
        column = columns[name].astype(np.int64, casting="safe")
        if column.shape != (count,) or (count and (column.min() < low or column.max() > high)):
            raise CorruptError(f"{what}: column {name} is out of range")
        return column

    def starts(name: str, count: int, total: int) -> I64:
        column = numbers(name, count, 0, total)
        if (np.diff(column) < 0).any() or (int(column[-1]) if count else 0) != total:
            raise CorruptError(f"{what}: column {name} does not add up")
        return np.concatenate([np.zeros(1, np.int64), column])

    def digests(name: str, count: int) -> Bytes:
        column = columns[name]
        if column.dtype != np.uint8 or column.shape != (count, DIGEST_SIZE):
            raise CorruptError(f"{what}: column {name} is out of range")
        return column.astype(np.uint8)

    shards, blobs = columns["dtypes"].size, columns["length"].size
    packs = json.loads(columns["packs"].tobytes())
    if type(packs) is not list or not all(type(k) is str and owner(k) and k.startswith("packs/") for k in packs):
        raise CorruptError(f"{what}: names impossible packs")
    text, dims = columns["names"].tobytes(), columns["dims"].astype(np.int64, casting="safe")
    name_starts, dim_starts = starts("name_ends", shards, len(text)), starts("dim_ends", shards, dims.size)
    owned = int(numbers("blob_ends", shards, 0, blobs)[-1]) if shards else 0  # what follows are bases
    rows = Shards(
        texts(text, name_starts[1:]),
        numbers("dtypes", shards, 0, len(DTYPES) - 1),
        numbers("ranks", shards, 0, MAX_WORLD),
        numbers("instances", shards, -1, MAX_WORLD),
        dims,
        dim_starts,
    )
    check_shards(rows, what)
    codec, digest = numbers("codec", blobs, RAW, 255), digests("digest", blobs)
    if unknown := sorted(set(np.unique(codec).tolist()) - CODECS.keys()):
        raise FormatError(
            f"{what} uses codec {unknown[0]}, which this version does not know: upgrade with `pip install -U everystep`"
        )
    stored_digest = digest.copy()
    if codec.any() or "stored_digest" in columns:
        stored_digest[codec != RAW] = digests("stored_digest", int(np.count_nonzero(codec)))
    table = Table(
        shards=rows,
        starts=starts("blob_ends", shards, owned),
        pack=numbers("pack", blobs, 0, len(packs) - 1),
        offset=numbers("offset", blobs),
        stored=numbers("stored", blobs, 0, MAX_BLOB),
        length=numbers("length", blobs, 0, MAX_BLOB),
        codec=codec,
        base=numbers("base", blobs, -1, blobs - 1),
        digest=digest,
        stored_digest=stored_digest,
        packs=tuple(packs),
    )
    _check_sums(table, what)
    _check_forms(table, what)
    return table


def check_shards(shards: Shards, what: str) -> None:
    """Every shard is a box inside its tensor."""
    lengths = np.diff(shards.dim_starts)
    odd = (lengths % 3 != 0) | (lengths > 3 * MAX_DIMS)
    impossible = np.flatnonzero((shards.dims < 0) | (shards.dims >= MAX_DIM))[:1]
    odd[np.searchsorted(shards.dim_starts, impossible, "right") - 1] = True
    if odd.any():
        raise CorruptError(f"{what}: impossible shape of shard {int(np.argmax(odd))}")
    for k, rows, dims in shards.by_dims():
        outside = (dims[:, k : 2 * k] + dims[:, 2 * k :] > dims[:, :k]).any(1)
        if outside.any():
            i = int(rows[np.argmax(outside)])
            raise CorruptError(f"{what}: shard {i}, of {shards.names[i]}, lies outside its tensor")


def _check_sums(table: Table, what: str) -> None:
    """The blobs of a shard hold exactly its bytes, and each a whole number of elements."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(table.length)])
    held = sums[table.starts[1:]] - sums[table.starts[:-1]]
    wrong = np.flatnonzero(held != table.columns.nbytes())
    if wrong.size:
        name = table.columns.names[int(wrong[0])]
        raise CorruptError(f"{what}: the blobs of {name} do not add up to its size")
    if (table.length[: table.owned] % np.repeat(table.columns.item_sizes, np.diff(table.starts))).any():
        raise CorruptError(f"{what}: a blob ends within an element")


def _check_forms(table: Table, what: str) -> None:
    """Every blob is based on what its codec can use, at a bounded depth, and stored in no more than its size."""
    raw = table.codec == RAW
    if (table.stored != table.length)[raw].any():
        raise CorruptError(f"{what}: a raw blob is stored at another length")
    if (table.stored > table.length).any():
        raise CorruptError(f"{what}: a blob takes more room than its plain bytes")
    if raw.all() and (table.base < 0).all():
        return
    kind = np.array([_BASES.index(CODECS[n].base) if n in CODECS else 0 for n in range(256)])[table.codec]
    alone, delta, derived = (np.flatnonzero(kind == i) for i in range(3))
    base = table.base
    if (base[alone] >= 0).any():
        raise CorruptError(f"{what}: a blob has a base that it cannot use")
    if (kind[table.owned :] != 0).any():
        raise CorruptError(f"{what}: a base needs a base itself")
    if (base[delta] < table.owned).any() or (table.length[base[delta]] != table.length[delta]).any():
        raise CorruptError(f"{what}: a delta against what cannot be its base")
    if (base[derived] < 0).any() or (base[derived] >= table.owned).any() or table.stored[derived].any():
        raise CorruptError(f"{what}: something is derived from nothing")
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(table.length)])
    stop = np.searchsorted(sums, sums[base[derived]] + 2 * table.length[derived], "left")
    shard = np.searchsorted(table.starts, base[derived], "right") - 1
    ends = sums[np.minimum(stop, len(sums) - 1)] - sums[base[derived]] == 2 * table.length[derived]
    inside = stop <= table.starts[np.minimum(shard + 1, len(table.shards))]
    fp32 = (table.columns.dtype == DTYPES.index("F32"))[shard]
    through = np.concatenate([np.zeros(1, np.int64), np.cumsum(kind == 2)])
    plain = through[np.minimum(stop, len(kind))] == through[base[derived]]
    few = stop - base[derived] <= MAX_MASTERS  # or reading could take the square of what the table holds
    if not (ends & inside & fp32 & plain & few).all():
        raise CorruptError(f"{what}: something is derived from what cannot be its master")


_BASES = ("none", "same", "master")
_NONE, _NO_DIGESTS = np.zeros(0, np.int64), np.zeros((0, DIGEST_SIZE), np.uint8)
EMPTY = Table(
    Shards.of(()), np.zeros(1, np.int64), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NO_DIGESTS, _NO_DIGESTS, ()
)
