"""Describes the contents and storage of a checkpoint, and the differences between two. Does not import torch."""

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

Entries = dict[str, tuple[dict[str, Any], Any]]  # by path of the entry: its constant facts, its stored plain values


@dataclass(frozen=True, slots=True)
class Tensor:
    """One name of a tensor. `alias_of`: the main name of the tensor, if this name is an alias."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class BlobStorage:
    """How some chunks are stored. `stored`: bytes in this checkpoint's data files; each range counts once.

    `held`: number of chunks by form: raw, planes (compressed), delta (compressed difference from an older chunk),
    reference (in a data file of an older checkpoint, in any form), or "as another" (same bytes as an earlier tensor in
    the list). `depth`: 1 if a base must be decoded first, else 0. `reads`: bytes that a restore reads, including bases;
    each range counts once.
    """

    stored: int
    held: dict[str, int]
    depth: int
    reads: int


NOTHING = BlobStorage(0, {}, 0, 0)
HELD = (*CODECS.values(), "reference", "as another")
REFERENCE, AS_ANOTHER = HELD.index("reference"), HELD.index("as another")


class Storages:
    """Counts how tensors are stored, from chunk tables. Each table has all chunks of some ranks.

    `used`: bytes that a restore reads from each data file; each range counts once.
    """

    def __init__(self, checkpoint: CheckpointId, keys: Iterable[Key]) -> None:
        """`keys`: the tensors. A range that several tensors share counts for the first of them in this order."""
        self._checkpoint, self._place = checkpoint, {key: i for i, key in enumerate(keys)}
        self._stored, self._reads, self._depth = (np.zeros(len(self._place), np.int64) for _ in range(3))
        self._held = np.zeros((len(self._place), len(HELD)), np.int64)
        self.used: dict[str, int] = {}

    def of(self, key: Key) -> BlobStorage:
        i = self._place[key]
        held = {word: n for word, n in zip(HELD, self._held[i].tolist(), strict=True) if n}
        return BlobStorage(int(self._stored[i]), held, int(self._depth[i]), int(self._reads[i]))

    def add(self, table: Table) -> None:
        """Add a chunk table. Two tables never share a range, because a rank refers only to its own data files."""
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
        """Count the bytes that a restore reads for each tensor, including the bases of its chunks."""
        based = table.base[rows] >= 0
        self._depth[tensor[based]] = 1
        rows, tensor = np.concatenate([rows, table.base[rows[based]]]), np.concatenate([tensor, tensor[based]])
        once = np.unique(tensor * (len(ranges) + 1) + ranges[rows], return_index=True)[1]
        np.add.at(self._reads, tensor[once], table.stored[rows[once]])


def _ranges(table: Table) -> I64:
    """Return for each chunk a number that identifies its byte range."""
    columns = np.stack([table.file, table.offset, table.stored], 1)
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


class Reference(str):
    """The name of a tensor, in place of the tensor in plain values."""

    __repr__ = str.__str__


def tensors_of(saved: SavedState) -> dict[str, Tensor]:
    """Return all tensor names with their tensors, including aliases."""
    specs = {label: saved.tensors[key].spec for label, key in saved.labels.items()}
    known_as = {key: label for label, key in reversed(saved.labels.items())}  # main names precede aliases
    return all_names(specs, {label: known_as[key] for label, key in saved.labels.items()})


def all_names(tensors: Mapping[str, TensorSpec], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return all tensor names with their tensors. `names`: the main name for each name."""
    found: dict[str, Tensor] = {}
    for name, of in names.items():
        spec = tensors[of]
        found[name] = Tensor(name, spec.dtype, spec.shape, spec.nbytes, None if of == name else of)
    return found


def entries_of(saved: SavedState, wanted: Callable[[str], bool] = lambda path: True, *, once: bool = False) -> Entries:
    """Return the wanted entries of the state, by path. Entries of other ranks are included only if they differ from the
    first rank's. With `once`, they are never included."""
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
    """Yield the decoded plain values of an entry, by path, with a `Reference` in place of each tensor."""
    facts, raw = entries.get(start, ({}, None))
    if raw is not None or facts.get("kind") == "plain":
        decoded = values.decode(raw, _shown)
        yield from leaves(start, decoded, apart)


def _shown(tagged: dict[str, Any]) -> object:
    """Return a substitute for a value that is not plain: a text, or the attributes of an object."""
    found = [tagged[key] for key in ("attributes", "state") if key in tagged]
    if tagged["$"] == "namedtuple" or found:
        return found[0] if found else tagged["v"]
    return Reference(f"<{tagged['$']} {tagged['name'] if 'name' in tagged else tagged['v']}>")


def leaves(path: str, value: Any, apart: bool) -> Iterator[tuple[str, Any]]:
    """Yield all values that are not containers, by path. A flat list counts as one value unless `apart` is True."""
    nested = isinstance(value, (list, tuple)) and (apart or any(isinstance(v, (dict, list, tuple)) for v in value))
    if not value or not (nested or isinstance(value, dict)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(f"{path}.{key}", item, apart)


def differing_values(a: Entries, b: Entries) -> Iterator[dict[str, Any]]:
    """Yield each path at which the plain values differ, with both values."""
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
        if not paths:  # the values are equal, but the kind of object or the order differs
            yield {"path": start, "only_in": None, "a": a.get(start), "b": b.get(start)}


def jsonable(value: Any) -> Any:
    """Return the value if JSON can represent it, otherwise a text."""
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is int:
        return value if abs(value) < 2**53 else hex(value)  # hex, because Python limits the length of decimal numbers
    return value if value is None or type(value) in (bool, str) else repr(value)
