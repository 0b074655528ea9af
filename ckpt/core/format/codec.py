"""Encodes the bytes of a chunk as raw bytes, byte planes or a delta, and decodes them to exactly the same bits.

    raw     unchanged
    planes  divided into byte planes, which zstd compresses
    delta   the XOR with an older chunk of the same length, stored as compressed byte planes

Plane k holds byte k of every word. For example, the 4-byte words 0123, 4567 and 89ab have the planes 048, 159, 26a,
37b. The exponents of a tensor are similar and the low bits of its mantissas are noise, so planes compress better than
words. The stored form of `planes` and `delta` starts with one byte, the word size (1, 2, 4 or 8). A zstd frame for each
plane follows, the lowest plane first.

All functions are pure and do no I/O. Each releases the GIL while it works on the bytes, and any thread may call it.
Each thread keeps memory for the planes of one chunk. Speeds and sizes: benchmarks/results/codecs.json.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import zstandard

from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.store import Buffer

RAW, PLANES, DELTA = range(3)
CODECS = {RAW: "raw", PLANES: "planes", DELTA: "delta"}

Array: TypeAlias = "np.ndarray[Any, Any]"

_UNSIGNED: dict[int, Any] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_WORDS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C128": 8, "C64": 4, "C32": 2,  # a complex number is stored as two words
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F4_E2M1X2": 1,
}  # fmt: skip
# bytes that one pass divides into planes or joins; this many words and their planes fit into the cache of a core
_PIECE = 256 << 10
_KEPT = 4 << 20  # maximum bytes of a buffer that a thread keeps for its next call
_MAX_WINDOW = 1 << 23  # bytes; the largest window that every zstd decoder accepts
_MAGIC = b"\x28\xb5\x2f\xfd"  # first bytes of a zstd frame
_PLACES, _SAMPLE = 8, 8 << 10  # number of samples, and bytes of each sample, for `estimate`


def word_of(dtype: str) -> int:
    """Return the word size in bytes of a dtype, for example of "BF16". Raise UsageError for an unknown dtype."""
    if dtype not in _WORDS:
        raise UsageError(f"not a dtype: {dtype!r}")
    return _WORDS[dtype]


def encode(codec: int, plain: Buffer, word: int, base: Buffer | None = None) -> bytes:
    """Return the stored form of the bytes. If it is longer than `plain`, the caller should store the chunk raw.

    `word`: see `word_of`. `base`: bytes of the same length, for DELTA only. Raise UsageError if `plain` is not a whole
        number of words, or if the length of the base differs.
    """
    length = memoryview(plain).nbytes
    _check_base(codec, length, base, UsageError)
    if codec == RAW:
        return bytes(plain)
    if word not in _UNSIGNED or length % word:
        raise UsageError(f"cannot divide {length} bytes into words of {word} bytes")
    planes = _local.room("planes", length).reshape(word, length // word)
    _cut(_words(plain, word), None if base is None else _words(base, word), planes)
    return b"".join([bytes([word]), *(_local.compressor.compress(plane.data) for plane in planes)])


def decode(codec: int, stored: Buffer, length: int, base: Buffer | None, into: memoryview) -> None:
    """Decode `stored` into the `length` bytes of `into`.

    Raise CorruptError if `encode` cannot have produced `stored` from `length` bytes, before memory is allocated for the
    contents that `stored` claims. After an error, `into` is undefined. Without an error, the bytes may still be wrong,
    so compare their digest. Raise FormatError for a codec that this version does not know.
    """
    if into.nbytes != length:
        raise UsageError(f"cannot decode {length} bytes into {into.nbytes} bytes")
    _check_base(codec, length, base, CorruptError)
    out = np.frombuffer(into, np.uint8)
    view = memoryview(stored).cast("B")
    if codec == RAW:
        if len(view) != length:
            raise CorruptError(f"{len(view)} bytes are stored raw, {length} are expected")
        np.copyto(out, np.frombuffer(view, np.uint8))
        return
    word = view[0] if len(view) else 0
    if word not in _UNSIGNED or length % word:
        raise CorruptError(f"the header of an encoded chunk of {length} bytes has the impossible word size {word}")
    frames, size = list[memoryview](), length // word
    left = view[1:]
    for _ in range(word):
        end = _frame_end(left, size)
        frames.append(left[:end])
        left = left[end:]
    if left:
        raise CorruptError(f"{len(left)} bytes follow the planes of an encoded chunk")
    planes = _local.room("planes", length).reshape(word, size)
    for frame, plane in zip(frames, planes, strict=True):
        _decompress(frame, plane)
    _join(planes, None if base is None else _words(base, word), out.view(_UNSIGNED[word]))


def estimate(codec: int, plain: Buffer, word: int, base: Buffer | None = None) -> float:
    """Return the estimated compression ratio, as stored bytes per plain byte, from samples of the chunk."""
    length = memoryview(plain).nbytes
    if not length:
        return 1.0
    if word not in _UNSIGNED or length % word or length <= _SAMPLE * _PLACES:
        return len(encode(codec, plain, word, base)) / length
    middles = ((2 * k + 1) * length // (2 * _PLACES) for k in range(_PLACES))
    starts = [(middle - _SAMPLE // 2) // word * word for middle in middles]

    def sample(data: Buffer) -> bytes:
        view = memoryview(data).cast("B")
        return b"".join([view[start : start + _SAMPLE] for start in starts])

    return len(encode(codec, sample(plain), word, None if base is None else sample(base))) / (_SAMPLE * _PLACES)


def _check_base(codec: int, length: int, base: Buffer | None, error: type[Exception]) -> None:
    if codec not in CODECS:
        raise FormatError(
            f"a chunk uses codec {codec}, which this version does not know: the checkpoint was written by a "
            "newer version, upgrade with `pip install -U everystep`"
        )
    there = None if base is None else memoryview(base).nbytes
    wanted = length if codec == DELTA else None
    if there != wanted:
        raise error(f"codec {CODECS[codec]}, {length} bytes: the base has {there} bytes, not {wanted} (None: no base)")


# -- byte planes --


def _words(data: Buffer, word: int) -> Array:
    found: Array = np.frombuffer(memoryview(data).cast("B"), np.uint8).view(_UNSIGNED[word])
    return found


def _pieces(words: Array) -> Iterator[slice]:
    step = _PIECE // words.itemsize
    return (slice(at, min(at + step, len(words))) for at in range(0, len(words), step))


def _cut(words: Array, base: Array | None, planes: Array) -> None:
    """Divide words, or the XOR of words and base, into planes. Each row is a plane, the lowest byte first."""
    for part in _pieces(words):
        piece, spare = words[part], _local.room("spare", _PIECE).view(words.dtype)[: part.stop - part.start]
        if base is not None:
            piece = np.bitwise_xor(piece, base[part])
        np.copyto(planes[0, part], piece, casting="unsafe")
        for k in range(1, len(planes)):
            np.right_shift(piece, 8 * k, out=spare)
            np.copyto(planes[k, part], spare, casting="unsafe")


def _join(planes: Array, base: Array | None, words: Array) -> None:
    """Fill `words` from the planes that `_cut` made."""
    bytes_of = words.view(np.uint8).reshape(len(words), words.itemsize)
    for part in _pieces(words):
        for k, plane in enumerate(planes):
            bytes_of[part, k] = plane[part]
        if base is not None:
            np.bitwise_xor(words[part], base[part], out=words[part])


# -- zstd --


def _frame_end(stored: memoryview, size: int) -> int:
    """Return the end offset of a plane's zstd frame. Raise CorruptError unless its headers announce `size` bytes."""
    try:
        header = zstandard.get_frame_parameters(stored)
        at = zstandard.frame_header_size(stored)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a plane is not a zstd frame: {error}") from None
    if bytes(stored[:4]) != _MAGIC or header.content_size != size or header.dict_id:
        raise CorruptError(f"a plane is not a zstd frame of {size} bytes")
    if header.window_size > max(_MAX_WINDOW, size):
        raise CorruptError(f"a plane needs a zstd window of {header.window_size} bytes, over {max(_MAX_WINDOW, size)}")
    last = False
    while not last and at + 3 <= len(stored):
        block = int.from_bytes(stored[at : at + 3], "little")
        last, kind = bool(block & 1), block >> 1 & 3
        at += 3 + (1 if kind == 1 else block >> 3)  # a block of kind 1 stores one byte to repeat
    at += 4 if header.has_checksum else 0
    if not last or at > len(stored):
        raise CorruptError("a plane is an incomplete zstd frame")
    return at


def _decompress(frame: memoryview, plane: Array) -> None:
    """Decompress a frame into a plane. Raise CorruptError if the frame is invalid or has another size."""
    try:
        # zstd decompresses a complete frame directly into the given memory.
        found = _local.decompressor.stream_reader(frame).readinto(plane.data)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a plane does not decompress: {error}") from None
    if found != len(plane):
        raise CorruptError(f"a plane decompresses to {found} bytes instead of {len(plane)}")


class _Local(threading.local):
    """Holds the zstd contexts and buffers of one thread, because threads cannot share zstd contexts."""

    def __init__(self) -> None:
        # Exponents contain no repeated sequences, so use Huffman coding with almost no search. Higher levels are slower
        # and do not compress better.
        entropy = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
            target_length=0, write_content_size=True, write_checksum=False, write_dict_id=False,
        )  # fmt: skip
        self.compressor = zstandard.ZstdCompressor(compression_params=entropy)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._kept: dict[str, Array] = {}

    def room(self, name: str, size: int) -> Array:
        """Return a buffer of `size` bytes. It is valid until the next call with the same name."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = np.empty(size, np.uint8)
            if size <= _KEPT:
                self._kept[name] = kept
        return kept[:size]


_local = _Local()
