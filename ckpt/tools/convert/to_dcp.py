"""A folder as torch's distributed checkpoints are: `.metadata` and `__0_0.distcp`, written by torch itself.

What is in it is what `dcp.save({"model": get_model_state_dict(…), "optim": get_optimizer_state_dict(…), …})` would have
put there; so `dcp.load` into such a state dict finds everything, however many ranks it is divided among. Settings of
optimizers are there in both forms that exist, as lists of groups and one by one for each parameter
(`flatten_optimizer_state_dict=True`); both name the same bytes.
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

MANY = 50_000  # names that settings may have besides; .metadata has some 140 bytes for each, and converters read all
FILE = "__0_0.distcp"  # as torch calls the one of the only rank

Aliases = dict[str, tuple[str, Place]]
"""Further names: of what, and which keys lead there."""


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str]) -> Output:
    """`dtypes`: as what to write each tensor, by label. UsageError if two values would get the same name."""
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
    """What is under each name, of tensors without another one, into a folder as torch would."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        try:
            save(own, storage_writer=_Writer(folder, places, aliases), planner=_Planner(tensors))
        except CheckpointException as error:  # around what has gone wrong, such as a full disk
            raise next(iter(error.failures.values()))[0] from None


def flatten(native: Native) -> tuple[dict[str, Any], dict[str, Place]]:
    """What becomes an object of its own by its name, and the keys that lead there, as torch does it."""
    try:
        flat, places = flatten_state_dict(cast(dict[str, Any], native.root))
    except ValueError as error:
        raise UsageError(
            f"two values of the state get one name, so this format cannot tell them apart: {error}"
        ) from None
    return flat, places


def _tied(flat: Mapping[str, Any], places: Mapping[str, Place]) -> Aliases:
    """Names of tensors that are there under another."""
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(value), name) for name, value in flat.items() if isinstance(value, Tensor)}
    return {name: (owner, places[name]) for name, owner in owners.items() if owner != name}


def _by_parameter(native: Native, taken: Mapping[str, Place], notes: list[str]) -> Aliases:
    """Settings of optimizers by parameter, as `flatten_optimizer_state_dict=True` names them: further names of what is
    there. An optimizer of which a name is taken has none, nor one that needs very many."""
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
            notes.append(f"settings of {_joined(groups.at)} are there by group, and not by parameter: {reason}")
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
    """Tensors of one shape and dtype as one tensor that has an axis more: each is a row of it, and written by itself.
    Said in the words that DCP has for that."""

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
    """Of the tensors, what has been written need not be in memory."""

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
    """Adds further names to what it has written, and says nothing of this machine."""

    def __init__(self, folder: Path, places: Mapping[str, Place], aliases: Aliases) -> None:
        super().__init__(folder, sync_files=False)  # before the folder appears, all of it is
        self._places, self._aliases = places, aliases

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        known, further = dict(metadata.state_dict_metadata), list[WriteResult]()
        written: dict[str, list[WriteResult]] = {}
        for one in (one for each in results for one in each):
            written.setdefault(one.index.fqn, []).append(one)
        for name, (of, _) in self._aliases.items():
            known[name] = known[of]
            further += [replace(one, index=replace(one.index, fqn=name)) for one in written[of]]
        places = {**self._places, **{name: place for name, (_, place) in self._aliases.items()}}
        super().finish(replace(metadata, state_dict_metadata=known, planner_data=places), [*results, further])
