"""What a directory needs of the part and the table of one rank of thousands, without what most of them say alike.

Thousands of parts and tables as they are read would take gigabytes, and to parse in each what all say in the same
words, minutes. What is shared is to be looked at only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ckpt.core.format.columns import I64, ODD, Bytes, end_to_end, spans, starts_of
from ckpt.core.format.digest import DIGEST_SIZE, blob_digest
from ckpt.core.format.manifest import MAX_WORLD, Part, canonical, parsed, unpressed
from ckpt.core.format.partition import GLOBAL
from ckpt.core.format.rank_index import OWN
from ckpt.core.format.saved_nodes import JOINED_KIND
from ckpt.core.format.table import Table
from ckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy.typing as npt

SMALL = 2**31 - 1


class _Row(msgspec.Struct, array_like=True, gc=False):
    """Of a tensor, see `TensorSpec.to_json`: its name, instance, and whether it was on an accelerator."""

    name: str
    dtype: msgspec.Raw
    shape: msgspec.Raw
    accelerator: bool
    whole: msgspec.Raw = msgspec.Raw()
    offsets: msgspec.Raw = msgspec.Raw()
    instance: int = GLOBAL


class _Fields(msgspec.Struct):
    """Of a layout, most of them as their text."""

    aliases: msgspec.Raw
    components: msgspec.Raw
    elsewhere: msgspec.Raw
    instances: msgspec.Raw
    rank: int
    tensors: list[_Row]


_FIELDS = msgspec.json.Decoder(_Fields)


class Slim:
    """Reads parts of many ranks; what several say in the same words is the same object.

    What comes of them is as good for `format.join_ranks.build` as the whole, and for nothing else: of tensors it
    says which were on an accelerator, of values those that are joined (of others only a digest), of packs nothing.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], Any] = {}
        self._accelerated: dict[frozenset[tuple[str, int]], Any] = {}
        self._names = SharedNames()

    def layout(self, text: str) -> dict[str, Any]:
        """As a part has it. ValueError if it is none."""
        plain = unpressed(text)
        try:
            said = _FIELDS.decode(plain)
            rows = frozenset([(row.name, row.instance) for row in said.tensors if row.accelerator])
        except msgspec.MsgspecError:  # stricter than JSON as Python has it: what is odd is read at leisure
            return self._odd(parsed(plain))
        return {
            "aliases": self._once("aliases", bytes(said.aliases)),
            "components": self._once("components", bytes(said.components)),
            "elsewhere": self._once("elsewhere", bytes(said.elsewhere)),
            "instances": self._instances(bytes(said.instances), said.rank),
            "rank": said.rank,
            "tensors": self._rows(rows),
        }

    def _odd(self, layout: Any) -> dict[str, Any]:
        try:
            rows = frozenset((row[0], row[6] if len(row) > 6 else GLOBAL) for row in layout["tensors"] if row[3])
            instances = relative(layout["instances"], layout["rank"])
            return {**layout, "tensors": self._rows(rows), "instances": instances}
        except ODD as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None

    def _once(self, field: str, text: bytes, parse: Callable[[bytes], Any] = parsed) -> Any:
        if (field, text) not in self._known:
            self._known[field, text] = parse(text)
        return self._known[field, text]

    def _instances(self, text: bytes, rank: int) -> Any:
        """As a view has them, so that ranks that hold the same say the same."""
        own, end = b'":%d' % rank, b'":%d}' % rank
        ours = text[: -len(end)] + b'":%d}' % OWN if text.endswith(end) else text
        found = self._once("instances", ours.replace(own + b',"', b'":%d,"' % OWN), _plain_instances)
        return relative(parsed(text), rank) if found is None or rank in found.values() else found

    def _rows(self, rows: frozenset[tuple[str, int]]) -> Any:
        """As in a layout, each tensor once."""
        if rows not in self._accelerated:
            self._accelerated[rows] = [[name, "", [], True, None, [], instance] for name, instance in sorted(rows)]
        return self._accelerated[rows]

    def part(self, part: Part) -> Part:
        """Of which the layout is one of ours. CorruptError if that is of another rank."""
        if part.layout["rank"] != part.rank:
            raise CorruptError(f"the part of rank {part.rank} has the layout of rank {part.layout['rank']}")
        values, components = part.values, part.layout["components"]
        if len(values) == len(components):  # else whoever joins them says so
            values = [v if c["kind"] == JOINED_KIND else words(v) for v, c in zip(values, components, strict=True)]
        key = ("values", repr(values).encode())
        return replace(part, values=self._known.setdefault(key, values), packs=[], table=b"")

    def pieces(self, table: Table) -> RankPieces:
        return RankPieces.of(table, self._names)


def _plain_instances(text: bytes) -> Any:
    """None unless each number in it is one, whatever was put in the place of some: no name looks like the end of one
    and a number."""
    found = parsed(text)
    if type(found) is not dict:
        raise ValueError("no object")
    plain = all(type(n) is int and name[:1] != ":" and '"' not in name for name, n in found.items())
    return found if plain else None


def words(value: Any) -> bytes:
    """Equal for plain values that are said in the same words: a digest, which a slim part has in their place."""
    return value if type(value) is bytes else blob_digest(canonical(value))


def relative(instances: dict[str, int], rank: int) -> dict[str, int]:
    """As a view has them."""
    return {name: OWN if instance == rank else instance for name, instance in instances.items()}


class SharedNames:
    """Of tensors, each as one object, also where many ranks have them; and columns that are the same for many."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, bytes], npt.NDArray[Any]] = {}
        self._each: dict[str, str] = {}
        self._all: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._same: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # by id, which stays theirs

    def once(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if id(names) not in self._same:
            found = self._all.get(names)
            if found is None:
                found = tuple([self._each.setdefault(name, name) for name in names])
                self._all[found] = found
            self._same[id(names)] = names, found
        return self._same[id(names)][1]

    def column(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._columns.setdefault((numbers.dtype.char, numbers.tobytes()), numbers)


@dataclass(frozen=True, slots=True)
class RankPieces:
    """Of a table: its shards, and the digests of the blobs that each owns, in the narrowest numbers."""

    names: tuple[str, ...]
    rank: int | None  # of all of them, None if there is nothing; -1 if they are not of one
    dtype: npt.NDArray[np.uint8]
    instance: npt.NDArray[np.int32]
    dims: npt.NDArray[Any]
    starts: npt.NDArray[np.int32]  # of each in `dims`, and where the last ends
    blobs: npt.NDArray[np.int32]  # the first of each, and where the last ends
    digest: Bytes
    packs: tuple[str, ...]

    @classmethod
    def of(cls, table: Table, names: SharedNames) -> RankPieces:
        shards = table.columns
        rank = int(shards.rank[0]) if len(shards) else None
        return cls(
            names.once(shards.names),
            rank if rank is None or (shards.rank == rank).all() else -1,
            names.column(shards.dtype.astype(np.uint8)),
            shards.instance.astype(np.int32),
            shards.dims.astype(np.int32) if shards.dims.max(initial=0) <= SMALL else shards.dims,
            names.column(shards.dim_starts.astype(np.int32)),
            names.column(table.starts.astype(np.int32)),
            table.digest[: table.owned],
            table.packs,
        )

    @property
    def owned(self) -> int:
        return len(self.digest)


@dataclass(frozen=True, slots=True)
class PieceRows:
    """Some rows of the pieces of several ranks, rank after rank. `names`: by number; `dims`, `digest`: of row i they
    begin at `starts[i]` and `first[i]`."""

    names: I64
    rank: I64
    dtype: I64
    instance: I64
    dims: I64
    starts: I64
    blobs: I64
    first: I64
    digest: Bytes

    @classmethod
    def of(cls, pieces: Sequence[RankPieces], rows: Sequence[I64], names: I64) -> PieceRows:
        """`rows`: of each of them. `names`: the number of each."""
        both = [(one, chosen) for one, chosen in zip(pieces, rows, strict=True) if len(chosen)]
        known: dict[tuple[int, int], tuple[I64, I64]] = {}  # many ranks share these columns, and the rows of them

        def there(starts: npt.NDArray[Any], chosen: I64) -> tuple[I64, I64]:
            """How many numbers each row has, and where they all are."""
            if (key := (id(starts), id(chosen))) not in known:
                counts = starts[chosen + 1] - starts[chosen]
                known[key] = counts, spans(starts[chosen], counts)
            return known[key]

        lengths, dims_at = zip(*(there(one.starts, chosen) for one, chosen in both), strict=True) if both else ((), ())
        counts, blobs_at = zip(*(there(one.blobs, chosen) for one, chosen in both), strict=True) if both else ((), ())
        dims = [one.dims[places] for (one, _), places in zip(both, dims_at, strict=True)]
        digests = [one.digest[places] for (one, _), places in zip(both, blobs_at, strict=True)]
        blobs = end_to_end(counts)
        return cls(
            names,
            np.repeat([one.rank for one, _ in both], [len(chosen) for _, chosen in both]),
            end_to_end(one.dtype[chosen] for one, chosen in both),
            end_to_end(one.instance[chosen] for one, chosen in both),
            end_to_end(dims),
            starts_of(np.cumsum(end_to_end(lengths))),
            blobs,
            np.cumsum(blobs) - blobs,
            np.concatenate([np.zeros((0, DIGEST_SIZE), np.uint8), *digests]),
        )

    def tensors(self) -> Iterator[tuple[int, int, I64]]:
        """(name, instance, rows) of each, ascending."""
        which = self.names * (MAX_WORLD + 2) + self.instance + 1
        order = np.argsort(which, kind="stable")
        cuts = np.flatnonzero(np.diff(which[order], prepend=-1))
        for rows in np.split(order, cuts[1:]) if len(order) else ():
            yield int(self.names[rows[0]]), int(self.instance[rows[0]]), rows

    def dims_of(self, row: int) -> list[int]:
        found: list[int] = self.dims[self.starts[row] : self.starts[row + 1]].tolist()
        return found
