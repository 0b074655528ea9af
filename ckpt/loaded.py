"""Whole tensors of a checkpoint, in one process, read when they are asked for."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ckpt import read
from ckpt.errors import CorruptError, UsageError
from ckpt.plan import Layout
from ckpt.restore import Filler
from ckpt.sources import shard_of
from ckpt.store import normalise
from ckpt.tensors import empty, to_array
from ckpt.values import Json, decode, show


class Loaded(Mapping[str, Tensor]):
    """Tensors by name. Each is read, verified and put on the CPU when it is first used, and kept.

    `step` and `url` say what it is. `values(…)` is the Mapping's; plain values are under `plain(path)`.
    """

    def __init__(self, url: str, manifest: read.Manifest, names: dict[str, str], layout: Layout) -> None:
        self.url, self.step = url, manifest.commit.step
        self._manifest, self._names, self._layout = manifest, names, layout
        self._cache: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<step {self.step} of {self.url}: {len(self)} tensors>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        return self._read([self._names[name]])[self._names[name]]

    def all(self) -> dict[str, Tensor]:
        """Every tensor, read in one go; names that shared memory when they were saved share it again."""
        tensors = self._read(list(dict.fromkeys(self._names.values())))
        return {name: tensors[canonical] for name, canonical in self._names.items()}

    def sub(self, prefix: str) -> Loaded:
        """What lies under a prefix, without it: `load(url).sub("model")` suits `model.load_state_dict`."""
        start = prefix.rstrip(".") + "."
        names = {name.removeprefix(start): own for name, own in self._names.items() if name.startswith(start)}
        if not names:
            raise UsageError(f"no tensor of step {self.step} has a name that starts with {start!r}")
        return Loaded(self.url, self._manifest, names, self._layout)

    def plain(self, path: str) -> Any:
        """The plain values under one entry of the state, such as `plain("epoch")`. KeyError if there is none."""
        for component, values in zip(self._layout.components, self._manifest.parts[0].values, strict=True):
            if show(tuple(component["path"])) == path:
                return decode(values, self._extern)
        raise KeyError(path)

    def _extern(self, reference: Json) -> object:
        name = self._layout.aliases.get(reference["name"], reference["name"])
        tensor = self._read([name])[name]
        return tensor if reference["$"] == "tensor" else to_array(tensor, reference)

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        with self._lock:
            missing = [name for name in names if name not in self._cache]
            if missing:
                self._cache.update(read.run(self._fetch(missing)))
            return {name: self._cache[name] for name in names}

    async def _fetch(self, names: list[str]) -> dict[str, Tensor]:
        table, specs = self._manifest.table, self._layout.by_name
        for name in names:
            if name not in specs:
                raise CorruptError(f"{name} is not in the layout of step {self.step}")
        shards = [shard_of(self._layout, table, name) for name in names]
        tensors = {name: empty(specs[name], "cpu") for name in names}
        filler = Filler({name: [tensor] for name, tensor in tensors.items()}, specs)
        log = await read.open_run(self.url)
        try:
            reads = read.plan_reads(table, shards)
            await read.fetch(log.store, table, reads, lambda i, at, data: filler.add(table.shards[i].name, at, data))
        finally:
            await log.store.aclose()
        return tensors


def load(url: str | Path, *, step: int | None = None, only: str | None = None) -> Loaded:
    """The newest checkpoint of a run, or that of `step`, as tensors by name.

    `only`: a shell pattern such as "model.*". Raises FormatError if there is no run, NoCheckpointError if there is no
    such checkpoint, CorruptError if what is read is damaged.
    """
    place = normalise(url)

    async def manifest() -> read.Manifest:
        log = await read.open_run(place)
        try:
            return await read.load_manifest(log.store, read.choose(log, step))
        finally:
            await log.store.aclose()

    found = read.run(manifest())
    layout = found.layout()
    every = {t.name: t.name for t in layout.tensors} | layout.aliases
    names = {n: own for n, own in sorted(every.items()) if only is None or fnmatch.fnmatchcase(n, only)}
    if not names and only is not None:
        raise UsageError(f"no tensor of step {found.commit.step} in {place} matches {only!r}")
    return Loaded(place, found, names, layout)
