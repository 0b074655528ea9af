"""Compiled kernels make the bytes that Python makes, are never taken when they are not to be trusted, and no install
needs them."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.format import kernels
from ckpt.format.kernels import SHARE, SMALL, copy, copy_digest, copy_digests
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
    st.booleans(),
)  # fmt: skip
@example(SMALL, 0, 0, True)
@example(8192 + 1, 0, 1, True)
@example(kernels.PIECE + 1, 0, 1, True)
@pytest.mark.usefixtures("either_way")
def test_a_copy_is_right_and_nothing_beside_it_is_touched(size: int, start: int, at: int, streamed: bool) -> None:
    """Of any size, from and to any address, with the digest that xxhash makes."""
    data = NOISE[start : start + size]
    room = np.full(size + 160, 0xA5, np.uint8)
    digest = copy_digest(room[at : at + size], data, streamed=streamed)
    assert digest == xxhash.xxh3_128_digest(data)
    again = np.full(size + 160, 0xA5, np.uint8)
    copy(again[at : at + size], data, streamed=streamed)
    expected = np.full(size + 160, 0xA5, np.uint8)
    expected[at : at + size] = data
    assert (room == expected).all() and (again == expected).all()


@pytest.mark.parametrize(
    "size", [241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 8192, 8193, 9216, 70_001]
)
def test_the_digest_at_the_edges_of_blocks_and_stripes(size: int) -> None:
    """The library's own digest, whatever `SMALL` is, from a last byte alone to whole blocks."""
    library = compiled_kernels()
    if library is None:
        pytest.skip("no C compiler")
    for start in range(70):
        for streamed in (False, True):
            data, room = NOISE[start : start + size], np.zeros(size, np.uint8)
            assert library.copy_digest(room, data, streamed) == xxhash.xxh3_128_digest(data)
            assert (room == data).all()


@pytest.mark.usefixtures("either_way")
def test_several_threads_do_the_same() -> None:
    """What is cut over threads is whole, and digests come in the order of their pairs."""
    data = np.random.default_rng(1).integers(0, 256, 3 * SHARE + 12_345, np.uint8)
    for threads in (1, 2, 5):
        room = np.zeros_like(data)
        copy(room, data, streamed=True, threads=threads)
        assert (room == data).all()
        room[:] = 0
        cuts = [0, 5, 5, 100_000, MIB, len(data)]
        pairs = [(room[a:b].data, data[a:b].data) for a, b in pairwise(cuts)]
        assert copy_digests(pairs, threads=threads) == [xxhash.xxh3_128_digest(source) for _, source in pairs]
        assert (room == data).all()
    assert copy_digests([], threads=3) == []


@pytest.mark.usefixtures("either_way")
def test_what_does_not_fit_is_refused() -> None:
    """No byte is written beyond the target, nor into memory that must not be written."""
    for into, data in ((bytearray(9999), bytes(10_000)), (bytearray(10_000), bytes(9999)), (bytes(9999), bytes(9999))):
        with pytest.raises(UsageError):
            copy(into, data)
        with pytest.raises(UsageError):
            copy_digest(into, data)


# -- which library is taken --


def test_the_library_of_another_source_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name says of which source it was made: after a change, or an upgrade by hand, numpy does it."""
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    shutil.copy(REPO / "ckpt/format/kernels.c", tmp_path)
    assert kernels.library_path().name == build().library_name()
    before = kernels.library_path()
    with open(tmp_path / "kernels.c", "a") as file:
        file.write("\n")
    assert kernels.library_path() != before
    (tmp_path / "kernels.c").unlink()
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
from ckpt.format import kernels
assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__
a = numpy.arange(100_000); b = a * 0
kernels.copy_digest(b, a); assert (a == b).all()
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


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "/bin/false"])
def test_no_compiler_keeps_nothing_from_being_installed(compiler: str, tmp_path: Path) -> None:
    """Without one, and with one that fails, the wheel is as good for any machine, and numpy does it."""
    found, said = wheel(tmp_path, compiler)
    assert found.name.endswith("-py3-none-any.whl") and "numpy will do instead" in said
    assert tried(found, tmp_path / "unpacked") == "False"
