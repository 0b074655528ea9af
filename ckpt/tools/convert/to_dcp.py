"""Write a folder of torch's distributed checkpoints: `.metadata` and `__0_0.distcp`, written by torch itself.

The contents are those of `dcp.save({"model": get_model_state_dict(…), "optim": get_optimizer_state_dict(…), …})`. So
`dcp.load` into such a state dict finds every value, whatever the sharding. Settings of optimizers are stored under the
names of both of torch's forms: as lists of groups, and for each parameter (`flatten_optimizer_state_dict=True`). Both
names refer to the same bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.errors import UsageError
from ckpt.tools.convert.output import Output, Sums
from ckpt.tools.convert.source import Origin, RankView
from ckpt.tools.convert.torch_state import Builder, Native, Place, Tensors, stage

MANY = 50_000  # maximum names for settings; each takes about 140 bytes of .metadata, and converters read all of them
FILE = "__0_0.distcp"  # torch's name for the data file of a single rank

Aliases = dict[str, tuple[str, Place]]
"""For each further name of a value: its main name, and the path of its keys."""


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str]) -> Output:
    """Plan the files. `dtypes`: dtype to write, by label. Raise UsageError if two values would get the same name."""
    native = Builder(view, Tensors(origin, dtypes), numbered=False, text_keys=True).build()
    notes = list(native.notes)
    _, places = flatten(native)
    _by_parameter(native, places, notes)
    file = stage(origin, view, dtypes, FILE)

    def finish(out: Path, sums: Sums) -> None:
        tensors = Tensors(origin, dtypes, output.staged_path(out, file), file)
        native = Builder(view, tensors, numbered=False, text_keys=True).build()
        flat, places = flatten(native)
        aliases = _tied(flat, places) | _by_parameter(native, places, [])
        own = {name: value for name, value in flat.items() if name not in aliases}
        write(out, own, {name: place for name, place in places.items() if name in own}, aliases, tensors)

    output = Output("DCP", (file,), finish, staged=True, notes=tuple(notes))
    return output


def write(folder: Path, own: dict[str, Any], places: Mapping[str, Place], aliases: Aliases, tensors: Tensors) -> None:
    """Write the named values to a folder as torch does, with each aliased value stored only once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that there is only one process
        try:
            save(own, storage_writer=_Writer(folder, places, aliases), planner=_Planner(tensors))
        except CheckpointException as error:  # torch's wrapper of the actual error, for example a full disk
            raise next(iter(error.failures.values()))[0] from None


def flatten(native: Native) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the values that torch would store separately, and the path of the keys of each, by torch's flat name."""
    try:
        flat, places = flatten_state_dict(cast(dict[str, Any], native.root))
    except ValueError as error:
        raise UsageError(f"two values of the state would have the same name in this format: {error}") from None
    return flat, places


def _tied(flat: Mapping[str, Any], places: Mapping[str, Place]) -> Aliases:
    """Return the names of tensors that are also stored under another name, as aliases."""
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(value), name) for name, value in flat.items() if isinstance(value, Tensor)}
    return {name: (owner, places[name]) for name, owner in owners.items() if owner != name}


def _by_parameter(native: Native, taken: Mapping[str, Place], notes: list[str]) -> Aliases:
    """Return aliases for the settings of optimizers by parameter, as `flatten_optimizer_state_dict=True` names them. An
    optimizer gets no aliases if one of their names conflicts, or if there are too many."""
    settings: dict[str, list[tuple[str, Place]]] = {}
    for name, place in taken.items():
        settings.setdefault(_joined(place[:-1]), []).append((name, place))
    every: Aliases = {}
    for groups in native.optimizers:
        found: Aliases = {}
        for i, params in enumerate(groups.params):
            for name, place in settings.get(_joined((*groups.at, "param_groups", i)), ()):
                for param in params if place[-1] != "params" else ():
                    further = (*place[: len(groups.at)], f"param_groups.{param}.{place[-1]}")
                    found[_joined(further)] = name, further
        if reason := _reason_against(found, taken.keys() | every.keys()):
            notes.append(f"settings of {_joined(groups.at)} are stored by group but not by parameter: {reason}")
        else:
            every |= found
    return every


def _reason_against(names: Mapping[str, Any], taken: Set[str]) -> str:
    if len(names) > MANY:
        return f"{len(names)} names are too many"
    return "two would have the same name" if names.keys() & taken else ""


def _joined(place: Place) -> str:
    return ".".join(map(str, place))


class Rows:
    """Tensors of one shape and dtype as the rows of one tensor. Implements DCP's protocol to write it row by row."""

    def __init__(self, rows: list[Tensor]) -> None:
        self._rows = [row.unsqueeze(0) for row in rows]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        size, found = torch.Size((len(self._rows), *self._rows[0].shape[1:])), list[WriteItem]()
        for number, row in enumerate(self._rows):
            at = torch.Size((number, *(0 for _ in row.shape[1:])))
            what = TensorWriteData(ChunkStorageMetadata(at, row.shape), TensorProperties.create_from_tensor(row), size)
            found.append(WriteItem(MetadataIndex(name, at, number), WriteItemType.SHARD, tensor_data=what))
        return found

    def row(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._rows[index.offset[0]]


class _Planner(DefaultSavePlanner):
    """Drops tensors from memory after they are written."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.row(index) if isinstance(found, Rows) else super().lookup_object(index)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._tensors.forget()
        return super().resolve_data(write_item)


class _Writer(FileSystemWriter):
    """Adds aliases to the metadata, and omits information about this machine."""

    def __init__(self, folder: Path, places: Mapping[str, Place], aliases: Aliases) -> None:
        super().__init__(folder, sync_files=False)  # all files are synced before the folder appears
        self._places, self._aliases = places, aliases

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        known, further = dict(metadata.state_dict_metadata), list[WriteResult]()
        written: dict[str, list[WriteResult]] = {}
        for result in (result for each in results for result in each):
            written.setdefault(result.index.fqn, []).append(result)
        for name, (of, _) in self._aliases.items():
            known[name] = known[of]
            further += [replace(result, index=replace(result.index, fqn=name)) for result in written[of]]
        places = {**self._places, **{name: place for name, (_, place) in self._aliases.items()}}
        super().finish(replace(metadata, state_dict_metadata=known, planner_data=places), [*results, further])
