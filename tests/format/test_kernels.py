"""Compiled kernels make the bytes that Python makes, are never taken when they are not to be trusted, and no install
needs them."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt.core.checkpoint.put import put
from ckpt.core.format import byteplanes, codec, frames, kernels
from ckpt.core.format.kernels import SMALL, copy
from ckpt.errors import UsageError
from compiled import build, compiled_kernels
from processes import REPO

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
NOISE = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
MIB = 1 << 20


@pytest.fixture(params=["compiled", "numpy"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    library = compiled_kernels() if request.param == "compiled" else None
    if request.param == "compiled" and library is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(kernels, "find", lambda: library)
    yield request.param


# -- copies and digests --


@QUICK
@given(
    st.one_of(st.integers(0, 3 * SMALL), st.integers(SMALL, 200_000)), st.integers(0, 70), st.integers(0, 70),
)  # fmt: skip
@example(SMALL, 0, 0)
@example(8192 + 1, 0, 1)
@pytest.mark.usefixtures("either_way")
def test_a_copy_is_right_and_nothing_beside_it_is_touched(size: int, start: int, at: int) -> None:
    """Of any size, from and to any address, with the digest that xxhash makes and no other."""
    data = NOISE[start : start + size]
    room = np.full(size + 160, 0xA5, np.uint8)
    digest = np.frombuffer(xxhash.xxh3_128_digest(data), np.uint8)[None]
    where = np.array([[0], [size], [room.ctypes.data + at]], np.int64)
    assert put(data.data, *where[:2], digest, where[2]) == []
    other = np.zeros(size, np.uint8)
    assert put(data.data, *where[:2], digest ^ 1, np.array([other.ctypes.data])) == [0]
    again = np.full(size + 160, 0xA5, np.uint8)
    copy(again[at : at + size], data)
    expected = np.full(size + 160, 0xA5, np.uint8)
    expected[at : at + size] = data
    assert (room == expected).all() and (again == expected).all()


@pytest.mark.parametrize(
    "size", [241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 8192, 8193, 9216, 70_001]
)
def test_the_digest_at_the_edges_of_blocks_and_stripes(size: int, library: kernels.Kernels) -> None:
    """The library's own digest, whatever `SMALL` is, from a last byte alone to whole blocks."""
    for start in range(70):
        for streamed in (False, True):
            data, room = NOISE[start : start + size], np.zeros(size, np.uint8)
            assert library.copy_digest(room, data, streamed) == xxhash.xxh3_128_digest(data)
            assert (room == data).all()


@pytest.mark.usefixtures("either_way")
def test_what_does_not_fit_is_refused() -> None:
    """No byte is written beyond the target, nor into memory that must not be written."""
    for into, data in ((bytearray(9999), bytes(10_000)), (bytearray(10_000), bytes(9999)), (bytes(9999), bytes(9999))):
        with pytest.raises(UsageError):
            copy(into, data)


# -- words: cut into planes, differences, roundings --

COUNTS = (0, 1, 2, 3, 7, 31, 33, 1023, 1024, 1025, 2049, 4097, 8191, 8193, 20_001)


@pytest.fixture(params=["this one", "an old one"])
def library(request: pytest.FixtureRequest) -> kernels.Kernels:
    """By processor: a wheel that was made on one must run on another."""
    found = compiled_kernels(request.param)
    if found is None:
        pytest.skip("no C compiler")
    return found


def at(address: int, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same words, so many bytes behind a multiple of 64."""
    room = np.zeros(data.nbytes + 192, np.uint8)
    start = -room.ctypes.data % 64 + address
    there: np.ndarray[Any, Any] = room[start : start + data.nbytes].view(data.dtype)
    there[:] = data
    return there


def by_numpy(way: int, words: np.ndarray[Any, Any], base: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """The planes, by numpy alone."""
    planes = np.zeros((words.itemsize, len(words)), np.uint8)
    byteplanes._cut_by_numpy(way, words, base, planes)
    return planes


@pytest.mark.parametrize("word", [1, 2, 4, 8])
@pytest.mark.parametrize("way", [codec.PLANES, codec.ROTATED, codec.DELTA, codec.FLOAT_DELTA])
def test_words_are_cut_as_numpy_cuts_them_and_come_back(way: int, word: int, library: kernels.Kernels) -> None:
    """For every codec and size of words, of numbers that fill no register, between any addresses. Nothing beside what
    is made is written."""
    dice = np.random.default_rng(word)
    for nth, count in enumerate(COUNTS):
        noise = dice.integers(0, 256, (2, count * word), np.uint8)
        noise[1, ::3] = noise[0, ::3]
        words, old = (one.view(byteplanes.UNSIGNED[word]) for one in noise)
        base = old if codec.CODECS[way].base == "same" else None
        expected = by_numpy(way, words, base)
        for shift in (0, 1, nth + 3):
            there, beside = at(shift, words), None if base is None else at(2 * shift + 1, base)
            room = np.full(word * (count + shift) + 128, 0xA5, np.uint8)  # planes with gaps between them, if shifted
            planes = room[shift : shift + word * (count + shift)].reshape(word, count + shift)[:, :count]
            library.cut(way, there, beside, planes)
            assert (planes == expected).all()
            planes[:] = 0xA5
            assert (room == 0xA5).all() and (there == words).all()
            rows = [at(shift + k, row) for k, row in enumerate(expected)]
            library.join(way, rows, beside, room[shift : shift + words.nbytes].view(words.dtype))
            assert (room[shift : shift + words.nbytes] == noise[0]).all()
            room[shift : shift + words.nbytes] = 0xA5
            assert (room == 0xA5).all()


@pytest.mark.parametrize("dtype", sorted(codec._WORDS))
def test_every_dtype_is_stored_alike(dtype: str, library: kernels.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels and without, whole and as a difference, numbers and noise; each reads what the other stored."""
    word, dice = codec.word_of(dtype), np.random.default_rng(3)
    numbers = dice.normal(0, 1, 30_003)
    plain = numbers.astype(f"f{word}" if word > 1 else "i1").tobytes() + NOISE[: 1001 * word].tobytes()
    base = (numbers * 1.001).astype(f"f{word}" if word > 1 else "i1").tobytes() + NOISE[7 : 7 + 1001 * word].tobytes()
    for way, old in ((codec.whole_codec(dtype), None), (codec.delta_codec(dtype), base)):
        stored = []
        for one in (library, None):
            monkeypatch.setattr(byteplanes, "_library", lambda one=one: one)
            monkeypatch.setattr(frames, "_library", lambda one=one: one)
            stored.append(codec.encode(way, memoryview(b"-" + plain)[1:], word, old))
            into = bytearray(len(plain) + 1)
            codec.decode(way, stored[0], len(plain), old, memoryview(into)[1:])
            assert into[1:] == plain
        assert abs(len(stored[0]) - len(stored[1])) < 0.01 * len(plain)


def test_words_are_rounded_as_numpy_rounds_them(library: kernels.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sign, exponent, tie and NaN, of odd numbers, between any addresses; a wrong bit anywhere is seen."""
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    everything = (np.arange(65536, dtype=np.uint32)[:, None] << np.uint32(16) | lows).ravel()
    for count in (*COUNTS, len(everything) - 1):
        master = everything[-count or len(everything) :]
        right = np.zeros(len(master), np.uint16)
        byteplanes._round_by_numpy(master, right)
        for shift in (0, 1, 2, 5):
            there, room = at(shift, master), np.full(2 * count + 64, 0xA5, np.uint8)
            made = room[shift + 1 : shift + 1 + 2 * count]
            library.round(there, made)
            assert made.tobytes() == right.tobytes() and library.is_rounded(there, made)
            for wrong in {0, count, 2 * count - 1} if count else ():
                made[wrong] ^= 0x80
                assert not library.is_rounded(there, made)
                made[wrong] ^= 0x80
            made[:] = 0xA5
            assert (room == 0xA5).all()


# -- frames --


def frame(library: kernels.Kernels, plane: np.ndarray[Any, Any], most: int) -> bytes:
    """Made in so many bytes; nothing beside them is written."""
    room = np.full(most + 64, 0xA5, np.uint8)
    size = library.huffman(plane, room[:most], np.empty(kernels.WORK, np.uint8))
    assert size <= most and (room[most:] == 0xA5).all()
    return room[:size].tobytes()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 300_000), st.integers(1, 129), st.floats(0, 40), st.integers(0, 2**32), st.floats(0, 1.1))
@example(131_072, 2, 0.0, 0, 1.0)
@example(131_073, 129, 1.0, 0, 1.0)
@example(262_144 + 255, 40, 30.0, 0, 1.0)
@example(256, 129, 0.0, 0, 1.0)
def test_any_zstd_reads_the_frames(
    size: int,
    symbols: int,
    skew: float,
    seed: int,
    share: float,
) -> None:
    """Of any bytes up to 128, however often each is there; where room does not do, it says so and writes no further."""
    library = compiled_kernels()
    if library is None:
        pytest.skip("no C compiler")
    dice = np.random.default_rng(seed)
    chances = dice.random(symbols) ** skew + 1e-12
    some = dice.permutation(129)[:symbols]
    plane = some[dice.choice(symbols, size, p=chances / chances.sum())].astype(np.uint8)
    found = frame(library, at(seed % 64, plane), size + 200)
    assert zstandard.decompress(found) == plane.tobytes()
    counts = np.bincount(plane)
    shares = counts[counts > 0] / size
    least = float(-(shares * np.log2(shares)).sum()) * size / 8
    assert len(found) <= max(1.02 * least, size / 8) + 0.06 * size + 200 or len(found) <= 1.002 * size + 20
    short = frame(library, plane, int(share * len(found)))
    assert short in (b"", found)
    plane[dice.integers(size)] = 129 + seed % 127
    assert frame(library, plane, size + 200) == b""


def test_frames_are_as_small_as_zstds(library: kernels.Kernels) -> None:
    """Exponents of weights: within a thousandth of their entropy's bytes and what a code without fractions costs."""
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32)
    plane = (weights >> 23 & 0x7F).astype(np.uint8)
    by_zstd = len(zstandard.compress(plane.tobytes(), 1))
    assert len(frame(library, plane, len(plane))) < 1.001 * by_zstd
    monkey = np.full(1 << 20, 7, np.uint8)
    assert len(frame(library, monkey, len(monkey))) < 60  # a byte that repeats, in each block


class Wrong:
    """Kernels that are wrong in one way."""

    def __init__(self, right: kernels.Kernels, lie: str) -> None:
        self.right, self.lie = right, lie

    def cut(self, way: int, words: Any, base: Any, planes: Any) -> None:
        self.right.cut(way, words, base, planes)
        if self.lie == "cut" and way == codec.FLOAT_DELTA and words.itemsize == 2:
            planes[-1, -1] ^= 1

    def join(self, way: int, planes: Any, base: Any, words: Any) -> None:
        self.right.join(way, planes, base, words)
        if self.lie == "join" and way == codec.ROTATED and words.itemsize == 8:
            words[-1] ^= 1

    def round(self, words: Any, into: Any) -> None:
        self.right.round(words, into)
        if self.lie == "NaNs":
            into[(words & 0x7FFFFFFF) > 0x7F800000] = 0x7FFF

    def is_rounded(self, words: Any, found: Any) -> bool:
        return self.lie == "yes" or (self.lie != "no" and self.right.is_rounded(words, found))

    def huffman(self, plane: Any, into: Any, work: Any) -> int:
        if self.lie == "none at all":
            return 0
        size = self.right.huffman(plane, into, work)
        if self.lie == "frame":
            into[size - 2] ^= 1
        if self.lie == "beside":
            into.base[len(into) + 3] = 0
        return size


def test_kernels_that_do_otherwise_are_not_taken(
    library: kernels.Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who uses them tries them first on what he needs them for; he then does without, and says so."""
    caplog.set_level(logging.INFO, "ckpt")
    for find, lies in (
        (byteplanes._library, ("cut", "join", "NaNs", "yes", "no")),
        (frames._library, ("frame", "none at all", "beside")),
    ):
        for lie in ("none", *lies):
            caplog.clear()
            monkeypatch.setattr(kernels, "find", lambda lie=lie: Wrong(library, lie))
            assert (find.__wrapped__() is None) == (lie != "none")
            assert [record.levelno for record in caplog.records] == [logging.WARNING] * (lie != "none")
        caplog.clear()
        monkeypatch.setattr(kernels, "find", lambda: None)
        assert find.__wrapped__() is None and not caplog.records  # it has been said that there are none


# -- which library is taken --


def test_the_library_of_another_source_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name says of which source it was made: after a change, or an upgrade by hand, numpy does it."""
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    for source in (REPO / "ckpt/core/format").glob("*.c"):
        shutil.copy(source, tmp_path)
    assert kernels.library_path().name == build().library_name()
    before = kernels.library_path()
    for source in list(tmp_path.glob("*.c")):
        with open(source, "a") as file:
            file.write("\n")
        assert kernels.library_path() != before
        before = kernels.library_path()
        source.unlink()
    assert kernels.find.__wrapped__() is None


def test_no_library_is_said_once_and_a_wrong_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None, garbage, another library, and one that does otherwise: each is passed over, and said."""
    caplog.set_level(logging.INFO, "ckpt")
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    path = kernels.library_path()
    assert kernels.find.__wrapped__() is None
    path.write_bytes(b"no library")
    assert kernels.find.__wrapped__() is None
    other = Path(ctypes.__file__).parent.parent
    some = next((p for p in other.rglob("_ctypes_test*.so")), None) or next(other.rglob("*.so"))
    shutil.copy(some, path)
    assert kernels.find.__wrapped__() is None
    assert [r.levelno for r in caplog.records] == [logging.INFO] * 3
    finding = kernels.functools.cache(kernels.find.__wrapped__)
    finding(), finding()
    assert len(caplog.records) == 4


class Lying:
    """A library of Python's, that is wrong in one way."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    def copy_streamed(self, target: Any, source: Any) -> None:
        target[:] = source
        if self.lie == "copy" and len(source) % 2:
            target[-1] ^= 1

    def copy_digest(self, target: Any, source: Any, streamed: bool) -> bytes:
        target[:] = source
        if self.lie == "before" and streamed and target.base is not None:
            target.base[0] ^= 1
        if self.lie == "digest" and len(source) > 5000:
            return bytes(16)
        return xxhash.xxh3_128_digest(source)


def test_a_library_that_does_otherwise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first use it is tried, on sizes and addresses at which a compiler may go wrong."""
    taken = {lie for lie in ("none", "copy", "before", "digest") if kernels.does_as_python(Lying(lie))}  # type: ignore[arg-type]
    assert taken == {"none"}
    monkeypatch.setattr(kernels, "Kernels", lambda loaded: Lying("digest"))
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda path: None)
    assert kernels.find.__wrapped__() is None


# -- installing --


def test_the_page_on_pypi_has_no_dead_links() -> None:
    """Links into the repository, and pictures from there, are words; code and links to elsewhere stay as they are."""
    page = build().as_page(readme := (REPO / "README.md").read_text())
    code = re.compile(r"(?ms)^```.*?^```")
    assert code.findall(page) == code.findall(readme) and "](docs/" in readme
    assert not re.search(r"\]\((?!https?://)", code.sub("", page)) and "![" not in page
    assert (
        build().as_page("[a](b.md) ![c](d.svg) [e](https://f)\n```\n[g](h)\n```\n")
        == "a  [e](https://f)\n```\n[g](h)\n```\n"
    )


def wheel(tmp_path: Path, compiler: str, *more: str) -> tuple[Path, str]:
    """A wheel, made from a copy of what a source archive has, as pip would have it made; and what was said."""
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    for name in ("ckpt", "backends"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", *more):
        shutil.copy(REPO / name, source)
    environment = {**os.environ, "CC": compiler, "PATH": str(tmp_path)} if compiler else dict(os.environ)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    ended = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = (tmp_path / "dist").glob("*.whl")
    return found, ended.stdout + ended.stderr


TRIED = """
import numpy, sys
from ckpt.core.format import kernels
assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__
a = numpy.arange(100_000); b = a * 0
kernels.copy(b, a); assert (a == b).all()
print(kernels.find() is not None)
"""


def tried(found: Path, folder: Path) -> str:
    """Whether the kernels of a wheel are used once it is unpacked, as "True" or "False"."""
    zipfile.ZipFile(found).extractall(folder)
    command = [sys.executable, "-c", TRIED, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_wheel_has_the_library_and_is_for_this_machine(tmp_path: Path) -> None:
    """It is for any Python, since there is no Python in the library."""
    if compiled_kernels() is None:
        pytest.skip("no C compiler")
    found, _ = wheel(tmp_path, "")
    assert "-py3-none-linux_" in found.name
    assert [name for name in zipfile.ZipFile(found).namelist() if name.endswith(".so")] != []
    assert tried(found, tmp_path / "unpacked") == "True"
    (about,) = (tmp_path / "unpacked").glob("*.dist-info/METADATA")
    assert about.read_text().rstrip().endswith(build().as_page((REPO / "README.md").read_text()).rstrip())


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "/bin/false"])
def test_no_compiler_keeps_nothing_from_being_installed(compiler: str, tmp_path: Path) -> None:
    """Without one, and with one that fails, the wheel is as good for any machine, and numpy does it."""
    found, said = wheel(tmp_path, compiler)
    assert found.name.endswith("-py3-none-any.whl") and "numpy will do instead" in said
    assert tried(found, tmp_path / "unpacked") == "False"
