"""Write weights as on model hubs: as safetensors files, with an index if they are large.

The path of the model in the state (`model.`) is removed from the names, so that `from_pretrained` finds them. Tied
weights are written once, and the header lists their other names, as safetensors' own `save_model` does.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.core.format.layout import BITS, MAX_HEADER, NATIVE, pages
from ckpt.core.format.regular_file import write_regular
from ckpt.core.format.values import show
from ckpt.errors import UsageError
from ckpt.tools.convert.cast import FLOATS, dtype_called
from ckpt.tools.convert.output import Literal, OutFile, Output, Sums, TensorRun
from ckpt.tools.convert.source import Origin, RankView

SHARD = 5_000_000_000  # maximum bytes per file, as in transformers
INDEX = "model.safetensors.index.json"
WEIGHTS = ("module", "custom module")


def weights_of(view: RankView) -> RankView:
    """Return the view with only the tensors of modules. Raise UsageError if there are none."""
    entries = tuple(entry for entry in view.entries if entry.kind in WEIGHTS)
    names = {view.aliases.get(name, name) for entry in entries for name in entry.names}
    if not names:
        raise UsageError("the state has no module with tensors, so there are no weights: select tensors with --only")
    tensors = {name: label for name, label in view.tensors.items() if name in names}
    aliases = {alias: name for alias, name in view.aliases.items() if name in names}
    return replace(view, entries=entries, tensors=tensors, aliases=aliases)


def cast_to(origin: Origin, views: Sequence[RankView], dtype: str | None) -> dict[str, str]:
    """Return the dtype to write for each tensor, by label. Raise UsageError if there is nothing to cast."""
    dtypes = {label: spec.dtype for label, spec in origin.tensors.items()}
    if dtype is None:
        return dtypes
    to = dtype_called(dtype)
    labels = {
        view.tensors[view.aliases.get(name, name)]
        for view in views
        for entry in view.entries
        if entry.kind in WEIGHTS
        for name in entry.names
    }
    floats = {label for label in labels if dtypes[label] in FLOATS}
    if not floats:
        raise UsageError("--dtype casts floating-point weights of modules, but the selection has none")
    return {**dtypes, **dict.fromkeys(floats, to)}


def prefix_of(view: RankView) -> str:
    """Return the prefix that can be removed from all names: the path of the only module. Otherwise return ""."""
    if len(view.entries) != 1 or view.entries[0].kind not in WEIGHTS:
        return ""
    prefix = show(view.entries[0].path) + "."
    return prefix if all(name.startswith(prefix) for name in (*view.tensors, *view.aliases)) else ""


def plan(
    origin: Origin, view: RankView, dtypes: Mapping[str, str], *, shard: int = SHARD, single: str = "", prefix: str = ""
) -> Output:
    """Plan the files. `dtypes`: dtype to write, by label. `single`: name of the file, if the output is one file and not
    a folder. Raise UsageError for a dtype that safetensors lacks."""
    if not view.tensors:
        raise UsageError("the selection has no tensors, and safetensors files contain nothing else")
    called = {name: name.removeprefix(prefix) for name in (*view.tensors, *view.aliases)}
    for name, label in view.tensors.items():
        if dtypes[label] not in NATIVE:
            raise UsageError(
                f"{name} has dtype {dtypes[label]}, which safetensors lacks: exclude it with --only, or "
                "choose --format torch"
            )
    if "__metadata__" in called.values():
        raise UsageError("a tensor is called __metadata__, which safetensors reserves: exclude it with --only")
    tied = {called[alias]: called[name] for alias, name in view.aliases.items()}
    if "format" in tied:
        raise UsageError('a tied tensor is called "format", which safetensors reserves: exclude it with --only')
    groups = _groups(origin, view, dtypes, shard if not single else 1 << 62)
    files, count = [], len(groups)
    for i, names in enumerate(groups):
        name = single or (f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors")
        inside = {called[n] for n in names}
        aliases = {alias: of for alias, of in tied.items() if of in inside}
        files.append(_file(name, origin, {called[n]: view.tensors[n] for n in names}, dtypes, aliases))
    index = _index(files, groups, called) if len(files) > 1 else None

    def finish(folder: Path, sums: Sums) -> None:
        if index is not None:
            write_regular(folder / INDEX, index)

    notes = (f"the names of tensors are written without the prefix {prefix!r}",) if prefix else ()
    return Output("safetensors", tuple(files), finish, bool(single), notes=notes)


def _groups(origin: Origin, view: RankView, dtypes: Mapping[str, str], most: int) -> list[list[str]]:
    """Group the names by file, in the order of the state: as many as fit into `most` bytes, but at least one."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, label in view.tensors.items():
        size = _elements(origin, label) * BITS[dtypes[label]] // 8
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _elements(origin: Origin, label: str) -> int:
    spec = origin.tensors[label]
    return spec.nbytes * 8 // BITS[spec.dtype]


def _file(
    name: str, origin: Origin, labels: Mapping[str, str], dtypes: Mapping[str, str], tied: Mapping[str, str]
) -> OutFile:
    """Plan one file. Large elements come first, so that tensors are aligned. The header fills whole pages."""
    order = sorted(labels, key=lambda n: -BITS[dtypes[labels[n]]])
    header: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    runs, at = list[tuple[int, str]](), 0
    for called in order:
        label = labels[called]
        shape, dtype = origin.tensors[label].shape, dtypes[label]
        size = _elements(origin, label) * BITS[dtype] // 8
        header[called] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        runs.append((at, label))
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER:
        raise UsageError(f"{len(labels)} tensors are too many for one safetensors file: choose a smaller --shard-size")
    first = pages(8 + len(text))
    head = Literal(0, struct.pack("<Q", first - 8) + text.ljust(first - 8))
    parts = [TensorRun(first + place, label, _all(origin, label), dtypes[label]) for place, label in runs]
    return OutFile(name, first + at, (head, *(part for part in parts if part.size)))


def _all(origin: Origin, label: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = origin.tensors[label].shape
    return (0,) * len(shape), shape


def _index(files: list[OutFile], groups: list[list[str]], called: Mapping[str, str]) -> bytes:
    """Return the index, which maps each tensor to its file. Tied tensors are listed once, as `save_pretrained` does."""
    where = {called[n]: file.name for file, names in zip(files, groups, strict=True) for n in names}
    total = sum(part.size for file in files for part in file.parts if isinstance(part, TensorRun))
    data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(data, indent=2) + "\n").encode()
