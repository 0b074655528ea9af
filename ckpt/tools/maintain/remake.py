"""Make lost small files of a checkpoint again from its other files. Their digests prove that the result is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt.core.checkpoint.parts import no_layout
from ckpt.core.format.digest import file_digest
from ckpt.core.format.join_ranks import build
from ckpt.core.format.manifest import Part, unpress
from ckpt.core.format.slim import RankPieces, Slim
from ckpt.core.format.table import Table, merge
from ckpt.core.log.records import Commit
from ckpt.errors import CorruptError


class IndexOf:
    """Makes the index of a checkpoint from all manifests and tables. `many`: keep less per rank. `wanted`: the index is
    lost."""

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


def share_of(index: Table, part: Part) -> Table | None:
    """Extract the table of one rank from the index, as `format.table.merge` put it in. The caller checks its digest."""
    own = [i for i, shard in enumerate(index.shards) if shard.rank == part.rank]
    if not own:
        return None
    first, last = own[0], own[-1] + 1
    low, high = int(index.starts[first]), int(index.starts[last])
    behind = np.unique(index.base[low:high][index.base[low:high] >= index.owned])
    bases = np.arange(behind[0], behind[-1] + 1) if behind.size else np.zeros(0, np.int64)
    rows = np.concatenate([np.arange(low, high), bases])
    packs = tuple(pack.key for pack in part.packs)
    place = {key: i for i, key in enumerate(packs)}
    if any(index.packs[n] not in place for n in np.unique(index.pack[rows]).tolist()):
        return None
    numbers = np.array([place.get(key, 0) for key in index.packs], np.int64)
    base = index.base[rows]
    shifted = np.where(base >= index.owned, base - (bases[0] if bases.size else 0) + high - low, base - low)
    columns = {name: getattr(index, name)[rows] for name in ("offset", "stored", "length", "codec")}
    return Table(
        shards=index.shards[first:last],
        starts=index.starts[first : last + 1] - low,
        pack=numbers[index.pack[rows]],
        base=np.where(base < 0, -1, shifted),
        digest=index.digest[rows],
        stored_digest=index.stored_digest[rows],
        packs=packs,
        **columns,
    )
