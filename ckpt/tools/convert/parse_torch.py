"""Parse a torch.save file with torch's unpickler for `weights_only=True`, so that no code in the file is executed.

Only the pickle is read. Its storages get no memory, but their offsets in the file are known. So each tensor becomes a
range of the file, which is read when it is needed.
"""

from __future__ import annotations

import _codecs
import io
import itertools
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import IO, Any

import numpy as np
import torch
from torch._weights_only_unpickler import Unpickler

from ckpt.core.format.regular_file import LOST, open_regular, start_of
from ckpt.core.format.values import Path, show
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.tools.convert.parse_entries import OBJECT, Container, Values, at_place, from_description
from ckpt.tools.convert.parse_state import from_state
from ckpt.tools.convert.source import DESCRIPTION
from ckpt.tools.convert.source_files import Foreign, cannot_read

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar")
_RECORDS = (b"data.pkl", b"version", b"byteorder", b".format_version", b"constants.pkl")
_LOCAL = struct.Struct("<26x2H")  # zip header before each record; only the two lengths at its end are used
_LIGHTNING = ("lightning_fabric.utilities.data", "lightning.fabric.utilities.data",
              "pytorch_lightning.utilities.parsing", "lightning.pytorch.utilities.parsing")  # fmt: skip
_NUMPY = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}


def _default_dict(factory: Any = None) -> dict[Any, Any]:
    return {}


# Classes of plain data that torch does not allow by default: numpy's arrays and scalars, and subclasses of dict.
_ALSO: list[Any] = [
    np.ndarray, np.dtype, int, bytes, _codecs.encode, (_default_dict, "collections.defaultdict"),
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)),
    *((made, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, made in _NUMPY.items()),
    *((dict, f"{module}.AttributeDict") for module in _LIGHTNING),
]  # fmt: skip


class _Object:
    """A stand-in for an object that only code could create. It accepts and ignores the object's state."""

    def __new__(cls, *args: Any) -> _Object:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_KNOWN = ("torch._", "torch.distributed.")  # prefixes of classes for which torch itself raises a clear error
_AGAIN = "in a trusted environment, load it with torch.load(..., weights_only=True) and torch.save it again"


def sniff(path: FilePath) -> bool:
    """Return True if a file looks like a torch.save file of any version."""
    head = start_of(path, 512)
    if head.startswith(b"PK\3\4") and len(head) >= _LOCAL.size:
        length, _ = _LOCAL.unpack_from(head)
        return head[_LOCAL.size : _LOCAL.size + length].rpartition(b"/")[2] in _RECORDS or path.suffix in _SUFFIXES
    return path.suffix in _SUFFIXES and head[:1] == b"\x80"


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """Parse a torch.save file. A bare state_dict is placed at `at`. Raise CorruptError if the file is damaged,
    FormatError if it contains only code or is not such a file, UsageError with the path of an unsupported tensor."""
    if path.suffix == ".distcp":
        raise UsageError(f"{path} is one file of a distributed checkpoint: give its folder, {path.parent}")
    what, values = "a torch.save file", Values()
    with opened(path) as file, naming_file(path):
        root = values.all_of(load(file, path.name))
        if root is OBJECT:
            raise FormatError(f"it contains only {values.objects[()]}, which is code and was not run: {_AGAIN}")
        if type(root) is dict and DESCRIPTION in root:
            rest = {key: value for key, value in root.items() if key != DESCRIPTION}
            return from_description(what, path.parent, root[DESCRIPTION], rest, lambda keys: at_place(root, keys))
        return from_state(what, path.parent, root, at, values)


class _Reader(Unpickler):
    """An unpickler whose storages have no memory. `storages`: as in `Container`."""

    def __init__(self, pickled: bytes, records: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(io.BytesIO(pickled), encoding="utf-8")
        self._records = records
        self.storages = dict[int, tuple[torch.UntypedStorage, int | None]]()

    def persistent_load(self, saved: tuple[Any, ...]) -> torch.storage.TypedStorage:
        _, kind, key, _, numel = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        made = torch.UntypedStorage(numel * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
        at, size = self._records.get(f"data/{key}", (0, 0))
        self.storages[made._cdata] = made, at if size == made.nbytes() else None
        return torch.storage.TypedStorage(wrap_storage=made, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def load(stream: IO[bytes], file: str, start: int = 0) -> Container:
    """Read the torch.save archive that begins at byte `start` of a file, without reading bytes of tensors."""
    try:
        records, pickled = _records(stream)
        with torch.serialization.safe_globals(_ALSO), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream.seek(0)
            with torch.serialization.safe_globals(_stand_ins(stream)):
                reader = _Reader(pickled, records)
                root = reader.load()  # type: ignore[no-untyped-call]
    except (CorruptError, FormatError, UsageError):
        raise
    except OSError as error:
        raise cannot_read(FilePath(file), error) from None
    except Exception as error:  # torch can raise any error for bytes that it did not write
        raise _refused(error) from None
    finally:
        torch._utils._sparse_tensors_to_validate.clear()  # torch cannot validate tensors without memory
    return Container(root, file, start, reader.storages)


def _stand_ins(stream: IO[bytes]) -> list[Any]:
    """Create an empty class for each class or function in the file that torch does not allow, without importing or
    executing it."""
    made = list[Any]()
    for full in torch.serialization.get_unsafe_globals_in_checkpoint(stream):
        module, _, name = full.rpartition(".")
        if not full.startswith(_KNOWN):
            made.append((type(name, (_Object,), {"__module__": module, "__qualname__": name}), full))
    return made


def _records(stream: IO[bytes]) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Return the offset and length of each record by name, and the bytes of the pickle."""
    head = stream.read(4)
    if head[:1] == b"\x80":
        raise UsageError(f"written by torch before 1.6, or a plain pickle: {_AGAIN}")
    if head != b"PK\3\4":
        raise FormatError("not a torch.save file")
    found: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(stream) as archive:
        names = {name.rpartition("/")[2]: name for name in archive.namelist()}
        if "data.pkl" not in names:
            raise FormatError("a zip archive that torch.save did not write: it has no data.pkl")
        if "constants.pkl" in names:
            raise UsageError(
                "a TorchScript archive, which contains a program: save its state_dict instead: "
                "torch.save(torch.jit.load(path).state_dict(), …)"
            )
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise UsageError(f"{info.filename} is compressed, which torch.save never does: {_AGAIN}")
            if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                raise UsageError(f"written on a big-endian machine: {_AGAIN} on a little-endian one")
            stream.seek(info.header_offset)
            begins = info.header_offset + _LOCAL.size + sum(_LOCAL.unpack(stream.read(_LOCAL.size)))
            found[info.filename.partition("/")[2]] = begins, info.file_size
        ranges = sorted(found.values())
        if any(at + size > following for (at, size), (following, _) in itertools.pairwise(ranges)):
            raise CorruptError("the archive is damaged: its records overlap")
        return found, archive.read(names["data.pkl"])


def _refused(error: Exception) -> CorruptError | FormatError | UsageError:
    """Convert torch's error about a file that it rejects to an error with a remedy."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].rpartition("a trusted source.")[2].strip()
    if "to load DTensors" in text or "torch.distributed.tensor.DTensor" in text:
        return UsageError(
            "it contains one rank's shard of a DTensor: save .full_tensor(), or use torch.distributed.checkpoint"
        )
    if named := re.search(r"(?:GLOBAL|function|got) (?:<(?:\w+ ')?)?([\w.]*\w)", text):
        return FormatError(f"it references {named[1]}, which is code and was not run: {_AGAIN}")
    if "quantized" in text:
        return UsageError("it contains a quantized tensor: save its component tensors")
    if "Unsupported operand" in text:
        return UsageError(f"its pickle does not use protocol 2, as torch.save does: {_AGAIN}")
    return CorruptError(f"the archive is damaged: {type(error).__name__}: {text.partition(chr(10))[0][:200]}")


@contextmanager
def opened(path: FilePath) -> Iterator[io.BufferedReader]:
    """Open a regular file. Raise UsageError if it does not exist. If a read fails, UnreadableError is raised, whatever
    error zipfile, torch or an unpickler makes of it."""
    try:
        fd = open_regular(path)
    except OSError as error:
        if error.errno not in LOST:
            raise cannot_read(path, error) from None
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    failures = list[OSError]()
    try:
        yield io.BufferedReader(FileSection(fd, 0, os.fstat(fd).st_size, failures))
    except Exception:
        if failures:
            raise cannot_read(path, failures[0]) from None
        raise
    finally:
        os.close(fd)


class FileSection(io.RawIOBase):
    """A range of a file as a file object. `failures`: list to which errors of reads are appended."""

    def __init__(self, fd: int, start: int, length: int, failures: list[OSError]) -> None:
        self._fd, self._start, self._length, self._at, self._failures = fd, start, length, 0, failures

    def section(self, start: int, length: int) -> FileSection:
        return FileSection(self._fd, self._start + start, length, self._failures)

    def readinto(self, into: Any, /) -> int:
        size = min(len(into), max(0, self._length - self._at))
        try:
            data = os.pread(self._fd, size, self._start + self._at)
        except OSError as error:
            self._failures.append(error)
            raise
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError("before the start of the file")
        self._at = at
        return at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@contextmanager
def naming_file(path: FilePath, inside: Path = ()) -> Iterator[None]:
    """Add the name of the file to the message of an error."""
    try:
        yield
    except (CorruptError, FormatError, UsageError) as error:
        raise type(error)(f"{path}{f', {show(inside)}' if inside else ''}: {str(error)[:2000]}") from None
