"""A folder of torch's distributed checkpoints (DCP): `.metadata`, and files with everything that ranks have saved.

`.metadata` is a pickle that says which box of which tensor is where. Each item in the other files is a torch.save
archive of its own. Both are read by `ckpt.convert.safe_pickle`, so nothing in them runs. Items are looked into, one
after the other, for where their bytes begin, and whether they are what `.metadata` says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from ckpt.convert import safe_pickle
from ckpt.convert.parse_entries import AnyTensor, Chunks, at_place, from_description, from_state
from ckpt.convert.parse_safetensors import check_inside
from ckpt.convert.parse_torch import Archive, FileSection, find_in, open_archive, opened, told
from ckpt.convert.parse_values import ALLOWED, DTYPES, TensorRef, Values, dims, refuse
from ckpt.convert.safe_pickle import Name, PickleNode
from ckpt.convert.source import DESCRIPTION
from ckpt.convert.source_files import Crc, Foreign
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.format.boxes import Dims
from ckpt.format.values import Path

MAX_OBJECT = 64 << 20  # bytes of a plain value
NEAR = 2048  # bytes at both ends of an item, which hold all of it but the tensor
WHAT = "a distributed checkpoint of torch"

_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA = ALLOWED | {
    *(f"{_CHECKPOINT}.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING",
    )),
    f"{_CHECKPOINT}.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("WindowsPath", "PureWindowsPath")),
}  # fmt: skip

_Place = tuple[str, int, int]  # file, byte, bytes
_Key = tuple[str, Dims | None]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """As `.metadata` has it."""

    dtype: str
    shape: Dims
    boxes: tuple[tuple[Dims, Dims], ...]


def sniff(path: FilePath) -> bool:
    """Whether this is such a folder, or the `.metadata` in it."""
    return (path / ".metadata").is_file() or (path.name == ".metadata" and path.is_file())


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """What a distributed checkpoint holds. The state_dict of a model alone goes to `at`.

    CorruptError if something is damaged or missing, FormatError if it names code or is not such a folder, UsageError
    if something in it cannot be kept; the message says where.
    """
    folder = path.parent if path.name == ".metadata" else path
    with opened(folder / ".metadata") as fd, told(folder / ".metadata"):
        window = FileSection(fd, 0, os.fstat(fd).st_size)
        if window.length > safe_pickle.MAX_BYTES:
            raise FormatError(f"{window.length >> 20} MiB; at most {safe_pickle.MAX_BYTES >> 20} are read")
        index = _Index(safe_pickle.load(window.take(0, window.length), _METADATA))
    items = _Items(folder, index)
    items.read()
    root = nested(items.values, index.paths)
    if DESCRIPTION in items.values:

        def find(place: tuple[str | int, ...]) -> Any:
            whole = items.values.get(str(place[0])) if len(place) == 1 else None
            return at_place(root, place) if whole is None else whole

        with told(folder):
            rest = {key: value for key, value in root.items() if key != DESCRIPTION}
            found = from_description(WHAT, folder, items.values[DESCRIPTION], rest, find)
    else:
        with told(folder):
            found = from_state(WHAT, folder, root, at, items.plain)
    return replace(found, crcs=tuple(dict.fromkeys(items.crcs)))


class _Index:
    """What `.metadata` says: `names`, some of them of `tensors`, `places` of the items, and `paths` in the state."""

    def __init__(self, metadata: Any) -> None:
        self.tensors: dict[str, _Tensor] = {}
        self.names: list[str] = []
        self.places: dict[_Key, _Place] = {}
        try:
            found = _fields(metadata, "Metadata")
            for name, one in found["state_dict_metadata"].items():
                if type(name) is not str:
                    raise ValueError("a name that is no text")
                self.names.append(name)
                if not one.name.endswith(".BytesStorageMetadata"):
                    self.tensors[name] = _tensor(name, _fields(one, "TensorStorageMetadata"))
            for key, info in (found.get("storage_data") or {}).items():
                self._place(_fields(key, "MetadataIndex"), _fields(info, "_StorageInfo"))
            self.paths = paths_of(self.names, found.get("planner_data"))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptError(f"not what torch writes: {str(error)[:200]}") from None

    def _place(self, key: dict[str, Any], info: dict[str, Any]) -> None:
        name, file, at, length = key["fqn"], info["relative_path"], info["offset"], info["length"]
        if type(name) is not str or type(file) is not str or type(at) is not int or type(length) is not int:
            raise ValueError("a place that is none")
        if info.get("transform_descriptors"):
            how = ", ".join(str(part)[:40] for part in info["transform_descriptors"])
            raise UsageError(f"{name} was changed when it was written ({how}): save it without such extensions")
        if at < 0 or length < 0 or at + length >= 2**63:
            raise ValueError("an impossible place")
        offset = key.get("offset")
        self.places[name, None if offset is None else dims(offset)] = file, at, length


def _fields(node: Any, kind: str) -> dict[str, Any]:
    if type(node) is not PickleNode or not node.name.endswith(f".{kind}"):
        raise ValueError(f"a {kind} is missing")
    state = {} if node.state is None else node.state
    if type(state) is not dict:
        raise ValueError(f"a {kind} of an unknown form")
    return state


def _tensor(name: str, found: dict[str, Any]) -> _Tensor:
    properties = found["properties"]
    if not properties.name.endswith(".TensorProperties"):
        raise ValueError("properties that are none")
    dtype, layout = properties.state[0], properties.state[1]
    if type(dtype) is not Name or dtype.text.removeprefix("torch.") not in DTYPES:
        raise refuse((name,), f"has dtype {dtype.text if type(dtype) is Name else '?'}, which cannot be stored")
    if layout.args != ("torch.strided",):
        raise refuse((name,), "is not a plain dense tensor: convert it with .to_dense()")
    boxes = []
    for chunk in found["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        boxes.append((dims(box["offsets"]), dims(box["sizes"])))
    return _Tensor(DTYPES[dtype.text.removeprefix("torch.")], dims(found["size"]), tuple(boxes))


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
                raise ValueError(f"{name:.80} has an impossible path")
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
    root: dict[str | int, Any] = {}
    for name, path in paths.items():
        here: Any = root
        for key in path[:-1]:
            here = here.setdefault(key, _Branch())
            if type(here) is not _Branch:
                raise CorruptError(f"{name}: two entries of the state are at one place")
        if path[-1] in here:
            raise CorruptError(f"{name}: two entries of the state are at one place")
        here[path[-1]] = values[name]
    return _numbered({key: _grown(value, len(paths)) for key, value in root.items()})


class _Branch(dict[str | int, Any]):
    """A dict or list, until all of it is known."""


def _grown(value: Any, most: int, depth: int = 0) -> Any:
    if type(value) is not _Branch:
        return value
    if depth > safe_pickle.MAX_DEPTH:
        raise CorruptError("a state that is nested too deeply")
    inner = {key: _grown(one, most, depth + 1) for key, one in value.items()}
    if all(type(key) is int for key in inner):
        if not all(0 <= int(key) < most + 1000 for key in inner):
            raise CorruptError("a list with an impossible number of entries")
        return [inner.get(i, {}) for i in range(int(max(inner)) + 1)]
    return _numbered(inner)


def _numbered(value: dict[str | int, Any]) -> Any:
    """torch turns the numbers of parameters, as keys of an optimizer's state, into text: back again."""
    state, groups = value.get("state"), value.get("param_groups")
    if type(state) is dict and type(groups) is list and all(type(group) is dict for group in groups):
        keys = {key for group in groups if type(group.get("params")) is list for key in group["params"]}
        if keys and all(type(key) is int for key in keys):
            texts = {str(key): key for key in keys}
            return {**value, "state": {texts.get(str(key), key): one for key, one in state.items()}}
    return value


class _Items:
    """Looks into the items. `values`: tensors and plain values by name."""

    def __init__(self, folder: FilePath, index: _Index) -> None:
        self._folder, self._index = folder, index
        self.values: dict[str, Any] = {}
        self.plain = Values(_nowhere)
        self.crcs: list[Crc] = []
        self._pickles: dict[bytes, Any] = {}

    def read(self) -> None:
        wanted: list[tuple[_Place, _Key]] = []
        for name in self._index.names:
            tensor = self._index.tensors.get(name)
            keys: list[_Key] = [(name, None)] if tensor is None else [(name, box[0]) for box in tensor.boxes]
            for key in keys:
                place = self._index.places.get(key)
                if place is None:
                    raise CorruptError(f"{self._folder}: .metadata does not say where {name} is")
                wanted.append((place, key))
        found: dict[_Key, Any] = {}
        by_file: dict[str, list[tuple[_Place, _Key]]] = {}
        for one in wanted:
            by_file.setdefault(one[0][0], []).append(one)
        for file, items in by_file.items():
            self._read_file(file, items, found)
        for name in self._index.names:
            tensor = self._index.tensors.get(name)
            self.values[name] = found[name, None] if tensor is None else self._assemble(name, tensor, found)

    def _read_file(self, file: str, items: list[tuple[_Place, _Key]], found: dict[_Key, Any]) -> None:
        check_inside(self._folder, file)
        if not (self._folder / file).is_file():
            raise CorruptError(f"{self._folder}: {file} is missing")
        with opened(self._folder / file) as fd:
            size = os.fstat(fd).st_size
            for (_, at, length), (name, offset) in items:
                with told(self._folder / file, (name,)):
                    if at + length > size:
                        raise CorruptError("the file was cut off")
                    archive = open_archive(FileSection(fd, at, length, NEAR))
                    path = self._index.paths[name]
                    found[name, offset] = self._value(archive, file, path, None if offset is None else name)

    def _value(self, archive: Archive, file: str, path: Path, tensor: str | None) -> Any:
        raw = archive.read("data.pkl", MAX_OBJECT)
        value = self._pickles.get(raw)
        if value is None:
            value = safe_pickle.load(raw, ALLOWED, path)
            if len(raw) < 4096:  # most items are alike
                self._pickles[raw] = value
        self.plain.find = find_in(archive, file)
        self.crcs += archive.crcs(file)
        found = self.plain.plain(value, path)
        if tensor is not None and type(found) is not TensorRef:
            raise CorruptError("not a tensor, as .metadata says")
        return found

    def _assemble(self, name: str, tensor: _Tensor, found: dict[_Key, Any]) -> AnyTensor:
        parts = []
        for offsets, sizes in tensor.boxes:
            ref = found[name, offsets]
            if (ref.dtype, ref.shape) != (tensor.dtype, sizes):
                raise CorruptError(
                    f"{self._folder}: {name} is {tensor.dtype} of shape {list(sizes)} in .metadata, and {ref.dtype} of "
                    f"shape {list(ref.shape)} in {ref.file}"
                )
            parts.append((offsets, sizes, ref))
        if len(parts) == 1 and parts[0][1] == tensor.shape and not any(parts[0][0]):
            return found[name, parts[0][0]]  # type: ignore[no-any-return]
        if not parts:
            raise CorruptError(f"{self._folder}: there is nothing of {name}")
        return Chunks(tensor.dtype, tensor.shape, tuple(parts))


def _nowhere(key: str) -> _Place:
    raise KeyError(key)
