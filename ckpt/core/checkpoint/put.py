"""Copies verified bytes from read buffers to their final addresses, many pieces per call."""

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
"""`room(blobs)`: the address of memory for the plain bytes of each of these chunks, of exactly their size; 0 for chunks
without such an address."""


def address_of(memory: memoryview) -> int:
    """Return the address of memory. The caller must keep the memory alive."""
    found: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found.ctypes.data


def memory_at(address: int, length: int) -> memoryview:
    """Return the memory at an address. The owner of the address must keep it alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def put(memory: memoryview, starts: I64, lengths: I64, digests: Bytes | None, places: I64) -> list[int]:
    """Copy pieces of `memory` to addresses. Return the numbers of pieces that do not match their digests. The bytes at
    their addresses must not be used.

    `digests`: None if they are unknown.
    """
    base, wrong, library = address_of(memory), list[int](), kernels.find()
    expected = itertools.repeat(None) if digests is None else map(bytes, digests)
    rows = zip(starts.tolist(), lengths.tolist(), places.tolist(), expected, strict=False)
    for i, (start, length, place, digest) in enumerate(rows):
        if digest is not None and length >= kernels.SMALL and library is not None:
            right = library.copy_digest(place, base + start, length) == digest
        elif right := digest is None or blob_digest(memory[start : start + length]) == digest:
            ctypes.memmove(place, base + start, length)  # without the GIL, and while the bytes are in the cache
        if not right:
            wrong.append(i)
    return wrong
