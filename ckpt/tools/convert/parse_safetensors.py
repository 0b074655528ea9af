"""Parse safetensors: a file, or a folder with or without an index. The safetensors library checks each header.

The files contain only tensors by name, so they become one module. `safetensors.torch.save_model` omits names that share
memory with another name, and lists them in the metadata; they become aliases. torch's `HuggingFaceStorageWriter`
writes pieces of tensors from several ranks; the pieces are joined.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from safetensors import SafetensorError, safe_open

from ckpt.core.format.layout import BITS
from ckpt.core.format.regular_file import LOST, reading, start_of
from ckpt.core.format.values import Path, is_text, show
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.tools.convert.source import OriginEntry
from ckpt.tools.convert.source_files import FilePiece, Foreign, cannot_read, refuse

MAX_HEADER = 100_000_000  # maximum bytes of a header, a limit of the format
MAX_INDEX = 256 << 20
_INDEX = ".safetensors.index.json"
_SHARDING = "DCP_SHARDING_INFO"
_DTYPES = BITS.keys() - {"F4_E2M1X2", "C128", "C32"}


def sniff(path: FilePath) -> bool:
    """Return True for a safetensors file or index, or for a folder that contains one."""
    if path.is_dir():
        return any(name.endswith((".safetensors", _INDEX)) for name in os.listdir(path))
    if path.name.endswith((".safetensors", _INDEX)):
        return True
    head = start_of(path, 9)
    return len(head) == 9 and head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] <= MAX_HEADER


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """Parse a file, a folder or an index into one module at `at`. Raise CorruptError if a file is damaged or missing,
    FormatError if the path is not safetensors, and UsageError if several indexes are possible or a dtype is not
    supported."""
    if path.is_dir():
        return _folder(path, at)
    if path.name.endswith(_INDEX):
        return _indexed(path.parent, path.name, at)
    return _foreign(path.parent, [path.name], None, at)


def _folder(folder: FilePath, at: Path) -> Foreign:
    names = sorted(os.listdir(folder))
    indexes = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) > 1 and f"model{_INDEX}" in indexes:
        indexes = [f"model{_INDEX}"]
    if len(indexes) > 1:
        raise UsageError(f"{folder} has several indexes ({', '.join(indexes[:5])}): give the path of one")
    if indexes:
        return _indexed(folder, indexes[0], at)
    if "model.safetensors" in files:
        return _foreign(folder, ["model.safetensors"], None, at)
    if not files:
        raise FormatError(f"{folder} contains no safetensors file")
    return _foreign(folder, files, None, at)


def _indexed(folder: FilePath, name: str, at: Path) -> Foreign:
    try:
        with reading(folder / name) as stream:
            text = stream.read(MAX_INDEX + 1)
        if len(text) > MAX_INDEX:
            raise ValueError("implausibly large")
        weights = json.loads(text)["weight_map"]
        if type(weights) is not dict or not all(type(file) is str for file in weights.values()):
            raise ValueError("not a map of names to files")
    except OSError as error:
        if error.errno not in LOST:
            raise cannot_read(folder / name, error) from None
        raise UsageError(f"cannot read {folder / name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{folder / name} is damaged: {str(error)[:200]}") from None
    files = sorted(set(weights.values()))
    for file in files:
        check_inside(folder, file)
    return _foreign(folder, files, weights, at)


def check_inside(folder: FilePath, file: str) -> None:
    """Raise CorruptError if a file that an index names is outside the folder."""
    if not file or FilePath(file).is_absolute() or ".." in FilePath(file).parts or "\0" in file:
        raise CorruptError(f"{folder}: references a file outside this folder: {file!r}")


def _foreign(folder: FilePath, files: list[str], weights: dict[str, str] | None, at: Path) -> Foreign:
    found: dict[str, list[FilePiece]] = {}
    metadata: dict[str, str] = {}
    notes: list[str] = []
    for file in files:
        tensors, own_metadata = _read(folder, file)
        metadata |= own_metadata
        for name, tensor in tensors.items():
            if weights is not None and weights.get(name) != file:
                notes.append(f"skipped {name} in {file}, which is not in the index")
            else:
                found.setdefault(name, []).append(tensor)
    if weights is not None and (missing := sorted(weights.keys() - found.keys())):
        raise CorruptError(f"{folder}: the index lists {missing[0]} in {weights[missing[0]]}, but it is not there")
    names = {name: show((*at, name)) for name in found}
    pieces = [piece for name, parts in found.items() for piece in _pieces(folder, names[name], parts)]
    aliases = {
        show((*at, removed)): names[kept]
        for removed, kept in metadata.items()
        # "format" is not a name of a tensor: its value is the framework
        if kept in names and removed not in names and is_text(removed) and removed != "format"
    }
    entry = OriginEntry(at, "module", {}, (*names.values(), *aliases))
    return Foreign("safetensors", folder, tuple(pieces), aliases, (entry,), tuple(_few(notes)))


def _few(notes: list[str]) -> list[str]:
    return notes if len(notes) <= 10 else [*notes[:10], f"and {len(notes) - 10} more"]


def _pieces(folder: FilePath, full: str, parts: list[FilePiece]) -> list[FilePiece]:
    """Join the pieces of one tensor. Raise CorruptError if they do not fit together."""
    name, first = parts[0].name, parts[0]
    if len(parts) == 1 and not any(first.offsets):
        return [replace(first, name=full, offsets=(0,) * len(first.sizes))]
    if any(not part.offsets or len(part.offsets) != len(first.sizes) for part in parts):
        files = ", ".join(sorted({part.file for part in parts})[:5])
        raise CorruptError(f"{folder}: {name} is in several files ({files}), and there is no index")
    if any(len(part.sizes) != len(first.sizes) for part in parts):
        raise CorruptError(f"{folder}: the pieces of {name} do not fit together")
    ends = [[i + n for i, n in zip(part.offsets, part.sizes, strict=True)] for part in parts]
    whole = tuple(max(places) for places in zip(*ends, strict=True))
    return [replace(part, name=full, whole=whole) for part in parts]


# -- read one file --


def _read(folder: FilePath, file: str) -> tuple[dict[str, FilePiece], dict[str, str]]:
    """Return the tensors and the metadata of a file. The safetensors library checks its header."""
    path = folder / file
    if not path.exists():
        raise CorruptError(f"{folder}: {file} is missing")
    try:
        with reading(path) as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(min(length, MAX_HEADER))
            metadata = _checked(start + text, os.fstat(stream.fileno()).st_size)
        header = json.loads(text)  # parsed again, because the library does not return the positions of the bytes
        header.pop("__metadata__", None)
        places = _offsets(metadata)
        return {name: _tensor(file, name, one, 8 + length, places) for name, one in header.items()}, metadata
    except OSError as error:
        raise cannot_read(path, error) from None
    except SafetensorError as error:
        raise CorruptError(f"{path} is damaged, or not a safetensors file: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptError(f"{path}: the header is damaged: {str(error)[:200]}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _checked(head: bytes, size: int) -> dict[str, str]:
    """Let the library check a header, and return the metadata. The header is copied to a memory file of the same size
    as the original file. The library would map the original, which some file systems cannot do, and it reports every
    failure to open a file as a missing file."""
    with os.fdopen(os.memfd_create("header"), "wb") as file:
        file.write(head)
        file.truncate(size)
        try:
            with safe_open(f"/proc/self/fd/{file.fileno()}", "numpy") as checked:
                return checked.metadata() or {}
        except FileNotFoundError:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None


def _tensor(file: str, name: str, one: Any, start: int, places: dict[str, tuple[int, ...]]) -> FilePiece:
    dtype, shape, (low, _) = one["dtype"], one["shape"], one["data_offsets"]
    if dtype == "F4" and shape and shape[-1] % 2 == 0:  # torch stores two values per byte, and counts bytes
        dtype, shape = "F4_E2M1X2", [*shape[:-1], shape[-1] // 2]
    elif dtype not in _DTYPES:
        raise refuse((name,), f"has dtype {str(dtype)[:20]}, which is not supported: convert it")
    return FilePiece(name, dtype, tuple(shape), places.get(name, ()), tuple(shape), file, start + low)


def _offsets(metadata: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Return for each piece of a tensor its offsets in the tensor. Return {} if the file contains no pieces."""
    if _SHARDING not in metadata:
        return {}
    found = {}
    for name, one in json.loads(metadata[_SHARDING]).items():
        offsets = one["saved_offsets"]
        if type(offsets) is not list or not all(type(n) is int and 0 <= n < 2**62 for n in offsets):
            raise ValueError(f"{name:.80} has impossible offsets in its tensor")
        found[name] = tuple(offsets)
    return found
