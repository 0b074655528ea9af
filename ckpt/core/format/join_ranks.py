"""The directory of a checkpoint (`ckpt.core.format.rank_index`) made of the parts and tables of all ranks, which are
compared: whether they agree about what they saved, and whether all of it is there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.core.format.boxes import Dims, Effort
from ckpt.core.format.columns import I64, ODD, end_to_end, spans
from ckpt.core.format.digest import blob_digest
from ckpt.core.format.manifest import Part, canonical
from ckpt.core.format.partition import GLOBAL
from ckpt.core.format.rank_index import ALL, COLUMNS, OWN, Directory, Key, Pattern, check_cover, read_views
from ckpt.core.format.saved_nodes import JOINED_KIND
from ckpt.core.format.shards import DTYPES
from ckpt.core.format.slim import PieceRows, RankPieces, SharedNames, relative, words
from ckpt.core.format.table import Table
from ckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy.typing as npt

AT_ONCE = 1 << 18  # rows of tables


@contextlib.contextmanager
def _reading_parts() -> Iterator[None]:
    try:
        yield
    except ODD as error:
        raise CorruptError(f"a part is not one: {type(error).__name__}: {error}") from None


def build(parts: Sequence[Part], tables: Sequence[Table | RankPieces]) -> Directory:
    """Of the parts and tables of all ranks, in rank order. CorruptError if they do not agree, or something is missing.

    What it says is what the tables say; of the parts' layouts only that is compared which restoring goes by.
    """
    names = SharedNames()
    with _reading_parts():
        return _build(parts, [RankPieces.of(one, names) if isinstance(one, Table) else one for one in tables])


def _build(parts: Sequence[Part], tables: Sequence[RankPieces]) -> Directory:
    world = len(parts)
    for rank, (part, table) in enumerate(zip(parts, tables, strict=True)):
        if part.rank != rank or part.world != world or table.rank not in (rank, None):
            raise CorruptError(f"rank {rank} of {world} says it is rank {part.rank} of {part.world}")
    names, name_of_row = _name(tables)
    divided = _divide(names, name_of_row, tables)
    number = {key: i for i, key in enumerate(divided.keys)}
    _check_parts(parts, divided, number)
    pool = _Pool()
    view_of = [pool.add(part) for part in parts]
    _check_views(pool, view_of, divided)
    packs = sorted({key for table in tables for key in table.packs})
    text = [name.encode() for name in names]
    columns: dict[str, npt.NDArray[Any]] = {
        "names": np.frombuffer(b"".join(text), np.uint8),
        "name_ends": np.cumsum([len(one) for one in text], dtype=np.int64),
        **divided.columns,
        "tensor_accelerator": _accelerated(parts, number),
        "owned": np.array([table.owned for table in tables], np.int64),
        "view": np.array(view_of, np.int32),
        "packs": np.frombuffer(canonical(packs), np.uint8),
        "views": np.frombuffer(canonical(pool.to_json()), np.uint8),
    }
    columns = {name: np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
    return Directory(columns, names, *read_views(columns, frozenset(names), "the index", world), tuple(packs))


def _name(tables: Sequence[RankPieces]) -> tuple[tuple[str, ...], list[npt.NDArray[np.int32]]]:
    """All names, sorted, and which of them each row of each table has."""
    seen: dict[str, int] = {}
    known: dict[int, npt.NDArray[np.int32]] = {}  # many ranks share one tuple of names
    for names in (table.names for table in tables):
        if id(names) not in known:
            known[id(names)] = np.array([seen.setdefault(name, len(seen)) for name in names], np.int32)
    ordered = tuple(sorted(seen))
    place = np.empty(len(seen), np.int32)
    place[[seen[name] for name in ordered]] = np.arange(len(seen))
    placed = {key: place[numbers] for key, numbers in known.items()}
    return ordered, [placed[id(table.names)] for table in tables]


@dataclass
class _Divided:
    """The columns about tensors and patterns."""

    columns: dict[str, npt.NDArray[Any]]
    keys: list[Key]
    forms: dict[str, tuple[str, Dims]]  # of what all ranks hold together


class _Patterns:
    """Each way of dividing a tensor, once."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._numbers: dict[bytes, int] = {}
        self._shapes: list[Dims] = []
        self._ranks: list[I64] = []
        self._dims: list[I64] = []

    def add(self, name: str, shape: Dims, ranks: I64, box: I64) -> int:
        """The number of a pattern. CorruptError unless the pieces cover the tensor exactly once."""
        key = repr(shape).encode() + ranks.tobytes() + box.tobytes()
        if key not in self._numbers:
            pattern = Pattern(shape, ranks, box[:, : len(shape)], box[:, len(shape) :])
            check_cover(shape, pattern.boxes(np.arange(len(ranks))), name, self._effort)
            self._numbers[key] = len(self._numbers)
            self._shapes.append(shape)
            self._ranks.append(ranks)
            self._dims.append(box.reshape(-1))
        return self._numbers[key]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "pattern_shape": np.array([n for shape in self._shapes for n in shape], np.int64),
            "pattern_dim_ends": np.cumsum([len(shape) for shape in self._shapes], dtype=np.int64),
            "pattern_ends": np.cumsum([len(one) for one in self._ranks], dtype=np.int64),
            "piece_rank": end_to_end(self._ranks),
            "piece_dims": end_to_end(self._dims),
        }


def _divide(
    names: tuple[str, ...], name_of_row: Sequence[npt.NDArray[np.int32]], tables: Sequence[RankPieces]
) -> _Divided:
    """Gather the pieces of each tensor, some names at a time: all tables in full would take gigabytes."""
    patterns = _Patterns(Effort(Effort.left + 4 * sum(map(len, name_of_row))))
    tensors: list[tuple[int, int, int, int]] = []
    contents: list[bytes] = []
    forms: dict[str, tuple[str, Dims]] = {}
    for rows in _blocks(len(names), name_of_row, tables):
        for name, instance, of in rows.tensors():
            box, dtype, shape = _alike(rows, of, names[name])
            there = rows.rank[of] - max(0, instance)
            if there[0] < 0:  # rows are in the order of the ranks
                raise CorruptError(f"{names[name]}: a rank has a piece of what belongs to higher ranks only")
            tensors.append((name, instance, dtype, patterns.add(names[name], shape, there, box)))
            contents.append(_content(DTYPES[dtype], shape, box, of, rows))
            if instance == GLOBAL:
                forms[names[name]] = DTYPES[dtype], shape
    table = np.array(tensors, np.int64).reshape(-1, 4)
    columns: dict[str, npt.NDArray[Any]] = {
        "tensor_name": table[:, 0],
        "tensor_instance": table[:, 1],
        "tensor_dtype": table[:, 2],
        "tensor_pattern": table[:, 3],
        "tensor_content": np.frombuffer(b"".join(contents), np.uint8),
        **patterns.columns(),
    }
    return _Divided(columns, [(names[name], instance) for name, instance, *_ in tensors], forms)


def _blocks(
    names: int, name_of_row: Sequence[npt.NDArray[np.int32]], tables: Sequence[RankPieces]
) -> Iterator[PieceRows]:
    """All rows of all tables: those of the first names, of the next ones, and so on."""
    each, who = {id(one): one for one in name_of_row}, [id(one) for one in name_of_row]  # many ranks share one
    orders = {key: np.argsort(one, kind="stable") for key, one in each.items()}
    counts = sum(
        (n * np.bincount(each[key], minlength=names) for key, n in Counter(who).items()), np.zeros(names, np.int64)
    )
    which = np.cumsum(counts) // AT_ONCE
    bounds = [*(np.flatnonzero(np.diff(which, prepend=-1))).tolist(), names]
    cuts = {key: np.searchsorted(each[key][order], bounds) for key, order in orders.items()}
    for i in range(len(bounds) - 1):
        rows = {key: order[cuts[key][i] : cuts[key][i + 1]] for key, order in orders.items()}
        named = end_to_end(each[key][rows[key]] for key in who)
        yield PieceRows.of(tables, [rows[key] for key in who], named)


def _alike(rows: PieceRows, of: I64, name: str) -> tuple[I64, int, Dims]:
    """Boxes, dtype and shape of the pieces of one tensor. CorruptError if they are not of one."""
    starts = rows.starts[of]
    lengths = rows.starts[of + 1] - starts
    length = int(lengths[0])
    dtypes, k = rows.dtype[of], length // 3
    dtype = int(dtypes[0])
    wrong = (lengths != length) | (dtypes != dtype)
    if not wrong.any():
        dims = rows.dims[starts[:, None] + np.arange(length)]
        wrong = (dims[:, :k] != dims[0, :k]).any(1)
    if wrong.any():
        one, other = int(of[0]), int(of[int(np.argmax(wrong))])
        shapes = [dims[: len(dims) // 3] for dims in (rows.dims_of(one), rows.dims_of(other))]
        raise CorruptError(
            f"{name} is of shape {shapes[0]} and dtype {DTYPES[dtype]} for one rank, and of "
            f"{shapes[1]} and {DTYPES[rows.dtype[other]]} for rank {rows.rank[other]}: they disagree"
        )
    return np.ascontiguousarray(dims[:, k:]), dtype, tuple(dims[0, :k].tolist())


def _content(dtype: str, shape: Dims, box: I64, of: I64, rows: PieceRows) -> bytes:
    """Equal for tensors that hold the same bytes and are cut alike, whoever has which piece."""
    k = len(shape)
    order = np.lexsort(box[:, :k].T[::-1]) if k else np.arange(len(of))
    counts, first = rows.blobs[of[order]], rows.first[of[order]]
    return blob_digest(
        b"".join(
            (_head(dtype, shape), box[order].tobytes(), counts.tobytes(), rows.digest[spans(first, counts)].tobytes())
        )
    )


@lru_cache(1024)
def _head(dtype: str, shape: Dims) -> bytes:
    return canonical([dtype, list(shape)])


def _check_parts(parts: Sequence[Part], divided: _Divided, number: dict[Key, int]) -> None:
    """What the layouts say of tensors, as far as restoring goes by it."""
    own: dict[int, list[str]] = {}  # the names that are a rank's own, by what was checked
    for part in parts:
        instances, elsewhere = part.layout["instances"], part.layout["elsewhere"]
        if id(instances) not in own:
            own[id(instances)] = [name for name, instance in instances.items() if instance == OWN]
            _check_instances(part.rank, instances.items(), number)
        else:  # word for word the same was right, but for what is the rank's own
            _check_instances(part.rank, ((name, OWN) for name in own[id(instances)]), number)
        if id(elsewhere) not in own:
            own[id(elsewhere)] = []
            _check_elsewhere(part.rank, elsewhere, divided.forms)


def _check_instances(rank: int, instances: Iterable[tuple[str, int]], number: dict[Key, int]) -> None:
    for name, instance in instances:
        if (name, rank if instance == OWN else instance) not in number:
            raise CorruptError(f"{name}: what rank {rank} has of it was saved by nobody")


def _check_elsewhere(rank: int, elsewhere: dict[str, Any], forms: dict[str, tuple[str, Dims]]) -> None:
    for name, (dtype, shape) in elsewhere.items():
        known = forms.get(name)
        if known is not None and known != (dtype, tuple(shape)):
            raise CorruptError(
                f"{name} is of shape {list(shape)} and dtype {dtype} for rank {rank}, and of "
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
            raise CorruptError(f"{name} is not in the state of rank {view[0]}, and others hold it together: {ALL}")


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
        self.alike: list[int] = []  # of each part the rank of the first with the same plain values
        self._known: dict[Any, int] = {}
        self._first: dict[Any, int] = {}

    def add(self, part: Part) -> int:
        """The number of a part's view."""
        layout, rank = part.layout, part.rank
        components = layout["components"]
        if len(components) != len(part.values):
            raise CorruptError(f"the plain values of rank {rank} are not of its layout")
        pairs = [
            (self.components.add(one), self.values.add(value) if one["kind"] == JOINED_KIND else None)
            for one, value in zip(components, part.values, strict=True)
        ]
        own = layout["instances"]
        if rank in own.values():
            own = relative(own, rank)
        aliases, instances = self.aliases.add(layout["aliases"]), self.instances.add(own)
        key = tuple(pairs), aliases, instances
        if key not in self._known:
            self._known[key] = len(self.views)
            self.views.append((rank, pairs, aliases, instances))
        said = tuple(words(v) if n is None else n for (_, n), v in zip(pairs, part.values, strict=True))
        self.alike.append(self._first.setdefault(said, rank))
        return self._known[key]

    def to_json(self) -> dict[str, Any]:
        return {
            "components": self.components.things,
            "values": self.values.things,
            "aliases": self.aliases.things,
            "instances": self.instances.things,
            "views": self.views,
            "alike": self.alike,
        }
