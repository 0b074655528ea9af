"""Codecs preserve every bit, and reject damage at low cost."""

from __future__ import annotations

import inspect
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt.core.format import codec
from ckpt.core.format.codec import CODECS, DELTA, PLANES, RAW, decode, encode, estimate
from ckpt.errors import CorruptError

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = (1, 2, 4, 8)
PLANE_CODECS = (PLANES, DELTA)  # codecs that divide words into planes
MIB = 1 << 20


def back(way: int, stored: bytes, length: int, base: bytes | None = None) -> bytes:
    """Decode into memory that held other data before."""
    into = bytearray(b"\xa5" * length)
    decode(way, stored, length, base, memoryview(into))
    return bytes(into)


def with_base(way: int, base: bytes) -> bytes | None:
    return base if way == DELTA else None


def floats(word: int) -> list[int]:
    """Return critical float patterns of both signs: zeros, denormals, infinities and all kinds of NaN."""
    mantissa = {2: 7, 4: 23, 8: 52}[word]
    bits = 8 * word
    top = (1 << bits - 1) - (1 << mantissa)  # infinity
    few = [0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, top - 1, top, top + 1, top | 1 << mantissa - 1]
    few += [2 ** (bits - 1) - 1]
    return few + [1 << bits - 1 | pattern for pattern in few]


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Draw a word size and two equally long arrays: noise, special floats, few values, similar numbers, long runs."""
    word = draw(st.sampled_from(WORDS))
    count = draw(st.sampled_from([0, 1, 2, 3]) | st.integers(0, 3000) | st.integers(60_000, 140_000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def bits(kind: str, near: bytes | None) -> bytes:
        if kind == "special" and word > 1:
            return bytes(rng.choice(np.array(floats(word), f"<u{word}"), count).tobytes())
        if kind == "normal" and word in (4, 8):
            return bytes(rng.normal(0, 0.02, count).astype(f"<f{word}").tobytes())
        if kind == "near" and near is not None:
            steps = rng.integers(-3, 4, count).astype(f"<i{word}").view(f"<u{word}")
            return bytes((np.frombuffer(near, f"<u{word}") + steps).tobytes())
        if kind == "runs":
            return bytes(np.repeat(rng.integers(0, 3, count // 50 + 1, np.uint8), 50 * word)[: count * word].tobytes())
        return bytes(rng.integers(0, 256, count * word, np.uint8).tobytes())

    kinds = st.sampled_from(["noise", "special", "normal", "runs"])
    base = bits(draw(kinds), None)
    return word, bits(draw(kinds | st.just("near")), base), base


def naive(way: int, plain: bytes, word: int, base: bytes) -> list[bytes]:
    """Return the planes, byte for byte as in the format description."""
    words = plain if way == PLANES else bytes(new ^ old for new, old in zip(plain, base, strict=True))
    return [words[k::word] for k in range(word)]


def assembled(word: int, *frames: bytes) -> bytes:
    return bytes([word]) + b"".join(frames)


# -- round trips --


@QUICK
@given(chunks(), st.sampled_from(list(CODECS)))
@example((4, b"", b""), PLANES)
@example((8, b"", b""), DELTA)
def test_every_bit_survives(found: tuple[int, bytes, bytes], way: int) -> None:
    """Any words survive any codec, with memory at any address."""
    word, plain, base = found
    stored = encode(way, plain, word, with_base(way, base))
    assert isinstance(stored, bytes)
    assert back(way, stored, len(plain), with_base(way, base)) == plain
    odd = memoryview(b"x" + plain)[1:], memoryview(b"xyz" + base)[3:]
    assert encode(way, odd[0], word, odd[1] if with_base(way, base) is not None else None) == stored
    into = memoryview(bytearray(len(plain) + 1))[1:]
    decode(way, stored, len(plain), with_base(way, base), into)
    assert into == plain


@pytest.mark.parametrize("word", [2, 4, 8])
def test_every_pair_of_special_floats_survives(word: int) -> None:
    """Deltas between any two zeros, denormals, infinities and NaNs preserve the bits."""
    every = floats(word)
    new, old = (np.array(p, f"<u{word}").tobytes() for p in zip(*[(a, b) for a in every for b in every], strict=True))
    for way in PLANE_CODECS:
        assert back(way, encode(way, new, word, with_base(way, old)), len(new), with_base(way, old)) == new


@pytest.mark.parametrize("way", PLANE_CODECS)
@pytest.mark.parametrize("word", WORDS)
def test_stored_form_follows_the_description(way: int, word: int) -> None:
    """Planes made in the simplest way are decoded with any compression, and encode() creates the same planes."""
    rng = np.random.default_rng(word)
    base = rng.integers(0, 256, 700 * word, np.uint8).tobytes()
    special = np.array(floats(word), f"<u{word}").tobytes() if word > 1 else b""
    plain = (special + rng.choice(np.frombuffer(base, np.uint8), 700 * word).tobytes())[: 700 * word]
    planes = naive(way, plain, word, base)
    for compressor in (zstandard.ZstdCompressor(), zstandard.ZstdCompressor(level=19, write_checksum=True)):
        stored = assembled(word, *map(compressor.compress, planes))
        assert back(way, stored, len(plain), with_base(way, base)) == plain
    ours = encode(way, plain, word, with_base(way, base))
    reader = zstandard.ZstdDecompressor().stream_reader(ours[1:], read_across_frames=True)
    assert ours[0] == word and reader.read() == b"".join(planes)
    wrong = map(zstandard.compress, [planes[0][::-1], *planes[1:]])
    assert back(way, assembled(word, *wrong), len(plain), with_base(way, base)) != plain


def test_current_stored_form_stays_readable() -> None:
    """This version writes these bytes, and later versions must read them."""
    plain = np.array([0.5, -0.5, 0.25, 1.0], "<f4").tobytes()
    head = "28b52ffd2004210000"
    stored = bytes.fromhex("04" + "".join(head + plane for plane in ("00000000", "00000000", "00008080", "3fbf3e3f")))
    assert encode(PLANES, plain, 4) == stored
    assert back(PLANES, stored, 16) == plain


# -- the registry --


def test_codec_ids_never_change() -> None:
    """The ids are stored in chunk tables, so they never change."""
    assert CODECS == {0: "raw", 1: "planes", 2: "delta"} == {RAW: "raw", PLANES: "planes", DELTA: "delta"}


# -- damage --


def training_like(count: int = 4000) -> bytes:
    return np.random.default_rng(0).normal(0, 0.02, count).astype("<f4").tobytes()


def test_flipped_bit_changes_output_or_is_rejected() -> None:
    """No other error is raised, nothing hangs, and nearly every flip changes the output."""
    plain, base = training_like(600), training_like(600)[::-1]
    base = (np.frombuffer(plain, "<u4") ^ 5).tobytes()
    unnoticed = flips = 0
    for way in PLANE_CODECS:
        stored = encode(way, plain, 4, with_base(way, base))
        assert len(stored) < len(plain)
        for bit in range(0, 8 * len(stored), 1 if way == PLANES else 7):
            wrong = bytearray(stored)
            wrong[bit // 8] ^= 1 << bit % 8
            try:
                unnoticed += back(way, bytes(wrong), len(plain), with_base(way, base)) == plain
            except CorruptError:
                pass
            flips += 1
    assert unnoticed < 0.01 * flips  # for example bits that only enlarge a frame's window


@pytest.mark.parametrize("way", PLANE_CODECS)
def test_truncated_or_extended_chunks_are_rejected(way: int) -> None:
    """A chunk that is too short, too long, or has another length is damaged."""
    plain = training_like(300)
    base = with_base(way, plain[::-1])
    stored = encode(way, plain, 4, base)
    for wrong in [stored[:size] for size in range(len(stored))] + [stored + b"\0", stored + stored, b"\4" + stored]:
        with pytest.raises(CorruptError):
            back(way, wrong, len(plain), base)
    for length in (0, 4, len(plain) - 4, len(plain) - 1, len(plain) + 4):
        with pytest.raises(CorruptError):
            back(way, stored, length, None if base is None else bytes(length))
    assert back(way, stored, len(plain), base) == plain  # the contexts are still valid


@QUICK
@given(st.binary(max_size=200), st.sampled_from(list(CODECS)), st.integers(0, 64), st.integers(0, 130))
def test_noise_is_rejected_or_decoded(stored: bytes, way: int, length: int, base: int) -> None:
    """Any bytes, lengths and bases raise CorruptError or are decoded."""
    try:
        back(way, stored, length, bytes(base) if base % 3 else None)
    except CorruptError:
        return
    assert way == RAW or stored[0] in WORDS


def zstd_frames() -> Iterator[tuple[str, bytes, bool]]:
    """Yield a plane of 5000 bytes in valid and invalid zstd frames, and whether it is valid."""
    plane = bytes(5000)
    frame = zstandard.ZstdCompressor().compress(plane)
    yield "ordinary", frame, True
    yield "checksum", zstandard.ZstdCompressor(write_checksum=True).compress(plane), True
    wide = zstandard.ZstdCompressionParameters(window_log=27, force_max_window=1, strategy=1)
    yield "another parameter", zstandard.ZstdCompressor(compression_params=wide).compress(plane), True
    yield "trailing byte", frame + b"\0", False
    yield "two frames", zstandard.compress(plane[:2500]) * 2, False
    yield "and an empty frame", frame + zstandard.compress(b""), False
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    yield "skippable before", skippable + frame, False
    yield "one byte less", zstandard.compress(plane[:-1]), False
    yield "unknown size", zstandard.ZstdCompressor(write_content_size=False).compress(plane), False
    data = zstandard.ZstdCompressionDict(b"0123456789abcdef" * 64, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    with_dictionary = zstandard.ZstdCompressor(dict_data=data)
    yield "raw dictionary", with_dictionary.compress(b"0123456789abcdef" * 312 + b"01234567"), False
    yield "dictionary id", frame[:4] + bytes([frame[4] | 1, 7]) + frame[5:], False
    yield "magic", b"\x29" + frame[1:], False
    head = b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", 5000 - 256)  # one segment, 16 bits of content size
    yield "one byte repeated", head + (5000 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0", True
    yield "more repeated", head + (5001 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0", False
    yield "no last block", head + (5000 << 3 | 1 << 1).to_bytes(3, "little") + b"\0", False
    yield "reserved block", head + (1 << 3 | 3 << 1 | 1).to_bytes(3, "little") + b"\0", False
    window = b"\x28\xb5\x2f\xfd\x40" + bytes([(27 - 10) << 3]) + struct.pack("<H", 5000 - 256)
    yield "window of 128 MiB", window + (5000 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0", False


@pytest.mark.parametrize(("name", "frame", "good"), [pytest.param(*f, id=f[0]) for f in zstd_frames()])
def test_plane_must_be_one_ordinary_frame(name: str, frame: bytes, good: bool) -> None:
    """No data before or after the frame, a correct size, no dictionary and a bounded window are required."""
    stored = assembled(1, frame)
    if good:
        assert back(PLANES, stored, 5000) == bytes(5000)
        return
    with pytest.raises(CorruptError):
        back(PLANES, stored, 5000)


def test_invalid_stored_forms_are_rejected() -> None:
    """Partial words, invalid word sizes, invalid frames and wrong bases are rejected."""
    frame = zstandard.compress(b"abcd")
    wrong: list[tuple[int, bytes, int, bytes | None]] = [
        (PLANES, assembled(4, *[zstandard.compress(b"a")] * 4), 5, None),
        (PLANES, assembled(4, *[zstandard.compress(b"a")] * 3), 4, None),
        (PLANES, assembled(4, *[zstandard.compress(b"a")] * 5), 4, None),
        (PLANES, assembled(1, b"abcd"), 4, None),
        (PLANES, assembled(1, frame), 0, None),
        (PLANES, assembled(3, frame), 4, None),
        (PLANES, frame, 4, None),
        (PLANES, b"\x00", 0, None),
        (PLANES, b"", 0, None),
        (DELTA, assembled(1, frame), 4, b"abc"),
        (DELTA, assembled(1, frame), 4, None),
        (PLANES, assembled(1, frame), 4, b"abcd"),
        (RAW, b"abc", 4, None),
    ]
    for way, stored, length, base in wrong:
        with pytest.raises(CorruptError):
            back(way, stored, length, base)
    assert back(PLANES, assembled(1, frame), 4) == b"abcd"


BOMB = """
import resource, sys
import zstandard
from ckpt.core.format import codec
from ckpt.errors import CorruptError

small = zstandard.ZstdCompressor(level=19).compress(bytes(200 << 20))
assert len(small) < 10_000
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
if sys.argv[1] == "careless":
    zstandard.ZstdDecompressor().decompress(small)
for word in (1, 4):
    for length in (4 << 20, 4096):
        try:
            codec.decode(codec.PLANES, bytes([word]) + small * word, length, None, memoryview(bytearray(length)))
        except CorruptError:
            continue
        raise SystemExit("a bomb was read")
print("refused")
"""


def test_decompression_bomb_uses_no_memory() -> None:
    """A frame of a few kB for 200 MiB is rejected with only 48 MiB of free memory. Plain zstd runs out of memory."""

    def run(how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", BOMB, how], capture_output=True, text=True, timeout=60, cwd=here)

    here = Path(inspect.getfile(codec)).parent.parent
    careful = run("careful")
    assert careful.stdout == "refused\n", careful.stderr
    careless = run("careless")
    assert careless.returncode != 0 and "MemoryError" in careless.stderr


# -- sizes --


def test_noise_grows_only_slightly() -> None:
    """Incompressible data grows only by headers and three bytes per 128 KiB, which the estimate includes."""
    noise = np.random.default_rng(0).integers(0, 256, MIB, np.uint8).tobytes()
    for word in WORDS:
        assert MIB < len(encode(PLANES, noise, word)) < MIB + 150
        assert 1 <= estimate(PLANES, noise, word) < 1.002
    assert estimate(RAW, noise, 1) == 1
    assert len(encode(PLANES, bytes(MIB), 1)) < 200


# -- threads --


def concurrent_errors(count: int) -> int:
    """Return how many of many chunks, coded by several threads concurrently, are wrong."""
    rng = np.random.default_rng(0)
    work = [rng.integers(0, 256, 300_000 + 8 * k, np.uint8).tobytes() for k in range(count)]
    start = threading.Barrier(4)

    def run(number: int) -> int:
        wrong = 0
        start.wait()
        for plain in work[number::4]:
            stored = encode(PLANES, plain, 4)
            wrong += back(PLANES, stored, len(plain)) != plain
        return wrong

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(run, range(4)))


class Shared:
    """Buffers shared by all threads, with separate zstd contexts."""

    room = codec._Local.room

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    @property
    def compressor(self) -> Any:
        return zstandard.ZstdCompressor()

    @property
    def decompressor(self) -> Any:
        return zstandard.ZstdDecompressor()


def test_threads_use_separate_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own buffers. Shared buffers mix up chunks."""
    assert concurrent_errors(64) == 0
    monkeypatch.setattr(codec, "_local", Shared())
    assert any(concurrent_errors(64) for _ in range(20))
