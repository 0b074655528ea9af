"""A folder as torch's distributed checkpoints are: `.metadata` and `__0_0.distcp`, `__0_1.distcp`, …

What is in it is what `dcp.save({"model": get_model_state_dict(…), "optim": get_optimizer_state_dict(…), …})` would have
put there; so `dcp.load` into such a state dict finds everything, however many ranks it is divided among. Settings of
optimizers are there in both forms that exist, as lists of groups and one by one for each parameter
(`flatten_optimizer_state_dict=True`); both name the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.convert.output import Literal, OutFile, Output, Run, Sum, Sums
from ckpt.convert.source import Origin, RankView
from ckpt.convert.torch_native import (
    Builder,
    Container,
    Native,
    Place,
    StandInFor,
    StandIns,
    container,
    fill,
    joined,
    tensors_of,
)
from ckpt.errors import UsageError
from ckpt.format.boxes import Box
from ckpt.format.layout import BITS
from ckpt.state.tensors import DTYPE_NAME

CHUNK = 64 << 20
FILE = 4 << 30
MANY = 50_000  # names that settings may have besides; .metadata has some 140 bytes for each, and converters read all
ALIGN = 64  # bytes; where containers begin, so that elements lie at multiples of their size


def plan(
    origin: Origin, view: RankView, dtypes: Mapping[str, str], *, chunk: int = CHUNK, file_bytes: int = FILE
) -> Output:
    """`dtypes`: as what to write each tensor, by label. Larger tensors are cut into rows of about `chunk` bytes; a file
    begins anew when it has `file_bytes`. UsageError if two values would get the same name."""
    stand_ins = StandIns(origin, dtypes)
    native = Builder(view, stand_ins, numbered=False, text_keys=True).build()
    flat = flatten(native.root)
    folder = _Folder(stand_ins, chunk, file_bytes)
    for name, (_, value) in flat.items():
        folder.add(name, value)
    mappings: dict[str, Place] = {name: place for name, (place, _) in flat.items()}
    notes = list(native.notes)
    mappings |= _one_by_one(native, folder, mappings, notes)
    metadata = Metadata(folder.known, planner_data=mappings)
    results = [WriteResult(index, info.length, info) for index, info in folder.places.items()]

    def finish(folder: Path, sums: Sums) -> None:
        _Writer(folder).finish(metadata, [results])
        _sync(folder)

    return Output("DCP", folder.files(), finish, notes=tuple(notes))


def flatten(root: Mapping[Any, Any]) -> dict[str, tuple[Place, Any]]:
    """What becomes an object of its own, by its name: (keys that lead there, value). As torch does it: all that is in
    dicts, and what is in lists that hold tensors or dicts; tuples stay whole."""
    found: dict[str, tuple[Place, Any]] = {}
    for place, value in _leaves(root, ()):
        name = _joined(place)
        if name in found:
            raise UsageError(f"two values of the state get the name {name}, so this format cannot tell them apart")
        found[name] = place, value
    return found


def _leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, (*place, str(key)))
    elif isinstance(value, list) and _has_objects(value):
        for i, one in enumerate(value):
            yield from _leaves(one, (*place, i))
    else:
        yield place, value


def _has_objects(value: list[Any]) -> bool:
    return any(isinstance(one, (Mapping, Tensor)) or (isinstance(one, list) and _has_objects(one)) for one in value)


def _one_by_one(native: Native, folder: _Folder, taken: Mapping[str, Place], notes: list[str]) -> dict[str, Place]:
    """Settings of optimizers by parameter, as `flatten_optimizer_state_dict=True` names them: further names of what is
    there. An optimizer of which a name is taken has none, nor one that needs very many."""
    settings: dict[str, list[tuple[str, Place]]] = {}
    for name, place in taken.items():
        settings.setdefault(_joined(place[:-1]), []).append((name, place))
    every: dict[str, Place] = {}
    for groups in native.optimizers:
        found: dict[str, tuple[str, Place]] = {}
        for i, params in enumerate(groups.params):
            for name, place in settings.get(_joined((*groups.at, "param_groups", i)), ()):
                for param in params if place[-1] != "params" else ():
                    further = (*place[: len(groups.at)], f"param_groups.{param}.{place[-1]}")
                    found[_joined(further)] = name, further
        if reason := _reason_against(found, taken.keys() | every.keys()):
            notes.append(f"settings of {_joined(groups.at)} are there by group, and not by parameter: {reason}")
            continue
        for name, (of, place) in found.items():
            folder.alias(name, of)
            every[name] = place
    return every


def _reason_against(names: Mapping[str, Any], taken: Set[str]) -> str:
    if len(names) > MANY:
        return f"{len(names)} names are too many"
    return "two would have the same name" if names.keys() & taken else ""


def _joined(place: Place) -> str:
    return ".".join(map(str, place))


@dataclass
class _Folder:
    """Files as they fill up. `known`: what `.metadata` says of each object; `places`: where its parts are."""

    stand_ins: StandIns
    chunk: int
    most: int
    known: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    _parts: list[list[Literal | Run]] = field(default_factory=lambda: [[]])
    _sums: list[list[Sum]] = field(default_factory=lambda: [[]])
    _at: int = 0
    _forms: dict[tuple[str, tuple[int, ...]], Container] = field(default_factory=dict)
    _written: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            self.known[name] = BytesStorageMetadata()
            sources = [self.stand_ins.source(tensor) for tensor in tensors_of(value)]
            self.places[MetadataIndex(name)] = self._write(container(value), sources)
        elif id(value) in self._written:  # tied: their bytes are there
            self.alias(name, self._written[id(value)])
        else:
            self._written[id(value)] = name
            self._add_tensor(name, value)

    def alias(self, name: str, of: str) -> None:
        """A further name of what is there."""
        found = self.known[name] = self.known[of]
        if isinstance(found, BytesStorageMetadata):
            self.places[MetadataIndex(name)] = self.places[MetadataIndex(of)]
        else:
            for i, one in enumerate(found.chunks):
                self.places[MetadataIndex(name, one.offsets, i)] = self.places[MetadataIndex(of, one.offsets)]

    def _add_tensor(self, name: str, tensor: Tensor) -> None:
        dtype, shape, source = DTYPE_NAME[tensor.dtype], tuple(tensor.shape), self.stand_ins.source(tensor)
        chunks = list[ChunkStorageMetadata]()
        for offsets, sizes in rows(shape, BITS[dtype] // 8, self.chunk):
            form = self._form(dtype, sizes)
            part = _part_of(source, dtype, shape, (offsets, sizes))
            index = MetadataIndex(name, offsets, len(chunks))
            self.places[index] = self._write(form, [part] if form.holes else [])
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self.known[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), chunks)

    def _form(self, dtype: str, sizes: tuple[int, ...]) -> Container:
        """Containers of tensors of one dtype and shape are alike but for the bytes."""
        if (dtype, sizes) not in self._forms:
            self._forms[dtype, sizes] = container(self.stand_ins.of_form(dtype, sizes))
        return self._forms[dtype, sizes]

    def _write(self, form: Container, sources: list[StandInFor]) -> _StorageInfo:
        at = -(-self._at // ALIGN) * ALIGN
        if self._at and at + form.size > self.most:
            self._parts.append([])
            self._sums.append([])
            self._at = at = 0
        if at > self._at:
            self._parts[-1].append(Literal(self._at, bytes(at - self._at)))
        parts, sums = fill(form, at, sources)
        self._parts[-1] += parts
        self._sums[-1] += sums
        self._at = at + form.size
        return _StorageInfo(_name(len(self._parts) - 1), at, form.size)

    def files(self) -> tuple[OutFile, ...]:
        return tuple(
            OutFile(_name(i), parts[-1].at + parts[-1].size, joined(parts), tuple(sums))
            for i, (parts, sums) in enumerate(zip(self._parts, self._sums, strict=True))
            if parts
        )


def _name(number: int) -> str:
    return f"__0_{number}.distcp"


def rows(shape: tuple[int, ...], item: int, most: int) -> Iterator[Box]:
    """A tensor as boxes of whole rows of at most so many bytes, one row at least. One box if it has no elements."""
    total = item
    for n in shape:
        total *= n
    if not shape or total <= most:
        yield (0,) * len(shape), shape
        return
    step = max(1, most * shape[0] // total)
    for first in range(0, shape[0], step):
        yield (first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:])


def _part_of(source: StandInFor, dtype: str, shape: tuple[int, ...], box: Box) -> StandInFor:
    """The same box of what the tensor stands for: of an array, that is a row of bytes."""
    if source.dtype == dtype and source.box[1] == shape:
        return StandInFor(source.label, box, dtype)
    inner = BITS[dtype] // 8
    for n in shape[1:]:
        inner *= n
    first, count = (box[0][0], box[1][0]) if shape else (0, 1)
    return StandInFor(source.label, ((first * inner,), (count * inner,)), source.dtype)


class _Writer(FileSystemWriter):
    """Says nothing of this machine in the files."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
