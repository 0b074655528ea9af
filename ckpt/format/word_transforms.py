"""What becomes of words before they are cut into planes, and back: rotations, differences and roundings.

In pieces that fit into a core's own cache, and into the work space of `ckpt.format.byteplanes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt.format.byteplanes import PIECE, Array, room, shift_left

_SIGNED: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def forward(words: Array, base: Array | None, found: Array, *, floats: bool) -> None:
    """Fill `found` with a piece's words as they are cut into planes: rotated, or the differences to those of a base.

    `floats`: they are taken in the order of the numbers that they stand for.
    """
    spare = _room(1, words)
    last = 8 * words.itemsize - 1
    if base is None:  # rotated
        shift_left(words, 1, found)
        np.right_shift(words, last, out=spare)
        np.bitwise_or(found, spare, out=found)
        return
    difference = _room(2, words)
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
    spare = _room(1, words)
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
        ordered = _room(2, words)
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


def _room(number: int, like: Array) -> Array:
    return room(number, like.itemsize, len(like))


def _signed(words: Array) -> Array:
    found: Array = words.view(_SIGNED[words.itemsize])
    return found


def rounded(master: Array, words: Array) -> Iterator[tuple[Array, Array]]:
    """fp32 bits as bf16 bits, to nearest and ties to even, every NaN 0x7fc0: piece by piece, with those of `words`."""
    step = PIECE // 4
    for at in range(0, len(master), step):
        piece = master[at : at + step]
        found, short = _room(0, piece), room(0, 2, len(piece))
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
