"""One byte plane as it is stored: as it is, or as one zstd frame that says its content size. Pure functions, no I/O.

Whether it pays, and which way, samples say: by zstd, or by a compiled kernel, huffman.c, which is faster on exponents.
How a frame was made does not matter for reading it; it is read only if it is exactly one frame, of the size that is
expected, and asks for no more memory than that.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
import zstandard

from ckpt.core.format import kernels
from ckpt.core.format.byteplanes import Array
from ckpt.errors import CorruptError
from ckpt.store import Buffer

_NOISE = 7.85  # bits a byte; a plane above it is left alone
_REPEATS = 0.9  # zstd that looks for repeats is half as fast: it must make a plane so much smaller
_FEW = 1.5  # bits a byte; below, zstd may find repeats where no sample was taken, and no code alone goes below 1
PLACES = 8  # where samples are taken, spread evenly
_SAMPLE = 1 << 9  # bytes of a plane, each
_MAX_WINDOW = 1 << 23  # bytes; what any zstd reader takes without being asked
_MAGIC = b"\x28\xb5\x2f\xfd"  # of a zstd frame


class _Contexts(threading.local):
    """What each thread has for itself: zstandard's contexts cannot be shared."""

    def __init__(self) -> None:
        entropy = zstandard.ZstdCompressionParameters(  # Huffman, and hardly any search: exponents have no repeats
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
            target_length=0, write_content_size=True, write_checksum=False, write_dict_id=False,
        )  # fmt: skip
        self.entropy = zstandard.ZstdCompressor(compression_params=entropy)
        self.repeats = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
        self.reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)

    @functools.cached_property
    def work(self) -> Array:
        """Scratch space."""
        return np.empty(kernels.WORK, np.uint8)


_local = _Contexts()


def compress(plane: Array, room: Array) -> Buffer:
    """A plane as it is stored: itself, or in `room`, as many bytes, or new."""
    sample = _sampled(plane)
    bits = _entropy(sample)
    if bits > _NOISE:
        return plane.data
    repeats = _local.repeats.compress(sample.data)
    by_code = len(repeats) >= _REPEATS * bits / 8 * len(sample)
    if by_code and bits > _FEW and sample is not plane and (library := _library()) is not None:
        size = library.huffman(plane, room, _local.work)
        if size:
            return room[:size].data
    way, found = _local.entropy, _local.entropy.compress(sample.data)
    if len(repeats) < _REPEATS * len(found):
        way, found = _local.repeats, repeats
    if sample is not plane:
        found = way.compress(plane.data)
    return found if len(found) < len(plane) else plane.data


@functools.cache
def _library() -> kernels.Kernels | None:
    return kernels.trusted("make frames", _makes_frames)


def _makes_frames(library: kernels.Kernels) -> bool:
    """Which zstd reads: of all kinds of codes, and blocks; and nothing is written beside them."""
    dice = np.random.default_rng(0)
    for size in (1, 300, 5003, 131_072, 140_001):
        for spread in (0.01, 1, 7, 30, 200):
            plane = np.minimum(dice.exponential(spread, size), 128).astype(np.uint8)
            room = np.full(size + 300, 0xA5, np.uint8)
            made = library.huffman(plane, room[: size + 200], _local.work)
            if not made or (room[size + 200 :] != 0xA5).any():
                return False
            try:
                if zstandard.decompress(room[:made].data) != plane.tobytes():
                    return False
            except zstandard.ZstdError:
                return False
    return True


def _sampled(plane: Array) -> Array:
    if len(plane) <= _SAMPLE * PLACES:
        return plane
    return np.concatenate([plane[start : start + _SAMPLE] for start in starts(len(plane), _SAMPLE)])


def _entropy(sample: Array) -> float:
    """Bits a byte, if every byte is coded by itself."""
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / max(len(sample), 1)
    return float(-(shares * np.log2(shares)).sum())


def starts(length: int, size: int) -> list[int]:
    """Where samples of a size begin in something of a length, in the middle of equal parts."""
    return [(2 * k + 1) * length // (2 * PLACES) - size // 2 for k in range(PLACES)]


def decompress(stored: memoryview, room: Array) -> Array:
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
