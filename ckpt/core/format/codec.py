"""How a blob's bytes are stored: raw, or smaller, and always the same bits when read back. Pure functions, no I/O.

    raw          as they are
    planes       words cut into byte planes: plane k holds byte k of every word
    rotated      planes of words rotated left by one bit: the exponent of a float then lies in one plane, and its sign
                 with the mantissa
    delta        planes of the difference to an older blob of the same length, word by word, as integers
    float-delta  the same for floats: their bits are taken in the order of the numbers, so that near numbers
                 differ little
    bf16         nothing is stored: it is the rounding of fp32 words that are kept anyway

Why planes: the exponents of a tensor are much alike, the low bits of its mantissas are noise. A plane is compressed by
itself, or left alone where samples say that nothing is to be gained (ckpt/core/format/frames.py). How fast that is:
benchmarks/results/codecs.json. All of it lets go of the interpreter's lock but for joining the stored planes, and any
number of threads may call it; each keeps room for two blobs.

Stored form of all but `raw` and `bf16`: one byte, the size of a word (1, 2, 4 or 8); for every plane its stored length,
32 bits little-endian; then the planes. One that is stored in as many bytes as it has is raw, any other is exactly one
zstd frame.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ckpt.core.format import byteplanes, frames
from ckpt.core.format.byteplanes import DELTA, FLOAT_DELTA, PLANES, ROTATED, UNSIGNED, Array
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.store import Buffer

RAW, BF16 = 0, 5

__all__ = [
    "BF16", "CODECS", "DELTA", "FLOAT_DELTA", "PLANES", "RAW", "ROTATED", "Codec", "decode", "delta_codec", "derives",
    "encode", "estimate", "whole_codec", "word_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to store a blob. `base`: what it takes besides the stored bytes.

    none: nothing; same: another blob of the same length; master: fp32 words, twice the length.
    """

    id: int
    name: str
    version: int
    base: Literal["none", "same", "master"]


CODECS = {
    codec.id: codec
    for codec in (
        Codec(RAW, "raw", 1, "none"),
        Codec(PLANES, "planes", 1, "none"),
        Codec(ROTATED, "rotated", 1, "none"),
        Codec(DELTA, "delta", 1, "same"),
        Codec(FLOAT_DELTA, "float-delta", 1, "same"),
        Codec(BF16, "bf16", 1, "master"),
    )
}

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C128": 8, "C64": 4, "C32": 2}  # a complex number is two words
_OTHERS = {
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F4_E2M1X2": 1,
}  # fmt: skip
_WORDS = _FLOATS | _OTHERS

_KEPT = (4 << 20) + (64 << 10)  # bytes; for blobs of up to 4 MiB a thread keeps the room for their planes
_ESTIMATE = 8 << 10  # bytes of a blob in each place of a sample


def word_of(dtype: str) -> int:
    """Bytes of the words that planes are made of, for a dtype by our names. UsageError for any other."""
    if dtype not in _WORDS:
        raise UsageError(f"not a dtype: {dtype!r}")
    return _WORDS[dtype]


def whole_codec(dtype: str) -> int:
    """The codec for a blob of this dtype that is stored without a base."""
    return ROTATED if dtype in _FLOATS else PLANES


def delta_codec(dtype: str) -> int:
    """The codec for a blob of this dtype that is stored as the difference to a base."""
    return FLOAT_DELTA if dtype in _FLOATS else DELTA


def encode(codec: int, plain: Buffer, word: int, base: Buffer | None = None) -> bytes:
    """The stored form. It may be longer than `plain`: then store that raw.

    `word`: see `word_of`. UsageError if `plain` is not a whole number of words, or the base does not fit. For BF16 ask
    `derives` first: nothing of `plain` is looked at.
    """
    length = memoryview(plain).nbytes
    base_length = None if base is None else memoryview(base).nbytes
    _check_base(codec, length, base_length, UsageError)
    if codec in (RAW, BF16):
        return bytes(plain) if codec == RAW else b""
    if word not in UNSIGNED or length % word:
        raise UsageError(f"{length} bytes are not words of {word}")
    words = _words(plain, word)
    planes, rooms = (_local.rows(name, word, len(words)) for name in ("planes", "frames"))
    byteplanes.cut(codec, words, None if base is None else _words(base, word), planes)
    stored = [frames.compress(plane, room) for plane, room in zip(planes, rooms, strict=True)]
    return b"".join([struct.pack(f"<B{word}I", word, *map(len, stored)), *stored])


def decode(codec: int, stored: Buffer, length: int, base: Buffer | None, into: memoryview) -> None:
    """Fill `into`, `length` bytes, with the plain bytes.

    CorruptError if `stored` is not what `encode` can have made of so many bytes, before memory is taken for what it
    claims to hold; `into` is then undefined. Bytes that pass may still be wrong: compare their digest. FormatError for
    a codec that this version does not know.
    """
    if into.nbytes != length:
        raise UsageError(f"{into.nbytes} bytes of space for {length}")
    _check_base(codec, length, None if base is None else memoryview(base).nbytes, CorruptError)
    out = np.frombuffer(into, np.uint8)
    view = memoryview(stored).cast("B")
    if codec == RAW:
        if len(view) != length:
            raise CorruptError(f"{len(view)} bytes are stored raw, {length} are expected")
        np.copyto(out, np.frombuffer(view, np.uint8))
    elif codec == BF16:
        if len(view) or length % 2 or base is None:
            raise CorruptError("a blob of derived bf16 words has bytes of its own, or half a word")
        byteplanes.round_to_bf16(_words(base, 4), out.view(UNSIGNED[2]))
    else:
        word, stored_planes = _taken_apart(view, length)
        rows = _local.rows("planes", word, length // word)
        planes = [frames.decompress(one, row) for one, row in zip(stored_planes, rows, strict=True)]
        byteplanes.join(codec, planes, None if base is None else _words(base, word), out.view(UNSIGNED[word]))


def derives(master: Buffer, plain: Buffer) -> bool:
    """Whether bf16 `plain` is exactly the rounding of fp32 `master`, to nearest and ties to even, as torch rounds.

    What becomes of NaNs differs between processors: only the pattern that `decode` makes of them is recognised.
    """
    length = memoryview(plain).nbytes
    if length % 2 or memoryview(master).nbytes != 2 * length:
        return False
    return byteplanes.is_rounded_to_bf16(_words(master, 4), _words(plain, 2))


def estimate(codec: int, plain: Buffer, word: int, base: Buffer | None = None) -> float:
    """Bytes stored for a plain byte, from samples: quick, and near enough to choose by."""
    length = memoryview(plain).nbytes
    if codec == BF16 or not length:
        return 0.0 if codec == BF16 else 1.0
    if word not in UNSIGNED or length % word or length <= _ESTIMATE * frames.PLACES:
        return len(encode(codec, plain, word, base)) / length
    starts = [start // word * word for start in frames.starts(length, _ESTIMATE)]

    def sample(data: Buffer) -> bytes:
        view = memoryview(data).cast("B")
        return b"".join([view[start : start + _ESTIMATE] for start in starts])

    return len(encode(codec, sample(plain), word, None if base is None else sample(base))) / (_ESTIMATE * frames.PLACES)


def _check_base(codec: int, length: int, base: int | None, error: type[Exception]) -> None:
    """`base`: its length in bytes, or None."""
    if codec not in CODECS:
        raise FormatError(
            f"a blob is stored by codec {codec}, which this version does not know: the checkpoint was written by a "
            "newer one, upgrade with `pip install -U everystep`"
        )
    wanted = {"none": None, "same": length, "master": 2 * length}[CODECS[codec].base]
    if base != wanted:
        raise error(f"{CODECS[codec].name} of {length} bytes takes a base of {wanted} bytes, not {base}")


def _words(data: Buffer, word: int) -> Array:
    """Buffers as words, wherever they lie."""
    found: Array = np.frombuffer(memoryview(data).cast("B"), np.uint8).view(UNSIGNED[word])
    return found


def _taken_apart(stored: memoryview, length: int) -> tuple[int, list[memoryview]]:
    """The word size, and each plane as it is stored. CorruptError unless all adds up."""
    word = stored[0] if len(stored) else 0
    if word not in UNSIGNED or length % word or len(stored) < 1 + 4 * word:
        raise CorruptError(f"an encoded blob of {length} bytes has an impossible header")
    lengths = struct.unpack_from(f"<{word}I", stored, 1)
    if max(lengths) > length // word or 1 + 4 * word + sum(lengths) != len(stored):
        raise CorruptError(f"the planes of an encoded blob do not add up to its {len(stored)} bytes")
    views, at = [], 1 + 4 * word
    for size in lengths:
        views.append(stored[at : at + size])
        at += size
    return word, views


class _Rooms(threading.local):
    """What each thread has for itself: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def rows(self, name: str, word: int, count: int) -> Array:
        """Room for the planes of a blob, or their frames, until the next call. Were they pages apart, all of them would
        contend for the same few lines of a cache: that costs half of the speed."""
        apart = -(-count // 4096) * 4096 + 192
        size = word * apart
        kept = self._kept.get(name)
        if kept is None or kept.nbytes < size:
            kept = np.empty(min(_KEPT, 2 * size) if size <= _KEPT else size, np.uint8)
            if size <= _KEPT:
                self._kept[name] = kept
        room = kept[:size]
        return room.reshape(word, apart)[:, :count]


_local = _Rooms()
