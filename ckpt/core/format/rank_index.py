"""The directory of a checkpoint of many ranks: who has which box of which tensor, and where to read on.

It is the index where all tables together would be large (`checkpoint.commit_checks`): a rank that restores reads
the COMMIT record, this, and then only the manifests of the ranks that hold what it wants. The chain of digests has no
gap: the record names the directory and the manifests, and a manifest names its blobs.

Kept as columns in a file, see `ckpt.core.format.columns`.

    names, name_ends                  all names once, as UTF-8 text, and where each ends
    tensor_name, tensor_instance      a row a tensor, ascending: place in the names; whose it is, -1: all ranks together
    tensor_dtype, tensor_pattern      place in `ckpt.core.format.shards.DTYPES`; how it is divided
    tensor_accelerator                1 if some rank had it on one
    tensor_content                    16 bytes: equal for tensors that hold the same bytes and are cut alike
    pattern_shape, pattern_dim_ends   shape of the whole tensor, one after the other, and where each ends
    pattern_ends                      pattern i has pieces pattern_ends[i-1] .. pattern_ends[i]
    piece_rank                        who has it; counted from the tensor's instance, where that is a rank
    piece_dims                        offsets and sizes of each piece
    owned, view                       of each rank: how many blobs its shards own, what it sees
    packs                             JSON list of the keys of all packs that the tables name
    views                             JSON: components, aliases and instances, each different one once; and `alike`: of
                                      each rank the lowest that has the same plain values

Tensors that are divided alike share a pattern, so that thousands of tensors on thousands of ranks take a few thousand
pieces. Of plain values it holds those of optimizers, which are joined from all ranks; the others are in the parts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.core.format.boxes import Box, Dims, Effort, TangledError, times_covered
from ckpt.core.format.columns import I64, Columns, Pressed, end_to_end, reading, starts_of
from ckpt.core.format.digest import DIGEST_SIZE
from ckpt.core.format.layout import MAX_DIMS, TensorSpec, check_components
from ckpt.core.format.manifest import MAX_JSON, MAX_WORLD
from ckpt.core.format.partition import GLOBAL
from ckpt.core.format.shards import DTYPES, MAX_DIM, SavedShards
from ckpt.core.format.table import texts
from ckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy.typing as npt

OWN = -1  # in a view: the instance is the rank itself
MAX_DIRECTORY = 1 << 29  # bytes, decompressed
MAX_DIRECTORY_HEADER = 1 << 16

COLUMNS = {
    "names": "uint8", "name_ends": "int64", "tensor_name": "int32", "tensor_instance": "int32",
    "tensor_dtype": "uint8", "tensor_pattern": "int32", "tensor_accelerator": "uint8", "tensor_content": "uint8",
    "pattern_shape": "int64", "pattern_dim_ends": "int64", "pattern_ends": "int64", "piece_rank": "int32",
    "piece_dims": "int64", "owned": "int64", "view": "int32", "packs": "uint8", "views": "uint8",
}  # fmt: skip
PRESSED = Pressed(COLUMNS, 9, MAX_DIRECTORY, ("name_ends", "tensor_name", "pattern_ends"), ("packs", "views"))

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


ALL = "each rank names it, in a ckpt.state.Shards with an empty list if it has nothing of it"


def check_cover(shape: Dims, boxes: Sequence[Box], name: str, effort: Effort) -> None:
    """CorruptError unless boxes cover an array exactly once."""
    try:
        least, most = times_covered(shape, boxes, effort)
    except TangledError as error:
        raise CorruptError(f"the ranks do not agree about {name}: {error}") from None
    if (least, most) != (1, 1):
        wrong = "saved by nobody" if least == 0 else f"saved {most} times"
        raise CorruptError(
            f"the ranks do not agree about {name}: some of it was {wrong}. Pieces in ckpt.state.Shards must "
            "cover it and not overlap; those that hold the same all list each other as `replicas`"
        )


@dataclass(frozen=True)
class Directory:
    """All columns, checked as far as that costs little; a pattern is checked when it is asked for."""

    columns: dict[str, npt.NDArray[Any]]
    names: tuple[str, ...]
    views: tuple[RanksView, ...]
    alike: tuple[int, ...]
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
        flat = self.columns["pattern_shape"].tolist()
        shapes = [tuple(flat[a:b]) for a, b in itertools.pairwise(self._starts[0].tolist())]
        patterns = self.columns["tensor_pattern"].tolist()
        return [
            TensorSpec(name, DTYPES[dtypes[i]], shapes[patterns[i]], bool(accelerators[i]), instance=instance)
            for i, (name, instance) in enumerate(self.keys)
        ]

    def content(self, tensor: int) -> bytes:
        return self.columns["tensor_content"][tensor * DIGEST_SIZE : (tensor + 1) * DIGEST_SIZE].tobytes()

    def view_of(self, rank: int) -> RanksView:
        return self.views[int(self.columns["view"][rank])]

    @cached_property
    def first_blob(self) -> I64:
        """The number of the first blob of each rank, where those of all ranks are counted one after the other."""
        return starts_of(np.cumsum(self.columns["owned"]))

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

    def pattern_number(self, tensor: int) -> int:
        return int(self.columns["tensor_pattern"][tensor])

    def pattern_of(self, tensor: int) -> Pattern:
        return self.pattern(self.pattern_number(tensor))

    def base_rank(self, tensor: int) -> int:
        """What the ranks of its pattern are counted from."""
        return max(0, int(self.columns["tensor_instance"][tensor]))

    def holders(self, tensor: int) -> I64:
        """The ranks whose tables have something of it, once for each piece."""
        return self.pattern_of(tensor).ranks + self.base_rank(tensor)

    def pieces(self, tensor: int) -> Iterator[tuple[int, Box]]:
        """(rank, box) of a tensor."""
        ranks = self.holders(tensor).tolist()
        return zip(ranks, self.pattern_of(tensor).boxes(np.arange(len(ranks))), strict=True)

    # -- as a file --

    def to_bytes(self) -> bytes:
        return PRESSED.to_bytes(self.columns)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, what: str, world: int) -> Directory:
        """Checked: every number is plausible before anything is allocated by it. `world`: as the record says."""
        if len(raw) > MAX_DIRECTORY or int.from_bytes(raw[:8], "little") > MAX_DIRECTORY_HEADER:
            raise CorruptError(f"{what} is no directory: it is implausibly large")
        with reading(what):
            return _checked(PRESSED.from_bytes(raw, what), what, world)


def is_directory(raw: bytes | memoryview) -> bool:
    """Whether an index is one, going by its header alone; else it is a table."""
    size = int.from_bytes(raw[:8], "little")
    return size <= MAX_DIRECTORY_HEADER and b'"piece_rank"' in bytes(raw[8 : 8 + size])


def _pattern_starts(columns: dict[str, npt.NDArray[Any]]) -> tuple[I64, I64, I64]:
    shapes, pieces = starts_of(columns["pattern_dim_ends"]), starts_of(columns["pattern_ends"])
    return shapes, pieces, starts_of(np.cumsum(np.diff(pieces) * 2 * np.diff(shapes)))


def _checked(raw: dict[str, npt.NDArray[Any]], what: str, world: int) -> Directory:
    columns = Columns(raw, what)
    tensors = len(raw["tensor_name"])
    names = texts(raw["names"].tobytes(), columns.ends("name_ends", len(raw["name_ends"]), len(raw["names"])))
    if len(set(names)) != len(names):
        raise CorruptError(f"{what} has a name twice")
    name = columns.numbers("tensor_name", tensors, 0, len(names) - 1)
    instance = columns.numbers("tensor_instance", tensors, GLOBAL, world - 1)
    if (np.diff(name * (MAX_WORLD + 2) + instance) <= 0).any():
        raise CorruptError(f"{what} has a tensor twice, or not in its place")
    columns.numbers("tensor_dtype", tensors, 0, len(DTYPES) - 1)
    columns.numbers("tensor_accelerator", tensors, 0, 1)
    columns.numbers("tensor_content", tensors * DIGEST_SIZE, 0, 255)
    _check_patterns(raw, columns, what, world)
    columns.numbers("owned", world, 0, 2**40)
    packs = columns.packs()
    views, alike = read_views(raw, frozenset(names), what, world)
    entries = np.array([len(view.components) for view in views])[columns.numbers("view", world, 0, len(views) - 1)]
    said = np.array(alike, np.int64)
    if (said > np.arange(world)).any() or (said[said] != said).any() or (entries[said] != entries).any():
        raise CorruptError(f"{what} has a rank that is like an impossible one")
    return Directory(raw, names, views, alike, packs)


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
        raise CorruptError(f"{what} has a tensor of which nobody has anything")
    first = np.maximum(raw["tensor_instance"], 0)
    if len(pattern) and (np.maximum.reduceat(rank, starts[:-1])[pattern] + first >= world).any():
        raise CorruptError(f"{what} has a piece of an impossible rank")


def read_views(
    columns: dict[str, npt.NDArray[Any]], names: frozenset[str], what: str, world: int
) -> tuple[tuple[RanksView, ...], tuple[int, ...]]:
    """What ranks say, and whose plain values are the same: where nobody says that, each has its own."""
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
    alike = tuple(data.get("alike", range(world)))
    if len(alike) != world or not all(type(rank) is int and 0 <= rank < world for rank in alike):
        raise CorruptError(f"{what} has a rank that is like an impossible one")
    return tuple(found), alike


# -- which rows of tables are the pieces that a directory names --


def find_shards(found: Directory, wanted: Sequence[tuple[Key, int, I64]], shards: SavedShards) -> list[list[int]]:
    """For the pieces of each wanted tensor, which shards they are."""
    tensor = np.full(len(shards), -1, np.int64)
    numbers = {key: i for i, (key, _, _) in enumerate(wanted)}
    tensor[:] = [numbers.get(key, -1) for key in zip(shards.names, shards.instance.tolist(), strict=True)]
    held = np.flatnonzero(tensor >= 0)
    place = tensor[held] * found.world + shards.rank[held]
    order = np.argsort(place, kind="stable")
    held, place = held[order], place[order]
    patterns = [found.pattern_of(number) for _, number, _ in wanted]
    counts = np.array([len(pieces) for _, _, pieces in wanted], np.int64)
    ranks = [p.ranks[pieces] + found.base_rank(n) for p, (_, n, pieces) in zip(patterns, wanted, strict=True)]
    asked = np.repeat(np.arange(len(wanted)), counts) * found.world + end_to_end(ranks)
    low, high = np.searchsorted(place, asked, "left"), np.searchsorted(place, asked, "right")
    result: list[list[int]] = []
    for i, (start, stop) in enumerate(itertools.pairwise(starts_of(np.cumsum(counts)).tolist())):
        (name, _), number, pieces = wanted[i]
        pattern, k = patterns[i], len(patterns[i].shape)
        boxes = np.concatenate([pattern.offsets[pieces], pattern.sizes[pieces]], 1)
        lows, highs = low[start:stop], high[start:stop]
        if (highs == lows).any():
            raise _absent(found, name, asked[start:stop][highs == lows])
        mine = held[lows]
        several = np.flatnonzero(highs - lows > 1)
        for j in several.tolist():
            mine[j] = next(
                (c for c in held[lows[j] : highs[j]].tolist() if _box_of(shards, c) == boxes[j].tolist()), mine[j]
            )
        there = shards.dims[
            np.minimum(shards.dim_starts[mine][:, None] + np.arange(3 * k), max(0, len(shards.dims) - 1))
        ]
        right = (np.diff(shards.dim_starts)[mine] == 3 * k) & (there[:, k:] == boxes).all(1)
        right &= (there[:, :k] == np.array(pattern.shape, np.int64)).all(1)
        right &= shards.dtype[mine] == int(found.columns["tensor_dtype"][number])
        if not right.all():
            raise _absent(found, name, asked[start:stop][~right])
        result.append(mine.tolist())
    return result


def _box_of(shards: SavedShards, number: int) -> list[int]:
    row: list[int] = shards.dims[shards.dim_starts[number] : shards.dim_starts[number + 1]].tolist()
    return row[len(row) // 3 :]


def _absent(found: Directory, name: str, asked: I64) -> CorruptError:
    rank = int(asked[0]) % found.world
    return CorruptError(f"the index says that rank {rank} has a piece of {name} which its table does not have")
