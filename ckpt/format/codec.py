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
itself, or left alone where samples say that nothing is to be gained. On one busy core, fp32 weights were encoded at 1.4
GB/s and decoded at 2.8, bf16 at 1.1 and 2.5; where blosc2 is installed (ckpt/format/byteplanes.py) at 1.7 and 4.0, 1.2
and 3.0. All of it lets go of the interpreter's lock but for joining the stored planes, and any number of threads may
call it; each keeps some 12 MiB.

Stored form of all but `raw` and `bf16`: one byte, the size of a word (1, 2, 4 or 8); for every plane its stored length,
32 bits little-endian; then the planes. One that is stored in as many bytes as it has is raw, any other is exactly one
zstd frame that says its content size. Which parameters made the frame does not matter for reading it.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import zstandard

from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.format import kernels
from ckpt.format.byteplanes import (
    PIECE,
    UNSIGNED,
    Array,
    at_a_time,
    backward,
    forward,
    merge,
    rounded,
    rounds_as_numpy,
    split,
)
from ckpt.store import Buffer

RAW, PLANES, ROTATED, DELTA, FLOAT_DELTA, BF16 = range(6)


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

_BLOB = 4 << 20  # bytes; for blobs up to here a thread keeps its work space
_NOISE = 7.85  # bits a byte; a plane above it is left alone
_REPEATS = 0.9  # zstd that looks for repeats is half as fast: it must make a plane so much smaller
_PLACES = 8  # where samples are taken, spread evenly
_SAMPLE = 1 << 10  # bytes of a plane, each
_ESTIMATE = 8 << 10  # bytes of a blob, each
_MAX_WINDOW = 1 << 23  # bytes; what any zstd reader takes without being asked
_MAGIC = b"\x28\xb5\x2f\xfd"  # of a zstd frame


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
    words, base_words = _words(plain, word), _words_or_none(base, word)
    planes = _local.planes(word, len(words))
    if (library := _library()) is not None:
        library.cut(codec, words, base_words, planes)
    for part in _parts(0 if library else len(words), at_a_time(word, len(words))):
        split(_changed(codec, words[part], None if base_words is None else base_words[part]), planes[:, part])
    stored = [_compress(plane) for plane in planes]
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
        _round(base, out)
    else:
        word, cut = _cut(view, length)
        _rebuild(codec, word, cut, base, out)


def derives(master: Buffer, plain: Buffer) -> bool:
    """Whether bf16 `plain` is exactly the rounding of fp32 `master`, to nearest and ties to even, as torch rounds.

    What becomes of NaNs differs between processors: only the pattern that `decode` makes of them is recognised.
    """
    length = memoryview(plain).nbytes
    if length % 2 or memoryview(master).nbytes != 2 * length:
        return False
    if (library := _library()) is not None:
        return library.is_rounded(*(np.frombuffer(memoryview(one).cast("B"), np.uint8) for one in (master, plain)))
    return all(bool((found == part).all()) for found, part in rounded(_words(master, 4), _words(plain, 2)))


def _round(master: Buffer, out: Array) -> None:
    if (library := _library()) is not None:
        library.round(np.frombuffer(memoryview(master).cast("B"), np.uint8), out)
        return
    for found, part in rounded(_words(master, 4), out.view(UNSIGNED[2])):
        np.copyto(part, found)


def estimate(codec: int, plain: Buffer, word: int, base: Buffer | None = None) -> float:
    """Bytes stored for a plain byte, from samples: quick, and near enough to choose by."""
    length = memoryview(plain).nbytes
    if codec == BF16 or not length:
        return 0.0 if codec == BF16 else 1.0
    if word not in UNSIGNED or length % word or length <= _ESTIMATE * _PLACES:
        return len(encode(codec, plain, word, base)) / length
    starts = [start // word * word for start in _starts(length, _ESTIMATE)]

    def sample(data: Buffer) -> bytes:
        view = memoryview(data).cast("B")
        return b"".join([view[start : start + _ESTIMATE] for start in starts])

    return len(encode(codec, sample(plain), word, None if base is None else sample(base))) / (_ESTIMATE * _PLACES)


def _starts(length: int, size: int) -> list[int]:
    """Where samples of a size begin in something of a length, in the middle of equal parts."""
    return [(2 * k + 1) * length // (2 * _PLACES) - size // 2 for k in range(_PLACES)]


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
    """Buffers as words, without a copy where they lie as numpy likes it."""
    found: Array = np.frombuffer(memoryview(data).cast("B"), np.uint8).view(UNSIGNED[word])
    return found if found.flags.aligned else found.copy()


def _words_or_none(data: Buffer | None, word: int) -> Array | None:
    return None if data is None else _words(data, word)


# -- work space --


class _Local(threading.local):
    """What each thread has for itself: zstandard's contexts cannot be shared, and fresh memory costs page faults."""

    def __init__(self) -> None:
        entropy = zstandard.ZstdCompressionParameters(  # Huffman, and hardly any search: exponents have no repeats
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
            target_length=0, write_content_size=True, write_checksum=False, write_dict_id=False,
        )  # fmt: skip
        self.entropy = zstandard.ZstdCompressor(compression_params=entropy)
        self.repeats = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
        self.reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._spaces: dict[str, Array] = {}

    def planes(self, word: int, count: int) -> Array:
        """Room for the planes of a blob, until the next call."""
        return self._space("planes", word * count).reshape(word, count)

    def words(self, word: int, count: int) -> Array:
        """Room for words of a blob, until the next call."""
        found: Array = self._space("words", word * count).view(UNSIGNED[word])
        return found

    def _space(self, name: str, size: int) -> Array:
        if size > _BLOB:
            return np.empty(size, np.uint8)
        if name not in self._spaces or size > len(self._spaces[name]):
            self._spaces[name] = np.empty(min(_BLOB, 2 * size), np.uint8)
        return self._spaces[name][:size]


_local = _Local()


# -- words --


@functools.cache
def _library() -> kernels.Kernels | None:
    """The compiled kernels, if they change, cut and round words as numpy does."""
    found = kernels.find()
    return found if found is not None and _does_as_numpy(found) else None


def _does_as_numpy(library: kernels.Kernels) -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (2, 8 * 2345), np.uint8)
    for word in UNSIGNED:
        words, base = (one[: 2345 * word].view(UNSIGNED[word]) for one in noise)
        for way in (PLANES, ROTATED, DELTA, FLOAT_DELTA):
            old = base if CODECS[way].base == "same" else None
            planes, again = np.zeros((word, len(words)), np.uint8), np.zeros_like(words)
            library.cut(way, words, old, planes)
            library.join(way, list(planes), old, again)
            changed = _changed(way, words, old).view(np.uint8).reshape(-1, word)
            if (planes != changed.T).any() or (again != words).any():
                return False
    return rounds_as_numpy(library)


def _parts(count: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, count)) for at in range(0, count, step))


def _changed(codec: int, words: Array, base: Array | None) -> Array:
    """Words as they are cut into planes; in work space, unless they stay as they are."""
    if codec == PLANES:
        return words
    found = _local.words(words.itemsize, len(words))
    for part in _parts(len(words), PIECE // words.itemsize):
        forward(words[part], None if base is None else base[part], found[part], floats=codec == FLOAT_DELTA)
    return found


def _restore(codec: int, words: Array, base: Array | None) -> None:
    """The opposite of `_changed`, in place."""
    for part in _parts(len(words), PIECE // words.itemsize):
        backward(words[part], None if base is None else base[part], floats=codec == FLOAT_DELTA)


# -- planes --


def _compress(plane: Array) -> Buffer:
    """A plane as it is stored."""
    sample = _sampled(plane)
    bits = _entropy(sample)
    if bits > _NOISE:
        return plane.data
    way = _local.entropy
    found = way.compress(sample.data)
    other = _local.repeats.compress(sample.data)
    if len(other) < _REPEATS * len(found):
        way, found = _local.repeats, other
    if sample is not plane:
        found = way.compress(plane.data)
    return found if len(found) < len(plane) else plane.data


def _sampled(plane: Array) -> Array:
    if len(plane) <= _SAMPLE * _PLACES:
        return plane
    return np.concatenate([plane[start : start + _SAMPLE] for start in _starts(len(plane), _SAMPLE)])


def _entropy(sample: Array) -> float:
    """Bits a byte, if every byte is coded by itself."""
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / max(len(sample), 1)
    return float(-(shares * np.log2(shares)).sum())


def _rebuild(codec: int, word: int, cut: list[memoryview], base: Buffer | None, out: Array) -> None:
    """Fill `out` from stored planes."""
    count = len(out) // word
    room = _local.planes(word, count)
    planes = [_decompress(stored, plane) for stored, plane in zip(cut, room, strict=True)]
    words, base_words = out.view(UNSIGNED[word]), _words_or_none(base, word)
    if (library := _library()) is not None:
        library.join(codec, planes, base_words, words)
    for whole in _parts(0 if library else count, at_a_time(word, count)):
        merge([plane[whole] for plane in planes], room[:, whole], words[whole])
        if codec != PLANES:
            _restore(codec, words[whole], None if base_words is None else base_words[whole])


def _cut(stored: memoryview, length: int) -> tuple[int, list[memoryview]]:
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


def _decompress(stored: memoryview, room: Array) -> Array:
    """A plane: as it is stored, or in `room`. CorruptError unless that is one zstd frame of exactly as many bytes."""
    if len(stored) == len(room):
        return np.frombuffer(stored, np.uint8)
    _check_frame(stored, len(room))
    try:
        # Given a whole frame and room for all of it, zstd decompresses straight into that.
        found = _local.reader.stream_reader(stored).readinto(room)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a plane does not decompress: {error}") from None
    if found != len(room):
        raise CorruptError(f"a plane decompresses to {found} bytes instead of {len(room)}")
    return room


def _check_frame(stored: memoryview, size: int) -> None:
    """CorruptError unless it is one zstd frame of `size` bytes and nothing else, going by its headers alone."""
    try:
        header = zstandard.get_frame_parameters(stored)
        at = zstandard.frame_header_size(stored)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a plane is no zstd frame: {error}") from None
    if bytes(stored[:4]) != _MAGIC or header.content_size != size or header.dict_id:
        raise CorruptError(f"a plane is a zstd frame of something else than {size} bytes")
    if header.window_size > max(_MAX_WINDOW, size):
        raise CorruptError(f"a plane asks for a window of {header.window_size} bytes")
    last = False
    while not last and at + 3 <= len(stored):
        block = int.from_bytes(stored[at : at + 3], "little")
        last, kind = bool(block & 1), block >> 1 & 3
        at += 3 + (1 if kind == 1 else block >> 3)  # kind 1: one byte, repeated
    if not last or at + (4 if header.has_checksum else 0) != len(stored):
        raise CorruptError("a plane is more or less than one zstd frame")
