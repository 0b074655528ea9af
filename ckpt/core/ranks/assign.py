"""Who reads what when several ranks want the same bytes. Pure: every rank computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.core.format.columns import I64
from ckpt.errors import StoreError

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RankReads:
    """What one rank does.

    `reads`: the blobs it reads, ascending. `recipients`: for each of them, the other ranks that get it, ascending.
    `expects`: the blobs that come to it from others, ascending.
    """

    reads: I64
    recipients: tuple[tuple[int, ...], ...]
    expects: I64


def assign(rank: int, sizes: I64, wants: Bools, can_read: Bools, nodes: Sequence[int]) -> RankReads:
    """The share of `rank`. Given the same arguments, the shares of all ranks fit together.

    `sizes`: bytes of each blob. `wants` and `can_read`: ranks x blobs. `nodes`: the node of each rank. A node that can
    read what it wants does so once, by a rank that wants it itself if one can. What a node cannot read comes from one
    rank elsewhere, from one that reads it anyway if there is one. Bytes are levelled out over the ranks, in runs as
    long as can be. StoreError if nobody can read some blob that is wanted.
    """
    lost = int(np.count_nonzero(wants.any(0) & ~can_read.any(0)))
    if lost:
        raise StoreError(f"no rank can read {lost} of the pieces of tensors that are wanted")
    node = np.unique(np.asarray(nodes), return_inverse=True)[1]
    source = _sources(sizes, wants, can_read, node, int(node[rank]))
    mine = source == rank
    reads = np.flatnonzero(mine.any(0))
    given = wants[:, reads] & mine[:, reads][node]
    given[rank] = False
    recipients: list[tuple[int, ...]] = [()] * reads.size
    for rows, places in _groups(given):
        ranks = tuple(rows.tolist())
        for i in places.tolist():
            recipients[i] = ranks
    return RankReads(reads, tuple(recipients), np.flatnonzero(wants[rank] & ~mine[node[rank]]))


def _sources(sizes: I64, wants: Bools, can_read: Bools, node: npt.NDArray[np.intp], own: int) -> npt.NDArray[np.int32]:
    """Nodes x blobs: the rank from which the ranks of a node have a blob, -1 where none of them wants it.

    Where no node needs another one, only the row of node `own` is filled: the time does not grow with the job.
    """
    members = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
    wanted = np.array([wants[ranks].any(0) for ranks in members])
    needed = wanted & ~np.array([can_read[ranks].any(0) for ranks in members])
    far = np.flatnonzero(needed.any(0))  # what some node cannot read itself
    source, load = np.full(wanted.shape, -1, np.int32), np.zeros(node.size, np.int64)
    for n in range(len(members)) if far.size else [own]:
        able, both = can_read[members[n]], wants[members[n]] & can_read[members[n]]
        _deal(sizes, np.where(both.any(0), both, able) & wanted[n], members[n], load, source[n])
    if far.size:
        anyway = np.zeros((node.size, far.size), np.bool_)
        for row in source[:, far]:
            at = np.flatnonzero(row >= 0)
            anyway[row[at], at] = True
        chosen = np.full(far.size, -1, np.int32)
        eligible = np.where(anyway.any(0), anyway, can_read[:, far])
        _deal(sizes[far], eligible, np.arange(node.size), load, chosen)
        source[:, far] = np.where(needed[:, far], chosen, source[:, far])
    return source


def _deal(sizes: I64, eligible: Bools, ranks: npt.NDArray[np.intp], load: I64, reader: npt.NDArray[np.int32]) -> None:
    """Give each blob that has eligible ranks to one of them, in `reader`, and count its bytes in `load`.

    Blobs with the same eligible ranks are dealt in runs, the first to the rank with the least load, each as long as it
    takes to lift all of them to one level. All numbers are integers, so that every machine comes to the same result.
    """
    for rows, blobs in _groups(eligible):
        able = ranks[rows]
        able = able[np.argsort(load[able], kind="stable")]
        ends = np.cumsum(sizes[blobs])
        total = int(ends[-1])
        before = load[able]
        levels = -((total + np.cumsum(before)) // -np.arange(1, able.size + 1))  # if the first 1, 2, 3 … took all
        shares = np.minimum(np.cumsum(np.maximum(levels.min() - before, 0)), total)
        cuts = np.searchsorted(2 * ends - sizes[blobs], 2 * shares, side="right")  # by the middle of each blob
        reader[blobs] = np.repeat(able, np.diff(cuts, prepend=0))
        load[able] += np.diff(np.concatenate([[0], ends])[cuts], prepend=0)


def _groups(table: Bools) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Columns that are equal and not empty: the rows that are set, the columns ascending; fewest rows first."""
    packed = np.packbits(table, axis=0)
    order = np.lexsort(packed)
    packed = packed[:, order]
    runs = np.split(order, np.flatnonzero((packed[:, 1:] != packed[:, :-1]).any(0)) + 1)
    groups = [(np.flatnonzero(table[:, run[0]]), run) for run in runs if run.size]
    return sorted((g for g in groups if g[0].size), key=lambda g: (g[0].size, int(g[1][0])))
