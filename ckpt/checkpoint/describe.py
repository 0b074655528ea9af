"""What a checkpoint consists of, how that is stored, and how two of them differ: plain values, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CorruptError
from ckpt.format import values
from ckpt.format.codec import BF16, CODECS, RAW
from ckpt.format.layout import TensorSpec
from ckpt.format.manifest import Attempt, canonical, owner
from ckpt.format.saved_state import SavedState
from ckpt.format.table import Table

Entries = dict[str, tuple[dict[str, Any], Any]]  # by path: what never changes about it, and its plain values as stored


@dataclass(frozen=True, slots=True)
class Tensor:
    """A name; `alias_of`: the tensor that it shares memory with and under which its bytes are stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class BlobStorage:
    """How some blobs are stored. `stored`: bytes in packs of this checkpoint, each range once; `held`: how many blobs

    are raw, planes (smaller by themselves), delta (the difference to an older one), derived (the rounding of others,
    nothing is stored), reference (in a pack of an older checkpoint, however they are stored there) or "as another" (for
    a tensor that was asked about before, which has the same bytes). `depth`: what has to be decoded first: 0 nothing,
    1 a base or a master, 2 a master that has a base itself. `reads`: bytes that a restore of them reads, each range
    once, with what they are based on.
    """

    stored: int
    held: dict[str, int]
    depth: int
    reads: int


NOTHING = BlobStorage(0, {}, 0, 0)
HELD = ("raw", "planes", "delta", "derived", "reference", "as another")


class Storages:
    """Says of blobs of one table how they are stored."""

    def __init__(self, table: Table, attempt: Attempt) -> None:
        self.table = table
        own = np.array([owner(key) == attempt for key in table.packs], np.bool_)
        self.own = own[table.pack] if len(own) else np.zeros(0, np.bool_)
        forms = np.array(
            [{"none": 1, "same": 2, "master": 3}[CODECS[n].base] if n in CODECS else 0 for n in range(256)]
        )
        forms[RAW] = 0
        self.form = np.where(~self.own & (table.stored > 0), HELD.index("reference"), forms[table.codec])
        self._counted: set[tuple[str, int]] = set()

    def of(self, blobs: list[int]) -> BlobStorage:
        """A range that several tensors share counts as stored for the first that is asked about."""
        table, rows = self.table, np.array(blobs, np.int64)
        forms = self.form[rows]
        forms[[self._is_counted(row) for row in blobs]] = HELD.index("as another")
        counts = np.bincount(forms, minlength=len(HELD)).tolist()
        needed = self._needed(rows)
        depth = 0
        if (table.base[rows] >= 0).any():
            masters = self._needed(rows[table.codec[rows] == BF16])
            depth = 2 if (table.base[masters] >= 0).any() else 1
        everything = np.unique(np.concatenate([rows, needed, self._needed(needed)]))
        return BlobStorage(
            sum(self._new(row) for row in rows[self.own[rows]].tolist()),
            {word: n for word, n in zip(HELD, counts, strict=True) if n},
            depth,
            self.reads(everything),
        )

    def reads(self, rows: npt.NDArray[np.int64]) -> int:
        """Bytes of the ranges of these blobs, each once."""
        table = self.table
        ranges = np.stack([table.pack[rows], table.offset[rows], table.stored[rows]], 1)[table.stored[rows] > 0]
        return int(np.unique(ranges, axis=0)[:, 2].sum())

    def _is_counted(self, row: int) -> bool:
        return bool(self.own[row]) and bool(self.table.stored[row]) and self.table.place(row) in self._counted

    def _new(self, row: int) -> int:
        place, size = self.table.place(row), int(self.table.stored[row])
        if not size or place in self._counted:
            return 0
        self._counted.add(place)
        return size

    def _needed(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        table = self.table
        based = rows[table.base[rows] >= 0]
        derived = based[table.codec[based] == BF16].tolist()
        masters = [np.arange(r.start, r.stop) for r in map(table.needed, derived)]
        return np.concatenate([table.base[based[table.codec[based] != BF16]], *masters]).astype(np.int64)


def used_of(table: Table) -> dict[str, int]:
    """Bytes of each pack that a restore reads, each range once."""
    rows = np.flatnonzero(table.stored > 0)
    ranges = np.unique(np.stack([table.pack[rows], table.offset[rows], table.stored[rows]], 1), axis=0)
    return {
        key: int(ranges[ranges[:, 0] == number, 2].sum())
        for number, key in enumerate(table.packs)
        if (ranges[:, 0] == number).any()
    }


class Reference(str):
    """Stands among plain values for the tensor of that name."""

    __repr__ = str.__str__


def tensors_of(saved: SavedState) -> dict[str, Tensor]:
    """All names, those that stand for another's memory included."""
    specs = {label: saved.tensors[key].spec for label, key in saved.labels.items()}
    known_as = {key: label for label, key in reversed(saved.labels.items())}  # no alias, if it has another name
    return all_names(specs, {label: known_as[key] for label, key in saved.labels.items()})


def all_names(tensors: Mapping[str, TensorSpec], names: Mapping[str, str]) -> dict[str, Tensor]:
    """`names`: of every name, the one under which its tensor is known."""
    found: dict[str, Tensor] = {}
    for name, of in names.items():
        spec = tensors[of]
        found[name] = Tensor(name, spec.dtype, spec.shape, spec.nbytes, None if of == name else of)
    return found


def entries_of(saved: SavedState) -> Entries:
    """What the state consists of, by path; of other ranks than the first only what differs from its entries."""
    found: Entries = {}
    try:
        for rank, component, raw in saved.said():
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
    """The plain values of an entry, decoded, by path; tensors among them as references."""
    facts, raw = entries.get(start, ({}, None))
    if raw is not None or facts.get("kind") == "plain":
        decoded = values.decode(raw, lambda tagged: Reference(f"<{tagged['$']} {tagged['name']}>"))
        yield from leaves(start, decoded, apart)


def leaves(path: str, value: Any, apart: bool) -> Iterator[tuple[str, Any]]:
    """All that is not a container, by path. Flat lists are left whole, unless to be taken apart."""
    nested = isinstance(value, (list, tuple)) and (apart or any(isinstance(v, (dict, list, tuple)) for v in value))
    if not value or not (nested or isinstance(value, dict)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(f"{path}.{key}", item, apart)


def differing_values(a: Entries, b: Entries) -> Iterator[dict[str, Any]]:
    """Plain values that differ, by path."""
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
        if not paths:  # alike in every value and yet not the same: another kind of object, or another order
            yield {"path": start, "only_in": None, "a": a.get(start), "b": b.get(start)}


def jsonable(value: Any) -> Any:
    """The value if JSON can say it, else text."""
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is int:
        return value if abs(value) < 2**53 else hex(value)  # of any length, where decimals have a limit
    return value if value is None or type(value) in (bool, str) else repr(value)
