"""The index of a checkpoint: it lists the rank that has each piece of each tensor. Its format fits any number of ranks.

The manifests have all information. With the index, a reader needs only a few of them. A restoring rank reads the COMMIT
record, the index, and then only the manifests of the ranks whose pieces it needs. Chunks are listed only in the chunk
tables of the manifests, never in the index. The chain of digests has no gap: the record has the SHA-256 of the index
and of every manifest, and the table in a manifest has the XXH3-128 of its chunks.

The index is derived from the bytes of the manifests, so two committers write equal files. It is a file of columns, see
`ckpt.core.format.columns`:

    names, name_ends                  each name once, sorted, as UTF-8 text, and where it ends
    tensor_name, tensor_instance      one row for each tensor, ascending: number of its name; the rank it belongs to,
                                      -1: all ranks together
    tensor_dtype, tensor_pattern      number in `ckpt.core.format.table.DTYPES`; how the tensor is divided
    tensor_accelerated                1 if a rank had the tensor on an accelerator
    tensor_content                    16 bytes, equal for tensors with the same bytes that are cut into the same chunks
    pattern_shape, pattern_dim_ends   shape of the whole tensor, and where it ends
    pattern_ends                      pattern i has the pieces pattern_ends[i-1] .. pattern_ends[i]
    piece_rank                        the rank that has the piece, minus the tensor's instance if that is a rank
    piece_dims                        offsets and sizes of each piece
    owned, view, alike                for each rank: number of chunks of its shards; number of its view; the lowest rank
                                      with the same plain values
    files                             JSON list of the keys of all data files that the tables name
    views                             JSON: `layouts`, `values` and `views`, each distinct entry once

Tensors that are divided in the same way share a pattern, so thousands of tensors on thousands of ranks have only a few
thousand pieces. A view is the description of the state by one or more ranks: [lowest rank, number of the layout, for
each component the number of its plain values or null]. The index has the plain values of optimizers, because they are
joined from every rank. All other plain values are read from the manifests.

The committer reads the manifests, keeps the compact form of each table (`Table.compact`), and joins the shards of some
names at a time. With 4,096 ranks and 1,700 tensors it needs less than 1 GB. A reader trusts no number: it checks sizes
before it allocates memory for them, and every number against its range. It uses a piece only if the table of the
piece's rank lists it (`SavedState._attach`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.core.format.boxes import GLOBAL, Box, Dims, Effort, TangledError, times_covered
from ckpt.core.format.columns import I64, ODD, Bytes, ColumnFile, Columns, end_to_end, reading, spans, starts_of
from ckpt.core.format.digest import DIGEST_SIZE, chunk_digest
from ckpt.core.format.layout import MAX_DIMS, OWN, TensorSpec, check_components
from ckpt.core.format.manifest import MAX_JSON, MAX_WORLD, SharedLayout, canonical
from ckpt.core.format.table import DTYPES, MAX_DIM, SavedShards, Table, texts
from ckpt.core.format.values import JOINED_KIND
from ckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_INDEX = 1 << 29  # maximum bytes of a decompressed index
MAX_INDEX_HEADER = 1 << 16
AT_ONCE = 1 << 18  # number of shards to join at a time

COLUMNS = {
    "names": "uint8", "name_ends": "int64", "tensor_name": "int32", "tensor_instance": "int32",
    "tensor_dtype": "uint8", "tensor_pattern": "int32", "tensor_accelerated": "uint8", "tensor_content": "uint8",
    "pattern_shape": "int64", "pattern_dim_ends": "int64", "pattern_ends": "int64", "piece_rank": "int32",
    "piece_dims": "int64", "owned": "int64", "view": "int32", "alike": "int32", "files": "uint8", "views": "uint8",
}  # fmt: skip
FILE = ColumnFile(
    COLUMNS, MAX_INDEX, ("name_ends", "tensor_name", "pattern_ends"), ("files", "views"), ("tensor_content",)
)

Key = tuple[str, int]
"""Name and instance of a tensor."""
ALL = "every rank must list it; a rank that has no piece of it lists a ckpt.state.Shards with an empty list"


@dataclass(frozen=True)
class View:
    """A description of the state that one or more ranks share. `values`: for each component its plain values, or None.

    `instances` has `OWN` for a rank's own tensor. `first`: the lowest rank with this view.
    """

    first: int
    components: list[dict[str, Any]]
    values: list[Any]
    aliases: dict[str, str]
    instances: dict[str, int]

    def instance(self, name: str, rank: int) -> int:
        """Return the instance of the tensor that `rank` has under a name."""
        found = self.instances.get(name, GLOBAL)
        return rank if found == OWN and name in self.instances else found

    def names(self) -> Iterator[str]:
        for component in self.components:
            yield from component["names"]


@dataclass(frozen=True)
class Pattern:
    """The division of a tensor into pieces: piece i is the box `offsets[i]`, `sizes[i]`, on rank `ranks[i]`."""

    shape: Dims
    ranks: I64
    offsets: I64
    sizes: I64

    def boxes(self) -> list[Box]:
        return [(tuple(o), tuple(n)) for o, n in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)]

    def covering(self, box: Box, name: str, effort: Effort) -> I64:
        """Return the pieces that overlap a box. Raise CorruptError unless they cover each element exactly once."""
        low = np.array(box[0], np.int64)
        high = low + np.array(box[1], np.int64)
        starts, ends = np.maximum(self.offsets, low), np.minimum(self.offsets + self.sizes, high)
        pieces = np.flatnonzero((starts < ends).all(1))
        clipped = zip((starts - low)[pieces].tolist(), (ends - starts)[pieces].tolist(), strict=True)
        check_cover(box[1], [(tuple(o), tuple(n)) for o, n in clipped], name, effort)
        return pieces


def check_cover(shape: Dims, boxes: Sequence[Box], name: str, effort: Effort) -> None:
    """Raise CorruptError unless the boxes cover an array of this shape exactly once."""
    try:
        least, most = times_covered(shape, boxes, effort)
    except TangledError as error:
        raise CorruptError(f"the ranks do not agree about {name}: {error}") from None
    if (least, most) != (1, 1):
        wrong = "not saved" if least == 0 else f"saved {most} times"
        raise CorruptError(
            f"the ranks do not agree about {name}: some of it was {wrong}. Pieces in ckpt.state.Shards must "
            "cover it and not overlap; pieces with the same elements must list each other as `replicas`"
        )


@dataclass(frozen=True)
class Index:
    """The checked columns of an index. A pattern is checked when it is used."""

    columns: dict[str, npt.NDArray[Any]]
    names: tuple[str, ...]
    views: tuple[View, ...]
    files: tuple[str, ...]

    @property
    def world(self) -> int:
        return len(self.columns["view"])

    @cached_property
    def keys(self) -> list[Key]:
        names, instances = self.columns["tensor_name"].tolist(), self.columns["tensor_instance"].tolist()
        return [(self.names[name], instance) for name, instance in zip(names, instances, strict=True)]

    @cached_property
    def number(self) -> dict[Key, int]:
        """Return the row of each tensor."""
        return {key: i for i, key in enumerate(self.keys)}

    def spec(self, tensor: int) -> TensorSpec:
        """Return the spec of a whole tensor."""
        dtype, pattern, accelerated = (self._rows[name][tensor] for name in ("dtype", "pattern", "accelerated"))
        name, instance = self.keys[tensor]
        return TensorSpec(name, DTYPES[dtype], self._shapes[pattern], bool(accelerated), instance=instance)

    @cached_property
    def _rows(self) -> dict[str, list[int]]:
        return {name: self.columns[f"tensor_{name}"].tolist() for name in ("dtype", "pattern", "accelerated")}

    @cached_property
    def _shapes(self) -> list[Dims]:
        """Return the shape of each pattern."""
        flat = self.columns["pattern_shape"].tolist()
        return [tuple(flat[a:b]) for a, b in itertools.pairwise(self._starts[0].tolist())]

    @cached_property
    def accelerated(self) -> bool:
        """Return True if any tensor was on an accelerator."""
        return bool(self.columns["tensor_accelerated"].any())

    def content(self, tensor: int) -> object:
        """Return a value that is equal for two tensors if they have the same bytes, divided into the same chunks."""
        digest = self.columns["tensor_content"].reshape(-1, DIGEST_SIZE)[tensor].tobytes()
        return self._rows["dtype"][tensor], self._shapes[self._rows["pattern"][tensor]], digest

    @cached_property
    def first_chunk(self) -> I64:
        """Return the number of each rank's first chunk, counting the chunks of all ranks in rank order."""
        return starts_of(np.cumsum(self.columns["owned"]))

    @cached_property
    def _patterns(self) -> dict[int, Pattern]:
        return {}

    @cached_property
    def _starts(self) -> tuple[I64, I64, I64]:
        """Return the start of each pattern in three columns: the shapes, the pieces, and the pieces' dimensions."""
        return _pattern_starts(self.columns)

    def pattern_number(self, tensor: int) -> int:
        return self._rows["pattern"][tensor]

    def pattern(self, tensor: int) -> Pattern:
        """Return the pattern of a tensor. Raise CorruptError if a piece is outside the tensor."""
        number = self.pattern_number(tensor)
        if number not in self._patterns:
            (a, b), (first, stop), (low, high) = (starts[number : number + 2].tolist() for starts in self._starts)
            k = b - a
            dims = self.columns["piece_dims"][low:high].reshape(stop - first, 2 * k)
            if (dims[:, :k] + dims[:, k:] > self.columns["pattern_shape"][a:b]).any():
                raise CorruptError(f"the index has a piece of {self.keys[tensor][0]} that lies outside its tensor")
            ranks = self.columns["piece_rank"][first:stop].astype(np.int64)
            self._patterns[number] = Pattern(self._shapes[number], ranks, dims[:, :k], dims[:, k:])
        return self._patterns[number]

    def holders(self, tensor: int) -> I64:
        """Return the rank that has each piece of a tensor, in the order of the pieces."""
        return self.pattern(tensor).ranks + max(0, self.keys[tensor][1])

    # -- as a file --

    def to_bytes(self) -> bytes:
        return FILE.to_bytes(self.columns)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, what: str, world: int, count: int | None = None) -> Index:
        """Read an index. Raise CorruptError unless every number is plausible.

        count: number of ranks in the index, default: `world`.
        """
        if len(raw) > MAX_INDEX or int.from_bytes(raw[:8], "little") > MAX_INDEX_HEADER:
            raise CorruptError(f"{what} is not an index: it is implausibly large")
        with reading(what):
            return _checked(FILE.from_bytes(raw, what), what, world, world if count is None else count)


def _pattern_starts(columns: Mapping[str, npt.NDArray[Any]]) -> tuple[I64, I64, I64]:
    shapes, pieces = starts_of(columns["pattern_dim_ends"]), starts_of(columns["pattern_ends"])
    return shapes, pieces, starts_of(np.cumsum(np.diff(pieces) * 2 * np.diff(shapes)))


def _checked(raw: dict[str, npt.NDArray[Any]], what: str, world: int, count: int) -> Index:
    columns = Columns(raw, what)
    tensors = len(raw["tensor_name"])
    names = texts(raw["names"].tobytes(), columns.ends("name_ends", len(raw["name_ends"]), len(raw["names"])))
    if len(set(names)) != len(names):
        raise CorruptError(f"{what} has a name twice")
    name = columns.numbers("tensor_name", tensors, 0, len(names) - 1)
    instance = columns.numbers("tensor_instance", tensors, GLOBAL, world - 1)
    if (np.diff(name * (MAX_WORLD + 2) + instance) <= 0).any():
        raise CorruptError(f"{what} has a tensor twice, or not in order")
    columns.numbers("tensor_dtype", tensors, 0, len(DTYPES) - 1)
    columns.numbers("tensor_accelerated", tensors, 0, 1)
    columns.numbers("tensor_content", tensors * DIGEST_SIZE, 0, 255)
    _check_patterns(raw, columns, what, world)
    columns.numbers("owned", count, 0, 2**40)
    views = _views(raw, frozenset(names) if count == world else None, what, world)
    entries = np.array([len(view.components) for view in views])[columns.numbers("view", count, 0, len(views) - 1)]
    alike = columns.numbers("alike", count, 0, count - 1)
    if (alike > np.arange(count)).any() or (alike[alike] != alike).any() or (entries[alike] != entries).any():
        raise CorruptError(f"{what} refers to an impossible rank")
    return Index(raw, names, views, columns.files())


def _check_patterns(raw: dict[str, npt.NDArray[Any]], columns: Columns, what: str, world: int) -> None:
    patterns, pieces, dims = len(raw["pattern_ends"]), len(raw["piece_rank"]), len(raw["pattern_shape"])
    pattern = columns.numbers("tensor_pattern", len(raw["tensor_name"]), 0, patterns - 1)
    columns.numbers("pattern_shape", dims, 0, MAX_DIM - 1)
    columns.numbers("piece_dims", len(raw["piece_dims"]), 0, MAX_DIM - 1)
    dim_ends = columns.ends("pattern_dim_ends", len(raw["pattern_dim_ends"]), dims)
    if len(dim_ends) != patterns or (np.diff(dim_ends, prepend=0) > MAX_DIMS).any():
        raise CorruptError(f"{what}: column pattern_dim_ends is out of range")
    columns.ends("pattern_ends", patterns, pieces)
    rank = columns.numbers("piece_rank", pieces, 0, world - 1)
    _, starts, dim_starts = _pattern_starts(raw)
    if int(dim_starts[-1]) != len(raw["piece_dims"]):
        raise CorruptError(f"{what}: column piece_dims does not add up")
    if (np.diff(starts) == 0).any():
        raise CorruptError(f"{what} has a tensor that no rank has")
    first = np.maximum(raw["tensor_instance"], 0)
    if len(pattern) and (np.maximum.reduceat(rank, starts[:-1])[pattern] + first >= world).any():
        raise CorruptError(f"{what} has a piece of an impossible rank")


def _views(
    columns: Mapping[str, npt.NDArray[Any]], names: frozenset[str] | None, what: str, world: int
) -> tuple[View, ...]:
    """Parse the views. Raise CorruptError for unknown tensor names. `names`: all names, or None if an unknown name may
    belong to a rank whose manifest is on another disk."""
    if len(columns["views"]) > MAX_JSON:
        raise CorruptError(f"{what} is implausibly large")
    data = json.loads(columns["views"].tobytes())
    for layout in data["layouts"]:
        aliases, instances = layout["aliases"], layout["instances"]
        if not all(type(n) is int and OWN <= n < world for n in instances.values()):
            raise CorruptError(f"{what} has an impossible instance")
        if names is not None and not names.issuperset(aliases.values()):
            raise CorruptError(f"{what} has an alias that refers to no tensor")
        check_components(layout["components"], None if names is None else names.union(aliases))
    found: list[View] = []
    for first, number, chosen in data["views"]:
        numbers = [number, *(n for n in chosen if n is not None)]
        if type(first) is not int or not 0 <= first < world or not all(type(n) is int and n >= 0 for n in numbers):
            raise CorruptError(f"{what} has an impossible view")
        layout = data["layouts"][number]
        if len(chosen) != len(layout["components"]):
            raise CorruptError(f"{what} has an impossible view")
        values = [None if n is None else data["values"][n] for n in chosen]
        found.append(View(first, layout["components"], values, layout["aliases"], layout["instances"]))
    return tuple(found)


# -- building an index from the manifests --


@dataclass(frozen=True)
class Share:
    """The contents of one manifest that the index needs."""

    rank: int
    world: int
    layout: SharedLayout
    values: list[Any]
    table: Table


def build(shares: Sequence[Share], *, partial: bool = False) -> Index:
    """Build the index from the shares of all ranks, in rank order.

    Raise CorruptError if the ranks disagree about a tensor, or if any element was not saved, or saved twice.

    partial: the shares come from only some ranks, so a tensor may be incomplete.
    """
    try:
        return _build(shares, partial)
    except ODD as error:
        raise CorruptError(f"a manifest does not describe a state: {type(error).__name__}: {error}") from None


def _build(shares: Sequence[Share], partial: bool) -> Index:
    for at, share in enumerate(shares):
        world, ranks = shares[0].world if partial else len(shares), share.table.columns.rank
        if share.world != world or (share.rank != at and not partial) or (ranks != share.rank).any():
            raise CorruptError(f"the manifest of rank {at} of {world} names rank {share.rank} of {share.world}")
    names, numbers = _numbered([share.table.columns.names for share in shares])
    tensors = _Tensors(names, partial, sum(map(len, numbers)))
    for block in _blocks(len(names), numbers, [share.table for share in shares]):
        tensors.add(block)
    pool = _Pool()
    view_of = [pool.add(share) for share in shares]
    if not partial:
        _check_views(shares, pool, tensors)
    text = [name.encode() for name in names]
    files = tuple(sorted({key for share in shares for key in share.table.files}))
    columns: dict[str, Any] = {
        "names": np.frombuffer(b"".join(text), np.uint8),
        "name_ends": np.cumsum([len(one) for one in text], dtype=np.int64),
        **tensors.columns(),
        "owned": [share.table.owned for share in shares],
        "view": view_of,
        "alike": pool.alike,
        "files": np.frombuffer(canonical(files), np.uint8),
        "views": np.frombuffer(canonical(pool.to_json()), np.uint8),
    }
    return Index({name: np.asarray(columns[name], kind) for name, kind in COLUMNS.items()}, names, pool.views, files)


def _numbered(names_of: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[npt.NDArray[np.int32]]]:
    """Return all names, sorted, and for each rank the positions of its shards' names in this list."""
    seen: dict[str, int] = {}
    known: dict[tuple[str, ...], npt.NDArray[np.int32]] = {}  # many ranks have the same names
    for names in names_of:
        if names not in known:
            known[names] = np.array([seen.setdefault(name, len(seen)) for name in names], np.int32)
    ordered = tuple(sorted(seen))
    place = np.empty(len(seen), np.int32)
    place[[seen[name] for name in ordered]] = np.arange(len(seen))
    placed = {names: place[found] for names, found in known.items()}
    return ordered, [placed[names] for names in names_of]


@dataclass(frozen=True)
class _Block:
    """The shards of some names, sorted by name and instance. `name`: numbers of names. Shard i has `counts[i]` chunks,
    whose digests begin at `digest[first[i]]`."""

    name: I64
    shards: SavedShards
    counts: I64
    first: I64
    digest: Bytes

    def groups(self) -> I64:
        """Return the start of each tensor in the block, followed by the end of the block."""
        changed = (np.diff(self.name, prepend=-1) != 0) | (np.diff(self.shards.instance, prepend=-2) != 0)
        return end_to_end([np.flatnonzero(changed), [len(self.name)]])


def _blocks(count: int, numbers: Sequence[npt.NDArray[np.int32]], tables: Sequence[Table]) -> Iterator[_Block]:
    """Yield blocks of shards. Each block has the shards of some names, in the order of the names, from all ranks."""
    of = {id(one): one for one in numbers}
    orders = {key: np.argsort(one, kind="stable") for key, one in of.items()}
    rows = np.zeros(count, np.int64)
    for one in numbers:
        rows += np.bincount(one, minlength=count)
    bounds = [*np.flatnonzero(np.diff(np.cumsum(rows) // AT_ONCE, prepend=-1)).tolist(), count]
    cuts = {key: np.searchsorted(of[key][order], bounds) for key, order in orders.items()}
    for i in range(len(bounds) - 1):
        chosen = {key: order[cuts[key][i] : cuts[key][i + 1]] for key, order in orders.items()}
        taken = [(chosen[id(one)], one, table) for one, table in zip(numbers, tables, strict=True)]
        taken = [each for each in taken if len(each[0])]
        shards = SavedShards.join([table.columns.take(some) for some, _, table in taken])
        name = end_to_end(one[some] for some, one, _ in taken)
        counts = end_to_end(table.starts[some + 1] - table.starts[some] for some, _, table in taken)
        digests = [
            table.digest[spans(table.starts[some], table.starts[some + 1] - table.starts[some])]
            for some, _, table in taken
        ]
        order = np.lexsort((shards.instance, name))
        first = (np.cumsum(counts) - counts)[order]
        digest = np.concatenate([np.zeros((0, DIGEST_SIZE), np.uint8), *digests])
        yield _Block(name[order], shards.take(order), counts[order], first, digest)


class _Tensors:
    """Collects the columns about tensors and patterns. Each pattern is listed once."""

    def __init__(self, names: tuple[str, ...], partial: bool, shards: int) -> None:
        self._names, self._partial = names, partial
        self._effort = Effort(Effort.left + 4 * shards)
        self._patterns: dict[bytes, int] = {}
        self._shapes: list[Dims] = []
        self._ranks: list[I64] = []
        self._dims: list[I64] = []
        self._rows: list[npt.NDArray[Any]] = []  # columns: name, instance, dtype, pattern, accelerated
        self._contents: list[Bytes] = []

    def add(self, block: _Block) -> None:
        """Add the tensors of a block. Raise CorruptError if ranks disagree about a tensor."""
        starts, shards = block.groups(), block.shards
        heads = starts[:-1]
        there = shards.rank - np.maximum(0, shards.instance)
        if (there < 0).any():
            name = self._names[int(block.name[np.argmax(there < 0)])]
            raise CorruptError(f"{name}: a rank has a piece of a tensor that belongs to higher ranks only")
        pattern, content = np.full(len(heads), -1, np.int64), np.zeros((len(heads), DIGEST_SIZE), np.uint8)
        accelerated = np.maximum.reduceat(shards.accelerated, heads) if len(heads) else heads
        alone = (np.diff(starts) == 1) & shards.whole[heads]
        self._add_alone(block, heads, alone, there, pattern)
        easy = alone & (block.counts[heads] == 1)
        content[easy] = block.digest[block.first[heads[easy]]]
        for i in np.flatnonzero(~easy).tolist():
            rows = np.arange(starts[i], starts[i + 1])
            box, shape = self._boxes(block, rows)
            if pattern[i] < 0:
                pattern[i] = self._pattern(self._names[int(block.name[rows[0]])], shape, there[rows], box)
            content[i] = np.frombuffer(_content(box, len(shape), rows, block), np.uint8)
        columns = (block.name[heads], shards.instance[heads], shards.dtype[heads], pattern, accelerated)
        self._rows.append(np.stack([np.asarray(column, np.int64) for column in columns]))
        self._contents.append(content)

    def _add_alone(self, block: _Block, heads: I64, alone: Any, there: I64, pattern: I64) -> None:
        """Set the patterns of tensors with a single piece, all in one call because there may be many."""
        known: dict[tuple[int, ...], int] = {}
        for k, some, dims in block.shards.take(heads[alone]).by_dims():
            mine = np.flatnonzero(alone)[some]
            forms = np.concatenate([there[heads[mine]][:, None], dims[:, :k]], 1)
            for number, form in zip(mine.tolist(), map(tuple, forms.tolist()), strict=True):
                if form not in known:
                    rank, shape = np.array(form[:1], np.int64), form[1:]
                    known[form] = self._pattern("", shape, rank, np.array([[0] * k + list(shape)], np.int64))
                pattern[number] = known[form]

    def _boxes(self, block: _Block, rows: I64) -> tuple[I64, Dims]:
        """Return the boxes and the shape of a tensor. Raise CorruptError if its pieces differ in shape or dtype."""
        shards = block.shards
        starts = shards.dim_starts[rows]
        lengths = shards.dim_starts[rows + 1] - starts
        length, k = int(lengths[0]), int(lengths[0]) // 3
        wrong = (lengths != length) | (shards.dtype[rows] != shards.dtype[rows[0]])
        if not wrong.any():
            dims = shards.dims[starts[:, None] + np.arange(length)].astype(np.int64)
            wrong = (dims[:, :k] != dims[0, :k]).any(1)
        if wrong.any():
            name = self._names[int(block.name[rows[0]])]
            one, other = (shards[int(row)] for row in (rows[0], rows[np.argmax(wrong)]))
            raise CorruptError(
                f"{name} is of shape {list(one.global_shape)} and dtype {one.dtype} for one rank, and of "
                f"{list(other.global_shape)} and {other.dtype} for rank {other.rank}: they disagree"
            )
        return np.ascontiguousarray(dims[:, k:]), tuple(dims[0, :k].tolist())

    def _pattern(self, name: str, shape: Dims, ranks: I64, box: I64) -> int:
        """Return the number of a pattern. Raise CorruptError unless its pieces cover the tensor exactly once."""
        key = repr(shape).encode() + ranks.tobytes() + box.tobytes()
        if key not in self._patterns:
            if not self._partial:
                found = Pattern(shape, ranks, box[:, : len(shape)], box[:, len(shape) :])
                check_cover(shape, found.boxes(), name, self._effort)
            self._patterns[key] = len(self._patterns)
            self._shapes.append(shape)
            self._ranks.append(ranks)
            self._dims.append(box.reshape(-1))
        return self._patterns[key]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        name, instance, dtype, pattern, accelerated = np.concatenate([np.zeros((5, 0), np.int64), *self._rows], 1)
        return {
            "tensor_name": name,
            "tensor_instance": instance,
            "tensor_dtype": dtype,
            "tensor_pattern": pattern,
            "tensor_accelerated": accelerated,
            "tensor_content": np.concatenate([np.zeros((0, DIGEST_SIZE), np.uint8), *self._contents]).reshape(-1),
            "pattern_shape": end_to_end(self._shapes),
            "pattern_dim_ends": np.cumsum([len(shape) for shape in self._shapes], dtype=np.int64),
            "pattern_ends": np.cumsum([len(one) for one in self._ranks], dtype=np.int64),
            "piece_rank": end_to_end(self._ranks),
            "piece_dims": end_to_end(self._dims),
        }

    def forms(self) -> dict[Key, tuple[str, Dims]]:
        """Return dtype and shape of each tensor."""
        found = itertools.chain.from_iterable(zip(*rows[:4].tolist(), strict=True) for rows in self._rows)
        return {(self._names[n], i): (DTYPES[dtype], self._shapes[pattern]) for n, i, dtype, pattern in found}


def _content(box: I64, k: int, rows: I64, block: _Block) -> bytes:
    """Return a digest that is equal for tensors with the same bytes and chunks, no matter which ranks have them."""
    order = np.lexsort(box[:, :k].T[::-1]) if k else np.arange(len(rows))
    counts, first = block.counts[rows[order]], block.first[rows[order]]
    return chunk_digest(
        b"".join((box[order].tobytes(), counts.tobytes(), block.digest[spans(first, counts)].tobytes()))
    )


def _check_views(shares: Sequence[Share], pool: _Pool, tensors: _Tensors) -> None:
    """Raise CorruptError unless all named tensors were saved, and every rank names all shared tensors."""
    forms = tensors.forms()
    known = {name for name, _ in forms}
    together = {name for name, instance in forms if instance == GLOBAL and len(shares) > 1}
    for view in pool.views:
        own = {view.aliases.get(name, name) for name in view.names()}
        if lost := own - known:
            raise CorruptError(f"{min(lost)} is not in the table of the checkpoint")
        for name in sorted(together - own - view.aliases.keys())[:1]:
            raise CorruptError(f"{name} is not in the state of rank {view.first}, but is sharded on others: {ALL}")
    for layout, rank in pool.layouts.values():
        for name, (dtype, shape) in layout["forms"].items():
            if forms.get((name, GLOBAL), (dtype, tuple(shape))) != (dtype, tuple(shape)):
                known_dtype, known_shape = forms[name, GLOBAL]
                raise CorruptError(
                    f"{name} is of shape {list(shape)} and dtype {dtype} for rank {rank}, and of "
                    f"{list(known_shape)} and {known_dtype} for others: they disagree"
                )
    for share in shares:
        for name, instance in pool.instances(share):
            if (name, share.rank if instance == OWN else instance) not in forms:
                raise CorruptError(f"{name}: no rank saved the elements that rank {share.rank} has")


class _Pool:
    """Collects the distinct layouts, plain values and views of all ranks."""

    def __init__(self) -> None:
        self.layouts: dict[object, tuple[dict[str, Any], int]] = {}  # the layout, with the lowest rank that has it
        self.views: tuple[View, ...] = ()
        self.alike: list[int] = []  # for each share, the number of the first share with the same plain values
        self._numbers: dict[object, int] = {}
        self._own: dict[object, list[tuple[str, int]]] = {}
        self._values: dict[bytes, int] = {}
        self._known: dict[object, int] = {}
        self._rows: list[tuple[int, int, list[int | None]]] = []
        self._first: dict[bytes, int] = {}

    def add(self, share: Share) -> int:
        """Return the number of the view of a rank."""
        key = share.layout.key
        if key not in self.layouts:
            data = share.layout.data
            check_components(data["components"], None)
            self._numbers[key] = len(self.layouts)
            self.layouts[key] = data, share.rank
        layout = self.layouts[key][0]
        components, texts_ = layout["components"], list(map(canonical, share.values))
        if len(components) != len(texts_):
            raise CorruptError(f"the plain values of rank {share.rank} do not fit its layout")
        joined = [one["kind"] == JOINED_KIND for one in components]
        chosen = [
            self._values.setdefault(text, len(self._values)) if kept else None
            for text, kept in zip(texts_, joined, strict=True)
        ]
        self.alike.append(self._first.setdefault(b",".join(texts_), len(self.alike)))
        view = (self._numbers[key], *chosen)
        if view not in self._known:
            self._known[view] = len(self._rows)
            self._rows.append((share.rank, self._numbers[key], chosen))
            values = [value if kept else None for value, kept in zip(share.values, joined, strict=True)]
            self.views += (View(share.rank, components, values, layout["aliases"], layout["instances"]),)
        return self._known[view]

    def instances(self, share: Share) -> list[tuple[str, int]]:
        """Return the instances to check for a rank: all instances for the first rank with a layout, else only `OWN`."""
        data, first = self.layouts[share.layout.key]
        if share.rank == first:
            return list(data["instances"].items())
        key = share.layout.key
        if key not in self._own:
            self._own[key] = [(name, instance) for name, instance in data["instances"].items() if instance == OWN]
        return self._own[key]

    def to_json(self) -> dict[str, Any]:
        kept = ("aliases", "components", "instances")
        return {
            "layouts": [{name: data[name] for name in kept} for data, _ in self.layouts.values()],
            "values": [json.loads(text) for text in self._values],
            "views": self._rows,
        }
