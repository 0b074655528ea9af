"""Loops over large memory in C, or by numpy where that was not compiled: always the same bytes.

    copy(into, data)                 a copy, written past the caches, without reading what was there before
    find().copy_digest_at(...)       such a copy, and the digest of what was copied, in one pass over memory

For much that is not read again soon; then copy and digest together take less time than memcpy does. Buffers are of any
alignment, and must not overlap. The interpreter's lock is let go of, any thread may call, and nothing is kept.

The library is compiled when everystep is installed (hatch_build.py). It is taken only if it was made of the very source
that lies here, and does as Python does when it is tried.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ckpt.core.format.digest import DIGEST_SIZE, blob_digest
from ckpt.errors import UsageError
from ckpt.events import log
from ckpt.store import Buffer

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Array: TypeAlias = "np.ndarray[Any, Any]"

SMALL = 4096  # bytes; less is done without the library, which takes digests of more than 240
WORK = 256 << 10  # bytes that `Kernels.huffman` works in

_TRIED = (241, 256, 1024, 1025, 2048, 4099, 12345)  # bytes


def copy(into: Buffer, data: Buffer) -> None:
    """Copy `data` into memory of the same size. UsageError if the sizes differ, or that must not be written."""
    target, source = np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8)
    if len(target) != len(source) or not target.flags.writeable:
        raise UsageError(f"{len(source)} bytes do not go into {len(target)} that can be written")
    library = find() if len(source) >= SMALL else None
    if library is not None:
        library.copy_streamed(target, source)
    else:
        np.copyto(target, source)


# -- the library --


class Kernels:
    """The functions of a library. AttributeError if it lacks one."""

    def __init__(self, loaded: Any) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._copy_streamed = _declared(loaded.everystep_copy_streamed, pointer, pointer, size)
        self._copy_digest = _declared(loaded.everystep_copy_digest, pointer, pointer, size, pointer, number)
        self._cut = _declared(loaded.everystep_cut, pointer, pointer, size, number, number, pointer, size)
        self._join = _declared(loaded.everystep_join, pointer, pointer, size, number, number, pointer)
        self._round = _declared(loaded.everystep_round, pointer, size, pointer)
        self._is_rounded = _declared(loaded.everystep_is_rounded, pointer, size, pointer, gives=number)
        self._huffman = _declared(loaded.everystep_huffman, pointer, size, pointer, size, pointer, gives=size)

    def copy_streamed(self, target: Bytes, source: Bytes) -> None:
        self._copy_streamed(target.ctypes.data, source.ctypes.data, len(source))

    def copy_digest(self, target: Bytes, source: Bytes, streamed: bool) -> bytes:
        return self.copy_digest_at(target.ctypes.data, source.ctypes.data, len(source), streamed=streamed)

    def copy_digest_at(self, target: int, source: int, length: int, *, streamed: bool) -> bytes:
        """The same of addresses, of more than 240 bytes."""
        digest = ctypes.create_string_buffer(DIGEST_SIZE)
        self._copy_digest(target, source, length, digest, int(streamed))
        return digest.raw

    def cut(self, way: int, words: Array, base: Array | None, planes: Array) -> None:
        """Words, changed as the codec `way` does, into their planes, the rows of `planes`."""
        old = None if base is None else base.ctypes.data
        self._cut(words.ctypes.data, old, len(words), words.itemsize, way, planes.ctypes.data, planes.strides[0])

    def join(self, way: int, planes: Sequence[Array], base: Array | None, words: Array) -> None:
        """Fill `words` with those that `cut` made these planes of."""
        rows = (ctypes.c_void_p * len(planes))(*(plane.ctypes.data for plane in planes))
        old = None if base is None else base.ctypes.data
        self._join(rows, old, len(words), words.itemsize, way, words.ctypes.data)

    def round(self, words: Array, into: Array) -> None:
        """Fill `into` with fp32 words as bf16, to nearest and ties to even, every NaN 0x7fc0: two bytes for four."""
        self._round(words.ctypes.data, words.nbytes // 4, into.ctypes.data)

    def is_rounded(self, words: Array, found: Array) -> bool:
        """Whether `round` would fill it with just that."""
        return bool(self._is_rounded(words.ctypes.data, words.nbytes // 4, found.ctypes.data))

    def huffman(self, plane: Array, into: Array, work: Array) -> int:
        """Fill `into` with a zstd frame of a plane, and say how many bytes it has: 0 if it does not fit, or there are
        bytes above 128. `work`: WORK bytes."""
        return int(self._huffman(plane.ctypes.data, len(plane), into.ctypes.data, len(into), work.ctypes.data))


def _declared(function: Any, *arguments: Any, gives: Any = None) -> Callable[..., Any]:
    function.argtypes, function.restype = arguments, gives
    found: Callable[..., Any] = function
    return found


@functools.cache
def find() -> Kernels | None:
    """The library that was compiled of this source for this machine, if it does as it should."""
    path = library_path()
    try:
        found = Kernels(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        log.info("no compiled kernels at %s: numpy does the same, more slowly. Install with a C compiler at hand", path)
        return None
    return _checked(found, "copy", does_as_python)


def trusted(task: str, does_right: Callable[[Kernels], bool]) -> Kernels | None:
    """The library, if it is there and does a task as numpy does; that it does not is said. Keep what is found."""
    found = find()
    return None if found is None else _checked(found, task, does_right)


def _checked(library: Kernels, task: str, does_right: Callable[[Kernels], bool]) -> Kernels | None:
    if does_right(library):
        return library
    log.warning("the compiled kernels at %s do not %s as numpy does: numpy does it, more slowly", library_path(), task)
    return None


def library_path() -> Path:
    """Where it is, if it was compiled."""
    folder = Path(__file__).parent
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.c")))
    return folder / f"kernels-{platform.machine()}-{hashlib.sha256(source).hexdigest()[:12]}.so"


def does_as_python(library: Kernels) -> bool:
    """Whether copies and digests are right: of odd sizes, from and to any address, and nothing else is written."""
    noise = np.random.default_rng(0).integers(0, 256, max(_TRIED) + 3, np.uint8)
    return all(
        _does_one(library, noise[at : at + size], at * 21, streamed)
        for size in _TRIED
        for at in range(3)
        for streamed in (False, True)
    )


def _does_one(library: Kernels, source: Bytes, at: int, streamed: bool) -> bool:
    room, again = np.zeros(len(source) + 128, np.uint8), np.zeros(len(source) + 128, np.uint8)
    there = slice(at, at + len(source))
    digest = library.copy_digest(room[there], source, streamed)
    library.copy_streamed(again[there], source)
    right = digest == blob_digest(source.data) and bool((room == again).all() and (room[there] == source).all())
    room[there] = 0
    return right and not room.any()
