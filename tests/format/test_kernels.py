"""The compiled library gives the same results as Python, is used only if it works, and is optional."""

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

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt.core.format import kernels
from ckpt.core.format.kernels import SMALL, put
from compiled import build, compiled_kernels
from processes import REPO

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
NOISE = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)


@pytest.fixture(params=["compiled", "python"])
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
def test_copy_is_correct_and_touches_nothing_else(size: int, start: int, at: int) -> None:
    """Any size and any address work, and only xxhash's digest is accepted."""
    data = NOISE[start : start + size]
    room = np.full(size + 160, 0xA5, np.uint8)
    digest = np.frombuffer(xxhash.xxh3_128_digest(data), np.uint8)[None]
    where = np.array([[0], [size], [room.ctypes.data + at]], np.int64)
    assert put(data.data, *where[:2], digest, where[2]) == []
    other = np.zeros(size, np.uint8)
    assert put(data.data, *where[:2], digest ^ 1, np.array([other.ctypes.data])) == [0]
    expected = np.full(size + 160, 0xA5, np.uint8)
    expected[at : at + size] = data
    assert (room == expected).all()


@pytest.mark.parametrize("processor", ["this one", "an old one"])
@pytest.mark.parametrize(
    "size", [241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 8192, 8193, 9216, 70_001]
)
def test_digest_is_correct_at_block_boundaries(size: int, processor: str) -> None:
    """Covers a single last byte up to whole blocks. A wheel built on one processor runs on another."""
    library = compiled_kernels(processor)
    if library is None:
        pytest.skip("no C compiler")
    for start in range(70):
        data, room = NOISE[start : start + size], np.zeros(size, np.uint8)
        assert library.copy_digest(room.ctypes.data, data.ctypes.data, size) == xxhash.xxh3_128_digest(data)
        assert (room == data).all()


# -- which library is used --


def test_library_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's name has the digest of its source. After a change or a manual upgrade, Python is used."""
    shutil.copy(REPO / "ckpt/core/format/kernels.c", tmp_path)
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    assert kernels.library_path().name == build().library_name()
    before = kernels.library_path()
    with open(tmp_path / "kernels.c", "a") as file:
        file.write("\n")
    assert kernels.library_path() != before
    assert kernels.find.__wrapped__() is None


def test_unusable_library_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a missing library, garbage, and a library without our function."""
    caplog.set_level(logging.INFO, "ckpt")
    shutil.copy(REPO / "ckpt/core/format/kernels.c", tmp_path)
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


class WrongLibrary:
    """A library in Python with one wrong result."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    def copy_digest(self, target: int, source: int, length: int) -> bytes:
        ctypes.memmove(target, source, length)
        if self.lie == "copy" and length % 2:
            ctypes.memset(target + length - 1, 7, 1)
        if self.lie == "beside":
            ctypes.memset(target + length, 7, 1)
        if self.lie == "digest" and length > 5000:
            return bytes(16)
        return xxhash.xxh3_128_digest(ctypes.string_at(source, length))


def test_library_with_wrong_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is checked before its first use, with sizes and addresses where a compiler may fail."""
    assert [lie for lie in ("none", "copy", "beside", "digest") if kernels.works(WrongLibrary(lie))] == ["none"]  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "Kernels", lambda loaded: WrongLibrary("digest"))
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda path: None)
    assert kernels.find.__wrapped__() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# -- installing --


def test_page_on_pypi_has_no_dead_links() -> None:
    """Relative links and pictures are replaced by text. Code and other links are unchanged."""
    page = build().as_page(readme := (REPO / "README.md").read_text())
    code = re.compile(r"(?ms)^```.*?^```")
    assert code.findall(page) == code.findall(readme) and "](docs/" in readme
    assert not re.search(r"\]\((?!https?://)", code.sub("", page)) and "![" not in page
    assert (
        build().as_page("[a](b.md) ![c](d.svg) [e](https://f)\n```\n[g](h)\n```\n")
        == "a  [e](https://f)\n```\n[g](h)\n```\n"
    )


def wheel(tmp_path: Path, compiler: str, *more: str) -> tuple[Path, str]:
    """Build a wheel from a copy of the source archive, like pip. Return it with the output."""
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
from ckpt.core.format.digest import chunk_digest
a = numpy.arange(100_000); b = a * 0
library = kernels.find()
if library is not None:
    assert library.copy_digest(b.ctypes.data, a.ctypes.data, a.nbytes) == chunk_digest(a.data) and (a == b).all()
print(library is not None)
"""


def tried(found: Path, folder: Path) -> str:
    """Return "True" if the unpacked wheel uses its library, otherwise "False"."""
    zipfile.ZipFile(found).extractall(folder)
    command = [sys.executable, "-c", TRIED, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_wheel_has_the_library_for_this_machine(tmp_path: Path) -> None:
    """The wheel fits any Python, because the library does not use Python."""
    if compiled_kernels() is None:
        pytest.skip("no C compiler")
    found, _ = wheel(tmp_path, "")
    assert "-py3-none-linux_" in found.name
    assert [name for name in zipfile.ZipFile(found).namelist() if name.endswith(".so")] != []
    assert tried(found, tmp_path / "unpacked") == "True"
    (about,) = (tmp_path / "unpacked").glob("*.dist-info/METADATA")
    assert about.read_text().rstrip().endswith(build().as_page((REPO / "README.md").read_text()).rstrip())


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "/bin/false"])
def test_install_works_without_a_compiler(compiler: str, tmp_path: Path) -> None:
    """Without a working compiler, the wheel fits any machine, and Python is used."""
    found, output = wheel(tmp_path, compiler)
    assert found.name.endswith("-py3-none-any.whl") and "kernels.c is not compiled" in output
    assert tried(found, tmp_path / "unpacked") == "False"
