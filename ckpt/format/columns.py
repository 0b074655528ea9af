"""Columns of numbers out of files that anybody may have written: each is checked before anything is allocated by it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import zstandard

from ckpt.errors import CorruptError
from ckpt.format.digest import DIGEST_SIZE
from ckpt.format.manifest import owner

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
ZERO = np.zeros(1, np.int64)
NONE = np.zeros(0, np.int64)

ODD = (KeyError, ValueError, TypeError, IndexError, OverflowError, AttributeError, RecursionError)
"""What comes of data of another shape than expected."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """CorruptError for whatever is wrong with a file that is read here."""
    try:
        yield
    except (safetensors.SafetensorError, zstandard.ZstdError, *ODD) as error:
        raise CorruptError(f"{what} is damaged: {error}") from None


class Columns:
    """The columns of a file, by name; `what` it is called. CorruptError unless they are as they are asked for."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]], what: str) -> None:
        self._columns, self._what = columns, what

    def numbers(self, name: str, count: int, low: int = 0, high: int = 2**62) -> I64:
        """So many, none of them beyond these limits."""
        column = self._columns[name].astype(np.int64, casting="safe", copy=False)
        if column.shape != (count,) or (count and (column.min() < low or column.max() > high)):
            raise CorruptError(f"{self._what}: column {name} is out of range")
        return column

    def ends(self, name: str, count: int, total: int) -> I64:
        """Where each of so many ends, of something of this length."""
        column = self.numbers(name, count, 0, total)
        if (np.diff(column) < 0).any() or (int(column[-1]) if count else 0) != total:
            raise CorruptError(f"{self._what}: column {name} does not add up")
        return column

    def digests(self, name: str, count: int) -> Bytes:
        column: Bytes = self._columns[name]
        if column.dtype != np.uint8 or column.shape != (count, DIGEST_SIZE):
            raise CorruptError(f"{self._what}: column {name} is out of range")
        return column

    def packs(self) -> tuple[str, ...]:
        """The keys of packs, as JSON."""
        found = json.loads(self._columns["packs"].tobytes())
        if type(found) is not list or not all(type(k) is str and owner(k) and k.startswith("packs/") for k in found):
            raise CorruptError(f"{self._what}: names impossible packs")
        return tuple(found)


def starts_of(ends: I64) -> I64:
    """Where each begins, and where the last ends."""
    return np.concatenate([ZERO, ends])
