"""Verified bytes from memory that was read to where they belong, many pieces in one go."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ckpt.core.format import kernels
from ckpt.core.format.columns import I64, Bytes
from ckpt.core.format.digest import blob_digest

Room = Callable[[I64], I64]
"""`room(blobs)`: addresses of memory that shall hold the plain bytes of each of these, all of them and nothing else; 0
for those that have no such place."""


def address_of(memory: memoryview) -> int:
    """Where it lies. It must be held on to as long as that matters."""
    found: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found.ctypes.data


def memory_at(address: int, length: int) -> memoryview:
    """The other way round. Whoever gave the address holds on to it."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def put(memory: memoryview, starts: I64, lengths: I64, digests: Bytes | None, places: I64) -> list[int]:
    """Copy pieces of `memory` to addresses. The numbers of those that are not what their digests say: what lies in
    their places is nothing to be used.

    `digests`: None if nobody knows them.
    """
    base, wrong, library = address_of(memory), list[int](), kernels.find()
    expected = itertools.repeat(None) if digests is None else map(bytes, digests)
    rows = zip(starts.tolist(), lengths.tolist(), places.tolist(), expected, strict=False)
    for i, (start, length, place, digest) in enumerate(rows):
        if digest is not None and length >= kernels.SMALL and library is not None:
            right = library.copy_digest(place, base + start, length) == digest
        elif right := digest is None or blob_digest(memory[start : start + length]) == digest:
            ctypes.memmove(place, base + start, length)  # without the GIL, and while the cache still has it
        if not right:
            wrong.append(i)
    return wrong
