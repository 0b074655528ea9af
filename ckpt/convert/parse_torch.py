"""A file of `torch.save`: a zip archive of one pickle and the bytes of all storages, none of them compressed.

Only the directory and the pickle are read here, and the pickle by `ckpt.convert.safe_pickle`, so nothing in it runs.
Tensors become ranges of the file, to be read when they are wanted.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import IO, Any, cast

from ckpt.convert import safe_pickle
from ckpt.convert.parse_entries import at_place, from_description, from_state
from ckpt.convert.parse_values import ALLOWED, Values
from ckpt.convert.source import DESCRIPTION
from ckpt.convert.source_files import Crc, Foreign
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.format.regular_file import open_regular, reading
from ckpt.format.values import Path, show

MAX_DIRECTORY = 32 << 20  # bytes: some half a million records
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # files from before torch 1.6 begin with this number
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar")
_LOCAL = struct.Struct("<4s5H3I2H")  # the header before each record
_DAMAGE = (
    zipfile.BadZipFile, struct.error, ValueError, LookupError, NotImplementedError, OverflowError, RuntimeError,
    EOFError, TypeError, AttributeError,
)  # fmt: skip
_AGAIN = (
    "load it where it can be trusted with torch.load(..., weights_only=True), and torch.save it with torch 1.6 or newer"
)


class FileSection(io.RawIOBase):
    """Some bytes of a file, as a file of its own. `near`: bytes at each end that are read at once and kept."""

    def __init__(self, fd: int, start: int, length: int, near: int = 0) -> None:
        self._fd, self.start, self.length, self._at = fd, start, length, 0
        self._near: list[tuple[int, bytes]] = []
        if near and length <= 2 * near:
            self._near = [(0, self._pread(0, length))]
        elif near:
            self._near = [(0, self._pread(0, near)), (length - near, self._pread(length - near, near))]

    def _pread(self, at: int, length: int) -> bytes:
        try:
            return os.pread(self._fd, length, self.start + at)
        except OSError as error:
            raise CorruptError(f"it cannot be read: {error.strerror}") from None

    def take(self, at: int, length: int) -> bytes:
        """CorruptError if all of it is not there, or it is implausibly much."""
        if not 0 <= at <= at + length <= self.length or length > safe_pickle.MAX_BYTES:
            raise CorruptError("the file was cut off, or its directory is damaged")
        for start, data in self._near:
            if start <= at and at + length <= start + len(data):
                return data[at - start : at - start + length]
        found = self._pread(at, length)
        if len(found) != length:
            raise CorruptError("the file was cut off")
        return found

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self.length - self._at)
        wanted = rest if size is None or size < 0 else min(size, rest)
        if wanted > MAX_DIRECTORY:
            raise CorruptError(f"a directory of {wanted >> 20} MiB")
        found = self.take(self._at, wanted)
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError("before the start of the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Archive:
    """The records of a torch.save archive, by their names in it: (place in the file, bytes)."""

    window: FileSection
    records: dict[str, tuple[int, int]]
    sums: dict[str, int]

    def read(self, name: str, most: int) -> bytes:
        at, length = self.records[name]
        if length > most:
            raise FormatError(f"{name} has {length >> 20} MiB; at most {most >> 20} are read")
        return self.window.take(at - self.window.start, length)

    def crcs(self, file: str) -> list[Crc]:
        """Of the records of tensors. Some writers leave them out, and say 0."""
        return [
            Crc(file, *place, self.sums[name])
            for name, place in self.records.items()
            if name.startswith("data/") and self.sums[name]
        ]

    def load(self, path: Path = ()) -> Any:
        """Its one pickle, inert."""
        return safe_pickle.load(self.read("data.pkl", safe_pickle.MAX_BYTES), ALLOWED, path)


def open_archive(window: FileSection) -> Archive:
    """CorruptError if it is damaged, FormatError or UsageError if it is not of `torch.save`."""
    try:
        infos = zipfile.ZipFile(cast(IO[bytes], window)).infolist()
        if any("/code/" in info.filename or info.filename.endswith("/constants.pkl") for info in infos):
            raise UsageError(
                "a TorchScript archive, which holds a program; save what is in it instead: "
                "torch.save(torch.jit.load(path).state_dict(), …)"
            )
        records, sums = _records(window, infos), {info.filename: info.CRC for info in infos}
    except _DAMAGE as error:
        raise CorruptError(f"the archive is damaged: {str(error)[:200]}") from None
    except OSError as error:
        raise CorruptError(f"the archive is damaged: {error.strerror or error}") from None
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise FormatError("a zip archive that torch.save did not write: there is not one data.pkl in it")
    root = pickles[0].removesuffix("data.pkl")
    found = Archive(
        window,
        {n.removeprefix(root): place for n, place in records.items() if n.startswith(root)},
        {n.removeprefix(root): value for n, value in sums.items()},
    )
    if "byteorder" in found.records and found.read("byteorder", 64) != b"little":
        raise UsageError(f"written on a big-endian machine: {_AGAIN} on a little-endian one")
    return found


def _records(window: FileSection, infos: list[zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    records: dict[str, tuple[int, int]] = {}
    end = 0
    for info in sorted(infos, key=lambda one: one.header_offset):
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise UsageError(f"{info.filename} is compressed; torch.save does not: {_AGAIN}")
        if info.flag_bits & 1:
            raise UsageError(f"{info.filename} is encrypted: decrypt it first")
        header = window.take(info.header_offset, _LOCAL.size)
        magic, *_, name_length, extra = _LOCAL.unpack(header)
        at = info.header_offset + _LOCAL.size + name_length + extra
        if magic != b"PK\3\4" or info.filename in records:
            raise CorruptError(f"the archive is damaged at {info.filename}")
        if info.header_offset < end or at + info.file_size > window.length:
            raise CorruptError(f"the archive is damaged: {info.filename} overlaps another record")
        end = at + info.file_size
        records[info.filename] = window.start + at, info.file_size
    return records


def sniff(path: FilePath) -> bool:
    """Whether a file looks like one of torch.save, of any age."""
    try:
        with reading(path) as file:
            head = file.read(512)
    except OSError:
        return False
    if head.startswith(b"PK\3\4") and len(head) >= _LOCAL.size:
        length = _LOCAL.unpack_from(head)[-2]
        name = head[_LOCAL.size : _LOCAL.size + length]
        last = name.rpartition(b"/")[2]
        return last in (b"data.pkl", b"version", b"byteorder", b".format_version", b"constants.pkl") or (
            path.suffix in _SUFFIXES
        )
    return head.startswith(_LEGACY) or (path.suffix in _SUFFIXES and head[:1] == b"\x80")


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """What a file of torch.save holds. A bare state_dict goes to `at`.

    CorruptError if it is damaged, FormatError if it names code or is not such a file, UsageError if something in it
    cannot be kept; the message says where.
    """
    if path.suffix == ".distcp":
        raise UsageError(f"{path} is a part of a distributed checkpoint: give its folder, {path.parent}")
    with opened(path) as fd:
        window = FileSection(fd, 0, os.fstat(fd).st_size)
        if window.length < 4 or window.take(0, 4) != b"PK\3\4":
            raise _not_zip(path, window)
        with told(path):
            archive = open_archive(window)
            values = Values(find_in(archive, path.name))
            root = values.plain(archive.load(), ())
            if type(root) is dict and DESCRIPTION in root:
                place = lambda keys: at_place(root, keys)  # noqa: E731
                rest = {key: value for key, value in root.items() if key != DESCRIPTION}
                found = from_description("a torch.save file", path.parent, root[DESCRIPTION], rest, place)
            else:
                found = from_state("a torch.save file", path.parent, root, at, values)
            return replace(found, crcs=tuple(archive.crcs(path.name)))


def find_in(archive: Archive, file: str) -> Any:
    """Where a storage of an archive lies."""

    def find(key: str) -> tuple[str, int, int]:
        return file, *archive.records[f"data/{key}"]

    return find


def _not_zip(path: FilePath, window: FileSection) -> Exception:
    head = window.take(0, min(64, window.length))
    if head.startswith(_LEGACY) or head[:1] == b"\x80":
        return UsageError(f"{path}: written by torch before 1.6, or a plain pickle: {_AGAIN}")
    if b"ustar" in window.take(0, min(512, window.length)):
        return UsageError(f"{path}: a tar archive, as torch before 0.2 wrote it: {_AGAIN}")
    return FormatError(f"{path}: not a file of torch.save")


@contextmanager
def opened(path: FilePath) -> Iterator[int]:
    """A file to read. UsageError if there is none, or it is something else, such as a pipe."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def told(path: FilePath, inside: Path = ()) -> Iterator[None]:
    """Errors say of which file they are."""
    try:
        yield
    except (CorruptError, FormatError, UsageError) as error:
        raise type(error)(f"{path}{f', {show(inside)}' if inside else ''}: {str(error)[:2000]}") from None
