"""Which rows of tables are the pieces that a directory names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ckpt.errors import CorruptError
from ckpt.format.columns import I64, NONE, starts_of
from ckpt.format.rank_index import Directory, Key
from ckpt.format.shards import Shards


def find_shards(found: Directory, wanted: Sequence[tuple[Key, int, I64]], shards: Shards) -> list[list[int]]:
    """For the pieces of each wanted tensor, which shards they are."""
    tensor = np.full(len(shards), -1, np.int64)
    numbers = {key: i for i, (key, _, _) in enumerate(wanted)}
    tensor[:] = [numbers.get(key, -1) for key in zip(shards.names, shards.instance.tolist(), strict=True)]
    held = np.flatnonzero(tensor >= 0)
    place = tensor[held] * found.world + shards.rank[held]
    order = np.argsort(place, kind="stable")
    held, place = held[order], place[order]
    patterns = [found.pattern_of(number) for _, number, _ in wanted]
    counts = np.array([len(pieces) for _, _, pieces in wanted], np.int64)
    ranks = [p.ranks[pieces] + found.base_rank(n) for p, (_, n, pieces) in zip(patterns, wanted, strict=True)]
    asked = np.repeat(np.arange(len(wanted)), counts) * found.world + np.concatenate([NONE, *ranks])
    low, high = np.searchsorted(place, asked, "left"), np.searchsorted(place, asked, "right")
    result: list[list[int]] = []
    for i, (start, stop) in enumerate(itertools.pairwise(starts_of(np.cumsum(counts)).tolist())):
        (name, _), number, pieces = wanted[i]
        pattern, k = patterns[i], len(patterns[i].shape)
        boxes = np.concatenate([pattern.offsets[pieces], pattern.sizes[pieces]], 1)
        lows, highs = low[start:stop], high[start:stop]
        if (highs == lows).any():
            raise _absent(found, name, asked[start:stop][highs == lows])
        mine = held[lows]
        several = np.flatnonzero(highs - lows > 1)
        for j in several.tolist():
            mine[j] = next(
                (c for c in held[lows[j] : highs[j]].tolist() if _box_of(shards, c) == boxes[j].tolist()), mine[j]
            )
        there = shards.dims[
            np.minimum(shards.dim_starts[mine][:, None] + np.arange(3 * k), max(0, len(shards.dims) - 1))
        ]
        right = (np.diff(shards.dim_starts)[mine] == 3 * k) & (there[:, k:] == boxes).all(1)
        right &= (there[:, :k] == np.array(pattern.shape, np.int64)).all(1)
        right &= shards.dtype[mine] == int(found.columns["tensor_dtype"][number])
        if not right.all():
            raise _absent(found, name, asked[start:stop][~right])
        result.append(mine.tolist())
    return result


def _box_of(shards: Shards, number: int) -> list[int]:
    row: list[int] = shards.dims[shards.dim_starts[number] : shards.dim_starts[number + 1]].tolist()
    return row[len(row) // 3 :]


def _absent(found: Directory, name: str, asked: I64) -> CorruptError:
    rank = int(asked[0]) % found.world
    return CorruptError(f"the index says that rank {rank} has a piece of {name} which its table does not have")
