"""A folder of torch's distributed checkpoints (DCP): `.metadata`, and files with everything that ranks have saved.

`.metadata` is a pickle that says which box of which tensor is where. torch's own reader would run whatever is in it, so
it is read through a list of what may be made: DCP's own descriptions, of plain data. Each item in the other files is a
torch.save archive of its own, which `ckpt.tools.convert.parse_torch` looks into.
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
from ckpt.tools.convert.parse_torch import FileSection, load, opened, told
from ckpt.tools.convert.source import DESCRIPTION
from ckpt.tools.convert.source_files import Foreign, refuse

MAX_OBJECT = 64 << 20  # bytes of a plain value
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
    """Makes nothing but what is in the list: nothing else is imported, looked up or called. That we pickle nothing is
    about what we write; this is what torch has written.

    The one in Python: for one flipped byte the one in C makes a table of up to 64 GiB, and the machine kills something.
    """

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePosixPath  # where it was written: of no use here
        if full not in _ALLOWED:
            raise FormatError(f"it names {full:.200}, which is nothing that torch writes there; nothing of it was run")
        return super().find_class(module, name)


def sniff(path: FilePath) -> bool:
    """Whether this is such a folder, or the `.metadata` in it."""
    return (path / ".metadata").is_file() or (path.name == ".metadata" and path.is_file())


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """What a distributed checkpoint holds. The state_dict of a model alone goes to `at`.

    CorruptError if something is damaged or missing, FormatError if it names code or is not such a folder, UsageError
    if something in it cannot be kept; the message says where.
    """
    folder = path.parent if path.name == ".metadata" else path
    values, paths, plain = items_of(folder)
    root = nested(values, {name: paths[name] for name in values})
    with told(folder):
        if DESCRIPTION not in values:
            return from_state(WHAT, folder, root, at, plain)

        def find(place: tuple[str | int, ...]) -> Any:
            whole = values.get(str(place[0])) if len(place) == 1 else None
            return at_place(root, place) if whole is None else whole

        rest = {key: value for key, value in root.items() if key != DESCRIPTION}
        return from_description(WHAT, folder, values[DESCRIPTION], rest, find)


def items_of(folder: FilePath, *, tensors_only: bool = False) -> tuple[dict[str, Any], dict[str, Path], Values]:
    """Tensors and plain values by name, the path of each name in the state, and what was found to be neither."""
    with opened(folder / ".metadata") as file, told(folder / ".metadata"):
        metadata = _metadata(file)
        paths = paths_of(list(metadata.state_dict_metadata), metadata.planner_data)
    items = _Items(folder, metadata, paths)
    return items.read(tensors_only), paths, items.plain


def _metadata(file: IO[bytes]) -> Metadata:
    """CorruptError unless all that is used of it is of the kind that it should be."""
    try:
        found = _MetadataUnpickler(file).load()
        if type(found) is not Metadata:
            raise ValueError("no Metadata")
        for name, one in found.state_dict_metadata.items():
            if type(name) is not str or type(one) not in (BytesStorageMetadata, TensorStorageMetadata):
                raise ValueError("a name, or what is under it, of another kind")
            if isinstance(one, TensorStorageMetadata):
                _check_tensor(name, one)
        for index, info in (found.storage_data or {}).items():
            _check_place(index, info)
        return found
    except (FormatError, UsageError):
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CorruptError(f"not what torch writes: {str(error)[:200]}") from None


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
        raise ValueError("a place that is none")
    if descriptors := getattr(info, "transform_descriptors", None):
        how = ", ".join(str(part)[:40] for part in descriptors)
        raise UsageError(f"{index.fqn} was changed when it was written ({how}): save it without such extensions")
    if at < 0 or length < 0 or at + length >= 2**63:
        raise ValueError("an impossible place")


def paths_of(names: list[str], planner_data: Any) -> dict[str, Path]:
    """Where each name is in the nested state. Without the planner's own word, names with `.state.` in them and such
    belong to an optimizer, and all others are on top."""
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
    """The state as it was, of dicts and lists. Empty ones are lost: torch does not write them."""
    numbers = [key for path in paths.values() for key in path if type(key) is int]
    if any(len(path) > MAX_DEPTH for path in paths.values()) or not all(0 <= n < len(paths) + 1000 for n in numbers):
        raise CorruptError("a state that is nested too deeply, or has impossibly long lists")
    if len(set(paths.values())) != len(paths):
        raise CorruptError("two entries of the state are at one place")
    try:
        return _numbered(unflatten_state_dict({name: values[name] for name in paths}, dict(paths)))
    except (TypeError, ValueError, LookupError, AttributeError):
        raise CorruptError("an entry of the state is at a place inside of another") from None


def _numbered(value: Any) -> Any:
    """torch turns the numbers of parameters, as keys of an optimizer's state, into text: back again."""
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
    """Looks into the items."""

    def __init__(self, folder: FilePath, metadata: Metadata, paths: Mapping[str, Path]) -> None:
        self._folder, self._metadata, self._paths = folder, metadata, paths
        self.plain = Values()

    def read(self, tensors_only: bool) -> dict[str, Any]:
        """Tensors and plain values by name."""
        by_file: dict[str, list[MetadataIndex]] = {}
        for name, one in self._metadata.state_dict_metadata.items():
            if tensors_only and isinstance(one, BytesStorageMetadata):
                continue
            places = [chunk.offsets for chunk in one.chunks] if isinstance(one, TensorStorageMetadata) else [None]
            for index in (MetadataIndex(name, offset) for offset in places):
                if (info := (self._metadata.storage_data or {}).get(index)) is None:
                    raise CorruptError(f"{self._folder}: .metadata does not say where {name} is")
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
                with told(self._folder / file, (index.fqn,)):
                    if info.offset + info.length > size:
                        raise CorruptError("the file was cut off")
                    item = io.BufferedReader(cast(FileSection, stream.raw).section(info.offset, info.length))
                    path = self._paths[index.fqn]
                    value = self.plain.all_of(load(item, file, info.offset), path)
                    if value is not OBJECT:
                        found[index] = value
                    elif type(path[-1]) is int:  # the others of a list keep their places
                        found[index] = None
        return found

    def _joined(self, name: str, said: TensorStorageMetadata, found: Mapping[MetadataIndex, Any]) -> AnyTensor:
        """A tensor of its pieces."""
        dtype, shape, parts = DTYPE_NAME[said.properties.dtype], tuple(said.size), list[tuple[Dims, Dims, TensorRef]]()
        for chunk in said.chunks:
            ref, sizes = found.get(MetadataIndex(name, chunk.offsets)), tuple(chunk.sizes)
            if type(ref) is not TensorRef or (ref.dtype, ref.shape) != (dtype, sizes):
                is_there = f"{ref.dtype} of shape {list(ref.shape)}" if type(ref) is TensorRef else "no tensor"
                raise CorruptError(
                    f"{self._folder}: {name} is {dtype} of shape {list(sizes)} in .metadata, and {is_there} in its file"
                )
            parts.append((tuple(chunk.offsets), sizes, ref))
        if not parts:
            raise CorruptError(f"{self._folder}: there is nothing of {name}")
        if len(parts) == 1 and parts[0][1] == shape and not any(parts[0][0]):
            return parts[0][2]
        return Chunks(dtype, shape, tuple(parts))
