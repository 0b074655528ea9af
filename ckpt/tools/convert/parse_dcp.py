"""Parse a folder of torch's distributed checkpoints (DCP): its `.metadata`, and the data files of the ranks.

`.metadata` is a pickle that lists the location of each box of each tensor. torch's reader would execute code in the
pickle. This module only accepts the classes of DCP's descriptions, which consist of plain data. Each item in the data
files is a torch.save archive, which `ckpt.tools.convert.parse_torch` reads.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ckpt.core.format.boxes import Dims
from ckpt.core.format.values import MAX_DEPTH, Path
from ckpt.core.state.tensors import DTYPE_NAME
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.tools.convert.parse_entries import OBJECT, AnyTensor, Chunks, TensorRef, Values, at_place, from_description
from ckpt.tools.convert.parse_safetensors import check_inside
from ckpt.tools.convert.parse_state import from_state
from ckpt.tools.convert.parse_torch import FileSection, load, naming_file, opened
from ckpt.tools.convert.source import DESCRIPTION
from ckpt.tools.convert.source_files import Foreign, refuse

MAX_OBJECT = 64 << 20  # maximum bytes of a plain value
WHAT = "a distributed checkpoint of torch"

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED = {
    *(f"{_CHECKPOINT}.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING",
    )),
    *(f"{_CHECKPOINT}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    f"{_CHECKPOINT}.filesystem._StorageInfo", f"{_SHARDED}.TensorProperties", f"{_SHARDED}.MEM_FORMAT_ENCODING",
    "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
    *(str(one) for one in vars(torch).values() if isinstance(one, torch.dtype)),
}  # fmt: skip


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickles only listed classes, and imports or calls nothing else. Pickles are needed because torch writes them.
    This is the Python implementation, because the C implementation allocates up to 64 GiB for one flipped byte."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePosixPath  # a path in the metadata is not used
        if full not in _ALLOWED:
            raise FormatError(f"it references {full:.200}, which torch never writes there; no code was run")
        return super().find_class(module, name)


def sniff(path: FilePath) -> bool:
    """Return True if the path is a folder of DCP, or the `.metadata` file in one."""
    return (path / ".metadata").is_file() or (path.name == ".metadata" and path.is_file())


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """Parse a distributed checkpoint. The state_dict of a single model is placed at `at`. Raise CorruptError if it is
    damaged or files are missing, FormatError if it references code or is not such a folder, and UsageError with the
    path of an entry that cannot be converted."""
    folder = path.parent if path.name == ".metadata" else path
    values, paths, plain = items_of(folder)
    root = nested(values, {name: paths[name] for name in values})
    with naming_file(folder):
        if DESCRIPTION not in values:
            return from_state(WHAT, folder, root, at, plain)

        def find(place: tuple[str | int, ...]) -> Any:
            whole = values.get(str(place[0])) if len(place) == 1 else None
            return at_place(root, place) if whole is None else whole

        rest = {key: value for key, value in root.items() if key != DESCRIPTION}
        return from_description(WHAT, folder, values[DESCRIPTION], rest, find)


def items_of(folder: FilePath, *, tensors_only: bool = False) -> tuple[dict[str, Any], dict[str, Path], Values]:
    """Return tensors and plain values by name, the path of each name in the state, and a record of skipped objects."""
    with opened(folder / ".metadata") as file, naming_file(folder / ".metadata"):
        metadata = _metadata(file)
        paths = paths_of(list(metadata.state_dict_metadata), metadata.planner_data)
    items = _Items(folder, metadata, paths)
    return items.read(tensors_only), paths, items.plain


def _metadata(file: IO[bytes]) -> Metadata:
    """Return the metadata. Raise CorruptError unless every field that is used has the right type."""
    try:
        found = _MetadataUnpickler(file).load()
        if type(found) is not Metadata:
            raise ValueError("no Metadata")
        for name, one in found.state_dict_metadata.items():
            if type(name) is not str or type(one) not in (BytesStorageMetadata, TensorStorageMetadata):
                raise ValueError("a name, or its metadata, is not of the expected type")
            if isinstance(one, TensorStorageMetadata):
                _check_tensor(name, one)
        for index, info in (found.storage_data or {}).items():
            _check_place(index, info)
        return found
    except (FormatError, UsageError):
        raise
    except Exception as error:  # a damaged pickle can cause any error
        raise CorruptError(f"not written by torch, or damaged: {str(error)[:200]}") from None


def _check_tensor(name: str, found: TensorStorageMetadata) -> None:
    properties = found.properties
    if properties.dtype not in DTYPE_NAME:
        raise refuse((name,), f"has dtype {properties.dtype}, which cannot be stored")
    if properties.layout != torch.strided:
        raise refuse((name,), "is not a plain dense tensor: convert it with .to_dense()")
    for dims in (found.size, *(box for chunk in found.chunks for box in (chunk.offsets, chunk.sizes))):
        if not all(type(n) is int and 0 <= n < 2**62 for n in dims):
            raise ValueError("not a shape")


def _check_place(index: MetadataIndex, info: _StorageInfo) -> None:
    file, at, length = info.relative_path, info.offset, info.length
    if type(file) is not str or type(at) is not int or type(length) is not int:
        raise ValueError("an invalid location")
    if descriptors := getattr(info, "transform_descriptors", None):
        how = ", ".join(str(part)[:40] for part in descriptors)
        raise UsageError(f"{index.fqn} was written with extensions ({how}): save it without them")
    if at < 0 or length < 0 or at + length >= 2**63:
        raise ValueError("an impossible location")


def paths_of(names: list[str], planner_data: Any) -> dict[str, Path]:
    """Return the path of each name in the nested state. Without the planner's data, names that contain `.state.` or
    `.param_groups.` belong to an optimizer, and all others are at the top level."""
    known = planner_data if type(planner_data) is dict else {}
    paths: dict[str, Path] = {}
    optimizers = {name.partition(".param_groups.")[0] for name in names if ".param_groups." in name}
    for name in names:
        path = known.get(name)
        if path is not None:
            if type(path) not in (tuple, list) or not path or not all(type(key) in (str, int) for key in path):
                raise CorruptError(f"{name:.80} has an impossible path")
            paths[name] = tuple(path)
            continue
        for form in (".state.", ".param_groups."):
            head, found, rest = name.partition(form)
            if found and head in optimizers:
                paths[name] = head, f"{form[1:]}{rest}"
                break
        else:
            paths[name] = (name,)
    return paths


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """Return the state as nested dicts and lists. Empty ones are missing, because torch does not write them."""
    numbers = [key for path in paths.values() for key in path if type(key) is int]
    if any(len(path) > MAX_DEPTH for path in paths.values()) or not all(0 <= n < len(paths) + 1000 for n in numbers):
        raise CorruptError("the state is nested too deeply, or has impossibly long lists")
    if len(set(paths.values())) != len(paths):
        raise CorruptError("two entries of the state have the same path")
    try:
        return _numbered(unflatten_state_dict({name: values[name] for name in paths}, dict(paths)))
    except (TypeError, ValueError, LookupError, AttributeError):
        raise CorruptError("an entry of the state lies inside another") from None


def _numbered(value: Any) -> Any:
    """Convert the numbers of an optimizer's parameters back to int, because torch writes these keys as text."""
    if type(value) is list:
        return [_numbered(one) for one in value]
    if type(value) is not dict:
        return value
    found = {key: _numbered(one) for key, one in value.items()}
    state, groups = found.get("state"), found.get("param_groups")
    if type(state) is dict and type(groups) is list and all(type(group) is dict for group in groups):
        keys = {key for group in groups if type(group.get("params")) is list for key in group["params"]}
        if keys and all(type(key) is int for key in keys):
            texts = {str(key): key for key in keys}
            found["state"] = {texts.get(str(key), key): one for key, one in state.items()}
    return found


class _Items:
    """Reads the items of a distributed checkpoint."""

    def __init__(self, folder: FilePath, metadata: Metadata, paths: Mapping[str, Path]) -> None:
        self._folder, self._metadata, self._paths = folder, metadata, paths
        self.plain = Values()

    def read(self, tensors_only: bool) -> dict[str, Any]:
        """Return all tensors and plain values by name."""
        by_file: dict[str, list[MetadataIndex]] = {}
        for name, one in self._metadata.state_dict_metadata.items():
            if tensors_only and isinstance(one, BytesStorageMetadata):
                continue
            places = [chunk.offsets for chunk in one.chunks] if isinstance(one, TensorStorageMetadata) else [None]
            for index in (MetadataIndex(name, offset) for offset in places):
                if (info := (self._metadata.storage_data or {}).get(index)) is None:
                    raise CorruptError(f"{self._folder}: .metadata has no location for {name}")
                by_file.setdefault(info.relative_path, []).append(index)
        found: dict[MetadataIndex, Any] = {}
        for file, items in by_file.items():
            found |= self._read_file(file, items)
        return {
            name: found[MetadataIndex(name)]
            if isinstance(one, BytesStorageMetadata)
            else self._joined(name, one, found)
            for name, one in self._metadata.state_dict_metadata.items()
            if not isinstance(one, BytesStorageMetadata) or MetadataIndex(name) in found
        }

    def _read_file(self, file: str, items: list[MetadataIndex]) -> dict[MetadataIndex, Any]:
        check_inside(self._folder, file)
        if not (self._folder / file).is_file():
            raise CorruptError(f"{self._folder}: {file} is missing")
        found: dict[MetadataIndex, Any] = {}
        size = (self._folder / file).stat().st_size
        with opened(self._folder / file) as stream:
            for index in items:
                info = self._metadata.storage_data[index]
                with naming_file(self._folder / file, (index.fqn,)):
                    if info.offset + info.length > size:
                        raise CorruptError("the file is truncated")
                    item = io.BufferedReader(cast(FileSection, stream.raw).section(info.offset, info.length))
                    path = self._paths[index.fqn]
                    value = self.plain.all_of(load(item, file, info.offset), path)
                    if value is not OBJECT:
                        found[index] = value
                    elif type(path[-1]) is int:  # None keeps the index of the other items
                        found[index] = None
        return found

    def _joined(self, name: str, metadata: TensorStorageMetadata, found: Mapping[MetadataIndex, Any]) -> AnyTensor:
        """Return a tensor that consists of the given chunks. Raise CorruptError if they differ from the metadata."""
        dtype, shape = DTYPE_NAME[metadata.properties.dtype], tuple(metadata.size)
        parts = list[tuple[Dims, Dims, TensorRef]]()
        for chunk in metadata.chunks:
            ref, sizes = found.get(MetadataIndex(name, chunk.offsets)), tuple(chunk.sizes)
            if type(ref) is not TensorRef or (ref.dtype, ref.shape) != (dtype, sizes):
                is_there = f"{ref.dtype} of shape {list(ref.shape)}" if type(ref) is TensorRef else "no tensor"
                raise CorruptError(
                    f"{self._folder}: {name} is {dtype} of shape {list(sizes)} in .metadata, but {is_there} in its file"
                )
            parts.append((tuple(chunk.offsets), sizes, ref))
        if not parts:
            raise CorruptError(f"{self._folder}: {name} has no data")
        if len(parts) == 1 and parts[0][1] == shape and not any(parts[0][0]):
            return parts[0][2]
        return Chunks(dtype, shape, tuple(parts))
