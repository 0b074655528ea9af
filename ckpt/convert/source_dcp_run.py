"""A checkpoint that torch's DCP has saved to a run of ours (`ckpt.dcp`), as modules, optimizers and plain values.

Such a checkpoint is one row of names. What they were nested in, DCP has said; objects that are no tensors it has
pickled, and they are read by `ckpt.convert.safe_pickle`, like those in DCP's own folders.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.checkpoint import read
from ckpt.convert import safe_pickle
from ckpt.convert.parse_dcp import MAX_OBJECT, nested, paths_of
from ckpt.convert.parse_entries import from_state
from ckpt.convert.parse_torch import FileSection, find_in, open_archive, told
from ckpt.convert.parse_values import ALLOWED, TensorRef, Values
from ckpt.convert.source import Origin, RankView, Want
from ckpt.convert.source_files import FilesOrigin, Foreign
from ckpt.convert.source_run import RunOrigin
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.format.layout import TensorSpec
from ckpt.format.values import Json, show

KIND = "dcp"  # of the one entry of such a checkpoint
STORED, PICKLED = "(stored) ", "(object) "  # so begin the names of what stands for a file here


async def untangled(run: RunOrigin) -> Origin:
    """The checkpoint in our terms; the same if DCP has not saved it. CorruptError if an object is damaged."""
    if {one["kind"] for view in run.saved.views for one in view.components} != {KIND}:
        return run
    entries = run.view().entries
    try:
        facts = [one["facts"] for view in run.saved.views for one in view.components if one["kind"] == KIND]
        objects = {str(name) for one in facts for name in one["objects"]}
        mappings = {name: path for one in facts for name, path in (one["mappings"] or {}).items()}
        known = set(entries[0].names)
        order = dict.fromkeys(name for one in facts for name in one["order"] if name in known)
        names = list(dict.fromkeys([*order, *entries[0].names]))
        paths = paths_of(names, mappings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{run.title}: what DCP said of it is damaged: {error}") from None
    plain, held, found = Values(_nowhere), dict[str, bytes](), dict[str, Any]()
    for name in names:
        spec = run.tensors[run.names[name]]
        if name in objects:
            held[PICKLED + name] = await _bytes_of(run, name, spec)
            try:
                with told(Path(run.title), (name,)):
                    found[name] = _object(held[PICKLED + name], PICKLED + name, paths[name], plain)
            except (FormatError, UsageError) as error:  # the weights beside it are not to be lost for it
                plain.note(paths.pop(name), f"is left out: {error}")
        else:
            found[name] = TensorRef(spec.dtype, spec.shape, STORED + name, 0)
    with told(Path(run.title)):
        foreign = from_state(run.title, Path(), nested(found, paths), ("model",), plain)
    return DcpOrigin(run, foreign, held)


@contextlib.asynccontextmanager
async def opened_run(url: str, step: int | None) -> AsyncIterator[Origin]:
    """A checkpoint of a run, while its store is open; the newest without `step`."""
    log = await read.open_run(url)
    try:
        yield await untangled(RunOrigin(log, await read.manifest_of(log, step), ()))
    finally:
        await log.store.aclose()


async def _bytes_of(run: RunOrigin, name: str, spec: TensorSpec) -> bytes:
    if spec.dtype != "U8" or spec.nbytes > MAX_OBJECT:
        raise CorruptError(f"{run.title}: {name} is not an object, or implausibly large")
    into = np.empty(spec.nbytes, np.uint8)
    if len(into):
        await run.read([Want(run.names[name], ((0,) * len(spec.shape), spec.shape), 0, len(into), into)])
    return into.tobytes()


def _object(raw: bytes, file: str, path: tuple[str | int, ...], plain: Values) -> Any:
    fd = os.memfd_create("ckpt-object", os.MFD_CLOEXEC)
    try:
        os.write(fd, raw)
        archive = open_archive(FileSection(fd, 0, len(raw)))
        plain.find = find_in(archive, file)
        return plain.plain(safe_pickle.load(archive.read("data.pkl", MAX_OBJECT), ALLOWED, path), path)
    finally:
        os.close(fd)


class DcpOrigin:
    """Tensors by the names that they get in our terms; those inside of objects come from the objects' bytes."""

    def __init__(self, run: RunOrigin, foreign: Foreign, held: dict[str, bytes]) -> None:
        self._run, self._foreign = run, foreign
        stored = {p.name: p.file.removeprefix(STORED) for p in foreign.pieces if p.file.startswith(STORED)}
        rest = tuple(p for p in foreign.pieces if p.name not in stored)
        self._objects = FilesOrigin(Foreign(foreign.what, foreign.folder, rest, {}, (), held={**foreign.held, **held}))
        self._labels = {name: run.names[fqn] for name, fqn in stored.items()}
        self.title, self.identity, self.about = run.title, run.identity, run.about
        self.far, self.finite, self.repaired = run.far, run.finite, run.repaired
        self.tensors: Mapping[str, TensorSpec] = {
            **{name: run.tensors[label] for name, label in self._labels.items()},
            **self._objects.tensors,
        }
        self.names: Mapping[str, str] = {**{name: name for name in self.tensors}, **foreign.aliases}

    @property
    def keep(self) -> int:
        return self._run.keep

    @keep.setter
    def keep(self, size: int) -> None:
        self._run.keep = size

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        names, foreign = {name: name for name in self.tensors}, self._foreign
        return RankView(foreign.entries, names, foreign.aliases, foreign.notes, self._run.step)

    def plain(self) -> dict[str, tuple[dict[str, Any], Json]]:
        return {
            show(e.path): ({"path": list(e.path), "kind": e.kind, "facts": e.facts}, e.values)
            for e in self._foreign.entries
        }

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        if not isinstance(other, DcpOrigin) or label not in self._labels or theirs not in other._labels:
            return False
        return self._run.same(self._labels[label], other._run, other._labels[theirs])

    async def read(self, wants: Sequence[Want]) -> None:
        mine = [Want(self._labels[w.label], w.box, w.start, w.stop, w.into) for w in wants if w.label in self._labels]
        rest = [want for want in wants if want.label not in self._labels]
        if mine:
            await self._run.read(mine)
        if rest:
            await self._objects.read(rest)

    async def unchanged(self) -> None:
        await self._run.unchanged()

    async def aclose(self) -> None:
        await self._objects.aclose()
        await self._run.aclose()


def _nowhere(key: str) -> tuple[str, int, int]:
    raise KeyError(key)
