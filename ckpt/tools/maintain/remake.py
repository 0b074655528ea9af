"""Make the index of a checkpoint again from the manifests of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ckpt.core.checkpoint.parts import no_layout
from ckpt.core.format.digest import file_digest
from ckpt.core.format.join_ranks import build
from ckpt.core.format.manifest import Part, unpress
from ckpt.core.format.slim import RankPieces, Slim
from ckpt.core.format.table import Table, merge
from ckpt.core.log.records import Commit
from ckpt.errors import CorruptError


class IndexOf:
    """Makes the index from the manifests of all ranks. `many`: of each, keep only what the index needs. `wanted`: the
    index is lost."""

    def __init__(self, *, many: bool, wanted: bool) -> None:
        self._slim = Slim() if many else None
        self._wanted = wanted
        self._parts: list[Part] = []
        self._tables: list[Table] = []
        self._pieces: list[RankPieces] = []

    @property
    def layout_of(self) -> Callable[[str], dict[str, Any]]:
        """Return the function that reads the layouts of manifests."""
        if self._slim is None:
            return unpress
        return self._slim.layout if self._wanted else no_layout

    def add(self, part: Part, table: Table) -> None:
        """Add the files of one rank, in rank order."""
        if self._wanted and self._slim is not None:
            self._parts.append(self._slim.part(part))
            self._pieces.append(self._slim.pieces(table))
        elif self._wanted:
            self._parts.append(part)
            self._tables.append(table)

    def made(self, commit: Commit) -> bytes | None:
        """Return the index, or None if its digest differs."""
        made = b"" if self._slim is not None else merge(self._tables).to_bytes()
        if file_digest(made) != commit.index and len(self._parts) == commit.world:
            with contextlib.suppress(CorruptError):
                made = build(self._parts, self._pieces or self._tables).to_bytes()
        return made if file_digest(made) == commit.index else None
