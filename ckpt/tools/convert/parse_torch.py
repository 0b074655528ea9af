"""A file of `torch.save`, by torch's own unpickler of `weights_only=True`, so that nothing in it is run.

Of the file the pickle is read, and no tensor: its storages have no memory, and it is known at which byte of the file
each begins. So tensors become ranges of the file, to be read when they are wanted.
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
_LOCAL = struct.Struct("<26x2H")  # the header before each record, of which only the lengths at its end matter
_LIGHTNING = ("lightning_fabric.utilities.data", "lightning.fabric.utilities.data",
              "pytorch_lightning.utilities.parsing", "lightning.pytorch.utilities.parsing")  # fmt: skip
_NUMPY = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}


def _default_dict(factory: Any = None) -> dict[Any, Any]:
    return {}


# What is made of plain data besides what torch allows: numpy's arrays and scalars, dicts that are called otherwise.
_ALSO: list[Any] = [
    np.ndarray, np.dtype, int, bytes, _codecs.encode, (_default_dict, "collections.defaultdict"),
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)),
    *((made, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, made in _NUMPY.items()),
    *((dict, f"{module}.AttributeDict") for module in _LIGHTNING),
]  # fmt: skip


class _Object:
    """In the place of an object that only code could make: takes whatever the file says of it, and keeps nothing."""

    def __new__(cls, *args: Any) -> _Object:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_KNOWN = ("torch._", "torch.distributed.")  # of what torch would say itself what it lacks
_AGAIN = "load it where it can be trusted with torch.load(..., weights_only=True), and torch.save it again"


def sniff(path: FilePath) -> bool:
    """Whether a file looks like one of torch.save, of any age."""
    head = start_of(path, 512)
    if head.startswith(b"PK\3\4") and len(head) >= _LOCAL.size:
        length, _ = _LOCAL.unpack_from(head)
        return head[_LOCAL.size : _LOCAL.size + length].rpartition(b"/")[2] in _RECORDS or path.suffix in _SUFFIXES
    return path.suffix in _SUFFIXES and head[:1] == b"\x80"


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """What a file of torch.save holds. A bare state_dict goes to `at`.

    CorruptError if it is damaged, FormatError if it is nothing but code or is not such a file, UsageError if a tensor
    in it cannot be kept; the message says where.
    """
    if path.suffix == ".distcp":
        raise UsageError(f"{path} is a part of a distributed checkpoint: give its folder, {path.parent}")
    what, values = "a torch.save file", Values()
    with opened(path) as file, told(path):
        root = values.all_of(load(file, path.name))
        if root is OBJECT:
            raise FormatError(
                f"it holds nothing but {values.objects[()]}, which is code, and nothing of it was run: {_AGAIN}"
            )
        if type(root) is dict and DESCRIPTION in root:
            rest = {key: value for key, value in root.items() if key != DESCRIPTION}
            return from_description(what, path.parent, root[DESCRIPTION], rest, lambda keys: at_place(root, keys))
        return from_state(what, path.parent, root, at, values)


class _Reader(Unpickler):
    """Makes of each storage one without memory. `storages`: as a `Container` has them."""

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
    """What torch.save has written to a stream, which begins at byte `start` of a file. No byte of a tensor is read."""
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
    except Exception as error:  # whatever torch makes of bytes that it did not write
        raise _refused(error) from None
    finally:
        torch._utils._sparse_tensors_to_validate.clear()  # of those without memory nothing can be asked
    return Container(root, file, start, reader.storages)


def _stand_ins(stream: IO[bytes]) -> list[Any]:
    """For each class or function that a file names and that is not allowed: a class of ours, called so. Nothing of what
    is called so elsewhere is imported or run."""
    made = list[Any]()
    for full in torch.serialization.get_unsafe_globals_in_checkpoint(stream):
        module, _, name = full.rpartition(".")
        if not full.startswith(_KNOWN):
            made.append((type(name, (_Object,), {"__module__": module, "__qualname__": name}), full))
    return made


def _records(stream: IO[bytes]) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Of each record where its bytes begin and how many they are, and the pickle."""
    head = stream.read(4)
    if head[:1] == b"\x80":
        raise UsageError(f"written by torch before 1.6, or a plain pickle: {_AGAIN}")
    if head != b"PK\3\4":
        raise FormatError("not a file of torch.save")
    found: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(stream) as archive:
        names = {name.rpartition("/")[2]: name for name in archive.namelist()}
        if "data.pkl" not in names:
            raise FormatError("a zip archive that torch.save did not write: there is no data.pkl in it")
        if "constants.pkl" in names:
            raise UsageError(
                "a TorchScript archive, which holds a program; save what is in it instead: "
                "torch.save(torch.jit.load(path).state_dict(), …)"
            )
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise UsageError(f"{info.filename} is compressed, and torch.save does not do that: {_AGAIN}")
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
    """What torch says of a file that it does not load, in a sentence."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].rpartition("a trusted source.")[2].strip()
    if "to load DTensors" in text or "torch.distributed.tensor.DTensor" in text:
        return UsageError(
            "it holds one rank's part of a DTensor: save .full_tensor(), or with torch.distributed.checkpoint"
        )
    if named := re.search(r"(?:GLOBAL|function|got) (?:<(?:\w+ ')?)?([\w.]*\w)", text):
        return FormatError(f"it names {named[1]}, which is code, and nothing of it was run: {_AGAIN}")
    if "quantized" in text:
        return UsageError("it holds a quantized tensor: save its parts")
    if "Unsupported operand" in text:
        return UsageError(f"its pickle is not of protocol 2, which torch.save uses: {_AGAIN}")
    return CorruptError(f"the archive is damaged: {type(error).__name__}: {text.partition(chr(10))[0][:200]}")


@contextmanager
def opened(path: FilePath) -> Iterator[io.BufferedReader]:
    """A file to read. UsageError if there is none, or it is something else, such as a pipe. UnreadableError if a read
    fails, whatever zipfile, torch or an unpickler make of that."""
    try:
        fd = open_regular(path)
    except OSError as error:
        if error.errno not in LOST:
            raise cannot_read(path, error) from None
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
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
    """Some bytes of a file, as a file of its own. `failures` receives the errors of its reads."""

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
def told(path: FilePath, inside: Path = ()) -> Iterator[None]:
    """Errors say of which file they are."""
    try:
        yield
    except (CorruptError, FormatError, UsageError) as error:
        raise type(error)(f"{path}{f', {show(inside)}' if inside else ''}: {str(error)[:2000]}") from None
