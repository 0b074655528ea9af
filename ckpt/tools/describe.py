"""Describes the contents and storage of a checkpoint, and differences between two. Plain values, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.core.format import values
from ckpt.core.format.codec import CODECS
from ckpt.core.format.columns import I64
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.manifest import CheckpointId, canonical, owner
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.format.table import Table
from ckpt.errors import CorruptError

Entries = dict[str, tuple[dict[str, Any], Any]]  # by path: its constant facts, and its plain values as stored


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor name. `alias_of`: the tensor that it shares memory with, whose name its bytes are stored under."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class BlobStorage:
    """How some chunks are stored. `stored`: bytes in this checkpoint's data files, each range counted once.

    `held`: number of chunks by form: raw, planes (compressed), delta (compressed difference to an older chunk),
    reference (in a data file of an older checkpoint, in any form) or "as another" (same bytes as an earlier tensor in
    the list). `depth`: 1 if a base must be decoded first, else 0. `reads`: bytes that a restore reads, including bases,
    each range counted once.
    """

    stored: int
    held: dict[str, int]
    depth: int
    reads: int


NOTHING = BlobStorage(0, {}, 0, 0)
HELD = (*CODECS.values(), "reference", "as another")
REFERENCE, AS_ANOTHER = HELD.index("reference"), HELD.index("as another")


class Storages:
    """Sums up how some tensors are stored, from chunk tables. A table has everything that some ranks stored.

    `used`: bytes that a restore reads from each data file, each range counted once.
    """

    def __init__(self, checkpoint: CheckpointId, keys: Iterable[Key]) -> None:
        """Count a range that several tensors share for the first of them in `keys`."""
        self._checkpoint, self._place = checkpoint, {key: i for i, key in enumerate(keys)}
        self._stored, self._reads, self._depth = (np.zeros(len(self._place), np.int64) for _ in range(3))
        self._held = np.zeros((len(self._place), len(HELD)), np.int64)
        self.used: dict[str, int] = {}

    def of(self, key: Key) -> BlobStorage:
        i = self._place[key]
        held = {word: n for word, n in zip(HELD, self._held[i].tolist(), strict=True) if n}
        return BlobStorage(int(self._stored[i]), held, int(self._depth[i]), int(self._reads[i]))

    def add(self, table: Table) -> None:
        """Add a table. Tables have no common ranges, because a rank builds only on its own data files."""
        shards, stored = table.columns, table.stored
        keys = zip(shards.names, shards.instance.tolist(), strict=True)
        tensors = np.repeat(np.array([self._place.get(key, -1) for key in keys], np.int64), np.diff(table.starts))
        rows = np.flatnonzero(tensors >= 0)
        rows = rows[np.argsort(tensors[rows], kind="stable")]
        tensor, ranges = tensors[rows], _ranges(table)
        own = np.array([owner(key) == self._checkpoint for key in table.files], np.bool_)[table.file[rows]]
        there = stored[rows] > 0
        form = np.where(there & ~own, REFERENCE, table.codec[rows])
        anew = np.flatnonzero(there & own)
        _, first, which = np.unique(ranges[rows[anew]], return_index=True, return_inverse=True)
        np.add.at(self._stored, tensor[anew[first]], stored[rows[anew[first]]])
        form[anew[tensor[anew] > tensor[anew[first]][which]]] = AS_ANOTHER
        np.add.at(self._held, (tensor, form), 1)
        self._count_reads(table, rows, tensor, ranges)
        at = np.unique(ranges, return_index=True)[1]
        for key, nbytes in zip(table.files, np.bincount(table.file[at], stored[at], len(table.files)), strict=True):
            if nbytes:
                self.used[key] = self.used.get(key, 0) + int(nbytes)

    def _count_reads(self, table: Table, rows: I64, tensor: I64, ranges: I64) -> None:
        """Count the bytes to read for each tensor, including the bases of its chunks."""
        based = table.base[rows] >= 0
        self._depth[tensor[based]] = 1
        rows, tensor = np.concatenate([rows, table.base[rows[based]]]), np.concatenate([tensor, tensor[based]])
        once = np.unique(tensor * (len(ranges) + 1) + ranges[rows], return_index=True)[1]
        np.add.at(self._reads, tensor[once], table.stored[rows[once]])


def _ranges(table: Table) -> I64:
    """Return for each chunk the number of its byte range."""
    columns = np.stack([table.file, table.offset, table.stored], 1)
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


class Reference(str):
    """Replaces the tensor of this name among plain values."""

    __repr__ = str.__str__


def tensors_of(saved: SavedState) -> dict[str, Tensor]:
    """Return the tensors of all names, including aliases."""
    specs = {label: saved.tensors[key].spec for label, key in saved.labels.items()}
    known_as = {key: label for label, key in reversed(saved.labels.items())}  # a name before its aliases
    return all_names(specs, {label: known_as[key] for label, key in saved.labels.items()})


def all_names(tensors: Mapping[str, TensorSpec], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of all names. `names`: the main name for each name."""
    found: dict[str, Tensor] = {}
    for name, of in names.items():
        spec = tensors[of]
        found[name] = Tensor(name, spec.dtype, spec.shape, spec.nbytes, None if of == name else of)
    return found


def entries_of(saved: SavedState, wanted: Callable[[str], bool] = lambda path: True, *, once: bool = False) -> Entries:
    """Return the wanted entries of the state, by path. Other ranks' entries are included only if they differ from the
    first rank's, and with `once` never."""
    found: Entries = {}
    try:
        for rank, component, raw in saved.said(lambda path: wanted(values.show(path)), once=once):
            facts = {key: value for key, value in component.items() if key != "names"}
            path = values.show(tuple(component["path"]))
            if path not in found:
                found[path] = (facts, raw)
            elif canonical(raw) != canonical(found[path][1]):
                found[f"{path} (rank {rank})"] = (facts, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"its layout is damaged: {error}") from None
    return found


def leaves_of(entries: Entries, start: str, *, apart: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the decoded plain values of an entry, by path. Tensors among them become references."""
    facts, raw = entries.get(start, ({}, None))
    if raw is not None or facts.get("kind") == "plain":
        decoded = values.decode(raw, _shown)
        yield from leaves(start, decoded, apart)


def _shown(tagged: dict[str, Any]) -> object:
    """Return a replacement for a value that is not plain: a text, or the attributes of an object."""
    found = [tagged[key] for key in ("attributes", "state") if key in tagged]
    if tagged["$"] == "namedtuple" or found:
        return found[0] if found else tagged["v"]
    return Reference(f"<{tagged['$']} {tagged['name'] if 'name' in tagged else tagged['v']}>")


def leaves(path: str, value: Any, apart: bool) -> Iterator[tuple[str, Any]]:
    """Yield all values except containers, by path. Flat lists stay whole unless `apart` is True."""
    nested = isinstance(value, (list, tuple)) and (apart or any(isinstance(v, (dict, list, tuple)) for v in value))
    if not value or not (nested or isinstance(value, dict)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(f"{path}.{key}", item, apart)


def differing_values(a: Entries, b: Entries) -> Iterator[dict[str, Any]]:
    """Yield the plain values that differ, by path."""
    for start in dict.fromkeys([*a, *b]):
        if start in a and start in b and canonical(a[start]) == canonical(b[start]):
            continue
        here, there = [
            {path: (type(v).__name__, jsonable(v)) for path, v in leaves_of(e, start, apart=True)} for e in (a, b)
        ]
        paths = [path for path in dict.fromkeys([*here, *there]) if here.get(path) != there.get(path)]
        for path in paths:
            only_in = None if path in here and path in there else "a" if path in here else "b"
            sides = {side: found.get(path, ("", None))[1] for side, found in (("a", here), ("b", there))}
            yield {"path": path, "only_in": only_in, **sides}
        if not paths:  # equal values, but another kind of object or another order
            yield {"path": start, "only_in": None, "a": a.get(start), "b": b.get(start)}


def jsonable(value: Any) -> Any:
    """Return the value if JSON can represent it, else a text."""
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is int:
        return value if abs(value) < 2**53 else hex(value)  # Python limits the length of decimals, but not of hex
    return value if value is None or type(value) in (bool, str) else repr(value)
