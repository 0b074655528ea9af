"""The chunk table of one or more ranks: its shards, and where the chunks of each shard are stored.

A manifest has the table of its rank as a file of columns (`format.columns`). In memory it is kept as columns too.

    names, name_ends          UTF-8 text of all names joined, and where each ends
    dtypes                    one byte for each shard: its index in `ckpt.core.format.shards.DTYPES`
    ranks                     the rank that wrote the shard
    accelerated               1 if the rank had it on an accelerator
    instances                 the rank that owns the tensor of that name, -1: shared by all ranks
    dims, dim_ends            global shape, offsets and sizes of each shard in turn, and where each shard ends
    blob_ends                 shard i owns chunks blob_ends[i-1] .. blob_ends[i]
    pack, offset, stored      number of the data file, offset in it in bytes, bytes stored
    length, codec, base       plain bytes, codec (0: raw, see `ckpt.core.format.codec`), base chunk (-1: none)
    digest                    16 bytes for each chunk, of its plain bytes
    stored_digest             16 bytes for each chunk that is not raw, of its stored bytes
    packs                     JSON list of the keys of data files, including those of older checkpoints

The chunks of the shards are followed by *bases*: chunks of older checkpoints that deltas depend on, stored whole. So a
table is enough to read everything that it lists. The base of a delta is never a delta itself, and there are no cycles,
because a base belongs to no shard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.core.format.codec import CODECS, DELTA, RAW
from ckpt.core.format.columns import I64, Bytes, ColumnFile, Columns, distinct, end_to_end, reading, starts_of
from ckpt.core.format.digest import DIGEST_SIZE
from ckpt.core.format.manifest import MAX_WORLD
from ckpt.core.format.shards import DTYPES, SavedShard, SavedShards, check_shards
from ckpt.errors import CorruptError, FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_TABLE = 1 << 30
MAX_TABLE_HEADER = 1 << 16  # for eighteen entries
COLUMNS = {
    "names": "uint8", "name_ends": "int64", "dtypes": "uint8", "accelerated": "uint8", "ranks": "int32",
    "instances": "int32", "dims": "int64", "dim_ends": "int64", "blob_ends": "int64", "pack": "int32",
    "offset": "int64", "stored": "int64", "length": "int64", "codec": "uint8", "base": "int64", "digest": "uint8",
    "stored_digest": "uint8", "packs": "uint8",
}  # fmt: skip
FILE = ColumnFile(COLUMNS, MAX_TABLE, ("name_ends", "dtypes", "length"), ("packs",), ("digest", "stored_digest"))
MAX_BLOB = 64 << 20  # maximum bytes of a chunk; the writer's are 4 MiB
Content = tuple[bytes, int]
"""The digest of plain bytes, and their length."""
FEW_NAMES = 1 << 20  # bytes of names that are cached, because ranks of one pipeline stage have the same names


@dataclass(frozen=True)
class Table:
    """Shard i owns the chunks `starts[i]` to `starts[i + 1]` of the columns. Chunks from `starts[-1]` on are bases.

    `stored_digest` has an entry for every chunk. For a raw chunk it equals `digest`.
    """

    shards: Sequence[SavedShard]
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

    def blobs(self, shard: int) -> range:
        return range(int(self.starts[shard]), int(self.starts[shard + 1]))

    def place(self, blob: int) -> tuple[str, int]:
        """Return the data file of a chunk, and its offset there."""
        return self.packs[int(self.pack[blob])], int(self.offset[blob])

    def content(self, blob: int) -> Content:
        return self.digest[blob].tobytes(), int(self.length[blob])

    def users(self, blob: int) -> list[int]:
        """Return the number of the shard that a chunk belongs to, or of one with a delta against it, as a list."""
        rows = [blob] if blob < self.owned else np.flatnonzero(self.base[: self.owned] == blob)[:1].tolist()
        return [int(np.searchsorted(self.starts, row, "right")) - 1 for row in rows]

    def name_of(self, blob: int) -> str:
        """Return the name of the tensor that a chunk belongs to."""
        names = [self.columns.names[shard] for shard in self.users(blob)] or ["nothing"]
        return names[0] if blob < self.owned else f"what {names[0]} is based on"

    def compact(self) -> Table:
        """Return a copy with only what the index needs, in the narrowest dtypes, without locations of chunks."""
        none = np.broadcast_to(np.int64(0), (self.owned,))
        starts: Any = self.starts.astype(np.int32)
        digest = self.digest[: self.owned]
        return Table(self.columns.narrow(), starts, none, none, none, none, none, none, digest, digest, self.packs)

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
            "blob_ends": self.starts[1:],
            "pack": self.pack.astype(np.int32),
            "offset": self.offset,
            "stored": self.stored,
            "length": self.length,
            "codec": self.codec.astype(np.uint8),
            "base": self.base,
            "digest": self.digest,
            "stored_digest": self.stored_digest[self.codec != RAW],
            "packs": np.frombuffer(json.dumps(self.packs).encode(), np.uint8),
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
    """Return the columns as they are stored. Digests have one row each."""
    found = FILE.from_bytes(raw, what)
    return found | {name: found[name].reshape(-1, DIGEST_SIZE) for name in FILE.whole}


def merge(tables: Sequence[Table]) -> Table:
    """Join tables of several ranks: the chunks of every shard, then all bases."""
    if len(tables) < 2:
        return tables[0] if tables else empty()
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
        shards=SavedShards.join([t.columns for t in tables]),
        starts=end_to_end([[0], *(t.starts[1:] + owned[i] for i, t in enumerate(tables))]),
        packs=packs,
        **{name: np.concatenate([*first, *last]) for name, (first, last) in columns.items()},
    )


_COLUMNS = ("pack", "offset", "stored", "length", "codec", "base", "digest", "stored_digest")


def texts(text: bytes, ends: I64) -> tuple[str, ...]:
    """Split a text into names at these ends. Raise ValueError if it is not UTF-8."""
    return (_remembered if len(text) <= FEW_NAMES else _texts)(text, ends.tobytes())


def _texts(text: bytes, ends: bytes) -> tuple[str, ...]:
    stops = np.frombuffer(ends, np.int64).tolist()
    return tuple(text[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False))


_remembered = lru_cache(16)(_texts)


def _checked(raw: dict[str, npt.NDArray[Any]], what: str) -> Table:
    columns = Columns(raw, what)
    shards, blobs, packs = raw["dtypes"].size, raw["length"].size, columns.packs()
    text, dims = raw["names"].tobytes(), raw["dims"].astype(np.int64, casting="safe")
    owned = int(columns.numbers("blob_ends", shards, 0, blobs)[-1]) if shards else 0  # the rest are bases
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
    codec, digest = columns.numbers("codec", blobs, RAW, 255), columns.digests("digest", blobs)
    if codec.any() and (unknown := sorted(set(distinct(codec).tolist()) - CODECS.keys())):
        raise FormatError(
            f"{what} uses codec {unknown[0]}, which this version does not know: upgrade with `pip install -U everystep`"
        )
    stored_digest = digest.copy()
    stored_digest[codec != RAW] = columns.digests("stored_digest", int(np.count_nonzero(codec)))
    table = Table(
        shards=rows,
        starts=starts_of(columns.ends("blob_ends", shards, owned)),
        pack=columns.numbers("pack", blobs, 0, len(packs) - 1),
        offset=columns.numbers("offset", blobs),
        stored=columns.numbers("stored", blobs, 0, MAX_BLOB),
        length=columns.numbers("length", blobs, 0, MAX_BLOB),
        codec=codec,
        base=columns.numbers("base", blobs, -1, blobs - 1),
        digest=digest,
        stored_digest=stored_digest,
        packs=packs,
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
        raise CorruptError(f"{what}: the blobs of {name} do not add up to its size")
    if (table.length[: table.owned] % np.repeat(table.columns.item_sizes, np.diff(table.starts))).any():
        raise CorruptError(f"{what}: a blob ends within an element")


def _check_forms(table: Table, what: str) -> None:
    """Raise CorruptError if a chunk has an impossible base or stored size."""
    raw, delta = table.codec == RAW, table.codec == DELTA
    if (table.stored != table.length)[raw].any():
        raise CorruptError(f"{what}: a raw blob is stored at another length")
    if (table.stored > table.length).any():
        raise CorruptError(f"{what}: a blob takes more room than its plain bytes")
    if (table.base[~delta] >= 0).any():
        raise CorruptError(f"{what}: a blob has a base that it cannot use")
    if delta[table.owned :].any():
        raise CorruptError(f"{what}: a base needs a base itself")
    base = table.base[delta]
    if (base < table.owned).any() or (table.length[base] != table.length[delta]).any():
        raise CorruptError(f"{what}: a delta against what cannot be its base")


@cache
def empty() -> Table:
    """Return a table without shards."""
    none, digests = end_to_end(()), np.zeros((0, DIGEST_SIZE), np.uint8)
    return Table(SavedShards.of(()), starts_of(none), none, none, none, none, none, none, digests, digests, ())
