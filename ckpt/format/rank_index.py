"""The directory of a checkpoint of many ranks: who has which box of which tensor, and where to read on.

It is the index where all tables together would be large (`ckpt.checkpoint.commit`): a rank that restores reads the
COMMIT record, this, and then only the tables of the ranks that hold what it wants. Digests go on without a gap: the
record names the directory, the directory names the tables, the tables name the blobs.

Kept as a safetensors file whose entries are zstd frames, one a column; `counts` (JSON) says how many numbers each has.

    names, name_ends                  all names once, as UTF-8 text, and where each ends
    tensor_name, tensor_instance      a row a tensor, ascending: place in the names; whose it is, -1: all ranks together
    tensor_dtype, tensor_pattern      place in `ckpt.format.table.DTYPES`; how it is divided
    tensor_accelerator                1 if some rank had it on one
    tensor_content                    16 bytes: equal for tensors that hold the same bytes and are cut alike
    pattern_shape, pattern_dim_ends   shape of the whole tensor, one after the other, and where each ends
    pattern_ends                      pattern i has pieces pattern_ends[i-1] .. pattern_ends[i]
    piece_rank                        who has it; counted from the tensor's instance, where that is a rank
    piece_dims                        offsets and sizes of each piece
    tables, owned, view               of each rank: digest of its table, how many blobs its shards own, what it sees
    packs                             JSON list of the keys of all packs that the tables name
    views                             JSON: components, aliases and instances, each different one once

Tensors that are divided alike share a pattern, so that thousands of tensors on thousands of ranks take a few thousand
pieces. Of plain values it holds those of optimizers, which are joined from all ranks; the others are in the parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import zstandard

from ckpt.errors import CorruptError
from ckpt.format.boxes import Box, Dims, Effort, TangledError, times_covered
from ckpt.format.digest import DIGEST_SIZE, blob_digest
from ckpt.format.layout import MAX_DIMS, TensorSpec, check_components
from ckpt.format.manifest import MAX_JSON, MAX_WORLD, Part, canonical, owner
from ckpt.format.partition import GLOBAL
from ckpt.format.table import DTYPES, I64, MAX_DIM, Bytes, Shards, Table, texts

OWN = -1  # in a view: the instance is the rank itself
TABLE_DIGEST = 32
MAX_DIRECTORY = 1 << 29  # bytes, decompressed
MAX_DIRECTORY_HEADER = 1 << 16
FEW = 1 << 18  # entries of a column that any file may have; more only if it is as large
LEVEL = 9
KEPT = "optimizer"  # the kind of component whose values of all ranks are joined

COLUMNS = {
    "names": np.uint8, "name_ends": np.int64, "tensor_name": np.int32, "tensor_instance": np.int32,
    "tensor_dtype": np.uint8, "tensor_pattern": np.int32, "tensor_accelerator": np.uint8, "tensor_content": np.uint8,
    "pattern_shape": np.int64, "pattern_dim_ends": np.int64, "pattern_ends": np.int64, "piece_rank": np.int32,
    "piece_dims": np.int64, "tables": np.uint8, "owned": np.int64, "view": np.int32, "packs": np.uint8,
    "views": np.uint8,
}  # fmt: skip

Key = tuple[str, int]


@dataclass(frozen=True)
class RanksView:
    """What some ranks say of the state, all in the same words. `values` are as `components`, None where not kept.

    `instances` has `OWN` for the rank that asks. `first`: the lowest rank that says so.
    """

    first: int
    components: list[dict[str, Any]]
    values: list[Any]
    aliases: dict[str, str]
    instances: dict[str, int]

    def instance(self, name: str, rank: int) -> int:
        """Which tensor of this name is that rank's."""
        found = self.instances.get(name, GLOBAL)
        return rank if found == OWN and name in self.instances else found

    def names(self) -> Iterator[str]:
        for component in self.components:
            yield from component["names"]


@dataclass(frozen=True)
class Pattern:
    """How a tensor is divided: piece i is the box `offsets[i]`, `sizes[i]`, and belongs to `ranks[i]`."""

    shape: Dims
    ranks: I64
    offsets: I64
    sizes: I64

    def boxes(self, pieces: I64) -> list[Box]:
        offsets, sizes = self.offsets[pieces].tolist(), self.sizes[pieces].tolist()
        return [(tuple(o), tuple(n)) for o, n in zip(offsets, sizes, strict=True)]

    def meeting(self, box: Box) -> I64:
        """The pieces that have something of a box."""
        low = np.array(box[0], np.int64)
        high = low + np.array(box[1], np.int64)
        ends = self.offsets + self.sizes
        return np.flatnonzero((np.maximum(self.offsets, low) < np.minimum(ends, high)).all(1))

    def covering(self, box: Box, name: str, effort: Effort) -> I64:
        """The pieces that make up a box. CorruptError unless they have each element of it exactly once."""
        pieces = self.meeting(box)
        low = np.array(box[0], np.int64)
        high = low + np.array(box[1], np.int64)
        starts = np.maximum(self.offsets[pieces], low)
        sizes = np.minimum(self.offsets[pieces] + self.sizes[pieces], high) - starts
        clipped = [(tuple(o), tuple(n)) for o, n in zip((starts - low).tolist(), sizes.tolist(), strict=True)]
        check_cover(box[1], clipped, name, effort)
        return pieces


def check_cover(shape: Dims, boxes: Sequence[Box], name: str, effort: Effort) -> None:
    """CorruptError unless boxes cover an array exactly once."""
    try:
        least, most = times_covered(shape, boxes, effort)
    except TangledError as error:
        raise CorruptError(f"the ranks do not agree about {name}: {error}") from None
    if (least, most) != (1, 1):
        wrong = "saved by nobody" if least == 0 else f"saved {most} times"
        raise CorruptError(f"the ranks do not agree about {name}: some of it was {wrong}")


@dataclass(frozen=True)
class Directory:
    """All columns, checked as far as that costs little; a pattern is checked when it is asked for."""

    columns: dict[str, npt.NDArray[Any]]
    names: tuple[str, ...]
    views: tuple[RanksView, ...]
    packs: tuple[str, ...]

    @property
    def world(self) -> int:
        return len(self.columns["view"])

    def __len__(self) -> int:
        return len(self.columns["tensor_name"])

    @cached_property
    def keys(self) -> list[Key]:
        """Name and instance of each tensor."""
        names, instances = self.columns["tensor_name"].tolist(), self.columns["tensor_instance"].tolist()
        return [(self.names[name], instance) for name, instance in zip(names, instances, strict=True)]

    @cached_property
    def number(self) -> dict[Key, int]:
        return {key: i for i, key in enumerate(self.keys)}

    def specs(self) -> list[TensorSpec]:
        """Of all tensors, whole."""
        dtypes, accelerators = self.columns["tensor_dtype"].tolist(), self.columns["tensor_accelerator"].tolist()
        ends, flat = self.columns["pattern_dim_ends"].tolist(), self.columns["pattern_shape"].tolist()
        shapes = [tuple(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        patterns = self.columns["tensor_pattern"].tolist()
        return [
            TensorSpec(name, DTYPES[dtypes[i]], shapes[patterns[i]], bool(accelerators[i]), instance=instance)
            for i, (name, instance) in enumerate(self.keys)
        ]

    def content(self, tensor: int) -> bytes:
        return self.columns["tensor_content"][tensor * DIGEST_SIZE : (tensor + 1) * DIGEST_SIZE].tobytes()

    def table_digest(self, rank: int) -> str:
        return self.columns["tables"][rank * TABLE_DIGEST : (rank + 1) * TABLE_DIGEST].tobytes().hex()

    def view_of(self, rank: int) -> RanksView:
        return self.views[int(self.columns["view"][rank])]

    @cached_property
    def first_blob(self) -> I64:
        """The number of the first blob of each rank, where those of all ranks are counted one after the other."""
        found: I64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.columns["owned"])])
        return found

    @cached_property
    def _patterns(self) -> dict[int, Pattern]:
        return {}

    @cached_property
    def _starts(self) -> tuple[I64, I64, I64]:
        """Where each pattern begins: in the shapes, in the pieces, in their dimensions."""
        return _pattern_starts(self.columns)

    def pattern(self, number: int) -> Pattern:
        """CorruptError if a piece lies outside its tensor."""
        if number not in self._patterns:
            (a, b), (first, stop), (low, high) = (starts[number : number + 2].tolist() for starts in self._starts)
            k = b - a
            shape = self.columns["pattern_shape"][a:b]
            dims = self.columns["piece_dims"][low:high].reshape(stop - first, 2 * k)
            if (dims[:, :k] + dims[:, k:] > shape).any():
                users = np.flatnonzero(self.columns["tensor_pattern"] == number)
                name = self.keys[int(users[0])][0] if users.size else "no tensor"
                raise CorruptError(f"the index has a piece of {name} that lies outside its tensor")
            ranks = self.columns["piece_rank"][first:stop].astype(np.int64)
            self._patterns[number] = Pattern(tuple(shape.tolist()), ranks, dims[:, :k], dims[:, k:])
        return self._patterns[number]

    def pattern_of(self, tensor: int) -> Pattern:
        return self.pattern(int(self.columns["tensor_pattern"][tensor]))

    def base_rank(self, tensor: int) -> int:
        """What the ranks of its pattern are counted from."""
        return max(0, int(self.columns["tensor_instance"][tensor]))

    def pieces(self, tensor: int) -> Iterator[tuple[int, Box]]:
        """(rank, box) of a tensor."""
        pattern = self.pattern_of(tensor)
        ranks = (pattern.ranks + self.base_rank(tensor)).tolist()
        return zip(ranks, pattern.boxes(np.arange(len(ranks))), strict=True)

    # -- as a file --

    def to_bytes(self) -> bytes:
        press = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        files = {"counts": np.frombuffer(canonical({n: len(c) for n, c in self.columns.items()}), np.uint8)}
        for name, column in self.columns.items():
            files[name] = np.frombuffer(press.compress(np.ascontiguousarray(column).tobytes()), np.uint8)
        return bytes(safetensors.numpy.save(files))

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, what: str, world: int) -> Directory:
        """Checked: every number is plausible before anything is allocated by it. `world`: as the record says."""
        if len(raw) > MAX_DIRECTORY or int.from_bytes(raw[:8], "little") > MAX_DIRECTORY_HEADER:
            raise CorruptError(f"{what} is no directory: it is implausibly large")
        try:
            columns = _decompressed(safetensors.numpy.load(bytes(raw)), what)
            return _checked(columns, what, world)
        except (
            safetensors.SafetensorError,
            zstandard.ZstdError,
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            OverflowError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CorruptError(f"{what} is damaged: {error}") from None


def is_directory(raw: bytes | memoryview) -> bool:
    """Whether an index is one, going by its header alone; else it is a table."""
    size = int.from_bytes(raw[:8], "little")
    return size <= MAX_DIRECTORY_HEADER and b'"counts"' in bytes(raw[8 : 8 + size])


def _decompressed(frames: dict[str, npt.NDArray[Any]], what: str) -> dict[str, npt.NDArray[Any]]:
    """The columns. CorruptError unless each is one frame of exactly what was declared, and all are plausible."""
    counts = json.loads(frames.pop("counts").tobytes())
    if counts.keys() != COLUMNS.keys() or frames.keys() != COLUMNS.keys():
        raise CorruptError(f"{what} has other columns than a directory")
    if not all(type(n) is int and 0 <= n <= MAX_DIRECTORY for n in counts.values()):
        raise CorruptError(f"{what} declares impossible sizes")
    sizes = {name: n * np.dtype(COLUMNS[name]).itemsize for name, n in counts.items()}
    if sum(sizes.values()) > MAX_DIRECTORY:
        raise CorruptError(f"{what} declares {sum(sizes.values())} bytes, which is implausibly large")
    few = FEW + sum(frame.nbytes for frame in frames.values())
    if max(counts[name] for name in ("name_ends", "tensor_name", "pattern_ends")) > few:
        raise CorruptError(f"{what} declares more names, tensors or patterns than a file of its size has")
    stored = {name: frames[name].reshape(-1).view(np.uint8).tobytes() for name in sizes}
    for name, size in sizes.items():
        if zstandard.frame_content_size(stored[name]) != size:
            raise CorruptError(f"{what}: column {name} does not hold what it declares")
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    found = {}
    for name, size in sizes.items():
        plain = reader.decompress(stored[name], max_output_size=size, allow_extra_data=False)
        if len(plain) != size:
            raise CorruptError(f"{what}: column {name} does not hold what it declares")
        found[name] = np.frombuffer(plain, COLUMNS[name])
        # What is said in a few bytes may be very much once it is made into objects.
        if name in ("packs", "views") and sum(plain.count(mark) for mark in b",[{") > 8 * few:
            raise CorruptError(f"{what}: column {name} says more than a file of its size has to say")
    return found


def _pattern_starts(columns: dict[str, npt.NDArray[Any]]) -> tuple[I64, I64, I64]:
    zero = np.zeros(1, np.int64)
    shapes = np.concatenate([zero, columns["pattern_dim_ends"]])
    pieces = np.concatenate([zero, columns["pattern_ends"]])
    dims = np.concatenate([zero, np.cumsum(np.diff(pieces) * 2 * np.diff(shapes))])
    return shapes, pieces, dims


def _checked(columns: dict[str, npt.NDArray[Any]], what: str, world: int) -> Directory:
    def within(name: str, count: int, low: int, high: int) -> I64:
        column = columns[name].astype(np.int64, copy=False)
        if column.shape != (count,) or (count and (column.min() < low or column.max() > high)):
            raise CorruptError(f"{what}: column {name} is out of range")
        return column

    def ends(name: str, total: int) -> I64:
        column = within(name, len(columns[name]), 0, total)
        if (np.diff(column) < 0).any() or (int(column[-1]) if len(column) else 0) != total:
            raise CorruptError(f"{what}: column {name} does not add up")
        return column

    tensors, patterns, pieces = (len(columns[n]) for n in ("tensor_name", "pattern_ends", "piece_rank"))
    names = texts(columns["names"].tobytes(), ends("name_ends", len(columns["names"])))
    if len(set(names)) != len(names):
        raise CorruptError(f"{what} has a name twice")
    name = within("tensor_name", tensors, 0, len(names) - 1)
    instance = within("tensor_instance", tensors, GLOBAL, world - 1)
    if (np.diff(name * (MAX_WORLD + 2) + instance) <= 0).any():
        raise CorruptError(f"{what} has a tensor twice, or not in its place")
    within("tensor_dtype", tensors, 0, len(DTYPES) - 1)
    pattern = within("tensor_pattern", tensors, 0, patterns - 1)
    within("tensor_accelerator", tensors, 0, 1)
    within("tensor_content", tensors * DIGEST_SIZE, 0, 255)
    within("pattern_shape", len(columns["pattern_shape"]), 0, MAX_DIM - 1)
    within("piece_dims", len(columns["piece_dims"]), 0, MAX_DIM - 1)
    dim_ends = ends("pattern_dim_ends", len(columns["pattern_shape"]))
    if len(dim_ends) != patterns or (np.diff(dim_ends, prepend=0) > MAX_DIMS).any():
        raise CorruptError(f"{what}: column pattern_dim_ends is out of range")
    ends("pattern_ends", pieces)
    rank = within("piece_rank", pieces, 0, world - 1)
    _, starts, dims = _pattern_starts(columns)
    if int(dims[-1]) != len(columns["piece_dims"]):
        raise CorruptError(f"{what}: column piece_dims does not add up")
    if (np.diff(starts) == 0).any():
        raise CorruptError(f"{what} has a tensor of which nobody has anything")
    if tensors and (np.maximum.reduceat(rank, starts[:-1])[pattern] + np.maximum(instance, 0) >= world).any():
        raise CorruptError(f"{what} has a piece of an impossible rank")
    within("tables", world * TABLE_DIGEST, 0, 255)
    within("owned", world, 0, 2**40)
    packs = json.loads(columns["packs"].tobytes())
    if type(packs) is not list or not all(type(k) is str and owner(k) and k.startswith("packs/") for k in packs):
        raise CorruptError(f"{what}: names impossible packs")
    views = _views(columns, frozenset(names), what, world)
    within("view", world, 0, len(views) - 1)
    return Directory(columns, names, views, tuple(packs))


def _views(columns: dict[str, npt.NDArray[Any]], names: frozenset[str], what: str, world: int) -> tuple[RanksView, ...]:
    if len(columns["views"]) > MAX_JSON:
        raise CorruptError(f"{what} is implausibly large")
    data = json.loads(columns["views"].tobytes())
    found: list[RanksView] = []
    for first, pairs, aliases, instances in data["views"]:
        numbers = [aliases, instances, *(c for c, _ in pairs)]
        if type(first) is not int or not 0 <= first < world or not all(type(n) is int and n >= 0 for n in numbers):
            raise CorruptError(f"{what} has an impossible view")
        mine, here = data["aliases"][aliases], data["instances"][instances]
        if not names.issuperset(mine.values()) or not all(type(n) is int and n >= OWN for n in here.values()):
            raise CorruptError(f"{what} has an alias of nothing, or an impossible instance")
        components = [data["components"][c] for c, _ in pairs]
        values = [None if v is None else data["values"][v] for _, v in pairs]
        found.append(RanksView(first, components, values, mine, here))
    known = [set(names)]
    for aliases in data["aliases"]:
        known[0].update(aliases)
    check_components(data["components"], known[0])
    return tuple(found)


# -- made --


def build(parts: Sequence[Part], tables: Sequence[Table]) -> Directory:
    """Of the parts and tables of all ranks, in rank order. CorruptError if they do not agree, or something is missing.

    What it says is what the tables say; of the parts' layouts only that is compared which restoring goes by.
    """
    try:
        return _build(parts, tables)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptError(f"a part is not one: {type(error).__name__}: {error}") from None


class Slim:
    """Parts of many ranks without what most of them say alike, and without what no directory needs.

    Thousands of parts as they were read would take gigabytes. What comes of them is as good for `build`, and for
    nothing else.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def __call__(self, part: Part) -> Part:
        """CorruptError if it is none."""
        try:
            layout = dict(part.layout)
            rows = {(row[0], row[6] if len(row) > 6 else GLOBAL) for row in layout["tensors"] if row[3]}
            layout["tensors"] = [[name, "", [], True, None, [], instance] for name, instance in sorted(rows)]
            layout["instances"] = _relative(layout["instances"], part.rank)
            for name in ("tensors", "components", "aliases", "instances", "elsewhere"):
                layout[name] = self._once(layout[name])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptError(f"a part is not one: {type(error).__name__}: {error}") from None
        return replace(part, layout=layout, packs=[])

    def _once(self, thing: Any) -> Any:
        return self._known.setdefault(repr(thing), thing)


def _relative(instances: dict[str, int], rank: int) -> dict[str, int]:
    """As a view has them."""
    return {name: OWN if instance == rank else instance for name, instance in instances.items()}


def _build(parts: Sequence[Part], tables: Sequence[Table]) -> Directory:
    world = len(parts)
    for rank, (part, table) in enumerate(zip(parts, tables, strict=True)):
        if part.rank != rank or part.world != world or (table.columns.rank != rank).any():
            raise CorruptError(f"rank {rank} of {world} says it is rank {part.rank} of {part.world}")
    names, name_of_shard = _name(tables)
    divided = _divide(names, name_of_shard, tables)
    number = {key: i for i, key in enumerate(divided.keys)}
    _check_parts(parts, divided, number)
    pool = _Pool()
    view_of = [pool.add(part) for part in parts]
    _check_views(pool, view_of, divided)
    digests = b"".join(bytes.fromhex(part.table) for part in parts)
    packs = sorted({key for table in tables for key in table.packs})
    text = [name.encode() for name in names]
    columns: dict[str, npt.NDArray[Any]] = {
        "names": np.frombuffer(b"".join(text), np.uint8),
        "name_ends": np.cumsum([len(one) for one in text], dtype=np.int64),
        **divided.columns,
        "tensor_accelerator": _accelerated(parts, number),
        "tables": np.frombuffer(digests, np.uint8),
        "owned": np.array([table.owned for table in tables], np.int64),
        "view": np.array(view_of, np.int32),
        "packs": np.frombuffer(canonical(packs), np.uint8),
        "views": np.frombuffer(canonical(pool.to_json()), np.uint8),
    }
    columns = {name: np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
    return Directory(columns, names, _views(columns, frozenset(names), "the index", world), tuple(packs))


def _name(tables: Sequence[Table]) -> tuple[tuple[str, ...], I64]:
    """All names, sorted, and which of them each shard has, of all tables one after the other."""
    seen: dict[str, int] = {}
    known: dict[int, I64] = {}  # ranks of one stage share one tuple of names
    found = []
    for names in (table.columns.names for table in tables):
        if id(names) not in known:
            known[id(names)] = np.array([seen.setdefault(name, len(seen)) for name in names], np.int64)
        found.append(known[id(names)])
    names = tuple(sorted(seen))
    place = np.empty(len(seen), np.int64)
    place[[seen[name] for name in names]] = np.arange(len(seen))
    return names, place[np.concatenate([np.zeros(0, np.int64), *found])]


@dataclass
class _Divided:
    """The columns about tensors and patterns."""

    columns: dict[str, npt.NDArray[Any]]
    keys: list[Key]
    forms: dict[str, tuple[str, Dims]]  # of what all ranks hold together


def _divide(names: tuple[str, ...], name_of_shard: I64, tables: Sequence[Table]) -> _Divided:
    """Gather the pieces of each tensor, and note each way of dividing one once."""
    shards = Shards.join([table.columns for table in tables])
    blobs = np.concatenate([np.zeros(0, np.int64), *(np.diff(table.starts) for table in tables)])
    first = np.cumsum(blobs) - blobs
    digests = np.concatenate([np.zeros((0, DIGEST_SIZE), np.uint8), *(t.digest[: t.owned] for t in tables)])
    which = name_of_shard * (MAX_WORLD + 2) + shards.instance + 1
    order = np.argsort(which, kind="stable")
    cuts = np.flatnonzero(np.diff(which[order], prepend=-1))
    lengths = np.diff(shards.dim_starts)
    effort = Effort(Effort.left + 4 * len(shards))
    patterns: dict[bytes, int] = {}
    shapes: list[Dims] = []
    ranks: list[I64] = []
    dims: list[I64] = []
    tensors: list[tuple[int, int, int, int]] = []
    contents: list[bytes] = []
    forms: dict[str, tuple[str, Dims]] = {}
    for a, b in zip(cuts.tolist(), [*cuts[1:].tolist(), len(order)], strict=True):
        rows = order[a:b]
        name, instance = int(name_of_shard[rows[0]]), int(shards.instance[rows[0]])
        box, dtype, shape = _alike(shards, rows, lengths, names[name])
        there = shards.rank[rows] - max(0, instance)
        if there[0] < 0:  # rows are in the order of the ranks
            raise CorruptError(f"{names[name]}: a rank has a piece of what belongs to higher ranks only")
        key = repr(shape).encode() + there.tobytes() + box.tobytes()
        if key not in patterns:
            pattern = Pattern(shape, there, box[:, : len(shape)], box[:, len(shape) :])
            check_cover(shape, pattern.boxes(np.arange(len(rows))), names[name], effort)
            patterns[key] = len(patterns)
            shapes.append(shape)
            ranks.append(there)
            dims.append(box.reshape(-1))
        tensors.append((name, instance, dtype, patterns[key]))
        contents.append(_content(DTYPES[dtype], shape, box, rows, first, blobs, digests))
        if instance == GLOBAL:
            forms[names[name]] = DTYPES[dtype], shape
    table = np.array(tensors, np.int64).reshape(-1, 4)
    columns: dict[str, npt.NDArray[Any]] = {
        "tensor_name": table[:, 0],
        "tensor_instance": table[:, 1],
        "tensor_dtype": table[:, 2],
        "tensor_pattern": table[:, 3],
        "tensor_content": np.frombuffer(b"".join(contents), np.uint8),
        "pattern_shape": np.array([n for shape in shapes for n in shape], np.int64),
        "pattern_dim_ends": np.cumsum([len(shape) for shape in shapes], dtype=np.int64),
        "pattern_ends": np.cumsum([len(one) for one in ranks], dtype=np.int64),
        "piece_rank": np.concatenate([np.zeros(0, np.int64), *ranks]),
        "piece_dims": np.concatenate([np.zeros(0, np.int64), *dims]),
    }
    return _Divided(columns, [(names[name], instance) for name, instance, *_ in tensors], forms)


def _alike(shards: Shards, rows: I64, lengths: I64, name: str) -> tuple[I64, int, Dims]:
    """Boxes, dtype and shape of the pieces of one tensor. CorruptError if they are not of one."""
    length = int(lengths[rows[0]])
    dtype, k = int(shards.dtype[rows[0]]), length // 3
    wrong = (lengths[rows] != length) | (shards.dtype[rows] != dtype)
    if not wrong.any():
        dims = shards.dims[shards.dim_starts[rows][:, None] + np.arange(length)]
        wrong = (dims[:, :k] != dims[0, :k]).any(1)
    if wrong.any():
        one, other = shards[int(rows[0])], shards[int(rows[int(np.argmax(wrong))])]
        raise CorruptError(
            f"{name} is of shape {list(one.global_shape)} and dtype {one.dtype} for one rank, and of "
            f"{list(other.global_shape)} and {other.dtype} for rank {other.rank}: they disagree"
        )
    return np.ascontiguousarray(dims[:, k:]), dtype, tuple(dims[0, :k].tolist())


def _content(dtype: str, shape: Dims, box: I64, rows: I64, first: I64, blobs: I64, digests: Bytes) -> bytes:
    """Equal for tensors that hold the same bytes and are cut alike, whoever has which piece."""
    k = len(shape)
    order = np.lexsort(box[:, :k].T[::-1]) if k else np.arange(len(rows))
    counts = blobs[rows[order]]
    begin = first[rows[order]] - (np.cumsum(counts) - counts)
    numbers = np.repeat(begin, counts) + np.arange(int(counts.sum()))
    head = canonical([dtype, list(shape)])
    return blob_digest(b"".join((head, box[order].tobytes(), counts.tobytes(), digests[numbers].tobytes())))


def _check_parts(parts: Sequence[Part], divided: _Divided, number: dict[Key, int]) -> None:
    """What the layouts say of tensors, as far as restoring goes by it."""
    checked: set[tuple[int, int]] = set()
    for part in parts:
        layout = part.layout
        own = OWN in layout["instances"].values()
        if (id(layout["instances"]), id(layout["elsewhere"])) in checked and not own:
            continue  # word for word the same was right
        checked.add((id(layout["instances"]), id(layout["elsewhere"])))
        for name, instance in layout["instances"].items():
            if (name, part.rank if instance == OWN else instance) not in number:
                raise CorruptError(f"{name}: what rank {part.rank} has of it was saved by nobody")
        for name, (dtype, shape) in layout["elsewhere"].items():
            known = divided.forms.get(name)
            if known is not None and known != (dtype, tuple(shape)):
                raise CorruptError(
                    f"{name} is of shape {list(shape)} and dtype {dtype} for rank {part.rank}, and of "
                    f"{list(known[1])} and {known[0]} for others: they disagree"
                )


def _accelerated(parts: Sequence[Part], number: dict[Key, int]) -> npt.NDArray[np.uint8]:
    found = np.zeros(len(number), np.uint8)
    seen: set[Key] = set()
    checked: set[int] = set()
    for part in parts:
        rows = part.layout["tensors"]
        if id(rows) not in checked:
            checked.add(id(rows))
            seen.update((row[0], GLOBAL if len(row) < 7 else row[6]) for row in rows if row[3])
    for key in seen:
        if key not in number:
            raise CorruptError(f"{key[0]} is not in both the layouts and the table of the checkpoint")
        found[number[key]] = 1
    return found


def _check_views(pool: _Pool, view_of: Sequence[int], divided: _Divided) -> None:
    """Everything that somebody names is there, and what all hold together, all name."""
    known = {name for name, _ in divided.keys}
    for view in pool.views:
        aliases = pool.aliases.things[view[2]]
        own = {name for c, _ in view[1] for name in pool.components.things[c]["names"]}
        for name in sorted(own):
            if aliases.get(name, name) not in known:
                raise CorruptError(f"{name} is not in the table of the checkpoint")
        for name in sorted(divided.forms.keys() - own):
            raise CorruptError(f"{name} is not in the state of rank {view[0]}, and others hold it together")


class _Different:
    """Things, each different one once. 1, 1.0 and True are different."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._known: dict[str, int] = {}
        self._same: dict[int, tuple[int, Any]] = {}  # by id, with the thing, so that the id stays its own

    def add(self, thing: Any) -> int:
        if id(thing) in self._same:
            return self._same[id(thing)][0]
        number = self._known.setdefault(repr(thing), len(self.things))
        if number == len(self.things):
            self.things.append(thing)
            self._same[id(thing)] = number, thing
        return number


class _Pool:
    """What ranks say of the state, without what many of them say alike."""

    def __init__(self) -> None:
        self.components, self.values, self.aliases, self.instances = (_Different() for _ in range(4))
        self.views: list[tuple[int, list[tuple[int, int | None]], int, int]] = []
        self._known: dict[Any, int] = {}

    def add(self, part: Part) -> int:
        """The number of a part's view."""
        layout, rank = part.layout, part.rank
        components = layout["components"]
        if len(components) != len(part.values):
            raise CorruptError(f"the plain values of rank {rank} are not of its layout")
        pairs = [
            (self.components.add(one), self.values.add(value) if one["kind"] == KEPT else None)
            for one, value in zip(components, part.values, strict=True)
        ]
        own = layout["instances"]
        if rank in own.values():
            own = _relative(own, rank)
        aliases, instances = self.aliases.add(layout["aliases"]), self.instances.add(own)
        key = tuple(pairs), aliases, instances
        if key not in self._known:
            self._known[key] = len(self.views)
            self.views.append((rank, pairs, aliases, instances))
        return self._known[key]

    def to_json(self) -> dict[str, Any]:
        return {
            "components": self.components.things,
            "values": self.values.things,
            "aliases": self.aliases.things,
            "instances": self.instances.things,
            "views": self.views,
        }
