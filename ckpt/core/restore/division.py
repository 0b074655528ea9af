"""How the ranks of a restore divide the reading: what each says it wants, and what each of them then does.

Ranks tell each other blobs by their numbers among those of all ranks, since a rank may know of a few only.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.core.format.digest import blob_digest
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import Json
from ckpt.core.ranks.assign import assign
from ckpt.core.restore.sources import Mask, RestoreSource
from ckpt.core.state.filler import Filler
from ckpt.core.state.placement import mismatch
from ckpt.errors import CorruptError


def fitting(posts: list[Any], saved: SavedState | None) -> list[Any]:
    """The posts, or MismatchError. What a rank of many does not want, another must (`saved`: if that matters)."""
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
    """Tensors of modules and optimizers that no rank wants: without them the training would not be the same."""
    claimed = {saved.keys[i][0] for i in np.flatnonzero(wanted).tolist()}
    return [
        name
        for name in sorted(saved.shared_names() - claimed)
        if any(saved.tensors[name, instance].spec.nbytes for instance in saved.instances(name))
    ]


def wanted_tensors(saved: SavedState, filler: Filler) -> str:
    """Which tensors this rank wants something of."""
    shards = np.unique(saved.shard_of_blob[filler.blobs])
    place = {key: i for i, key in enumerate(saved.keys)}
    names, instances = saved.table.columns.names, saved.table.columns.instance
    found = np.zeros(len(place), np.bool_)
    found[[place[names[i], int(instances[i])] for i in shards.tolist()]] = True
    return _pack(np.packbits(found))


def wishes(source: RestoreSource, filler: Filler) -> dict[str, Json]:
    """What a rank tells the others: the tensors and the blobs that it wants, their sizes, and what it can read.

    None: it can read all.
    """
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
    """Takes what another rank has read: it came over a network, so it is checked once more."""
    local = dict(zip(saved.numbers[filler.blobs].tolist(), filler.blobs, strict=True))

    def take(number: int, data: memoryview) -> None:
        blob = local[number]
        expected = int(saved.table.length[blob])
        if len(data) != expected or (saved.digested and blob_digest(data) != saved.table.digest[blob].tobytes()):
            raise CorruptError(f"a piece of a tensor ({number}) was damaged on its way from another rank")
        filler.add(blob, data)

    return take


@dataclass(frozen=True)
class Work:
    """What one rank does, by the numbers of blobs among those of all ranks: it reads some, for these ranks as well, and
    expects others."""

    reads: list[int]
    recipients: dict[int, tuple[int, ...]]
    expects: list[int]


def divided(rank: int, posts: Sequence[Any], nodes: Sequence[int]) -> Work:
    """The work of a rank. Where all can read everything, only the ranks of its own node matter to it."""
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
    return Work(reads, dict(zip(reads, recipients, strict=True)), numbers[share.expects].tolist())


def known(saved: SavedState, numbers: Sequence[int]) -> npt.NDArray[np.intp]:
    """Blobs by their numbers among those of all ranks: a rank is only given what it knows of."""
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
    """As the steps from each to the next, which are alike."""
    return _pack(np.diff(ascending, prepend=0).astype("<i8"))


def _unpack_numbers(text: str) -> npt.NDArray[np.int64]:
    return np.cumsum(np.frombuffer(_unpack(text), "<i8"), dtype=np.int64)
