"""Reads and writes files of number columns, and compares digests of replicated tensors to find ranks that differ.

A column file is a safetensors file with a zstd frame for each column. Its entry `counts` (JSON) has the number of
values of each column. Columns of digests are not compressed, because they do not become smaller. The files are
untrusted, so every size is checked before memory is allocated for it.

Each rank stages a slice of a replicated tensor. If the ranks' copies of the tensor differ, the slices would form a
tensor that no rank had. A manifest therefore has digests of the whole tensors, as `{"sums": {group: digest}, "rows":
text}`. A group is the set of ranks with the same tensors. The rows (compressed JSON) are read only if the sums differ.
Each group has a list of `[name, instance, offsets, elements, digest]`; `elements` identifies the elements that were
digested. Two rows can be compared if all their fields except the digest are equal.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import safetensors
import zstandard

from ckpt.core.format.digest import DIGEST_SIZE, file_digest
from ckpt.core.format.manifest import canonical, is_data, press, unpress
from ckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy.typing as npt


I64: TypeAlias = "npt.NDArray[np.int64]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
FEW = 1 << 18  # a column may have this many entries, plus one for each stored byte of the file

ODD = (KeyError, ValueError, TypeError, IndexError, OverflowError, AttributeError, RecursionError)
"""Exceptions that parsing raises for data of an unexpected structure."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Convert any parse error while a file is read into a CorruptError."""
    try:
        yield
    except (safetensors.SafetensorError, zstandard.ZstdError, *ODD) as error:
        raise CorruptError(f"{what} is damaged: {error}") from None


@dataclass(frozen=True)
class ColumnFile:
    """Converts columns of numbers to the bytes of a file, and back.

    `kinds`: numpy dtype of each column, by name. `most`: maximum decompressed bytes of all columns together. `rows`:
    columns with one value for each object that a reader creates. `spoken`: columns that contain JSON text. `whole`:
    columns that are stored uncompressed. `folds`: maximum ratio of decompressed to stored bytes.
    """

    kinds: Mapping[str, Any]
    most: int
    rows: tuple[str, ...]
    spoken: tuple[str, ...]
    whole: tuple[str, ...] = ()
    folds: int = 256

    def to_bytes(self, columns: Mapping[str, npt.NDArray[Any]]) -> bytes:
        press = zstandard.ZstdCompressor(level=3, write_content_size=True)
        files = {"counts": np.frombuffer(canonical({n: c.size for n, c in columns.items()}), np.uint8)}
        for name, column in columns.items():
            raw = np.ascontiguousarray(column).tobytes()
            files[name] = np.frombuffer(raw if name in self.whole else press.compress(raw), np.uint8)
        return bytes(_arrays().save(files))

    def from_bytes(self, raw: bytes | memoryview, what: str) -> dict[str, npt.NDArray[Any]]:
        """Return the columns by name. Call it inside `with reading(what)`. Raise CorruptError for a wrong size."""
        frames = _arrays().load(bytes(raw))
        counts = json.loads(frames.pop("counts").tobytes())
        if counts.keys() != self.kinds.keys() or frames.keys() != self.kinds.keys():
            raise CorruptError(f"{what} does not have the expected columns")
        if not all(type(n) is int and 0 <= n <= self.most for n in counts.values()):
            raise CorruptError(f"{what} declares impossible sizes")
        sizes = {name: n * np.dtype(self.kinds[name]).itemsize for name, n in counts.items()}
        stored = {name: frames[name].reshape(-1).view(np.uint8).tobytes() for name in sizes}
        few = FEW + sum(map(len, stored.values()))
        if sum(sizes.values()) > min(self.most, self.folds * few):
            raise CorruptError(f"{what} declares {sum(sizes.values())} bytes, which is implausibly large")
        if max(counts[name] for name in self.rows) > few:
            raise CorruptError(f"{what} declares more items than fit into a file of its size")
        for name, size in sizes.items():
            if size != (len(stored[name]) if name in self.whole else zstandard.frame_content_size(stored[name])):
                raise CorruptError(f"{what}: column {name} does not have the declared size")
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        found = {}
        for name, size in sizes.items():
            plain = stored[name]
            if name not in self.whole:
                plain = reader.decompress(plain, max_output_size=size, allow_extra_data=False)
            if len(plain) != size:
                raise CorruptError(f"{what}: column {name} does not have the declared size")
            found[name] = np.frombuffer(plain, self.kinds[name])
            # A few bytes of JSON may expand to very many objects.
            if name in self.spoken and sum(plain.count(mark) for mark in b",[{") > 8 * few:
                raise CorruptError(f"{what}: column {name} has more values than fit into a file of its size")
        return found


class Columns:
    """Checks and returns the columns of a file. `what`: name of the file in errors. Raises CorruptError."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]], what: str) -> None:
        self._columns, self._what = columns, what

    def numbers(self, name: str, count: int, low: int = 0, high: int = 2**62) -> I64:
        """Return a column of `count` numbers, all between `low` and `high`."""
        column = self._columns[name].astype(np.int64, casting="safe", copy=False)
        above = column - low if low else column
        # As unsigned numbers, values below `low` are larger than all others, so one comparison is enough.
        if column.shape != (count,) or (count and int(above.view(np.uint64).max()) > high - low):
            raise CorruptError(f"{self._what}: column {name} is out of range")
        return column

    def ends(self, name: str, count: int, total: int) -> I64:
        """Return a column of `count` ascending end positions. The last position is `total`."""
        column = self.numbers(name, count, 0, total)
        if (np.diff(column) < 0).any() or (int(column[-1]) if count else 0) != total:
            raise CorruptError(f"{self._what}: the end positions in column {name} do not ascend to {total}")
        return column

    def digests(self, name: str, count: int) -> Bytes:
        column: Bytes = self._columns[name]
        if column.dtype != np.uint8 or column.shape != (count, DIGEST_SIZE):
            raise CorruptError(f"{self._what}: column {name} is out of range")
        return column

    def files(self) -> tuple[str, ...]:
        """Return the keys of the data files."""
        found = json.loads(self._columns["files"].tobytes())
        if type(found) is not list or not all(type(k) is str and is_data(k) for k in found):
            raise CorruptError(f"{self._what} names impossible data files")
        return tuple(found)


def _arrays() -> Any:
    """Import and return the module that converts numpy arrays to safetensors files."""
    import safetensors.numpy

    return safetensors.numpy


def distinct(numbers: I64) -> I64:
    """Return the distinct numbers, ascending. (`np.unique` would import modules that are not needed otherwise.)"""
    ordered = np.sort(numbers)
    found: I64 = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
    return found


def end_to_end(columns: Iterable[Any]) -> I64:
    """Concatenate columns. The list of columns may be empty."""
    return np.concatenate([np.zeros(0, np.int64), *columns])


def starts_of(ends: I64) -> I64:
    """Return the start of each item, followed by the end of the last item."""
    return end_to_end([[0], ends])


def spans(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> I64:
    """Concatenate ranges of positions. Range i consists of `counts[i]` consecutive positions from `starts[i]`."""
    ends = np.cumsum(counts, dtype=np.int64)
    found: I64 = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)
    return found


# -- digests of replicated tensors --


Row = tuple[str, int, tuple[int, ...], str, str]
Replicas = dict[str, Any]
"""The digests of replicated tensors in a manifest: `sums` and `rows`, see above."""

DIFFER = "different values of replicated tensors"  # the trainer looks for this text in the error of a failed save
SHOWN = 5  # maximum number of names in a message


def replicas(rows: Mapping[tuple[int, ...], list[Row]]) -> Replicas:
    """Return the digests of replicated tensors for a manifest. `rows`: the rows of each group of ranks."""
    if not rows:
        return {}
    named = {file_digest(canonical(list(ranks)))[:16]: sorted(found) for ranks, found in rows.items()}
    sums = {group: file_digest(canonical(found))[:16] for group, found in named.items()}
    return {"sums": sums, "rows": press(canonical(named))}


def differing(saved: Iterable[tuple[int, Replicas]]) -> dict[str, list[int]]:
    """Return the tensors that differ between ranks, each with all ranks that have the tensor. `saved`: digests by rank.

    Raise CorruptError if a rank's digests are malformed.
    """
    try:
        digested = [(rank, one) for rank, one in saved if one]
        sums: dict[str, set[str]] = {}
        for _, one in digested:
            for group, digest in one["sums"].items():
                sums.setdefault(group, set()).add(digest)
        odd = {group for group, digests in sums.items() if len(digests) > 1}
        seen: dict[tuple[Any, ...], dict[str, list[int]]] = {}
        for rank, one in digested:
            if not odd.isdisjoint(one["sums"]):
                rows = unpress(one["rows"])
                for group in odd & rows.keys():
                    for name, instance, offsets, elements, digest in rows[group]:
                        label = str(name), instance, tuple(offsets), elements, group
                        seen.setdefault(label, {}).setdefault(digest, []).append(rank)
    except ODD as error:
        raise CorruptError(f"the digests of replicated tensors in a manifest are damaged: {error!r}") from error
    found: dict[str, set[int]] = {}
    for (name, *_), digests in seen.items():
        if len(digests) > 1:
            found.setdefault(name, set()).update(rank for ranks in digests.values() for rank in ranks)
    return {name: sorted(ranks) for name, ranks in sorted(found.items())}


def in_words(found: Mapping[str, list[int]]) -> str:
    """Return a message that lists the tensors and the ranks, and names the remedy."""
    names = ", ".join([*list(found)[:SHOWN], *([f"{len(found) - SHOWN} more"] if len(found) > SHOWN else [])])
    ranks = sorted({rank for each in found.values() for rank in each})
    listed = ", ".join([*map(str, ranks[:8]), *(["…"] if len(ranks) > 8 else [])])
    return (
        f"ranks {listed} have {DIFFER}: {names}. A checkpoint would mix them. Find out why the ranks differ "
        "(no_sync(), an unequal number of steps, a faulty device) or synchronize them before saving"
    )
