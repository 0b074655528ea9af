"""Words turned, cut into byte planes and joined again: by compiled kernels, or by numpy to the same bytes.

Plane k holds byte k of every word: the planes of 3 words of 4 bytes, 0123 4567 89ab, are 048 159 26a 37b. What becomes
of words before they are cut, the way, is told by the number of a codec (core/format/codec.py). Any thread may call what
is here; each has its own work space.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ckpt.core.format import kernels
from ckpt.core.format.kernels import Kernels

Array: TypeAlias = "np.ndarray[Any, Any]"

PLANES, ROTATED, DELTA, FLOAT_DELTA = range(1, 5)  # the ways; the last two take a base
PIECE = 256 << 10  # bytes at most; a piece and what becomes of it stay in a core's own cache
UNSIGNED: dict[int, Any] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}

_SIGNED: dict[int, Any] = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def cut(way: int, words: Array, base: Array | None, planes: Array) -> None:
    """Cut words, changed in this way, into their planes, the rows of `planes`, the lowest first.

    `base`: as many words, for the differences to them. Buffers are of any alignment.
    """
    if (library := _library()) is not None:
        library.cut(way, words, base, planes)
    else:
        _cut_by_numpy(way, words, base, planes)


def join(way: int, planes: Sequence[Array], base: Array | None, words: Array) -> None:
    """Fill `words` with those that `cut` made these planes of."""
    if (library := _library()) is not None:
        library.join(way, planes, base, words)
    else:
        _join_by_numpy(way, planes, base, words)


def round_to_bf16(master: Array, words: Array) -> None:
    """Fill `words` with fp32 bits as bf16 bits, to nearest and ties to even, every NaN 0x7fc0."""
    if (library := _library()) is not None:
        library.round(master, words)
    else:
        _round_by_numpy(master, words)


def is_rounded_to_bf16(master: Array, words: Array) -> bool:
    """Whether `round_to_bf16` would fill them with just that."""
    if (library := _library()) is not None:
        return library.is_rounded(master, words)
    return all(bool((found == part).all()) for found, part in _rounded(master, words))


@functools.cache
def _library() -> Kernels | None:
    return kernels.trusted("change words", lambda library: _cuts_as_numpy(library) and _rounds_as_numpy(library))


def _cuts_as_numpy(library: Kernels) -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (2, 8 * 2345), np.uint8)
    for word in UNSIGNED:
        words, old = (one[: 2345 * word].view(UNSIGNED[word]) for one in noise)
        for way in (PLANES, ROTATED, DELTA, FLOAT_DELTA):
            base = old if way in (DELTA, FLOAT_DELTA) else None
            planes, right, again = (
                np.zeros((word, 2400), np.uint8),
                np.zeros((word, 2400), np.uint8),
                np.zeros_like(words),
            )
            library.cut(way, words, base, planes[:, : len(words)])
            _cut_by_numpy(way, words, base, right[:, : len(words)])
            library.join(way, list(right[:, : len(words)]), base, again)
            if (planes != right).any() or (again != words).any():
                return False
    return True


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


def _room(number: int, word: int, count: int) -> Array:
    """Work space of this thread for so many words of a piece, until it is asked for again. `_cut` and `_join` use 0 and
    1, `_forward` and `_backward` 1 and 2."""
    return _rooms.room(number, word, count)


# -- by numpy --


def _cut_by_numpy(way: int, words: Array, base: Array | None, planes: Array) -> None:
    for part in _pieces(words):
        piece = words[part]
        if way != PLANES:
            piece = _like(3, words[part])
            _forward(words[part], None if base is None else base[part], piece, floats=way == FLOAT_DELTA)
        _cut(piece, planes[:, part])


def _join_by_numpy(way: int, planes: Sequence[Array], base: Array | None, words: Array) -> None:
    for part in _pieces(words):
        _join([plane[part] for plane in planes], words[part])
        if way != PLANES:
            _backward(words[part], None if base is None else base[part], floats=way == FLOAT_DELTA)


def _pieces(words: Array) -> Iterator[slice]:
    step = PIECE // words.itemsize
    return (slice(at, at + step) for at in range(0, len(words), step))


# Words are cut in half, and those again: numpy narrows and widens integers several times faster than it picks every
# second or fourth byte.


def _cut(words: Array, planes: Array) -> None:
    half = words.itemsize // 2
    if not half:
        np.copyto(planes[0], words)
        return
    upper = _room(1, words.itemsize, len(words))
    np.right_shift(words, 8 * half, out=upper)
    _narrow(words, planes[:half])
    _narrow(upper, planes[half:])


def _narrow(words: Array, planes: Array) -> None:
    """Cut the lower half of every word into planes."""
    part = planes[0] if len(planes) == 1 else _room(0, len(planes), len(words))
    np.copyto(part, words, casting="unsafe")
    if len(planes) > 1:
        _cut(part, planes)


def _join(planes: Sequence[Array], words: Array) -> None:
    half = len(planes) // 2
    if not half:
        np.copyto(words, planes[0])
        return
    spare = _room(1, words.itemsize, len(words))
    np.copyto(words, _half(planes[half:], len(words)))
    _shift_left(words, 8 * half, words)
    np.copyto(spare, _half(planes[:half], len(words)))
    np.bitwise_or(words, spare, out=words)


def _half(planes: Sequence[Array], count: int) -> Array:
    """Words as wide as there are planes, in work space."""
    if len(planes) == 1:
        return planes[0]
    found = _room(0, len(planes), count)
    _join(planes, found)
    return found


def _shift_left(words: Array, bits: int, into: Array) -> None:
    if words.itemsize > 2:
        np.left_shift(words, bits, out=into)
    else:
        np.multiply(words, 1 << bits, out=into)  # processors have no shift for many narrow words at once


# -- what becomes of words before they are cut, in pieces of at most PIECE bytes: rotated, differences, roundings --


def _forward(words: Array, base: Array | None, found: Array, *, floats: bool) -> None:
    """Fill `found` with a piece's words as they are cut into planes: rotated, or the differences to those of a base.

    `floats`: they are taken in the order of the numbers that they stand for.
    """
    spare = _like(1, words)
    last = 8 * words.itemsize - 1
    if base is None:  # rotated
        _shift_left(words, 1, found)
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
    _shift_left(difference, 1, found)
    np.bitwise_xor(found, spare, out=found)


def _backward(words: Array, base: Array | None, *, floats: bool) -> None:
    """Turn what `_forward` made of a piece's words into those again."""
    spare = _like(1, words)
    if base is None:  # rotated
        np.right_shift(words, 1, out=spare)
        _shift_left(words, 8 * words.itemsize - 1, words)
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
    return _room(number, like.itemsize, len(like))


def _signed(words: Array) -> Array:
    found: Array = words.view(_SIGNED[words.itemsize])
    return found


def _rounded(master: Array, words: Array) -> Iterator[tuple[Array, Array]]:
    """fp32 bits as bf16 bits, to nearest and ties to even, every NaN 0x7fc0: piece by piece, with those of `words`."""
    step = PIECE // 4
    for at in range(0, len(master), step):
        piece = master[at : at + step]
        found, short = _like(0, piece), _room(0, 2, len(piece))
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


def _round_by_numpy(master: Array, words: Array) -> None:
    for found, part in _rounded(master, words):
        np.copyto(part, found)


def _rounds_as_numpy(library: Kernels) -> bool:
    """Of every sign and exponent, with lower halves about a tie; and a wrong bit anywhere is seen."""
    master = np.arange(0, 1 << 32, 0x2AAAA5, dtype=np.uint32)
    master = np.concatenate([master, master & 0xFFFF0000 | 0x8000, master | 0x7F800000])
    right, made = (np.zeros(len(master), np.uint16) for _ in range(2))
    _round_by_numpy(master, right)
    library.round(master, made)
    if (made != right).any() or not library.is_rounded(master, right):
        return False
    made[-1] ^= 1
    return not library.is_rounded(master, made)
