"""A checkpoint that torch's DCP saved to a run (`ckpt.dcp`), as modules, optimizers and plain values.

DCP saved a flat list of names, and recorded how the entries were nested. It pickled objects that are not tensors.
`ckpt.tools.convert.parse_torch` reads these pickles, as in DCP's own folders.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.core.format.layout import TensorSpec
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.tools.convert.parse_dcp import MAX_OBJECT, nested, paths_of
from ckpt.tools.convert.parse_entries import OBJECT, TensorRef, Values
from ckpt.tools.convert.parse_state import from_state
from ckpt.tools.convert.parse_torch import load, naming_file
from ckpt.tools.convert.source import Origin, Want
from ckpt.tools.convert.source_files import FilesOrigin, Foreign, admit
from ckpt.tools.convert.source_run import DCP, RunOrigin

STORED, PICKLED = "(stored) ", "(object) "  # prefixes of file names that stand for a tensor or an object of the run


async def untangled(run: RunOrigin) -> DcpOrigin:
    """Convert the checkpoint to entries of this library. Raise CorruptError if an object is damaged."""
    entries = run.view().entries
    try:
        facts = [one["facts"] for view in run.saved.views for one in view.components if one["kind"] == DCP]
        objects = {str(name) for one in facts for name in one["objects"]}
        mappings = {name: path for one in facts for name, path in (one["mappings"] or {}).items()}
        known = set(entries[0].names)
        order = dict.fromkeys(name for one in facts for name in one["order"] if name in known)
        names = list(dict.fromkeys([*order, *entries[0].names]))
        paths = paths_of(names, mappings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{run.title}: DCP's description of it is damaged: {error}") from None
    plain, held, found = Values(), dict[str, bytes](), dict[str, Any]()
    for name in names:
        spec = run.tensors[run.names[name]]
        if name in objects:
            held[PICKLED + name] = await _bytes_of(run, name, spec)
            try:
                with naming_file(Path(run.title), (name,)):
                    container = load(io.BytesIO(held[PICKLED + name]), PICKLED + name)
                    value = plain.all_of(container, paths[name])
                if value is OBJECT:
                    paths.pop(name)
                else:
                    found[name] = value
            except (FormatError, UsageError) as error:  # skip the object, so that the weights can still be read
                plain.note(paths.pop(name), f"skipped: {error}")
        else:
            found[name] = TensorRef(spec.dtype, spec.shape, STORED + name, 0)
    with naming_file(Path(run.title)):
        foreign = admit(from_state(run.title, Path(), nested(found, paths), ("model",), plain), skip=True)
    return DcpOrigin(run, foreign, held)


async def _bytes_of(run: RunOrigin, name: str, spec: TensorSpec) -> bytes:
    if spec.dtype != "U8" or spec.nbytes > MAX_OBJECT:
        raise CorruptError(f"{run.title}: {name} is not an object, or implausibly large")
    into = np.empty(spec.nbytes, np.uint8)
    if len(into):
        await run.read([Want(run.names[name], ((0,) * len(spec.shape), spec.shape), 0, len(into), into)])
    return into.tobytes()


class DcpOrigin(FilesOrigin):
    """Tensors of the run by their names in the entries. Tensors inside objects are read from the objects' bytes."""

    def __init__(self, run: RunOrigin, foreign: Foreign, held: dict[str, bytes]) -> None:
        self._run = run
        stored = {p.name: p.file.removeprefix(STORED) for p in foreign.pieces if p.file.startswith(STORED)}
        self._labels = {name: run.names[fqn] for name, fqn in stored.items()}
        rest = tuple(p for p in foreign.pieces if p.name not in stored)
        specs = {name: run.tensors[label] for name, label in self._labels.items()}
        super().__init__(replace(foreign, pieces=rest, held={**foreign.held, **held}, step=run.step), elsewhere=specs)
        self.title, self.identity, self.about, self.parents = run.title, run.identity, run.about, run.parents
        self.far, self.finite, self.repaired = run.far, run.finite, run.repaired

    @property
    def keep(self) -> int:
        return self._run.keep

    @keep.setter
    def keep(self, size: int) -> None:
        self._run.keep = size

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        if not isinstance(other, DcpOrigin) or label not in self._labels or theirs not in other._labels:
            return False
        return self._run.same(self._labels[label], other._run, other._labels[theirs])

    async def read(self, wants: Sequence[Want]) -> None:
        own = [Want(self._labels[w.label], w.box, w.start, w.stop, w.into) for w in wants if w.label in self._labels]
        if own:
            await self._run.read(own)
        await super().read([want for want in wants if want.label not in self._labels])

    async def unchanged(self) -> None:
        await self._run.unchanged()

    async def aclose(self) -> None:
        await self._run.aclose()
