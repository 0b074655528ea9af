"""Divides the reads of a restore among ranks: each rank posts the blobs that it needs, then computes what it reads.

If possible, a rank reads the blobs that it needs itself, from the memory and the folders of its node. Otherwise another
rank sends them. If several ranks of a node need the same blob from a bucket, one downloads it and sends it to the
others. `assign` decides this. It is pure, so every rank computes the same result.

Ranks post global blob numbers, because a rank may have the chunk tables of only a few ranks.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.core.format.columns import I64
from ckpt.core.format.digest import blob_digest
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import Json
from ckpt.core.restore.sources import Mask, RestoreSource
from ckpt.core.state.filler import Filler
from ckpt.core.state.placement import mismatch
from ckpt.errors import CorruptError, StoreError, TransferError

Bools = npt.NDArray[np.bool_]


def fitting(posts: list[Any], saved: SavedState | None) -> list[Any]:
    """Return the posts. Raises MismatchError if the state of a rank does not fit, or if no rank needs a saved tensor
    (unless `saved` is None)."""
    problems: dict[str, list[int]] = {}
    for rank, post in enumerate(posts):
        for problem in post["problems"]:
            problems.setdefault(problem, []).append(rank)
    if problems:
        shown = [p if len(r) == len(posts) else f"rank {', '.join(map(str, r[:8]))}: {p}" for p, r in problems.items()]
        raise mismatch(shown)
    if saved is not None and (len(posts) > 1 or saved.world > 1):
        wanted = np.any([_unpack_mask(post["tensors"], len(saved.keys)) for post in posts], axis=0)
        if lost := _unclaimed(saved, wanted):
            raise mismatch(
                [f"{name} was saved by {_who(saved, name)}, and is in the state of no rank here" for name in lost]
            )
    return posts


def _unclaimed(saved: SavedState, wanted: Mask) -> list[str]:
    """List tensors of modules and optimizers that no rank needs. Without them, training would continue differently."""
    claimed = {saved.keys[i][0] for i in np.flatnonzero(wanted).tolist()}
    return [
        name
        for name in sorted(saved.shared_names() - claimed)
        if any(saved.tensors[name, instance].spec.nbytes for instance in saved.instances(name))
    ]


def wanted_tensors(saved: SavedState, filler: Filler) -> str:
    """Return the tensors of which this rank needs any part, for `fitting`."""
    shards = np.unique(saved.shard_of_blob[filler.blobs])
    place = {key: i for i, key in enumerate(saved.keys)}
    names, instances = saved.table.columns.names, saved.table.columns.instance
    found = np.zeros(len(place), np.bool_)
    found[[place[names[i], int(instances[i])] for i in shards.tolist()]] = True
    return _pack(np.packbits(found))


def wishes(source: RestoreSource, filler: Filler) -> dict[str, Json]:
    """Return the post of a rank: the tensors and blobs that it needs, their sizes, and readable blobs (None: all)."""
    saved, readable = source.saved, source.readable()
    can = None if readable.all() else _pack_numbers(saved.numbers[readable[: saved.table.owned]])
    return {
        "tensors": wanted_tensors(saved, filler),
        "wants": _pack_numbers(saved.numbers[filler.blobs]),
        "sizes": _pack(saved.table.length[filler.blobs].astype("<i4")),
        "can": can,
    }


def _who(saved: SavedState, name: str) -> str:
    instances = saved.instances(name)
    return "all ranks" if instances[0] < 0 else "rank " + ", ".join(map(str, instances[:8]))


def verified(saved: SavedState, filler: Filler) -> Callable[[int, memoryview], None]:
    """Return a function that checks the digest of a blob from another rank again, and fills it in."""
    local = dict(zip(saved.numbers[filler.blobs].tolist(), filler.blobs, strict=True))

    def take(number: int, data: memoryview) -> None:
        blob = local[number]
        expected = int(saved.table.length[blob])
        if len(data) != expected or (saved.digested and blob_digest(data) != saved.table.digest[blob].tobytes()):
            # The checkpoint may be intact, so the retry lets each rank read for itself.
            raise TransferError(
                f"a piece of a tensor ({number}) was damaged on its way from another rank", retryable=True
            )
        filler.add(blob, data)

    return take


@dataclass(frozen=True)
class Work:
    """The work of a rank, with global blob numbers.

    `recipients`: for each blob that it reads, the other ranks that get it. `expects`: the blobs it gets, by sender.
    """

    reads: list[int]
    recipients: dict[int, tuple[int, ...]]
    expects: dict[int, list[int]]


def divided(rank: int, posts: Sequence[Any], nodes: Sequence[int]) -> Work:
    """Return the work of a rank. If all ranks can read everything, it depends only on the ranks of its own node."""
    ranks = list(range(len(posts)))
    if all(post["can"] is None for post in posts):
        ranks = [other for other in ranks if nodes[other] == nodes[rank]]
    wanted = [_unpack_numbers(posts[other]["wants"]) for other in ranks]
    lengths = [np.frombuffer(_unpack(posts[other]["sizes"]), "<i4").astype(np.int64) for other in ranks]
    numbers, first = np.unique(np.concatenate(wanted), return_index=True)
    sizes = np.concatenate(lengths)[first]
    wants = np.zeros((len(ranks), len(numbers)), np.bool_)
    can = np.ones_like(wants)
    for row, (other, mine) in enumerate(zip(ranks, wanted, strict=True)):
        wants[row, np.searchsorted(numbers, mine)] = True
        if posts[other]["can"] is not None:
            can[row] = np.isin(numbers, _unpack_numbers(posts[other]["can"]))
    share = assign(ranks.index(rank), sizes, wants, can, [nodes[other] for other in ranks])
    reads = numbers[share.reads].tolist()
    recipients = [tuple(ranks[i] for i in each) for each in share.recipients]
    expects: dict[int, list[int]] = {}
    for number, sender in zip(numbers[share.expects].tolist(), share.senders.tolist(), strict=True):
        expects.setdefault(ranks[sender], []).append(number)
    return Work(reads, dict(zip(reads, recipients, strict=True)), expects)


@dataclass(frozen=True, eq=False)
class RankReads:
    """The reads and transfers of a rank.

    - `reads`: the blobs that it reads, ascending. `recipients`: for each of them, the other ranks that get it.
    - `expects`: the blobs that it gets from others, ascending. `senders`: for each of them, the rank that reads it.
    """

    reads: I64
    recipients: tuple[tuple[int, ...], ...]
    expects: I64
    senders: I64


def assign(rank: int, sizes: I64, wants: Bools, can_read: Bools, nodes: Sequence[int]) -> RankReads:
    """Return the work of `rank`. With the same arguments, the results for the ranks are consistent.

    `sizes`: bytes of each blob. `wants` and `can_read`: ranks x blobs. `nodes`: the node of each rank. If a node needs
    a blob and can read it, one rank reads it, preferably one that needs it. If no rank of the node can read it, a rank
    of another node sends it, preferably one that reads it for its own node. Ranks read about the same number of bytes,
    in runs that are as long as possible. Raises StoreError if no rank can read a blob that is needed.
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
    expects = np.flatnonzero(wants[rank] & ~mine[node[rank]])
    return RankReads(reads, tuple(recipients), expects, source[node[rank], expects].astype(np.int64))


def _sources(sizes: I64, wants: Bools, can_read: Bools, node: npt.NDArray[np.intp], own: int) -> npt.NDArray[np.int32]:
    """Return (nodes x blobs) the rank that reads a blob for the ranks of a node, or -1 if none of them needs it.

    If no node depends on another one, fill only the row of node `own`, so that the time does not grow with the job.
    """
    members = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
    wanted = np.array([wants[ranks].any(0) for ranks in members])
    needed = wanted & ~np.array([can_read[ranks].any(0) for ranks in members])
    far = np.flatnonzero(needed.any(0))  # blobs that some node needs but cannot read itself
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
    """Assign each blob to one of its eligible ranks, in `reader`, and count its bytes in `load`.

    Blobs with the same eligible ranks are assigned in runs, the first to the rank with the least load. Each run has the
    length that equalizes the load. All numbers are integers, so that every machine computes the same result.
    """
    for rows, blobs in _groups(eligible):
        able = ranks[rows]
        able = able[np.argsort(load[able], kind="stable")]
        ends = np.cumsum(sizes[blobs])
        total = int(ends[-1])
        before = load[able]
        levels = -((total + np.cumsum(before)) // -np.arange(1, able.size + 1))  # if the first 1, 2, 3 … ranks read all
        shares = np.minimum(np.cumsum(np.maximum(levels.min() - before, 0)), total)
        cuts = np.searchsorted(2 * ends - sizes[blobs], 2 * shares, side="right")  # by the middle of each blob
        reader[blobs] = np.repeat(able, np.diff(cuts, prepend=0))
        load[able] += np.diff(np.concatenate([[0], ends])[cuts], prepend=0)


def _groups(table: Bools) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Group equal columns that are not empty: (rows that are set, columns ascending), fewest rows first."""
    packed = np.packbits(table, axis=0)
    order = np.lexsort(packed)
    packed = packed[:, order]
    runs = np.split(order, np.flatnonzero((packed[:, 1:] != packed[:, :-1]).any(0)) + 1)
    groups = [(np.flatnonzero(table[:, run[0]]), run) for run in runs if run.size]
    return sorted((g for g in groups if g[0].size), key=lambda g: (g[0].size, int(g[1][0])))


def known(saved: SavedState, numbers: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return the blobs of this rank's table that have these global numbers."""
    found = np.minimum(np.searchsorted(saved.numbers, numbers), max(0, len(saved.numbers) - 1))
    if (saved.numbers[found] != np.asarray(numbers, np.int64)).any():
        raise CorruptError("the ranks do not mean the same by the numbers of blobs")
    return found


def _pack(column: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _unpack_mask(text: str, count: int) -> Mask:
    return np.unpackbits(np.frombuffer(_unpack(text), np.uint8), count=count).astype(np.bool_)


def _pack_numbers(ascending: npt.NDArray[np.int64]) -> str:
    """Pack the differences between numbers, which compress well because they are similar."""
    return _pack(np.diff(ascending, prepend=0).astype("<i8"))


def _unpack_numbers(text: str) -> npt.NDArray[np.int64]:
    return np.cumsum(np.frombuffer(_unpack(text), "<i8"), dtype=np.int64)
