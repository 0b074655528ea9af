"""Reads one checkpoint in one location, either from snapshots in this node's memory or from a store, and divides the
reads among ranks.

`RestoreSource.open` creates the `SavedState` of the checkpoint, and `read` reads its chunks and verifies each before
use. If no rank can see all of a checkpoint (in memory, or on node-local disks), each rank first describes what it sees
with `describe`.

To divide the reads, each rank posts the chunks that it needs, then computes what it reads. If possible, a rank itself
reads the chunks that it needs, from the memory and the folders of its node. Otherwise another rank sends them. If
several ranks of a node need the same chunk from a bucket, one of them downloads it and sends it to the others. `assign`
decides this. It is pure, so every rank computes the same result. Ranks post global chunk numbers, because a rank may
have the chunk tables of only a few ranks.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.core.checkpoint import read
from ckpt.core.checkpoint.write import build_table
from ckpt.core.format.boxes import Box
from ckpt.core.format.columns import I64
from ckpt.core.format.digest import DIGEST_SIZE, chunk_digest
from ckpt.core.format.kernels import Room, put
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId, SharedLayout, data_key, rank_of
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.format.table import Table
from ckpt.core.format.values import Json
from ckpt.core.ipc.arena import LOCK, Arena, Label
from ckpt.core.log.run_log import Commit
from ckpt.core.state.filler import Filler, Target
from ckpt.core.state.placement import mismatch
from ckpt.errors import CorruptError, StoreError, TransferError
from ckpt.store import folder_of

MEMORY_THREADS = max(2, min(8, len(os.sched_getaffinity(0))))

Mask = npt.NDArray[np.bool_]
Sink = Callable[[int, memoryview], None]
"""Function `sink(chunk, bytes)`. Several threads call it, and the memory is valid only until it returns."""


class RestoreSource(ABC):
    """One checkpoint in one location, as seen by this rank.

    - `undone`: a later restore rolled back to an earlier step, so the checkpoint is not in the present history.
    - `partial`: True if ranks see different files or snapshots of it. `described`: all ranks' descriptions, or None.
    - `repaired`: damaged data that was read from another tier. `damaged`: True if any rank has found damage.
    - `term`: the value that rank 0 returned when it began a term with this checkpoint.
    """

    def __init__(self, checkpoint: CheckpointId, tier: str, *, partial: bool, undone: bool) -> None:
        self.checkpoint, self.tier, self.partial, self.undone = checkpoint, tier, partial, undone
        self.described: list[Json] | None = None
        self.repaired: list[str] = []
        self.damaged = False
        self.term: Json = None
        self._saved: SavedState | None = None

    @abstractmethod
    def describe(self) -> Json:
        """Return a description of the snapshots or manifests that this rank sees, for the other ranks."""

    @abstractmethod
    def open(self, described: Sequence[Json], known: Layout | None = None) -> None:
        """Read the metadata of the checkpoint. Raises CorruptError or StoreError if this source cannot be used.

        described: the descriptions from all ranks, if the source is `partial`
        known: the layout of the live state, which is reused if the checkpoint has the same layout
        """

    @property
    def saved(self) -> SavedState:
        assert self._saved is not None
        return self._saved

    @property
    def verified(self) -> bool:
        """Return True if all bytes are compared with digests that were computed while the trainer lived."""
        return self.saved.digested

    @abstractmethod
    def narrow(self, wanted: Mapping[Key, Iterable[Box]]) -> None:
        """Extend `saved` by the chunks that contain these boxes of the named tensors."""

    @abstractmethod
    def readable(self) -> Mask:
        """Return a mask of the chunks of `saved` that this rank can read."""

    @abstractmethod
    def read(self, chunks: Sequence[int], sink: Sink, room: Room | None = None) -> None:
        """Read and verify chunks. Pass them to `sink`, or write them to the addresses that `room` returns. After an
        error, the written data must not be used."""

    @property
    def remote(self) -> bool:
        """Return True if a read needs a network request. Then the ranks of a node share the chunks that they read."""
        return False

    def close(self) -> None:
        self._saved = None


@dataclass(frozen=True)
class HeldSnapshot:
    """A sealed slot of an arena on this node. `digests`: digests of all chunks, then of the plain values; None if
    unknown. `late`: True if the digests were computed so late that they do not reveal earlier damage."""

    arena: Arena
    slot: int
    label: Label
    layout: Layout
    digests: bytes | None
    late: bool = False

    @property
    def checkpoint(self) -> CheckpointId:
        assert self.label.checkpoint is not None
        return self.label.checkpoint

    def layout_or(self, known: Layout | None) -> Layout:
        """Return the layout of the snapshot. Return the object `known` if it has the same digest."""
        return known if known is not None and known.digest == self.label.layout else self.layout

    def values(self) -> bytes:
        return bytes(self.arena.values(self.slot, self.label))

    def check(self) -> None:
        """Raise CorruptError if the snapshot was overwritten, or if its size is not that of its layout."""
        if self.arena.settled(self.slot) != self.label:
            raise CorruptError(
                f"the snapshot of step {self.checkpoint.step} in memory was overwritten while it was read"
            )
        if self.label.data_size != self.layout.arrangement.data_size:
            raise CorruptError("the snapshot in memory does not have the size of its layout")


class MemorySource(RestoreSource):
    """The snapshots of one checkpoint in the memory of this node, from any of the ranks that saved it."""

    def __init__(
        self,
        checkpoint: CheckpointId,
        snapshots: Sequence[HeldSnapshot],
        *,
        alone: bool,
        undone: bool = False,
        describes: Iterable[int] | None = None,
    ) -> None:
        """`describes`: the ranks whose snapshots this rank describes (default: all)."""
        super().__init__(checkpoint, "memory", partial=not alone, undone=undone)
        self._here = {s.layout.rank: s for s in snapshots}
        self._describes = set(self._here if describes is None else describes)
        self._digested: set[int] = set()  # ranks whose digests are known
        self._late = False  # True if some digests were computed late

    def describe(self) -> Json:
        return [
            {
                "layout": snapshot.layout.to_json(),
                "values": snapshot.values().decode("utf-8", "replace"),
                "digests": None if snapshot.digests is None else base64.b64encode(snapshot.digests).decode(),
                "late": snapshot.late,
            }
            for rank, snapshot in self._here.items()
            if rank in self._describes
        ]

    def open(self, described: Sequence[Json], known: Layout | None = None) -> None:
        for snapshot in self._here.values():
            snapshot.check()
        own = ((s.layout_or(known), s.values(), s.digests, s.late) for s in self._here.values())
        seen: dict[int, tuple[Layout, list[Any], bytes | None]] = {}
        late = set[int]()
        for layout, values, digests, so_late in _told(described) if described else own:
            before = seen.get(layout.rank)
            if before is None or (before[2] is None and digests is not None):
                seen[layout.rank] = (layout, _values(values, digests, layout), digests)
                (late.add if so_late else late.discard)(layout.rank)
        self._late = bool(late)
        world = max(layout.world for layout, _, _ in seen.values())
        if missing := sorted(set(range(world)) - seen.keys()):
            raise CorruptError(f"the snapshots of ranks {', '.join(map(str, missing[:8]))} are no longer in memory")
        ranks = [seen[rank] for rank in range(world)]
        tables = [build_table(la, data_key(self.checkpoint, la.rank), digests, 0) for la, _, digests in ranks]
        self._digested = {la.rank for la, _, digests in ranks if digests is not None}
        digested = len(self._digested) == world
        layouts = [layout for layout, _, _ in ranks]
        self._saved = SavedState(layouts, [values for _, values, _ in ranks], tables, digested=digested)

    @property
    def verified(self) -> bool:
        return self.saved.digested and not self._late

    def narrow(self, wanted: Mapping[Key, Iterable[Box]]) -> None:
        """Do nothing, because all chunks are already known."""

    def readable(self) -> Mask:
        table = self.saved.table
        here = np.array([rank_of(key) in self._here for key in table.files], np.bool_)
        return here[table.file]

    def read(self, chunks: Sequence[int], sink: Sink, room: Room | None = None) -> None:
        numbers, table = np.array(chunks, np.int64), self.saved.table
        ranks = np.array([rank_of(key) for key in table.files], np.int64)[table.file[numbers]]
        with ThreadPoolExecutor(MEMORY_THREADS, "ckpt-restore") as pool:
            works = [
                pool.submit(self._read, self._here[rank], part, sink, room)
                for rank in sorted(set(ranks.tolist()))
                for part in _shares(numbers[ranks == rank], table.length)
            ]
            for work in works:
                work.result()
        for snapshot in self._here.values():
            snapshot.check()  # another process may have overwritten it during the read

    def _read(self, snapshot: HeldSnapshot, chunks: I64, sink: Sink, room: Room | None) -> None:
        table, memory = self.saved.table, snapshot.arena.data(snapshot.slot)
        digested = snapshot.layout.rank in self._digested
        places = np.zeros(len(chunks), np.int64) if room is None else room(chunks)
        there = chunks[places > 0]
        offsets, lengths = table.offset[there], table.length[there]
        for i in put(memory, offsets, lengths, table.digest[there] if digested else None, places[places > 0]):
            raise self._damaged(int(there[i]))
        others = chunks[places == 0]
        rows = zip(others.tolist(), table.offset[others].tolist(), table.length[others].tolist(), strict=True)
        for chunk, offset, length in rows:
            data = memory[offset : offset + length]
            if snapshot.layout.accelerated and offset // LOCK != (offset + length - 1) // LOCK:
                # A device cannot copy memory that crosses the boundary between two page-locked pieces.
                data = memoryview(bytearray(data))
            if digested and chunk_digest(data) != table.digest[chunk].tobytes():
                raise self._damaged(chunk)
            sink(chunk, data)

    def _damaged(self, chunk: int) -> CorruptError:
        name = self.saved.table.name_of(chunk)
        return CorruptError(f"{name} is damaged in memory: its bytes do not match their digest")

    @property
    def world(self) -> int:
        """Return the number of ranks that saved this checkpoint."""
        return next((s.layout.world for s in self._here.values()), 0)

    def place_of(self, rank: int) -> tuple[Arena, int] | None:
        """Return the arena and slot of a rank's snapshot, or None if it is not on this node."""
        found = self._here.get(rank)
        return None if found is None else (found.arena, found.slot)


def _told(described: Sequence[Json]) -> Iterator[tuple[Layout, bytes, bytes | None, bool]]:
    """Yield the layout, plain values and digests of each described snapshot, and True if the digests were late."""
    for one in (one for each in described for one in each or ()):
        digests = None if one["digests"] is None else base64.b64decode(one["digests"])
        yield Layout.from_json(one["layout"]), one["values"].encode(), digests, bool(one["late"])


def _shares(chunks: I64, length: I64) -> list[I64]:
    """Divide chunks into a group for each thread, with about the same number of bytes in each group."""
    ends = np.cumsum(length[chunks])
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], MEMORY_THREADS + 1)[1:-1])
    return [part for part in np.split(chunks, cuts) if len(part)]


def _values(text: bytes, digests: bytes | None, layout: Layout) -> list[Any]:
    if digests is not None:
        if len(digests) != (layout.arrangement.chunk_starts[-1] + 1) * DIGEST_SIZE:
            raise CorruptError("the digests of the snapshot in memory do not match its layout")
        if digests[-DIGEST_SIZE:] != chunk_digest(text):
            raise CorruptError("the plain values of the snapshot in memory do not match their digest")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise CorruptError("the plain values of the snapshot in memory are damaged") from None
    if not isinstance(values, list):
        raise CorruptError("the plain values of the snapshot in memory are not a list")
    return values


class StoreSource(RestoreSource):
    """A committed checkpoint in a store. `commit`: its log record in this store, or None if the checkpoint is `partial`
    and this node's disk has no manifest of it."""

    def __init__(
        self,
        url: str,
        checkpoint: CheckpointId,
        commit: Commit | None,
        *,
        partial: bool = False,
        undone: bool = False,
        describing: bool = True,
        others: Sequence[str] = (),
    ) -> None:
        """
        - `others`: tiers with the same checkpoint, from which to replace damaged data.
        - `describing`: True if this rank describes a `partial` checkpoint for all ranks of its node.
        """
        super().__init__(checkpoint, url, partial=partial, undone=undone)
        self._commit, self._others, self._describing = commit, others, describing

    def describe(self) -> Json:
        """Return the manifests and chunk tables that are on a disk of this node."""
        if not self.partial or self._commit is None or not self._describing:
            return None
        manifest = read.run(self._load(self._commit))
        return [
            {
                "rank": part.rank,
                "world": part.world,
                "layout": part.layout.text,
                "values": part.values,
                "table": base64.b64encode(part.table).decode(),
            }
            for part in manifest.manifests
        ]

    def open(self, described: Sequence[Json], known: Layout | None = None) -> None:
        if not self.partial:
            self._saved = read.run(self._open(known))
            return
        parts = {part["rank"]: part for one in described for part in one or ()}
        layouts, tables = list[Layout](), list[Table]()
        for rank, part in sorted(parts.items()):
            table = Table.from_bytes(base64.b64decode(part["table"]), f"the table of rank {rank}")
            shared = SharedLayout.of_text(part["layout"])
            layouts.append(Layout.of_manifest(shared, rank, part["world"], table.columns.specs()))
            tables.append(table)
        if len(layouts) != (world := layouts[0].world if layouts else "all"):
            raise CorruptError(f"step {self.checkpoint.step}: reachable disks have {len(layouts)} of {world} manifests")
        self._saved = SavedState(layouts, [parts[rank]["values"] for rank in sorted(parts)], tables)

    @property
    def verified(self) -> bool:
        return self.saved.digested and (self._commit is None or self._commit.reason != "late")

    @property
    def remote(self) -> bool:
        return folder_of(self.tier) is None

    async def _load(self, commit: Commit) -> read.Manifests:
        async with read.opened(self.tier) as store:
            return await read.load_all(store, commit)

    async def _open(self, known: Layout | None) -> SavedState:
        async with read.opened(self.tier) as store:
            if self._commit is None:  # the ranks agreed on this checkpoint, but its log record was not posted
                self._commit = (await read.open_run(self.tier, store)).state.commits.get(self.checkpoint)
            if self._commit is None:
                raise CorruptError(f"step {self.checkpoint.step} is no longer in {self.tier}")
            found = await read.consists_of(store, self._commit)
        return read.saved_by(found, self._commit, (self.tier, *self._others), self.repaired.append, known)

    def narrow(self, wanted: Mapping[Key, Iterable[Box]]) -> None:
        self._saved = self.saved.narrowed(wanted)

    def readable(self) -> Mask:
        table = self.saved.table
        if not self.partial:
            return np.ones(len(table.length), np.bool_)
        mine = {rank for rank, _ in self._commit.manifests} if self._commit is not None else set()
        return np.array([rank_of(key) in mine for key in table.files], np.bool_)[table.file]

    def read(self, chunks: Sequence[int], sink: Sink, room: Room | None = None) -> None:
        read.run(self._read(chunks, sink, room))

    async def _read(self, chunks: Sequence[int], sink: Sink, room: Room | None) -> None:
        async with read.opened(self.tier) as store:
            self.repaired += await read.fetch_repaired(
                store, self.checkpoint, self.saved.table, chunks, sink, self._others, room
            )


async def fill_from_store(
    url: str, checkpoint: CheckpointId, saved: SavedState, fills: Mapping[Key, list[Target]], others: Sequence[str] = ()
) -> None:
    """Read and verify the data of these targets from a checkpoint in a store, without agreement between ranks.

    `others`: see `StoreSource`. Raises CorruptError naming a tensor that is intact in no tier. Other tensors may
    already be filled at that time."""
    boxes = {key: [target.box for target in targets] for key, targets in fills.items()}
    saved = await asyncio.to_thread(saved.narrowed, boxes)
    filler = Filler(saved, fills)
    async with read.opened(url) as store:
        await read.fetch_repaired(store, checkpoint, saved.table, filler.chunks, filler.add, others, filler.places)
    filler.finish()


# -- division of the reads among ranks --


Bools = npt.NDArray[np.bool_]


def fitting(posts: list[Any], saved: SavedState | None) -> list[Any]:
    """Return the posts. Raises MismatchError if the state of a rank does not fit, or if no rank needs a saved tensor
    (`saved` None: not checked)."""
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
                [f"{name} was saved by {_who(saved, name)}, but no rank has it in its state here" for name in lost]
            )
    return posts


def _unclaimed(saved: SavedState, wanted: Mask) -> list[str]:
    """List tensors of modules and optimizers that no rank needs, because training without them would differ."""
    claimed = {saved.keys[i][0] for i in np.flatnonzero(wanted).tolist()}
    return [
        name
        for name in sorted(saved.shared_names() - claimed)
        if any(saved.tensors[name, instance].spec.nbytes for instance in saved.instances(name))
    ]


def wanted_tensors(saved: SavedState, filler: Filler) -> str:
    """Return a packed mask of the tensors of which this rank needs any part, for `fitting`."""
    shards = np.unique(saved.shard_of_chunk[filler.chunks])
    place = {key: i for i, key in enumerate(saved.keys)}
    names, instances = saved.table.columns.names, saved.table.columns.instance
    found = np.zeros(len(place), np.bool_)
    found[[place[names[i], int(instances[i])] for i in shards.tolist()]] = True
    return _pack(np.packbits(found))


def wishes(source: RestoreSource, filler: Filler) -> dict[str, Json]:
    """Return the post of a rank: needed tensors, needed chunks and their sizes, and readable chunks (None for all)."""
    saved, readable = source.saved, source.readable()
    can = None if readable.all() else _file_numbers(saved.numbers[readable[: saved.table.owned]])
    return {
        "tensors": wanted_tensors(saved, filler),
        "wants": _file_numbers(saved.numbers[filler.chunks]),
        "sizes": _pack(saved.table.length[filler.chunks].astype("<i4")),
        "can": can,
    }


def _who(saved: SavedState, name: str) -> str:
    instances = saved.instances(name)
    return "all ranks" if instances[0] < 0 else "rank " + ", ".join(map(str, instances[:8]))


def verified(saved: SavedState, filler: Filler) -> Callable[[int, memoryview], None]:
    """Return a function that verifies a chunk from another rank, and fills it into its tensor."""
    local = dict(zip(saved.numbers[filler.chunks].tolist(), filler.chunks, strict=True))

    def take(number: int, data: memoryview) -> None:
        chunk = local[number]
        expected = int(saved.table.length[chunk])
        if len(data) != expected or (saved.digested and chunk_digest(data) != saved.table.digest[chunk].tobytes()):
            # The checkpoint may be intact, so in the retry each rank reads for itself.
            raise TransferError(
                f"a piece of a tensor ({number}) was damaged on its way from another rank", retryable=True
            )
        filler.add(chunk, data)

    return take


@dataclass(frozen=True)
class Work:
    """The work of a rank, with global chunk numbers.

    `recipients`: for each chunk that the rank reads, the other ranks that get it. `expects`: chunks to get, by sender.
    """

    reads: list[int]
    recipients: dict[int, tuple[int, ...]]
    expects: dict[int, list[int]]


def divided(rank: int, posts: Sequence[Any], nodes: Sequence[int]) -> Work:
    """Return the work of a rank, which depends only on the ranks of its node if all ranks can read all chunks."""
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

    - `reads`: the chunks that the rank reads, ascending. `recipients`: for each of them, the other ranks that get it.
    - `expects`: the chunks that other ranks send to it, ascending. `senders`: for each of them, the sending rank.
    """

    reads: I64
    recipients: tuple[tuple[int, ...], ...]
    expects: I64
    senders: I64


def assign(rank: int, sizes: I64, wants: Bools, can_read: Bools, nodes: Sequence[int]) -> RankReads:
    """Return the work of `rank`. With equal arguments on all ranks, the results of the ranks fit together.

    `sizes`: bytes of each chunk. `wants` and `can_read`: ranks x chunks. `nodes`: the node of each rank. If a node
    needs a chunk and can read it, one of its ranks reads it, preferably a rank that needs it. If no rank of the node
    can read it, a rank of another node sends it, preferably a rank that reads it for its own node. Ranks read about the
    same number of bytes, in runs that are as long as possible. Raises StoreError if no rank can read a needed chunk.
    """
    lost = int(np.count_nonzero(wants.any(0) & ~can_read.any(0)))
    if lost:
        raise StoreError(f"no rank can read {lost} of the requested tensor pieces")
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
    """Return (nodes x chunks) the rank that reads a chunk for the ranks of a node, or -1 if none of them needs it.

    If no node depends on another node, fill only the row of node `own`, so that the time does not grow with the job.
    """
    members = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
    wanted = np.array([wants[ranks].any(0) for ranks in members])
    needed = wanted & ~np.array([can_read[ranks].any(0) for ranks in members])
    far = np.flatnonzero(needed.any(0))  # chunks that a node needs but cannot read itself
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
    """Assign each chunk to one of its eligible ranks, in `reader`, and add its bytes to the rank's `load`.

    Chunks with the same eligible ranks are assigned in runs. The rank with the least load gets the first run. The
    lengths of the runs equalize the load. All numbers are integers, so that every machine computes the same result.
    """
    for rows, chunks in _groups(eligible):
        able = ranks[rows]
        able = able[np.argsort(load[able], kind="stable")]
        ends = np.cumsum(sizes[chunks])
        total = int(ends[-1])
        before = load[able]
        levels = -((total + np.cumsum(before)) // -np.arange(1, able.size + 1))  # equal load if the first 1, 2, … read
        shares = np.minimum(np.cumsum(np.maximum(levels.min() - before, 0)), total)
        cuts = np.searchsorted(2 * ends - sizes[chunks], 2 * shares, side="right")  # a chunk's middle decides
        reader[chunks] = np.repeat(able, np.diff(cuts, prepend=0))
        load[able] += np.diff(np.concatenate([[0], ends])[cuts], prepend=0)


def _groups(table: Bools) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Group equal columns that are not empty. Return (rows that are set, columns ascending), fewest rows first."""
    packed = np.packbits(table, axis=0)
    order = np.lexsort(packed)
    packed = packed[:, order]
    runs = np.split(order, np.flatnonzero((packed[:, 1:] != packed[:, :-1]).any(0)) + 1)
    groups = [(np.flatnonzero(table[:, run[0]]), run) for run in runs if run.size]
    return sorted((g for g in groups if g[0].size), key=lambda g: (g[0].size, int(g[1][0])))


def known(saved: SavedState, numbers: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return the chunks of this rank's table that have these global numbers. Raises CorruptError if one is unknown."""
    found = np.minimum(np.searchsorted(saved.numbers, numbers), max(0, len(saved.numbers) - 1))
    if (saved.numbers[found] != np.asarray(numbers, np.int64)).any():
        raise CorruptError("the ranks number the chunks differently")
    return found


def _pack(column: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _unpack_mask(text: str, count: int) -> Mask:
    return np.unpackbits(np.frombuffer(_unpack(text), np.uint8), count=count).astype(np.bool_)


def _file_numbers(ascending: npt.NDArray[np.int64]) -> str:
    """Pack ascending numbers as differences, which compress well because they are similar."""
    return _pack(np.diff(ascending, prepend=0).astype("<i8"))


def _unpack_numbers(text: str) -> npt.NDArray[np.int64]:
    return np.cumsum(np.frombuffer(_unpack(text), "<i8"), dtype=np.int64)
