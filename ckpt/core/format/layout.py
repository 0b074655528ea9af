"""Computes the location of every byte of a snapshot and its data file, as pure values without torch or I/O.

A `Layout` lists the contents of a state, and `arrange` computes the location of each tensor. Snapshots and data files
have the same order, so a snapshot is written to disk as one run of bytes:

    [ header: JSON, padded with spaces to a page ][ tensors of 256-byte lines ][ of 128 ][ of 64 ] ... [ of 1 ]

Tensors are sorted by the largest power of two that divides their size. This order aligns each tensor to that power
without gaps, which the safetensors format forbids. So tensors are aligned to their dtype, and usually to the units of
copy engines and vector instructions. Chunks, the unit of digests, are 4 MiB; the last chunk of a tensor may be smaller.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ckpt.core.format.columns import I64
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import MAX_WORLD, SharedLayout, canonical
from ckpt.errors import CorruptError, StateError
from ckpt.store import PAGE

CHUNK = 4 << 20
LINE = 256  # bytes, the largest alignment
MAX_HEADER = 96 << 20  # bytes; safetensors rejects headers of 100 MB
METADATA, FOR_METADATA = "__metadata__", 1 << 10  # the entry that is not a tensor, and its maximum bytes
MAX_DIMS = 64
OWN = -1  # as an instance in a shared layout: the tensor belongs to the rank itself

# Item size in bits. The second table has dtypes that the safetensors reader lacks; they are stored as bytes (U8).
NATIVE = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
FOREIGN = {"C128": 128, "C32": 32, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4_E2M1X2": 8}
BITS = NATIVE | FOREIGN


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor, or the piece of a tensor that one rank stages.

    `name`: fully qualified. `dtype`: key of `BITS`. `shape`: shape of the piece. `whole`: shape of the tensor, None if
    the piece is all of it. `offsets`: position of the piece. `instance` distinguishes equal names on different ranks
    (see `ckpt.core.format.boxes`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    accelerator: bool = False
    whole: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    instance: int = -1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def full(self) -> tuple[int, ...]:
        return self.shape if self.whole is None else self.whole

    @property
    def at(self) -> tuple[int, ...]:
        return (0,) * len(self.shape) if self.whole is None else self.offsets

    @property
    def key(self) -> str:
        """Return the entry name in a data file: the tensor name, with owning rank and offsets if they are needed."""
        instance = "" if self.instance < 0 else f"#{self.instance}"
        return self.name + instance + ("" if self.whole is None else "@" + ",".join(map(str, self.offsets)))

    def to_json(self) -> list[Any]:
        row = [self.name, self.dtype, list(self.shape), self.accelerator]
        if self.whole is None and self.instance < 0:
            return row
        whole = None if self.whole is None else list(self.whole)
        return [*row, whole, list(self.offsets), self.instance]

    @classmethod
    def from_json(cls, row: Any) -> TensorSpec:
        name, dtype, shape, accelerator, *rest = row
        whole, offsets, instance = rest or (None, (), -1)
        whole = None if whole is None else tuple(whole)
        return cls(str(name), dtype, tuple(shape), bool(accelerator), whole, tuple(offsets), instance)


@dataclass(frozen=True)
class Layout:
    """The contents of one rank's state, and the pieces that this rank stages.

    `tensors` are distinct pieces. `aliases` maps further names to the tensor that they share memory with. `components`
    have the constant facts about each entry of the state (path, kind and others), with the names of all its tensors,
    including tensors that other ranks stage. `instances`: the instances of tensors that are not shared by all ranks.
    `elsewhere`: dtype and shape of shared tensors of which only other ranks stage pieces.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    components: list[dict[str, Any]]
    rank: int = 0
    world: int = 1
    instances: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": [t.to_json() for t in self.tensors],
            "aliases": self.aliases,
            "components": self.components,
            "rank": self.rank,
            "world": self.world,
            "instances": self.instances,
            "elsewhere": {name: [dtype, list(shape)] for name, (dtype, shape) in self.elsewhere.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Layout:
        """Parse the result of `to_json`, and check it with `checked`."""
        try:
            tensors = tuple(TensorSpec.from_json(row) for row in data["tensors"])
            return cls.checked(tensors, data, data["rank"], data["world"], data["instances"], data["elsewhere"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"not a layout: {error}") from None

    @classmethod
    def of_manifest(cls, shared: SharedLayout, rank: int, world: int, tensors: tuple[TensorSpec, ...]) -> Layout:
        """Return the layout of a rank from a manifest, see `shared` and `checked`. `tensors`: from its chunk table."""
        data, staged = shared.data, {t.name for t in tensors}
        instances = {name: rank if instance == OWN else instance for name, instance in data["instances"].items()}
        for t in tensors:
            if t.instance < 0 and data["forms"].get(t.name, [t.dtype, list(t.full)]) != [t.dtype, list(t.full)]:
                raise CorruptError(f"{t.name}: the manifest of rank {rank} gives it two forms")
        elsewhere = {name: form for name, form in data["forms"].items() if name not in staged}
        return cls.checked(tensors, data, rank, world, instances, elsewhere)

    @classmethod
    def checked(
        cls, tensors: tuple[TensorSpec, ...], data: Any, rank: int, world: int, instances: Any, others: Any
    ) -> Layout:
        """Make a layout. Raise CorruptError unless sizes are plausible, pieces are distinct and inside their tensors,
        and aliases refer to tensors."""
        try:
            aliases, components, instances = dict(data["aliases"]), list(data["components"]), dict(instances)
            elsewhere = {str(n): (dtype, tuple(shape)) for n, (dtype, shape) in others.items()}
            check_tensors([*tensors, *(TensorSpec(n, *form) for n, form in elsewhere.items())])
            if (type(rank), type(world)) != (int, int) or not 0 <= rank < world <= MAX_WORLD:
                raise CorruptError(f"a layout has the impossible rank {rank!r:.80} of {world!r:.80}")
            if not all(type(n) is int and 0 <= n < world for n in instances.values()):
                raise CorruptError("a layout has an impossible instance")
            names = {t.name for t in tensors}
            if world > 1:  # only the components name tensors that other ranks stage
                names = names.union(*(c["names"] for c in components)) - aliases.keys()
            check_components(components, names | aliases.keys())
            if len({t.key for t in tensors}) != len(tensors):
                raise CorruptError("a layout names a tensor twice")
            if not all(v in names and k not in names for k, v in aliases.items()):
                raise CorruptError("an alias in a layout refers to no tensor")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"not a layout: {error}") from None
        return cls(tensors, aliases, components, rank, world, instances, elsewhere)

    @cached_property
    def digest(self) -> str:
        return file_digest(canonical(self.to_json()))

    @cached_property
    def shared(self) -> SharedLayout:
        """Return the part of the layout that a manifest has next to the chunk table: aliases, components, instances,
        and `forms` (dtype and shape of tensors that several ranks share). A rank's own tensors have the instance `OWN`.
        The part is equal for all ranks with the same tensors, no matter which rank stages a tensor."""
        forms = {t.name: [t.dtype, list(t.full)] for t in self.tensors if t.instance < 0 and self.world > 1}
        forms |= {name: [dtype, list(shape)] for name, (dtype, shape) in self.elsewhere.items()}
        instances = {name: OWN if instance == self.rank else instance for name, instance in self.instances.items()}
        return SharedLayout(
            {"aliases": self.aliases, "components": self.components, "forms": forms, "instances": instances}
        )

    @cached_property
    def made_of_it(self) -> dict[type, object]:
        """Return a cache of objects that other modules derive from this layout, with their class as key."""
        return {}

    @cached_property
    def sizes(self) -> list[int]:
        """Return the bytes of each tensor."""
        return [t.nbytes for t in self.tensors]

    @cached_property
    def accelerated(self) -> bool:
        """Return True if any tensor is on an accelerator."""
        return any(t.accelerator for t in self.tensors)

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def arrangement(self) -> Arrangement:
        return arrange(self.tensors)


def check_tensors(tensors: Iterable[TensorSpec]) -> None:
    for t in tensors:
        if t.dtype not in BITS:
            raise CorruptError(f"{t.name}: unknown dtype {t.dtype!r}, written by a newer version?")
        if len(t.shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < 2**62 for n in t.shape):
            raise CorruptError(f"{t.name}: impossible shape {t.shape}")
        # Skip dimensions of size 0, because torch multiplies the other dimensions even if the product is 0.
        if math.prod(n for n in t.full if n) * BITS[t.dtype] // 8 >= 2**62:
            raise CorruptError(f"{t.name}: implausible size")
        if t.whole is not None:
            if not len(t.whole) == len(t.offsets) == len(t.shape):
                raise CorruptError(f"{t.name}: the piece and its tensor differ in the number of dimensions")
            places = zip(t.offsets, t.shape, t.whole, strict=True)
            if not all(type(i) is int and type(n) is int and i >= 0 and i + k <= n < 2**62 for i, k, n in places):
                raise CorruptError(f"{t.name}: the piece is outside its tensor")
        if type(t.instance) is not int or not -1 <= t.instance < MAX_WORLD:
            raise CorruptError(f"{t.name}: impossible instance {t.instance!r:.80}")


def check_components(components: list[Any], names: set[str] | frozenset[str] | None) -> None:
    """Raise CorruptError unless each component has a path, a kind, facts, and only tensor names from `names`."""
    for one in components:
        path, own = one["path"], one["names"]
        if type(one["kind"]) is not str or type(one["facts"]) is not dict or type(path) is not list:
            raise CorruptError("a component of a layout has a kind, facts or a path of the wrong type")
        if (
            not all(type(key) in (str, int) for key in path)
            or type(own) is not list
            or not (names is None or names.issuperset(own))
        ):
            raise CorruptError("a component of a layout has an impossible path, or tensors that are not in the layout")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk: `length` bytes at `offset` of the data, in tensor number `tensor`."""

    tensor: int
    offset: int
    length: int


@dataclass(frozen=True)
class Arrangement:
    """The order of tensors in a data file. `order`: tensor numbers. `offsets`: bytes, by tensor number."""

    tensors: tuple[TensorSpec, ...]
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    data_size: int

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(_cut(self))

    @cached_property
    def first_chunk(self) -> dict[int, int]:
        """Return the first chunk of each tensor, by tensor number. Empty tensors have no chunk."""
        found: dict[int, int] = {}
        for number, chunk in enumerate(self.chunks):
            found.setdefault(chunk.tensor, number)
        return found

    @cached_property
    def chunk_starts(self) -> list[int]:
        """Return the number of the first chunk of each tensor, in file order, followed by the total number of
        chunks."""
        return list(itertools.accumulate((-(-self.tensors[i].nbytes // CHUNK) for i in self.order), initial=0))

    @cached_property
    def chunk_columns(self) -> tuple[I64, I64]:
        """Return the offsets and the lengths of all chunks."""
        starts = np.array(self.chunk_starts, np.int64)
        counts = np.diff(starts)
        sizes = np.array([self.tensors[i].nbytes for i in self.order], np.int64)
        ends = np.cumsum(sizes)
        offsets = np.repeat(ends - sizes - starts[:-1] * CHUNK, counts) + np.arange(starts[-1]) * CHUNK
        return offsets, np.minimum(np.repeat(ends, counts) - offsets, CHUNK)

    @cached_property
    def _entries(self) -> bytes:
        """Return the entries of the header as JSON, without the opening brace."""
        return _entries(self)

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the header of a data file: all bytes before the tensor data, padded to whole pages."""
        text = b'{"%s":%s' % (METADATA.encode(), json.dumps(metadata, separators=(",", ":")).encode())
        text += b"," * (len(self._entries) > 1) + self._entries
        size = pages(8 + len(text))
        return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def arrange(tensors: tuple[TensorSpec, ...]) -> Arrangement:
    order = sorted(range(len(tensors)), key=lambda i: (-math.gcd(tensors[i].nbytes, LINE), tensors[i].key))
    offsets = [0] * len(tensors)
    position = 0
    for i in order:
        offsets[i] = position
        position += tensors[i].nbytes
    return Arrangement(tensors, tuple(order), tuple(offsets), position)


def _cut(arrangement: Arrangement) -> Iterator[Chunk]:
    for i in arrangement.order:
        start, size = arrangement.offsets[i], arrangement.tensors[i].nbytes
        for offset in range(0, size, CHUNK):
            yield Chunk(i, start + offset, min(CHUNK, size - offset))


def _entries(arrangement: Arrangement) -> bytes:
    entries: dict[str, Any] = {}
    for i in arrangement.order:
        t, start = arrangement.tensors[i], arrangement.offsets[i]
        dtype, shape = (t.dtype, list(t.shape)) if t.dtype in NATIVE else ("U8", [t.nbytes])
        if t.key in entries:
            raise StateError(f"{t.key!r}: two pieces of the state get this name")
        entries[t.key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + t.nbytes]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER - FOR_METADATA:
        raise StateError(
            f"{len(arrangement.tensors)} tensors are too many for one data file: their header is {len(text)} bytes"
        )
    return text[1:]


def pages(size: int) -> int:
    """Return `size` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
