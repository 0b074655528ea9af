"""Copies and digests bytes in one pass over memory, with a small C library if one was compiled.

A restore reads, verifies and copies every byte. `Kernels.copy_digest` copies and verifies without reading memory twice,
and without evicting other data from the caches. With this library, a restore from memory takes about half the time
(docs/figures.md). Without it, xxhash and memmove do the same work. The library is the only C code of this package.

The library is compiled when everystep is installed (hatch_build.py). It is used only if it was compiled from exactly
the source next to this file, and if its results in a test equal those of Python.

`put` copies pieces from read buffers to their final addresses and verifies them, many pieces per call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.core.format.columns import I64, Bytes
from ckpt.core.format.digest import DIGEST_SIZE, chunk_digest
from ckpt.events import log

if TYPE_CHECKING:
    import numpy.typing as npt

SMALL = 4096  # bytes; shorter pieces are copied in Python, because a call costs more than it saves. At least 241

_TRIED = (241, 256, 1024, 1025, 2048, 4099, 12345)  # lengths in bytes that `works` tests


class Kernels:
    """Wraps the functions of a loaded library. Raises AttributeError if the library lacks one of them."""

    def __init__(self, loaded: Any) -> None:
        self._copy_digest = loaded.everystep_copy_digest
        self._copy_digest.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._copy_digest.restype = None

    def copy_digest(self, target: int, source: int, length: int) -> bytes:
        """Copy more than 240 bytes between two addresses, and return their digest. The two ranges must not overlap.

        The GIL is released during the copy.
        """
        digest = ctypes.create_string_buffer(DIGEST_SIZE)
        self._copy_digest(target, source, length, digest)
        return digest.raw


@functools.cache
def find() -> Kernels | None:
    """Load the library that was compiled from this source for this machine. Return None if it does not work."""
    path = library_path()
    try:
        found = Kernels(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        log.info("no compiled library at %s: restores from memory are slower. Install with a C compiler present", path)
        return None
    if not works(found):
        log.warning("the compiled library at %s gives wrong results and is not used: reinstall everystep", path)
        return None
    return found


def library_path() -> Path:
    """Return the path of the compiled library, which may not exist."""
    source = Path(__file__).with_suffix(".c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    return source.with_name(f"kernels-{platform.machine()}-{digest}.so")


def works(library: Kernels) -> bool:
    """Return True if the library copies and digests odd sizes at any address correctly and writes no other memory."""
    noise = np.random.default_rng(0).integers(0, 256, max(_TRIED) + 3, np.uint8)
    return all(_copies(library, noise[at : at + size], at * 21) for size in _TRIED for at in range(3))


def _copies(library: Kernels, source: Any, at: int) -> bool:
    room = np.zeros(len(source) + 128, np.uint8)
    expected = room.copy()
    expected[at : at + len(source)] = source
    digest = library.copy_digest(room.ctypes.data + at, source.ctypes.data, len(source))
    return digest == chunk_digest(source.data) and bool((room == expected).all())


# -- copies to final addresses --


Room = Callable[[I64], I64]
"""`room(chunks)` returns for each chunk the address of memory for its plain bytes, or 0 without such memory."""


def address_of(memory: memoryview) -> int:
    """Return the address of a buffer. The caller must keep the buffer alive."""
    found: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found.ctypes.data


def memory_at(address: int, length: int) -> memoryview:
    """Return a view of the memory at an address. The owner of the memory must keep it alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def put(memory: memoryview, starts: I64, lengths: I64, digests: Bytes | None, places: I64) -> list[int]:
    """Copy pieces of `memory` to addresses. Return the numbers of the pieces that do not match their digests. The bytes
    of these pieces must not be used.

    `digests`: expected digests, None if they are unknown.
    """
    base, wrong, library = address_of(memory), list[int](), find()
    expected = itertools.repeat(None) if digests is None else map(bytes, digests)
    rows = zip(starts.tolist(), lengths.tolist(), places.tolist(), expected, strict=False)
    for i, (start, length, place, digest) in enumerate(rows):
        if digest is not None and length >= SMALL and library is not None:
            right = library.copy_digest(place, base + start, length) == digest
        elif right := digest is None or chunk_digest(memory[start : start + length]) == digest:
            ctypes.memmove(place, base + start, length)  # releases the GIL, and the bytes are still in the cache
        if not right:
            wrong.append(i)
    return wrong
