"""Words turned, cut into byte planes and joined again: by blosc2's library if that is installed, or else by numpy.

Plane k holds byte k of every word: the planes of 3 words of 4 bytes, 0123 4567 89ab, are 048 159 26a 37b. Both ways
give the same bytes; the library, which python-blosc2 brings along, is several times as fast. It is called directly:
importing the package costs more time than it saves. Any thread may call what is here; each has its own work space.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.format.kernels import Kernels

Array = np.ndarray[Any, Any]

PIECE = 256 << 10  # bytes at most; a piece and what becomes of it stay in a core's own cache
UNSIGNED: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

_SIGNED: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_MOST = (1 << 31) - 1  # bytes that the library takes
_TRIED = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 1000, 4099)  # words


def at_a_time(word: int, count: int) -> int:
    """How many of so many words to `split` or `merge` in one go: by numpy a piece, by the library all of them."""
    return PIECE // word if find_library() is None or word * count > _MOST else max(count, 1)


def split(words: Array, planes: Array) -> None:
    """Cut words into their planes, the rows of `planes`, the lowest first."""
    library = _library_for(words, planes)
    if library is None:
        _cut(words, planes)
    else:
        library.shuffle(words, planes)


def merge(planes: Sequence[Array], rows: Array, words: Array) -> None:
    """Fill `words` with those that `split` cut into these planes. `rows`: space for them; some may be there already."""
    library = _library_for(words, rows)
    if library is None:
        _join(planes, words)
        return
    for plane, row in zip(planes, rows, strict=True):
        if plane.base is not row.base:
            np.copyto(row, plane)
    library.unshuffle(rows, words)


# -- work space --


class _Rooms(threading.local):
    """What each thread has for itself: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, int], Array] = {}

    def room(self, number: int, word: int, count: int) -> Array:
        found = self._rooms.get((number, word))
        if found is None:
            found = self._rooms[number, word] = np.empty(PIECE // word, UNSIGNED[word])
        return found[:count]


_rooms = _Rooms()


def room(number: int, word: int, count: int) -> Array:
    """Work space of this thread for so many words of a piece, until it is asked for again.

    Numbers: 0 and 1 are used by `split` and `merge` themselves.
    """
    return _rooms.room(number, word, count)


# -- by numpy --
#
# Words are cut in half, and those again: numpy narrows and widens integers several times faster than it picks every
# second or fourth byte.


def _cut(words: Array, planes: Array) -> None:
    half = words.itemsize // 2
    if not half:
        np.copyto(planes[0], words)
        return
    upper = room(1, words.itemsize, len(words))
    np.right_shift(words, 8 * half, out=upper)
    _narrow(words, planes[:half])
    _narrow(upper, planes[half:])


def _narrow(words: Array, planes: Array) -> None:
    """Cut the lower half of every word into planes."""
    part = planes[0] if len(planes) == 1 else room(0, len(planes), len(words))
    np.copyto(part, words, casting="unsafe")
    if len(planes) > 1:
        _cut(part, planes)


def _join(planes: Sequence[Array], words: Array) -> None:
    half = len(planes) // 2
    if not half:
        np.copyto(words, planes[0])
        return
    spare = room(1, words.itemsize, len(words))
    np.copyto(words, _half(planes[half:], len(words)))
    shift_left(words, 8 * half, words)
    np.copyto(spare, _half(planes[:half], len(words)))
    np.bitwise_or(words, spare, out=words)


def _half(planes: Sequence[Array], count: int) -> Array:
    """Words as wide as there are planes, in work space."""
    if len(planes) == 1:
        return planes[0]
    found = room(0, len(planes), count)
    _join(planes, found)
    return found


def shift_left(words: Array, bits: int, into: Array) -> None:
    if words.itemsize > 2:
        np.left_shift(words, bits, out=into)
    else:
        np.multiply(words, 1 << bits, out=into)  # processors have no shift for many narrow words at once


# -- by blosc2 --


@dataclass(frozen=True, slots=True)
class Library:
    """Two functions of blosc2's: (bytes of a word, bytes, from, to) -> bytes done."""

    shuffling: Callable[[int, int, int, int], int]
    unshuffling: Callable[[int, int, int, int], int]

    def shuffle(self, words: Array, planes: Array) -> None:
        """`planes`: one row each, in one piece of memory."""
        self._call(self.shuffling, words.itemsize, words, planes)

    def unshuffle(self, planes: Array, words: Array) -> None:
        self._call(self.unshuffling, words.itemsize, planes, words)

    @staticmethod
    def _call(function: Callable[[int, int, int, int], int], word: int, source: Array, into: Array) -> None:
        done = function(word, source.nbytes, source.ctypes.data, into.ctypes.data)
        if done != source.nbytes:
            raise RuntimeError(f"blosc2 has shuffled {done} of {source.nbytes} bytes")


@functools.cache
def find_library() -> Library | None:
    """The library of an installed blosc2 that does as numpy does, or None."""
    for path in _library_files():
        try:
            loaded = ctypes.CDLL(str(path))
            found = Library(_declared(loaded.blosc2_shuffle), _declared(loaded.blosc2_unshuffle))
        except (OSError, AttributeError):  # of another machine, or older than these functions
            continue
        if does_as_numpy(found):
            return found
    return None


def _library_for(words: Array, planes: Array) -> Library | None:
    """It takes planes that lie side by side in one piece of memory, as many bytes as a C int can say."""
    possible = words.itemsize > 1 and words.nbytes <= _MOST
    return find_library() if possible and words.flags.c_contiguous and planes.flags.c_contiguous else None


def _library_files() -> list[Path]:
    try:
        spec = importlib.util.find_spec("blosc2")
    except (ImportError, ValueError):
        return []
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    folders = [root / name for root in roots for name in ("lib", "lib64")]
    return [path for folder in folders for path in sorted(folder.glob("libblosc2.so*"))]


def _declared(function: Any) -> Callable[[int, int, int, int], int]:
    function.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int32
    found: Callable[[int, int, int, int], int] = function
    return found


def does_as_numpy(library: Library) -> bool:
    """Whether it cuts and joins as numpy does: words of all sizes, and numbers of them that fill no register."""
    noise = np.random.default_rng(0).integers(0, 256, 8 * max(_TRIED), np.uint8)
    try:
        return all(_does_one(library, noise[: w * count].view(UNSIGNED[w])) for w in (2, 4, 8) for count in _TRIED)
    except RuntimeError:
        return False


def _does_one(library: Library, words: Array) -> bool:
    planes = np.ascontiguousarray(words.view(np.uint8).reshape(len(words), words.itemsize).T)
    cut, joined = np.zeros_like(planes), np.zeros_like(words)
    library.shuffle(words, cut)
    library.unshuffle(planes, joined)
    return bool((cut == planes).all() and (joined == words).all())


# -- what becomes of words before they are cut, in pieces of at most PIECE bytes: rotated, differences, roundings --


def forward(words: Array, base: Array | None, found: Array, *, floats: bool) -> None:
    """Fill `found` with a piece's words as they are cut into planes: rotated, or the differences to those of a base.

    `floats`: they are taken in the order of the numbers that they stand for.
    """
    spare = _like(1, words)
    last = 8 * words.itemsize - 1
    if base is None:  # rotated
        shift_left(words, 1, found)
        np.right_shift(words, last, out=spare)
        np.bitwise_or(found, spare, out=found)
        return
    difference = _like(2, words)
    if floats:
        _order(words, found, spare)
        _order(base, difference, spare)
        np.subtract(found, difference, out=difference)
    else:
        np.subtract(words, base, out=difference)
    np.right_shift(_signed(difference), last, out=_signed(spare))
    shift_left(difference, 1, found)
    np.bitwise_xor(found, spare, out=found)


def backward(words: Array, base: Array | None, *, floats: bool) -> None:
    """Turn what `forward` made of a piece's words into those again."""
    spare = _like(1, words)
    if base is None:  # rotated
        np.right_shift(words, 1, out=spare)
        shift_left(words, 8 * words.itemsize - 1, words)
        np.bitwise_or(words, spare, out=words)
        return
    np.bitwise_and(words, 1, out=spare)
    np.negative(spare, out=spare)
    np.right_shift(words, 1, out=words)
    np.bitwise_xor(words, spare, out=words)
    if floats:
        ordered = _like(2, words)
        _order(base, ordered, spare)
        np.add(words, ordered, out=words)
        _order(words, words, spare)
    else:
        np.add(words, base, out=words)


def _order(words: Array, into: Array, spare: Array) -> None:
    """Float bits as signed integers in the order of the numbers, and back: it is its own inverse."""
    np.right_shift(_signed(words), 8 * words.itemsize - 1, out=_signed(spare))
    np.right_shift(spare, 1, out=spare)
    np.bitwise_xor(words, spare, out=into)


def _like(number: int, like: Array) -> Array:
    return room(number, like.itemsize, len(like))


def _signed(words: Array) -> Array:
    found: Array = words.view(_SIGNED[words.itemsize])
    return found


def rounded(master: Array, words: Array) -> Iterator[tuple[Array, Array]]:
    """fp32 bits as bf16 bits, to nearest and ties to even, every NaN 0x7fc0: piece by piece, with those of `words`."""
    step = PIECE // 4
    for at in range(0, len(master), step):
        piece = master[at : at + step]
        found, short = _like(0, piece), room(0, 2, len(piece))
        np.left_shift(piece, 1, out=found)
        nans = found > 0xFF000000
        np.right_shift(piece, 16, out=found)
        np.bitwise_and(found, 1, out=found)
        np.add(found, 0x7FFF, out=found)
        np.add(found, piece, out=found)
        np.right_shift(found, 16, out=found)
        np.copyto(short, found, casting="unsafe")
        if nans.any():
            short[nans] = 0x7FC0
        yield short, words[at : at + step]


def rounds_as_numpy(library: Kernels) -> bool:
    """Of every sign and exponent, with lower halves about a tie; and a wrong bit anywhere is seen."""
    master = np.arange(0, 1 << 32, 0x2AAAA5, dtype=np.uint32)
    master = np.concatenate([master, master & 0xFFFF0000 | 0x8000, master | 0x7F800000])
    right, made = (np.zeros(len(master), np.uint16) for _ in range(2))
    for found, part in rounded(master, right):
        np.copyto(part, found)
    library.round(master, made)
    if (made != right).any() or not library.is_rounded(master, right):
        return False
    made[-1] ^= 1
    return not library.is_rounded(master, made)
